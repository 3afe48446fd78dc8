/* Which adapters are grafted: chosen by target names, or taken from a PEFT folder whose every tensor must fit. */
#include "train/train.h"

#include <inttypes.h>
#include <string.h>

/* Problems of an adapter that one message spells out; the rest are counted. */
enum { MAX_PROBLEMS = 5 };

static const char *last_part(const char *path) {
  const char *dot = strrchr(path, '.');
  return dot != NULL ? dot + 1 : path;
}

/* What new adapters are for. */
typedef struct selection {
  bool is_all; /* every linear layer but the head and routers */
  egi_modules targets, excluded;
  const char *saved; /* modules that are trained whole */
} selection;

static eg_status read_selection(const eg_trainer_options *options, egi_arena *arena, selection *out_selection) {
  out_selection->is_all = strcmp(options->targets, "all-linear") == 0;
  const char *targets = strcmp(options->targets, "none") == 0 ? "" : options->targets;
  out_selection->saved = options->modules_to_save;
  EG_TRY(egi_modules_read(arena, targets, &out_selection->targets));
  return egi_modules_read(arena, options->exclude, &out_selection->excluded);
}

static bool is_selected(const egi_linear *linear, const selection *selected) {
  if (linear->path == NULL || egi_modules_match(&selected->excluded, linear->path)) return false;
  if (egi_is_saved_module(selected->saved, linear->path)) return false;
  if (selected->is_all) return !linear->is_head && !linear->is_router;
  return egi_modules_match(&selected->targets, linear->path);
}

/* The distinct last parts of the paths, joined by commas. */
static void list_names(const egi_linear *linears, size_t n, egi_map *seen, egi_text *text) {
  for (size_t i = 0; i < n; i++) {
    const char *name = linears[i].path != NULL ? last_part(linears[i].path) : NULL;
    if (name == NULL || egi_map_get(seen, name, NULL)) continue;
    if (egi_map_put(seen, name, 1) != EG_OK) return;
    egi_text_format(text, "%s%s", text->length > 0 ? "," : "", name);
  }
}

/* Embeddings and norms have no adapters, but a way to be trained. */
static bool is_other_module(const egi_graph *graph, const char *name, egi_arena *arena) {
  egi_parameter *parameters;
  size_t n = 0;
  if (egi_find_untied_parameters(graph, arena, &parameters, &n) != EG_OK) return false;
  for (size_t i = 0; i < n; i++) {
    const char *leaf = strrchr(parameters[i].name, '.');
    const char *path =
        leaf != NULL ? egi_arena_copy_text(arena, parameters[i].name, (size_t)(leaf - parameters[i].name)) : NULL;
    if (path != NULL && egi_path_is_named(path, name)) return true;
  }
  return false;
}

static eg_status fail_target(const egi_graph *graph, const char *name, const egi_linear *linears, size_t n,
                             egi_arena *arena) {
  if (is_other_module(graph, name, arena))
    return egi_fail(arena->ctx, EG_ERROR_ARGUMENT,
                    "\"%s\" is no linear layer and takes no adapter; modules to save are trained whole", name);
  egi_text text;
  egi_map seen;
  egi_text_init(&text, arena->ctx);
  egi_map_init(&seen, arena);
  list_names(linears, n, &seen, &text);
  eg_status status =
      egi_fail(arena->ctx, EG_ERROR_ARGUMENT, "no linear layer is named \"%s\"; the model has %s", name,
               text.length > 0 ? egi_text_string(&text) : "no linear layers that an adapter can be grafted to");
  egi_text_free(&text);
  return status;
}

static bool names_layer(const egi_linear *linears, size_t n, const egi_modules *modules) {
  for (size_t i = 0; i < n; i++)
    if (egi_modules_match(modules, linears[i].path)) return true;
  return false;
}

