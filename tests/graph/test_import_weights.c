/* Importing weights: every dtype in raw and typed fields, constants, weights made at load, 4 GiB of external data. */
#define _XOPEN_SOURCE 700

#include "support_onnx.h"

#include <setjmp.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

static const int64_t two[1] = {2}, three_by_two[2] = {3, 2};

static int set_up(void **state) {
  eg_context *ctx = NULL;
  assert_int_equal(eg_context_create(NULL, &ctx), EG_OK);
  *state = ctx;
  return 0;
}

static int tear_down(void **state) {
  eg_context_destroy(*state);
  return 0;
}

static egi_module *load(model_builder *builder) {
  egi_module *module = NULL;
  if (build_load(builder, NULL, &module) != EG_OK) fail_msg("%s", eg_context_error(builder->arena.ctx));
  return module;
}

static const egi_weight *find_weight(const egi_module *module, const char *name) {
  egi_value_id id = egi_graph_find_value(module->graphs[0], name);
  assert_int_not_equal(id, 0);
  assert_int_equal(module->graphs[0]->values[id].kind, EGI_VALUE_WEIGHT);
  return &module->weights[module->graphs[0]->values[id].index];
}

typedef struct typed_case {
  int dtype;
  int64_t n_elements;
  int field; /* 4 float, 5 int32, 7 int64, 10 double, 11 uint64 */
  size_t n_entries;
  int64_t entries[4];
  size_t size;
  uint8_t bytes[16];
} typed_case;

static void set_entries(Onnx__TensorProto *tensor, const typed_case *row, egi_arena *arena) {
  float *floats = EGI_NEW(arena, float, 4);
  double *doubles = EGI_NEW(arena, double, 4);
  int32_t *ints = EGI_NEW(arena, int32_t, 4);
  int64_t *longs = EGI_NEW(arena, int64_t, 4);
  for (size_t i = 0; i < row->n_entries; i++) {
    floats[i] = (float)row->entries[i];
    doubles[i] = (double)row->entries[i];
    ints[i] = (int32_t)row->entries[i];
    longs[i] = row->entries[i];
  }
  tensor->n_float_data = row->field == 4 ? row->n_entries : 0;
  tensor->float_data = floats;
  tensor->n_int32_data = row->field == 5 ? row->n_entries : 0;
  tensor->int32_data = ints;
  tensor->n_int64_data = row->field == 7 ? row->n_entries : 0;
  tensor->int64_data = longs;
  tensor->n_double_data = row->field == 10 ? row->n_entries : 0;
  tensor->double_data = doubles;
  tensor->n_uint64_data = row->field == 11 ? row->n_entries : 0;
  tensor->uint64_data = (uint64_t *)longs;
}

