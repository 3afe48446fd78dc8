/* What leaves a trainer: parameters and gradients as arrays, adapters as PEFT folders, trained weights as a model. */
#include "train/train.h"

#include <math.h>
#include <string.h>

static const egi_state *parameter_at(const eg_trainer *trainer, size_t index) {
  return &trainer->machine.module->states[trainer->parameters[index]];
}

size_t egi_trainer_parameter_count(const eg_trainer *trainer) {
  return trainer->n_tensors;
}

static const egi_state *state_of(const eg_trainer *trainer, const egi_file_tensor *tensor) {
  return &trainer->machine.module->states[tensor->state];
}

static int file_dims(const eg_trainer *trainer, const egi_file_tensor *tensor, int64_t dims[EGI_MAX_RANK]) {
  int rank = egi_state_file_dims(state_of(trainer, tensor), dims);
  if (tensor->rows > 0) dims[0] = tensor->rows;
  return rank;
}

static eg_status check_index(const eg_trainer *trainer, size_t index) {
  if (index < trainer->n_tensors) return EG_OK;
  return egi_fail(trainer->ctx, EG_ERROR_ARGUMENT, "there is no parameter %zu, only %zu", index, trainer->n_tensors);
}

eg_status egi_trainer_parameter_info(const eg_trainer *trainer, size_t index, eg_parameter_info *out_info) {
  EG_TRY(check_index(trainer, index));
  const egi_file_tensor *tensor = &trainer->tensors[index];
  eg_parameter_info info = {.name = tensor->name};
  info.rank = (uint32_t)file_dims(trainer, tensor, info.dims);
  *out_info = info;
  return EG_OK;
}

static eg_status check_access(const eg_trainer *trainer, size_t index, size_t n_values) {
  EG_TRY(check_index(trainer, index));
  const egi_file_tensor *tensor = &trainer->tensors[index];
  int64_t dims[EGI_MAX_RANK];
  uint64_t count = 1;
  int rank = file_dims(trainer, tensor, dims);
  for (int i = 0; i < rank; i++) count *= (uint64_t)dims[i];
  if (n_values == count) return EG_OK;
  return egi_fail(trainer->ctx, EG_ERROR_ARGUMENT, "parameter \"%s\" has %llu values, not %zu", tensor->name,
                  (unsigned long long)count, n_values);
}

/* The whole state of which the tensor is a part, and where that begins in it. */
static eg_status read_whole(const eg_trainer *trainer, const egi_file_tensor *tensor, egi_state_pool pool,
                            float **out_values, size_t *out_count, size_t *out_first) {
  const egi_state *state = state_of(trainer, tensor);
  int64_t dims[EGI_MAX_RANK];
  (void)egi_state_file_dims(state, dims);
  *out_count = (size_t)egi_state_count(state);
  *out_first = *out_count / (size_t)dims[0] * (size_t)tensor->first_row;
  *out_values = egi_allocate(trainer->ctx, EGI_PURPOSE_DATA, *out_count * sizeof **out_values);
  if (*out_values == NULL) return EG_ERROR_MEMORY;
  eg_status status = egi_state_read(&trainer->machine, state, pool, *out_values);
  if (status != EG_OK) egi_release(trainer->ctx, EGI_PURPOSE_DATA, *out_values, *out_count * sizeof **out_values);
  return status;
}

static eg_status read_tensor(const eg_trainer *trainer, const egi_file_tensor *tensor, egi_state_pool pool,
                             float *values, size_t n_values) {
  size_t count = 0, first = 0;
  float *whole = NULL;
  if (tensor->rows == 0) return egi_state_read(&trainer->machine, state_of(trainer, tensor), pool, values);
  EG_TRY(read_whole(trainer, tensor, pool, &whole, &count, &first));
  memcpy(values, whole + first, n_values * sizeof *values);
  egi_release(trainer->ctx, EGI_PURPOSE_DATA, whole, count * sizeof *whole);
  return EG_OK;
}

eg_status egi_trainer_read(const eg_trainer *trainer, size_t index, egi_state_pool pool, float *values,
                           size_t n_values) {
  EG_TRY(check_access(trainer, index, n_values));
  if (pool == EGI_POOL_GRADIENTS && !trainer->has_gradients)
    return egi_fail(trainer->ctx, EG_ERROR_ARGUMENT, "there are no gradients before the first step");
  EG_TRY(read_tensor(trainer, &trainer->tensors[index], pool, values, n_values));
  if (pool == EGI_POOL_GRADIENTS)
    for (size_t i = 0; i < n_values; i++) values[i] *= trainer->state.inverse_targets;
  return EG_OK;
}

