/* A decoder's config.json: sizes and settings, with the defaults of its family. Older and newer Transformers spell some
 * keys differently: the first spelling that is there counts. */
#include "io/huggingface.h"

#include <math.h>
#include <string.h>

#include <jansson.h>

enum { MAX_LAYERS = 4096, MAX_SIZE = 1 << 24, MAX_HEAD_DIM = 65536 };

static const char *const keys_hidden[] = {"hidden_size", "n_embd", NULL};
static const char *const keys_intermediate[] = {"intermediate_size", "n_inner", NULL};
static const char *const keys_layers[] = {"num_hidden_layers", "n_layer", NULL};
static const char *const keys_heads[] = {"num_attention_heads", "n_head", NULL};
static const char *const keys_vocabulary[] = {"vocab_size", NULL};
static const char *const keys_positions[] = {"max_position_embeddings", "n_positions", NULL};
static const char *const keys_experts[] = {"num_experts", "num_local_experts", NULL};
static const char *const keys_epsilon[] = {"rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", NULL};
static const char *const keys_activation[] = {"hidden_activation", "activation_function", "hidden_act", NULL};

const char *egi_json_present(const egi_json *json, const char *const *keys) {
  for (; *keys != NULL; keys++) {
    json_t *value = json_object_get(json->object, *keys);
    if (value != NULL && !json_is_null(value)) return *keys;
  }
  return NULL;
}

static eg_status require(const egi_json *json, const char *const *keys, int64_t maximum, int64_t *out) {
  const char *key = egi_json_present(json, keys);
  if (key == NULL) return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is missing", json->what, keys[0]);
  return egi_json_integer(json, key, 1, maximum, out);
}

static eg_status fail_setting(const egi_json *json, const char *key) {
  return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: this \"%s\" is not supported", json->what, key);
}

/* ---- sizes ---- */

static eg_status read_heads(const egi_json *json, egi_decoder_config *config) {
  config->n_kv_heads = config->n_heads;
  EG_TRY(egi_json_integer(json, "num_key_value_heads", 1, MAX_SIZE, &config->n_kv_heads));
  if (config->n_heads % config->n_kv_heads != 0)
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"num_attention_heads\" is no multiple of \"num_key_value_heads\"",
                    json->what);
  config->head_dim = config->family->head_dim > 0 ? config->family->head_dim : config->hidden / config->n_heads;
  EG_TRY(egi_json_integer(json, "head_dim", 1, MAX_HEAD_DIM, &config->head_dim));
  bool is_given = json_is_integer(json_object_get(json->object, "head_dim"));
  if (!is_given && config->family->head_dim == 0 && config->hidden % config->n_heads != 0)
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"hidden_size\" is no multiple of \"num_attention_heads\"",
                    json->what);
  if (config->family->qkv == EGI_QKV_HEADS && config->n_kv_heads != config->n_heads)
    return fail_setting(json, "num_key_value_heads");
  if (config->head_dim < 1 || config->head_dim > MAX_HEAD_DIM)
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: a head dimension of %lld", json->what,
                    (long long)config->head_dim);
  return EG_OK;
}

static eg_status read_sizes(const egi_json *json, egi_decoder_config *config) {
  const egi_family *family = config->family;
  EG_TRY(require(json, keys_hidden, MAX_SIZE, &config->hidden));
  if (family->mlp == EGI_MLP_PLAIN && egi_json_present(json, keys_intermediate) == NULL)
    config->intermediate = 4 * config->hidden;
  else
    EG_TRY(require(json, keys_intermediate, MAX_SIZE, &config->intermediate));
  EG_TRY(require(json, keys_layers, MAX_LAYERS, &config->n_layers));
  EG_TRY(require(json, keys_heads, MAX_SIZE, &config->n_heads));
  EG_TRY(require(json, keys_vocabulary, MAX_SIZE, &config->vocabulary));
  if (family->flags & EGI_FAMILY_LEARNED) EG_TRY(require(json, keys_positions, MAX_SIZE, &config->n_positions));
  return read_heads(json, config);
}

