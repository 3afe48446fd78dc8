/* How loading and canonicalising grow with the number of nodes. Each case runs in a process of its own, so that its
 * peak memory is its own. usage: bench_import_scale OUT.json [N_NODES…]    (1000 10000 100000) */
#define _XOPEN_SOURCE 700

#include "bench/graphs.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 5 };

typedef struct figures {
  uint32_t n_nodes;
  double load_s, rewrite_s;
  long peak_kb;
} figures;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void check(eg_context *ctx, eg_status status) {
  if (status == EG_OK) return;
  fprintf(stderr, "bench_import_scale: %s\n", eg_context_error(ctx));
  exit(1);
}

static int compare(const void *a, const void *b) {
  double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

static double median(double *values) {
  qsort(values, ROUNDS, sizeof(*values), compare);
  return values[ROUNDS / 2];
}

static void measure(const char *path, figures *out) {
  double load[ROUNDS], rewrite[ROUNDS];
  eg_context *ctx = NULL;
  if (eg_context_create(NULL, &ctx) != EG_OK) exit(1);
  for (unsigned i = 0; i < ROUNDS; i++) {
    eg_model *model = NULL;
    double begin = now();
    check(ctx, eg_model_load(ctx, path, NULL, &model));
    double loaded = now();
    check(ctx, eg_model_rewrite(model, NULL, 0));
    rewrite[i] = now() - loaded;
    load[i] = loaded - begin;
    eg_model_destroy(model);
  }
  eg_context_destroy(ctx);
  out->load_s = median(load);
  out->rewrite_s = median(rewrite);
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  out->peak_kb = usage.ru_maxrss;
}

/* In a child, which hands its figures back through a pipe. */
static figures measure_apart(bench_graph_kind kind, uint32_t n_nodes) {
  static const char path[] = "import-scale.onnx";
  figures result = {0};
  int ends[2];
  uint32_t written = 0;
  if (pipe(ends) != 0) exit(1);
  for (unsigned part = 0; part < 2; part++) { /* one child writes the file, one reads it */
    pid_t child = fork();
    if (child < 0) exit(1);
    if (child == 0 && part == 0) {
      eg_context *ctx = NULL;
      if (eg_context_create(NULL, &ctx) != EG_OK) exit(1);
      check(ctx, bench_write_graph(ctx, kind, n_nodes, path, &written));
      _exit(write(ends[1], &written, sizeof(written)) != (ssize_t)sizeof(written)); /* leaves OUT.json to the parent */
    }
    if (child == 0) {
      measure(path, &result);
      _exit(write(ends[1], &result, sizeof(result)) != (ssize_t)sizeof(result));
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) exit(1);
    void *into = part == 0 ? (void *)&written : (void *)&result;
    size_t size = part == 0 ? sizeof(written) : sizeof(result);
    if (read(ends[0], into, size) != (ssize_t)size) exit(1);
  }
  close(ends[0]);
  close(ends[1]);
  unlink(path);
  result.n_nodes = written;
  return result;
}

int main(int n_arguments, char **arguments) {
  static const char *const names[] = {"plain", "transformer"};
  static char *usual[] = {"1000", "10000", "100000"};
  if (n_arguments < 2) {
    fprintf(stderr, "usage: bench_import_scale OUT.json [N_NODES...]\n");
    return 2;
  }
  char **sizes = n_arguments > 2 ? arguments + 2 : usual;
  int n_sizes = n_arguments > 2 ? n_arguments - 2 : 3;
  FILE *out = fopen(arguments[1], "w");
  if (out == NULL) return 1;
  fprintf(out,
          "{\n \"load\": \"read, import, infer shapes\",\n \"rewrite\": \"canonicalise and recognise\",\n \"rounds\": "
          "%d,\n \"cases\": [",
          ROUNDS);
  for (int kind = 0; kind < 2; kind++)
    for (int i = 0; i < n_sizes; i++) {
      figures f = measure_apart((bench_graph_kind)kind, (uint32_t)strtoul(sizes[i], NULL, 10));
      const char *format =
          "%s\n  {\"graph\": \"%s\", \"nodes\": %u, \"load_s\": %.4f, \"rewrite_s\": %.4f, \"peak_mb\": %.1f}";
      const char *comma = kind + i > 0 ? "," : "";
      fprintf(out, format, comma, names[kind], f.n_nodes, f.load_s, f.rewrite_s, (double)f.peak_kb / 1024);
      printf("%-12s %7u nodes: load %.3f s, rewrite %.3f s, peak %.1f MB\n", names[kind], f.n_nodes, f.load_s,
             f.rewrite_s, (double)f.peak_kb / 1024);
      fflush(stdout);
    }
  fprintf(out, "\n ]\n}\n");
  return fclose(out) != 0;
}
