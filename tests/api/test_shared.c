/* Several adapters on one model in one process: trainers that step in turn have the curves they have alone, runners
 * with different adapters answer as alone, and what is made of the base exists once. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { N_TRAINERS = 4, N_STEPS = 3, N_TOKENS = 6 };

static eg_model *load(api_fixture *fixture, const char *name) {
  char path[512];
  eg_model *model;
  snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, name);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  return model;
}

/* Different ranks, targets, first values, storage; the last trains all weights. */
static eg_trainer_options options_of(size_t index) {
  eg_trainer_options options = api_options();
  options.seed = index;
  if (index == 1) options.targets = "(.*(q_proj|v_proj|c_attn|c_fc))", options.rank = 2;
  if (index == 2) options.quant = EG_QUANT_NF4, options.quant_block = 32, options.dropout = 0.1;
  if (index == 3) options.full = 1;
  return options;
}

static void run_alone(api_fixture *fixture, eg_model *model, eg_dataset *dataset, double losses[][N_STEPS]) {
  for (size_t i = 0; i < N_TRAINERS; i++) {
    eg_trainer_options options = options_of(i);
    eg_step_report report;
    eg_trainer *trainer;
    api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
    for (size_t step = 0; step < N_STEPS; step++) {
      api_must(fixture->ctx, eg_trainer_step(trainer, &report));
      losses[i][step] = report.loss;
    }
    eg_trainer_destroy(trainer);
  }
}

static void run_in_turn(api_fixture *fixture, eg_model *model, eg_dataset *dataset, double losses[][N_STEPS]) {
  eg_trainer *trainers[N_TRAINERS];
  for (size_t i = 0; i < N_TRAINERS; i++) {
    eg_trainer_options options = options_of(i);
    api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainers[i]));
  }
  for (size_t step = 0; step < N_STEPS; step++)
    for (size_t i = 0; i < N_TRAINERS; i++) {
      eg_step_report report;
      api_must(fixture->ctx, eg_trainer_step(trainers[i], &report));
      losses[i][step] = report.loss;
    }
  for (size_t i = 0; i < N_TRAINERS; i++) eg_trainer_destroy(trainers[i]);
}

static void test_trainers(void **state) {
  static const char *const files[] = {"llama/model.torchscript-op17-eager.onnx", "gpt2/model.dynamo-op20-eager.onnx"};
  api_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(files); i++) {
    double alone[N_TRAINERS][N_STEPS], in_turn[N_TRAINERS][N_STEPS];
    eg_model *model = load(fixture, files[i]);
    eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
    run_alone(fixture, model, dataset, alone);
    run_in_turn(fixture, model, dataset, in_turn);
    for (size_t k = 0; k < N_TRAINERS; k++) assert_true(isfinite(alone[k][N_STEPS - 1]));
    assert_memory_equal(alone, in_turn, sizeof alone);
    eg_dataset_destroy(dataset);
    eg_model_destroy(model);
  }
}

/* ---- memory ---- */

static size_t weight_bytes(const api_fixture *fixture) {
  return egi_bytes_in_use(fixture->ctx, EGI_PURPOSE_WEIGHTS);
}

/* Codes of 4 bits and fused projections: the second trainer and a runner add nothing, the first one leaves them behind.
 */
static void test_memory(void **state) {
  static const char *const files[] = {"llama/model.dynamo-op23-sdpa.onnx", "qwen3/model.genai-float32.onnx"};
  api_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(files); i++) {
    eg_model *model = load(fixture, files[i]);
    eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
    eg_trainer_options options = options_of(2);
    eg_trainer *first, *second, *other;
    eg_step_report before, after;
    size_t none = weight_bytes(fixture);
    api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &first));
    size_t one = weight_bytes(fixture);
    assert_true(one > none);
    api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &second));
    assert_int_equal(weight_bytes(fixture), one);
    options.double_quant = 0; /* other codes of scales: all of its own */
    api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &other));
    assert_true(weight_bytes(fixture) > one);
    eg_trainer_destroy(other);
    assert_int_equal(weight_bytes(fixture), one);
    api_must(fixture->ctx, eg_trainer_step(first, &before));
    eg_trainer_destroy(first);
    assert_int_equal(weight_bytes(fixture), one);
    api_must(fixture->ctx, eg_trainer_step(second, &after));
    assert_memory_equal(&before.loss, &after.loss, sizeof before.loss);
    eg_trainer_destroy(second);
    assert_int_equal(weight_bytes(fixture), none);
    eg_dataset_destroy(dataset);
    eg_model_destroy(model);
  }
}

