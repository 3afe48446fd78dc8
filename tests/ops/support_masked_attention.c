/* Conformance cases of MaskedAttention and its gradient against the whole matrix of scores in double; the reference's
 * gradients are checked against finite differences on small sizes. */
#include "support_ops.h"

#include <math.h>

/* Which keys of an entry of the batch are valid. */
typedef enum padding { PADDING_NONE, PADDING_RIGHT, PADDING_LEFT, PADDING_HOLES, PADDING_ALL } padding;

typedef struct masked_case {
  int64_t batch, q_heads, kv_heads, sequence, width, value_width;
  bool is_causal;
  int64_t window;
  padding padding;
  double softcap;
  bool has_sinks;
} masked_case;

/* Tiles are 64 queries x 384 keys; gradients own 128 keys. */
static const masked_case cases[] = {
    {1, 1, 1, 1, 1, 1, true, 0, PADDING_NONE, 0, false},      {2, 4, 2, 5, 4, 4, true, 0, PADDING_NONE, 0, false},
    {2, 4, 2, 6, 4, 3, false, 0, PADDING_RIGHT, 0, false},    {2, 4, 1, 6, 3, 5, true, 0, PADDING_LEFT, 0, true},
    {2, 2, 2, 9, 4, 4, true, 1, PADDING_NONE, 0, true},       {2, 2, 2, 9, 4, 4, true, 3, PADDING_HOLES, 1.5, false},
    {1, 2, 1, 9, 4, 2, true, 9, PADDING_NONE, 0, false},      {1, 2, 1, 9, 4, 2, true, 10, PADDING_NONE, 0, false},
    {1, 2, 1, 8, 4, 4, false, 3, PADDING_NONE, 0, true},      {2, 2, 1, 7, 4, 4, false, 2, PADDING_RIGHT, 2.5, true},
    {2, 2, 1, 4, 4, 3, true, 0, PADDING_ALL, 0, false},       {2, 2, 1, 4, 4, 3, true, 2, PADDING_ALL, 0, true},
    {0, 2, 1, 4, 4, 3, true, 0, PADDING_NONE, 0, true},       {2, 2, 1, 0, 4, 3, true, 0, PADDING_NONE, 0, true},
    {1, 2, 1, 63, 8, 5, true, 0, PADDING_NONE, 0, true},      {1, 2, 1, 65, 8, 5, true, 17, PADDING_LEFT, 0, true},
    {2, 1, 1, 130, 4, 4, true, 64, PADDING_RIGHT, 0, false},  {2, 1, 1, 390, 3, 2, true, 0, PADDING_LEFT, 0, true},
    {1, 1, 1, 520, 2, 2, true, 65, PADDING_HOLES, 3.0, true}, {1, 1, 1, 400, 2, 2, false, 100, PADDING_RIGHT, 0, false},
};

/* Widths that devices have kernels of their own for, with types of 16 bits, and wider ones. */
static const masked_case wide_cases[] = {
    {1, 2, 1, 130, 64, 64, true, 0, PADDING_NONE, 0, false},  {2, 2, 1, 70, 128, 128, true, 17, PADDING_NONE, 0, true},
    {1, 1, 1, 65, 192, 128, true, 0, PADDING_NONE, 0, true},  {1, 2, 1, 64, 80, 80, true, 1, PADDING_NONE, 0, false},
    {1, 1, 1, 33, 256, 256, true, 0, PADDING_NONE, 3, false}, {1, 2, 1, 40, 96, 96, true, 0, PADDING_LEFT, 0, true},
    {1, 1, 1, 70, 140, 260, true, 0, PADDING_NONE, 0, false}, {1, 4, 1, 80, 64, 64, true, 40, PADDING_NONE, 0, true},
};

/* Documents in the row; with the bounds of blocks of 64 rows, or of 20. */
typedef enum documents {
  DOCUMENTS_NONE,
  DOCUMENTS_WHOLE,
  DOCUMENTS_MIXED,
  DOCUMENTS_BLOCKS,
  DOCUMENTS_OTHER_BLOCKS,
  DOCUMENTS_KINDS
} documents;

typedef struct operands {
  const masked_case *a;
  documents documents;
  ops_tensor *q, *k, *v, *valid, *sinks;
  double scale, *dy;
} operands;

