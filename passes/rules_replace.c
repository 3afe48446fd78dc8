/* What a check asks about a match, and the replacement of a match. */
#include <string.h>

#include "passes/rules.h"

/* ---- for checks ------------------------------------------------------------------------------------------------ */

egi_graph *egi_match_graph(const egi_match *match) {
  return match->graph;
}

void *egi_match_userdata(const egi_match *match) {
  return match->rule->userdata;
}

size_t egi_match_pattern(const egi_match *match) {
  return match->alternative;
}

egi_value_id egi_match_value(const egi_match *match, const char *name) {
  for (unsigned i = 0; i < match->n_extras; i++)
    if (strcmp(match->extra_names[i], name) == 0) return match->extra_values[i];
  egi_value_id own = egi_graph_find_value(match->pattern, name);
  return own != 0 ? match->values[own] : 0;
}

egi_value_id egi_match_source(const egi_match *match, const char *name) {
  return egi_before_casts(match->graph, egi_match_value(match, name));
}

bool egi_match_scalar(const egi_match *match, const char *name, double *out) {
  return egi_constant_scalar(match->graph, egi_match_value(match, name), out);
}

const egi_attribute *egi_match_attribute(const egi_match *match, const char *name) {
  for (unsigned i = 0; i < match->n_attributes; i++)
    if (strcmp(match->attributes[i].name, name) == 0) return &match->attributes[i];
  return NULL;
}

bool egi_match_is_last_axis(const egi_match *match, const char *axes, const char *data) {
  int64_t list[EGI_MAX_RANK];
  uint32_t count = 0;
  egi_value_id value = egi_match_value(match, data);
  int rank = value != 0 ? match->graph->values[value].rank : -1;
  if (!egi_value_integers(match->graph, egi_match_source(match, axes), list, EGI_MAX_RANK, &count)) return false;
  return rank > 0 && count == 1 && (list[0] == -1 || list[0] == rank - 1);
}

bool egi_match_size(const egi_match *match, const char *name, int from_end, int64_t *out) {
  const egi_graph *graph = match->graph;
  const egi_value *value = &graph->values[egi_match_value(match, name)];
  if (value->rank < from_end) return false;
  return egi_dim_value(graph->module->dims, egi_dim_resolve(graph->module->dims, value->dims[value->rank - from_end]),
                       out);
}

bool egi_match_refuse(egi_match *match, const char *reason) {
  egi_match_miss(match, match->root, reason, EGI_OP_NONE);
  return false;
}

bool egi_match_set(egi_match *match, const egi_attribute *attribute) {
  if (match->n_attributes == EGI_MATCH_ATTRIBUTES) return false;
  match->attributes[match->n_attributes++] = *attribute;
  return true;
}

bool egi_match_bind(egi_match *match, const char *name, egi_value_id value) {
  if (match->n_extras == EGI_MATCH_EXTRAS) return false;
  match->extra_names[match->n_extras] = name;
  match->extra_values[match->n_extras++] = value;
  return true;
}

egi_emitter *egi_match_emitter(egi_match *match) {
  return &match->emit;
}

/* ---- replacement ----------------------------------------------------------------------------------------------- */

typedef struct builder {
  egi_match *match;
  const egi_graph *replacement;
  eg_dtype dtype;                        /* all floats inside have it */
  egi_value_id values[EGI_MATCH_VALUES]; /* by value of the replacement */
} builder;

static eg_dtype widest(eg_dtype a, eg_dtype b) {
  if (a == EG_DTYPE_UNDEFINED || a == b || egi_cast_is_lossless(a, b)) return b;
  return b == EG_DTYPE_UNDEFINED || egi_cast_is_lossless(b, a) ? a : EG_DTYPE_F32;
}

