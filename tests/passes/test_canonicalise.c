/* The canonicalise stage: text in, nodes out, and a second run changes nothing. */
#include "support_passes.h"

#include <stdio.h>
#include <string.h>

/* ---- inline_functions ------------------------------------------------------------------------------------------- */

static const char *const nested_functions =
    "<ir_version: 10, opset_import: [\"\": 23, \"L\": 1]>\n"
    "g (float[n,4] x) => (float[n,4] y, float[n,4] z)\n"
    "{ y = L.twice <axis = 1> (x)  z = L.outer (y) }\n"
    "<domain: \"L\", opset_import: [\"\": 23]>\n"
    "twice <axis> (a) => (c) { b = Softmax <axis: int = @axis> (a)  c = Softmax <axis: int = @absent> (b) }\n"
    "<domain: \"L\", opset_import: [\"\": 23, \"L\": 1]>\n"
    "outer <axis: int = 0> (a) => (c) { b = L.twice <axis: int = @axis> (a)  c = Neg (b) }\n";

static void calls_become_bodies(void **state) {
  pass_fixture *fixture = *state;
  pass_parse(fixture, nested_functions);
  pass_run_settled(fixture, "inline_functions");
  pass_expect(fixture, "%1 = Softmax<axis=1>(x)\n"
                       "%2 = Softmax(%1)\n"
                       "%3 = Softmax<axis=0>(%2)\n"
                       "%4 = Softmax(%3)\n"
                       "%5 = Neg(%4)\n"
                       "-> y=%2\n-> z=%5\n");
}

static void a_function_may_pass_its_input_on(void **state) {
  pass_fixture *fixture = *state;
  pass_parse(fixture, "<ir_version: 10, opset_import: [\"\": 23, \"L\": 1]>\n"
                      "g (float[n] x) => (float[n] y, float[n] z) { y, z = L.same (x) }\n"
                      "<domain: \"L\", opset_import: [\"\": 23]>\n"
                      "same (a) => (a, b) { b = Neg (a) }\n");
  pass_run(fixture, "inline_functions", NULL);
  pass_expect(fixture, "%1 = Neg(x)\n%2 = Identity(x)\n"
                       "-> y=%2\n-> z=%1\n");
}

static void recursion_names_the_function(void **state) {
  pass_fixture *fixture = *state;
  pass_parse(fixture, "<ir_version: 10, opset_import: [\"\": 23, \"L\": 1]>\n"
                      "g (float[n] x) => (float[n] y) { y = L.ping (x) }\n"
                      "<domain: \"L\", opset_import: [\"\": 23, \"L\": 1]>\nping (a) => (b) { b = L.pong (a) }\n"
                      "<domain: \"L\", opset_import: [\"\": 23, \"L\": 1]>\npong (a) => (b) { b = L.ping (a) }\n");
  assert_int_equal(pass_try(fixture, "inline_functions", NULL), EG_ERROR_FORMAT);
  pass_expect_error(fixture, "function ping calls itself");
}

/* The innermost function is called first, so that each level alone looks shallow. */
static void deep_nesting_is_refused(void **state) {
  pass_fixture *fixture = *state;
  egi_text text;
  egi_text_init(&text, fixture->ctx);
  egi_text_add(&text, "<ir_version: 10, opset_import: [\"\": 23, \"L\": 1]>\ng (float[n] v150) => (float[n] v0) {");
  for (int level = 149; level >= 0; level--) egi_text_format(&text, " v%d = L.f%d (v%d)", level, level, level + 1);
  egi_text_add(&text, " }\n");
  for (int level = 0; level < 150; level++) {
    egi_text_format(&text, "<domain: \"L\", opset_import: [\"\": 23, \"L\": 1]>\nf%d (a) => (b) { ", level);
    if (level == 149)
      egi_text_add(&text, "b = Neg (a) }\n");
    else
      egi_text_format(&text, "b = L.f%d (a) }\n", level + 1);
  }
  pass_parse(fixture, egi_text_string(&text));
  egi_text_free(&text);
  assert_int_equal(pass_try(fixture, "inline_functions", NULL), EG_ERROR_FORMAT);
  pass_expect_error(fixture, "nested more than 100 deep");
}

