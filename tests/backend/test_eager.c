/* Eager runs: sizes that depend on data, and what plans say about such graphs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "tests/backend/support_fake.h"

#define HEAD "<ir_version: 10, opset_import: [\"\": 23]>\n"

typedef struct eager_run {
  egi_module *module;
  egi_store *store;
  egi_arena arena;
  egi_tensor outputs[4];
} eager_run;

static void open_run(eager_run *r, eg_context *ctx, const char *text) {
  r->module = parse_graph(ctx, text);
  egi_arena_init(&r->arena, ctx, EGI_PURPOSE_STEP);
  assert_int_equal(egi_store_create(ctx, r->module, egi_backend_cpu(), &r->store), EG_OK);
}

static void close_run(eager_run *r) {
  egi_arena_clear(&r->arena);
  egi_store_destroy(r->store);
  egi_module_destroy(r->module);
}

static egi_tensor tensor_of(void *data, eg_dtype dtype, int rank, const int64_t *dims) {
  egi_tensor tensor = {.data = data, .dtype = dtype, .rank = rank};
  if (rank > 0) memcpy(tensor.dims, dims, sizeof(int64_t) * (size_t)rank);
  egi_tensor_set_contiguous(&tensor);
  return tensor;
}

/* Rows of x whose mask is set, then as many numbers as there are. */
static const char *const picking = HEAD "g (float[n,2] x, bool[n] m) => (float y, int64[?] z)\n"
                                        "<int64[1] first = {0}, int64 zero = {0}, int64 one = {1}>\n"
                                        "{ i = NonZero (m) f = Squeeze (i, first) p = Gather (x, f)\n"
                                        "  y = ReduceSum <keepdims = 0> (p) s = Shape (p) c = Gather (s, zero)\n"
                                        "  z = Range (zero, c, one) }\n";

static void sizes_follow_data(void **state) {
  eager_run r;
  float x[6] = {1, 2, 4, 8, 16, 32};
  uint8_t masks[2][3] = {{1, 0, 1}, {0, 0, 0}};
  open_run(&r, *state, picking);
  for (int k = 0; k < 2; k++) {
    const egi_tensor inputs[2] = {tensor_of(x, EG_DTYPE_F32, 2, (int64_t[]){3, 2}),
                                  tensor_of(masks[k], EG_DTYPE_BOOL, 1, (int64_t[]){3})};
    if (egi_eager_run(r.store, r.module->graphs[0], inputs, &r.arena, r.outputs) != EG_OK)
      fail_msg("%s", eg_context_error(*state));
    assert_true(*(float *)r.outputs[0].data == (k == 0 ? 51.0f : 0.0f));
    assert_int_equal(r.outputs[1].rank, 1);
    assert_int_equal(r.outputs[1].dims[0], k == 0 ? 2 : 0);
  }
  close_run(&r);
}

static void plans_name_what_is_dynamic(void **state) {
  egi_module *module = parse_graph(*state, picking);
  bool is_dynamic = false;
  egi_plan *plan = NULL;
  const egi_binding binding = {egi_dim_symbol(module->dims, "n"), 3};
  const egi_plan_options options = {.bindings = &binding, .n_bindings = 1, .out_is_dynamic = &is_dynamic};
  assert_int_equal(egi_plan_create(*state, module->graphs[0], egi_backend_cpu(), &options, &plan), EG_ERROR_SHAPE);
  assert_true(is_dynamic);
  egi_module_destroy(module);
}

/* What a run meets is an error of that run; the next one works. */
static void errors_leave_nothing_behind(void **state) {
  eager_run r;
  int64_t shape[2] = {3, 2}, x[4] = {1, 2, 3, 4};
  open_run(&r, *state, HEAD "g (int64[4] x, int64[2] s) => (int64[a,b] y) { t = Identity (s) y = Reshape (x, t) }\n");
  const egi_tensor inputs[2] = {tensor_of(x, EG_DTYPE_I64, 1, (int64_t[]){4}),
                                tensor_of(shape, EG_DTYPE_I64, 1, (int64_t[]){2})};
  assert_int_equal(egi_eager_run(r.store, r.module->graphs[0], inputs, &r.arena, r.outputs), EG_ERROR_SHAPE);
  shape[0] = 2;
  assert_int_equal(egi_eager_run(r.store, r.module->graphs[0], inputs, &r.arena, r.outputs), EG_OK);
  assert_int_equal(r.outputs[0].dims[0], 2);
  assert_int_equal(((int64_t *)r.outputs[0].data)[3], 4);
  close_run(&r);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_context, free_context)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(sizes_follow_data), TEST(plans_name_what_is_dynamic),
                                     TEST(errors_leave_nothing_behind)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
