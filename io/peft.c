/* PEFT adapter folders: adapter_config.json and adapter_model.safetensors, as peft/tuners/lora/config.py and
 * utils/save_and_load.py write them. What changes the meaning of the tensors and is not modelled is refused by key. */
#include "io/io.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

typedef enum key_rule {
  RULE_ANY,   /* read elsewhere, or without influence on what the tensors mean */
  RULE_UNSET, /* only null, false, 0, "" or empty */
  RULE_NONE   /* only null or "none" */
} key_rule;

typedef struct key_row {
  const char *key;
  key_rule rule;
} key_row;

static const key_row key_rows[] = {{"alora_invocation_tokens", RULE_UNSET},
                                   {"alpha_pattern", RULE_ANY},
                                   {"arrow_config", RULE_UNSET},
                                   {"auto_mapping", RULE_ANY},
                                   {"base_model_name_or_path", RULE_ANY},
                                   {"bias", RULE_NONE},
                                   {"corda_config", RULE_ANY},
                                   {"ensure_weight_tying", RULE_ANY},
                                   {"eva_config", RULE_ANY},
                                   {"exclude_modules", RULE_ANY},
                                   {"fan_in_fan_out", RULE_ANY},
                                   {"inference_mode", RULE_ANY},
                                   {"init_lora_weights", RULE_ANY},
                                   {"kasa_config", RULE_UNSET},
                                   {"layer_replication", RULE_UNSET},
                                   {"layers_pattern", RULE_ANY},
                                   {"layers_to_transform", RULE_ANY},
                                   {"loftq_config", RULE_ANY},
                                   {"lora_alpha", RULE_ANY},
                                   {"lora_bias", RULE_UNSET},
                                   {"lora_dropout", RULE_ANY},
                                   {"lora_ga_config", RULE_ANY},
                                   {"megatron_config", RULE_ANY},
                                   {"megatron_core", RULE_ANY},
                                   {"modules_to_save", RULE_ANY},
                                   {"monteclora_config", RULE_UNSET},
                                   {"peft_type", RULE_ANY},
                                   {"peft_version", RULE_ANY},
                                   {"qalora_group_size", RULE_ANY},
                                   {"r", RULE_ANY},
                                   {"rank_pattern", RULE_ANY},
                                   {"revision", RULE_ANY},
                                   {"runtime_config", RULE_ANY},
                                   {"target_modules", RULE_ANY},
                                   {"target_parameters", RULE_ANY},
                                   {"task_type", RULE_ANY},
                                   {"trainable_token_indices", RULE_UNSET},
                                   {"use_bdlora", RULE_UNSET},
                                   {"use_dora", RULE_UNSET},
                                   {"use_qalora", RULE_UNSET},
                                   {"use_rslora", RULE_ANY},
                                   {"velora_config", RULE_UNSET}};

static bool is_unset(const json_t *value) {
  switch (json_typeof(value)) {
  case JSON_NULL:
  case JSON_FALSE:
    return true;
  case JSON_TRUE:
    return false;
  case JSON_OBJECT:
    return json_object_size(value) == 0;
  case JSON_ARRAY:
    return json_array_size(value) == 0;
  case JSON_STRING:
    return json_string_length(value) == 0;
  case JSON_INTEGER:
    return json_integer_value(value) == 0;
  case JSON_REAL:
    break;
  }
  return !(json_real_value(value) != 0.0);
}

static eg_status check_keys(const egi_json *json) {
  const char *key;
  json_t *value;
  json_object_foreach(json->object, key, value) {
    const key_row *row = NULL;
    for (size_t i = 0; i < EGI_COUNT(key_rows); i++)
      if (strcmp(key_rows[i].key, key) == 0) row = &key_rows[i];
    if (row == NULL) {
      egi_log(json->ctx, EG_LOG_WARNING, "%s: unknown key \"%s\" is ignored", json->what, key);
      continue;
    }
    const char *text = json_string_value(value);
    bool is_refused = (row->rule == RULE_UNSET && !is_unset(value)) ||
                      (row->rule == RULE_NONE && !is_unset(value) && (text == NULL || strcmp(text, "none") != 0));
    if (is_refused)
      return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"%s\" is set, which engraft does not support", json->what,
                      key);
  }
  return EG_OK;
}

