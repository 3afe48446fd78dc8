/* Conformance cases of QuantizeLinear and DequantizeLinear: against the formula in doubles. */
#include "support_ops.h"

#include <math.h>

/* Which scale an element of [outer, axis, inner] has. */
static int64_t scale_of(const int64_t dims[3], int64_t block, bool is_single, int64_t at) {
  int64_t inner = at % dims[2], axis = at / dims[2] % dims[1], outer = at / dims[2] / dims[1];
  if (is_single) return 0;
  if (block == 0) return axis;
  return (outer * ((dims[1] + block - 1) / block) + axis / block) * dims[2] + inner;
}

static void add_scales(ops_case *c, const int64_t dims[3], int64_t block, bool is_single, eg_dtype zero_type) {
  const int64_t blocked[3] = {dims[0], block > 0 ? (dims[1] + block - 1) / block : 0, dims[2]};
  const int64_t *shape = block > 0 ? blocked : &dims[1];
  int rank = is_single ? 0 : block > 0 ? 3 : 1;
  ops_tensor *scale = ops_add_input(c, EG_DTYPE_F32, rank, shape);
  ops_fill_uniform(scale, 0.01, 0.5, 11);
  ops_tensor *zero = ops_add_input(c, zero_type, rank, shape);
  ops_fill_uniform(zero, 0.0, 5.0, 12);
  ops_add_attribute(c, egi_attribute_int("axis", 1));
  if (block > 0) ops_add_attribute(c, egi_attribute_int("block_size", block));
}

static void check_dequantize(void **state, eg_dtype dtype, const int64_t dims[3], int64_t block, bool is_single) {
  ops_case c;
  ops_begin(&c, state, EGI_OP_DequantizeLinear, EG_DTYPE_F32);
  ops_tensor *x = ops_add_input(&c, dtype, 3, dims);
  ops_fill_uniform(x, dtype == EG_DTYPE_U8 || dtype == EG_DTYPE_U16 ? 0.0 : -100.0, 100.0, 3);
  add_scales(&c, dims, block, is_single, dtype);
  ops_tensor *y = ops_add_output(&c, EG_DTYPE_F32, 3, dims);
  for (int64_t i = 0; i < ops_count(y); i++) {
    int64_t from = scale_of(dims, block, is_single, i);
    y->values[i] = (x->values[i] - c.inputs[2].values[from]) * c.inputs[1].values[from];
  }
  ops_check(&c);
  ops_end(&c);
}

static void check_quantize(void **state, eg_dtype dtype, const int64_t dims[3], int64_t block, bool is_single) {
  ops_case c;
  ops_begin(&c, state, EGI_OP_QuantizeLinear, EG_DTYPE_BOOL);
  ops_tensor *x = ops_add_input(&c, EG_DTYPE_F32, 3, dims);
  ops_fill_uniform(x, -20.0, 20.0, 4);
  add_scales(&c, dims, block, is_single, dtype);
  ops_tensor *y = ops_add_output(&c, dtype, 3, dims);
  for (int64_t i = 0; i < ops_count(y); i++) {
    int64_t from = scale_of(dims, block, is_single, i);
    float quotient = (float)x->values[i] / (float)c.inputs[1].values[from];
    double q = nearbyint((double)quotient) + c.inputs[2].values[from];
    double low = dtype == EG_DTYPE_I8 ? -128.0 : dtype == EG_DTYPE_I16 ? -32768.0 : 0.0;
    double high = dtype == EG_DTYPE_I8    ? 127.0
                  : dtype == EG_DTYPE_I16 ? 32767.0
                  : dtype == EG_DTYPE_U8  ? 255.0
                                          : 65535.0;
    y->values[i] = fmin(fmax(q, low), high);
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_quantize(void **state, egi_op op) {
  static const eg_dtype types[] = {EG_DTYPE_U8, EG_DTYPE_I8, EG_DTYPE_U16, EG_DTYPE_I16};
  static const int64_t shapes[][3] = {{1, 1, 1}, {2, 5, 3}, {0, 4, 2}, {3, 7, 1}, {2, 65, 129}};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (size_t s = 0; s < EGI_COUNT(shapes); s++) {
      for (int64_t block = 0; block <= 2; block += 2) {
        if (op == EGI_OP_QuantizeLinear) check_quantize(state, types[t], shapes[s], block, false);
        if (op == EGI_OP_DequantizeLinear) check_dequantize(state, types[t], shapes[s], block, false);
      }
      if (op == EGI_OP_QuantizeLinear) check_quantize(state, types[t], shapes[s], 0, true);
      if (op == EGI_OP_DequantizeLinear) check_dequantize(state, types[t], shapes[s], 0, true);
    }
  }
}
