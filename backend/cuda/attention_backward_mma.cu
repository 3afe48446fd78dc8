/* Attention backward with mma.sync: a block owns key rows of one key head and walks the queries that see them, from the
 * last to the first, the query heads of its group side by side. Scores are computed with keys as rows, so probabilities
 * and score gradients are left operands of d_v and d_k as they come out of products; score gradients also go through
 * shared memory for the block's part of d_q. These parts are added up in fp32 in the order of the key tiles: a block
 * waits until the one before it has added its part (blocks take tiles in that order, so that one has started), which it
 * has long done, since its walk began earlier. Five products; every sum has one order. What bounds it is reading
 * operands from shared memory: 32 rows a warp halve that, and where sums of so many do not fit, two warps share them.
 */
#include "backend/cuda/attention_backward_mma.cuh"

namespace egi {
namespace {

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
__device__ __forceinline__ void load_stage(const backward_arguments &g, Element *stage, int head, int start) {
  constexpr int queries = Shape::queries, threads = Shape::threads;
  const int n_queries = static_cast<int>(g.a.n_queries);
  copy_rows<Element, queries, Shape::head_dim, threads, 4>(stage, g.a.q, head, start, n_queries);
  copy_rows<Element, queries, Shape::value_dim, threads, 4>(stage + queries * Shape::q_stride, g.a.d_out, head, start,
                                                            n_queries);
  if (threadIdx.x < queries / 2)
    copy_16_bytes(shared_address(stage + Shape::pairs_at + 8 * threadIdx.x),
                  g.row_pairs + head * g.padded_rows + start + 2 * threadIdx.x, true);
  copy_commit();
}

/* A warp's packed tile of keys by a slice of queries to its place in [keys, queries]. */
template <class Shape, class Element>
__device__ __forceinline__ void store_packed(const unsigned (&packed)[Shape::m_tiles][Shape::slice / 4], Element *place,
                                             int lane) {
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; m++)
#pragma unroll
    for (int i = 0; i < Shape::slice / 4; i++)
      *reinterpret_cast<unsigned *>(place + (16 * m + 8 * (i & 1) + (lane >> 2)) * Shape::s_stride + 8 * (i >> 1) +
                                    2 * (lane & 3)) = packed[m][i];
}

/* What a warp works on: its rows of keys and values, and of what they make of the step's queries. */
template <class Element> struct warp_tiles {
  const Element *k, *v;
  Element *ds, *weights;
};

/* Probabilities and score gradients of a slice of queries. */
template <class Element, class Shape>
__device__ __forceinline__ void find_gradients(const egi_cuda_attention &a, const warp_tiles<Element> &own,
                                               const Element *const (&other)[2], const step_view<Shape::m_tiles> &step,
                                               unsigned (&weights)[Shape::m_tiles][Shape::slice / 4],
                                               unsigned (&gradients)[Shape::m_tiles][Shape::slice / 4]) {
  constexpr int slice = Shape::slice, m_tiles = Shape::m_tiles;
  const int lane = threadIdx.x & 31;
  float s[m_tiles][slice / 2], dp[m_tiles][slice / 2];
  product_of_rows<Element, Shape::head_dim, m_tiles, slice>(s, own.k, other[0], lane);
  product_of_rows<Element, Shape::value_dim, m_tiles, slice>(dp, own.v, other[1], lane);
  if (a.softcap > 0.0f)
    weigh_tile<Element, slice, true>(a, s, dp, step, weights, gradients);
  else
    weigh_tile<Element, slice, false>(a, s, dp, step, weights, gradients);
}

template <class Shape> struct key_sums {
  float dk[Shape::m_tiles][Shape::k_columns / 2], dv[Shape::m_tiles][Shape::v_columns / 2];
};

/* A step of a warp that has its rows for itself. */
template <class Element, class Shape>
__device__ __forceinline__ void step_alone(const egi_cuda_attention &a, const warp_tiles<Element> &own,
                                           const Element *stage, const step_view<Shape::m_tiles> &step,
                                           key_sums<Shape> &sums) {
  constexpr int slice = Shape::slice, m_tiles = Shape::m_tiles;
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int first = 0; first < Shape::queries; first += slice) {
    const int start = step.start + first;
    unsigned weights[m_tiles][slice / 4], gradients[m_tiles][slice / 4] = {};
    const bool is_seen = start + slice > step.keys.first_query && start <= step.keys.largest_last;
    const Element *const other[2] = {stage + first * Shape::q_stride,
                                     stage + Shape::queries * Shape::q_stride + first * Shape::v_stride};
    if (is_seen)
      find_gradients<Element, Shape>(a, own, other, {step.keys, start, step.pairs + first}, weights, gradients);
    store_packed<Shape>(gradients, own.ds + first, lane);
    if (!is_seen) continue;
    product_with_rows<Element, Shape::v_stride, slice, m_tiles, Shape::v_columns>(sums.dv, weights, other[1], lane);
    product_with_rows<Element, Shape::q_stride, slice, m_tiles, Shape::k_columns>(sums.dk, gradients, other[0], lane);
  }
}

