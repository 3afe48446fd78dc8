/* Gradient rules of Conv, LinearAttention and both Dropouts. */
#include "passes/passes.h"

eg_status egi_gradient_conv(egi_gradient *gradient) {
  egi_value_id results[3] = {0};
  unsigned n_results = egi_gradient_wants(gradient, 2) ? 3 : egi_gradient_wants(gradient, 1) ? 2 : 1;
  const egi_value_id inputs[3] = {egi_gradient_input(gradient, 0), egi_gradient_input(gradient, 1),
                                  gradient->out_gradients[0]};
  egi_gradient_emit(gradient, EGI_OP_ConvGrad, inputs, 3, results, n_results);
  for (unsigned i = 0; i < n_results; i++) egi_gradient_set(gradient, i, results[i]);
  return EG_OK;
}

/* Where it drops nothing; key_dropout has replaced the others. */
eg_status egi_gradient_dropout(egi_gradient *gradient) {
  egi_value_id mode = egi_gradient_input(gradient, 2);
  double is_training = 0;
  bool is_idle = mode == 0 || (egi_value_scalar(gradient->graph, mode, &is_training) && is_training <= 0);
  EG_TRY(egi_gradient_require(gradient, is_idle, "dropout that trains needs the pass key_dropout"));
  if (gradient->out_gradients[0] != 0) egi_gradient_set(gradient, 0, gradient->out_gradients[0]);
  return EG_OK;
}

/* With a gradient of the last state alone there is none of the result, which is taken as 0. */
eg_status egi_gradient_linear_attention(egi_gradient *gradient) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  egi_value_id inputs[8] = {0}, results[6] = {0};
  unsigned n_results = 1, n_inputs = node->n_inputs;
  for (unsigned i = 0; i < n_inputs; i++) {
    inputs[i] = egi_gradient_input(gradient, i);
    if (egi_gradient_wants(gradient, i)) n_results = i + 1;
  }
  inputs[6] = gradient->out_gradients[0];
  bool has_state = node->n_outputs > 1 && gradient->out_gradients[1] != 0;
  inputs[7] = has_state ? gradient->out_gradients[1] : 0;
  EG_TRY(egi_gradient_require(gradient, inputs[6] != 0, "its state alone has no gradient"));
  egi_gradient_emit(gradient, EGI_OP_LinearAttentionGrad, inputs, has_state ? 8 : 7, results, n_results);
  for (unsigned i = 0; i < n_results; i++) egi_gradient_set(gradient, i, results[i]);
  return EG_OK;
}

/* The same elements are dropped again. */
eg_status egi_gradient_keyed_dropout(egi_gradient *gradient) {
  const egi_value_id inputs[2] = {gradient->out_gradients[0], egi_gradient_input(gradient, 1)};
  egi_value_id dx = 0;
  egi_gradient_emit(gradient, EGI_OP_KeyedDropout, inputs, 2, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}
