/* NF4 inside the Hopper product: one warp brings packed codes and their scales to a ring in shared memory, six turn
 * them into the right operand tiles that the multiplying warpgroups wait for. Values are those of the decoding kernel,
 * bit by bit. Every thread arrives for itself at the barriers here, so that a race checker can follow. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_DECODE_SM90_CUH
#define ENGRAFT_BACKEND_CUDA_RAGGED_DECODE_SM90_CUH

#include "backend/cuda/ragged_nf4.cuh"
#include "backend/cuda/ragged_tile_sm90.cuh"

namespace egi {
namespace ragged {

/* Part n of 128 of a step's right tile is 64 codes under one scale: row n (forward), or row n % 64 of column panel n /
 * 64 (backward). A lane looks after parts lane + 32 i: block numbers of their scales in a run, counted from the group's
 * first; from step n_valid on, 0 where the part lies outside W, the scale is 0. */
struct scale_walk {
  int64_t first;
  int step, block[4], n_valid[4];
};

template <class C>
__device__ __forceinline__ scale_walk find_scales(const product_call &call, const tile &t, int half) {
  const int sides = call.a.has_halves ? 2 : 1,
            blocks_in_row = (C::IS_BACKWARD ? call.a.n_out : call.a.n_in) / NF4_BLOCK;
  scale_walk walk;
  walk.first = static_cast<int64_t>(t.group) * (C::IS_BACKWARD ? call.a.n_in : call.a.n_out) * blocks_in_row;
  walk.step = C::IS_BACKWARD ? TILE_DEPTH * sides * blocks_in_row : 1;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int part = static_cast<int>(threadIdx.x & 31) + 32 * i;
    if (C::IS_BACKWARD) {
      const int size = call.a.n_in / sides, row = part & 63, column = t.column + 64 * (part >> 6);
      walk.n_valid[i] = column < call.a.n_out ? (size - row + TILE_DEPTH - 1) / TILE_DEPTH : 0;
      walk.block[i] = (sides * row + half) * blocks_in_row + column / NF4_BLOCK;
    } else {
      const int size = C::IS_GATED ? call.a.n_out / 2 : call.a.n_out;
      const int index = t.column + (C::IS_GATED ? part & 63 : part), side = C::IS_GATED ? part >> 6 : 0;
      const int row = C::IS_GATED && call.a.is_interleaved ? 2 * index + side : side * size + index;
      walk.n_valid[i] = index < size ? call.steps_in_half : 0;
      walk.block[i] = row * blocks_in_row;
    }
  }
  return walk;
}

__device__ __forceinline__ stored_scale load_scale(const product_call &call, const scale_walk &walk, int i, int s) {
  if (s >= walk.n_valid[i]) return {0.0f, -1};
  return load_scale(call.nf4, walk.first + (walk.block[i] + walk.step * s));
}

template <class C>
__device__ __forceinline__ void copy_codes(const product_call &call, const tile &t, int half, int s, unsigned dst,
                                           unsigned full) {
  if (C::IS_BACKWARD) {
    copy_4d(dst, &call.weight, full, {t.column / 2, TILE_DEPTH * s, half, t.group});
  } else {
    copy_4d(dst, &call.weight, full, {TILE_DEPTH / 2 * s, t.column, 0, t.group});
    if (C::IS_GATED) copy_4d(dst + C::packed_bytes / 2, &call.weight, full, {TILE_DEPTH / 2 * s, t.column, 1, t.group});
  }
}

/* One warp keeps the ring of packed codes filled, and brings the scales beside them, loaded some steps ahead: a decoder
 * would wait for such loads, and its fence with it. Each lane arrives for itself. */
