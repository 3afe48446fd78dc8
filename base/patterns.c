/* Regular expressions, PCRE2's: compiled into an arena, so that nothing has to be released. Matching is bounded, since
 * expressions come with adapter folders: one that takes too many steps matches nothing. */
#include "base/base.h"

#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

enum { MATCH_LIMIT = 1000000, HEAP_LIMIT_KIB = 1024 };

struct egi_pattern {
  pcre2_code *code;
  pcre2_match_data *data;
  pcre2_match_context *limits;
};

static void *allocate(size_t size_bytes, void *arena) {
  return egi_arena_get(arena, 1, size_bytes > 0 ? size_bytes : 1);
}

static void keep(void *memory, void *arena) {
  (void)memory; /* the arena's */
  (void)arena;
}

eg_status egi_pattern_compile(egi_arena *arena, const char *text, egi_pattern **out_pattern) {
  int error = 0;
  size_t offset = 0;
  unsigned char message[128];
  egi_pattern *pattern = EGI_NEW(arena, egi_pattern, 1);
  pcre2_general_context *memory = pcre2_general_context_create(allocate, keep, arena);
  pcre2_compile_context *context = memory != NULL ? pcre2_compile_context_create(memory) : NULL;
  if (pattern == NULL || context == NULL) return EG_ERROR_MEMORY;
  pattern->code = pcre2_compile((const unsigned char *)text, PCRE2_ZERO_TERMINATED, PCRE2_ANCHORED | PCRE2_ENDANCHORED,
                                &error, &offset, context);
  if (pattern->code == NULL) {
    if (pcre2_get_error_message(error, message, sizeof message) < 0) message[0] = '\0';
    return egi_fail(arena->ctx, EG_ERROR_ARGUMENT, "the regular expression \"%s\" is wrong at character %zu: %s", text,
                    offset + 1, (const char *)message);
  }
  pattern->data = pcre2_match_data_create(1, memory);
  pattern->limits = pcre2_match_context_create(memory);
  if (pattern->data == NULL || pattern->limits == NULL) return EG_ERROR_MEMORY;
  (void)pcre2_set_match_limit(pattern->limits, MATCH_LIMIT);
  (void)pcre2_set_heap_limit(pattern->limits, HEAP_LIMIT_KIB);
  *out_pattern = pattern;
  return EG_OK;
}

bool egi_pattern_matches(const egi_pattern *pattern, const char *text) {
  return pcre2_match(pattern->code, (const unsigned char *)text, strlen(text), 0, 0, pattern->data, pattern->limits) >=
         0;
}
