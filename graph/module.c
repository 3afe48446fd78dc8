/* Modules: weights, states and pools, entry points, clones. A clone keeps its base alive and shares the base's texts,
 * attribute payloads and weight bytes, which nobody changes in place. */
#include <inttypes.h>

#include "graph/dims.h"
#include "graph/graph.h"
#include "proto/proto.h"

#define POOL_ALIGNMENT_BYTES 64u

static eg_status fill_module(egi_module *module) {
  EG_TRY(egi_dims_create(&module->arena, &module->dims));
  EG_TRY(EGI_GROW(&module->arena, &module->weights, 0, &module->weights_capacity));
  EG_TRY(EGI_GROW(&module->arena, &module->states, 0, &module->states_capacity));
  module->n_weights = module->n_states = 1;
  return EG_OK;
}

static eg_status allocate_module(eg_context *ctx, egi_module **out_module) {
  egi_module *module = egi_allocate(ctx, EGI_PURPOSE_GRAPH, sizeof *module);
  if (module == NULL) return EG_ERROR_MEMORY;
  memset(module, 0, sizeof *module);
  module->ctx = ctx;
  module->references = 1;
  egi_arena_init(&module->arena, ctx, EGI_PURPOSE_GRAPH);
  egi_context_retain(ctx);
  *out_module = module;
  return EG_OK;
}

eg_status egi_module_create(eg_context *ctx, egi_module **out_module) {
  egi_module *module;
  EG_TRY(allocate_module(ctx, &module));
  eg_status status = fill_module(module);
  if (status != EG_OK) {
    egi_module_destroy(module);
    return status;
  }
  *out_module = module;
  return EG_OK;
}

void egi_module_destroy(egi_module *module) {
  while (module != NULL && --module->references == 0) {
    egi_module *base = module->base;
    eg_context *ctx = module->ctx;
    if (module->file != NULL) egi_onnx_release(module->file);
    egi_arena_clear(&module->arena);
    egi_release(ctx, EGI_PURPOSE_GRAPH, module, sizeof *module);
    egi_context_release(ctx);
    module = base;
  }
}

static eg_status make_graph(egi_module *module, const char *name, egi_graph **out_graph) {
  egi_graph *graph = EGI_NEW(&module->arena, egi_graph, 1);
  if (graph == NULL) return EG_ERROR_MEMORY;
  graph->module = module;
  graph->name = egi_arena_copy_text(&module->arena, name, strlen(name));
  if (graph->name == NULL) return EG_ERROR_MEMORY;
  egi_map_init(&graph->names, &module->arena);
  EG_TRY(EGI_GROW(&module->arena, &graph->values, 0, &graph->values_capacity));
  EG_TRY(EGI_GROW(&module->arena, &graph->nodes, 0, &graph->nodes_capacity));
  graph->n_values = graph->n_nodes = 1;
  *out_graph = graph;
  return EG_OK;
}

eg_status egi_graph_create(egi_module *module, const char *name, egi_graph **out_graph) {
  return make_graph(module, name != NULL ? name : "", out_graph);
}

eg_status egi_module_add_graph(egi_module *module, const char *name, egi_graph **out_graph) {
  egi_graph *graph;
  EG_TRY(egi_graph_create(module, name, &graph));
  EG_TRY(EGI_GROW(&module->arena, &module->graphs, module->n_graphs, &module->graphs_capacity));
  module->graphs[module->n_graphs++] = graph;
  *out_graph = graph;
  return EG_OK;
}

egi_graph *egi_module_find_graph(const egi_module *module, const char *name) {
  for (uint32_t i = 0; i < module->n_graphs; i++)
    if (strcmp(module->graphs[i]->name, name) == 0) return module->graphs[i];
  return NULL;
}

uint64_t egi_module_max_nodes(const egi_module *module) {
  static const uint64_t default_max_nodes = 4000000;
  return module->file != NULL ? egi_onnx_get_limits(module->file)->max_nodes : default_max_nodes;
}

