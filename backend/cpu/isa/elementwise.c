/* Elementwise, converting and reducing loops over contiguous f32; called by the kernels of elementwise.c, cast.c and
 * reduce.c. Results of the reductions do not depend on the instruction set; those of exp, tanh and erf may by an ulp.
 */
#include "backend/cpu/isa/isa.h"

#include "backend/cpu/isa/math.h"

#define UNARY(name, expression)                              \
  static void name(float *out, const float *in, int64_t n) { \
    EGI_SIMD                                                 \
    for (int64_t i = 0; i < n; i++) {                        \
      const float x = in[i];                                 \
      out[i] = (expression);                                 \
    }                                                        \
  }

/* Without the pragma: the calls are the C library's. */
#define UNARY_SCALAR(name, expression)                       \
  static void name(float *out, const float *in, int64_t n) { \
    for (int64_t i = 0; i < n; i++) {                        \
      const float x = in[i];                                 \
      out[i] = (expression);                                 \
    }                                                        \
  }

#define SQRT_HALF 0.707106781f
#define SQRT_2_OVER_PI 0.797884561f
#define INVERSE_SQRT_2PI 0.398942280f
#define GELU_CUBIC 0.044715f

/* Hendrycks and Gimpel, arXiv:1606.08415, section 2. */
static inline float gelu(float x) {
  return 0.5f * x * (1.0f + egi_erf_f32(x * SQRT_HALF));
}
/* (1 + tanh u) / 2 is the logistic function of 2u, which does not cancel for negative u. */
static inline float gelu_tanh(float x) {
  return x * egi_sigmoid_f32(2.0f * SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x));
}
/* d gelu / dx = Phi(x) + x phi(x); the cut keeps infinity times zero out. */
static inline float gelu_slope(float x) {
  const float density = INVERSE_SQRT_2PI * egi_exp_f32(-0.5f * x * x);
  const float product = fabsf(x) > 16.0f ? 0.0f : x * density;
  return 0.5f * (1.0f + egi_erf_f32(x * SQRT_HALF)) + product;
}
static inline float gelu_tanh_slope(float x) {
  const float u = 2.0f * SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x);
  const float inner = 2.0f * SQRT_2_OVER_PI * (1.0f + 3.0f * GELU_CUBIC * x * x);
  const float e = egi_exp_f32(-fabsf(u));
  const float high = 1.0f / (1.0f + e); /* the logistic function of |u| and of -|u| */
  const float low = e / (1.0f + e);
  const float product = fabsf(x) > 16.0f ? 0.0f : x * high * low * inner;
  return (u < 0.0f ? low : high) + product;
}

UNARY(unary_abs, fabsf(x))
UNARY_SCALAR(unary_acos, acosf(x))
UNARY_SCALAR(unary_acosh, acoshf(x))
UNARY_SCALAR(unary_asin, asinf(x))
UNARY_SCALAR(unary_asinh, asinhf(x))
UNARY_SCALAR(unary_atan, atanf(x))
UNARY_SCALAR(unary_atanh, atanhf(x))
UNARY_SCALAR(unary_cosh, coshf(x))
UNARY_SCALAR(unary_sinh, sinhf(x))
UNARY_SCALAR(unary_tan, tanf(x))
UNARY(unary_ceil, ceilf(x))
UNARY_SCALAR(unary_cos, cosf(x))
UNARY(unary_erf, egi_erf_f32(x))
UNARY(unary_exp, egi_exp_f32(x))
UNARY(unary_floor, floorf(x))
UNARY(unary_gelu, gelu(x))
UNARY(unary_gelu_tanh, gelu_tanh(x))
UNARY(unary_log, egi_log_f32(x))
UNARY(unary_neg, -x)
UNARY(unary_reciprocal, 1.0f / x)
UNARY(unary_relu, x < 0.0f ? 0.0f : x)
UNARY(unary_round, rintf(x)) /* to even, the rounding mode of the program */
UNARY(unary_sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x)
UNARY(unary_sigmoid, egi_sigmoid_f32(x))
UNARY_SCALAR(unary_sin, sinf(x))
UNARY(unary_sqrt, sqrtf(x))
UNARY(unary_tanh, egi_tanh_f32(x))

/* The three forms of a binary loop; see egi_broadcast. */
#define BINARY(name, expression)                                                   \
  static void name##_none(float *out, const float *a, const float *b, int64_t n) { \
    EGI_SIMD                                                                       \
    for (int64_t i = 0; i < n; i++) {                                              \
      const float x = a[i], y = b[i];                                              \
      out[i] = (expression);                                                       \
    }                                                                              \
  }                                                                                \
  static void name##_a(float *out, const float *a, const float *b, int64_t n) {    \
    const float x = a[0];                                                          \
    EGI_SIMD                                                                       \
    for (int64_t i = 0; i < n; i++) {                                              \
      const float y = b[i];                                                        \
      out[i] = (expression);                                                       \
    }                                                                              \
  }                                                                                \
  static void name##_b(float *out, const float *a, const float *b, int64_t n) {    \
    const float y = b[0];                                                          \
    EGI_SIMD                                                                       \
    for (int64_t i = 0; i < n; i++) {                                              \
      const float x = a[i];                                                        \
      out[i] = (expression);                                                       \
    }                                                                              \
  }
