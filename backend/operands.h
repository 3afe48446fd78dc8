/* What prepare and run functions of every backend ask of a node and its operands (operands.c). */
#ifndef ENGRAFT_BACKEND_OPERANDS_H
#define ENGRAFT_BACKEND_OPERANDS_H

#include "backend/backend.h"

static inline const egi_node *egi_plan_node(const egi_kernel_plan *plan) {
  return &plan->graph->nodes[plan->node];
}
/* An input that is there. */
static inline bool egi_plan_has_input(const egi_kernel_plan *plan, unsigned input) {
  return input < plan->n_inputs && plan->inputs[input].dtype != EG_DTYPE_UNDEFINED;
}
static inline bool egi_call_has_input(const egi_kernel_call *call, unsigned input) {
  return input < call->n_inputs && call->inputs[input].dtype != EG_DTYPE_UNDEFINED;
}
/* Bytes of an element; 0 for types below 8 bits and strings. */
size_t egi_element_bytes(eg_dtype dtype);
/* EG_ERROR_UNSUPPORTED naming the types of all inputs. */
eg_status egi_fail_types(const egi_kernel_plan *plan);
/* Integers of an i32 or i64 tensor of any strides, at most `capacity`; false when there are more or the type differs.
 */
bool egi_tensor_integers(const egi_tensor *tensor, int64_t *out, uint32_t capacity, uint32_t *out_count);
/* axis + rank for negative ones; false outside [-rank, rank). */
bool egi_normalise_axis(int64_t axis, int rank, int *out_axis);

#endif
