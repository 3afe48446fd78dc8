/* Gradient rules of trigonometric and hyperbolic operators and their inverses (Abramowitz and Stegun, 4.3, 4.4, 4.5,
 * 4.6). dy is the gradient of the result; a result y is used instead of the input where either would do. */
#include "passes/passes.h"

static egi_value_id mul(egi_gradient *gradient, egi_value_id a, egi_value_id b) {
  return egi_emit_binary(gradient->emit, EGI_OP_Mul, a, b);
}

/* a · a + number */
static egi_value_id square_plus(egi_gradient *gradient, egi_value_id a, double number) {
  return egi_emit_binary(gradient->emit, EGI_OP_Add, mul(gradient, a, a), egi_gradient_number(gradient, number, a));
}

/* 1 - x² */
static egi_value_id one_minus_square(egi_gradient *gradient, egi_value_id x) {
  return egi_emit_binary(gradient->emit, EGI_OP_Sub, egi_gradient_number(gradient, 1.0, x), mul(gradient, x, x));
}

/* dy / slope */
static eg_status divide(egi_gradient *gradient, egi_value_id slope) {
  egi_gradient_set(gradient, 0, egi_emit_binary(gradient->emit, EGI_OP_Div, gradient->out_gradients[0], slope));
  return EG_OK;
}

static eg_status divide_by_root(egi_gradient *gradient, egi_value_id square) {
  return divide(gradient, egi_emit_unary(gradient->emit, EGI_OP_Sqrt, square));
}

/* dy · op(x) */
static eg_status multiply(egi_gradient *gradient, egi_op op) {
  egi_value_id slope = egi_emit_unary(gradient->emit, op, egi_gradient_input(gradient, 0));
  egi_gradient_set(gradient, 0, mul(gradient, gradient->out_gradients[0], slope));
  return EG_OK;
}

/* -1 / sqrt(1 - x²) */
eg_status egi_gradient_acos(egi_gradient *gradient) {
  egi_value_id square = one_minus_square(gradient, egi_gradient_input(gradient, 0));
  egi_value_id root = egi_emit_unary(gradient->emit, EGI_OP_Sqrt, square);
  return divide(gradient, egi_emit_unary(gradient->emit, EGI_OP_Neg, root));
}

eg_status egi_gradient_asin(egi_gradient *gradient) {
  return divide_by_root(gradient, one_minus_square(gradient, egi_gradient_input(gradient, 0)));
}

/* 1 / (1 + x²) */
eg_status egi_gradient_atan(egi_gradient *gradient) {
  return divide(gradient, square_plus(gradient, egi_gradient_input(gradient, 0), 1.0));
}

/* 1 / sqrt(x² - 1) */
eg_status egi_gradient_acosh(egi_gradient *gradient) {
  return divide_by_root(gradient, square_plus(gradient, egi_gradient_input(gradient, 0), -1.0));
}

eg_status egi_gradient_asinh(egi_gradient *gradient) {
  return divide_by_root(gradient, square_plus(gradient, egi_gradient_input(gradient, 0), 1.0));
}

eg_status egi_gradient_atanh(egi_gradient *gradient) {
  return divide(gradient, one_minus_square(gradient, egi_gradient_input(gradient, 0)));
}

eg_status egi_gradient_cosh(egi_gradient *gradient) {
  return multiply(gradient, EGI_OP_Sinh);
}

eg_status egi_gradient_sinh(egi_gradient *gradient) {
  return multiply(gradient, EGI_OP_Cosh);
}

/* 1 + y² */
eg_status egi_gradient_tan(egi_gradient *gradient) {
  egi_value_id slope = square_plus(gradient, egi_gradient_output(gradient, 0), 1.0);
  egi_gradient_set(gradient, 0, mul(gradient, gradient->out_gradients[0], slope));
  return EG_OK;
}
