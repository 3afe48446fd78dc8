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

/* Buffers of a plan are resident before the first step: memory that the machine does not have is missed when a trainer
 * is made, not at some step, and what is in use is what was planned. */
static eg_status allocate(egi_device *device, egi_purpose purpose, size_t size_bytes, void **out_memory) {
  region r = {egi_allocate(device->ctx, purpose, size_bytes), size_bytes};
  if (!r.memory) return EG_ERROR_MEMORY;
  if (purpose == EGI_PURPOSE_STEP || purpose == EGI_PURPOSE_PINNED)
    egi_pool_run(egi_context_pool(device->ctx), (size_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES, touch_chunk, &r);
  *out_memory = r.memory;
  return EG_OK;
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

static eg_status describe(eg_context *ctx, uint32_t index, egi_device_facts *out_facts) {
  if (index > 0) return egi_fail(ctx, EG_ERROR_ARGUMENT, "there is no processor %u", (unsigned)index);
  *out_facts = (egi_device_facts){.name = "cpu", .n_devices = 1, .is_unified = true};
  out_facts->n_multiprocessors = (int)egi_pool_size(egi_context_pool(ctx));
  uint64_t available = egi_memory_available();
  out_facts->free_bytes = available == UINT64_MAX ? 0 : available;
  return EG_OK;
}

static const egi_backend backend_cpu = {.name = "cpu",
                                        .is_host = true,
                                        .open = open_device,
                                        .close = close_device,
                                        .find_kernel = egi_cpu_find_kernel,
                                        .allocate = allocate,
                                        .release = release,
                                        .upload = copy_bytes,
                                        .download = copy_bytes,
                                        .record = ignore_event,
                                        .wait = ignore_event,
                                        .synchronize = synchronize,
                                        .describe = describe};

const egi_backend *egi_backend_cpu(void) {
  return &backend_cpu;
}
