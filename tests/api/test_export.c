/* An adapter in its other forms: a merged model and a portable folder have the loss of the adapter they come from. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct trained {
  eg_model *model;
  eg_dataset *dataset;
  char adapter[256];
  double loss, base_loss;
} trained;

static double loss_of(api_fixture *fixture, const eg_model *model, const eg_dataset *dataset, const char *adapter) {
  double loss = 0.0;
  egi_evaluate_options options = {.adapter = adapter, .tokens = 64};
  api_must(fixture->ctx, egi_evaluate_model(model, &options, dataset->documents, &loss));
  return loss;
}

/* A few quick steps, so that the adapter changes a lot. */
static trained train(api_fixture *fixture, eg_model *model, const char *targets) {
  trained t = {.model = model, .dataset = api_dataset(fixture->ctx, 3, 20)};
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  options.targets = targets;
  options.learning_rate = 0.03;
  options.rank = 3;
  options.alpha = 7.0;
  api_path(fixture, t.adapter, sizeof t.adapter, "adapter");
  api_must(fixture->ctx, eg_trainer_create(model, t.dataset, &options, &trainer));
  for (int i = 0; i < 4; i++) api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  api_must(fixture->ctx, eg_trainer_save_adapter(trainer, t.adapter));
  eg_trainer_destroy(trainer);
  t.base_loss = loss_of(fixture, model, t.dataset, NULL);
  t.loss = loss_of(fixture, model, t.dataset, t.adapter);
  assert_true(fabs(t.loss - t.base_loss) >= 0.05);
  return t;
}

static void drop(trained *t) {
  eg_dataset_destroy(t->dataset);
  eg_model_destroy(t->model);
}

/* Exports, loads and compares; *out_model is the merged model when it is wanted. */
static void check_merged(api_fixture *fixture, const trained *t, eg_dtype dtype, double tolerance,
                         eg_model **out_model) {
  char path[256];
  eg_model *merged;
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  options.format = EG_EXPORT_MERGED;
  options.dtype = dtype;
  api_path(fixture, path, sizeof path, "merged.onnx");
  api_must(fixture->ctx, eg_model_export_adapter(t->model, t->adapter, &options, path));
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &merged));
  double loss = loss_of(fixture, merged, t->dataset, NULL);
  if (!(fabs(loss - t->loss) <= tolerance * t->loss)) fail_msg("loss %g, not %g", loss, t->loss);
  if (out_model != NULL)
    *out_model = merged;
  else
    eg_model_destroy(merged);
}

static void check_all(api_fixture *fixture, trained *t) {
  check_merged(fixture, t, EG_DTYPE_UNDEFINED, 1e-5, NULL);
  check_merged(fixture, t, EG_DTYPE_F16, 1e-3, NULL);
  check_merged(fixture, t, EG_DTYPE_BF16, 8e-3, NULL);
  drop(t);
}

static void test_merged(void **state) {
  api_fixture *fixture = *state;
  trained t = train(fixture, api_model(fixture, fixture->ctx), "all-linear");
  check_all(fixture, &t);
}

static eg_model *load(api_fixture *fixture, const char *name) {
  char path[512];
  eg_model *model;
  snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, name);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  return model;
}

/* Files of every kind: weights [in, out] and [out, in], fused projections, 16 bits, codes, mixtures, Conv1D. */
static void test_files(void **state) {
  static const char *const names[] = {"llama/model.dynamo-op23-sdpa.onnx",
                                      "llama/model.torchscript-op17-eager.onnx",
                                      "llama/model.dynamo-op23-sdpa-float16.onnx",
                                      "llama/model.dynamo-op23-sdpa-bfloat16.onnx",
                                      "llama/model.genai-int4.onnx",
                                      "qwen3/model.genai-float32.onnx",
                                      "gpt2/model.dynamo-op20-eager.onnx",
                                      "gpt_oss/model.genai-float32.onnx"};
  for (size_t i = 0; i < EGI_COUNT(names); i++) {
    trained t = train(*state, load(*state, names[i]), "all-linear");
    check_all(*state, &t);
  }
}

