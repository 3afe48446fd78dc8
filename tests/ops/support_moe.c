/* Conformance cases of engraft.MoE: the sums written out in doubles. */
#include "support_ops.h"

#include <math.h>

#include "graph/moe.h"

enum { PLAIN_LOGITS, TIED_LOGITS, ONE_TAKES_ALL };

typedef struct setting {
  int64_t tokens, width, inner, n_experts, top_k;
  egi_moe_form form;
  egi_moe_activation activation;
  double alpha, limit, offset;
  bool is_sigmoid, is_after, is_normalised;
  double scale;
  int64_t groups, top_groups;
  bool is_group_best, has_correction, has_biases, is_stacked, is_transposed;
  int64_t bits, block;
  bool has_zeros;
  int logits;
} setting;

static const setting settings[] = {
    /* T, H, I, E, k */
    {5, 6, 4, 4, 2, .is_normalised = true, .is_stacked = true},
    {7, 3, 5, 4, 1, .is_stacked = true, .is_transposed = true, .logits = TIED_LOGITS},
    {3, 4, 3, 3, 3, .form = EGI_MOE_SEPARATE, .is_normalised = true, .has_biases = true},
    {6, 5, 3, 4, 2, .form = EGI_MOE_INTERLEAVED, .alpha = 1.702, .limit = 0.7, .offset = 1.0, .is_after = true,
     .has_biases = true, .is_stacked = true, .is_transposed = true},
    {6, 4, 3, 8, 3, .is_sigmoid = true, .is_normalised = true, .scale = 2.5, .groups = 4, .top_groups = 2,
     .has_correction = true, .is_stacked = true},
    {6, 4, 3, 8, 3, .scale = 1.5, .groups = 4, .top_groups = 2, .is_group_best = true, .is_stacked = true},
    {6, 4, 3, 5, 2, .form = EGI_MOE_UNGATED, .activation = EGI_MOE_GELU, .is_sigmoid = true, .is_after = true,
     .has_biases = true},
    {67, 2, 1, 3, 1, .form = EGI_MOE_UNGATED, .activation = EGI_MOE_GELU_TANH, .is_stacked = true,
     .logits = ONE_TAKES_ALL},
    {4, 4, 3, 3, 2, .form = EGI_MOE_SEPARATE, .activation = EGI_MOE_RELU, .is_transposed = true, .is_stacked = true},
    {4, 4, 3, 3, 2, .activation = EGI_MOE_SIGMOID, .is_stacked = true},
    {4, 4, 3, 3, 2, .activation = EGI_MOE_IDENTITY, .has_biases = true, .is_stacked = true},
    {1, 5, 3, 1, 1, .is_stacked = true},
    {0, 5, 3, 4, 2, .is_stacked = true},
    {2, 100, 2, 2, 1, .is_normalised = true, .is_stacked = true},
    {5, 6, 8, 4, 2, .bits = 4, .block = 2, .is_stacked = true, .is_normalised = true},
    {5, 6, 8, 4, 2, .bits = 4, .block = 2, .has_zeros = true, .is_stacked = true, .has_biases = true},
    {5, 7, 6, 4, 2, .bits = 8, .form = EGI_MOE_SEPARATE},
    {5, 8, 4, 4, 2, .bits = 2, .block = 4, .has_zeros = true, .is_stacked = true, .form = EGI_MOE_INTERLEAVED},
};

typedef struct reference {
  const setting *s;
  const ops_tensor *inputs;
  uint32_t first[EGI_MOE_ROLES];
} reference;

static int64_t gate_rows(const setting *s) {
  return s->form == EGI_MOE_CONCATENATED || s->form == EGI_MOE_INTERLEAVED ? 2 * s->inner : s->inner;
}

static int64_t hidden_columns(const setting *s) {
  return s->form == EGI_MOE_UNGATED ? s->inner : 2 * s->inner;
}

/* ---- the sums ------------------------------------------------------------------------------------------------- */

static double element(const reference *r, egi_moe_role role, int64_t e, int64_t index, int64_t size) {
  return r->s->is_stacked ? r->inputs[r->first[role]].values[e * size + index]
                          : r->inputs[r->first[role] + (uint32_t)e].values[index];
}

static unsigned code(const reference *r, egi_moe_role role, int64_t e, int64_t row, int64_t i, int64_t row_bytes,
                     int64_t size) {
  int64_t bit = i * r->s->bits;
  unsigned byte = (unsigned)element(r, role, e, row * row_bytes + bit / 8, size);
  return byte >> (unsigned)(bit % 8) & ((1u << (unsigned)r->s->bits) - 1u);
}

