/* Shape rules: operators that make, join, cut and re-shape tensors, without looking at their numbers. */
#include "graph/shapes.h"

static eg_status fail_sizes_unknown(const egi_inference *in, unsigned index) {
  return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED,
                       "input %u decides the number of dimensions and is not known before the graph runs", index);
}

/* ---- constants ------------------------------------------------------------------------------------------------ */

eg_status egi_shape_constant(egi_inference *in) {
  static const struct {
    const char *name;
    eg_dtype dtype;
    int rank;
  } forms[] = {{"value_float", EG_DTYPE_F32, 0},     {"value_floats", EG_DTYPE_F32, 1},
               {"value_int", EG_DTYPE_I64, 0},       {"value_ints", EG_DTYPE_I64, 1},
               {"value_string", EG_DTYPE_STRING, 0}, {"value_strings", EG_DTYPE_STRING, 1}};
  egi_dim dims[EGI_MAX_RANK] = {EGI_DIM_NONE};
  const egi_attribute *value = egi_node_attribute(in->node, "value");
  if (value != NULL && value->kind == EGI_ATTRIBUTE_TENSOR) {
    const egi_weight *weight = &in->graph->module->weights[value->u.weight];
    for (int i = 0; i < weight->rank; i++) dims[i] = egi_dim_constant(in->dims, weight->dims[i]);
    return egi_shape_set(in, 0, weight->dtype, weight->rank, dims);
  }
  for (size_t i = 0; i < EGI_COUNT(forms); i++) {
    const egi_attribute *attribute = egi_node_attribute(in->node, forms[i].name);
    if (attribute == NULL) continue;
    dims[0] = egi_dim_constant(in->dims, attribute->count);
    return egi_shape_set(in, 0, forms[i].dtype, forms[i].rank, dims);
  }
  return egi_fail_node(in->graph, in->id, EG_ERROR_FORMAT, "a constant without a value");
}

eg_status egi_shape_constant_of_shape(egi_inference *in) {
  const egi_attribute *value = egi_node_attribute(in->node, "value");
  eg_dtype dtype = EG_DTYPE_F32;
  egi_dim dims[EGI_MAX_RANK] = {EGI_DIM_NONE};
  uint32_t count = 0;
  int64_t length;
  if (value != NULL && value->kind == EGI_ATTRIBUTE_TENSOR) dtype = in->graph->module->weights[value->u.weight].dtype;
  EG_TRY(egi_shape_check_input_rank(in, 0, 1));
  if (!egi_shape_length(in, 0, &length)) return fail_sizes_unknown(in, 0);
  EG_TRY(egi_shape_check_rank(in, length));
  const egi_dim *elements = egi_shape_elements(in, 0, &count);
  for (uint32_t i = 0; elements != NULL && i < count; i++) {
    int64_t number;
    if (egi_dim_value(in->dims, elements[i], &number) && number < 0)
      return egi_shape_fail(in, "a negative size: %lld", (long long)number);
    dims[i] = elements[i];
  }
  return egi_shape_set(in, 0, dtype, (int)length, dims);
}

egi_dim egi_shape_range_length(const egi_inference *in, egi_dim start, egi_dim limit, egi_dim delta) {
  egi_dims *dims = in->dims;
  int64_t step;
  if (!egi_dim_value(dims, delta, &step) || step == 0 || step == INT64_MIN) return EGI_DIM_NONE;
  egi_dim distance = step > 0 ? egi_dim_subtract(dims, limit, start) : egi_dim_subtract(dims, start, limit);
  int64_t size = step > 0 ? step : -step;
  egi_dim rounded = egi_dim_add(dims, distance, egi_dim_constant(dims, size - 1));
  egi_dim length = egi_dim_divide(dims, rounded, egi_dim_constant(dims, size));
  return egi_dim_maximum(dims, length, egi_dim_constant(dims, 0));
}

/* The single element of an input; NONE when unknown. */
static egi_dim single(const egi_inference *in, unsigned index) {
  uint32_t count;
  const egi_dim *elements = egi_shape_elements(in, index, &count);
  return elements != NULL && count == 1 ? egi_dim_resolve(in->dims, elements[0]) : EGI_DIM_NONE;
}

