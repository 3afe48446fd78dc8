/* The ragged reduction for sm_80 and later: tiles of 128 left by 64 right columns of one group, contracted over the
 * group's rows; rows of other groups enter as zeros. */
#include "backend/cuda/ragged_mma.cuh"

namespace egi {
namespace ragged {
namespace {

enum { REDUCTION_COLUMNS = 64 };

template <class Element> using reduction_tile = mma_tile<Element, REDUCTION_COLUMNS, true, true>;

/* The copies of a tile, step by step along the group's rows. */
template <class Element> struct reduction_copy {
  tile_copy<Element, typename reduction_tile<Element>::Left> left;
  tile_copy<Element, typename reduction_tile<Element>::Right> right;
  int remaining; /* rows of the group from here on */

  __device__ __forceinline__ reduction_copy(const egi_ragged_reduction &r, const tile &t, int left_column,
                                            int right_column)
      : remaining(t.n_rows) {
    begin(left, r.left, t.first_row, left_column, r.n_left);
    begin(right, r.right, t.first_row, right_column, r.n_right);
  }
  template <class Side>
  static __device__ __forceinline__ void begin(Side &side, const egi_cuda_matrix &matrix, int first_row, int column,
                                               int n_columns) {
    side.step = MMA_DEPTH * matrix.row_stride;
    const bool is_there = column + side.column() < n_columns;
#pragma unroll
    for (int i = 0; i < Side::COUNT; i++)
      side.place(i, static_cast<const Element *>(matrix.data), (first_row + side.row(i)) * matrix.row_stride + column,
                 is_there);
  }
  __device__ __forceinline__ void operator()(Element *left_tile, Element *right_tile) {
    left.copy(left_tile, remaining);
    right.copy(right_tile, remaining);
    remaining -= MMA_DEPTH;
  }
};

template <class Element>
__device__ __forceinline__ void store_sums(const typename reduction_tile<Element>::Sums &sums,
                                           const egi_ragged_reduction &r, int group, int left, int right) {
  const int lane = threadIdx.x & 31;
  float *out = r.out + group * r.group_stride;
#pragma unroll
  for (int b = 0; b < reduction_tile<Element>::BLOCKS; b++)
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int row = left + 16 * b + 8 * ((i >> 1) & 1) + (lane >> 2);
      const int column = right + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
      if (row >= r.n_left || column >= r.n_right) continue;
      float *to = out + row * r.left_stride + column * r.right_stride;
      *to = r.is_added ? *to + sums[b][i >> 2][i & 3] : sums[b][i >> 2][i & 3];
    }
}

template <class Element>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    reduction_mma_kernel(const __grid_constant__ egi_ragged_reduction r, int right_tiles, int tiles_in_group) {
  using Tile = reduction_tile<Element>;
  extern __shared__ __align__(16) char raw[];
  Element *ring = reinterpret_cast<Element *>(raw);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 5, 0);
  schedule<MMA_DEPTH, false> tiles(r.offsets, r.n_groups, static_cast<int>(r.n_rows), tiles_in_group);
  tile t;
  for (int number = static_cast<int>(blockIdx.x); tiles.find(number, t); number += static_cast<int>(gridDim.x)) {
    typename Tile::Sums sums;
    const int left = t.column / right_tiles * MMA_ROWS, right = t.column % right_tiles * REDUCTION_COLUMNS;
    const int steps = (t.n_rows + MMA_DEPTH - 1) / MMA_DEPTH;
    reduction_copy<Element> copy(r, t, left, right);
    Tile::run(sums, ring, steps, copy, warp);
    store_sums<Element>(sums, r, t.group, left + Tile::first_row(warp), right + Tile::first_column(warp));
  }
}

template <class Element> egi_cuda_status run(const egi_ragged_reduction &r, cudaStream_t stream) {
  constexpr int shared_bytes = reduction_tile<Element>::shared_bytes;
  const int n_blocks = resident_blocks(reduction_mma_kernel<Element>, shared_bytes);
  if (n_blocks < 1) return EGI_CUDA_FAILED;
  const int right_tiles = (r.n_right + REDUCTION_COLUMNS - 1) / REDUCTION_COLUMNS;
  const int tiles_in_group = right_tiles * ((r.n_left + MMA_ROWS - 1) / MMA_ROWS);
  reduction_mma_kernel<Element>
      <<<static_cast<unsigned>(n_blocks), MMA_THREADS, shared_bytes, stream>>>(r, right_tiles, tiles_in_group);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

} // namespace

egi_cuda_status reduction_mma(const egi_ragged_reduction &r, cudaStream_t stream) {
  return r.dtype == EGI_CUDA_BF16 ? run<__nv_bfloat16>(r, stream) : run<__half>(r, stream);
}

} // namespace ragged
} // namespace egi
