/* Compares a graph's outputs on made-up input before and after a pass, in several sizes and patterns of padding. What
 * stands at padded positions may differ: nobody reads it. Called by the pipeline only. */
#include <math.h>
#include <string.h>

#include "passes/passes.h"

static const egi_sample_sizes samples[] = {
    {.batch = 2, .sequence = 5, .seed = 1},
    {.batch = 1, .sequence = 1, .seed = 2},
    {.batch = 2, .sequence = 7, .n_padded = 3, .seed = 3},
    {.batch = 3, .sequence = 6, .n_padded = 2, .is_left_padded = true, .seed = 4},
    {.batch = 1, .sequence = 33, .seed = 5},
};

typedef struct sample_run {
  egi_tensor *inputs, *outputs;
} sample_run;

struct egi_rewrite_check {
  egi_arena arena;
  uint32_t n_inputs, n_outputs;
  const char **names;                  /* of the outputs before the pass, then of the inputs */
  sample_run runs[EGI_COUNT(samples)]; /* outputs NULL: the graph cannot be run on that sample */
};

static bool has_state(const egi_graph *graph) {
  for (egi_value_id id = 1; id < graph->n_values; id++) {
    if (graph->values[id].kind == EGI_VALUE_STATE) return true;
  }
  return false;
}

/* Runs one sample; false when the graph refuses it. */
static bool run_sample(const egi_graph *graph, const egi_sample_sizes *sample, egi_arena *arena, sample_run *run) {
  const egi_module *module = graph->module;
  run->inputs = egi_sample_inputs(graph, sample, arena);
  egi_tensor *outputs = EGI_NEW(arena, egi_tensor, graph->n_outputs);
  if (!run->inputs || !outputs) return false;
  if (module->evaluator->graph(module->ctx, graph, run->inputs, arena, outputs) != EG_OK) return false;
  run->outputs = outputs;
  return true;
}

/* Inputs and outputs before the pass; false when the graph cannot be run. */
static bool run_before(egi_rewrite_check *check, const egi_graph *graph) {
  if (!graph->module->evaluator || has_state(graph)) return false;
  check->names = EGI_NEW(&check->arena, const char *, (size_t)graph->n_outputs + graph->n_inputs);
  if (!check->names) return false;
  for (uint32_t i = 0; i < graph->n_outputs + graph->n_inputs; i++) {
    bool is_output = i < graph->n_outputs;
    const char *name = graph->values[is_output ? graph->outputs[i] : graph->inputs[i - graph->n_outputs]].name;
    check->names[i] = egi_arena_copy_text(&check->arena, name, strlen(name));
    if (!check->names[i]) return false;
  }
  check->n_inputs = graph->n_inputs;
  check->n_outputs = graph->n_outputs;
  bool has_run = false;
  for (size_t i = 0; i < EGI_COUNT(samples); i++)
    has_run = run_sample(graph, &samples[i], &check->arena, &check->runs[i]) || has_run;
  return has_run;
}

eg_status egi_rewrite_check_begin(const egi_graph *graph, egi_rewrite_check **out_check) {
  egi_arena arena;
  egi_arena_init(&arena, graph->module->ctx, EGI_PURPOSE_GRAPH);
  egi_rewrite_check *check = EGI_NEW(&arena, egi_rewrite_check, 1);
  *out_check = NULL;
  if (!check) return EG_ERROR_MEMORY;
  check->arena = arena;
  if (run_before(check, graph)) {
    *out_check = check;
  } else {
    egi_log(graph->module->ctx, EG_LOG_INFO, "a rewrite is not verified: the graph cannot be run on its own");
    egi_arena last = check->arena; /* the arena holds the check itself */
    egi_arena_clear(&last);
  }
  return EG_OK;
}

void egi_rewrite_check_free(egi_rewrite_check *check) {
  if (!check) return;
  egi_arena last = check->arena; /* the arena holds the check itself */
  egi_arena_clear(&last);
}

/* Largest difference allowed, relative to the largest magnitude: rounding in another order. */
static double tolerance(eg_dtype before, eg_dtype after) {
  bool is_half = before == EG_DTYPE_F16 || before == EG_DTYPE_BF16 || after == EG_DTYPE_F16 || after == EG_DTYPE_BF16;
  return is_half ? 3e-2 : before == EG_DTYPE_F64 ? 1e-9 : 1e-4;
}