/* Constants of a floating type: max(0, ceil((limit - start) / delta)), as operator Range says. */
static egi_dim float_range_length(const egi_inference *in) {
  double start, limit, delta;
  if (!egi_value_scalar(in->graph, in->node->inputs[0], &start) ||
      !egi_value_scalar(in->graph, in->node->inputs[1], &limit) ||
      !egi_value_scalar(in->graph, in->node->inputs[2], &delta))
    return EGI_DIM_NONE;
  double length = (limit - start) / delta;
  if (!(length < 1e15)) return EGI_DIM_NONE;
  int64_t whole = length > 0 ? (int64_t)length : 0;
  return egi_dim_constant(in->dims, (double)whole < length ? whole + 1 : whole);
}

eg_status egi_shape_range(egi_inference *in) {
  eg_dtype dtype = egi_shape_input(in, 0)->dtype;
  egi_dim delta = single(in, 2);
  for (unsigned i = 0; i < 3; i++)
    if (egi_shape_input(in, i)->rank > 1) return egi_shape_fail(in, "input %u is not a single number", i);
  if (egi_shape_is_number(in, delta, 0)) return egi_shape_fail(in, "a step of 0");
  egi_dim length = egi_dtype_is_float(dtype) ? float_range_length(in)
                                             : egi_shape_range_length(in, single(in, 0), single(in, 1), delta);
  return egi_shape_set(in, 0, dtype, 1, &length);
}

/* ---- shapes as values ----------------------------------------------------------------------------------------- */

/* Attributes start and end: axes, clamped; see operator Shape. */
static void shape_range(const egi_inference *in, int rank, int *out_start, int *out_end) {
  int64_t start = egi_node_int(in->node, "start", 0), end = egi_node_int(in->node, "end", rank);
  if (start < 0) start += rank;
  if (end < 0) end += rank;
  start = start < 0 ? 0 : start > rank ? rank : start;
  end = end < start ? start : end > rank ? rank : end;
  *out_start = (int)start;
  *out_end = (int)end;
}

eg_status egi_shape_shape(egi_inference *in) {
  int start, end;
  shape_range(in, egi_shape_input(in, 0)->rank, &start, &end);
  egi_dim length = egi_dim_constant(in->dims, end - start);
  return egi_shape_set(in, 0, EG_DTYPE_I64, 1, &length);
}

eg_status egi_shape_size(egi_inference *in) {
  return egi_shape_set(in, 0, EG_DTYPE_I64, 0, NULL);
}

/* ---- joining and broadcasting --------------------------------------------------------------------------------- */

eg_status egi_shape_concat(egi_inference *in) {
  const egi_value *first = egi_shape_input(in, 0);
  const egi_attribute *attribute = egi_node_attribute(in->node, "axis");
  egi_dim dims[EGI_MAX_RANK];
  int axis;
  if (attribute == NULL || attribute->kind != EGI_ATTRIBUTE_INT)
    return egi_fail_node(in->graph, in->id, EG_ERROR_FORMAT, "the attribute axis is missing");
  EG_TRY(egi_shape_axis(in, attribute->u.i, first->rank, &axis));
  memcpy(dims, first->dims, sizeof dims);
  for (unsigned i = 1; i < in->node->n_inputs; i++) {
    const egi_value *value = egi_shape_input(in, i);
    EG_TRY(egi_shape_check_input_rank(in, i, first->rank));
    for (int k = 0; k < first->rank; k++) {
      if (k == axis)
        dims[k] = egi_dim_add(in->dims, dims[k], value->dims[k]);
      else
        EG_TRY(egi_shape_equal(in, "sizes beside the axis", dims[k], value->dims[k], &dims[k]));
    }
  }
  return egi_shape_set(in, 0, first->dtype, first->rank, dims);
}

eg_status egi_shape_expand(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_dim wanted[EGI_MAX_RANK] = {EGI_DIM_NONE}, dims[EGI_MAX_RANK];
  uint32_t count = 0;
  int64_t length;
  int rank = x->rank;
  EG_TRY(egi_shape_check_input_rank(in, 1, 1));
  if (!egi_shape_length(in, 1, &length)) return fail_sizes_unknown(in, 1);
  EG_TRY(egi_shape_check_rank(in, length));
  const egi_dim *elements = egi_shape_elements(in, 1, &count);
  for (int64_t i = 0; i < length; i++) {
    int64_t number;
    wanted[i] = elements != NULL ? elements[i] : EGI_DIM_NONE;
    if (egi_dim_value(in->dims, wanted[i], &number) && number < 0)
      return egi_shape_fail(in, "a negative size: %lld", (long long)number);
    if (wanted[i] == EGI_DIM_NONE) wanted[i] = egi_dim_fresh(in->dims, "size");
  }
  EG_TRY(egi_dims_status(in->dims));
  memcpy(dims, x->dims, sizeof dims);
  EG_TRY(egi_shape_broadcast_into(in, (int)length, wanted, &rank, dims));
  return egi_shape_set(in, 0, x->dtype, rank, dims);
}