eg_status egi_module_add_weight(egi_module *module, const egi_weight *weight, uint32_t *out_index) {
  if (weight->rank < 0 || weight->rank > EGI_MAX_RANK)
    return egi_fail(module->ctx, EG_ERROR_UNSUPPORTED, "tensor \"%s\": %d dimensions; at most %d are supported",
                    weight->name != NULL ? weight->name : "", weight->rank, EGI_MAX_RANK);
  EG_TRY(EGI_GROW(&module->arena, &module->weights, module->n_weights, &module->weights_capacity));
  egi_weight *row = &module->weights[module->n_weights];
  *row = *weight;
  const char *name = weight->name != NULL ? weight->name : "";
  row->name = egi_arena_copy_text(&module->arena, name, strlen(name));
  if (row->name == NULL) return EG_ERROR_MEMORY;
  *out_index = module->n_weights++;
  return EG_OK;
}

/* ---- states --------------------------------------------------------------------------------------------------- */

static eg_status copy_parts(egi_module *module, egi_state *state) {
  egi_rows_part *parts = EGI_NEW(&module->arena, egi_rows_part, (size_t)state->n_parts + 1);
  if (parts == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < state->n_parts; i++) {
    parts[i].rows = state->parts[i].rows;
    parts[i].name = egi_arena_copy_text(&module->arena, state->parts[i].name, strlen(state->parts[i].name));
    if (parts[i].name == NULL) return EG_ERROR_MEMORY;
  }
  state->parts = parts;
  return EG_OK;
}

static eg_status append_state(egi_module *module, const egi_state *state, uint32_t *out_index) {
  EG_TRY(EGI_GROW(&module->arena, &module->states, module->n_states, &module->states_capacity));
  egi_state *row = &module->states[module->n_states];
  *row = *state;
  row->name = egi_arena_copy_text(&module->arena, state->name, strlen(state->name));
  if (row->name == NULL) return EG_ERROR_MEMORY;
  EG_TRY(copy_parts(module, row));
  *out_index = module->n_states++;
  return EG_OK;
}

static bool count_elements(const egi_state *state, uint64_t *out_count) {
  size_t count = 1;
  for (int i = 0; i < state->rank; i++) {
    if (state->dims[i] < 0 || !egi_size_multiply(count, (size_t)state->dims[i], &count)) return false;
  }
  *out_count = count;
  return true;
}

eg_status egi_module_add_state(egi_module *module, const egi_state *state, uint32_t *out_index) {
  egi_state placed = *state;
  uint64_t count;
  unsigned element_bytes = egi_dtype_bits(state->dtype) / 8;
  if (element_bytes == 0 || state->rank < 0 || state->rank > EGI_MAX_RANK || !count_elements(state, &count))
    return egi_fail(module->ctx, EG_ERROR_UNSUPPORTED, "state \"%s\": not a tensor that can be trained", state->name);
  uint64_t alignment = POOL_ALIGNMENT_BYTES / element_bytes;
  uint64_t used = module->pool_elements[state->pool];
  size_t end;
  if (used > UINT64_MAX - alignment)
    return egi_fail(module->ctx, EG_ERROR_BUDGET, "state \"%s\": too large", state->name);
  placed.offset = (used + alignment - 1) / alignment * alignment;
  if (!egi_size_add(placed.offset, count, &end))
    return egi_fail(module->ctx, EG_ERROR_BUDGET, "state \"%s\": too large", state->name);
  EG_TRY(append_state(module, &placed, out_index));
  module->pool_elements[state->pool] = end;
  return EG_OK;
}

uint64_t egi_module_pool_bytes(const egi_module *module, egi_state_pool pool) {
  uint64_t element_bytes = pool == EGI_POOL_STEP ? 1 : sizeof(float);
  for (uint32_t i = 1; i < module->n_states && pool == EGI_POOL_CACHE; i++)
    if (module->states[i].pool == pool) element_bytes = egi_dtype_bits(module->states[i].dtype) / 8;
  return module->pool_elements[pool] * element_bytes;
}

