/* Elementary functions of float without branches, tables or calls, written so that compilers vectorise loops over
 * them; about 2 units in the last place. Method: argument reduction and minimax polynomials (J.-M. Muller, Elementary
 * Functions, 3rd ed., chapters 3 and 11; two-part ln 2 after Cody and Waite, 1980); the coefficients are weighted
 * least-maximum fits made for these intervals. NaN gives NaN. Included by the files of isa/ only. */
#ifndef ENGRAFT_BACKEND_CPU_ISA_MATH_H
#define ENGRAFT_BACKEND_CPU_ISA_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t egi_float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float egi_bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* 1.5 * 2^23: adding it rounds a small number to an integer, which then stands in the low bits. */
#define EGI_ROUND_MAGIC 12582912.0f
#define EGI_LN2_HIGH 0.693359375f
#define EGI_LN2_LOW (-2.12194440e-4f)
#define EGI_LOG2_E 1.44269504f

/* e^r for |r| <= ln 2 / 2. */
static inline float egi_exp_reduced(float r) {
  float q = 0x1.6dbc64p-10f;
  q = q * r + 0x1.124148p-7f;
  q = q * r + 0x1.555454p-5f;
  q = q * r + 0x1.555486p-3f;
  q = q * r + 0.5f;
  return q * (r * r) + r + 1.0f;
}

/* e^x with gradual underflow: 2^n is applied in two factors so that neither leaves the range of float. */
static inline float egi_exp_f32(float x) {
  float clamped = x < -104.0f ? -104.0f : x;
  clamped = clamped > 89.0f ? 89.0f : clamped;
  float rounded = clamped * EGI_LOG2_E + EGI_ROUND_MAGIC;
  uint32_t n = egi_float_bits(rounded) - egi_float_bits(EGI_ROUND_MAGIC);
  float whole = rounded - EGI_ROUND_MAGIC;
  float r = (clamped - whole * EGI_LN2_HIGH) - whole * EGI_LN2_LOW;
  uint32_t half = (uint32_t)((int32_t)n >> 1);
  float scale_a = egi_bits_float((half + 127u) << 23);
  float scale_b = egi_bits_float((n - half + 127u) << 23);
  return egi_exp_reduced(r) * scale_a * scale_b;
}

/* e^x for x <= 0, as in softmax; results below the smallest normal number are 0, so that -inf gives 0 and no
 * subnormal slows down what follows. */
static inline float egi_exp_negative_f32(float x) {
  float clamped = x < -87.0f ? -87.0f : x;
  float rounded = clamped * EGI_LOG2_E + EGI_ROUND_MAGIC;
  uint32_t n = egi_float_bits(rounded) - egi_float_bits(EGI_ROUND_MAGIC);
  float whole = rounded - EGI_ROUND_MAGIC;
  float r = (clamped - whole * EGI_LN2_HIGH) - whole * EGI_LN2_LOW;
  float value = egi_exp_reduced(r) * egi_bits_float((n + 127u) << 23);
  return x < -87.0f ? 0.0f : value;
}

/* ln x: x = 2^e·m with m in [sqrt(1/2), sqrt 2), ln m = 2 artanh(s), s = (m - 1) / (m + 1). */
static inline float egi_log_f32(float x) {
  int is_tiny = x < 0x1p-126f;
  float scaled = is_tiny ? x * 0x1p23f : x;
  uint32_t bits = egi_float_bits(scaled);
  uint32_t offset = bits - 0x3f3504f3u; /* sqrt(1/2) */
  int32_t exponent = (int32_t)offset >> 23;
  float m = egi_bits_float((offset & 0x007fffffu) + 0x3f3504f3u);
  float e = (float)(is_tiny ? exponent - 23 : exponent);
  float f = m - 1.0f;
  float s = f / (m + 1.0f);
  float z = s * s;
  float q = 0.235963345f;
  q = q * z + 0.285366029f;
  q = q * z + 0.400003463f;
  q = q * z + 0.666666627f;
  /* 2s = f - f·s keeps the leading term exact. */
  float log_m = f - s * (f - z * q);
  float value = e * EGI_LN2_HIGH + (log_m + e * EGI_LN2_LOW);
  value = x < INFINITY ? value : x; /* infinity, NaN */
  value = x == 0.0f ? -INFINITY : value;
  return x < 0.0f ? NAN : value;
}

static inline float egi_sigmoid_f32(float x) {
  float e = egi_exp_f32(-fabsf(x));
  float high = 1.0f / (1.0f + e);
  float low = e / (1.0f + e);
  return x < 0.0f ? low : high;
}

/* tanh x: odd polynomial near 0, else 1 - 2 / (e^2|x| + 1) with the sign of x. */
static inline float egi_tanh_f32(float x) {
  float a = fabsf(x);
  float z = x * x;
  float q = -0.00567930378f;
  q = q * z + 0.0206181221f;
  q = q * z - 0.0537340008f;
  q = q * z + 0.133313835f;
  q = q * z - 0.333332807f;
  float small = x + x * (z * q);
  float clamped = a > 10.0f ? 10.0f : a;
  float big = 1.0f - 2.0f / (egi_exp_f32(2.0f * clamped) + 1.0f);
  big = x < 0.0f ? -big : big;
  return a < 0.625f ? small : big;
}

/* erf x: odd polynomial below 1, above it 1 - e^p(|x|) with p fitted to ln erfc, 1 from 4 on. */
static inline float egi_erf_f32(float x) {
  float a = fabsf(x);
  float z = x * x;
  float q = 7.88911930e-5f;
  q = q * z - 8.02084105e-4f;
  q = q * z + 5.18953521e-3f;
  q = q * z - 2.68544443e-2f;
  q = q * z + 1.12836003e-1f;
  q = q * z - 3.76126260e-1f;
  q = q * z + 1.28379166e-1f;
  float small = x + x * q;
  float c = a > 4.0f ? 4.0f : a;
  float p = 2.12085723e-7f;
  p = p * c - 2.47542357e-5f;
  p = p * c + 4.60357842e-4f;
  p = p * c - 4.27063601e-3f;
  p = p * c + 2.53489260e-2f;
  p = p * c - 1.08606599e-1f;
  p = p * c - 6.33065760e-1f;
  p = p * c - 1.12964940e+0f;
  p = p * c + 2.02065450e-4f;
  float big = 1.0f - egi_exp_f32(p);
  big = x < 0.0f ? -big : big;
  return a < 1.0f ? small : big;
}

#endif
