/* The rule engine: rewrites given as data. A rule is a pattern in ONNX text, a check and a replacement in ONNX text.
 *
 * A pattern, "(x, w) => (y) { r = Sqrt (x) y = Mul (r, w) }", is compared with the graph by data flow from its first
 * output upwards. Its inputs are wildcards, the same value wherever one name stands. Read as equal are: operands of
 * commutative operators in any order; x with a Cast to the type of the result or a wider one, or an Identity, behind
 * it; a constant number however it is stored; division by a number and multiplication by its inverse, by a square root
 * and by the power -0.5, x · x and the power 2, x - c and x + (-c), -x and x · -1. An attribute in a pattern must have
 * that value, `@name` captures it. Outputs behind the first are values on the way to it.
 *
 * Values inside a match that are used outside block the rewrite, unless the rule allows sharing. The replacement's
 * inputs are inputs of the pattern, values of it, or what the check has bound; all floats are brought to the widest
 * type among them and the results, and the results back to their types.
 *
 * A sweep visits each node once a rule and a match has bounded cost: linear in the graph. It ends because a match
 * removes its root, and no rule's replacement holds its own pattern. */
#ifndef ENGRAFT_PASSES_RULES_H
#define ENGRAFT_PASSES_RULES_H

#include "passes/passes.h"

typedef struct egi_match egi_match;

typedef struct egi_rule {
  const char *name;
  const char *const *patterns; /* alternatives, tried in order; the inputs' names are the same in all */
  size_t n_patterns;
  const char *replacement;
  bool (*check)(egi_match *match); /* NULL: always; false: egi_match_refuse() has said why */
  bool can_share;                  /* values inside that others use stay; the replacement computes them again */
  void *userdata;
} egi_rule;

/* Rules in order, one sweep each; what they leave dead or repeated goes. Fills the report's rules. */
eg_status egi_rules_run(egi_pass_run *run, egi_graph *graph, const egi_rule *rules, size_t n_rules);

/* Reads the texts of a rule as a run would, without a graph. */
eg_status egi_rule_check(eg_context *ctx, const egi_rule *rule);

/* A node that a pass wants replaced by the text's nodes: the text's inputs and outputs are the node's, in order. */
typedef struct egi_replacement {
  egi_node_id node;
  const char *text;
} egi_replacement;
/* All of them, each node at most once. EG_ERROR_ARGUMENT where a text does not fit its node. */
eg_status egi_rules_replace(egi_pass_run *run, egi_graph *graph, const egi_replacement *list, size_t count);

/* ---- for checks ----------------------------------------------------------------------------------------------- */

egi_graph *egi_match_graph(const egi_match *match);
void *egi_match_userdata(const egi_match *match);
/* Which alternative it is. */
size_t egi_match_pattern(const egi_match *match);
/* What an input or value of the pattern stands for; 0: the alternative has none of that name. */
egi_value_id egi_match_value(const egi_match *match, const char *name);
/* As egi_match_value(), before casts that lose nothing. */
egi_value_id egi_match_source(const egi_match *match, const char *name);
/* A number that is known, however it is stored. */
bool egi_match_scalar(const egi_match *match, const char *name, double *out);
/* An attribute captured with @; NULL: absent. */
const egi_attribute *egi_match_attribute(const egi_match *match, const char *name);
/* Axes that a value of the pattern names are the last one of `data` alone. */
bool egi_match_is_last_axis(const egi_match *match, const char *axes, const char *data);
/* Size of a value's axis from the end (1: the last) when it is a number. */
bool egi_match_size(const egi_match *match, const char *name, int from_end, int64_t *out);
/* False, and the reason for the report; a literal text. */
bool egi_match_refuse(egi_match *match, const char *reason);
/* An attribute @name of the replacement. */
bool egi_match_set(egi_match *match, const egi_attribute *attribute);
/* An input of the replacement that the pattern has none for; value 0: it is left out. */
bool egi_match_bind(egi_match *match, const char *name, egi_value_id value);
/* Nodes that a check adds once nothing can be refused any more; errors are looked at afterwards. */
egi_emitter *egi_match_emitter(egi_match *match);

