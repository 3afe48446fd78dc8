/* JSON lines with input_ids and labels or prompt_length, by a scanner of their own: one pass checks and counts, a
 * second fills arrays of exactly that size. Every error names file and line. */
#include "io/io.h"

#include <inttypes.h>
#include <string.h>

enum { MAX_DEPTH = 64, NO_LABEL = -100 };

typedef struct scanner {
  eg_context *ctx;
  const char *path;
  const uint8_t *at, *end; /* of the current line */
  size_t line;
} scanner;

/* What one line holds. Arrays are NULL while counting. */
typedef struct row {
  bool has_ids, has_labels, has_prompt;
  uint64_t n_ids, n_labels;
  int64_t prompt_length;
  int32_t *ids, *labels;
} row;

static eg_status fail_line(const scanner *s, const char *reason) {
  return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: %s", s->path, s->line, reason);
}

static void skip_space(scanner *s) {
  while (s->at < s->end && (*s->at == ' ' || *s->at == '\t' || *s->at == '\r')) s->at++;
}

/* Skips space and takes the character if it is next. */
static bool take(scanner *s, char c) {
  skip_space(s);
  if (s->at >= s->end || *s->at != (uint8_t)c) return false;
  s->at++;
  return true;
}

/* A string after its opening quote; *out_begin and *out_length are its bytes with escapes as they stand. */
static eg_status scan_string(scanner *s, const uint8_t **out_begin, size_t *out_length) {
  *out_begin = s->at;
  while (s->at < s->end && *s->at != '"') {
    if (*s->at < 0x20) return fail_line(s, "control character in a string");
    if (*s->at == '\\') {
      s->at++;
      if (s->at >= s->end || strchr("\"\\/bfnrtu", *s->at) == NULL || *s->at == 0)
        return fail_line(s, "unknown escape in a string");
    }
    s->at++;
  }
  if (s->at >= s->end) return fail_line(s, "string without an end");
  *out_length = (size_t)(s->at - *out_begin);
  s->at++;
  return EG_OK;
}

/* An integer that fits 32 bits; anything else is an error that names the field. */
static eg_status scan_integer(scanner *s, const char *field, int64_t *out) {
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
static eg_status scan_tokens(scanner *s, const char *field, bool is_label, int32_t *values, uint64_t *out_count) {
  uint64_t n = 0;
  if (!take(s, '['))
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" is not an array", s->path, s->line, field);
  if (!take(s, ']')) {
    do {
      int64_t value;
      EG_TRY(scan_integer(s, field, &value));
      if (value < 0 && !(is_label && value == NO_LABEL))
        return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" holds %" PRId64 ", which is no token", s->path,
                        s->line, field, value);
      if (values != NULL) values[n] = (int32_t)value;
      n++;
    } while (take(s, ','));
    if (!take(s, ']'))
      return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" has no closing bracket", s->path, s->line, field);
  }
  *out_count = n;
  return EG_OK;
}

static eg_status skip_word(scanner *s) {
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
  return s->at > begin ? EG_OK : fail_line(s, "not valid JSON");
}

/* Any value, checked for balance only: fields that engraft does not read. Recursion ends at MAX_DEPTH. */
static eg_status skip_value(scanner *s, int depth) {
  const uint8_t *text;
  size_t length;
  if (depth > MAX_DEPTH) return fail_line(s, "nested too deeply");
  if (take(s, '"')) return scan_string(s, &text, &length);
  bool is_object = take(s, '{');
  if (!is_object && !take(s, '[')) return skip_word(s);
  char close = is_object ? '}' : ']';
  if (take(s, close)) return EG_OK;
  do {
    if (is_object) {
      if (!take(s, '"')) return fail_line(s, "not valid JSON");
      EG_TRY(scan_string(s, &text, &length));
      if (!take(s, ':')) return fail_line(s, "not valid JSON");
    }
    EG_TRY(skip_value(s, depth + 1));
  } while (take(s, ','));
  return take(s, close) ? EG_OK : fail_line(s, "not valid JSON");
}

static bool is_key(const uint8_t *text, size_t length, const char *key) {
  return strlen(key) == length && memcmp(text, key, length) == 0;
}

