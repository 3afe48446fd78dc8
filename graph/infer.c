/* Shape inference: runs each node's rule from ops.def; what rules share stands in shapes_common.c. One forward sweep,
 * nodes must be in order. */
#include "graph/shapes.h"

static const egi_shape_rule rules[EGI_OP_COUNT] = {
#define EGI_OP(symbol, domain, name, version, in_min, in_max, out_min, out_max, flags, shape, gradient) \
  [EGI_OP_##symbol] = egi_shape_##shape,
#include "graph/ops.def"
#undef EGI_OP
};

static eg_status check_counts(const egi_inference *in) {
  const egi_op_info *info = egi_op_get(in->node->op);
  const egi_node *node = in->node;
  if (node->n_inputs < info->in_min || (info->in_max != 255 && node->n_inputs > info->in_max))
    return egi_fail_node(in->graph, in->id, EG_ERROR_SHAPE, "%u inputs; the operator takes %u to %u", node->n_inputs,
                         info->in_min, info->in_max);
  if (node->n_outputs < info->out_min || (info->out_max != 255 && node->n_outputs > info->out_max))
    return egi_fail_node(in->graph, in->id, EG_ERROR_SHAPE, "%u outputs; the operator gives %u to %u", node->n_outputs,
                         info->out_min, info->out_max);
  return EG_OK;
}

/* Sets *out_is_known to whether every operand has a type and a rank; dims not known yet become fresh sizes. */
static eg_status complete_inputs(egi_inference *in, bool *out_is_known) {
  *out_is_known = true;
  for (unsigned i = 0; i < in->node->n_inputs; i++) {
    egi_value_id id = in->node->inputs[i];
    if (id == 0 && !egi_op_may_lack(in->node->op, i))
      return egi_fail_node(in->graph, in->id, EG_ERROR_SHAPE, "input %u is missing", i);
    if (id == 0) continue;
    egi_value *value = &in->graph->values[id];
    if (value->rank < 0 || value->dtype == EG_DTYPE_UNDEFINED) *out_is_known = false;
    for (int axis = 0; axis < value->rank; axis++)
      if (value->dims[axis] == EGI_DIM_NONE) value->dims[axis] = egi_dim_fresh(in->dims, "size");
  }
  return egi_dims_status(in->dims);
}

static void forget_contents(egi_inference *in) {
  for (uint16_t i = 0; i < in->node->n_outputs; i++) {
    if (in->node->outputs[i] == 0) continue;
    in->graph->values[in->node->outputs[i]].elements = NULL;
    in->graph->values[in->node->outputs[i]].n_elements = 0;
  }
}

eg_status egi_infer_node(egi_graph *graph, egi_node_id id) {
  egi_inference in = {graph, graph->module->dims, id, &graph->nodes[id]};
  bool is_known;
  if (in.node->op == EGI_OP_NONE || in.node->op == EGI_OP_UNKNOWN) return EG_OK;
  EG_TRY(check_counts(&in));
  EG_TRY(complete_inputs(&in, &is_known));
  if (!is_known) return EG_OK;
  forget_contents(&in);
  EG_TRY(egi_shape_check_types(&in));
  EG_TRY(rules[in.node->op](&in));
  EG_TRY(egi_shape_contents(&in));
  return egi_dims_status(in.dims);
}

/* Assumptions made on the way apply to values that were inferred before them. */
static eg_status resolve_values(egi_graph *graph) {
  egi_dims *dims = graph->module->dims;
  for (egi_value_id v = 1; v < graph->n_values; v++) {
    egi_value *value = &graph->values[v];
    if (value->kind == EGI_VALUE_NONE || value->kind == EGI_VALUE_INPUT) continue;
    for (int i = 0; i < value->rank; i++) value->dims[i] = egi_dim_resolve(dims, value->dims[i]);
  }
  return egi_dims_status(dims);
}

/* What a node with a wrong type gives is unknown, so that each fault is told once. */
eg_status egi_infer_graph(egi_graph *graph) {
  egi_findings findings;
  eg_status status = EG_OK;
  egi_findings_begin(&findings, graph->module->ctx);
  for (egi_node_id n = 1; n < graph->n_nodes && status == EG_OK; n++) {
    status = egi_infer_node(graph, n);
    if (status != EG_OK && egi_findings_note(&findings, status)) status = EG_OK;
  }
  eg_status found = egi_findings_end(&findings);
  if (status == EG_OK) status = found;
  return status == EG_OK ? resolve_values(graph) : status;
}
