/* Blockwise quantisation by tables. Loops over thresholds are outermost, over fixed runs of values innermost: those
 * vectorise, searches do not. */
#include "base/blockwise.h"

#include <string.h>

enum { RUN = 32, N_NF4 = 15, N_FP4 = 7 };

/* FP4: a sign, two bits of exponent, one of mantissa, scaled to [-1, 1]; NF4: quantiles of a normal distribution
 * (arXiv:2305.14314, appendix E). */
static const float levels_of[2][16] = {
    {0.0F, 0.005208333333F, 0.66666667F, 1.0F, 0.33333333F, 0.5F, 0.16666667F, 0.25F, -0.0F, -0.005208333333F,
     -0.66666667F, -1.0F, -0.33333333F, -0.5F, -0.16666667F, -0.25F},
    {-1.0F, -0.6961928009986877F, -0.5250730514526367F, -0.39491748809814453F, -0.28444138169288635F,
     -0.18477343022823334F, -0.09105003625154495F, 0.0F, 0.07958029955625534F, 0.16093020141124725F,
     0.24611230194568634F, 0.33791524171829224F, 0.44070982933044434F, 0.5626170039176941F, 0.7229568362236023F, 1.0F}};

/* A value above threshold i has at least the code i + 1; one that is equal keeps the lower code. */
static const float nf4_thresholds[N_NF4] = {
    -0.8480964004993439F,  -0.6106329262256622F,   -0.4599952697753906F, -0.33967943489551544F, -0.23460740596055984F,
    -0.13791173323988914F, -0.045525018125772476F, 0.03979014977812767F, 0.1202552504837513F,   0.2035212516784668F,
    0.2920137718319893F,   0.3893125355243683F,    0.5016634166240692F,  0.6427869200706482F,   0.8614784181118011F};

/* Of magnitudes; the codes of rising magnitudes do not rise. */
static const float fp4_thresholds[N_FP4] = {0.00260417F, 0.0859375F, 0.20833333F, 0.29166667F,
                                            0.4166667F,  0.583333F,  0.8333333F};
static const uint8_t fp4_codes[N_FP4 + 1] = {0, 1, 6, 7, 4, 5, 2, 3};
enum { FP4_SIGN = 8 };

const float *egi_four_bit_levels(egi_four_bit type) {
  return levels_of[type == EGI_FOUR_BIT_NF4];
}

/* ---- 4 bits ----------------------------------------------------------------------------------------------------- */

/* The largest magnitude, by bits: for floats without a sign the order of numbers is that of their bits, and what is not
 * finite is above all that is. */
static float largest(const float *values, size_t n) {
  uint32_t lanes[RUN] = {0}, most = 0;
  size_t done = 0;
  for (; done + RUN <= n; done += RUN) {
    uint32_t bits[RUN];
    memcpy(bits, values + done, sizeof bits);
    for (int i = 0; i < RUN; i++) {
      uint32_t magnitude = bits[i] & 0x7fffffffU;
      lanes[i] = magnitude > lanes[i] ? magnitude : lanes[i];
    }
  }
  for (; done < n; done++) {
    uint32_t bits = 0;
    memcpy(&bits, &values[done], sizeof bits);
    if ((bits & 0x7fffffffU) > most) most = bits & 0x7fffffffU;
  }
  for (int i = 0; i < RUN; i++) most = lanes[i] > most ? lanes[i] : most;
  float result = 0.0F;
  memcpy(&result, &most, sizeof result);
  return result;
}

/* How many of the thresholds each value is above. */
static void count_above(const float values[RUN], const float *thresholds, int n, int32_t counts[RUN]) {
  memset(counts, 0, RUN * sizeof *counts);
  for (int t = 0; t < n; t++) {
    float threshold = thresholds[t];
    for (int i = 0; i < RUN; i++) counts[i] += values[i] > threshold;
  }
}

static void encode_nf4(const float values[RUN], uint8_t codes[RUN]) {
  int32_t counts[RUN];
  count_above(values, nf4_thresholds, N_NF4, counts);
  for (int i = 0; i < RUN; i++) codes[i] = (uint8_t)counts[i];
}

static void encode_fp4(const float values[RUN], uint8_t codes[RUN]) {
  int32_t counts[RUN];
  float magnitudes[RUN];
  for (int i = 0; i < RUN; i++) magnitudes[i] = values[i] < 0.0F ? -values[i] : values[i];
  count_above(magnitudes, fp4_thresholds, N_FP4, counts);
  for (int i = 0; i < RUN; i++) codes[i] = (uint8_t)(fp4_codes[counts[i]] + (values[i] < 0.0F ? FP4_SIGN : 0));
}

/* Values are multiplied by the reciprocal of the scale, rounded: not divided. Of zeros that is no number, above no
 * threshold. */
