/* Runs a fuzz target over files, without libFuzzer: the corpus as an ordinary test.
 * usage: fuzz_replay TARGET FILE|DIRECTORY… ; fails when an input takes longer than ten seconds, and when there is
 * none. */
#define _XOPEN_SOURCE 700

#include "fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define MAX_SECONDS 10.0

typedef struct replay {
  const fuzz_target *target;
  unsigned n_inputs, n_accepted, n_failed;
  double slowest;
  size_t peak_bytes;
} replay;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static uint8_t *read_bytes(const char *path, size_t size) {
  FILE *file = fopen(path, "rb");
  uint8_t *bytes = malloc(size ? size : 1); /* exactly as long: a read past the end is seen */
  if (file == NULL || bytes == NULL || fread(bytes, 1, size, file) != size) {
    fprintf(stderr, "%s: cannot be read\n", path);
    exit(1);
  }
  fclose(file);
  return bytes;
}

static void replay_file(replay *r, const char *path, size_t size) {
  fuzz_result result;
  uint8_t *bytes = read_bytes(path, size);
  printf("%s\n", path);
  fflush(stdout); /* a crash names its input */
  double begin = now();
  r->target->run(bytes, size, NULL, &result);
  double seconds = now() - begin;
  free(bytes);
  r->n_inputs++;
  r->n_accepted += result.is_accepted;
  if (!result.is_accepted) printf("  refused: %s\n", result.error);
  if (!(seconds <= MAX_SECONDS)) {
    printf("  %.1f seconds\n", seconds);
    r->n_failed++;
  }
  if (seconds > r->slowest) r->slowest = seconds;
  if (result.peak_bytes > r->peak_bytes) r->peak_bytes = result.peak_bytes;
}

static void replay_path(replay *r, const char *path) {
  struct stat status;
  if (stat(path, &status) != 0) {
    fprintf(stderr, "%s: is not there\n", path);
    exit(1);
  }
  if (!S_ISDIR(status.st_mode)) {
    replay_file(r, path, (size_t)status.st_size);
    return;
  }
  struct dirent **entries = NULL;
  int count = scandir(path, &entries, NULL, alphasort);
  for (int i = 0; i < count; i++) {
    char child[4096];
    snprintf(child, sizeof(child), "%s/%s", path, entries[i]->d_name);
    if (entries[i]->d_name[0] != '.') replay_path(r, child);
    free(entries[i]);
  }
  free(entries);
}

int main(int n_arguments, char **arguments) {
  replay r = {.target = n_arguments > 2 ? fuzz_find_target(arguments[1]) : NULL};
  if (r.target == NULL) {
    fprintf(stderr, "usage: fuzz_replay onnx|text|safetensors|jsonl|json FILE|DIRECTORY...\n");
    return 2;
  }
  for (int i = 2; i < n_arguments; i++) replay_path(&r, arguments[i]);
  printf("%u inputs, %u accepted, slowest %.2f s, most memory %.1f MB\n", r.n_inputs, r.n_accepted, r.slowest,
         (double)r.peak_bytes / 1e6);
  return r.n_inputs == 0 || r.n_failed > 0;
}
