/* Damage to types, sizes, attributes and weights. */
#include "damage.h"

#include <stdio.h>
#include <string.h>

#include "graph/graph.h"

static const int64_t odd_numbers[] = {-1,        0,        1, -2, 2, 7, 255, 65536, INT64_C(1) << 31, INT64_C(1) << 40,
                                      INT64_MAX, INT64_MIN};

static int any_dtype(damage *d) {
  return (int)damage_random(d, 28) - 1;
}

/* ---- weights -------------------------------------------------------------------------------------------------- */

static void change_weight_dims(damage *d) {
  Onnx__TensorProto *weight = damage_any_weight(d);
  if (weight == NULL) return;
  if (weight->n_dims && damage_random(d, 4)) {
    weight->dims[damage_random(d, weight->n_dims)] = DAMAGE_CHOOSE(d, odd_numbers);
    return;
  }
  size_t rank = weight->n_dims + 1 + (size_t)damage_random(d, 9);
  int64_t *dims = EGI_NEW(d->arena, int64_t, rank);
  for (size_t i = 0; i < rank && dims != NULL; i++) dims[i] = i < weight->n_dims ? weight->dims[i] : 1;
  weight->dims = dims;
  weight->n_dims = dims != NULL ? rank : 0;
}

static void change_weight_type(damage *d) {
  Onnx__TensorProto *weight = damage_any_weight(d);
  if (weight != NULL) weight->data_type = any_dtype(d);
}

static void change_weight_size(damage *d) {
  Onnx__TensorProto *weight = damage_any_weight(d);
  if (weight == NULL) return;
  if (weight->raw_data.len && damage_random(d, 2))
    weight->raw_data.len -= 1 + (size_t)damage_random(d, weight->raw_data.len);
  else
    weight->has_raw_data = false;
}

static void external_entry(damage *d, Onnx__TensorProto *tensor, const char *key, const char *value) {
  Onnx__StringStringEntryProto *entry = EGI_NEW(d->arena, Onnx__StringStringEntryProto, 1);
  onnx__string_string_entry_proto__init(entry);
  entry->key = damage_text(d, key);
  entry->value = damage_text(d, value);
  tensor->external_data = damage_append(d, tensor->external_data, &tensor->n_external_data, entry);
}

/* A quarter of these are right. */
static void misplace_weight(damage *d) {
  static const char *const places[] = {"../" DAMAGE_EXTERNAL,
                                       "/etc/passwd",
                                       "missing.bin",
                                       "",
                                       ".",
                                       "sub/../" DAMAGE_EXTERNAL,
                                       DAMAGE_EXTERNAL_LINK,
                                       "a\nb",
                                       "file://" DAMAGE_EXTERNAL};
  static const char *const numbers[] = {
      "-1", "4096", "4095", "18446744073709551615",      "18446744073709551616", "1e3",
      "",   "0x10", " 1",   "99999999999999999999999999"};
  Onnx__TensorProto *weight = damage_any_weight(d);
  char length[32];
  if (weight == NULL) return;
  snprintf(length, sizeof(length), "%zu", weight->raw_data.len);
  weight->has_raw_data = damage_random(d, 8) == 0;
  weight->has_data_location = true;
  weight->data_location = ONNX__TENSOR_PROTO__DATA_LOCATION__EXTERNAL;
  unsigned fault = (unsigned)damage_random(d, 4);
  external_entry(d, weight, "location", fault == 1 ? DAMAGE_CHOOSE(d, places) : DAMAGE_EXTERNAL);
  external_entry(d, weight, "offset", fault == 2 ? DAMAGE_CHOOSE(d, numbers) : "0");
  external_entry(d, weight, "length", fault == 3 ? DAMAGE_CHOOSE(d, numbers) : length);
  if (damage_random(d, 8) == 0) external_entry(d, weight, "offset", "64");
  if (damage_random(d, 8) == 0) external_entry(d, weight, "engraft.init", "normal");
}

