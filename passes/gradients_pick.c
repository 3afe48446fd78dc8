/* Gradient rules of operators that pick, pad, repeat and place elements, and of running products. */
#include "passes/passes.h"

/* The picked elements get dy. */
eg_status egi_gradient_top_k(egi_gradient *gradient) {
  egi_value_id x = egi_gradient_input(gradient, 0), dy = gradient->out_gradients[0], dx = 0;
  if (dy == 0) return EG_OK;
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  const egi_attribute axis = egi_attribute_int("axis", egi_node_int(node, "axis", -1));
  const egi_value_id inputs[3] = {x, egi_gradient_demand(gradient, 1), dy};
  dx = egi_emit(gradient->emit, EGI_OP_GatherElementsGrad, inputs, 3, &axis, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}

/* Updates read dy where they were written; the data's gradient is zero there, unless they were added. */
eg_status egi_gradient_scatter_elements(egi_gradient *gradient) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  const char *reduction = egi_node_string(node, "reduction", "none");
  bool is_plain = reduction[0] == 'n', is_sum = reduction[0] == 'a';
  EG_TRY(egi_gradient_require(gradient, is_plain || is_sum, "only reductions \"none\" and \"add\" have a gradient"));
  egi_emitter *emit = gradient->emit;
  const egi_attribute axis = egi_attribute_int("axis", egi_node_int(node, "axis", 0));
  egi_value_id dy = gradient->out_gradients[0], indices = egi_gradient_input(gradient, 1);
  const egi_value_id read[2] = {dy, indices};
  if (egi_gradient_wants(gradient, 2))
    egi_gradient_set(gradient, 2, egi_emit(emit, EGI_OP_GatherElements, read, 2, &axis, 1));
  if (egi_gradient_wants(gradient, 0) && is_plain) {
    egi_value_id updates = egi_gradient_input(gradient, 2);
    egi_value_id zeros = egi_gradient_expanded(gradient, egi_gradient_number(gradient, 0.0, dy), updates);
    const egi_value_id inputs[3] = {dy, indices, zeros};
    dy = egi_emit(emit, EGI_OP_ScatterElements, inputs, 3, &axis, 1);
  }
  egi_gradient_set(gradient, 0, dy);
  return EG_OK;
}

eg_status egi_gradient_pad(egi_gradient *gradient) {
  const egi_value_id inputs[4] = {egi_gradient_input(gradient, 0), gradient->out_gradients[0],
                                  egi_gradient_input(gradient, 1), egi_gradient_input(gradient, 3)};
  egi_value_id dx = 0;
  EG_TRY(egi_gradient_require(gradient, !egi_gradient_wants(gradient, 2), "the constant of Pad has no gradient"));
  egi_gradient_emit(gradient, EGI_OP_PadGrad, inputs, inputs[3] != 0 ? 4 : 3, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}

eg_status egi_gradient_tile(egi_gradient *gradient) {
  egi_value_id x = egi_gradient_input(gradient, 0);
  egi_gradient_set(gradient, 0, egi_emit_binary(gradient->emit, EGI_OP_TileGrad, x, gradient->out_gradients[0]));
  return EG_OK;
}

/* Reversed once more, everything is where it was. */
eg_status egi_gradient_reverse_sequence(egi_gradient *gradient) {
  const egi_value_id inputs[2] = {gradient->out_gradients[0], egi_gradient_input(gradient, 1)};
  egi_value_id dx = 0;
  egi_gradient_emit(gradient, EGI_OP_ReverseSequence, inputs, 2, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}

/* d y_i / d x_k = y_i / x_k for every product that x_k is in: the sum the other way round of dy · y, over x. An element
 * of 0 has none (NaN). */
eg_status egi_gradient_cum_prod(egi_gradient *gradient) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  const egi_attribute attributes[2] = {egi_attribute_int("exclusive", egi_node_int(node, "exclusive", 0)),
                                       egi_attribute_int("reverse", egi_node_int(node, "reverse", 0) == 0)};
  egi_emitter *emit = gradient->emit;
  egi_value_id x = egi_gradient_input(gradient, 0);
  const egi_value_id inputs[2] = {
      egi_emit_binary(emit, EGI_OP_Mul, gradient->out_gradients[0], egi_gradient_output(gradient, 0)),
      egi_gradient_input(gradient, 1)};
  egi_value_id sums = egi_emit(emit, EGI_OP_CumSum, inputs, 2, attributes, 2);
  egi_gradient_set(gradient, 0, egi_emit_binary(emit, EGI_OP_Div, sums, x));
  return EG_OK;
}
