/* The CUDA backend's device: copies, events, faults and what stays behind. 77 where there is no device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>

#include "backend/plan.h"
#include "base/blockwise.h"

typedef struct fixture {
  eg_context *ctx;
  const egi_backend *backend;
  egi_device *device;
} fixture;

static int open_device(void **state) {
  fixture *f = calloc(1, sizeof *f);
  *state = f;
  return f == NULL || eg_context_create(NULL, &f->ctx) != EG_OK || egi_backend_cuda(f->ctx, &f->backend) != EG_OK ||
         f->backend->open(f->ctx, &f->device) != EG_OK;
}

static int close_device(void **state) {
  fixture *f = *state;
  f->backend->close(f->device);
  eg_context_destroy(f->ctx);
  free(f);
  return 0;
}

static uint64_t free_bytes(const fixture *f) {
  egi_device_facts facts;
  assert_int_equal(f->backend->describe(f->ctx, 0, &facts), EG_OK);
  return facts.free_bytes;
}

/* Sizes around those of the staging slots; what is sent may be overwritten at once. */
static void copies_there_and_back(void **state) {
  const fixture *f = *state;
  static const size_t sizes[] = {1, 3, 65536, 65537, (8u << 20) - 1, (8u << 20) + 1, 100u << 20};
  for (size_t i = 0; i < EGI_COUNT(sizes); i++) {
    size_t n = sizes[i];
    void *there = NULL;
    uint8_t *here = malloc(n), *back = calloc(n, 1);
    assert_non_null(here);
    assert_non_null(back);
    for (size_t k = 0; k < n; k++) here[k] = (uint8_t)(k * 31 + i);
    assert_int_equal(f->backend->allocate(f->device, EGI_PURPOSE_STEP, n, &there), EG_OK);
    assert_int_equal(f->backend->upload(f->device, there, here, n), EG_OK);
    memset(here, 0, n);
    assert_int_equal(f->backend->download(f->device, back, there, n), EG_OK);
    for (size_t k = 0; k < n; k++) here[k] = (uint8_t)(k * 31 + i);
    assert_memory_equal(here, back, n);
    f->backend->release(f->device, EGI_PURPOSE_STEP, there, n);
    free(here);
    free(back);
  }
}

/* More uploads than there are slots, to one place: the last one stays. */
static void small_copies_keep_their_order(void **state) {
  const fixture *f = *state;
  void *there = NULL;
  uint32_t value = 0;
  assert_int_equal(f->backend->allocate(f->device, EGI_PURPOSE_STEP, sizeof value, &there), EG_OK);
  for (uint32_t i = 0; i <= 1000; i++) assert_int_equal(f->backend->upload(f->device, there, &i, sizeof i), EG_OK);
  assert_int_equal(f->backend->download(f->device, &value, there, sizeof value), EG_OK);
  assert_int_equal(value, 1000);
  f->backend->release(f->device, EGI_PURPOSE_STEP, there, sizeof value);
}

static void streams_wait_for_events(void **state) {
  const fixture *f = *state;
  for (unsigned i = 0; i < 200; i++) {
    assert_int_equal(f->backend->record(f->device, i % 3, i), EG_OK);
    assert_int_equal(f->backend->wait(f->device, (i + 1) % 3, i), EG_OK);
  }
  assert_int_equal(f->backend->synchronize(f->device), EG_OK);
}

/* What cannot be had is said, and the device goes on. */
static void too_much_memory_is_an_error(void **state) {
  const fixture *f = *state;
  void *there = NULL;
  assert_int_equal(f->backend->allocate(f->device, EGI_PURPOSE_STEP, (size_t)1 << 50, &there), EG_ERROR_MEMORY);
  assert_non_null(strstr(eg_context_error(f->ctx), "cudaMalloc"));
  assert_int_equal(f->backend->allocate(f->device, EGI_PURPOSE_STEP, 1024, &there), EG_OK);
  f->backend->release(f->device, EGI_PURPOSE_STEP, there, 1024);
}

