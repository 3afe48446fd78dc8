/* fuse_glu on the spellings of exporters, and on graphs that look like activations or gates and are none. */
#include "support_rewrites.h"

#define F "float[B,S,8] "
#define X "(" F "x) => (" F "y) "
#define GU "(" F "g, " F "u) => (" F "y) "
#define EXACT "float root2 = {1.41421356}, float one = {1}, float half = {0.5}"
#define CUBIC "float c = {0.044715}, float three = {3}, float k = {0.7978845608}, float one = {1}, float half = {0.5}"
#define INNER "p = Pow (x, three) q = Mul (p, c) i = Add (x, q) v = Mul (i, k) t = Tanh (v) e = Add (t, one) "

#define GELU(title, text) \
  { title, "fuse_glu", EGI_OP_Gelu, 1, text, NULL }
#define SWISH(title, text) \
  { title, "fuse_glu", EGI_OP_Swish, 1, text, NULL }
#define GLU(title, text) \
  { title, "fuse_glu", EGI_OP_GLU, 1, text, NULL }
#define NONE(title, text, miss) \
  { title, "fuse_glu", EGI_OP_NONE, 0, text, miss }

static const spelling spellings[] = {
    GELU("torch: x · 0.5 · (1 + erf)", X "<" EXACT "> { s = Div (x, root2) t = Erf (s) e = Add (t, one) "
                                         "h = Mul (x, half) y = Mul (h, e) }"),
    GELU("x · (1 + erf) · 0.5", X "<float r = {0.70710678}, " EXACT "> { s = Mul (x, r) t = Erf (s) e = Add (one, t) "
                                  "h = Mul (x, e) y = Mul (half, h) }"),
    GELU("x · (erf / 2 + 0.5)", X "<float two = {2}, " EXACT "> { s = Div (x, root2) t = Erf (s) d = Div (t, two) "
                                  "e = Add (d, half) y = Mul (e, x) }"),
    GELU("x / 2 + x / 2 · erf", X "<" EXACT "> { s = Div (x, root2) t = Erf (s) h = Mul (half, x) m = Mul (t, h) "
                                  "y = Add (h, m) }"),
    GELU("in half precision, numbers of its own",
         "(float16[B,S,8] x) => (float16[B,S,8] y) <float16 root2 = {15784}, float16 one = {15360}, float16 half = "
         "{14336}> { s = Div (x, root2) t = Erf (s) e = Add (t, one) h = Mul (x, half) y = Mul (h, e) }"),
    GELU("tanh: Pow 3", X "<" CUBIC "> { " INNER "h = Mul (x, half) y = Mul (h, e) }"),
    GELU("tanh: x · x · x, other orders",
         X "<" CUBIC "> { x2 = Mul (x, x) p = Mul (x2, x) q = Mul (c, p) i = Add (q, x) v = Mul (k, i) t = Tanh (v) "
           "e = Add (one, t) h = Mul (e, x) y = Mul (h, half) }"),
    GELU("tanh: x · (1 + c · x · x)",
         X "<" CUBIC "> { x2 = Mul (x, x) q = Mul (x2, c) j = Add (q, one) i = Mul (x, j) v = Mul (i, k) t = Tanh (v) "
           "e = Add (t, one) h = Mul (half, e) y = Mul (x, h) }"),
    GELU("tanh: k · x first", X
         "<" CUBIC "> { x2 = Mul (x, x) q = Mul (x2, c) j = Add (one, q) kx = Mul (x, k) v = Mul (kx, j) t = Tanh (v) "
         "e = Add (t, one) h = Mul (x, half) y = Mul (h, e) }"),
    GELU("tanh as a sigmoid", X "<float k2 = {1.59576912}, " CUBIC "> { p = Pow (x, three) q = Mul (p, c) "
                                "i = Add (x, q) v = Mul (i, k2) t = Sigmoid (v) y = Mul (x, t) }"),
    SWISH("x · sigmoid(x)", X "{ s = Sigmoid (x) y = Mul (x, s) }"),
    SWISH("sigmoid(1.702 x) · x", X "<float a = {1.702}> { z = Mul (a, x) s = Sigmoid (z) y = Mul (s, x) }"),
    SWISH("x / (1 + exp(-x))", X "<float one = {1}> { n = Neg (x) e = Exp (n) a = Add (e, one) y = Div (x, a) }"),
    SWISH("x · (1 / (1 + exp(-x)))",
          X "<float one = {1}> { n = Neg (x) e = Exp (n) a = Add (one, e) r = Reciprocal (a) y = Mul (r, x) }"),
    GLU("SwiGLU", GU "{ s = Sigmoid (g) a = Mul (g, s) y = Mul (a, u) }"),
    GLU("SwiGLU, the other factor first", GU "{ s = Sigmoid (g) a = Mul (s, g) y = Mul (u, a) }"),
    GLU("SwiGLU out of one product",
        "(float[B,S,16] x) => (float[B,S,8] y) { g, u = Split <axis = -1, num_outputs = 2> "
        "(x) s = Sigmoid (g) a = Mul (g, s) y = Mul (a, u) }"),
    GLU("SwiGLU, the factors in another order", GU "{ s = Sigmoid (g) m = Mul (u, g) y = Mul (s, m) }"),
    GLU("SwiGLU, the sigmoid times the factor first", GU "{ s = Sigmoid (g) m = Mul (u, s) y = Mul (m, g) }"),
    GLU("SwiGLU, activated in float",
        "(bfloat16[B,S,8] g, bfloat16[B,S,8] u) => (bfloat16[B,S,8] y) { f = Cast <to = 1> "
        "(g) s = Sigmoid (f) a = Mul (f, s) h = Cast <to = 16> (a) y = Mul (h, u) }"),
    GLU("GeGLU", GU "<" EXACT "> { s = Div (g, root2) t = Erf (s) e = Add (t, one) h = Mul (g, half) a = Mul (h, e) "
                    "y = Mul (a, u) }"),
    GLU("GeGLU, tanh", GU "{ a = Gelu <approximate = \"tanh\"> (g) y = Mul (a, u) }"),
    GLU("ReGLU",
        "(" F "x) => (float[B,S,4] y) <float[8,4] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, "
        "-4, 1, 2, 1, 2, 1, 2, 1, 2, 0, 0, 1, 1}, float[8,4] v = {1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, "
        "1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2}> { g = MatMul (x, w) u = MatMul (x, v) a = Relu (g) "
        "y = Mul (a, u) }"),
    GLU("gpt-oss: slices of step 2, clamped, shifted",
        "(float[B,S,16] x) => (float[B,S,8] y) <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] "
        "end = "
        "{9223372036854775807}, int64[1] last = {-1}, float hi = {1.5}, float lo = {-1.5}, float a = {1.702}, float b "
        "= "
        "{1}> { g0 = Slice (x, zero, end, last, two) u0 = Slice (x, one, end, last, two) g = Clip (g0, , hi) "
        "u = Clip (u0, lo, hi) z = Mul (g, a) s = Sigmoid (z) p = Mul (g, s) m = Add (u, b) y = Mul (m, p) }"),
    GLU("clamped by Min and Max",
        GU "<float hi = {1.5}, float lo = {-1.5}, float one = {1}> { gc = Min (hi, g) v = Max (u, lo) uc = Min (v, hi) "
           "s = Sigmoid (gc) p = Mul (gc, s) m = Add (one, uc) y = Mul (p, m) }"),
    GLU("clamped, with a lowest value that cuts nothing, not shifted",
        GU "<float hi = {1.5}, float lo = {-1.5}, float least = {-3.4028234e38}> { gc = Clip (g, least, hi) "
           "uc = Clip (u, lo, hi) s = Sigmoid (gc) p = Mul (gc, s) y = Mul (p, uc) }"),
};

