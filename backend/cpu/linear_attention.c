/* LinearAttention (operator version 27) and its gradient, as the recurrence of its definition says: state S [dk, dv] in
 * f64, P = diag(exp g) · S; S = P + beta · k · (v - Pᵀk)ᵀ for the delta rules, P + k · vᵀ for the others; o = scale ·
 * Sᵀq. Forward: one task for each batch element and key head. Gradient: these one after the other, the states of all
 * steps kept, sums in the order of heads and of falling steps. Nothing depends on the number of threads. */
#include <math.h>

#include "backend/cpu/narrow.h"
#include "backend/cpu/strided.h"

/* Inputs of both operators; the gradient has dY and d present_state behind them. */
enum { QUERY, KEY, VALUE, PAST, DECAY, BETA, RESULT, PRESENT };

typedef struct linear_params {
  int64_t batch, steps, q_heads, heads, dk, dv;
  int64_t n_decay, n_beta; /* decays of a head: 0, 1 or dk; betas of a step: 0, 1 or heads */
  bool is_delta;
  double scale;
} linear_params;

static eg_status fail(const egi_kernel_plan *plan, const char *reason) {
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%s", reason);
}

static eg_status read_rule(const egi_kernel_plan *plan, linear_params *p) {
  const egi_tensor *in = plan->inputs;
  const char *rule = egi_node_string(egi_plan_node(plan), "update_rule", "gated_delta");
  bool is_gated = strcmp(rule, "gated") == 0 || strcmp(rule, "gated_delta") == 0;
  p->is_delta = strcmp(rule, "delta") == 0 || strcmp(rule, "gated_delta") == 0;
  if (!is_gated && !p->is_delta && strcmp(rule, "linear") != 0) return fail(plan, "its update_rule is not known");
  if ((is_gated && !egi_plan_has_input(plan, DECAY)) || (p->is_delta && !egi_plan_has_input(plan, BETA)))
    return fail(plan, "its update_rule needs an input that is missing");
  if (is_gated) p->n_decay = in[DECAY].dims[2] / p->heads;
  if (is_gated && (in[DECAY].dims[2] % p->heads != 0 || (p->n_decay != 1 && p->n_decay != p->dk)))
    return fail(plan, "decay is neither for each head nor for each key dimension");
  if (p->is_delta) p->n_beta = in[BETA].dims[2];
  if (p->is_delta && p->n_beta != 1 && p->n_beta != p->heads) return fail(plan, "beta does not fit the heads");
  return EG_OK;
}

