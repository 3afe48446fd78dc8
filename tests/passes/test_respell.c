/* Graphs that are recognised, respelled at random, and recognised again: the results are the same, and a second run
 * changes nothing. Every respelling of one step leaves the number of fused nodes as it was. */
#include "support_passes.h"
#include "support_respell.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE_BATCH = 2, SIZE_SEQUENCE = 5, MAX_INPUTS = 6, N_FUSED = 7 };

static unsigned n_disturbances = 60; /* of each graph; more by hand: test_respell N */

typedef struct base_graph {
  const char *title;
  const char *text; /* the output is [B, S, …] */
} base_graph;

#define NUMBERS                                                                                                        \
  "float two = {2}, float half = {0.5}, float unit = {1}, float nil = {0}, float e = {0.00001}, float s = {0.35355}, " \
  "float low = {-3.4028234e38}, int64 zero = {0}, int64 one = {1}, int64[1] a0 = {0}, int64[1] a1 = {1}, "             \
  "int64[1] a2 = {2}, int64[1] a3 = {3}, int64[1] last = {-1}, int64[2] a12 = {1,2}, int64[1] four = {4}, "            \
  "int64[1] end = {9223372036854775807}, int64[5] repeats = {1,1,2,1,1}, int64[4] repeated = {0,4,-1,8}, "             \
  "int64[4] qs = {0,0,4,8}, int64[4] ks = {0,0,2,8}, int64[3] flat = {0,0,32}, "                                       \
  "float[4] frequencies = {1, 0.5, 0.25, 0.125}, float[8] w8 = {0.5, 1, 1.5, -2, 0.25, 1, 3, 0.75}"
#define MATRIX(name, in, out, seed) \
  ", float[" in "," out "] " name   \
  " = [\"location\": \"\", \"engraft.init\": \"normal\", \"std\": \"0.2\", \"seed\": \"" seed "\"]"
#define RMS(p, x, w)                                                                                             \
  p "q = Pow (" x ", two) " p "m = ReduceMean (" p "q, last) " p "a = Add (" p "m, e) " p "s = Sqrt (" p "a) " p \
    "r = Reciprocal (" p "s) " p "n = Mul (" x ", " p "r) " p " = Mul (" p "n, " w ") "
#define TABLES                                                                                                       \
  "pu = Unsqueeze (pos, last) pf = Cast <to = 1> (pu) angles = Mul (pf, frequencies) "                               \
  "af = Concat <axis = -1> (angles, angles) cf = Cos (af) sf = Sin (af) c = Unsqueeze (cf, a1) sn = Unsqueeze (sf, " \
  "a1) "
#define ROPE(p, x)                                                                                              \
  p "a = Slice (" x ", a0, four, a3, a1) " p "b = Slice (" x ", four, end, a3, a1) " p "n = Neg (" p "b) " p    \
    "t = Concat <axis = -1> (" p "n, " p "a) " p "p = Mul (" x ", c) " p "q = Mul (" p "t, sn) " p " = Add (" p \
    "p, " p "q) "
#define MASK                                                                                                     \
  "sh = Shape (m) n = Gather (sh, one) rg = Range (zero, n, one) i = Unsqueeze (rg, a1) j = Unsqueeze (rg, a0) " \
  "cs = LessOrEqual (j, i) mb = Cast <to = 9> (m) pd = Unsqueeze (mb, a12) seen = And (cs, pd) "                 \
  "mask = Where (seen, nil, low) "
#define REPEAT(p, x) p "u = Unsqueeze (" x ", a2) " p "e = Expand (" p "u, repeats) " p " = Reshape (" p "e, repeated) "
#define ATTEND(y, q, k, v)                                                         \
  REPEAT("kr", k)                                                                  \
  REPEAT("vr", v)                                                                  \
  "kt = Transpose <perm = [0,1,3,2]> (kr) d = MatMul (" q ", kt) sc = Mul (d, s) " \
  "f = Add (sc, mask) g = Softmax <axis = -1> (f) o = MatMul (g, vr) " y " = Transpose <perm = [0,2,1,3]> (o) "
#define HEADS(p, x, shape) p "h = Reshape (" x ", " shape ") " p " = Transpose <perm = [0,2,1,3]> (" p "h) "

