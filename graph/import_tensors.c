/* TensorProto → weight. raw_data and external data stay where they are; typed fields are views of the unpacked message
 * where their width is that of the dtype, and are narrowed into the module's arena otherwise. Hosts are little-endian.
 */
#include "graph/import.h"

#include <math.h>

/* False when the product of the dims other than 0 overflows. */
static bool count_elements(const egi_weight *weight, uint64_t *out_count) {
  size_t count = 1;
  bool is_empty = false;
  for (int i = 0; i < weight->rank; i++) {
    if (weight->dims[i] == 0)
      is_empty = true;
    else if (!egi_size_multiply(count, (size_t)weight->dims[i], &count))
      return false;
  }
  *out_count = is_empty ? 0 : count;
  return true;
}

static eg_status set_shape(egi_importer *importer, const Onnx__TensorProto *tensor, egi_weight *weight,
                           uint64_t *out_count) {
  if (tensor->n_dims > EGI_MAX_RANK)
    return egi_import_fail_tensor(importer, weight->name, EG_ERROR_UNSUPPORTED,
                                  "%zu dimensions; at most %d are supported", tensor->n_dims, EGI_MAX_RANK);
  weight->rank = (int)tensor->n_dims;
  for (int i = 0; i < weight->rank; i++) {
    weight->dims[i] = tensor->dims[i];
    if (weight->dims[i] < 0)
      return egi_import_fail_tensor(importer, weight->name, EG_ERROR_FORMAT, "a dimension of %lld",
                                    (long long)weight->dims[i]);
  }
  uint64_t count = 0, size_bytes = 0;
  if (!count_elements(weight, &count) || count > INT64_MAX || !egi_dtype_bytes(weight->dtype, count, &size_bytes))
    return egi_import_fail_tensor(importer, weight->name, EG_ERROR_FORMAT, "the product of its dimensions overflows");
  weight->bytes.size_bytes = size_bytes;
  *out_count = count;
  return EG_OK;
}

/* The typed field of a dtype: entries found, and bytes of one. */
typedef struct typed_field {
  const char *name;
  const void *data;
  size_t n_entries, entry_bytes;
  uint64_t n_wanted;
} typed_field;

static typed_field find_field(const Onnx__TensorProto *t, const egi_weight *weight, uint64_t count) {
  unsigned bits = egi_dtype_bits(weight->dtype);
  switch (weight->dtype) {
  case EG_DTYPE_F32:
    return (typed_field){"float_data", t->float_data, t->n_float_data, 4, count};
  case EG_DTYPE_C64:
    return (typed_field){"float_data", t->float_data, t->n_float_data, 4, 2 * count};
  case EG_DTYPE_F64:
    return (typed_field){"double_data", t->double_data, t->n_double_data, 8, count};
  case EG_DTYPE_C128:
    return (typed_field){"double_data", t->double_data, t->n_double_data, 8, 2 * count};
  case EG_DTYPE_I64:
    return (typed_field){"int64_data", t->int64_data, t->n_int64_data, 8, count};
  case EG_DTYPE_U64:
  case EG_DTYPE_U32:
    return (typed_field){"uint64_data", t->uint64_data, t->n_uint64_data, 8, count};
  default:
    return (typed_field){"int32_data", t->int32_data, t->n_int32_data, 4, bits < 8 ? weight->bytes.size_bytes : count};
  }
}

static eg_status convert_field(egi_importer *importer, const typed_field *field, egi_weight *weight) {
  size_t size_bytes = (size_t)weight->bytes.size_bytes;
  size_t width = field->n_entries ? size_bytes / field->n_entries : field->entry_bytes;
  if (width == field->entry_bytes) {
    weight->bytes.data = field->n_entries ? field->data : (const uint8_t *)"";
    return EG_OK;
  }
  uint8_t *data = egi_arena_get(&importer->module->arena, size_bytes, 1);
  if (!data) return EG_ERROR_MEMORY;
  const uint8_t *entries = field->data;
  for (size_t i = 0; i < field->n_entries; i++) memcpy(data + i * width, entries + i * field->entry_bytes, width);
  weight->bytes.data = data;
  return EG_OK;
}

static eg_status import_field(egi_importer *importer, const Onnx__TensorProto *tensor, uint64_t count,
                              egi_weight *weight) {
  typed_field field = find_field(tensor, weight, count);
  if (field.n_entries != field.n_wanted)
    return egi_import_fail_tensor(importer, weight->name, EG_ERROR_FORMAT, "%s has %zu entries, its shape needs %llu",
                                  field.name, field.n_entries, (unsigned long long)field.n_wanted);
  return convert_field(importer, &field, weight);
}

static const char *external_entry(const Onnx__TensorProto *tensor, const char *key) {
  for (size_t i = 0; i < tensor->n_external_data; i++) {
    const Onnx__StringStringEntryProto *entry = tensor->external_data[i];
    if (entry->key && !strcmp(entry->key, key)) return egi_import_text(entry->value);
  }
  return NULL;
}

/* A finite number that is the whole text. */
static bool parse_double(const char *text, double *out) {
  char *end;
  if (!text || !*text) return false;
  *out = strtod(text, &end);
  return !*end && isfinite(*out);
}

static bool parse_seed(const char *text, uint64_t *out) {
  uint64_t value = 0;
  if (!text || !*text) return false;
  for (; *text >= '0' && *text <= '9'; text++) {
    if (value > (UINT64_MAX - 9) / 10) return false;
    value = value * 10 + (uint64_t)(*text - '0');
  }
  *out = value;
  return !*text;
}