eg_status egi_trainer_write(eg_trainer *trainer, size_t index, const float *values, size_t n_values) {
  size_t count = 0, first = 0;
  float *whole = NULL;
  EG_TRY(check_access(trainer, index, n_values));
  const egi_file_tensor *tensor = &trainer->tensors[index];
  const egi_state *state = state_of(trainer, tensor);
  if (tensor->rows == 0) return egi_state_write(&trainer->machine, state, EGI_POOL_PARAMETERS, values);
  EG_TRY(read_whole(trainer, tensor, EGI_POOL_PARAMETERS, &whole, &count, &first));
  memcpy(whole + first, values, n_values * sizeof *values);
  eg_status status = egi_state_write(&trainer->machine, state, EGI_POOL_PARAMETERS, whole);
  egi_release(trainer->ctx, EGI_PURPOSE_DATA, whole, count * sizeof *whole);
  return status;
}

/* ---- adapters ---- */

static eg_status read_tensors(const eg_trainer *trainer, egi_arena *arena, egi_safetensor *tensors) {
  for (size_t i = 0; i < trainer->n_tensors; i++) {
    const egi_file_tensor *from = &trainer->tensors[i];
    size_t count = 1;
    tensors[i] = (egi_safetensor){.name = from->name, .dtype = EG_DTYPE_F32};
    tensors[i].rank = file_dims(trainer, from, tensors[i].dims);
    for (int axis = 0; axis < tensors[i].rank; axis++) count *= (size_t)tensors[i].dims[axis];
    float *values = EGI_NEW(arena, float, count);
    if (values == NULL) return EG_ERROR_MEMORY;
    EG_TRY(read_tensor(trainer, from, EGI_POOL_PARAMETERS, values, count));
    tensors[i].data = (const uint8_t *)values;
    tensors[i].size_bytes = count * sizeof *values;
  }
  return EG_OK;
}

/* ---- adapters that did not begin at zero ---- */

/* B · A - B0 · A0 = [B, -B0] · [A; A0]: plain LoRA of twice the rank beside the unchanged base, as PEFT converts them
 * (peft/tuners/lora/model.py, subtract_mutated_init). */
static eg_status append_first(const eg_trainer *trainer, const egi_state *state, egi_arena *arena,
                              egi_safetensor *tensor) {
  const egi_weight *first = &trainer->machine.module->weights[state->weight];
  const float *now = (const float *)(const void *)tensor->data,
              *before = (const float *)(const void *)first->bytes.data;
  size_t rows = (size_t)tensor->dims[0], columns = (size_t)tensor->dims[1];
  float *both = EGI_NEW(arena, float, 2 * rows * columns);
  bool is_a = egi_has_suffix(state->name, ".lora_A.weight");
  if (both == NULL) return EG_ERROR_MEMORY;
  if (is_a) {
    memcpy(both, now, rows * columns * sizeof *both);
    memcpy(both + rows * columns, before, rows * columns * sizeof *both);
  }
  for (size_t row = 0; row < rows && !is_a; row++)
    for (size_t column = 0; column < columns; column++) {
      both[2 * row * columns + column] = now[row * columns + column];
      both[(2 * row + 1) * columns + column] = -before[row * columns + column];
    }
  tensor->dims[is_a ? 0 : 1] *= 2;
  tensor->data = (const uint8_t *)both;
  tensor->size_bytes *= 2;
  return EG_OK;
}

static eg_status double_patterns(egi_arena *arena, const egi_peft_pattern **patterns, size_t count, double factor) {
  egi_peft_pattern *copy = EGI_NEW(arena, egi_peft_pattern, count + 1);
  if (copy == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) {
    copy[i] = (*patterns)[i];
    copy[i].value *= factor;
  }
  *patterns = copy;
  return EG_OK;
}

static eg_status double_ranks(const eg_trainer *trainer, egi_arena *arena, egi_safetensor *tensors,
                              egi_peft_config *config) {
  bool has_first = false;
  for (size_t i = 0; i < trainer->n_tensors; i++) {
    const egi_state *state = state_of(trainer, &trainer->tensors[i]);
    bool is_adapter = egi_has_suffix(state->name, ".lora_A.weight") || egi_has_suffix(state->name, ".lora_B.weight");
    if (state->weight == 0 || !is_adapter) continue;
    EG_TRY(append_first(trainer, state, arena, &tensors[i]));
    has_first = true;
  }
  if (!has_first) return EG_OK;
  double factor = config->use_rslora ? sqrt(2.0) : 2.0; /* the scale stays */
  config->rank *= 2;
  config->alpha *= factor;
  EG_TRY(double_patterns(arena, &config->ranks, config->n_ranks, 2.0));
  return double_patterns(arena, &config->alphas, config->n_alphas, factor);
}

