/* fuse_rope on the spellings of exporters, and on graphs that look like rotations and are none. */
#include "support_rewrites.h"

/* Angles by position: [B, S, 4] in `angles`. */
#define ANGLES "pu = Unsqueeze (pos, last) pf = Cast <to = 1> (pu) angles = Mul (pf, frequencies) "
#define TABLES ANGLES "f = Concat <axis = -1> (angles, angles) cf = Cos (f) sf = Sin (f) "
#define HALF_TABLES ANGLES "cf = Cos (angles) sf = Sin (angles) "
#define HEADS "c = Unsqueeze (cf, one) s = Unsqueeze (sf, one) "
#define NUMBERS                                                                                                   \
  "float[4] frequencies = {1, 0.5, 0.25, 0.125}, int64[1] last = {-1}, int64[1] zero = {0}, int64[1] one = {1}, " \
  "int64[1] two = {2}, int64[1] three = {3}, int64[1] four = {4}, int64[1] end = {9223372036854775807}"
#define X "(float[B,H,S,8] x, int64[B,S] pos) => (float[B,H,S,8] y) "
#define XS "(float[B,S,H,8] x, int64[B,S] pos) => (float[B,S,H,8] y) "
#define HALVES "a = Slice (x, zero, four, three, one) b = Slice (x, four, end, three, one) "
#define TURN "n = Neg (b) t = Concat <axis = -1> (n, a) p = Mul (x, c) q = Mul (t, s) "
#define ROTATED "ac = Mul (a, c) bs = Mul (b, s) lo = Sub (ac, bs) bc = Mul (b, c) as = Mul (a, s) hi = Add (bc, as) "
/* repeat_interleave(2): [B, S, 4] -> [B, S, 8] as f0 f0 f1 f1 .. */
#define PAIRED(to, from)                                                                                        \
  to "_1 = Unsqueeze (" from ", last) " to "_2 = Concat <axis = -1> (" to "_1, " to "_1) " to " = Reshape (" to \
     "_2, flat) "
#define PAIRED_TABLES ANGLES PAIRED("f", "angles") "cf = Cos (f) sf = Sin (f) "
#define FLAT ", int64[3] flat = {0, 0, 8}"
#define STACK(to, first, second)                                                                                   \
  to "_1 = Unsqueeze (" first ", last) " to "_2 = Unsqueeze (" second ", last) " to "_3 = Concat <axis = -1> (" to \
     "_1, " to "_2) " to "_4 = Shape (x) " to " = Reshape (" to "_3, " to "_4) "
#define TURNS "a = Slice (x, zero, end, three, two) b = Slice (x, one, end, three, two) "

#define ROPE(title, text) \
  { title, "fuse_rope", EGI_OP_RotaryEmbedding, 1, text, NULL }
#define NO_ROPE(title, text, miss) \
  { title, "fuse_rope", EGI_OP_NONE, 0, text, miss }

