/* Lists of steps as CUDA graphs: captured from the streams once, launched as a whole. */
#include "backend/cuda/device.h"

/* Relaxed: kernels may look up attributes and entry points meanwhile, which changes nothing. */
eg_status egi_cuda_begin_capture(egi_device *device) {
  EGI_CUDA_TRY(device->ctx, cudaSetDevice(device->index));
  EGI_CUDA_TRY(device->ctx, cudaStreamBeginCapture(device->streams[0].stream, cudaStreamCaptureModeRelaxed));
  return EG_OK;
}

eg_status egi_cuda_end_capture(egi_device *device, void **out_captured) {
  eg_context *ctx = device->ctx;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t executable = NULL;
  EGI_CUDA_TRY(ctx, cudaStreamEndCapture(device->streams[0].stream, &graph));
  cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
  (void)cudaGraphDestroy(graph);
  EG_TRY(egi_cuda_check(ctx, error, "cudaGraphInstantiate"));
  error = cudaGraphUpload(executable, device->streams[0].stream);
  if (error != cudaSuccess) {
    (void)cudaGraphExecDestroy(executable);
    return egi_cuda_check(ctx, error, "cudaGraphUpload");
  }
  *out_captured = executable;
  return EG_OK;
}

eg_status egi_cuda_launch(egi_device *device, void *captured) {
  EGI_CUDA_TRY(device->ctx, cudaSetDevice(device->index));
  EGI_CUDA_TRY(device->ctx, cudaGraphLaunch((cudaGraphExec_t)captured, device->streams[0].stream));
  return EG_OK;
}

void egi_cuda_discard(egi_device *device, void *captured) {
  (void)cudaSetDevice(device->index);
  (void)cudaGraphExecDestroy((cudaGraphExec_t)captured);
  (void)cudaGetLastError();
}
