/* Lowering of com.microsoft's MultiHeadAttention and of its Attention, which holds the projections of queries, keys and
 * values as one weight. Masks of padding lower scores by mask_filter_value, as onnxruntime does, so that rows without
 * any key give what it gives. */
#include <string.h>

#include "passes/lower_heads.h"

typedef struct multi_head {
  egi_lowering *lowering;
  egi_emitter *emit;
  int64_t heads;
  egi_value_id parts[3];             /* query, key, value [batch, heads, sequence, size] */
  egi_value_id past_key, past_value; /* 0: none */
  egi_value_id padding, bias;        /* mask of padding as stated; bias of the scores; 0: none */
  bool is_causal;
} multi_head;

static eg_status refuse(const multi_head *m, const char *reason) {
  return egi_lowering_fail(m->lowering, EG_ERROR_UNSUPPORTED, reason);
}

/* [batch, sequence, heads · size], with a bias or 0, -> [batch, heads, sequence, size] */
static eg_status to_heads(multi_head *m, egi_value_id x, egi_value_id bias, egi_value_id *out) {
  int64_t width = 0;
  EG_TRY(m->emit->status);
  if (egi_lowering_value(m->lowering, x)->rank != 3 || !egi_lowering_size(m->lowering, x, 2, &width))
    return refuse(m, "the size of its heads is not known");
  if (m->heads < 1 || width % m->heads != 0)
    return egi_lowering_fail(m->lowering, EG_ERROR_SHAPE, "num_heads does not divide its input");
  if (bias != 0) x = egi_emit_binary(m->emit, EGI_OP_Add, x, bias);
  *out = egi_emit_exchanged(m->emit, egi_emit_heads(m->emit, x, m->heads, width / m->heads));
  return EG_OK;
}

/* ---- masks ------------------------------------------------------------------------------------------------------ */

/* Boolean, true for keys that count: from i32 [batch, keys], [batch, queries, keys] or lengths [batch]. */
static eg_status keep_keys(multi_head *m, egi_value_id keys, egi_value_id *out) {
  static const int64_t axes[3] = {1, 2, 3};
  egi_emitter *emit = m->emit;
  egi_value_id padding = egi_emit_cast(emit, m->padding, EG_DTYPE_I64);
  egi_value_id zero = egi_emit_scalar(emit, 0.0, EG_DTYPE_I64);
  EG_TRY(emit->status);
  const egi_value *mask = egi_lowering_value(m->lowering, m->padding);
  const egi_value *key = egi_lowering_value(m->lowering, m->parts[1]);
  egi_dims *dims = emit->graph->module->dims;
  switch (mask->rank) {
  case 1: {
    if (egi_dim_resolve(dims, mask->dims[0]) != egi_dim_resolve(dims, key->dims[0]))
      return refuse(m, "its mask is neither one of lengths nor one of keys");
    egi_value_id lengths = egi_emit_axes(emit, EGI_OP_Unsqueeze, padding, axes, 3);
    *out = egi_emit_binary(emit, EGI_OP_Less, egi_emit_positions(emit, keys, 2), lengths);
    return EG_OK;
  }
  case 2:
    padding = egi_emit_axes(emit, EGI_OP_Unsqueeze, padding, axes, 2);
    break;
  case 3:
    padding = egi_emit_axes(emit, EGI_OP_Unsqueeze, padding, axes, 1);
    break;
  default:
    return refuse(m, "a mask of its rank is not supported");
  }
  *out = egi_emit_binary(emit, EGI_OP_Greater, padding, zero);
  return EG_OK;
}

/* The padding as numbers that are added, with the bias of the scores. */
static eg_status add_padding(multi_head *m, egi_value_id keys, egi_value_id *out_bias) {
  egi_emitter *emit = m->emit;
  egi_value_id keep = 0;
  *out_bias = m->bias;
  if (m->padding == 0) return EG_OK;
  EG_TRY(keep_keys(m, keys, &keep));
  EG_TRY(emit->status);
  eg_dtype dtype = egi_lowering_value(m->lowering, m->parts[0])->dtype;
  double filter = (double)egi_node_float(m->lowering->node, "mask_filter_value", -10000.0F);
  const egi_value_id where[3] = {keep, egi_emit_scalar(emit, 0.0, dtype), egi_emit_scalar(emit, filter, dtype)};
  egi_value_id lowered = egi_emit(emit, EGI_OP_Where, where, 3, NULL, 0);
  *out_bias = m->bias != 0 ? egi_emit_binary(emit, EGI_OP_Add, lowered, m->bias) : lowered;
  return EG_OK;
}