/* Each function calls the next one ten times: 10^12 nodes. */
static void an_explosion_is_refused(void **state) {
  pass_fixture *fixture = *state;
  egi_text text;
  egi_text_init(&text, fixture->ctx);
  egi_text_add(&text, "<ir_version: 10, opset_import: [\"\": 23, \"L\": 1]>\n"
                      "g (float[n] x) => (float[n] y) { y = L.f0 (x) }\n");
  for (int level = 0; level < 12; level++) {
    egi_text_format(&text, "<domain: \"L\", opset_import: [\"\": 23, \"L\": 1]>\nf%d (v0) => (v10) {", level);
    for (int i = 0; i < 10; i++) {
      if (level == 11)
        egi_text_format(&text, " v%d = Neg (v%d)", i + 1, i);
      else
        egi_text_format(&text, " v%d = L.f%d (v%d)", i + 1, level + 1, i);
    }
    egi_text_add(&text, " }\n");
  }
  egi_module *module = NULL;
  assert_int_equal(egi_module_parse(fixture->ctx, egi_text_string(&text), text.length, &module), EG_OK);
  egi_text_free(&text);
  egi_pass_report report = {0};
  egi_pass_run run = {.ctx = fixture->ctx, .report = &report};
  assert_int_equal(egi_pass_inline_functions(&run, module->graphs[0]), EG_ERROR_BUDGET);
  pass_expect_error(fixture, "expand to more than");
  egi_module_destroy(module);
}

/* ---- fold_constants --------------------------------------------------------------------------------------------- */

static void constants_are_evaluated(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(float[n] x) => (float[n] y) <float a = {2}, float b = {3}, int64[2] i = {4, 5}, int64[2] j = {1, 1}>\n"
             "{ c = Mul (a, b)  d = Add (c, a)  y = Mul (x, d) k = Add (i, j) unused = Reshape (x, k) }");
  pass_run_settled(fixture, "fold_constants");
  pass_expect(fixture, "%1 = Mul(x, 8)\n%2 = Reshape(x, {5,6})\n-> y=%1\n");
}

static void without_an_evaluator_nothing_is_folded(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[n] x) => (float[n] y) <float a = {2}> { c = Neg (a)  y = Mul (x, c) }");
  fixture->module->evaluator = NULL;
  pass_run_settled(fixture, "fold_constants");
  pass_expect(fixture, "%1 = Neg(2)\n%2 = Mul(x, %1)\n-> y=%2\n");
}

static void parameters_are_not_folded(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(
      fixture,
      "(float[n,2] x) => (float[n,3] y) <float[3,2] \"lm.weight\" = {1,2,3,4,5,6}, float[3] \"n.weight\" = {1,2,3},"
      " float one = {1}>\n"
      "{ t = Transpose (\"lm.weight\")  z = MatMul (x, t)  s = Add (\"n.weight\", one)  y = Mul (z, s) }");
  pass_run_settled(fixture, "fold_constants");
  pass_expect(fixture,
              "%1 = Transpose(lm.weight)\n%2 = MatMul(x, %1)\n%3 = Add(n.weight, 1)\n%4 = Mul(%2, %3)\n-> y=%4\n");
}

static void sizes_that_constants_decide_are_known(void **state) {
  pass_fixture *fixture = *state;
  int64_t size = 0;
  pass_graph(fixture, "(float[4] x) => (float[?] y) <bool[4] m = {1,0,1,1}, int64[1] a = {0}>\n"
                      "{ i = NonZero (m)  f = Squeeze (i, a)  y = Gather (x, f) }");
  pass_run_settled(fixture, "fold_constants");
  pass_expect(fixture, "%1 = Gather(x, {0,2,3})\n-> y=%1\n");
  const egi_value *y = &fixture->graph->values[fixture->graph->outputs[0]];
  assert_true(egi_dim_value(fixture->module->dims, egi_dim_resolve(fixture->module->dims, y->dims[0]), &size));
  assert_int_equal(size, 3);
}

