/* The modules that one Linear computes at once: their names stand on the node (name_modules), their rows on the Split
 * that takes its result apart. */
#include <string.h>

#include "passes/passes.h"

/* The path of a part: the layer's own with another last name. */
static const char *part_path(egi_arena *arena, const char *path, const char *name, size_t length) {
  const char *dot = strrchr(path, '.');
  return egi_arena_format(arena, "%.*s%.*s", dot ? (int)(dot - path) + 1 : 0, path, (int)length, name);
}

static unsigned count_names(const char *names) {
  unsigned count = 1;
  for (const char *at = names; *at; at++) count += *at == ' ';
  return count;
}

/* The only user of the layer's result, when it is a Split along the last axis; 0: none. */
static eg_status find_split(const egi_graph *graph, egi_arena *arena, egi_uses *uses, egi_node_id id,
                            egi_node_id *out_split) {
  egi_value_id y = graph->nodes[id].outputs[0];
  *out_split = 0;
  if (!uses->start) EG_TRY(egi_graph_uses(graph, arena, uses));
  if (egi_graph_is_output(graph, y) || uses->start[y + 1] - uses->start[y] != 1) return EG_OK;
  egi_node_id user = uses->list[uses->start[y]];
  int64_t axis = egi_node_int(&graph->nodes[user], "axis", 0);
  if (graph->nodes[user].op == EGI_OP_Split && (axis == -1 || axis == graph->values[y].rank - 1)) *out_split = user;
  return EG_OK;
}

static bool last_size(const egi_graph *graph, egi_value_id value, int64_t *out_size) {
  const egi_value *row = &graph->values[value];
  return value != 0 && row->rank > 0 && egi_dim_value(graph->module->dims, row->dims[row->rank - 1], out_size);
}

eg_status egi_find_parts(const egi_graph *graph, egi_arena *arena, egi_uses *uses, egi_node_id linear,
                         egi_rows_part **out_parts, egi_node_id *out_split) {
  const egi_node *node = &graph->nodes[linear];
  const char *names = egi_node_string(node, EGI_PARTS, "");
  egi_node_id split = 0;
  *out_split = 0;
  if (names[0] == '\0' || !node->scope) return EG_OK;
  EG_TRY(find_split(graph, arena, uses, linear, &split));
  const egi_node *parted = &graph->nodes[split];
  if (split == 0 || parted->n_outputs != count_names(names)) return EG_OK;
  egi_rows_part *parts = EGI_NEW(arena, egi_rows_part, parted->n_outputs);
  if (!parts) return EG_ERROR_MEMORY;
  for (unsigned i = 0; i < parted->n_outputs; i++) {
    size_t length = strcspn(names, " ");
    if (!last_size(graph, parted->outputs[i], &parts[i].rows)) return EG_OK;
    parts[i].name = part_path(arena, node->scope, names, length);
    if (!parts[i].name) return EG_ERROR_MEMORY;
    names += names[length] ? length + 1 : length;
  }
  *out_parts = parts;
  *out_split = split;
  return EG_OK;
}