static const spelling near_misses[] = {
    NONE("another constant under the root",
         X "<float r = {1.5}, float one = {1}, float half = {0.5}> { s = Div (x, r) "
           "t = Erf (s) e = Add (t, one) h = Mul (x, half) y = Mul (h, e) }",
         "a constant has another value"),
    NONE("a third in place of a half",
         X "<float third = {0.3333}, " EXACT "> { s = Div (x, root2) t = Erf (s) "
           "e = Add (t, one) h = Mul (x, third) y = Mul (h, e) }",
         NULL),
    NONE("another cubic factor",
         X "<float c = {0.0447}, float three = {3}, float k = {0.79788456}, float one = {1}, float "
           "half = {0.5}> { " INNER "h = Mul (x, half) y = Mul (h, e) }",
         "a constant has another value"),
    NONE("the sigmoid of another value", "(" F "x, " F "z) => (" F "y) { s = Sigmoid (z) y = Mul (x, s) }",
         "gate and factor are not both projections"),
    NONE("a factor that is broadcast", "(" F "g, float[B,S,1] u) => (" F "y) { a = Relu (g) y = Mul (a, u) }",
         "gate and factor differ in shape"),
    NONE("relu squared", X "{ a = Relu (x) y = Mul (a, a) }", "the activation is squared"),
    NONE("a sum in place of the product", GU "{ a = Relu (g) y = Add (a, u) }", NULL),
    NONE("exp of the value itself", X "<float one = {1}> { e = Exp (x) a = Add (e, one) y = Div (x, a) }", "has Neg"),
};

