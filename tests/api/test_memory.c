/* Every allocation of a whole scenario fails once: the call says so, nothing leaks, nothing crashes. And option structs
 * of callers that were compiled against another version. */
#include "support_api.h"

#include <stdlib.h>
#include <string.h>

static int take_token(void *userdata, int32_t token) {
  (void)userdata;
  (void)token;
  return 0;
}

static eg_status use_trainer(api_fixture *fixture, eg_model *model, eg_dataset *dataset) {
  char path[256];
  eg_trainer_options options = api_options();
  eg_trainer *trainer = NULL;
  double loss;
  eg_status status = eg_trainer_create(model, dataset, &options, &trainer);
  if (status == EG_OK) status = eg_trainer_step(trainer, NULL);
  if (status == EG_OK) status = eg_trainer_evaluate(trainer, dataset, &loss);
  if (status == EG_OK) status = eg_trainer_save_adapter(trainer, api_path(fixture, path, sizeof path, "adapter"));
  if (status == EG_OK) status = eg_trainer_save_state(trainer, api_path(fixture, path, sizeof path, "state"));
  if (status == EG_OK) status = eg_trainer_load_state(trainer, path);
  eg_trainer_destroy(trainer);
  return status;
}

static eg_status use_exports(api_fixture *fixture, eg_model *model) {
  char adapter[256], path[256];
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  api_path(fixture, adapter, sizeof adapter, "adapter");
  options.is_portable = 1;
  eg_status status =
      eg_model_export_adapter(model, adapter, &options, api_path(fixture, path, sizeof path, "portable"));
  options.is_portable = 0;
  options.format = EG_EXPORT_MERGED;
  options.dtype = EG_DTYPE_F16;
  if (status == EG_OK)
    status = eg_model_export_adapter(model, adapter, &options, api_path(fixture, path, sizeof path, "merged.onnx"));
  options.format = EG_EXPORT_ONNX_ADAPTER;
  if (status == EG_OK)
    status =
        eg_model_export_adapter(model, adapter, &options, api_path(fixture, path, sizeof path, "base.onnx_adapter"));
  return status;
}

static eg_status use_runner(api_fixture *fixture, eg_model *model) {
  char path[256];
  static const int32_t prompt[] = {1, 2};
  eg_runner_options options = EG_RUNNER_OPTIONS_INIT;
  eg_generate_options generate = EG_GENERATE_OPTIONS_INIT;
  eg_runner *runner = NULL;
  generate.max_tokens = 2;
  options.adapter = api_path(fixture, path, sizeof path, "adapter");
  eg_status status = eg_runner_create(model, &options, &runner);
  if (status == EG_OK) status = eg_runner_generate(runner, prompt, 2, &generate, take_token, NULL);
  eg_runner_destroy(runner);
  return status;
}

static eg_status use_full(api_fixture *fixture, eg_model *model, eg_dataset *dataset) {
  char path[256];
  eg_trainer_options options = api_options();
  eg_trainer *trainer = NULL;
  options.full = 1;
  eg_status status = eg_trainer_create(model, dataset, &options, &trainer);
  if (status == EG_OK) status = eg_trainer_step(trainer, NULL);
  if (status == EG_OK) status = eg_trainer_save_model(trainer, api_path(fixture, path, sizeof path, "trained.onnx"));
  eg_trainer_destroy(trainer);
  return status;
}

/* Everything a host does once; the allocation `fail_at` fails. EG_ERROR_MEMORY when even the context could not be made.
 */
static eg_status scenario(api_fixture *fixture, uint64_t fail_at) {
  static const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8};
  eg_document documents[] = {{tokens, NULL, 8}, {tokens, NULL, 5}};
  eg_model *model = NULL;
  eg_dataset *dataset = NULL;
  fixture->n_allocations = 0;
  fixture->fail_at = fail_at;
  eg_context *ctx = api_context(fixture, 1);
  if (ctx == NULL) return EG_ERROR_MEMORY;
  eg_status status = eg_model_load(ctx, fixture->model_path, NULL, &model);
  if (status == EG_OK) status = eg_model_rewrite(model, NULL, 0);
  if (status == EG_OK) status = eg_dataset_create(ctx, documents, 2, &dataset);
  if (status == EG_OK) status = use_trainer(fixture, model, dataset);
  if (status == EG_OK) status = use_exports(fixture, model);
  if (status == EG_OK) status = use_runner(fixture, model);
  if (status == EG_OK) status = use_full(fixture, model, dataset);
  if (status != EG_OK && status != EG_ERROR_MEMORY)
    print_message("allocation %u: %s\n", (unsigned)fail_at, eg_context_error(ctx));
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
  eg_context_destroy(ctx);
  fixture->fail_at = 0;
  return status;
}

