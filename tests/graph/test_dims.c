/* Symbolic dims: normal form, division, bounds, assumptions, evaluation, limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "graph/dims.h"
#include "support_graph.h"

typedef struct parts {
  graph_fixture *f;
  egi_dims *d;
  egi_dim b, s, t, one, two;
} parts;

static parts begin(void **state) {
  parts p = {.f = *state};
  p.d = p.f->module->dims;
  p.b = egi_dim_symbol(p.d, "b");
  p.s = egi_dim_symbol(p.d, "s");
  p.t = egi_dim_symbol(p.d, "t");
  p.one = egi_dim_constant(p.d, 1);
  p.two = egi_dim_constant(p.d, 2);
  return p;
}

static void expect(const parts *p, egi_dim dim, const char *wanted) {
  egi_text text;
  egi_text_init(&text, p->f->ctx);
  egi_dim_print(p->d, dim, &text);
  assert_string_equal(egi_text_string(&text), wanted);
  egi_text_free(&text);
}

static void test_normal_form(void **state) {
  parts p = begin(state);
  assert_int_equal(egi_dim_symbol(p.d, "b"), p.b);
  assert_int_not_equal(egi_dim_fresh(p.d, "x"), egi_dim_fresh(p.d, "x"));
  egi_dim sum = egi_dim_add(p.d, p.b, p.s);
  assert_int_equal(sum, egi_dim_add(p.d, p.s, p.b));
  assert_int_equal(egi_dim_subtract(p.d, sum, p.s), p.b);
  egi_dim square = egi_dim_multiply(p.d, sum, sum);
  expect(&p, square, "b*b + 2*b*s + s*s");
  egi_dim difference = egi_dim_subtract(p.d, p.b, p.s);
  expect(&p, egi_dim_multiply(p.d, sum, difference), "b*b - s*s");
  expect(&p, egi_dim_subtract(p.d, square, square), "0");
  expect(&p, egi_dim_add(p.d, egi_dim_multiply(p.d, p.s, p.b), egi_dim_constant(p.d, -3)), "b*s - 3");
  int64_t number = 0;
  assert_true(egi_dim_value(p.d, egi_dim_subtract(p.d, p.s, p.s), &number));
  assert_int_equal(number, 0);
  assert_false(egi_dim_value(p.d, p.s, &number));
  assert_int_equal(egi_dim_add(p.d, EGI_DIM_NONE, p.s), EGI_DIM_NONE);
}

static void test_division(void **state) {
  parts p = begin(state);
  egi_dim c64 = egi_dim_constant(p.d, 64);
  egi_dim bs64 = egi_dim_multiply(p.d, egi_dim_multiply(p.d, p.b, p.s), c64);
  expect(&p, egi_dim_divide(p.d, bs64, p.s), "64*b");
  expect(&p, egi_dim_divide(p.d, bs64, egi_dim_multiply(p.d, p.b, egi_dim_constant(p.d, 16))), "4*s");
  egi_dim even = egi_dim_add(p.d, egi_dim_multiply(p.d, p.two, p.s), p.two);
  expect(&p, egi_dim_divide(p.d, even, p.two), "s + 1");
  expect(&p, egi_dim_divide(p.d, egi_dim_add(p.d, even, p.one), p.two), "s + 1"); /* floor(1/2) = 0 */
  expect(&p, egi_dim_divide(p.d, egi_dim_add(p.d, p.s, p.one), p.two), "floor(s + 1 / 2)");
  expect(&p, egi_dim_divide(p.d, egi_dim_multiply(p.d, p.two, p.s), egi_dim_constant(p.d, 4)), "floor(s / 2)");
  egi_dim sum = egi_dim_add(p.d, p.b, p.s);
  assert_int_equal(egi_dim_divide(p.d, egi_dim_multiply(p.d, sum, sum), sum), sum);
  egi_dim quotient = egi_dim_divide(p.d, p.s, p.b);
  expect(&p, quotient, "floor(s / b)");
  assert_int_equal(quotient, egi_dim_divide(p.d, p.s, p.b));
  expect(&p, egi_dim_divide(p.d, egi_dim_constant(p.d, -7), p.two), "-4");
  int64_t number;
  assert_false(egi_dim_value(p.d, egi_dim_divide(p.d, p.s, egi_dim_constant(p.d, 0)), &number));
}

