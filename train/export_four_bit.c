/* A merged model whose matrices are codes of 4 bits: com.microsoft's MatMulBnb4 in the place of each Linear that
 * quantize_base made of one, so that onnxruntime runs it and engraft reads it as what it was. */
#include "backend/quantise.h"
#include "graph/linear.h"
#include "train/train.h"

static eg_status add_bias(egi_graph *graph, egi_value_id product, egi_value_id bias, egi_value_id output) {
  egi_value_id inputs[2] = {product, bias};
  const egi_node sum = {.op = EGI_OP_Add, .inputs = inputs, .n_inputs = 2, .outputs = &output, .n_outputs = 1};
  egi_node_id added;
  return egi_graph_add_node(graph, &sum, &added);
}

eg_status egi_export_product(egi_graph *graph, egi_node_id linear, const egi_node *product) {
  const egi_node old = graph->nodes[linear];
  egi_value_id output = old.outputs[0], value = output;
  egi_value_id bias = old.n_inputs > EGI_LINEAR_BIAS ? old.inputs[EGI_LINEAR_BIAS] : 0;
  egi_node node = *product;
  node.op = EGI_OP_UNKNOWN;
  node.domain = "com.microsoft";
  node.name = old.name;
  node.scope = old.scope;
  node.outputs = &value;
  node.n_outputs = 1;
  egi_graph_remove_node(graph, linear);
  if (bias != 0) EG_TRY(egi_graph_add_value(graph, NULL, &value));
  EG_TRY(egi_graph_add_node(graph, &node, &linear));
  return bias != 0 ? add_bias(graph, value, bias, output) : EG_OK;
}

/* MatMulBnb4's operands have one dim. */
static void flatten(egi_graph *graph, egi_value_id id) {
  egi_value *value = &graph->values[id];
  egi_weight *weight = &graph->module->weights[value->index];
  int64_t count = 1;
  for (int i = 0; i < weight->rank; i++) count *= weight->dims[i];
  weight->rank = value->rank = 1;
  weight->dims[0] = count;
  value->dims[0] = egi_dim_constant(graph->module->dims, count);
}

static eg_status replace_linear(egi_graph *graph, egi_node_id id) {
  const egi_node *old = &graph->nodes[id];
  egi_value_id inputs[3] = {old->inputs[EGI_LINEAR_X], old->inputs[EGI_LINEAR_WEIGHT], old->inputs[EGI_LINEAR_SCALES]};
  egi_attribute attributes[4] = {egi_attribute_int("K", egi_node_int(old, "in_features", 0)),
                                 egi_attribute_int("N", egi_node_int(old, "out_features", 0)),
                                 egi_attribute_int("block_size", egi_node_int(old, "block_size", 64)),
                                 egi_attribute_int("quant_type", egi_node_int(old, "quant_type", 1))};
  const egi_node product = {
      .op_name = "MatMulBnb4", .inputs = inputs, .n_inputs = 3, .attributes = attributes, .n_attributes = 4};
  flatten(graph, inputs[1]);
  flatten(graph, inputs[2]);
  return egi_export_product(graph, id, &product);
}

eg_status egi_export_four_bit(egi_graph *graph, const egi_quantise_options *options) {
  static const char *const names[] = {"quantize_base", "eliminate_dead"};
  const egi_adapt_options adapt = {.quantise = *options};
  EG_TRY(egi_run_passes(graph, names, EGI_COUNT(names), &adapt));
  EG_TRY(egi_quantise_module(graph->module));
  egi_node_id n = graph->n_nodes;
  for (egi_node_id id = 1; id < n; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op != EGI_OP_Linear || egi_linear_storage_of(node) != EGI_LINEAR_BNB4) continue;
    bool is_nested = node->n_inputs > EGI_LINEAR_NESTED && node->inputs[EGI_LINEAR_NESTED] != 0;
    if (!is_nested) EG_TRY(replace_linear(graph, id));
  }
  return egi_graph_tidy(graph);
}
