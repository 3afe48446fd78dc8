/* Linear4bit of bitsandbytes in safetensors files: the packed weight, its scales, maps, and a JSON text that says what
 * they are. Read where they lie; written as bitsandbytes writes them, byte for byte. */
#include <float.h>
#include <string.h>

#include <jansson.h>

#include "base/blockwise.h"
#include "io/io.h"

static const char *const type_names[] = {"fp4", "nf4"};
static const char *const suffixes[EGI_BNB_TENSORS] = {
    "", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__"};

static bool is_of_nesting(unsigned tensor) {
  return tensor == EGI_BNB_NESTED || tensor == EGI_BNB_NESTED_MAP;
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static eg_status find(egi_arena *arena, const egi_bnb_source *source, const char *name, const char *suffix,
                      const egi_safetensor **out_tensor) {
  const char *full = egi_arena_format(arena, "%s%s", name, suffix);
  *out_tensor = NULL;
  return full ? source->find(source->userdata, full, out_tensor) : EG_ERROR_MEMORY;
}

static eg_status read_shape(const egi_json *json, egi_bnb_state *state) {
  json_t *shape = json_object_get(json->object, "shape");
  bool is_matrix = json_array_size(shape) == 2;
  for (size_t i = 0; is_matrix && i < 2; i++) {
    const json_t *size = json_array_get(shape, i);
    is_matrix = json_is_integer(size) && json_integer_value(size) > 0 && json_integer_value(size) < INT64_C(1) << 31;
  }
  if (!is_matrix) return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"shape\" is no matrix", json->what);
  state->out_features = json_integer_value(json_array_get(shape, 0));
  state->in_features = json_integer_value(json_array_get(shape, 1));
  return EG_OK;
}

static eg_status read_nesting(const egi_json *json, egi_bnb_state *state) {
  int64_t block = 0;
  const char *dtype = NULL;
  state->is_nested = json_object_get(json->object, "nested_blocksize") != NULL;
  if (!state->is_nested) return EG_OK;
  EG_TRY(egi_json_integer(json, "nested_blocksize", 1, INT32_MAX, &block));
  EG_TRY(egi_json_string(json, "nested_dtype", &dtype));
  if (block != EGI_NESTED_BLOCK || (dtype && strcmp(dtype, "float32") != 0))
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: scales nested in blocks of %lld, type %s", json->what,
                    (long long)block, dtype ? dtype : "");
  return egi_json_number(json, "nested_offset", &state->offset);
}

