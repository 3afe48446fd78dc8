/* Rotary position settings and their frequencies, as transformers/modeling_rope_utils.py computes them. Transformers 4
 * writes rope_theta, rope_scaling and partial_rotary_factor; 5 writes rope_parameters, for some families one object for
 * each type of layer. */
#include "io/huggingface.h"

#include <math.h>
#include <string.h>

#include <jansson.h>

enum { MAX_FACTORS = 65536 };

/* ---- reading ---- */

static eg_status read_kind(const egi_json *json, egi_rope_config *rope) {
  static const struct {
    const char *name;
    egi_rope_kind kind;
  } kinds[] = {{"default", EGI_ROPE_DEFAULT}, {"linear", EGI_ROPE_LINEAR}, {"dynamic", EGI_ROPE_DYNAMIC},
               {"llama3", EGI_ROPE_LLAMA3},   {"yarn", EGI_ROPE_YARN},     {"longrope", EGI_ROPE_LONG},
               {"su", EGI_ROPE_LONG}};
  static const char *const keys[] = {"rope_type", "type", NULL};
  const char *key = egi_json_present(json, keys), *name = "default";
  if (key != NULL) EG_TRY(egi_json_string(json, key, &name));
  for (size_t i = 0; i < EGI_COUNT(kinds); i++)
    if (strcmp(kinds[i].name, name) == 0) {
      rope->kind = kinds[i].kind;
      return EG_OK;
    }
  return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: rotary scaling \"%s\" is not supported", json->what, name);
}

static eg_status read_factors(const egi_json *json, const char *key, egi_arena *arena, const double **out_factors,
                              size_t *out_count) {
  json_t *list = json_object_get(json->object, key);
  size_t count = json_array_size(list);
  if (count == 0 || count > MAX_FACTORS)
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is no list of numbers", json->what, key);
  double *factors = EGI_NEW(arena, double, count);
  if (factors == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) {
    factors[i] = json_number_value(json_array_get(list, i));
    if (!(factors[i] > 0.0))
      return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" has an entry that is no positive number", json->what,
                      key);
  }
  *out_factors = factors;
  *out_count = count;
  return EG_OK;
}

static eg_status read_long(const egi_json *json, egi_arena *arena, egi_rope_config *rope) {
  size_t n_short, n_long, wanted = (size_t)rope->rotary_dim / 2;
  EG_TRY(read_factors(json, "short_factor", arena, &rope->short_factors, &n_short));
  EG_TRY(read_factors(json, "long_factor", arena, &rope->long_factors, &n_long));
  if (n_short == wanted && n_long == wanted) return EG_OK;
  return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" has %zu entries, %zu frequencies are rotated", json->what,
                  n_short != wanted ? "short_factor" : "long_factor", n_short != wanted ? n_short : n_long, wanted);
}

/* The object `json` of rotary settings over what `rope` holds already. */
static eg_status read_scaling(const egi_json *json, egi_rope_config *rope) {
  EG_TRY(read_kind(json, rope));
  EG_TRY(egi_json_number(json, "rope_theta", &rope->theta));
  EG_TRY(egi_json_number(json, "partial_rotary_factor", &rope->rotary_share));
  EG_TRY(egi_json_number(json, "factor", &rope->factor));
  EG_TRY(egi_json_number(json, "low_freq_factor", &rope->low_frequency_factor));
  EG_TRY(egi_json_number(json, "high_freq_factor", &rope->high_frequency_factor));
  EG_TRY(egi_json_number(json, "original_max_position_embeddings", &rope->original_positions));
  EG_TRY(egi_json_number(json, "beta_fast", &rope->beta_fast));
  EG_TRY(egi_json_number(json, "beta_slow", &rope->beta_slow));
  EG_TRY(egi_json_number(json, "mscale", &rope->scale_numerator));
  EG_TRY(egi_json_number(json, "mscale_all_dim", &rope->scale_denominator));
  EG_TRY(egi_json_number(json, "attention_factor", &rope->attention_factor));
  return egi_json_boolean(json, "truncate", &rope->is_truncated);
}

static double yarn_scale(double factor, double weight) {
  return factor > 1.0 ? 0.1 * weight * log(factor) + 1.0 : 1.0;
}

/* What follows from the rest when it is not given. */
static void complete(egi_rope_config *rope) {
  bool is_stretched = rope->kind == EGI_ROPE_YARN || rope->kind == EGI_ROPE_LONG;
  if (is_stretched && rope->factor == 0.0 && rope->original_positions > 0.0)
    rope->factor = rope->positions / rope->original_positions;
  if (rope->attention_factor > 0.0) return;
  rope->attention_factor = 1.0;
  if (rope->kind == EGI_ROPE_YARN && rope->scale_numerator > 0.0 && rope->scale_denominator > 0.0)
    rope->attention_factor =
        yarn_scale(rope->factor, rope->scale_numerator) / yarn_scale(rope->factor, rope->scale_denominator);
  else if (rope->kind == EGI_ROPE_YARN)
    rope->attention_factor = yarn_scale(rope->factor, 1.0);
  else if (rope->kind == EGI_ROPE_LONG && rope->factor > 1.0)
    rope->attention_factor = sqrt(1.0 + log(rope->factor) / log(rope->original_positions));
}

