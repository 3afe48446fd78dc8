/* What mixture of experts a region is: its activation from the numbers before and after it, its operands from the
 * products, its router by trying; then the operator's own result, with the same made-up parameters, must be the
 * region's on every token. */
#include <math.h>
#include <string.h>

#include "passes/moe_match.h"

typedef struct fit {
  egi_moe_region *region;
  egi_moe moe;
  egi_moe_event **up, **down; /* up: gate and, where it stands alone, up of each expert or of the stack */
  uint32_t n_up, n_down;      /* as found; 1: a stack */
  uint32_t per_expert;        /* products before the activation */
  bool is_swapped;            /* up stands before gate */
  int64_t inner, gate_rows;
  uint32_t *place;        /* [E]: where an expert stands among the pieces */
  float **results;        /* [T * E]: an expert's result for a token, made when needed */
  const int32_t *indices; /* [T, k] */
  const float *weights;
} fit;

static int64_t n_of(const egi_moe_event *event) {
  return event->is_transposed ? event->matrix.columns : event->matrix.rows;
}

static int64_t k_of(const egi_moe_event *event) {
  return event->is_transposed ? event->matrix.rows : event->matrix.columns;
}

/* Of joined rows the product of one expert. */
static const egi_moe_event *member(const fit *f, const egi_moe_event *event, int64_t expert) {
  return event->n_members > 0 ? &f->region->events[event->members[expert]] : event;
}

/* ---- products ------------------------------------------------------------------------------------------------- */

static bool sort_events(fit *f) {
  egi_moe_region *region = f->region;
  f->up = EGI_NEW(region->arena, egi_moe_event *, (size_t)region->n_events + 1);
  f->down = EGI_NEW(region->arena, egi_moe_event *, (size_t)region->n_events + 1);
  if (f->up == NULL || f->down == NULL) return egi_moe_reject(region, 0, "out of memory");
  for (uint32_t i = 0; i < region->n_events; i++) {
    egi_moe_event *event = &region->events[i];
    if (event->n_members > 0) continue;
    if (event->n_stages > 1) return egi_moe_reject(region, event->node, "more than two products in a row");
    if (event->n_stages == 0)
      f->up[f->n_up++] = event;
    else
      f->down[f->n_down++] = event;
  }
  if (f->n_down == 0 || f->n_up == 0) return egi_moe_reject(region, region->last_choice, "no experts stand behind it");
  f->per_expert = f->n_up / f->n_down;
  if (f->per_expert * f->n_down != f->n_up || f->per_expert > 2)
    return egi_moe_reject(region, f->down[0]->node, "its experts are not all of one form");
  return true;
}

/* Products of the operand of down, the first first. */
static bool sources_of(const fit *f, const egi_moe_event *down, const egi_moe_event *out[2]) {
  unsigned n = 0;
  out[0] = out[1] = NULL;
  for (unsigned i = 0; i < 2; i++)
    if (down->sources[i] != 0) out[n++] = &f->region->events[down->sources[i] - 1];
  if (n == 2 && out[0] > out[1]) {
    const egi_moe_event *first = out[0];
    out[0] = out[1];
    out[1] = first;
  }
  if (n == f->per_expert) return true;
  return egi_moe_reject(f->region, down->node, "its experts are not all of one form");
}

/* ---- activation ----------------------------------------------------------------------------------------------- */

static double activate(const egi_moe *moe, double x) {
  switch (moe->activation) {
  case EGI_MOE_SILU:
    return x / (1.0 + exp(-moe->alpha * x));
  case EGI_MOE_GELU:
    return 0.5 * x * (1.0 + erf(x * 0.7071067811865476));
  case EGI_MOE_GELU_TANH:
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
  case EGI_MOE_RELU:
    return x > 0.0 ? x : 0.0;
  case EGI_MOE_SIGMOID:
    return 1.0 / (1.0 + exp(-x));
  case EGI_MOE_IDENTITY:
  case EGI_MOE_ACTIVATIONS:
    break;
  }
  return x;
}

static double glu(const egi_moe *moe, double gate, double up) {
  double limit = moe->limit > 0.0 ? moe->limit : HUGE_VAL;
  double value = activate(moe, fmin(gate, limit));
  return moe->form == EGI_MOE_UNGATED ? value : value * (fmax(-limit, fmin(up, limit)) + moe->offset);
}

