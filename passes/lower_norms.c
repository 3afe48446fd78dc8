/* Lowering of the norms and activations of com.microsoft (onnxruntime's ContribOperators.md): the sum that a Skip form
 * adds before its norm, and pieces of plain operators. SimplifiedLayerNormalization stands in domain "" as well, where
 * onnxruntime registered it. */
#include <string.h>

#include "passes/lower.h"

static const egi_attribute *epsilon_of(const egi_lowering *lowering, double otherwise, egi_attribute *buffer) {
  *buffer = egi_attribute_float("epsilon", egi_node_float(lowering->node, "epsilon", (float)otherwise));
  return buffer;
}

static egi_value_id add(egi_lowering *lowering, egi_value_id a, egi_value_id b) {
  return b == 0 ? a : egi_emit_binary(&lowering->emit, EGI_OP_Add, a, b);
}

eg_status egi_lower_rms_normalization(egi_lowering *lowering) {
  const egi_value_id inputs[2] = {egi_lowering_input(lowering, 0), egi_lowering_input(lowering, 1)};
  egi_attribute attributes[3];
  (void)epsilon_of(lowering, 1e-5, &attributes[0]);
  attributes[1] = egi_attribute_int("axis", egi_node_int(lowering->node, "axis", -1));
  attributes[2] = egi_attribute_int("stash_type", egi_node_int(lowering->node, "stash_type", EG_DTYPE_F32));
  lowering->results[0] = egi_emit(&lowering->emit, EGI_OP_RMSNormalization, inputs, 2, attributes, 3);
  return EG_OK;
}

/* input, skip, gamma, bias? -> norm, (mean), (deviation), the sum */
eg_status egi_lower_skip_rms_normalization(egi_lowering *lowering) {
  egi_value_id sum = add(lowering, egi_lowering_input(lowering, 0), egi_lowering_input(lowering, 1));
  sum = add(lowering, sum, egi_lowering_input(lowering, 3));
  const egi_value_id inputs[2] = {sum, egi_lowering_input(lowering, 2)};
  egi_attribute epsilon;
  lowering->results[0] =
      egi_emit(&lowering->emit, EGI_OP_RMSNormalization, inputs, 2, epsilon_of(lowering, 1e-12, &epsilon), 1);
  lowering->results[3] = sum;
  return EG_OK;
}

/* input, skip, gamma, beta?, bias? -> norm, mean, deviation, the sum */
eg_status egi_lower_skip_layer_normalization(egi_lowering *lowering) {
  egi_value_id sum = add(lowering, egi_lowering_input(lowering, 0), egi_lowering_input(lowering, 1));
  sum = add(lowering, sum, egi_lowering_input(lowering, 4));
  const egi_value_id inputs[3] = {sum, egi_lowering_input(lowering, 2), egi_lowering_input(lowering, 3)};
  egi_attribute epsilon;
  lowering->results[0] = egi_emit(&lowering->emit, EGI_OP_LayerNormalization, inputs, inputs[2] != 0 ? 3 : 2,
                                  epsilon_of(lowering, 1e-12, &epsilon), 1);
  lowering->results[3] = sum;
  return EG_OK;
}

/* ---- activations ------------------------------------------------------------------------------------------------ */

static egi_value_id gelu(egi_lowering *lowering, egi_value_id x, const char *approximate) {
  const egi_attribute attribute = egi_attribute_string("approximate", approximate);
  return egi_emit(&lowering->emit, EGI_OP_Gelu, &x, 1, &attribute, 1);
}

eg_status egi_lower_gelu(egi_lowering *lowering) {
  lowering->results[0] = gelu(lowering, egi_lowering_input(lowering, 0), "none");
  return EG_OK;
}

eg_status egi_lower_fast_gelu(egi_lowering *lowering) {
  egi_value_id x = add(lowering, egi_lowering_input(lowering, 0), egi_lowering_input(lowering, 1));
  lowering->results[0] = gelu(lowering, x, "tanh");
  return EG_OK;
}

eg_status egi_lower_bias_gelu(egi_lowering *lowering) {
  egi_value_id x = add(lowering, egi_lowering_input(lowering, 0), egi_lowering_input(lowering, 1));
  lowering->results[0] = gelu(lowering, x, "none");
  return EG_OK;
}

/* x · sigmoid(alpha · x) */
eg_status egi_lower_quick_gelu(egi_lowering *lowering) {
  egi_emitter *emit = &lowering->emit;
  egi_value_id x = egi_lowering_input(lowering, 0), inner = x;
  float alpha = egi_node_float(lowering->node, "alpha", 1.702F);
  if (alpha < 1.0F || alpha > 1.0F) {
    egi_value_id factor = egi_emit_scalar(emit, (double)alpha, egi_lowering_value(lowering, x)->dtype);
    inner = egi_emit_binary(emit, EGI_OP_Mul, factor, x);
  }
  lowering->results[0] = egi_emit_binary(emit, EGI_OP_Mul, x, egi_emit_unary(emit, EGI_OP_Sigmoid, inner));
  return EG_OK;
}

/* The first half of the last axis times the Gelu of the second, after a bias is added. */
eg_status egi_lower_bias_split_gelu(egi_lowering *lowering) {
  egi_emitter *emit = &lowering->emit;
  egi_value_id x = add(lowering, egi_lowering_input(lowering, 0), egi_lowering_input(lowering, 1)), halves[2];
  const egi_attribute attributes[2] = {egi_attribute_int("axis", -1), egi_attribute_int("num_outputs", 2)};
  egi_emit_many(emit, EGI_OP_Split, &x, 1, attributes, 2, halves, 2);
  lowering->results[0] = egi_emit_binary(emit, EGI_OP_Mul, halves[0], gelu(lowering, halves[1], "none"));
  return EG_OK;
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* With its last two axes swapped; a vector stays what it is. */
static egi_value_id swapped(egi_lowering *lowering, egi_value_id x, bool is_wanted) {
  int rank = egi_lowering_value(lowering, x)->rank;
  int64_t perm[EGI_MAX_RANK];
  if (!is_wanted || rank < 2) return x;
  for (int i = 0; i < rank; i++) perm[i] = i < rank - 2 ? i : 2 * rank - 3 - i;
  const egi_attribute attribute = egi_attribute_ints("perm", perm, (uint32_t)rank);
  return egi_emit(&lowering->emit, EGI_OP_Transpose, &x, 1, &attribute, 1);
}

/* alpha · A'·B' with transposes of the last two axes. */
eg_status egi_lower_fused_matmul(egi_lowering *lowering) {
  egi_emitter *emit = &lowering->emit;
  egi_value_id a = egi_lowering_input(lowering, 0), b = egi_lowering_input(lowering, 1);
  float alpha = egi_node_float(lowering->node, "alpha", 1.0F);
  if (egi_node_int(lowering->node, "transBatchA", 0) != 0 || egi_node_int(lowering->node, "transBatchB", 0) != 0)
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "transBatchA and transBatchB are not supported");
  a = swapped(lowering, a, egi_node_int(lowering->node, "transA", 0) != 0);
  b = swapped(lowering, b, egi_node_int(lowering->node, "transB", 0) != 0);
  egi_value_id y = egi_emit_binary(emit, EGI_OP_MatMul, a, b);
  if ((alpha < 1.0F || alpha > 1.0F) && emit->status == EG_OK)
    y = egi_emit_binary(emit, EGI_OP_Mul, y,
                        egi_emit_scalar(emit, (double)alpha, egi_lowering_value(lowering, y)->dtype));
  lowering->results[0] = y;
  return EG_OK;
}
