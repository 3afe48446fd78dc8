/* Packed attention on CUDA: forward and backward over documents laid end to end in one run of rows. Query i stands at
 * key position i + offset and sees keys first_key[i] .. i + offset; documents and sliding windows are both said that
 * way, so no mask exists anywhere and the launch does not depend on the documents (a CUDA graph may capture it).
 * bf16 or fp16 in and out, fp32 accumulation, fixed summation order: two runs give equal bits. */
#ifndef ENGRAFT_BACKEND_CUDA_ATTENTION_H
#define ENGRAFT_BACKEND_CUDA_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum egi_cuda_float { EGI_CUDA_BF16 = 0, EGI_CUDA_F16 = 1 } egi_cuda_float;

typedef enum egi_cuda_status {
  EGI_CUDA_OK = 0,
  EGI_CUDA_INVALID = 1,     /* an argument contradicts the contract below */
  EGI_CUDA_UNSUPPORTED = 2, /* no kernel for this head size, type or device */
  EGI_CUDA_FAILED = 3       /* the CUDA runtime refused; cudaGetLastError says why */
} egi_cuda_status;

/* AUTO takes the Hopper kernels where the device and the head size allow them, else those for sm_80 and later. */
typedef enum egi_attention_kernels {
  EGI_ATTENTION_AUTO = 0,
  EGI_ATTENTION_MMA = 1,
  EGI_ATTENTION_SM90 = 2
} egi_attention_kernels;

/* [rows, heads, size], size contiguous. Strides in elements, multiples of 8; data aligned to 16 bytes. */
typedef struct egi_cuda_rows {
  void *data;
  int64_t row_stride, head_stride;
} egi_cuda_rows;

/* Forward reads q, k, v, first_key, sinks and writes out, lse. Backward reads these and d_out, last_query and writes
 * d_q, d_k, d_v, d_sinks: every element of every row. A query that sees no key has out = 0 and lse = -inf (with a sink:
 * lse = sink). All pointers are device memory. */
typedef struct egi_cuda_attention {
  int64_t n_queries, n_keys;   /* n_queries + offset <= n_keys */
  int32_t n_heads, n_kv_heads; /* query head h reads key head h / (n_heads / n_kv_heads) */
  int32_t head_dim, value_dim; /* 64, 80, 96, 128, 256 alike, or 192 with 128 */
  egi_cuda_float dtype;
  float scale;                        /* > 0 */
  float softcap;                      /* s = softcap * tanh(scale * q.k / softcap); 0: none */
  int32_t query_offset;               /* added to that at query_offset_device, which may be NULL */
  const int32_t *query_offset_device; /* one number: decoding inside a captured graph */
  const int32_t *first_key;           /* [n_queries], never decreasing; n_keys where a query sees nothing */
  const int32_t *last_query;          /* [n_keys], backward: the last query that sees the key, -1 for none */
  const float *sinks;                 /* [n_heads] logits that take part in the softmax only, or NULL */
  egi_cuda_rows q, k, v, out;
  float *lse; /* [n_heads, n_queries], natural logarithm, sink included */
  egi_cuda_rows d_out, d_q, d_k, d_v;
  float *d_sinks;  /* [n_heads] or NULL */
  void *workspace; /* scratch of one call, aligned to 256 bytes */
  size_t workspace_bytes;
  void *plan; /* from egi_cuda_attention_plan, or NULL: each call makes its own in the workspace */
} egi_cuda_attention;

/* Bytes of workspace that forward (or backward) needs; depends on sizes, the kernels and the current device only. The
 * mma kernels' backward holds d_q in fp32 there. */
size_t egi_cuda_attention_workspace(const egi_cuda_attention *attention, egi_attention_kernels kernels,
                                    int is_backward);

/* The plan of a micro-batch: bounds and order of all tiles, from first_key, last_query (NULL: forward only) and the
 * offset. It serves every call with the same numbers of rows and heads, head_dim and arrays, so all layers of a step,
 * one call after the other: the kernels count their work in it. */
size_t egi_cuda_attention_plan_bytes(const egi_cuda_attention *attention);
egi_cuda_status egi_cuda_attention_plan(const egi_cuda_attention *attention, void *plan, void *stream);

/* Launch on `stream` (a cudaStream_t) of the current device; nothing is allocated, nothing waits. */
egi_cuda_status egi_cuda_attention_forward(const egi_cuda_attention *attention, egi_attention_kernels kernels,
                                           void *stream);
egi_cuda_status egi_cuda_attention_backward(const egi_cuda_attention *attention, egi_attention_kernels kernels,
                                            void *stream);

#ifdef __cplusplus
}
#endif

#endif
