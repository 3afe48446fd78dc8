/* NF4 (Dettmers et al. 2023, the table of bitsandbytes) to 16-bit elements: table value times scale in fp32, rounded to
 * nearest even. Sixty-four codes share a scale, so the sixteen products are rounded once and then picked by byte
 * permutations, low and high bytes apart, with no look-up in memory. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_NF4_CUH
#define ENGRAFT_BACKEND_CUDA_RAGGED_NF4_CUH

#include "backend/cuda/ragged_common.cuh"

namespace egi {
namespace ragged {

enum { NF4_BLOCK = 64, NESTED_BLOCK = 256 };

#define EGI_NF4_VALUES                                                                                \
  -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,    \
      -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, \
      0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f

/* Groups group .. group + n_groups - 1 of a stack. */
struct nf4_range {
  egi_ragged_nf4 nf4;
  int group, n_groups;
  int64_t group_elements;
};
egi_cuda_status decode_nf4(const nf4_range &range, egi_cuda_float dtype, void *dst, cudaStream_t stream);

/* A block's scale in two moves, so that the first may be far ahead: what memory holds, then the scale. */
struct stored_scale {
  float value; /* the scale, or the nested one */
  int code;    /* -1 where not nested */
};
__device__ __forceinline__ stored_scale load_scale(const egi_ragged_nf4 &nf4, int64_t index) {
  if (nf4.absmax) return {__ldg(nf4.absmax + index), -1};
  return {__ldg(nf4.nested_absmax + index / NESTED_BLOCK), __ldg(nf4.absmax_codes + index)};
}
/* Product and sum are rounded one after the other, as bitsandbytes does. `offset` is that of the block's group. */
__device__ __forceinline__ float finish_scale(const egi_ragged_nf4 &nf4, const stored_scale &stored, float offset) {
  if (stored.code < 0) return stored.value;
  return __fadd_rn(__fmul_rn(__ldg(nf4.nested_map + stored.code), stored.value), offset);
}
__device__ __forceinline__ float group_offset(const egi_ragged_nf4 &nf4, int group) {
  return nf4.absmax ? 0.0f : __ldg(nf4.nested_offset + group);
}

/* The low and the high bytes of the sixteen products. */
struct nf4_table {
  unsigned low[4], high[4];
};

template <class Element> __device__ __forceinline__ nf4_table make_nf4_table(float scale) {
  const float values[16] = {EGI_NF4_VALUES};
  nf4_table table;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned even = format<Element>::pack(values[4 * i] * scale, values[4 * i + 1] * scale);
    const unsigned odd = format<Element>::pack(values[4 * i + 2] * scale, values[4 * i + 3] * scale);
    table.low[i] = __byte_perm(even, odd, 0x6420);
    table.high[i] = __byte_perm(even, odd, 0x7531);
  }
  return table;
}

/* Eight codes, as they lie in memory, to eight elements. A permutation picks from eight entries; the code's top bit
 * chooses between the two halves of the table. */
__device__ __forceinline__ uint4 decode_eight(const nf4_table &table, unsigned codes) {
  unsigned out[4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const unsigned four = i == 0 ? codes : codes >> 16;
    const unsigned index = four & 0x7777u;
    const unsigned is_upper = __byte_perm(0x0000ff00u, 0u, four >> 3 & 0x1111u);
    const unsigned low = (is_upper & __byte_perm(table.low[2], table.low[3], index)) |
                         (~is_upper & __byte_perm(table.low[0], table.low[1], index));
    const unsigned high = (is_upper & __byte_perm(table.high[2], table.high[3], index)) |
                          (~is_upper & __byte_perm(table.high[0], table.high[1], index));
    out[2 * i] = __byte_perm(low, high, 0x4051); /* the first of two codes is the high nibble */
    out[2 * i + 1] = __byte_perm(low, high, 0x6273);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

} // namespace ragged
} // namespace egi

#endif
