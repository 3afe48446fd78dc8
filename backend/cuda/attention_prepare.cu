/* Before the backward kernels: one pair (base-2 log-sum-exp, sum of d_out * out) a row and head, and the gradient of
 * the sinks, d_sink = - sum over rows of exp(sink - lse) * delta. Sums run in a fixed order: 8 or 16 lanes a row, then
 * the 64 rows of a block, then the blocks of a head. Bound by reading out and d_out once. */
#include "backend/cuda/attention_common.cuh"

namespace egi {
namespace {

enum { THREADS = 256, SUM_THREADS = 128 };

template <class Element, int LANES>
__device__ __forceinline__ float dot_of_row(const egi_cuda_rows &x, const egi_cuda_rows &y, int head, int64_t row,
                                            int chunks, int lane) {
  const Element *left = static_cast<const Element *>(x.data) + head * x.head_stride + row * x.row_stride;
  const Element *right = static_cast<const Element *>(y.data) + head * y.head_stride + row * y.row_stride;
  float sum = 0.0f;
  for (int c = lane; c < chunks; c += LANES) {
    const uint4 a = *reinterpret_cast<const uint4 *>(left + 8 * c), b = *reinterpret_cast<const uint4 *>(right + 8 * c);
    const unsigned a_words[4] = {a.x, a.y, a.z, a.w}, b_words[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 p = number_format<Element>::unpack(a_words[i]), q = number_format<Element>::unpack(b_words[i]);
      sum = fmaf(p.x, q.x, sum);
      sum = fmaf(p.y, q.y, sum);
    }
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

template <class Element, int LANES>
__global__ void __launch_bounds__(THREADS) attention_prepare(const egi_cuda_attention a, const attention_workspace w) {
  constexpr int rows_at_once = THREADS / LANES;
  __shared__ float parts[rows_at_once];
  allow_kernel_after();
  const int head = static_cast<int>(blockIdx.y), lane = threadIdx.x & (LANES - 1), slot = threadIdx.x / LANES;
  const float sink = a.sinks ? a.sinks[head] * log2_e : -CUDART_INF_F;
  float d_sink = 0.0f;
#pragma unroll
  for (int i = 0; i < PREPARE_ROWS / rows_at_once; i++) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * PREPARE_ROWS + i * rows_at_once + slot;
    const bool is_inside = row < a.n_queries;
    const float delta = dot_of_row<Element, LANES>(a.out, a.d_out, head, is_inside ? row : 0, a.value_dim / 8, lane);
    float lse = is_inside ? a.lse[head * a.n_queries + row] * log2_e : CUDART_INF_F;
    if (lse == -CUDART_INF_F) lse = CUDART_INF_F; /* a row without keys: every probability is 0 */
    if (is_inside) d_sink -= exp2_fast(sink - lse) * delta;
    if (lane == 0) w.row_pairs[head * w.padded_rows + row] = make_float2(lse, is_inside ? delta : 0.0f);
  }
  if (!a.d_sinks) return;
  if (lane == 0) parts[slot] = d_sink;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (int i = 0; i < rows_at_once; i++) sum += parts[i];
    w.sink_parts[static_cast<int64_t>(head) * w.n_prepare_blocks + blockIdx.x] = sum;
  }
}

__global__ void __launch_bounds__(SUM_THREADS) attention_sum_sinks(float *d_sinks, const attention_workspace w) {
  __shared__ float parts[SUM_THREADS];
  const float *mine = w.sink_parts + static_cast<int64_t>(blockIdx.x) * w.n_prepare_blocks;
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < w.n_prepare_blocks; i += SUM_THREADS) sum += mine[i];
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int step = SUM_THREADS / 2; step > 0; step /= 2) {
    if (static_cast<int>(threadIdx.x) < step) parts[threadIdx.x] += parts[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) d_sinks[blockIdx.x] = parts[0];
}

} // namespace

template <class Element>
static void prepare_rows(const egi_cuda_attention &a, const attention_workspace &w, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(w.n_prepare_blocks), static_cast<unsigned>(a.n_heads));
  if (a.value_dim <= 64)
    attention_prepare<Element, 8><<<grid, THREADS, 0, stream>>>(a, w);
  else
    attention_prepare<Element, 16><<<grid, THREADS, 0, stream>>>(a, w);
}

egi_cuda_status prepare_backward(const egi_cuda_attention &a, cudaStream_t stream) {
  const attention_workspace w = carve_workspace(a, WORKSPACE_BACKWARD_SM90);
  if (a.dtype == EGI_CUDA_BF16)
    prepare_rows<__nv_bfloat16>(a, w, stream);
  else
    prepare_rows<__half>(a, w, stream);
  if (a.d_sinks) attention_sum_sinks<<<static_cast<unsigned>(a.n_heads), SUM_THREADS, 0, stream>>>(a.d_sinks, w);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

} // namespace egi
