/* Offsets: what lives at the same time does not overlap, what does not may; long lists take little time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "backend/plan.h"
#include "tests/backend/support_fake.h"

static egi_item item(uint32_t id, uint64_t size_bytes, uint32_t first, uint32_t last) {
  return (egi_item){.storage = id, .size_bytes = size_bytes, .start = {first - 1}, .last = {last}};
}

static uint64_t pack(eg_context *ctx, egi_item *items, uint32_t n) {
  egi_arena arena;
  uint64_t size = 0;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_GRAPH);
  assert_int_equal(egi_pack(&arena, items, n, &size), EG_OK);
  egi_arena_clear(&arena);
  for (uint32_t i = 0; i < n; i++) {
    assert_int_equal(items[i].offset_bytes % EGI_ALIGNMENT, 0);
    assert_true(items[i].offset_bytes + items[i].size_bytes <= size);
  }
  return size;
}

static void nothing_needs_nothing(void **state) {
  assert_int_equal(pack(*state, NULL, 0), 0);
}

static void one_after_the_other_share(void **state) {
  egi_item items[3] = {item(1, 128, 1, 2), item(2, 64, 3, 4), item(3, 128, 5, 5)};
  assert_int_equal(pack(*state, items, 3), 128);
}

static void at_the_same_time_do_not(void **state) {
  egi_item items[3] = {item(1, 128, 1, 3), item(2, 64, 3, 4), item(3, 128, 4, 5)};
  assert_int_equal(pack(*state, items, 3), 192);
}

static void the_smallest_gap_is_taken(void **state) {
  /* at time 3 there are gaps of 128 (where 2 was) and of 64 (where 4 was) */
  egi_item items[6] = {item(1, 512, 1, 9), item(2, 128, 1, 2), item(3, 512, 1, 9),
                       item(4, 64, 1, 2),  item(5, 64, 3, 4),  item(6, 128, 3, 4)};
  assert_int_equal(pack(*state, items, 6), 512 + 512 + 128 + 64);
}

static void other_streams_conflict_until_they_are_known_to_be_done(void **state) {
  egi_item first = {.storage = 1, .size_bytes = 64, .start = {0, 0, 0}, .last = {1, 2, 0}};
  egi_item second = {.storage = 2, .size_bytes = 64, .start = {1, 1, 0}, .last = {2, 0, 0}};
  egi_item items[2] = {first, second};
  assert_int_equal(pack(*state, items, 2), 128); /* stream 1 is known to have done 1 of 2 steps */
  second.start[1] = 2;
  items[0] = first;
  items[1] = second;
  assert_int_equal(pack(*state, items, 2), 64);
}

static int by_offset(const void *a, const void *b) {
  const egi_item *x = a, *y = b;
  return x->offset_bytes < y->offset_bytes ? -1 : x->offset_bytes > y->offset_bytes;
}

static void long_lists_are_packed_soundly(void **state) {
  enum { N = 100000, N_CHECKED = 1000 };
  egi_item *items = calloc(N, sizeof(*items));
  assert_non_null(items);
  uint64_t alive = 0, most = 0;
  uint64_t *ends = calloc(N + 200, sizeof(*ends));
  assert_non_null(ends);
  for (uint32_t i = 0; i < N; i++) {
    uint32_t length = 1 + (uint32_t)(egi_random_uniform(3, 1, i) * (i % 10 == 0 ? 100.0 : 4.0));
    /* as in a model: few sizes, very different */
    uint64_t size = egi_align((uint64_t)500 << (uint64_t)(egi_random_uniform(3, 2, i) * 12.0));
    items[i] = item(i + 1, size, i + 1, i + length);
    alive += size;
    if (alive > most) most = alive;
    ends[i + length] += size;
    alive -= ends[i + 1];
  }
  double start = egi_clock();
  uint64_t size = pack(*state, items, N);
  assert_true(egi_clock() - start < 5.0);
  assert_true(size < most + most / 2);
  /* neighbours in memory and in time do not overlap */
  qsort(items, N, sizeof(*items), by_offset);
  for (uint32_t i = 0; i < N_CHECKED; i++) {
    uint32_t a = i * (N / N_CHECKED);
    for (uint32_t b = 0; b < N; b++) {
      if (a == b || items[a].last[0] <= items[b].start[0] || items[b].last[0] <= items[a].start[0]) continue;
      assert_true(items[a].offset_bytes + items[a].size_bytes <= items[b].offset_bytes ||
                  items[b].offset_bytes + items[b].size_bytes <= items[a].offset_bytes);
    }
  }
  free(ends);
  free(items);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_context, free_context)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(nothing_needs_nothing),
                                     TEST(one_after_the_other_share),
                                     TEST(at_the_same_time_do_not),
                                     TEST(the_smallest_gap_is_taken),
                                     TEST(other_streams_conflict_until_they_are_known_to_be_done),
                                     TEST(long_lists_are_packed_soundly)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
