/* cache_metadata: graphs that it takes give for a row of documents what they gave for each document alone; graphs that
 * carry something from token to token stay as they are, and the report says where. */
#include "support_passes.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct packing_row {
  const char *title, *text;
  const char *miss; /* part of what the report says, NULL: the graph is taken */
} packing_row;

/* ---- pieces of graphs ---- */

#define INPUTS "(int64[B,S] input_ids, int64[B,S] attention_mask, int64[B,S] position_ids) => (float[B,S,8] y) "
#define NUMBERS                                                                                                     \
  "int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] a2 = {2}, "   \
  "int64[1] last = {-1}, int64[1] first = {0}, int64[1] lowest = {-9223372036854775807}, float half = {0.5}, "      \
  "int64[4] heads = {0,0,2,4}, int64[3] flat = {0,0,8}, int64[3] turned = {0,8,-1}, int64[2] size = {64,8}, "       \
  "int64[2] rows = {-1,8}, int64[2] halves = {4,4}, float[1,1,8] spread = {0.3,-0.2,0.5,0.1,-0.4,0.7,0.2,-0.1}, "   \
  "float[2,8] pair = {1,2,3,4,5,6,7,8,8,7,6,5,4,3,2,1}, float[2] angles = {1.0,0.3}, float[2] sinks = {0.5,-0.3}, " \
  "int64[3] twice = {1,1,2}"
/* Embedded tokens h [B,S,8], from a table that counts. */
#define TOKENS                                                                                            \
  "count = Shape (pair) n64 = Cast <to = 1> (input_ids) ids = Unsqueeze (n64, a2) e = Mul (ids, spread) " \
  "h = Sin (e) "
#define QKV "s4 = Reshape (h, heads) q = Transpose <perm = [0,2,1,3]> (s4) "
#define OUT "ta = Transpose <perm = [0,2,1,3]> (a) y = Reshape (ta, flat) "
#define VALID "valid = Cast <to = 9> (attention_mask) "
#define RANGE "sh = Shape (input_ids) n = Gather (sh, one) r = Range (zero, n, one) "
#define GRAPH(nodes) INPUTS "<" NUMBERS "> { " TOKENS nodes "}"

