/* Prints a model in the ONNX text syntax (onnx/docs/Syntax.md). What the syntax has no word for: states are printed as
 * further graph inputs, weights made at load as external data with the key engraft.init (docs/format.md). */
#include "graph/graph.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

typedef struct printer {
  const egi_module *module;
  uint32_t max_elements;
  egi_text *out;
} printer;

static bool is_plain_name(const char *name) {
  if (name[0] == '\0' || (name[0] >= '0' && name[0] <= '9')) return false;
  for (const char *c = name; *c != '\0'; c++) {
    bool is_letter = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || *c == '_';
    if (!is_letter && !(*c >= '0' && *c <= '9')) return false;
  }
  return true;
}

static void print_quoted(egi_text *out, const char *string) {
  egi_text_append(out, "\"", 1);
  for (const char *c = string; *c != '\0'; c++) {
    if (*c == '"' || *c == '\\') egi_text_append(out, "\\", 1);
    egi_text_append(out, c, 1);
  }
  egi_text_append(out, "\"", 1);
}

static void print_name(egi_text *out, const char *name) {
  if (is_plain_name(name))
    egi_text_add(out, name);
  else
    print_quoted(out, name);
}

static void print_float(egi_text *out, double value, int digits) {
  if (isnan(value))
    egi_text_add(out, "nan");
  else if (isinf(value))
    egi_text_add(out, value < 0 ? "-inf" : "inf");
  else
    egi_text_format(out, "%.*g", digits, value);
}

void egi_value_print_type(const egi_graph *graph, egi_value_id id, egi_text *out) {
  const egi_value *value = &graph->values[id];
  egi_text_add(out, egi_dtype_name(value->dtype));
  if (value->rank < 0) egi_text_add(out, "[]");
  for (int i = 0; i < value->rank; i++) {
    int64_t number;
    egi_dim size = egi_dim_resolve(graph->module->dims, value->dims[i]);
    egi_text_add(out, i == 0 ? "[" : ",");
    if (size == EGI_DIM_NONE) {
      egi_text_add(out, "?");
    } else if (egi_dim_value(graph->module->dims, size, &number)) {
      egi_text_format(out, "%" PRId64, number);
    } else {
      egi_text dim;
      egi_text_init(&dim, graph->module->ctx);
      egi_dim_print(graph->module->dims, size, &dim);
      print_name(out, egi_text_string(&dim));
      if (dim.is_failed) out->is_failed = true;
      egi_text_free(&dim);
    }
  }
  if (value->rank > 0) egi_text_add(out, "]");
}

static uint64_t load_bits(const uint8_t *data, unsigned size_bytes) {
  uint64_t bits = 0;
  for (unsigned i = 0; i < size_bytes; i++) bits |= (uint64_t)data[i] << (8 * i);
  return bits;
}

/* One element; 16-bit and 8-bit floats as their bit pattern, which is how the syntax takes them. */
static void print_element(const printer *p, const egi_weight *weight, uint64_t index) {
  unsigned bits = egi_dtype_bits(weight->dtype);
  if (bits < 8) {
    unsigned shift = (unsigned)(index * bits % 8);
    unsigned value = ((unsigned)weight->bytes.data[index * bits / 8] >> shift) & ((1u << bits) - 1u);
    if (egi_dtype_kind(weight->dtype) == EGI_CLASS_INTEGER && (value >> (bits - 1)) != 0)
      egi_text_format(p->out, "%d", (int)value - (int)(1u << bits));
    else
      egi_text_format(p->out, "%u", value);
    return;
  }
  uint64_t raw = load_bits(weight->bytes.data + index * (bits / 8), bits / 8 > 8 ? 8 : bits / 8);
  if (weight->dtype == EG_DTYPE_F32) {
    float value;
    uint32_t low = (uint32_t)raw;
    memcpy(&value, &low, sizeof value);
    print_float(p->out, (double)value, 9);
  } else if (weight->dtype == EG_DTYPE_F64) {
    double value;
    memcpy(&value, &raw, sizeof value);
    print_float(p->out, value, 17);
  } else if (egi_dtype_kind(weight->dtype) == EGI_CLASS_INTEGER) {
    unsigned unused = 64 - bits;
    egi_text_format(p->out, "%" PRId64, (int64_t)(raw << unused) >> unused);
  } else {
    egi_text_format(p->out, "%" PRIu64, raw);
  }
}

static uint64_t element_count(const egi_weight *weight) {
  uint64_t count = 1;
  for (int i = 0; i < weight->rank; i++) count *= (uint64_t)weight->dims[i];
  return count;
}

static void print_weight_type(const printer *p, const egi_weight *weight) {
  egi_text_add(p->out, egi_dtype_name(weight->dtype));
  for (int i = 0; i < weight->rank; i++) egi_text_format(p->out, "%s%" PRId64, i == 0 ? "[" : ",", weight->dims[i]);
  if (weight->rank > 0) egi_text_add(p->out, "]");
}

