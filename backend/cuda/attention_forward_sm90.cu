/* Attention forward for Hopper, head sizes 64 to 128. Persistent blocks of one producer warp and 2 (size 128) or 3
 * (size 64) consumer warpgroups with 64 query rows each; keys come in tiles of 128 through a ring of copies. Within a
 * warpgroup the scores of tile j + 1 are multiplied while tile j's values are, and warpgroups take turns at the tensor
 * cores so that one's softmax runs under another's products (FlashAttention-3, Shah et al. 2024). fp32 accumulators;
 * keys are summed from the diagonal back, in a fixed order. */
#include "backend/cuda/attention_sm90.cuh"

namespace egi {
namespace {

template <class Element_, int DIM, bool HAS_CAP> struct forward_shape {
  using Element = Element_;
  static constexpr int dim = DIM, panels = DIM / 64, groups = forward_tile(DIM).groups, keys = forward_tile(DIM).step;
  static constexpr int n_stages = DIM == 128 ? 2 : 4, own_stages = 2;
  static constexpr bool has_cap = HAS_CAP;
  static constexpr int queries = 64 * groups, threads = WARPGROUP * (groups + 1);
  static constexpr int producer_registers = groups == 2 ? 40 : 32, consumer_registers = groups == 2 ? 232 : 160;
  static constexpr int q_panel = queries * panel_row_bytes, kv_panel = keys * panel_row_bytes;
  static constexpr int q_bytes = panels * q_panel, kv_bytes = panels * kv_panel;
  /* shared memory: q stages, out, k stages, v stages, barriers, slots */
  static constexpr int out_at = own_stages * q_bytes, k_at = out_at + q_bytes, v_at = k_at + n_stages * kv_bytes;
  static constexpr int barriers_at = v_at + n_stages * kv_bytes;
  static constexpr int n_barriers = 2 * own_stages + 4 * n_stages + 2 * WORK_SLOTS;
  static constexpr int slots_at = barriers_at + 8 * n_barriers;
  static constexpr int shared_bytes = slots_at + WORK_SLOTS * static_cast<int>(sizeof(work_slot)) + 1024;
  static_assert(shared_bytes <= most_shared_bytes, "a block cannot have that much shared memory");
};

struct forward_arguments {
  CUtensorMap q, k, v, out;
  egi_cuda_attention a;
  work_queue queue;
  head_packing packing;
};

template <class Shape>
__device__ __forceinline__ void load_rows(const forward_arguments &g, const pipeline<Shape> &b, work_slot *slots) {
  hand_out<Shape, true>(g.queue, b, slots, Shape::q_bytes, [&](int first_row, int head, int stage) {
    copy_packed<Shape::groups, Shape::panels>(b.base + stage * Shape::q_bytes, &g.q, b.own_full(stage), first_row,
                                              head * g.packing.n_heads, g.packing);
  });
}

/* One warpgroup's view of the current item. */
struct row_view {
  int low[2], high[2]; /* keys that this thread's two rows see */
  int first_position;  /* key position of the warpgroup's first row */
  int edge, least, anchor;
};

/* What a thread holds of the current item. */
template <class Shape> struct row_tiles {
  float s[64], out[Shape::dim / 2], correction[2];
  unsigned weights[32];
  softmax_state state;
};

/* What is still to be done for the item before. */
struct item_before {
  int head, first_row; /* no item: head -1 */
  int n_left;          /* tiles whose values are to be passed */
  bool is_open;        /* the values of its last tile are to be multiplied */
};

template <class Shape> struct consumer {
  using tiles = row_tiles<Shape>;
  const forward_arguments &g;
  pipeline<Shape> b;
  int group, warp, lane;
  ring<Shape::n_stages> k, v;
  ring<Shape::own_stages> q;

  __device__ __forceinline__ void wait_turn() const { named_sync(1 + group, 2 * WARPGROUP); }
  __device__ __forceinline__ void pass_turn() const {
    named_arrive(1 + (group + 1 == Shape::groups ? 0 : group + 1), 2 * WARPGROUP);
  }
  __device__ __forceinline__ void free_k() {
    barrier_arrive_warp(b.first_empty(k.stage), lane);
    k.advance();
  }
  __device__ __forceinline__ void free_v() {
    barrier_arrive_warp(b.second_empty(v.stage), lane);
    v.advance();
  }
  /* Tiles that only other warpgroups need: keep in step. */
  __device__ __forceinline__ void skip_k(int n) {
    for (int j = 0; j < n; j++) {
      wait_turn();
      pass_turn();
      barrier_wait(b.first_full(k.stage), k.phase);
      free_k();
    }
  }
  __device__ __forceinline__ void skip_v(int n) {
    for (int j = 0; j < n; j++) {
      barrier_wait(b.second_full(v.stage), v.phase);
      free_v();
    }
  }
  __device__ __forceinline__ void start_scores(float (&s)[64]) const {
    const unsigned rows = b.base + q.stage * Shape::q_bytes + group * 64 * panel_row_bytes;
    wgmma_fence();
    multiply_columns<typename Shape::Element, Shape::dim>(
        s, rows, Shape::q_panel, b.base + Shape::k_at + k.stage * Shape::kv_bytes, Shape::kv_panel);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_output(float (&out)[Shape::dim / 2], const unsigned (&weights)[32]) const {
    multiply_rows<typename Shape::Element, Shape::keys>(out, weights, b.base + Shape::v_at + v.stage * Shape::kv_bytes);
    wgmma_commit();
  }
  __device__ __forceinline__ float score_scale() const { return Shape::has_cap ? 1.0f : g.a.scale * log2_e; }
  /* Masks of the upper half of a tile, and of the lower one where that is seen at all. */
  __device__ __forceinline__ void mask(float (&s)[64], const row_view &view, int start, bool has_lower) const {
    const int first = 2 * (lane & 3), half = Shape::keys / 2;
    if (start < view.edge) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const unsigned seen = ~columns_before(view.low[r] - start, first);
        select_columns<32, 64>(s, r, seen);
        if (has_lower) select_columns<0, 32>(s, r, seen);
      }
    }
    if (start + Shape::keys - 1 > view.first_position) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const unsigned seen = columns_before(view.high[r] + 1 - start, first);
        select_columns<32, 64>(s, r, seen);
        if (start + half - 1 > view.first_position) select_columns<0, 32>(s, r, seen);
      }
    }
  }
  /* References of both rows from scores in registers BEGIN .. 63. */
  template <int BEGIN>
  __device__ __forceinline__ void find_references(const float (&s)[64], softmax_state &state, float (&shift)[2],
                                                  float (&correction)[2]) const {
    int bits[2];
    float largest[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      bits[r] = quad_max(row_max_bits<BEGIN, 64>(s, r, state.reference[r]));
      largest[r] = __int_as_float(bits[r]);
    }
    if (__any_sync(0xffffffffu, bits[0] <= 0 || bits[1] <= 0)) {
#pragma unroll
      for (int r = 0; r < 2; r++) largest[r] = quad_max(row_max<BEGIN, 64>(s, r, state.reference[r]));
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      correction[r] = move_reference(state.reference[r], largest[r], score_scale(), shift[r]);
      state.sum[r] *= correction[r];
    }
  }
  /* The first part of a tile's softmax: all but the exponentials of its upper half. */
  __device__ __forceinline__ void weigh_lower(float (&s)[64], const row_view &view, int j, softmax_state &state,
                                              float (&shift)[2], float (&correction)[2]) const {
    const egi_cuda_attention &a = g.a;
    if (Shape::has_cap) cap_tile(s, 2.0f * log2_e * a.scale / a.softcap, a.softcap * log2_e);
    const int start = view.anchor - Shape::keys * (j + 1);
    const bool has_lower = start + Shape::keys / 2 > view.least;
    mask(s, view, start, has_lower);
    if (has_lower) {
      find_references<0>(s, state, shift, correction);
      exponentials<0, 32>(s, shift, score_scale(), state.sum);
    } else {
      find_references<32>(s, state, shift, correction);
#pragma unroll
      for (int i = 0; i < 32; i++) s[i] = 0.0f;
    }
  }
  /* The same where no values are held back: any number of tiles. */
  __device__ __forceinline__ void skip(int n) {
    for (int j = 0; j < n; j++) {
      skip_k(1);
      skip_v(1);
    }
  }
  /* The scores of a tile alone, to exponentials. */
  __device__ __forceinline__ void step_alone(tiles &t, const row_view &view, int j, softmax_state &state) {
    barrier_wait(b.first_full(k.stage), k.phase);
    wait_turn();
    start_scores(t.s);
    pass_turn();
    wgmma_wait<0>(t.s);
    free_k();
    float shift[2];
    weigh_lower(t.s, view, j, state, shift, t.correction);
    exponentials<32, 64>(t.s, shift, score_scale(), state.sum);
  }
  /* The scores of tile j, to exponentials, and under the first half of these the values of the tile before: packing
   * weights, which needs the registers of those before, then runs under the second half. */
  __device__ __forceinline__ void step(tiles &t, const row_view &view, int j, softmax_state &state) {
    barrier_wait(b.first_full(k.stage), k.phase);
    wait_turn();
    start_scores(t.s);
    barrier_wait(b.second_full(v.stage), v.phase);
    start_output(t.out, t.weights);
    pass_turn();
    wgmma_wait<1>(t.s);
    free_k();
    float shift[2];
    weigh_lower(t.s, view, j, state, shift, t.correction);
    hold(state.sum[0] + state.sum[1], -g.a.scale);
    wgmma_wait<0>(t.out);
    free_v();
    exponentials<32, 64>(t.s, shift, score_scale(), state.sum);
  }
  /* The values of an item's last tile alone. */
  __device__ __forceinline__ void end_walk(tiles &t) {
    barrier_wait(b.second_full(v.stage), v.phase);
    wgmma_fence();
    start_output(t.out, t.weights);
    wgmma_wait<0>(t.out);
    free_v();
  }
  __device__ __forceinline__ void finish(const tiles &t, const item_before &before) const {
    const egi_cuda_attention &a = g.a;
    const float sink = a.sinks ? a.sinks[before.head] : -CUDART_INF_F;
    float factor[2], lse[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
      factor[r] = finish_row(t.state.reference[r], t.state.sum[r], score_scale(), sink, lse[r]);
    if (lane == 0) store_wait_read();
    __syncwarp();
    const unsigned tile = b.base + Shape::out_at + (64 * group + STORE_ROWS * warp) * panel_row_bytes;
    store_tile<typename Shape::Element>(t.out, factor, tile, Shape::q_panel, {&g.out, before.first_row, before.head},
                                        lane);
    store_lse(a, before.head, before.first_row, lse, lane);
  }
  /* Ends the item before by itself. */
  __device__ __forceinline__ void close(tiles &t, const item_before &before) {
    if (before.is_open) end_walk(t);
    skip_v(before.n_left);
    if (before.head >= 0) finish(t, before);
  }
  /* The item's first tile, together with the last of the item before where that goes on (closed otherwise). */
  __device__ __forceinline__ void begin(tiles &t, const row_view &view, const item_view &item,
                                        const item_before &before, bool goes_on) {
    softmax_state fresh = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    if (goes_on) {
      skip_k(item.begin);
      step(t, view, item.begin, fresh);
      pack_tile<typename Shape::Element>(t.s, t.weights);
      skip_v(before.n_left + item.begin);
      finish(t, before);
    } else {
      skip(item.begin);
      if (item.begin < item.end) {
        step_alone(t, view, item.begin, fresh);
        pack_tile<typename Shape::Element>(t.s, t.weights);
      }
    }
    reset(t.out);
    t.state = fresh;
  }
  __device__ __forceinline__ void walk(tiles &t, const row_view &view, const item_view &item) {
    for (int j = item.begin + 1; j < item.end; j++) {
      step(t, view, j, t.state);
      if (__any_sync(0xffffffffu, t.correction[0] != 1.0f || t.correction[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < Shape::dim / 2; i++) t.out[i] *= t.correction[(i >> 1) & 1];
      }
      pack_tile<typename Shape::Element>(t.s, t.weights);
    }
  }
  /* Passes the item's tiles behind this warpgroup's last. */
  __device__ __forceinline__ void leave(tiles &t, const item_view &item, item_before &before) {
    before.is_open = item.begin < item.end;
    before.n_left = item.n_steps - item.end;
    if (before.is_open && before.n_left < Shape::n_stages) {
      skip_k(before.n_left);
      return;
    }
    if (before.is_open) end_walk(t); /* the producer waits for values to be passed */
    skip(before.n_left);
    before.is_open = false;
    before.n_left = 0;
  }
};

/* Items follow each other without a break: the last values of one are multiplied with the first scores of the next.
 * Only where too many tiles lie between them for the ring, or there is nothing to see, does an item end by itself. */
template <class Shape>
__device__ __forceinline__ void consume(const forward_arguments &g, const pipeline<Shape> &b, const work_slot *slots) {
  const int warp = warp_number();
  consumer<Shape> me = {g, b, (warp >> 2) - 1, warp & 3, static_cast<int>(threadIdx.x) & 31};
  const int offset = query_offset(g.a);
  ring<WORK_SLOTS> slot;
  row_tiles<Shape> t;
  item_before before = {-1, 0, 0, false};
  if (me.group == Shape::groups - 1) me.pass_turn();
  for (;;) {
    const item_view item = take_item(b, slots, slot, me.group, me.lane);
    const bool goes_on =
        before.is_open && item.head >= 0 && item.begin < item.end && before.n_left + item.begin < Shape::n_stages;
    if (!goes_on) me.close(t, before);
    if (item.head < 0) break;
    const warp_rows rows = find_warp_rows(item, g.packing, me.group, me.warp);
    row_view view;
    view.edge = item.edge;
    view.least = item.least;
    view.anchor = item.anchor;
    view.first_position = rows.first_token + offset;
#pragma unroll
    for (int r = 0; r < 2; r++)
      row_limits(g.a, rows.first_row + 8 * r + (me.lane >> 2), offset, view.low[r], view.high[r]);
    barrier_wait(b.own_full(me.q.stage), me.q.phase);
    me.begin(t, view, item, before, goes_on);
    me.walk(t, view, item);
    me.leave(t, item, before);
    barrier_arrive_warp(b.own_empty(me.q.stage), me.lane);
    me.q.advance();
    before.head = rows.head;
    before.first_row = rows.first_row;
  }
  if (me.group == 0) me.wait_turn();
  if (me.lane == 0) store_wait_read(); /* shared memory must outlive the copies out of it */
}

template <class Shape>
__global__ void __launch_bounds__(Shape::threads, 1)
    attention_forward_sm90(const __grid_constant__ forward_arguments g) {
  const block_memory<Shape> m = set_up<Shape>(&g.q, &g.k, &g.v, &g.out);
  await_kernel_before();
  allow_kernel_after();
  if (threadIdx.x < WARPGROUP) {
    give_registers<Shape::producer_registers>();
    if (warp_number() == 0) load_rows(g, m.b, m.slots);
    if (warp_number() == 1) load_keys(m.b, m.slots, &g.k, &g.v, g.a.n_heads / g.a.n_kv_heads / g.packing.n_heads);
  } else {
    take_registers<Shape::consumer_registers>();
    consume(g, m.b, m.slots);
  }
}

template <class Element, int DIM, bool HAS_CAP>
egi_cuda_status launch(const egi_cuda_attention &a, cudaStream_t stream) {
  using Shape = forward_shape<Element, DIM, HAS_CAP>;
  forward_arguments g = {};
  g.a = a;
  const int packed = count_packed_heads(a);
  g.packing = {packed, 64 / packed};
  const row_extent queries = {a.n_queries, a.n_heads, a.head_dim}, keys = {a.n_keys, a.n_kv_heads, a.head_dim};
  if (!make_row_map(&g.q, a.q, queries, a.dtype, g.packing.tokens) ||
      !make_row_map(&g.k, a.k, keys, a.dtype, Shape::keys) || !make_row_map(&g.v, a.v, keys, a.dtype, Shape::keys) ||
      !make_row_map(&g.out, a.out, queries, a.dtype, STORE_ROWS))
    return EGI_CUDA_FAILED;
  const plan_lists lists = carve_plan(a, a.plan);
  const int n_heads = a.n_heads / packed, n_tiles = lists.most_tiles[LIST_FORWARD];
  g.queue = {lists.states + LIST_FORWARD, lists.tiles[LIST_FORWARD], n_heads,
             heads_in_cache(a.n_keys, 4 * DIM, n_heads, n_heads / a.n_kv_heads, n_tiles)};
  return launch_persistent<Shape>(attention_forward_sm90<Shape>, g, static_cast<int64_t>(n_tiles) * n_heads, stream);
}

template <class Element> egi_cuda_status choose(const egi_cuda_attention &a, cudaStream_t stream) {
  const bool has_cap = a.softcap > 0.0f;
  if (a.head_dim == 64) return has_cap ? launch<Element, 64, true>(a, stream) : launch<Element, 64, false>(a, stream);
  return has_cap ? launch<Element, 128, true>(a, stream) : launch<Element, 128, false>(a, stream);
}

} // namespace

egi_cuda_status forward_sm90(const egi_cuda_attention &a, cudaStream_t stream) {
  return a.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(a, stream) : choose<__half>(a, stream);
}

} // namespace egi
