/* Nodes of fused operators become calls of functions that hold their bodies, and such calls, read from a file, become
 * nodes of the operators again when the function is what this version would write. Bodies are written as text, parsed
 * once for all nodes with equal attributes, and live with the module's functions. */
#include "graph/bodies.h"

#include <math.h>
#include <string.h>

#define DOMAIN "engraft"

typedef struct body_row {
  egi_op op;
  bool is_fused; /* --no-fuse expands it */
  const char *inputs, *outputs;
  egi_body_writer write;
} body_row;

static const body_row rows[] = {
#define EGI_BODY(symbol, inputs, outputs, writer) {EGI_OP_##symbol, true, inputs, outputs, egi_body_##writer},
#define EGI_FILE_BODY(symbol, inputs, outputs, writer) {EGI_OP_##symbol, false, inputs, outputs, egi_body_##writer},
#include "graph/bodies.def"
#undef EGI_BODY
};

static const body_row *find_row(egi_op op) {
  for (size_t i = 0; i < EGI_COUNT(rows); i++)
    if (rows[i].op == op) return &rows[i];
  return NULL;
}

bool egi_op_has_body(egi_op op) {
  return find_row(op) != NULL;
}

bool egi_op_is_fused(egi_op op) {
  const body_row *row = find_row(op);
  return row != NULL && row->is_fused;
}

/* ---- for writers ---------------------------------------------------------------------------------------------- */

bool egi_body_has(const egi_body *body, unsigned input) {
  return input < body->node->n_inputs && body->node->inputs[input] != 0;
}

bool egi_body_wants(const egi_body *body, unsigned output) {
  for (unsigned i = output; i < body->node->n_outputs; i++)
    if (body->node->outputs[i] != 0) return true;
  return false;
}

eg_dtype egi_body_dtype(const egi_body *body, unsigned input) {
  return egi_body_has(body, input) ? body->graph->values[body->node->inputs[input]].dtype : EG_DTYPE_UNDEFINED;
}

int egi_body_rank(const egi_body *body, unsigned input) {
  if (!egi_body_has(body, input)) return -1;
  const egi_value *value = &body->graph->values[body->node->inputs[input]];
  return value->dtype == EG_DTYPE_UNDEFINED ? -1 : value->rank;
}

int64_t egi_body_size(const egi_body *body, unsigned input, int axis) {
  int64_t size;
  int rank = egi_body_rank(body, input);
  if (axis < 0) axis += rank;
  if (rank < 0 || axis < 0 || axis >= rank) return -1;
  egi_dims *dims = body->graph->module->dims;
  egi_dim dim = egi_dim_resolve(dims, body->graph->values[body->node->inputs[input]].dims[axis]);
  return egi_dim_value(dims, dim, &size) ? size : -1;
}

void egi_body_number(egi_body *body, const char *name, double number, const char *like) {
  egi_text_format(body->text, "%s_ = Constant <value_float: float = %.9g> ()\n%s = CastLike (%s_, %s)\n", name, number,
                  name, name, like);
}

void egi_body_integers(egi_body *body, const char *name, const int64_t *values, unsigned count) {
  egi_text_format(body->text, "%s = Constant <value_ints: ints = [", name);
  for (unsigned i = 0; i < count; i++) egi_text_format(body->text, "%s%lld", i > 0 ? ", " : "", (long long)values[i]);
  egi_text_add(body->text, "]> ()\n");
}

void egi_body_integer(egi_body *body, const char *name, int64_t value) {
  egi_text_format(body->text, "%s = Constant <value_int: int = %lld> ()\n", name, (long long)value);
}

void egi_body_widen(egi_body *body, const char *name, const char *from, unsigned input) {
  const char *operation = egi_body_dtype(body, input) == EG_DTYPE_F64 ? "Identity" : "Cast <to = 1>";
  egi_text_format(body->text, "%s = %s (%s)\n", name, operation, from);
}

/* ---- texts ---------------------------------------------------------------------------------------------------- */

/* The first `count` of the names, made up where there are no more. */
static void add_formals(egi_text *text, const char *names, unsigned count) {
  for (unsigned i = 0; i < count; i++) {
    size_t length = strcspn(names, ",");
    if (i > 0) egi_text_add(text, ", ");
    if (length > 0)
      egi_text_append(text, names, length);
    else
      egi_text_format(text, "in%u", i);
    names += length + (names[length] == ',' ? strspn(names + length, ", ") : 0);
  }
}

