/* Half floats bit by bit, Philox against its published vectors, the pool, and files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"

static void every_f16_survives_f32(void **state) {
  (void)state;
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    float value = egi_f16_to_f32((uint16_t)bits);
    bool is_nan = (bits & 0x7c00u) == 0x7c00u && (bits & 0x3ffu) != 0;
    if (is_nan) {
      assert_true(isnan(value));
      assert_true(isnan(egi_f16_to_f32(egi_f32_to_f16(value))));
    } else {
      assert_int_equal(egi_f32_to_f16(value), bits);
    }
  }
}

/* Nearest by search over the f16 values, ties to the even pattern. */
static void f16_rounding_is_to_nearest_even(void **state) {
  (void)state;
  for (uint32_t bits = 0; bits < 0x7bff; bits++) {
    double low = (double)egi_f16_to_f32((uint16_t)bits), high = (double)egi_f16_to_f32((uint16_t)(bits + 1));
    double middle = 0.5 * (low + high);
    assert_int_equal(egi_f32_to_f16((float)middle), bits % 2 == 0 ? bits : bits + 1);
    assert_int_equal(egi_f32_to_f16(nextafterf((float)middle, 0.0f)), bits);
    assert_int_equal(egi_f32_to_f16(nextafterf((float)middle, INFINITY)), bits + 1);
  }
  assert_int_equal(egi_f32_to_f16(65519.0f), 0x7bff);
  assert_int_equal(egi_f32_to_f16(65520.0f), 0x7c00);
  assert_int_equal(egi_f32_to_f16(-1e30f), 0xfc00);
}

static void bf16_rounding_is_to_nearest_even(void **state) {
  (void)state;
  assert_int_equal(egi_f32_to_bf16(1.0f), 0x3f80);
  assert_int_equal(egi_f32_to_bf16(1.00390625f), 0x3f80); /* tie, down to even */
  assert_int_equal(egi_f32_to_bf16(1.01171875f), 0x3f82); /* tie, up to even */
  assert_int_equal(egi_f32_to_bf16(INFINITY), 0x7f80);
  assert_int_equal(egi_f32_to_bf16(3.4e38f), 0x7f80);
  assert_true(isnan(egi_bf16_to_f32(egi_f32_to_bf16(NAN))));
}

/* Vectors of the Random123 distribution's known-answer file for philox4x32-10. */
static void philox_gives_the_known_answers(void **state) {
  (void)state;
  uint32_t words[4];
  const uint32_t zero[4] = {0, 0, 0, 0};
  egi_philox(0, zero, words);
  assert_int_equal(words[0], 0x6627e8d5u);
  assert_int_equal(words[1], 0xe169c58du);
  assert_int_equal(words[2], 0xbc57ac4cu);
  assert_int_equal(words[3], 0x9b00dbd8u);
  const uint32_t ones[4] = {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu};
  egi_philox(UINT64_MAX, ones, words);
  assert_int_equal(words[0], 0x408f276du);
  assert_int_equal(words[1], 0x41c83b0eu);
  assert_int_equal(words[2], 0xa20bc7c6u);
  assert_int_equal(words[3], 0x6d5451fdu);
}

static void random_numbers_have_their_moments(void **state) {
  (void)state;
  double sum = 0, square = 0, uniform = 0;
  enum { COUNT = 200000 };
  for (uint64_t i = 0; i < COUNT; i++) {
    double normal = egi_random_normal(5, 9, i), u = egi_random_uniform(5, 10, i);
    assert_true(u >= 0 && u < 1);
    sum += normal;
    square += normal * normal;
    uniform += u;
  }
  assert_true(fabs(sum / COUNT) < 0.01);
  assert_true(fabs(square / COUNT - 1) < 0.02);
  assert_true(fabs(uniform / COUNT - 0.5) < 0.005);
}

typedef struct visits {
  atomic_int count[1000];
  atomic_int n_wrong_workers;
  size_t n_workers;
} visits;

static void visit(void *argument, size_t index, size_t worker) {
  visits *seen = argument;
  atomic_fetch_add(&seen->count[index], 1);
  if (worker >= seen->n_workers) atomic_fetch_add(&seen->n_wrong_workers, 1);
}

