/* Sizes, visibility and mask tiles of attention; ONNX Attention-25 (Q, K, V of 3 or 4 dims, shared key heads, causal
 * and window limits that count from the past or from nonpad_kv_seqlen, a boolean or additive mask). */
#include "backend/cpu/attention.h"

#include <math.h>

/* Masks are written by exporters as the lowest finite number too: below HIDDEN a key's probability is 0 whenever the
 * query has a key above SEEN. */
#define HIDDEN (-1e30)
#define SEEN (-1e20)

egi_heads egi_attention_heads(const egi_tensor *tensor, int64_t n_heads) {
  const int64_t *strides = tensor->strides;
  if (tensor->rank == 4) return (egi_heads){strides[0], strides[1], strides[2], strides[3]};
  int64_t width = n_heads > 0 ? tensor->dims[2] / n_heads : 0;
  return (egi_heads){strides[0], width * strides[2], strides[1], strides[2]};
}

egi_matrix egi_attention_matrix(const egi_attention *a, void *data, const egi_heads *heads, int64_t batch,
                                int64_t head) {
  int64_t offset = batch * heads->batch + head * heads->head;
  return (egi_matrix){(char *)data + offset * (int64_t)a->bytes, a->dtype, heads->row, heads->column};
}

/* ---- reading the node ------------------------------------------------------------------------------------------- */

static eg_status fail_shape(const egi_kernel_plan *plan, const char *what) {
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%s", what);
}

static eg_status read_sizes(egi_kernel_plan *plan, egi_attention *a) {
  const egi_node *node = egi_plan_node(plan);
  const egi_tensor *q = &plan->inputs[0], *k = &plan->inputs[1], *v = &plan->inputs[2];
  bool is_flat = q->rank == 3;
  if ((q->rank != 3 && q->rank != 4) || k->rank != q->rank || v->rank != q->rank)
    return fail_shape(plan, "Q, K and V must have 3 or 4 dims");
  int64_t heads = egi_node_int(node, "q_num_heads", 0), kv_heads = egi_node_int(node, "kv_num_heads", 0);
  a->q_heads = is_flat ? heads : q->dims[1];
  a->kv_heads = is_flat ? kv_heads : k->dims[1];
  if (a->q_heads <= 0 || a->kv_heads <= 0 || a->q_heads % a->kv_heads != 0)
    return fail_shape(plan, "the number of query heads is not a multiple of that of key heads");
  a->n_batches = q->dims[0];
  a->n_queries = q->dims[q->rank - 2];
  a->n_keys = k->dims[k->rank - 2];
  a->width = is_flat ? q->dims[2] / a->q_heads : q->dims[3];
  a->value_width = is_flat ? v->dims[2] / a->kv_heads : v->dims[3];
  int64_t key_width = is_flat ? k->dims[2] / a->kv_heads : k->dims[3];
  bool fits = k->dims[0] == a->n_batches && v->dims[0] == a->n_batches && v->dims[v->rank - 2] == a->n_keys &&
              key_width == a->width && (is_flat || v->dims[1] == a->kv_heads);
  if (is_flat)
    fits = fits && q->dims[2] == a->width * a->q_heads && k->dims[2] == a->width * a->kv_heads &&
           v->dims[2] == a->value_width * a->kv_heads;
  return fits ? EG_OK : fail_shape(plan, "shapes of Q, K and V do not agree");
}

static bool takes_mask_type(eg_dtype dtype) {
  return dtype == EG_DTYPE_BOOL || dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64 || dtype == EG_DTYPE_F16 ||
         dtype == EG_DTYPE_BF16;
}

/* Strides of the mask, right-aligned against [batch, q heads, queries, keys]; `a->n_keys` must be final. */
static eg_status read_mask(egi_kernel_plan *plan, egi_attention *a) {
  a->has_mask = egi_plan_has_input(plan, 3);
  if (!a->has_mask) return EG_OK;
  const egi_tensor *mask = &plan->inputs[3];
  const int64_t wanted[4] = {a->n_batches, a->q_heads, a->n_queries, a->n_keys};
  int64_t strides[4] = {0, 0, 0, 0};
  if (!takes_mask_type(mask->dtype)) return egi_fail_types(plan);
  if (mask->rank < 1 || mask->rank > 4) return fail_shape(plan, "the mask must have 1 to 4 dims");
  for (int i = 4 - mask->rank; i < 4; i++) {
    int64_t own = mask->dims[i - 4 + mask->rank];
    bool is_shorter = i == 3 && own < wanted[3];
    if (own != wanted[i] && own != 1 && !is_shorter)
      return fail_shape(plan, "the mask does not broadcast to the scores");
    strides[i] = own == 1 && !is_shorter ? 0 : mask->strides[i - 4 + mask->rank];
    if (is_shorter) a->mask_columns = own;
  }
  a->mask = (egi_heads){strides[0], strides[1], strides[2], strides[3]};
  return EG_OK;
}

