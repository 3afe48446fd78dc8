/* The elementwise loops of every instruction set that this processor has, against double references and against each
 * other, at lengths around all vector widths. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "backend/cpu/isa/isa.h"
#include "base/base.h"

#define LENGTH 203

typedef void (*check_function)(const egi_isa_elementwise *isa, const float *in, int64_t n);

static const double specials[] = {0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 1e-30, 3e38, -3e38, 88.7, -87.4, -103.9, 0.5};

static void fill(float *values, double low, double high, uint64_t seed) {
  for (int i = 0; i < LENGTH; i++) {
    values[i] = (float)(low + (high - low) * egi_random_uniform(seed, 0, (uint64_t)i));
  }
}

/* Runs a check for every instruction set and length, on numbers in a range with special values among them. */
static void for_all(check_function check, double low, double high, bool has_specials) {
  float in[LENGTH];
  fill(in, low, high, 3);
  for (size_t i = 0; has_specials && i < EGI_COUNT(specials); i++) in[i * 5] = (float)specials[i];
  if (has_specials) in[7] = INFINITY, in[11] = -INFINITY, in[13] = NAN;
  const egi_isa *isa;
  for (size_t k = 0; (isa = egi_cpu_isa_at(k)) != NULL; k++) {
    for (int64_t n = 0; n <= LENGTH; n++) check(isa->elementwise, in, n);
  }
}

static void assert_close(double got, double expected, double absolute, double relative, double x) {
  if (isnan(expected) ? isnan(got) : got == expected) return;
  if (!(fabs(got - expected) <= absolute + relative * fabs(expected))) {
    fail_msg("f(%.9g) = %.9g, not %.9g", x, got, expected);
  }
}

/* ---- one operand ---------------------------------------------------------------------------------------------- */

static double sigmoid(double x) {
  return 1.0 / (1.0 + exp(-x));
}
static double reciprocal(double x) {
  return 1.0 / x;
}
static double negate(double x) {
  return -x;
}
static double relu(double x) {
  return x < 0.0 ? 0.0 : x;
}

static double sign(double x) {
  return isnan(x) ? x : (x > 0.0) - (x < 0.0);
}

/* Absolute: what cancels near 0 or 1. */
static const struct {
  egi_unary function;
  double (*reference)(double x);
  double absolute, relative;
} unaries[] = {
    {EGI_UNARY_ABS, fabs, 0, 0},      {EGI_UNARY_CEIL, ceil, 0, 0},
    {EGI_UNARY_FLOOR, floor, 0, 0},   {EGI_UNARY_NEG, negate, 0, 0},
    {EGI_UNARY_RELU, relu, 0, 0},     {EGI_UNARY_RECIPROCAL, reciprocal, 0, 1e-7},
    {EGI_UNARY_SQRT, sqrt, 0, 1e-7},  {EGI_UNARY_COS, cos, 0, 2e-7},
    {EGI_UNARY_SIN, sin, 0, 2e-7},    {EGI_UNARY_EXP, exp, 2e-45, 3e-7},
    {EGI_UNARY_LOG, log, 1e-7, 3e-7}, {EGI_UNARY_TANH, tanh, 0, 5e-7},
    {EGI_UNARY_ERF, erf, 0, 5e-7},    {EGI_UNARY_SIGMOID, sigmoid, 2e-45, 5e-7},
    {EGI_UNARY_ACOS, acos, 0, 5e-7},  {EGI_UNARY_ACOSH, acosh, 0, 5e-7},
    {EGI_UNARY_ASIN, asin, 0, 5e-7},  {EGI_UNARY_ASINH, asinh, 0, 5e-7},
    {EGI_UNARY_ATAN, atan, 0, 5e-7},  {EGI_UNARY_ATANH, atanh, 0, 5e-7},
    {EGI_UNARY_COSH, cosh, 0, 5e-7},  {EGI_UNARY_SINH, sinh, 0, 5e-7},
    {EGI_UNARY_TAN, tan, 0, 5e-7},    {EGI_UNARY_ROUND, rint, 0, 0},
    {EGI_UNARY_SIGN, sign, 0, 0},
};

