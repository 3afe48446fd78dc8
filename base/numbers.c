/* Half floats, the Philox generator, the clock. */
#include "base/anywhere.h"
#include "base/base.h"

#include <math.h>
#include <string.h>
#include <time.h>

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

float egi_bf16_to_f32(uint16_t bits) {
  return float_of((uint32_t)bits << 16);
}

uint16_t egi_f32_to_bf16(float value) {
  uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x0040u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float egi_f16_to_f32(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1fu, fraction = bits & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0) return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
  float magnitude = (float)fraction * 0x1p-24f; /* subnormal, exact */
  return sign != 0 ? -magnitude : magnitude;
}

uint16_t egi_f32_to_f16(float value) {
  uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
  if (magnitude < 0x38800000u) {
    /* below the smallest normal: adding 0.5 leaves the subnormal's bits, rounded to even, at the end of the fraction */
    float shifted = float_of(magnitude) + 0.5f;
    return (uint16_t)(sign | (bits_of(shifted) - 0x3f000000u));
  }
  uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

void egi_philox(uint64_t key, const uint32_t counter[4], uint32_t out_words[4]) {
  memcpy(out_words, counter, 4 * sizeof *counter);
  egi_philox_words(key, out_words);
}

double egi_random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  uint32_t words[4];
  egi_random_words(seed, stream, index, words);
  return egi_random_unit(words[0], words[1]);
}

/* Box & Muller, 1958: sqrt(-2 ln u) cos(2 pi v), with u in (0, 1]. */
double egi_random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  uint32_t words[4];
  egi_random_words(seed, stream, index, words);
  double u = 1.0 - egi_random_unit(words[0], words[1]), v = egi_random_unit(words[2], words[3]);
  return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

double egi_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
