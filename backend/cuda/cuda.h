/* Shared by the CUDA kernels, from C and from CUDA: what `stream` of a call is, errors, faults, and the prepare and run
 * functions of kernels.def. Sources include this header first. */
#ifndef ENGRAFT_BACKEND_CUDA_CUDA_H
#define ENGRAFT_BACKEND_CUDA_CUDA_H

/* Standard headers with C++ contents come before the block that gives engraft's own C linkage. */
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "backend/operands.h"

/* ---- streams -------------------------------------------------------------------------------------------------- */

/* What a kernel finds in data and cannot go on with. The first one of a device stays until the host has seen it, at the
 * next synchronisation or download, which fails with EG_ERROR_DATA. */
typedef enum egi_cuda_fault_code {
  EGI_CUDA_FAULT_NONE,
  EGI_CUDA_FAULT_INDEX, /* value: an index outside of its dimension */
  EGI_CUDA_FAULT_COUNT, /* value: a size or count that is out of range */
  EGI_CUDA_FAULT_VALUE  /* value: any other number that an operator cannot take */
} egi_cuda_fault_code;
typedef struct egi_cuda_fault {
  int32_t code, op; /* op: egi_op of the kernel, or 0 */
  int64_t value;
} egi_cuda_fault;

/* What kernels get as `stream`. */
typedef struct egi_cuda_stream {
  cudaStream_t stream;
  cublasLtHandle_t lt;
  void *lt_workspace; /* of the device, aligned to 256 bytes; products of one stream follow each other in it */
  size_t lt_workspace_bytes;
  egi_cuda_fault *fault; /* device memory */
  int n_multiprocessors;
  int compute_capability; /* 10 * major + minor */
} egi_cuda_stream;

static inline const egi_cuda_stream *egi_cuda_stream_of(const egi_kernel_call *call) {
  return (const egi_cuda_stream *)call->stream;
}

/* Bytes of cuBLASLt's workspace on the computing stream. */
#define EGI_CUDA_LT_WORKSPACE ((size_t)32 << 20)

/* What prepare functions may count on; where there is no device, those of a Hopper with 132 multiprocessors. */
typedef struct egi_cuda_limits {
  int n_multiprocessors, compute_capability;
} egi_cuda_limits;
egi_cuda_limits egi_cuda_get_limits(void);

/* ---- errors --------------------------------------------------------------------------------------------------- */

/* EG_ERROR_DEVICE, or EG_ERROR_MEMORY, with the name of the call (`text` up to its parenthesis) and the reason. */
eg_status egi_cuda_check(eg_context *ctx, cudaError_t error, const char *text);
eg_status egi_cuda_check_lt(eg_context *ctx, cublasStatus_t status, const char *text);
#define EGI_CUDA_TRY(ctx, call) EG_TRY(egi_cuda_check((ctx), (call), #call))
#define EGI_CUDA_TRY_LT(ctx, call) EG_TRY(egi_cuda_check_lt((ctx), (call), #call))
/* After each launch. */
eg_status egi_cuda_launched(eg_context *ctx, const char *kernel);

/* ---- kernels -------------------------------------------------------------------------------------------------- */

#define KERNEL(symbol, prepare, run, flags)                    \
  eg_status egi_cuda_prepare_##prepare(egi_kernel_plan *plan); \
  eg_status egi_cuda_run_##run(eg_context *ctx, const egi_kernel_call *call);
#include "backend/cuda/kernels.def"
#undef KERNEL

/* NULL where there is none. */
const egi_kernel *egi_cuda_find_kernel(egi_op op);

/* facts.c: EG_ERROR_DEVICE says why no CUDA device can be used. */
eg_status egi_cuda_describe(eg_context *ctx, uint32_t index, egi_device_facts *out_facts);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__
/* Puts a fault into the device's word unless there is one. */
__device__ __forceinline__ void egi_cuda_raise(egi_cuda_fault *fault, int code, int op, int64_t value) {
  if (atomicCAS(&fault->code, 0, code) != 0) return;
  fault->op = op;
  fault->value = value;
}
#endif

#endif