static eg_status read_fields(const egi_json *json, egi_arena *arena, egi_bnb_state *state) {
  const char *type = NULL, *dtype = "float32";
  EG_TRY(egi_json_string(json, "quant_type", &type));
  EG_TRY(egi_json_string(json, "dtype", &dtype));
  EG_TRY(egi_json_integer(json, "blocksize", 1, 1 << 20, &state->block));
  EG_TRY(read_shape(json, state));
  EG_TRY(read_nesting(json, state));
  state->type = EGI_COUNT(type_names);
  for (unsigned i = 0; type && i < EGI_COUNT(type_names); i++)
    if (strcmp(type, type_names[i]) == 0) state->type = i;
  if (state->type == EGI_COUNT(type_names) || state->block < 1)
    return egi_fail(json->ctx, EG_ERROR_UNSUPPORTED, "%s: \"quant_type\" \"%s\" in blocks of %lld", json->what,
                    type ? type : "", (long long)state->block);
  state->dtype = egi_arena_copy_text(arena, dtype, strlen(dtype));
  return state->dtype ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status read_state(egi_arena *arena, const char *what, const egi_safetensor *text, egi_bnb_state *state) {
  egi_json json = {arena->ctx, what, NULL};
  json_t *root = NULL;
  *state = (egi_bnb_state){.type = 0};
  json.what = egi_arena_format(arena, "%s: \"%s\"", what, text->name);
  if (json.what == NULL) return EG_ERROR_MEMORY;
  if (text->dtype != EG_DTYPE_U8) return egi_fail(arena->ctx, EG_ERROR_FORMAT, "%s is no text", json.what);
  EG_TRY(egi_json_parse(arena->ctx, json.what, (const char *)text->data, (size_t)text->size_bytes, &root));
  json.object = root;
  eg_status status = read_fields(&json, arena, state);
  json_decref(root);
  return status;
}

/* Elements that a tensor must have. */
static uint64_t wanted_count(const egi_bnb_state *state, unsigned tensor) {
  uint64_t n = (uint64_t)state->out_features * (uint64_t)state->in_features;
  uint64_t n_blocks = (n + (uint64_t)state->block - 1) / (uint64_t)state->block;
  switch (tensor) {
  case EGI_BNB_CODES:
    return (n + 1) / 2;
  case EGI_BNB_ABSMAX:
    return n_blocks;
  case EGI_BNB_MAP:
    return 16;
  case EGI_BNB_NESTED:
    return (n_blocks + EGI_NESTED_BLOCK - 1) / EGI_NESTED_BLOCK;
  default:
    return 256;
  }
}

/* Codes may lie in the file as any type of the same bytes ("quant_storage"). */
static bool fits(const egi_bnb_state *state, unsigned tensor, const egi_safetensor *found) {
  if (tensor == EGI_BNB_CODES) return found->size_bytes == wanted_count(state, tensor);
  eg_dtype dtype = tensor == EGI_BNB_ABSMAX && state->is_nested ? EG_DTYPE_U8 : EG_DTYPE_F32;
  uint64_t bytes = wanted_count(state, tensor) * (dtype == EG_DTYPE_U8 ? 1 : sizeof(float));
  return found->dtype == dtype && found->size_bytes == bytes;
}

static eg_status check_map(egi_arena *arena, const egi_bnb_source *source, const egi_bnb_state *state,
                           const egi_safetensor *map) {
  const float *levels = egi_four_bit_levels((egi_four_bit)state->type);
  float values[16];
  memcpy(values, map->data, sizeof values);
  for (int i = 0; i < 16; i++)
    if (!(values[i] - levels[i] <= 1e-4F && levels[i] - values[i] <= 1e-4F))
      return egi_fail(arena->ctx, EG_ERROR_UNSUPPORTED, "%s: \"%s\" holds other levels than those of %s", source->what,
                      map->name, type_names[state->type]);
  return EG_OK;
}

eg_status egi_bnb_read(egi_arena *arena, const egi_bnb_source *source, const char *name, egi_bnb_state *out_state,
                       egi_safetensor out_tensors[EGI_BNB_TENSORS], bool *out_is_there) {
  const egi_safetensor *found = NULL;
  *out_is_there = false;
  for (unsigned i = 0; i < EGI_COUNT(type_names) && found == NULL; i++) {
    const char *suffix = egi_arena_format(arena, "%s%s", suffixes[EGI_BNB_STATE], type_names[i]);
    if (!suffix) return EG_ERROR_MEMORY;
    EG_TRY(find(arena, source, name, suffix, &found));
  }
  if (found == NULL) return EG_OK;
  memset(out_tensors, 0, EGI_BNB_TENSORS * sizeof *out_tensors);
  out_tensors[EGI_BNB_STATE] = *found;
  EG_TRY(read_state(arena, source->what, found, out_state));
  for (unsigned i = 0; i < EGI_BNB_STATE; i++) {
    if (is_of_nesting(i) && !out_state->is_nested) continue;
    EG_TRY(find(arena, source, name, suffixes[i], &found));
    if (found == NULL)
      return egi_fail(arena->ctx, EG_ERROR_FORMAT, "%s: no tensor \"%s%s\" beside its state", source->what, name,
                      suffixes[i]);
    if (!fits(out_state, i, found))
      return egi_fail(arena->ctx, EG_ERROR_FORMAT, "%s: tensor \"%s\" does not fit a matrix [%lld,%lld]", source->what,
                      found->name, (long long)out_state->out_features, (long long)out_state->in_features);
    out_tensors[i] = *found;
  }
  *out_is_there = true;
  return check_map(arena, source, out_state, &out_tensors[EGI_BNB_MAP]);
}

eg_status egi_bnb_nested(egi_arena *arena, const egi_bnb_state *state, const egi_safetensor *tensors,
                         float **out_nested) {
  float *nested = EGI_NEW(arena, float, (size_t)egi_nested_count(wanted_count(state, EGI_BNB_ABSMAX)));
  if (!nested) return EG_ERROR_MEMORY;
  nested[0] = (float)state->offset;
  memcpy(nested + 1, tensors[EGI_BNB_NESTED_MAP].data, (size_t)tensors[EGI_BNB_NESTED_MAP].size_bytes);
  memcpy(nested + EGI_NESTED_HEADER, tensors[EGI_BNB_NESTED].data, (size_t)tensors[EGI_BNB_NESTED].size_bytes);
  *out_nested = nested;
  return EG_OK;
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

/* As Python writes a float: the fewest digits that read back as the number, with an exponent below 1e-4 and from 1e16
 * on. */
static void add_number(egi_text *text, double number) {
  char digits[40] = "";
  int precision = 0, exponent = 0;
  for (double back = 0.0; precision < DBL_DECIMAL_DIG; precision++) {
    (void)snprintf(digits, sizeof digits, "%.*e", precision, number);
    if (sscanf(digits, "%lf", &back) == 1 && !(back < number) && !(back > number)) break;
  }
  const char *tail = strchr(digits, 'e');
  if (tail != NULL) (void)sscanf(tail + 1, "%d", &exponent);
  if (exponent < -4 || exponent >= 16)
    egi_text_add(text, digits);
  else
    egi_text_format(text, "%.*f", precision - exponent > 1 ? precision - exponent : 1, number);
}

static void add_state(egi_text *text, const egi_bnb_state *state) {
  egi_text_format(text, "{\"quant_type\": \"%s\", \"blocksize\": %lld, \"dtype\": \"%s\", \"shape\": [%lld, %lld]",
                  type_names[state->type], (long long)state->block, state->dtype, (long long)state->out_features,
                  (long long)state->in_features);
  if (state->is_nested) {
    egi_text_format(text,
                    ", \"nested_blocksize\": %d, \"nested_dtype\": \"float32\", \"nested_offset\": ", EGI_NESTED_BLOCK);
    add_number(text, state->offset);
  }
  egi_text_add(text, "}");
}

static eg_status make_state(egi_arena *arena, const egi_bnb_state *state, egi_safetensor *tensor) {
  egi_text text;
  egi_text_init(&text, arena->ctx);
  add_state(&text, state);
  eg_status status = egi_text_status(&text);
  char *copy = status == EG_OK ? egi_arena_copy_text(arena, egi_text_string(&text), text.length) : NULL;
  tensor->dtype = EG_DTYPE_U8;
  tensor->rank = 1;
  tensor->dims[0] = (int64_t)text.length;
  tensor->data = (const uint8_t *)copy;
  tensor->size_bytes = text.length;
  egi_text_free(&text);
  return status != EG_OK ? status : copy ? EG_OK : EG_ERROR_MEMORY;
}

eg_status egi_bnb_write(egi_arena *arena, const char *name, const egi_bnb_state *state,
                        egi_safetensor tensors[EGI_BNB_TENSORS], size_t *out_count) {
  size_t count = 0;
  EG_TRY(make_state(arena, state, &tensors[EGI_BNB_STATE]));
  for (unsigned i = 0; i < EGI_BNB_TENSORS; i++) {
    if (is_of_nesting(i) && !state->is_nested) continue;
    egi_safetensor tensor = tensors[i];
    tensor.name =
        egi_arena_format(arena, "%s%s%s", name, suffixes[i], i == EGI_BNB_STATE ? type_names[state->type] : "");
    if (!tensor.name) return EG_ERROR_MEMORY;
    tensors[count++] = tensor;
  }
  *out_count = count;
  return EG_OK;
}