/* One row: scores before and after the cap, probabilities, that of the sink, log-sum-exp. */
typedef struct score_row {
  double *raw, *capped, *p, sink, lse;
} score_row;

/* ---- reference ---- */

static double at4(const ops_tensor *x, int64_t batch, int64_t head, int64_t row, int64_t column) {
  return x->values[((batch * x->dims[1] + head) * x->dims[2] + row) * x->dims[3] + column];
}

static bool is_valid(const operands *o, int64_t batch, int64_t key) {
  return !o->valid || o->valid->values[batch * o->a->sequence + key] != 0;
}

/* Where the document of a row begins; mixed ones have lengths of 1, 3, 1, 37 .. */
static int64_t document_of(const operands *o, int64_t row) {
  if (o->documents < DOCUMENTS_MIXED) return 0;
  while (row > 1 && row != 4 && row % 37 != 5) row--;
  return row;
}

static bool is_seen(const operands *o, int64_t batch, int64_t query, int64_t key) {
  const masked_case *a = o->a;
  if (document_of(o, query) != document_of(o, key)) return false;
  if (!is_valid(o, batch, key) || (a->is_causal && key > query)) return false;
  return a->window == 0 || (key > query - a->window && key < query + a->window);
}

static void make_row(const operands *o, const int64_t at[3], score_row *row) {
  const masked_case *a = o->a;
  int64_t kv_head = at[1] / (a->q_heads / a->kv_heads);
  double sink = o->sinks ? o->sinks->values[at[1]] : -HUGE_VAL, largest = sink, sum = 0;
  for (int64_t j = 0; j < a->sequence; j++) {
    double dot = 0;
    for (int64_t d = 0; d < a->width; d++) dot += at4(o->q, at[0], at[1], at[2], d) * at4(o->k, at[0], kv_head, j, d);
    row->raw[j] = dot * o->scale;
    row->capped[j] = a->softcap > 0 ? a->softcap * tanh(row->raw[j] / a->softcap) : row->raw[j];
    if (is_seen(o, at[0], at[2], j) && row->capped[j] > largest) largest = row->capped[j];
  }
  row->sink = o->sinks ? exp(sink - largest) : 0;
  for (int64_t j = 0; j < a->sequence; j++)
    sum += row->p[j] = is_seen(o, at[0], at[2], j) ? exp(row->capped[j] - largest) : 0;
  sum += row->sink;
  for (int64_t j = 0; j < a->sequence && sum > 0; j++) row->p[j] /= sum;
  if (sum > 0) row->sink /= sum;
  row->lse = sum > 0 ? largest + log(sum) : HUGE_VAL;
}

static score_row new_row(const operands *o) {
  double *memory = malloc(sizeof(double) * (size_t)(3 * o->a->sequence + 1));
  assert_non_null(memory);
  return (score_row){memory, memory + o->a->sequence, memory + 2 * o->a->sequence, 0, 0};
}

static double output_at(const operands *o, const int64_t at[3], const score_row *row, int64_t d) {
  double sum = 0;
  for (int64_t j = 0; j < o->a->sequence; j++)
    if (row->p[j] > 0) sum += row->p[j] * at4(o->v, at[0], at[1] / (o->a->q_heads / o->a->kv_heads), j, d);
  return sum;
}

static void row_at(const masked_case *a, int64_t index, int64_t at[3]) {
  at[0] = index / a->sequence / a->q_heads;
  at[1] = index / a->sequence % a->q_heads;
  at[2] = index % a->sequence;
}

/* ---- making a case ---- */

static bool valid_at(const masked_case *a, int64_t batch, int64_t key) {
  int64_t half = (a->sequence + 1) / 2;
  switch (a->padding) {
  case PADDING_RIGHT:
    return batch == 1 ? key < half : key < a->sequence - 1;
  case PADDING_LEFT:
    return batch == 1 ? key >= half : key >= 1;
  case PADDING_HOLES:
    return key % 3 != 1;
  case PADDING_ALL:
    return batch == 1 && key > 0;
  case PADDING_NONE:
    break;
  }
  return true;
}

