/* Modules that are trained whole beside adapters: their gradients are those of full training, a saved folder gives the
 * same losses and goes on, and what cannot be trained so is named. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX "base_model.model."

static eg_model *load(api_fixture *fixture, const char *name) {
  char path[512];
  eg_model *model;
  snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, name);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  return model;
}

static double loss_of(api_fixture *fixture, const eg_model *model, const eg_dataset *dataset, const char *adapter) {
  double loss = 0.0;
  egi_evaluate_options options = {.adapter = adapter, .tokens = 64};
  api_must(fixture->ctx, egi_evaluate_model(model, &options, dataset->documents, &loss));
  return loss;
}

/* A parameter's gradient; NULL: there is none of that name. The caller frees it with free(). */
static float *gradient_of(const eg_trainer *trainer, const char *name, size_t *out_count) {
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    eg_parameter_info info;
    assert_int_equal(eg_trainer_parameter_info(trainer, i, &info), EG_OK);
    if (strcmp(info.name, name) != 0) continue;
    *out_count = 1;
    for (uint32_t axis = 0; axis < info.rank; axis++) *out_count *= (size_t)info.dims[axis];
    float *values = calloc(*out_count, sizeof *values);
    assert_non_null(values);
    assert_int_equal(eg_trainer_read_gradient(trainer, i, values, *out_count), EG_OK);
    return values;
  }
  return NULL;
}

static void expect_equal(const float *got, const float *wanted, size_t count, const char *name) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < count; i++) {
    difference += ((double)got[i] - (double)wanted[i]) * ((double)got[i] - (double)wanted[i]);
    size += (double)wanted[i] * (double)wanted[i];
  }
  assert_true(size > 0.0);
  if (!(sqrt(difference) <= 1e-5 * sqrt(size))) fail_msg("the gradient of %s is off by %g", name, difference / size);
}

/* B is zero at first, so that adapters change no gradient: each module's is full training's. */
static void compare_with_full(api_fixture *fixture, eg_model *model, const char *modules, const char *const *names) {
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = api_options();
  eg_trainer *full, *trainer;
  options.clip = 0.0;
  options.full = 1;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &full));
  api_must(fixture->ctx, eg_trainer_step(full, NULL));
  options.full = 0;
  options.modules_to_save = modules;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  for (size_t i = 0; names[i] != NULL; i++) {
    char name[256];
    size_t count = 0, n = 0;
    snprintf(name, sizeof name, PREFIX "%s", names[i]);
    float *got = gradient_of(trainer, name, &n), *wanted = gradient_of(full, names[i], &count);
    if (got == NULL || wanted == NULL) fail_msg("there is no gradient of %s", names[i]);
    assert_int_equal(n, count);
    expect_equal(got, wanted, n, names[i]);
    free(got);
    free(wanted);
  }
  eg_trainer_destroy(trainer);
  eg_trainer_destroy(full);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_gradients(void **state) {
  static const char *const llama[] = {"lm_head.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight", NULL};
  static const char *const gpt2[] = {"transformer.wpe.weight", "transformer.ln_f.bias",
                                     "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.bias", NULL};
  static const char *const genai[] = {"model.layers.0.self_attn.k_proj.weight", NULL};
  compare_with_full(*state, load(*state, "llama/model.dynamo-op23-sdpa.onnx"), "lm_head,model.norm,0.mlp.up_proj",
                    llama);
  compare_with_full(*state, load(*state, "gpt2/model.dynamo-op20-eager.onnx"), "wpe,ln_f,h.0.mlp.c_fc", gpt2);
  compare_with_full(*state, load(*state, "qwen3/model.genai-float32.onnx"), "q_proj,k_proj,v_proj", genai);
}

