/* NodeProto → node: names resolved, attributes, module path, old versions upgraded. Every output of a graph is declared
 * before its first node is made, so files need not be sorted and a name that nothing makes is seen at its first use. */
#include "graph/import.h"

/* ---- names ---------------------------------------------------------------------------------------------------- */

/* Whether something in `graph` itself makes the value, so that it is more than a name from outside. */
static egi_value_id find_made(const egi_graph *graph, const char *name) {
  egi_value_id id = egi_graph_find_value(graph, name);
  return id && graph->values[id].index != UINT32_MAX ? id : 0;
}

eg_status egi_import_claim(const egi_import_scope *scope, const Onnx__NodeProto *node, const char *name) {
  const char *reason = NULL;
  if (egi_graph_find_value(scope->graph, name) || egi_map_get(&scope->refused, name, NULL)) reason = "is made twice";
  for (const egi_import_scope *outer = scope->outer; outer && !reason; outer = outer->outer)
    if (find_made(outer->graph, name)) reason = "hides a tensor of the graph around it";
  if (!reason) return EG_OK;
  if (node) return egi_import_fail_node(scope, node, EG_ERROR_FORMAT, "tensor \"%s\" %s", name, reason);
  return egi_import_fail_tensor(scope->importer, name, EG_ERROR_FORMAT, "it %s", reason);
}

eg_status egi_import_refuse(egi_import_scope *scope, const char *name, const char *reason) {
  EG_TRY(EGI_GROW(&scope->importer->scratch, &scope->reasons, scope->n_reasons, &scope->reasons_capacity));
  scope->reasons[scope->n_reasons] = reason;
  return egi_map_put(&scope->refused, name, scope->n_reasons++);
}

/* The value stands in a graph around this one: here it is a name without a producer. */
static eg_status capture(egi_import_scope *scope, const char *name, egi_value_id *out_value) {
  EG_TRY(egi_graph_add_value(scope->graph, name, out_value));
  scope->graph->values[*out_value].index = UINT32_MAX;
  return EG_OK;
}

eg_status egi_import_use(egi_import_scope *scope, const Onnx__NodeProto *node, const char *name,
                         egi_value_id *out_value) {
  const char *reason = "is made by no node, input or initializer";
  uint32_t index = 0;
  *out_value = egi_graph_find_value(scope->graph, name);
  if (*out_value) return EG_OK;
  for (const egi_import_scope *at = scope; at; at = at->outer) {
    if (at != scope && find_made(at->graph, name)) return capture(scope, name, out_value);
    if (egi_map_get(&at->refused, name, &index)) {
      reason = at->reasons[index];
      break;
    }
  }
  if (node)
    return egi_import_fail_node(scope, node, EG_ERROR_FORMAT, "its input \"%s\" %s%s", name,
                                egi_has_prefix(reason, "is ") ? "" : "is ", reason);
  return egi_import_fail_tensor(scope->importer, name, EG_ERROR_FORMAT, "a graph output that %s%s",
                                egi_has_prefix(reason, "is ") ? "" : "is ", reason);
}

/* ---- attributes ----------------------------------------------------------------------------------------------- */

/* Files of early versions leave the type out. */
static Onnx__AttributeProto__AttributeType kind_of(const Onnx__AttributeProto *a) {
  if (a->has_type && a->type != ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__UNDEFINED) return a->type;
  if (a->has_f) return ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOAT;
  if (a->has_i) return ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INT;
  if (a->has_s) return ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__STRING;
  if (a->t) return ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__TENSOR;
  if (a->g) return ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__GRAPH;
  if (a->n_floats) return ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOATS;
  if (a->n_ints) return ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INTS;
  if (a->n_strings) return ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__STRINGS;
  return ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__UNDEFINED;
}

static eg_status import_strings(egi_importer *importer, const Onnx__AttributeProto *a, egi_attribute *out) {
  const char **strings = EGI_NEW(&importer->scratch, const char *, a->n_strings);
  if (!strings) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < a->n_strings; i++) {
    strings[i] = egi_arena_copy_text(&importer->scratch, (const char *)a->strings[i].data, a->strings[i].len);
    if (!strings[i]) return EG_ERROR_MEMORY;
  }
  out->u.strings = strings;
  return EG_OK;
}