static const char *pool_name(egi_state_pool pool) {
  static const char *const names[EGI_POOL_COUNT] = {"engraft.parameters", "engraft.gradients", "engraft.moment1",
                                                    "engraft.moment2",    "engraft.step",      "engraft.cache"};
  return names[pool];
}

static eg_status add_piece(egi_module *module, const egi_state *piece, uint32_t *out_index) {
  for (uint32_t i = 1; i < module->n_states; i++) {
    const egi_state *state = &module->states[i];
    if (state->pool == piece->pool && state->dims[0] == piece->dims[0] && strcmp(state->name, piece->name) == 0) {
      *out_index = i;
      return EG_OK;
    }
  }
  return append_state(module, piece, out_index);
}

eg_status egi_module_add_pool_state(egi_module *module, egi_state_pool pool, uint32_t *out_index) {
  if (pool == EGI_POOL_STEP) module->pool_elements[pool] = sizeof(egi_step_state);
  egi_state whole = {.name = pool_name(pool), .pool = pool, .rank = 1};
  whole.dtype = pool == EGI_POOL_STEP ? EG_DTYPE_U8 : EG_DTYPE_F32;
  whole.dims[0] = (int64_t)module->pool_elements[pool];
  return add_piece(module, &whole, out_index);
}

eg_status egi_module_add_pool_piece(egi_module *module, egi_state_pool pool, uint64_t first, uint64_t n,
                                    uint32_t *out_index) {
  egi_state piece = {.pool = pool, .dtype = EG_DTYPE_F32, .rank = 1, .dims = {(int64_t)n}, .offset = first};
  piece.name = egi_arena_format(&module->arena, "%s.%" PRIu64, pool_name(pool), first);
  return piece.name != NULL ? add_piece(module, &piece, out_index) : EG_ERROR_MEMORY;
}

/* ---- clones --------------------------------------------------------------------------------------------------- */

static eg_status copy_rows(egi_arena *arena, const void *rows, size_t count, size_t row_bytes, void **out_rows) {
  void *copy = egi_arena_get(arena, count, row_bytes);
  if (copy == NULL) return EG_ERROR_MEMORY;
  if (count > 0) memcpy(copy, rows, count * row_bytes);
  *out_rows = copy;
  return EG_OK;
}
#define COPY(arena, rows, count, out) copy_rows((arena), (rows), (count), sizeof *(rows), (void **)(out))

static eg_status clone_graph(egi_module *module, const egi_graph *graph, egi_graph **out_graph);

static eg_status clone_node_lists(egi_module *module, egi_node *node) {
  egi_value_id *inputs, *outputs;
  egi_attribute *attributes;
  EG_TRY(COPY(&module->arena, node->inputs, node->n_inputs, &inputs));
  EG_TRY(COPY(&module->arena, node->outputs, node->n_outputs, &outputs));
  EG_TRY(COPY(&module->arena, node->attributes, node->n_attributes, &attributes));
  node->inputs = inputs;
  node->outputs = outputs;
  node->attributes = attributes;
  for (uint16_t i = 0; i < node->n_attributes; i++)
    if (attributes[i].kind == EGI_ATTRIBUTE_GRAPH)
      EG_TRY(clone_graph(module, attributes[i].u.graph, &attributes[i].u.graph));
  return EG_OK;
}

