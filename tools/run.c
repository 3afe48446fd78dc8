/* engraft run: a model's graph once, tensors from and to safetensors files. */
#include "tools/tool.h"

#include <string.h>

/* Aligned copies: tensors in a file may begin at any byte. */
static eg_status read_inputs(tool *t, const egi_safetensors *file, eg_tensor *inputs) {
  for (size_t i = 0; i < egi_safetensors_count(file); i++) {
    const egi_safetensor *tensor = egi_safetensors_at(file, i);
    void *data = egi_arena_get(&t->arena, 1, tensor->size_bytes > 0 ? (size_t)tensor->size_bytes : 1);
    if (data == NULL) return EG_ERROR_MEMORY;
    if (tensor->size_bytes > 0) memcpy(data, tensor->data, (size_t)tensor->size_bytes);
    inputs[i] = (eg_tensor){.name = tensor->name, .dtype = tensor->dtype, .rank = (uint32_t)tensor->rank, .data = data};
    memcpy(inputs[i].dims, tensor->dims, sizeof tensor->dims);
  }
  return EG_OK;
}

static eg_status write_outputs(tool *t, const eg_tensor *outputs, size_t count) {
  egi_safetensor *tensors = EGI_NEW(&t->arena, egi_safetensor, count > 0 ? count : 1);
  if (tensors == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) {
    uint64_t elements = 1;
    for (uint32_t axis = 0; axis < outputs[i].rank; axis++) elements *= (uint64_t)outputs[i].dims[axis];
    tensors[i] = (egi_safetensor){
        .name = outputs[i].name, .dtype = outputs[i].dtype, .rank = (int)outputs[i].rank, .data = outputs[i].data};
    memcpy(tensors[i].dims, outputs[i].dims, sizeof outputs[i].dims);
    if (!egi_dtype_bytes(outputs[i].dtype, elements, &tensors[i].size_bytes)) return EG_ERROR_MEMORY;
  }
  return egi_safetensors_write(t->ctx, tool_text(t, OPTION_OUTPUTS), tensors, count);
}

static eg_status run(tool *t, eg_runner *runner, const egi_safetensors *file) {
  size_t n_inputs = egi_safetensors_count(file), n_outputs;
  const eg_tensor *outputs;
  eg_tensor *inputs = EGI_NEW(&t->arena, eg_tensor, n_inputs > 0 ? n_inputs : 1);
  if (inputs == NULL) return EG_ERROR_MEMORY;
  EG_TRY(read_inputs(t, file, inputs));
  EG_TRY(eg_runner_run(runner, inputs, n_inputs, &outputs, &n_outputs));
  return write_outputs(t, outputs, n_outputs);
}

int tool_run(tool *t) {
  eg_model *model = NULL;
  eg_runner *runner = NULL;
  egi_safetensors *file = NULL;
  eg_runner_options options = EG_RUNNER_OPTIONS_INIT;
  if (tool_text(t, OPTION_INPUTS) == NULL) return tool_fail_usage(t, "--inputs is missing");
  if (tool_text(t, OPTION_OUTPUTS) == NULL) return tool_fail_usage(t, "--outputs is missing");
  options.device = tool_text(t, OPTION_DEVICE);
  options.no_fuse = tool_is_given(t, OPTION_NO_FUSE);
  options.adapter = tool_text(t, OPTION_ADAPTER);
  options.dtype = tool_dtype(t, OPTION_RUN_DTYPE);
  eg_status status = tool_load_model(t, &model);
  if (status == EG_OK) status = egi_safetensors_open(t->ctx, tool_text(t, OPTION_INPUTS), &file);
  if (status == EG_OK) status = eg_runner_create(model, &options, &runner);
  if (status == EG_OK) status = run(t, runner, file);
  eg_runner_destroy(runner);
  egi_safetensors_close(file);
  eg_model_destroy(model);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