static eg_dtype common_type(const builder *b) {
  const egi_match *match = b->match;
  const egi_value *values = match->graph->values;
  eg_dtype dtype = EG_DTYPE_UNDEFINED;
  for (uint32_t i = 0; i < match->pattern->n_outputs; i++) {
    eg_dtype own = values[match->values[match->pattern->outputs[i]]].dtype;
    if (egi_dtype_is_float(own)) dtype = widest(dtype, own);
  }
  for (uint32_t i = 0; i < b->replacement->n_inputs; i++) {
    egi_value_id value = egi_match_source(match, b->replacement->values[b->replacement->inputs[i]].name);
    double number = 0.0;
    if (!egi_dtype_is_float(values[value].dtype) || egi_constant_scalar(match->graph, value, &number)) continue;
    dtype = widest(dtype, values[value].dtype);
  }
  return dtype;
}

/* The value itself, what it was cast from, or a new cast: whichever has the common type. */
static egi_value_id take_input(builder *b, const char *name) {
  const egi_graph *graph = b->match->graph;
  egi_value_id value = egi_match_value(b->match, name), source = egi_before_casts(graph, value);
  if (value == 0 || !egi_dtype_is_float(graph->values[value].dtype)) return value;
  if (graph->values[value].dtype == b->dtype) return value;
  return egi_emit_cast(&b->match->emit, source, b->dtype);
}

static egi_value_id emit_constant(builder *b, const egi_node *node) {
  const egi_attribute *value = node->n_attributes > 0 ? &node->attributes[0] : NULL;
  egi_emitter *emit = &b->match->emit;
  double number = 0.0;
  if (value != NULL && value->kind == EGI_ATTRIBUTE_INTS) return egi_emit_integers(emit, value->u.ints, value->count);
  if (value != NULL && value->kind == EGI_ATTRIBUTE_INT) return egi_emit_scalar(emit, (double)value->u.i, EG_DTYPE_I64);
  if (!egi_constant_scalar(b->replacement, node->outputs[0], &number) && emit->status == EG_OK)
    emit->status = egi_fail(b->match->graph->module->ctx, EG_ERROR_ARGUMENT,
                            "rule %s: a constant of the replacement is no number", b->match->rule->name);
  return egi_emit_scalar(emit, number, b->dtype);
}

/* Attributes of the replacement's node with those that the match has in place of @name; absent ones are left out. */
static unsigned take_attributes(const builder *b, const egi_node *node, egi_attribute *out) {
  unsigned count = 0;
  for (unsigned i = 0; i < node->n_attributes && i < EGI_MATCH_ATTRIBUTES; i++) {
    const egi_attribute *attribute = &node->attributes[i];
    if (attribute->kind != EGI_ATTRIBUTE_REFERENCE) {
      out[count++] = *attribute;
      continue;
    }
    const egi_attribute *own = egi_match_attribute(b->match, attribute->u.s);
    if (own == NULL) continue;
    out[count] = *own;
    out[count++].name = attribute->name;
  }
  return count;
}

static eg_status add_node(builder *b, const egi_node *node) {
  egi_attribute attributes[EGI_MATCH_ATTRIBUTES];
  egi_value_id inputs[EGI_MATCH_EXTRAS], outputs[EGI_MATCH_EXTRAS];
  egi_graph *graph = b->match->graph;
  if (node->n_inputs > EGI_MATCH_EXTRAS || node->n_outputs > EGI_MATCH_EXTRAS)
    return egi_fail(graph->module->ctx, EG_ERROR_ARGUMENT, "rule %s: a node of the replacement has too many operands",
                    b->match->rule->name);
  if (node->op == EGI_OP_Constant) {
    b->values[node->outputs[0]] = emit_constant(b, node);
    return b->match->emit.status;
  }
  unsigned n_inputs = node->n_inputs, n_attributes = take_attributes(b, node, attributes);
  for (unsigned i = 0; i < n_inputs; i++) inputs[i] = b->values[node->inputs[i]];
  while (n_inputs > 0 && inputs[n_inputs - 1] == 0) n_inputs--;
  egi_emit_many(&b->match->emit, node->op, inputs, n_inputs, attributes, n_attributes, outputs, node->n_outputs);
  for (unsigned i = 0; i < node->n_outputs; i++) b->values[node->outputs[i]] = outputs[i];
  return b->match->emit.status;
}

