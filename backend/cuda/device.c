/* CUDA as a backend: one device of the process, three streams, events by number, memory. egi_cuda_backend() is what the
 * library exports (backend/cuda.c loads it). */
#include "backend/cuda/device.h"

/* ---- opening -------------------------------------------------------------------------------------------------- */

static void close_device(egi_device *device) {
  if (device == NULL) return;
  eg_context *ctx = device->ctx;
  (void)cudaSetDevice(device->index);
  for (unsigned i = 0; i < EGI_CUDA_STREAMS; i++)
    if (device->streams[i].stream != NULL) (void)cudaStreamSynchronize(device->streams[i].stream);
  egi_cuda_forget_events(device);
  egi_cuda_ring_close(&device->small);
  egi_cuda_ring_close(&device->large);
  egi_cuda_ring_close(&device->late);
  if (device->streams[0].lt != NULL) (void)cublasLtDestroy(device->streams[0].lt);
  if (device->streams[0].lt_workspace != NULL) (void)cudaFree(device->streams[0].lt_workspace);
  if (device->fault != NULL) (void)cudaFree(device->fault);
  if (device->seen_fault != NULL) (void)cudaFreeHost(device->seen_fault);
  for (unsigned i = 0; i < EGI_CUDA_STREAMS; i++)
    if (device->streams[i].stream != NULL) (void)cudaStreamDestroy(device->streams[i].stream);
  (void)cudaGetLastError();
  egi_release(ctx, EGI_PURPOSE_GRAPH, device, sizeof *device);
  egi_context_release(ctx);
}

static eg_status make_streams(egi_device *device, const egi_device_facts *facts) {
  eg_context *ctx = device->ctx;
  void *memory = NULL;
  EGI_CUDA_TRY(ctx, cudaMalloc(&memory, sizeof *device->fault));
  device->fault = memory;
  EGI_CUDA_TRY(ctx, cudaMemset(device->fault, 0, sizeof *device->fault));
  EGI_CUDA_TRY(ctx, cudaHostAlloc(&memory, sizeof *device->seen_fault, cudaHostAllocDefault));
  device->seen_fault = memory;
  for (unsigned i = 0; i < EGI_CUDA_STREAMS; i++) {
    egi_cuda_stream *stream = &device->streams[i];
    *stream = (egi_cuda_stream){.fault = device->fault,
                                .n_multiprocessors = facts->n_multiprocessors,
                                .compute_capability = facts->compute_capability};
    EGI_CUDA_TRY(ctx, cudaStreamCreateWithFlags(&stream->stream, cudaStreamNonBlocking));
  }
  EGI_CUDA_TRY_LT(ctx, cublasLtCreate(&device->streams[0].lt));
  EGI_CUDA_TRY(ctx, cudaMalloc(&memory, EGI_CUDA_LT_WORKSPACE));
  device->streams[0].lt_workspace = memory;
  device->streams[0].lt_workspace_bytes = EGI_CUDA_LT_WORKSPACE;
  for (unsigned i = 1; i < EGI_CUDA_STREAMS; i++) device->streams[i].lt = device->streams[0].lt;
  EG_TRY(egi_cuda_ring_open(ctx, &device->small, EGI_CUDA_SMALL_SLOT, EGI_CUDA_SMALL_SLOTS));
  EG_TRY(egi_cuda_ring_open(ctx, &device->late, EGI_CUDA_SMALL_SLOT, EGI_CUDA_LATE_SLOTS));
  return egi_cuda_ring_open(ctx, &device->large, EGI_CUDA_LARGE_SLOT, EGI_CUDA_LARGE_SLOTS);
}

