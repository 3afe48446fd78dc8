/* Adapters that begin in the matrices that they stand beside: PiSSA (Meng et al. 2024, arXiv:2404.02948) and OLoRA
 * (Büyükakyüz 2024, arXiv:2406.01775), with PEFT's numbers (peft/tuners/lora/layer.py, pissa_init, olora_init). The
 * base stays as it is, whoever else uses it: instead of taking the first product out of the matrix, the graph subtracts
 * it. */
#include "train/train.h"

#include <math.h>
#include <string.h>

#include "backend/plan.h"
#include "backend/quantise.h"
#include "base/blockwise.h"

typedef struct decomposer {
  egi_machine *machine;
  const eg_trainer_options *options;
  bool is_planned_only;
  egi_linear *linears;
  size_t n_linears;
} decomposer;

/* ---- matrices --------------------------------------------------------------------------------------------------- */

static float number_at(eg_dtype dtype, const uint8_t *bytes, uint64_t i) {
  uint16_t half;
  float value;
  if (dtype == EG_DTYPE_F32) {
    memcpy(&value, bytes + i * sizeof value, sizeof value);
    return value;
  }
  memcpy(&half, bytes + i * sizeof half, sizeof half);
  return dtype == EG_DTYPE_F16 ? egi_f16_to_f32(half) : egi_bf16_to_f32(half);
}

static eg_status read_plain(const decomposer *state, const egi_weight *weight, egi_arena *arena, float **out_values) {
  uint64_t count = (uint64_t)weight->dims[0] * (uint64_t)weight->dims[1], size_bytes = 0;
  eg_context *ctx = state->machine->ctx;
  if (weight->dtype != EG_DTYPE_F32 && weight->dtype != EG_DTYPE_F16 && weight->dtype != EG_DTYPE_BF16)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "init: weight \"%s\" of type %s cannot be decomposed", weight->name,
                    egi_dtype_name(weight->dtype));
  if (!egi_dtype_bytes(weight->dtype, count, &size_bytes)) return EG_ERROR_MEMORY;
  uint8_t *bytes = egi_arena_get(arena, 1, (size_t)size_bytes);
  float *values = EGI_NEW(arena, float, (size_t)count);
  if (bytes == NULL || values == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_weight_write(ctx, weight, bytes));
  for (uint64_t i = 0; i < count; i++) values[i] = number_at(weight->dtype, bytes, i);
  *out_values = values;
  return EG_OK;
}

/* What the codes stand for, [rows, columns] whatever the file's layout: the base as it is in this run. */
static eg_status read_codes(const decomposer *state, const egi_quantisation *q, egi_arena *arena, float **out_values) {
  uint64_t count = (uint64_t)q->rows * (uint64_t)q->columns;
  egi_quantised_memory memory = {{NULL}};
  float *values = EGI_NEW(arena, float, (size_t)count);
  for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++) {
    if (q->weights[part] == 0) continue;
    memory.parts[part] = egi_arena_get(arena, 1, (size_t)egi_quantised_bytes(q, (egi_quantised_tensor)part));
    if (memory.parts[part] == NULL) return EG_ERROR_MEMORY;
  }
  if (values == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_quantise(state->machine->ctx, q, &memory));
  const uint8_t *bytes = memory.parts[EGI_QUANTISED_SCALES];
  const float *scales = memory.parts[EGI_QUANTISED_SCALES];
  for (uint64_t first = 0, block = 0; first < count; first += (uint64_t)q->block, block++) {
    uint64_t n = count - first < (uint64_t)q->block ? count - first : (uint64_t)q->block;
    float scale =
        q->is_nested ? egi_nested_decode(memory.parts[EGI_QUANTISED_NESTED], bytes[block], block) : scales[block];
    egi_four_bit_decode((egi_four_bit)q->type, memory.parts[EGI_QUANTISED_CODES], first, (size_t)n, scale,
                        values + first);
  }
  *out_values = values;
  return EG_OK;
}

/* Rows [first, first + out_features) of the layer's matrix, [out, in]. */
static eg_status read_matrix(const decomposer *state, size_t index, int64_t first, egi_arena *arena,
                             float **out_values) {
  const egi_linear *linear = &state->linears[index];
  const egi_graph *graph = state->machine->graph;
  const egi_weight *weight = &graph->module->weights[graph->values[linear->weight].index];
  int64_t in = linear->in_features, out = linear->out_features;
  float *whole = NULL, *values;
  bool is_made = linear->is_quantised && weight->bytes.kind == EGI_BYTES_QUANTISED;
  if (linear->is_quantised && !is_made)
    return egi_fail_node(graph, linear->node, EG_ERROR_UNSUPPORTED,
                         "init: its weight is stored quantised: pissa and olora need the numbers");
  EG_TRY(is_made ? read_codes(state, weight->bytes.quantisation, arena, &whole)
                 : read_plain(state, weight, arena, &whole));
  *out_values = whole + first * in;
  if (is_made || linear->is_transposed) return EG_OK;
  int64_t stride = weight->dims[1];
  values = EGI_NEW(arena, float, (size_t)(in * out));
  if (values == NULL) return EG_ERROR_MEMORY;
  for (int64_t row = 0; row < out; row++)
    for (int64_t column = 0; column < in; column++) values[row * in + column] = whole[column * stride + first + row];
  *out_values = values;
  return EG_OK;
}

