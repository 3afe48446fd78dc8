/* Stable counting sort of (token, expert) pairs in two launches: each block counts its run of pairs per expert; then
 * each block reads all counts, knows where its pairs of each expert begin, and places them, round by round, through a
 * list in shared memory that is already in order, so that results leave in whole runs. Ranks inside a block come from
 * warp votes, in order: the result does not depend on timing. */
#include <cuda_runtime.h>
#include <limits.h>

#include "backend/cuda/routing.h"

namespace egi {
namespace routing {
namespace {

enum { THREADS = 512, WARPS = THREADS / 32, LARGEST_BLOCKS = 264, LARGEST_EXPERTS = 4096, EXPERT_SHIFT = 16 };
enum {
  FEW_TURNS = 2,
  MANY_TURNS = 8,
  COUNT_TURNS = 4
}; /* pairs a thread takes in a round: few for latency, many for long runs */

int turns_for(int64_t n_pairs) {
  return n_pairs <= static_cast<int64_t>(LARGEST_BLOCKS) * THREADS * FEW_TURNS ? FEW_TURNS : MANY_TURNS;
}

/* Pairs a block takes: whole rounds, and few enough blocks that reading all their counts is cheap. */
int64_t pairs_of_block(int64_t n_pairs) {
  const int64_t round = static_cast<int64_t>(THREADS) * turns_for(n_pairs), rounds = (n_pairs + round - 1) / round;
  return (rounds + LARGEST_BLOCKS - 1) / LARGEST_BLOCKS * round;
}
int64_t count_blocks(int64_t n_pairs) {
  return n_pairs < 1 ? 1 : (n_pairs + pairs_of_block(n_pairs) - 1) / pairs_of_block(n_pairs);
}

struct sort_call {
  egi_routing r;
  int n_pairs, in_block;
  int *counts; /* [block, expert] */
};

/* counts[block][expert] of each block's pairs. */
__global__ void __launch_bounds__(THREADS) count_kernel(const __grid_constant__ sort_call call) {
  extern __shared__ int totals[];
  const int n_experts = call.r.n_experts;
  for (int e = threadIdx.x; e < n_experts; e += THREADS) totals[e] = 0;
  __syncthreads();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * call.in_block;
  const int64_t end = min(begin + call.in_block, static_cast<int64_t>(call.n_pairs));
  for (int64_t first = begin + threadIdx.x; first < end; first += THREADS * COUNT_TURNS) {
    int expert[COUNT_TURNS];
#pragma unroll
    for (int u = 0; u < COUNT_TURNS; u++)
      expert[u] = first + u * THREADS < end ? call.r.chosen[first + u * THREADS] : -1;
#pragma unroll
    for (int u = 0; u < COUNT_TURNS; u++)
      if (expert[u] >= 0 && expert[u] < n_experts) atomicAdd(&totals[expert[u]], 1); /* integers: any order */
  }
  __syncthreads();
  int *counts = call.counts + static_cast<int64_t>(blockIdx.x) * n_experts;
  for (int e = threadIdx.x; e < n_experts; e += THREADS) counts[e] = totals[e];
}

/* Exclusive sum of one value a thread over the block, and the total. `scratch` holds WARPS ints. */
__device__ __forceinline__ int exclusive_sum(int value, int *scratch, int &total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) before += scratch[w];
    total += scratch[w];
  }
  return before + sum - value;
}

/* next[e] = where this block's first pair of expert e goes; block 0 also writes the offsets. */
__device__ __forceinline__ void find_starts(const sort_call &call, int *next, int *all, int *scratch) {
  const int n_experts = call.r.n_experts, n_blocks = static_cast<int>(gridDim.x), own = static_cast<int>(blockIdx.x);
  for (int e = threadIdx.x; e < n_experts; e += THREADS) next[e] = all[e] = 0;
  __syncthreads();
  const int lanes = n_experts < THREADS ? THREADS / n_experts : 1; /* threads that share an expert's column */
  for (int i = threadIdx.x; i < n_experts * lanes; i += THREADS) {
    const int e = i % n_experts;
    int before = 0, total = 0;
#pragma unroll 8
    for (int b = i / n_experts; b < n_blocks; b += lanes) {
      const int count = call.counts[static_cast<int64_t>(b) * n_experts + e];
      total += count;
      before += b < own ? count : 0;
    }
    atomicAdd(&next[e], before);
    atomicAdd(&all[e], total);
  }
  __syncthreads();
  int carry = 0;
  for (int first = 0; first < n_experts; first += THREADS) {
    const int e = first + static_cast<int>(threadIdx.x);
    int total;
    const int before = carry + exclusive_sum(e < n_experts ? all[e] : 0, scratch, total);
    if (e < n_experts) {
      next[e] += before;
      if (own == 0) call.r.offsets[e] = before;
    }
    carry += total;
  }
  if (own == 0 && threadIdx.x == 0) call.r.offsets[n_experts] = carry;
  __syncthreads();
}

/* Lanes whose pair has the same expert; bit by bit, which is several times faster than a match instruction. */
__device__ __forceinline__ unsigned same_lanes(int expert, int n_bits) {
  unsigned same = __ballot_sync(0xffffffffu, expert >= 0);
  for (int b = 0; b < n_bits; b++) {
    const bool is_set = expert >> b & 1;
    const unsigned set = __ballot_sync(0xffffffffu, is_set);
    same &= is_set ? set : ~set;
  }
  return same;
}

/* A warp's TURNS x 32 pairs of a round: counts them per expert and keeps each pair's rank among the warp's. */
template <int TURNS>
__device__ __forceinline__ void rank_pairs(const int (&expert)[TURNS], int (&rank)[TURNS], int *warp_counts,
                                           int n_bits) {
  const unsigned lane = threadIdx.x & 31, below = (1u << lane) - 1u;
#pragma unroll
  for (int u = 0; u < TURNS; u++) {
    const unsigned same = same_lanes(expert[u], n_bits);
    const int before = __popc(same & below);
    int earlier = 0;
    if (expert[u] >= 0) earlier = warp_counts[expert[u]];
    __syncwarp();
    if (expert[u] >= 0 && before == 0) warp_counts[expert[u]] = earlier + __popc(same);
    __syncwarp();
    rank[u] = earlier + before;
  }
}

/* The block's tables in shared memory, each of n_experts but for the last two. */
struct place_memory {
  int *next;        /* where the block's next pair of each expert goes */
  int *start;       /* where the expert's pairs of this round start in the list */
  int *total;       /* how many there are */
  int *warp_counts; /* [WARPS, n_experts] counts, then ranks of the warp's first */
  int *scratch;     /* [WARPS] of the block's sums, and the pairs of the round */
  unsigned *list;   /* [round] pairs in order: expert << EXPERT_SHIFT | number in the round */
  float *weight;    /* [round] of the pairs in order */
};

/* Counts of the warps to ranks, and totals to starts. */
__device__ __forceinline__ void find_ranks(const place_memory &m, int n_experts) {
  int carry = 0;
  for (int first = 0; first < n_experts; first += THREADS) {
    const int e = first + static_cast<int>(threadIdx.x);
    int at = 0, count[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) count[w] = e < n_experts ? m.warp_counts[w * n_experts + e] : 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      if (e < n_experts) m.warp_counts[w * n_experts + e] = at;
      at += count[w];
    }
    int sum;
    const int start = carry + exclusive_sum(at, m.scratch, sum);
    carry += sum;
    if (e < n_experts) {
      m.start[e] = start;
      m.total[e] = at;
    }
  }
  if (threadIdx.x == 0) m.scratch[WARPS] = carry;
}