static double matrix(const reference *r, egi_moe_role role, int64_t e, const int64_t size[2], const int64_t at[2]) {
  const setting *s = r->s;
  if (s->bits == 0)
    return element(r, role, e, s->is_transposed ? at[1] * size[0] + at[0] : at[0] * size[1] + at[1], size[0] * size[1]);
  int64_t block = s->block > 0 ? s->block : size[1], blocks = (size[1] + block - 1) / block;
  int64_t row_bytes = (size[1] * s->bits + 7) / 8, zero_bytes = (blocks * s->bits + 7) / 8, b = at[1] / block;
  egi_moe_role scales = (egi_moe_role)(EGI_MOE_GATE_SCALES + role), zeros = (egi_moe_role)(EGI_MOE_GATE_ZEROS + role);
  double zero = s->has_zeros ? (double)code(r, zeros, e, at[0], b, zero_bytes, size[0] * zero_bytes)
                             : (double)(1 << (s->bits - 1));
  return ((double)code(r, role, e, at[0], at[1], row_bytes, size[0] * row_bytes) - zero) *
         element(r, scales, e, at[0] * blocks + b, size[0] * blocks);
}

static void multiply(const reference *r, egi_moe_role role, int64_t e, const int64_t size[2], const double *x,
                     double *y) {
  for (int64_t n = 0; n < size[0]; n++) {
    y[n] = r->s->has_biases ? element(r, (egi_moe_role)(role + 1), e, n, size[0]) : 0.0;
    for (int64_t k = 0; k < size[1]; k++) y[n] += matrix(r, role, e, size, (const int64_t[2]){n, k}) * x[k];
  }
}

static double activate(const setting *s, double x) {
  double alpha = s->alpha > 0.0 ? s->alpha : 1.0;
  switch (s->activation) {
  case EGI_MOE_GELU:
    return 0.5 * x * (1.0 + erf(x / sqrt(2.0)));
  case EGI_MOE_GELU_TANH:
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * pow(x, 3.0))));
  case EGI_MOE_RELU:
    return x > 0.0 ? x : 0.0;
  case EGI_MOE_SIGMOID:
    return 1.0 / (1.0 + exp(-x));
  case EGI_MOE_IDENTITY:
    return x;
  default:
    return x / (1.0 + exp(-alpha * x));
  }
}

static void run_expert(const reference *r, int64_t e, const double *x, double *hidden, double *y) {
  const setting *s = r->s;
  double *middle = hidden + hidden_columns(s), limit = s->limit > 0.0 ? s->limit : HUGE_VAL;
  multiply(r, EGI_MOE_GATE, e, (const int64_t[2]){gate_rows(s), s->width}, x, hidden);
  if (s->form == EGI_MOE_SEPARATE)
    multiply(r, EGI_MOE_UP, e, (const int64_t[2]){s->inner, s->width}, x, hidden + s->inner);
  for (int64_t i = 0; i < s->inner; i++) {
    double gate = hidden[s->form == EGI_MOE_INTERLEAVED ? 2 * i : i];
    middle[i] = activate(s, fmin(gate, limit));
    if (s->form == EGI_MOE_UNGATED) continue;
    double up = hidden[s->form == EGI_MOE_INTERLEAVED ? 2 * i + 1 : s->inner + i];
    middle[i] *= fmax(-limit, fmin(up, limit)) + s->offset;
  }
  multiply(r, EGI_MOE_DOWN, e, (const int64_t[2]){s->width, s->inner}, middle, y);
}

static void score(bool is_sigmoid, double *values, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; i++) sum += values[i] = is_sigmoid ? 1.0 / (1.0 + exp(-values[i])) : exp(values[i]);
  for (int64_t i = 0; i < n && !is_sigmoid; i++) values[i] /= sum;
}

static int64_t largest(const double *values, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; i++)
    if (values[i] > values[best]) best = i;
  return best;
}

static void leave_groups(const setting *s, double *choice) {
  double totals[8];
  int64_t size = s->n_experts / s->groups;
  for (int64_t g = 0; g < s->groups; g++) {
    double copy[8];
    memcpy(copy, choice + g * size, sizeof(double) * (size_t)size);
    int64_t best = largest(copy, size);
    totals[g] = copy[best];
    copy[best] = -1e9;
    if (!s->is_group_best) totals[g] += copy[largest(copy, size)];
  }
  for (int64_t n = 0; n < s->groups; n++) {
    int64_t best = largest(totals, s->groups);
    totals[best] = -1e9;
    for (int64_t i = 0; i < size && n >= s->top_groups; i++) choice[best * size + i] = 0.0;
  }
}

