/* Splits the ONNX text syntax into words; '#' starts a comment that ends with the line. */
#include "graph/text_lex.h"

#include <errno.h>
#include <string.h>

static bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
static bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static void skip_space(egi_lexer *lexer) {
  while (lexer->next < lexer->end) {
    char c = *lexer->next;
    if (c == '#')
      while (lexer->next < lexer->end && *lexer->next != '\n') lexer->next++;
    else if (c == ' ' || c == '\t' || c == '\n' || c == '\r')
      lexer->next++;
    else
      return;
  }
}

eg_status egi_lexer_fail(const egi_lexer *lexer, const char *wanted) {
  unsigned line = 1, column = 1;
  for (const char *c = lexer->start; c < lexer->next; c++) {
    column = *c == '\n' ? 1 : column + 1;
    line += *c == '\n';
  }
  char sign[2] = {lexer->token.sign, '\0'};
  const char *found = lexer->token.kind == EGI_TOKEN_END    ? "the end"
                      : lexer->token.kind == EGI_TOKEN_SIGN ? sign
                                                            : lexer->token.text;
  return egi_fail(lexer->ctx, EG_ERROR_FORMAT, "text, before line %u column %u: %s expected, found %.80s", line, column,
                  wanted, found);
}

static eg_status read_string(egi_lexer *lexer) {
  const char *begin = lexer->next + 1, *end = begin;
  while (end < lexer->end && *end != '"') end += *end == '\\' && end + 1 < lexer->end ? 2 : 1;
  char *text = egi_arena_get(lexer->arena, (size_t)(end - begin) + 1, 1);
  if (text == NULL) return EG_ERROR_MEMORY;
  size_t length = 0;
  for (const char *c = begin; c < end; c++) {
    if (*c == '\\' && c + 1 < end) c++;
    text[length++] = *c;
  }
  lexer->token.text = text;
  if (end >= lexer->end) return egi_lexer_fail(lexer, "closing quote");
  lexer->next = end + 1;
  lexer->token.kind = EGI_TOKEN_STRING;
  return EG_OK;
}

static eg_status copy_word(egi_lexer *lexer, const char *end) {
  lexer->token.text = egi_arena_copy_text(lexer->arena, lexer->next, (size_t)(end - lexer->next));
  lexer->next = end;
  return lexer->token.text != NULL ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status read_number(egi_lexer *lexer) {
  const char *c = lexer->next + (*lexer->next == '-' || *lexer->next == '+');
  bool is_float = false;
  while (c < lexer->end && (is_digit(*c) || *c == '.' || *c == 'e' || *c == 'E' ||
                            ((*c == '-' || *c == '+') && (c[-1] == 'e' || c[-1] == 'E')))) {
    is_float = is_float || !is_digit(*c);
    c++;
  }
  lexer->token.kind = is_float ? EGI_TOKEN_FLOAT : EGI_TOKEN_INT;
  return copy_word(lexer, c);
}

static bool starts_with(const egi_lexer *lexer, const char *word) {
  size_t length = strlen(word);
  return (size_t)(lexer->end - lexer->next) >= length && memcmp(lexer->next, word, length) == 0;
}

eg_status egi_lexer_advance(egi_lexer *lexer) {
  skip_space(lexer);
  memset(&lexer->token, 0, sizeof lexer->token);
  if (lexer->next >= lexer->end) return EG_OK;
  char c = *lexer->next;
  if (c == '"') return read_string(lexer);
  if (starts_with(lexer, "-inf")) {
    lexer->token.kind = EGI_TOKEN_FLOAT;
    return copy_word(lexer, lexer->next + 4);
  }
  bool is_signed = (c == '-' || c == '+') && lexer->next + 1 < lexer->end;
  if (is_digit(c) || (is_signed && (is_digit(lexer->next[1]) || lexer->next[1] == '.'))) return read_number(lexer);
  if (is_letter(c)) {
    const char *end = lexer->next;
    while (end < lexer->end && (is_letter(*end) || is_digit(*end) || *end == '.')) end++;
    lexer->token.kind = EGI_TOKEN_NAME;
    return copy_word(lexer, end);
  }
  lexer->token.kind = EGI_TOKEN_SIGN;
  lexer->token.sign = c;
  lexer->token.is_arrow = starts_with(lexer, "=>");
  lexer->next += lexer->token.is_arrow ? 2 : 1;
  return EG_OK;
}

eg_status egi_lexer_open(egi_lexer *lexer, const char *text, size_t length) {
  lexer->start = lexer->next = text;
  lexer->end = text + length;
  return egi_lexer_advance(lexer);
}

bool egi_lexer_is_sign(const egi_lexer *lexer, char sign) {
  return lexer->token.kind == EGI_TOKEN_SIGN && lexer->token.sign == sign && !lexer->token.is_arrow;
}

bool egi_lexer_is_name(const egi_lexer *lexer, const char *name) {
  return lexer->token.kind == EGI_TOKEN_NAME && strcmp(lexer->token.text, name) == 0;
}

eg_status egi_lexer_accept(egi_lexer *lexer, char sign, bool *out_is_taken) {
  *out_is_taken = egi_lexer_is_sign(lexer, sign);
  return *out_is_taken ? egi_lexer_advance(lexer) : EG_OK;
}

eg_status egi_lexer_expect(egi_lexer *lexer, char sign) {
  char wanted[4] = {'\'', sign, '\'', '\0'};
  if (!egi_lexer_is_sign(lexer, sign)) return egi_lexer_fail(lexer, wanted);
  return egi_lexer_advance(lexer);
}

eg_status egi_lexer_expect_arrow(egi_lexer *lexer) {
  if (lexer->token.kind != EGI_TOKEN_SIGN || !lexer->token.is_arrow) return egi_lexer_fail(lexer, "'=>'");
  return egi_lexer_advance(lexer);
}

eg_status egi_lexer_take_name(egi_lexer *lexer, const char **out_name) {
  if (lexer->token.kind != EGI_TOKEN_NAME && lexer->token.kind != EGI_TOKEN_STRING)
    return egi_lexer_fail(lexer, "a name");
  *out_name = lexer->token.text;
  return egi_lexer_advance(lexer);
}

eg_status egi_lexer_take_int(egi_lexer *lexer, int64_t *out_value) {
  if (lexer->token.kind != EGI_TOKEN_INT) return egi_lexer_fail(lexer, "an integer");
  errno = 0;
  *out_value = strtoll(lexer->token.text, NULL, 10);
  if (errno == ERANGE) {
    /* bit patterns of unsigned 64-bit numbers */
    errno = 0;
    unsigned long long bits = strtoull(lexer->token.text, NULL, 10);
    if (errno == ERANGE || lexer->token.text[0] == '-') return egi_lexer_fail(lexer, "an integer of 64 bits");
    *out_value = (int64_t)bits;
  }
  return egi_lexer_advance(lexer);
}
