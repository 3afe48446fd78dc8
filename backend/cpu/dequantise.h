/* Quantised matrices as they lie in files, and their rows in float32. Called by the kernels that multiply with them. */
#ifndef ENGRAFT_BACKEND_CPU_DEQUANTISE_H
#define ENGRAFT_BACKEND_CPU_DEQUANTISE_H

#include "backend/cpu/cpu.h"
#include "base/blockwise.h"

/* What stands between code and value: (code - zero) · scale, or levels[code] · scale. */
typedef enum egi_zero_kind { EGI_ZERO_NUMBER, EGI_ZERO_CODES, EGI_ZERO_FLOATS } egi_zero_kind;

/* A matrix of codes. Element (r, c) is code r · code_row_stride + c; its scale is that of block (r / block_rows,
 * c / block_columns), or of block (r, group_index[c]); in a flat matrix blocks are runs of its elements. */
typedef struct egi_quantised {
  int64_t rows, columns;
  const uint8_t *codes;
  unsigned bits; /* 2, 4 or 8 */
  bool is_signed;
  int64_t code_row_stride;
  bool has_levels; /* 4-bit codes of `levels`, the first of a byte in the high half; else codes are numbers */
  egi_four_bit levels;
  const void *scales;
  eg_dtype scale_dtype; /* f32, f16, bf16 or f64; u8: codes that `nested` decodes */
  const float *nested;
  int64_t block_rows, block_columns, scale_row_stride, scale_column_stride;
  const int32_t *group_index; /* [columns] or NULL */
  int64_t flat_block;         /* 0: blocks lie in rows and columns */
  egi_zero_kind zero_kind;
  float zero; /* NUMBER */
  const void *zeros;
  eg_dtype zero_dtype;     /* FLOATS */
  int64_t zero_row_stride; /* codes or floats from one row of blocks to the next */
  int64_t zero_column_stride;
} egi_quantised;

/* Rows [row, row + n_rows) and columns [column, column + n_columns). */
typedef struct egi_quantised_part {
  int64_t row, n_rows, column, n_columns;
} egi_quantised_part;

/* The values of a part, rows `out_stride` floats apart. f32 arithmetic, one rounding for the difference, one for the
 * product: the same for every order of calls. */
void egi_dequantise(const egi_quantised *matrix, const egi_quantised_part *part, float *out, int64_t out_stride);

#endif
