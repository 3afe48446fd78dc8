/* Attention of any shape: what the general kernels are told, and the parts they share. A block has 256 threads in 16
 * rows (y) of 16 (x); a tile of scores is 64 queries x 64 keys, of which a thread holds queries 4 y .. and keys 4 x ..
 * . Operands of any strides and types are staged in shared memory as f32; all sums are f32 and in a fixed order.
 * Columns of results are worked on 128 at a time, by blocks of their own, so that no head is too wide. */
#ifndef ENGRAFT_BACKEND_CUDA_ATTENTION_GENERAL_CUH
#define ENGRAFT_BACKEND_CUDA_ATTENTION_GENERAL_CUH

#include <math_constants.h>

#include "backend/cuda/element.cuh"

namespace egi {
namespace general {

enum { THREADS = 256, TILE = 64, DEPTH = 32, COLUMNS = 128, PITCH = TILE + 4 };

/* Strides, in elements, of an operand seen as [batch, heads, rows, columns]. */
struct head_strides {
  int64_t batch, head, row, column;
};

struct head_rows {
  void *data;
  head_strides strides;
};

enum mask_kind { MASK_NONE, MASK_BOOL, MASK_FLOAT };

/* All pointers are device memory; what an operator lacks is NULL. */
struct attention {
  int n_batches, q_heads, kv_heads, n_queries, n_keys, width, value_width;
  int offset;               /* position of query 0 among the keys; with lengths: length - n_queries */
  const int32_t *positions; /* of the queries, where they stand in a cache: the first counts */
  float scale, softcap;
  int is_causal;
  int left, right;  /* window; -1: none */
  int mask_columns; /* keys beyond it are hidden */
  mask_kind mask_form;
  element_kind mask_element;
  head_rows mask;
  const void *sinks;
  element_kind sink_element;
  int64_t sink_stride;
  const int64_t *lengths;
  int64_t lengths_stride;
  const int32_t *first_key, *last_query;
  int64_t first_key_stride, last_query_stride;
  int2 *bounds; /* [batch, tiles of queries]: first key, and the one behind the last */
  head_rows q, k, v, y;
  float *lse;
  int64_t lse_strides[3];
  /* gradient: */
  head_rows dy, dq, dk, dv;
  float *delta; /* [batch, q_heads, queries] */
  void *d_sinks;
  int64_t d_sink_stride;
};

inline int64_t count_tiles(int64_t rows) {
  return (rows + TILE - 1) / TILE;
}

__host__ __device__ __forceinline__ int tiles_of(int rows) {
  return (rows + TILE - 1) / TILE;
}

/* One head's tile of work; `place` in the functions below is its first query (x) and key (y). */
struct head_place {
  int batch, q_head, kv_head;
};

/* [rows, columns] of a head. */
template <class Element> struct head_matrix {
  Element *data;
  int64_t row_stride, column_stride;

  __device__ __forceinline__ Element &at(int row, int column) const {
    return data[row * row_stride + column * column_stride];
  }
};

template <class Element>
__device__ __forceinline__ head_matrix<Element> head_of(const head_rows &rows, int batch, int head) {
  return {static_cast<Element *>(rows.data) + batch * rows.strides.batch + head * rows.strides.head, rows.strides.row,
          rows.strides.column};
}

__device__ __forceinline__ float sink_of(const attention &a, int q_head) {
  return a.sinks ? read_element(a.sinks, q_head * a.sink_stride, a.sink_element) : -CUDART_INF_F;
}

__device__ __forceinline__ int64_t lse_at(const attention &a, const head_place &at, int query) {
  return at.batch * a.lse_strides[0] + at.q_head * a.lse_strides[1] + query * a.lse_strides[2];
}

__device__ __forceinline__ int64_t delta_at(const attention &a, const head_place &at, int query) {
  return (static_cast<int64_t>(at.batch) * a.q_heads + at.q_head) * a.n_queries + query;
}

/* Keys [x, y) that a query sees, mask aside. */
__device__ __forceinline__ int2 keys_of(const attention &a, int batch, int query) {
  int length = a.n_keys, offset = a.offset;
  if (a.lengths) {
    const int64_t given = a.lengths[batch * a.lengths_stride];
    length = static_cast<int>(given < 0 ? 0 : given < a.n_keys ? given : a.n_keys);
    offset = length - a.n_queries;
  }
  if (a.positions) offset = *a.positions;
  const int position = query + offset;
  int first = 0, last = min(length, a.mask_columns);
  if (a.is_causal) last = min(last, position + 1);
  if (a.right >= 0) last = min(last, position + a.right + 1);
  if (a.left >= 0) first = max(first, position - a.left);
  if (a.first_key) {
    first = max(first, a.first_key[query * a.first_key_stride]);
    last = min(last, a.last_query[query * a.last_query_stride] + 1);
  }
  last = max(last, 0);
  return make_int2(min(first, last), last);
}

/* What is added to the score of a key that the query sees: -inf hides it. */
__device__ __forceinline__ float bias_of(const attention &a, const head_place &at, int query, int key) {
  if (a.mask_form == MASK_NONE) return 0.0f;
  const head_strides &s = a.mask.strides;
  const int64_t i = at.batch * s.batch + at.q_head * s.head + query * s.row + key * s.column;
  if (a.mask_form == MASK_BOOL) return static_cast<const uint8_t *>(a.mask.data)[i] ? 0.0f : -CUDART_INF_F;
  return read_element(a.mask.data, i, a.mask_element);
}

/* dst[column][row] of rows [row, row + 64) and columns [column, column + 32), 0 outside. */
template <class Element>
__device__ __forceinline__ void stage_turned(float (*dst)[PITCH], const head_matrix<Element> &src, int2 at, int2 size) {
#pragma unroll 4
  for (int i = 0; i < TILE * DEPTH / THREADS; i++) {
    const int index = static_cast<int>(threadIdx.x) + i * THREADS, column = index % DEPTH, row = index / DEPTH;
    const bool is_inside = at.x + row < size.x && at.y + column < size.y;
    dst[column][row] = is_inside ? to_float(src.at(at.x + row, at.y + column)) : 0.0f;
  }
}

/* dst[row][column] of 32 rows and 128 columns; 0 outside, and in rows without a bit in `used`. */
template <class Element>
__device__ __forceinline__ void stage_rows(float (*dst)[COLUMNS], const head_matrix<Element> &src, int2 at, int2 size,
                                           unsigned used) {
#pragma unroll 4
  for (int i = 0; i < DEPTH * COLUMNS / THREADS; i++) {
    const int index = static_cast<int>(threadIdx.x) + i * THREADS, column = index % COLUMNS, row = index / COLUMNS;
    const bool is_inside = at.x + row < size.x && at.y + column < size.y && (used >> row & 1) != 0;
    dst[row][column] = is_inside ? to_float(src.at(at.x + row, at.y + column)) : 0.0f;
  }
}

/* sums[i][j] += left[.][4 y + i] right[.][4 x + j] */
__device__ __forceinline__ void add_products(float (&sums)[4][4], const float (*left)[PITCH],
                                             const float (*right)[PITCH], int depth) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll 8
  for (int k = 0; k < depth; k++) {
    const float4 a4 = *reinterpret_cast<const float4 *>(&left[k][4 * y]);
    const float4 b4 = *reinterpret_cast<const float4 *>(&right[k][4 * x]);
    const float a[4] = {a4.x, a4.y, a4.z, a4.w}, b[4] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
  }
}

/* sums[i][j] += left[.][4 y + i] right[.][column j], columns 4 x .. and 64 + 4 x .. */
__device__ __forceinline__ void add_columns(float (&sums)[4][8], const float (*left)[PITCH],
                                            const float (*right)[COLUMNS], int n_columns) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
  for (int half = 0; half < 2; half++) {
    if (half * 64 >= n_columns) break;
#pragma unroll 8
    for (int k = 0; k < DEPTH; k++) {
      const float4 a4 = *reinterpret_cast<const float4 *>(&left[k][4 * y]);
      const float4 b4 = *reinterpret_cast<const float4 *>(&right[k][64 * half + 4 * x]);
      const float a[4] = {a4.x, a4.y, a4.z, a4.w}, b[4] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if (half == 0) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
          if (half == 1) sums[i][4 + j] = fmaf(a[i], b[j], sums[i][4 + j]);
        }
    }
  }
}

