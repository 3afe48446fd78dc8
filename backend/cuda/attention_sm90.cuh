/* What the Hopper attention kernels share besides products: barriers, the tensor copy engine, warpgroup roles, and the
 * work queue. A block stays on its multiprocessor; one producer warp takes work items from a counter in device memory
 * (results do not depend on who takes which), hands their plans on and starts the copies of what the block owns,
 * another those of what it walks; consumer warpgroups compute. */
#ifndef ENGRAFT_BACKEND_CUDA_ATTENTION_SM90_CUH
#define ENGRAFT_BACKEND_CUDA_ATTENTION_SM90_CUH

#include <cuda.h>

#include "backend/cuda/attention_plan.cuh"
#include "backend/cuda/attention_wgmma.cuh"

namespace egi {

enum { WARPGROUP = 128, WORK_SLOTS = 2, STORE_ROWS = 16 };

/* Shared memory a block can have on compute capability 9.0. */
constexpr int most_shared_bytes = 227 * 1024;

/* A tensor map over `rows` of [n_rows, n_heads, size] with boxes of `box_rows` rows, one head, 64 columns; false where
 * it fails. */
struct row_extent {
  int64_t n_rows;
  int n_heads, size;
};
bool make_row_map(CUtensorMap *map, const egi_cuda_rows &rows, row_extent extent, egi_cuda_float dtype, int box_rows);
/* Multiprocessors of the current device, 0 on failure. */
int count_multiprocessors();

/* ---- barriers --------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(unsigned barrier, int size_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size_bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned phase) {
  unsigned is_done = 0;
  while (!is_done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(is_done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
  }
}
/* A warp arrives: its lanes are done with what the barrier guards. One lane does it for all, behind a __syncwarp; the
 * race detector does not follow that, so for its sake (EGI_ATTENTION_RACECHECK) every lane can. */
#ifdef EGI_ATTENTION_RACECHECK
constexpr int arrivals_of_warp = 32;
#else
constexpr int arrivals_of_warp = 1;
#endif
__device__ __forceinline__ void barrier_arrive_warp(unsigned barrier, int lane) {
  __syncwarp();
  if (lane < arrivals_of_warp) barrier_arrive(barrier);
}
__device__ __forceinline__ void named_sync(int name, int n_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(n_threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int name, int n_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(n_threads) : "memory");
}

/* Position in a ring of N stages; `phase` flips with each turn. */
template <int N> struct ring {
  int stage = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void advance() {
    stage++;
    if (stage == N) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/* The barriers of a kernel, in shared memory at Shape::barriers_at: full and empty for the tile a block owns (own), for
 * the two streams of tiles it walks (first, second: keys and values, or queries and their gradients) and for the slots
 * through which work is handed on. */
template <class Shape> struct pipeline {
  unsigned base; /* of the block's shared memory */

  __device__ unsigned at(int i) const { return base + Shape::barriers_at + 8 * i; }
  __device__ unsigned own_full(int s) const { return at(s); }
  __device__ unsigned own_empty(int s) const { return at(Shape::own_stages + s); }
  __device__ unsigned stream(int kind, int s) const { return at(2 * Shape::own_stages + kind * Shape::n_stages + s); }
  __device__ unsigned first_full(int s) const { return stream(0, s); }
  __device__ unsigned first_empty(int s) const { return stream(1, s); }
  __device__ unsigned second_full(int s) const { return stream(2, s); }
  __device__ unsigned second_empty(int s) const { return stream(3, s); }
  __device__ unsigned slot_full(int s) const { return stream(4, s); }
  __device__ unsigned slot_empty(int s) const { return stream(4, WORK_SLOTS + s); }

  __device__ __forceinline__ void init() const {
    const int arrivals = 4 * Shape::groups * arrivals_of_warp;
    for (int s = 0; s < Shape::own_stages; s++) {
      barrier_init(own_full(s), 1);
      barrier_init(own_empty(s), arrivals);
    }
    for (int s = 0; s < Shape::n_stages; s++) {
      barrier_init(first_full(s), 1);
      barrier_init(first_empty(s), arrivals);
      barrier_init(second_full(s), 1);
      barrier_init(second_empty(s), arrivals);
    }
    for (int s = 0; s < WORK_SLOTS; s++) {
      barrier_init(slot_full(s), arrivals_of_warp);
      barrier_init(slot_empty(s), arrivals + arrivals_of_warp);
    }
    barrier_init_fence();
  }
};

/* ---- copies ----------------------------------------------------------------------------------------------------- */

/* PANELS x 64 columns of `box_rows` rows from `row` on; rows outside the tensor arrive as zeros. */
template <int PANELS>
__device__ __forceinline__ void copy_tile(unsigned dst, const CUtensorMap *map, unsigned barrier, int row, int head,
                                          int panel_bytes) {
#pragma unroll
  for (int p = 0; p < PANELS; p++)
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
                 "%4}], [%5];" ::"r"(dst + p * panel_bytes),
                 "l"(map), "r"(64 * p), "r"(row), "r"(head), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void copy_bytes(unsigned dst, const void *src, int size_bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(size_bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void store_panel(const CUtensorMap *map, unsigned src, int column, int row, int head) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
               "r"(column), "r"(row), "r"(head), "r"(src)
               : "memory");
}
__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Where a warp's rows go in global memory. */
struct store_target {
  const CUtensorMap *map;
  int row, head;
};

/* Writes a warp's 16 rows of 2 R columns, times `factor`, to its rows of a tile in shared memory and starts their way
 * to global memory. `tile` is the warp's first row in panel 0. The tensor map cuts rows past the end off. */
template <class Element, int R>
__device__ __forceinline__ void store_tile(const float (&d)[R], const float (&factor)[2], unsigned tile,
                                           int panel_bytes, store_target to, int lane) {
  const int in_tile = (lane & 7) + 8 * ((lane >> 3) & 1);
  const unsigned line = tile + in_tile * panel_row_bytes;
#pragma unroll
  for (int k = 0; k < R / 8; k++) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      w[i] = number_format<Element>::pack(d[8 * k + 2 * i] * factor[i & 1], d[8 * k + 2 * i + 1] * factor[i & 1]);
    const int chunk = 2 * (k & 3) + (lane >> 4);
    const unsigned address = line + (k >> 2) * panel_bytes + ((chunk ^ (lane & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]),
                 "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  }
  store_fence();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int p = 0; p < R / 32; p++) store_panel(to.map, tile + p * panel_bytes, 64 * p, to.row, to.head);
    store_commit();
  }
}

/* The log-sum-exp of a warp's 16 rows. Behind store_tile: its fence would wait for these stores. */
__device__ __forceinline__ void store_lse(const egi_cuda_attention &a, int head, int first_row, const float (&lse)[2],
                                          int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + 8 * r + (lane >> 2);
    if ((lane & 3) == 0 && row < a.n_queries) a.lse[head * a.n_queries + row] = lse[r];
  }
}

/* P heads packed in the 64 rows of a warpgroup (count_packed_heads): rows are head by head, so a warp has one head. */
struct head_packing {
  int n_heads, tokens; /* P, 64 / P: powers of two */
};

/* The tile of rows a block owns, packed: GROUPS x 64 rows from `first_token` on, heads from `first_head` on. */
template <int GROUPS, int PANELS>
__device__ __forceinline__ void copy_packed(unsigned dst, const CUtensorMap *map, unsigned barrier, int first_token,
                                            int first_head, const head_packing &packing) {
#pragma unroll 1
  for (int g = 0; g < GROUPS; g++)
#pragma unroll 1
    for (int h = 0; h < packing.n_heads; h++)
      copy_tile<PANELS>(dst + (64 * g + packing.tokens * h) * panel_row_bytes, map, barrier,
                        first_token + packing.tokens * g, first_head + h, GROUPS * 64 * panel_row_bytes);
}

template <int N> __device__ __forceinline__ void reset(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) d[i] = 0.0f;
}

/* ---- roles ------------------------------------------------------------------------------------------------------ */

template <int N> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* The number of this thread's warp, the same register in all lanes as far as the compiler can see. */
__device__ __forceinline__ int warp_number() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 5, 0);
}

