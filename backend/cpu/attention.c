/* Attention and MaskedAttention: tiles of 64 queries x 384 keys with an online softmax (Dao et al., FlashAttention,
 * arXiv 2205.14135), never the whole matrix of scores; tiles that causality, window or mask hide are skipped. A task is
 * one tile of queries of one head: it goes through the keys in order, so results do not depend on the number of
 * threads. Products accumulate in the element type, the sums of a row's exponentials over tiles in f64. A sink is where
 * a row's softmax starts from. */
#include "backend/cpu/attention.h"
#include "backend/cpu/strided.h"

#include <math.h>

enum { OUTPUT_Y, OUTPUT_KEY, OUTPUT_VALUE, OUTPUT_SCORES, OUTPUT_LSE };
enum { OUTPUT_MASKED_LSE = 1 };
enum { INPUT_PAST_KEY = 4, INPUT_PAST_VALUE, INPUT_LENGTHS };

typedef struct attention_params {
  egi_attention shared;
  egi_tensor key, value; /* present ones; data NULL: in the workspace at key_at, value_at */
  bool has_present[2];   /* kept in outputs */
  bool copies_present;   /* a past, or outputs for what is there */
  int64_t output_mode;   /* of qk_matmul_output; -1: not wanted */
  unsigned lse_output;
  size_t key_at, value_at, workers_at;
  size_t scores_at, bias_at, sums_at, statistics_at, scratch_at, worker_bytes; /* in a worker's part */
} attention_params;

typedef struct attention_run {
  const attention_params *params;
  const egi_kernel_call *call;
  egi_tensor key, value;
} attention_run;

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

static bool has_output(const egi_tensor *outputs, unsigned n_outputs, unsigned output) {
  return output < n_outputs && outputs[output].dtype != EG_DTYPE_UNDEFINED;
}

static size_t round_up(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

/* past_key, past_value: [batch, kv heads, past, width]. */
static eg_status read_past(egi_kernel_plan *plan, egi_attention *a) {
  bool has_key = egi_plan_has_input(plan, INPUT_PAST_KEY), has_value = egi_plan_has_input(plan, INPUT_PAST_VALUE);
  a->has_lengths = egi_plan_has_input(plan, INPUT_LENGTHS);
  if (has_key != has_value || (has_key && a->has_lengths))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE,
                         "past_key and past_value come together, and without nonpad_kv_seqlen");
  if (has_key) a->n_past = plan->inputs[INPUT_PAST_KEY].rank == 4 ? plan->inputs[INPUT_PAST_KEY].dims[2] : -1;
  return EG_OK;
}

static bool has_dims(const egi_tensor *tensor, const int64_t dims[4]) {
  if (tensor->rank != 4) return false;
  for (int i = 0; i < 4; i++)
    if (tensor->dims[i] != dims[i]) return false;
  return true;
}

static eg_status check_past(const egi_kernel_plan *plan, const egi_attention *a) {
  bool fits = true;
  if (a->n_past != 0 || egi_plan_has_input(plan, INPUT_PAST_KEY)) {
    const egi_tensor *key = &plan->inputs[INPUT_PAST_KEY], *value = &plan->inputs[INPUT_PAST_VALUE];
    fits = has_dims(key, (const int64_t[4]){a->n_batches, a->kv_heads, a->n_past, a->width}) &&
           has_dims(value, (const int64_t[4]){a->n_batches, a->kv_heads, a->n_past, a->value_width}) &&
           key->dtype == a->dtype && value->dtype == a->dtype;
  }
  if (a->has_lengths) {
    const egi_tensor *lengths = &plan->inputs[INPUT_LENGTHS];
    fits = fits && lengths->dtype == EG_DTYPE_I64 && lengths->rank == 1 && lengths->dims[0] == a->n_batches;
  }
  if (fits) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "past or nonpad_kv_seqlen do not fit Q, K and V");
}

