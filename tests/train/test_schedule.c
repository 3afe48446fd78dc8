/* Learning rates against values of transformers' schedules, computed from their published formulas. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "train/train.h"

static void check(eg_schedule schedule, double warmup, uint64_t step, double wanted) {
  double rate = egi_schedule_rate(schedule, 2.0, step, 10, warmup);
  if (!(fabs(rate - wanted) <= 1e-12))
    fail_msg("schedule %d, warm-up %g, step %u: %.15g, not %.15g", (int)schedule, warmup, (unsigned)step, rate, wanted);
}

static void test_constant(void **state) {
  (void)state;
  check(EG_SCHEDULE_CONSTANT, 0, 0, 2.0);
  check(EG_SCHEDULE_CONSTANT, 0, 9, 2.0);
  check(EG_SCHEDULE_CONSTANT, 4, 0, 0.0);
  check(EG_SCHEDULE_CONSTANT, 4, 1, 0.5);
  check(EG_SCHEDULE_CONSTANT, 4, 4, 2.0);
  check(EG_SCHEDULE_CONSTANT, 0.25, 0, 0.0); /* a ratio: 3 of 10 steps */
  check(EG_SCHEDULE_CONSTANT, 0.25, 1, 2.0 / 3.0);
  check(EG_SCHEDULE_CONSTANT, 0.25, 3, 2.0);
}

static void test_linear(void **state) {
  (void)state;
  check(EG_SCHEDULE_LINEAR, 0, 0, 2.0);
  check(EG_SCHEDULE_LINEAR, 0, 5, 1.0);
  check(EG_SCHEDULE_LINEAR, 0, 10, 0.0);
  check(EG_SCHEDULE_LINEAR, 0, 12, 0.0);
  check(EG_SCHEDULE_LINEAR, 2, 1, 1.0);
  check(EG_SCHEDULE_LINEAR, 2, 4, 1.5);
}

static void test_cosine(void **state) {
  (void)state;
  check(EG_SCHEDULE_COSINE, 0, 0, 2.0);
  check(EG_SCHEDULE_COSINE, 0, 5, 1.0);
  check(EG_SCHEDULE_COSINE, 0, 10, 0.0);
  check(EG_SCHEDULE_COSINE, 2, 1, 1.0);
  check(EG_SCHEDULE_COSINE, 2, 4, 1.0 + sqrt(0.5));
}

static void test_wsd(void **state) {
  (void)state;
  check(EG_SCHEDULE_WSD, 2, 1, 1.0);
  check(EG_SCHEDULE_WSD, 2, 8, 2.0);
  check(EG_SCHEDULE_WSD, 2, 9, 2.0); /* the decay begins with its first step at full rate */
  check(EG_SCHEDULE_WSD, 2, 10, 0.0);
  double rate = egi_schedule_rate(EG_SCHEDULE_WSD, 1.0, 95, 100, 0.0);
  assert_true(fabs(rate - 0.5) <= 1e-12);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_constant), cmocka_unit_test(test_linear),
                                     cmocka_unit_test(test_cosine), cmocka_unit_test(test_wsd)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
