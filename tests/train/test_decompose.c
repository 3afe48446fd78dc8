/* Factors of matrices: known singular values, the best approximation, orthogonal columns, whatever the shape, the rank
 * of the matrix and the number of threads. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "train/train.h"

typedef struct problem {
  eg_context *ctx;
  egi_arena arena;
  egi_factors factors;
  float *matrix;
} problem;

static problem make(int n_threads, int64_t rows, int64_t columns, uint32_t rank) {
  problem p = {.factors = {.rows = rows, .columns = columns, .rank = rank, .scale = 2.0}};
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  options.n_threads = n_threads;
  assert_int_equal(eg_context_create(&options, &p.ctx), EG_OK);
  egi_arena_init(&p.arena, p.ctx, EGI_PURPOSE_DATA);
  p.matrix = EGI_NEW(&p.arena, float, (size_t)(rows * columns));
  p.factors.matrix = p.matrix;
  p.factors.a = EGI_NEW(&p.arena, float, (size_t)(columns * rank));
  p.factors.b = EGI_NEW(&p.arena, float, (size_t)(rows * rank));
  assert_true(p.matrix != NULL && p.factors.a != NULL && p.factors.b != NULL);
  return p;
}

static void drop(problem *p) {
  egi_arena_clear(&p->arena);
  eg_context_destroy(p->ctx);
}

/* Sum of products of cosines: columns of such a matrix are orthogonal, so that its singular values are those given. */
static double cosine(int64_t n, int64_t row, int64_t k) {
  static const double pi = 3.14159265358979323846;
  return sqrt((k == 0 ? 1.0 : 2.0) / (double)n) * cos(pi * ((double)row + 0.5) * (double)k / (double)n);
}

static void fill_known(problem *p, const double *values, int n) {
  for (int64_t i = 0; i < p->factors.rows; i++)
    for (int64_t j = 0; j < p->factors.columns; j++) {
      double sum = 0.0;
      for (int k = 0; k < n; k++) sum += values[k] * cosine(p->factors.rows, i, k) * cosine(p->factors.columns, j, k);
      p->matrix[i * p->factors.columns + j] = (float)sum;
    }
}

static void fill_random(problem *p, uint64_t seed) {
  for (int64_t i = 0; i < p->factors.rows * p->factors.columns; i++)
    p->matrix[i] = (float)egi_random_normal(seed, 1, (uint64_t)i);
}

static double dot(const float *x, int64_t x_stride, const float *y, int64_t y_stride, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i * x_stride] * (double)y[i * y_stride];
  return sum;
}

/* B's columns and A's rows are orthogonal, of squared length sigma / scale. */
static void expect_values(const problem *p, const double *values) {
  const egi_factors *f = &p->factors;
  for (uint32_t i = 0; i < f->rank; i++)
    for (uint32_t j = 0; j < f->rank; j++) {
      double wanted = i == j ? values[i] / f->scale : 0.0, tolerance = 1e-5 * values[0];
      double left = dot(f->b + i, f->rank, f->b + j, f->rank, f->rows),
             right = dot(f->a + i * (uint32_t)f->columns, 1, f->a + j * (uint32_t)f->columns, 1, f->columns);
      if (!(fabs(left - wanted) <= tolerance && fabs(right - wanted) <= tolerance))
        fail_msg("[%u, %u]: %g and %g, not %g", i, j, left, right, wanted);
    }
}

static double product_at(const egi_factors *f, int64_t row, int64_t column) {
  return dot(f->b + row * f->rank, 1, f->a + column, f->columns, f->rank);
}

/* scale · B · A is the sum of the first terms of the matrix. */
static void known_values(int64_t rows, int64_t columns) {
  static const double values[6] = {9.0, 7.0, 4.0, 3.5, 1.0, 0.25};
  problem p = make(1, rows, columns, 3), first = make(1, rows, columns, 3);
  fill_known(&p, values, 6);
  fill_known(&first, values, 3);
  assert_int_equal(egi_principal_factors(p.ctx, &p.factors, 5), EG_OK);
  expect_values(&p, values);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) {
      double error = p.factors.scale * product_at(&p.factors, i, j) - (double)first.matrix[i * columns + j];
      if (!(fabs(error) <= 1e-5)) fail_msg("[%d, %d] is off by %g", (int)i, (int)j, error);
    }
  drop(&first);
  drop(&p);
}

