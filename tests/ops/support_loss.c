/* Conformance cases of the losses and their gradients against sums in double; the references of the gradients are
 * checked against finite differences on small sizes. */
#include "support_ops.h"

#include <math.h>

#define LABEL_NONE (-100)

static const eg_dtype real_types[] = {EG_DTYPE_F32, EG_DTYPE_F64};

typedef enum label_kind { LABELS_ALL, LABELS_SOME, LABELS_NONE } label_kind;

static void fill_labels(ops_tensor *labels, int64_t n_classes, label_kind kind) {
  for (int64_t i = 0; i < ops_count(labels); i++) {
    bool is_left_out = kind == LABELS_NONE || (kind == LABELS_SOME && egi_random_uniform(3, 4, (uint64_t)i) < 0.4);
    labels->values[i] = is_left_out ? LABEL_NONE : floor(egi_random_uniform(5, 6, (uint64_t)i) * (double)n_classes);
  }
  if (ops_count(labels) > 1 && kind != LABELS_NONE) labels->values[0] = (double)(n_classes - 1);
}

static double log_sum_exp(const double *x, int64_t n) {
  double largest = -HUGE_VAL, sum = 0;
  for (int64_t i = 0; i < n; i++) largest = x[i] > largest ? x[i] : largest;
  for (int64_t i = 0; i < n; i++) sum += exp(x[i] - largest);
  return largest + log(sum);
}

/* ---- LogProbability
 * -------------------------------------------------------------------------------------------------- */

static const struct {
  int rank;
  int64_t dims[3];
} logit_shapes[] = {{1, {5}}, {2, {1, 1}}, {2, {0, 7}}, {3, {2, 3, 63}}, {2, {5, 65}}, {2, {3, 16385}}, {2, {515, 33}}};

static void check_log_probability(void **state, size_t shape, eg_dtype dtype, label_kind kind) {
  ops_case c;
  int rank = logit_shapes[shape].rank;
  const int64_t *dims = logit_shapes[shape].dims;
  ops_begin(&c, state, EGI_OP_LogProbability, dtype);
  ops_tensor *logits = ops_add_input(&c, dtype, rank, dims), *labels = ops_add_input(&c, EG_DTYPE_I64, rank - 1, dims);
  ops_tensor *logp = ops_add_output(&c, dtype, rank - 1, dims), *lse = ops_add_output(&c, EG_DTYPE_F32, rank - 1, dims);
  int64_t n = dims[rank - 1];
  ops_fill_uniform(logits, -30, 30, shape);
  fill_labels(labels, n, kind);
  for (int64_t row = 0; row < ops_count(labels); row++) {
    if (labels->values[row] == LABEL_NONE) continue;
    lse->values[row] = log_sum_exp(logits->values + row * n, n);
    logp->values[row] = logits->values[row * n + (int64_t)labels->values[row]] - lse->values[row];
  }
  c.absolute = 4e-6;
  ops_check(&c);
  if (ops_count(labels) > 0) {
    labels->values[ops_count(labels) - 1] = (double)n;
    c.expected_status = EG_ERROR_DATA;
    ops_check(&c);
    labels->values[ops_count(labels) - 1] = -1;
    ops_check(&c);
  }
  ops_end(&c);
}

void ops_case_log_probability(void **state, egi_op op) {
  (void)op;
  for (size_t shape = 0; shape < EGI_COUNT(logit_shapes); shape++)
    for (size_t t = 0; t < EGI_COUNT(real_types); t++) {
      check_log_probability(state, shape, real_types[t], LABELS_ALL);
      check_log_probability(state, shape, real_types[t], LABELS_SOME);
      check_log_probability(state, shape, real_types[t], LABELS_NONE);
    }
}

typedef struct logit_objective {
  const ops_tensor *logits, *labels, *d_logp;
  int64_t n;
} logit_objective;

static double weighted_log_probability(const void *context) {
  const logit_objective *o = context;
  double sum = 0;
  for (int64_t row = 0; row < ops_count(o->labels); row++) {
    if (o->labels->values[row] == LABEL_NONE) continue;
    const double *x = o->logits->values + row * o->n;
    sum += (x[(int64_t)o->labels->values[row]] - log_sum_exp(x, o->n)) * o->d_logp->values[row];
  }
  return sum;
}

