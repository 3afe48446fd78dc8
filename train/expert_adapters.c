/* Adapters on experts: PEFT's target_parameters (peft/tuners/lora/layer.py, ParamWrapper), whose ranks and alphas go by
 * the parameter's name (peft/tuners/tuners_utils.py, _inject_parameters). */
#include "train/train.h"

#include <string.h>

static bool is_in(const egi_peft_config *config, const egi_expert_parameter *parameter) {
  return egi_path_is_named(parameter->name, config->parameters);
}

void egi_experts_select(const egi_expert_parameter *experts, size_t n, const egi_peft_config *config,
                        egi_adapter_target *targets, const egi_expert_parameter **out_of, size_t *out_count) {
  *out_count = 0;
  for (size_t i = 0; i < n; i++) {
    if (!is_in(config, &experts[i])) continue;
    out_of[*out_count] = &experts[i];
    targets[(*out_count)++] = (egi_adapter_target){.path = experts[i].name,
                                                   .rank = egi_peft_rank(config, experts[i].name),
                                                   .scale = egi_peft_scale(config, experts[i].name)};
  }
}

static eg_status fail_name(egi_arena *arena, const char *name, const egi_expert_parameter *experts, size_t n) {
  if (n == 0)
    return egi_fail(arena->ctx, EG_ERROR_ARGUMENT, "no parameter of experts is named \"%s\": the model has no experts",
                    name);
  return egi_fail(arena->ctx, EG_ERROR_ARGUMENT, "no parameter of experts is named \"%s\"; the model has %s and %s",
                  name, experts[0].name, experts[1].name);
}

/* Every name of the list must select something. */
static eg_status check_names(const egi_expert_parameter *experts, size_t n, const char *names, egi_arena *arena) {
  for (const char *name = names; name != NULL;) {
    const char *comma = strchr(name, ',');
    char *copy = egi_arena_copy_text(arena, name, comma != NULL ? (size_t)(comma - name) : strlen(name));
    bool is_used = false;
    if (copy == NULL) return EG_ERROR_MEMORY;
    for (size_t i = 0; i < n && !is_used; i++) is_used = egi_path_is_named(experts[i].name, copy);
    if (!is_used) return fail_name(arena, copy, experts, n);
    name = comma != NULL ? comma + 1 : NULL;
  }
  return EG_OK;
}

eg_status egi_adapters_choose_experts(const egi_graph *graph, const char *parameters, egi_arena *arena,
                                      egi_adapters *adapters) {
  egi_expert_parameter *experts;
  size_t n, count = 0;
  if (parameters == NULL || strcmp(parameters, "none") == 0) return EG_OK;
  EG_TRY(egi_find_experts(graph, arena, &experts, &n));
  EG_TRY(check_names(experts, n, parameters, arena));
  egi_adapter_target *targets = EGI_NEW(arena, egi_adapter_target, adapters->count + n + 1);
  const egi_expert_parameter **of = EGI_NEW(arena, const egi_expert_parameter *, n + 1);
  if (targets == NULL || of == NULL) return EG_ERROR_MEMORY;
  if (adapters->count > 0) memcpy(targets, adapters->targets, adapters->count * sizeof *targets);
  adapters->config.parameters = parameters;
  egi_experts_select(experts, n, &adapters->config, targets + adapters->count, of, &count);
  adapters->targets = targets;
  adapters->count += count;
  return EG_OK;
}
