/* engraft bench: the time of a training step on rows of --tokens random tokens, documents of --sequence, and the memory
 * it takes; on the CPU of a forward pass too, on a device where the time goes, beside what the device can do. Medians
 * after a warm-up; the step is the whole of it, optimizer included. */
#include "tools/train.h"

#include <string.h>
#include <sys/resource.h>

enum { N_WARM = 3 };

typedef struct measurement {
  double median, minimum, maximum; /* seconds */
  uint64_t count;
} measurement;

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void summarise(double *seconds, uint64_t count, measurement *out) {
  qsort(seconds, (size_t)count, sizeof *seconds, compare);
  out->median = count % 2 == 1 ? seconds[count / 2] : 0.5 * (seconds[count / 2 - 1] + seconds[count / 2]);
  out->minimum = seconds[0];
  out->maximum = seconds[count - 1];
  out->count = count;
}

static eg_status measure_forward(tool *t, eg_runner *runner, const int64_t *ids, double *seconds, measurement *out) {
  uint64_t count = t->values[OPTION_STEPS].count;
  const eg_tensor input = {.name = "input_ids",
                           .dtype = EG_DTYPE_I64,
                           .rank = 2,
                           .dims = {1, (int64_t)t->values[OPTION_TOKENS].count},
                           .data = ids};
  for (uint64_t i = 0; i < N_WARM + count; i++) {
    const eg_tensor *outputs;
    size_t n_outputs;
    double start = egi_clock();
    EG_TRY(eg_runner_run(runner, &input, 1, &outputs, &n_outputs));
    if (i >= N_WARM) seconds[i - N_WARM] = egi_clock() - start;
  }
  summarise(seconds, count, out);
  return EG_OK;
}

static eg_status measure_steps(tool *t, eg_trainer *trainer, double *seconds, measurement *out) {
  uint64_t count = t->values[OPTION_STEPS].count;
  for (uint64_t i = 0; i < N_WARM + count; i++) {
    eg_step_report report;
    EG_TRY(eg_trainer_step(trainer, &report));
    if (i >= N_WARM) seconds[i - N_WARM] = report.seconds;
  }
  summarise(seconds, count, out);
  return EG_OK;
}

/* ---- results ---------------------------------------------------------------------------------------------------- */

/* Peak resident memory of the process so far, mapped weights included. */
static uint64_t peak_bytes(void) {
  struct rusage usage;
  return getrusage(RUSAGE_SELF, &usage) == 0 ? (uint64_t)usage.ru_maxrss * 1024 : 0;
}

typedef struct bench {
  eg_model *model;
  eg_dataset *dataset;
  eg_runner *runner;
  eg_trainer *trainer;
  int64_t *ids;    /* [tokens] */
  int32_t *labels; /* the same */
  double *seconds; /* [steps] */
  measurement forward, step;
  uint64_t device_bytes; /* in use, as the driver says, with everything allocated; 0: the host */
  egi_ceilings ceilings;
  egi_step_profile profile;
} bench;

static void print_number(const char *name, double value) {
  printf(",\"%s\":%.9g", name, value);
}

static void print_measurement(const char *name, const measurement *m) {
  printf(",\"%s_s\":%.6f,\"%s_min_s\":%.6f,\"%s_max_s\":%.6f", name, m->median, name, m->minimum, name, m->maximum);
}

