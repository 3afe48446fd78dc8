/* The ragged product for sm_80 and later, dense weights: 128 rows by 128 columns of one group a tile. */
#include "backend/cuda/ragged_mma.cuh"

namespace egi {
namespace ragged {
namespace {

struct mma_call {
  product_arguments a;
  const void *x, *weight, *adapter_x, *adapter_weight;
  int64_t x_stride, adapter_stride;
  int main_runs, steps, column_tiles;
};

/* Row of W (or of the adapter) for row r of the right tile, forward; -1 outside. Gated tiles hold, in turn, 16 gate and
 * 16 up rows, so that a warp has both of its columns. */
template <bool IS_GATED> __device__ __forceinline__ int weight_row(const product_arguments &a, int column, int r) {
  if (!IS_GATED) return column + r < a.n_out ? column + r : -1;
  const int size = a.n_out / 2, index = column + r / 32 * 16 + r % 16, half = r % 32 / 16;
  if (index >= size) return -1;
  return a.is_interleaved ? 2 * index + half : half * size + index;
}

/* The copies of a tile, step by step: W (or its two halves, one after the other), then the adapter. */
template <class Element, bool IS_BACKWARD, bool IS_GATED> struct product_copy {
  using Tile = mma_tile<Element, 128, false, IS_BACKWARD>;
  const mma_call &call;
  const tile &t;
  int column, run, remaining; /* column: the tile's first; remaining: contracted elements of the run from here on */
  tile_copy<Element, typename Tile::Left> left;
  tile_copy<Element, typename Tile::Right> right;

  __device__ __forceinline__ product_copy(const mma_call &call_, const tile &t_, int column_)
      : call(call_), t(t_), column(column_), run(0), remaining(0) {
    begin();
  }
  __device__ __forceinline__ void begin() {
    const bool is_adapter = run >= call.main_runs;
    const int whole = is_adapter ? call.a.rank : call.a.n_in, sides = is_adapter ? 1 : call.main_runs;
    const int half = is_adapter ? 0 : run, row_length = IS_BACKWARD ? call.a.n_out : whole;
    remaining = whole / sides;
    left.step = MMA_DEPTH;
    right.step = IS_BACKWARD ? static_cast<int64_t>(MMA_DEPTH) * sides * row_length : MMA_DEPTH;
    const Element *x = static_cast<const Element *>(is_adapter ? call.adapter_x : call.x);
    const Element *weight = static_cast<const Element *>(is_adapter ? call.adapter_weight : call.weight) +
                            static_cast<int64_t>(t.group) * call.a.n_out * whole;
    const int64_t stride = is_adapter ? call.adapter_stride : call.x_stride;
#pragma unroll
    for (int i = 0; i < left.COUNT; i++)
      left.place(i, x, (t.first_row + left.row(i)) * stride + half * remaining, left.row(i) < t.n_rows);
#pragma unroll
    for (int i = 0; i < right.COUNT; i++) {
      const int row = IS_BACKWARD ? sides * right.row(i) + half : weight_row<IS_GATED>(call.a, column, right.row(i));
      const bool is_there = IS_BACKWARD ? column + right.column() < call.a.n_out : row >= 0;
      right.place(i, weight, static_cast<int64_t>(row) * row_length + (IS_BACKWARD ? column : 0), is_there);
    }
  }
  __device__ __forceinline__ void operator()(Element *left_tile, Element *right_tile) {
    if (remaining <= 0) {
      run++;
      begin();
    }
    left.copy(left_tile, remaining);
    right.copy(right_tile, remaining);
    remaining -= MMA_DEPTH;
  }
};

template <class Element, bool IS_BACKWARD, bool IS_GATED> struct product_block {
  using Tile = mma_tile<Element, 128, false, IS_BACKWARD>;
  static constexpr int columns = IS_GATED ? 64 : 128;

  static __device__ __forceinline__ void put(void *data, int64_t stride, int row, int column, float2 value) {
    *reinterpret_cast<unsigned *>(static_cast<Element *>(data) + row * stride + column) =
        format<Element>::pack(value.x, value.y);
  }

  /* Two neighbouring sums of one row: bias, activation, weight, and out. */
  static __device__ __forceinline__ void finish(const product_arguments &a, int group, int row, int column,
                                                float2 first, float2 second) {
    if (a.bias) {
      const float2 bias = bias_pair<Element, IS_GATED>(a, group, 0, column);
      first = make_float2(first.x + bias.x, first.y + bias.y);
    }
    if (IS_GATED) {
      if (a.bias) {
        const float2 bias = bias_pair<Element, IS_GATED>(a, group, 1, column);
        second = make_float2(second.x + bias.x, second.y + bias.y);
      }
      if (a.gate_up) {
        put(a.gate_up, a.gate_up_stride, row, column, first);
        put(a.gate_up, a.gate_up_stride, row, column + a.n_out / 2, second);
      }
      first =
          a.rule.is_erf
              ? make_float2(apply_gate<true>(a.rule, first.x, second.x), apply_gate<true>(a.rule, first.y, second.y))
              : make_float2(apply_gate<false>(a.rule, first.x, second.x), apply_gate<false>(a.rule, first.y, second.y));
    }
    if (a.row_weight) first = make_float2(first.x * a.row_weight[row], first.y * a.row_weight[row]);
    put(a.y, a.y_stride, row, column, first);
  }

  static __device__ __forceinline__ void store(const typename Tile::Sums &sums, const product_arguments &a,
                                               const tile &t, int warp) {
    const int lane = threadIdx.x & 31, size = IS_GATED ? a.n_out / 2 : a.n_out;
    const int column = t.column * columns + Tile::first_column(warp) / (IS_GATED ? 2 : 1) + 2 * (lane & 3);
#pragma unroll
    for (int b = 0; b < Tile::BLOCKS; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = Tile::first_row(warp) + 16 * b + 8 * half + (lane >> 2);
        if (row >= t.n_rows) continue;
#pragma unroll
        for (int n = 0; n < (IS_GATED ? 2 : 4); n++) {
          if (column + 8 * n >= size) continue;
          const float *second = sums[b][IS_GATED ? n + 2 : n];
          finish(a, t.group, t.first_row + row, column + 8 * n,
                 make_float2(sums[b][n][2 * half], sums[b][n][2 * half + 1]),
                 make_float2(second[2 * half], second[2 * half + 1]));
        }
      }
  }
};

template <class Element, bool IS_BACKWARD, bool IS_GATED>
__global__ void __launch_bounds__(MMA_THREADS, 2) product_mma_kernel(const __grid_constant__ mma_call call) {
  using Block = product_block<Element, IS_BACKWARD, IS_GATED>;
  extern __shared__ __align__(16) char raw[];
  Element *ring = reinterpret_cast<Element *>(raw);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 5, 0);
  schedule<MMA_ROWS, true> tiles(call.a.offsets, call.a.n_groups, call.a.n_rows, call.column_tiles);
  tile t;
  for (int number = static_cast<int>(blockIdx.x); tiles.find(number, t); number += static_cast<int>(gridDim.x)) {
    typename Block::Tile::Sums sums;
    product_copy<Element, IS_BACKWARD, IS_GATED> copy(call, t, t.column * Block::columns);
    Block::Tile::run(sums, ring, call.steps, copy, warp);
    Block::store(sums, call.a, t, warp);
  }
}

template <class Element, bool IS_BACKWARD, bool IS_GATED>
egi_cuda_status run(const mma_call &call, cudaStream_t stream) {
  constexpr int shared_bytes = product_block<Element, IS_BACKWARD, IS_GATED>::Tile::shared_bytes;
  const auto kernel = product_mma_kernel<Element, IS_BACKWARD, IS_GATED>;
  const int n_blocks = resident_blocks(kernel, shared_bytes);
  if (n_blocks < 1) return EGI_CUDA_FAILED;
  kernel<<<static_cast<unsigned>(n_blocks), MMA_THREADS, shared_bytes, stream>>>(call);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

template <class Element>
egi_cuda_status choose(const egi_ragged_product &p, const mma_call &call, cudaStream_t stream) {
  if (p.direction == EGI_RAGGED_BACKWARD) return run<Element, true, false>(call, stream);
  return p.activation == EGI_RAGGED_PLAIN ? run<Element, false, false>(call, stream)
                                          : run<Element, false, true>(call, stream);
}

} // namespace

egi_cuda_status product_mma(const egi_ragged_product &p, cudaStream_t stream) {
  mma_call call = {};
  call.a = make_arguments(p);
  call.x = p.x.data;
  call.weight = p.weight;
  call.adapter_x = p.adapter_x.data;
  call.adapter_weight = p.adapter_weight;
  call.x_stride = p.x.row_stride;
  call.adapter_stride = p.adapter_x.row_stride;
  call.main_runs = call.a.has_halves ? 2 : 1;
  call.steps =
      call.main_runs * ((p.n_in / call.main_runs + MMA_DEPTH - 1) / MMA_DEPTH) + (p.rank + MMA_DEPTH - 1) / MMA_DEPTH;
  call.column_tiles = (p.n_out + 127) / 128;
  return p.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(p, call, stream) : choose<__half>(p, call, stream);
}

} // namespace ragged
} // namespace egi
