/* Lowering of com.microsoft's RotaryEmbedding: the standard operator, with the positions last and written out. */
#include "passes/lower_heads.h"

eg_status egi_lower_rotate(egi_lowering *lowering, const egi_lowered_rotation *rotation, egi_value_id *x) {
  int64_t half = 0;
  if (egi_lowering_value(lowering, rotation->cos)->rank != 2 ||
      egi_lowering_value(lowering, rotation->sin)->rank != 2 || !egi_lowering_size(lowering, rotation->cos, 1, &half))
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "the width of its rotary caches is not known");
  if (2 * half > rotation->size)
    return egi_lowering_fail(lowering, EG_ERROR_SHAPE, "its rotary caches are wider than a head");
  const egi_value_id inputs[4] = {*x, rotation->cos, rotation->sin, rotation->positions};
  const egi_attribute attributes[2] = {
      egi_attribute_int("interleaved", rotation->is_interleaved ? 1 : 0),
      egi_attribute_int("rotary_embedding_dim", 2 * half == rotation->size ? 0 : 2 * half)};
  *x = egi_emit(&lowering->emit, EGI_OP_RotaryEmbedding, inputs, 4, attributes, 2);
  return EG_OK;
}

/* [batch, sequence] as given, or from one offset for all rows. */
static eg_status read_positions(egi_lowering *lowering, egi_value_id rows, int axis, egi_value_id *out_positions) {
  egi_emitter *emit = &lowering->emit;
  egi_value_id given = egi_lowering_input(lowering, 1);
  int rank = egi_lowering_value(lowering, given)->rank;
  *out_positions = given;
  if (rank == 2) return EG_OK;
  if (rank > 1) return egi_lowering_fail(lowering, EG_ERROR_SHAPE, "its positions have more than two dimensions");
  egi_value_id line =
      egi_emit_binary(emit, EGI_OP_Add, egi_emit_positions(emit, rows, axis), egi_emit_cast(emit, given, EG_DTYPE_I64));
  const egi_value_id shape[2] = {egi_emit_sizes(emit, rows, 0, 1), egi_emit_sizes(emit, rows, axis, axis + 1)};
  *out_positions =
      egi_emit_binary(emit, EGI_OP_Expand, line, egi_emit_with_int(emit, EGI_OP_Concat, shape, 2, "axis", 0));
  return EG_OK;
}

/* Heads of [batch, sequence, hidden]: as stated, or as many as the caches' width gives. */
static eg_status count_heads(egi_lowering *lowering, egi_value_id x, egi_value_id cos, int64_t *out_heads,
                             int64_t *out_size) {
  int64_t hidden = 0, half = 0, heads = egi_node_int(lowering->node, "num_heads", 0);
  if (!egi_lowering_size(lowering, x, 2, &hidden) || !egi_lowering_size(lowering, cos, 1, &half) || half < 1)
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "the width of its input or caches is not known");
  if (heads <= 0) heads = hidden / (2 * half);
  if (heads <= 0 || hidden % heads != 0)
    return egi_lowering_fail(lowering, EG_ERROR_SHAPE, "its heads do not divide its input");
  *out_heads = heads;
  *out_size = hidden / heads;
  return EG_OK;
}

/* input [batch, sequence, hidden] or [batch, heads, sequence, size], positions, cos, sin */
eg_status egi_lower_rotary_embedding(egi_lowering *lowering) {
  static const int64_t flat[3] = {0, 0, -1};
  egi_emitter *emit = &lowering->emit;
  egi_value_id x = egi_lowering_input(lowering, 0);
  egi_lowered_rotation rotation = {.cos = egi_lowering_input(lowering, 2), .sin = egi_lowering_input(lowering, 3)};
  rotation.is_interleaved = egi_node_int(lowering->node, "interleaved", 0) != 0;
  int rank = egi_lowering_value(lowering, x)->rank;
  float scale = egi_node_float(lowering->node, "scale", 1.0F);
  int64_t heads = 0;
  if (egi_node_int(lowering->node, "is_packed_batching", 0) != 0 || scale < 1.0F || scale > 1.0F)
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "is_packed_batching or scale is not supported");
  if (rank != 3 && rank != 4) return egi_lowering_fail(lowering, EG_ERROR_SHAPE, "its input has not 3 or 4 dimensions");
  EG_TRY(read_positions(lowering, x, rank == 3 ? 1 : 2, &rotation.positions));
  if (rank == 3) {
    EG_TRY(count_heads(lowering, x, rotation.cos, &heads, &rotation.size));
    x = egi_emit_exchanged(emit, egi_emit_heads(emit, x, heads, rotation.size));
  } else if (!egi_lowering_size(lowering, x, 3, &rotation.size)) {
    return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "the size of its heads is not known");
  }
  EG_TRY(emit->status);
  EG_TRY(egi_lower_rotate(lowering, &rotation, &x));
  if (rank == 3)
    x = egi_emit_binary(emit, EGI_OP_Reshape, egi_emit_exchanged(emit, x), egi_emit_integers(emit, flat, 3));
  lowering->results[0] = x;
  return EG_OK;
}
