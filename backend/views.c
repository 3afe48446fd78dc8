/* Layouts of view operators: strides and offsets instead of copies. Pure functions; false means that no strides express
 * the result and the operator's kernel has to copy. Called by plan_steps.c and plan_concat.c. */
#include "backend/plan.h"

void egi_tensor_normalise(egi_tensor *tensor) {
  if (egi_tensor_is_contiguous(tensor)) egi_tensor_set_contiguous(tensor);
}

uint32_t egi_whole_bytes(eg_dtype dtype) {
  unsigned bits = egi_dtype_bits(dtype);
  return bits % 8 == 0 ? bits / 8 : 0;
}

uint64_t egi_align(uint64_t size_bytes) {
  return (size_bytes + EGI_ALIGNMENT - 1) / EGI_ALIGNMENT * EGI_ALIGNMENT;
}

/* `out` becomes a view of `in` that starts `start` elements further on; strides are set by the caller. */
static bool start_view(const egi_layout *in, int64_t start, egi_layout *out) {
  uint32_t element_bytes = egi_whole_bytes(in->tensor.dtype);
  if (element_bytes == 0 && !(start == 0 && egi_tensor_is_contiguous(&in->tensor))) return false;
  out->storage = in->storage;
  out->after = in->after;
  out->offset_bytes = (uint64_t)((int64_t)in->offset_bytes + start * (int64_t)element_bytes);
  out->tensor.dtype = in->tensor.dtype;
  return true;
}

/* Strides of `to` (dims set) over the elements of `from` in row-major order: dims are matched in groups of equal
 * product; inside a group the old dims must lie back to back. */
static bool reshape_strides(const egi_tensor *from, egi_tensor *to) {
  int64_t dims[EGI_MAX_RANK], strides[EGI_MAX_RANK];
  int n = 0, i = 0, j = 0;
  for (int k = 0; k < from->rank; k++) {
    if (from->dims[k] == 1) continue;
    dims[n] = from->dims[k];
    strides[n++] = from->strides[k];
  }
  while (i < n && j < to->rank) {
    int64_t old_count = dims[i], new_count = to->dims[j];
    int i_end = i + 1, j_end = j + 1;
    while (old_count != new_count) {
      if (new_count < old_count) {
        if (j_end == to->rank) return false;
        new_count *= to->dims[j_end++];
      } else {
        if (i_end == n) return false;
        old_count *= dims[i_end++];
      }
    }
    for (int k = i; k + 1 < i_end; k++) {
      if (strides[k] != dims[k + 1] * strides[k + 1]) return false;
    }
    to->strides[j_end - 1] = strides[i_end - 1];
    for (int k = j_end - 1; k > j; k--) to->strides[k - 1] = to->strides[k] * to->dims[k];
    i = i_end;
    j = j_end;
  }
  for (; j < to->rank; j++) to->strides[j] = 1; /* only dims of 1 are left */
  return i == n;
}

bool egi_view_reshape(const egi_layout *in, egi_layout *out) {
  if (!start_view(in, 0, out)) return false;
  if (egi_tensor_count(&in->tensor) != egi_tensor_count(&out->tensor)) return false;
  if (egi_tensor_count(&in->tensor) == 0) {
    egi_tensor_set_contiguous(&out->tensor);
    return true;
  }
  if (!reshape_strides(&in->tensor, &out->tensor)) return false;
  egi_tensor_normalise(&out->tensor);
  return true;
}

bool egi_view_permute(const egi_layout *in, const int *order, egi_layout *out) {
  if (!start_view(in, 0, out)) return false;
  egi_tensor tensor = in->tensor;
  for (int i = 0; i < in->tensor.rank; i++) {
    tensor.dims[i] = in->tensor.dims[order[i]];
    tensor.strides[i] = in->tensor.strides[order[i]];
  }
  egi_tensor_normalise(&tensor);
  if (egi_whole_bytes(tensor.dtype) == 0 && !egi_tensor_is_contiguous(&tensor)) return false;
  out->tensor = tensor;
  return true;
}

bool egi_view_piece(const egi_layout *in, int axis, int64_t start, egi_layout *out) {
  int64_t skipped = egi_tensor_count(&out->tensor) == 0 ? 0 : start * in->tensor.strides[axis];
  if (!start_view(in, skipped, out)) return false;
  memcpy(out->tensor.strides, in->tensor.strides, sizeof(out->tensor.strides));
  egi_tensor_normalise(&out->tensor);
  return egi_whole_bytes(in->tensor.dtype) != 0 || egi_tensor_is_contiguous(&out->tensor);
}

static bool view_transpose(const egi_node *node, const egi_layout *in, egi_layout *out) {
  uint32_t count = 0;
  const int64_t *perm = egi_node_ints(node, "perm", &count);
  int order[EGI_MAX_RANK], rank = in->tensor.rank;
  if (perm != NULL && count != (uint32_t)rank) return false;
  for (int i = 0; i < rank; i++) {
    int64_t axis = perm != NULL ? perm[i] : rank - 1 - i;
    if (axis < 0 || axis >= rank) return false;
    order[i] = (int)axis;
  }
  egi_layout view = {0};
  if (!egi_view_permute(in, order, &view)) return false;
  if (memcmp(view.tensor.dims, out->tensor.dims, sizeof(int64_t) * (size_t)rank) != 0) return false;
  *out = view;
  return true;
}

static bool view_expand(const egi_layout *in, egi_layout *out) {
  if (!start_view(in, 0, out)) return false;
  int missing = out->tensor.rank - in->tensor.rank;
  if (missing < 0 || egi_whole_bytes(in->tensor.dtype) == 0) return false;
  for (int i = 0; i < out->tensor.rank; i++) {
    bool is_kept = i >= missing && in->tensor.dims[i - missing] == out->tensor.dims[i];
    if (!is_kept && i >= missing && in->tensor.dims[i - missing] != 1) return false;
    out->tensor.strides[i] = is_kept ? in->tensor.strides[i - missing] : 0;
  }
  egi_tensor_normalise(&out->tensor);
  return true;
}

