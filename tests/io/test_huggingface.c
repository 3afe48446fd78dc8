/* Models made from config.json: for each family what its graph is made of, in the spellings of Transformers 4 and 5;
 * what is refused, by key; weights referred to in their files. */
#include "support_io.h"

#include "io/huggingface.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SIZES                                                                                                        \
  "\"hidden_size\":24,\"intermediate_size\":40,\"num_hidden_layers\":2,\"num_attention_heads\":4,\"vocab_size\":56," \
  "\"max_position_embeddings\":64"
#define KV ",\"num_key_value_heads\":2"

static const char *write_config(io_fixture *fixture, const char *text) {
  return io_write(fixture, "data.jsonl", text, strlen(text));
}

static egi_module *make(io_fixture *fixture, const char *config) {
  const egi_new_options options = {EG_DTYPE_F32, 7, NULL};
  egi_module *module;
  if (egi_huggingface_new(fixture->ctx, write_config(fixture, config), &options, &module) != EG_OK)
    fail_msg("%s: %s", config, eg_context_error(fixture->ctx));
  assert_int_equal(egi_graph_verify(module->graphs[0]), EG_OK);
  return module;
}

/* ---- families ---- */

/* What the text form of a family's graph holds; "!" first: what it must not hold. */
typedef struct family_case {
  const char *config;
  const char *expected[12];
} family_case;