/* What the producer hands on about an item; head -1: no more work. */
struct work_slot {
  tile_plan plan;
  int head;
};

struct work_queue {
  list_state *state;
  const tile_plan *plans;
  int n_heads, heads_per_group;
};

/* A producer's view of the queue: the item to hand on next and, one word a lane, its plan. A block takes blockIdx.x
 * first and asks the counter once for each item it handed on, so who asked last is known, and sets it to zero. */
struct work_feed {
  int n_tiles, n_items, item, word;

  __device__ __forceinline__ void load(const work_queue &queue, int lane) {
    constexpr int n_words = sizeof(tile_plan) / sizeof(int);
    const work_item work = find_work(item, n_tiles, queue.n_heads, queue.heads_per_group);
    if (item < n_items && lane < n_words) word = reinterpret_cast<const int *>(queue.plans + work.tile)[lane];
  }
  __device__ __forceinline__ void start(const work_queue &queue, int lane) {
    n_tiles = queue.state->n_tiles;
    n_items = n_tiles * queue.n_heads;
    item = static_cast<int>(blockIdx.x);
    word = 0;
    load(queue, lane);
  }
  __device__ __forceinline__ void ask(const work_queue &queue, int lane) {
    const int n_blocks = static_cast<int>(gridDim.x);
    if (lane == 0) item = atomicAdd(&queue.state->next_item, 1) + n_blocks;
    item = __shfl_sync(0xffffffffu, item, 0);
    if (lane == 0 && item == n_items - 1 + n_blocks) queue.state->next_item = 0;
    load(queue, lane);
  }
  /* Fills the slot; returns the item's head, -1 when there is no more work. */
  __device__ __forceinline__ int hand_on(const work_queue &queue, int lane, work_slot *slot, int &first_row) const {
    constexpr int n_words = sizeof(tile_plan) / sizeof(int);
    const bool is_work = item < n_items;
    const int head = is_work ? find_work(item, n_tiles, queue.n_heads, queue.heads_per_group).head : -1;
    if (lane < n_words) reinterpret_cast<int *>(&slot->plan)[lane] = word;
    if (lane == 0) slot->head = head;
    first_row = __shfl_sync(0xffffffffu, word, 0);
    return head;
  }
};

