/* Help for gradient rules: operands, numbers, shapes, optional outputs of the forward node. */
#include <string.h>

#include "passes/passes.h"

egi_value_id egi_gradient_input(const egi_gradient *gradient, unsigned index) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  return index < node->n_inputs ? node->inputs[index] : 0;
}

egi_value_id egi_gradient_output(const egi_gradient *gradient, unsigned index) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  return index < node->n_outputs ? node->outputs[index] : 0;
}

bool egi_gradient_wants(const egi_gradient *gradient, unsigned input) {
  return egi_gradient_input(gradient, input) != 0 && gradient->is_wanted[input];
}

void egi_gradient_set(egi_gradient *gradient, unsigned input, egi_value_id value) {
  egi_value_id like = egi_gradient_input(gradient, input);
  if (!egi_gradient_wants(gradient, input) || gradient->emit->status != EG_OK) return;
  if (!egi_same_shape(gradient->graph, value, like)) value = egi_emit_binary(gradient->emit, EGI_OP_SumTo, value, like);
  gradient->in_gradients[input] = value;
}

egi_value_id egi_gradient_number(egi_gradient *gradient, double number, egi_value_id like) {
  return egi_emit_scalar(gradient->emit, number, gradient->graph->values[like].dtype);
}

egi_value_id egi_gradient_scaled(egi_gradient *gradient, egi_value_id a, double number) {
  if (number == 1.0 || gradient->emit->status != EG_OK) return a;
  return egi_emit_binary(gradient->emit, EGI_OP_Mul, a, egi_gradient_number(gradient, number, a));
}

void egi_gradient_emit(egi_gradient *gradient, egi_op op, const egi_value_id *inputs, unsigned n_inputs,
                       egi_value_id *out_values, unsigned n_outputs) {
  const egi_node node = gradient->graph->nodes[gradient->node];
  egi_emit_many(gradient->emit, op, inputs, n_inputs, node.attributes, node.n_attributes, out_values, n_outputs);
}

static eg_status extend_outputs(egi_graph *graph, egi_node_id id, unsigned count) {
  egi_node *node = &graph->nodes[id];
  if (node->n_outputs >= count) return EG_OK;
  egi_value_id *outputs = EGI_NEW(&graph->module->arena, egi_value_id, count);
  if (!outputs) return EG_ERROR_MEMORY;
  memcpy(outputs, node->outputs, node->n_outputs * sizeof(*outputs));
  node->outputs = outputs;
  node->n_outputs = (uint16_t)count;
  return EG_OK;
}

static eg_status add_output(egi_graph *graph, egi_node_id id, unsigned index, egi_value_id *out_value) {
  EG_TRY(extend_outputs(graph, id, index + 1));
  *out_value = graph->nodes[id].outputs[index];
  if (*out_value != 0) return EG_OK;
  EG_TRY(egi_graph_add_value(graph, NULL, out_value));
  graph->values[*out_value].producer = id;
  graph->values[*out_value].index = index;
  graph->nodes[id].outputs[index] = *out_value;
  return egi_infer_node(graph, id);
}

egi_value_id egi_gradient_demand(egi_gradient *gradient, unsigned output) {
  egi_value_id value = 0;
  if (gradient->emit->status == EG_OK)
    gradient->emit->status = add_output(gradient->graph, gradient->node, output, &value);
  return value;
}

egi_value_id egi_gradient_reshaped(egi_gradient *gradient, egi_value_id a, egi_value_id like) {
  if (gradient->emit->status != EG_OK || egi_same_shape(gradient->graph, a, like)) return a;
  return egi_emit_binary(gradient->emit, EGI_OP_Reshape, a, egi_emit_unary(gradient->emit, EGI_OP_Shape, like));
}

egi_value_id egi_gradient_expanded(egi_gradient *gradient, egi_value_id a, egi_value_id like) {
  if (gradient->emit->status != EG_OK || egi_same_shape(gradient->graph, a, like)) return a;
  return egi_emit_binary(gradient->emit, EGI_OP_Expand, a, egi_emit_unary(gradient->emit, EGI_OP_Shape, like));
}

static void swap_permutation(int rank, int64_t *perm) {
  for (int i = 0; i < rank; i++) perm[i] = i;
  perm[rank - 1] = rank - 2;
  perm[rank - 2] = rank - 1;
}

/* The input of the Transpose that gives `a` by swapping its last two axes, or 0. */
static egi_value_id swapped_input(const egi_graph *graph, egi_value_id a) {
  const egi_value *row = &graph->values[a];
  int64_t expected[EGI_MAX_RANK];
  uint32_t count = 0;
  if (row->kind != EGI_VALUE_NODE || graph->nodes[row->producer].op != EGI_OP_Transpose) return 0;
  const egi_node *node = &graph->nodes[row->producer];
  const int64_t *perm = egi_node_ints(node, "perm", &count);
  swap_permutation(row->rank, expected);
  if (!perm) return row->rank == 2 ? node->inputs[0] : 0;
  bool is_swap = count == (uint32_t)row->rank;
  for (uint32_t i = 0; is_swap && i < count; i++) is_swap = perm[i] == expected[i];
  return is_swap ? node->inputs[0] : 0;
}

egi_value_id egi_gradient_swapped(egi_gradient *gradient, egi_value_id a) {
  int rank = gradient->graph->values[a].rank;
  int64_t perm[EGI_MAX_RANK];
  if (gradient->emit->status != EG_OK || rank < 2) return a;
  egi_value_id input = swapped_input(gradient->graph, a);
  if (input != 0) return input;
  swap_permutation(rank, perm);
  const egi_attribute attribute = egi_attribute_ints("perm", perm, (uint32_t)rank);
  return egi_emit(gradient->emit, EGI_OP_Transpose, &a, 1, &attribute, 1);
}

eg_status egi_gradient_require(const egi_gradient *gradient, bool is_met, const char *reason) {
  if (is_met) return EG_OK;
  return egi_fail_node(gradient->graph, gradient->node, EG_ERROR_UNSUPPORTED, "%s", reason);
}