/* Recursion over bodies in attributes: the importer bounds their depth. */
static eg_status clone_graph(egi_module *module, const egi_graph *graph, egi_graph **out_graph) {
  egi_arena *arena = &module->arena;
  egi_graph *copy = EGI_NEW(arena, egi_graph, 1);
  if (copy == NULL) return EG_ERROR_MEMORY;
  *copy = *graph;
  copy->module = module;
  EG_TRY(COPY(arena, graph->values, graph->n_values, &copy->values));
  EG_TRY(COPY(arena, graph->nodes, graph->n_nodes, &copy->nodes));
  EG_TRY(COPY(arena, graph->inputs, graph->n_inputs, &copy->inputs));
  EG_TRY(COPY(arena, graph->outputs, graph->n_outputs, &copy->outputs));
  EG_TRY(COPY(arena, graph->weight_values, graph->weight_values_capacity, &copy->weight_values));
  EG_TRY(COPY(arena, graph->state_values, graph->state_values_capacity, &copy->state_values));
  copy->values_capacity = graph->n_values;
  copy->nodes_capacity = graph->n_nodes;
  copy->inputs_capacity = graph->n_inputs;
  copy->outputs_capacity = graph->n_outputs;
  egi_map_init(&copy->names, arena);
  for (egi_value_id v = 1; v < copy->n_values; v++)
    if (copy->values[v].kind != EGI_VALUE_NONE) EG_TRY(egi_map_put(&copy->names, copy->values[v].name, v));
  for (egi_node_id n = 1; n < copy->n_nodes; n++) EG_TRY(clone_node_lists(module, &copy->nodes[n]));
  *out_graph = copy;
  return EG_OK;
}

static eg_status clone_functions(egi_module *copy, const egi_module *module) {
  EG_TRY(COPY(&copy->arena, module->functions, module->n_functions, &copy->functions));
  copy->n_functions = copy->functions_capacity = module->n_functions;
  for (uint32_t i = 0; i < copy->n_functions; i++)
    EG_TRY(clone_graph(copy, module->functions[i].graph, &copy->functions[i].graph));
  return EG_OK;
}

static eg_status fill_clone(egi_module *copy, const egi_module *module) {
  egi_arena *arena = &copy->arena;
  EG_TRY(egi_dims_clone(arena, module->dims, &copy->dims));
  EG_TRY(COPY(arena, module->weights, module->n_weights, &copy->weights));
  EG_TRY(COPY(arena, module->states, module->n_states, &copy->states));
  copy->n_weights = copy->weights_capacity = module->n_weights;
  copy->n_states = copy->states_capacity = module->n_states;
  memcpy(copy->pool_elements, module->pool_elements, sizeof copy->pool_elements);
  memcpy(copy->is_pool_on_host, module->is_pool_on_host, sizeof copy->is_pool_on_host);
  copy->graphs = EGI_NEW(arena, egi_graph *, module->n_graphs);
  if (copy->graphs == NULL) return EG_ERROR_MEMORY;
  copy->n_graphs = copy->graphs_capacity = module->n_graphs;
  for (uint32_t i = 0; i < module->n_graphs; i++) EG_TRY(clone_graph(copy, module->graphs[i], &copy->graphs[i]));
  return clone_functions(copy, module);
}

eg_status egi_module_clone(const egi_module *module, egi_module **out_module) {
  egi_module *copy;
  EG_TRY(allocate_module(module->ctx, &copy));
  copy->evaluator = module->evaluator;
  copy->costs = module->costs;
  copy->assumes_positions = module->assumes_positions;
  copy->base = (egi_module *)(uintptr_t)module; /* only its count of references changes */
  copy->base->references++;
  copy->file = module->file;
  if (copy->file != NULL) egi_onnx_retain(copy->file);
  eg_status status = fill_clone(copy, module);
  if (status != EG_OK) {
    egi_module_destroy(copy);
    return status;
  }
  *out_module = copy;
  return EG_OK;
}

eg_status egi_module_copy_graph(egi_module *module, const egi_graph *graph, const char *name, egi_graph **out_graph) {
  egi_graph *copy;
  EG_TRY(clone_graph(module, graph, &copy));
  copy->name = egi_arena_copy_text(&module->arena, name, strlen(name));
  if (copy->name == NULL) return EG_ERROR_MEMORY;
  EG_TRY(EGI_GROW(&module->arena, &module->graphs, module->n_graphs, &module->graphs_capacity));
  module->graphs[module->n_graphs++] = copy;
  *out_graph = copy;
  return EG_OK;
}
