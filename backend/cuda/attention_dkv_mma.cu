/* Attention backward with mma.sync, gradients of keys and values: a block owns key rows of one key head and walks, for
 * each query head of its group in turn, the queries that see them. Scores are computed with keys as rows, so that
 * probabilities and score gradients stay in registers as left operands. One query order, no atomics. With COLUMN_PARTS
 * 2, two warps share their rows and each sums half of the output columns (head size 256 would not fit otherwise). */
#include "backend/cuda/attention_mma.cuh"

namespace egi {
namespace {

template <int HEAD_DIM, int VALUE_DIM, int MT, int COLUMN_PARTS, int QUERIES> struct dkv_shape {
  static constexpr int head_dim = HEAD_DIM, value_dim = VALUE_DIM, m_tiles = MT, queries = QUERIES,
                       parts = COLUMN_PARTS;
  static constexpr int keys = 64 * MT, threads = 128 * COLUMN_PARTS, n_stages = 2;
  static constexpr int q_stride = padded_columns<HEAD_DIM>, v_stride = padded_columns<VALUE_DIM>;
  /* a stage: queries, their gradients, their row pairs (head size 256 has no room for these on every chip) */
  static constexpr bool has_pairs = HEAD_DIM != 256;
  static constexpr int pairs_at = queries * (q_stride + v_stride);
  static constexpr int stage_elements = pairs_at + (has_pairs ? 4 * queries : 0);
  static constexpr int shared_bytes = 2 * (keys * (q_stride + v_stride) + n_stages * stage_elements);
};

struct dkv_arguments {
  egi_cuda_attention a;
  const float2 *row_pairs;
  int64_t padded_rows;
  int n_tiles, heads_per_group;
};

/* The key rows of a thread: which queries see them. */
template <int MT> struct key_state {
  int low[MT][2], high[MT][2];
  int first_query, last_key, smallest_last, largest_last; /* over the rows of the warp */
};

template <int MT>
__device__ __forceinline__ void find_keys(const egi_cuda_attention &a, int first_key, int offset, int lane,
                                          key_state<MT> &keys) {
  keys.smallest_last = INT_MAX;
  keys.largest_last = -1;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int key = first_key + 16 * m + 8 * r + (lane >> 2);
      keys.low[m][r] = key - offset;
      keys.high[m][r] = key < a.n_keys ? a.last_query[key] : -1;
      keys.smallest_last = min(keys.smallest_last, keys.high[m][r]);
      keys.largest_last = max(keys.largest_last, keys.high[m][r]);
    }
  keys.first_query = first_key - offset;
  keys.last_key = keys.first_query + 16 * MT - 1;
  keys.smallest_last = __reduce_min_sync(0xffffffffu, keys.smallest_last);
  keys.largest_last = __reduce_max_sync(0xffffffffu, keys.largest_last);
}

/* One step: its first query and the row pairs from that one on. */
template <int MT> struct step_view {
  const key_state<MT> &keys;
  int start;
  const float2 *pairs;
};

/* Scores (keys as rows) to packed probabilities and score gradients (before the factor `scale`). */
template <class Element, int N, bool HAS_CAP, int MT>
__device__ __forceinline__ void weigh_tile(const egi_cuda_attention &a, float (&s)[MT][N / 2], float (&dp)[MT][N / 2],
                                           const step_view<MT> &step, unsigned (&weights)[MT][N / 4],
                                           unsigned (&gradients)[MT][N / 4]) {
  const int lane = threadIdx.x & 31, start = step.start;
  const key_state<MT> &keys = step.keys;
  const float scale = a.scale * log2_e, inner = HAS_CAP ? 2.0f * scale / a.softcap : 0.0f, outer = a.softcap * log2_e;
  if (start < keys.last_key || start + N - 1 > keys.smallest_last) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const int low[2] = {keys.low[m][0] - start, keys.low[m][1] - start};
      const int high[2] = {keys.high[m][0] - start, keys.high[m][1] - start};
      mask_tile(s[m], low, high, lane);
    }
  }
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    const float4 two = *reinterpret_cast<const float4 *>(step.pairs + 8 * i + 2 * (lane & 3));
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float slope;
        const float p = probability<HAS_CAP>(s[m][4 * i + e], e & 1 ? two.z : two.x, scale, inner, outer, slope);
        s[m][4 * i + e] = p;
        dp[m][4 * i + e] = p * slope * (dp[m][4 * i + e] - (e & 1 ? two.w : two.y));
      }
  }
