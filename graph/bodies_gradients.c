/* Bodies of the gradients of activations, softmax and norms: derivatives of the formulas in bodies_model.c and of ONNX
 * Gelu-20, Softmax-13, LogSoftmax-13, LayerNormalization-17 and RMSNormalization-23. Narrow floats are computed in
 * float32. */
#include "graph/bodies.h"

#include <string.h>

/* The names of the formal inputs, widened: "NAME_". */
static void widen(egi_body *body, const char *name, unsigned input) {
  char wide[32];
  size_t length = strlen(name);
  memcpy(wide, name, length);
  memcpy(wide + length, "_", 2);
  egi_body_widen(body, wide, name, input);
}

/* ---- activations ------------------------------------------------------------------------------------------------ */

/* one, half, two, and `root_` = the square root of 2/pi, in the type of `like`. Numbers that float32 would round are
 * made of whole ones. */
static void add_numbers(egi_body *body, const char *like) {
  egi_body_number(body, "one", 1.0, like);
  egi_body_number(body, "two", 2.0, like);
  egi_text_add(body->text, "half = Reciprocal (two)\nminus_one = Neg (one)\npi = Acos (minus_one)\n");
}

/* `share` = the normal distribution's integral up to x, `slope` = share + x · its density. */
static void add_gelu_slope(egi_body *body, const char *x) {
  add_numbers(body, x);
  egi_text_format(body->text,
                  "root_two = Sqrt (two)\ndeviations = Div (%s, root_two)\nerror = Erf (deviations)\n"
                  "whole_share = Add (error, one)\nshare = Mul (whole_share, half)\nsquare = Mul (%s, %s)\n"
                  "half_square = Mul (square, half)\nexponent = Neg (half_square)\nbell = Exp (exponent)\n"
                  "circle = Mul (two, pi)\nroot_circle = Sqrt (circle)\ndensity = Div (bell, root_circle)\n"
                  "rise = Mul (%s, density)\nslope = Add (share, rise)\n",
                  x, x, x, x);
}

/* `share` = (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x³), `slope` = share + x (1 - tanh(u)²) / 2 · u'. */
static void add_gelu_tanh_slope(egi_body *body, const char *x) {
  add_numbers(body, x);
  egi_body_number(body, "parts", 44715.0, x);
  egi_body_number(body, "million", 1000000.0, x);
  egi_body_number(body, "three", 3.0, x);
  egi_text_format(body->text,
                  "ratio = Div (two, pi)\nroot = Sqrt (ratio)\ncubic = Div (parts, million)\nsquare = Mul (%s, %s)\n"
                  "bent = Mul (square, cubic)\nbent_one = Add (bent, one)\nline = Mul (%s, bent_one)\n"
                  "angle = Mul (line, root)\nturned = Tanh (angle)\nwhole_share = Add (turned, one)\n"
                  "share = Mul (whole_share, half)\nturned_square = Mul (turned, turned)\n"
                  "rest = Sub (one, turned_square)\nbent_three = Mul (bent, three)\nsteep = Add (bent_three, one)\n"
                  "u_slope = Mul (steep, root)\nrest_slope = Mul (rest, u_slope)\nhalf_slope = Mul (rest_slope, half)\n"
                  "rise = Mul (%s, half_slope)\nslope = Add (share, rise)\n",
                  x, x, x, x);
}

/* `share` and `slope` of x · sigmoid(alpha · x). */
static void add_silu_slope(egi_body *body, const char *x) {
  egi_body_number(body, "alpha", (double)egi_node_float(body->node, "alpha", 1.0f), x);
  egi_body_number(body, "one", 1.0, x);
  egi_text_format(body->text,
                  "z = Mul (%s, alpha)\nshare = Sigmoid (z)\nrest = Sub (one, share)\nrest_z = Mul (rest, z)\n"
                  "steep = Add (rest_z, one)\nslope = Mul (share, steep)\n",
                  x);
}

