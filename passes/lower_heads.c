/* Shared by the rules that lower attention: heads, past, positions, and the attention itself, which is the standard
 * operator, or plain ones where a sink takes part in the softmax. */
#include "passes/lower_heads.h"

#include <math.h>

egi_value_id egi_emit_size(egi_emitter *emit, egi_value_id x, int axis) {
  static const int64_t first = 0;
  return egi_emit_axes(emit, EGI_OP_Squeeze, egi_emit_sizes(emit, x, axis, axis + 1), &first, 1);
}

egi_value_id egi_emit_positions(egi_emitter *emit, egi_value_id x, int axis) {
  const egi_value_id range[3] = {egi_emit_scalar(emit, 0.0, EG_DTYPE_I64), egi_emit_size(emit, x, axis),
                                 egi_emit_scalar(emit, 1.0, EG_DTYPE_I64)};
  return egi_emit(emit, EGI_OP_Range, range, 3, NULL, 0);
}

egi_value_id egi_emit_heads(egi_emitter *emit, egi_value_id x, int64_t heads, int64_t size) {
  const int64_t shape[4] = {0, 0, heads, size};
  return egi_emit_binary(emit, EGI_OP_Reshape, x, egi_emit_integers(emit, shape, 4));
}

static egi_value_id permuted(egi_emitter *emit, egi_value_id x, const int64_t *perm, uint32_t count) {
  const egi_attribute attribute = egi_attribute_ints("perm", perm, count);
  return egi_emit(emit, EGI_OP_Transpose, &x, 1, &attribute, 1);
}

egi_value_id egi_emit_exchanged(egi_emitter *emit, egi_value_id x) {
  static const int64_t perm[4] = {0, 2, 1, 3};
  return permuted(emit, x, perm, 4);
}

egi_value_id egi_emit_with_past(egi_emitter *emit, egi_value_id past, egi_value_id x) {
  const egi_value_id parts[2] = {past, x};
  return past == 0 ? x : egi_emit_with_int(emit, EGI_OP_Concat, parts, 2, "axis", 2);
}