/* One round: the block's pairs first .. first + THREADS * TURNS - 1, of which those before `end` count. */
template <int TURNS>
__device__ __forceinline__ void place_round(const egi_routing &r, const place_memory &m, int64_t first, int64_t end) {
  const int n_experts = r.n_experts, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int mine = warp * (32 * TURNS) + lane;
  int *ranks = m.warp_counts + warp * n_experts;
  for (int i = threadIdx.x; i < WARPS * n_experts; i += THREADS) m.warp_counts[i] = 0;
  int expert[TURNS], rank[TURNS];
  float weight[TURNS];
#pragma unroll
  for (int u = 0; u < TURNS; u++) {
    const int64_t i = first + mine + 32 * u;
    const int e = i < end ? r.chosen[i] : -1;
    expert[u] = e >= 0 && e < n_experts ? e : -1;
    weight[u] = r.sorted_weight && i < end ? r.weight[i] : 0.0f;
  }
  __syncthreads();
  rank_pairs<TURNS>(expert, rank, ranks, 32 - __clz(n_experts - 1));
  __syncthreads();
  find_ranks(m, n_experts);
  __syncthreads();
  const int n_placed = m.scratch[WARPS];
#pragma unroll
  for (int u = 0; u < TURNS; u++) {
    const int number = mine + 32 * u, e = expert[u];
    const int inside = e >= 0 ? ranks[e] + rank[u] : 0;
    if (e >= 0) {
      m.list[m.start[e] + inside] = static_cast<unsigned>(e) << EXPERT_SHIFT | static_cast<unsigned>(number);
      m.weight[m.start[e] + inside] = weight[u];
    }
    if (first + number < end) r.inverse[first + number] = e >= 0 ? m.next[e] + inside : -1;
  }
  __syncthreads();
  for (int p = threadIdx.x; p < n_placed; p += THREADS) {
    const unsigned entry = m.list[p], e = entry >> EXPERT_SHIFT;
    const int64_t i = first + (entry & ((1u << EXPERT_SHIFT) - 1u));
    const int at = m.next[e] + p - m.start[e];
    r.source_row[at] = static_cast<int>(static_cast<unsigned>(i) / static_cast<unsigned>(r.k));
    if (r.expert) r.expert[at] = static_cast<int>(e);
    if (r.sorted_weight) r.sorted_weight[at] = m.weight[p];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < n_experts; e += THREADS) m.next[e] += m.total[e];
}

