/* Packed documents are trained as if each were alone: loss and gradients of rows equal those of the documents one by
 * one, for models with windows, sinks, learned positions and experts, for documents of one token, one that fills its
 * row and rows with a tail. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIZES                                                                                      \
  "\"hidden_size\":16,\"intermediate_size\":24,\"num_hidden_layers\":2,\"num_attention_heads\":4," \
  "\"num_key_value_heads\":2,\"head_dim\":4,\"vocab_size\":48,\"initializer_range\":0.2,"          \
  "\"max_position_embeddings\":64,"

static const char *const configs[] = {
    "{\"model_type\":\"llama\"," SIZES "\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\"}",
    "{\"model_type\":\"mistral\"," SIZES "\"sliding_window\":5,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\"}",
    "{\"model_type\":\"gemma3_text\"," SIZES
    "\"sliding_window\":4,\"layer_types\":[\"sliding_attention\",\"full_attention\"],\"query_pre_attn_scalar\":4,"
    "\"hidden_activation\":\"gelu_pytorch_tanh\",\"rms_norm_eps\":1e-6,\"tie_word_embeddings\":true}",
    "{\"model_type\":\"gpt2\",\"n_embd\":16,\"n_layer\":2,\"n_head\":4,\"n_positions\":64,\"vocab_size\":48,"
    "\"initializer_range\":0.2,\"layer_norm_epsilon\":1e-5,\"activation_function\":\"gelu_new\"}",
    "{\"model_type\":\"qwen3_moe\"," SIZES "\"num_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":8,"
    "\"norm_topk_prob\":true,\"rms_norm_eps\":1e-6,\"hidden_act\":\"silu\"}",
};

/* One token, a whole row, and rows with a tail: 94 tokens, in order 5 rows of 24, at best 4. */
static const uint32_t lengths[] = {5, 1, 24, 9, 1, 13, 2, 17, 7, 11, 3, 1};
enum { N_DOCUMENTS = 12, ROW = 24 };

/* Files of exporters. */
static const char *const files[] = {"gpt_oss/model.dynamo-op23-eager-batched_mm.onnx",
                                    "gpt_oss/model.genai-float32.onnx", "gpt2/model.torchscript-op17-eager.onnx",
                                    "qwen2/model.dynamo-op23-sdpa.onnx"};

static eg_model *make_model(api_fixture *fixture, const char *config) {
  char path[256];
  egi_module *module;
  eg_model *model;
  egi_new_options options = {.dtype = EG_DTYPE_F32, .seed = 3};
  if (config[0] != '{') {
    snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, config);
    api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
    return model;
  }
  api_write(fixture, "packing.json", config);
  api_path(fixture, path, sizeof path, "packing.json");
  api_must(fixture->ctx, egi_huggingface_new(fixture->ctx, path, &options, &module));
  api_path(fixture, path, sizeof path, "packing.onnx");
  api_must(fixture->ctx, egi_module_export(module, module->graphs[0], path));
  egi_module_destroy(module);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  return model;
}

/* Documents [first, end) of these lengths. */
static eg_dataset *make_dataset_of(eg_context *ctx, const uint32_t *of, size_t first, size_t end) {
  static int32_t tokens[N_DOCUMENTS][ROW];
  eg_document documents[N_DOCUMENTS];
  eg_dataset *dataset;
  for (size_t d = first; d < end; d++) {
    for (uint32_t i = 0; i < of[d]; i++) tokens[d][i] = (int32_t)((11 * d + 7 * i + i * i) % API_VOCABULARY);
    documents[d - first] = (eg_document){tokens[d], NULL, of[d]};
  }
  api_must(ctx, eg_dataset_create(ctx, documents, end - first, &dataset));
  return dataset;
}

static eg_dataset *make_dataset(eg_context *ctx, size_t first, size_t end) {
  return make_dataset_of(ctx, lengths, first, end);
}

