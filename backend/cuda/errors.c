/* Errors of CUDA and cuBLASLt as statuses that name the call. */
#include "backend/cuda/cuda.h"

static int name_length(const char *text) {
  return (int)strcspn(text, "(");
}

eg_status egi_cuda_check(eg_context *ctx, cudaError_t error, const char *text) {
  if (error == cudaSuccess) return EG_OK;
  (void)cudaGetLastError(); /* what can be recovered from is forgotten, so that the next check sees its own */
  eg_status status = error == cudaErrorMemoryAllocation ? EG_ERROR_MEMORY : EG_ERROR_DEVICE;
  return egi_fail(ctx, status, "%.*s: %s (%s)", name_length(text), text, cudaGetErrorString(error),
                  cudaGetErrorName(error));
}

eg_status egi_cuda_check_lt(eg_context *ctx, cublasStatus_t status, const char *text) {
  if (status == CUBLAS_STATUS_SUCCESS) return EG_OK;
  eg_status result = status == CUBLAS_STATUS_ALLOC_FAILED ? EG_ERROR_MEMORY : EG_ERROR_DEVICE;
  return egi_fail(ctx, result, "%.*s: %s", name_length(text), text, cublasLtGetStatusString(status));
}

eg_status egi_cuda_launched(eg_context *ctx, const char *kernel) {
  cudaError_t error = cudaPeekAtLastError();
  if (error == cudaSuccess) return EG_OK;
  (void)cudaGetLastError();
  return egi_fail(ctx, EG_ERROR_DEVICE, "launch of %s: %s (%s)", kernel, cudaGetErrorString(error),
                  cudaGetErrorName(error));
}