static const family_case families[] = {
    {"{\"model_type\":\"llama\"," SIZES KV "}",
     {"float[56,24] model.embed_tokens.weight", "float[12,24] model.layers.1.self_attn.k_proj.weight",
      "float[40,24] model.layers.0.mlp.up_proj.weight", "float[56,24] lm_head.weight", "kv_num_heads: int = 2",
      "!left_window_size", "!self_attn.q_proj.bias", "!softcap", "!scale: float"}},
    {"{\"model_type\":\"llama\",\"attention_bias\":true,\"mlp_bias\":true,\"tie_word_embeddings\":true," SIZES "}",
     {"float[24] model.layers.0.self_attn.o_proj.bias", "float[24,24] model.layers.0.self_attn.k_proj.weight",
      "float[40] model.layers.0.mlp.gate_proj.bias", "!lm_head.weight"}},
    {"{\"model_type\":\"mistral\",\"sliding_window\":16," SIZES KV "}", {"left_window_size: int = 15"}},
    {"{\"model_type\":\"mistral\",\"sliding_window\":null," SIZES KV "}", {"!left_window_size"}},
    {"{\"model_type\":\"qwen2\",\"use_sliding_window\":true,\"sliding_window\":8,\"max_window_layers\":1," SIZES KV "}",
     {"float[12] model.layers.0.self_attn.v_proj.bias", "!self_attn.o_proj.bias", "left_window_size: int = 7"}},
    {"{\"model_type\":\"qwen2\",\"use_sliding_window\":false,\"sliding_window\":8," SIZES KV "}",
     {"!left_window_size"}},
    {"{\"model_type\":\"qwen3\",\"head_dim\":8," SIZES KV "}",
     {"float[8] model.layers.0.self_attn.q_norm.weight", "float[32,24] model.layers.0.self_attn.q_proj.weight",
      "float[24,32] model.layers.0.self_attn.o_proj.weight"}},
    {"{\"model_type\":\"gemma2\",\"head_dim\":8,\"sliding_window\":8,\"query_pre_attn_scalar\":4," SIZES KV "}",
     {"float[24] model.layers.0.post_feedforward_layernorm.weight", "softcap: float = 50", "scale: float = 0.5",
      "left_window_size: int = 7", "Tanh (", "approximate: string = tanh", "!lm_head.weight"}},
    {"{\"model_type\":\"gemma2\",\"head_dim\":8,\"attn_logit_softcapping\":null,\"final_logit_softcapping\":null,"
     "\"layer_types\":[\"full_attention\",\"full_attention\"]," SIZES KV "}",
     {"!softcap", "!Tanh (", "!left_window_size"}},
    {"{\"model_type\":\"gemma3_text\",\"head_dim\":8,\"sliding_window_pattern\":2,\"sliding_window\":8," SIZES KV "}",
     {"float[8] model.layers.1.self_attn.k_norm.weight", "model.rotary_emb.sliding_attention_inv_freq",
      "model.rotary_emb.inv_freq", "left_window_size: int = 7", "!softcap"}},
    {"{\"model_type\":\"gemma3\",\"text_config\":{\"model_type\":\"gemma3_text\",\"head_dim\":8," SIZES KV "}}",
     {"float[56,24] model.embed_tokens.weight"}},
    {"{\"model_type\":\"phi3\"," SIZES KV "}",
     {"float[48,24] model.layers.0.self_attn.qkv_proj.weight", "float[80,24] model.layers.0.mlp.gate_up_proj.weight",
      "Split <", "!left_window_size"}},
    {"{\"model_type\":\"phi3\",\"head_dim\":8,\"partial_rotary_factor\":0.5,\"original_max_position_embeddings\":16,"
     "\"rope_scaling\":{\"type\":\"su\",\"short_factor\":[1,1.5],\"long_factor\":[2,3]}," SIZES KV "}",
     {"rotary_embedding_dim: int = 4", "model.rotary_emb.long_inv_freq", "ReduceMax", "Where ("}},
    {"{\"model_type\":\"llama\",\"head_dim\":8,\"rope_scaling\":{\"rope_type\":\"dynamic\",\"factor\":2}," SIZES "}",
     {"float[1,1,4] model.rotary_emb.growth", "ReduceMax", "Pow ("}},
    {"{\"model_type\":\"smollm3\",\"no_rope_layers\":[0,1],\"use_sliding_window\":true,\"sliding_window\":8," SIZES KV
     "}",
     {"left_window_size: int = 7", "model.layers.1.self_attn/RotaryEmbedding",
      "!model.layers.0.self_attn/RotaryEmbedding", "!lm_head.weight"}},
    {"{\"model_type\":\"gpt2\",\"n_embd\":24,\"n_layer\":2,\"n_head\":4,\"n_positions\":64,\"vocab_size\":56}",
     {"float[24,72] transformer.h.1.attn.c_attn.weight", "float[24,96] transformer.h.0.mlp.c_fc.weight",
      "float[64,24] transformer.wpe.weight", "float[24] transformer.ln_f.bias", "LayerNormalization",
      "!RotaryEmbedding", "!lm_head.weight", "!Transpose (transformer.h"}},
    {"{\"model_type\":\"gpt_neox\",\"rotary_pct\":0.5,\"hidden_act\":\"gelu\",\"head_dim\":8," SIZES "}",
     {"float[96,24] gpt_neox.layers.0.attention.query_key_value.weight",
      "float[24] gpt_neox.layers.0.attention.dense.bias", "float[56,24] gpt_neox.embed_in.weight",
      "float[56,24] lm_head.weight", "rotary_embedding_dim: int = 4", "!approximate"}},
    {"{\"model_type\":\"qwen3_moe\",\"num_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":8,"
     "\"norm_topk_prob\":true,\"mlp_only_layers\":[1]," SIZES KV "}",
     {"float[4,16,24] model.layers.0.mlp.experts.gate_up_proj", "float[4,24,8] model.layers.0.mlp.experts.down_proj",
      "float[4,24] model.layers.0.mlp.gate.weight", "float[40,24] model.layers.1.mlp.up_proj.weight", "TopK <", "Div (",
      "!model.layers.1.mlp.experts"}},
    {"{\"model_type\":\"qwen3_moe\",\"num_local_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":"
     "8," SIZES KV "}",
     {"float[4,16,24] model.layers.1.mlp.experts.gate_up_proj", "!Div ("}},
    {"{\"model_type\":\"mixtral\",\"num_local_experts\":4,\"num_experts_per_tok\":2," SIZES KV "}",
     {"float[4,80,24] model.layers.0.mlp.experts.gate_up_proj", "Div ("}},
    {"{\"model_type\":\"gpt_oss\",\"num_local_experts\":4,\"num_experts_per_tok\":2,\"head_dim\":8,\"sliding_window\":"
     "8,"
     "\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":4,\"original_max_position_embeddings\":16}," SIZES KV "}",
     {"float[4,24,80] model.layers.0.mlp.experts.gate_up_proj", "float[4,24] model.layers.0.mlp.experts.down_proj_bias",
      "float[4] model.layers.1.self_attn.sinks", "float[4] model.layers.0.mlp.router.bias",
      "float[24] model.layers.0.self_attn.o_proj.bias", "Clip (", "!Attention <"}},
};