/* Element i of a row of the products with gate and up. */
static double glu_at(const fit *f, const float *first, const float *second, int64_t i) {
  switch (f->moe.form) {
  case EGI_MOE_CONCATENATED:
    return glu(&f->moe, (double)first[i], (double)first[f->inner + i]);
  case EGI_MOE_INTERLEAVED:
    return glu(&f->moe, (double)first[2 * i], (double)first[2 * i + 1]);
  case EGI_MOE_SEPARATE:
    return glu(&f->moe, (double)first[i], (double)second[i]);
  case EGI_MOE_UNGATED:
    break;
  }
  return glu(&f->moe, (double)first[i], 0.0);
}

static bool is_near(double a, double b) {
  return fabs(a - b) <= 3e-5 * (1.0 + fabs(b));
}

/* gate and up (or NULL) as the fit has them, of the operand of a product with down. */
static bool ordered_sources(const fit *f, const egi_moe_event *down, const egi_moe_event *out[2]) {
  if (!sources_of(f, down, out)) return false;
  if (f->is_swapped && out[1] != NULL) {
    const egi_moe_event *first = out[0];
    out[0] = out[1];
    out[1] = first;
  }
  return true;
}

/* Row `first` of the sources is that of the first row of down's operand. */
static bool explains_one(const fit *f, const egi_moe_event *down, int64_t start) {
  const egi_moe_event *from[2];
  if (!ordered_sources(f, down, from)) return false;
  int64_t rows = egi_tensor_count(&down->in) / f->inner, n = f->gate_rows;
  for (unsigned i = 0; i < 2; i++) {
    if (from[i] == NULL) continue;
    int64_t count = egi_tensor_count(&from[i]->out);
    if (from[i]->n_members > 0 ? count < (start + rows) * n : n_of(from[i]) != n || count != rows * n) return false;
  }
  for (int64_t r = 0, n_checked = 0; r < rows && n_checked < 65536; r++)
    for (int64_t i = 0; i < f->inner; i++, n_checked++) {
      const float *first = (const float *)from[0]->out.data + (from[0]->n_members > 0 ? start + r : r) * n;
      const float *second =
          from[1] != NULL ? (const float *)from[1]->out.data + (from[1]->n_members > 0 ? start + r : r) * n : NULL;
      if (!is_near((double)((const float *)down->in.data)[r * f->inner + i], glu_at(f, first, second, i))) return false;
    }
  return true;
}

/* All experts, so that limits are met by some number. */
static bool explains(const fit *f) {
  int64_t start = 0;
  for (uint32_t i = 0; i < f->n_down; i++) {
    if (!explains_one(f, f->down[i], start)) return false;
    start += egi_tensor_count(&f->down[i]->in) / f->inner;
  }
  return true;
}

/* Limits, offsets and steepness among the numbers that the region holds. */
static bool try_numbers(fit *f) {
  const egi_moe_region *region = f->region;
  uint32_t n = region->n_numbers < 24 ? region->n_numbers : 24;
  bool is_gated = f->moe.form != EGI_MOE_UNGATED;
  for (uint32_t a = 0; a <= (f->moe.activation == EGI_MOE_SILU ? n : 0); a++) {
    f->moe.alpha = a == 0 ? 1.0 : region->numbers[a - 1];
    for (uint32_t l = 0; l <= n; l++) {
      f->moe.limit = l == 0 ? 0.0 : region->numbers[l - 1];
      if (f->moe.limit < 0.0) continue;
      for (uint32_t o = 0; o <= (is_gated ? n : 0); o++) {
        f->moe.offset = o == 0 ? 0.0 : region->numbers[o - 1];
        if (explains(f)) return true;
      }
    }
  }
  return false;
}

static bool try_activations(fit *f) {
  static const egi_moe_activation order[] = {EGI_MOE_SILU, EGI_MOE_GELU_TANH, EGI_MOE_GELU,
                                             EGI_MOE_RELU, EGI_MOE_SIGMOID,   EGI_MOE_IDENTITY};
  for (size_t i = 0; i < EGI_COUNT(order); i++) {
    f->moe.activation = order[i];
    if (try_numbers(f)) return true;
  }
  return false;
}

