/* Conformance cases of Clip and Cast. */
#include "support_ops.h"

#include <math.h>

/* Shapes around what kernels cut at: blocks of 256, tasks of 16384 elements. */
static const struct {
  int rank;
  int64_t dims[4];
} shapes[] = {{1, {0}},       {0, {0}},    {1, {1}},           {1, {7}},          {1, {255}},  {1, {257}},
              {3, {2, 0, 3}}, {2, {3, 5}}, {4, {2, 3, 1, 17}}, {3, {3, 129, 43}}, {1, {16385}}};

static const eg_dtype all_types[] = {EG_DTYPE_F32, EG_DTYPE_F16, EG_DTYPE_BF16, EG_DTYPE_F64, EG_DTYPE_I64,
                                     EG_DTYPE_I32, EG_DTYPE_I16, EG_DTYPE_I8,   EG_DTYPE_U64, EG_DTYPE_U32,
                                     EG_DTYPE_U16, EG_DTYPE_U8,  EG_DTYPE_BOOL};

static bool is_signed(eg_dtype dtype) {
  return egi_dtype_kind(dtype) == EGI_CLASS_INTEGER;
}
static bool is_integer(eg_dtype dtype) {
  return is_signed(dtype) || egi_dtype_kind(dtype) == EGI_CLASS_UNSIGNED;
}

/* ---- Clip ------------------------------------------------------------------------------------------------------ */

