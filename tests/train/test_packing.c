/* Rows that several documents share: each document once, in the order of the file, rows well filled. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>

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

static uint64_t length_of(const egi_documents *documents, uint32_t index, uint32_t tokens) {
  uint64_t length = documents->offsets[index + 1] - documents->offsets[index];
  return length < tokens ? length : tokens;
}

/* Each document once, rows within their size, in file order within and between; returns the share that is filled. */
static double check_rows(const egi_documents *documents, const egi_batch_range *rows, size_t n, uint32_t tokens) {
  bool *is_seen = calloc(documents->n_documents + 1, sizeof *is_seen);
  size_t n_seen = 0;
  uint64_t total = 0;
  assert_non_null(is_seen);
  for (size_t i = 0; i < n; i++) {
    const uint32_t *order = rows[i].order + rows[i].first_document;
    uint64_t used = 0;
    assert_true(rows[i].n_documents > 0);
    if (i > 0) assert_true(rows[i - 1].order[rows[i - 1].first_document] < order[0]);
    for (size_t k = 0; k < rows[i].n_documents; k++) {
      assert_true(order[k] < documents->n_documents && !is_seen[order[k]]);
      if (k > 0) assert_true(order[k - 1] < order[k]);
      is_seen[order[k]] = true;
      n_seen++;
      used += length_of(documents, order[k], tokens);
    }
    assert_true(used <= tokens);
    total += used;
  }
  assert_int_equal(n_seen, documents->n_documents);
  free(is_seen);
  return (double)total / ((double)tokens * (double)n);
}

static void check_lengths(eg_context *ctx, const uint64_t *lengths, size_t n, uint32_t tokens, bool is_in_order,
                          const size_t *wanted, size_t n_wanted) {
  uint64_t offsets[32] = {0};
  egi_arena arena;
  egi_batch_range *rows;
  size_t count;
  for (size_t i = 0; i < n; i++) offsets[i + 1] = offsets[i] + lengths[i];
  egi_documents documents = {.offsets = offsets, .n_documents = n};
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  assert_int_equal(egi_rows_pack(&documents, tokens, is_in_order, &arena, &rows, &count), EG_OK);
  (void)check_rows(&documents, rows, count, tokens);
  assert_int_equal(count, n_wanted);
  for (size_t i = 0; i < count; i++) assert_int_equal(rows[i].n_documents, wanted[i]);
  egi_arena_clear(&arena);
}

static void test_sequential(void **state) {
  static const uint64_t lengths[] = {3, 4, 6, 10, 1, 1, 20, 9, 2};
  check_lengths(*state, lengths, 9, 10, true, (const size_t[]){2, 1, 1, 2, 1, 1, 1}, 7);
}

static void test_best_fit(void **state) {
  static const uint64_t lengths[] = {3, 4, 6, 10, 1, 1, 20, 9, 2};
  /* the smaller ones go where they leave least */
  check_lengths(*state, lengths, 9, 10, false, (const size_t[]){3, 2, 1, 2, 1}, 5);
  check_lengths(*state, lengths, 0, 10, false, NULL, 0);
  check_lengths(*state, (const uint64_t[]){1, 1, 1}, 3, 1, false, (const size_t[]){1, 1, 1}, 3);
}

static uint64_t next_random(uint64_t *seed) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return *seed >> 33;
}

/* Lengths whose logarithm is normal, as those of chats and web pages are: a median of 180 tokens, the longest cut. */
static void test_fill(void **state) {
  enum { N = 20000, TOKENS = 2048 };
  uint64_t *offsets = calloc(N + 1, sizeof *offsets), seed = 7;
  egi_arena arena;
  egi_batch_range *rows, *in_order;
  size_t count, count_in_order;
  assert_non_null(offsets);
  for (size_t i = 0; i < N; i++) {
    double sum = -6;
    for (int k = 0; k < 12; k++) sum += (double)next_random(&seed) / 2147483648.0;
    double length = exp(log(180.0) + 1.1 * sum);
    offsets[i + 1] = offsets[i] + (length < 1 ? 1 : length > 8192 ? 8192 : (uint64_t)length);
  }
  egi_documents documents = {.offsets = offsets, .n_documents = N};
  egi_arena_init(&arena, *state, EGI_PURPOSE_DATA);
  assert_int_equal(egi_rows_pack(&documents, TOKENS, false, &arena, &rows, &count), EG_OK);
  assert_int_equal(egi_rows_pack(&documents, TOKENS, true, &arena, &in_order, &count_in_order), EG_OK);
  double filled = check_rows(&documents, rows, count, TOKENS);
  double filled_in_order = check_rows(&documents, in_order, count_in_order, TOKENS);
  assert_true(filled >= 0.98);
  assert_true(filled_in_order >= 0.6 && filled_in_order < filled);
  egi_bucket bucket = egi_rows_bucket(&documents, rows, count);
  assert_int_equal(bucket.batch, 1);
  assert_int_equal(bucket.sequence, TOKENS);
  egi_arena_clear(&arena);
  free(offsets);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_sequential), cmocka_unit_test(test_best_fit),
                                     cmocka_unit_test(test_fill)};
  return cmocka_run_group_tests_name("packing", tests, setup, teardown);
}
