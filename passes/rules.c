/* Runs rules over a graph: reads their text, offers them every node, replaces what matches, reports. */
#include "passes/rules.h"

#include <string.h>

typedef struct runner {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_module *texts; /* patterns and replacements as functions, two and more a rule */
  egi_uses uses;
  bool *is_output, *is_pinned; /* by value, as it was before the sweep: pinned values feed new nodes */
  uint32_t n_values;           /* rows of the above */
  egi_match match;
  egi_rule_report *reports;
  unsigned best_depth; /* of the rule's misses */
  unsigned deepest;    /* of the pass's */
  bool is_dirty;       /* nodes were added, used or not */
} runner;

/* ---- texts ----------------------------------------------------------------------------------------------------- */

static eg_status parse_text(runner *r, const egi_rule *rule, const char *text, egi_graph **out_graph) {
  char *whole = egi_arena_format(&r->arena, "<domain: \"rule\"> rule %s", text);
  if (whole == NULL) return EG_ERROR_MEMORY;
  eg_status status = egi_module_parse_function(r->texts, whole, strlen(whole));
  if (status != EG_OK) {
    const char *reason = egi_arena_format(&r->arena, "%s", eg_context_error(r->run->ctx));
    return reason != NULL ? egi_fail(r->run->ctx, status, "rule %s: %s", rule->name, reason) : EG_ERROR_MEMORY;
  }
  egi_graph *graph = r->texts->functions[r->texts->n_functions - 1].graph;
  if (graph->n_outputs == 0 || graph->n_outputs > EGI_MATCH_EXTRAS || graph->n_values > EGI_MATCH_VALUES ||
      graph->n_nodes > EGI_MATCH_NODES)
    return egi_fail(r->run->ctx, EG_ERROR_ARGUMENT, "rule %s: a text has no result, or too many values", rule->name);
  *out_graph = graph;
  return EG_OK;
}

static eg_status check_operators(const runner *r, const egi_rule *rule, const egi_graph *text) {
  for (egi_node_id id = 1; id < text->n_nodes; id++) {
    if (text->nodes[id].op == EGI_OP_UNKNOWN)
      return egi_fail(r->run->ctx, EG_ERROR_UNSUPPORTED, "rule %s: operator \"%s\" is not known", rule->name,
                      text->nodes[id].op_name);
  }
  return EG_OK;
}

/* Results of a pattern come from nodes; a replacement has as many as the pattern. */
static eg_status check_texts(runner *r, const egi_rule *rule, egi_graph *const *patterns, const egi_graph *text) {
  eg_context *ctx = r->run->ctx;
  for (size_t i = 0; i < rule->n_patterns; i++) {
    EG_TRY(check_operators(r, rule, patterns[i]));
    for (uint32_t j = 0; j < patterns[i]->n_outputs; j++) {
      if (patterns[i]->values[patterns[i]->outputs[j]].kind != EGI_VALUE_NODE)
        return egi_fail(ctx, EG_ERROR_ARGUMENT, "rule %s: a result of the pattern is an input of it", rule->name);
    }
    if (patterns[i]->n_outputs != text->n_outputs)
      return egi_fail(ctx, EG_ERROR_ARGUMENT, "rule %s: pattern and replacement have %u and %u results", rule->name,
                      patterns[i]->n_outputs, text->n_outputs);
  }
  return check_operators(r, rule, text);
}

/* ---- report ---------------------------------------------------------------------------------------------------- */

static const char *node_label(const egi_graph *graph, const egi_node *node) {
  if (node->name != NULL && node->name[0] != '\0') return node->name;
  return node->n_outputs > 0 && node->outputs[0] != 0 ? graph->values[node->outputs[0]].name : "";
}

static eg_status write_miss(runner *r, egi_rule_report *report) {
  const egi_miss *miss = &r->match.miss;
  const egi_node *node = &r->graph->nodes[miss->node != 0 ? miss->node : r->match.root];
  const char *op = node->op_name != NULL ? node->op_name : egi_op_get(node->op)->name;
  const char *wanted = miss->wanted != EGI_OP_NONE ? egi_op_get(miss->wanted)->name : "";
  report->nearest_miss =
      egi_arena_format(&r->graph->module->arena, "node \"%s\" (%s): %s%s%s", node_label(r->graph, node), op,
                       miss->reason, wanted[0] != '\0' ? " " : "", wanted);
  return report->nearest_miss != NULL ? EG_OK : EG_ERROR_MEMORY;
}