/* Shape arithmetic and bounds: one element of an integer weight. */
static void change_integers(damage *d) {
  for (unsigned i = 0; i < 50; i++) {
    Onnx__TensorProto *weight = damage_any_weight(d);
    if (weight == NULL) return;
    if (weight->data_type != EG_DTYPE_I64) continue;
    int64_t value = DAMAGE_CHOOSE(d, odd_numbers);
    if (weight->raw_data.len >= 8)
      memcpy(weight->raw_data.data + 8 * damage_random(d, weight->raw_data.len / 8), &value, 8);
    else if (weight->n_int64_data)
      weight->int64_data[damage_random(d, weight->n_int64_data)] = value;
    return;
  }
}

/* An operator that would make an enormous tensor of constants. */
static void swell_constant(damage *d) {
  static const char *const operators[] = {"ConstantOfShape", "Expand", "Tile", "Range",
                                          "EyeLike",         "OneHot", "Pad",  "RandomNormal"};
  static const int64_t two[1] = {2};
  Onnx__TensorProto *shape = damage_add_weight(d, "swell.shape", EG_DTYPE_I64, 1, two, 16);
  Onnx__TensorProto *one = damage_add_weight(d, "swell.one", EG_DTYPE_I64, 0, NULL, 8);
  int64_t dims[2] = {INT64_C(1) << (10 + damage_random(d, 35)), INT64_C(1) << damage_random(d, 35)};
  memcpy(shape->raw_data.data, dims, sizeof(dims));
  one->raw_data.data[0] = 1;
  const char *op = DAMAGE_CHOOSE(d, operators);
  bool is_shape_alone = strcmp(op, "ConstantOfShape") == 0;
  Onnx__NodeProto *node = damage_add_node(d, d->graph, op, is_shape_alone ? "swell.shape" : "swell.one", "swollen");
  if (!is_shape_alone) node->input = damage_append(d, node->input, &node->n_input, damage_text(d, "swell.shape"));
  damage_give_out(d, "swollen");
}

static void change_storage(damage *d) {
  Onnx__TensorProto *weight = damage_any_weight(d);
  if (weight == NULL) return;
  size_t n = 1 + (size_t)damage_random(d, 4);
  switch (damage_random(d, 5)) {
  case 0:
    weight->n_float_data = n;
    weight->float_data = EGI_NEW(d->arena, float, n);
    break;
  case 1:
    weight->n_int32_data = n;
    weight->int32_data = EGI_NEW(d->arena, int32_t, n);
    break;
  case 2:
    weight->data_type = EG_DTYPE_STRING;
    break;
  case 3:
    weight->segment = EGI_NEW(d->arena, Onnx__TensorProto__Segment, 1);
    onnx__tensor_proto__segment__init(weight->segment);
    break;
  default: {
    Onnx__SparseTensorProto *sparse = EGI_NEW(d->arena, Onnx__SparseTensorProto, 1);
    onnx__sparse_tensor_proto__init(sparse);
    sparse->values = weight;
    d->graph->sparse_initializer =
        damage_append(d, d->graph->sparse_initializer, &d->graph->n_sparse_initializer, sparse);
  }
  }
  if (damage_random(d, 2)) weight->has_raw_data = false;
}

/* ---- attributes ----------------------------------------------------------------------------------------------- */

/* A node with attributes, or NULL. */
static Onnx__NodeProto *node_with_attributes(damage *d) {
  for (unsigned i = 0; i < 200; i++) {
    Onnx__NodeProto *node = damage_any_node(d);
    if (node->n_attribute) return node;
  }
  return NULL;
}

static void change_attribute(damage *d) {
  Onnx__NodeProto *node = node_with_attributes(d);
  if (node == NULL) return;
  Onnx__AttributeProto *attribute = node->attribute[damage_random(d, node->n_attribute)];
  attribute->i = DAMAGE_CHOOSE(d, odd_numbers);
  attribute->has_f = true;
  attribute->f = -1e30F;
  if (attribute->n_ints) attribute->ints[damage_random(d, attribute->n_ints)] = DAMAGE_CHOOSE(d, odd_numbers);
  if (attribute->n_ints && damage_random(d, 3) == 0) attribute->n_ints--;
  if (attribute->s.len) attribute->s.data[damage_random(d, attribute->s.len)] ^= 1;
  if (attribute->t) attribute->t->data_type = any_dtype(d);
}