static eg_status read_experts(const egi_json *json, egi_decoder_config *config) {
  bool is_gpt_oss = config->family->experts == EGI_EXPERTS_CLAMPED;
  static const char *const active[] = {"num_experts_per_tok", NULL};
  if (config->family->experts == EGI_EXPERTS_NONE) return EG_OK;
  EG_TRY(require(json, keys_experts, 65536, &config->n_experts));
  EG_TRY(require(json, active, config->n_experts, &config->n_active));
  config->expert_intermediate = config->intermediate;
  EG_TRY(egi_json_integer(json, "moe_intermediate_size", 1, MAX_SIZE, &config->expert_intermediate));
  /* Only Qwen's has the setting, off where it is missing. */
  config->normalizes_routing = strcmp(config->family->model_type, "qwen3_moe") != 0;
  EG_TRY(egi_json_boolean(json, "norm_topk_prob", &config->normalizes_routing));
  config->expert_alpha = 1.702;
  config->expert_limit = 7.0;
  if (!is_gpt_oss) return EG_OK;
  EG_TRY(egi_json_number(json, "swiglu_alpha", &config->expert_alpha));
  return egi_json_number(json, "swiglu_limit", &config->expert_limit);
}

/* ---- settings ---- */

static eg_status read_activation(const egi_json *json, egi_decoder_config *config) {
  static const struct {
    const char *name;
    egi_activation activation;
  } names[] = {{"silu", EGI_ACT_SILU},           {"swish", EGI_ACT_SILU},
               {"gelu", EGI_ACT_GELU},           {"gelu_python", EGI_ACT_GELU},
               {"gelu_new", EGI_ACT_GELU_TANH},  {"gelu_pytorch_tanh", EGI_ACT_GELU_TANH},
               {"gelu_fast", EGI_ACT_GELU_TANH}, {"relu", EGI_ACT_RELU}};
  const char *key = egi_json_present(json, keys_activation), *name = NULL;
  config->activation = config->family->activation;
  if (key == NULL) return EG_OK;
  EG_TRY(egi_json_string(json, key, &name));
  for (size_t i = 0; i < EGI_COUNT(names); i++)
    if (strcmp(names[i].name, name) == 0) {
      config->activation = names[i].activation;
      return EG_OK;
    }
  return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"%s\" \"%s\" is not supported", json->what, key, name);
}

static eg_status read_biases(const egi_json *json, egi_decoder_config *config) {
  unsigned flags = config->family->flags;
  bool has_bias = (flags & EGI_FAMILY_ATTENTION_BIAS) != 0;
  if (!(flags & EGI_FAMILY_QKV_BIAS)) EG_TRY(egi_json_boolean(json, "attention_bias", &has_bias));
  config->has_qkv_bias = has_bias || (flags & EGI_FAMILY_QKV_BIAS);
  config->has_output_bias = has_bias;
  config->has_mlp_bias = config->family->mlp == EGI_MLP_PLAIN;
  return config->has_mlp_bias ? EG_OK : egi_json_boolean(json, "mlp_bias", &config->has_mlp_bias);
}

/* null turns it off, absent leaves the default. */
static eg_status read_softcap(const egi_json *json, const char *key, double *out) {
  if (json_is_null(json_object_get(json->object, key))) *out = 0.0;
  EG_TRY(egi_json_number(json, key, out));
  if (*out < 0.0) return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is negative", json->what, key);
  return EG_OK;
}

