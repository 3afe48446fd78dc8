/* NonZero, Compress and Unique: the size of their results is known when their data is. `measure` counts, run writes;
 * both walk the elements in row-major order, one thread: deterministic. Control flow has no kernel of its own. */
#include "backend/cpu/narrow.h"
#include "backend/cpu/strided.h"

#include <math.h>
#include <stdlib.h>

eg_status egi_cpu_prepare_control_flow(egi_kernel_plan *plan) {
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED,
                       "what it runs is decided by data, which a plan cannot follow");
}

eg_status egi_cpu_run_control_flow(eg_context *ctx, const egi_kernel_call *call) {
  (void)call;
  return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "control flow runs eagerly only");
}

/* ---- NonZero -------------------------------------------------------------------------------------------------- */

static bool is_nonzero(const egi_tensor *x, int64_t i) {
  if (x->dtype == EG_DTYPE_I64) return ((const int64_t *)x->data)[i] != 0; /* above 2^53 too */
  if (x->dtype == EG_DTYPE_U64) return ((const uint64_t *)x->data)[i] != 0;
  double value = egi_number_get(x->data, x->dtype, i);
  return value < 0.0 || value > 0.0 || isnan(value);
}

static int64_t count_nonzero(const egi_tensor *x) {
  int64_t count = 0;
  for (int64_t i = 0, n = egi_tensor_count(x); i < n; i++) count += is_nonzero(x, i) ? 1 : 0;
  return count;
}

eg_status egi_cpu_prepare_nonzero(egi_kernel_plan *plan) {
  return egi_is_number(plan->inputs[0].dtype) ? EG_OK : egi_fail_types(plan);
}

eg_status egi_cpu_measure_nonzero(const egi_kernel_plan *plan, egi_tensor *outputs) {
  outputs[0].dims[0] = plan->inputs[0].rank;
  outputs[0].dims[1] = count_nonzero(&plan->inputs[0]);
  return EG_OK;
}

eg_status egi_cpu_run_nonzero(eg_context *ctx, const egi_kernel_call *call) {
  const egi_tensor *x = &call->inputs[0], *y = &call->outputs[0];
  int64_t *out = y->data, n = y->dims[1], at = 0;
  if (count_nonzero(x) != n) return egi_fail(ctx, EG_ERROR_DATA, "the number of elements that are not 0 has changed");
  for (int64_t i = 0, count = egi_tensor_count(x); i < count; i++) {
    if (!is_nonzero(x, i)) continue;
    int64_t rest = i;
    for (int axis = x->rank - 1; axis >= 0; axis--) {
      out[axis * n + at] = rest % x->dims[axis];
      rest /= x->dims[axis];
    }
    at++;
  }
  return EG_OK;
}

/* ---- Compress ------------------------------------------------------------------------------------------------- */

/* x as [outer, n, inner]; flat without an axis. */
typedef struct compress_params {
  int64_t outer, n, inner;
  int axis;
} compress_params;

static compress_params compress_shape(const egi_kernel_plan *plan) {
  const egi_tensor *x = &plan->inputs[0];
  compress_params p = {1, egi_tensor_count(x), 1, 0};
  if (egi_node_attribute(egi_plan_node(plan), "axis") == NULL) return p;
  (void)egi_normalise_axis(egi_node_int(egi_plan_node(plan), "axis", 0), x->rank, &p.axis); /* the shape rule saw it */
  p.outer = egi_dims_product(x, 0, p.axis);
  p.n = x->dims[p.axis];
  p.inner = egi_dims_product(x, p.axis + 1, x->rank);
  return p;
}

eg_status egi_cpu_prepare_compress(egi_kernel_plan *plan) {
  compress_params *p = EGI_NEW(plan->arena, compress_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  *p = compress_shape(plan);
  plan->params = p;
  return egi_element_bytes(plan->inputs[0].dtype) > 0 ? EG_OK : egi_fail_types(plan);
}

static int64_t count_selected(const egi_tensor *condition, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < condition->dims[0] && i < n; i++) count += ((const uint8_t *)condition->data)[i] != 0;
  return count;
}

eg_status egi_cpu_measure_compress(const egi_kernel_plan *plan, egi_tensor *outputs) {
  compress_params p = compress_shape(plan);
  outputs[0].dims[p.axis] = count_selected(&plan->inputs[1], p.n);
  return EG_OK;
}

eg_status egi_cpu_run_compress(eg_context *ctx, const egi_kernel_call *call) {
  const compress_params *p = call->params;
  const egi_tensor *condition = &call->inputs[1];
  size_t row_bytes = (size_t)p->inner * egi_element_bytes(call->inputs[0].dtype);
  const uint8_t *x = call->inputs[0].data;
  uint8_t *y = call->outputs[0].data;
  if (call->outputs[0].dims[p->axis] != count_selected(condition, p->n))
    return egi_fail(ctx, EG_ERROR_DATA, "the number of selected elements has changed");
  for (int64_t o = 0; o < p->outer; o++)
    for (int64_t i = 0; i < p->n && i < condition->dims[0]; i++) {
      if (((const uint8_t *)condition->data)[i] == 0) continue;
      if (row_bytes > 0) memcpy(y, x + (size_t)(o * p->n + i) * row_bytes, row_bytes);
      y += row_bytes;
    }
  return EG_OK;
}
