/* Attention backward with mma.sync, gradient of the queries: a block owns query rows of one head and walks the keys as
 * forward does: scores again, d_out v^T, score gradients in registers, d_q += d_scores k. One key order, no atomics. */
#include "backend/cuda/attention_mma.cuh"

namespace egi {
namespace {

template <int HEAD_DIM, int VALUE_DIM, int MT, int N_WARPS, int KEYS> struct dq_shape {
  static constexpr int head_dim = HEAD_DIM, value_dim = VALUE_DIM, m_tiles = MT, keys = KEYS;
  static constexpr int queries = 16 * MT * N_WARPS, threads = 32 * N_WARPS, n_stages = 2;
  static constexpr int q_stride = padded_columns<HEAD_DIM>, v_stride = padded_columns<VALUE_DIM>;
  static constexpr int stage_elements = keys * (q_stride + v_stride);
  static constexpr int shared_bytes = 2 * (queries * (q_stride + v_stride) + n_stages * stage_elements);
};

struct dq_arguments {
  egi_cuda_attention a;
  const float2 *row_pairs;
  int64_t padded_rows;
  int n_tiles, heads_per_group;
};

template <int MT> struct row_state {
  int low[MT][2], high[MT][2], first_position, largest_first, smallest_first;
  float2 pair[MT][2];
};

template <int MT>
__device__ __forceinline__ void find_rows(const dq_arguments &g, int head, int first_row, int offset, int lane,
                                          row_state<MT> &rows) {
  rows.first_position = first_row + offset;
  rows.largest_first = 0;
  rows.smallest_first = no_key;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = first_row + 16 * m + 8 * r + (lane >> 2);
      row_limits(g.a, row, offset, rows.low[m][r], rows.high[m][r]);
      rows.largest_first = max(rows.largest_first, rows.low[m][r]);
      rows.smallest_first = min(rows.smallest_first, rows.low[m][r]);
      rows.pair[m][r] = g.row_pairs[head * g.padded_rows + row];
    }
  rows.largest_first = __reduce_max_sync(0xffffffffu, rows.largest_first);
  rows.smallest_first = __reduce_min_sync(0xffffffffu, rows.smallest_first);
}

/* Scores and d_out v^T to score gradients (before the factor `scale`), packed. */
template <class Element, class Shape, bool HAS_CAP>
__device__ __forceinline__ void
score_gradients(const egi_cuda_attention &a, float (&s)[Shape::m_tiles][Shape::keys / 2],
                float (&dp)[Shape::m_tiles][Shape::keys / 2], const row_state<Shape::m_tiles> &rows, int start,
                unsigned (&packed)[Shape::m_tiles][Shape::keys / 4]) {
  const int lane = threadIdx.x & 31;
  const bool is_partial = start < rows.largest_first || start + Shape::keys - 1 > rows.first_position;
  const float scale = a.scale * log2_e, inner = HAS_CAP ? 2.0f * scale / a.softcap : 0.0f, outer = a.softcap * log2_e;
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; m++) {
    if (is_partial) {
      const int low[2] = {rows.low[m][0] - start, rows.low[m][1] - start};
      const int high[2] = {rows.high[m][0] - start, rows.high[m][1] - start};
      mask_tile(s[m], low, high, lane);
    }
#pragma unroll
    for (int i = 0; i < Shape::keys / 2; i++) {
      const float2 pair = rows.pair[m][(i >> 1) & 1];
      float slope;
      const float p = probability<HAS_CAP>(s[m][i], pair.x, scale, inner, outer, slope);
      dp[m][i] = p * slope * (dp[m][i] - pair.y);
    }
    pack_tile<Element>(dp[m], packed[m]);
  }
}