/* Our own kind of external data: numbers made at load (docs/format.md). */
static eg_status import_init(egi_importer *importer, const Onnx__TensorProto *tensor, const char *kind,
                             egi_weight *weight) {
  bool is_good = egi_dtype_bits(weight->dtype) >= 8;
  if (!strcmp(kind, "normal")) {
    weight->bytes.kind = EGI_BYTES_NORMAL;
    is_good = is_good && egi_dtype_is_float(weight->dtype) &&
              parse_double(external_entry(tensor, "std"), &weight->bytes.value) &&
              parse_seed(external_entry(tensor, "seed"), &weight->bytes.seed);
  } else {
    weight->bytes.kind = EGI_BYTES_FILL;
    is_good = is_good && !strcmp(kind, "fill") && parse_double(external_entry(tensor, "value"), &weight->bytes.value);
  }
  if (is_good) return EG_OK;
  return egi_import_fail_tensor(importer, weight->name, EG_ERROR_FORMAT, "bad engraft.init \"%s\"", kind);
}

static eg_status check_booleans(egi_importer *importer, const egi_weight *weight) {
  if (weight->dtype != EG_DTYPE_BOOL) return EG_OK;
  for (uint64_t i = 0; i < weight->bytes.size_bytes; i++)
    if (weight->bytes.data[i] > 1)
      return egi_import_fail_tensor(importer, weight->name, EG_ERROR_FORMAT, "a boolean of %u", weight->bytes.data[i]);
  return EG_OK;
}

static eg_status import_bytes(egi_importer *importer, const Onnx__TensorProto *tensor, uint64_t count,
                              egi_weight *weight) {
  egi_range range;
  const char *init = external_entry(tensor, "engraft.init");
  bool is_external = tensor->data_location == ONNX__TENSOR_PROTO__DATA_LOCATION__EXTERNAL;
  if (is_external && init) return import_init(importer, tensor, init, weight);
  EG_TRY(egi_onnx_tensor_range(importer->file, tensor, weight->bytes.size_bytes, &range, &weight->bytes.file,
                               &weight->bytes.offset));
  weight->bytes.data = range.data;
  if (!range.data) EG_TRY(import_field(importer, tensor, count, weight));
  return check_booleans(importer, weight);
}

eg_status egi_import_tensor(egi_importer *importer, const Onnx__TensorProto *tensor, const char *name,
                            egi_weight *out_weight, const char **out_reason) {
  egi_weight weight = {.name = name};
  uint64_t count = 0;
  *out_reason = NULL;
  if (!egi_dtype_is_known(tensor->data_type))
    return egi_import_fail_tensor(importer, name, EG_ERROR_FORMAT, "unknown element type %d", tensor->data_type);
  weight.dtype = (eg_dtype)tensor->data_type;
  if (weight.dtype == EG_DTYPE_STRING) {
    *out_reason = "a tensor of texts";
    return EG_OK;
  }
  if (tensor->segment) return egi_import_fail_tensor(importer, name, EG_ERROR_UNSUPPORTED, "a segment of a tensor");
  EG_TRY(set_shape(importer, tensor, &weight, &count));
  EG_TRY(import_bytes(importer, tensor, count, &weight));
  *out_weight = weight;
  return EG_OK;
}

/* ---- Constant nodes ------------------------------------------------------------------------------------------- */

static eg_status copy_numbers(egi_importer *importer, const void *numbers, size_t count, egi_weight *weight) {
  size_t width = egi_dtype_bits(weight->dtype) / 8;
  uint8_t *data = egi_arena_get(&importer->module->arena, count, width);
  if (!data) return EG_ERROR_MEMORY;
  if (count) memcpy(data, numbers, count * width);
  weight->bytes.data = data;
  weight->bytes.size_bytes = count * width;
  return EG_OK;
}

static eg_status import_numbers(egi_importer *importer, const Onnx__AttributeProto *attribute, egi_weight *weight) {
  bool is_list = attribute->name[strlen(attribute->name) - 1] == 's';
  bool is_float = egi_has_prefix(attribute->name, "value_float");
  size_t count = !is_list ? 1 : is_float ? attribute->n_floats : attribute->n_ints;
  const void *numbers = is_float ? (is_list ? (const void *)attribute->floats : &attribute->f)
                                 : (is_list ? (const void *)attribute->ints : &attribute->i);
  weight->dtype = is_float ? EG_DTYPE_F32 : EG_DTYPE_I64;
  weight->rank = is_list;
  weight->dims[0] = is_list ? (int64_t)count : 0;
  return copy_numbers(importer, numbers, count, weight);
}

eg_status egi_import_constant(egi_importer *importer, const Onnx__NodeProto *node, egi_weight *out_weight,
                              bool *out_is_weight, const char **out_reason) {
  const char *name = egi_import_text(node->output[0]);
  *out_is_weight = false;
  *out_reason = NULL;
  if (node->n_attribute != 1) return EG_OK;
  const Onnx__AttributeProto *attribute = node->attribute[0];
  const char *kind = egi_import_text(attribute->name);
  if (attribute->ref_attr_name && attribute->ref_attr_name[0]) return EG_OK;
  *out_is_weight = true;
  if (!strcmp(kind, "value") && attribute->t)
    return egi_import_tensor(importer, attribute->t, name, out_weight, out_reason);
  if (!strcmp(kind, "value_float") || !strcmp(kind, "value_floats") || !strcmp(kind, "value_int") ||
      !strcmp(kind, "value_ints")) {
    *out_weight = (egi_weight){.name = name};
    return import_numbers(importer, attribute, out_weight);
  }
  *out_reason = !strcmp(kind, "sparse_value") ? "a sparse tensor" : "a tensor of texts";
  *out_is_weight = egi_has_prefix(kind, "value_string") || !strcmp(kind, "sparse_value");
  return EG_OK;
}
