/* config.json of a Hugging Face folder -> graph. One row for each architecture. */
#include "io/io.h"

#include <string.h>

#include <jansson.h>

typedef eg_status (*build_function)(egi_module *module, const egi_decoder_config *config,
                                    const egi_new_options *options);
typedef struct family {
  const char *model_type;
  build_function build;
} family;

static const family families[] = {{"llama", egi_llama_build}};

enum { MAX_LAYERS = 4096, MAX_SIZE = 1 << 24 };

static eg_status require(const egi_json *json, const char *key, int64_t maximum, int64_t *out) {
  *out = 0;
  EG_TRY(egi_json_integer(json, key, 1, maximum, out));
  if (*out == 0) return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is missing", json->what, key);
  return EG_OK;
}

static eg_status read_sizes(const egi_json *json, egi_decoder_config *config) {
  EG_TRY(require(json, "hidden_size", MAX_SIZE, &config->hidden));
  EG_TRY(require(json, "intermediate_size", MAX_SIZE, &config->intermediate));
  EG_TRY(require(json, "num_hidden_layers", MAX_LAYERS, &config->n_layers));
  EG_TRY(require(json, "num_attention_heads", MAX_SIZE, &config->n_heads));
  EG_TRY(require(json, "vocab_size", MAX_SIZE, &config->vocabulary));
  config->n_kv_heads = config->n_heads;
  EG_TRY(egi_json_integer(json, "num_key_value_heads", 1, MAX_SIZE, &config->n_kv_heads));
  config->head_dim = config->hidden / config->n_heads;
  EG_TRY(egi_json_integer(json, "head_dim", 1, 65536, &config->head_dim));
  if (config->n_heads % config->n_kv_heads != 0)
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"num_attention_heads\" is no multiple of \"num_key_value_heads\"",
                    json->what);
  if (config->head_dim < 2 || config->head_dim % 2 != 0)
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: the head dimension %lld is not even", json->what,
                    (long long)config->head_dim);
  return EG_OK;
}

static eg_status check_settings(const egi_json *json) {
  const char *activation = "silu";
  double rotary_share = 1.0;
  json_t *quantization = json_object_get(json->object, "quantization_config");
  EG_TRY(egi_json_string(json, "hidden_act", &activation));
  EG_TRY(egi_json_number(json, "partial_rotary_factor", &rotary_share));
  if (strcmp(activation, "silu") != 0 && strcmp(activation, "swish") != 0)
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"hidden_act\" \"%s\" is not supported", json->what,
                    activation);
  if (rotary_share < 1.0 || rotary_share > 1.0)
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"partial_rotary_factor\" is not supported", json->what);
  if (quantization != NULL && !json_is_null(quantization))
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"quantization_config\" is not supported", json->what);
  return EG_OK;
}

static eg_status read_config(const egi_json *json, egi_decoder_config *config) {
  config->epsilon = 1e-6;
  config->initializer_range = 0.02;
  EG_TRY(read_sizes(json, config));
  EG_TRY(check_settings(json));
  EG_TRY(egi_json_number(json, "rms_norm_eps", &config->epsilon));
  EG_TRY(egi_json_number(json, "initializer_range", &config->initializer_range));
  EG_TRY(egi_json_boolean(json, "tie_word_embeddings", &config->is_tied));
  EG_TRY(egi_json_boolean(json, "attention_bias", &config->has_attention_bias));
  EG_TRY(egi_json_boolean(json, "mlp_bias", &config->has_mlp_bias));
  return egi_rope_read(json, &config->rope);
}

static eg_status find_family(const egi_json *json, const family **out_family) {
  const char *type = NULL;
  EG_TRY(egi_json_string(json, "model_type", &type));
  if (type == NULL) return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"model_type\" is missing", json->what);
  for (size_t i = 0; i < EGI_COUNT(families); i++)
    if (strcmp(families[i].model_type, type) == 0) {
      *out_family = &families[i];
      return EG_OK;
    }
  return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"model_type\" \"%s\" is not supported", json->what, type);
}

eg_status egi_huggingface_new(eg_context *ctx, const char *config_path, const egi_new_options *options,
                              egi_module **out_module) {
  egi_json json = {ctx, config_path, NULL};
  egi_decoder_config config = {.hidden = 0};
  const family *found = NULL;
  egi_module *module;
  EG_TRY(egi_json_read(ctx, config_path, &json.object));
  eg_status status = find_family(&json, &found);
  if (status == EG_OK) status = read_config(&json, &config);
  json_decref(json.object);
  if (status != EG_OK) return status;
  EG_TRY(egi_module_create(ctx, &module));
  status = found->build(module, &config, options);
  if (status != EG_OK) {
    egi_module_destroy(module);
    return status;
  }
  *out_module = module;
  return EG_OK;
}
