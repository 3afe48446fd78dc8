/* Blocks of integer codes. Reductions are in order of the numbers; every operation is rounded to float32, as the plain
 * operators of an exported body round them. */
#include "base/integer_codes.h"

/* To the nearest whole number, ties to even, for magnitudes below 2^22: adding 1.5 · 2^23 leaves no digits behind the
 * point. Larger ones come out wrong but larger than any code. */
static float round_to_even(float x) {
  const float magic = 12582912.0F;
  return (x + magic) - magic;
}

static float clamp(float x, float largest) {
  return x < 0.0F ? 0.0F : x > largest ? largest : x; /* NaN stays */
}

egi_integer_block egi_integer_block_make(const float *values, size_t n, unsigned bits, bool is_symmetric) {
  float low = 0.0F, high = 0.0F, half = (float)(1u << (bits - 1));
  egi_integer_block block = {.largest = 2.0F * half - 1.0F};
  for (size_t i = 0; i < n; i++) {
    if (values[i] < low) low = values[i];
    if (values[i] > high) high = values[i];
  }
  if (is_symmetric) {
    block.scale = (high > -low ? high : low) / -half;
    block.zero = half;
  } else {
    block.scale = (high - low) / block.largest;
    block.zero = block.scale > 0.0F ? clamp(round_to_even(-low / block.scale), block.largest) : 0.0F;
  }
  return block;
}

float egi_integer_code(const egi_integer_block *block, float value) {
  bool is_empty = !(block->scale < 0.0F) && !(block->scale > 0.0F);
  float steps = is_empty ? value * 0.0F : value / block->scale;
  return clamp(round_to_even(steps) + block->zero, block->largest);
}