static void test_bounds(void **state) {
  parts p = begin(state);
  egi_dim bs = egi_dim_multiply(p.d, p.b, p.s);
  assert_true(egi_dim_is_positive(p.d, p.s));
  assert_true(egi_dim_is_nonnegative(p.d, egi_dim_subtract(p.d, p.s, p.one)));
  assert_false(egi_dim_is_positive(p.d, egi_dim_subtract(p.d, p.s, p.one)));
  assert_false(egi_dim_is_nonnegative(p.d, egi_dim_subtract(p.d, p.s, p.two)));
  assert_true(egi_dim_is_nonnegative(p.d, egi_dim_subtract(p.d, bs, p.s)));
  assert_false(egi_dim_is_nonnegative(p.d, egi_dim_subtract(p.d, p.s, p.b)));
  assert_false(egi_dim_is_nonnegative(p.d, egi_dim_subtract(p.d, egi_dim_subtract(p.d, bs, p.s), p.b)));
  assert_true(egi_dim_is_nonnegative(p.d, egi_dim_fresh(p.d, "rows")));
  assert_false(egi_dim_is_positive(p.d, egi_dim_fresh(p.d, "rows")));
  assert_int_equal(egi_dim_maximum(p.d, bs, p.s), bs);
  assert_int_equal(egi_dim_minimum(p.d, bs, p.s), p.s);
  assert_int_equal(egi_dim_minimum(p.d, p.s, p.b), egi_dim_minimum(p.d, p.b, p.s));
  assert_true(egi_dim_is_positive(p.d, egi_dim_minimum(p.d, p.s, p.b)));
  assert_true(egi_dim_is_nonnegative(p.d, egi_dim_divide(p.d, p.s, p.two)));
}

static void test_assumptions(void **state) {
  parts p = begin(state);
  egi_dim rows = egi_dim_fresh(p.d, "rows"), half = egi_dim_divide(p.d, rows, p.two);
  assert_int_equal(egi_dim_assume(p.d, p.s, p.s), EG_OK);
  assert_int_equal(egi_dim_assume(p.d, rows, egi_dim_multiply(p.d, p.two, p.b)), EG_OK);
  expect(&p, egi_dim_resolve(p.d, rows), "2*b");
  expect(&p, egi_dim_resolve(p.d, half), "b");
  /* 64·t·b = 64·s·b means t = s; the younger symbol goes. */
  egi_dim c64b = egi_dim_multiply(p.d, egi_dim_constant(p.d, 64), p.b);
  assert_int_equal(egi_dim_assume(p.d, egi_dim_multiply(p.d, c64b, p.t), egi_dim_multiply(p.d, c64b, p.s)), EG_OK);
  assert_int_equal(egi_dim_resolve(p.d, p.t), p.s);
  assert_int_equal(egi_dim_assume(p.d, p.s, egi_dim_constant(p.d, 7)), EG_OK);
  expect(&p, egi_dim_resolve(p.d, p.t), "7");
  assert_int_equal(egi_dim_assume(p.d, p.t, egi_dim_constant(p.d, 8)), EG_ERROR_SHAPE);
  assert_string_equal(eg_context_error(p.f->ctx), "7 is not 8");
  assert_int_equal(egi_dim_assume(p.d, p.b, egi_dim_add(p.d, p.b, p.one)), EG_ERROR_SHAPE);
  const egi_binding good[3] = {{p.b, 3}, {p.s, 7}, {p.t, 7}}, bad[3] = {{p.b, 3}, {p.s, 7}, {p.t, 9}};
  assert_null(egi_dims_check(p.d, good, 3));
  assert_null(egi_dims_check(p.d, good, 1)); /* what is not bound is not violated */
  assert_string_equal(egi_dims_check(p.d, bad, 3), "64*b*t == 64*b*s");
}

static void test_assumption_without_solution(void **state) {
  parts p = begin(state);
  egi_dim bs = egi_dim_multiply(p.d, p.b, p.s), doubled = egi_dim_multiply(p.d, p.two, egi_dim_multiply(p.d, p.t, p.t));
  assert_int_equal(egi_dim_assume(p.d, bs, doubled), EG_OK);
  assert_int_equal(egi_dim_resolve(p.d, bs), bs);
  const egi_binding good[3] = {{p.b, 2}, {p.s, 9}, {p.t, 3}}, bad[3] = {{p.b, 2}, {p.s, 8}, {p.t, 3}};
  assert_null(egi_dims_check(p.d, good, 3));
  assert_non_null(egi_dims_check(p.d, bad, 3));
}

