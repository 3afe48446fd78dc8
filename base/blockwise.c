/* Blockwise quantisation by tables. Runs of fixed length without branches inside: those vectorise. */
#include "base/blockwise.h"

#include "base/anywhere.h"

#include <string.h>

enum { RUN = 32, HALF = RUN / 2 };

/* FP4: a sign, two bits of exponent, one of mantissa, scaled to [-1, 1]; NF4: quantiles of a normal distribution
 * (arXiv:2305.14314, appendix E). */
static const float levels_of[2][16] = {
    {0.0F, 0.005208333333F, 0.66666667F, 1.0F, 0.33333333F, 0.5F, 0.16666667F, 0.25F, -0.0F, -0.005208333333F,
     -0.66666667F, -1.0F, -0.33333333F, -0.5F, -0.16666667F, -0.25F},
    {-1.0F, -0.6961928009986877F, -0.5250730514526367F, -0.39491748809814453F, -0.28444138169288635F,
     -0.18477343022823334F, -0.09105003625154495F, 0.0F, 0.07958029955625534F, 0.16093020141124725F,
     0.24611230194568634F, 0.33791524171829224F, 0.44070982933044434F, 0.5626170039176941F, 0.7229568362236023F, 1.0F}};

const float *egi_four_bit_levels(egi_four_bit type) {
  return levels_of[type == EGI_FOUR_BIT_NF4];
}

/* ---- 4 bits ----------------------------------------------------------------------------------------------------- */

/* The values, filled up with zeros. A copy of known length is a few moves. */
static inline void copy_run(const float *values, size_t count, void *run) {
  if (count == RUN) {
    memcpy(run, values, RUN * sizeof *values);
    return;
  }
  memset(run, 0, RUN * sizeof *values);
  memcpy(run, values, count * sizeof *values);
}

/* The largest magnitude, by bits: for floats without a sign the order of numbers is that of their bits, and what is not
 * finite is above all that is. */
static float largest(const float *values, size_t n) {
  int32_t most = 0;
  for (size_t done = 0; done < n; done += RUN) {
    size_t count = n - done < RUN ? n - done : RUN;
    int32_t bits[RUN], run_most = 0;
    copy_run(values + done, count, bits);
    for (int i = 0; i < RUN; i++) {
      int32_t magnitude = bits[i] & 0x7fffffff;
      run_most = magnitude > run_most ? magnitude : run_most;
    }
    most = run_most > most ? run_most : most;
  }
  float result = 0.0F;
  memcpy(&result, &most, sizeof result);
  return result;
}

static void encode_nf4(const float even[HALF], const float odd[HALF], uint8_t codes[HALF]) {
  int32_t high[HALF], low[HALF];
  for (int i = 0; i < HALF; i++) high[i] = egi_nf4_code(even[i]);
  for (int i = 0; i < HALF; i++) low[i] = egi_nf4_code(odd[i]);
  for (int i = 0; i < HALF; i++) codes[i] = (uint8_t)(high[i] << 4 | low[i]);
}

static void encode_fp4(const float even[HALF], const float odd[HALF], uint8_t codes[HALF]) {
  int32_t high[HALF], low[HALF];
  for (int i = 0; i < HALF; i++) high[i] = egi_fp4_code(even[i]);
  for (int i = 0; i < HALF; i++) low[i] = egi_fp4_code(odd[i]);
  for (int i = 0; i < HALF; i++) codes[i] = (uint8_t)(high[i] << 4 | low[i]);
}

/* Values are multiplied by the reciprocal of the scale, rounded: not divided. Of zeros that is no number, above no
 * threshold. */
float egi_four_bit_encode(egi_four_bit type, const float *values, size_t n, uint8_t *codes) {
  float scale = largest(values, n), factor = 1.0F / scale;
  for (size_t done = 0; done < n; done += RUN) {
    size_t count = n - done < RUN ? n - done : RUN;
    float run[RUN], even[HALF], odd[HALF];
    uint8_t bytes[HALF];
    copy_run(values + done, count, run);
    for (int i = 0; i < HALF; i++) {
      even[i] = run[2 * i] * factor;
      odd[i] = run[2 * i + 1] * factor;
    }
    if (type == EGI_FOUR_BIT_NF4)
      encode_nf4(even, odd, bytes);
    else
      encode_fp4(even, odd, bytes);
    memcpy(codes + done / 2, bytes, (count + 1) / 2);
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
    bool is_above = value > map[place];
    low = is_above ? place : low;
    high = is_above ? high : place;
    place += is_above ? step : -step;
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