/* Everything but visibility; `a->n_past` is set. */
static eg_status read_operands(egi_kernel_plan *plan, egi_attention *a) {
  const egi_node *node = egi_plan_node(plan);
  const egi_tensor *q = &plan->inputs[0];
  a->isa = egi_cpu_isa();
  a->dtype = q->dtype;
  a->bytes = egi_element_bytes(q->dtype);
  a->functions = egi_row_functions_of(q->dtype);
  if (!a->functions || plan->inputs[1].dtype != q->dtype || plan->inputs[2].dtype != q->dtype)
    return egi_fail_types(plan);
  EG_TRY(read_sizes(plan, a));
  a->n_keys += a->n_past;
  a->mask_columns = a->n_keys;
  a->q = egi_attention_heads(q, a->q_heads);
  a->k = egi_attention_heads(&plan->inputs[1], a->kv_heads);
  a->v = egi_attention_heads(&plan->inputs[2], a->kv_heads);
  const egi_attribute *scale = egi_node_attribute(node, "scale");
  a->scale = scale ? (double)scale->u.f : 1.0 / sqrt(a->width > 0 ? (double)a->width : 1.0);
  a->softcap = (double)egi_node_float(node, "softcap", 0.0f);
  if (a->softcap < 0 || !(a->softcap < HUGE_VAL)) return fail_shape(plan, "softcap must be a number of at least 0");
  int64_t widest = a->width > a->value_width ? a->width : a->value_width;
  a->bias_bytes = (size_t)(EGI_TILE_QUERIES * EGI_TILE_KEYS) * a->bytes;
  a->scratch_bytes = egi_product_scratch(EGI_TILE_KEYS, widest > EGI_TILE_KEYS ? widest : EGI_TILE_KEYS);
  a->scratch_bytes = (a->scratch_bytes + 63) / 64 * 64;
  return EG_OK;
}

eg_status egi_attention_read(egi_kernel_plan *plan, egi_attention *out_attention) {
  const egi_node *node = egi_plan_node(plan);
  EG_TRY(read_operands(plan, out_attention));
  out_attention->is_causal = egi_node_int(node, "is_causal", 0) != 0;
  out_attention->left = egi_node_int(node, "left_window_size", -1);
  out_attention->right = egi_node_int(node, "right_window_size", -1);
  return read_mask(plan, out_attention);
}

/* first_key and last_query: i32 [sequence], both or none. */
static eg_status read_documents(egi_kernel_plan *plan, unsigned first_key, egi_attention *a) {
  bool has_first = egi_plan_has_input(plan, first_key), has_last = egi_plan_has_input(plan, first_key + 1);
  if (has_first != has_last) return fail_shape(plan, "first_key and last_query come together");
  if (!has_first) return EG_OK;
  for (unsigned i = first_key; i < first_key + 2; i++) {
    if (plan->inputs[i].dtype != EG_DTYPE_I32) return egi_fail_types(plan);
    if (plan->inputs[i].rank != 1 || plan->inputs[i].dims[0] != a->n_queries)
      return fail_shape(plan, "first_key and last_query must have an element for each query");
  }
  a->first_key_input = first_key;
  if (!egi_plan_has_input(plan, first_key + 2)) return EG_OK;
  const egi_tensor *bounds = &plan->inputs[first_key + 2];
  int64_t block = egi_node_int(egi_plan_node(plan), "block", EGI_BLOCK_ROWS);
  if (bounds->dtype != EG_DTYPE_I32) return egi_fail_types(plan);
  if (block < 1 || bounds->rank != 2 || bounds->dims[0] != (a->n_queries + block - 1) / block || bounds->dims[1] != 2)
    return fail_shape(plan, "block_bounds do not fit the queries");
  if (block == EGI_TILE_QUERIES) a->bounds_input = first_key + 2; /* those of other tiles say nothing here */
  return EG_OK;
}

