/* Dropout before adapters: drawn anew in each step and micro-batch, the same for a seed however a run is planned, and
 * not at all in evaluation. */
#include "support_api.h"

#include <stdlib.h>
#include <string.h>

enum { N_STEPS = 3 };

static eg_trainer_options dropout_options(void) {
  eg_trainer_options options = api_options();
  options.dropout = 0.3;
  options.seed = 11;
  options.tokens = 40;
  options.n_steps = N_STEPS;
  return options;
}

/* Losses of a few steps from adapters that do something. */
static void run(api_fixture *fixture, const eg_trainer_options *options, double losses[N_STEPS],
                double *out_evaluated) {
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 6, 20);
  eg_trainer *trainer;
  eg_step_report report;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, options, &trainer));
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    eg_parameter_info info;
    size_t n = 1;
    api_must(fixture->ctx, eg_trainer_parameter_info(trainer, i, &info));
    for (uint32_t k = 0; k < info.rank; k++) n *= (size_t)info.dims[k];
    float *values = malloc(n * sizeof *values);
    assert_non_null(values);
    for (size_t k = 0; k < n; k++) values[k] = 0.1F * (float)((int)(k * 7 % 11) - 5);
    api_must(fixture->ctx, eg_trainer_write_parameter(trainer, i, values, n));
    free(values);
  }
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, out_evaluated));
  for (int i = 0; i < N_STEPS; i++) {
    api_must(fixture->ctx, eg_trainer_step(trainer, &report));
    losses[i] = report.loss;
  }
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static bool is_same(const double *a, const double *b, size_t n) {
  return memcmp(a, b, n * sizeof *a) == 0;
}

static void test_masks_follow_the_seed(void **state) {
  api_fixture *fixture = *state;
  double first[N_STEPS], second[N_STEPS], evaluated, plain;
  eg_trainer_options options = dropout_options();
  run(fixture, &options, first, &evaluated);
  run(fixture, &options, second, &plain);
  assert_true(is_same(first, second, N_STEPS));
  options.checkpoint = EG_CHECKPOINT_RECOMPUTE;
  run(fixture, &options, second, &plain);
  assert_true(is_same(first, second, N_STEPS));
  options.checkpoint = EG_CHECKPOINT_AUTO;
  options.seed = 12;
  run(fixture, &options, second, &plain);
  assert_true(first[0] < second[0] || first[0] > second[0]);
  options.dropout = 0;
  run(fixture, &options, second, &plain);
  assert_true(first[0] < second[0] || first[0] > second[0]);
  assert_true(is_same(&evaluated, &plain, 1)); /* nothing is dropped outside training */
}

/* Without learning, each step and each micro-batch still has masks of its own. */
static void test_masks_change(void **state) {
  api_fixture *fixture = *state;
  double losses[N_STEPS], halves[N_STEPS], evaluated;
  eg_trainer_options options = dropout_options();
  options.learning_rate = 0;
  options.tokens = 4096; /* one batch, the same each step */
  run(fixture, &options, losses, &evaluated);
  assert_true(losses[0] < losses[1] || losses[0] > losses[1]);
  assert_true(losses[1] < losses[2] || losses[1] > losses[2]);
  options.accumulate = 2; /* twice the same documents: with the same masks the mean would be that of once */
  run(fixture, &options, halves, &evaluated);
  assert_true(losses[0] < halves[0] || losses[0] > halves[0]);
}

static void test_range(void **state) {
  api_fixture *fixture = *state;
  static const double bad[] = {-0.1, 1.0, 2.0};
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 2, 10);
  eg_trainer *trainer;
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    eg_trainer_options options = dropout_options();
    options.dropout = bad[i];
    assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_ARGUMENT);
    api_expect_error(fixture->ctx, "dropout is out of range");
  }
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_masks_follow_the_seed, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_masks_change, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_range, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
