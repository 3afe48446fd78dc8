/* A head that keeps the last position alone, as exporters prune it for generation: it cannot be trained, since no token
 * but the last has a loss. Told where something else is wrong with a file as well, and by append_loss. */
#include <string.h>

#include "passes/passes.h"

static egi_value_id logits_of(const egi_graph *graph) {
  egi_value_id found = 0;
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    const egi_value *value = &graph->values[graph->outputs[i]];
    if (!egi_dtype_is_float(value->dtype) || (value->rank != 2 && value->rank != 3)) continue;
    if (strcmp(value->name, "logits") == 0) return graph->outputs[i];
    if (found == 0) found = graph->outputs[i];
  }
  return found;
}

/* Whether the second dim is one number where the tokens' is another, or is not there. */
static bool lacks_positions(const egi_graph *graph, egi_value_id logits, egi_value_id tokens) {
  egi_dims *dims = graph->module->dims;
  const egi_value *value = &graph->values[logits], *ids = &graph->values[tokens];
  int64_t rows = 0, expected = 0;
  if (value->rank == 2) /* [batch, vocabulary] */
    return egi_dim_resolve(dims, value->dims[0]) == egi_dim_resolve(dims, ids->dims[0]) &&
           egi_dim_value(dims, egi_dim_resolve(dims, value->dims[1]), &rows) && rows > 1;
  bool is_number = egi_dim_value(dims, egi_dim_resolve(dims, value->dims[1]), &rows);
  bool is_known = egi_dim_value(dims, egi_dim_resolve(dims, ids->dims[1]), &expected);
  return is_number && rows == 1 && !(is_known && expected == 1);
}

bool egi_has_pruned_head(const egi_graph *graph, egi_arena *arena, const char **out_message) {
  egi_value_id logits = logits_of(graph), tokens = egi_graph_find_value(graph, "input_ids");
  if (logits == 0 || tokens == 0 || graph->values[tokens].rank != 2 || !lacks_positions(graph, logits, tokens))
    return false;
  *out_message = egi_arena_format(arena,
                                  "output \"%s\": the head keeps the last position alone (pruned for generation) "
                                  "and cannot be trained; export it whole",
                                  graph->values[logits].name);
  return *out_message != NULL;
}
