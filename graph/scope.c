/* Module paths out of node names: TorchScript and onnxruntime-genai name a node by its module's path and its operator.
 */
#include "graph/graph.h"

#include <string.h>

const char *egi_scope_from_node_name(egi_arena *arena, const char *node_name) {
  if (node_name[0] != '/') return NULL;
  const char *last = strrchr(node_name, '/');
  if (last == node_name) return NULL;
  char *scope = egi_arena_copy_text(arena, node_name + 1, (size_t)(last - node_name - 1));
  if (scope == NULL) return NULL;
  for (char *c = scope; *c != '\0'; c++)
    if (*c == '/') *c = '.';
  return scope;
}
