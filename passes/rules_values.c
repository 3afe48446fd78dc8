/* When values and attributes of a graph are those of a pattern: constants however they are stored, casts that do not
 * count, defaults of attributes. Called by rules_match.c and by checks. */
#include <math.h>
#include <string.h>

#include "passes/rules.h"

/* The node that makes `value`, or 0. */
egi_node_id egi_maker(const egi_graph *graph, egi_value_id value) {
  return value != 0 && graph->values[value].kind == EGI_VALUE_NODE ? graph->values[value].producer : 0;
}

/* ---- constants ------------------------------------------------------------------------------------------------- */

static bool constant_node_scalar(const egi_graph *graph, const egi_node *node, double *out) {
  const egi_attribute *attribute = node->n_attributes > 0 ? &node->attributes[0] : NULL;
  if (attribute == NULL) return false;
  switch (attribute->kind) {
  case EGI_ATTRIBUTE_FLOAT:
    *out = (double)attribute->u.f;
    return true;
  case EGI_ATTRIBUTE_INT:
    *out = (double)attribute->u.i;
    return true;
  case EGI_ATTRIBUTE_FLOATS:
    *out = attribute->count == 1 ? (double)attribute->u.floats[0] : 0.0;
    return attribute->count == 1;
  case EGI_ATTRIBUTE_INTS:
    *out = attribute->count == 1 ? (double)attribute->u.ints[0] : 0.0;
    return attribute->count == 1;
  case EGI_ATTRIBUTE_TENSOR:
    return egi_weight_scalar(&graph->module->weights[attribute->u.weight], out);
  default:
    return false;
  }
}

bool egi_constant_scalar(const egi_graph *graph, egi_value_id value, double *out) {
  for (unsigned depth = 0; depth < 16 && value != 0; depth++) {
    if (egi_value_scalar(graph, value, out)) return true;
    egi_node_id id = egi_maker(graph, value);
    if (id == 0) return false;
    const egi_node *node = &graph->nodes[id];
    switch (node->op) {
    case EGI_OP_Constant:
      return constant_node_scalar(graph, node, out);
    case EGI_OP_Cast:
    case EGI_OP_CastLike:
      if (!egi_dtype_is_float(graph->values[value].dtype) && egi_dtype_is_float(graph->values[node->inputs[0]].dtype))
        return false;
      break;
    case EGI_OP_Identity:
    case EGI_OP_Expand:
    case EGI_OP_Reshape:
    case EGI_OP_Squeeze:
    case EGI_OP_Unsqueeze:
    case EGI_OP_Flatten:
    case EGI_OP_Tile:
    case EGI_OP_Transpose:
      break;
    default:
      return false;
    }
    value = node->inputs[0];
  }
  return false;
}

/* Half a unit in the last place of what the constant was rounded to, as a part of it. */
static double rounding(eg_dtype dtype) {
  switch (dtype) {
  case EG_DTYPE_BF16:
    return 1.0 / 256;
  case EG_DTYPE_F16:
    return 1.0 / 2048;
  case EG_DTYPE_F64:
  case EG_DTYPE_F32:
    return 1e-6; /* 0.7978845608 and the root of 2/pi are the same number to a writer */
  default:
    return 0.0;
  }
}

