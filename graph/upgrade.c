/* Old operator versions → the newest form: attributes that became inputs, defaults that changed, operators that
 * inference does without. One row an operator; versions that only widened types need none. Sources: the operators'
 * version histories in onnx/docs/Changelog.md. */
#include "graph/import.h"

typedef eg_status (*upgrade_rule)(egi_upgrade *upgrade, egi_node *node);

/* ---- helpers -------------------------------------------------------------------------------------------------- */

static const char *label_of(const egi_upgrade *upgrade, const egi_node *node) {
  if (node->name[0]) return node->name;
  bool has_output = node->n_outputs && node->outputs[0] != EGI_VALUE_UNWANTED;
  return has_output ? upgrade->graph->values[node->outputs[0]].name : "";
}

static eg_status fail_attribute(const egi_upgrade *upgrade, const egi_node *node, const char *name) {
  return egi_fail(upgrade->graph->module->ctx, EG_ERROR_FORMAT, "node \"%s\" (%s): attribute \"%s\" has the wrong type",
                  label_of(upgrade, node), node->op_name, name);
}

static void remove_attribute(egi_node *node, const char *name) {
  uint16_t count = 0;
  for (uint16_t i = 0; i < node->n_attributes; i++)
    if (strcmp(node->attributes[i].name, name) != 0) node->attributes[count++] = node->attributes[i];
  node->n_attributes = count;
}

static eg_status set_input(egi_upgrade *upgrade, egi_node *node, uint16_t index, egi_value_id value) {
  if (index >= node->n_inputs) {
    egi_value_id *inputs = EGI_NEW(upgrade->scratch, egi_value_id, (size_t)index + 1);
    if (!inputs) return EG_ERROR_MEMORY;
    if (node->n_inputs) memcpy(inputs, node->inputs, node->n_inputs * sizeof(*inputs));
    node->inputs = inputs;
    node->n_inputs = (uint16_t)(index + 1);
  }
  node->inputs[index] = value;
  return EG_OK;
}

/* A node with one fresh output. */
static eg_status add_node(egi_upgrade *upgrade, const egi_node *like, egi_op op, const egi_node *lists,
                          egi_value_id *out_value) {
  egi_node node = *lists;
  egi_node_id id;
  egi_value_id output = 0;
  node.op = op;
  node.name = "";
  node.scope = like->scope;
  node.outputs = &output;
  node.n_outputs = 1;
  EG_TRY(egi_graph_add_node(upgrade->graph, &node, &id));
  *out_value = upgrade->graph->nodes[id].outputs[0];
  return EG_OK;
}

/* In a function body the number is the caller's: a Constant node that refers to the attribute. */
static eg_status add_reference(egi_upgrade *upgrade, const egi_node *like, const egi_attribute *attribute,
                               const char *kind, egi_value_id *out_value) {
  egi_attribute reference = *attribute;
  egi_node lists = {.attributes = &reference, .n_attributes = 1};
  reference.name = kind;
  return add_node(upgrade, like, EGI_OP_Constant, &lists, out_value);
}

static eg_status add_weight(egi_upgrade *upgrade, const egi_node *like, const char *suffix, egi_weight *weight,
                            egi_value_id *out_value) {
  egi_module *module = upgrade->graph->module;
  uint32_t index = 0;
  weight->name = egi_arena_format(upgrade->scratch, "%s_%s", label_of(upgrade, like), suffix);
  if (!weight->name) return EG_ERROR_MEMORY;
  EG_TRY(egi_module_add_weight(module, weight, &index));
  return egi_graph_add_weight(upgrade->graph, index, out_value);
}

static eg_status add_integers(egi_upgrade *upgrade, const egi_node *like, const egi_attribute *attribute,
                              egi_value_id *out_value) {
  egi_weight weight = {.dtype = EG_DTYPE_I64, .rank = 1, .dims = {attribute->count}};
  int64_t *data = EGI_NEW(&upgrade->graph->module->arena, int64_t, attribute->count);
  if (!data) return EG_ERROR_MEMORY;
  if (attribute->count) memcpy(data, attribute->u.ints, attribute->count * sizeof(*data));
  weight.bytes.data = (const uint8_t *)data;
  weight.bytes.size_bytes = attribute->count * sizeof(*data);
  return add_weight(upgrade, like, attribute->name, &weight, out_value);
}

