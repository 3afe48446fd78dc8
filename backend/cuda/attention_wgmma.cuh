/* Hopper's warpgroup products: wgmma m64nNk16 with operands in shared memory (128-byte swizzle) or, on the left, in
 * registers. Tiles are stored as panels of 64 columns, each panel [rows][64] as the tensor copy engine writes it; a
 * tile serves as [rows, columns] with columns contracted (both operands of scores) or, on the right, with rows
 * contracted (values). Accumulators are fp32, layout as in attention_common.cuh. */
#ifndef ENGRAFT_BACKEND_CUDA_ATTENTION_WGMMA_CUH
#define ENGRAFT_BACKEND_CUDA_ATTENTION_WGMMA_CUH

#include "backend/cuda/attention_common.cuh"

namespace egi {

constexpr int panel_row_bytes = 128;

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Shared-memory descriptor (PTX ISA, matrix-descriptor): start, leading and stride offsets in 16-byte units, 128-byte
 * swizzle. The stride is that of groups of 8 rows; the leading offset steps panels and counts only where rows are
 * contracted. Only the low word differs between tiles. The address passes through an opaque move, so that the compiler
 * adds steps where they are used and does not keep a register pair for each. */
__device__ __forceinline__ unsigned operand(unsigned address, int panel_bytes) {
  unsigned opaque;
  asm volatile("mov.b32 %0, %1;" : "=r"(opaque) : "r"(address));
  return (opaque & 0x3ffffu) >> 4 | static_cast<unsigned>(panel_bytes >> 4) << 16;
}
__device__ __forceinline__ uint64_t descriptor(unsigned low) {
  constexpr unsigned stride = 1024 >> 4, swizzle_128 = 1u << 30;
  uint64_t whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(low), "r"(stride | swizzle_128));
  return whole;
}

/* Descriptor steps: along 16 columns when columns are contracted, along 16 rows when rows are. */
__device__ __forceinline__ constexpr unsigned column_step(int k, int panel_bytes) {
  return static_cast<unsigned>((k >> 2) * panel_bytes + (k & 3) * 32) >> 4;
}
__device__ __forceinline__ constexpr unsigned row_step(int k) {
  return static_cast<unsigned>(k * 16 * panel_row_bytes) >> 4;
}

#define EGI_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EGI_F16(d, i) EGI_F4(d, i), EGI_F4(d, i + 4), EGI_F4(d, i + 8), EGI_F4(d, i + 12)
#define EGI_F32(d) EGI_F16(d, 0), EGI_F16(d, 16)
#define EGI_F48(d) EGI_F32(d), EGI_F16(d, 32)
#define EGI_F64(d) EGI_F48(d), EGI_F16(d, 48)

#define EGI_LIST_32                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EGI_LIST_48 EGI_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define EGI_LIST_64 EGI_LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

/* Waits until at most PENDING of the committed groups run; names `d` so that no read of it moves before the wait. */
template <int PENDING> __device__ __forceinline__ void wgmma_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : EGI_F32(d) : "n"(PENDING) : "memory");
}
template <int PENDING> __device__ __forceinline__ void wgmma_wait(float (&d)[48]) {
  asm volatile("wgmma.wait_group.sync.aligned %48;" : EGI_F48(d) : "n"(PENDING) : "memory");
}
template <int PENDING> __device__ __forceinline__ void wgmma_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : EGI_F64(d) : "n"(PENDING) : "memory");
}

/* Keeps the computation of x before what follows in the program: ptxas would move a wait for products ahead of it, and
 * the products would have nothing to run under. `limit`: below every x, but not known to the compiler. */
__device__ __forceinline__ void hold(float x, float limit) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, %1;\n@p nanosleep.u32 1;\n}\n" ::"f"(x), "f"(limit) : "memory");
}
/* The same for a tile, by every fourth element. */
template <int N> __device__ __forceinline__ void hold(const float (&s)[N], float limit) {
  float least = s[3];
#pragma unroll
  for (int i = 7; i < N; i += 4) least = fminf(least, s[i]);
  hold(least, limit);
}

