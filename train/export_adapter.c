/* An adapter folder checked against its model and written in another form. */
#include "train/train.h"

static eg_status write_peft(const egi_peft *peft, const egi_peft_config *config, const char *directory,
                            egi_arena *arena) {
  size_t count = egi_safetensors_count(peft->tensors);
  egi_safetensor *tensors = EGI_NEW(arena, egi_safetensor, count > 0 ? count : 1);
  if (tensors == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) tensors[i] = *egi_safetensors_at(peft->tensors, i);
  return egi_peft_write(arena->ctx, directory, config, tensors, count);
}

eg_status egi_export_peft(const eg_model *model, const char *adapter, const char *directory) {
  egi_machine machine;
  egi_arena arena;
  egi_peft *peft;
  egi_adapters adapters;
  EG_TRY(egi_peft_open(model->ctx, adapter, &peft));
  egi_arena_init(&arena, model->ctx, EGI_PURPOSE_DATA);
  eg_status status = egi_machine_prepare(&machine, model, "cpu", EG_DTYPE_F32);
  if (status == EG_OK) status = egi_adapters_from_peft(machine.graph, peft, &arena, &adapters);
  if (status == EG_OK) status = write_peft(peft, &adapters.config, directory, &arena);
  egi_machine_close(&machine);
  egi_peft_close(peft);
  egi_arena_clear(&arena);
  return status;
}
