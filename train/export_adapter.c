/* An adapter folder checked against its model and written in another form: the way in, and PEFT's own form. */
#include "train/train.h"

#include <string.h>
#include <sys/stat.h>

eg_status egi_lora_read(const egi_export *export_, size_t index, double factor, egi_arena *arena, egi_lora *out_lora) {
  const egi_adapter_target *target = &export_->adapters.targets[index];
  const egi_safetensor *tensors[2];
  float *values[2];
  for (int i = 0; i < 2; i++) {
    const char *name = egi_arena_format(arena, "base_model.model.%s.lora_%c.weight", target->path, i == 0 ? 'A' : 'B');
    tensors[i] = name != NULL ? egi_safetensors_find(export_->peft->tensors, name) : NULL;
    if (name == NULL) return EG_ERROR_MEMORY;
    if (tensors[i] == NULL)
      return egi_fail(export_->ctx, EG_ERROR_INTERNAL, "adapter tensor \"%s\" was not checked", name);
    uint64_t count = (uint64_t)tensors[i]->dims[0] * (uint64_t)tensors[i]->dims[1];
    values[i] = EGI_NEW(arena, float, (size_t)count);
    if (values[i] == NULL) return EG_ERROR_MEMORY;
    EG_TRY(egi_adapter_read(export_->ctx, tensors[i], values[i], count));
  }
  *out_lora = (egi_lora){target->path, target->rank, tensors[0]->dims[1], tensors[1]->dims[0], values[0], values[1]};
  for (int64_t i = 0; i < out_lora->out_features * (int64_t)target->rank; i++)
    out_lora->b[i] = (float)((double)out_lora->b[i] * factor);
  return EG_OK;
}

eg_status egi_lora_read_scaled(const egi_export *export_, size_t index, egi_arena *arena, egi_lora *out_lora) {
  return egi_lora_read(export_, index, export_->adapters.targets[index].scale, arena, out_lora);
}

eg_status egi_convert_floats(egi_arena *arena, const float *values, uint64_t count, eg_dtype dtype,
                             const uint8_t **out_bytes, uint64_t *out_size) {
  if (!egi_dtype_bytes(dtype, count, out_size)) return EG_ERROR_MEMORY;
  uint16_t *half = egi_arena_get(arena, 1, (size_t)*out_size);
  if (half == NULL) return EG_ERROR_MEMORY;
  if (dtype == EG_DTYPE_F32) memcpy(half, values, (size_t)*out_size);
  for (uint64_t i = 0; dtype == EG_DTYPE_F16 && i < count; i++) half[i] = egi_f32_to_f16(values[i]);
  for (uint64_t i = 0; dtype == EG_DTYPE_BF16 && i < count; i++) half[i] = egi_f32_to_bf16(values[i]);
  *out_bytes = (const uint8_t *)half;
  return EG_OK;
}

eg_status egi_export_path(egi_export *export_, const char *path, const char *suffix, const char *name,
                          const char **out_path) {
  *out_path = path;
  if (egi_has_suffix(path, suffix)) return EG_OK;
  *out_path = egi_path_join(&export_->arena, path, name);
  return *out_path != NULL ? egi_make_directory(export_->ctx, path) : EG_ERROR_MEMORY;
}

eg_status egi_export_check(const egi_export *export_, const char *path) {
  const char *model = egi_module_path(export_->model->module);
  struct stat own, wanted;
  if (model == NULL || stat(model, &own) != 0 || stat(path, &wanted) != 0) return EG_OK;
  if (own.st_dev != wanted.st_dev || own.st_ino != wanted.st_ino) return EG_OK;
  return egi_fail(export_->ctx, EG_ERROR_ARGUMENT, "%s is the model itself, which stays as it is: name another file",
                  path);
}

/* ---- PEFT ---- */

eg_status egi_export_convert(egi_export *export_, egi_safetensor *tensor) {
  eg_dtype dtype = export_->options->dtype;
  uint64_t count = 1;
  if (dtype == EG_DTYPE_UNDEFINED || dtype == tensor->dtype) return EG_OK;
  for (int i = 0; i < tensor->rank; i++) count *= (uint64_t)tensor->dims[i];
  float *values = EGI_NEW(&export_->arena, float, (size_t)count);
  if (values == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_adapter_read(export_->ctx, tensor, values, count));
  tensor->dtype = dtype;
  return egi_convert_floats(&export_->arena, values, count, dtype, &tensor->data, &tensor->size_bytes);
}

static eg_status write_peft(egi_export *export_, const char *directory) {
  size_t count = egi_safetensors_count(export_->peft->tensors);
  egi_safetensor *tensors = EGI_NEW(&export_->arena, egi_safetensor, count > 0 ? count : 1);
  if (export_->options->is_portable) return egi_export_portable(export_, directory);
  if (tensors == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) {
    tensors[i] = *egi_safetensors_at(export_->peft->tensors, i);
    EG_TRY(egi_export_convert(export_, &tensors[i]));
  }
  return egi_peft_write(export_->ctx, directory, &export_->adapters.config, tensors, count);
}

/* ---- all of them ---- */