/* value = act(x), slope = act'(x). */
static bool add_slope(egi_body *body, const char *activation, const char *x) {
  bool has_share = true;
  if (strcmp(activation, "silu") == 0)
    add_silu_slope(body, x);
  else if (strcmp(activation, "gelu") == 0)
    add_gelu_slope(body, x);
  else if (strcmp(activation, "gelu_tanh") == 0)
    add_gelu_tanh_slope(body, x);
  else
    has_share = false;
  if (has_share) {
    egi_text_format(body->text, "value = Mul (%s, share)\n", x);
    return true;
  }
  egi_body_number(body, "one", 1.0, x);
  if (strcmp(activation, "relu") == 0) {
    egi_body_number(body, "nothing", 0.0, x);
    egi_text_format(body->text,
                    "is_open = Greater (%s, nothing)\nvalue = Relu (%s)\nslope = Where (is_open, one, nothing)\n", x,
                    x);
  } else if (strcmp(activation, "sigmoid") == 0) {
    egi_text_format(body->text, "value = Sigmoid (%s)\nrest = Sub (one, value)\nslope = Mul (value, rest)\n", x);
  } else if (strcmp(activation, "identity") == 0) {
    egi_text_format(body->text, "value = Identity (%s)\nslope = Identity (one)\n", x);
  } else {
    return false;
  }
  return true;
}

bool egi_body_gelu_grad(egi_body *body) {
  bool is_tanh = strcmp(egi_node_string(body->node, "approximate", "none"), "tanh") == 0;
  widen(body, "x", 0);
  widen(body, "dy", 1);
  (void)add_slope(body, is_tanh ? "gelu_tanh" : "gelu", "x_");
  egi_text_add(body->text, "change = Mul (dy_, slope)\ndx = CastLike (change, x)\n");
  return true;
}

bool egi_body_swish_grad(egi_body *body) {
  widen(body, "x", 0);
  widen(body, "dy", 1);
  (void)add_slope(body, "silu", "x_");
  egi_text_add(body->text, "change = Mul (dy_, slope)\ndx = CastLike (change, x)\n");
  return true;
}

/* y = act(min(gate, limit)) · (clamp(up, ±limit) + offset); beyond the limits nothing changes. */
bool egi_body_glu_grad(egi_body *body) {
  double limit = (double)egi_node_float(body->node, "limit", 0.0f);
  widen(body, "gate", 0);
  widen(body, "up", 1);
  widen(body, "dy", 2);
  if (limit > 0.0) {
    egi_body_number(body, "high", limit, "gate_");
    egi_text_add(body->text,
                 "low = Neg (high)\ng = Min (gate_, high)\nraised = Max (up_, low)\nu = Min (raised, high)\n"
                 "is_gate_over = Greater (gate_, high)\nis_up_over = Greater (up_, high)\n"
                 "is_up_under = Less (up_, low)\nis_up_out = Or (is_up_over, is_up_under)\n");
  } else {
    egi_text_add(body->text, "g = Identity (gate_)\nu = Identity (up_)\n");
  }
  if (!add_slope(body, egi_node_string(body->node, "activation", "silu"), "g")) return false;
  egi_body_number(body, "offset", (double)egi_node_float(body->node, "offset", 0.0f), "up_");
  egi_text_add(body->text, "factor = Add (u, offset)\ndy_factor = Mul (dy_, factor)\n"
                           "gate_change = Mul (dy_factor, slope)\nup_change = Mul (dy_, value)\n");
  if (limit > 0.0) {
    egi_body_number(body, "zero", 0.0, "gate_");
    egi_text_add(body->text, "gate_kept = Where (is_gate_over, zero, gate_change)\n"
                             "up_kept = Where (is_up_out, zero, up_change)\n");
  } else {
    egi_text_add(body->text, "gate_kept = Identity (gate_change)\nup_kept = Identity (up_change)\n");
  }
  egi_text_add(body->text, "d_gate = CastLike (gate_kept, gate)\n");
  if (egi_body_wants(body, 1)) egi_text_add(body->text, "d_up = CastLike (up_kept, up)\n");
  return true;
}

