/* Importing good files: unsorted nodes, types, attributes, module paths, bodies, functions. */
#include "support_onnx.h"

#include <setjmp.h>
#include <stdarg.h>

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

static const egi_node *find_node(const egi_graph *graph, const char *op) {
  for (egi_node_id n = 1; n < graph->n_nodes; n++) {
    const egi_node *node = &graph->nodes[n];
    const char *name = node->op == EGI_OP_UNKNOWN ? node->op_name : egi_op_get(node->op)->name;
    if (!strcmp(name, op)) return node;
  }
  fail_msg("no %s", op);
  return NULL;
}

/* ---- structure ------------------------------------------------------------------------------------------------ */

static void test_unsorted(void **state) {
  model_builder builder;
  build_begin(&builder, *state, 23);
  build_input(&builder, "x", EG_DTYPE_F32, 1, two);
  build_node(&builder, "Neg", "c", "y");
  build_node(&builder, "Exp", "b", "c");
  build_node(&builder, "Abs", "a", "b");
  build_node(&builder, "Sin", "x", "a");
  build_output(&builder, "y");
  egi_module *module = load(&builder);
  const egi_graph *graph = module->graphs[0];
  static const egi_op order[] = {EGI_OP_Sin, EGI_OP_Abs, EGI_OP_Exp, EGI_OP_Neg};
  assert_int_equal(graph->n_nodes, 5);
  for (size_t i = 0; i < 4; i++) assert_int_equal(graph->nodes[i + 1].op, order[i]);
  egi_module_destroy(module);
  build_end(&builder);
}

static void test_optional_names(void **state) {
  model_builder builder;
  build_begin(&builder, *state, 23);
  build_input(&builder, "x", EG_DTYPE_F32, 1, two);
  build_input(&builder, "m", EG_DTYPE_F32, 0, NULL);
  build_node(&builder, "Clip", "x,,m", "y");
  build_node(&builder, "Unknown", "x,,", ",z,,");
  build_output(&builder, "y");
  build_output(&builder, "z");
  egi_module *module = load(&builder);
  const egi_node *clip = find_node(module->graphs[0], "Clip"), *unknown = find_node(module->graphs[0], "Unknown");
  assert_int_equal(clip->n_inputs, 3);
  assert_int_equal(clip->inputs[1], 0);
  assert_int_equal(unknown->n_inputs, 1);
  assert_int_equal(unknown->n_outputs, 2);
  assert_int_equal(unknown->outputs[0], 0);
  egi_module_destroy(module);
  build_end(&builder);
}

typedef struct log_lines {
  int n_warnings;
  char last[256];
} log_lines;

static void count_line(void *userdata, eg_log_level level, const char *message) {
  log_lines *lines = userdata;
  if (level == EG_LOG_WARNING) lines->n_warnings++;
  snprintf(lines->last, sizeof(lines->last), "%s", message);
}

/* An input with an initializer is a constant; only a large one is worth a line. */
static void test_constant_inputs(void **state) {
  static const float values[2048] = {0};
  static const int64_t many[1] = {2048};
  log_lines lines = {0};
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  eg_context *ctx = NULL;
  model_builder builder;
  (void)state;
  options.log = count_line;
  options.log_userdata = &lines;
  assert_int_equal(eg_context_create(&options, &ctx), EG_OK);
  build_begin(&builder, ctx, 23);
  build_input(&builder, "small", EG_DTYPE_F32, 1, two);
  build_input(&builder, "large", EG_DTYPE_F32, 1, many);
  build_input(&builder, "x", EG_DTYPE_F32, 1, many);
  build_initializer(&builder, "small", EG_DTYPE_F32, 1, two, values, 8);
  build_initializer(&builder, "large", EG_DTYPE_F32, 1, many, values, sizeof(values));
  build_node(&builder, "Add", "x,large", "y");
  build_output(&builder, "y");
  build_output(&builder, "small");
  egi_module *module = load(&builder);
  assert_int_equal(module->graphs[0]->n_inputs, 1);
  assert_int_equal(lines.n_warnings, 1);
  assert_non_null(strstr(lines.last, "input \"large\""));
  egi_module_destroy(module);
  build_end(&builder);
  eg_context_destroy(ctx);
}

