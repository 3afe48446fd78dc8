/* Attention of any shape, backward: scores are computed anew and become probabilities through the saved log-sum-exp
 * (Dao et al., arXiv 2205.14135, section B.4). One kernel has a tile of keys and goes through the query heads and
 * queries, another has a tile of queries and goes through the keys: no atomics, sums in a fixed order. delta is the sum
 * of dY * Y of a row; a sink's gradient is the sum of -p * delta. */
#include "backend/cuda/attention_general.cuh"

namespace egi {
namespace general {
namespace {

/* A warp a row. */
template <class Element> __global__ void __launch_bounds__(THREADS) attention_delta(const attention a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t n_rows = static_cast<int64_t>(a.n_batches) * a.q_heads * a.n_queries;
  for (int64_t row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; row < n_rows; row += gridDim.x * (THREADS / 32)) {
    const int query = static_cast<int>(row % a.n_queries), head = static_cast<int>(row / a.n_queries % a.q_heads);
    const int batch = static_cast<int>(row / a.n_queries / a.q_heads);
    const head_matrix<Element> y = head_of<Element>(a.y, batch, head), dy = head_of<Element>(a.dy, batch, head);
    float sum = 0.0f;
    for (int i = lane; i < a.value_width; i += 32) sum = fmaf(to_float(y.at(query, i)), to_float(dy.at(query, i)), sum);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) a.delta[row] = sum;
  }
}

/* A block a head. */
__global__ void __launch_bounds__(THREADS) attention_sink_gradient(const attention a) {
  __shared__ double parts[THREADS];
  const int head = static_cast<int>(blockIdx.x);
  const float sink = sink_of(a, head);
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(a.n_batches) * a.n_queries; i += THREADS) {
    const head_place at = {static_cast<int>(i / a.n_queries), head, 0};
    const int query = static_cast<int>(i % a.n_queries);
    sum -= static_cast<double>(expf(sink - a.lse[lse_at(a, at, query)]) * a.delta[delta_at(a, at, query)]);
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int step = THREADS / 2; step > 0; step /= 2) {
    if (static_cast<int>(threadIdx.x) < step) parts[threadIdx.x] += parts[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) write_element(a.d_sinks, head * a.d_sink_stride, a.sink_element, static_cast<float>(parts[0]));
}

/* scores: products become probabilities; gradients: of probabilities, become those of the products, scale left out. */
__device__ __forceinline__ void make_gradients(const attention &a, const head_place &at, int2 place, unsigned seen,
                                               float (&scores)[4][4], float (&gradients)[4][4]) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = min(place.x + 4 * y + i, a.n_queries - 1);
    const float lse = a.lse[lse_at(a, at, row)], delta = a.delta[delta_at(a, at, row)];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float slope = 0.0f, p = 0.0f;
      if (seen >> (4 * i + j) & 1) p = expf(finish_score(a, at, row, place.y + 4 * x + j, scores[i][j], slope) - lse);
      scores[i][j] = p;
      gradients[i][j] = p != 0.0f ? p * (gradients[i][j] - delta) * slope : 0.0f;
    }
  }
}

/* Probabilities and gradients of a tile; false where nothing is seen. */
template <class Element>
__device__ __forceinline__ bool make_tile(const attention &a, const head_place &at, int2 place, shared_tiles &shared,
                                          float (&scores)[4][4], float (&gradients)[4][4]) {
  unsigned seen;
  if (!find_seen(a, at, place, shared, seen)) return false;
  multiply_rows(shared, scores, head_of<Element>(a.q, at.batch, at.q_head), head_of<Element>(a.k, at.batch, at.kv_head),
                place, make_int3(a.n_queries, a.n_keys, a.width));
  multiply_rows(shared, gradients, head_of<Element>(a.dy, at.batch, at.q_head),
                head_of<Element>(a.v, at.batch, at.kv_head), place, make_int3(a.n_queries, a.n_keys, a.value_width));
  make_gradients(a, at, place, seen, scores, gradients);
  return true;
}