template <class C>
__device__ __forceinline__ void produce_codes(const product_call &call, const block_memory<C> &memory) {
  tile_walk<C> tiles(call);
  const int lane = threadIdx.x & 31;
  const bool is_leader = elect_one();
  ring<STAGES> slot;
  tile t;
  while (tiles.next(t)) {
    for (int half = 0; half < call.main_runs; half++) {
      const scale_walk walk = find_scales<C>(call, t, half);
      const float offset = group_offset(call.nf4, t.group);
      stored_scale ahead[SCALES_AHEAD][4];
#pragma unroll
      for (int a = 0; a < SCALES_AHEAD; a++)
#pragma unroll
        for (int i = 0; i < 4; i++) ahead[a][i] = load_scale(call, walk, i, a);
#pragma unroll 1
      for (int s = 0; s < call.steps_in_half; s++) {
        const unsigned full = memory.packed_full(slot.stage);
        barrier_wait(memory.packed_empty(slot.stage), slot.phase ^ 1);
        if (is_leader) {
          barrier_expect(full, C::packed_bytes);
          copy_codes<C>(call, t, half, s, memory.packed(slot.stage), full);
        }
        float *dst = reinterpret_cast<float *>(memory.base + C::scales_at + slot.stage * C::scales_bytes) + lane;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          dst[32 * i] = finish_scale(call.nf4, ahead[0][i], offset);
#pragma unroll
          for (int a = 0; a + 1 < SCALES_AHEAD; a++) ahead[a][i] = ahead[a + 1][i];
          ahead[SCALES_AHEAD - 1][i] = load_scale(call, walk, i, s + SCALES_AHEAD);
        }
        barrier_arrive(full);
        slot.advance();
      }
    }
  }
}

/* Decodes part n of a step into the right tile. */
template <class C>
__device__ __forceinline__ void decode_part(const block_memory<C> &memory, int packed_stage, unsigned empty,
                                            unsigned phase, int n, int stage) {
  const int row = C::IS_BACKWARD ? n & 63 : n;
  const int code_offset = C::IS_BACKWARD ? row * 64 + (n >> 6) * 32 : n * 32;
  const char *packed = memory.base + C::packed_at + packed_stage * C::packed_bytes;
  const uint4 *src = reinterpret_cast<const uint4 *>(packed + code_offset);
  const uint4 codes[2] = {src[0], src[1]};
  const float scale = reinterpret_cast<const float *>(memory.base + C::scales_at + packed_stage * C::scales_bytes)[n];
  const nf4_table table = make_nf4_table<typename C::Element>(scale);
  const unsigned words[8] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w,
                             codes[1].x, codes[1].y, codes[1].z, codes[1].w};
  char *line =
      memory.base + stage * C::stage_bytes + C::left_bytes + row * 128 + (C::IS_BACKWARD ? (n >> 6) * PANEL_BYTES : 0);
  barrier_wait(empty, phase);
#pragma unroll
  for (int i = 0; i < 8; i++) *reinterpret_cast<uint4 *>(line + ((i ^ (row & 7)) << 4)) = decode_eight(table, words[i]);
  store_fence();
}

/* Six warps: packed codes to right operand tiles, the four quarters of all steps dealt out in turn; the adapter's tiles
 * come by copy and are only counted. The packed stage is handed back when what came of it has been stored: an earlier
 * arrival would not wait for the loads. */
template <class C>
__device__ __forceinline__ void decode(const product_call &call, const block_memory<C> &memory, int decoder) {
  tile_walk<C> tiles(call);
  const int lane = threadIdx.x & 31, main_steps = call.main_runs * call.steps_in_half;
  unsigned slots = 0, packed = 0; /* steps before this tile, with and without the adapter's */
  tile t;
  while (tiles.next(t)) {
#pragma unroll 1
    for (int q = decoder; q < 4 * main_steps; q += DECODERS) {
      const unsigned s = static_cast<unsigned>(q) / 4u, slot = slots + s, from = packed + s;
      const int stage = static_cast<int>(slot % STAGES), packed_stage = static_cast<int>(from % STAGES);
      barrier_wait(memory.packed_full(packed_stage), from / STAGES & 1u);
      decode_part<C>(memory, packed_stage, memory.empty(stage), (slot / STAGES & 1u) ^ 1u, 32 * (q & 3) + lane, stage);
      barrier_arrive(memory.full(stage));
      barrier_arrive(memory.packed_empty(packed_stage));
    }
    for (int s = main_steps; s < call.steps && decoder < 4; s++) {
      const unsigned slot = slots + static_cast<unsigned>(s);
      barrier_wait(memory.empty(static_cast<int>(slot % STAGES)), (slot / STAGES & 1u) ^ 1u);
      barrier_arrive(memory.full(static_cast<int>(slot % STAGES)));
    }
    slots += static_cast<unsigned>(call.steps);
    packed += static_cast<unsigned>(main_steps);
  }
}

} // namespace ragged
} // namespace egi

#endif
