/* Shape rules: operators that pick, pad, repeat and place elements along an axis. */
#include "graph/shapes.h"

eg_status egi_shape_arg_extremum(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_dim dims[EGI_MAX_RANK];
  int axis, rank = 0;
  bool keeps_dims = egi_node_int(in->node, "keepdims", 1) != 0;
  EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", 0), x->rank, &axis));
  for (int i = 0; i < x->rank; i++)
    if (i != axis)
      dims[rank++] = x->dims[i];
    else if (keeps_dims)
      dims[rank++] = egi_dim_constant(in->dims, 1);
  return egi_shape_set(in, 0, EG_DTYPE_I64, rank, dims);
}

/* The single integer of an input of one element; NONE when unknown. */
static egi_dim single(const egi_inference *in, unsigned index) {
  uint32_t count;
  const egi_dim *elements = egi_shape_elements(in, index, &count);
  return elements != NULL && count == 1 ? egi_dim_resolve(in->dims, elements[0]) : EGI_DIM_NONE;
}

eg_status egi_shape_top_k(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_dim dims[EGI_MAX_RANK];
  int64_t k, size;
  int axis;
  EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", -1), x->rank, &axis));
  memcpy(dims, x->dims, sizeof dims);
  dims[axis] = single(in, 1);
  bool is_number = egi_dim_value(in->dims, dims[axis], &k);
  if (is_number && k < 0) return egi_shape_fail(in, "k is %lld", (long long)k);
  if (is_number && egi_dim_value(in->dims, x->dims[axis], &size) && k > size)
    return egi_shape_fail(in, "k is %lld, the axis has %lld elements", (long long)k, (long long)size);
  if (dims[axis] == EGI_DIM_NONE) dims[axis] = egi_dim_fresh(in->dims, "k"); /* the same for both results */
  EG_TRY(egi_shape_set(in, 0, x->dtype, x->rank, dims));
  return egi_shape_set(in, 1, EG_DTYPE_I64, x->rank, dims);
}

/* A depth of a floating type counts whole. */
static egi_dim one_hot_depth(const egi_inference *in) {
  double depth;
  egi_dim known = single(in, 1);
  if (known != EGI_DIM_NONE || !egi_value_scalar(in->graph, in->node->inputs[1], &depth)) return known;
  return depth >= 0 && depth < 1e15 ? egi_dim_constant(in->dims, (int64_t)depth) : EGI_DIM_NONE;
}

eg_status egi_shape_one_hot(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_dim dims[EGI_MAX_RANK];
  int axis, rank = x->rank + 1;
  EG_TRY(egi_shape_check_rank(in, rank));
  EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", -1), rank, &axis));
  EG_TRY(egi_shape_check_input_rank(in, 2, 1));
  for (int i = 0; i < rank; i++) dims[i] = i == axis ? one_hot_depth(in) : x->dims[i < axis ? i : i - 1];
  return egi_shape_set(in, 0, egi_shape_input(in, 2)->dtype, rank, dims);
}

eg_status egi_shape_eye_like(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t dtype = egi_node_int(in->node, "dtype", x->dtype);
  EG_TRY(egi_shape_check_input_rank(in, 0, 2));
  if (!egi_dtype_is_known(dtype))
    return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED, "dtype = %lld is not an element type",
                         (long long)dtype);
  return egi_shape_set(in, 0, (eg_dtype)dtype, 2, x->dims);
}

eg_status egi_shape_bit_cast(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t to = egi_node_int(in->node, "to", 0);
  if (!egi_dtype_is_known(to))
    return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED, "to = %lld is not an element type", (long long)to);
  if (egi_dtype_bits((eg_dtype)to) != egi_dtype_bits(x->dtype))
    return egi_shape_fail(in, "%s and %s differ in width", egi_dtype_name(x->dtype), egi_dtype_name((eg_dtype)to));
  return egi_shape_set(in, 0, (eg_dtype)to, x->rank, x->dims);
}

