/* Which values tokens decide, whether an operator on their way mixes tokens, and which other values stand beside them.
 * One walk over the nodes in execution order. Called by cache_metadata. */
#include <string.h>

#include "passes/packing.h"

static eg_status refuse(egi_packing *p, egi_node_id id, const char *reason) {
  const egi_node *node = &p->graph->nodes[id];
  const char *op = node->op_name ? node->op_name : egi_op_get(node->op)->name;
  const char *name = node->name;
  if ((!name || name[0] == '\0') && node->n_outputs > 0) name = p->graph->values[node->outputs[0]].name;
  p->reason = egi_arena_format(p->arena, "node \"%s\" (%s): %s", name, op, reason);
  return p->reason ? EG_OK : EG_ERROR_MEMORY;
}

/* The sum of log-probabilities is over all tokens, whatever document they are of. */
static void mark_loss(egi_packing *p) {
  egi_value_id value = egi_graph_find_value(p->graph, EGI_OUTPUT_LOSS);
  for (int hop = 0; hop < 2 && value != 0 && p->graph->values[value].kind == EGI_VALUE_NODE; hop++) {
    egi_node_id id = p->graph->values[value].producer;
    p->is_loss[id] = true;
    value = p->graph->nodes[id].n_inputs > 0 ? p->graph->nodes[id].inputs[0] : 0;
  }
}

static eg_status add_table(egi_packing *p, egi_value_id value, bool is_valid) {
  if (p->table[value] != 0) {
    p->tables[p->table[value] - 1].is_valid |= is_valid;
    return EG_OK;
  }
  EG_TRY(EGI_GROW(p->arena, &p->tables, p->n_tables, &p->tables_capacity));
  p->tables[p->n_tables++] = (egi_position_table){.value = value, .axis = -1, .is_valid = is_valid};
  p->table[value] = p->n_tables;
  return EG_OK;
}

/* What of a node follows tokens, what something else than weights. A lookup that positions decide is beside the tokens
 * already: the positions are what is replaced, not the rows that they choose. */
static bool mark(egi_packing *p, const egi_node *node) {
  bool is_token = false, is_varied = false, is_size = node->op == EGI_OP_Shape || node->op == EGI_OP_Size;
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    egi_value_id input = node->inputs[i];
    is_token = is_token || (input != 0 && p->is_token[input] && !is_size);
    is_varied = is_varied || (input != 0 && (p->is_varied[input] || is_size));
  }
  bool is_lookup = node->op == EGI_OP_Gather && p->is_varied[node->inputs[1]] && !p->is_varied[node->inputs[0]];
  if (is_lookup && p->graph->values[node->inputs[1]].rank > 0 && p->graph->values[node->inputs[0]].rank > 1)
    is_token = is_token || egi_packing_axis(p, node->inputs[1]).axis >= 0;
  for (uint16_t i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] == 0) continue;
    p->is_token[node->outputs[i]] = is_token;
    p->is_varied[node->outputs[i]] = is_varied || is_token || node->n_inputs == 0;
  }
  return is_token;
}

static eg_status visit(egi_packing *p, egi_node_id id) {
  const egi_node *node = &p->graph->nodes[id];
  bool is_attention = node->op == EGI_OP_MaskedAttention;
  if (!mark(p, node) || p->is_loss[id]) return EG_OK;
  const char *reason = egi_packing_check_node(p, id);
  if (reason) return refuse(p, id, reason);
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    egi_value_id input = node->inputs[i];
    if (input == 0 || p->is_token[input] || !p->is_varied[input]) continue;
    if (!egi_packing_is_shape(node->op, i)) EG_TRY(add_table(p, input, is_attention && i == 3));
  }
  return EG_OK;
}

/* Inputs that hold tokens, or a label of each. */
static eg_status begin(egi_packing *p) {
  const egi_graph *graph = p->graph;
  p->is_token = EGI_NEW(p->arena, bool, graph->n_values);
  p->is_varied = EGI_NEW(p->arena, bool, graph->n_values);
  p->table = EGI_NEW(p->arena, uint32_t, graph->n_values);
  p->is_loss = EGI_NEW(p->arena, bool, graph->n_nodes);
  if (!p->is_token || !p->is_varied || !p->table || !p->is_loss) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    egi_value_id id = graph->inputs[i];
    p->is_varied[id] = true;
    p->is_token[id] = id == p->tokens || strcmp(graph->values[id].name, EGI_INPUT_LABELS) == 0;
  }
  mark_loss(p);
  return EG_OK;
}

eg_status egi_packing_walk(egi_packing *p) {
  EG_TRY(begin(p));
  for (egi_node_id id = 1; id < p->graph->n_nodes && !p->reason; id++)
    if (p->graph->nodes[id].op != EGI_OP_NONE) EG_TRY(visit(p, id));
  return EG_OK;
}