static eg_status add_nodes(builder *b) {
  const egi_graph *replacement = b->replacement;
  b->values[0] = 0;
  b->dtype = common_type(b);
  for (uint32_t i = 0; i < replacement->n_inputs; i++)
    b->values[replacement->inputs[i]] = take_input(b, replacement->values[replacement->inputs[i]].name);
  EG_TRY(b->match->emit.status);
  for (egi_node_id id = 1; id < replacement->n_nodes; id++) EG_TRY(add_node(b, &replacement->nodes[id]));
  return EG_OK;
}

/* False where both sizes are numbers and differ, or the ranks do. */
static bool can_have_shape(const egi_graph *graph, egi_value_id a, egi_value_id b) {
  const egi_value *first = &graph->values[a], *second = &graph->values[b];
  egi_dims *dims = graph->module->dims;
  if (first->rank != second->rank) return first->rank < 0 || second->rank < 0;
  for (int i = 0; i < first->rank; i++) {
    int64_t x = 0, y = 0;
    if (egi_dim_value(dims, egi_dim_resolve(dims, first->dims[i]), &x) &&
        egi_dim_value(dims, egi_dim_resolve(dims, second->dims[i]), &y) && x != y)
      return false;
  }
  return true;
}

/* `value` is made by the node that made `fresh`, under its old name and type. */
static void take_place(egi_graph *graph, egi_value_id value, egi_value_id fresh) {
  egi_node *old = &graph->nodes[graph->values[value].producer];
  egi_node_id maker = graph->values[fresh].producer;
  uint32_t index = graph->values[fresh].index;
  old->outputs[graph->values[value].index] = 0;
  graph->nodes[maker].outputs[index] = value;
  graph->values[value].producer = maker;
  graph->values[value].index = index;
  egi_graph_delete_value(graph, fresh);
}

/* A result of the replacement in the type of `value`, made by a node of its own. */
static egi_value_id finish_output(builder *b, uint32_t index, egi_value_id value) {
  const egi_graph *graph = b->match->graph;
  egi_value_id fresh = b->values[b->replacement->outputs[index]];
  eg_dtype dtype = graph->values[value].dtype;
  bool is_input = false;
  for (uint32_t i = 0; i < b->replacement->n_inputs; i++)
    is_input = is_input || b->replacement->inputs[i] == b->replacement->outputs[index];
  for (uint32_t i = 0; i < index; i++)
    is_input = is_input || b->replacement->outputs[i] == b->replacement->outputs[index];
  if (dtype != EG_DTYPE_UNDEFINED && graph->values[fresh].dtype != dtype)
    return egi_emit_cast(&b->match->emit, fresh, dtype);
  return is_input ? egi_emit_unary(&b->match->emit, EGI_OP_Identity, fresh) : fresh;
}

eg_status egi_match_replace(egi_match *match, const egi_graph *replacement, bool *out_done) {
  builder b = {.match = match, .replacement = replacement};
  egi_value_id fresh[EGI_MATCH_EXTRAS] = {0};
  uint32_t n = match->pattern->n_outputs;
  *out_done = false;
  EG_TRY(add_nodes(&b));
  for (uint32_t i = 0; i < n; i++) {
    egi_value_id value = match->values[match->pattern->outputs[i]];
    fresh[i] = finish_output(&b, i, value);
    EG_TRY(match->emit.status);
    if (!can_have_shape(match->graph, value, fresh[i])) return EG_OK;
  }
  for (uint32_t i = 0; i < n; i++) take_place(match->graph, match->values[match->pattern->outputs[i]], fresh[i]);
  *out_done = true;
  return EG_OK;
}
