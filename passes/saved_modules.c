/* Modules that are trained and saved whole beside adapters, as PEFT's modules_to_save: which they are
 * (peft/utils/other.py, _set_trainable: a module whose path ends with one of the names, and all below it) and their
 * parameters as states. Linear in the graph, for each name. */
#include <string.h>

#include "passes/passes.h"

#define PREFIX "base_model.model."

/* ---- names ------------------------------------------------------------------------------------------------------ */

/* No dot is asked for before the end: "head" is an end of "lm_head", too. */
static bool ends_with(const char *path, size_t length, const char *name, size_t n_name) {
  return n_name > 0 && n_name <= length && memcmp(path + length - n_name, name, n_name) == 0;
}

/* The module, or one that it is part of. */
static bool is_inside(const char *path, const char *name, size_t n_name) {
  size_t n_path = strlen(path);
  for (size_t length = 1; length <= n_path; length++)
    if ((length == n_path || path[length] == '.') && ends_with(path, length, name, n_name)) return true;
  return false;
}

bool egi_is_saved_module(const char *modules, const char *path) {
  if (modules == NULL || path == NULL || path[0] == '\0') return false;
  for (const char *at = modules; *at != '\0';) {
    size_t length = strcspn(at, ",");
    if (is_inside(path, at, length)) return true;
    at += length + (at[length] == ',');
  }
  return false;
}

/* Of a parameter, "PATH.weight". */
static bool is_saved_parameter(const char *modules, const char *name, egi_arena *arena) {
  const char *leaf = strrchr(name, '.');
  const char *path = leaf != NULL ? egi_arena_copy_text(arena, name, (size_t)(leaf - name)) : NULL;
  return egi_is_saved_module(modules, path);
}

/* ---- what cannot be trained ------------------------------------------------------------------------------------- */

static eg_status refuse_quantised(const egi_graph *graph, const char *modules, egi_arena *arena) {
  egi_linear *linears = NULL;
  egi_expert_parameter *experts = NULL;
  size_t n = 0, n_experts = 0;
  EG_TRY(egi_find_linears(graph, arena, &linears, &n));
  for (size_t i = 0; i < n; i++)
    if (linears[i].is_quantised && egi_is_saved_module(modules, linears[i].path))
      return egi_fail_node(graph, linears[i].node, EG_ERROR_UNSUPPORTED,
                           "modules to save: the weight of \"%s\" is stored quantised and cannot be trained",
                           linears[i].path);
  EG_TRY(egi_find_experts(graph, arena, &experts, &n_experts));
  for (size_t i = 0; i < n_experts; i++)
    if (egi_is_saved_module(modules, experts[i].module))
      return egi_fail_node(graph, experts[i].node, EG_ERROR_UNSUPPORTED,
                           "modules to save: \"%s\" is a stack of experts, which only full training and adapters "
                           "(target parameters) train",
                           experts[i].module);
  return EG_OK;
}

/* Rows of one fused weight are trained together or not at all; *out_is_saved: all of them. */
static eg_status check_parts(const egi_graph *graph, const egi_parameter *parameter, const char *modules,
                             egi_arena *arena, bool *out_is_saved) {
  uint32_t n_saved = 0;
  *out_is_saved = is_saved_parameter(modules, parameter->name, arena);
  if (parameter->n_parts == 0) return EG_OK;
  for (uint32_t i = 0; i < parameter->n_parts; i++)
    n_saved += is_saved_parameter(modules, parameter->parts[i].name, arena);
  *out_is_saved = n_saved == parameter->n_parts;
  if (n_saved == 0 || *out_is_saved) return EG_OK;
  return egi_fail_node(graph, parameter->uses[0].node, EG_ERROR_UNSUPPORTED,
                       "modules to save: the file holds \"%s\" and others in one weight: name all of them or none",
                       parameter->parts[0].name);
}

