/* The ragged product on Hopper. Blocks stay on their multiprocessors and take tiles of 256 rows of one group by 128 (or
 * 64) columns. Roles: a warp that starts copies; for NF4 those of ragged_decode_sm90.cuh; two warpgroups that multiply,
 * 64-row blocks 0 and 2, 1 and 3. Blocks of rows behind the group's end are neither loaded nor multiplied. fp32
 * accumulators, contracted index in order, each result written once. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_PRODUCT_SM90_CUH
#define ENGRAFT_BACKEND_CUDA_RAGGED_PRODUCT_SM90_CUH

#include "backend/cuda/ragged_decode_sm90.cuh"

namespace egi {
namespace ragged {

/* ---- copies ----------------------------------------------------------------------------------------------------- */

/* The contraction is a few runs of 64-deep steps: W (or its two halves, one after the other), then the adapter. */
struct contraction_run {
  const CUtensorMap *x, *weight;
  int half, steps;
  bool is_adapter;
};
__device__ __forceinline__ contraction_run find_run(const product_call &call, int r) {
  if (r < call.main_runs) return {&call.x, &call.weight, r, call.steps_in_half, false};
  return {&call.adapter_x, &call.adapter_weight, 0, call.adapter_steps, true};
}

template <class C>
__device__ __forceinline__ void copy_right(const contraction_run &run, const position &at, unsigned dst,
                                           unsigned barrier) {
  if (C::IS_BACKWARD) {
#pragma unroll
    for (int p = 0; p < C::COLUMNS / 64; p++)
      copy_4d(dst + p * PANEL_BYTES, run.weight, barrier, {at.c1 + 64 * p, at.c0, run.half, at.c3});
  } else {
    copy_4d(dst, run.weight, barrier, {at.c0, at.c1, 0, at.c3});
    if (C::IS_GATED) copy_4d(dst + C::right_bytes / 2, run.weight, barrier, {at.c0, at.c1, 1, at.c3});
  }
}

/* One thread: a tile's copies. The loop is on the critical path of the whole kernel, so all that does not change from
 * step to step is outside it. */
template <class C>
__device__ __forceinline__ void copy_tile(const product_call &call, const block_memory<C> &memory, const tile &t,
                                          ring<STAGES> &slot) {
  const int boxes = min((t.n_rows + BOX_ROWS - 1) / BOX_ROWS, TILE_ROWS / BOX_ROWS);
  position right_at = {0, t.column, 0, t.group};
  for (int r = 0; r < call.n_runs; r++) {
    const contraction_run run = find_run(call, r);
    const bool has_right = !C::IS_NF4 || run.is_adapter;
    const int size_bytes = boxes * PANEL_BYTES + (has_right ? C::right_bytes : 0);
    right_at.c0 = 0;
#pragma unroll 1
    for (int s = 0; s < run.steps; s++) {
      const unsigned full = memory.full(slot.stage), left = memory.left(slot.stage);
      barrier_wait(memory.empty(slot.stage), slot.phase ^ 1);
      barrier_expect(full, size_bytes);
      if (has_right) copy_right<C>(run, right_at, memory.right(slot.stage), full);
#pragma unroll
      for (int b = 0; b < TILE_ROWS / BOX_ROWS; b++)
        if (b < boxes)
          copy_3d(left + b * PANEL_BYTES, run.x, full, {right_at.c0, run.half, t.first_row + b * BOX_ROWS, 0});
      right_at.c0 += TILE_DEPTH;
      slot.advance();
    }
  }
}

/* One warp keeps the ring of operand tiles filled. */
template <class C> __device__ __forceinline__ void produce(const product_call &call, const block_memory<C> &memory) {
  tile_walk<C> walk(call);
  const bool is_leader = elect_one();
  ring<STAGES> slot;
  tile t;
  while (walk.next(t)) {
    if (is_leader) copy_tile<C>(call, memory, t, slot);
    __syncwarp();
  }
}

/* ---- multiplication --------------------------------------------------------------------------------------------- */

template <class C> __device__ __forceinline__ void release(const block_memory<C> &memory, int stage) {
  if ((threadIdx.x & 31) == 0) barrier_arrive(memory.empty(stage));
}

/* One stage's products for 64-row blocks `group` and group + 2; the accumulators start over where adds is 0. */
template <class C, int BLOCKS>
__device__ __forceinline__ void multiply_stage(float (&sums)[2][C::REGISTERS], const block_memory<C> &memory, int stage,
                                               int group, int adds) {
  const unsigned left = operand(memory.left(stage) + group * PANEL_BYTES, 0);
  const unsigned right = operand(memory.right(stage), PANEL_BYTES);
  constexpr int right_step = C::IS_BACKWARD ? 16 * 128 : 32;
#pragma unroll
  for (int k = 0; k < TILE_DEPTH / 16; k++)
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
      product<typename C::Element, false, C::IS_BACKWARD, C::REGISTERS>::run(
          sums[b], descriptor(left + (b * 2 * PANEL_BYTES + 32 * k) / 16), descriptor(right + right_step * k / 16),
          k > 0 ? 1 : adds);
}