/* Query i, after `past` keys, sees keys up to past + i. */
static egi_value_id causal_mask(multi_head *m) {
  static const int64_t last = 1;
  egi_emitter *emit = m->emit;
  egi_value_id query = egi_emit_positions(emit, m->parts[0], 2), key = egi_emit_positions(emit, m->parts[1], 2);
  query = egi_emit_binary(emit, EGI_OP_Add, query, egi_emit_size(emit, m->past_key, 2));
  return egi_emit_binary(emit, EGI_OP_LessOrEqual, key, egi_emit_axes(emit, EGI_OP_Unsqueeze, query, &last, 1));
}

/* Sets output 0; keys and values get their past. */
static eg_status attend(multi_head *m) {
  egi_lowering *lowering = m->lowering;
  egi_lowered_attention a = {.q = m->parts[0], .heads = m->heads, .kv_heads = m->heads};
  m->parts[1] = egi_emit_with_past(m->emit, m->past_key, m->parts[1]);
  m->parts[2] = egi_emit_with_past(m->emit, m->past_value, m->parts[2]);
  EG_TRY(m->emit->status);
  a.k = m->parts[1];
  a.v = m->parts[2];
  a.scale = (double)egi_node_float(lowering->node, "scale", 0.0F);
  EG_TRY(add_padding(m, a.k, &a.bias));
  a.is_causal = m->is_causal && m->past_key == 0;
  if (m->is_causal && !a.is_causal) a.mask = causal_mask(m);
  lowering->results[0] = egi_lower_attend(lowering, &a);
  return EG_OK;
}

/* ---- MultiHeadAttention ----------------------------------------------------------------------------------------- */

/* [batch, sequence, heads, count, size] -> `count` tensors [batch, sequence, heads, size] */
static void take_apart(multi_head *m, egi_value_id packed, unsigned count, egi_value_id *out) {
  static const int64_t axis = 3;
  const egi_attribute attributes[2] = {egi_attribute_int("axis", 3), egi_attribute_int("num_outputs", count)};
  egi_emit_many(m->emit, EGI_OP_Split, &packed, 1, attributes, 2, out, count);
  for (unsigned i = 0; i < count; i++)
    out[i] = egi_emit_exchanged(m->emit, egi_emit_axes(m->emit, EGI_OP_Squeeze, out[i], &axis, 1));
}

/* Biases of the three projections lie one after the other. */
static eg_status split_bias(multi_head *m, egi_value_id biases[3]) {
  egi_value_id bias = egi_lowering_input(m->lowering, 3);
  int64_t sizes[3] = {0, 0, 0};
  if (bias == 0) return EG_OK;
  for (unsigned i = 0; i < 3; i++) {
    egi_value_id part = egi_lowering_input(m->lowering, i);
    if (part == 0 || egi_lowering_value(m->lowering, part)->rank != 3 ||
        !egi_lowering_size(m->lowering, part, 2, &sizes[i]))
      return refuse(m, "a bias with packed or absent keys and values is not supported");
  }
  egi_emit_split(m->emit, bias, sizes, 3, biases);
  return EG_OK;
}

static eg_status read_parts(multi_head *m) {
  egi_value_id query = egi_lowering_input(m->lowering, 0), key = egi_lowering_input(m->lowering, 1);
  egi_value_id value = egi_lowering_input(m->lowering, 2), biases[3] = {0, 0, 0};
  EG_TRY(split_bias(m, biases));
  if (key == 0 && value == 0 && egi_lowering_value(m->lowering, query)->rank == 5) {
    take_apart(m, query, 3, m->parts);
    return EG_OK;
  }
  if (key == 0) return egi_lowering_fail(m->lowering, EG_ERROR_FORMAT, "its keys are missing");
  EG_TRY(to_heads(m, query, biases[0], &m->parts[0]));
  if (value == 0 && egi_lowering_value(m->lowering, key)->rank == 5) {
    take_apart(m, key, 2, m->parts + 1);
    return EG_OK;
  }
  if (value == 0) return egi_lowering_fail(m->lowering, EG_ERROR_FORMAT, "its values are missing");
  if (egi_lowering_value(m->lowering, key)->rank == 4) { /* keys and values of another sequence, by heads already */
    m->parts[1] = key;
    m->parts[2] = value;
    return EG_OK;
  }
  EG_TRY(to_heads(m, key, biases[1], &m->parts[1]));
  return to_heads(m, value, biases[2], &m->parts[2]);
}