static void a_large_result_is_not_folded(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[1024,1024] x) => (float[1024,1024] y) <int64[2] s = {1024, 1024}>\n"
                      "{ c = ConstantOfShape (s)  y = Add (x, c) }");
  pass_run_settled(fixture, "fold_constants");
  assert_int_equal(pass_count(fixture, EGI_OP_ConstantOfShape), 1);
}

/* ---- fold_shapes ------------------------------------------------------------------------------------------------ */

static void reshape_targets_become_constants(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[batch,seq,64] x) => (float[batch,seq,4,16] y, float[\"batch*seq\",64] z)\n"
                      "<int64[1] heads = {4}, int64[1] rest = {16}, int64[1] width = {64}, int64[1] all = {-1}>\n"
                      "{ b = Shape <start = 0, end = 1> (x)  s = Shape <start = 1, end = 2> (x)\n"
                      "  t = Concat <axis = 0> (b, s, heads, rest)  y = Reshape <allowzero = 1> (x, t)\n"
                      "  m = Mul (b, s)  u = Concat <axis = 0> (m, width)  z = Reshape (x, u) }");
  pass_run_settled(fixture, "fold_shapes");
  pass_run_settled(fixture, "eliminate_dead");
  pass_expect(fixture, "%1 = Reshape<allowzero=0>(x, {0,0,4,16})\n%2 = Reshape(x, {-1,64})\n-> y=%1\n-> z=%2\n");
}

static void two_unknown_dims_stay(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[a,b] x) => (float[b,a] y)\n"
                      "{ p = Shape <start = 1, end = 2> (x)  q = Shape <start = 0, end = 1> (x)\n"
                      "  t = Concat <axis = 0> (p, q)  y = Reshape (x, t) }");
  pass_run_settled(fixture, "fold_shapes");
  assert_int_equal(pass_count(fixture, EGI_OP_Concat), 1);
}

static void known_integers_become_constants(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(
      fixture,
      "(float[n,6] x) => (float[n,3] y) <int64 one = {1}, int64 two = {2}, int64[1] zero = {0}, int64[1] ax = {1}>\n"
      "{ s = Shape (x)  g = Gather <axis = 0> (s, one)  h = Div (g, two)  e = Unsqueeze (h, zero)\n"
      "  y = Slice (x, zero, e, ax) }");
  pass_run_settled(fixture, "fold_shapes");
  pass_run_settled(fixture, "eliminate_dead");
  pass_expect(fixture, "%1 = Slice(x, {0}, {3}, {1})\n-> y=%1\n");
}

static void expand_keeps_what_it_can(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(
      fixture,
      "(float[b,2,1,s,16] x) => (float[b,2,2,s,16] y, float[b,2,1,s,16] z) <int64[1] two = {2}, int64[1] d = {16}>\n"
      "{ p = Shape <start = 0, end = 1> (x)  q = Shape <start = 3, end = 4> (x)\n"
      "  t = Concat <axis = 0> (p, two, two, q, d)  y = Expand (x, t)\n"
      "  a = Abs (x) whole = Shape (a)  e = Expand (a, whole)  z = Neg (e) }");
  pass_run_settled(fixture, "fold_shapes");
  pass_run_settled(fixture, "eliminate_dead");
  pass_expect(fixture, "%1 = Expand(x, {1,1,2,1,1})\n%2 = Abs(x)\n%3 = Neg(%2)\n-> y=%1\n-> z=%3\n");
}

/* ---- eliminate_identity ----------------------------------------------------------------------------------------- */

