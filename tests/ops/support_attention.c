/* Conformance cases of Attention and AttentionGrad against the whole matrix of scores in double; the reference's
 * gradients are checked against finite differences on small sizes. */
#include "support_ops.h"

#include <math.h>

#define LOWEST (-3.4028234663852886e38) /* what exporters write to hide a key */

typedef enum mask_kind { MASK_NONE, MASK_BOOLEAN, MASK_ADDED, MASK_LOWEST } mask_kind;

typedef struct attention_case {
  int64_t batch, q_heads, kv_heads, queries, keys, width, value_width;
  bool is_flat, is_causal;
  mask_kind mask;
  int mask_rank;
  int64_t mask_dims[4];
  double softcap;
  int64_t left, right; /* 0: attribute not set; else window + 1 */
  int64_t past;
  bool has_lengths;
} attention_case;

/* Tiles are 64 queries x 384 keys. */
static const attention_case cases[] = {
    {1, 1, 1, 1, 1, 1, 1, false, false, MASK_NONE, 0, {0}, 0, 0, 0, 0, false},
    {2, 2, 2, 3, 5, 4, 3, false, false, MASK_NONE, 0, {0}, 0, 0, 0, 0, false},
    {2, 4, 2, 5, 5, 4, 4, true, true, MASK_NONE, 0, {0}, 0, 0, 0, 0, false},
    {1, 2, 1, 7, 3, 4, 4, false, true, MASK_NONE, 0, {0}, 0, 0, 0, 0, false},
    {2, 4, 2, 5, 6, 4, 3, true, false, MASK_BOOLEAN, 4, {2, 1, 5, 6}, 0, 0, 0, 0, false},
    {2, 2, 2, 5, 6, 4, 3, false, false, MASK_ADDED, 3, {2, 5, 6}, 2.5, 0, 0, 0, false},
    {2, 2, 2, 5, 6, 4, 3, false, true, MASK_LOWEST, 2, {5, 6}, 0, 0, 0, 0, false},
    {2, 2, 1, 5, 6, 4, 3, false, false, MASK_BOOLEAN, 4, {2, 1, 1, 6}, 0, 0, 0, 0, false},
    {2, 2, 1, 5, 6, 4, 3, false, false, MASK_ADDED, 2, {5, 4}, 0, 0, 0, 0, false},
    {1, 2, 2, 9, 9, 4, 4, false, true, MASK_NONE, 0, {0}, 1.5, 3, 0, 0, false},
    {1, 2, 2, 9, 11, 4, 4, false, false, MASK_NONE, 0, {0}, 0, 2, 4, 0, false},
    {0, 2, 2, 3, 5, 4, 3, false, false, MASK_NONE, 0, {0}, 0, 0, 0, 0, false},
    {1, 2, 2, 3, 0, 4, 3, false, false, MASK_NONE, 0, {0}, 0, 0, 0, 0, false},
    {1, 2, 1, 65, 385, 8, 5, true, false, MASK_NONE, 0, {0}, 0, 0, 0, 0, false},
    {1, 2, 1, 130, 130, 8, 8, true, true, MASK_BOOLEAN, 4, {1, 1, 130, 130}, 0, 0, 0, 0, false},
    {1, 1, 1, 63, 520, 16, 16, false, false, MASK_LOWEST, 2, {63, 520}, 0, 0, 0, 0, false},
    {1, 1, 1, 300, 300, 4, 4, false, true, MASK_NONE, 0, {0}, 0, 41, 0, 0, false},
    {2, 4, 2, 3, 2, 4, 3, false, true, MASK_NONE, 0, {0}, 0, 0, 0, 5, false},
    {2, 4, 2, 3, 2, 4, 3, true, false, MASK_BOOLEAN, 2, {3, 7}, 0, 3, 1, 5, false},
    {2, 2, 1, 4, 6, 4, 3, false, true, MASK_NONE, 0, {0}, 0, 0, 0, 0, true},
    {2, 2, 1, 4, 6, 4, 3, false, false, MASK_ADDED, 2, {4, 6}, 0, 2, 0, 0, true},
};

