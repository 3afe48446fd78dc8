/* Activations that exporters write out become one node each (Gelu, engraft.Swish), and gated ones engraft.GLU: the
 * activation of one value times another of the same shape, clamped and shifted as gpt-oss does. Precondition: inferred.
 * Formulas: Gelu-20, Swish-24, GLU variants (arXiv:2002.05202). */
#include "passes/rules.h"

#define NUMBER(name, number) name " = Constant <value_float = " number "> () "

/* 0.5 · x · e in any order, e = 1 + .. */
#define OF_ONE(form)                                                  \
  "(x) => (y) { " NUMBER("half", "0.5") NUMBER("one", "1.0") form     \
      "e = Add (t, one) h = Mul (x, half) y = Mul (h, e) }",          \
      "(x) => (y) { " NUMBER("half", "0.5") NUMBER("one", "1.0") form \
      "e = Add (t, one) h = Mul (x, e) y = Mul (h, half) }",          \
      "(x) => (y) { " NUMBER("half", "0.5") NUMBER("one", "1.0") form \
      "e = Add (t, one) h = Mul (e, half) y = Mul (x, h) }",          \
      "(x) => (y) { " NUMBER("half", "0.5") form "e = Mul (t, half) h = Add (e, half) y = Mul (x, h) }"

/* h + h · t with h = x / 2 */
#define AS_SUM(form) "(x) => (y) { " NUMBER("half", "0.5") form "h = Mul (x, half) e = Mul (h, t) y = Add (h, e) }"
#define INNER_ERF NUMBER("root", "0.70710678118654752") "s = Mul (x, root) t = Erf (s) "

static const char *const gelu_exact[] = {
    OF_ONE(INNER_ERF),
    AS_SUM(INNER_ERF),
};

/* u = sqrt(2/pi) · (x + 0.044715 x³) */
#define CUBIC NUMBER("c", "0.044715") NUMBER("three", "3.0") "p = Pow (x, three) q = Mul (p, c) i = Add (x, q) "
/* x · (1 + 0.044715 x²) */
#define SQUARE            \
  NUMBER("c", "0.044715") \
  NUMBER("two", "2.0") NUMBER("unit", "1.0") "p = Pow (x, two) q = Mul (p, c) j = Add (q, unit) "
#define ROOT NUMBER("root", "0.79788456080286536")
#define INNER_CUBIC CUBIC ROOT "u = Mul (i, root) t = Tanh (u) "
#define INNER_SQUARE SQUARE ROOT "i = Mul (x, j) u = Mul (i, root) t = Tanh (u) "
#define INNER_SCALED SQUARE ROOT "i = Mul (x, root) u = Mul (i, j) t = Tanh (u) "

static const char *const gelu_tanh[] = {
    OF_ONE(INNER_CUBIC),
    OF_ONE(INNER_SQUARE),
    OF_ONE(INNER_SCALED),
    AS_SUM(INNER_CUBIC),
    /* x · sigmoid(2u), which is the same */
    "(x) => (y) { " CUBIC NUMBER("root", "1.5957691216057308") "u = Mul (i, root) t = Sigmoid (u) y = Mul (x, t) }",
};

static const char *const swish[] = {
    "(x) => (y) { s = Sigmoid (x) y = Mul (x, s) }",
    "(x, alpha) => (y) { z = Mul (x, alpha) s = Sigmoid (z) y = Mul (x, s) }",
    "(x, divisor) => (y) { z = Div (x, divisor) s = Sigmoid (z) y = Mul (x, s) }",
    "(x) => (y) { " NUMBER("one", "1.0") "n = Neg (x) e = Exp (n) a = Add (e, one) y = Div (x, a) }",
    "(x) => (y) { " NUMBER("one", "1.0") "n = Neg (x) e = Exp (n) a = Add (e, one) s = Reciprocal (a) y = Mul (x, s) }",
};

/* act(gate) · up */
#define GATED(activation) "(gate, up) => (y) { a = " activation " (gate) y = Mul (a, up) }"
static const char *const gated[] = {
    GATED("engraft.Swish <alpha: float = @alpha>"),
    GATED("Gelu <approximate = \"none\">"),
    GATED("Gelu <approximate = \"tanh\">"),
    GATED("Relu"),
    GATED("Sigmoid"),
};
static const char *const activations[] = {"silu", "gelu", "gelu_tanh", "relu", "sigmoid"};