/* Initialisations that change the base weights cannot be reproduced from the adapter's tensors alone. */
static eg_status check_init(const egi_json *json) {
  static const char *const harmless[] = {"gaussian", "eva", "orthogonal"};
  json_t *value = json_object_get(json->object, "init_lora_weights");
  if (value == NULL || !json_is_string(value)) return EG_OK;
  for (size_t i = 0; i < EGI_COUNT(harmless); i++)
    if (strcmp(json_string_value(value), harmless[i]) == 0) return EG_OK;
  return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED,
                  "%s: \"init_lora_weights\" is \"%s\", which changes the base weights; save the adapter as plain LoRA",
                  json->what, json_string_value(value));
}

static eg_status copy_string(egi_arena *arena, const char **string) {
  if (*string == NULL) return EG_OK;
  *string = egi_arena_copy_text(arena, *string, strlen(*string));
  return *string != NULL ? EG_OK : EG_ERROR_MEMORY;
}

/* Names of the key's list joined by commas into the arena. */
static eg_status join_names(const egi_json *json, const char *key, const json_t *list, egi_arena *arena,
                            const char **out_names) {
  egi_text text;
  egi_text_init(&text, json->ctx);
  eg_status status = EG_OK;
  for (size_t i = 0; i < json_array_size(list) && status == EG_OK; i++) {
    const char *name = json_string_value(json_array_get(list, i));
    if (name == NULL || name[0] == '\0' || strchr(name, ',') != NULL)
      status = egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" holds something that is no name", json->what, key);
    else
      egi_text_format(&text, "%s%s", i > 0 ? "," : "", name);
  }
  if (status == EG_OK) status = egi_text_status(&text);
  if (status == EG_OK) {
    *out_names = egi_arena_copy_text(arena, egi_text_string(&text), text.length);
    if (*out_names == NULL) status = EG_ERROR_MEMORY;
  }
  egi_text_free(&text);
  return status;
}

static bool is_narrowed(const json_t *object) {
  const json_t *layers = json_object_get(object, "layers_to_transform");
  const json_t *excluded = json_object_get(object, "exclude_modules");
  return (layers != NULL && !json_is_null(layers)) || (excluded != NULL && !is_unset(excluded));
}

static eg_status read_targets(const egi_json *json, egi_arena *arena, egi_peft_config *config) {
  json_t *targets = json_object_get(json->object, "target_modules");
  config->targets = NULL;
  if (targets == NULL || json_is_null(targets) || is_narrowed(json->object)) return EG_OK;
  if (json_is_string(targets)) {
    if (strcmp(json_string_value(targets), "all-linear") == 0) config->targets = "all-linear";
    return EG_OK; /* a regular expression of Python: the tensors say which modules it matched */
  }
  if (json_is_array(targets) && json_array_size(targets) == 0 && config->parameters != NULL) return EG_OK;
  if (!json_is_array(targets) || json_array_size(targets) == 0)
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"target_modules\" names no module", json->what);
  return join_names(json, "target_modules", targets, arena, &config->targets);
}

static eg_status read_parameters(const egi_json *json, egi_arena *arena, egi_peft_config *config) {
  json_t *parameters = json_object_get(json->object, "target_parameters");
  if (parameters == NULL || is_unset(parameters)) return EG_OK;
  if (!json_is_array(parameters))
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"target_parameters\" is no list of names", json->what);
  if (config->dropout > 0.0)
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED,
                    "%s: \"lora_dropout\" is %g, which PEFT does not allow beside \"target_parameters\"", json->what,
                    config->dropout);
  return join_names(json, "target_parameters", parameters, arena, &config->parameters);
}