static bool has_printable_elements(const printer *p, const egi_weight *weight) {
  if (weight->bytes.kind != EGI_BYTES_MEMORY || egi_dtype_kind(weight->dtype) == EGI_CLASS_STRING) return false;
  if (egi_dtype_kind(weight->dtype) == EGI_CLASS_COMPLEX) return false;
  return p->max_elements == 0 || element_count(weight) <= p->max_elements;
}

/* "float[2] name = {1, 2}" */
static void print_weight(const printer *p, const egi_weight *weight, const char *name, bool has_equals) {
  print_weight_type(p, weight);
  if (name[0] != '\0') {
    egi_text_add(p->out, " ");
    print_name(p->out, name);
  }
  if (weight->bytes.kind == EGI_BYTES_NORMAL)
    egi_text_format(
        p->out, " = [\"location\": \"\", \"engraft.init\": \"normal\", \"std\": \"%.17g\", \"seed\": \"%" PRIu64 "\"]",
        weight->bytes.value, weight->bytes.seed);
  if (weight->bytes.kind == EGI_BYTES_FILL)
    egi_text_format(p->out, " = [\"location\": \"\", \"engraft.init\": \"fill\", \"value\": \"%.17g\"]",
                    weight->bytes.value);
  if (!has_printable_elements(p, weight)) return;
  egi_text_add(p->out, has_equals ? " = {" : " {");
  uint64_t count = element_count(weight);
  for (uint64_t i = 0; i < count; i++) {
    if (i > 0) egi_text_add(p->out, ",");
    print_element(p, weight, i);
  }
  egi_text_add(p->out, "}");
}

static void print_graph(const printer *p, const egi_graph *graph, unsigned indent);

static void print_list(const printer *p, const egi_attribute *attribute) {
  egi_text_add(p->out, "[");
  for (uint32_t i = 0; i < attribute->count; i++) {
    if (i > 0) egi_text_add(p->out, ", ");
    if (attribute->kind == EGI_ATTRIBUTE_INTS) egi_text_format(p->out, "%" PRId64, attribute->u.ints[i]);
    if (attribute->kind == EGI_ATTRIBUTE_FLOATS) print_float(p->out, (double)attribute->u.floats[i], 9);
    if (attribute->kind == EGI_ATTRIBUTE_STRINGS) print_quoted(p->out, attribute->u.strings[i]);
  }
  egi_text_add(p->out, "]");
}

static const char *attribute_type_name(egi_attribute_kind kind) {
  switch (kind) {
  case EGI_ATTRIBUTE_FLOAT:
    return "float";
  case EGI_ATTRIBUTE_INT:
    return "int";
  case EGI_ATTRIBUTE_STRING:
    return "string";
  case EGI_ATTRIBUTE_TENSOR:
    return "tensor";
  case EGI_ATTRIBUTE_GRAPH:
    return "graph";
  case EGI_ATTRIBUTE_FLOATS:
    return "floats";
  case EGI_ATTRIBUTE_INTS:
    return "ints";
  case EGI_ATTRIBUTE_STRINGS:
    return "strings";
  case EGI_ATTRIBUTE_REFERENCE:
    break;
  }
  return NULL;
}

static void print_attribute(const printer *p, const egi_attribute *attribute, unsigned indent) {
  const char *type = attribute_type_name(attribute->kind);
  print_name(p->out, attribute->name);
  if (type != NULL) egi_text_format(p->out, ": %s", type);
  egi_text_add(p->out, " = ");
  switch (attribute->kind) {
  case EGI_ATTRIBUTE_FLOAT:
    print_float(p->out, (double)attribute->u.f, 9);
    break;
  case EGI_ATTRIBUTE_INT:
    egi_text_format(p->out, "%" PRId64, attribute->u.i);
    break;
  case EGI_ATTRIBUTE_STRING:
    print_quoted(p->out, attribute->u.s);
    break;
  case EGI_ATTRIBUTE_TENSOR:
    print_weight(p, &p->module->weights[attribute->u.weight], "", false);
    break;
  case EGI_ATTRIBUTE_GRAPH:
    print_graph(p, attribute->u.graph, indent + 1);
    break;
  case EGI_ATTRIBUTE_REFERENCE:
    egi_text_format(p->out, "@%s", attribute->u.s);
    break;
  default:
    print_list(p, attribute);
    break;
  }
}

static void print_value_names(const printer *p, const egi_graph *graph, const egi_value_id *values, unsigned count) {
  for (unsigned i = 0; i < count; i++) {
    if (i > 0) egi_text_add(p->out, ", ");
    print_name(p->out, values[i] != 0 ? graph->values[values[i]].name : "");
  }
}

static void print_indent(const printer *p, unsigned indent) {
  for (unsigned i = 0; i < indent; i++) egi_text_add(p->out, "   ");
}

