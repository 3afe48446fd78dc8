/* Modules that were trained whole, in a merged model: their tensors take the place of the model's weights. A head that
 * shared the token table's has a weight of its own then. */
#include "train/train.h"

#include <string.h>

/* [columns, rows] of the file -> [rows, columns] of the graph. */
static void transpose(const float *values, int64_t rows, int64_t columns, float *target) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) target[r * columns + c] = values[c * rows + r];
}

/* The state as the graph holds it, its parts one after the other. */
static eg_status read_state(const egi_merge *merge, const egi_state *state, egi_arena *arena, float **out_values) {
  uint64_t count = egi_state_count(state), done = 0;
  float *values = EGI_NEW(arena, float, (size_t)count), *turned = EGI_NEW(arena, float, (size_t)count);
  if (values == NULL || turned == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < (state->n_parts > 0 ? state->n_parts : 1); i++) {
    const char *name = state->n_parts > 0 ? state->parts[i].name : state->name;
    const egi_safetensor *tensor = egi_safetensors_find(merge->export_->peft->tensors, name);
    uint64_t n = 1;
    for (int axis = 0; tensor != NULL && axis < tensor->rank; axis++) n *= (uint64_t)tensor->dims[axis];
    if (tensor == NULL || n > count - done)
      return egi_fail(merge->export_->ctx, EG_ERROR_INTERNAL, "adapter tensor \"%s\" was not checked", name);
    EG_TRY(egi_adapter_read(merge->export_->ctx, tensor, values + done, n));
    done += n;
  }
  if (state->is_transposed) transpose(values, state->dims[0], state->dims[1], turned);
  *out_values = state->is_transposed ? turned : values;
  return EG_OK;
}

/* In the type of the weight, where it is computed with that; else in float32. */
static eg_status replace(egi_merge *merge, const egi_saved_parameter *saved, egi_arena *arena) {
  egi_module *module = merge->module;
  egi_weight weight = module->weights[saved->parameter.weight];
  float *values = NULL;
  uint32_t added = 0;
  egi_value_id value = 0;
  EG_TRY(read_state(merge, &saved->state, arena, &values));
  if (merge->is_widened || (weight.dtype != EG_DTYPE_F16 && weight.dtype != EG_DTYPE_BF16)) weight.dtype = EG_DTYPE_F32;
  weight.name = saved->parameter.name;
  weight.bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY};
  EG_TRY(egi_convert_floats(&module->arena, values, egi_state_count(&saved->state), weight.dtype, &weight.bytes.data,
                            &weight.bytes.size_bytes));
  EG_TRY(egi_module_add_weight(module, &weight, &added));
  EG_TRY(egi_graph_add_weight(merge->graph, added, &value));
  return egi_replace_parameter(merge->graph, &saved->parameter, value);
}

eg_status egi_merge_modules(egi_merge *merge) {
  egi_saved_parameter *saved;
  size_t n;
  EG_TRY(egi_find_saved_parameters(merge->graph, merge->export_->adapters.config.modules, &merge->arena, &saved, &n));
  for (size_t i = 0; i < n; i++) {
    egi_arena arena;
    egi_arena_init(&arena, merge->module->ctx, EGI_PURPOSE_DATA);
    eg_status status = replace(merge, &saved[i], &arena);
    egi_arena_clear(&arena);
    EG_TRY(status);
  }
  return EG_OK;
}
