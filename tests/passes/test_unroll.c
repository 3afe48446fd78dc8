/* unroll_loops: control flow whose course is known becomes plain nodes that compute what an eager run computes; other
 * control flow stays. Graphs with bodies are made by hand, since the text syntax has none. */
#include "support_passes.h"

#include <string.h>

typedef struct control_case {
  egi_op op;
  int64_t count; /* trip count or condition; -1: an input of the graph, not known */
} control_case;

static egi_value_id add_input(egi_graph *graph, const char *name, eg_dtype dtype, int rank, const egi_dim *dims) {
  egi_value_id id = 0;
  assert_int_equal(egi_graph_add_input(graph, name, dtype, rank, dims, &id), EG_OK);
  return id;
}

static void add_output(egi_graph *graph, egi_value_id value) {
  assert_int_equal(egi_graph_add_output(graph, value), EG_OK);
}

/* A body: [number, condition | nothing], state, scanned?, captured -> [condition], state · captured, sum. */
static egi_graph *make_body(pass_fixture *fixture, egi_op op, double sign) {
  egi_module *module = fixture->module;
  egi_graph *body;
  egi_dim three = egi_dim_constant(module->dims, 3);
  egi_value_id condition = 0, scanned = 0, state = 0;
  assert_int_equal(egi_graph_create(module, "body", &body), EG_OK);
  if (op == EGI_OP_Loop) add_input(body, "number", EG_DTYPE_I64, 0, NULL);
  if (op == EGI_OP_Loop) condition = add_input(body, "condition", EG_DTYPE_BOOL, 0, NULL);
  if (op != EGI_OP_If) state = add_input(body, "state", EG_DTYPE_F32, 1, &three);
  if (op == EGI_OP_Scan) scanned = add_input(body, "scanned", EG_DTYPE_F32, 1, &three);
  egi_value_id captured = add_input(body, "captured", EG_DTYPE_F32, 1, &three);
  egi_emitter emit = {.graph = body};
  egi_value_id other = op == EGI_OP_If ? egi_emit_scalar(&emit, sign, EG_DTYPE_F32) : state;
  egi_value_id product = egi_emit_binary(&emit, EGI_OP_Mul, captured, other);
  if (scanned != 0) product = egi_emit_binary(&emit, EGI_OP_Add, product, scanned);
  const egi_attribute none = egi_attribute_int("keepdims", 0);
  egi_value_id sum = egi_emit(&emit, EGI_OP_ReduceSum, &product, 1, &none, 1);
  if (op == EGI_OP_Loop) add_output(body, egi_emit_unary(&emit, EGI_OP_Identity, condition));
  assert_int_equal(emit.status, EG_OK);
  add_output(body, product);
  add_output(body, sum);
  return body;
}

/* x [3], s [4, 3], n (count or condition) -> product, sums */
static void make_graph(pass_fixture *fixture, const control_case *c) {
  egi_attribute attributes[3] = {egi_attribute_int(EGI_CAPTURES, 1)};
  egi_value_id inputs[4], outputs[2] = {0, 0};
  egi_node node = {.op = c->op, .name = "control", .inputs = inputs, .outputs = outputs, .attributes = attributes};
  egi_node_id id;
  pass_graph(fixture, "(float[3] x, float[4,3] s, int64 n, bool b) => () { }");
  egi_graph *graph = fixture->graph;
  egi_emitter emit = {.graph = graph};
  bool is_if = c->op == EGI_OP_If;
  if (c->count < 0)
    inputs[0] = egi_graph_find_value(graph, is_if ? "b" : "n");
  else
    inputs[0] = egi_emit_scalar(&emit, (double)c->count, is_if ? EG_DTYPE_BOOL : EG_DTYPE_I64);
  egi_value_id x = egi_graph_find_value(graph, "x"), s = egi_graph_find_value(graph, "s");
  const egi_value_id loop[4] = {inputs[0], 0, x, x}, scan[3] = {x, s, x}, branch[2] = {inputs[0], x};
  node.n_inputs = c->op == EGI_OP_Loop ? 4 : c->op == EGI_OP_Scan ? 3 : 2;
  memcpy(inputs,
         c->op == EGI_OP_Loop   ? loop
         : c->op == EGI_OP_Scan ? scan
                                : branch,
         node.n_inputs * sizeof(egi_value_id));
  attributes[1] = (egi_attribute){.name = is_if ? "then_branch" : "body", .kind = EGI_ATTRIBUTE_GRAPH};
  attributes[1].u.graph = make_body(fixture, c->op, 2.0);
  attributes[2] = egi_attribute_int("num_scan_inputs", 1);
  if (is_if) attributes[2] = (egi_attribute){.name = "else_branch", .kind = EGI_ATTRIBUTE_GRAPH};
  if (is_if) attributes[2].u.graph = make_body(fixture, c->op, -3.0);
  node.n_attributes = 3;
  node.n_outputs = 2;
  assert_int_equal(egi_graph_add_node(graph, &node, &id), EG_OK);
  for (unsigned i = 0; i < 2; i++) add_output(graph, graph->nodes[id].outputs[i]);
  assert_int_equal(egi_graph_tidy(graph), EG_OK);
  assert_int_equal(egi_infer_graph(graph), EG_OK);
}