eg_status egi_masked_attention_read(egi_kernel_plan *plan, unsigned first_key, egi_attention *out_attention) {
  egi_attention *a = out_attention;
  const egi_node *node = egi_plan_node(plan);
  const egi_tensor *valid = &plan->inputs[3], *sinks = &plan->inputs[4];
  EG_TRY(read_operands(plan, a));
  EG_TRY(read_documents(plan, first_key, a));
  int64_t window = egi_node_int(node, "window", 0);
  a->is_causal = egi_node_int(node, "causal", 0) != 0;
  a->left = window - 1; /* -1: none */
  a->right = a->is_causal ? -1 : window - 1;
  a->has_mask = egi_plan_has_input(plan, 3);
  a->has_sinks = egi_plan_has_input(plan, 4);
  if (first_key == EGI_MASKED_FIRST_KEY && egi_plan_has_input(plan, EGI_MASKED_POSITIONS))
    a->positions_input = EGI_MASKED_POSITIONS;
  bool fits = plan->inputs[0].rank == 4 && (a->positions_input != 0 || a->n_keys == a->n_queries) && window >= 0;
  if (a->has_mask) {
    if (valid->dtype != EG_DTYPE_BOOL) return egi_fail_types(plan);
    fits = fits && valid->rank == 2 && valid->dims[0] == a->n_batches && valid->dims[1] == a->n_keys;
    a->mask = (egi_heads){valid->strides[0], 0, 0, valid->strides[1]};
  }
  if (a->has_sinks) {
    if (!egi_row_functions_of(sinks->dtype)) return egi_fail_types(plan);
    fits = fits && sinks->rank == 1 && sinks->dims[0] == a->q_heads;
  }
  return fits ? EG_OK : fail_shape(plan, "key_valid, sinks or the window do not fit Q, K and V");
}

double egi_attention_sink(const egi_attention *a, const egi_kernel_call *call, int64_t q_head) {
  const egi_tensor *sinks = &call->inputs[a->has_sinks ? 4 : 0];
  if (!a->has_sinks) return -HUGE_VAL;
  int64_t offset = q_head * sinks->strides[0] * (int64_t)egi_element_bytes(sinks->dtype);
  return egi_real_get((const char *)sinks->data + offset, sinks->dtype);
}

/* ---- visibility ------------------------------------------------------------------------------------------------- */

static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

egi_key_range egi_attention_range(const egi_attention *a, const egi_attention_head *head, int64_t query) {
  int64_t position = query + head->offset;
  egi_key_range range = {0, smaller(head->length, a->mask_columns)};
  if (a->is_causal) range.last = smaller(range.last, position + 1);
  if (a->right >= 0 && a->right < a->n_keys + a->n_queries) range.last = smaller(range.last, position + a->right + 1);
  if (a->left >= 0 && a->left < a->n_keys + a->n_queries) range.first = larger(0, position - a->left);
  if (head->first_key) {
    range.first = larger(range.first, head->first_key[query * head->first_key_stride]);
    range.last = smaller(range.last, (int64_t)head->last_query[query * head->last_query_stride] + 1);
  }
  range.last = larger(range.last, 0);
  range.first = smaller(range.first, range.last);
  return range;
}

/* Both ends grow with the query, and each query sees its own key: the first query's first key, the last one's last. */
static egi_key_range block_range(const egi_attention *a, const egi_attention_head *head, int64_t query, int64_t n) {
  const int32_t *bounds = head->bounds + query / EGI_TILE_QUERIES * head->bounds_strides[0];
  egi_key_range range = {bounds[0], (int64_t)bounds[head->bounds_strides[1]] + 1};
  if (a->is_causal) range.last = smaller(range.last, query + n);
  if (a->right >= 0 && a->right < a->n_keys) range.last = smaller(range.last, query + n + a->right);
  if (a->left >= 0) range.first = larger(range.first, query - a->left);
  return range;
}

egi_key_range egi_attention_tile_range(const egi_attention *a, const egi_attention_head *head, int64_t query,
                                       int64_t n) {
  bool is_block = query % EGI_TILE_QUERIES == 0 && (n == EGI_TILE_QUERIES || query + n == a->n_queries);
  if (head->bounds && is_block) return block_range(a, head, query, n);
  egi_key_range range = {INT64_MAX, 0};
  for (int64_t i = query; i < query + n; i++) {
    egi_key_range own = egi_attention_range(a, head, i);
    if (own.first >= own.last) continue;
    range.first = smaller(range.first, own.first);
    range.last = larger(range.last, own.last);
  }
  if (range.last == 0) range.first = 0;
  return range;
}

