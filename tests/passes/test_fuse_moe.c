/* fuse_moe on the forms in which exporters write mixtures of experts, on a forward pass that is none, and on a trace
 * that lacks experts. */
#include "support_rewrites.h"

#include <stdio.h>
#include <string.h>

#define X "float[B,S,4] x"
#define Y "float[B,S,4] y"
/* Numbers that no two experts, rows or columns share. */
#define ROUTER "float[4,3] r = {0.5,-1,0.25, 1,0.3,-0.7, -0.2,0.9,1.1, 0.4,-0.6,0.8}"
#define GATE_UP                                                                                                   \
  "float[3,4,4] g = {0.1,0.7,-0.3,0.2, 0.5,-0.4,0.6,0.3, -0.8,0.2,0.9,-0.1, 0.4,0.3,-0.2,0.7, 0.6,-0.5,0.1,0.8, " \
  "-0.3,0.2,0.4,0.9, 0.7,0.1,-0.6,0.5, 0.2,0.8,0.3,-0.4, -0.9,0.4,0.5,0.1, 0.3,0.6,-0.7,0.2, 0.8,-0.2,0.1,0.4, "  \
  "-0.5,0.9,0.2,0.3}"
#define DOWN                                                                                                          \
  "float[3,4,2] d = {0.3,-0.6, 0.8,0.1, -0.2,0.5, 0.7,0.4, 0.9,0.2, -0.4,0.6, 0.1,-0.7, 0.5,0.3, -0.8,0.4, 0.2,0.9, " \
  "0.6,-0.1, 0.3,0.7}"
#define NUMBERS                                                                                                        \
  "int64[2] rows = {-1,4}, int64[1] k = {2}, int64[1] last = {-1}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] " \
  "two = {2}, float nothing = {0}, int64[3] tiles = {1,2,1}, int64[2] column = {-1,1}, int64[3] grouped = {-1,2,4}"
#define ROUTED                                                                                                         \
  "f = Reshape (x, rows) l = MatMul (f, r) p = Softmax (l) v, i = TopK (p, k) t = ReduceSum (v, last) w = Div (v, t) " \
  "back = Shape (x) "
#define SWIGLU(h, out) \
  "ga, up = Split <axis = -1, num_outputs = 2> (" h ") si = Sigmoid (ga) ac = Mul (ga, si) " out " = Mul (ac, up) "

#define FORM(title, count, text) \
  { title, "fuse_moe", EGI_OP_MoE, count, text, NULL }
#define NONE(title, text, miss) \
  { title, "fuse_moe", EGI_OP_NONE, 0, text, miss }
#define HEADER "(" X ") => (" Y ") <" ROUTER ", " GATE_UP ", " DOWN ", " NUMBERS "> { " ROUTED

/* One expert of a dense loop: weights of its own, its share from comparing the choice with its number. */
#define EXPERT(n)                                                                                                      \
  "a" n " = MatMul (f, g" n ") u" n " = MatMul (f, h" n ") s" n " = Gelu (a" n ") m" n " = Mul (s" n ", u" n ") o" n   \
  " = MatMul (m" n ", d" n ") e" n " = Equal (i, n" n ") c" n " = Cast <to = 1> (e" n ") q" n " = Mul (w, c" n ") z" n \
  " = ReduceSum (q" n ", last) y" n " = Mul (o" n ", z" n ") "
#define OWN(n, a, b, c)                                                                    \
  "float[4,2] g" n " = {" a ",0.3,0.5,-0.2,0.7,0.1,-0.6,0.4}, float[4,2] h" n " = {0.2," b \
  ",-0.5,0.9,0.3,0.6,0.1,-0.7}, "                                                          \
  "float[2,4] d" n " = {0.4,-0.3," c ",0.2,0.7,0.1,-0.9,0.5}, int64 n" n " = {" n "}"

