/* Shape rules: Conv (operator version 22) with its gradient, and Dropout (22). */
#include "graph/shapes.h"

#include <string.h>

static int64_t listed(const egi_inference *in, const char *name, int index, int64_t otherwise) {
  uint32_t count = 0;
  const int64_t *list = egi_node_ints(in->node, name, &count);
  return list != NULL && index >= 0 && (uint32_t)index < count ? list[index] : otherwise;
}

/* Size of spatial axis i of the result. */
static eg_status result_size(const egi_inference *in, int i, egi_dim *out_size) {
  const egi_value *x = egi_shape_input(in, 0), *w = egi_shape_input(in, 1);
  egi_dims *dims = in->dims;
  const char *mode = egi_node_string(in->node, "auto_pad", "NOTSET");
  int64_t stride = listed(in, "strides", i, 1), dilation = listed(in, "dilations", i, 1);
  int64_t before = listed(in, "pads", i, 0), after = listed(in, "pads", i + x->rank - 2, 0);
  egi_dim size = egi_dim_resolve(dims, x->dims[i + 2]), one = egi_dim_constant(dims, 1);
  if (stride < 1 || dilation < 1 || before < 0 || after < 0)
    return egi_shape_fail(in, "strides and dilations must be at least 1, pads at least 0");
  if (strncmp(mode, "SAME", 4) == 0) {
    *out_size = egi_dim_divide(dims, egi_dim_add(dims, size, egi_dim_constant(dims, stride - 1)),
                               egi_dim_constant(dims, stride));
    return EG_OK;
  }
  if (strcmp(mode, "VALID") == 0) before = after = 0;
  egi_dim reach = egi_dim_multiply(dims, egi_dim_constant(dims, dilation),
                                   egi_dim_subtract(dims, egi_dim_resolve(dims, w->dims[i + 2]), one));
  egi_dim room = egi_dim_subtract(dims, egi_dim_add(dims, size, egi_dim_constant(dims, before + after)), reach);
  room = egi_dim_divide(dims, egi_dim_subtract(dims, room, one), egi_dim_constant(dims, stride));
  *out_size = egi_dim_add(dims, room, one);
  return EG_OK;
}

static eg_status check_operands(const egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *w = egi_shape_input(in, 1);
  int64_t group = egi_node_int(in->node, "group", 1), channels, filters;
  if (x->rank < 3 || x->rank > 5) return egi_shape_fail(in, "1 to 3 spatial axes are supported");
  EG_TRY(egi_shape_check_input_rank(in, 1, x->rank));
  EG_TRY(egi_shape_check_type(in, 1, x->dtype));
  if (group < 1) return egi_shape_fail(in, "group = %lld", (long long)group);
  egi_dim all = egi_dim_multiply(in->dims, egi_dim_constant(in->dims, group), egi_dim_resolve(in->dims, w->dims[1]));
  EG_TRY(egi_shape_equal(in, "the channels", x->dims[1], all, NULL));
  if (egi_dim_value(in->dims, egi_dim_resolve(in->dims, w->dims[0]), &filters) && filters % group != 0)
    return egi_shape_fail(in, "%lld filters in %lld groups", (long long)filters, (long long)group);
  if (egi_dim_value(in->dims, egi_dim_resolve(in->dims, x->dims[1]), &channels) && channels % group != 0)
    return egi_shape_fail(in, "%lld channels in %lld groups", (long long)channels, (long long)group);
  for (int i = 0; i < x->rank - 2; i++) {
    int64_t wanted = listed(in, "kernel_shape", i, -1);
    if (wanted >= 0)
      EG_TRY(egi_shape_equal(in, "kernel_shape", w->dims[i + 2], egi_dim_constant(in->dims, wanted), NULL));
  }
  return EG_OK;
}

static eg_status result_dims(const egi_inference *in, egi_dim *dims) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t size;
  dims[0] = x->dims[0];
  dims[1] = egi_shape_input(in, 1)->dims[0];
  for (int i = 0; i < x->rank - 2; i++) {
    EG_TRY(result_size(in, i, &dims[i + 2]));
    if (egi_dim_value(in->dims, dims[i + 2], &size) && size < 0)
      return egi_shape_fail(in, "the kernel is larger than its input at axis %d", i + 2);
  }
  return EG_OK;
}

/* X [batch, channels, size..], W [filters, channels / group, kernel..], B [filters]? */
eg_status egi_shape_conv(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *bias = egi_shape_input(in, 2);
  egi_dim dims[EGI_MAX_RANK];
  EG_TRY(check_operands(in));
  if (bias != NULL) {
    EG_TRY(egi_shape_check_type(in, 2, x->dtype));
    EG_TRY(egi_shape_check_input_rank(in, 2, 1));
    EG_TRY(egi_shape_equal(in, "the bias", bias->dims[0], egi_shape_input(in, 1)->dims[0], NULL));
  }
  EG_TRY(result_dims(in, dims));
  return egi_shape_set(in, 0, x->dtype, x->rank, dims);
}

/* X, W, dY -> dX, dW, dB */
eg_status egi_shape_conv_grad(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *w = egi_shape_input(in, 1), *dy = egi_shape_input(in, 2);
  egi_dim dims[EGI_MAX_RANK];
  EG_TRY(check_operands(in));
  EG_TRY(egi_shape_check_type(in, 2, x->dtype));
  EG_TRY(egi_shape_check_input_rank(in, 2, x->rank));
  EG_TRY(result_dims(in, dims));
  for (int i = 0; i < x->rank; i++) EG_TRY(egi_shape_equal(in, "the gradient's shape", dims[i], dy->dims[i], NULL));
  EG_TRY(egi_shape_set_like(in, 0, x));
  EG_TRY(egi_shape_set_like(in, 1, w));
  return egi_shape_set(in, 2, x->dtype, 1, &w->dims[0]);
}

eg_status egi_shape_dropout(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  EG_TRY(egi_shape_check_type(in, 2, EG_DTYPE_BOOL));
  EG_TRY(egi_shape_set_like(in, 0, x));
  return egi_shape_set(in, 1, EG_DTYPE_BOOL, x->rank, x->dims);
}