/* Operands and reference of a case. */
typedef struct operands {
  const attention_case *a;
  ops_tensor *q, *k, *v, *mask, *past_k, *past_v, *lengths;
  int64_t total;
  double scale;
  double *dy; /* [batch, q_heads, queries, value_width] */
} operands;

/* ---- reference
 * -------------------------------------------------------------------------------------------------------- */

/* Element of [batch, heads, rows, width] in a tensor of 3 or 4 dims. */
static int64_t head_index(const attention_case *a, const int64_t at[4], int64_t heads, int64_t rows, int64_t width) {
  if (a->is_flat) return ((at[0] * rows + at[2]) * heads + at[1]) * width + at[3];
  return ((at[0] * heads + at[1]) * rows + at[2]) * width + at[3];
}

static double key_at(const operands *o, bool is_value, int64_t batch, int64_t head, const int64_t at[2]) {
  const attention_case *a = o->a;
  int64_t width = is_value ? a->value_width : a->width, key = at[0];
  if (key < a->past)
    return (is_value ? o->past_v : o->past_k)->values[((batch * a->kv_heads + head) * a->past + key) * width + at[1]];
  const int64_t index[4] = {batch, head, key - a->past, at[1]};
  return (is_value ? o->v : o->k)->values[head_index(a, index, a->kv_heads, a->keys, width)];
}

/* What is added to a score: -inf hides. */
static double bias_of(const operands *o, const int64_t at[4]) {
  const attention_case *a = o->a;
  int64_t length = o->lengths ? (int64_t)o->lengths->values[at[0]] : o->total;
  int64_t offset = o->lengths ? length - a->queries : a->past, position = at[2] + offset;
  bool is_seen = at[3] < length && (!a->is_causal || at[3] <= position);
  if (a->left > 0) is_seen = is_seen && at[3] >= position - (a->left - 1);
  if (a->right > 0) is_seen = is_seen && at[3] <= position + (a->right - 1);
  if (!is_seen) return -HUGE_VAL;
  if (!o->mask) return 0;
  int64_t columns = o->mask->dims[o->mask->rank - 1];
  if (at[3] >= columns) return -HUGE_VAL;
  const int64_t dims[4] = {a->batch, a->q_heads, a->queries, columns};
  int64_t linear = ((at[0] * a->q_heads + at[1]) * a->queries + at[2]) * columns + at[3];
  double value = o->mask->values[ops_broadcast_index(o->mask, 4, dims, linear)];
  return a->mask == MASK_BOOLEAN ? (value != 0 ? 0 : -HUGE_VAL) : value;
}

/* One row: raw scores, scores after cap and mask, probabilities, log-sum-exp. */
typedef struct score_row {
  double *raw, *capped, *masked, *p;
  double lse, largest;
} score_row;

static void make_row(const operands *o, const int64_t at[3], score_row *row) {
  const attention_case *a = o->a;
  int64_t kv_head = at[1] / (a->q_heads / a->kv_heads);
  double sum = 0;
  row->largest = -HUGE_VAL;
  for (int64_t j = 0; j < o->total; j++) {
    double dot = 0;
    for (int64_t d = 0; d < a->width; d++) {
      const int64_t q_at[4] = {at[0], at[1], at[2], d};
      dot += o->q->values[head_index(a, q_at, a->q_heads, a->queries, a->width)] *
             key_at(o, false, at[0], kv_head, (const int64_t[2]){j, d});
    }
    row->raw[j] = dot * o->scale;
    row->capped[j] = a->softcap > 0 ? a->softcap * tanh(row->raw[j] / a->softcap) : row->raw[j];
    double bias = bias_of(o, (const int64_t[4]){at[0], at[1], at[2], j});
    row->masked[j] = bias < -1e30 ? bias : row->capped[j] + bias; /* as f32 would round */
    if (row->masked[j] > row->largest) row->largest = row->masked[j];
  }
  for (int64_t j = 0; j < o->total; j++)
    sum += row->p[j] = row->largest == -HUGE_VAL ? 0 : exp(row->masked[j] - row->largest);
  for (int64_t j = 0; j < o->total && sum > 0; j++) row->p[j] /= sum;
  row->lse = sum > 0 && row->largest > -1e30 ? row->largest + log(sum) : HUGE_VAL;
}

