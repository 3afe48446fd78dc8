/* Nodes, attributes and graphs → messages. What the graph does not model (remarks, metadata, unknown fields, attributes
 * of rare kinds) comes from the message a node was made of. */
#include "graph/export.h"
#include "graph/import.h"

/* ---- attributes ----------------------------------------------------------------------------------------------- */

static eg_status export_strings(egi_exporter *exporter, const egi_attribute *attribute, Onnx__AttributeProto *row) {
  row->strings = EGI_NEW(&exporter->arena, ProtobufCBinaryData, attribute->count);
  if (!row->strings) return EG_ERROR_MEMORY;
  row->n_strings = attribute->count;
  for (uint32_t i = 0; i < attribute->count; i++) {
    row->strings[i].data = (uint8_t *)egi_export_text(attribute->u.strings[i]);
    row->strings[i].len = strlen(attribute->u.strings[i]);
  }
  return EG_OK;
}

/* A reference states the type of what it refers to: as the importer found it, or as its node's origin has it. */
static void export_reference(const egi_attribute *attribute, const Onnx__AttributeProto *origin,
                             Onnx__AttributeProto *row) {
  row->ref_attr_name = egi_export_text(attribute->u.s);
  row->type = origin ? origin->type : (Onnx__AttributeProto__AttributeType)attribute->count;
  row->has_type = row->type != ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__UNDEFINED;
}

static eg_status export_payload(egi_exporter *exporter, const egi_attribute *attribute,
                                const Onnx__AttributeProto *origin, Onnx__AttributeProto *row) {
  const egi_module *module = exporter->module;
  row->has_type = true;
  row->type = (Onnx__AttributeProto__AttributeType)attribute->kind;
  switch (attribute->kind) {
  case EGI_ATTRIBUTE_FLOAT:
    row->has_f = true;
    row->f = attribute->u.f;
    return EG_OK;
  case EGI_ATTRIBUTE_INT:
    row->has_i = true;
    row->i = attribute->u.i;
    return EG_OK;
  case EGI_ATTRIBUTE_STRING:
    row->has_s = true;
    row->s.data = (uint8_t *)egi_export_text(attribute->u.s);
    row->s.len = attribute->count;
    return EG_OK;
  case EGI_ATTRIBUTE_TENSOR: {
    const egi_weight *weight = &module->weights[attribute->u.weight];
    return egi_export_tensor(exporter, weight, weight->name, &row->t);
  }
  case EGI_ATTRIBUTE_GRAPH:
    return egi_export_graph(exporter, attribute->u.graph, &row->g);
  case EGI_ATTRIBUTE_FLOATS:
    row->n_floats = attribute->count;
    row->floats = (float *)(uintptr_t)attribute->u.floats;
    return EG_OK;
  case EGI_ATTRIBUTE_INTS:
    row->n_ints = attribute->count;
    row->ints = (int64_t *)(uintptr_t)attribute->u.ints;
    return EG_OK;
  case EGI_ATTRIBUTE_STRINGS:
    return export_strings(exporter, attribute, row);
  case EGI_ATTRIBUTE_REFERENCE:
    export_reference(attribute, origin, row);
    return EG_OK;
  }
  return EG_OK;
}

eg_status egi_export_attribute(egi_exporter *exporter, const egi_attribute *attribute,
                               const Onnx__AttributeProto *origin, Onnx__AttributeProto **out_attribute) {
  Onnx__AttributeProto *row = EGI_NEW(&exporter->arena, Onnx__AttributeProto, 1);
  if (!row) return EG_ERROR_MEMORY;
  onnx__attribute_proto__init(row);
  if (origin) {
    row->base.n_unknown_fields = origin->base.n_unknown_fields;
    row->base.unknown_fields = origin->base.unknown_fields;
    row->doc_string = origin->doc_string;
  }
  row->name = egi_export_text(attribute->name);
  *out_attribute = row;
  return export_payload(exporter, attribute, origin, row);
}

static const Onnx__AttributeProto *find_origin(const Onnx__NodeProto *origin, const char *name) {
  for (size_t i = 0; origin && i < origin->n_attribute; i++)
    if (origin->attribute[i]->name && !strcmp(origin->attribute[i]->name, name)) return origin->attribute[i];
  return NULL;
}