static void begin(ops_case *c, void **state, egi_op op, eg_dtype dtype, operands *o) {
  const masked_case *a = o->a;
  const int64_t q_dims[4] = {a->batch, a->q_heads, a->sequence, a->width};
  const int64_t k_dims[4] = {a->batch, a->kv_heads, a->sequence, a->width};
  const int64_t v_dims[4] = {a->batch, a->kv_heads, a->sequence, a->value_width};
  ops_begin(c, state, op, dtype);
  o->scale = a->softcap > 0 ? 0.75 : 1 / sqrt((double)a->width);
  if (a->softcap > 0) ops_add_attribute(c, egi_attribute_float("scale", 0.75f));
  if (a->softcap > 0) ops_add_attribute(c, egi_attribute_float("softcap", (float)a->softcap));
  if (a->is_causal) ops_add_attribute(c, egi_attribute_int("causal", 1));
  if (a->window > 0) ops_add_attribute(c, egi_attribute_int("window", a->window));
  o->q = ops_add_input(c, dtype, 4, q_dims);
  o->k = ops_add_input(c, dtype, 4, k_dims);
  o->v = ops_add_input(c, dtype, 4, v_dims);
  ops_tensor *const variables[3] = {o->q, o->k, o->v};
  for (uint64_t i = 0; i < 3; i++) ops_fill_uniform(variables[i], -2, 2, 11 + i + (uint64_t)a->sequence);
  if (a->padding == PADDING_NONE) {
    ops_add_absent(c);
  } else {
    o->valid = ops_add_input(c, EG_DTYPE_BOOL, 2, (const int64_t[2]){a->batch, a->sequence});
    for (int64_t i = 0; i < a->batch * a->sequence; i++)
      o->valid->values[i] = valid_at(a, i / a->sequence, i % a->sequence);
  }
  if (a->has_sinks) {
    o->sinks = ops_add_input(c, dtype, 1, &a->q_heads);
    ops_fill_uniform(o->sinks, -1, 2, 5);
  } else {
    ops_add_absent(c);
  }
  c->relative = 0;
  c->absolute = dtype == EG_DTYPE_F32 ? 4e-6 : 1e-12;
}

static void add_bounds(ops_case *c, const operands *o, const ops_tensor *first, const ops_tensor *last) {
  int64_t n = o->a->sequence, block = o->documents == DOCUMENTS_BLOCKS ? EGI_BLOCK_ROWS : 20;
  const int64_t dims[2] = {(n + block - 1) / block, 2};
  ops_tensor *bounds = ops_add_input(c, EG_DTYPE_I32, 2, dims);
  if (block != EGI_BLOCK_ROWS) ops_add_attribute(c, egi_attribute_int("block", block));
  for (int64_t i = 0; i < dims[0]; i++) {
    bounds->values[2 * i] = first->values[i * block];
    bounds->values[2 * i + 1] = last->values[(i + 1) * block < n ? (i + 1) * block - 1 : n - 1];
  }
}

/* first_key, last_query and bounds of blocks, the last operands. */
static void add_documents(ops_case *c, const operands *o) {
  int64_t n = o->a->sequence;
  if (o->documents == DOCUMENTS_NONE) return;
  ops_tensor *first = ops_add_input(c, EG_DTYPE_I32, 1, &n), *last = ops_add_input(c, EG_DTYPE_I32, 1, &n);
  for (int64_t i = n - 1; i >= 0; i--) {
    bool is_last = i == n - 1 || document_of(o, i + 1) != document_of(o, i);
    first->values[i] = (double)document_of(o, i);
    last->values[i] = is_last ? (double)i : last->values[i + 1];
  }
  if (o->documents >= DOCUMENTS_BLOCKS) add_bounds(c, o, first, last);
}

/* What no query sees may hold NaN: keys after all queries' windows, and padding. */
static void spoil_unseen(const operands *o) {
  const masked_case *a = o->a;
  for (int64_t i = 0; i < a->batch * a->kv_heads * a->sequence; i++) {
    int64_t batch = i / a->sequence / a->kv_heads, key = i % a->sequence;
    bool is_edge = a->padding == PADDING_RIGHT || a->padding == PADDING_LEFT;
    if (!is_edge || is_valid(o, batch, key)) continue;
    o->k->values[i * a->width] = o->v->values[i * a->value_width] = 1e9;
  }
}

