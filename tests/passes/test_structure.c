/* The structure of recognised graphs: sizes and counts read off the flow, for spellings that differ. */
#include "support_passes.h"

#include <string.h>

#define BEGIN                                                                                                        \
  "(int64[batch,seq] input_ids) => (float[batch,seq,11] logits) <float[11,4] table = {1,2,3,4, 5,-6,7,8, 9,1,-2,3, " \
  "4,5,6,7, 8,9,1,2, -3,4,5,6, 7,-8,9,1, 2,3,4,5, 6,7,-8,9, 1,2,3,-4, 5,6,7,8}, float[4] scale = {1,2,3,4}, "        \
  "float[4,8] qkv = {1,2,3,4,5,6,7,8, 1,0,0,1,0,1,1,0, 0,1,0,1,0,1,0,1, 1,1,0,0,1,1,0,0}, "                          \
  "float[4,4] square = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, int64[3] parts = {4,2,2}, "                             \
  "int64[4] q_heads = {0,0,2,2}, int64[4] kv_heads = {0,0,1,2}, int64[3] flat = {0,0,4}, "                           \
  "float[1,8,1] c = {1,2,3,4,5,6,7,8}, float[1,8,1] s = {1,2,3,4,5,6,7,8}, float half = {0.5}, "                     \
  "int64[1] zero = {0}, int64[1] last = {1}> { "                                                                     \
  "length = Shape <start = 1, end = 2> (input_ids) cos = Slice (c, zero, length, last) "                             \
  "sin = Slice (s, zero, length, last) x = Gather (table, input_ids) "
#define LAYER(in, out)                                                                                              \
  out "n = RMSNormalization (" in ", scale) " out "p = MatMul (" out "n, qkv) " out "q0, " out "k0, " out           \
      "v0 = Split <axis = -1> (" out "p, parts) " out "q1 = Reshape (" out "q0, q_heads) " out "k1 = Reshape (" out \
      "k0, kv_heads) " out "v1 = Reshape (" out "v0, kv_heads) " out "q2 = Transpose <perm = [0,2,1,3]> (" out      \
      "q1) " out "k2 = Transpose <perm = [0,2,1,3]> (" out "k1) " out "v2 = Transpose <perm = [0,2,1,3]> (" out     \
      "v1) " out "q = RotaryEmbedding (" out "q2, cos, sin) " out "k = RotaryEmbedding (" out "k2, cos, sin) " out  \
      "a = engraft.Attention <causal = 1, window = 3, softcap = 2.0> (" out "q, " out "k, " out "v2) " out          \
      "t = Transpose <perm = [0,2,1,3]> (" out "a) " out "f = Reshape (" out "t, flat) " out "o = MatMul (" out     \
      "f, square) " out "r = Add (" in ", " out "o) " out "m = LayerNormalization (" out "r, scale) " out           \
      "u = MatMul (" out "m, square) " out "g = Sigmoid (" out "u) " out "h = Mul (" out "u, " out "g) " out        \
      "d = MatMul (" out "h, square) " out " = Add (" out "r, " out "d) "
#define END(in) "e = RMSNormalization (" in ", scale) w = Transpose (table) logits = MatMul (e, w) }"

static egi_structure find(pass_fixture *fixture, const char *graph) {
  egi_structure structure;
  pass_graph(fixture, graph);
  if (egi_structure_find(fixture->graph, &fixture->arena, &structure) != EG_OK)
    fail_msg("%s", eg_context_error(fixture->ctx));
  return structure;
}

