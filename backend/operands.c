/* Small helpers of prepare and run functions of any backend; see operands.h. */
#include "backend/operands.h"

size_t egi_element_bytes(eg_dtype dtype) {
  return egi_dtype_bits(dtype) / 8;
}

eg_status egi_fail_types(const egi_kernel_plan *plan) {
  char names[160] = "";
  size_t length = 0;
  for (unsigned i = 0; i < plan->n_inputs && length < sizeof names - 24; i++) {
    int written = snprintf(names + length, sizeof names - length, "%s%s", i == 0 ? "" : ", ",
                           egi_dtype_name(plan->inputs[i].dtype));
    if (written > 0) length += (size_t)written;
  }
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "no kernel for inputs of types (%s) to %s", names,
                       plan->n_outputs > 0 ? egi_dtype_name(plan->outputs[0].dtype) : "nothing");
}

bool egi_tensor_integers(const egi_tensor *tensor, int64_t *out, uint32_t capacity, uint32_t *out_count) {
  int64_t count = egi_tensor_count(tensor);
  if (count < 0 || count > (int64_t)capacity || tensor->rank > 1 || tensor->data == NULL) return false;
  int64_t stride = tensor->rank == 1 ? tensor->strides[0] : 0;
  for (int64_t i = 0; i < count; i++) {
    if (tensor->dtype == EG_DTYPE_I64) {
      memcpy(&out[i], (const char *)tensor->data + i * stride * 8, 8);
    } else if (tensor->dtype == EG_DTYPE_I32) {
      int32_t value;
      memcpy(&value, (const char *)tensor->data + i * stride * 4, 4);
      out[i] = value;
    } else {
      return false;
    }
  }
  *out_count = (uint32_t)count;
  return true;
}

bool egi_normalise_axis(int64_t axis, int rank, int *out_axis) {
  if (axis < -rank || axis >= rank) return false;
  *out_axis = (int)(axis < 0 ? axis + rank : axis);
  return true;
}

uint32_t egi_backend_abi(void) {
  static const size_t sizes[] = {EGI_OP_COUNT,          EGI_PURPOSE_COUNT,       sizeof(egi_backend),
                                 sizeof(egi_kernel),    sizeof(egi_kernel_plan), sizeof(egi_kernel_call),
                                 sizeof(egi_tensor),    sizeof(egi_node),        sizeof(egi_value),
                                 sizeof(egi_graph),     sizeof(egi_module),      sizeof(egi_weight),
                                 sizeof(egi_attribute), sizeof(egi_arena),       sizeof(egi_device_facts)};
  uint64_t hash = egi_hash(sizes, sizeof sizes, 0);
  for (int op = EGI_OP_UNKNOWN + 1; op < EGI_OP_COUNT; op++) {
    const char *name = egi_op_get((egi_op)op)->name;
    hash = egi_hash(name, strlen(name), hash);
  }
  return (uint32_t)(hash ^ hash >> 32);
}
