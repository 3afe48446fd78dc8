/* The parts of a line of JSON that datasets are made of. Every error names file and line. */
#include "io/documents_scan.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { MAX_DEPTH = 64, NO_LABEL = -100 };

eg_status egi_scan_fail(const egi_scanner *s, const char *reason) {
  return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: %s", s->path, s->line, reason);
}

static void skip_space(egi_scanner *s) {
  while (s->at < s->end && (*s->at == ' ' || *s->at == '\t' || *s->at == '\r')) s->at++;
}

/* Skips space and takes the character if it is next. */
bool egi_scan_take(egi_scanner *s, char c) {
  skip_space(s);
  if (s->at >= s->end || *s->at != (uint8_t)c) return false;
  s->at++;
  return true;
}

/* A string after its opening quote; *out_begin and *out_length are its bytes with escapes as they stand. */
eg_status egi_scan_string(egi_scanner *s, const uint8_t **out_begin, size_t *out_length) {
  *out_begin = s->at;
  while (s->at < s->end && *s->at != '"') {
    if (*s->at < 0x20) return egi_scan_fail(s, "control character in a string");
    if (*s->at == '\\') {
      s->at++;
      if (s->at >= s->end || strchr("\"\\/bfnrtu", *s->at) == NULL || *s->at == 0)
        return egi_scan_fail(s, "unknown escape in a string");
    }
    s->at++;
  }
  if (s->at >= s->end) return egi_scan_fail(s, "string without an end");
  *out_length = (size_t)(s->at - *out_begin);
  s->at++;
  return EG_OK;
}

/* An integer that fits 32 bits; anything else is an error that names the field. */
eg_status egi_scan_integer(egi_scanner *s, const char *field, int64_t *out) {
  skip_space(s);
  bool is_negative = s->at < s->end && *s->at == '-';
  const uint8_t *digits = s->at + (is_negative ? 1 : 0), *p = digits;
  int64_t value = 0;
  while (p < s->end && *p >= '0' && *p <= '9' && value <= INT32_MAX) value = 10 * value + (*p++ - '0');
  bool is_integer = p > digits && !(p - digits > 1 && *digits == '0');
  if (is_integer && p < s->end && (*p == '.' || *p == 'e' || *p == 'E')) is_integer = false;
  if (!is_integer || value > INT32_MAX)
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" holds something that is not %s", s->path, s->line,
                    field, is_integer ? "a 32-bit integer" : "an integer");
  s->at = p;
  *out = is_negative ? -value : value;
  return EG_OK;
}

/* An array of tokens; writes to `values` when it is not NULL. -100 is allowed where `is_label`. */
eg_status egi_scan_tokens(egi_scanner *s, const char *field, bool is_label, int32_t *values, uint64_t *out_count) {
  uint64_t n = 0;
  if (!egi_scan_take(s, '['))
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" is not an array", s->path, s->line, field);
  if (!egi_scan_take(s, ']')) {
    do {
      int64_t value;
      EG_TRY(egi_scan_integer(s, field, &value));
      if (value < 0 && !(is_label && value == NO_LABEL))
        return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" holds %" PRId64 ", which is no token", s->path,
                        s->line, field, value);
      if (values != NULL) values[n] = (int32_t)value;
      n++;
    } while (egi_scan_take(s, ','));
    if (!egi_scan_take(s, ']'))
      return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" has no closing bracket", s->path, s->line, field);
  }
  *out_count = n;
  return EG_OK;
}

static bool is_digit(const egi_scanner *s) {
  return s->at < s->end && *s->at >= '0' && *s->at <= '9';
}

/* Digits as a number; further ones than a double holds only count. */
static double scan_digits(egi_scanner *s, double value, int64_t *n_dropped, int64_t *n_digits) {
  for (; is_digit(s); s->at++) {
    *n_digits += 1;
    if (value < 1e17)
      value = 10 * value + (*s->at - '0');
    else
      *n_dropped += 1;
  }
  return value;
}

