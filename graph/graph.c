/* Graphs: values, nodes and their editing. Rows are appended and marked deleted; egi_graph_tidy() compacts. */
#include "graph/graph.h"

/* ---- names ---------------------------------------------------------------------------------------------------- */

/* Copies `name` when it is free, else makes one that is. */
static eg_status claim_name(egi_graph *graph, const char *name, const char **out_name) {
  egi_arena *arena = &graph->module->arena;
  const char *stem = name != NULL ? name : "";
  const char *claimed = NULL;
  if (stem[0] != '\0' && !egi_map_get(&graph->names, stem, NULL))
    claimed = egi_arena_copy_text(arena, stem, strlen(stem));
  else
    do claimed = egi_arena_format(arena, "%s_%u", stem[0] != '\0' ? stem : "v", ++graph->next_name);
    while (claimed != NULL && egi_map_get(&graph->names, claimed, NULL));
  if (claimed == NULL) return EG_ERROR_MEMORY;
  *out_name = claimed;
  return EG_OK;
}

static eg_status append_value(egi_graph *graph, const char *name, egi_value_kind kind, egi_value_id *out_value) {
  EG_TRY(EGI_GROW(&graph->module->arena, &graph->values, graph->n_values, &graph->values_capacity));
  egi_value *value = &graph->values[graph->n_values];
  memset(value, 0, sizeof *value);
  EG_TRY(claim_name(graph, name, &value->name));
  EG_TRY(egi_map_put(&graph->names, value->name, graph->n_values));
  value->kind = kind;
  value->rank = -1;
  *out_value = graph->n_values++;
  return EG_OK;
}

void egi_graph_delete_value(egi_graph *graph, egi_value_id id) {
  egi_value *value = &graph->values[id];
  if (value->kind == EGI_VALUE_NONE) return;
  if (value->kind == EGI_VALUE_WEIGHT) graph->weight_values[value->index] = 0;
  if (value->kind == EGI_VALUE_STATE) graph->state_values[value->index] = 0;
  egi_map_remove(&graph->names, value->name);
  value->kind = EGI_VALUE_NONE;
  value->producer = 0;
}

egi_value_id egi_graph_find_value(const egi_graph *graph, const char *name) {
  uint32_t id;
  return egi_map_get(&graph->names, name, &id) ? id : 0;
}

eg_status egi_graph_rename_value(egi_graph *graph, egi_value_id value, const char *name) {
  const char *claimed;
  if (strcmp(graph->values[value].name, name) == 0) return EG_OK;
  EG_TRY(claim_name(graph, name, &claimed));
  EG_TRY(egi_map_put(&graph->names, claimed, value));
  egi_map_remove(&graph->names, graph->values[value].name);
  graph->values[value].name = claimed;
  return EG_OK;
}

/* ---- values --------------------------------------------------------------------------------------------------- */

eg_status egi_graph_add_value(egi_graph *graph, const char *name, egi_value_id *out_value) {
  return append_value(graph, name, EGI_VALUE_NODE, out_value);
}

/* An unknown dim of an input becomes a symbol, so that it can be named and bound. */
static eg_status set_input_dims(egi_graph *graph, egi_value *value, int rank, const egi_dim *dims) {
  egi_arena *arena = &graph->module->arena;
  value->rank = rank;
  for (int i = 0; i < rank; i++) {
    value->dims[i] = dims[i];
    if (dims[i] != EGI_DIM_NONE) continue;
    const char *name = egi_arena_format(arena, "%s_dim%d", value->name, i);
    if (name == NULL) return EG_ERROR_MEMORY;
    value->dims[i] = egi_dim_symbol(graph->module->dims, name);
    if (value->dims[i] == EGI_DIM_NONE) return EG_ERROR_MEMORY;
  }
  return EG_OK;
}

eg_status egi_graph_add_input(egi_graph *graph, const char *name, eg_dtype dtype, int rank, const egi_dim *dims,
                              egi_value_id *out_value) {
  if (rank > EGI_MAX_RANK)
    return egi_fail(graph->module->ctx, EG_ERROR_UNSUPPORTED, "input \"%s\": %d dimensions; at most %d are supported",
                    name != NULL ? name : "", rank, EGI_MAX_RANK);
  EG_TRY(EGI_GROW(&graph->module->arena, &graph->inputs, graph->n_inputs, &graph->inputs_capacity));
  egi_value_id id;
  EG_TRY(append_value(graph, name, EGI_VALUE_INPUT, &id));
  egi_value *value = &graph->values[id];
  value->dtype = dtype;
  value->index = graph->n_inputs;
  EG_TRY(set_input_dims(graph, value, rank, dims));
  graph->inputs[graph->n_inputs++] = id;
  *out_value = id;
  return EG_OK;
}