/* Every name of the list, or the expression, must match something. */
static eg_status check_names(const egi_graph *graph, const egi_linear *linears, size_t n, const egi_modules *modules,
                             egi_arena *arena) {
  if (modules->names == NULL || modules->names[0] == '\0') return EG_OK;
  if (modules->expression != NULL)
    return names_layer(linears, n, modules) ? EG_OK : fail_target(graph, modules->names, linears, n, arena);
  for (const char *name = modules->names; name != NULL;) {
    const char *comma = strchr(name, ',');
    const egi_modules one = {
        .names = egi_arena_copy_text(arena, name, comma != NULL ? (size_t)(comma - name) : strlen(name))};
    if (one.names == NULL) return EG_ERROR_MEMORY;
    if (!names_layer(linears, n, &one)) return fail_target(graph, one.names, linears, n, arena);
    name = comma != NULL ? comma + 1 : NULL;
  }
  return EG_OK;
}

/* target_modules for readers that know no "all-linear": short names where they select the same layers, else paths. */
static eg_status join_targets(const egi_linear *linears, size_t n, const egi_map *taken, const egi_adapters *adapters,
                              egi_arena *arena, egi_text *text) {
  egi_map names; /* last part -> 1: selects a layer without adapter, 2: already in the text */
  uint32_t state;
  egi_map_init(&names, arena);
  for (size_t i = 0; i < n; i++)
    if (linears[i].path != NULL && !egi_map_get(taken, linears[i].path, NULL))
      EG_TRY(egi_map_put(&names, last_part(linears[i].path), 1));
  for (size_t i = 0; i < adapters->count; i++) {
    const char *path = adapters->targets[i].path, *name = last_part(path);
    if (!egi_map_get(taken, path, NULL)) continue; /* experts: no module */
    if (!egi_map_get(&names, name, &state)) state = 0;
    if (state == 2) continue;
    egi_text_format(text, "%s%s", text->length > 0 ? "," : "", state == 0 ? name : path);
    if (state == 0) EG_TRY(egi_map_put(&names, name, 2));
  }
  return egi_text_status(text);
}

static eg_status spell_targets(const egi_linear *linears, size_t n, const egi_map *taken, egi_arena *arena,
                               egi_adapters *adapters) {
  egi_text text;
  egi_text_init(&text, arena->ctx);
  eg_status status = join_targets(linears, n, taken, adapters, arena, &text);
  if (status == EG_OK) {
    adapters->config.targets = egi_arena_copy_text(arena, egi_text_string(&text), text.length);
    if (adapters->config.targets == NULL) status = EG_ERROR_MEMORY;
  }
  egi_text_free(&text);
  return status;
}

static eg_status take(egi_adapters *adapters, egi_map *taken, const char *path, uint32_t rank, double scale) {
  EG_TRY(egi_map_put(taken, path, 1));
  adapters->targets[adapters->count++] = (egi_adapter_target){.path = path, .rank = rank, .scale = scale};
  return EG_OK;
}

static eg_status read_settings(const eg_trainer_options *options, egi_arena *arena, egi_peft_config *config) {
  *config = (egi_peft_config){
      .rank = options->rank, .alpha = options->alpha, .dropout = options->dropout, .use_rslora = options->rslora != 0};
  if (options->modules_to_save != NULL && options->modules_to_save[0] != '\0')
    config->modules = options->modules_to_save;
  EG_TRY(egi_patterns_read(arena, "rank pattern", options->rank_pattern, &config->ranks, &config->n_ranks));
  return egi_patterns_read(arena, "alpha pattern", options->alpha_pattern, &config->alphas, &config->n_alphas);
}

/* A pattern that matches no adapter is a mistake in its name. */
static eg_status check_patterns(const egi_adapters *adapters, const egi_peft_pattern *patterns, size_t n,
                                eg_context *ctx) {
  for (size_t i = 0; i < n; i++) {
    size_t k = 0;
    while (k < adapters->count && !egi_pattern_matches(patterns[i].expression, adapters->targets[k].path)) k++;
    if (k == adapters->count)
      return egi_fail(ctx, EG_ERROR_ARGUMENT, "no adapter is named \"%s\", which a pattern gives a rank or alpha",
                      patterns[i].key);
  }
  return EG_OK;
}

/* Whether the modules that are to be trained whole are there and can be. */
static eg_status check_saved(const egi_graph *graph, const char *modules, egi_arena *arena) {
  egi_saved_parameter *saved;
  size_t n;
  return egi_find_saved_parameters(graph, modules, arena, &saved, &n);
}

