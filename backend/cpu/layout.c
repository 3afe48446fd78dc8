/* The operators that only move elements, for when the planner cannot make them views: strided copies, any type of at
 * least 8 bits (Identity, Reshape and their like: any type that is not text). */
#include "backend/cpu/strided.h"

static eg_status check_same_type(const egi_kernel_plan *plan, bool is_packed_allowed) {
  eg_dtype dtype = plan->inputs[0].dtype;
  if (plan->outputs[0].dtype != dtype || egi_dtype_kind(dtype) == EGI_CLASS_STRING ||
      (egi_element_bytes(dtype) == 0 && !is_packed_allowed)) {
    return egi_fail_types(plan);
  }
  return EG_OK;
}

/* ---- Identity, Barrier ---------------------------------------------------------------------------------------- */

eg_status egi_cpu_prepare_identity(egi_kernel_plan *plan) {
  return check_same_type(plan, true);
}

eg_status egi_cpu_run_identity(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  egi_copy(call->pool, &call->outputs[0], &call->inputs[0]);
  return EG_OK;
}

/* ---- Reshape, Flatten, Squeeze, Unsqueeze ---------------------------------------------------------------------- */

eg_status egi_cpu_prepare_reshape(egi_kernel_plan *plan) {
  EG_TRY(check_same_type(plan, true));
  if (egi_tensor_count(&plan->inputs[0]) != egi_tensor_count(&plan->outputs[0])) {
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%lld elements cannot become %lld",
                         (long long)egi_tensor_count(&plan->inputs[0]), (long long)egi_tensor_count(&plan->outputs[0]));
  }
  return EG_OK;
}

/* The output is contiguous: seen with the input's dims it is one too. */
eg_status egi_cpu_run_reshape(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  egi_tensor target = call->inputs[0];
  target.data = call->outputs[0].data;
  egi_tensor_set_contiguous(&target);
  egi_copy(call->pool, &target, &call->inputs[0]);
  return EG_OK;
}

/* ---- Expand --------------------------------------------------------------------------------------------------- */

eg_status egi_cpu_prepare_expand(egi_kernel_plan *plan) {
  return check_same_type(plan, false);
}

eg_status egi_cpu_run_expand(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  egi_copy(call->pool, &call->outputs[0], &call->inputs[0]);
  return EG_OK;
}

/* ---- Transpose ------------------------------------------------------------------------------------------------ */

typedef struct transpose_params {
  int permutation[EGI_MAX_RANK];
} transpose_params;

eg_status egi_cpu_prepare_transpose(egi_kernel_plan *plan) {
  EG_TRY(check_same_type(plan, false));
  transpose_params *p = EGI_NEW(plan->arena, transpose_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  int rank = plan->inputs[0].rank;
  uint32_t count = 0;
  const int64_t *permutation = egi_node_ints(egi_plan_node(plan), "perm", &count);
  if (permutation != NULL && count != (uint32_t)rank) {
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "perm has %u entries, the input %d dims", count,
                         rank);
  }
  for (int i = 0; i < rank; i++) {
    if (permutation == NULL) {
      p->permutation[i] = rank - 1 - i;
    } else if (!egi_normalise_axis(permutation[i], rank, &p->permutation[i])) {
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "perm entry %lld is out of range",
                           (long long)permutation[i]);
    }
  }
  return EG_OK;
}

eg_status egi_cpu_run_transpose(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const transpose_params *p = call->params;
  const egi_tensor *input = &call->inputs[0];
  egi_tensor view = *input;
  for (int i = 0; i < input->rank; i++) {
    view.dims[i] = input->dims[p->permutation[i]];
    view.strides[i] = input->strides[p->permutation[i]];
  }
  egi_copy(call->pool, &call->outputs[0], &view);
  return EG_OK;
}

/* ---- Slice ---------------------------------------------------------------------------------------------------- */

static int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

