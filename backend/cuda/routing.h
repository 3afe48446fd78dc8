/* Expert routing on CUDA: sorts (token, expert) pairs by expert without the host, moves rows into that order and back.
 * Pair i = token * k + choice. The order is stable: within an expert, pairs keep their order. No atomics on results, so
 * two runs give equal bits. Pairs whose expert is outside 0 .. n_experts - 1 are left out: inverse -1. */
#ifndef ENGRAFT_BACKEND_CUDA_ROUTING_H
#define ENGRAFT_BACKEND_CUDA_ROUTING_H

#include "backend/cuda/attention.h" /* egi_cuda_float, egi_cuda_status */

#ifdef __cplusplus
extern "C" {
#endif

/* All pointers are device memory. Rows from offsets[n_experts] on of expert, source_row and sorted_weight are left as
 * they are. */
typedef struct egi_routing {
  int64_t n_tokens;
  int32_t k, n_experts;  /* n_experts: at most 4096, and what 76 bytes of shared memory each allow */
  const int32_t *chosen; /* [n_tokens, k] experts of each token */
  const float *weight;   /* [n_tokens, k] or NULL */
  int32_t *offsets;      /* [n_experts + 1] */
  int32_t *expert;       /* [n_tokens * k] of each sorted row, or NULL */
  int32_t *source_row;   /* [n_tokens * k] token of each sorted row */
  int32_t *inverse;      /* [n_tokens, k] sorted row of each pair */
  float *sorted_weight;  /* [n_tokens * k], with weight */
  void *workspace;       /* aligned to 256 bytes */
  size_t workspace_bytes;
} egi_routing;

size_t egi_cuda_routing_workspace(int64_t n_tokens, int32_t k, int32_t n_experts);
egi_cuda_status egi_cuda_routing_sort(const egi_routing *routing, void *stream);

/* Rows of n_columns elements (a multiple of 8), contiguous, aligned to 16 bytes; strides in elements, multiples of 8.
 */
typedef struct egi_routing_rows {
  int64_t n_tokens;
  int32_t k, n_columns;
  egi_cuda_float dtype;
  const int32_t *inverse;
  const float *weight; /* gather: [n_tokens * k] by sorted row; combine: [n_tokens, k] by pair; or NULL for ones */
  const void *src;
  void *dst;
  int64_t src_stride, dst_stride;
} egi_routing_rows;

/* dst[inverse[t, j]] = weight[inverse[t, j]] * src[t]: tokens' rows in sorted order. Each row is read once. */
egi_cuda_status egi_cuda_routing_gather(const egi_routing_rows *rows, void *stream);
/* dst[t] = sum over the choices j of weight[t, j] * src[inverse[t, j]], fp32, in order of j. Every row of dst is
 * written. */
egi_cuda_status egi_cuda_routing_combine(const egi_routing_rows *rows, void *stream);

#ifdef __cplusplus
}
#endif

#endif
