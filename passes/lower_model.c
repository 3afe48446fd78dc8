/* Lowering of DynamicQuantizeLinear (operator version 11), TensorScatter (24) and CausalConvWithState (27). */
#include <string.h>

#include "passes/lower.h"

/* The largest and the smallest of x and 0 are the ends of 0..255: scale = (max - min) / 255, zero = -min / scale. */
eg_status egi_lower_dynamic_quantize(egi_lowering *lowering) {
  egi_emitter *emit = &lowering->emit;
  egi_value_id x = egi_lowering_input(lowering, 0);
  egi_value_id zero = egi_emit_scalar(emit, 0.0, EG_DTYPE_F32), most = egi_emit_scalar(emit, 255.0, EG_DTYPE_F32);
  egi_value_id high = egi_emit_with_int(emit, EGI_OP_ReduceMax, &x, 1, "keepdims", 0);
  egi_value_id low = egi_emit_with_int(emit, EGI_OP_ReduceMin, &x, 1, "keepdims", 0);
  high = egi_emit_binary(emit, EGI_OP_Max, high, zero);
  low = egi_emit_binary(emit, EGI_OP_Min, low, zero);
  egi_value_id scale = egi_emit_binary(emit, EGI_OP_Div, egi_emit_binary(emit, EGI_OP_Sub, high, low), most);
  egi_value_id start = egi_emit_binary(emit, EGI_OP_Div, egi_emit_binary(emit, EGI_OP_Sub, zero, low), scale);
  const egi_value_id bounds[3] = {egi_emit_unary(emit, EGI_OP_Round, start), zero, most};
  egi_value_id point = egi_emit_cast(emit, egi_emit(emit, EGI_OP_Clip, bounds, 3, NULL, 0), EG_DTYPE_U8);
  const egi_value_id operands[3] = {x, scale, point};
  lowering->results[0] = egi_emit(emit, EGI_OP_QuantizeLinear, operands, 3, NULL, 0);
  lowering->results[1] = scale;
  lowering->results[2] = point;
  return EG_OK;
}

/* ---- TensorScatter -------------------------------------------------------------------------------------------- */

/* Positions along the axis that the update goes to: [batch or 1, 1.., sequence, 1..]. */
static egi_value_id positions(egi_lowering *lowering, int axis, int rank) {
  egi_emitter *emit = &lowering->emit;
  static const int64_t first = 0;
  int64_t axes[EGI_MAX_RANK];
  uint32_t count = 0;
  egi_value_id at = egi_emit_axes(emit, EGI_OP_Squeeze,
                                  egi_emit_sizes(emit, egi_lowering_input(lowering, 1), axis, axis + 1), &first, 1);
  const egi_value_id range[3] = {egi_emit_scalar(emit, 0.0, EG_DTYPE_I64), at,
                                 egi_emit_scalar(emit, 1.0, EG_DTYPE_I64)};
  at = egi_emit(emit, EGI_OP_Range, range, 3, NULL, 0);
  for (int i = 0; i < rank; i++)
    if (i != axis) axes[count++] = i;
  at = egi_emit_axes(emit, EGI_OP_Unsqueeze, at, axes, count);
  egi_value_id starts = egi_lowering_input(lowering, 2);
  if (starts == 0) return at;
  for (int i = 1; i < rank; i++) axes[i - 1] = i;
  starts = egi_emit_axes(emit, EGI_OP_Unsqueeze, starts, axes, (uint32_t)rank - 1);
  return egi_emit_binary(emit, EGI_OP_Add, at, starts);
}

