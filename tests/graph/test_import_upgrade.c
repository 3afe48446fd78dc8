/* Old operator versions become the newest form. Each case is checked by its text: what stands behind "=>" of the graph.
 */
#include "support_onnx.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static const int64_t dims[3] = {2, 3, 4};

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

/* x [2, 3, 4] of `dtype` -> node -> y; the node's inputs and attributes are the case's. */
typedef struct upgrade_case {
  int64_t opset;
  int dtype;
  const char *op, *inputs, *outputs;
  const char *ints_names[3];
  int64_t ints[3][2];
  const char *int_name;
  int64_t int_value;
  const char *float_name;
  float float_value;
  const char *wanted[6]; /* pieces of the text, in order */
} upgrade_case;

static void add_case_node(model_builder *builder, const upgrade_case *row) {
  Onnx__NodeProto *node = build_node(builder, row->op, row->inputs, row->outputs);
  for (size_t i = 0; i < 3; i++)
    if (row->ints_names[i]) build_ints(builder, node, row->ints_names[i], 2, row->ints[i]);
  if (row->int_name) build_int(builder, node, row->int_name, row->int_value);
  if (row->float_name) build_float(builder, node, row->float_name, row->float_value);
}

static void check_case(eg_context *ctx, const upgrade_case *row) {
  model_builder builder;
  egi_module *module = NULL;
  egi_text text;
  build_begin(&builder, ctx, row->opset);
  build_input(&builder, "x", row->dtype ? row->dtype : EG_DTYPE_F32, 3, dims);
  build_initializer(&builder, "half", EG_DTYPE_F32, 0, NULL, "\0\0\0\x3f", 4);
  build_initializer(&builder, "off", EG_DTYPE_BOOL, 0, NULL, "\0", 1);
  static const int64_t wide[2] = {3, 4};
  static const float zeros[12] = {0};
  build_initializer(&builder, "wide", EG_DTYPE_F32, 2, wide, zeros, sizeof zeros);
  add_case_node(&builder, row);
  for (const char *name = row->outputs; *name; name += name[1] ? 2 : 1) build_output(&builder, (char[2]){*name, 0});
  if (build_load(&builder, NULL, &module) != EG_OK) fail_msg("%s: %s", row->op, eg_context_error(ctx));
  support_print(module, &text);
  const char *at = strstr(egi_text_string(&text), "=>");
  for (size_t i = 0; i < EGI_COUNT(row->wanted) && row->wanted[i]; i++) {
    const char *found = strstr(at, row->wanted[i]);
    if (!found) fail_msg("%s at %lld: no \"%s\" in\n%s", row->op, (long long)row->opset, row->wanted[i], at);
    at = found;
  }
  egi_text_free(&text);
  egi_module_destroy(module);
  build_end(&builder);
}

