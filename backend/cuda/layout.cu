/* The operators that only move elements, for when the planner cannot make them views: strided copies, any type of at
 * least 8 bits (Identity, Reshape and their like: any type that is not text). Lists of axes, starts and so on are read
 * when the plan is made. */
#include "backend/cuda/strided.cuh"

namespace egi::plain {

static eg_status check_same_type(const egi_kernel_plan *plan, bool is_packed_allowed) {
  const eg_dtype dtype = plan->inputs[0].dtype;
  if (plan->outputs[0].dtype != dtype || egi_dtype_kind(dtype) == EGI_CLASS_STRING ||
      (egi_element_bytes(dtype) == 0 && !is_packed_allowed))
    return egi_fail_types(plan);
  return EG_OK;
}

/* ---- Slice ------------------------------------------------------------------------------------------------------- */

/* What a slice selects: of each axis the first element and the step; the sizes are those of the smaller tensor. */
struct slice_params {
  int64_t starts[EGI_MAX_RANK], steps[EGI_MAX_RANK];
};

static int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

/* [start:end:step] of an axis of `size` elements; ONNX Slice, version 13. */
static void slice_axis(int64_t size, int64_t start, int64_t end, int64_t step, int64_t out[3]) {
  int64_t count = 0;
  if (start < 0) start = start < -size ? 0 : start + size;
  if (end < 0) end = end < -size ? -1 : end + size;
  if (step > 0) {
    start = clamp(start, 0, size);
    end = clamp(end, 0, size);
    if (end > start) count = (end - start - 1) / step + 1;
  } else {
    start = clamp(start, 0, size - 1);
    end = clamp(end, -1, size - 1);
    /* INT64_MIN has no opposite; one step is all that any such axis allows. */
    const int64_t back = step == INT64_MIN ? INT64_MAX : -step;
    if (start > end) count = (start - end - 1) / back + 1;
  }
  out[0] = start;
  out[1] = count > 1 ? step : 1;
  out[2] = count;
}

/* Inputs starts, ends, axes?, steps? from `first` on, of a slice of `whole` that must have the dims of `part`. */
static eg_status read_slice(egi_kernel_plan *plan, unsigned first, const egi_tensor *whole, const egi_tensor *part) {
  int64_t values[4][EGI_MAX_RANK], sizes[EGI_MAX_RANK];
  uint32_t counts[4] = {0, 0, 0, 0};
  slice_params *p = EGI_NEW(plan->arena, slice_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  for (unsigned i = 0; i < 4; i++) {
    const bool is_there = egi_plan_has_input(plan, first + i);
    if (is_there) EG_TRY(known_integers(plan, first + i, values[i], EGI_MAX_RANK, &counts[i]));
    for (uint32_t k = 0; !is_there && i >= 2 && k < counts[0]; k++) values[i][k] = i == 2 ? static_cast<int64_t>(k) : 1;
    if (!is_there && i >= 2) counts[i] = counts[0];
    if (counts[i] != counts[0])
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "starts has %u entries, another list %u", counts[0],
                           counts[i]);
  }
  for (int i = 0; i < whole->rank; i++) {
    p->starts[i] = 0;
    p->steps[i] = 1;
    sizes[i] = whole->dims[i];
  }
  for (uint32_t k = 0; k < counts[0]; k++) {
    int axis;
    int64_t selected[3];
    if (!egi_normalise_axis(values[2][k], whole->rank, &axis) || values[3][k] == 0)
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "axis %lld with step %lld of a tensor of rank %d",
                           static_cast<long long>(values[2][k]), static_cast<long long>(values[3][k]), whole->rank);
    slice_axis(sizes[axis], values[0][k], values[1][k], values[3][k], selected);
    p->starts[axis] += selected[0] * p->steps[axis];
    p->steps[axis] *= selected[1];
    sizes[axis] = selected[2];
  }
  for (int i = 0; i < whole->rank; i++) {
    if (sizes[i] != part->dims[i])
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA,
                           "axis %d selects %lld elements where %lld were planned", i, static_cast<long long>(sizes[i]),
                           static_cast<long long>(part->dims[i]));
  }
  return EG_OK;
}