static void check_unary(const egi_isa_elementwise *isa, const float *in, int64_t n) {
  for (size_t f = 0; f < EGI_COUNT(unaries); f++) {
    float out[LENGTH + 1], same[LENGTH];
    for (int i = 0; i <= LENGTH; i++) out[i] = -7.0f;
    isa->unary[unaries[f].function](out, in, n);
    for (int64_t i = 0; i < n; i++) {
      double expected = (double)(float)unaries[f].reference((double)in[i]);
      assert_close((double)out[i], expected, unaries[f].absolute, unaries[f].relative, (double)in[i]);
    }
    assert_true(out[n] == -7.0f);
    memcpy(same, in, sizeof same);
    isa->unary[unaries[f].function](same, same, n); /* in place */
    assert_memory_equal(same, out, (size_t)n * sizeof(float));
  }
}

static void unary_loops(void **state) {
  (void)state;
  for_all(check_unary, -12.0, 12.0, true);
  for_all(check_unary, -1.5, 1.5, false);
  for_all(check_unary, -110.0, 95.0, false);
}

/* ---- two operands --------------------------------------------------------------------------------------------- */

static double maximum(double x, double y) {
  return x > y || isnan(x) ? x : y;
}
static double minimum(double x, double y) {
  return x < y || isnan(x) ? x : y;
}
static double add(double x, double y) {
  return x + y;
}
static double subtract(double x, double y) {
  return x - y;
}
static double multiply(double x, double y) {
  return x * y;
}
static double divide(double x, double y) {
  return x / y;
}

static const struct {
  egi_binary function;
  double (*reference)(double x, double y);
} binaries[] = {{EGI_BINARY_ADD, add},    {EGI_BINARY_SUB, subtract}, {EGI_BINARY_MUL, multiply},
                {EGI_BINARY_DIV, divide}, {EGI_BINARY_MAX, maximum},  {EGI_BINARY_MIN, minimum},
                {EGI_BINARY_POW, pow},    {EGI_BINARY_FMOD, fmod}};

static void check_binary(const egi_isa_elementwise *isa, const float *in, int64_t n) {
  float b[LENGTH], out[LENGTH + 1];
  fill(b, 0.5, 3.0, 9);
  b[2] = 2.0f;
  if (n > 3) b[n - 1] = NAN;
  for (size_t f = 0; f < EGI_COUNT(binaries); f++) {
    for (int form = 0; form < EGI_BROADCAST_COUNT; form++) {
      const float *x = form == EGI_BROADCAST_A ? in + 1 : in, *y = form == EGI_BROADCAST_B ? b + 2 : b;
      out[n] = -7.0f;
      isa->binary[binaries[f].function][form](out, x, y, n);
      for (int64_t i = 0; i < n; i++) {
        double left = (double)x[form == EGI_BROADCAST_A ? 0 : i], right = (double)y[form == EGI_BROADCAST_B ? 0 : i];
        double expected = (double)(float)binaries[f].reference(left, right);
        assert_close((double)out[i], expected, 0.0, 2e-7, left);
      }
      assert_true(out[n] == -7.0f);
    }
  }
}

static void binary_loops(void **state) {
  (void)state;
  for_all(check_binary, -12.0, 12.0, true);
}

static void check_select(const egi_isa_elementwise *isa, const float *in, int64_t n) {
  float b[LENGTH], out[LENGTH];
  uint8_t condition[LENGTH];
  fill(b, 0.5, 3.0, 9);
  for (int i = 0; i < LENGTH; i++) condition[i] = (uint8_t)(i % 3 == 0 ? 0 : i % 3);
  for (int form = 0; form < EGI_BROADCAST_COUNT; form++) {
    isa->where[form](out, condition, in, b, n);
    for (int64_t i = 0; i < n; i++) {
      const float *a = form == EGI_BROADCAST_A ? in : in + i, *c = form == EGI_BROADCAST_B ? b : b + i;
      assert_memory_equal(&out[i], condition[i] != 0 ? a : c, sizeof(float));
    }
  }
  isa->clip(out, in, -2.0f, 3.0f, n);
  for (int64_t i = 0; i < n; i++) {
    float expected = in[i] < -2.0f ? -2.0f : in[i] > 3.0f ? 3.0f : in[i];
    assert_memory_equal(&out[i], &expected, sizeof(float));
  }
}

