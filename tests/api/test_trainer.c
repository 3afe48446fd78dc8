/* Trainers through the public interface: determinism, memory in steps, accumulation, stopping, saving and going on. */
#include "support_api.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double relative_error(const float *a, const float *b, size_t n) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < n; i++) {
    difference += pow((double)a[i] - (double)b[i], 2);
    size += pow((double)b[i], 2);
  }
  return sqrt(difference) / sqrt(size);
}

static void test_learns(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  eg_step_report report = {0};
  double first = 0.0;
  options.schedule = EG_SCHEDULE_COSINE;
  options.warmup = 0.1;
  options.n_steps = 40;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  assert_int_equal(eg_trainer_step_count(trainer), 40);
  for (uint64_t i = 1; i <= 40; i++) {
    api_must(fixture->ctx, eg_trainer_step(trainer, &report));
    assert_int_equal(report.step, i);
    assert_int_equal(report.n_tokens, 57);
    assert_int_equal(report.n_targets, 54);
    if (i == 1) first = report.loss;
  }
  assert_true(fabs(first - log(API_VOCABULARY)) <= 1.5); /* random weights know nothing */
  assert_true(report.loss <= 0.7 * first);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_steps_do_not_allocate(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 7, 20);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  options.accumulate = 2;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  for (int i = 0; i < 5; i++) {
    uint64_t before = egi_allocation_count(fixture->ctx);
    api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
    assert_int_equal(egi_allocation_count(fixture->ctx), before);
  }
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* Three steps with so many threads: all parameters and the last loss. */
static float *train_with(api_fixture *fixture, int n_threads, double *out_loss, size_t *out_count) {
  eg_context *ctx = api_context(fixture, n_threads);
  assert_non_null(ctx);
  eg_model *model = api_model(fixture, ctx);
  eg_dataset *dataset = api_dataset(ctx, 9, 40);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  eg_step_report report = {0};
  options.tokens = 128;
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  for (int i = 0; i < 3; i++) api_must(ctx, eg_trainer_step(trainer, &report));
  float *values = api_read(trainer, false, out_count);
  *out_loss = report.loss;
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
  eg_context_destroy(ctx);
  return values;
}

static void test_threads_change_nothing(void **state) {
  static const int threads[] = {2, 4, 2};
  double loss, other_loss;
  size_t count, other_count;
  float *values = train_with(*state, 1, &loss, &count);
  for (size_t i = 0; i < EGI_COUNT(threads); i++) {
    float *others = train_with(*state, threads[i], &other_loss, &other_count);
    assert_int_equal(other_count, count);
    assert_memory_equal(others, values, count * sizeof *values);
    assert_memory_equal(&other_loss, &loss, sizeof loss);
    free(others);
  }
  free(values);
}

static void test_accumulation(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 6, 20);
  eg_trainer_options whole = api_options(), parts = api_options();
  eg_trainer *a, *b;
  eg_step_report at_once, in_parts;
  size_t count;
  whole.tokens = 6 * 20;
  parts.tokens = 40; /* two documents at a time, padded differently */
  parts.accumulate = 3;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &whole, &a));
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &parts, &b));
  eg_model_destroy(model); /* the trainers keep what they need */
  eg_dataset_destroy(dataset);
  api_must(fixture->ctx, eg_trainer_step(a, &at_once));
  api_must(fixture->ctx, eg_trainer_step(b, &in_parts));
  assert_int_equal(at_once.n_targets, in_parts.n_targets);
  assert_true(fabs(at_once.loss - in_parts.loss) <= 1e-6 * at_once.loss);
  assert_true(fabs(at_once.gradient_norm - in_parts.gradient_norm) <= 1e-5 * at_once.gradient_norm);
  float *x = api_read(a, true, &count), *y = api_read(b, true, &count);
  assert_true(relative_error(x, y, count) <= 1e-5);
  free(x);
  free(y);
  eg_trainer_destroy(a);
  api_must(fixture->ctx, eg_trainer_step(b, NULL)); /* the second lives on without the first */
  eg_trainer_destroy(b);
}

