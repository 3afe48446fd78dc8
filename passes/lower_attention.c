/* Lowering of com.microsoft's GroupQueryAttention: heads, norms and rotary embedding of queries and keys, the past
 * concatenated, and an attention whose mask says which keys a query sees. What the caches hold beyond the tokens that
 * seqlens_k counts is never seen. */
#include <string.h>

#include "passes/lower_heads.h"

enum {
  QUERY,
  KEY,
  VALUE,
  PAST_KEY,
  PAST_VALUE,
  LENGTHS, /* i32 [batch]: tokens of each row, the new ones included, minus 1 */
  TOTAL,   /* i32: longest row */
  COS,
  SIN,
  POSITIONS,
  BIAS,
  SINKS,
  KEY_SCALE,
  VALUE_SCALE,
  QUERY_NORM,
  KEY_NORM
};

typedef struct group_query {
  egi_lowering *lowering;
  egi_emitter *emit;
  int64_t heads, kv_heads, size, window;
  bool is_causal, is_sliding_cache;
  egi_value_id query, key, value; /* [batch, heads, sequence, size] */
  egi_value_id past_key, past_value;
  egi_value_id past_lengths; /* i64 [batch, 1]: tokens of the past; 0: no past */
} group_query;

static eg_status refuse(const group_query *g, const char *reason) {
  return egi_lowering_fail(g->lowering, EG_ERROR_UNSUPPORTED, reason);
}

static eg_status read_attributes(group_query *g) {
  const egi_node *node = g->lowering->node;
  g->heads = egi_node_int(node, "num_heads", 0);
  g->kv_heads = egi_node_int(node, "kv_num_heads", 0);
  g->window = egi_node_int(node, "local_window_size", -1);
  g->is_causal = egi_node_int(node, "causal", 1) != 0;
  g->is_sliding_cache = egi_node_int(node, "sliding_window_cache", 0) != 0;
  if (g->heads < 1 || g->kv_heads < 1 || g->heads % g->kv_heads != 0)
    return egi_lowering_fail(g->lowering, EG_ERROR_SHAPE, "num_heads is not a multiple of kv_num_heads");
  const char *const types[2] = {egi_node_string(node, "k_quant_type", "NONE"),
                                egi_node_string(node, "v_quant_type", "NONE")};
  bool is_quantised = strcmp(types[0], "NONE") != 0 || strcmp(types[1], "NONE") != 0;
  if (is_quantised || egi_lowering_input(g->lowering, KEY_SCALE) || egi_lowering_input(g->lowering, VALUE_SCALE))
    return refuse(g, "a quantised cache of keys and values is not supported");
  if (egi_node_int(node, "qk_output", 0) != 0) return refuse(g, "qk_output is not supported");
  return EG_OK;
}

/* Query, key and value [batch, sequence, heads · size], out of one tensor where they are packed. */
static eg_status read_operands(group_query *g, egi_value_id parts[3]) {
  int64_t width = 0, heads = g->heads;
  for (unsigned i = 0; i < 3; i++) {
    parts[i] = egi_lowering_input(g->lowering, i);
    if (parts[i] != 0 && egi_lowering_value(g->lowering, parts[i])->rank != 3)
      return refuse(g, "queries, keys and values must have 3 dimensions");
  }
  bool is_packed = parts[KEY] == 0 && parts[VALUE] == 0;
  if (!is_packed && (parts[KEY] == 0 || parts[VALUE] == 0))
    return egi_lowering_fail(g->lowering, EG_ERROR_FORMAT, "keys and values come together");
  if (!egi_lowering_size(g->lowering, parts[QUERY], 2, &width)) return refuse(g, "the size of its heads is not known");
  if (is_packed) heads += 2 * g->kv_heads;
  g->size = width / heads;
  if (g->size < 1 || width % heads != 0)
    return egi_lowering_fail(g->lowering, EG_ERROR_SHAPE, "its heads do not divide its queries");
  const int64_t sizes[3] = {g->heads * g->size, g->kv_heads * g->size, g->kv_heads * g->size};
  if (is_packed) egi_emit_split(g->emit, parts[QUERY], sizes, 3, parts);
  return g->emit->status;
}