/* One axis of `view` becomes [start:end:step] of what it was; ONNX Slice, version 13. */
static void slice_axis(egi_tensor *view, int axis, int64_t start, int64_t end, int64_t step) {
  int64_t size = view->dims[axis];
  if (start < 0) start = start < -size ? 0 : start + size;
  if (end < 0) end = end < -size ? -1 : end + size;
  int64_t count = 0;
  if (step > 0) {
    start = clamp(start, 0, size);
    end = clamp(end, 0, size);
    if (end > start) count = (end - start - 1) / step + 1;
  } else {
    start = clamp(start, 0, size - 1);
    end = clamp(end, -1, size - 1);
    /* INT64_MIN has no opposite; one step is all that any such axis allows. */
    int64_t back = step == INT64_MIN ? INT64_MAX : -step;
    if (start > end) count = (start - end - 1) / back + 1;
  }
  size_t element_bytes = egi_element_bytes(view->dtype);
  if (count > 0) view->data = (char *)view->data + start * view->strides[axis] * (int64_t)element_bytes;
  view->dims[axis] = count;
  view->strides[axis] = count > 1 ? view->strides[axis] * step : view->strides[axis];
}

eg_status egi_slice_view(eg_context *ctx, const egi_tensor *base, const egi_tensor *lists, unsigned n_lists,
                         const egi_tensor *wanted, egi_tensor *out_view) {
  int64_t values[4][EGI_MAX_RANK];
  uint32_t counts[4] = {0, 0, 0, 0};
  for (unsigned i = 0; i < 4; i++) {
    bool is_there = i < n_lists && lists[i].dtype != EG_DTYPE_UNDEFINED;
    if (is_there && !egi_tensor_integers(&lists[i], values[i], EGI_MAX_RANK, &counts[i])) {
      return egi_fail(ctx, EG_ERROR_DATA, "Slice: starts, ends, axes and steps must be short lists of integers");
    }
    for (uint32_t k = 0; !is_there && i >= 2 && k < counts[0]; k++) values[i][k] = i == 2 ? (int64_t)k : 1;
    if (!is_there && i >= 2) counts[i] = counts[0];
    if (counts[i] != counts[0]) {
      return egi_fail(ctx, EG_ERROR_DATA, "Slice: starts has %u entries, another list %u", counts[0], counts[i]);
    }
  }
  *out_view = *base;
  for (uint32_t k = 0; k < counts[0]; k++) {
    int axis;
    if (!egi_normalise_axis(values[2][k], base->rank, &axis) || values[3][k] == 0) {
      return egi_fail(ctx, EG_ERROR_DATA, "Slice: axis %lld with step %lld of a tensor of rank %d",
                      (long long)values[2][k], (long long)values[3][k], base->rank);
    }
    slice_axis(out_view, axis, values[0][k], values[1][k], values[3][k]);
  }
  for (int i = 0; i < base->rank; i++) {
    if (out_view->dims[i] != wanted->dims[i]) {
      return egi_fail(ctx, EG_ERROR_DATA, "Slice: axis %d selects %lld elements where %lld were planned", i,
                      (long long)out_view->dims[i], (long long)wanted->dims[i]);
    }
  }
  return EG_OK;
}

eg_status egi_cpu_prepare_slice(egi_kernel_plan *plan) {
  return check_same_type(plan, false);
}

eg_status egi_cpu_run_slice(eg_context *ctx, const egi_kernel_call *call) {
  egi_tensor view;
  EG_TRY(egi_slice_view(ctx, &call->inputs[0], call->inputs + 1, call->n_inputs - 1, &call->outputs[0], &view));
  egi_copy(call->pool, &call->outputs[0], &view);
  return EG_OK;
}

/* data (shape only), dY, starts, ends, axes?, steps? */
eg_status egi_cpu_prepare_slice_grad(egi_kernel_plan *plan) {
  eg_dtype dtype = plan->inputs[1].dtype;
  return plan->outputs[0].dtype != dtype || egi_element_bytes(dtype) == 0 ? egi_fail_types(plan) : EG_OK;
}

eg_status egi_cpu_run_slice_grad(eg_context *ctx, const egi_kernel_call *call) {
  static const char zero[16];
  const egi_tensor *gradient = &call->inputs[1];
  egi_tensor view;
  EG_TRY(egi_slice_view(ctx, &call->outputs[0], call->inputs + 2, call->n_inputs - 2, gradient, &view));
  egi_fill(call->pool, &call->outputs[0], zero);
  egi_copy(call->pool, &view, gradient);
  return EG_OK;
}

/* ---- Split, Concat -------------------------------------------------------------------------------------------- */