static void what_changes_nothing_goes(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(float[n,4] x) => (float[n,4] y) <float zero = {0}, float one = {1}, int64[2] same = {0, 4},\n"
             " int64[1] from = {0}, int64[1] to = {9223372036854775807}>\n"
             "{ a = Identity (x)  b = Cast <to = 1> (a)  c = Reshape (b, same)  d = Add (c, zero)  e = Mul (one, d)\n"
             "  f = Div (e, one)  g = Sub (f, zero)  h = Transpose <perm = [0, 1]> (g)  i = Slice (h, from, to)\n"
             "  j = Concat <axis = 0> (i)  k = Neg (j)  y = Identity (k) }");
  pass_run_settled(fixture, "eliminate_identity");
  pass_expect(fixture, "%1 = Neg(x)\n-> y=%1\n");
}

static void signs_shapes_and_empty_parts_are_cleared(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(
      fixture,
      "(float[n,4] x, float[n,4] z) => (float[n,4] y) <float minus = {-1}, int64[1] a0 = {0}, int64[1] a1 = {1}, "
      "int64[1] four = {4}, int64[1] end = {9223372036854775807}>\n"
      "{ a = Mul (minus, z)  b = Add (a, x)  c = Unsqueeze (b, a0)  d = Unsqueeze (c, a0)  e = Squeeze (d, a0)\n"
      "  f = Squeeze (e, a0)  r = Slice (x, four, end, a1)  g = Concat <axis = -1> (f, r)  h = Div (g, minus)\n"
      "  k = Relu (h)  y = Identity (k) }");
  pass_run(fixture, "eliminate_identity", NULL);
  pass_run_settled(fixture, "eliminate_identity");
  pass_run_settled(fixture, "eliminate_dead");
  pass_expect(fixture, "%1 = Sub(x, z)\n%2 = Neg(%1)\n%3 = Relu(%2)\n-> y=%3\n");
}

static void what_changes_something_stays(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(float[n,4] x, float s) => (float[n,4] y, float[1,1] z, float[n,4] r) <float zero = {0}, float[1,1] wide "
             "= {0},\n"
             " int64[1] from = {-1}, int64[1] to = {-9223372036854775808}, int64[1] axis = {1}, int64[1] back = {-1}>\n"
             "{ y = Sub (zero, x)  z = Add (s, wide)  r = Slice (x, from, to, axis, back) }");
  pass_run_settled(fixture, "eliminate_identity");
  assert_int_equal(fixture->graph->n_nodes - 1, 3);
}

static void an_input_cannot_be_an_output(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[n] x) => (float[n] y, float[n] z) { y = Identity (x)  a = Neg (x)  z = Identity (a) }");
  pass_run_settled(fixture, "eliminate_identity");
  pass_expect(fixture, "%1 = Identity(x)\n%2 = Neg(x)\n-> y=%1\n-> z=%2\n");
}

static void chains_of_transposes_become_one(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[a,b,c] x) => (float[b,a,c] y, float[a,b,c] z)\n"
                      "{ p = Transpose <perm = [2, 0, 1]> (x)  y = Transpose <perm = [2, 1, 0]> (p)\n"
                      "  q = Transpose (x)  r = Transpose (q)  z = Neg (r) }");
  pass_run_settled(fixture, "eliminate_identity");
  pass_run_settled(fixture, "eliminate_dead");
  pass_expect(fixture, "%1 = Transpose<perm=1,0,2>(x)\n%2 = Neg(x)\n-> y=%1\n-> z=%2\n");
}

static void only_lossless_casts_merge(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float16[n] h, float[n] x) => (float16[n] a, float[n] b)\n"
                      "{ wide = Cast <to = 1> (h)  back = Cast <to = 10> (wide)  a = Neg (back)\n"
                      "  narrow = Cast <to = 10> (x)  again = Cast <to = 1> (narrow)  b = Neg (again) }");
  pass_run_settled(fixture, "eliminate_identity");
  pass_run_settled(fixture, "eliminate_dead");
  pass_expect(fixture, "%1 = Neg(h)\n%2 = Cast<to=10>(x)\n%3 = Cast<to=1>(%2)\n%4 = Neg(%3)\n-> a=%1\n-> b=%4\n");
}