static eg_status check_outputs(const egi_kernel_plan *plan, const egi_attention *a, unsigned lse_output) {
  for (unsigned i = 0; i < plan->n_outputs; i++) {
    eg_dtype dtype = plan->outputs[i].dtype;
    bool is_number = i == lse_output && (dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64);
    if (dtype != EG_DTYPE_UNDEFINED && dtype != a->dtype && !is_number) return egi_fail_types(plan);
  }
  return has_output(plan->outputs, plan->n_outputs, OUTPUT_Y) ? EG_OK : egi_fail_types(plan);
}

/* Where keys and values with the past lie: the outputs for them, or the workspace. */
static size_t place_present(const egi_kernel_plan *plan, attention_params *p) {
  egi_attention *a = &p->shared;
  size_t total = 0;
  p->has_present[0] = has_output(plan->outputs, plan->n_outputs, OUTPUT_KEY);
  p->has_present[1] = has_output(plan->outputs, plan->n_outputs, OUTPUT_VALUE);
  p->copies_present = a->n_past > 0 || p->has_present[0] || p->has_present[1];
  if (!p->copies_present) return 0;
  for (int i = 0; i < 2; i++) {
    egi_tensor *present = i == 0 ? &p->key : &p->value;
    if (p->has_present[i]) {
      *present = plan->outputs[OUTPUT_KEY + i];
    } else {
      *present = (egi_tensor){.dtype = a->dtype, .rank = 4};
      const int64_t dims[4] = {a->n_batches, a->kv_heads, a->n_keys, i == 0 ? a->width : a->value_width};
      memcpy(present->dims, dims, sizeof dims);
      egi_tensor_set_contiguous(present);
      *(i == 0 ? &p->key_at : &p->value_at) = total;
      total += round_up((size_t)egi_tensor_count(present) * a->bytes);
    }
    *(i == 0 ? &a->k : &a->v) = egi_attention_heads(present, a->kv_heads);
  }
  return total;
}

/* `workers_at` is set. */
static void place_workspace(egi_kernel_plan *plan, attention_params *p) {
  const egi_attention *a = &p->shared;
  size_t at = 0, output_bytes = p->output_mode >= 0 ? egi_attention_output_bytes(a) : 0;
  p->scores_at = at;
  at += a->bias_bytes;
  p->bias_at = at;
  at += a->bias_bytes;
  p->sums_at = at;
  at += round_up((size_t)(EGI_TILE_QUERIES * a->value_width) * a->bytes);
  p->statistics_at = at;
  at += 2 * (size_t)EGI_TILE_QUERIES * sizeof(double);
  p->scratch_at = at;
  at += a->scratch_bytes;
  p->worker_bytes = at;
  plan->workspace_bytes = p->workers_at + at * egi_pool_size(egi_context_pool(plan->ctx)) + output_bytes;
}

