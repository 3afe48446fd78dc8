/* Generation without caches: the whole row is computed again for each token, padded to a planned length, so that one
 * plan serves many tokens. The mask hides the padding; only the row of the last real token is read. */
#include "train/generate.h"

/* Lengths that plans are made for: multiples of this, an eighth of the length where that is more. */
enum { LENGTH_STEP = 64 };

/* The graph with nothing but the logits: caches and hidden states are not computed. */
eg_status egi_generate_whole_begin(egi_generation *g) {
  static const char *const names[] = {"eliminate_dead"};
  eg_runner *runner = g->runner;
  egi_value_id logits;
  if (runner->generation != NULL) return EG_OK;
  EG_TRY(egi_find_logits(runner->machine.graph, &logits));
  EG_TRY(egi_module_copy_graph(runner->machine.module, runner->machine.graph, "generate", &runner->generation));
  runner->generation->n_outputs = 0;
  EG_TRY(egi_graph_add_output(runner->generation, logits));
  return egi_run_passes(runner->generation, names, EGI_COUNT(names), NULL);
}

void egi_generate_whole_end(egi_generation *g) {
  egi_lanes_close(&g->lanes);
}

static uint32_t planned_length(size_t n, size_t capacity) {
  size_t step = n / 8 / LENGTH_STEP * LENGTH_STEP;
  if (step < LENGTH_STEP) step = LENGTH_STEP;
  size_t length = (n + step - 1) / step * step;
  return (uint32_t)(length < capacity ? length : capacity);
}

/* Makes sure that the lane holds the tokens. A model with a fixed length has one lane for all. */
static eg_status prepare_lane(egi_generation *g) {
  egi_inputs inputs;
  if (g->lanes.count > 0 && g->lanes.lanes[0].bucket.sequence >= g->n_tokens) return EG_OK;
  egi_lanes_close(&g->lanes);
  egi_arena_clear(&g->lane_arena);
  EG_TRY(egi_inputs_find(g->runner->generation, &g->lane_arena, &inputs));
  egi_bucket bucket = {1, planned_length(g->n_tokens, g->capacity)};
  if (inputs.fixed_batch > 0) bucket.batch = inputs.fixed_batch;
  int64_t n_positions = egi_positions_count(g->runner->generation, &inputs);
  if (n_positions > 0 && bucket.sequence > n_positions) bucket.sequence = (uint32_t)n_positions;
  if (inputs.fixed_sequence > 0) bucket.sequence = inputs.fixed_sequence;
  if (bucket.sequence < g->n_tokens)
    return egi_fail(g->runner->ctx, EG_ERROR_ARGUMENT, "the model takes at most %u tokens", bucket.sequence);
  egi_machine *machine = &g->runner->machine;
  EG_TRY(egi_lanes_plan(&g->lanes, g->runner->generation, machine->backend, &bucket, 1, &g->lane_arena));
  return egi_lanes_open(&g->lanes, machine->store, machine->scratch);
}

eg_status egi_generate_whole_next(egi_generation *g) {
  EG_TRY(prepare_lane(g));
  uint64_t offsets[2] = {0, g->n_tokens};
  egi_documents document = {.tokens = g->tokens, .offsets = offsets, .n_documents = 1, .n_tokens = g->n_tokens};
  egi_batch_range range = {0, 1, (uint32_t)g->n_tokens, NULL};
  egi_lane *lane;
  EG_TRY(egi_lanes_fill(&g->lanes, &document, &range, &lane));
  EG_TRY(egi_session_run(lane->session));
  return egi_generate_read(g, &g->runner->machine, lane->session, (int64_t)g->n_tokens - 1);
}
