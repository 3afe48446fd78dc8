/* Attention forward for Hopper, head sizes 64 and 128. Persistent blocks of one producer warp and 2 (size 128) or 3
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
  static constexpr bool has_cap = HAS_CAP, takes_turns = DIM == 128;
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
__device__ __forceinline__ void produce(const forward_arguments &g, const pipeline<Shape> &b, work_slot *slots) {
  const egi_cuda_attention &a = g.a;
  const int lane = threadIdx.x & 31, group_heads = a.n_heads / a.n_kv_heads;
  ring<Shape::n_stages> pipe;
  ring<WORK_SLOTS> slot;
  ring<Shape::own_stages> q;
  work_feed feed;
  feed.start(g.queue, lane);
  for (;;) {
    tile_plan plan;
    barrier_wait(b.slot_empty(slot.stage), slot.phase ^ 1);
    const int head = feed.hand_on(g.queue, lane, slots + slot.stage, plan);
    barrier_arrive_warp(b.slot_full(slot.stage), lane);
    slot.advance();
    if (head < 0) return;
    if (lane == 0) {
      const int kv_head = head * g.packing.n_heads / group_heads;
      for (int j = 0; j < plan.n_steps; j++) {
        const int row = plan.anchor - Shape::keys * (j + 1);
        barrier_wait(b.first_empty(pipe.stage), pipe.phase ^ 1);
        barrier_expect(b.first_full(pipe.stage), Shape::kv_bytes);
        copy_tile<Shape::panels>(b.base + Shape::k_at + pipe.stage * Shape::kv_bytes, &g.k, b.first_full(pipe.stage),
                                 row, kv_head, Shape::kv_panel);
        if (j == 0) {
          barrier_wait(b.own_empty(q.stage), q.phase ^ 1);
          barrier_expect(b.own_full(q.stage), Shape::q_bytes);
          copy_packed<Shape::groups, Shape::panels>(b.base + q.stage * Shape::q_bytes, &g.q, b.own_full(q.stage),
                                                    plan.first_row, head * g.packing.n_heads, g.packing);
        }
        barrier_wait(b.second_empty(pipe.stage), pipe.phase ^ 1);
        barrier_expect(b.second_full(pipe.stage), Shape::kv_bytes);
        copy_tile<Shape::panels>(b.base + Shape::v_at + pipe.stage * Shape::kv_bytes, &g.v, b.second_full(pipe.stage),
                                 row, kv_head, Shape::kv_panel);
        pipe.advance();
      }
    }
    if (plan.n_steps > 0) q.advance();
    __syncwarp();
  }
}

/* One warpgroup's view of the current item. */
struct row_view {
  int low[2], high[2]; /* keys that this thread's two rows see */
  int first_position;  /* key position of the warpgroup's first row */
  int edge, anchor;
};