/* The first half of a step of a warp that shares its rows: its half of the queries. */
template <class Element, class Shape>
__device__ __forceinline__ void step_of_pair(const egi_cuda_attention &a, const warp_tiles<Element> &own,
                                             const Element *stage, const step_view<Shape::m_tiles> &step) {
  constexpr int slice = Shape::slice, m_tiles = Shape::m_tiles;
  const int lane = threadIdx.x & 31, first = slice * ((threadIdx.x >> 5) % Shape::parts), start = step.start + first;
  unsigned weights[m_tiles][slice / 4] = {}, gradients[m_tiles][slice / 4] = {};
  const Element *const other[2] = {stage + first * Shape::q_stride,
                                   stage + Shape::queries * Shape::q_stride + first * Shape::v_stride};
  if (start + slice > step.keys.first_query && start <= step.keys.largest_last)
    find_gradients<Element, Shape>(a, own, other, {step.keys, start, step.pairs + first}, weights, gradients);
  store_packed<Shape>(weights, own.weights + first, lane);
  store_packed<Shape>(gradients, own.ds + first, lane);
}

/* acc[MT][N / 2] += A B: A is MT x 16 rows of DEPTH columns, B has DEPTH rows of which N columns count, both in shared
 * memory. */
template <class Element, int DEPTH, int STRIDE, int MT, int N>
__device__ __forceinline__ void product_from_shared(float (&acc)[MT][N / 2], const Element *a, const Element *b,
                                                    int lane) {
  constexpr int a_stride = padded_columns<DEPTH>;
  const unsigned a_base = shared_address(a + (lane & 15) * a_stride + 8 * (lane >> 4));
  const unsigned b_base = shared_address(b + ((lane & 7) + 8 * ((lane >> 3) & 1)) * STRIDE + 8 * (lane >> 4));
#pragma unroll
  for (int k = 0; k < DEPTH / 16; k++) {
    unsigned left[MT][4], right[2][4];
#pragma unroll
    for (int m = 0; m < MT; m++) load_matrices(left[m], a_base + 2 * (16 * m * a_stride + 16 * k));
    load_matrices_transposed(right[0], b_base + 2 * 16 * k * STRIDE);
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
      if (n + 1 < N / 16) load_matrices_transposed(right[(n + 1) & 1], b_base + 2 * (16 * k * STRIDE + 16 * (n + 1)));
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma<Element>::run(&acc[m][8 * n], left[m], right[n & 1][0], right[n & 1][1]);
        mma<Element>::run(&acc[m][8 * n + 4], left[m], right[n & 1][2], right[n & 1][3]);
      }
    }
  }
}

/* The second half, once both have left theirs: all of the queries, half of the columns. */
template <class Element, class Shape>
__device__ __forceinline__ void add_of_pair(const warp_tiles<Element> &own, const Element *stage,
                                            const step_view<Shape::m_tiles> &step, key_sums<Shape> &sums) {
  constexpr int queries = Shape::queries, m_tiles = Shape::m_tiles;
  if (step.start + queries <= step.keys.first_query || step.start > step.keys.largest_last) return;
  const int lane = threadIdx.x & 31, part = (threadIdx.x >> 5) % Shape::parts;
  product_from_shared<Element, queries, Shape::v_stride, m_tiles, Shape::v_columns>(
      sums.dv, own.weights, stage + queries * Shape::q_stride + part * Shape::v_columns, lane);
  product_from_shared<Element, queries, Shape::q_stride, m_tiles, Shape::k_columns>(
      sums.dk, own.ds, stage + part * Shape::k_columns, lane);
}

/* d_k and d_v of a warp, by way of its rows of keys and values. */
template <class Element, class Shape>
__device__ __forceinline__ void store_sums(const egi_cuda_attention &a, const key_sums<Shape> &sums, Element *k,
                                           Element *v, const work_item &work, int first_row) {
  const int part = (threadIdx.x >> 5) % Shape::parts, n_keys = static_cast<int>(a.n_keys);
  float one[Shape::m_tiles][2], scale[Shape::m_tiles][2];
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; m++) {
    one[m][0] = one[m][1] = 1.0f;
    scale[m][0] = scale[m][1] = a.scale;
  }
  const row_target to_k = {&a.d_k, work.head, first_row, n_keys, part * Shape::k_columns};
  const row_target to_v = {&a.d_v, work.head, first_row, n_keys, part * Shape::v_columns};
  store_rows<Element, Shape::q_stride, Shape::m_tiles, Shape::k_columns>(sums.dk, scale, k, to_k);
  store_rows<Element, Shape::v_stride, Shape::m_tiles, Shape::v_columns>(sums.dv, one, v, to_v);
}

