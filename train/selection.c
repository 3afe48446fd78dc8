/* Which modules an adapter is for, by PEFT's rules (peft/tuners/tuners_utils.py, check_target_module_exists): a list of
 * names, each the whole path or its end after a dot, or one regular expression for the whole path. */
#include "train/train.h"

#include <stdlib.h>
#include <string.h>

bool egi_is_expression(const char *text) {
  return strpbrk(text, "\\^$*+?()[]{}|") != NULL;
}

eg_status egi_modules_read(egi_arena *arena, const char *text, egi_modules *out_modules) {
  *out_modules = (egi_modules){.names = text};
  if (text == NULL || !egi_is_expression(text)) return EG_OK;
  return egi_pattern_compile(arena, text, &out_modules->expression);
}

bool egi_modules_match(const egi_modules *modules, const char *path) {
  if (modules->names == NULL || path == NULL) return false;
  if (modules->expression != NULL) return egi_pattern_matches(modules->expression, path);
  return egi_path_is_named(path, modules->names);
}

/* ---- NAME=NUMBER,… ---------------------------------------------------------------------------------------------- */

static eg_status read_one(egi_arena *arena, const char *option, const char *at, size_t length, egi_peft_pattern *out) {
  const char *text = egi_arena_copy_text(arena, at, length);
  char *equals = text != NULL ? strrchr(text, '=') : NULL;
  char *end = NULL;
  if (text == NULL) return EG_ERROR_MEMORY;
  if (equals != NULL) *equals = '\0';
  uint64_t whole = equals != NULL ? strtoull(equals + 1, &end, 10) : 0;
  bool is_number = equals != NULL && equals > text && equals[1] >= '0' && equals[1] <= '9' && *end == '\0';
  if (!is_number || whole < 1 || whole > 65536)
    return egi_fail(arena->ctx, EG_ERROR_ARGUMENT, "%s: \"%.*s\" is not NAME=NUMBER with a number of 1 to 65536",
                    option, (int)length, at);
  *out = (egi_peft_pattern){.key = text, .value = (double)whole};
  return egi_peft_pattern_compile(arena, out);
}

eg_status egi_patterns_read(egi_arena *arena, const char *option, const char *text,
                            const egi_peft_pattern **out_patterns, size_t *out_count) {
  size_t count = 0, n = 0;
  *out_patterns = NULL;
  *out_count = 0;
  if (text == NULL || text[0] == '\0') return EG_OK;
  for (const char *at = text; *at != '\0'; at++) count += *at == ',';
  egi_peft_pattern *patterns = EGI_NEW(arena, egi_peft_pattern, count + 1);
  if (patterns == NULL) return EG_ERROR_MEMORY;
  for (const char *at = text; at != NULL;) {
    size_t length = strcspn(at, ",");
    EG_TRY(read_one(arena, option, at, length, &patterns[n++]));
    at = at[length] != '\0' ? at + length + 1 : NULL;
  }
  *out_patterns = patterns;
  *out_count = n;
  return EG_OK;
}
