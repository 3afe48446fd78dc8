/* The context: allocator, logger, last error, thread pool; counted references so that handles may die in any order. */
#include "base/context.h"

#include <stdlib.h>
#include <string.h>

static void *system_allocate(void *userdata, size_t size_bytes, size_t alignment) {
  void *memory = NULL;
  (void)userdata;
  return posix_memalign(&memory, alignment, size_bytes) == 0 ? memory : NULL;
}

static void system_release(void *userdata, void *memory, size_t size_bytes) {
  (void)userdata;
  (void)size_bytes;
  free(memory);
}

eg_status eg_context_create(const eg_context_options *options, eg_context **out_context) {
  static const eg_allocator system_allocator = {system_allocate, system_release, NULL};
  eg_context_options defaults = EG_CONTEXT_OPTIONS_INIT;
  if (out_context == NULL) return EG_ERROR_ARGUMENT;
  if (options != NULL) {
    size_t known = options->struct_size < sizeof defaults ? options->struct_size : sizeof defaults;
    memcpy(&defaults, options, known);
  }
  const eg_allocator *allocator = defaults.allocator != NULL ? defaults.allocator : &system_allocator;
  if (allocator->allocate == NULL || allocator->release == NULL || defaults.n_threads < 0) return EG_ERROR_ARGUMENT;

  eg_context *ctx = allocator->allocate(allocator->userdata, sizeof *ctx, 64);
  if (ctx == NULL) return EG_ERROR_MEMORY;
  memset(ctx, 0, sizeof *ctx);
  ctx->allocator = *allocator;
  ctx->log = defaults.log;
  ctx->log_userdata = defaults.log_userdata;
  ctx->references = 1;
  eg_status status = egi_pool_create(ctx, defaults.n_threads, &ctx->pool);
  if (status != EG_OK) {
    allocator->release(allocator->userdata, ctx, sizeof *ctx);
    return status;
  }
  *out_context = ctx;
  return EG_OK;
}

void egi_context_retain(eg_context *ctx) {
  ctx->references++;
}

void egi_context_release(eg_context *ctx) {
  if (--ctx->references > 0) return;
  egi_pool_destroy(ctx, ctx->pool);
  eg_allocator allocator = ctx->allocator;
  allocator.release(allocator.userdata, ctx, sizeof *ctx);
}

void eg_context_destroy(eg_context *context) {
  if (context != NULL) egi_context_release(context);
}

const char *eg_context_error(const eg_context *context) {
  return context != NULL ? context->error : "";
}

egi_pool *egi_context_pool(eg_context *ctx) {
  return ctx->pool;
}

/* A message is one line whatever text of a file went into it. */
static void flatten_line(char *message) {
  for (char *c = message; *c != '\0'; c++)
    if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = ' ';
}

eg_status egi_fail(eg_context *ctx, eg_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(ctx->error, sizeof ctx->error, format, arguments);
  va_end(arguments);
  flatten_line(ctx->error);
  return status;
}

void egi_log(eg_context *ctx, eg_log_level level, const char *format, ...) {
  char message[1024];
  va_list arguments;
  if (ctx->log == NULL) return;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  flatten_line(message);
  ctx->log(ctx->log_userdata, level, message);
}

const char *eg_status_text(eg_status status) {
  switch (status) {
  case EG_OK:
    return "ok";
  case EG_ERROR_ARGUMENT:
    return "wrong argument";
  case EG_ERROR_MEMORY:
    return "out of memory";
  case EG_ERROR_IO:
    return "input or output failed";
  case EG_ERROR_FORMAT:
    return "malformed file";
  case EG_ERROR_UNSUPPORTED:
    return "not supported";
  case EG_ERROR_SHAPE:
    return "shapes or types contradict each other";
  case EG_ERROR_DATA:
    return "data does not fit the model";
  case EG_ERROR_BUDGET:
    return "over a budget or limit";
  case EG_ERROR_DEVICE:
    return "device failure";
  case EG_ERROR_STOPPED:
    return "stopped on request";
  case EG_ERROR_INTERNAL:
    return "internal error";
  }
  return "unknown status";
}

const char *eg_version(void) {
  return "0.1.0";
}