static void route(const reference *r, const double *logits, int64_t *chosen, double *weights) {
  const setting *s = r->s;
  double scores[8], choice[8], sum = 0.0;
  memcpy(scores, logits, sizeof(double) * (size_t)s->n_experts);
  if (!s->is_after) score(s->is_sigmoid, scores, s->n_experts);
  for (int64_t e = 0; e < s->n_experts; e++)
    choice[e] = scores[e] + (s->has_correction ? r->inputs[EGI_MOE_CORRECTION].values[e] : 0.0);
  if (s->groups > 1) leave_groups(s, choice);
  for (int64_t j = 0; j < s->top_k; j++) {
    chosen[j] = largest(choice, s->n_experts);
    choice[chosen[j]] = -1e9;
    weights[j] = scores[chosen[j]];
  }
  if (s->is_after) score(s->is_sigmoid, weights, s->top_k);
  for (int64_t j = 0; j < s->top_k; j++) sum += weights[j];
  for (int64_t j = 0; j < s->top_k; j++)
    weights[j] *= (s->scale > 0.0 ? s->scale : 1.0) / (s->is_normalised ? sum : 1.0);
}

static void run(const reference *r, double *y) {
  const setting *s = r->s;
  int64_t chosen[8];
  double weights[8], hidden[64], out[256];
  for (int64_t t = 0; t < s->tokens; t++) {
    route(r, r->inputs[EGI_MOE_LOGITS].values + t * s->n_experts, chosen, weights);
    for (int64_t i = 0; i < s->width; i++) y[t * s->width + i] = 0.0;
    for (int64_t j = 0; j < s->top_k; j++) {
      run_expert(r, chosen[j], r->inputs[EGI_MOE_X].values + t * s->width, hidden, out);
      for (int64_t i = 0; i < s->width; i++) y[t * s->width + i] += weights[j] * out[i];
    }
  }
}

/* ---- the cases ------------------------------------------------------------------------------------------------ */

static void add_role(ops_case *c, const setting *s, reference *r, egi_moe_role role, const ops_tensor *shape,
                     int64_t *roles) {
  ops_tensor stack = *shape;
  r->first[role] = c->n_inputs;
  roles[role] = s->is_stacked ? 1 : s->n_experts;
  for (int i = stack.rank; i > 0; i--) stack.dims[i] = stack.dims[i - 1];
  stack.dims[0] = s->n_experts;
  stack.rank++;
  for (int64_t i = 0; i < roles[role]; i++) {
    const ops_tensor *form = s->is_stacked ? &stack : shape;
    ops_tensor *in = ops_add_input(c, form->dtype, form->rank, form->dims);
    if (form->dtype == EG_DTYPE_U8)
      ops_fill_uniform(in, 0.0, 255.0, c->n_inputs);
    else
      ops_fill_uniform(in, s->bits > 0 ? 0.02 : -1.0, s->bits > 0 ? 0.2 : 1.0, c->n_inputs);
  }
}

static void add_matrix(ops_case *c, const setting *s, reference *r, egi_moe_role role, const int64_t size[2],
                       int64_t *roles) {
  eg_dtype dtype = c->inputs[0].dtype;
  int64_t n = size[0], k = size[1];
  ops_tensor plain = {.dtype = dtype, .rank = 2, .dims = {s->is_transposed ? k : n, s->is_transposed ? n : k}};
  ops_tensor packed = {.dtype = EG_DTYPE_U8, .rank = 2, .dims = {n, (k * s->bits + 7) / 8}};
  ops_tensor bias = {.dtype = dtype, .rank = 1, .dims = {n}};
  add_role(c, s, r, role, s->bits > 0 ? &packed : &plain, roles);
  if (s->has_biases) add_role(c, s, r, (egi_moe_role)(role + 1), &bias, roles);
}

static void add_scales(ops_case *c, const setting *s, reference *r, egi_moe_role role, const int64_t size[2],
                       int64_t *roles) {
  int64_t block = s->block > 0 ? s->block : size[1], blocks = (size[1] + block - 1) / block;
  ops_tensor scales = {.dtype = c->inputs[0].dtype, .rank = 2, .dims = {size[0], blocks}};
  ops_tensor zeros = {.dtype = EG_DTYPE_U8, .rank = 2, .dims = {size[0], (blocks * s->bits + 7) / 8}};
  add_role(c, s, r, (egi_moe_role)(EGI_MOE_GATE_SCALES + role), &scales, roles);
  if (s->has_zeros) add_role(c, s, r, (egi_moe_role)(EGI_MOE_GATE_ZEROS + role), &zeros, roles);
}

