/* Float elements of any type that the general kernels read and write: numbers are f32 in registers. */
#ifndef ENGRAFT_BACKEND_CUDA_ELEMENT_CUH
#define ENGRAFT_BACKEND_CUDA_ELEMENT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace egi {

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(__half x) {
  return __half2float(x);
}

template <class Element> __device__ __forceinline__ Element from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

/* A type chosen at run time, for operands that are read seldom. */
enum element_kind { ELEMENT_F32, ELEMENT_BF16, ELEMENT_F16, ELEMENT_F64, ELEMENT_NONE };

__device__ __forceinline__ float read_element(const void *data, int64_t i, element_kind kind) {
  switch (kind) {
  case ELEMENT_BF16:
    return to_float(static_cast<const __nv_bfloat16 *>(data)[i]);
  case ELEMENT_F16:
    return to_float(static_cast<const __half *>(data)[i]);
  case ELEMENT_F64:
    return static_cast<float>(static_cast<const double *>(data)[i]);
  default:
    return static_cast<const float *>(data)[i];
  }
}

__device__ __forceinline__ void write_element(void *data, int64_t i, element_kind kind, float x) {
  switch (kind) {
  case ELEMENT_BF16:
    static_cast<__nv_bfloat16 *>(data)[i] = from_float<__nv_bfloat16>(x);
    break;
  case ELEMENT_F16:
    static_cast<__half *>(data)[i] = from_float<__half>(x);
    break;
  case ELEMENT_F64:
    static_cast<double *>(data)[i] = static_cast<double>(x);
    break;
  default:
    static_cast<float *>(data)[i] = x;
  }
}

} // namespace egi

#endif