static void check_text(const family_case *row, const char *text) {
  for (size_t i = 0; i < EGI_COUNT(row->expected) && row->expected[i] != NULL; i++) {
    const char *part = row->expected[i];
    bool is_wanted = part[0] != '!';
    if ((strstr(text, is_wanted ? part : part + 1) != NULL) != is_wanted)
      fail_msg("%s: \"%s\" in:\n%s", row->config, part, text);
  }
}

static void remove_quotes(char *text) {
  char *to = text;
  for (const char *from = text; *from != '\0'; from++)
    if (*from != '"') *to++ = *from;
  *to = '\0';
}

static void test_families(void **state) {
  io_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(families); i++) {
    egi_text text;
    egi_module *module = make(fixture, families[i].config);
    egi_graph *graph = module->graphs[0];
    const egi_value *logits = &graph->values[graph->outputs[0]];
    int64_t vocabulary;
    assert_string_equal(logits->name, "logits");
    assert_int_equal(logits->rank, 3);
    assert_true(egi_dim_value(module->dims, logits->dims[2], &vocabulary));
    assert_int_equal(vocabulary, 56);
    egi_text_init(&text, fixture->ctx);
    assert_int_equal(egi_module_print(module, graph, 1, &text), EG_OK);
    remove_quotes(text.data);
    check_text(&families[i], egi_text_string(&text));
    egi_text_free(&text);
    egi_module_destroy(module);
  }
}

/* The same model in the spelling of Transformers 4 and 5. */
static void test_spellings(void **state) {
  static const char *const pairs[][2] = {
      {"{\"model_type\":\"llama\",\"rope_theta\":5e5,\"rope_scaling\":{\"type\":\"linear\",\"factor\":4}," SIZES "}",
       "{\"model_type\":\"llama\",\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":4,\"rope_theta\":5e5}," SIZES
       "}"},
      {"{\"model_type\":\"gemma3_text\",\"head_dim\":8,\"rope_theta\":1e6,\"rope_local_base_freq\":1e4,\"rope_"
       "scaling\":"
       "{\"rope_type\":\"linear\",\"factor\":8},\"sliding_window_pattern\":2," SIZES "}",
       "{\"model_type\":\"gemma3_text\",\"head_dim\":8,\"rope_parameters\":{\"full_attention\":{\"rope_type\":"
       "\"linear\","
       "\"factor\":8,\"rope_theta\":1e6},\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":1e4}},"
       "\"layer_types\":[\"sliding_attention\",\"full_attention\"]," SIZES "}"},
      {"{\"model_type\":\"gpt_neox\",\"rotary_pct\":0.5,\"rotary_emb_base\":500,\"head_dim\":8," SIZES "}",
       "{\"model_type\":\"gpt_neox\",\"head_dim\":8,\"rope_parameters\":{\"rope_type\":\"default\","
       "\"partial_rotary_factor\":0.5,\"rope_theta\":500}," SIZES "}"},
  };
  io_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(pairs); i++) {
    egi_text texts[2];
    for (int k = 0; k < 2; k++) {
      egi_module *module = make(fixture, pairs[i][k]);
      egi_text_init(&texts[k], fixture->ctx);
      assert_int_equal(egi_module_print(module, module->graphs[0], 0, &texts[k]), EG_OK);
      egi_module_destroy(module);
    }
    assert_string_equal(egi_text_string(&texts[0]), egi_text_string(&texts[1]));
    egi_text_free(&texts[0]);
    egi_text_free(&texts[1]);
  }
}

