/* Graphs: building, editing, order, uses, attributes, constants, clones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "support_graph.h"

static egi_emitter emitter(graph_fixture *f) {
  return (egi_emitter){.graph = f->graph, .scope = "model.layers.0"};
}

static const char *name_of(graph_fixture *f, egi_value_id v) {
  return f->graph->values[v].name;
}

/* ---- values and names ----------------------------------------------------------------------------------------- */

static void test_names(void **state) {
  graph_fixture *f = *state;
  const egi_dim dims[2] = {graph_dim(f, "batch"), EGI_DIM_NONE};
  egi_value_id a, b, c;
  assert_int_equal(egi_graph_add_input(f->graph, "x", EG_DTYPE_F32, 2, dims, &a), EG_OK);
  assert_int_equal(egi_graph_add_input(f->graph, "x", EG_DTYPE_F32, 0, NULL, &b), EG_OK);
  assert_int_equal(egi_graph_add_value(f->graph, NULL, &c), EG_OK);
  assert_string_equal(name_of(f, a), "x");
  assert_string_not_equal(name_of(f, b), "x");
  assert_int_equal(egi_graph_find_value(f->graph, "x"), a);
  assert_int_equal(egi_graph_find_value(f->graph, name_of(f, c)), c);
  assert_int_equal(egi_graph_find_value(f->graph, "nothing"), 0);
  assert_string_equal(graph_type(f, a), "float[batch,x_dim1]"); /* an unknown size can be named and bound */
  assert_int_equal(egi_graph_rename_value(f->graph, b, "y"), EG_OK);
  assert_int_equal(egi_graph_find_value(f->graph, "y"), b);
  assert_int_equal(egi_graph_rename_value(f->graph, b, "x"), EG_OK); /* taken: another name */
  assert_int_equal(egi_graph_find_value(f->graph, "x"), a);
  assert_int_equal(egi_graph_find_value(f->graph, "y"), 0);
}

static void test_one_value_for_each_weight(void **state) {
  graph_fixture *f = *state;
  const egi_weight weight = {.name = "w", .dtype = EG_DTYPE_F16, .rank = 2, .dims = {3, 4}};
  const egi_weight deep = {.name = "deep", .dtype = EG_DTYPE_F16, .rank = 9};
  uint32_t index;
  egi_value_id a, b;
  assert_int_equal(egi_module_add_weight(f->module, &weight, &index), EG_OK);
  assert_int_equal(egi_graph_add_weight(f->graph, index, &a), EG_OK);
  assert_int_equal(egi_graph_add_weight(f->graph, index, &b), EG_OK);
  assert_int_equal(a, b);
  assert_string_equal(graph_type(f, a), "float16[3,4]");
  assert_int_equal(egi_graph_tidy(f->graph), EG_OK); /* nobody uses it */
  assert_int_equal(f->graph->values[a].kind, EGI_VALUE_NONE);
  assert_int_equal(egi_graph_add_weight(f->graph, index, &b), EG_OK);
  assert_int_not_equal(a, b);
  assert_string_equal(name_of(f, b), "w");
  assert_int_equal(egi_module_add_weight(f->module, &deep, &index), EG_ERROR_UNSUPPORTED);
}