template <class Shape> struct consumer {
  const forward_arguments &g;
  pipeline<Shape> b;
  int group, warp, lane;
  ring<Shape::n_stages> k, v;
  ring<Shape::own_stages> q;

  __device__ __forceinline__ void wait_turn() const {
    if (Shape::takes_turns) named_sync(1 + group, 2 * WARPGROUP);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (Shape::takes_turns) named_arrive(1 + (group + 1 == Shape::groups ? 0 : group + 1), 2 * WARPGROUP);
  }
  __device__ __forceinline__ void free_k() {
    barrier_arrive_warp(b.first_empty(k.stage), lane);
    k.advance();
  }
  __device__ __forceinline__ void free_v() {
    barrier_arrive_warp(b.second_empty(v.stage), lane);
    v.advance();
  }
  /* Tiles that other warpgroups need: keep in step. */
  __device__ __forceinline__ void skip(int n) {
    for (int j = 0; j < n; j++) {
      wait_turn();
      pass_turn();
      barrier_wait(b.first_full(k.stage), k.phase);
      free_k();
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
  __device__ __forceinline__ void weigh(float (&s)[64], const row_view &view, int j, softmax_state &state,
                                        float (&correction)[2]) const {
    const egi_cuda_attention &a = g.a;
    if (Shape::has_cap) cap_tile(s, 2.0f * log2_e * a.scale / a.softcap, a.softcap * log2_e);
    const int start = view.anchor - Shape::keys * (j + 1);
    if (start < view.edge || start + Shape::keys - 1 > view.first_position) {
      const int low[2] = {view.low[0] - start, view.low[1] - start};
      const int high[2] = {view.high[0] - start, view.high[1] - start};
      mask_tile(s, low, high, lane);
    }
    softmax_tile(s, state, correction, Shape::has_cap ? 1.0f : a.scale * log2_e);
  }
  __device__ __forceinline__ void start_first(float (&s)[64]) const {
    barrier_wait(b.first_full(k.stage), k.phase);
    wait_turn();
    start_scores(s);
    pass_turn();
  }
  /* Goes on from the first tile's scores, which are in flight. */
  __device__ __forceinline__ void walk(float (&s)[64], float (&out)[Shape::dim / 2], softmax_state &state,
                                       const row_view &view, int begin, int end) {
    float correction[2];
    unsigned weights[32];
    wgmma_wait<0>(s);
    free_k();
    weigh(s, view, begin, state, correction);
    pack_tile<typename Shape::Element>(s, weights);
    for (int j = begin + 1; j < end; j++) {
      barrier_wait(b.first_full(k.stage), k.phase);
      wait_turn();
      start_scores(s);
      barrier_wait(b.second_full(v.stage), v.phase);
      start_output(out, weights);
      pass_turn();
      wgmma_wait<1>(s);
      free_k();
      weigh(s, view, j, state, correction);
      wgmma_wait<0>(out);
      free_v();
      if (__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < Shape::dim / 2; i++) out[i] *= correction[(i >> 1) & 1];
      }
      pack_tile<typename Shape::Element>(s, weights);
    }
    barrier_wait(b.second_full(v.stage), v.phase);
    wgmma_fence();
    start_output(out, weights);
    wgmma_wait<0>(out);
    free_v();
  }
  __device__ __forceinline__ void finish(const float (&out)[Shape::dim / 2], const softmax_state &state, int first_row,
                                         int head) const {
    const egi_cuda_attention &a = g.a;
    const float sink = a.sinks ? a.sinks[head] : -CUDART_INF_F;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float lse;
      factor[r] = finish_row(state.largest[r], state.sum[r], Shape::has_cap ? 1.0f : a.scale * log2_e, sink, lse);
      const int row = first_row + 8 * r + (lane >> 2);
      if ((lane & 3) == 0 && row < a.n_queries) a.lse[head * a.n_queries + row] = lse;
    }
    if (lane == 0) store_wait_read();
    __syncwarp();
    const unsigned tile = b.base + Shape::out_at + (64 * group + STORE_ROWS * warp) * panel_row_bytes;
    store_tile<typename Shape::Element>(out, factor, tile, Shape::q_panel, {&g.out, first_row, head}, lane);
  }
};

