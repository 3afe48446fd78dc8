/* Tensors seen as rows: what softmax, normalisation and losses share. */
#include "backend/cpu/cpu.h"

void egi_rows_init(egi_rows *rows, const egi_tensor *tensor, int axis) {
  *rows = (egi_rows){0};
  rows->rank = axis;
  rows->inner_rank = tensor->rank - axis;
  rows->count = rows->length = 1;
  rows->element_bytes = egi_element_bytes(tensor->dtype);
  for (int i = 0; i < axis; i++) {
    rows->dims[i] = tensor->dims[i];
    rows->strides[i] = tensor->strides[i];
    rows->count *= tensor->dims[i];
  }
  rows->is_contiguous = true;
  int64_t expected = 1;
  for (int i = tensor->rank - 1; i >= axis; i--) {
    rows->inner_dims[i - axis] = tensor->dims[i];
    rows->inner_strides[i - axis] = tensor->strides[i];
    rows->length *= tensor->dims[i];
    if (tensor->dims[i] != 1 && tensor->strides[i] != expected) rows->is_contiguous = false;
    expected *= tensor->dims[i];
  }
}

void egi_rows_init_along(egi_rows *rows, const egi_tensor *tensor, int axis) {
  egi_tensor moved = *tensor;
  for (int i = axis; i + 1 < tensor->rank; i++) {
    moved.dims[i] = tensor->dims[i + 1];
    moved.strides[i] = tensor->strides[i + 1];
  }
  moved.dims[tensor->rank - 1] = tensor->dims[axis];
  moved.strides[tensor->rank - 1] = tensor->strides[axis];
  egi_rows_init(rows, &moved, tensor->rank - 1);
}

void *egi_rows_at(const egi_rows *rows, void *data, int64_t row) {
  int64_t offset = 0;
  for (int i = rows->rank - 1; i >= 0; i--) {
    offset += row % rows->dims[i] * rows->strides[i];
    row /= rows->dims[i];
  }
  return (char *)data + offset * (int64_t)rows->element_bytes;
}

/* Moves a row between its places and a buffer. */
static void move_row(const egi_rows *rows, char *row, char *buffer, bool is_load) {
  int64_t index[EGI_MAX_RANK] = {0};
  int last = rows->inner_rank - 1;
  for (int64_t i = 0; i < rows->length; i++) {
    int64_t offset = 0;
    for (int d = 0; d <= last; d++) offset += index[d] * rows->inner_strides[d];
    char *at = row + offset * (int64_t)rows->element_bytes, *packed = buffer + (size_t)i * rows->element_bytes;
    memcpy(is_load ? packed : at, is_load ? at : packed, rows->element_bytes);
    for (int d = last; d >= 0 && ++index[d] == rows->inner_dims[d]; d--) index[d] = 0;
  }
}

const void *egi_rows_load(const egi_rows *rows, const egi_tensor *tensor, int64_t row, void *buffer) {
  char *at = egi_rows_at(rows, tensor->data, row);
  if (rows->is_contiguous) return at;
  move_row(rows, at, buffer, true);
  return buffer;
}

void *egi_rows_target(const egi_rows *rows, const egi_tensor *tensor, int64_t row, void *buffer) {
  return rows->is_contiguous ? egi_rows_at(rows, tensor->data, row) : buffer;
}

void egi_rows_store(const egi_rows *rows, const egi_tensor *tensor, int64_t row, void *buffer) {
  if (!rows->is_contiguous) move_row(rows, egi_rows_at(rows, tensor->data, row), buffer, false);
}

const egi_row_functions *egi_row_functions_of(eg_dtype dtype) {
  const egi_isa *isa = egi_cpu_isa();
  if (dtype == EG_DTYPE_F32) return isa->rows->f32;
  return dtype == EG_DTYPE_F64 ? isa->rows->f64 : NULL;
}