eg_status egi_adapters_choose(const egi_graph *graph, const eg_trainer_options *options, egi_arena *arena,
                              egi_adapters *out_adapters) {
  egi_linear *linears;
  size_t n;
  egi_map taken;
  selection selected;
  egi_adapters adapters = {.count = 0};
  egi_peft_config *config = &adapters.config;
  EG_TRY(read_settings(options, arena, config));
  EG_TRY(read_selection(options, arena, &selected));
  EG_TRY(check_saved(graph, config->modules, arena));
  EG_TRY(egi_find_linears(graph, arena, &linears, &n));
  if (!selected.is_all) EG_TRY(check_names(graph, linears, n, &selected.targets, arena));
  EG_TRY(check_names(graph, linears, n, &selected.excluded, arena));
  adapters.targets = EGI_NEW(arena, egi_adapter_target, n > 0 ? n : 1);
  if (adapters.targets == NULL) return EG_ERROR_MEMORY;
  egi_map_init(&taken, arena);
  for (size_t i = 0; i < n; i++) {
    const char *path = linears[i].path;
    if (!is_selected(&linears[i], &selected) || egi_map_get(&taken, path, NULL)) continue;
    EG_TRY(take(&adapters, &taken, path, egi_peft_rank(config, path), egi_peft_scale(config, path)));
  }
  if (adapters.count == 0 && n > 0 && selected.targets.names != NULL && selected.targets.names[0] != '\0')
    return egi_fail(arena->ctx, EG_ERROR_ARGUMENT, "every linear layer that is named is excluded or saved whole");
  EG_TRY(egi_check_folded_positions(graph, &taken, arena));
  EG_TRY(spell_targets(linears, n, &taken, arena, &adapters));
  size_t n_linear = adapters.count;
  EG_TRY(egi_adapters_choose_experts(graph, options->target_parameters, arena, &adapters));
  if (adapters.count == 0 && config->modules != NULL)
    return egi_fail(arena->ctx, EG_ERROR_ARGUMENT,
                    "modules to save stand beside adapters, and there are none: PEFT loads no such folder");
  EG_TRY(check_patterns(&adapters, config->ranks, config->n_ranks, arena->ctx));
  EG_TRY(check_patterns(&adapters, config->alphas, config->n_alphas, arena->ctx));
  if (adapters.count > n_linear && options->dropout > 0.0) /* as PEFT */
    return egi_fail(arena->ctx, EG_ERROR_UNSUPPORTED,
                    "adapters on experts have no dropout: they change a weight, not what it is given");
  *out_adapters = adapters;
  return EG_OK;
}

/* ---- PEFT ---- */

typedef struct problems {
  egi_text text;
  unsigned count;
} problems;

static bool next_problem(problems *p) {
  if (++p->count > MAX_PROBLEMS) return false;
  if (p->count > 1) egi_text_add(&p->text, "; ");
  return true;
}

