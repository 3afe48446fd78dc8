/* The sampler: greedy, limits, and frequencies that follow the softmax. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "train/train.h"

enum { N = 5, DRAWS = 20000 };
static const float logits[N] = {0.0f, 2.0f, -1.0f, 2.0f, 1.0f};

static void count(const eg_generate_options *options, int counts[N]) {
  egi_candidate scratch[N];
  for (int i = 0; i < N; i++) counts[i] = 0;
  for (uint64_t i = 0; i < DRAWS; i++) counts[egi_sample(logits, N, options, i, scratch)]++;
}

static void test_greedy(void **state) {
  eg_generate_options options = EG_GENERATE_OPTIONS_INIT;
  egi_candidate scratch[N];
  (void)state;
  assert_int_equal(egi_sample(logits, N, &options, 0, scratch), 1); /* the lower of equal ones */
}

static void test_softmax(void **state) {
  eg_generate_options options = EG_GENERATE_OPTIONS_INIT;
  int counts[N];
  double sum = 0.0;
  (void)state;
  options.temperature = 0.5;
  options.seed = 7;
  count(&options, counts);
  for (int i = 0; i < N; i++) sum += exp((double)logits[i] / 0.5);
  for (int i = 0; i < N; i++) {
    double share = exp((double)logits[i] / 0.5) / sum;
    double deviation = sqrt(share * (1.0 - share) / DRAWS);
    assert_true(fabs((double)counts[i] / DRAWS - share) <= 5.0 * deviation);
  }
}

static void test_limits(void **state) {
  eg_generate_options options = EG_GENERATE_OPTIONS_INIT;
  int counts[N];
  (void)state;
  options.temperature = 1.0;
  options.top_k = 3;
  count(&options, counts);
  assert_int_equal(counts[0] + counts[2], 0);
  assert_true(counts[1] > 0 && counts[3] > 0 && counts[4] > 0);
  options.top_k = 1;
  count(&options, counts);
  assert_int_equal(counts[1], DRAWS);
  options.top_k = 0;
  options.top_p = 0.6; /* the two best have 0.73 of the probability, the best alone 0.37 */
  count(&options, counts);
  assert_int_equal(counts[1] + counts[3], DRAWS);
  assert_true(counts[3] > 0);
}

static void test_seed(void **state) {
  eg_generate_options options = EG_GENERATE_OPTIONS_INIT;
  egi_candidate scratch[N];
  int n_different = 0;
  (void)state;
  options.temperature = 1.0;
  for (uint64_t i = 0; i < 100; i++) {
    options.seed = 1;
    int32_t first = egi_sample(logits, N, &options, i, scratch);
    assert_int_equal(egi_sample(logits, N, &options, i, scratch), first);
    options.seed = 2;
    n_different += egi_sample(logits, N, &options, i, scratch) != first;
  }
  assert_true(n_different > 20);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_greedy), cmocka_unit_test(test_softmax),
                                     cmocka_unit_test(test_limits), cmocka_unit_test(test_seed)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