typedef struct axis_params {
  int axis;
  int64_t n_parts; /* Split without sizes */
} axis_params;

static eg_status prepare_axis(egi_kernel_plan *plan, int64_t default_axis, int rank) {
  axis_params *p = EGI_NEW(plan->arena, axis_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  const egi_node *node = egi_plan_node(plan);
  int64_t axis = egi_node_int(node, "axis", default_axis);
  p->n_parts = egi_node_int(node, "num_outputs", plan->n_outputs);
  plan->params = p;
  if (!egi_normalise_axis(axis, rank, &p->axis) || p->n_parts < 1) {
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis %lld of tensors of rank %d", (long long)axis,
                         rank);
  }
  return EG_OK;
}

eg_status egi_cpu_prepare_split(egi_kernel_plan *plan) {
  for (unsigned i = 0; i < plan->n_outputs; i++) {
    eg_dtype dtype = plan->outputs[i].dtype;
    if (dtype != EG_DTYPE_UNDEFINED && dtype != plan->inputs[0].dtype) return egi_fail_types(plan);
  }
  if (egi_element_bytes(plan->inputs[0].dtype) == 0) return egi_fail_types(plan);
  return prepare_axis(plan, 0, plan->inputs[0].rank);
}

/* Size of part i: from the list where there is one, else equal parts, the last one smaller. */
static int64_t part_size(const egi_kernel_call *call, unsigned part, int64_t whole, int64_t n_parts) {
  if (!egi_call_has_input(call, 1)) {
    int64_t size = (whole + n_parts - 1) / n_parts;
    return clamp(whole - (int64_t)part * size, 0, size);
  }
  const egi_tensor *sizes = &call->inputs[1];
  int64_t size = 0;
  uint32_t count;
  egi_tensor one = *sizes;
  one.rank = 0;
  one.data = (char *)sizes->data + (int64_t)part * sizes->strides[0] * (int64_t)egi_element_bytes(sizes->dtype);
  bool is_inside = sizes->rank == 1 && part < sizes->dims[0];
  return is_inside && egi_tensor_integers(&one, &size, 1, &count) ? size : -1;
}

eg_status egi_cpu_run_split(eg_context *ctx, const egi_kernel_call *call) {
  const axis_params *p = call->params;
  const egi_tensor *input = &call->inputs[0];
  int64_t whole = input->dims[p->axis];
  int64_t start = 0;
  for (unsigned i = 0; i < call->n_outputs; i++) {
    const egi_tensor *output = &call->outputs[i];
    int64_t size = part_size(call, i, whole, p->n_parts);
    bool is_wanted = output->dtype != EG_DTYPE_UNDEFINED;
    if (size < 0 || size > whole - start || (is_wanted && output->dims[p->axis] != size)) {
      return egi_fail(ctx, EG_ERROR_DATA, "Split: part %u has %lld of the axis's %lld elements", i, (long long)size,
                      (long long)whole);
    }
    egi_tensor view = *input;
    view.dims[p->axis] = size;
    view.data = (char *)view.data + start * view.strides[p->axis] * (int64_t)egi_element_bytes(view.dtype);
    if (is_wanted) egi_copy(call->pool, output, &view);
    start += size;
  }
  return EG_OK;
}

eg_status egi_cpu_prepare_concat(egi_kernel_plan *plan) {
  for (unsigned i = 0; i < plan->n_inputs; i++) {
    if (plan->inputs[i].dtype != plan->outputs[0].dtype) return egi_fail_types(plan);
  }
  if (egi_element_bytes(plan->outputs[0].dtype) == 0) return egi_fail_types(plan);
  return prepare_axis(plan, 0, plan->outputs[0].rank);
}

/* An input that already lies at its place in the output is left there. */
eg_status egi_cpu_run_concat(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const axis_params *p = call->params;
  egi_tensor part = call->outputs[0];
  for (unsigned i = 0; i < call->n_inputs; i++) {
    part.dims[p->axis] = call->inputs[i].dims[p->axis];
    egi_copy(call->pool, &part, &call->inputs[i]);
    int64_t step = part.dims[p->axis] * part.strides[p->axis];
    part.data = (char *)part.data + step * (int64_t)egi_element_bytes(part.dtype);
  }
  return EG_OK;
}