static const spelling spellings[] = {
    ROPE("torch: rotate_half by slices", X "<" NUMBERS "> {" TABLES HEADS HALVES TURN "y = Add (p, q) }"),
    ROPE("operands the other way round, slices without steps, end of the size",
         X "<" NUMBERS ", int64[1] eight = {8}> {" TABLES HEADS "a = Slice (x, zero, four, last) "
           "b = Slice (x, four, eight, last) n = Neg (b) t = Concat <axis = 3> (n, a) p = Mul (c, x) q = Mul (s, t) "
           "y = Add (q, p) }"),
    ROPE("starts from the back",
         X "<" NUMBERS ", int64[1] back = {-4}> {" TABLES HEADS
           "a = Slice (x, zero, back, last, one) b = Slice (x, back, end, last, one) " TURN "y = Add (p, q) }"),
    ROPE("Split",
         X "<" NUMBERS "> {" TABLES HEADS "a, b = Split <axis = -1, num_outputs = 2> (x) " TURN "y = Add (p, q) }"),
    ROPE("Split with sizes, negated by a product",
         X "<" NUMBERS ", int64[2] parts = {4, 4}, float minus = {-1}> {" TABLES HEADS
           "a, b = Split <axis = 3> (x, parts) n = Mul (b, minus) t = Concat <axis = -1> (n, a) p = Mul (x, c) "
           "q = Mul (t, s) y = Add (p, q) }"),
    ROPE("scaled tables",
         X "<" NUMBERS ", float scale = {1.25}> {" TABLES
           "cg = Mul (cf, scale) sg = Mul (sf, scale) c = Unsqueeze (cg, one) s = Unsqueeze (sg, one) " HALVES TURN
           "y = Add (p, q) }"),
    ROPE("tables without a batch",
         "(float[B,H,S,8] x, float[S,4] angles) => (float[B,H,S,8] y) <" NUMBERS "> { f = Concat <axis = -1> (angles, "
         "angles) c = Cos (f) s = Sin (f) " HALVES TURN "y = Add (p, q) }"),
    ROPE("gpt-oss: tables of half the width",
         X "<" NUMBERS "> {" HALF_TABLES HEADS "a, b = Split <axis = 3, num_outputs = 2> (x) " ROTATED
           "y = Concat <axis = -1> (lo, hi) }"),
    ROPE("tables of half the width, slices",
         X "<" NUMBERS "> {" HALF_TABLES HEADS HALVES ROTATED "y = Concat <axis = -1> (lo, hi) }"),
    ROPE(
        "half precision, tables cast to it",
        "(float16[B,H,S,8] x, int64[B,S] pos) => (float16[B,H,S,8] y) <" NUMBERS "> {" TABLES
        "ch = Cast <to = 10> (cf) sh = Cast <to = 10> (sf) c = Unsqueeze (ch, one) s = Unsqueeze (sh, one) " HALVES TURN
        "y = Add (p, q) }"),
    ROPE("half precision, rotated in float",
         "(bfloat16[B,H,S,8] x0, int64[B,S] pos) => (bfloat16[B,H,S,8] y) <" NUMBERS "> {" TABLES HEADS
         "x = Cast <to = 1> (x0) " HALVES TURN "z = Add (p, q) y = Cast <to = 16> (z) }"),
    ROPE("gathered by position from constants of full width",
         X "<" NUMBERS ", float[5,8] cosines = {1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0.6, 0.7, 0.8, 0.5, 0.6, 0.7, 0.8, "
           "-0.5, 0.1, 0.2, 0.3, -0.5, 0.1, 0.2, 0.3, 0.9, 0.8, 0.7, 0.6, 0.9, 0.8, 0.7, 0.6, 1, 2, 3, 4, 1, 2, 3, 4}, "
           "float[5,8] sines = {0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 1, 0, 1, 0, 1, "
           "0, 1, "
           "0, 2, 2, 1, 1, 2, 2, 1, 1}> { cf = Gather (cosines, pos) sf = Gather (sines, pos) " HEADS HALVES TURN
           "y = Add (p, q) }"),
    ROPE("frequencies of full width",
         X "<float[1,8] wide = {1, 0.5, 0.25, 0.125, 1, 0.5, 0.25, 0.125}, " NUMBERS "> { pu = Unsqueeze (pos, last) "
           "pf = Cast <to = 1> (pu) f = MatMul (pf, wide) cf = Cos (f) sf = Sin (f) " HEADS HALVES TURN
           "y = Add (p, q) }"),
    ROPE("frequencies times positions, transposed",
         X "<float[1,4,1] column = {1, 0.5, 0.25, 0.125}, " NUMBERS "> { pu = Unsqueeze (pos, one) "
           "pf = Cast <to = 1> (pu) m = MatMul (column, pf) angles = Transpose <perm = [0, 2, 1]> (m) "
           "f = Concat <axis = -1> (angles, angles) cf = Cos (f) sf = Sin (f) " HEADS HALVES TURN "y = Add (p, q) }"),
    ROPE("sequence before heads",
         XS "<" NUMBERS "> {" TABLES "c = Unsqueeze (cf, two) s = Unsqueeze (sf, two) " HALVES TURN "y = Add (p, q) }"),
    ROPE("sequence before heads, half tables",
         XS "<" NUMBERS "> {" HALF_TABLES "c = Unsqueeze (cf, two) s = Unsqueeze (sf, two) " HALVES ROTATED
            "y = Concat <axis = -1> (lo, hi) }"),
    ROPE("the first half of the head alone",
         "(float[B,H,S,16] z, int64[B,S] pos) => (float[B,H,S,16] y) <" NUMBERS ", int64[1] eight = {8}> {" TABLES HEADS
         "x = Slice (z, zero, eight, three, one) rest = Slice (z, eight, end, three, one) " HALVES TURN
         "r = Add (p, q) y = Concat <axis = -1> (r, rest) }"),
    ROPE("the first part of the head, by Split",
         "(float[B,H,S,12] z, int64[B,S] pos) => (float[B,H,S,12] y) <" NUMBERS
         ", int64[2] parts = {8, 4}> {" TABLES HEADS "x, rest = Split <axis = -1> (z, parts) " HALVES TURN
         "r = Add (p, q) y = Concat <axis = -1> (r, rest) }"),
    ROPE("the first part of the head, sequence before heads",
         "(float[B,S,H,12] z, int64[B,S] pos) => (float[B,S,H,12] y) <" NUMBERS ", int64[1] eight = {8}> {" TABLES
         "c = Unsqueeze (cf, two) s = Unsqueeze (sf, two) x = Slice (z, zero, eight, three, one) "
         "rest = Slice (z, eight, end, three, one) " HALVES TURN "r = Add (p, q) y = Concat <axis = -1> (r, rest) }"),
    ROPE("DeepSeek: even and odd elements turned, and kept apart",
         X "<" NUMBERS "> {" HALF_TABLES HEADS TURNS ROTATED "y = Concat <axis = -1> (lo, hi) }"),
    ROPE("even and odd elements kept apart, behind what is not turned",
         "(float[B,H,S,12] z, int64[B,S] pos) => (float[B,H,S,12] y) <" NUMBERS
         ", int64[2] parts = {4, 8}> {" HALF_TABLES HEADS "rest, x = Split <axis = -1> (z, parts) " TURNS ROTATED
         "y = Concat <axis = -1> (rest, lo, hi) }"),
    ROPE("halves and what is not turned joined at once",
         "(float[B,S,H,12] z, int64[B,S] pos) => (float[B,S,H,12] y) <" NUMBERS
         ", int64[3] parts = {4, 4, 4}> {" HALF_TABLES
         "c = Unsqueeze (cf, two) s = Unsqueeze (sf, two) a, b, rest = Split <axis = -1> (z, parts) " ROTATED
         "y = Concat <axis = -1> (lo, hi, rest) }"),
    ROPE("even and odd elements kept apart, sequence before heads",
         XS "<" NUMBERS "> {" HALF_TABLES "c = Unsqueeze (cf, two) s = Unsqueeze (sf, two) " TURNS ROTATED
            "y = Concat <axis = -1> (lo, hi) }"),
    ROPE("pairs: slices of step 2, tables of full width",
         X "<" NUMBERS FLAT "> {" PAIRED_TABLES HEADS TURNS
           "n = Neg (b) " STACK("t", "n", "a") "p = Mul (x, c) q = Mul (t, s) y = Add (p, q) }"),
    ROPE("pairs: tables of half the width",
         X "<" NUMBERS "> {" HALF_TABLES HEADS TURNS ROTATED STACK("y", "lo", "hi") "}"),
    ROPE("pairs: rows of two, gathered", X
         "<" NUMBERS ", int64 i0 = {0}, int64 i1 = {1}, int64[5] rows = {0, 0, 0, 4, 2}> {" HALF_TABLES HEADS
         "r = Reshape (x, rows) a = Gather <axis = -1> (r, i0) b = Gather <axis = 4> (r, i1) " ROTATED STACK("y", "lo",
                                                                                                             "hi") "}"),
    ROPE("pairs: rows of two, split",
         X "<" NUMBERS ", int64[5] rows = {0, 0, 0, 4, 2}> {" HALF_TABLES HEADS "r = Reshape (x, rows) "
           "u, v = Split <axis = -1, num_outputs = 2> (r) a = Squeeze (u, last) b = Squeeze (v, last) " ROTATED STACK(
               "y", "lo", "hi") "}"),
};

