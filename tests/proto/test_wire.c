/* The wire guard: bad bytes give one line, good bytes survive loading and saving. */
#include "support_wire.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

typedef struct wire_fixture {
  eg_context *ctx;
  char directory[64];
} wire_fixture;

static int set_up(void **state) {
  static wire_fixture fixture;
  assert_int_equal(eg_context_create(NULL, &fixture.ctx), EG_OK);
  support_make_directory(fixture.directory, sizeof(fixture.directory));
  *state = &fixture;
  return 0;
}

static int tear_down(void **state) {
  wire_fixture *fixture = *state;
  eg_context_destroy(fixture->ctx);
  support_remove_directory(fixture->directory);
  return 0;
}

/* Loads from a copy of exactly `size` bytes, so that a read beyond them is seen by the address sanitizer. */
static eg_status load(eg_context *ctx, const void *bytes, size_t size, const egi_onnx_limits *limits) {
  egi_onnx *file = NULL;
  void *copy = malloc(size ? size : 1);
  assert_non_null(copy);
  memcpy(copy, bytes, size);
  size_t before = egi_bytes_in_use(ctx, EGI_PURPOSE_GRAPH);
  eg_status status = egi_onnx_open_memory(ctx, copy, size, NULL, limits, &file);
  if (status == EG_OK)
    egi_onnx_release(file);
  else
    assert_null(file);
  assert_int_equal(egi_bytes_in_use(ctx, EGI_PURPOSE_GRAPH), before);
  free(copy);
  return status;
}

static void expect_failure(eg_context *ctx, const wire_bytes *bytes, eg_status status, const char *words) {
  assert_int_equal(load(ctx, bytes->data, bytes->size, NULL), status);
  if (!strstr(eg_context_error(ctx), words)) fail_msg("\"%s\" lacks \"%s\"", eg_context_error(ctx), words);
  assert_null(strchr(eg_context_error(ctx), '\n'));
}

static void test_small_model_loads(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes model;
  egi_onnx *file = NULL;
  wire_small_model(&model);
  assert_int_equal(egi_onnx_open_memory(fixture->ctx, model.data, model.size, NULL, NULL, &file), EG_OK);
  const Onnx__GraphProto *graph = egi_onnx_model(file)->graph;
  assert_int_equal(graph->n_node, 2);
  assert_string_equal(graph->node[1]->op_type, "Mul");
  egi_range range;
  const char *name = "";
  uint64_t offset = 1;
  assert_int_equal(egi_onnx_tensor_range(file, graph->initializer[0], 8, &range, &name, &offset), EG_OK);
  assert_true(range.data > model.data && range.data < model.data + model.size); /* a view, not a copy */
  assert_null(name);
  float first = 0;
  memcpy(&first, range.data, sizeof(first));
  assert_true(first == 1.5F);
  assert_int_equal(egi_onnx_tensor_range(file, graph->initializer[1], 8, &range, &name, &offset), EG_OK);
  assert_null(range.data);
  assert_int_equal(graph->initializer[1]->n_float_data, 2);
  assert_int_equal(egi_onnx_tensor_range(file, graph->initializer[0], 12, &range, &name, &offset), EG_ERROR_FORMAT);
  assert_non_null(strstr(eg_context_error(fixture->ctx), "tensor \"raw\": 8 bytes of data, its shape needs 12"));
  egi_onnx_retain(file);
  egi_onnx_release(file);
  egi_onnx_release(file);
}

/* Loading what was saved gives the same message, unknown fields of every level included. */
static void test_round_trip(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes model;
  char path[128];
  egi_onnx *file = NULL, *again = NULL;
  wire_small_model(&model);
  snprintf(path, sizeof(path), "%s/model.onnx", fixture->directory);
  assert_int_equal(egi_onnx_open_memory(fixture->ctx, model.data, model.size, NULL, NULL, &file), EG_OK);
  assert_int_equal(egi_onnx_write(fixture->ctx, egi_onnx_model(file), path), EG_OK);
  assert_int_equal(egi_onnx_open(fixture->ctx, path, NULL, &again), EG_OK);
  const Onnx__ModelProto *a = egi_onnx_model(file), *b = egi_onnx_model(again);
  assert_int_equal(b->base.n_unknown_fields, 1);
  assert_int_equal(b->base.unknown_fields[0].tag, 500);
  assert_int_equal(b->graph->node[1]->base.n_unknown_fields, 1);
  assert_int_equal(b->graph->initializer[0]->base.n_unknown_fields, 1);
  assert_int_equal(b->graph->initializer[0]->base.unknown_fields[0].tag, 99);
  egi_mapping mapping;
  assert_int_equal(egi_mapping_open(fixture->ctx, path, &mapping), EG_OK);
  assert_int_equal(mapping.size_bytes, model.size);
  egi_mapping_close(&mapping);
  assert_int_equal(onnx__model_proto__get_packed_size(a), onnx__model_proto__get_packed_size(b));
  egi_onnx_release(file);
  egi_onnx_release(again);
}