/* Shared memory of a block: what is multiplied, and a tile of probabilities or their gradients. */
struct shared_tiles {
  union {
    struct {
      float left[DEPTH][PITCH], right[DEPTH][PITCH];
    } turned;
    float rows[DEPTH][COLUMNS];
  } staged;
  float tile[TILE][PITCH];
  unsigned used[2]; /* keys of the tile that some query of it sees */
};

/* sums = rows of left times rows of right, over all columns. */
template <class Element>
__device__ __forceinline__ void multiply_rows(shared_tiles &shared, float (&sums)[4][4],
                                              const head_matrix<Element> &left, const head_matrix<Element> &right,
                                              int2 at, int3 size) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
  for (int column = 0; column < size.z; column += DEPTH) {
    __syncthreads();
    stage_turned(shared.staged.turned.left, left, make_int2(at.x, column), make_int2(size.x, size.z));
    stage_turned(shared.staged.turned.right, right, make_int2(at.y, column), make_int2(size.y, size.z));
    __syncthreads();
    add_products(sums, shared.staged.turned.left, shared.staged.turned.right, min(DEPTH, size.z - column));
  }
}

/* Which of the thread's 16 scores are seen, a bit each. The whole block: `shared.used` is set for it afterwards. False
 * where no query of the tile sees a key of it. */
