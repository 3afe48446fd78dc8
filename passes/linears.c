/* Linear layers of a graph after name_modules, and PEFT's rule for choosing among them. Linear in the graph. */
#include <string.h>

#include "passes/passes.h"

typedef struct lister {
  const egi_graph *graph;
  egi_arena *arena;
  egi_uses uses; /* read where a layer has parts; empty until then */
  egi_linear *list;
  uint32_t count, capacity;
  egi_map paths;   /* path -> index */
  bool *is_router; /* by node */
} lister;

static bool last_size(const egi_graph *graph, egi_value_id value, int64_t *out_size) {
  const egi_value *row = &graph->values[value];
  return row->rank > 0 && egi_dim_value(graph->module->dims, row->dims[row->rank - 1], out_size);
}

static bool is_linear(const egi_graph *graph, const egi_operand *operand) {
  const egi_node *node = &graph->nodes[operand->node];
  bool is_matrix = operand->role == EGI_ROLE_MATRIX && graph->values[operand->weight].rank == 2;
  if (node->op != EGI_OP_MatMul && node->op != EGI_OP_Gemm && node->op != EGI_OP_Linear) return false;
  return node->scope && node->scope[0] && (is_matrix || operand->role == EGI_ROLE_QUANTISED);
}

/* Two layers inside one module would have one name: the second is told apart by a number, as PEFT can't be either. */
static eg_status unique_path(lister *state, const egi_linear *linear, const char **out_path) {
  uint32_t index = 0;
  const char *path = linear->path, *before = egi_called_before(path, state->arena);
  if (before && egi_map_get(&state->paths, before, &index) &&
      egi_same_weight(state->graph, state->list[index].weight, linear->weight))
    path = before;
  for (unsigned n = 1; egi_map_get(&state->paths, path, &index); n++) {
    if (state->list[index].weight == linear->weight || path == before) break; /* the same module called again */
    path = egi_arena_format(state->arena, "%s_%u", linear->path, n);
    if (!path) return EG_ERROR_MEMORY;
  }
  *out_path = path;
  return egi_map_put(&state->paths, path, state->count);
}

static eg_status add_one(lister *state, const egi_linear *linear) {
  EG_TRY(EGI_GROW(state->arena, &state->list, state->count, &state->capacity));
  state->list[state->count] = *linear;
  EG_TRY(unique_path(state, linear, &state->list[state->count].path));
  state->count++;
  return EG_OK;
}

/* A layer for each part of a fused one; *out_done false where there are none. */
static eg_status add_parts(lister *state, const egi_linear *whole, bool *out_done) {
  const egi_graph *graph = state->graph;
  egi_rows_part *parts = NULL;
  egi_node_id split = 0;
  EG_TRY(egi_find_parts(graph, state->arena, &state->uses, whole->node, &parts, &split));
  *out_done = split != 0;
  for (unsigned i = 0; split != 0 && i < graph->nodes[split].n_outputs; i++) {
    egi_linear part = *whole;
    part.result = graph->nodes[split].outputs[i];
    part.path = parts[i].name;
    part.out_features = parts[i].rows;
    EG_TRY(add_one(state, &part));
  }
  return EG_OK;
}

/* Marks the nodes that a mixture's router logits come through, from moves and sums back to a product. */
static void mark_router(const lister *state, egi_value_id value) {
  const egi_graph *graph = state->graph;
  while (value != 0 && graph->values[value].kind == EGI_VALUE_NODE) {
    egi_node_id id = graph->values[value].producer;
    const egi_node *node = &graph->nodes[id];
    bool is_move = node->op == EGI_OP_Cast || node->op == EGI_OP_Add || (egi_op_get(node->op)->flags & EGI_OP_VIEW);
    state->is_router[id] = true;
    value = is_move ? node->inputs[0] : 0;
  }
}

static eg_status find_routers(lister *state) {
  const egi_graph *graph = state->graph;
  state->is_router = EGI_NEW(state->arena, bool, graph->n_nodes);
  if (!state->is_router) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    if (graph->nodes[id].op == EGI_OP_MoE) mark_router(state, graph->nodes[id].inputs[1]);
  return EG_OK;
}

/* ---- layers ----------------------------------------------------------------------------------------------------- */

static eg_status add_linear(lister *state, const egi_operand *operand, egi_node_id head) {
  const egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[operand->node];
  egi_linear linear = {.path = node->scope,
                       .node = operand->node,
                       .weight = operand->weight,
                       .result = node->outputs[0],
                       .is_transposed = operand->is_transposed,
                       .is_quantised = operand->role == EGI_ROLE_QUANTISED,
                       .is_head = operand->node == head,
                       .is_router = state->is_router[operand->node]};
  if (!last_size(graph, node->inputs[0], &linear.in_features)) return EG_OK;
  if (!last_size(graph, node->outputs[0], &linear.out_features)) return EG_OK;
  bool is_done = false;
  EG_TRY(add_parts(state, &linear, &is_done));
  return is_done ? EG_OK : add_one(state, &linear);
}

eg_status egi_find_linears(const egi_graph *graph, egi_arena *arena, egi_linear **out_linears, size_t *out_count) {
  lister state = {.graph = graph, .arena = arena};
  egi_operand *operands = NULL;
  size_t n_operands = 0;
  egi_node_id head = egi_find_head(graph);
  egi_map_init(&state.paths, arena);
  EG_TRY(find_routers(&state));
  EG_TRY(egi_find_operands(graph, arena, &operands, &n_operands));
  for (size_t i = 0; i < n_operands; i++) {
    if (is_linear(graph, &operands[i])) EG_TRY(add_linear(&state, &operands[i], head));
  }
  *out_linears = state.list;
  *out_count = state.count;
  return EG_OK;
}

static bool matches_one(const char *path, const char *target, size_t length) {
  size_t n_path = strlen(path);
  if (length == 0 || length > n_path || strncmp(path + n_path - length, target, length) != 0) return false;
  return length == n_path || path[n_path - length - 1] == '.';
}

bool egi_path_is_named(const char *path, const char *names) {
  for (const char *at = names; *at;) {
    size_t length = strcspn(at, ",");
    const char *next = at + length;
    while (length > 0 && (at[0] == ' ' || at[0] == '\t')) at++, length--;
    while (length > 0 && (at[length - 1] == ' ' || at[length - 1] == '\t')) length--;
    if (matches_one(path, at, length)) return true;
    at = *next ? next + 1 : next;
  }
  return false;
}

bool egi_target_matches(const egi_linear *linear, const char *targets) {
  if (strcmp(targets, "all-linear") == 0) return !linear->is_head && !linear->is_router;
  return egi_path_is_named(linear->path, targets);
}