template <int TURNS>
__global__ void __launch_bounds__(THREADS, 2) place_kernel(const __grid_constant__ sort_call call) {
  extern __shared__ int shared[];
  const int n_experts = call.r.n_experts;
  place_memory m;
  m.next = shared;
  m.start = m.next + n_experts;
  m.total = m.start + n_experts;
  m.warp_counts = m.total + n_experts;
  m.scratch = m.warp_counts + WARPS * n_experts;
  m.list = reinterpret_cast<unsigned *>(m.scratch + WARPS + 1);
  m.weight = reinterpret_cast<float *>(m.list + THREADS * TURNS);
  find_starts(call, m.next, m.total, m.scratch);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * call.in_block;
  const int64_t end = min(begin + call.in_block, static_cast<int64_t>(call.n_pairs));
  for (int64_t first = begin; first < end; first += THREADS * TURNS) place_round<TURNS>(call.r, m, first, end);
}

int place_shared_bytes(int n_experts, int turns) {
  return 4 * (n_experts * (WARPS + 3) + WARPS + 1 + 2 * THREADS * turns);
}

bool is_good(const egi_routing &r) {
  if (r.n_tokens < 0 || r.k < 1 || r.n_experts < 1 || r.n_tokens > (INT_MAX - (1 << 20)) / r.k || !r.offsets)
    return false;
  if (r.n_tokens > 0 && (!r.chosen || !r.source_row || !r.inverse)) return false;
  return !(r.sorted_weight && !r.weight) && r.workspace && reinterpret_cast<uintptr_t>(r.workspace) % 256 == 0 &&
         r.workspace_bytes >= egi_cuda_routing_workspace(r.n_tokens, r.k, r.n_experts);
}

template <int TURNS> egi_cuda_status launch_sort(const sort_call &call, unsigned n_blocks, cudaStream_t stream) {
  const int shared_bytes = place_shared_bytes(call.r.n_experts, TURNS);
  int device = 0, limit = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
    return EGI_CUDA_FAILED;
  if (call.r.n_experts > LARGEST_EXPERTS || shared_bytes > limit) return EGI_CUDA_UNSUPPORTED;
  if (cudaFuncSetAttribute(place_kernel<TURNS>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) !=
      cudaSuccess)
    return EGI_CUDA_FAILED;
  count_kernel<<<n_blocks, THREADS, static_cast<size_t>(call.r.n_experts) * sizeof(int), stream>>>(call);
  place_kernel<TURNS><<<n_blocks, THREADS, static_cast<size_t>(shared_bytes), stream>>>(call);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

} // namespace
} // namespace routing
} // namespace egi

extern "C" size_t egi_cuda_routing_workspace(int64_t n_tokens, int32_t k, int32_t n_experts) {
  if (n_tokens < 0 || k < 1 || n_experts < 1) return 0;
  return static_cast<size_t>(egi::routing::count_blocks(n_tokens * k)) * static_cast<size_t>(n_experts) * sizeof(int);
}

extern "C" egi_cuda_status egi_cuda_routing_sort(const egi_routing *routing, void *stream) {
  using namespace egi::routing;
  if (!routing || !is_good(*routing)) return EGI_CUDA_INVALID;
  sort_call call = {};
  call.r = *routing;
  call.n_pairs = static_cast<int>(routing->n_tokens * routing->k);
  call.in_block = static_cast<int>(pairs_of_block(call.n_pairs));
  call.counts = static_cast<int *>(routing->workspace);
  const unsigned n_blocks = static_cast<unsigned>(count_blocks(call.n_pairs));
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  return turns_for(call.n_pairs) == FEW_TURNS ? launch_sort<FEW_TURNS>(call, n_blocks, cuda_stream)
                                              : launch_sort<MANY_TURNS>(call, n_blocks, cuda_stream);
}
