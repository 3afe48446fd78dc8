/* Which modules names and expressions choose, and patterns of ranks, as PEFT has it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "train/train.h"

typedef struct fixture {
  eg_context *ctx;
  egi_arena arena;
} fixture;

static int setup(void **state) {
  static fixture f;
  if (eg_context_create(NULL, &f.ctx) != EG_OK) return 1;
  egi_arena_init(&f.arena, f.ctx, EGI_PURPOSE_DATA);
  *state = &f;
  return 0;
}

static int teardown(void **state) {
  fixture *f = *state;
  egi_arena_clear(&f->arena);
  eg_context_destroy(f->ctx);
  return 0;
}

static bool matches(fixture *f, const char *text, const char *path) {
  egi_modules modules;
  if (egi_modules_read(&f->arena, text, &modules) != EG_OK) fail_msg("%s", eg_context_error(f->ctx));
  return egi_modules_match(&modules, path);
}

static void test_names(void **state) {
  fixture *f = *state;
  assert_true(matches(f, "q_proj", "model.layers.0.self_attn.q_proj"));
  assert_true(matches(f, "k_proj, self_attn.q_proj", "model.layers.0.self_attn.q_proj"));
  assert_false(matches(f, "proj", "model.layers.0.self_attn.q_proj"));
  assert_false(matches(f, NULL, "model.layers.0.self_attn.q_proj"));
  assert_false(matches(f, "", "model.layers.0.self_attn.q_proj"));
  assert_false(matches(f, "layers.0", "model.layers.0.self_attn.q_proj"));
}

static void test_expressions(void **state) {
  fixture *f = *state;
  egi_modules modules;
  assert_true(matches(f, ".*\\.(q|k)_proj", "model.layers.0.self_attn.k_proj"));
  assert_false(matches(f, "(q|k)_proj", "model.layers.0.self_attn.k_proj")); /* the whole path */
  assert_false(matches(f, ".*layers\\.[0-3]\\..*_pro", "model.layers.0.self_attn.k_proj"));
  assert_true(matches(f, "model\\.layers\\.\\d{1,2}\\..*", "model.layers.12.mlp.up_proj"));
  assert_int_equal(egi_modules_read(&f->arena, "layers.(0", &modules), EG_ERROR_ARGUMENT);
  assert_non_null(strstr(eg_context_error(f->ctx), "\"layers.(0\" is wrong at character"));
  /* One that would take for ever matches nothing. */
  assert_false(matches(f, "(a*)*(a*)*(a*)*(a*)*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"));
}

static void test_patterns(void **state) {
  fixture *f = *state;
  egi_peft_config config = {.rank = 8, .alpha = 16, .use_rslora = false};
  assert_int_equal(egi_patterns_read(&f->arena, "rank", "q_proj=4,layers\\.1\\..*=2", &config.ranks, &config.n_ranks),
                   EG_OK);
  assert_int_equal(egi_patterns_read(&f->arena, "alpha", "q_proj=1", &config.alphas, &config.n_alphas), EG_OK);
  assert_int_equal(egi_peft_rank(&config, "model.layers.1.self_attn.q_proj"), 4); /* the first that matches */
  assert_int_equal(egi_peft_rank(&config, "model.layers.1.self_attn.v_proj"), 2);
  assert_int_equal(egi_peft_rank(&config, "model.layers.10.self_attn.v_proj"), 8);
  assert_true(egi_peft_scale(&config, "model.layers.0.self_attn.q_proj") * 4 == 1.0);
  config.use_rslora = true;
  assert_true(egi_peft_scale(&config, "model.layers.0.self_attn.q_proj") * 2 == 1.0);
  static const char *const bad[] = {"q_proj", "q_proj=", "=3", "q_proj=0", "q_proj=1.5", "q_proj=3,", "q_proj=-1"};
  for (size_t i = 0; i < EGI_COUNT(bad); i++) {
    assert_int_equal(egi_patterns_read(&f->arena, "--rank-pattern", bad[i], &config.ranks, &config.n_ranks),
                     EG_ERROR_ARGUMENT);
    assert_non_null(strstr(eg_context_error(f->ctx), "--rank-pattern"));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_names, setup, teardown),
      cmocka_unit_test_setup_teardown(test_expressions, setup, teardown),
      cmocka_unit_test_setup_teardown(test_patterns, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