static const base_graph bases[] = {
    {"RMS norm", "(float[B,S,8] x) => (float[B,S,8] y) <" NUMBERS "> {" RMS("y", "x", "w8") "}"},
    {"Layer norm", "(float[B,S,8] x) => (float[B,S,8] y) <" NUMBERS ", float[8] b8 = {1,2,3,4,5,6,7,8}> { "
                   "mn = ReduceMean (x, last) d = Sub (x, mn) q = Pow (d, two) v = ReduceMean (q, last) a = Add (v, e) "
                   "r = Sqrt (a) n = Div (d, r) p = Mul (n, w8) y = Add (p, b8) }"},
    {"rotary halves", "(float[B,S,4,8] z, int64[B,S] pos) => (float[B,S,4,8] y) <" NUMBERS "> {" TABLES
                      "x = Transpose <perm = [0,2,1,3]> (z) " ROPE("t", "x") "y = Transpose <perm = [0,2,1,3]> (t) }"},
    {"attention", "(float[B,4,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, int64[B,S] m) => (float[B,S,4,8] y) <" NUMBERS
                  "> {" MASK ATTEND("y", "q", "k", "v") "}"},
    {"SwiGLU",
     "(float[B,S,8] g, float[B,S,8] u) => (float[B,S,8] y) { sg = Sigmoid (g) a = Mul (g, sg) y = Mul (a, u) }"},
    {"GELU by tanh", "(float[B,S,8] x) => (float[B,S,8] y) <float c = {0.044715}, float three = {3}, float k = "
                     "{0.7978845608}, float unit = {1}, float half = {0.5}> { p = Pow (x, three) q = Mul (p, c) "
                     "i = Add (x, q) v = Mul (i, k) t = Tanh (v) f = Add (t, unit) h = Mul (x, half) y = Mul (h, f) }"},
    {"linear with bias",
     "(float[B,S,8] x) => (float[B,S,16] y) <float[16] b = {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}" MATRIX(
         "w", "8", "16", "3") "> { p = MatMul (x, w) y = Add (p, b) }"},
    {"a layer",
     "(float[B,S,32] x, int64[B,S] m, int64[B,S] pos) => (float[B,S,32] y) <" NUMBERS MATRIX("wn", "1", "32", "1")
         MATRIX("wq", "32", "32", "2") MATRIX("wk", "32", "16", "3") MATRIX("wv", "32", "16", "4")
             MATRIX("wo", "32", "32", "5") MATRIX("wg", "32", "24", "6") MATRIX("wu", "32", "24", "7")
                 MATRIX("wd", "24", "32", "8") ", int64[1] width = {32}> {" TABLES MASK "ws = Reshape (wn, width) " RMS(
                     "na", "x",
                     "ws") "ql = MatMul (na, wq) kl = MatMul (na, wk) vl = MatMul (na, wv) " HEADS("qh", "ql", "qs")
                     HEADS("kh", "kl", "ks") HEADS("vh", "vl", "ks") ROPE("qe", "qh") ROPE("ke", "kh")
                         ATTEND("at", "qe", "ke",
                                "vh") "af2 = Reshape (at, flat) ol = MatMul (af2, wo) ra = Add (x, "
                                      "ol) " RMS("nb", "ra", "ws") "gl = MatMul (nb, wg) ul = MatMul (nb, wu) sg = "
                                                                   "Sigmoid (gl) ac = Mul (gl, sg) gu = Mul (ac, ul) "
                                                                   "dl = MatMul (gu, wd) y = Add (ra, dl) }"},
};

static const egi_op fused[N_FUSED] = {EGI_OP_RMSNormalization,
                                      EGI_OP_LayerNormalization,
                                      EGI_OP_RotaryEmbedding,
                                      EGI_OP_MaskedAttention,
                                      EGI_OP_GLU,
                                      EGI_OP_Gelu,
                                      EGI_OP_Linear};

/* ---- running ---- */

/* The last token of the second row is padding. Positions count from 1, so that they hide nothing as a mask. */
static bool is_valid(int64_t batch, int64_t position) {
  return batch == 0 || position < SIZE_SEQUENCE - 1;
}

