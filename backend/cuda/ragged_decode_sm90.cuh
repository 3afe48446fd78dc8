/* NF4 inside the Hopper product: one thread starts copies of packed codes to a ring in shared memory, two warps bring
 * the scales beside them, a warpgroup turns both into the right operand tiles that the multiplying warpgroups wait for.
 * Values are those of the decoding kernel, bit by bit. Every thread arrives for itself at the barriers here, so that a
 * race checker can follow. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_DECODE_SM90_CUH
#define ENGRAFT_BACKEND_CUDA_RAGGED_DECODE_SM90_CUH

#include "backend/cuda/ragged_nf4.cuh"
#include "backend/cuda/ragged_tile_sm90.cuh"

namespace egi {
namespace ragged {

/* Part n of 128 of a step's right tile is 64 codes under one scale: row n (forward), or row n % 64 of column panel n /
 * 64 (backward). `block` is its scale's number in step 0 of a run, `step` the distance from step to step; from step
 * n_valid on, 0 where the part lies outside W, the scale is 0. */
struct scale_walk {
  int64_t block, step;
  int n_valid;
};

template <class C>
__device__ __forceinline__ scale_walk find_scales(const product_call &call, const tile &t, int half, int part) {
  const int sides = call.a.has_halves ? 2 : 1;
  const int blocks_in_row = (C::IS_BACKWARD ? call.a.n_out : call.a.n_in) / NF4_BLOCK;
  const int64_t first_row = static_cast<int64_t>(t.group) * (C::IS_BACKWARD ? call.a.n_in : call.a.n_out);
  scale_walk walk;
  if (C::IS_BACKWARD) {
    const int size = call.a.n_in / sides, row = part & 63, column = t.column + 64 * (part >> 6);
    walk.n_valid = column < call.a.n_out ? (size - row + TILE_DEPTH - 1) / TILE_DEPTH : 0;
    walk.step = static_cast<int64_t>(TILE_DEPTH) * sides * blocks_in_row;
    walk.block = (first_row + sides * row + half) * blocks_in_row + column / NF4_BLOCK;
  } else {
    const int size = C::IS_GATED ? call.a.n_out / 2 : call.a.n_out;
    const int index = t.column + (C::IS_GATED ? part & 63 : part), side = C::IS_GATED ? part >> 6 : 0;
    const int row = C::IS_GATED && call.a.is_interleaved ? 2 * index + side : side * size + index;
    walk.n_valid = index < size ? call.steps_in_half : 0;
    walk.step = 1;
    walk.block = (first_row + row) * blocks_in_row;
  }
  return walk;
}

/* The scales of one part, loaded SCALES_AHEAD steps before their use. */
template <bool IS_NESTED> struct scale_stream {
  scale_walk walk;
  int s; /* the next step to load */
  stored_scale ahead[SCALES_AHEAD];

  __device__ __forceinline__ stored_scale load(const egi_ragged_nf4 &nf4) {
    stored_scale stored = {0.0f, IS_NESTED ? 0 : -1};
    if (s < walk.n_valid) {
      if (IS_NESTED)
        stored = {__ldg(nf4.nested_absmax + walk.block / NESTED_BLOCK), __ldg(nf4.absmax_codes + walk.block)};
      else
        stored.value = __ldg(nf4.absmax + walk.block);
    }
    walk.block += walk.step;
    s++;
    return stored;
  }
  __device__ __forceinline__ void begin(const egi_ragged_nf4 &nf4, const scale_walk &from) {
    walk = from;
    s = 0;
#pragma unroll
    for (int i = 0; i < SCALES_AHEAD; i++) ahead[i] = load(nf4);
  }
  /* The scale of the next step. */
  __device__ __forceinline__ float next(const egi_ragged_nf4 &nf4, float offset) {
    const stored_scale first = ahead[0];
#pragma unroll
    for (int i = 0; i + 1 < SCALES_AHEAD; i++) ahead[i] = ahead[i + 1];
    ahead[SCALES_AHEAD - 1] = load(nf4);
    return IS_NESTED ? finish_scale(nf4, first, offset) : first.value;
  }
};