/* Makes room for `index` in a list that maps rows of the module to values; zero where there is none. */
static eg_status reserve_rows(egi_arena *arena, egi_value_id **list, uint32_t index, uint32_t *capacity) {
  while (*capacity <= index) EG_TRY(EGI_GROW(arena, list, *capacity, capacity));
  return EG_OK;
}

static eg_status set_constant_dims(egi_graph *graph, egi_value *value, int rank, const int64_t *dims) {
  value->rank = rank;
  for (int i = 0; i < rank; i++) {
    value->dims[i] = egi_dim_constant(graph->module->dims, dims[i]);
    if (value->dims[i] == EGI_DIM_NONE) return EG_ERROR_MEMORY;
  }
  return EG_OK;
}

eg_status egi_graph_add_weight(egi_graph *graph, uint32_t weight, egi_value_id *out_value) {
  egi_module *module = graph->module;
  EG_TRY(reserve_rows(&module->arena, &graph->weight_values, weight, &graph->weight_values_capacity));
  if (graph->weight_values[weight] == 0) {
    const egi_weight *row = &module->weights[weight];
    egi_value_id id;
    EG_TRY(append_value(graph, row->name, EGI_VALUE_WEIGHT, &id));
    egi_value *value = &graph->values[id];
    value->dtype = row->dtype;
    value->index = weight;
    EG_TRY(set_constant_dims(graph, value, row->rank, row->dims));
    graph->weight_values[weight] = id;
  }
  *out_value = graph->weight_values[weight];
  return EG_OK;
}

eg_status egi_graph_add_state(egi_graph *graph, uint32_t state, egi_value_id *out_value) {
  egi_module *module = graph->module;
  EG_TRY(reserve_rows(&module->arena, &graph->state_values, state, &graph->state_values_capacity));
  if (graph->state_values[state] == 0) {
    const egi_state *row = &module->states[state];
    egi_value_id id;
    EG_TRY(append_value(graph, row->name, EGI_VALUE_STATE, &id));
    egi_value *value = &graph->values[id];
    value->dtype = row->dtype;
    value->index = state;
    EG_TRY(set_constant_dims(graph, value, row->rank, row->dims));
    graph->state_values[state] = id;
  }
  *out_value = graph->state_values[state];
  return EG_OK;
}

eg_status egi_graph_add_output(egi_graph *graph, egi_value_id value) {
  EG_TRY(EGI_GROW(&graph->module->arena, &graph->outputs, graph->n_outputs, &graph->outputs_capacity));
  graph->outputs[graph->n_outputs++] = value;
  return EG_OK;
}