static void make_inputs(pass_fixture *fixture, egi_tensor *inputs) {
  egi_graph *graph = fixture->graph;
  egi_dims *dims = fixture->module->dims;
  const egi_binding bindings[2] = {{egi_dim_symbol(dims, "B"), SIZE_BATCH}, {egi_dim_symbol(dims, "S"), SIZE_SEQUENCE}};
  assert_true(graph->n_inputs <= MAX_INPUTS);
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const egi_value *value = &graph->values[graph->inputs[i]];
    bool is_mask = strcmp(value->name, "m") == 0;
    inputs[i] = (egi_tensor){.dtype = value->dtype, .rank = value->rank};
    for (int d = 0; d < value->rank; d++)
      assert_true(egi_dim_evaluate(dims, value->dims[d], bindings, 2, &inputs[i].dims[d]));
    egi_tensor_set_contiguous(&inputs[i]);
    int64_t count = egi_tensor_count(&inputs[i]);
    inputs[i].data = EGI_NEW(&fixture->arena, double, (size_t)count);
    assert_non_null(inputs[i].data);
    for (int64_t k = 0; k < count; k++) {
      if (value->dtype == EG_DTYPE_F32)
        ((float *)inputs[i].data)[k] = (float)egi_random_normal(5, i, (uint64_t)k);
      else
        ((int64_t *)inputs[i].data)[k] =
            is_mask ? is_valid(k / SIZE_SEQUENCE, k % SIZE_SEQUENCE) : 1 + k % SIZE_SEQUENCE;
    }
  }
}

static egi_tensor evaluate(pass_fixture *fixture, const char *what, const egi_tensor *inputs) {
  egi_tensor output;
  if (egi_evaluator_cpu()->graph(fixture->ctx, fixture->graph, inputs, &fixture->arena, &output) != EG_OK)
    fail_msg("%s: %s", what, eg_context_error(fixture->ctx));
  return output;
}

static void compare(pass_fixture *fixture, const char *what, const egi_tensor *before, const egi_tensor *after) {
  int64_t count = egi_tensor_count(before), row = count / SIZE_BATCH / SIZE_SEQUENCE;
  assert_int_equal(count, egi_tensor_count(after));
  for (int64_t i = 0; i < count; i++) {
    double a = (double)((const float *)before->data)[i], b = (double)((const float *)after->data)[i];
    if (!is_valid(i / row / SIZE_SEQUENCE, i / row % SIZE_SEQUENCE)) continue;
    if (!(fabs(a - b) <= 1e-4 * (1 + fabs(a))))
      fail_msg("%s: element %d is %.9g, was %.9g\n%s", what, (int)i, b, a, pass_nodes(fixture));
  }
}

static void recognise(pass_fixture *fixture, const char *what) {
  static const egi_pipeline_options options;
  egi_pass_report *reports = EGI_NEW(&fixture->arena, egi_pass_report, egi_pass_count());
  assert_non_null(reports);
  if (egi_passes_recognise(fixture->graph, &options, reports) != EG_OK || egi_graph_verify(fixture->graph) != EG_OK)
    fail_msg("%s: %s", what, eg_context_error(fixture->ctx));
}

static void count_fused(pass_fixture *fixture, unsigned *counts) {
  for (unsigned i = 0; i < N_FUSED; i++) counts[i] = pass_count(fixture, fused[i]);
}