static bool fit_activation(fit *f) {
  egi_moe_region *region = f->region;
  const egi_moe_event *down = f->down[0], *from[2];
  if (!sources_of(f, down, from)) return false;
  f->gate_rows = n_of(member(f, from[0], 0));
  f->inner = k_of(down);
  bool is_joint = f->per_expert == 1 && f->gate_rows == 2 * f->inner;
  if (!is_joint && f->gate_rows != f->inner)
    return egi_moe_reject(region, down->node, "sizes of its matrices do not fit");
  for (unsigned form = 0; form < 2; form++) {
    f->moe.form = is_joint ? (form == 0 ? EGI_MOE_CONCATENATED : EGI_MOE_INTERLEAVED)
                           : (f->per_expert == 2 ? EGI_MOE_SEPARATE : EGI_MOE_UNGATED);
    f->is_swapped = f->per_expert == 2 && form == 1;
    if (try_activations(f)) return true;
  }
  return egi_moe_reject(region, down->node, "its activation is not known");
}

/* ---- operands ------------------------------------------------------------------------------------------------- */

/* gate, up (or NULL) and down of an expert. */
static bool experts_events(const fit *f, int64_t expert, const egi_moe_event *out[3]) {
  const egi_moe_event *down = f->down[f->n_down > 1 ? f->place[expert] : 0];
  out[2] = down;
  if (!ordered_sources(f, down, out)) return false;
  for (unsigned i = 0; i < 2; i++)
    if (out[i] != NULL && out[i]->n_members > 0 && out[i]->n_members != f->n_down) return false;
  for (unsigned i = 0; i < 2; i++)
    if (out[i] != NULL) out[i] = member(f, out[i], f->place[expert]);
  return true;
}

static int64_t slice_of(const fit *f, const egi_moe_event *event, int64_t expert) {
  if (!event->matrix.is_stack) return 0;
  return f->n_down > 1 && event->matrix.count > 0 ? event->matrix.slices[0] : expert;
}

static int64_t weight_count(const fit *f, egi_value_id value) {
  const egi_graph *graph = f->region->graph;
  const egi_weight *weight = &graph->module->weights[graph->values[value].index];
  int64_t count = 1;
  for (int i = 0; i < weight->rank; i++) count *= weight->dims[i];
  return count;
}

static void multiply(const fit *f, const egi_moe_event *event, int64_t expert, const float *in, float *out) {
  int64_t n = n_of(event);
  for (int64_t i = 0; i < n; i++) out[i] = 0.0f;
  egi_moe_multiply_row(f->region, &event->matrix, slice_of(f, event, expert), event->is_transposed, in, out);
  if (event->bias == 0) return;
  int64_t count = weight_count(f, event->bias), first = count == n ? 0 : expert * n;
  bool is_vector = f->region->graph->values[event->bias].rank == 1 && count == f->region->n_experts;
  for (int64_t i = 0; i < n; i++)
    out[i] += egi_moe_number_of(f->region, event->bias, is_vector ? -1 - (first + i) : first + i);
}

static const float *result_of(fit *f, int64_t token, int64_t expert) {
  egi_moe_region *region = f->region;
  float **cell = &f->results[token * region->n_experts + expert];
  const egi_moe_event *events[3];
  if (*cell != NULL) return *cell;
  if (!experts_events(f, expert, events)) return NULL;
  int64_t n = f->gate_rows;
  float *hidden = EGI_NEW(region->arena, float, (size_t)(2 * n + f->inner));
  float *result = EGI_NEW(region->arena, float, (size_t)region->width);
  if (hidden == NULL || result == NULL || n_of(events[0]) != n || k_of(events[2]) != f->inner ||
      n_of(events[2]) != region->width || k_of(events[0]) != region->width)
    return NULL;
  const float *x = (const float *)region->values[region->x].tensor.data + token * region->width;
  multiply(f, events[0], expert, x, hidden);
  if (events[1] != NULL) multiply(f, events[1], expert, x, hidden + n);
  for (int64_t i = 0; i < f->inner; i++) hidden[2 * n + i] = (float)glu_at(f, hidden, hidden + n, i);
  multiply(f, events[2], expert, hidden + 2 * n, result);
  return *cell = result;
}

/* ---- router --------------------------------------------------------------------------------------------------- */

