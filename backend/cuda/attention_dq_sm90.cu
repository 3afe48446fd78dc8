/* Attention backward for Hopper, gradient of the queries; head sizes 64 to 128. Persistent blocks of one producer warp
 * and 2 consumer warpgroups with 64 query rows each. For each tile of keys: scores again, d_out v^T, score gradients in
 * registers, d_q += d_scores k. The products of tile j + 1 are queued before d_q's of tile j, so that exponentials run
 * under them. fp32 accumulators; keys are summed from the diagonal back, in a fixed order; no atomics on values. */
#include "backend/cuda/attention_sm90.cuh"

namespace egi {
namespace {

template <class Element_, int DIM, bool HAS_CAP> struct dq_shape {
  using Element = Element_;
  static constexpr int dim = DIM, panels = DIM / 64, n_stages = 3, own_stages = 2;
  static constexpr int groups = dq_tile(DIM).groups, keys = dq_tile(DIM).step;
  static constexpr bool has_cap = HAS_CAP, takes_turns = DIM == 64;
  static constexpr int queries = 64 * groups, threads = WARPGROUP * (groups + 1);
  static constexpr int q_panel = queries * panel_row_bytes, kv_panel = keys * panel_row_bytes;
  static constexpr int q_bytes = panels * q_panel, kv_bytes = panels * kv_panel;
  /* shared memory: row stages (q, then d_q; d_out), k stages, v stages, barriers, slots */
  static constexpr int d_out_at = q_bytes, row_bytes = 2 * q_bytes, k_at = own_stages * row_bytes,
                       v_at = k_at + n_stages * kv_bytes;
  static constexpr int barriers_at = v_at + n_stages * kv_bytes;
  static constexpr int n_barriers = 2 * own_stages + 4 * n_stages + 2 * WORK_SLOTS;
  static constexpr int slots_at = barriers_at + 8 * n_barriers;
  static constexpr int shared_bytes = slots_at + WORK_SLOTS * static_cast<int>(sizeof(work_slot)) + 1024;
  static_assert(shared_bytes <= most_shared_bytes, "a block cannot have that much shared memory");
};

struct dq_arguments {
  CUtensorMap q, d_out, k, v, d_q;
  egi_cuda_attention a;
  work_queue queue;
  head_packing packing;
  const float2 *row_pairs;
  int64_t padded_rows;
};

template <class Shape>
__device__ __forceinline__ void load_rows(const dq_arguments &g, const pipeline<Shape> &b, work_slot *slots) {
  hand_out<Shape, true>(g.queue, b, slots, Shape::row_bytes, [&](int first_row, int head, int stage) {
    const unsigned to = b.base + stage * Shape::row_bytes, full = b.own_full(stage);
    const int first_head = head * g.packing.n_heads;
    copy_packed<Shape::groups, Shape::panels>(to, &g.q, full, first_row, first_head, g.packing);
    copy_packed<Shape::groups, Shape::panels>(to + Shape::d_out_at, &g.d_out, full, first_row, first_head, g.packing);
  });
}

struct row_view {
  int low[2], high[2], first_position, edge, anchor;
  float lse[2], delta[2];
};

/* What a thread holds of the current item. */
template <class Shape> struct row_tiles {
  float s[Shape::keys / 2], dp[Shape::keys / 2], dq[Shape::dim / 2];
  unsigned ds[Shape::keys / 4];
};

/* What is still to be done for the item before. */
struct item_before {
  int head, first_row, stage; /* no item: head -1; its rows' stage */
  bool is_open;               /* d_q lacks the last tile */
  bool holds_rows;            /* d_q is on its way out of the rows' stage */
};

template <class Shape> struct consumer {
  using tiles = row_tiles<Shape>;
  const dq_arguments &g;
  pipeline<Shape> b;
  int group, warp, lane;
  ring<Shape::n_stages> k, v;
  ring<Shape::own_stages> rows;
  using row_tile = float[Shape::keys / 2];
  using packed_tile = unsigned[Shape::keys / 4];
  using sum_tile = float[Shape::dim / 2];

  __device__ __forceinline__ void wait_turn() const {
    if (Shape::takes_turns) named_sync(1 + Shape::groups + group, 2 * WARPGROUP);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (Shape::takes_turns) named_arrive(2 * Shape::groups - group, 2 * WARPGROUP);
  }
  __device__ __forceinline__ void free_k() {
    barrier_arrive_warp(b.first_empty(k.stage), lane);
    k.advance();
  }
  __device__ __forceinline__ void free_v() {
    barrier_arrive_warp(b.second_empty(v.stage), lane);
    v.advance();
  }
  /* Tiles that only other warpgroups need. */
  __device__ __forceinline__ void skip_v(int n) {
    for (int j = 0; j < n; j++) {
      barrier_wait(b.second_full(v.stage), v.phase);
      free_v();
    }
  }
  __device__ __forceinline__ void skip(int n) {
    for (int j = 0; j < n; j++) {
      wait_turn();
      pass_turn();
      barrier_wait(b.first_full(k.stage), k.phase);
      free_k();
      skip_v(1);
    }
  }
  /* Tiles of k after the one still held; returns the place of the tile behind them. */
  __device__ __forceinline__ ring<Shape::n_stages> pass_k(int n) const {
    ring<Shape::n_stages> next = k;
    next.advance();
    for (int j = 0; j < n; j++) {
      wait_turn();
      pass_turn();
      barrier_wait(b.first_full(next.stage), next.phase);
      barrier_arrive_warp(b.first_empty(next.stage), lane);
      next.advance();
    }
    return next;
  }
  __device__ __forceinline__ unsigned own_rows(int stage) const {
    return b.base + stage * Shape::row_bytes + group * 64 * panel_row_bytes;
  }
  __device__ __forceinline__ void start_scores(row_tile &s, const ring<Shape::n_stages> &at) const {
    wgmma_fence();
    multiply_columns<typename Shape::Element, Shape::dim>(
        s, own_rows(rows.stage), Shape::q_panel, b.base + Shape::k_at + at.stage * Shape::kv_bytes, Shape::kv_panel);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_d_weights(row_tile &dp) const {
    barrier_wait(b.second_full(v.stage), v.phase);
    wgmma_fence();
    multiply_columns<typename Shape::Element, Shape::dim>(dp, own_rows(rows.stage) + Shape::d_out_at, Shape::q_panel,
                                                          b.base + Shape::v_at + v.stage * Shape::kv_bytes,
                                                          Shape::kv_panel);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dq(sum_tile &dq, const packed_tile &ds) const {
    multiply_rows<typename Shape::Element, Shape::keys>(dq, ds, b.base + Shape::k_at + k.stage * Shape::kv_bytes);
    wgmma_commit();
  }
  /* Scores to probabilities; with a cap only to its tanh: registers do not hold the slope as well. */
  __device__ __forceinline__ void weigh(row_tile &s, const row_view &view, int j) const {
    const egi_cuda_attention &a = g.a;
    const float scale = a.scale * log2_e;
    if (Shape::has_cap) {
#pragma unroll
      for (int i = 0; i < Shape::keys / 2; i++) s[i] = tanh_of_scaled(s[i] * (2.0f * scale / a.softcap));
    }
    const int start = view.anchor - Shape::keys * (j + 1);
    if (start < view.edge || start + Shape::keys - 1 > view.first_position) {
      const int low[2] = {view.low[0] - start, view.low[1] - start};
      const int high[2] = {view.high[0] - start, view.high[1] - start};
      mask_tile(s, low, high, lane);
    }
    if (!Shape::has_cap) {
#pragma unroll
      for (int i = 0; i < Shape::keys / 2; i++) s[i] = exp2_fast(fmaf(s[i], scale, -view.lse[(i >> 1) & 1]));
    }
  }
  /* d_out v^T has arrived: score gradients (before the factor `scale`), packed; v's tile is free. */
  __device__ __forceinline__ void differentiate(const row_tile &s, row_tile &dp, const row_view &view,
                                                packed_tile &ds) {
    free_v();
    const float outer = g.a.softcap * log2_e;
#pragma unroll
    for (int i = 0; i < Shape::keys / 2; i++) {
      float weight = s[i];
      if (Shape::has_cap)
        weight = exp2_fast(fmaf(weight, outer, -view.lse[(i >> 1) & 1])) * fmaxf(1.0f - weight * weight, 0.0f);
      dp[i] = weight * (dp[i] - view.delta[(i >> 1) & 1]);
    }
    pack_tile<typename Shape::Element>(dp, ds);
  }
  /* The first tile's products alone, to score gradients; k's tile stays held. */
  __device__ __forceinline__ void step_alone(tiles &t, const row_view &view, int j) {
    barrier_wait(b.first_full(k.stage), k.phase);
    wait_turn();
    start_scores(t.s, k);
    start_d_weights(t.dp);
    pass_turn();
    wgmma_wait<1>(t.s);
    weigh(t.s, view, j);
    wgmma_wait<0>(t.dp);
    differentiate(t.s, t.dp, view, t.ds);
  }
  /* Products of tile j, at `next`, and d_q's of the tile before, whose place then is free. */
  __device__ __forceinline__ void step(tiles &t, const row_view &view, int j, ring<Shape::n_stages> next,
                                       item_before &before) {
    barrier_wait(b.first_full(next.stage), next.phase);
    wait_turn();
    start_scores(t.s, next);
    start_dq(t.dq, t.ds);
    start_d_weights(t.dp);
    pass_turn();
    free_rows(before);
    wgmma_wait<2>(t.s);
    weigh(t.s, view, j);
    if (!Shape::has_cap) hold(t.s, -g.a.scale);
    wgmma_wait<0>(t.dp);
    barrier_arrive_warp(b.first_empty(k.stage), lane);
    k = next;
    differentiate(t.s, t.dp, view, t.ds);
  }
  /* d_q of an item's last tile alone. */
  __device__ __forceinline__ void end_walk(tiles &t) {
    wgmma_fence();
    start_dq(t.dq, t.ds);
    wgmma_wait<0>(t.dq);
    free_k();
  }
  /* Sends d_q out through the item's own rows of q. */
  __device__ __forceinline__ void finish(const tiles &t, item_before &before) const {
    const float factor[2] = {g.a.scale, g.a.scale};
    named_sync(1 + group, WARPGROUP); /* the warpgroup is done with them */
    store_tile<typename Shape::Element>(t.dq, factor, own_rows(before.stage) + STORE_ROWS * warp * panel_row_bytes,
                                        Shape::q_panel, {&g.d_q, before.first_row, before.head}, lane);
    before.holds_rows = true;
  }
  __device__ __forceinline__ void free_rows(item_before &before) const {
    if (!before.holds_rows) return;
    if (lane == 0) store_wait_read();
    barrier_arrive_warp(b.own_empty(before.stage), lane);
    before.holds_rows = false;
  }
  /* Ends the item before by itself. */
  __device__ __forceinline__ void close(tiles &t, item_before &before) {
    if (before.is_open) end_walk(t);
    if (before.head < 0) return;
    finish(t, before);
    free_rows(before);
  }
  /* The item's first tile, together with the last of the item before where that goes on (closed otherwise). */
  __device__ __forceinline__ void begin(tiles &t, const row_view &view, const item_view &item, item_before &before,
                                        bool goes_on) {
    if (goes_on) {
      const ring<Shape::n_stages> next = pass_k(item.begin);
      skip_v(item.begin);
      step(t, view, item.begin, next, before);
      finish(t, before);
    } else {
      skip(item.begin);
      if (item.begin < item.end) step_alone(t, view, item.begin);
    }
    reset(t.dq);
  }
  __device__ __forceinline__ void walk(tiles &t, const row_view &view, const item_view &item, item_before &before) {
    for (int j = item.begin + 1; j < item.end; j++) step(t, view, j, pass_k(0), before);
    free_rows(before);
  }
  /* Passes the item's tiles behind this warpgroup's last. */
  __device__ __forceinline__ void leave(tiles &t, const item_view &item, item_before &before) {
    before.is_open = item.begin < item.end;
    if (item.n_steps == item.end) return;
    if (before.is_open) end_walk(t);
    before.is_open = false;
    skip(item.n_steps - item.end);
  }
};

/* Limits and row pairs of the thread's two rows; nothing waits for them yet. */
__device__ __forceinline__ void find_rows(const dq_arguments &g, int head, int first_row, int offset, int lane,
                                          row_view &view) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + 8 * r + (lane >> 2);
    row_limits(g.a, row, offset, view.low[r], view.high[r]);
    const float2 pair = __ldcg(g.row_pairs + head * g.padded_rows + row);
    view.lse[r] = pair.x;
    view.delta[r] = pair.y;
  }
}

/* Items follow each other without a break, as in forward: d_q's last product of one runs with the first of the next. */
template <class Shape>
__device__ __forceinline__ void consume(const dq_arguments &g, const pipeline<Shape> &b, const work_slot *slots) {
  const int warp = warp_number();
  consumer<Shape> me = {g, b, (warp >> 2) - 1, warp & 3, static_cast<int>(threadIdx.x) & 31};
  const int offset = query_offset(g.a);
  ring<WORK_SLOTS> slot;
  row_tiles<Shape> t;
  item_before before = {-1, 0, 0, false, false};
  if (me.group == Shape::groups - 1) me.pass_turn();
  for (;;) {
    const item_view item = take_item(b, slots, slot, me.group, me.lane);
    const bool goes_on = before.is_open && item.head >= 0 && item.begin < item.end && item.begin <= Shape::n_stages - 2;
    if (!goes_on) me.close(t, before);
    if (item.head < 0) break;
    const warp_rows rows = find_warp_rows(item, g.packing, me.group, me.warp);
    row_view view;
    view.edge = item.edge;
    view.anchor = item.anchor;
    view.first_position = rows.first_token + offset;
    find_rows(g, rows.head, rows.first_row, offset, me.lane, view);
    barrier_wait(b.own_full(me.rows.stage), me.rows.phase);
    me.begin(t, view, item, before, goes_on);
    me.walk(t, view, item, before);
    me.leave(t, item, before);
    before.head = rows.head;
    before.first_row = rows.first_row;
    before.stage = me.rows.stage;
    me.rows.advance();
  }
  if (me.group == 0) me.wait_turn();
}

template <class Shape>
__global__ void __launch_bounds__(Shape::threads, 1) attention_dq_sm90(const __grid_constant__ dq_arguments g) {
  const block_memory<Shape> m = set_up<Shape>(&g.q, &g.d_out, &g.k, &g.v, &g.d_q);
  if (threadIdx.x < WARPGROUP) {
    give_registers<40>();
    if (warp_number() == 0) load_rows(g, m.b, m.slots);
    if (warp_number() == 1) load_keys(m.b, m.slots, &g.k, &g.v, g.a.n_heads / g.a.n_kv_heads / g.packing.n_heads);
  } else {
    take_registers<232>();
    consume(g, m.b, m.slots);
  }
  await_kernel_before();
}

template <class Element, int DIM, bool HAS_CAP>
egi_cuda_status launch(const egi_cuda_attention &a, cudaStream_t stream) {
  using Shape = dq_shape<Element, DIM, HAS_CAP>;
  const attention_workspace w = carve_workspace(a, WORKSPACE_BACKWARD_SM90);
  dq_arguments g = {};
  g.a = a;
  const int packed = count_packed_heads(a);
  g.packing = {packed, 64 / packed};
  const row_extent queries = {a.n_queries, a.n_heads, a.head_dim}, keys = {a.n_keys, a.n_kv_heads, a.head_dim};
  if (!make_row_map(&g.q, a.q, queries, a.dtype, g.packing.tokens) ||
      !make_row_map(&g.d_out, a.d_out, queries, a.dtype, g.packing.tokens) ||
      !make_row_map(&g.k, a.k, keys, a.dtype, Shape::keys) || !make_row_map(&g.v, a.v, keys, a.dtype, Shape::keys) ||
      !make_row_map(&g.d_q, a.d_q, queries, a.dtype, STORE_ROWS))
    return EGI_CUDA_FAILED;
  g.row_pairs = w.row_pairs;
  g.padded_rows = w.padded_rows;
  const plan_lists lists = carve_plan(a, a.plan);
  const int n_heads = a.n_heads / packed, n_tiles = lists.most_tiles[LIST_DQ];
  g.queue = {lists.states + LIST_DQ, lists.tiles[LIST_DQ], n_heads,
             heads_in_cache(a.n_keys, 4 * DIM, n_heads, n_heads / a.n_kv_heads, n_tiles)};
  return launch_persistent<Shape>(attention_dq_sm90<Shape>, g, static_cast<int64_t>(n_tiles) * n_heads, stream);
}

template <class Element> egi_cuda_status choose(const egi_cuda_attention &a, cudaStream_t stream) {
  const bool has_cap = a.softcap > 0.0f;
  if (a.head_dim == 64) return has_cap ? launch<Element, 64, true>(a, stream) : launch<Element, 64, false>(a, stream);
  return has_cap ? launch<Element, 128, true>(a, stream) : launch<Element, 128, false>(a, stream);
}

} // namespace

egi_cuda_status backward_dq_sm90(const egi_cuda_attention &a, cudaStream_t stream) {
  return a.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(a, stream) : choose<__half>(a, stream);
}

} // namespace egi
