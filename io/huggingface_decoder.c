/* A decoder for language modelling as an ONNX graph: RMSNormalization, RotaryEmbedding, Attention and plain operators.
 * Initializers carry Hugging Face's names and layouts; every node carries its module path. */
#include "io/huggingface.h"

#include <math.h>

/* ---- layers ---- */

static egi_value_id add(egi_decoder_builder *b, egi_value_id x, egi_value_id y) {
  egi_decoder_enter(b, NULL, NULL);
  return egi_emit_binary(&b->emit, EGI_OP_Add, x, y);
}

static egi_value_id norm(egi_decoder_builder *b, const char *name, egi_value_id x) {
  return name != NULL ? egi_decoder_norm(b, name, NULL, x, b->config->hidden) : x;
}

static egi_value_id feed_forward(egi_decoder_builder *b, egi_value_id x) {
  return b->config->layers[b->layer].has_experts ? egi_decoder_experts(b, x) : egi_decoder_mlp(b, x);
}

static egi_value_id add_layer(egi_decoder_builder *b, egi_value_id x) {
  const egi_module_names *names = b->config->family->names;
  egi_value_id attended = egi_decoder_attention(b, norm(b, names->input_norm, x));
  attended = norm(b, names->after_attention_norm, attended);
  if (b->config->is_parallel) {
    egi_value_id y = feed_forward(b, norm(b, names->mlp_norm, x));
    return add(b, add(b, y, attended), x);
  }
  x = add(b, x, attended);
  egi_value_id y = feed_forward(b, norm(b, names->mlp_norm, x));
  return add(b, x, norm(b, names->after_mlp_norm, y));
}

static egi_value_id add_layers(egi_decoder_builder *b, egi_value_id x) {
  const egi_module_names *names = b->config->family->names;
  for (b->layer = 0; b->layer < b->config->n_layers && b->emit.status == EG_OK; b->layer++) {
    b->path = egi_arena_format(&b->graph->module->arena, "%s.%s.%lld", names->base, names->layers, (long long)b->layer);
    if (b->path == NULL) b->emit.status = EG_ERROR_MEMORY;
    x = add_layer(b, x);
  }
  b->path = names->base;
  return x;
}

/* ---- ends ---- */

static eg_status add_inputs(egi_decoder_builder *b, egi_value_id out_inputs[3]) {
  static const char *const names[] = {"input_ids", "attention_mask", "position_ids"};
  egi_dims *dims = b->graph->module->dims;
  const egi_dim shape[2] = {egi_dim_symbol(dims, "batch"), egi_dim_symbol(dims, "sequence")};
  for (int i = 0; i < 3; i++) EG_TRY(egi_graph_add_input(b->graph, names[i], EG_DTYPE_I64, 2, shape, &out_inputs[i]));
  return EG_OK;
}

static egi_value_id add_embedding(egi_decoder_builder *b, egi_value_id ids, egi_value_id positions) {
  const egi_decoder_config *c = b->config;
  const egi_module_names *names = c->family->names;
  const int64_t words[2] = {c->vocabulary, c->hidden}, places[2] = {c->n_positions, c->hidden};
  egi_decoder_enter(b, names->embedding, NULL);
  b->embedding = egi_decoder_matrix(b, "weight", 2, words);
  egi_value_id x = egi_emit_binary(&b->emit, EGI_OP_Gather, b->embedding, ids);
  if (c->family->flags & EGI_FAMILY_SCALED)
    x = egi_emit_binary(&b->emit, EGI_OP_Mul, x, egi_emit_scalar(&b->emit, sqrt((double)c->hidden), b->dtype));
  if (!(c->family->flags & EGI_FAMILY_LEARNED)) return x;
  egi_decoder_enter(b, names->positions, NULL);
  egi_value_id place = egi_emit_binary(&b->emit, EGI_OP_Gather, egi_decoder_matrix(b, "weight", 2, places), positions);
  return add(b, x, place);
}

static egi_value_id add_head(egi_decoder_builder *b, egi_value_id x) {
  const egi_decoder_config *c = b->config;
  const int64_t dims[2] = {c->vocabulary, c->hidden};
  b->path = "";
  egi_decoder_enter(b, "lm_head", NULL);
  egi_value_id weight = c->is_tied ? b->embedding : egi_decoder_matrix(b, "weight", 2, dims);
  x = egi_emit_binary(&b->emit, EGI_OP_MatMul, x, egi_emit_unary(&b->emit, EGI_OP_Transpose, weight));
  if (!(c->logit_softcap > 0.0)) return x;
  egi_value_id cap = egi_emit_scalar(&b->emit, c->logit_softcap, b->dtype);
  x = egi_emit_unary(&b->emit, EGI_OP_Tanh, egi_emit_binary(&b->emit, EGI_OP_Div, x, cap));
  return egi_emit_binary(&b->emit, EGI_OP_Mul, x, cap);
}

/* That of the embeddings in the files, where the caller did not choose one. */
static eg_status choose_dtype(egi_decoder_builder *b) {
  egi_weight_location found;
  b->dtype = b->options->dtype;
  if (b->dtype != EG_DTYPE_UNDEFINED || b->options->weights == NULL) return EG_OK;
  egi_decoder_enter(b, b->config->family->names->embedding, "weight");
  EG_TRY(b->emit.status);
  EG_TRY(egi_weight_files_find(b->options->weights, b->emit.scope, &found));
  if (found.tensor == NULL)
    return egi_fail(b->graph->module->ctx, EG_ERROR_FORMAT, "%s: no tensor \"%s\", which config.json needs",
                    egi_weight_files_directory(b->options->weights), b->emit.scope);
  b->dtype = found.tensor->dtype;
  return EG_OK;
}

eg_status egi_decoder_build(egi_module *module, const egi_decoder_config *config, const egi_new_options *options) {
  egi_decoder_builder b = {.config = config, .options = options, .path = config->family->names->base};
  egi_value_id inputs[3];
  EG_TRY(egi_module_add_graph(module, "main", &b.graph));
  b.emit = (egi_emitter){.graph = b.graph, .status = EG_OK};
  EG_TRY(choose_dtype(&b));
  EG_TRY(add_inputs(&b, inputs));
  egi_value_id x = add_embedding(&b, inputs[0], inputs[2]);
  egi_decoder_add_mask(&b, inputs[1]);
  egi_decoder_add_rotations(&b, inputs[2]);
  x = norm(&b, config->family->names->final_norm, add_layers(&b, x));
  x = add_head(&b, x);
  EG_TRY(b.emit.status);
  EG_TRY(egi_graph_rename_value(b.graph, x, "logits"));
  EG_TRY(egi_graph_add_output(b.graph, x));
  return egi_graph_tidy(b.graph);
}
