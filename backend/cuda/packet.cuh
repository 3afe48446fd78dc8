/* Sixteen bytes of elements of one type: what a thread loads, computes with and stores at a time. In registers numbers
 * are f32, those of f64 f64. */
#ifndef ENGRAFT_BACKEND_CUDA_PACKET_CUH
#define ENGRAFT_BACKEND_CUDA_PACKET_CUH

#include "backend/cuda/element.cuh"

namespace egi {

template <class T> struct number_type { using type = float; };
template <> struct number_type<double> { using type = double; };
template <class T> using number_of = typename number_type<T>::type;

template <class T> constexpr int packet_size = 16 / static_cast<int>(sizeof(T));

template <class T> struct packet { uint4 bits; };

template <class T> __device__ __forceinline__ number_of<T> widen(T x) {
  return to_float(x);
}
template <> __device__ __forceinline__ double widen<double>(double x) {
  return x;
}
template <class T> __device__ __forceinline__ T narrow(number_of<T> x) {
  return from_float<T>(x);
}
template <> __device__ __forceinline__ double narrow<double>(double x) {
  return x;
}

__device__ __forceinline__ void unpack(const packet<float> &p, float (&out)[4]) {
  out[0] = __uint_as_float(p.bits.x);
  out[1] = __uint_as_float(p.bits.y);
  out[2] = __uint_as_float(p.bits.z);
  out[3] = __uint_as_float(p.bits.w);
}
__device__ __forceinline__ void unpack(const packet<__nv_bfloat16> &p, float (&out)[8]) {
  const uint32_t words[4] = {p.bits.x, p.bits.y, p.bits.z, p.bits.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void unpack(const packet<__half> &p, float (&out)[8]) {
  const uint32_t words[4] = {p.bits.x, p.bits.y, p.bits.z, p.bits.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    out[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i])));
    out[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
  }
}
__device__ __forceinline__ void unpack(const packet<double> &p, double (&out)[2]) {
  out[0] = __hiloint2double(static_cast<int>(p.bits.y), static_cast<int>(p.bits.x));
  out[1] = __hiloint2double(static_cast<int>(p.bits.w), static_cast<int>(p.bits.z));
}

template <class T> __device__ __forceinline__ uint32_t narrow_pair(float low, float high);
template <> __device__ __forceinline__ uint32_t narrow_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(__bfloat16_as_ushort(pair.x)) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y))
                                                                   << 16;
}
template <> __device__ __forceinline__ uint32_t narrow_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return static_cast<uint32_t>(__half_as_ushort(__low2half(pair))) |
         static_cast<uint32_t>(__half_as_ushort(__high2half(pair))) << 16;
}

template <class T> __device__ __forceinline__ packet<T> pack(const float (&in)[8]) {
  return {make_uint4(narrow_pair<T>(in[0], in[1]), narrow_pair<T>(in[2], in[3]), narrow_pair<T>(in[4], in[5]),
                     narrow_pair<T>(in[6], in[7]))};
}
template <class T> __device__ __forceinline__ packet<T> pack(const float (&in)[4]) {
  return {make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3]))};
}
template <class T> __device__ __forceinline__ packet<T> pack(const double (&in)[2]) {
  return {make_uint4(static_cast<uint32_t>(__double2loint(in[0])), static_cast<uint32_t>(__double2hiint(in[0])),
                     static_cast<uint32_t>(__double2loint(in[1])), static_cast<uint32_t>(__double2hiint(in[1])))};
}

/* One number of a type chosen at run time. */
template <class A> __device__ __forceinline__ A read_number(const void *data, int64_t i, element_kind kind) {
  if (kind == ELEMENT_F64) return static_cast<A>(static_cast<const double *>(data)[i]);
  return static_cast<A>(read_element(data, i, kind));
}
template <class A> __device__ __forceinline__ void write_number(void *data, int64_t i, element_kind kind, A x) {
  if (kind == ELEMENT_F64)
    static_cast<double *>(data)[i] = static_cast<double>(x);
  else
    write_element(data, i, kind, static_cast<float>(x));
}

/* N elements that lie side by side, aligned to their size or to 16 bytes. */
template <class S, int N, class A> __device__ __forceinline__ void read_run(const S *in, A (&out)[N]) {
  constexpr int bytes = N * static_cast<int>(sizeof(S));
  alignas(16) S elements[N];
  if constexpr (bytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < bytes / 16; i++)
      reinterpret_cast<uint4 *>(elements)[i] = reinterpret_cast<const uint4 *>(in)[i];
  } else if constexpr (bytes % 8 == 0) {
#pragma unroll
    for (int i = 0; i < bytes / 8; i++) reinterpret_cast<uint2 *>(elements)[i] = reinterpret_cast<const uint2 *>(in)[i];
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) elements[i] = in[i];
  }
#pragma unroll
  for (int i = 0; i < N; i++) out[i] = static_cast<A>(widen(elements[i]));
}

/* The same of a type chosen at run time, from element `at` on. */
template <int N, class A>
__device__ __forceinline__ void read_numbers(const void *data, element_kind kind, int64_t at, A (&out)[N]) {
  switch (kind) {
  case ELEMENT_BF16:
    return read_run(static_cast<const __nv_bfloat16 *>(data) + at, out);
  case ELEMENT_F16:
    return read_run(static_cast<const __half *>(data) + at, out);
  case ELEMENT_F64:
    return read_run(static_cast<const double *>(data) + at, out);
  default:
    return read_run(static_cast<const float *>(data) + at, out);
  }
}

} // namespace egi

#endif
