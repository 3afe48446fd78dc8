/* Exporting: what is exported imports to the same graph, remarks and unknown fields stay, weights go where they belong.
 */
#include "support_onnx.h"

#include "graph/export.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static const int64_t two[1] = {2};

typedef struct export_fixture {
  eg_context *ctx;
  char directory[64], path[256];
} export_fixture;

static int set_up(void **state) {
  static export_fixture fixture;
  assert_int_equal(eg_context_create(NULL, &fixture.ctx), EG_OK);
  support_make_directory(fixture.directory, sizeof(fixture.directory));
  snprintf(fixture.path, sizeof(fixture.path), "%s/model.onnx", fixture.directory);
  *state = &fixture;
  return 0;
}

static int tear_down(void **state) {
  export_fixture *fixture = *state;
  eg_context_destroy(fixture->ctx);
  support_remove_directory(fixture->directory);
  return 0;
}

static egi_module *load(eg_context *ctx, const char *path) {
  egi_module *module = NULL;
  if (support_load(ctx, path, &module) != EG_OK) fail_msg("%s", eg_context_error(ctx));
  return module;
}

static void save(const egi_module *module, const char *path, uint64_t embed_limit) {
  if (egi_export_with_limit(module, module->graphs[0], path, embed_limit) != EG_OK)
    fail_msg("%s", eg_context_error(module->ctx));
}

static void expect_same(const egi_module *a, const egi_module *b) {
  egi_text first, second;
  support_print(a, &first);
  support_print(b, &second);
  assert_string_equal(egi_text_string(&first), egi_text_string(&second));
  egi_text_free(&first);
  egi_text_free(&second);
}

static const char *const everything =
    "<ir_version: 10, opset_import: [\"\": 23, \"L\": 1]>\n"
    "g (float[batch,sequence] x, int64[1] k) => (float[batch,z] y, float[2] o)\n"
    "<float[2] w = {1, -2.5}, float16[1] h = {15360}, int4[3] i4 = {-8, 7, -1}, int64[0] none = {},\n"
    " float[4,2] r = [\"location\": \"\", \"engraft.init\": \"normal\", \"std\": \"0.02\", \"seed\": \"7\"],\n"
    " float[3] f = [\"location\": \"\", \"engraft.init\": \"fill\", \"value\": \"1\"]>\n"
    "{\n"
    "  [\"/model/layers.0/mlp/Softmax\"] s = Softmax <axis = -1> (x)\n"
    "  o, \"\" = L.fn <alpha = 1.5, ints: ints = [], list = [1.0, 2.0], texts = [\"a\", \"b\"], text = \"a\\\"b\","
    " t = float[2] nm {1, -1}> (s, , w)\n"
    "  all = Foo.Keep (h, i4, none, r, f)\n"
    "  y = Slice (s, k, k, k)\n"
    "}\n"
    "<domain: \"L\", opset_import: [\"\": 23]>\n"
    "fn <alpha, beta: float = 1.0> (a, b, c) => (e)\n"
    "{\n"
    "  d = LeakyRelu <alpha: float = @alpha> (a)\n"
    "  k = Constant <value = float[1] {3}> ()\n"
    "  e = Add (d, k)\n"
    "}\n";

static void test_round_trip(void **state) {
  export_fixture *fixture = *state;
  egi_module *module = NULL;
  if (egi_module_parse(fixture->ctx, everything, strlen(everything), &module) != EG_OK)
    fail_msg("%s", eg_context_error(fixture->ctx));
  save(module, fixture->path, UINT64_MAX);
  egi_module *once = load(fixture->ctx, fixture->path);
  save(once, fixture->path, UINT64_MAX);
  egi_module *twice = load(fixture->ctx, fixture->path);
  expect_same(once, twice);
  assert_string_equal(once->graphs[0]->nodes[1].scope, "model.layers.0.mlp");
  assert_int_equal(once->n_functions, 1);
  egi_text text;
  support_print(once, &text);
  static const char *const lines[] = {
      "float[2] w = {1,-2.5}",        "float16[1] h = {15360}",     "int4[3] i4 = {-8,7,-1}",  "int64[0] none = {}",
      "\"engraft.init\": \"normal\"", "\"engraft.init\": \"fill\"", "float[batch,sequence] x", "@alpha"};
  for (size_t i = 0; i < EGI_COUNT(lines); i++)
    if (!strstr(egi_text_string(&text), lines[i])) fail_msg("no %s in\n%s", lines[i], egi_text_string(&text));
  egi_text_free(&text);
  egi_module_destroy(module);
  egi_module_destroy(once);
  egi_module_destroy(twice);
}

