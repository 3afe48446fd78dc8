/* Conformance cases of MatMul, Gemm and AddMatMul against naive sums in double. */
#include "support_ops.h"

#include <math.h>

typedef struct shape {
  int rank;
  int64_t dims[4];
} shape;

/* Sizes around register blocks (4 to 48), tiles (384, 1024) and blocks of k (256); empty ones; vectors; batches that
 * fold into the rows and such that do not. */
static const struct {
  shape a, b;
} pairs[] = {
    {{2, {1, 1}}, {2, {1, 1}}},
    {{2, {0, 3}}, {2, {3, 5}}},
    {{2, {3, 0}}, {2, {0, 5}}},
    {{2, {3, 4}}, {2, {4, 0}}},
    {{2, {7, 5}}, {2, {5, 3}}},
    {{2, {8, 48}}, {2, {48, 49}}},
    {{2, {33, 257}}, {2, {257, 47}}},
    {{2, {255, 16}}, {2, {16, 385}}},
    {{2, {257, 3}}, {2, {3, 513}}},
    {{2, {1025, 19}}, {2, {19, 4}}},
    {{2, {1, 300}}, {2, {300, 65}}},
    {{1, {9}}, {1, {9}}},
    {{1, {9}}, {2, {9, 6}}},
    {{2, {6, 9}}, {1, {9}}},
    {{1, {9}}, {3, {2, 9, 6}}},
    {{4, {2, 3, 5, 4}}, {1, {4}}},
    {{4, {2, 3, 5, 4}}, {2, {4, 6}}},
    {{3, {2, 67, 33}}, {2, {33, 31}}},
    {{3, {5, 1, 8}}, {2, {8, 17}}},
    {{4, {2, 3, 5, 4}}, {4, {2, 3, 4, 6}}},
    {{4, {2, 1, 5, 4}}, {4, {1, 3, 4, 6}}},
    {{3, {3, 5, 4}}, {4, {2, 1, 4, 6}}},
    {{2, {5, 4}}, {3, {3, 4, 6}}},
    {{3, {0, 5, 4}}, {2, {4, 6}}},
};

typedef struct types {
  eg_dtype a, b, out;
} types;

static const types all_types[] = {
    {EG_DTYPE_F32, EG_DTYPE_F32, EG_DTYPE_F32}, {EG_DTYPE_F64, EG_DTYPE_F64, EG_DTYPE_F64},
    {EG_DTYPE_F32, EG_DTYPE_F16, EG_DTYPE_F32}, {EG_DTYPE_F32, EG_DTYPE_BF16, EG_DTYPE_F32},
    {EG_DTYPE_F16, EG_DTYPE_F32, EG_DTYPE_F32}, {EG_DTYPE_I32, EG_DTYPE_I32, EG_DTYPE_I32},
    {EG_DTYPE_I64, EG_DTYPE_I64, EG_DTYPE_I64}, {EG_DTYPE_U32, EG_DTYPE_U32, EG_DTYPE_U32},
    {EG_DTYPE_U64, EG_DTYPE_U64, EG_DTYPE_U64}};

static double lowest(eg_dtype dtype) {
  return egi_dtype_kind(dtype) == EGI_CLASS_UNSIGNED ? 0.0 : -3.0;
}

/* The result's shape, and how its dims fall apart into batch, m and n. */
typedef struct product_dims {
  shape out;
  int batch_rank;
  int64_t m, n, k;
} product_dims;

static product_dims dims_of(const shape *a, const shape *b) {
  product_dims p = {.m = a->rank > 1 ? a->dims[a->rank - 2] : 1, .n = b->rank > 1 ? b->dims[b->rank - 1] : 1};
  p.k = a->dims[a->rank - 1];
  int batch_a = a->rank > 2 ? a->rank - 2 : 0, batch_b = b->rank > 2 ? b->rank - 2 : 0;
  p.batch_rank = batch_a > batch_b ? batch_a : batch_b;
  for (int i = 0; i < p.batch_rank; i++) {
    int64_t from_a = i - p.batch_rank + batch_a >= 0 ? a->dims[i - p.batch_rank + batch_a] : 1;
    int64_t from_b = i - p.batch_rank + batch_b >= 0 ? b->dims[i - p.batch_rank + batch_b] : 1;
    p.out.dims[p.out.rank++] = from_a == 1 ? from_b : from_a;
  }
  if (a->rank > 1) p.out.dims[p.out.rank++] = p.m;
  if (b->rank > 1) p.out.dims[p.out.rank++] = p.n;
  return p;
}

/* Index of the first element of a factor's matrix for batch entry `batch` of the result. */
static int64_t batch_start(const ops_tensor *factor, const product_dims *p, int64_t batch) {
  ops_tensor outer = {.rank = factor->rank > 2 ? factor->rank - 2 : 0};
  for (int i = 0; i < outer.rank; i++) outer.dims[i] = factor->dims[i];
  int64_t size = 1;
  for (int i = outer.rank; i < factor->rank; i++) size *= factor->dims[i];
  return ops_broadcast_index(&outer, p->batch_rank, p->out.dims, batch) * size;
}