/* d = A B^T (is_first) or d += A B^T, 16 columns of both operands; N = 2 x the registers of d. */
#define EGI_WGMMA_SHARED(REGISTERS, N, TYPE, A, B, P)                                                             \
  __device__ __forceinline__ void wgmma_columns(float(&d)[REGISTERS], uint64_t a, uint64_t b, int adds, TYPE) {   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N               \
                 "k16.f32." EGI_NAME_##TYPE "." EGI_NAME_##TYPE " {" EGI_LIST_##REGISTERS "}, " A ", " B          \
                                                                                          ", p, 1, 1, 0, 0;\n}\n" \
                 : EGI_F##REGISTERS(d)                                                                            \
                 : "l"(a), "l"(b), "r"(adds)                                                                      \
                 : "memory");                                                                                     \
  }

/* d += A B: A 64 x 16 from registers, 16 rows of B. */
#define EGI_WGMMA_REGISTERS(REGISTERS, N, TYPE, A, B)                                                     \
  __device__ __forceinline__ void wgmma_rows(float(&d)[REGISTERS], const unsigned *a, uint64_t b, TYPE) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." EGI_NAME_##TYPE "." EGI_NAME_##TYPE    \
                 " {" EGI_LIST_##REGISTERS "}, {" A "}, " B ", 1, 1, 1, 1;\n"                             \
                 : EGI_F##REGISTERS(d)                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                     \
                 : "memory");                                                                             \
  }

/* Tags choose the number format by overload. */
struct tag_bf16 {};
struct tag_f16 {};
#define EGI_NAME_tag_bf16 "bf16"
#define EGI_NAME_tag_f16 "f16"
template <class Element> struct tag_of;
template <> struct tag_of<__nv_bfloat16> { using type = tag_bf16; };
template <> struct tag_of<__half> { using type = tag_f16; };

EGI_WGMMA_SHARED(32, 64, tag_bf16, "%32", "%33", "%34")
EGI_WGMMA_SHARED(32, 64, tag_f16, "%32", "%33", "%34")
EGI_WGMMA_SHARED(48, 96, tag_bf16, "%48", "%49", "%50")
EGI_WGMMA_SHARED(48, 96, tag_f16, "%48", "%49", "%50")
EGI_WGMMA_SHARED(64, 128, tag_bf16, "%64", "%65", "%66")
EGI_WGMMA_SHARED(64, 128, tag_f16, "%64", "%65", "%66")
EGI_WGMMA_REGISTERS(32, 64, tag_bf16, "%32, %33, %34, %35", "%36")
EGI_WGMMA_REGISTERS(32, 64, tag_f16, "%32, %33, %34, %35", "%36")
EGI_WGMMA_REGISTERS(64, 128, tag_bf16, "%64, %65, %66, %67", "%68")
EGI_WGMMA_REGISTERS(64, 128, tag_f16, "%64, %65, %66, %67", "%68")

#undef EGI_WGMMA_SHARED
#undef EGI_WGMMA_REGISTERS

/* d = A B^T over DIM columns: A 64 rows of a tile with panels of `a_panel` bytes, B N rows. */
template <class Element, int DIM, int R>
__device__ __forceinline__ void multiply_columns(float (&d)[R], unsigned a, int a_panel, unsigned b, int b_panel) {
  const unsigned left = operand(a, a_panel), right = operand(b, b_panel);
#pragma unroll
  for (int k = 0; k < DIM / 16; k++)
    wgmma_columns(d, descriptor(left + column_step(k, a_panel)), descriptor(right + column_step(k, b_panel)), k > 0,
                  typename tag_of<Element>::type());
}

/* d += A B over ROWS rows of B: A packed in registers. */
template <class Element, int ROWS, int R>
__device__ __forceinline__ void multiply_rows(float (&d)[R], const unsigned (&a)[ROWS / 4], unsigned b) {
  const unsigned right = operand(b, ROWS * panel_row_bytes);
#pragma unroll
  for (int k = 0; k < ROWS / 16; k++)
    wgmma_rows(d, a + 4 * k, descriptor(right + row_step(k)), typename tag_of<Element>::type());
}

} // namespace egi

#endif
