/* What the attention kernels share: number formats, the visibility rule, softmax pieces on register tiles, the order of
 * the work items, and the layout of the workspace. Register tiles have the layout of mma accumulators: a thread holds,
 * of rows r and r + 8, the columns 8 i + 2 (lane % 4) + {0, 1}; element 4 i + {0, 1} is row r, 4 i + {2, 3} row r + 8.
 */
#ifndef ENGRAFT_BACKEND_CUDA_ATTENTION_COMMON_CUH
#define ENGRAFT_BACKEND_CUDA_ATTENTION_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <limits.h>
#include <math_constants.h>

#include "backend/cuda/attention.h"
#include "backend/cuda/launch.cuh"

namespace egi {

constexpr float log2_e = 1.44269504088896340736f;
constexpr float ln_2 = 0.69314718055994530942f;

/* ---- workspace ------------------------------------------------------------------------------------------------- */

enum { PREPARE_ROWS = 64, ROW_PADDING = 128 };
/* Tiles of queries whose d_q the mma kernels add up: at least and at most so many rows. */
enum { LEAST_DQ_ROWS = 16, MOST_DQ_ROWS = 64 };
typedef enum workspace_kind { WORKSPACE_FORWARD, WORKSPACE_BACKWARD_SM90, WORKSPACE_BACKWARD_MMA } workspace_kind;

/* Floats that a row of such a sum takes. */
constexpr int dq_row_floats(int head_dim) {
  return (head_dim + 31) / 32 * 32;
}

struct attention_workspace {
  float2 *row_pairs;   /* [n_heads, padded_rows] (lse in base 2, sum of d_out * out); (inf, 0) past n_queries */
  float *sink_parts;   /* [n_heads, n_prepare_blocks] */
  int64_t padded_rows; /* n_queries and a tile more, so that tiles may start anywhere */
  int n_prepare_blocks;
  void *plan;     /* where the caller brings none */
  float *dq_sums; /* the mma kernels' parts of d_q, added up */
  int *dq_counts; /* blocks that have started, then for each sum how many parts it has */
  size_t size_bytes;
};

/* Bytes of a plan (attention_plan.cuh). */
size_t count_plan_bytes(const egi_cuda_attention &a);

inline attention_workspace carve_workspace(const egi_cuda_attention &a, workspace_kind kind) {
  attention_workspace w = {};
  char *base = static_cast<char *>(a.workspace);
  w.plan = base;
  w.size_bytes = count_plan_bytes(a) / 256 * 256 + 256;
  if (kind == WORKSPACE_FORWARD) return w;
  w.padded_rows = (a.n_queries + ROW_PADDING + PREPARE_ROWS - 1) / PREPARE_ROWS * PREPARE_ROWS;
  w.n_prepare_blocks = static_cast<int>(w.padded_rows / PREPARE_ROWS);
  w.row_pairs = reinterpret_cast<float2 *>(base + w.size_bytes);
  w.size_bytes += static_cast<size_t>(a.n_heads) * static_cast<size_t>(w.padded_rows) * sizeof(float2);
  w.sink_parts = reinterpret_cast<float *>(base + w.size_bytes);
  w.size_bytes += static_cast<size_t>(a.n_heads) * static_cast<size_t>(w.n_prepare_blocks) * sizeof(float);
  if (kind == WORKSPACE_BACKWARD_SM90) return w;
  const size_t n_tiles = static_cast<size_t>((a.n_queries + MOST_DQ_ROWS - 1) / MOST_DQ_ROWS);
  w.size_bytes = (w.size_bytes + 255) / 256 * 256;
  w.dq_sums = reinterpret_cast<float *>(base + w.size_bytes);
  w.size_bytes += n_tiles * MOST_DQ_ROWS * static_cast<size_t>(a.n_heads * dq_row_floats(a.head_dim)) * sizeof(float);
  w.dq_counts = reinterpret_cast<int *>(base + w.size_bytes);
  w.size_bytes += (1 + static_cast<size_t>(a.n_heads) * n_tiles * (MOST_DQ_ROWS / LEAST_DQ_ROWS)) * sizeof(int);
  return w;
}

/* Launchers of one family each, called by attention.cu after it has checked the arguments. */
egi_cuda_status prepare_backward(const egi_cuda_attention &a, cudaStream_t stream);
egi_cuda_status forward_mma(const egi_cuda_attention &a, cudaStream_t stream);
egi_cuda_status backward_mma(const egi_cuda_attention &a, cudaStream_t stream);
egi_cuda_status forward_sm90(const egi_cuda_attention &a, cudaStream_t stream);
egi_cuda_status backward_dq_sm90(const egi_cuda_attention &a, cudaStream_t stream);
egi_cuda_status backward_dkv_sm90(const egi_cuda_attention &a, cudaStream_t stream);

/* Heads that run side by side: so many that their keys and values (or queries and gradients) stay in the L2 cache, but
 * enough to keep all multiprocessors busy until the short tiles at the end. `step` heads share one such row. */
inline int heads_in_cache(int64_t rows, int row_bytes, int n_heads, int step, int n_tiles) {
  const int64_t budget = 24 << 20, least_items = 512;
  const int64_t in_cache = budget / (rows * row_bytes + 1) * step, least = (least_items + n_tiles - 1) / n_tiles;
  int64_t heads = in_cache > least ? in_cache : least;
  heads = (heads + step - 1) / step * step;
  return heads < n_heads ? static_cast<int>(heads) : n_heads;
}

/* ---- number formats -------------------------------------------------------------------------------------------- */

template <class Element> struct number_format;

template <> struct number_format<__nv_bfloat16> {
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
  static __device__ __forceinline__ float2 unpack(unsigned bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
};

template <> struct number_format<__half> {
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
  static __device__ __forceinline__ float2 unpack(unsigned bits) {
    __half2 pair;
    memcpy(&pair, &bits, sizeof pair);
    return __half22float2(pair);
  }
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float divide_fast(float x, float y) {
  return __fdividef(x, y);
}

/* tanh(x) given 2 log2(e) x. The error stays near 1e-7, which tanh.approx (5e-4) does not reach: a softcap of 50 would
 * turn that into 0.02 of a logit. */
__device__ __forceinline__ float tanh_of_scaled(float x) {
  return 1.0f - divide_fast(2.0f, exp2_fast(x) + 1.0f);
}

/* Rows of packed pairs for the next product: A operand order, k step kk at words 4 kk .. 4 kk + 3. */
template <class Element, int N>
__device__ __forceinline__ void pack_tile(const float (&s)[N], unsigned (&packed)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) packed[i] = number_format<Element>::pack(s[2 * i], s[2 * i + 1]);
}

/* ---- who sees whom --------------------------------------------------------------------------------------------- */

__device__ __forceinline__ int query_offset(const egi_cuda_attention &a) {
  return a.query_offset + (a.query_offset_device ? *a.query_offset_device : 0);
}

/* Bits of a thread's columns, 8 i + first + {0, 1}, that lie before `column`, of up to 64 columns. */
__device__ __forceinline__ unsigned columns_before(int column, int first) {
  const int t = max(column - first, 0);
  unsigned bits;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(bits) : "r"(2 * (t >> 3) + min(t & 7, 2)));
  return bits;
}

/* Registers BEGIN .. END - 1 of row r of a tile: -inf where the bit is not set. A test of a bit of a word costs less
 * than two comparisons. */
template <int BEGIN, int END, int N>
__device__ __forceinline__ void select_columns(float (&s)[N], int r, unsigned seen) {
  static_assert(N <= 64, "a row's columns must fit a word");
#pragma unroll
  for (int i = BEGIN / 2; i < END / 2; i++) {
    float &score = s[4 * (i >> 1) + 2 * r + (i & 1)];
    score = seen >> i & 1u ? score : -CUDART_INF_F;
  }
}

/* Columns low .. high of a tile row count; the rest become -inf. `low` and `high` are relative to the tile's start. */
template <int N>
__device__ __forceinline__ void mask_tile(float (&s)[N], const int (&low)[2], const int (&high)[2], int lane) {
  const int first = 2 * (lane & 3);
#pragma unroll
  for (int r = 0; r < 2; r++)
    select_columns<0, N>(s, r, columns_before(high[r] + 1, first) & ~columns_before(low[r], first));
}

/* Beyond every key; small enough that a difference with a tile's start stays an int. */
constexpr int no_key = 1 << 30;

/* The first key a query row may see, and the last; rows past the end see nothing. `low` is as loaded, so that nothing
 * waits for it before a mask needs it. */
__device__ __forceinline__ void row_limits(const egi_cuda_attention &a, int row, int offset, int &low, int &high) {
  const bool is_inside = row < a.n_queries;
  low = is_inside ? a.first_key[row] : no_key;
  high = is_inside ? min(row + offset, static_cast<int>(a.n_keys) - 1) : -1;
}

/* Smallest and largest first key over rows first .. first + count - 1 (a multiple of 32), for every lane alike. */
__device__ __forceinline__ int2 first_key_range(const egi_cuda_attention &a, int first, int count, int lane) {
  int smallest = no_key, largest = 0;
  for (int r = first + lane; r < first + count; r += 32) {
    const int key = r < a.n_queries ? min(max(a.first_key[r], 0), no_key) : no_key;
    smallest = min(smallest, key);
    largest = max(largest, key);
  }
  return make_int2(__reduce_min_sync(0xffffffffu, smallest), __reduce_max_sync(0xffffffffu, largest));
}

/* The same for the last query of keys first .. first + count - 1; keys past the end count for neither. */
__device__ __forceinline__ int2 last_query_range(const egi_cuda_attention &a, int first, int count, int lane) {
  int smallest = INT_MAX, largest = -1;
  for (int r = first + lane; r < first + count; r += 32) {
    if (r >= a.n_keys) continue;
    const int query = a.last_query[r];
    smallest = min(smallest, query);
    largest = max(largest, query);
  }
  return make_int2(__reduce_min_sync(0xffffffffu, smallest), __reduce_max_sync(0xffffffffu, largest));
}

/* ---- online softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023) ----------------------------------- */

struct softmax_state {
  float reference[2]; /* what exponentials are relative to: a score near the largest so far, before scaling */
  float sum[2];       /* this thread's part of the sum of exponentials */
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ int quad_max(int x) {
  x = max(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return max(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Exponentials may grow this far, in powers of two, before their reference is raised: raising it costs a pass over the
 * outputs. Sums and outputs share the reference, so it cancels; 2^8 is far from the largest number of any format. */
constexpr float most_rise = 8.0f;

/* The largest of `largest` and registers BEGIN .. END - 1 of row r. */
template <int BEGIN, int END, int N>
__device__ __forceinline__ float row_max(const float (&s)[N], int r, float largest) {
#pragma unroll
  for (int i = BEGIN / 4; i < END / 4; i++) largest = fmaxf(largest, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
  return largest;
}

/* The same given that the result is positive: bits of positive numbers order as integers, of which three go at once. */
template <int BEGIN, int END, int N>
__device__ __forceinline__ int row_max_bits(const float (&s)[N], int r, float largest) {
  int most[2] = {__float_as_int(largest), 0};
#pragma unroll
  for (int i = BEGIN / 4; i < END / 4; i++)
    most[i & 1] = __vimax3_s32(most[i & 1], __float_as_int(s[4 * i + 2 * r]), __float_as_int(s[4 * i + 2 * r + 1]));
  return max(most[0], most[1]);
}

/* Moves the reference of a row's exponentials to `largest` if that lies far above it. `shift` is what scaled scores are
 * reduced by; returns what older sums and outputs are multiplied by. */
__device__ __forceinline__ float move_reference(float &reference, float largest, float scale, float &shift) {
  const float rise = (largest - reference) * scale;
  const bool is_moved = rise > most_rise; /* NaN: nothing seen yet */
  reference = is_moved ? largest : reference;
  shift = reference == -CUDART_INF_F ? 0.0f : reference * scale;
  return is_moved ? exp2_fast(-rise) : 1.0f;
}

/* Scores in registers BEGIN .. END - 1 to exponentials; their sums are added. */
template <int BEGIN, int END, int N>
__device__ __forceinline__ void exponentials(float (&s)[N], const float (&shift)[2], float scale, float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum_even = 0.0f, sum_odd = 0.0f;
#pragma unroll
    for (int i = BEGIN / 4; i < END / 4; i++) {
      const float even = exp2_fast(fmaf(s[4 * i + 2 * r], scale, -shift[r]));
      const float odd = exp2_fast(fmaf(s[4 * i + 2 * r + 1], scale, -shift[r]));
      s[4 * i + 2 * r] = even;
      s[4 * i + 2 * r + 1] = odd;
      sum_even += even;
      sum_odd += odd;
    }
    sum[r] += sum_even + sum_odd;
  }
}

/* A tile's scores to exponentials; `correction` is what older outputs are multiplied by. */
template <int N>
__device__ __forceinline__ void softmax_tile(float (&s)[N], softmax_state &state, float (&correction)[2], float scale) {
  float shift[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float largest = quad_max(row_max<0, N>(s, r, state.reference[r]));
    correction[r] = move_reference(state.reference[r], largest, scale, shift[r]);
    state.sum[r] *= correction[r];
  }
  exponentials<0, N>(s, shift, scale, state.sum);
}

/* softcap * tanh(scale * s / softcap) in base-2 units; `inner` = 2 log2(e) scale / softcap, `outer` = softcap log2(e).
 */
template <int N> __device__ __forceinline__ void cap_tile(float (&s)[N], float inner, float outer) {
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = outer * tanh_of_scaled(s[i] * inner);
}

/* Ends a row: adds the sink, gives the factor for the output and the log-sum-exp (natural). */
__device__ __forceinline__ float finish_row(float reference, float sum, float scale, float sink, float &lse) {
  sum = quad_sum(sum);
  const float base = reference == -CUDART_INF_F ? -CUDART_INF_F : reference * scale;
  const float sink_base2 = sink * log2_e;
  const float top = fmaxf(base, sink_base2);
  if (top == -CUDART_INF_F) {
    lse = -CUDART_INF_F;
    return 0.0f;
  }
  const float shrink = exp2_fast(base - top);
  const float total = sum * shrink + exp2_fast(sink_base2 - top);
  lse = (top + __log2f(total)) * ln_2;
  return divide_fast(shrink, total);
}

/* ---- backward: exponentials and score gradients ----------------------------------------------------------------- */

/* One score to its probability, given the row's base-2 log-sum-exp. With a softcap, `slope` is the cap's derivative
 * (1 - tanh^2), else 1. A score of -inf gives 0. */
template <bool HAS_CAP>
__device__ __forceinline__ float probability(float s, float lse, float scale, float inner, float outer, float &slope) {
  if (!HAS_CAP) {
    slope = 1.0f;
    return exp2_fast(fmaf(s, scale, -lse));
  }
  if (s == -CUDART_INF_F) {
    slope = 0.0f;
    return 0.0f;
  }
  const float t = tanh_of_scaled(s * inner);
  slope = 1.0f - t * t;
  return exp2_fast(fmaf(t, outer, -lse));
}

/* ---- order of work ---------------------------------------------------------------------------------------------- */

struct work_item {
  int tile, head;
};

/* Item `index` of n_tiles x n_heads: groups of heads one after the other, inside a group tile by tile, so that long
 * tiles (the caller numbers them first) start first and heads that share the cache run together. */
__device__ __forceinline__ work_item find_work(int index, int n_tiles, int n_heads, int heads_per_group) {
  const int group = index / (n_tiles * heads_per_group);
  const int rest = index - group * n_tiles * heads_per_group;
  const int heads = min(heads_per_group, n_heads - group * heads_per_group);
  work_item work;
  work.tile = rest / heads;
  work.head = group * heads_per_group + (rest - work.tile * heads);
  return work;
}

} // namespace egi

#endif
