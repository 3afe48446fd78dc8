/* The verifier: what every pass must leave behind. Returns the first problem. */
#include "graph/graph.h"

static eg_status fail_value(const egi_graph *graph, egi_value_id v, const char *problem) {
  const char *name = v < graph->n_values && graph->values[v].name != NULL ? graph->values[v].name : "?";
  return egi_fail(graph->module->ctx, EG_ERROR_INTERNAL, "graph \"%s\": tensor \"%s\" (%u): %s", graph->name, name, v,
                  problem);
}

/* ---- values --------------------------------------------------------------------------------------------------- */

static bool is_produced(const egi_graph *graph, egi_value_id v) {
  const egi_value *value = &graph->values[v];
  if (value->producer == 0 || value->producer >= graph->n_nodes) return false;
  const egi_node *node = &graph->nodes[value->producer];
  return node->op != EGI_OP_NONE && value->index < node->n_outputs && node->outputs[value->index] == v;
}

static bool is_row_valid(const egi_graph *graph, egi_value_id v) {
  const egi_value *value = &graph->values[v];
  switch (value->kind) {
  case EGI_VALUE_INPUT:
    return value->index < graph->n_inputs && graph->inputs[value->index] == v;
  case EGI_VALUE_WEIGHT:
    return value->index > 0 && value->index < graph->module->n_weights;
  case EGI_VALUE_STATE:
    return value->index > 0 && value->index < graph->module->n_states;
  case EGI_VALUE_NODE:
    return value->producer == 0 || is_produced(graph, v);
  case EGI_VALUE_NONE:
    return true;
  }
  return false;
}

static eg_status check_value(const egi_graph *graph, egi_value_id v) {
  const egi_value *value = &graph->values[v];
  if (value->kind == EGI_VALUE_NONE) return EG_OK;
  if (!is_row_valid(graph, v)) return fail_value(graph, v, "its row and its producer disagree");
  if (value->name == NULL || egi_graph_find_value(graph, value->name) != v)
    return fail_value(graph, v, "its name leads to another tensor");
  if (value->rank > EGI_MAX_RANK || value->rank < -1) return fail_value(graph, v, "its rank is out of range");
  if (value->dtype != EG_DTYPE_UNDEFINED && !egi_dtype_is_known((int64_t)value->dtype))
    return fail_value(graph, v, "its type is out of range");
  return EG_OK;
}

static eg_status check_use(const egi_graph *graph, egi_value_id v) {
  if (v >= graph->n_values) return fail_value(graph, v, "is used and does not exist");
  const egi_value *value = &graph->values[v];
  if (value->kind == EGI_VALUE_NONE) return fail_value(graph, v, "is used and was deleted");
  if (value->kind == EGI_VALUE_NODE && value->producer == 0) return fail_value(graph, v, "is used and never produced");
  return EG_OK;
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

static eg_status check_signature(const egi_graph *graph, egi_node_id n) {
  const egi_node *node = &graph->nodes[n];
  if ((unsigned)node->op >= EGI_OP_COUNT)
    return egi_fail(graph->module->ctx, EG_ERROR_INTERNAL, "graph \"%s\": node %u has no operator", graph->name, n);
  const egi_op_info *info = egi_op_get(node->op);
  if (node->op == EGI_OP_UNKNOWN && node->op_name == NULL)
    return egi_fail_node(graph, n, EG_ERROR_INTERNAL, "an operator without a name");
  if (node->n_inputs < info->in_min || (info->in_max != 255 && node->n_inputs > info->in_max))
    return egi_fail_node(graph, n, EG_ERROR_SHAPE, "%u inputs; the operator takes %u to %u", node->n_inputs,
                         info->in_min, info->in_max);
  if (node->n_outputs < info->out_min || (info->out_max != 255 && node->n_outputs > info->out_max))
    return egi_fail_node(graph, n, EG_ERROR_SHAPE, "%u outputs; the operator gives %u to %u", node->n_outputs,
                         info->out_min, info->out_max);
  for (uint16_t i = 0; i < node->n_attributes; i++)
    if (node->attributes[i].name == NULL)
      return egi_fail_node(graph, n, EG_ERROR_INTERNAL, "an attribute without a name");
  return EG_OK;
}

/* Producers stand before their consumers. */
static eg_status check_node(const egi_graph *graph, egi_node_id n) {
  const egi_node *node = &graph->nodes[n];
  EG_TRY(check_signature(graph, n));
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    egi_value_id v = node->inputs[i];
    if (v == 0) continue;
    EG_TRY(check_use(graph, v));
    if (graph->values[v].kind == EGI_VALUE_NODE && graph->values[v].producer >= n)
      return egi_fail_node(graph, n, EG_ERROR_INTERNAL, "uses \"%s\", which is produced after it",
                           graph->values[v].name);
  }
  for (uint16_t i = 0; i < node->n_outputs; i++) {
    egi_value_id v = node->outputs[i];
    if (v == 0) continue;
    if (v >= graph->n_values || graph->values[v].kind != EGI_VALUE_NODE || graph->values[v].producer != n ||
        graph->values[v].index != i)
      return egi_fail_node(graph, n, EG_ERROR_INTERNAL, "output %u is not its own", i);
  }
  return EG_OK;
}

eg_status egi_graph_verify(const egi_graph *graph) {
  for (egi_value_id v = 1; v < graph->n_values; v++) EG_TRY(check_value(graph, v));
  for (egi_node_id n = 1; n < graph->n_nodes; n++)
    if (graph->nodes[n].op != EGI_OP_NONE) EG_TRY(check_node(graph, n));
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    if (graph->outputs[i] == 0) return fail_value(graph, 0, "is an output of the graph");
    EG_TRY(check_use(graph, graph->outputs[i]));
  }
  for (uint32_t i = 0; i < graph->n_inputs; i++)
    if (graph->inputs[i] == 0 || graph->inputs[i] >= graph->n_values ||
        graph->values[graph->inputs[i]].kind != EGI_VALUE_INPUT)
      return fail_value(graph, graph->inputs[i], "is an input of the graph and no input row");
  return EG_OK;
}
