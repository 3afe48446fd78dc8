/* Good models, damaged one fault at a time, are refused with one line or loaded; none crashes, hangs or eats memory.
 * Each goes through the onnx target in this process and through `engraft inspect`. usage: fuzz_test_damage ENGRAFT
 * COUNT MODEL… ; the same arguments damage the same way. */
#define _XOPEN_SOURCE 700

#include "damage.h"
#include "fuzz.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_SECONDS 10.0
#define MAX_RESIDENT_KB (1L << 20)

typedef struct model {
  const char *path;
  uint8_t *bytes;
  size_t size;
} model;

typedef struct driver {
  const char *engraft;
  const char *directory;
  unsigned n_refused, n_loaded, n_failed;
  double slowest;
  long most_kb;
} driver;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void die(const char *what) {
  perror(what);
  exit(1);
}

static void read_model(const char *path, model *out) {
  struct stat status;
  FILE *file = fopen(path, "rb");
  if (file == NULL || stat(path, &status) != 0) die(path);
  *out = (model){path, malloc((size_t)status.st_size), (size_t)status.st_size};
  if (out->bytes == NULL || fread(out->bytes, 1, out->size, file) != out->size) die(path);
  fclose(file);
}

static void write_bytes(const char *path, const uint8_t *bytes, size_t size) {
  FILE *file = fopen(path, "wb");
  if (file == NULL || fwrite(bytes, 1, size, file) != size || fclose(file) != 0) die(path);
}

/* The scratch directory, with what external data may point at. */
static void make_surroundings(void) {
  static const uint8_t external[DAMAGE_EXTERNAL_BYTES];
  write_bytes(DAMAGE_EXTERNAL, external, sizeof(external));
  unlink(DAMAGE_EXTERNAL_LINK);
  if (symlink(DAMAGE_EXTERNAL, DAMAGE_EXTERNAL_LINK) != 0) die(DAMAGE_EXTERNAL_LINK);
}

/* Runs `engraft inspect damaged.onnx`; the exit code, or 128 and the signal. */
static int run_inspect(driver *t, double *out_seconds) {
  double begin = now();
  pid_t child = fork();
  if (child < 0) die("fork");
  if (child == 0) {
    int out = open("out", O_WRONLY | O_CREAT | O_TRUNC, 0600), err = open("err", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    setenv("ASAN_OPTIONS", "exitcode=99", 1);
    setenv("UBSAN_OPTIONS", "exitcode=99", 1);
    alarm((unsigned)(3 * MAX_SECONDS)); /* what hangs is killed, and fails */
    if (out < 0 || err < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) _exit(98);
    execl(t->engraft, t->engraft, "inspect", "damaged.onnx", (char *)NULL);
    _exit(98);
  }
  int status = 0;
  struct rusage usage;
  if (waitpid(child, &status, 0) != child || getrusage(RUSAGE_CHILDREN, &usage) != 0) die("waitpid");
  *out_seconds = now() - begin;
  bool is_new_maximum = usage.ru_maxrss > t->most_kb; /* of all children so far */
  t->most_kb = usage.ru_maxrss;
  if (is_new_maximum && usage.ru_maxrss > MAX_RESIDENT_KB) return 97;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* What stands on stderr: exactly one line when refused, nothing but warnings when loaded. */
static bool is_message_fine(bool is_refused, char *line, size_t capacity) {
  FILE *file = fopen("err", "rb");
  if (file == NULL) die("err");
  size_t length = fread(line, 1, capacity - 1, file);
  fclose(file);
  line[length] = '\0';
  if (strlen(line) != length) return false;
  if (!is_refused) return length == 0 || strncmp(line, "engraft: warning", 16) == 0;
  return length > 0 && strchr(line, '\n') == line + length - 1 && strncmp(line, "engraft: ", 9) == 0;
}

static void check_one(driver *t, const model *from, unsigned kind, uint64_t seed, const uint8_t *bytes, size_t size) {
  fuzz_result result;
  double seconds, inspected;
  char line[400000];
  write_bytes("damaged.onnx", bytes, size); /* before the run: it is what a crash leaves behind */
  const uint8_t *copy = memcpy(malloc(size ? size : 1), bytes, size);
  double begin = now();
  fuzz_find_target("onnx")->run(copy, size, ".", &result);
  seconds = now() - begin;
  free((void *)(uintptr_t)copy);
  int code = run_inspect(t, &inspected);
  if (inspected > seconds) seconds = inspected;
  if (seconds > t->slowest) t->slowest = seconds;
  bool is_fine = (code == 0 || code == 1) && is_message_fine(code == 1, line, sizeof(line)) && seconds <= MAX_SECONDS;
  t->n_refused += code == 1;
  t->n_loaded += code == 0;
  if (is_fine) return;
  t->n_failed++;
  printf("FAILED: %s, %s, seed %llu: exit code %d, %.1f s: %.2000s\n", from->path, damage_kind_name(kind),
         (unsigned long long)seed, code, seconds, line);
  char name[64];
  snprintf(name, sizeof(name), "failed-%llu.onnx", (unsigned long long)seed);
  write_bytes(name, bytes, size);
}

/* One file of the kind, with the first seed from `seed` on that damages it; false when none of many does. */
static bool damage_one(driver *t, eg_context *ctx, const model *from, unsigned kind, uint64_t seed) {
  bool is_done = false;
  for (unsigned i = 0; i < 50 && !is_done; i++) {
    egi_arena arena;
    size_t size = 0;
    egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
    const uint8_t *bytes = damage_file(&arena, from->bytes, from->size, kind, seed + i * UINT64_C(1000003), &size);
    is_done = bytes != NULL;
    if (is_done) check_one(t, from, kind, seed + i * UINT64_C(1000003), bytes, size);
    egi_arena_clear(&arena);
  }
  return is_done;
}

int main(int n_arguments, char **arguments) {
  enum { MOST_MODELS = 64 };
  static model models[MOST_MODELS];
  eg_context *ctx = NULL;
  char directory[] = "damage-XXXXXX";
  if (n_arguments < 4 || n_arguments > 3 + MOST_MODELS) {
    fprintf(stderr, "usage: fuzz_test_damage ENGRAFT COUNT MODEL...\n");
    return 2;
  }
  driver t = {.engraft = arguments[1], .directory = directory};
  unsigned n_models = (unsigned)n_arguments - 3, count = (unsigned)strtoul(arguments[2], NULL, 10);
  for (unsigned i = 0; i < n_models; i++) read_model(arguments[3 + i], &models[i]);
  if (eg_context_create(NULL, &ctx) != EG_OK || mkdtemp(directory) == NULL || chdir(directory) != 0) die(directory);
  make_surroundings();
  unsigned n_files = 0;
  for (unsigned i = 0; n_files < count && i < 2 * count; i++)
    n_files += damage_one(&t, ctx, &models[(i / damage_kind_count() + i) % n_models], i % damage_kind_count(), i);
  printf("%u files: %u refused, %u loaded, %u failed; slowest %.2f s, most memory %ld MB\n", n_files, t.n_refused,
         t.n_loaded, t.n_failed, t.slowest, t.most_kb >> 10);
  eg_context_destroy(ctx);
  for (unsigned i = 0; i < n_models; i++) free(models[i].bytes);
  return n_files < count || t.n_failed > 0 || t.n_refused == 0 || t.n_loaded == 0;
}
