/* Elements of a type known at run time as numbers in registers: f32, f64, or 64-bit integers. Conversions are those of
 * the CPU's Cast: floats are rounded once, to nearest even; float to integer truncates and saturates (NaN: 0); integers
 * keep their low bits; not zero is true. */
#ifndef ENGRAFT_BACKEND_CUDA_NUMBER_CUH
#define ENGRAFT_BACKEND_CUDA_NUMBER_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/cuda/cuda.h"

namespace egi::plain {

/* The types that numbers are computed in: of the halves and f32, of f64, of signed and of unsigned integers and bool.
 */
enum inside_type { INSIDE_F32, INSIDE_F64, INSIDE_I64, INSIDE_U64, INSIDE_NONE };

inline inside_type inside_of(eg_dtype dtype) {
  if (dtype > EG_DTYPE_BF16) return INSIDE_NONE;
  if (dtype == EG_DTYPE_F64) return INSIDE_F64;
  switch (egi_dtype_kind(dtype)) {
  case EGI_CLASS_FLOAT:
    return INSIDE_F32;
  case EGI_CLASS_INTEGER:
    return INSIDE_I64;
  case EGI_CLASS_UNSIGNED:
  case EGI_CLASS_BOOLEAN:
    return INSIDE_U64;
  default:
    return INSIDE_NONE;
  }
}

/* Calls `function` with a value of the type that `inside` names; nothing for INSIDE_NONE. */
template <class Function> void with_inside(inside_type inside, const Function &function) {
  if (inside == INSIDE_F32) function(float{});
  if (inside == INSIDE_F64) function(double{});
  if (inside == INSIDE_I64) function(int64_t{});
  if (inside == INSIDE_U64) function(uint64_t{});
}

/* Limits of T as doubles: MAX + 1 is a power of two and so exact. */
template <class T> __device__ __forceinline__ T saturate(double x) {
  constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);
  constexpr int bits = static_cast<int>(sizeof(T)) * 8 - (is_signed ? 1 : 0);
  constexpr T high = static_cast<T>(UINT64_MAX >> (64 - bits)), low = is_signed ? static_cast<T>(-high - 1) : T{0};
  constexpr double beyond = 2.0 * static_cast<double>(1ull << (bits - 1));
  if (x >= beyond) return high;
  if (x <= static_cast<double>(low)) return low;
  return x == x ? static_cast<T>(x) : T{0};
}

/* The nearest float with an odd last bit when x is none itself: rounding that to a half then rounds x correctly
 * (S. Boldo and G. Melquiond, "When double rounding is odd", 2005). */
__device__ __forceinline__ float round_to_odd(double x) {
  const float cut = __double2float_rz(x);
  if (static_cast<double>(cut) == x || x != x) return cut;
  return __uint_as_float(__float_as_uint(cut) | 1u);
}

template <class C, class T> __device__ __forceinline__ C number_from(T x) {
  return static_cast<C>(x);
}
template <> __device__ __forceinline__ int64_t number_from<int64_t, float>(float x) {
  return saturate<int64_t>(static_cast<double>(x));
}
template <> __device__ __forceinline__ int64_t number_from<int64_t, double>(double x) {
  return saturate<int64_t>(x);
}
template <> __device__ __forceinline__ uint64_t number_from<uint64_t, float>(float x) {
  return saturate<uint64_t>(static_cast<double>(x));
}
template <> __device__ __forceinline__ uint64_t number_from<uint64_t, double>(double x) {
  return saturate<uint64_t>(x);
}

template <class C> __device__ __forceinline__ C load_number(const void *at, int dtype) {
  switch (dtype) {
  case EG_DTYPE_F32:
    return number_from<C>(*static_cast<const float *>(at));
  case EG_DTYPE_F64:
    return number_from<C>(*static_cast<const double *>(at));
  case EG_DTYPE_F16:
    return number_from<C>(__half2float(*static_cast<const __half *>(at)));
  case EG_DTYPE_BF16:
    return number_from<C>(__bfloat162float(*static_cast<const __nv_bfloat16 *>(at)));
  case EG_DTYPE_I8:
    return static_cast<C>(*static_cast<const int8_t *>(at));
  case EG_DTYPE_I16:
    return static_cast<C>(*static_cast<const int16_t *>(at));
  case EG_DTYPE_I32:
    return static_cast<C>(*static_cast<const int32_t *>(at));
  case EG_DTYPE_I64:
    return static_cast<C>(*static_cast<const int64_t *>(at));
  case EG_DTYPE_U8:
    return static_cast<C>(*static_cast<const uint8_t *>(at));
  case EG_DTYPE_U16:
    return static_cast<C>(*static_cast<const uint16_t *>(at));
  case EG_DTYPE_U32:
    return static_cast<C>(*static_cast<const uint32_t *>(at));
  case EG_DTYPE_U64:
    return static_cast<C>(*static_cast<const uint64_t *>(at));
  default:
    return static_cast<C>(*static_cast<const uint8_t *>(at) != 0);
  }
}