static eg_status scan_member(scanner *s, row *r) {
  const uint8_t *key;
  size_t length;
  if (!take(s, '"')) return fail_line(s, "not a JSON object");
  EG_TRY(scan_string(s, &key, &length));
  if (!take(s, ':')) return fail_line(s, "not a JSON object");
  if (is_key(key, length, "input_ids")) {
    if (r->has_ids) return fail_line(s, "\"input_ids\" stands twice");
    r->has_ids = true;
    return scan_tokens(s, "input_ids", false, r->ids, &r->n_ids);
  }
  if (is_key(key, length, "labels")) {
    if (r->has_labels) return fail_line(s, "\"labels\" stands twice");
    r->has_labels = true;
    return scan_tokens(s, "labels", true, r->labels, &r->n_labels);
  }
  if (is_key(key, length, "prompt_length")) {
    if (r->has_prompt) return fail_line(s, "\"prompt_length\" stands twice");
    r->has_prompt = true;
    return scan_integer(s, "prompt_length", &r->prompt_length);
  }
  if (is_key(key, length, "chosen") || is_key(key, length, "rejected"))
    return fail_line(s, "pairs of \"chosen\" and \"rejected\" need --loss dpo");
  return skip_value(s, 0);
}

static eg_status check_row(const scanner *s, const row *r) {
  if (!r->has_ids) return fail_line(s, "no \"input_ids\"");
  if (r->n_ids == 0) return fail_line(s, "\"input_ids\" is empty");
  if (r->n_ids > UINT32_MAX) return fail_line(s, "\"input_ids\" is too long");
  if (r->has_labels && r->n_labels != r->n_ids)
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: %" PRIu64 " labels for %" PRIu64 " input_ids", s->path,
                    s->line, r->n_labels, r->n_ids);
  if (r->has_labels && r->has_prompt) return fail_line(s, "both \"labels\" and \"prompt_length\"");
  if (r->has_prompt && (r->prompt_length < 0 || (uint64_t)r->prompt_length > r->n_ids))
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"prompt_length\" %" PRId64 " is not in 0 … %" PRIu64, s->path,
                    s->line, r->prompt_length, r->n_ids);
  return EG_OK;
}

static eg_status scan_row(scanner *s, row *r) {
  if (!take(s, '{')) return fail_line(s, "not a JSON object");
  if (!take(s, '}')) {
    do {
      EG_TRY(scan_member(s, r));
    } while (take(s, ','));
    if (!take(s, '}')) return fail_line(s, "not a JSON object");
  }
  skip_space(s);
  if (s->at < s->end) return fail_line(s, "something after the JSON object");
  return check_row(s, r);
}

/* Points the scanner at the next line that is not blank; false at the end. */
static bool next_line(scanner *s, const egi_mapping *mapping, size_t *position) {
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

static eg_status count_rows(scanner *s, const egi_mapping *mapping, size_t *out_rows, uint64_t *out_tokens) {
  size_t position = 0, rows = 0;
  uint64_t tokens = 0;
  while (next_line(s, mapping, &position)) {
    row r = {0};
    EG_TRY(scan_row(s, &r));
    tokens += r.n_ids;
    rows++;
  }
  if (rows == 0) return egi_fail(s->ctx, EG_ERROR_DATA, "%s: the file has no documents", s->path);
  *out_rows = rows;
  *out_tokens = tokens;
  return EG_OK;
}

static eg_status fill_rows(scanner *s, const egi_mapping *mapping, uint32_t sequence, egi_documents *documents) {
  size_t position = 0;
  s->line = 0;
  while (next_line(s, mapping, &position)) {
    uint64_t first = documents->offsets[documents->n_documents];
    row r = {.ids = documents->tokens + first, .labels = documents->labels + first};
    EG_TRY(scan_row(s, &r));
    uint64_t prompt = r.has_prompt ? (uint64_t)r.prompt_length : 0;
    for (uint64_t i = 0; i < r.n_ids && !r.has_labels; i++) r.labels[i] = i < prompt ? NO_LABEL : r.ids[i];
    if (sequence > 0 && r.n_ids > sequence) {
      r.n_ids = sequence;
      documents->n_cut++;
    }
    egi_documents_end_document(documents, r.n_ids);
  }
  return EG_OK;
}

eg_status egi_documents_read_jsonl(eg_context *ctx, const char *path, uint32_t sequence,
                                   egi_documents **out_documents) {
  egi_mapping mapping;
  egi_documents *documents = NULL;
  size_t n_documents = 0;
  uint64_t n_tokens = 0;
  EG_TRY(egi_mapping_open(ctx, path, &mapping));
  scanner s = {.ctx = ctx, .path = path};
  eg_status status = count_rows(&s, &mapping, &n_documents, &n_tokens);
  if (status == EG_OK) status = egi_documents_begin(ctx, path, n_documents, n_tokens, &documents);
  if (status == EG_OK) status = fill_rows(&s, &mapping, sequence, documents);
  egi_mapping_close(&mapping);
  if (status == EG_OK)
    *out_documents = documents;
  else
    egi_documents_free(documents);
  return status;
}