static void check_forward(void **state, const masked_case *a, documents packing, eg_dtype dtype) {
  ops_case c;
  operands o = {.a = a, .documents = packing};
  int64_t at[3];
  begin(&c, state, EGI_OP_MaskedAttention, dtype, &o);
  add_documents(&c, &o);
  spoil_unseen(&o);
  ops_tensor *y = ops_add_output(&c, dtype, 4, (const int64_t[4]){a->batch, a->q_heads, a->sequence, a->value_width});
  ops_tensor *lse = ops_add_output(&c, dtype, 3, (const int64_t[3]){a->batch, a->q_heads, a->sequence});
  score_row row = new_row(&o);
  for (int64_t i = 0; i < ops_count(lse); i++) {
    row_at(a, i, at);
    make_row(&o, at, &row);
    lse->values[i] = row.lse;
    for (int64_t d = 0; d < a->value_width; d++) y->values[i * a->value_width + d] = output_at(&o, at, &row, d);
  }
  free(row.raw);
  ops_check(&c);
  ops_end(&c);
}

/* ---- gradient ---- */

static double weighted_output(const void *context) {
  const operands *o = context;
  score_row row = new_row(o);
  double sum = 0;
  int64_t at[3];
  for (int64_t i = 0; i < o->a->batch * o->a->q_heads * o->a->sequence; i++) {
    row_at(o->a, i, at);
    make_row(o, at, &row);
    for (int64_t d = 0; d < o->a->value_width; d++) sum += output_at(o, at, &row, d) * o->dy[i * o->a->value_width + d];
  }
  free(row.raw);
  return sum;
}

/* Gradients of one row, added to those of all. */
static void add_gradients(const operands *o, const int64_t at[3], const score_row *row, ops_tensor *const out[4]) {
  const masked_case *a = o->a;
  int64_t kv_head = at[1] / (a->q_heads / a->kv_heads), q_row = (at[0] * a->q_heads + at[1]) * a->sequence + at[2];
  const double *dy = o->dy + q_row * a->value_width;
  double delta = 0;
  for (int64_t d = 0; d < a->value_width; d++) delta += output_at(o, at, row, d) * dy[d];
  out[3]->values[at[1]] -= row->sink * delta;
  for (int64_t j = 0; j < a->sequence; j++) {
    int64_t k_row = (at[0] * a->kv_heads + kv_head) * a->sequence + j;
    double dp = 0, t = a->softcap > 0 ? row->capped[j] / a->softcap : 0;
    for (int64_t d = 0; d < a->value_width; d++) {
      dp += dy[d] * o->v->values[k_row * a->value_width + d];
      out[2]->values[k_row * a->value_width + d] += row->p[j] * dy[d];
    }
    double ds = row->p[j] * (dp - delta) * (1 - t * t) * o->scale;
    for (int64_t d = 0; d < a->width; d++) {
      out[0]->values[q_row * a->width + d] += ds * o->k->values[k_row * a->width + d];
      out[1]->values[k_row * a->width + d] += ds * o->q->values[q_row * a->width + d];
    }
  }
}

/* Y, lse and dY of the case, and the gradients. */
static void fill_gradients(operands *o, eg_dtype dtype, ops_tensor *const given[3], ops_tensor *const out[4]) {
  const masked_case *a = o->a;
  score_row row = new_row(o);
  int64_t at[3];
  o->dy = given[2]->values;
  ops_fill_uniform(given[2], -2, 2, 23);
  for (int64_t i = 0; i < ops_count(given[1]); i++) {
    row_at(a, i, at);
    make_row(o, at, &row);
    given[1]->values[i] = ops_round(dtype, row.lse);
    for (int64_t d = 0; d < a->value_width; d++)
      given[0]->values[i * a->value_width + d] = ops_round(dtype, output_at(o, at, &row, d));
    add_gradients(o, at, &row, out);
  }
  free(row.raw);
}