/* Operators by what they took; `floor_s` is the longer of their products and of their bytes at the ceilings. */
static void print_operators(const bench *b) {
  const char *separator = "";
  printf(",\"operators\":[");
  for (size_t i = 0; i < EGI_PROFILED; i++) {
    const egi_plan_costs *costs = &b->profile.costs[i];
    for (uint32_t r = 0; r < costs->n_rows; r++) {
      const egi_plan_cost_row *row = &costs->rows[r];
      double bytes = row->cost.read_bytes + row->cost.written_bytes;
      double by_flops = row->cost.flops / b->ceilings.flops_per_s, by_bytes = bytes / b->ceilings.bytes_per_s;
      uint32_t op = 0;
      while (op < EGI_OP_COUNT && (op <= EGI_OP_UNKNOWN || strcmp(egi_op_get((egi_op)op)->name, row->op) != 0 ||
                                   b->profile.measured[i].counts[op] == 0))
        op++;
      printf("%s{\"op\":\"%s\",\"count\":%u,\"seconds\":%.6g,\"floor_s\":%.6g,\"flops\":%.6g,\"bytes\":%.6g}",
             separator, row->op, row->count, b->profile.measured[i].seconds[op],
             by_flops > by_bytes ? by_flops : by_bytes, row->cost.flops, bytes);
      separator = ",";
    }
  }
  printf("]");
}

static void print_json(const tool *t, const bench *b) {
  double tokens = (double)t->values[OPTION_TOKENS].count;
  printf("{\"tokens\":%.0f,\"threads\":%zu", tokens, egi_pool_size(egi_context_pool(t->ctx)));
  if (b->runner != NULL) {
    print_measurement("forward", &b->forward);
    print_number("step_over_forward", b->step.median / b->forward.median);
  }
  print_measurement("step", &b->step);
  printf(",\"runs\":%llu,\"tokens_per_s\":%.1f,\"peak_bytes\":%llu", (unsigned long long)b->step.count,
         tokens / b->step.median, (unsigned long long)peak_bytes());
  if (b->device_bytes > 0) {
    double flops = b->profile.costs[0].total.flops + b->profile.costs[1].total.flops;
    printf(",\"device_bytes\":%llu", (unsigned long long)b->device_bytes);
    print_number("flops_per_s", flops / b->step.median);
    print_number("ceiling_flops_per_s", b->ceilings.flops_per_s);
    print_number("ceiling_bytes_per_s", b->ceilings.bytes_per_s);
    print_number("profiled_s", b->profile.seconds);
    print_operators(b);
  }
  printf("}\n");
}

static void print_text(const tool *t, const bench *b) {
  double tokens = (double)t->values[OPTION_TOKENS].count;
  const measurement *forward = &b->forward, *step = &b->step;
  if (b->runner != NULL)
    printf("forward  %.2f ms (%.2f to %.2f), %.0f tokens/s\n", 1e3 * forward->median, 1e3 * forward->minimum,
           1e3 * forward->maximum, tokens / forward->median);
  printf("step     %.2f ms (%.2f to %.2f), %.0f tokens/s", 1e3 * step->median, 1e3 * step->minimum, 1e3 * step->maximum,
         tokens / step->median);
  if (b->runner != NULL) printf(", %.2f forwards", step->median / forward->median);
  printf("\n%llu runs each after %d, %zu threads, peak memory %.1f MiB", (unsigned long long)step->count, (int)N_WARM,
         egi_pool_size(egi_context_pool(t->ctx)), (double)peak_bytes() / 1048576.0);
  if (b->device_bytes > 0) printf(", on the device %.1f MiB", (double)b->device_bytes / 1048576.0);
  printf("\n");
}

/* ---- measuring -------------------------------------------------------------------------------------------------- */