/* The key that is out of range, or NULL. */
static const char *find_fault(const egi_rope_config *rope) {
  bool is_scaled = rope->kind != EGI_ROPE_DEFAULT;
  if (!(rope->theta > 1.0)) return "rope_theta";
  if (!(rope->rotary_share > 0.0 && rope->rotary_share <= 1.0)) return "partial_rotary_factor";
  if (is_scaled && rope->kind != EGI_ROPE_LINEAR && !(rope->original_positions > 1.0))
    return "original_max_position_embeddings";
  if (is_scaled && !(rope->factor > 0.0)) return "factor";
  if (rope->kind == EGI_ROPE_DYNAMIC && !(rope->factor >= 1.0)) return "factor";
  if (rope->kind == EGI_ROPE_DYNAMIC && !(rope->positions >= 1.0)) return "max_position_embeddings";
  if (rope->attention_factor < 0.0) return "attention_factor";
  if (rope->kind == EGI_ROPE_LLAMA3 && !(rope->low_frequency_factor > 0.0)) return "low_freq_factor";
  if (rope->kind == EGI_ROPE_LLAMA3 && !(rope->high_frequency_factor > rope->low_frequency_factor))
    return "high_freq_factor";
  if (rope->kind == EGI_ROPE_YARN && !(rope->beta_slow > 0.0)) return "beta_slow";
  if (rope->kind == EGI_ROPE_YARN && !(rope->beta_fast > 0.0)) return "beta_fast";
  return NULL;
}

/* Transformers rotates whole heads in most families, and takes no notice of a share in their unscaled settings. */
static eg_status check_share(const egi_json *json, const egi_decoder_config *config, egi_rope_config *rope) {
  if ((config->family->flags & EGI_FAMILY_PARTIAL) || !(rope->rotary_share < 1.0)) return EG_OK;
  if (rope->kind != EGI_ROPE_DEFAULT)
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"partial_rotary_factor\" is not supported for %s",
                    json->what, config->family->model_type);
  egi_log(json->ctx, EG_LOG_WARNING, "%s: \"partial_rotary_factor\" means nothing for %s", json->what,
          config->family->model_type);
  rope->rotary_share = 1.0;
  return EG_OK;
}

/* One set of settings: `scaling` may have no object. The old context that stands outside goes first (Phi-3). */
static eg_status settle(const egi_json *json, const egi_json *scaling, egi_arena *arena,
                        const egi_decoder_config *config, egi_rope_config *rope) {
  if (scaling->object != NULL) EG_TRY(read_scaling(scaling, rope));
  EG_TRY(egi_json_number(json, "original_max_position_embeddings", &rope->original_positions));
  double before = rope->attention_factor;
  complete(rope);
  const char *fault = before < 0.0 ? "attention_factor" : find_fault(rope);
  if (fault != NULL)
    return egi_fail(scaling->ctx, EG_ERROR_FORMAT, "%s: rotary settings: \"%s\" is missing or out of range",
                    scaling->what, fault);
  EG_TRY(check_share(scaling, config, rope));
  rope->rotary_dim = (int64_t)((double)config->head_dim * rope->rotary_share);
  int64_t least = rope->kind == EGI_ROPE_DYNAMIC ? 4 : 2;
  if (rope->rotary_dim < least || rope->rotary_dim % 2 != 0)
    return egi_fail(scaling->ctx, EG_ERROR_FORMAT, "%s: %lld of a head's %lld numbers cannot be rotated in pairs",
                    scaling->what, (long long)rope->rotary_dim, (long long)config->head_dim);
  return rope->kind == EGI_ROPE_LONG ? read_long(scaling, arena, rope) : EG_OK;
}

/* Settings that stand outside the objects, or the family's. */
static eg_status read_defaults(const egi_json *json, const egi_decoder_config *config, egi_rope_config *rope) {
  static const char *const theta[] = {"rope_theta", "rotary_emb_base", NULL};
  static const char *const share[] = {"partial_rotary_factor", "rotary_pct", NULL};
  const char *theta_key = egi_json_present(json, theta), *share_key = egi_json_present(json, share);
  *rope = (egi_rope_config){.theta = config->family->theta,
                            .rotary_share = config->family->rotary_share,
                            .low_frequency_factor = 1.0,
                            .high_frequency_factor = 4.0,
                            .beta_fast = 32.0,
                            .beta_slow = 1.0,
                            .is_truncated = true};
  if (theta_key != NULL) EG_TRY(egi_json_number(json, theta_key, &rope->theta));
  if (share_key != NULL) EG_TRY(egi_json_number(json, share_key, &rope->rotary_share));
  EG_TRY(egi_json_number(json, "max_position_embeddings", &rope->positions));
  rope->original_positions = rope->positions;
  return EG_OK;
}