static void test_truncation_at_every_byte(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes model;
  size_t n_good = 0;
  wire_small_model(&model);
  for (size_t size = 0; size < model.size; size++)
    if (load(fixture->ctx, model.data, size, NULL) == EG_OK) n_good++;
  assert_true(n_good < 40); /* cut between fields of the model itself, behind the graph */
}

static void test_changed_bytes(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes model;
  static const uint8_t masks[] = {0x01, 0x02, 0x04, 0x07, 0x08, 0x40, 0x80, 0xff};
  wire_small_model(&model);
  for (size_t i = 0; i < model.size; i++)
    for (size_t j = 0; j < sizeof(masks); j++) {
      model.data[i] ^= masks[j];
      load(fixture->ctx, model.data, model.size, NULL);
      model.data[i] ^= masks[j];
    }
}

static void test_bad_top_level(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes bytes;
  static const uint8_t long_varint[12] = {0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01};
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "it is empty");
  bytes.size = sizeof(long_varint);
  memcpy(bytes.data, long_varint, sizeof(long_varint));
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "ir_version: bad varint");
  bytes.size = 0;
  wire_number(&bytes, 7, 1);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "graph: wrong wire type");
  bytes.size = 0;
  wire_tag(&bytes, 7, TAG_GROUP);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "wrong wire type");
  bytes.size = 0;
  wire_tag(&bytes, 700, TAG_GROUP);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "unknown wire type");
  bytes.size = 0;
  wire_number(&bytes, 0, 1);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "bad field tag");
  bytes.size = 0;
  wire_number(&bytes, 1, 8);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "it has no graph");
  bytes.size = 0;
  wire_data(&bytes, 2, "a\0b", 3);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "producer_name: a text with a zero byte");
  bytes.size = 0;
  wire_text(&bytes, 5, "ab");
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "model_version: wrong wire type");
  bytes.size = 0;
  wire_tag(&bytes, 900, TAG_FIXED64);
  wire_tag(&bytes, 1, TAG_VARINT);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "cut off");
}

static void test_bad_lengths(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes bytes;
  bytes.size = 0;
  wire_tag(&bytes, 7, TAG_BYTES);
  wire_varint(&bytes, (uint64_t)1 << 34);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "graph: longer than what is left");
  bytes.size = 0;
  wire_tag(&bytes, 7, TAG_BYTES);
  wire_varint(&bytes, UINT64_MAX);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "graph: bad length");
  bytes.size = 0;
  wire_tag(&bytes, 600, TAG_BYTES);
  wire_varint(&bytes, 1000);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "longer than what is left");
  bytes.size = 0; /* a node that reaches beyond its graph, though not beyond the file */
  wire_tag(&bytes, 7, TAG_BYTES);
  wire_varint(&bytes, 2);
  wire_tag(&bytes, 1, TAG_BYTES);
  wire_varint(&bytes, 4);
  wire_number(&bytes, 1, 8);
  wire_number(&bytes, 5, 8);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_FORMAT, "graph.node: longer than what is left");
}

/* The message names the element in which the fault lies. */
static void test_paths_in_messages(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes model, graph, node, attribute;
  model.size = graph.size = node.size = attribute.size = 0;
  wire_text(&node, 3, "fine");
  wire_message(&graph, 1, &node);
  wire_message(&graph, 1, &node);
  wire_text(&attribute, 1, "fine");
  wire_message(&node, 5, &attribute);
  wire_text(&attribute, 2, "a text where a float belongs");
  wire_message(&node, 5, &attribute);
  wire_message(&graph, 1, &node);
  wire_message(&model, 7, &graph);
  expect_failure(fixture->ctx, &model, EG_ERROR_FORMAT, "graph.node[2].attribute[1].f: wrong wire type");
}

