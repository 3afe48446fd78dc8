/* The tile product of the ragged kernels for sm_80 and later: 128 rows by 64 or 128 columns, mma.sync m16n8k16,
 * operands brought to shared memory by cp.async through a ring of four 32-deep steps. An operand tile has the
 * contracted index along its columns or along its rows; rows are an odd number of 16-byte units, so that ldmatrix meets
 * no bank twice. fp32 accumulators, contracted index in order. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_MMA_CUH
#define ENGRAFT_BACKEND_CUDA_RAGGED_MMA_CUH

#include "backend/cuda/ragged_common.cuh"

namespace egi {
namespace ragged {

enum { MMA_ROWS = 128, MMA_DEPTH = 32, MMA_STAGES = 4, MMA_THREADS = 256 };

/* An operand tile of EXTENT rows or columns of the result. */
template <int EXTENT, bool IS_BY_ROWS_> struct operand_tile {
  static constexpr bool IS_BY_ROWS = IS_BY_ROWS_;
  static constexpr int rows = IS_BY_ROWS ? MMA_DEPTH : EXTENT, columns = IS_BY_ROWS ? EXTENT : MMA_DEPTH;
  static constexpr int stride = columns + 8, elements = rows * stride;
};

/* A thread's share of the copies of an operand tile: 16-byte chunks of fixed rows and one column of the tile, which
 * move on by `step` elements with each step of the contraction. */
template <class Element, class Tile> struct tile_copy {
  static constexpr int CHUNKS = Tile::columns / 8, COUNT = Tile::rows * CHUNKS / MMA_THREADS;
  static_assert(MMA_THREADS % CHUNKS == 0 && COUNT * MMA_THREADS == Tile::rows * CHUNKS, "whole shares");
  const Element *at[COUNT];
  bool is_there[COUNT];
  int64_t step;

  static __device__ __forceinline__ int row(int i) {
    return (static_cast<int>(threadIdx.x) + i * MMA_THREADS) / CHUNKS;
  }
  static __device__ __forceinline__ int column() { return static_cast<int>(threadIdx.x) % CHUNKS * 8; }
  /* Begins chunk i of the thread: the tile's row there starts `offset` elements after `data`, or is zeros. */
  __device__ __forceinline__ void place(int i, const Element *data, int64_t offset, bool is_inside) {
    is_there[i] = is_inside;
    at[i] = is_inside ? data + offset + column() : data;
  }
  /* Starts the copies of one step, `remaining` of whose contracted elements exist; the others become zeros: copies of
   * size 0, which do not read. */
  __device__ __forceinline__ void copy(Element *dst, int remaining) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const bool is_inside = is_there[i] && (Tile::IS_BY_ROWS ? row(i) : column()) < remaining;
      asm volatile(
          "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst + row(i) * Tile::stride + column())),
          "l"(at[i]), "r"(is_inside ? 16 : 0)
          : "memory");
      at[i] += step;
    }
  }
};
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

template <bool IS_TRANSPOSED> __device__ __forceinline__ void load_matrices(unsigned (&m)[4], unsigned address) {
  if (IS_TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

template <class Element> struct mma;
template <> struct mma<__nv_bfloat16> {
  static __device__ __forceinline__ void run(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
template <> struct mma<__half> {
  static __device__ __forceinline__ void run(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

/* How a block's eight warps share a tile; a warp has 32 columns and BLOCKS 16-row blocks. */
template <class Element_, int COLUMNS, bool LEFT_BY_ROWS, bool RIGHT_BY_ROWS> struct mma_tile {
  using Element = Element_;
  using Left = operand_tile<MMA_ROWS, LEFT_BY_ROWS>;
  using Right = operand_tile<COLUMNS, RIGHT_BY_ROWS>;
  static constexpr int warp_columns = COLUMNS / 32, warp_rows = 8 / warp_columns;
  static constexpr int BLOCKS = MMA_ROWS / warp_rows / 16;
  static constexpr int stage_elements = Left::elements + Right::elements;
  static constexpr int shared_bytes = MMA_STAGES * stage_elements * 2;
  using Sums = float[BLOCKS][4][4]; /* row block, 8-column block, mma accumulator */

  static __device__ __forceinline__ int first_row(int warp) { return warp / warp_columns * BLOCKS * 16; }
  static __device__ __forceinline__ int first_column(int warp) { return warp % warp_columns * 32; }

  static __device__ __forceinline__ unsigned left_address(const Element *tile, int row, int k) {
    const int lane = threadIdx.x & 31;
    const int r = LEFT_BY_ROWS ? k + (lane & 7) + 8 * (lane >> 4) : row + (lane & 15);
    const int c = LEFT_BY_ROWS ? row + 8 * ((lane >> 3) & 1) : k + 8 * (lane >> 4);
    return shared_address(tile + r * Left::stride + c);
  }
  static __device__ __forceinline__ unsigned right_address(const Element *tile, int column, int k) {
    const int lane = threadIdx.x & 31;
    const int r = RIGHT_BY_ROWS ? k + (lane & 7) + 8 * ((lane >> 3) & 1) : column + (lane & 7) + 8 * (lane >> 4);
    const int c = RIGHT_BY_ROWS ? column + 8 * (lane >> 4) : k + 8 * ((lane >> 3) & 1);
    return shared_address(tile + r * Right::stride + c);
  }

  static __device__ __forceinline__ void multiply(Sums &sums, const Element *stage, int warp) {
    const Element *right_tile = stage + Left::elements;
#pragma unroll
    for (int k = 0; k < MMA_DEPTH; k += 16) {
      unsigned left[BLOCKS][4], right[2][4];
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
        load_matrices<LEFT_BY_ROWS>(left[b], left_address(stage, first_row(warp) + 16 * b, k));
#pragma unroll
      for (int n = 0; n < 2; n++)
        load_matrices<RIGHT_BY_ROWS>(right[n], right_address(right_tile, first_column(warp) + 16 * n, k));
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int n = 0; n < 4; n++)
          mma<Element>::run(sums[b][n], left[b], right[n / 2][2 * (n & 1)], right[n / 2][2 * (n & 1) + 1]);
    }
  }

  /* All steps of a tile; each call of `copy(left, right)` starts the copies of one more step. Leaves the ring free. */
  template <class Copy>
  static __device__ __forceinline__ void run(Sums &sums, Element *ring, int steps, Copy &copy, int warp) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int n = 0; n < 16; n++) sums[b][n / 4][n % 4] = 0.0f;
#pragma unroll 1
    for (int s = 0; s < MMA_STAGES - 1; s++) {
      if (s < steps) copy(ring + s * stage_elements, ring + s * stage_elements + Left::elements);
      copy_commit();
    }
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
      copy_wait<MMA_STAGES - 2>();
      __syncthreads();
      const int ahead = s + MMA_STAGES - 1;
      Element *stage = ring + ahead % MMA_STAGES * stage_elements;
      if (ahead < steps) copy(stage, stage + Left::elements);
      copy_commit();
      multiply(sums, ring + s % MMA_STAGES * stage_elements, warp);
    }
    copy_wait<0>();
    __syncthreads();
  }
};

/* Blocks of a persistent launch: as many as fit; 0 on failure. */
template <class Kernel> int resident_blocks(Kernel kernel, int shared_bytes) {
  int in_processor = 0;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) != cudaSuccess ||
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&in_processor, kernel, MMA_THREADS,
                                                    static_cast<size_t>(shared_bytes)) != cudaSuccess)
    return 0;
  return in_processor * count_processors();
}

} // namespace ragged
} // namespace egi

#endif
