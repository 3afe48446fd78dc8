/* Shape rules: Slice and Split. */
#include "graph/shapes.h"

/* Larger ends mean "to the end": no dim comes near, and min(end, dim) would only hide that. */
#define FAR_AWAY INT32_MAX

/* A position as counted from the front, clamped to [lowest, dim + lowest] where lowest is 0 for positive and -1 for
 * negative steps; NONE when its sign is not known. */
static egi_dim clamp(const egi_inference *in, egi_dim dim, egi_dim position, int64_t lowest) {
  egi_dims *dims = in->dims;
  egi_dim low = egi_dim_constant(dims, lowest), high = egi_dim_add(dims, dim, low);
  int64_t number;
  if (egi_dim_value(dims, position, &number)) {
    if (number >= FAR_AWAY) return high;
    if (number <= -FAR_AWAY) return low;
    if (number < 0) position = egi_dim_add(dims, dim, position);
  } else {
    egi_dim after = egi_dim_subtract(dims, egi_dim_constant(dims, -1), position);
    if (egi_dim_is_nonnegative(dims, after))
      position = egi_dim_add(dims, dim, position);
    else if (!egi_dim_is_nonnegative(dims, position))
      return EGI_DIM_NONE;
  }
  return egi_dim_maximum(dims, egi_dim_minimum(dims, position, high), low);
}

static egi_dim slice_length(const egi_inference *in, egi_dim dim, egi_dim start, egi_dim end, int64_t step) {
  int64_t lowest = step < 0 ? -1 : 0;
  egi_dim first = clamp(in, dim, start, lowest), last = clamp(in, dim, end, lowest);
  return egi_shape_range_length(in, first, last, egi_dim_constant(in->dims, step));
}

/* Axes that are sliced, from input 3 or all from the front; false when unknown. */
static bool read_axes(const egi_inference *in, uint32_t n, int64_t *axes) {
  uint32_t count;
  if (egi_shape_input(in, 3) != NULL) return egi_shape_integers(in, 3, axes, EGI_MAX_RANK, &count) && count == n;
  for (uint32_t i = 0; i < n; i++) axes[i] = i;
  return true;
}

static bool read_steps(const egi_inference *in, uint32_t n, int64_t *steps) {
  uint32_t count;
  if (egi_shape_input(in, 4) != NULL) return egi_shape_integers(in, 4, steps, EGI_MAX_RANK, &count) && count == n;
  for (uint32_t i = 0; i < n; i++) steps[i] = 1;
  return true;
}

static eg_status count_axes(const egi_inference *in, uint32_t *out_count) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t length, other;
  for (unsigned i = 1; i < in->node->n_inputs; i++) EG_TRY(egi_shape_check_input_rank(in, i, 1));
  if (!egi_shape_length(in, 1, &length)) length = -1;
  for (unsigned i = 2; i < in->node->n_inputs; i++) {
    if (!egi_shape_length(in, i, &other)) continue;
    if (length >= 0 && other != length) return egi_shape_fail(in, "starts, ends, axes and steps differ in length");
    length = other;
  }
  if (length > x->rank) return egi_shape_fail(in, "%lld axes are sliced", (long long)length);
  *out_count = length < 0 ? 0 : (uint32_t)length;
  return EG_OK;
}

/* The axes are known: unknown starts or ends leave the size of their own axis open alone. */
static eg_status slice_axes(const egi_inference *in, uint32_t n, const int64_t *axes, egi_dim *dims) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t steps[EGI_MAX_RANK];
  uint32_t count, mask;
  EG_TRY(egi_shape_axes(in, axes, n, x->rank, &mask));
  bool has_steps = read_steps(in, n, steps);
  const egi_dim *starts = egi_shape_elements(in, 1, &count), *ends = egi_shape_elements(in, 2, &count);
  for (uint32_t i = 0; i < n; i++) {
    int axis = (int)(axes[i] < 0 ? axes[i] + x->rank : axes[i]);
    if (has_steps && steps[i] == 0) return egi_shape_fail(in, "a step of 0");
    if (has_steps && starts != NULL && ends != NULL)
      dims[axis] = slice_length(in, egi_dim_resolve(in->dims, x->dims[axis]), egi_dim_resolve(in->dims, starts[i]),
                                egi_dim_resolve(in->dims, ends[i]), steps[i]);
    else
      dims[axis] = EGI_DIM_NONE;
  }
  return EG_OK;
}