/* A member that is an object; NULL when it is absent or null. */
static eg_status find_object(const egi_json *json, const char *key, json_t **out_object) {
  json_t *value = key != NULL ? json_object_get(json->object, key) : NULL;
  *out_object = json_is_object(value) ? value : NULL;
  if (value == NULL || json_is_null(value) || json_is_object(value)) return EG_OK;
  return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is not an object", json->what, key);
}

/* The settings of layers with all keys, and of those with a window where they have their own; NULL: none. */
static eg_status find_settings(const egi_json *json, egi_json *out_full, egi_json *out_local) {
  static const char *const keys[] = {"rope_scaling", "rope_parameters", NULL};
  egi_json settings = *json;
  EG_TRY(find_object(json, egi_json_present(json, keys), &settings.object));
  *out_full = *out_local = settings;
  EG_TRY(find_object(&settings, "full_attention", &out_full->object));
  EG_TRY(find_object(&settings, "sliding_attention", &out_local->object));
  bool is_nested = json_object_get(settings.object, "full_attention") != NULL || out_local->object != NULL;
  if (!is_nested) out_full->object = settings.object;
  return EG_OK;
}

eg_status egi_rope_read(const egi_json *json, egi_arena *arena, egi_decoder_config *config) {
  egi_rope_config rope;
  egi_json full, local;
  EG_TRY(read_defaults(json, config, &rope));
  EG_TRY(find_settings(json, &full, &local));
  config->ropes[1] = rope;
  if (full.object == NULL && (config->family->flags & EGI_FAMILY_YARN)) {
    rope.kind = EGI_ROPE_YARN;
    rope.factor = 32.0;
    rope.original_positions = 4096.0;
    rope.is_truncated = false;
  }
  config->ropes[0] = rope;
  EG_TRY(settle(json, &full, arena, config, &config->ropes[0]));
  if (!(config->family->flags & EGI_FAMILY_LOCAL_ROPE)) return EG_OK;
  config->ropes[1].theta = 10000.0;
  EG_TRY(egi_json_number(json, "rope_local_base_freq", &config->ropes[1].theta));
  return settle(json, &local, arena, config, &config->ropes[1]);
}

/* ---- frequencies ---- */

/* Wavelengths beyond the old context are stretched by `factor`, short ones stay, those between are blended. */
static double scale_llama3(const egi_rope_config *rope, double frequency) {
  double wavelength = 2.0 * acos(-1.0) / frequency;
  double low = rope->low_frequency_factor, high = rope->high_frequency_factor;
  if (wavelength > rope->original_positions / low) return frequency / rope->factor;
  if (wavelength < rope->original_positions / high) return frequency;
  double smooth = (rope->original_positions / wavelength - low) / (high - low);
  return (1.0 - smooth) * frequency / rope->factor + smooth * frequency;
}

/* The pair (as a real number) that turns `turns` times over the old context: YaRN, arXiv 2309.00071, §3.2. */
static double pair_of_turns(const egi_rope_config *rope, double turns) {
  return (double)rope->rotary_dim * log(rope->original_positions / (turns * 2.0 * acos(-1.0))) /
         (2.0 * log(rope->theta));
}

/* Pairs before `low` keep their frequency, those after `high` are stretched, a ramp between. */
static double scale_yarn(const egi_rope_config *rope, double frequency, int64_t pair) {
  double low = pair_of_turns(rope, rope->beta_fast), high = pair_of_turns(rope, rope->beta_slow);
  if (rope->is_truncated) low = floor(low), high = ceil(high);
  low = fmax(low, 0.0);
  high = fmin(high, (double)(rope->rotary_dim - 1));
  if (!(high < low) && !(high > low)) high += 0.001;
  double ramp = fmin(fmax(((double)pair - low) / (high - low), 0.0), 1.0);
  return frequency / rope->factor * ramp + frequency * (1.0 - ramp);
}

void egi_rope_frequencies(const egi_rope_config *rope, bool is_long, float *out_frequencies) {
  for (int64_t i = 0; i < rope->rotary_dim / 2; i++) {
    double frequency = pow(rope->theta, -2.0 * (double)i / (double)rope->rotary_dim);
    if (rope->kind == EGI_ROPE_LINEAR) frequency /= rope->factor;
    if (rope->kind == EGI_ROPE_LLAMA3) frequency = scale_llama3(rope, frequency);
    if (rope->kind == EGI_ROPE_YARN) frequency = scale_yarn(rope, frequency, i);
    if (rope->kind == EGI_ROPE_LONG) frequency /= is_long ? rope->long_factors[i] : rope->short_factors[i];
    out_frequencies[i] = (float)frequency;
  }
}
