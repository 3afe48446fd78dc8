/* A scanner of JSON lines, for the readers of datasets alone. */
#ifndef ENGRAFT_IO_DOCUMENTS_SCAN_H
#define ENGRAFT_IO_DOCUMENTS_SCAN_H

#include "io/io.h"

typedef struct egi_scanner {
  eg_context *ctx;
  const char *path;
  const uint8_t *at, *end; /* of the current line */
  size_t line;
} egi_scanner;

/* EG_ERROR_DATA with file and line. */
eg_status egi_scan_fail(const egi_scanner *s, const char *reason);
/* Points the scanner at the next line that is not blank; false at the end. */
bool egi_scan_line(egi_scanner *s, const egi_mapping *mapping, size_t *position);
/* Skips space and takes the character if it is next. */
bool egi_scan_take(egi_scanner *s, char c);
/* A string after its opening quote; *out_begin and *out_length are its bytes with escapes as they stand. */
eg_status egi_scan_string(egi_scanner *s, const uint8_t **out_begin, size_t *out_length);
/* An integer that fits 32 bits; anything else is an error that names the field. */
eg_status egi_scan_integer(egi_scanner *s, const char *field, int64_t *out);
/* A number that a float holds; whole: written without a fraction. */
eg_status egi_scan_number(egi_scanner *s, const char *field, double *out, bool *out_is_whole);
/* Whether a number or an array comes next. */
bool egi_scan_is_numeric(egi_scanner *s);
/* An array of tokens; writes to `values` when it is not NULL. -100 is allowed where `is_label`. */
eg_status egi_scan_tokens(egi_scanner *s, const char *field, bool is_label, int32_t *values, uint64_t *out_count);
/* Any value, checked for balance only: fields that engraft does not read. */
eg_status egi_scan_skip(egi_scanner *s);

#endif