static score_row new_row(const operands *o) {
  double *memory = malloc(sizeof(double) * (size_t)(4 * o->total + 1));
  assert_non_null(memory);
  return (score_row){memory, memory + o->total, memory + 2 * o->total, memory + 3 * o->total, 0, 0};
}

static double output_at(const operands *o, const int64_t at[3], const score_row *row, int64_t d) {
  double sum = 0;
  for (int64_t j = 0; j < o->total; j++)
    sum += row->p[j] * key_at(o, true, at[0], at[1] / (o->a->q_heads / o->a->kv_heads), (const int64_t[2]){j, d});
  return sum;
}

/* ---- making a case
 * ------------------------------------------------------------------------------------------------------ */

static ops_tensor *add_heads(ops_case *c, const attention_case *a, eg_dtype dtype, const int64_t sizes[3],
                             bool is_input) {
  const int64_t flat[3] = {a->batch, sizes[1], sizes[0] * sizes[2]}, full[4] = {a->batch, sizes[0], sizes[1], sizes[2]};
  ops_tensor *(*add)(ops_case *, eg_dtype, int, const int64_t *) = is_input ? ops_add_input : ops_add_output;
  ops_tensor *tensor = add(c, dtype, a->is_flat ? 3 : 4, a->is_flat ? flat : full);
  if (is_input) ops_fill_uniform(tensor, -2, 2, (uint64_t)(sizes[0] * 31 + sizes[1] * 7 + sizes[2] + c->n_inputs));
  return tensor;
}

static void fill_mask(const attention_case *a, ops_tensor *mask) {
  int64_t columns = mask->dims[mask->rank - 1], n = ops_count(mask);
  ops_fill_uniform(mask, -1, 1, 77);
  for (int64_t i = 0; i < n; i++) {
    int64_t row = i / columns, column = i % columns;
    double random = egi_random_uniform(5, 6, (uint64_t)i);
    /* whole tiles hidden, whole rows hidden, whole tiles seen, and a mixture */
    bool is_hidden = columns > 384 ? column < 384 || random < 0.2 : random < 0.3;
    if (columns == 130) is_hidden = column >= 100;
    if (row == 1 && mask->rank != 4) is_hidden = true;
    if (a->mask == MASK_BOOLEAN)
      mask->values[i] = !is_hidden;
    else if (a->mask == MASK_LOWEST)
      mask->values[i] = is_hidden ? LOWEST : 0;
    else if (is_hidden)
      mask->values[i] = -HUGE_VAL;
  }
}

static void add_attributes(ops_case *c, const attention_case *a, double scale) {
  if (a->is_flat) {
    ops_add_attribute(c, egi_attribute_int("q_num_heads", a->q_heads));
    ops_add_attribute(c, egi_attribute_int("kv_num_heads", a->kv_heads));
  }
  if (a->is_causal) ops_add_attribute(c, egi_attribute_int("is_causal", 1));
  if (a->softcap > 0) ops_add_attribute(c, egi_attribute_float("softcap", (float)a->softcap));
  if (a->left > 0) ops_add_attribute(c, egi_attribute_int("left_window_size", a->left - 1));
  if (a->right > 0) ops_add_attribute(c, egi_attribute_int("right_window_size", a->right - 1));
  if (scale != 0) ops_add_attribute(c, egi_attribute_float("scale", (float)scale));
}

