/* PEFT's format for readers that know few of its settings: one rank for all modules (lower ones padded with zeros),
 * alpha equal to it, the scale in B. Experts are taken apart into a module for each of them and for gate, up and down,
 * as vLLM and models of Transformers 4 have them and PEFT still converts them; only what no program has in that form
 * (gate and up row by row in turns: gpt-oss) stays a stack. */
#include "train/train.h"

#include <string.h>

typedef struct portable {
  egi_export *export_;
  egi_safetensor *tensors;
  size_t count;
  uint32_t rank;
  eg_dtype dtype;
  bool has_parts, has_stacks;
} portable;

static const char *const part_names[] = {"gate_proj", "up_proj", "down_proj"};
static const char *const mixtral_names[] = {"w1", "w3", "w2"};

static bool is_mixtral(const portable *p, const egi_expert_parameter *expert) {
  const char *type = p->export_->options->architecture;
  return strstr(expert->module, ".block_sparse_moe.") != NULL || (type != NULL && strcmp(type, "mixtral") == 0);
}

static bool is_taken_apart(const egi_expert_parameter *expert) {
  return !expert->is_interleaved && strstr(expert->module, ".feed_forward.") == NULL; /* Llama 4 has stacks, too */
}

/* ---- tensors ---- */

/* Rows of `values` among zeros: row i of `columns` numbers at i of the tensor's. */
static eg_status add(portable *p, const char *path, char which, const float *values, const int64_t sizes[2],
                     const int64_t dims[2]) {
  egi_arena *arena = &p->export_->arena;
  egi_safetensor *tensor = &p->tensors[p->count++];
  float *padded = EGI_NEW(arena, float, (size_t)(dims[0] * dims[1]));
  *tensor = (egi_safetensor){.dtype = p->dtype, .rank = 2, .dims = {dims[0], dims[1]}};
  tensor->name = egi_arena_format(arena, "base_model.model.%s.lora_%c.weight", path, which);
  if (padded == NULL || tensor->name == NULL) return EG_ERROR_MEMORY;
  for (int64_t row = 0; row < sizes[0]; row++)
    memcpy(padded + row * dims[1], values + row * sizes[1], (size_t)sizes[1] * sizeof *values);
  return egi_convert_floats(arena, padded, (uint64_t)(dims[0] * dims[1]), p->dtype, &tensor->data, &tensor->size_bytes);
}

static eg_status add_pair(portable *p, const egi_lora *lora) {
  const int64_t a_sizes[2] = {lora->rank, lora->in_features}, a_dims[2] = {p->rank, lora->in_features};
  const int64_t b_sizes[2] = {lora->out_features, lora->rank}, b_dims[2] = {lora->out_features, p->rank};
  EG_TRY(add(p, lora->path, 'A', lora->a, a_sizes, a_dims));
  return add(p, lora->path, 'B', lora->b, b_sizes, b_dims);
}

static eg_status add_linear(portable *p, size_t index) {
  egi_lora lora;
  EG_TRY(egi_lora_read_scaled(p->export_, index, &p->export_->arena, &lora));
  return add_pair(p, &lora);
}

/* ---- experts apart ---- */

static const char *name_part(const portable *p, const egi_expert_parameter *expert, int64_t e, egi_expert_part part) {
  egi_arena *arena = &p->export_->arena;
  const char *mlp = strstr(expert->module, ".mlp.experts");
  if (!is_mixtral(p, expert))
    return egi_arena_format(arena, "%s.%lld.%s", expert->module, (long long)e, part_names[part]);
  int length = mlp != NULL ? (int)(mlp - expert->module) : (int)strlen(expert->module);
  return egi_arena_format(arena, "%.*s%s.%lld.%s", length, expert->module,
                          mlp != NULL ? ".block_sparse_moe.experts" : "", (long long)e, mixtral_names[part]);
}

static eg_status add_part(portable *p, const egi_expert_parameter *expert, egi_expert_part part,
                          const egi_expert_lora *all) {
  int64_t a_size = all->rank * all->in_features, b_size = all->out_features * all->rank;
  for (int64_t e = 0; e < expert->n_experts; e++) {
    egi_lora one = {.path = name_part(p, expert, e, part),
                    .rank = all->rank,
                    .in_features = all->in_features,
                    .out_features = all->out_features,
                    .a = all->a + e * a_size,
                    .b = all->b + e * b_size};
    if (one.path == NULL) return EG_ERROR_MEMORY;
    EG_TRY(add_pair(p, &one));
  }
  return EG_OK;
}

/* Readers want all parts of an expert: what has no adapter gets one that changes nothing. */
static eg_status add_nothing(portable *p, const egi_expert_parameter *expert, egi_expert_part part) {
  bool is_down = part == EGI_EXPERT_DOWN;
  int64_t inner = !expert->is_down ? expert->out_features / (expert->is_gated ? 2 : 1) : expert->in_features;
  int64_t width = expert->is_down ? expert->out_features : expert->in_features;
  egi_expert_lora none = {.rank = 1, .in_features = is_down ? inner : width, .out_features = is_down ? width : inner};
  none.a = EGI_NEW(&p->export_->arena, float, (size_t)(expert->n_experts * none.in_features));
  none.b = EGI_NEW(&p->export_->arena, float, (size_t)(expert->n_experts * none.out_features));
  return none.a != NULL && none.b != NULL ? add_part(p, expert, part, &none) : EG_ERROR_MEMORY;
}

