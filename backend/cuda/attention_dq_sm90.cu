/* Attention backward for Hopper, gradient of the queries; head sizes 64 and 128. Persistent blocks of one producer warp
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
  static constexpr bool has_cap = HAS_CAP;
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
  const float2 *row_pairs;
  int64_t padded_rows;
};

template <class Shape>
__device__ __forceinline__ void produce(const dq_arguments &g, const pipeline<Shape> &b, work_slot *slots) {
  const egi_cuda_attention &a = g.a;
  const int lane = threadIdx.x & 31, group_heads = a.n_heads / a.n_kv_heads;
  ring<Shape::n_stages> pipe;
  ring<WORK_SLOTS> slot;
  ring<Shape::own_stages> rows;
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
      const int kv_head = head / group_heads;
      const unsigned to = b.base + rows.stage * Shape::row_bytes;
      barrier_wait(b.own_empty(rows.stage), rows.phase ^ 1);
      barrier_expect(b.own_full(rows.stage), Shape::row_bytes);
      copy_tile<Shape::panels>(to, &g.q, b.own_full(rows.stage), plan.first_row, head, Shape::q_panel);
      copy_tile<Shape::panels>(to + Shape::d_out_at, &g.d_out, b.own_full(rows.stage), plan.first_row, head,
                               Shape::q_panel);
      for (int j = 0; j < plan.n_steps; j++) {
        const int row = plan.anchor - Shape::keys * (j + 1);
        barrier_wait(b.first_empty(pipe.stage), pipe.phase ^ 1);
        barrier_expect(b.first_full(pipe.stage), Shape::kv_bytes);
        copy_tile<Shape::panels>(b.base + Shape::k_at + pipe.stage * Shape::kv_bytes, &g.k, b.first_full(pipe.stage),
                                 row, kv_head, Shape::kv_panel);
        barrier_wait(b.second_empty(pipe.stage), pipe.phase ^ 1);
        barrier_expect(b.second_full(pipe.stage), Shape::kv_bytes);
        copy_tile<Shape::panels>(b.base + Shape::v_at + pipe.stage * Shape::kv_bytes, &g.v, b.second_full(pipe.stage),
                                 row, kv_head, Shape::kv_panel);
        pipe.advance();
      }
    }
    rows.advance();
    __syncwarp();
  }
}

struct row_view {
  int low[2], high[2], first_position, edge, anchor;
  float lse[2], delta[2];
};

template <class Shape> struct consumer {
  const dq_arguments &g;
  pipeline<Shape> b;
  int group, warp, lane;
  ring<Shape::n_stages> k, v;
  ring<Shape::own_stages> rows;

  __device__ __forceinline__ void skip(int n) {
    for (int j = 0; j < n; j++) {
      barrier_wait(b.first_full(k.stage), k.phase);
      barrier_arrive_warp(b.first_empty(k.stage), lane);
      k.advance();
      barrier_wait(b.second_full(v.stage), v.phase);
      barrier_arrive_warp(b.second_empty(v.stage), lane);
      v.advance();
    }
  }
  __device__ __forceinline__ unsigned own_rows(int stage) const {
    return b.base + stage * Shape::row_bytes + group * 64 * panel_row_bytes;
  }
  __device__ __forceinline__ void start_scores(float (&s)[Shape::keys / 2], const ring<Shape::n_stages> &at) const {
    barrier_wait(b.first_full(at.stage), at.phase);
    wgmma_fence();
    multiply_columns<typename Shape::Element, Shape::dim>(
        s, own_rows(rows.stage), Shape::q_panel, b.base + Shape::k_at + at.stage * Shape::kv_bytes, Shape::kv_panel);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_d_weights(float (&dp)[Shape::keys / 2]) const {
    barrier_wait(b.second_full(v.stage), v.phase);
    wgmma_fence();
    multiply_columns<typename Shape::Element, Shape::dim>(dp, own_rows(rows.stage) + Shape::d_out_at, Shape::q_panel,
                                                          b.base + Shape::v_at + v.stage * Shape::kv_bytes,
                                                          Shape::kv_panel);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dq(float (&dq)[Shape::dim / 2], const unsigned (&ds)[Shape::keys / 4]) const {
    multiply_rows<typename Shape::Element, Shape::keys>(dq, ds, b.base + Shape::k_at + k.stage * Shape::kv_bytes);
    wgmma_commit();
  }
  /* Scores to probabilities; with a cap only to its tanh: registers do not hold the slope as well. */
  __device__ __forceinline__ void weigh(float (&s)[Shape::keys / 2], const row_view &view, int j) const {
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
  __device__ __forceinline__ void differentiate(const float (&s)[Shape::keys / 2], float (&dp)[Shape::keys / 2],
                                                const row_view &view, unsigned (&ds)[Shape::keys / 4]) {
    barrier_arrive_warp(b.second_empty(v.stage), lane);
    v.advance();
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
  __device__ __forceinline__ void free_k() {
    barrier_arrive_warp(b.first_empty(k.stage), lane);
    k.advance();
  }
  /* Goes on from the first tile's products, which are in flight. Each turn queues three and ends with none in flight.
   */
  __device__ __forceinline__ void walk(float (&s)[Shape::keys / 2], float (&dp)[Shape::keys / 2],
                                       float (&dq)[Shape::dim / 2], const row_view &view, int begin, int end) {
    unsigned ds[Shape::keys / 4];
    wgmma_wait<1>(s);
    weigh(s, view, begin);
    wgmma_wait<0>(dp);
    differentiate(s, dp, view, ds);
    for (int j = begin + 1; j < end; j++) {
      ring<Shape::n_stages> next = k;
      next.advance();
      start_scores(s, next);
      start_dq(dq, ds);
      start_d_weights(dp);
      wgmma_wait<2>(s);
      weigh(s, view, j);
      wgmma_wait<0>(dp);
      free_k();
      differentiate(s, dp, view, ds);
    }
    wgmma_fence();
    start_dq(dq, ds);
    wgmma_wait<0>(dq);
    free_k();
#pragma unroll
    for (int i = 0; i < Shape::dim / 2; i++) dq[i] *= g.a.scale; /* here: the compiler would not let it pass products */
  }
  /* Sends d_q out through the item's own rows of q, in row stage `stage`, and frees that. */
  __device__ __forceinline__ void finish(const float (&dq)[Shape::dim / 2], int stage, int first_row, int head) const {
    const float factor[2] = {1.0f, 1.0f};
    named_sync(1 + group, WARPGROUP); /* the warpgroup is done with them */
    store_tile<typename Shape::Element>(dq, factor, own_rows(stage) + STORE_ROWS * warp * panel_row_bytes,
                                        Shape::q_panel, {&g.d_q, first_row, head}, lane);
    if (lane == 0) store_wait_read();
    barrier_arrive_warp(b.own_empty(stage), lane);
  }
};

/* Limits and row pairs of the thread's two rows; nothing waits for them yet. */
__device__ __forceinline__ void find_rows(const dq_arguments &g, int head, int first_row, int offset, int lane,
                                          row_view &view) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + 8 * r + (lane >> 2);
    row_limits(g.a, row, offset, view.low[r], view.high[r]);
    const float2 pair = g.row_pairs[head * g.padded_rows + row];
    view.lse[r] = pair.x;
    view.delta[r] = pair.y;
  }
}