/* Angles of positions, worked out by hand from the formulas. */
static void test_frequencies(void **state) {
  (void)state;
  const double lists[2][2] = {{1, 2}, {4, 8}};
  egi_rope_config rope = {.kind = EGI_ROPE_LONG, .theta = 100.0, .rotary_dim = 4};
  float out[4];
  rope.short_factors = lists[0];
  rope.long_factors = lists[1];
  egi_rope_frequencies(&rope, false, out);
  assert_true(out[0] == 1.0f && out[1] == 0.05f);
  egi_rope_frequencies(&rope, true, out);
  assert_true(out[0] == 0.25f && out[1] == 0.0125f);
  /* YaRN: pairs 0 and 3 lie outside of the ramp, whose ends are 1 and 3; the middle of it is the mean. */
  rope = (egi_rope_config){.kind = EGI_ROPE_YARN,
                           .theta = 10000.0,
                           .factor = 4.0,
                           .original_positions = 200.0 * 3.14159265358979323846,
                           .beta_fast = 10.0,
                           .beta_slow = 0.1,
                           .rotary_dim = 8};
  egi_rope_frequencies(&rope, false, out);
  assert_true(out[0] == 1.0f);
  assert_true(out[1] > 0.09999f && out[1] < 0.10001f);
  assert_true(out[2] > 0.00624f && out[2] < 0.00626f);
  assert_true(out[3] > 0.000249f && out[3] < 0.000251f);
}

/* ---- what is refused ---- */

