/* Stores and sessions on the fake backend: weights in place or copied, numbers made at load, pools, shared scratch
 * memory, errors of kernels, long graphs, and running out of memory at every allocation. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "tests/backend/support_fake.h"

#define HEAD "<ir_version: 10, opset_import: [\"\": 23]>\n"

static uint32_t add_weight(egi_module *module, const char *name, eg_dtype dtype, int64_t count, egi_bytes bytes) {
  egi_weight weight = {.name = name, .dtype = dtype, .rank = 1, .dims = {count}, .bytes = bytes};
  uint32_t index = 0;
  assert_int_equal(egi_module_add_weight(module, &weight, &index), EG_OK);
  return index;
}

static egi_store *make_store(eg_context *ctx, const egi_module *module, bool is_host) {
  egi_store *store = NULL;
  assert_int_equal(egi_store_create(ctx, module, fake_backend(is_host), &store), EG_OK);
  return store;
}

/* ---- store ---------------------------------------------------------------------------------------------------- */

static void aligned_weights_stay_where_they_are(void **state) {
  _Alignas(8) static const uint8_t bytes[20] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17};
  egi_module *module = NULL;
  void *data = NULL, *again = NULL;
  assert_int_equal(egi_module_create(*state, &module), EG_OK);
  uint32_t aligned = add_weight(module, "a", EG_DTYPE_F32, 4, (egi_bytes){.data = bytes + 4, .size_bytes = 16});
  uint32_t odd = add_weight(module, "b", EG_DTYPE_F32, 4, (egi_bytes){.data = bytes + 1, .size_bytes = 16});
  uint32_t packed = add_weight(module, "c", EG_DTYPE_I4, 5, (egi_bytes){.data = bytes + 1, .size_bytes = 3});
  uint32_t bad = add_weight(module, "bad", EG_DTYPE_F32, 5, (egi_bytes){.data = bytes, .size_bytes = 16});
  egi_store *store = make_store(*state, module, true);
  assert_int_equal(egi_store_load(store, aligned, &data), EG_OK);
  assert_ptr_equal(data, bytes + 4);
  assert_int_equal(egi_store_load(store, odd, &data), EG_OK);
  assert_int_equal((uintptr_t)data % 4, 0);
  assert_memory_equal(data, bytes + 1, 16);
  assert_int_equal(egi_store_load(store, odd, &again), EG_OK);
  assert_ptr_equal(data, again);
  assert_int_equal(egi_store_load(store, packed, &data), EG_OK);
  assert_ptr_equal(data, bytes + 1);
  assert_int_equal(egi_store_load(store, bad, &data), EG_ERROR_FORMAT);
  assert_non_null(strstr(eg_context_error(*state), "\"bad\""));
  egi_store_destroy(store);
  store = make_store(*state, module, false);
  assert_int_equal(egi_store_load(store, aligned, &data), EG_OK);
  assert_ptr_not_equal(data, bytes + 4);
  assert_memory_equal(data, bytes + 4, 16);
  egi_store_destroy(store);
  egi_module_destroy(module);
}

static void numbers_are_made_at_load(void **state) {
  for (int is_host = 0; is_host < 2; is_host++) {
    egi_module *module = NULL;
    void *data = NULL;
    assert_int_equal(egi_module_create(*state, &module), EG_OK);
    egi_bytes normal = {.kind = EGI_BYTES_NORMAL, .value = 0.5, .seed = 3};
    egi_bytes fill = {.kind = EGI_BYTES_FILL, .value = 1.5};
    uint32_t first = add_weight(module, "n", EG_DTYPE_F32, 10000, normal);
    uint32_t half = add_weight(module, "f", EG_DTYPE_BF16, 3, fill);
    uint32_t text = add_weight(module, "u", EG_DTYPE_U4, 4, fill);
    egi_store *store = make_store(*state, module, is_host);
    assert_int_equal(egi_store_load(store, first, &data), EG_OK);
    uint64_t stream = egi_hash("n", 1, 0);
    for (uint64_t i = 0; i < 10000; i += 777) {
      assert_true(((const float *)data)[i] == (float)(0.5 * egi_random_normal(3, stream, i)));
    }
    assert_int_equal(egi_store_load(store, half, &data), EG_OK);
    assert_int_equal(((const uint16_t *)data)[2], egi_f32_to_bf16(1.5f));
    assert_int_equal(egi_store_load(store, text, &data), EG_ERROR_UNSUPPORTED);
    egi_store_destroy(store);
    egi_module_destroy(module);
  }
}