static void run_graph(pass_fixture *fixture, egi_arena *arena, egi_tensor *outputs) {
  float x[3] = {1.5f, -2.0f, 0.5f}, s[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  int64_t n = 3;
  uint8_t b = 0;
  egi_store *store;
  egi_tensor inputs[4] = {{.data = x, .dtype = EG_DTYPE_F32, .rank = 1, .dims = {3}},
                          {.data = s, .dtype = EG_DTYPE_F32, .rank = 2, .dims = {4, 3}},
                          {.data = &n, .dtype = EG_DTYPE_I64},
                          {.data = &b, .dtype = EG_DTYPE_BOOL}};
  for (unsigned i = 0; i < 4; i++) egi_tensor_set_contiguous(&inputs[i]);
  assert_int_equal(egi_store_create(fixture->ctx, fixture->module, egi_backend_cpu(), &store), EG_OK);
  if (egi_eager_run(store, fixture->graph, inputs, arena, outputs) != EG_OK)
    fail_msg("%s", eg_context_error(fixture->ctx));
  egi_store_destroy(store);
}

static void check_case(pass_fixture *fixture, const control_case *c) {
  egi_arena arena;
  egi_tensor before[2], after[2];
  egi_arena_init(&arena, fixture->ctx, EGI_PURPOSE_STEP);
  make_graph(fixture, c);
  run_graph(fixture, &arena, before);
  bool is_known = c->count >= 0 || c->op == EGI_OP_Scan;
  pass_run_settled(fixture, "unroll_loops");
  assert_int_equal(pass_count(fixture, c->op), is_known ? 0 : 1);
  run_graph(fixture, &arena, after);
  for (unsigned i = 0; i < 2; i++) {
    assert_int_equal(before[i].rank, after[i].rank);
    assert_int_equal(egi_tensor_count(&before[i]), egi_tensor_count(&after[i]));
    size_t size_bytes = (size_t)egi_tensor_count(&before[i]) * sizeof(float);
    assert_memory_equal(before[i].data, after[i].data, size_bytes);
  }
  egi_arena_clear(&arena);
}

static void known_control_flow_becomes_plain(void **state) {
  static const control_case cases[] = {{EGI_OP_If, 1},   {EGI_OP_If, 0},    {EGI_OP_If, -1},  {EGI_OP_Loop, 1},
                                       {EGI_OP_Loop, 4}, {EGI_OP_Loop, -1}, {EGI_OP_Scan, -1}};
  for (size_t i = 0; i < EGI_COUNT(cases); i++) check_case(*state, &cases[i]);
}

/* x = (1.5, -2, 0.5): three times squared by hand. */
static void loops_compute_what_they_say(void **state) {
  pass_fixture *fixture = *state;
  const control_case c = {EGI_OP_Loop, 2};
  egi_arena arena;
  egi_tensor outputs[2];
  egi_arena_init(&arena, fixture->ctx, EGI_PURPOSE_STEP);
  make_graph(fixture, &c);
  run_graph(fixture, &arena, outputs);
  const float *y = outputs[0].data, *sums = outputs[1].data;
  assert_true(y[0] == 3.375f && y[1] == -8.0f && y[2] == 0.125f);
  assert_int_equal(outputs[1].dims[0], 2);
  assert_true(sums[0] == 6.5f && sums[1] == -4.5f);
  egi_arena_clear(&arena);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(known_control_flow_becomes_plain), TEST(loops_compute_what_they_say)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