eg_status egi_trainer_save_adapter(const eg_trainer *trainer, const char *directory) {
  if (trainer->options.full)
    return egi_fail(trainer->ctx, EG_ERROR_ARGUMENT, "full training has no adapter; save the model instead");
  egi_arena arena;
  egi_arena_init(&arena, trainer->ctx, EGI_PURPOSE_DATA);
  egi_safetensor *tensors = EGI_NEW(&arena, egi_safetensor, trainer->n_tensors);
  egi_peft_config config = trainer->adapters.config;
  eg_status status = tensors != NULL ? read_tensors(trainer, &arena, tensors) : EG_ERROR_MEMORY;
  if (status == EG_OK) status = double_ranks(trainer, &arena, tensors, &config);
  if (status == EG_OK) status = egi_peft_write(trainer->ctx, directory, &config, tensors, trainer->n_tensors);
  egi_arena_clear(&arena);
  return status;
}

/* ---- models ---- */

/* Numbers of a weight in its own type, in new memory of the arena. */
static eg_status narrow(egi_arena *arena, const float *values, uint64_t count, egi_weight *weight) {
  uint64_t size_bytes;
  if (!egi_dtype_bytes(weight->dtype, count, &size_bytes)) return EG_ERROR_MEMORY;
  void *data = egi_arena_get(arena, 1, (size_t)size_bytes);
  uint16_t *half = data;
  double *wide = data;
  if (data == NULL) return EG_ERROR_MEMORY;
  switch (weight->dtype) {
  case EG_DTYPE_F32:
    memcpy(data, values, (size_t)size_bytes);
    break;
  case EG_DTYPE_F16:
    for (uint64_t i = 0; i < count; i++) half[i] = egi_f32_to_f16(values[i]);
    break;
  case EG_DTYPE_BF16:
    for (uint64_t i = 0; i < count; i++) half[i] = egi_f32_to_bf16(values[i]);
    break;
  case EG_DTYPE_F64:
    for (uint64_t i = 0; i < count; i++) wide[i] = (double)values[i];
    break;
  default:
    return egi_fail(arena->ctx, EG_ERROR_UNSUPPORTED, "weight \"%s\" of type %s cannot be written back", weight->name,
                    egi_dtype_name(weight->dtype));
  }
  weight->bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = data, .size_bytes = size_bytes};
  return EG_OK;
}

/* The state as the graph holds it, in the type of the weight it came from. */
static eg_status read_weight(const eg_trainer *trainer, const egi_state *state, egi_arena *arena, egi_weight *weight) {
  uint64_t count = egi_state_count(state);
  egi_state as_stored = *state;
  as_stored.is_transposed = false;
  float *values = egi_allocate(trainer->ctx, EGI_PURPOSE_DATA, (size_t)count * sizeof *values);
  if (values == NULL) return EG_ERROR_MEMORY;
  eg_status status = egi_state_read(&trainer->machine, &as_stored, EGI_POOL_PARAMETERS, values);
  if (status == EG_OK) status = narrow(arena, values, count, weight);
  egi_release(trainer->ctx, EGI_PURPOSE_DATA, values, (size_t)count * sizeof *values);
  return status;
}

/* True when the weight belongs to this parameter alone: then it keeps its name and place in the file. */
static bool is_sole_owner(const egi_graph *graph, const egi_parameter *parameters, size_t n, size_t index) {
  const egi_parameter *own = &parameters[index];
  for (size_t i = 0; i < n; i++)
    if (i != index && parameters[i].weight == own->weight) return false;
  for (uint32_t i = 0; i < own->n_uses; i++) {
    bool is_transposed = false;
    egi_value_id value = graph->nodes[own->uses[i].node].inputs[own->uses[i].input];
    egi_value_id weight = egi_weight_below(graph, value, &is_transposed);
    if (weight == 0 || graph->values[weight].index != own->weight) return false;
  }
  return true;
}

static const egi_state *find_state(const eg_trainer *trainer, const char *name) {
  for (size_t i = 0; i < trainer->n_parameters; i++)
    if (strcmp(parameter_at(trainer, i)->name, name) == 0) return parameter_at(trainer, i);
  return NULL;
}

