/* Conformance cases of the elementwise operators, each against a double reference. */
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

/* ---- one input ------------------------------------------------------------------------------------------------ */

static double reference_unary(egi_op op, double x, bool is_tanh) {
  switch (op) {
  case EGI_OP_Abs:
    return fabs(x);
  case EGI_OP_Acos:
    return acos(x);
  case EGI_OP_Acosh:
    return acosh(x);
  case EGI_OP_Asin:
    return asin(x);
  case EGI_OP_Asinh:
    return asinh(x);
  case EGI_OP_Atan:
    return atan(x);
  case EGI_OP_Atanh:
    return atanh(x);
  case EGI_OP_Cosh:
    return cosh(x);
  case EGI_OP_Sinh:
    return sinh(x);
  case EGI_OP_Tan:
    return tan(x);
  case EGI_OP_Ceil:
    return ceil(x);
  case EGI_OP_Cos:
    return cos(x);
  case EGI_OP_Erf:
    return erf(x);
  case EGI_OP_Exp:
    return exp(x);
  case EGI_OP_Floor:
    return floor(x);
  case EGI_OP_Gelu:
    if (is_tanh) return 0.5 * x * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
    return 0.5 * x * (1.0 + erf(x / sqrt(2.0)));
  case EGI_OP_Log:
    return log(x);
  case EGI_OP_Neg:
    return -x;
  case EGI_OP_Not:
    return x == 0.0;
  case EGI_OP_IsNaN:
    return isnan(x);
  case EGI_OP_Reciprocal:
    return 1.0 / x;
  case EGI_OP_Relu:
    return x < 0.0 ? 0.0 : x;
  case EGI_OP_Round:
    return rint(x);
  case EGI_OP_Sign:
    return isnan(x) ? x : (x > 0.0) - (x < 0.0);
  case EGI_OP_Sigmoid:
    return 1.0 / (1.0 + exp(-x));
  case EGI_OP_Sin:
    return sin(x);
  case EGI_OP_Sqrt:
    return sqrt(x);
  case EGI_OP_Tanh:
    return tanh(x);
  default:
    fail_msg("no reference for %s", egi_op_get(op)->name);
    return 0.0;
  }
}

/* Types that ONNX allows and the kernels take. */
static bool takes_unary(egi_op op, eg_dtype dtype) {
  switch (op) {
  case EGI_OP_Not:
    return dtype == EG_DTYPE_BOOL;
  case EGI_OP_Abs:
  case EGI_OP_Sign:
    return dtype != EG_DTYPE_BOOL;
  case EGI_OP_Neg:
  case EGI_OP_Relu:
    return egi_dtype_is_float(dtype) || is_signed(dtype);
  default:
    return egi_dtype_is_float(dtype);
  }
}

