/* Gradient rules of the operators of language models: each has its own gradient operator, or is its own inverse. */
#include "passes/passes.h"

/* One past the last wanted input among the first `n_inputs`: that many results are asked for. */
static unsigned count_results(const egi_gradient *gradient, unsigned n_inputs) {
  unsigned count = 1;
  for (unsigned i = 0; i < n_inputs; i++) {
    if (egi_gradient_wants(gradient, i)) count = i + 1;
  }
  return count;
}

static void set_results(egi_gradient *gradient, const egi_value_id *results, unsigned count) {
  for (unsigned i = 0; i < count; i++) egi_gradient_set(gradient, i, results[i]);
}

static eg_status from_result(egi_gradient *gradient, egi_op op) {
  const egi_value_id inputs[2] = {egi_gradient_output(gradient, 0), gradient->out_gradients[0]};
  egi_value_id dx = 0;
  egi_gradient_emit(gradient, op, inputs, 2, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}

eg_status egi_gradient_softmax(egi_gradient *gradient) {
  return from_result(gradient, EGI_OP_SoftmaxGrad);
}

eg_status egi_gradient_log_softmax(egi_gradient *gradient) {
  return from_result(gradient, EGI_OP_LogSoftmaxGrad);
}

eg_status egi_gradient_layer_normalization(egi_gradient *gradient) {
  EG_TRY(egi_gradient_require(gradient, gradient->out_gradients[0] != 0, "mean and deviation have no gradient"));
  unsigned n_results = count_results(gradient, 3);
  egi_value_id results[3] = {0}, mean = egi_gradient_demand(gradient, 1), deviation = egi_gradient_demand(gradient, 2);
  const egi_value_id inputs[5] = {egi_gradient_input(gradient, 0), egi_gradient_input(gradient, 1), mean, deviation,
                                  gradient->out_gradients[0]};
  egi_gradient_emit(gradient, EGI_OP_LayerNormalizationGrad, inputs, 5, results, n_results);
  set_results(gradient, results, n_results);
  return EG_OK;
}

eg_status egi_gradient_rms_normalization(egi_gradient *gradient) {
  unsigned n_results = count_results(gradient, 2);
  egi_value_id results[2] = {0};
  const egi_value_id inputs[3] = {egi_gradient_input(gradient, 0), egi_gradient_input(gradient, 1),
                                  gradient->out_gradients[0]};
  egi_gradient_emit(gradient, EGI_OP_RMSNormalizationGrad, inputs, 3, results, n_results);
  set_results(gradient, results, n_results);
  return EG_OK;
}

/* A rotation's transpose is the rotation back: the sine changes its sign. */
eg_status egi_gradient_rotary_embedding(egi_gradient *gradient) {
  EG_TRY(egi_gradient_require(gradient, !egi_gradient_wants(gradient, 1) && !egi_gradient_wants(gradient, 2),
                              "the tables of a rotary embedding have no gradient"));
  egi_value_id sine = egi_emit_unary(gradient->emit, EGI_OP_Neg, egi_gradient_input(gradient, 2));
  const egi_value_id inputs[4] = {gradient->out_gradients[0], egi_gradient_input(gradient, 1), sine,
                                  egi_gradient_input(gradient, 3)};
  egi_value_id dx = 0;
  egi_gradient_emit(gradient, EGI_OP_RotaryEmbedding, inputs, inputs[3] != 0 ? 4 : 3, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}

eg_status egi_gradient_attention(egi_gradient *gradient) {
  const egi_graph *graph = gradient->graph;
  const egi_node *node = &graph->nodes[gradient->node];
  bool has_only_result = gradient->out_gradients[0] != 0, has_cache = false;
  for (unsigned i = 1; i < node->n_outputs; i++) has_only_result = has_only_result && gradient->out_gradients[i] == 0;
  for (unsigned i = 4; i < node->n_inputs; i++) has_cache = has_cache || node->inputs[i] != 0;
  EG_TRY(egi_gradient_require(gradient, has_only_result, "only the first result of Attention has a gradient"));
  EG_TRY(egi_gradient_require(gradient, !has_cache, "Attention with a cache has no gradient"));
  EG_TRY(egi_gradient_require(gradient, !egi_gradient_wants(gradient, 3), "the mask of Attention has no gradient"));
  unsigned n_results = count_results(gradient, 3);
  egi_value_id results[3] = {0}, lse = egi_gradient_demand(gradient, 4);
  const egi_value_id inputs[7] = {egi_gradient_input(gradient, 0),  egi_gradient_input(gradient, 1),
                                  egi_gradient_input(gradient, 2),  egi_gradient_input(gradient, 3),
                                  egi_gradient_output(gradient, 0), lse,
                                  gradient->out_gradients[0]};
  egi_gradient_emit(gradient, EGI_OP_AttentionGrad, inputs, 7, results, n_results);
  set_results(gradient, results, n_results);
  return EG_OK;
}

eg_status egi_gradient_masked_attention(egi_gradient *gradient) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  bool has_lse = node->n_outputs > 1 && gradient->out_gradients[1] != 0;
  EG_TRY(egi_gradient_require(gradient, !has_lse, "the log-sum-exp has no gradient"));
  bool wants_sinks = egi_gradient_wants(gradient, 4);
  unsigned n_results = wants_sinks ? 4 : count_results(gradient, 3);
  egi_value_id results[4] = {0}, lse = egi_gradient_demand(gradient, 1);
  const egi_value_id inputs[11] = {egi_gradient_input(gradient, 0),
                                   egi_gradient_input(gradient, 1),
                                   egi_gradient_input(gradient, 2),
                                   egi_gradient_input(gradient, 3),
                                   egi_gradient_input(gradient, 4),
                                   egi_gradient_output(gradient, 0),
                                   lse,
                                   gradient->out_gradients[0],
                                   egi_gradient_input(gradient, 5),
                                   egi_gradient_input(gradient, 6),
                                   egi_gradient_input(gradient, 7)};
  unsigned n_inputs = inputs[10] != 0 ? 11 : inputs[8] != 0 ? 10 : 8;
  egi_gradient_emit(gradient, EGI_OP_MaskedAttentionGrad, inputs, n_inputs, results, n_results);
  for (unsigned i = 0; i < 3 && i < n_results; i++) egi_gradient_set(gradient, i, results[i]);
  if (wants_sinks) egi_gradient_set(gradient, 4, results[3]);
  return EG_OK;
}

eg_status egi_gradient_linear_log_probability(egi_gradient *gradient) {
  EG_TRY(egi_gradient_require(gradient, gradient->out_gradients[1] == 0, "the log-sum-exp has no gradient"));
  bool wants_bias = egi_gradient_wants(gradient, 3);
  unsigned n_results = wants_bias ? 3 : egi_gradient_wants(gradient, 1) ? 2 : 1;
  egi_value_id results[3] = {0}, bias = egi_gradient_input(gradient, 3);
  egi_value_id inputs[10] = {egi_gradient_input(gradient, 0), egi_gradient_input(gradient, 1),
                             egi_gradient_input(gradient, 2), egi_gradient_output(gradient, 1),
                             gradient->out_gradients[0],      bias};
  unsigned n_inputs = 10;
  for (unsigned i = 6; i < 10; i++) inputs[i] = egi_gradient_input(gradient, i - 2); /* of a quantised weight */
  while (inputs[n_inputs - 1] == 0) n_inputs--;
  egi_gradient_emit(gradient, EGI_OP_LinearLogProbabilityGrad, inputs, n_inputs, results, n_results);
  egi_gradient_set(gradient, 0, results[0]);
  if (n_results > 1) egi_gradient_set(gradient, 1, results[1]);
  if (n_results > 2) egi_gradient_set(gradient, 3, results[2]);
  return EG_OK;
}

eg_status egi_gradient_log_probability(egi_gradient *gradient) {
  EG_TRY(egi_gradient_require(gradient, gradient->out_gradients[1] == 0, "the log-sum-exp has no gradient"));
  const egi_value_id inputs[4] = {egi_gradient_input(gradient, 0), egi_gradient_input(gradient, 1),
                                  egi_gradient_output(gradient, 1), gradient->out_gradients[0]};
  egi_value_id dx = 0;
  egi_gradient_emit(gradient, EGI_OP_LogProbabilityGrad, inputs, 4, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}