void egi_emit_split(egi_emitter *emit, egi_value_id x, const int64_t *sizes, unsigned count, egi_value_id *out_parts) {
  const egi_value_id inputs[2] = {x, egi_emit_integers(emit, sizes, count)};
  const egi_attribute axis = egi_attribute_int("axis", -1);
  egi_emit_many(emit, EGI_OP_Split, inputs, 2, &axis, 1, out_parts, count);
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

static double scale_of(egi_lowering *lowering, const egi_lowered_attention *a) {
  int64_t size = 0;
  if (a->scale > 0 || a->scale < 0) return a->scale;
  if (!egi_lowering_size(lowering, a->q, 3, &size) || size < 1) return 1.0;
  return 1.0 / sqrt((double)size);
}

/* Mask and bias as one float tensor that is added. */
static egi_value_id additive(egi_emitter *emit, const egi_lowered_attention *a) {
  if (emit->status != EG_OK) return 0;
  const egi_value_id inputs[3] = {a->mask, a->bias,
                                  egi_emit_scalar(emit, -HUGE_VAL, emit->graph->values[a->bias].dtype)};
  return a->mask == 0 ? a->bias : egi_emit(emit, EGI_OP_Where, inputs, 3, NULL, 0);
}

static egi_value_id standard(egi_lowering *lowering, const egi_lowered_attention *a) {
  egi_value_id mask = a->bias != 0 ? additive(&lowering->emit, a) : a->mask;
  const egi_value_id inputs[4] = {a->q, a->k, a->v, mask};
  const egi_attribute attributes[3] = {egi_attribute_float("scale", (float)scale_of(lowering, a)),
                                       egi_attribute_float("softcap", (float)a->softcap),
                                       egi_attribute_int("is_causal", a->is_causal ? 1 : 0)};
  return egi_emit(&lowering->emit, EGI_OP_Attention, inputs, mask != 0 ? 4 : 3, attributes, 3);
}

/* Each key head once for every query head that shares it. */
static egi_value_id repeated(egi_emitter *emit, egi_value_id x, const egi_lowered_attention *a) {
  static const int64_t between = 2;
  int64_t times = a->heads / a->kv_heads;
  if (times == 1) return x;
  const egi_value_id wide[3] = {egi_emit_sizes(emit, x, 0, 2), egi_emit_integers(emit, &times, 1),
                                egi_emit_sizes(emit, x, 2, 4)};
  const egi_value_id flat[3] = {egi_emit_sizes(emit, x, 0, 1), egi_emit_integers(emit, &a->heads, 1), wide[2]};
  egi_value_id y = egi_emit_axes(emit, EGI_OP_Unsqueeze, x, &between, 1);
  y = egi_emit_binary(emit, EGI_OP_Expand, y, egi_emit_with_int(emit, EGI_OP_Concat, wide, 3, "axis", 0));
  return egi_emit_binary(emit, EGI_OP_Reshape, y, egi_emit_with_int(emit, EGI_OP_Concat, flat, 3, "axis", 0));
}

static egi_value_id scores(egi_lowering *lowering, const egi_lowered_attention *a) {
  static const int64_t perm[4] = {0, 1, 3, 2};
  egi_emitter *emit = &lowering->emit;
  eg_dtype dtype = egi_lowering_value(lowering, a->q)->dtype;
  egi_value_id keys = permuted(emit, repeated(emit, a->k, a), perm, 4);
  egi_value_id s = egi_emit_binary(emit, EGI_OP_MatMul, a->q, keys);
  s = egi_emit_binary(emit, EGI_OP_Mul, s, egi_emit_scalar(emit, scale_of(lowering, a), dtype));
  if (a->softcap > 0) {
    egi_value_id cap = egi_emit_scalar(emit, a->softcap, dtype);
    s = egi_emit_unary(emit, EGI_OP_Tanh, egi_emit_binary(emit, EGI_OP_Div, s, cap));
    s = egi_emit_binary(emit, EGI_OP_Mul, s, cap);
  }
  if (a->bias != 0) s = egi_emit_binary(emit, EGI_OP_Add, s, a->bias);
  const egi_value_id where[3] = {a->mask, s, egi_emit_scalar(emit, -HUGE_VAL, dtype)};
  return a->mask != 0 ? egi_emit(emit, EGI_OP_Where, where, 3, NULL, 0) : s;
}

/* The sink is a last column of scores whose probability is dropped (gpt-oss, arXiv:2508.10925, section 2.2). */
static egi_value_id with_sinks(egi_lowering *lowering, const egi_lowered_attention *a) {
  static const int64_t column[4] = {1, -1, 1, 1}, start = 0, end = -1, axis = 3, one = 1;
  egi_emitter *emit = &lowering->emit;
  egi_value_id s = scores(lowering, a);
  egi_value_id sink = egi_emit_cast(emit, a->sinks, egi_lowering_value(lowering, a->q)->dtype);
  sink = egi_emit_binary(emit, EGI_OP_Reshape, sink, egi_emit_integers(emit, column, 4));
  const egi_value_id shape[2] = {egi_emit_sizes(emit, s, 0, 3), egi_emit_integers(emit, &one, 1)};
  sink = egi_emit_binary(emit, EGI_OP_Expand, sink, egi_emit_with_int(emit, EGI_OP_Concat, shape, 2, "axis", 0));
  const egi_value_id both[2] = {s, sink};
  egi_value_id p = egi_emit_with_int(emit, EGI_OP_Concat, both, 2, "axis", -1);
  p = egi_emit_with_int(emit, EGI_OP_Softmax, &p, 1, "axis", -1);
  const egi_value_id slice[4] = {p, egi_emit_integers(emit, &start, 1), egi_emit_integers(emit, &end, 1),
                                 egi_emit_integers(emit, &axis, 1)};
  p = egi_emit(emit, EGI_OP_Slice, slice, 4, NULL, 0);
  return egi_emit_binary(emit, EGI_OP_MatMul, p, repeated(emit, a->v, a));
}

/* Queries see the keys up to their own position. */
static egi_value_id causal_mask(egi_emitter *emit, const egi_lowered_attention *a) {
  static const int64_t last = 1;
  egi_value_id query = egi_emit_axes(emit, EGI_OP_Unsqueeze, egi_emit_positions(emit, a->q, 2), &last, 1);
  return egi_emit_binary(emit, EGI_OP_LessOrEqual, egi_emit_positions(emit, a->k, 2), query);
}

egi_value_id egi_lower_attend(egi_lowering *lowering, const egi_lowered_attention *attention) {
  static const int64_t flat[3] = {0, 0, -1};
  egi_emitter *emit = &lowering->emit;
  egi_lowered_attention a = *attention;
  if (emit->status != EG_OK) return 0;
  if (a.is_causal && (a.sinks != 0 || a.bias != 0)) {
    egi_value_id causal = causal_mask(emit, &a);
    a.mask = a.mask != 0 ? egi_emit_binary(emit, EGI_OP_And, a.mask, causal) : causal;
    a.is_causal = false;
  }
  egi_value_id y = egi_emit_exchanged(emit, a.sinks != 0 ? with_sinks(lowering, &a) : standard(lowering, &a));
  return egi_emit_binary(emit, EGI_OP_Reshape, y, egi_emit_integers(emit, flat, 3));
}