static const packing_row rows[] = {
    {"attention, its padding dropped", GRAPH(VALID QKV "a = engraft.Attention <causal = 1> (q, q, q, valid) " OUT),
     NULL},
    {"a window", GRAPH(QKV "a = engraft.Attention <causal = 1, window = 2> (q, q, q) " OUT), NULL},
    {"sinks", GRAPH(QKV "a = engraft.Attention <causal = 1, window = 4> (q, q, q, , sinks) " OUT), NULL},
    {"both ways", GRAPH(QKV "a = engraft.Attention (q, q, q) " OUT), NULL},
    {"both ways in a window", GRAPH(QKV "a = engraft.Attention <window = 2> (q, q, q) " OUT), NULL},
    {"learned positions of the input",
     GRAPH("t = ConstantOfShape <value = float[1] {0.5}> (size) c = CumSum (t, zero) p = Gather (c, position_ids) "
           "y = Add (h, p) "),
     NULL},
    {"learned positions of a range",
     GRAPH(RANGE "t = ConstantOfShape <value = float[1] {0.5}> (size) c = CumSum (t, zero) p = Gather (c, r) "
                 "y = Add (h, p) "),
     NULL},
    {"learned positions with an offset",
     GRAPH(RANGE "r2 = Add (r, two) t = ConstantOfShape <value = float[1] {0.5}> (size) c = CumSum (t, zero) "
                 "p = Gather (c, r2) y = Add (h, p) "),
     NULL},
    {"positions counted from the mask",
     GRAPH("m = CumSum (attention_mask, one) p = Sub (m, one) f = Cast <to = 1> (p) u = Unsqueeze (f, a2) y = Mul "
           "(h, "
           "u) "),
     NULL},
    {"rotary angles of a range",
     GRAPH(RANGE QKV "f = Cast <to = 1> (r) u = Unsqueeze (f, a1) g = Mul (u, angles) g3 = Unsqueeze (g, a0) "
                     "c = Cos (g3) s = Sin (g3) x = RotaryEmbedding (q, c, s) "
                     "a = engraft.Attention <causal = 1> (x, x, q) " OUT),
     NULL},
    {"rotary angles of the input",
     GRAPH(QKV "f = Cast <to = 1> (position_ids) u = Unsqueeze (f, a2) g = Mul (u, angles) "
               "c = Cos (g) s = Sin (g) x = RotaryEmbedding (q, c, s) "
               "a = engraft.Attention <causal = 1, window = 3> (x, x, q) " OUT),
     NULL},
    {"rotary angles looked up",
     GRAPH(QKV "big = Shape (pair) t = ConstantOfShape <value = float[1] {0.1}> (size) c = CumSum (t, zero) "
               "c2 = Slice (c, first, a2, a1) x = RotaryEmbedding (q, c2, c2, position_ids) "
               "a = engraft.Attention <causal = 1> (x, x, q) " OUT),
     NULL},
    {"rotary angles that are looked up, then repeated",
     GRAPH(QKV "t = ConstantOfShape <value = float[1] {0.1}> (size) c = CumSum (t, zero) l = Gather (c, position_ids) "
               "c1 = Slice (l, first, a1, a2) c2 = Tile (c1, twice) x = RotaryEmbedding (q, c2, c2) "
               "a = engraft.Attention <causal = 1> (x, x, q) " OUT),
     NULL},
    {"channels taken apart", GRAPH("b, c = Split <axis = 2> (h, halves) y = Concat <axis = -1> (c, b) "), NULL},
    {"rows of tokens", GRAPH("f = Reshape (h, rows) g = Softmax <axis = -1> (f) sh = Shape (h) y = Reshape (g, sh) "),
     NULL},
    /* what may not be packed */
    {"a sum over the tokens before", GRAPH("y = CumSum (h, one) "), "(CumSum)"},
    {"a mean over the sequence", GRAPH("m = ReduceMean (h, a1) y = Add (h, m) "), "(ReduceMean): it mixes tokens"},
    {"softmax over the sequence", GRAPH("y = Softmax <axis = 1> (h) "), "(Softmax): it mixes tokens"},
    {"tokens one place later",
     GRAPH("b = Slice (h, first, last, a1) z = Slice (h, first, a1, a1) w = Mul (z, half) y = Concat <axis = 1> "
           "(w, b) "),
     "(Slice): "},
    {"the sequence backwards", GRAPH("y = Slice (h, last, lowest, a1, last) "), "(Slice): it mixes tokens"},
    {"the last token", GRAPH("t = Gather <axis = 1> (h, last) y = Add (h, t) "), "(Gather): it mixes tokens"},
    {"rows mixed by a reshape", GRAPH("t = Reshape (h, turned) y = Transpose <perm = [0,2,1]> (t) "),
     "(Reshape): it mixes tokens"},
    {"scores written out",
     GRAPH("t = Transpose <perm = [0,2,1]> (h) s = MatMul (h, t) p = Softmax (s) y = MatMul (p, h) "),
     "(MatMul): its result has the sequence in two dimensions"},
    {"keys hidden though nothing is padded",
     GRAPH(VALID QKV "hidden = Not (valid) a = engraft.Attention (q, q, q, hidden) " OUT), "hides keys where nothing"},
    {"keys that tokens hide",
     GRAPH(QKV "valid = Cast <to = 9> (input_ids) a = engraft.Attention (q, q, q, valid) " OUT),
     "tokens decide which keys it sees"},
    {"attention whose mask is not known", GRAPH(QKV "a = Attention (q, q, q) " OUT),
     "(Attention): what its mask hides is not proven"},
    {"positions relative to the length",
     GRAPH(RANGE "f = Cast <to = 1> (r) l = Cast <to = 1> (n) p = Div (f, l) u = Unsqueeze (p, a1) y = Mul (h, u) "),
     "depends on the length of the document"},
    {"a number that grows with the length", GRAPH(RANGE "l = Cast <to = 1> (n) y = Mul (h, l) "),
     "depends on the length of the document"},
    {"several rows", "(int64[2,S] input_ids) => (float[2,S] y) { y = Cast <to = 1> (input_ids) }",
     "several rows a batch"},
    {"an input that nobody knows",
     "(int64[B,S] input_ids, int64[B,S] kinds) => (int64[B,S] y) { y = Add (input_ids, kinds) }", "\"kinds\""},
    {"a fixed length", "(int64[B,8] input_ids) => (float[B,8] y) { y = Cast <to = 1> (input_ids) }",
     "the length of a row"},
};

/* ---- running ---- */

/* One token, several, a row's end; cu_seqlens has room for more. */
static const int32_t offsets[] = {0, 1, 6, 7, 10, 18, 18, 18};
enum { N_DOCUMENTS = 5, N_ROWS = 18, N_OFFSETS = 8, WIDTH = 8 };