/* Matrices of 4 bits: the loss is that of the merged model, which they round, and MatMulBnb4 is read back. */
static void test_four_bits(void **state) {
  api_fixture *fixture = *state;
  char path[256];
  eg_model *merged;
  trained t = train(fixture, load(fixture, "llama/model.dynamo-op23-sdpa.onnx"), "all-linear");
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  options.format = EG_EXPORT_MERGED;
  options.stored = EG_QUANT_NF4;
  api_path(fixture, path, sizeof path, "merged.onnx");
  api_must(fixture->ctx, eg_model_export_adapter(t.model, t.adapter, &options, path));
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &merged));
  uint32_t n_codes = 0;
  for (uint32_t i = 1; i < merged->module->n_weights; i++)
    n_codes += merged->module->weights[i].dtype == EG_DTYPE_U8 && merged->module->weights[i].rank == 1;
  assert_int_equal(n_codes, 14);
  double loss = loss_of(fixture, merged, t.dataset, NULL);
  assert_true(fabs(loss - t.loss) <= 0.1 * t.loss);
  eg_model_destroy(merged);
  drop(&t);
}

/* Added to the dequantised base, the adapter has the loss that it has beside the quantised one. */
static void test_dequantised_base(void **state) {
  static const char *const names[] = {"llama/model.dynamo-op23-sdpa.onnx", "llama/model.dynamo-op23-sdpa-float16.onnx",
                                      "gpt2/model.dynamo-op20-eager.onnx"};
  api_fixture *fixture = *state;
  char path[256];
  for (size_t i = 0; i < EGI_COUNT(names); i++) {
    trained t = train(fixture, load(fixture, names[i]), "all-linear");
    egi_evaluate_options evaluate = {.adapter = t.adapter, .tokens = 64};
    eg_export_options options = EG_EXPORT_OPTIONS_INIT;
    eg_model *merged;
    double wanted;
    options.format = EG_EXPORT_MERGED;
    options.base = EG_QUANT_NF4;
    options.quant_block = 32;
    api_must(fixture->ctx, egi_quantise_options_make(fixture->ctx, EG_QUANT_NF4, 32, 1, &evaluate.quantise));
    api_must(fixture->ctx, egi_evaluate_model(t.model, &evaluate, t.dataset->documents, &wanted));
    assert_true(fabs(wanted - t.loss) >= 1e-4 * t.loss); /* quantising shows */
    api_path(fixture, path, sizeof path, "merged.onnx");
    api_must(fixture->ctx, eg_model_export_adapter(t.model, t.adapter, &options, path));
    api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &merged));
    double loss = loss_of(fixture, merged, t.dataset, NULL);
    if (!(fabs(loss - wanted) <= 1e-5 * wanted)) fail_msg("%s: loss %g, not %g", names[i], loss, wanted);
    eg_model_destroy(merged);
    drop(&t);
  }
}

static uint32_t count_of(const eg_model *model, eg_dtype dtype) {
  uint32_t count = 0;
  for (uint32_t i = 1; i < model->module->n_weights; i++)
    count += model->module->weights[i].dtype == dtype && model->module->weights[i].rank == 2;
  return count;
}

static void test_types(void **state) {
  api_fixture *fixture = *state;
  eg_model *merged;
  trained t = train(fixture, load(fixture, "llama/model.dynamo-op23-sdpa-float16.onnx"), "q_proj");
  check_merged(fixture, &t, EG_DTYPE_F32, 1e-5, &merged);
  assert_int_equal(count_of(merged, EG_DTYPE_F16), 0);
  eg_model_destroy(merged);
  check_merged(fixture, &t, EG_DTYPE_BF16, 8e-3, &merged);
  assert_int_equal(count_of(merged, EG_DTYPE_F16), 0);
  assert_true(count_of(merged, EG_DTYPE_BF16) >= 15);
  eg_model_destroy(merged);
  drop(&t);
}

