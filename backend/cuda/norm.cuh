/* What LayerNormalization, RMSNormalization and their gradients share: operands as rows, and what a launch is given. */
#ifndef ENGRAFT_BACKEND_CUDA_NORM_CUH
#define ENGRAFT_BACKEND_CUDA_NORM_CUH

#include "backend/cuda/rows.cuh"

namespace egi {

/* Operands of `rows`. */
enum norm_operand { NORM_X, NORM_OUT, NORM_SCALE, NORM_MEAN, NORM_DEVIATION, NORM_BIAS, NORM_DY = NORM_BIAS };

struct norm_node {
  rows r;
  row_threads threads;
  eg_dtype dtype;
  bool is_rms, has_out;
  double epsilon;
  /* gradients of scale and bias: sums over chunks of rows, [n_chunks, length] each */
  bool has_sums[2];
  int64_t rows_per_chunk;
  int n_chunks;
  rows sums[2]; /* one row: where the results go */
  size_t sums_at[2];
};

struct norm_job {
  rows r;
  int group;
  bool is_rms, has_out, has_mean, has_deviation, has_bias;
  double epsilon;
  int64_t rows_per_chunk;
  void *sums[2]; /* numbers of the accumulator's type, or NULL */
};

/* Checks types and shapes of the operands that the gradient (`dy`: its input) or the forward kernel has. */
eg_status norm_check(egi_kernel_plan *plan, norm_node *node, int dy);

} // namespace egi

#endif