static void test_evaluation(void **state) {
  parts p = begin(state);
  const egi_binding bindings[2] = {{p.b, 3}, {p.s, 10}};
  int64_t value = 0;
  egi_dim mixed = egi_dim_add(p.d, egi_dim_divide(p.d, p.s, p.b), egi_dim_minimum(p.d, p.s, egi_dim_constant(p.d, 8)));
  assert_true(egi_dim_evaluate(p.d, mixed, bindings, 2, &value));
  assert_int_equal(value, 11);
  assert_false(egi_dim_evaluate(p.d, p.t, bindings, 2, &value));
  assert_false(egi_dim_evaluate(p.d, EGI_DIM_NONE, bindings, 2, &value));
  assert_int_equal(egi_dim_assume(p.d, p.t, egi_dim_add(p.d, p.b, p.s)), EG_OK);
  assert_true(egi_dim_evaluate(p.d, p.t, bindings, 2, &value));
  assert_int_equal(value, 13);
  const egi_binding violated[3] = {{p.b, 3}, {p.s, 10}, {p.t, 14}};
  assert_false(egi_dim_evaluate(p.d, p.t, violated, 3, &value));
  const egi_binding huge[2] = {{p.b, INT64_MAX}, {p.s, 2}};
  assert_false(egi_dim_evaluate(p.d, egi_dim_multiply(p.d, p.b, p.s), huge, 2, &value));
}

/* What does not fit becomes an unknown, never a wrong number. */
static void test_limits(void **state) {
  parts p = begin(state);
  int64_t value;
  egi_dim large = egi_dim_constant(p.d, INT64_MAX);
  assert_false(egi_dim_value(p.d, egi_dim_add(p.d, large, p.one), &value));
  assert_false(egi_dim_value(p.d, egi_dim_multiply(p.d, large, p.two), &value));
  assert_false(egi_dim_is_nonnegative(p.d, egi_dim_add(p.d, large, p.one)));
  egi_dim smallest = egi_dim_constant(p.d, INT64_MIN);
  assert_false(egi_dim_value(p.d, egi_dim_divide(p.d, smallest, egi_dim_constant(p.d, -1)), &value));
  egi_dim power = p.s, sum = p.s, nested = p.s;
  for (int i = 0; i < 200; i++) {
    char name[16];
    snprintf(name, sizeof name, "n%d", i);
    power = egi_dim_multiply(p.d, power, p.s);
    sum = egi_dim_add(p.d, sum, egi_dim_symbol(p.d, name));
    nested = egi_dim_divide(p.d, egi_dim_add(p.d, nested, egi_dim_multiply(p.d, nested, nested)), p.b);
  }
  assert_true(p.d->polynomials[power].n_terms <= EGI_MAX_TERMS && p.d->polynomials[sum].n_terms <= EGI_MAX_TERMS);
  const egi_binding bindings[2] = {{p.b, 1}, {p.s, 1}};
  (void)egi_dim_evaluate(p.d, nested, bindings, 2, &value);
  assert_int_equal(egi_dims_status(p.d), EG_OK);
}

/* A chain of equal symbols in the worst order must neither recurse deeply nor take long. */
static void test_long_chain(void **state) {
  parts p = begin(state);
  char name[16];
  enum { LENGTH = 3000 };
  static egi_dim symbols[LENGTH];
  for (int i = 0; i < LENGTH; i++) {
    snprintf(name, sizeof name, "c%d", i);
    symbols[i] = egi_dim_symbol(p.d, name);
  }
  for (int i = LENGTH - 1; i > 0; i--) assert_int_equal(egi_dim_assume(p.d, symbols[i], symbols[i - 1]), EG_OK);
  const egi_binding bindings[2] = {{symbols[LENGTH - 1], 5}, {symbols[LENGTH - 2], 6}};
  assert_null(egi_dims_check(p.d, bindings, 1));
  assert_non_null(egi_dims_check(p.d, bindings, 2));
}

static void test_symbols(void **state) {
  parts p = begin(state);
  const char *name;
  egi_dim_fresh(p.d, "atom");
  assert_int_equal(egi_dims_symbol_count(p.d), 3);
  assert_int_equal(egi_dims_symbol_at(p.d, 1, &name), p.s);
  assert_string_equal(name, "s");
  assert_int_equal(egi_dims_symbol_at(p.d, 3, &name), EGI_DIM_NONE);
}

/* ---- random expressions against plain integers ---------------------------------------------------------------- */

typedef struct pair {
  egi_dim dim;
  int64_t value;
  bool is_defined;
} pair;

static int64_t floor_quotient(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0) ? 1 : 0);
}

