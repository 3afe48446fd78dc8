/* Shape rules of operators whose results depend on data: sizes stay unknown until the graph runs eagerly, or a pass
 * replaces the node. */
#include "graph/shapes.h"

/* If, Loop and Scan: results are what their bodies give; until these are inlined, what the file declares. */
eg_status egi_shape_control_flow(egi_inference *in) {
  static const char *const names[] = {"then_branch", "else_branch", "body"};
  unsigned n_bodies = in->node->op == EGI_OP_If ? 2 : 1, first = in->node->op == EGI_OP_If ? 0 : 2;
  for (unsigned i = 0; i < n_bodies; i++) {
    const egi_attribute *body = egi_node_attribute(in->node, names[first + i]);
    if (body == NULL || body->kind != EGI_ATTRIBUTE_GRAPH)
      return egi_shape_fail(in, "its attribute %s is missing", names[first + i]);
  }
  return EG_OK;
}

/* X [r] -> i64 [rank, ?] */
eg_status egi_shape_nonzero(egi_inference *in) {
  const egi_dim dims[2] = {egi_dim_constant(in->dims, egi_shape_input(in, 0)->rank), EGI_DIM_NONE};
  return egi_shape_set(in, 0, EG_DTYPE_I64, 2, dims);
}

/* X, condition bool [n] -> X with fewer elements along the axis, or flat */
eg_status egi_shape_compress(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_dim dims[EGI_MAX_RANK] = {EGI_DIM_NONE};
  int axis = 0;
  EG_TRY(egi_shape_check_type(in, 1, EG_DTYPE_BOOL));
  EG_TRY(egi_shape_check_input_rank(in, 1, 1));
  if (egi_node_attribute(in->node, "axis") == NULL) return egi_shape_set(in, 0, x->dtype, 1, dims);
  EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", 0), x->rank, &axis));
  for (int i = 0; i < x->rank; i++) dims[i] = i == axis ? EGI_DIM_NONE : x->dims[i];
  return egi_shape_set(in, 0, x->dtype, x->rank, dims);
}

/* X -> Y, indices, inverse_indices, counts */
eg_status egi_shape_unique(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_dim dims[EGI_MAX_RANK] = {EGI_DIM_NONE}, found, inverse;
  int axis = 0;
  bool has_axis = egi_node_attribute(in->node, "axis") != NULL;
  if (has_axis) EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", 0), x->rank, &axis));
  found = egi_dim_fresh(in->dims, "unique");
  for (int i = 0; i < x->rank && has_axis; i++) dims[i] = x->dims[i];
  dims[axis] = found;
  inverse = has_axis ? x->dims[axis] : egi_shape_product(in, x->dims, 0, x->rank);
  EG_TRY(egi_shape_set(in, 0, x->dtype, has_axis ? x->rank : 1, dims));
  EG_TRY(egi_shape_set(in, 1, EG_DTYPE_I64, 1, &found));
  EG_TRY(egi_shape_set(in, 2, EG_DTYPE_I64, 1, &inverse));
  return egi_shape_set(in, 3, EG_DTYPE_I64, 1, &found);
}
