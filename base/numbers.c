/* Half floats, the Philox generator, the clock. */
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
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t low = (uint64_t)0xD2511F53u * c0, high = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(high >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)high;
    c2 = (uint32_t)(low >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out_words[0] = c0;
  out_words[1] = c1;
  out_words[2] = c2;
  out_words[3] = c3;
}

static void random_words(uint64_t seed, uint64_t stream, uint64_t index, uint32_t words[4]) {
  uint32_t counter[4] = {(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)};
  egi_philox(seed, counter, words);
}

/* 53 bits of two words, in [0, 1). */
static double unit(uint32_t high, uint32_t low) {
  return (double)(((uint64_t)high << 21) | (low >> 11)) * 0x1p-53;
}

double egi_random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  uint32_t words[4];
  random_words(seed, stream, index, words);
  return unit(words[0], words[1]);
}

/* Box & Muller, 1958: sqrt(-2 ln u) cos(2 pi v), with u in (0, 1]. */
double egi_random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  uint32_t words[4];
  random_words(seed, stream, index, words);
  double u = 1.0 - unit(words[0], words[1]), v = unit(words[2], words[3]);
  return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

double egi_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
