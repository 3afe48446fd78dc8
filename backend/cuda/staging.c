/* Copies between host and device through rings of pinned memory, so that uploads do not wait; faults of kernels are
 * seen where the host waits anyway. */
#include "backend/cuda/device.h"

#include <inttypes.h>

/* ---- rings ---------------------------------------------------------------------------------------------------- */

eg_status egi_cuda_ring_open(eg_context *ctx, egi_cuda_ring *ring, size_t slot_bytes, unsigned n_slots) {
  void *memory = NULL;
  EGI_CUDA_TRY(ctx, cudaHostAlloc(&memory, slot_bytes * n_slots, cudaHostAllocDefault));
  *ring = (egi_cuda_ring){.memory = memory, .slot_bytes = slot_bytes};
  for (; ring->n_slots < n_slots; ring->n_slots++)
    EGI_CUDA_TRY(ctx, cudaEventCreateWithFlags(&ring->ended[ring->n_slots], cudaEventDisableTiming));
  return EG_OK;
}

void egi_cuda_ring_close(egi_cuda_ring *ring) {
  for (unsigned i = 0; i < ring->n_slots; i++) (void)cudaEventDestroy(ring->ended[i]);
  if (ring->memory != NULL) (void)cudaFreeHost(ring->memory);
  *ring = (egi_cuda_ring){0};
}

/* Without a call that waits when it has ended already. */
static eg_status await(eg_context *ctx, cudaEvent_t event) {
  cudaError_t error = cudaEventQuery(event);
  if (error != cudaErrorNotReady) return egi_cuda_check(ctx, error, "cudaEventQuery");
  (void)cudaGetLastError();
  EGI_CUDA_TRY(ctx, cudaEventSynchronize(event));
  return EG_OK;
}

/* The next slot, once its last copy has ended; one never used counts as ended. */
static eg_status take_slot(eg_context *ctx, egi_cuda_ring *ring, unsigned *out_slot) {
  *out_slot = ring->next;
  ring->next = (ring->next + 1) % ring->n_slots;
  return await(ctx, ring->ended[*out_slot]);
}

/* ---- faults --------------------------------------------------------------------------------------------------- */

static eg_status tell_fault(egi_device *device) {
  static const char *const kinds[] = {"", "index", "count", "value"};
  const egi_cuda_fault fault = *device->seen_fault;
  if (fault.code == EGI_CUDA_FAULT_NONE) return EG_OK;
  cudaStream_t stream = device->streams[0].stream;
  EGI_CUDA_TRY(device->ctx, cudaMemsetAsync(device->fault, 0, sizeof *device->fault, stream));
  EGI_CUDA_TRY(device->ctx, cudaStreamSynchronize(stream));
  const char *kind = fault.code > 0 && (size_t)fault.code < EGI_COUNT(kinds) ? kinds[fault.code] : "number";
  const char *op =
      fault.op > EGI_OP_UNKNOWN && fault.op < EGI_OP_COUNT ? egi_op_get((egi_op)fault.op)->name : "a kernel";
  return egi_fail(device->ctx, EG_ERROR_DATA, "%s: %s %" PRId64 " is out of range", op, kind, fault.value);
}

/* Ends what the host waits for: the computing stream, with the fault word behind it. */
static eg_status finish(egi_device *device) {
  cudaStream_t stream = device->streams[0].stream;
  EGI_CUDA_TRY(device->ctx, cudaMemcpyAsync(device->seen_fault, device->fault, sizeof *device->fault,
                                            cudaMemcpyDeviceToHost, stream));
  EGI_CUDA_TRY(device->ctx, cudaStreamSynchronize(stream));
  return tell_fault(device);
}

eg_status egi_cuda_synchronize(egi_device *device) {
  EGI_CUDA_TRY(device->ctx, cudaSetDevice(device->index));
  for (unsigned i = 1; i < EGI_CUDA_STREAMS; i++)
    EGI_CUDA_TRY(device->ctx, cudaStreamSynchronize(device->streams[i].stream));
  return finish(device);
}

/* ---- copies --------------------------------------------------------------------------------------------------- */

enum { COPY_BYTES = 512 << 10 };

typedef struct copying {
  uint8_t *dst;
  const uint8_t *src;
  size_t size_bytes;
} copying;

static void copy_part(void *argument, size_t index, size_t worker) {
  const copying *copy = argument;
  size_t first = index * COPY_BYTES, rest = copy->size_bytes - first;
  (void)worker;
  memcpy(copy->dst + first, copy->src + first, rest < COPY_BYTES ? rest : COPY_BYTES);
}

/* By all threads where it is much: mapped files are read in while they are copied. */
static void copy_to_slot(const egi_device *device, uint8_t *dst, const void *src, size_t size_bytes) {
  copying copy = {dst, src, size_bytes};
  if (size_bytes <= COPY_BYTES)
    memcpy(dst, src, size_bytes);
  else
    egi_pool_run(egi_context_pool(device->ctx), (size_bytes + COPY_BYTES - 1) / COPY_BYTES, copy_part, &copy);
}