static void multiply(const ops_tensor *a, const ops_tensor *b, const product_dims *p, double *out) {
  int64_t n_batches = 1;
  for (int i = 0; i < p->batch_rank; i++) n_batches *= p->out.dims[i];
  for (int64_t batch = 0; batch < n_batches; batch++) {
    const double *x = a->values + batch_start(a, p, batch), *y = b->values + batch_start(b, p, batch);
    for (int64_t i = 0; i < p->m; i++)
      for (int64_t j = 0; j < p->n; j++) {
        double sum = 0;
        for (int64_t k = 0; k < p->k; k++) sum += x[i * p->k + k] * y[k * p->n + j];
        out[(batch * p->m + i) * p->n + j] = sum;
      }
  }
}

static void allow_rounding(ops_case *c, const product_dims *p, eg_dtype out) {
  if (out == EG_DTYPE_F32) c->absolute = 9.0 * 6e-8 * (double)(p->k + 4);
  if (out == EG_DTYPE_F64) c->absolute = 9.0 * 1.2e-16 * (double)(p->k + 4);
}

static void check_matmul(void **state, size_t pair, types t) {
  ops_case c;
  product_dims p = dims_of(&pairs[pair].a, &pairs[pair].b);
  ops_begin(&c, state, EGI_OP_MatMul, t.out);
  ops_tensor *a = ops_add_input(&c, t.a, pairs[pair].a.rank, pairs[pair].a.dims);
  ops_tensor *b = ops_add_input(&c, t.b, pairs[pair].b.rank, pairs[pair].b.dims);
  ops_tensor *out = ops_add_output(&c, t.out, p.out.rank, p.out.dims);
  ops_fill_uniform(a, lowest(t.a), 3.0, 5 + pair);
  ops_fill_uniform(b, lowest(t.b), 3.0, 105 + pair);
  multiply(a, b, &p, out->values);
  allow_rounding(&c, &p, t.out);
  ops_check(&c);
  ops_end(&c);
}

void ops_case_matmul(void **state, egi_op op) {
  (void)op;
  for (size_t pair = 0; pair < EGI_COUNT(pairs); pair++)
    for (size_t t = 0; t < EGI_COUNT(all_types); t++) check_matmul(state, pair, all_types[t]);
  ops_case c; /* NaN and infinity must come through */
  ops_begin(&c, state, EGI_OP_MatMul, EG_DTYPE_F32);
  ops_tensor *a = ops_add_input(&c, EG_DTYPE_F32, 2, (const int64_t[]){2, 2});
  ops_tensor *b = ops_add_input(&c, EG_DTYPE_F32, 2, (const int64_t[]){2, 1});
  ops_tensor *out = ops_add_output(&c, EG_DTYPE_F32, 2, (const int64_t[]){2, 1});
  const double values[4] = {1, (double)NAN, 1, (double)INFINITY};
  memcpy(a->values, values, sizeof values);
  b->values[0] = b->values[1] = 1;
  out->values[0] = (double)NAN;
  out->values[1] = (double)INFINITY;
  ops_check(&c);
  out->dims[0] = 3; /* rows do not fit */
  ops_check_refused(&c, EG_ERROR_SHAPE);
  ops_end(&c);
}

/* ---- Gemm, AddMatMul: out = beta · addend + alpha · A · B ----------------------------------------------------------
 */

static void add_term(ops_tensor *out, const ops_tensor *addend, double alpha, double beta) {
  for (int64_t i = 0; i < ops_count(out); i++) {
    double term = addend ? addend->values[ops_broadcast_index(addend, out->rank, out->dims, i)] : 0;
    out->values[i] = alpha * out->values[i] + beta * term;
  }
}

/* Row-major copy of a matrix, transposed. */
static void transpose(const double *in, int64_t rows, int64_t columns, double *out) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) out[j * rows + i] = in[i * columns + j];
}

typedef struct gemm_case {
  int64_t m, n, k;
  int addend_rank; /* -1: none */
  int64_t addend[2];
  bool transpose_a, transpose_b;
  double alpha, beta;
} gemm_case;

static const gemm_case gemms[] = {
    {5, 7, 3, -1, {0}, false, false, 1, 1},    {5, 7, 3, 1, {7}, false, true, 1, 1},
    {5, 7, 3, 2, {5, 1}, true, false, 0.5, 2}, {5, 7, 3, 2, {1, 7}, true, true, 1, 0},
    {17, 513, 9, 1, {513}, false, true, 1, 1}, {257, 33, 260, 2, {257, 33}, false, false, 2, -1},
    {5, 7, 0, 0, {0}, false, false, 1, 1},     {0, 7, 3, 1, {7}, false, false, 1, 1},
};