static bool is_float_file(eg_dtype dtype) {
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

typedef struct tensor_shape {
  const char *name;
  int rank;
  int64_t dims[EGI_MAX_RANK];
} tensor_shape;

static bool has_shape(const egi_safetensor *tensor, const tensor_shape *shape) {
  bool is_equal = tensor->rank == shape->rank;
  for (int i = 0; is_equal && i < shape->rank; i++) is_equal = tensor->dims[i] == shape->dims[i];
  return is_equal;
}

static void add_dims(egi_text *text, int rank, const int64_t *dims) {
  for (int i = 0; i < rank; i++) egi_text_format(text, "%s%" PRId64, i > 0 ? "," : "", dims[i]);
}

static void check_tensor(problems *p, const egi_peft *peft, tensor_shape shape, egi_map *used) {
  const char *name = shape.name;
  const egi_safetensor *tensor = name != NULL ? egi_safetensors_find(peft->tensors, name) : NULL;
  if (name == NULL || (tensor != NULL && egi_map_put(used, name, 1) != EG_OK)) {
    p->text.is_failed = true;
    return;
  }
  if (tensor == NULL) {
    if (next_problem(p)) egi_text_format(&p->text, "%s is missing", name);
  } else if (!is_float_file(tensor->dtype)) {
    if (next_problem(p)) egi_text_format(&p->text, "%s has type %s", name, egi_dtype_name(tensor->dtype));
  } else if (!has_shape(tensor, &shape)) {
    if (!next_problem(p)) return;
    egi_text_format(&p->text, "%s is [", name);
    add_dims(&p->text, tensor->rank, tensor->dims);
    egi_text_add(&p->text, "], not [");
    add_dims(&p->text, shape.rank, shape.dims);
    egi_text_add(&p->text, "]");
  }
}

typedef struct matrix_shape {
  const char *path;
  char which; /* A, B */
  int64_t rows, columns;
} matrix_shape;

static void check_matrix(problems *p, const egi_peft *peft, const matrix_shape *shape, egi_map *used) {
  const char *name = egi_arena_format(used->arena, "base_model.model.%s.lora_%c.weight", shape->path, shape->which);
  check_tensor(p, peft, (tensor_shape){name, 2, {shape->rows, shape->columns}}, used);
}

/* The tensors of modules that were trained whole. */
static eg_status check_modules(problems *p, const egi_graph *graph, const egi_peft *peft, egi_map *used) {
  egi_saved_parameter *saved;
  size_t n;
  EG_TRY(egi_find_saved_parameters(graph, peft->config.modules, used->arena, &saved, &n));
  for (size_t i = 0; i < n; i++) {
    const egi_state *state = &saved[i].state;
    tensor_shape shape = {.name = state->name};
    shape.rank = egi_state_file_dims(state, shape.dims);
    if (state->n_parts == 0) check_tensor(p, peft, shape, used);
    for (uint32_t part = 0; part < state->n_parts; part++) {
      shape.name = state->parts[part].name;
      shape.dims[0] = state->parts[part].rows;
      check_tensor(p, peft, shape, used);
    }
  }
  return EG_OK;
}

static bool is_wanted(const egi_peft *peft, const egi_linear *linear, egi_arena *arena) {
  if (linear->path == NULL || egi_is_saved_module(peft->config.modules, linear->path)) return false;
  if (peft->config.targets != NULL) return egi_target_matches(linear, peft->config.targets);
  const char *name = egi_arena_format(arena, "base_model.model.%s.lora_A.weight", linear->path);
  return name != NULL && egi_safetensors_find(peft->tensors, name) != NULL;
}

/* "….experts.7.gate_proj.…": what portable folders and those for models of Transformers 4 hold. */
static bool is_of_one_expert(const char *name) {
  const char *number = strstr(name, ".experts.");
  if (number != NULL) number += strlen(".experts.");
  return number != NULL && number[0] >= '0' && number[0] <= '9';
}

static void check_extra(problems *p, const egi_peft *peft, const egi_map *used) {
  for (size_t i = 0; i < egi_safetensors_count(peft->tensors); i++) {
    const char *name = egi_safetensors_at(peft->tensors, i)->name;
    if (egi_map_get(used, name, NULL)) continue;
    if (!next_problem(p)) continue;
    if (is_of_one_expert(name))
      egi_text_format(&p->text,
                      "%s is of one expert alone: adapters on experts are read as stacks, as "
                      "\"target_parameters\" makes them",
                      name);
    else
      egi_text_format(&p->text, "%s fits no linear layer, experts or saved module of the model", name);
  }
}

static eg_status finish_problems(problems *p, eg_context *ctx, size_t n_adapters) {
  eg_status status = p->text.is_failed ? EG_ERROR_MEMORY : EG_OK;
  if (status == EG_OK && p->count == 0 && n_adapters == 0)
    status = egi_fail(ctx, EG_ERROR_DATA, "adapter: it names no linear layer or experts of the model");
  if (status == EG_OK && p->count > MAX_PROBLEMS)
    status =
        egi_fail(ctx, EG_ERROR_DATA, "adapter: %s; and %u more", egi_text_string(&p->text), p->count - MAX_PROBLEMS);
  else if (status == EG_OK && p->count > 0)
    status = egi_fail(ctx, EG_ERROR_DATA, "adapter: %s", egi_text_string(&p->text));
  egi_text_free(&p->text);
  return status;
}

/* The same of the experts' adapters. */
static eg_status match_experts(const egi_expert_parameter *experts, size_t n, const egi_peft *peft, problems *p,
                               egi_map *used, egi_adapters *adapters) {
  const egi_expert_parameter **of = EGI_NEW(used->arena, const egi_expert_parameter *, n + 1);
  egi_adapter_target *targets = adapters->targets + adapters->count;
  size_t count = 0;
  if (of == NULL) return EG_ERROR_MEMORY;
  if (peft->config.parameters == NULL) return EG_OK;
  egi_experts_select(experts, n, &peft->config, targets, of, &count);
  for (size_t i = 0; i < count; i++) {
    int64_t ranks = of[i]->n_experts * (int64_t)targets[i].rank;
    bool has_down = i + 1 < count && of[i + 1]->node == of[i]->node;
    const char *tensors = egi_expert_tensors(used->arena, of[i], has_down);
    if (tensors == NULL) return EG_ERROR_MEMORY;
    check_matrix(p, peft, &(matrix_shape){tensors, 'A', ranks, of[i]->in_features}, used);
    check_matrix(p, peft, &(matrix_shape){tensors, 'B', of[i]->out_features, ranks}, used);
  }
  adapters->count += count;
  return EG_OK;
}

typedef struct model_parts {
  const egi_graph *graph;
  egi_linear *linears;
  size_t n;
  egi_expert_parameter *experts;
  size_t n_experts;
} model_parts;

/* Collects the adapters and what is wrong with their tensors. */
static eg_status match_tensors(const model_parts *parts, const egi_peft *peft, egi_map *taken, problems *p,
                               egi_adapters *adapters) {
  const egi_linear *linears = parts->linears;
  egi_arena *arena = taken->arena;
  egi_map used;
  egi_map_init(&used, arena);
  for (size_t i = 0; i < parts->n; i++) {
    const char *path = linears[i].path;
    if (!is_wanted(peft, &linears[i], arena) || egi_map_get(taken, path, NULL)) continue;
    uint32_t rank = egi_peft_rank(&peft->config, path);
    EG_TRY(take(adapters, taken, path, rank, egi_peft_scale(&peft->config, path)));
    check_matrix(p, peft, &(matrix_shape){path, 'A', rank, linears[i].in_features}, &used);
    check_matrix(p, peft, &(matrix_shape){path, 'B', linears[i].out_features, rank}, &used);
  }
  EG_TRY(match_experts(parts->experts, parts->n_experts, peft, p, &used, adapters));
  EG_TRY(check_modules(p, parts->graph, peft, &used));
  check_extra(p, peft, &used);
  return EG_OK;
}

eg_status egi_adapters_from_peft(const egi_graph *graph, const egi_peft *peft, egi_arena *arena,
                                 egi_adapters *out_adapters) {
  model_parts parts = {.graph = graph};
  egi_map taken;
  problems p = {.count = 0};
  egi_adapters adapters = {.config = peft->config};
  EG_TRY(egi_find_linears(graph, arena, &parts.linears, &parts.n));
  EG_TRY(egi_find_experts(graph, arena, &parts.experts, &parts.n_experts));
  adapters.targets = EGI_NEW(arena, egi_adapter_target, parts.n + parts.n_experts + 1);
  if (adapters.targets == NULL) return EG_ERROR_MEMORY;
  egi_map_init(&taken, arena);
  egi_text_init(&p.text, arena->ctx);
  eg_status status = match_tensors(&parts, peft, &taken, &p, &adapters);
  if (status != EG_OK) {
    egi_text_free(&p.text);
    return status;
  }
  EG_TRY(finish_problems(&p, arena->ctx, adapters.count + (peft->config.modules != NULL)));
  EG_TRY(egi_check_folded_positions(graph, &taken, arena));
  EG_TRY(spell_targets(parts.linears, parts.n, &taken, arena, &adapters));
  *out_adapters = adapters;
  return EG_OK;
}
