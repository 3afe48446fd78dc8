/* Events: those that order streams, and marks on the computing stream whose times are read for measurements. */
#include "backend/cuda/device.h"

static eg_status grow(eg_context *ctx, egi_cuda_events *events, uint32_t event) {
  uint32_t n = events->count == 0 ? 64 : events->count;
  while (n <= event) n *= 2;
  cudaEvent_t *list = egi_allocate(ctx, EGI_PURPOSE_GRAPH, n * sizeof *list);
  if (list == NULL) return EG_ERROR_MEMORY;
  memset(list, 0, n * sizeof *list);
  if (events->count > 0) memcpy(list, events->list, events->count * sizeof *list);
  egi_release(ctx, EGI_PURPOSE_GRAPH, events->list, events->count * sizeof *list);
  *events = (egi_cuda_events){list, n};
  return EG_OK;
}

static eg_status record_on(egi_device *device, egi_cuda_events *events, uint32_t event, unsigned flags,
                           cudaStream_t stream) {
  if (event >= events->count) EG_TRY(grow(device->ctx, events, event));
  if (events->list[event] == NULL) EGI_CUDA_TRY(device->ctx, cudaEventCreateWithFlags(&events->list[event], flags));
  EGI_CUDA_TRY(device->ctx, cudaEventRecord(events->list[event], stream));
  return EG_OK;
}

eg_status egi_cuda_record(egi_device *device, unsigned stream, unsigned event) {
  return record_on(device, &device->events, event, cudaEventDisableTiming, device->streams[stream].stream);
}

eg_status egi_cuda_wait(egi_device *device, unsigned stream, unsigned event) {
  EGI_CUDA_TRY(device->ctx, cudaStreamWaitEvent(device->streams[stream].stream, device->events.list[event], 0));
  return EG_OK;
}

eg_status egi_cuda_mark(egi_device *device, unsigned mark) {
  return record_on(device, &device->marks, mark, cudaEventDefault, device->streams[0].stream);
}

eg_status egi_cuda_elapsed(egi_device *device, unsigned first, unsigned second, double *out_seconds) {
  const egi_cuda_events *marks = &device->marks;
  float milliseconds = 0.0f;
  if (first >= marks->count || second >= marks->count || marks->list[first] == NULL || marks->list[second] == NULL)
    return egi_fail(device->ctx, EG_ERROR_ARGUMENT, "there are no marks %u and %u", first, second);
  EGI_CUDA_TRY(device->ctx, cudaEventSynchronize(marks->list[second]));
  EGI_CUDA_TRY(device->ctx, cudaEventElapsedTime(&milliseconds, marks->list[first], marks->list[second]));
  *out_seconds = (double)milliseconds * 1e-3;
  return EG_OK;
}

static void forget(eg_context *ctx, egi_cuda_events *events) {
  for (uint32_t i = 0; i < events->count; i++)
    if (events->list[i] != NULL) (void)cudaEventDestroy(events->list[i]);
  egi_release(ctx, EGI_PURPOSE_GRAPH, events->list, events->count * sizeof *events->list);
}

void egi_cuda_forget_events(egi_device *device) {
  forget(device->ctx, &device->events);
  forget(device->ctx, &device->marks);
}
