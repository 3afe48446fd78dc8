/* Tensor-core products for sm_80 and later: mma.sync m16n8k16 on tiles in shared memory whose rows are 16 bytes longer
 * than their content (an odd number of 16-byte units, so ldmatrix meets no bank twice). fp32 accumulation in k order.
 */
#ifndef ENGRAFT_BACKEND_CUDA_ATTENTION_MMA_CUH
#define ENGRAFT_BACKEND_CUDA_ATTENTION_MMA_CUH

#include "backend/cuda/attention_common.cuh"

namespace egi {

template <int COLUMNS> constexpr int padded_columns = COLUMNS + 8;

__device__ __forceinline__ unsigned shared_address(const void *pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy_16_bytes(unsigned dst, const void *src, bool is_inside) {
  const int size_bytes = is_inside ? 16 : 0; /* the rest is filled with zeros */
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(size_bytes) : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Shared memory that a block can have on the current device, 0 on failure. EGI_ATTENTION_LEAST_SHARED, for tests, takes
 * the device for one of compute capability 8.6, where that is least. */
inline int most_block_bytes() {
  int device = 0, size_bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&size_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
    return 0;
#ifdef EGI_ATTENTION_LEAST_SHARED
  size_bytes = 99 << 10;
#endif
  return size_bytes;
}

/* The smallest power of two that is at least n. */
__host__ __device__ constexpr int power_above(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

/* Starts the copy of rows first .. first + ROWS - 1 of one head; rows outside 0 .. n_rows - 1 become zeros. Each thread
 * keeps its columns (some have none where a row is no power of two) and steps down by a constant, UNROLL copies at a
 * time (fewer where registers are short). */
template <class Element, int ROWS, int COLUMNS, int THREADS, int UNROLL = 8>
__device__ __forceinline__ void copy_rows(Element *dst, const egi_cuda_rows &rows, int head, int first, int n_rows) {
  constexpr int chunks = COLUMNS / 8, stride = padded_columns<COLUMNS>;
  constexpr int threads_a_row = power_above(chunks), rows_at_once = THREADS / threads_a_row;
  constexpr int n_turns = (ROWS + rows_at_once - 1) / rows_at_once;
  const Element *base = static_cast<const Element *>(rows.data) + head * rows.head_stride;
  const int r = threadIdx.x / threads_a_row, c = threadIdx.x % threads_a_row;
  if (chunks != threads_a_row && c >= chunks) return;
  const Element *src = base + (first + r) * rows.row_stride + 8 * c;
  const unsigned to = shared_address(dst + r * stride + 8 * c);
  const bool is_whole = first >= 0 && first + ROWS <= n_rows;
#pragma unroll(UNROLL)
  for (int i = 0; i < n_turns; i++) {
    if (ROWS % rows_at_once != 0 && r + i * rows_at_once >= ROWS) break;
    const int row = first + r + i * rows_at_once;
    const bool is_inside = is_whole || (row >= 0 && row < n_rows);
    copy_16_bytes(to + 2 * i * rows_at_once * stride, is_inside ? src : base, is_inside);
    src += rows_at_once * rows.row_stride;
  }
}

__device__ __forceinline__ void load_matrices(unsigned (&m)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&m)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

template <class Element> struct mma;
template <> struct mma<__nv_bfloat16> {
  static __device__ __forceinline__ void run(float *d, const unsigned *a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
template <> struct mma<__half> {
  static __device__ __forceinline__ void run(float *d, const unsigned *a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

/* acc[MT][N / 2] = A B^T: A is MT x 16 rows, B N rows, both with DEPTH columns in shared memory (same row length). */
template <class Element, int DEPTH, int MT, int N>
__device__ __forceinline__ void product_of_rows(float (&acc)[MT][N / 2], const Element *a, const Element *b, int lane) {
  constexpr int stride = padded_columns<DEPTH>;
  const unsigned a_base = shared_address(a + (lane & 15) * stride + 8 * (lane >> 4));
  const unsigned b_base = shared_address(b + ((lane & 7) + 8 * (lane >> 4)) * stride + 8 * ((lane >> 3) & 1));
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[m][i] = 0.0f;
#pragma unroll
  for (int k = 0; k < DEPTH / 16; k++) {
    unsigned left[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) load_matrices(left[m], a_base + 2 * (16 * m * stride + 16 * k));
    unsigned right[2][4];
    load_matrices(right[0], b_base + 2 * 16 * k);
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
      if (n + 1 < N / 16) load_matrices(right[(n + 1) & 1], b_base + 2 * (16 * (n + 1) * stride + 16 * k));
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma<Element>::run(&acc[m][8 * n], left[m], right[n & 1][0], right[n & 1][1]);
        mma<Element>::run(&acc[m][8 * n + 4], left[m], right[n & 1][2], right[n & 1][3]);
      }
    }
  }
}

/* acc[MT][N / 2] += A B: A is packed in registers (MT x 16 rows, KEYS columns), B has KEYS rows of which N columns
 * count. */
template <class Element, int STRIDE, int KEYS, int MT, int N>
__device__ __forceinline__ void product_with_rows(float (&acc)[MT][N / 2], const unsigned (&a)[MT][KEYS / 4],
                                                  const Element *b, int lane) {
  const unsigned base = shared_address(b + ((lane & 7) + 8 * ((lane >> 3) & 1)) * STRIDE + 8 * (lane >> 4));
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++) {
    unsigned right[2][4];
    load_matrices_transposed(right[0], base + 2 * 16 * k * STRIDE);
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
      if (n + 1 < N / 16) load_matrices_transposed(right[(n + 1) & 1], base + 2 * (16 * k * STRIDE + 16 * (n + 1)));
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma<Element>::run(&acc[m][8 * n], &a[m][4 * k], right[n & 1][0], right[n & 1][1]);
        mma<Element>::run(&acc[m][8 * n + 4], &a[m][4 * k], right[n & 1][2], right[n & 1][3]);
      }
    }
  }
}

/* Where a warp's rows go: rows first_row .. of one head, from column `column` on; those past n_rows are dropped. */
struct row_target {
  const egi_cuda_rows *rows;
  int head, first_row, n_rows, column;
};

/* Writes a warp's MT x 16 rows of N columns, times `factor`, through its own rows of shared memory. */
template <class Element, int STRIDE, int MT, int N>
__device__ __forceinline__ void store_rows(const float (&acc)[MT][N / 2], const float (&factor)[MT][2],
                                           Element *staging, const row_target &to) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const int r = 16 * m + (lane >> 2) + 8 * (i & 1), c = to.column + 8 * (i >> 1) + 2 * (lane & 3);
      const float f = factor[m][i & 1];
      *reinterpret_cast<unsigned *>(staging + r * STRIDE + c) =
          number_format<Element>::pack(acc[m][2 * i] * f, acc[m][2 * i + 1] * f);
    }
  __syncwarp();
  constexpr int chunks = N / 8;
  Element *base = static_cast<Element *>(to.rows->data) + to.head * to.rows->head_stride + to.column;
  for (int i = lane; i < 16 * MT * chunks; i += 32) {
    const int r = i / chunks, c = i - r * chunks;
    if (to.first_row + r < to.n_rows)
      *reinterpret_cast<uint4 *>(base + (to.first_row + r) * to.rows->row_stride + 8 * c) =
          *reinterpret_cast<const uint4 *>(staging + r * STRIDE + to.column + 8 * c);
  }
}

} // namespace egi

#endif