/* The first device that CUDA_VISIBLE_DEVICES leaves. */
static eg_status open_device(eg_context *ctx, egi_device **out_device) {
  egi_device_facts facts;
  EG_TRY(egi_cuda_describe(ctx, 0, &facts));
  EG_TRY(egi_cuda_check_capability(ctx, &facts));
  egi_device *device = egi_allocate(ctx, EGI_PURPOSE_GRAPH, sizeof *device);
  if (device == NULL) return EG_ERROR_MEMORY;
  *device = (egi_device){.ctx = ctx};
  egi_context_retain(ctx);
  eg_status status = make_streams(device, &facts);
  if (status != EG_OK) {
    close_device(device);
    return status;
  }
  *out_device = device;
  return EG_OK;
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

enum { PAGE_BYTES = 4096, CHUNK_BYTES = 1 << 22 };

typedef struct region {
  uint8_t *memory;
  size_t size_bytes;
} region;

static void touch_chunk(void *argument, size_t index, size_t worker) {
  const region *r = argument;
  size_t first = index * CHUNK_BYTES, end = r->size_bytes - first < CHUNK_BYTES ? r->size_bytes : first + CHUNK_BYTES;
  (void)worker;
  for (size_t at = first; at < end; at += PAGE_BYTES) r->memory[at] = 0;
}

/* Host memory of the context, made resident by all threads in chunks before it is pinned: pinning alone would touch it
 * page after page. */
static eg_status allocate_pinned(egi_device *device, size_t size_bytes, void **out_memory) {
  eg_context *ctx = device->ctx;
  region r = {egi_allocate(ctx, EGI_PURPOSE_PINNED, size_bytes), size_bytes};
  if (r.memory == NULL) return EG_ERROR_MEMORY;
  egi_pool_run(egi_context_pool(ctx), (size_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES, touch_chunk, &r);
  eg_status status =
      egi_cuda_check(ctx, cudaHostRegister(r.memory, size_bytes, cudaHostRegisterDefault), "cudaHostRegister");
  if (status != EG_OK) {
    egi_release(ctx, EGI_PURPOSE_PINNED, r.memory, size_bytes);
    return status;
  }
  *out_memory = r.memory;
  return EG_OK;
}

static eg_status allocate(egi_device *device, egi_purpose purpose, size_t size_bytes, void **out_memory) {
  eg_context *ctx = device->ctx;
  size_t free_bytes = 0, all_bytes = 0;
  EGI_CUDA_TRY(ctx, cudaSetDevice(device->index));
  if (purpose == EGI_PURPOSE_PINNED) return allocate_pinned(device, size_bytes, out_memory);
  cudaError_t error = cudaMalloc(out_memory, size_bytes > 0 ? size_bytes : 1);
  if (error != cudaErrorMemoryAllocation) return egi_cuda_check(ctx, error, "cudaMalloc");
  (void)cudaGetLastError();
  (void)cudaMemGetInfo(&free_bytes, &all_bytes);
  return egi_fail(ctx, EG_ERROR_MEMORY, "cudaMalloc of %.1f MiB: out of memory, %.1f of %.1f MiB are free",
                  (double)size_bytes / 1048576.0, (double)free_bytes / 1048576.0, (double)all_bytes / 1048576.0);
}

static void release(egi_device *device, egi_purpose purpose, void *memory, size_t size_bytes) {
  (void)cudaSetDevice(device->index);
  if (purpose == EGI_PURPOSE_PINNED) {
    (void)cudaHostUnregister(memory);
    egi_release(device->ctx, EGI_PURPOSE_PINNED, memory, size_bytes);
  } else {
    (void)cudaFree(memory);
  }
  (void)cudaGetLastError();
}

static eg_status fill(egi_device *device, void *dst, int byte, size_t size_bytes) {
  EGI_CUDA_TRY(device->ctx, cudaSetDevice(device->index));
  EGI_CUDA_TRY(device->ctx, cudaMemsetAsync(dst, byte, size_bytes, device->streams[0].stream));
  return EG_OK;
}

/* Also makes the device the thread's current one, which a host may have changed since. */
static void *stream_of(egi_device *device, unsigned stream) {
  (void)cudaSetDevice(device->index);
  return &device->streams[stream];
}

static const egi_backend backend_cuda = {.name = "cuda",
                                         .open = open_device,
                                         .close = close_device,
                                         .find_kernel = egi_cuda_find_kernel,
                                         .allocate = allocate,
                                         .release = release,
                                         .upload = egi_cuda_upload,
                                         .download = egi_cuda_download,
                                         .record = egi_cuda_record,
                                         .wait = egi_cuda_wait,
                                         .synchronize = egi_cuda_synchronize,
                                         .stream = stream_of,
                                         .fill = fill,
                                         .fetch = egi_cuda_fetch,
                                         .collect = egi_cuda_collect,
#ifdef EGI_HAS_NVTX
                                         .range = egi_cuda_range,
#endif
                                         .generate = egi_cuda_generate,
                                         .encode = egi_cuda_encode,
                                         .begin_capture = egi_cuda_begin_capture,
                                         .end_capture = egi_cuda_end_capture,
                                         .launch = egi_cuda_launch,
                                         .discard = egi_cuda_discard,
                                         .mark = egi_cuda_mark,
                                         .elapsed = egi_cuda_elapsed,
                                         .describe = egi_cuda_describe};

/* NULL when the caller was built from other headers. */
__attribute__((visibility("default"))) const egi_backend *egi_cuda_backend(uint32_t abi);
const egi_backend *egi_cuda_backend(uint32_t abi) {
  return abi == egi_backend_abi() ? &backend_cuda : NULL;
}