/* One expert of a loop over the tokens that chose it. */
#define CHOSEN(n, before, after)                                                                                       \
  "m" n " = Gather (mask, n" n ") z" n " = NonZero (m" n ") zt" n " = Transpose (z" n ") j" n ", t" n                  \
  " = Split <axis = 1, num_outputs = 2> (zt" n ") x" n " = GatherND (f, t" n ") g" n " = Gather (g, n" n ") gt" n      \
  " = Transpose (g" n ") h" n " = MatMul (x" n ", gt" n ") ga" n ", up" n " = Split <axis = -1, num_outputs = 2> (h" n \
  ") si" n " = Sigmoid (ga" n ") ac" n " = Mul (ga" n ", si" n ") c" n " = Mul (ac" n ", up" n ") d" n                 \
  " = Gather (d, n" n ") dt" n " = Transpose (d" n ") o" n " = MatMul (c" n ", dt" n ") at" n                          \
  " = Concat <axis = -1> (t" n ", j" n ") s" n " = GatherND (w1, at" n ") q" n " = Mul (o" n ", s" n ") " after        \
  " = ScatterND <reduction = \"add\"> (" before ", t" n ", q" n ") "
#define LOOP                                                                                                        \
  "i1 = Unsqueeze (i, last) hit = Equal (i1, numbers) hot = Cast <to = 7> (hit) mask = Transpose <perm = [2,1,0]> " \
  "(hot) w1 = Unsqueeze (w, two) fs = Shape (f) y0 = Expand (nothing, fs) "
#define LOOP_HEADER                                                 \
  "(" X ") => (" Y ") <" ROUTER ", " GATE_UP ", " DOWN ", " NUMBERS \
  ", int64[3] numbers = {0,1,2}, int64 n0 = {0}, int64 "            \
  "n1 = {1}, int64 n2 = {2}> { " ROUTED LOOP

static const spelling spellings[] = {
    FORM("whole matrices for each token", 1,
         HEADER
         "flat = Reshape (i, last) xe = Unsqueeze (f, one) xt = Tile (xe, tiles) xf = Reshape (xt, rows) gs = "
         "Gather (g, flat) xc = Unsqueeze (xf, last) hc = MatMul (gs, xc) h = Squeeze (hc, last) " SWIGLU(
             "h",
             "m") "ds = Gather (d, flat) mc = Unsqueeze (m, last) oc = MatMul (ds, mc) o = Squeeze (oc, last) wf = "
                  "Reshape (w, column) ow = Mul (o, wf) og = Reshape (ow, grouped) ys = ReduceSum <keepdims = 0> (og, "
                  "one) y = Reshape (ys, back) }"),
    FORM("all experts for all tokens", 1,
         HEADER "ls = Shape (l) none = Expand (nothing, ls) dense = ScatterElements <axis = 1> (none, i, w) fe = "
                "Unsqueeze (f, zero) gt = Transpose <perm = [0,2,1]> (g) h = MatMul (fe, gt) " SWIGLU(
                    "h", "m") "dt = Transpose <perm = [0,2,1]> (d) o = MatMul (m, dt) wt = Transpose (dense) we = "
                              "Unsqueeze (wt, last) "
                              "ow = Mul (o, we) ys = ReduceSum <keepdims = 0> (ow, zero) y = Reshape (ys, back) }"),
    FORM("a piece for each expert, each over all tokens", 1,
         "(" X ") => (" Y ") <" ROUTER ", " NUMBERS ", " OWN("0", "0.1", "0.4", "0.6") ", " OWN(
             "1", "-0.8", "0.5", "-0.2") ", " OWN("2", "0.9", "-0.3", "0.8") "> { " ROUTED EXPERT("0") EXPERT("1")
             EXPERT("2") "ya = Add (y0, y1) ys = Add (ya, y2) y = Reshape (ys, back) }"),
    FORM("pieces in another order", 1,
         "(" X ") => (" Y ") <" ROUTER ", " NUMBERS ", " OWN("0", "0.1", "0.4", "0.6") ", " OWN(
             "1", "-0.8", "0.5", "-0.2") ", " OWN("2", "0.9", "-0.3", "0.8") "> { " ROUTED EXPERT("2") EXPERT("0")
             EXPERT("1") "ya = Add (y0, y1) ys = Add (ya, y2) y = Reshape (ys, back) }"),
    NONE("shares that scale what goes in are not shares of what comes out",
         HEADER
         "ls = Shape (l) none = Expand (nothing, ls) dense = ScatterElements <axis = 1> (none, i, w) wt = Transpose "
         "(dense) we = Unsqueeze (wt, last) fe = Unsqueeze (f, zero) fw = Mul (fe, we) gt = Transpose <perm = "
         "[0,2,1]> (g) h = MatMul (fw, gt) " SWIGLU(
             "h",
             "m") "dt = Transpose <perm = [0,2,1]> (d) o = MatMul (m, dt) ys = ReduceSum <keepdims = 0> (o, zero) y = "
                  "Reshape (ys, back) }",
         "router"),
    NONE("shares that do not quite sum to one",
         "(" X ") => (" Y ") <" ROUTER ", " GATE_UP ", " DOWN ", " NUMBERS
         ", float small = {0.001}> { f = Reshape (x, rows) "
         "l = MatMul (f, r) p = Softmax (l) v, i = TopK (p, k) t = ReduceSum (v, last) te = Add (t, small) w = Div (v, "
         "te) "
         "back = Shape (x) ls = Shape (l) none = Expand (nothing, ls) dense = ScatterElements <axis = 1> (none, i, w) "
         "fe "
         "= Unsqueeze (f, zero) gt = Transpose <perm = [0,2,1]> (g) h = MatMul (fe, gt) " SWIGLU(
             "h", "m") "dt = Transpose <perm = [0,2,1]> (d) o = MatMul (m, dt) wt = Transpose (dense) we = Unsqueeze "
                       "(wt, last) ow = "
                       "Mul (o, we) ys = ReduceSum <keepdims = 0> (ow, zero) y = Reshape (ys, back) }",
         "router"),
    NONE("an activation of its own",
         HEADER
         "ls = Shape (l) none = Expand (nothing, ls) dense = ScatterElements <axis = 1> (none, i, w) fe = "
         "Unsqueeze (f, zero) gt = Transpose <perm = [0,2,1]> (g) h = MatMul (fe, gt) ga, up = Split <axis = -1, "
         "num_outputs = 2> (h) si = Tanh (ga) m = Mul (si, up) dt = Transpose <perm = [0,2,1]> (d) o = MatMul (m, "
         "dt) wt = Transpose (dense) we = Unsqueeze (wt, last) ow = Mul (o, we) ys = ReduceSum <keepdims = 0> "
         "(ow, zero) y = Reshape (ys, back) }",
         "activation"),
};

