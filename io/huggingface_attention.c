/* Self-attention of a decoder layer: projections in one or several matrices, norms of queries and keys, rotary
 * positions; then ONNX's Attention, or the same written out where a head has a sink. */
#include "io/huggingface.h"

#include <math.h>

typedef struct qkv {
  egi_value_id q, k, v; /* [batch, sequence, heads * head_dim] */
} qkv;

static const egi_decoder_layer *current_layer(const egi_decoder_builder *b) {
  return &b->config->layers[b->layer];
}

/* ---- projections ---- */

static qkv project_separately(egi_decoder_builder *b, egi_value_id x) {
  const egi_decoder_config *c = b->config;
  const egi_module_names *names = c->family->names;
  const egi_linear_shape query = {c->hidden, c->n_heads * c->head_dim, c->has_qkv_bias};
  const egi_linear_shape key = {c->hidden, c->n_kv_heads * c->head_dim, c->has_qkv_bias};
  qkv out;
  out.q = egi_decoder_linear(b, names->attention, names->q, x, query);
  out.k = egi_decoder_linear(b, names->attention, names->k, x, key);
  out.v = egi_decoder_linear(b, names->attention, names->v, x, key);
  return out;
}

/* Of each head's rows: [batch, sequence, heads, 3 · head_dim] → three pieces. */
static void split_heads(egi_decoder_builder *b, egi_value_id fused, egi_value_id pieces[3]) {
  int64_t width = b->config->head_dim, heads = b->config->n_heads;
  const int64_t sizes[3] = {width, width, width}, apart[4] = {0, 0, heads, 3 * width}, flat[3] = {0, 0, heads * width};
  egi_decoder_split(b, egi_decoder_reshape(b, fused, apart, 4), sizes, 3, pieces);
  for (int i = 0; i < 3; i++) pieces[i] = egi_decoder_reshape(b, pieces[i], flat, 3);
}

static qkv project_together(egi_decoder_builder *b, egi_value_id x) {
  const egi_decoder_config *c = b->config;
  const egi_module_names *names = c->family->names;
  int64_t q_size = c->n_heads * c->head_dim, kv_size = c->n_kv_heads * c->head_dim;
  const int64_t sizes[3] = {q_size, kv_size, kv_size};
  const egi_linear_shape shape = {c->hidden, q_size + 2 * kv_size, c->has_qkv_bias};
  egi_value_id pieces[3];
  egi_value_id fused = egi_decoder_linear(b, names->attention, names->qkv, x, shape);
  egi_decoder_enter(b, names->attention, NULL);
  if (c->family->qkv == EGI_QKV_HEADS)
    split_heads(b, fused, pieces);
  else
    egi_decoder_split(b, fused, sizes, 3, pieces);
  return (qkv){pieces[0], pieces[1], pieces[2]};
}

/* ---- norms and positions of queries and keys ---- */

static egi_value_id norm_heads(egi_decoder_builder *b, const char *name, egi_value_id x, int64_t n_heads) {
  const char *attention = b->config->family->names->attention;
  const int64_t apart[4] = {0, 0, n_heads, b->config->head_dim}, flat[3] = {0, 0, n_heads * b->config->head_dim};
  egi_decoder_enter(b, attention, name);
  egi_value_id heads = egi_decoder_norm(b, attention, name, egi_decoder_reshape(b, x, apart, 4), b->config->head_dim);
  return egi_decoder_reshape(b, heads, flat, 3);
}

static egi_value_id rotate(egi_decoder_builder *b, egi_value_id x, int64_t n_heads) {
  int rope = current_layer(b)->rope;
  if (rope < 0) return x;
  int64_t rotary_dim = b->config->ropes[rope].rotary_dim;
  const egi_attribute attributes[] = {egi_attribute_int("num_heads", n_heads),
                                      egi_attribute_int("rotary_embedding_dim", rotary_dim)};
  const egi_value_id inputs[] = {x, b->cosine[rope], b->sine[rope]};
  unsigned n_attributes = rotary_dim < b->config->head_dim ? 2 : 1;
  return egi_emit(&b->emit, EGI_OP_RotaryEmbedding, inputs, 3, attributes, n_attributes);
}

/* ---- attention ---- */

static double scale_of(const egi_decoder_builder *b) {
  double scale = b->config->attention_scale;
  return b->config->divides_scale_by_layer ? scale / (double)(b->layer + 1) : scale;
}

static egi_value_id attend(egi_decoder_builder *b, qkv in) {
  const egi_decoder_config *c = b->config;
  egi_attribute attributes[6] = {egi_attribute_int("is_causal", 1), egi_attribute_int("q_num_heads", c->n_heads),
                                 egi_attribute_int("kv_num_heads", c->n_kv_heads)};
  unsigned n = 3;
  double scale = scale_of(b);
  if (fabs(scale * sqrt((double)c->head_dim) - 1.0) > 1e-12)
    attributes[n++] = egi_attribute_float("scale", (float)scale);
  if (c->attention_softcap > 0.0) attributes[n++] = egi_attribute_float("softcap", (float)c->attention_softcap);
  if (current_layer(b)->window > 0)
    attributes[n++] = egi_attribute_int("left_window_size", current_layer(b)->window - 1);
  const egi_value_id inputs[] = {in.q, in.k, in.v, b->mask};
  return egi_emit(&b->emit, EGI_OP_Attention, inputs, 4, attributes, n);
}