static void begin(ops_case *c, void **state, egi_op op, eg_dtype dtype, operands *o) {
  const attention_case *a = o->a;
  ops_begin(c, state, op, dtype);
  o->total = a->keys + a->past;
  double scale = a->softcap > 0 ? 0.75 : 0;
  o->scale = scale != 0 ? scale : 1 / sqrt((double)a->width);
  add_attributes(c, a, scale);
  o->q = add_heads(c, a, dtype, (const int64_t[3]){a->q_heads, a->queries, a->width}, true);
  o->k = add_heads(c, a, dtype, (const int64_t[3]){a->kv_heads, a->keys, a->width}, true);
  o->v = add_heads(c, a, dtype, (const int64_t[3]){a->kv_heads, a->keys, a->value_width}, true);
  if (a->mask == MASK_NONE) {
    ops_add_absent(c);
  } else {
    o->mask = ops_add_input(c, a->mask == MASK_BOOLEAN ? EG_DTYPE_BOOL : EG_DTYPE_F32, a->mask_rank, a->mask_dims);
    fill_mask(a, o->mask);
  }
  c->relative = 0;
  c->absolute = dtype == EG_DTYPE_F32 ? 4e-6 : 1e-12;
}

/* ---- Attention
 * ---------------------------------------------------------------------------------------------------------- */

static void add_cache(ops_case *c, operands *o, eg_dtype dtype) {
  const attention_case *a = o->a;
  for (int i = 0; i < 2 && (a->past > 0 || a->has_lengths); i++) {
    const int64_t dims[4] = {a->batch, a->kv_heads, a->past, i == 0 ? a->width : a->value_width};
    if (a->past == 0) {
      ops_add_absent(c);
      continue;
    }
    ops_tensor *past = ops_add_input(c, dtype, 4, dims);
    ops_fill_uniform(past, -2, 2, 91 + (uint64_t)i);
    *(i == 0 ? &o->past_k : &o->past_v) = past;
  }
  if (!a->has_lengths) return;
  o->lengths = ops_add_input(c, EG_DTYPE_I64, 1, &a->batch);
  for (int64_t b = 0; b < a->batch; b++) o->lengths->values[b] = (double)(b == 0 ? a->keys - 1 : 3);
}

static ops_tensor *add_present(ops_case *c, const operands *o, eg_dtype dtype, bool is_value) {
  const attention_case *a = o->a;
  int64_t width = is_value ? a->value_width : a->width;
  ops_tensor *present = ops_add_output(c, dtype, 4, (const int64_t[4]){a->batch, a->kv_heads, o->total, width});
  for (int64_t i = 0; i < ops_count(present); i++) {
    int64_t row = i / width, head = row / o->total;
    present->values[i] =
        key_at(o, is_value, head / a->kv_heads, head % a->kv_heads, (const int64_t[2]){row % o->total, i % width});
  }
  return present;
}

static void check_attention(void **state, const attention_case *a, eg_dtype dtype, int64_t mode, bool has_present) {
  ops_case c;
  operands o = {.a = a};
  begin(&c, state, EGI_OP_Attention, dtype, &o);
  add_cache(&c, &o, dtype);
  ops_tensor *y = add_heads(&c, a, dtype, (const int64_t[3]){a->q_heads, a->queries, a->value_width}, false);
  ops_tensor *scores = NULL, *lse;
  for (int i = 0; i < 2; i++) {
    if (has_present)
      add_present(&c, &o, dtype, i == 1);
    else
      ops_add_absent_output(&c);
  }
  if (mode >= 0) {
    scores = ops_add_output(&c, dtype, 4, (const int64_t[4]){a->batch, a->q_heads, a->queries, o.total});
    ops_add_attribute(&c, egi_attribute_int("qk_matmul_output_mode", mode));
  } else {
    ops_add_absent_output(&c);
  }
  lse = ops_add_output(&c, dtype, 3, (const int64_t[3]){a->batch, a->q_heads, a->queries});
  score_row row = new_row(&o);
  for (int64_t i = 0; i < ops_count(lse); i++) {
    int64_t head = i / a->queries;
    const int64_t at[3] = {head / a->q_heads, head % a->q_heads, i % a->queries};
    make_row(&o, at, &row);
    lse->values[i] = row.lse;
    for (int64_t d = 0; d < a->value_width; d++)
      y->values[head_index(a, (const int64_t[4]){at[0], at[1], at[2], d}, a->q_heads, a->queries, a->value_width)] =
          output_at(&o, at, &row, d);
    const double *kinds[4] = {row.raw, row.capped, row.masked, row.p};
    for (int64_t j = 0; j < o.total && scores; j++) scores->values[i * o.total + j] = kinds[mode][j];
  }
  free(row.raw);
  if (scores && a->mask == MASK_LOWEST) c.relative = 1e-6;
  ops_check(&c);
  ops_end(&c);
}

