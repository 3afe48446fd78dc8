/* Rotary position settings and their frequencies, as transformers/modeling_rope_utils.py computes them. */
#include "io/io.h"

#include <math.h>
#include <string.h>

#include <jansson.h>

static eg_status read_kind(const egi_json *json, egi_rope_config *rope) {
  const char *kind = NULL;
  EG_TRY(egi_json_string(json, "type", &kind));
  EG_TRY(egi_json_string(json, "rope_type", &kind));
  if (kind == NULL || strcmp(kind, "default") == 0)
    rope->kind = EGI_ROPE_DEFAULT;
  else if (strcmp(kind, "linear") == 0)
    rope->kind = EGI_ROPE_LINEAR;
  else if (strcmp(kind, "llama3") == 0)
    rope->kind = EGI_ROPE_LLAMA3;
  else
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: rotary scaling \"%s\" is not supported", json->what, kind);
  return EG_OK;
}

static eg_status read_scaling(const egi_json *json, egi_rope_config *rope) {
  EG_TRY(read_kind(json, rope));
  EG_TRY(egi_json_number(json, "rope_theta", &rope->theta));
  EG_TRY(egi_json_number(json, "factor", &rope->factor));
  EG_TRY(egi_json_number(json, "low_freq_factor", &rope->low_frequency_factor));
  EG_TRY(egi_json_number(json, "high_freq_factor", &rope->high_frequency_factor));
  return egi_json_number(json, "original_max_position_embeddings", &rope->original_positions);
}

eg_status egi_rope_read(const egi_json *config, egi_rope_config *out_rope) {
  egi_rope_config rope = {EGI_ROPE_DEFAULT, 10000.0, 1.0, 1.0, 4.0, 0.0};
  EG_TRY(egi_json_number(config, "rope_theta", &rope.theta));
  EG_TRY(egi_json_number(config, "max_position_embeddings", &rope.original_positions));
  static const char *const keys[] = {"rope_scaling", "rope_parameters"};
  for (size_t i = 0; i < EGI_COUNT(keys); i++) {
    egi_json scaling = {config->ctx, config->what, json_object_get(config->object, keys[i])};
    if (scaling.object == NULL || json_is_null(scaling.object)) continue;
    if (!json_is_object(scaling.object))
      return egi_fail(config->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is not an object", config->what, keys[i]);
    EG_TRY(read_scaling(&scaling, &rope));
  }
  bool is_right = rope.theta > 1.0 && rope.factor > 0.0;
  if (rope.kind == EGI_ROPE_LLAMA3)
    is_right = is_right && rope.original_positions > 0.0 && rope.low_frequency_factor > 0.0 &&
               rope.high_frequency_factor > rope.low_frequency_factor;
  if (!is_right)
    return egi_fail(config->ctx, EG_ERROR_FORMAT, "%s: the rotary settings are out of range", config->what);
  *out_rope = rope;
  return EG_OK;
}

/* Wavelengths beyond the old context are stretched by `factor`, short ones stay, those between are blended. */
static double scale_llama3(const egi_rope_config *rope, double frequency) {
  double wavelength = 2.0 * acos(-1.0) / frequency;
  double low = rope->low_frequency_factor, high = rope->high_frequency_factor;
  if (wavelength > rope->original_positions / low) return frequency / rope->factor;
  if (wavelength < rope->original_positions / high) return frequency;
  double smooth = (rope->original_positions / wavelength - low) / (high - low);
  return (1.0 - smooth) * frequency / rope->factor + smooth * frequency;
}

void egi_rope_frequencies(const egi_rope_config *rope, int64_t head_dim, float *out_frequencies) {
  for (int64_t i = 0; i < head_dim / 2; i++) {
    double frequency = pow(rope->theta, -2.0 * (double)i / (double)head_dim);
    if (rope->kind == EGI_ROPE_LINEAR) frequency /= rope->factor;
    if (rope->kind == EGI_ROPE_LLAMA3) frequency = scale_llama3(rope, frequency);
    out_frequencies[i] = (float)frequency;
  }
}