/* The part of `whole` that is selected. */
static egi_tensor slice_view(const slice_params *p, const egi_tensor *whole, const egi_tensor *part) {
  egi_tensor view = *whole;
  int64_t offset = 0;
  for (int i = 0; i < whole->rank; i++) {
    offset += p->starts[i] * whole->strides[i];
    view.dims[i] = part->dims[i];
    view.strides[i] = whole->strides[i] * p->steps[i];
  }
  if (egi_tensor_count(part) > 0)
    view.data = static_cast<char *>(whole->data) + offset * static_cast<int64_t>(egi_element_bytes(whole->dtype));
  return view;
}

/* ---- Transpose, Split, Concat ------------------------------------------------------------------------------------ */

struct transpose_params {
  int permutation[EGI_MAX_RANK];
};

struct axis_params {
  int axis;
  int64_t n_parts; /* Split without sizes */
};

static eg_status prepare_axis(egi_kernel_plan *plan, int rank, axis_params **out_params) {
  axis_params *p = EGI_NEW(plan->arena, axis_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  const egi_node *node = egi_plan_node(plan);
  const int64_t axis = egi_node_int(node, "axis", 0);
  plan->params = *out_params = p;
  p->n_parts = egi_node_int(node, "num_outputs", plan->n_outputs);
  if (egi_normalise_axis(axis, rank, &p->axis) && p->n_parts >= 1) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis %lld of tensors of rank %d",
                       static_cast<long long>(axis), rank);
}

static eg_status check_part(const egi_kernel_plan *plan, unsigned part, int64_t size, int64_t wanted, int64_t whole) {
  if (size == wanted) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "part %u has %lld of the axis's %lld elements", part,
                       static_cast<long long>(size), static_cast<long long>(whole));
}

/* Sizes of parts are those of the outputs, and of the list where there is one and it is known. */
static eg_status check_split(const egi_kernel_plan *plan, const axis_params *p) {
  enum { MAX_PARTS = 256 };
  int64_t sizes[MAX_PARTS], start = 0;
  const int64_t whole = plan->inputs[0].dims[p->axis], equal = (whole + p->n_parts - 1) / p->n_parts;
  const bool is_listed = egi_plan_has_input(plan, 1), is_known = is_listed && plan->inputs[1].data != NULL;
  uint32_t count = 0;
  if (is_known && plan->n_outputs <= MAX_PARTS) EG_TRY(known_integers(plan, 1, sizes, MAX_PARTS, &count));
  for (unsigned i = 0; i < plan->n_outputs; i++) {
    const egi_tensor *output = &plan->outputs[i];
    const bool is_wanted = output->dtype != EG_DTYPE_UNDEFINED;
    int64_t size = is_listed ? (i < count ? sizes[i] : -1) : clamp(whole - start, 0, equal);
    if (is_listed && !is_known) {
      if (!is_wanted)
        return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED,
                             "its sizes are computed on the device, where the plan must know them");
      size = output->dims[p->axis];
    }
    const int64_t wanted = is_wanted ? output->dims[p->axis] : size;
    if (size < 0 || size > whole - start) EG_TRY(check_part(plan, i, size, -1 - size, whole));
    EG_TRY(check_part(plan, i, size, wanted, whole));
    start += size;
  }
  return EG_OK;
}

/* Size of part i as check_split() found it right. */
static int64_t part_size(const egi_kernel_call *call, const axis_params *p, const int64_t *listed, unsigned part) {
  if (listed != NULL) return listed[part];
  const int64_t whole = call->inputs[0].dims[p->axis], size = (whole + p->n_parts - 1) / p->n_parts;
  return clamp(whole - static_cast<int64_t>(part) * size, 0, size);
}

struct split_params {
  axis_params *axis;
  int64_t *sizes; /* NULL: equal parts */
};

} // namespace egi::plain

using namespace egi::plain;

/* ---- Identity, Barrier, Reshape, Flatten, Squeeze, Unsqueeze, Expand ----------------------------------------------
 */

extern "C" eg_status egi_cuda_prepare_identity(egi_kernel_plan *plan) {
  return check_same_type(plan, true);
}

