/* Lowering of operators over quantised tensors: com.microsoft's products become engraft.Linear over the same bytes,
 * gathered rows are unpacked by plain operators, products of integers are those of int32. */
#include <string.h>

#include "graph/linear.h"
#include "passes/lower.h"

static egi_attribute features(const egi_lowering *lowering, const char *name, const char *from) {
  return egi_attribute_int(name, egi_node_int(lowering->node, from, 0));
}

/* A, B, scales, zero_points?, g_idx?, bias? */
eg_status egi_lower_matmul_nbits(egi_lowering *lowering) {
  const egi_node *node = lowering->node;
  egi_value_id inputs[EGI_LINEAR_INPUTS] = {0};
  if (egi_node_int(node, "weight_prepacked", 0) != 0)
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED,
                             "weight_prepacked is set: its weight is laid out for one device; export the model without "
                             "prepacking");
  inputs[EGI_LINEAR_X] = egi_lowering_input(lowering, 0);
  inputs[EGI_LINEAR_WEIGHT] = egi_lowering_input(lowering, 1);
  inputs[EGI_LINEAR_SCALES] = egi_lowering_input(lowering, 2);
  inputs[EGI_LINEAR_ZERO_POINTS] = egi_lowering_input(lowering, 3);
  inputs[EGI_LINEAR_GROUP_INDEX] = egi_lowering_input(lowering, 4);
  inputs[EGI_LINEAR_BIAS] = egi_lowering_input(lowering, 5);
  const egi_attribute attributes[5] = {egi_attribute_string("storage", "nbits"),
                                       egi_attribute_int("bits", egi_node_int(node, "bits", 4)),
                                       egi_attribute_int("block_size", egi_node_int(node, "block_size", 0)),
                                       features(lowering, "out_features", "N"), features(lowering, "in_features", "K")};
  unsigned n = EGI_LINEAR_INPUTS;
  while (inputs[n - 1] == 0) n--;
  lowering->results[0] = egi_emit(&lowering->emit, EGI_OP_Linear, inputs, n, attributes, 5);
  return EG_OK;
}

/* A, B, absmax */
eg_status egi_lower_matmul_bnb4(egi_lowering *lowering) {
  const egi_node *node = lowering->node;
  const egi_value_id inputs[4] = {egi_lowering_input(lowering, 0), egi_lowering_input(lowering, 1), 0,
                                  egi_lowering_input(lowering, 2)};
  if (egi_node_int(node, "transB", 1) != 1)
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "transB = 0 is not supported");
  const egi_attribute attributes[5] = {egi_attribute_string("storage", "bnb4"),
                                       egi_attribute_int("quant_type", egi_node_int(node, "quant_type", -1)),
                                       egi_attribute_int("block_size", egi_node_int(node, "block_size", 0)),
                                       features(lowering, "out_features", "N"), features(lowering, "in_features", "K")};
  lowering->results[0] = egi_emit(&lowering->emit, EGI_OP_Linear, inputs, 4, attributes, 5);
  return EG_OK;
}

/* ---- the standard operators' relatives -------------------------------------------------------------------------- */

/* Codes without their zero point, in int32; one for each row (of A) stands behind the row's dim. */
static egi_value_id centred(egi_lowering *lowering, unsigned input, unsigned zero_input, bool is_by_row) {
  static const int64_t last = -1;
  egi_emitter *emit = &lowering->emit;
  egi_value_id x = egi_emit_cast(emit, egi_lowering_input(lowering, input), EG_DTYPE_I32);
  egi_value_id zero = egi_lowering_input(lowering, zero_input);
  if (zero == 0) return x;
  bool is_column = is_by_row && egi_lowering_value(lowering, zero)->rank == 1;
  zero = egi_emit_cast(emit, zero, EG_DTYPE_I32);
  if (is_column) zero = egi_emit_axes(emit, EGI_OP_Unsqueeze, zero, &last, 1);
  return egi_emit_binary(emit, EGI_OP_Sub, x, zero);
}

/* A, B, a_zero_point?, b_zero_point? (operator version 10) */
eg_status egi_lower_matmul_integer(egi_lowering *lowering) {
  lowering->results[0] =
      egi_emit_binary(&lowering->emit, EGI_OP_MatMul, centred(lowering, 0, 2, true), centred(lowering, 1, 3, false));
  return EG_OK;
}