static void print_node(const printer *p, const egi_graph *graph, const egi_node *node, unsigned indent) {
  const egi_op_info *info = node->op == EGI_OP_UNKNOWN ? NULL : egi_op_get(node->op);
  const char *domain = info != NULL ? info->domain : node->domain;
  print_indent(p, indent);
  if (node->name != NULL && node->name[0] != '\0') {
    egi_text_add(p->out, "[");
    print_name(p->out, node->name);
    egi_text_add(p->out, "] ");
  }
  print_value_names(p, graph, node->outputs, node->n_outputs);
  egi_text_add(p->out, " = ");
  if (domain != NULL && domain[0] != '\0') egi_text_format(p->out, "%s.", domain);
  egi_text_add(p->out, info != NULL ? info->name : node->op_name);
  if (node->overload != NULL && node->overload[0] != '\0') {
    egi_text_add(p->out, ":");
    print_name(p->out, node->overload);
  }
  for (unsigned i = 0; i < node->n_attributes; i++) {
    egi_text_add(p->out, i == 0 ? " <" : ", ");
    print_attribute(p, &node->attributes[i], indent);
  }
  if (node->n_attributes > 0) egi_text_add(p->out, ">");
  egi_text_add(p->out, " (");
  print_value_names(p, graph, node->inputs, node->n_inputs);
  egi_text_add(p->out, ")\n");
}

static void print_value_infos(const printer *p, const egi_graph *graph, const egi_value_id *values, unsigned count,
                              bool *has_any) {
  for (unsigned i = 0; i < count; i++) {
    if (*has_any) egi_text_add(p->out, ", ");
    *has_any = true;
    egi_value_print_type(graph, values[i], p->out);
    egi_text_add(p->out, " ");
    print_name(p->out, graph->values[values[i]].name);
  }
}

static void print_states(const printer *p, const egi_graph *graph, bool *has_any) {
  for (egi_value_id id = 1; id < graph->n_values; id++)
    if (graph->values[id].kind == EGI_VALUE_STATE) print_value_infos(p, graph, &id, 1, has_any);
}

static void print_weights(const printer *p, const egi_graph *graph, unsigned indent) {
  bool has_any = false;
  for (egi_value_id id = 1; id < graph->n_values; id++) {
    const egi_value *value = &graph->values[id];
    if (value->kind != EGI_VALUE_WEIGHT) continue;
    egi_text_add(p->out, has_any ? ",\n" : "\n");
    print_indent(p, indent + 1);
    egi_text_add(p->out, has_any ? " " : "<");
    print_weight(p, &p->module->weights[value->index], value->name, true);
    has_any = true;
  }
  if (has_any) egi_text_add(p->out, ">");
}

static void print_graph(const printer *p, const egi_graph *graph, unsigned indent) {
  bool has_any = false;
  print_name(p->out, graph->name != NULL && graph->name[0] != '\0' ? graph->name : "main");
  egi_text_add(p->out, " (");
  print_value_infos(p, graph, graph->inputs, graph->n_inputs, &has_any);
  print_states(p, graph, &has_any);
  egi_text_add(p->out, ") => (");
  has_any = false;
  print_value_infos(p, graph, graph->outputs, graph->n_outputs, &has_any);
  egi_text_add(p->out, ")");
  print_weights(p, graph, indent);
  egi_text_add(p->out, "\n");
  print_indent(p, indent);
  egi_text_add(p->out, "{\n");
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    if (graph->nodes[id].op != EGI_OP_NONE) print_node(p, graph, &graph->nodes[id], indent + 1);
  print_indent(p, indent);
  egi_text_add(p->out, "}");
}

static void print_function(const printer *p, const egi_function *function) {
  const egi_graph *graph = function->graph;
  egi_text_add(p->out, "\n<domain: ");
  print_quoted(p->out, function->domain);
  egi_text_add(p->out, ", opset_import: [\"\" : 25, \"engraft\" : 1]");
  if (function->overload != NULL && function->overload[0] != '\0') {
    egi_text_add(p->out, ", overload: ");
    print_quoted(p->out, function->overload);
  }
  egi_text_add(p->out, ">\n");
  print_name(p->out, function->name);
  for (uint32_t i = 0; i < function->n_defaults; i++) {
    egi_text_add(p->out, i == 0 ? " <" : ", ");
    print_attribute(p, &function->defaults[i], 0);
  }
  if (function->n_defaults > 0) egi_text_add(p->out, ">");
  egi_text_add(p->out, " (");
  print_value_names(p, graph, graph->inputs, graph->n_inputs);
  egi_text_add(p->out, ") => (");
  print_value_names(p, graph, graph->outputs, graph->n_outputs);
  egi_text_add(p->out, ")\n{\n");
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    if (graph->nodes[id].op != EGI_OP_NONE) print_node(p, graph, &graph->nodes[id], 1);
  egi_text_add(p->out, "}\n");
}

eg_status egi_module_print(const egi_module *module, const egi_graph *graph, uint32_t max_elements, egi_text *out) {
  printer p = {module, max_elements, out};
  egi_text_add(out, "<ir_version: 13, opset_import: [\"\" : 25, \"engraft\" : 1]>\n");
  print_graph(&p, graph, 0);
  egi_text_add(out, "\n");
  for (uint32_t i = 0; i < module->n_functions; i++) print_function(&p, &module->functions[i]);
  return egi_text_status(out);
}
