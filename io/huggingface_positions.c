/* What all layers of a decoder share: the padding mask, and the cosines and sines of the positions. */
#include "io/huggingface.h"

/* ---- masks ---- */

/* [batch, 1, sequence, sequence], a row for each query: runtimes do not broadcast over the queries. */
static egi_value_id expand_mask(egi_decoder_builder *b, egi_value_id mask) {
  static const int64_t middle[] = {1, 2}, ones[] = {1, 1};
  const egi_attribute last_dim[] = {egi_attribute_int("start", 1), egi_attribute_int("end", 2)};
  const egi_attribute axis = egi_attribute_int("axis", 0);
  egi_value_id keys = egi_emit_binary(&b->emit, EGI_OP_Unsqueeze, egi_emit_cast(&b->emit, mask, EG_DTYPE_BOOL),
                                      egi_emit_integers(&b->emit, middle, 2));
  const egi_value_id shape[] = {egi_emit_integers(&b->emit, ones, 2),
                                egi_emit(&b->emit, EGI_OP_Shape, &mask, 1, last_dim, 2),
                                egi_emit_integers(&b->emit, ones, 1)};
  return egi_emit_binary(&b->emit, EGI_OP_Expand, keys, egi_emit(&b->emit, EGI_OP_Concat, shape, 3, &axis, 1));
}

/* i64 0 … sequence - 1 as a column [sequence, 1] or a row [1, sequence]. */
static egi_value_id number_positions(egi_decoder_builder *b, egi_value_id mask, int64_t axis) {
  const egi_attribute last_dim[] = {egi_attribute_int("start", 1), egi_attribute_int("end", 2)};
  static const int64_t first = 0;
  egi_value_id length = egi_emit(&b->emit, EGI_OP_Shape, &mask, 1, last_dim, 2);
  length = egi_emit_binary(&b->emit, EGI_OP_Squeeze, length, egi_emit_integers(&b->emit, &first, 1));
  const egi_value_id bounds[] = {egi_emit_scalar(&b->emit, 0, EG_DTYPE_I64), length,
                                 egi_emit_scalar(&b->emit, 1, EG_DTYPE_I64)};
  return egi_decoder_unsqueeze(b, egi_emit(&b->emit, EGI_OP_Range, bounds, 3, NULL, 0), axis);
}

/* Masks for attention that is written out: keys up to the query, and within its window. */
static void add_visible(egi_decoder_builder *b, egi_value_id attention_mask, int64_t window) {
  egi_value_id query = number_positions(b, attention_mask, 1), key = number_positions(b, attention_mask, 0);
  egi_value_id causal = egi_emit_binary(&b->emit, EGI_OP_LessOrEqual, key, query);
  b->visible[0] = egi_emit_binary(&b->emit, EGI_OP_And, b->mask, causal);
  if (window == 0) return;
  egi_value_id oldest =
      egi_emit_binary(&b->emit, EGI_OP_Sub, query, egi_emit_scalar(&b->emit, (double)window, EG_DTYPE_I64));
  b->visible[1] =
      egi_emit_binary(&b->emit, EGI_OP_And, b->visible[0], egi_emit_binary(&b->emit, EGI_OP_Greater, key, oldest));
}

void egi_decoder_add_mask(egi_decoder_builder *b, egi_value_id attention_mask) {
  int64_t window = 0;
  egi_decoder_enter(b, NULL, NULL);
  b->mask = expand_mask(b, attention_mask);
  if (!(b->config->family->flags & EGI_FAMILY_SINKS)) return;
  for (int64_t i = 0; i < b->config->n_layers && window == 0; i++) window = b->config->layers[i].window;
  add_visible(b, attention_mask, window);
}

/* ---- rotary positions ---- */

/* f32 [1, 1, rotary_dim / 2] */
static egi_value_id add_table(egi_decoder_builder *b, const egi_rope_config *rope, const char *part,
                              const float *numbers) {
  egi_arena *arena = &b->graph->module->arena;
  uint64_t count = (uint64_t)rope->rotary_dim / 2;
  uint32_t index;
  egi_value_id value = 0;
  const char *name = egi_arena_format(arena, "%s.%s", b->emit.scope, part);
  if (name == NULL) b->emit.status = EG_ERROR_MEMORY;
  if (b->emit.status != EG_OK) return 0;
  egi_weight weight = {.name = name, .dtype = EG_DTYPE_F32, .rank = 3, .dims = {1, 1, (int64_t)count}};
  weight.bytes =
      (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = (const uint8_t *)numbers, .size_bytes = count * sizeof *numbers};
  b->emit.status = egi_module_add_weight(b->graph->module, &weight, &index);
  if (b->emit.status == EG_OK) b->emit.status = egi_graph_add_weight(b->graph, index, &value);
  return value;
}

static float *new_numbers(egi_decoder_builder *b, const egi_rope_config *rope) {
  float *numbers = EGI_NEW(&b->graph->module->arena, float, (size_t)rope->rotary_dim / 2);
  if (numbers == NULL) b->emit.status = EG_ERROR_MEMORY;
  return numbers;
}

