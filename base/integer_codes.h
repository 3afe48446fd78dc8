/* Blocks of numbers as integers of a few bits, as onnxruntime's quantiser for MatMulNBits makes them: what a code
 * stands for is (code - zero) · scale in float32. Called by the kernel that trains against such codes and by what
 * exports them. */
#ifndef ENGRAFT_BASE_INTEGER_CODES_H
#define ENGRAFT_BASE_INTEGER_CODES_H

#include "base/base.h"

typedef struct egi_integer_block {
  float scale, zero; /* zero: a whole number, the code of 0 */
  float largest;     /* code: 2^bits - 1 */
} egi_integer_block;

/* Symmetric: the number of largest magnitude (of +m and -m the latter) has the code 0 and 0 that of half the codes: the
 * scale may be negative, and a number as large on the other side is cut by one step. Else codes reach from the smallest
 * number, or 0, to the largest, or 0. A block of zeros has scale 0. */
egi_integer_block egi_integer_block_make(const float *values, size_t n, unsigned bits, bool is_symmetric);
/* A whole number from 0 to `largest`, the nearest, ties to even; NaN for NaN. */
float egi_integer_code(const egi_integer_block *block, float value);

#endif
