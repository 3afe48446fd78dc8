/* Gradient rules of elementwise operators. dy is the gradient of the result; a result y is used instead of the input
 * where either would do and y is at hand for others anyway. Derivatives at kinks: 0 for |x| at 0 and for relu at 0; a
 * bound of Clip passes the gradient on, as in PyTorch. */
#include <math.h>

#include "passes/passes.h"

static egi_value_id mul(egi_gradient *gradient, egi_value_id a, egi_value_id b) {
  return egi_emit_binary(gradient->emit, EGI_OP_Mul, a, b);
}

static egi_value_id where(egi_gradient *gradient, egi_value_id condition, egi_value_id yes, egi_value_id no) {
  const egi_value_id inputs[3] = {condition, yes, no};
  return egi_emit(gradient->emit, EGI_OP_Where, inputs, 3, NULL, 0);
}

/* dy where the condition holds, 0 elsewhere. */
static egi_value_id masked(egi_gradient *gradient, egi_value_id condition) {
  egi_value_id dy = gradient->out_gradients[0];
  return where(gradient, condition, dy, egi_gradient_number(gradient, 0.0, dy));
}

static egi_value_id compared_to_zero(egi_gradient *gradient, egi_op op, egi_value_id a) {
  return egi_emit_binary(gradient->emit, op, a, egi_gradient_number(gradient, 0.0, a));
}

/* ---- one input -------------------------------------------------------------------------------------------------- */

eg_status egi_gradient_abs(egi_gradient *gradient) {
  egi_value_id x = egi_gradient_input(gradient, 0), dy = gradient->out_gradients[0];
  egi_value_id negative = egi_emit_unary(gradient->emit, EGI_OP_Neg, dy);
  egi_value_id below =
      where(gradient, compared_to_zero(gradient, EGI_OP_Less, x), negative, egi_gradient_number(gradient, 0.0, dy));
  egi_gradient_set(gradient, 0, where(gradient, compared_to_zero(gradient, EGI_OP_Greater, x), dy, below));
  return EG_OK;
}

/* -sin x */
eg_status egi_gradient_cos(egi_gradient *gradient) {
  egi_value_id sine = egi_emit_unary(gradient->emit, EGI_OP_Sin, egi_gradient_input(gradient, 0));
  egi_value_id product = mul(gradient, gradient->out_gradients[0], sine);
  egi_gradient_set(gradient, 0, egi_emit_unary(gradient->emit, EGI_OP_Neg, product));
  return EG_OK;
}

eg_status egi_gradient_sin(egi_gradient *gradient) {
  egi_value_id cosine = egi_emit_unary(gradient->emit, EGI_OP_Cos, egi_gradient_input(gradient, 0));
  egi_gradient_set(gradient, 0, mul(gradient, gradient->out_gradients[0], cosine));
  return EG_OK;
}

/* 2/sqrt(pi) · exp(-x²) */
eg_status egi_gradient_erf(egi_gradient *gradient) {
  egi_value_id x = egi_gradient_input(gradient, 0);
  egi_value_id square = egi_emit_unary(gradient->emit, EGI_OP_Neg, mul(gradient, x, x));
  egi_value_id bell =
      egi_gradient_scaled(gradient, egi_emit_unary(gradient->emit, EGI_OP_Exp, square), 2.0 / sqrt(acos(-1.0)));
  egi_gradient_set(gradient, 0, mul(gradient, gradient->out_gradients[0], bell));
  return EG_OK;
}

eg_status egi_gradient_exp(egi_gradient *gradient) {
  egi_gradient_set(gradient, 0, mul(gradient, gradient->out_gradients[0], egi_gradient_output(gradient, 0)));
  return EG_OK;
}

