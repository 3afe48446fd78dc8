/* Lanes: a plan and a session for each bucket of a graph, and the filling of their inputs with padded documents. All
 * staging is made with the lanes: filling allocates nothing. */
#include "train/train.h"

#include <string.h>

/* A table of positions ends somewhere; found here, not at the first long document. */
static eg_status check_length(const egi_lanes *lanes, const egi_bucket *buckets, size_t n_buckets) {
  int64_t n_positions = egi_positions_count(lanes->inputs.graph, &lanes->inputs);
  for (size_t i = 0; i < n_buckets && n_positions > 0 && !lanes->inputs.is_packed; i++)
    if (buckets[i].sequence > n_positions)
      return egi_fail(lanes->inputs.graph->module->ctx, EG_ERROR_DATA,
                      "%u tokens in a row, but the model has a table of %lld positions", buckets[i].sequence,
                      (long long)n_positions);
  return EG_OK;
}

eg_status egi_rows_check(const egi_inputs *inputs, const egi_documents *documents, uint32_t longest) {
  int64_t n_positions = egi_positions_count(inputs->graph, inputs);
  for (size_t i = 0; i < documents->n_documents && n_positions > 0 && longest > n_positions; i++)
    if (documents->offsets[i + 1] - documents->offsets[i] > (uint64_t)n_positions)
      return egi_fail(inputs->graph->module->ctx, EG_ERROR_DATA,
                      "%s: document %zu has %llu tokens, but the model has a table of %lld positions", documents->path,
                      i + 1, (unsigned long long)(documents->offsets[i + 1] - documents->offsets[i]),
                      (long long)n_positions);
  return EG_OK;
}

static eg_status plan_lane(egi_lanes *lanes, const egi_backend *backend, egi_lane *lane, egi_arena *arena) {
  const egi_graph *graph = lanes->inputs.graph;
  egi_binder binder;
  EG_TRY(egi_binder_begin(&binder, graph, arena));
  EG_TRY(egi_binder_finish(&binder, &lanes->inputs, &lane->bucket));
  lane->bindings = binder.bindings;
  lane->n_bindings = binder.n;
  egi_plan_options options = {.bindings = binder.bindings, .n_bindings = binder.n};
  return egi_plan_create(graph->module->ctx, graph, backend, &options, &lane->plan);
}

/* Numbers of documents may be more than their tokens. */
static eg_status count_numbers(const egi_lanes *lanes, uint32_t input, size_t *largest) {
  const egi_graph *graph = lanes->inputs.graph;
  const egi_value *value = &graph->values[graph->inputs[input]];
  egi_dims *dims = graph->module->dims;
  int64_t n = 0;
  if (lanes->inputs.roles[input] != EGI_FEED_NUMBERS) return EG_OK;
  if (!egi_dim_value(dims, egi_dim_resolve(dims, value->dims[1]), &n) || n < 0) return EG_OK;
  for (size_t i = 0; i < lanes->count; i++) {
    size_t size;
    if (!egi_size_multiply(lanes->lanes[i].bucket.batch, (size_t)n, &size))
      return egi_fail(graph->module->ctx, EG_ERROR_BUDGET, "a batch of %u × %lld numbers is too large",
                      lanes->lanes[i].bucket.batch, (long long)n);
    if (size > *largest) *largest = size;
  }
  return EG_OK;
}

eg_status egi_lanes_plan(egi_lanes *lanes, const egi_graph *graph, const egi_backend *backend,
                         const egi_bucket *buckets, size_t n_buckets, egi_arena *arena) {
  size_t largest = 1;
  memset(lanes, 0, sizeof *lanes);
  EG_TRY(egi_inputs_find(graph, arena, &lanes->inputs));
  EG_TRY(egi_inputs_check(&lanes->inputs));
  EG_TRY(check_length(lanes, buckets, n_buckets));
  lanes->lanes = EGI_NEW(arena, egi_lane, n_buckets);
  if (lanes->lanes == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < n_buckets; i++) {
    size_t size;
    lanes->lanes[i].bucket = buckets[i];
    lanes->count = i + 1;
    if (!egi_size_multiply(buckets[i].batch, buckets[i].sequence, &size))
      return egi_fail(graph->module->ctx, EG_ERROR_BUDGET, "a batch of %u × %u tokens is too large", buckets[i].batch,
                      buckets[i].sequence);
    if (size > largest) largest = size;
    EG_TRY(plan_lane(lanes, backend, &lanes->lanes[i], arena));
  }
  for (uint32_t i = 0; i < graph->n_inputs; i++) EG_TRY(count_numbers(lanes, i, &largest));
  lanes->numbers = EGI_NEW(arena, int64_t, largest + 1);
  lanes->bytes = EGI_NEW(arena, int64_t, largest + 1);
  return lanes->numbers != NULL && lanes->bytes != NULL ? EG_OK : EG_ERROR_MEMORY;
}