#define BINARY_ROW(name) \
  { name##_none, name##_a, name##_b }

BINARY(binary_add, x + y)
BINARY(binary_sub, x - y)
BINARY(binary_mul, x *y)
BINARY(binary_div, x / y)
BINARY(binary_max, x > y || x != x ? x : y)
BINARY(binary_min, x < y || x != x ? x : y)
BINARY(binary_gelu_grad, gelu_slope(x) * y)
BINARY(binary_gelu_tanh_grad, gelu_tanh_slope(x) * y)

static void pow_none(float *out, const float *a, const float *b, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = powf(a[i], b[i]);
}

static void pow_a(float *out, const float *a, const float *b, int64_t n) {
  const float x = a[0];
  for (int64_t i = 0; i < n; i++) out[i] = powf(x, b[i]);
}

/* Squares and cubes are what exported norms and activations contain. */
static void pow_b(float *out, const float *a, const float *b, int64_t n) {
  const float y = b[0];
  if (y == 2.0f) {
    EGI_SIMD
    for (int64_t i = 0; i < n; i++) out[i] = a[i] * a[i];
  } else if (y == 3.0f) {
    EGI_SIMD
    for (int64_t i = 0; i < n; i++) out[i] = a[i] * a[i] * a[i];
  } else if (y == 1.0f) {
    EGI_SIMD
    for (int64_t i = 0; i < n; i++) out[i] = a[i];
  } else {
    for (int64_t i = 0; i < n; i++) out[i] = powf(a[i], y);
  }
}

static void fmod_none(float *out, const float *a, const float *b, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = fmodf(a[i], b[i]);
}

static void fmod_a(float *out, const float *a, const float *b, int64_t n) {
  const float x = a[0];
  for (int64_t i = 0; i < n; i++) out[i] = fmodf(x, b[i]);
}

static void fmod_b(float *out, const float *a, const float *b, int64_t n) {
  const float y = b[0];
  for (int64_t i = 0; i < n; i++) out[i] = fmodf(a[i], y);
}

static void where_none(float *out, const uint8_t *condition, const float *a, const float *b, int64_t n) {
  EGI_SIMD
  for (int64_t i = 0; i < n; i++) out[i] = condition[i] != 0 ? a[i] : b[i];
}

static void where_a(float *out, const uint8_t *condition, const float *a, const float *b, int64_t n) {
  const float x = a[0];
  EGI_SIMD
  for (int64_t i = 0; i < n; i++) {
    const float y = b[i];
    out[i] = condition[i] != 0 ? x : y;
  }
}

static void where_b(float *out, const uint8_t *condition, const float *a, const float *b, int64_t n) {
  const float y = b[0];
  EGI_SIMD
  for (int64_t i = 0; i < n; i++) {
    const float x = a[i];
    out[i] = condition[i] != 0 ? x : y;
  }
}

static void clip(float *out, const float *in, float low, float high, int64_t n) {
  EGI_SIMD
  for (int64_t i = 0; i < n; i++) {
    const float raised = in[i] < low ? low : in[i];
    out[i] = raised > high ? high : raised;
  }
}

/* Half floats by integer arithmetic, which vectorises everywhere; f16 after F. Giesen's method: the exponent is moved
 * by a multiplication with a power of two, which also normalises subnormal numbers. */
static void f16_to_f32(float *out, const uint16_t *in, int64_t n) {
  EGI_SIMD
  for (int64_t i = 0; i < n; i++) {
    const uint32_t half = in[i];
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    const float scaled = egi_bits_float(magnitude) * 0x1p112f;
    const uint32_t special = magnitude | 0x7f800000u; /* infinity and NaN */
    const uint32_t bits = magnitude >= 0x0f800000u ? special : egi_float_bits(scaled);
    out[i] = egi_bits_float(bits | (half & 0x8000u) << 16);
  }
}

/* Round to nearest even; values that round beyond 65504 give infinity, NaN stays NaN. */
static void f32_to_f16(uint16_t *out, const float *in, int64_t n) {
  EGI_SIMD
  for (int64_t i = 0; i < n; i++) {
    const float x = in[i];
    const float a = fabsf(x);
    const uint32_t bits = egi_float_bits(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    /* Below 2^-14 the addition of 1/2 rounds to a multiple of 2^-24, the spacing of subnormal halves. */
    const uint32_t tiny = egi_float_bits(a + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + (magnitude >> 13 & 1u)) >> 13;
    uint32_t half = magnitude < 0x38800000u ? tiny : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half = a != a ? 0x7e00u : half;
    out[i] = (uint16_t)(half | (bits >> 16 & 0x8000u));
  }
}

static void bf16_to_f32(float *out, const uint16_t *in, int64_t n) {
  EGI_SIMD
  for (int64_t i = 0; i < n; i++) out[i] = egi_bits_float((uint32_t)in[i] << 16);
}

static void f32_to_bf16(uint16_t *out, const float *in, int64_t n) {
  EGI_SIMD
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = egi_float_bits(in[i]);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const uint32_t quiet = bits >> 16 | 0x40u;
    out[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
}

#define LANES 16

static double sum(const float *in, int64_t n) {
  double lanes[LANES] = {0.0};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    EGI_SIMD
    for (int k = 0; k < LANES; k++) lanes[k] += (double)in[i + k];
  }
  for (int k = 0; i < n; i++, k++) lanes[k] += (double)in[i];
  for (int width = LANES / 2; width > 0; width /= 2) {
    for (int k = 0; k < width; k++) lanes[k] += lanes[k + width];
  }
  return lanes[0];
}

static inline float larger(float a, float b) {
  return a > b || a != a ? a : b;
}

static float max(const float *in, int64_t n) {
  float lanes[LANES];
  for (int k = 0; k < LANES; k++) lanes[k] = -INFINITY;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    EGI_SIMD
    for (int k = 0; k < LANES; k++) lanes[k] = larger(in[i + k], lanes[k]);
  }
  for (int k = 0; i < n; i++, k++) lanes[k] = larger(in[i], lanes[k]);
  for (int k = 1; k < LANES; k++) lanes[0] = larger(lanes[k], lanes[0]);
  return lanes[0];
}

static void add_to(double *sums, const float *in, int64_t n) {
  EGI_SIMD
  for (int64_t i = 0; i < n; i++) sums[i] += (double)in[i];
}

const egi_isa_elementwise EGI_ISA_NAME(egi_isa_elementwise) = {
    .unary = {[EGI_UNARY_ABS] = unary_abs,
              [EGI_UNARY_ACOS] = unary_acos,
              [EGI_UNARY_ACOSH] = unary_acosh,
              [EGI_UNARY_ASIN] = unary_asin,
              [EGI_UNARY_ASINH] = unary_asinh,
              [EGI_UNARY_ATAN] = unary_atan,
              [EGI_UNARY_ATANH] = unary_atanh,
              [EGI_UNARY_COSH] = unary_cosh,
              [EGI_UNARY_SINH] = unary_sinh,
              [EGI_UNARY_TAN] = unary_tan,
              [EGI_UNARY_CEIL] = unary_ceil,
              [EGI_UNARY_COS] = unary_cos,
              [EGI_UNARY_ERF] = unary_erf,
              [EGI_UNARY_EXP] = unary_exp,
              [EGI_UNARY_FLOOR] = unary_floor,
              [EGI_UNARY_GELU] = unary_gelu,
              [EGI_UNARY_GELU_TANH] = unary_gelu_tanh,
              [EGI_UNARY_LOG] = unary_log,
              [EGI_UNARY_NEG] = unary_neg,
              [EGI_UNARY_RECIPROCAL] = unary_reciprocal,
              [EGI_UNARY_RELU] = unary_relu,
              [EGI_UNARY_ROUND] = unary_round,
              [EGI_UNARY_SIGN] = unary_sign,
              [EGI_UNARY_SIGMOID] = unary_sigmoid,
              [EGI_UNARY_SIN] = unary_sin,
              [EGI_UNARY_SQRT] = unary_sqrt,
              [EGI_UNARY_TANH] = unary_tanh},
    .binary = {[EGI_BINARY_ADD] = BINARY_ROW(binary_add),
               [EGI_BINARY_SUB] = BINARY_ROW(binary_sub),
               [EGI_BINARY_MUL] = BINARY_ROW(binary_mul),
               [EGI_BINARY_DIV] = BINARY_ROW(binary_div),
               [EGI_BINARY_MAX] = BINARY_ROW(binary_max),
               [EGI_BINARY_MIN] = BINARY_ROW(binary_min),
               [EGI_BINARY_POW] = BINARY_ROW(pow),
               [EGI_BINARY_FMOD] = BINARY_ROW(fmod),
               [EGI_BINARY_GELU_GRAD] = BINARY_ROW(binary_gelu_grad),
               [EGI_BINARY_GELU_TANH_GRAD] = BINARY_ROW(binary_gelu_tanh_grad)},
    .where = BINARY_ROW(where),
    .clip = clip,
    .f16_to_f32 = f16_to_f32,
    .f32_to_f16 = f32_to_f16,
    .bf16_to_f32 = bf16_to_f32,
    .f32_to_bf16 = f32_to_bf16,
    .sum = sum,
    .max = max,
    .add_to = add_to,
};
