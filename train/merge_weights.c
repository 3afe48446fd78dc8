/* The weights of a merged model: what each linear layer has, W or what its codes stand for, plus the adapters of all
 * modules that it computes, in float32. */
#include "train/train.h"

#include <string.h>

/* ---- float32 ---- */

static eg_status fail_dtype(const egi_merge *merge, const egi_weight *weight) {
  return egi_fail(merge->module->ctx, EG_ERROR_UNSUPPORTED, "weight \"%s\" of type %s cannot take an adapter",
                  weight->name, egi_dtype_name(weight->dtype));
}

eg_status egi_merge_read(const egi_merge *merge, uint32_t index, egi_arena *arena, float **out_values) {
  const egi_weight *weight = &merge->module->weights[index];
  uint64_t count = 1;
  void *data;
  EG_TRY(egi_store_load(merge->store, index, &data));
  for (int i = 0; i < weight->rank; i++) count *= (uint64_t)weight->dims[i];
  float *values = EGI_NEW(arena, float, (size_t)count);
  const uint16_t *half = data;
  const double *wide = data;
  if (values == NULL) return EG_ERROR_MEMORY;
  switch (weight->dtype) {
  case EG_DTYPE_F32:
    memcpy(values, data, (size_t)count * sizeof *values);
    break;
  case EG_DTYPE_F16:
    for (uint64_t i = 0; i < count; i++) values[i] = egi_f16_to_f32(half[i]);
    break;
  case EG_DTYPE_BF16:
    for (uint64_t i = 0; i < count; i++) values[i] = egi_bf16_to_f32(half[i]);
    break;
  case EG_DTYPE_F64:
    for (uint64_t i = 0; i < count; i++) values[i] = (float)wide[i];
    break;
  default:
    return fail_dtype(merge, weight);
  }
  *out_values = values;
  return EG_OK;
}

/* ---- adapters ---- */

typedef struct addition {
  float *matrix;
  int64_t columns, row_stride, rank;
  const float *left, *right; /* [rows, rank], [rank, columns] */
} addition;

/* Products are summed in rank order: the result does not depend on the number of threads. */
static void add_row(void *argument, size_t row, size_t worker) {
  const addition *sum = argument;
  float *target = sum->matrix + (int64_t)row * sum->row_stride;
  (void)worker;
  for (int64_t r = 0; r < sum->rank; r++) {
    float factor = sum->left[(int64_t)row * sum->rank + r];
    const float *right = sum->right + r * sum->columns;
    for (int64_t c = 0; c < sum->columns; c++) target[c] += factor * right[c];
  }
}

static float *transposed(egi_arena *arena, const float *values, int64_t rows, int64_t columns) {
  float *copy = EGI_NEW(arena, float, (size_t)(rows * columns));
  for (int64_t r = 0; copy != NULL && r < rows; r++)
    for (int64_t c = 0; c < columns; c++) copy[c * rows + r] = values[r * columns + c];
  return copy;
}

/* W, [out, in] or [in, out], gets B · A at the module's rows of `n_out`. */
static eg_status add_adapter(const egi_merge *merge, size_t index, float *matrix, int64_t n_out, bool is_out_first) {
  const egi_linear *linear = &merge->linears[index];
  int64_t first = merge->first_rows[index];
  egi_arena arena;
  egi_lora lora;
  egi_arena_init(&arena, merge->module->ctx, EGI_PURPOSE_DATA);
  eg_status status = egi_lora_read_scaled(merge->export_, merge->adapter_of[index], &arena, &lora);
  if (status == EG_OK) {
    addition sum = {.matrix = matrix + first, .columns = lora.out_features, .row_stride = n_out, .rank = lora.rank};
    if (is_out_first)
      sum = (addition){
          matrix + first * linear->in_features, lora.in_features, lora.in_features, lora.rank, lora.b, lora.a};
    else
      sum.left = transposed(&arena, lora.a, lora.rank, lora.in_features),
      sum.right = transposed(&arena, lora.b, lora.out_features, lora.rank);
    int64_t rows = is_out_first ? lora.out_features : lora.in_features;
    if (sum.left == NULL || sum.right == NULL)
      status = EG_ERROR_MEMORY;
    else
      egi_pool_run(egi_context_pool(merge->module->ctx), (size_t)rows, add_row, &sum);
  }
  egi_arena_clear(&arena);
  return status;
}

eg_status egi_merge_weight(const egi_merge *merge, size_t first, egi_arena *arena, egi_merged *out_merged) {
  const egi_linear *linear = &merge->linears[first];
  egi_merged merged = {.is_out_first = linear->is_transposed};
  int64_t n_out = 0;
  size_t end = first;
  for (; end < merge->n_linears && merge->linears[end].node == linear->node; end++)
    n_out += merge->linears[end].out_features;
  if (linear->is_quantised)
    EG_TRY(egi_merge_decode(merge, linear, arena, &merged.values, &merged.is_out_first));
  else
    EG_TRY(egi_merge_read(merge, merge->graph->values[linear->weight].index, arena, &merged.values));
  for (size_t i = first; i < end; i++)
    if (merge->adapter_of[i] != UINT32_MAX) EG_TRY(add_adapter(merge, i, merged.values, n_out, merged.is_out_first));
  merged.rows = merged.is_out_first ? n_out : linear->in_features;
  merged.columns = merged.is_out_first ? linear->in_features : n_out;
  *out_merged = merged;
  return EG_OK;
}