/* The choice and its weights, in the order of pairs, by the operator that the router becomes. */
static bool route(fit *f) {
  egi_moe_region *region = f->region;
  const egi_moe *moe = &f->moe;
  int64_t e = region->n_experts, t = region->tokens, n_pairs = t * moe->top_k;
  int32_t *indices = EGI_NEW(region->arena, int32_t, (size_t)n_pairs);
  float *weights = EGI_NEW(region->arena, float, (size_t)n_pairs);
  egi_tensor outputs[5], logits = {region->values[region->logits].tensor.data, EG_DTYPE_F32, 2, {t, e}, {e, 1}};
  egi_moe_value values[2] = {{.tensor = logits}, {.tensor = {0}}};
  if (region->correction != 0) values[1].tensor = region->values[region->correction].tensor;
  egi_moe_value *inputs[2] = {&values[0], region->correction != 0 ? &values[1] : NULL};
  egi_attribute attributes[] = {egi_attribute_int("experts", e),
                                egi_attribute_int("top_k", moe->top_k),
                                egi_attribute_string("scoring", moe->is_sigmoid ? "sigmoid" : "softmax"),
                                egi_attribute_string("order", moe->is_scored_before ? "before" : "after"),
                                egi_attribute_string("group_score", moe->is_group_best ? "best" : "top2"),
                                egi_attribute_int("normalise", moe->is_normalised),
                                egi_attribute_int("groups", moe->groups),
                                egi_attribute_int("top_groups", moe->top_groups)};
  egi_value_id ids[2] = {1, region->correction}, outs[5] = {1, 1, 1, 1, 1};
  const egi_node node = {.op = EGI_OP_Route,
                         .inputs = ids,
                         .outputs = outs,
                         .attributes = attributes,
                         .n_inputs = region->correction != 0 ? 2 : 1,
                         .n_outputs = 5,
                         .n_attributes = EGI_COUNT(attributes)};
  if (indices == NULL || weights == NULL || egi_moe_evaluate(region, &node, inputs, outputs) != EG_OK) return false;
  for (int64_t i = 0; i < n_pairs; i++) {
    int32_t row = ((const int32_t *)outputs[2].data)[i];
    indices[i] = ((const int32_t *)outputs[0].data)[row];
    weights[i] = ((const float *)outputs[4].data)[row];
  }
  f->indices = indices;
  f->weights = weights;
  return true;
}

/* ---- order ---------------------------------------------------------------------------------------------------- */

/* The weight of an expert for a token; 0 where it is not chosen. */
static double weight_of(const fit *f, int64_t token, int64_t expert) {
  for (int64_t j = token * f->moe.top_k; j < (token + 1) * f->moe.top_k; j++)
    if (f->indices[j] == expert) return (double)f->weights[j];
  return 0.0;
}

/* The token whose hidden state stands at `row`, or -1. */
static int64_t token_of(const fit *f, const float *row) {
  const egi_moe_region *region = f->region;
  const float *x = region->values[region->x].tensor.data;
  size_t bytes = (size_t)region->width * sizeof(float);
  for (int64_t token = 0; token < region->tokens; token++)
    if (memcmp(x + token * region->width, row, bytes) == 0) return token;
  return -1;
}

/* Whether a piece works for this expert: on the tokens that chose it, or on all with their weights for it. */
static bool serves(const fit *f, const egi_moe_event *up, const egi_moe_event *down, int64_t expert) {
  const egi_moe_region *region = f->region;
  int64_t rows = egi_tensor_count(&up->in) / region->width, n_chosen = 0;
  bool has_shares = down->shares.data != NULL && egi_tensor_count(&down->shares) == region->tokens;
  for (int64_t t = 0; t < region->tokens; t++) {
    double weight = weight_of(f, t, expert);
    n_chosen += weight > 0.0;
    if (rows == region->tokens && has_shares &&
        (weight > 0.0) != (fabs((double)((const float *)down->shares.data)[t]) > 0.0))
      return false;
  }
  if (rows == region->tokens && has_shares) return true;
  if (rows != n_chosen) return false;
  for (int64_t r = 0; r < rows; r++) {
    int64_t token = token_of(f, (const float *)up->in.data + r * region->width);
    if (token < 0 || !(weight_of(f, token, expert) > 0.0)) return false;
  }
  return true;
}

/* Pieces stand in the order of the experts unless the routing tells otherwise; false: nothing new. */
static bool find_order(fit *f) {
  int64_t n = f->region->n_experts;
  uint32_t *place = EGI_NEW(f->region->arena, uint32_t, (size_t)n);
  bool *is_taken = EGI_NEW(f->region->arena, bool, (size_t)n), is_new = false;
  if (place == NULL || is_taken == NULL || f->n_down != (uint64_t)n) return false;
  for (int64_t e = 0; e < n; e++) {
    uint32_t found = UINT32_MAX;
    for (uint32_t i = 0; i < f->n_down && found == UINT32_MAX; i++) {
      uint32_t at = (uint32_t)((e + i) % n); /* its own place first */
      const egi_moe_event *from[2];
      if (is_taken[at] || !ordered_sources(f, f->down[at], from) || from[0]->n_members > 0) continue;
      if (serves(f, from[0], f->down[at], e)) found = at;
    }
    if (found == UINT32_MAX) return false;
    place[e] = found;
    is_taken[found] = true;
    is_new = is_new || found != f->place[e];
  }
  if (!is_new) return false;
  f->place = place;
  memset(f->results, 0, (size_t)(f->region->tokens * n) * sizeof(*f->results));
  return true;
}