static const spelling near_misses[] = {
    NO_ROPE("another sign",
            X "<" NUMBERS "> {" TABLES HEADS HALVES "n = Neg (a) t = Concat <axis = -1> (b, n) "
              "p = Mul (x, c) q = Mul (t, s) y = Add (p, q) }",
            "wanted Neg"),
    NO_ROPE("a cut off the middle",
            X "<" NUMBERS "> {" TABLES HEADS "a = Slice (x, zero, three, three, one) "
              "b = Slice (x, three, end, three, one) " TURN "y = Add (p, q) }",
            "the parts are not the two halves"),
    NO_ROPE("halves the other way round",
            X "<" NUMBERS "> {" TABLES HEADS "b = Slice (x, zero, four, three, one) "
              "a = Slice (x, four, end, three, one) " TURN "y = Add (p, q) }",
            "the parts are not the two halves"),
    NO_ROPE("halves of another axis",
            "(float[B,4,8,8] x, int64[B,8] pos) => (float[B,4,8,8] y) <" NUMBERS "> {" TABLES HEADS
            "a = Slice (x, zero, four, two, one) b = Slice (x, four, end, two, one) n = Neg (b) "
            "t = Concat <axis = 2> (n, a) p = Mul (x, c) q = Mul (t, s) y = Add (p, q) }",
            "an attribute has another value"),
    NO_ROPE("whole numbers",
            "(int64[B,H,S,8] x, int64[B,H,S,8] c0, int64[B,H,S,8] s0) => (int64[B,H,S,8] y) <" NUMBERS "> { "
            "c = ReduceMax (c0, one) s = ReduceMax (s0, one) " HALVES TURN "y = Add (p, q) }",
            "what is rotated are no heads of floats"),
    NO_ROPE("halves of the table differ",
            X "<float[4] others = {3, 2, 1, 0.5}, " NUMBERS "> {" ANGLES "g = Mul (pf, others) "
              "f = Concat <axis = -1> (angles, g) cf = Cos (f) sf = Sin (f) " HEADS HALVES TURN "y = Add (p, q) }",
            "a table is not proven to hold each angle twice"),
    NO_ROPE("a constant table with one number changed",
            X
            "<float[5,8] table = {1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0.6, 0.7, 0.8, 0.5, 0.6, 0.7, 0.8, -0.5, 0.1, 0.2, 0.3, "
            "-0.5, 0.1, 0.2, 0.3, 0.9, 0.8, 0.7, 0.6, 0.9, 0.8, 0.7, 0.6, 1, 2, 3, 4, 1, 2, 3, 4.5}, " NUMBERS "> { "
            "cf = Gather (table, pos) sf = Gather (table, pos) " HEADS HALVES TURN "y = Add (p, q) }",
            "a table is not proven to hold each angle twice"),
    NO_ROPE("tables in pairs, halves turned",
            X "<" NUMBERS FLAT "> {" PAIRED_TABLES HEADS HALVES TURN "y = Add (p, q) }",
            "a table is not proven to hold each angle twice"),
    NO_ROPE("a table for each head",
            "(float[B,H,S,8] x, float[B,H,S,8] c, float[B,H,S,8] s) => (float[B,H,S,8] y) <" NUMBERS "> {" HALVES TURN
            "y = Add (p, q) }",
            "a table does not vary by position and element alone"),
    NO_ROPE("another value is turned",
            "(float[B,H,S,8] x, float[B,H,S,8] z, int64[B,S] pos) => (float[B,H,S,8] y) <" NUMBERS "> {" TABLES HEADS
            "a = Slice (z, zero, four, three, one) b = Slice (z, four, end, three, one) " TURN "y = Add (p, q) }",
            "an operand is not the same value as before"),
    NO_ROPE("the turned value is used elsewhere",
            "(float[B,H,S,8] x, int64[B,S] pos) => (float[B,H,S,8] y, float[B,H,S,8] t) <" NUMBERS
            "> {" TABLES HEADS HALVES TURN "y = Add (p, q) }",
            "its result is used outside the pattern"),
};