static void test_bad_configs(void **state) {
  static const struct {
    const char *config, *part;
  } rows[] = {
      {"{" SIZES "}", "\"model_type\" is missing"},
      {"{\"model_type\":\"mamba\"," SIZES "}", "\"mamba\" is not supported"},
      {"{\"model_type\":\"llama\",\"hidden_size\":24}", "\"intermediate_size\" is missing"},
      {"{\"model_type\":\"gpt2\",\"n_embd\":24,\"n_layer\":2,\"n_head\":4,\"vocab_size\":56}",
       "max_position_embeddings"},
      {"{\"model_type\":\"llama\",\"num_key_value_heads\":3," SIZES "}", "num_key_value_heads"},
      {"{\"model_type\":\"llama\",\"num_key_value_heads\":0," SIZES "}", "num_key_value_heads"},
      {"{\"model_type\":\"llama\",\"head_dim\":-1," SIZES "}", "head_dim"},
      {"{\"model_type\":\"llama\",\"head_dim\":7," SIZES "}", "rotated in pairs"},
      {"{\"model_type\":\"llama\",\"rms_norm_eps\":\"x\"," SIZES "}", "rms_norm_eps"},
      {"{\"model_type\":\"llama\",\"rms_norm_eps\":-1," SIZES "}", "rms_norm_eps"},
      {"{\"model_type\":\"llama\",\"initializer_range\":-1," SIZES "}", "initializer_range"},
      {"{\"model_type\":\"llama\",\"hidden_act\":\"mish\"," SIZES "}", "\"hidden_act\" \"mish\""},
      {"{\"model_type\":\"llama\",\"quantization_config\":{\"quant_method\":\"gptq\"}," SIZES "}",
       "quantization_config"},
      {"{\"model_type\":\"llama\",\"rope_theta\":0.5," SIZES "}", "rope_theta"},
      {"{\"model_type\":\"llama\",\"rope_scaling\":[]," SIZES "}", "\"rope_scaling\" is not an object"},
      {"{\"model_type\":\"llama\",\"rope_scaling\":{\"rope_type\":\"proportional\"}," SIZES "}", "\"proportional\""},
      {"{\"model_type\":\"llama\",\"rope_scaling\":{\"rope_type\":\"dynamic\"}," SIZES "}", "\"factor\""},
      {"{\"model_type\":\"llama\",\"partial_rotary_factor\":0.5,\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":"
       "2}," SIZES "}",
       "\"partial_rotary_factor\" is not supported for llama"},
      {"{\"model_type\":\"llama\",\"rope_scaling\":{\"rope_type\":\"linear\"}," SIZES "}", "\"factor\""},
      {"{\"model_type\":\"llama\",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,"
       "\"high_freq_factor\":1}," SIZES "}",
       "high_freq_factor"},
      {"{\"model_type\":\"phi3\",\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1,1,1]}," SIZES "}",
       "long_factor"},
      {"{\"model_type\":\"phi3\",\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1,1,1],\"long_factor\":[1]}"
       "," SIZES "}",
       "\"long_factor\" has 1 entries"},
      {"{\"model_type\":\"phi3\",\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1,\"x\",1],\"long_factor\":["
       "]}," SIZES "}",
       "short_factor"},
      {"{\"model_type\":\"gpt_neox\",\"rotary_pct\":1.5," SIZES "}", "partial_rotary_factor"},
      {"{\"model_type\":\"gemma2\",\"layer_types\":[\"full_attention\"]," SIZES "}", "layer_types"},
      {"{\"model_type\":\"gemma2\",\"layer_types\":[\"full_attention\",\"chunked_attention\"]," SIZES "}",
       "chunked_attention"},
      {"{\"model_type\":\"gemma2\",\"layer_types\":[1,2]," SIZES "}", "layer_types"},
      {"{\"model_type\":\"qwen3\",\"layer_types\":[\"full_attention\",\"sliding_attention\"]," SIZES "}",
       "sliding_window"},
      {"{\"model_type\":\"mistral\",\"sliding_window\":0," SIZES "}", "sliding_window"},
      {"{\"model_type\":\"gemma2\",\"query_pre_attn_scalar\":0," SIZES "}", "query_pre_attn_scalar"},
      {"{\"model_type\":\"gemma2\",\"attn_logit_softcapping\":-1," SIZES "}", "attn_logit_softcapping"},
      {"{\"model_type\":\"smollm3\",\"no_rope_layers\":[\"x\",1]," SIZES "}", "no_rope_layers"},
      {"{\"model_type\":\"mixtral\"," SIZES "}", "num_experts"},
      {"{\"model_type\":\"mixtral\",\"num_local_experts\":2,\"num_experts_per_tok\":3," SIZES "}",
       "num_experts_per_tok"},
      {"{\"model_type\":\"qwen3_moe\",\"num_experts\":2,\"num_experts_per_tok\":1,\"mlp_only_layers\":[2]," SIZES "}",
       "mlp_only_layers"},
  };
  io_fixture *fixture = *state;
  const egi_new_options options = {EG_DTYPE_F32, 7, NULL};
  for (size_t i = 0; i < EGI_COUNT(rows); i++) {
    egi_module *module;
    if (egi_huggingface_new(fixture->ctx, write_config(fixture, rows[i].config), &options, &module) == EG_OK)
      fail_msg("accepted: %s", rows[i].config);
    io_expect_error(fixture, rows[i].part);
  }
}

/* ---- weights ---- */

static const char *const tiny = "{\"model_type\":\"gpt2\",\"n_embd\":2,\"n_layer\":1,\"n_head\":1,\"n_positions\":3,"
                                "\"vocab_size\":3,\"n_inner\":2}";

typedef struct tiny_tensor {
  const char *name;
  int64_t rows, columns; /* columns 0: a vector */
} tiny_tensor;

/* Of the base model alone, as the oldest files are. */
static const tiny_tensor tiny_tensors[] = {
    {"wte.weight", 3, 2},
    {"wpe.weight", 3, 2},
    {"ln_f.weight", 2, 0},
    {"ln_f.bias", 2, 0},
    {"h.0.ln_1.weight", 2, 0},
    {"h.0.ln_1.bias", 2, 0},
    {"h.0.ln_2.weight", 2, 0},
    {"h.0.ln_2.bias", 2, 0},
    {"h.0.attn.c_attn.weight", 2, 6},
    {"h.0.attn.c_attn.bias", 6, 0},
    {"h.0.attn.c_proj.weight", 2, 2},
    {"h.0.attn.c_proj.bias", 2, 0},
    {"h.0.mlp.c_fc.weight", 2, 2},
    {"h.0.mlp.c_fc.bias", 2, 0},
    {"h.0.mlp.c_proj.weight", 2, 2},
    {"h.0.mlp.c_proj.bias", 2, 0},
    {"h.0.attn.bias", 1, 0},
    {"extra", 1, 0},
};

