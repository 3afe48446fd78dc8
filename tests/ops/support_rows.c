/* Conformance cases of the operators that work on rows: softmax, normalisation, rotary embedding and their gradients,
 * against references in double; references of gradients are checked against finite differences on small sizes. */
#include "support_ops.h"

#include <math.h>

static const eg_dtype real_types[] = {EG_DTYPE_F32, EG_DTYPE_F64};

/* Position of element `i` of row `row` along `axis`. */
static int64_t along(const ops_tensor *tensor, int axis, int64_t row, int64_t i) {
  int64_t inner = 1;
  for (int d = axis + 1; d < tensor->rank; d++) inner *= tensor->dims[d];
  return (row / inner * tensor->dims[axis] + i) * inner + row % inner;
}

/* ---- softmax -------------------------------------------------------------------------------------------------------
 */

static const struct {
  int rank, axis;
  int64_t dims[3];
} softmax_shapes[] = {{1, -1, {1}},        {1, 0, {7}},       {2, -1, {0, 5}},    {2, -1, {3, 0}},
                      {2, -1, {3, 63}},    {2, 0, {65, 3}},   {3, 1, {2, 64, 5}}, {3, -1, {2, 3, 1025}},
                      {2, -1, {2, 16385}}, {2, -1, {513, 33}}};

static void reference_softmax(const double *x, int64_t n, bool is_log, double *y) {
  double largest = -HUGE_VAL, sum = 0;
  for (int64_t i = 0; i < n; i++) largest = x[i] > largest ? x[i] : largest;
  for (int64_t i = 0; i < n; i++) sum += exp(x[i] - largest);
  for (int64_t i = 0; i < n; i++) y[i] = is_log ? x[i] - largest - log(sum) : exp(x[i] - largest) / sum;
}

static void apply_rows(const ops_tensor *in, int axis, ops_tensor *out, bool is_log) {
  int64_t n = in->dims[axis], rows = n ? ops_count(in) / n : 0;
  double *x = malloc(sizeof(double) * (size_t)(2 * n + 1)), *y = x + n;
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = 0; i < n; i++) x[i] = in->values[along(in, axis, row, i)];
    reference_softmax(x, n, is_log, y);
    for (int64_t i = 0; i < n; i++) out->values[along(in, axis, row, i)] = y[i];
  }
  free(x);
}

static void check_softmax(void **state, egi_op op, size_t shape, eg_dtype dtype, bool is_special) {
  ops_case c;
  ops_begin(&c, state, op, dtype);
  int rank = softmax_shapes[shape].rank, axis = softmax_shapes[shape].axis;
  ops_tensor *in = ops_add_input(&c, dtype, rank, softmax_shapes[shape].dims);
  ops_tensor *out = ops_add_output(&c, dtype, rank, softmax_shapes[shape].dims);
  ops_add_attribute(&c, egi_attribute_int("axis", axis));
  ops_fill_uniform(in, -20, 20, shape + 1);
  int64_t count = ops_count(in);
  if (is_special && count > 3) { /* a row with -inf, and one with NaN */
    in->values[0] = -HUGE_VAL;
    in->values[count - 1] = (double)NAN;
  }
  apply_rows(in, axis < 0 ? axis + rank : axis, out, op == EGI_OP_LogSoftmax);
  c.relative = dtype == EG_DTYPE_F32 ? 3e-6 : 1e-13;
  c.absolute = dtype == EG_DTYPE_F32 ? 2e-6 : 1e-14;
  if (op == EGI_OP_Softmax) c.absolute = dtype == EG_DTYPE_F32 ? 1e-37 : 1e-300; /* flushed below the normal numbers */
  ops_check(&c);
  ops_end(&c);
}

void ops_case_softmax(void **state, egi_op op) {
  for (size_t shape = 0; shape < EGI_COUNT(softmax_shapes); shape++)
    for (size_t t = 0; t < EGI_COUNT(real_types); t++) {
      check_softmax(state, op, shape, real_types[t], false);
      check_softmax(state, op, shape, real_types[t], true);
    }
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_I32);
  ops_add_input(&c, EG_DTYPE_I32, 1, (const int64_t[]){3});
  ops_add_output(&c, EG_DTYPE_I32, 1, (const int64_t[]){3});
  ops_check_refused(&c, EG_ERROR_UNSUPPORTED);
  ops_end(&c);
}