/* Where a block's walk is: a tile of queries of one head of its group. */
struct walk_place {
  int query_tile, member;
  __device__ __forceinline__ walk_place after(int group) const {
    const bool is_last = member + 1 == group;
    return {query_tile - is_last, is_last ? 0 : member + 1};
  }
};

/* All steps of a block, whose keys and values are on their way. */
template <class Element, class Shape>
__device__ __forceinline__ void walk(const backward_arguments &g, const work_item &work,
                                     const key_state<Shape::m_tiles> &keys, Element *k, const warp_tiles<Element> &own,
                                     key_sums<Shape> &sums) {
  constexpr int queries = Shape::queries, n_stages = Shape::n_stages;
  const egi_cuda_attention &a = g.a;
  Element *ds = k + Shape::scores_at, *stages = k + Shape::stages_at;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = a.n_heads / a.n_kv_heads;
  const int2 query_tiles = find_query_tiles<Shape>(a, work.tile, query_offset(a), lane);
  const int n_steps = max(query_tiles.y - query_tiles.x + 1, 0) * group, first_head = work.head * group;
  const int dq_row = 16 * Shape::dq_tiles * (warp / Shape::column_parts), dq_column = first_dq_column<Shape>(warp);
  walk_place at = {query_tiles.y, 0};
  if (n_steps > 0) load_stage<Element, Shape>(g, stages, first_head, at.query_tile * queries);
  int tile_first_key = n_steps > 0 ? a.first_key[at.query_tile * queries] : 0; /* of the query tile's first row */
  dq_notice notice = {nullptr, 0};
  for (int i = 0; i < n_steps; i++) {
    const walk_place next = at.after(group);
    const Element *stage = stages + i % n_stages * Shape::stage_elements;
    if (n_stages == 1 && i > 0) {
      __syncthreads();
      load_stage<Element, Shape>(g, stages, first_head + at.member, at.query_tile * queries);
    }
    copy_wait<0>();
    __syncthreads();
    const int next_first_key = i + 1 < n_steps ? a.first_key[next.query_tile * queries] : 0;
    if (n_stages == 2 && i + 1 < n_steps)
      load_stage<Element, Shape>(g, stages + (i + 1) % 2 * Shape::stage_elements, first_head + next.member,
                                 next.query_tile * queries);
    const step_view<Shape::m_tiles> step = {keys, at.query_tile * queries,
                                            reinterpret_cast<const float2 *>(stage + Shape::pairs_at)};
    if (Shape::parts == 1)
      step_alone<Element, Shape>(a, own, stage, step, sums);
    else
      step_of_pair<Element, Shape>(a, own, stage, step);
    __syncthreads();
    /* of the whole block, by way of the barrier; the step before's additions have had a step's time to land */
    if (notice.count && threadIdx.x == 0) store_release(notice.count, notice.n_parts);
    notice.count = nullptr;
    if (Shape::parts == 2) add_of_pair<Element, Shape>(own, stage, step, sums);
    dq_turn turn = find_turn<Shape>(g, work.tile, first_head + at.member, at.query_tile, tile_first_key);
    if (turn.is_part) {
      if (lane == 0) turn.n_parts = load_count(g.dq_counts + turn.place);
      float dq[Shape::dq_tiles][Shape::dq_columns / 2];
      multiply_dq<Element, Shape>(dq, ds + dq_row, k + dq_column, lane);
      add_dq<Element, Shape>(g, dq, turn);
      if (!turn.is_last) notice = {g.dq_counts + turn.place, turn.n_before + 1};
    }
    at = next;
    tile_first_key = next_first_key;
  }
  copy_wait<0>();
  __syncthreads();
  if (notice.count && threadIdx.x == 0) store_release(notice.count, notice.n_parts);
}

