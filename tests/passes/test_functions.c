/* The operators of graph/functions.def: what they compute, against the reference implementation of the onnx package
 * (onnx.reference), by running graphs of constants. */
#include "support_passes.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_RESULTS = 24 };

typedef struct function_case {
  const char *graph;
  double expected[MAX_RESULTS];
} function_case;

static const function_case cases[] = {
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = Celu <alpha = 0.5> (x0) }",
     {-0.4908422, -0.3160603, 0.25, 2}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = Elu <alpha = 0.5> (x0) }",
     {-0.4323324, -0.1967347, 0.25, 2}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = Selu (x0) }",
     {-1.520167, -0.6917582, 0.2626753, 2.101402}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = HardSigmoid (x0) }", {0.09999999, 0.4, 0.55, 0.9}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = HardSwish (x0) }",
     {-0.3333333, -0.2083333, 0.1354167, 1.666667}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = LeakyRelu (x0) }", {-0.02, -0.005, 0.25, 2}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}, float[1] x1 = {0.25}> { y = PRelu (x0, x1) }",
     {-0.5, -0.125, 0.25, 2}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = Softplus (x0) }",
     {0.126928, 0.474077, 0.8259394, 2.126928}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = Mish (x0) }",
     {-0.2525015, -0.2207438, 0.1695724, 1.943959}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = Softsign (x0) }",
     {-0.6666667, -0.3333333, 0.2, 0.6666667}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = ThresholdedRelu <alpha = 0.5> (x0) }", {0, 0, 0, 2}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = Shrink <bias = 0.5, lambd = 1.0> (x0) }",
     {-1.5, 0, 0, 1.5}},
    {"() => (float[4] y) <float[4] x0 = {-2,-0.5,0.25,2}> { y = Swish <alpha = 0.5> (x0) }",
     {-0.5378828, -0.2189117, 0.1328024, 1.462117}},
    {"() => (float[2,3] y) <float[2,3] x0 = {1,2,3,4,-5,6.5}> { y = Hardmax <axis = 0> (x0) }", {0, 1, 0, 1, 0, 1}},
    {"() => (float[2,3] y) <float[2,3] x0 = {1,2,3,4,-5,6.5}> { y = Hardmax (x0) }", {0, 0, 1, 0, 0, 1}},
    {"() => (float[2,1] y) <float[2,3] x0 = {1,2,3,4,-5,6.5}, int64[1] x1 = {1}> { y = ReduceL1 (x0, x1) }", {6, 15.5}},
    {"() => (float[3] y) <float[2,3] x0 = {1,2,3,4,-5,6.5}, int64[1] x1 = {0}> { y = ReduceL2 <keepdims = 0> (x0, x1) "
     "}",
     {4.123106, 5.385165, 7.158911}},
    {"() => (float[2,1] y) <float[2,3] x0 = {1,2,3,4,5,6.5}, int64[1] x1 = {1}> { y = ReduceLogSum (x0, x1) }",
     {1.791759, 2.74084}},
    {"() => (float y) <float[2,3] x0 = {1,2,3,4,-5,6.5}> { y = ReduceSumSquare <keepdims = 0> (x0) }", {97.25}},
    {"() => (float[1,4,3,2] y) <float[1,4,3,2] x0 = "
     "{0,0.100000001,0.282842696,0.519615293,0.800000012,1.11803401,1.4696939,1.85202575,2.26274157,2.70000005,3."
     "1622777,3.6482873,4.15692234,4.68721676,5.23832035,5.80947495,6.4000001,7.00927973,7.63675308,8.28190804,8."
     "94427204,9.62340927,10.3189144,11.0304127}> { y = MeanVarianceNormalization <axes = [0,2]> (x0) }",
     {-1.089701,   -1.147159,   -0.2357988, -0.1426745, 1.3255,      1.289834,    -1.198271,   -1.201323,
      -0.05133596, -0.04557405, 1.249606,   1.246897,   -1.209874,   -1.210885,   -0.02921686, -0.02726227,
      1.23909,     1.238147,    -1.214397,  -1.214901,  -0.02043104, -0.01945713, 1.234829,    1.234357}},
    {"() => (float[2,3] y) <float[2,3] x0 = {1,2,3,4,-5,6.5}> { y = LpNormalization (x0) }",
     {0.2672612, 0.5345225, 0.8017837, 0.4383973, -0.5479966, 0.7123956}},
    {"() => (float[2,3] y) <float[2,3] x0 = {1,2,3,4,-5,6.5}> { y = LpNormalization <p = 1, axis = 0> (x0) }",
     {0.2, 0.2857143, 0.3157895, 0.8, -0.7142857, 0.6842105}},
    {"() => (float[1,2,3,2] y) <float[1,2,3,2] x0 = "
     "{0,0.100000001,0.282842696,0.519615293,0.800000012,1.11803401,1.4696939,1.85202575,2.26274157,2.70000005,3."
     "1622777,3.6482873}, float[2] x1 = {0.5,2}, float[2] x2 = {2,0.5}> { y = InstanceNormalization (x0, x1, x2) }",
     {1.401124, 1.528522, 1.761461, 2.063105, 2.42031, 2.825479, -2.30706, -1.28117, -0.1791189, 0.9941528, 2.234557,
      3.53864}},
    {"() => (float[1,4,3,2] y) <float[1,4,3,2] x0 = "
     "{0,0.100000001,0.282842696,0.519615293,0.800000012,1.11803401,1.4696939,1.85202575,2.26274157,2.70000005,3."
     "1622777,3.6482873,4.15692234,4.68721676,5.23832035,5.80947495,6.4000001,7.00927973,7.63675308,8.28190804,8."
     "94427204,9.62340927,10.3189144,11.0304127}, float[4] x1 = {0,1,2,3}, float[4] x2 = {0,1,2,3}> { y = "
     "GroupNormalization <num_groups = 2> (x0, x1, x2) }",
     {0,        0,        0,        0,        0,         0,          0.9803442,   1.303349,
      1.650333, 2.019742, 2.410287, 2.820881, -1.026205, -0.5356197, -0.02578306, 0.5026032,
      1.048909, 1.612566, 3.28958,  4.184849, 5.103997,  6.046422,   7.011559,    7.998891}},
    {"() => (float[1,2,3,2] y) <float[1,2,3,2] x0 = "
     "{0,0.100000001,0.282842696,0.519615293,0.800000012,1.11803401,1.4696939,1.85202575,2.26274157,2.70000005,3."
     "1622777,3.6482873}, float[2] x1 = {0.5,2}, float[2] x2 = {0.5,2}, float[2] x3 = {0.5,2}, float[2] x4 = {0.5,2}> "
     "{ y = BatchNormalization (x0, x1, x2, x3, x4) }",
     {0.1464502, 0.2171601, 0.3464481, 0.5138699, 0.71213, 0.9370117, 1.250036, 1.790733, 2.371572, 2.989947, 3.643705,
      4.331024}},
    {"() => (float[1,1,6,4] y) <float[1,4,3,2] x0 = "
     "{0,0.100000001,0.282842696,0.519615293,0.800000012,1.11803401,1.4696939,1.85202575,2.26274157,2.70000005,3."
     "1622777,3.6482873,4.15692234,4.68721676,5.23832035,5.80947495,6.4000001,7.00927973,7.63675308,8.28190804,8."
     "94427204,9.62340927,10.3189144,11.0304127}> { y = DepthToSpace <blocksize = 2> (x0) }",
     {0,         1.469694, 0.1,       1.852026, 4.156922, 7.636753, 4.687217, 8.281908,
      0.2828427, 2.262742, 0.5196153, 2.7,      5.23832,  8.944272, 5.809475, 9.623409,
      0.8,       3.162278, 1.118034,  3.648287, 6.4,      10.31891, 7.00928,  11.03041}},
    {"() => (float[1,1,6,4] y) <float[1,4,3,2] x0 = "
     "{0,0.100000001,0.282842696,0.519615293,0.800000012,1.11803401,1.4696939,1.85202575,2.26274157,2.70000005,3."
     "1622777,3.6482873,4.15692234,4.68721676,5.23832035,5.80947495,6.4000001,7.00927973,7.63675308,8.28190804,8."
     "94427204,9.62340927,10.3189144,11.0304127}> { y = DepthToSpace <blocksize = 2, mode = \"CRD\"> (x0) }",
     {0,         1.469694, 0.1,       1.852026, 4.156922, 7.636753, 4.687217, 8.281908,
      0.2828427, 2.262742, 0.5196153, 2.7,      5.23832,  8.944272, 5.809475, 9.623409,
      0.8,       3.162278, 1.118034,  3.648287, 6.4,      10.31891, 7.00928,  11.03041}},
    {"() => (float[1,4,2,3] y) <float[1,1,4,6] x0 = "
     "{0,0.100000001,0.282842696,0.519615293,0.800000012,1.11803401,1.4696939,1.85202575,2.26274157,2.70000005,3."
     "1622777,3.6482873,4.15692234,4.68721676,5.23832035,5.80947495,6.4000001,7.00927973,7.63675308,8.28190804,8."
     "94427204,9.62340927,10.3189144,11.0304127}> { y = SpaceToDepth <blocksize = 2> (x0) }",
     {0,        0.2828427, 0.8,      4.156922, 5.23832,  6.4,      0.1,      0.5196153,
      1.118034, 4.687217,  5.809475, 7.00928,  1.469694, 2.262742, 3.162278, 7.636753,
      8.944272, 10.31891,  1.852026, 2.7,      3.648287, 8.281908, 9.623409, 11.03041}},
    {"() => (float[1,4,1,1] y) <float[1,4,3,2] x0 = "
     "{0,0.100000001,0.282842696,0.519615293,0.800000012,1.11803401,1.4696939,1.85202575,2.26274157,2.70000005,3."
     "1622777,3.6482873,4.15692234,4.68721676,5.23832035,5.80947495,6.4000001,7.00927973,7.63675308,8.28190804,8."
     "94427204,9.62340927,10.3189144,11.0304127}> { y = GlobalAveragePool (x0) }",
     {0.470082, 2.515838, 5.550202, 9.305945}},
    {"() => (float[1,4,1,1] y) <float[1,4,3,2] x0 = "
     "{0,0.100000001,0.282842696,0.519615293,0.800000012,1.11803401,1.4696939,1.85202575,2.26274157,2.70000005,3."
     "1622777,3.6482873,4.15692234,4.68721676,5.23832035,5.80947495,6.4000001,7.00927973,7.63675308,8.28190804,8."
     "94427204,9.62340927,10.3189144,11.0304127}> { y = GlobalMaxPool (x0) }",
     {1.118034, 3.648287, 7.00928, 11.03041}},
    {"() => (float[2] y) <float[2] a = {-2,0.25}, float[2] b = {3,-2}> { y = SwiGLU (a, b) }",
     {-0.7152175, -0.2810883}},
    {"() => (float[2,2] y) <uint8[2,2] a = {130,128,126,140}, float s = {0.5}, uint8 p = {128}, uint8[2,2] b = "
     "{10,12,8,10}, float t = {0.25}, uint8 q = {10}, float u = {0.25}, uint8 r = {100}> { z = QLinearMatMul (a, s, p, "
     "b, t, q, u, r) y = Cast <to = 1> (z) }",
     {100, 102, 88, 98}},
};