template <class Shape>
__device__ __forceinline__ void consume(const dq_arguments &g, const pipeline<Shape> &b, const work_slot *slots) {
  const int warp = warp_number();
  consumer<Shape> me = {g, b, (warp >> 2) - 1, warp & 3, static_cast<int>(threadIdx.x) & 31};
  const int offset = query_offset(g.a);
  ring<WORK_SLOTS> slot;
  float s[Shape::keys / 2], dp[Shape::keys / 2], dq[Shape::dim / 2];
  int head_before = -1, row_before = 0, stage_before = 0;
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
    const int first_row = tile + 64 * me.group + STORE_ROWS * me.warp;
    view.first_position = tile + 64 * me.group + offset;
    find_rows(g, head, first_row, offset, me.lane, view);
    barrier_wait(b.own_full(me.rows.stage), me.rows.phase);
    me.skip(begin);
    if (begin < end) {
      me.start_scores(s, me.k);
      me.start_d_weights(dp);
      if (head_before >= 0) me.finish(dq, stage_before, row_before, head_before); /* under this item's first products */
      reset(dq);
      me.walk(s, dp, dq, view, begin, end);
    } else {
      if (head_before >= 0) me.finish(dq, stage_before, row_before, head_before);
      reset(dq);
    }
    me.skip(n_tiles - end);
    head_before = head;
    row_before = first_row;
    stage_before = me.rows.stage;
    me.rows.advance();
  }
  if (head_before >= 0) me.finish(dq, stage_before, row_before, head_before);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::threads, 1) attention_dq_sm90(const __grid_constant__ dq_arguments g) {
  extern __shared__ unsigned char shared[];
  const unsigned raw = static_cast<unsigned>(__cvta_generic_to_shared(shared)), base = (raw + 1023u) & ~1023u;
  const pipeline<Shape> b = {base};
  work_slot *slots = reinterpret_cast<work_slot *>(shared + (base - raw) + Shape::slots_at);
  if (threadIdx.x == 0) {
    prefetch_map(&g.q);
    prefetch_map(&g.d_out);
    prefetch_map(&g.k);
    prefetch_map(&g.v);
    prefetch_map(&g.d_q);
    b.init();
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<40>();
    if (threadIdx.x < 32) produce<Shape>(g, b, slots);
  } else {
    take_registers<232>();
    consume<Shape>(g, b, slots);
  }
}

template <class Element, int DIM, bool HAS_CAP>
egi_cuda_status launch(const egi_cuda_attention &a, cudaStream_t stream) {
  using Shape = dq_shape<Element, DIM, HAS_CAP>;
  const attention_workspace w = carve_workspace(a, true);
  dq_arguments g = {};
  g.a = a;
  const row_extent queries = {a.n_queries, a.n_heads, DIM}, keys = {a.n_keys, a.n_kv_heads, DIM};
  if (!make_row_map(&g.q, a.q, queries, a.dtype, Shape::queries) ||
      !make_row_map(&g.d_out, a.d_out, queries, a.dtype, Shape::queries) ||
      !make_row_map(&g.k, a.k, keys, a.dtype, Shape::keys) || !make_row_map(&g.v, a.v, keys, a.dtype, Shape::keys) ||
      !make_row_map(&g.d_q, a.d_q, queries, a.dtype, STORE_ROWS))
    return EGI_CUDA_FAILED;
  g.row_pairs = w.row_pairs;
  g.padded_rows = w.padded_rows;
  const plan_lists lists = carve_plan(a, const_cast<void *>(a.plan));
  g.queue = make_queue(w.counters + COUNTER_DQ, lists.dq, lists.n_dq, a.n_heads);
  g.queue.heads_per_group = heads_in_cache(a.n_keys, 4 * DIM, a.n_heads, a.n_heads / a.n_kv_heads, lists.n_dq);
  const auto kernel = attention_dq_sm90<Shape>;
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

egi_cuda_status backward_dq_sm90(const egi_cuda_attention &a, cudaStream_t stream) {
  return a.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(a, stream) : choose<__half>(a, stream);
}

} // namespace egi
