/* What the Hopper attention kernels share besides products: barriers, the tensor copy engine, warpgroup roles, and the
 * work queue. A block stays on its multiprocessor; its producer warp takes work items from a counter in device memory
 * (results do not depend on who takes which), hands their plans on and starts the copies; consumer warpgroups compute.
 */
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
      barrier_init(slot_empty(s), arrivals);
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

/* P heads packed in the 64 rows of a warpgroup (count_packed_heads): rows are head by head, so a warp has one head. */
struct head_packing {
  int n_heads, tokens; /* P, 64 / P */
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
  int *counter;
  const tile_plan *plans;
  int n_items, n_tiles, n_heads, heads_per_group;
};

/* The producer's view of the queue. Item numbers are asked for two items ahead and plans loaded one ahead, since each
 * takes a microsecond to come. Lanes hold one word of the plan each. */
struct work_feed {
  int item, asked, word;

  __device__ __forceinline__ void ask(const work_queue &queue, int lane) {
    asked = 0;
    if (lane == 0) asked = atomicAdd(queue.counter, 1) + static_cast<int>(gridDim.x);
  }
  __device__ __forceinline__ void load(const work_queue &queue, int lane) {
    constexpr int n_words = sizeof(tile_plan) / sizeof(int);
    const work_item work = find_work(item, queue.n_tiles, queue.n_heads, queue.heads_per_group);
    if (item < queue.n_items && lane < n_words) word = reinterpret_cast<const int *>(queue.plans + work.tile)[lane];
  }
  __device__ __forceinline__ void start(const work_queue &queue, int lane) {
    item = static_cast<int>(blockIdx.x);
    word = 0;
    ask(queue, lane);
    load(queue, lane);
  }
  /* Fills the slot and the first words of `plan`, moves on; returns the item's head, -1 when there is no more work. */
  __device__ __forceinline__ int hand_on(const work_queue &queue, int lane, work_slot *slot, tile_plan &plan) {
    constexpr int n_words = sizeof(tile_plan) / sizeof(int);
    const bool is_work = item < queue.n_items;
    const int head = is_work ? find_work(item, queue.n_tiles, queue.n_heads, queue.heads_per_group).head : -1;
    if (lane < n_words) reinterpret_cast<int *>(&slot->plan)[lane] = word;
    if (lane == 0) slot->head = head;
    plan.first_row = __shfl_sync(0xffffffffu, word, 0);
    plan.n_steps = __shfl_sync(0xffffffffu, word, 1);
    plan.anchor = __shfl_sync(0xffffffffu, word, 2);
    if (!is_work) return -1;
    item = __shfl_sync(0xffffffffu, asked, 0);
    ask(queue, lane);
    load(queue, lane);
    return head;
  }
};

/* The queue of one kernel; heads_per_group is the caller's to choose. */
inline work_queue make_queue(int *counter, const tile_plan *plans, int n_tiles, int n_heads) {
  return {counter, plans, n_tiles * n_heads, n_tiles, n_heads, n_heads};
}

/* Blocks to launch, with the queue's counter set to zero before; 0 on failure. */
inline int start_queue(const work_queue &queue, cudaStream_t stream) {
  const int n_processors = count_multiprocessors();
  if (cudaMemsetAsync(queue.counter, 0, sizeof(int), stream) != cudaSuccess) return 0;
  return n_processors < queue.n_items ? n_processors : queue.n_items;
}

} // namespace egi

#endif