/* Tables without a batch take that of an input: no layer's table hangs on another layer. */
static void test_batch(void **state) {
  pass_graph(*state,
             "(float[B,H,S,8] x, float[S,4] angles) => (float[B,H,S,8] z) <" NUMBERS
             "> { f = Concat <axis = -1> (angles, angles) c = Cos (f) s = Sin (f) " HALVES TURN
             "y = Add (p, q) a2 = Slice (y, zero, four, three, one) b2 = Slice (y, four, end, three, one) "
             "n2 = Neg (b2) t2 = Concat <axis = -1> (n2, a2) p2 = Mul (y, c) q2 = Mul (t2, s) z = Add (p2, q2) }");
  pass_run_settled(*state, "fuse_rope");
  pass_expect(*state, "%1 = Concat<axis=-1>(angles, angles)\n"
                      "%2 = Cos(%1)\n"
                      "%3 = Sin(%1)\n"
                      "%4 = Unsqueeze(%2, {0})\n"
                      "%5 = Slice(%4, {0}, {4}, {-1}, {1})\n"
                      "%6 = Shape<start=0><end=1>(x)\n"
                      "%7 = Concat<axis=0>(%6, {1}, {1})\n"
                      "%8 = Expand(%5, %7)\n"
                      "%9 = Unsqueeze(%3, {0})\n"
                      "%10 = Slice(%9, {0}, {4}, {-1}, {1})\n"
                      "%11 = Expand(%10, %7)\n"
                      "%12 = RotaryEmbedding<interleaved=0>(x, %8, %11)\n"
                      "%13 = RotaryEmbedding<interleaved=0>(%12, %8, %11)\n"
                      "-> z=%13\n");
}

