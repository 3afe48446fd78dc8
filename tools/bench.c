/* engraft bench: the time of a forward pass and of a training step on one row of --tokens random tokens, and the memory
 * they take. Medians after a warm-up; the step is the whole of it, optimizer included. */
#include "tools/train.h"

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

/* Peak resident memory of the process so far, mapped weights included. */
static uint64_t peak_bytes(void) {
  struct rusage usage;
  return getrusage(RUSAGE_SELF, &usage) == 0 ? (uint64_t)usage.ru_maxrss * 1024 : 0;
}

static void print_json(const tool *t, const measurement *forward, const measurement *step) {
  double tokens = (double)t->values[OPTION_TOKENS].count;
  printf("{\"tokens\":%.0f,\"threads\":%zu,\"forward_s\":%.6f,\"forward_min_s\":%.6f,\"forward_max_s\":%.6f,"
         "\"step_s\":%.6f,\"step_min_s\":%.6f,\"step_max_s\":%.6f,\"runs\":%llu,\"step_over_forward\":%.3f,"
         "\"tokens_per_s\":%.1f,\"peak_bytes\":%llu}\n",
         tokens, egi_pool_size(egi_context_pool(t->ctx)), forward->median, forward->minimum, forward->maximum,
         step->median, step->minimum, step->maximum, (unsigned long long)step->count, step->median / forward->median,
         tokens / step->median, (unsigned long long)peak_bytes());
}

static void print_text(const tool *t, const measurement *forward, const measurement *step) {
  double tokens = (double)t->values[OPTION_TOKENS].count;
  printf("forward  %.2f ms (%.2f to %.2f), %.0f tokens/s\n", 1e3 * forward->median, 1e3 * forward->minimum,
         1e3 * forward->maximum, tokens / forward->median);
  printf("step     %.2f ms (%.2f to %.2f), %.0f tokens/s, %.2f forwards\n", 1e3 * step->median, 1e3 * step->minimum,
         1e3 * step->maximum, tokens / step->median, step->median / forward->median);
  printf("%llu runs each after %d, %zu threads, peak memory %.1f MiB\n", (unsigned long long)step->count, (int)N_WARM,
         egi_pool_size(egi_context_pool(t->ctx)), (double)peak_bytes() / 1048576.0);
}

typedef struct bench {
  eg_model *model;
  eg_dataset *dataset;
  eg_runner *runner;
  eg_trainer *trainer;
  int64_t *ids;    /* [tokens] */
  int32_t *labels; /* the same */
  double *seconds; /* [steps] */
} bench;

static eg_status make_row(tool *t, bench *b) {
  size_t n_tokens = (size_t)t->values[OPTION_TOKENS].count;
  int64_t vocabulary = egi_runner_vocabulary(b->runner);
  if (vocabulary < 1) return egi_fail(t->ctx, EG_ERROR_UNSUPPORTED, "the size of the vocabulary is not known");
  b->ids = EGI_NEW(&t->arena, int64_t, n_tokens);
  b->labels = EGI_NEW(&t->arena, int32_t, n_tokens);
  b->seconds = EGI_NEW(&t->arena, double, (size_t)t->values[OPTION_STEPS].count);
  if (b->ids == NULL || b->labels == NULL || b->seconds == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < n_tokens; i++) {
    b->ids[i] = (int64_t)(egi_random_uniform(t->values[OPTION_SEED].count, 0, i) * (double)vocabulary);
    b->labels[i] = (int32_t)b->ids[i];
  }
  const eg_document row = {.input_ids = b->labels, .labels = NULL, .n_tokens = (uint32_t)n_tokens};
  return eg_dataset_create(t->ctx, &row, 1, &b->dataset);
}

static eg_status run(tool *t, bench *b) {
  eg_runner_options runner_options = EG_RUNNER_OPTIONS_INIT;
  eg_trainer_options trainer_options = EG_TRAINER_OPTIONS_INIT;
  measurement forward, step;
  EG_TRY(tool_load_model(t, &b->model));
  runner_options.no_fuse = tool_is_given(t, OPTION_NO_FUSE);
  runner_options.device = tool_text(t, OPTION_DEVICE);
  runner_options.dtype = tool_dtype(t, OPTION_DTYPE);
  tool_quant quant = tool_quantisation(t);
  runner_options.quant = quant.type;
  runner_options.quant_block = quant.block;
  runner_options.double_quant = quant.is_nested;
  runner_options.quant_head = quant.has_head;
  EG_TRY(eg_runner_create(b->model, &runner_options, &b->runner));
  EG_TRY(make_row(t, b));
  EG_TRY(measure_forward(t, b->runner, b->ids, b->seconds, &forward));
  EG_TRY(training_options(t, &trainer_options));
  EG_TRY(eg_trainer_create(b->model, b->dataset, &trainer_options, &b->trainer));
  EG_TRY(measure_steps(t, b->trainer, b->seconds, &step));
  if (tool_is_given(t, OPTION_JSON))
    print_json(t, &forward, &step);
  else
    print_text(t, &forward, &step);
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
