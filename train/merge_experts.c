/* Adapters on experts added to the stacks that Hugging Face's model holds: ΔW of expert e is B[:, ·, e] · A[e], A's
 * rows by expert, B's columns by rank (peft/tuners/lora/layer.py, ParamWrapper). */
#include <string.h>

#include "train/train.h"

typedef struct stack {
  const egi_expert_parameter *expert;
  const egi_parameter *parameter;
  uint32_t target; /* of the export's adapters; UINT32_MAX: none */
} stack;

typedef struct addition {
  float *values;
  const float *a, *b;
  int64_t n_experts, rank, in, out;
  double scale;
  bool is_in_first; /* [experts, in, out] */
} addition;

/* Sums over the rank in order, one expert a task. */
static void add_expert(void *argument, size_t expert, size_t worker) {
  const addition *s = argument;
  int64_t e = (int64_t)expert;
  float *w = s->values + e * s->in * s->out;
  (void)worker;
  for (int64_t k = 0; k < s->rank; k++) {
    const float *a = s->a + (e * s->rank + k) * s->in;
    for (int64_t o = 0; o < s->out; o++) {
      float b = (float)(s->scale * (double)s->b[o * s->rank * s->n_experts + k * s->n_experts + e]);
      for (int64_t i = 0; i < s->in; i++) w[s->is_in_first ? i * s->out + o : o * s->in + i] += b * a[i];
    }
  }
}

static eg_status merge_stack(egi_merge *merge, const stack *s, bool is_in_first, egi_arena *arena) {
  egi_module *module = merge->module;
  const egi_adapter_target *target = &merge->export_->adapters.targets[s->target];
  const egi_weight *old = &module->weights[s->parameter->weight];
  egi_weight weight = {.name = s->parameter->name, .dtype = EG_DTYPE_F32, .rank = 3};
  addition sum = {.n_experts = s->expert->n_experts,
                  .rank = target->rank,
                  .in = s->expert->in_features,
                  .out = s->expert->out_features,
                  .scale = target->scale,
                  .is_in_first = is_in_first};
  float *a, *b;
  uint32_t added;
  egi_value_id value;
  EG_TRY(egi_merge_read(merge, s->parameter->weight, arena, &sum.values));
  EG_TRY(egi_export_expert_stack(merge->export_, s->target, 'A', arena, &a));
  EG_TRY(egi_export_expert_stack(merge->export_, s->target, 'B', arena, &b));
  sum.a = a;
  sum.b = b;
  egi_pool_run(egi_context_pool(module->ctx), (size_t)sum.n_experts, add_expert, &sum);
  memcpy(weight.dims, old->dims, sizeof weight.dims);
  if (!merge->is_widened) weight.dtype = old->dtype;
  weight.bytes.kind = EGI_BYTES_MEMORY;
  EG_TRY(egi_convert_floats(&module->arena, sum.values, (uint64_t)(sum.n_experts * sum.in * sum.out), weight.dtype,
                            &weight.bytes.data, &weight.bytes.size_bytes));
  EG_TRY(egi_module_add_weight(module, &weight, &added));
  EG_TRY(egi_graph_add_weight(merge->graph, added, &value));
  return egi_replace_parameter(merge->graph, s->parameter, value);
}

/* Whether stacks lie [experts, in, out]: said by the first whose sizes differ. */
static bool is_in_first(const egi_merge *merge, const stack *stacks, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const int64_t *dims = merge->module->weights[stacks[i].parameter->weight].dims;
    if (dims[1] != dims[2]) return dims[1] == stacks[i].expert->in_features;
  }
  return false;
}

/* The experts' parameters with their stacks and adapters. */
static eg_status find_stacks(egi_merge *merge, stack *stacks, const egi_expert_parameter *experts, size_t n) {
  egi_parameter *parameters;
  size_t n_parameters;
  egi_map names, targets;
  uint32_t index;
  egi_map_init(&names, &merge->arena);
  egi_map_init(&targets, &merge->arena);
  EG_TRY(egi_find_parameters(merge->graph, &merge->arena, &parameters, &n_parameters));
  for (size_t i = 0; i < n_parameters; i++) EG_TRY(egi_map_put(&names, parameters[i].name, (uint32_t)i));
  for (size_t i = 0; i < merge->export_->adapters.count; i++)
    EG_TRY(egi_map_put(&targets, merge->export_->adapters.targets[i].path, (uint32_t)i));
  for (size_t i = 0; i < n; i++) {
    const egi_expert_parameter *expert = &experts[i];
    stacks[i].expert = expert;
    if (!egi_map_get(&targets, expert->name, &stacks[i].target)) stacks[i].target = UINT32_MAX;
    bool is_found = egi_map_get(&names, expert->name, &index);
    const egi_weight *weight = is_found ? &merge->module->weights[parameters[index].weight] : NULL;
    bool is_whole = is_found && weight->rank == 3 && weight->dims[0] == expert->n_experts &&
                    weight->dims[1] * weight->dims[2] == expert->in_features * expert->out_features;
    if (!is_whole)
      return egi_fail_node(merge->graph, expert->node, EG_ERROR_UNSUPPORTED,
                           "its experts are stored in a way that adapters cannot be merged into");
    stacks[i].parameter = &parameters[index];
  }
  return EG_OK;
}

/* Mixtures of codes that get an adapter have what the codes stand for instead. */
static eg_status decode(egi_merge *merge) {
  egi_expert_parameter *experts;
  size_t n;
  egi_map targets;
  egi_map_init(&targets, &merge->arena);
  for (size_t i = 0; i < merge->export_->adapters.count; i++)
    EG_TRY(egi_map_put(&targets, merge->export_->adapters.targets[i].path, (uint32_t)i));
  EG_TRY(egi_find_experts(merge->graph, &merge->arena, &experts, &n));
  for (size_t i = 0; i + 1 < n; i += 2) /* gate and up, down */
    if (egi_map_get(&targets, experts[i].name, NULL) || egi_map_get(&targets, experts[i + 1].name, NULL))
      EG_TRY(egi_merge_decode_experts(merge, &experts[i]));
  return EG_OK;
}

eg_status egi_merge_experts(egi_merge *merge) {
  egi_expert_parameter *experts;
  size_t n;
  EG_TRY(decode(merge));
  EG_TRY(egi_stack_experts(merge->graph));
  EG_TRY(egi_find_experts(merge->graph, &merge->arena, &experts, &n));
  stack *stacks = EGI_NEW(&merge->arena, stack, n + 1);
  if (stacks == NULL) return EG_ERROR_MEMORY;
  EG_TRY(find_stacks(merge, stacks, experts, n));
  bool is_turned = is_in_first(merge, stacks, n);
  for (size_t i = 0; i < n; i++) {
    egi_arena arena;
    if (stacks[i].target == UINT32_MAX) continue;
    egi_arena_init(&arena, merge->module->ctx, EGI_PURPOSE_DATA);
    eg_status status = merge_stack(merge, &stacks[i], is_turned, &arena);
    egi_arena_clear(&arena);
    EG_TRY(status);
  }
  return EG_OK;
}