static egi_value_id normalised(group_query *g, egi_value_id x, unsigned weight_input) {
  const egi_value_id inputs[2] = {x, egi_lowering_input(g->lowering, weight_input)};
  const egi_attribute attributes[2] = {
      egi_attribute_float("epsilon", egi_node_float(g->lowering->node, "qk_norm_epsilon", 1e-6F)),
      egi_attribute_int("axis", -1)};
  return inputs[1] == 0 ? x : egi_emit(g->emit, EGI_OP_RMSNormalization, inputs, 2, attributes, 2);
}

/* The caches, unless they hold nothing in any case. */
static eg_status read_past(group_query *g) {
  int64_t length = -1;
  g->past_key = egi_lowering_input(g->lowering, PAST_KEY);
  g->past_value = egi_lowering_input(g->lowering, PAST_VALUE);
  if ((g->past_key == 0) != (g->past_value == 0))
    return egi_lowering_fail(g->lowering, EG_ERROR_FORMAT, "past_key and past_value come together");
  if (g->past_key == 0) return EG_OK;
  if (egi_lowering_value(g->lowering, g->past_key)->rank != 4 ||
      egi_lowering_value(g->lowering, g->past_value)->rank != 4)
    return egi_lowering_fail(g->lowering, EG_ERROR_SHAPE, "past_key and past_value must have 4 dimensions");
  if (egi_lowering_size(g->lowering, g->past_key, 2, &length) && length == 0) g->past_key = g->past_value = 0;
  return EG_OK;
}

/* Tokens in the past: what seqlens_k counts beyond the new ones, none when the longest row is all new. */
static eg_status count_past(group_query *g) {
  static const int64_t column[2] = {-1, 1}, single[2] = {1, 1};
  egi_emitter *emit = g->emit;
  egi_value_id lengths = egi_lowering_input(g->lowering, LENGTHS), total = egi_lowering_input(g->lowering, TOTAL);
  if (g->past_key == 0) return EG_OK;
  if (lengths == 0 || total == 0)
    return egi_lowering_fail(g->lowering, EG_ERROR_FORMAT, "seqlens_k or total_sequence_length is missing");
  lengths = egi_emit_binary(emit, EGI_OP_Reshape, egi_emit_cast(emit, lengths, EG_DTYPE_I64),
                            egi_emit_integers(emit, column, 2));
  total = egi_emit_binary(emit, EGI_OP_Reshape, egi_emit_cast(emit, total, EG_DTYPE_I64),
                          egi_emit_integers(emit, single, 2));
  egi_value_id sequence = egi_emit_size(emit, g->query, 2);
  egi_value_id next = egi_emit_binary(emit, EGI_OP_Add, lengths, egi_emit_scalar(emit, 1.0, EG_DTYPE_I64));
  const egi_value_id choice[3] = {egi_emit_binary(emit, EGI_OP_Equal, total, sequence),
                                  egi_emit_scalar(emit, 0.0, EG_DTYPE_I64),
                                  egi_emit_binary(emit, EGI_OP_Sub, next, sequence)};
  g->past_lengths = egi_emit(emit, EGI_OP_Where, choice, 3, NULL, 0);
  return emit->status;
}

/* i64 [batch, sequence], or [sequence] without a past. */
static egi_value_id query_positions(group_query *g) {
  egi_value_id line = egi_emit_positions(g->emit, g->query, 2);
  return g->past_lengths == 0 ? line : egi_emit_binary(g->emit, EGI_OP_Add, line, g->past_lengths);
}