eg_status egi_lanes_open(egi_lanes *lanes, egi_store *store, egi_scratch *scratch) {
  for (size_t i = 0; i < lanes->count; i++)
    EG_TRY(egi_session_create(store, lanes->lanes[i].plan, scratch, &lanes->lanes[i].session));
  return EG_OK;
}

void egi_lanes_close(egi_lanes *lanes) {
  for (size_t i = 0; i < lanes->count; i++) {
    egi_session_destroy(lanes->lanes[i].session);
    egi_plan_destroy(lanes->lanes[i].plan);
  }
  lanes->count = 0;
}

/* ---- filling ---- */

/* One row of the batch: its document's tokens, or none. */
typedef struct batch_row {
  const int32_t *tokens, *labels, *types;
  uint32_t length; /* 0: a row beyond the documents */
  int32_t filler;  /* behind the tokens, the last of them: 0 may have an embedding of zeros (PyTorch's padding_idx),
                      which a norm without an epsilon makes NaN, and a masked key that is NaN spoils its row; the
                      token that the graph tells padding by where it must find the end of a document */
} batch_row;

static batch_row get_row(const egi_documents *documents, const egi_batch_range *range, uint32_t index) {
  batch_row row = {NULL, NULL, NULL, 0, 0};
  size_t document = 0;
  if (range == NULL || range->n_documents == 0) return row;
  if (index >= range->n_documents) {
    row.filler = documents->tokens[documents->offsets[range->first_document]];
    return row;
  }
  document = range->first_document + index;
  if (range->order != NULL) document = range->order[document];
  uint64_t first = documents->offsets[document], length = documents->offsets[document + 1] - first;
  row.tokens = documents->tokens + first;
  row.labels = documents->labels != NULL ? documents->labels + first : NULL;
  row.types = documents->token_types != NULL ? documents->token_types + first : NULL;
  row.length = length < range->longest ? (uint32_t)length : range->longest;
  row.filler = row.length > 0 ? row.tokens[row.length - 1] : 0;
  return row;
}

/* The number at position t. Rows beyond the documents are unmasked, so that no row of attention is empty. */
static int64_t get_number(egi_feed role, const batch_row *row, uint32_t t) {
  switch (role) {
  case EGI_FEED_INPUT_IDS:
    return t < row->length ? row->tokens[t] : row->filler;
  case EGI_FEED_LABELS: /* shifted: what the token at t should predict */
    return t + 1 < row->length && row->labels != NULL ? row->labels[t + 1] : -100;
  case EGI_FEED_TOKEN_LABELS:
    return t < row->length && row->labels != NULL ? row->labels[t] : -100;
  case EGI_FEED_TOKEN_TYPES:
    return t < row->length && row->types != NULL ? row->types[t] : 0;
  case EGI_FEED_ATTENTION_MASK:
    return row->length == 0 || t < row->length ? 1 : 0;
  case EGI_FEED_REAL:
    return t < row->length ? 1 : 0;
  case EGI_FEED_POSITION_IDS:
    return t;
  default:
    break;
  }
  return 0;
}

/* Documents one after the other; what is left of the row is one more, without labels. Its tokens are the last one
 * again. Returns the number of elements. */
static size_t fill_row(const egi_lanes *lanes, egi_feed role, const egi_documents *documents,
                       const egi_batch_range *range, uint32_t sequence) {
  int64_t *out = lanes->numbers;
  uint32_t used = 0;
  batch_row row = {NULL, NULL, NULL, 0, 0};
  for (uint32_t r = 0; r < range->n_documents; r++) {
    row = get_row(documents, range, r);
    for (uint32_t t = 0; t < row.length && role != EGI_FEED_OFFSETS; t++) out[used + t] = get_number(role, &row, t);
    if (role == EGI_FEED_OFFSETS) out[r] = used;
    used += row.length;
  }
  if (role == EGI_FEED_OFFSETS) {
    size_t n = range->n_documents;
    if (used < sequence) out[n++] = used;
    for (; n <= sequence; n++) out[n] = sequence;
    return (size_t)sequence + 1;
  }
  bool is_label = role == EGI_FEED_LABELS || role == EGI_FEED_TOKEN_LABELS;
  int64_t filler = is_label ? -100 : role == EGI_FEED_TOKEN_TYPES || role == EGI_FEED_REAL ? 0 : row.filler;
  for (; used < sequence; used++) out[used] = filler;
  return sequence;
}