eg_status egi_cuda_upload(egi_device *device, void *dst, const void *src, size_t size_bytes) {
  eg_context *ctx = device->ctx;
  egi_cuda_ring *ring = size_bytes <= EGI_CUDA_SMALL_SLOT ? &device->small : &device->large;
  cudaStream_t stream = device->streams[0].stream;
  EGI_CUDA_TRY(ctx, cudaSetDevice(device->index));
  for (size_t done = 0; done < size_bytes; done += ring->slot_bytes) {
    size_t chunk = size_bytes - done < ring->slot_bytes ? size_bytes - done : ring->slot_bytes;
    unsigned slot = 0;
    EG_TRY(take_slot(ctx, ring, &slot));
    uint8_t *staging = ring->memory + slot * ring->slot_bytes;
    copy_to_slot(device, staging, (const uint8_t *)src + done, chunk);
    EGI_CUDA_TRY(ctx, cudaMemcpyAsync((uint8_t *)dst + done, staging, chunk, cudaMemcpyHostToDevice, stream));
    EGI_CUDA_TRY(ctx, cudaEventRecord(ring->ended[slot], stream));
  }
  return EG_OK;
}

typedef struct fetched {
  unsigned slot;
  size_t done, chunk;
} fetched;

static eg_status keep(egi_device *device, const fetched *part, void *dst) {
  const egi_cuda_ring *ring = &device->large;
  EG_TRY(await(device->ctx, ring->ended[part->slot]));
  memcpy((uint8_t *)dst + part->done, ring->memory + part->slot * ring->slot_bytes, part->chunk);
  return EG_OK;
}

/* The host empties one slot while the next one is filled. */
eg_status egi_cuda_download(egi_device *device, void *dst, const void *src, size_t size_bytes) {
  eg_context *ctx = device->ctx;
  egi_cuda_ring *ring = &device->large;
  cudaStream_t stream = device->streams[0].stream;
  fetched before = {0, 0, 0};
  EGI_CUDA_TRY(ctx, cudaSetDevice(device->index));
  for (size_t done = 0; done < size_bytes;) {
    fetched part = {0, done, size_bytes - done < ring->slot_bytes ? size_bytes - done : ring->slot_bytes};
    EG_TRY(take_slot(ctx, ring, &part.slot));
    uint8_t *staging = ring->memory + part.slot * ring->slot_bytes;
    EGI_CUDA_TRY(ctx,
                 cudaMemcpyAsync(staging, (const uint8_t *)src + done, part.chunk, cudaMemcpyDeviceToHost, stream));
    EGI_CUDA_TRY(ctx, cudaEventRecord(ring->ended[part.slot], stream));
    if (before.chunk > 0) EG_TRY(keep(device, &before, dst));
    before = part;
    done += part.chunk;
  }
  if (before.chunk > 0) EG_TRY(keep(device, &before, dst));
  return finish(device);
}

/* ---- late copies ---------------------------------------------------------------------------------------------- */

static eg_status empty_slot(egi_device *device, unsigned slot) {
  if (device->fetched[slot].dst == NULL) return EG_OK;
  EG_TRY(await(device->ctx, device->late.ended[slot]));
  memcpy(device->fetched[slot].dst, device->late.memory + slot * device->late.slot_bytes,
         device->fetched[slot].size_bytes);
  device->fetched[slot].dst = NULL;
  return tell_fault(device);
}

eg_status egi_cuda_fetch(egi_device *device, void *dst, const void *src, size_t size_bytes, uint64_t *out_ticket) {
  cudaStream_t stream = device->streams[0].stream;
  uint64_t ticket = device->n_fetched + 1;
  unsigned slot = (unsigned)(ticket % EGI_CUDA_LATE_SLOTS);
  if (size_bytes > device->late.slot_bytes) {
    *out_ticket = 0;
    return egi_cuda_download(device, dst, src, size_bytes);
  }
  EGI_CUDA_TRY(device->ctx, cudaSetDevice(device->index));
  uint8_t *staging = device->late.memory + slot * device->late.slot_bytes;
  EGI_CUDA_TRY(device->ctx, cudaMemcpyAsync(staging, src, size_bytes, cudaMemcpyDeviceToHost, stream));
  EGI_CUDA_TRY(device->ctx, cudaMemcpyAsync(device->seen_fault, device->fault, sizeof *device->fault,
                                            cudaMemcpyDeviceToHost, stream));
  EGI_CUDA_TRY(device->ctx, cudaEventRecord(device->late.ended[slot], stream));
  device->fetched[slot].dst = dst;
  device->fetched[slot].size_bytes = size_bytes;
  device->fetched[slot].ticket = ticket;
  *out_ticket = device->n_fetched = ticket;
  return EG_OK;
}

/* What is no longer in its slot has been collected before. */
eg_status egi_cuda_collect(egi_device *device, uint64_t ticket) {
  unsigned slot = (unsigned)(ticket % EGI_CUDA_LATE_SLOTS);
  EGI_CUDA_TRY(device->ctx, cudaSetDevice(device->index));
  return ticket != 0 && device->fetched[slot].ticket == ticket ? empty_slot(device, slot) : EG_OK;
}
