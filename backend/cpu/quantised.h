/* Products with a quantised weight, for the operators that take one. */
#ifndef ENGRAFT_BACKEND_CPU_QUANTISED_H
#define ENGRAFT_BACKEND_CPU_QUANTISED_H

#include "backend/cpu/dequantise.h"

/* The matrix with the data of a call; EG_ERROR_DATA for groups that are not there. */
eg_status egi_quantised_open(eg_context *ctx, const egi_quantised_weight *weight, const egi_kernel_call *call,
                             char *copies, egi_quantised *out_matrix);

/* C[m, n] = alpha · A[m, k] · B[k, n] + beta · C in f32, B columns [column, column + n) of the stored matrix or of its
 * transpose. `buffer` holds EGI_QUANTISED_BLOCK · n floats, `scratch` egi_product_scratch(m, n) bytes. The sum over k
 * is one over blocks of EGI_QUANTISED_BLOCK, in order. */
#define EGI_QUANTISED_BLOCK 256
typedef struct egi_quantised_product {
  const egi_quantised *matrix;
  bool is_transposed;
  egi_product product; /* without B */
  int64_t column;
  float *buffer;
  void *scratch;
} egi_quantised_product;
void egi_quantised_multiply(const egi_isa *isa, const egi_quantised_product *product);

#endif