/* dx from x and dy by the textbook matrix: d y_i / d x_j = y_i (delta - y_j), of log: delta - exp(y_j). */
typedef struct softmax_objective {
  const ops_tensor *x, *dy;
  int axis;
  bool is_log;
} softmax_objective;

static double softmax_value(const void *context) {
  const softmax_objective *o = context;
  ops_tensor y = *o->x;
  y.values = malloc(sizeof(double) * (size_t)ops_count(&y));
  apply_rows(o->x, o->axis, &y, o->is_log);
  double sum = 0;
  for (int64_t i = 0; i < ops_count(&y); i++) sum += y.values[i] * o->dy->values[i];
  free(y.values);
  return sum;
}

static void check_softmax_grad(void **state, egi_op op, size_t shape, eg_dtype dtype) {
  ops_case c;
  ops_begin(&c, state, op, dtype);
  bool is_log = op == EGI_OP_LogSoftmaxGrad;
  int rank = softmax_shapes[shape].rank, axis = softmax_shapes[shape].axis;
  const int64_t *dims = softmax_shapes[shape].dims;
  ops_tensor *y = ops_add_input(&c, dtype, rank, dims), *dy = ops_add_input(&c, dtype, rank, dims);
  ops_tensor *dx = ops_add_output(&c, dtype, rank, dims), x = *y;
  ops_add_attribute(&c, egi_attribute_int("axis", axis));
  if (axis < 0) axis += rank;
  x.values = EGI_NEW(&c.arena, double, (size_t)ops_count(y) + 1);
  ops_fill_uniform(&x, -4, 4, shape);
  ops_fill_uniform(dy, -1, 1, shape + 50);
  apply_rows(&x, axis, y, is_log);
  int64_t n = dims[axis], rows = n ? ops_count(y) / n : 0;
  for (int64_t row = 0; row < rows; row++) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
      int64_t at = along(y, axis, row, i);
      sum += is_log ? dy->values[at] : dy->values[at] * y->values[at];
    }
    for (int64_t i = 0; i < n; i++) {
      int64_t at = along(y, axis, row, i);
      double p = is_log ? exp(y->values[at]) : y->values[at];
      dx->values[at] = is_log ? dy->values[at] - p * sum : p * (dy->values[at] - sum);
    }
  }
  softmax_objective objective = {&x, dy, axis, is_log};
  if (ops_count(&x) < 1000) ops_check_gradient(&x, dx->values, softmax_value, &objective);
  for (int64_t i = 0; i < ops_count(y); i++) y->values[i] = ops_round(dtype, y->values[i]);
  c.absolute = dtype == EG_DTYPE_F32 ? 2e-5 : 1e-12;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_softmax_grad(void **state, egi_op op) {
  for (size_t shape = 0; shape < EGI_COUNT(softmax_shapes); shape++)
    for (size_t t = 0; t < EGI_COUNT(real_types); t++) check_softmax_grad(state, op, shape, real_types[t]);
}

/* ---- normalisation
 * --------------------------------------------------------------------------------------------------- */

typedef struct norm_shape {
  int rank, axis;
  int64_t dims[3];
  int scale_rank;
  int64_t scale[3];
} norm_shape;

static const norm_shape norm_shapes[] = {
    {1, -1, {1}, 1, {1}},
    {2, -1, {3, 7}, 1, {7}},
    {2, -1, {0, 7}, 1, {7}},
    {3, 1, {2, 3, 5}, 2, {3, 5}},
    {3, 1, {2, 3, 5}, 1, {5}},
    {3, 1, {2, 3, 5}, 2, {3, 1}},
    {2, -1, {3, 7}, 0, {0}},
    {3, -1, {3, 43, 65}, 1, {65}},
    {2, -1, {130, 129}, 2, {1, 129}},
    {2, -1, {2, 16385}, 1, {16385}},
    {3, -3, {2, 3, 5}, 3, {2, 3, 5}},
    {2, 1, {2049, 33}, 1, {33}},
};

/* The operands of a case; fields that the operator has not are NULL. */
typedef struct norm_operands {
  const norm_shape *shape;
  bool is_rms;
  int64_t rows, n;
  ops_tensor *x, *scale, *bias, *dy;
} norm_operands;

