/* What the ragged kernels share: number formats, the walk over tiles that each warp does by itself from the offsets in
 * device memory, the gated activations, and the scalar arguments of a product. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_COMMON_CUH
#define ENGRAFT_BACKEND_CUDA_RAGGED_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "backend/cuda/ragged.h"

namespace egi {
namespace ragged {

/* ---- number formats --------------------------------------------------------------------------------------------- */

template <class Element> struct format;
template <> struct format<__nv_bfloat16> {
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
  static __device__ __forceinline__ float2 unpack(unsigned bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
};
template <> struct format<__half> {
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

__device__ __forceinline__ unsigned shared_address(const void *pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

/* ---- tiles ------------------------------------------------------------------------------------------------------ */

struct tile {
  int group, first_row, n_rows; /* rows of the group from first_row on, at least 1 */
  int column;                   /* number of the column tile */
};

/* Numbers the tiles group by group, row block by row block, column tile by column tile. A warp holds 32 groups in its
 * lanes and moves on to the next 32 when the number asked for lies behind them; numbers asked for must rise. All lanes
 * of the warp call together and get the same tile. BY_ROWS: a group has as many row blocks as it needs; otherwise each
 * group that is not empty has one. */
template <int ROWS, bool BY_ROWS> struct schedule {
  const int32_t *offsets;
  int n_groups, n_rows, n_columns, base, before, lane_first, lane_rows, lane_end;

  __device__ __forceinline__ schedule(const int32_t *offsets_, int n_groups_, int n_rows_, int n_columns_)
      : offsets(offsets_), n_groups(n_groups_), n_rows(n_rows_), n_columns(n_columns_), base(0), before(0) {
    load();
  }
  __device__ __forceinline__ void load() {
    const int lane = threadIdx.x & 31, group = base + lane;
    lane_first = lane_rows = lane_end = 0;
    if (group < n_groups) {
      lane_first = min(max(offsets[group], 0), n_rows);
      lane_rows = max(min(offsets[group + 1], n_rows) - lane_first, 0);
      lane_end = (BY_ROWS ? (lane_rows + ROWS - 1) / ROWS : static_cast<int>(lane_rows > 0)) * n_columns;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, lane_end, step);
      if (lane >= step) lane_end += other;
    }
  }
  __device__ __forceinline__ bool find(int number, tile &out) {
    int total = __shfl_sync(0xffffffffu, lane_end, 31);
    while (number >= before + total) {
      if (base + 32 >= n_groups) return false;
      before += total;
      base += 32;
      load();
      total = __shfl_sync(0xffffffffu, lane_end, 31);
    }
    const int inside = number - before;
    const int owner = __popc(__ballot_sync(0xffffffffu, lane_end <= inside));
    const int start = __shfl_sync(0xffffffffu, lane_end, max(owner - 1, 0));
    const int local = inside - (owner > 0 ? start : 0);
    const int block = local / n_columns;
    out.group = base + owner;
    out.column = local - block * n_columns;
    out.first_row = __shfl_sync(0xffffffffu, lane_first, owner) + (BY_ROWS ? block * ROWS : 0);
    out.n_rows = __shfl_sync(0xffffffffu, lane_rows, owner) - (BY_ROWS ? block * ROWS : 0);
    return true;
  }
};

/* ---- gated activation ------------------------------------------------------------------------------------------- */

/* h = g' sigmoid(slope g' + cubic g'^3) (u' + shift) with both clipped at the limit; gelu with tanh is x sigmoid(2 z).
 * Comparisons are written so that NaN passes through. slope and cubic are in base-2 units. */
struct gate_rule {
  float slope, cubic, limit, shift;
  int is_erf;
};

inline gate_rule make_gate_rule(egi_ragged_activation activation, float alpha, float limit) {
  const float log2_e = 1.44269504088896340736f, infinity = __builtin_huge_valf();
  const float slope = 1.59576912160573071176f; /* 2 sqrt(2 / pi) */
  switch (activation) {
  case EGI_RAGGED_GEGLU:
    return {0.0f, 0.0f, infinity, 0.0f, 1};
  case EGI_RAGGED_GEGLU_TANH:
    return {slope * log2_e, 0.044715f * slope * log2_e, infinity, 0.0f, 0};
  case EGI_RAGGED_CLAMPED:
    return {alpha * log2_e, 0.0f, limit, 1.0f, 0};
  default:
    return {log2_e, 0.0f, infinity, 0.0f, 0};
  }
}

__device__ __forceinline__ float sigmoid_times(float x, float base2) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-base2));
  return __fdividef(x, 1.0f + power);
}