/* The adapters are those of the graph that training sees. */
static eg_status match(egi_export *export_) {
  egi_machine machine;
  eg_status status = egi_machine_prepare(&machine, export_->model, "cpu", EG_DTYPE_F32);
  if (status == EG_OK)
    status = egi_adapters_from_peft(machine.graph, export_->peft, &export_->arena, &export_->adapters);
  for (size_t i = 0; status == EG_OK && i < export_->adapters.count; i++) { /* texts of a module that ends here */
    egi_adapter_target *target = &export_->adapters.targets[i];
    target->path = egi_arena_copy_text(&export_->arena, target->path, strlen(target->path));
    if (target->path == NULL) status = EG_ERROR_MEMORY;
  }
  if (status == EG_OK) status = egi_export_find_experts(export_, machine.graph);
  egi_machine_close(&machine);
  return status;
}

static eg_status check_options(eg_context *ctx, const eg_export_options *options) {
  eg_dtype dtype = options->dtype;
  bool is_known =
      dtype == EG_DTYPE_UNDEFINED || dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
  if (options->format < EG_EXPORT_PEFT || options->format > EG_EXPORT_BNB)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "export options: format is out of range");
  if (!is_known) return egi_fail(ctx, EG_ERROR_ARGUMENT, "export options: dtype is none of f32, f16, bf16");
  bool is_quantised = options->stored != EG_QUANT_NONE || options->base != EG_QUANT_NONE;
  bool is_bnb = options->format == EG_EXPORT_BNB;
  if (is_bnb && (options->base != EG_QUANT_NONE || dtype != EG_DTYPE_UNDEFINED))
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "export options: base and dtype are not for bitsandbytes' form");
  if (is_quantised && options->format != EG_EXPORT_MERGED && !is_bnb)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "export options: stored and base are for merged models");
  if (options->stored != EG_QUANT_NONE && dtype != EG_DTYPE_UNDEFINED && dtype != EG_DTYPE_F32)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "export options: a model stored in 4 bits is computed in f32");
  if (options->is_portable && options->format != EG_EXPORT_PEFT)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "export options: only PEFT's format has a portable form");
  return EG_OK;
}

/* What an adapter was trained for says how it is merged. */
static eg_status check_codes(const egi_export *export_) {
  const eg_export_options *o = export_->options;
  const char *weights = export_->adapters.config.qat.weights;
  bool is_other = o->stored != EG_QUANT_NONE || o->base != EG_QUANT_NONE ||
                  (o->dtype != EG_DTYPE_UNDEFINED && o->dtype != EG_DTYPE_F32);
  if (o->format == EG_EXPORT_MERGED && is_other)
    return egi_fail(export_->ctx, EG_ERROR_ARGUMENT,
                    "export options: the adapter was trained for %s: a merged model is stored so", weights);
  if (o->format != EG_EXPORT_MERGED)
    egi_log(export_->ctx, EG_LOG_WARNING,
            "the adapter was trained for matrices rounded to %s: beside others it is not what was trained", weights);
  return EG_OK;
}

static eg_status write(egi_export *export_, const char *path) {
  eg_export_format format = export_->options->format;
  bool has_modules = format == EG_EXPORT_PEFT || format == EG_EXPORT_MERGED || format == EG_EXPORT_BNB;
  if (export_->adapters.config.modules != NULL && !has_modules)
    return egi_fail(
        export_->ctx, EG_ERROR_UNSUPPORTED,
        "modules that were trained whole (\"modules_to_save\") can be written as PEFT's folders and merged: "
        "this format holds adapters alone");
  if (export_->adapters.config.qat.weights != NULL) EG_TRY(check_codes(export_));
  switch (export_->options->format) {
  case EG_EXPORT_PEFT:
    return write_peft(export_, path);
  case EG_EXPORT_MERGED:
    return egi_export_merged(export_, path);
  case EG_EXPORT_ONNX_ADAPTER:
    return egi_export_onnx_adapter(export_, path);
  case EG_EXPORT_GGUF:
    return egi_export_gguf(export_, path);
  case EG_EXPORT_BNB:
    return egi_export_bnb(export_, path);
  }
  return EG_ERROR_ARGUMENT;
}

static eg_status open_adapter(egi_export *export_, const char *adapter) {
  if (adapter == NULL) return EG_OK;
  EG_TRY(egi_peft_open(export_->ctx, adapter, &export_->peft));
  return match(export_);
}

eg_status egi_export_adapter(const eg_model *model, const char *adapter, const eg_export_options *options,
                             const char *path) {
  egi_export export_ = {.model = model, .ctx = model->ctx, .options = options};
  EG_TRY(check_options(model->ctx, options));
  if (adapter == NULL && options->format != EG_EXPORT_BNB)
    return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "only bitsandbytes' form is written without an adapter");
  egi_arena_init(&export_.arena, model->ctx, EGI_PURPOSE_DATA);
  eg_status status = open_adapter(&export_, adapter);
  if (status == EG_OK) status = write(&export_, path);
  egi_peft_close(export_.peft);
  egi_arena_clear(&export_.arena);
  return status;
}
