/* lower_precision: which nodes compute in bfloat16, where Casts stand, and what stays float32. */
#include "support_passes.h"

static const egi_adapt_options bf16 = {.dtype = EG_DTYPE_BF16};

#define LAYER                                                                                               \
  "(int64[batch,sequence] ids) => (float[batch,sequence,2] y)\n"                                            \
  "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2,2] w = {1,2,3,4}, float[2] s = {1,2}, float two = {2}>\n" \
  "{ x = Gather (t, ids)  n = RMSNormalization (x, s)  a = engraft.Linear (n, w)  h = Add (x, a)\n"

/* Tables and scales follow the activations; the result keeps its name and type. */
static void layers_compute_in_the_narrow_type(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, LAYER " y = Mul (h, two) }");
  for (int run = 0; run < 2; run++) {
    pass_run(fixture, "lower_precision,eliminate_identity,eliminate_common,eliminate_dead", &bf16);
    pass_expect(fixture, "%1 = Cast<to=16>(t)\n%2 = Gather(%1, ids)\n%3 = Cast<to=16>(s)\n"
                         "%4 = RMSNormalization(%2, %3)\n%5 = Cast<to=16>(w)\n%6 = Linear(%4, %5)\n"
                         "%7 = Add(%2, %6)\n%8 = Cast<to=16>(2)\n%9 = Mul(%7, %8)\n%10 = Cast<to=1>(%9)\n-> y=%10\n");
    assert_int_equal(fixture->graph->values[fixture->graph->outputs[0]].dtype, EG_DTYPE_F32);
  }
}

/* A norm in plain operators: squares, means and what is scaled by them are float32, the next product is not. */
static void sums_stay_wide(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, LAYER " q = Pow (h, two)  m = ReduceMean <keepdims = 1> (q)  d = Div (h, m)\n"
                            " y = MatMul (d, w) }");
  pass_run(fixture, "lower_precision,eliminate_identity,eliminate_common,eliminate_dead", &bf16);
  pass_expect(fixture, "%1 = Cast<to=16>(t)\n%2 = Gather(%1, ids)\n%3 = Cast<to=16>(s)\n"
                       "%4 = RMSNormalization(%2, %3)\n%5 = Cast<to=16>(w)\n%6 = Linear(%4, %5)\n%7 = Add(%2, %6)\n"
                       "%8 = Cast<to=1>(%7)\n%9 = Pow(%8, 2)\n%10 = ReduceMean<keepdims=1>(%9)\n%11 = Div(%8, %10)\n"
                       "%12 = Cast<to=16>(%11)\n%13 = MatMul(%12, %5)\n%14 = Cast<to=1>(%13)\n-> y=%14\n");
}

/* Angles of positions: nothing narrow leads to them, and frequencies are no matrix of a layer. */
static void angles_stay_wide(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[1,1,n] positions) => (float[1,2,n] y) <float[1,2,1] f = {1,2}>\n"
                      "{ a = MatMul (f, positions)  y = Cos (a) }");
  pass_run(fixture, "lower_precision", &bf16);
  pass_expect(fixture, "%1 = MatMul(f, positions)\n%2 = Cos(%1)\n-> y=%2\n");
}

/* The head takes narrow hidden states, the loss is float32; so is it without the option. */
static void the_loss_stays_wide(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[n,2] x, int64[n] labels) => (float[n] p) <float[2,3] w = {1,2,3,4,5,6}>\n"
                      "{ p, l = engraft.LinearLogProbability (x, w, labels) }");
  pass_run(fixture, "lower_precision", NULL);
  pass_expect(fixture, "%1, %2 = LinearLogProbability(x, w, labels)\n-> p=%1\n");
  pass_run(fixture, "lower_precision,eliminate_dead", &bf16);
  pass_expect(fixture, "%1 = Cast<to=16>(x)\n%2 = Cast<to=16>(w)\n"
                       "%3, %4 = LinearLogProbability(%1, %2, labels)\n-> p=%3\n");
  assert_int_equal(fixture->graph->values[fixture->graph->outputs[0]].dtype, EG_DTYPE_F32);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(layers_compute_in_the_narrow_type, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(sums_stay_wide, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(angles_stay_wide, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(the_loss_stays_wide, pass_set_up, pass_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
