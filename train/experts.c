/* How the experts of a step were used: counted by the training graph, added up over micro-batches. */
#include "train/train.h"

#include <math.h>
#include <string.h>

static bool find_output(const egi_graph *graph, uint32_t *out_output) {
  for (uint32_t i = 0; i < graph->n_outputs; i++)
    if (strcmp(graph->values[graph->outputs[i]].name, EGI_OUTPUT_LOAD) == 0) {
      *out_output = i;
      return true;
    }
  return false;
}

eg_status egi_expert_load_prepare(eg_trainer *trainer) {
  static const char *const names[] = {"count_experts"};
  const egi_graph *graph = trainer->machine.graph;
  egi_expert_load *load = &trainer->load;
  int64_t sizes[3] = {0};
  uint32_t output = 0;
  if (trainer->dataset == NULL) return EG_OK; /* a graph to be written, not run */
  EG_TRY(egi_run_passes(trainer->machine.graph, names, 1, NULL));
  if (!find_output(graph, &output)) return EG_OK;
  const egi_value *value = &graph->values[graph->outputs[output]];
  for (int i = 0; i < 3; i++)
    if (!egi_dim_value(graph->module->dims, egi_dim_resolve(graph->module->dims, value->dims[i]), &sizes[i]))
      return egi_fail(trainer->ctx, EG_ERROR_INTERNAL, "the use of experts has an unknown size");
  load->n_layers = (size_t)sizes[0];
  load->n_experts = (size_t)sizes[2];
  uint32_t accumulate = trainer->options.accumulate;
  size_t all;
  if (!egi_size_multiply(load->n_layers * 2 * load->n_experts, accumulate, &all)) return EG_ERROR_MEMORY;
  load->batches = EGI_NEW(&trainer->arena, float, all);
  load->tickets = EGI_NEW(&trainer->arena, uint64_t, accumulate);
  load->sums = EGI_NEW(&trainer->arena, double, load->n_layers * 2 * load->n_experts);
  return load->batches != NULL && load->tickets != NULL && load->sums != NULL ? EG_OK : EG_ERROR_MEMORY;
}

void egi_expert_load_begin(eg_trainer *trainer) {
  trainer->load.n_tokens = 0;
  trainer->load.n_batches = 0;
}

eg_status egi_expert_load_add(eg_trainer *trainer, egi_lane *lane, uint64_t n_tokens) {
  egi_expert_load *load = &trainer->load;
  size_t n = load->n_layers * 2 * load->n_experts;
  uint32_t output = 0, batch = load->n_batches;
  if (n == 0 || !find_output(trainer->lanes.inputs.graph, &output)) return EG_OK;
  if (batch >= EGI_MAX_TICKETS / 4)
    EG_TRY(egi_session_collect(lane->session, load->tickets[batch - EGI_MAX_TICKETS / 4]));
  EG_TRY(egi_session_fetch_output(lane->session, output, load->batches + batch * n, n * sizeof *load->batches,
                                  &load->tickets[batch]));
  load->n_batches++;
  load->n_tokens += n_tokens;
  return EG_OK;
}

eg_status egi_expert_load_settle(const eg_trainer *trainer) {
  const egi_expert_load *load = &trainer->load;
  size_t n = load->n_layers * 2 * load->n_experts;
  for (size_t i = 0; i < n; i++) load->sums[i] = 0.0;
  for (uint32_t batch = 0; batch < load->n_batches; batch++) {
    EG_TRY(egi_session_collect(trainer->lanes.lanes[0].session, load->tickets[batch]));
    for (size_t i = 0; i < n; i++) load->sums[i] += (double)load->batches[batch * n + i];
  }
  return EG_OK;
}

/* As transformers' load_balancing_loss_func: over the tokens of all layers together, E · Σ of the share of choices that
 * fell on an expert times the mean probability that the router gave it. */
double egi_expert_load_balance(const eg_trainer *trainer) {
  const egi_expert_load *load = &trainer->load;
  double sum = 0.0, rows = (double)load->n_layers * (double)load->n_tokens;
  for (size_t e = 0; e < load->n_experts; e++) {
    double count = 0.0, probability = 0.0;
    for (size_t layer = 0; layer < load->n_layers; layer++) {
      count += load->sums[(2 * layer) * load->n_experts + e];
      probability += load->sums[(2 * layer + 1) * load->n_experts + e];
    }
    sum += count * probability;
  }
  return rows > 0.0 ? (double)load->n_experts * sum / (rows * rows) : 0.0;
}

size_t egi_trainer_expert_count(const eg_trainer *trainer, size_t *out_layers) {
  *out_layers = trainer->load.n_layers;
  return trainer->load.n_experts;
}

eg_status egi_trainer_expert_tokens(const eg_trainer *trainer, size_t layer, uint64_t *tokens, size_t n_experts) {
  const egi_expert_load *load = &trainer->load;
  if (layer >= load->n_layers || n_experts != load->n_experts)
    return egi_fail(trainer->ctx, EG_ERROR_ARGUMENT, "there are %zu mixtures of %zu experts", load->n_layers,
                    load->n_experts);
  EG_TRY(egi_expert_load_settle(trainer));
  for (size_t e = 0; e < n_experts; e++) tokens[e] = (uint64_t)(load->sums[2 * layer * n_experts + e] + 0.5);
  return EG_OK;
}
