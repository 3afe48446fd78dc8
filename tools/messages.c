/* What the command says: one line on stderr for each failure, warnings as they come. Numbers in arguments. */
#include "tools/tool.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

/* Arguments and file names may hold line breaks; a message is one line all the same. */
static void print_line(const char *prefix, const char *format, va_list arguments, const char *suffix) {
  char message[1200];
  vsnprintf(message, sizeof message, format, arguments);
  for (char *c = message; *c != '\0'; c++)
    if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = ' ';
  fprintf(stderr, "%s%s%s\n", prefix, message, suffix);
}

int tool_fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  print_line("engraft: ", format, arguments, "");
  va_end(arguments);
  return 1;
}

int tool_fail_status(const tool *t, eg_status status) {
  const char *error = eg_context_error(t->ctx);
  return tool_fail("%s", error[0] != '\0' ? error : eg_status_text(status));
}

int tool_fail_usage(const tool *t, const char *format, ...) {
  char prefix[64], suffix[256];
  va_list arguments;
  snprintf(prefix, sizeof prefix, "engraft %s: ", t->command);
  snprintf(suffix, sizeof suffix, "; usage: %s", t->usage);
  va_start(arguments, format);
  print_line(prefix, format, arguments, suffix);
  va_end(arguments);
  return 2;
}

/* Warnings, and for someone who watches what is being done. */
void tool_log(void *userdata, eg_log_level level, const char *message) {
  (void)userdata;
  if (level == EG_LOG_WARNING) fprintf(stderr, "engraft: warning: %s\n", message);
  if (level == EG_LOG_INFO && isatty(STDERR_FILENO)) fprintf(stderr, "engraft: %s\n", message);
}

/* ---- numbers ---- */

bool tool_parse_count(const char *text, uint64_t *out) {
  uint64_t value = 0;
  const char *c = text;
  for (; *c >= '0' && *c <= '9'; c++) {
    uint64_t digit = (uint64_t)(*c - '0');
    if (value > (UINT64_MAX - digit) / 10) return false;
    value = 10 * value + digit;
  }
  if (c == text) return false;
  unsigned shift = *c == 'K' ? 10 : *c == 'M' ? 20 : *c == 'G' ? 30 : 0;
  if (shift > 0) c++;
  if (*c != '\0' || value > UINT64_MAX >> shift) return false;
  *out = value << shift;
  return true;
}

bool tool_parse_real(const char *text, double *out) {
  char *end;
  errno = 0;
  double value = strtod(text, &end);
  if (end == text || *end != '\0' || !isfinite(value) || strpbrk(text, "xX \t\n") != NULL) return false;
  *out = value;
  return true;
}

eg_status tool_parse_ids(tool *t, const char *what, const char *text, int32_t **out_ids, size_t *out_count) {
  size_t capacity = 1, n = 0;
  for (const char *c = text; *c != '\0'; c++) capacity += *c == ',';
  int32_t *ids = EGI_NEW(&t->arena, int32_t, capacity);
  if (ids == NULL) return EG_ERROR_MEMORY;
  for (const char *c = text; c != NULL;) {
    size_t length = strcspn(c, ",");
    char *number = egi_arena_copy_text(&t->arena, c, length);
    uint64_t value;
    if (number == NULL) return EG_ERROR_MEMORY;
    if (!tool_parse_count(number, &value) || value > INT32_MAX)
      return egi_fail(t->ctx, EG_ERROR_ARGUMENT, "%s: \"%s\" is no token", what, number);
    ids[n++] = (int32_t)value;
    c = c[length] == ',' ? c + length + 1 : NULL;
  }
  *out_ids = ids;
  *out_count = n;
  return EG_OK;
}
