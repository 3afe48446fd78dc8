/* Matrix products with an addend, C = beta·addend + alpha·A·B over broadcast batch dims, for the operators that are
 * one: what a node's operands are, and their sizes and strides (matmul.c). */
#ifndef ENGRAFT_BACKEND_MATMUL_H
#define ENGRAFT_BACKEND_MATMUL_H

#include "backend/operands.h"
#include "graph/linear.h"

enum { EGI_OPERAND_A, EGI_OPERAND_B, EGI_OPERAND_C, EGI_OPERAND_ADDEND, EGI_OPERAND_COUNT };

/* Which inputs the operands are (-1: none; C is output 0). */
typedef struct egi_matmul_spec {
  int tensors[EGI_OPERAND_COUNT];
  bool transpose_a, transpose_b;
  double alpha, beta;
} egi_matmul_spec;
egi_matmul_spec egi_matmul_spec_of_matmul(void);
eg_status egi_matmul_spec_of_gemm(const egi_kernel_plan *plan, egi_matmul_spec *out_spec);
egi_matmul_spec egi_matmul_spec_of_add_matmul(const egi_kernel_plan *plan);
/* Of a Linear whose weight is stored plainly. */
eg_status egi_matmul_spec_of_linear(const egi_kernel_plan *plan, egi_matmul_spec *out_spec);

/* One operand: index of its tensor in the call (-1: none), strides of the matrix and of the batch dims, in elements. */
typedef struct egi_matmul_operand {
  int tensor;
  eg_dtype dtype;
  int64_t row_stride, column_stride;
  int64_t batch_strides[EGI_MAX_RANK];
} egi_matmul_operand;

typedef struct egi_matmul {
  int64_t m, n, k, n_batches;
  int batch_rank;
  int64_t batch_dims[EGI_MAX_RANK];
  egi_matmul_operand operands[EGI_OPERAND_COUNT];
  double alpha, beta;
} egi_matmul;

/* Batch dims that A and C carry and B does not are folded into the rows. EG_ERROR_SHAPE where sizes do not fit. */
eg_status egi_matmul_read(const egi_kernel_plan *plan, const egi_matmul_spec *spec, egi_matmul *out_matmul);

#endif
