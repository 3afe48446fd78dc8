/* Linear layers of a graph after name_modules, and PEFT's rule for choosing among them. Linear in the graph. */
#include <string.h>

#include "passes/passes.h"

typedef struct lister {
  const egi_graph *graph;
  egi_arena *arena;
  egi_linear *list;
  uint32_t count, capacity;
  egi_map paths; /* path -> index */
} lister;

static bool is_linear(const egi_graph *graph, const egi_operand *operand) {
  const egi_node *node = &graph->nodes[operand->node];
  if (operand->role != EGI_ROLE_MATRIX || (node->op != EGI_OP_MatMul && node->op != EGI_OP_Gemm)) return false;
  return node->scope && node->scope[0] && graph->values[operand->weight].rank == 2;
}

/* Two layers inside one module would have one name: the second is told apart by a number, as PEFT can't be either. */
static eg_status unique_path(lister *state, const egi_linear *linear, const char **out_path) {
  uint32_t index = 0;
  const char *path = linear->path;
  for (unsigned n = 1; egi_map_get(&state->paths, path, &index); n++) {
    if (state->list[index].weight == linear->weight) break; /* the same module called again */
    path = egi_arena_format(state->arena, "%s_%u", linear->path, n);
    if (!path) return EG_ERROR_MEMORY;
  }
  *out_path = path;
  return egi_map_put(&state->paths, path, state->count);
}

static eg_status add_linear(lister *state, const egi_operand *operand, egi_node_id head) {
  const egi_graph *graph = state->graph;
  const egi_value *weight = &graph->values[operand->weight];
  egi_linear linear = {.path = graph->nodes[operand->node].scope,
                       .node = operand->node,
                       .weight = operand->weight,
                       .is_transposed = operand->is_transposed,
                       .is_head = operand->node == head};
  int in_axis = operand->is_transposed ? 1 : 0;
  if (!egi_dim_value(graph->module->dims, weight->dims[in_axis], &linear.in_features)) return EG_OK;
  if (!egi_dim_value(graph->module->dims, weight->dims[1 - in_axis], &linear.out_features)) return EG_OK;
  EG_TRY(unique_path(state, &linear, &linear.path));
  EG_TRY(EGI_GROW(state->arena, &state->list, state->count, &state->capacity));
  state->list[state->count++] = linear;
  return EG_OK;
}

eg_status egi_find_linears(const egi_graph *graph, egi_arena *arena, egi_linear **out_linears, size_t *out_count) {
  lister state = {.graph = graph, .arena = arena};
  egi_operand *operands = NULL;
  size_t n_operands = 0;
  egi_node_id head = egi_find_head(graph);
  egi_map_init(&state.paths, arena);
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

bool egi_target_matches(const egi_linear *linear, const char *targets) {
  if (strcmp(targets, "all-linear") == 0) return !linear->is_head;
  for (const char *at = targets; *at;) {
    size_t length = strcspn(at, ",");
    const char *next = at + length;
    while (length > 0 && (at[0] == ' ' || at[0] == '\t')) at++, length--;
    while (length > 0 && (at[length - 1] == ' ' || at[length - 1] == '\t')) length--;
    if (matches_one(linear->path, at, length)) return true;
    at = *next ? next + 1 : next;
  }
  return false;
}
