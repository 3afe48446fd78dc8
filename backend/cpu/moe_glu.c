/* The activations of engraft.MoE over expert-sorted rows: middle = act(gate) · (up + offset), with gate limited from
 * above and up on both sides where there is a limit (gpt-oss). In f64, but for silu in f32. */
#include <math.h>

#include "backend/cpu/moe.h"

#define TASK_ROWS 64

static double sigmoid(double x) {
  return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

/* gelu: x·Φ(x); gelu_tanh: its approximation (Hendrycks and Gimpel, arXiv 1606.08415). */
static double activate(const egi_moe *moe, double x) {
  static const double root = 0.7978845608028654, half_root = 0.7071067811865476;
  switch (moe->activation) {
  case EGI_MOE_SILU:
    return x * sigmoid(moe->alpha * x);
  case EGI_MOE_GELU:
    return 0.5 * x * (1.0 + erf(x * half_root));
  case EGI_MOE_GELU_TANH:
    return 0.5 * x * (1.0 + tanh(root * (x + 0.044715 * x * x * x)));
  case EGI_MOE_RELU:
    return x > 0.0 ? x : x < 0.0 ? 0.0 : x;
  case EGI_MOE_SIGMOID:
    return sigmoid(x);
  case EGI_MOE_IDENTITY:
  case EGI_MOE_ACTIVATIONS:
    break;
  }
  return x;
}

/* Columns of gate and up of element i. */
static void columns_of(const egi_moe_params *p, int64_t i, int64_t *out_gate, int64_t *out_up) {
  bool is_interleaved = p->router.moe.form == EGI_MOE_INTERLEAVED;
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
  double limit = p->router.moe.limit > 0.0 ? p->router.moe.limit : HUGE_VAL;
  bool is_gated = p->router.moe.form != EGI_MOE_UNGATED;
  for (int64_t i = 0; i < p->inner; i++) {
    int64_t gate, up;
    columns_of(p, i, &gate, &up);
    double value = activate(&p->router.moe, limited(get(p, saved, gate), -HUGE_VAL, limit));
    if (is_gated) value *= limited(get(p, saved, up), -limit, limit) + p->router.moe.offset;
    set(p, middle, i, value);
  }
}

/* The case of most models without a call for each element. */
static bool is_plain_silu(const egi_moe_params *p) {
  const egi_moe *moe = &p->router.moe;
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

typedef struct glu_run {
  const egi_moe_params *p;
  const char *saved;
  char *middle;
} glu_run;

static void row_task(void *argument, size_t task, size_t worker) {
  const glu_run *r = argument;
  const egi_moe_params *p = r->p;
  int64_t first = (int64_t)task * TASK_ROWS;
  (void)worker;
  for (int64_t row = first; row < first + TASK_ROWS && row < p->n_rows; row++) {
    const char *saved = r->saved + (size_t)(row * p->hidden) * p->element_bytes;
    char *middle = r->middle + (size_t)(row * p->inner) * p->element_bytes;
    if (is_plain_silu(p))
      silu_row(p, (const float *)(const void *)saved, (float *)(void *)middle);
    else
      activate_row(p, saved, middle);
  }
}

void egi_moe_activate(const egi_moe_params *p, const egi_kernel_call *call, const char *saved, char *middle) {
  glu_run r = {p, saved, middle};
  egi_pool_run(call->pool, (size_t)((p->n_rows + TASK_ROWS - 1) / TASK_ROWS), row_task, &r);
}
