/* Dropout that trains draws anew in each step and micro-batch, and the same again for its gradient and wherever it is
 * recomputed: numbers follow from seed, step, site and element. Outside training nothing is dropped. Inputs that only
 * said whether a graph trains go. Precondition: before differentiate. Linear in the graph. */
#include <string.h>

#include "passes/passes.h"

/* Whether a node drops when a graph trains; EG_ERROR_UNSUPPORTED when only a run can tell how much. */
static eg_status read_dropout(const egi_graph *graph, egi_node_id id, double *out_ratio) {
  const egi_node *node = &graph->nodes[id];
  egi_value_id mode = node->n_inputs > 2 ? node->inputs[2] : 0;
  double is_training = 0;
  *out_ratio = 0.0;
  if (mode == 0 || (egi_value_scalar(graph, mode, &is_training) && is_training <= 0)) return EG_OK;
  *out_ratio = 0.5;
  if (node->n_inputs > 1 && node->inputs[1] != 0 && !egi_value_scalar(graph, node->inputs[1], out_ratio))
    return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "its ratio is no constant: it cannot be trained");
  if (!(*out_ratio >= 0.0 && *out_ratio < 1.0))
    return egi_fail_node(graph, id, EG_ERROR_DATA, "a ratio of %g is not in [0, 1)", *out_ratio);
  return EG_OK;
}

static eg_status change_node(egi_graph *graph, egi_node_id id, egi_op op, const egi_value_id *inputs, uint16_t n) {
  egi_node *node = &graph->nodes[id];
  egi_value_id *copy = EGI_NEW(&graph->module->arena, egi_value_id, n);
  if (!copy) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < n; i++) copy[i] = inputs[i];
  node->op = op;
  node->op_name = NULL;
  node->inputs = copy;
  node->n_inputs = n;
  node->n_outputs = 1;
  node->n_attributes = 0;
  return EG_OK;
}

eg_status egi_step_value(egi_graph *graph, egi_value_id *out_value) {
  uint32_t index = 0;
  EG_TRY(egi_module_add_pool_state(graph->module, EGI_POOL_STEP, &index));
  return egi_graph_add_state(graph, index, out_value);
}

void egi_dropout_attributes(const egi_adapt_options *adapt, double ratio, uint32_t site, egi_attribute attributes[3]) {
  attributes[0] = egi_attribute_float("ratio", (float)ratio);
  attributes[1] = egi_attribute_int("seed", (int64_t)adapt->seed);
  attributes[2] = egi_attribute_int("site", site);
}

static eg_status key_one(egi_pass_run *run, egi_graph *graph, egi_node_id id, double ratio, uint32_t site) {
  const egi_value_id x = graph->nodes[id].inputs[0];
  egi_attribute attributes[3];
  egi_value_id step = 0;
  if (graph->nodes[id].n_outputs > 1 && graph->nodes[id].outputs[1] != 0)
    return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "the graph reads its mask: it cannot be trained");
  if (!(ratio > 0.0)) return change_node(graph, id, EGI_OP_Identity, &x, 1);
  EG_TRY(egi_step_value(graph, &step));
  EG_TRY(change_node(graph, id, EGI_OP_KeyedDropout, (const egi_value_id[2]){x, step}, 2));
  egi_dropout_attributes(run->adapt, ratio, site, attributes);
  for (int i = 0; i < 3; i++) EG_TRY(egi_node_set_attribute(graph, id, &attributes[i]));
  return EG_OK;
}

/* Scalar truths that nothing takes any more; places of the others move up. */
static eg_status drop_inputs(egi_graph *graph) {
  bool *is_used = egi_allocate(graph->module->ctx, EGI_PURPOSE_GRAPH, graph->n_values * sizeof *is_used);
  uint32_t n = 0;
  if (!is_used) return EG_ERROR_MEMORY;
  memset(is_used, 0, graph->n_values * sizeof *is_used);
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    for (unsigned i = 0; graph->nodes[id].op != EGI_OP_NONE && i < graph->nodes[id].n_inputs; i++)
      is_used[graph->nodes[id].inputs[i]] = true;
  for (uint32_t i = 0; i < graph->n_outputs; i++) is_used[graph->outputs[i]] = true;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    egi_value *value = &graph->values[graph->inputs[i]];
    bool is_scalar = value->rank == 0 || (value->rank == 1 && value->dtype == EG_DTYPE_BOOL);
    if (!is_used[graph->inputs[i]] && is_scalar && value->dtype == EG_DTYPE_BOOL) {
      egi_graph_delete_value(graph, graph->inputs[i]);
      continue;
    }
    value->index = n;
    graph->inputs[n++] = graph->inputs[i];
  }
  egi_release(graph->module->ctx, EGI_PURPOSE_GRAPH, is_used, graph->n_values * sizeof *is_used);
  graph->n_inputs = n;
  return EG_OK;
}

eg_status egi_pass_key_dropout(egi_pass_run *run, egi_graph *graph) {
  bool is_training = run->adapt && run->adapt->has_gradient;
  uint32_t site = 0;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    double ratio = 0;
    if (graph->nodes[id].op != EGI_OP_Dropout) continue;
    run->report->n_tried++;
    if (is_training) EG_TRY(read_dropout(graph, id, &ratio));
    EG_TRY(key_one(run, graph, id, ratio, EGI_FIRST_DROPOUT_SITE + site++));
    run->report->n_matched++;
    run->has_changed = true;
  }
  return site > 0 ? drop_inputs(graph) : EG_OK;
}

eg_status egi_disable_dropout(egi_graph *graph) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_value_id x = graph->nodes[id].op == EGI_OP_KeyedDropout ? graph->nodes[id].inputs[0] : 0;
    if (x != 0) EG_TRY(change_node(graph, id, EGI_OP_Identity, &x, 1));
  }
  return EG_OK;
}