/* A head that shares the embedding's matrix gets one of its own: the embedding stays. */
static void test_tied_head(void **state) {
  api_fixture *fixture = *state;
  char path[256];
  eg_model *model, *merged;
  api_write(fixture, "config.json",
            "{\"model_type\":\"llama\",\"hidden_size\":16,\"intermediate_size\":24,\"num_hidden_layers\":1,"
            "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":48,\"rms_norm_eps\":1e-5,"
            "\"initializer_range\":0.2,\"hidden_act\":\"silu\",\"tie_word_embeddings\":true}");
  egi_new_options options = {.dtype = EG_DTYPE_F32, .seed = 3};
  egi_module *module;
  api_must(fixture->ctx,
           egi_huggingface_new(fixture->ctx, api_path(fixture, path, sizeof path, "config.json"), &options, &module));
  api_path(fixture, path, sizeof path, "tied.onnx");
  api_must(fixture->ctx, egi_module_export(module, module->graphs[0], path));
  egi_module_destroy(module);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  trained t = train(fixture, model, "lm_head,o_proj");
  check_merged(fixture, &t, EG_DTYPE_UNDEFINED, 1e-5, &merged);
  eg_model_destroy(merged);
  drop(&t);
}

/* ---- onnxruntime's adapters ---- */

/* Without the adapter the base computes what the model does; each module has two more inputs. */
static void check_base(api_fixture *fixture, const char *name, const char *targets, size_t n_modules) {
  char path[256];
  eg_model *base;
  trained t = train(fixture, name != NULL ? load(fixture, name) : api_model(fixture, fixture->ctx), targets);
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  options.format = EG_EXPORT_ONNX_ADAPTER;
  api_path(fixture, path, sizeof path, "lora");
  api_must(fixture->ctx, eg_model_export_adapter(t.model, t.adapter, &options, path));
  api_path(fixture, path, sizeof path, "lora/model.onnx");
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &base));
  double loss = loss_of(fixture, base, t.dataset, NULL);
  if (!(fabs(loss - t.base_loss) <= 1e-5 * t.base_loss)) fail_msg("loss %g, not %g", loss, t.base_loss);
  size_t n_inputs = 0;
  for (uint32_t i = 1; i < base->module->n_weights; i++)
    n_inputs += strstr(base->module->weights[i].name, ".lora_") != NULL && base->module->weights[i].rank == 2;
  assert_int_equal(n_inputs, 2 * n_modules);
  eg_model_destroy(base);
  drop(&t);
}

static void test_onnx_adapter(void **state) {
  check_base(*state, NULL, "all-linear", 14);
  check_base(*state, "llama/model.dynamo-op23-sdpa.onnx", "q_proj,down_proj", 4);
  check_base(*state, "qwen3/model.genai-float32.onnx", "v_proj,up_proj,lm_head", 5); /* a part of fused q, k, v */
  check_base(*state, "llama/model.dynamo-op23-sdpa-float16.onnx", "o_proj", 2);
  check_base(*state, "llama/model.genai-int4.onnx", "k_proj,gate_proj", 4);
}

/* ---- GGUF ---- */

/* The file holds this text; fewer than a few kilobytes are looked through. */
static bool holds(const egi_mapping *mapping, const char *text) {
  size_t length = strlen(text);
  for (size_t i = 0; i + length <= mapping->size_bytes; i++)
    if (memcmp(mapping->data + i, text, length) == 0) return true;
  return false;
}

static void check_gguf(api_fixture *fixture, const trained *t, const char *architecture, const char *const *texts) {
  char path[256];
  egi_mapping mapping;
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  options.format = EG_EXPORT_GGUF;
  options.architecture = architecture;
  api_path(fixture, path, sizeof path, "adapter.gguf");
  api_must(fixture->ctx, eg_model_export_adapter(t->model, t->adapter, &options, path));
  api_must(fixture->ctx, egi_mapping_open(fixture->ctx, path, &mapping));
  for (; *texts != NULL; texts++)
    if (!holds(&mapping, *texts)) fail_msg("%s is not in the file", *texts);
  egi_mapping_close(&mapping);
}