/* The list attribute `name`, where it is there, becomes input `index`. */
static eg_status move_integers(egi_upgrade *upgrade, egi_node *node, const char *name, uint16_t index) {
  const egi_attribute *attribute = egi_node_attribute(node, name);
  egi_value_id value = 0;
  if (!attribute) return EG_OK;
  if (attribute->kind == EGI_ATTRIBUTE_REFERENCE)
    EG_TRY(add_reference(upgrade, node, attribute, "value_ints", &value));
  else if (attribute->kind == EGI_ATTRIBUTE_INTS)
    EG_TRY(add_integers(upgrade, node, attribute, &value));
  else
    return fail_attribute(upgrade, node, name);
  remove_attribute(node, name);
  return set_input(upgrade, node, index, value);
}

/* ---- rules ---------------------------------------------------------------------------------------------------- */

static eg_status upgrade_axes(egi_upgrade *upgrade, egi_node *node) {
  return move_integers(upgrade, node, "axes", 1);
}

static eg_status upgrade_slice(egi_upgrade *upgrade, egi_node *node) {
  EG_TRY(move_integers(upgrade, node, "starts", 1));
  EG_TRY(move_integers(upgrade, node, "ends", 2));
  return move_integers(upgrade, node, "axes", 3);
}

/* Split without sizes means equal pieces, which the newest form says by num_outputs. */
static eg_status upgrade_split(egi_upgrade *upgrade, egi_node *node) {
  if (upgrade->version < 13) EG_TRY(move_integers(upgrade, node, "split", 1));
  if (node->n_inputs > 1 || egi_node_attribute(node, "num_outputs")) return EG_OK;
  egi_attribute *attributes = EGI_NEW(upgrade->scratch, egi_attribute, (size_t)node->n_attributes + 1);
  if (!attributes) return EG_ERROR_MEMORY;
  if (node->n_attributes) memcpy(attributes, node->attributes, node->n_attributes * sizeof(*attributes));
  attributes[node->n_attributes++] = egi_attribute_int("num_outputs", node->n_outputs);
  node->attributes = attributes;
  return EG_OK;
}

static size_t store_float(eg_dtype dtype, float value, uint8_t *out) {
  double wide = (double)value;
  uint16_t half = dtype == EG_DTYPE_F16 ? egi_f32_to_f16(value) : egi_f32_to_bf16(value);
  if (dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16) {
    memcpy(out, &half, sizeof(half));
    return sizeof(half);
  }
  if (dtype == EG_DTYPE_F64) {
    memcpy(out, &wide, sizeof(wide));
    return sizeof(wide);
  }
  memcpy(out, &value, sizeof(value));
  return sizeof(value);
}

static eg_status add_float(egi_upgrade *upgrade, const egi_node *like, const char *suffix, eg_dtype dtype, float number,
                           egi_value_id *out_value) {
  egi_weight weight = {.dtype = dtype};
  uint8_t *data = egi_arena_get(&upgrade->graph->module->arena, 1, sizeof(double));
  if (!data) return EG_ERROR_MEMORY;
  weight.bytes.size_bytes = store_float(dtype, number, data);
  weight.bytes.data = data;
  return add_weight(upgrade, like, suffix, &weight, out_value);
}

