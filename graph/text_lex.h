/* Words of the ONNX text syntax, for graph/text_parse*.c. */
#ifndef ENGRAFT_GRAPH_TEXT_LEX_H
#define ENGRAFT_GRAPH_TEXT_LEX_H

#include "graph/graph.h"

typedef enum egi_token_kind {
  EGI_TOKEN_END,
  EGI_TOKEN_NAME,   /* letters, digits, '_', '.' inside; not starting with a digit */
  EGI_TOKEN_STRING, /* quoted; `text` without quotes and escapes */
  EGI_TOKEN_INT,
  EGI_TOKEN_FLOAT,
  EGI_TOKEN_SIGN /* one character, or "=>" as '>' with is_arrow */
} egi_token_kind;

typedef struct egi_token {
  egi_token_kind kind;
  const char *text; /* NAME, STRING, INT, FLOAT: NUL-terminated, in the arena */
  char sign;
  bool is_arrow;
} egi_token;

typedef struct egi_lexer {
  eg_context *ctx;
  egi_arena *arena;
  const char *start, *next, *end;
  egi_token token; /* the present one */
} egi_lexer;

/* Reads the first word. */
eg_status egi_lexer_open(egi_lexer *lexer, const char *text, size_t length);
eg_status egi_lexer_advance(egi_lexer *lexer);
bool egi_lexer_is_sign(const egi_lexer *lexer, char sign);
bool egi_lexer_is_name(const egi_lexer *lexer, const char *name);
/* Takes the sign when it is there. */
eg_status egi_lexer_accept(egi_lexer *lexer, char sign, bool *out_is_taken);
eg_status egi_lexer_expect(egi_lexer *lexer, char sign);
eg_status egi_lexer_expect_arrow(egi_lexer *lexer);
/* A name, quoted or not; copied. */
eg_status egi_lexer_take_name(egi_lexer *lexer, const char **out_name);
eg_status egi_lexer_take_int(egi_lexer *lexer, int64_t *out_value);
/* A failure that names line and column of the present word. */
eg_status egi_lexer_fail(const egi_lexer *lexer, const char *wanted);

#endif