/* ---- softmax ---------------------------------------------------------------------------------------------------- */

static void add_softmax_axis(egi_body *body) {
  int64_t axis = egi_node_int(body->node, "axis", -1);
  egi_body_integers(body, "axes", &axis, 1);
}

/* dX = Y · (dY - sum(Y · dY)) */
bool egi_body_softmax_grad(egi_body *body) {
  widen(body, "y", 0);
  widen(body, "dy", 1);
  add_softmax_axis(body);
  egi_text_add(body->text, "weighted = Mul (y_, dy_)\ntotal = ReduceSum (weighted, axes)\nrest = Sub (dy_, total)\n"
                           "change = Mul (y_, rest)\ndx = CastLike (change, y)\n");
  return true;
}

/* dX = dY - exp(Y) · sum(dY) */
bool egi_body_log_softmax_grad(egi_body *body) {
  widen(body, "y", 0);
  widen(body, "dy", 1);
  add_softmax_axis(body);
  egi_text_add(body->text, "p = Exp (y_)\ntotal = ReduceSum (dy_, axes)\npart = Mul (p, total)\n"
                           "change = Sub (dy_, part)\ndx = CastLike (change, y)\n");
  return true;
}

/* ---- norms ------------------------------------------------------------------------------------------------------ */

/* n = normalised rows, inverse = what they were multiplied by: d_scale and the gradient of n. */
static bool add_scale(egi_body *body, unsigned dy) {
  widen(body, "scale", 1);
  widen(body, "dy", dy);
  egi_text_add(body->text, "g = Mul (dy_, scale_)\n");
  if (!egi_body_wants(body, 1)) return true;
  egi_text_add(body->text, "dy_n = Mul (dy_, n)\n");
  if (!egi_body_sum_to(body, (egi_body_sum){"scale_sum", "dy_n", "scale", 0, 1})) return false;
  egi_text_add(body->text, "d_scale = CastLike (scale_sum, scale)\n");
  return true;
}

/* dX = (g - n · mean(g · n)) · inverse with g = dY · scale. */
bool egi_body_rms_normalization_grad(egi_body *body) {
  if (!egi_body_axes(body)) return false;
  widen(body, "x", 0);
  egi_body_number(body, "epsilon", (double)egi_node_float(body->node, "epsilon", 1e-5f), "x_");
  egi_text_add(body->text, "squares = Mul (x_, x_)\nvariance = ReduceMean (squares, axes)\n"
                           "shifted = Add (variance, epsilon)\nroot = Sqrt (shifted)\nn = Div (x_, root)\n");
  if (!add_scale(body, 2)) return false;
  egi_text_add(body->text, "g_n = Mul (g, n)\nslant = ReduceMean (g_n, axes)\nalong = Mul (n, slant)\n"
                           "across = Sub (g, along)\nchange = Div (across, root)\ndx = CastLike (change, x)\n");
  return true;
}

/* dX = (g - mean(g) - n · mean(g · n)) · inverse. */
bool egi_body_layer_normalization_grad(egi_body *body) {
  if (!egi_body_axes(body)) return false;
  widen(body, "x", 0);
  egi_text_add(body->text, "mean_ = CastLike (mean, x_)\ninverse_ = CastLike (deviation, x_)\nd = Sub (x_, mean_)\n"
                           "n = Mul (d, inverse_)\n");
  if (!add_scale(body, 4)) return false;
  egi_text_add(body->text, "g_n = Mul (g, n)\nslant = ReduceMean (g_n, axes)\nalong = Mul (n, slant)\n"
                           "level = ReduceMean (g, axes)\nraised = Sub (g, level)\nacross = Sub (raised, along)\n"
                           "change = Mul (across, inverse_)\ndx = CastLike (change, x)\n");
  if (!egi_body_wants(body, 2)) return true;
  if (!egi_body_sum_to(body, (egi_body_sum){"bias_sum", "dy_", "scale", 0, 1})) return false;
  egi_text_add(body->text, "d_bias = CastLike (bias_sum, scale)\n");
  return true;
}