static eg_status read_modules(const egi_json *json, egi_arena *arena, egi_peft_config *config) {
  json_t *modules = json_object_get(json->object, "modules_to_save"),
         *tying = json_object_get(json->object, "ensure_weight_tying");
  if (modules == NULL || is_unset(modules)) return EG_OK;
  if (!json_is_array(modules))
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"modules_to_save\" is no list of names", json->what);
  if (tying != NULL && !is_unset(tying))
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED,
                    "%s: \"ensure_weight_tying\" is set beside \"modules_to_save\", which engraft does not support",
                    json->what);
  return join_names(json, "modules_to_save", modules, arena, &config->modules);
}

/* PEFT's rule (peft/utils/other.py, get_pattern_key). */
eg_status egi_peft_pattern_compile(egi_arena *arena, egi_peft_pattern *pattern) {
  const char *text = egi_arena_format(arena, "(.*\\.)?(%s)", pattern->key);
  return text != NULL ? egi_pattern_compile(arena, text, &pattern->expression) : EG_ERROR_MEMORY;
}

static eg_status compile_key(const egi_json *json, const char *key, egi_arena *arena, egi_peft_pattern *pattern) {
  eg_status status = egi_peft_pattern_compile(arena, pattern);
  if (status != EG_ERROR_ARGUMENT) return status;
  const char *reason = egi_arena_format(arena, "%s", eg_context_error(json->ctx));
  if (reason == NULL) return EG_ERROR_MEMORY;
  return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\": %s", json->what, key, reason);
}

static eg_status read_patterns(const egi_json *json, const char *key, egi_arena *arena,
                               const egi_peft_pattern **out_patterns, size_t *out_count) {
  json_t *object = json_object_get(json->object, key);
  const char *name;
  json_t *value;
  if (object == NULL || json_is_null(object)) return EG_OK;
  if (!json_is_object(object))
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is not an object", json->what, key);
  egi_peft_pattern *patterns = EGI_NEW(arena, egi_peft_pattern, json_object_size(object) + 1);
  size_t count = 0;
  if (patterns == NULL) return EG_ERROR_MEMORY;
  json_object_foreach(object, name, value) {
    if (!json_is_number(value) || !(json_number_value(value) > 0.0) || !(json_number_value(value) <= 1e6))
      return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" of \"%s\" is not a positive number", json->what, key,
                      name);
    patterns[count].key = egi_arena_copy_text(arena, name, strlen(name));
    patterns[count].value = json_number_value(value);
    if (patterns[count].key == NULL) return EG_ERROR_MEMORY;
    EG_TRY(compile_key(json, key, arena, &patterns[count++]));
  }
  *out_patterns = patterns;
  *out_count = count;
  return EG_OK;
}

static eg_status read_config(const egi_json *json, egi_arena *arena, egi_peft_config *config) {
  const char *type = NULL;
  int64_t rank = 8; /* PEFT's defaults */
  config->alpha = 8.0;
  EG_TRY(egi_json_string(json, "peft_type", &type));
  if (type == NULL || strcmp(type, "LORA") != 0)
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"peft_type\" is %s%s%s, only \"LORA\" is supported",
                    json->what, type != NULL ? "\"" : "", type != NULL ? type : "missing", type != NULL ? "\"" : "");
  EG_TRY(check_keys(json));
  EG_TRY(check_init(json));
  EG_TRY(egi_json_integer(json, "r", 1, 65536, &rank));
  EG_TRY(egi_json_number(json, "lora_alpha", &config->alpha));
  EG_TRY(egi_json_number(json, "lora_dropout", &config->dropout));
  EG_TRY(egi_json_boolean(json, "use_rslora", &config->use_rslora));
  EG_TRY(egi_json_string(json, "base_model_name_or_path", &config->base_model));
  EG_TRY(egi_json_string(json, "task_type", &config->task));
  config->rank = (uint32_t)rank;
  EG_TRY(copy_string(arena, &config->base_model));
  EG_TRY(copy_string(arena, &config->task));
  EG_TRY(read_patterns(json, "rank_pattern", arena, &config->ranks, &config->n_ranks));
  EG_TRY(read_patterns(json, "alpha_pattern", arena, &config->alphas, &config->n_alphas));
  EG_TRY(read_parameters(json, arena, config));
  EG_TRY(read_modules(json, arena, config));
  return read_targets(json, arena, config);
}

