/* Attention forward with mma.sync, sm_80 and later, every head size. A block owns a tile of query rows of one head and
 * walks the keys from the diagonal back to the first key that any of its rows sees; tiles end at the diagonal, so only
 * the last one may be part empty. fp32 accumulators; keys are summed in that fixed order. */
#include "backend/cuda/attention_mma.cuh"

namespace egi {
namespace {

template <int HEAD_DIM, int VALUE_DIM, int MT, int N_WARPS, int KEYS, int MIN_BLOCKS> struct forward_shape {
  static constexpr int copy_unroll = HEAD_DIM == 64 ? 8 : 2;
  static constexpr int head_dim = HEAD_DIM, value_dim = VALUE_DIM, m_tiles = MT, keys = KEYS;
  static constexpr int queries = 16 * MT * N_WARPS, threads = 32 * N_WARPS, min_blocks = MIN_BLOCKS;
  static constexpr int q_elements = queries * padded_columns<HEAD_DIM>;
  static constexpr int k_elements = keys * padded_columns<HEAD_DIM>;
  static constexpr int v_elements = keys * padded_columns<VALUE_DIM>;
  static constexpr int shared_bytes = 2 * (q_elements + k_elements + v_elements);
};

struct forward_grid {
  int n_tiles, heads_per_group;
};

/* What a warp knows of its rows. */
template <int MT> struct row_window {
  int low[MT][2], high[MT][2];
  int first_position, largest_first, smallest_first; /* over the warp's rows: last key of the first, first keys */
};

template <int MT>
__device__ __forceinline__ void find_windows(const egi_cuda_attention &a, int first_row, int offset, int lane,
                                             row_window<MT> &window) {
  window.first_position = first_row + offset;
  window.largest_first = 0;
  window.smallest_first = no_key;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      row_limits(a, first_row + 16 * m + 8 * r + (lane >> 2), offset, window.low[m][r], window.high[m][r]);
      window.largest_first = max(window.largest_first, window.low[m][r]);
      window.smallest_first = min(window.smallest_first, window.low[m][r]);
    }
  window.largest_first = __reduce_max_sync(0xffffffffu, window.largest_first);
  window.smallest_first = __reduce_min_sync(0xffffffffu, window.smallest_first);
}

/* Cap, mask and softmax of one tile of scores; older outputs are rescaled where a maximum moved. */
template <class Shape>
__device__ __forceinline__ void
score_to_weight(const egi_cuda_attention &a, float (&s)[Shape::m_tiles][Shape::keys / 2],
                float (&out)[Shape::m_tiles][Shape::value_dim / 2], const row_window<Shape::m_tiles> &window,
                softmax_state (&state)[Shape::m_tiles], int start) {
  const int lane = threadIdx.x & 31;
  const bool has_cap = a.softcap > 0.0f;
  const float scale = has_cap ? 1.0f : a.scale * log2_e;
  const bool is_partial = start < window.largest_first || start + Shape::keys - 1 > window.first_position;
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; m++) {
    if (has_cap) cap_tile(s[m], 2.0f * log2_e * a.scale / a.softcap, a.softcap * log2_e);
    if (is_partial) {
      const int low[2] = {window.low[m][0] - start, window.low[m][1] - start};
      const int high[2] = {window.high[m][0] - start, window.high[m][1] - start};
      mask_tile(s[m], low, high, lane);
    }
    float correction[2];
    softmax_tile(s[m], state[m], correction, scale);
    if (__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < Shape::value_dim / 2; i++) out[m][i] *= correction[(i >> 1) & 1];
    }
  }
}

template <class Element, class Shape>
__device__ __forceinline__ void
finish_tile(const egi_cuda_attention &a, float (&out)[Shape::m_tiles][Shape::value_dim / 2],
            const softmax_state (&state)[Shape::m_tiles], Element *staging, int head, int first_row) {
  const int lane = threadIdx.x & 31;
  const float scale = a.softcap > 0.0f ? 1.0f : a.scale * log2_e;
  const float sink = a.sinks ? a.sinks[head] : -CUDART_INF_F;
  float factor[Shape::m_tiles][2];
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float lse;
      factor[m][r] = finish_row(state[m].reference[r], state[m].sum[r], scale, sink, lse);
      const int row = first_row + 16 * m + 8 * r + (lane >> 2);
      if ((lane & 3) == 0 && row < a.n_queries) a.lse[head * a.n_queries + row] = lse;
    }
  const row_target to = {&a.out, head, first_row, static_cast<int>(a.n_queries), 0};
  store_rows<Element, padded_columns<Shape::head_dim>, Shape::m_tiles, Shape::value_dim>(out, factor, staging, to);
}

