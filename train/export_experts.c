/* Adapters on experts taken apart for other programs: gate, up and down of every expert by themselves. PEFT's stacks
 * (peft/tuners/lora/layer.py, ParamWrapper) hold row k of expert e's A at e · rank + k, its column k of B at
 * k · experts + e; gate and up have one A, and the rows of their B are each other's neighbours in blocks or in turns.
 */
#include "train/train.h"

#include <string.h>

/* ---- which ---- */

eg_status egi_export_find_experts(egi_export *export_, const egi_graph *graph) {
  egi_expert_parameter *experts;
  egi_map names;
  uint32_t index;
  size_t n;
  EG_TRY(egi_find_experts(graph, &export_->arena, &experts, &n));
  egi_map_init(&names, &export_->arena);
  for (size_t i = 0; i < n; i++) EG_TRY(egi_map_put(&names, experts[i].name, (uint32_t)i));
  export_->expert_of = EGI_NEW(&export_->arena, const egi_expert_parameter *, export_->adapters.count + 1);
  if (export_->expert_of == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < export_->adapters.count; i++)
    if (egi_map_get(&names, export_->adapters.targets[i].path, &index)) export_->expert_of[i] = &experts[index];
  return EG_OK;
}

/* Whether the mixture's other parameter, which follows, has an adapter too: then PEFT wraps twice. */
static bool has_down(const egi_export *export_, size_t index) {
  const egi_expert_parameter *own = export_->expert_of[index], *next = NULL;
  if (index + 1 < export_->adapters.count) next = export_->expert_of[index + 1];
  return own->is_down || (next != NULL && next->node == own->node);
}

const char *egi_export_expert_name(const egi_export *export_, size_t index, egi_arena *arena) {
  return egi_expert_tensors(arena, export_->expert_of[index], has_down(export_, index));
}

eg_status egi_export_expert_stack(const egi_export *export_, size_t index, char which, egi_arena *arena,
                                  float **out_values) {
  const egi_adapter_target *target = &export_->adapters.targets[index];
  const egi_expert_parameter *expert = export_->expert_of[index];
  const char *prefix = egi_export_expert_name(export_, index, arena);
  const char *name =
      prefix != NULL ? egi_arena_format(arena, "base_model.model.%s.lora_%c.weight", prefix, which) : NULL;
  if (name == NULL) return EG_ERROR_MEMORY;
  const egi_safetensor *tensor = egi_safetensors_find(export_->peft->tensors, name);
  if (tensor == NULL) return egi_fail(export_->ctx, EG_ERROR_INTERNAL, "adapter tensor \"%s\" was not checked", name);
  uint64_t count = (uint64_t)expert->n_experts * target->rank *
                   (uint64_t)(which == 'A' ? expert->in_features : expert->out_features);
  *out_values = EGI_NEW(arena, float, (size_t)count);
  return *out_values != NULL ? egi_adapter_read(export_->ctx, tensor, *out_values, count) : EG_ERROR_MEMORY;
}

/* ---- parts ---- */

bool egi_expert_has_part(const egi_expert_parameter *expert, egi_expert_part part) {
  if (expert->is_down) return part == EGI_EXPERT_DOWN;
  return part == EGI_EXPERT_UP || (part == EGI_EXPERT_GATE && expert->is_gated);
}

/* Row of the parameter's B that is row `i` of the part's. */
static int64_t row_of(const egi_expert_parameter *expert, egi_expert_part part, int64_t i) {
  if (part == EGI_EXPERT_DOWN || !expert->is_gated) return i;
  if (expert->is_interleaved) return 2 * i + (part == EGI_EXPERT_UP ? 1 : 0);
  return part == EGI_EXPERT_UP ? expert->out_features / 2 + i : i;
}

eg_status egi_expert_lora_read(const egi_export *export_, size_t index, egi_expert_part part, double factor,
                               egi_arena *arena, egi_expert_lora *out_lora) {
  const egi_expert_parameter *expert = export_->expert_of[index];
  int64_t e = expert->n_experts, r = export_->adapters.targets[index].rank;
  int64_t rows = expert->is_gated && part != EGI_EXPERT_DOWN ? expert->out_features / 2 : expert->out_features;
  float *stack;
  egi_expert_lora lora = {.rank = (uint32_t)r, .in_features = expert->in_features, .out_features = rows};
  EG_TRY(egi_export_expert_stack(export_, index, 'A', arena, &lora.a)); /* [E·r, in] is [E, r, in] */
  EG_TRY(egi_export_expert_stack(export_, index, 'B', arena, &stack));
  lora.b = EGI_NEW(arena, float, (size_t)(e * rows * r));
  if (lora.b == NULL) return EG_ERROR_MEMORY;
  for (int64_t x = 0; x < e; x++)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t k = 0; k < r; k++) {
        float value = stack[row_of(expert, part, i) * r * e + k * e + x];
        lora.b[(x * rows + i) * r + k] = (float)((double)value * factor);
      }
  *out_lora = lora;
  return EG_OK;
}