/* Two warps: scales of each step to the ring. A decoder would wait for such loads, and its fence with it. */
template <class C, bool IS_NESTED>
__device__ __forceinline__ void fetch_scales(const product_call &call, const block_memory<C> &memory) {
  tile_walk<C> tiles(call);
  const int part = threadIdx.x & 63;
  ring<STAGES> slot;
  tile t;
  while (tiles.next(t)) {
    const float offset = IS_NESTED ? group_offset(call.nf4, t.group) : 0.0f;
    for (int half = 0; half < call.main_runs; half++) {
      scale_stream<IS_NESTED> streams[2];
#pragma unroll
      for (int i = 0; i < 2; i++) streams[i].begin(call.nf4, find_scales<C>(call, t, half, part + 64 * i));
#pragma unroll 1
      for (int s = 0; s < call.steps_in_half; s++) {
        float *dst = reinterpret_cast<float *>(memory.base + C::scales_at + slot.stage * C::scales_bytes) + part;
        const float scales[2] = {streams[0].next(call.nf4, offset), streams[1].next(call.nf4, offset)};
        barrier_wait(memory.packed_empty(slot.stage), slot.phase ^ 1);
        dst[0] = scales[0];
        dst[64] = scales[1];
        barrier_arrive(memory.packed_full(slot.stage));
        slot.advance();
      }
    }
  }
}

/* One warp, one thread of it: packed codes of each step to the ring. */
template <class C>
__device__ __forceinline__ void produce_codes(const product_call &call, const block_memory<C> &memory) {
  tile_walk<C> tiles(call);
  const bool is_leader = elect_one();
  ring<STAGES> slot;
  tile t;
  while (tiles.next(t)) {
    for (int half = 0; half < call.main_runs && is_leader; half++) {
#pragma unroll 1
      for (int s = 0; s < call.steps_in_half; s++) {
        const unsigned full = memory.packed_full(slot.stage), dst = memory.packed(slot.stage);
        barrier_wait(memory.packed_empty(slot.stage), slot.phase ^ 1);
        barrier_expect(full, C::packed_bytes);
        if (C::IS_BACKWARD) {
          copy_4d(dst, &call.weight, full, {t.column / 2, TILE_DEPTH * s, half, t.group});
        } else {
          copy_4d(dst, &call.weight, full, {TILE_DEPTH / 2 * s, t.column, 0, t.group});
          if (C::IS_GATED)
            copy_4d(dst + C::packed_bytes / 2, &call.weight, full, {TILE_DEPTH / 2 * s, t.column, 1, t.group});
        }
        slot.advance();
      }
    }
    __syncwarp();
  }
}

/* Decodes part n of a step from a packed stage into its rows of a right tile, once `empty` lets it. */
template <class C>
__device__ __forceinline__ void decode_part(const block_memory<C> &memory, int packed_stage, const ring<STAGES> &slot,
                                            int n) {
  const int row = C::IS_BACKWARD ? n & 63 : n;
  const int code_offset = C::IS_BACKWARD ? row * 64 + (n >> 6) * 32 : n * 32;
  const char *packed = memory.base + C::packed_at + packed_stage * C::packed_bytes;
  const uint4 *src = reinterpret_cast<const uint4 *>(packed + code_offset);
  const uint4 codes[2] = {src[0], src[1]};
  const float scale = reinterpret_cast<const float *>(memory.base + C::scales_at + packed_stage * C::scales_bytes)[n];
  const nf4_table table = make_nf4_table<typename C::Element>(scale);
  const unsigned words[8] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w,
                             codes[1].x, codes[1].y, codes[1].z, codes[1].w};
  char *line = memory.base + slot.stage * C::stage_bytes + C::left_bytes + row * 128 +
               (C::IS_BACKWARD ? (n >> 6) * PANEL_BYTES : 0);
  barrier_wait(memory.empty(slot.stage), slot.phase ^ 1);
#pragma unroll
  for (int i = 0; i < 8; i++) *reinterpret_cast<uint4 *>(line + ((i ^ (row & 7)) << 4)) = decode_eight(table, words[i]);
  store_fence();
}

/* One warpgroup: packed codes to right operand tiles; the adapter's tiles come by copy and are only counted. The packed
 * stage is handed back when what came of it has been stored: an earlier arrival would not wait for the loads. */
template <class C> __device__ __forceinline__ void decode(const product_call &call, const block_memory<C> &memory) {
  tile_walk<C> tiles(call);
  const int part = threadIdx.x & 127, main_steps = call.main_runs * call.steps_in_half;
  ring<STAGES> slot, packed;
  tile t;
  while (tiles.next(t)) {
#pragma unroll 1
    for (int s = 0; s < main_steps; s++) {
      barrier_wait(memory.packed_full(packed.stage), packed.phase);
      decode_part<C>(memory, packed.stage, slot, part);
      barrier_arrive(memory.full(slot.stage));
      barrier_arrive(memory.packed_empty(packed.stage));
      packed.advance();
      slot.advance();
    }
    for (int s = 0; s < call.adapter_steps; s++) {
      barrier_wait(memory.empty(slot.stage), slot.phase ^ 1);
      barrier_arrive(memory.full(slot.stage));
      slot.advance();
    }
  }
}

} // namespace ragged
} // namespace egi

#endif
