/* What a runner is given and what it makes: whole numbers in the type that the graph takes, masks and positions that
 * fit the caller's cache and mask. Called by runner.c. */
#include "train/train.h"

#include <string.h>

bool egi_is_whole_type(eg_dtype dtype) {
  return dtype == EG_DTYPE_I64 || dtype == EG_DTYPE_I32 || dtype == EG_DTYPE_BOOL;
}

static int64_t whole_at(const eg_tensor *tensor, uint64_t index) {
  if (tensor->dtype == EG_DTYPE_I64) return ((const int64_t *)tensor->data)[index];
  if (tensor->dtype == EG_DTYPE_I32) return ((const int32_t *)tensor->data)[index];
  return ((const uint8_t *)tensor->data)[index] != 0;
}

static bool fits_type(int64_t number, eg_dtype dtype) {
  if (dtype == EG_DTYPE_BOOL) return number == 0 || number == 1;
  return dtype == EG_DTYPE_I64 || (number >= INT32_MIN && number <= INT32_MAX);
}

eg_status egi_convert_whole(eg_context *ctx, const eg_tensor *tensor, uint64_t count, eg_dtype dtype, void *out) {
  for (uint64_t i = 0; i < count; i++) {
    int64_t number = whole_at(tensor, i);
    if (!fits_type(number, dtype))
      return egi_fail(ctx, EG_ERROR_ARGUMENT, "input \"%s\" holds %lld, the model takes %s", tensor->name,
                      (long long)number, egi_dtype_name(dtype));
    if (dtype == EG_DTYPE_I64) ((int64_t *)out)[i] = number;
    if (dtype == EG_DTYPE_I32) ((int32_t *)out)[i] = (int32_t)number;
    if (dtype == EG_DTYPE_BOOL) ((uint8_t *)out)[i] = (uint8_t)number;
  }
  return EG_OK;
}

int64_t egi_cache_length(const egi_graph *graph, uint32_t input, const eg_tensor *tensor) {
  const egi_value *value = &graph->values[graph->inputs[input]];
  egi_dims *dims = graph->module->dims;
  int64_t size;
  for (int axis = 1; axis < value->rank && axis < (int)tensor->rank; axis++)
    if (!egi_dim_value(dims, egi_dim_resolve(dims, value->dims[axis]), &size)) return tensor->dims[axis];
  return 0;
}

bool egi_is_packed_row(const eg_tensor *tensor) {
  bool is_packed = false;
  if (!egi_is_whole_type(tensor->dtype) || tensor->rank != 2 || tensor->dims[0] != 1 || tensor->data == NULL)
    return false;
  for (uint64_t i = 0; i < (uint64_t)tensor->dims[1]; i++) {
    int64_t last = i > 0 ? whole_at(tensor, i - 1) : -1, own = whole_at(tensor, i);
    if (own != 0 && own != last + 1) return false;
    is_packed = is_packed || (own == 0 && last > 0);
  }
  return is_packed;
}

void egi_packed_offsets(const eg_tensor *tensor, int64_t *out_offsets) {
  int64_t n_rows = tensor->dims[1], n = 0;
  for (int64_t i = 0; i < n_rows; i++)
    if (whole_at(tensor, (uint64_t)i) == 0) out_offsets[n++] = i;
  while (n <= n_rows) out_offsets[n++] = n_rows;
}

eg_status egi_check_positions(eg_context *ctx, const eg_tensor *tensor) {
  uint64_t count = (uint64_t)tensor->dims[0] * (uint64_t)tensor->dims[1];
  for (uint64_t i = 0; i < count; i++) {
    bool is_start = i % (uint64_t)tensor->dims[1] == 0;
    if (!is_start && whole_at(tensor, i) < whole_at(tensor, i - 1))
      return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "\"%s\" restarts within a row: packed rows are not supported",
                      tensor->name);
  }
  return EG_OK;
}

/* The mask says which tokens are real: positions count those, as generation in Hugging Face does, so that a row that is
 * padded on the left gives what it gives alone. */
static void count_masked(const egi_making *making, int64_t *positions) {
  uint64_t length = making->past + making->sequence;
  for (uint64_t row = 0; row < making->batch; row++) {
    int64_t n_real = 0;
    for (uint64_t t = 0; t < length; t++) {
      n_real += whole_at(making->mask, row * length + t) != 0;
      if (t >= making->past) positions[row * making->sequence + t - making->past] = n_real > 0 ? n_real - 1 : 0;
    }
  }
}

static bool has_mask(const egi_making *making, uint64_t n_rows) {
  const eg_tensor *mask = making->mask;
  return mask != NULL && egi_is_whole_type(mask->dtype) && mask->rank == 2 && n_rows == making->batch &&
         (uint64_t)mask->dims[0] == making->batch && (uint64_t)mask->dims[1] == making->past + making->sequence;
}

void egi_make_positions(const egi_making *making, uint64_t n_rows, int64_t *out_positions) {
  if (has_mask(making, n_rows)) {
    count_masked(making, out_positions);
    return;
  }
  for (uint64_t i = 0; i < n_rows * making->sequence; i++)
    out_positions[i] = (int64_t)(making->past + i % making->sequence);
}