static void a_recognised_graph_has_no_rest(void **state) {
  egi_structure s = find(*state, BEGIN LAYER("x", "y") LAYER("y", "z") END("z"));
  assert_int_equal(s.layers, 2);
  assert_int_equal(s.hidden, 4);
  assert_int_equal(s.heads, 2);
  assert_int_equal(s.kv_heads, 1);
  assert_int_equal(s.head_dim, 2);
  assert_int_equal(s.vocab, 11);
  assert_int_equal(s.n_windows, 2);
  assert_int_equal(s.windows[1], 3);
  assert_true(s.softcap > 1.9 && s.softcap < 2.1);
  assert_int_equal(s.rope_dim, 2);
  assert_int_equal(s.n_rope_tables, 1);
  assert_false(s.has_sinks || s.has_qk_norm || s.is_rope_interleaved);
  assert_true(s.is_tied);
  assert_int_equal(s.counts.norm, 5);
  assert_int_equal(s.counts.attention, 2);
  assert_int_equal(s.counts.linear, 2 * 6 + 1);
  assert_int_equal(s.counts.rope, 4);
  assert_int_equal(s.counts.glu + s.counts.moe, 0);
  assert_int_equal(s.counts.other, 0);
}

/* A sum with a bias, a scale, a softmax that nothing explains: each is left. */
static void what_is_not_recognised_counts(void **state) {
  egi_structure s =
      find(*state, BEGIN LAYER("x", "y") "i = Mul (y, half) b = Add (i, scale) j = Softmax (b) k = Add (j, y) " LAYER(
                       "k", "z") END("z"));
  assert_int_equal(s.counts.other, 3);
}

/* In front of the layers and behind them: scaled embeddings, capped logits. */
static void the_ends_are_no_layers(void **state) {
  egi_structure s = find(
      *state, BEGIN
      "i = Mul (x, half) " LAYER("i", "z") "e = RMSNormalization (z, scale) w = Transpose (table) raw = MatMul (e, w) "
                                           "small = Mul (raw, half) logits = Tanh (small) }");
  assert_int_equal(s.layers, 1);
  assert_int_equal(s.counts.other, 0);
  assert_true(s.is_tied);
}

static void another_head_is_not_tied(void **state) {
  egi_structure s =
      find(*state, BEGIN LAYER("x", "z") "e = RMSNormalization (z, scale) o = Neg (table) w = Transpose (o) "
                                         "logits = MatMul (e, w) }");
  assert_false(s.is_tied);
}

/* An activation with a condition is a plain one; heads that are put together of pieces are still of their layer. */
static void conditions_and_pieces_are_no_rest(void **state) {
  egi_structure s = find(
      *state, BEGIN LAYER("x", "y") "none = Sub (half, half) p = Greater (y, none) n = Exp (y) i = Where (p, y, n) "
                                    "j = Add (i, y) " LAYER("j", "z") END("z"));
  assert_int_equal(s.counts.other, 0);
  s = find(*state,
           BEGIN "n = RMSNormalization (x, scale) pq = MatMul (n, qkv) q0, k0, v0 = Split <axis = -1> (pq, parts) "
                 "q1 = Reshape (q0, q_heads) k1 = Reshape (k0, kv_heads) v1 = Reshape (v0, kv_heads) "
                 "q2 = Transpose <perm = [0,2,1,3]> (q1) k2 = Transpose <perm = [0,2,1,3]> (k1) "
                 "v2 = Transpose <perm = [0,2,1,3]> (v1) qa, qb = Split <axis = -1, num_outputs = 2> (q2) "
                 "qc = Concat <axis = -1> (qb, qa) q = RotaryEmbedding (qc, cos, sin) "
                 "a = engraft.Attention <causal = 1> (q, k2, v2) t = Transpose <perm = [0,2,1,3]> (a) "
                 "f = Reshape (t, flat) o = MatMul (f, square) r = Add (x, o) " END("r"));
  assert_int_equal(s.counts.other, 0);
  assert_int_equal(s.counts.linear, 3 + 1 + 1);
  assert_int_equal(s.counts.rope, 1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(a_recognised_graph_has_no_rest), TEST(what_is_not_recognised_counts),
                                     TEST(the_ends_are_no_layers), TEST(conditions_and_pieces_are_no_rest),
                                     TEST(another_head_is_not_tied)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