/* A tied weight becomes two: together they have its gradient. */
static void test_tied(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load(fixture, "qwen3/model.genai-float32.onnx");
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = api_options();
  eg_trainer *full, *trainer;
  size_t n = 0, n_head = 0, count = 0;
  options.clip = 0.0;
  options.full = 1;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &full));
  api_must(fixture->ctx, eg_trainer_step(full, NULL));
  options.full = 0;
  options.modules_to_save = "lm_head,embed_tokens";
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  float *table = gradient_of(trainer, PREFIX "model.embed_tokens.weight", &n),
        *head = gradient_of(trainer, PREFIX "lm_head.weight", &n_head),
        *wanted = gradient_of(full, "model.embed_tokens.weight", &count);
  if (table == NULL || head == NULL || wanted == NULL) fail_msg("a gradient is missing");
  assert_int_equal(n, count);
  assert_int_equal(n_head, count);
  for (size_t i = 0; i < count; i++) table[i] += head[i];
  expect_equal(table, wanted, count, "the tied weight");
  free(table);
  free(head);
  free(wanted);
  eg_trainer_destroy(trainer);
  eg_trainer_destroy(full);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void check_merged(api_fixture *fixture, const eg_model *model, const eg_dataset *dataset, const char *adapter,
                         double loss) {
  char path[256];
  eg_model *merged;
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  options.format = EG_EXPORT_MERGED;
  api_path(fixture, path, sizeof path, "merged.onnx");
  api_must(fixture->ctx, eg_model_export_adapter(model, adapter, &options, path));
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &merged));
  double again = loss_of(fixture, merged, dataset, NULL);
  if (!(fabs(again - loss) <= 1e-5 * loss)) fail_msg("merged: loss %g, not %g", again, loss);
  eg_model_destroy(merged);
  options.format = EG_EXPORT_PEFT;
  options.is_portable = 1;
  api_path(fixture, path, sizeof path, "portable");
  api_must(fixture->ctx, eg_model_export_adapter(model, adapter, &options, path));
  again = loss_of(fixture, model, dataset, path);
  if (!(fabs(again - loss) <= 1e-5 * loss)) fail_msg("portable: loss %g, not %g", again, loss);
  options.is_portable = 0;
  options.format = EG_EXPORT_GGUF;
  assert_int_equal(eg_model_export_adapter(model, adapter, &options, path), EG_ERROR_UNSUPPORTED);
  api_expect_error(fixture->ctx, "modules_to_save");
}

/* Saved, read back, merged, and gone on from. */
static void save_and_go_on(api_fixture *fixture, const char *file, const char *modules, eg_quant quant) {
  char folder[256];
  double loss, wanted, step_loss;
  eg_model *model = load(fixture, file);
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = api_options();
  eg_step_report report;
  eg_trainer *trainer, *again;
  options.modules_to_save = modules;
  options.quant = quant;
  options.quant_block = 32;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  for (int i = 0; i < 4; i++) api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  api_path(fixture, folder, sizeof folder, "modules");
  api_must(fixture->ctx, eg_trainer_save_adapter(trainer, folder));
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &wanted));
  if (quant == EG_QUANT_NONE) {
    loss = loss_of(fixture, model, dataset, folder);
    if (!(fabs(loss - wanted) <= 1e-6 * wanted)) fail_msg("read back: loss %g, not %g", loss, wanted);
    assert_true(fabs(loss - loss_of(fixture, model, dataset, NULL)) >= 0.05);
    check_merged(fixture, model, dataset, folder, wanted);
  }
  api_must(fixture->ctx, eg_trainer_step(trainer, &report));
  step_loss = report.loss;
  options.modules_to_save = NULL;
  options.init_adapter = folder;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &again));
  assert_int_equal(eg_trainer_parameter_count(again), eg_trainer_parameter_count(trainer));
  api_must(fixture->ctx, eg_trainer_step(again, &report));
  if (!(fabs(report.loss - step_loss) <= 1e-6 * step_loss)) fail_msg("gone on: %g, not %g", report.loss, step_loss);
  eg_trainer_destroy(again);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_save(void **state) {
  save_and_go_on(*state, "llama/model.dynamo-op23-sdpa.onnx", "lm_head,embed_tokens", EG_QUANT_NONE);
  save_and_go_on(*state, "qwen3/model.genai-float32.onnx", "lm_head,q_proj,k_proj,v_proj,norm", EG_QUANT_NONE);
  save_and_go_on(*state, "gpt2/model.dynamo-op20-eager.onnx", "wte,0.mlp.c_fc", EG_QUANT_NONE);
  save_and_go_on(*state, "llama/model.dynamo-op23-sdpa.onnx", "0.mlp", EG_QUANT_NF4);
}

