/* Arenas, checked sizes, counted allocations, maps, text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "base/base.h"

static int make_context(void **state) {
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  options.n_threads = 1;
  eg_context *ctx;
  if (eg_context_create(&options, &ctx) != EG_OK) return 1;
  *state = ctx;
  return 0;
}

static int free_context(void **state) {
  eg_context_destroy(*state);
  return 0;
}

static void sizes_do_not_wrap(void **state) {
  size_t out = 7;
  (void)state;
  assert_false(egi_size_add(SIZE_MAX, 1, &out));
  assert_false(egi_size_multiply(SIZE_MAX / 2 + 1, 2, &out));
  assert_int_equal(out, 7);
  assert_true(egi_size_multiply(SIZE_MAX, 1, &out));
  assert_true(out == SIZE_MAX);
  assert_true(egi_size_multiply(0, SIZE_MAX, &out));
  assert_int_equal(out, 0);
}

static void arena_memory_is_zero_aligned_and_counted(void **state) {
  eg_context *ctx = *state;
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_STEP);
  for (size_t size = 1; size < 300000; size = size * 3 + 1) {
    unsigned char *memory = egi_arena_get(&arena, size, 1);
    assert_non_null(memory);
    assert_int_equal((uintptr_t)memory % (size >= 64 ? 64 : 16), 0);
    for (size_t i = 0; i < size; i++) assert_int_equal(memory[i], 0);
    memset(memory, 0xaa, size);
  }
  assert_true(egi_bytes_in_use(ctx, EGI_PURPOSE_STEP) > 300000);
  egi_arena_clear(&arena);
  assert_int_equal(egi_bytes_in_use(ctx, EGI_PURPOSE_STEP), 0);
  assert_null(egi_arena_get(&arena, SIZE_MAX, 2));
  assert_non_null(strstr(eg_context_error(ctx), "out of memory"));
}

static void arena_growth_keeps_the_rows(void **state) {
  egi_arena arena;
  uint32_t *rows = NULL, capacity = 0;
  egi_arena_init(&arena, *state, EGI_PURPOSE_GRAPH);
  for (uint32_t i = 0; i < 1000; i++) {
    assert_int_equal(EGI_GROW(&arena, &rows, i, &capacity), EG_OK);
    assert_int_equal(rows[i], 0);
    rows[i] = i;
  }
  for (uint32_t i = 0; i < 1000; i++) assert_int_equal(rows[i], i);
  egi_arena_clear(&arena);
}

static void map_finds_replaces_and_removes(void **state) {
  egi_arena arena;
  egi_map map;
  uint32_t value;
  egi_arena_init(&arena, *state, EGI_PURPOSE_GRAPH);
  egi_map_init(&map, &arena);
  assert_false(egi_map_get(&map, "absent", &value));
  for (uint32_t i = 0; i < 3000; i++) {
    const char *key = egi_arena_format(&arena, "key %u", i);
    assert_int_equal(egi_map_put(&map, key, i), EG_OK);
  }
  for (uint32_t i = 0; i < 3000; i += 2) egi_map_remove(&map, egi_arena_format(&arena, "key %u", i));
  assert_int_equal(map.count, 1500);
  for (uint32_t i = 0; i < 3000; i++) {
    bool is_there = egi_map_get(&map, egi_arena_format(&arena, "key %u", i), &value);
    assert_int_equal(is_there, i % 2);
    if (is_there) assert_int_equal(value, i);
  }
  assert_int_equal(egi_map_put(&map, "key 1", 99), EG_OK);
  assert_int_equal(map.count, 1500);
  assert_true(egi_map_get(&map, "key 1", &value));
  assert_int_equal(value, 99);
  egi_arena_clear(&arena);
}

static void text_escapes_json(void **state) {
  egi_text text;
  egi_text_init(&text, *state);
  egi_text_json(&text, "a\"b\\c\nd\te\x01");
  assert_string_equal(egi_text_string(&text), "\"a\\\"b\\\\c\\nd\\te\\u0001\"");
  for (int i = 0; i < 2000; i++) egi_text_format(&text, "%d,", i);
  assert_int_equal(egi_text_status(&text), EG_OK);
  assert_true(egi_has_suffix(egi_text_string(&text), "1998,1999,"));
  egi_text_free(&text);
}

static void messages_are_one_line(void **state) {
  eg_context *ctx = *state;
  assert_int_equal(egi_fail(ctx, EG_ERROR_DATA, "tensor %s", "a\nb\r\x1b[1m"), EG_ERROR_DATA);
  assert_string_equal(eg_context_error(ctx), "tensor a b  [1m");
}

static void *refuse(void *userdata, size_t size_bytes, size_t alignment) {
  int *left = userdata;
  if ((*left)-- <= 0) return NULL;
  void *memory = NULL;
  return posix_memalign(&memory, alignment, size_bytes) == 0 ? memory : NULL;
}

static void give_back(void *userdata, void *memory, size_t size_bytes) {
  (void)userdata;
  (void)size_bytes;
  free(memory);
}

static void context_survives_a_poor_allocator(void **state) {
  (void)state;
  for (int allowed = 0; allowed < 8; allowed++) {
    int left = allowed;
    eg_allocator allocator = {refuse, give_back, &left};
    eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
    options.allocator = &allocator;
    options.n_threads = 3;
    eg_context *ctx = NULL;
    eg_status status = eg_context_create(&options, &ctx);
    assert_true(status == EG_OK || (status == EG_ERROR_MEMORY && ctx == NULL));
    if (allowed >= 3) assert_int_equal(status, EG_OK);
    eg_context_destroy(ctx);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sizes_do_not_wrap),
      cmocka_unit_test_setup_teardown(arena_memory_is_zero_aligned_and_counted, make_context, free_context),
      cmocka_unit_test_setup_teardown(arena_growth_keeps_the_rows, make_context, free_context),
      cmocka_unit_test_setup_teardown(map_finds_replaces_and_removes, make_context, free_context),
      cmocka_unit_test_setup_teardown(text_escapes_json, make_context, free_context),
      cmocka_unit_test_setup_teardown(messages_are_one_line, make_context, free_context),
      cmocka_unit_test(context_survives_a_poor_allocator),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