static void parameters_start_from_weights(void **state) {
  static const uint16_t halves[3] = {0x3C00, 0xC000, 0x3800}; /* 1, -2, 0.5 */
  egi_module *module = NULL;
  assert_int_equal(egi_module_create(*state, &module), EG_OK);
  egi_bytes bytes = {.data = (const uint8_t *)halves, .size_bytes = sizeof(halves)};
  egi_state piece = {.name = "zero", .pool = EGI_POOL_PARAMETERS, .dtype = EG_DTYPE_F32, .rank = 1, .dims = {3}};
  uint32_t index = 0;
  assert_int_equal(egi_module_add_state(module, &piece, &index), EG_OK);
  piece.name = "p";
  piece.weight = add_weight(module, "w", EG_DTYPE_F16, 3, bytes);
  assert_int_equal(egi_module_add_state(module, &piece, &index), EG_OK);
  egi_store *store = make_store(*state, module, false);
  assert_null(egi_store_pool(store, EGI_POOL_PARAMETERS));
  assert_int_equal(egi_store_make_pools(store), EG_OK);
  const float *pool = egi_store_pool(store, EGI_POOL_PARAMETERS);
  uint64_t offset = module->states[index].offset;
  assert_true(pool[0] == 0.0f && pool[2] == 0.0f);
  assert_true(pool[offset] == 1.0f && pool[offset + 1] == -2.0f && pool[offset + 2] == 0.5f);
  ((float *)egi_store_pool(store, EGI_POOL_PARAMETERS))[offset] = 7.0f;
  assert_int_equal(egi_store_make_pools(store), EG_OK); /* trained values are kept */
  assert_true(pool[offset] == 7.0f);
  egi_store_destroy(store);
  module->states[index].dims[0] = 2;
  store = make_store(*state, module, true);
  assert_int_equal(egi_store_make_pools(store), EG_ERROR_SHAPE);
  assert_non_null(strstr(eg_context_error(*state), "\"p\""));
  egi_store_destroy(store);
  egi_module_destroy(module);
}

/* ---- sessions ------------------------------------------------------------------------------------------------- */

typedef struct made {
  egi_module *module;
  egi_plan *plan;
  egi_session *session;
} made;

static made make_session(eg_context *ctx, egi_module *module, egi_graph *graph, egi_store *store,
                         egi_scratch *scratch) {
  made out = {.module = module};
  assert_int_equal(egi_plan_create(ctx, graph, fake_backend(false), NULL, &out.plan), EG_OK);
  assert_int_equal(egi_session_create(store, out.plan, scratch, &out.session), EG_OK);
  return out;
}

static void run_and_expect(egi_session *session, float in, float wanted, size_t n) {
  float *values = malloc(n * sizeof(float));
  assert_non_null(values);
  for (size_t i = 0; i < n; i++) values[i] = in;
  assert_int_equal(egi_session_set_input(session, 0, values, n * sizeof(float)), EG_OK);
  assert_int_equal(egi_session_run(session), EG_OK);
  assert_int_equal(egi_session_read_output(session, 0, values, n * sizeof(float)), EG_OK);
  for (size_t i = 0; i < n; i++) assert_true(values[i] == wanted);
  free(values);
}