/* First element and number of elements of one axis (ONNX Slice-13: negative positions count from the end, then they are
 * clamped). */
static bool slice_axis(int64_t size, int64_t from, int64_t to, int64_t step, int64_t *out_start, int64_t *out_count) {
  if (step == 0 || step == INT64_MIN) return false;
  if (from < 0) from = from < -size ? -1 : from + size;
  if (to < 0) to = to < -size ? -1 : to + size;
  int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
  if (from < 0) from = 0;
  if (from > high) from = high;
  if (to < low) to = low;
  if (to > size) to = size;
  int64_t distance = step > 0 ? to - from : from - to, stride = step > 0 ? step : -step;
  *out_start = from;
  *out_count = distance <= 0 ? 0 : (distance - 1) / stride + 1;
  return true;
}

static bool view_slice(const egi_planner *planner, const egi_node *node, const egi_layout *in, egi_layout *out) {
  int64_t starts[EGI_MAX_RANK], ends[EGI_MAX_RANK], axes[EGI_MAX_RANK], steps[EGI_MAX_RANK];
  uint32_t n = 0, n_ends = 0, n_axes = 0, n_steps = 0;
  if (node->n_inputs < 3 || !egi_plan_integers(planner, node->inputs[1], starts, EGI_MAX_RANK, &n) ||
      !egi_plan_integers(planner, node->inputs[2], ends, EGI_MAX_RANK, &n_ends) || n_ends != n) {
    return false;
  }
  bool has_axes = node->n_inputs > 3 && node->inputs[3] != 0, has_steps = node->n_inputs > 4 && node->inputs[4] != 0;
  if (has_axes && !(egi_plan_integers(planner, node->inputs[3], axes, EGI_MAX_RANK, &n_axes) && n_axes == n))
    return false;
  if (has_steps && !(egi_plan_integers(planner, node->inputs[4], steps, EGI_MAX_RANK, &n_steps) && n_steps == n)) {
    return false;
  }
  egi_tensor tensor = in->tensor;
  int64_t skipped = 0;
  for (uint32_t i = 0; i < n; i++) {
    int64_t axis = has_axes ? axes[i] : (int64_t)i, step = has_steps ? steps[i] : 1, start = 0, count = 0;
    if (axis < 0) axis += tensor.rank;
    if (axis < 0 || axis >= tensor.rank) return false;
    if (!slice_axis(in->tensor.dims[axis], starts[i], ends[i], step, &start, &count)) return false;
    tensor.dims[axis] = count;
    skipped += count == 0 ? 0 : start * in->tensor.strides[axis];
    /* with one element no step is taken, and the product below could overflow */
    tensor.strides[axis] = count <= 1 ? in->tensor.strides[axis] : in->tensor.strides[axis] * step;
  }
  if (memcmp(tensor.dims, out->tensor.dims, sizeof(int64_t) * (size_t)tensor.rank) != 0) return false;
  if (egi_tensor_count(&tensor) == 0) skipped = 0;
  egi_tensor_normalise(&tensor);
  if (!start_view(in, skipped, out)) return false;
  out->tensor = tensor;
  return egi_whole_bytes(tensor.dtype) != 0 || egi_tensor_is_contiguous(&tensor);
}

/* First row of output `index`: from the sizes where they are given, else equal pieces with the rest last (Split-18). */
static bool split_start(const egi_planner *planner, const egi_node *node, unsigned index, int64_t size, int64_t *out) {
  int64_t sizes[256], start = 0;
  uint32_t n = 0;
  if (node->n_inputs > 1 && node->inputs[1] != 0) {
    if (!egi_plan_integers(planner, node->inputs[1], sizes, EGI_COUNT(sizes), &n) || index >= n) return false;
    for (unsigned i = 0; i < index; i++) start += sizes[i];
  } else {
    int64_t n_pieces = egi_node_int(node, "num_outputs", (int64_t)node->n_outputs);
    if (n_pieces <= 0) return false;
    start = (size / n_pieces + (size % n_pieces != 0)) * (int64_t)index;
  }
  *out = start;
  return start >= 0;
}

static bool view_split(const egi_planner *planner, const egi_node *node, unsigned index, const egi_layout *in,
                       egi_layout *out) {
  int64_t axis = egi_node_int(node, "axis", 0), start = 0;
  if (axis < 0) axis += in->tensor.rank;
  if (axis < 0 || axis >= in->tensor.rank) return false;
  int64_t size = in->tensor.dims[axis];
  if (!split_start(planner, node, index, size, &start)) return false;
  if (out->tensor.dims[axis] > size || start > size - out->tensor.dims[axis]) return false;
  return egi_view_piece(in, (int)axis, start, out);
}

bool egi_view_node(const egi_planner *planner, egi_node_id id, unsigned index, const egi_layout *in, egi_layout *out) {
  const egi_node *node = &planner->graph->nodes[id];
  switch (node->op) {
  case EGI_OP_Identity:
  case EGI_OP_Reshape:
  case EGI_OP_Flatten:
  case EGI_OP_Squeeze:
  case EGI_OP_Unsqueeze:
    return egi_view_reshape(in, out);
  case EGI_OP_Transpose:
    return view_transpose(node, in, out);
  case EGI_OP_Expand:
    return view_expand(in, out);
  case EGI_OP_Slice:
    return view_slice(planner, node, in, out);
  case EGI_OP_Split:
    return view_split(planner, node, index, in, out);
  default:
    return false;
  }
}