/* The target at `index` and, where it is of the same mixture, the next. */
static eg_status take_apart(portable *p, size_t index, size_t n_targets) {
  const egi_export *export_ = p->export_;
  const egi_expert_parameter *first = export_->expert_of[index];
  for (egi_expert_part part = EGI_EXPERT_GATE; part <= EGI_EXPERT_DOWN; part++) {
    size_t i = index;
    egi_expert_lora lora;
    if (part == EGI_EXPERT_GATE && !first->is_gated) continue;
    while (i < index + n_targets && !egi_expert_has_part(export_->expert_of[i], part)) i++;
    if (i == index + n_targets) {
      EG_TRY(add_nothing(p, first, part));
      continue;
    }
    EG_TRY(egi_expert_lora_read(export_, i, part, export_->adapters.targets[i].scale, &p->export_->arena, &lora));
    EG_TRY(add_part(p, first, part, &lora));
  }
  p->has_parts = true;
  return EG_OK;
}

/* ---- experts in stacks ---- */

static eg_status add_stack(portable *p, size_t index) {
  const egi_export *export_ = p->export_;
  const egi_expert_parameter *expert = export_->expert_of[index];
  const egi_adapter_target *target = &export_->adapters.targets[index];
  egi_arena *arena = &p->export_->arena;
  int64_t e = expert->n_experts, in = expert->in_features, out = expert->out_features, r = target->rank;
  const char *path = egi_export_expert_name(export_, index, arena);
  float *a, *b, *padded = EGI_NEW(arena, float, (size_t)(e * p->rank * in));
  const int64_t a_dims[2] = {e * p->rank, in}, b_sizes[2] = {out, r * e}, b_dims[2] = {out, p->rank * e};
  if (path == NULL || padded == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_export_expert_stack(export_, index, 'A', arena, &a));
  EG_TRY(egi_export_expert_stack(export_, index, 'B', arena, &b));
  for (int64_t x = 0; x < e; x++) memcpy(padded + x * p->rank * in, a + x * r * in, (size_t)(r * in) * sizeof *a);
  for (int64_t i = 0; i < out * r * e; i++) b[i] = (float)((double)b[i] * target->scale);
  p->has_stacks = true;
  EG_TRY(add(p, path, 'A', padded, a_dims, a_dims));
  return add(p, path, 'B', b, b_sizes, b_dims); /* columns by rank: what is added stands behind */
}

/* ---- all ---- */

static size_t count_tensors(const egi_export *export_) {
  size_t count = egi_safetensors_count(export_->peft->tensors);
  for (size_t i = 0; i < export_->adapters.count; i++)
    count += export_->expert_of[i] != NULL ? 6 * (size_t)export_->expert_of[i]->n_experts : 2;
  return count;
}

/* The linear layers' names, then those of the experts' parts. */
static eg_status name_targets(const portable *p, const char **targets) {
  const char *const *names = part_names;
  if (!p->has_parts) return EG_OK;
  for (size_t i = 0; i < p->export_->adapters.count; i++)
    if (p->export_->expert_of[i] != NULL && is_mixtral(p, p->export_->expert_of[i])) names = mixtral_names;
  const char *own = *targets != NULL ? *targets : "";
  for (int part = 0; part < 3 && own != NULL; part++)
    if (!egi_path_is_named(names[part], own))
      own = egi_arena_format(&p->export_->arena, "%s%s%s", own, own[0] != '\0' ? "," : "", names[part]);
  *targets = own;
  return own != NULL ? EG_OK : EG_ERROR_MEMORY;
}

/* What was trained whole: everything but the adapters' own tensors. */
static eg_status add_modules(portable *p) {
  const egi_safetensors *own = p->export_->peft->tensors;
  for (size_t i = 0; i < egi_safetensors_count(own); i++) {
    const egi_safetensor *tensor = egi_safetensors_at(own, i);
    if (egi_has_suffix(tensor->name, ".lora_A.weight") || egi_has_suffix(tensor->name, ".lora_B.weight")) continue;
    p->tensors[p->count] = *tensor;
    EG_TRY(egi_export_convert(p->export_, &p->tensors[p->count++]));
  }
  return EG_OK;
}

static eg_status add_all(portable *p) {
  const egi_export *export_ = p->export_;
  for (size_t i = 0; i < export_->adapters.count; i++) {
    const egi_expert_parameter *expert = export_->expert_of[i];
    if (expert == NULL) {
      EG_TRY(add_linear(p, i));
    } else if (!is_taken_apart(expert)) {
      EG_TRY(add_stack(p, i));
    } else {
      const egi_expert_parameter *next = i + 1 < export_->adapters.count ? export_->expert_of[i + 1] : NULL;
      size_t n = next != NULL && next->node == expert->node ? 2 : 1;
      EG_TRY(take_apart(p, i, n));
      i += n - 1;
    }
  }
  return EG_OK;
}

eg_status egi_export_portable(egi_export *export_, const char *directory) {
  const egi_adapters *adapters = &export_->adapters;
  portable p = {.export_ = export_, .rank = 1, .dtype = export_->options->dtype};
  if (p.dtype == EG_DTYPE_UNDEFINED) p.dtype = EG_DTYPE_F32;
  p.tensors = EGI_NEW(&export_->arena, egi_safetensor, count_tensors(export_));
  if (p.tensors == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < adapters->count; i++)
    if (adapters->targets[i].rank > p.rank) p.rank = adapters->targets[i].rank;
  EG_TRY(add_all(&p));
  EG_TRY(add_modules(&p));
  egi_peft_config config = {.rank = p.rank,
                            .alpha = p.rank,
                            .targets = adapters->config.targets,
                            .parameters = p.has_stacks ? adapters->config.parameters : NULL,
                            .modules = adapters->config.modules,
                            .task = adapters->config.task,
                            .base_model = adapters->config.base_model};
  EG_TRY(name_targets(&p, &config.targets));
  return egi_peft_write(export_->ctx, directory, &config, p.tensors, p.count);
}