static void spellings_are_recognised(void **state) {
  for (size_t i = 0; i < EGI_COUNT(spellings); i++) check_spelling(*state, &spellings[i]);
}

/* Results whose size depends on data cannot be planned; what comes of them can. */
static void loops_over_chosen_tokens_end(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, LOOP_HEADER CHOSEN("0", "y0", "y1") CHOSEN("1", "y1", "y2")
                          CHOSEN("2", "y2", "ys") "y = Reshape (ys, back) }");
  pass_run_settled(fixture, "fuse_moe");
  assert_int_equal(pass_count(fixture, EGI_OP_MoE), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_NonZero), 0);
  assert_int_equal(pass_count(fixture, EGI_OP_MatMul), 1);
}

/* Stacks whose slices are taken in another order than that of the pieces. */
static void loops_in_another_order_end(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, LOOP_HEADER CHOSEN("2", "y0", "y1") CHOSEN("0", "y1", "y2")
                          CHOSEN("1", "y2", "ys") "y = Reshape (ys, back) }");
  pass_run_settled(fixture, "fuse_moe");
  assert_int_equal(pass_count(fixture, EGI_OP_MoE), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_NonZero), 0);
}

static void a_trace_that_lacks_experts_is_refused(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, LOOP_HEADER CHOSEN("0", "y0", "y1") CHOSEN("2", "y1", "ys") "y = Reshape (ys, back) }");
  assert_int_equal(pass_try(fixture, "fuse_moe", NULL), EG_ERROR_UNSUPPORTED);
  pass_expect_error(fixture, "it chooses among 3 experts, the graph holds 2 of them");
}

/* ---- stacks for full training --------------------------------------------------------------------------------- */

static const egi_weight *weight_named(const pass_fixture *fixture, const char *name) {
  for (uint32_t i = 1; i < fixture->module->n_weights; i++)
    if (strcmp(fixture->module->weights[i].name, name) == 0) return &fixture->module->weights[i];
  fail_msg("no weight \"%s\"", name);
  return NULL;
}