eg_status egi_gradient_gelu(egi_gradient *gradient) {
  const egi_value_id inputs[2] = {egi_gradient_input(gradient, 0), gradient->out_gradients[0]};
  egi_value_id dx = 0;
  egi_gradient_emit(gradient, EGI_OP_GeluGrad, inputs, 2, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}

/* Gradients of gate and up in one node. */
eg_status egi_gradient_glu(egi_gradient *gradient) {
  unsigned n_results = egi_gradient_wants(gradient, 1) ? 2 : 1;
  egi_value_id results[2] = {0};
  const egi_value_id inputs[3] = {egi_gradient_input(gradient, 0), egi_gradient_input(gradient, 1),
                                  gradient->out_gradients[0]};
  egi_gradient_emit(gradient, EGI_OP_GLUGrad, inputs, 3, results, n_results);
  for (unsigned i = 0; i < n_results; i++) egi_gradient_set(gradient, i, results[i]);
  return EG_OK;
}

eg_status egi_gradient_swish(egi_gradient *gradient) {
  const egi_value_id inputs[2] = {egi_gradient_input(gradient, 0), gradient->out_gradients[0]};
  egi_value_id dx = 0;
  egi_gradient_emit(gradient, EGI_OP_SwishGrad, inputs, 2, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}

eg_status egi_gradient_log(egi_gradient *gradient) {
  egi_value_id x = egi_gradient_input(gradient, 0);
  egi_gradient_set(gradient, 0, egi_emit_binary(gradient->emit, EGI_OP_Div, gradient->out_gradients[0], x));
  return EG_OK;
}

eg_status egi_gradient_neg(egi_gradient *gradient) {
  egi_gradient_set(gradient, 0, egi_emit_unary(gradient->emit, EGI_OP_Neg, gradient->out_gradients[0]));
  return EG_OK;
}

/* -y² */
eg_status egi_gradient_reciprocal(egi_gradient *gradient) {
  egi_value_id y = egi_gradient_output(gradient, 0);
  egi_value_id product = mul(gradient, gradient->out_gradients[0], mul(gradient, y, y));
  egi_gradient_set(gradient, 0, egi_emit_unary(gradient->emit, EGI_OP_Neg, product));
  return EG_OK;
}

eg_status egi_gradient_relu(egi_gradient *gradient) {
  egi_value_id y = egi_gradient_output(gradient, 0);
  egi_gradient_set(gradient, 0, masked(gradient, compared_to_zero(gradient, EGI_OP_Greater, y)));
  return EG_OK;
}

/* y · (1 - y) */
eg_status egi_gradient_sigmoid(egi_gradient *gradient) {
  egi_value_id y = egi_gradient_output(gradient, 0);
  egi_value_id rest = egi_emit_binary(gradient->emit, EGI_OP_Sub, egi_gradient_number(gradient, 1.0, y), y);
  egi_gradient_set(gradient, 0, mul(gradient, mul(gradient, gradient->out_gradients[0], y), rest));
  return EG_OK;
}

/* 1 / (2y) */
eg_status egi_gradient_sqrt(egi_gradient *gradient) {
  egi_value_id half = egi_gradient_scaled(gradient, gradient->out_gradients[0], 0.5);
  egi_gradient_set(gradient, 0, egi_emit_binary(gradient->emit, EGI_OP_Div, half, egi_gradient_output(gradient, 0)));
  return EG_OK;
}

/* 1 - y² */
eg_status egi_gradient_tanh(egi_gradient *gradient) {
  egi_value_id y = egi_gradient_output(gradient, 0);
  egi_value_id one = egi_gradient_number(gradient, 1.0, y);
  egi_value_id slope = egi_emit_binary(gradient->emit, EGI_OP_Sub, one, mul(gradient, y, y));
  egi_gradient_set(gradient, 0, mul(gradient, gradient->out_gradients[0], slope));
  return EG_OK;
}

eg_status egi_gradient_cast(egi_gradient *gradient) {
  eg_dtype dtype = gradient->graph->values[egi_gradient_input(gradient, 0)].dtype;
  egi_gradient_set(gradient, 0, egi_emit_cast(gradient->emit, gradient->out_gradients[0], dtype));
  return EG_OK;
}

eg_status egi_gradient_identity(egi_gradient *gradient) {
  egi_gradient_set(gradient, 0, gradient->out_gradients[0]);
  return EG_OK;
}

/* ---- two and more inputs ---------------------------------------------------------------------------------------- */

eg_status egi_gradient_add(egi_gradient *gradient) {
  egi_gradient_set(gradient, 0, gradient->out_gradients[0]);
  egi_gradient_set(gradient, 1, gradient->out_gradients[0]);
  return EG_OK;
}

eg_status egi_gradient_sub(egi_gradient *gradient) {
  egi_gradient_set(gradient, 0, gradient->out_gradients[0]);
  if (!egi_gradient_wants(gradient, 1)) return EG_OK;
  egi_gradient_set(gradient, 1, gradient->out_gradients[0]); /* summed first: the smaller tensor is negated */
  gradient->in_gradients[1] = egi_emit_unary(gradient->emit, EGI_OP_Neg, gradient->in_gradients[1]);
  return EG_OK;
}

eg_status egi_gradient_mul(egi_gradient *gradient) {
  for (unsigned i = 0; i < 2; i++) {
    if (!egi_gradient_wants(gradient, i)) continue;
    egi_gradient_set(gradient, i, mul(gradient, gradient->out_gradients[0], egi_gradient_input(gradient, 1 - i)));
  }
  return EG_OK;
}

/* dy / b and -dy · y / b */
eg_status egi_gradient_div(egi_gradient *gradient) {
  egi_value_id b = egi_gradient_input(gradient, 1);
  egi_value_id quotient = egi_emit_binary(gradient->emit, EGI_OP_Div, gradient->out_gradients[0], b);
  egi_gradient_set(gradient, 0, quotient);
  if (!egi_gradient_wants(gradient, 1)) return EG_OK;
  egi_gradient_set(gradient, 1, mul(gradient, quotient, egi_gradient_output(gradient, 0)));
  gradient->in_gradients[1] = egi_emit_unary(gradient->emit, EGI_OP_Neg, gradient->in_gradients[1]);
  return EG_OK;
}

/* p · x^(p-1), with the common powers written out. */
static egi_value_id power_slope(egi_gradient *gradient, egi_value_id x, egi_value_id exponent) {
  egi_emitter *emit = gradient->emit;
  double power = 0.0;
  if (egi_value_scalar(gradient->graph, exponent, &power)) {
    if (power == 2.0) return egi_gradient_scaled(gradient, x, 2.0);
    if (power == 3.0) return egi_gradient_scaled(gradient, mul(gradient, x, x), 3.0);
    egi_value_id lower = egi_emit_binary(emit, EGI_OP_Pow, x, egi_gradient_number(gradient, power - 1.0, x));
    return egi_gradient_scaled(gradient, lower, power);
  }
  egi_value_id wide = egi_emit_cast(emit, exponent, gradient->graph->values[x].dtype);
  egi_value_id lower = egi_emit_binary(emit, EGI_OP_Sub, wide, egi_gradient_number(gradient, 1.0, x));
  return mul(gradient, wide, egi_emit_binary(emit, EGI_OP_Pow, x, lower));
}

/* The exponent's own gradient is dy · y · log x, for positive x. */
eg_status egi_gradient_pow(egi_gradient *gradient) {
  egi_value_id x = egi_gradient_input(gradient, 0), exponent = egi_gradient_input(gradient, 1);
  egi_value_id dy = gradient->out_gradients[0];
  if (egi_gradient_wants(gradient, 0)) {
    double power = 0.0;
    bool is_linear = egi_value_scalar(gradient->graph, exponent, &power) && power == 1.0;
    egi_gradient_set(gradient, 0, is_linear ? dy : mul(gradient, dy, power_slope(gradient, x, exponent)));
  }
  if (egi_gradient_wants(gradient, 1)) {
    egi_value_id logarithm = egi_emit_unary(gradient->emit, EGI_OP_Log, x);
    egi_value_id slope = mul(gradient, egi_gradient_output(gradient, 0), logarithm);
    eg_dtype dtype = gradient->graph->values[exponent].dtype;
    egi_gradient_set(gradient, 1, egi_emit_cast(gradient->emit, mul(gradient, dy, slope), dtype));
  }
  return EG_OK;
}

/* The gradient goes to the input that the result equals; of several, to the first. */
static eg_status select_equal(egi_gradient *gradient) {
  egi_emitter *emit = gradient->emit;
  egi_value_id y = egi_gradient_output(gradient, 0), taken = 0;
  unsigned n_inputs = gradient->graph->nodes[gradient->node].n_inputs;
  for (unsigned i = 0; i < n_inputs; i++) {
    egi_value_id is_equal = egi_emit_binary(emit, EGI_OP_Equal, egi_gradient_input(gradient, i), y),
                 is_first = is_equal;
    if (taken != 0) is_first = egi_emit_binary(emit, EGI_OP_And, is_equal, egi_emit_unary(emit, EGI_OP_Not, taken));
    if (egi_gradient_wants(gradient, i)) egi_gradient_set(gradient, i, masked(gradient, is_first));
    taken = taken == 0 ? is_equal : egi_emit_binary(emit, EGI_OP_Or, taken, is_equal);
  }
  return EG_OK;
}

eg_status egi_gradient_max(egi_gradient *gradient) {
  return select_equal(gradient);
}

eg_status egi_gradient_min(egi_gradient *gradient) {
  return select_equal(gradient);
}

eg_status egi_gradient_clip(egi_gradient *gradient) {
  egi_value_id x = egi_gradient_input(gradient, 0), low = egi_gradient_input(gradient, 1);
  egi_value_id high = egi_gradient_input(gradient, 2), is_inside = 0;
  EG_TRY(egi_gradient_require(gradient, !egi_gradient_wants(gradient, 1) && !egi_gradient_wants(gradient, 2),
                              "the bounds of Clip have no gradient"));
  if (low != 0) is_inside = egi_emit_binary(gradient->emit, EGI_OP_GreaterOrEqual, x, low);
  if (high != 0) {
    egi_value_id is_below = egi_emit_binary(gradient->emit, EGI_OP_LessOrEqual, x, high);
    is_inside = is_inside == 0 ? is_below : egi_emit_binary(gradient->emit, EGI_OP_And, is_inside, is_below);
  }
  egi_gradient_set(gradient, 0, is_inside == 0 ? gradient->out_gradients[0] : masked(gradient, is_inside));
  return EG_OK;
}

eg_status egi_gradient_where(egi_gradient *gradient) {
  egi_value_id condition = egi_gradient_input(gradient, 0), dy = gradient->out_gradients[0];
  if (egi_gradient_wants(gradient, 1)) egi_gradient_set(gradient, 1, masked(gradient, condition));
  if (egi_gradient_wants(gradient, 2))
    egi_gradient_set(gradient, 2, where(gradient, condition, egi_gradient_number(gradient, 0.0, dy), dy));
  return EG_OK;
}
