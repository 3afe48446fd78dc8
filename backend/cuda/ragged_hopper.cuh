/* Hopper's instructions as the ragged kernels use them: barriers, the tensor copy engine,
 * warpgroup products on operands in shared memory (128-byte swizzle). Operand tiles are panels of
 * 64 columns, rows of 128 bytes, as the copy engine writes them. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_HOPPER_CUH
#define ENGRAFT_BACKEND_CUDA_RAGGED_HOPPER_CUH

#include <cuda.h>

#include "backend/cuda/ragged_common.cuh"

namespace egi {
namespace ragged {

/* Host side: a tensor map of `rank` dimensions, innermost first. */
struct map_shape {
  int rank, element_bytes; /* 2: the dtype, swizzled by 128 bytes; 1: bytes, as they are */
  uint64_t dims[4], strides_bytes[3];
  uint32_t box[4];
};
bool make_map(CUtensorMap *map, const void *data, egi_cuda_float dtype, const map_shape &shape);

/* ---- barriers --------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
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
/* True in one lane of the warp, in a way that lets the compiler know it is one. */
__device__ __forceinline__ bool elect_one() {
  unsigned is_elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(is_elected));
  return is_elected != 0;
}
__device__ __forceinline__ void named_sync(int name, int n_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(n_threads) : "memory");
}
__device__ __forceinline__ void init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Makes this thread's stores to shared memory visible to the copy engine and the tensor cores. */
__device__ __forceinline__ void store_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

/* ---- copies ----------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_2d(unsigned dst, const CUtensorMap *map, unsigned barrier, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
               "[%4];" ::"r"(dst),
               "l"(map), "r"(column), "r"(row), "r"(barrier)
               : "memory");
}
struct position {
  int c0, c1, c2, c3;
};
__device__ __forceinline__ void copy_3d(unsigned dst, const CUtensorMap *map, unsigned barrier, const position &at) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
               "%4}], [%5];" ::"r"(dst),
               "l"(map), "r"(at.c0), "r"(at.c1), "r"(at.c2), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void copy_4d(unsigned dst, const CUtensorMap *map, unsigned barrier, const position &at) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
               "%4, %5}], [%6];" ::"r"(dst),
               "l"(map), "r"(at.c0), "r"(at.c1), "r"(at.c2), "r"(at.c3), "r"(barrier)
               : "memory");
}

/* ---- products --------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Shared-memory descriptor (PTX ISA, matrix descriptor): start, leading and stride offset in units of 16 bytes,
 * 128-byte swizzle. The stride is that of groups of 8 rows; the leading offset is that of panels and counts only for
 * operands whose rows are contracted. Only the low word differs between the steps of a tile. */
__device__ __forceinline__ unsigned operand(unsigned address, int panel_bytes) {
  return (address & 0x3ffffu) >> 4 | static_cast<unsigned>(panel_bytes >> 4) << 16;
}
__device__ __forceinline__ uint64_t descriptor(unsigned low) {
  constexpr unsigned high = 1024u >> 4 | 1u << 30;
  uint64_t whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(low), "r"(high));
  return whole;
}

#define EGI_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EGI_F16(d, i) EGI_F4(d, i), EGI_F4(d, i + 4), EGI_F4(d, i + 8), EGI_F4(d, i + 12)
#define EGI_F32(d) EGI_F16(d, 0), EGI_F16(d, 16)
#define EGI_F64(d) EGI_F32(d), EGI_F16(d, 32), EGI_F16(d, 48)
#define EGI_LIST_32                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EGI_LIST_64                                                                                \
  EGI_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
              "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

/* Waits until at most PENDING of the committed groups run. The second form names `d` so that no read of it moves before
 * the wait. */
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING> __device__ __forceinline__ void wgmma_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : EGI_F32(d) : "n"(PENDING) : "memory");
}
template <int PENDING> __device__ __forceinline__ void wgmma_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : EGI_F64(d) : "n"(PENDING) : "memory");
}

/* d (+)= A B over 16 contracted elements, d 64 x 2 R. LEFT_ROWS, RIGHT_ROWS: the operand's rows are contracted. */
template <class Element, bool LEFT_ROWS, bool RIGHT_ROWS, int R> struct product;
#define EGI_PRODUCT(ELEMENT, NAME, R, N, A, B, P, TA, TB)                                                             \
  template <bool LEFT_ROWS, bool RIGHT_ROWS> struct product<ELEMENT, LEFT_ROWS, RIGHT_ROWS, R> {                      \
    static __device__ __forceinline__ void run(float (&d)[R], uint64_t a, uint64_t b, int adds) {                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   "." NAME " {" EGI_LIST_##R "}, " A ", " B ", p, 1, 1, " TA ", " TB ";\n}\n"                        \
                   : EGI_F##R(d)                                                                                      \
                   : "l"(a), "l"(b), "r"(adds), "n"(LEFT_ROWS ? 1 : 0), "n"(RIGHT_ROWS ? 1 : 0)                       \
                   : "memory");                                                                                       \
    }                                                                                                                 \
  };
EGI_PRODUCT(__nv_bfloat16, "bf16", 32, 64, "%32", "%33", "%34", "%35", "%36")
EGI_PRODUCT(__nv_bfloat16, "bf16", 64, 128, "%64", "%65", "%66", "%67", "%68")
EGI_PRODUCT(__half, "f16", 32, 64, "%32", "%33", "%34", "%35", "%36")
EGI_PRODUCT(__half, "f16", 64, 128, "%64", "%65", "%66", "%67", "%68")
#undef EGI_PRODUCT

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

} // namespace ragged
} // namespace egi

#endif