/* A base graph with `n_steps` respellings, recognised; the kinds are drawn, or all `kind`. False: it fits nowhere. */
static bool run_one(pass_fixture *fixture, const base_graph *base, int kind, unsigned n_steps, uint64_t seed,
                    unsigned *out_counts) {
  respeller r;
  egi_tensor inputs[MAX_INPUTS];
  char what[1024];
  bool is_changed = n_steps == 0;
  size_t used = (size_t)snprintf(what, sizeof(what), "%s, seed %llu", base->title, (unsigned long long)seed);
  pass_graph(fixture, base->text);
  make_inputs(fixture, inputs);
  egi_tensor before = evaluate(fixture, what, inputs);
  respeller_begin(&r, fixture->graph, seed);
  for (unsigned i = 0; i < n_steps; i++) {
    size_t drawn = kind >= 0 ? (size_t)kind : respeller_random(&r, respell_count());
    if (!respell(&r, drawn)) continue;
    is_changed = true;
    if (used < sizeof(what)) used += (size_t)snprintf(what + used, sizeof(what) - used, ", %s", respell_name(drawn));
  }
  if (r.emit.status != EG_OK) fail_msg("%s: %s", what, eg_context_error(fixture->ctx));
  if (!is_changed) return false;
  recognise(fixture, what);
  count_fused(fixture, out_counts);
  egi_tensor after = evaluate(fixture, what, inputs);
  compare(fixture, what, &before, &after);
  char *first = strdup(pass_nodes(fixture));
  recognise(fixture, what);
  if (first == NULL || strcmp(first, pass_nodes(fixture)) != 0)
    fail_msg("%s: a second run changes the graph\n%s\n%s", what, first ? first : "", pass_nodes(fixture));
  free(first);
  return true;
}

/* Each kind alone, at several places. */
static void one_respelling_is_recognised(void **state) {
  unsigned n_lost = 0;
  for (size_t i = 0; i < EGI_COUNT(bases); i++) {
    unsigned expected[N_FUSED], counts[N_FUSED];
    run_one(*state, &bases[i], 0, 0, 0, expected);
    for (int kind = 0; kind < (int)respell_count(); kind++)
      for (uint64_t seed = 0; seed < 12; seed++) {
        if (!run_one(*state, &bases[i], kind, 1, seed, counts)) break;
        if (memcmp(counts, expected, sizeof(counts)) == 0) continue;
        n_lost++;
        print_message("%s is not recognised any more: %s, seed %u\n", bases[i].title, respell_name((size_t)kind),
                      (unsigned)seed);
      }
  }
  assert_int_equal(n_lost, 0);
}

/* Several at once: nothing but the results is promised. */
static void many_respellings_change_no_result(void **state) {
  unsigned counts[N_FUSED];
  for (size_t i = 0; i < EGI_COUNT(bases); i++)
    for (uint64_t seed = 0; seed < 60; seed++)
      run_one(*state, &bases[i], -1, 2 + (unsigned)(seed % 9), 1000 + seed, counts);
}

static bool is_sane(const egi_tensor *tensor) {
  for (int64_t i = 0; i < egi_tensor_count(tensor); i++)
    if (!(fabs((double)((const float *)tensor->data)[i]) < 1e4)) return false;
  return true;
}

/* Changed in what it computes, then recognised: whatever is fused computes what the changed graph does. */
static void run_disturbed(pass_fixture *fixture, const base_graph *base, uint64_t seed, unsigned *n_checked) {
  respeller r;
  egi_tensor inputs[MAX_INPUTS], before, after;
  char what[256];
  const char *name = NULL;
  pass_graph(fixture, base->text);
  make_inputs(fixture, inputs);
  respeller_begin(&r, fixture->graph, seed);
  if (!disturb(&r, &name)) return;
  snprintf(what, sizeof(what), "%s, disturbed by %s, seed %llu", base->title, name, (unsigned long long)seed);
  const egi_evaluator *evaluator = egi_evaluator_cpu();
  if (evaluator->graph(fixture->ctx, fixture->graph, inputs, &fixture->arena, &before) != EG_OK) return;
  if (before.dtype != EG_DTYPE_F32 || !is_sane(&before)) return;
  recognise(fixture, what);
  after = evaluate(fixture, what, inputs);
  compare(fixture, what, &before, &after);
  ++*n_checked;
}

static void what_computes_something_else_stays_so(void **state) {
  unsigned n_checked = 0;
  for (size_t i = 0; i < EGI_COUNT(bases); i++)
    for (uint64_t seed = 0; seed < n_disturbances; seed++) run_disturbed(*state, &bases[i], seed, &n_checked);
  assert_true(n_checked > n_disturbances);
}

int main(int n_arguments, char **arguments) {
  if (n_arguments > 1) n_disturbances = (unsigned)strtoul(arguments[1], NULL, 10);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(what_computes_something_else_stays_so, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(one_respelling_is_recognised, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(many_respellings_change_no_result, pass_set_up, pass_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