/* ---- eliminate_common, eliminate_dead --------------------------------------------------------------------------- */

static void equal_nodes_become_one(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(
      fixture,
      "(float[n] x, float[n] w) => (float[n] y) <int64[1] i = {0}, int64[1] j = {0}>\n"
      "{ a = Add (x, w)  b = Add (w, x)  c = Unsqueeze (a, i)  d = Unsqueeze (b, j)  e = Sub (x, w)  f = Sub (w, x)\n"
      "  g = Softmax <axis = 0> (x)  h = Softmax (x) p = Mul (c, d) q = Mul (e, f) r = Mul (g, h) s = Add (p, q)\n"
      "  t = Add (s, r)  y = Squeeze (t, i) }");
  pass_run_settled(fixture, "eliminate_common");
  assert_int_equal(pass_count(fixture, EGI_OP_Add), 3);
  assert_int_equal(pass_count(fixture, EGI_OP_Unsqueeze), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_Sub), 2);
  assert_int_equal(pass_count(fixture, EGI_OP_Softmax), 2);
}

static void equal_layers_stay_apart(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[n,2] x) => (float[n,2] y) <float[2,2] a = {0,0,0,0}, float[2,2] b = {0,0,0,0}>\n"
                      "{ p = MatMul (x, a)  q = MatMul (x, b)  y = Add (p, q) }");
  pass_run_settled(fixture, "eliminate_common");
  assert_int_equal(pass_count(fixture, EGI_OP_MatMul), 2);
}

static void equal_outputs_stay_two(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(float[n] x) => (float[n] y, float[n] z) { y = Neg (x)  a = Neg (x)  z = Neg (x)  b = Abs (a) }");
  pass_run_settled(fixture, "eliminate_common");
  pass_expect(fixture, "%1 = Neg(x)\n%2 = Neg(x)\n%3 = Abs(%1)\n-> y=%1\n-> z=%2\n");
}

static void dead_nodes_go(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[n,4] x, float[4] s) => (float[n,4] y)\n"
                      "{ a = Neg (x)  b = Neg (a)  y, mean, deviation = LayerNormalization (x, s) }");
  pass_run_settled(fixture, "eliminate_dead");
  pass_expect(fixture, "%1 = LayerNormalization(x, s)\n-> y=%1\n");
}

/* A long chain of pairs: each pass is linear, so this takes well under a second. */
static void a_large_graph_is_quick(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[n] x) => (float[n] y) { y = Neg (x) }");
  egi_graph *graph = fixture->graph;
  egi_emitter emit = {.graph = graph};
  egi_value_id value = graph->inputs[0];
  for (int i = 0; i < 50000; i++)
    value = egi_emit_binary(&emit, EGI_OP_Add, egi_emit_unary(&emit, EGI_OP_Identity, value), value);
  assert_int_equal(emit.status, EG_OK);
  assert_int_equal(egi_graph_add_output(graph, value), EG_OK);
  double start = egi_clock();
  pass_run(fixture, "inline_functions,fold_constants,fold_shapes,eliminate_identity,eliminate_common,eliminate_dead",
           NULL);
  assert_true(egi_clock() - start < 20.0);
  assert_int_equal(pass_count(fixture, EGI_OP_Identity), 0);
  assert_int_equal(pass_count(fixture, EGI_OP_Add), 50000);
}

static void an_unknown_pass_is_named(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[n] x) => (float[n] y) { y = Neg (x) }");
  assert_int_equal(pass_try(fixture, "eliminate_dead,eliminate_all", NULL), EG_ERROR_ARGUMENT);
  pass_expect_error(fixture, "eliminate_all");
}