/* [batch, heads, sequence, width]; heads of keys and values as often as query heads share them. */
static egi_value_id lay_out_heads(egi_decoder_builder *b, egi_value_id x, int64_t n_heads) {
  static const int64_t forward[] = {0, 2, 1, 3};
  const egi_decoder_config *c = b->config;
  const int64_t apart[] = {0, 0, n_heads, c->head_dim}, repeated[] = {1, 1, c->n_heads / n_heads, 1, 1};
  const int64_t all[] = {0, c->n_heads, -1, c->head_dim};
  egi_value_id heads = egi_decoder_transpose(b, egi_decoder_reshape(b, x, apart, 4), forward, 4);
  if (n_heads == c->n_heads) return heads;
  heads = egi_emit_binary(&b->emit, EGI_OP_Expand, egi_decoder_unsqueeze(b, heads, 2),
                          egi_emit_integers(&b->emit, repeated, 5));
  return egi_decoder_reshape(b, heads, all, 4);
}

/* The sinks as one more column of the scores: [batch, heads, sequence, 1]. */
static egi_value_id expand_sinks(egi_decoder_builder *b, egi_value_id scores) {
  const egi_decoder_config *c = b->config;
  const int64_t shape[] = {1, c->n_heads, 1, 1}, one = 1;
  const egi_attribute bounds[] = {egi_attribute_int("start", 0), egi_attribute_int("end", 3)};
  const egi_attribute axis = egi_attribute_int("axis", 0);
  egi_value_id sinks = egi_decoder_reshape(b, egi_decoder_vector(b, "sinks", c->n_heads, 0.0), shape, 4);
  const egi_value_id parts[] = {egi_emit(&b->emit, EGI_OP_Shape, &scores, 1, bounds, 2),
                                egi_emit_integers(&b->emit, &one, 1)};
  return egi_emit_binary(&b->emit, EGI_OP_Expand, sinks, egi_emit(&b->emit, EGI_OP_Concat, parts, 2, &axis, 1));
}

static egi_value_id attend_with_sinks(egi_decoder_builder *b, qkv in) {
  static const int64_t turned[] = {0, 1, 3, 2}, back[] = {0, 2, 1, 3}, but_last[3] = {0, -1, 1};
  const egi_decoder_config *c = b->config;
  const egi_attribute last = egi_attribute_int("axis", -1);
  const int64_t flat[] = {0, 0, c->n_heads * c->head_dim};
  egi_value_id visible = b->visible[current_layer(b)->window > 0 ? 1 : 0];
  egi_value_id keys = egi_decoder_transpose(b, lay_out_heads(b, in.k, c->n_kv_heads), turned, 4);
  egi_value_id scores = egi_emit_binary(&b->emit, EGI_OP_MatMul, lay_out_heads(b, in.q, c->n_heads), keys);
  scores = egi_emit_binary(&b->emit, EGI_OP_Mul, scores, egi_emit_scalar(&b->emit, scale_of(b), b->dtype));
  const egi_value_id choice[] = {visible, scores, egi_emit_scalar(&b->emit, -HUGE_VAL, b->dtype)};
  scores = egi_emit(&b->emit, EGI_OP_Where, choice, 3, NULL, 0);
  const egi_value_id columns[] = {scores, expand_sinks(b, scores)};
  egi_value_id shares = egi_emit(&b->emit, EGI_OP_Concat, columns, 2, &last, 1);
  shares = egi_decoder_slice(b, egi_emit(&b->emit, EGI_OP_Softmax, &shares, 1, &last, 1), but_last);
  egi_value_id y = egi_emit_binary(&b->emit, EGI_OP_MatMul, shares, lay_out_heads(b, in.v, c->n_kv_heads));
  return egi_decoder_reshape(b, egi_decoder_transpose(b, y, back, 4), flat, 3);
}

egi_value_id egi_decoder_attention(egi_decoder_builder *b, egi_value_id x) {
  const egi_decoder_config *c = b->config;
  const egi_module_names *names = c->family->names;
  const egi_linear_shape output = {c->n_heads * c->head_dim, c->hidden, c->has_output_bias};
  qkv in = c->family->qkv == EGI_QKV_SEPARATE ? project_separately(b, x) : project_together(b, x);
  if (c->family->flags & EGI_FAMILY_QK_NORM) {
    in.q = norm_heads(b, "q_norm", in.q, c->n_heads);
    in.k = norm_heads(b, "k_norm", in.k, c->n_kv_heads);
  }
  egi_decoder_enter(b, names->attention, NULL);
  in.q = rotate(b, in.q, c->n_heads);
  in.k = rotate(b, in.k, c->n_kv_heads);
  egi_value_id y = c->family->flags & EGI_FAMILY_SINKS ? attend_with_sinks(b, in) : attend(b, in);
  return egi_decoder_linear(b, names->attention, names->output, y, output);
}
