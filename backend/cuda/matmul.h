/* Matrix products with cuBLASLt, for the operators that are one or end in one. Row-major results, fp32 accumulation
 * (compute type 32F, no TF32), no reduction through atomics: two runs give equal bits. */
#ifndef ENGRAFT_BACKEND_CUDA_MATMUL_H
#define ENGRAFT_BACKEND_CUDA_MATMUL_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "backend/matmul.h"

/* A strided batch of matrices [rows, columns] in device memory; strides in elements, one of the matrix's is 1. */
typedef struct egi_cuda_matrices {
  void *data;
  eg_dtype dtype;
  int64_t row_stride, column_stride, batch_stride;
} egi_cuda_matrices;

/* C[m, n] = beta · addend + alpha · A[m, k] · B[k, n]. A and B have one type, f32, bf16 or f16; C and the addend that
 * type or f32. `bias`, of C's type, contiguous [n], is added where there is one. */
typedef struct egi_cuda_product {
  int64_t m, n, k, n_batches;
  egi_cuda_matrices a, b, c, addend; /* addend.data NULL: none */
  const void *bias;
  float alpha, beta;
} egi_cuda_product;

/* Whether cuBLASLt takes matrices that lie so; else they are copied first. */
bool egi_cuda_is_dense(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride);
eg_status egi_cuda_multiply(eg_context *ctx, const egi_cuda_product *product, const egi_cuda_stream *stream);

/* ---- what the products above do not take (matmul_copy.cu) ----------------------------------------------------------
 */

/* An operand over several batch dims; strides in elements. */
typedef struct egi_cuda_operand {
  void *data;
  eg_dtype dtype;
  int64_t row_stride, column_stride, batch_strides[EGI_MAX_RANK];
} egi_cuda_operand;

typedef struct egi_cuda_batches {
  int rank;
  int64_t count, dims[EGI_MAX_RANK];
} egi_cuda_batches;

/* Copies and converts [batches, rows, columns] of floats; f64 only to f64. */
eg_status egi_cuda_copy_matrices(eg_context *ctx, const egi_cuda_operand operands[2], const egi_cuda_batches *batches,
                                 const int64_t size[2], const egi_cuda_stream *stream); /* source, target */

/* Any strides and batch dims, all types of the CPU kernel: a thread an element of the result. */
typedef struct egi_cuda_plain_product {
  int64_t m, n, k;
  egi_cuda_batches batches;
  egi_cuda_operand a, b, c, addend; /* addend.data NULL: none */
  double alpha, beta;
} egi_cuda_plain_product;
eg_status egi_cuda_multiply_plainly(eg_context *ctx, const egi_cuda_plain_product *product,
                                    const egi_cuda_stream *stream);

/* ---- operators ------------------------------------------------------------------------------------------------- */

/* The plan of a product with operands of the node; egi_cuda_run_matmul() runs it. */
eg_status egi_cuda_matmul_prepare(egi_kernel_plan *plan, const egi_matmul_spec *spec);

#ifdef __cplusplus
}
#endif

#endif
