/* What differs from layer to layer in a config.json: sliding windows, rotary positions, experts. */
#include "io/huggingface.h"

#include <string.h>

#include <jansson.h>

enum { MAX_WINDOW = 1 << 30 };

/* A list with an entry for each layer; NULL when absent or null. */
static eg_status read_list(const egi_json *json, const char *key, int64_t n_layers, json_t **out_list) {
  json_t *list = json_object_get(json->object, key);
  *out_list = NULL;
  if (list == NULL || json_is_null(list)) return EG_OK;
  if (!json_is_array(list)) return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is no list", json->what, key);
  if (n_layers >= 0 && json_array_size(list) != (size_t)n_layers)
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" has %zu entries for %lld layers", json->what, key,
                    json_array_size(list), (long long)n_layers);
  *out_list = list;
  return EG_OK;
}

/* ---- rotary positions ---- */

static eg_status read_positions(const egi_json *json, egi_decoder_config *config) {
  bool has_rope = !(config->family->flags & EGI_FAMILY_LEARNED);
  bool skips = (config->family->flags & EGI_FAMILY_SKIPS_ROPE) != 0;
  int64_t interval = 4;
  json_t *list = NULL;
  if (skips) {
    EG_TRY(egi_json_integer(json, "no_rope_layer_interval", 1, INT64_MAX, &interval));
    EG_TRY(read_list(json, "no_rope_layers", config->n_layers, &list));
  }
  for (int64_t i = 0; i < config->n_layers; i++) {
    bool is_rotated = has_rope && (!skips || (i + 1) % interval != 0);
    json_t *entry = json_array_get(list, (size_t)i);
    if (entry != NULL && !json_is_integer(entry))
      return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: an entry of \"no_rope_layers\" is not an integer", json->what);
    if (entry != NULL) is_rotated = json_integer_value(entry) != 0; /* 1: this layer is rotated */
    config->layers[i].rope = is_rotated ? 0 : -1;
  }
  return EG_OK;
}

/* ---- windows ---- */

/* 0: none. */
static eg_status read_window(const egi_json *json, const egi_decoder_config *config, int64_t *out_window) {
  bool is_on = !(config->family->flags & EGI_FAMILY_SWITCHED);
  json_t *value = json_object_get(json->object, "sliding_window");
  *out_window = json_is_null(value) ? 0 : config->family->window;
  if (config->family->windows == EGI_WINDOW_NONE) *out_window = 0;
  EG_TRY(egi_json_integer(json, "sliding_window", 1, MAX_WINDOW, out_window));
  if (!is_on) EG_TRY(egi_json_boolean(json, "use_sliding_window", &is_on));
  if (!is_on || config->family->windows == EGI_WINDOW_NONE) *out_window = 0;
  return EG_OK;
}

static eg_status read_period(const egi_json *json, const egi_decoder_config *config, int64_t *out_period) {
  static const char *const keys[] = {"sliding_window_pattern", "_sliding_window_pattern", NULL};
  const char *key = egi_json_present(json, keys);
  *out_period = config->family->period;
  if (config->family->windows == EGI_WINDOW_PERIODIC && key != NULL)
    return egi_json_integer(json, key, 1, INT64_MAX, out_period);
  return EG_OK;
}

/* Whether the entry of "layer_types" is a sliding one. */
static eg_status read_type(const egi_json *json, const json_t *entry, bool *out_is_sliding) {
  const char *type = json_string_value(entry);
  *out_is_sliding = type != NULL && strcmp(type, "sliding_attention") == 0;
  if (*out_is_sliding || (type != NULL && strcmp(type, "full_attention") == 0)) return EG_OK;
  return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"layer_types\" has \"%s\", which is not supported", json->what,
                  type != NULL ? type : "an entry that is no text");
}

static eg_status read_windows(const egi_json *json, egi_decoder_config *config) {
  egi_window_rule rule = config->family->windows;
  int64_t window, period, late = 28;
  json_t *types = NULL;
  EG_TRY(read_window(json, config, &window));
  EG_TRY(read_period(json, config, &period));
  EG_TRY(egi_json_integer(json, "max_window_layers", 0, INT64_MAX, &late));
  if (rule != EGI_WINDOW_NONE && rule != EGI_WINDOW_ALL)
    EG_TRY(read_list(json, "layer_types", config->n_layers, &types));
  for (int64_t i = 0; i < config->n_layers; i++) {
    egi_decoder_layer *layer = &config->layers[i];
    bool is_sliding = rule == EGI_WINDOW_ALL || (rule == EGI_WINDOW_PERIODIC && (i + 1) % period != 0) ||
                      (rule == EGI_WINDOW_LATE && i >= late) || (rule == EGI_WINDOW_UNROTATED && layer->rope < 0);
    if (types != NULL) {
      EG_TRY(read_type(json, json_array_get(types, (size_t)i), &is_sliding));
      if (is_sliding && window == 0)
        return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"layer_types\" has a window, \"sliding_window\" has none",
                        json->what);
    }
    layer->window = is_sliding ? window : 0;
    if (is_sliding && layer->rope == 0 && (config->family->flags & EGI_FAMILY_LOCAL_ROPE)) layer->rope = 1;
  }
  return EG_OK;
}

/* ---- experts ---- */

static eg_status read_experts(const egi_json *json, egi_decoder_config *config) {
  int64_t step = 1;
  json_t *dense;
  EG_TRY(egi_json_integer(json, "decoder_sparse_step", 1, INT64_MAX, &step));
  EG_TRY(read_list(json, "mlp_only_layers", -1, &dense));
  for (int64_t i = 0; i < config->n_layers; i++)
    config->layers[i].has_experts = config->family->experts != EGI_EXPERTS_NONE && (i + 1) % step == 0;
  for (size_t i = 0; i < json_array_size(dense); i++) {
    json_int_t index = json_is_integer(json_array_get(dense, i)) ? json_integer_value(json_array_get(dense, i)) : -1;
    if (index < 0 || index >= config->n_layers)
      return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"mlp_only_layers\" names a layer that is not there",
                      json->what);
    config->layers[index].has_experts = false;
  }
  return EG_OK;
}

eg_status egi_decoder_read_layers(const egi_json *json, egi_arena *arena, egi_decoder_config *config) {
  config->layers = EGI_NEW(arena, egi_decoder_layer, (size_t)config->n_layers);
  if (config->layers == NULL) return EG_ERROR_MEMORY;
  EG_TRY(read_positions(json, config));
  EG_TRY(read_windows(json, config));
  return read_experts(json, config);
}
