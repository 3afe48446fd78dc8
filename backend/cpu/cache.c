/* CacheUpdate: new rows of keys or values written to their positions in a cache that lives between runs. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/strided.h"

#include <inttypes.h>

enum { INPUT_CACHE, INPUT_ROWS, INPUT_POSITIONS };

eg_status egi_cpu_prepare_cache_update(egi_kernel_plan *plan) {
  const egi_tensor *cache = &plan->inputs[INPUT_CACHE], *rows = &plan->inputs[INPUT_ROWS];
  if (egi_element_bytes(cache->dtype) == 0 || rows->dtype != cache->dtype ||
      plan->inputs[INPUT_POSITIONS].dtype != EG_DTYPE_I32)
    return egi_fail_types(plan);
  for (int i = 0; i < 4; i++)
    if (i != 2 && cache->dims[i] != rows->dims[i])
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the rows do not fit the cache");
  return EG_OK;
}

/* Row `row` of every head. */
static egi_tensor row_of(const egi_tensor *tensor, void *data, int64_t row) {
  egi_tensor part = *tensor;
  part.data = (char *)data + row * tensor->strides[2] * (int64_t)egi_element_bytes(tensor->dtype);
  part.dims[2] = 1;
  return part;
}

eg_status egi_cpu_run_cache_update(eg_context *ctx, const egi_kernel_call *call) {
  const egi_tensor *cache = &call->inputs[INPUT_CACHE], *rows = &call->inputs[INPUT_ROWS];
  const egi_tensor *positions = &call->inputs[INPUT_POSITIONS];
  for (int64_t i = 0; i < rows->dims[2]; i++) {
    int64_t position = ((const int32_t *)positions->data)[i * positions->strides[0]];
    if (position < 0 || position >= cache->dims[2])
      return egi_fail(ctx, EG_ERROR_DATA, "position %" PRId64 " is outside the cache of %" PRId64, position,
                      cache->dims[2]);
    egi_tensor source = row_of(rows, rows->data, i), target = row_of(cache, cache->data, position);
    egi_copy(call->pool, &target, &source);
  }
  return EG_OK;
}