static void test_spellings(void **state) {
  for (size_t i = 0; i < EGI_COUNT(spellings); i++) check_spelling(*state, &spellings[i]);
}

static void test_near_misses(void **state) {
  for (size_t i = 0; i < EGI_COUNT(near_misses); i++) check_spelling(*state, &near_misses[i]);
}

/* Bounds that differ leave the clamps and a plain gate. */
static void test_other_bounds(void **state) {
  pass_graph(*state, GU "<float hi = {1.5}, float lo = {-1.25}> { gc = Clip (g, , hi) uc = Clip (u, lo, hi) "
                        "s = Sigmoid (gc) p = Mul (gc, s) y = Mul (p, uc) }");
  pass_run_settled(*state, "fuse_glu");
  pass_expect(*state, "%1 = Clip(g, _, 1.5)\n"
                      "%2 = Clip(u, -1.25, 1.5)\n"
                      "%3 = GLU<activation=silu><alpha=1>(%1, %2)\n"
                      "-> y=%3\n");
}

/* The body of plain operators computes the same. */
static void test_body(void **state) {
  static const spelling bodies[] = {
      {"limited", "expand_fused", EGI_OP_GLU, 0,
       GU "{ y = engraft.GLU <alpha = 1.702, limit = 1.5, offset = 1.0> (g, u) }", NULL},
      {"tanh", "expand_fused", EGI_OP_GLU, 0, GU "{ y = engraft.GLU <activation = \"gelu_tanh\"> (g, u) }", NULL},
      {"exact", "expand_fused", EGI_OP_GLU, 0, GU "{ y = engraft.GLU <activation = \"gelu\", offset = 0.5> (g, u) }",
       NULL},
      {"relu", "expand_fused", EGI_OP_GLU, 0, GU "{ y = engraft.GLU <activation = \"relu\"> (g, u) }", NULL},
      {"sigmoid", "expand_fused", EGI_OP_GLU, 0, GU "{ y = engraft.GLU <activation = \"sigmoid\"> (g, u) }", NULL},
      {"identity", "expand_fused", EGI_OP_GLU, 0, GU "{ y = engraft.GLU <activation = \"identity\"> (g, u) }", NULL},
      {"swish", "expand_fused", EGI_OP_Swish, 0, X "{ y = engraft.Swish <alpha = 1.702> (x) }", NULL},
  };
  for (size_t i = 0; i < EGI_COUNT(bodies); i++) check_spelling(*state, &bodies[i]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_spellings, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_near_misses, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_other_bounds, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_body, pass_set_up, pass_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