static void check_case(pass_fixture *fixture, const function_case *c) {
  egi_tensor result = {.rank = 0};
  pass_graph(fixture, c->graph);
  pass_run(fixture, "inline_functions,fold_constants,eliminate_identity,fold_shapes,eliminate_dead", NULL);
  const egi_evaluator *evaluator = fixture->module->evaluator;
  if (evaluator->graph(fixture->ctx, fixture->graph, NULL, &fixture->arena, &result) != EG_OK)
    fail_msg("%s\n%s", c->graph, eg_context_error(fixture->ctx));
  assert_int_equal(result.dtype, EG_DTYPE_F32);
  assert_true(egi_tensor_count(&result) <= MAX_RESULTS);
  for (int64_t i = 0; i < egi_tensor_count(&result); i++) {
    double got = (double)((const float *)result.data)[i];
    if (!(fabs(got - c->expected[i]) <= 2e-6 + 2e-5 * fabs(c->expected[i])))
      fail_msg("%s\nelement %d is %.7g, not %.7g", c->graph, (int)i, got, c->expected[i]);
  }
}

static void functions_compute_what_onnx_says(void **state) {
  for (size_t i = 0; i < EGI_COUNT(cases); i++) check_case(*state, &cases[i]);
}

/* Each definition is the subject of a case. */
static void every_function_has_a_case(void **state) {
  static const char *const names[] = {
#define FUNCTION(name, overload, attribute, default_value, wanted, text) name,
#include "graph/functions.def"
#undef FUNCTION
  };
  (void)state;
  for (size_t k = 0; k < EGI_COUNT(names); k++) {
    char call[64];
    bool is_covered = false;
    snprintf(call, sizeof call, " = %s ", names[k]);
    for (size_t i = 0; i < EGI_COUNT(cases); i++) is_covered = is_covered || strstr(cases[i].graph, call) != NULL;
    if (!is_covered) fail_msg("no case for %s", names[k]);
  }
}