extern "C" eg_status egi_cuda_run_identity(eg_context *ctx, const egi_kernel_call *call) {
  return copy_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0], &call->inputs[0]);
}

extern "C" eg_status egi_cuda_prepare_reshape(egi_kernel_plan *plan) {
  EG_TRY(check_same_type(plan, true));
  const int64_t from = egi_tensor_count(&plan->inputs[0]), to = egi_tensor_count(&plan->outputs[0]);
  if (from == to) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%lld elements cannot become %lld",
                       static_cast<long long>(from), static_cast<long long>(to));
}

/* The output is contiguous: seen with the input's dims it is one too. */
extern "C" eg_status egi_cuda_run_reshape(eg_context *ctx, const egi_kernel_call *call) {
  egi_tensor target = call->inputs[0];
  target.data = call->outputs[0].data;
  egi_tensor_set_contiguous(&target);
  return copy_tensor(ctx, egi_cuda_stream_of(call), &target, &call->inputs[0]);
}

extern "C" eg_status egi_cuda_prepare_expand(egi_kernel_plan *plan) {
  return check_same_type(plan, false);
}

extern "C" eg_status egi_cuda_run_expand(eg_context *ctx, const egi_kernel_call *call) {
  return copy_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0], &call->inputs[0]);
}

/* ---- Transpose ----------------------------------------------------------------------------------------------------
 */

extern "C" eg_status egi_cuda_prepare_transpose(egi_kernel_plan *plan) {
  EG_TRY(check_same_type(plan, false));
  transpose_params *p = EGI_NEW(plan->arena, transpose_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const int rank = plan->inputs[0].rank;
  uint32_t count = 0;
  const int64_t *permutation = egi_node_ints(egi_plan_node(plan), "perm", &count);
  if (permutation != NULL && count != static_cast<uint32_t>(rank))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "perm has %u entries, the input %d dims", count,
                         rank);
  for (int i = 0; i < rank; i++) {
    if (permutation == NULL)
      p->permutation[i] = rank - 1 - i;
    else if (!egi_normalise_axis(permutation[i], rank, &p->permutation[i]))
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "perm entry %lld is out of range",
                           static_cast<long long>(permutation[i]));
  }
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_transpose(eg_context *ctx, const egi_kernel_call *call) {
  const transpose_params *p = static_cast<const transpose_params *>(call->params);
  const egi_tensor *input = &call->inputs[0];
  egi_tensor view = *input;
  for (int i = 0; i < input->rank; i++) {
    view.dims[i] = input->dims[p->permutation[i]];
    view.strides[i] = input->strides[p->permutation[i]];
  }
  return copy_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0], &view);
}

/* ---- Slice and its gradient ----------------------------------------------------------------------------------------
 */

extern "C" eg_status egi_cuda_prepare_slice(egi_kernel_plan *plan) {
  EG_TRY(check_same_type(plan, false));
  return read_slice(plan, 1, &plan->inputs[0], &plan->outputs[0]);
}

extern "C" eg_status egi_cuda_run_slice(eg_context *ctx, const egi_kernel_call *call) {
  const slice_params *p = static_cast<const slice_params *>(call->params);
  const egi_tensor view = slice_view(p, &call->inputs[0], &call->outputs[0]);
  return copy_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0], &view);
}

/* data (shape only), dY, starts, ends, axes?, steps? */
extern "C" eg_status egi_cuda_prepare_slice_grad(egi_kernel_plan *plan) {
  const eg_dtype dtype = plan->inputs[1].dtype;
  if (plan->outputs[0].dtype != dtype || egi_element_bytes(dtype) == 0) return egi_fail_types(plan);
  return read_slice(plan, 2, &plan->outputs[0], &plan->inputs[1]);
}

extern "C" eg_status egi_cuda_run_slice_grad(eg_context *ctx, const egi_kernel_call *call) {
  const slice_params *p = static_cast<const slice_params *>(call->params);
  const egi_tensor view = slice_view(p, &call->outputs[0], &call->inputs[1]);
  EG_TRY(clear_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0]));
  return copy_tensor(ctx, egi_cuda_stream_of(call), &view, &call->inputs[1]);
}