static void host_memory_is_pinned(void **state) {
  const fixture *f = *state;
  enum { SIZE = 64 << 20 };
  void *there = NULL;
  size_t before = egi_bytes_in_use(f->ctx, EGI_PURPOSE_PINNED);
  assert_int_equal(f->backend->allocate(f->device, EGI_PURPOSE_PINNED, SIZE, &there), EG_OK);
  assert_true(egi_bytes_in_use(f->ctx, EGI_PURPOSE_PINNED) >= before + SIZE);
  f->backend->release(f->device, EGI_PURPOSE_PINNED, there, SIZE);
  assert_int_equal(egi_bytes_in_use(f->ctx, EGI_PURPOSE_PINNED), before);
}

/* 200 devices opened and closed, one beside the fixture's: as much is free after the last as after the first. */
static void devices_leave_nothing_behind(void **state) {
  const fixture *f = *state;
  uint64_t after_first = 0;
  for (int i = 0; i < 200; i++) {
    egi_device *device = NULL;
    void *there = NULL;
    assert_int_equal(f->backend->open(f->ctx, &device), EG_OK);
    assert_int_equal(f->backend->allocate(device, EGI_PURPOSE_STEP, 32 << 20, &there), EG_OK);
    assert_int_equal(f->backend->record(device, 0, 3), EG_OK);
    f->backend->release(device, EGI_PURPOSE_STEP, there, 32 << 20);
    f->backend->close(device);
    if (i == 0) after_first = free_bytes(f);
  }
  assert_true(free_bytes(f) + (2u << 20) >= after_first);
}

/* What a store brings to the device is what the host would have made, bit for bit. */
static void *load(const fixture *f, egi_module *module, const egi_weight *weight, size_t size_bytes) {
  egi_store *store = NULL;
  uint32_t index = 0;
  void *there = NULL, *back = malloc(size_bytes);
  assert_non_null(back);
  assert_int_equal(egi_module_add_weight(module, weight, &index), EG_OK);
  assert_int_equal(egi_store_create(f->ctx, module, f->backend, &store), EG_OK);
  assert_int_equal(egi_store_load(store, index, &there), EG_OK);
  assert_int_equal(f->backend->download(egi_store_device(store), back, there, size_bytes), EG_OK);
  egi_store_destroy(store);
  return back;
}

static void made_numbers_are_the_hosts(void **state) {
  const fixture *f = *state;
  static const eg_dtype dtypes[] = {EG_DTYPE_F32, EG_DTYPE_BF16, EG_DTYPE_F16, EG_DTYPE_F64, EG_DTYPE_I32};
  for (size_t i = 0; i < 2 * EGI_COUNT(dtypes); i++) {
    egi_module *module = NULL;
    egi_weight weight = {.name = "made", .dtype = dtypes[i / 2], .rank = 1, .dims = {3000001}};
    weight.bytes = (egi_bytes){.kind = i % 2 ? EGI_BYTES_NORMAL : EGI_BYTES_FILL, .value = 0.02, .seed = 7 + i};
    size_t size_bytes = 3000001 * egi_whole_bytes(weight.dtype);
    void *here = malloc(size_bytes);
    assert_non_null(here);
    assert_int_equal(egi_module_create(f->ctx, &module), EG_OK);
    assert_int_equal(egi_weight_write(f->ctx, &weight, here), EG_OK);
    void *there = load(f, module, &weight, size_bytes);
    assert_memory_equal(here, there, size_bytes);
    egi_module_destroy(module);
    free(here);
    free(there);
  }
}

