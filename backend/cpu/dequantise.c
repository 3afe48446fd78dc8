/* Rows of quantised matrices in float32: codes of 2, 4 or 8 bits, with scales and zero points for blocks. Each run of
 * elements with one scale is one loop. */
#include "backend/cpu/dequantise.h"

static unsigned code_at(const uint8_t *codes, unsigned bits, int64_t index) {
  unsigned per_byte = 8 / bits, place = (unsigned)(index % per_byte);
  return (unsigned)codes[index / per_byte] >> (place * bits) & ((1u << bits) - 1u);
}

static float number_of(unsigned code, unsigned bits, bool is_signed) {
  int value = (int)code;
  if (is_signed && code >> (bits - 1) != 0) value -= 1 << bits;
  return (float)value;
}

static float float_at(const void *data, eg_dtype dtype, int64_t index) {
  switch (dtype) {
  case EG_DTYPE_F16:
    return egi_f16_to_f32(((const uint16_t *)data)[index]);
  case EG_DTYPE_BF16:
    return egi_bf16_to_f32(((const uint16_t *)data)[index]);
  case EG_DTYPE_F64:
    return (float)((const double *)data)[index];
  default:
    return ((const float *)data)[index];
  }
}

/* Scale and zero point of a run. */
typedef struct block {
  float scale, zero;
} block;

static block block_at(const egi_quantised *m, int64_t row, int64_t column) {
  block b = {0.0F, m->zero};
  if (m->flat_block > 0) {
    int64_t index = (row * m->columns + column) / m->flat_block;
    b.scale = m->nested ? egi_nested_decode(m->nested, ((const uint8_t *)m->scales)[index], (uint64_t)index)
                        : float_at(m->scales, m->scale_dtype, index);
    return b;
  }
  int64_t r = row / m->block_rows, c = m->group_index ? m->group_index[column] : column / m->block_columns;
  b.scale = float_at(m->scales, m->scale_dtype, r * m->scale_row_stride + c * m->scale_column_stride);
  int64_t index = r * m->zero_row_stride + c * m->zero_column_stride;
  if (m->zero_kind == EGI_ZERO_CODES) b.zero = number_of(code_at(m->zeros, m->bits, index), m->bits, m->is_signed);
  if (m->zero_kind == EGI_ZERO_FLOATS) b.zero = float_at(m->zeros, m->zero_dtype, index);
  return b;
}

/* How many elements from `column` on have the scale of that one. */
static int64_t run_length(const egi_quantised *m, int64_t row, int64_t column, int64_t end) {
  int64_t length = 1;
  if (m->flat_block > 0) {
    length = m->flat_block - (row * m->columns + column) % m->flat_block;
  } else if (m->group_index) {
    while (column + length < end && m->group_index[column + length] == m->group_index[column]) length++;
  } else {
    length = m->block_columns - column % m->block_columns;
  }
  return length < end - column ? length : end - column;
}

/* Pairs of 4-bit codes in whole bytes, the low half first. */
static void convert_pairs(const uint8_t *codes, int64_t n_bytes, block b, float *out) {
  for (int64_t i = 0; i < n_bytes; i++) {
    out[2 * i] = ((float)(codes[i] & 15) - b.zero) * b.scale;
    out[2 * i + 1] = ((float)(codes[i] >> 4) - b.zero) * b.scale;
  }
}

static void convert_run(const egi_quantised *m, int64_t index, int64_t n, block b, float *out) {
  int64_t i = 0;
  if (m->has_levels) {
    egi_four_bit_decode(m->levels, m->codes, (uint64_t)index, (size_t)n, b.scale, out);
    return;
  }
  bool is_plain = !m->is_signed;
  if (m->bits == 4 && is_plain && index % 2 == 0) {
    convert_pairs(m->codes + index / 2, n / 2, b, out);
    i = n / 2 * 2;
  }
  if (m->bits == 8 && is_plain) {
    const uint8_t *codes = m->codes + index;
    for (; i < n; i++) out[i] = ((float)codes[i] - b.zero) * b.scale;
  }
  for (; i < n; i++) {
    unsigned code = code_at(m->codes, m->bits, index + i);
    out[i] = (number_of(code, m->bits, m->is_signed) - b.zero) * b.scale;
  }
}

void egi_dequantise(const egi_quantised *matrix, const egi_quantised_part *part, float *out, int64_t out_stride) {
  int64_t end = part->column + part->n_columns;
  for (int64_t row = part->row; row < part->row + part->n_rows; row++, out += out_stride)
    for (int64_t column = part->column, n = 0; column < end; column += n) {
      n = run_length(matrix, row, column, end);
      convert_run(matrix, row * matrix->code_row_stride + column, n, block_at(matrix, row, column),
                  out + (column - part->column));
    }
}