/* ---- Split, Concat --------------------------------------------------------------------------------------------------
 */

extern "C" eg_status egi_cuda_prepare_split(egi_kernel_plan *plan) {
  for (unsigned i = 0; i < plan->n_outputs; i++) {
    const eg_dtype dtype = plan->outputs[i].dtype;
    if (dtype != EG_DTYPE_UNDEFINED && dtype != plan->inputs[0].dtype) return egi_fail_types(plan);
  }
  if (egi_element_bytes(plan->inputs[0].dtype) == 0) return egi_fail_types(plan);
  split_params *p = EGI_NEW(plan->arena, split_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  EG_TRY(prepare_axis(plan, plan->inputs[0].rank, &p->axis));
  plan->params = p;
  EG_TRY(check_split(plan, p->axis));
  if (!egi_plan_has_input(plan, 1)) return EG_OK;
  p->sizes = EGI_NEW(plan->arena, int64_t, plan->n_outputs);
  if (p->sizes == NULL) return EG_ERROR_MEMORY;
  uint32_t count = 0;
  if (plan->inputs[1].data != NULL) return known_integers(plan, 1, p->sizes, plan->n_outputs, &count);
  for (unsigned i = 0; i < plan->n_outputs; i++) p->sizes[i] = plan->outputs[i].dims[p->axis->axis];
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_split(eg_context *ctx, const egi_kernel_call *call) {
  const split_params *p = static_cast<const split_params *>(call->params);
  const int axis = p->axis->axis;
  egi_tensor view = call->inputs[0];
  for (unsigned i = 0; i < call->n_outputs; i++) {
    view.dims[axis] = part_size(call, p->axis, p->sizes, i);
    if (has_output(call, i)) EG_TRY(copy_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[i], &view));
    view.data = static_cast<char *>(view.data) +
                view.dims[axis] * view.strides[axis] * static_cast<int64_t>(egi_element_bytes(view.dtype));
  }
  return EG_OK;
}

extern "C" eg_status egi_cuda_prepare_concat(egi_kernel_plan *plan) {
  axis_params *p;
  for (unsigned i = 0; i < plan->n_inputs; i++) {
    if (plan->inputs[i].dtype != plan->outputs[0].dtype) return egi_fail_types(plan);
  }
  if (egi_element_bytes(plan->outputs[0].dtype) == 0) return egi_fail_types(plan);
  return prepare_axis(plan, plan->outputs[0].rank, &p);
}

/* An input that already lies at its place in the output is left there. */
extern "C" eg_status egi_cuda_run_concat(eg_context *ctx, const egi_kernel_call *call) {
  const axis_params *p = static_cast<const axis_params *>(call->params);
  egi_tensor part = call->outputs[0];
  for (unsigned i = 0; i < call->n_inputs; i++) {
    part.dims[p->axis] = call->inputs[i].dims[p->axis];
    EG_TRY(copy_tensor(ctx, egi_cuda_stream_of(call), &part, &call->inputs[i]));
    part.data = static_cast<char *>(part.data) +
                part.dims[p->axis] * part.strides[p->axis] * static_cast<int64_t>(egi_element_bytes(part.dtype));
  }
  return EG_OK;
}

/* ---- StoreState -----------------------------------------------------------------------------------------------------
 */

/* A state, which may lie in host memory, becomes x: contiguous, so that the copy engine does it. */
extern "C" eg_status egi_cuda_prepare_store_state(egi_kernel_plan *plan) {
  const egi_tensor *state = &plan->inputs[0], *value = &plan->inputs[1];
  if (state->dtype != value->dtype || egi_element_bytes(state->dtype) == 0) return egi_fail_types(plan);
  if (egi_tensor_count(state) == egi_tensor_count(value)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "state and value differ in size");
}

extern "C" eg_status egi_cuda_run_store_state(eg_context *ctx, const egi_kernel_call *call) {
  egi_tensor state = call->inputs[1];
  state.data = call->inputs[0].data;
  return copy_tensor(ctx, egi_cuda_stream_of(call), &state, &call->inputs[1]);
}
