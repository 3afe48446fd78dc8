/* A trainer that loads another's state goes on bit by bit as that one; a state that does not fit changes nothing. */
#include "support_api.h"

#include <stdio.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS_BEFORE = 3, STEPS_AFTER = 4 };

typedef struct setting {
  eg_trainer_options options;
  eg_model *model;
  eg_dataset *dataset;
} setting;

static setting make_setting(api_fixture *fixture, bool is_full) {
  setting s = {api_options(), api_model(fixture, fixture->ctx), api_dataset(fixture->ctx, 7, 20)};
  s.options.full = is_full;
  s.options.schedule = EG_SCHEDULE_LINEAR;
  s.options.weight_decay = 0.1;
  s.options.accumulate = 2;
  s.options.n_steps = STEPS_BEFORE + STEPS_AFTER;
  return s;
}

static void drop_setting(setting *s) {
  eg_dataset_destroy(s->dataset);
  eg_model_destroy(s->model);
}

static eg_trainer *make_trainer(api_fixture *fixture, const setting *s) {
  eg_trainer *trainer = NULL;
  api_must(fixture->ctx, eg_trainer_create(s->model, s->dataset, &s->options, &trainer));
  return trainer;
}

static void check_going_on(api_fixture *fixture, setting s) {
  char path[256];
  eg_trainer *straight = make_trainer(fixture, &s);
  eg_step_report report = {0}, resumed_report = {0};
  size_t count, other_count;
  api_path(fixture, path, sizeof path, "state.safetensors");
  for (int i = 0; i < STEPS_BEFORE; i++) api_must(fixture->ctx, eg_trainer_step(straight, NULL));
  api_must(fixture->ctx, eg_trainer_save_state(straight, path));
  for (int i = 0; i < STEPS_AFTER; i++) api_must(fixture->ctx, eg_trainer_step(straight, &report));
  eg_trainer *resumed = make_trainer(fixture, &s);
  api_must(fixture->ctx, eg_trainer_load_state(resumed, path));
  assert_int_equal(eg_trainer_steps_done(resumed), STEPS_BEFORE);
  for (int i = 0; i < STEPS_AFTER; i++) api_must(fixture->ctx, eg_trainer_step(resumed, &resumed_report));
  assert_int_equal(resumed_report.step, report.step);
  assert_memory_equal(&resumed_report.loss, &report.loss, sizeof report.loss);
  assert_memory_equal(&resumed_report.gradient_norm, &report.gradient_norm, sizeof report.gradient_norm);
  float *a = api_read(straight, false, &count), *b = api_read(resumed, false, &other_count);
  assert_int_equal(count, other_count);
  assert_memory_equal(a, b, count * sizeof *a);
  free(a);
  free(b);
  eg_trainer_destroy(straight);
  eg_trainer_destroy(resumed);
  drop_setting(&s);
}

static void test_adapters(void **state) {
  check_going_on(*state, make_setting(*state, false));
}

static size_t count_codes(api_fixture *fixture, const setting *s) {
  eg_trainer *trainer = make_trainer(fixture, s);
  size_t count = 0;
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) count += egi_moments_are_codes(trainer, i);
  eg_trainer_destroy(trainer);
  return count;
}

/* Ranks so large that moments are codes. */
static void test_eight_bits(void **state) {
  setting s = make_setting(*state, false);
  s.options.optimizer = EG_OPTIMIZER_ADAMW_8BIT;
  s.options.rank = 256;
  assert_true(count_codes(*state, &s) > 0);
  check_going_on(*state, s);
}

static void test_experts(void **state) {
  api_fixture *fixture = *state;
  setting s = make_setting(fixture, false);
  eg_model_destroy(s.model);
  api_must(fixture->ctx,
           eg_model_load(fixture->ctx, EGI_TEST_DATA "/gpt_oss/model.genai-float32.onnx", NULL, &s.model));
  s.options.optimizer = EG_OPTIMIZER_ADAMW_8BIT;
  s.options.targets = "q_proj";
  s.options.target_parameters = "mlp.experts.gate_up_proj,mlp.experts.down_proj";
  s.options.rank = 64;
  assert_true(count_codes(fixture, &s) > 0);
  check_going_on(fixture, s);
}

static void test_full(void **state) {
  check_going_on(*state, make_setting(*state, true));
}

/* Loading fails, names the reason and leaves parameters and counters. */
static void expect_refusal(api_fixture *fixture, const setting *s, const char *path, const char *part) {
  size_t count;
  eg_trainer *trainer = make_trainer(fixture, s);
  float *before = api_read(trainer, false, &count);
  assert_int_not_equal(eg_trainer_load_state(trainer, path), EG_OK);
  api_expect_error(fixture->ctx, part);
  float *after = api_read(trainer, false, &count);
  assert_memory_equal(before, after, count * sizeof *before);
  assert_int_equal(eg_trainer_steps_done(trainer), 0);
  free(before);
  free(after);
  eg_trainer_destroy(trainer);
}

