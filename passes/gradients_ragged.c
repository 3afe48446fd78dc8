/* Gradient rules of what dispatch_moe makes. Rows go to their experts by a gather and come back by another, so that
 * each is the other's gradient; a product gives the gradients of its rows and of their weights by one operator, those
 * of its matrices by a sum over the rows of each expert. */
#include "graph/ragged.h"
#include "passes/lower.h"

eg_status egi_gradient_moe(egi_gradient *gradient) {
  return egi_gradient_require(gradient, false, "it has no gradient before dispatch_moe has taken it apart");
}

eg_status egi_gradient_route(egi_gradient *gradient) {
  EG_TRY(
      egi_gradient_require(gradient, !egi_gradient_wants(gradient, 1), "the correction of the choice has no gradient"));
  egi_value_id expert = egi_gradient_demand(gradient, 0), inverse = egi_gradient_demand(gradient, 2), logits = 0;
  const egi_value_id inputs[4] = {egi_gradient_input(gradient, 0), expert, inverse, gradient->out_gradients[4]};
  egi_gradient_emit(gradient, EGI_OP_RouteGrad, inputs, 4, &logits, 1);
  egi_gradient_set(gradient, 0, logits);
  return EG_OK;
}

eg_status egi_gradient_dispatch(egi_gradient *gradient) {
  const egi_value_id inputs[4] = {gradient->out_gradients[0], egi_gradient_input(gradient, 1),
                                  egi_gradient_input(gradient, 2), egi_gradient_input(gradient, 0)};
  egi_value_id x = 0;
  egi_gradient_emit(gradient, EGI_OP_Combine, inputs, 4, &x, 1);
  egi_gradient_set(gradient, 0, x);
  return EG_OK;
}

eg_status egi_gradient_combine(egi_gradient *gradient) {
  const egi_value_id inputs[3] = {gradient->out_gradients[0], egi_gradient_input(gradient, 1),
                                  egi_gradient_input(gradient, 2)};
  egi_value_id rows = 0;
  egi_gradient_emit(gradient, EGI_OP_Dispatch, inputs, 3, &rows, 1);
  egi_gradient_set(gradient, 0, rows);
  return EG_OK;
}

/* ---- RaggedLinear --------------------------------------------------------------------------------------------- */

static eg_status add_row_gradients(egi_gradient *gradient, const egi_ragged *ragged, const egi_value_id *inputs,
                                   unsigned n_inputs, bool has_bias, egi_value_id results[2], unsigned n_results) {
  egi_graph *graph = gradient->graph;
  const egi_node forward = graph->nodes[gradient->node];
  const int64_t roles[EGI_RAGGED_ROLES] = {ragged->counts[EGI_RAGGED_WEIGHT],
                                           has_bias ? ragged->counts[EGI_RAGGED_BIAS] : 0,
                                           ragged->counts[EGI_RAGGED_SCALES], ragged->counts[EGI_RAGGED_ZEROS]};
  const egi_attribute own = egi_attribute_ints("roles", roles, EGI_RAGGED_ROLES);
  egi_node node = {.op = EGI_OP_RaggedLinearGrad, .name = "", .scope = gradient->emit->scope};
  egi_node_id id = 0;
  EG_TRY(gradient->emit->status);
  node.inputs = (egi_value_id *)(uintptr_t)inputs; /* only read */
  node.outputs = results;
  node.attributes = forward.attributes;
  node.n_inputs = (uint16_t)n_inputs;
  node.n_outputs = (uint16_t)n_results;
  node.n_attributes = forward.n_attributes;
  EG_TRY(egi_graph_add_node(graph, &node, &id));
  EG_TRY(egi_node_set_attribute(graph, id, &own));
  for (unsigned i = 0; i < n_results; i++) results[i] = graph->nodes[id].outputs[i];
  return egi_infer_node(graph, id);
}

/* Of the rows and their weights. */
static eg_status row_gradients(egi_gradient *gradient, const egi_ragged *ragged) {
  bool wants_weight = egi_gradient_wants(gradient, EGI_RAGGED_ROW_WEIGHT);
  bool has_bias = wants_weight && ragged->counts[EGI_RAGGED_BIAS] > 0;
  egi_value_id *inputs = EGI_NEW(&gradient->graph->module->arena, egi_value_id, ragged->n_inputs), results[2] = {0};
  unsigned n = EGI_RAGGED_FIRST_ROLE;
  if (!wants_weight && !egi_gradient_wants(gradient, EGI_RAGGED_X)) return EG_OK;
  if (inputs == NULL) return EG_ERROR_MEMORY;
  inputs[EGI_RAGGED_DY] = gradient->out_gradients[0];
  inputs[EGI_RAGGED_FORWARD_X] = wants_weight ? egi_gradient_input(gradient, EGI_RAGGED_X) : 0;
  inputs[EGI_RAGGED_OFFSETS] = egi_gradient_input(gradient, EGI_RAGGED_OFFSETS);
  inputs[EGI_RAGGED_ROW_WEIGHT] = egi_gradient_input(gradient, EGI_RAGGED_ROW_WEIGHT);
  for (unsigned role = 0; role < EGI_RAGGED_ROLES; role++)
    for (uint32_t i = 0; i < ragged->counts[role] && (role != EGI_RAGGED_BIAS || has_bias); i++)
      inputs[n++] = egi_gradient_input(gradient, ragged->first[role] + i);
  EG_TRY(add_row_gradients(gradient, ragged, inputs, n, has_bias, results, wants_weight ? 2 : 1));
  egi_gradient_set(gradient, EGI_RAGGED_X, results[0]);
  if (wants_weight) egi_gradient_set(gradient, EGI_RAGGED_ROW_WEIGHT, results[1]);
  return EG_OK;
}