static eg_status open_folder(eg_context *ctx, const char *directory, egi_peft *peft) {
  const char *config_path = egi_path_join(&peft->arena, directory, "adapter_config.json");
  const char *tensors_path = egi_path_join(&peft->arena, directory, "adapter_model.safetensors");
  const char *pickle_path = egi_path_join(&peft->arena, directory, "adapter_model.bin");
  egi_json json = {ctx, config_path, NULL};
  if (config_path == NULL || tensors_path == NULL || pickle_path == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_json_read(ctx, config_path, &json.object));
  eg_status status = read_config(&json, &peft->arena, &peft->config);
  json_decref(json.object);
  if (status == EG_OK) status = egi_qat_record_read(&peft->arena, directory, &peft->config.qat);
  if (status != EG_OK) return status;
  if (access(tensors_path, F_OK) != 0 && access(pickle_path, F_OK) == 0)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "%s: a pickle file; save the adapter as safetensors", pickle_path);
  return egi_safetensors_open(ctx, tensors_path, &peft->tensors);
}

eg_status egi_peft_open(eg_context *ctx, const char *directory, egi_peft **out_peft) {
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  egi_peft *peft = EGI_NEW(&arena, egi_peft, 1);
  if (peft == NULL) return EG_ERROR_MEMORY;
  peft->arena = arena;
  eg_status status = open_folder(ctx, directory, peft);
  if (status != EG_OK) {
    egi_peft_close(peft);
    return status;
  }
  *out_peft = peft;
  return EG_OK;
}

void egi_peft_close(egi_peft *peft) {
  if (peft == NULL) return;
  egi_safetensors_close(peft->tensors);
  egi_arena arena = peft->arena; /* the struct lies in its own arena */
  egi_arena_clear(&arena);
}

/* The first that matches. */
static const egi_peft_pattern *find_pattern(const egi_peft_pattern *patterns, size_t count, const char *path) {
  for (size_t i = 0; i < count; i++)
    if (egi_pattern_matches(patterns[i].expression, path)) return &patterns[i];
  return NULL;
}

uint32_t egi_peft_rank(const egi_peft_config *config, const char *path) {
  const egi_peft_pattern *pattern = find_pattern(config->ranks, config->n_ranks, path);
  return pattern != NULL ? (uint32_t)pattern->value : config->rank;
}

double egi_peft_scale(const egi_peft_config *config, const char *path) {
  const egi_peft_pattern *pattern = find_pattern(config->alphas, config->n_alphas, path);
  double alpha = pattern != NULL ? pattern->value : config->alpha;
  double rank = egi_peft_rank(config, path);
  return alpha / (config->use_rslora ? sqrt(rank) : rank);
}

static eg_status copy_patterns(egi_arena *arena, const egi_peft_pattern **patterns, size_t count) {
  egi_peft_pattern *copy = EGI_NEW(arena, egi_peft_pattern, count + 1);
  if (copy == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) {
    copy[i] = (*patterns)[i];
    EG_TRY(copy_string(arena, &copy[i].key));
    EG_TRY(egi_peft_pattern_compile(arena, &copy[i]));
  }
  *patterns = copy;
  return EG_OK;
}

eg_status egi_peft_config_copy(egi_arena *arena, egi_peft_config *config) {
  EG_TRY(copy_string(arena, &config->targets));
  EG_TRY(copy_string(arena, &config->parameters));
  EG_TRY(copy_string(arena, &config->modules));
  EG_TRY(copy_string(arena, &config->task));
  EG_TRY(copy_string(arena, &config->base_model));
  EG_TRY(copy_string(arena, &config->qat.weights));
  EG_TRY(copy_patterns(arena, &config->ranks, config->n_ranks));
  return copy_patterns(arena, &config->alphas, config->n_alphas);
}