/* Each dtype's typed field gives the bytes that raw_data would hold. */
static void test_typed_fields(void **state) {
  static const typed_case cases[] = {
      {EG_DTYPE_F32, 2, 4, 2, {1, -2}, 8, {0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0}},
      {EG_DTYPE_C64, 1, 4, 2, {1, -2}, 8, {0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0}},
      {EG_DTYPE_F64, 1, 10, 1, {-2}, 8, {0, 0, 0, 0, 0, 0, 0, 0xc0}},
      {EG_DTYPE_C128, 1, 10, 2, {0, -2}, 16, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xc0}},
      {EG_DTYPE_I64, 1, 7, 1, {-2}, 8, {0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}},
      {EG_DTYPE_U64, 1, 11, 1, {258}, 8, {2, 1}},
      {EG_DTYPE_U32, 2, 11, 2, {258, 3}, 8, {2, 1, 0, 0, 3}},
      {EG_DTYPE_I32, 2, 5, 2, {258, -1}, 8, {2, 1, 0, 0, 0xff, 0xff, 0xff, 0xff}},
      {EG_DTYPE_I16, 2, 5, 2, {258, -2}, 4, {2, 1, 0xfe, 0xff}},
      {EG_DTYPE_U16, 2, 5, 2, {258, 65535}, 4, {2, 1, 0xff, 0xff}},
      {EG_DTYPE_I8, 3, 5, 3, {1, -2, 3}, 3, {1, 0xfe, 3}},
      {EG_DTYPE_U8, 3, 5, 3, {1, 254, 3}, 3, {1, 254, 3}},
      {EG_DTYPE_BOOL, 2, 5, 2, {1, 0}, 2, {1, 0}},
      {EG_DTYPE_F16, 2, 5, 2, {0x3c00, 0xc000}, 4, {0, 0x3c, 0, 0xc0}},
      {EG_DTYPE_BF16, 2, 5, 2, {0x3f80, 0xc000}, 4, {0x80, 0x3f, 0, 0xc0}},
      {EG_DTYPE_F8E4M3FN, 2, 5, 2, {0x38, 0xb8}, 2, {0x38, 0xb8}},
      {EG_DTYPE_F8E8M0, 1, 5, 1, {127}, 1, {127}},
      {EG_DTYPE_I4, 3, 5, 2, {0x21, 0x0f}, 2, {0x21, 0x0f}},
      {EG_DTYPE_F4E2M1, 2, 5, 1, {0x21}, 1, {0x21}},
      {EG_DTYPE_U2, 5, 5, 2, {0xe4, 0x03}, 2, {0xe4, 0x03}},
  };
  for (size_t i = 0; i < EGI_COUNT(cases); i++) {
    model_builder builder;
    build_begin(&builder, *state, 23);
    build_output(&builder, "w");
    Onnx__TensorProto *tensor = build_initializer(&builder, "w", cases[i].dtype, 1, &cases[i].n_elements, NULL, 0);
    set_entries(tensor, &cases[i], &builder.arena);
    egi_module *module = load(&builder);
    const egi_weight *weight = find_weight(module, "w");
    assert_int_equal(weight->bytes.size_bytes, cases[i].size);
    assert_memory_equal(weight->bytes.data, cases[i].bytes, cases[i].size);
    egi_module_destroy(module);
    build_end(&builder);
  }
}

/* Bytes of the file itself, not a copy; a scalar and an empty tensor. */
static void test_raw_weights(void **state) {
  static const float values[6] = {1, 2, 3, 4, 5, 6};
  static const int64_t empty[2] = {0, 4};
  model_builder builder;
  build_begin(&builder, *state, 23);
  build_initializer(&builder, "w", EG_DTYPE_F32, 2, three_by_two, values, sizeof(values));
  build_initializer(&builder, "s", EG_DTYPE_F32, 0, NULL, values, 4);
  build_initializer(&builder, "e", EG_DTYPE_F32, 2, empty, NULL, 0);
  build_node(&builder, "Add", "w,s", "y");
  build_output(&builder, "y");
  build_output(&builder, "e");
  egi_module *module = load(&builder);
  const egi_weight *w = find_weight(module, "w"), *s = find_weight(module, "s"), *e = find_weight(module, "e");
  assert_int_equal(w->rank, 2);
  assert_int_equal(w->dims[0], 3);
  assert_true(w->bytes.data >= builder.bytes && w->bytes.data < builder.bytes + builder.size);
  assert_memory_equal(w->bytes.data, values, sizeof(values));
  assert_int_equal(s->rank, 0);
  assert_int_equal(e->bytes.size_bytes, 0);
  egi_module_destroy(module);
  build_end(&builder);
}

static void test_constants(void **state) {
  static const int64_t numbers[3] = {4, 5, 6};
  model_builder builder;
  double scalar = 0;
  int64_t read[3];
  uint32_t count = 0;
  build_begin(&builder, *state, 13);
  build_node(&builder, "Mul", "k,f", "y"); /* before its constants */
  Onnx__NodeProto *node = build_node(&builder, "Constant", "", "k");
  build_ints(&builder, node, "value_ints", 3, numbers);
  node = build_node(&builder, "Constant", "", "f");
  build_float(&builder, node, "value_float", 2.5F);
  node = build_node(&builder, "Constant", "", "t");
  build_attribute(&builder, node, "value", EGI_ATTRIBUTE_TENSOR)->t =
      build_tensor(&builder, "", EG_DTYPE_I64, 1, two, numbers, 16);
  node = build_node(&builder, "Constant", "", "unused_text");
  Onnx__AttributeProto *attribute = build_attribute(&builder, node, "value_string", EGI_ATTRIBUTE_STRING);
  attribute->has_s = true;
  build_output(&builder, "y");
  build_output(&builder, "t");
  egi_module *module = load(&builder);
  const egi_graph *graph = module->graphs[0];
  assert_int_equal(graph->n_nodes - 1, 1);
  assert_true(egi_value_scalar(graph, egi_graph_find_value(graph, "f"), &scalar) && scalar == 2.5);
  assert_true(egi_value_integers(graph, egi_graph_find_value(graph, "k"), read, 3, &count) && count == 3);
  assert_int_equal(read[2], 6);
  assert_true(egi_value_integers(graph, egi_graph_find_value(graph, "t"), read, 3, &count) && count == 2);
  egi_module_destroy(module);
  build_end(&builder);
}

