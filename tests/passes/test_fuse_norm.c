/* fuse_norm on the spellings of exporters, and on graphs that look like norms and are none. */
#include "support_rewrites.h"

#include <stdio.h>
#include <string.h>

#define F "float[B,S,8] "
#define W "float[8] w = {0.5, 1, 1.5, -2, 0.25, 1, 3, 0.75}"
/* bits of 1, 2, 3, 0.5 and their like in bfloat16 and float16 */
#define W16 "bfloat16[8] w = {16256, 16384, 16448, 16128, 16256, 49024, 16384, 16128}"
#define WH "float16[8] w = {15360, 16384, 16896, 14336, 15360, 48128, 16384, 14336}"
#define NUMBERS "float two = {2}, float e = {0.00001}, int64[1] last = {-1}"
#define NORM(op, title, count, text) \
  { title, "fuse_norm", EGI_OP_##op, count, text, NULL }
#define NO_NORM(title, text, miss) \
  { title, "fuse_norm", EGI_OP_NONE, 0, text, miss }

static const spelling spellings[] = {
    NORM(RMSNormalization, "torch: Sqrt and Reciprocal", 1,
         "(" F "x) => (" F "y) <" W ", " NUMBERS "> { q = Pow (x, two) m = ReduceMean <keepdims = 1> (q, last) "
         "a = Add (m, e) s = Sqrt (a) r = Reciprocal (s) n = Mul (x, r) y = Mul (n, w) }"),
    NORM(RMSNormalization, "Div by the root, x · x, operands the other way round", 1,
         "(" F "x) => (" F "y) <" W ", " NUMBERS "> { q = Mul (x, x) m = ReduceMean (q, last) a = Add (e, m) "
         "s = Sqrt (a) n = Div (x, s) y = Mul (w, n) }"),
    NORM(RMSNormalization, "1 / root", 1,
         "(" F "x) => (" F "y) <" W ", " NUMBERS ", float one = {1}> { q = Pow (x, two) m = ReduceMean (q, last) "
         "a = Add (m, e) s = Sqrt (a) r = Div (one, s) n = Mul (r, x) y = Mul (w, n) }"),
    NORM(RMSNormalization, "Pow -0.5, axis from the front", 1,
         "(" F "x) => (" F "y) <" W ", float two = {2}, float e = {0.00001}, int64[1] a2 = {2}, float h = {-0.5}> { "
         "q = Pow (x, two) m = ReduceMean (q, a2) a = Add (m, e) r = Pow (a, h) n = Mul (x, r) y = Mul (n, w) }"),
    NORM(RMSNormalization, "Pow 0.5 and Div", 1,
         "(" F "x) => (" F "y) <" W ", " NUMBERS ", float[1] h = {0.5}> { q = Pow (x, two) m = ReduceMean (q, last) "
         "a = Add (m, e) r = Pow (a, h) n = Div (x, r) y = Mul (n, w) }"),
    NORM(RMSNormalization, "scale times the factor first", 1,
         "(" F "x) => (" F "y) <" W ", " NUMBERS "> { q = Mul (x, x) m = ReduceMean (q, last) a = Add (m, e) "
         "s = Sqrt (a) r = Reciprocal (s) f = Mul (w, r) y = Mul (f, x) }"),
    NORM(RMSNormalization, "scaled before it is divided", 1,
         "(" F "x) => (" F "y) <" W ", " NUMBERS "> { q = Mul (x, x) m = ReduceMean (q, last) a = Add (m, e) "
         "s = Sqrt (a) p = Mul (x, w) y = Div (p, s) }"),
    NORM(RMSNormalization, "scale over a factor", 1,
         "(" F "x) => (" F "y) <" W ", " NUMBERS "> { q = Mul (x, x) m = ReduceMean (q, last) a = Add (m, e) "
         "s = Sqrt (a) f = Div (w, s) y = Mul (x, f) }"),
    NORM(RMSNormalization, "sum divided by the count", 1,
         "(" F "x) => (" F "y) <" W ", " NUMBERS ", float count = {8}> { q = Mul (x, x) t = ReduceSum (q, last) "
         "m = Div (t, count) a = Add (m, e) s = Sqrt (a) r = Reciprocal (s) n = Mul (x, r) y = Mul (n, w) }"),
    NORM(RMSNormalization, "no epsilon", 1,
         "(" F "x) => (" F "y) <" W
         ", float two = {2}, int64[1] last = {-1}> { q = Pow (x, two) m = ReduceMean (q, last) "
         "s = Sqrt (m) r = Reciprocal (s) n = Mul (x, r) y = Mul (w, n) }"),
    NORM(RMSNormalization, "the mean without its axis, put back", 1,
         "(" F "x) => (" F "y) <" W ", " NUMBERS "> { q = Mul (x, x) f = ReduceMean <keepdims = 0> (q, last) "
         "m = Unsqueeze (f, last) a = Add (m, e) s = Sqrt (a) n = Div (x, s) y = Mul (n, w) }"),
    NORM(RMSNormalization, "the operator with a scale of ones, and a scale behind it", 1,
         "(" F "x) => (" F "y) <" W ", float[8] ones = {1, 1, 1, 1, 1, 1, 1, 1}> { "
         "n = RMSNormalization <epsilon = 0.001> (x, ones) y = Mul (w, n) }"),
    NORM(LayerNormalization, "the operator with a scale of ones, scale and bias behind it", 1,
         "(" F "x) => (" F "y) <" W
         ", float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] ones = {1, 1, 1, 1, 1, 1, 1, 1}> { "
         "n = LayerNormalization <epsilon = 0.001> (x, ones) p = Mul (n, w) y = Add (b, p) }"),
    NORM(RMSNormalization, "half precision, float inside, scale after the cast", 1,
         "(bfloat16[B,S,8] x) => (bfloat16[B,S,8] y) <" W16 ", " NUMBERS "> { "
         "c = Cast <to = 1> (x) q = Pow (c, two) m = ReduceMean (q, last) a = Add (m, e) s = Sqrt (a) "
         "r = Reciprocal (s) n = Mul (c, r) h = Cast <to = 16> (n) y = Mul (w, h) }"),
    NORM(RMSNormalization, "gpt-oss: the scale before the cast", 1,
         "(float16[B,S,8] x) => (float16[B,S,8] y) <" WH ", " NUMBERS "> { "
         "c = Cast <to = 1> (x) q = Pow (c, two) m = ReduceMean (q, last) a = Add (m, e) s = Sqrt (a) "
         "r = Reciprocal (s) n = Mul (c, r) v = Cast <to = 1> (w) p = Mul (v, n) y = Cast <to = 10> (p) }"),
    NORM(RMSNormalization, "everything in half precision, epsilon cast", 1,
         "(float16[B,S,8] x) => (float16[B,S,8] y) <" WH ", float16 two = {16384}, "
         "float e = {0.001}, int64[1] last = {-1}> { q = Pow (x, two) m = ReduceMean (q, last) "
         "f = Cast <to = 10> (e) a = Add (m, f) s = Sqrt (a) n = Div (x, s) y = Mul (w, n) }"),
    NORM(RMSNormalization, "Gemma: 1 + w, epsilon an expanded constant", 1,
         "(" F "x) => (" F "y) <" W ", " NUMBERS ", float one = {1}, int64[3] shape = {1, 1, 1}> { v = Add (w, one) "
         "k = Expand (e, shape) q = Pow (x, two) m = ReduceMean (q, last) a = Add (m, k) s = Sqrt (a) "
         "r = Reciprocal (s) n = Mul (x, r) y = Mul (n, v) }"),
    NORM(RMSNormalization, "Constant nodes for the numbers", 1,
         "(" F "x) => (" F "y) <" W ", int64[1] last = {-1}> { two = Constant <value_float = 2.0> () "
         "e = Constant <value = float {0.00001}> () q = Pow (x, two) m = ReduceMean (q, last) a = Add (m, e) "
         "s = Sqrt (a) r = Reciprocal (s) n = Mul (x, r) y = Mul (n, w) }"),
    NORM(RMSNormalization, "a scale of three dimensions", 1,
         "(" F "x) => (" F "y) <float[1,1,8] w = {1, 2, 3, 4, 5, 6, 7, 8}, " NUMBERS "> { q = Pow (x, two) "
         "m = ReduceMean (q, last) a = Add (m, e) s = Sqrt (a) n = Div (x, s) y = Mul (n, w) }"),
    NORM(RMSNormalization, "no scale", 1,
         "(" F "x) => (" F "y) <" NUMBERS "> { q = Pow (x, two) m = ReduceMean (q, last) a = Add (m, e) "
         "s = Sqrt (a) r = Reciprocal (s) y = Mul (x, r) }"),
    NORM(RMSNormalization, "a scale for each head: the norm has none", 1,
         "(float[B,H,S,8] x, float[H,1,8] w) => (float[B,H,S,8] y) <" NUMBERS "> { q = Pow (x, two) "
         "m = ReduceMean (q, last) a = Add (m, e) s = Sqrt (a) r = Reciprocal (s) n = Mul (x, r) y = Mul (n, w) }"),
    NORM(RMSNormalization, "two scales for one norm", 2,
         "(" F "x) => (" F "y, " F "z) <" W ", float[8] v = {1, 2, 3, 4, 5, 6, 7, 8}, " NUMBERS "> { q = Pow (x, two) "
         "m = ReduceMean (q, last) a = Add (m, e) s = Sqrt (a) r = Reciprocal (s) n = Mul (x, r) y = Mul (n, w) "
         "z = Mul (v, n) }"),
    NORM(LayerNormalization, "LayerNorm with bias", 1,
         "(" F "x) => (" F "y) <" W ", float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, " NUMBERS "> { "
         "mean = ReduceMean (x, last) d = Sub (x, mean) q = Pow (d, two) v = ReduceMean (q, last) a = Add (v, e) "
         "s = Sqrt (a) n = Div (d, s) p = Mul (n, w) y = Add (p, b) }"),
    NORM(LayerNormalization, "LayerNorm, d · d, Reciprocal, other orders", 1,
         "(" F "x) => (" F "y) <" W ", float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, " NUMBERS "> { "
         "mean = ReduceMean (x, last) d = Sub (x, mean) q = Mul (d, d) v = ReduceMean (q, last) a = Add (e, v) "
         "s = Sqrt (a) r = Reciprocal (s) f = Mul (r, w) p = Mul (f, d) y = Add (b, p) }"),
    NORM(LayerNormalization, "RMSNormalization of what is centred", 1,
         "(" F "x) => (" F "y) <" W ", int64[1] last = {-1}> { mean = ReduceMean (x, last) d = Sub (x, mean) "
         "y = RMSNormalization <epsilon = 0.001> (d, w) }"),
    NORM(LayerNormalization, "LayerNorm by sums", 1,
         "(" F "x) => (" F "y) <" W
         ", float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, float eighth = {0.125}, float count = {8}, " NUMBERS
         "> { t = ReduceSum (x, last) mean = Mul (t, eighth) d = Sub (x, mean) q = Pow (d, two) "
         "u = ReduceSum (q, last) v = Div (u, count) a = Add (v, e) s = Sqrt (a) n = Div (d, s) p = Mul (n, w) "
         "y = Add (p, b) }"),
    NORM(LayerNormalization, "LayerNorm without bias, half precision", 1,
         "(float16[B,S,8] x) => (float16[B,S,8] y) <" WH ", " NUMBERS "> { "
         "c = Cast <to = 1> (x) mean = ReduceMean (c, last) d = Sub (c, mean) q = Pow (d, two) "
         "v = ReduceMean (q, last) a = Add (v, e) s = Sqrt (a) n = Div (d, s) h = Cast <to = 10> (n) y = Mul (h, w) }"),
    NORM(LayerNormalization, "LayerNorm with neither", 1,
         "(" F "x) => (" F "y) <" NUMBERS "> { mean = ReduceMean (x, last) d = Sub (x, mean) q = Pow (d, two) "
         "v = ReduceMean (q, last) a = Add (v, e) s = Sqrt (a) y = Div (d, s) }"),
    NORM(LayerNormalization, "LayerNorm as x · s + (b - mean · s)", 1,
         "(" F "x) => (" F "y) <" W ", float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, " NUMBERS "> { "
         "mean = ReduceMean (x, last) d = Sub (x, mean) q = Mul (d, d) v = ReduceMean (q, last) a = Add (v, e) "
         "s = Sqrt (a) r = Reciprocal (s) f = Mul (r, w) p = Mul (x, f) o = Mul (mean, f) c = Sub (b, o) "
         "y = Add (p, c) }"),
};

static const spelling near_misses[] = {
    NO_NORM("mean over another axis",
            "(" F "x) => (" F "y) <" W ", float two = {2}, float e = {0.00001}, int64[1] axis = {1}> { "
            "q = Pow (x, two) m = ReduceMean (q, axis) a = Add (m, e) s = Sqrt (a) n = Div (x, s) y = Mul (n, w) }",
            "the mean is not over the last axis alone"),
    NO_NORM("mean over two axes",
            "(" F "x) => (" F "y) <" W ", float two = {2}, float e = {0.00001}, int64[2] axes = {1, 2}> { "
            "q = Pow (x, two) m = ReduceMean (q, axes) a = Add (m, e) s = Sqrt (a) n = Div (x, s) y = Mul (n, w) }",
            "the mean is not over the last axis alone"),
    NO_NORM("exponent 3",
            "(" F "x) => (" F "y) <" W ", float two = {3}, float e = {30}, int64[1] last = {-1}> { "
            "q = Pow (x, two) m = ReduceMean (q, last) a = Add (m, e) s = Sqrt (a) n = Div (x, s) y = Mul (n, w) }",
            "Pow"),
    NO_NORM("epsilon outside the root",
            "(" F "x) => (" F "y) <" W ", " NUMBERS "> { q = Pow (x, two) m = ReduceMean (q, last) s = Sqrt (m) "
            "a = Add (s, e) n = Div (x, a) y = Mul (n, w) }",
            NULL),
    NO_NORM("epsilon from an input",
            "(" F "x, float e) => (" F "y) <" W ", float two = {2}, int64[1] last = {-1}> { q = Pow (x, two) "
            "m = ReduceMean (q, last) k = Abs (e) a = Add (m, k) s = Sqrt (a) n = Div (x, s) y = Mul (n, w) }",
            "epsilon is not a constant number"),
    NO_NORM("the root of another value",
            "(" F "x, " F "z) => (" F "y) <" W ", " NUMBERS "> { q = Pow (z, two) m = ReduceMean (q, last) "
            "a = Add (m, e) s = Sqrt (a) n = Div (x, s) y = Mul (n, w) }",
            "an operand is not the same value as before"),
    NO_NORM("a sum that is not divided by its count",
            "(" F "x) => (" F "y) <" W ", " NUMBERS ", float count = {7}> { q = Mul (x, x) t = ReduceSum (q, last) "
            "m = Div (t, count) a = Add (m, e) s = Sqrt (a) n = Div (x, s) y = Mul (n, w) }",
            "the sum is not divided by its count"),
    NO_NORM("an operator that has a scale, and another behind it",
            "(" F "x) => (" F "y) <" W ", float[8] v = {1, 1, 1, 2, 1, 1, 1, 1}> { n = RMSNormalization (x, v) "
            "y = Mul (w, n) }",
            "the norm has a scale already"),
    NO_NORM("a residual sum behind the operator",
            "(" F "x) => (" F "y) <" W "> { n = LayerNormalization (x, w) y = Add (n, x) }",
            "the bias is no vector along the last axis"),
    NO_NORM("RMSNormalization of what is centred over another axis",
            "(" F "x) => (" F "y) <" W ", int64[1] axis = {1}> { mean = ReduceMean (x, axis) d = Sub (x, mean) "
            "y = RMSNormalization <epsilon = 0.001> (d, w) }",
            "the mean that is taken off is not over the last axis alone"),
    NO_NORM("a maximum in place of the mean",
            "(" F "x) => (" F "y) <" W ", " NUMBERS "> { q = Mul (x, x) m = ReduceMax (q, last) a = Add (m, e) "
            "s = Sqrt (a) n = Div (x, s) y = Mul (n, w) }",
            "wanted ReduceMean"),
    NO_NORM("the cube root",
            "(" F "x) => (" F "y) <" W ", " NUMBERS ", float h = {-0.3333}> { q = Mul (x, x) m = ReduceMean (q, last) "
            "a = Add (m, e) r = Pow (a, h) n = Mul (x, r) y = Mul (n, w) }",
            NULL),
    NO_NORM("a result cast to half precision on the way to float",
            "(" F "x) => (" F "y) <" W ", " NUMBERS "> { q = Mul (x, x) m = ReduceMean (q, last) a = Add (m, e) "
            "h = Cast <to = 10> (a) f = Cast <to = 1> (h) s = Sqrt (f) n = Div (x, s) y = Mul (n, w) }",
            "node"),
};

static void test_spellings(void **state) {
  for (size_t i = 0; i < EGI_COUNT(spellings); i++) check_spelling(*state, &spellings[i]);
}

static void test_near_misses(void **state) {
  for (size_t i = 0; i < EGI_COUNT(near_misses); i++) check_spelling(*state, &near_misses[i]);
}

/* What the pass writes, in full; Gemma's 1 + w stays an expression. */
static void test_result(void **state) {
  pass_graph(*state, "(" F "x) => (" F "y) <" W ", " NUMBERS ", float one = {1}> { v = Add (w, one) q = Pow (x, two) "
                     "m = ReduceMean (q, last) a = Add (m, e) s = Sqrt (a) r = Reciprocal (s) n = Mul (x, r) "
                     "y = Mul (n, v) }");
  pass_run_settled(*state, "fuse_norm");
  pass_expect(*state, "%1 = Add(w, 1)\n"
                      "%2 = RMSNormalization<axis=-1><epsilon=1e-05>(x, %1)\n"
                      "-> y=%2\n");
}

/* The result of a norm is a graph output inside and stays one. */
static void test_shared(void **state) {
  pass_graph(*state, "(" F "x) => (" F "y, float[B,S,1] r) <" W ", " NUMBERS "> { q = Pow (x, two) "
                     "m = ReduceMean (q, last) a = Add (m, e) s = Sqrt (a) r = Reciprocal (s) n = Mul (x, r) "
                     "y = Mul (n, w) }");
  pass_run_settled(*state, "fuse_norm");
  assert_int_equal(pass_count(*state, EGI_OP_RMSNormalization), 1);
  assert_int_equal(pass_count(*state, EGI_OP_Reciprocal), 1);
  assert_int_equal(pass_count(*state, EGI_OP_Mul), 0);
}

/* 36 layers of four norms: the whole pass is a small part of a second. */
static void test_large(void **state) {
  pass_fixture *fixture = *state;
  egi_text text;
  egi_text_init(&text, fixture->ctx);
  egi_text_add(&text, "(" F "x0) => (" F "y) <" W ", " NUMBERS "> {");
  for (unsigned i = 0; i < 144; i++)
    egi_text_format(&text,
                    " q%u = Pow (x%u, two) m%u = ReduceMean (q%u, last) a%u = Add (m%u, e) s%u = Sqrt (a%u) "
                    "r%u = Reciprocal (s%u) n%u = Mul (x%u, r%u) x%u = Mul (n%u, w)",
                    i, i, i, i, i, i, i, i, i, i, i, i, i, i + 1, i);
  egi_text_add(&text, " y = Neg (x144) }");
  pass_graph(fixture, egi_text_string(&text));
  egi_text_free(&text);
  double start = egi_clock();
  pass_run(fixture, "fuse_norm", NULL);
  assert_true(egi_clock() - start < 0.5);
  assert_int_equal(pass_count(fixture, EGI_OP_RMSNormalization), 144);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_spellings, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_near_misses, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_result, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_shared, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_large, pass_set_up, pass_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
