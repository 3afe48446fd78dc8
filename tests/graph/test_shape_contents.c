/* Known contents: shape arithmetic as exporters write it comes out as expressions over the input's dims. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "support_graph.h"

/* ---- chains --------------------------------------------------------------------------------------------------- */

typedef struct chain {
  graph_fixture *f;
  egi_emitter emit;
  egi_value_id x; /* float[batch,sequence,64] */
} chain;

static chain start(void **state) {
  chain c = {.f = *state};
  c.emit.graph = c.f->graph;
  c.x = graph_value(c.f, "float[batch,sequence,64]");
  return c;
}

static void expect(chain *c, egi_value_id value, const char *type) {
  if (c->emit.status != EG_OK) fail_msg("%s", eg_context_error(c->f->ctx));
  assert_string_equal(graph_type(c->f, value), type);
}

/* The size of x at `axis`, as an int64 scalar: Gather(Shape(x), axis). */
static egi_value_id size_at(chain *c, int axis) {
  egi_value_id shape = egi_emit_unary(&c->emit, EGI_OP_Shape, c->x);
  return egi_emit_binary(&c->emit, EGI_OP_Gather, shape, egi_emit_scalar(&c->emit, axis, EG_DTYPE_I64));
}

static egi_value_id number(chain *c, double value) {
  return egi_emit_scalar(&c->emit, value, EG_DTYPE_I64);
}

static egi_value_id list(chain *c, int64_t value) {
  return egi_emit_integers(&c->emit, &value, 1);
}

static egi_value_id unsqueezed(chain *c, egi_value_id scalar) {
  return egi_emit_binary(&c->emit, EGI_OP_Unsqueeze, scalar, list(c, 0));
}

static egi_value_id joined(chain *c, const egi_value_id *values, unsigned count) {
  const egi_attribute axis = egi_attribute_int("axis", 0);
  return egi_emit(&c->emit, EGI_OP_Concat, values, count, &axis, 1);
}

static void test_reshape_chain(void **state) {
  chain c = start(state);
  const egi_value_id parts[4] = {unsqueezed(&c, size_at(&c, 0)), unsqueezed(&c, size_at(&c, 1)), list(&c, -1),
                                 list(&c, 16)};
  egi_value_id shape = joined(&c, parts, 4);
  expect(&c, shape, "int64[4]{batch,sequence,-1,16}");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Reshape, c.x, shape), "float[batch,sequence,4,16]");
}

/* TorchScript's expand: -1 keeps a dim, written as Where(shape == -1, 1, shape). */
static void test_expand_chain(void **state) {
  chain c = start(state);
  const egi_value_id parts[3] = {unsqueezed(&c, size_at(&c, 0)), list(&c, -1), unsqueezed(&c, size_at(&c, 1))};
  egi_value_id wanted = joined(&c, parts, 3);
  int64_t one = 1;
  egi_weight filled = {.name = "one", .dtype = EG_DTYPE_I64, .rank = 1, .dims = {1}};
  uint32_t weight;
  filled.bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = (const uint8_t *)&one, .size_bytes = sizeof one};
  assert_int_equal(egi_module_add_weight(c.f->module, &filled, &weight), EG_OK);
  const egi_attribute value = {.name = "value", .kind = EGI_ATTRIBUTE_TENSOR, .u.weight = weight};
  egi_value_id length = egi_emit_unary(&c.emit, EGI_OP_Shape, wanted);
  egi_value_id ones = egi_emit(&c.emit, EGI_OP_ConstantOfShape, &length, 1, &value, 1);
  expect(&c, ones, "int64[3]{1,1,1}");
  egi_value_id minus = egi_emit_binary(&c.emit, EGI_OP_Mul, ones, number(&c, -1));
  egi_value_id is_kept = egi_emit_binary(&c.emit, EGI_OP_Equal, wanted, minus);
  expect(&c, is_kept, "bool[3]{0,1,0}");
  const egi_value_id choice[3] = {is_kept, ones, wanted};
  egi_value_id shape = egi_emit(&c.emit, EGI_OP_Where, choice, 3, NULL, 0);
  expect(&c, shape, "int64[3]{batch,1,sequence}");
  egi_value_id small = graph_value(c.f, "bool[7,1]");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Expand, small, shape), "bool[batch,7,sequence]");
}

static void test_arithmetic(void **state) {
  chain c = start(state);
  egi_value_id s = size_at(&c, 1);
  egi_value_id twice = egi_emit_binary(&c.emit, EGI_OP_Mul, s, number(&c, 2));
  egi_value_id more = egi_emit_binary(&c.emit, EGI_OP_Add, twice, number(&c, 2));
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Div, more, number(&c, 2)), "int64{sequence + 1}");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Mod, more, number(&c, 2)), "int64{0}");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Sub, s, s), "int64{0}");
  expect(&c, egi_emit_unary(&c.emit, EGI_OP_Neg, s), "int64{-sequence}");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Max, more, s), "int64{2*sequence + 2}");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Div, number(&c, -7), number(&c, 2)), "int64{-3}");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Greater, more, s), "bool{1}");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_LessOrEqual, more, s), "bool{0}");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Equal, s, number(&c, 5)), "bool");
  expect(&c, egi_emit_cast(&c.emit, s, EG_DTYPE_BOOL), "bool{1}");
  expect(&c, egi_emit_cast(&c.emit, s, EG_DTYPE_I32), "int32{sequence}");
  expect(&c, egi_emit_unary(&c.emit, EGI_OP_Size, c.x), "int64{64*batch*sequence}");
}

