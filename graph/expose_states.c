/* States of a training graph as inputs and outputs, so that it can leave as a file: each state that a node takes is an
 * input, and what a node with an effect leaves in one is an output. Parameters keep their names, which are those of the
 * files they are saved to. In a file that is read again they are plain inputs and outputs. */
#include "graph/graph.h"

#include <string.h>

static const char *const before[EGI_POOL_COUNT] = {
    [EGI_POOL_PARAMETERS] = "",
    [EGI_POOL_GRADIENTS] = "engraft.gradient_before.",
    [EGI_POOL_MOMENT1] = "engraft.moment1_before.",
    [EGI_POOL_MOMENT2] = "engraft.moment2_before.",
    [EGI_POOL_STEP] = "",
    [EGI_POOL_CACHE] = "engraft.cache_before.",
};
static const char *const after[EGI_POOL_COUNT] = {
    [EGI_POOL_PARAMETERS] = "engraft.parameter.",
    [EGI_POOL_GRADIENTS] = "engraft.gradient.",
    [EGI_POOL_MOMENT1] = "engraft.moment1.",
    [EGI_POOL_MOMENT2] = "engraft.moment2.",
    [EGI_POOL_STEP] = "engraft.step.",
    [EGI_POOL_CACHE] = "engraft.cache_after.",
};

static eg_status name_state(egi_graph *graph, egi_value_id value, const char *prefix, const char *name) {
  char *wanted = egi_arena_format(&graph->module->arena, "%s%s", prefix, name);
  return wanted != NULL ? egi_graph_rename_value(graph, value, wanted) : EG_ERROR_MEMORY;
}

/* The state after the node is the node's first result. */
static eg_status expose_result(egi_graph *graph, const egi_node *node) {
  if (node->n_inputs == 0 || node->n_outputs == 0 || node->outputs[0] == 0) return EG_OK;
  const egi_value *first = &graph->values[node->inputs[0]];
  if (first->kind != EGI_VALUE_STATE) return EG_OK;
  const egi_state *state = &graph->module->states[first->index];
  EG_TRY(name_state(graph, node->outputs[0], after[state->pool], state->name));
  return egi_graph_add_output(graph, node->outputs[0]);
}

static eg_status expose_state(egi_graph *graph, egi_value_id id) {
  const egi_state *state = &graph->module->states[graph->values[id].index];
  EG_TRY(EGI_GROW(&graph->module->arena, &graph->inputs, graph->n_inputs, &graph->inputs_capacity));
  EG_TRY(name_state(graph, id, before[state->pool], state->name));
  graph->state_values[graph->values[id].index] = 0;
  graph->values[id].kind = EGI_VALUE_INPUT;
  graph->values[id].index = graph->n_inputs;
  graph->inputs[graph->n_inputs++] = id;
  return EG_OK;
}

eg_status egi_graph_expose_states(egi_graph *graph) {
  EG_TRY(egi_graph_tidy(graph));
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    bool has_effect = node->op > EGI_OP_UNKNOWN && (egi_op_get(node->op)->flags & EGI_OP_EFFECT) != 0;
    if (has_effect) EG_TRY(expose_result(graph, node));
  }
  for (egi_value_id id = 1; id < graph->n_values; id++)
    if (graph->values[id].kind == EGI_VALUE_STATE) EG_TRY(expose_state(graph, id));
  return EG_OK;
}