eg_status egi_lower_multi_head_attention(egi_lowering *lowering) {
  multi_head m = {.lowering = lowering, .emit = &lowering->emit};
  m.heads = egi_node_int(lowering->node, "num_heads", 0);
  m.is_causal = egi_node_int(lowering->node, "unidirectional", 0) != 0;
  m.padding = egi_lowering_input(lowering, 4);
  m.bias = egi_lowering_input(lowering, 5);
  m.past_key = egi_lowering_input(lowering, 6);
  m.past_value = egi_lowering_input(lowering, 7);
  if (egi_lowering_input(lowering, 8) != 0 || egi_lowering_input(lowering, 9) != 0)
    return refuse(&m, "past_sequence_length and cache_indirection are not supported");
  if ((m.past_key == 0) != (m.past_value == 0))
    return egi_lowering_fail(lowering, EG_ERROR_FORMAT, "past_key and past_value come together");
  EG_TRY(read_parts(&m));
  EG_TRY(attend(&m));
  lowering->results[1] = m.parts[1];
  lowering->results[2] = m.parts[2];
  return EG_OK;
}

/* ---- Attention -------------------------------------------------------------------------------------------------- */

static eg_status read_sizes(multi_head *m, egi_value_id weights, int64_t sizes[3]) {
  uint32_t count = 0;
  int64_t width = 0;
  const int64_t *given = egi_node_ints(m->lowering->node, "qkv_hidden_sizes", &count);
  if (egi_lowering_value(m->lowering, weights)->rank != 2 || !egi_lowering_size(m->lowering, weights, 1, &width))
    return refuse(m, "the size of its weights is not known");
  for (unsigned i = 0; i < 3; i++) sizes[i] = given != NULL && count == 3 ? given[i] : width / 3;
  if (sizes[0] > 0 && sizes[1] > 0 && sizes[2] > 0 && sizes[0] <= width && sizes[1] <= width &&
      sizes[2] == width - sizes[0] - sizes[1])
    return EG_OK;
  return egi_lowering_fail(m->lowering, EG_ERROR_SHAPE, "qkv_hidden_sizes do not fit its weights");
}

/* past [2, batch, heads, length, size]: keys, then values. */
static void read_merged_past(multi_head *m) {
  static const int64_t first = 0;
  egi_value_id past = egi_lowering_input(m->lowering, 4), parts[2];
  const egi_attribute attributes[2] = {egi_attribute_int("axis", 0), egi_attribute_int("num_outputs", 2)};
  if (past == 0) return;
  egi_emit_many(m->emit, EGI_OP_Split, &past, 1, attributes, 2, parts, 2);
  m->past_key = egi_emit_axes(m->emit, EGI_OP_Squeeze, parts[0], &first, 1);
  m->past_value = egi_emit_axes(m->emit, EGI_OP_Squeeze, parts[1], &first, 1);
}

/* input [batch, sequence, in], weights [in, q + k + v], bias?, mask_index?, past?, attention_bias?, past length? */
eg_status egi_lower_merged_attention(egi_lowering *lowering) {
  static const int64_t first = 0;
  multi_head m = {.lowering = lowering, .emit = &lowering->emit};
  egi_value_id weights = egi_lowering_input(lowering, 1), bias = egi_lowering_input(lowering, 2), projected[3];
  int64_t sizes[3];
  m.heads = egi_node_int(lowering->node, "num_heads", 0);
  m.is_causal = egi_node_int(lowering->node, "unidirectional", 0) != 0;
  m.padding = egi_lowering_input(lowering, 3);
  m.bias = egi_lowering_input(lowering, 5);
  if (egi_lowering_input(lowering, 6) != 0 || egi_node_int(lowering->node, "do_rotary", 0) != 0)
    return refuse(&m, "do_rotary and past_sequence_length are not supported");
  EG_TRY(read_sizes(&m, weights, sizes));
  egi_value_id all = egi_emit_binary(m.emit, EGI_OP_MatMul, egi_lowering_input(lowering, 0), weights);
  if (bias != 0) all = egi_emit_binary(m.emit, EGI_OP_Add, all, bias);
  egi_emit_split(m.emit, all, sizes, 3, projected);
  for (unsigned i = 0; i < 3; i++) EG_TRY(to_heads(&m, projected[i], 0, &m.parts[i]));
  read_merged_past(&m);
  EG_TRY(attend(&m));
  if (!egi_lowering_wants(lowering, 1)) return EG_OK;
  const egi_value_id present[2] = {egi_emit_axes(m.emit, EGI_OP_Unsqueeze, m.parts[1], &first, 1),
                                   egi_emit_axes(m.emit, EGI_OP_Unsqueeze, m.parts[2], &first, 1)};
  lowering->results[1] = egi_emit_with_int(m.emit, EGI_OP_Concat, present, 2, "axis", 0);
  return EG_OK;
}
