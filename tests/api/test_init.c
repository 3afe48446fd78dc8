/* Adapters that begin in the matrices beside them: they change nothing at first, learn from the first step on, and
 * leave as plain LoRA that has the trainer's loss beside the unchanged base. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct trial {
  const char *file;
  eg_lora_init init;
  eg_quant quant;
  int rslora, has_patterns;
  double dropout;
} trial;

static eg_model *load(api_fixture *fixture, const char *name) {
  char path[512];
  eg_model *model;
  snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, name);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  return model;
}

static double loss_of(api_fixture *fixture, const eg_model *model, const eg_dataset *dataset, const char *adapter,
                      eg_quant quant) {
  double loss = 0.0;
  egi_evaluate_options options = {.adapter = adapter, .tokens = 64};
  api_must(fixture->ctx, egi_quantise_options_make(fixture->ctx, quant, 32, 1, &options.quantise));
  api_must(fixture->ctx, egi_evaluate_model(model, &options, dataset->documents, &loss));
  return loss;
}

static void expect_loss(const char *what, const trial *row, double loss, double wanted) {
  if (!(fabs(loss - wanted) <= 1e-5 * wanted))
    fail_msg("%s, init %d, %s: loss %.8g, not %.8g", row->file, (int)row->init, what, loss, wanted);
}

static double length_of(eg_trainer *trainer, bool is_gradient) {
  size_t count = 0;
  double sum = 0.0;
  float *values = api_read(trainer, is_gradient, &count);
  for (size_t i = 0; i < count; i++) sum += (double)values[i] * (double)values[i];
  free(values);
  return sqrt(sum);
}

static eg_trainer_options options_of(const trial *row) {
  eg_trainer_options options = api_options();
  options.init = row->init;
  options.rank = 3;
  options.alpha = 5.0;
  options.rslora = row->rslora;
  options.quant = row->quant;
  options.quant_block = 32;
  options.dropout = row->dropout;
  options.rank_pattern = row->has_patterns ? "o_proj=2" : NULL;
  options.alpha_pattern = row->has_patterns ? "up_proj=7" : NULL;
  return options;
}

/* Ranks and alpha twice as large: the scale of each adapter is the trainer's. */
static void check_folder(api_fixture *fixture, const trial *row, const char *folder) {
  egi_peft *peft;
  api_must(fixture->ctx, egi_peft_open(fixture->ctx, folder, &peft));
  assert_int_equal(peft->config.rank, 6);
  double scale = row->rslora ? 5.0 / sqrt(3.0) : 5.0 / 3.0;
  assert_true(fabs(egi_peft_scale(&peft->config, "model.layers.0.mlp.down_proj") - scale) < 1e-12);
  if (row->has_patterns) assert_int_equal(egi_peft_rank(&peft->config, "model.layers.0.self_attn.o_proj"), 4);
  egi_peft_close(peft);
}

static void run_trial(api_fixture *fixture, const trial *row) {
  char folder[256];
  double loss = 0.0, before = 0.0;
  eg_model *model = load(fixture, row->file);
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = options_of(row);
  eg_trainer *trainer;
  eg_step_report report;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  before = loss_of(fixture, model, dataset, NULL, row->quant);
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &loss));
  expect_loss("before the first step", row, loss, before);
  assert_true(length_of(trainer, false) > 0.1);
  for (int i = 0; i < 4; i++) api_must(fixture->ctx, eg_trainer_step(trainer, &report));
  assert_true(length_of(trainer, true) > 0.0);
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &loss));
  if (!(loss < 0.97 * before)) fail_msg("%s: the loss went from %g to %g", row->file, before, loss);
  api_path(fixture, folder, sizeof folder, "folder");
  api_must(fixture->ctx, eg_trainer_save_adapter(trainer, folder));
  check_folder(fixture, row, folder);
  expect_loss("the folder beside the base", row, loss_of(fixture, model, dataset, folder, row->quant), loss);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_trials(void **state) {
  static const trial rows[] = {
      {"llama/model.dynamo-op23-sdpa.onnx", EG_LORA_INIT_PISSA, EG_QUANT_NONE, 0, 0, 0.0},
      {"llama/model.dynamo-op23-sdpa.onnx", EG_LORA_INIT_OLORA, EG_QUANT_NONE, 1, 1, 0.0},
      {"llama/model.torchscript-op17-eager.onnx", EG_LORA_INIT_PISSA, EG_QUANT_NONE, 0, 1, 0.1},
      {"llama/model.dynamo-op23-sdpa-bfloat16.onnx", EG_LORA_INIT_OLORA, EG_QUANT_NONE, 0, 0, 0.0},
      {"qwen3/model.genai-float32.onnx", EG_LORA_INIT_PISSA, EG_QUANT_NONE, 0, 0, 0.0},
      {"qwen3/model.genai-float32.onnx", EG_LORA_INIT_OLORA, EG_QUANT_NF4, 0, 0, 0.0},
      {"llama/model.dynamo-op23-sdpa.onnx", EG_LORA_INIT_PISSA, EG_QUANT_NF4, 0, 0, 0.0},
      {"gpt2/model.dynamo-op20-eager.onnx", EG_LORA_INIT_PISSA, EG_QUANT_NONE, 0, 0, 0.0},
  };
  for (size_t i = 0; i < EGI_COUNT(rows); i++) run_trial(*state, &rows[i]);
}