template <bool IS_ERF> __device__ __forceinline__ float apply_gate(const gate_rule &rule, float g, float u) {
  if (IS_ERF) return 0.5f * g * (1.0f + erff(g * 0.70710678118654752440f)) * u;
  g = g > rule.limit ? rule.limit : g;
  u = u > rule.limit ? rule.limit : u;
  u = u < -rule.limit ? -rule.limit : u;
  const float z = fmaf(rule.cubic * g * g, g, rule.slope * g);
  return sigmoid_times(g, z) * (u + rule.shift);
}

/* ---- arguments -------------------------------------------------------------------------------------------------- */

/* The scalar part of a product, for both families. Contracted index c of the main part: column c of x; with halves
 * (BACKWARD, INTERLEAVED) row 2 (c mod h) + c / h of W, h = n_in / 2. */
struct product_arguments {
  const int32_t *offsets;
  int n_groups, n_rows, n_in, n_out, rank;
  int has_halves, is_interleaved;
  void *y, *gate_up;
  int64_t y_stride, gate_up_stride;
  const void *bias;
  const float *row_weight;
  gate_rule rule;
};

inline product_arguments make_arguments(const egi_ragged_product &p) {
  product_arguments a = {};
  a.offsets = p.offsets;
  a.n_groups = p.n_groups;
  a.n_rows = static_cast<int>(p.n_rows);
  a.n_in = p.n_in;
  a.n_out = p.n_out;
  a.rank = p.rank;
  a.is_interleaved = p.pairing == EGI_RAGGED_INTERLEAVED;
  a.has_halves = a.is_interleaved && p.direction == EGI_RAGGED_BACKWARD;
  a.y = p.y.data;
  a.y_stride = p.y.row_stride;
  a.gate_up = p.gate_up.data;
  a.gate_up_stride = p.gate_up.row_stride;
  a.bias = p.bias;
  a.row_weight = p.row_weight;
  a.rule = make_gate_rule(p.activation, p.alpha, p.limit);
  return a;
}

/* Bias of result column `column` and the next, of the gate (half 0) or up (half 1) side where the result is gated. */
template <class Element, bool IS_GATED>
__device__ __forceinline__ float2 bias_pair(const product_arguments &a, int group, int half, int column) {
  const Element *bias = static_cast<const Element *>(a.bias) + static_cast<int64_t>(group) * a.n_out;
  const int size = IS_GATED ? a.n_out / 2 : a.n_out;
  if (column >= size) return make_float2(0.0f, 0.0f);
  if (!IS_GATED) return format<Element>::unpack(*reinterpret_cast<const unsigned *>(bias + column));
  if (!a.is_interleaved)
    return make_float2(static_cast<float>(bias[half * size + column]),
                       static_cast<float>(bias[half * size + column + 1]));
  return make_float2(static_cast<float>(bias[2 * column + half]), static_cast<float>(bias[2 * column + 2 + half]));
}

/* ---- launchers of one family each; arguments are checked before -------------------------------------------------- */

egi_cuda_status product_mma(const egi_ragged_product &product, cudaStream_t stream);
egi_cuda_status product_sm90(const egi_ragged_product &product, cudaStream_t stream);
egi_cuda_status product_nf4_sm90(const egi_ragged_product &product, cudaStream_t stream);
egi_cuda_status reduction_mma(const egi_ragged_reduction &reduction, cudaStream_t stream);
egi_cuda_status reduction_sm90(const egi_ragged_reduction &reduction, cudaStream_t stream);

/* Multiprocessors of the current device, 0 on failure. */
inline int count_processors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
  return count;
}

} // namespace ragged
} // namespace egi

#endif