/* Kinds that the graph does not model. */
static bool is_rare(const Onnx__AttributeProto *attribute) {
  if (attribute->ref_attr_name && attribute->ref_attr_name[0]) return false;
  return attribute->n_tensors || attribute->n_graphs || attribute->tp || attribute->n_type_protos ||
         attribute->sparse_tensor || attribute->n_sparse_tensors ||
         (attribute->t && attribute->t->data_type == ONNX__TENSOR_PROTO__DATA_TYPE__STRING);
}

/* The attribute itself, but for its name, which the graph has only once. */
static Onnx__AttributeProto *as_it_was(const Onnx__AttributeProto *attribute) {
  return (Onnx__AttributeProto *)(uintptr_t)attribute;
}

static eg_status export_attributes(egi_exporter *exporter, const egi_node *node, const Onnx__NodeProto *origin,
                                   Onnx__NodeProto *row) {
  size_t n_rare = origin ? origin->n_attribute : 0;
  row->attribute = EGI_NEW(&exporter->arena, Onnx__AttributeProto *, node->n_attributes + n_rare);
  if (!row->attribute) return EG_ERROR_MEMORY;
  row->n_attribute = 0;
  for (uint16_t i = 0; i < node->n_attributes; i++) {
    const egi_attribute *attribute = &node->attributes[i];
    if (!strcmp(attribute->name, EGI_CAPTURES)) continue;
    EG_TRY(egi_export_attribute(exporter, attribute, find_origin(origin, attribute->name),
                                &row->attribute[row->n_attribute++]));
  }
  for (size_t i = 0; i < n_rare; i++)
    if (is_rare(origin->attribute[i])) row->attribute[row->n_attribute++] = as_it_was(origin->attribute[i]);
  return EG_OK;
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

static eg_status export_names(egi_exporter *exporter, const egi_graph *graph, const egi_value_id *values, size_t count,
                              char ***out_names) {
  char **names = EGI_NEW(&exporter->arena, char *, count);
  if (!names) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) names[i] = egi_export_text(values[i] ? graph->values[values[i]].name : "");
  *out_names = names;
  return EG_OK;
}

/* A node that a pass made carries its module path in its name, where the importer finds it again, and has a name of its
 * own. */
static eg_status export_name(egi_exporter *exporter, const egi_node *node, egi_node_id id, Onnx__NodeProto *row) {
  row->name = egi_export_text(node->name[0] ? node->name : NULL);
  bool has_scope = !node->origin && node->scope && node->scope[0];
  const char *known = has_scope ? egi_scope_from_node_name(&exporter->arena, node->name) : NULL;
  if (has_scope && (!known || strcmp(known, node->scope) != 0)) { /* else read from such a file */
    row->name = egi_arena_format(&exporter->arena, "/%s/%s_%u", node->scope, row->op_type, id);
    if (!row->name) return EG_ERROR_MEMORY;
  }
  if (!row->name) return EG_OK;
  if (!node->origin && egi_map_get(&exporter->node_names, row->name, NULL)) {
    row->name = egi_arena_format(&exporter->arena, "%s_%u", row->name, id);
    if (!row->name) return EG_ERROR_MEMORY;
  }
  return egi_map_put(&exporter->node_names, row->name, 1);
}

static eg_status export_node(egi_exporter *exporter, const egi_graph *graph, egi_node_id id,
                             Onnx__NodeProto **out_node) {
  const egi_node *node = &graph->nodes[id];
  const Onnx__NodeProto *origin = node->origin;
  Onnx__NodeProto *row = EGI_NEW(&exporter->arena, Onnx__NodeProto, 1);
  if (!row) return EG_ERROR_MEMORY;
  onnx__node_proto__init(row);
  if (origin) *row = *origin;
  bool is_known = node->op != EGI_OP_UNKNOWN;
  row->op_type = egi_export_text(is_known ? egi_op_get(node->op)->name : node->op_name);
  row->domain = egi_export_text(is_known ? egi_op_get(node->op)->domain : node->domain);
  if (!row->domain[0]) row->domain = NULL;
  row->overload = egi_export_text(node->overload);
  row->n_input = node->n_inputs;
  row->n_output = node->n_outputs;
  EG_TRY(export_names(exporter, graph, node->inputs, node->n_inputs, &row->input));
  EG_TRY(export_names(exporter, graph, node->outputs, node->n_outputs, &row->output));
  EG_TRY(export_name(exporter, node, id, row));
  bool is_put;
  EG_TRY(egi_scope_put(&exporter->arena, node->scope, row, &is_put));
  exporter->has_scopes = exporter->has_scopes || is_put;
  *out_node = row;
  return export_attributes(exporter, node, origin, row);
}