/* To an integer type: floats saturate, integers keep their low bits. */
template <class T> __device__ __forceinline__ T integer_from(float x) {
  return saturate<T>(static_cast<double>(x));
}
template <class T> __device__ __forceinline__ T integer_from(double x) {
  return saturate<T>(x);
}
template <class T> __device__ __forceinline__ T integer_from(int64_t x) {
  return static_cast<T>(x);
}
template <class T> __device__ __forceinline__ T integer_from(uint64_t x) {
  return static_cast<T>(x);
}

/* What a half is rounded from: exact, or rounded to odd. */
__device__ __forceinline__ float before_half(float x) {
  return x;
}
template <class C> __device__ __forceinline__ float before_half(C x) {
  return round_to_odd(static_cast<double>(x));
}

template <class C> __device__ __forceinline__ void store_number(void *at, int dtype, C x) {
  switch (dtype) {
  case EG_DTYPE_F32:
    *static_cast<float *>(at) = static_cast<float>(x);
    break;
  case EG_DTYPE_F64:
    *static_cast<double *>(at) = static_cast<double>(x);
    break;
  case EG_DTYPE_F16:
    *static_cast<__half *>(at) = __float2half_rn(before_half(x));
    break;
  case EG_DTYPE_BF16:
    *static_cast<__nv_bfloat16 *>(at) = __float2bfloat16_rn(before_half(x));
    break;
  case EG_DTYPE_I8:
    *static_cast<int8_t *>(at) = integer_from<int8_t>(x);
    break;
  case EG_DTYPE_I16:
    *static_cast<int16_t *>(at) = integer_from<int16_t>(x);
    break;
  case EG_DTYPE_I32:
    *static_cast<int32_t *>(at) = integer_from<int32_t>(x);
    break;
  case EG_DTYPE_I64:
    *static_cast<int64_t *>(at) = integer_from<int64_t>(x);
    break;
  case EG_DTYPE_U8:
    *static_cast<uint8_t *>(at) = integer_from<uint8_t>(x);
    break;
  case EG_DTYPE_U16:
    *static_cast<uint16_t *>(at) = integer_from<uint16_t>(x);
    break;
  case EG_DTYPE_U32:
    *static_cast<uint32_t *>(at) = integer_from<uint32_t>(x);
    break;
  case EG_DTYPE_U64:
    *static_cast<uint64_t *>(at) = integer_from<uint64_t>(x);
    break;
  default:
    *static_cast<uint8_t *>(at) = x != static_cast<C>(0) ? 1 : 0;
    break;
  }
}

/* ---- packets of eight f32, bf16 or f16 -------------------------------------------------------------------------- */

enum { PACKET = 8 };

/* Bytes as they lie in memory: `high` only of f32. Loading and converting are apart, so that the loads of all operands
 * are under way before one of them is waited for. */
struct raw_packet {
  uint4 low, high;
};

/* `stride` 0: one element for all lanes. */
__device__ __forceinline__ raw_packet load_packet(const char *at, int dtype, bool is_repeated) {
  raw_packet raw = {};
  if (is_repeated) {
    raw.low.x = dtype == EG_DTYPE_F32 ? *reinterpret_cast<const uint32_t *>(at)
                                      : *reinterpret_cast<const uint16_t *>(at) * 0x10001u;
    raw.low.y = raw.low.z = raw.low.w = raw.low.x;
    raw.high = raw.low;
    return raw;
  }
  raw.low = *reinterpret_cast<const uint4 *>(at);
  if (dtype == EG_DTYPE_F32) raw.high = *reinterpret_cast<const uint4 *>(at + 16);
  return raw;
}

__device__ __forceinline__ void packet_numbers(const raw_packet &raw, int dtype, float (&out)[PACKET]) {
  const uint32_t words[8] = {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                             raw.high.x, raw.high.y, raw.high.z, raw.high.w};
  if (dtype == EG_DTYPE_F32) {
#pragma unroll
    for (int i = 0; i < PACKET; i++) out[i] = __uint_as_float(words[i]);
  } else if (dtype == EG_DTYPE_BF16) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      out[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] & 0xffffu)));
      out[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
    }
  }
}

__device__ __forceinline__ uint32_t pair_of_halves(int dtype, float low, float high) {
  const unsigned short a =
      dtype == EG_DTYPE_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(low)) : __half_as_ushort(__float2half_rn(low));
  const unsigned short b = dtype == EG_DTYPE_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(high))
                                                  : __half_as_ushort(__float2half_rn(high));
  return static_cast<uint32_t>(b) << 16 | a;
}

__device__ __forceinline__ void store_packet(char *at, int dtype, const float (&x)[PACKET]) {
  if (dtype == EG_DTYPE_F32) {
    *reinterpret_cast<float4 *>(at) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4 *>(at + 16) = make_float4(x[4], x[5], x[6], x[7]);
    return;
  }
  uint4 words;
  words.x = pair_of_halves(dtype, x[0], x[1]);
  words.y = pair_of_halves(dtype, x[2], x[3]);
  words.z = pair_of_halves(dtype, x[4], x[5]);
  words.w = pair_of_halves(dtype, x[6], x[7]);
  *reinterpret_cast<uint4 *>(at) = words;
}

} // namespace egi::plain

#endif
