/* Adapters on experts (PEFT's target_parameters): names and shapes, equal gradients in every form of dispatch and of
 * file, first values, folders, and what is refused. */
#include "support_api.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BOTH "mlp.experts.gate_up_proj,mlp.experts.down_proj"
#define PREFIX "base_model.model.model.layers."

static const char *const files[] = {"gpt_oss/model.genai-float32.onnx",
                                    "gpt_oss/model.dynamo-op23-eager-all.onnx",
                                    "gpt_oss/model.dynamo-op23-eager-batched_mm.onnx",
                                    "qwen3_moe/model.dynamo-op23-sdpa-all.onnx",
                                    "qwen3_moe/model.dynamo-op23-sdpa-batched_mm.onnx",
                                    "qwen3_moe/model.torchscript-op17-eager-all.onnx"};

static eg_model *load(eg_context *ctx, const char *file) {
  char path[512];
  eg_model *model;
  snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, file);
  api_must(ctx, eg_model_load(ctx, path, NULL, &model));
  return model;
}

static eg_trainer_options expert_options(const char *targets, const char *parameters) {
  eg_trainer_options options = api_options();
  options.rank = 3;
  options.alpha = 6.0;
  options.targets = targets;
  options.target_parameters = parameters;
  return options;
}

static eg_trainer *make(eg_context *ctx, const char *file, const eg_trainer_options *options) {
  eg_model *model = load(ctx, file);
  eg_dataset *dataset = api_dataset(ctx, 5, 20);
  eg_trainer *trainer;
  api_must(ctx, eg_trainer_create(model, dataset, options, &trainer));
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
  return trainer;
}

/* Numbers in the place of zeros, so that every gradient is something. */
static void fill(eg_context *ctx, eg_trainer *trainer) {
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    eg_parameter_info info;
    api_must(ctx, eg_trainer_parameter_info(trainer, i, &info));
    size_t n = (size_t)(info.dims[0] * info.dims[1]);
    float *values = calloc(n, sizeof *values);
    assert_non_null(values);
    for (size_t k = 0; k < n; k++) values[k] = (float)(0.4 * egi_random_uniform(11, i, k) - 0.2);
    api_must(ctx, eg_trainer_write_parameter(trainer, i, values, n));
    free(values);
  }
}

static float *gradients(eg_context *ctx, const char *file, const eg_trainer_options *options, double *out_loss,
                        size_t *out_count) {
  eg_trainer *trainer = make(ctx, file, options);
  eg_step_report report;
  fill(ctx, trainer);
  api_must(ctx, eg_trainer_step(trainer, &report));
  *out_loss = report.loss;
  float *values = api_read(trainer, true, out_count);
  eg_trainer_destroy(trainer);
  return values;
}

static void compare(const float *got, const float *wanted, size_t n, double tolerance) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < n; i++) {
    difference += pow((double)got[i] - (double)wanted[i], 2);
    size += pow((double)wanted[i], 2);
  }
  assert_true(size > 0.0);
  assert_true(sqrt(difference) <= tolerance * sqrt(size));
}

static void test_names_and_shapes(void **state) {
  static const struct {
    const char *name;
    int64_t per_expert; /* the dimension that all experts share, over their number */
  } wanted[] = {{PREFIX "0.mlp.experts.base_layer.lora_A.weight", 0},
                {PREFIX "0.mlp.experts.base_layer.lora_B.weight", 1},
                {PREFIX "0.mlp.experts.lora_A.weight", 0},
                {PREFIX "0.mlp.experts.lora_B.weight", 1}};
  api_fixture *fixture = *state;
  const eg_trainer_options options = expert_options("none", BOTH);
  eg_trainer *trainer = make(fixture->ctx, files[0], &options);
  assert_int_equal(eg_trainer_parameter_count(trainer) % EGI_COUNT(wanted), 0);
  for (size_t i = 0; i < EGI_COUNT(wanted); i++) {
    eg_parameter_info info;
    api_must(fixture->ctx, eg_trainer_parameter_info(trainer, i, &info));
    assert_string_equal(info.name, wanted[i].name);
    assert_int_equal(info.rank, 2);
    assert_int_equal(info.dims[wanted[i].per_expert], 4 * 3); /* experts · rank */
  }
  eg_trainer_destroy(trainer);
}

