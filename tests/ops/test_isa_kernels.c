/* Matrix product, row functions and optimizer loops of every instruction set that this processor has, against plain
 * sums in double, at sizes around all register blocks and vector widths. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "backend/cpu/isa/isa.h"
#include "base/base.h"

#define LENGTH 203

static void assert_close(double got, double expected, double tolerance, const char *what, int64_t at) {
  if (isnan(expected) ? isnan(got) : fabs(got - expected) <= tolerance * (1 + fabs(expected))) return;
  fail_msg("%s at %lld: %.9g, not %.9g", what, (long long)at, got, expected);
}

/* ---- matrix product
 * -------------------------------------------------------------------------------------------------- */

enum { ROOM = 300 * 60 };

typedef struct matrices {
  float f32[3][ROOM];
  double f64[3][ROOM];
  uint32_t u32[3][ROOM];
  uint64_t u64[3][ROOM];
} matrices;

static void fill_matrices(matrices *x) {
  for (int i = 0; i < 3; i++)
    for (size_t k = 0; k < ROOM; k++) {
      double value = floor(egi_random_uniform(7, (uint64_t)i, k) * 17) - 8;
      x->f32[i][k] = (float)value;
      x->f64[i][k] = value;
      x->u32[i][k] = (uint32_t)(int64_t)value;
      x->u64[i][k] = (uint64_t)(int64_t)value;
    }
}

/* Whole numbers: every type must give the exact sum. */
static double expected_at(const egi_gemm *g, const matrices *x, int64_t i, int64_t j) {
  double sum = 0;
  for (int64_t p = 0; p < g->k; p++)
    sum += x->f64[0][i * g->a_row + p * g->a_column] * x->f64[1][p * g->b_row + j * g->b_column];
  double before = x->f64[2][i * g->c_row + j * g->c_column];
  return g->alpha * sum + (g->beta == 0 ? 0 : g->beta * before);
}

static void check_types(const egi_isa *isa, egi_gemm g, const matrices *start, void *scratch) {
  matrices *x = malloc(sizeof *x);
  assert_non_null(x);
  *x = *start;
  void *const operands[4][3] = {{x->f32[0], x->f32[1], x->f32[2]},
                                {x->f64[0], x->f64[1], x->f64[2]},
                                {x->u32[0], x->u32[1], x->u32[2]},
                                {x->u64[0], x->u64[1], x->u64[2]}};
  const egi_gemm_function functions[4] = {isa->gemm->f32, isa->gemm->f64, isa->gemm->u32, isa->gemm->u64};
  for (int t = 0; t < 4; t++) {
    g.a = operands[t][0];
    g.b = operands[t][1];
    g.c = operands[t][2];
    functions[t](&g, scratch);
  }
  for (int64_t i = 0; i < g.m; i++)
    for (int64_t j = 0; j < g.n; j++) {
      int64_t at = i * g.c_row + j * g.c_column;
      double expected = expected_at(&g, start, i, j);
      if ((double)x->f32[2][at] != expected || x->f64[2][at] != expected ||
          x->u32[2][at] != (uint32_t)(int64_t)expected || x->u64[2][at] != (uint64_t)(int64_t)expected)
        fail_msg("%s: %lld x %lld x %lld at (%lld, %lld)", isa->name, (long long)g.m, (long long)g.n, (long long)g.k,
                 (long long)i, (long long)j);
    }
  for (int64_t k = (g.m - 1) * g.c_row + (g.n - 1) * g.c_column + 1; k < ROOM; k++) /* nothing behind C */
    if (x->f32[2][k] != start->f32[2][k] || x->u64[2][k] != start->u64[2][k]) fail_msg("%s wrote past C", isa->name);
  free(x);
}

/* Every combination of transposed operands, with and without what stood in C. */
static void test_gemm(void **state) {
  (void)state;
  static const int64_t sizes[][3] = {{1, 1, 1},   {4, 8, 3},    {5, 9, 4},   {6, 16, 7},   {7, 17, 9},   {8, 48, 16},
                                     {9, 49, 17}, {33, 31, 57}, {40, 97, 5}, {3, 100, 40}, {50, 3, 257}, {17, 33, 0}};
  matrices *start = malloc(sizeof *start);
  void *scratch = malloc(EGI_GEMM_SCRATCH_BYTES);
  assert_true(start && scratch);
  fill_matrices(start);
  const egi_isa *isa;
  for (size_t k = 0; (isa = egi_cpu_isa_at(k)) != NULL; k++)
    for (size_t s = 0; s < EGI_COUNT(sizes); s++)
      for (unsigned form = 0; form < 16; form++) {
        int64_t m = sizes[s][0], n = sizes[s][1], depth = sizes[s][2];
        egi_gemm g = {.m = m, .n = n, .k = depth, .alpha = 1, .beta = form & 8 ? 1 : 0};
        g.a_row = form & 1 ? 1 : depth + 1;
        g.a_column = form & 1 ? m + 1 : 1;
        g.b_row = form & 2 ? 1 : n + 2;
        g.b_column = form & 2 ? depth + 2 : 1;
        g.c_row = form & 4 ? 1 : n + 3;
        g.c_column = form & 4 ? m + 3 : 1;
        check_types(isa, g, start, scratch);
      }
  free(scratch);
  free(start);
}

