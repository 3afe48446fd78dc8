/* Reading and checking of indices; see index.h. */
#include "backend/cpu/index.h"

static int64_t load_index(const egi_tensor *indices, int64_t offset) {
  if (indices->dtype == EG_DTYPE_I64) return ((const int64_t *)indices->data)[offset];
  return ((const int32_t *)indices->data)[offset];
}

int64_t egi_index_at(const egi_tensor *indices, int64_t position) {
  return load_index(indices, egi_row_offset(indices, indices->rank, position));
}

eg_status egi_check_indices(eg_context *ctx, const char *op_name, const egi_tensor *indices, int64_t size) {
  int64_t count = egi_tensor_count(indices);
  bool is_contiguous = egi_tensor_is_contiguous(indices);
  for (int64_t i = 0; i < count; i++) {
    int64_t index = is_contiguous ? load_index(indices, i) : egi_index_at(indices, i);
    if (index < -size || index >= size) {
      return egi_fail(ctx, EG_ERROR_DATA, "%s: index %lld is outside an axis of %lld", op_name, (long long)index,
                      (long long)size);
    }
  }
  return EG_OK;
}

bool egi_tuples_init(egi_tuples *tuples, const egi_tensor *data, const egi_tensor *indices, int batch_dims) {
  *tuples = (egi_tuples){.batch_dims = batch_dims};
  if (batch_dims < 0 || indices->rank < 1 || batch_dims >= indices->rank || batch_dims > data->rank) return false;
  int64_t depth = indices->dims[indices->rank - 1];
  if (depth < 0 || depth > data->rank - batch_dims) return false;
  for (int i = 0; i < batch_dims; i++) {
    if (data->dims[i] != indices->dims[i]) return false;
  }
  tuples->depth = (int)depth;
  for (int i = 0; i < tuples->depth; i++) {
    tuples->dims[i] = data->dims[batch_dims + i];
    tuples->strides[i] = egi_dims_product(data, batch_dims + i + 1, data->rank);
  }
  tuples->slice = egi_dims_product(data, batch_dims + tuples->depth, data->rank);
  tuples->batch_stride = egi_dims_product(data, batch_dims, data->rank);
  tuples->n_batches = egi_dims_product(indices, 0, batch_dims);
  tuples->per_batch = egi_dims_product(indices, batch_dims, indices->rank - 1);
  return true;
}

eg_status egi_tuples_check(eg_context *ctx, const char *op_name, const egi_tuples *tuples, const egi_tensor *indices) {
  int64_t count = tuples->n_batches * tuples->per_batch;
  for (int64_t row = 0; row < count; row++) {
    for (int i = 0; i < tuples->depth; i++) {
      int64_t index = load_index(indices, row * tuples->depth + i), size = tuples->dims[i];
      if (index < -size || index >= size) {
        return egi_fail(ctx, EG_ERROR_DATA, "%s: index %lld is outside an axis of %lld", op_name, (long long)index,
                        (long long)size);
      }
    }
  }
  return EG_OK;
}

int64_t egi_tuples_offset(const egi_tuples *tuples, const egi_tensor *indices, int64_t row) {
  int64_t offset = row / tuples->per_batch * tuples->batch_stride;
  for (int i = 0; i < tuples->depth; i++) {
    int64_t index = load_index(indices, row * tuples->depth + i);
    offset += (index < 0 ? index + tuples->dims[i] : index) * tuples->strides[i];
  }
  return offset;
}