/* A model that is rewritten while a trainer runs on what it was. */
static void test_rewritten(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load(fixture, "qwen3/model.genai-float32.onnx");
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = options_of(2);
  eg_trainer *first, *second;
  eg_step_report before, after;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &first));
  api_must(fixture->ctx, eg_model_rewrite(model, NULL, 0));
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &second));
  api_must(fixture->ctx, eg_trainer_step(second, &after));
  api_must(fixture->ctx, eg_trainer_step(first, &before));
  assert_true(fabs(before.loss - after.loss) <= 1e-5 * before.loss);
  eg_trainer_destroy(first);
  eg_model_destroy(model);
  api_must(fixture->ctx, eg_trainer_step(second, NULL));
  eg_trainer_destroy(second);
  eg_dataset_destroy(dataset);
}

/* ---- runners ---- */

static void make_adapter(api_fixture *fixture, eg_model *model, size_t index, const char *folder) {
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = options_of(index);
  eg_trainer *trainer;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  for (int i = 0; i < N_STEPS; i++) api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  api_must(fixture->ctx, eg_trainer_save_adapter(trainer, folder));
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
}

static void answer(api_fixture *fixture, eg_runner *runner, float logits[N_TOKENS * API_VOCABULARY]) {
  static const int64_t ids[N_TOKENS] = {1, 2, 3, 4, 5, 6};
  const eg_tensor input = {"input_ids", EG_DTYPE_I64, 2, {1, N_TOKENS}, ids};
  const eg_tensor *outputs;
  size_t n;
  api_must(fixture->ctx, eg_runner_run(runner, &input, 1, &outputs, &n));
  assert_true(outputs[0].dims[1] * outputs[0].dims[2] >= N_TOKENS * API_VOCABULARY / 2);
  size_t count = (size_t)(outputs[0].dims[1] * outputs[0].dims[2]);
  memset(logits, 0, N_TOKENS * API_VOCABULARY * sizeof *logits);
  memcpy(logits, outputs[0].data,
         (count < N_TOKENS * API_VOCABULARY ? count : N_TOKENS * API_VOCABULARY) * sizeof *logits);
}

static void test_runners(void **state) {
  api_fixture *fixture = *state;
  char folders[3][256];
  float alone[3][N_TOKENS * API_VOCABULARY], at_once[3][N_TOKENS * API_VOCABULARY];
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_runner *runners[3];
  for (size_t i = 0; i < 3; i++) {
    eg_runner_options options = EG_RUNNER_OPTIONS_INIT;
    char name[16];
    snprintf(name, sizeof name, "adapter%zu", i);
    api_path(fixture, folders[i], sizeof folders[i], name);
    if (i > 0) make_adapter(fixture, model, i - 1, folders[i]);
    options.adapter = i > 0 ? folders[i] : NULL;
    api_must(fixture->ctx, eg_runner_create(model, &options, &runners[i]));
    answer(fixture, runners[i], alone[i]);
    eg_runner_destroy(runners[i]);
  }
  for (size_t i = 0; i < 3; i++) {
    eg_runner_options options = EG_RUNNER_OPTIONS_INIT;
    options.adapter = i > 0 ? folders[i] : NULL;
    api_must(fixture->ctx, eg_runner_create(model, &options, &runners[i]));
  }
  for (int round = 0; round < 2; round++)
    for (size_t i = 0; i < 3; i++) {
      answer(fixture, runners[i], at_once[i]);
      assert_memory_equal(at_once[i], alone[i], sizeof alone[i]);
    }
  assert_memory_not_equal(alone[0], alone[1], sizeof alone[0]);
  assert_memory_not_equal(alone[1], alone[2], sizeof alone[0]);
  for (size_t i = 0; i < 3; i++) eg_runner_destroy(runners[i]);
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_trainers, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_memory, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_rewritten, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_runners, api_setup, api_teardown)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