/* ---- captured values ------------------------------------------------------------------------------------------ */

static uint32_t count_captures(const egi_node *node) {
  int64_t count = egi_node_int(node, EGI_CAPTURES, 0);
  return count < 0 || count > node->n_inputs ? 0 : (uint32_t)count;
}

/* A value with another name than the one that the bodies of a node see it under gets that name by an Identity. */
static eg_status export_alias(egi_exporter *exporter, const egi_graph *graph, egi_value_id value, const char *name,
                              Onnx__NodeProto **out_node) {
  egi_value_id other = egi_graph_find_value(graph, name);
  *out_node = NULL;
  if (other == value || !strcmp(graph->values[value].name, name)) return EG_OK;
  if (other != 0)
    return egi_fail(exporter->ctx, EG_ERROR_UNSUPPORTED, "%s: a body takes \"%s\" for \"%s\", which is another tensor",
                    exporter->path, name, graph->values[value].name);
  Onnx__NodeProto *row = EGI_NEW(&exporter->arena, Onnx__NodeProto, 1);
  char **names = EGI_NEW(&exporter->arena, char *, 2);
  if (!row || !names) return EG_ERROR_MEMORY;
  onnx__node_proto__init(row);
  names[0] = egi_export_text(graph->values[value].name);
  names[1] = egi_export_text(name);
  row->op_type = egi_export_text("Identity");
  row->input = names;
  row->output = names + 1;
  row->n_input = row->n_output = 1;
  *out_node = row;
  return EG_OK;
}

/* Bodies see captured values by name again: the last inputs of the node and of its bodies go. Aliases stand before. */
static eg_status export_captures(egi_exporter *exporter, const egi_graph *graph, egi_node_id id, Onnx__NodeProto *row,
                                 Onnx__NodeProto **nodes, size_t *count) {
  const egi_node *node = &graph->nodes[id];
  uint32_t n_captures = count_captures(node);
  row->n_input -= n_captures;
  while (n_captures > 0 && row->n_input > 0 && !row->input[row->n_input - 1][0]) row->n_input--;
  for (size_t i = 0; i < row->n_attribute; i++) {
    Onnx__GraphProto *body = row->attribute[i]->g;
    if (!body || body->n_input < n_captures) continue;
    body->n_input -= n_captures;
    for (uint32_t k = 0; k < n_captures; k++) {
      Onnx__NodeProto *alias = NULL;
      const char *name = body->input[body->n_input + k]->name;
      bool is_there = false;
      for (size_t a = 0; a < *count && !is_there; a++)
        is_there = nodes[a]->n_output > 0 && !strcmp(nodes[a]->output[0], name);
      if (!is_there) EG_TRY(export_alias(exporter, graph, node->inputs[node->n_inputs - n_captures + k], name, &alias));
      if (alias) nodes[(*count)++] = alias;
    }
  }
  return EG_OK;
}

/* The node, after the aliases that its bodies need. */
static eg_status export_with_captures(egi_exporter *exporter, const egi_graph *graph, egi_node_id id,
                                      Onnx__NodeProto **nodes, size_t *count) {
  Onnx__NodeProto *row;
  EG_TRY(export_node(exporter, graph, id, &row));
  if (count_captures(&graph->nodes[id]) > 0) EG_TRY(export_captures(exporter, graph, id, row, nodes, count));
  nodes[(*count)++] = row;
  return EG_OK;
}

static eg_status export_constant(egi_exporter *exporter, const egi_graph *graph, egi_value_id value,
                                 Onnx__NodeProto **out_node) {
  const egi_weight *weight = &exporter->module->weights[graph->values[value].index];
  Onnx__NodeProto *row = EGI_NEW(&exporter->arena, Onnx__NodeProto, 1);
  Onnx__AttributeProto *attribute = EGI_NEW(&exporter->arena, Onnx__AttributeProto, 1);
  if (!row || !attribute) return EG_ERROR_MEMORY;
  onnx__node_proto__init(row);
  onnx__attribute_proto__init(attribute);
  attribute->name = egi_export_text("value");
  attribute->has_type = true;
  attribute->type = ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__TENSOR;
  EG_TRY(egi_export_tensor(exporter, weight, graph->values[value].name, &attribute->t));
  row->op_type = egi_export_text("Constant");
  EG_TRY(export_names(exporter, graph, &value, 1, &row->output));
  row->attribute = EGI_NEW(&exporter->arena, Onnx__AttributeProto *, 1);
  if (!row->attribute) return EG_ERROR_MEMORY;
  row->attribute[0] = attribute;
  row->n_output = row->n_attribute = 1;
  *out_node = row;
  return EG_OK;
}