static void test_repeated_singular_messages(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes model, graph, tensor;
  model.size = graph.size = tensor.size = 0;
  wire_message(&model, 7, &graph);
  wire_message(&model, 7, &graph);
  expect_failure(fixture->ctx, &model, EG_ERROR_FORMAT, "graph: the field occurs twice");
  model.size = 0;
  wire_text(&tensor, 9, "1234");
  wire_text(&tensor, 9, "12");
  wire_message(&graph, 5, &tensor);
  wire_message(&model, 7, &graph);
  expect_failure(fixture->ctx, &model, EG_ERROR_FORMAT, "graph.initializer[0].raw_data: the field occurs twice");
}

/* graph { node { attribute { g { node … } } } }, n levels of graphs */
static void nest(wire_bytes *out, unsigned levels) {
  static wire_bytes inner;
  out->size = 0;
  for (unsigned i = 0; i < levels; i++)
    for (unsigned j = 0; j < 3; j++) {
      static const uint32_t fields[3] = {6, 5, 1};
      inner.size = 0;
      wire_message(&inner, fields[j], out);
      *out = inner;
    }
  inner.size = 0;
  wire_message(&inner, 7, out);
  *out = inner;
}

static void test_depth(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes bytes;
  egi_onnx_limits limits;
  egi_onnx_limits_default(&limits);
  nest(&bytes, 30);
  assert_int_equal(load(fixture->ctx, bytes.data, bytes.size, NULL), EG_OK);
  nest(&bytes, 40);
  expect_failure(fixture->ctx, &bytes, EG_ERROR_BUDGET, "nested deeper than 100");
  limits.max_depth = 130;
  assert_int_equal(load(fixture->ctx, bytes.data, bytes.size, &limits), EG_OK);
  limits.max_depth = UINT32_MAX; /* the library's own bound holds */
  nest(&bytes, 400);
  assert_int_equal(load(fixture->ctx, bytes.data, bytes.size, &limits), EG_ERROR_BUDGET);
}

/* A type nested in itself is a bomb without any graph. */
static void test_type_bomb(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes inner, outer, model, graph;
  inner.size = 0;
  for (unsigned i = 0; i < 4000; i++) {
    outer.size = 0;
    wire_message(&outer, i % 2 ? 4 : 1, &inner);
    inner = outer;
  }
  outer.size = graph.size = model.size = 0;
  wire_message(&outer, 2, &inner);
  wire_message(&graph, 11, &outer);
  wire_message(&model, 7, &graph);
  expect_failure(fixture->ctx, &model, EG_ERROR_BUDGET, "nested deeper");
}

static void test_limits(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes model;
  egi_onnx_limits limits;
  wire_small_model(&model);
  egi_onnx_limits_default(&limits);
  limits.max_nodes = 2; /* the function's node counts too */
  assert_int_equal(load(fixture->ctx, model.data, model.size, &limits), EG_ERROR_BUDGET);
  assert_non_null(strstr(eg_context_error(fixture->ctx), "more than 2 nodes"));
  limits.max_nodes = 3;
  assert_int_equal(load(fixture->ctx, model.data, model.size, &limits), EG_OK);
  limits.max_bytes = model.size - 1;
  assert_int_equal(load(fixture->ctx, model.data, model.size, &limits), EG_ERROR_BUDGET);
}

/* Two bytes a message in the file, hundreds in memory. */
static void test_empty_messages(void **state) {
  wire_fixture *fixture = *state;
  size_t graph_size = (size_t)2 << 20, size = 0;
  uint8_t *bytes = malloc(graph_size + 16);
  assert_non_null(bytes);
  bytes[size++] = 7 << 3 | TAG_BYTES;
  for (size_t value = graph_size; value; value >>= 7) bytes[size++] = (uint8_t)(value & 0x7f) | (value >> 7 ? 0x80 : 0);
  for (size_t i = 0; i < graph_size; i++) bytes[size++] = i % 2 ? 0 : 5 << 3 | TAG_BYTES;
  assert_int_equal(load(fixture->ctx, bytes, size, NULL), EG_ERROR_BUDGET);
  assert_non_null(strstr(eg_context_error(fixture->ctx), "empty messages"));
  free(bytes);
}

