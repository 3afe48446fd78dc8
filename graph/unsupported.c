/* Names all operators of a graph that ops.def has no row for, in one message: a user sees the whole gap at once. */
#include "graph/graph.h"

#include <string.h>

enum { MAX_NAMED = 20 };

typedef struct missing {
  const egi_node *first; /* node with this operator */
  uint32_t count;
} missing;

static bool is_same_operator(const egi_node *a, const egi_node *b) {
  return strcmp(a->op_name, b->op_name) == 0 && strcmp(a->domain, b->domain) == 0;
}

/* Adds the node to the list, which keeps the first MAX_NAMED operators; false when it is full. */
static bool note(missing *list, uint32_t *count, const egi_node *node) {
  for (uint32_t i = 0; i < *count; i++) {
    if (!is_same_operator(list[i].first, node)) continue;
    list[i].count++;
    return true;
  }
  if (*count == MAX_NAMED) return false;
  list[(*count)++] = (missing){node, 1};
  return true;
}

/* Recursion over bodies in attributes: the importer bounds their depth. */
static void note_all(const egi_graph *graph, missing *list, uint32_t *count, uint32_t *n_others) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_UNKNOWN && !note(list, count, node)) ++*n_others;
    for (uint16_t i = 0; i < node->n_attributes && node->op != EGI_OP_NONE; i++)
      if (node->attributes[i].kind == EGI_ATTRIBUTE_GRAPH) note_all(node->attributes[i].u.graph, list, count, n_others);
  }
}

eg_status egi_graph_check_operators(const egi_graph *graph) {
  missing list[MAX_NAMED];
  uint32_t count = 0, n_others = 0;
  note_all(graph, list, &count, &n_others);
  if (count == 0) return EG_OK;
  egi_text text;
  egi_text_init(&text, graph->module->ctx);
  for (uint32_t i = 0; i < count; i++) {
    const egi_node *node = list[i].first;
    egi_text_format(&text, "%s%s%s%s", i > 0 ? ", " : "", node->domain, node->domain[0] != '\0' ? "." : "",
                    node->op_name);
    if (list[i].count > 1) egi_text_format(&text, " (%u nodes, first \"%s\")", list[i].count, node->name);
    if (list[i].count == 1) egi_text_format(&text, " (node \"%s\")", node->name);
  }
  if (n_others > 0) egi_text_format(&text, " and %u nodes of further kinds", n_others);
  eg_status status = egi_text_status(&text);
  if (status == EG_OK)
    status = egi_fail(graph->module->ctx, EG_ERROR_UNSUPPORTED, "operators not supported: %s", egi_text_string(&text));
  egi_text_free(&text);
  return status;
}