/* A bound of Clip has the type of what is clipped: as far as that is declared, else float. */
static eg_status move_bound(egi_upgrade *upgrade, egi_node *node, const char *name, uint16_t index) {
  const egi_attribute *attribute = egi_node_attribute(node, name);
  egi_value_id value = 0;
  if (!attribute) return EG_OK;
  if (attribute->kind == EGI_ATTRIBUTE_REFERENCE) {
    EG_TRY(add_reference(upgrade, node, attribute, "value_float", &value));
  } else if (attribute->kind == EGI_ATTRIBUTE_FLOAT) {
    eg_dtype dtype = node->n_inputs ? upgrade->graph->values[node->inputs[0]].dtype : EG_DTYPE_F32;
    if (!egi_dtype_is_float(dtype) || egi_dtype_bits(dtype) < 16) dtype = EG_DTYPE_F32;
    EG_TRY(add_float(upgrade, node, name, dtype, attribute->u.f, &value));
  } else {
    return fail_attribute(upgrade, node, name);
  }
  remove_attribute(node, name);
  return set_input(upgrade, node, index, value);
}

static eg_status upgrade_clip(egi_upgrade *upgrade, egi_node *node) {
  EG_TRY(move_bound(upgrade, node, "min", 1));
  return move_bound(upgrade, node, "max", 2);
}

static eg_status become_last_axis(egi_upgrade *upgrade, egi_node *node) {
  egi_attribute *attributes = EGI_NEW(upgrade->scratch, egi_attribute, 1);
  if (!attributes) return EG_ERROR_MEMORY;
  attributes[0] = egi_attribute_int("axis", -1);
  node->attributes = attributes;
  node->n_attributes = 1;
  return EG_OK;
}

/* Softmax-11 and LogSoftmax-11 work on the matrix [dims before axis, dims from axis on]; axis is 1 by default. On the
 * last axis that is the newest form; else Flatten → Softmax → Reshape. */
static eg_status upgrade_softmax(egi_upgrade *upgrade, egi_node *node) {
  const egi_attribute *given = egi_node_attribute(node, "axis");
  egi_attribute axis = given ? *given : egi_attribute_int("axis", 1), last = egi_attribute_int("axis", -1);
  egi_value_id flat = 0, soft = 0, shape = 0;
  if (axis.kind != EGI_ATTRIBUTE_INT && axis.kind != EGI_ATTRIBUTE_REFERENCE)
    return fail_attribute(upgrade, node, "axis");
  if (!node->n_inputs || !node->inputs[0]) return EG_OK; /* refused by the check that follows */
  int rank = upgrade->graph->values[node->inputs[0]].rank;
  if (axis.kind == EGI_ATTRIBUTE_INT && (axis.u.i == -1 || (rank > 0 && axis.u.i == rank - 1)))
    return become_last_axis(upgrade, node);
  egi_node lists = {.inputs = node->inputs, .n_inputs = 1};
  EG_TRY(add_node(upgrade, node, EGI_OP_Shape, &lists, &shape));
  lists.attributes = &axis;
  lists.n_attributes = 1;
  EG_TRY(add_node(upgrade, node, EGI_OP_Flatten, &lists, &flat));
  lists.inputs = &flat;
  lists.attributes = &last;
  EG_TRY(add_node(upgrade, node, node->op, &lists, &soft));
  node->op = EGI_OP_Reshape;
  node->op_name = "Reshape";
  node->n_attributes = 0;
  EG_TRY(set_input(upgrade, node, 1, shape));
  return set_input(upgrade, node, 0, soft);
}

/* The mask of an inactive Dropout is all true. */
static eg_status add_mask(egi_upgrade *upgrade, const egi_node *node) {
  static const uint8_t is_kept[1] = {1};
  egi_weight weight = {.dtype = EG_DTYPE_BOOL, .rank = 1, .dims = {1}, .bytes = {.data = is_kept, .size_bytes = 1}};
  egi_attribute value = {.name = "value", .kind = EGI_ATTRIBUTE_TENSOR};
  egi_node lists = {.inputs = node->inputs, .n_inputs = 1};
  egi_value_id shape = 0;
  egi_node_id id;
  weight.name = "value";
  EG_TRY(egi_module_add_weight(upgrade->graph->module, &weight, &value.u.weight));
  EG_TRY(add_node(upgrade, node, EGI_OP_Shape, &lists, &shape));
  egi_node mask = {.op = EGI_OP_ConstantOfShape, .name = "", .scope = node->scope};
  mask.inputs = &shape;
  mask.outputs = &node->outputs[1];
  mask.attributes = &value;
  mask.n_inputs = mask.n_outputs = mask.n_attributes = 1;
  return egi_graph_add_node(upgrade->graph, &mask, &id);
}