size_t egi_numbers_convert(const int64_t *numbers, size_t n, eg_dtype dtype, void *bytes) {
  uint8_t *flags = bytes;
  int32_t *whole = bytes;
  float *real = bytes;
  switch (dtype) {
  case EG_DTYPE_I32:
    for (size_t i = 0; i < n; i++) whole[i] = (int32_t)numbers[i];
    return n * sizeof *whole;
  case EG_DTYPE_F32:
    for (size_t i = 0; i < n; i++) real[i] = (float)numbers[i];
    return n * sizeof *real;
  case EG_DTYPE_BOOL:
    for (size_t i = 0; i < n; i++) flags[i] = numbers[i] != 0;
    return n;
  default:
    memcpy(bytes, numbers, n * sizeof *numbers);
    return n * sizeof *numbers;
  }
}

uint32_t egi_input_rows(const egi_graph *graph, const egi_value *value, uint32_t batch) {
  int64_t size;
  if (value->rank < 2) return 1;
  egi_dims *dims = graph->module->dims;
  return egi_dim_value(dims, egi_dim_resolve(dims, value->dims[0]), &size) && size == 1 ? 1 : batch;
}

eg_status egi_lane_fill_input(const egi_lanes *lanes, const egi_lane *lane, uint32_t input,
                              const egi_documents *documents, const egi_batch_range *range) {
  const egi_graph *graph = lanes->inputs.graph;
  const egi_value *value = &graph->values[graph->inputs[input]];
  egi_feed role = lanes->inputs.roles[input];
  uint32_t n_rows = egi_input_rows(graph, value, lane->bucket.batch), sequence = lane->bucket.sequence;
  if (role == EGI_FEED_CACHE) return EG_OK; /* holds nothing */
  if (egi_feed_is_of_documents(role))
    return egi_session_set_input(lane->session, input, lanes->bytes,
                                 egi_feed_fill(lanes, &lane->bucket, role, documents, range));
  if (range != NULL && range->order != NULL) {
    size_t count = fill_row(lanes, role, documents, range, sequence);
    return egi_session_set_input(lane->session, input, lanes->bytes,
                                 egi_numbers_convert(lanes->numbers, count, value->dtype, lanes->bytes));
  }
  for (uint32_t r = 0; r < n_rows; r++) {
    batch_row row = get_row(documents, range, r);
    if (lanes->inputs.padding >= 0) row.filler = lanes->inputs.padding;
    for (uint32_t t = 0; t < sequence; t++) lanes->numbers[(size_t)r * sequence + t] = get_number(role, &row, t);
  }
  size_t size_bytes = egi_numbers_convert(lanes->numbers, (size_t)n_rows * sequence, value->dtype, lanes->bytes);
  return egi_session_set_input(lane->session, input, lanes->bytes, size_bytes);
}

eg_status egi_lanes_fill(const egi_lanes *lanes, const egi_documents *documents, const egi_batch_range *range,
                         egi_lane **out_lane) {
  egi_lane *best = NULL;
  for (size_t i = 0; i < lanes->count; i++) {
    egi_lane *lane = &lanes->lanes[i];
    bool is_shared = range->order != NULL; /* one shape holds all rows */
    if (!is_shared && (lane->bucket.batch < range->n_documents || lane->bucket.sequence < range->longest)) continue;
    if (best == NULL ||
        (uint64_t)lane->bucket.batch * lane->bucket.sequence < (uint64_t)best->bucket.batch * best->bucket.sequence)
      best = lane;
  }
  if (best == NULL)
    return egi_fail(lanes->inputs.graph->module->ctx, EG_ERROR_INTERNAL, "no plan holds %zu × %u tokens",
                    range->n_documents, range->longest);
  for (uint32_t i = 0; i < lanes->inputs.graph->n_inputs; i++)
    EG_TRY(egi_lane_fill_input(lanes, best, i, documents, range));
  *out_lane = best;
  return EG_OK;
}