template <class C, int BLOCKS>
__device__ __forceinline__ void multiply(float (&sums)[2][C::REGISTERS], const block_memory<C> &memory,
                                         ring<STAGES> &slot, int steps, int group) {
  int previous = slot.stage;
  barrier_wait(memory.full(slot.stage), slot.phase);
  wgmma_fence();
  multiply_stage<C, BLOCKS>(sums, memory, slot.stage, group, 0);
  wgmma_commit();
  slot.advance();
#pragma unroll 1
  for (int s = 1; s < steps; s++) {
    barrier_wait(memory.full(slot.stage), slot.phase);
    wgmma_fence();
    multiply_stage<C, BLOCKS>(sums, memory, slot.stage, group, 1);
    wgmma_commit();
    wgmma_wait<1>();
    release<C>(memory, previous);
    previous = slot.stage;
    slot.advance();
  }
  wgmma_wait<0>(sums[0]);
  if (BLOCKS == 2) wgmma_wait<0>(sums[1]);
  release<C>(memory, previous);
}

/* For a warpgroup without rows: hands the stages back unread. */
template <class C> __device__ __forceinline__ void skip(const block_memory<C> &memory, ring<STAGES> &slot, int steps) {
#pragma unroll 1
  for (int s = 0; s < steps; s++) {
    barrier_wait(memory.full(slot.stage), slot.phase);
    release<C>(memory, slot.stage);
    slot.advance();
  }
}

/* ---- results ---------------------------------------------------------------------------------------------------- */

/* A warp's 16 rows of a result: where they go and how many count. */
struct row_target {
  void *data;
  int64_t stride;
  int first_row, n_rows, column, n_columns;
};

/* Writes 16 rows of 64 columns, through the warp's staging memory so that rows are written in whole lines. */
template <class Element>
__device__ __forceinline__ void store_panel(const float *values, char *staging, const row_target &to) {
  const int lane = threadIdx.x & 31;
  const unsigned line = shared_address(staging) + ((lane & 7) + 8 * ((lane >> 3) & 1)) * 128;
  __syncwarp();
#pragma unroll
  for (int k = 0; k < 4; k++) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = format<Element>::pack(values[8 * k + 2 * i], values[8 * k + 2 * i + 1]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     line + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4)),
                 "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  }
  __syncwarp();
  Element *base = static_cast<Element *>(to.data) + to.column;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = 4 * i + (lane >> 3), chunk = lane & 7;
    if (row < to.n_rows && 8 * chunk < to.n_columns)
      *reinterpret_cast<uint4 *>(base + (to.first_row + row) * to.stride + 8 * chunk) =
          *reinterpret_cast<const uint4 *>(staging + row * 128 + ((chunk ^ (row & 7)) << 4));
  }
}

template <class C>
__device__ __forceinline__ void add_bias(float (&sums)[C::REGISTERS], const product_arguments &a, int group,
                                         int column) {
  const int first = 2 * (threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < C::REGISTERS / 4; i++) {
    const int half = C::IS_GATED ? i / 8 : 0, inside = 8 * (C::IS_GATED ? i & 7 : i) + first;
    const float2 bias = bias_pair<typename C::Element, C::IS_GATED>(a, group, half, column + inside);
    sums[4 * i] += bias.x;
    sums[4 * i + 1] += bias.y;
    sums[4 * i + 2] += bias.x;
    sums[4 * i + 3] += bias.y;
  }
}

template <class C> __device__ __forceinline__ void gate(float (&sums)[C::REGISTERS], const gate_rule &rule) {
  constexpr int n = C::REGISTERS / 2;
  if (rule.is_erf) {
#pragma unroll
    for (int i = 0; i < n; i++) sums[i] = apply_gate<true>(rule, sums[i], sums[n + i]);
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) sums[i] = apply_gate<false>(rule, sums[i], sums[n + i]);
  }
}