template <class Shape>
__device__ __forceinline__ void consume(const forward_arguments &g, const pipeline<Shape> &b, const work_slot *slots) {
  const int warp = warp_number();
  consumer<Shape> me = {g, b, (warp >> 2) - 1, warp & 3, static_cast<int>(threadIdx.x) & 31};
  const int offset = query_offset(g.a);
  ring<WORK_SLOTS> slot;
  float s[64], out[Shape::dim / 2];
  softmax_state state;
  int head_before = -1, row_before = 0;
  if (me.group == Shape::groups - 1) me.pass_turn();
  for (;;) {
    barrier_wait(b.slot_full(slot.stage), slot.phase);
    const tile_plan *plan = &slots[slot.stage].plan;
    const int tile = plan->first_row, head = slots[slot.stage].head, n_tiles = plan->n_steps;
    const int begin = plan->begin[me.group], end = plan->end[me.group];
    row_view view;
    view.edge = plan->edge[me.group];
    view.anchor = plan->anchor;
    barrier_arrive_warp(b.slot_empty(slot.stage), me.lane);
    slot.advance();
    if (head < 0) break;
    const int first_token = tile + g.packing.tokens * me.group, row_in_group = STORE_ROWS * me.warp;
    const int first_row = first_token + row_in_group % g.packing.tokens;
    const int own_head = head * g.packing.n_heads + row_in_group / g.packing.tokens;
    view.first_position = first_token + offset;
#pragma unroll
    for (int r = 0; r < 2; r++) row_limits(g.a, first_row + 8 * r + (me.lane >> 2), offset, view.low[r], view.high[r]);

    if (n_tiles > 0) barrier_wait(b.own_full(me.q.stage), me.q.phase);
    me.skip(begin);
    if (begin < end) {
      me.start_first(s);
      if (head_before >= 0) me.finish(out, state, row_before, head_before); /* under this item's first product */
      reset(out);
      state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
      me.walk(s, out, state, view, begin, end);
    } else {
      if (head_before >= 0) me.finish(out, state, row_before, head_before);
      reset(out);
      state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    }
    me.skip(n_tiles - end);
    if (n_tiles > 0) {
      barrier_arrive_warp(b.own_empty(me.q.stage), me.lane);
      me.q.advance();
    }
    head_before = own_head;
    row_before = first_row;
  }
  if (head_before >= 0) me.finish(out, state, row_before, head_before);
  if (me.group == 0) me.wait_turn();
  if (me.lane == 0) store_wait_read(); /* shared memory must outlive the copies out of it */
}

template <class Shape>
__global__ void __launch_bounds__(Shape::threads, 1)
    attention_forward_sm90(const __grid_constant__ forward_arguments g) {
  extern __shared__ unsigned char shared[];
  const unsigned raw = static_cast<unsigned>(__cvta_generic_to_shared(shared)), base = (raw + 1023u) & ~1023u;
  const pipeline<Shape> b = {base};
  work_slot *slots = reinterpret_cast<work_slot *>(shared + (base - raw) + Shape::slots_at);
  if (threadIdx.x == 0) {
    prefetch_map(&g.q);
    prefetch_map(&g.k);
    prefetch_map(&g.v);
    prefetch_map(&g.out);
    b.init();
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<Shape::producer_registers>();
    if (threadIdx.x < 32) produce<Shape>(g, b, slots);
  } else {
    take_registers<Shape::consumer_registers>();
    consume<Shape>(g, b, slots);
  }
}

template <class Element, int DIM, bool HAS_CAP>
egi_cuda_status launch(const egi_cuda_attention &a, cudaStream_t stream) {
  using Shape = forward_shape<Element, DIM, HAS_CAP>;
  forward_arguments g = {};
  g.a = a;
  const int packed = count_packed_heads(a);
  g.packing = {packed, 64 / packed};
  const row_extent queries = {a.n_queries, a.n_heads, DIM}, keys = {a.n_keys, a.n_kv_heads, DIM};
  if (!make_row_map(&g.q, a.q, queries, a.dtype, g.packing.tokens) ||
      !make_row_map(&g.k, a.k, keys, a.dtype, Shape::keys) || !make_row_map(&g.v, a.v, keys, a.dtype, Shape::keys) ||
      !make_row_map(&g.out, a.out, queries, a.dtype, STORE_ROWS))
    return EGI_CUDA_FAILED;
  const plan_lists lists = carve_plan(a, const_cast<void *>(a.plan));
  g.queue = make_queue(carve_workspace(a, false).counters + COUNTER_FORWARD, lists.forward, lists.n_forward,
                       a.n_heads / packed);
  g.queue.heads_per_group =
      heads_in_cache(a.n_keys, 4 * DIM, a.n_heads / packed, a.n_heads / a.n_kv_heads / packed, lists.n_forward);
  const auto kernel = attention_forward_sm90<Shape>;
  const int n_blocks = start_queue(g.queue, stream);
  if (n_blocks < 1 ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::shared_bytes) != cudaSuccess)
    return EGI_CUDA_FAILED;
  kernel<<<static_cast<unsigned>(n_blocks), Shape::threads, Shape::shared_bytes, stream>>>(g);
  return cudaGetLastError() == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
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