static eg_status prepare(egi_kernel_plan *plan, linear_params **out_params) {
  const egi_tensor *in = plan->inputs;
  const egi_node *node = egi_plan_node(plan);
  linear_params *p = EGI_NEW(plan->arena, linear_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  if (!egi_dtype_is_float(in[0].dtype) || egi_dtype_bits(in[0].dtype) < 16) return egi_fail_types(plan);
  p->batch = in[QUERY].dims[0];
  p->steps = in[QUERY].dims[1];
  p->q_heads = egi_node_int(node, "q_num_heads", 0); /* the shape rule saw that heads and sizes fit */
  p->heads = egi_node_int(node, "kv_num_heads", 0);
  p->dk = in[KEY].dims[2] / p->heads;
  p->dv = in[VALUE].dims[2] / p->heads;
  p->scale = (double)egi_node_float(node, "scale", 0.0f);
  if (!(p->scale > 0.0) && !(p->scale < 0.0)) p->scale = 1.0 / sqrt((double)p->dk);
  EG_TRY(read_rule(plan, p));
  plan->params = p;
  *out_params = p;
  return EG_OK;
}

static eg_status set_workspace(egi_kernel_plan *plan, int64_t n_states, const linear_params *p, int64_t n_more) {
  size_t bytes = sizeof(double);
  bool is_sound = egi_size_multiply(bytes, (size_t)(p->dk * p->dv), &bytes) &&
                  egi_size_multiply(bytes, (size_t)n_states, &bytes) &&
                  egi_size_add(bytes, (size_t)n_more * sizeof(double), &bytes);
  plan->workspace_bytes = bytes;
  return is_sound ? EG_OK : fail(plan, "its states are too large");
}

eg_status egi_cpu_prepare_linear_attention(egi_kernel_plan *plan) {
  linear_params *p;
  EG_TRY(prepare(plan, &p));
  return set_workspace(plan, p->batch * p->heads, p, p->batch * p->heads * p->dv);
}

eg_status egi_cpu_prepare_linear_attention_grad(egi_kernel_plan *plan) {
  linear_params *p;
  EG_TRY(prepare(plan, &p));
  return set_workspace(plan, p->steps + 3, p, 2 * p->dv);
}

/* ---- one step ------------------------------------------------------------------------------------------------- */

typedef struct linear_run {
  const linear_params *p;
  const egi_tensor *in, *out;
  unsigned n_in, n_out;
  double *workspace;
} linear_run;

/* A step of a key head. */
typedef struct place {
  int64_t b, t, h; /* batch element, step, head */
} place;

static int64_t row(const linear_params *p, int64_t b, int64_t t, int64_t width) {
  return (b * p->steps + t) * width;
}

static double decay_of(const linear_run *r, place at, int64_t i) {
  const linear_params *p = r->p;
  if (p->n_decay == 0) return 1.0;
  int64_t index = row(p, at.b, at.t, p->heads * p->n_decay) + at.h * p->n_decay + (p->n_decay > 1 ? i : 0);
  return exp(egi_float_get(&r->in[DECAY], index));
}

static int64_t beta_index(const linear_params *p, place at) {
  return row(p, at.b, at.t, p->n_beta) + (p->n_beta > 1 ? at.h : 0);
}

static double beta_of(const linear_run *r, place at) {
  return r->p->n_beta > 0 ? egi_float_get(&r->in[BETA], beta_index(r->p, at)) : 1.0;
}

static bool has_input(const linear_run *r, unsigned i) {
  return i < r->n_in && r->in[i].dtype != EG_DTYPE_UNDEFINED;
}

static void read_past(const linear_run *r, int64_t b, int64_t h, double *state) {
  int64_t size = r->p->dk * r->p->dv, first = (b * r->p->heads + h) * size;
  for (int64_t i = 0; i < size; i++) state[i] = has_input(r, PAST) ? egi_float_get(&r->in[PAST], first + i) : 0.0;
}

/* P and u = v - Pᵀk, or v. */
static void decay_state(const linear_run *r, place at, const double *state, double *decayed, double *u) {
  const linear_params *p = r->p;
  int64_t k_row = row(p, at.b, at.t, p->heads * p->dk) + at.h * p->dk,
          v_row = row(p, at.b, at.t, p->heads * p->dv) + at.h * p->dv;
  for (int64_t j = 0; j < p->dv; j++) u[j] = egi_float_get(&r->in[VALUE], v_row + j);
  for (int64_t i = 0; i < p->dk; i++) {
    double a = decay_of(r, at, i), k = egi_float_get(&r->in[KEY], k_row + i);
    for (int64_t j = 0; j < p->dv; j++) {
      decayed[i * p->dv + j] = a * state[i * p->dv + j];
      if (p->is_delta) u[j] -= decayed[i * p->dv + j] * k;
    }
  }
}

/* S = P + beta · k · uᵀ; `next` may be `decayed`. */
static void update_state(const linear_run *r, place at, const double *decayed, const double *u, double *next) {
  const linear_params *p = r->p;
  int64_t k_row = row(p, at.b, at.t, p->heads * p->dk) + at.h * p->dk;
  double beta = beta_of(r, at);
  for (int64_t i = 0; i < p->dk; i++) {
    double factor = beta * egi_float_get(&r->in[KEY], k_row + i);
    for (int64_t j = 0; j < p->dv; j++) next[i * p->dv + j] = decayed[i * p->dv + j] + factor * u[j];
  }
}

/* ---- forward -------------------------------------------------------------------------------------------------- */

static void write_outputs(const linear_run *r, place at, const double *state) {
  const linear_params *p = r->p;
  int64_t group = p->q_heads / p->heads;
  for (int64_t q = at.h * group; q < (at.h + 1) * group; q++) {
    int64_t q_row = row(p, at.b, at.t, p->q_heads * p->dk) + q * p->dk,
            o_row = row(p, at.b, at.t, p->q_heads * p->dv) + q * p->dv;
    for (int64_t j = 0; j < p->dv; j++) {
      double sum = 0.0;
      for (int64_t i = 0; i < p->dk; i++) sum += egi_float_get(&r->in[QUERY], q_row + i) * state[i * p->dv + j];
      egi_float_set(&r->out[0], o_row + j, p->scale * sum);
    }
  }
}

static void forward_task(void *argument, size_t task, size_t worker) {
  const linear_run *r = argument;
  const linear_params *p = r->p;
  (void)worker;
  int64_t b = (int64_t)task / p->heads, h = (int64_t)task % p->heads, size = p->dk * p->dv;
  double *state = r->workspace + (int64_t)task * size;
  double *u = r->workspace + p->batch * p->heads * size + (int64_t)task * p->dv;
  read_past(r, b, h, state);
  for (int64_t t = 0; t < p->steps; t++) {
    decay_state(r, (place){b, t, h}, state, state, u);
    update_state(r, (place){b, t, h}, state, u, state);
    write_outputs(r, (place){b, t, h}, state);
  }
  for (int64_t i = 0; i < size && r->n_out > 1 && r->out[1].dtype != EG_DTYPE_UNDEFINED; i++)
    egi_float_set(&r->out[1], (int64_t)task * size + i, state[i]);
}

static linear_run begin(const egi_kernel_call *call) {
  return (linear_run){call->params, call->inputs, call->outputs, call->n_inputs, call->n_outputs, call->workspace};
}

eg_status egi_cpu_run_linear_attention(eg_context *ctx, const egi_kernel_call *call) {
  linear_run r = begin(call);
  (void)ctx;
  egi_pool_run(call->pool, (size_t)(r.p->batch * r.p->heads), forward_task, &r);
  return EG_OK;
}

/* ---- gradient ------------------------------------------------------------------------------------------------- */

static bool wants(const linear_run *r, unsigned output) {
  return output < r->n_out && r->out[output].dtype != EG_DTYPE_UNDEFINED;
}

static void add_to(const linear_run *r, unsigned output, int64_t at, double value) {
  if (wants(r, output)) egi_float_set(&r->out[output], at, egi_float_get(&r->out[output], at) + value);
}

/* From dO: dQ, and what it adds to G = dS. */
static void output_gradient(const linear_run *r, place at, const double *state, double *g) {
  const linear_params *p = r->p;
  int64_t group = p->q_heads / p->heads;
  for (int64_t q = at.h * group; q < (at.h + 1) * group; q++) {
    int64_t q_row = row(p, at.b, at.t, p->q_heads * p->dk) + q * p->dk,
            o_row = row(p, at.b, at.t, p->q_heads * p->dv) + q * p->dv;
    for (int64_t i = 0; i < p->dk; i++) {
      double sum = 0.0, query = p->scale * egi_float_get(&r->in[QUERY], q_row + i);
      for (int64_t j = 0; j < p->dv; j++) {
        double dy = egi_float_get(&r->in[RESULT], o_row + j);
        sum += state[i * p->dv + j] * dy;
        g[i * p->dv + j] += query * dy;
      }
      add_to(r, QUERY, q_row + i, p->scale * sum);
    }
  }
}

/* From G: d beta, dK and du = beta · Gᵀk = dV. */
static void update_gradient(const linear_run *r, place at, const double *g, const double *u, double *du) {
  const linear_params *p = r->p;
  int64_t k_row = row(p, at.b, at.t, p->heads * p->dk) + at.h * p->dk,
          v_row = row(p, at.b, at.t, p->heads * p->dv) + at.h * p->dv;
  double beta = beta_of(r, at), d_beta = 0.0;
  for (int64_t j = 0; j < p->dv; j++) du[j] = 0.0;
  for (int64_t i = 0; i < p->dk; i++) {
    double k = egi_float_get(&r->in[KEY], k_row + i), gu = 0.0;
    for (int64_t j = 0; j < p->dv; j++) {
      gu += g[i * p->dv + j] * u[j];
      du[j] += beta * k * g[i * p->dv + j];
    }
    d_beta += k * gu;
    add_to(r, KEY, k_row + i, beta * gu);
  }
  for (int64_t j = 0; j < p->dv; j++) add_to(r, VALUE, v_row + j, du[j]);
  if (p->n_beta > 0) add_to(r, BETA, beta_index(p, at), d_beta);
}

/* Through u = v - Pᵀk and P = diag(a) · S: the rest of dK, d decay, and G of the step before. */
static void decay_gradient(const linear_run *r, place at, const double *decayed, const double *du, double *g) {
  const linear_params *p = r->p;
  int64_t k_row = row(p, at.b, at.t, p->heads * p->dk) + at.h * p->dk;
  for (int64_t i = 0; i < p->dk; i++) {
    double k = egi_float_get(&r->in[KEY], k_row + i), a = decay_of(r, at, i), dk = 0.0, d_decay = 0.0;
    for (int64_t j = 0; j < p->dv; j++) {
      double *cell = &g[i * p->dv + j];
      if (p->is_delta) {
        dk -= decayed[i * p->dv + j] * du[j];
        *cell -= k * du[j];
      }
      d_decay += *cell * decayed[i * p->dv + j]; /* d/dg of exp(g) · s is exp(g) · s itself */
      *cell *= a;
    }
    add_to(r, KEY, k_row + i, dk);
    int64_t index = row(p, at.b, at.t, p->heads * p->n_decay) + at.h * p->n_decay + (p->n_decay > 1 ? i : 0);
    if (p->n_decay > 0) add_to(r, DECAY, index, d_decay);
  }
}

static void gradient_of_head(const linear_run *r, int64_t b, int64_t h) {
  const linear_params *p = r->p;
  int64_t size = p->dk * p->dv, first = (b * p->heads + h) * size;
  double *states = r->workspace, *g = states + (p->steps + 1) * size, *decayed = g + size;
  double *u = decayed + size, *du = u + p->dv;
  read_past(r, b, h, states);
  for (int64_t t = 0; t < p->steps; t++) {
    decay_state(r, (place){b, t, h}, states + t * size, decayed, u);
    update_state(r, (place){b, t, h}, decayed, u, states + (t + 1) * size);
  }
  for (int64_t i = 0; i < size; i++) g[i] = has_input(r, PRESENT) ? egi_float_get(&r->in[PRESENT], first + i) : 0.0;
  for (int64_t t = p->steps; t-- > 0;) {
    output_gradient(r, (place){b, t, h}, states + (t + 1) * size, g);
    decay_state(r, (place){b, t, h}, states + t * size, decayed, u);
    update_gradient(r, (place){b, t, h}, g, u, du);
    decay_gradient(r, (place){b, t, h}, decayed, du, g);
  }
  for (int64_t i = 0; i < size; i++) add_to(r, PAST, first + i, g[i]);
}

eg_status egi_cpu_run_linear_attention_grad(eg_context *ctx, const egi_kernel_call *call) {
  linear_run r = begin(call);
  (void)ctx;
  for (unsigned i = 0; i < r.n_out; i++)
    for (int64_t k = 0, n = wants(&r, i) ? egi_tensor_count(&r.out[i]) : 0; k < n; k++)
      egi_float_set(&r.out[i], k, 0.0);
  for (int64_t b = 0; b < r.p->batch; b++)
    for (int64_t h = 0; h < r.p->heads; h++) gradient_of_head(&r, b, h);
  return EG_OK;
}
