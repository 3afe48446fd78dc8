/* engraft inspect: what a model is, as JSON or as a short text. */
#include "tools/tool.h"

#include <string.h>

#include <jansson.h>

static int append(void *userdata, const void *bytes, size_t size_bytes) {
  egi_text_append(userdata, bytes, size_bytes);
  return 0;
}

static void print_values(const char *title, const json_t *values) {
  printf("%s\n", title);
  for (size_t i = 0; i < json_array_size(values); i++) {
    const json_t *value = json_array_get(values, i);
    const json_t *shape = json_object_get(value, "shape");
    printf("  %s %s[", json_string_value(json_object_get(value, "name")),
           json_string_value(json_object_get(value, "dtype")));
    for (size_t axis = 0; axis < json_array_size(shape); axis++) {
      const json_t *dim = json_array_get(shape, axis);
      if (axis > 0) printf(", ");
      if (json_is_integer(dim))
        printf("%lld", (long long)json_integer_value(dim));
      else
        printf("%s", json_string_value(dim));
    }
    printf("]\n");
  }
}

static void print_counts(const char *title, json_t *counts) {
  const char *key;
  json_t *value;
  printf("%s\n ", title);
  json_object_foreach(counts, key, value)
      printf(" %s %lld", key[0] != '\0' ? key : "ai.onnx", (long long)json_integer_value(value));
  printf("\n");
}

/* Module names that an adapter can be grafted to, without their layers. */
static void print_targets(const json_t *targets) {
  printf("%zu linear layers that adapters can be grafted to:", json_array_size(targets));
  for (size_t i = 0; i < json_array_size(targets); i++) {
    const char *path = json_string_value(json_array_get(targets, i)), *dot = strrchr(path, '.');
    const char *name = dot != NULL ? dot + 1 : path;
    bool is_new = true;
    for (size_t j = 0; j < i && is_new; j++) {
      const char *other = json_string_value(json_array_get(targets, j)), *other_dot = strrchr(other, '.');
      is_new = strcmp(other_dot != NULL ? other_dot + 1 : other, name) != 0;
    }
    if (is_new) printf(" %s", name);
  }
  printf("\n");
}

static long long number(const json_t *object, const char *key) {
  return (long long)json_integer_value(json_object_get(object, key));
}

/* "16, all": windows of layers, equal ones in a row once with their count. */
static void print_windows(const json_t *windows) {
  printf("  keys that a query sees:");
  for (size_t i = 0, next; i < json_array_size(windows); i = next) {
    long long window = (long long)json_integer_value(json_array_get(windows, i));
    for (next = i + 1; next < json_array_size(windows); next++)
      if (json_integer_value(json_array_get(windows, next)) != window) break;
    printf(i > 0 ? ", " : " ");
    if (window > 0)
      printf("%lld", window);
    else
      printf("all");
    if (next - i > 1) printf(" x %zu", next - i);
  }
  printf("\n");
}

static void print_structure(const json_t *s) {
  const json_t *rope = json_object_get(s, "rope");
  double softcap = json_number_value(json_object_get(s, "softcap"));
  printf("structure\n  %lld layers of width %lld, vocabulary %lld%s\n", number(s, "layers"), number(s, "hidden"),
         number(s, "vocab"), json_is_true(json_object_get(s, "tied_head")) ? ", head tied to the embedding" : "");
  printf("  %lld heads of %lld over %lld key heads%s%s", number(s, "heads"), number(s, "head_dim"),
         number(s, "kv_heads"), json_is_true(json_object_get(s, "qk_norm")) ? ", normalised queries and keys" : "",
         json_is_true(json_object_get(s, "sinks")) ? ", sinks" : "");
  if (softcap > 0.0) printf(", scores capped at %g", softcap);
  printf("\n");
  if (json_array_size(json_object_get(s, "windows")) > 0) print_windows(json_object_get(s, "windows"));
  if (json_is_object(rope))
    printf("  rotary embedding of %lld elements, %s, %lld table%s\n", number(rope, "dim"),
           json_is_true(json_object_get(rope, "interleaved")) ? "interleaved" : "in halves", number(rope, "tables"),
           number(rope, "tables") == 1 ? "" : "s");
  if (number(s, "experts") > 0)
    printf("  %lld experts, %lld for each token\n", number(s, "experts"), number(s, "top_k"));
  print_counts("recognised", json_object_get(s, "counts"));
}

static void print_left(const json_t *left) {
  if (json_array_size(left) > 0) printf("not recognised\n");
  for (size_t i = 0; i < json_array_size(left); i++)
    printf("  %s (%s)\n", json_string_value(json_object_get(json_array_get(left, i), "node")),
           json_string_value(json_object_get(json_array_get(left, i), "op")));
}

static eg_status print_summary(tool *t, const egi_text *text) {
  json_t *root;
  EG_TRY(egi_json_parse(t->ctx, "inspect", egi_text_string(text), text->length, &root));
  const json_t *parameters = json_object_get(root, "parameters");
  print_values("inputs", json_object_get(root, "inputs"));
  print_values("outputs", json_object_get(root, "outputs"));
  print_counts("operator sets", json_object_get(root, "opset"));
  print_counts("operators", json_object_get(root, "ops"));
  printf("%lld weights, %lld numbers, %lld bytes\n",
         (long long)json_integer_value(json_object_get(parameters, "tensors")),
         (long long)json_integer_value(json_object_get(parameters, "elements")),
         (long long)json_integer_value(json_object_get(parameters, "bytes")));
  print_structure(json_object_get(root, "structure"));
  print_left(json_object_get(root, "unrecognised"));
  print_targets(json_object_get(root, "targets"));
  json_decref(root);
  return EG_OK;
}

int tool_inspect(tool *t) {
  eg_model *model = NULL;
  egi_text text;
  egi_text_init(&text, t->ctx);
  eg_status status = tool_load_model(t, &model);
  if (status == EG_OK) status = eg_model_inspect(model, append, &text);
  if (status == EG_OK) status = egi_text_status(&text);
  if (status == EG_OK && tool_is_given(t, OPTION_JSON))
    fputs(egi_text_string(&text), stdout);
  else if (status == EG_OK)
    status = print_summary(t, &text);
  egi_text_free(&text);
  eg_model_destroy(model);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