static void check_log_probability_grad(void **state, size_t shape, eg_dtype dtype) {
  ops_case c;
  int rank = logit_shapes[shape].rank;
  const int64_t *dims = logit_shapes[shape].dims;
  ops_begin(&c, state, EGI_OP_LogProbabilityGrad, dtype);
  ops_tensor *logits = ops_add_input(&c, dtype, rank, dims), *labels = ops_add_input(&c, EG_DTYPE_I64, rank - 1, dims);
  ops_tensor *lse = ops_add_input(&c, dtype, rank - 1, dims), *d_logp = ops_add_input(&c, dtype, rank - 1, dims);
  ops_tensor *out = ops_add_output(&c, dtype, rank, dims);
  int64_t n = dims[rank - 1];
  ops_fill_uniform(logits, -4, 4, shape);
  ops_fill_uniform(d_logp, -1, 1, shape + 9);
  fill_labels(labels, n, LABELS_SOME);
  for (int64_t row = 0; row < ops_count(labels); row++) {
    if (labels->values[row] == LABEL_NONE) continue;
    double exact = log_sum_exp(logits->values + row * n, n);
    lse->values[row] = ops_round(dtype, exact);
    for (int64_t i = 0; i < n; i++) {
      double one_hot = i == (int64_t)labels->values[row];
      out->values[row * n + i] = d_logp->values[row] * (one_hot - exp(logits->values[row * n + i] - exact));
    }
  }
  logit_objective objective = {logits, labels, d_logp, n};
  if (ops_count(logits) < 1000) ops_check_gradient(logits, out->values, weighted_log_probability, &objective);
  c.absolute = dtype == EG_DTYPE_F32 ? 2e-6 : 1e-13;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_log_probability_grad(void **state, egi_op op) {
  (void)op;
  for (size_t shape = 0; shape < EGI_COUNT(logit_shapes); shape++)
    for (size_t t = 0; t < EGI_COUNT(real_types); t++) check_log_probability_grad(state, shape, real_types[t]);
}

/* ---- LinearLogProbability: the head is part of it
 * ------------------------------------------------------------------------ */

typedef struct head_case {
  int64_t batch, sequence, size, n_classes;
  bool has_bias;
  label_kind labels;
  int64_t rows; /* in a chunk, 0: as many as the kernel takes */
} head_case;

/* Tiles are 128 rows x 480 classes, 512 rows with many classes. */
static const head_case heads[] = {
    {1, 1, 1, 1, false, LABELS_ALL, 0},      {2, 3, 5, 7, true, LABELS_ALL, 0},
    {2, 3, 5, 7, false, LABELS_SOME, 0},     {2, 3, 5, 7, true, LABELS_NONE, 0},
    {0, 3, 5, 7, false, LABELS_ALL, 0},      {1, 9, 3, 481, true, LABELS_SOME, 0},
    {3, 43, 7, 129, false, LABELS_ALL, 0},   {1, 129, 4, 961, true, LABELS_SOME, 0},
    {1, 400, 2, 17, false, LABELS_SOME, 0},  {1, 1100, 3, 5, true, LABELS_ALL, 0},
    {1, 520, 2, 4100, false, LABELS_ALL, 0}, {1, 400, 2, 17, false, LABELS_SOME, 40},
    {3, 43, 7, 129, true, LABELS_ALL, 1},
};

/* How the weight is stored: int8 codes with one scale, [size, classes] or [classes, size]. */
typedef enum storage { FLOATS, CODES, TURNED_CODES } storage;
static const double code_scale = 0.015625;

typedef struct head_operands {
  const head_case *h;
  storage storage;
  ops_tensor *hidden, *weight, *labels, *bias, *d_logp;
} head_operands;

static void logits_of(const head_operands *o, int64_t row, double *logits) {
  for (int64_t j = 0; j < o->h->n_classes; j++) {
    logits[j] = o->bias ? o->bias->values[j] : 0;
    for (int64_t d = 0; d < o->h->size; d++)
      logits[j] += o->hidden->values[row * o->h->size + d] * o->weight->values[d * o->h->n_classes + j];
  }
}

/* Codes, and the floats [size, classes] that they stand for. */
static void add_codes(ops_case *c, head_operands *o) {
  int64_t size = o->h->size, classes = o->h->n_classes;
  bool is_turned = o->storage == TURNED_CODES;
  ops_tensor *codes =
      ops_add_input(c, EG_DTYPE_I8, 2, is_turned ? (const int64_t[]){classes, size} : (const int64_t[]){size, classes});
  ops_fill_uniform(codes, -128, 127, 2);
  o->weight = EGI_NEW(&c->arena, ops_tensor, 1);
  *o->weight = (ops_tensor){.dtype = EG_DTYPE_F32, .rank = 2, .dims = {size, classes}};
  o->weight->values = EGI_NEW(&c->arena, double, (size_t)(size * classes));
  for (int64_t d = 0; d < size; d++)
    for (int64_t j = 0; j < classes; j++)
      o->weight->values[d * classes + j] = codes->values[is_turned ? j * size + d : d * classes + j] * code_scale;
  ops_add_attribute(c, egi_attribute_string("storage", "blocked"));
  ops_add_attribute(c, egi_attribute_int("transposed", !is_turned));
}

static void add_scale(ops_case *c, const head_operands *o) {
  if (o->storage == FLOATS) return;
  if (!o->h->has_bias) ops_add_absent(c);
  ops_add_input(c, EG_DTYPE_F32, 0, NULL)->values[0] = code_scale;
}

static void add_head(ops_case *c, head_operands *o, eg_dtype dtype, eg_dtype weight) {
  const head_case *h = o->h;
  o->hidden = ops_add_input(c, dtype, 3, (const int64_t[]){h->batch, h->sequence, h->size});
  if (o->storage == FLOATS)
    o->weight = ops_add_input(c, weight, 2, (const int64_t[]){h->size, h->n_classes});
  else
    add_codes(c, o);
  o->labels = ops_add_input(c, EG_DTYPE_I64, 2, (const int64_t[]){h->batch, h->sequence});
  ops_fill_uniform(o->hidden, -2, 2, 1);
  if (o->storage == FLOATS) ops_fill_uniform(o->weight, -2, 2, 2);
  fill_labels(o->labels, h->n_classes, h->labels);
}

static void add_bias(ops_case *c, head_operands *o, eg_dtype weight) {
  if (!o->h->has_bias) return;
  o->bias = ops_add_input(c, weight, 1, &o->h->n_classes);
  ops_fill_uniform(o->bias, -1, 1, 3);
}

static void check_head(void **state, const head_case *h, eg_dtype dtype, eg_dtype weight, storage stored) {
  ops_case c;
  head_operands o = {.h = h, .storage = stored};
  ops_begin(&c, state, EGI_OP_LinearLogProbability, dtype);
  add_head(&c, &o, dtype, weight);
  add_bias(&c, &o, weight);
  add_scale(&c, &o);
  if (h->rows > 0) ops_add_attribute(&c, egi_attribute_int("rows", h->rows));
  ops_tensor *logp = ops_add_output(&c, dtype, 2, o.labels->dims), *lse = ops_add_output(&c, dtype, 2, o.labels->dims);
  double *logits = malloc(sizeof(double) * (size_t)h->n_classes);
  for (int64_t row = 0; row < ops_count(o.labels); row++) {
    if (o.labels->values[row] == LABEL_NONE) continue;
    logits_of(&o, row, logits);
    lse->values[row] = log_sum_exp(logits, h->n_classes);
    logp->values[row] = logits[(int64_t)o.labels->values[row]] - lse->values[row];
  }
  free(logits);
  c.absolute = dtype == EG_DTYPE_F32 ? 8e-6 : 1e-13;
  ops_check(&c);
  if (ops_count(o.labels) > 0) {
    o.labels->values[0] = (double)h->n_classes;
    c.expected_status = EG_ERROR_DATA;
    ops_check(&c);
  }
  ops_end(&c);
}

void ops_case_linear_log_probability(void **state, egi_op op) {
  (void)op;
  for (size_t i = 0; i < EGI_COUNT(heads); i++) {
    check_head(state, &heads[i], EG_DTYPE_F32, EG_DTYPE_F32, FLOATS);
    check_head(state, &heads[i], EG_DTYPE_F64, EG_DTYPE_F64, FLOATS);
    check_head(state, &heads[i], EG_DTYPE_F32, EG_DTYPE_F16, FLOATS);
    check_head(state, &heads[i], EG_DTYPE_F32, EG_DTYPE_BF16, FLOATS);
    check_head(state, &heads[i], EG_DTYPE_F32, EG_DTYPE_F32, CODES);
    check_head(state, &heads[i], EG_DTYPE_F32, EG_DTYPE_F32, TURNED_CODES);
  }
}

static double weighted_head(const void *context) {
  const head_operands *o = context;
  double sum = 0, *logits = malloc(sizeof(double) * (size_t)o->h->n_classes);
  for (int64_t row = 0; row < ops_count(o->labels); row++) {
    if (o->labels->values[row] == LABEL_NONE) continue;
    logits_of(o, row, logits);
    double logp = logits[(int64_t)o->labels->values[row]] - log_sum_exp(logits, o->h->n_classes);
    sum += logp * o->d_logp->values[row];
  }
  free(logits);
  return sum;
}

/* Adds the gradients of one row: d hidden, d weight, d bias. */
static void add_head_gradients(const head_operands *o, int64_t row, const double *d_logits, ops_tensor *const out[3]) {
  for (int64_t j = 0; j < o->h->n_classes; j++) {
    out[2]->values[j] += d_logits[j];
    for (int64_t d = 0; d < o->h->size; d++) {
      out[0]->values[row * o->h->size + d] += d_logits[j] * o->weight->values[d * o->h->n_classes + j];
      out[1]->values[d * o->h->n_classes + j] += d_logits[j] * o->hidden->values[row * o->h->size + d];
    }
  }
}

static void check_head_grad(void **state, const head_case *h, eg_dtype dtype, unsigned wanted, storage stored) {
  ops_case c;
  head_operands o = {.h = h, .storage = stored};
  ops_begin(&c, state, EGI_OP_LinearLogProbabilityGrad, dtype);
  add_head(&c, &o, dtype, dtype);
  if (h->rows > 0) ops_add_attribute(&c, egi_attribute_int("rows", h->rows));
  ops_tensor *lse = ops_add_input(&c, dtype, 2, o.labels->dims), *out[3], spare[3];
  o.d_logp = ops_add_input(&c, dtype, 2, o.labels->dims);
  add_bias(&c, &o, dtype);
  add_scale(&c, &o);
  ops_fill_uniform(o.d_logp, -1, 1, 4);
  out[0] = ops_add_output(&c, dtype, 3, o.hidden->dims);
  out[1] = ops_add_output(&c, dtype, 2, o.weight->dims);
  out[2] = ops_add_output(&c, dtype, 1, &h->n_classes);
  for (unsigned i = 0; i < 3; i++) {
    spare[i] = *out[i];
    if (!(wanted & 1u << i)) {
      out[i]->dtype = EG_DTYPE_UNDEFINED;
      out[i] = &spare[i];
    }
  }
  double *logits = malloc(sizeof(double) * (size_t)h->n_classes);
  for (int64_t row = 0; row < ops_count(o.labels); row++) {
    if (o.labels->values[row] == LABEL_NONE) continue;
    logits_of(&o, row, logits);
    double exact = log_sum_exp(logits, h->n_classes);
    lse->values[row] = ops_round(dtype, exact);
    for (int64_t j = 0; j < h->n_classes; j++) {
      double one_hot = j == (int64_t)o.labels->values[row];
      logits[j] = o.d_logp->values[row] * (one_hot - exp(logits[j] - exact));
    }
    add_head_gradients(&o, row, logits, out);
  }
  free(logits);
  ops_tensor *const variables[3] = {o.hidden, o.weight, o.bias};
  for (unsigned i = 0; i < 3 && h->n_classes * h->sequence < 100; i++)
    if (variables[i]) ops_check_gradient(variables[i], out[i]->values, weighted_head, &o);
  c.absolute = (dtype == EG_DTYPE_F32 ? 1e-5 : 1e-13) * (1 + sqrt((double)h->sequence));
  ops_check(&c);
  ops_end(&c);
}

void ops_case_linear_log_probability_grad(void **state, egi_op op) {
  (void)op;
  for (size_t i = 0; i < EGI_COUNT(heads); i++)
    for (unsigned wanted = 1; wanted < 8; wanted += i < 4 ? 1 : 3) /* 1, 4, 7 for large ones */
      for (size_t t = 0; t < EGI_COUNT(real_types); t++)
        check_head_grad(state, &heads[i], real_types[t], wanted, FLOATS);
  for (size_t i = 0; i < EGI_COUNT(heads); i++) {
    check_head_grad(state, &heads[i], EG_DTYPE_F32, 1, CODES);
    check_head_grad(state, &heads[i], EG_DTYPE_F32, heads[i].has_bias ? 5 : 1, TURNED_CODES);
  }
}