static void add_unknown(ProtobufCMessage *message, unsigned tag) {
  static uint8_t data[1] = {42};
  static ProtobufCMessageUnknownField fields[4];
  ProtobufCMessageUnknownField *field = &fields[tag % 4];
  *field = (ProtobufCMessageUnknownField){tag, PROTOBUF_C_WIRE_TYPE_VARINT, 1, data};
  message->n_unknown_fields = 1;
  message->unknown_fields = field;
}

/* What the graph does not model: metadata, remarks, unknown fields, attributes of rare kinds. */
static void test_remarks_survive(void **state) {
  export_fixture *fixture = *state;
  model_builder builder;
  egi_module *module = NULL;
  build_begin(&builder, fixture->ctx, 23);
  builder.model->producer_name = (char *)(uintptr_t) "somebody";
  builder.graph->doc_string = (char *)(uintptr_t) "about the graph";
  build_input(&builder, "x", EG_DTYPE_F32, 1, two);
  builder.graph->input[0]->doc_string = (char *)(uintptr_t) "about x";
  Onnx__NodeProto *node = build_node(&builder, "Rare", "x", "y");
  node->doc_string = (char *)(uintptr_t) "about y";
  build_property(&builder, node, "key", "value");
  build_attribute(&builder, node, "type", 13)->tp = builder.graph->input[0]->type;
  add_unknown(&node->base, 1000);
  add_unknown(&builder.model->base, 1001);
  add_unknown(&builder.graph->base, 1002);
  Onnx__TensorProto *tensor = build_initializer(&builder, "w", EG_DTYPE_F32, 1, two, "12345678", 8);
  add_unknown(&tensor->base, 1003);
  build_output(&builder, "y");
  build_output(&builder, "w");
  if (build_load(&builder, NULL, &module) != EG_OK) fail_msg("%s", eg_context_error(fixture->ctx));
  save(module, fixture->path, UINT64_MAX);
  egi_module *again = load(fixture->ctx, fixture->path);
  const Onnx__ModelProto *model = egi_onnx_model(again->file);
  assert_string_equal(model->producer_name, "somebody");
  assert_string_equal(model->graph->doc_string, "about the graph");
  assert_string_equal(model->graph->input[0]->doc_string, "about x");
  assert_string_equal(model->graph->node[0]->doc_string, "about y");
  assert_string_equal(model->graph->node[0]->metadata_props[0]->value, "value");
  assert_int_equal(model->graph->node[0]->n_attribute, 1);
  assert_non_null(model->graph->node[0]->attribute[0]->tp);
  assert_int_equal(model->graph->node[0]->base.unknown_fields[0].tag, 1000);
  assert_int_equal(model->base.unknown_fields[0].tag, 1001);
  assert_int_equal(model->graph->base.unknown_fields[0].tag, 1002);
  assert_int_equal(model->graph->initializer[0]->base.unknown_fields[0].tag, 1003);
  assert_int_equal(model->graph->initializer[0]->base.unknown_fields[0].data[0], 42);
  egi_module_destroy(module);
  egi_module_destroy(again);
  build_end(&builder);
}

static int64_t exported_opset(export_fixture *fixture, const char *body, const char *domain) {
  egi_module *module = NULL;
  egi_text text;
  egi_text_init(&text, fixture->ctx);
  egi_text_format(&text, "g (float[2,3] x, int64[1] k) => (float[] y) { %s }", body);
  if (egi_module_parse(fixture->ctx, egi_text_string(&text), text.length, &module) != EG_OK)
    fail_msg("%s", eg_context_error(fixture->ctx));
  egi_text_free(&text);
  save(module, fixture->path, UINT64_MAX);
  egi_module_destroy(module);
  egi_onnx *file = NULL;
  int64_t version = 0;
  assert_int_equal(egi_onnx_open(fixture->ctx, fixture->path, NULL, &file), EG_OK);
  const Onnx__ModelProto *model = egi_onnx_model(file);
  for (size_t i = 0; i < model->n_opset_import; i++)
    if (!strcmp(model->opset_import[i]->domain, domain)) version = model->opset_import[i]->version;
  egi_onnx_release(file);
  return version;
}

