/* Accumulate, GradientNorm and AdamW over flat f32 states, in fixed chunks of elements: results do not depend on the
 * number of threads. The norm is summed in f64, chunks in order. */
#include "backend/cpu/optimizer.h"
#include "backend/cpu/strided.h"

#include <math.h>

#define CHUNK 65536

static int64_t chunk_count(int64_t n) {
  return (n + CHUNK - 1) / CHUNK;
}
static int64_t chunk_size(int64_t n, int64_t start) {
  return n - start < CHUNK ? n - start : CHUNK;
}

eg_status egi_check_step(const egi_kernel_plan *plan, unsigned input) {
  const egi_tensor *step = &plan->inputs[input];
  if (step->dtype != EG_DTYPE_U8) return egi_fail_types(plan);
  if (egi_tensor_count(step) < (int64_t)sizeof(egi_step_state))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the step state has %lld bytes, not %zu",
                         (long long)egi_tensor_count(step), sizeof(egi_step_state));
  return EG_OK;
}

/* ---- Accumulate ------------------------------------------------------------------------------------------------- */

static void add_element(char *const *data, const int64_t *strides, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    *(float *)(void *)(data[0] + i * strides[0]) += *(const float *)(const void *)(data[1] + i * strides[1]);
}

static void add_inner(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const egi_isa *isa = params;
  if (strides[0] == 4 && strides[1] == 4)
    isa->rows->f32->add(data[0], data[1], n);
  else
    add_element(data, strides, n);
}

eg_status egi_cpu_prepare_accumulate(egi_kernel_plan *plan) {
  if (plan->inputs[0].dtype != EG_DTYPE_F32 || plan->inputs[1].dtype != EG_DTYPE_F32) return egi_fail_types(plan);
  if (egi_tensor_count(&plan->inputs[0]) != egi_tensor_count(&plan->inputs[1]))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "gradient and state differ in size");
  return egi_check_step(plan, 2);
}

eg_status egi_cpu_run_accumulate(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const egi_step_state *step = call->inputs[2].data;
  egi_tensor state = call->outputs[0];
  state.data = call->inputs[0].data;
  if (!step->has_gradients) {
    egi_copy(call->pool, &state, &call->inputs[1]);
    return EG_OK;
  }
  egi_strided loop;
  egi_strided_init(&loop, &state);
  egi_strided_add(&loop, &call->inputs[1]);
  egi_strided_collapse(&loop);
  egi_strided_run(call->pool, &loop, EGI_TASK_ELEMENTS, add_inner, egi_cpu_isa());
  return EG_OK;
}

/* ---- StoreState ------------------------------------------------------------------------------------------------- */

eg_status egi_cpu_prepare_store_state(egi_kernel_plan *plan) {
  if (plan->inputs[0].dtype != plan->inputs[1].dtype || egi_dtype_bits(plan->inputs[0].dtype) < 8)
    return egi_fail_types(plan);
  if (egi_tensor_count(&plan->inputs[0]) != egi_tensor_count(&plan->inputs[1]))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "state and value differ in size");
  return EG_OK;
}

eg_status egi_cpu_run_store_state(eg_context *ctx, const egi_kernel_call *call) {
  egi_tensor state = call->inputs[1];
  (void)ctx;
  state.data = call->inputs[0].data;
  egi_copy(call->pool, &state, &call->inputs[1]);
  return EG_OK;
}

/* ---- GradientNorm ----------------------------------------------------------------------------------------------- */

eg_status egi_cpu_prepare_gradient_norm(egi_kernel_plan *plan) {
  if (plan->inputs[0].dtype != EG_DTYPE_F32 || plan->outputs[0].dtype != EG_DTYPE_F32) return egi_fail_types(plan);
  EG_TRY(egi_check_step(plan, 1));
  plan->workspace_bytes = (size_t)chunk_count(egi_tensor_count(&plan->inputs[0])) * sizeof(double);
  return EG_OK;
}

static void run_norm_chunk(void *argument, size_t index, size_t worker) {
  (void)worker;
  const egi_kernel_call *call = argument;
  int64_t start = (int64_t)index * CHUNK;
  const float *gradients = (const float *)call->inputs[0].data + start;
  double *sums = call->workspace;
  sums[index] = egi_cpu_isa()->train->sum_of_squares(gradients, chunk_size(egi_tensor_count(&call->inputs[0]), start));
}