static void test_ranges_and_slices(void **state) {
  chain c = start(state);
  egi_value_id s = size_at(&c, 1);
  const egi_value_id bounds[3] = {number(&c, 3), egi_emit_binary(&c.emit, EGI_OP_Add, s, number(&c, 3)), number(&c, 1)};
  expect(&c, egi_emit(&c.emit, EGI_OP_Range, bounds, 3, NULL, 0), "int64[sequence]");
  const egi_value_id last[4] = {egi_emit_unary(&c.emit, EGI_OP_Shape, c.x), list(&c, -1), list(&c, INT64_MAX),
                                list(&c, 0)};
  expect(&c, egi_emit(&c.emit, EGI_OP_Slice, last, 4, NULL, 0), "int64[1]{64}");
  const egi_value_id all[5] = {last[0], list(&c, -1), list(&c, INT64_MIN), list(&c, 0), list(&c, -1)};
  expect(&c, egi_emit(&c.emit, EGI_OP_Slice, all, 5, NULL, 0), "int64[3]{64,sequence,batch}");
  /* A table of 1024 positions cut to the sequence: adding it says that the sequence is not longer. */
  egi_value_id table = graph_value(c.f, "float[1024,64]");
  const egi_value_id cut[4] = {table, list(&c, 0), unsqueezed(&c, s), list(&c, 0)};
  egi_value_id positions = egi_emit(&c.emit, EGI_OP_Slice, cut, 4, NULL, 0);
  expect(&c, positions, "float[min(sequence, 1024),64]");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Add, c.x, positions), "float[batch,sequence,64]");
  const egi_binding fits = {graph_dim(c.f, "sequence"), 1024}, exceeds = {graph_dim(c.f, "sequence"), 1025};
  assert_null(egi_dims_check(c.f->module->dims, &fits, 1));
  const char *violated = egi_dims_check(c.f->module->dims, &exceeds, 1);
  assert_non_null(violated);
  assert_non_null(strstr(violated, "min(sequence, 1024)"));
}

static void test_partly_known(void **state) {
  chain c = start(state);
  egi_value_id unknown = graph_value(c.f, "int64[1]");
  const egi_value_id parts[2] = {unknown, unsqueezed(&c, size_at(&c, 2))};
  egi_value_id shape = joined(&c, parts, 2);
  expect(&c, shape, "int64[2]{?,64}");
  expect(&c, egi_emit_binary(&c.emit, EGI_OP_Reshape, c.x, shape), "float[batch*sequence,64]");
  egi_value_id picked = egi_emit_binary(&c.emit, EGI_OP_Gather, shape, number(&c, -1));
  expect(&c, picked, "int64{64}");
  egi_emit_binary(&c.emit, EGI_OP_Gather, shape, number(&c, 2));
  assert_int_equal(c.emit.status, EG_ERROR_SHAPE);
  assert_non_null(strstr(eg_context_error(c.f->ctx), "index 2 is outside of 2 elements"));
  assert_int_equal(egi_emit_unary(&c.emit, EGI_OP_Relu, c.x), 0); /* errors are sticky */
}

/* ---- declared types ------------------------------------------------------------------------------------------- */

static eg_status infer_declared(graph_fixture *f, eg_dtype dtype, int rank, const egi_dim *dims, egi_value_id *out) {
  egi_value_id x = graph_value(f, "float[batch,8]"), y;
  egi_node_id node;
  assert_int_equal(egi_graph_add_value(f->graph, NULL, &y), EG_OK);
  f->graph->values[y].dtype = dtype;
  f->graph->values[y].rank = rank;
  for (int i = 0; i < rank; i++) f->graph->values[y].dims[i] = dims[i];
  const egi_node relu = {.op = EGI_OP_Relu, .inputs = &x, .outputs = &y, .n_inputs = 1, .n_outputs = 1};
  assert_int_equal(egi_graph_add_node(f->graph, &relu, &node), EG_OK);
  *out = y;
  return egi_infer_node(f->graph, node);
}

static void test_declared(void **state) {
  graph_fixture *f = *state;
  const egi_dim good[2] = {graph_dim(f, "other"), graph_dim(f, "8")},
                bad[2] = {graph_dim(f, "batch"), graph_dim(f, "9")};
  egi_value_id y;
  assert_int_equal(infer_declared(f, EG_DTYPE_UNDEFINED, -1, NULL, &y), EG_OK);
  assert_string_equal(graph_type(f, y), "float[batch,8]");
  assert_int_equal(infer_declared(f, EG_DTYPE_F32, 2, good, &y), EG_OK);
  assert_string_equal(graph_type(f, y), "float[batch,8]");
  assert_int_equal(infer_declared(f, EG_DTYPE_F32, 2, bad, &y), EG_ERROR_SHAPE);
  assert_non_null(strstr(eg_context_error(f->ctx), "has 8 at axis 1, but 9 is declared"));
  assert_int_equal(infer_declared(f, EG_DTYPE_F32, 1, good, &y), EG_ERROR_SHAPE);
  assert_non_null(strstr(eg_context_error(f->ctx), "has 2 dimensions, but 1 are declared"));
  assert_int_equal(infer_declared(f, EG_DTYPE_I64, 2, good, &y), EG_ERROR_SHAPE);
  assert_non_null(strstr(eg_context_error(f->ctx), "is float, but int64 is declared"));
  egi_graph_forget_types(f->graph);
  assert_int_equal(egi_infer_graph(f->graph), EG_OK);
  assert_string_equal(graph_type(f, y), "float[batch,8]");
}

int main(void) {
#define TEST(function) cmocka_unit_test_setup_teardown(function, graph_setup, graph_teardown)
  const struct CMUnitTest tests[] = {
      TEST(test_reshape_chain),     TEST(test_expand_chain), TEST(test_arithmetic),
      TEST(test_ranges_and_slices), TEST(test_partly_known), TEST(test_declared),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