static void add_attributes(ops_case *c, const setting *s, const int64_t *roles) {
  static const int64_t transposed[3] = {1, 1, 1};
  ops_add_attribute(c, egi_attribute_int("experts", s->n_experts));
  ops_add_attribute(c, egi_attribute_int("top_k", s->top_k));
  ops_add_attribute(c, egi_attribute_string("scoring", s->is_sigmoid ? "sigmoid" : "softmax"));
  ops_add_attribute(c, egi_attribute_string("order", s->is_after ? "after" : "before"));
  ops_add_attribute(c, egi_attribute_int("normalise", s->is_normalised));
  if (s->scale > 0.0) ops_add_attribute(c, egi_attribute_float("routed_scale", (float)s->scale));
  if (s->groups > 0) ops_add_attribute(c, egi_attribute_int("groups", s->groups));
  if (s->groups > 0) ops_add_attribute(c, egi_attribute_int("top_groups", s->top_groups));
  if (s->is_group_best) ops_add_attribute(c, egi_attribute_string("group_score", "best"));
  ops_add_attribute(c, egi_attribute_string("activation", egi_moe_activation_name(s->activation)));
  ops_add_attribute(c, egi_attribute_string("gate_up", egi_moe_form_name(s->form)));
  if (s->alpha > 0.0) ops_add_attribute(c, egi_attribute_float("alpha", (float)s->alpha));
  if (s->limit > 0.0) ops_add_attribute(c, egi_attribute_float("limit", (float)s->limit));
  if (s->offset > 0.0) ops_add_attribute(c, egi_attribute_float("offset", (float)s->offset));
  ops_add_attribute(c, egi_attribute_ints("roles", roles, EGI_MOE_ROLES));
  if (s->is_transposed) ops_add_attribute(c, egi_attribute_ints("transposed", transposed, 3));
  if (s->bits > 0) ops_add_attribute(c, egi_attribute_string("storage", "nbits"));
  if (s->bits > 0) ops_add_attribute(c, egi_attribute_int("bits", s->bits));
  if (s->block > 0) ops_add_attribute(c, egi_attribute_int("block_size", s->block));
}

static void fill_logits(const setting *s, ops_tensor *logits) {
  ops_fill_uniform(logits, -3.0, 3.0, 2);
  for (int64_t i = 0; i < ops_count(logits); i++) {
    if (s->logits == TIED_LOGITS) logits->values[i] = i % 2 == 0 ? 1.0 : 0.5;
    if (s->logits == ONE_TAKES_ALL)
      logits->values[i] += i % s->n_experts == 2 ? 9.0 : i % s->n_experts == 1 ? -9.0 : 0.0;
  }
}

static void add_inputs(ops_case *c, const setting *s, eg_dtype dtype, reference *r, int64_t *roles) {
  const int64_t sizes[3][2] = {{gate_rows(s), s->width}, {s->inner, s->width}, {s->width, s->inner}};
  ops_fill_uniform(ops_add_input(c, dtype, 2, (int64_t[]){s->tokens, s->width}), -1.0, 1.0, 1);
  fill_logits(s, ops_add_input(c, dtype, 2, (int64_t[]){s->tokens, s->n_experts}));
  if (s->has_correction)
    ops_fill_uniform(ops_add_input(c, dtype, 1, (int64_t[]){s->n_experts}), 0.0, 0.5, 3);
  else
    ops_add_absent(c);
  for (int i = 0; i < 3; i++)
    if (i != 1 || s->form == EGI_MOE_SEPARATE) add_matrix(c, s, r, (egi_moe_role)(2 * i), sizes[i], roles);
  for (int i = 0; i < 3 && s->bits > 0; i++)
    if (i != 1 || s->form == EGI_MOE_SEPARATE) add_scales(c, s, r, (egi_moe_role)(2 * i), sizes[i], roles);
  add_attributes(c, s, roles);
  c->absolute += dtype == EG_DTYPE_F64 ? 1e-6 : 2e-4;
  if (dtype == EG_DTYPE_F32) c->relative += 2e-5;
  r->inputs = c->inputs;
}

static const eg_dtype types[] = {EG_DTYPE_F64, EG_DTYPE_F32};

void ops_case_moe(void **state, egi_op op) {
  for (size_t i = 0; i < EGI_COUNT(settings) * 2; i++) {
    const setting *s = &settings[i / 2];
    ops_case c;
    reference r = {.s = s};
    int64_t roles[EGI_MOE_ROLES] = {0};
    ops_begin(&c, state, op, types[i % 2]);
    add_inputs(&c, s, types[i % 2], &r, roles);
    ops_tensor *y = ops_add_output(&c, types[i % 2], 2, (int64_t[]){s->tokens, s->width});
    run(&r, y->values);
    ops_check(&c);
    ops_end(&c);
  }
}