/* The candidate that came furthest stands in the report. */
static eg_status note_miss(runner *r, egi_rule_report *report) {
  if (r->match.miss.reason == NULL) return EG_OK;
  if (report->nearest_miss != NULL && r->match.miss.depth <= r->best_depth) return EG_OK;
  r->best_depth = r->match.miss.depth;
  return write_miss(r, report);
}

/* ---- uses ------------------------------------------------------------------------------------------------------ */

static eg_status prepare_sweep(runner *r) {
  egi_graph *graph = r->graph;
  r->n_values = graph->n_values;
  r->is_output = EGI_NEW(&r->arena, bool, graph->n_values);
  r->is_pinned = EGI_NEW(&r->arena, bool, graph->n_values);
  if (r->is_output == NULL || r->is_pinned == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < graph->n_outputs; i++) r->is_output[graph->outputs[i]] = true;
  return egi_graph_uses(graph, &r->arena, &r->uses);
}

static bool is_inside(const egi_match *match, egi_node_id node) {
  for (unsigned i = 0; i < match->n_inside; i++)
    if (match->inside[i] == node) return true;
  return false;
}

static bool is_result(const egi_match *match, egi_value_id value) {
  for (uint32_t i = 0; i < match->pattern->n_outputs; i++)
    if (match->values[match->pattern->outputs[i]] == value) return true;
  return false;
}

/* True when somebody outside the match takes the value. */
static bool is_needed(const runner *r, egi_value_id value) {
  if (value >= r->n_values) return true;
  if (r->is_output[value] || r->is_pinned[value]) return true;
  for (uint32_t i = r->uses.start[value]; i < r->uses.start[value + 1]; i++) {
    egi_node_id user = r->uses.list[i];
    if (r->graph->nodes[user].op != EGI_OP_NONE && !is_inside(&r->match, user)) return true;
  }
  return false;
}

static bool is_closed(runner *r) {
  egi_match *match = &r->match;
  for (unsigned i = 0; i < match->n_inside; i++) {
    const egi_node *node = &r->graph->nodes[match->inside[i]];
    for (unsigned j = 0; j < node->n_outputs; j++) {
      if (node->outputs[j] == 0 || is_result(match, node->outputs[j]) || !is_needed(r, node->outputs[j])) continue;
      egi_match_miss(match, match->inside[i], "its result is used outside the pattern", EGI_OP_NONE);
      return false;
    }
  }
  return true;
}

/* True when the node was removed: nobody takes a result of it, nodes of the match that are left included. */
static bool remove_unneeded(runner *r, egi_node_id id) {
  egi_graph *graph = r->graph;
  const egi_node *node = &graph->nodes[id];
  if (node->op == EGI_OP_NONE) return false;
  for (unsigned i = 0; i < node->n_outputs; i++) {
    egi_value_id value = node->outputs[i];
    if (value == 0) continue;
    if (value >= r->n_values || r->is_output[value] || r->is_pinned[value]) return false;
    for (uint32_t k = r->uses.start[value]; k < r->uses.start[value + 1]; k++)
      if (graph->nodes[r->uses.list[k]].op != EGI_OP_NONE) return false;
  }
  egi_graph_remove_node(graph, id);
  return true;
}

static void remove_inside(runner *r) {
  for (bool has_removed = true; has_removed;) {
    has_removed = false;
    for (unsigned i = 0; i < r->match.n_inside; i++)
      has_removed = remove_unneeded(r, r->match.inside[i]) || has_removed;
  }
}

/* What nodes from `first` on take stays: those that the check and the replacement added. */
static void pin_inputs(runner *r, egi_node_id first) {
  for (egi_node_id id = first; id < r->graph->n_nodes; id++) {
    const egi_node *node = &r->graph->nodes[id];
    for (unsigned i = 0; i < node->n_inputs; i++)
      if (node->inputs[i] < r->n_values) r->is_pinned[node->inputs[i]] = true;
  }
}

/* ---- sweep ----------------------------------------------------------------------------------------------------- */