eg_status egi_shape_slice(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_dim dims[EGI_MAX_RANK];
  int64_t axes[EGI_MAX_RANK];
  uint32_t n = 0;
  EG_TRY(count_axes(in, &n));
  if (!read_axes(in, n, axes)) return egi_shape_set_unknown(in, 0, x->dtype, x->rank);
  memcpy(dims, x->dims, sizeof dims);
  EG_TRY(slice_axes(in, n, axes, dims));
  return egi_shape_set(in, 0, x->dtype, x->rank, dims);
}

/* ---- Split ---------------------------------------------------------------------------------------------------- */

static eg_status set_piece(egi_inference *in, unsigned output, int axis, egi_dim size) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_dim dims[EGI_MAX_RANK];
  memcpy(dims, x->dims, sizeof dims);
  dims[axis] = size;
  return egi_shape_set(in, output, x->dtype, x->rank, dims);
}

static eg_status split_as_given(egi_inference *in, int axis) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t length;
  uint32_t count;
  egi_dim sum = egi_dim_constant(in->dims, 0);
  EG_TRY(egi_shape_check_input_rank(in, 1, 1));
  if (egi_shape_length(in, 1, &length) && length != in->node->n_outputs)
    return egi_shape_fail(in, "%lld sizes for %u outputs", (long long)length, in->node->n_outputs);
  const egi_dim *sizes = egi_shape_elements(in, 1, &count);
  for (unsigned i = 0; i < in->node->n_outputs; i++) {
    int64_t number;
    egi_dim size = sizes != NULL ? sizes[i] : EGI_DIM_NONE;
    if (egi_dim_value(in->dims, size, &number) && number < 0)
      return egi_shape_fail(in, "a negative size: %lld", (long long)number);
    sum = egi_dim_add(in->dims, sum, size);
    EG_TRY(set_piece(in, i, axis, size));
  }
  if (sum == EGI_DIM_NONE) return EG_OK;
  return egi_shape_equal(in, "the sum of the sizes", sum, x->dims[axis], NULL);
}

/* Pieces of ceil(dim / n), the last one what is left. */
static eg_status split_evenly(egi_inference *in, int axis) {
  int64_t n = in->node->n_outputs, dim_value, piece_value;
  int64_t wanted = egi_node_int(in->node, "num_outputs", n);
  egi_dim dim = egi_dim_resolve(in->dims, egi_shape_input(in, 0)->dims[axis]);
  if (wanted != n) return egi_shape_fail(in, "num_outputs is %lld with %lld outputs", (long long)wanted, (long long)n);
  egi_dim rounded = egi_dim_add(in->dims, dim, egi_dim_constant(in->dims, n - 1));
  egi_dim exact = egi_dim_divide(in->dims, dim, egi_dim_constant(in->dims, n));
  bool is_exact = egi_dim_multiply(in->dims, exact, egi_dim_constant(in->dims, n)) == dim;
  egi_dim piece = is_exact ? exact : egi_dim_divide(in->dims, rounded, egi_dim_constant(in->dims, n));
  egi_dim front = egi_dim_multiply(in->dims, piece, egi_dim_constant(in->dims, n - 1));
  egi_dim last = egi_dim_subtract(in->dims, dim, front);
  EG_TRY(egi_dims_status(in->dims));
  if (egi_dim_value(in->dims, dim, &dim_value) && egi_dim_value(in->dims, last, &piece_value) && piece_value < 0)
    return egi_shape_fail(in, "%lld elements do not give %lld pieces", (long long)dim_value, (long long)n);
  for (unsigned i = 0; i < n; i++) EG_TRY(set_piece(in, i, axis, i + 1 < n ? piece : last));
  return EG_OK;
}

eg_status egi_shape_split(egi_inference *in) {
  int axis;
  EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", 0), egi_shape_input(in, 0)->rank, &axis));
  return egi_shape_input(in, 1) != NULL ? split_as_given(in, axis) : split_evenly(in, axis);
}