/* pads: [in front of each axis .., behind each axis ..], for all axes or those listed. */
eg_status egi_shape_pad(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t axes[EGI_MAX_RANK];
  egi_dim dims[EGI_MAX_RANK];
  uint32_t n_pads, n_axes = (uint32_t)x->rank, mask;
  EG_TRY(egi_shape_check_input_rank(in, 1, 1));
  for (int i = 0; i < EGI_MAX_RANK; i++) axes[i] = i;
  if (egi_shape_input(in, 3) != NULL && !egi_shape_integers(in, 3, axes, EGI_MAX_RANK, &n_axes))
    return egi_shape_set_unknown(in, 0, x->dtype, x->rank);
  EG_TRY(egi_shape_axes(in, axes, n_axes, x->rank, &mask));
  const egi_dim *pads = egi_shape_elements(in, 1, &n_pads);
  memcpy(dims, x->dims, sizeof dims);
  if (pads != NULL && n_pads != 2 * n_axes) return egi_shape_fail(in, "%u paddings for %u axes", n_pads, n_axes);
  for (uint32_t i = 0; i < n_axes; i++) {
    int64_t axis = axes[i] < 0 ? axes[i] + x->rank : axes[i], size;
    egi_dim around = pads == NULL ? EGI_DIM_NONE : egi_dim_add(in->dims, pads[i], pads[n_axes + i]);
    dims[axis] = egi_dim_add(in->dims, x->dims[axis], around);
    if (egi_dim_value(in->dims, dims[axis], &size) && size < 0)
      return egi_shape_fail(in, "axis %lld would have %lld elements", (long long)axis, (long long)size);
  }
  return egi_shape_set(in, 0, x->dtype, x->rank, dims);
}

eg_status egi_shape_tile(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_dim dims[EGI_MAX_RANK] = {EGI_DIM_NONE};
  uint32_t count;
  int64_t number;
  EG_TRY(egi_shape_check_input_rank(in, 1, 1));
  const egi_dim *repeats = egi_shape_elements(in, 1, &count);
  if (repeats != NULL && count != (uint32_t)x->rank)
    return egi_shape_fail(in, "%u repetitions for %d axes", count, x->rank);
  for (int i = 0; repeats != NULL && i < x->rank; i++) {
    if (egi_dim_value(in->dims, repeats[i], &number) && number < 0)
      return egi_shape_fail(in, "%lld repetitions", (long long)number);
    dims[i] = egi_dim_multiply(in->dims, x->dims[i], repeats[i]);
  }
  return egi_shape_set(in, 0, x->dtype, x->rank, dims);
}

eg_status egi_shape_reverse_sequence(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t time = egi_node_int(in->node, "time_axis", 0), batch = egi_node_int(in->node, "batch_axis", 1);
  if (x->rank < 2) return egi_shape_fail(in, "input 0 has %d dimensions; at least 2 are needed", x->rank);
  if (time < 0 || time > 1 || batch != 1 - time)
    return egi_shape_fail(in, "time axis %lld and batch axis %lld are not 0 and 1", (long long)time, (long long)batch);
  EG_TRY(egi_shape_check_input_rank(in, 1, 1));
  EG_TRY(egi_shape_equal(in, "lengths", x->dims[batch], egi_shape_input(in, 1)->dims[0], NULL));
  return egi_shape_set_like(in, 0, x);
}

/* Indices and updates have one shape, within data beside the axis. */
eg_status egi_shape_scatter_elements(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *index = egi_shape_input(in, 1), *updates = egi_shape_input(in, 2);
  int axis;
  EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", 0), x->rank, &axis));
  EG_TRY(egi_shape_check_input_rank(in, 1, x->rank));
  EG_TRY(egi_shape_check_input_rank(in, 2, x->rank));
  for (int i = 0; i < x->rank; i++) EG_TRY(egi_shape_equal(in, "updates", index->dims[i], updates->dims[i], NULL));
  return egi_shape_set_like(in, 0, x);
}