static egi_value_id column(egi_gradient *gradient, egi_value_id vector) {
  const int64_t last = 1;
  return egi_emit_binary(gradient->emit, EGI_OP_Unsqueeze, vector, egi_emit_integers(gradient->emit, &last, 1));
}

/* [R, 1] */
static egi_value_id ones(egi_gradient *gradient, egi_value_id rows) {
  const int64_t one = 1;
  const egi_value_id sizes[2] = {egi_emit_sizes(gradient->emit, rows, 0, 1),
                                 egi_emit_integers(gradient->emit, &one, 1)};
  egi_value_id shape = egi_emit_with_int(gradient->emit, EGI_OP_Concat, sizes, 2, "axis", 0);
  return egi_emit_binary(gradient->emit, EGI_OP_Expand, egi_gradient_number(gradient, 1.0, rows), shape);
}

static egi_value_id reduced(egi_gradient *gradient, const egi_ragged *ragged, egi_value_id left, egi_value_id right) {
  const egi_value_id inputs[3] = {left, right, egi_gradient_input(gradient, EGI_RAGGED_OFFSETS)};
  const egi_attribute attributes[2] = {egi_attribute_float("alpha", (float)ragged->alpha),
                                       egi_attribute_int("loop", ragged->is_loop)};
  return egi_emit(gradient->emit, EGI_OP_RaggedReduce, inputs, 3, attributes, ragged->is_loop ? 2 : 1);
}

static eg_status require_stack(const egi_gradient *gradient, const egi_ragged *ragged, egi_ragged_role role) {
  bool is_wanted = false;
  for (uint32_t i = 0; i < ragged->counts[role]; i++)
    is_wanted = is_wanted || egi_gradient_wants(gradient, ragged->first[role] + i);
  return egi_gradient_require(gradient, !is_wanted || ragged->counts[role] == 1,
                              "experts that are no stack have no gradient");
}

/* Weights of rows are float32 whatever the rows are. */
static egi_value_id column_like(egi_gradient *gradient, egi_value_id row_weight, egi_value_id rows) {
  const egi_graph *graph = gradient->emit->graph;
  egi_value_id weight = column(gradient, row_weight);
  eg_dtype dtype = graph->values[rows].dtype;
  if (dtype == EG_DTYPE_UNDEFINED || graph->values[row_weight].dtype == dtype) return weight;
  return egi_emit_cast(gradient->emit, weight, dtype);
}

static eg_status matrix_gradients(egi_gradient *gradient, const egi_ragged *ragged) {
  unsigned weight = ragged->first[EGI_RAGGED_WEIGHT], bias = ragged->first[EGI_RAGGED_BIAS];
  egi_value_id x = egi_gradient_input(gradient, EGI_RAGGED_X), dy = gradient->out_gradients[0], scaled = dy;
  egi_value_id row_weight = egi_gradient_input(gradient, EGI_RAGGED_ROW_WEIGHT), right = 0;
  bool has_bias = ragged->counts[EGI_RAGGED_BIAS] > 0;
  EG_TRY(require_stack(gradient, ragged, EGI_RAGGED_WEIGHT));
  EG_TRY(require_stack(gradient, ragged, EGI_RAGGED_BIAS));
  if (egi_gradient_wants(gradient, weight)) {
    if (row_weight != 0)
      scaled = egi_emit_binary(gradient->emit, EGI_OP_Mul, dy, column_like(gradient, row_weight, dy));
    egi_gradient_set(gradient, weight,
                     ragged->is_transposed ? reduced(gradient, ragged, x, scaled)
                                           : reduced(gradient, ragged, scaled, x));
  }
  if (!has_bias || !egi_gradient_wants(gradient, bias)) return EG_OK;
  right = row_weight != 0 ? column_like(gradient, row_weight, dy) : ones(gradient, dy);
  egi_value_id sums = reduced(gradient, ragged, dy, right);
  egi_gradient_set(gradient, bias, egi_gradient_reshaped(gradient, sums, egi_gradient_input(gradient, bias)));
  return EG_OK;
}

eg_status egi_gradient_ragged_linear(egi_gradient *gradient) {
  egi_ragged ragged;
  EG_TRY(egi_ragged_read(gradient->graph, gradient->node, &ragged));
  egi_gradient_set(gradient, EGI_RAGGED_ADDEND, gradient->out_gradients[0]);
  EG_TRY(row_gradients(gradient, &ragged));
  EG_TRY(matrix_gradients(gradient, &ragged));
  return gradient->emit->status;
}
