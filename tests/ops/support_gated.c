/* GLU, Swish and their gradients against their formulas; the gradients' references against finite differences. */
#include "support_ops.h"

#include <math.h>

static const char *const activations[] = {"silu", "gelu", "gelu_tanh", "relu", "sigmoid", "identity"};
enum { SILU, GELU, GELU_TANH, RELU, SIGMOID, IDENTITY, N_ACTIVATIONS };

static const eg_dtype float_types[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_F16, EG_DTYPE_BF16};

static const struct {
  int rank;
  int64_t dims[4];
} shapes[] = {{1, {0}}, {0, {0}}, {1, {1}}, {1, {255}}, {1, {257}}, {2, {33, 19}}, {3, {2, 37, 79}}};

typedef struct gated {
  int activation;
  double alpha, limit, offset;
} gated;

static double logistic(double x) {
  return 1.0 / (1.0 + exp(-x));
}

static double activated(const gated *g, double x) {
  switch (g->activation) {
  case SILU:
    return x * logistic(g->alpha * x);
  case GELU:
    return 0.5 * x * (1.0 + erf(x / sqrt(2.0)));
  case GELU_TANH:
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
  case RELU:
    return x < 0.0 ? 0.0 : x;
  case SIGMOID:
    return logistic(x);
  default:
    return x;
  }
}