static eg_status import_text(egi_importer *importer, const Onnx__AttributeProto *a, egi_attribute *out) {
  out->count = (uint32_t)a->s.len;
  out->u.s = egi_arena_copy_text(&importer->scratch, a->s.len ? (const char *)a->s.data : "", a->s.len);
  return out->u.s ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status import_tensor_attribute(egi_importer *importer, const Onnx__AttributeProto *a, egi_attribute *out,
                                         bool *out_is_kept) {
  egi_weight weight;
  const char *reason = NULL;
  if (!a->t) return egi_import_fail_tensor(importer, out->name, EG_ERROR_FORMAT, "a tensor attribute without a tensor");
  const char *name = a->t->name && a->t->name[0] ? a->t->name : out->name;
  EG_TRY(egi_import_tensor(importer, a->t, name, &weight, &reason));
  *out_is_kept = !reason;
  return reason ? EG_OK : egi_module_add_weight(importer->module, &weight, &out->u.weight);
}

static eg_status import_body(egi_import_scope *scope, const Onnx__AttributeProto *a, egi_attribute *out) {
  egi_importer *importer = scope->importer;
  if (!a->g) return egi_import_fail_tensor(importer, out->name, EG_ERROR_FORMAT, "a graph attribute without a graph");
  egi_import_scope body = {.importer = importer, .outer = scope, .opsets = scope->opsets, .function = scope->function};
  egi_map_init(&body.refused, &importer->scratch);
  EG_TRY(egi_graph_create(importer->module, egi_import_text(a->g->name), &body.graph));
  out->u.graph = body.graph;
  return egi_import_graph(&body, a->g, false);
}

eg_status egi_import_attribute(egi_import_scope *scope, const Onnx__AttributeProto *a, egi_attribute *out,
                               bool *out_is_kept) {
  egi_importer *importer = scope->importer;
  Onnx__AttributeProto__AttributeType kind = kind_of(a);
  *out = (egi_attribute){.name = egi_import_text(a->name), .kind = (egi_attribute_kind)kind};
  *out_is_kept = true;
  if (a->ref_attr_name && a->ref_attr_name[0]) {
    out->kind = EGI_ATTRIBUTE_REFERENCE;
    out->count = (uint32_t)kind; /* of the attribute that will take its place, for export */
    out->u.s = a->ref_attr_name;
    return EG_OK;
  }
  switch (kind) {
  case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOAT:
    out->u.f = a->f;
    return EG_OK;
  case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INT:
    out->u.i = a->i;
    return EG_OK;
  case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__STRING:
    return import_text(importer, a, out);
  case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__TENSOR:
    return import_tensor_attribute(importer, a, out, out_is_kept);
  case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__GRAPH:
    return import_body(scope, a, out);
  case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOATS:
    out->count = (uint32_t)a->n_floats;
    out->u.floats = a->floats;
    return EG_OK;
  case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INTS:
    out->count = (uint32_t)a->n_ints;
    out->u.ints = a->ints;
    return EG_OK;
  case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__STRINGS:
    out->count = (uint32_t)a->n_strings;
    return import_strings(importer, a, out);
  default:
    *out_is_kept = false;
    return EG_OK;
  }
}

static eg_status import_attributes(egi_import_scope *scope, const Onnx__NodeProto *proto, egi_node *node) {
  egi_attribute *list = EGI_NEW(&scope->importer->scratch, egi_attribute, proto->n_attribute);
  if (!list) return EG_ERROR_MEMORY;
  if (proto->n_attribute > UINT16_MAX)
    return egi_import_fail_node(scope, proto, EG_ERROR_UNSUPPORTED, "%zu attributes", proto->n_attribute);
  node->attributes = list;
  for (size_t i = 0; i < proto->n_attribute; i++) {
    bool is_kept = true;
    const char *name = egi_import_text(proto->attribute[i]->name);
    if (!*name) return egi_import_fail_node(scope, proto, EG_ERROR_FORMAT, "an attribute without a name");
    if (egi_node_attribute(node, name))
      return egi_import_fail_node(scope, proto, EG_ERROR_FORMAT, "attribute \"%s\" stands there twice", name);
    EG_TRY(egi_import_attribute(scope, proto->attribute[i], &list[node->n_attributes], &is_kept));
    if (is_kept) node->n_attributes++;
  }
  return EG_OK;
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

static bool is_constant(const Onnx__NodeProto *node) {
  const char *domain = egi_import_text(node->domain);
  return node->op_type && !strcmp(node->op_type, "Constant") && (!*domain || !strcmp(domain, "ai.onnx")) &&
         node->n_output == 1 && node->output[0][0];
}

/* `is_weight`[i]: node i was a Constant and is a weight (or a tensor that cannot be used) now. */
static eg_status import_constants(egi_import_scope *scope, size_t n_nodes, Onnx__NodeProto *const *nodes,
                                  bool *is_weight) {
  for (size_t i = 0; i < n_nodes; i++) {
    egi_weight weight;
    egi_value_id value;
    uint32_t index = 0;
    const char *reason = NULL;
    if (!is_constant(nodes[i])) continue;
    EG_TRY(egi_import_constant(scope->importer, nodes[i], &weight, &is_weight[i], &reason));
    if (!is_weight[i]) continue;
    EG_TRY(egi_import_claim(scope, nodes[i], nodes[i]->output[0]));
    if (reason) {
      EG_TRY(egi_import_refuse(scope, nodes[i]->output[0], reason));
      continue;
    }
    EG_TRY(egi_module_add_weight(scope->importer->module, &weight, &index));
    EG_TRY(egi_graph_add_weight(scope->graph, index, &value));
  }
  return EG_OK;
}

static eg_status declare_outputs(egi_import_scope *scope, const Onnx__NodeProto *node) {
  egi_value_id value;
  if (node->n_input > UINT16_MAX || node->n_output > UINT16_MAX)
    return egi_import_fail_node(scope, node, EG_ERROR_UNSUPPORTED, "%zu inputs, %zu outputs", node->n_input,
                                node->n_output);
  for (size_t i = 0; i < node->n_output; i++) {
    if (!node->output[i][0]) continue;
    EG_TRY(egi_import_claim(scope, node, node->output[i]));
    EG_TRY(egi_graph_add_value(scope->graph, node->output[i], &value));
  }
  return EG_OK;
}

static eg_status import_lists(egi_import_scope *scope, const Onnx__NodeProto *proto, egi_node *node) {
  egi_arena *scratch = &scope->importer->scratch;
  size_t n_inputs = proto->n_input, n_outputs = proto->n_output;
  while (n_inputs && !proto->input[n_inputs - 1][0]) n_inputs--;
  while (n_outputs && !proto->output[n_outputs - 1][0]) n_outputs--;
  node->inputs = EGI_NEW(scratch, egi_value_id, n_inputs);
  node->outputs = EGI_NEW(scratch, egi_value_id, n_outputs);
  if (!node->inputs || !node->outputs) return EG_ERROR_MEMORY;
  node->n_inputs = (uint16_t)n_inputs;
  node->n_outputs = (uint16_t)n_outputs;
  for (size_t i = 0; i < n_inputs; i++)
    if (proto->input[i][0]) EG_TRY(egi_import_use(scope, proto, proto->input[i], &node->inputs[i]));
  for (size_t i = 0; i < n_outputs; i++)
    node->outputs[i] = proto->output[i][0] ? egi_graph_find_value(scope->graph, proto->output[i]) : EGI_VALUE_UNWANTED;
  return EG_OK;
}

static eg_status set_operator(egi_import_scope *scope, const Onnx__NodeProto *proto, egi_node *node) {
  const char *domain = egi_import_text(proto->domain);
  if (!proto->op_type || !proto->op_type[0])
    return egi_import_fail_node(scope, proto, EG_ERROR_FORMAT, "a node without an operator");
  node->domain = strcmp(domain, "ai.onnx") != 0 ? domain : "";
  node->op_name = proto->op_type;
  node->overload = proto->overload && proto->overload[0] ? proto->overload : NULL;
  node->name = egi_import_text(proto->name);
  node->origin = proto;
  node->op = egi_op_find(node->domain, node->op_name);
  int64_t version = egi_opset_version(&scope->opsets, node->domain);
  if (!version)
    return egi_import_fail_node(scope, proto, EG_ERROR_FORMAT, "the file imports no operator set \"%s\"", node->domain);
  bool is_unchanged = node->op != EGI_OP_UNKNOWN && egi_op_get(node->op)->version <= version;
  if (!node->domain[0] && version < EGI_OLDEST_OPSET && !is_unchanged)
    return egi_import_fail_node(scope, proto, EG_ERROR_UNSUPPORTED,
                                "operator set %lld; the oldest that can be read is %d", (long long)version,
                                EGI_OLDEST_OPSET);
  bool is_listed;
  EG_TRY(egi_scope_of_message(&scope->importer->scratch, proto, &node->scope, &is_listed));
  scope->importer->has_scopes = scope->importer->has_scopes || is_listed;
  return EG_OK;
}

static eg_status check_arity(egi_import_scope *scope, const Onnx__NodeProto *proto, const egi_node *node) {
  if (node->op == EGI_OP_UNKNOWN) return EG_OK;
  const egi_op_info *info = egi_op_get(node->op);
  for (unsigned i = 0; i < info->in_min; i++)
    if (i >= node->n_inputs || (!node->inputs[i] && !egi_op_may_lack(node->op, i)))
      return egi_import_fail_node(scope, proto, EG_ERROR_FORMAT, "its input %u is missing", i);
  if (info->in_max != 255 && node->n_inputs > info->in_max)
    return egi_import_fail_node(scope, proto, EG_ERROR_FORMAT, "%u inputs, it takes %u", node->n_inputs, info->in_max);
  if (node->n_outputs < info->out_min || (info->out_max != 255 && node->n_outputs > info->out_max))
    return egi_import_fail_node(scope, proto, EG_ERROR_FORMAT, "%u outputs, it has %u", node->n_outputs,
                                info->out_max != 255 ? info->out_max : info->out_min);
  return EG_OK;
}

static eg_status import_node(egi_import_scope *scope, const Onnx__NodeProto *proto) {
  egi_node node = {0};
  egi_node_id id;
  EG_TRY(set_operator(scope, proto, &node));
  EG_TRY(import_lists(scope, proto, &node));
  EG_TRY(import_attributes(scope, proto, &node));
  egi_upgrade upgrade = {scope->graph, &scope->importer->scratch, egi_opset_version(&scope->opsets, "")};
  if (!node.domain[0]) EG_TRY(egi_upgrade_node(&upgrade, &node));
  EG_TRY(egi_import_check_attributes(scope, proto, &node));
  EG_TRY(egi_import_captures(scope, proto, &node));
  EG_TRY(check_arity(scope, proto, &node));
  return egi_graph_add_node(scope->graph, &node, &id);
}

eg_status egi_import_declare(egi_import_scope *scope, size_t n_nodes, Onnx__NodeProto *const *nodes) {
  bool *is_weight = EGI_NEW(&scope->importer->scratch, bool, n_nodes);
  if (!is_weight) return EG_ERROR_MEMORY;
  EG_TRY(import_constants(scope, n_nodes, nodes, is_weight));
  for (size_t i = 0; i < n_nodes; i++)
    if (!is_weight[i]) EG_TRY(declare_outputs(scope, nodes[i]));
  scope->is_weight = is_weight;
  return EG_OK;
}

eg_status egi_import_nodes(egi_import_scope *scope, size_t n_nodes, Onnx__NodeProto *const *nodes) {
  for (size_t i = 0; i < n_nodes; i++)
    if (!scope->is_weight[i]) EG_TRY(import_node(scope, nodes[i]));
  return EG_OK;
}