static pair combine(egi_dims *d, unsigned operation, pair a, pair b) {
  pair c = {.is_defined = a.is_defined && b.is_defined && llabs(a.value) < 10000 && llabs(b.value) < 10000};
  if (!c.is_defined) return c;
  switch (operation) {
  case 0:
    c.dim = egi_dim_add(d, a.dim, b.dim), c.value = a.value + b.value;
    break;
  case 1:
    c.dim = egi_dim_subtract(d, a.dim, b.dim), c.value = a.value - b.value;
    break;
  case 2:
    c.dim = egi_dim_multiply(d, a.dim, b.dim), c.value = a.value * b.value;
    break;
  case 3:
    c.dim = egi_dim_minimum(d, a.dim, b.dim), c.value = a.value < b.value ? a.value : b.value;
    break;
  case 4:
    c.dim = egi_dim_maximum(d, a.dim, b.dim), c.value = a.value > b.value ? a.value : b.value;
    break;
  default:
    c.is_defined = b.value != 0;
    c.dim = egi_dim_divide(d, a.dim, b.dim);
    c.value = b.value != 0 ? floor_quotient(a.value, b.value) : 0;
  }
  return c;
}

static void check_pair(const parts *p, const egi_binding *bindings, pair c, unsigned *n_checked) {
  int64_t value, lower = egi_dim_lower_bound(p->d, c.dim);
  if (!egi_dim_evaluate(p->d, c.dim, bindings, 3, &value)) return; /* grew too large on the way */
  if (value != c.value) {
    expect(p, c.dim, "a wrong expression");
    fail();
  }
  if (lower != EGI_NO_BOUND) assert_true(lower <= c.value);
  (*n_checked)++;
}

/* The length of a cache becomes 0, which no assumption may say; one that is another's difference makes them equal. */
static void test_fixed(void **state) {
  parts p = begin(state);
  const egi_binding bindings[2] = {{p.b, 2}, {p.t, 5}};
  int64_t value = -1;
  egi_dim zero = egi_dim_constant(p.d, 0), total = egi_dim_add(p.d, p.s, p.t);
  assert_int_equal(egi_dim_assume(p.d, p.s, zero), EG_ERROR_SHAPE);
  assert_int_equal(egi_dim_fix(p.d, p.s, 0), EG_OK);
  assert_int_equal(egi_dim_resolve(p.d, p.s), zero);
  assert_int_equal(egi_dim_resolve(p.d, total), p.t);
  assert_int_equal(egi_dim_resolve(p.d, egi_dim_multiply(p.d, p.s, p.b)), zero);
  assert_int_equal(egi_dim_fix(p.d, p.s, 0), EG_OK);
  assert_int_equal(egi_dim_fix(p.d, p.s, 1), EG_ERROR_SHAPE);
  assert_true(egi_dim_evaluate(p.d, total, bindings, 2, &value));
  assert_int_equal(value, 5);
  egi_dim past = egi_dim_symbol(p.d, "past"), all = egi_dim_symbol(p.d, "all");
  assert_int_equal(egi_dim_assume(p.d, past, egi_dim_subtract(p.d, all, p.t)), EG_OK);
  assert_int_equal(egi_dim_fix(p.d, past, 0), EG_OK);
  assert_int_equal(egi_dim_resolve(p.d, all), egi_dim_resolve(p.d, p.t));
}

static void test_random_expressions(void **state) {
  parts p = begin(state);
  unsigned n_checked = 0;
  for (unsigned round = 0; round < 400; round++) {
    pair pool[40];
    uint32_t words[4];
    egi_binding bindings[3] = {{p.b, 1 + round % 3}, {p.s, 1 + round % 7}, {p.t, 1 + round % 5}};
    for (unsigned i = 0; i < 3; i++) pool[i] = (pair){bindings[i].symbol, bindings[i].value, true};
    for (unsigned i = 3; i < 8; i++) pool[i] = (pair){egi_dim_constant(p.d, (int64_t)i - 5), (int64_t)i - 5, true};
    for (unsigned i = 8; i < EGI_COUNT(pool); i++) {
      egi_philox(round, (const uint32_t[4]){i, 0, 0, 0}, words);
      pool[i] = combine(p.d, words[0] % 6, pool[words[1] % i], pool[words[2] % i]);
      if (pool[i].is_defined) check_pair(&p, bindings, pool[i], &n_checked);
    }
  }
  assert_true(n_checked > 4000);
  assert_int_equal(egi_dims_status(p.d), EG_OK);
}

int main(void) {
#define TEST(function) cmocka_unit_test_setup_teardown(function, graph_setup, graph_teardown)
  const struct CMUnitTest tests[] = {
      TEST(test_normal_form),
      TEST(test_division),
      TEST(test_bounds),
      TEST(test_assumptions),
      TEST(test_assumption_without_solution),
      TEST(test_evaluation),
      TEST(test_limits),
      TEST(test_long_chain),
      TEST(test_symbols),
      TEST(test_fixed),
      TEST(test_random_expressions),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
