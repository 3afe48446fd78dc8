/* What the driver says of its devices, and why none can be used. */
#include "backend/cuda/device.h"

enum { OLDEST_CAPABILITY = 75 };

static int attribute(enum cudaDeviceAttr which, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, device) == cudaSuccess) return value;
  (void)cudaGetLastError();
  return 0;
}

static int capability_of(int device) {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
         attribute(cudaDevAttrComputeCapabilityMinor, device);
}

egi_cuda_limits egi_cuda_get_limits(void) {
  int device = 0;
  egi_cuda_limits limits = {132, 90};
  if (cudaGetDevice(&device) != cudaSuccess) {
    (void)cudaGetLastError();
    return limits;
  }
  int n = attribute(cudaDevAttrMultiProcessorCount, device), capability = capability_of(device);
  if (n > 0 && capability > 0) limits = (egi_cuda_limits){n, capability};
  return limits;
}

static eg_status count_devices(eg_context *ctx, uint32_t *out_count) {
  int driver = 0, toolkit = 0, n = 0;
  (void)cudaDriverGetVersion(&driver);
  (void)cudaRuntimeGetVersion(&toolkit);
  cudaError_t error = cudaGetDeviceCount(&n);
  (void)cudaGetLastError();
  if (driver == 0) return egi_fail(ctx, EG_ERROR_DEVICE, "no NVIDIA driver is installed (libcuda.so.1 is not found)");
  if (error == cudaErrorInsufficientDriver)
    return egi_fail(ctx, EG_ERROR_DEVICE, "the NVIDIA driver is too old: it supports CUDA %d.%d, needed is %d.%d",
                    driver / 1000, driver % 1000 / 10, toolkit / 1000, toolkit % 1000 / 10);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && n == 0)) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return egi_fail(ctx, EG_ERROR_DEVICE, "there is no CUDA device%s%s",
                    visible != NULL ? "; CUDA_VISIBLE_DEVICES is " : "", visible != NULL ? visible : "");
  }
  EG_TRY(egi_cuda_check(ctx, error, "cudaGetDeviceCount"));
  *out_count = (uint32_t)n;
  return EG_OK;
}

eg_status egi_cuda_describe(eg_context *ctx, uint32_t index, egi_device_facts *out_facts) {
  uint32_t n = 0;
  size_t free_bytes = 0, all_bytes = 0;
  struct cudaDeviceProp properties;
  EG_TRY(count_devices(ctx, &n));
  if (index >= n)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "there is no CUDA device %u, only %u", (unsigned)index, (unsigned)n);
  EGI_CUDA_TRY(ctx, cudaGetDeviceProperties(&properties, (int)index));
  *out_facts = (egi_device_facts){.n_devices = n,
                                  .compute_capability = 10 * properties.major + properties.minor,
                                  .n_multiprocessors = properties.multiProcessorCount,
                                  .is_unified = properties.integrated != 0,
                                  .memory_bytes = properties.totalGlobalMem};
  memcpy(out_facts->name, properties.name, sizeof out_facts->name - 1);
  (void)cudaDriverGetVersion(&out_facts->driver_version);
  (void)cudaRuntimeGetVersion(&out_facts->toolkit_version);
  EGI_CUDA_TRY(ctx, cudaSetDevice((int)index));
  EGI_CUDA_TRY(ctx, cudaMemGetInfo(&free_bytes, &all_bytes));
  out_facts->free_bytes = free_bytes;
  return EG_OK;
}

eg_status egi_cuda_check_capability(eg_context *ctx, const egi_device_facts *facts) {
  if (facts->compute_capability >= OLDEST_CAPABILITY) return EG_OK;
  return egi_fail(ctx, EG_ERROR_DEVICE, "%s is too old: its compute capability is %d.%d, needed is %d.%d", facts->name,
                  facts->compute_capability / 10, facts->compute_capability % 10, OLDEST_CAPABILITY / 10,
                  OLDEST_CAPABILITY % 10);
}
