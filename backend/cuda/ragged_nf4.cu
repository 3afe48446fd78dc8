/* NF4 weights of whole groups to dense 16-bit elements at copy speed: eight codes a thread and turn, neighbours side by
 * side. The sixteen values lie in sixteen banks of shared memory, so that no two lanes collide. */
#include <limits.h>

#include "backend/cuda/ragged_nf4.cuh"

namespace egi {
namespace ragged {
namespace {

enum { DECODE_THREADS = 256, DECODE_UNROLL = 4, LARGEST_GRID_Y = 65535 };

__constant__ const float code_values[16] = {EGI_NF4_VALUES};

/* Blocks along x share a group's words of eight codes, along y the groups. */
template <class Element>
__global__ void __launch_bounds__(DECODE_THREADS)
    decode_kernel(const __grid_constant__ nf4_range range, int64_t words_in_group, uint4 *dst) {
  __shared__ float values[16];
  if (threadIdx.x < 16) values[threadIdx.x] = code_values[threadIdx.x];
  __syncthreads();
  const egi_ragged_nf4 &nf4 = range.nf4;
  const int64_t turn = static_cast<int64_t>(gridDim.x) * DECODE_THREADS;
  for (int g = static_cast<int>(blockIdx.y); g < range.n_groups; g += static_cast<int>(gridDim.y)) {
    const int64_t first_word = (range.group + g) * words_in_group;
    const unsigned *words = reinterpret_cast<const unsigned *>(nf4.codes) + first_word;
    const float offset = group_offset(nf4, range.group + g);
    uint4 *to = dst + g * words_in_group;
    for (int64_t start = static_cast<int64_t>(blockIdx.x) * DECODE_THREADS + threadIdx.x; start < words_in_group;
         start += turn * DECODE_UNROLL) {
      unsigned codes[DECODE_UNROLL];
      stored_scale stored[DECODE_UNROLL];
#pragma unroll
      for (int u = 0; u < DECODE_UNROLL; u++) {
        const int64_t i = start + u * turn;
        if (i >= words_in_group) continue;
        codes[u] = __ldcs(words + i);
        stored[u] = load_scale(nf4, (first_word + i) / 8);
      }
#pragma unroll
      for (int u = 0; u < DECODE_UNROLL; u++) {
        const int64_t i = start + u * turn;
        if (i >= words_in_group) continue;
        const float scale = finish_scale(nf4, stored[u], offset);
        unsigned out[4];
#pragma unroll
        for (int b = 0; b < 4; b++) {
          const unsigned byte = codes[u] >> (8 * b);
          out[b] = format<Element>::pack(values[byte >> 4 & 15] * scale, values[byte & 15] * scale);
        }
        to[i] = make_uint4(out[0], out[1], out[2], out[3]);
      }
    }
  }
}

} // namespace

egi_cuda_status decode_nf4(const nf4_range &range, egi_cuda_float dtype, void *dst, cudaStream_t stream) {
  const int64_t words_in_group = range.group_elements / 8, in_block = DECODE_THREADS * DECODE_UNROLL;
  const int64_t wanted = (words_in_group + in_block - 1) / in_block;
  const dim3 grid(static_cast<unsigned>(wanted < INT_MAX ? wanted : INT_MAX),
                  static_cast<unsigned>(range.n_groups < LARGEST_GRID_Y ? range.n_groups : LARGEST_GRID_Y));
  uint4 *to = static_cast<uint4 *>(dst);
  if (dtype == EGI_CUDA_BF16)
    decode_kernel<__nv_bfloat16><<<grid, DECODE_THREADS, 0, stream>>>(range, words_in_group, to);
  else
    decode_kernel<__half><<<grid, DECODE_THREADS, 0, stream>>>(range, words_in_group, to);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

} // namespace ragged
} // namespace egi
