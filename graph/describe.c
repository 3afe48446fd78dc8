/* Nodes in messages. */
#include "graph/graph.h"

eg_status egi_fail_node(const egi_graph *graph, egi_node_id id, eg_status status, const char *format, ...) {
  const egi_node *node = &graph->nodes[id];
  const char *type = node->op == EGI_OP_UNKNOWN || node->op == EGI_OP_NONE ? node->op_name : egi_op_get(node->op)->name;
  const char *name = node->name != NULL ? node->name : "";
  char reason[512];
  va_list arguments;
  if (name[0] == '\0' && node->n_outputs > 0 && node->outputs[0] != 0) name = graph->values[node->outputs[0]].name;
  va_start(arguments, format);
  vsnprintf(reason, sizeof reason, format, arguments);
  va_end(arguments);
  return egi_fail(graph->module->ctx, status, "node \"%s\" (%s): %s", name, type != NULL ? type : "?", reason);
}
