/* A stable radix sort of 32-bit keys with their positions, eight bits at a time: counts of each digit in each tile,
 * their running sums over tiles, then every pair goes to its place. Deterministic: places depend on the keys alone. */
#include "backend/cuda/index.cuh"

namespace egi::plain {

enum { DIGITS = 256, TILE = 2048, WARPS = BLOCK_THREADS / 32 };

struct sort_pass {
  const uint32_t *keys, *positions; /* positions NULL: 0, 1, 2, .. */
  uint32_t *to_keys, *to_positions;
  uint32_t *counts; /* [DIGITS][n_tiles] */
  int64_t n, n_tiles;
  int shift;
};

__device__ __forceinline__ uint32_t digit_of(const sort_pass &p, uint32_t key) {
  return key >> p.shift & (DIGITS - 1);
}

__global__ void __launch_bounds__(BLOCK_THREADS) count_digits(sort_pass p) {
  __shared__ uint32_t counts[DIGITS];
  for (int64_t tile = blockIdx.x; tile < p.n_tiles; tile += gridDim.x) {
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = tile * TILE + threadIdx.x; i < (tile + 1) * TILE && i < p.n; i += BLOCK_THREADS)
      atomicAdd(&counts[digit_of(p, p.keys[i])], 1u);
    __syncthreads();
    p.counts[threadIdx.x * p.n_tiles + tile] = counts[threadIdx.x];
    __syncthreads();
  }
}

/* The sum of what other threads of the block before this one have; `out_total` of all of them. */
__device__ uint32_t sum_before(uint32_t value, uint32_t *out_total) {
  __shared__ uint32_t warps[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = value, base = 0, total = 0;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += other;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  for (int k = 0; k < WARPS; k++) {
    if (k == warp) base = total;
    total += warps[k];
  }
  *out_total = total;
  return base + sum - value;
}

/* One block: running sums over all digits and tiles. */
__global__ void __launch_bounds__(BLOCK_THREADS) scan_counts(sort_pass p) {
  uint32_t sum = 0;
  for (int64_t base = 0; base < DIGITS * p.n_tiles; base += BLOCK_THREADS) {
    const int64_t i = base + threadIdx.x; /* DIGITS is a multiple of the block: always inside */
    uint32_t total;
    const uint32_t before = sum_before(p.counts[i], &total);
    p.counts[i] = sum + before;
    sum += total;
  }
}

/* Pairs of a tile in rounds of a block, so that equal digits keep their order: each pair goes behind those of earlier
 * rounds, earlier warps and earlier lanes. */
__global__ void __launch_bounds__(BLOCK_THREADS) move_pairs(sort_pass p) {
  __shared__ uint32_t next[DIGITS], per_warp[WARPS][DIGITS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t tile = blockIdx.x; tile < p.n_tiles; tile += gridDim.x) {
    next[threadIdx.x] = p.counts[threadIdx.x * p.n_tiles + tile];
    for (int64_t base = tile * TILE; base < (tile + 1) * TILE && base < p.n; base += BLOCK_THREADS) {
      const int64_t i = base + threadIdx.x;
      const bool is_inside = i < p.n;
      const uint32_t key = is_inside ? p.keys[i] : 0, digit = is_inside ? digit_of(p, key) : DIGITS;
      for (int k = 0; k < WARPS; k++) per_warp[k][threadIdx.x] = 0;
      __syncthreads();
      const unsigned equal = __match_any_sync(0xffffffffu, digit);
      const unsigned rank = static_cast<unsigned>(__popc(equal & ((1u << lane) - 1u)));
      if (is_inside && rank == 0) per_warp[warp][digit] = static_cast<uint32_t>(__popc(equal));
      __syncthreads();
      uint32_t start = next[threadIdx.x];
      for (int k = 0; k < WARPS; k++) {
        const uint32_t count = per_warp[k][threadIdx.x];
        per_warp[k][threadIdx.x] = start;
        start += count;
      }
      next[threadIdx.x] = start;
      __syncthreads();
      if (is_inside) {
        const uint32_t to = per_warp[warp][digit] + rank;
        p.to_keys[to] = key;
        p.to_positions[to] = p.positions != NULL ? p.positions[i] : static_cast<uint32_t>(i);
      }
      __syncthreads();
    }
  }
}

static size_t align(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

eg_status sort_room(const egi_kernel_plan *plan, int64_t n, int64_t limit, size_t *out_bytes) {
  if (n >= UINT32_MAX || limit >= UINT32_MAX)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "it has too many indices, or places for them");
  const size_t n_tiles = (static_cast<size_t>(n) + TILE - 1) / TILE;
  *out_bytes = 4 * align(static_cast<size_t>(n) * sizeof(uint32_t)) + DIGITS * n_tiles * sizeof(uint32_t);
  return EG_OK;
}

eg_status sort_keys(eg_context *ctx, const egi_cuda_stream *stream, void *workspace, int64_t n, int64_t limit,
                    sorted *out) {
  const size_t step = align(static_cast<size_t>(n) * sizeof(uint32_t));
  char *rooms = static_cast<char *>(workspace);
  uint32_t *keys[2], *positions[2];
  for (int k = 0; k < 2; k++) {
    keys[k] = reinterpret_cast<uint32_t *>(rooms + static_cast<size_t>(k) * step);
    positions[k] = reinterpret_cast<uint32_t *>(rooms + static_cast<size_t>(k + 2) * step);
  }
  sort_pass p = {};
  p.counts = reinterpret_cast<uint32_t *>(rooms + 4 * step);
  p.n = n;
  p.n_tiles = (n + TILE - 1) / TILE;
  int now = 0;
  const unsigned blocks = static_cast<unsigned>(p.n_tiles < 65536 ? p.n_tiles : 65536);
  /* At least one pass, which makes the positions. */
  for (p.shift = 0; p.shift == 0 || (p.shift < 32 && (limit - 1) >> p.shift != 0); p.shift += 8) {
    p.keys = keys[now];
    p.positions = p.shift == 0 ? NULL : positions[now];
    p.to_keys = keys[1 - now];
    p.to_positions = positions[1 - now];
    count_digits<<<blocks, BLOCK_THREADS, 0, stream->stream>>>(p);
    scan_counts<<<1, BLOCK_THREADS, 0, stream->stream>>>(p);
    move_pairs<<<blocks, BLOCK_THREADS, 0, stream->stream>>>(p);
    now = 1 - now;
  }
  *out = {keys[now], positions[now]};
  return egi_cuda_launched(ctx, "sort");
}

} // namespace egi::plain
