/* The operators of com.microsoft against results of onnxruntime that tests/microsoft/compare.py has kept: one model
 * with a node for each case, run as it is and with the bodies of fused operators. Expected values that are NaN lie
 * behind the end of a padded row and mean nothing. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define STEM EGI_TEST_DATA "/microsoft/operators"

typedef struct kept {
  eg_context *ctx;
  eg_model *model;
  egi_safetensors *file;
  egi_arena arena;
} kept;

static void *copy_of(kept *k, const egi_safetensor *tensor) {
  void *copy = egi_arena_get(&k->arena, (size_t)tensor->size_bytes + 1, 1);
  assert_non_null(copy);
  memcpy(copy, tensor->data, (size_t)tensor->size_bytes);
  return copy;
}

/* Everything that the file holds; the runner ignores what is no input. */
static eg_tensor *read_inputs(kept *k, size_t *out_count) {
  *out_count = egi_safetensors_count(k->file);
  eg_tensor *inputs = EGI_NEW(&k->arena, eg_tensor, *out_count);
  assert_non_null(inputs);
  for (size_t i = 0; i < *out_count; i++) {
    const egi_safetensor *tensor = egi_safetensors_at(k->file, i);
    inputs[i] = (eg_tensor){.name = tensor->name, .dtype = tensor->dtype, .rank = (uint32_t)tensor->rank};
    memcpy(inputs[i].dims, tensor->dims, sizeof inputs[i].dims);
    inputs[i].data = copy_of(k, tensor);
  }
  return inputs;
}

static void compare(kept *k, const eg_tensor *got) {
  const egi_safetensor *wanted = egi_safetensors_find(k->file, got->name);
  uint64_t count = 1;
  double largest = 1.0;
  if (wanted == NULL) fail_msg("no expected values for %s", got->name);
  if (wanted->rank != (int)got->rank) fail_msg("%s has rank %u, not %d", got->name, got->rank, wanted->rank);
  for (int i = 0; i < wanted->rank; i++) {
    if (wanted->dims[i] != got->dims[i])
      fail_msg("%s: dim %d is %d, not %d", got->name, i, (int)got->dims[i], (int)wanted->dims[i]);
    count *= (uint64_t)got->dims[i];
  }
  const float *values = got->data, *expected = copy_of(k, wanted);
  for (uint64_t i = 0; i < count; i++) largest = fmax(largest, fabs((double)expected[i]));
  for (uint64_t i = 0; i < count; i++)
    if (!isnan(expected[i]) && !(fabs((double)values[i] - (double)expected[i]) <= 2e-5 * largest))
      fail_msg("%s, element %d: %.9g, not %.9g", got->name, (int)i, (double)values[i], (double)expected[i]);
}

static void check(kept *k, int no_fuse) {
  eg_runner_options options = EG_RUNNER_OPTIONS_INIT;
  eg_runner *runner;
  const eg_tensor *outputs;
  size_t n_inputs, n_outputs;
  options.no_fuse = no_fuse;
  eg_tensor *inputs = read_inputs(k, &n_inputs);
  api_must(k->ctx, eg_runner_create(k->model, &options, &runner));
  api_must(k->ctx, eg_runner_run(runner, inputs, n_inputs, &outputs, &n_outputs));
  assert_true(n_outputs > 60);
  for (size_t i = 0; i < n_outputs; i++) compare(k, &outputs[i]);
  eg_runner_destroy(runner);
}

static void operators_give_what_onnxruntime_gives(void **state) {
  api_fixture *fixture = *state;
  kept k = {.ctx = fixture->ctx};
  egi_arena_init(&k.arena, k.ctx, EGI_PURPOSE_DATA);
  api_must(k.ctx, eg_model_load(k.ctx, STEM ".onnx", NULL, &k.model));
  api_must(k.ctx, egi_safetensors_open(k.ctx, STEM ".safetensors", &k.file));
  check(&k, 0);
  check(&k, 1);
  egi_safetensors_close(k.file);
  eg_model_destroy(k.model);
  egi_arena_clear(&k.arena);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(operators_give_what_onnxruntime_gives, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