static void check_gemm(void **state, const gemm_case *g, eg_dtype dtype, eg_dtype weight) {
  ops_case c;
  ops_begin(&c, state, EGI_OP_Gemm, dtype);
  const int64_t size_a[2] = {g->transpose_a ? g->k : g->m, g->transpose_a ? g->m : g->k};
  const int64_t size_b[2] = {g->transpose_b ? g->n : g->k, g->transpose_b ? g->k : g->n};
  ops_tensor *a = ops_add_input(&c, dtype, 2, size_a), *b = ops_add_input(&c, weight, 2, size_b), *addend = NULL;
  if (g->addend_rank >= 0) addend = ops_add_input(&c, weight, g->addend_rank, g->addend);
  ops_tensor *out = ops_add_output(&c, dtype, 2, (const int64_t[]){g->m, g->n});
  ops_fill_uniform(a, -3, 3, 1);
  ops_fill_uniform(b, -3, 3, 2);
  if (addend) ops_fill_uniform(addend, -3, 3, 3);
  if (g->transpose_a) ops_add_attribute(&c, egi_attribute_int("transA", 1));
  if (g->transpose_b) ops_add_attribute(&c, egi_attribute_int("transB", 1));
  ops_add_attribute(&c, egi_attribute_float("alpha", (float)g->alpha));
  ops_add_attribute(&c, egi_attribute_float("beta", (float)g->beta));
  ops_tensor plain_a = {.rank = 2, .dims = {g->m, g->k}}, plain_b = {.rank = 2, .dims = {g->k, g->n}};
  plain_a.values = EGI_NEW(&c.arena, double, (size_t)(g->m * g->k) + 1);
  plain_b.values = EGI_NEW(&c.arena, double, (size_t)(g->k * g->n) + 1);
  memcpy(plain_a.values, a->values, (size_t)(g->m * g->k) * sizeof(double));
  memcpy(plain_b.values, b->values, (size_t)(g->k * g->n) * sizeof(double));
  if (g->transpose_a) transpose(a->values, g->k, g->m, plain_a.values);
  if (g->transpose_b) transpose(b->values, g->n, g->k, plain_b.values);
  product_dims p = {.out = {2, {g->m, g->n}}, .m = g->m, .n = g->n, .k = g->k};
  multiply(&plain_a, &plain_b, &p, out->values);
  add_term(out, addend, g->alpha, g->beta);
  allow_rounding(&c, &p, dtype);
  ops_check(&c);
  ops_end(&c);
}

void ops_case_gemm(void **state, egi_op op) {
  (void)op;
  for (size_t i = 0; i < EGI_COUNT(gemms); i++) {
    check_gemm(state, &gemms[i], EG_DTYPE_F32, EG_DTYPE_F32);
    check_gemm(state, &gemms[i], EG_DTYPE_F32, EG_DTYPE_BF16);
    check_gemm(state, &gemms[i], EG_DTYPE_F64, EG_DTYPE_F64);
  }
}

static void check_add_matmul(void **state, size_t pair, const shape *addend_shape, types t) {
  ops_case c;
  product_dims p = dims_of(&pairs[pair].a, &pairs[pair].b);
  ops_begin(&c, state, EGI_OP_AddMatMul, t.out);
  const shape *own = addend_shape ? addend_shape : &p.out;
  ops_tensor *addend = ops_add_input(&c, t.out, own->rank, own->dims);
  ops_tensor *a = ops_add_input(&c, t.a, pairs[pair].a.rank, pairs[pair].a.dims);
  ops_tensor *b = ops_add_input(&c, t.b, pairs[pair].b.rank, pairs[pair].b.dims);
  ops_tensor *out = ops_add_output(&c, t.out, p.out.rank, p.out.dims);
  bool is_float = egi_dtype_is_float(t.out);
  ops_fill_uniform(addend, lowest(t.out), 3, 7);
  ops_fill_uniform(a, lowest(t.a), 3, 8);
  ops_fill_uniform(b, lowest(t.b), 3, 9);
  if (is_float) ops_add_attribute(&c, egi_attribute_float("alpha", -0.5f));
  multiply(a, b, &p, out->values);
  add_term(out, addend, is_float ? -0.5 : 1.0, 1.0);
  allow_rounding(&c, &p, t.out);
  ops_check(&c);
  ops_end(&c);
}

void ops_case_add_matmul(void **state, egi_op op) {
  (void)op;
  static const shape scalar = {0, {0}}, column = {2, {5, 1}}, row = {1, {6}}, inner = {3, {3, 1, 6}};
  for (size_t pair = 0; pair < EGI_COUNT(pairs); pair++)
    for (size_t t = 0; t < 6; t++) {
      check_add_matmul(state, pair, NULL, all_types[t]);
      check_add_matmul(state, pair, &scalar, all_types[t]);
    }
  for (size_t pair = 16; pair < EGI_COUNT(pairs); pair++) { /* results [.., 5, 6] */
    product_dims p = dims_of(&pairs[pair].a, &pairs[pair].b);
    if (p.m != 5 || p.n != 6) continue;
    check_add_matmul(state, pair, &row, all_types[0]);
    check_add_matmul(state, pair, &column, all_types[1]);
    if (p.out.rank >= 3 && p.out.dims[p.out.rank - 3] == 3) check_add_matmul(state, pair, &inner, all_types[0]);
  }
}
