/* Module paths out of node names: TorchScript and onnxruntime-genai name a node by its module's path and its operator.
 *
 * TorchScript's paths lack the modules that were not called themselves: where m runs self.model.decoder, the path is
 * m.decoder. Initializers keep whole names, so a node that takes a parameter shows what is missing, and every path that
 * begins alike gets it. */
#include "graph/graph.h"

#include <string.h>

/* Where the last of the segments, [0, length), begins: after a slash. */
static size_t last_segment(const char *name, size_t length) {
  while (length > 0 && name[length - 1] != '/') length--;
  return length;
}

/* onnxruntime's optimiser names what it fuses "<node>/<rule>Fusion/". */
static size_t without_fusion(const char *name) {
  static const char suffix[] = "Fusion";
  size_t length = strlen(name), n_suffix = sizeof(suffix) - 1;
  if (length > 0 && name[length - 1] == '/') length--;
  bool is_fusion = length > n_suffix && strncmp(name + length - n_suffix, suffix, n_suffix) == 0;
  size_t start = last_segment(name, length);
  return is_fusion && start > 1 ? start - 1 : strlen(name);
}

const char *egi_scope_from_node_name(egi_arena *arena, const char *node_name) {
  if (node_name[0] != '/') return NULL;
  size_t end = last_segment(node_name, without_fusion(node_name));
  if (end <= 1) return NULL;
  char *scope = egi_arena_copy_text(arena, node_name + 1, end - 2);
  if (scope == NULL) return NULL;
  for (char *c = scope; *c != '\0'; c++)
    if (*c == '/') *c = '.';
  return scope;
}

/* ---- parts that paths lack -------------------------------------------------------------------------------------- */

typedef struct completer {
  egi_graph *graph;
  egi_arena *scratch;
  egi_map shorts;      /* beginning of a path, up to the first segment after the gap -> index in `wholes` */
  const char **wholes; /* the same with what is missing; NULL: two parameters say different things */
  uint32_t count, capacity;
} completer;

/* Length of the segments, dots included, that both begin with. */
static size_t common_segments(const char *a, const char *b) {
  size_t common = 0;
  for (size_t i = 0; a[i] != '\0' && a[i] == b[i]; i++)
    if (a[i] == '.') common = i + 1;
  return common;
}

/* Notes what `scope` lacks of the module that a parameter's name is made of. */
static eg_status compare_scope(completer *state, const char *scope, const char *parameter) {
  const char *leaf = strrchr(parameter, '.');
  if (leaf == NULL || strpbrk(parameter, "/:") != NULL) return EG_OK;
  size_t n_module = (size_t)(leaf - parameter), n_scope = strlen(scope);
  size_t n_common = common_segments(scope, parameter), n_rest = n_scope - n_common;
  bool is_shorter = n_rest > 0 && n_common + n_rest < n_module;
  if (!is_shorter || (strncmp(parameter, scope, n_scope) == 0 && parameter[n_scope] == '.')) return EG_OK;
  const char *rest = scope + n_common, *end = leaf - n_rest;
  if (end[-1] != '.' || strncmp(end, rest, n_rest) != 0) return EG_OK;
  size_t n_first = strcspn(rest, ".");
  const char *key = egi_arena_copy_text(state->scratch, scope, n_common + n_first);
  const char *whole = egi_arena_copy_text(state->scratch, parameter, (size_t)(end - parameter) + n_first);
  if (key == NULL || whole == NULL) return EG_ERROR_MEMORY;
  uint32_t index;
  if (egi_map_get(&state->shorts, key, &index)) {
    if (state->wholes[index] != NULL && strcmp(state->wholes[index], whole) != 0) state->wholes[index] = NULL;
    return EG_OK;
  }
  EG_TRY(EGI_GROW(state->scratch, &state->wholes, state->count, &state->capacity));
  state->wholes[state->count] = whole;
  return egi_map_put(&state->shorts, key, state->count++);
}

static eg_status find_gaps(completer *state) {
  const egi_graph *graph = state->graph;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    for (unsigned i = 0; node->scope != NULL && i < node->n_inputs; i++) {
      const egi_value *input = &graph->values[node->inputs[i]];
      if (node->inputs[i] != 0 && input->kind == EGI_VALUE_WEIGHT)
        EG_TRY(compare_scope(state, node->scope, graph->module->weights[input->index].name));
    }
  }
  return EG_OK;
}

static eg_status complete_scope(completer *state, egi_node *node) {
  size_t length = strlen(node->scope);
  char *start = egi_arena_copy_text(state->scratch, node->scope, length);
  if (start == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 1; i <= length; i++) {
    uint32_t index;
    if (node->scope[i] != '.' && node->scope[i] != '\0') continue;
    start[i] = '\0';
    if (egi_map_get(&state->shorts, start, &index) && state->wholes[index] != NULL) {
      node->scope = egi_arena_format(&state->graph->module->arena, "%s%s", state->wholes[index], node->scope + i);
      return node->scope != NULL ? EG_OK : EG_ERROR_MEMORY;
    }
    if (i < length) start[i] = '.';
  }
  return EG_OK;
}

eg_status egi_graph_complete_scopes(egi_graph *graph, egi_arena *scratch) {
  completer state = {.graph = graph, .scratch = scratch};
  egi_map_init(&state.shorts, scratch);
  EG_TRY(find_gaps(&state));
  for (egi_node_id id = 1; state.count > 0 && id < graph->n_nodes; id++)
    if (graph->nodes[id].scope != NULL) EG_TRY(complete_scope(&state, &graph->nodes[id]));
  return EG_OK;
}