static eg_status rotate(group_query *g) {
  egi_emitter *emit = g->emit;
  egi_lowered_rotation rotation = {.cos = egi_lowering_input(g->lowering, COS),
                                   .sin = egi_lowering_input(g->lowering, SIN),
                                   .positions = egi_lowering_input(g->lowering, POSITIONS),
                                   .is_interleaved = egi_node_int(g->lowering->node, "rotary_interleaved", 0) != 0,
                                   .size = g->size};
  if (egi_node_int(g->lowering->node, "do_rotary", 0) == 0) return EG_OK;
  if (rotation.cos == 0 || rotation.sin == 0)
    return egi_lowering_fail(g->lowering, EG_ERROR_FORMAT, "do_rotary is set without caches of sines and cosines");
  if (rotation.positions == 0) {
    const egi_value_id shape[2] = {egi_emit_sizes(emit, g->query, 0, 1), egi_emit_sizes(emit, g->query, 2, 3)};
    rotation.positions = egi_emit_binary(emit, EGI_OP_Expand, query_positions(g),
                                         egi_emit_with_int(emit, EGI_OP_Concat, shape, 2, "axis", 0));
  }
  EG_TRY(emit->status);
  EG_TRY(egi_lower_rotate(g->lowering, &rotation, &g->query));
  return egi_lower_rotate(g->lowering, &rotation, &g->key);
}

/* ---- mask ------------------------------------------------------------------------------------------------------- */

/* Where keys stand, and which of them are there: [batch, keys] both, or [keys] and none without a past. */
static void place_keys(group_query *g, egi_value_id keys, egi_value_id *out_positions, egi_value_id *out_present) {
  egi_emitter *emit = g->emit;
  egi_value_id index = egi_emit_positions(emit, keys, 2), zero = egi_emit_scalar(emit, 0.0, EG_DTYPE_I64);
  *out_positions = index;
  *out_present = 0;
  if (g->past_lengths == 0) return;
  egi_value_id held = egi_emit_size(emit, g->past_key, 2);
  egi_value_id shift = egi_emit_binary(emit, EGI_OP_Sub, g->past_lengths, held);
  if (g->is_sliding_cache) { /* holds the newest tokens, the last one last */
    *out_positions = egi_emit_binary(emit, EGI_OP_Add, index, shift);
    *out_present = egi_emit_binary(emit, EGI_OP_GreaterOrEqual, *out_positions, zero);
    return;
  }
  egi_value_id is_new = egi_emit_binary(emit, EGI_OP_GreaterOrEqual, index, held);
  const egi_value_id moved[3] = {is_new, shift, zero};
  *out_positions = egi_emit_binary(emit, EGI_OP_Add, index, egi_emit(emit, EGI_OP_Where, moved, 3, NULL, 0));
  egi_value_id is_filled = egi_emit_binary(emit, EGI_OP_Less, index, g->past_lengths);
  *out_present = egi_emit_binary(emit, EGI_OP_Or, is_new, is_filled);
}

static egi_value_id both(egi_emitter *emit, egi_value_id a, egi_value_id b) {
  if (a == 0 || b == 0) return a != 0 ? a : b;
  return egi_emit_binary(emit, EGI_OP_And, a, b);
}

/* true where query i sees key j: [batch, 1, queries, keys], or fewer dims. */
static egi_value_id make_mask(group_query *g, egi_value_id keys) {
  static const int64_t column[3] = {1, 3, 0}, row[2] = {1, 2};
  egi_emitter *emit = g->emit;
  egi_value_id positions = 0, present = 0, mask = 0;
  bool has_batch = g->past_lengths != 0;
  place_keys(g, keys, &positions, &present);
  egi_value_id query = query_positions(g);
  query = has_batch ? egi_emit_axes(emit, EGI_OP_Unsqueeze, query, column, 2)
                    : egi_emit_axes(emit, EGI_OP_Unsqueeze, query, column, 1);
  if (has_batch) {
    positions = egi_emit_axes(emit, EGI_OP_Unsqueeze, positions, row, 2);
    present = egi_emit_axes(emit, EGI_OP_Unsqueeze, present, row, 2);
  }
  if (g->is_causal) mask = egi_emit_binary(emit, EGI_OP_LessOrEqual, positions, query);
  if (g->window > 0) {
    egi_value_id distance = egi_emit_binary(emit, EGI_OP_Sub, query, positions);
    egi_value_id width = egi_emit_scalar(emit, (double)g->window, EG_DTYPE_I64);
    mask = both(emit, mask, egi_emit_binary(emit, EGI_OP_Less, distance, width));
  }
  return both(emit, mask, present);
}

/* ---- the operator ----------------------------------------------------------------------------------------------- */

