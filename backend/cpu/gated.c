/* engraft.GLU, engraft.Swish and their gradients: act(gate) · (up + offset), elementwise over any strides. f32, f16 and
 * bf16 are computed in f32 by the loops of isa/ (results rounded once), f64 here. No reductions: deterministic. */
#include <math.h>

#include "backend/cpu/elementwise.h"

typedef struct gated_params {
  const egi_isa *isa;
  egi_activation activation;
  egi_gate gate;
  double alpha, limit, offset;
  eg_dtype dtype;
  bool is_single;      /* Swish: there is no other factor */
  unsigned n_in;       /* operands read, the gradient included */
  unsigned outputs[2]; /* those that are wanted */
  unsigned n_out;
} gated_params;

/* ---- f64 ------------------------------------------------------------------------------------------------------- */

static void activate(const gated_params *p, double x, double *value, double *slope) {
  const double root = sqrt(2.0 / acos(-1.0)), u = root * (x + 0.044715 * x * x * x), t = tanh(u);
  const double z = p->activation == EGI_GATE_SILU ? p->alpha * x : x, s = 1.0 / (1.0 + exp(-z));
  const double share = 0.5 * (1.0 + erf(x / sqrt(2.0)));
  switch (p->activation) {
  case EGI_GATE_SILU:
    *value = x * s;
    *slope = s + z * s * (1.0 - s);
    break;
  case EGI_GATE_GELU:
    *value = x * share;
    *slope = share + x * exp(-0.5 * x * x) / sqrt(2.0 * acos(-1.0));
    break;
  case EGI_GATE_GELU_TANH:
    *value = 0.5 * x * (1.0 + t);
    *slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044715 * x * x);
    break;
  case EGI_GATE_RELU:
    *value = x < 0.0 ? 0.0 : x;
    *slope = x > 0.0;
    break;
  case EGI_GATE_SIGMOID:
    *value = s;
    *slope = s * (1.0 - s);
    break;
  default:
    *value = x;
    *slope = 1.0;
    break;
  }
}

static double read_double(const char *data, int64_t stride, int64_t i) {
  double value;
  memcpy(&value, data + i * stride, sizeof value);
  return value;
}

static void inner_f64(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const gated_params *p = params;
  const unsigned first = p->n_out;
  for (int64_t i = 0; i < n; i++) {
    double gate = read_double(data[first], strides[first], i), value, slope;
    double up = p->is_single ? 1.0 : read_double(data[first + 1], strides[first + 1], i);
    double g = gate > p->limit ? p->limit : gate, u = up < -p->limit ? -p->limit : up > p->limit ? p->limit : up;
    double results[2];
    activate(p, g, &value, &slope);
    results[0] = value * (u + p->offset);
    if (p->n_in > 2 || (p->is_single && p->n_in > 1)) {
      double dy = read_double(data[first + p->n_in - 1], strides[first + p->n_in - 1], i);
      results[0] = gate > p->limit ? 0.0 : dy * (u + p->offset) * slope;
      results[1] = up < -p->limit || up > p->limit ? 0.0 : dy * value;
    }
    for (unsigned k = 0; k < p->n_out; k++)
      memcpy(data[k] + i * strides[k], &results[p->outputs[k]], sizeof results[0]);
  }
}

/* ---- f32 and the half types ------------------------------------------------------------------------------------ */

static bool is_gradient(const gated_params *p) {
  return p->n_in == (p->is_single ? 2u : 3u);
}

