/* The CPU as a backend: device memory is host memory, steps run in list order on the context's pool, events do
 * nothing. */
#include "backend/cpu/cpu.h"

struct egi_device {
  eg_context *ctx;
};

static eg_status open_device(eg_context *ctx, egi_device **out_device) {
  egi_device *device = egi_allocate(ctx, EGI_PURPOSE_GRAPH, sizeof *device);
  if (!device) return EG_ERROR_MEMORY;
  device->ctx = ctx;
  egi_context_retain(ctx);
  *out_device = device;
  return EG_OK;
}

static void close_device(egi_device *device) {
  if (!device) return;
  eg_context *ctx = device->ctx;
  egi_release(ctx, EGI_PURPOSE_GRAPH, device, sizeof *device);
  egi_context_release(ctx);
}

static eg_status allocate(egi_device *device, egi_purpose purpose, size_t size_bytes, void **out_memory) {
  *out_memory = egi_allocate(device->ctx, purpose, size_bytes);
  return *out_memory ? EG_OK : EG_ERROR_MEMORY;
}

static void release(egi_device *device, egi_purpose purpose, void *memory, size_t size_bytes) {
  egi_release(device->ctx, purpose, memory, size_bytes);
}

static eg_status copy_bytes(egi_device *device, void *dst, const void *src, size_t size_bytes) {
  (void)device;
  if (size_bytes > 0) memcpy(dst, src, size_bytes);
  return EG_OK;
}

static eg_status ignore_event(egi_device *device, unsigned stream, unsigned event) {
  (void)device, (void)stream, (void)event;
  return EG_OK;
}

static eg_status synchronize(egi_device *device) {
  (void)device;
  return EG_OK;
}

static const egi_backend backend_cpu = {"cpu",        true,        open_device, close_device, egi_cpu_find_kernel,
                                        allocate,     release,     copy_bytes,  copy_bytes,   ignore_event,
                                        ignore_event, synchronize, NULL};

const egi_backend *egi_backend_cpu(void) {
  return &backend_cpu;
}