/* An adapter on a head that is tied changes the head alone, as in PEFT; merged, the head has a matrix of its own. */
static void test_tied_head(void **state) {
  api_fixture *fixture = *state;
  char folder[256], path[256];
  double wanted = 0.0;
  eg_model *model = load(fixture, "qwen3/model.genai-float32.onnx"), *merged;
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = api_options();
  eg_export_options export = EG_EXPORT_OPTIONS_INIT;
  eg_trainer *trainer;
  options.targets = "lm_head";
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  assert_int_equal(eg_trainer_parameter_count(trainer), 2);
  for (int i = 0; i < 4; i++) api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &wanted));
  api_path(fixture, folder, sizeof folder, "head");
  api_must(fixture->ctx, eg_trainer_save_adapter(trainer, folder));
  eg_trainer_destroy(trainer);
  assert_true(fabs(loss_of(fixture, model, dataset, folder) - wanted) <= 1e-6 * wanted);
  assert_true(fabs(loss_of(fixture, model, dataset, NULL) - wanted) >= 0.05);
  export.format = EG_EXPORT_MERGED;
  api_path(fixture, path, sizeof path, "merged.onnx");
  api_must(fixture->ctx, eg_model_export_adapter(model, folder, &export, path));
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &merged));
  assert_true(fabs(loss_of(fixture, merged, dataset, NULL) - wanted) <= 1e-5 * wanted);
  eg_model_destroy(merged);
  options.targets = "q_proj,embed_tokens";
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "\"embed_tokens\" is no linear layer and takes no adapter");
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

typedef struct refusal {
  const char *file, *modules;
  int full;
  eg_status status;
  const char *part;
} refusal;

/* A head behind a layer that has an adapter. */
static void test_classifier(void **state) {
  api_fixture *fixture = *state;
  char data[512];
  size_t n = 0;
  eg_model *model = load(fixture, "encoders/classification/model.onnx");
  eg_dataset *dataset;
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  snprintf(data, sizeof data, "%s/encoders/classification/data.jsonl", EGI_TEST_DATA);
  api_must(fixture->ctx, eg_dataset_load(fixture->ctx, data, NULL, &dataset));
  options.modules_to_save = "classifier";
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  float *weight = gradient_of(trainer, PREFIX "classifier.weight", &n), *bias = NULL;
  if (weight != NULL) bias = gradient_of(trainer, PREFIX "classifier.bias", &n);
  if (weight == NULL || bias == NULL) fail_msg("the head is not trained");
  free(weight);
  free(bias);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* PEFT loads no folder without adapters. */
static void test_alone(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load(fixture, "llama/model.dynamo-op23-sdpa.onnx");
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  options.targets = "none";
  options.modules_to_save = "lm_head";
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "stand beside adapters");
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_refusals(void **state) {
  static const refusal rows[] = {
      {"llama/model.dynamo-op23-sdpa.onnx", "classifier", 0, EG_ERROR_ARGUMENT, "is named \"classifier\""},
      {"llama/model.dynamo-op23-sdpa.onnx", "norm,", 0, EG_ERROR_ARGUMENT, "is named \"\""},
      {"llama/model.dynamo-op23-sdpa.onnx", "lm_head", 1, EG_ERROR_ARGUMENT, "modules_to_save"},
      {"qwen3/model.genai-float32.onnx", "k_proj", 0, EG_ERROR_UNSUPPORTED, "all of them or none"},
      {"llama/model.genai-int4.onnx", "down_proj", 0, EG_ERROR_UNSUPPORTED, "stored quantised"},
      {"gpt_oss/model.genai-float32.onnx", "mlp", 0, EG_ERROR_UNSUPPORTED, "stack of experts"}};
  api_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(rows); i++) {
    eg_model *model = load(fixture, rows[i].file);
    eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
    eg_trainer_options options = api_options();
    eg_trainer *trainer;
    options.modules_to_save = rows[i].modules;
    options.full = rows[i].full;
    assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), rows[i].status);
    api_expect_error(fixture->ctx, rows[i].part);
    eg_dataset_destroy(dataset);
    eg_model_destroy(model);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_gradients, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_tied, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_tied_head, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_save, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_classifier, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_alone, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_refusals, api_setup, api_teardown)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