static bool agrees_on(fit *f, int64_t token) {
  egi_moe_region *region = f->region;
  const float *wanted = (const float *)region->values[region->exit].tensor.data + token * region->width;
  const float *results[64];
  double size = 0.0;
  if (f->moe.top_k > (int64_t)EGI_COUNT(results)) return false;
  for (int64_t j = 0; j < f->moe.top_k; j++) {
    int64_t at = token * f->moe.top_k + j;
    results[j] = result_of(f, token, f->indices[at]);
    if (results[j] == NULL) return false;
  }
  for (int64_t i = 0; i < region->width; i++) size = fmax(size, fabs((double)wanted[i]));
  for (int64_t i = 0; i < region->width; i++) {
    double sum = 0.0;
    for (int64_t j = 0; j < f->moe.top_k; j++)
      sum += (double)f->weights[token * f->moe.top_k + j] * (double)results[j][i];
    if (!(fabs(sum * f->moe.routed_scale - (double)wanted[i]) <= 2e-5 * size + 1e-6)) return false;
  }
  return true;
}

static bool agrees(fit *f) {
  for (int64_t t = 0; t < f->region->tokens; t++)
    if (!agrees_on(f, t)) return false;
  return true;
}

static bool agrees_at_some_scale(fit *f) {
  const egi_moe_region *region = f->region;
  for (uint32_t i = 0; i <= region->n_numbers; i++) {
    f->moe.routed_scale = i == 0 ? 1.0 : region->numbers[i - 1];
    if (f->moe.routed_scale > 0.0 && agrees(f)) return true;
  }
  return false;
}

static bool try_scales(fit *f) {
  if (!route(f)) return false;
  return agrees_at_some_scale(f) || (find_order(f) && agrees_at_some_scale(f));
}

/* Sizes of the choices: of experts, and of groups where there are any. */
static bool read_choices(fit *f) {
  egi_moe_region *region = f->region;
  f->moe.top_k = 0;
  f->moe.groups = f->moe.top_groups = 1;
  for (uint32_t i = 0; i < region->n_nodes; i++) {
    const egi_node *node = &region->graph->nodes[region->nodes[i]];
    if (node->op != EGI_OP_TopK) continue;
    const egi_tensor *in = &region->values[node->inputs[0]].tensor;
    egi_value_id result = node->outputs[0] != 0 ? node->outputs[0] : node->outputs[1];
    if (in->dtype != EG_DTYPE_F32 || in->rank < 1) continue;
    int64_t size = in->dims[in->rank - 1], k = region->values[result].tensor.dims[in->rank - 1];
    if (size == region->n_experts)
      f->moe.top_k = k;
    else if (in->rank == 2 && region->n_experts % size == 0 && k < size) {
      f->moe.groups = size;
      f->moe.top_groups = k;
    }
  }
  return f->moe.top_k > 0 || egi_moe_reject(region, region->last_choice, "no choice among all experts");
}

static bool fit_router(fit *f) {
  for (unsigned i = 0; i < 16; i++) {
    f->moe.is_scored_before = ((i & 2) == 0) == f->region->is_scored_first;
    f->moe.is_normalised = (i & 1) != 0;
    f->moe.is_sigmoid = (i & 4) != 0;
    f->moe.is_group_best = (i & 8) != 0;
    if (f->moe.groups == 1 && f->moe.is_group_best) break;
    if (try_scales(f)) return true;
  }
  return egi_moe_reject(f->region, f->region->last_choice, "no router that is known gives the region's result");
}

/* ---- the result ----------------------------------------------------------------------------------------------- */

/* The operand of a role that a product has; 0: none. */
static egi_value_id operand_of(const egi_moe_event *event, egi_moe_role role) {
  if (role >= EGI_MOE_GATE_SCALES) return role % 2 == 0 ? event->scales : event->zeros;
  return role % 2 == 0 ? event->matrix.weight : event->bias;
}

