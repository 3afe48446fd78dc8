/* Nodes whose results reach neither an output nor an effect go, and so do optional results nobody takes.
 * Before and after: any graph in execution order or not. One sweep back along producers. */
#include "passes/passes.h"

/* Marks the producer of `value` and puts it on the stack once. */
static void mark(const egi_graph *graph, egi_value_id value, bool *is_live, egi_node_id *stack, uint32_t *depth) {
  if (value == 0 || graph->values[value].kind != EGI_VALUE_NODE) return;
  egi_node_id producer = graph->values[value].producer;
  if (is_live[producer]) return;
  is_live[producer] = true;
  stack[(*depth)++] = producer;
}

static void mark_live(const egi_graph *graph, bool *is_live, egi_node_id *stack) {
  uint32_t depth = 0;
  for (uint32_t i = 0; i < graph->n_outputs; i++) mark(graph, graph->outputs[i], is_live, stack, &depth);
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_NONE || is_live[id] || !(egi_op_get(node->op)->flags & EGI_OP_EFFECT)) continue;
    is_live[id] = true;
    stack[depth++] = id;
  }
  while (depth > 0) {
    const egi_node *node = &graph->nodes[stack[--depth]];
    for (unsigned i = 0; i < node->n_inputs; i++) mark(graph, node->inputs[i], is_live, stack, &depth);
  }
}

/* Optional results without a use are left out. Split is an exception: the number of its results is its meaning. */
static bool drop_results(egi_graph *graph, egi_node_id id, const bool *is_used) {
  egi_node *node = &graph->nodes[id];
  const egi_op_info *info = egi_op_get(node->op);
  bool has_changed = false;
  if (node->op == EGI_OP_UNKNOWN || node->op == EGI_OP_Split) return false;
  for (unsigned i = info->out_min; i < node->n_outputs; i++) {
    if (node->outputs[i] == 0 || is_used[node->outputs[i]]) continue;
    node->outputs[i] = 0;
    has_changed = true;
  }
  while (node->n_outputs > info->out_min && node->outputs[node->n_outputs - 1] == 0) node->n_outputs--;
  return has_changed;
}

static void mark_used(const egi_graph *graph, const bool *is_live, bool *is_used) {
  for (uint32_t i = 0; i < graph->n_outputs; i++) is_used[graph->outputs[i]] = true;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    for (unsigned i = 0; is_live[id] && i < node->n_inputs; i++) is_used[node->inputs[i]] = true;
  }
}

static eg_status eliminate(egi_pass_run *run, egi_graph *graph, egi_arena *arena) {
  bool *is_live = EGI_NEW(arena, bool, graph->n_nodes);
  bool *is_used = EGI_NEW(arena, bool, graph->n_values);
  egi_node_id *stack = EGI_NEW(arena, egi_node_id, graph->n_nodes);
  if (!is_live || !is_used || !stack) return EG_ERROR_MEMORY;
  mark_live(graph, is_live, stack);
  mark_used(graph, is_live, is_used);
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    if (graph->nodes[id].op == EGI_OP_NONE) continue;
    run->report->n_tried++;
    if (is_live[id]) {
      if (drop_results(graph, id, is_used)) run->has_changed = true;
      continue;
    }
    egi_graph_remove_node(graph, id);
    run->report->n_matched++;
    run->has_changed = true;
  }
  return EG_OK;
}

eg_status egi_pass_eliminate_dead(egi_pass_run *run, egi_graph *graph) {
  egi_arena arena;
  egi_arena_init(&arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = eliminate(run, graph, &arena);
  egi_arena_clear(&arena);
  return status;
}