bool egi_match_constant(egi_match *m, const egi_goal *goal, const egi_node *constant) {
  const egi_graph *graph = m->graph;
  double wanted = 0.0, found = 0.0;
  egi_node_id at = egi_maker(graph, goal->found);
  int64_t numbers[EGI_MAX_RANK];
  uint32_t count = 0;
  const egi_attribute *value = constant->n_attributes > 0 ? &constant->attributes[0] : NULL;
  if (value != NULL && value->kind == EGI_ATTRIBUTE_INTS) {
    bool is_equal = egi_value_integers(graph, egi_before_casts(graph, goal->found), numbers, EGI_MAX_RANK, &count) &&
                    count == value->count && memcmp(numbers, value->u.ints, count * sizeof *numbers) == 0;
    return is_equal || egi_match_fail(m, at, "a list of integers is another one");
  }
  if (!constant_node_scalar(m->pattern, constant, &wanted))
    return egi_match_fail(m, at, "the pattern's constant has no number");
  if (!egi_constant_scalar(graph, goal->found, &found))
    return egi_match_fail(m, at, "an operand is not a constant number");
  if (goal->exponent != 1.0) found = pow(found, goal->exponent);
  if (goal->is_negated) found = -found;
  bool is_equal = fabs(found - wanted) <= rounding(graph->values[goal->found].dtype) * fabs(wanted);
  return is_equal || egi_match_fail(m, at, "a constant has another value");
}

/* ---- casts ----------------------------------------------------------------------------------------------------- */

bool egi_cast_is_lossless(eg_dtype from, eg_dtype to) {
  if (from == to) return true;
  bool is_narrow = from == EG_DTYPE_F16 || from == EG_DTYPE_BF16;
  return (is_narrow && (to == EG_DTYPE_F32 || to == EG_DTYPE_F64)) || (from == EG_DTYPE_F32 && to == EG_DTYPE_F64);
}

egi_value_id egi_before_casts(const egi_graph *graph, egi_value_id value) {
  for (egi_node_id id; (id = egi_maker(graph, value)) != 0;) {
    const egi_node *node = &graph->nodes[id];
    bool is_same = node->op == EGI_OP_Identity ||
                   ((node->op == EGI_OP_Cast || node->op == EGI_OP_CastLike) &&
                    egi_cast_is_lossless(graph->values[node->inputs[0]].dtype, graph->values[value].dtype));
    if (!is_same) break;
    value = node->inputs[0];
  }
  return value;
}

/* A Cast that leaves nothing out that the result could show. */
bool egi_match_is_transparent(const egi_match *m, const egi_node *node, egi_value_id value) {
  if (node->op == EGI_OP_Identity) return true;
  if (node->op != EGI_OP_Cast && node->op != EGI_OP_CastLike) return false;
  eg_dtype to = m->graph->values[value].dtype;
  if (!egi_dtype_is_float(to) || !egi_dtype_is_float(m->graph->values[node->inputs[0]].dtype)) return false;
  return to == m->dtype || egi_dtype_bits(to) > egi_dtype_bits(m->dtype);
}

bool egi_values_are_same(const egi_graph *graph, egi_value_id a, egi_value_id b) {
  double x = 0.0, y = 0.0;
  if (a == b || egi_before_casts(graph, a) == egi_before_casts(graph, b)) return true;
  return egi_constant_scalar(graph, a, &x) && egi_constant_scalar(graph, b, &y) && x == y;
}

/* ---- attributes ------------------------------------------------------------------------------------------------ */

typedef struct default_value {
  egi_op op; /* NONE: any */
  const char *name, *text;
  double number;
} default_value;

static const default_value defaults[] = {
    {EGI_OP_Gather, "axis", NULL, 0},
    {EGI_OP_GatherElements, "axis", NULL, 0},
    {EGI_OP_Split, "axis", NULL, 0},
    {EGI_OP_ArgMax, "axis", NULL, 0},
    {EGI_OP_ArgMin, "axis", NULL, 0},
    {EGI_OP_Flatten, "axis", NULL, 1},
    {EGI_OP_NONE, "axis", NULL, -1},
    {EGI_OP_NONE, "keepdims", NULL, 1},
    {EGI_OP_NONE, "transA", NULL, 0},
    {EGI_OP_NONE, "transB", NULL, 0},
    {EGI_OP_NONE, "alpha", NULL, 1},
    {EGI_OP_NONE, "beta", NULL, 1},
    {EGI_OP_NONE, "approximate", "none", 0},
    {EGI_OP_NONE, "noop_with_empty_axes", NULL, 0},
    {EGI_OP_NONE, "interleaved", NULL, 0},
    {EGI_OP_NONE, "batch_dims", NULL, 0},
    {EGI_OP_NONE, "stash_type", NULL, 1},
    {EGI_OP_NONE, "is_causal", NULL, 0},
    {EGI_OP_NONE, "epsilon", NULL, 1e-5},
    {EGI_OP_NONE, "softcap", NULL, 0},
    {EGI_OP_NONE, "rotary_embedding_dim", NULL, 0},
    {EGI_OP_NONE, "num_heads", NULL, 0},
};

