/* The llama architecture as an ONNX graph of opset 23: RMSNormalization, RotaryEmbedding, Attention, SwiGLU.
 * Initializers carry Hugging Face's names in [out, in] layout; every node carries its module path. */
#include "io/io.h"

#include <string.h>

typedef struct builder {
  egi_graph *graph;
  const egi_decoder_config *config;
  const egi_new_options *options;
  egi_emitter emit;
  egi_value_id cos, sin, mask, embedding;
  int64_t layer;
} builder;

/* The module path of the nodes that follow: "model.layers.N." + name inside a layer. */
static void enter(builder *b, const char *name) {
  egi_arena *arena = &b->graph->module->arena;
  b->emit.scope = b->layer >= 0 ? egi_arena_format(arena, "model.layers.%lld%s%s", (long long)b->layer,
                                                   name[0] != '\0' ? "." : "", name)
                                : egi_arena_copy_text(arena, name, strlen(name));
  if (b->emit.scope == NULL && b->emit.status == EG_OK) b->emit.status = EG_ERROR_MEMORY;
}

static egi_value_id add_weight(builder *b, const egi_weight *weight) {
  uint32_t index;
  egi_value_id value = 0;
  if (b->emit.status == EG_OK) b->emit.status = egi_module_add_weight(b->graph->module, weight, &index);
  if (b->emit.status == EG_OK) b->emit.status = egi_graph_add_weight(b->graph, index, &value);
  return value;
}

/* "<scope>.<part>"; columns 0: a vector. Matrices are random, norms 1, biases 0. */
static egi_value_id parameter(builder *b, const char *part, int64_t rows, int64_t columns, double fill) {
  egi_weight weight = {.dtype = b->options->dtype, .rank = columns > 0 ? 2 : 1, .dims = {rows, columns}};
  if (b->emit.status != EG_OK) return 0;
  weight.name = egi_arena_format(&b->graph->module->arena, "%s.%s", b->emit.scope, part);
  weight.bytes = (egi_bytes){.kind = EGI_BYTES_FILL, .value = fill};
  if (columns > 0)
    weight.bytes =
        (egi_bytes){.kind = EGI_BYTES_NORMAL, .value = b->config->initializer_range, .seed = b->options->seed};
  if (weight.name == NULL) b->emit.status = EG_ERROR_MEMORY;
  return add_weight(b, &weight);
}

static egi_value_id linear(builder *b, const char *name, egi_value_id x, int64_t in, int64_t out, bool has_bias) {
  enter(b, name);
  egi_value_id weight = egi_emit_unary(&b->emit, EGI_OP_Transpose, parameter(b, "weight", out, in, 0.0));
  egi_value_id y = egi_emit_binary(&b->emit, EGI_OP_MatMul, x, weight);
  return has_bias ? egi_emit_binary(&b->emit, EGI_OP_Add, y, parameter(b, "bias", out, 0, 0.0)) : y;
}

static egi_value_id norm(builder *b, const char *name, egi_value_id x) {
  enter(b, name);
  const egi_attribute attributes[] = {egi_attribute_int("axis", -1),
                                      egi_attribute_float("epsilon", (float)b->config->epsilon)};
  const egi_value_id inputs[] = {x, parameter(b, "weight", b->config->hidden, 0, 1.0)};
  return egi_emit(&b->emit, EGI_OP_RMSNormalization, inputs, 2, attributes, 2);
}

static egi_value_id rotate(builder *b, egi_value_id x, int64_t n_heads) {
  const egi_attribute heads = egi_attribute_int("num_heads", n_heads);
  const egi_value_id inputs[] = {x, b->cos, b->sin};
  return egi_emit(&b->emit, EGI_OP_RotaryEmbedding, inputs, 3, &heads, 1);
}

static egi_value_id attention(builder *b, egi_value_id x) {
  const egi_decoder_config *c = b->config;
  int64_t q_size = c->n_heads * c->head_dim, kv_size = c->n_kv_heads * c->head_dim;
  egi_value_id q = linear(b, "self_attn.q_proj", x, c->hidden, q_size, c->has_attention_bias);
  egi_value_id k = linear(b, "self_attn.k_proj", x, c->hidden, kv_size, c->has_attention_bias);
  egi_value_id v = linear(b, "self_attn.v_proj", x, c->hidden, kv_size, c->has_attention_bias);
  enter(b, "self_attn");
  const egi_attribute attributes[] = {egi_attribute_int("is_causal", 1), egi_attribute_int("q_num_heads", c->n_heads),
                                      egi_attribute_int("kv_num_heads", c->n_kv_heads)};
  const egi_value_id inputs[] = {rotate(b, q, c->n_heads), rotate(b, k, c->n_kv_heads), v, b->mask};
  egi_value_id y = egi_emit(&b->emit, EGI_OP_Attention, inputs, 4, attributes, 3);
  return linear(b, "self_attn.o_proj", y, q_size, c->hidden, c->has_attention_bias);
}

static egi_value_id feed_forward(builder *b, egi_value_id x) {
  const egi_decoder_config *c = b->config;
  egi_value_id gate = linear(b, "mlp.gate_proj", x, c->hidden, c->intermediate, c->has_mlp_bias);
  enter(b, "mlp.act_fn");
  gate = egi_emit_binary(&b->emit, EGI_OP_Mul, gate, egi_emit_unary(&b->emit, EGI_OP_Sigmoid, gate));
  egi_value_id up = linear(b, "mlp.up_proj", x, c->hidden, c->intermediate, c->has_mlp_bias);
  enter(b, "mlp");
  egi_value_id product = egi_emit_binary(&b->emit, EGI_OP_Mul, gate, up);
  return linear(b, "mlp.down_proj", product, c->intermediate, c->hidden, c->has_mlp_bias);
}

