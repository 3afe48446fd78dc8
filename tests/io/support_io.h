/* Shared by the io tests: a context, files in a temporary folder, and a check of the last error. */
#ifndef ENGRAFT_TESTS_IO_SUPPORT_IO_H
#define ENGRAFT_TESTS_IO_SUPPORT_IO_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "io/io.h"

typedef struct io_fixture {
  eg_context *ctx;
  char directory[128];
  char path[256];
  char warning[512]; /* the last one logged */
} io_fixture;

int io_setup(void **state);
int io_teardown(void **state);
/* Writes bytes to NAME in the folder; fixture->path is its path afterwards. */
const char *io_write(io_fixture *fixture, const char *name, const void *bytes, size_t size_bytes);
/* The last error holds `part` and is one line. */
void io_expect_error(io_fixture *fixture, const char *part);

#endif
