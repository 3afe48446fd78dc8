/* Unique (operator version 28): equal slices along an axis, or equal elements, once; in ascending or first-met order.
 * Slices are put in order by a stable merge sort of their numbers, so that the first of equal ones is the first met.
 * `measure` counts, run writes. One thread, deterministic; NaN is larger than all numbers and equal to NaN. */
#include <math.h>

#include "backend/cpu/narrow.h"
#include "backend/cpu/strided.h"

typedef struct slices {
  const egi_tensor *x;
  int64_t outer, n, inner; /* x as [outer, n, inner] */
  int axis;
  bool has_axis, is_sorted;
} slices;

/* Groups of equal slices. */
typedef struct groups {
  int64_t *order;  /* slices in ascending order, equal ones by number */
  int64_t *spare;  /* of the sort */
  int64_t *firsts; /* by group in ascending order: its first slice */
  int64_t *of;     /* by slice: its group */
  int64_t count;
} groups;

static int compare_numbers(double a, double b) {
  if (isnan(a) || isnan(b)) return (isnan(a) ? 1 : 0) - (isnan(b) ? 1 : 0);
  return a < b ? -1 : a > b;
}

static int compare_slices(const slices *s, int64_t a, int64_t b) {
  for (int64_t o = 0; o < s->outer; o++)
    for (int64_t i = 0; i < s->inner; i++) {
      int order = compare_numbers(egi_number_get(s->x->data, s->x->dtype, (o * s->n + a) * s->inner + i),
                                  egi_number_get(s->x->data, s->x->dtype, (o * s->n + b) * s->inner + i));
      if (order != 0) return order;
    }
  return 0;
}

static void sort_slices(const slices *s, groups *g) {
  for (int64_t i = 0; i < s->n; i++) g->order[i] = i;
  for (int64_t width = 1; width < s->n; width *= 2) {
    for (int64_t start = 0; start < s->n; start += 2 * width) {
      int64_t middle = start + width < s->n ? start + width : s->n;
      int64_t end = start + 2 * width < s->n ? start + 2 * width : s->n;
      int64_t a = start, b = middle;
      for (int64_t at = start; at < end; at++) {
        bool takes_a = a < middle && (b >= end || compare_slices(s, g->order[a], g->order[b]) <= 0);
        g->spare[at] = takes_a ? g->order[a++] : g->order[b++];
      }
    }
    int64_t *sorted = g->spare;
    g->spare = g->order;
    g->order = sorted;
  }
}

static void find_groups(const slices *s, groups *g) {
  sort_slices(s, g);
  for (int64_t i = 0; i < s->n; i++) {
    if (i == 0 || compare_slices(s, g->order[i - 1], g->order[i]) != 0) g->firsts[g->count++] = g->order[i];
    g->of[g->order[i]] = g->count - 1;
  }
}

static slices read_slices(const egi_node *node, const egi_tensor *x) {
  slices s = {.x = x, .outer = 1, .n = egi_tensor_count(x), .inner = 1};
  s.has_axis = egi_node_attribute(node, "axis") != NULL;
  s.is_sorted = egi_node_int(node, "sorted", 1) != 0;
  if (!s.has_axis) return s;
  (void)egi_normalise_axis(egi_node_int(node, "axis", 0), x->rank, &s.axis); /* the shape rule saw it */
  s.outer = egi_dims_product(x, 0, s.axis);
  s.n = x->dims[s.axis];
  s.inner = egi_dims_product(x, s.axis + 1, x->rank);
  return s;
}

/* Numbers that groups of n slices take, `places` of the run included. */
static size_t count_numbers(const slices *s) {
  return 5 * ((size_t)s->n + 1);
}

static void make_groups(int64_t *numbers, const slices *s, groups *g) {
  size_t n = (size_t)s->n + 1;
  *g = (groups){numbers, numbers + n, numbers + 2 * n, numbers + 3 * n, 0};
  find_groups(s, g);
}

eg_status egi_cpu_prepare_unique(egi_kernel_plan *plan) {
  slices *s = EGI_NEW(plan->arena, slices, 1);
  if (s == NULL) return EG_ERROR_MEMORY;
  *s = read_slices(egi_plan_node(plan), &plan->inputs[0]);
  plan->params = s;
  plan->workspace_bytes = count_numbers(s) * sizeof(int64_t);
  bool is_supported = egi_is_number(plan->inputs[0].dtype) && egi_element_bytes(plan->inputs[0].dtype) > 0;
  return is_supported ? EG_OK : egi_fail_types(plan);
}

eg_status egi_cpu_measure_unique(const egi_kernel_plan *plan, egi_tensor *outputs) {
  slices s = read_slices(egi_plan_node(plan), &plan->inputs[0]);
  egi_arena arena;
  groups g = {0};
  egi_arena_init(&arena, plan->ctx, EGI_PURPOSE_STEP);
  int64_t *numbers = EGI_NEW(&arena, int64_t, count_numbers(&s));
  if (numbers != NULL) make_groups(numbers, &s, &g);
  egi_arena_clear(&arena);
  outputs[0].dims[s.axis] = g.count;
  for (unsigned i = 1; i < plan->n_outputs; i++) {
    if (outputs[i].dtype == EG_DTYPE_UNDEFINED) continue;
    outputs[i].dims[0] = i == 2 ? s.n : g.count;
  }
  return numbers != NULL ? EG_OK : EG_ERROR_MEMORY;
}

static int64_t *integers_of(const egi_kernel_call *call, unsigned output) {
  return output < call->n_outputs ? call->outputs[output].data : NULL;
}

static void write_groups(const slices *s, const groups *g, const egi_kernel_call *call, int64_t *places) {
  int64_t *indices = integers_of(call, 1), *inverse = integers_of(call, 2), *counts = integers_of(call, 3);
  size_t row_bytes = (size_t)s->inner * egi_element_bytes(s->x->dtype);
  for (int64_t k = 0; k < g->count; k++) { /* ascending rank k stands at places[k] */
    places[k] = k;
    for (int64_t j = 0; j < g->count && !s->is_sorted; j++)
      places[k] += (g->firsts[j] < g->firsts[k] ? 1 : 0) - (j < k ? 1 : 0);
    if (indices != NULL) indices[places[k]] = g->firsts[k];
    if (counts != NULL) counts[places[k]] = 0;
    for (int64_t o = 0; o < s->outer && row_bytes > 0; o++)
      memcpy((uint8_t *)call->outputs[0].data + (size_t)(o * g->count + places[k]) * row_bytes,
             (const uint8_t *)s->x->data + (size_t)(o * s->n + g->firsts[k]) * row_bytes, row_bytes);
  }
  for (int64_t i = 0; i < s->n; i++) {
    if (inverse != NULL) inverse[i] = places[g->of[i]];
    if (counts != NULL) counts[places[g->of[i]]]++;
  }
}

eg_status egi_cpu_run_unique(eg_context *ctx, const egi_kernel_call *call) {
  slices s = *(const slices *)call->params;
  groups g = {0};
  int64_t *numbers = call->workspace;
  s.x = &call->inputs[0];
  make_groups(numbers, &s, &g);
  if (call->outputs[0].dims[s.axis] != g.count)
    return egi_fail(ctx, EG_ERROR_DATA, "the number of unique elements has changed");
  write_groups(&s, &g, call, numbers + 4 * ((size_t)s.n + 1));
  return EG_OK;
}