static eg_status replace_weight(const eg_trainer *trainer, egi_graph *graph, const egi_parameter *parameters, size_t n,
                                size_t index) {
  const egi_parameter *parameter = &parameters[index];
  egi_module *module = graph->module;
  const egi_state *state = find_state(trainer, parameter->name);
  egi_weight weight = module->weights[parameter->weight];
  egi_value_id value;
  uint32_t added;
  if (state == NULL)
    return egi_fail(trainer->ctx, EG_ERROR_INTERNAL, "parameter \"%s\" was not trained", parameter->name);
  bool is_coded = trainer->adapters.config.qat.weights != NULL; /* codes are of all digits */
  if (is_coded) weight.dtype = EG_DTYPE_F32;
  EG_TRY(read_weight(trainer, state, &module->arena, &weight));
  if (!is_coded && is_sole_owner(graph, parameters, n, index)) {
    module->weights[parameter->weight].bytes = weight.bytes;
    return EG_OK;
  }
  weight.name = parameter->name;
  EG_TRY(egi_module_add_weight(module, &weight, &added));
  EG_TRY(egi_graph_add_weight(graph, added, &value));
  return egi_replace_parameter(graph, parameter, value);
}

/* Whether each parameter is a weight of the model's own graph, and alone there: then new bytes are all it takes. */
static bool is_in_place(const egi_graph *own, const egi_graph *graph, const egi_parameter *parameters, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint32_t weight = parameters[i].weight;
    bool is_own = weight < own->weight_values_capacity && own->weight_values[weight] != 0;
    if (!is_own || !is_sole_owner(graph, parameters, n, i)) return false;
  }
  return true;
}

/* In float32, as it was trained, with its matrices as codes. */
static eg_status store_codes(const eg_trainer *trainer, egi_graph *graph) {
  static const char *const names[] = {"fake_quantize"};
  egi_adapt_options adapt = {.is_full = true};
  egi_store *store;
  EG_TRY(egi_fake_options_make(trainer->ctx, &trainer->adapters.config.qat, &adapt.fake));
  EG_TRY(egi_run_passes(graph, names, EGI_COUNT(names), &adapt));
  EG_TRY(egi_store_create(trainer->ctx, graph->module, egi_backend_cpu(), &store));
  eg_status status = egi_export_codes(graph, store);
  egi_store_destroy(store);
  return status;
}

/* A graph with the trained weights: the model's own where nothing but their bytes differs, else a copy that is
 * canonical and named as for training, in its own types. */
static eg_status write_weights(const eg_trainer *trainer, egi_module *module, egi_graph **out_graph) {
  static const egi_pipeline_options options;
  static const char *const clean[] = {"eliminate_dead"};
  static const char *const widen[] = {"widen_floats", "eliminate_common", "eliminate_dead"};
  bool is_coded = trainer->adapters.config.qat.weights != NULL;
  egi_graph *own = module->graphs[0], *graph;
  egi_parameter *parameters;
  size_t n;
  EG_TRY(egi_module_copy_graph(module, own, "trained", &graph));
  EG_TRY(egi_passes_run_stage(graph, EGI_STAGE_CANONICALISE, &options));
  EG_TRY(egi_passes_run_stage(graph, EGI_STAGE_RECOGNISE, &options));
  if (is_coded) EG_TRY(egi_passes_run(graph, widen, EGI_COUNT(widen), &options, NULL));
  EG_TRY(egi_stack_experts(graph));
  EG_TRY(egi_find_parameters(graph, &module->arena, &parameters, &n));
  *out_graph = !is_coded && is_in_place(own, graph, parameters, n) ? own : graph;
  for (size_t i = 0; i < n; i++) EG_TRY(replace_weight(trainer, graph, parameters, n, i));
  if (*out_graph == own) return EG_OK;
  if (is_coded) EG_TRY(store_codes(trainer, graph));
  EG_TRY(egi_passes_run(graph, clean, 1, &options, NULL));
  return egi_graph_tidy(graph);
}

eg_status egi_trainer_save_model(const eg_trainer *trainer, const char *path) {
  egi_module *module;
  egi_graph *graph = NULL;
  uint32_t count;
  if (!trainer->options.full)
    return egi_fail(trainer->ctx, EG_ERROR_ARGUMENT,
                    "only full training has a model to save; save the adapter instead");
  EG_TRY(egi_module_clone(trainer->model->module, &module));
  eg_status status = write_weights(trainer, module, &graph);
  if (status == EG_OK)
    status = egi_graph_call_bodies(graph, EGI_BODIES_OWN, &count); /* so that any runtime reads the file */
  if (status == EG_OK) status = egi_module_export(module, graph, path);
  egi_module_destroy(module);
  return status;
}