template <class Element, class Shape>
__global__ void __launch_bounds__(Shape::threads, Shape::blocks) attention_backward_mma(const backward_arguments g) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int item;
  Element *k = reinterpret_cast<Element *>(shared), *v = k + Shape::keys * Shape::q_stride, *ds = k + Shape::scores_at;
  const egi_cuda_attention &a = g.a;
  if (threadIdx.x == 0) item = atomicAdd(g.next_item, 1);
  __syncthreads();
  /* all heads of a tile, then the next: who waits for each other begins as far apart as can be */
  const work_item work = {item / a.n_kv_heads, item % a.n_kv_heads};
  const int first_key = work.tile * Shape::keys, n_keys = static_cast<int>(a.n_keys);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row_in_tile = 16 * Shape::m_tiles * (warp / Shape::parts);
  key_state<Shape::m_tiles> keys;
  find_keys(a, first_key + row_in_tile, query_offset(a), lane, keys);
  copy_rows<Element, Shape::keys, Shape::head_dim, Shape::threads>(k, a.k, work.head, first_key, n_keys);
  copy_rows<Element, Shape::keys, Shape::value_dim, Shape::threads>(v, a.v, work.head, first_key, n_keys);
  copy_commit();
  Element *own_k = k + row_in_tile * Shape::q_stride, *own_v = v + row_in_tile * Shape::v_stride;
  const warp_tiles<Element> own = {own_k, own_v, ds + row_in_tile * Shape::s_stride,
                                   ds + (Shape::keys + row_in_tile) * Shape::s_stride};
  key_sums<Shape> sums = {};
  walk<Element, Shape>(g, work, keys, k, own, sums);
  store_sums<Element, Shape>(a, sums, own_k, own_v, work, first_key + row_in_tile);
}

template <class Element, class Shape> egi_cuda_status launch(const egi_cuda_attention &a, cudaStream_t stream) {
  const attention_workspace w = carve_workspace(a, WORKSPACE_BACKWARD_MMA);
  backward_arguments g = {a, w.row_pairs, w.padded_rows, w.dq_sums, w.dq_counts + 1, w.dq_counts, 0, 0};
  g.n_tiles = static_cast<int>((a.n_keys + Shape::keys - 1) / Shape::keys);
  g.n_query_tiles = static_cast<int>((a.n_queries + Shape::queries - 1) / Shape::queries);
  static_assert(Shape::queries >= LEAST_DQ_ROWS && MOST_DQ_ROWS % Shape::queries == 0, "counts have no room");
  static_assert(Shape::dq_floats == Shape::queries * dq_row_floats(Shape::head_dim), "sums have no room");
  const size_t n_counts = 1 + static_cast<size_t>(a.n_heads) * static_cast<size_t>(g.n_query_tiles);
  const auto kernel = attention_backward_mma<Element, Shape>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::shared_bytes) != cudaSuccess ||
      cudaMemsetAsync(w.dq_counts, 0, n_counts * sizeof(int), stream) != cudaSuccess)
    return EGI_CUDA_FAILED;
  kernel<<<static_cast<unsigned>(g.n_tiles * a.n_kv_heads), Shape::threads, Shape::shared_bytes, stream>>>(g);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

/* The first shape whose block has room on this device. */
template <class Element, class Shape, class... Smaller>
egi_cuda_status launch_fitting(const egi_cuda_attention &a, cudaStream_t stream) {
  if constexpr (sizeof...(Smaller) > 0)
    if (most_block_bytes() < Shape::shared_bytes) return launch_fitting<Element, Smaller...>(a, stream);
  return launch<Element, Shape>(a, stream);
}

template <class Element> egi_cuda_status choose(const egi_cuda_attention &a, cudaStream_t stream) {
  switch (a.head_dim) {
  case 64:
    return launch<Element, backward_shape<64, 64, 2, 1, 64>>(a, stream);
  case 80:
    return launch<Element, backward_shape<80, 80, 2, 1, 32>>(a, stream);
  case 96:
    return launch_fitting<Element, backward_shape<96, 96, 2, 2, 64>, backward_shape<96, 96, 1, 1, 32>>(a, stream);
  case 128:
    return launch_fitting<Element, backward_shape<128, 128, 2, 2, 64>, backward_shape<128, 128, 2, 2, 32>,
                          backward_shape<128, 128, 1, 1, 32>>(a, stream);
  case 192:
    return launch_fitting<Element, backward_shape<192, 128, 2, 2, 32>, backward_shape<192, 128, 1, 2, 32, 2>>(a,
                                                                                                              stream);
  case 256:
    return launch_fitting<Element, backward_shape<256, 256, 1, 2, 64>, backward_shape<256, 256, 1, 2, 32>,
                          backward_shape<256, 256, 1, 2, 32, 2, 1>>(a, stream);
  default:
    return EGI_CUDA_UNSUPPORTED;
  }
}

} // namespace

egi_cuda_status backward_mma(const egi_cuda_attention &a, cudaStream_t stream) {
  return a.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(a, stream) : choose<__half>(a, stream);
}

} // namespace egi
