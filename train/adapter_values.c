/* The first values of adapters: PEFT's initialisations (peft/tuners/lora/layer.py, reset_lora_parameters) or a folder's
 * tensors. Numbers depend on seed and name alone, not on the order of the layers. */
#include "train/train.h"

#include <math.h>
#include <string.h>

static float read_element(const egi_safetensor *tensor, uint64_t index) {
  uint16_t half;
  float value;
  if (tensor->dtype == EG_DTYPE_F32) {
    memcpy(&value, tensor->data + index * sizeof value, sizeof value);
    return value;
  }
  memcpy(&half, tensor->data + index * sizeof half, sizeof half);
  return tensor->dtype == EG_DTYPE_F16 ? egi_f16_to_f32(half) : egi_bf16_to_f32(half);
}

eg_status egi_adapter_read(eg_context *ctx, const egi_safetensor *tensor, float *values, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) {
    values[i] = read_element(tensor, i);
    if (!isfinite(values[i]))
      return egi_fail(ctx, EG_ERROR_DATA, "adapter: %s holds a number that is not finite", tensor->name);
  }
  return EG_OK;
}

typedef eg_status (*fill_function)(const egi_machine *machine, const egi_state *state, const void *argument,
                                   float *values, uint64_t count);

/* Runs `fill` for each adapter tensor, or each parameter of modules that are trained whole, and writes the result to
 * the parameter pool. */
static eg_status fill_states(egi_machine *machine, fill_function fill, const void *argument, bool is_saved) {
  for (uint32_t i = 1; i < machine->module->n_states; i++) {
    const egi_state *state = &machine->module->states[i];
    bool is_wanted = is_saved ? state->weight != 0 : state->weight == 0 && state->rank == 2;
    if (state->pool != EGI_POOL_PARAMETERS || !is_wanted) continue;
    uint64_t count = egi_state_count(state);
    float *values = egi_allocate(machine->ctx, EGI_PURPOSE_DATA, (size_t)count * sizeof *values);
    if (values == NULL) return EG_ERROR_MEMORY;
    eg_status status = fill(machine, state, argument, values, count);
    if (status == EG_OK) status = egi_state_write(machine, state, EGI_POOL_PARAMETERS, values);
    egi_release(machine->ctx, EGI_PURPOSE_DATA, values, (size_t)count * sizeof *values);
    EG_TRY(status);
  }
  return EG_OK;
}

typedef struct initial {
  eg_lora_init init;
  uint64_t seed;
} initial;

/* A uniform in ±1/sqrt(in) (Kaiming with a = sqrt 5) or normal with deviation 1/rank; B zero. */
static eg_status fill_initial(const egi_machine *machine, const egi_state *state, const void *argument, float *values,
                              uint64_t count) {
  const initial *start = argument;
  int64_t dims[EGI_MAX_RANK];
  (void)machine;
  (void)egi_state_file_dims(state, dims);
  memset(values, 0, (size_t)count * sizeof *values);
  if (!egi_has_suffix(state->name, ".lora_A.weight")) return EG_OK;
  uint64_t stream = egi_hash(state->name, strlen(state->name), 0);
  double bound = 1.0 / sqrt((double)dims[1]),
         deviation = (double)(state->n_stacked > 0 ? state->n_stacked : 1) / (double)dims[0];
  for (uint64_t i = 0; i < count; i++)
    values[i] = start->init == EG_LORA_INIT_GAUSSIAN
                    ? (float)(deviation * egi_random_normal(start->seed, stream, i))
                    : (float)(bound * (2.0 * egi_random_uniform(start->seed, stream, i) - 1.0));
  return EG_OK;
}

eg_status egi_adapters_initialise(egi_machine *machine, eg_lora_init init, uint64_t seed) {
  initial start = {init, seed};
  return fill_states(machine, fill_initial, &start, false); /* the others are the model's own already */
}

/* The parts of a fused weight one after the other. */
static eg_status fill_from_parts(const egi_machine *machine, const egi_state *state, const void *argument,
                                 float *values, uint64_t count) {
  const egi_peft *peft = argument;
  uint64_t done = 0;
  for (uint32_t i = 0; i < (state->n_parts > 0 ? state->n_parts : 1); i++) {
    const char *name = state->n_parts > 0 ? state->parts[i].name : state->name;
    const egi_safetensor *tensor = egi_safetensors_find(peft->tensors, name);
    uint64_t n = 1;
    for (int axis = 0; tensor != NULL && axis < tensor->rank; axis++) n *= (uint64_t)tensor->dims[axis];
    if (tensor == NULL || n > count - done)
      return egi_fail(machine->ctx, EG_ERROR_INTERNAL, "adapter tensor \"%s\" was not checked", name);
    EG_TRY(egi_adapter_read(machine->ctx, tensor, values + done, n));
    done += n;
  }
  return EG_OK;
}

static eg_status fill_from_peft(const egi_machine *machine, const egi_state *state, const void *argument, float *values,
                                uint64_t count) {
  const egi_peft *peft = argument;
  const egi_safetensor *tensor = egi_safetensors_find(peft->tensors, state->name);
  if (tensor == NULL)
    return egi_fail(machine->ctx, EG_ERROR_INTERNAL, "adapter tensor \"%s\" was not checked", state->name);
  return egi_adapter_read(machine->ctx, tensor, values, count);
}

eg_status egi_adapters_load(egi_machine *machine, const egi_peft *peft) {
  EG_TRY(fill_states(machine, fill_from_peft, peft, false));
  return fill_states(machine, fill_from_parts, peft, true);
}