static void test_known(void **state) {
  (void)state;
  known_values(12, 30);
  known_values(30, 12);
  known_values(150, 210); /* more than there are directions */
}

/* The residual of random matrices is orthogonal to the factors: U'(W - s·B·A) = 0 and (W - s·B·A) V' = 0. */
static void expect_split(const problem *p, double scale) {
  const egi_factors *f = &p->factors;
  for (uint32_t k = 0; k < f->rank; k++)
    for (int64_t j = 0; j < f->columns; j++) {
      double sum = 0.0;
      for (int64_t i = 0; i < f->rows; i++)
        sum += (double)f->b[i * f->rank + k] * ((double)p->matrix[i * f->columns + j] - scale * product_at(f, i, j));
      if (!(fabs(sum) <= 2e-3)) fail_msg("the residual is not orthogonal to column %u: %g", k, sum);
    }
}

static void test_random(void **state) {
  static const int64_t sizes[][2] = {{1, 1}, {1, 40}, {40, 1}, {64, 64}, {97, 130}, {200, 120}};
  (void)state;
  for (size_t i = 0; i < EGI_COUNT(sizes); i++) {
    int64_t least = sizes[i][0] < sizes[i][1] ? sizes[i][0] : sizes[i][1];
    problem p = make(1, sizes[i][0], sizes[i][1], least < 5 ? (uint32_t)least : 5);
    fill_random(&p, i);
    assert_int_equal(egi_principal_factors(p.ctx, &p.factors, 5), EG_OK);
    expect_split(&p, p.factors.scale);
    assert_int_equal(egi_orthogonal_factors(p.ctx, &p.factors), EG_OK);
    expect_split(&p, 1.0);
    drop(&p);
  }
}

/* Q's columns are orthonormal, and the first columns of W are Q · R's. */
static void expect_orthogonal(const problem *p) {
  const egi_factors *f = &p->factors;
  for (uint32_t i = 0; i < f->rank; i++)
    for (uint32_t j = 0; j < f->rank; j++) {
      double product = dot(f->b + i, f->rank, f->b + j, f->rank, f->rows);
      if (!(fabs(product - (i == j)) <= 1e-5)) fail_msg("columns %u and %u: %g", i, j, product);
    }
  for (int64_t row = 0; row < f->rows; row++)
    for (uint32_t column = 0; column < f->rank; column++) {
      double error = product_at(f, row, column) - (double)p->matrix[row * f->columns + column];
      if (!(fabs(error) <= 1e-5)) fail_msg("[%d, %u] is off by %g", (int)row, column, error);
    }
}

/* Zeros, equal columns and one direction alone: every number is finite, Q is orthogonal all the same. */
static void test_dependent(void **state) {
  static const double one = 3.0;
  (void)state;
  for (int kind = 0; kind < 3; kind++) {
    problem p = make(1, 20, 33, 4);
    if (kind == 1) fill_known(&p, &one, 1);
    for (int64_t i = 0; kind == 2 && i < 20; i++)
      for (int64_t j = 0; j < 33; j++) p.matrix[i * 33 + j] = (float)(i % 7) - (float)(j / 2 * 2);
    assert_int_equal(egi_principal_factors(p.ctx, &p.factors, 5), EG_OK);
    for (int64_t i = 0; i < 4 * 33; i++) assert_true(isfinite(p.factors.a[i]));
    for (int64_t i = 0; i < 4 * 20; i++) assert_true(isfinite(p.factors.b[i]));
    assert_int_equal(egi_orthogonal_factors(p.ctx, &p.factors), EG_OK);
    expect_orthogonal(&p);
    drop(&p);
  }
}

static void test_threads(void **state) {
  (void)state;
  problem one = make(1, 140, 110, 6), three = make(3, 140, 110, 6);
  fill_random(&one, 2);
  fill_random(&three, 2);
  assert_int_equal(egi_principal_factors(one.ctx, &one.factors, 5), EG_OK);
  assert_int_equal(egi_principal_factors(three.ctx, &three.factors, 5), EG_OK);
  assert_memory_equal(one.factors.a, three.factors.a, 6 * 110 * sizeof(float));
  assert_memory_equal(one.factors.b, three.factors.b, 6 * 140 * sizeof(float));
  drop(&three);
  drop(&one);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_known), cmocka_unit_test(test_random),
                                     cmocka_unit_test(test_dependent), cmocka_unit_test(test_threads)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
