/* The router of engraft.MoE: scores, choice, weights and their gradient, and the order of rows by expert.
 * Scores are in f64. Of equal scores the lower expert wins, as in TopK. */
#include <math.h>

#include "backend/cpu/moe.h"

typedef struct router {
  const egi_moe_run *run;
  egi_rows logits;
  const egi_tensor *tensor;
  const double *weight_gradients;
  egi_rows out_rows;
  const egi_tensor *out;
} router;

/* [E] scores and [E] numbers that decide the choice, of a worker. */
static double *scores_of(const egi_moe_run *run, size_t worker) {
  const egi_moe_params *p = run->p;
  return (double *)(void *)((char *)run->call->workspace + p->scores) + (size_t)(4 * p->n_experts) * worker;
}

static void read_logits(const router *r, int64_t token, double *logits, double *buffer) {
  const egi_moe_params *p = r->run->p;
  const void *row = egi_rows_load(&r->logits, r->tensor, token, buffer);
  for (int64_t e = 0; e < p->n_experts; e++)
    logits[e] = egi_real_get((const char *)row + (size_t)e * r->logits.element_bytes, r->tensor->dtype);
}

static double sigmoid(double x) {
  return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

static void softmax(double *values, int64_t n) {
  double largest = -HUGE_VAL, sum = 0.0;
  for (int64_t i = 0; i < n; i++) largest = values[i] > largest ? values[i] : largest;
  for (int64_t i = 0; i < n; i++) sum += values[i] = exp(values[i] - largest);
  for (int64_t i = 0; i < n; i++) values[i] /= sum;
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
static void keep_groups(const egi_moe_params *p, double *choice, double *group) {
  const egi_moe *moe = &p->moe;
  int64_t size = p->n_experts / moe->groups;
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
static void choose(const egi_moe_params *p, const egi_tensor *correction, double *scores, double *choice,
                   int32_t *indices) {
  const egi_moe *moe = &p->moe;
  if (moe->is_scored_before && !moe->is_sigmoid) softmax(scores, p->n_experts);
  if (moe->is_scored_before && moe->is_sigmoid)
    for (int64_t e = 0; e < p->n_experts; e++) scores[e] = sigmoid(scores[e]);
  for (int64_t e = 0; e < p->n_experts; e++)
    choice[e] = scores[e] + (correction ? egi_moe_number(correction, e * correction->strides[0]) : 0.0);
  if (moe->groups > 1) keep_groups(p, choice, choice + p->n_experts);
  bool *is_taken = (bool *)(void *)(choice + p->n_experts);
  for (int64_t e = 0; e < p->n_experts; e++) is_taken[e] = false;
  for (int64_t j = 0; j < moe->top_k; j++) {
    int64_t best = -1;
    for (int64_t e = 0; e < p->n_experts; e++)
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

static void route_tokens(void *argument, size_t task, size_t worker) {
  const router *r = argument;
  const egi_moe_params *p = r->run->p;
  const egi_tensor *correction =
      egi_call_has_input(r->run->call, EGI_MOE_CORRECTION) ? &r->run->call->inputs[EGI_MOE_CORRECTION] : NULL;
  double *scores = scores_of(r->run, worker), *choice = scores + p->n_experts;
  int64_t k = p->moe.top_k, first = (int64_t)task * EGI_MOE_TASK_ROWS;
  for (int64_t t = first; t < first + EGI_MOE_TASK_ROWS && t < p->tokens; t++) {
    read_logits(r, t, scores, choice);
    choose(p, correction, scores, choice, r->run->indices + t * k);
    double divisor = chosen_scores(&p->moe, scores, r->run->indices + t * k, choice);
    for (int64_t j = 0; j < k; j++)
      egi_real_set(egi_moe_at(p, r->run->weights, t * k + j), p->dtype, choice[j] / divisor * p->moe.routed_scale);
  }
}

static size_t token_tasks(const egi_moe_params *p) {
  return (size_t)((p->tokens + EGI_MOE_TASK_ROWS - 1) / EGI_MOE_TASK_ROWS);
}

void egi_moe_route(const egi_moe_run *run) {
  router r = {.run = run, .tensor = &run->call->inputs[EGI_MOE_LOGITS]};
  egi_rows_init(&r.logits, r.tensor, r.tensor->rank - 1);
  egi_pool_run(run->call->pool, token_tasks(run->p), route_tokens, &r);
}

void egi_moe_sort(const egi_moe_run *run) {
  const egi_moe_params *p = run->p;
  for (int64_t e = 0; e <= p->n_experts; e++) run->offsets[e] = 0;
  for (int64_t i = 0; i < p->n_rows; i++) run->offsets[run->indices[i]]++;
  int64_t next = 0;
  for (int64_t e = 0; e <= p->n_experts; e++) { /* first rows */
    int64_t count = run->offsets[e];
    run->offsets[e] = next;
    next += count;
  }
  for (int64_t i = 0; i < p->n_rows; i++) {
    int64_t row = run->offsets[run->indices[i]]++;
    run->order[row] = i;
    run->place[i] = row;
  }
  for (int64_t e = p->n_experts; e > 0; e--) run->offsets[e] = run->offsets[e - 1];
  run->offsets[0] = 0;
}

/* ---- gradient ------------------------------------------------------------------------------------------------- */

/* Gradient of the chosen scores from that of the weights, in place: w_j = scale · s_j / divisor. */
static void through_normalisation(const egi_moe *moe, const double *chosen, double divisor, double *gradient) {
  double inner = 0.0;
  for (int64_t j = 0; j < moe->top_k; j++) inner += gradient[j] * chosen[j];
  for (int64_t j = 0; j < moe->top_k; j++) {
    gradient[j] = moe->routed_scale * (moe->is_normalised ? gradient[j] - inner / divisor : gradient[j]) / divisor;
  }
}

/* scores: as after the choice; out: [E] */
static void through_scores(const egi_moe_params *p, const double *scores, const int32_t *indices, const double *chosen,
                           const double *gradient, double *out) {
  const egi_moe *moe = &p->moe;
  double inner = 0.0;
  for (int64_t e = 0; e < p->n_experts; e++) out[e] = 0.0;
  for (int64_t j = 0; j < moe->top_k; j++) {
    inner += gradient[j] * chosen[j];
    out[indices[j]] = moe->is_sigmoid ? gradient[j] * chosen[j] * (1.0 - chosen[j]) : gradient[j] * chosen[j];
  }
  if (moe->is_sigmoid) return;
  if (moe->is_scored_before) {
    for (int64_t e = 0; e < p->n_experts; e++) out[e] -= inner * scores[e];
    return;
  }
  for (int64_t j = 0; j < moe->top_k; j++) out[indices[j]] -= inner * chosen[j];
}

static void route_gradients(void *argument, size_t task, size_t worker) {
  const router *r = argument;
  const egi_moe_params *p = r->run->p;
  double *scores = scores_of(r->run, worker), *chosen = scores + p->n_experts, *gradient = chosen + p->n_experts;
  double *out = gradient + p->n_experts;
  int64_t k = p->moe.top_k, first = (int64_t)task * EGI_MOE_TASK_ROWS;
  for (int64_t t = first; t < first + EGI_MOE_TASK_ROWS && t < p->tokens; t++) {
    const int32_t *indices = r->run->indices + t * k;
    read_logits(r, t, scores, chosen);
    if (p->moe.is_scored_before && !p->moe.is_sigmoid) softmax(scores, p->n_experts);
    if (p->moe.is_scored_before && p->moe.is_sigmoid)
      for (int64_t e = 0; e < p->n_experts; e++) scores[e] = sigmoid(scores[e]);
    double divisor = chosen_scores(&p->moe, scores, indices, chosen);
    for (int64_t j = 0; j < k; j++) gradient[j] = r->weight_gradients[t * k + j];
    through_normalisation(&p->moe, chosen, divisor, gradient);
    through_scores(p, scores, indices, chosen, gradient, out);
    char *row = egi_rows_target(&r->out_rows, r->out, t, scores);
    for (int64_t e = 0; e < p->n_experts; e++) egi_real_set(egi_moe_at(p, row, e), p->dtype, out[e]);
    egi_rows_store(&r->out_rows, r->out, t, scores);
  }
}

void egi_moe_route_gradient(const egi_moe_run *run, const double *weight_gradients, const egi_tensor *out) {
  router r = {
      .run = run, .tensor = &run->call->inputs[EGI_MOE_LOGITS], .weight_gradients = weight_gradients, .out = out};
  egi_rows_init(&r.logits, r.tensor, r.tensor->rank - 1);
  egi_rows_init(&r.out_rows, out, out->rank - 1);
  egi_pool_run(run->call->pool, token_tasks(run->p), route_gradients, &r);
}