/* ---- targets ---------------------------------------------------------------------------------------------------- */

static eg_status add_factor(const decomposer *state, const char *path, char which, const int64_t dims[2],
                            uint32_t *out_index, float **out_values) {
  egi_module *module = state->machine->module;
  uint64_t count = (uint64_t)dims[0] * (uint64_t)dims[1];
  float *values = EGI_NEW(&module->arena, float, (size_t)count);
  egi_weight weight = {.dtype = EG_DTYPE_F32, .rank = 2, .dims = {dims[0], dims[1]}};
  weight.name = egi_arena_format(&module->arena, "engraft.first.%s.lora_%c", path, which);
  if (values == NULL || weight.name == NULL) return EG_ERROR_MEMORY;
  weight.bytes =
      (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = (const uint8_t *)values, .size_bytes = count * sizeof *values};
  *out_values = values;
  return egi_module_add_weight(module, &weight, out_index);
}

static eg_status decompose(const decomposer *state, size_t index, int64_t first, egi_adapter_target *target) {
  const egi_linear *linear = &state->linears[index];
  const int64_t a_dims[2] = {target->rank, linear->in_features}, b_dims[2] = {linear->out_features, target->rank};
  egi_factors factors = {.rows = linear->out_features, .columns = linear->in_features};
  float *matrix = NULL;
  egi_arena arena;
  if (target->rank > linear->in_features || target->rank > linear->out_features)
    return egi_fail_node(state->machine->graph, linear->node, EG_ERROR_ARGUMENT,
                         "init: rank %u is more than its matrix [%lld, %lld] has", target->rank,
                         (long long)linear->out_features, (long long)linear->in_features);
  factors.rank = target->rank;
  factors.scale = target->scale;
  EG_TRY(add_factor(state, target->path, 'A', a_dims, &target->first_a, &factors.a));
  EG_TRY(add_factor(state, target->path, 'B', b_dims, &target->first_b, &factors.b));
  if (state->is_planned_only) return EG_OK;
  egi_arena_init(&arena, state->machine->ctx, EGI_PURPOSE_DATA);
  eg_status status = read_matrix(state, index, first, &arena, &matrix);
  factors.matrix = matrix;
  if (status == EG_OK)
    status = state->options->init == EG_LORA_INIT_OLORA
                 ? egi_orthogonal_factors(state->machine->ctx, &factors)
                 : egi_principal_factors(state->machine->ctx, &factors, state->options->seed);
  egi_arena_clear(&arena);
  return status;
}

/* A module's first call; layers of one node stand one after the other. */
static eg_status decompose_all(const decomposer *state, egi_adapters *adapters, egi_arena *arena) {
  egi_map targets;
  int64_t first = 0;
  egi_map_init(&targets, arena);
  for (size_t i = 0; i < adapters->count; i++) EG_TRY(egi_map_put(&targets, adapters->targets[i].path, (uint32_t)i));
  for (size_t i = 0; i < state->n_linears; i++) {
    const egi_linear *linear = &state->linears[i];
    uint32_t index = 0;
    bool is_part = i > 0 && state->linears[i - 1].node == linear->node;
    first = is_part ? first + state->linears[i - 1].out_features : 0;
    if (!egi_map_get(&targets, linear->path, &index) || adapters->targets[index].first_a != 0) continue;
    EG_TRY(decompose(state, i, first, &adapters->targets[index]));
  }
  return EG_OK;
}

eg_status egi_adapters_decompose(egi_machine *machine, const eg_trainer_options *options, bool is_planned_only,
                                 egi_adapters *adapters) {
  decomposer state = {.machine = machine, .options = options, .is_planned_only = is_planned_only};
  egi_arena arena;
  double start = egi_clock();
  if (options->full || options->init_adapter != NULL || options->init < EG_LORA_INIT_PISSA) return EG_OK;
  if (adapters->config.parameters != NULL)
    return egi_fail(machine->ctx, EG_ERROR_UNSUPPORTED,
                    "init: pissa and olora are for linear layers, not for adapters on experts");
  egi_arena_init(&arena, machine->ctx, EGI_PURPOSE_DATA);
  eg_status status = egi_find_linears(machine->graph, &arena, &state.linears, &state.n_linears);
  if (status == EG_OK) status = decompose_all(&state, adapters, &arena);
  egi_arena_clear(&arena);
  if (status == EG_OK && !is_planned_only)
    egi_log(machine->ctx, EG_LOG_INFO, "%zu matrices decomposed for first adapters in %.2f s", adapters->count,
            egi_clock() - start);
  return status;
}