template <class Element, class Shape>
__global__ void __launch_bounds__(Shape::threads, 2) attention_dq_mma(const dq_arguments g) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int keys = Shape::keys, threads = Shape::threads, m_tiles = Shape::m_tiles;
  Element *q = reinterpret_cast<Element *>(shared), *d_out = q + Shape::queries * Shape::q_stride;
  Element *stages = d_out + Shape::queries * Shape::v_stride;
  const egi_cuda_attention &a = g.a;
  const work_item work = find_work(blockIdx.x, g.n_tiles, a.n_heads, g.heads_per_group);
  const int first_query = (g.n_tiles - 1 - work.tile) * Shape::queries;
  const int kv_head = work.head / (a.n_heads / a.n_kv_heads);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int n_keys = static_cast<int>(a.n_keys), n_queries = static_cast<int>(a.n_queries);
  const int offset = query_offset(a), row_in_tile = 16 * m_tiles * warp;

  row_state<m_tiles> rows;
  find_rows(g, work.head, first_query + row_in_tile, offset, lane, rows);
  const int end = min(min(first_query + Shape::queries, n_queries) + offset, n_keys);
  const int2 firsts = first_key_range(a, first_query, Shape::queries, lane);
  const int n_tiles = firsts.x < end ? (end - firsts.x + keys - 1) / keys : 0;

  copy_rows<Element, Shape::queries, Shape::head_dim, threads>(q, a.q, work.head, first_query, n_queries);
  copy_rows<Element, Shape::queries, Shape::value_dim, threads>(d_out, a.d_out, work.head, first_query, n_queries);
  copy_commit();
  float dq[m_tiles][Shape::head_dim / 2] = {};
  for (int j = -1; j < n_tiles; j++) {
    if (j + 1 < n_tiles) {
      Element *next = stages + ((j + 1) & 1) * Shape::stage_elements;
      const int next_start = end - keys * (j + 2);
      if (j >= 0) copy_wait<0>();
      __syncthreads();
      copy_rows<Element, keys, Shape::head_dim, threads>(next, a.k, kv_head, next_start, n_keys);
      copy_rows<Element, keys, Shape::value_dim, threads>(next + keys * Shape::q_stride, a.v, kv_head, next_start,
                                                          n_keys);
      copy_commit();
    } else {
      copy_wait<0>();
      __syncthreads();
    }
    const int start = end - keys * (j + 1);
    if (j < 0 || start >= rows.first_position + 16 * m_tiles || start + keys <= rows.smallest_first) continue;
    const Element *k = stages + (j & 1) * Shape::stage_elements, *v = k + keys * Shape::q_stride;
    float s[m_tiles][keys / 2], dp[m_tiles][keys / 2];
    product_of_rows<Element, Shape::head_dim, m_tiles, keys>(s, q + row_in_tile * Shape::q_stride, k, lane);
    product_of_rows<Element, Shape::value_dim, m_tiles, keys>(dp, d_out + row_in_tile * Shape::v_stride, v, lane);
    unsigned packed[m_tiles][keys / 4];
    if (a.softcap > 0.0f)
      score_gradients<Element, Shape, true>(a, s, dp, rows, start, packed);
    else
      score_gradients<Element, Shape, false>(a, s, dp, rows, start, packed);
    product_with_rows<Element, Shape::q_stride, keys, m_tiles, Shape::head_dim>(dq, packed, k, lane);
  }
  copy_wait<0>();
  __syncthreads();
  float factor[m_tiles][2];
#pragma unroll
  for (int m = 0; m < m_tiles; m++) factor[m][0] = factor[m][1] = a.scale;
  const row_target to = {&a.d_q, work.head, first_query + row_in_tile, n_queries, 0};
  store_rows<Element, Shape::q_stride, m_tiles, Shape::head_dim>(dq, factor, q + row_in_tile * Shape::q_stride, to);
}

template <class Element, class Shape> egi_cuda_status launch(const egi_cuda_attention &a, cudaStream_t stream) {
  const attention_workspace w = carve_workspace(a, true);
  dq_arguments g = {a, w.row_pairs, w.padded_rows, 0, 0};
  g.n_tiles = static_cast<int>((a.n_queries + Shape::queries - 1) / Shape::queries);
  g.heads_per_group =
      heads_in_cache(a.n_keys, 2 * (a.head_dim + a.value_dim), a.n_heads, a.n_heads / a.n_kv_heads, g.n_tiles);
  const auto kernel = attention_dq_mma<Element, Shape>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::shared_bytes) != cudaSuccess)
    return EGI_CUDA_FAILED;
  kernel<<<static_cast<unsigned>(g.n_tiles * a.n_heads), Shape::threads, Shape::shared_bytes, stream>>>(g);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

template <class Element> egi_cuda_status choose(const egi_cuda_attention &a, cudaStream_t stream) {
  switch (a.head_dim) {
  case 64:
    return launch<Element, dq_shape<64, 64, 2, 4, 32>>(a, stream);
  case 80:
    return launch<Element, dq_shape<80, 80, 1, 4, 64>>(a, stream);
  case 96:
    return launch<Element, dq_shape<96, 96, 1, 4, 64>>(a, stream);
  case 128:
    return launch<Element, dq_shape<128, 128, 2, 4, 32>>(a, stream);
  case 192:
    return launch<Element, dq_shape<192, 128, 1, 4, 32>>(a, stream);
  case 256:
    return launch<Element, dq_shape<256, 256, 1, 4, 16>>(a, stream);
  default:
    return EGI_CUDA_UNSUPPORTED;
  }
}

} // namespace

egi_cuda_status backward_dq_mma(const egi_cuda_attention &a, cudaStream_t stream) {
  return a.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(a, stream) : choose<__half>(a, stream);
}

} // namespace egi