static void test_spellings(void **state) {
  for (size_t i = 0; i < EGI_COUNT(spellings); i++) check_spelling(*state, &spellings[i]);
}

static void test_near_misses(void **state) {
  for (size_t i = 0; i < EGI_COUNT(near_misses); i++) check_spelling(*state, &near_misses[i]);
}

/* Queries and keys share the tables that the pass makes. */
static void test_result(void **state) {
  pass_graph(
      *state,
      "(float[B,H,S,8] x, float[B,2,S,8] k, float[B,S,4] angles) => (float[B,H,S,8] y, float[B,2,S,8] z) <" NUMBERS
      "> { f = Concat <axis = -1> (angles, angles) cf = Cos (f) sf = Sin (f) " HEADS HALVES TURN
      "y = Add (p, q) a2 = Slice (k, zero, four, three, one) b2 = Slice (k, four, end, three, one) "
      "n2 = Neg (b2) t2 = Concat <axis = -1> (n2, a2) p2 = Mul (k, c) q2 = Mul (t2, s) z = Add (p2, q2) }");
  pass_run_settled(*state, "fuse_rope");
  pass_expect(*state, "%1 = Concat<axis=-1>(angles, angles)\n"
                      "%2 = Cos(%1)\n"
                      "%3 = Sin(%1)\n"
                      "%4 = Slice(%2, {0}, {4}, {-1}, {1})\n"
                      "%5 = Slice(%3, {0}, {4}, {-1}, {1})\n"
                      "%6 = RotaryEmbedding<interleaved=0>(k, %4, %5)\n"
                      "%7 = RotaryEmbedding<interleaved=0>(x, %4, %5)\n"
                      "-> y=%7\n"
                      "-> z=%6\n");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_spellings, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_near_misses, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_batch, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_result, pass_set_up, pass_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