/* Which element of scale or bias belongs to element i of a row. */
static int64_t scale_index(const norm_operands *o, const ops_tensor *scale, int64_t i) {
  int axis = o->shape->axis < 0 ? o->shape->axis + o->shape->rank : o->shape->axis;
  ops_tensor own = *scale;
  int extra = own.rank - (o->shape->rank - axis);
  if (extra > 0) { /* leading ones */
    own.rank -= extra;
    memmove(own.dims, own.dims + extra, sizeof(int64_t) * (size_t)own.rank);
  }
  return ops_broadcast_index(&own, o->shape->rank - axis, o->shape->dims + axis, i);
}

static double scale_at(const norm_operands *o, const ops_tensor *scale, int64_t i) {
  return scale->values[scale_index(o, scale, i)];
}

static void row_statistics(const norm_operands *o, int64_t row, double *mean, double *inverse) {
  const double *x = o->x->values + row * o->n;
  double sum = 0, squares = 0, epsilon = (double)1e-3f;
  for (int64_t i = 0; i < o->n; i++) sum += x[i];
  *mean = o->is_rms ? 0 : sum / (double)o->n;
  for (int64_t i = 0; i < o->n; i++) squares += (x[i] - *mean) * (x[i] - *mean);
  *inverse = 1.0 / sqrt(squares / (double)o->n + epsilon);
}

static double norm_at(const norm_operands *o, int64_t row, int64_t i) {
  double mean, inverse;
  row_statistics(o, row, &mean, &inverse);
  double y = (o->x->values[row * o->n + i] - mean) * inverse * scale_at(o, o->scale, i);
  return y + (o->bias ? scale_at(o, o->bias, i) : 0);
}

static double norm_value(const void *context) {
  const norm_operands *o = context;
  double sum = 0;
  for (int64_t row = 0; row < o->rows; row++)
    for (int64_t i = 0; i < o->n; i++) sum += norm_at(o, row, i) * o->dy->values[row * o->n + i];
  return sum;
}

static void set_sizes(norm_operands *o) {
  int axis = o->shape->axis < 0 ? o->shape->axis + o->shape->rank : o->shape->axis;
  o->rows = o->n = 1;
  for (int i = 0; i < o->shape->rank; i++) *(i < axis ? &o->rows : &o->n) *= o->shape->dims[i];
}

static void begin_norm(ops_case *c, void **state, egi_op op, eg_dtype dtype, norm_operands *o) {
  ops_begin(c, state, op, dtype);
  set_sizes(o);
  ops_add_attribute(c, egi_attribute_int("axis", o->shape->axis));
  ops_add_attribute(c, egi_attribute_float("epsilon", 1e-3f));
  o->x = ops_add_input(c, dtype, o->shape->rank, o->shape->dims);
  o->scale = ops_add_input(c, dtype, o->shape->scale_rank, o->shape->scale);
  ops_fill_uniform(o->x, -2, 3, 1);
  ops_fill_uniform(o->scale, 0.5, 2, 2);
  c->relative = dtype == EG_DTYPE_F32 ? 2e-6 : 1e-13;
  c->absolute = dtype == EG_DTYPE_F32 ? 2e-6 : 1e-14;
}

static void statistic_dims(const norm_shape *shape, int64_t dims[3]) {
  int axis = shape->axis < 0 ? shape->axis + shape->rank : shape->axis;
  for (int i = 0; i < shape->rank; i++) dims[i] = i < axis ? shape->dims[i] : 1;
}

