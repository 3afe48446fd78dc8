/* What `engraft train` writes: an adapter or a model, and the first step's gradients. */
#include "tools/train.h"

#include <string.h>

eg_status training_save(training *run, const char *directory) {
  if (!tool_is_given(run->t, OPTION_FULL)) return eg_trainer_save_adapter(run->trainer, directory);
  const char *path = egi_path_join(&run->t->arena, directory, "model.onnx");
  if (path == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_make_directory(run->t->ctx, directory));
  return eg_trainer_save_model(run->trainer, path);
}

static eg_status read_gradients(const training *run, egi_arena *arena, egi_safetensor *tensors, size_t count) {
  for (size_t i = 0; i < count; i++) {
    eg_parameter_info info;
    size_t n_values = 1;
    EG_TRY(eg_trainer_parameter_info(run->trainer, i, &info));
    for (uint32_t axis = 0; axis < info.rank; axis++) n_values *= (size_t)info.dims[axis];
    float *values = EGI_NEW(arena, float, n_values);
    if (values == NULL) return EG_ERROR_MEMORY;
    EG_TRY(eg_trainer_read_gradient(run->trainer, i, values, n_values));
    tensors[i] = (egi_safetensor){.name = info.name,
                                  .dtype = EG_DTYPE_F32,
                                  .rank = (int)info.rank,
                                  .data = (const uint8_t *)values,
                                  .size_bytes = n_values * sizeof *values};
    memcpy(tensors[i].dims, info.dims, sizeof info.dims);
  }
  return EG_OK;
}

eg_status training_dump_gradients(training *run) {
  egi_arena arena;
  size_t count = eg_trainer_parameter_count(run->trainer);
  egi_arena_init(&arena, run->t->ctx, EGI_PURPOSE_DATA);
  egi_safetensor *tensors = EGI_NEW(&arena, egi_safetensor, count);
  eg_status status = tensors != NULL ? read_gradients(run, &arena, tensors, count) : EG_ERROR_MEMORY;
  if (status == EG_OK)
    status = egi_safetensors_write(run->t->ctx, tool_text(run->t, OPTION_DUMP_GRADIENTS), tensors, count);
  egi_arena_clear(&arena);
  return status;
}