/* The number that a value is, through casts, layout and Constant nodes. */
bool egi_constant_scalar(const egi_graph *graph, egi_value_id value, double *out);
/* `value` before Identity nodes and casts that lose nothing. */
egi_value_id egi_before_casts(const egi_graph *graph, egi_value_id value);
/* Every number of type `from` is one of type `to`. */
bool egi_cast_is_lossless(eg_dtype from, eg_dtype to);

/* ---- between rules*.c ----------------------------------------------------------------------------------------- */

enum {
  EGI_MATCH_NODES = 64,
  EGI_MATCH_VALUES = 128,
  EGI_MATCH_GOALS = 256,
  EGI_MATCH_INSIDE = 128,
  EGI_MATCH_ATTRIBUTES = 16,
  EGI_MATCH_EXTRAS = 16,
  EGI_MATCH_STEPS = 4096
};

/* What is still to be shown: sign · found^exponent is what the pattern's value `wanted` stands for. Only constants and
 * powers meet another sign or exponent than 1. */
typedef struct egi_goal {
  egi_value_id wanted, found;
  double exponent;
  bool is_negated;
} egi_goal;

typedef struct egi_miss {
  egi_node_id node; /* of the graph; 0: none yet */
  unsigned depth;   /* nodes of the pattern that were found; a whole pattern counts more than any part */
  const char *reason;
  egi_op wanted; /* NONE: `reason` says it all */
} egi_miss;

struct egi_match {
  egi_graph *graph;
  const egi_rule *rule;
  const egi_graph *pattern;
  size_t alternative;
  egi_node_id root;
  eg_dtype dtype; /* of the root's result */
  bool is_whole;  /* the pattern is there: what is left is the check */
  egi_value_id values[EGI_MATCH_VALUES];
  egi_value_id bound[EGI_MATCH_VALUES]; /* pattern values in the order they were bound */
  egi_node_id nodes[EGI_MATCH_NODES];
  egi_node_id bound_nodes[EGI_MATCH_NODES];
  egi_node_id inside[EGI_MATCH_INSIDE];
  egi_goal goals[EGI_MATCH_GOALS];
  egi_attribute attributes[EGI_MATCH_ATTRIBUTES];
  const char *extra_names[EGI_MATCH_EXTRAS];
  egi_value_id extra_values[EGI_MATCH_EXTRAS];
  unsigned n_bound, n_bound_nodes, n_inside, n_goals, n_attributes, n_extras, n_steps;
  egi_miss miss; /* the deepest of this candidate */
  egi_emitter emit;
};

/* Whether a node of operator `op` can be the root of the pattern. */
bool egi_match_can_start(const egi_graph *pattern, egi_op op);
/* Compares the pattern with the graph from `root` upwards; the match is filled in. */
bool egi_match_run(egi_match *match, const egi_graph *pattern, egi_node_id root);
void egi_match_miss(egi_match *match, egi_node_id node, const char *reason, egi_op wanted);
bool egi_match_fail(egi_match *match, egi_node_id node, const char *reason); /* false */
/* The node that makes `value`, or 0. */
egi_node_id egi_maker(const egi_graph *graph, egi_value_id value);
/* The goal's value is the number, or the list of integers, of a pattern's Constant node. */
bool egi_match_constant(egi_match *match, const egi_goal *goal, const egi_node *constant);
/* A Cast or Identity that leaves nothing out that the match's result could show. */
bool egi_match_is_transparent(const egi_match *match, const egi_node *node, egi_value_id value);
/* One value, casts that lose nothing aside, or constants of one number. */
bool egi_values_are_same(const egi_graph *graph, egi_value_id a, egi_value_id b);
/* Compares the attributes that the pattern's node has, and takes those it asks for. */
bool egi_match_attributes(egi_match *match, const egi_node *wanted, egi_node_id node);
/* Appends the replacement and gives its results the place of the pattern's; *out_done false: it would change a shape.
 */
eg_status egi_match_replace(egi_match *match, const egi_graph *replacement, bool *out_done);

#endif