/* The first producer warp: hands items on, one ahead of the consumers, and lets lane 0 load what a block owns of each,
 * `own_bytes` by load(first_row, head, stage). EAGER asks for the next item right away: it takes two microseconds, as
 * long as a short item. Otherwise only when it is needed, which balances few long items better. */
template <class Shape, bool EAGER, class Load>
__device__ __forceinline__ void hand_out(const work_queue &queue, const pipeline<Shape> &b, work_slot *slots,
                                         int own_bytes, const Load &load) {
  const int lane = threadIdx.x & 31;
  ring<WORK_SLOTS> slot;
  ring<Shape::own_stages> own;
  work_feed feed;
  feed.start(queue, lane);
  for (bool is_first = true;; is_first = false) {
    int first_row = 0;
    barrier_wait(b.slot_empty(slot.stage), slot.phase ^ 1);
    barrier_wait(b.own_empty(own.stage), own.phase ^ 1);
    if (!EAGER && !is_first) feed.ask(queue, lane);
    const int head = feed.hand_on(queue, lane, slots + slot.stage, first_row);
    barrier_arrive_warp(b.slot_full(slot.stage), lane);
    slot.advance();
    if (head < 0) return;
    if (lane == 0) {
      barrier_expect(b.own_full(own.stage), own_bytes);
      load(first_row, head, own.stage);
    }
    __syncwarp();
    own.advance();
    if (EAGER) feed.ask(queue, lane);
  }
}

/* What the other producer warp and warpgroup `group` of the consumers take of the next item. */
struct item_view {
  int first_row, end_row, anchor, n_steps, begin, end, edge, least, head;
};
template <class Shape>
__device__ __forceinline__ item_view take_item(const pipeline<Shape> &b, const work_slot *slots, ring<WORK_SLOTS> &slot,
                                               int group, int lane) {
  barrier_wait(b.slot_full(slot.stage), slot.phase);
  const tile_plan *plan = &slots[slot.stage].plan;
  const item_view view = {plan->first_row,   plan->end_row,      plan->anchor,
                          plan->n_steps,     plan->begin[group], plan->end[group],
                          plan->edge[group], plan->least[group], slots[slot.stage].head};
  barrier_arrive_warp(b.slot_empty(slot.stage), lane);
  slot.advance();
  return view;
}

