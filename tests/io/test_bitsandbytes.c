/* State dicts of Linear4bit: one that bitsandbytes made (data/bitsandbytes) is read and written back byte for byte;
 * what is missing or does not fit is named. */
#include "support_io.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/blockwise.h"

#define GOLDEN EGI_TEST_DATA "/bitsandbytes/golden.safetensors"

static eg_status find(void *userdata, const char *name, const egi_safetensor **out_tensor) {
  *out_tensor = egi_safetensors_find(userdata, name);
  return EG_OK;
}

typedef struct layer {
  egi_safetensors *file;
  egi_arena arena;
  egi_bnb_state state;
  egi_safetensor tensors[EGI_BNB_TENSORS];
  bool is_there;
} layer;

static eg_status read_layer(io_fixture *fixture, const char *path, const char *name, layer *l) {
  memset(l, 0, sizeof *l);
  egi_arena_init(&l->arena, fixture->ctx, EGI_PURPOSE_DATA);
  assert_int_equal(egi_safetensors_open(fixture->ctx, path, &l->file), EG_OK);
  const egi_bnb_source source = {find, l->file, path};
  return egi_bnb_read(&l->arena, &source, name, &l->state, l->tensors, &l->is_there);
}

static void close_layer(layer *l) {
  egi_safetensors_close(l->file);
  egi_arena_clear(&l->arena);
}

static void test_round_trip(void **state) {
  io_fixture *fixture = *state;
  layer l;
  size_t count = 0;
  assert_int_equal(read_layer(fixture, GOLDEN, "layer.weight", &l), EG_OK);
  assert_true(l.is_there);
  assert_int_equal(l.state.type, EGI_FOUR_BIT_NF4);
  assert_int_equal(l.state.block, 64);
  assert_int_equal(l.state.out_features, 96);
  assert_int_equal(l.state.in_features, 256);
  assert_true(l.state.is_nested);
  assert_string_equal(l.state.dtype, "bfloat16");
  egi_safetensor written[EGI_BNB_TENSORS];
  memcpy(written, l.tensors, sizeof written);
  assert_int_equal(egi_bnb_write(&l.arena, "layer.weight", &l.state, written, &count), EG_OK);
  assert_int_equal(count, EGI_BNB_TENSORS);
  const char *path = egi_arena_format(&l.arena, "%s/a.safetensors", fixture->directory);
  assert_int_equal(egi_safetensors_write(fixture->ctx, path, written, count), EG_OK);
  egi_safetensors *back = NULL;
  assert_int_equal(egi_safetensors_open(fixture->ctx, path, &back), EG_OK);
  assert_int_equal(egi_safetensors_count(back), count);
  for (size_t i = 0; i < count; i++) {
    const egi_safetensor *a = egi_safetensors_at(back, i), *b = egi_safetensors_find(l.file, a->name);
    assert_non_null(b);
    assert_int_equal(a->dtype, b->dtype);
    assert_int_equal(a->rank, b->rank);
    for (int d = 0; d < a->rank; d++) assert_int_equal(a->dims[d], b->dims[d]);
    assert_int_equal(a->size_bytes, b->size_bytes);
    assert_memory_equal(a->data, b->data, a->size_bytes);
  }
  egi_safetensors_close(back);
  close_layer(&l);
}

/* The codes and scales are those that are made of the same matrix in bfloat16. */
static void test_same_codes(void **state) {
  io_fixture *fixture = *state;
  layer l;
  assert_int_equal(read_layer(fixture, GOLDEN, "layer.weight", &l), EG_OK);
  const egi_safetensor *weight = egi_safetensors_find(l.file, "layer.w");
  assert_non_null(weight);
  float values[64];
  uint8_t codes[32];
  for (size_t block = 0; block < 96 * 256 / 64; block++) {
    memcpy(values, weight->data + block * sizeof values, sizeof values);
    for (int i = 0; i < 64; i++) values[i] = egi_bf16_to_f32(egi_f32_to_bf16(values[i]));
    (void)egi_four_bit_encode(EGI_FOUR_BIT_NF4, values, 64, codes);
    assert_memory_equal(codes, l.tensors[EGI_BNB_CODES].data + block * 32, 32);
  }
  close_layer(&l);
}