static eg_status replace(runner *r, const egi_graph *replacement, egi_node_id first_new, egi_rule_report *report) {
  bool is_done = false;
  EG_TRY(egi_match_replace(&r->match, replacement, &is_done));
  pin_inputs(r, first_new);
  r->is_dirty = true;
  if (!is_done) {
    egi_match_refuse(&r->match, "the replacement has another shape");
    return note_miss(r, report);
  }
  r->run->has_changed = true;
  remove_inside(r);
  report->n_matched++;
  return EG_OK;
}

/* Offers one node to the alternatives of a rule. */
static eg_status visit(runner *r, const egi_rule *rule, egi_graph *const *patterns, const egi_graph *replacement,
                       egi_node_id root, egi_rule_report *report) {
  egi_match *match = &r->match;
  egi_node_id first_new = r->graph->n_nodes;
  bool is_candidate = false;
  match->miss = (egi_miss){0};
  match->emit = (egi_emitter){.graph = r->graph, .scope = r->graph->nodes[root].scope};
  for (size_t i = 0; i < rule->n_patterns; i++) {
    if (!egi_match_can_start(patterns[i], r->graph->nodes[root].op)) continue;
    is_candidate = true;
    match->alternative = i;
    if (!egi_match_run(match, patterns[i], root) || (!rule->can_share && !is_closed(r))) continue;
    bool is_match = rule->check == NULL || rule->check(match);
    EG_TRY(match->emit.status);
    if (!is_match) continue;
    report->n_tried++;
    return replace(r, replacement, first_new, report);
  }
  report->n_tried += is_candidate;
  return is_candidate ? note_miss(r, report) : EG_OK;
}

static eg_status read_rule(runner *r, const egi_rule *rule, egi_graph ***out_patterns, egi_graph **out_replacement) {
  egi_graph **patterns = EGI_NEW(&r->arena, egi_graph *, rule->n_patterns);
  if (patterns == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < rule->n_patterns; i++) EG_TRY(parse_text(r, rule, rule->patterns[i], &patterns[i]));
  EG_TRY(parse_text(r, rule, rule->replacement, out_replacement));
  *out_patterns = patterns;
  return check_texts(r, rule, patterns, *out_replacement);
}

static void start_rule(runner *r, const egi_rule *rule) {
  memset(&r->match, 0, sizeof r->match);
  r->match.graph = r->graph;
  r->match.rule = rule;
  r->best_depth = 0;
}

static eg_status run_rule(runner *r, const egi_rule *rule, egi_rule_report *report) {
  egi_graph **patterns = NULL, *replacement = NULL;
  EG_TRY(read_rule(r, rule, &patterns, &replacement));
  EG_TRY(prepare_sweep(r));
  start_rule(r, rule);
  for (egi_node_id id = r->graph->n_nodes; id-- > 1;)
    if (r->graph->nodes[id].op != EGI_OP_NONE) EG_TRY(visit(r, rule, patterns, replacement, id, report));
  return EG_OK;
}

/* A rule's numbers go into the pass's; the deepest miss of all rules is the pass's. */
static void sum_up(runner *r, const egi_rule_report *rule) {
  egi_pass_report *report = r->run->report;
  report->n_tried += rule->n_tried;
  report->n_matched += rule->n_matched;
  if (rule->nearest_miss == NULL || (report->nearest_miss != NULL && r->best_depth <= r->deepest)) return;
  report->nearest_miss = rule->nearest_miss;
  r->deepest = r->best_depth;
}

static eg_status open_runner(runner *r, egi_pass_run *run, egi_graph *graph) {
  *r = (runner){.run = run, .graph = graph};
  EG_TRY(egi_module_create(run->ctx, &r->texts));
  egi_arena_init(&r->arena, run->ctx, EGI_PURPOSE_GRAPH);
  return EG_OK;
}

static eg_status close_runner(runner *r, eg_status status) {
  egi_arena_clear(&r->arena);
  egi_module_destroy(r->texts);
  return status;
}

/* New layout nodes and constants may repeat others, or undo them. */
static eg_status clean_up(runner *r) {
  static const egi_pass_function passes[] = {egi_pass_eliminate_identity, egi_pass_eliminate_common,
                                             egi_pass_eliminate_dead};
  for (size_t i = 0; i < EGI_COUNT(passes); i++) {
    egi_pass_report unused = {0};
    egi_pass_run clean = {.ctx = r->run->ctx, .report = &unused};
    EG_TRY(egi_graph_tidy(r->graph));
    EG_TRY(passes[i](&clean, r->graph));
  }
  return EG_OK;
}