/* Whether element i belongs to a padded token: outputs that begin with the sample's batch and sequence. */
static bool is_padding(const egi_sample_sizes *sample, const egi_tensor *tensor, int64_t i) {
  if (sample->n_padded == 0 || tensor->rank < 2) return false;
  if (tensor->dims[0] != sample->batch || tensor->dims[1] != sample->sequence) return false;
  int64_t inner = egi_tensor_count(tensor) / (tensor->dims[0] * tensor->dims[1]);
  return egi_sample_is_padding(sample, i / inner / sample->sequence, i / inner % sample->sequence);
}

static bool is_close(const egi_sample_sizes *sample, const egi_tensor *before, const egi_tensor *after) {
  int64_t count = egi_tensor_count(before);
  if (before->rank != after->rank || count != egi_tensor_count(after)) return false;
  double largest = 0.0;
  for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(egi_tensor_number(before, i)));
  double limit = tolerance(before->dtype, after->dtype) * (isfinite(largest) ? largest : 1.0) + 1e-6;
  for (int64_t i = 0; i < count; i++) {
    double a = egi_tensor_number(before, i), b = egi_tensor_number(after, i);
    if (a == b || (isnan(a) && isnan(b)) || is_padding(sample, before, i)) continue;
    if (!(fabs(a - b) <= limit)) return false;
  }
  return true;
}

static eg_status compare_outputs(const egi_rewrite_check *check, size_t sample, const egi_graph *graph,
                                 const egi_tensor *outputs, const char *pass) {
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    const char *name = graph->values[graph->outputs[i]].name;
    for (uint32_t k = 0; k < check->n_outputs; k++) {
      if (strcmp(check->names[k], name) != 0) continue;
      if (!is_close(&samples[sample], &check->runs[sample].outputs[k], &outputs[i]))
        return egi_fail(graph->module->ctx, EG_ERROR_INTERNAL,
                        "pass %s changed output \"%s\" (batch %lld, sequence %lld, padding %lld)", pass, name,
                        (long long)samples[sample].batch, (long long)samples[sample].sequence,
                        (long long)samples[sample].n_padded);
    }
  }
  return EG_OK;
}

/* Where documents share a row: one whole document. */
static bool make_offsets(egi_rewrite_check *check, const egi_sample_sizes *sample, egi_tensor *out) {
  int32_t *offsets = EGI_NEW(&check->arena, int32_t, 2);
  if (offsets == NULL || sample->batch != 1 || sample->n_padded != 0) return false;
  offsets[1] = (int32_t)sample->sequence;
  *out = (egi_tensor){.data = offsets, .dtype = EG_DTYPE_I32, .rank = 1, .dims = {2}, .strides = {1}};
  return true;
}

/* A pass may drop inputs (caches that are bound empty) but adds none, offsets of documents aside: false for a graph
 * with others. */
static bool find_inputs(egi_rewrite_check *check, size_t sample, const egi_graph *graph, egi_tensor *inputs) {
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const char *name = graph->values[graph->inputs[i]].name;
    uint32_t k = 0;
    while (k < check->n_inputs && strcmp(check->names[check->n_outputs + k], name) != 0) k++;
    if (k == check->n_inputs && strcmp(name, EGI_INPUT_OFFSETS) == 0 &&
        make_offsets(check, &samples[sample], &inputs[i]))
      continue;
    if (k == check->n_inputs) return false;
    inputs[i] = check->runs[sample].inputs[k];
  }
  return true;
}

eg_status egi_rewrite_check_end(egi_rewrite_check *check, const egi_graph *graph, const char *pass) {
  if (!check || has_state(graph)) return EG_OK;
  for (size_t i = 0; i < EGI_COUNT(samples); i++) {
    if (!check->runs[i].outputs) continue;
    egi_tensor *outputs = EGI_NEW(&check->arena, egi_tensor, graph->n_outputs);
    egi_tensor *inputs = EGI_NEW(&check->arena, egi_tensor, graph->n_inputs);
    if (!inputs || !outputs) return EG_ERROR_MEMORY;
    if (!find_inputs(check, i, graph, inputs)) continue;
    EG_TRY(graph->module->evaluator->graph(graph->module->ctx, graph, inputs, &check->arena, outputs));
    EG_TRY(compare_outputs(check, i, graph, outputs, pass));
  }
  return EG_OK;
}
