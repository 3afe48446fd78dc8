/* Which outputs of a graph speak of whole documents: a row of numbers for each, or what an embedding is made of. */
#include <string.h>

#include "passes/passes.h"

static bool is_float_of_rank(const egi_graph *graph, egi_value_id id, int rank) {
  return egi_dtype_is_float(graph->values[id].dtype) && graph->values[id].rank == rank;
}

/* Of these names the first that is there, else the only one of that rank; 0: none, or several. */
static egi_value_id likely_output(const egi_graph *graph, int rank, const char *const *names, size_t n_names) {
  egi_value_id found = 0;
  unsigned count = 0;
  for (size_t n = 0; n < n_names; n++)
    for (uint32_t i = 0; i < graph->n_outputs; i++) {
      egi_value_id output = graph->outputs[i];
      if (is_float_of_rank(graph, output, rank) && strcmp(graph->values[output].name, names[n]) == 0) return output;
    }
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    if (!is_float_of_rank(graph, graph->outputs[i], rank)) continue;
    found = graph->outputs[i];
    count++;
  }
  return count == 1 ? found : 0;
}

egi_value_id egi_find_document_logits(const egi_graph *graph) {
  static const char *const names[] = {"logits", "scores"};
  egi_value_id tokens = 0, found = likely_output(graph, 2, names, EGI_COUNT(names));
  if (found == 0) found = likely_output(graph, 1, names, EGI_COUNT(names));
  if (found == 0 || egi_find_token_input(graph, &tokens) != EG_OK) return found;
  egi_dims *dims = graph->module->dims;
  int64_t rows = 0, batch = 0;
  bool is_number = egi_dim_value(dims, egi_dim_resolve(dims, graph->values[found].dims[0]), &rows);
  bool is_known = egi_dim_value(dims, egi_dim_resolve(dims, graph->values[tokens].dims[0]), &batch);
  return is_number == is_known && rows == batch ? found : 0;
}

/* Names of embeddings, the best first; the last one is of BERT's next-sentence task. */
static const char *const embedding_names[] = {"sentence_embedding", "sentence_embeddings", "embeddings",
                                              "embedding",          "text_embeds",         "pooler_output"};

bool egi_is_embedding_name(const char *name) {
  for (size_t i = 0; i < EGI_COUNT(embedding_names); i++)
    if (strcmp(name, embedding_names[i]) == 0) return true;
  return false;
}

/* BERT's pooler_output is an embedding only where nothing else is. */
eg_status egi_find_embedding(const egi_graph *graph, eg_pooling pooling, egi_value_id *out_value) {
  static const char *const names[] = {"last_hidden_state", "token_embeddings", "hidden_states"};
  egi_value_id hidden = likely_output(graph, 3, names, EGI_COUNT(names));
  egi_value_id pooled = likely_output(graph, 2, embedding_names, EGI_COUNT(embedding_names));
  const char *name = pooled != 0 ? graph->values[pooled].name : "";
  bool is_named = egi_is_embedding_name(name) && strcmp(name, "pooler_output") != 0;
  bool wants_pooled = pooling == EG_POOLING_OUTPUT || (pooling == EG_POOLING_AUTO && (is_named || hidden == 0));
  *out_value = wants_pooled ? pooled : hidden;
  if (*out_value != 0) return EG_OK;
  return egi_fail(graph->module->ctx, EG_ERROR_DATA,
                  wants_pooled ? "the model has no output that is an embedding: float [batch, size], or "
                                 "\"last_hidden_state\" [batch, sequence, size]"
                               : "the model has no output \"last_hidden_state\" [batch, sequence, size] to pool");
}

bool egi_loss_is_of_documents(eg_loss loss) {
  return loss != EG_LOSS_AUTO && loss != EG_LOSS_NEXT_TOKEN && loss != EG_LOSS_TOKEN;
}