static egi_graph *add_negations(egi_module *module, int64_t n) {
  egi_graph *graph = NULL;
  egi_value_id value = 0;
  egi_dim dim = egi_dim_constant(module->dims, n);
  assert_int_equal(egi_module_add_graph(module, NULL, &graph), EG_OK);
  assert_int_equal(egi_graph_add_input(graph, "x", EG_DTYPE_F32, 1, &dim, &value), EG_OK);
  egi_emitter emitter = {.graph = graph};
  for (int i = 0; i < 3; i++) value = egi_emit_unary(&emitter, EGI_OP_Neg, value);
  assert_int_equal(emitter.status, EG_OK);
  assert_int_equal(egi_graph_add_output(graph, value), EG_OK);
  return graph;
}

static void sessions_share_memory_that_grows(void **state) {
  egi_module *module = NULL;
  egi_scratch *scratch = NULL;
  assert_int_equal(egi_module_create(*state, &module), EG_OK);
  egi_graph *small = add_negations(module, 8), *large = add_negations(module, 1000);
  egi_store *store = make_store(*state, module, false);
  assert_int_equal(egi_scratch_create(*state, store, &scratch), EG_OK);
  made first = make_session(*state, module, small, store, scratch);
  run_and_expect(first.session, 2.0f, -2.0f, 8);
  made second = make_session(*state, module, large, store, scratch); /* the buffer moves */
  run_and_expect(second.session, 3.0f, -3.0f, 1000);
  run_and_expect(first.session, 4.0f, -4.0f, 8);
  run_and_expect(second.session, 5.0f, -5.0f, 1000);
  assert_int_equal(fake_bytes_in_use(), 4032 + 4032 + 64); /* scratch once, inputs of both */
  egi_session_destroy(first.session);
  egi_session_destroy(second.session);
  egi_scratch_destroy(scratch);
  egi_store_destroy(store);
  egi_plan_destroy(first.plan);
  egi_plan_destroy(second.plan);
  egi_module_destroy(module);
  assert_int_equal(fake_bytes_in_use(), 0);
}

/* The second run is kept by the device and launched from then on, anew when the buffer has moved. */
static void later_runs_are_replayed(void **state) {
  egi_module *module = NULL;
  egi_scratch *scratch = NULL;
  assert_int_equal(egi_module_create(*state, &module), EG_OK);
  egi_graph *small = add_negations(module, 8), *large = add_negations(module, 1000);
  egi_store *store = make_store(*state, module, false);
  assert_int_equal(egi_scratch_create(*state, store, &scratch), EG_OK);
  made first = make_session(*state, module, small, store, scratch);
  unsigned before = fake_launches();
  for (int i = 0; i < 4; i++) run_and_expect(first.session, (float)i, (float)-i, 8);
  assert_int_equal(fake_launches() - before, 3);
  assert_int_equal(fake_captured(), 1);
  made second = make_session(*state, module, large, store, scratch);
  run_and_expect(first.session, 7.0f, -7.0f, 8);
  run_and_expect(second.session, 8.0f, -8.0f, 1000);
  assert_int_equal(fake_launches() - before, 4);
  assert_int_equal(fake_captured(), 1);
  egi_session_destroy(first.session);
  egi_session_destroy(second.session);
  assert_int_equal(fake_captured(), 0);
  egi_scratch_destroy(scratch);
  egi_store_destroy(store);
  egi_plan_destroy(first.plan);
  egi_plan_destroy(second.plan);
  egi_module_destroy(module);
}

/* Of the contents that a plan knows, those that no step reads (the shape that a view takes) have no place on a device.
 */