static eg_status run_rules(runner *r, const egi_rule *rules, size_t n_rules) {
  r->reports = EGI_NEW(&r->graph->module->arena, egi_rule_report, n_rules);
  if (r->reports == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < n_rules; i++) {
    r->reports[i].rule = rules[i].name;
    EG_TRY(run_rule(r, &rules[i], &r->reports[i]));
    sum_up(r, &r->reports[i]);
  }
  r->run->report->rules = r->reports;
  r->run->report->n_rules = (uint32_t)n_rules;
  return r->is_dirty ? clean_up(r) : EG_OK;
}

eg_status egi_rules_run(egi_pass_run *run, egi_graph *graph, const egi_rule *rules, size_t n_rules) {
  runner r;
  EG_TRY(open_runner(&r, run, graph));
  return close_runner(&r, run_rules(&r, rules, n_rules));
}

eg_status egi_rule_check(eg_context *ctx, const egi_rule *rule) {
  egi_pass_run run = {.ctx = ctx};
  egi_graph **patterns = NULL, *replacement = NULL;
  runner r;
  EG_TRY(open_runner(&r, &run, NULL));
  return close_runner(&r, read_rule(&r, rule, &patterns, &replacement));
}

/* ---- nodes that a pass names ----------------------------------------------------------------------------------- */

static eg_status bind_node(runner *r, const egi_graph *text, const egi_node *node, egi_value_id *outputs) {
  egi_match *match = &r->match;
  if (text->n_inputs != node->n_inputs || text->n_outputs != node->n_outputs || node->n_inputs > EGI_MATCH_EXTRAS)
    return egi_fail(r->run->ctx, EG_ERROR_ARGUMENT,
                    "node \"%s\" has %u inputs and %u results, its replacement %u and %u", node_label(r->graph, node),
                    node->n_inputs, node->n_outputs, text->n_inputs, text->n_outputs);
  for (unsigned i = 0; i < node->n_inputs; i++)
    egi_match_bind(match, text->values[text->inputs[i]].name, node->inputs[i]);
  for (unsigned i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] == 0)
      return egi_fail(r->run->ctx, EG_ERROR_ARGUMENT, "node \"%s\": a result is left out", node_label(r->graph, node));
    outputs[i] = i + 1;
    match->values[i + 1] = node->outputs[i];
  }
  return EG_OK;
}

/* The node stands for a pattern of itself. */
static eg_status replace_node(runner *r, const egi_replacement *request) {
  const egi_rule rule = {.name = "of a pass", .replacement = request->text};
  egi_value_id outputs[EGI_MATCH_EXTRAS];
  egi_graph itself = {.outputs = outputs}, *text = NULL;
  egi_rule_report unused = {0};
  const egi_node *node = &r->graph->nodes[request->node];
  if (node->op == EGI_OP_NONE) return egi_fail(r->run->ctx, EG_ERROR_ARGUMENT, "a node is replaced twice");
  EG_TRY(parse_text(r, &rule, request->text, &text));
  EG_TRY(check_operators(r, &rule, text));
  start_rule(r, &rule);
  EG_TRY(bind_node(r, text, node, outputs));
  itself.n_outputs = node->n_outputs;
  r->match.pattern = &itself;
  r->match.root = r->match.inside[0] = request->node;
  r->match.n_inside = 1;
  r->match.emit = (egi_emitter){.graph = r->graph, .scope = node->scope};
  egi_node_id first_new = r->graph->n_nodes;
  EG_TRY(replace(r, text, first_new, &unused));
  if (unused.n_matched == 0)
    return egi_fail(r->run->ctx, EG_ERROR_SHAPE, "node \"%s\": its replacement has another shape",
                    node_label(r->graph, &r->graph->nodes[request->node]));
  r->run->report->n_matched++;
  return EG_OK;
}

static eg_status replace_nodes(runner *r, const egi_replacement *list, size_t count) {
  EG_TRY(prepare_sweep(r));
  for (size_t i = 0; i < count; i++) EG_TRY(replace_node(r, &list[i]));
  return r->is_dirty ? clean_up(r) : EG_OK;
}

eg_status egi_rules_replace(egi_pass_run *run, egi_graph *graph, const egi_replacement *list, size_t count) {
  runner r;
  EG_TRY(open_runner(&r, run, graph));
  return close_runner(&r, replace_nodes(&r, list, count));
}
