/* Sums and seconds of costs, and sizes of values at bindings: the part of the cost interface that needs no backend. */
#include "graph/costs.h"

#include <inttypes.h>
#include <string.h>

void egi_cost_add(egi_cost *sum, const egi_cost *cost) {
  sum->flops += cost->flops;
  sum->read_bytes += cost->read_bytes;
  sum->written_bytes += cost->written_bytes;
  sum->to_host_bytes += cost->to_host_bytes;
  sum->to_device_bytes += cost->to_device_bytes;
  if (sum->dtype == EG_DTYPE_UNDEFINED) sum->dtype = cost->dtype;
}

static double flops_of(const egi_device_description *device, eg_dtype dtype) {
  if (dtype == EG_DTYPE_BF16) return device->flops_bf16;
  if (dtype == EG_DTYPE_F16) return device->flops_f16;
  return device->flops_f32;
}

/* A speed of 0 is one that the description does not have. */
static void raise_to(double *seconds, double amount, double speed) {
  double needed = speed > 0.0 ? amount / speed : 0.0;
  if (needed > *seconds) *seconds = needed;
}

double egi_cost_seconds(const egi_device_description *device, const egi_cost *cost) {
  double seconds = 0.0, bytes = cost->read_bytes + cost->written_bytes;
  if (!(cost->flops > 0.0 || bytes > 0.0)) return 0.0;
  raise_to(&seconds, cost->flops, flops_of(device, cost->dtype));
  raise_to(&seconds, bytes, device->memory_bytes_per_s);
  raise_to(&seconds, cost->to_host_bytes, device->to_host_bytes_per_s);
  raise_to(&seconds, cost->to_device_bytes, device->to_device_bytes_per_s);
  return seconds + device->launch_s;
}

void egi_device_describe_cpu(egi_device_description *out_device) {
  *out_device = (egi_device_description){.name = "cpu",
                                         .flops_f32 = 1e11,
                                         .flops_bf16 = 1e11,
                                         .flops_f16 = 1e11,
                                         .memory_bytes_per_s = 1e10,
                                         .to_host_bytes_per_s = 5e9,
                                         .to_device_bytes_per_s = 5e9,
                                         .launch_s = 1e-6};
}

eg_status egi_value_tensor(const egi_graph *graph, egi_value_id id, const egi_binding *bindings, size_t n_bindings,
                           egi_tensor *out_tensor) {
  const egi_value *value = &graph->values[id];
  eg_context *ctx = graph->module->ctx;
  if (value->rank < 0) return egi_fail(ctx, EG_ERROR_SHAPE, "\"%s\" has no known shape", value->name);
  egi_tensor tensor = {.dtype = value->dtype, .rank = value->rank};
  for (int i = 0; i < value->rank; i++) {
    bool is_known = egi_dim_evaluate(graph->module->dims, value->dims[i], bindings, n_bindings, &tensor.dims[i]);
    if (!is_known || tensor.dims[i] < 0)
      return egi_fail(ctx, EG_ERROR_SHAPE, "\"%s\": dimension %d has no known size", value->name, i);
  }
  egi_tensor_set_contiguous(&tensor);
  *out_tensor = tensor;
  return EG_OK;
}

eg_status egi_value_bytes(const egi_graph *graph, egi_value_id value, const egi_binding *bindings, size_t n_bindings,
                          uint64_t *out_bytes) {
  egi_tensor tensor;
  EG_TRY(egi_value_tensor(graph, value, bindings, n_bindings, &tensor));
  if (egi_dtype_bytes(tensor.dtype, (uint64_t)egi_tensor_count(&tensor), out_bytes)) return EG_OK;
  return egi_fail(graph->module->ctx, EG_ERROR_SHAPE, "\"%s\" is too large", graph->values[value].name);
}
