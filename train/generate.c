/* Plain generation: the whole sequence is computed again for each token, padded to a planned length, so that one plan
 * serves many tokens. The mask hides the padding; only the row of the last real token is read. */
#include "train/train.h"

#include <math.h>
#include <string.h>

/* Lengths that plans are made for: multiples of this, an eighth of the length where that is more. */
enum { LENGTH_STEP = 64 };

typedef struct generation {
  eg_runner *runner;
  egi_arena arena;
  int32_t *tokens; /* [capacity] */
  size_t n_tokens, capacity;
  egi_lanes lanes;
  egi_arena lane_arena; /* of the current plan */
  int64_t n_logits;
  float *logits;
  egi_candidate *candidates;
} generation;

/* The graph with nothing but the logits: caches and hidden states are not computed. */
static eg_status make_graph(eg_runner *runner) {
  static const char *const names[] = {"eliminate_dead"};
  egi_value_id logits;
  if (runner->generation != NULL) return EG_OK;
  EG_TRY(egi_find_logits(runner->machine.graph, &logits));
  EG_TRY(egi_module_copy_graph(runner->machine.module, runner->machine.graph, "generate", &runner->generation));
  runner->generation->n_outputs = 0;
  EG_TRY(egi_graph_add_output(runner->generation, logits));
  return egi_run_passes(runner->generation, names, EGI_COUNT(names), NULL);
}

static eg_status check_tokens(const generation *g, const int32_t *tokens, size_t n) {
  const egi_graph *graph = g->runner->generation;
  egi_inputs inputs;
  egi_vocabulary vocabulary;
  egi_arena arena;
  egi_arena_init(&arena, g->runner->ctx, EGI_PURPOSE_DATA);
  eg_status status = egi_inputs_find(graph, &arena, &inputs);
  if (status == EG_OK) status = egi_vocabulary_find(graph, &inputs, EG_LOSS_NEXT_TOKEN, &vocabulary);
  egi_arena_clear(&arena);
  EG_TRY(status);
  for (size_t i = 0; i < n; i++)
    if (tokens[i] < 0 || (vocabulary.n_embeddings > 0 && tokens[i] >= vocabulary.n_embeddings))
      return egi_fail(g->runner->ctx, EG_ERROR_DATA, "prompt position %zu: token %d is outside the vocabulary of %lld",
                      i + 1, tokens[i], (long long)vocabulary.n_embeddings);
  return EG_OK;
}

static uint32_t planned_length(size_t n, size_t capacity) {
  size_t step = n / 8 / LENGTH_STEP * LENGTH_STEP;
  if (step < LENGTH_STEP) step = LENGTH_STEP;
  size_t length = (n + step - 1) / step * step;
  return (uint32_t)(length < capacity ? length : capacity);
}

/* Makes sure that the lane holds the tokens. A model with a fixed length has one lane for all. */
static eg_status prepare_lane(generation *g) {
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

/* The logits of the last real token, as floats. */
static eg_status read_logits(generation *g) {
  egi_tensor tensor;
  const egi_machine *machine = &g->runner->machine;
  EG_TRY(egi_session_output(g->lanes.lanes[0].session, 0, &tensor));
  int64_t row = (int64_t)g->n_tokens - 1;
  if (tensor.rank != 3 || tensor.dims[1] <= row || tensor.dims[2] != g->n_logits || tensor.dtype != EG_DTYPE_F32 ||
      (tensor.strides[2] != 1 && g->n_logits > 1))
    return egi_fail(g->runner->ctx, EG_ERROR_UNSUPPORTED, "the logits are not float [batch, sequence, vocabulary]");
  const float *data = (const float *)tensor.data + row * tensor.strides[1];
  EG_TRY(machine->backend->download(egi_store_device(machine->store), g->logits, data,
                                    (size_t)g->n_logits * sizeof *g->logits));
  for (int64_t i = 0; i < g->n_logits; i++)
    if (isnan(g->logits[i])) return egi_fail(g->runner->ctx, EG_ERROR_DATA, "the logits are not numbers");
  return EG_OK;
}

static eg_status next_token(generation *g, const eg_generate_options *options, int32_t *out_token) {
  EG_TRY(prepare_lane(g));
  uint64_t offsets[2] = {0, g->n_tokens};
  egi_documents document = {.tokens = g->tokens, .offsets = offsets, .n_documents = 1, .n_tokens = g->n_tokens};
  egi_batch_range range = {0, 1, (uint32_t)g->n_tokens, NULL};
  egi_lane *lane;
  EG_TRY(egi_lanes_fill(&g->lanes, &document, &range, &lane));
  EG_TRY(egi_session_run(lane->session));
  EG_TRY(read_logits(g));
  *out_token = egi_sample(g->logits, (size_t)g->n_logits, options, g->n_tokens, g->candidates);
  return EG_OK;
}

static bool is_stop(const eg_generate_options *options, int32_t token) {
  for (size_t i = 0; i < options->n_stop_ids; i++)
    if (options->stop_ids[i] == token) return true;
  return false;
}

static eg_status begin(generation *g, const int32_t *prompt_ids, size_t n_prompt, uint32_t max_tokens) {
  if (n_prompt > UINT32_MAX - max_tokens) return egi_fail(g->runner->ctx, EG_ERROR_ARGUMENT, "the prompt is too long");
  EG_TRY(make_graph(g->runner));
  EG_TRY(check_tokens(g, prompt_ids, n_prompt));
  g->n_logits = egi_runner_vocabulary(g->runner);
  if (g->n_logits < 1) return egi_fail(g->runner->ctx, EG_ERROR_UNSUPPORTED, "the size of the vocabulary is not known");
  g->capacity = n_prompt + max_tokens;
  g->tokens = EGI_NEW(&g->arena, int32_t, g->capacity);
  g->logits = EGI_NEW(&g->arena, float, (size_t)g->n_logits);
  g->candidates = EGI_NEW(&g->arena, egi_candidate, (size_t)g->n_logits);
  if (g->tokens == NULL || g->logits == NULL || g->candidates == NULL) return EG_ERROR_MEMORY;
  memcpy(g->tokens, prompt_ids, n_prompt * sizeof *prompt_ids);
  g->n_tokens = n_prompt;
  return EG_OK;
}

eg_status egi_runner_generate(eg_runner *runner, const int32_t *prompt_ids, size_t n_prompt,
                              const eg_generate_options *options, eg_token_function on_token, void *userdata) {
  generation g = {.runner = runner};
  egi_arena_init(&g.arena, runner->ctx, EGI_PURPOSE_DATA);
  egi_arena_init(&g.lane_arena, runner->ctx, EGI_PURPOSE_DATA);
  eg_status status = begin(&g, prompt_ids, n_prompt, options->max_tokens);
  for (uint32_t i = 0; i < options->max_tokens && status == EG_OK; i++) {
    int32_t token;
    status = next_token(&g, options, &token);
    if (status != EG_OK || is_stop(options, token)) break;
    g.tokens[g.n_tokens++] = token;
    if (on_token(userdata, token) != 0) break;
  }
  egi_lanes_close(&g.lanes);
  egi_arena_clear(&g.lane_arena);
  egi_arena_clear(&g.arena);
  return status;
}
