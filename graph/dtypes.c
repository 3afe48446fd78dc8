/* Element types, and strided views of tensors in memory. */
#include <math.h>
#include <string.h>

#include "graph/graph.h"

typedef struct dtype_row {
  uint8_t bits;
  egi_dtype_class kind;
  const char *name;
} dtype_row;

/* Indexed by number; row 0 is "undefined". */
static const dtype_row rows[] = {
    [EG_DTYPE_UNDEFINED] = {0, EGI_CLASS_NONE, "undefined"},
#define EGI_DTYPE(symbol, number, bits, class, text) [number] = {bits, EGI_CLASS_##class, text},
#include "graph/dtypes.def"
#undef EGI_DTYPE
};

#define EGI_DTYPE(symbol, number, bits, class, text) \
  _Static_assert(EG_DTYPE_##symbol == (number), "dtypes.def and engraft.h differ");
#include "graph/dtypes.def"
#undef EGI_DTYPE

bool egi_dtype_is_known(int64_t number) {
  return number > 0 && number < (int64_t)EGI_COUNT(rows);
}

static const dtype_row *row_of(eg_dtype dtype) {
  return &rows[egi_dtype_is_known((int64_t)dtype) ? dtype : 0];
}

unsigned egi_dtype_bits(eg_dtype dtype) {
  return row_of(dtype)->bits;
}

egi_dtype_class egi_dtype_kind(eg_dtype dtype) {
  return row_of(dtype)->kind;
}

bool egi_dtype_is_float(eg_dtype dtype) {
  return row_of(dtype)->kind == EGI_CLASS_FLOAT;
}

const char *egi_dtype_name(eg_dtype dtype) {
  return row_of(dtype)->name;
}

eg_dtype egi_dtype_from_name(const char *name) {
  for (size_t i = 1; i < EGI_COUNT(rows); i++)
    if (strcmp(rows[i].name, name) == 0) return (eg_dtype)i;
  return EG_DTYPE_UNDEFINED;
}

bool egi_dtype_bytes(eg_dtype dtype, uint64_t count, uint64_t *out_bytes) {
  unsigned bits = egi_dtype_bits(dtype);
  if (bits == 0) return false;
  if (bits % 8 == 0) {
    if (count > UINT64_MAX / (bits / 8)) return false;
    *out_bytes = count * (bits / 8);
    return true;
  }
  uint64_t per_byte = 8 / bits;
  *out_bytes = count / per_byte + (count % per_byte != 0 ? 1 : 0);
  return true;
}

int64_t egi_tensor_count(const egi_tensor *tensor) {
  int64_t count = 1;
  for (int i = 0; i < tensor->rank; i++) count *= tensor->dims[i];
  return count;
}

bool egi_tensor_is_contiguous(const egi_tensor *tensor) {
  int64_t stride = 1;
  if (egi_tensor_count(tensor) == 0) return true;
  for (int i = tensor->rank - 1; i >= 0; i--) {
    if (tensor->dims[i] != 1 && tensor->strides[i] != stride) return false;
    stride *= tensor->dims[i];
  }
  return true;
}

void egi_tensor_set_contiguous(egi_tensor *tensor) {
  int64_t stride = 1;
  for (int i = tensor->rank - 1; i >= 0; i--) {
    tensor->strides[i] = stride;
    stride *= tensor->dims[i];
  }
}

double egi_tensor_number(const egi_tensor *tensor, int64_t i) {
  size_t bytes = egi_dtype_bits(tensor->dtype) / 8;
  union {
    float f32;
    double f64;
    uint16_t half;
    int64_t i64;
    int32_t i32;
    uint8_t u8;
  } raw = {0};
  if (bytes > sizeof raw) return (double)NAN;
  memcpy(&raw, (const char *)tensor->data + (size_t)i * bytes, bytes); /* a file's bytes may stand at any address */
  switch (tensor->dtype) {
  case EG_DTYPE_F32:
    return (double)raw.f32;
  case EG_DTYPE_F64:
    return raw.f64;
  case EG_DTYPE_F16:
    return (double)egi_f16_to_f32(raw.half);
  case EG_DTYPE_BF16:
    return (double)egi_bf16_to_f32(raw.half);
  case EG_DTYPE_I64:
    return (double)raw.i64;
  case EG_DTYPE_I32:
    return (double)raw.i32;
  case EG_DTYPE_BOOL:
    return raw.u8 != 0;
  default:
    return (double)NAN;
  }
}

bool egi_tensor_set(egi_tensor *tensor, int64_t i, double value) {
  switch (tensor->dtype) {
  case EG_DTYPE_F32:
    ((float *)tensor->data)[i] = (float)value;
    return true;
  case EG_DTYPE_F64:
    ((double *)tensor->data)[i] = value;
    return true;
  case EG_DTYPE_F16:
    ((uint16_t *)tensor->data)[i] = egi_f32_to_f16((float)value);
    return true;
  case EG_DTYPE_BF16:
    ((uint16_t *)tensor->data)[i] = egi_f32_to_bf16((float)value);
    return true;
  case EG_DTYPE_I64:
    ((int64_t *)tensor->data)[i] = (int64_t)value;
    return true;
  case EG_DTYPE_I32:
    ((int32_t *)tensor->data)[i] = (int32_t)value;
    return true;
  case EG_DTYPE_BOOL:
    ((uint8_t *)tensor->data)[i] = value != 0;
    return true;
  default:
    return false;
  }
}