static void test_operator_sets(void **state) {
  assert_int_equal(exported_opset(*state, "y = Neg (x)", ""), 13);
  assert_int_equal(exported_opset(*state, "y = Reshape (x, k)", ""), 14);
  assert_int_equal(exported_opset(*state, "t = Neg (x) y = ReduceMean (t, k)", ""), 18);
  assert_int_equal(exported_opset(*state, "y = Attention (x, x, x)", ""), 23);
  assert_int_equal(exported_opset(*state, "y = Attention <left_window_size = 3> (x, x, x)", ""), 25);
  assert_int_equal(exported_opset(*state, "y = engraft.SumTo (x, x)", "engraft"), 1);
}

/* ---- where weights go ----------------------------------------------------------------------------------------- */

static const Onnx__TensorProto *initializer(const egi_module *module, const char *name) {
  const Onnx__GraphProto *graph = egi_onnx_model(module->file)->graph;
  for (size_t i = 0; i < graph->n_initializer; i++)
    if (!strcmp(graph->initializer[i]->name, name)) return graph->initializer[i];
  fail_msg("no %s", name);
  return NULL;
}

static const char *location_of(const egi_module *module, const char *name) {
  const Onnx__TensorProto *tensor = initializer(module, name);
  return tensor->n_external_data ? tensor->external_data[0]->value : "";
}

/* big [1024] and next [1024] with numbers, small [2] */
static void parse_large(export_fixture *fixture, egi_module **out_module) {
  egi_text text;
  egi_text_init(&text, fixture->ctx);
  egi_text_add(&text, "g () => (float[] a, float[] b) <float[2] small = {1, 2}");
  for (unsigned n = 0; n < 2; n++) {
    egi_text_add(&text, n ? ", float[1024] next = {" : ", float[1024] big = {");
    for (unsigned i = 0; i < 1024; i++) egi_text_format(&text, "%s%u", i ? ", " : "", i + n);
    egi_text_add(&text, "}");
  }
  egi_text_add(&text, "> { a = Add (big, next) b = Neg (small) }");
  if (egi_module_parse(fixture->ctx, egi_text_string(&text), text.length, out_module) != EG_OK)
    fail_msg("%s", eg_context_error(fixture->ctx));
  egi_text_free(&text);
}

static void test_data_file(void **state) {
  export_fixture *fixture = *state;
  egi_module *module = NULL;
  char other[256], beside[64];
  parse_large(fixture, &module);
  save(module, fixture->path, 8192 + 7); /* 8200 bytes of weights */
  egi_module *external = load(fixture->ctx, fixture->path);
  assert_string_equal(location_of(external, "big"), "model.onnx.data");
  assert_string_equal(location_of(external, "small"), "");
  assert_int_equal(external->weights[3].bytes.offset % 4096, 0);
  expect_same(module, external);
  /* saved elsewhere in the directory, the reference stays */
  snprintf(other, sizeof(other), "%s/other.onnx", fixture->directory);
  save(external, other, 0);
  egi_module *referring = load(fixture->ctx, other);
  assert_string_equal(location_of(referring, "big"), "model.onnx.data");
  assert_string_equal(location_of(referring, "small"), "");
  expect_same(module, referring);
  /* saved above it, too; saved beside it, the weights are embedded */
  save(external, "other.onnx", UINT64_MAX);
  egi_module *above = load(fixture->ctx, "other.onnx");
  assert_non_null(strstr(location_of(above, "big"), "/model.onnx.data"));
  expect_same(module, above);
  remove("other.onnx");
  support_make_directory(beside, sizeof(beside));
  snprintf(other, sizeof(other), "%s/other.onnx", beside);
  save(external, other, UINT64_MAX);
  egi_module *embedded = load(fixture->ctx, other);
  assert_string_equal(location_of(embedded, "big"), "");
  expect_same(module, embedded);
  support_remove_directory(beside);
  egi_module_destroy(above);
  egi_module_destroy(module);
  egi_module_destroy(external);
  egi_module_destroy(referring);
  egi_module_destroy(embedded);
}

