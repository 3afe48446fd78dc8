/* An open CUDA device: streams, events, staging memory. Files of the device part of the backend only. */
#ifndef ENGRAFT_BACKEND_CUDA_DEVICE_H
#define ENGRAFT_BACKEND_CUDA_DEVICE_H

#include "backend/cuda/cuda.h"

enum {
  EGI_CUDA_STREAMS = 3,
  EGI_CUDA_SMALL_SLOT = 64 << 10,
  EGI_CUDA_LARGE_SLOT = 8 << 20,
  EGI_CUDA_SMALL_SLOTS = 64,
  EGI_CUDA_LARGE_SLOTS = 4,
  EGI_CUDA_LATE_SLOTS = 32
};

#ifdef __cplusplus
extern "C" {
#endif

/* Pinned host memory in slots that are used in turn; the event of a slot says when its last copy has ended. */
typedef struct egi_cuda_ring {
  uint8_t *memory;
  size_t slot_bytes;
  unsigned n_slots, next;
  cudaEvent_t ended[EGI_CUDA_SMALL_SLOTS];
} egi_cuda_ring;

/* By number, each made when it is first recorded. */
typedef struct egi_cuda_events {
  cudaEvent_t *list;
  uint32_t count;
} egi_cuda_events;

struct egi_device {
  eg_context *ctx;
  int index;
  egi_cuda_stream streams[EGI_CUDA_STREAMS];
  egi_cuda_events events, marks; /* marks: that know their time */
  egi_cuda_ring small, large;
  egi_cuda_ring late; /* towards the host; ticket t has slot t % n until it is collected */
  struct {
    void *dst; /* NULL: nothing waits in the slot */
    size_t size_bytes;
    uint64_t ticket;
  } fetched[EGI_CUDA_LATE_SLOTS];
  uint64_t n_fetched;
  egi_cuda_fault *fault, *seen_fault; /* on the device; pinned */
};

/* staging.c */
eg_status egi_cuda_ring_open(eg_context *ctx, egi_cuda_ring *ring, size_t slot_bytes, unsigned n_slots);
void egi_cuda_ring_close(egi_cuda_ring *ring);
/* `src` may be used again on return; the device has the bytes before whatever is put into the computing stream next. */
eg_status egi_cuda_upload(egi_device *device, void *dst, const void *src, size_t size_bytes);
/* Waits for the computing stream. EG_ERROR_DATA for a fault. */
eg_status egi_cuda_download(egi_device *device, void *dst, const void *src, size_t size_bytes);
eg_status egi_cuda_fetch(egi_device *device, void *dst, const void *src, size_t size_bytes, uint64_t *out_ticket);
eg_status egi_cuda_collect(egi_device *device, uint64_t ticket);
/* Waits for all streams. EG_ERROR_DATA for a fault. */
eg_status egi_cuda_synchronize(egi_device *device);

/* capture.c */
eg_status egi_cuda_begin_capture(egi_device *device);
eg_status egi_cuda_end_capture(egi_device *device, void **out_captured);
eg_status egi_cuda_launch(egi_device *device, void *captured);
void egi_cuda_discard(egi_device *device, void *captured);

/* events.c */
eg_status egi_cuda_record(egi_device *device, unsigned stream, unsigned event);
eg_status egi_cuda_wait(egi_device *device, unsigned stream, unsigned event);
eg_status egi_cuda_mark(egi_device *device, unsigned mark);
eg_status egi_cuda_elapsed(egi_device *device, unsigned first, unsigned second, double *out_seconds);
void egi_cuda_forget_events(egi_device *device);

/* facts.c: EG_ERROR_DEVICE for devices that no kernel is made for. */
eg_status egi_cuda_check_capability(eg_context *ctx, const egi_device_facts *facts);

/* ranges.c; only where the toolkit has NVTX. */
void egi_cuda_range(const char *name);

/* generate.cu */
eg_status egi_cuda_generate(egi_device *device, const egi_generated *numbers, void *dst);
eg_status egi_cuda_encode(egi_device *device, const egi_four_bit_run *run);

#ifdef __cplusplus
}
#endif

#endif