/* The check must see a pass that breaks the graph: here one made by hand between begin and end. */
static void a_wrong_rewrite_is_caught(void **state) {
  pass_fixture *fixture = *state;
  egi_rewrite_check *check = NULL;
  pass_graph(fixture, "(float[batch,3] x, int64[batch,3] input_ids) => (float[batch,3] y)\n"
                      "<float[4] table = {1,2,3,4}> { a = Gather (table, input_ids)  b = Add (a, x)  y = Neg (b) }");
  assert_int_equal(egi_rewrite_check_begin(fixture->graph, &check), EG_OK);
  assert_non_null(check);
  assert_int_equal(egi_rewrite_check_end(check, fixture->graph, "none"), EG_OK);
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++) {
    if (fixture->graph->nodes[id].op == EGI_OP_Neg) fixture->graph->nodes[id].op = EGI_OP_Abs;
  }
  assert_int_equal(egi_rewrite_check_end(check, fixture->graph, "bad"), EG_ERROR_INTERNAL);
  pass_expect_error(fixture, "pass bad changed output \"y\"");
  egi_rewrite_check_free(check);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

static void pieces_of_sequences_are_slices(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(float[2,9] x) => (float[2,3] a, float[2,4] b, float[1,9] c)\n"
             "<int64 size = {3}, int64[2] sizes = {5,4}, int64 one = {1}, int64 two = {2}, int64 last = {-1}>\n"
             "{ s = SplitToSequence <axis = 1> (x, size)  a = SequenceAt (s, two)\n"
             "  t = SplitToSequence <axis = -1> (x, sizes)  b = SequenceAt (t, last)\n"
             "  u = SplitToSequence (x)  c = SequenceAt (u, one) }");
  pass_run(fixture, "lower_operators", NULL);
  pass_expect(fixture, "%1 = Slice(x, {6}, {9}, {1})\n%2 = Slice(x, {5}, {9}, {-1})\n%3 = Slice(x, {1}, {2}, {0})\n"
                       "-> a=%1\n-> b=%2\n-> c=%3\n");
}

static void other_uses_of_sequences_stay(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[2,9] x, int64 i) => (float[2,3] a, float[2,3] b, float[9] c, float[2,3] d)\n"
                      "<int64 size = {3}, int64[2] sizes = {5,4}, int64 two = {2}, int64 last = {-1}>\n"
                      "{ s = SplitToSequence <axis = 1> (x, size)  a = SequenceAt (s, i)  d = SequenceAt (s, last)\n"
                      "  t = SplitToSequence <axis = -1> (x, sizes)  b = SequenceAt (t, two)\n"
                      "  u = SplitToSequence <keepdims = 0> (x)  c = SequenceAt (u, two) }");
  pass_run(fixture, "lower_operators", NULL);
  assert_int_equal(pass_count(fixture, EGI_OP_UNKNOWN), 7);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(calls_become_bodies),
      TEST(a_function_may_pass_its_input_on),
      TEST(recursion_names_the_function),
      TEST(deep_nesting_is_refused),
      TEST(an_explosion_is_refused),
      TEST(constants_are_evaluated),
      TEST(without_an_evaluator_nothing_is_folded),
      TEST(parameters_are_not_folded),
      TEST(a_large_result_is_not_folded),
      TEST(sizes_that_constants_decide_are_known),
      TEST(reshape_targets_become_constants),
      TEST(two_unknown_dims_stay),
      TEST(known_integers_become_constants),
      TEST(expand_keeps_what_it_can),
      TEST(what_changes_nothing_goes),
      TEST(signs_shapes_and_empty_parts_are_cleared),
      TEST(what_changes_something_stays),
      TEST(an_input_cannot_be_an_output),
      TEST(chains_of_transposes_become_one),
      TEST(only_lossless_casts_merge),
      TEST(equal_nodes_become_one),
      TEST(equal_layers_stay_apart),
      TEST(equal_outputs_stay_two),
      TEST(dead_nodes_go),
      TEST(pieces_of_sequences_are_slices),
      TEST(other_uses_of_sequences_stay),
      TEST(a_large_graph_is_quick),
      TEST(an_unknown_pass_is_named),
      TEST(a_wrong_rewrite_is_caught),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