/* One stack where the experts are its slices in order. */
static bool put_operand(fit *f, egi_moe_operands *out, egi_moe_role role, unsigned which) {
  bool is_bias = role < EGI_MOE_GATE_SCALES && role % 2 == 1, is_packed = f->moe.is_quantised && !is_bias;
  egi_moe_region *region = f->region;
  int64_t e = region->n_experts;
  egi_value_id *values = EGI_NEW(region->arena, egi_value_id, (size_t)e);
  uint32_t count = 0;
  bool is_stack = true;
  if (values == NULL) return egi_moe_reject(region, 0, "out of memory");
  for (int64_t i = 0; i < e; i++) {
    const egi_moe_event *events[3];
    if (!experts_events(f, i, events)) return false;
    const egi_moe_event *event = events[which];
    values[i] = event == NULL ? 0 : operand_of(event, role);
    if (values[i] == 0) continue;
    count++;
    is_stack = is_stack && !is_packed && values[i] == values[0] &&
               (is_bias ? weight_count(f, values[i]) == e * n_of(event)
                        : event->matrix.is_stack && slice_of(f, event, i) == i);
  }
  if (count == 0) return true;
  if (count != (uint32_t)e) return egi_moe_reject(region, region->router, "only some of its experts have an operand");
  for (int64_t i = 0; i < e && !is_stack && !is_packed; i++)
    if (region->graph->values[values[i]].rank != (is_bias ? 1 : 2))
      return egi_moe_reject(region, region->router, "its experts are slices in another order");
  out->values[role] = values;
  out->counts[role] = is_stack ? 1 : count;
  return true;
}

static bool put_operands(fit *f, egi_moe_operands *out) {
  const egi_moe_event *events[3];
  *out = (egi_moe_operands){0};
  if (!experts_events(f, 0, events)) return false;
  for (unsigned i = 0; i < 3; i++) {
    if (events[i] == NULL) continue;
    f->moe.is_transposed[i] = events[i]->is_transposed;
    f->moe.is_quantised = events[0]->bits > 0;
    f->moe.bits = events[0]->bits;
    f->moe.block_size = events[0]->block_size;
    out->rows[i] = n_of(events[i]);
    for (int64_t e = 0; e < f->region->n_experts; e++) {
      const egi_moe_event *others[3];
      if (!experts_events(f, e, others)) return false;
      if (others[i] == NULL || others[i]->is_transposed != events[i]->is_transposed ||
          others[i]->bits != events[0]->bits || others[i]->block_size != events[0]->block_size)
        return egi_moe_reject(f->region, f->region->router, "its experts are not all of one form");
    }
    for (unsigned role = 2 * i; role < EGI_MOE_ROLES; role += role % 2 == 0 ? 1 : EGI_MOE_GATE_SCALES - 1)
      if (!put_operand(f, out, (egi_moe_role)role, i)) return false;
  }
  return true;
}

/* All of one size, from hidden states to hidden states. */
static bool are_experts(const fit *f) {
  for (uint32_t i = 0; i < f->n_up; i++)
    if (k_of(f->up[i]) != f->region->width || n_of(f->up[i]) != n_of(f->up[0])) return false;
  for (uint32_t i = 0; i < f->n_down; i++)
    if (n_of(f->down[i]) != f->region->width || k_of(f->down[i]) != k_of(f->down[0])) return false;
  return true;
}

bool egi_moe_fit(egi_moe_region *region, egi_moe *out_moe, egi_moe_operands *out_operands, uint32_t *out_n_found) {
  fit f = {.region = region};
  *out_n_found = 0;
  if (!sort_events(&f) || !read_choices(&f)) return false;
  if (f.n_down > 1 && f.n_down != (uint64_t)region->n_experts) {
    if (are_experts(&f)) *out_n_found = f.n_down;
    return egi_moe_reject(region, region->last_choice, "not every expert stands behind it");
  }
  f.results = EGI_NEW(region->arena, float *, (size_t)(region->tokens * region->n_experts) + 1);
  f.place = EGI_NEW(region->arena, uint32_t, (size_t)region->n_experts);
  if (f.results == NULL || f.place == NULL) return egi_moe_reject(region, 0, "out of memory");
  for (int64_t e = 0; e < region->n_experts; e++) f.place[e] = (uint32_t)e;
  if (!fit_activation(&f)) return false;
  if (!fit_router(&f) || !put_operands(&f, out_operands)) return false;
  *out_moe = f.moe;
  return true;
}