static void check_backward(void **state, const operands *form, eg_dtype dtype, unsigned wanted) {
  ops_case c;
  operands o = *form;
  const masked_case *a = o.a;
  begin(&c, state, EGI_OP_MaskedAttentionGrad, dtype, &o);
  const int64_t y_dims[4] = {a->batch, a->q_heads, a->sequence, a->value_width};
  ops_tensor *given[3], *out[4], spare[4], *variables[4] = {o.q, o.k, o.v, o.sinks};
  given[0] = ops_add_input(&c, dtype, 4, y_dims);
  given[1] = ops_add_input(&c, dtype, 3, y_dims);
  given[2] = ops_add_input(&c, dtype, 4, y_dims);
  add_documents(&c, &o);
  for (unsigned i = 0; i < 4; i++) {
    const ops_tensor *like = variables[i];
    out[i] = ops_add_output(&c, dtype, like ? like->rank : 1, like ? like->dims : &a->q_heads);
    spare[i] = *out[i];
    if (like && (wanted & 1u << i)) continue;
    out[i]->dtype = EG_DTYPE_UNDEFINED;
    out[i] = &spare[i];
  }
  fill_gradients(&o, dtype, given, out);
  for (unsigned i = 0; i < 4 && a->sequence < 20 && dtype == EG_DTYPE_F64; i++)
    if (variables[i]) ops_check_gradient(variables[i], out[i]->values, weighted_output, &o);
  c.absolute = dtype == EG_DTYPE_F32 ? 6e-5 : 1e-11;
  ops_check(&c);
  ops_end(&c);
}

/* ---- refusals ---- */

static void check_refusals(void **state) {
  static const masked_case a = {2, 4, 2, 3, 2, 2, true, 0, PADDING_RIGHT, 0, true};
  for (int i = 0; i < 7; i++) {
    ops_case c;
    operands o = {.a = &a, .documents = i < 3 ? DOCUMENTS_NONE : i < 5 ? DOCUMENTS_MIXED : DOCUMENTS_BLOCKS};
    begin(&c, state, EGI_OP_MaskedAttention, EG_DTYPE_F32, &o);
    (void)ops_add_output(&c, EG_DTYPE_F32, 4, (const int64_t[4]){2, 4, 3, 2});
    add_documents(&c, &o);
    if (i == 3) c.n_inputs--;
    if (i == 4) c.inputs[5].dims[0] = 2;
    if (i == 5) c.inputs[7].dims[0] = 2;
    if (i == 6) ops_add_attribute(&c, egi_attribute_int("block", 0));
    if (i == 0) o.valid->dims[1] = 2;
    if (i == 1) o.sinks->dims[0] = 2;
    if (i == 2) ops_add_attribute(&c, egi_attribute_int("window", -1));
    ops_check_refused(&c, EG_ERROR_SHAPE);
    ops_end(&c);
  }
}

void ops_case_masked_attention(void **state, egi_op op) {
  bool is_gradient = op == EGI_OP_MaskedAttentionGrad;
  for (size_t i = 0; i < DOCUMENTS_KINDS * EGI_COUNT(cases); i++) {
    const operands form = {.a = &cases[i / DOCUMENTS_KINDS], .documents = (documents)(i % DOCUMENTS_KINDS)};
    for (int wide = 0; wide < 2; wide++) {
      eg_dtype dtype = wide ? EG_DTYPE_F64 : EG_DTYPE_F32;
      if (is_gradient)
        check_backward(state, &form, dtype, 15);
      else
        check_forward(state, form.a, form.documents, dtype);
    }
    for (unsigned wanted = 1; wanted < 15 && i == 3 * DOCUMENTS_KINDS && is_gradient; wanted++)
      check_backward(state, &form, EG_DTYPE_F32, wanted);
  }
  for (size_t i = 0; i < EGI_COUNT(wide_cases); i++) {
    const operands form = {.a = &wide_cases[i], .documents = i % 3 == 0 ? DOCUMENTS_MIXED : DOCUMENTS_NONE};
    if (is_gradient)
      check_backward(state, &form, EG_DTYPE_F32, i == 1 ? 9 : i == 2 ? 14 : 15);
    else
      check_forward(state, form.a, form.documents, EG_DTYPE_F32);
  }
  if (!is_gradient) check_refusals(state);
  if (!is_gradient) ops_check_cached_attention(state);
}