/* Documents of --sequence tokens that fill a row. */
static eg_status make_rows(tool *t, bench *b) {
  size_t n_tokens = (size_t)t->values[OPTION_TOKENS].count, length = (size_t)t->values[OPTION_SEQUENCE].count;
  int64_t vocabulary = egi_logits_count(b->model->module->graphs[0]);
  if (vocabulary < 1) return egi_fail(t->ctx, EG_ERROR_UNSUPPORTED, "the size of the vocabulary is not known");
  if (length == 0 || length > n_tokens) length = n_tokens;
  size_t n_documents = n_tokens / length;
  b->ids = EGI_NEW(&t->arena, int64_t, n_tokens);
  b->labels = EGI_NEW(&t->arena, int32_t, n_tokens);
  b->seconds = EGI_NEW(&t->arena, double, (size_t)t->values[OPTION_STEPS].count);
  eg_document *rows = EGI_NEW(&t->arena, eg_document, n_documents);
  if (b->ids == NULL || b->labels == NULL || b->seconds == NULL || rows == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < n_tokens; i++) {
    b->ids[i] = (int64_t)(egi_random_uniform(t->values[OPTION_SEED].count, 0, i) * (double)vocabulary);
    b->labels[i] = (int32_t)b->ids[i];
  }
  for (size_t i = 0; i < n_documents; i++)
    rows[i] = (eg_document){.input_ids = b->labels + i * length, .labels = NULL, .n_tokens = (uint32_t)length};
  return eg_dataset_create(t->ctx, rows, n_documents, &b->dataset);
}

static eg_status measure_runner(tool *t, bench *b) {
  eg_runner_options options = EG_RUNNER_OPTIONS_INIT;
  tool_quant quant = tool_quantisation(t);
  options.no_fuse = tool_is_given(t, OPTION_NO_FUSE);
  options.device = tool_text(t, OPTION_DEVICE);
  options.dtype = tool_dtype(t, OPTION_DTYPE);
  options.quant = quant.type;
  options.quant_block = quant.block;
  options.double_quant = quant.is_nested;
  options.quant_head = quant.has_head;
  EG_TRY(eg_runner_create(b->model, &options, &b->runner));
  return measure_forward(t, b->runner, b->ids, b->seconds, &b->forward);
}

static eg_status used_memory(eg_context *ctx, const egi_backend *backend, uint64_t *out_bytes) {
  egi_device_facts facts;
  EG_TRY(backend->describe(ctx, 0, &facts));
  *out_bytes = facts.memory_bytes - facts.free_bytes;
  return EG_OK;
}

/* What was in use before belongs to others. */
static eg_status measure_trainer(tool *t, bench *b) {
  eg_trainer_options options = EG_TRAINER_OPTIONS_INIT;
  const egi_backend *backend;
  uint64_t before = 0;
  EG_TRY(egi_backend_find(t->ctx, tool_text(t, OPTION_DEVICE), &backend));
  EG_TRY(training_options(t, &options));
  if (!backend->is_host) EG_TRY(used_memory(t->ctx, backend, &before));
  EG_TRY(eg_trainer_create(b->model, b->dataset, &options, &b->trainer));
  EG_TRY(measure_steps(t, b->trainer, b->seconds, &b->step));
  if (backend->is_host) return EG_OK;
  EG_TRY(used_memory(t->ctx, backend, &b->device_bytes));
  b->device_bytes -= before;
  EG_TRY(egi_trainer_profile(b->trainer, &t->arena, &b->profile));
  eg_trainer_destroy(b->trainer);
  b->trainer = NULL;
  return egi_measure_ceilings(t->ctx, backend, &b->ceilings);
}

static eg_status run(tool *t, bench *b) {
  EG_TRY(tool_load_model(t, &b->model));
  EG_TRY(make_rows(t, b));
  if (strcmp(tool_text(t, OPTION_DEVICE), "cpu") == 0) EG_TRY(measure_runner(t, b));
  EG_TRY(measure_trainer(t, b));
  if (tool_is_given(t, OPTION_JSON))
    print_json(t, b);
  else
    print_text(t, b);
  return EG_OK;
}

int tool_bench(tool *t) {
  bench b = {0};
  if (t->values[OPTION_STEPS].count == 0) return tool_fail_usage(t, "--steps is missing");
  if (t->values[OPTION_TOKENS].count < 2 || t->values[OPTION_TOKENS].count > UINT32_MAX)
    return tool_fail_usage(t, "--tokens is out of range");
  eg_status status = run(t, &b);
  eg_trainer_destroy(b.trainer);
  eg_runner_destroy(b.runner);
  eg_dataset_destroy(b.dataset);
  eg_model_destroy(b.model);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