static void selecting_loops(void **state) {
  (void)state;
  for_all(check_select, -12.0, 12.0, true);
}

/* ---- half floats ---------------------------------------------------------------------------------------------- */

/* Every half there is, and the floats half way between neighbours and next to it. */
static void every_half_converts(void **state) {
  (void)state;
  static uint16_t halves[65536], back[65536];
  static float floats[65536];
  const egi_isa *isa;
  for (uint32_t i = 0; i < 65536; i++) halves[i] = (uint16_t)i;
  for (size_t k = 0; (isa = egi_cpu_isa_at(k)) != NULL; k++) {
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
      const egi_isa_elementwise *e = isa->elementwise;
      (is_bf16 ? e->bf16_to_f32 : e->f16_to_f32)(floats, halves, 65536);
      (is_bf16 ? e->f32_to_bf16 : e->f32_to_f16)(back, floats, 65536);
      for (uint32_t i = 0; i < 65536; i++) {
        float expected = is_bf16 ? egi_bf16_to_f32(halves[i]) : egi_f16_to_f32(halves[i]);
        if (isnan(expected)) {
          assert_true(isnan(floats[i]));
          assert_true(isnan(is_bf16 ? egi_bf16_to_f32(back[i]) : egi_f16_to_f32(back[i])));
        } else {
          assert_true(floats[i] == expected && signbit(floats[i]) == signbit(expected));
          assert_int_equal(back[i], halves[i]);
        }
      }
      for (int shift = -1; shift <= 1; shift++) {
        float middles[512];
        for (uint32_t i = 0; i < 65536; i += 512) {
          for (uint32_t j = 0; j < 512; j++) {
            float next = floats[(i + j + 1) % 65536];
            middles[j] = floats[i + j] + (next - floats[i + j]) * 0.5f;
            if (shift != 0) middles[j] = nextafterf(middles[j], shift > 0 ? INFINITY : -INFINITY);
          }
          (is_bf16 ? e->f32_to_bf16 : e->f32_to_f16)(back, middles, 512);
          for (uint32_t j = 0; j < 512; j++) {
            uint16_t expected = is_bf16 ? egi_f32_to_bf16(middles[j]) : egi_f32_to_f16(middles[j]);
            if (!isnan(middles[j])) assert_int_equal(back[j], expected);
          }
        }
      }
    }
  }
}

/* ---- reductions ----------------------------------------------------------------------------------------------- */

static void reductions_are_the_same_everywhere(void **state) {
  (void)state;
  float in[LENGTH];
  fill(in, -5.0, 5.0, 1);
  const egi_isa_elementwise *first = egi_cpu_isa_at(0)->elementwise;
  const egi_isa *isa;
  for (size_t k = 0; (isa = egi_cpu_isa_at(k)) != NULL; k++) {
    for (int64_t n = 0; n <= LENGTH; n++) {
      double sum = 0.0, sums[LENGTH];
      float largest = -INFINITY;
      for (int64_t i = 0; i < n; i++) sum += (double)in[i], sums[i] = 1.0, largest = in[i] > largest ? in[i] : largest;
      double got = isa->elementwise->sum(in, n);
      assert_close(got, sum, 1e-12, 0.0, (double)n);
      assert_true(got == first->sum(in, n));
      assert_true(isa->elementwise->max(in, n) == largest);
      isa->elementwise->add_to(sums, in, n);
      for (int64_t i = 0; i < n; i++) assert_true(sums[i] == 1.0 + (double)in[i]);
      for (int64_t i = 0; i < n; i += 7) { /* NaN wherever it stands */
        float saved = in[i];
        in[i] = NAN;
        assert_true(isnan(isa->elementwise->max(in, n)));
        in[i] = saved;
      }
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(unary_loops),
      cmocka_unit_test(binary_loops),
      cmocka_unit_test(selecting_loops),
      cmocka_unit_test(every_half_converts),
      cmocka_unit_test(reductions_are_the_same_everywhere),
  };
  return cmocka_run_group_tests_name("isa", tests, NULL, NULL);
}