#pragma unroll
  for (int m = 0; m < MT; m++) {
    pack_tile<Element>(s[m], weights[m]);
    pack_tile<Element>(dp[m], gradients[m]);
  }
}

template <class Element, class Shape>
__device__ __forceinline__ void load_stage(const dkv_arguments &g, Element *stage, int head, int start) {
  constexpr int queries = Shape::queries, threads = Shape::threads;
  const int n_queries = static_cast<int>(g.a.n_queries);
  copy_rows<Element, queries, Shape::head_dim, threads, 2>(stage, g.a.q, head, start, n_queries);
  copy_rows<Element, queries, Shape::value_dim, threads, 2>(stage + queries * Shape::q_stride, g.a.d_out, head, start,
                                                            n_queries);
  if (Shape::has_pairs && threadIdx.x < queries / 2)
    copy_16_bytes(shared_address(stage + Shape::pairs_at + 8 * threadIdx.x),
                  g.row_pairs + head * g.padded_rows + start + 2 * threadIdx.x, true);
  copy_commit();
}

/* One tile of queries for a warp: adds to the gradients of its keys and values. */
template <class Element, class Shape>
__device__ __forceinline__ void add_step(const egi_cuda_attention &a, const Element *const (&own)[2],
                                         const Element *stage, const step_view<Shape::m_tiles> &step,
                                         float (&dk)[Shape::m_tiles][Shape::head_dim / Shape::parts / 2],
                                         float (&dv)[Shape::m_tiles][Shape::value_dim / Shape::parts / 2]) {
  constexpr int queries = Shape::queries, m_tiles = Shape::m_tiles;
  constexpr int k_columns = Shape::head_dim / Shape::parts, v_columns = Shape::value_dim / Shape::parts;
  const int lane = threadIdx.x & 31, part = (threadIdx.x >> 5) % Shape::parts;
  const Element *d_out = stage + queries * Shape::q_stride;
  float s[m_tiles][queries / 2], dp[m_tiles][queries / 2];
  product_of_rows<Element, Shape::head_dim, m_tiles, queries>(s, own[0], stage, lane);
  product_of_rows<Element, Shape::value_dim, m_tiles, queries>(dp, own[1], d_out, lane);
  unsigned weights[m_tiles][queries / 4], gradients[m_tiles][queries / 4];
  if (a.softcap > 0.0f)
    weigh_tile<Element, queries, true>(a, s, dp, step, weights, gradients);
  else
    weigh_tile<Element, queries, false>(a, s, dp, step, weights, gradients);
  product_with_rows<Element, Shape::v_stride, queries, m_tiles, v_columns>(dv, weights, d_out + part * v_columns, lane);
  product_with_rows<Element, Shape::q_stride, queries, m_tiles, k_columns>(dk, gradients, stage + part * k_columns,
                                                                           lane);
}