eg_status egi_cpu_run_gradient_norm(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const egi_step_state *step = call->inputs[1].data;
  int64_t n_chunks = chunk_count(egi_tensor_count(&call->inputs[0]));
  egi_kernel_call shared = *call;
  egi_pool_run(call->pool, (size_t)n_chunks, run_norm_chunk, &shared);
  double sum = 0;
  for (int64_t i = 0; i < n_chunks; i++) sum += ((const double *)call->workspace)[i];
  *(float *)call->outputs[0].data = (float)(sqrt(sum) * (double)step->inverse_targets);
  return EG_OK;
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------ */

typedef struct adamw_params {
  int64_t n;
  uint32_t n_segments;
  const int64_t *starts;
  const float *decays, *rates; /* NULL: 1 everywhere */
} adamw_params;

typedef struct adamw_run {
  const adamw_params *params;
  const egi_kernel_call *call;
  float gradient_factor;
} adamw_run;

static const float *segment_floats(const egi_node *node, const char *name, uint32_t *out_count) {
  const egi_attribute *attribute = egi_node_attribute(node, name);
  *out_count = attribute && attribute->kind == EGI_ATTRIBUTE_FLOATS ? attribute->count : 0;
  return *out_count ? attribute->u.floats : NULL;
}

eg_status egi_cpu_prepare_adamw(egi_kernel_plan *plan) {
  adamw_params *p = EGI_NEW(plan->arena, adamw_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  const egi_node *node = egi_plan_node(plan);
  uint32_t n_decays, n_rates;
  p->n = egi_tensor_count(&plan->inputs[0]);
  p->starts = egi_node_ints(node, "starts", &p->n_segments);
  p->decays = segment_floats(node, "decays", &n_decays);
  p->rates = segment_floats(node, "rates", &n_rates);
  bool fits = (!p->decays || n_decays == p->n_segments) && (!p->rates || n_rates == p->n_segments);
  if (!p->starts) {
    p->n_segments = 0;
    fits = !p->decays && !p->rates;
  }
  for (uint32_t i = 0; i < p->n_segments && fits; i++)
    fits = p->starts[i] <= p->n && (i == 0 ? p->starts[i] == 0 : p->starts[i] >= p->starts[i - 1]);
  for (unsigned i = 0; i < 4; i++) {
    if (plan->inputs[i].dtype != EG_DTYPE_F32) return egi_fail_types(plan);
    fits = fits && egi_tensor_count(&plan->inputs[i]) == p->n;
  }
  if (plan->inputs[5].dtype != EG_DTYPE_F32) return egi_fail_types(plan);
  if (!fits) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "states and segments do not fit each other");
  plan->params = p;
  return egi_check_step(plan, 4);
}

void egi_adamw_update(const egi_kernel_call *call, const egi_adamw_piece *piece) {
  const egi_step_state *step = call->inputs[4].data;
  float rate = step->learning_rate * piece->rate;
  float decay = step->weight_decay * piece->decay;
  egi_adamw chunk = {.parameters = (float *)call->inputs[0].data + piece->start,
                     .moment1 = piece->moments[0],
                     .moment2 = piece->moments[1],
                     .gradients = (const float *)call->inputs[1].data + piece->start,
                     .n = piece->n,
                     .gradient_factor = piece->gradient_factor,
                     .keep = 1.0f - rate * decay,
                     .rate = rate,
                     .beta2 = step->beta2,
                     .rest1 = step->rest1,
                     .rest2 = step->rest2,
                     .epsilon = step->epsilon,
                     .correction1 = step->correction1,
                     .correction2 = step->correction2};
  egi_cpu_isa()->train->adamw(&chunk);
}

static void update_range(const adamw_run *run, int64_t start, int64_t end, uint32_t segment) {
  const adamw_params *p = run->params;
  const egi_tensor *in = run->call->inputs;
  const egi_adamw_piece piece = {.start = start,
                                 .n = end - start,
                                 .moments = {(float *)in[2].data + start, (float *)in[3].data + start},
                                 .rate = p->rates ? p->rates[segment] : 1.0f,
                                 .decay = p->decays ? p->decays[segment] : 1.0f,
                                 .gradient_factor = run->gradient_factor};
  egi_adamw_update(run->call, &piece);
}

static void run_adamw_chunk(void *argument, size_t index, size_t worker) {
  (void)worker;
  const adamw_run *run = argument;
  const adamw_params *p = run->params;
  int64_t start = (int64_t)index * CHUNK, end = start + chunk_size(p->n, start);
  uint32_t low = 0, high = p->n_segments; /* the last segment that starts at or before `start` */
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    if (p->starts[middle] <= start)
      low = middle;
    else
      high = middle;
  }
  for (uint32_t segment = low; start < end; segment++) {
    int64_t stop = segment + 1 < p->n_segments ? p->starts[segment + 1] : p->n;
    if (stop > end) stop = end;
    if (stop > start) update_range(run, start, stop, segment);
    start = stop > start ? stop : start;
  }
}

/* torch.nn.utils.clip_grad_norm_ */
float egi_gradient_factor(const egi_step_state *step, float norm) {
  float coefficient = step->clip / (norm + 1e-6f);
  bool is_clipped = step->clip > 0 && !(coefficient >= 1.0f);
  return is_clipped ? step->inverse_targets * coefficient : step->inverse_targets;
}

eg_status egi_cpu_run_adamw(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const adamw_params *p = call->params;
  const egi_step_state *step = call->inputs[4].data;
  const float *norm = call->inputs[5].data;
  if (!isfinite(*norm)) return EG_OK; /* the caller sees the norm and reports it; nothing has moved */
  adamw_run run = {p, call, egi_gradient_factor(step, *norm)};
  egi_pool_run(call->pool, (size_t)chunk_count(p->n), run_adamw_chunk, &run);
  return EG_OK;
}
