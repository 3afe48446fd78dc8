/* Quantised weights as nodes state them, whatever the backend: the operands of Linear in graph/linear.h, wherever they
 * stand among a node's inputs, and how codes, scales and zero points lie (quantised_weight.c). */
#ifndef ENGRAFT_BACKEND_QUANTISED_WEIGHT_H
#define ENGRAFT_BACKEND_QUANTISED_WEIGHT_H

#include "backend/operands.h"
#include "base/blockwise.h"
#include "graph/linear.h"

#define EGI_NO_INPUT 255

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

/* A weight as a node states it. */
typedef struct egi_quantised_weight {
  egi_quantised matrix;                  /* without its data */
  bool is_turned;                        /* stored as [in, out] */
  uint8_t inputs[EGI_LINEAR_INPUTS];     /* of the node; EGI_NO_INPUT: none */
  size_t copy_offset[EGI_LINEAR_INPUTS]; /* of operands that are not contiguous, among the copies; 0: none */
  size_t copies_bytes;                   /* workspace, 64-byte aligned */
} egi_quantised_weight;

/* Out features that a node's weight has: an attribute, or a dim of its codes. */
int64_t egi_quantised_out_features(const egi_kernel_plan *plan, const uint8_t *inputs);
eg_status egi_quantised_read(egi_kernel_plan *plan, const uint8_t *inputs, int64_t out_features, int64_t in_features,
                             egi_quantised_weight *out_weight);

#endif
