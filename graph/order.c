/* Order and use of nodes: topological sort with clean-up, and lists of consumers. Everything is linear in the graph
 * and iterative. */
#include "graph/graph.h"

/* ---- topological sort ----------------------------------------------------------------------------------------- */

/* Depth-first from each node in the old order: a graph in order stays as it is, and a node that was appended moves to
 * just before its first consumer. */
typedef struct sorter {
  const egi_graph *graph;
  uint8_t *colour;      /* by node: 0 new, 1 on the stack, 2 done */
  uint16_t *next_input; /* by node */
  egi_node_id *stack, *order;
  uint32_t depth, count;
} sorter;

static egi_node_id producer_of(const egi_graph *graph, egi_value_id v) {
  if (v == 0 || v >= graph->n_values || graph->values[v].kind != EGI_VALUE_NODE) return 0;
  return graph->values[v].producer;
}

static eg_status visit(sorter *sort, egi_node_id root) {
  sort->depth = 0;
  sort->stack[sort->depth++] = root;
  sort->colour[root] = 1;
  while (sort->depth > 0) {
    egi_node_id n = sort->stack[sort->depth - 1];
    const egi_node *node = &sort->graph->nodes[n];
    if (sort->next_input[n] == node->n_inputs) {
      sort->colour[n] = 2;
      sort->order[sort->count++] = n;
      sort->depth--;
      continue;
    }
    egi_node_id producer = producer_of(sort->graph, node->inputs[sort->next_input[n]++]);
    if (producer == 0 || sort->colour[producer] == 2) continue;
    if (sort->colour[producer] == 1)
      return egi_fail_node(sort->graph, producer, EG_ERROR_FORMAT, "its result depends on itself: nodes form a cycle");
    sort->colour[producer] = 1;
    sort->stack[sort->depth++] = producer;
  }
  return EG_OK;
}

static eg_status sort_nodes(const egi_graph *graph, egi_arena *arena, sorter *out_sort) {
  sorter sort = {.graph = graph};
  sort.colour = EGI_NEW(arena, uint8_t, graph->n_nodes);
  sort.next_input = EGI_NEW(arena, uint16_t, graph->n_nodes);
  sort.stack = EGI_NEW(arena, egi_node_id, graph->n_nodes);
  sort.order = EGI_NEW(arena, egi_node_id, graph->n_nodes);
  if (sort.colour == NULL || sort.next_input == NULL || sort.stack == NULL || sort.order == NULL)
    return EG_ERROR_MEMORY;
  for (egi_node_id n = 1; n < graph->n_nodes; n++)
    if (graph->nodes[n].op != EGI_OP_NONE && sort.colour[n] == 0) EG_TRY(visit(&sort, n));
  *out_sort = sort;
  return EG_OK;
}

static eg_status apply_order(egi_graph *graph, egi_arena *arena, const sorter *sort) {
  egi_node *nodes = EGI_NEW(arena, egi_node, sort->count);
  if (nodes == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < sort->count; i++) nodes[i] = graph->nodes[sort->order[i]];
  if (sort->count > 0) memcpy(&graph->nodes[1], nodes, sort->count * sizeof *nodes);
  graph->n_nodes = sort->count + 1;
  for (egi_value_id v = 1; v < graph->n_values; v++) graph->values[v].producer = 0;
  for (egi_node_id n = 1; n < graph->n_nodes; n++)
    for (uint16_t i = 0; i < graph->nodes[n].n_outputs; i++) graph->values[graph->nodes[n].outputs[i]].producer = n;
  graph->values[0].producer = 0;
  return EG_OK;
}

/* Values that bodies in attributes use by name. Recursion over bodies: the importer bounds their depth. */
static void mark_captures(const egi_graph *graph, const egi_graph *at, uint8_t *is_used) {
  for (egi_value_id v = 1; at != graph && v < at->n_values; v++) {
    bool is_captured = at->values[v].kind == EGI_VALUE_NODE && at->values[v].producer == 0;
    if (is_captured) is_used[egi_graph_find_value(graph, at->values[v].name)] = 1;
  }
  for (egi_node_id n = 1; n < at->n_nodes; n++)
    for (uint16_t i = 0; i < at->nodes[n].n_attributes; i++)
      if (at->nodes[n].attributes[i].kind == EGI_ATTRIBUTE_GRAPH)
        mark_captures(graph, at->nodes[n].attributes[i].u.graph, is_used);
}

static eg_status drop_unused_values(egi_graph *graph, egi_arena *arena) {
  uint8_t *is_used = EGI_NEW(arena, uint8_t, graph->n_values);
  if (is_used == NULL) return EG_ERROR_MEMORY;
  for (egi_node_id n = 1; n < graph->n_nodes; n++)
    for (uint16_t i = 0; i < graph->nodes[n].n_inputs; i++) is_used[graph->nodes[n].inputs[i]] = 1;
  for (uint32_t i = 0; i < graph->n_outputs; i++) is_used[graph->outputs[i]] = 1;
  mark_captures(graph, graph, is_used);
  for (egi_value_id v = 1; v < graph->n_values; v++) {
    const egi_value *value = &graph->values[v];
    if (is_used[v] != 0 || value->kind == EGI_VALUE_INPUT || value->producer != 0) continue;
    egi_graph_delete_value(graph, v);
  }
  return EG_OK;
}

eg_status egi_graph_tidy(egi_graph *graph) {
  egi_arena arena;
  sorter sort;
  egi_arena_init(&arena, graph->module->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = sort_nodes(graph, &arena, &sort);
  if (status == EG_OK) status = apply_order(graph, &arena, &sort);
  if (status == EG_OK) status = drop_unused_values(graph, &arena);
  egi_arena_clear(&arena);
  return status;
}

/* ---- uses ----------------------------------------------------------------------------------------------------- */

eg_status egi_graph_uses(const egi_graph *graph, egi_arena *arena, egi_uses *out_uses) {
  uint32_t *start = EGI_NEW(arena, uint32_t, (size_t)graph->n_values + 2);
  if (start == NULL) return EG_ERROR_MEMORY;
  /* Counts go one row late, so that filling the list leaves each start where it belongs. */
  for (egi_node_id n = 1; n < graph->n_nodes; n++)
    for (uint16_t i = 0; i < graph->nodes[n].n_inputs; i++)
      if (graph->nodes[n].inputs[i] != 0) start[graph->nodes[n].inputs[i] + 2]++;
  for (uint32_t v = 2; v < graph->n_values + 2; v++) start[v] += start[v - 1];
  egi_node_id *list = EGI_NEW(arena, egi_node_id, start[graph->n_values + 1]);
  if (list == NULL) return EG_ERROR_MEMORY;
  for (egi_node_id n = 1; n < graph->n_nodes; n++)
    for (uint16_t i = 0; i < graph->nodes[n].n_inputs; i++)
      if (graph->nodes[n].inputs[i] != 0) list[start[graph->nodes[n].inputs[i] + 1]++] = n;
  out_uses->start = start;
  out_uses->list = list;
  return EG_OK;
}