/* Saving over itself while its own data file is mapped, with weights beside it that must go there too. */
static void test_data_file_replaced(void **state) {
  export_fixture *fixture = *state;
  egi_module *module = NULL;
  parse_large(fixture, &module);
  save(module, fixture->path, 0);
  egi_module *first = load(fixture->ctx, fixture->path);
  float *values = EGI_NEW(&first->arena, float, 1024);
  egi_weight added = {.name = "added", .dtype = EG_DTYPE_F32, .rank = 1, .dims = {1024}};
  for (unsigned i = 0; i < 1024; i++) values[i] = (float)i * 0.5F;
  added.bytes.data = (const uint8_t *)values;
  added.bytes.size_bytes = 4096;
  uint32_t index = 0;
  egi_value_id value = 0;
  assert_int_equal(egi_module_add_weight(first, &added, &index), EG_OK);
  assert_int_equal(egi_graph_add_weight(first->graphs[0], index, &value), EG_OK);
  assert_int_equal(egi_graph_add_output(first->graphs[0], value), EG_OK);
  save(first, fixture->path, 1000);
  egi_module *second = load(fixture->ctx, fixture->path);
  expect_same(first, second);
  assert_string_equal(location_of(second, "added"), "model.onnx.data");
  assert_string_equal(location_of(second, "big"), "model.onnx.data");
  egi_module_destroy(module);
  egi_module_destroy(first);
  egi_module_destroy(second);
}

/* ---- what cannot be exported ---------------------------------------------------------------------------------- */

static void test_states_are_refused(void **state) {
  export_fixture *fixture = *state;
  static const char text[] = "g (float[2] x) => (float[2] y) { y = Neg (x) }";
  egi_module *module = NULL;
  egi_state row = {.name = "moment", .pool = EGI_POOL_MOMENT1, .dtype = EG_DTYPE_F32, .rank = 1, .dims = {2}};
  uint32_t index = 0;
  egi_value_id value = 0;
  assert_int_equal(egi_module_parse(fixture->ctx, text, strlen(text), &module), EG_OK);
  assert_int_equal(egi_module_add_state(module, &row, &index), EG_OK);
  assert_int_equal(egi_graph_add_state(module->graphs[0], index, &value), EG_OK);
  assert_int_equal(egi_module_export(module, module->graphs[0], fixture->path), EG_ERROR_UNSUPPORTED);
  assert_non_null(strstr(eg_context_error(fixture->ctx), "has states (\"moment\")"));
  assert_int_equal(egi_module_export(module, module->graphs[0], "no-such-directory/m.onnx"), EG_ERROR_IO);
  egi_module_destroy(module);
}

/* A weight of 3 GiB does not fit into a message: the file that was there stays. */
static void test_too_large_a_message(void **state) {
  export_fixture *fixture = *state;
  static const char text[] = "g (float[2] x) => (float[2] y) { y = Neg (x) }";
  static const uint8_t byte = 0;
  egi_module *module = NULL;
  egi_weight weight = {.name = "w", .dtype = EG_DTYPE_U8, .rank = 1, .dims = {INT64_C(3) << 30}};
  uint32_t index = 0;
  egi_value_id value = 0;
  assert_int_equal(egi_module_parse(fixture->ctx, text, strlen(text), &module), EG_OK);
  save(module, fixture->path, UINT64_MAX);
  weight.bytes.data = &byte; /* never read: the size alone decides */
  weight.bytes.size_bytes = UINT64_C(3) << 30;
  assert_int_equal(egi_module_add_weight(module, &weight, &index), EG_OK);
  assert_int_equal(egi_graph_add_weight(module->graphs[0], index, &value), EG_OK);
  assert_int_equal(egi_export_with_limit(module, module->graphs[0], fixture->path, UINT64_MAX), EG_ERROR_UNSUPPORTED);
  assert_non_null(strstr(eg_context_error(fixture->ctx), "weights must be external data"));
  egi_module *old = load(fixture->ctx, fixture->path);
  egi_module_destroy(old);
  egi_module_destroy(module);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_round_trip),          cmocka_unit_test(test_remarks_survive),
      cmocka_unit_test(test_operator_sets),       cmocka_unit_test(test_data_file),
      cmocka_unit_test(test_data_file_replaced),  cmocka_unit_test(test_states_are_refused),
      cmocka_unit_test(test_too_large_a_message),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