static egi_tensor matrix(egi_arena *arena, int64_t first, int64_t length, int what) {
  egi_tensor tensor = {.dtype = EG_DTYPE_I64, .rank = 2, .dims = {1, length}};
  int64_t *numbers = EGI_NEW(arena, int64_t, (size_t)length);
  assert_non_null(numbers);
  for (int64_t i = 0; i < length; i++) numbers[i] = what == 0 ? (7 * (first + i)) % 23 : what == 1 ? 1 : i;
  tensor.data = numbers;
  egi_tensor_set_contiguous(&tensor);
  return tensor;
}

static void run(pass_fixture *fixture, int64_t first, int64_t length, float *out) {
  const egi_graph *graph = fixture->graph;
  egi_arena arena;
  egi_tensor inputs[4], output;
  egi_arena_init(&arena, fixture->ctx, EGI_PURPOSE_GRAPH);
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const char *name = graph->values[graph->inputs[i]].name;
    int what = strcmp(name, "input_ids") == 0 ? 0 : strcmp(name, "attention_mask") == 0 ? 1 : 2;
    inputs[i] = matrix(&arena, first, length, what);
    if (strcmp(name, EGI_INPUT_OFFSETS) != 0) continue;
    inputs[i] = (egi_tensor){(void *)(uintptr_t)offsets, EG_DTYPE_I32, 1, {N_OFFSETS}, {1}};
  }
  if (fixture->module->evaluator->graph(fixture->ctx, graph, inputs, &arena, &output) != EG_OK)
    fail_msg("%s", eg_context_error(fixture->ctx));
  assert_int_equal(egi_tensor_count(&output), length * WIDTH);
  memcpy(out, output.data, (size_t)(length * WIDTH) * sizeof *out);
  egi_arena_clear(&arena);
}

static void check_taken(pass_fixture *fixture, const packing_row *row) {
  float alone[N_ROWS * WIDTH], packed[N_ROWS * WIDTH];
  for (int d = 0; d < N_DOCUMENTS; d++)
    run(fixture, offsets[d], offsets[d + 1] - offsets[d], alone + offsets[d] * WIDTH);
  pass_run_settled(fixture, "cache_metadata");
  if (egi_graph_find_value(fixture->graph, EGI_INPUT_OFFSETS) == 0) fail_msg("%s: not taken", row->title);
  assert_int_equal(fixture->graph->n_inputs, 2);
  assert_true(pass_count(fixture, EGI_OP_PackedMetadata) <= 1);
  for (int expanded = 0; expanded < 2; expanded++) {
    run(fixture, 0, N_ROWS, packed);
    for (int i = 0; i < N_ROWS * WIDTH; i++)
      if (!(fabs((double)packed[i] - (double)alone[i]) <= 1e-5))
        fail_msg("%s: row %d is %g alone and %g packed%s", row->title, i / WIDTH, (double)alone[i], (double)packed[i],
                 expanded ? ", as bodies" : "");
    pass_run(fixture, "expand_fused", NULL);
  }
}

static void check_left(pass_fixture *fixture, const packing_row *row) {
  egi_pass_report report = {0};
  egi_pass_run run = {.ctx = fixture->ctx, .report = &report};
  if (egi_pass_cache_metadata(&run, fixture->graph) != EG_OK) fail_msg("%s", eg_context_error(fixture->ctx));
  if (run.has_changed) fail_msg("%s: taken", row->title);
  if (!report.nearest_miss || !strstr(report.nearest_miss, row->miss))
    fail_msg("%s: the miss is \"%s\"", row->title, report.nearest_miss ? report.nearest_miss : "");
  assert_int_equal(report.n_matched, 0);
}

static void test_rows(void **state) {
  for (size_t i = 0; i < EGI_COUNT(rows); i++) {
    pass_graph(*state, rows[i].text);
    if (rows[i].miss)
      check_left(*state, &rows[i]);
    else
      check_taken(*state, &rows[i]);
  }
}

/* ---- shape of the result ---- */

