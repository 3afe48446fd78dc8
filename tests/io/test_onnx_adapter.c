/* .onnx_adapter files: read back by following offsets as a FlatBuffers reader does. */
#include "support_io.h"

#include <string.h>

typedef struct reader {
  const uint8_t *data;
  size_t size;
} reader;

static uint64_t number_at(const reader *r, size_t at, unsigned size_bytes) {
  uint64_t number = 0;
  assert_true(at % size_bytes == 0 && at + size_bytes <= r->size);
  for (unsigned i = 0; i < size_bytes; i++) number |= (uint64_t)r->data[at + i] << (8 * i);
  return number;
}

/* Where a field of a table lies, by its number in the schema. */
static size_t field_at(const reader *r, size_t table, unsigned field) {
  size_t fields = table - (size_t)(int32_t)(uint32_t)number_at(r, table, 4);
  assert_true(4 + 2 * field < number_at(r, fields, 2));
  return table + number_at(r, fields + 4 + 2 * field, 2);
}

static size_t target_of(const reader *r, size_t at) {
  return at + number_at(r, at, 4);
}

static void check_parameter(const reader *r, size_t table, const egi_safetensor *tensor) {
  size_t name = target_of(r, field_at(r, table, 0)), dims = target_of(r, field_at(r, table, 1)),
         data = target_of(r, field_at(r, table, 3));
  assert_int_equal(number_at(r, name, 4), strlen(tensor->name));
  assert_string_equal((const char *)r->data + name + 4, tensor->name);
  assert_int_equal(number_at(r, dims, 4), tensor->rank);
  for (int i = 0; i < tensor->rank; i++) assert_int_equal(number_at(r, dims + 4 + 8 * (size_t)i, 8), tensor->dims[i]);
  assert_int_equal(number_at(r, field_at(r, table, 2), 4), tensor->dtype);
  assert_int_equal(number_at(r, data, 4), tensor->size_bytes);
  assert_int_equal((data + 4) % 8, 0);
  assert_memory_equal(r->data + data + 4, tensor->data, (size_t)tensor->size_bytes);
}

static void test_written(void **state) {
  io_fixture *fixture = *state;
  static const uint8_t bytes[64] = {1, 2, 3, 4, 5};
  static const char *const names[] = {"a", "ab.lora_A.weight", "x.y", "model.layers.10.mlp.up_proj.lora_B.weight"};
  egi_safetensor tensors[4];
  egi_mapping mapping;
  for (size_t i = 0; i < 4; i++)
    tensors[i] = (egi_safetensor){.name = names[i],
                                  .dtype = i % 2 == 0 ? EG_DTYPE_F32 : EG_DTYPE_F16,
                                  .rank = 2,
                                  .dims = {(int64_t)i + 1, 3},
                                  .data = bytes,
                                  .size_bytes = (i + 1) * 3 * (i % 2 == 0 ? 4 : 2)};
  for (size_t count = 0; count <= 4; count++) {
    const char *path = io_write(fixture, "adapter.out", "", 0);
    assert_int_equal(egi_onnx_adapter_write(fixture->ctx, path, tensors, count), EG_OK);
    assert_int_equal(egi_mapping_open(fixture->ctx, path, &mapping), EG_OK);
    reader r = {mapping.data, mapping.size_bytes};
    assert_memory_equal(r.data + 4, "TORT", 4);
    size_t root = target_of(&r, 0), list = target_of(&r, field_at(&r, root, 3));
    for (unsigned i = 0; i < 3; i++) assert_int_equal(number_at(&r, field_at(&r, root, i), 4), 1);
    assert_int_equal(number_at(&r, list, 4), count);
    for (size_t i = 0; i < count; i++) check_parameter(&r, target_of(&r, list + 4 + 4 * i), &tensors[i]);
    egi_mapping_close(&mapping);
  }
}

static void test_too_large(void **state) {
  io_fixture *fixture = *state;
  egi_safetensor tensor = {
      .name = "a", .dtype = EG_DTYPE_F32, .rank = 1, .dims = {1 << 30}, .size_bytes = UINT64_C(4) << 30};
  const char *path = io_write(fixture, "adapter.out", "old", 3);
  assert_int_equal(egi_onnx_adapter_write(fixture->ctx, path, &tensor, 1), EG_ERROR_UNSUPPORTED);
  io_expect_error(fixture, "2 GiB");
  egi_mapping mapping;
  assert_int_equal(egi_mapping_open(fixture->ctx, path, &mapping), EG_OK);
  assert_int_equal(mapping.size_bytes, 3);
  egi_mapping_close(&mapping);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_written, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_too_large, io_setup, io_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
