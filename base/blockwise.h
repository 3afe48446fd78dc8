/* Blockwise quantisation, code for code as the CUDA build of bitsandbytes: 4-bit codes of weights (NF4 and FP4,
 * Dettmers et al. 2023, arXiv:2305.14314) and 8-bit codes of the dynamic map (Dettmers et al. 2022, arXiv:2110.02861),
 * which the scales of the former and optimizer states are held in. Called by everything that makes or reads them. */
#ifndef ENGRAFT_BASE_BLOCKWISE_H
#define ENGRAFT_BASE_BLOCKWISE_H

#include "base/base.h"

/* Numbers as in files (quant_type of MatMulBnb4). */
typedef enum egi_four_bit { EGI_FOUR_BIT_FP4 = 0, EGI_FOUR_BIT_NF4 = 1 } egi_four_bit;

/* The value of each code, for a scale of 1. */
const float *egi_four_bit_levels(egi_four_bit type);
/* Codes of one block of `n` values, two a byte, the first in the high half; of an odd block the last low half is the
 * code of 0. Returns the block's scale, the largest magnitude: infinite or NaN where a value is. A block of zeros has
 * codes 0 and scale 0. */
float egi_four_bit_encode(egi_four_bit type, const float *values, size_t n, uint8_t *codes);
/* Values [first, first + n) of the flattened matrix, all of one scale. */
void egi_four_bit_decode(egi_four_bit type, const uint8_t *codes, uint64_t first, size_t n, float scale, float *out);

/* 256 ascending values from -0.993 (signed) or 0 to 1: seven decades, the number of steps doubling with each. */
void egi_dynamic_map(bool is_signed, float out_map[256]);
/* Codes of one block by such a map, nearest value; returns the block's scale. Value = map[code] · scale. */
float egi_dynamic_encode(const float map[256], const float *values, size_t n, uint8_t *codes);

/* Scales of 4-bit blocks that are themselves held as 8-bit codes ("double quantisation"): what is decoded is
 * map[code] · scales[i / EGI_NESTED_BLOCK] + offset, each operation rounded to f32. In memory the parts lie one after
 * the other in floats [EGI_NESTED_HEADER + blocks]: offset, map [256], scales. */
enum { EGI_NESTED_BLOCK = 256, EGI_NESTED_HEADER = 257 };
/* Number of floats for n scales. */
uint64_t egi_nested_count(uint64_t n_scales);
/* The offset is the mean of the scales. */
void egi_nested_encode(const float *scales, uint64_t n, uint8_t *codes, float *out_nested);
float egi_nested_decode(const float *nested, uint8_t code, uint64_t index);

#endif