/* gate · up · sigmoid(gate) with the factors in another order */
static const char *const spread[] = {
    "(gate, up) => (y) { s = Sigmoid (gate) m = Mul (gate, up) y = Mul (m, s) }",
    "(gate, up) => (y) { s = Sigmoid (gate) m = Mul (s, up) y = Mul (gate, m) }",
};

/* gate and up cut off on the way in; the rest of the node stays. */
#define CLIP_GATE "g = Clip (gate, , limit) "
#define CLIP_BELOW "g = Clip (gate, lowest, limit) "
#define MIN_GATE "g = Min (gate, limit) "
#define GATE_MIN "g = Min (limit, gate) "
#define CLIP_UP "u = Clip (up, low, high) "
#define MIN_MAX_UP "v = Max (up, low) u = Min (v, high) "
#define MAX_MIN_UP "v = Min (up, high) u = Max (v, low) "
#define MOVED "m = Add (u, offset) a = engraft.Swish <alpha: float = @alpha> (g) y = Mul (a, m) "
#define STILL "a = engraft.Swish <alpha: float = @alpha> (g) y = Mul (a, u) "
#define WAYS(gate_names, gate_cut)                                                             \
  "(gate, up, " gate_names ", low, high, offset) => (y) { " gate_cut CLIP_UP MOVED "}",        \
      "(gate, up, " gate_names ", low, high, offset) => (y) { " gate_cut MIN_MAX_UP MOVED "}", \
      "(gate, up, " gate_names ", low, high, offset) => (y) { " gate_cut MAX_MIN_UP MOVED "}", \
      "(gate, up, " gate_names ", low, high) => (y) { " gate_cut CLIP_UP STILL "}"

static const char *const limited[] = {
    WAYS("limit", CLIP_GATE),
    WAYS("lowest, limit", CLIP_BELOW),
    WAYS("limit", MIN_GATE),
    WAYS("limit", GATE_MIN),
};

/* ---- checks ---------------------------------------------------------------------------------------------------- */

static bool check_float(egi_match *match) {
  return egi_dtype_is_float(egi_match_graph(match)->values[egi_match_value(match, "x")].dtype) ||
         egi_match_refuse(match, "the value is not of a floating type");
}

static bool check_swish(egi_match *match) {
  double alpha = 1.0;
  if (!check_float(match)) return false;
  if (egi_match_value(match, "alpha") != 0 && !egi_match_scalar(match, "alpha", &alpha))
    return egi_match_refuse(match, "what the value is multiplied with is not a constant number");
  double divisor = 1.0;
  if (egi_match_value(match, "divisor") != 0 && !(egi_match_scalar(match, "divisor", &divisor) && divisor != 0.0))
    return egi_match_refuse(match, "what the value is divided by is not a constant number");
  alpha /= divisor;
  if (!egi_same_shape(egi_match_graph(match), egi_match_value(match, "x"), egi_match_value(match, "y")))
    return egi_match_refuse(match, "the value is broadcast");
  const egi_attribute attribute = egi_attribute_float("alpha", (float)alpha);
  return egi_match_set(match, &attribute);
}

/* The value comes out of a product, through bias, cuts and layout: what a gate is made for. */
static bool is_projected(const egi_graph *graph, egi_value_id value) {
  for (unsigned depth = 0; depth < 16 && graph->values[value].kind == EGI_VALUE_NODE; depth++) {
    const egi_node *node = &graph->nodes[graph->values[value].producer];
    if (node->op == EGI_OP_MatMul || node->op == EGI_OP_Gemm || node->op == EGI_OP_Linear) return true;
    if (node->op == EGI_OP_Add && graph->values[node->inputs[0]].kind == EGI_VALUE_WEIGHT)
      value = node->inputs[1];
    else if (node->op == EGI_OP_Add || node->op == EGI_OP_Cast || (egi_op_get(node->op)->flags & EGI_OP_VIEW) != 0)
      value = node->inputs[0];
    else
      return false;
  }
  return false;
}