float egi_four_bit_encode(egi_four_bit type, const float *values, size_t n, uint8_t *codes) {
  float scale = largest(values, n), factor = 1.0F / scale;
  for (size_t done = 0; done < n; done += RUN) {
    size_t count = n - done < RUN ? n - done : RUN;
    float scaled[RUN] = {0.0F};
    uint8_t run[RUN];
    memcpy(scaled, values + done, count * sizeof *scaled);
    for (int i = 0; i < RUN; i++) scaled[i] *= factor;
    if (type == EGI_FOUR_BIT_NF4)
      encode_nf4(scaled, run);
    else
      encode_fp4(scaled, run);
    for (size_t i = 0; i < (count + 1) / 2; i++)
      codes[done / 2 + i] = (uint8_t)((unsigned)run[2 * i] << 4 | run[2 * i + 1]);
  }
  return scale;
}

void egi_four_bit_decode(egi_four_bit type, const uint8_t *codes, uint64_t first, size_t n, float scale, float *out) {
  float values[16];
  size_t i = 0;
  for (int code = 0; code < 16; code++) values[code] = levels_of[type == EGI_FOUR_BIT_NF4][code] * scale;
  codes += first / 2;
  if (first % 2 != 0 && n > 0) out[i++] = values[*codes++ & 15U];
  for (; i + 1 < n; i += 2, codes++) {
    out[i] = values[*codes >> 4];
    out[i + 1] = values[*codes & 15U];
  }
  if (i < n) out[i] = values[*codes >> 4];
}

/* ---- 8 bits ----------------------------------------------------------------------------------------------------- */

/* Point i of n evenly spaced ones from 0.1 to 1 as PyTorch's linspace computes them in f32: from the nearer end, with
 * one rounding. Products of the step with i are exact in double. */
static float point(int i, int n) {
  const float start = 0.1F, end = 1.0F, step = (end - start) / (float)(n - 1);
  if (i < n / 2) return (float)((double)start + (double)step * i);
  return (float)((double)end - (double)step * (n - 1 - i));
}

void egi_dynamic_map(bool is_signed, float out_map[256]) {
  static const float decades[7] = {1e-6F, 1e-5F, 1e-4F, 1e-3F, 1e-2F, 1e-1F, 1.0F};
  int zero = is_signed ? 127 : 0, at = zero;
  out_map[at++] = 0.0F;
  for (int decade = 0; decade < 7; decade++) {
    int n = (is_signed ? 1 : 2) << decade;
    for (int i = 0; i < n; i++) out_map[at++] = decades[decade] * ((point(i, n + 1) + point(i + 1, n + 1)) / 2.0F);
  }
  out_map[at] = 1.0F;
  for (int i = 1; i <= zero; i++) out_map[zero - i] = -out_map[zero + i];
}

/* Bisection from the middle in seven steps, then the nearer of the last place and its neighbour on the value's side; on
 * a tie the last place. */
static uint8_t nearest(const float map[256], float value) {
  int place = 127, low = 0, high = 255;
  for (int step = 64; step > 0; step /= 2) {
    if (value > map[place]) {
      low = place;
      place += step;
    } else {
      high = place;
      place -= step;
    }
  }
  if (value > map[place]) return (uint8_t)(value > (map[high] + map[place]) * 0.5F ? high : place);
  return (uint8_t)(value < (map[low] + map[place]) * 0.5F ? low : place);
}

float egi_dynamic_encode(const float map[256], const float *values, size_t n, uint8_t *codes) {
  float scale = largest(values, n), factor = 1.0F / scale;
  for (size_t i = 0; i < n; i++) codes[i] = nearest(map, values[i] * factor);
  return scale;
}

/* ---- scales of scales ------------------------------------------------------------------------------------------- */

uint64_t egi_nested_count(uint64_t n_scales) {
  return EGI_NESTED_HEADER + (n_scales + EGI_NESTED_BLOCK - 1) / EGI_NESTED_BLOCK;
}

void egi_nested_encode(const float *scales, uint64_t n, uint8_t *codes, float *out_nested) {
  double sum = 0.0;
  for (uint64_t i = 0; i < n; i++) sum += (double)scales[i];
  float offset = n > 0 ? (float)(sum / (double)n) : 0.0F;
  out_nested[0] = offset;
  egi_dynamic_map(true, out_nested + 1);
  for (uint64_t first = 0, block = 0; first < n; first += EGI_NESTED_BLOCK, block++) {
    float centred[EGI_NESTED_BLOCK];
    size_t count = n - first < EGI_NESTED_BLOCK ? (size_t)(n - first) : EGI_NESTED_BLOCK;
    for (size_t i = 0; i < count; i++) centred[i] = scales[first + i] - offset;
    out_nested[EGI_NESTED_HEADER + block] = egi_dynamic_encode(out_nested + 1, centred, count, codes + first);
  }
}

float egi_nested_decode(const float *nested, uint8_t code, uint64_t index) {
  float product = nested[1 + code] * nested[EGI_NESTED_HEADER + index / EGI_NESTED_BLOCK];
  return product + nested[0];
}