static const upgrade_case moved_attributes[] = {
    {.opset = 9,
     .op = "TopK",
     .inputs = "x",
     .outputs = "y,z",
     .int_name = "k",
     .int_value = 2,
     .wanted = {"int64[1] y_k = {2}", "y, z = TopK (x, y_k)"}},
    {.opset = 9,
     .op = "Pad",
     .inputs = "x",
     .outputs = "y",
     .float_name = "value",
     .float_value = 0.5f,
     .ints_names = {"pads"},
     .ints = {{0, 2}},
     .wanted = {"y_pads = {0,2}", "y_value = {0.5}", "y = Pad (x, y_pads, y_value)"}},
    {.opset = 10, .op = "Scatter", .inputs = "x,x,x", .outputs = "y", .wanted = {"y = ScatterElements (x, x, x)"}},
    {.opset = 12,
     .op = "Hardmax",
     .inputs = "x",
     .outputs = "y",
     .int_name = "axis",
     .int_value = 2,
     .wanted = {"y = Hardmax <axis: int = -1> (x)"}},
    {.opset = 13, .op = "Sum", .inputs = "x", .outputs = "y", .wanted = {"y = Identity (x)"}},
    {.opset = 13,
     .op = "Sum",
     .inputs = "x,half,x",
     .outputs = "y",
     .wanted = {"= Add (x, half)", "y = Add (", ", x)"}},
    {.opset = 13,
     .op = "Mean",
     .inputs = "x,half",
     .outputs = "y",
     .wanted = {"float y_count = {2}", "= CastLike (", "= Add (x, half)", "y = Div ("}},
    {.opset = 23,
     .op = "RMSNormalization",
     .inputs = "x,wide",
     .outputs = "y",
     .float_name = "epsilon",
     .float_value = 0.5F,
     .wanted = {"float y_epsilon = {0.5}", "= Mul (x, x)", "= ReduceMean (", "= Sqrt (", "= Div (x, ", "y = Mul ("}},
    {.opset = 17,
     .op = "LayerNormalization",
     .inputs = "x,wide,wide",
     .outputs = "y",
     .wanted = {"= ReduceMean (x, y_axes)", "= Sub (x, ", "= Sqrt (", "= Div (", ", wide)", "y = Add ("}},
    {.opset = 17,
     .op = "LayerNormalization",
     .inputs = "x,wide",
     .outputs = "y",
     .int_name = "axis",
     .int_value = 1,
     .wanted = {"y = LayerNormalization <axis: int = 1> (x, wide)"}},
    {.opset = 11,
     .op = "Unsqueeze",
     .inputs = "x",
     .outputs = "y",
     .ints_names = {"axes"},
     .ints = {{0, 2}},
     .wanted = {"int64[2] y_axes = {0,2}", "y = Unsqueeze (x, y_axes)"}},
    {.opset = 12,
     .op = "Squeeze",
     .inputs = "x",
     .outputs = "y",
     .ints_names = {"axes"},
     .ints = {{0, 2}},
     .wanted = {"int64[2] y_axes = {0,2}", "y = Squeeze (x, y_axes)"}},
    {.opset = 12, .op = "Squeeze", .inputs = "x", .outputs = "y", .wanted = {"y = Squeeze (x)"}},
    {.opset = 17,
     .op = "ReduceMean",
     .inputs = "x",
     .outputs = "y",
     .ints_names = {"axes"},
     .ints = {{-1, 1}},
     .int_name = "keepdims",
     .wanted = {"{-1,1}", "y = ReduceMean <keepdims: int = 0> (x, y_axes)"}},
    {.opset = 21, /* a tool raised the version alone */
     .op = "ReduceMean",
     .inputs = "x",
     .outputs = "y",
     .ints_names = {"axes"},
     .ints = {{-1, 1}},
     .wanted = {"{-1,1}", "y = ReduceMean (x, y_axes)"}},
    {.opset = 17, .op = "ReduceMax", .inputs = "x", .outputs = "y", .wanted = {"y = ReduceMax (x)"}},
    {.opset = 12,
     .op = "ReduceSum",
     .inputs = "x",
     .outputs = "y",
     .ints_names = {"axes"},
     .ints = {{0, 1}},
     .wanted = {"{0,1}", "y = ReduceSum (x, y_axes)"}},
    {.opset = 9,
     .op = "Slice",
     .inputs = "x",
     .outputs = "y",
     .ints_names = {"axes", "ends", "starts"},
     .ints = {{1, 2}, {3, -1}, {0, 1}},
     .wanted = {"y_starts = {0,1}", "y_ends = {3,-1}", "y_axes = {1,2}", "y = Slice (x, y_starts, y_ends, y_axes)"}},
    {.opset = 9,
     .op = "Slice",
     .inputs = "x",
     .outputs = "y",
     .ints_names = {"starts", "ends"},
     .ints = {{0, 1}, {3, -1}},
     .wanted = {"y = Slice (x, y_starts, y_ends)"}},
    {.opset = 11,
     .op = "Split",
     .inputs = "x",
     .outputs = "y,z",
     .ints_names = {"split"},
     .ints = {{1, 2}},
     .int_name = "axis",
     .int_value = 1,
     .wanted = {"y_split = {1,2}", "y, z = Split <axis: int = 1> (x, y_split)"}},
    {.opset = 13,
     .op = "Split",
     .inputs = "x",
     .outputs = "y,z",
     .int_name = "axis",
     .int_value = 2,
     .wanted = {"y, z = Split <axis: int = 2, num_outputs: int = 2> (x)"}},
    {.opset = 10,
     .op = "Clip",
     .inputs = "x",
     .outputs = "y",
     .float_name = "max",
     .float_value = 2.0F,
     .wanted = {"float y_max = {2}", "y = Clip (x, \"\", y_max)"}},
    {.opset = 7,
     .dtype = EG_DTYPE_F64,
     .op = "Clip",
     .inputs = "x",
     .outputs = "y",
     .float_name = "min",
     .float_value = 0.5F,
     .wanted = {"double y_min = {0.5}", "y = Clip (x, y_min)"}},
    {.opset = 7,
     .dtype = EG_DTYPE_F16,
     .op = "Clip",
     .inputs = "x",
     .outputs = "y",
     .float_name = "min",
     .float_value = 1.0F,
     .wanted = {"float16 y_min = {15360}", "y = Clip (x, y_min)"}},
};