static void known_contents_lie_apart(void **state) {
  egi_backend apart = *egi_backend_cpu();
  egi_module *module = parse_graph(*state, HEAD "g (float[6] x, int64[2] i) => (int64[2] z, int64[2] v)\n"
                                                "{ s = Constant <value = int64[2] {3, 2}> () y = Reshape (x, s)\n"
                                                "  t = Shape (y) z = Add (i, t) w = Shape (z) v = Reshape (z, w) }\n");
  egi_store *store = NULL;
  made one = {.module = module};
  const int64_t given[2] = {10, 20};
  int64_t got[2] = {0, 0};
  apart.is_host = false;
  assert_int_equal(egi_infer_graph(module->graphs[0]), EG_OK);
  assert_int_equal(egi_store_create(*state, module, &apart, &store), EG_OK);
  assert_int_equal(egi_plan_create(*state, module->graphs[0], &apart, NULL, &one.plan), EG_OK);
  assert_int_equal(egi_session_create(store, one.plan, NULL, &one.session), EG_OK);
  assert_int_equal(egi_session_set_input(one.session, 1, given, sizeof given), EG_OK);
  assert_int_equal(egi_session_run(one.session), EG_OK);
  assert_int_equal(egi_session_read_output(one.session, 0, got, sizeof got), EG_OK);
  assert_int_equal(got[0], 13);
  assert_int_equal(got[1], 22);
  egi_session_destroy(one.session);
  egi_plan_destroy(one.plan);
  egi_store_destroy(store);
  egi_module_destroy(module);
}

static void wrong_sizes_and_numbers_are_refused(void **state) {
  egi_module *module = NULL;
  float values[8] = {0};
  egi_tensor tensor;
  assert_int_equal(egi_module_create(*state, &module), EG_OK);
  egi_store *store = make_store(*state, module, false);
  made one = make_session(*state, module, add_negations(module, 8), store, NULL);
  assert_int_equal(egi_session_set_input(one.session, 0, values, 31), EG_ERROR_ARGUMENT);
  assert_non_null(strstr(eg_context_error(*state), "\"x\" takes 32 bytes, not 31"));
  assert_int_equal(egi_session_set_input(one.session, 1, values, 32), EG_ERROR_ARGUMENT);
  assert_int_equal(egi_session_read_output(one.session, 0, values, 16), EG_ERROR_ARGUMENT);
  assert_int_equal(egi_session_output(one.session, 1, &tensor), EG_ERROR_ARGUMENT);
  assert_int_equal(egi_session_output(one.session, 0, &tensor), EG_OK);
  assert_int_equal(tensor.dims[0], 8);
  egi_store *other = make_store(*state, module, true);
  egi_session *session = NULL;
  assert_int_equal(egi_session_create(other, one.plan, NULL, &session), EG_ERROR_ARGUMENT);
  egi_session_destroy(one.session);
  egi_store_destroy(store);
  egi_store_destroy(other);
  egi_plan_destroy(one.plan);
  egi_module_destroy(module);
}

static void errors_of_kernels_name_the_node(void **state) {
  egi_module *module = parse_graph(*state, HEAD "g (float[4] x, int64[4] i) => (float[4] y)\n"
                                                "{ [\"pick.me\"] y = GatherElements (x, i) }\n");
  egi_store *store = make_store(*state, module, false);
  made one = make_session(*state, module, module->graphs[0], store, NULL);
  assert_int_equal(egi_session_run(one.session), EG_ERROR_DATA);
  assert_non_null(strstr(eg_context_error(*state), "pick.me"));
  assert_non_null(strstr(eg_context_error(*state), "index 9 is outside"));
  egi_session_destroy(one.session);
  egi_store_destroy(store);
  egi_plan_destroy(one.plan);
  egi_module_destroy(module);
}

static void long_graphs_are_planned_quickly(void **state) {
  enum { N = 100000 };
  egi_module *module = NULL;
  egi_graph *graph = NULL;
  egi_plan *plan = NULL;
  assert_int_equal(egi_module_create(*state, &module), EG_OK);
  assert_int_equal(egi_module_add_graph(module, "long", &graph), EG_OK);
  egi_dim dims[2] = {egi_dim_constant(module->dims, 8), egi_dim_symbol(module->dims, "n")};
  egi_value_id value = 0, kept[16] = {0};
  assert_int_equal(egi_graph_add_input(graph, "x", EG_DTYPE_F32, 2, dims, &value), EG_OK);
  egi_emitter emitter = {.graph = graph};
  for (int i = 0; i < N; i++) {
    egi_value_id old = kept[i % 16];
    value = old != 0 ? egi_emit_binary(&emitter, EGI_OP_Sub, value, old) : egi_emit_unary(&emitter, EGI_OP_Neg, value);
    if (i % 3 == 0) kept[i % 16] = value;
  }
  assert_int_equal(emitter.status, EG_OK);
  assert_int_equal(egi_graph_add_output(graph, value), EG_OK);
  egi_binding binding = {dims[1], 32};
  egi_plan_options options = {.bindings = &binding, .n_bindings = 1};
  double start = egi_clock();
  assert_int_equal(egi_plan_create(*state, graph, fake_backend(true), &options, &plan), EG_OK);
  assert_true(egi_clock() - start < 10.0); /* a couple of seconds without a sanitizer */
  egi_plan_bytes bytes;
  egi_plan_get_bytes(plan, &bytes);
  assert_true(bytes.transient < 100 * 1024);
  egi_plan_destroy(plan);
  egi_module_destroy(module);
}

