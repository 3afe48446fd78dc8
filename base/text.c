/* Growing text with sticky errors, and JSON string literals. */
#include "base/base.h"

#include <string.h>

void egi_text_init(egi_text *text, eg_context *ctx) {
  memset(text, 0, sizeof *text);
  text->ctx = ctx;
}

void egi_text_free(egi_text *text) {
  if (text->data != NULL) egi_release(text->ctx, EGI_PURPOSE_GRAPH, text->data, text->capacity);
  egi_text_init(text, text->ctx);
}

/* Room for `more` bytes and a NUL. */
static bool reserve(egi_text *text, size_t more) {
  if (text->is_failed) return false;
  size_t need;
  if (!egi_size_add(text->length, more, &need) || !egi_size_add(need, 1, &need)) {
    text->is_failed = true;
    return false;
  }
  if (need <= text->capacity) return true;
  size_t capacity = text->capacity > 0 ? text->capacity : 256;
  while (capacity < need) capacity = capacity > SIZE_MAX / 2 ? need : 2 * capacity;
  char *data = egi_allocate(text->ctx, EGI_PURPOSE_GRAPH, capacity);
  if (data == NULL) {
    text->is_failed = true;
    return false;
  }
  if (text->length > 0) memcpy(data, text->data, text->length);
  if (text->data != NULL) egi_release(text->ctx, EGI_PURPOSE_GRAPH, text->data, text->capacity);
  text->data = data;
  text->capacity = capacity;
  return true;
}

void egi_text_append(egi_text *text, const char *bytes, size_t length) {
  if (!reserve(text, length)) return;
  if (length > 0) memcpy(text->data + text->length, bytes, length);
  text->length += length;
  text->data[text->length] = '\0';
}

void egi_text_add(egi_text *text, const char *string) {
  egi_text_append(text, string, strlen(string));
}

void egi_text_format(egi_text *text, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  if (length < 0 || !reserve(text, (size_t)length)) return;
  va_start(arguments, format);
  vsnprintf(text->data + text->length, (size_t)length + 1, format, arguments);
  va_end(arguments);
  text->length += (size_t)length;
}

void egi_text_json(egi_text *text, const char *string) {
  egi_text_append(text, "\"", 1);
  for (const char *c = string; *c != '\0'; c++) {
    unsigned char byte = (unsigned char)*c;
    if (byte == '"' || byte == '\\') {
      char escaped[2] = {'\\', *c};
      egi_text_append(text, escaped, 2);
    } else if (byte == '\n') {
      egi_text_append(text, "\\n", 2);
    } else if (byte == '\t') {
      egi_text_append(text, "\\t", 2);
    } else if (byte < 0x20) {
      egi_text_format(text, "\\u%04x", byte);
    } else {
      egi_text_append(text, c, 1);
    }
  }
  egi_text_append(text, "\"", 1);
}

const char *egi_text_string(const egi_text *text) {
  return text->data != NULL ? text->data : "";
}

eg_status egi_text_status(const egi_text *text) {
  return text->is_failed ? egi_fail(text->ctx, EG_ERROR_MEMORY, "out of memory for a text") : EG_OK;
}

bool egi_has_prefix(const char *string, const char *prefix) {
  return strncmp(string, prefix, strlen(prefix)) == 0;
}

bool egi_has_suffix(const char *string, const char *suffix) {
  size_t length = strlen(string), end = strlen(suffix);
  return length >= end && strcmp(string + length - end, suffix) == 0;
}