/* Tensors [first, end) of the table in one file. */
static void write_tensors(io_fixture *fixture, const char *name, size_t first, size_t end) {
  static const float numbers[16] = {0};
  egi_safetensor tensors[EGI_COUNT(tiny_tensors)] = {{.name = NULL}};
  char path[256];
  for (size_t i = first; i < end; i++) {
    const tiny_tensor *row = &tiny_tensors[i];
    int64_t count = row->rows * (row->columns > 0 ? row->columns : 1);
    tensors[i - first] = (egi_safetensor){.name = row->name,
                                          .dtype = EG_DTYPE_F32,
                                          .rank = row->columns > 0 ? 2 : 1,
                                          .dims = {row->rows, row->columns},
                                          .data = (const uint8_t *)numbers,
                                          .size_bytes = (uint64_t)count * 4};
  }
  snprintf(path, sizeof path, "%s/%s", fixture->directory, name);
  assert_int_equal(egi_safetensors_write(fixture->ctx, path, tensors, end - first), EG_OK);
}

static eg_status make_from_files(io_fixture *fixture, const char *config, egi_weight_files **out_files,
                                 egi_module **out_module) {
  egi_new_options options = {EG_DTYPE_UNDEFINED, 0, NULL};
  *out_files = NULL;
  EG_TRY(egi_weight_files_open(fixture->ctx, fixture->directory, out_files));
  options.weights = *out_files;
  return egi_huggingface_new(fixture->ctx, write_config(fixture, config), &options, out_module);
}

static void remove_files(io_fixture *fixture) {
  static const char *const names[] = {"model.safetensors",
                                      "model.safetensors.index.json",
                                      "a.safetensors",
                                      "b.safetensors",
                                      "model.onnx",
                                      "other/model.onnx",
                                      "other"};
  for (size_t i = 0; i < EGI_COUNT(names); i++) {
    snprintf(fixture->path, sizeof fixture->path, "%s/%s", fixture->directory, names[i]);
    remove(fixture->path);
  }
}

static void check_references(io_fixture *fixture, const egi_module *module) {
  size_t n_referred = 0;
  for (uint32_t i = 1; i < module->n_weights; i++) {
    const egi_bytes *bytes = &module->weights[i].bytes;
    if (bytes->file == NULL) continue;
    egi_mapping mapping;
    assert_true(egi_has_prefix(module->weights[i].name, "transformer."));
    assert_int_equal(egi_mapping_open(fixture->ctx, bytes->file, &mapping), EG_OK);
    assert_true(bytes->offset + bytes->size_bytes <= mapping.size_bytes);
    assert_memory_equal(mapping.data + bytes->offset, bytes->data, bytes->size_bytes);
    egi_mapping_close(&mapping);
    n_referred++;
  }
  assert_int_equal(n_referred, 16);
}

static void test_weights(void **state) {
  io_fixture *fixture = *state;
  egi_weight_files *files;
  egi_module *module;
  char path[256];
  write_tensors(fixture, "model.safetensors", 0, EGI_COUNT(tiny_tensors));
  assert_int_equal(make_from_files(fixture, tiny, &files, &module), EG_OK);
  assert_non_null(strstr(fixture->warning, "1 tensors are not part of the model"));
  assert_non_null(strstr(fixture->warning, "extra"));
  check_references(fixture, module);
  snprintf(path, sizeof path, "%s/model.onnx", fixture->directory);
  assert_int_equal(egi_module_export(module, module->graphs[0], path), EG_OK);
  snprintf(path, sizeof path, "%s/other", fixture->directory);
  assert_int_equal(egi_make_directory(fixture->ctx, path), EG_OK);
  snprintf(path, sizeof path, "%s/other/model.onnx", fixture->directory);
  assert_int_equal(egi_module_export(module, module->graphs[0], path), EG_ERROR_ARGUMENT);
  io_expect_error(fixture, "must lie in the folder");
  assert_int_equal(access(path, F_OK), -1);
  egi_module_destroy(module);
  egi_weight_files_close(files);
  remove_files(fixture);
}

