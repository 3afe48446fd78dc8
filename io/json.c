/* JSON settings files through jansson: strict parsing and typed members whose errors name file and key. */
#include "io/io.h"

#include <inttypes.h>
#include <math.h>

#include <jansson.h>

eg_status egi_json_parse(eg_context *ctx, const char *what, const char *text, size_t length, struct json_t **out_root) {
  json_error_t error;
  json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
  if (root == NULL)
    return egi_fail(ctx, EG_ERROR_FORMAT, "%s: line %d, column %d: %s", what, error.line, error.column, error.text);
  if (!json_is_object(root)) {
    json_decref(root);
    return egi_fail(ctx, EG_ERROR_FORMAT, "%s: not a JSON object", what);
  }
  *out_root = root;
  return EG_OK;
}

eg_status egi_json_read(eg_context *ctx, const char *path, struct json_t **out_root) {
  egi_mapping mapping;
  EG_TRY(egi_mapping_open(ctx, path, &mapping));
  const char *text = mapping.size_bytes > 0 ? (const char *)mapping.data : "";
  eg_status status = egi_json_parse(ctx, path, text, mapping.size_bytes, out_root);
  egi_mapping_close(&mapping);
  return status;
}

/* The member, or NULL when it is absent or null. */
static json_t *member(const egi_json *json, const char *key) {
  json_t *value = json_object_get(json->object, key);
  return json_is_null(value) ? NULL : value;
}

static eg_status fail_type(const egi_json *json, const char *key, const char *wanted) {
  return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is not %s", json->what, key, wanted);
}

eg_status egi_json_integer(const egi_json *json, const char *key, int64_t minimum, int64_t maximum, int64_t *out) {
  json_t *value = member(json, key);
  if (value == NULL) return EG_OK;
  if (!json_is_integer(value)) return fail_type(json, key, "an integer");
  json_int_t number = json_integer_value(value);
  if (number < minimum || number > maximum)
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is %" JSON_INTEGER_FORMAT ", not in %" PRId64 " … %" PRId64,
                    json->what, key, number, minimum, maximum);
  *out = number;
  return EG_OK;
}

eg_status egi_json_number(const egi_json *json, const char *key, double *out) {
  json_t *value = member(json, key);
  if (value == NULL) return EG_OK;
  if (!json_is_number(value) || !isfinite(json_number_value(value))) return fail_type(json, key, "a number");
  *out = json_number_value(value);
  return EG_OK;
}

eg_status egi_json_boolean(const egi_json *json, const char *key, bool *out) {
  json_t *value = member(json, key);
  if (value == NULL) return EG_OK;
  if (!json_is_boolean(value)) return fail_type(json, key, "true or false");
  *out = json_is_true(value);
  return EG_OK;
}

eg_status egi_json_string(const egi_json *json, const char *key, const char **out) {
  json_t *value = member(json, key);
  if (value == NULL) return EG_OK;
  if (!json_is_string(value)) return fail_type(json, key, "a string");
  *out = json_string_value(value);
  return EG_OK;
}
