/* Fills a plan: one block a list. Tiles of queries lie side by side; tiles of keys end where documents do, so these are
 * found first. Then bounds are found and a counting sort orders tiles by the number of steps, longest first. Tiles of
 * equal length may come in any order: no result depends on it. */
#include "backend/cuda/attention_plan.cuh"

namespace egi {
namespace {

enum { PLAN_THREADS = 1024, N_BINS = 1024, SPAN_WORDS = 4096, SPAN_ROWS = 32 * SPAN_WORDS, SHORT_DOCUMENT = 1024 };

struct list_job {
  list_state *state;
  tile_plan *list;
  int2 *key_rows;
  int n_tiles; /* of queries; tiles of keys are found */
  tile_size size;
  int tokens; /* rows of one warpgroup */
  bool is_keys;
};

struct plan_jobs {
  list_job job[N_LISTS];
};

/* Keys from the end of what the tile sees down to its first key. One thread: first keys never decrease. */
__device__ void plan_queries(const egi_cuda_attention &a, const list_job &job, int offset, tile_plan &plan) {
  const int n_queries = static_cast<int>(a.n_queries), n_keys = static_cast<int>(a.n_keys), step = job.size.step;
  plan.anchor = min(min(plan.first_row + job.tokens * job.size.groups, n_queries) + offset, n_keys);
  plan.end_row = min(plan.first_row + job.tokens * job.size.groups, n_queries);
  plan.n_steps = 0;
#pragma unroll
  for (int g = 0; g < MAX_GROUPS; g++) {
    plan.begin[g] = plan.end[g] = plan.edge[g] = plan.least[g] = 0;
    const int first = plan.first_row + job.tokens * g, last = min(first + job.tokens, n_queries) - 1;
    if (g >= job.size.groups || first >= n_queries) continue;
    const int first_key = max(a.first_key[first], 0), last_key = min(last + offset, n_keys - 1);
    plan.least[g] = first_key;
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
    plan.begin[g] = plan.end[g] = plan.edge[g] = plan.least[g] = 0;
    const int first = plan.first_row + job.tokens * g, n_rows = min(plan.end_row - first, job.tokens);
    if (g >= job.size.groups || n_rows <= 0) continue;
    const int2 lasts = last_query_range(a, first, n_rows, lane);
    const int n_queries = min(lasts.y + 1, static_cast<int>(a.n_queries)) - plan.anchor;
    if (n_queries > 0) plan.end[g] = (n_queries + step - 1) / step;
    plan.begin[g] = min(max(first - offset - plan.anchor, 0) / step, plan.end[g]);
    plan.edge[g] = lasts.x;
    plan.n_steps = max(plan.n_steps, plan.end[g]);
  }
}

/* Bits of the keys of a span before which a document begins: no query sees a key on either side. A whole block. */
__device__ void mark_documents(const egi_cuda_attention &a, int first, int offset, unsigned (&marks)[SPAN_WORDS]) {
  const int n_keys = static_cast<int>(a.n_keys), n_rows = min(n_keys - first, static_cast<int>(SPAN_ROWS));
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < (n_rows + 31) / 32 * 32; i += PLAN_THREADS) {
    const int key = first + i;
    const bool is_start = key > 0 && key < n_keys && a.last_query[key - 1] < key - offset;
    const unsigned bits = __ballot_sync(0xffffffffu, is_start);
    if ((i & 31) == 0) marks[i >> 5] = bits;
  }
}

/* The first marked row of a chunk of a span, -1 for none. A whole warp: lanes have a word each. */
__device__ __forceinline__ int first_mark(const unsigned (&marks)[SPAN_WORDS], int row, int n_rows, int lane) {
  static_assert(CHUNK_ROWS == 32 * 32, "a chunk is a word a lane");
  const unsigned word = row + 32 * lane < n_rows ? marks[(row >> 5) + lane] : 0;
  const unsigned lanes = __ballot_sync(0xffffffffu, word != 0);
  if (lanes == 0) return -1;
  const int nearest = __ffs(static_cast<int>(lanes)) - 1;
  return row + 32 * nearest + __ffs(static_cast<int>(__shfl_sync(0xffffffffu, word, nearest))) - 1;
}

/* The last marked row of from .. to (less than 31 words), -1 for none. A whole warp. */
__device__ __forceinline__ int last_mark(const unsigned (&marks)[SPAN_WORDS], int from, int to, int lane) {
  const int at = (from >> 5) + lane;
  unsigned word = at <= to >> 5 && at < SPAN_WORDS ? marks[at] : 0;
  if (at == from >> 5) word &= ~0u << (from & 31);
  if (at == to >> 5) word &= ~0u >> (31 - (to & 31));
  const unsigned lanes = __ballot_sync(0xffffffffu, word != 0);
  if (lanes == 0) return -1;
  const int furthest = 31 - __clz(static_cast<int>(lanes));
  return 32 * ((from >> 5) + furthest) + 31 - __clz(static_cast<int>(__shfl_sync(0xffffffffu, word, furthest)));
}

/* Keys whose document starts are marked at a time. */
struct key_span {
  int first, n_rows;
};

/* Cuts a chunk of a span, from its first document on to that of the next chunk, into tiles of up to `most` rows which
 * end at the last document's end within reach: a tile with keys of two documents would walk the queries of both. Ends
 * are multiples of what a warp writes at once. Where a tile is short, none ends in the rest of its reach, so two in a
 * row have `most` rows together, but for the chunk's last. A whole warp. */
__device__ void cut_chunk(const unsigned (&marks)[SPAN_WORDS], key_span span, int chunk, const list_job &job,
                          int *n_tiles) {
  const int lane = threadIdx.x & 31, next = (chunk + 1) * CHUNK_ROWS, n_rows = span.n_rows;
  const int most = job.tokens * job.size.groups;
  int begin = chunk > 0 ? first_mark(marks, chunk * CHUNK_ROWS, n_rows, lane) : 0;
  int end = next < n_rows ? first_mark(marks, next, n_rows, lane) : n_rows;
  begin = begin < 0 ? chunk * CHUNK_ROWS : begin / LEAST_ROWS * LEAST_ROWS;
  if (next < n_rows) end = end < 0 ? next : end / LEAST_ROWS * LEAST_ROWS;
  while (begin < end) {
    const int reach = min(begin + most, end);
    const int mark = reach - begin > LEAST_ROWS ? last_mark(marks, begin + LEAST_ROWS, reach, lane) : -1;
    const int tile_end = mark < 0 ? reach : mark / LEAST_ROWS * LEAST_ROWS;
    if (lane == 0) job.key_rows[atomicAdd(n_tiles, 1)] = make_int2(span.first + begin, span.first + tile_end);
    begin = tile_end;
  }
}

/* All tiles of keys; returns their number. A whole block. */
__device__ int cut_keys(const egi_cuda_attention &a, const list_job &job, int offset) {
  __shared__ unsigned marks[SPAN_WORDS];
  __shared__ int n_tiles;
  const int n_keys = static_cast<int>(a.n_keys), warp = static_cast<int>(threadIdx.x) >> 5;
  if (threadIdx.x == 0) n_tiles = 0;
  for (int first = 0; first < n_keys; first += SPAN_ROWS) {
    const int n_rows = min(n_keys - first, static_cast<int>(SPAN_ROWS));
    __syncthreads();
    mark_documents(a, first, offset, marks);
    __syncthreads();
    for (int chunk = warp; chunk * CHUNK_ROWS < n_rows; chunk += PLAN_THREADS / 32)
      cut_chunk(marks, {first, n_rows}, chunk, job, &n_tiles);
  }
  __syncthreads();
  return n_tiles;
}

/* Steps of the whole document that the tile's last key lies in, if it is short, else 0: its tiles then follow each
 * other and find its queries in the cache. */
__device__ __forceinline__ int document_steps(const egi_cuda_attention &a, const tile_plan &plan, int step) {
  const int last = a.last_query[plan.end_row - 1];
  if (last < 0) return 0;
  const int n_keys = last + query_offset(a) - max(a.first_key[last], 0);
  return n_keys <= SHORT_DOCUMENT ? n_keys / step : 0;
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
  const int n_tiles = job.is_keys ? cut_keys(a, job, offset) : job.n_tiles;
  if (thread == 0) *job.state = {n_tiles, 0};
  __syncthreads();
  for (int is_placing = 0; is_placing < 2; is_placing++) { /* first count lengths, then place */
    for (int tile = worker; tile < n_tiles; tile += workers) {
      tile_plan plan;
      if (job.is_keys) {
        const int2 rows = job.key_rows[tile];
        plan.first_row = rows.x;
        plan.end_row = rows.y;
        plan_keys(a, job, offset, lane, plan);
      } else {
        plan.first_row = tile * job.tokens * job.size.groups;
        plan_queries(a, job, offset, plan);
      }
      if (job.is_keys && lane != 0) continue;
      const int rank = job.is_keys ? max(plan.n_steps, document_steps(a, plan, job.size.step)) : plan.n_steps;
      const int place = atomicAdd(&bins[bin_of(rank)], 1);
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
  const tile_size sizes[N_LISTS] = {forward_tile(a.head_dim), dq_tile(a.head_dim), dkv_tile(a.head_dim)};
  for (int i = 0; i < N_LISTS; i++)
    if (parts >> i & 1)
      jobs.job[n_jobs++] = {lists.states + i,    lists.tiles[i], lists.key_rows,
                            lists.most_tiles[i], sizes[i],       i == LIST_DKV ? 64 : tokens,
                            i == LIST_DKV};
  if (n_jobs == 0 || lists.size_bytes == 0) return EGI_CUDA_OK;
  attention_plan<<<n_jobs, PLAN_THREADS, 0, stream>>>(a, jobs);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

} // namespace egi