/* Dropout outside training is Identity; one that may train stays. */
static eg_status upgrade_dropout(egi_upgrade *upgrade, egi_node *node) {
  double mode = 0;
  bool has_mode = node->n_inputs > 2 && node->inputs[2];
  if (has_mode && (!egi_value_scalar(upgrade->graph, node->inputs[2], &mode) || mode != 0)) return EG_OK;
  if (!node->n_inputs || !node->n_outputs) return EG_OK;
  if (node->n_outputs > 1 && node->outputs[1] != EGI_VALUE_UNWANTED) EG_TRY(add_mask(upgrade, node));
  node->op = EGI_OP_Identity;
  node->op_name = "Identity";
  node->n_inputs = node->n_outputs = 1;
  node->n_attributes = 0;
  return EG_OK;
}

/* The attribute k of the first version is an input now. */
static eg_status upgrade_top_k(egi_upgrade *upgrade, egi_node *node) {
  const egi_attribute *attribute = egi_node_attribute(node, "k");
  egi_value_id value = 0;
  if (!attribute) return EG_OK;
  if (attribute->kind == EGI_ATTRIBUTE_REFERENCE) {
    static const int64_t shape[1] = {1};
    egi_attribute one = egi_attribute_ints("value_ints", shape, 1);
    egi_node list = {.attributes = &one, .n_attributes = 1}, both = {.n_inputs = 2};
    egi_value_id inputs[2] = {0, 0};
    EG_TRY(add_reference(upgrade, node, attribute, "value_int", &inputs[0]));
    EG_TRY(add_node(upgrade, node, EGI_OP_Constant, &list, &inputs[1]));
    both.inputs = inputs;
    EG_TRY(add_node(upgrade, node, EGI_OP_Reshape, &both, &value));
  } else if (attribute->kind == EGI_ATTRIBUTE_INT) {
    egi_attribute list = egi_attribute_ints("k", &attribute->u.i, 1);
    EG_TRY(add_integers(upgrade, node, &list, &value));
  } else {
    return fail_attribute(upgrade, node, "k");
  }
  remove_attribute(node, "k");
  return set_input(upgrade, node, 1, value);
}

/* The same operator under its old name. */
static eg_status upgrade_scatter(egi_upgrade *upgrade, egi_node *node) {
  (void)upgrade;
  node->op = EGI_OP_ScatterElements;
  node->op_name = "ScatterElements";
  return EG_OK;
}

/* Pad-2: paddings and the constant were attributes, the constant 0 where it was absent, as it is now. */
static eg_status upgrade_pad(egi_upgrade *upgrade, egi_node *node) {
  EG_TRY(move_integers(upgrade, node, "pads", 1));
  return move_bound(upgrade, node, "value", 2);
}

static eg_status fail_old(const egi_upgrade *upgrade, const egi_node *node, const char *what) {
  return egi_fail(upgrade->graph->module->ctx, EG_ERROR_UNSUPPORTED,
                  "node \"%s\" (%s): %s of operator set %lld is not supported", label_of(upgrade, node), node->op_name,
                  what, (long long)upgrade->version);
}

/* Hardmax-11 looks for one element of [dims before axis, dims from axis on]; on the last axis that is the newest form.
 */
static eg_status upgrade_hardmax(egi_upgrade *upgrade, egi_node *node) {
  int64_t axis = egi_node_int(node, "axis", 1);
  int rank = node->n_inputs && node->inputs[0] ? upgrade->graph->values[node->inputs[0]].rank : -1;
  if (axis == -1 || (rank > 0 && axis == rank - 1)) return become_last_axis(upgrade, node);
  return fail_old(upgrade, node, "an axis before the last");
}

/* GroupNormalization-18 has a scale for each group. */
static eg_status upgrade_group_normalization(egi_upgrade *upgrade, egi_node *node) {
  return fail_old(upgrade, node, "the scale for each group");
}