/* The cache after the operator: the tokens of the past, the new ones right behind them, then what is not counted. */
static egi_value_id compacted(group_query *g, egi_value_id all) {
  static const int64_t axes[2] = {1, 3};
  egi_emitter *emit = g->emit;
  if (g->past_key == 0 || g->is_sliding_cache) return all;
  egi_value_id index = egi_emit_positions(emit, all, 2), held = egi_emit_size(emit, g->past_key, 2);
  egi_value_id last =
      egi_emit_binary(emit, EGI_OP_Sub, egi_emit_size(emit, all, 2), egi_emit_scalar(emit, 1.0, EG_DTYPE_I64));
  egi_value_id shifted =
      egi_emit_binary(emit, EGI_OP_Add, index, egi_emit_binary(emit, EGI_OP_Sub, held, g->past_lengths));
  const egi_value_id choice[3] = {egi_emit_binary(emit, EGI_OP_Less, index, g->past_lengths), index,
                                  egi_emit_binary(emit, EGI_OP_Min, shifted, last)};
  egi_value_id from = egi_emit_axes(emit, EGI_OP_Unsqueeze, egi_emit(emit, EGI_OP_Where, choice, 3, NULL, 0), axes, 2);
  const egi_value_id inputs[2] = {all,
                                  egi_emit_binary(emit, EGI_OP_Expand, from, egi_emit_unary(emit, EGI_OP_Shape, all))};
  return egi_emit_with_int(emit, EGI_OP_GatherElements, inputs, 2, "axis", 2);
}

static eg_status attend(group_query *g) {
  egi_lowering *lowering = g->lowering;
  egi_emitter *emit = g->emit;
  egi_lowered_attention a = {.q = g->query, .heads = g->heads, .kv_heads = g->kv_heads};
  a.k = egi_emit_with_past(emit, g->past_key, g->key);
  a.v = egi_emit_with_past(emit, g->past_value, g->value);
  if (egi_lowering_wants(lowering, 1)) lowering->results[1] = compacted(g, a.k);
  if (egi_lowering_wants(lowering, 2)) lowering->results[2] = compacted(g, a.v);
  a.scale = (double)egi_node_float(lowering->node, "scale", 0.0F);
  a.softcap = (double)egi_node_float(lowering->node, "softcap", 0.0F);
  a.bias = egi_lowering_input(lowering, BIAS);
  a.sinks = egi_lowering_input(lowering, SINKS);
  EG_TRY(emit->status);
  if (!g->is_causal && g->past_key == 0 && egi_lowering_input(lowering, LENGTHS) != 0)
    return refuse(g, "causal = 0 is not supported with padded rows");
  if (g->past_key == 0 && g->window <= 0)
    a.is_causal = g->is_causal;
  else
    a.mask = make_mask(g, a.k);
  if (a.sinks == 0 && egi_node_int(lowering->node, "smooth_softmax", 0) > 0) { /* a sink of score 0 */
    egi_value_id zero = egi_emit_scalar(emit, 0.0, egi_lowering_value(lowering, a.q)->dtype);
    a.sinks = egi_emit_binary(emit, EGI_OP_Expand, zero, egi_emit_integers(emit, &g->heads, 1));
  }
  lowering->results[0] = egi_lower_attend(lowering, &a);
  return EG_OK;
}

eg_status egi_lower_group_query_attention(egi_lowering *lowering) {
  group_query g = {.lowering = lowering, .emit = &lowering->emit};
  egi_value_id parts[3];
  EG_TRY(read_attributes(&g));
  EG_TRY(read_operands(&g, parts));
  EG_TRY(read_past(&g));
  egi_value_id query = normalised(&g, egi_emit_heads(g.emit, parts[QUERY], g.heads, g.size), QUERY_NORM);
  egi_value_id key = normalised(&g, egi_emit_heads(g.emit, parts[KEY], g.kv_heads, g.size), KEY_NORM);
  g.query = egi_emit_exchanged(g.emit, query);
  g.key = egi_emit_exchanged(g.emit, key);
  g.value = egi_emit_exchanged(g.emit, egi_emit_heads(g.emit, parts[VALUE], g.kv_heads, g.size));
  EG_TRY(g.emit->status);
  EG_TRY(count_past(&g));
  EG_TRY(rotate(&g));
  return attend(&g);
}