static void check_unary(void **state, egi_op op, eg_dtype dtype, size_t shape, bool is_tanh) {
  ops_case c;
  ops_begin(&c, state, op, dtype);
  bool is_boolean = op == EGI_OP_Not || op == EGI_OP_IsNaN;
  ops_tensor *in = ops_add_input(&c, dtype, shapes[shape].rank, shapes[shape].dims);
  ops_tensor *out = ops_add_output(&c, is_boolean ? EG_DTYPE_BOOL : dtype, shapes[shape].rank, shapes[shape].dims);
  double low = op == EGI_OP_Log || op == EGI_OP_Sqrt ? 0.0 : is_signed(dtype) || egi_dtype_is_float(dtype) ? -9.0 : 0.0;
  bool is_inverse = op == EGI_OP_Acos || op == EGI_OP_Asin || op == EGI_OP_Atanh; /* defined in [-1, 1] */
  ops_fill_uniform(in, is_inverse ? -1.0 : low, dtype == EG_DTYPE_BOOL || is_inverse ? 1.0 : 9.0, 11 + shape);
  /* Gelu of infinity is not defined by its formula. */
  if (op != EGI_OP_Gelu) ops_fill_special(in);
  if (is_tanh) ops_add_attribute(&c, egi_attribute_string("approximate", "tanh"));
  for (int64_t i = 0; i < ops_count(in); i++) {
    out->values[i] = reference_unary(op, in->values[i], is_tanh);
    if (egi_dtype_is_float(dtype)) out->values[i] = ops_round(out->dtype, out->values[i]);
  }
  /* 1 + erf and 1 + tanh cancel where x is far below zero; log near 1. */
  bool cancels = op == EGI_OP_Gelu || op == EGI_OP_Log || op == EGI_OP_Erf || op == EGI_OP_Tanh;
  if (cancels && dtype != EG_DTYPE_F64) c.absolute = 1e-6;
  if (dtype == EG_DTYPE_F64) c.absolute = 1e-15;
  /* Halves: computed in f32, then rounded; subnormal results may differ by their spacing. */
  if (dtype == EG_DTYPE_F16) c.absolute = 1.2e-7 + c.absolute;
  if (dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_BF16) c.absolute += 1e-40;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_unary(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(all_types); t++) {
    for (size_t s = 0; takes_unary(op, all_types[t]) && s < EGI_COUNT(shapes); s++) {
      check_unary(state, op, all_types[t], s, false);
      if (op == EGI_OP_Gelu) check_unary(state, op, all_types[t], s, true);
    }
    if (takes_unary(op, all_types[t])) continue;
    ops_case c;
    ops_begin(&c, state, op, all_types[t]);
    ops_add_input(&c, all_types[t], 0, NULL);
    ops_add_output(&c, op == EGI_OP_IsNaN || op == EGI_OP_Not ? EG_DTYPE_BOOL : all_types[t], 0, NULL);
    ops_check_refused(&c, EG_ERROR_UNSUPPORTED);
    ops_end(&c);
  }
}

/* ---- two inputs ----------------------------------------------------------------------------------------------- */

static const struct {
  int rank_a, rank_b, rank;
  int64_t a[4], b[4], out[4];
} pairs[] = {{1, 1, 1, {0}, {0}, {0}},
             {0, 0, 0, {0}, {0}, {0}},
             {1, 1, 1, {257}, {257}, {257}},
             {0, 1, 1, {0}, {7}, {7}},
             {1, 0, 1, {255}, {0}, {255}},
             {2, 1, 2, {33, 19}, {19}, {33, 19}},
             {2, 2, 2, {33, 19}, {33, 1}, {33, 19}},
             {2, 2, 2, {33, 1}, {1, 19}, {33, 19}},
             {3, 2, 3, {2, 1, 3}, {4, 1}, {2, 4, 3}},
             {3, 3, 3, {2, 1, 3}, {2, 0, 1}, {2, 0, 3}},
             {4, 4, 4, {2, 3, 37, 79}, {2, 1, 37, 79}, {2, 3, 37, 79}}};

static double reference_binary(egi_op op, double x, double y, eg_dtype dtype, bool is_tanh) {
  double root = sqrt(2.0 / acos(-1.0)), t, inner;
  switch (op) {
  case EGI_OP_Add:
    return x + y;
  case EGI_OP_Sub:
    return x - y;
  case EGI_OP_Mul:
    return x * y;
  case EGI_OP_Div:
    return is_integer(dtype) ? trunc(x / y) : x / y;
  case EGI_OP_Max:
    return isnan(x) || isnan(y) ? nan("") : x > y ? x : y;
  case EGI_OP_Min:
    return isnan(x) || isnan(y) ? nan("") : x < y ? x : y;
  case EGI_OP_And:
    return x != 0.0 && y != 0.0;
  case EGI_OP_Or:
    return x != 0.0 || y != 0.0;
  case EGI_OP_Xor:
    return (x != 0.0) != (y != 0.0);
  case EGI_OP_Equal:
    return x == y;
  case EGI_OP_Less:
    return x < y;
  case EGI_OP_LessOrEqual:
    return x <= y;
  case EGI_OP_Greater:
    return x > y;
  case EGI_OP_GreaterOrEqual:
    return x >= y;
  case EGI_OP_GeluGrad:
    if (!is_tanh) return y * (0.5 * (1.0 + erf(x / sqrt(2.0))) + x * exp(-0.5 * x * x) / sqrt(2.0 * acos(-1.0)));
    t = tanh(root * (x + 0.044715 * x * x * x));
    inner = root * (1.0 + 3.0 * 0.044715 * x * x);
    return y * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner);
  default:
    fail_msg("no reference for %s", egi_op_get(op)->name);
    return 0.0;
  }
}