/* A module with one adapter has it under the module's own name. */
static void test_one_parameter(void **state) {
  api_fixture *fixture = *state;
  eg_parameter_info info;
  const eg_trainer_options options = expert_options("none", "experts.gate_up_proj");
  eg_trainer *trainer = make(fixture->ctx, files[0], &options);
  api_must(fixture->ctx, eg_trainer_parameter_info(trainer, 0, &info));
  assert_string_equal(info.name, PREFIX "0.mlp.experts.lora_A.weight");
  eg_trainer_destroy(trainer);
}

static void test_forms_agree(void **state) {
  api_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(files); i++) {
    eg_trainer_options options = expert_options("all-linear", BOTH);
    double loss, other_loss;
    size_t n, other_n;
    float *fused = gradients(fixture->ctx, files[i], &options, &loss, &n);
    options.moe_dispatch = EG_MOE_LOOP;
    float *loop = gradients(fixture->ctx, files[i], &options, &other_loss, &other_n);
    assert_int_equal(other_n, n);
    assert_memory_equal(loop, fused, n * sizeof *loop);
    options.no_fuse = 1;
    float *bodies = gradients(fixture->ctx, files[i], &options, &other_loss, &other_n);
    assert_int_equal(other_n, n);
    assert_true(fabs(other_loss - loss) <= 1e-5 * loss);
    compare(bodies, fused, n, 1e-5);
    free(fused);
    free(loop);
    free(bodies);
  }
}

/* Every exporter's file of a model has the same gradients. */
static void test_files_agree(void **state) {
  api_fixture *fixture = *state;
  const eg_trainer_options options = expert_options("q_proj", BOTH);
  float *first = NULL;
  size_t n = 0;
  for (size_t i = 0; i < EGI_COUNT(files); i++) {
    double loss;
    size_t own_n;
    float *own = gradients(fixture->ctx, files[i], &options, &loss, &own_n);
    if (i == 0 || strncmp(files[i], files[i - 1], 5) != 0) {
      free(first);
      first = own;
      n = own_n;
      continue;
    }
    assert_int_equal(own_n, n);
    compare(own, first, n, 1e-5);
    free(own);
  }
  free(first);
}

/* Gaussian numbers have the deviation 1/rank, whatever the number of experts; after steps a folder goes on. */
static void test_values_and_folder(void **state) {
  api_fixture *fixture = *state;
  char directory[256];
  eg_trainer_options options = expert_options("none", BOTH);
  eg_step_report a, b;
  size_t n, other_n;
  options.init = EG_LORA_INIT_GAUSSIAN;
  eg_trainer *trainer = make(fixture->ctx, files[0], &options);
  eg_parameter_info info;
  api_must(fixture->ctx, eg_trainer_parameter_info(trainer, 0, &info));
  size_t count = (size_t)(info.dims[0] * info.dims[1]);
  float *values = api_read(trainer, false, &n);
  double sum = 0.0;
  for (size_t i = 0; i < count; i++) sum += (double)values[i] * (double)values[i];
  assert_true(fabs(sqrt(sum / (double)count) - 1.0 / 3.0) <= 0.05);
  free(values);
  fill(fixture->ctx, trainer);
  api_must(fixture->ctx, eg_trainer_save_adapter(trainer, api_path(fixture, directory, sizeof directory, "experts")));
  values = api_read(trainer, false, &n);
  api_must(fixture->ctx, eg_trainer_step(trainer, &a));
  eg_trainer_destroy(trainer);
  options.target_parameters = NULL;
  options.init_adapter = directory;
  trainer = make(fixture->ctx, files[1], &options);
  float *loaded = api_read(trainer, false, &other_n);
  assert_int_equal(other_n, n);
  assert_memory_equal(loaded, values, n * sizeof *loaded);
  api_must(fixture->ctx, eg_trainer_step(trainer, &b));
  assert_true(fabs(a.loss - b.loss) <= 1e-5 * a.loss);
  free(values);
  free(loaded);
  eg_trainer_destroy(trainer);
}

