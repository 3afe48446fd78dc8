/* Quantised weights as dense matrices in device memory (dequantise.cu). */
#ifndef ENGRAFT_BACKEND_CUDA_DEQUANTISE_H
#define ENGRAFT_BACKEND_CUDA_DEQUANTISE_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "backend/quantised_weight.h"

/* The matrix with the data of a call; operands that are not contiguous are copied to `copies`. */
eg_status egi_cuda_quantised_open(eg_context *ctx, const egi_quantised_weight *weight, const egi_kernel_call *call,
                                  char *copies, egi_quantised *out_matrix);
/* A part of a matrix. */
typedef struct egi_cuda_window {
  int64_t row, column, n_rows, n_columns;
} egi_cuda_window;
/* The part, row-major [n_rows, n_columns] in f32, bf16 or f16: f32 arithmetic as on the CPU, rounded once. A group that
 * is not there is a fault. `out` is aligned to 16 bytes. */
eg_status egi_cuda_dequantise(eg_context *ctx, const egi_quantised *matrix, const egi_cuda_window *window, void *out,
                              eg_dtype dtype, const egi_cuda_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
