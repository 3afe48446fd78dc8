/* Ragged products on CUDA: rows sorted by group (expert), group e holding rows offsets[e] .. offsets[e + 1] - 1. The
 * offsets stay in device memory: one persistent launch whose shape does not depend on them, so that nothing waits for
 * the host and a CUDA graph may capture it. bf16 or fp16 in, fp32 accumulation in order of the contracted index, no
 * atomics: two runs give equal bits. Rows past offsets[E] and empty groups are neither computed nor written. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_H
#define ENGRAFT_BACKEND_CUDA_RAGGED_H

#include "backend/cuda/attention.h" /* egi_cuda_float, egi_cuda_status */

#ifdef __cplusplus
extern "C" {
#endif

/* AUTO takes the Hopper kernels where the device allows them, else those for sm_80 and later. */
typedef enum egi_ragged_kernels { EGI_RAGGED_AUTO = 0, EGI_RAGGED_MMA = 1, EGI_RAGGED_SM90 = 2 } egi_ragged_kernels;

/* FORWARD: y = x W_e^T with W [E, n_out, n_in]. BACKWARD: y = x W_e with W [E, n_in, n_out] (x is then the gradient of
 * the forward result). n_in is always the contracted size. */
typedef enum egi_ragged_direction { EGI_RAGGED_FORWARD = 0, EGI_RAGGED_BACKWARD = 1 } egi_ragged_direction;

/* How gate and up rows lie in W, bias and the adapter's output side: all gate rows first, or gate and up in turn. */
typedef enum egi_ragged_pairing {
  EGI_RAGGED_UNPAIRED = 0,
  EGI_RAGGED_CONCATENATED = 1,
  EGI_RAGGED_INTERLEAVED = 2
} egi_ragged_pairing;

/* Of gate g and up u: SWIGLU g sigmoid(g) u (Shazeer 2020); GEGLU gelu(g) u with erf, or with tanh (ONNX Gelu-20);
 * CLAMPED (gpt-oss): g' = min(g, limit), u' = clamp(u, -limit, limit), g' sigmoid(alpha g') (u' + 1). */
typedef enum egi_ragged_activation {
  EGI_RAGGED_PLAIN = 0,
  EGI_RAGGED_SWIGLU = 1,
  EGI_RAGGED_GEGLU = 2,
  EGI_RAGGED_GEGLU_TANH = 3,
  EGI_RAGGED_CLAMPED = 4
} egi_ragged_activation;

/* Rows of contiguous elements; the stride in elements is a multiple of 8, data aligned to 16 bytes. */
typedef struct egi_cuda_matrix {
  void *data;
  int64_t row_stride;
} egi_cuda_matrix;

/* NF4 as bitsandbytes lays it out, over the whole stack [E, rows, columns] row by row: two codes a byte, the first in
 * the high nibble, one scale for 64 elements. Scales are fp32 (`absmax`), or nested: map[code] * nested_absmax[i / 256]
 * + offset[e]. rows * columns must be a multiple of 64. */
typedef struct egi_ragged_nf4 {
  const uint8_t *codes; /* NULL: the weight is dense; aligned to 16 bytes */
  const float *absmax;  /* NULL: nested */
  const uint8_t *absmax_codes;
  const float *nested_absmax, *nested_map, *nested_offset; /* [blocks / 256], [256], [E] */
} egi_ragged_nf4;

/* y = weight_r * (activation of (x W_e + adapter_x adapter_e + bias_e)); all but x, offsets, the weight and y optional.
 * With an activation, forward, y has n_out / 2 columns, and `gate_up`, where given, receives the sums before it: gate
 * columns, then up columns, whatever the pairing. BACKWARD with INTERLEAVED takes x in that same column order. */
typedef struct egi_ragged_product {
  int32_t n_groups, n_in, n_out; /* sizes multiples of 8 */
  int64_t n_rows;                /* rows of x and y; offsets past it are cut off */
  const int32_t *offsets;        /* [n_groups + 1], never decreasing */
  egi_cuda_float dtype;
  egi_ragged_direction direction;
  egi_ragged_pairing pairing;
  egi_ragged_activation activation;
  float alpha, limit; /* of CLAMPED */
  egi_cuda_matrix x, y, gate_up;
  const void *weight; /* dense [E, ..]; with NF4 unused */
  egi_ragged_nf4 nf4;
  egi_cuda_matrix adapter_x;  /* [n_rows, rank] */
  const void *adapter_weight; /* [E, n_out, rank] forward, [E, rank, n_out] backward; scaled by the caller */
  int32_t rank;               /* 0: no adapter; a multiple of 8 */
  const void *bias;           /* [E, n_out] of dtype; UNPAIRED or forward */
  const float *row_weight;    /* [n_rows] */
  void *scratch;              /* NF4: at least one group's dense weight, at most all; NULL: decoded in the kernel */
  size_t scratch_bytes;
} egi_ragged_product;

/* out_e[i, j] = sum over the group's rows r of left[r, i] right[r, j], fp32: the gradients of adapters. Element (i, j)
 * of group e lies at out[e * group_stride + i * left_stride + j * right_stride]. Empty groups keep what is there. */
typedef struct egi_ragged_reduction {
  int32_t n_groups, n_left, n_right; /* columns, multiples of 8 */
  int64_t n_rows;
  const int32_t *offsets;
  egi_cuda_float dtype;
  egi_cuda_matrix left, right;
  float *out;
  int64_t group_stride, left_stride, right_stride;
  int32_t is_added; /* out += instead of out = */
} egi_ragged_reduction;

/* Scratch bytes with which a product on NF4 weights needs no more than one decoding launch; smaller works in turns. 0
 * where the chosen kernels decode by themselves and no scratch is needed. */
size_t egi_cuda_ragged_scratch(const egi_ragged_product *product, egi_ragged_kernels kernels);

/* Launch on `stream` (a cudaStream_t) of the current device; nothing is allocated, nothing waits. */
egi_cuda_status egi_cuda_ragged_product(const egi_ragged_product *product, egi_ragged_kernels kernels, void *stream);
egi_cuda_status egi_cuda_ragged_reduction(const egi_ragged_reduction *reduction, egi_ragged_kernels kernels,
                                          void *stream);

/* Decodes groups group .. group + n_groups - 1, of group_elements (a multiple of 64) each, into dst, aligned to 16
 * bytes. */
typedef struct egi_ragged_decoding {
  egi_ragged_nf4 nf4;
  int32_t group, n_groups;
  int64_t group_elements;
  egi_cuda_float dtype;
  void *dst;
} egi_ragged_decoding;
egi_cuda_status egi_cuda_ragged_decode(const egi_ragged_decoding *decoding, void *stream);

#ifdef __cplusplus
}
#endif

#endif
