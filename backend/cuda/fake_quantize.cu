/* FakeQuantize: numbers as their codes would give them back, in float32, operation for operation as base/blockwise.c
 * and base/integer_codes.c. A warp or a block has a block of numbers: its ends are found, then its numbers are rounded,
 * so that the output may be the input. Extremes do not depend on the order of comparisons: deterministic. */
#include "backend/cuda/number.cuh"

extern "C" {
#include "base/anywhere.h"
#include "base/blockwise.h"
#include "graph/fake_quantize.h"
}

namespace egi::plain {

enum { FAKING_THREADS = 256, WARP_BLOCK = 512 }; /* up to so many numbers a warp takes a block */

struct faking {
  egi_fake_quantize form;
  int dtype, element_bytes, group;
  int64_t width, block, blocks_per_row, n_blocks;
  float levels[16];
};

/* The smallest and the largest number, or 0; and the bits of the largest magnitude. */
struct extremes {
  float low, high;
  int32_t magnitude;
};

__device__ __forceinline__ extremes join(const extremes &a, const extremes &b) {
  return {a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high, max(a.magnitude, b.magnitude)};
}

/* Of all threads of a group, in each of them. */
__device__ extremes join_group(extremes found, int group) {
  __shared__ extremes warps[FAKING_THREADS / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const extremes other = {__shfl_xor_sync(0xffffffffu, found.low, distance),
                            __shfl_xor_sync(0xffffffffu, found.high, distance),
                            __shfl_xor_sync(0xffffffffu, found.magnitude, distance)};
    found = join(found, other);
  }
  if (group == 32) return found;
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = found;
  __syncthreads();
  for (int k = 0; k < FAKING_THREADS / 32; k++) found = join(found, warps[k]);
  return found;
}

/* To the nearest whole number, ties to even, for magnitudes below 2^22; larger ones are larger than any code. */
__device__ __forceinline__ float round_to_even(float x) {
  const float magic = 12582912.0f;
  return __fsub_rn(__fadd_rn(x, magic), magic);
}

__device__ __forceinline__ float limit(float x, float largest) {
  return x < 0.0f ? 0.0f : x > largest ? largest : x; /* NaN stays */
}

struct rounding {
  float scale, zero, largest;
};

__device__ __forceinline__ rounding rounding_of(const egi_fake_quantize &form, const extremes &e) {
  if (form.is_nf4) return {__int_as_float(e.magnitude), __fdiv_rn(1.0f, __int_as_float(e.magnitude)), 0.0f};
  const float half = static_cast<float>(1u << (form.bits - 1)), largest = 2.0f * half - 1.0f;
  if (form.is_symmetric) return {__fdiv_rn(e.high > -e.low ? e.high : e.low, -half), half, largest};
  const float scale = __fdiv_rn(__fsub_rn(e.high, e.low), largest);
  return {scale, scale > 0.0f ? limit(round_to_even(__fdiv_rn(-e.low, scale)), largest) : 0.0f, largest};
}

__device__ __forceinline__ float rounded(const faking &f, const rounding &r, float x) {
  if (f.form.is_nf4) return __fmul_rn(f.levels[egi_nf4_code(__fmul_rn(x, r.zero))], r.scale);
  const bool is_empty = !(r.scale < 0.0f) && !(r.scale > 0.0f);
  const float steps = is_empty ? __fmul_rn(x, 0.0f) : __fdiv_rn(x, r.scale);
  const float code = limit(__fadd_rn(round_to_even(steps), r.zero), r.largest);
  return __fmul_rn(__fsub_rn(code, r.zero), r.scale);
}

__global__ void __launch_bounds__(FAKING_THREADS) round_blocks(faking f, const char *in, char *out) {
  const int64_t per_block = FAKING_THREADS / f.group, lane = threadIdx.x % f.group;
  for (int64_t base = blockIdx.x * per_block; base < f.n_blocks; base += gridDim.x * per_block) {
    const int64_t block = base + threadIdx.x / f.group;
    const int64_t row = block / f.blocks_per_row, column = (block - row * f.blocks_per_row) * f.block;
    const int64_t first = (row * f.width + column) * f.element_bytes, left = f.width - column;
    const int64_t n = block >= f.n_blocks ? 0 : left < f.block ? left : f.block;
    extremes found = {0.0f, 0.0f, 0};
    for (int64_t i = lane; i < n; i += f.group) {
      const float x = load_number<float>(in + first + i * f.element_bytes, f.dtype);
      const extremes own = {x < 0.0f ? x : 0.0f, x > 0.0f ? x : 0.0f, __float_as_int(x) & 0x7fffffff};
      found = join(found, own);
    }
    const rounding r = rounding_of(f.form, join_group(found, f.group));
    for (int64_t i = lane; i < n; i += f.group) {
      const int64_t at = first + i * f.element_bytes;
      store_number<float>(out + at, f.dtype, rounded(f, r, load_number<float>(in + at, f.dtype)));
    }
  }
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_fake_quantize(egi_kernel_plan *plan) {
  const egi_tensor *x = &plan->inputs[0];
  faking *f = EGI_NEW(plan->arena, faking, 1);
  if (f == NULL) return EG_ERROR_MEMORY;
  plan->params = f;
  if (inside_of(x->dtype) != INSIDE_F32) return egi_fail_types(plan);
  if (!egi_fake_quantize_read(egi_plan_node(plan), &f->form))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "its attributes name no codes that are known");
  const int64_t count = egi_tensor_count(x);
  f->dtype = x->dtype;
  f->element_bytes = static_cast<int>(egi_element_bytes(x->dtype));
  f->width = f->form.is_nf4 ? count : x->dims[x->rank - 1];
  f->block = f->form.block > 0 && f->form.block < f->width ? f->form.block : f->width;
  f->blocks_per_row = f->block > 0 ? (f->width + f->block - 1) / f->block : 0;
  f->n_blocks = count > 0 ? count / f->width * f->blocks_per_row : 0;
  f->group = f->block <= WARP_BLOCK ? 32 : FAKING_THREADS;
  memcpy(f->levels, egi_four_bit_levels(EGI_FOUR_BIT_NF4), sizeof f->levels);
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_fake_quantize(eg_context *ctx, const egi_kernel_call *call) {
  const faking *f = static_cast<const faking *>(call->params);
  const int64_t per_block = FAKING_THREADS / f->group, blocks = (f->n_blocks + per_block - 1) / per_block;
  const int64_t limit = 1 << 20;
  if (blocks == 0) return EG_OK;
  round_blocks<<<static_cast<unsigned>(blocks < limit ? blocks : limit), FAKING_THREADS, 0,
                 egi_cuda_stream_of(call)->stream>>>(*f, static_cast<const char *>(call->inputs[0].data),
                                                     static_cast<char *>(call->outputs[0].data));
  return egi_cuda_launched(ctx, "round_blocks");
}