/* The second producer warp: lane 0 loads what a block walks, load(item). */
template <class Shape, class Load>
__device__ __forceinline__ void follow(const pipeline<Shape> &b, const work_slot *slots, const Load &load) {
  const int lane = threadIdx.x & 31;
  ring<WORK_SLOTS> slot;
  for (;;) {
    const item_view item = take_item(b, slots, slot, 0, lane);
    if (item.head < 0) return;
    if (lane == 0) load(item);
    __syncwarp();
  }
}

/* The same for kernels whose blocks own query rows: keys and values from the anchor down, of the item's key head. */
template <class Shape>
__device__ __forceinline__ void load_keys(const pipeline<Shape> &b, const work_slot *slots, const CUtensorMap *k,
                                          const CUtensorMap *v, int items_a_kv_head) {
  ring<Shape::n_stages> pipe;
  follow(b, slots, [&](const item_view &item) {
    const int kv_head = item.head / items_a_kv_head;
    for (int j = 0; j < item.n_steps; j++) {
      const int row = item.anchor - Shape::keys * (j + 1), s = pipe.stage;
      barrier_wait(b.first_empty(s), pipe.phase ^ 1);
      barrier_expect(b.first_full(s), Shape::kv_bytes);
      copy_tile<Shape::panels>(b.base + Shape::k_at + s * Shape::kv_bytes, k, b.first_full(s), row, kv_head,
                               Shape::kv_panel);
      barrier_wait(b.second_empty(s), pipe.phase ^ 1);
      barrier_expect(b.second_full(s), Shape::kv_bytes);
      copy_tile<Shape::panels>(b.base + Shape::v_at + s * Shape::kv_bytes, v, b.second_full(s), row, kv_head,
                               Shape::kv_panel);
      pipe.advance();
    }
  });
}

/* Where a warp's rows lie when heads are packed. */
struct warp_rows {
  int first_token; /* of the warpgroup */
  int first_row, head;
};
__device__ __forceinline__ warp_rows find_warp_rows(const item_view &item, const head_packing &packing, int group,
                                                    int warp) {
  const int first_token = item.first_row + packing.tokens * group, row_in_group = STORE_ROWS * warp;
  const int shift = 31 - __clz(packing.tokens);
  return {first_token, first_token + (row_in_group & (packing.tokens - 1)),
          item.head * packing.n_heads + (row_in_group >> shift)};
}

/* ---- whole kernels ---------------------------------------------------------------------------------------------- */

template <class Shape> struct block_memory {
  pipeline<Shape> b;
  work_slot *slots;
};

/* How every kernel begins: shared memory aligned for the swizzle, tensor maps on their way, barriers ready. */
template <class Shape, class... Maps> __device__ __forceinline__ block_memory<Shape> set_up(const Maps *...maps) {
  extern __shared__ unsigned char shared[];
  const unsigned raw = static_cast<unsigned>(__cvta_generic_to_shared(shared)), base = (raw + 1023u) & ~1023u;
  const pipeline<Shape> b = {base};
  if (threadIdx.x == 0) {
    (prefetch_map(maps), ...);
    b.init();
  }
  __syncthreads();
  return {b, reinterpret_cast<work_slot *>(shared + (base - raw) + Shape::slots_at)};
}

/* One block a multiprocessor, but no more than items; may start under the end of the kernel before (set it up so). */
template <class Shape, class Arguments>
egi_cuda_status launch_persistent(void (*kernel)(Arguments), const Arguments &arguments, int64_t n_items,
                                  cudaStream_t stream) {
  const int64_t n_processors = count_multiprocessors();
  const int64_t n_blocks = n_processors < n_items ? n_processors : n_items;
  if (n_blocks < 1 ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::shared_bytes) != cudaSuccess)
    return EGI_CUDA_FAILED;
  const launch_shape shape = {static_cast<unsigned>(n_blocks), Shape::threads, Shape::shared_bytes};
  return launch_early(kernel, arguments, shape, stream) == cudaSuccess ? EGI_CUDA_OK : EGI_CUDA_FAILED;
}

} // namespace egi

#endif
