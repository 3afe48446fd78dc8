/* What the roles of the Hopper product share: tile sizes, the arguments of a call, the layout of shared memory with its
 * rings of operand tiles and of packed codes, and the walk over the block's tiles. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_TILE_SM90_CUH
#define ENGRAFT_BACKEND_CUDA_RAGGED_TILE_SM90_CUH

#include "backend/cuda/ragged_hopper.cuh"

namespace egi {
namespace ragged {

enum { TILE_ROWS = 256, TILE_DEPTH = 64, STAGES = 4, PANEL_BYTES = 64 * 128, STAGING_BYTES = 16 * 128 };
enum { BOX_ROWS = 64, SCALES_BYTES = 128 * 4, SCALES_AHEAD = 2 };

template <class Element_, int COLUMNS_, bool IS_BACKWARD_, bool IS_GATED_, bool IS_NF4_> struct config {
  using Element = Element_;
  static constexpr int COLUMNS = COLUMNS_, REGISTERS = COLUMNS / 2;
  static constexpr bool IS_BACKWARD = IS_BACKWARD_, IS_GATED = IS_GATED_, IS_NF4 = IS_NF4_;
  static constexpr int result_columns = IS_GATED ? COLUMNS / 2 : COLUMNS;
  static constexpr int first_consumer = IS_NF4 ? 8 : 4; /* warps */
  static constexpr int threads = 32 * (first_consumer + 8);
  static constexpr int left_bytes = TILE_ROWS * 128, right_bytes = COLUMNS * 128;
  static constexpr int stage_bytes = left_bytes + right_bytes, packed_bytes = IS_NF4 ? COLUMNS * 32 : 0;
  static constexpr int scales_bytes = IS_NF4 ? SCALES_BYTES : 0;
  static constexpr int packed_at = STAGES * stage_bytes, scales_at = packed_at + STAGES * packed_bytes;
  static constexpr int staging_at = scales_at + STAGES * scales_bytes;
  static constexpr int barriers_at = staging_at + 8 * STAGING_BYTES;
  static constexpr int shared_bytes = barriers_at + 4 * STAGES * 8;
  static_assert(shared_bytes <= 227 * 1024, "what a block may have");
};

struct product_call {
  CUtensorMap x, weight, adapter_x, adapter_weight; /* weight: packed bytes for NF4 */
  product_arguments a;
  egi_ragged_nf4 nf4;
  int main_runs, steps_in_half, adapter_steps; /* contraction_run */
  int n_runs, steps, column_tiles;
};

/* Shared memory of the block, addresses for the instructions above. */
template <class C> struct block_memory {
  char *base;
  unsigned start;
  __device__ __forceinline__ explicit block_memory(char *raw) : base(raw), start(shared_address(raw)) {}
  __device__ __forceinline__ unsigned left(int stage) const { return start + stage * C::stage_bytes; }
  __device__ __forceinline__ unsigned right(int stage) const { return left(stage) + C::left_bytes; }
  __device__ __forceinline__ unsigned packed(int stage) const { return start + C::packed_at + stage * C::packed_bytes; }
  __device__ __forceinline__ unsigned barrier(int set, int stage) const {
    return start + C::barriers_at + 8 * (set * STAGES + stage);
  }
  __device__ __forceinline__ unsigned full(int stage) const { return barrier(0, stage); }
  __device__ __forceinline__ unsigned empty(int stage) const { return barrier(1, stage); }
  __device__ __forceinline__ unsigned packed_full(int stage) const { return barrier(2, stage); }
  __device__ __forceinline__ unsigned packed_empty(int stage) const { return barrier(3, stage); }
};

/* The block's tiles, one after the other. */
template <class C> struct tile_walk {
  schedule<TILE_ROWS, true> tiles;
  int number;
  __device__ __forceinline__ explicit tile_walk(const product_call &call)
      : tiles(call.a.offsets, call.a.n_groups, call.a.n_rows, call.column_tiles), number(static_cast<int>(blockIdx.x)) {
  }
  /* All lanes of a warp call together. */
  __device__ __forceinline__ bool next(tile &t) {
    const bool is_there = tiles.find(number, t);
    t.column *= C::result_columns; /* from here on the first column, of gate and up each where gated */
    number += static_cast<int>(gridDim.x);
    return is_there;
  }
};

} // namespace ragged
} // namespace egi

#endif
