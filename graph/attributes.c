/* Attributes of nodes: look-up, makers, copies. */
#include "graph/graph.h"

const egi_attribute *egi_node_attribute(const egi_node *node, const char *name) {
  for (uint16_t i = 0; i < node->n_attributes; i++)
    if (strcmp(node->attributes[i].name, name) == 0) return &node->attributes[i];
  return NULL;
}

static const egi_attribute *find(const egi_node *node, const char *name, egi_attribute_kind kind) {
  const egi_attribute *attribute = egi_node_attribute(node, name);
  return attribute != NULL && attribute->kind == kind ? attribute : NULL;
}

int64_t egi_node_int(const egi_node *node, const char *name, int64_t default_value) {
  const egi_attribute *attribute = find(node, name, EGI_ATTRIBUTE_INT);
  return attribute != NULL ? attribute->u.i : default_value;
}

float egi_node_float(const egi_node *node, const char *name, float default_value) {
  const egi_attribute *attribute = find(node, name, EGI_ATTRIBUTE_FLOAT);
  return attribute != NULL ? attribute->u.f : default_value;
}

const char *egi_node_string(const egi_node *node, const char *name, const char *default_value) {
  const egi_attribute *attribute = find(node, name, EGI_ATTRIBUTE_STRING);
  return attribute != NULL ? attribute->u.s : default_value;
}

const int64_t *egi_node_ints(const egi_node *node, const char *name, uint32_t *out_count) {
  const egi_attribute *attribute = find(node, name, EGI_ATTRIBUTE_INTS);
  *out_count = attribute != NULL ? attribute->count : 0;
  return attribute != NULL ? attribute->u.ints : NULL;
}

egi_attribute egi_attribute_int(const char *name, int64_t value) {
  return (egi_attribute){.name = name, .kind = EGI_ATTRIBUTE_INT, .u.i = value};
}

egi_attribute egi_attribute_float(const char *name, float value) {
  return (egi_attribute){.name = name, .kind = EGI_ATTRIBUTE_FLOAT, .u.f = value};
}

egi_attribute egi_attribute_string(const char *name, const char *value) {
  return (egi_attribute){.name = name, .kind = EGI_ATTRIBUTE_STRING, .count = (uint32_t)strlen(value), .u.s = value};
}

egi_attribute egi_attribute_ints(const char *name, const int64_t *values, uint32_t count) {
  return (egi_attribute){.name = name, .kind = EGI_ATTRIBUTE_INTS, .count = count, .u.ints = values};
}

static const void *copy_bytes(egi_arena *arena, const void *bytes, size_t count, size_t element_bytes) {
  void *copy = egi_arena_get(arena, count, element_bytes);
  if (copy != NULL && count > 0) memcpy(copy, bytes, count * element_bytes);
  return copy;
}

static eg_status copy_strings(egi_arena *arena, const egi_attribute *attribute, egi_attribute *copy) {
  const char **strings = EGI_NEW(arena, const char *, attribute->count);
  if (strings == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < attribute->count; i++) {
    strings[i] = egi_arena_copy_text(arena, attribute->u.strings[i], strlen(attribute->u.strings[i]));
    if (strings[i] == NULL) return EG_ERROR_MEMORY;
  }
  copy->u.strings = strings;
  return EG_OK;
}

static eg_status copy_payload(egi_arena *arena, const egi_attribute *attribute, egi_attribute *copy) {
  const void *payload = arena;
  switch (attribute->kind) {
  case EGI_ATTRIBUTE_STRING:
    payload = copy->u.s = egi_arena_copy_text(arena, attribute->u.s, attribute->count);
    break;
  case EGI_ATTRIBUTE_REFERENCE:
    payload = copy->u.s = egi_arena_copy_text(arena, attribute->u.s, strlen(attribute->u.s));
    break;
  case EGI_ATTRIBUTE_INTS:
    payload = copy->u.ints = copy_bytes(arena, attribute->u.ints, attribute->count, sizeof(int64_t));
    break;
  case EGI_ATTRIBUTE_FLOATS:
    payload = copy->u.floats = copy_bytes(arena, attribute->u.floats, attribute->count, sizeof(float));
    break;
  case EGI_ATTRIBUTE_STRINGS:
    return copy_strings(arena, attribute, copy);
  case EGI_ATTRIBUTE_FLOAT:
  case EGI_ATTRIBUTE_INT:
  case EGI_ATTRIBUTE_TENSOR:
  case EGI_ATTRIBUTE_GRAPH:
    break;
  }
  return payload != NULL ? EG_OK : EG_ERROR_MEMORY;
}

eg_status egi_attribute_copy(egi_arena *arena, const egi_attribute *attribute, egi_attribute *out_copy) {
  egi_attribute copy = *attribute;
  copy.name = egi_arena_copy_text(arena, attribute->name, strlen(attribute->name));
  if (copy.name == NULL) return EG_ERROR_MEMORY;
  EG_TRY(copy_payload(arena, attribute, &copy));
  *out_copy = copy;
  return EG_OK;
}

eg_status egi_node_set_attribute(egi_graph *graph, egi_node_id id, const egi_attribute *attribute) {
  egi_node *node = &graph->nodes[id];
  egi_arena *arena = &graph->module->arena;
  egi_attribute copy;
  EG_TRY(egi_attribute_copy(arena, attribute, &copy));
  for (uint16_t i = 0; i < node->n_attributes; i++) {
    if (strcmp(node->attributes[i].name, copy.name) != 0) continue;
    node->attributes[i] = copy;
    return EG_OK;
  }
  if (node->n_attributes == UINT16_MAX) return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "too many attributes");
  egi_attribute *list = EGI_NEW(arena, egi_attribute, (size_t)node->n_attributes + 1);
  if (list == NULL) return EG_ERROR_MEMORY;
  if (node->n_attributes > 0) memcpy(list, node->attributes, node->n_attributes * sizeof *list);
  list[node->n_attributes] = copy;
  node->attributes = list;
  node->n_attributes++;
  return EG_OK;
}
