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

/* Results a clock cycle of one multiprocessor (CUDA programming guide, arithmetic instructions; the architectures'
 * white papers for dense products on tensor cores): a multiplication and an addition are two. */
typedef struct throughput {
  int capability; /* and later ones up to the next row */
  int f32, f16, bf16;
} throughput;
static const throughput throughputs[] = {{75, 128, 1024, 128},  {80, 128, 2048, 2048}, {86, 256, 512, 512},
                                         {89, 256, 1024, 1024}, {90, 256, 4096, 4096}, {100, 256, 8192, 8192},
                                         {120, 256, 1024, 1024}};

static void set_speeds(int device, egi_device_facts *facts) {
  double cycles = 1e3 * attribute(cudaDevAttrClockRate, device) * facts->n_multiprocessors;
  for (size_t i = 0; i < EGI_COUNT(throughputs); i++) {
    if (facts->compute_capability < throughputs[i].capability) break;
    facts->flops_f32 = cycles * throughputs[i].f32;
    facts->flops_f16 = cycles * throughputs[i].f16;
    facts->flops_bf16 = cycles * throughputs[i].bf16;
  }
  /* two transfers a clock cycle */
  facts->memory_bytes_per_s =
      2e3 * attribute(cudaDevAttrMemoryClockRate, device) * (attribute(cudaDevAttrGlobalMemoryBusWidth, device) / 8.0);
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
  set_speeds((int)index, out_facts);
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