__device__ __forceinline__ bool find_seen(const attention &a, const head_place &at, int2 place, shared_tiles &shared,
                                          unsigned &seen) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
  unsigned used = 0;
  seen = 0;
  __syncthreads();
  if (threadIdx.x < 2) shared.used[threadIdx.x] = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = place.x + 4 * y + i;
    const int2 keys = row < a.n_queries ? keys_of(a, at.batch, row) : make_int2(0, 0);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int column = place.y + 4 * x + j;
      if (column < keys.x || column >= keys.y || bias_of(a, at, row, column) == -CUDART_INF_F) continue;
      seen |= 1u << (4 * i + j);
      used |= 1u << j;
    }
  }
  const bool is_any = __syncthreads_or(seen != 0) != 0;
  if (is_any && used) atomicOr(&shared.used[x / 8], used << (4 * x % 32));
  return is_any;
}

/* A product scaled, capped and with what the mask adds; `slope` gets what the cap leaves of a gradient. */
__device__ __forceinline__ float finish_score(const attention &a, const head_place &at, int query, int key,
                                              float product, float &slope) {
  float score = product * a.scale;
  slope = 1.0f;
  if (a.softcap > 0.0f) {
    const float share = tanhf(score / a.softcap);
    slope = 1.0f - share * share;
    score = a.softcap * share;
  }
  return a.mask_form == MASK_FLOAT ? score + bias_of(a, at, query, key) : score;
}

/* Largest and sum over the 16 threads that share a row. */
__device__ __forceinline__ float row_largest(float x) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/* The thread's numbers as tile[key][query]. */
__device__ __forceinline__ void put_by_key(shared_tiles &shared, const float (&numbers)[4][4]) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
  for (int j = 0; j < 4; j++)
    *reinterpret_cast<float4 *>(&shared.tile[4 * x + j][4 * y]) =
        make_float4(numbers[0][j], numbers[1][j], numbers[2][j], numbers[3][j]);
}

/* ... as tile[query][key]. */
__device__ __forceinline__ void put_by_query(shared_tiles &shared, const float (&numbers)[4][4]) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < 4; i++)
    *reinterpret_cast<float4 *>(&shared.tile[4 * y + i][4 * x]) =
        make_float4(numbers[i][0], numbers[i][1], numbers[i][2], numbers[i][3]);
}

/* sums += turned tile times 64 rows of src from `at` on. The whole block; the tile has been put. */
template <class Element>
__device__ __forceinline__ void multiply_tile(shared_tiles &shared, float (&sums)[4][8],
                                              const head_matrix<Element> &src, int2 at, int2 size, bool is_keys) {
  for (int part = 0; part < TILE / DEPTH; part++) {
    __syncthreads();
    const unsigned used = is_keys ? shared.used[part] : ~0u;
    stage_rows(shared.staged.rows, src, make_int2(at.x + part * DEPTH, at.y), size, used);
    __syncthreads();
    add_columns(sums, shared.tile + part * DEPTH, shared.staged.rows, size.y - at.y);
  }
}

/* The thread's part of a result of 64 rows, factor[i] times. */
template <class Element>
__device__ __forceinline__ void store_columns(const float (&sums)[4][8], const float (&factor)[4],
                                              const head_matrix<Element> &dst, int2 at, int2 size) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = at.x + 4 * y + i;
    if (row >= size.x) continue;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int column = at.y + j / 4 * 64 + 4 * x + j % 4;
      if (column < size.y) dst.at(row, column) = from_float<Element>(factor[i] * sums[i][j]);
    }
  }
}

} // namespace general

/* Launchers: q, k, v, .. are of one type. The bounds must be there. */
cudaError_t find_attention_bounds(const general::attention &a, cudaStream_t stream);
cudaError_t attention_forward_general(const general::attention &a, element_kind element, cudaStream_t stream);
/* The output qk_matmul_output of Attention. */
cudaError_t attention_scores_general(const general::attention &a, element_kind element, int mode,
                                     const general::head_rows &out, cudaStream_t stream);
cudaError_t attention_backward_general(const general::attention &a, element_kind element, cudaStream_t stream);

} // namespace egi

#endif
