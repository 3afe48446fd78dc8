/* Programmatic dependent launch (CUDA programming guide): a kernel launched early may start while the one before it in
 * the stream still runs, once all blocks of that have allowed it or ended, and itself waits for that one's end where it
 * needs its results. Before compute capability 9.0 kernels simply follow each other. */
#ifndef ENGRAFT_BACKEND_CUDA_LAUNCH_CUH
#define ENGRAFT_BACKEND_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

namespace egi {

__device__ __forceinline__ void allow_kernel_after() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct launch_shape {
  unsigned n_blocks, n_threads, shared_bytes;
};

template <class Argument>
cudaError_t launch_early(void (*kernel)(Argument), const Argument &argument, launch_shape shape, cudaStream_t stream) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.n_blocks);
  config.blockDim = dim3(shape.n_threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, argument);
}

} // namespace egi

#endif