/* More numbers than one piece has, whole blocks and not, from bytes and made. */
static void codes_are_the_hosts(void **state) {
  const fixture *f = *state;
  static const struct {
    eg_dtype dtype;
    egi_four_bit type;
    int64_t block, rows;
    bool is_nested, is_transposed;
  } cases[] = {{EG_DTYPE_BF16, EGI_FOUR_BIT_NF4, 64, 8200, true, false},
               {EG_DTYPE_F32, EGI_FOUR_BIT_NF4, 128, 77, false, false},
               {EG_DTYPE_F16, EGI_FOUR_BIT_FP4, 4096, 301, true, false},
               {EG_DTYPE_BF16, EGI_FOUR_BIT_FP4, 32, 301, false, true}};
  for (size_t i = 0; i < EGI_COUNT(cases); i++) {
    egi_module *module = NULL;
    egi_store *store = NULL;
    egi_quantisation *q;
    egi_quantised_memory here = {{NULL}};
    assert_int_equal(egi_module_create(f->ctx, &module), EG_OK);
    q = EGI_NEW(&module->arena, egi_quantisation, 1);
    assert_non_null(q);
    *q = (egi_quantisation){.is_transposed = cases[i].is_transposed,
                            .n_matrices = 1,
                            .rows = cases[i].rows,
                            .columns = 4097,
                            .type = (unsigned)cases[i].type,
                            .block = cases[i].block,
                            .is_nested = cases[i].is_nested};
    q->matrix = (egi_weight){.name = "m", .dtype = cases[i].dtype, .rank = 2, .dims = {cases[i].rows, 4097}};
    q->matrix.bytes = (egi_bytes){.kind = EGI_BYTES_NORMAL, .value = 0.05, .seed = 3};
    for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++) {
      uint64_t size = egi_quantised_bytes(q, (egi_quantised_tensor)part);
      egi_weight weight = {.name = "part", .dtype = EG_DTYPE_U8, .rank = 1, .dims = {(int64_t)size}};
      weight.bytes = (egi_bytes){.kind = EGI_BYTES_QUANTISED, .quantisation = q};
      weight.bytes.quantised_tensor = (egi_quantised_tensor)part;
      if (size == 0) continue;
      here.parts[part] = malloc((size_t)size);
      assert_non_null(here.parts[part]);
      assert_int_equal(egi_module_add_weight(module, &weight, &q->weights[part]), EG_OK);
    }
    assert_int_equal(egi_quantise(f->ctx, q, &here), EG_OK);
    assert_int_equal(egi_store_create(f->ctx, module, f->backend, &store), EG_OK);
    for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++) {
      size_t size = (size_t)egi_quantised_bytes(q, (egi_quantised_tensor)part);
      void *there = NULL, *back = malloc(size + 1);
      if (size > 0) {
        assert_int_equal(egi_store_load(store, q->weights[part], &there), EG_OK);
        assert_int_equal(f->backend->download(egi_store_device(store), back, there, size), EG_OK);
        assert_memory_equal(back, here.parts[part], size);
      }
      free(back);
      free(here.parts[part]);
    }
    egi_store_destroy(store);
    egi_module_destroy(module);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(copies_there_and_back),   cmocka_unit_test(small_copies_keep_their_order),
      cmocka_unit_test(streams_wait_for_events), cmocka_unit_test(too_much_memory_is_an_error),
      cmocka_unit_test(host_memory_is_pinned),   cmocka_unit_test(made_numbers_are_the_hosts),
      cmocka_unit_test(codes_are_the_hosts),     cmocka_unit_test(devices_leave_nothing_behind),
  };
  eg_context *ctx = NULL;
  const egi_backend *backend = NULL;
  egi_device_facts facts;
  if (eg_context_create(NULL, &ctx) != EG_OK) return 1;
  eg_status status = egi_backend_cuda(ctx, &backend);
  if (status == EG_OK) status = backend->describe(ctx, 0, &facts);
  if (status != EG_OK) printf("skipped: %s\n", eg_context_error(ctx));
  eg_context_destroy(ctx);
  return status == EG_OK ? cmocka_run_group_tests_name("cuda", tests, open_device, close_device) : 77;
}