/* com.microsoft had types and blocks before the standard operators had them. */
static eg_status as_standard(egi_lowering *lowering, egi_op op) {
  const egi_value_id inputs[3] = {egi_lowering_input(lowering, 0), egi_lowering_input(lowering, 1),
                                  egi_lowering_input(lowering, 2)};
  const egi_attribute attributes[2] = {egi_attribute_int("axis", egi_node_int(lowering->node, "axis", 1)),
                                       egi_attribute_int("block_size", egi_node_int(lowering->node, "block_size", 0))};
  lowering->results[0] = egi_emit(&lowering->emit, op, inputs, inputs[2] != 0 ? 3 : 2, attributes, 2);
  return EG_OK;
}

eg_status egi_lower_quantize_linear(egi_lowering *lowering) {
  return as_standard(lowering, EGI_OP_QuantizeLinear);
}

eg_status egi_lower_dequantize_linear(egi_lowering *lowering) {
  return as_standard(lowering, EGI_OP_DequantizeLinear);
}

/* ---- GatherBlockQuantized --------------------------------------------------------------------------------------- */

typedef struct table {
  int64_t bits, block, gather_axis, axis;
  int64_t features; /* unpacked size of the last axis */
  eg_dtype dtype;   /* of the result */
} table;

static egi_value_id gathered(egi_lowering *lowering, egi_value_id data, int64_t axis) {
  const egi_value_id inputs[2] = {data, egi_lowering_input(lowering, 1)};
  return egi_emit_with_int(&lowering->emit, EGI_OP_Gather, inputs, 2, "axis", axis);
}

/* Shape of `like` without its last dim, then `tail`. */
static egi_value_id reshaped(egi_emitter *emit, egi_value_id x, egi_value_id like, const int64_t *tail,
                             uint32_t count) {
  if (emit->status != EG_OK) return 0;
  int rank = emit->graph->values[like].rank;
  const egi_value_id parts[2] = {egi_emit_sizes(emit, like, 0, rank - 1), egi_emit_integers(emit, tail, count)};
  egi_value_id shape = egi_emit_with_int(emit, EGI_OP_Concat, parts, 2, "axis", 0);
  return egi_emit_binary(emit, EGI_OP_Reshape, x, shape);
}

/* u8 [.., n] with 8 / bits codes a byte, low bits first -> codes [.., count]. */
static egi_value_id unpacked(egi_lowering *lowering, egi_value_id bytes, int64_t bits, int64_t count) {
  egi_emitter *emit = &lowering->emit;
  static const int64_t last = -1;
  int64_t per_byte = 8 / bits, all = -1;
  egi_value_id parts[4];
  if (per_byte == 1 || emit->status != EG_OK) return bytes;
  const egi_attribute right = egi_attribute_string("direction", "RIGHT");
  egi_value_id mask = egi_emit_scalar(emit, (double)((1 << bits) - 1), EG_DTYPE_U8);
  for (int64_t i = 0; i < per_byte; i++) {
    const egi_value_id shift[2] = {bytes, egi_emit_scalar(emit, (double)(i * bits), EG_DTYPE_U8)};
    egi_value_id code = i == 0 ? bytes : egi_emit(emit, EGI_OP_BitShift, shift, 2, &right, 1);
    parts[i] = egi_emit_axes(emit, EGI_OP_Unsqueeze, egi_emit_binary(emit, EGI_OP_BitwiseAnd, code, mask), &last, 1);
  }
  egi_value_id codes = egi_emit_with_int(emit, EGI_OP_Concat, parts, (unsigned)per_byte, "axis", -1);
  codes = reshaped(emit, codes, bytes, &all, 1);
  int64_t have = 0;
  if (emit->status != EG_OK) return 0;
  if (egi_lowering_size(lowering, codes, egi_lowering_value(lowering, codes)->rank - 1, &have) && have == count)
    return codes;
  static const int64_t zero = 0;
  const egi_value_id slice[4] = {codes, egi_emit_integers(emit, &zero, 1), egi_emit_integers(emit, &count, 1),
                                 egi_emit_integers(emit, &last, 1)};
  return egi_emit(emit, EGI_OP_Slice, slice, 4, NULL, 0);
}

