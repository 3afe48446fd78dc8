/* Padded micro-batches and the buckets that cover them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "train/train.h"

static int setup(void **state) {
  eg_context *ctx;
  if (eg_context_create(NULL, &ctx) != EG_OK) return -1;
  *state = ctx;
  return 0;
}

static int teardown(void **state) {
  eg_context_destroy(*state);
  return 0;
}

/* Documents of these lengths; tokens are not looked at. */
static egi_documents with_lengths(uint64_t *offsets, const uint64_t *lengths, size_t n) {
  for (size_t i = 0; i < n; i++) offsets[i + 1] = offsets[i] + lengths[i];
  return (egi_documents){.offsets = offsets, .n_documents = n};
}

static void test_file_order(void **state) {
  static const uint64_t lengths[] = {3, 4, 2, 9, 20, 1, 1, 1};
  uint64_t offsets[9] = {0};
  egi_documents documents = with_lengths(offsets, lengths, 8);
  egi_batch_limits limits = {12, 12, UINT32_MAX, 0};
  egi_batch_range *batches;
  size_t n;
  egi_arena arena;
  egi_arena_init(&arena, *state, EGI_PURPOSE_DATA);
  assert_int_equal(egi_batches_make(&documents, &limits, &arena, &batches, &n), EG_OK);
  static const egi_batch_range wanted[] = {{0, 3, 4, NULL}, {3, 1, 9, NULL}, {4, 1, 12, NULL}, {5, 3, 1, NULL}};
  assert_int_equal(n, 4);
  for (size_t i = 0; i < n; i++) {
    assert_int_equal(batches[i].first_document, wanted[i].first_document);
    assert_int_equal(batches[i].n_documents, wanted[i].n_documents);
    assert_int_equal(batches[i].longest, wanted[i].longest);
  }
  egi_arena_clear(&arena);
}

static void test_fixed_sizes(void **state) {
  static const uint64_t lengths[] = {3, 4, 2, 9};
  uint64_t offsets[5] = {0};
  egi_documents documents = with_lengths(offsets, lengths, 4);
  egi_batch_limits limits = {16, 8, 2, 8};
  egi_batch_range *batches;
  size_t n;
  egi_arena arena;
  egi_arena_init(&arena, *state, EGI_PURPOSE_DATA);
  assert_int_equal(egi_batches_make(&documents, &limits, &arena, &batches, &n), EG_OK);
  assert_int_equal(n, 2);
  assert_int_equal(batches[0].n_documents, 2);
  assert_int_equal(batches[0].longest, 8);
  egi_arena_clear(&arena);
}

static void check_buckets(eg_context *ctx, const egi_batch_range *batches, size_t n_batches, size_t max_buckets,
                          const egi_bucket *wanted, size_t n_wanted) {
  egi_arena arena;
  egi_bucket *buckets;
  size_t n;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  assert_int_equal(egi_buckets_choose(batches, n_batches, max_buckets, &arena, &buckets, &n), EG_OK);
  assert_int_equal(n, n_wanted);
  for (size_t i = 0; i < n; i++) {
    assert_int_equal(buckets[i].batch, wanted[i].batch);
    assert_int_equal(buckets[i].sequence, wanted[i].sequence);
  }
  egi_arena_clear(&arena);
}

static void test_buckets(void **state) {
  static const egi_batch_range one[] = {{0, 2, 48, NULL}, {2, 2, 48, NULL}, {4, 1, 48, NULL}};
  check_buckets(*state, one, 3, 4, (egi_bucket[]){{2, 48}}, 1);
  static const egi_batch_range mixed[] = {{0, 8, 10, NULL}, {8, 1, 100, NULL}, {9, 8, 11, NULL}, {17, 1, 90, NULL}};
  check_buckets(*state, mixed, 4, 4, (egi_bucket[]){{8, 10}, {8, 11}, {1, 90}, {1, 100}}, 4);
  check_buckets(*state, mixed, 4, 2, (egi_bucket[]){{8, 11}, {1, 100}}, 2);
  check_buckets(*state, mixed, 4, 1, (egi_bucket[]){{8, 100}}, 1);
  check_buckets(*state, mixed, 0, 4, NULL, 0);
}

/* Thousands of different lengths: at most the asked number of buckets, and each batch fits one. */
static void test_many_lengths(void **state) {
  enum { N = 3000 };
  egi_arena arena;
  egi_bucket *buckets;
  size_t n;
  egi_arena_init(&arena, *state, EGI_PURPOSE_DATA);
  egi_batch_range *batches = EGI_NEW(&arena, egi_batch_range, N);
  for (uint32_t i = 0; i < N; i++) batches[i] = (egi_batch_range){i, 1 + 4000 / (i + 1), i + 1, NULL};
  assert_int_equal(egi_buckets_choose(batches, N, 4, &arena, &buckets, &n), EG_OK);
  assert_int_equal(n, 4);
  for (uint32_t i = 0; i < N; i++) {
    bool is_held = false;
    for (size_t b = 0; b < n; b++)
      is_held = is_held || (buckets[b].batch >= batches[i].n_documents && buckets[b].sequence >= batches[i].longest);
    assert_true(is_held);
  }
  egi_arena_clear(&arena);
}

static void test_count(void **state) {
  (void)state;
  static int32_t labels[] = {-100, 5, -100, 7, -100, 1, 1};
  static uint64_t offsets[] = {0, 4, 7};
  egi_documents documents = {.tokens = labels, .labels = labels, .offsets = offsets, .n_documents = 2};
  egi_batch_range range = {0, 2, 3, NULL};
  uint64_t targets, tokens;
  egi_batch_count(EGI_UNIT_NEXT_TOKEN, &documents, &range, &targets, &tokens);
  assert_int_equal(tokens, 6);
  assert_int_equal(targets, 3); /* the label behind the cut does not count */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_file_order, setup, teardown),
      cmocka_unit_test_setup_teardown(test_fixed_sizes, setup, teardown),
      cmocka_unit_test_setup_teardown(test_buckets, setup, teardown),
      cmocka_unit_test_setup_teardown(test_many_lengths, setup, teardown),
      cmocka_unit_test(test_count),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