/* ---- other shapes of the same elements ------------------------------------------------------------------------ */

eg_status egi_shape_flatten(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t axis = egi_node_int(in->node, "axis", 1);
  if (axis < -x->rank || axis > x->rank)
    return egi_shape_fail(in, "axis %lld is outside of %d dimensions", (long long)axis, x->rank);
  int cut = (int)(axis < 0 ? axis + x->rank : axis);
  const egi_dim dims[2] = {egi_shape_product(in, x->dims, 0, cut), egi_shape_product(in, x->dims, cut, x->rank)};
  return egi_shape_set(in, 0, x->dtype, 2, dims);
}

eg_status egi_shape_transpose(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_dim dims[EGI_MAX_RANK];
  uint32_t count, mask;
  const int64_t *permutation = egi_node_ints(in->node, "perm", &count);
  if (permutation == NULL) {
    for (int i = 0; i < x->rank; i++) dims[i] = x->dims[x->rank - 1 - i];
    return egi_shape_set(in, 0, x->dtype, x->rank, dims);
  }
  if (count != (uint32_t)x->rank) return egi_shape_fail(in, "perm has %u entries for %d dimensions", count, x->rank);
  EG_TRY(egi_shape_axes(in, permutation, count, x->rank, &mask));
  for (int i = 0; i < x->rank; i++) dims[i] = x->dims[permutation[i] < 0 ? permutation[i] + x->rank : permutation[i]];
  return egi_shape_set(in, 0, x->dtype, x->rank, dims);
}

/* With axes that are not known before the graph runs only their number counts. */
static eg_status squeeze_unknown(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t length;
  if (!egi_shape_length(in, 1, &length) || length > x->rank) return fail_sizes_unknown(in, 1);
  return egi_shape_set_unknown(in, 0, x->dtype, (int)(x->rank - length));
}

eg_status egi_shape_squeeze(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t axes[EGI_MAX_RANK];
  egi_dim dims[EGI_MAX_RANK];
  uint32_t count, mask = 0;
  int rank = 0;
  bool has_axes = egi_shape_input(in, 1) != NULL;
  if (has_axes) {
    if (!egi_shape_integers(in, 1, axes, EGI_MAX_RANK, &count)) return squeeze_unknown(in);
    EG_TRY(egi_shape_axes(in, axes, count, x->rank, &mask));
  }
  egi_dim one = egi_dim_constant(in->dims, 1);
  for (int i = 0; i < x->rank; i++) {
    bool is_squeezed = has_axes ? (mask >> i & 1u) != 0 : egi_dim_resolve(in->dims, x->dims[i]) == one;
    if (is_squeezed)
      EG_TRY(egi_shape_equal(in, "a dim that is squeezed", x->dims[i], one, NULL));
    else
      dims[rank++] = x->dims[i];
  }
  return egi_shape_set(in, 0, x->dtype, rank, dims);
}

eg_status egi_shape_unsqueeze(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t axes[EGI_MAX_RANK], length;
  egi_dim dims[EGI_MAX_RANK];
  uint32_t count, mask;
  if (!egi_shape_integers(in, 1, axes, EGI_MAX_RANK, &count)) {
    if (!egi_shape_length(in, 1, &length)) return fail_sizes_unknown(in, 1);
    EG_TRY(egi_shape_check_rank(in, x->rank + length));
    return egi_shape_set_unknown(in, 0, x->dtype, (int)(x->rank + length));
  }
  int rank = x->rank + (int)count, next = 0;
  EG_TRY(egi_shape_check_rank(in, rank));
  EG_TRY(egi_shape_axes(in, axes, count, rank, &mask));
  for (int i = 0; i < rank; i++) dims[i] = (mask >> i & 1u) != 0 ? egi_dim_constant(in->dims, 1) : x->dims[next++];
  return egi_shape_set(in, 0, x->dtype, rank, dims);
}
