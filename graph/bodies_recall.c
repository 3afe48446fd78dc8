/* Calls in an imported file that an export of a rewritten graph wrote: where the function is, node for node, the body
 * that this version gives the operator, the call is a node of the operator again; any other is left to be inlined. */
#include "graph/bodies.h"

#include <string.h>

typedef struct recaller {
  egi_graph *graph;
  egi_arena arena;
  egi_map known; /* function and text -> 1: the body, 0: not */
  egi_text text;
} recaller;

static const egi_function *find_function(const egi_module *module, const egi_node *node, uint32_t *out_index) {
  const egi_op_info *info = egi_op_get(node->op);
  for (uint32_t i = 0; i < module->n_functions; i++) {
    const egi_function *function = &module->functions[i];
    *out_index = i;
    if (function->overload != NULL && !strcmp(function->name, info->name) && !strcmp(function->domain, info->domain) &&
        !strcmp(function->overload, node->overload))
      return function;
  }
  return NULL;
}

/* ---- comparing ------------------------------------------------------------------------------------------------ */

static bool same_weight(const egi_module *module, uint32_t a, uint32_t b) {
  const egi_weight *x = &module->weights[a], *y = &module->weights[b];
  if (x->dtype != y->dtype || x->rank != y->rank || x->bytes.kind != EGI_BYTES_MEMORY) return false;
  if (y->bytes.kind != EGI_BYTES_MEMORY || x->bytes.size_bytes != y->bytes.size_bytes) return false;
  for (int i = 0; i < x->rank; i++)
    if (x->dims[i] != y->dims[i]) return false;
  return x->bytes.size_bytes == 0 || !memcmp(x->bytes.data, y->bytes.data, (size_t)x->bytes.size_bytes);
}

static bool same_attribute(const egi_module *module, const egi_attribute *a, const egi_attribute *b) {
  if (strcmp(a->name, b->name) != 0 || a->kind != b->kind) return false;
  switch (a->kind) {
  case EGI_ATTRIBUTE_INT:
    return a->u.i == b->u.i;
  case EGI_ATTRIBUTE_FLOAT:
    return memcmp(&a->u.f, &b->u.f, sizeof a->u.f) == 0;
  case EGI_ATTRIBUTE_STRING:
    return strcmp(a->u.s, b->u.s) == 0;
  case EGI_ATTRIBUTE_INTS:
    return a->count == b->count && (a->count == 0 || !memcmp(a->u.ints, b->u.ints, a->count * sizeof *a->u.ints));
  case EGI_ATTRIBUTE_TENSOR:
    return same_weight(module, a->u.weight, b->u.weight);
  default:
    return false; /* bodies have no others */
  }
}

static bool same_value(const egi_graph *a, egi_value_id x, const egi_graph *b, egi_value_id y) {
  if (x == 0 || y == 0) return x == y;
  const egi_value *v = &a->values[x], *w = &b->values[y];
  if (v->kind != w->kind) return false;
  return v->kind == EGI_VALUE_WEIGHT ? same_weight(a->module, v->index, w->index) : strcmp(v->name, w->name) == 0;
}

static bool same_values(const egi_graph *a, const egi_value_id *x, const egi_graph *b, const egi_value_id *y,
                        uint32_t count) {
  for (uint32_t i = 0; i < count; i++)
    if (!same_value(a, x[i], b, y[i])) return false;
  return true;
}

static bool same_node(const egi_graph *a, const egi_node *x, const egi_graph *b, const egi_node *y) {
  if (x->op != y->op || x->op == EGI_OP_UNKNOWN || x->n_attributes != y->n_attributes) return false;
  if (x->n_inputs != y->n_inputs || x->n_outputs != y->n_outputs) return false;
  for (uint16_t i = 0; i < x->n_attributes; i++) {
    const egi_attribute *other = egi_node_attribute(y, x->attributes[i].name);
    if (other == NULL || !same_attribute(a->module, &x->attributes[i], other)) return false;
  }
  return same_values(a, x->inputs, b, y->inputs, x->n_inputs) &&
         same_values(a, x->outputs, b, y->outputs, x->n_outputs);
}

/* Both are in execution order, and names are those of the text. */
static bool same_graph(const egi_graph *a, const egi_graph *b) {
  egi_node_id x = 1, y = 1;
  if (a->n_inputs != b->n_inputs || a->n_outputs != b->n_outputs) return false;
  if (!same_values(a, a->inputs, b, b->inputs, a->n_inputs)) return false;
  if (!same_values(a, a->outputs, b, b->outputs, a->n_outputs)) return false;
  for (;; x++, y++) {
    while (x < a->n_nodes && a->nodes[x].op == EGI_OP_NONE) x++;
    while (y < b->n_nodes && b->nodes[y].op == EGI_OP_NONE) y++;
    if (x >= a->n_nodes || y >= b->n_nodes) return x >= a->n_nodes && y >= b->n_nodes;
    if (!same_node(a, &a->nodes[x], b, &b->nodes[y])) return false;
  }
}

