/* Generation: logits of the last token, a choice among them, and again. */
#include "train/generate.h"

#include <math.h>
#include <string.h>

static eg_status check_tokens(const egi_generation *g, const int32_t *tokens, size_t n) {
  const egi_graph *graph = g->runner->machine.graph;
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

eg_status egi_generate_read(egi_generation *g, const egi_machine *machine, egi_session *session, int64_t row) {
  egi_tensor tensor;
  EG_TRY(egi_session_output(session, 0, &tensor));
  if (tensor.rank != 3 || tensor.dims[1] <= row || tensor.dims[2] != g->n_logits || tensor.dtype != EG_DTYPE_F32 ||
      (tensor.strides[2] != 1 && g->n_logits > 1))
    return egi_fail(g->runner->ctx, EG_ERROR_UNSUPPORTED, "the logits are not float [batch, sequence, vocabulary]");
  egi_device *device = egi_store_device(machine->store);
  const float *data = (const float *)tensor.data + row * tensor.strides[1];
  EG_TRY(machine->backend->synchronize(device));
  EG_TRY(machine->backend->download(device, g->logits, data, (size_t)g->n_logits * sizeof *g->logits));
  for (int64_t i = 0; i < g->n_logits; i++)
    if (isnan(g->logits[i])) return egi_fail(g->runner->ctx, EG_ERROR_DATA, "the logits are not numbers");
  return EG_OK;
}

static bool is_stop(const eg_generate_options *options, int32_t token) {
  for (size_t i = 0; i < options->n_stop_ids; i++)
    if (options->stop_ids[i] == token) return true;
  return false;
}

static eg_status begin(egi_generation *g, const int32_t *prompt_ids, size_t n_prompt, uint32_t max_tokens) {
  if (n_prompt > UINT32_MAX - max_tokens) return egi_fail(g->runner->ctx, EG_ERROR_ARGUMENT, "the prompt is too long");
  EG_TRY(check_tokens(g, prompt_ids, n_prompt));
  g->n_logits = egi_logits_count(g->runner->machine.graph);
  if (g->n_logits < 1) return egi_fail(g->runner->ctx, EG_ERROR_UNSUPPORTED, "the size of the vocabulary is not known");
  g->capacity = n_prompt + max_tokens;
  g->tokens = EGI_NEW(&g->arena, int32_t, g->capacity);
  g->logits = EGI_NEW(&g->arena, float, (size_t)g->n_logits);
  g->candidates = EGI_NEW(&g->arena, egi_candidate, (size_t)g->n_logits);
  if (g->tokens == NULL || g->logits == NULL || g->candidates == NULL) return EG_ERROR_MEMORY;
  memcpy(g->tokens, prompt_ids, n_prompt * sizeof *prompt_ids);
  g->n_tokens = n_prompt;
  EG_TRY(egi_generate_cached_begin(g));
  return g->is_cached ? EG_OK : egi_generate_whole_begin(g);
}

eg_status egi_runner_generate(eg_runner *runner, const int32_t *prompt_ids, size_t n_prompt,
                              const eg_generate_options *options, eg_token_function on_token, void *userdata) {
  egi_generation g = {.runner = runner};
  egi_arena_init(&g.arena, runner->ctx, EGI_PURPOSE_DATA);
  egi_arena_init(&g.lane_arena, runner->ctx, EGI_PURPOSE_DATA);
  egi_arena_init(&g.piece_arena, runner->ctx, EGI_PURPOSE_DATA);
  eg_status status = begin(&g, prompt_ids, n_prompt, options->max_tokens);
  for (uint32_t i = 0; i < options->max_tokens && status == EG_OK; i++) {
    status = g.is_cached ? egi_generate_cached_next(&g) : egi_generate_whole_next(&g);
    if (status != EG_OK) break;
    int32_t token = egi_sample(g.logits, (size_t)g.n_logits, options, g.n_tokens, g.candidates);
    if (is_stop(options, token)) break;
    g.tokens[g.n_tokens++] = token;
    if (on_token(userdata, token) != 0) break;
  }
  egi_generate_cached_end(&g);
  egi_generate_whole_end(&g);
  egi_arena_clear(&g.piece_arena);
  egi_arena_clear(&g.lane_arena);
  egi_arena_clear(&g.arena);
  return status;
}
