/* AttentionGrad and MaskedAttentionGrad: scores of each tile are computed anew, once, and become probabilities through
 * the saved log-sum-exp (Dao et al., arXiv 2205.14135, section B.4). A task owns every n-th tile of keys of one key
 * head (a span), and goes through the query heads and queries in order. Where a key head has several spans, for there
 * are few of them, each span has a dQ of its own, which are added up at the end: no atomics, and an order that depends
 * on sizes alone. Products accumulate in the element type; delta = sum of dY · Y per row in f64. No gradient flows to
 * the mask. A sink's value is 0, so that its gradient is the sum of -p · delta over its rows. */
#include "backend/cpu/attention.h"

#include <math.h>

#define TILE_OWN_KEYS ((int64_t)128) /* keys of a tile; at most EGI_TILE_KEYS */
/* Tasks that spans are to make, and the room that their own dQ may take together. */
#define WANTED_TASKS ((int64_t)16)
#define SPANS_BYTES ((int64_t)64 << 20)

enum { INPUT_MASK = 3, INPUT_Y = 4, INPUT_MASKED_Y = 5, INPUT_FIRST_KEY = 8 }; /* lse and dY follow Y */
enum { OUTPUT_DQ, OUTPUT_DK, OUTPUT_DV, OUTPUT_DSINKS, OUTPUT_COUNT };

typedef struct grad_params {
  egi_attention shared;
  unsigned y_input, lse_input, dy_input;
  egi_heads y, dy, gradients[OUTPUT_DV + 1];
  int64_t n_spans;
  size_t spans_at;   /* deltas lie before: f64 [batch, q_heads, queries] */
  size_t workers_at; /* before it: dQ of each span, [span, batch, q_heads, queries, width]; none for a single one */
  size_t scores_at, d_scores_at, bias_at, scratch_at, worker_bytes;
} grad_params;

typedef struct grad_run {
  const grad_params *params;
  const egi_kernel_call *call;
} grad_run;

static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}
static int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

static bool same_dims(const egi_tensor *a, const egi_tensor *b) {
  if (a->rank != b->rank) return false;
  for (int i = 0; i < a->rank; i++)
    if (a->dims[i] != b->dims[i]) return false;
  return true;
}

static eg_status check_operands(const egi_kernel_plan *plan, const grad_params *p) {
  const egi_attention *a = &p->shared;
  const egi_tensor *y = &plan->inputs[p->y_input], *lse = &plan->inputs[p->lse_input];
  const egi_tensor *dy = &plan->inputs[p->dy_input];
  if (y->dtype != a->dtype || dy->dtype != a->dtype || !egi_row_functions_of(lse->dtype)) return egi_fail_types(plan);
  bool fits = same_dims(y, dy) && lse->rank == 3 && lse->dims[0] == a->n_batches && lse->dims[1] == a->q_heads &&
              lse->dims[2] == a->n_queries && y->rank == plan->inputs[0].rank && y->dims[0] == a->n_batches;
  if (fits && y->rank == 4)
    fits = y->dims[1] == a->q_heads && y->dims[2] == a->n_queries && y->dims[3] == a->value_width;
  else if (fits)
    fits = y->dims[1] == a->n_queries && y->dims[2] == a->q_heads * a->value_width;
  for (unsigned i = 0; i < plan->n_outputs && fits; i++) {
    const egi_tensor *variable = &plan->inputs[i == OUTPUT_DSINKS ? 4 : i];
    if (plan->outputs[i].dtype == EG_DTYPE_UNDEFINED) continue;
    if (plan->outputs[i].dtype != variable->dtype) return egi_fail_types(plan);
    fits = same_dims(&plan->outputs[i], variable);
  }
  if (fits) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "Y, lse, dY or the results do not fit Q, K and V");
}

/* How the keys of a head are shared out. */
static void choose_spans(grad_params *p) {
  const egi_attention *a = &p->shared;
  int64_t n_heads = larger(a->n_batches * a->kv_heads, 1);
  int64_t dq_bytes = larger(a->n_batches * a->q_heads * a->n_queries * a->width * (int64_t)a->bytes, 1);
  p->n_spans = smaller(ceil_divide(WANTED_TASKS, n_heads), ceil_divide(a->n_keys, TILE_OWN_KEYS));
  p->n_spans = larger(smaller(p->n_spans, SPANS_BYTES / dq_bytes), 1);
}