static egi_value_id add_layer(builder *b, egi_value_id x) {
  egi_value_id y = attention(b, norm(b, "input_layernorm", x));
  enter(b, "");
  x = egi_emit_binary(&b->emit, EGI_OP_Add, x, y);
  y = feed_forward(b, norm(b, "post_attention_layernorm", x));
  enter(b, "");
  return egi_emit_binary(&b->emit, EGI_OP_Add, x, y);
}

/* ---- what all layers share ---- */

static egi_value_id unsqueeze(builder *b, egi_value_id x, const int64_t *axes, uint32_t n_axes) {
  return egi_emit_binary(&b->emit, EGI_OP_Unsqueeze, x, egi_emit_integers(&b->emit, axes, n_axes));
}

/* [batch, 1, sequence, sequence], a row for each query: runtimes do not broadcast over the queries. */
static egi_value_id add_mask(builder *b, egi_value_id mask) {
  static const int64_t middle[] = {1, 2}, ones[] = {1, 1};
  const egi_attribute last_dim[] = {egi_attribute_int("start", 1), egi_attribute_int("end", 2)};
  const egi_attribute axis = egi_attribute_int("axis", 0);
  enter(b, "model");
  egi_value_id keys = unsqueeze(b, egi_emit_cast(&b->emit, mask, EG_DTYPE_BOOL), middle, 2);
  const egi_value_id shape[] = {egi_emit_integers(&b->emit, ones, 2),
                                egi_emit(&b->emit, EGI_OP_Shape, &mask, 1, last_dim, 2),
                                egi_emit_integers(&b->emit, ones, 1)};
  return egi_emit_binary(&b->emit, EGI_OP_Expand, keys, egi_emit(&b->emit, EGI_OP_Concat, shape, 3, &axis, 1));
}

/* cos and sin [batch, sequence, head_dim / 2] in float32, then in the model's type. */
static void add_rotation(builder *b, egi_value_id positions) {
  static const int64_t last[] = {2};
  int64_t n = b->config->head_dim / 2;
  enter(b, "model.rotary_emb");
  float *frequencies = EGI_NEW(&b->graph->module->arena, float, (size_t)n);
  if (frequencies == NULL) {
    b->emit.status = EG_ERROR_MEMORY;
    return;
  }
  egi_rope_frequencies(&b->config->rope, b->config->head_dim, frequencies);
  egi_weight weight = {.name = "model.rotary_emb.inv_freq", .dtype = EG_DTYPE_F32, .rank = 3, .dims = {1, 1, n}};
  weight.bytes = (egi_bytes){
      .kind = EGI_BYTES_MEMORY, .data = (const uint8_t *)frequencies, .size_bytes = (uint64_t)n * sizeof *frequencies};
  egi_value_id column = unsqueeze(b, egi_emit_cast(&b->emit, positions, EG_DTYPE_F32), last, 1);
  egi_value_id angles = egi_emit_binary(&b->emit, EGI_OP_Mul, column, add_weight(b, &weight));
  b->cos = egi_emit_cast(&b->emit, egi_emit_unary(&b->emit, EGI_OP_Cos, angles), b->options->dtype);
  b->sin = egi_emit_cast(&b->emit, egi_emit_unary(&b->emit, EGI_OP_Sin, angles), b->options->dtype);
}

static eg_status add_inputs(builder *b, egi_value_id out_inputs[3]) {
  static const char *const names[] = {"input_ids", "attention_mask", "position_ids"};
  egi_dims *dims = b->graph->module->dims;
  const egi_dim shape[2] = {egi_dim_symbol(dims, "batch"), egi_dim_symbol(dims, "sequence")};
  for (int i = 0; i < 3; i++) EG_TRY(egi_graph_add_input(b->graph, names[i], EG_DTYPE_I64, 2, shape, &out_inputs[i]));
  return EG_OK;
}

static egi_value_id add_embedding(builder *b, egi_value_id ids) {
  enter(b, "model.embed_tokens");
  b->embedding = parameter(b, "weight", b->config->vocabulary, b->config->hidden, 0.0);
  return egi_emit_binary(&b->emit, EGI_OP_Gather, b->embedding, ids);
}

static egi_value_id add_head(builder *b, egi_value_id x) {
  if (!b->config->is_tied) return linear(b, "lm_head", x, b->config->hidden, b->config->vocabulary, false);
  enter(b, "lm_head");
  return egi_emit_binary(&b->emit, EGI_OP_MatMul, x, egi_emit_unary(&b->emit, EGI_OP_Transpose, b->embedding));
}

eg_status egi_llama_build(egi_module *module, const egi_decoder_config *config, const egi_new_options *options) {
  builder b = {.config = config, .options = options, .layer = -1};
  egi_value_id inputs[3];
  EG_TRY(egi_module_add_graph(module, "main", &b.graph));
  b.emit = (egi_emitter){.graph = b.graph, .status = EG_OK};
  EG_TRY(add_inputs(&b, inputs));
  egi_value_id x = add_embedding(&b, inputs[0]);
  b.mask = add_mask(&b, inputs[1]);
  add_rotation(&b, inputs[2]);
  for (b.layer = 0; b.layer < config->n_layers && b.emit.status == EG_OK; b.layer++) x = add_layer(&b, x);
  b.layer = -1;
  x = add_head(&b, norm(&b, "model.norm", x));
  EG_TRY(b.emit.status);
  EG_TRY(egi_graph_rename_value(b.graph, x, "logits"));
  EG_TRY(egi_graph_add_output(b.graph, x));
  return egi_graph_tidy(b.graph);
}