/* ---- rows
 * ---------------------------------------------------------------------------------------------------------------- */

/* A row in both types, with equal values. */
typedef struct row {
  float f32[LENGTH + 1];
  double f64[LENGTH + 1];
} row;

static void fill_row(row *x, double low, double high, uint64_t seed) {
  for (size_t i = 0; i <= LENGTH; i++) {
    x->f32[i] = (float)(low + (high - low) * egi_random_uniform(seed, 1, i));
    x->f64[i] = (double)x->f32[i];
  }
}

static void check_row(const row *got, const double *expected, int64_t n, const char *what) {
  for (int64_t i = 0; i < n; i++) {
    assert_close((double)got->f32[i], expected[i], 2e-6, what, i);
    assert_close(got->f64[i], expected[i], 1e-13, what, i);
  }
}

static void check_softmax(const egi_isa_rows *rows, const row *x, int64_t n) {
  double expected[2][LENGTH + 1], largest = -HUGE_VAL, sum = 0;
  row out;
  for (int64_t i = 0; i < n; i++) largest = x->f64[i] > largest ? x->f64[i] : largest;
  for (int64_t i = 0; i < n; i++) sum += exp(x->f64[i] - largest);
  for (int64_t i = 0; i < n; i++) {
    expected[0][i] = exp(x->f64[i] - largest) / sum;
    expected[1][i] = x->f64[i] - largest - log(sum);
  }
  rows->f32->softmax(out.f32, x->f32, n);
  rows->f64->softmax(out.f64, x->f64, n);
  check_row(&out, expected[0], n, "softmax");
  rows->f32->log_softmax(out.f32, x->f32, n);
  rows->f64->log_softmax(out.f64, x->f64, n);
  check_row(&out, expected[1], n, "log softmax");
}

static void check_norms(const egi_isa_rows *rows, const row *x, const row *scale, int64_t n) {
  double expected[2][LENGTH + 1], mean = 0, squares = 0, centred = 0, statistics[2] = {0, 1e-3};
  row out;
  for (int64_t i = 0; i < n; i++) mean += x->f64[i] / (double)n;
  for (int64_t i = 0; i < n; i++) {
    squares += x->f64[i] * x->f64[i] / (double)n;
    centred += (x->f64[i] - mean) * (x->f64[i] - mean) / (double)n;
  }
  for (int64_t i = 0; i < n; i++) {
    expected[0][i] = x->f64[i] / sqrt(squares + 1e-3) * scale->f64[i];
    expected[1][i] = (x->f64[i] - mean) / sqrt(centred + 1e-3) * scale->f64[i] + scale->f64[i];
  }
  rows->f32->rms_norm(out.f32, x->f32, scale->f32, n, 1e-3);
  rows->f64->rms_norm(out.f64, x->f64, scale->f64, n, 1e-3);
  check_row(&out, expected[0], n, "rms norm");
  rows->f32->layer_norm(out.f32, x->f32, scale->f32, scale->f32, n, statistics);
  statistics[1] = 1e-3;
  rows->f64->layer_norm(out.f64, x->f64, scale->f64, scale->f64, n, statistics);
  check_row(&out, expected[1], n, "layer norm");
  assert_close(statistics[0], mean, 1e-13, "mean", 0);
  assert_close(statistics[1], 1 / sqrt(centred + 1e-3), 1e-13, "deviation", 0);
}

/* Two tiles of a row of scores with a bias, some keys hidden and some out of sight, against the whole row. */
static void check_attention(const egi_isa_rows *rows, const row *x, row *bias, int64_t n) {
  double expected[LENGTH + 1] = {0}, largest = -HUGE_VAL, sum = 0, statistics[2][2] = {{-HUGE_VAL, 0}, {-HUGE_VAL, 0}};
  int64_t cut = n / 3, first = n > 4 ? 2 : 0, last = n > 4 ? n - 1 : n;
  for (int64_t i = 1; i < n; i += 5) bias->f32[i] = -INFINITY, bias->f64[i] = -HUGE_VAL;
  row out = *x;
  for (int64_t i = first; i < last; i++) {
    double score = 2 * tanh(x->f64[i] / 2) + bias->f64[i];
    largest = score > largest ? score : largest;
  }
  for (int64_t i = first; i < last; i++) {
    double p = largest > -HUGE_VAL ? exp(2 * tanh(x->f64[i] / 2) + bias->f64[i] - largest) : 0;
    expected[i] = p;
    sum += p;
  }
  for (int t = 0; t < 2; t++) {
    const egi_row_functions *f = t == 0 ? rows->f32 : rows->f64;
    size_t bytes = t == 0 ? 4 : 8;
    char *scores = t == 0 ? (char *)out.f32 : (char *)out.f64, *added = t == 0 ? (char *)bias->f32 : (char *)bias->f64;
    for (int64_t start = 0; start < n; start = start == 0 && cut > 0 ? cut : n) {
      int64_t end = start == 0 && cut > 0 ? cut : n, low = first > start ? first : start,
              high = last < end ? last : end;
      if (low > high) low = high;
      egi_score_row part = {scores + (size_t)start * bytes, end - start, low - start, high - start, 2.0,
                            added + (size_t)start * bytes};
      double shrink = f->attention(&part, &statistics[t][0], &statistics[t][1]);
      f->scale(scores, shrink, start); /* what stood under the old largest */
    }
    assert_close(statistics[t][1], sum, t == 0 ? 3e-6 : 1e-12, "sum of exponentials", n);
  }
  check_row(&out, expected, n, "attention");
}

