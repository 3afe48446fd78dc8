/* Attention backward for Hopper, gradients of keys and values; head sizes 64 to 128. Persistent blocks of one producer
 * warp and 2 consumer warpgroups with 64 key rows each; for each query head of the group in turn they walk the queries
 * that see the keys. Scores are computed with keys as rows: probabilities and score gradients then are left operands
 * straight from registers. The next tile's scores are queued before d_k's product, so that exponentials run under it.
 * fp32 accumulators; queries are summed in a fixed order, heads one after the other; no atomics on values. */
#include "backend/cuda/attention_sm90.cuh"

namespace egi {
namespace {

template <class Element_, int DIM, bool HAS_CAP> struct dkv_shape {
  using Element = Element_;
  static constexpr int dim = DIM, panels = DIM / 64, n_stages = DIM == 128 ? 3 : 4;
  static constexpr int own_stages = 2;
  static constexpr int groups = dkv_tile(DIM).groups, queries = dkv_tile(DIM).step;
  static constexpr bool has_cap = HAS_CAP;
  static constexpr int keys = 64 * groups, threads = WARPGROUP * (groups + 1);
  static constexpr int kv_panel = keys * panel_row_bytes, q_panel = queries * panel_row_bytes;
  static constexpr int kv_bytes = panels * kv_panel, q_bytes = panels * q_panel, pair_bytes = queries * 8;
  /* shared memory: key stages (k, then d_k; v, then d_v), q stages, d_out stages, row pairs, barriers, slots */
  static constexpr int v_at = kv_bytes, key_bytes = 2 * kv_bytes, q_at = own_stages * key_bytes;
  static constexpr int d_out_at = q_at + n_stages * q_bytes, pairs_at = d_out_at + n_stages * q_bytes;
  static constexpr int barriers_at = pairs_at + n_stages * pair_bytes;
  static constexpr int n_barriers = 2 * own_stages + 4 * n_stages + 2 * WORK_SLOTS;
  static constexpr int slots_at = barriers_at + 8 * n_barriers;
  static constexpr int shared_bytes = slots_at + WORK_SLOTS * static_cast<int>(sizeof(work_slot)) + 1024;
  static_assert(LEAST_ROWS % STORE_ROWS == 0, "a warp's rows must belong to one tile");
  static_assert(shared_bytes <= most_shared_bytes, "a block cannot have that much shared memory");
};

struct dkv_arguments {
  CUtensorMap q, d_out, k, v, d_k, d_v;
  egi_cuda_attention a;
  work_queue queue;
  const float2 *row_pairs;
  int64_t padded_rows;
};

template <class Shape>
__device__ __forceinline__ void copy_queries(const dkv_arguments &g, const pipeline<Shape> &b, int stage,
                                             unsigned phase, int row, int head) {
  barrier_wait(b.first_empty(stage), phase ^ 1);
  barrier_expect(b.first_full(stage), Shape::q_bytes + Shape::pair_bytes);
  copy_tile<Shape::panels>(b.base + Shape::q_at + stage * Shape::q_bytes, &g.q, b.first_full(stage), row, head,
                           Shape::q_panel);
  copy_bytes(b.base + Shape::pairs_at + stage * Shape::pair_bytes, g.row_pairs + head * g.padded_rows + row,
             Shape::pair_bytes, b.first_full(stage));
  barrier_wait(b.second_empty(stage), phase ^ 1);
  barrier_expect(b.second_full(stage), Shape::q_bytes);
  copy_tile<Shape::panels>(b.base + Shape::d_out_at + stage * Shape::q_bytes, &g.d_out, b.second_full(stage), row, head,
                           Shape::q_panel);
}

template <class Shape>
__device__ __forceinline__ void load_keys(const dkv_arguments &g, const pipeline<Shape> &b, work_slot *slots) {
  hand_out<Shape, false>(g.queue, b, slots, Shape::key_bytes, [&](int first_row, int head, int stage) {
    const unsigned to = b.base + stage * Shape::key_bytes, full = b.own_full(stage);
    copy_tile<Shape::panels>(to, &g.k, full, first_row, head, Shape::kv_panel);
    copy_tile<Shape::panels>(to + Shape::v_at, &g.v, full, first_row, head, Shape::kv_panel);
  });
}

template <class Shape>
__device__ __forceinline__ void load_rows(const dkv_arguments &g, const pipeline<Shape> &b, work_slot *slots) {
  const int group_heads = g.a.n_heads / g.a.n_kv_heads;
  ring<Shape::n_stages> pipe;
  follow(b, slots, [&](const item_view &item) {
    for (int h = 0; h < group_heads; h++)
      for (int j = 0; j < item.n_steps; j++) {
        copy_queries<Shape>(g, b, pipe.stage, pipe.phase, item.anchor + Shape::queries * j,
                            item.head * group_heads + h);
        pipe.advance();
      }
  });
}

/* One warpgroup's view of the current item. */
struct key_view {
  int low[2], high[2]; /* queries that see this thread's two keys */
  int last_key;        /* the first query that sees the warpgroup's last key */
  int edge, anchor, begin, end;
};

template <class Shape> struct consumer {
  const dkv_arguments &g;
  pipeline<Shape> b;
  int group, warp, lane;
  ring<Shape::n_stages> q, d_out;
  ring<Shape::own_stages> kv;
  using row_tile = float[Shape::queries / 2];
  using packed_tile = unsigned[Shape::queries / 4];
  using sum_tile = float[Shape::dim / 2];

  __device__ __forceinline__ unsigned own_keys(int stage) const {
    return b.base + stage * Shape::key_bytes + group * 64 * panel_row_bytes;
  }
  __device__ __forceinline__ void free_q() {
    barrier_arrive_warp(b.first_empty(q.stage), lane);
    q.advance();
  }
  __device__ __forceinline__ void free_d_out() {
    barrier_arrive_warp(b.second_empty(d_out.stage), lane);
    d_out.advance();
  }
  __device__ __forceinline__ void skip(int n) {
    for (int j = 0; j < n; j++) {
      barrier_wait(b.first_full(q.stage), q.phase);
      free_q();
      barrier_wait(b.second_full(d_out.stage), d_out.phase);
      free_d_out();
    }
  }
  __device__ __forceinline__ void start_scores(row_tile &s, const ring<Shape::n_stages> &at) const {
    barrier_wait(b.first_full(at.stage), at.phase);
    wgmma_fence();
    multiply_columns<typename Shape::Element, Shape::dim>(
        s, own_keys(kv.stage), Shape::kv_panel, b.base + Shape::q_at + at.stage * Shape::q_bytes, Shape::q_panel);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_d_weights(row_tile &dp) const {
    barrier_wait(b.second_full(d_out.stage), d_out.phase);
    wgmma_fence();
    multiply_columns<typename Shape::Element, Shape::dim>(dp, own_keys(kv.stage) + Shape::v_at, Shape::kv_panel,
                                                          b.base + Shape::d_out_at + d_out.stage * Shape::q_bytes,
                                                          Shape::q_panel);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dk(sum_tile &dk, const packed_tile &ds) const {
    multiply_rows<typename Shape::Element, Shape::queries>(dk, ds, b.base + Shape::q_at + q.stage * Shape::q_bytes);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dv(sum_tile &dv, const packed_tile &p) const {
    wgmma_fence();
    multiply_rows<typename Shape::Element, Shape::queries>(dv, p,
                                                           b.base + Shape::d_out_at + d_out.stage * Shape::q_bytes);
    wgmma_commit();
  }
  __device__ __forceinline__ float4 two_pairs(int stage, int i) const {
    float4 two;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(two.x), "=f"(two.y), "=f"(two.z), "=f"(two.w)
                 : "r"(b.base + Shape::pairs_at + stage * Shape::pair_bytes + 64 * i + 16 * (lane & 3)));
    return two;
  }
  /* Scores to probabilities; with a cap only to its tanh, since registers do not hold the slope as well: probabilities
   * are then computed where they are used, twice. */
  __device__ __forceinline__ void weigh(row_tile &s, const key_view &view, int j, int stage) const {
    const egi_cuda_attention &a = g.a;
    const float scale = a.scale * log2_e;
    if (Shape::has_cap) {
#pragma unroll
      for (int i = 0; i < Shape::queries / 2; i++) s[i] = tanh_of_scaled(s[i] * (2.0f * scale / a.softcap));
    }
    const int start = view.anchor + Shape::queries * j;
    if (start < view.last_key || start + Shape::queries - 1 > view.edge) {
      const int low[2] = {view.low[0] - start, view.low[1] - start};
      const int high[2] = {view.high[0] - start, view.high[1] - start};
      mask_tile(s, low, high, lane);
    }
    if (!Shape::has_cap) {
#pragma unroll
      for (int i = 0; i < Shape::queries / 8; i++) {
        const float4 two = two_pairs(stage, i);
#pragma unroll
        for (int e = 0; e < 4; e++) s[4 * i + e] = exp2_fast(fmaf(s[4 * i + e], scale, -(e & 1 ? two.z : two.x)));
      }
    }
  }
  __device__ __forceinline__ float capped_weight(float tanh, float lse) const {
    return exp2_fast(fmaf(tanh, g.a.softcap * log2_e, -lse));
  }
  __device__ __forceinline__ void pack_weights(const row_tile &s, packed_tile &p, int stage) const {
    if constexpr (!Shape::has_cap) {
      pack_tile<typename Shape::Element>(s, p);
    } else {
#pragma unroll
      for (int i = 0; i < Shape::queries / 8; i++) {
        const float4 two = two_pairs(stage, i);
#pragma unroll
        for (int r = 0; r < 2; r++)
          p[2 * i + r] = number_format<typename Shape::Element>::pack(capped_weight(s[4 * i + 2 * r], two.x),
                                                                      capped_weight(s[4 * i + 2 * r + 1], two.z));
      }
    }
  }
  /* v d_out^T has arrived: score gradients (before the factor `scale`), packed. */
  __device__ __forceinline__ void differentiate(const row_tile &s, row_tile &dp, packed_tile &ds, int stage) const {
#pragma unroll
    for (int i = 0; i < Shape::queries / 8; i++) {
      const float4 two = two_pairs(stage, i);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float weight = s[4 * i + e];
        if (Shape::has_cap) weight = capped_weight(weight, e & 1 ? two.z : two.x) * fmaxf(1.0f - weight * weight, 0.0f);
        dp[4 * i + e] = weight * (dp[4 * i + e] - (e & 1 ? two.w : two.y));
      }
    }
    pack_tile<typename Shape::Element>(dp, ds);
  }
  /* Passes the tiles between this warpgroup's last of one head and its first of the next; q's own tile is still held,
   * so at most n_stages - 2 of them. Returns the stage of the tile after them. */
  __device__ __forceinline__ ring<Shape::n_stages> pass(int gap) {
    ring<Shape::n_stages> next = q;
    next.advance();
    for (int n = 0; n < gap; n++) {
      barrier_wait(b.first_full(next.stage), next.phase);
      barrier_arrive_warp(b.first_empty(next.stage), lane);
      next.advance();
      barrier_wait(b.second_full(d_out.stage), d_out.phase);
      free_d_out();
    }
    return next;
  }
  /* `count` tiles from tile `begin` on, going around to the next head at `end` over `gap` tiles that only the other
   * warpgroup needs. Each turn ends with nothing in flight. */
  __device__ __forceinline__ void walk(sum_tile &dk, sum_tile &dv, const key_view &view, int count, int gap) {
    row_tile s, dp;
    packed_tile p, ds;
    start_scores(s, q);
    start_d_weights(dp);
    wgmma_wait<1>(s);
    weigh(s, view, view.begin, q.stage);
    pack_weights(s, p, q.stage);
    start_dv(dv, p);
    wgmma_wait<1>(dp);
    differentiate(s, dp, ds, q.stage);
    wgmma_wait<0>(dv);
    free_d_out();
    int j = view.begin;
    for (int n = 1; n < count; n++) {
      const bool is_around = j + 1 == view.end;
      j = is_around ? view.begin : j + 1;
      const ring<Shape::n_stages> next = pass(is_around ? gap : 0);
      start_scores(s, next);
      start_dk(dk, ds);
      start_d_weights(dp);
      wgmma_wait<2>(s);
      weigh(s, view, j, next.stage);
      if (Shape::dim == 64 && !Shape::has_cap) hold(s, -g.a.scale); /* at size 128 registers do not suffice */
      wgmma_wait<1>(dk);
      barrier_arrive_warp(b.first_empty(q.stage), lane);
      q = next;
      pack_weights(s, p, q.stage);
      start_dv(dv, p);
      wgmma_wait<1>(dp);
      differentiate(s, dp, ds, q.stage);
      if (Shape::dim == 64) hold(dp, -3e38f * g.a.scale);
      wgmma_wait<0>(dv);
      free_d_out();
    }
    wgmma_fence();
    start_dk(dk, ds);
    wgmma_wait<0>(dk);
    free_q();
  }
};

template <class Shape>
__device__ __forceinline__ void find_keys(const egi_cuda_attention &a, int first_key, int offset, int lane,
                                          key_view &view) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int key = first_key + 8 * r + (lane >> 2);
    view.low[r] = key - offset;
    view.high[r] = key < a.n_keys ? a.last_query[key] : -1;
  }
}

template <class Shape>
__device__ __forceinline__ void consume(const dkv_arguments &g, const pipeline<Shape> &b, const work_slot *slots) {
  const int warp = warp_number();
  consumer<Shape> me = {g, b, (warp >> 2) - 1, warp & 3, static_cast<int>(threadIdx.x) & 31};
  const int offset = query_offset(g.a), group_heads = g.a.n_heads / g.a.n_kv_heads;
  ring<WORK_SLOTS> slot;
  for (;;) {
    const item_view item = take_item(b, slots, slot, me.group, me.lane);
    const int head = item.head, n_tiles = item.n_steps;
    key_view view;
    view.begin = item.begin;
    view.end = item.end;
    view.edge = item.edge;
    view.anchor = item.anchor;
    if (head < 0) break;
    const int first_key = item.first_row + 64 * me.group + STORE_ROWS * me.warp;
    find_keys<Shape>(g.a, first_key, offset, me.lane, view);
    view.last_key = item.first_row + 64 * me.group + 63 - offset;
    float dk[Shape::dim / 2] = {}, dv[Shape::dim / 2] = {};
    barrier_wait(b.own_full(me.kv.stage), me.kv.phase);
    /* One walk over all heads of the group where few tiles lie between them, else one a head. */
    const int gap = n_tiles - view.end + view.begin, in_head = view.end - view.begin;
    const bool is_one_walk = gap <= Shape::n_stages - 2 && in_head > 0;
    const int n_walks = is_one_walk ? 1 : group_heads, count = in_head * (is_one_walk ? group_heads : 1);
    for (int n = 0; n < n_walks; n++) {
      me.skip(view.begin);
      if (count > 0) me.walk(dk, dv, view, count, gap);
      me.skip(n_tiles - view.end);
    }
    named_sync(1 + me.group, WARPGROUP); /* the warpgroup is done with its keys and values: their gradients go there */
    const float scale[2] = {g.a.scale, g.a.scale}, one[2] = {1.0f, 1.0f};
    const unsigned rows = me.own_keys(me.kv.stage) + STORE_ROWS * me.warp * panel_row_bytes;
    if (first_key < item.end_row) { /* the rest is the next tile's */
      store_tile<typename Shape::Element>(dk, scale, rows, Shape::kv_panel, {&g.d_k, first_key, head}, me.lane);
      store_tile<typename Shape::Element>(dv, one, rows + Shape::v_at, Shape::kv_panel, {&g.d_v, first_key, head},
                                          me.lane);
      if (me.lane == 0) store_wait_read();
    }
    barrier_arrive_warp(b.own_empty(me.kv.stage), me.lane);
    me.kv.advance();
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::threads, 1) attention_dkv_sm90(const __grid_constant__ dkv_arguments g) {
  const block_memory<Shape> m = set_up<Shape>(&g.q, &g.d_out, &g.k, &g.v, &g.d_k, &g.d_v);
  await_kernel_before();
  allow_kernel_after();
  if (threadIdx.x < WARPGROUP) {
    give_registers<24>();
    if (warp_number() == 0) load_keys(g, m.b, m.slots);
    if (warp_number() == 1) load_rows(g, m.b, m.slots);
  } else {
    take_registers<240>();
    consume(g, m.b, m.slots);
  }
}

template <class Element, int DIM, bool HAS_CAP>
egi_cuda_status launch(const egi_cuda_attention &a, cudaStream_t stream) {
  using Shape = dkv_shape<Element, DIM, HAS_CAP>;
  const attention_workspace w = carve_workspace(a, WORKSPACE_BACKWARD_SM90);
  dkv_arguments g = {};
  g.a = a;
  const row_extent queries = {a.n_queries, a.n_heads, a.head_dim}, keys = {a.n_keys, a.n_kv_heads, a.head_dim};
  if (!make_row_map(&g.q, a.q, queries, a.dtype, Shape::queries) ||
      !make_row_map(&g.d_out, a.d_out, queries, a.dtype, Shape::queries) ||
      !make_row_map(&g.k, a.k, keys, a.dtype, Shape::keys) || !make_row_map(&g.v, a.v, keys, a.dtype, Shape::keys) ||
      !make_row_map(&g.d_k, a.d_k, keys, a.dtype, STORE_ROWS) ||
      !make_row_map(&g.d_v, a.d_v, keys, a.dtype, STORE_ROWS))
    return EGI_CUDA_FAILED;
  g.row_pairs = w.row_pairs;
  g.padded_rows = w.padded_rows;
  const plan_lists lists = carve_plan(a, a.plan);
  const int n_tiles = static_cast<int>((a.n_keys + Shape::keys - 1) / Shape::keys); /* without cuts */
  g.queue = {lists.states + LIST_DKV, lists.tiles[LIST_DKV], a.n_kv_heads,
             heads_in_cache(a.n_queries, 4 * DIM * (a.n_heads / a.n_kv_heads), a.n_kv_heads, 1, n_tiles)};
  return launch_persistent<Shape>(attention_dkv_sm90<Shape>, g,
                                  static_cast<int64_t>(lists.most_tiles[LIST_DKV]) * a.n_kv_heads, stream);
}

template <class Element> egi_cuda_status choose(const egi_cuda_attention &a, cudaStream_t stream) {
  const bool has_cap = a.softcap > 0.0f;
  if (a.head_dim == 64) return has_cap ? launch<Element, 64, true>(a, stream) : launch<Element, 64, false>(a, stream);
  return has_cap ? launch<Element, 128, true>(a, stream) : launch<Element, 128, false>(a, stream);
}

} // namespace

egi_cuda_status backward_dkv_sm90(const egi_cuda_attention &a, cudaStream_t stream) {
  return a.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(a, stream) : choose<__half>(a, stream);
}

} // namespace egi