/* The state with a number of one tensor spoiled, in another file. */
static void spoil(api_fixture *fixture, const char *path, const char *spoiled_path) {
  egi_safetensors *file;
  api_must(fixture->ctx, egi_safetensors_open(fixture->ctx, path, &file));
  size_t count = egi_safetensors_count(file);
  egi_safetensor *tensors = calloc(count, sizeof *tensors);
  assert_non_null(tensors);
  float *numbers = NULL;
  for (size_t i = 0; i < count; i++) {
    tensors[i] = *egi_safetensors_at(file, i);
    if (numbers != NULL || strncmp(tensors[i].name, "exp_avg_sq.", strlen("exp_avg_sq.")) != 0) continue;
    numbers = malloc((size_t)tensors[i].size_bytes);
    assert_non_null(numbers);
    memcpy(numbers, tensors[i].data, (size_t)tensors[i].size_bytes);
    numbers[1] = NAN;
    tensors[i].data = (const uint8_t *)numbers;
  }
  assert_non_null(numbers);
  api_must(fixture->ctx, egi_safetensors_write(fixture->ctx, spoiled_path, tensors, count));
  egi_safetensors_close(file);
  free(numbers);
  free(tensors);
}

static void test_refused(void **state) {
  api_fixture *fixture = *state;
  char path[256], missing[256];
  setting s = make_setting(fixture, false), other = s;
  eg_trainer *trainer = make_trainer(fixture, &s);
  api_path(fixture, path, sizeof path, "state.safetensors");
  api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  api_must(fixture->ctx, eg_trainer_save_state(trainer, path));
  api_must(fixture->ctx, eg_trainer_save_adapter(trainer, fixture->directory));
  expect_refusal(fixture, &s, api_path(fixture, missing, sizeof missing, "missing"), "missing");
  api_path(fixture, missing, sizeof missing, "adapter_model.safetensors");
  expect_refusal(fixture, &s, missing, "holds no state");
  other.options.learning_rate *= 2.0;
  expect_refusal(fixture, &other, path, "learning_rate=");
  other = s;
  other.options.no_fuse = 1;
  expect_refusal(fixture, &other, path, "no_fuse=0, this run has no_fuse=1");
  spoil(fixture, path, api_path(fixture, missing, sizeof missing, "spoiled.safetensors"));
  expect_refusal(fixture, &s, missing, "holds a number that is not finite");
  other = s;
  other.options.rank++;
  expect_refusal(fixture, &other, path, "other adapters");
  other = s;
  other.dataset = api_dataset(fixture->ctx, 6, 20);
  expect_refusal(fixture, &other, path, "other data");
  eg_dataset_destroy(other.dataset);
  other = s;
  other.options.full = 1;
  expect_refusal(fixture, &other, path, "other adapters");
  eg_trainer_destroy(trainer);
  drop_setting(&s);
}

/* More steps are allowed; where the schedule follows their number, a warning says what that means. */
static void test_longer(void **state) {
  api_fixture *fixture = *state;
  char path[256];
  setting s = make_setting(fixture, false);
  eg_trainer *trainer = make_trainer(fixture, &s);
  api_path(fixture, path, sizeof path, "state.safetensors");
  api_must(fixture->ctx, eg_trainer_save_state(trainer, path));
  eg_trainer_destroy(trainer);
  s.options.n_steps++;
  trainer = make_trainer(fixture, &s);
  fixture->warning[0] = '\0';
  api_must(fixture->ctx, eg_trainer_load_state(trainer, path));
  assert_non_null(strstr(fixture->warning, "the learning rates differ"));
  eg_trainer_destroy(trainer);
  drop_setting(&s);
}

/* A file that ends early, anywhere, is refused. */
static void test_truncated(void **state) {
  api_fixture *fixture = *state;
  char path[256], cut_path[256];
  setting s = make_setting(fixture, false);
  eg_trainer *trainer = make_trainer(fixture, &s);
  egi_mapping mapping;
  api_path(fixture, path, sizeof path, "state.safetensors");
  api_path(fixture, cut_path, sizeof cut_path, "cut.safetensors");
  api_must(fixture->ctx, eg_trainer_save_state(trainer, path));
  api_must(fixture->ctx, egi_mapping_open(fixture->ctx, path, &mapping));
  for (size_t size = 0; size < mapping.size_bytes; size += mapping.size_bytes / 16 + 1) {
    FILE *file = fopen(cut_path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(mapping.data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
    assert_int_not_equal(eg_trainer_load_state(trainer, cut_path), EG_OK);
  }
  egi_mapping_close(&mapping);
  eg_trainer_destroy(trainer);
  drop_setting(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_adapters, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_full, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_eight_bits, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_experts, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_refused, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_longer, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_truncated, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