static int64_t scan_exponent(egi_scanner *s, bool *is_number) {
  int64_t n_dropped = 0, n_digits = 0;
  s->at++;
  bool is_negative = s->at < s->end && *s->at == '-';
  if (is_negative || (s->at < s->end && *s->at == '+')) s->at++;
  double exponent = scan_digits(s, 0, &n_dropped, &n_digits);
  *is_number = *is_number && n_digits > 0 && exponent < 1000;
  return exponent < 1000 ? (int64_t)(is_negative ? -exponent : exponent) : 0;
}

/* By hand: the C library's reader follows the host's locale. */
eg_status egi_scan_number(egi_scanner *s, const char *field, double *out, bool *out_is_whole) {
  int64_t n_dropped = 0, n_digits = 0, n_fraction = 0;
  skip_space(s);
  bool is_negative = s->at < s->end && *s->at == '-';
  if (is_negative) s->at++;
  double value = scan_digits(s, 0, &n_dropped, &n_digits);
  bool is_number = n_digits > 0;
  int64_t exponent = n_dropped;
  *out_is_whole = true;
  if (is_number && s->at < s->end && *s->at == '.') {
    s->at++;
    n_dropped = 0;
    value = scan_digits(s, value, &n_dropped, &n_fraction);
    exponent += n_dropped - n_fraction;
    is_number = n_fraction > 0;
    *out_is_whole = false;
  }
  if (is_number && s->at < s->end && (*s->at == 'e' || *s->at == 'E')) {
    exponent += scan_exponent(s, &is_number);
    *out_is_whole = false;
  }
  value *= pow(10, (double)exponent);
  if (!is_number || !(value <= (double)FLT_MAX))
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" holds something that is not a number", s->path, s->line,
                    field);
  *out = is_negative ? -value : value;
  return EG_OK;
}

bool egi_scan_is_numeric(egi_scanner *s) {
  skip_space(s);
  return is_digit(s) || (s->at < s->end && (*s->at == '-' || *s->at == '['));
}

static eg_status skip_word(egi_scanner *s) {
  static const char *const words[] = {"true", "false", "null"};
  for (size_t i = 0; i < EGI_COUNT(words); i++) {
    size_t length = strlen(words[i]);
    if ((size_t)(s->end - s->at) >= length && memcmp(s->at, words[i], length) == 0) {
      s->at += length;
      return EG_OK;
    }
  }
  const uint8_t *begin = s->at;
  while (s->at < s->end && *s->at != 0 && strchr("+-.eE0123456789", *s->at) != NULL) s->at++;
  return s->at > begin ? EG_OK : egi_scan_fail(s, "not valid JSON");
}

/* Any value, checked for balance only: fields that engraft does not read. Recursion ends at MAX_DEPTH. */
static eg_status skip_value(egi_scanner *s, int depth) {
  const uint8_t *text;
  size_t length;
  if (depth > MAX_DEPTH) return egi_scan_fail(s, "nested too deeply");
  if (egi_scan_take(s, '"')) return egi_scan_string(s, &text, &length);
  bool is_object = egi_scan_take(s, '{');
  if (!is_object && !egi_scan_take(s, '[')) return skip_word(s);
  char close = is_object ? '}' : ']';
  if (egi_scan_take(s, close)) return EG_OK;
  do {
    if (is_object) {
      if (!egi_scan_take(s, '"')) return egi_scan_fail(s, "not valid JSON");
      EG_TRY(egi_scan_string(s, &text, &length));
      if (!egi_scan_take(s, ':')) return egi_scan_fail(s, "not valid JSON");
    }
    EG_TRY(skip_value(s, depth + 1));
  } while (egi_scan_take(s, ','));
  return egi_scan_take(s, close) ? EG_OK : egi_scan_fail(s, "not valid JSON");
}

eg_status egi_scan_skip(egi_scanner *s) {
  return skip_value(s, 0);
}

bool egi_scan_line(egi_scanner *s, const egi_mapping *mapping, size_t *position) {
  while (*position < mapping->size_bytes) {
    const uint8_t *begin = mapping->data + *position;
    const uint8_t *newline = memchr(begin, '\n', mapping->size_bytes - *position);
    s->at = begin;
    s->end = newline != NULL ? newline : mapping->data + mapping->size_bytes;
    s->line++;
    *position = (size_t)(s->end - mapping->data) + 1;
    skip_space(s);
    if (s->at < s->end) return true;
  }
  return false;
}