static bool takes_binary(egi_op op, eg_dtype dtype) {
  switch (op) {
  case EGI_OP_And:
  case EGI_OP_Or:
  case EGI_OP_Xor:
    return dtype == EG_DTYPE_BOOL;
  case EGI_OP_Equal:
    return true;
  case EGI_OP_GeluGrad:
    return egi_dtype_is_float(dtype);
  default:
    return dtype != EG_DTYPE_BOOL;
  }
}

/* Whole numbers that stay in the type; sums of unsigned ones too. */
static void fill_pair(egi_op op, ops_tensor *a, ops_tensor *b, uint64_t seed) {
  eg_dtype dtype = a->dtype;
  if (dtype == EG_DTYPE_BOOL) {
    ops_fill_uniform(a, 0.0, 1.0, seed);
    ops_fill_uniform(b, 0.0, 1.0, seed + 1);
  } else if (egi_dtype_kind(dtype) == EGI_CLASS_UNSIGNED) {
    ops_fill_uniform(a, 8.0, 15.0, seed);
    ops_fill_uniform(b, 1.0, 8.0, seed + 1);
  } else {
    ops_fill_uniform(a, -9.0, 9.0, seed);
    ops_fill_uniform(b, 1.0, 9.0, seed + 1);
    for (int64_t i = 0; i < ops_count(b); i += 2) b->values[i] = -b->values[i];
  }
  if (op != EGI_OP_GeluGrad) {
    ops_fill_special(a);
    ops_fill_special(b);
    if (ops_count(b) > 9) b->values[0] = 1.0; /* infinity meets numbers as well as infinity */
  }
}

static bool is_boolean_result(egi_op op) {
  return (egi_op_get(op)->flags & EGI_OP_INTEGER) != 0;
}

static void check_binary(void **state, egi_op op, eg_dtype dtype, size_t p, bool is_tanh) {
  ops_case c;
  ops_begin(&c, state, op, dtype);
  ops_tensor *a = ops_add_input(&c, dtype, pairs[p].rank_a, pairs[p].a);
  ops_tensor *b = ops_add_input(&c, dtype, pairs[p].rank_b, pairs[p].b);
  ops_tensor *out = ops_add_output(&c, is_boolean_result(op) ? EG_DTYPE_BOOL : dtype, pairs[p].rank, pairs[p].out);
  fill_pair(op, a, b, 100 + p);
  if (is_tanh) ops_add_attribute(&c, egi_attribute_string("approximate", "tanh"));
  for (int64_t i = 0; i < ops_count(out); i++) {
    double x = a->values[ops_broadcast_index(a, out->rank, out->dims, i)];
    double y = b->values[ops_broadcast_index(b, out->rank, out->dims, i)];
    out->values[i] = ops_round(out->dtype, reference_binary(op, x, y, dtype, is_tanh));
  }
  if (op == EGI_OP_GeluGrad && dtype != EG_DTYPE_F64) c.absolute = 1e-5; /* slopes of up to 10 with cancellation */
  if (dtype == EG_DTYPE_F64) c.absolute = op == EGI_OP_GeluGrad ? 1e-13 : 1e-14;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_binary(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(all_types); t++) {
    if (!takes_binary(op, all_types[t])) continue;
    for (size_t p = 0; p < EGI_COUNT(pairs); p++) {
      check_binary(state, op, all_types[t], p, false);
      if (op == EGI_OP_GeluGrad) check_binary(state, op, all_types[t], p, true);
    }
  }
}