/* One node for layers of any window, forward; positions in the place of the input. */
static void test_shared(void **state) {
  pass_graph(*state, GRAPH(VALID QKV "a = engraft.Attention <causal = 1, window = 2> (q, q, q, valid) "
                                     "b = engraft.Attention <causal = 1> (a, q, q, valid) "
                                     "ta = Transpose <perm = [0,2,1,3]> (b) y = Reshape (ta, flat) "));
  pass_run_settled(*state, "cache_metadata");
  pass_expect(*state, "%1 = Cast<to=1>(input_ids)\n"
                      "%2 = Unsqueeze(%1, {2})\n"
                      "%3 = Mul(%2, spread)\n"
                      "%4 = Sin(%3)\n"
                      "%5 = Reshape(%4, {0,0,2,4})\n"
                      "%6 = Transpose<perm=0,2,1,3>(%5)\n"
                      "%7, %8, %9 = PackedMetadata(engraft.cu_seqlens, input_ids)\n"
                      "%10 = Attention<causal=1><window=2>(%6, %6, %6, _, _, %7, %8)\n"
                      "%11 = Attention<causal=1>(%10, %6, %6, _, _, %7, %8)\n"
                      "%12 = Transpose<perm=0,2,1,3>(%11)\n"
                      "%13 = Reshape(%12, {0,0,8})\n"
                      "-> y=%13\n");
  if (egi_rebuild_metadata(((pass_fixture *)*state)->graph, true) != EG_OK) fail_msg("not rebuilt");
  assert_int_equal(pass_count(*state, EGI_OP_PackedMetadata), 2);
  float packed[N_ROWS * WIDTH];
  run(*state, 0, N_ROWS, packed);
}

/* ---- decoding --------------------------------------------------------------------------------------------------- */

/* Positions of the input, angles from a table of all positions, keys and values behind states, one row for the head. */
static void pieces_read_caches(void **state) {
  pass_fixture *fixture = *state;
  const egi_pipeline_options decoding = {.tokens = 4, .is_decoding = true};
  static const char *const first[] = {"cache_metadata"}, *const second[] = {"cache_keys", "eliminate_dead"};
  pass_graph(fixture,
             "(int64[B,S] input_ids) => (float[B,S,3] logits) <float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, int64 one = {1}, "
             "int64 zero = {0}, int64[1] a1 = {1}, int64[4] heads = {0,0,1,2}, int64[3] flat = {0,0,2}, "
             "float[3,2] w = {1,2,3,4,5,6}>\n"
             "{ e = Gather (t, input_ids) s = Shape (input_ids) n = Gather (s, one) r = Range (zero, n, one) "
             "f = Cast <to = 1> (r) c = Cos (f) g = Unsqueeze (c, a1) x = Mul (e, g) s4 = Reshape (x, heads) "
             "q = Transpose <perm = [0,2,1,3]> (s4) a = engraft.Attention <causal = 1> (q, q, q) "
             "ta = Transpose <perm = [0,2,1,3]> (a) y = Reshape (ta, flat) logits = engraft.Linear (y, w) }");
  for (int run = 0; run < 2; run++) {
    assert_int_equal(egi_passes_run(fixture->graph, first, 1, &decoding, NULL), EG_OK);
    assert_int_equal(egi_passes_run(fixture->graph, second, 2, &decoding, NULL), EG_OK);
  }
  pass_expect(fixture, "%1 = Gather(t, input_ids)\n%2 = Gather<axis=0>(g_1, engraft.positions)\n%3 = Mul(%1, %2)\n"
                       "%4 = Reshape(%3, {0,0,1,2})\n%5 = Transpose<perm=0,2,1,3>(%4)\n"
                       "%6 = CacheUpdate(engraft.cache.0, %5, engraft.positions)\n"
                       "%7 = CacheUpdate(engraft.cache.1, %5, engraft.positions)\n"
                       "%8 = Attention<causal=1>(%5, %6, %7, _, _, _, _, _, engraft.positions)\n"
                       "%9 = Transpose<perm=0,2,1,3>(%8)\n%10 = Reshape(%9, {0,0,2})\n"
                       "%11 = Gather<axis=1>(%10, engraft.row)\n%12 = Linear(%11, w)\n-> logits=%12\n");
  const egi_state *cache = &fixture->graph->module->states[1];
  assert_int_equal(cache->pool, EGI_POOL_CACHE);
  assert_int_equal(cache->dims[2], 4);
  assert_int_equal(fixture->graph->n_inputs, 3);
}

/* What sees keys that are not there yet keeps the whole row. */
static void pieces_need_causality(void **state) {
  pass_fixture *fixture = *state;
  const egi_pipeline_options decoding = {.tokens = 4, .is_decoding = true};
  static const char *const names[] = {"cache_metadata"};
  egi_pass_report report = {0};
  pass_graph(fixture, GRAPH(QKV "a = engraft.Attention (q, q, q) " OUT));
  assert_int_equal(egi_passes_run(fixture->graph, names, 1, &decoding, &report), EG_OK);
  assert_string_equal(report.nearest_miss, "a token sees those behind it");
  assert_int_equal(egi_graph_find_value(fixture->graph, EGI_INPUT_ROW_POSITIONS), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_rows, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_shared, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(pieces_read_caches, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(pieces_need_causality, pass_set_up, pass_tear_down)};
  return cmocka_run_group_tests_name("cache_metadata", tests, NULL, NULL);
}
