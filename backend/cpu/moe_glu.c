/* The activations of engraft.MoE over expert-sorted rows: middle = act(gate) · (up + offset), with gate limited from
 * above and up on both sides where there is a limit (gpt-oss), and the gradient of it. In f64, but for silu in f32. */
#include <math.h>

#include "backend/cpu/moe.h"

static double sigmoid(double x) {
  return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

/* Value and slope. gelu: x·Φ(x); gelu_tanh: its approximation (Hendrycks and Gimpel, arXiv 1606.08415). */
static double activate(const egi_moe *moe, double x, double *out_slope) {
  static const double root = 0.7978845608028654, half_root = 0.7071067811865476, density = 0.3989422804014327;
  double s, t;
  switch (moe->activation) {
  case EGI_MOE_SILU:
    s = sigmoid(moe->alpha * x);
    *out_slope = s + moe->alpha * x * s * (1.0 - s);
    return x * s;
  case EGI_MOE_GELU:
    s = 0.5 * (1.0 + erf(x * half_root));
    *out_slope = s + x * density * exp(-0.5 * x * x);
    return x * s;
  case EGI_MOE_GELU_TANH:
    t = tanh(root * (x + 0.044715 * x * x * x));
    *out_slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044715 * x * x);
    return 0.5 * x * (1.0 + t);
  case EGI_MOE_RELU:
    *out_slope = x > 0.0 ? 1.0 : 0.0;
    return x > 0.0 ? x : x < 0.0 ? 0.0 : x;
  case EGI_MOE_SIGMOID:
    s = sigmoid(x);
    *out_slope = s * (1.0 - s);
    return s;
  case EGI_MOE_IDENTITY:
  case EGI_MOE_ACTIVATIONS:
    break;
  }
  *out_slope = 1.0;
  return x;
}

/* Columns of gate and up of element i. */
static void columns_of(const egi_moe_params *p, int64_t i, int64_t *out_gate, int64_t *out_up) {
  bool is_interleaved = p->moe.form == EGI_MOE_INTERLEAVED;
  *out_gate = is_interleaved ? 2 * i : i;
  *out_up = is_interleaved ? 2 * i + 1 : p->inner + i;
}

static double limited(double x, double low, double high) {
  return x < low ? low : x > high ? high : x;
}

static double get(const egi_moe_params *p, const char *row, int64_t i) {
  return egi_real_get(row + (size_t)i * p->element_bytes, p->dtype);
}

static void set(const egi_moe_params *p, char *row, int64_t i, double value) {
  egi_real_set(row + (size_t)i * p->element_bytes, p->dtype, value);
}

static void activate_row(const egi_moe_params *p, const char *saved, char *middle) {
  double limit = p->moe.limit > 0.0 ? p->moe.limit : HUGE_VAL, slope;
  bool is_gated = p->moe.form != EGI_MOE_UNGATED;
  for (int64_t i = 0; i < p->inner; i++) {
    int64_t gate, up;
    columns_of(p, i, &gate, &up);
    double value = activate(&p->moe, limited(get(p, saved, gate), -HUGE_VAL, limit), &slope);
    if (is_gated) value *= limited(get(p, saved, up), -limit, limit) + p->moe.offset;
    set(p, middle, i, value);
  }
}

/* The case of most models without a call for each element. */
static bool is_plain_silu(const egi_moe_params *p) {
  const egi_moe *moe = &p->moe;
  bool stands_apart = moe->form == EGI_MOE_CONCATENATED || moe->form == EGI_MOE_SEPARATE;
  return p->dtype == EG_DTYPE_F32 && moe->activation == EGI_MOE_SILU && stands_apart && !(moe->limit > 0.0) &&
         !(moe->alpha < 1.0) && !(moe->alpha > 1.0) && !(moe->offset < 0.0) && !(moe->offset > 0.0);
}

static void silu_row(const egi_moe_params *p, const float *saved, float *middle) {
  const egi_isa_elementwise *loops = p->isa->elementwise;
  loops->unary[EGI_UNARY_SIGMOID](middle, saved, p->inner);
  loops->binary[EGI_BINARY_MUL][EGI_BROADCAST_NONE](middle, middle, saved, p->inner);
  loops->binary[EGI_BINARY_MUL][EGI_BROADCAST_NONE](middle, middle, saved + p->inner, p->inner);
}

static void gradient_row(const egi_moe_params *p, const char *saved, const char *extra, char *change) {
  double limit = p->moe.limit > 0.0 ? p->moe.limit : HUGE_VAL, slope;
  bool is_gated = p->moe.form != EGI_MOE_UNGATED;
  for (int64_t i = 0; i < p->inner; i++) {
    int64_t gate, up;
    columns_of(p, i, &gate, &up);
    double x = get(p, saved, gate), dy = get(p, extra, i);
    double value = activate(&p->moe, limited(x, -HUGE_VAL, limit), &slope), factor = 1.0;
    if (is_gated) {
      double u = get(p, saved, up);
      factor = limited(u, -limit, limit) + p->moe.offset;
      set(p, change, up, u < -limit || u > limit ? 0.0 : dy * value);
    }
    set(p, change, gate, x > limit ? 0.0 : dy * factor * slope);
  }
}

typedef struct glu_run {
  const egi_moe_run *run;
  bool is_gradient;
} glu_run;

static void row_task(void *argument, size_t task, size_t worker) {
  const glu_run *r = argument;
  const egi_moe_params *p = r->run->p;
  int64_t first = (int64_t)task * EGI_MOE_TASK_ROWS;
  (void)worker;
  for (int64_t row = first; row < first + EGI_MOE_TASK_ROWS && row < p->n_rows; row++) {
    const char *saved = egi_moe_at(p, r->run->saved, row * p->hidden);
    char *middle = egi_moe_at(p, r->run->middle, row * p->inner);
    if (r->is_gradient)
      gradient_row(p, saved, egi_moe_at(p, r->run->extra, row * p->inner),
                   egi_moe_at(p, r->run->change, row * p->hidden));
    else if (is_plain_silu(p))
      silu_row(p, (const float *)(const void *)saved, (float *)(void *)middle);
    else
      activate_row(p, saved, middle);
  }
}

static void run_rows(const egi_moe_run *run, bool is_gradient) {
  glu_run r = {run, is_gradient};
  egi_pool_run(run->call->pool, (size_t)((run->p->n_rows + EGI_MOE_TASK_ROWS - 1) / EGI_MOE_TASK_ROWS), row_task, &r);
}

void egi_moe_activate(const egi_moe_run *run) {
  run_rows(run, false);
}

void egi_moe_activate_gradient(const egi_moe_run *run) {
  run_rows(run, true);
}
