/* What writers of bodies (graph/bodies.def) see of a node, and helpers to write ONNX text with. */
#ifndef ENGRAFT_GRAPH_BODIES_H
#define ENGRAFT_GRAPH_BODIES_H

#include "graph/graph.h"

typedef struct egi_body {
  const egi_graph *graph;
  const egi_node *node;
  egi_text *text; /* the nodes between the braces */
} egi_body;

/* Appends the nodes that compute the formal outputs that the node wants from the formal inputs that it has. The text
 * may depend on attributes, on which operands are there, and on types and ranks where these are known; sizes are
 * computed by nodes (Shape), which fold away. Calls of functions and other fused operators must not stand in it.
 * Returns false where the node's form has no body: then it stays as it is. */
typedef bool (*egi_body_writer)(egi_body *body);
#define EGI_BODY(symbol, inputs, outputs, writer) bool egi_body_##writer(egi_body *body);
#include "graph/bodies.def"
#undef EGI_BODY

bool egi_body_has(const egi_body *body, unsigned input);
/* Whether the formal output is there: it or one behind it is wanted. */
bool egi_body_wants(const egi_body *body, unsigned output);
/* EG_DTYPE_UNDEFINED and -1 where not known: an imported file's functions are looked at before types are inferred. */
eg_dtype egi_body_dtype(const egi_body *body, unsigned input);
int egi_body_rank(const egi_body *body, unsigned input);
/* Size of an axis (negative: from the end), -1 where it is not a known number. */
int64_t egi_body_size(const egi_body *body, unsigned input, int axis);
/* "NAME = ..." for a number in the type of value `like`, a list of integers, one integer of rank 0. */
void egi_body_number(egi_body *body, const char *name, double number, const char *like);
void egi_body_integers(egi_body *body, const char *name, const int64_t *values, unsigned count);
void egi_body_integer(egi_body *body, const char *name, int64_t value);
/* "NAME = FROM" in float32, where narrow floats are to be computed with more digits; float64 stays. FROM has the type
 * of the input. */
void egi_body_widen(egi_body *body, const char *name, const char *from, unsigned input);

/* axes = the dims from the attribute `axis` on; false where they cannot be counted from the end. */
bool egi_body_axes(egi_body *body);
/* w = the weight of a node with the attributes of Linear as floats [out, in]; [in, out] where it is turned. Its scales
 * are input `scales`, zero points and groups come behind them. False where it is stored in no such way. */
bool egi_body_stored_weight(egi_body *body, unsigned scales);
bool egi_body_is_turned(const egi_body *body);
/* NAME = the value FROM, which has the rank of one input, summed to the shape of LIKE, another input. */
typedef struct egi_body_sum {
  const char *name, *from, *like;
  unsigned from_input, like_input;
} egi_body_sum;
bool egi_body_sum_to(egi_body *body, egi_body_sum sum);

/* "Name (a, b) => (c) { ... }" for a node; *out_is_written false: it has no body. */
eg_status egi_body_write(const egi_graph *graph, const egi_node *node, egi_text *text, bool *out_is_written);
/* The text as a function at the end of the module's list, with the attributes of the node as defaults. */
eg_status egi_body_parse(egi_module *module, const char *text, const char *overload, const egi_node *node);

/* Pieces of attention bodies (bodies_attention.c), for the values q4, k_all and v_all, [batch, heads, rows, width].
 * Scores: batch, q_heads, kv_heads, share, queries, keys, value_width (sizes), v5, and scores [batch, q_heads, queries,
 * keys], scaled and soft-capped by the node's attributes. */
void egi_body_add_scores(egi_body *body);
/* rows_ [queries, 1] and columns [1, keys]: numbers from 0. */
void egi_body_add_positions(egi_body *body);
/* "NAME = EXPRESSION", and with the condition so far: the name of both together. */
const char *egi_body_add_condition(egi_body *body, const char *valid, const char *name, const char *expression);
/* probabilities of `scores` where `valid`; NULL: everywhere. */
void egi_body_add_probabilities(egi_body *body, const char *valid, const char *scores);
/* y4 = probabilities · values, in the type of q. */
void egi_body_add_mixture(egi_body *body);
/* q4, k_all and v_all of Attention without a past, 3-D or 4-D. */
void egi_body_add_heads(egi_body *body, bool is_flat);
/* Which keys a query may look at: the last condition's name, NULL: all of them. Of Attention, whose mask may add to the
 * scores: their new name; and of engraft.Attention, whose inputs for valid keys and bounds are these. */
bool egi_body_has_whole_mask(const egi_body *body, bool has_past);
const char *egi_body_add_mask(egi_body *body, bool has_past, const char **scores);
const char *egi_body_add_kind(egi_body *body, unsigned key_valid, unsigned first_key);

/* Pieces of bodies of mixtures of experts. The router (bodies_route.c), for the value `logits`: chosen i64 [T, k] and
 * weights_ [T, k], flat_logits [T, E], nothing and unit (0 and 1 in the type of `like`), the lists last = [-1], k. */
struct egi_moe;
struct egi_ragged;
void egi_body_add_router(egi_body *body, const struct egi_moe *moe, bool has_correction, const char *like);
/* bodies_experts.c: the matrices [E, N, K], numbers in the type of `like`, and the biases [E, N]. */
void egi_body_add_experts(egi_body *body, const struct egi_ragged *ragged, const char *name, const char *like);
void egi_body_add_expert_biases(egi_body *body, const struct egi_ragged *ragged, const char *name);

#endif
