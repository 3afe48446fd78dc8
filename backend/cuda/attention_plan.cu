/* Fills a plan: one block a list. Warps find the bounds of tiles, then a counting sort orders them by the number of
 * steps, longest first. Tiles of equal length may come in any order: no result depends on it. */
#include "backend/cuda/attention_plan.cuh"

namespace egi {
namespace {

enum { PLAN_THREADS = 1024, N_BINS = 1024 };

struct list_job {
  tile_plan *list;
  int n_tiles;
  tile_size size;
  int tokens; /* rows of one warpgroup */
  bool is_keys;
};

struct plan_jobs {
  list_job job[3];
};

/* Keys from the end of what the tile sees down to its first key. One thread: first keys never decrease. */
__device__ void plan_queries(const egi_cuda_attention &a, const list_job &job, int offset, tile_plan &plan) {
  const int n_queries = static_cast<int>(a.n_queries), n_keys = static_cast<int>(a.n_keys), step = job.size.step;
  plan.anchor = min(min(plan.first_row + job.tokens * job.size.groups, n_queries) + offset, n_keys);
  plan.n_steps = 0;
#pragma unroll
  for (int g = 0; g < MAX_GROUPS; g++) {
    plan.begin[g] = plan.end[g] = plan.edge[g] = 0;
    const int first = plan.first_row + job.tokens * g, last = min(first + job.tokens, n_queries) - 1;
    if (g >= job.size.groups || first >= n_queries) continue;
    const int first_key = max(a.first_key[first], 0), last_key = min(last + offset, n_keys - 1);
    if (first_key < plan.anchor) plan.end[g] = (plan.anchor - first_key + step - 1) / step;
    plan.begin[g] = min(max((plan.anchor - 1 - last_key) / step, 0), plan.end[g]);
    plan.edge[g] = first + job.tokens <= n_queries ? a.first_key[last] : no_key;
    plan.n_steps = max(plan.n_steps, plan.end[g]);
  }
}

/* Queries from the first that sees any key of the tile (rounded down, so that row pairs stay aligned) to the last. A
 * whole warp: keys that nothing sees may stand anywhere. */
__device__ void plan_keys(const egi_cuda_attention &a, const list_job &job, int offset, int lane, tile_plan &plan) {
  const int step = job.size.step;
  plan.anchor = max(plan.first_row - offset, 0) & ~7;
  plan.n_steps = 0;
#pragma unroll
  for (int g = 0; g < MAX_GROUPS; g++) {
    plan.begin[g] = plan.end[g] = plan.edge[g] = 0;
    if (g >= job.size.groups) continue;
    const int first = plan.first_row + job.tokens * g;
    const int2 lasts = last_query_range(a, first, job.tokens, lane);
    const int n_rows = min(lasts.y + 1, static_cast<int>(a.n_queries)) - plan.anchor;
    if (n_rows > 0) plan.end[g] = (n_rows + step - 1) / step;
    plan.begin[g] = min(max(first - offset - plan.anchor, 0) / step, plan.end[g]);
    plan.edge[g] = lasts.x;
    plan.n_steps = max(plan.n_steps, plan.end[g]);
  }
}

__device__ __forceinline__ int bin_of(int n_steps) {
  return N_BINS - 1 - min(n_steps, N_BINS - 1);
}

__global__ void __launch_bounds__(PLAN_THREADS) attention_plan(const egi_cuda_attention a, const plan_jobs jobs) {
  __shared__ int bins[N_BINS];
  const list_job job = jobs.job[blockIdx.x];
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, offset = query_offset(a);
  const int workers = job.is_keys ? PLAN_THREADS / 32 : PLAN_THREADS, worker = job.is_keys ? thread >> 5 : thread;
  bins[thread] = 0;
  __syncthreads();
  for (int is_placing = 0; is_placing < 2; is_placing++) { /* first count lengths, then place */
    for (int tile = worker; tile < job.n_tiles; tile += workers) {
      tile_plan plan;
      plan.first_row = tile * job.tokens * job.size.groups;
      if (job.is_keys)
        plan_keys(a, job, offset, lane, plan);
      else
        plan_queries(a, job, offset, plan);
      if (job.is_keys && lane != 0) continue;
      const int place = atomicAdd(&bins[bin_of(plan.n_steps)], 1);
      if (is_placing) job.list[place] = plan;
    }
    __syncthreads();
    if (is_placing) break;
    const int count = bins[thread];
    for (int step = 1; step < N_BINS; step *= 2) { /* inclusive scan */
      const int before = thread >= step ? bins[thread - step] : 0;
      __syncthreads();
      bins[thread] += before;
      __syncthreads();
    }
    bins[thread] -= count;
    __syncthreads();
  }
}

} // namespace

size_t count_plan_bytes(const egi_cuda_attention &a) {
  return carve_plan(a, nullptr).size_bytes;
}

egi_cuda_status fill_plan(const egi_cuda_attention &a, const plan_lists &lists, int parts, cudaStream_t stream) {
  plan_jobs jobs = {};
  unsigned n_jobs = 0;
  const int tokens = 64 / count_packed_heads(a);
  if (parts & PLAN_FORWARD)
    jobs.job[n_jobs++] = {lists.forward, lists.n_forward, forward_tile(a.head_dim), tokens, false};
  if (parts & PLAN_DQ) jobs.job[n_jobs++] = {lists.dq, lists.n_dq, dq_tile(a.head_dim), 64, false};
  if (parts & PLAN_DKV) jobs.job[n_jobs++] = {lists.dkv, lists.n_dkv, dkv_tile(a.head_dim), 64, true};
  if (n_jobs == 0 || lists.size_bytes == 0) return EGI_CUDA_OK;
  attention_plan<<<n_jobs, PLAN_THREADS, 0, stream>>>(a, jobs);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

} // namespace egi