bool egi_graph_is_output(const egi_graph *graph, egi_value_id value) {
  for (uint32_t i = 0; i < graph->n_outputs; i++)
    if (graph->outputs[i] == value) return true;
  return false;
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

static eg_status copy_text(egi_arena *arena, const char **text) {
  if (*text == NULL) return EG_OK;
  *text = egi_arena_copy_text(arena, *text, strlen(*text));
  return *text != NULL ? EG_OK : EG_ERROR_MEMORY;
}

/* Nodes of one module stand together: they share the text of their scope. */
static eg_status copy_texts(egi_graph *graph, egi_node *row) {
  egi_arena *arena = &graph->module->arena;
  const char *last = graph->nodes[graph->n_nodes - 1].scope;
  if (row->name == NULL) row->name = "";
  EG_TRY(copy_text(arena, &row->name));
  EG_TRY(copy_text(arena, &row->op_name));
  EG_TRY(copy_text(arena, &row->domain));
  EG_TRY(copy_text(arena, &row->overload));
  if (row->scope != NULL && last != NULL && strcmp(row->scope, last) == 0)
    row->scope = last;
  else
    EG_TRY(copy_text(arena, &row->scope));
  return EG_OK;
}

static eg_status take_output(egi_graph *graph, egi_value_id wanted, uint32_t index, egi_value_id *out_value) {
  egi_value_id id = wanted;
  if (wanted == EGI_VALUE_UNWANTED) {
    *out_value = 0;
    return EG_OK;
  }
  if (wanted == 0) EG_TRY(egi_graph_add_value(graph, NULL, &id));
  egi_value *value = &graph->values[id];
  if (value->kind == EGI_VALUE_NONE) {
    EG_TRY(claim_name(graph, value->name, &value->name));
    EG_TRY(egi_map_put(&graph->names, value->name, id));
    value->kind = EGI_VALUE_NODE;
  }
  if (value->kind != EGI_VALUE_NODE || value->producer != 0)
    return egi_fail(graph->module->ctx, EG_ERROR_FORMAT, "tensor \"%s\" is produced twice", value->name);
  value->producer = graph->n_nodes;
  value->index = index;
  *out_value = id;
  return EG_OK;
}

static eg_status copy_lists(egi_graph *graph, const egi_node *node, egi_node *row) {
  egi_arena *arena = &graph->module->arena;
  row->inputs = EGI_NEW(arena, egi_value_id, node->n_inputs);
  row->outputs = EGI_NEW(arena, egi_value_id, node->n_outputs);
  row->attributes = EGI_NEW(arena, egi_attribute, node->n_attributes);
  if (row->inputs == NULL || row->outputs == NULL || row->attributes == NULL) return EG_ERROR_MEMORY;
  if (node->n_inputs > 0) memcpy(row->inputs, node->inputs, node->n_inputs * sizeof *node->inputs);
  for (uint16_t i = 0; i < node->n_attributes; i++)
    EG_TRY(egi_attribute_copy(arena, &node->attributes[i], &row->attributes[i]));
  return EG_OK;
}

eg_status egi_graph_add_node(egi_graph *graph, const egi_node *node, egi_node_id *out_node) {
  EG_TRY(EGI_GROW(&graph->module->arena, &graph->nodes, graph->n_nodes, &graph->nodes_capacity));
  egi_node row = *node;
  EG_TRY(copy_lists(graph, node, &row));
  EG_TRY(copy_texts(graph, &row));
  for (uint16_t i = 0; i < node->n_outputs; i++)
    EG_TRY(take_output(graph, node->outputs != NULL ? node->outputs[i] : 0, i, &row.outputs[i]));
  graph->nodes[graph->n_nodes] = row;
  if (out_node != NULL) *out_node = graph->n_nodes;
  graph->n_nodes++;
  return EG_OK;
}

void egi_graph_remove_node(egi_graph *graph, egi_node_id id) {
  egi_node *node = &graph->nodes[id];
  for (uint16_t i = 0; i < node->n_outputs; i++) {
    egi_value_id v = node->outputs[i];
    if (v != 0 && graph->values[v].producer == id) egi_graph_delete_value(graph, v);
  }
  memset(node, 0, sizeof *node);
}

void egi_graph_replace_uses(egi_graph *graph, egi_value_id old_value, egi_value_id new_value) {
  for (egi_node_id n = 1; n < graph->n_nodes; n++)
    for (uint16_t i = 0; i < graph->nodes[n].n_inputs; i++)
      if (graph->nodes[n].inputs[i] == old_value) graph->nodes[n].inputs[i] = new_value;
  for (uint32_t i = 0; i < graph->n_outputs; i++)
    if (graph->outputs[i] == old_value) graph->outputs[i] = new_value;
}

/* The end of the chain from `v`; every link on the way then points to it. A circle, a mistake of the caller, ends at
 * the value where it began. */
static egi_value_id follow(egi_value_id *map, egi_value_id v) {
  egi_value_id end = v;
  while (map[end] != 0 && map[end] != v) end = map[end];
  while (map[v] != 0 && map[v] != end && v != end) {
    egi_value_id next = map[v];
    map[v] = end;
    v = next;
  }
  return end;
}

void egi_graph_replace_many(egi_graph *graph, egi_value_id *map) {
  for (egi_node_id n = 1; n < graph->n_nodes; n++)
    for (uint16_t i = 0; i < graph->nodes[n].n_inputs; i++)
      graph->nodes[n].inputs[i] = follow(map, graph->nodes[n].inputs[i]);
  for (uint32_t i = 0; i < graph->n_outputs; i++) graph->outputs[i] = follow(map, graph->outputs[i]);
}

void egi_graph_forget_types(egi_graph *graph) {
  for (egi_value_id v = 1; v < graph->n_values; v++) {
    egi_value *value = &graph->values[v];
    if (value->kind != EGI_VALUE_NODE) continue;
    value->dtype = EG_DTYPE_UNDEFINED;
    value->rank = -1;
    value->elements = NULL;
    value->n_elements = 0;
  }
}
