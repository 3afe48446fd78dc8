/* The ragged reduction on Hopper: out_e = left_e^T right_e over the rows of a group. Persistent blocks take tiles of
 * 128 left columns and 64 right columns of one group; a warp starts copies, two warpgroups multiply 64 left columns
 * each, both operands contracted along their rows. fp32 accumulators, rows in order, one writer an element. */
#include "backend/cuda/ragged_hopper.cuh"

namespace egi {
namespace ragged {
namespace {

enum {
  DEPTH = 64,
  DEPTH_STAGES = 8,
  PANEL = DEPTH * 128,
  STAGE_BYTES = 3 * PANEL,
  LEFT_COLUMNS = 128,
  RIGHT_COLUMNS = 64
};
enum { REDUCTION_THREADS = 384, REDUCTION_SHARED = DEPTH_STAGES * (STAGE_BYTES + 16) };

struct reduction_call {
  CUtensorMap left, right;
  const int32_t *offsets;
  int n_groups, n_rows, n_left, n_right, right_tiles, tiles_in_group;
  float *out;
  int64_t group_stride, left_stride, right_stride;
  int is_added, is_paired; /* is_paired: neighbours along the right side are one aligned float2 */
};

using reduction_schedule = schedule<DEPTH, false>;

struct reduction_memory {
  char *base;
  unsigned start;
  __device__ __forceinline__ explicit reduction_memory(char *raw) : base(raw), start(shared_address(raw)) {}
  __device__ __forceinline__ unsigned tile_at(int stage) const { return start + stage * STAGE_BYTES; }
  __device__ __forceinline__ unsigned full(int stage) const { return start + DEPTH_STAGES * STAGE_BYTES + 8 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8 * DEPTH_STAGES; }
};

__device__ __forceinline__ void produce_rows(const reduction_call &call, const reduction_memory &memory) {
  reduction_schedule tiles(call.offsets, call.n_groups, call.n_rows, call.tiles_in_group);
  const bool is_leader = elect_one();
  ring<DEPTH_STAGES> slot;
  tile t;
  for (int number = static_cast<int>(blockIdx.x); tiles.find(number, t); number += static_cast<int>(gridDim.x)) {
    if (is_leader) {
      const int left = t.column / call.right_tiles * LEFT_COLUMNS, right = t.column % call.right_tiles * RIGHT_COLUMNS;
      for (int row = 0; row < t.n_rows; row += DEPTH) {
        const unsigned full = memory.full(slot.stage), dst = memory.tile_at(slot.stage);
        barrier_wait(memory.empty(slot.stage), slot.phase ^ 1);
        barrier_expect(full, STAGE_BYTES);
        copy_2d(dst, &call.left, full, left, t.first_row + row);
        copy_2d(dst + PANEL, &call.left, full, left + 64, t.first_row + row);
        copy_2d(dst + 2 * PANEL, &call.right, full, right, t.first_row + row);
        slot.advance();
      }
    }
    __syncwarp();
  }
}

/* Rows from n_rows on belong to the next group: both operands become zero there, since 0 times inf is not 0. All
 * consumers call together. */
__device__ __forceinline__ void clear_rows(char *stage_memory, int n_rows) {
  const int thread = static_cast<int>(threadIdx.x) - 128, n_chunks = (DEPTH - n_rows) * 8;
  for (int panel = 0; panel < 3; panel++)
    for (int i = thread; i < n_chunks; i += 256)
      *reinterpret_cast<uint4 *>(stage_memory + panel * PANEL + n_rows * 128 + 16 * i) = make_uint4(0, 0, 0, 0);
  store_fence();
  named_sync(1, 256);
}

/* Products of one stage, the warpgroup's 64 left columns. */
template <class Element>
__device__ __forceinline__ void multiply_rows(float (&sums)[32], unsigned stage, int group, int adds) {
  const unsigned left = operand(stage + group * PANEL, PANEL), right = operand(stage + 2 * PANEL, PANEL);
#pragma unroll
  for (int k = 0; k < DEPTH / 16; k++)
    product<Element, true, true, 32>::run(sums, descriptor(left + 128 * k), descriptor(right + 128 * k),
                                          k > 0 ? 1 : adds);
}

__device__ __forceinline__ void put(float *to, float value, int is_added) {
  *to = is_added ? *to + value : value;
}

/* A warp's 16 left columns by 64 right columns, to memory. */
__device__ __forceinline__ void store_sums(const float (&sums)[32], const reduction_call &call, const tile &t,
                                           int warp) {
  const int lane = threadIdx.x & 31;
  const int left = t.column / call.right_tiles * LEFT_COLUMNS + 16 * warp + (lane >> 2);
  const int right = t.column % call.right_tiles * RIGHT_COLUMNS + 2 * (lane & 3);
  float *out = call.out + t.group * call.group_stride;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int row = left + 8 * (i & 1), column = right + 8 * (i >> 1);
    if (row >= call.n_left || column >= call.n_right) continue;
    float *to = out + row * call.left_stride + column * call.right_stride;
    float2 pair = make_float2(sums[2 * i], sums[2 * i + 1]);
    if (call.is_paired) {
      float2 *whole = reinterpret_cast<float2 *>(to);
      if (call.is_added) pair = make_float2(whole->x + pair.x, whole->y + pair.y);
      *whole = pair;
    } else {
      put(to, pair.x, call.is_added);
      put(to + call.right_stride, pair.y, call.is_added);
    }
  }
}

template <class Element>
__device__ __forceinline__ void sum_tile(const reduction_call &call, const reduction_memory &memory,
                                         ring<DEPTH_STAGES> &slot, const tile &t, int warp) {
  float sums[32];
  const int lane = threadIdx.x & 31, group = warp >> 2;
  int previous = slot.stage;
  for (int row = 0; row < t.n_rows; row += DEPTH) {
    barrier_wait(memory.full(slot.stage), slot.phase);
    if (t.n_rows - row < DEPTH) clear_rows(memory.base + slot.stage * STAGE_BYTES, t.n_rows - row);
    wgmma_fence();
    multiply_rows<Element>(sums, memory.tile_at(slot.stage), group, row > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (row > 0 && lane == 0) barrier_arrive(memory.empty(previous));
    previous = slot.stage;
    slot.advance();
  }
  wgmma_wait<0>(sums);
  if (lane == 0) barrier_arrive(memory.empty(previous));
  store_sums(sums, call, t, warp);
}

template <class Element>
__global__ void __launch_bounds__(REDUCTION_THREADS, 1) reduction_kernel(const __grid_constant__ reduction_call call) {
  extern __shared__ __align__(1024) char raw[]; /* swizzled tiles */
  const reduction_memory memory(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < DEPTH_STAGES; i++) {
      barrier_init(memory.full(i), 1);
      barrier_init(memory.empty(i), 8);
    }
    init_fence();
    prefetch_map(&call.left);
    prefetch_map(&call.right);
  }
  __syncthreads();
  const int warp = warp_number();
  if (warp == 0) produce_rows(call, memory);
  if (warp >= 4) {
    reduction_schedule tiles(call.offsets, call.n_groups, call.n_rows, call.tiles_in_group);
    ring<DEPTH_STAGES> slot;
    tile t;
    for (int number = static_cast<int>(blockIdx.x); tiles.find(number, t); number += static_cast<int>(gridDim.x))
      sum_tile<Element>(call, memory, slot, t, warp - 4);
  }
}

bool make_side(CUtensorMap *map, const egi_cuda_matrix &side, int columns, const egi_ragged_reduction &r) {
  map_shape m = {};
  m.rank = 2;
  m.element_bytes = 2;
  m.dims[0] = static_cast<uint64_t>(columns);
  m.dims[1] = static_cast<uint64_t>(r.n_rows);
  m.strides_bytes[0] = static_cast<uint64_t>(side.row_stride) * 2;
  m.box[0] = 64;
  m.box[1] = DEPTH;
  return make_map(map, side.data, r.dtype, m);
}

template <class Element> egi_cuda_status run_reduction(const reduction_call &call, cudaStream_t stream) {
  const int n_processors = count_processors();
  if (n_processors < 1 || cudaFuncSetAttribute(reduction_kernel<Element>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               REDUCTION_SHARED) != cudaSuccess)
    return EGI_CUDA_FAILED;
  reduction_kernel<Element><<<static_cast<unsigned>(n_processors), REDUCTION_THREADS, REDUCTION_SHARED, stream>>>(call);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

} // namespace

egi_cuda_status reduction_sm90(const egi_ragged_reduction &r, cudaStream_t stream) {
  reduction_call call = {};
  if (!make_side(&call.left, r.left, r.n_left, r) || !make_side(&call.right, r.right, r.n_right, r))
    return EGI_CUDA_FAILED;
  call.offsets = r.offsets;
  call.n_groups = r.n_groups;
  call.n_rows = static_cast<int>(r.n_rows);
  call.n_left = r.n_left;
  call.n_right = r.n_right;
  call.right_tiles = (r.n_right + RIGHT_COLUMNS - 1) / RIGHT_COLUMNS;
  call.tiles_in_group = call.right_tiles * ((r.n_left + LEFT_COLUMNS - 1) / LEFT_COLUMNS);
  call.out = r.out;
  call.group_stride = r.group_stride;
  call.left_stride = r.left_stride;
  call.right_stride = r.right_stride;
  call.is_added = r.is_added;
  call.is_paired = r.right_stride == 1 && r.left_stride % 2 == 0 && r.group_stride % 2 == 0 &&
                   reinterpret_cast<uintptr_t>(r.out) % 8 == 0;
  return r.dtype == EGI_CUDA_BF16 ? run_reduction<__nv_bfloat16>(call, stream) : run_reduction<__half>(call, stream);
}

} // namespace ragged
} // namespace egi