template <class Element, class Shape>
__global__ void __launch_bounds__(Shape::threads, 2 / Shape::parts) attention_dkv_mma(const dkv_arguments g) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int queries = Shape::queries, parts = Shape::parts, m_tiles = Shape::m_tiles;
  constexpr int k_columns = Shape::head_dim / parts, v_columns = Shape::value_dim / parts;
  Element *k = reinterpret_cast<Element *>(shared), *v = k + Shape::keys * Shape::q_stride;
  Element *stages = v + Shape::keys * Shape::v_stride;
  const egi_cuda_attention &a = g.a;
  const work_item work = find_work(blockIdx.x, g.n_tiles, a.n_kv_heads, g.heads_per_group);
  const int first_key = work.tile * Shape::keys, group = a.n_heads / a.n_kv_heads, offset = query_offset(a);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row_in_tile = 16 * m_tiles * (warp / parts);
  const int n_keys = static_cast<int>(a.n_keys), part = warp % parts;

  key_state<m_tiles> keys;
  find_keys(a, first_key + row_in_tile, offset, lane, keys);
  const int first = max(first_key - offset, 0) & ~7;
  const int end = min(last_query_range(a, first_key, Shape::keys, lane).y + 1, static_cast<int>(a.n_queries));
  const int n_steps = first < end ? (end - first + queries - 1) / queries : 0;

  copy_rows<Element, Shape::keys, Shape::head_dim, Shape::threads>(k, a.k, work.head, first_key, n_keys);
  copy_rows<Element, Shape::keys, Shape::value_dim, Shape::threads>(v, a.v, work.head, first_key, n_keys);
  copy_commit();
  if (n_steps > 0) load_stage<Element, Shape>(g, stages, work.head * group, first);
  k += row_in_tile * Shape::q_stride;
  v += row_in_tile * Shape::v_stride;
  float dk[m_tiles][k_columns / 2] = {}, dv[m_tiles][v_columns / 2] = {};
  int head = work.head * group, step = 0;
  for (int i = 0; i < n_steps * group; i++) {
    const bool is_last_of_head = step + 1 == n_steps;
    const int next_head = head + is_last_of_head, next_step = is_last_of_head ? 0 : step + 1;
    const Element *stage = stages + (i & 1) * Shape::stage_elements;
    copy_wait<0>();
    __syncthreads();
    if (i + 1 < n_steps * group)
      load_stage<Element, Shape>(g, stages + ((i + 1) & 1) * Shape::stage_elements, next_head,
                                 first + next_step * queries);
    const int start = first + step * queries;
    const float2 *pairs = Shape::has_pairs ? reinterpret_cast<const float2 *>(stage + Shape::pairs_at)
                                           : g.row_pairs + head * g.padded_rows + start;
    if (start + queries > keys.first_query && start <= keys.largest_last)
      add_step<Element, Shape>(a, {k, v}, stage, {keys, start, pairs}, dk, dv);
    head = next_head;
    step = next_step;
  }
  copy_wait<0>();
  __syncthreads();
  float one[m_tiles][2], scale[m_tiles][2];
#pragma unroll
  for (int m = 0; m < m_tiles; m++) {
    one[m][0] = one[m][1] = 1.0f;
    scale[m][0] = scale[m][1] = a.scale;
  }
  const row_target to_k = {&a.d_k, work.head, first_key + row_in_tile, n_keys, part * k_columns};
  const row_target to_v = {&a.d_v, work.head, first_key + row_in_tile, n_keys, part * v_columns};
  store_rows<Element, Shape::q_stride, m_tiles, k_columns>(dk, scale, k, to_k);
  store_rows<Element, Shape::v_stride, m_tiles, v_columns>(dv, one, v, to_v);
}

template <class Element, class Shape> egi_cuda_status launch(const egi_cuda_attention &a, cudaStream_t stream) {
  const attention_workspace w = carve_workspace(a, true);
  dkv_arguments g = {a, w.row_pairs, w.padded_rows, 0, 0};
  g.n_tiles = static_cast<int>((a.n_keys + Shape::keys - 1) / Shape::keys);
  const int row_bytes = 2 * (a.head_dim + a.value_dim) * (a.n_heads / a.n_kv_heads);
  g.heads_per_group = heads_in_cache(a.n_queries, row_bytes, a.n_kv_heads, 1, g.n_tiles);
  const auto kernel = attention_dkv_mma<Element, Shape>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::shared_bytes) != cudaSuccess)
    return EGI_CUDA_FAILED;
  kernel<<<static_cast<unsigned>(g.n_tiles * a.n_kv_heads), Shape::threads, Shape::shared_bytes, stream>>>(g);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

template <class Element> egi_cuda_status choose(const egi_cuda_attention &a, cudaStream_t stream) {
  switch (a.head_dim) {
  case 64:
    return launch<Element, dkv_shape<64, 64, 2, 1, 32>>(a, stream);
  case 80:
    return launch<Element, dkv_shape<80, 80, 1, 1, 32>>(a, stream);
  case 96:
    return launch<Element, dkv_shape<96, 96, 1, 1, 32>>(a, stream);
  case 128:
    return launch<Element, dkv_shape<128, 128, 1, 1, 32>>(a, stream);
  case 192:
    return launch<Element, dkv_shape<192, 128, 1, 1, 16>>(a, stream);
  case 256:
    return launch<Element, dkv_shape<256, 256, 1, 2, 16>>(a, stream);
  default:
    return EGI_CUDA_UNSUPPORTED;
  }
}

} // namespace

egi_cuda_status backward_dkv_mma(const egi_cuda_attention &a, cudaStream_t stream) {
  return a.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(a, stream) : choose<__half>(a, stream);
}

} // namespace egi