template <class Element, class Shape>
__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)
    attention_forward_mma(const egi_cuda_attention a, const forward_grid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  Element *q = reinterpret_cast<Element *>(shared), *k = q + Shape::q_elements, *v = k + Shape::k_elements;
  constexpr int keys = Shape::keys, threads = Shape::threads, m_tiles = Shape::m_tiles;
  const work_item work = find_work(blockIdx.x, grid.n_tiles, a.n_heads, grid.heads_per_group);
  const int first_query = (grid.n_tiles - 1 - work.tile) * Shape::queries;
  const int kv_head = work.head / (a.n_heads / a.n_kv_heads);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n_keys = static_cast<int>(a.n_keys);
  const int offset = query_offset(a), first_row = first_query + 16 * m_tiles * warp;
  const int n_queries = static_cast<int>(a.n_queries);

  row_window<m_tiles> window;
  find_windows(a, first_row, offset, lane, window);
  const int end = min(min(first_query + Shape::queries, n_queries) + offset, n_keys);
  const int2 firsts = first_key_range(a, first_query, Shape::queries, lane);
  const int n_tiles = firsts.x < end ? (end - firsts.x + keys - 1) / keys : 0;
  Element *q_rows = q + 16 * m_tiles * warp * padded_columns<Shape::head_dim>;

  float out[m_tiles][Shape::value_dim / 2] = {};
  softmax_state state[m_tiles];
#pragma unroll
  for (int m = 0; m < m_tiles; m++) state[m] = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};

  copy_rows<Element, Shape::queries, Shape::head_dim, threads>(q, a.q, work.head, first_query, n_queries);
  if (n_tiles > 0)
    copy_rows<Element, keys, Shape::head_dim, threads, Shape::copy_unroll>(k, a.k, kv_head, end - keys, n_keys);
  copy_commit();
  for (int j = 0; j < n_tiles; j++) {
    const int start = end - keys * (j + 1);
    copy_wait<0>();
    __syncthreads();
    copy_rows<Element, keys, Shape::value_dim, threads, Shape::copy_unroll>(v, a.v, kv_head, start, n_keys);
    copy_commit();
    /* tiles that none of the warp's rows sees: beside the diagonal, or in another document */
    const bool is_seen = start < window.first_position + 16 * m_tiles && start + keys > window.smallest_first;
    unsigned weights[m_tiles][keys / 4];
    if (is_seen) {
      float s[m_tiles][keys / 2];
      product_of_rows<Element, Shape::head_dim, m_tiles, keys>(s, q_rows, k, lane);
      score_to_weight<Shape>(a, s, out, window, state, start);
#pragma unroll
      for (int m = 0; m < m_tiles; m++) pack_tile<Element>(s[m], weights[m]);
    }
    copy_wait<0>();
    __syncthreads();
    if (j + 1 < n_tiles)
      copy_rows<Element, keys, Shape::head_dim, threads, Shape::copy_unroll>(k, a.k, kv_head, start - keys, n_keys);
    copy_commit();
    if (is_seen)
      product_with_rows<Element, padded_columns<Shape::value_dim>, keys, m_tiles, Shape::value_dim>(out, weights, v,
                                                                                                    lane);
  }
  copy_wait<0>();
  __syncthreads();
  finish_tile<Element, Shape>(a, out, state, q_rows, work.head, first_row);
}

template <class Element, class Shape> egi_cuda_status launch(const egi_cuda_attention &a, cudaStream_t stream) {
  forward_grid grid;
  grid.n_tiles = static_cast<int>((a.n_queries + Shape::queries - 1) / Shape::queries);
  const int step = a.n_heads / a.n_kv_heads;
  grid.heads_per_group = heads_in_cache(a.n_keys, 2 * (a.head_dim + a.value_dim), a.n_heads, step, grid.n_tiles);
  const auto kernel = attention_forward_mma<Element, Shape>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::shared_bytes) != cudaSuccess)
    return EGI_CUDA_FAILED;
  kernel<<<static_cast<unsigned>(grid.n_tiles * a.n_heads), Shape::threads, Shape::shared_bytes, stream>>>(a, grid);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

template <class Element> egi_cuda_status choose(const egi_cuda_attention &a, cudaStream_t stream) {
  switch (a.head_dim) {
  case 64:
    return launch<Element, forward_shape<64, 64, 2, 4, 64, 3>>(a, stream);
  case 80:
    return launch<Element, forward_shape<80, 80, 2, 4, 64, 2>>(a, stream);
  case 96:
    return launch<Element, forward_shape<96, 96, 2, 4, 64, 2>>(a, stream);
  case 128:
    return launch<Element, forward_shape<128, 128, 2, 4, 64, 2>>(a, stream);
  case 192:
    return launch<Element, forward_shape<192, 128, 1, 4, 64, 2>>(a, stream);
  case 256:
    if (most_block_bytes() >= forward_shape<256, 256, 1, 8, 64, 1>::shared_bytes)
      return launch<Element, forward_shape<256, 256, 1, 8, 64, 1>>(a, stream);
    return launch<Element, forward_shape<256, 256, 1, 4, 32, 2>>(a, stream);
  default:
    return EGI_CUDA_UNSUPPORTED;
  }
}

} // namespace

egi_cuda_status forward_mma(const egi_cuda_attention &a, cudaStream_t stream) {
  return a.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(a, stream) : choose<__half>(a, stream);
}

} // namespace egi
