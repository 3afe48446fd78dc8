/* Tests the tests: kernels that are wrong in one way each must be caught by the conformance harness. */
#include "support_ops.h"

#include <math.h>

static eg_status prepare(egi_kernel_plan *plan) {
  plan->workspace_bytes = 16;
  return EG_OK;
}

static const float *input(const egi_kernel_call *call, unsigned i) {
  return call->inputs[i].data;
}
static float *output(const egi_kernel_call *call) {
  return call->outputs[0].data;
}
static int64_t count(const egi_kernel_call *call) {
  return egi_tensor_count(&call->outputs[0]);
}

/* A right sum of contiguous f32 tensors: what the wrong ones start from. */
static eg_status run_right(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  for (int64_t i = 0; i < count(call); i++) output(call)[i] = input(call, 0)[i] + input(call, 1)[i];
  return EG_OK;
}

static eg_status run_last_element_wrong(eg_context *ctx, const egi_kernel_call *call) {
  EG_TRY(run_right(ctx, call));
  output(call)[count(call) - 1] += 0.001f;
  return EG_OK;
}

static eg_status run_not_a_number(eg_context *ctx, const egi_kernel_call *call) {
  EG_TRY(run_right(ctx, call));
  output(call)[3] = NAN;
  return EG_OK;
}

static eg_status run_last_element_missing(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  for (int64_t i = 0; i + 1 < count(call); i++) output(call)[i] = input(call, 0)[i] + input(call, 1)[i];
  return EG_OK;
}

static eg_status run_one_too_many(eg_context *ctx, const egi_kernel_call *call) {
  EG_TRY(run_right(ctx, call));
  output(call)[count(call)] = 0.0f;
  return EG_OK;
}

static eg_status run_input_changed(eg_context *ctx, const egi_kernel_call *call) {
  EG_TRY(run_right(ctx, call));
  ((float *)call->inputs[1].data)[0] = 0.0f;
  return EG_OK;
}

static eg_status run_workspace_overrun(eg_context *ctx, const egi_kernel_call *call) {
  memset(call->workspace, 0, 17);
  return run_right(ctx, call);
}

static eg_status run_allocates(eg_context *ctx, const egi_kernel_call *call) {
  void *memory = egi_allocate(ctx, EGI_PURPOSE_STEP, 8);
  if (memory == NULL) return EG_ERROR_MEMORY;
  egi_release(ctx, EGI_PURPOSE_STEP, memory, 8);
  return run_right(ctx, call);
}

/* Within the tolerance, but not the same for every number of threads. */
static eg_status run_thread_dependent(eg_context *ctx, const egi_kernel_call *call) {
  EG_TRY(run_right(ctx, call));
  output(call)[2] *= 1.0f + 1e-7f * (float)egi_pool_size(call->pool);
  return EG_OK;
}

/* Reads input 1 after it has overwritten it, when in place. */
static eg_status run_bad_in_place(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  memcpy(output(call), input(call, 0), (size_t)count(call) * sizeof(float));
  for (int64_t i = 0; i < count(call); i++) output(call)[i] += input(call, 1)[i];
  return EG_OK;
}

static eg_status run_fails(eg_context *ctx, const egi_kernel_call *call) {
  (void)call;
  return egi_fail(ctx, EG_ERROR_DATA, "no reason");
}

static bool agrees(void **state, uint32_t flags, eg_status (*run)(eg_context *ctx, const egi_kernel_call *call)) {
  static const int64_t dims[2] = {5, 7};
  const egi_kernel kernel = {"Wrong", flags, prepare, run, NULL};
  char message[512] = "";
  ops_case c;
  ops_begin(&c, state, EGI_OP_Add, EG_DTYPE_F32);
  ops_tensor *a = ops_add_input(&c, EG_DTYPE_F32, 2, dims);
  ops_tensor *b = ops_add_input(&c, EG_DTYPE_F32, 2, dims);
  ops_tensor *out = ops_add_output(&c, EG_DTYPE_F32, 2, dims);
  ops_fill_uniform(a, 1.0, 2.0, 1);
  ops_fill_uniform(b, 1.0, 2.0, 2);
  for (int64_t i = 0; i < ops_count(out); i++) out->values[i] = a->values[i] + b->values[i];
  bool result = ops_agrees(&c, &kernel, message, sizeof message);
  assert_true(result == (message[0] == '\0'));
  ops_end(&c);
  return result;
}

static void right_kernels_pass(void **state) {
  assert_true(agrees(state, EGI_KERNEL_IN_PLACE_0 | EGI_KERNEL_IN_PLACE_1, run_right));
  assert_true(agrees(state, 0, run_right));
}

static void wrong_results_are_caught(void **state) {
  assert_false(agrees(state, 0, run_last_element_wrong));
  assert_false(agrees(state, 0, run_not_a_number));
  assert_false(agrees(state, 0, run_last_element_missing));
  assert_false(agrees(state, 0, run_thread_dependent));
  assert_false(agrees(state, 0, run_fails));
}

static void wrong_accesses_are_caught(void **state) {
  assert_false(agrees(state, 0, run_one_too_many));
  assert_false(agrees(state, 0, run_input_changed));
  assert_false(agrees(state, 0, run_workspace_overrun));
  assert_false(agrees(state, 0, run_allocates));
}

static void false_flags_are_caught(void **state) {
  assert_false(agrees(state, EGI_KERNEL_STRIDED_INPUTS, run_right));
  assert_false(agrees(state, EGI_KERNEL_STRIDED_OUTPUTS, run_right));
  assert_true(agrees(state, EGI_KERNEL_IN_PLACE_0, run_bad_in_place));
  assert_false(agrees(state, EGI_KERNEL_IN_PLACE_1, run_bad_in_place));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(right_kernels_pass),
      cmocka_unit_test(wrong_results_are_caught),
      cmocka_unit_test(wrong_accesses_are_caught),
      cmocka_unit_test(false_flags_are_caught),
  };
  return cmocka_run_group_tests_name("harness", tests, ops_set_up, ops_tear_down);
}