eg_status egi_export_nodes(egi_exporter *exporter, const egi_graph *graph, bool has_constants,
                           Onnx__NodeProto ***out_nodes, size_t *out_count) {
  size_t count = 0, capacity = (size_t)graph->n_nodes + (has_constants ? graph->n_values : 0);
  for (egi_node_id n = 1; n < graph->n_nodes; n++) capacity += 2 * (size_t)count_captures(&graph->nodes[n]);
  Onnx__NodeProto **nodes = EGI_NEW(&exporter->arena, Onnx__NodeProto *, capacity);
  if (!nodes) return EG_ERROR_MEMORY;
  for (egi_value_id v = 1; has_constants && v < graph->n_values; v++)
    if (graph->values[v].kind == EGI_VALUE_WEIGHT) EG_TRY(export_constant(exporter, graph, v, &nodes[count++]));
  for (egi_node_id n = 1; n < graph->n_nodes; n++)
    if (graph->nodes[n].op != EGI_OP_NONE) EG_TRY(export_with_captures(exporter, graph, n, nodes, &count));
  *out_nodes = nodes;
  *out_count = count;
  return EG_OK;
}

/* ---- graphs --------------------------------------------------------------------------------------------------- */

static eg_status export_infos(egi_exporter *exporter, const egi_graph *graph, const egi_value_id *values, size_t count,
                              Onnx__ValueInfoProto ***out_infos) {
  Onnx__ValueInfoProto **infos = EGI_NEW(&exporter->arena, Onnx__ValueInfoProto *, count);
  if (!infos) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) EG_TRY(egi_export_info(exporter, graph, values[i], &infos[i]));
  *out_infos = infos;
  return EG_OK;
}

static eg_status export_weights(egi_exporter *exporter, const egi_graph *graph, Onnx__GraphProto *row) {
  row->initializer = EGI_NEW(&exporter->arena, Onnx__TensorProto *, graph->n_values);
  if (!row->initializer) return EG_ERROR_MEMORY;
  row->n_initializer = 0;
  for (egi_value_id v = 1; v < graph->n_values; v++) {
    const egi_value *value = &graph->values[v];
    if (value->kind == EGI_VALUE_STATE)
      return egi_fail(exporter->ctx, EG_ERROR_UNSUPPORTED,
                      "%s: graph \"%s\" has states (\"%s\") and cannot be exported", exporter->path, graph->name,
                      value->name);
    if (value->kind == EGI_VALUE_WEIGHT)
      EG_TRY(egi_export_tensor(exporter, &exporter->module->weights[value->index], value->name,
                               &row->initializer[row->n_initializer++]));
  }
  return EG_OK;
}

/* Inputs without a default, then those that have one. */
static eg_status export_inputs(egi_exporter *exporter, const egi_graph *graph, Onnx__GraphProto *row) {
  egi_value_id *values = EGI_NEW(&exporter->arena, egi_value_id, (size_t)graph->n_inputs + graph->n_values);
  if (!values) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < graph->n_inputs; i++) values[i] = graph->inputs[i];
  row->n_input = graph->n_inputs;
  for (egi_value_id v = 1; v < graph->n_values; v++) {
    bool is_weight = graph->values[v].kind == EGI_VALUE_WEIGHT;
    if (is_weight && exporter->module->weights[graph->values[v].index].is_input) values[row->n_input++] = v;
  }
  return export_infos(exporter, graph, values, row->n_input, &row->input);
}

eg_status egi_export_graph(egi_exporter *exporter, const egi_graph *graph, Onnx__GraphProto **out_graph) {
  Onnx__GraphProto *row = EGI_NEW(&exporter->arena, Onnx__GraphProto, 1);
  if (!row) return EG_ERROR_MEMORY;
  onnx__graph_proto__init(row);
  row->name = egi_export_text(graph->name);
  row->n_output = graph->n_outputs;
  EG_TRY(export_weights(exporter, graph, row));
  EG_TRY(export_inputs(exporter, graph, row));
  EG_TRY(export_infos(exporter, graph, graph->outputs, graph->n_outputs, &row->output));
  *out_graph = row;
  return egi_export_nodes(exporter, graph, false, &row->node, &row->n_node);
}