static void test_made_weights(void **state) {
  model_builder builder;
  build_begin(&builder, *state, 23);
  Onnx__TensorProto *tensor = build_initializer(&builder, "n", EG_DTYPE_BF16, 2, three_by_two, NULL, 0);
  build_external(&builder, tensor, "location", "");
  build_external(&builder, tensor, "engraft.init", "normal");
  build_external(&builder, tensor, "std", "0.02");
  build_external(&builder, tensor, "seed", "7");
  tensor = build_initializer(&builder, "f", EG_DTYPE_F32, 1, two, NULL, 0);
  build_external(&builder, tensor, "location", "");
  build_external(&builder, tensor, "engraft.init", "fill");
  build_external(&builder, tensor, "value", "1");
  build_output(&builder, "n");
  build_output(&builder, "f");
  egi_module *module = load(&builder);
  const egi_weight *n = find_weight(module, "n"), *f = find_weight(module, "f");
  assert_int_equal(n->bytes.kind, EGI_BYTES_NORMAL);
  assert_true(n->bytes.value == 0.02);
  assert_int_equal(n->bytes.seed, 7);
  assert_int_equal(f->bytes.kind, EGI_BYTES_FILL);
  assert_true(f->bytes.value == 1.0);
  egi_module_destroy(module);
  build_end(&builder);
}

static double peak_megabytes(void) {
  struct rusage usage;
  assert_int_equal(getrusage(RUSAGE_SELF, &usage), 0);
  return (double)usage.ru_maxrss / 1024.0;
}

/* 4 GiB of external weights, in a sparse file: neither memory nor time. */
static void test_large_external_data(void **state) {
  static const int64_t gigabyte[2] = {16384, 16384};
  char directory[64], path[256], name[16], offset[32];
  model_builder builder;
  support_make_directory(directory, sizeof(directory));
  snprintf(path, sizeof(path), "%s/w.bin", directory);
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(ftruncate(fileno(file), (off_t)4 << 30), 0);
  fclose(file);
  build_begin(&builder, *state, 23);
  build_input(&builder, "x", EG_DTYPE_F32, 2, (const int64_t[2]){1, 16384});
  for (unsigned i = 0; i < 4; i++) {
    snprintf(name, sizeof(name), "w%u", i);
    Onnx__TensorProto *tensor = build_initializer(&builder, name, EG_DTYPE_F32, 2, gigabyte, NULL, 0);
    snprintf(offset, sizeof(offset), "%llu", (unsigned long long)i << 30);
    build_external(&builder, tensor, "location", "w.bin");
    build_external(&builder, tensor, "offset", offset);
    build_external(&builder, tensor, "length", "1073741824");
    build_node(&builder, "MatMul", i ? "x,w1" : "x,w0", name + 1);
    build_output(&builder, name);
  }
  double before = peak_megabytes(), start = egi_clock();
  egi_module *module = NULL;
  if (build_load(&builder, directory, &module) != EG_OK) fail_msg("%s", eg_context_error(*state));
  double seconds = egi_clock() - start, grown = peak_megabytes() - before;
  if (!(seconds < 2.0)) fail_msg("%g s", seconds);
  if (!(grown < 200.0)) fail_msg("%g MiB", grown);
  assert_int_equal(find_weight(module, "w3")->bytes.offset, (uint64_t)3 << 30);
  assert_string_equal(find_weight(module, "w3")->bytes.file, "w.bin");
  assert_int_equal(find_weight(module, "w3")->bytes.data[5], 0);
  egi_module_destroy(module);
  build_end(&builder);
  support_remove_directory(directory);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_typed_fields), cmocka_unit_test(test_raw_weights),         cmocka_unit_test(test_constants),
      cmocka_unit_test(test_made_weights), cmocka_unit_test(test_large_external_data),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
