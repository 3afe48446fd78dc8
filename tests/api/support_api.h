/* Shared by the API tests: a small llama made on the spot, documents, and an allocator that can fail. */
#ifndef ENGRAFT_TESTS_API_SUPPORT_API_H
#define ENGRAFT_TESTS_API_SUPPORT_API_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "train/train.h"

enum { API_VOCABULARY = 48 };

typedef struct api_fixture {
  eg_context *ctx;
  char directory[128];
  char model_path[192];
  char warning[512];               /* the last one */
  size_t n_rungs;                  /* plans tried for a memory budget */
  size_t n_live;                   /* allocations not released */
  uint64_t n_allocations, fail_at; /* the allocation with this number (from 1) fails, 0: none */
} api_fixture;

int api_setup(void **state);    /* one thread */
int api_teardown(void **state); /* everything must have been released */
/* A context of the fixture's allocator; the caller destroys it. */
eg_context *api_context(api_fixture *fixture, int n_threads);
void api_must(const eg_context *ctx, eg_status status);
/* The last error is one line and holds `part`. */
void api_expect_error(const eg_context *ctx, const char *part);
const char *api_path(api_fixture *fixture, char *buffer, size_t size, const char *name);
void api_write(api_fixture *fixture, const char *name, const char *text);
eg_model *api_model(api_fixture *fixture, eg_context *ctx);
/* `count` documents of different lengths up to `longest`, all tokens labels. */
eg_dataset *api_dataset(eg_context *ctx, size_t count, uint32_t longest);
/* Options of a small, quick trainer. */
eg_trainer_options api_options(void);
/* All parameters, or gradients, one after the other; the caller frees them with free(). */
float *api_read(eg_trainer *trainer, bool is_gradient, size_t *out_count);

#endif