static void test_numbers(void **state) {
  io_fixture *fixture = *state;
  static const struct {
    double number;
    const char *text;
  } cases[] = {{0.0, ": 0.0}"},
               {1217.0, ": 1217.0}"},
               {0.1, ": 0.1}"},
               {1e-05, ": 1e-05}"},
               {0.00012345, ": 0.00012345}"},
               {1.5e16, ": 1.5e+16}"},
               {120000.0, ": 120000.0}"},
               {-2.5, ": -2.5}"}};
  egi_arena arena;
  egi_arena_init(&arena, fixture->ctx, EGI_PURPOSE_DATA);
  for (size_t i = 0; i < EGI_COUNT(cases); i++) {
    egi_safetensor tensors[EGI_BNB_TENSORS] = {{.name = ""}};
    size_t count = 0;
    const egi_bnb_state wanted = {.type = 0,
                                  .block = 64,
                                  .out_features = 1,
                                  .in_features = 2,
                                  .dtype = "float32",
                                  .is_nested = true,
                                  .offset = cases[i].number};
    assert_int_equal(egi_bnb_write(&arena, "w", &wanted, tensors, &count), EG_OK);
    const egi_safetensor *text = &tensors[count - 1];
    assert_string_equal(text->name, "w.quant_state.bitsandbytes__fp4");
    size_t length = strlen(cases[i].text);
    assert_true(text->size_bytes > length);
    assert_memory_equal(text->data + text->size_bytes - length, cases[i].text, length);
  }
  egi_arena_clear(&arena);
}

/* A layer of 4 numbers in one block; each case spoils something. */
static void test_refused(void **state) {
  io_fixture *fixture = *state;
  static const struct {
    const char *json;
    int missing; /* tensor that is left out, or -1 */
    bool has_other_map, is_short;
    const char *part;
  } cases[] = {
      {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"float32\",\"shape\":[2,2]}", EGI_BNB_ABSMAX, 0, 0,
       "w.absmax"},
      {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"float32\",\"shape\":[2,2]}", EGI_BNB_CODES, 0, 0, "\"w\""},
      {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"float32\",\"shape\":[2,2]}", -1, true, 0, "other levels"},
      {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"float32\",\"shape\":[2,2]}", -1, 0, true,
       "\"w\" does not fit"},
      {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"float32\",\"shape\":[2,2,1]}", -1, 0, 0, "shape"},
      {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"float32\",\"shape\":[2,-2]}", -1, 0, 0, "shape"},
      {"{\"quant_type\":\"nf5\",\"blocksize\":64,\"dtype\":\"float32\",\"shape\":[2,2]}", -1, 0, 0, "nf5"},
      {"{\"quant_type\":\"nf4\",\"dtype\":\"float32\",\"shape\":[2,2]}", -1, 0, 0,
       "\"w.quant_state.bitsandbytes__nf4\": \"quant_type\" \"nf4\" in blocks of 0"},
      {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"shape\":[2,2],\"nested_blocksize\":128}", -1, 0, 0, "128"},
      {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"shape\":[2,2],\"nested_blocksize\":256}", -1, 0, 0, "w.absmax"},
      {"[1]", -1, 0, 0, "JSON"},
  };
  for (size_t i = 0; i < EGI_COUNT(cases); i++) {
    float map[16], scale = 1.0F;
    const uint8_t codes[2] = {1, 2};
    char path[256];
    memcpy(map, egi_four_bit_levels(EGI_FOUR_BIT_NF4), sizeof map);
    if (cases[i].has_other_map) map[3] = 0.5F;
    const egi_safetensor all[] = {{"w", EG_DTYPE_U8, 1, {cases[i].is_short ? 1 : 2}, codes, cases[i].is_short ? 1 : 2},
                                  {"w.absmax", EG_DTYPE_F32, 1, {1}, (const uint8_t *)&scale, sizeof scale},
                                  {"w.quant_map", EG_DTYPE_F32, 1, {16}, (const uint8_t *)map, sizeof map},
                                  {"w.quant_state.bitsandbytes__nf4",
                                   EG_DTYPE_U8,
                                   1,
                                   {(int64_t)strlen(cases[i].json)},
                                   (const uint8_t *)cases[i].json,
                                   strlen(cases[i].json)}};
    egi_safetensor kept[4];
    size_t n = 0;
    for (int t = 0; t < 4; t++)
      if (t != cases[i].missing) kept[n++] = all[t];
    (void)snprintf(path, sizeof path, "%s/a.safetensors", fixture->directory);
    assert_int_equal(egi_safetensors_write(fixture->ctx, path, kept, n), EG_OK);
    layer l;
    eg_status status = read_layer(fixture, path, "w", &l);
    if (status == EG_OK) fail_msg("case %zu is taken", i);
    io_expect_error(fixture, cases[i].part);
    close_layer(&l);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_round_trip, io_setup, io_teardown),
                                     cmocka_unit_test_setup_teardown(test_same_codes, io_setup, io_teardown),
                                     cmocka_unit_test_setup_teardown(test_numbers, io_setup, io_teardown),
                                     cmocka_unit_test_setup_teardown(test_refused, io_setup, io_teardown)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