/* A form that no definition has stays, and is reported as not supported. */
static void an_unknown_form_is_refused(void **state) {
  pass_fixture *fixture = *state;
  pass_parse(fixture, "<ir_version: 10, opset_import: [\"\": 23]>\n"
                      "g (float[1,4,2,2] x) => (float[1,1,4,4] y)\n"
                      "{ y = DepthToSpace <blocksize = 2, mode = \"DRC\"> (x) z = Relu (x) w = Elu (z) }");
  pass_run(fixture, "inline_functions", NULL);
  assert_int_equal(egi_graph_check_operators(fixture->graph), EG_ERROR_UNSUPPORTED);
  pass_expect_error(fixture, "operators not supported: DepthToSpace");
}

/* A model's own function of the name comes first. */
static void own_functions_hide_operators(void **state) {
  pass_fixture *fixture = *state;
  pass_parse(fixture, "<ir_version: 10, opset_import: [\"\": 23]>\n"
                      "g (float[n] x) => (float[n] y) { y = Elu (x) }\n"
                      "<domain: \"\", opset_import: [\"\": 23]>\nElu (a) => (b) { b = Neg (a) }\n");
  pass_run(fixture, "inline_functions", NULL);
  pass_expect(fixture, "%1 = Neg(x)\n-> y=%1\n");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(functions_compute_what_onnx_says), TEST(every_function_has_a_case),
                                     TEST(an_unknown_form_is_refused), TEST(own_functions_hide_operators)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