/* NaN in a key that no query sees does not reach a result. */
static void check_unseen_key(void **state) {
  static const attention_case a = {1, 1, 1, 3, 4, 2, 2, false, true, MASK_NONE, 0, {0}, 0, 0, 0, 0, false};
  ops_case c;
  operands o = {.a = &a};
  begin(&c, state, EGI_OP_Attention, EG_DTYPE_F32, &o);
  ops_tensor *y = add_heads(&c, &a, EG_DTYPE_F32, (const int64_t[3]){1, 3, 2}, false);
  score_row row = new_row(&o);
  for (int64_t i = 0; i < 3; i++) {
    const int64_t at[3] = {0, 0, i};
    make_row(&o, at, &row);
    for (int64_t d = 0; d < 2; d++) y->values[i * 2 + d] = output_at(&o, at, &row, d);
  }
  free(row.raw);
  for (int64_t d = 0; d < 2; d++)
    o.k->values[3 * 2 + d] = o.v->values[3 * 2 + d] = (double)NAN; /* no query sees key 3 */
  ops_check(&c);
  ops_end(&c);
}

void ops_case_attention(void **state, egi_op op) {
  (void)op;
  for (size_t i = 0; i < EGI_COUNT(cases); i++) {
    check_attention(state, &cases[i], EG_DTYPE_F32, -1, false);
    check_attention(state, &cases[i], EG_DTYPE_F64, -1, true);
    if (cases[i].queries < 60)
      for (int64_t mode = 0; mode < 4; mode++) check_attention(state, &cases[i], EG_DTYPE_F32, mode, false);
  }
  check_unseen_key(state);
}

/* ---- AttentionGrad
 * ------------------------------------------------------------------------------------------------------- */

static double weighted_output(const void *context) {
  const operands *o = context;
  const attention_case *a = o->a;
  score_row row = new_row(o);
  double sum = 0;
  for (int64_t i = 0; i < a->batch * a->q_heads * a->queries; i++) {
    int64_t head = i / a->queries;
    const int64_t at[3] = {head / a->q_heads, head % a->q_heads, i % a->queries};
    make_row(o, at, &row);
    if (row.lse == HUGE_VAL) continue; /* no gradient through a row whose keys are all hidden */
    for (int64_t d = 0; d < a->value_width; d++) sum += output_at(o, at, &row, d) * o->dy[i * a->value_width + d];
  }
  free(row.raw);
  return sum;
}