/* Parameters that are no zeros, so that every gradient shows. */
static void stir(eg_trainer *trainer) {
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    float values[4096];
    eg_parameter_info info;
    size_t count = 1;
    assert_int_equal(eg_trainer_parameter_info(trainer, i, &info), EG_OK);
    for (uint32_t axis = 0; axis < info.rank; axis++) count *= (size_t)info.dims[axis];
    assert_true(count <= EGI_COUNT(values));
    assert_int_equal(eg_trainer_read_parameter(trainer, i, values, count), EG_OK);
    for (size_t k = 0; k < count; k++) values[k] += 0.05F * (float)((int)((7 * k + 3 * i) % 13) - 6);
    assert_int_equal(egi_trainer_write(trainer, i, values, count), EG_OK);
  }
}

/* The first step: over `accumulate` micro-batches, 0: over all there are. */
static float *first_step(eg_model *model, eg_dataset *dataset, const eg_trainer_options *options, eg_context *ctx,
                         eg_step_report *report, size_t *out_count) {
  eg_trainer *trainer;
  eg_trainer_options own = *options;
  if (own.accumulate == 0) {
    own.accumulate = 1;
    own.n_steps = 0;
    api_must(ctx, eg_trainer_create(model, dataset, &own, &trainer));
    own.accumulate = (uint32_t)eg_trainer_step_count(trainer);
    eg_trainer_destroy(trainer);
  }
  api_must(ctx, eg_trainer_create(model, dataset, &own, &trainer));
  stir(trainer);
  api_must(ctx, eg_trainer_step(trainer, report));
  float *values = api_read(trainer, true, out_count);
  eg_trainer_destroy(trainer);
  return values;
}

/* Each document by a trainer of its own, weighted by its trained tokens. */
static float *one_by_one(eg_model *model, const eg_trainer_options *options, eg_context *ctx, eg_step_report *out_sum,
                         size_t *out_count) {
  float *sum = NULL;
  *out_sum = (eg_step_report){0};
  for (size_t d = 0; d < N_DOCUMENTS; d++) {
    eg_step_report report;
    out_sum->n_tokens += lengths[d];
    if (lengths[d] == 1) continue; /* nothing to train */
    eg_dataset *dataset = make_dataset(ctx, d, d + 1);
    float *own = first_step(model, dataset, options, ctx, &report, out_count);
    eg_dataset_destroy(dataset);
    assert_int_equal(report.n_targets, lengths[d] - 1);
    out_sum->n_targets += report.n_targets;
    out_sum->loss += report.loss * (double)report.n_targets;
    if (sum == NULL) sum = calloc(*out_count, sizeof *sum);
    assert_non_null(sum);
    for (size_t i = 0; i < *out_count; i++) sum[i] += own[i] * (float)report.n_targets;
    free(own);
  }
  out_sum->loss /= (double)out_sum->n_targets;
  for (size_t i = 0; i < *out_count; i++) sum[i] /= (float)out_sum->n_targets;
  return sum;
}

static double difference(const float *a, const float *b, size_t count) {
  double sum = 0, size = 0;
  for (size_t i = 0; i < count; i++) {
    sum += pow((double)a[i] - (double)b[i], 2);
    size += pow((double)b[i], 2);
  }
  assert_true(size > 1e-12);
  return sqrt(sum / size);
}