static void test_evaluate(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  eg_step_report report;
  double before, after, alone;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &before));
  api_must(fixture->ctx, eg_trainer_step(trainer, &report));
  assert_true(fabs(report.loss - before) <= 1e-6 * before);
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &after));
  assert_true(after < before);
  api_must(fixture->ctx, egi_evaluate_model(model, &(egi_evaluate_options){.adapter = NULL, .tokens = 64},
                                            dataset->documents, &alone));
  assert_true(fabs(alone - before) <= 1e-6 * before); /* B is zero at the start: the adapter changes nothing */
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_stop(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 6, 20);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  eg_step_report report;
  size_t count;
  options.tokens = 40;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  float *before = api_read(trainer, false, &count);
  eg_trainer_request_stop(trainer);
  assert_int_equal(eg_trainer_step(trainer, &report), EG_ERROR_STOPPED);
  float *after = api_read(trainer, false, &count);
  assert_memory_equal(before, after, count * sizeof *before);
  api_must(fixture->ctx, eg_trainer_step(trainer, &report)); /* the request is used up */
  assert_int_equal(report.step, 1);
  free(before);
  free(after);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_not_finite(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 2, 10);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  size_t count;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  float huge[4 * 16]; /* finite, but what it does to the loss is not */
  eg_parameter_info info;
  for (size_t i = 0; i < 2; i++) {
    api_must(fixture->ctx, eg_trainer_parameter_info(trainer, i, &info));
    size_t n = (size_t)(info.dims[0] * info.dims[1]);
    assert_true(n <= EGI_COUNT(huge));
    for (size_t k = 0; k < n; k++) huge[k] = 3e38f;
    api_must(fixture->ctx, eg_trainer_write_parameter(trainer, i, huge, n));
  }
  float *before = api_read(trainer, false, &count);
  assert_int_equal(eg_trainer_step(trainer, NULL), EG_ERROR_DATA);
  api_expect_error(fixture->ctx, "not finite");
  float *after = api_read(trainer, false, &count);
  assert_memory_equal(before, after, count * sizeof *before);
  free(before);
  free(after);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_no_targets(void **state) {
  api_fixture *fixture = *state;
  static const int32_t tokens[] = {1, 2, 3, 4}, none[] = {-100, -100, -100, -100};
  eg_document documents[] = {{tokens, none, 4}, {tokens, NULL, 4}};
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset;
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  eg_step_report report;
  size_t count;
  options.tokens = 4;
  api_must(fixture->ctx, eg_dataset_create(fixture->ctx, documents, 2, &dataset));
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  float *before = api_read(trainer, false, &count);
  api_must(fixture->ctx, eg_trainer_step(trainer, &report));
  assert_int_equal(report.n_targets, 0);
  assert_non_null(strstr(fixture->warning, "skipped"));
  float *after = api_read(trainer, false, &count);
  assert_memory_equal(before, after, count * sizeof *before);
  api_must(fixture->ctx, eg_trainer_step(trainer, &report));
  assert_int_equal(report.n_targets, 3);
  free(before);
  free(after);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  api_must(fixture->ctx, eg_dataset_create(fixture->ctx, documents, 1, &dataset));
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_DATA);
  assert_non_null(strstr(eg_context_error(fixture->ctx), "no token is a target"));
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_save_and_go_on(void **state) {
  api_fixture *fixture = *state;
  char path[256];
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = api_options();
  eg_trainer *a, *b;
  double loss, loaded;
  size_t count, other_count;
  options.targets = "q_proj,model.layers.1.mlp.down_proj";
  options.init = EG_LORA_INIT_GAUSSIAN;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &a));
  assert_int_equal(eg_trainer_parameter_count(a), 6);
  for (int i = 0; i < 3; i++) api_must(fixture->ctx, eg_trainer_step(a, NULL));
  api_path(fixture, path, sizeof path, "adapter");
  api_must(fixture->ctx, eg_trainer_save_adapter(a, path));
  options = api_options();
  options.init_adapter = path;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &b));
  float *x = api_read(a, false, &count), *y = api_read(b, false, &other_count);
  assert_int_equal(count, other_count);
  assert_memory_equal(x, y, count * sizeof *x);
  api_must(fixture->ctx, eg_trainer_evaluate(a, dataset, &loss));
  api_must(fixture->ctx, egi_evaluate_model(model, &(egi_evaluate_options){.adapter = path, .tokens = 64},
                                            dataset->documents, &loaded));
  assert_true(fabs(loss - loaded) <= 1e-6 * loss);
  assert_int_equal(eg_trainer_save_model(a, path), EG_ERROR_ARGUMENT);
  free(x);
  free(y);
  eg_trainer_destroy(a);
  eg_trainer_destroy(b);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_full(void **state) {
  api_fixture *fixture = *state;
  char path[256];
  eg_model *model = api_model(fixture, fixture->ctx), *trained;
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  double before, after, loaded;
  options.full = 1;
  options.weight_decay = 0.1;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &before));
  for (int i = 0; i < 5; i++) api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &after));
  assert_true(after < before - 0.1);
  assert_int_equal(eg_trainer_save_adapter(trainer, fixture->directory), EG_ERROR_ARGUMENT);
  api_path(fixture, path, sizeof path, "trained.onnx");
  api_must(fixture->ctx, eg_trainer_save_model(trainer, path));
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &trained));
  api_must(fixture->ctx, egi_evaluate_model(trained, &(egi_evaluate_options){.adapter = NULL, .tokens = 64},
                                            dataset->documents, &loaded));
  assert_true(fabs(loaded - after) <= 1e-6 * after);
  eg_model_destroy(trained);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_learns, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_steps_do_not_allocate, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_threads_change_nothing, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_accumulation, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_evaluate, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_stop, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_not_finite, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_no_targets, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_save_and_go_on, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_full, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