egi_score_row egi_attention_row(const egi_attention *a, const egi_attention_head *head, const int64_t at[2],
                                const int64_t size[2], int64_t row, void *scores, const void *bias) {
  egi_key_range range = egi_attention_range(a, head, at[0] + row);
  size_t offset = (size_t)(row * size[1]) * a->bytes;
  egi_score_row out = {(char *)scores + offset, size[1], 0, 0, a->softcap, bias ? (const char *)bias + offset : NULL};
  out.last = smaller(larger(range.last - at[1], 0), size[1]);
  out.first = smaller(larger(range.first - at[1], 0), out.last);
  return out;
}

void egi_attention_scores(const egi_attention *a, const egi_attention_head *head, const int64_t at[2],
                          const int64_t size[2], void *scores, void *scratch) {
  egi_matrix keys = {head->k.data, a->dtype, head->k.column_stride, head->k.row_stride};
  egi_product product = {size[0],
                         size[1],
                         a->width,
                         egi_matrix_part(&head->q, at[0], 0),
                         egi_matrix_part(&keys, 0, at[1]),
                         {scores, a->dtype, size[1], 1},
                         a->scale,
                         0.0};
  egi_product_run(a->isa, &product, scratch);
}

egi_attention_head egi_attention_head_at(const egi_attention *a, const egi_kernel_call *call, int64_t index, void *key,
                                         void *value) {
  egi_attention_head head = {.batch = index / a->q_heads, .q_head = index % a->q_heads, .length = a->n_keys};
  int64_t kv_head = head.q_head / (a->q_heads / a->kv_heads);
  head.q = egi_attention_matrix(a, call->inputs[0].data, &a->q, head.batch, head.q_head);
  head.k = egi_attention_matrix(a, key, &a->k, head.batch, kv_head);
  head.v = egi_attention_matrix(a, value, &a->v, head.batch, kv_head);
  head.offset = a->n_past;
  if (a->positions_input != 0) head.offset = *(const int32_t *)call->inputs[a->positions_input].data;
  if (a->first_key_input != 0) {
    const egi_tensor *first = &call->inputs[a->first_key_input], *last = &call->inputs[a->first_key_input + 1];
    head.first_key = first->data;
    head.first_key_stride = first->strides[0];
    head.last_query = last->data;
    head.last_query_stride = last->strides[0];
  }
  if (a->bounds_input != 0) {
    const egi_tensor *bounds = &call->inputs[a->bounds_input];
    head.bounds = bounds->data;
    head.bounds_strides[0] = bounds->strides[0];
    head.bounds_strides[1] = bounds->strides[1];
  }
  if (a->has_lengths) {
    const int64_t *lengths = call->inputs[6].data;
    int64_t length = lengths[head.batch * call->inputs[6].strides[0]];
    head.length = larger(0, smaller(length, a->n_keys));
    head.offset = head.length - a->n_queries;
  }
  return head;
}

/* ---- mask tiles ------------------------------------------------------------------------------------------------- */

static double mask_number(const void *at, eg_dtype dtype) {
  switch (dtype) {
  case EG_DTYPE_F64:
    return *(const double *)at;
  case EG_DTYPE_F32:
    return (double)*(const float *)at;
  case EG_DTYPE_F16:
    return (double)egi_f16_to_f32(*(const uint16_t *)at);
  case EG_DTYPE_BF16:
    return (double)egi_bf16_to_f32(*(const uint16_t *)at);
  default:
    return *(const uint8_t *)at ? 0.0 : -HUGE_VAL;
  }
}

/* Bytes of a boolean row: does any differ from `value`? */
static bool differs(const uint8_t *row, int64_t n, bool value) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t word;
    memcpy(&word, row + i, 8);
    if (!value && word != 0) return true;
    if (value && ((word - 0x0101010101010101u) & ~word & 0x8080808080808080u) != 0) return true; /* a zero byte */
  }
  for (; i < n; i++)
    if ((row[i] != 0) != value) return true;
  return false;
}

typedef struct mask_view {
  const char *data; /* of the tile's first element */
  eg_dtype dtype;
  int64_t row, column; /* strides in bytes */
} mask_view;

/* Whether all of the tile is seen (0), hidden (-inf), or hidden by finite numbers alone. */
typedef struct mask_summary {
  bool all_seen, all_hidden, all_low;
} mask_summary;