/* What `engraft eval` says of documents in rows, or padded, is what it says of each alone. */
static void check_evaluation(api_fixture *fixture, const char *config, bool is_expanded) {
  eg_context *ctx = fixture->ctx;
  eg_model *model = make_model(fixture, config);
  double sum = 0.0, n_targets = 0.0, loss;
  egi_evaluate_options options = {.tokens = ROW, .is_expanded = is_expanded, .packing = EG_PACKING_OFF};
  for (size_t d = 0; d < N_DOCUMENTS; d++) {
    if (lengths[d] == 1) continue;
    eg_dataset *dataset = make_dataset(ctx, d, d + 1);
    api_must(ctx, egi_evaluate_model(model, &options, dataset->documents, &loss));
    sum += loss * (lengths[d] - 1);
    n_targets += lengths[d] - 1;
    eg_dataset_destroy(dataset);
  }
  eg_dataset *dataset = make_dataset(ctx, 0, N_DOCUMENTS);
  for (int packing = EG_PACKING_AUTO; packing <= EG_PACKING_OFF; packing++) {
    options.packing = (eg_packing)packing;
    api_must(ctx, egi_evaluate_model(model, &options, dataset->documents, &loss));
    if (!(fabs(loss - sum / n_targets) <= 1e-5 * loss))
      fail_msg("%s: %d: %.9g, not %.9g", config, packing, loss, sum / n_targets);
  }
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void evaluation_packs(void **state) {
  for (size_t i = 0; i < EGI_COUNT(configs); i++)
    for (int is_expanded = 0; is_expanded <= 1; is_expanded++) check_evaluation(*state, configs[i], is_expanded != 0);
  for (size_t i = 0; i < EGI_COUNT(files); i++) check_evaluation(*state, files[i], false);
}

/* Each document alone, against rows (and padded batches, so that the test itself is held). */
static void check_options(api_fixture *fixture, const char *config, eg_trainer_options options) {
  static const eg_packing kinds[] = {EG_PACKING_SEQUENTIAL, EG_PACKING_BFD, EG_PACKING_OFF};
  static const uint32_t rows[] = {5, 4, 0};
  eg_context *ctx = fixture->ctx;
  eg_model *model = make_model(fixture, config);
  eg_dataset *dataset = make_dataset(ctx, 0, N_DOCUMENTS);
  eg_step_report alone, packed;
  size_t count, other;
  options.tokens = ROW;
  options.packing = EG_PACKING_OFF;
  float *expected = one_by_one(model, &options, ctx, &alone, &count);
  for (size_t i = 0; i < EGI_COUNT(kinds); i++) {
    options.packing = kinds[i];
    options.accumulate = rows[i];
    float *values = first_step(model, dataset, &options, ctx, &packed, &other);
    assert_int_equal(other, count);
    assert_int_equal(packed.n_tokens, alone.n_tokens);
    assert_int_equal(packed.n_targets, alone.n_targets);
    assert_true(fabs(packed.loss - alone.loss) <= 1e-5 * fabs(alone.loss));
    double error = difference(values, expected, count);
    if (!(error <= 1e-5)) fail_msg("%s: gradients differ by %g", config, error);
    free(values);
  }
  free(expected);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void check_model(api_fixture *fixture, const char *config, bool is_full, bool is_expanded) {
  eg_trainer_options options = api_options();
  options.full = is_full;
  options.no_fuse = is_expanded;
  check_options(fixture, config, options);
}

static void test_one_by_one(void **state) {
  for (size_t i = 0; i < EGI_COUNT(configs); i++) check_model(*state, configs[i], false, false);
}

static void test_files(void **state) {
  for (size_t i = 0; i < EGI_COUNT(files); i++) check_model(*state, files[i], false, false);
  check_model(*state, files[0], true, false);
}

static void test_all_weights(void **state) {
  check_model(*state, configs[0], true, false);
  check_model(*state, configs[3], true, false);
}

static void test_without_fused(void **state) {
  check_model(*state, configs[2], false, true);
  check_model(*state, configs[3], false, true);
}

/* The metadata made again and again gives the same bits; so do other numbers of threads. */
/* Recompute, offload, and a base of 4-bit codes. */
static void test_little_memory(void **state) {
  for (size_t i = 0; i < EGI_COUNT(configs); i++)
    for (int kind = 0; kind < 3; kind++) {
      eg_trainer_options options = api_options();
      if (kind == 0) options.checkpoint = EG_CHECKPOINT_RECOMPUTE;
      if (kind == 1) options.checkpoint = EG_CHECKPOINT_OFFLOAD;
      if (kind == 2) options.quant = EG_QUANT_NF4;
      check_options(*state, configs[i], options);
    }
}

static void test_comparisons(void **state) {
  api_fixture *fixture = *state;
  eg_dataset *dataset = make_dataset(fixture->ctx, 0, N_DOCUMENTS);
  eg_model *model = make_model(fixture, configs[2]);
  eg_trainer_options options = api_options();
  eg_step_report report, other_report;
  size_t count, other;
  options.tokens = ROW;
  options.accumulate = 2;
  float *expected = first_step(model, dataset, &options, fixture->ctx, &report, &count);
  for (int i = EG_PACKING_CACHE_REBUILD; i <= EG_PACKING_CACHE_READBACK; i++) {
    options.packing_cache = (eg_packing_cache)i;
    float *values = first_step(model, dataset, &options, fixture->ctx, &other_report, &other);
    assert_int_equal(other, count);
    assert_memory_equal(values, expected, count * sizeof *values);
    assert_memory_equal(&other_report.loss, &report.loss, sizeof report.loss);
    free(values);
  }
  free(expected);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static float *train_with(api_fixture *fixture, int n_threads, size_t *out_count) {
  char path[256];
  eg_context *ctx = api_context(fixture, n_threads);
  eg_model *model;
  eg_step_report report;
  eg_trainer_options options = api_options();
  assert_non_null(ctx);
  api_path(fixture, path, sizeof path, "packing.onnx");
  api_must(ctx, eg_model_load(ctx, path, NULL, &model));
  eg_dataset *dataset = make_dataset(ctx, 0, N_DOCUMENTS);
  options.tokens = ROW;
  options.accumulate = 3;
  float *values = first_step(model, dataset, &options, ctx, &report, out_count);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
  eg_context_destroy(ctx);
  return values;
}

static void test_threads(void **state) {
  size_t count, other;
  eg_model_destroy(make_model(*state, configs[1]));
  float *one = train_with(*state, 1, &count), *three = train_with(*state, 3, &other);
  assert_int_equal(other, count);
  assert_memory_equal(one, three, count * sizeof *one);
  free(one);
  free(three);
}

/* The evaluation of a trainer packs too. */
static void test_evaluation(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = make_dataset(fixture->ctx, 0, N_DOCUMENTS);
  eg_trainer_options options = api_options();
  double losses[2];
  options.tokens = ROW;
  for (int i = 0; i < 2; i++) {
    eg_trainer *trainer;
    options.packing = i == 0 ? EG_PACKING_OFF : EG_PACKING_AUTO;
    api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
    api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &losses[i]));
    eg_trainer_destroy(trainer);
  }
  assert_true(fabs(losses[0] - losses[1]) <= 1e-6 * losses[0]);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* A table of positions ends: a document may not be longer, a row may. */
static void test_positions_end(void **state) {
  static const uint32_t short_ones[] = {10, 10, 10, 10, 10, 10, 10}, long_one[] = {10, 20};
  static const char config[] =
      "{\"model_type\":\"gpt2\",\"n_embd\":16,\"n_layer\":1,\"n_head\":4,\"n_positions\":16,\"vocab_size\":48}";
  api_fixture *fixture = *state;
  eg_model *model = make_model(fixture, config);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  eg_dataset *dataset = make_dataset_of(fixture->ctx, short_ones, 0, 7);
  options.packing = EG_PACKING_BFD;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  dataset = make_dataset_of(fixture->ctx, long_one, 0, 2);
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_DATA);
  api_expect_error(fixture->ctx, "document 2 has 20 tokens, but the model has a table of 16 positions");
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_one_by_one, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_files, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_all_weights, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_without_fused, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_little_memory, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_comparisons, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_threads, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_evaluation, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_positions_end, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(evaluation_packs, api_setup, api_teardown),
  };
  return cmocka_run_group_tests_name("packing", tests, NULL, NULL);
}