/* Lists of numbers, packed and not, whatever the schema declares. */
static void test_packed_and_unpacked(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes model, graph, node, attribute, packed, tensor;
  static const float numbers[3] = {1, 2, 3};
  egi_onnx *file = NULL;
  model.size = graph.size = node.size = attribute.size = packed.size = tensor.size = 0;
  for (unsigned i = 0; i < 3; i++) wire_varint(&packed, i == 2 ? (uint64_t)-5 : 300 * i);
  wire_message(&attribute, 8, &packed); /* ints: declared unpacked, written packed */
  wire_number(&attribute, 8, 77);
  wire_data(&attribute, 7, numbers, sizeof(numbers));
  wire_message(&node, 5, &attribute);
  wire_message(&graph, 1, &node);
  for (unsigned i = 0; i < 3; i++) { /* float_data: declared packed, written unpacked */
    wire_tag(&tensor, 4, TAG_FIXED32);
    memcpy(tensor.data + tensor.size, &numbers[i], 4);
    tensor.size += 4;
  }
  wire_message(&tensor, 7, &packed);
  wire_number(&tensor, 5, 9);
  wire_message(&graph, 5, &tensor);
  wire_message(&model, 7, &graph);
  assert_int_equal(egi_onnx_open_memory(fixture->ctx, model.data, model.size, NULL, NULL, &file), EG_OK);
  const Onnx__AttributeProto *a = egi_onnx_model(file)->graph->node[0]->attribute[0];
  const Onnx__TensorProto *t = egi_onnx_model(file)->graph->initializer[0];
  assert_int_equal(a->n_ints, 4);
  assert_int_equal(a->ints[1], 300);
  assert_int_equal(a->ints[2], -5);
  assert_int_equal(a->ints[3], 77);
  assert_int_equal(a->n_floats, 3);
  assert_true(a->floats[2] == 3.0F);
  assert_int_equal(t->n_float_data, 3);
  assert_true(t->float_data[1] == 2.0F);
  assert_int_equal(t->n_int64_data, 3);
  assert_int_equal(t->int64_data[2], -5);
  assert_int_equal(t->n_int32_data, 1);
  egi_onnx_release(file);
}

static void test_bad_packed(void **state) {
  wire_fixture *fixture = *state;
  static wire_bytes model, graph, tensor;
  tensor.size = graph.size = model.size = 0;
  wire_data(&tensor, 4, "12345", 5);
  wire_message(&graph, 5, &tensor);
  wire_message(&model, 7, &graph);
  expect_failure(fixture->ctx, &model, EG_ERROR_FORMAT, "float_data: a packed list does not hold whole numbers");
  tensor.size = graph.size = model.size = 0;
  wire_data(&tensor, 7, "\x05\xff", 2);
  wire_message(&graph, 5, &tensor);
  wire_message(&model, 7, &graph);
  expect_failure(fixture->ctx, &model, EG_ERROR_FORMAT, "int64_data: bad varint in a packed list");
}

typedef struct failing_allocator {
  size_t n_left;
} failing_allocator;

static void *allocate_some(void *userdata, size_t size_bytes, size_t alignment) {
  failing_allocator *allocator = userdata;
  if (allocator->n_left == 0) return NULL;
  allocator->n_left--;
  return aligned_alloc(alignment, (size_bytes + alignment - 1) / alignment * alignment);
}

static void release_some(void *userdata, void *memory, size_t size_bytes) {
  (void)userdata;
  (void)size_bytes;
  free(memory);
}

/* Every allocation of a load fails once. */
static void test_out_of_memory(void **state) {
  static wire_bytes model;
  (void)state;
  wire_small_model(&model);
  for (size_t n = 0; n < 1000; n++) {
    failing_allocator failing = {SIZE_MAX};
    eg_allocator allocator = {allocate_some, release_some, &failing};
    eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
    options.allocator = &allocator;
    options.n_threads = 1;
    eg_context *ctx = NULL;
    assert_int_equal(eg_context_create(&options, &ctx), EG_OK);
    failing.n_left = n;
    eg_status status = load(ctx, model.data, model.size, NULL);
    failing.n_left = SIZE_MAX;
    eg_context_destroy(ctx);
    if (status == EG_OK) {
      assert_true(n > 0);
      return;
    }
    assert_int_equal(status, EG_ERROR_MEMORY);
  }
  fail_msg("no number of allocations suffices");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_small_model_loads),
      cmocka_unit_test(test_round_trip),
      cmocka_unit_test(test_truncation_at_every_byte),
      cmocka_unit_test(test_changed_bytes),
      cmocka_unit_test(test_bad_top_level),
      cmocka_unit_test(test_bad_lengths),
      cmocka_unit_test(test_paths_in_messages),
      cmocka_unit_test(test_repeated_singular_messages),
      cmocka_unit_test(test_depth),
      cmocka_unit_test(test_type_bomb),
      cmocka_unit_test(test_limits),
      cmocka_unit_test(test_empty_messages),
      cmocka_unit_test(test_packed_and_unpacked),
      cmocka_unit_test(test_bad_packed),
      cmocka_unit_test(test_out_of_memory),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