template <class Element> __global__ void __launch_bounds__(THREADS, 2) attention_dkv(const attention a, int n_columns) {
  __shared__ shared_tiles shared;
  const int n_tiles = tiles_of(a.n_keys), n_query_tiles = tiles_of(a.n_queries), group = a.q_heads / a.kv_heads;
  int64_t block = blockIdx.x;
  const int column = static_cast<int>(block % n_columns) * COLUMNS;
  block /= n_columns;
  const int key = static_cast<int>(block % n_tiles) * TILE;
  block /= n_tiles;
  const int kv_head = static_cast<int>(block % a.kv_heads), batch = static_cast<int>(block / a.kv_heads);
  float dk[4][8] = {}, dv[4][8] = {}, scores[4][4], gradients[4][4];
  for (int q_head = kv_head * group; q_head < (kv_head + 1) * group; q_head++) {
    const head_place at = {batch, q_head, kv_head};
    for (int tile = 0; tile < n_query_tiles; tile++) {
      const int2 bounds = a.bounds[batch * n_query_tiles + tile];
      const int query = tile * TILE;
      if (bounds.x >= key + TILE || bounds.y <= key) continue;
      if (!make_tile<Element>(a, at, make_int2(query, key), shared, scores, gradients)) continue;
      if (a.dv.data && column < a.value_width) {
        put_by_query(shared, scores);
        multiply_tile(shared, dv, head_of<Element>(a.dy, batch, q_head), make_int2(query, column),
                      make_int2(a.n_queries, a.value_width), false);
        __syncthreads();
      }
      if (a.dk.data && column < a.width) {
        put_by_query(shared, gradients);
        multiply_tile(shared, dk, head_of<Element>(a.q, batch, q_head), make_int2(query, column),
                      make_int2(a.n_queries, a.width), false);
      }
    }
  }
  const float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f}, scales[4] = {a.scale, a.scale, a.scale, a.scale};
  const int2 place = make_int2(key, column);
  if (a.dv.data)
    store_columns(dv, ones, head_of<Element>(a.dv, batch, kv_head), place, make_int2(a.n_keys, a.value_width));
  if (a.dk.data) store_columns(dk, scales, head_of<Element>(a.dk, batch, kv_head), place, make_int2(a.n_keys, a.width));
}

template <class Element> __global__ void __launch_bounds__(THREADS, 2) attention_dq(const attention a, int n_columns) {
  __shared__ shared_tiles shared;
  const int n_tiles = tiles_of(a.n_queries);
  int64_t block = blockIdx.x;
  const int column = static_cast<int>(block % n_columns) * COLUMNS;
  block /= n_columns;
  const int query = (n_tiles - 1 - static_cast<int>(block % n_tiles)) * TILE;
  block /= n_tiles;
  const int q_head = static_cast<int>(block % a.q_heads), batch = static_cast<int>(block / a.q_heads);
  const head_place at = {batch, q_head, q_head / (a.q_heads / a.kv_heads)};
  const int2 bounds = a.bounds[batch * n_tiles + query / TILE];
  float dq[4][8] = {}, scores[4][4], gradients[4][4];
  for (int key = bounds.x / TILE * TILE; key < bounds.y; key += TILE) {
    if (!make_tile<Element>(a, at, make_int2(query, key), shared, scores, gradients)) continue;
    put_by_key(shared, gradients);
    multiply_tile(shared, dq, head_of<Element>(a.k, batch, at.kv_head), make_int2(key, column),
                  make_int2(a.n_keys, a.width), true);
  }
  const float scales[4] = {a.scale, a.scale, a.scale, a.scale};
  store_columns(dq, scales, head_of<Element>(a.dq, batch, q_head), make_int2(query, column),
                make_int2(a.n_queries, a.width));
}

int64_t column_parts(int64_t columns) {
  return columns > COLUMNS ? (columns + COLUMNS - 1) / COLUMNS : 1;
}

template <class Element> void launch_delta(const attention &a, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(a.n_batches) * a.q_heads * a.n_queries, most = 1 << 16;
  const int64_t n_blocks = (rows + THREADS / 32 - 1) / (THREADS / 32);
  if (n_blocks > 0)
    attention_delta<Element><<<static_cast<unsigned>(n_blocks < most ? n_blocks : most), THREADS, 0, stream>>>(a);
}

template <class Element> void launch(const attention &a, cudaStream_t stream) {
  const int64_t key_parts = column_parts(a.width > a.value_width ? a.width : a.value_width);
  const int64_t query_parts = column_parts(a.width);
  const int64_t key_blocks = count_tiles(a.n_keys) * a.kv_heads * a.n_batches * key_parts;
  const int64_t query_blocks = count_tiles(a.n_queries) * a.q_heads * a.n_batches * query_parts;
  launch_delta<Element>(a, stream);
  if ((a.dk.data || a.dv.data) && key_blocks > 0)
    attention_dkv<Element><<<static_cast<unsigned>(key_blocks), THREADS, 0, stream>>>(a, static_cast<int>(key_parts));
  if (a.dq.data && query_blocks > 0)
    attention_dq<Element>
        <<<static_cast<unsigned>(query_blocks), THREADS, 0, stream>>>(a, static_cast<int>(query_parts));
  if (a.d_sinks) attention_sink_gradient<<<static_cast<unsigned>(a.q_heads), THREADS, 0, stream>>>(a);
}

} // namespace
} // namespace general

cudaError_t attention_backward_general(const general::attention &a, element_kind element, cudaStream_t stream) {
  if (element == ELEMENT_BF16)
    general::launch<__nv_bfloat16>(a, stream);
  else if (element == ELEMENT_F16)
    general::launch<__half>(a, stream);
  else
    general::launch<float>(a, stream);
  return cudaPeekAtLastError();
}

} // namespace egi