/* The rows of B as they are, and as the llama architecture has them: [heads, 2, half] -> [heads, half, 2]. */
static void check_rows(api_fixture *fixture, const trained *t) {
  enum { HEADS = 4, HALF = 2, RANK = 3 };
  char path[256];
  egi_peft *peft;
  egi_mapping mapping;
  float rows[HEADS * 2 * HALF * RANK];
  api_must(fixture->ctx, egi_peft_open(fixture->ctx, t->adapter, &peft));
  const egi_safetensor *b =
      egi_safetensors_find(peft->tensors, "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight");
  assert_int_equal(b->size_bytes, sizeof rows);
  memcpy(rows, b->data, sizeof rows);
  for (int is_permuted = 0; is_permuted < 2; is_permuted++) {
    static const char *const none[] = {NULL};
    float expected[EGI_COUNT(rows)];
    check_gguf(fixture, t, is_permuted ? "llama" : "qwen3", none);
    for (int h = 0; h < HEADS; h++)
      for (int part = 0; part < 2; part++)
        for (int i = 0; i < HALF; i++) {
          int from = (h * 2 + part) * HALF + i, to = is_permuted ? (h * HALF + i) * 2 + part : from;
          memcpy(expected + to * RANK, rows + from * RANK, RANK * sizeof *rows);
        }
    api_path(fixture, path, sizeof path, "adapter.gguf");
    api_must(fixture->ctx, egi_mapping_open(fixture->ctx, path, &mapping));
    bool is_found = false;
    for (size_t at = 0; at + sizeof expected <= mapping.size_bytes && !is_found; at += 32)
      is_found = memcmp(mapping.data + at, expected, sizeof expected) == 0;
    assert_true(is_found);
    egi_mapping_close(&mapping);
  }
  egi_peft_close(peft);
}

static void test_gguf(void **state) {
  static const char *const llama[] = {"llama", "adapter.lora.alpha", "blk.0.attn_q.weight.lora_a",
                                      "blk.1.ffn_down.weight.lora_b", NULL};
  static const char *const gpt2[] = {"gpt2", "blk.0.attn_qkv.weight.lora_a", "blk.1.ffn_up.weight.lora_b", NULL};
  static const char *const gpt_oss[] = {"gpt-oss", "blk.0.attn_output.weight.lora_a", NULL};
  static const char *const qwen3[] = {"qwen3", "blk.0.attn_k.weight.lora_a", NULL};
  static const char *const qwen2[] = {"qwen2", "blk.0.attn_k.weight.lora_a", NULL};
  api_fixture *fixture = *state;
  trained t = train(fixture, api_model(fixture, fixture->ctx), "all-linear");
  check_gguf(fixture, &t, NULL, llama);
  check_gguf(fixture, &t, "mistral", llama);
  check_rows(fixture, &t);
  drop(&t);
  const struct {
    const char *name;
    const char *const *texts;
  } files[] = {{"gpt2/model.dynamo-op20-eager.onnx", gpt2},
               {"gpt_oss/model.genai-float32.onnx", gpt_oss},
               {"qwen3/model.genai-float32.onnx", qwen3},
               {"qwen2/model.dynamo-op20-eager.onnx", qwen2}};
  for (size_t i = 0; i < EGI_COUNT(files); i++) {
    t = train(fixture, load(fixture, files[i].name), "all-linear");
    check_gguf(fixture, &t, NULL, files[i].texts);
    drop(&t);
  }
}

/* ---- PEFT ---- */

