/* Options: one table for all commands, read from the command line and then from a --config file. */
#include "tools/tool.h"

#include <string.h>

#include <jansson.h>

typedef enum option_kind { KIND_STRING, KIND_FLAG, KIND_COUNT, KIND_REAL, KIND_CHOICE } option_kind;

typedef struct option_row {
  const char *name;
  option_kind kind;
  const char *commands; /* i inspect, r rewrite, R run, p plan, t train, e eval, g generate, x export, n new, b bench */
  const char *known, *supported, *default_text;
} option_row;

static const option_row rows[] = {
#define OPTION(symbol, name, kind, commands, known, supported, default_text) \
  {name, KIND_##kind, commands, known, supported, default_text},
#include "tools/options.def"
#undef OPTION
};

static bool is_listed(const char *list, const char *value) {
  size_t length = strlen(value);
  for (const char *at = list; *at != '\0';) {
    size_t n = strcspn(at, "|");
    if (n == length && memcmp(at, value, n) == 0) return true;
    at += n + (at[n] == '|' ? 1 : 0);
  }
  return false;
}

/* What train and bench have in common are train options: a plan is made for them. */
static bool is_accepted(const option_row *row, char letter) {
  bool is_train_option = strchr(row->commands, 't') != NULL && strchr(row->commands, 'b') != NULL;
  return strchr(row->commands, letter) != NULL || (letter == 'p' && is_train_option);
}

/* The row of an option of this command; OPTION_COUNT when there is none. */
static tool_option_id find_option(const tool *t, const char *name, size_t length) {
  for (int i = 0; i < OPTION_COUNT; i++)
    if (strlen(rows[i].name) == length && memcmp(rows[i].name, name, length) == 0 && is_accepted(&rows[i], t->letter))
      return (tool_option_id)i;
  return OPTION_COUNT;
}

void tool_print_help(const tool *t) {
  static const char *const kinds[] = {"TEXT", "", "N", "NUMBER", ""};
  printf("usage: %s\n", t->usage);
  for (int i = 0; i < OPTION_COUNT; i++) {
    if (!is_accepted(&rows[i], t->letter)) continue;
    printf("  %s %s", rows[i].name, rows[i].kind == KIND_CHOICE ? rows[i].known : kinds[rows[i].kind]);
    if (rows[i].default_text[0] != '\0') printf("  (%s)", rows[i].default_text);
    printf("\n");
  }
}

/* Checks and stores a value; what is wrong with it, or NULL. */
static const char *store(tool_value *value, const option_row *row, const char *text) {
  switch (row->kind) {
  case KIND_COUNT:
    if (!tool_parse_count(text, &value->count)) return "is no whole number";
    break;
  case KIND_REAL:
    if (!tool_parse_real(text, &value->number)) return "is no number";
    break;
  case KIND_CHOICE:
    if (!is_listed(row->known, text)) return "is not one of";
    break;
  case KIND_STRING:
  case KIND_FLAG:
    if (text[0] == '\0') return "is empty";
    break;
  }
  value->text = text;
  return NULL;
}

static int set_option(tool *t, tool_option_id id, const char *text) {
  const option_row *row = &rows[id];
  const char *problem = store(&t->values[id], row, text);
  t->values[id].is_given = true;
  if (problem == NULL) return 0;
  return tool_fail_usage(t, "%s \"%s\" %s %s", row->name, text, problem, row->known);
}

/* ---- --config ---- */

/* The text that the command line would have for a JSON value; NULL when there is none. */
static const char *text_of(tool *t, const option_row *row, const json_t *value) {
  if (json_is_string(value)) return egi_arena_copy_text(&t->arena, json_string_value(value), json_string_length(value));
  if (json_is_integer(value)) return egi_arena_format(&t->arena, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
  if (json_is_real(value)) return egi_arena_format(&t->arena, "%.17g", json_real_value(value));
  if (json_is_true(value) && row->kind == KIND_FLAG) return "true";
  if (!json_is_array(value)) return NULL;
  const char *joined = "";
  for (size_t i = 0; i < json_array_size(value) && joined != NULL; i++) {
    const char *part = json_is_array(json_array_get(value, i)) ? NULL : text_of(t, row, json_array_get(value, i));
    joined = part != NULL ? egi_arena_format(&t->arena, "%s%s%s", joined, i > 0 ? "," : "", part) : NULL;
  }
  return joined;
}

static int apply_member(tool *t, const char *file, const char *key, const json_t *value) {
  char *name = egi_arena_format(&t->arena, "--%s", key);
  if (name == NULL) return tool_fail("out of memory");
  for (char *c = name; *c != '\0'; c++)
    if (*c == '_') *c = '-';
  tool_option_id id = find_option(t, name, strlen(name));
  if (id == OPTION_COUNT || id == OPTION_CONFIG) return tool_fail_usage(t, "%s: unknown option \"%s\"", file, key);
  if (t->values[id].is_given || json_is_null(value)) return 0; /* the command line goes first */
  if (json_is_false(value) && rows[id].kind == KIND_FLAG) return 0;
  const char *text = text_of(t, &rows[id], value);
  if (text == NULL) return tool_fail_usage(t, "%s: the value of \"%s\" has a wrong type", file, key);
  return set_option(t, id, text);
}

static int apply_config(tool *t) {
  const char *file = t->values[OPTION_CONFIG].text;
  json_t *root;
  const char *key;
  json_t *value;
  int code = 0;
  eg_status status = egi_json_read(t->ctx, file, &root);
  if (status != EG_OK) return tool_fail_status(t, status);
  json_object_foreach(root, key, value) if (code == 0) code = apply_member(t, file, key, value);
  json_decref(root);
  return code;
}

/* ---- command line ---- */

/* One argument; *index moves over a value that stands behind it. */
static int apply_argument(tool *t, int n_arguments, char **arguments, int *index) {
  const char *argument = arguments[*index];
  const char *equals = strchr(argument, '=');
  size_t length = equals != NULL ? (size_t)(equals - argument) : strlen(argument);
  if (argument[0] != '-' || argument[1] == '\0') {
    if (t->model != NULL) return tool_fail_usage(t, "unexpected argument \"%s\"", argument);
    t->model = argument;
    return 0;
  }
  tool_option_id id = find_option(t, argument, length);
  if (id == OPTION_COUNT) return tool_fail_usage(t, "unknown option \"%.*s\"", (int)length, argument);
  if (rows[id].kind == KIND_FLAG)
    return equals == NULL ? set_option(t, id, "true") : tool_fail_usage(t, "%s takes no value", rows[id].name);
  if (equals != NULL) return set_option(t, id, equals + 1);
  if (*index + 1 >= n_arguments) return tool_fail_usage(t, "%s needs a value", rows[id].name);
  return set_option(t, id, arguments[++*index]);
}

int tool_parse(tool *t, int n_arguments, char **arguments) {
  int code = 0;
  for (int i = 0; i < OPTION_COUNT; i++) {
    t->values[i].text = "";
    if (rows[i].default_text[0] != '\0') (void)store(&t->values[i], &rows[i], rows[i].default_text);
  }
  for (int i = 0; i < n_arguments && code == 0; i++) code = apply_argument(t, n_arguments, arguments, &i);
  if (code == 0 && (t->letter == 't' || t->letter == 'p') && t->values[OPTION_CONFIG].is_given) code = apply_config(t);
  return code;
}

static bool is_supported(const option_row *row, const tool_value *value) {
  uint64_t count;
  double number;
  if (strcmp(row->supported, "*") == 0) return true;
  if (row->kind == KIND_COUNT) return tool_parse_count(row->supported, &count) && count == value->count;
  if (row->kind == KIND_REAL)
    return tool_parse_real(row->supported, &number) && !(number < value->number) && !(number > value->number);
  return is_listed(row->supported, value->text);
}

int tool_check_supported(const tool *t) {
  for (int i = 0; i < OPTION_COUNT; i++) {
    if (!t->values[i].is_given || is_supported(&rows[i], &t->values[i])) continue;
    if (rows[i].kind == KIND_FLAG) return tool_fail("%s is not in this version", rows[i].name);
    return tool_fail("%s %s is not in this version", rows[i].name, t->values[i].text);
  }
  return 0;
}

const char *tool_text(const tool *t, tool_option_id id) {
  return t->values[id].text[0] != '\0' ? t->values[id].text : NULL;
}

eg_dtype tool_dtype(const tool *t, tool_option_id id) {
  static const struct {
    const char *name;
    eg_dtype dtype;
  } types[] = {{"f32", EG_DTYPE_F32}, {"bf16", EG_DTYPE_BF16}, {"f16", EG_DTYPE_F16}};
  for (size_t i = 0; i < EGI_COUNT(types); i++)
    if (strcmp(types[i].name, t->values[id].text) == 0) return types[i].dtype;
  return EG_DTYPE_UNDEFINED;
}

bool tool_is_given(const tool *t, tool_option_id id) {
  return t->values[id].is_given;
}