static void test_shards(void **state) {
  io_fixture *fixture = *state;
  egi_weight_files *files;
  egi_module *module;
  egi_text index;
  size_t half = 8, n = EGI_COUNT(tiny_tensors);
  write_tensors(fixture, "a.safetensors", 0, half);
  write_tensors(fixture, "b.safetensors", half, n);
  egi_text_init(&index, fixture->ctx);
  egi_text_add(&index, "{\"metadata\":{},\"weight_map\":{");
  for (size_t i = 0; i < n; i++)
    egi_text_format(&index, "%s\"%s\":\"%c.safetensors\"", i > 0 ? "," : "", tiny_tensors[i].name,
                    i < half ? 'a' : 'b');
  egi_text_add(&index, "}}");
  io_write(fixture, "model.safetensors.index.json", egi_text_string(&index), index.length);
  egi_text_free(&index);
  assert_int_equal(make_from_files(fixture, tiny, &files, &module), EG_OK);
  check_references(fixture, module);
  egi_module_destroy(module);
  egi_weight_files_close(files);
  remove_files(fixture);
}

static void test_bad_weights(void **state) {
  static const struct {
    const char *index, *part;
  } rows[] = {
      {"{}", "weight_map"},
      {"{\"weight_map\":{\"wte.weight\":\"../a.safetensors\"}}", "not a file name"},
      {"{\"weight_map\":{\"wte.weight\":1}}", "not a file name"},
      {"{\"weight_map\":{\"nothing\":\"a.safetensors\"}}", "\"nothing\" is not in \"a.safetensors\""},
      {"{\"weight_map\":{\"wte.weight\":\"missing.safetensors\"}}", "missing.safetensors"},
      {"{\"weight_map\":{\"wte.weight\":\"a.safetensors\"}}", "no tensor \"transformer.wpe.weight\""},
  };
  io_fixture *fixture = *state;
  egi_weight_files *files;
  egi_module *module;
  assert_int_equal(make_from_files(fixture, tiny, &files, &module), EG_ERROR_IO);
  io_expect_error(fixture, "neither model.safetensors nor");
  write_tensors(fixture, "a.safetensors", 0, EGI_COUNT(tiny_tensors));
  for (size_t i = 0; i < EGI_COUNT(rows); i++) {
    io_write(fixture, "model.safetensors.index.json", rows[i].index, strlen(rows[i].index));
    assert_int_not_equal(make_from_files(fixture, tiny, &files, &module), EG_OK);
    io_expect_error(fixture, rows[i].part);
    egi_weight_files_close(files);
  }
  write_tensors(fixture, "model.safetensors", 0, EGI_COUNT(tiny_tensors));
  static const char wider[] = "{\"model_type\":\"gpt2\",\"n_embd\":2,\"n_layer\":1,\"n_head\":1,\"n_positions\":3,"
                              "\"vocab_size\":3,\"n_inner\":5}";
  assert_int_equal(make_from_files(fixture, wider, &files, &module), EG_ERROR_FORMAT);
  io_expect_error(fixture, "\"transformer.h.0.mlp.c_fc.weight\" is [2,2], config.json needs [2,5]");
  egi_weight_files_close(files);
  remove_files(fixture);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_families, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_spellings, io_setup, io_teardown),
      cmocka_unit_test(test_frequencies),
      cmocka_unit_test_setup_teardown(test_bad_configs, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_weights, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_shards, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_bad_weights, io_setup, io_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