static const default_value *default_of(egi_op op, const char *name) {
  for (size_t i = 0; i < EGI_COUNT(defaults); i++) {
    if ((defaults[i].op == EGI_OP_NONE || defaults[i].op == op) && strcmp(defaults[i].name, name) == 0)
      return &defaults[i];
  }
  return NULL;
}

static bool attribute_number(const egi_attribute *attribute, double *out) {
  if (attribute->kind == EGI_ATTRIBUTE_INT) *out = (double)attribute->u.i;
  if (attribute->kind == EGI_ATTRIBUTE_FLOAT) *out = (double)attribute->u.f;
  return attribute->kind == EGI_ATTRIBUTE_INT || attribute->kind == EGI_ATTRIBUTE_FLOAT;
}

static bool lists_are_equal(const egi_attribute *a, const egi_attribute *b) {
  if (a->kind != b->kind || a->count != b->count) return false;
  if (a->kind == EGI_ATTRIBUTE_INTS) return memcmp(a->u.ints, b->u.ints, a->count * sizeof *a->u.ints) == 0;
  return a->kind == EGI_ATTRIBUTE_FLOATS && memcmp(a->u.floats, b->u.floats, a->count * sizeof *a->u.floats) == 0;
}

/* Axes count from the front when the rank is known. */
static double from_front(const egi_match *m, const egi_node *node, const char *name, double number) {
  int rank = node->n_inputs > 0 ? m->graph->values[node->inputs[0]].rank : -1;
  return strcmp(name, "axis") == 0 && number < 0 && rank >= 0 ? number + rank : number;
}

static bool attribute_equals(const egi_match *m, const egi_node *node, const egi_attribute *wanted) {
  const egi_attribute *own = egi_node_attribute(node, wanted->name);
  const default_value *standard = own == NULL ? default_of(node->op, wanted->name) : NULL;
  double a = 0.0, b = 0.0;
  if (own == NULL && standard == NULL) return false;
  if (wanted->kind == EGI_ATTRIBUTE_STRING) {
    const char *text = own == NULL ? standard->text : own->kind == EGI_ATTRIBUTE_STRING ? own->u.s : NULL;
    return text != NULL && strcmp(text, wanted->u.s) == 0;
  }
  if (!attribute_number(wanted, &a)) return own != NULL && lists_are_equal(own, wanted);
  b = standard != NULL ? standard->number : 0.0;
  if (own != NULL && !attribute_number(own, &b)) return false;
  a = from_front(m, node, wanted->name, a);
  b = from_front(m, node, wanted->name, b);
  return fabs(a - b) <= 1e-6 * fabs(a);
}

bool egi_match_attributes(egi_match *m, const egi_node *wanted, egi_node_id id) {
  const egi_node *node = &m->graph->nodes[id];
  for (unsigned i = 0; i < wanted->n_attributes; i++) {
    const egi_attribute *attribute = &wanted->attributes[i];
    if (attribute->kind != EGI_ATTRIBUTE_REFERENCE) {
      if (!attribute_equals(m, node, attribute)) return egi_match_fail(m, id, "an attribute has another value");
      continue;
    }
    const egi_attribute *own = egi_node_attribute(node, attribute->name);
    if (own == NULL || m->n_attributes == EGI_MATCH_ATTRIBUTES) continue;
    m->attributes[m->n_attributes] = *own;
    m->attributes[m->n_attributes++].name = attribute->u.s;
  }
  return true;
}