static void check_norm(void **state, egi_op op, const norm_shape *shape, eg_dtype dtype, bool has_bias) {
  ops_case c;
  norm_operands o = {.shape = shape, .is_rms = op == EGI_OP_RMSNormalization};
  begin_norm(&c, state, op, dtype, &o);
  if (has_bias) {
    o.bias = ops_add_input(&c, dtype, shape->scale_rank, shape->scale);
    ops_fill_uniform(o.bias, -1, 1, 3);
  }
  ops_tensor *y = ops_add_output(&c, dtype, shape->rank, shape->dims), *mean = NULL, *inverse = NULL;
  if (has_bias) {
    int64_t dims[3];
    statistic_dims(shape, dims);
    mean = ops_add_output(&c, EG_DTYPE_F32, shape->rank, dims);
    inverse = ops_add_output(&c, EG_DTYPE_F32, shape->rank, dims);
    c.relative = 2e-6;
  }
  for (int64_t row = 0; row < o.rows; row++) {
    double m, r;
    row_statistics(&o, row, &m, &r);
    if (mean) mean->values[row] = m;
    if (inverse) inverse->values[row] = r;
    for (int64_t i = 0; i < o.n; i++) {
      double value = (o.x->values[row * o.n + i] - m) * r * scale_at(&o, o.scale, i);
      y->values[row * o.n + i] = value + (has_bias ? scale_at(&o, o.bias, i) : 0);
    }
  }
  if (mean) c.absolute = 1e-6;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_norm(void **state, egi_op op) {
  for (size_t i = 0; i < EGI_COUNT(norm_shapes); i++)
    for (size_t t = 0; t < EGI_COUNT(real_types); t++) {
      check_norm(state, op, &norm_shapes[i], real_types[t], false);
      if (op == EGI_OP_LayerNormalization) check_norm(state, op, &norm_shapes[i], real_types[t], true);
    }
}

/* Sum over rows of dy (· h), put where the scale's element is. */
static void reference_parameters(const norm_operands *o, ops_tensor *d_scale, ops_tensor *d_bias) {
  for (int64_t row = 0; row < o->rows; row++) {
    double mean, inverse;
    row_statistics(o, row, &mean, &inverse);
    for (int64_t i = 0; i < o->n; i++) {
      double h = (o->x->values[row * o->n + i] - mean) * inverse, dy = o->dy->values[row * o->n + i];
      int64_t at = scale_index(o, d_scale, i);
      d_scale->values[at] += dy * h;
      if (d_bias) d_bias->values[at] += dy;
    }
  }
}

static void reference_dx(const norm_operands *o, ops_tensor *dx) {
  for (int64_t row = 0; row < o->rows; row++) {
    double mean, inverse, sum_g = 0, sum_gh = 0;
    row_statistics(o, row, &mean, &inverse);
    for (int pass = 0; pass < 2; pass++)
      for (int64_t i = 0; i < o->n; i++) {
        int64_t at = row * o->n + i;
        double h = (o->x->values[at] - mean) * inverse, g = o->dy->values[at] * scale_at(o, o->scale, i);
        if (pass == 0) sum_g += g;
        if (pass == 0) sum_gh += g * h;
        if (pass == 0) continue;
        double centre = o->is_rms ? 0 : sum_g / (double)o->n;
        dx->values[at] = inverse * (g - centre - h * sum_gh / (double)o->n);
      }
  }
}

static void check_norm_grad(void **state, egi_op op, const norm_shape *shape, eg_dtype dtype, bool wants_dx) {
  ops_case c;
  norm_operands o = {.shape = shape, .is_rms = op == EGI_OP_RMSNormalizationGrad};
  begin_norm(&c, state, op, dtype, &o);
  ops_tensor *mean = NULL, *inverse = NULL, *d_bias = NULL;
  if (!o.is_rms) {
    int64_t dims[3];
    statistic_dims(shape, dims);
    mean = ops_add_input(&c, EG_DTYPE_F64, shape->rank, dims);
    inverse = ops_add_input(&c, EG_DTYPE_F64, shape->rank, dims);
    for (int64_t row = 0; row < o.rows; row++) row_statistics(&o, row, &mean->values[row], &inverse->values[row]);
  }
  o.dy = ops_add_input(&c, dtype, shape->rank, shape->dims);
  ops_fill_uniform(o.dy, -1, 1, 9);
  ops_tensor *dx = wants_dx ? ops_add_output(&c, dtype, shape->rank, shape->dims) : NULL;
  if (!wants_dx) ops_add_absent_output(&c);
  ops_tensor *d_scale = ops_add_output(&c, dtype, shape->scale_rank, shape->scale);
  if (!o.is_rms) d_bias = ops_add_output(&c, dtype, shape->scale_rank, shape->scale);
  reference_parameters(&o, d_scale, d_bias);
  if (dx) reference_dx(&o, dx);
  if (ops_count(o.x) < 100 && dx) {
    ops_check_gradient(o.x, dx->values, norm_value, &o);
    ops_check_gradient(o.scale, d_scale->values, norm_value, &o);
  }
  c.absolute = (dtype == EG_DTYPE_F32 ? 3e-6 : 1e-14) * (1 + sqrt((double)o.rows));
  ops_check(&c);
  ops_end(&c);
}

void ops_case_norm_grad(void **state, egi_op op) {
  for (size_t i = 0; i < EGI_COUNT(norm_shapes); i++)
    for (size_t t = 0; t < EGI_COUNT(real_types); t++) {
      check_norm_grad(state, op, &norm_shapes[i], real_types[t], true);
      check_norm_grad(state, op, &norm_shapes[i], real_types[t], false);
    }
}

/* ---- rotary embedding
 * -------------------------------------------------------------------------------------------------- */

typedef struct rotary_case {
  int64_t batch, heads, sequence, width, rotary; /* rotary 0: all */
  bool is_flat, is_interleaved, has_positions, shares_positions;
} rotary_case;

static const rotary_case rotaries[] = {
    {1, 1, 1, 2, 0, false, false, false, false},   {2, 3, 5, 8, 0, false, false, true, false},
    {2, 3, 5, 8, 4, true, true, true, true},       {2, 3, 5, 8, 0, true, false, false, false},
    {2, 3, 5, 8, 6, false, true, false, false},    {0, 3, 5, 8, 0, false, false, false, false},
    {1, 4, 257, 64, 0, false, false, true, false}, {1, 2, 3, 7, 6, false, false, true, false}};

static void check_rotary(void **state, const rotary_case *r, eg_dtype dtype) {
  ops_case c;
  ops_begin(&c, state, EGI_OP_RotaryEmbedding, dtype);
  int64_t half = (r->rotary ? r->rotary : r->width) / 2, cached = r->sequence + 4;
  const int64_t flat[3] = {r->batch, r->sequence, r->heads * r->width};
  const int64_t full[4] = {r->batch, r->heads, r->sequence, r->width};
  const int64_t cache[2] = {cached, half}, direct[3] = {r->batch, r->sequence, half};
  ops_tensor *x = ops_add_input(&c, dtype, r->is_flat ? 3 : 4, r->is_flat ? flat : full), *cosine, *sine;
  cosine = ops_add_input(&c, dtype, r->has_positions ? 2 : 3, r->has_positions ? cache : direct);
  sine = ops_add_input(&c, dtype, r->has_positions ? 2 : 3, r->has_positions ? cache : direct);
  ops_tensor *positions = NULL;
  if (r->has_positions)
    positions = ops_add_input(&c, EG_DTYPE_I64, 2, (const int64_t[]){r->shares_positions ? 1 : r->batch, r->sequence});
  ops_tensor *out = ops_add_output(&c, dtype, x->rank, x->dims);
  ops_fill_uniform(x, -1, 1, 1);
  ops_fill_uniform(cosine, -1, 1, 2);
  ops_fill_uniform(sine, -1, 1, 3);
  if (positions) ops_fill_uniform(positions, 0, (double)(cached - 1), 4);
  if (r->is_interleaved) ops_add_attribute(&c, egi_attribute_int("interleaved", 1));
  if (r->rotary) ops_add_attribute(&c, egi_attribute_int("rotary_embedding_dim", r->rotary));
  if (r->is_flat) ops_add_attribute(&c, egi_attribute_int("num_heads", r->heads));
  memcpy(out->values, x->values, sizeof(double) * (size_t)ops_count(x));
  for (int64_t index = 0; index < r->batch * r->heads * r->sequence; index++) {
    int64_t b = index / (r->heads * r->sequence), h = index / r->sequence % r->heads, s = index % r->sequence;
    int64_t at = r->is_flat ? ((b * r->sequence + s) * r->heads + h) * r->width : index * r->width;
    int64_t line = b * r->sequence + s;
    if (positions) line = (int64_t)positions->values[(r->shares_positions ? 0 : b) * r->sequence + s];
    for (int64_t i = 0; i < half; i++) {
      int64_t first = at + (r->is_interleaved ? 2 * i : i), second = at + (r->is_interleaved ? 2 * i + 1 : i + half);
      double cos_i = cosine->values[line * half + i], sin_i = sine->values[line * half + i];
      out->values[first] = cos_i * x->values[first] - sin_i * x->values[second];
      out->values[second] = sin_i * x->values[first] + cos_i * x->values[second];
    }
  }
  c.absolute = dtype == EG_DTYPE_F32 ? 3e-7 : 1e-15;
  ops_check(&c);
  if (positions && ops_count(positions) > 0) {
    positions->values[0] = (double)cached;
    c.expected_status = EG_ERROR_DATA;
    for (int64_t i = 0; i < ops_count(out); i++) out->values[i] = 0;
    ops_check(&c);
  }
  ops_end(&c);
}

void ops_case_rotary(void **state, egi_op op) {
  (void)op;
  for (size_t i = 0; i < EGI_COUNT(rotaries); i++)
    for (size_t t = 0; t < EGI_COUNT(real_types); t++) check_rotary(state, &rotaries[i], real_types[t]);
}
