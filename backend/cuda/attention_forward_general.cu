/* Attention of any shape, forward: tiles of 64 queries x 64 keys with an online softmax (Dao et al., arXiv 2205.14135);
 * tiles that nothing sees are skipped. A block has one tile of queries of one head and 128 columns of the values. */
#include "backend/cuda/attention_general.cuh"

namespace egi {
namespace general {
namespace {

/* One block of 64 threads a tile of queries and entry of the batch. */
__global__ void __launch_bounds__(TILE) attention_bounds(const attention a) {
  __shared__ int firsts[TILE], lasts[TILE];
  const int n_tiles = tiles_of(a.n_queries), batch = static_cast<int>(blockIdx.x) / n_tiles;
  const int tile = static_cast<int>(blockIdx.x) % n_tiles, thread = static_cast<int>(threadIdx.x);
  const int query = tile * TILE + thread;
  const int2 keys = query < a.n_queries ? keys_of(a, batch, query) : make_int2(0, 0);
  firsts[thread] = keys.x < keys.y ? keys.x : a.n_keys;
  lasts[thread] = keys.x < keys.y ? keys.y : 0;
  __syncthreads();
  for (int step = TILE / 2; step > 0; step /= 2) {
    if (thread < step) {
      firsts[thread] = min(firsts[thread], firsts[thread + step]);
      lasts[thread] = max(lasts[thread], lasts[thread + step]);
    }
    __syncthreads();
  }
  if (thread == 0) a.bounds[blockIdx.x] = make_int2(firsts[0], lasts[0]);
}

/* What the thread's rows have so far. */
struct row_state {
  float largest[4], total[4], sums[4][8];
};

/* Products become probabilities; sums are scaled to the new largest score. */
__device__ __forceinline__ void soften(const attention &a, const head_place &at, int2 place, unsigned seen,
                                       float (&scores)[4][4], row_state &state) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float largest = -CUDART_INF_F, sum = 0.0f, slope;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if ((seen >> (4 * i + j) & 1) == 0) continue;
      scores[i][j] = finish_score(a, at, place.x + 4 * y + i, place.y + 4 * x + j, scores[i][j], slope);
      largest = fmaxf(largest, scores[i][j]);
    }
    largest = fmaxf(row_largest(largest), state.largest[i]);
    const float shrink = largest == -CUDART_INF_F ? 1.0f : expf(state.largest[i] - largest);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      scores[i][j] = seen >> (4 * i + j) & 1 ? expf(scores[i][j] - largest) : 0.0f;
      sum += scores[i][j];
    }
    state.total[i] = state.total[i] * shrink + row_sum(sum);
    state.largest[i] = largest;
#pragma unroll
    for (int j = 0; j < 8; j++) state.sums[i][j] *= shrink;
  }
}

/* The log-sum-exp is infinity where a query sees nothing, or only what the lowest numbers hide. */
__device__ __forceinline__ void store_lse(const attention &a, const head_place &at, int query, const row_state &state) {
  if (threadIdx.x % 16 != 0) return;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = query + 4 * (static_cast<int>(threadIdx.x) / 16) + i;
    const bool is_hidden = state.total[i] == 0.0f || state.largest[i] < -1e30f;
    if (row < a.n_queries)
      a.lse[lse_at(a, at, row)] = is_hidden ? CUDART_INF_F : state.largest[i] + logf(state.total[i]);
  }
}

template <class Element>
__global__ void __launch_bounds__(THREADS, 2) attention_forward(const attention a, int n_columns) {
  __shared__ shared_tiles shared;
  const int n_tiles = tiles_of(a.n_queries);
  int64_t block = blockIdx.x;
  const int part = static_cast<int>(block % n_columns);
  block /= n_columns;
  const int query = (n_tiles - 1 - static_cast<int>(block % n_tiles)) * TILE; /* the longest first */
  block /= n_tiles;
  const int q_head = static_cast<int>(block % a.q_heads), batch = static_cast<int>(block / a.q_heads);
  const head_place at = {batch, q_head, q_head / (a.q_heads / a.kv_heads)};
  const head_matrix<Element> q = head_of<Element>(a.q, batch, q_head), k = head_of<Element>(a.k, batch, at.kv_head);
  const head_matrix<Element> v = head_of<Element>(a.v, batch, at.kv_head);
  const float sink = sink_of(a, q_head);
  row_state state = {};
  float scores[4][4], factor[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    state.largest[i] = sink;
    state.total[i] = sink > -CUDART_INF_F ? 1.0f : 0.0f;
  }
  const int2 bounds = a.bounds[batch * n_tiles + query / TILE];
  for (int key = bounds.x / TILE * TILE; key < bounds.y; key += TILE) {
    unsigned seen;
    if (!find_seen(a, at, make_int2(query, key), shared, seen)) continue;
    multiply_rows(shared, scores, q, k, make_int2(query, key), make_int3(a.n_queries, a.n_keys, a.width));
    soften(a, at, make_int2(query, key), seen, scores, state);
    put_by_key(shared, scores);
    multiply_tile(shared, state.sums, v, make_int2(key, part * COLUMNS), make_int2(a.n_keys, a.value_width), true);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) factor[i] = state.total[i] == 0.0f ? 0.0f : 1.0f / state.total[i];
  store_columns(state.sums, factor, head_of<Element>(a.y, batch, q_head), make_int2(query, part * COLUMNS),
                make_int2(a.n_queries, a.value_width));
  if (a.lse && part == 0) store_lse(a, at, query, state);
}

template <class Element> void launch(const attention &a, cudaStream_t stream) {
  const int64_t n_columns = a.value_width > COLUMNS ? (a.value_width + COLUMNS - 1) / COLUMNS : 1;
  const int64_t n_blocks = count_tiles(a.n_queries) * a.q_heads * a.n_batches * n_columns;
  if (n_blocks > 0)
    attention_forward<Element><<<static_cast<unsigned>(n_blocks), THREADS, 0, stream>>>(a, static_cast<int>(n_columns));
}

} // namespace
} // namespace general

cudaError_t find_attention_bounds(const general::attention &a, cudaStream_t stream) {
  const int64_t n_blocks = general::count_tiles(a.n_queries) * a.n_batches;
  if (n_blocks > 0) general::attention_bounds<<<static_cast<unsigned>(n_blocks), general::TILE, 0, stream>>>(a);
  return cudaPeekAtLastError();
}

cudaError_t attention_forward_general(const general::attention &a, element_kind element, cudaStream_t stream) {
  if (element == ELEMENT_BF16)
    general::launch<__nv_bfloat16>(a, stream);
  else if (element == ELEMENT_F16)
    general::launch<__half>(a, stream);
  else
    general::launch<float>(a, stream);
  return cudaPeekAtLastError();
}

} // namespace egi
