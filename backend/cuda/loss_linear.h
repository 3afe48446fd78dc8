/* Tiles of logits on the device (loss_linear_rows.cu), for the operator that is head and loss in one (loss_linear.c).
 */
#ifndef ENGRAFT_BACKEND_CUDA_LOSS_LINEAR_H
#define ENGRAFT_BACKEND_CUDA_LOSS_LINEAR_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Columns of a tile's buffers, from one row to the next, are multiples of this: 16-byte accesses, whatever the type. */
#define EGI_CUDA_TILE_STEP 128

/* A tensor with one number a row, of any strides. */
typedef struct egi_cuda_row_numbers {
  void *data;
  eg_dtype dtype;
  int rank;
  int64_t dims[EGI_MAX_RANK], strides[EGI_MAX_RANK];
} egi_cuda_row_numbers;

/* Columns [first_column, first_column + columns) of the logits of `rows` rows, the first of which is `first_row`. */
typedef struct egi_cuda_logits {
  void *data;
  eg_dtype dtype; /* f32 or f64 */
  int64_t rows, columns, stride, first_row, first_column, n_classes;
  const void *bias; /* NULL: none */
  eg_dtype bias_dtype;
  int64_t bias_stride;
  egi_cuda_row_numbers labels, first, second; /* i64; logp and lse, or lse and d logp */
  bool is_first, is_last;                     /* of the tiles of its rows; for the bias: of the chunks of rows */
  double *statistics;                         /* [rows][3]: largest, sum of exponentials, the label's logit */
  void *gradient;                             /* [rows, stride] */
  eg_dtype gradient_dtype;                    /* that of the logits, in place, or a narrow one */
  int op;                                     /* for faults */
} egi_cuda_logits;

/* Log-probability and log-sum-exp, from the tiles of a row in order; written at the last one. A label outside of the
 * classes is a fault. */
eg_status egi_cuda_add_statistics(eg_context *ctx, const egi_cuda_logits *logits, const egi_cuda_stream *stream);
/* gradient = d logp · (one-hot - softmax); 0 in rows without a label. */
eg_status egi_cuda_make_logit_gradient(eg_context *ctx, const egi_cuda_logits *logits, const egi_cuda_stream *stream);
/* Adds the gradient's columns up in `sums` f64 [n_classes]; `out` of the tensor's type is written at the last chunk. */
eg_status egi_cuda_add_bias_gradient(eg_context *ctx, const egi_cuda_logits *logits, double *sums,
                                     const egi_tensor *out, const egi_cuda_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
