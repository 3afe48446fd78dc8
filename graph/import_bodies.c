/* What bodies of If, Loop and Scan see of the graph around them becomes inputs: the last ones of the node and of each
 * of its bodies, counted by the attribute EGI_CAPTURES. So every use of a value stands in its own graph, and passes
 * need not look into bodies. The exporter turns it back. */
#include "graph/import.h"

typedef struct captures {
  const char **names;
  uint32_t count, capacity;
  egi_map known;
} captures;

static bool is_captured(const egi_value *value) {
  return value->kind == EGI_VALUE_NODE && value->producer == 0 && value->index == UINT32_MAX;
}

static eg_status collect(egi_import_scope *scope, const egi_graph *body, captures *c) {
  for (egi_value_id v = 1; v < body->n_values; v++) {
    const egi_value *value = &body->values[v];
    if (!is_captured(value) || egi_map_get(&c->known, value->name, NULL)) continue;
    EG_TRY(EGI_GROW(&scope->importer->scratch, &c->names, c->count, &c->capacity));
    EG_TRY(egi_map_put(&c->known, value->name, c->count));
    c->names[c->count++] = value->name;
  }
  return EG_OK;
}

static eg_status add_body_inputs(egi_graph *body, const captures *c) {
  for (uint32_t i = 0; i < c->count; i++) {
    egi_value_id id = egi_graph_find_value(body, c->names[i]);
    if (id == 0) {
      EG_TRY(egi_graph_add_input(body, c->names[i], EG_DTYPE_UNDEFINED, -1, NULL, &id));
      continue;
    }
    EG_TRY(EGI_GROW(&body->module->arena, &body->inputs, body->n_inputs, &body->inputs_capacity));
    body->values[id].kind = EGI_VALUE_INPUT;
    body->values[id].index = body->n_inputs;
    body->inputs[body->n_inputs++] = id;
  }
  return EG_OK;
}

/* The node's own inputs, left out ones of Loop included, then the captured ones. */
static eg_status add_node_inputs(egi_import_scope *scope, const Onnx__NodeProto *proto, const captures *c,
                                 egi_node *node) {
  egi_arena *scratch = &scope->importer->scratch;
  uint32_t n_own = node->n_inputs;
  if (node->op == EGI_OP_Loop && n_own < 2) n_own = 2;
  if (n_own + c->count > UINT16_MAX)
    return egi_import_fail_node(scope, proto, EG_ERROR_UNSUPPORTED, "its bodies use %u values from outside", c->count);
  egi_value_id *inputs = EGI_NEW(scratch, egi_value_id, (size_t)n_own + c->count + 1);
  if (!inputs) return EG_ERROR_MEMORY;
  if (node->n_inputs) memcpy(inputs, node->inputs, node->n_inputs * sizeof *inputs);
  for (uint32_t i = 0; i < c->count; i++) EG_TRY(egi_import_use(scope, proto, c->names[i], &inputs[n_own + i]));
  node->inputs = inputs;
  node->n_inputs = (uint16_t)(n_own + c->count);
  return EG_OK;
}

static eg_status add_count(egi_import_scope *scope, const captures *c, egi_node *node) {
  egi_attribute *attributes = EGI_NEW(&scope->importer->scratch, egi_attribute, (size_t)node->n_attributes + 1);
  if (!attributes) return EG_ERROR_MEMORY;
  uint16_t count = 0;
  for (uint16_t i = 0; i < node->n_attributes; i++)
    if (strcmp(node->attributes[i].name, EGI_CAPTURES) != 0) attributes[count++] = node->attributes[i];
  attributes[count++] = egi_attribute_int(EGI_CAPTURES, c->count);
  node->attributes = attributes;
  node->n_attributes = count;
  return EG_OK;
}

eg_status egi_import_captures(egi_import_scope *scope, const Onnx__NodeProto *proto, egi_node *node) {
  captures c = {0};
  if (node->op != EGI_OP_If && node->op != EGI_OP_Loop && node->op != EGI_OP_Scan) return EG_OK;
  egi_map_init(&c.known, &scope->importer->scratch);
  for (uint16_t i = 0; i < node->n_attributes; i++)
    if (node->attributes[i].kind == EGI_ATTRIBUTE_GRAPH) EG_TRY(collect(scope, node->attributes[i].u.graph, &c));
  for (uint16_t i = 0; i < node->n_attributes; i++)
    if (node->attributes[i].kind == EGI_ATTRIBUTE_GRAPH) EG_TRY(add_body_inputs(node->attributes[i].u.graph, &c));
  EG_TRY(add_node_inputs(scope, proto, &c, node));
  return add_count(scope, &c, node);
}
