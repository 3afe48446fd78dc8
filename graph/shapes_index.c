/* Shape rules: reductions and indexing. */
#include "graph/shapes.h"

/* ---- reductions ----------------------------------------------------------------------------------------------- */

/* Axes as a mask; *out_is_known is false when they are computed by the graph. */
static eg_status reduced_axes(const egi_inference *in, uint32_t *out_mask, bool *out_is_known) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t axes[EGI_MAX_RANK];
  uint32_t count = 0;
  *out_is_known = true;
  if (egi_shape_input(in, 1) != NULL) {
    EG_TRY(egi_shape_check_input_rank(in, 1, 1));
    *out_is_known = egi_shape_integers(in, 1, axes, EGI_MAX_RANK, &count);
    if (!*out_is_known) return EG_OK;
  }
  if (count > 0) return egi_shape_axes(in, axes, count, x->rank, out_mask);
  *out_mask = egi_node_int(in->node, "noop_with_empty_axes", 0) != 0 ? 0 : (1u << x->rank) - 1;
  return EG_OK;
}

eg_status egi_shape_reduce(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  bool keeps_dims = egi_node_int(in->node, "keepdims", 1) != 0, is_known;
  egi_dim dims[EGI_MAX_RANK];
  uint32_t mask = 0;
  int64_t length;
  int rank = 0;
  EG_TRY(reduced_axes(in, &mask, &is_known));
  if (!is_known && keeps_dims) return egi_shape_set_unknown(in, 0, x->dtype, x->rank);
  if (!is_known) {
    if (!egi_shape_length(in, 1, &length) || length < 1 || length > x->rank) return EG_OK; /* open until it runs */
    return egi_shape_set_unknown(in, 0, x->dtype, (int)(x->rank - length));
  }
  for (int i = 0; i < x->rank; i++) {
    bool is_reduced = (mask >> i & 1u) != 0;
    if (!is_reduced)
      dims[rank++] = x->dims[i];
    else if (keeps_dims)
      dims[rank++] = egi_dim_constant(in->dims, 1);
  }
  return egi_shape_set(in, 0, x->dtype, rank, dims);
}

/* ---- indexing ------------------------------------------------------------------------------------------------- */

eg_status egi_shape_gather(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *index = egi_shape_input(in, 1);
  egi_dim dims[EGI_MAX_RANK];
  int axis, rank = 0;
  EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", 0), x->rank, &axis));
  EG_TRY(egi_shape_check_rank(in, x->rank - 1 + index->rank));
  for (int i = 0; i < axis; i++) dims[rank++] = x->dims[i];
  for (int i = 0; i < index->rank; i++) dims[rank++] = index->dims[i];
  for (int i = axis + 1; i < x->rank; i++) dims[rank++] = x->dims[i];
  return egi_shape_set(in, 0, x->dtype, rank, dims);
}

eg_status egi_shape_gather_elements(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *index = egi_shape_input(in, 1);
  int axis;
  EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", 0), x->rank, &axis));
  EG_TRY(egi_shape_check_input_rank(in, 1, x->rank));
  return egi_shape_set(in, 0, x->dtype, index->rank, index->dims);
}

/* data, indices [batch.., rest.., k] -> [batch.., rest.., data dims after the first batch + k] */
eg_status egi_shape_gather_nd(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *index = egi_shape_input(in, 1);
  int64_t batch = egi_node_int(in->node, "batch_dims", 0), k;
  egi_dim dims[EGI_MAX_RANK];
  int rank = 0;
  if (index->rank < 1 || batch < 0 || batch >= index->rank || batch > x->rank)
    return egi_shape_fail(in, "batch_dims = %lld does not fit", (long long)batch);
  if (!egi_dim_value(in->dims, egi_dim_resolve(in->dims, index->dims[index->rank - 1]), &k))
    return EG_OK; /* open until it runs */
  if (k < 1 || k > x->rank - batch) return egi_shape_fail(in, "indices of %lld axes", (long long)k);
  int64_t result_rank = index->rank - 1 + x->rank - batch - k;
  EG_TRY(egi_shape_check_rank(in, result_rank));
  for (int i = 0; i < index->rank - 1; i++) dims[rank++] = index->dims[i];
  for (int i = 0; i < batch; i++) EG_TRY(egi_shape_equal(in, "batch dims", x->dims[i], index->dims[i], &dims[i]));
  for (int i = (int)(batch + k); i < x->rank; i++) dims[rank++] = x->dims[i];
  return egi_shape_set(in, 0, x->dtype, rank, dims);
}