/* Tokens of experts add up to the choices of real tokens, padded or packed; a model without a mixture has none. */
static void test_use_is_reported(void **state) {
  static const eg_packing packings[] = {EG_PACKING_OFF, EG_PACKING_SEQUENTIAL};
  api_fixture *fixture = *state;
  uint64_t first[2][8] = {{0}}, tokens[8], n_first = 0;
  for (size_t p = 0; p < EGI_COUNT(packings); p++) {
    eg_trainer_options options = expert_options("none", BOTH);
    eg_step_report report;
    size_t n_mixtures;
    options.packing = packings[p];
    options.tokens = 128;
    eg_trainer *trainer = make(fixture->ctx, files[3], &options);
    size_t n = eg_trainer_expert_count(trainer, &n_mixtures);
    assert_true(n > 0 && n <= 8);
    assert_int_equal(n_mixtures, 2);
    api_must(fixture->ctx, eg_trainer_step(trainer, &report));
    assert_true(report.auxiliary_loss >= 1.0 && report.auxiliary_loss < (double)n);
    for (size_t m = 0; m < n_mixtures; m++) {
      uint64_t sum = 0;
      api_must(fixture->ctx, eg_trainer_read_expert_tokens(trainer, m, tokens, n));
      for (size_t e = 0; e < n; e++) sum += tokens[e];
      assert_int_equal(sum % report.n_tokens, 0);
      assert_true(sum >= report.n_tokens);
      if (p == 0) memcpy(first[m], tokens, sizeof tokens);
      assert_int_equal(n_first == 0 || n_first == report.n_tokens, 1);
      assert_memory_equal(first[m], tokens, n * sizeof *tokens);
    }
    n_first = report.n_tokens;
    assert_int_equal(eg_trainer_read_expert_tokens(trainer, n_mixtures, tokens, n), EG_ERROR_ARGUMENT);
    assert_int_equal(eg_trainer_read_expert_tokens(trainer, 0, tokens, n - 1), EG_ERROR_ARGUMENT);
    eg_trainer_destroy(trainer);
  }
  eg_model *dense = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  const eg_trainer_options plain = api_options();
  eg_step_report report;
  eg_trainer *trainer;
  api_must(fixture->ctx, eg_trainer_create(dense, dataset, &plain, &trainer));
  assert_int_equal(eg_trainer_expert_count(trainer, NULL), 0);
  api_must(fixture->ctx, eg_trainer_step(trainer, &report));
  assert_true(report.auxiliary_loss >= 0.0 && report.auxiliary_loss <= 0.0);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(dense);
}

static void test_refusals(void **state) {
  api_fixture *fixture = *state;
  eg_trainer_options options = expert_options("none", "mlp.experts.nothing");
  eg_model *model = load(fixture->ctx, files[0]), *dense = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer *trainer;
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx,
                   "no parameter of experts is named \"mlp.experts.nothing\"; the model has model.layers.0");
  options.target_parameters = BOTH;
  assert_int_equal(eg_trainer_create(dense, dataset, &options, &trainer), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "the model has no experts");
  options.target_parameters = "none";
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_UNSUPPORTED);
  api_expect_error(fixture->ctx, "nothing that can be trained");
  eg_dataset_destroy(dataset);
  eg_model_destroy(dense);
  eg_model_destroy(model);
}

/* By the parameter's name, as PEFT's. */
static void test_patterns(void **state) {
  api_fixture *fixture = *state;
  eg_trainer_options options = expert_options("none", BOTH);
  unsigned n_small = 0;
  options.rank_pattern = "experts.down_proj=2";
  eg_trainer *trainer = make(fixture->ctx, files[3], &options);
  size_t n_mixtures = 0, n_experts = eg_trainer_expert_count(trainer, &n_mixtures);
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    eg_parameter_info info;
    api_must(fixture->ctx, eg_trainer_parameter_info(trainer, i, &info));
    if (strstr(info.name, ".lora_A.") != NULL) n_small += info.dims[0] == 2 * (int64_t)n_experts;
  }
  assert_int_equal(n_small, n_mixtures);
  eg_trainer_destroy(trainer);
  eg_model *model = load(fixture->ctx, files[3]);
  eg_dataset *dataset = api_dataset(fixture->ctx, 5, 20);
  options.rank_pattern = "experts=2"; /* the module's name is none of a parameter */
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "no adapter is named \"experts\"");
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_patterns, api_setup, api_teardown),

      cmocka_unit_test_setup_teardown(test_names_and_shapes, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_one_parameter, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_forms_agree, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_files_agree, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_values_and_folder, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_use_is_reported, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_refusals, api_setup, api_teardown),
  };
  return cmocka_run_group_tests_name("experts", tests, NULL, NULL);
}
