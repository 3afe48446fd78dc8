/* Quantised matrices as they lie in files, and their rows in float32. Called by the kernels that multiply with them. */
#ifndef ENGRAFT_BACKEND_CPU_DEQUANTISE_H
#define ENGRAFT_BACKEND_CPU_DEQUANTISE_H

#include "backend/cpu/cpu.h"
#include "backend/quantised_weight.h"

/* Rows [row, row + n_rows) and columns [column, column + n_columns). */
typedef struct egi_quantised_part {
  int64_t row, n_rows, column, n_columns;
} egi_quantised_part;

/* The values of a part, rows `out_stride` floats apart. f32 arithmetic, one rounding for the difference, one for the
 * product: the same for every order of calls. */
void egi_dequantise(const egi_quantised *matrix, const egi_quantised_part *part, float *out, int64_t out_stride);

#endif