static void change_attribute_type(damage *d) {
  Onnx__NodeProto *node = node_with_attributes(d);
  if (node == NULL) return;
  Onnx__AttributeProto *attribute = node->attribute[damage_random(d, node->n_attribute)];
  attribute->type = (Onnx__AttributeProto__AttributeType)damage_random(d, 16);
}

static void rename_attribute(damage *d) {
  static const char *const names[] = {"axis", "axes", "perm",        "to",       "value",
                                      "body", "",     "then_branch", "keepdims", "epsilon"};
  Onnx__NodeProto *node = node_with_attributes(d);
  if (node != NULL)
    node->attribute[damage_random(d, node->n_attribute)]->name = damage_text(d, DAMAGE_CHOOSE(d, names));
}

static void lose_attribute(damage *d) {
  Onnx__NodeProto *node = node_with_attributes(d);
  if (node == NULL) return;
  if (damage_random(d, 2))
    node->n_attribute--;
  else
    node->attribute = damage_append(d, node->attribute, &node->n_attribute, node->attribute[0]);
}

static void refer_to_attribute(damage *d) {
  Onnx__NodeProto *node = node_with_attributes(d);
  if (node != NULL) node->attribute[0]->ref_attr_name = damage_text(d, "alpha");
}

/* ---- declared types ------------------------------------------------------------------------------------------- */

static Onnx__ValueInfoProto *any_declared(damage *d) {
  Onnx__GraphProto *graph = d->graph;
  uint64_t count = graph->n_input + graph->n_output + graph->n_value_info;
  if (count == 0) return NULL;
  size_t i = (size_t)damage_random(d, count);
  if (damage_random(d, 2)) i %= graph->n_input + graph->n_output ? graph->n_input + graph->n_output : 1;
  if (i < graph->n_input) return graph->input[i];
  if (i < graph->n_input + graph->n_output) return graph->output[i - graph->n_input];
  return graph->value_info[i - graph->n_input - graph->n_output];
}

static void change_declared_type(damage *d) {
  Onnx__ValueInfoProto *info = any_declared(d);
  if (info == NULL || info->type == NULL) return;
  Onnx__TypeProto__Tensor *tensor =
      info->type->value_case == ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE ? info->type->tensor_type : NULL;
  uint64_t fault = damage_random(d, 4);
  if (tensor == NULL || fault == 0)
    info->type = NULL;
  else if (fault == 1)
    tensor->shape = NULL;
  else
    tensor->elem_type = any_dtype(d);
}

static void change_declared_shape(damage *d) {
  Onnx__ValueInfoProto *info = any_declared(d);
  if (info == NULL || info->type == NULL || info->type->value_case != ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE) return;
  Onnx__TensorShapeProto *shape = info->type->tensor_type->shape;
  if (shape == NULL || shape->n_dim == 0) return;
  Onnx__TensorShapeProto__Dimension *dim = shape->dim[damage_random(d, shape->n_dim)];
  uint64_t fault = damage_random(d, 4);
  if (fault == 0) {
    shape->n_dim--;
  } else if (fault == 1) {
    dim->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_PARAM;
    dim->dim_param = damage_text(d, damage_random(d, 2) ? "batch" : "9 *\n/ (");
  } else {
    dim->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE;
    dim->dim_value = DAMAGE_CHOOSE(d, odd_numbers);
  }
}

const damage_kind damage_value_kinds[] = {
    {"change a weight's dims", change_weight_dims},
    {"change a weight's type", change_weight_type},
    {"change a weight's size", change_weight_size},
    {"misplace a weight", misplace_weight},
    {"change integers", change_integers},
    {"swell a constant", swell_constant},
    {"change a weight's storage", change_storage},
    {"change an attribute", change_attribute},
    {"change an attribute's type", change_attribute_type},
    {"rename an attribute", rename_attribute},
    {"lose an attribute", lose_attribute},
    {"refer to an attribute", refer_to_attribute},
    {"change a declared type", change_declared_type},
    {"change a declared shape", change_declared_shape},
};
const unsigned damage_n_value_kinds = (unsigned)(sizeof(damage_value_kinds) / sizeof(damage_value_kinds[0]));
