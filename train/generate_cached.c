/* Generation with caches: the prompt goes through in pieces, then one token a run; each run reads the keys and values
 * of those before from states that live between runs (passes/cache_keys.c). Plans are made for a few lengths of a piece
 * and kept; a piece that is shorter is filled up behind its end with tokens that nobody sees: their rows of the caches
 * are written again before a query stands there. */
#include "train/generate.h"

#include <string.h>

static const uint32_t piece_lengths[EGI_GENERATE_PIECES] = {1, 16, 64, 256, 1024};

eg_status egi_generate_cached_begin(egi_generation *g) {
  egi_machine *machine = NULL;
  EG_TRY(egi_runner_choose_decoder(g->runner, (int64_t)g->capacity, &machine));
  g->is_cached = machine != NULL;
  if (machine == NULL) return EG_OK;
  uint32_t longest = piece_lengths[EGI_GENERATE_PIECES - 1];
  g->numbers = EGI_NEW(&g->arena, int64_t, longest);
  g->positions = EGI_NEW(&g->arena, int32_t, longest);
  return g->numbers != NULL && g->positions != NULL ? EG_OK : EG_ERROR_MEMORY;
}

void egi_generate_cached_end(egi_generation *g) {
  for (size_t i = 0; i < EGI_GENERATE_PIECES; i++) {
    egi_session_destroy(g->pieces[i].session);
    egi_plan_destroy(g->pieces[i].plan);
  }
}

/* The shortest that holds n tokens, else the longest. */
static size_t choose_piece(size_t n) {
  size_t index = 0;
  while (index + 1 < EGI_GENERATE_PIECES && piece_lengths[index] < n) index++;
  return index;
}

static bool is_named(const egi_graph *graph, uint32_t input, const char *name) {
  return strcmp(graph->values[graph->inputs[input]].name, name) == 0;
}

static eg_status open_piece(egi_generation *g, size_t index) {
  egi_piece *piece = &g->pieces[index];
  const egi_machine *machine = &g->runner->decoder;
  const egi_graph *graph = machine->graph;
  egi_tensor inputs[3];
  egi_plan_options options = {0};
  egi_binding *bindings = NULL;
  if (piece->session != NULL) return EG_OK;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const egi_value *value = &graph->values[graph->inputs[i]];
    inputs[i] = (egi_tensor){.dtype = value->dtype, .rank = value->rank};
    for (int d = 0; d < value->rank; d++) inputs[i].dims[d] = 1;
    if (!is_named(graph, i, EGI_INPUT_ROW)) inputs[i].dims[value->rank - 1] = piece_lengths[index];
    egi_tensor_set_contiguous(&inputs[i]);
  }
  EG_TRY(egi_bindings_solve(graph, inputs, &g->piece_arena, &bindings, &options.n_bindings));
  options.bindings = bindings;
  EG_TRY(egi_plan_create(g->runner->ctx, graph, machine->backend, &options, &piece->plan));
  return egi_session_create(machine->store, piece->plan, machine->scratch, &piece->session);
}

/* Tokens in the type of the input that takes them. */
static eg_status set_numbers(egi_generation *g, egi_session *session, uint32_t input, size_t count) {
  const egi_graph *graph = g->runner->decoder.graph;
  size_t size_bytes = egi_numbers_convert(g->numbers, count, graph->values[graph->inputs[input]].dtype, g->numbers);
  return egi_session_set_input(session, input, g->numbers, size_bytes);
}

static eg_status fill_piece(egi_generation *g, egi_session *session, size_t n, size_t length) {
  const egi_graph *graph = g->runner->decoder.graph;
  int32_t last = (int32_t)g->runner->decoder_positions - 1;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    if (is_named(graph, i, EGI_INPUT_ROW_POSITIONS)) {
      for (size_t k = 0; k < length; k++) {
        int64_t position = (int64_t)(g->n_done + k);
        g->positions[k] = position < last ? (int32_t)position : last;
      }
      EG_TRY(egi_session_set_input(session, i, g->positions, length * sizeof *g->positions));
    } else if (is_named(graph, i, EGI_INPUT_ROW)) {
      g->numbers[0] = (int64_t)n - 1;
      EG_TRY(set_numbers(g, session, i, 1));
    } else {
      for (size_t k = 0; k < length; k++) g->numbers[k] = g->tokens[g->n_done + (k < n ? k : n - 1)];
      EG_TRY(set_numbers(g, session, i, length));
    }
  }
  return EG_OK;
}

eg_status egi_generate_cached_next(egi_generation *g) {
  egi_session *session = NULL;
  if (g->n_tokens > (size_t)g->runner->decoder_positions)
    return egi_fail(g->runner->ctx, EG_ERROR_ARGUMENT, "the model takes at most %lld tokens",
                    (long long)g->runner->decoder_positions);
  while (g->n_done < g->n_tokens) {
    size_t left = g->n_tokens - g->n_done, index = choose_piece(left), length = piece_lengths[index];
    size_t n = left < length ? left : length;
    EG_TRY(open_piece(g, index));
    session = g->pieces[index].session;
    EG_TRY(fill_piece(g, session, n, length));
    EG_TRY(egi_session_run(session));
    g->n_done += n;
  }
  return egi_generate_read(g, &g->runner->decoder, session, 0);
}