/* A sum of any number of operands is a chain of Adds; the node itself becomes the last one. */
static eg_status upgrade_sum(egi_upgrade *upgrade, egi_node *node) {
  if (!node->n_inputs) return EG_OK; /* refused by the check that follows */
  for (unsigned i = 2; i < node->n_inputs; i++) {
    egi_node lists = {.inputs = node->inputs, .n_inputs = 2};
    egi_value_id sum = 0;
    EG_TRY(add_node(upgrade, node, EGI_OP_Add, &lists, &sum));
    node->inputs[0] = sum;
    node->inputs[1] = node->inputs[i];
  }
  node->op = node->n_inputs == 1 ? EGI_OP_Identity : EGI_OP_Add;
  node->op_name = egi_op_get(node->op)->name;
  node->n_inputs = node->n_inputs == 1 ? 1 : 2;
  return EG_OK;
}

/* The sum, divided by the number of operands in their type. */
static eg_status upgrade_mean(egi_upgrade *upgrade, egi_node *node) {
  egi_node typed = {.n_inputs = 2}, sum = *node;
  egi_value_id operands[2] = {0, 0};
  if (!node->n_inputs) return EG_OK;
  EG_TRY(add_float(upgrade, node, "count", EG_DTYPE_F32, (float)node->n_inputs, &operands[0]));
  operands[1] = node->inputs[0];
  typed.inputs = operands;
  EG_TRY(add_node(upgrade, node, EGI_OP_CastLike, &typed, &operands[1]));
  EG_TRY(upgrade_sum(upgrade, &sum));
  EG_TRY(add_node(upgrade, node, sum.op, &sum, &operands[0]));
  node->op = EGI_OP_Div;
  node->op_name = "Div";
  node->n_inputs = 0;
  EG_TRY(set_input(upgrade, node, 1, operands[1]));
  return set_input(upgrade, node, 0, operands[0]);
}

/* A node without attributes; b = 0: of one input. */
static eg_status add_plain(egi_upgrade *upgrade, const egi_node *like, egi_op op, egi_value_id a, egi_value_id b,
                           egi_value_id *out_value) {
  egi_value_id inputs[2] = {a, b};
  egi_node lists = {.n_inputs = b ? 2 : 1};
  lists.inputs = inputs;
  return add_node(upgrade, like, op, &lists, out_value);
}

/* x / sqrt(mean(x^2) + epsilon) along the last axis, of x or, for LayerNormalization, of x - mean(x). */
static eg_status add_normalized(egi_upgrade *upgrade, const egi_node *node, eg_dtype dtype, egi_value_id *out_value) {
  static const int64_t last[1] = {-1};
  const egi_attribute axes = egi_attribute_ints("axes", last, 1);
  float number = egi_node_float(node, "epsilon", 1e-5F);
  egi_value_id x = node->inputs[0], axis = 0, epsilon = 0, at = 0;
  EG_TRY(add_integers(upgrade, node, &axes, &axis));
  EG_TRY(add_float(upgrade, node, "epsilon", dtype, number, &epsilon));
  if (node->op == EGI_OP_LayerNormalization) {
    EG_TRY(add_plain(upgrade, node, EGI_OP_ReduceMean, x, axis, &at));
    EG_TRY(add_plain(upgrade, node, EGI_OP_Sub, x, at, &x));
  }
  EG_TRY(add_plain(upgrade, node, EGI_OP_Mul, x, x, &at));
  EG_TRY(add_plain(upgrade, node, EGI_OP_ReduceMean, at, axis, &at));
  EG_TRY(add_plain(upgrade, node, EGI_OP_Add, at, epsilon, &at));
  EG_TRY(add_plain(upgrade, node, EGI_OP_Sqrt, at, 0, &at));
  return add_plain(upgrade, node, EGI_OP_Div, x, at, out_value);
}

/* The definitions broadcast a scale of more dimensions than the one that is normalised, a row for each head say;
 * kernels take one row. */