static bool check_gated(egi_match *match) {
  const egi_graph *graph = egi_match_graph(match);
  const char *activation = activations[egi_match_pattern(match)];
  egi_value_id gate = egi_match_value(match, "gate"), up = egi_match_value(match, "up");
  if (!egi_dtype_is_float(graph->values[gate].dtype))
    return egi_match_refuse(match, "the gate is not of a floating type");
  if (!egi_same_shape(graph, gate, up)) return egi_match_refuse(match, "gate and factor differ in shape");
  if (egi_match_source(match, "up") == egi_match_source(match, "a"))
    return egi_match_refuse(match, "the activation is squared");
  if (egi_match_pattern(match) >= 3 && (!is_projected(graph, gate) || !is_projected(graph, up)))
    return egi_match_refuse(match, "gate and factor are not both projections");
  const egi_attribute attribute = egi_attribute_string("activation", activation);
  return egi_match_set(match, &attribute);
}

static bool check_spread(egi_match *match) {
  return egi_same_shape(egi_match_graph(match), egi_match_value(match, "gate"), egi_match_value(match, "up")) ||
         egi_match_refuse(match, "gate and factor differ in shape");
}

/* A smallest value that cuts nothing off. */
static bool is_open(const egi_match *match) {
  double lowest = 0.0;
  if (egi_match_value(match, "lowest") == 0) return true;
  return egi_match_scalar(match, "lowest", &lowest) && lowest <= -65504.0;
}

static bool check_limited(egi_match *match) {
  const egi_graph *graph = egi_match_graph(match);
  double limit = 0.0, low = 0.0, high = 0.0, offset = 0.0;
  if (!egi_same_shape(graph, egi_match_value(match, "gate"), egi_match_value(match, "up")))
    return egi_match_refuse(match, "gate and factor differ in shape");
  if (!egi_match_scalar(match, "limit", &limit) || !egi_match_scalar(match, "low", &low) ||
      !egi_match_scalar(match, "high", &high) || !is_open(match))
    return egi_match_refuse(match, "a bound is not a constant number");
  if (limit != high || low != -high || !(limit > 0.0))
    return egi_match_refuse(match, "the bounds are not one number for gate and factor");
  if (egi_match_value(match, "offset") != 0 && !egi_match_scalar(match, "offset", &offset))
    return egi_match_refuse(match, "what is added is not a constant number");
  const egi_attribute attributes[2] = {egi_attribute_float("limit", (float)limit),
                                       egi_attribute_float("offset", (float)offset)};
  return egi_match_set(match, &attributes[0]) && egi_match_set(match, &attributes[1]);
}

#define UNARY(call) "(x) => (y) { y = " call " (x) }"
#define RULE(name, patterns, replacement, check) \
  { name, patterns, EGI_COUNT(patterns), replacement, check, false, NULL }

/* Activations first: the gated forms are written with them. */
static const egi_rule rules[] = {
    RULE("gelu", gelu_exact, UNARY("Gelu <approximate = \"none\">"), check_float),
    RULE("gelu_tanh", gelu_tanh, UNARY("Gelu <approximate = \"tanh\">"), check_float),
    RULE("swish", swish, UNARY("engraft.Swish <alpha: float = @alpha>"), check_swish),
    RULE("glu_spread", spread, "(gate, up) => (y) { y = engraft.GLU <activation = \"silu\", alpha = 1.0> (gate, up) }",
         check_spread),
    RULE("glu_with_limit", limited,
         "(gate, up) => (y) { y = engraft.GLU <activation = \"silu\", alpha: float = @alpha, limit: float = @limit, "
         "offset: float = @offset> (gate, up) }",
         check_limited),
    RULE("glu", gated,
         "(gate, up) => (y) { y = engraft.GLU <activation: string = @activation, alpha: float = @alpha> (gate, up) }",
         check_gated),
};

eg_status egi_pass_fuse_glu(egi_pass_run *run, egi_graph *graph) {
  return egi_rules_run(run, graph, rules, EGI_COUNT(rules));
}