eg_status egi_lower_tensor_scatter(egi_lowering *lowering) {
  egi_emitter *emit = &lowering->emit;
  egi_value_id cache = egi_lowering_input(lowering, 0), update = egi_lowering_input(lowering, 1);
  int rank = egi_lowering_value(lowering, cache)->rank;
  int64_t axis = egi_node_int(lowering->node, "axis", -2);
  if (axis < 0) axis += rank;
  if (rank < 2 || axis < 1 || axis >= rank || egi_lowering_value(lowering, update)->rank != rank)
    return egi_lowering_fail(lowering, EG_ERROR_SHAPE, "its axis or its update does not fit the cache");
  egi_value_id at = positions(lowering, (int)axis, rank);
  if (strcmp(egi_node_string(lowering->node, "mode", "linear"), "circular") == 0)
    at = egi_emit_binary(emit, EGI_OP_Mod, at, egi_emit_sizes(emit, cache, (int)axis, (int)axis + 1));
  at = egi_emit_binary(emit, EGI_OP_Expand, at, egi_emit_unary(emit, EGI_OP_Shape, update));
  const egi_value_id operands[3] = {cache, at, update};
  lowering->results[0] = egi_emit_with_int(emit, EGI_OP_ScatterElements, operands, 3, "axis", axis);
  return EG_OK;
}

/* ---- CausalConvWithState -------------------------------------------------------------------------------------- */

static egi_value_id make_past(egi_lowering *lowering, int64_t length) {
  egi_emitter *emit = &lowering->emit;
  egi_value_id x = egi_lowering_input(lowering, 0);
  const egi_value_id parts[2] = {egi_emit_sizes(emit, x, 0, 2), egi_emit_integers(emit, &length, 1)};
  egi_value_id shape = egi_emit_with_int(emit, EGI_OP_Concat, parts, 2, "axis", 0);
  egi_value_id zero = egi_emit_scalar(emit, 0.0, egi_lowering_value(lowering, x)->dtype);
  return egi_emit_binary(emit, EGI_OP_Expand, zero, shape);
}

/* The last `length` positions. */
static egi_value_id last_positions(egi_emitter *emit, egi_value_id x, int64_t length) {
  const int64_t start = length > 0 ? -length : INT64_MAX, end = INT64_MAX, axis = 2;
  const egi_value_id slice[4] = {x, egi_emit_integers(emit, &start, 1), egi_emit_integers(emit, &end, 1),
                                 egi_emit_integers(emit, &axis, 1)};
  return egi_emit(emit, EGI_OP_Slice, slice, 4, NULL, 0);
}

eg_status egi_lower_causal_convolution(egi_lowering *lowering) {
  egi_emitter *emit = &lowering->emit;
  egi_value_id x = egi_lowering_input(lowering, 0), w = egi_lowering_input(lowering, 1);
  egi_value_id bias = egi_lowering_input(lowering, 2), past = egi_lowering_input(lowering, 3);
  const char *activation = egi_node_string(lowering->node, "activation", "none");
  int64_t channels = 0, width = 0;
  bool is_none = strcmp(activation, "none") == 0;
  bool is_silu = strcmp(activation, "silu") == 0 || strcmp(activation, "swish") == 0;
  if (egi_lowering_value(lowering, x)->rank != 3 || egi_lowering_value(lowering, w)->rank != 3)
    return egi_lowering_fail(lowering, EG_ERROR_SHAPE, "input and kernel must have 3 dimensions");
  if (!egi_lowering_size(lowering, w, 0, &channels) || !egi_lowering_size(lowering, w, 2, &width) || width < 1)
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "the size of its kernel is not known");
  if (!is_none && !is_silu) return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "its activation is not known");
  const egi_value_id parts[2] = {past != 0 ? past : make_past(lowering, width - 1), x};
  egi_value_id whole = egi_emit_with_int(emit, EGI_OP_Concat, parts, 2, "axis", 2);
  const egi_value_id operands[3] = {whole, w, bias};
  egi_value_id y = egi_emit_with_int(emit, EGI_OP_Conv, operands, bias != 0 ? 3 : 2, "group", channels);
  if (is_silu) y = egi_emit_binary(emit, EGI_OP_Mul, y, egi_emit_unary(emit, EGI_OP_Sigmoid, y));
  lowering->results[0] = y;
  if (egi_lowering_wants(lowering, 1)) lowering->results[1] = last_positions(emit, whole, width - 1);
  return EG_OK;
}