static void test_out_of_memory(void **state) {
  api_fixture *fixture = *state;
  size_t n_live = fixture->n_live;
  assert_int_equal(scenario(fixture, 0), EG_OK);
  uint64_t total = fixture->n_allocations;
  uint64_t stride = total / 800 + 1; /* each of them, as long as there are few */
  assert_true(total > 50);
  for (uint64_t n = 1; n <= total; n += stride) {
    eg_status status = scenario(fixture, n);
    if (status != EG_ERROR_MEMORY)
      fail_msg("allocation %u of %u: status %d", (unsigned)n, (unsigned)total, (int)status);
    assert_int_equal(fixture->n_live, n_live);
  }
  assert_int_equal(scenario(fixture, 0), EG_OK);
  assert_int_equal(fixture->n_live, n_live);
}

/* The training graph leaves as a file and is read again. */
static eg_status export_training(api_fixture *fixture, uint64_t fail_at) {
  char path[256];
  eg_trainer_options options = api_options();
  eg_model *model = NULL, *again = NULL;
  fixture->n_allocations = 0;
  fixture->fail_at = fail_at;
  options.checkpoint = EG_CHECKPOINT_RECOMPUTE;
  eg_context *ctx = api_context(fixture, 1);
  if (ctx == NULL) return EG_ERROR_MEMORY;
  eg_status status = eg_model_load(ctx, fixture->model_path, NULL, &model);
  if (status == EG_OK) status = eg_model_rewrite_training(model, "training", &options, 0);
  if (status == EG_OK) status = eg_model_save(model, api_path(fixture, path, sizeof path, "training.onnx"));
  if (status == EG_OK) status = eg_model_load(ctx, path, NULL, &again);
  eg_model_destroy(again);
  eg_model_destroy(model);
  eg_context_destroy(ctx);
  fixture->fail_at = 0;
  return status;
}

static void test_training_graph_out_of_memory(void **state) {
  api_fixture *fixture = *state;
  size_t n_live = fixture->n_live;
  assert_int_equal(export_training(fixture, 0), EG_OK);
  uint64_t total = fixture->n_allocations, stride = total / 300 + 1;
  for (uint64_t n = 1; n <= total; n += stride) {
    assert_int_equal(export_training(fixture, n), EG_ERROR_MEMORY);
    assert_int_equal(fixture->n_live, n_live);
  }
}

/* A Hugging Face folder becomes a model. */
static eg_status make_new(api_fixture *fixture, uint64_t fail_at) {
  egi_new_options options = {.dtype = EG_DTYPE_UNDEFINED};
  egi_module *module = NULL;
  fixture->n_allocations = 0;
  fixture->fail_at = fail_at;
  eg_context *ctx = api_context(fixture, 1);
  if (ctx == NULL) return EG_ERROR_MEMORY;
  eg_status status = egi_weight_files_open(ctx, EGI_TEST_DATA "/gpt2/hf", &options.weights);
  if (status == EG_OK) status = egi_huggingface_new(ctx, EGI_TEST_DATA "/gpt2/hf/config.json", &options, &module);
  egi_module_destroy(module);
  egi_weight_files_close(options.weights);
  eg_context_destroy(ctx);
  fixture->fail_at = 0;
  return status;
}

static void test_new_out_of_memory(void **state) {
  api_fixture *fixture = *state;
  size_t n_live = fixture->n_live;
  assert_int_equal(make_new(fixture, 0), EG_OK);
  uint64_t total = fixture->n_allocations;
  assert_true(total > 10);
  for (uint64_t n = 1; n <= total; n++) {
    if (make_new(fixture, n) != EG_ERROR_MEMORY) fail_msg("allocation %u of %u", (unsigned)n, (unsigned)total);
    assert_int_equal(fixture->n_live, n_live);
  }
}

/* An older caller's struct ends early: what lies behind it is not read, defaults are taken. */
static void test_struct_size(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 2, 10);
  eg_trainer_options options = EG_TRAINER_OPTIONS_INIT;
  eg_trainer *trainer;
  size_t old_size = offsetof(eg_trainer_options, targets);
  eg_trainer_options *old = malloc(old_size); /* exactly that long: reading on is an error of the sanitizer */
  assert_non_null(old);
  options.rank = 2;
  options.struct_size = old_size;
  memcpy(old, &options, old_size);
  api_must(fixture->ctx, eg_trainer_create(model, dataset, old, &trainer));
  assert_int_equal(eg_trainer_parameter_count(trainer), 28);
  eg_parameter_info info;
  api_must(fixture->ctx, eg_trainer_parameter_info(trainer, 0, &info));
  assert_int_equal(info.dims[0], 2);
  eg_trainer_destroy(trainer);
  free(old);

  struct {
    eg_trainer_options known;
    uint64_t later;
  } newer = {EG_TRAINER_OPTIONS_INIT, 7};
  newer.known.struct_size = sizeof newer;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &newer.known, &trainer));
  eg_trainer_destroy(trainer);

  options.struct_size = 0;
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "struct_size");
  api_must(fixture->ctx, eg_trainer_create(model, dataset, NULL, &trainer)); /* all defaults */
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_out_of_memory, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_training_graph_out_of_memory, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_new_out_of_memory, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_struct_size, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
