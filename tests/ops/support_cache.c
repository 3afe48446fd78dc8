/* Conformance cases of CacheUpdate, and of MaskedAttention over a cache: the whole matrix of scores in double. */
#include "support_ops.h"

#include <math.h>

static void check_update(void **state, eg_dtype dtype, const int32_t *positions, int64_t n) {
  const int64_t heads = 2, capacity = 7, width = 3;
  const int64_t cache_dims[4] = {2, heads, capacity, width}, row_dims[4] = {2, heads, n, width};
  ops_case c;
  ops_begin(&c, state, EGI_OP_CacheUpdate, dtype);
  ops_tensor *cache = ops_add_input(&c, dtype, 4, cache_dims), *rows = ops_add_input(&c, dtype, 4, row_dims);
  ops_tensor *at = ops_add_input(&c, EG_DTYPE_I32, 1, &n), *out = ops_add_output(&c, dtype, 4, cache_dims);
  ops_fill_uniform(cache, -1, 1, 1);
  ops_fill_uniform(rows, -1, 1, 2);
  memcpy(out->values, cache->values, (size_t)ops_count(cache) * sizeof *out->values);
  for (int64_t i = 0; i < n; i++) at->values[i] = positions[i];
  for (int64_t i = 0; i < n && positions[i] >= 0 && positions[i] < capacity; i++)
    for (int64_t head = 0; head < 2 * heads; head++)
      memcpy(out->values + (head * capacity + positions[i]) * width, rows->values + (head * n + i) * width,
             (size_t)width * sizeof *out->values);
  for (int64_t i = 0; i < n; i++)
    if (positions[i] < 0 || positions[i] >= capacity) c.expected_status = EG_ERROR_DATA;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_cache_update(void **state, egi_op op) {
  (void)op;
  static const int32_t positions[] = {3, 4, 5, 6, 6};
  for (int64_t n = 0; n <= 5; n++) check_update(state, n % 2 ? EG_DTYPE_F32 : EG_DTYPE_BF16, positions, n);
  check_update(state, EG_DTYPE_F32, (const int32_t[]){7}, 1);
  check_update(state, EG_DTYPE_F32, (const int32_t[]){-1}, 1);
}

/* ---- attention over a cache ---- */

typedef struct cached_case {
  int64_t q_heads, kv_heads, n, capacity, start, width, window;
  double softcap;
  bool has_sinks;
} cached_case;

static const cached_case cached_cases[] = {
    {2, 1, 1, 9, 0, 4, 0, 0, false},  {2, 1, 1, 9, 8, 4, 0, 0, true},       {4, 2, 1, 500, 450, 4, 0, 0, false},
    {2, 2, 5, 40, 17, 4, 3, 2, true}, {2, 1, 70, 900, 400, 4, 0, 0, false}, {1, 1, 66, 130, 60, 3, 65, 0, true},
};

/* Scores of the query, -inf for keys it does not see; the largest, and the sum of exponentials with the sink. */
static double score_row(const cached_case *a, const ops_case *c, int64_t head, int64_t query, double *scores) {
  const double *q = c->inputs[0].values + (head * a->n + query) * a->width;
  const double *k = c->inputs[1].values + head / (a->q_heads / a->kv_heads) * a->capacity * a->width;
  double largest = a->has_sinks ? c->inputs[4].values[head] : -HUGE_VAL;
  int64_t position = a->start + query;
  for (int64_t j = 0; j < a->capacity; j++) {
    bool is_seen = j <= position && (a->window == 0 || j > position - a->window);
    double dot = 0;
    for (int64_t d = 0; d < a->width && is_seen; d++) dot += q[d] * k[j * a->width + d];
    dot /= sqrt((double)a->width);
    if (a->softcap > 0) dot = a->softcap * tanh(dot / a->softcap);
    scores[j] = is_seen ? dot : -HUGE_VAL;
    if (scores[j] > largest) largest = scores[j];
  }
  return largest;
}

static void check_cached(void **state, const cached_case *a, eg_dtype dtype) {
  const int64_t q_dims[4] = {1, a->q_heads, a->n, a->width}, k_dims[4] = {1, a->kv_heads, a->capacity, a->width};
  ops_case c;
  ops_begin(&c, state, EGI_OP_MaskedAttention, dtype);
  ops_add_attribute(&c, egi_attribute_int("causal", 1));
  if (a->window > 0) ops_add_attribute(&c, egi_attribute_int("window", a->window));
  if (a->softcap > 0) ops_add_attribute(&c, egi_attribute_float("softcap", (float)a->softcap));
  ops_fill_uniform(ops_add_input(&c, dtype, 4, q_dims), -2, 2, 1);
  ops_fill_uniform(ops_add_input(&c, dtype, 4, k_dims), -2, 2, 2);
  ops_fill_uniform(ops_add_input(&c, dtype, 4, k_dims), -2, 2, 3);
  ops_add_absent(&c);
  if (a->has_sinks)
    ops_fill_uniform(ops_add_input(&c, dtype, 1, &a->q_heads), -1, 2, 4);
  else
    ops_add_absent(&c);
  for (int i = 0; i < 3; i++) ops_add_absent(&c);
  ops_tensor *positions = ops_add_input(&c, EG_DTYPE_I32, 1, &a->n);
  for (int64_t i = 0; i < a->n; i++) positions->values[i] = (double)(a->start + i);
  ops_tensor *y = ops_add_output(&c, dtype, 4, q_dims), *lse = ops_add_output(&c, dtype, 3, q_dims);
  double *scores = malloc(sizeof(double) * (size_t)a->capacity);
  assert_non_null(scores);
  for (int64_t row = 0; row < a->q_heads * a->n; row++) {
    int64_t head = row / a->n;
    const double *v = c.inputs[2].values + head / (a->q_heads / a->kv_heads) * a->capacity * a->width;
    double largest = score_row(a, &c, head, row % a->n, scores), total = 0;
    if (a->has_sinks) total = exp(c.inputs[4].values[head] - largest);
    for (int64_t j = 0; j < a->capacity; j++) total += exp(scores[j] - largest);
    for (int64_t j = 0; j < a->capacity; j++)
      for (int64_t d = 0; d < a->width; d++)
        y->values[row * a->width + d] += exp(scores[j] - largest) / total * v[j * a->width + d];
    lse->values[row] = largest + log(total);
  }
  free(scores);
  c.relative = 0;
  c.absolute = dtype == EG_DTYPE_F32 ? 4e-6 : 1e-12;
  ops_check(&c);
  ops_end(&c);
}

void ops_check_cached_attention(void **state) {
  for (size_t i = 0; i < EGI_COUNT(cached_cases); i++) {
    check_cached(state, &cached_cases[i], EG_DTYPE_F32);
    check_cached(state, &cached_cases[i], EG_DTYPE_F64);
  }
}