eg_status egi_body_write(const egi_graph *graph, const egi_node *node, egi_text *text, bool *out_is_written) {
  const body_row *row = find_row(node->op);
  egi_body body = {graph, node, text};
  *out_is_written = false;
  if (row == NULL) return EG_OK;
  unsigned n_outputs = node->n_outputs;
  while (n_outputs > 0 && node->outputs[n_outputs - 1] == 0) n_outputs--;
  egi_text_format(text, "%s (", egi_op_get(node->op)->name);
  add_formals(text, row->inputs, node->n_inputs);
  egi_text_add(text, ") => (");
  add_formals(text, row->outputs, n_outputs);
  egi_text_add(text, ") {\n");
  *out_is_written = row->write(&body);
  egi_text_add(text, "}\n");
  return egi_text_status(text);
}

/* Payload of a Constant's attribute: a number, a list of numbers. */
static const void *payload_of(const egi_attribute *attribute, egi_weight *weight, size_t *out_element_bytes) {
  bool is_float = attribute->kind == EGI_ATTRIBUTE_FLOAT || attribute->kind == EGI_ATTRIBUTE_FLOATS;
  weight->dtype = is_float ? EG_DTYPE_F32 : EG_DTYPE_I64;
  *out_element_bytes = is_float ? sizeof(float) : sizeof(int64_t);
  switch (attribute->kind) {
  case EGI_ATTRIBUTE_FLOAT:
    return &attribute->u.f;
  case EGI_ATTRIBUTE_INT:
    return &attribute->u.i;
  case EGI_ATTRIBUTE_FLOATS:
  case EGI_ATTRIBUTE_INTS:
    weight->rank = 1;
    weight->dims[0] = attribute->count;
    return is_float ? (const void *)attribute->u.floats : (const void *)attribute->u.ints;
  default:
    return NULL;
  }
}

/* The tensor that a Constant node stands for; *out_is_read false for any other node. */
static eg_status read_constant(egi_graph *graph, const egi_node *node, egi_weight *out_weight, bool *out_is_read) {
  const egi_attribute *attribute = node->n_attributes == 1 ? &node->attributes[0] : NULL;
  size_t element_bytes;
  *out_is_read = false;
  if (node->op != EGI_OP_Constant || attribute == NULL) return EG_OK;
  *out_weight = (egi_weight){.rank = 0};
  if (attribute->kind == EGI_ATTRIBUTE_TENSOR) {
    *out_weight = graph->module->weights[attribute->u.weight];
  } else {
    const void *payload = payload_of(attribute, out_weight, &element_bytes);
    if (payload == NULL) return EG_OK;
    size_t count = out_weight->rank > 0 ? attribute->count : 1;
    uint8_t *bytes = egi_arena_get(&graph->module->arena, count > 0 ? count : 1, element_bytes);
    if (bytes == NULL) return EG_ERROR_MEMORY;
    if (count > 0) memcpy(bytes, payload, count * element_bytes);
    out_weight->bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = bytes, .size_bytes = count * element_bytes};
  }
  out_weight->name = graph->values[node->outputs[0]].name;
  *out_is_read = true;
  return EG_OK;
}

/* Numbers of a body are weights, as the importer makes of Constant nodes. */
static eg_status settle_constants(egi_graph *graph) {
  egi_value_id *map = EGI_NEW(&graph->module->arena, egi_value_id, 2 * (size_t)graph->n_values);
  if (map == NULL) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    egi_weight weight;
    bool is_read;
    uint32_t index;
    EG_TRY(read_constant(graph, &graph->nodes[id], &weight, &is_read));
    if (!is_read) continue;
    egi_value_id output = graph->nodes[id].outputs[0];
    egi_graph_remove_node(graph, id);
    egi_graph_delete_value(graph, output);
    EG_TRY(egi_module_add_weight(graph->module, &weight, &index));
    EG_TRY(egi_graph_add_weight(graph, index, &map[output]));
  }
  egi_graph_replace_many(graph, map);
  return egi_graph_tidy(graph);
}