static eg_status upgrade_normalization(egi_upgrade *upgrade, egi_node *node) {
  const egi_attribute *axis = egi_node_attribute(node, "axis"), *epsilon = egi_node_attribute(node, "epsilon");
  bool is_last = !axis || (axis->kind == EGI_ATTRIBUTE_INT && axis->u.i == -1);
  bool is_known = is_last && (!epsilon || epsilon->kind == EGI_ATTRIBUTE_FLOAT);
  if (!is_known || node->n_inputs < 2 || node->n_outputs != 1 || !node->inputs[0] || !node->inputs[1]) return EG_OK;
  const egi_value *scale = &upgrade->graph->values[node->inputs[1]];
  if (scale->kind != EGI_VALUE_WEIGHT || scale->rank < 2) return EG_OK;
  egi_value_id normalized = 0, bias = node->n_inputs > 2 ? node->inputs[2] : 0;
  EG_TRY(add_normalized(upgrade, node, scale->dtype, &normalized));
  if (bias) EG_TRY(add_plain(upgrade, node, EGI_OP_Mul, normalized, node->inputs[1], &normalized));
  node->op = bias ? EGI_OP_Add : EGI_OP_Mul;
  node->op_name = bias ? "Add" : "Mul";
  node->n_inputs = 2;
  node->n_attributes = 0;
  node->inputs[0] = normalized;
  if (bias) node->inputs[1] = bias;
  return EG_OK;
}

/* operator, version from which on it has the newest form, rule for older ones; in the order of the names */
static const struct {
  const char *name;
  int64_t since;
  upgrade_rule rule;
} rules[] = {
    {"Clip", 11, upgrade_clip},
    {"Dropout", INT64_MAX, upgrade_dropout},
    {"GroupNormalization", 21, upgrade_group_normalization},
    {"Hardmax", 13, upgrade_hardmax},
    {"LayerNormalization", INT64_MAX, upgrade_normalization},
    {"LogSoftmax", 13, upgrade_softmax},
    {"Mean", INT64_MAX, upgrade_mean},
    {"Pad", 11, upgrade_pad},
    {"RMSNormalization", INT64_MAX, upgrade_normalization},
    {"ReduceL1", 18, upgrade_axes},
    {"ReduceL2", 18, upgrade_axes},
    {"ReduceLogSum", 18, upgrade_axes},
    {"ReduceLogSumExp", 18, upgrade_axes},
    {"ReduceMax", 18, upgrade_axes},
    {"ReduceMean", 18, upgrade_axes},
    {"ReduceMin", 18, upgrade_axes},
    {"ReduceProd", 18, upgrade_axes},
    {"ReduceSum", 13, upgrade_axes},
    {"ReduceSumSquare", 18, upgrade_axes},
    {"Scatter", INT64_MAX, upgrade_scatter},
    {"Slice", 10, upgrade_slice},
    {"Softmax", 13, upgrade_softmax},
    {"Split", 18, upgrade_split},
    {"Squeeze", 13, upgrade_axes},
    {"Sum", INT64_MAX, upgrade_sum},
    {"TopK", 10, upgrade_top_k},
    {"Unsqueeze", 13, upgrade_axes},
};

/* Tools raise the version that a model imports and leave nodes as they were: axes that stand as an attribute, with none
 * given as input, can mean one thing only. */
static bool is_left_behind(upgrade_rule rule, const egi_node *node) {
  bool has_input = node->n_inputs > 1 && node->inputs[1] != 0;
  return rule == upgrade_axes && !has_input && egi_node_attribute(node, "axes") != NULL;
}

eg_status egi_upgrade_node(egi_upgrade *upgrade, egi_node *node) {
  for (size_t i = 0; i < EGI_COUNT(rules); i++) {
    if (strcmp(rules[i].name, node->op_name) != 0) continue;
    bool is_old = upgrade->version < rules[i].since || is_left_behind(rules[i].rule, node);
    return is_old ? rules[i].rule(upgrade, node) : EG_OK;
  }
  return EG_OK;
}