/* A state goes on to the same bits, a plan made without data fits, and threads change nothing. */
static void test_same_bits(void **state) {
  api_fixture *fixture = *state;
  static const trial row = {"llama/model.dynamo-op23-sdpa.onnx", EG_LORA_INIT_PISSA, EG_QUANT_NONE, 0, 0, 0.0};
  char path[256];
  size_t count = 0, n = 0;
  eg_context *three = api_context(fixture, 3);
  eg_trainer_options options = options_of(&row);
  eg_model *model = load(fixture, row.file), *other;
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20), *again = api_dataset(three, 3, 20);
  eg_trainer *whole, *resumed;
  api_path(fixture, path, sizeof path, "state");
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &whole));
  api_must(fixture->ctx, eg_trainer_step(whole, NULL));
  api_must(fixture->ctx, eg_trainer_save_state(whole, path));
  api_must(fixture->ctx, eg_trainer_step(whole, NULL));
  char file[512];
  snprintf(file, sizeof file, "%s/%s", EGI_TEST_DATA, row.file);
  api_must(three, eg_model_load(three, file, NULL, &other));
  api_must(three, eg_trainer_create(other, again, &options, &resumed));
  api_must(three, eg_trainer_load_state(resumed, path));
  api_must(three, eg_trainer_step(resumed, NULL));
  float *a = api_read(whole, false, &count), *b = api_read(resumed, false, &n);
  assert_int_equal(count, n);
  assert_memory_equal(a, b, count * sizeof *a);
  free(a);
  free(b);
  eg_trainer_destroy(resumed);
  options.init = EG_LORA_INIT_DEFAULT; /* not the same run */
  api_must(three, eg_trainer_create(other, again, &options, &resumed));
  assert_int_equal(eg_trainer_load_state(resumed, path), EG_ERROR_DATA);
  eg_trainer_destroy(resumed);
  eg_trainer_destroy(whole);
  eg_dataset_destroy(again);
  eg_dataset_destroy(dataset);
  eg_model_destroy(other);
  eg_model_destroy(model);
  eg_context_destroy(three);
}

typedef struct refusal {
  const char *file, *parameters;
  uint32_t rank;
  eg_status status;
  const char *part;
} refusal;

static void test_refusals(void **state) {
  static const refusal rows[] = {
      {"llama/model.dynamo-op23-sdpa.onnx", NULL, 4096, EG_ERROR_ARGUMENT, "init: rank 4096 is more than its matrix"},
      {"llama/model.genai-int4.onnx", NULL, 2, EG_ERROR_UNSUPPORTED, "stored quantised: pissa and olora"},
      {"gpt_oss/model.genai-float32.onnx", "mlp.experts.down_proj", 2, EG_ERROR_UNSUPPORTED, "adapters on experts"}};
  api_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(rows); i++) {
    eg_model *model = load(fixture, rows[i].file);
    eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
    eg_trainer_options options = api_options();
    eg_trainer *trainer;
    options.init = EG_LORA_INIT_PISSA;
    options.rank = rows[i].rank;
    options.target_parameters = rows[i].parameters;
    assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), rows[i].status);
    api_expect_error(fixture->ctx, rows[i].part);
    eg_dataset_destroy(dataset);
    eg_model_destroy(model);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_trials, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_same_bits, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_refusals, api_setup, api_teardown)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
