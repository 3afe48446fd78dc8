/* Rows into expert order and back: memory-bound copies of 16 bytes a thread, token by token, so that each row of the
 * tokens' side moves once. The sum over a token's choices is taken in fp32 by one thread in order of the choices,
 * reading through the inverse, so that nothing is added atomically. */
#include "backend/cuda/ragged_common.cuh"
#include "backend/cuda/routing.h"

namespace egi {
namespace routing {
namespace {

enum { ROW_THREADS = 256 };

template <class Element>
__device__ __forceinline__ void add_scaled(float (&sum)[8], const uint4 &packed, float factor) {
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = ragged::format<Element>::unpack(words[i]);
    sum[2 * i] = fmaf(factor, pair.x, sum[2 * i]);
    sum[2 * i + 1] = fmaf(factor, pair.y, sum[2 * i + 1]);
  }
}

template <class Element> __device__ __forceinline__ uint4 pack_eight(const float (&sum)[8]) {
  using format = ragged::format<Element>;
  return make_uint4(format::pack(sum[0], sum[1]), format::pack(sum[2], sum[3]), format::pack(sum[4], sum[5]),
                    format::pack(sum[6], sum[7]));
}

template <class Element>
__global__ void __launch_bounds__(ROW_THREADS) gather_kernel(const __grid_constant__ egi_routing_rows r) {
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; t < r.n_tokens;
       t += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int32_t *inverse = r.inverse + t * r.k;
    for (int c = 8 * static_cast<int>(threadIdx.x); c < r.n_columns; c += 8 * static_cast<int>(blockDim.x)) {
      const uint4 packed =
          __ldg(reinterpret_cast<const uint4 *>(static_cast<const Element *>(r.src) + t * r.src_stride + c));
#pragma unroll 8
      for (int j = 0; j < r.k; j++) {
        const int row = __ldg(inverse + j);
        if (row < 0) continue;
        uint4 *dst = reinterpret_cast<uint4 *>(static_cast<Element *>(r.dst) + row * r.dst_stride + c);
        if (r.weight) {
          float sum[8] = {};
          add_scaled<Element>(sum, packed, r.weight[row]);
          *dst = pack_eight<Element>(sum);
        } else {
          *dst = packed;
        }
      }
    }
  }
}

/* AT_ONCE choices are on their way together; it divides k. */
template <class Element, int AT_ONCE>
__global__ void __launch_bounds__(ROW_THREADS) combine_kernel(const __grid_constant__ egi_routing_rows r) {
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; t < r.n_tokens;
       t += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int32_t *inverse = r.inverse + t * r.k;
    for (int c = 8 * static_cast<int>(threadIdx.x); c < r.n_columns; c += 8 * static_cast<int>(blockDim.x)) {
      const Element *src = static_cast<const Element *>(r.src) + c;
      float sum[8] = {};
      for (int first = 0; first < r.k; first += AT_ONCE) {
        int row[AT_ONCE];
        uint4 packed[AT_ONCE];
        float factor[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) row[j] = __ldg(inverse + first + j);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) { /* row 0 stands in for a choice that was left out; its value is not used */
          packed[j] = __ldg(reinterpret_cast<const uint4 *>(src + max(row[j], 0) * r.src_stride));
          factor[j] = r.weight ? __ldg(r.weight + t * r.k + first + j) : 1.0f;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
          if (row[j] >= 0) add_scaled<Element>(sum, packed[j], factor[j]);
      }
      *reinterpret_cast<uint4 *>(static_cast<Element *>(r.dst) + t * r.dst_stride + c) = pack_eight<Element>(sum);
    }
  }
}

template <class Element> void launch_combine(const egi_routing_rows &r, dim3 grid, dim3 block, cudaStream_t stream) {
  if (r.k % 8 == 0)
    combine_kernel<Element, 8><<<grid, block, 0, stream>>>(r);
  else if (r.k % 4 == 0)
    combine_kernel<Element, 4><<<grid, block, 0, stream>>>(r);
  else if (r.k % 2 == 0)
    combine_kernel<Element, 2><<<grid, block, 0, stream>>>(r);
  else
    combine_kernel<Element, 1><<<grid, block, 0, stream>>>(r);
}

bool is_good(const egi_routing_rows &r) {
  const auto is_aligned = [](const void *p) { return p && reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return r.n_tokens > 0 && r.k > 0 && r.n_columns > 0 && r.n_columns % 8 == 0 && r.inverse && is_aligned(r.src) &&
         is_aligned(r.dst) && r.src_stride % 8 == 0 && r.dst_stride % 8 == 0 && r.src_stride >= r.n_columns &&
         r.dst_stride >= r.n_columns;
}

/* Threads along a row, then as many rows as fill the block; a grid that covers all rows once. */
struct row_launch {
  dim3 grid, block;
};
row_launch plan_rows(const egi_routing_rows &r) {
  int along = 32;
  while (along < ROW_THREADS && along * 8 < r.n_columns) along *= 2;
  const int rows = ROW_THREADS / along;
  const int64_t blocks = (r.n_tokens + rows - 1) / rows;
  return {dim3(static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX)),
          dim3(static_cast<unsigned>(along), static_cast<unsigned>(rows))};
}

egi_cuda_status finish() {
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

} // namespace
} // namespace routing
} // namespace egi

extern "C" egi_cuda_status egi_cuda_routing_gather(const egi_routing_rows *rows, void *stream) {
  using namespace egi::routing;
  if (!rows || !is_good(*rows)) return EGI_CUDA_INVALID;
  const row_launch launch = plan_rows(*rows);
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (rows->dtype == EGI_CUDA_BF16)
    gather_kernel<__nv_bfloat16><<<launch.grid, launch.block, 0, cuda_stream>>>(*rows);
  else
    gather_kernel<__half><<<launch.grid, launch.block, 0, cuda_stream>>>(*rows);
  return finish();
}

extern "C" egi_cuda_status egi_cuda_routing_combine(const egi_routing_rows *rows, void *stream) {
  using namespace egi::routing;
  if (!rows || !is_good(*rows)) return EGI_CUDA_INVALID;
  const row_launch launch = plan_rows(*rows);
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (rows->dtype == EGI_CUDA_BF16)
    launch_combine<__nv_bfloat16>(*rows, launch.grid, launch.block, cuda_stream);
  else
    launch_combine<__half>(*rows, launch.grid, launch.block, cuda_stream);
  return finish();
}