/* Whether the name selects the parameter, or a part of it. */
static bool selects(const char *name, const egi_parameter *parameter, egi_arena *arena) {
  for (uint32_t i = 0; i < parameter->n_parts; i++)
    if (is_saved_parameter(name, parameter->parts[i].name, arena)) return true;
  return parameter->n_parts == 0 && is_saved_parameter(name, parameter->name, arena);
}

/* A name that selects nothing is a mistake. */
static eg_status check_names(const egi_graph *graph, const egi_saved_parameter *list, size_t n, const char *modules,
                             egi_arena *arena) {
  for (const char *at = modules; at != NULL;) {
    const char *comma = strchr(at, ',');
    const char *name = egi_arena_copy_text(arena, at, comma ? (size_t)(comma - at) : strlen(at));
    size_t i = 0;
    if (!name) return EG_ERROR_MEMORY;
    while (i < n && !selects(name, &list[i].parameter, arena)) i++;
    if (i == n)
      return egi_fail(graph->module->ctx, EG_ERROR_ARGUMENT,
                      "modules to save: no module with weights that can be trained is named \"%s\"", name);
    at = comma ? comma + 1 : NULL;
  }
  return EG_OK;
}

/* ---- states ----------------------------------------------------------------------------------------------------- */

static eg_status prefix_parts(egi_state *state, egi_arena *arena) {
  egi_rows_part *parts = EGI_NEW(arena, egi_rows_part, state->n_parts);
  if (!parts) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < state->n_parts; i++) {
    parts[i] = state->parts[i];
    parts[i].name = egi_arena_format(arena, PREFIX "%s", parts[i].name);
    if (!parts[i].name) return EG_ERROR_MEMORY;
  }
  state->parts = parts;
  return EG_OK;
}

egi_state egi_parameter_state(const egi_graph *graph, const egi_parameter *parameter) {
  const egi_weight *weight = &graph->module->weights[parameter->weight];
  egi_state state = {.name = parameter->name,
                     .pool = EGI_POOL_PARAMETERS,
                     .dtype = EG_DTYPE_F32,
                     .rank = weight->rank,
                     .weight = parameter->weight,
                     .is_transposed = parameter->is_transposed,
                     .is_vector = parameter->is_vector,
                     .has_decay = weight->rank >= 2 && !parameter->is_vector,
                     .parts = parameter->parts,
                     .n_parts = parameter->n_parts};
  memcpy(state.dims, weight->dims, sizeof(state.dims));
  return state;
}

static eg_status make_state(const egi_graph *graph, egi_saved_parameter *saved, egi_arena *arena) {
  saved->state = egi_parameter_state(graph, &saved->parameter);
  saved->state.name = egi_arena_format(arena, PREFIX "%s", saved->parameter.name);
  if (!saved->state.name) return EG_ERROR_MEMORY;
  return saved->state.n_parts > 0 ? prefix_parts(&saved->state, arena) : EG_OK;
}

eg_status egi_find_saved_parameters(const egi_graph *graph, const char *modules, egi_arena *arena,
                                    egi_saved_parameter **out_parameters, size_t *out_count) {
  egi_parameter *parameters = NULL;
  size_t n = 0;
  *out_parameters = NULL;
  *out_count = 0;
  if (modules == NULL || modules[0] == '\0') return EG_OK;
  EG_TRY(refuse_quantised(graph, modules, arena));
  EG_TRY(egi_find_untied_parameters(graph, arena, &parameters, &n));
  egi_saved_parameter *list = EGI_NEW(arena, egi_saved_parameter, n + 1);
  if (!list) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < n; i++) {
    bool is_saved = false;
    EG_TRY(check_parts(graph, &parameters[i], modules, arena, &is_saved));
    if (!is_saved) continue;
    list[*out_count].parameter = parameters[i];
    EG_TRY(make_state(graph, &list[(*out_count)++], arena));
  }
  *out_parameters = list;
  return check_names(graph, list, *out_count, modules, arena);
}
