/* What is known about the content of a value: bytes of weights, numbers of small integer tensors, single elements. */
#include "graph/graph.h"

static uint64_t count_of(const egi_weight *weight) {
  uint64_t count = 1;
  for (int i = 0; i < weight->rank; i++) {
    if (weight->dims[i] < 0) return 0;
    size_t product;
    if (!egi_size_multiply(count, (size_t)weight->dims[i], &product)) return 0;
    count = product;
  }
  return count;
}

static const egi_weight *weight_of(const egi_graph *graph, egi_value_id value) {
  if (value == 0 || value >= graph->n_values || graph->values[value].kind != EGI_VALUE_WEIGHT) return NULL;
  return &graph->module->weights[graph->values[value].index];
}

static bool weight_tensor(const egi_weight *weight, egi_tensor *out_tensor) {
  uint64_t bytes;
  if (weight->bytes.kind != EGI_BYTES_MEMORY || egi_dtype_bits(weight->dtype) < 8) return false;
  if (!egi_dtype_bytes(weight->dtype, count_of(weight), &bytes) || bytes > weight->bytes.size_bytes) return false;
  egi_tensor tensor = {.dtype = weight->dtype, .rank = weight->rank};
  tensor.data = (void *)(uintptr_t)weight->bytes.data;
  memcpy(tensor.dims, weight->dims, sizeof tensor.dims);
  egi_tensor_set_contiguous(&tensor);
  *out_tensor = tensor;
  return true;
}

bool egi_value_constant(const egi_graph *graph, egi_value_id value, egi_tensor *out_tensor) {
  const egi_weight *weight = weight_of(graph, value);
  return weight != NULL && weight_tensor(weight, out_tensor);
}

/* One element of an integer or boolean type; false when it does not fit. */
static bool read_integer(const uint8_t *bytes, eg_dtype dtype, int64_t *out) {
  union {
    int8_t i8;
    int16_t i16;
    uint16_t u16;
    int32_t i32;
    uint32_t u32;
    int64_t i64;
    uint64_t u64;
  } raw;
  memcpy(&raw, bytes, egi_dtype_bits(dtype) / 8);
  switch (dtype) {
  case EG_DTYPE_BOOL:
    *out = bytes[0] != 0;
    return true;
  case EG_DTYPE_U8:
    *out = bytes[0];
    return true;
  case EG_DTYPE_I8:
    *out = raw.i8;
    return true;
  case EG_DTYPE_U16:
    *out = raw.u16;
    return true;
  case EG_DTYPE_I16:
    *out = raw.i16;
    return true;
  case EG_DTYPE_U32:
    *out = raw.u32;
    return true;
  case EG_DTYPE_I32:
    *out = raw.i32;
    return true;
  case EG_DTYPE_I64:
    *out = raw.i64;
    return true;
  case EG_DTYPE_U64:
    *out = (int64_t)raw.u64;
    return raw.u64 <= INT64_MAX;
  default:
    return false;
  }
}

static bool is_integer(eg_dtype dtype) {
  egi_dtype_class kind = egi_dtype_kind(dtype);
  return egi_dtype_bits(dtype) >= 8 &&
         (kind == EGI_CLASS_INTEGER || kind == EGI_CLASS_UNSIGNED || kind == EGI_CLASS_BOOLEAN);
}

bool egi_weight_integers(const egi_weight *weight, int64_t *out, uint32_t capacity, uint32_t *out_count) {
  egi_tensor tensor;
  if (!is_integer(weight->dtype)) return false;
  uint64_t count = count_of(weight);
  if (count > capacity) return false;
  if (weight->bytes.kind == EGI_BYTES_FILL) {
    for (uint64_t i = 0; i < count; i++) out[i] = (int64_t)weight->bytes.value;
    *out_count = (uint32_t)count;
    return true;
  }
  if (!weight_tensor(weight, &tensor)) return false;
  const uint8_t *bytes = tensor.data;
  for (uint64_t i = 0; i < count; i++)
    if (!read_integer(bytes + i * (egi_dtype_bits(weight->dtype) / 8), weight->dtype, &out[i])) return false;
  *out_count = (uint32_t)count;
  return true;
}

bool egi_value_integers(const egi_graph *graph, egi_value_id id, int64_t *out, uint32_t capacity, uint32_t *out_count) {
  if (id == 0 || id >= graph->n_values) return false;
  const egi_value *value = &graph->values[id];
  const egi_weight *weight = weight_of(graph, id);
  if (value->elements == NULL) return weight != NULL && egi_weight_integers(weight, out, capacity, out_count);
  if (value->n_elements > capacity) return false;
  for (uint32_t i = 0; i < value->n_elements; i++)
    if (!egi_dim_value(graph->module->dims, value->elements[i], &out[i])) return false;
  *out_count = value->n_elements;
  return true;
}

bool egi_weight_scalar(const egi_weight *weight, double *out) {
  egi_tensor tensor;
  int64_t integer;
  uint32_t count;
  if (count_of(weight) != 1) return false;
  if (egi_weight_integers(weight, &integer, 1, &count)) {
    *out = (double)integer;
    return true;
  }
  if (weight->bytes.kind == EGI_BYTES_FILL) {
    *out = weight->bytes.value;
    return true;
  }
  if (!egi_dtype_is_float(weight->dtype) || egi_dtype_bits(weight->dtype) < 16 || !weight_tensor(weight, &tensor))
    return false;
  *out = egi_tensor_number(&tensor, 0);
  return true;
}

bool egi_value_scalar(const egi_graph *graph, egi_value_id value, double *out) {
  const egi_weight *weight = weight_of(graph, value);
  int64_t integer;
  uint32_t count;
  if (egi_value_integers(graph, value, &integer, 1, &count)) {
    *out = (double)integer;
    return count == 1;
  }
  return weight != NULL && egi_weight_scalar(weight, out);
}