static void inner_blocks(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const gated_params *p = params;
  float blocks[5][EGI_BLOCK], ones[EGI_BLOCK];
  for (int64_t i = 0; i < EGI_BLOCK && p->is_single; i++) ones[i] = 1.0f;
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    const float *in[3] = {NULL, ones, NULL};
    float *out[2] = {blocks[3], blocks[4]};
    for (unsigned k = 0; k < p->n_in; k++) {
      const unsigned at = p->n_out + k;
      in[p->is_single ? 2 * k : k] =
          egi_block_load(p->isa, p->dtype, data[at] + i * strides[at], strides[at], m, blocks[k]);
    }
    for (unsigned k = 0; k < p->n_out; k++) {
      const unsigned result = p->outputs[k];
      out[result] = egi_block_target(p->dtype, data[k] + i * strides[k], strides[k], blocks[3 + result]);
    }
    if (is_gradient(p))
      p->isa->gated->backward[p->activation](out[0], out[1], in, &p->gate, m);
    else
      p->isa->gated->forward[p->activation](out[0], in[0], in[1], &p->gate, m);
    for (unsigned k = 0; k < p->n_out; k++)
      egi_block_store(p->isa, p->dtype, data[k] + i * strides[k], strides[k], m, out[p->outputs[k]]);
  }
}

/* ---- prepare and run ------------------------------------------------------------------------------------------- */

static const char *const names[EGI_GATE_COUNT] = {"silu", "gelu", "gelu_tanh", "relu", "sigmoid", "identity"};

static eg_status read_attributes(const egi_kernel_plan *plan, gated_params *p) {
  const egi_node *node = egi_plan_node(plan);
  const char *name = egi_node_string(node, "activation", "silu");
  unsigned index = 0;
  while (index < EGI_GATE_COUNT && strcmp(names[index], name) != 0) index++;
  if (index == EGI_GATE_COUNT)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "unknown activation \"%s\"", name);
  float limit = egi_node_float(node, "limit", 0.0f);
  p->activation = (egi_activation)index;
  p->gate.alpha = egi_node_float(node, "alpha", 1.0f);
  p->gate.limit = limit > 0.0f ? limit : INFINITY;
  p->gate.offset = egi_node_float(node, "offset", 0.0f);
  p->alpha = (double)p->gate.alpha;
  p->limit = (double)p->gate.limit;
  p->offset = (double)p->gate.offset;
  return EG_OK;
}

static eg_status prepare(egi_kernel_plan *plan, bool is_single) {
  gated_params *p = EGI_NEW(plan->arena, gated_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  p->isa = egi_cpu_isa();
  p->is_single = is_single;
  p->n_in = plan->n_inputs;
  p->dtype = plan->inputs[0].dtype;
  plan->params = p;
  EG_TRY(read_attributes(plan, p));
  bool is_known =
      p->dtype == EG_DTYPE_F32 || p->dtype == EG_DTYPE_F64 || p->dtype == EG_DTYPE_F16 || p->dtype == EG_DTYPE_BF16;
  for (unsigned i = 0; i < plan->n_inputs; i++) is_known = is_known && plan->inputs[i].dtype == p->dtype;
  for (unsigned i = 0; i < plan->n_outputs; i++) {
    if (plan->outputs[i].dtype == EG_DTYPE_UNDEFINED) continue;
    is_known = is_known && plan->outputs[i].dtype == p->dtype && p->n_out < 2;
    if (is_known) p->outputs[p->n_out++] = i;
  }
  return is_known ? EG_OK : egi_fail_types(plan);
}

eg_status egi_cpu_prepare_glu(egi_kernel_plan *plan) {
  return prepare(plan, false);
}

eg_status egi_cpu_prepare_swish(egi_kernel_plan *plan) {
  return prepare(plan, true);
}

eg_status egi_cpu_run_gated(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const gated_params *p = call->params;
  egi_strided loop;
  if (p->n_out == 0) return EG_OK;
  egi_strided_init(&loop, &call->outputs[p->outputs[0]]);
  if (p->n_out > 1) egi_strided_add(&loop, &call->outputs[p->outputs[1]]);
  for (unsigned i = 0; i < p->n_in; i++) egi_strided_add(&loop, &call->inputs[i]);
  egi_strided_collapse(&loop);
  egi_strided_run(call->pool, &loop, EGI_TASK_ELEMENTS, p->dtype == EG_DTYPE_F64 ? inner_f64 : inner_blocks, p);
  return EG_OK;
}