/* `p->shared` is read. */
static eg_status prepare(egi_kernel_plan *plan, grad_params *p, unsigned y_input) {
  egi_attention *a = &p->shared;
  p->y_input = y_input;
  p->lse_input = y_input + 1;
  p->dy_input = y_input + 2;
  EG_TRY(check_operands(plan, p));
  p->y = egi_attention_heads(&plan->inputs[p->y_input], a->q_heads);
  p->dy = egi_attention_heads(&plan->inputs[p->dy_input], a->q_heads);
  for (unsigned i = 0; i < plan->n_outputs && i <= OUTPUT_DV; i++)
    if (plan->outputs[i].dtype != EG_DTYPE_UNDEFINED)
      p->gradients[i] = egi_attention_heads(&plan->outputs[i], i == OUTPUT_DQ ? a->q_heads : a->kv_heads);
  size_t deltas = (size_t)(a->n_batches * a->q_heads * a->n_queries) * sizeof(double);
  choose_spans(p);
  p->spans_at = (deltas + 63) / 64 * 64;
  int64_t n_rows = p->n_spans > 1 ? p->n_spans * a->n_batches * a->q_heads * a->n_queries : 0;
  p->workers_at = p->spans_at + ((size_t)(n_rows * a->width) * a->bytes + 63) / 64 * 64;
  p->d_scores_at = p->scores_at + a->bias_bytes;
  p->bias_at = p->d_scores_at + a->bias_bytes;
  p->scratch_at = p->bias_at + a->bias_bytes;
  p->worker_bytes = p->scratch_at + a->scratch_bytes;
  plan->workspace_bytes = p->workers_at + p->worker_bytes * egi_pool_size(egi_context_pool(plan->ctx));
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_attention_grad(egi_kernel_plan *plan) {
  grad_params *p = EGI_NEW(plan->arena, grad_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  EG_TRY(egi_attention_read(plan, &p->shared));
  return prepare(plan, p, INPUT_Y);
}

eg_status egi_cpu_prepare_masked_attention_grad(egi_kernel_plan *plan) {
  grad_params *p = EGI_NEW(plan->arena, grad_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  EG_TRY(egi_masked_attention_read(plan, INPUT_FIRST_KEY, &p->shared));
  return prepare(plan, p, INPUT_MASKED_Y);
}

/* ---- run -------------------------------------------------------------------------------------------------------- */

static bool has_output(const grad_run *run, unsigned output) {
  return output < run->call->n_outputs && run->call->outputs[output].dtype != EG_DTYPE_UNDEFINED;
}

static egi_attention_head head_at(const grad_run *run, int64_t index) {
  const egi_tensor *inputs = run->call->inputs;
  return egi_attention_head_at(&run->params->shared, run->call, index, inputs[1].data, inputs[2].data);
}

static double *delta_at(const grad_run *run, int64_t index, int64_t query) {
  return (double *)run->call->workspace + index * run->params->shared.n_queries + query;
}

/* delta = sum of dY · Y, for a tile of queries of one head. */
static void run_delta(void *argument, size_t index, size_t worker) {
  (void)worker;
  const grad_run *run = argument;
  const grad_params *p = run->params;
  const egi_attention *a = &p->shared;
  int64_t n_tiles = ceil_divide(a->n_queries, EGI_TILE_QUERIES), head = (int64_t)index / n_tiles;
  int64_t query = (int64_t)index % n_tiles * EGI_TILE_QUERIES, end = smaller(query + EGI_TILE_QUERIES, a->n_queries);
  const egi_tensor *inputs = run->call->inputs;
  egi_matrix y = egi_attention_matrix(a, inputs[p->y_input].data, &p->y, head / a->q_heads, head % a->q_heads);
  egi_matrix dy = egi_attention_matrix(a, inputs[p->dy_input].data, &p->dy, head / a->q_heads, head % a->q_heads);
  bool is_packed = (y.column_stride == 1 && dy.column_stride == 1) || a->value_width == 1;
  for (; query < end; query++) {
    double sum = 0;
    if (is_packed) sum = a->functions->dot(egi_matrix_at(&y, query, 0), egi_matrix_at(&dy, query, 0), a->value_width);
    for (int64_t j = 0; j < a->value_width && !is_packed; j++)
      sum += egi_real_get(egi_matrix_at(&y, query, j), a->dtype) * egi_real_get(egi_matrix_at(&dy, query, j), a->dtype);
    *delta_at(run, head, query) = sum;
  }
}

static double lse_at(const grad_run *run, int64_t batch, int64_t q_head, int64_t query) {
  const egi_tensor *lse = &run->call->inputs[run->params->lse_input];
  int64_t offset = batch * lse->strides[0] + q_head * lse->strides[1] + query * lse->strides[2];
  return egi_real_get((const char *)lse->data + offset * (int64_t)egi_element_bytes(lse->dtype), lse->dtype);
}

/* Probabilities and gradients of the raw scores of a tile; false when the mask hides all of it. */
static bool make_tile(const grad_run *run, const egi_attention_head *head, int64_t at[2], int64_t size[2],
                      char *worker) {
  const grad_params *p = run->params;
  const egi_attention *a = &p->shared;
  const egi_tensor *inputs = run->call->inputs;
  char *scores = worker + p->scores_at, *d_scores = worker + p->d_scores_at, *bias = worker + p->bias_at;
  void *scratch = worker + p->scratch_at;
  egi_mask_state state = egi_attention_mask(a, head, &inputs[a->has_mask ? INPUT_MASK : 0], at, size, bias);
  if (state == EGI_MASK_HIDDEN) return false;
  egi_attention_scores(a, head, at, size, scores, scratch);
  egi_matrix dy = egi_attention_matrix(a, inputs[p->dy_input].data, &p->dy, head->batch, head->q_head);
  egi_matrix values = {head->v.data, a->dtype, head->v.column_stride, head->v.row_stride};
  egi_product product = {size[0],
                         size[1],
                         a->value_width,
                         egi_matrix_part(&dy, at[0], 0),
                         egi_matrix_part(&values, 0, at[1]),
                         {d_scores, a->dtype, size[1], 1},
                         1.0,
                         0.0};
  egi_product_run(a->isa, &product, scratch);
  for (int64_t i = 0; i < size[0]; i++) {
    egi_score_row row = egi_attention_row(a, head, at, size, i, scores, state == EGI_MASK_BIAS ? bias : NULL);
    int64_t query = at[0] + i;
    double shift = lse_at(run, head->batch, head->q_head, query);
    double delta = *delta_at(run, head->batch * a->q_heads + head->q_head, query);
    a->functions->attention_grad(&row, shift, delta, d_scores + (size_t)(i * size[1]) * a->bytes);
  }
  return true;
}

static egi_matrix gradient_of(const grad_run *run, unsigned output, int64_t batch, int64_t head) {
  return egi_attention_matrix(&run->params->shared, run->call->outputs[output].data, &run->params->gradients[output],
                              batch, head);
}

static void clear_rows(const egi_attention *a, const egi_matrix *matrix, int64_t first, int64_t n, int64_t columns) {
  bool is_packed = matrix->column_stride == 1;
  for (int64_t i = first; i < first + n; i++) {
    if (is_packed) memset(egi_matrix_at(matrix, i, 0), 0, (size_t)columns * a->bytes);
    for (int64_t j = 0; j < columns && !is_packed; j++) memset(egi_matrix_at(matrix, i, j), 0, a->bytes);
  }
}

/* C += A · B with a tile of scores (transposed for gradients of keys) as A; B and C are the caller's. */
static egi_product tile_product(const egi_attention *a, char *tile, const int64_t size[2], bool is_transposed) {
  egi_product product = {.k = is_transposed ? size[0] : size[1], .alpha = 1.0, .beta = 1.0};
  product.m = is_transposed ? size[1] : size[0];
  product.a = (egi_matrix){tile, a->dtype, is_transposed ? 1 : size[1], is_transposed ? size[1] : 1};
  return product;
}

/* dV += P' · dY and dK += scale · dS' · Q for a tile. */
static void add_to_keys(const grad_run *run, const egi_attention_head *head, const int64_t at[2], const int64_t size[2],
                        char *worker) {
  const grad_params *p = run->params;
  const egi_attention *a = &p->shared;
  int64_t kv_head = head->q_head / (a->q_heads / a->kv_heads);
  if (has_output(run, OUTPUT_DV)) {
    egi_matrix dy = egi_attention_matrix(a, run->call->inputs[p->dy_input].data, &p->dy, head->batch, head->q_head);
    egi_matrix dv = gradient_of(run, OUTPUT_DV, head->batch, kv_head);
    egi_product product = tile_product(a, worker + p->scores_at, size, true);
    product.n = a->value_width;
    product.b = egi_matrix_part(&dy, at[0], 0);
    product.c = egi_matrix_part(&dv, at[1], 0);
    egi_product_run(a->isa, &product, worker + p->scratch_at);
  }
  if (has_output(run, OUTPUT_DK)) {
    egi_matrix dk = gradient_of(run, OUTPUT_DK, head->batch, kv_head);
    egi_product product = tile_product(a, worker + p->d_scores_at, size, true);
    product.n = a->width;
    product.b = egi_matrix_part(&head->q, at[0], 0);
    product.c = egi_matrix_part(&dk, at[1], 0);
    product.alpha = a->scale;
    egi_product_run(a->isa, &product, worker + p->scratch_at);
  }
}

/* The dQ that a span adds to: the result itself where it is the only one. */
static egi_matrix span_of(const grad_run *run, int64_t span, int64_t batch, int64_t q_head) {
  const grad_params *p = run->params;
  const egi_attention *a = &p->shared;
  if (p->n_spans == 1) return gradient_of(run, OUTPUT_DQ, batch, q_head);
  int64_t row = ((span * a->n_batches + batch) * a->q_heads + q_head) * a->n_queries;
  char *data = (char *)run->call->workspace + p->spans_at + (size_t)(row * a->width) * a->bytes;
  return (egi_matrix){data, a->dtype, a->width, 1};
}

/* dQ += scale · dS · K for a tile. */
static void add_to_queries(const grad_run *run, const egi_attention_head *head, const int64_t at[2],
                           const int64_t size[2], int64_t span, char *worker) {
  const grad_params *p = run->params;
  const egi_attention *a = &p->shared;
  egi_matrix dq = span_of(run, span, head->batch, head->q_head);
  egi_product product = tile_product(a, worker + p->d_scores_at, size, false);
  product.n = a->width;
  product.b = egi_matrix_part(&head->k, at[1], 0);
  product.c = egi_matrix_part(&dq, at[0], 0);
  product.alpha = a->scale;
  egi_product_run(a->isa, &product, worker + p->scratch_at);
}

/* One tile of keys: over the query heads that share them, over the queries. */
static void run_keys(const grad_run *run, int64_t kv_at[2], int64_t key, int64_t span, char *worker) {
  const grad_params *p = run->params;
  const egi_attention *a = &p->shared;
  int64_t end = smaller(key + TILE_OWN_KEYS, a->n_keys), group = a->q_heads / a->kv_heads;
  for (unsigned i = OUTPUT_DK; i <= OUTPUT_DV; i++) {
    if (!has_output(run, i)) continue;
    egi_matrix gradient = gradient_of(run, i, kv_at[0], kv_at[1]);
    clear_rows(a, &gradient, key, end - key, i == OUTPUT_DK ? a->width : a->value_width);
  }
  for (int64_t q_head = kv_at[1] * group; q_head < (kv_at[1] + 1) * group; q_head++) {
    egi_attention_head head = head_at(run, kv_at[0] * a->q_heads + q_head);
    for (int64_t query = 0; query < a->n_queries; query += EGI_TILE_QUERIES) {
      int64_t n = smaller(EGI_TILE_QUERIES, a->n_queries - query);
      egi_key_range range = egi_attention_tile_range(a, &head, query, n);
      int64_t first = larger(range.first, key), last = smaller(range.last, end);
      int64_t at[2] = {query, first}, size[2] = {n, last - first};
      if (first >= last || !make_tile(run, &head, at, size, worker)) continue;
      add_to_keys(run, &head, at, size, worker);
      if (has_output(run, OUTPUT_DQ)) add_to_queries(run, &head, at, size, span, worker);
    }
  }
}

/* The tiles of keys of one span. */
static void run_span(void *argument, size_t index, size_t worker_index) {
  const grad_run *run = argument;
  const grad_params *p = run->params;
  const egi_attention *a = &p->shared;
  char *worker = (char *)run->call->workspace + p->workers_at + worker_index * p->worker_bytes;
  int64_t span = (int64_t)index % p->n_spans, head = (int64_t)index / p->n_spans, group = a->q_heads / a->kv_heads;
  int64_t kv_at[2] = {head / a->kv_heads, head % a->kv_heads};
  for (int64_t i = 0; i < group && has_output(run, OUTPUT_DQ); i++) {
    egi_matrix dq = span_of(run, span, kv_at[0], kv_at[1] * group + i);
    clear_rows(a, &dq, 0, a->n_queries, a->width);
  }
  for (int64_t key = span * TILE_OWN_KEYS; key < a->n_keys; key += p->n_spans * TILE_OWN_KEYS)
    run_keys(run, kv_at, key, span, worker);
}

/* dQ of a tile of queries: the spans' in order. */
static void run_sum(void *argument, size_t index, size_t worker) {
  (void)worker;
  const grad_run *run = argument;
  const egi_attention *a = &run->params->shared;
  int64_t n_tiles = ceil_divide(a->n_queries, EGI_TILE_QUERIES), head = (int64_t)index / n_tiles;
  int64_t query = (int64_t)index % n_tiles * EGI_TILE_QUERIES, end = smaller(query + EGI_TILE_QUERIES, a->n_queries);
  int64_t batch = head / a->q_heads, q_head = head % a->q_heads;
  egi_matrix dq = gradient_of(run, OUTPUT_DQ, batch, q_head), first = span_of(run, 0, batch, q_head);
  for (; query < end; query++) {
    void *sum = egi_matrix_at(&first, query, 0);
    for (int64_t span = 1; span < run->params->n_spans; span++) {
      egi_matrix next = span_of(run, span, batch, q_head);
      a->functions->add(sum, egi_matrix_at(&next, query, 0), a->width);
    }
    bool is_packed = dq.column_stride == 1;
    if (is_packed) memcpy(egi_matrix_at(&dq, query, 0), sum, (size_t)a->width * a->bytes);
    for (int64_t j = 0; j < a->width && !is_packed; j++)
      memcpy(egi_matrix_at(&dq, query, j), (const char *)sum + (size_t)j * a->bytes, a->bytes);
  }
}

/* The gradient of one sink: over the batch and the queries in order. */
static void run_sink(void *argument, size_t index, size_t worker) {
  (void)worker;
  const grad_run *run = argument;
  const egi_attention *a = &run->params->shared;
  const egi_tensor *out = &run->call->outputs[OUTPUT_DSINKS];
  int64_t head = (int64_t)index;
  double sink = egi_attention_sink(a, run->call, head), sum = 0;
  for (int64_t batch = 0; batch < a->n_batches; batch++)
    for (int64_t query = 0; query < a->n_queries; query++)
      sum -= exp(sink - lse_at(run, batch, head, query)) * *delta_at(run, batch * a->q_heads + head, query);
  egi_real_set((char *)out->data + head * out->strides[0] * (int64_t)egi_element_bytes(out->dtype), out->dtype, sum);
}

eg_status egi_cpu_run_attention_grad(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const egi_attention *a = &((const grad_params *)call->params)->shared;
  grad_run run = {call->params, call};
  size_t query_tiles = (size_t)(a->n_batches * a->q_heads * ceil_divide(a->n_queries, EGI_TILE_QUERIES));
  egi_pool_run(call->pool, query_tiles, run_delta, &run);
  size_t n_spans = (size_t)(a->n_batches * a->kv_heads * run.params->n_spans);
  if (has_output(&run, OUTPUT_DQ) || has_output(&run, OUTPUT_DK) || has_output(&run, OUTPUT_DV))
    egi_pool_run(call->pool, n_spans, run_span, &run);
  if (has_output(&run, OUTPUT_DQ) && run.params->n_spans > 1) egi_pool_run(call->pool, query_tiles, run_sum, &run);
  if (has_output(&run, OUTPUT_DSINKS)) egi_pool_run(call->pool, (size_t)a->q_heads, run_sink, &run);
  return EG_OK;
}
