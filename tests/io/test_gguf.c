/* GGUF adapters: the file read back field by field as ggml's docs/gguf.md lays it out. */
#include "support_io.h"

#include <string.h>

typedef struct reader {
  const uint8_t *data;
  size_t size, at;
} reader;

static uint64_t take(reader *r, unsigned size_bytes) {
  uint64_t number = 0;
  assert_true(r->at + size_bytes <= r->size);
  for (unsigned i = 0; i < size_bytes; i++) number |= (uint64_t)r->data[r->at++] << (8 * i);
  return number;
}

static void take_string(reader *r, const char *expected) {
  uint64_t length = take(r, 8);
  assert_int_equal(length, strlen(expected));
  assert_true(r->at + length <= r->size);
  assert_memory_equal(r->data + r->at, expected, (size_t)length);
  r->at += (size_t)length;
}

static void take_text_pair(reader *r, const char *key, const char *value) {
  take_string(r, key);
  assert_int_equal(take(r, 4), 8);
  take_string(r, value);
}

static void take_number_pair(reader *r, const char *key, uint64_t type, uint64_t value) {
  take_string(r, key);
  assert_int_equal(take(r, 4), type);
  assert_int_equal(take(r, 4), value);
}

static void test_written(void **state) {
  io_fixture *fixture = *state;
  static const uint8_t bytes[64] = {1, 2, 3, 4, 5};
  egi_mapping mapping;
  egi_safetensor tensors[2] = {
      {.name = "blk.0.attn_q.weight.lora_a", .dtype = EG_DTYPE_BF16, .rank = 2, .dims = {3, 5}, .size_bytes = 30},
      {.name = "blk.0.attn_q.weight.lora_b", .dtype = EG_DTYPE_F32, .rank = 2, .dims = {4, 3}, .size_bytes = 48}};
  tensors[0].data = bytes;
  tensors[1].data = bytes + 2;
  egi_gguf_adapter adapter = {.architecture = "llama", .alpha = 2.0, .tensors = tensors, .count = 2};
  const char *path = io_write(fixture, "adapter.out", "", 0);
  assert_int_equal(egi_gguf_write_adapter(fixture->ctx, path, &adapter), EG_OK);
  assert_int_equal(egi_mapping_open(fixture->ctx, path, &mapping), EG_OK);
  reader r = {mapping.data, mapping.size_bytes, 0};
  assert_memory_equal(r.data, "GGUF", 4);
  r.at = 4;
  assert_int_equal(take(&r, 4), 3);
  assert_int_equal(take(&r, 8), 2);
  assert_int_equal(take(&r, 8), 6);
  take_text_pair(&r, "general.architecture", "llama");
  take_text_pair(&r, "general.type", "adapter");
  take_number_pair(&r, "general.file_type", 4, 32);
  take_number_pair(&r, "general.quantization_version", 4, 2);
  take_text_pair(&r, "adapter.type", "lora");
  take_number_pair(&r, "adapter.lora.alpha", 6, 0x40000000);
  for (size_t i = 0; i < 2; i++) {
    take_string(&r, tensors[i].name);
    assert_int_equal(take(&r, 4), 2);
    assert_int_equal(take(&r, 8), tensors[i].dims[1]);
    assert_int_equal(take(&r, 8), tensors[i].dims[0]);
    assert_int_equal(take(&r, 4), i == 0 ? 30 : 0);
    assert_int_equal(take(&r, 8), i * 32);
  }
  size_t data = (r.at + 31) / 32 * 32;
  assert_int_equal(r.size, data + 32 + 64);
  assert_memory_equal(r.data + data, bytes, 30);
  assert_memory_equal(r.data + data + 32, bytes + 2, 48);
  egi_mapping_close(&mapping);
}

static void test_refused(void **state) {
  io_fixture *fixture = *state;
  egi_safetensor tensor = {.name = "blk.0.x", .dtype = EG_DTYPE_F64, .rank = 1, .dims = {0}};
  egi_gguf_adapter adapter = {.architecture = "llama", .alpha = 1.0, .tensors = &tensor, .count = 1};
  const char *path = io_write(fixture, "adapter.out", "old", 3);
  assert_int_equal(egi_gguf_write_adapter(fixture->ctx, path, &adapter), EG_ERROR_UNSUPPORTED);
  io_expect_error(fixture, "blk.0.x");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_written, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_refused, io_setup, io_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