/* Bias, activation, row weight, and out with a 64-row block's result; `row` is the warp's first row in the tile. */
template <class C>
__device__ __forceinline__ void finish(float (&sums)[C::REGISTERS], const product_call &call, const tile &t, int row,
                                       char *staging) {
  using Element = typename C::Element;
  const product_arguments &a = call.a;
  const int n_rows = min(t.n_rows - row, 16), column = t.column;
  if (n_rows <= 0) return;
  row_target to = {a.y, a.y_stride, t.first_row + row, n_rows, column, 0};
  if (a.bias) add_bias<C>(sums, a, t.group, column);
  if (C::IS_GATED) {
    const int size = a.n_out / 2;
    to.n_columns = size - column;
    if (a.gate_up) {
      row_target both = to;
      both.data = a.gate_up;
      both.stride = a.gate_up_stride;
      store_panel<Element>(sums, staging, both);
      both.column += size;
      store_panel<Element>(sums + C::REGISTERS / 2, staging, both);
    }
    gate<C>(sums, a.rule);
  }
  if (a.row_weight) {
    const int lane_row = (threadIdx.x & 31) >> 2;
    const float upper = lane_row < n_rows ? a.row_weight[to.first_row + lane_row] : 0.0f;
    const float lower = lane_row + 8 < n_rows ? a.row_weight[to.first_row + lane_row + 8] : 0.0f;
#pragma unroll
    for (int i = 0; i < C::REGISTERS; i++) sums[i] *= (i & 2) ? lower : upper;
  }
#pragma unroll
  for (int p = 0; p < C::result_columns / 64; p++) {
    to.column = column + 64 * p;
    to.n_columns = (C::IS_GATED ? a.n_out / 2 : a.n_out) - to.column;
    store_panel<Element>(sums + 32 * p, staging, to);
  }
}

/* A tile's products and results, for the warpgroup that has BLOCKS 64-row blocks of it. The sums live here, so that no
 * other instruction sets them between the products of one tile and the next. */
template <class C, int BLOCKS>
__device__ __forceinline__ void run_tile(const product_call &call, const block_memory<C> &memory, ring<STAGES> &slot,
                                         const tile &t, int warp) {
  float sums[2][C::REGISTERS];
  const int group = warp >> 2, row = 64 * group + 16 * (warp & 3);
  char *staging = memory.base + C::staging_at + warp * STAGING_BYTES;
  multiply<C, BLOCKS>(sums, memory, slot, call.steps, group);
  finish<C>(sums[0], call, t, row, staging);
  if (BLOCKS == 2) finish<C>(sums[1], call, t, row + 128, staging);
}

/* Two warpgroups: products and results. */
template <class C>
__device__ __forceinline__ void consume(const product_call &call, const block_memory<C> &memory, int warp) {
  tile_walk<C> tiles(call);
  const int first = 64 * (warp >> 2);
  ring<STAGES> slot;
  tile t;
  while (tiles.next(t)) {
    if (t.n_rows > first + 128)
      run_tile<C, 2>(call, memory, slot, t, warp);
    else if (t.n_rows > first)
      run_tile<C, 1>(call, memory, slot, t, warp);
    else
      skip<C>(memory, slot, call.steps);
  }
}

/* ---- kernel ----------------------------------------------------------------------------------------------------- */

template <class C> __device__ __forceinline__ void set_up(const product_call &call, const block_memory<C> &memory) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(memory.full(i), C::IS_NF4 ? 129 : 1);
      barrier_init(memory.empty(i), 8);
      barrier_init(memory.packed_full(i), 65);
      barrier_init(memory.packed_empty(i), 128);
    }
    init_fence();
    prefetch_map(&call.x);
    prefetch_map(&call.weight);
  }
  __syncthreads();
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1) product_kernel(const __grid_constant__ product_call call) {
  extern __shared__ __align__(1024) char raw[]; /* swizzled tiles */
  const block_memory<C> memory(raw);
  set_up<C>(call, memory);
  const int warp = warp_number();
  if (warp < 4) {
    give_registers<C::IS_NF4 ? 48 : 40>();
    if (warp == 0) produce<C>(call, memory);
    if (C::IS_NF4 && warp == 1) produce_codes<C>(call, memory);
    if (C::IS_NF4 && warp >= 2) {
      if (call.nf4.absmax)
        fetch_scales<C, false>(call, memory);
      else
        fetch_scales<C, true>(call, memory);
    }
  } else if (warp < C::first_consumer) {
    give_registers<64>();
    if (C::IS_NF4) decode<C>(call, memory);
  } else {
    take_registers<C::IS_NF4 ? 200 : 232>();
    consume<C>(call, memory, warp - C::first_consumer);
  }
}

/* ---- launch ----------------------------------------------------------------------------------------------------- */

template <class C> egi_cuda_status launch_product(const product_call &call, cudaStream_t stream) {
  const int n_processors = count_processors();
  if (n_processors < 1 || cudaFuncSetAttribute(product_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               C::shared_bytes) != cudaSuccess)
    return EGI_CUDA_FAILED;
  product_kernel<C><<<static_cast<unsigned>(n_processors), C::threads, C::shared_bytes, stream>>>(call);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

/* W or the adapter's weight; `columns` is the width of a tile of sums. */
struct weight_shape {
  const void *data;
  int depth, columns; /* depth: the contracted size */
  bool has_halves, is_nf4;
};
/* As [group, half, row, column], with the boxes that copy_right and copy_codes ask for. */
bool make_weight_map(CUtensorMap *map, const egi_ragged_product &p, const weight_shape &shape);
/* Everything of a call, its weight included. */
bool prepare_call(product_call &call, const egi_ragged_product &p, int columns, bool is_nf4);

} // namespace ragged
} // namespace egi

#endif