static void pool_runs_each_task_once(void **state) {
  (void)state;
  for (int n_threads = 1; n_threads <= 5; n_threads++) {
    eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
    options.n_threads = n_threads;
    eg_context *ctx;
    static visits seen;
    assert_int_equal(eg_context_create(&options, &ctx), EG_OK);
    seen.n_workers = egi_pool_size(egi_context_pool(ctx));
    for (size_t round = 0; round < 300; round++) {
      size_t n_tasks = round % 7 == 0 ? 1000 : round % 5;
      memset(&seen.count, 0, sizeof seen.count);
      egi_pool_run(egi_context_pool(ctx), n_tasks, visit, &seen);
      for (size_t i = 0; i < 1000; i++) assert_int_equal(atomic_load(&seen.count[i]), i < n_tasks);
    }
    assert_int_equal(atomic_load(&seen.n_wrong_workers), 0);
    eg_context_destroy(ctx);
  }
}

static void a_failed_save_leaves_the_old_file(void **state) {
  (void)state;
  char directory[] = "engraft-test-XXXXXX", path[64], nested[64];
  eg_context *ctx;
  egi_file *file;
  egi_mapping mapping;
  assert_int_equal(eg_context_create(NULL, &ctx), EG_OK);
  assert_non_null(mkdtemp(directory));
  snprintf(path, sizeof path, "%s/file", directory);
  assert_int_equal(egi_file_create(ctx, path, &file), EG_OK);
  assert_int_equal(egi_file_write(file, "old", 3), EG_OK);
  assert_int_equal(egi_file_commit(file), EG_OK);
  assert_int_equal(egi_file_create(ctx, path, &file), EG_OK);
  assert_int_equal(egi_file_write(file, "newer", 5), EG_OK);
  egi_file_abandon(file);
  assert_int_equal(egi_mapping_open(ctx, path, &mapping), EG_OK);
  assert_int_equal(mapping.size_bytes, 3);
  assert_memory_equal(mapping.data, "old", 3);
  egi_mapping_close(&mapping);
  assert_int_equal(egi_mapping_open(ctx, directory, &mapping), EG_ERROR_IO);
  snprintf(nested, sizeof nested, "%s/a/b", directory);
  assert_int_equal(egi_make_directory(ctx, nested), EG_OK);
  assert_int_equal(egi_make_directory(ctx, nested), EG_OK);
  assert_int_equal(egi_make_directory(ctx, path), EG_ERROR_IO);
  rmdir(nested);
  snprintf(nested, sizeof nested, "%s/a", directory);
  rmdir(nested);
  unlink(path);
  assert_int_equal(rmdir(directory), 0); /* no temporary file is left */
  eg_context_destroy(ctx);
}

/* A rename would put a file in the place of a device. */
static void a_pipe_is_written_itself(void **state) {
  (void)state;
  char directory[] = "engraft-test-XXXXXX", path[64], bytes[8];
  eg_context *ctx;
  egi_file *file;
  egi_mapping mapping;
  struct stat info;
  assert_int_equal(eg_context_create(NULL, &ctx), EG_OK);
  assert_non_null(mkdtemp(directory));
  snprintf(path, sizeof path, "%s/pipe", directory);
  assert_int_equal(mkfifo(path, 0600), 0);
  assert_int_equal(egi_mapping_open(ctx, path, &mapping), EG_ERROR_IO); /* and does not wait for a writer */
  int reader = open(path, O_RDONLY | O_NONBLOCK);
  assert_true(reader >= 0);
  assert_int_equal(egi_file_create(ctx, path, &file), EG_OK);
  assert_int_equal(egi_file_write(file, "bytes", 5), EG_OK);
  assert_int_equal(egi_file_commit(file), EG_OK);
  assert_int_equal(read(reader, bytes, sizeof bytes), 5);
  assert_memory_equal(bytes, "bytes", 5);
  close(reader);
  assert_int_equal(stat(path, &info), 0);
  assert_true(S_ISFIFO(info.st_mode));
  assert_int_equal(egi_file_create(ctx, directory, &file), EG_ERROR_IO);
  unlink(path);
  assert_int_equal(rmdir(directory), 0);
  eg_context_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_f16_survives_f32),
      cmocka_unit_test(f16_rounding_is_to_nearest_even),
      cmocka_unit_test(bf16_rounding_is_to_nearest_even),
      cmocka_unit_test(philox_gives_the_known_answers),
      cmocka_unit_test(random_numbers_have_their_moments),
      cmocka_unit_test(pool_runs_each_task_once),
      cmocka_unit_test(a_failed_save_leaves_the_old_file),
      cmocka_unit_test(a_pipe_is_written_itself),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