static eg_status read_attention(const egi_json *json, egi_decoder_config *config) {
  double scalar = (double)config->head_dim;
  bool is_scaled = true;
  EG_TRY(egi_json_boolean(json, "scale_attn_weights", &is_scaled));
  EG_TRY(egi_json_boolean(json, "scale_attn_by_inverse_layer_idx", &config->divides_scale_by_layer));
  if (config->family->norm == EGI_NORM_OFFSET) {
    bool is_gemma2 = strcmp(config->family->model_type, "gemma2") == 0;
    scalar = 256.0;
    config->attention_softcap = is_gemma2 ? 50.0 : 0.0;
    config->logit_softcap = is_gemma2 ? 30.0 : 0.0;
    EG_TRY(egi_json_number(json, "query_pre_attn_scalar", &scalar));
    EG_TRY(read_softcap(json, "attn_logit_softcapping", &config->attention_softcap));
    EG_TRY(read_softcap(json, "final_logit_softcapping", &config->logit_softcap));
  }
  if (!(scalar > 0.0))
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"query_pre_attn_scalar\" is not positive", json->what);
  config->attention_scale = is_scaled ? 1.0 / sqrt(scalar) : 1.0;
  return EG_OK;
}

/* Weights as 4-bit codes of bitsandbytes or as MXFP4; which of them are, the files tell. */
static bool has_known_quantization(const egi_json *json) {
  const json_t *quantization = json_object_get(json->object, "quantization_config");
  if (quantization == NULL || json_is_null(quantization)) return true;
  const char *method = json_string_value(json_object_get(quantization, "quant_method"));
  if (method == NULL) return false;
  if (strcmp(method, "mxfp4") == 0) return true;
  return strcmp(method, "bitsandbytes") == 0 && json_is_true(json_object_get(quantization, "load_in_4bit"));
}

/* Settings that change the model and are not modelled. */
static eg_status check_settings(const egi_json *json) {
  static const char *const flags[] = {"add_cross_attention", "use_bidirectional_attention"};
  if (!has_known_quantization(json)) return fail_setting(json, "quantization_config");
  for (size_t i = 0; i < EGI_COUNT(flags); i++) {
    bool is_on = false;
    EG_TRY(egi_json_boolean(json, flags[i], &is_on));
    if (is_on) return fail_setting(json, flags[i]);
  }
  return EG_OK;
}

static eg_status read_settings(const egi_json *json, egi_decoder_config *config) {
  unsigned flags = config->family->flags;
  const char *epsilon = egi_json_present(json, keys_epsilon);
  config->epsilon = config->family->epsilon;
  config->initializer_range = 0.02;
  config->is_tied = (flags & EGI_FAMILY_TIED) != 0;
  config->is_parallel = (flags & EGI_FAMILY_PARALLEL) != 0;
  EG_TRY(check_settings(json));
  if (epsilon != NULL) EG_TRY(egi_json_number(json, epsilon, &config->epsilon));
  if (!(config->epsilon >= 0.0))
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is negative", json->what, epsilon);
  EG_TRY(egi_json_number(json, "initializer_range", &config->initializer_range));
  if (!(config->initializer_range >= 0.0))
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"initializer_range\" is negative", json->what);
  EG_TRY(egi_json_boolean(json, "tie_word_embeddings", &config->is_tied));
  if (config->is_parallel) EG_TRY(egi_json_boolean(json, "use_parallel_residual", &config->is_parallel));
  EG_TRY(read_activation(json, config));
  EG_TRY(read_biases(json, config));
  return read_attention(json, config);
}

eg_status egi_decoder_read_config(const egi_json *json, egi_arena *arena, egi_decoder_config *out_config) {
  const char *type = NULL;
  egi_decoder_config config = {.hidden = 0};
  EG_TRY(egi_json_string(json, "model_type", &type));
  if (type == NULL) return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"model_type\" is missing", json->what);
  config.family = egi_family_find(type);
  if (config.family == NULL)
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"model_type\" \"%s\" is not supported", json->what, type);
  EG_TRY(read_sizes(json, &config));
  EG_TRY(read_experts(json, &config));
  EG_TRY(read_settings(json, &config));
  if (!(config.family->flags & EGI_FAMILY_LEARNED)) EG_TRY(egi_rope_read(json, arena, &config));
  EG_TRY(egi_decoder_read_layers(json, arena, &config));
  *out_config = config;
  return EG_OK;
}