/* ---- Pow, Mod ------------------------------------------------------------------------------------------------- */

static void check_pow(void **state, eg_dtype base, eg_dtype exponent, double fixed, size_t p) {
  ops_case c;
  ops_begin(&c, state, EGI_OP_Pow, base);
  ops_tensor *a = ops_add_input(&c, base, pairs[p].rank_a, pairs[p].a);
  ops_tensor *b = ops_add_input(&c, exponent, pairs[p].rank_b, pairs[p].b);
  ops_tensor *out = ops_add_output(&c, base, pairs[p].rank, pairs[p].out);
  ops_fill_uniform(a, egi_dtype_is_float(base) && exponent != EG_DTYPE_I32 ? 0.1 : -4.0, 4.0, 7);
  ops_fill_uniform(b, 0.0, 3.0, 8);
  if (egi_dtype_kind(base) == EGI_CLASS_UNSIGNED) ops_fill_uniform(a, 0.0, 4.0, 7);
  for (int64_t i = 0; fixed >= 0.0 && i < ops_count(b); i++) b->values[i] = ops_round(exponent, fixed);
  for (int64_t i = 0; i < ops_count(out); i++) {
    double x = a->values[ops_broadcast_index(a, out->rank, out->dims, i)];
    double y = b->values[ops_broadcast_index(b, out->rank, out->dims, i)];
    out->values[i] = ops_round(base, egi_dtype_is_float(base) ? pow(x, y) : floor(pow(x, y) + 0.5));
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_pow(void **state, egi_op op) {
  (void)op;
  static const eg_dtype bases[] = {EG_DTYPE_F32, EG_DTYPE_F16, EG_DTYPE_BF16, EG_DTYPE_F64, EG_DTYPE_I32, EG_DTYPE_I64};
  static const eg_dtype exponents[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_I32, EG_DTYPE_I64, EG_DTYPE_U8};
  for (size_t p = 0; p < EGI_COUNT(pairs); p++) {
    for (size_t i = 0; i < EGI_COUNT(bases); i++) check_pow(state, bases[i], bases[i], -1.0, p);
    for (size_t i = 0; i < EGI_COUNT(bases); i++) {
      for (size_t k = 0; k < EGI_COUNT(exponents); k++) {
        bool is_root = !egi_dtype_is_float(bases[i]) && egi_dtype_is_float(exponents[k]);
        check_pow(state, bases[i], exponents[k], is_root ? 2.0 : -1.0, p);
      }
    }
    static const double common[] = {0.0, 0.5, 1.0, 2.0, 3.0};
    for (size_t i = 0; i < EGI_COUNT(common); i++) check_pow(state, EG_DTYPE_F32, EG_DTYPE_F32, common[i], p);
  }
}

static void check_mod(void **state, eg_dtype dtype, bool is_fmod, size_t p) {
  ops_case c;
  ops_begin(&c, state, EGI_OP_Mod, dtype);
  ops_tensor *a = ops_add_input(&c, dtype, pairs[p].rank_a, pairs[p].a);
  ops_tensor *b = ops_add_input(&c, dtype, pairs[p].rank_b, pairs[p].b);
  ops_tensor *out = ops_add_output(&c, dtype, pairs[p].rank, pairs[p].out);
  fill_pair(EGI_OP_GeluGrad, a, b, 31 + p); /* without special values */
  if (is_fmod) ops_add_attribute(&c, egi_attribute_int("fmod", 1));
  for (int64_t i = 0; i < ops_count(out); i++) {
    double x = a->values[ops_broadcast_index(a, out->rank, out->dims, i)];
    double y = b->values[ops_broadcast_index(b, out->rank, out->dims, i)];
    double r = fmod(x, y);
    out->values[i] = ops_round(dtype, !is_fmod && r != 0.0 && (r < 0.0) != (y < 0.0) ? r + y : r);
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_mod(void **state, egi_op op) {
  (void)op;
  for (size_t t = 0; t < EGI_COUNT(all_types); t++) {
    if (all_types[t] == EG_DTYPE_BOOL) continue;
    for (size_t p = 0; p < EGI_COUNT(pairs); p++) {
      check_mod(state, all_types[t], true, p);
      if (!egi_dtype_is_float(all_types[t])) check_mod(state, all_types[t], false, p);
    }
  }
}

/* ---- Max, Min ------------------------------------------------------------------------------------------------- */

static void check_extremum(void **state, egi_op op, eg_dtype dtype, unsigned n_inputs) {
  static const int64_t dims[5][2] = {{21, 17}, {1, 17}, {21, 17}, {21, 1}, {1, 1}};
  ops_case c;
  ops_begin(&c, state, op, dtype);
  for (unsigned i = 0; i < n_inputs; i++) {
    ops_tensor *in = ops_add_input(&c, dtype, 2, dims[i]);
    ops_fill_uniform(in, egi_dtype_kind(dtype) == EGI_CLASS_UNSIGNED ? 0.0 : -50.0, 50.0, i);
    if (i == 2) ops_fill_special(in);
  }
  ops_tensor *out = ops_add_output(&c, dtype, 2, dims[0]);
  for (int64_t i = 0; i < ops_count(out); i++) {
    out->values[i] = c.inputs[0].values[i];
    for (unsigned k = 1; k < n_inputs; k++) {
      double y = c.inputs[k].values[ops_broadcast_index(&c.inputs[k], 2, out->dims, i)];
      out->values[i] = reference_binary(op, out->values[i], y, dtype, false);
    }
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_extremum(void **state, egi_op op) {
  ops_case_binary(state, op);
  for (size_t t = 0; t < EGI_COUNT(all_types); t++) {
    for (unsigned n = 1; all_types[t] != EG_DTYPE_BOOL && n <= 5; n++) check_extremum(state, op, all_types[t], n);
  }
}

/* ---- Where ---------------------------------------------------------------------------------------------------- */

void ops_case_where(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(all_types); t++) {
    for (size_t p = 0; p < 2 * EGI_COUNT(pairs); p++) {
      size_t k = p / 2;
      ops_case c;
      ops_begin(&c, state, op, all_types[t]);
      /* The condition has the shape of one operand or of the result. */
      ops_tensor *condition = p % 2 == 0 ? ops_add_input(&c, EG_DTYPE_BOOL, pairs[k].rank, pairs[k].out)
                                         : ops_add_input(&c, EG_DTYPE_BOOL, pairs[k].rank_a, pairs[k].a);
      ops_tensor *a = ops_add_input(&c, all_types[t], pairs[k].rank_a, pairs[k].a);
      ops_tensor *b = ops_add_input(&c, all_types[t], pairs[k].rank_b, pairs[k].b);
      ops_tensor *out = ops_add_output(&c, all_types[t], pairs[k].rank, pairs[k].out);
      ops_fill_uniform(condition, 0.0, 1.0, p);
      fill_pair(op, a, b, p);
      for (int64_t i = 0; i < ops_count(out); i++) {
        bool is_first = condition->values[ops_broadcast_index(condition, out->rank, out->dims, i)] != 0.0;
        const ops_tensor *source = is_first ? a : b;
        out->values[i] = source->values[ops_broadcast_index(source, out->rank, out->dims, i)];
      }
      c.relative = 0.0;
      ops_check(&c);
      ops_end(&c);
    }
  }
}
