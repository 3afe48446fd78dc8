/* Shape rules: QuantizeLinear and DequantizeLinear (operator version 25). */
#include "graph/shapes.h"

/* scale: one number, one for each index of the axis, or (block_size) one for each block along it. */
static eg_status check_scale(const egi_inference *in, unsigned index) {
  const egi_value *x = egi_shape_input(in, 0), *scale = egi_shape_input(in, index);
  int64_t block = egi_node_int(in->node, "block_size", 0);
  int axis = 0;
  if (scale == NULL) return EG_OK;
  if (block < 0) return egi_shape_fail(in, "block_size = %lld", (long long)block);
  if (block == 0 && scale->rank == 0) return EG_OK;
  if (block == 0 && scale->rank != 1) return egi_shape_fail(in, "input %u has %d dimensions", index, scale->rank);
  if (block == 0 && egi_shape_is_number(in, scale->dims[0], 1)) return EG_OK;
  EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", 1), x->rank, &axis));
  if (block == 0) return egi_shape_equal(in, "the scales", scale->dims[0], x->dims[axis], NULL);
  EG_TRY(egi_shape_check_input_rank(in, index, x->rank));
  for (int i = 0; i < x->rank; i++) {
    egi_dim wanted = egi_dim_resolve(in->dims, x->dims[i]);
    if (i == axis) wanted = egi_dim_add(in->dims, wanted, egi_dim_constant(in->dims, block - 1));
    if (i == axis) wanted = egi_dim_divide(in->dims, wanted, egi_dim_constant(in->dims, block));
    EG_TRY(egi_shape_equal(in, "the scales of blocks", scale->dims[i], wanted, NULL));
  }
  return EG_OK;
}

static eg_status check_scales(const egi_inference *in) {
  if (!egi_dtype_is_float(egi_shape_input(in, 1)->dtype)) return egi_shape_fail(in, "the scale is of no floating type");
  EG_TRY(check_scale(in, 1));
  return check_scale(in, 2);
}

static eg_status named_type(const egi_inference *in, eg_dtype otherwise, eg_dtype *out_dtype) {
  int64_t named = egi_node_int(in->node, "output_dtype", 0);
  if (named != 0 && !egi_dtype_is_known(named))
    return egi_shape_fail(in, "output_dtype = %lld is not an element type", (long long)named);
  *out_dtype = named != 0 ? (eg_dtype)named : otherwise;
  return EG_OK;
}

eg_status egi_shape_quantize(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *zero = egi_shape_input(in, 2);
  eg_dtype dtype = EG_DTYPE_UNDEFINED;
  EG_TRY(check_scales(in));
  EG_TRY(named_type(in, zero != NULL ? zero->dtype : EG_DTYPE_U8, &dtype));
  if (zero != NULL && zero->dtype != dtype) return egi_shape_fail(in, "the zero point is not of the result's type");
  return egi_shape_set(in, 0, dtype, x->rank, x->dims);
}

eg_status egi_shape_dequantize(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  eg_dtype dtype = EG_DTYPE_UNDEFINED;
  EG_TRY(check_scales(in));
  EG_TRY(egi_shape_check_type(in, 2, x->dtype));
  EG_TRY(named_type(in, egi_shape_input(in, 1)->dtype, &dtype));
  if (!egi_dtype_is_float(dtype)) return egi_shape_fail(in, "the result would be of no floating type");
  return egi_shape_set(in, 0, dtype, x->rank, x->dims);
}
