/* How import and rewriting grow with the number of nodes: graphs of three sizes of each kind, as a trace writes them,
 * imported, canonicalised and recognised, each in a process of its own. usage: bench_scale OUT.json COMMIT DATE MACHINE
 */
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
  fprintf(stderr, "bench_scale: %s\n", eg_context_error(ctx));
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
  struct rusage usage;
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
  getrusage(RUSAGE_SELF, &usage);
  out->peak_kb = usage.ru_maxrss;
}

/* One child writes the file, one reads it, so that peak memory is that of reading and rewriting. */
static figures measure_apart(bench_graph_kind kind, uint32_t n_nodes) {
  static const char path[] = "scale.onnx";
  figures result = {0};
  int ends[2];
  if (pipe(ends) != 0) exit(1);
  for (unsigned part = 0; part < 2; part++) {
    pid_t child = fork();
    int status = 0;
    if (child < 0) exit(1);
    if (child == 0) {
      eg_context *ctx = NULL;
      figures own = {0};
      if (eg_context_create(NULL, &ctx) != EG_OK) exit(1);
      if (part == 0) check(ctx, bench_write_graph(ctx, kind, n_nodes, path, &own.n_nodes));
      if (part == 1) measure(path, &own);
      _exit(write(ends[1], &own, sizeof own) != (ssize_t)sizeof own);
    }
    if (waitpid(child, &status, 0) != child || status != 0) exit(1);
    figures read_back;
    if (read(ends[0], &read_back, sizeof read_back) != (ssize_t)sizeof read_back) exit(1);
    if (part == 1) read_back.n_nodes = result.n_nodes;
    result = read_back;
  }
  close(ends[0]);
  close(ends[1]);
  unlink(path);
  return result;
}

int main(int n_arguments, char **arguments) {
  static const struct {
    const char *name;
    bench_graph_kind kind;
    bool is_layers; /* sizes are layers, not nodes */
    uint32_t sizes[3];
  } cases[] = {{"plain", BENCH_GRAPH_PLAIN, false, {1000, 10000, 100000}},
               {"decoder", BENCH_GRAPH_TRANSFORMER, false, {1000, 10000, 100000}},
               {"decoder", BENCH_GRAPH_TRANSFORMER, true, {9, 18, 36}},
               {"128 experts a layer", BENCH_GRAPH_EXPERTS, true, {12, 24, 48}}};
  if (n_arguments != 5) {
    fprintf(stderr, "usage: bench_scale OUT.json COMMIT DATE MACHINE\n");
    return 2;
  }
  FILE *out = fopen(arguments[1], "w");
  if (out == NULL) return 1;
  fprintf(out,
          "{\n \"command\": \"bench_scale OUT.json COMMIT DATE MACHINE\",\n \"commit\": \"%s\",\n \"date\": "
          "\"%s\",\n \"machine\": \"%s\",\n \"load\": \"read, import, infer shapes\",\n \"rewrite\": "
          "\"canonicalise and recognise\",\n \"rounds\": %d,\n \"cases\": [",
          arguments[2], arguments[3], arguments[4], ROUNDS);
  for (size_t i = 0; i < EGI_COUNT(cases); i++)
    for (size_t k = 0; k < 3; k++) {
      uint32_t layer = bench_layer_nodes(cases[i].kind), size = cases[i].sizes[k];
      figures f = measure_apart(cases[i].kind, cases[i].is_layers ? size * layer : size);
      fprintf(out, "%s\n  {\"graph\": \"%s\", \"nodes\": %u, \"load_s\": %.4f, \"rewrite_s\": %.4f, \"peak_mb\": %.1f}",
              i + k > 0 ? "," : "", cases[i].name, f.n_nodes, f.load_s, f.rewrite_s, (double)f.peak_kb / 1024);
      printf("%-20s %7u nodes: load %.3f s, rewrite %.3f s, peak %.1f MB\n", cases[i].name, f.n_nodes, f.load_s,
             f.rewrite_s, (double)f.peak_kb / 1024);
      fflush(stdout);
    }
  fprintf(out, "\n ]\n}\n");
  return fclose(out) != 0;
}