static egi_value_id add_frequencies(egi_decoder_builder *b, const egi_rope_config *rope, const char *part,
                                    bool is_long) {
  float *frequencies = new_numbers(b, rope);
  if (frequencies == NULL) return 0;
  egi_rope_frequencies(rope, is_long, frequencies);
  return add_table(b, rope, part, frequencies);
}

static egi_value_id last_position(egi_decoder_builder *b, egi_value_id column) {
  const egi_attribute keep = egi_attribute_int("keepdims", 1);
  return egi_emit(&b->emit, EGI_OP_ReduceMax, &column, 1, &keep, 1);
}

/* Dynamic NTK scaling: beyond n positions the base grows to theta · g^(d / (d - 2)), g = factor · length / n - (factor
 * - 1), d = rotary_dim; so frequency i becomes theta^(-2i / d) · g^(-2i / (d - 2)). */
static egi_value_id grow_frequencies(egi_decoder_builder *b, const egi_rope_config *rope, egi_value_id column) {
  float *exponents = new_numbers(b, rope);
  if (exponents == NULL) return 0;
  for (int64_t i = 0; i < rope->rotary_dim / 2; i++)
    exponents[i] = (float)(-2.0 * (double)i / (double)(rope->rotary_dim - 2));
  egi_value_id beyond = egi_emit_binary(&b->emit, EGI_OP_Sub, last_position(b, column),
                                        egi_emit_scalar(&b->emit, rope->positions - 1.0, EG_DTYPE_F32));
  beyond = egi_emit_binary(&b->emit, EGI_OP_Max, beyond, egi_emit_scalar(&b->emit, 0.0, EG_DTYPE_F32));
  egi_value_id growth = egi_emit_binary(&b->emit, EGI_OP_Mul, beyond,
                                        egi_emit_scalar(&b->emit, rope->factor / rope->positions, EG_DTYPE_F32));
  growth = egi_emit_binary(&b->emit, EGI_OP_Add, growth, egi_emit_scalar(&b->emit, 1.0, EG_DTYPE_F32));
  growth = egi_emit_binary(&b->emit, EGI_OP_Pow, growth, add_table(b, rope, "growth", exponents));
  return egi_emit_binary(&b->emit, EGI_OP_Mul, add_frequencies(b, rope, "inv_freq", false), growth);
}

/* LongRoPE: another set of frequencies once a position lies beyond the context of the pretraining. */
static egi_value_id choose_frequencies(egi_decoder_builder *b, const egi_rope_config *rope, egi_value_id column) {
  egi_value_id limit = egi_emit_scalar(&b->emit, rope->original_positions - 1.0, EG_DTYPE_F32);
  const egi_value_id inputs[] = {egi_emit_binary(&b->emit, EGI_OP_Greater, last_position(b, column), limit),
                                 add_frequencies(b, rope, "long_inv_freq", true),
                                 add_frequencies(b, rope, "inv_freq", false)};
  return egi_emit(&b->emit, EGI_OP_Where, inputs, 3, NULL, 0);
}

/* In float32, then in the model's type. */
static egi_value_id finish_table(egi_decoder_builder *b, const egi_rope_config *rope, egi_value_id table) {
  if (rope->attention_factor < 1.0 || rope->attention_factor > 1.0)
    table =
        egi_emit_binary(&b->emit, EGI_OP_Mul, table, egi_emit_scalar(&b->emit, rope->attention_factor, EG_DTYPE_F32));
  return egi_emit_cast(&b->emit, table, b->dtype);
}

void egi_decoder_add_rotations(egi_decoder_builder *b, egi_value_id positions) {
  bool is_used[2] = {false, false};
  for (int64_t i = 0; i < b->config->n_layers; i++)
    if (b->config->layers[i].rope >= 0) is_used[b->config->layers[i].rope] = true;
  if (!is_used[0] && !is_used[1]) return;
  egi_decoder_enter(b, "rotary_emb", NULL);
  egi_value_id column = egi_decoder_unsqueeze(b, egi_emit_cast(&b->emit, positions, EG_DTYPE_F32), 2);
  for (int i = 0; i < 2; i++) {
    const egi_rope_config *rope = &b->config->ropes[i];
    if (!is_used[i]) continue;
    egi_value_id frequencies;
    if (rope->kind == EGI_ROPE_LONG)
      frequencies = choose_frequencies(b, rope, column);
    else if (rope->kind == EGI_ROPE_DYNAMIC)
      frequencies = grow_frequencies(b, rope, column);
    else
      frequencies = add_frequencies(b, rope, i == 0 ? "inv_freq" : "sliding_attention_inv_freq", false);
    egi_value_id angles = egi_emit_binary(&b->emit, EGI_OP_Mul, column, frequencies);
    b->cosine[i] = finish_table(b, rope, egi_emit_unary(&b->emit, EGI_OP_Cos, angles));
    b->sine[i] = finish_table(b, rope, egi_emit_unary(&b->emit, EGI_OP_Sin, angles));
  }
}