eg_status egi_cpu_prepare_attention(egi_kernel_plan *plan) {
  attention_params *p = EGI_NEW(plan->arena, attention_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  EG_TRY(read_past(plan, &p->shared));
  if (p->shared.n_past < 0) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "past_key must have 4 dims");
  EG_TRY(egi_attention_read(plan, &p->shared));
  EG_TRY(check_past(plan, &p->shared));
  EG_TRY(check_outputs(plan, &p->shared, OUTPUT_LSE));
  p->shared.y = egi_attention_heads(&plan->outputs[OUTPUT_Y], p->shared.q_heads);
  p->output_mode = -1;
  if (has_output(plan->outputs, plan->n_outputs, OUTPUT_SCORES))
    p->output_mode = egi_node_int(egi_plan_node(plan), "qk_matmul_output_mode", 0);
  p->lse_output = OUTPUT_LSE;
  p->workers_at = place_present(plan, p);
  place_workspace(plan, p);
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_masked_attention(egi_kernel_plan *plan) {
  attention_params *p = EGI_NEW(plan->arena, attention_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  EG_TRY(egi_masked_attention_read(plan, EGI_MASKED_FIRST_KEY, &p->shared));
  EG_TRY(check_outputs(plan, &p->shared, OUTPUT_MASKED_LSE));
  p->shared.y = egi_attention_heads(&plan->outputs[OUTPUT_Y], p->shared.q_heads);
  p->output_mode = -1;
  p->lse_output = OUTPUT_MASKED_LSE;
  place_workspace(plan, p);
  plan->params = p;
  return EG_OK;
}

/* ---- run -------------------------------------------------------------------------------------------------------- */

/* Rows [start, start + n) of a [batch, heads, rows, columns] tensor. */
static egi_tensor rows_of(const egi_tensor *tensor, int64_t start, int64_t n) {
  egi_tensor part = *tensor;
  part.data = (char *)tensor->data + start * tensor->strides[2] * (int64_t)egi_element_bytes(tensor->dtype);
  part.dims[2] = n;
  return part;
}

/* Past and new keys or values, one after the other. */
static void copy_present(const attention_run *run, int which, const egi_tensor *present) {
  const egi_attention *a = &run->params->shared;
  const egi_kernel_call *call = run->call;
  const egi_tensor *added = &call->inputs[1 + which];
  if (a->n_past > 0) {
    egi_tensor part = rows_of(present, 0, a->n_past);
    egi_copy(call->pool, &part, &call->inputs[INPUT_PAST_KEY + which]);
  }
  egi_heads heads = egi_attention_heads(added, a->kv_heads);
  egi_tensor view = {added->data,
                     added->dtype,
                     4,
                     {a->n_batches, a->kv_heads, a->n_keys - a->n_past, present->dims[3]},
                     {heads.batch, heads.head, heads.row, heads.column}};
  egi_tensor part = rows_of(present, a->n_past, view.dims[2]);
  egi_copy(call->pool, &part, &view);
}

/* One tile of scores: online softmax over its rows, sums += probabilities · V. */
static void add_tile(const attention_run *run, const egi_attention_head *head, int64_t at[2], int64_t size[2],
                     char *worker) {
  const attention_params *p = run->params;
  const egi_attention *a = &p->shared;
  char *scores = worker + p->scores_at, *sums = worker + p->sums_at;
  void *bias = worker + p->bias_at;
  double *statistics = (double *)(void *)(worker + p->statistics_at);
  egi_mask_state state = egi_attention_mask(a, head, &run->call->inputs[a->has_mask ? 3 : 0], at, size, bias);
  if (state == EGI_MASK_HIDDEN) return;
  egi_attention_scores(a, head, at, size, scores, worker + p->scratch_at);
  for (int64_t i = 0; i < size[0]; i++) {
    egi_score_row row = egi_attention_row(a, head, at, size, i, scores, state == EGI_MASK_BIAS ? bias : NULL);
    double shrink = a->functions->attention(&row, &statistics[2 * i], &statistics[2 * i + 1]);
    if (shrink != 1.0) a->functions->scale(sums + (size_t)(i * a->value_width) * a->bytes, shrink, a->value_width);
  }
  egi_product product = {size[0],
                         a->value_width,
                         size[1],
                         {scores, a->dtype, size[1], 1},
                         egi_matrix_part(&head->v, at[1], 0),
                         {sums, a->dtype, a->value_width, 1},
                         1.0,
                         1.0};
  egi_product_run(a->isa, &product, worker + p->scratch_at);
}

/* Y = sums / total, 0 for a query that sees no key; its lse is infinity, so that the gradient's probabilities are 0. A
 * sink alone leaves the sums at 0, and is the lse. */
static void store_rows(const attention_run *run, const egi_attention_head *head, int64_t query, int64_t n,
                       char *worker) {
  const attention_params *p = run->params;
  const egi_attention *a = &p->shared;
  const egi_kernel_call *call = run->call;
  const double *statistics = (const double *)(const void *)(worker + p->statistics_at);
  egi_matrix y = egi_attention_matrix(a, call->outputs[OUTPUT_Y].data, &a->y, head->batch, head->q_head);
  for (int64_t i = 0; i < n; i++) {
    char *row = worker + p->sums_at + (size_t)(i * a->value_width) * a->bytes, *out = egi_matrix_at(&y, query + i, 0);
    double largest = statistics[2 * i], total = statistics[2 * i + 1];
    bool is_empty = total == 0;
    if (is_empty)
      memset(row, 0, (size_t)a->value_width * a->bytes);
    else
      a->functions->scale(row, 1.0 / total, a->value_width);
    if (y.column_stride == 1) memcpy(out, row, (size_t)a->value_width * a->bytes);
    for (int64_t j = 0; j < a->value_width && y.column_stride != 1; j++)
      memcpy(egi_matrix_at(&y, query + i, j), row + (size_t)j * a->bytes, a->bytes);
    if (!has_output(call->outputs, call->n_outputs, p->lse_output)) continue;
    const egi_tensor *lse = &call->outputs[p->lse_output];
    int64_t offset = head->batch * lse->strides[0] + head->q_head * lse->strides[1] + (query + i) * lse->strides[2];
    bool is_hidden = is_empty || largest < -1e30; /* hidden by the lowest numbers: the exponent has no digits left */
    egi_real_set((char *)lse->data + offset * (int64_t)egi_element_bytes(lse->dtype), lse->dtype,
                 is_hidden ? HUGE_VAL : largest + log(total));
  }
}

static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static void run_tile(void *argument, size_t index, size_t worker_index) {
  const attention_run *run = argument;
  const attention_params *p = run->params;
  const egi_attention *a = &p->shared;
  char *worker = (char *)run->call->workspace + p->workers_at + worker_index * p->worker_bytes;
  int64_t n_tiles = (a->n_queries + EGI_TILE_QUERIES - 1) / EGI_TILE_QUERIES;
  int64_t query = (n_tiles - 1 - (int64_t)index % n_tiles) * EGI_TILE_QUERIES; /* under causality the longest first */
  int64_t n = smaller(EGI_TILE_QUERIES, a->n_queries - query);
  egi_attention_head head =
      egi_attention_head_at(a, run->call, (int64_t)index / n_tiles, run->key.data, run->value.data);
  double *statistics = (double *)(void *)(worker + p->statistics_at);
  double sink = egi_attention_sink(a, run->call, head.q_head);
  for (int64_t i = 0; i < n; i++) {
    statistics[2 * i] = sink;
    statistics[2 * i + 1] = sink > -HUGE_VAL;
  }
  memset(worker + p->sums_at, 0, (size_t)(n * a->value_width) * a->bytes);
  egi_key_range range = egi_attention_tile_range(a, &head, query, n);
  for (int64_t key = range.first; key < range.last; key += EGI_TILE_KEYS)
    add_tile(run, &head, (int64_t[2]){query, key}, (int64_t[2]){n, smaller(EGI_TILE_KEYS, range.last - key)}, worker);
  store_rows(run, &head, query, n, worker);
}

eg_status egi_cpu_run_attention(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const attention_params *p = call->params;
  const egi_attention *a = &p->shared;
  attention_run run = {p, call, call->inputs[1], call->inputs[2]};
  for (int i = 0; i < 2 && p->copies_present; i++) {
    egi_tensor present = i == 0 ? p->key : p->value;
    present.data = p->has_present[i] ? call->outputs[OUTPUT_KEY + i].data
                                     : (char *)call->workspace + (i == 0 ? p->key_at : p->value_at);
    copy_present(&run, i, &present);
    *(i == 0 ? &run.key : &run.value) = present;
  }
  int64_t n_tiles = (a->n_queries + EGI_TILE_QUERIES - 1) / EGI_TILE_QUERIES;
  egi_pool_run(call->pool, (size_t)(a->n_batches * a->q_heads * n_tiles), run_tile, &run);
  if (p->output_mode >= 0)
    egi_attention_output(a, call, p->output_mode, (char *)call->workspace + p->workers_at, &run.key);
  return EG_OK;
}