/* ---- types ---------------------------------------------------------------------------------------------------- */

static void expect_type(const egi_graph *graph, const char *name, const char *wanted) {
  egi_text text;
  egi_text_init(&text, graph->module->ctx);
  egi_value_print_type(graph, egi_graph_find_value(graph, name), &text);
  assert_string_equal(egi_text_string(&text), wanted);
  egi_text_free(&text);
}

static void add_info(model_builder *builder, bool is_input, const char *name, int rank, const char *const *params) {
  static const int64_t zeros[3] = {0, 0, 0};
  Onnx__ValueInfoProto *info = build_info(builder, name, EG_DTYPE_F32, rank, zeros, params);
  Onnx__ValueInfoProto ***list = is_input ? &builder->graph->input : &builder->graph->value_info;
  size_t *count = is_input ? &builder->graph->n_input : &builder->graph->n_value_info;
  Onnx__ValueInfoProto **longer = EGI_NEW(&builder->arena, Onnx__ValueInfoProto *, *count + 1);
  if (*count) memcpy(longer, *list, *count * sizeof(*longer));
  longer[(*count)++] = info;
  *list = longer;
}

/* Expressions over the symbols of the inputs are read; other texts are symbols of inputs, and nothing elsewhere. */
static void test_dims(void **state) {
  static const char *const names[2] = {"batch", "past"}, *const sums[2] = {"batch", "past + sequence"};
  static const char *const rest[3] = {"sequence", "weird name!", "alone*2"};
  static const char *const hints[3] = {"2*batch*(sequence+1)", "floor(sequence / 2)", "other"};
  model_builder builder;
  build_begin(&builder, *state, 23);
  add_info(&builder, true, "a", 2, names);
  add_info(&builder, true, "b", 2, sums);
  add_info(&builder, true, "c", 3, rest);
  add_info(&builder, false, "y", 3, hints);
  build_input(&builder, "open", EG_DTYPE_I64, 2, (const int64_t[2]){-1, 4});
  build_node(&builder, "Unknown", "a,b,c,open", "y");
  build_output(&builder, "y");
  egi_module *module = load(&builder);
  const egi_graph *graph = module->graphs[0];
  egi_dims *dims = module->dims;
  egi_dim batch = egi_dim_symbol(dims, "batch"), past = egi_dim_symbol(dims, "past");
  egi_dim sequence = egi_dim_symbol(dims, "sequence"), one = egi_dim_constant(dims, 1);
  egi_dim doubled = egi_dim_multiply(dims, egi_dim_constant(dims, 2), batch);
  const egi_value *b = &graph->values[egi_graph_find_value(graph, "b")];
  const egi_value *c = &graph->values[egi_graph_find_value(graph, "c")];
  const egi_value *y = &graph->values[egi_graph_find_value(graph, "y")];
  assert_int_equal(b->dims[1], egi_dim_add(dims, past, sequence));
  assert_int_equal(c->dims[1], egi_dim_symbol(dims, "weird name!"));
  assert_int_equal(c->dims[2], egi_dim_symbol(dims, "alone*2"));
  assert_int_equal(y->dims[0], egi_dim_multiply(dims, doubled, egi_dim_add(dims, sequence, one)));
  assert_int_equal(y->dims[1], egi_dim_divide(dims, sequence, egi_dim_constant(dims, 2)));
  assert_int_equal(y->dims[2], EGI_DIM_NONE);
  expect_type(graph, "open", "int64[open_dim0,4]");
  egi_module_destroy(module);
  build_end(&builder);
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

static void test_attributes(void **state) {
  static const int64_t numbers[2] = {-1, INT64_MAX};
  model_builder builder;
  build_begin(&builder, *state, 23);
  build_input(&builder, "x", EG_DTYPE_F32, 1, two);
  Onnx__NodeProto *node = build_node(&builder, "Unknown", "x", "y");
  build_int(&builder, node, "i", -3);
  build_float(&builder, node, "f", 0.5F);
  build_ints(&builder, node, "is", 2, numbers);
  Onnx__AttributeProto *a = build_attribute(&builder, node, "s", EGI_ATTRIBUTE_STRING);
  a->has_s = true;
  a->s.data = (uint8_t *)"ab";
  a->s.len = 2;
  a = build_attribute(&builder, node, "ss", EGI_ATTRIBUTE_STRINGS);
  a->n_strings = 1;
  a->strings = EGI_NEW(&builder.arena, ProtobufCBinaryData, 1);
  a->strings[0] = (ProtobufCBinaryData){3, (uint8_t *)"xyz"};
  a = build_attribute(&builder, node, "fs", 0); /* no type: seen from the content */
  a->n_floats = 1;
  a->floats = EGI_NEW(&builder.arena, float, 1);
  a->floats[0] = 4.0F;
  build_attribute(&builder, node, "none", EGI_ATTRIBUTE_INTS);
  build_attribute(&builder, node, "t", EGI_ATTRIBUTE_TENSOR)->t =
      build_tensor(&builder, "inner", EG_DTYPE_F32, 1, two, "12345678", 8);
  build_output(&builder, "y");
  egi_module *module = load(&builder);
  const egi_node *read = find_node(module->graphs[0], "Unknown");
  uint32_t count = 9;
  assert_int_equal(egi_node_int(read, "i", 0), -3);
  assert_true(egi_node_float(read, "f", 0) == 0.5F);
  assert_int_equal(egi_node_ints(read, "is", &count)[1], INT64_MAX);
  assert_string_equal(egi_node_string(read, "s", ""), "ab");
  assert_string_equal(egi_node_attribute(read, "ss")->u.strings[0], "xyz");
  assert_int_equal(egi_node_attribute(read, "fs")->kind, EGI_ATTRIBUTE_FLOATS);
  assert_int_equal(egi_node_attribute(read, "none")->count, 0);
  assert_string_equal(module->weights[egi_node_attribute(read, "t")->u.weight].name, "inner");
  egi_module_destroy(module);
  build_end(&builder);
}

static void test_scopes(void **state) {
  static const struct {
    const char *name, *list, *scope;
  } cases[] = {
      {"node_1", "['', 'model', 'model.layers.0.mlp', 'mul_3']", "model.layers.0.mlp"},
      {"/a/b/Mul", "[\"\", \"it's\", 'm']", "it's"},
      {"n", "['', 'index']", NULL},
      {"n", "['x']", NULL},
      {"n", "no list", NULL},
      {"/model/layers.0/self_attn/q_proj/MatMul", NULL, "model.layers.0.self_attn.q_proj"},
      {"MatMul_3", NULL, NULL},
  };
  for (size_t i = 0; i < EGI_COUNT(cases); i++) {
    model_builder builder;
    build_begin(&builder, *state, 23);
    build_input(&builder, "x", EG_DTYPE_F32, 1, two);
    Onnx__NodeProto *node = build_node(&builder, "Neg", "x", "y");
    node->name = (char *)(uintptr_t)cases[i].name;
    if (cases[i].list) build_property(&builder, node, "pkg.torch.onnx.name_scopes", cases[i].list);
    build_output(&builder, "y");
    egi_module *module = load(&builder);
    const char *scope = find_node(module->graphs[0], "Neg")->scope;
    if (cases[i].scope)
      assert_string_equal(scope ? scope : "NULL", cases[i].scope);
    else
      assert_null(scope);
    egi_module_destroy(module);
    build_end(&builder);
  }
}

/* The scope of the second of two nodes: one takes a parameter of this name, the other takes none. */
static void expect_completed(void **state, const char *parameter, const char *list, const char *scope) {
  model_builder builder;
  build_begin(&builder, *state, 23);
  build_input(&builder, "x", EG_DTYPE_F32, 1, two);
  static const float values[2] = {1.0F, 2.0F};
  build_initializer(&builder, parameter, EG_DTYPE_F32, 1, two, values, sizeof values);
  char inputs[80];
  snprintf(inputs, sizeof inputs, "x,%s", parameter);
  build_node(&builder, "Add", inputs, "s")->name = (char *)(uintptr_t) "/m/decoder/layers.0/fc1/Add";
  Onnx__NodeProto *node = build_node(&builder, "Neg", "s", "y");
  node->name = (char *)(uintptr_t) "/m/decoder/layers.1/act/Neg";
  if (list) build_property(&builder, node, "pkg.torch.onnx.name_scopes", list);
  build_output(&builder, "y");
  egi_module *module = load(&builder);
  assert_string_equal(find_node(module->graphs[0], "Neg")->scope, scope);
  egi_module_destroy(module);
  build_end(&builder);
}

/* TorchScript's paths lack modules that were not called; names of parameters have them. */
static void test_scopes_are_completed(void **state) {
  static const char whole[] = "m.model.decoder.layers.1.act", lacking[] = "m.decoder.layers.1.act";
  expect_completed(state, "m.model.decoder.layers.0.fc1.bias", NULL, whole);
  expect_completed(state, "m.a.b.decoder.layers.0.fc1.bias", NULL, "m.a.b.decoder.layers.1.act");
  expect_completed(state, "model.m.decoder.layers.0.fc1.bias", NULL, "model.m.decoder.layers.1.act");
  expect_completed(state, "m.decoder.layers.0.fc1.bias", NULL, lacking);
  expect_completed(state, "m.decoder.layers.0.fc1.MatMul.bias", NULL, lacking);
  expect_completed(state, "m.model.decoder.layers.0.fc2.bias", NULL, lacking); /* of another module */
  expect_completed(state, "val_7", NULL, lacking);
  expect_completed(state, "m.model.decoder.layers.0.fc1.bias", "['', 'm', 'act', 'neg']", "act");
}

static void make_if(model_builder *builder) {
  Onnx__GraphProto *then_graph = build_body(builder, "then"), *else_graph = build_body(builder, "else");
  Onnx__NodeProto *node = build_node(builder, "If", "c", "y");
  build_node_in(builder, then_graph, "Neg", "late", "r");
  build_node_in(builder, else_graph, "Add", "x,w", "r");
  build_attribute(builder, node, "then_branch", EGI_ATTRIBUTE_GRAPH)->g = then_graph;
  build_attribute(builder, node, "else_branch", EGI_ATTRIBUTE_GRAPH)->g = else_graph;
  then_graph->output = else_graph->output = EGI_NEW(&builder->arena, Onnx__ValueInfoProto *, 1);
  then_graph->output[0] = build_info(builder, "r", EG_DTYPE_F32, 1, two, NULL);
  then_graph->n_output = else_graph->n_output = 1;
}

/* Bodies see values of the graph around them, which keeps what they use. */
static void test_bodies(void **state) {
  model_builder builder;
  build_begin(&builder, *state, 23);
  build_input(&builder, "x", EG_DTYPE_F32, 1, two);
  build_input(&builder, "c", EG_DTYPE_BOOL, 0, NULL);
  build_initializer(&builder, "w", EG_DTYPE_F32, 1, two, "12345678", 8);
  make_if(&builder);
  build_node(&builder, "Abs", "x", "late");
  build_output(&builder, "y");
  egi_module *module = load(&builder);
  const egi_node *node = find_node(module->graphs[0], "If");
  const egi_graph *body = egi_node_attribute(node, "else_branch")->u.graph;
  assert_int_equal(body->n_nodes, 2);
  assert_int_equal(body->values[egi_graph_find_value(body, "w")].producer, 0);
  egi_value_id w = egi_graph_find_value(module->graphs[0], "w");
  assert_int_equal(module->graphs[0]->values[w].kind, EGI_VALUE_WEIGHT);
  assert_int_not_equal(egi_graph_find_value(module->graphs[0], "late"), 0);
  egi_module_destroy(module);
  build_end(&builder);
}

/* Functions have operator sets of their own, and refer to attributes of the call. */
static void test_functions(void **state) {
  static const int64_t axes[1] = {1};
  model_builder builder;
  build_begin(&builder, *state, 23);
  build_opset(&builder, "local", 1);
  build_input(&builder, "x", EG_DTYPE_F32, 2, three_by_two);
  Onnx__FunctionProto *function = build_function(&builder, "Old", "a", "b");
  function->n_opset_import = 1;
  function->opset_import = EGI_NEW(&builder.arena, Onnx__OperatorSetIdProto *, 1);
  function->opset_import[0] = EGI_NEW(&builder.arena, Onnx__OperatorSetIdProto, 1);
  onnx__operator_set_id_proto__init(function->opset_import[0]);
  function->opset_import[0]->has_version = true;
  function->opset_import[0]->version = 11;
  Onnx__NodeProto *node = build_loose_node(&builder, "Unsqueeze", "a", "t");
  build_ints(&builder, node, "axes", 1, axes);
  build_function_node(&builder, function, node);
  node = build_loose_node(&builder, "ReduceMax", "t", "b");
  build_attribute(&builder, node, "axes", EGI_ATTRIBUTE_INTS)->ref_attr_name = (char *)(uintptr_t) "which";
  build_function_node(&builder, function, node);
  node = build_node(&builder, "Old", "x", "y");
  node->domain = (char *)(uintptr_t) "local";
  build_ints(&builder, node, "which", 1, axes);
  build_output(&builder, "y");
  egi_module *module = load(&builder);
  assert_int_equal(module->n_functions, 1);
  const egi_graph *body = module->functions[0].graph;
  const egi_node *unsqueeze = find_node(body, "Unsqueeze"), *reduce = find_node(body, "ReduceMax");
  assert_int_equal(unsqueeze->n_inputs, 2);
  assert_int_equal(body->values[unsqueeze->inputs[1]].kind, EGI_VALUE_WEIGHT);
  assert_int_equal(reduce->n_inputs, 2);
  const egi_node *constant = &body->nodes[body->values[reduce->inputs[1]].producer];
  assert_int_equal(constant->op, EGI_OP_Constant);
  assert_int_equal(egi_node_attribute(constant, "value_ints")->kind, EGI_ATTRIBUTE_REFERENCE);
  assert_string_equal(egi_node_attribute(constant, "value_ints")->u.s, "which");
  egi_module_destroy(module);
  build_end(&builder);
}

/* A graph of 100,000 nodes, last first. */
static void test_many_nodes(void **state) {
  enum { N = 100000 };
  model_builder builder;
  char input[16], output[16];
  build_begin(&builder, *state, 23);
  build_input(&builder, "v0", EG_DTYPE_F32, 1, two);
  Onnx__NodeProto **nodes = EGI_NEW(&builder.arena, Onnx__NodeProto *, N);
  for (unsigned i = 0; i < N; i++) {
    snprintf(input, sizeof(input), "v%u", i);
    snprintf(output, sizeof(output), "v%u", i + 1);
    nodes[N - 1 - i] = build_loose_node(&builder, "Neg", input, output);
  }
  builder.graph->node = nodes;
  builder.graph->n_node = N;
  build_output(&builder, output);
  double start = egi_clock();
  egi_module *module = load(&builder);
  double seconds = egi_clock() - start;
  if (!(seconds < 4.0)) fail_msg("%g s", seconds);
  assert_string_equal(module->graphs[0]->values[module->graphs[0]->nodes[1].outputs[0]].name, "v1");
  egi_module_destroy(module);
  build_end(&builder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_unsorted),
      cmocka_unit_test(test_optional_names),
      cmocka_unit_test(test_constant_inputs),
      cmocka_unit_test(test_dims),
      cmocka_unit_test(test_attributes),
      cmocka_unit_test(test_scopes),
      cmocka_unit_test(test_scopes_are_completed),
      cmocka_unit_test(test_bodies),
      cmocka_unit_test(test_functions),
      cmocka_unit_test(test_many_nodes),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