/* ---- recalling ------------------------------------------------------------------------------------------------ */

static eg_status compare_function(recaller *r, uint32_t index, const egi_node *node, uint32_t *out_is_same) {
  egi_module *module = r->graph->module;
  egi_text_format(&r->text, "\n%u", index);
  EG_TRY(egi_text_status(&r->text));
  if (egi_map_get(&r->known, egi_text_string(&r->text), out_is_same)) return EG_OK;
  char *key = egi_arena_copy_text(&r->arena, egi_text_string(&r->text), r->text.length);
  if (key == NULL) return EG_ERROR_MEMORY;
  r->text.length = (size_t)(strrchr(key, '\n') - key);
  r->text.data[r->text.length] = '\0';
  EG_TRY(egi_body_parse(module, egi_text_string(&r->text), "1", node));
  const egi_graph *own = module->functions[--module->n_functions].graph; /* it was for comparison alone */
  *out_is_same = same_graph(own, module->functions[index].graph);
  return egi_map_put(&r->known, key, *out_is_same);
}

/* Writers of bodies count on what shape rules check: operands and attributes are looked at first. A call that is left
 * is none of the operator, whatever its types would be. */
static eg_status check_node(egi_graph *graph, egi_node_id id, bool *out_is_right) {
  const egi_node *node = &graph->nodes[id];
  *out_is_right = false;
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    const egi_value *value = &graph->values[node->inputs[i]];
    if (node->inputs[i] != 0 && (value->rank < 0 || value->dtype == EG_DTYPE_UNDEFINED)) return EG_OK;
  }
  eg_status status = egi_infer_node(graph, id);
  *out_is_right = status == EG_OK;
  return status == EG_ERROR_MEMORY ? status : EG_OK;
}

static void forget_results(egi_graph *graph, egi_node_id id) {
  const egi_node *node = &graph->nodes[id];
  for (uint16_t i = 0; i < node->n_outputs; i++) {
    egi_value *value = &graph->values[node->outputs[i]];
    if (node->outputs[i] == 0) continue;
    value->dtype = EG_DTYPE_UNDEFINED;
    value->rank = -1;
    value->elements = NULL;
    value->n_elements = 0;
  }
}

static eg_status recall_one(recaller *r, egi_node_id id) {
  bool is_right, is_written = false;
  uint32_t index, is_same = 0;
  if (find_function(r->graph->module, &r->graph->nodes[id], &index) == NULL) return EG_OK;
  EG_TRY(check_node(r->graph, id, &is_right));
  egi_node *node = &r->graph->nodes[id];
  r->text.length = 0;
  if (is_right) EG_TRY(egi_body_write(r->graph, node, &r->text, &is_written));
  if (is_written) EG_TRY(compare_function(r, index, node, &is_same));
  if (is_same)
    node->op_name = node->domain = node->overload = NULL;
  else
    forget_results(r->graph, id);
  return EG_OK;
}

static bool is_candidate(const egi_node *node) {
  return node->overload != NULL && node->op > EGI_OP_UNKNOWN && egi_op_has_body(node->op) &&
         egi_op_get(node->op)->domain[0] != '\0';
}

/* Types of a call's inputs may decide how its body is written. What is wrong elsewhere is found when all is inferred.
 */
static eg_status infer_known(egi_graph *graph, egi_node_id id) {
  eg_status status = is_candidate(&graph->nodes[id]) ? EG_OK : egi_infer_node(graph, id);
  return status == EG_ERROR_MEMORY ? status : EG_OK;
}

eg_status egi_graph_recall_bodies(egi_graph *graph) {
  recaller r = {.graph = graph};
  eg_status status = EG_OK;
  egi_node_id first = 1;
  while (first < graph->n_nodes && !is_candidate(&graph->nodes[first])) first++;
  if (graph->module->n_functions == 0 || first >= graph->n_nodes) return EG_OK;
  egi_arena_init(&r.arena, graph->module->ctx, EGI_PURPOSE_GRAPH);
  egi_map_init(&r.known, &r.arena);
  egi_text_init(&r.text, graph->module->ctx);
  for (egi_node_id id = 1; id < graph->n_nodes && status == EG_OK; id++) {
    if (is_candidate(&graph->nodes[id])) status = recall_one(&r, id);
    if (status == EG_OK) status = infer_known(graph, id);
  }
  egi_text_free(&r.text);
  egi_arena_clear(&r.arena);
  return status;
}
