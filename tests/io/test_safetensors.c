/* The safetensors reader and writer: round trip, and every way a header can lie. */
#include "support_io.h"

#include <stdio.h>
#include <string.h>

static const char *write_raw(io_fixture *fixture, const char *header, size_t data_bytes) {
  uint8_t bytes[4096] = {0};
  size_t length = strlen(header);
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)((uint64_t)length >> (8 * i));
  memcpy(bytes + 8, header, length);
  return io_write(fixture, "a.safetensors", bytes, 8 + length + data_bytes);
}

static void test_round_trip(void **state) {
  io_fixture *fixture = *state;
  float values[6] = {1, 2, 3, 4, 5, 6};
  int64_t numbers[2] = {-1, 7};
  uint8_t mask[3] = {1, 0, 1};
  egi_safetensor tensors[] = {
      {.name = "w\"eight",
       .dtype = EG_DTYPE_F32,
       .rank = 2,
       .dims = {2, 3},
       .data = (const uint8_t *)values,
       .size_bytes = sizeof values},
      {.name = "mask", .dtype = EG_DTYPE_BOOL, .rank = 1, .dims = {3}, .data = mask, .size_bytes = sizeof mask},
      {.name = "a",
       .dtype = EG_DTYPE_I64,
       .rank = 1,
       .dims = {2},
       .data = (const uint8_t *)numbers,
       .size_bytes = sizeof numbers},
      {.name = "empty", .dtype = EG_DTYPE_F16, .rank = 2, .dims = {0, 5}, .data = mask, .size_bytes = 0},
      {.name = "scalar", .dtype = EG_DTYPE_F32, .rank = 0, .data = (const uint8_t *)values, .size_bytes = 4}};
  char path[256];
  snprintf(path, sizeof path, "%s/a.safetensors", fixture->directory);
  assert_int_equal(egi_safetensors_write(fixture->ctx, path, tensors, EGI_COUNT(tensors)), EG_OK);
  egi_safetensors *file;
  assert_int_equal(egi_safetensors_open(fixture->ctx, path, &file), EG_OK);
  assert_int_equal(egi_safetensors_count(file), 5);
  assert_string_equal(egi_safetensors_at(file, 0)->name, "a");
  assert_string_equal(egi_safetensors_at(file, 4)->name, "w\"eight");
  const egi_safetensor *weight = egi_safetensors_find(file, "w\"eight");
  assert_non_null(weight);
  assert_int_equal(weight->rank, 2);
  assert_int_equal(weight->dims[1], 3);
  assert_memory_equal(weight->data, values, sizeof values);
  assert_memory_equal(egi_safetensors_find(file, "a")->data, numbers, sizeof numbers);
  assert_int_equal(egi_safetensors_find(file, "scalar")->rank, 0);
  assert_int_equal(egi_safetensors_find(file, "empty")->size_bytes, 0);
  assert_null(egi_safetensors_find(file, "b"));
  egi_safetensors_close(file);
}

typedef struct bad_header {
  const char *header;
  size_t data_bytes;
  const char *part;
} bad_header;

static const bad_header bad_headers[] = {
    {"[]", 0, "does not begin"},
    {"{\"a\":", 0, "line 1"},
    {"{\"a\":1}", 0, "\"a\""},
    {"{\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "empty name"},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype"},
    {"{\"a\":{\"dtype\":\"Q7\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "Q7"},
    {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "shape"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, "dimension"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1.5],\"data_offsets\":[0,1]}}", 1, "dimension"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, "8 dimensions"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "too large"},
    {"{\"a\":{\"dtype\":\"F64\",\"shape\":[9223372036854775807],\"data_offsets\":[0,0]}}", 0, "\"a\""},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,3]}}", 3, "differs"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 4, "outside"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "outside"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "before it"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 8, "after the last"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
     "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
     3, "overlaps"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
     "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
     1, "uplicate"},
    {"{\"__metadata__\":3}", 0, "__metadata__"},
};

static void test_bad_headers(void **state) {
  io_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(bad_headers); i++) {
    egi_safetensors *file = NULL;
    const char *path = write_raw(fixture, bad_headers[i].header, bad_headers[i].data_bytes);
    eg_status status = egi_safetensors_open(fixture->ctx, path, &file);
    assert_true(status == EG_ERROR_FORMAT || status == EG_ERROR_UNSUPPORTED);
    assert_null(file);
    io_expect_error(fixture, bad_headers[i].part);
    io_expect_error(fixture, "a.safetensors");
  }
}

static void test_bad_lengths(void **state) {
  io_fixture *fixture = *state;
  egi_safetensors *file = NULL;
  const char *path = io_write(fixture, "a.safetensors", "\1\0\0", 3);
  assert_int_equal(egi_safetensors_open(fixture->ctx, path, &file), EG_ERROR_FORMAT);
  io_write(fixture, "a.safetensors", "\377\377\377\377\377\377\377\377{}", 10);
  assert_int_equal(egi_safetensors_open(fixture->ctx, path, &file), EG_ERROR_FORMAT);
  io_expect_error(fixture, "larger than the file");
  io_write(fixture, "a.safetensors", "\0\0\0\0\0\0\0\0", 8);
  assert_int_equal(egi_safetensors_open(fixture->ctx, path, &file), EG_ERROR_FORMAT);
  assert_int_equal(egi_safetensors_open(fixture->ctx, "/nonexistent/b", &file), EG_ERROR_IO);
  io_expect_error(fixture, "/nonexistent/b");
}

/* Each prefix of a good file is refused, and no byte flip crashes. */
static void test_damage(void **state) {
  io_fixture *fixture = *state;
  const char *header = "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}";
  size_t size = 8 + strlen(header) + 2;
  uint8_t good[128] = {0}, bad[128];
  good[0] = (uint8_t)strlen(header);
  memcpy(good + 8, header, strlen(header));
  egi_safetensors *file;
  for (size_t n = 0; n < size; n++) {
    const char *path = io_write(fixture, "a.safetensors", good, n);
    assert_int_not_equal(egi_safetensors_open(fixture->ctx, path, &file), EG_OK);
  }
  for (size_t i = 0; i < size; i++)
    for (int bit = 0; bit < 8; bit++) {
      memcpy(bad, good, size);
      bad[i] = (uint8_t)(bad[i] ^ (1 << bit));
      const char *path = io_write(fixture, "a.safetensors", bad, size);
      if (egi_safetensors_open(fixture->ctx, path, &file) == EG_OK) egi_safetensors_close(file);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_round_trip, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_bad_headers, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_bad_lengths, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_damage, io_setup, io_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