/* Rows of bytes are gathered with their scales and zero points, then unpacked: (code - zero) · scale block by block. */
static eg_status gather_bytes(egi_lowering *lowering, const table *t) {
  egi_emitter *emit = &lowering->emit;
  int64_t blocks = 0, all = -1;
  egi_value_id scales = egi_lowering_input(lowering, 2), zeros = egi_lowering_input(lowering, 3);
  if (!egi_lowering_size(lowering, scales, (int)t->axis, &blocks))
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "the number of its blocks is not known");
  if (t->features != blocks * t->block)
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "its rows are not whole blocks");
  egi_value_id codes = gathered(lowering, egi_lowering_input(lowering, 0), 0);
  codes = egi_emit_cast(emit, unpacked(lowering, codes, t->bits, t->features), EG_DTYPE_F32);
  const int64_t tail[2] = {blocks, t->block}, single[2] = {blocks, 1};
  egi_value_id grouped = reshaped(emit, codes, codes, tail, 2), zero;
  egi_value_id factor = egi_emit_cast(emit, gathered(lowering, scales, 0), EG_DTYPE_F32);
  if (zeros != 0) {
    zero = egi_emit_cast(emit, unpacked(lowering, gathered(lowering, zeros, 0), t->bits, blocks), EG_DTYPE_F32);
    zero = reshaped(emit, zero, zero, single, 2);
  } else {
    zero = egi_emit_scalar(emit, (double)(1 << (t->bits - 1)), EG_DTYPE_F32);
  }
  factor = reshaped(emit, factor, factor, single, 2);
  egi_value_id y = egi_emit_binary(emit, EGI_OP_Mul, egi_emit_binary(emit, EGI_OP_Sub, grouped, zero), factor);
  if (emit->status != EG_OK) return EG_OK;
  y = reshaped(emit, y, codes, &all, 1);
  lowering->results[0] = egi_emit_cast(emit, y, t->dtype);
  return EG_OK;
}

/* Codes of a type of their own: the whole table is dequantised where it is used. */
static eg_status gather_codes(egi_lowering *lowering, const table *t) {
  egi_emitter *emit = &lowering->emit;
  const egi_value_id inputs[3] = {egi_lowering_input(lowering, 0), egi_lowering_input(lowering, 2),
                                  egi_lowering_input(lowering, 3)};
  const egi_attribute attributes[2] = {egi_attribute_int("axis", t->axis), egi_attribute_int("block_size", t->block)};
  egi_value_id whole = egi_emit(emit, EGI_OP_DequantizeLinear, inputs, inputs[2] != 0 ? 3 : 2, attributes, 2);
  lowering->results[0] = gathered(lowering, whole, t->gather_axis);
  return EG_OK;
}

/* data, indices, scales, zero_points? */
eg_status egi_lower_gather_block_quantized(egi_lowering *lowering) {
  const egi_node *node = lowering->node;
  const egi_value *data = egi_lowering_value(lowering, egi_lowering_input(lowering, 0));
  int64_t bytes = 0;
  table t = {.bits = egi_node_int(node, "bits", 4),
             .block = egi_node_int(node, "block_size", 128),
             .gather_axis = egi_node_int(node, "gather_axis", 0),
             .axis = egi_node_int(node, "quantize_axis", 1),
             .dtype = egi_lowering_value(lowering, egi_lowering_input(lowering, 2))->dtype};
  if (t.axis < 0) t.axis += data->rank;
  if (t.gather_axis < 0) t.gather_axis += data->rank;
  if (t.block < 1 || data->rank < 1 || t.axis < 0 || t.axis >= data->rank)
    return egi_lowering_fail(lowering, EG_ERROR_SHAPE, "its blocks or axes do not fit its data");
  if (data->dtype != EG_DTYPE_U8) return gather_codes(lowering, &t);
  if (t.gather_axis != 0 || t.axis != data->rank - 1 || (t.bits != 2 && t.bits != 4 && t.bits != 8))
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "its bits or axes are not supported for data of uint8");
  if (!egi_lowering_size(lowering, egi_lowering_input(lowering, 0), data->rank - 1, &bytes))
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "the size of its rows is not known");
  t.features = bytes * (8 / t.bits);
  return gather_bytes(lowering, &t);
}
