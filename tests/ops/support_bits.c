/* Conformance cases of the operators on bits, and of IsInf. */
#include "support_ops.h"

#include <math.h>

static const eg_dtype types[] = {EG_DTYPE_U8, EG_DTYPE_U16, EG_DTYPE_U32, EG_DTYPE_U64,
                                 EG_DTYPE_I8, EG_DTYPE_I16, EG_DTYPE_I32, EG_DTYPE_I64};

static const struct {
  int rank_a, rank_b, rank;
  int64_t a[3], b[3], out[3];
} pairs[] = {{1, 1, 1, {0}, {0}, {0}},
             {0, 0, 0, {0}, {0}, {0}},
             {1, 1, 1, {257}, {257}, {257}},
             {2, 1, 2, {33, 19}, {19}, {33, 19}},
             {3, 2, 3, {2, 1, 3}, {4, 1}, {2, 4, 3}}};

static int64_t reference(egi_op op, int64_t x, int64_t y, bool is_left) {
  switch (op) {
  case EGI_OP_BitwiseAnd:
    return x & y;
  case EGI_OP_BitwiseOr:
    return x | y;
  case EGI_OP_BitwiseXor:
    return x ^ y;
  case EGI_OP_BitwiseNot:
    return -1 - x;
  default:
    return is_left ? x * (int64_t)ldexp(1.0, (int)y) : (int64_t)floor(ldexp((double)x, -(int)y));
  }
}

static void check(void **state, egi_op op, eg_dtype dtype, size_t p, bool is_left) {
  bool is_unary = op == EGI_OP_BitwiseNot, is_shift = op == EGI_OP_BitShift;
  bool is_signed = egi_dtype_kind(dtype) == EGI_CLASS_INTEGER;
  ops_case c;
  ops_begin(&c, state, op, dtype);
  ops_tensor *a =
      ops_add_input(&c, dtype, is_unary ? pairs[p].rank : pairs[p].rank_a, is_unary ? pairs[p].out : pairs[p].a);
  ops_tensor *b = is_unary ? NULL : ops_add_input(&c, dtype, pairs[p].rank_b, pairs[p].b);
  ops_tensor *out = ops_add_output(&c, dtype, pairs[p].rank, pairs[p].out);
  ops_fill_uniform(a, is_signed ? -100.0 : 0.0, 100.0, p + 1);
  if (b != NULL) ops_fill_uniform(b, is_signed ? -100.0 : 0.0, is_shift ? 9.0 : 100.0, p + 2);
  if (is_shift) ops_add_attribute(&c, egi_attribute_string("direction", is_left ? "LEFT" : "RIGHT"));
  unsigned bits = egi_dtype_bits(dtype);
  for (int64_t i = 0; i < ops_count(out); i++) {
    double x = a->values[ops_broadcast_index(a, out->rank, out->dims, i)];
    double y = b == NULL ? 0.0 : b->values[ops_broadcast_index(b, out->rank, out->dims, i)];
    double result = (double)reference(op, (int64_t)x, (int64_t)y, is_left);
    if (is_shift && is_left && bits < 64) result = fmod(result, ldexp(1.0, (int)bits));
    /* ~x of an unsigned type is 2^bits - 1 - x, no double for 64 bits: the harness compares doubles. */
    if (is_unary && !is_signed) result += ldexp(1.0, (int)bits);
    out->values[i] = result;
  }
  if (!(is_unary && dtype == EG_DTYPE_U64)) ops_check(&c);
  ops_end(&c);
}

void ops_case_bitwise(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    if (op == EGI_OP_BitShift && egi_dtype_kind(types[t]) != EGI_CLASS_UNSIGNED) continue;
    for (size_t p = 0; p < EGI_COUNT(pairs); p++) {
      check(state, op, types[t], p, true);
      check(state, op, types[t], p, false);
    }
  }
}

void ops_case_is_inf(void **state, egi_op op) {
  static const eg_dtype floats[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_F16, EG_DTYPE_BF16};
  for (size_t t = 0; t < EGI_COUNT(floats); t++) {
    for (unsigned signs = 0; signs < 4; signs++) {
      static const int64_t dims[2] = {3, 129};
      ops_case c;
      ops_begin(&c, state, op, floats[t]);
      ops_tensor *in = ops_add_input(&c, floats[t], 2, dims);
      ops_tensor *out = ops_add_output(&c, EG_DTYPE_BOOL, 2, dims);
      ops_fill_uniform(in, -9.0, 9.0, signs);
      ops_fill_special(in);
      ops_add_attribute(&c, egi_attribute_int("detect_positive", signs & 1));
      ops_add_attribute(&c, egi_attribute_int("detect_negative", signs >> 1));
      for (int64_t i = 0; i < ops_count(in); i++) {
        double x = in->values[i];
        out->values[i] = (x == HUGE_VAL && (signs & 1) != 0) || (x == -HUGE_VAL && signs >> 1 != 0);
      }
      ops_check(&c);
      ops_end(&c);
    }
  }
}
