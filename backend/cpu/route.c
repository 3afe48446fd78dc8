/* The router of a mixture of experts: Route (scores, choice, weights, order of rows by expert) and RouteGrad.
 * Scores are in f64. Of equal scores the lower expert wins, as in TopK. Tasks are TASK_ROWS tokens; the order of rows
 * is made by one thread: counting sort, stable. */
#include "backend/cpu/route.h"

#include <math.h>

#include "backend/cpu/narrow.h"

#define TASK_ROWS 64

/* ---- scores --------------------------------------------------------------------------------------------------- */

static double sigmoid(double x) {
  return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

static void softmax(double *values, int64_t n) {
  double largest = -HUGE_VAL, sum = 0.0;
  for (int64_t i = 0; i < n; i++) largest = values[i] > largest ? values[i] : largest;
  for (int64_t i = 0; i < n; i++) sum += values[i] = exp(values[i] - largest);
  for (int64_t i = 0; i < n; i++) values[i] /= sum;
}

/* Scores of all experts, where they come before the choice. */
static void score(const egi_moe *moe, double *scores) {
  if (moe->is_scored_before && !moe->is_sigmoid) softmax(scores, moe->n_experts);
  if (moe->is_scored_before && moe->is_sigmoid)
    for (int64_t e = 0; e < moe->n_experts; e++) scores[e] = sigmoid(scores[e]);
}

/* Score of a group: its best expert, or the sum of its two best. */
static double group_score(const egi_moe *moe, const double *choice, int64_t size) {
  double best = -HUGE_VAL, second = -HUGE_VAL;
  for (int64_t i = 0; i < size; i++) {
    if (choice[i] > best) {
      second = best;
      best = choice[i];
    } else if (choice[i] > second) {
      second = choice[i];
    }
  }
  return moe->is_group_best || size < 2 ? best : best + second;
}

/* Experts of groups that are left out count as 0 in the choice, as in the models' own code. `taken` marks groups. */
static void keep_groups(const egi_moe *moe, double *choice, double *group) {
  int64_t size = moe->n_experts / moe->groups;
  for (int64_t g = 0; g < moe->groups; g++) group[g] = group_score(moe, choice + g * size, size);
  for (int64_t n = 0; n < moe->groups; n++) { /* the n-th best group */
    int64_t best = -1;
    for (int64_t g = 0; g < moe->groups; g++)
      if (!isnan(group[g]) && (best < 0 || group[g] > group[best])) best = g;
    if (best < 0) return;
    group[best] = (double)NAN;
    for (int64_t i = 0; n >= moe->top_groups && i < size; i++) choice[best * size + i] = 0.0;
  }
}

/* `scores` holds the logits on entry, and afterwards the scores of all experts or, scored after the choice, the logits
 * still. */
static void choose(const egi_moe *moe, const egi_tensor *correction, double *scores, double *choice, int32_t *indices) {
  score(moe, scores);
  for (int64_t e = 0; e < moe->n_experts; e++)
    choice[e] = scores[e] + (correction ? egi_float_get(correction, e * correction->strides[0]) : 0.0);
  if (moe->groups > 1) keep_groups(moe, choice, choice + moe->n_experts);
  bool *is_taken = (bool *)(void *)(choice + moe->n_experts);
  for (int64_t e = 0; e < moe->n_experts; e++) is_taken[e] = false;
  for (int64_t j = 0; j < moe->top_k; j++) {
    int64_t best = -1;
    for (int64_t e = 0; e < moe->n_experts; e++)
      if (!is_taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
    is_taken[best] = true;
    indices[j] = (int32_t)best;
  }
}

/* The scores of the chosen ones before they are normalised and scaled; returns what they are divided by. */
static double chosen_scores(const egi_moe *moe, const double *scores, const int32_t *indices, double *chosen) {
  double sum = 0.0;
  for (int64_t j = 0; j < moe->top_k; j++) {
    chosen[j] = scores[indices[j]];
    if (!moe->is_scored_before && moe->is_sigmoid) chosen[j] = sigmoid(chosen[j]);
  }
  if (!moe->is_scored_before && !moe->is_sigmoid) softmax(chosen, moe->top_k);
  for (int64_t j = 0; j < moe->top_k; j++) sum += chosen[j];
  return moe->is_normalised && sum > 0.0 ? sum : 1.0;
}

/* ---- forward -------------------------------------------------------------------------------------------------- */

typedef struct route_task {
  const egi_router *router;
  const egi_tensor *logits, *correction;
  egi_rows rows;
  double *scores;                  /* 4 E + k a worker */
  int32_t *chosen;                 /* [T·k] by pair */
  char *pair_weights;              /* [T·k] by pair */
  const int32_t *expert, *inverse; /* gradient: of Route */
  const egi_tensor *weight_gradient, *out;
  egi_rows out_rows;
} route_task;

static size_t worker_doubles(const egi_moe *moe) {
  return (size_t)(4 * moe->n_experts + moe->top_k);
}

static void read_logits(const route_task *r, int64_t token, double *logits, double *buffer) {
  const void *row = egi_rows_load(&r->rows, r->logits, token, buffer);
  for (int64_t e = 0; e < r->router->moe.n_experts; e++)
    logits[e] = egi_real_get((const char *)row + (size_t)e * r->rows.element_bytes, r->logits->dtype);
}

static void route_tokens(void *argument, size_t task, size_t worker) {
  const route_task *r = argument;
  const egi_moe *moe = &r->router->moe;
  size_t bytes = egi_element_bytes(r->router->dtype);
  double *scores = r->scores + worker_doubles(moe) * worker, *choice = scores + moe->n_experts;
  int64_t k = moe->top_k, first = (int64_t)task * TASK_ROWS;
  for (int64_t t = first; t < first + TASK_ROWS && t < r->router->tokens; t++) {
    read_logits(r, t, scores, choice);
    choose(moe, r->correction, scores, choice, r->chosen + t * k);
    double divisor = chosen_scores(moe, scores, r->chosen + t * k, choice);
    for (int64_t j = 0; j < k; j++)
      egi_real_set(r->pair_weights + (size_t)(t * k + j) * bytes, r->router->dtype,
                   choice[j] / divisor * moe->routed_scale);
  }
}

static size_t token_tasks(const egi_router *router) {
  return (size_t)((router->tokens + TASK_ROWS - 1) / TASK_ROWS);
}

/* Rows of the pairs; out->inverse holds the chosen experts on entry. */
static void sort_pairs(const egi_router *router, const char *pair_weights, const egi_routing *out) {
  int64_t n_experts = router->moe.n_experts;
  size_t bytes = egi_element_bytes(router->dtype);
  int32_t next = 0;
  for (int64_t e = 0; e <= n_experts; e++) out->offsets[e] = 0;
  for (int64_t i = 0; i < router->n_rows; i++) out->offsets[out->inverse[i]]++;
  for (int64_t e = 0; e <= n_experts; e++) { /* first rows */
    int32_t count = out->offsets[e];
    out->offsets[e] = next;
    next += count;
  }
  for (int64_t i = 0; i < router->n_rows; i++) {
    int32_t expert = out->inverse[i], row = out->offsets[expert]++;
    out->expert[row] = expert;
    out->source_row[row] = (int32_t)(i / router->moe.top_k);
    out->inverse[i] = row;
    memcpy((char *)out->weight + (size_t)row * bytes, pair_weights + (size_t)i * bytes, bytes);
  }
  for (int64_t e = n_experts; e > 0; e--) out->offsets[e] = out->offsets[e - 1];
  out->offsets[0] = 0;
}

eg_status egi_router_prepare(egi_kernel_plan *plan, unsigned input, egi_router *out_router) {
  const egi_tensor *logits = &plan->inputs[input];
  EG_TRY(egi_moe_read_router(plan->graph, plan->node, &out_router->moe));
  out_router->dtype = logits->dtype;
  out_router->tokens = 1;
  for (int i = 0; i + 1 < logits->rank; i++) out_router->tokens *= logits->dims[i];
  if (logits->dtype != EG_DTYPE_F32 && logits->dtype != EG_DTYPE_F64) return egi_fail_types(plan);
  if (out_router->tokens > INT32_MAX / out_router->moe.top_k)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "%lld tokens are too many to route",
                         (long long)out_router->tokens);
  out_router->n_rows = out_router->tokens * out_router->moe.top_k;
  return EG_OK;
}

static size_t padded(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

bool egi_route_workspace(const egi_router *router, size_t n_workers, size_t *out_bytes) {
  size_t scores = 0;
  if (!egi_size_multiply(worker_doubles(&router->moe) * sizeof(double), n_workers, &scores)) return false;
  return egi_size_add(padded((size_t)router->n_rows * sizeof(double)), scores, out_bytes);
}

void egi_route(const egi_router *router, const egi_kernel_call *call, const egi_tensor *logits,
               const egi_tensor *correction, char *workspace, const egi_routing *out) {
  size_t pairs = padded((size_t)router->n_rows * sizeof(double));
  route_task r = {.router = router,
                  .logits = logits,
                  .correction = correction,
                  .scores = (double *)(void *)(workspace + pairs),
                  .chosen = out->inverse,
                  .pair_weights = workspace};
  egi_rows_init(&r.rows, logits, logits->rank - 1);
  egi_pool_run(call->pool, token_tasks(router), route_tokens, &r);
  sort_pairs(router, r.pair_weights, out);
}

/* ---- Route ---------------------------------------------------------------------------------------------------- */

typedef struct route_params {
  egi_router router;
  size_t missing; /* workspace for results that nobody wants */
} route_params;

eg_status egi_cpu_prepare_route(egi_kernel_plan *plan) {
  route_params *p = EGI_NEW(plan->arena, route_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_router_prepare(plan, 0, &p->router));
  size_t rows = padded((size_t)p->router.n_rows * sizeof(double));
  size_t ends = padded((size_t)(p->router.moe.n_experts + 1) * sizeof(int32_t));
  bool is_sound = egi_route_workspace(&p->router, egi_pool_size(egi_context_pool(plan->ctx)), &p->missing);
  p->missing = padded(p->missing);
  if (!is_sound || !egi_size_add(p->missing, 4 * rows + ends, &plan->workspace_bytes))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
  plan->params = p;
  return EG_OK;
}

static void *result(const egi_kernel_call *call, unsigned output, char **spare, size_t bytes) {
  if (output < call->n_outputs && call->outputs[output].dtype != EG_DTYPE_UNDEFINED) return call->outputs[output].data;
  char *memory = *spare;
  *spare += bytes;
  return memory;
}

eg_status egi_cpu_run_route(eg_context *ctx, const egi_kernel_call *call) {
  const route_params *p = call->params;
  char *spare = (char *)call->workspace + p->missing;
  size_t rows = padded((size_t)p->router.n_rows * sizeof(double));
  egi_routing routing = {.expert = result(call, 0, &spare, rows)};
  (void)ctx;
  routing.source_row = result(call, 1, &spare, rows);
  routing.inverse = result(call, 2, &spare, rows);
  routing.weight = result(call, 4, &spare, rows);
  routing.offsets = result(call, 3, &spare, 0);
  egi_route(&p->router, call, &call->inputs[0], egi_call_has_input(call, 1) ? &call->inputs[1] : NULL, call->workspace,
            &routing);
  return EG_OK;
}

/* ---- RouteGrad ------------------------------------------------------------------------------------------------ */

/* Gradient of the chosen scores from that of the weights, in place: w_j = scale · s_j / divisor. */
static void through_normalisation(const egi_moe *moe, const double *chosen, double divisor, double *gradient) {
  double inner = 0.0;
  for (int64_t j = 0; j < moe->top_k; j++) inner += gradient[j] * chosen[j];
  for (int64_t j = 0; j < moe->top_k; j++) {
    gradient[j] = moe->routed_scale * (moe->is_normalised ? gradient[j] - inner / divisor : gradient[j]) / divisor;
  }
}

/* scores: as after the choice; out: [E] */
static void through_scores(const egi_moe *moe, const double *scores, const int32_t *indices, const double *chosen,
                           const double *gradient, double *out) {
  double inner = 0.0;
  for (int64_t e = 0; e < moe->n_experts; e++) out[e] = 0.0;
  for (int64_t j = 0; j < moe->top_k; j++) {
    inner += gradient[j] * chosen[j];
    out[indices[j]] = moe->is_sigmoid ? gradient[j] * chosen[j] * (1.0 - chosen[j]) : gradient[j] * chosen[j];
  }
  if (moe->is_sigmoid) return;
  if (moe->is_scored_before) {
    for (int64_t e = 0; e < moe->n_experts; e++) out[e] -= inner * scores[e];
    return;
  }
  for (int64_t j = 0; j < moe->top_k; j++) out[indices[j]] -= inner * chosen[j];
}

static void route_gradients(void *argument, size_t task, size_t worker) {
  const route_task *r = argument;
  const egi_moe *moe = &r->router->moe;
  int64_t n = moe->n_experts, k = moe->top_k, first = (int64_t)task * TASK_ROWS;
  double *scores = r->scores + worker_doubles(moe) * worker, *chosen = scores + n, *gradient = chosen + n;
  double *out = gradient + n;
  int32_t *indices = (int32_t *)(void *)(out + n);
  size_t bytes = egi_element_bytes(r->router->dtype);
  for (int64_t t = first; t < first + TASK_ROWS && t < r->router->tokens; t++) {
    read_logits(r, t, scores, chosen);
    score(moe, scores);
    for (int64_t j = 0; j < k; j++) indices[j] = r->expert[r->inverse[t * k + j]];
    double divisor = chosen_scores(moe, scores, indices, chosen);
    for (int64_t j = 0; j < k; j++)
      gradient[j] = egi_float_get(r->weight_gradient, r->inverse[t * k + j] * r->weight_gradient->strides[0]);
    through_normalisation(moe, chosen, divisor, gradient);
    through_scores(moe, scores, indices, chosen, gradient, out);
    char *row = egi_rows_target(&r->out_rows, r->out, t, scores);
    for (int64_t e = 0; e < n; e++) egi_real_set(row + (size_t)e * bytes, r->router->dtype, out[e]);
    egi_rows_store(&r->out_rows, r->out, t, scores);
  }
}

eg_status egi_cpu_prepare_route_grad(egi_kernel_plan *plan) {
  route_params *p = EGI_NEW(plan->arena, route_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_router_prepare(plan, 0, &p->router));
  if (plan->inputs[3].dtype != p->router.dtype) return egi_fail_types(plan);
  if (plan->inputs[1].dims[0] != p->router.n_rows)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "a routing of %lld rows, not %lld",
                         (long long)plan->inputs[1].dims[0], (long long)p->router.n_rows);
  bool is_sound = egi_route_workspace(&p->router, egi_pool_size(egi_context_pool(plan->ctx)), &p->missing);
  p->missing = padded(p->missing);
  size_t lists = 2 * padded((size_t)p->router.n_rows * sizeof(int32_t));
  if (!is_sound || !egi_size_add(p->missing, lists, &plan->workspace_bytes))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_run_route_grad(eg_context *ctx, const egi_kernel_call *call) {
  const route_params *p = call->params;
  int32_t *lists = (int32_t *)(void *)((char *)call->workspace + p->missing);
  route_task r = {.router = &p->router,
                  .logits = &call->inputs[0],
                  .scores = call->workspace,
                  .expert = egi_index_list(&call->inputs[1], lists),
                  .inverse = egi_index_list(&call->inputs[2], lists + p->router.n_rows),
                  .weight_gradient = &call->inputs[3],
                  .out = &call->outputs[0]};
  EG_TRY(egi_check_routing(ctx, r.expert, p->router.n_rows, p->router.moe.n_experts));
  EG_TRY(egi_check_routing(ctx, r.inverse, p->router.n_rows, p->router.n_rows));
  egi_rows_init(&r.rows, r.logits, r.logits->rank - 1);
  egi_rows_init(&r.out_rows, r.out, r.out->rank - 1);
  egi_pool_run(call->pool, token_tasks(&p->router), route_gradients, &r);
  return EG_OK;
}

/* ---- lists of indices ----------------------------------------------------------------------------------------- */

const int32_t *egi_index_list(const egi_tensor *tensor, int32_t *buffer) {
  const int32_t *data = tensor->data;
  if (tensor->dims[0] < 2 || tensor->strides[0] == 1) return data;
  for (int64_t i = 0; i < tensor->dims[0]; i++) buffer[i] = data[i * tensor->strides[0]];
  return buffer;
}

eg_status egi_check_offsets(eg_context *ctx, const int32_t *offsets, int64_t n_experts, int64_t n_rows) {
  bool is_sound = offsets[0] == 0 && offsets[n_experts] == n_rows;
  for (int64_t e = 0; e < n_experts; e++) is_sound = is_sound && offsets[e] <= offsets[e + 1];
  if (is_sound) return EG_OK;
  return egi_fail(ctx, EG_ERROR_DATA, "offsets of experts do not rise from 0 to %lld", (long long)n_rows);
}

eg_status egi_check_routing(eg_context *ctx, const int32_t *indices, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; i++)
    if (indices[i] < 0 || indices[i] >= limit)
      return egi_fail(ctx, EG_ERROR_DATA, "index %d of a routing is not in [0, %lld)", (int)indices[i],
                      (long long)limit);
  return EG_OK;
}