static void check_clip(void **state, eg_dtype dtype, size_t shape, unsigned bounds) {
  ops_case c;
  ops_begin(&c, state, EGI_OP_Clip, dtype);
  double low = 3.0, high = bounds == 7 ? 2.0 : 6.0; /* low above high: high wins */
  ops_tensor *in = ops_add_input(&c, dtype, shapes[shape].rank, shapes[shape].dims);
  ops_fill_uniform(in, egi_dtype_kind(dtype) == EGI_CLASS_UNSIGNED ? 0.0 : -9.0, 9.0, 5);
  ops_fill_special(in);
  if (bounds & 1) {
    ops_add_input(&c, dtype, 0, NULL)->values[0] = low;
  } else if (bounds & 2) {
    ops_add_absent(&c);
  }
  if (bounds & 2) ops_add_input(&c, dtype, 0, NULL)->values[0] = high;
  ops_tensor *out = ops_add_output(&c, dtype, shapes[shape].rank, shapes[shape].dims);
  for (int64_t i = 0; i < ops_count(out); i++) {
    double x = in->values[i];
    if ((bounds & 1) && x < low) x = low;
    if ((bounds & 2) && x > high) x = high;
    out->values[i] = x;
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_clip(void **state, egi_op op) {
  (void)op;
  for (size_t t = 0; t < EGI_COUNT(all_types); t++) {
    for (size_t s = 0; all_types[t] != EG_DTYPE_BOOL && s < EGI_COUNT(shapes); s++) {
      for (unsigned bounds = 0; bounds <= 3; bounds++) check_clip(state, all_types[t], s, bounds);
      check_clip(state, all_types[t], s, 7);
    }
  }
}

/* ---- Cast ----------------------------------------------------------------------------------------------------- */

static double reference_cast(eg_dtype to, double x) {
  if (to == EG_DTYPE_BOOL) return x != 0.0; /* NaN too */
  if (!is_integer(to)) return x;
  unsigned bits = egi_dtype_bits(to);
  double low = is_signed(to) ? -ldexp(1.0, (int)bits - 1) : 0.0;
  double high = ldexp(1.0, is_signed(to) ? (int)bits - 1 : (int)bits) - 1.0;
  if (isnan(x)) return 0.0;
  return x < low ? low : x > high ? high : trunc(x);
}

/* Numbers that both types have, and halves between them. */
static void check_cast(void **state, egi_op op, eg_dtype to, eg_dtype from, size_t shape) {
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_BOOL);
  ops_tensor *in = ops_add_input(&c, from, shapes[shape].rank, shapes[shape].dims);
  ops_tensor *out = ops_add_output(&c, to, shapes[shape].rank, shapes[shape].dims);
  if (op == EGI_OP_Cast) ops_add_attribute(&c, egi_attribute_int("to", to));
  if (op == EGI_OP_CastLike) ops_add_input(&c, to, 0, NULL);
  bool is_unsigned = egi_dtype_kind(to) == EGI_CLASS_UNSIGNED || egi_dtype_kind(from) == EGI_CLASS_UNSIGNED;
  ops_fill_uniform(in, is_unsigned || from == EG_DTYPE_BOOL ? 0.0 : -120.0, from == EG_DTYPE_BOOL ? 1.0 : 120.0, 3);
  bool is_wide = is_integer(to) && egi_dtype_bits(to) == 64; /* 2^63 - 1 is no double */
  if (egi_dtype_is_float(from) && !is_wide) ops_fill_special(in);
  for (int64_t i = 0; i < ops_count(in); i++) {
    out->values[i] = reference_cast(to, in->values[i]);
    if (egi_dtype_is_float(to)) out->values[i] = ops_round(to, out->values[i]);
  }
  /* The harness rounds doubles to halves by way of f32: once too often. */
  if (from == EG_DTYPE_F64 && (to == EG_DTYPE_F16 || to == EG_DTYPE_BF16)) c.relative = 0x1p-8;
  ops_check(&c);
  ops_end(&c);
}

/* The one rounding of f64 to f16: 1 + 2^-11 + 2^-40 lies above the middle of two halves, its nearest float on it. */
static void check_single_rounding(void **state) {
  static const int64_t dims[1] = {4};
  static const double in_values[] = {1.0 + 0x1p-11 + 0x1p-40, 1.0 + 0x1p-11 - 0x1p-40, 65519.99999, 1e-320};
  static const double out_values[] = {1.0 + 0x1p-10, 1.0, 65504.0, 0.0};
  ops_case c;
  ops_begin(&c, state, EGI_OP_Cast, EG_DTYPE_BOOL);
  ops_tensor *in = ops_add_input(&c, EG_DTYPE_F64, 1, dims);
  ops_tensor *out = ops_add_output(&c, EG_DTYPE_F16, 1, dims);
  memcpy(in->values, in_values, sizeof in_values);
  memcpy(out->values, out_values, sizeof out_values);
  ops_add_attribute(&c, egi_attribute_int("to", EG_DTYPE_F16));
  ops_check(&c);
  ops_end(&c);
}

/* Integers keep their low bits. */
static void check_wrapping(void **state) {
  static const int64_t dims[1] = {4};
  static const double in_values[] = {257.0, -1.0, 65536.0, -129.0};
  static const double out_values[] = {1.0, 255.0, 0.0, 127.0};
  ops_case c;
  ops_begin(&c, state, EGI_OP_Cast, EG_DTYPE_BOOL);
  ops_tensor *in = ops_add_input(&c, EG_DTYPE_I64, 1, dims);
  ops_tensor *out = ops_add_output(&c, EG_DTYPE_U8, 1, dims);
  memcpy(in->values, in_values, sizeof in_values);
  memcpy(out->values, out_values, sizeof out_values);
  ops_add_attribute(&c, egi_attribute_int("to", EG_DTYPE_U8));
  ops_check(&c);
  ops_end(&c);
}

void ops_case_cast(void **state, egi_op op) {
  static const size_t some_shapes[] = {0, 1, 5, 8, 10};
  for (size_t i = 0; i < EGI_COUNT(all_types); i++) {
    for (size_t k = 0; k < EGI_COUNT(all_types); k++) {
      for (size_t s = 0; s < EGI_COUNT(some_shapes); s++)
        check_cast(state, op, all_types[i], all_types[k], some_shapes[s]);
    }
  }
  if (op != EGI_OP_Cast) return;
  check_single_rounding(state);
  check_wrapping(state);
}