/* Central differences suit the smooth ones; what is piecewise is written out. */
static double slope(const gated *g, double x) {
  const double root = sqrt(2.0 / acos(-1.0));
  double s = logistic(g->activation == SILU ? g->alpha * x : x), t;
  switch (g->activation) {
  case SILU:
    return s + g->alpha * x * s * (1.0 - s);
  case GELU:
    return 0.5 * (1.0 + erf(x / sqrt(2.0))) + x * exp(-0.5 * x * x) / sqrt(2.0 * acos(-1.0));
  case GELU_TANH:
    t = tanh(root * (x + 0.044715 * x * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044715 * x * x);
  case RELU:
    return x > 0.0;
  case SIGMOID:
    return s * (1.0 - s);
  default:
    return 1.0;
  }
}

static double low_cut(const gated *g, double x) {
  return g->limit > 0.0 && x > g->limit ? g->limit : x;
}

static double both_cut(const gated *g, double x) {
  return g->limit > 0.0 && x < -g->limit ? -g->limit : low_cut(g, x);
}

static double value_of(const gated *g, double gate, double up) {
  return activated(g, low_cut(g, gate)) * (both_cut(g, up) + g->offset);
}

static void add_attributes(ops_case *c, const gated *g, bool is_swish) {
  ops_add_attribute(c, egi_attribute_float("alpha", (float)g->alpha));
  if (is_swish) return;
  ops_add_attribute(c, egi_attribute_string("activation", activations[g->activation]));
  ops_add_attribute(c, egi_attribute_float("limit", (float)g->limit));
  ops_add_attribute(c, egi_attribute_float("offset", (float)g->offset));
}

static ops_tensor *add_input(ops_case *c, eg_dtype dtype, size_t shape, uint64_t seed) {
  ops_tensor *tensor = ops_add_input(c, dtype, shapes[shape].rank, shapes[shape].dims);
  ops_fill_uniform(tensor, -4.0, 4.0, seed);
  return tensor;
}

/* Half floats are computed in float32, whose last digits may round a subnormal half the other way. */
static void allow(ops_case *c, eg_dtype dtype) {
  if (dtype == EG_DTYPE_F64) c->absolute = 1e-13;
  if (dtype == EG_DTYPE_F32) c->absolute = 2e-5;
  if (dtype == EG_DTYPE_F16 && c->absolute < 1e-6) c->absolute = 1e-6;
}

static void check_forward(void **state, const gated *g, bool is_swish, eg_dtype dtype, size_t shape) {
  ops_case c;
  ops_begin(&c, state, is_swish ? EGI_OP_Swish : EGI_OP_GLU, dtype);
  ops_tensor *gate = add_input(&c, dtype, shape, 5), *up = is_swish ? NULL : add_input(&c, dtype, shape, 6);
  ops_tensor *out = ops_add_output(&c, dtype, shapes[shape].rank, shapes[shape].dims);
  add_attributes(&c, g, is_swish);
  for (int64_t i = 0; i < ops_count(out); i++)
    out->values[i] = ops_round(dtype, value_of(g, gate->values[i], up != NULL ? up->values[i] : 1.0));
  allow(&c, dtype);
  ops_check(&c);
  ops_end(&c);
}

static void check_backward(void **state, const gated *g, bool is_swish, eg_dtype dtype, size_t shape) {
  ops_case c;
  ops_begin(&c, state, is_swish ? EGI_OP_SwishGrad : EGI_OP_GLUGrad, dtype);
  ops_tensor *gate = add_input(&c, dtype, shape, 5), *up = is_swish ? NULL : add_input(&c, dtype, shape, 6);
  ops_tensor *dy = add_input(&c, dtype, shape, 7);
  ops_tensor *d_gate = ops_add_output(&c, dtype, shapes[shape].rank, shapes[shape].dims);
  ops_tensor *d_up = is_swish ? NULL : ops_add_output(&c, dtype, shapes[shape].rank, shapes[shape].dims);
  add_attributes(&c, g, is_swish);
  for (int64_t i = 0; i < ops_count(dy); i++) {
    double x = gate->values[i], u = up != NULL ? up->values[i] : 1.0;
    bool is_cut = g->limit > 0.0 && x > g->limit, is_clamped = g->limit > 0.0 && fabs(u) > g->limit;
    double for_gate = dy->values[i] * (both_cut(g, u) + g->offset) * slope(g, low_cut(g, x));
    d_gate->values[i] = ops_round(dtype, is_cut ? 0.0 : for_gate);
    if (d_up != NULL)
      d_up->values[i] = ops_round(dtype, is_clamped ? 0.0 : dy->values[i] * activated(g, low_cut(g, x)));
  }
  allow(&c, dtype);
  ops_check(&c);
  ops_end(&c);
}

static const gated forms[] = {{SILU, 1.0, 0.0, 0.0},      {SILU, 1.75, 2.5, 1.0}, {GELU, 1.0, 0.0, 0.0},
                              {GELU_TANH, 1.0, 0.0, 0.0}, {RELU, 1.0, 1.5, 0.5},  {SIGMOID, 1.0, 0.0, 0.0},
                              {IDENTITY, 1.0, 0.0, -1.0}};
static const gated swishes[] = {{SILU, 1.0, 0.0, 0.0}, {SILU, 1.75, 0.0, 0.0}};

typedef void (*checker)(void **state, const gated *g, bool is_swish, eg_dtype dtype, size_t shape);

static void check_all(void **state, checker check, bool is_swish) {
  const gated *list = is_swish ? swishes : forms;
  size_t n = is_swish ? EGI_COUNT(swishes) : EGI_COUNT(forms);
  for (size_t k = 0; k < n; k++)
    for (size_t t = 0; t < EGI_COUNT(float_types); t++)
      for (size_t s = 0; s < EGI_COUNT(shapes); s++) check(state, &list[k], is_swish, float_types[t], s);
}

void ops_case_glu(void **state, egi_op op) {
  (void)op;
  check_all(state, check_forward, false);
}

void ops_case_swish(void **state, egi_op op) {
  (void)op;
  check_all(state, check_forward, true);
}

/* The slopes written out here are those of the values. */
typedef struct differences {
  const gated *g;
  const ops_tensor *gate;
} differences;

static double sum_of_values(const void *context) {
  const differences *d = context;
  double sum = 0.0;
  for (int64_t i = 0; i < ops_count(d->gate); i++) sum += value_of(d->g, d->gate->values[i], 0.75);
  return sum;
}

static void check_slopes(void **state) {
  for (size_t k = 0; k < EGI_COUNT(forms); k++) {
    ops_case c;
    double gradient[19];
    const int64_t dims[1] = {19};
    ops_begin(&c, state, EGI_OP_GLU, EG_DTYPE_F64);
    ops_tensor *gate = ops_add_input(&c, EG_DTYPE_F64, 1, dims);
    ops_fill_uniform(gate, -4.0, 4.0, 11);
    differences d = {&forms[k], gate};
    for (int64_t i = 0; i < 19; i++) {
      bool is_cut = forms[k].limit > 0.0 && gate->values[i] > forms[k].limit;
      gradient[i] = is_cut ? 0.0 : slope(&forms[k], gate->values[i]) * (both_cut(&forms[k], 0.75) + forms[k].offset);
    }
    ops_check_gradient(gate, gradient, sum_of_values, &d);
    ops_end(&c);
  }
}

void ops_case_glu_grad(void **state, egi_op op) {
  (void)op;
  check_slopes(state);
  check_all(state, check_backward, false);
}

void ops_case_swish_grad(void **state, egi_op op) {
  (void)op;
  check_all(state, check_backward, true);
}