eg_status egi_body_parse(egi_module *module, const char *text, const char *overload, const egi_node *node) {
  egi_text whole;
  egi_text_init(&whole, module->ctx);
  egi_text_format(&whole, "<domain: \"" DOMAIN "\", overload: \"%s\">\n%s", overload, text);
  eg_status status = egi_text_status(&whole);
  char *copy = status == EG_OK ? egi_arena_copy_text(&module->arena, egi_text_string(&whole), whole.length) : NULL;
  egi_text_free(&whole);
  if (copy == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_module_parse_function(module, copy, strlen(copy)));
  egi_function *function = &module->functions[module->n_functions - 1];
  egi_attribute *defaults = EGI_NEW(&module->arena, egi_attribute, node->n_attributes);
  if (defaults == NULL) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < node->n_attributes; i++)
    EG_TRY(egi_attribute_copy(&module->arena, &node->attributes[i], &defaults[i]));
  function->defaults = defaults;
  function->n_defaults = node->n_attributes;
  return settle_constants(function->graph);
}

/* ---- from nodes to calls -------------------------------------------------------------------------------------- */

typedef struct caller {
  egi_graph *graph;
  egi_arena arena;
  egi_map functions; /* text and attribute names -> index in the module */
  egi_text text;
} caller;

static bool is_overload_taken(const egi_module *module, const char *name, const char *overload) {
  for (uint32_t i = 0; i < module->n_functions; i++) {
    const egi_function *function = &module->functions[i];
    if (!strcmp(function->name, name) && !strcmp(function->domain, DOMAIN) && function->overload != NULL &&
        !strcmp(function->overload, overload))
      return true;
  }
  return false;
}

static eg_status add_function(caller *c, const egi_node *node, uint32_t *out_index) {
  egi_module *module = c->graph->module;
  const char *name = egi_op_get(node->op)->name, *overload;
  char *text = egi_arena_copy_text(&c->arena, egi_text_string(&c->text), c->text.length);
  if (text == NULL) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < node->n_attributes; i++) egi_text_format(&c->text, "<%s>", node->attributes[i].name);
  EG_TRY(egi_text_status(&c->text));
  if (egi_map_get(&c->functions, egi_text_string(&c->text), out_index)) return EG_OK;
  char *key = egi_arena_copy_text(&c->arena, egi_text_string(&c->text), c->text.length);
  if (key == NULL) return EG_ERROR_MEMORY;
  unsigned number = 0;
  do {
    overload = egi_arena_format(&module->arena, "body%u", ++number);
    if (overload == NULL) return EG_ERROR_MEMORY;
  } while (is_overload_taken(module, name, overload));
  EG_TRY(egi_body_parse(module, text, overload, node));
  *out_index = module->n_functions - 1;
  return egi_map_put(&c->functions, key, *out_index);
}

static eg_status call_one(caller *c, egi_node_id id, uint32_t *count) {
  egi_node *node = &c->graph->nodes[id];
  bool is_written;
  uint32_t index;
  c->text.length = 0;
  EG_TRY(egi_body_write(c->graph, node, &c->text, &is_written));
  if (!is_written) return EG_OK;
  EG_TRY(add_function(c, node, &index));
  const egi_function *function = &c->graph->module->functions[index];
  while (node->n_outputs > 0 && node->outputs[node->n_outputs - 1] == 0) node->n_outputs--;
  node->op_name = function->name;
  node->domain = function->domain;
  node->overload = function->overload;
  node->op = EGI_OP_UNKNOWN;
  node->origin = NULL; /* a message about another operator */
  (*count)++;
  return EG_OK;
}

eg_status egi_graph_call_bodies(egi_graph *graph, egi_bodies which, uint32_t *out_count) {
  caller c = {.graph = graph};
  eg_status status = EG_OK;
  egi_arena_init(&c.arena, graph->module->ctx, EGI_PURPOSE_GRAPH);
  egi_map_init(&c.functions, &c.arena);
  egi_text_init(&c.text, graph->module->ctx);
  *out_count = 0;
  for (egi_node_id id = 1; id < graph->n_nodes && status == EG_OK; id++) {
    egi_op op = graph->nodes[id].op;
    if (op == EGI_OP_NONE || op == EGI_OP_UNKNOWN || !egi_op_has_body(op)) continue;
    bool is_meant = which == EGI_BODIES_ALL || (which == EGI_BODIES_FUSED && egi_op_is_fused(op)) ||
                    (which == EGI_BODIES_OWN && strcmp(egi_op_get(op)->domain, DOMAIN) == 0);
    if (is_meant) status = call_one(&c, id, out_count);
  }
  egi_text_free(&c.text);
  egi_arena_clear(&c.arena);
  return status;
}