static void check_rotation(const egi_isa_rows *rows, const row *x, const row *angle, int64_t n) {
  double expected[2][LENGTH + 1];
  row out;
  int64_t half = n / 2;
  for (int64_t i = 0; i < half; i++) {
    double c = angle->f64[i], s = angle->f64[i + 1];
    expected[0][i] = c * x->f64[i] - s * x->f64[i + half];
    expected[0][i + half] = s * x->f64[i] + c * x->f64[i + half];
    expected[1][2 * i] = c * x->f64[2 * i] - s * x->f64[2 * i + 1];
    expected[1][2 * i + 1] = s * x->f64[2 * i] + c * x->f64[2 * i + 1];
  }
  rows->f32->rotate_halves(out.f32, x->f32, angle->f32, angle->f32 + 1, half);
  rows->f64->rotate_halves(out.f64, x->f64, angle->f64, angle->f64 + 1, half);
  check_row(&out, expected[0], 2 * half, "halves");
  rows->f32->rotate_pairs(out.f32, x->f32, angle->f32, angle->f32 + 1, half);
  rows->f64->rotate_pairs(out.f64, x->f64, angle->f64, angle->f64 + 1, half);
  check_row(&out, expected[1], 2 * half, "pairs");
}

static void test_rows(void **state) {
  (void)state;
  const egi_isa *isa;
  row x, scale, bias;
  fill_row(&x, -6, 6, 1);
  fill_row(&scale, 0.5, 2, 2);
  for (size_t k = 0; (isa = egi_cpu_isa_at(k)) != NULL; k++)
    for (int64_t n = 0; n <= LENGTH; n++) {
      fill_row(&bias, -1, 1, 3);
      check_softmax(isa->rows, &x, n);
      if (n > 0) check_norms(isa->rows, &x, &scale, n);
      check_attention(isa->rows, &x, &bias, n);
      check_rotation(isa->rows, &x, &scale, n);
    }
}

/* ---- optimizer
 * ------------------------------------------------------------------------------------------------------------ */

static void test_train(void **state) {
  (void)state;
  const egi_isa *isa;
  for (size_t k = 0; (isa = egi_cpu_isa_at(k)) != NULL; k++)
    for (int64_t n = 0; n <= LENGTH; n++) {
      row p, g, m, v;
      fill_row(&p, -1, 1, 1);
      fill_row(&g, -1, 1, 2);
      fill_row(&m, -1, 1, 3);
      fill_row(&v, 0, 1, 4);
      egi_adamw chunk = {p.f32, m.f32, v.f32, g.f32, n, 0.5f, 0.99f, 0.01f, 0.99f, 0.1f, 0.01f, 1e-8f, 0.19f, 0.0199f};
      isa->train->adamw(&chunk);
      double squares = 0;
      for (int64_t i = 0; i < n; i++) {
        double gradient = 0.5 * g.f64[i], first = 0.9 * m.f64[i] + 0.1 * gradient;
        double second = 0.99 * v.f64[i] + 0.01 * gradient * gradient;
        double step = 0.01 / 0.19 * first / (sqrt(second) / sqrt(0.0199) + 1e-8);
        assert_close((double)p.f32[i], 0.99 * p.f64[i] - step, 3e-7, "parameter", i);
        assert_close((double)m.f32[i], first, 3e-7, "moment 1", i);
        assert_close((double)v.f32[i], second, 3e-7, "moment 2", i);
        squares += g.f64[i] * g.f64[i];
      }
      assert_true(p.f32[n] == (float)p.f64[n] && m.f32[n] == (float)m.f64[n]); /* nothing behind the chunk */
      assert_close(isa->train->sum_of_squares(g.f32, n), squares, 1e-13, "sum of squares", n);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_gemm), cmocka_unit_test(test_rows),
                                     cmocka_unit_test(test_train)};
  return cmocka_run_group_tests_name("isa kernels", tests, NULL, NULL);
}