static void test_attributes_become_inputs(void **state) {
  for (size_t i = 0; i < EGI_COUNT(moved_attributes); i++) check_case(*state, &moved_attributes[i]);
}

/* Softmax before 13 normalises over all dims from axis on. */
static void test_softmax(void **state) {
  static const upgrade_case cases[] = {
      {.opset = 11,
       .op = "Softmax",
       .inputs = "x",
       .outputs = "y",
       .int_name = "axis",
       .int_value = 2,
       .wanted = {"y = Softmax <axis: int = -1> (x)"}},
      {.opset = 11,
       .op = "LogSoftmax",
       .inputs = "x",
       .outputs = "y",
       .int_name = "axis",
       .int_value = -1,
       .wanted = {"y = LogSoftmax <axis: int = -1> (x)"}},
      {.opset = 12,
       .op = "Softmax",
       .inputs = "x",
       .outputs = "y",
       .wanted = {"= Shape (x)", "= Flatten <axis: int = 1> (x)", "= Softmax <axis: int = -1>", "y = Reshape"}},
      {.opset = 7,
       .op = "LogSoftmax",
       .inputs = "x",
       .outputs = "y",
       .int_name = "axis",
       .int_value = 0,
       .wanted = {"= Flatten <axis: int = 0> (x)", "= LogSoftmax <axis: int = -1>", "y = Reshape"}},
      {.opset = 13,
       .op = "Softmax",
       .inputs = "x",
       .outputs = "y",
       .int_name = "axis",
       .int_value = 1,
       .wanted = {"y = Softmax <axis: int = 1> (x)"}},
  };
  for (size_t i = 0; i < EGI_COUNT(cases); i++) check_case(*state, &cases[i]);
}

static void test_dropout(void **state) {
  static const upgrade_case cases[] = {
      {.opset = 10,
       .op = "Dropout",
       .inputs = "x",
       .outputs = "y",
       .float_name = "ratio",
       .float_value = 0.3F,
       .wanted = {"y = Identity (x)"}},
      {.opset = 13,
       .op = "Dropout",
       .inputs = "x,half,off",
       .outputs = "y,m",
       .wanted = {"= Shape (x)", "m = ConstantOfShape", "bool[1]", "{1}", "y = Identity (x)"}},
  };
  for (size_t i = 0; i < EGI_COUNT(cases); i++) check_case(*state, &cases[i]);
}

/* A Dropout that trains is left as it is, for egi_graph_check_operators() to refuse. */
static void test_training_dropout(void **state) {
  model_builder builder;
  egi_module *module = NULL;
  build_begin(&builder, *state, 13);
  build_input(&builder, "x", EG_DTYPE_F32, 3, dims);
  build_input(&builder, "mode", EG_DTYPE_BOOL, 0, NULL);
  build_initializer(&builder, "on", EG_DTYPE_BOOL, 0, NULL, "\1", 1);
  build_node(&builder, "Dropout", "x,,on", "y");
  build_node(&builder, "Dropout", "x,,mode", "z");
  build_output(&builder, "y");
  build_output(&builder, "z");
  assert_int_equal(build_load(&builder, NULL, &module), EG_OK);
  assert_string_equal(module->graphs[0]->nodes[1].op_name, "Dropout");
  assert_string_equal(module->graphs[0]->nodes[2].op_name, "Dropout");
  egi_module_destroy(module);
  build_end(&builder);
}

/* What has not changed since is read from any version. */
static void test_unchanged_operator(void **state) {
  model_builder builder;
  egi_module *module = NULL;
  build_begin(&builder, *state, 1);
  build_input(&builder, "x", EG_DTYPE_BOOL, 3, dims);
  build_node(&builder, "Not", "x", "y");
  build_output(&builder, "y");
  if (build_load(&builder, NULL, &module) != EG_OK) fail_msg("%s", eg_context_error(*state));
  egi_module_destroy(module);
  build_end(&builder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_attributes_become_inputs),
      cmocka_unit_test(test_softmax),
      cmocka_unit_test(test_dropout),
      cmocka_unit_test(test_training_dropout),
      cmocka_unit_test(test_unchanged_operator),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