/* Gradients of one row, added to those of all. */
static void add_gradients(const operands *o, const int64_t at[3], const score_row *row, ops_tensor *const outputs[3]) {
  const attention_case *a = o->a;
  int64_t kv_head = at[1] / (a->q_heads / a->kv_heads);
  const double *dy = o->dy + ((at[0] * a->q_heads + at[1]) * a->queries + at[2]) * a->value_width;
  double delta = 0;
  if (row->lse == HUGE_VAL) return;
  for (int64_t d = 0; d < a->value_width; d++) delta += output_at(o, at, row, d) * dy[d];
  for (int64_t j = 0; j < o->total; j++) {
    double dp = 0, t = a->softcap > 0 ? row->capped[j] / a->softcap : 0;
    for (int64_t d = 0; d < a->value_width; d++) {
      const int64_t v_at[4] = {at[0], kv_head, j, d};
      dp += dy[d] * key_at(o, true, at[0], kv_head, (const int64_t[2]){j, d});
      outputs[2]->values[head_index(a, v_at, a->kv_heads, a->keys, a->value_width)] += row->p[j] * dy[d];
    }
    double ds = row->p[j] * (dp - delta) * (1 - t * t) * o->scale;
    for (int64_t d = 0; d < a->width; d++) {
      int64_t q_at = head_index(a, (const int64_t[4]){at[0], at[1], at[2], d}, a->q_heads, a->queries, a->width);
      int64_t k_at = head_index(a, (const int64_t[4]){at[0], kv_head, j, d}, a->kv_heads, a->keys, a->width);
      outputs[0]->values[q_at] += ds * o->k->values[k_at];
      outputs[1]->values[k_at] += ds * o->q->values[q_at];
    }
  }
}

static void check_attention_grad(void **state, const attention_case *a, eg_dtype dtype, unsigned wanted) {
  ops_case c;
  operands o = {.a = a};
  begin(&c, state, EGI_OP_AttentionGrad, dtype, &o);
  const int64_t sizes[3][3] = {
      {a->q_heads, a->queries, a->width}, {a->kv_heads, a->keys, a->width}, {a->kv_heads, a->keys, a->value_width}};
  const int64_t y_sizes[3] = {a->q_heads, a->queries, a->value_width};
  ops_tensor *y = add_heads(&c, a, dtype, y_sizes, true), *outputs[3], spare[3];
  ops_tensor *lse = ops_add_input(&c, dtype, 3, (const int64_t[3]){a->batch, a->q_heads, a->queries});
  ops_tensor *dy = add_heads(&c, a, dtype, y_sizes, true);
  o.dy = EGI_NEW(&c.arena, double, (size_t)ops_count(dy) + 1);
  for (unsigned i = 0; i < 3; i++) {
    outputs[i] = add_heads(&c, a, dtype, sizes[i], false);
    spare[i] = *outputs[i];
    if (wanted & 1u << i) continue;
    outputs[i]->dtype = EG_DTYPE_UNDEFINED;
    outputs[i] = &spare[i];
  }
  score_row row = new_row(&o);
  for (int64_t i = 0; i < ops_count(lse); i++) {
    int64_t head = i / a->queries;
    const int64_t at[3] = {head / a->q_heads, head % a->q_heads, i % a->queries};
    make_row(&o, at, &row);
    lse->values[i] = ops_round(dtype, row.lse);
    for (int64_t d = 0; d < a->value_width; d++) {
      int64_t y_at = head_index(a, (const int64_t[4]){at[0], at[1], at[2], d}, a->q_heads, a->queries, a->value_width);
      y->values[y_at] = ops_round(dtype, output_at(&o, at, &row, d));
      o.dy[i * a->value_width + d] = dy->values[y_at];
    }
    add_gradients(&o, at, &row, outputs);
  }
  free(row.raw);
  ops_tensor *const variables[3] = {o.q, o.k, o.v};
  for (unsigned i = 0; i < 3 && a->queries < 20 && dtype == EG_DTYPE_F64; i++)
    ops_check_gradient(variables[i], outputs[i]->values, weighted_output, &o);
  c.absolute = dtype == EG_DTYPE_F32 ? 3e-5 : 1e-12;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_attention_grad(void **state, egi_op op) {
  (void)op;
  for (size_t i = 0; i < EGI_COUNT(cases); i++) {
    if (cases[i].past > 0 || cases[i].has_lengths) continue;
    check_attention_grad(state, &cases[i], EG_DTYPE_F32, 7);
    check_attention_grad(state, &cases[i], EG_DTYPE_F64, 7);
    for (unsigned wanted = 1; wanted < 7 && i < 3; wanted++)
      check_attention_grad(state, &cases[i], EG_DTYPE_F32, wanted);
  }
}