static void test_states(void **state) {
  graph_fixture *f = *state;
  egi_state first = {.name = "a", .pool = EGI_POOL_PARAMETERS, .dtype = EG_DTYPE_F32, .rank = 2, .dims = {3, 5}};
  egi_state second = {.name = "b", .pool = EGI_POOL_PARAMETERS, .dtype = EG_DTYPE_F32, .rank = 1, .dims = {2}};
  uint32_t a, b, whole, again, step;
  egi_value_id value;
  assert_int_equal(egi_module_add_state(f->module, &first, &a), EG_OK);
  assert_int_equal(egi_module_add_state(f->module, &second, &b), EG_OK);
  assert_int_equal(f->module->states[a].offset, 0);
  assert_int_equal(f->module->states[b].offset, 16); /* 15 elements, then the next 64 bytes */
  assert_int_equal(f->module->pool_elements[EGI_POOL_PARAMETERS], 18);
  assert_int_equal(egi_module_add_pool_state(f->module, EGI_POOL_PARAMETERS, &whole), EG_OK);
  assert_int_equal(egi_module_add_pool_state(f->module, EGI_POOL_PARAMETERS, &again), EG_OK);
  assert_int_equal(whole, again);
  assert_int_equal(f->module->states[whole].dims[0], 18);
  assert_int_equal(f->module->pool_elements[EGI_POOL_PARAMETERS], 18);
  assert_int_equal(egi_module_add_pool_state(f->module, EGI_POOL_STEP, &step), EG_OK);
  assert_int_equal(f->module->states[step].dims[0], sizeof(egi_step_state));
  assert_int_equal(egi_graph_add_state(f->graph, a, &value), EG_OK);
  assert_string_equal(graph_type(f, value), "float[3,5]");
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

static void test_add_node_copies(void **state) {
  graph_fixture *f = *state;
  int64_t permutation[2] = {1, 0};
  char name[8] = "before";
  egi_value_id x = graph_value(f, "float[2,3]"), inputs[1] = {x}, outputs[1] = {0};
  egi_attribute perm = egi_attribute_ints("perm", permutation, 2);
  egi_node row = {.op = EGI_OP_Transpose, .name = name, .scope = name, .inputs = inputs, .outputs = outputs};
  egi_node_id id;
  row.n_inputs = row.n_outputs = row.n_attributes = 1;
  row.attributes = &perm;
  assert_int_equal(egi_graph_add_node(f->graph, &row, &id), EG_OK);
  permutation[0] = permutation[1] = 7;
  memset(name, 'x', 6);
  inputs[0] = 0;
  const egi_node *node = &f->graph->nodes[id];
  uint32_t count;
  assert_string_equal(node->name, "before");
  assert_string_equal(node->scope, "before");
  assert_int_equal(node->inputs[0], x);
  assert_int_equal(egi_node_ints(node, "perm", &count)[0], 1);
  assert_int_equal(count, 2);
  assert_int_equal(f->graph->values[node->outputs[0]].producer, id);
  assert_int_equal(egi_infer_node(f->graph, id), EG_OK);
  assert_string_equal(graph_type(f, node->outputs[0]), "float[3,2]");
}

static void test_outputs_of_nodes(void **state) {
  graph_fixture *f = *state;
  egi_value_id x = graph_value(f, "float[2,4]"), y;
  egi_value_id outputs[2] = {EGI_VALUE_UNWANTED, 0};
  egi_node split = {.op = EGI_OP_Split, .inputs = &x, .outputs = outputs, .n_inputs = 1, .n_outputs = 2};
  egi_node_id a, b;
  assert_int_equal(egi_graph_add_node(f->graph, &split, &a), EG_OK);
  assert_int_equal(f->graph->nodes[a].outputs[0], 0);
  y = f->graph->nodes[a].outputs[1];
  assert_int_not_equal(y, 0);
  outputs[0] = y; /* has a producer */
  assert_int_equal(egi_graph_add_node(f->graph, &split, &b), EG_ERROR_FORMAT);
  assert_non_null(strstr(eg_context_error(f->ctx), "is produced twice"));
  outputs[0] = x; /* an input of the graph */
  assert_int_equal(egi_graph_add_node(f->graph, &split, &b), EG_ERROR_FORMAT);
  const char *name = name_of(f, y);
  egi_graph_remove_node(f->graph, a);
  assert_int_equal(egi_graph_find_value(f->graph, name), 0);
  outputs[0] = y; /* comes back under its name */
  assert_int_equal(egi_graph_add_node(f->graph, &split, &b), EG_OK);
  assert_int_equal(egi_graph_find_value(f->graph, name), y);
  assert_int_equal(f->graph->values[y].producer, b);
}

static void test_replace(void **state) {
  graph_fixture *f = *state;
  egi_emitter emit = emitter(f);
  egi_value_id x = graph_value(f, "float[2]");
  egi_value_id a = egi_emit_unary(&emit, EGI_OP_Relu, x), b = egi_emit_unary(&emit, EGI_OP_Identity, a);
  egi_value_id c = egi_emit_unary(&emit, EGI_OP_Identity, b), d = egi_emit_binary(&emit, EGI_OP_Add, c, b);
  assert_int_equal(emit.status, EG_OK);
  assert_int_equal(egi_graph_add_output(f->graph, c), EG_OK);
  egi_value_id *map = calloc(f->graph->n_values, sizeof *map);
  map[c] = b;
  map[b] = a;
  egi_graph_replace_many(f->graph, map);
  const egi_node *add = &f->graph->nodes[f->graph->values[d].producer];
  assert_int_equal(add->inputs[0], a);
  assert_int_equal(add->inputs[1], a);
  assert_int_equal(f->graph->outputs[0], a);
  assert_int_equal(map[c], a); /* shortened */
  free(map);
  egi_graph_replace_uses(f->graph, a, x);
  assert_int_equal(add->inputs[0], x);
  assert_int_equal(f->graph->outputs[0], x);
  assert_true(egi_graph_is_output(f->graph, x));
  assert_false(egi_graph_is_output(f->graph, a));
}

static void test_uses(void **state) {
  graph_fixture *f = *state;
  egi_emitter emit = emitter(f);
  egi_value_id x = graph_value(f, "float[2]"), square = egi_emit_binary(&emit, EGI_OP_Mul, x, x);
  egi_value_id sum = egi_emit_binary(&emit, EGI_OP_Add, square, x);
  egi_uses uses;
  egi_arena arena;
  egi_arena_init(&arena, f->ctx, EGI_PURPOSE_GRAPH);
  assert_int_equal(egi_graph_uses(f->graph, &arena, &uses), EG_OK);
  assert_int_equal(uses.start[x + 1] - uses.start[x], 3);
  assert_int_equal(uses.list[uses.start[x]], f->graph->values[square].producer);
  assert_int_equal(uses.list[uses.start[x] + 2], f->graph->values[sum].producer);
  assert_int_equal(uses.start[square + 1] - uses.start[square], 1);
  assert_int_equal(uses.start[sum + 1] - uses.start[sum], 0);
  egi_arena_clear(&arena);
}

/* ---- order ---------------------------------------------------------------------------------------------------- */

static egi_value_id add_relu(graph_fixture *f, egi_value_id input, egi_value_id output) {
  const egi_node node = {.op = EGI_OP_Relu, .inputs = &input, .outputs = &output, .n_inputs = 1, .n_outputs = 1};
  egi_node_id id;
  assert_int_equal(egi_graph_add_node(f->graph, &node, &id), EG_OK);
  return f->graph->nodes[id].outputs[0];
}

static void test_tidy_order(void **state) {
  graph_fixture *f = *state;
  egi_value_id x = graph_value(f, "float[2]"), late;
  assert_int_equal(egi_graph_add_value(f->graph, "late", &late), EG_OK);
  egi_value_id a = add_relu(f, x, 0), b = add_relu(f, late, 0), c = add_relu(f, x, 0);
  add_relu(f, a, late);
  egi_value_id gone = add_relu(f, x, 0);
  egi_graph_remove_node(f->graph, f->graph->values[gone].producer);
  assert_int_equal(egi_graph_verify(f->graph), EG_ERROR_INTERNAL);
  assert_int_equal(egi_graph_tidy(f->graph), EG_OK);
  assert_int_equal(egi_graph_verify(f->graph), EG_OK);
  assert_int_equal(f->graph->n_nodes, 5);
  /* Stable: only what was out of order moved, to just before its consumer. */
  assert_int_equal(f->graph->values[a].producer, 1);
  assert_int_equal(f->graph->values[late].producer, 2);
  assert_int_equal(f->graph->values[b].producer, 3);
  assert_int_equal(f->graph->values[c].producer, 4);
  assert_int_equal(f->graph->values[gone].kind, EGI_VALUE_NONE);
}

static void test_tidy_cycle(void **state) {
  graph_fixture *f = *state;
  egi_value_id a, b;
  assert_int_equal(egi_graph_add_value(f->graph, "a", &a), EG_OK);
  assert_int_equal(egi_graph_add_value(f->graph, "b", &b), EG_OK);
  add_relu(f, a, b);
  add_relu(f, b, a);
  assert_int_equal(egi_graph_tidy(f->graph), EG_ERROR_FORMAT);
  assert_non_null(strstr(eg_context_error(f->ctx), "cycle"));
}

/* Long chains, in order and in the worst order, stay linear and do not recurse. */
static void test_long_graph(void **state) {
  graph_fixture *f = *state;
  enum { LENGTH = 100000 };
  egi_value_id *values = calloc(LENGTH + 1, sizeof *values);
  assert_non_null(values);
  values[0] = graph_value(f, "float[b,4]");
  for (int i = 1; i <= LENGTH; i++) assert_int_equal(egi_graph_add_value(f->graph, NULL, &values[i]), EG_OK);
  for (int i = LENGTH; i > 0; i--) add_relu(f, values[i - 1], values[i]);
  assert_int_equal(egi_graph_add_output(f->graph, values[LENGTH]), EG_OK);
  double start = egi_clock();
  assert_int_equal(egi_graph_tidy(f->graph), EG_OK);
  assert_int_equal(egi_infer_graph(f->graph), EG_OK);
  assert_int_equal(egi_graph_verify(f->graph), EG_OK);
  double seconds = egi_clock() - start;
  if (!(seconds < 2.0)) fail_msg("%d nodes took %.2f s", LENGTH, seconds);
  for (int i = 1; i <= LENGTH; i++) assert_int_equal(f->graph->values[values[i]].producer, i);
  assert_string_equal(graph_type(f, values[LENGTH]), "float[b,4]");
  free(values);
}

/* ---- attributes and constants --------------------------------------------------------------------------------- */

static void test_attributes(void **state) {
  graph_fixture *f = *state;
  egi_node_id id;
  uint32_t count = 5;
  assert_int_equal(graph_node(f, "Gelu", "float[2]", "approximate=tanh", 1, &id), EG_OK);
  const egi_node *node = &f->graph->nodes[id];
  assert_string_equal(egi_node_string(node, "approximate", "none"), "tanh");
  assert_string_equal(egi_node_string(node, "missing", "none"), "none");
  assert_int_equal(egi_node_int(node, "approximate", 3), 3); /* of another kind */
  assert_null(egi_node_ints(node, "missing", &count));
  assert_int_equal(count, 0);
  const egi_attribute none = egi_attribute_string("approximate", "none"), alpha = egi_attribute_float("alpha", 0.5f);
  assert_int_equal(egi_node_set_attribute(f->graph, id, &none), EG_OK);
  assert_int_equal(egi_node_set_attribute(f->graph, id, &alpha), EG_OK);
  node = &f->graph->nodes[id];
  assert_int_equal(node->n_attributes, 2);
  assert_string_equal(egi_node_string(node, "approximate", NULL), "none");
  assert_true(egi_node_float(node, "alpha", 0.0f) == 0.5f);
}

static void test_constants(void **state) {
  graph_fixture *f = *state;
  egi_emitter emit = emitter(f);
  const int64_t numbers[3] = {4, -1, INT64_MAX};
  int64_t out[3];
  uint32_t count = 0;
  double number = 0;
  egi_tensor tensor;
  egi_value_id list = egi_emit_integers(&emit, numbers, 3), half = egi_emit_scalar(&emit, 0.5, EG_DTYPE_BF16);
  egi_value_id yes = egi_emit_scalar(&emit, 2.0, EG_DTYPE_BOOL), x = graph_value(f, "int64[3]");
  assert_true(egi_value_integers(f->graph, list, out, 3, &count));
  assert_int_equal(count, 3);
  assert_memory_equal(out, numbers, sizeof out);
  assert_false(egi_value_integers(f->graph, list, out, 2, &count));
  assert_false(egi_value_integers(f->graph, x, out, 3, &count));
  assert_true(egi_value_scalar(f->graph, half, &number) && number == 0.5);
  assert_true(egi_value_scalar(f->graph, yes, &number) && number == 1.0);
  assert_false(egi_value_scalar(f->graph, list, &number));
  assert_false(egi_value_scalar(f->graph, x, &number));
  assert_true(egi_value_constant(f->graph, list, &tensor));
  assert_int_equal(tensor.dims[0], 3);
  assert_int_equal(tensor.strides[0], 1);
  assert_false(egi_value_constant(f->graph, x, &tensor));
  assert_int_equal(egi_emit_scalar(&emit, 1.0, EG_DTYPE_STRING), 0);
  assert_int_equal(emit.status, EG_ERROR_UNSUPPORTED);
}

static void test_dtypes(void **state) {
  uint64_t bytes = 0;
  (void)state;
  assert_int_equal(egi_dtype_from_name("bfloat16"), EG_DTYPE_BF16);
  assert_int_equal(egi_dtype_from_name("real"), EG_DTYPE_UNDEFINED);
  assert_string_equal(egi_dtype_name(EG_DTYPE_F8E4M3FN), "float8e4m3fn");
  assert_false(egi_dtype_is_known(0) || egi_dtype_is_known(27) || egi_dtype_is_known(-1));
  assert_true(egi_dtype_bytes(EG_DTYPE_I4, 5, &bytes) && bytes == 3);
  assert_true(egi_dtype_bytes(EG_DTYPE_U2, 5, &bytes) && bytes == 2);
  assert_true(egi_dtype_bytes(EG_DTYPE_F64, 5, &bytes) && bytes == 40);
  assert_false(egi_dtype_bytes(EG_DTYPE_F64, UINT64_MAX / 4, &bytes));
  assert_false(egi_dtype_bytes(EG_DTYPE_STRING, 1, &bytes));
  assert_int_equal(egi_op_find("", "MatMul"), EGI_OP_MatMul);
  assert_int_equal(egi_op_find("ai.onnx", "MatMul"), EGI_OP_MatMul);
  assert_int_equal(egi_op_find("engraft", "MatMul"), EGI_OP_UNKNOWN);
  assert_int_equal(egi_op_get(EGI_OP_Concat)->in_max, 255);
}

/* ---- emitters and clones -------------------------------------------------------------------------------------- */

static void test_emitter(void **state) {
  graph_fixture *f = *state;
  egi_emitter emit = emitter(f);
  egi_value_id x = graph_value(f, "float[b,4]"), many[3] = {9, 9, 9};
  egi_value_id y = egi_emit_unary(&emit, EGI_OP_Relu, x), z = egi_emit_unary(&emit, EGI_OP_Relu, x);
  assert_true(egi_has_prefix(name_of(f, y), "model.layers.0/Relu_"));
  assert_string_not_equal(name_of(f, y), name_of(f, z));
  assert_string_equal(f->graph->nodes[f->graph->values[y].producer].scope, "model.layers.0");
  assert_string_equal(graph_type(f, y), "float[b,4]");
  assert_int_equal(egi_emit_cast(&emit, y, EG_DTYPE_F32), y);
  assert_string_equal(graph_type(f, egi_emit_cast(&emit, y, EG_DTYPE_F16)), "float16[b,4]");
  const egi_value_id operands[2] = {x, egi_emit_scalar(&emit, 1.0, EG_DTYPE_F32)};
  egi_emit_many(&emit, EGI_OP_LayerNormalization, operands, 2, NULL, 0, many, 3);
  assert_int_equal(emit.status, EG_OK);
  assert_string_equal(graph_type(f, many[1]), "float[b,1]");
  assert_int_equal(egi_emit_binary(&emit, EGI_OP_MatMul, x, graph_value(f, "float[5,4]")), 0);
  assert_int_equal(emit.status, EG_ERROR_SHAPE);
  egi_emit_many(&emit, EGI_OP_LayerNormalization, operands, 2, NULL, 0, many, 3);
  assert_int_equal(many[0] + many[1] + many[2], 0);
  assert_int_equal(egi_graph_verify(f->graph), EG_OK);
}

static void test_clone(void **state) {
  graph_fixture *f = *state;
  egi_module *copy, *second;
  egi_emitter emit = emitter(f);
  egi_value_id x = graph_value(f, "float[b,4]");
  egi_value_id y = egi_emit_binary(&emit, EGI_OP_Mul, x, egi_emit_scalar(&emit, 2.0, EG_DTYPE_F32));
  assert_int_equal(egi_graph_add_output(f->graph, y), EG_OK);
  assert_int_equal(egi_module_clone(f->module, &copy), EG_OK);
  egi_graph *graph = copy->graphs[0];
  assert_int_equal(egi_graph_verify(graph), EG_OK);
  assert_ptr_equal(egi_module_find_graph(copy, "main"), graph);
  assert_null(egi_module_find_graph(copy, "other"));
  /* Editing the copy leaves the original alone, and the copy outlives it. */
  egi_emitter emit_copy = {.graph = graph};
  uint32_t n_nodes = f->graph->n_nodes, n_values = f->graph->n_values;
  egi_value_id z = egi_emit_unary(&emit_copy, EGI_OP_Relu, y);
  egi_graph_replace_uses(graph, x, z);
  assert_int_equal(f->graph->n_nodes, n_nodes);
  assert_int_equal(f->graph->n_values, n_values);
  assert_int_equal(f->graph->nodes[f->graph->values[y].producer].inputs[0], x);
  assert_int_equal(egi_module_clone(copy, &second), EG_OK);
  egi_module_destroy(copy);
  egi_module_destroy(f->module);
  f->module = second;
  assert_true(egi_has_prefix(second->graphs[0]->values[y].name, "model.layers.0/Mul_"));
  double number = 0;
  egi_value_id two = second->graphs[0]->nodes[second->graphs[0]->values[y].producer].inputs[1];
  assert_true(egi_value_scalar(second->graphs[0], two, &number) && number == 2.0);
  assert_int_equal(egi_dim_symbol(second->dims, "b"), second->graphs[0]->values[x].dims[0]);
}

int main(void) {
#define TEST(function) cmocka_unit_test_setup_teardown(function, graph_setup, graph_teardown)
  const struct CMUnitTest tests[] = {
      TEST(test_names),
      TEST(test_one_value_for_each_weight),
      TEST(test_states),
      TEST(test_add_node_copies),
      TEST(test_outputs_of_nodes),
      TEST(test_replace),
      TEST(test_uses),
      TEST(test_tidy_order),
      TEST(test_tidy_cycle),
      TEST(test_long_graph),
      TEST(test_attributes),
      TEST(test_constants),
      TEST(test_dtypes),
      TEST(test_emitter),
      TEST(test_clone),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