static mask_summary summarise(const mask_view *view, const int64_t size[2]) {
  mask_summary summary = {true, true, true};
  bool is_packed = view->dtype == EG_DTYPE_BOOL && view->column == 1;
  for (int64_t i = 0; i < size[0]; i++) {
    const char *row = view->data + i * view->row;
    if (is_packed) {
      if (summary.all_seen) summary.all_seen = !differs((const uint8_t *)row, size[1], true);
      if (summary.all_hidden) summary.all_hidden = !differs((const uint8_t *)row, size[1], false);
      summary.all_low = summary.all_hidden;
    } else {
      for (int64_t j = 0; j < size[1]; j++) {
        double number = mask_number(row + j * view->column, view->dtype);
        summary.all_seen = summary.all_seen && number == 0;
        summary.all_hidden = summary.all_hidden && number == -HUGE_VAL;
        summary.all_low = summary.all_low && number < HIDDEN;
      }
    }
    if (!summary.all_seen && !summary.all_low) break;
    if (view->row == 0) break;
  }
  return summary;
}

/* Whether each query of the tile sees some key anywhere. */
static bool sees_others(const egi_attention *a, const egi_attention_head *head, const mask_view *first,
                        const int64_t at[2], int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    egi_key_range range = egi_attention_range(a, head, at[0] + i);
    const char *row = first->data + i * first->row;
    bool is_found = false;
    for (int64_t key = range.first; key < range.last && !is_found; key++)
      is_found = mask_number(row + key * first->column, first->dtype) > SEEN;
    if (!is_found) return false;
  }
  return true;
}

/* Leaves out keys at both ends of the tile that no query sees by a boolean mask, as a causal one hides. */
static void trim(const mask_view *view, int64_t at[2], int64_t size[2]) {
  int64_t first = size[1], last = 0;
  for (int64_t i = 0; i < size[0]; i++) {
    const uint8_t *row = (const uint8_t *)view->data + i * view->row;
    for (int64_t j = 0; j < first; j++)
      if (row[j]) first = j;
    for (int64_t j = size[1]; j > last; j--)
      if (row[j - 1]) last = j;
  }
  at[1] += first;
  size[1] = last - first;
}

static void write_bias(const egi_attention *a, const mask_view *view, const int64_t size[2], void *bias) {
  for (int64_t i = 0; i < size[0]; i++) {
    const char *row = view->data + i * view->row;
    if (a->dtype == EG_DTYPE_F32 && view->dtype == EG_DTYPE_BOOL && view->column == 1) {
      float *out = (float *)bias + i * size[1];
      for (int64_t j = 0; j < size[1]; j++) out[j] = row[j] ? 0.0f : -HUGE_VALF;
    } else if (a->dtype == EG_DTYPE_F32 && view->dtype == EG_DTYPE_F32 && view->column == 4) {
      memcpy((float *)bias + i * size[1], row, (size_t)size[1] * 4);
    } else if (a->dtype == EG_DTYPE_F32) {
      for (int64_t j = 0; j < size[1]; j++)
        ((float *)bias)[i * size[1] + j] = (float)mask_number(row + j * view->column, view->dtype);
    } else {
      for (int64_t j = 0; j < size[1]; j++)
        ((double *)bias)[i * size[1] + j] = mask_number(row + j * view->column, view->dtype);
    }
  }
}

egi_mask_state egi_attention_mask(const egi_attention *a, const egi_attention_head *head, const egi_tensor *mask,
                                  int64_t at[2], int64_t size[2], void *bias) {
  if (!a->has_mask) return EGI_MASK_NONE;
  int64_t bytes = (int64_t)egi_element_bytes(mask->dtype);
  int64_t offset = head->batch * a->mask.batch + head->q_head * a->mask.head + at[0] * a->mask.row;
  mask_view first = {(const char *)mask->data + offset * bytes, mask->dtype, a->mask.row * bytes,
                     a->mask.column * bytes};
  mask_view view = first;
  view.data += at[1] * view.column;
  mask_summary summary = summarise(&view, size);
  if (summary.all_hidden) return EGI_MASK_HIDDEN;
  if (summary.all_seen) return EGI_MASK_NONE;
  if (summary.all_low && sees_others(a, head, &first, at, size[0])) return EGI_MASK_HIDDEN;
  if (mask->dtype == EG_DTYPE_BOOL && view.column == 1) {
    int64_t start = at[1];
    trim(&view, at, size);
    view.data += at[1] - start;
  }
  write_bias(a, &view, size, bias);
  return EGI_MASK_BIAS;
}