static void test_portable(void **state) {
  api_fixture *fixture = *state;
  char path[256];
  egi_peft *peft;
  trained t = train(fixture, api_model(fixture, fixture->ctx), "q_proj,down_proj");
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  options.is_portable = 1;
  api_path(fixture, path, sizeof path, "portable");
  /* rsLoRA and a rank and scale of its own for one module: what few readers know */
  api_must(fixture->ctx, egi_peft_open(fixture->ctx, t.adapter, &peft));
  const egi_peft_pattern alphas[] = {{"model.layers.1.mlp.down_proj", 2.5, NULL}};
  egi_peft_config config = peft->config;
  config.use_rslora = true;
  config.alphas = alphas;
  config.n_alphas = 1;
  size_t count = egi_safetensors_count(peft->tensors);
  egi_safetensor tensors[16];
  assert_true(count <= EGI_COUNT(tensors));
  for (size_t i = 0; i < count; i++) tensors[i] = *egi_safetensors_at(peft->tensors, i);
  char special[256];
  api_path(fixture, special, sizeof special, "special");
  api_must(fixture->ctx, egi_peft_write(fixture->ctx, special, &config, tensors, count));
  egi_peft_close(peft);
  double loss = loss_of(fixture, t.model, t.dataset, special);
  api_must(fixture->ctx, eg_model_export_adapter(t.model, special, &options, path));
  api_must(fixture->ctx, egi_peft_open(fixture->ctx, path, &peft));
  assert_false(peft->config.use_rslora);
  assert_int_equal(peft->config.n_alphas, 0);
  assert_int_equal(peft->config.rank, 3);
  assert_true(fabs(peft->config.alpha - 3.0) <= 0.0);
  egi_peft_close(peft);
  double portable_loss = loss_of(fixture, t.model, t.dataset, path);
  assert_true(fabs(portable_loss - loss) <= 1e-6 * loss);
  options.dtype = EG_DTYPE_F16;
  api_must(fixture->ctx, eg_model_export_adapter(t.model, special, &options, path));
  api_must(fixture->ctx, egi_peft_open(fixture->ctx, path, &peft));
  assert_int_equal(egi_safetensors_at(peft->tensors, 0)->dtype, EG_DTYPE_F16);
  egi_peft_close(peft);
  drop(&t);
}

static void test_refused(void **state) {
  api_fixture *fixture = *state;
  char path[256];
  trained t = train(fixture, api_model(fixture, fixture->ctx), "q_proj");
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  eg_model *other = load(fixture, "gpt2/model.dynamo-op20-eager.onnx");
  api_path(fixture, path, sizeof path, "refused.onnx");
  options.format = EG_EXPORT_MERGED;
  assert_int_equal(eg_model_export_adapter(other, t.adapter, &options, path), EG_ERROR_DATA);
  api_expect_error(fixture->ctx, "q_proj");
  assert_int_equal(eg_model_export_adapter(t.model, "nowhere", &options, path), EG_ERROR_IO);
  for (int i = 0; i < 2; i++) { /* the model's own file stays, also where the base of an adapter would be written */
    options.format = i == 0 ? EG_EXPORT_MERGED : EG_EXPORT_ONNX_ADAPTER;
    snprintf(path, sizeof path, "%s%s", fixture->model_path, i == 0 ? "" : "_adapter");
    assert_int_equal(eg_model_export_adapter(t.model, t.adapter, &options, path), EG_ERROR_ARGUMENT);
    api_expect_error(fixture->ctx, "is the model itself");
  }
  options.format = EG_EXPORT_MERGED;
  options.is_portable = 1;
  assert_int_equal(eg_model_export_adapter(t.model, t.adapter, &options, path), EG_ERROR_ARGUMENT);
  options.is_portable = 0;
  options.format = EG_EXPORT_GGUF;
  options.stored = EG_QUANT_NF4;
  assert_int_equal(eg_model_export_adapter(t.model, t.adapter, &options, path), EG_ERROR_ARGUMENT);
  options.stored = EG_QUANT_NONE;
  options.dtype = EG_DTYPE_I8;
  assert_int_equal(eg_model_export_adapter(t.model, t.adapter, &options, path), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_model_export_adapter(t.model, NULL, &options, path), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_model_export_adapter(NULL, t.adapter, &options, path), EG_ERROR_ARGUMENT);
  eg_model_destroy(other);
  drop(&t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_merged, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_files, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_types, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_four_bits, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_dequantised_base, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_tied_head, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_onnx_adapter, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_gguf, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_portable, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_refused, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