/* Separate matrices of each expert, [in, out], become [experts, 2 * out, in] and [experts, out, in]. */
static void separate_experts_become_stacks(void **state) {
  pass_fixture *fixture = *state;
  egi_rewrite_check *check = NULL;
  pass_graph(fixture, "(" X ") => (" Y ") <" ROUTER ", " NUMBERS ", " OWN("0", "0.1", "0.4", "0.6") ", " OWN(
                          "1", "-0.8", "0.5", "-0.2") ", " OWN("2", "0.9", "-0.3", "0.8") "> { " ROUTED EXPERT("0")
                          EXPERT("1") EXPERT("2") "ya = Add (y0, y1) [\"/layers.0/mlp/Add\"] ys = Add (ya, y2) "
                                                  "y = Reshape (ys, back) }");
  pass_run(fixture, "fuse_moe,name_modules", NULL);
  assert_int_equal(egi_rewrite_check_begin(fixture->graph, &check), EG_OK);
  assert_int_equal(egi_stack_experts(fixture->graph), EG_OK);
  if (egi_rewrite_check_end(check, fixture->graph, "stack") != EG_OK) fail_msg("%s", eg_context_error(fixture->ctx));
  egi_rewrite_check_free(check);
  const egi_weight *up = weight_named(fixture, "layers.0.mlp.experts.gate_up_proj");
  const egi_weight *down = weight_named(fixture, "layers.0.mlp.experts.down_proj");
  assert_int_equal(up->rank, 3);
  assert_memory_equal(up->dims, ((const int64_t[3]){3, 4, 4}), 3 * sizeof(int64_t));
  assert_memory_equal(down->dims, ((const int64_t[3]){3, 4, 2}), 3 * sizeof(int64_t));
  assert_int_equal(up->bytes.kind, EGI_BYTES_PARTS);
}

/* ---- com.microsoft -------------------------------------------------------------------------------------------- */

static void packed_experts_are_read(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(float[T,2] x, float[T,2] l) => (float[T,2] y) <uint8[2,4,1] a = {18,52,86,120,154,188,222,240}, "
             "float[2,4] s = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8}, uint8[2,2,1] b = {1,2,3,4}, float[2,2] t = "
             "{0.1,0.2,0.3,0.4}>\n{ y = com.microsoft.QMoE <k = 1, activation_type = \"swiglu\", swiglu_fusion = "
             "1, expert_weight_bits = 4, weights_prepacked = 0> (x, l, a, s, , b, t) }");
  pass_run(fixture, "lower_operators", NULL);
  assert_int_equal(pass_count(fixture, EGI_OP_MoE), 1);
}

#define PACKED(name, prepacked)                                                                               \
  "[\"" name "\"] " name " = com.microsoft.QMoE <k = 1, activation_type = \"relu\", expert_weight_bits = 4, " \
  "weights_prepacked = " prepacked "> (x, l, a, s, , b, t) "

/* All of one file at once. */
static void what_is_wrong_is_told_together(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(int64[B,S] input_ids, float[B,S,2] x, float[T,2] l) => (float[B,1,2] logits) <uint8[2,2,1] a = "
             "{18,52,86,120}, float[2,2] s = {0.1,0.2,0.3,0.4}, uint8[2,2,1] b = {1,2,3,4}, float[2,2] t = "
             "{0.1,0.2,0.3,0.4}, int64[1] f = {-1}, int64[1] u = {9223372036854775807}, int64[1] o = {1}>\n{ " PACKED(
                 "p", "1") PACKED("q", "1") "z = Add (p, q) logits = Slice (z, f, u, o) }");
  assert_int_equal(pass_try(fixture, "lower_operators", NULL), EG_ERROR_UNSUPPORTED);
  pass_expect_error(fixture, "node \"p\" (QMoE): its weights are prepacked");
  pass_expect_error(fixture, "node \"q\" (QMoE): its weights are prepacked");
  pass_expect_error(fixture, "the head keeps the last position alone");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(spellings_are_recognised, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(loops_over_chosen_tokens_end, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(separate_experts_become_stacks, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(packed_experts_are_read, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(what_is_wrong_is_told_together, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(loops_in_another_order_end, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(a_trace_that_lacks_experts_is_refused, pass_set_up, pass_tear_down),
  };
  return cmocka_run_group_tests_name("fuse_moe", tests, NULL, NULL);
}