/* ---- out of memory -------------------------------------------------------------------------------------------- */

typedef struct limited {
  uint64_t n_left;
  bool is_limited;
} limited;

static void *limited_allocate(void *userdata, size_t size_bytes, size_t alignment) {
  limited *limit = userdata;
  if (limit->is_limited && limit->n_left-- == 0) {
    limit->n_left = 0;
    return NULL;
  }
  return aligned_alloc(alignment, (size_bytes + alignment - 1) / alignment * alignment);
}

static void limited_release(void *userdata, void *memory, size_t size_bytes) {
  (void)userdata;
  (void)size_bytes;
  free(memory);
}

static eg_status plan_and_run_once(eg_context *ctx, const egi_module *module) {
  egi_plan *plan = NULL;
  egi_store *store = NULL;
  egi_session *session = NULL;
  eg_status status = egi_plan_create(ctx, module->graphs[0], fake_backend(false), NULL, &plan);
  if (status == EG_OK) status = egi_store_create(ctx, module, fake_backend(false), &store);
  if (status == EG_OK) status = egi_store_make_pools(store);
  if (status == EG_OK) status = egi_session_create(store, plan, NULL, &session);
  if (status == EG_OK) status = egi_session_run(session);
  egi_session_destroy(session);
  egi_store_destroy(store);
  egi_plan_destroy(plan);
  return status;
}

static void every_allocation_may_fail(void **state) {
  (void)state;
  limited limit = {0};
  eg_allocator allocator = {limited_allocate, limited_release, &limit};
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  eg_context *ctx = NULL;
  options.allocator = &allocator;
  assert_int_equal(eg_context_create(&options, &ctx), EG_OK);
  egi_module *module = parse_graph(
      ctx, HEAD "g (float[2,3] x) => (float[2,12] y, float[2,3] z, float[3,2] t)\n<float[2,3] w = {1,2,3,4,5,6}>\n"
                "{ a = Neg (x) v = Neg (w) b = Softmax (a) z = Add (b, v) m = Mul (x, x) t = Transpose (x)\n"
                "  y = Concat <axis = -1> (x, a, b, m) }\n");
  eg_status status = EG_ERROR_MEMORY;
  uint64_t n = 0;
  for (; status != EG_OK; n++) {
    limit = (limited){.n_left = n, .is_limited = true};
    status = plan_and_run_once(ctx, module);
    assert_true(status == EG_OK || status == EG_ERROR_MEMORY);
    assert_int_equal(fake_bytes_in_use(), 0);
  }
  assert_true(n > 8);
  limit.is_limited = false;
  egi_module_destroy(module);
  eg_context_destroy(ctx);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_context, free_context)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(aligned_weights_stay_where_they_are),
                                     TEST(numbers_are_made_at_load),
                                     TEST(parameters_start_from_weights),
                                     TEST(sessions_share_memory_that_grows),
                                     TEST(later_runs_are_replayed),
                                     TEST(known_contents_lie_apart),
                                     TEST(wrong_sizes_and_numbers_are_refused),
                                     TEST(errors_of_kernels_name_the_node),
                                     TEST(long_graphs_are_planned_quickly),
                                     cmocka_unit_test(every_allocation_may_fail)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
