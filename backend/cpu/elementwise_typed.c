/* Elementwise loops over f64, integers and booleans, and comparisons, for any strides. Integers wrap around; a quotient
 * by zero is 0; Div truncates toward zero; Mod has the divisor's sign, or with fmod the dividend's. */
#include <math.h>

#include "backend/cpu/elementwise.h"

/* ---- numbers -------------------------------------------------------------------------------------------------- */

#define SQRT_HALF 0.70710678118654752440
#define SQRT_2_OVER_PI 0.79788456080286535588
#define INVERSE_SQRT_2PI 0.39894228040143267794
#define GELU_CUBIC 0.044715

/* Formulas as in isa/elementwise.c. */
static double gelu(double x) {
  return 0.5 * x * erfc(-x * SQRT_HALF);
}
static double gelu_tanh(double x) {
  return 0.5 * x * (1.0 + tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)));
}
static double gelu_slope(double x) {
  double product = fabs(x) > 40.0 ? 0.0 : x * INVERSE_SQRT_2PI * exp(-0.5 * x * x);
  return 0.5 * erfc(-x * SQRT_HALF) + product;
}
static double gelu_tanh_slope(double x) {
  double t = tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x));
  double inner = SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * x * x);
  double product = fabs(x) > 40.0 ? 0.0 : 0.5 * x * (1.0 - t * t) * inner;
  return 0.5 * (1.0 + t) + product;
}
static double sigmoid(double x) {
  return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

static int64_t divide_signed(int64_t x, int64_t y) {
  if (y == 0) return 0;
  return y == -1 ? (int64_t)(0 - (uint64_t)x) : x / y;
}
static int64_t remainder_signed(int64_t x, int64_t y) {
  return y == 0 || y == -1 ? 0 : x % y;
}
static int64_t modulo_signed(int64_t x, int64_t y) {
  int64_t r = remainder_signed(x, y);
  return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}
static uint64_t divide_unsigned(uint64_t x, uint64_t y) {
  return y == 0 ? 0 : x / y;
}
static uint64_t remainder_unsigned(uint64_t x, uint64_t y) {
  return y == 0 ? 0 : x % y;
}

/* ---- loops ---------------------------------------------------------------------------------------------------- */

/* The contiguous form stands apart so that compilers vectorise it. */
#define UNARY_LOOP(name, T, R, expression)                                                     \
  static void name(const void *params, char *const *data, const int64_t *strides, int64_t n) { \
    (void)params;                                                                              \
    const int64_t s0 = strides[0], s1 = strides[1];                                            \
    if (s0 == (int64_t)sizeof(R) && s1 == (int64_t)sizeof(T)) {                                \
      R *out = (R *)(void *)data[0];                                                           \
      const T *in = (const T *)(const void *)data[1];                                          \
      for (int64_t i = 0; i < n; i++) {                                                        \
        const T x = in[i];                                                                     \
        out[i] = (R)(expression);                                                              \
      }                                                                                        \
      return;                                                                                  \
    }                                                                                          \
    for (int64_t i = 0; i < n; i++) {                                                          \
      const T x = *(const T *)(const void *)(data[1] + i * s1);                                \
      *(R *)(void *)(data[0] + i * s0) = (R)(expression);                                      \
    }                                                                                          \
  }

#define BINARY_LOOP(name, T, R, expression)                                                    \
  static void name(const void *params, char *const *data, const int64_t *strides, int64_t n) { \
    (void)params;                                                                              \
    const int64_t s0 = strides[0], s1 = strides[1], s2 = strides[2];                           \
    if (s0 == (int64_t)sizeof(R) && s1 == (int64_t)sizeof(T) && s2 == (int64_t)sizeof(T)) {    \
      R *out = (R *)(void *)data[0];                                                           \
      const T *a = (const T *)(const void *)data[1];                                           \
      const T *b = (const T *)(const void *)data[2];                                           \
      for (int64_t i = 0; i < n; i++) {                                                        \
        const T x = a[i], y = b[i];                                                            \
        out[i] = (R)(expression);                                                              \
      }                                                                                        \
      return;                                                                                  \
    }                                                                                          \
    for (int64_t i = 0; i < n; i++) {                                                          \
      const T x = *(const T *)(const void *)(data[1] + i * s1);                                \
      const T y = *(const T *)(const void *)(data[2] + i * s2);                                \
      *(R *)(void *)(data[0] + i * s0) = (R)(expression);                                      \
    }                                                                                          \
  }

/* W: unsigned and at least 32 bits wide, so that sums and products wrap without undefined behaviour. */
#define COMPARISONS(P, T)                            \
  BINARY_LOOP(P##_equal, T, uint8_t, x == y)         \
  BINARY_LOOP(P##_less, T, uint8_t, x < y)           \
  BINARY_LOOP(P##_less_or_equal, T, uint8_t, x <= y) \
  BINARY_LOOP(P##_greater, T, uint8_t, x > y)        \
  BINARY_LOOP(P##_greater_or_equal, T, uint8_t, x >= y)

#define ARITHMETIC(P, T, W)                 \
  BINARY_LOOP(P##_add, T, T, (W)x + (W)y)   \
  BINARY_LOOP(P##_sub, T, T, (W)x - (W)y)   \
  BINARY_LOOP(P##_mul, T, T, (W)x *(W)y)    \
  BINARY_LOOP(P##_max, T, T, x > y ? x : y) \
  BINARY_LOOP(P##_min, T, T, x < y ? x : y) \
  COMPARISONS(P, T)

#define SIGNED(P, T, W)                               \
  ARITHMETIC(P, T, W)                                 \
  BINARY_LOOP(P##_div, T, T, divide_signed(x, y))     \
  BINARY_LOOP(P##_mod, T, T, modulo_signed(x, y))     \
  BINARY_LOOP(P##_fmod, T, T, remainder_signed(x, y)) \
  UNARY_LOOP(P##_abs, T, T, x < 0 ? 0 - (W)x : (W)x)  \
  UNARY_LOOP(P##_neg, T, T, 0 - (W)x)                 \
  UNARY_LOOP(P##_relu, T, T, x < 0 ? 0 : x)           \
  UNARY_LOOP(P##_sign, T, T, x > 0 ? 1 : x < 0 ? -1 : 0)

#define UNSIGNED(P, T, W)                              \
  ARITHMETIC(P, T, W)                                  \
  BINARY_LOOP(P##_div, T, T, divide_unsigned(x, y))    \
  BINARY_LOOP(P##_mod, T, T, remainder_unsigned(x, y)) \
  UNARY_LOOP(P##_abs, T, T, x)                         \
  UNARY_LOOP(P##_sign, T, T, x > 0 ? 1 : 0)

SIGNED(i8, int8_t, uint32_t)
SIGNED(i16, int16_t, uint32_t)
SIGNED(i32, int32_t, uint32_t)
SIGNED(i64, int64_t, uint64_t)
UNSIGNED(u8, uint8_t, uint32_t)
UNSIGNED(u16, uint16_t, uint32_t)
UNSIGNED(u32, uint32_t, uint32_t)
UNSIGNED(u64, uint64_t, uint64_t)
COMPARISONS(f32, float)
COMPARISONS(f64, double)

BINARY_LOOP(bool_and, uint8_t, uint8_t, (x != 0) & (y != 0))
BINARY_LOOP(bool_or, uint8_t, uint8_t, (x != 0) | (y != 0))
BINARY_LOOP(bool_xor, uint8_t, uint8_t, (x != 0) != (y != 0))
BINARY_LOOP(bool_equal, uint8_t, uint8_t, (x != 0) == (y != 0))
UNARY_LOOP(bool_not, uint8_t, uint8_t, x == 0)

BINARY_LOOP(f64_add, double, double, x + y)
BINARY_LOOP(f64_sub, double, double, x - y)
BINARY_LOOP(f64_mul, double, double, x *y)
BINARY_LOOP(f64_div, double, double, x / y)
BINARY_LOOP(f64_max, double, double, x > y || x != x ? x : y)
BINARY_LOOP(f64_min, double, double, x < y || x != x ? x : y)
BINARY_LOOP(f64_pow, double, double, pow(x, y))
BINARY_LOOP(f64_fmod, double, double, fmod(x, y))
BINARY_LOOP(f64_gelu_grad, double, double, gelu_slope(x) * y)
BINARY_LOOP(f64_gelu_tanh_grad, double, double, gelu_tanh_slope(x) * y)
UNARY_LOOP(f64_abs, double, double, fabs(x))
UNARY_LOOP(f64_acos, double, double, acos(x))
UNARY_LOOP(f64_acosh, double, double, acosh(x))
UNARY_LOOP(f64_asin, double, double, asin(x))
UNARY_LOOP(f64_asinh, double, double, asinh(x))
UNARY_LOOP(f64_atan, double, double, atan(x))
UNARY_LOOP(f64_atanh, double, double, atanh(x))
UNARY_LOOP(f64_cosh, double, double, cosh(x))
UNARY_LOOP(f64_sinh, double, double, sinh(x))
UNARY_LOOP(f64_tan, double, double, tan(x))
UNARY_LOOP(f64_ceil, double, double, ceil(x))
UNARY_LOOP(f64_cos, double, double, cos(x))
UNARY_LOOP(f64_erf, double, double, erf(x))
UNARY_LOOP(f64_exp, double, double, exp(x))
UNARY_LOOP(f64_floor, double, double, floor(x))
UNARY_LOOP(f64_gelu, double, double, gelu(x))
UNARY_LOOP(f64_gelu_tanh, double, double, gelu_tanh(x))
UNARY_LOOP(f64_is_nan, double, uint8_t, x != x)
UNARY_LOOP(f64_log, double, double, log(x))
UNARY_LOOP(f64_neg, double, double, -x)
UNARY_LOOP(f64_reciprocal, double, double, 1.0 / x)
UNARY_LOOP(f64_relu, double, double, x < 0.0 ? 0.0 : x)
UNARY_LOOP(f64_round, double, double, rint(x))
UNARY_LOOP(f64_sign, double, double, x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : x)
UNARY_LOOP(f64_sigmoid, double, double, sigmoid(x))
UNARY_LOOP(f64_sin, double, double, sin(x))
UNARY_LOOP(f64_sqrt, double, double, sqrt(x))
UNARY_LOOP(f64_tanh, double, double, tanh(x))

/* ---- tables --------------------------------------------------------------------------------------------------- */

/* ROW(operator, loop): what a type has of each group. */
#define COMPARISON_ROWS(P)    \
  case EGI_OP_Equal:          \
    return P##_equal;         \
  case EGI_OP_Less:           \
    return P##_less;          \
  case EGI_OP_LessOrEqual:    \
    return P##_less_or_equal; \
  case EGI_OP_Greater:        \
    return P##_greater;       \
  case EGI_OP_GreaterOrEqual: \
    return P##_greater_or_equal;

#define ARITHMETIC_ROWS(P) \
  case EGI_OP_Add:         \
    return P##_add;        \
  case EGI_OP_Sub:         \
    return P##_sub;        \
  case EGI_OP_Mul:         \
    return P##_mul;        \
  case EGI_OP_Div:         \
    return P##_div;        \
  case EGI_OP_Max:         \
    return P##_max;        \
  case EGI_OP_Min:         \
    return P##_min;        \
    COMPARISON_ROWS(P)

#define BINARY_TABLE(P, mod, fmod)                       \
  static egi_inner P##_binary(egi_op op, bool is_fmod) { \
    switch (op) {                                        \
      ARITHMETIC_ROWS(P)                                 \
    case EGI_OP_Mod:                                     \
      return is_fmod ? P##_##fmod : P##_##mod;           \
    default:                                             \
      return NULL;                                       \
    }                                                    \
  }

BINARY_TABLE(i8, mod, fmod)
BINARY_TABLE(i16, mod, fmod)
BINARY_TABLE(i32, mod, fmod)
BINARY_TABLE(i64, mod, fmod)
BINARY_TABLE(u8, mod, mod)
BINARY_TABLE(u16, mod, mod)
BINARY_TABLE(u32, mod, mod)
BINARY_TABLE(u64, mod, mod)

static egi_inner f64_binary(egi_op op, bool is_fmod, bool is_tanh) {
  switch (op) {
    ARITHMETIC_ROWS(f64)
  case EGI_OP_Pow:
    return f64_pow;
  case EGI_OP_Mod:
    return is_fmod ? f64_fmod : NULL;
  case EGI_OP_GeluGrad:
    return is_tanh ? f64_gelu_tanh_grad : f64_gelu_grad;
  default:
    return NULL;
  }
}

static egi_inner bool_binary(egi_op op) {
  switch (op) {
  case EGI_OP_And:
    return bool_and;
  case EGI_OP_Or:
    return bool_or;
  case EGI_OP_Xor:
    return bool_xor;
  case EGI_OP_Equal:
    return bool_equal;
  default:
    return NULL;
  }
}

egi_inner egi_typed_binary(egi_op op, eg_dtype dtype, bool is_fmod, bool is_tanh) {
  switch (dtype) {
  case EG_DTYPE_F64:
    return f64_binary(op, is_fmod, is_tanh);
  case EG_DTYPE_I8:
    return i8_binary(op, is_fmod);
  case EG_DTYPE_I16:
    return i16_binary(op, is_fmod);
  case EG_DTYPE_I32:
    return i32_binary(op, is_fmod);
  case EG_DTYPE_I64:
    return i64_binary(op, is_fmod);
  case EG_DTYPE_U8:
    return u8_binary(op, is_fmod);
  case EG_DTYPE_U16:
    return u16_binary(op, is_fmod);
  case EG_DTYPE_U32:
    return u32_binary(op, is_fmod);
  case EG_DTYPE_U64:
    return u64_binary(op, is_fmod);
  case EG_DTYPE_BOOL:
    return bool_binary(op);
  default:
    return NULL;
  }
}

egi_inner egi_f32_compare(egi_op op) {
  switch (op) {
    COMPARISON_ROWS(f32)
  default:
    return NULL;
  }
}

static egi_inner f64_unary(egi_op op, bool is_tanh) {
  switch (op) {
  case EGI_OP_Abs:
    return f64_abs;
  case EGI_OP_Acos:
    return f64_acos;
  case EGI_OP_Acosh:
    return f64_acosh;
  case EGI_OP_Asin:
    return f64_asin;
  case EGI_OP_Asinh:
    return f64_asinh;
  case EGI_OP_Atan:
    return f64_atan;
  case EGI_OP_Atanh:
    return f64_atanh;
  case EGI_OP_Cosh:
    return f64_cosh;
  case EGI_OP_Sinh:
    return f64_sinh;
  case EGI_OP_Tan:
    return f64_tan;
  case EGI_OP_Ceil:
    return f64_ceil;
  case EGI_OP_Cos:
    return f64_cos;
  case EGI_OP_Erf:
    return f64_erf;
  case EGI_OP_Exp:
    return f64_exp;
  case EGI_OP_Floor:
    return f64_floor;
  case EGI_OP_Gelu:
    return is_tanh ? f64_gelu_tanh : f64_gelu;
  case EGI_OP_IsNaN:
    return f64_is_nan;
  case EGI_OP_Log:
    return f64_log;
  case EGI_OP_Neg:
    return f64_neg;
  case EGI_OP_Reciprocal:
    return f64_reciprocal;
  case EGI_OP_Relu:
    return f64_relu;
  case EGI_OP_Round:
    return f64_round;
  case EGI_OP_Sign:
    return f64_sign;
  case EGI_OP_Sigmoid:
    return f64_sigmoid;
  case EGI_OP_Sin:
    return f64_sin;
  case EGI_OP_Sqrt:
    return f64_sqrt;
  case EGI_OP_Tanh:
    return f64_tanh;
  default:
    return NULL;
  }
}

#define SIGNED_UNARY(P)           \
  (op == EGI_OP_Abs    ? P##_abs  \
   : op == EGI_OP_Neg  ? P##_neg  \
   : op == EGI_OP_Relu ? P##_relu \
   : op == EGI_OP_Sign ? P##_sign \
                       : NULL)
#define UNSIGNED_UNARY(P) (op == EGI_OP_Abs ? P##_abs : op == EGI_OP_Sign ? P##_sign : NULL)

egi_inner egi_typed_unary(egi_op op, eg_dtype dtype, bool is_tanh) {
  switch (dtype) {
  case EG_DTYPE_F64:
    return f64_unary(op, is_tanh);
  case EG_DTYPE_I8:
    return SIGNED_UNARY(i8);
  case EG_DTYPE_I16:
    return SIGNED_UNARY(i16);
  case EG_DTYPE_I32:
    return SIGNED_UNARY(i32);
  case EG_DTYPE_I64:
    return SIGNED_UNARY(i64);
  case EG_DTYPE_U8:
    return UNSIGNED_UNARY(u8);
  case EG_DTYPE_U16:
    return UNSIGNED_UNARY(u16);
  case EG_DTYPE_U32:
    return UNSIGNED_UNARY(u32);
  case EG_DTYPE_U64:
    return UNSIGNED_UNARY(u64);
  case EG_DTYPE_BOOL:
    return op == EGI_OP_Not ? bool_not : NULL;
  default:
    return NULL;
  }
}
