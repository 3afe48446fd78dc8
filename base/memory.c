/* Counted host memory, checked sizes, and arenas: blocks that double in size, freed together. */
#include "base/context.h"

#include <stdalign.h>
#include <string.h>

static void note_touched(eg_context *ctx, size_t more_bytes) {
  ctx->touched_bytes += more_bytes;
  if (ctx->touched_bytes > ctx->peak_bytes) ctx->peak_bytes = ctx->touched_bytes;
}

/* Of which `spare_bytes` are not handed out yet: untouched, they are no memory of the machine's. */
static void *allocate(eg_context *ctx, egi_purpose purpose, size_t size_bytes, size_t spare_bytes) {
  size_t size = size_bytes > 0 ? size_bytes : 1;
  void *memory = NULL;
  if (size <= SIZE_MAX - 64) memory = ctx->allocator.allocate(ctx->allocator.userdata, size, 64);
  if (memory == NULL) {
    (void)egi_fail(ctx, EG_ERROR_MEMORY, "out of memory: %zu bytes", size_bytes);
    return NULL;
  }
  ctx->n_allocations++;
  ctx->bytes_in_use[purpose] += size_bytes;
  ctx->spare_bytes[purpose] += spare_bytes;
  note_touched(ctx, size_bytes - spare_bytes);
  return memory;
}

static void release(eg_context *ctx, egi_purpose purpose, void *memory, size_t size_bytes, size_t spare_bytes) {
  if (memory == NULL) return;
  ctx->bytes_in_use[purpose] -= size_bytes;
  ctx->spare_bytes[purpose] -= spare_bytes;
  ctx->touched_bytes -= size_bytes - spare_bytes;
  ctx->allocator.release(ctx->allocator.userdata, memory, size_bytes > 0 ? size_bytes : 1);
}

void *egi_allocate(eg_context *ctx, egi_purpose purpose, size_t size_bytes) {
  return allocate(ctx, purpose, size_bytes, 0);
}

void egi_release(eg_context *ctx, egi_purpose purpose, void *memory, size_t size_bytes) {
  release(ctx, purpose, memory, size_bytes, 0);
}

size_t egi_bytes_in_use(const eg_context *ctx, egi_purpose purpose) {
  return ctx->bytes_in_use[purpose];
}
size_t egi_bytes_touched(const eg_context *ctx, egi_purpose purpose) {
  return ctx->bytes_in_use[purpose] - ctx->spare_bytes[purpose];
}
size_t egi_bytes_peak(const eg_context *ctx) {
  return ctx->peak_bytes;
}
void egi_bytes_reset_peak(eg_context *ctx) {
  ctx->peak_bytes = ctx->touched_bytes;
}
uint64_t egi_allocation_count(const eg_context *ctx) {
  return ctx->n_allocations;
}

bool egi_size_add(size_t a, size_t b, size_t *out) {
  if (a > SIZE_MAX - b) return false;
  *out = a + b;
  return true;
}

bool egi_size_multiply(size_t a, size_t b, size_t *out) {
  if (b != 0 && a > SIZE_MAX / b) return false;
  *out = a * b;
  return true;
}

/* ---- arena ---- */

struct egi_arena_block {
  struct egi_arena_block *older;
  size_t size_bytes; /* of the whole block, header included */
  size_t used_bytes;
};

enum { BLOCK_HEADER = 64, FIRST_BLOCK = 4096, LARGEST_BLOCK = 1 << 20 };

void egi_arena_init(egi_arena *arena, eg_context *ctx, egi_purpose purpose) {
  arena->ctx = ctx;
  arena->purpose = purpose;
  arena->block = NULL;
}

/* Blocks double up to a cap; what is larger than the next block gets one of its own. */
static struct egi_arena_block *add_block(egi_arena *arena, size_t need_bytes) {
  size_t size = arena->block != NULL ? 2 * arena->block->size_bytes : FIRST_BLOCK;
  if (size > LARGEST_BLOCK) size = LARGEST_BLOCK;
  size_t least;
  if (!egi_size_add(need_bytes, BLOCK_HEADER, &least)) {
    (void)egi_fail(arena->ctx, EG_ERROR_MEMORY, "out of memory: %zu bytes", need_bytes);
    return NULL;
  }
  if (size < least) size = least;
  struct egi_arena_block *block = allocate(arena->ctx, arena->purpose, size, size - BLOCK_HEADER);
  if (block == NULL) return NULL;
  block->size_bytes = size;
  block->used_bytes = BLOCK_HEADER;
  if (arena->block != NULL && size == least && arena->block->size_bytes - arena->block->used_bytes > FIRST_BLOCK) {
    /* a large piece goes behind a block that still has room */
    block->older = arena->block->older;
    arena->block->older = block;
  } else {
    block->older = arena->block;
    arena->block = block;
  }
  return block;
}

void *egi_arena_get(egi_arena *arena, size_t count, size_t size_bytes) {
  size_t bytes;
  if (!egi_size_multiply(count, size_bytes, &bytes) || bytes > SIZE_MAX - 256) {
    (void)egi_fail(arena->ctx, EG_ERROR_MEMORY, "out of memory: %zu elements of %zu bytes", count, size_bytes);
    return NULL;
  }
  size_t alignment = bytes >= 64 ? 64 : 16;
  struct egi_arena_block *block = arena->block;
  size_t start = block != NULL ? (block->used_bytes + alignment - 1) & ~(alignment - 1) : 0;
  if (block == NULL || start > block->size_bytes || block->size_bytes - start < bytes) {
    block = add_block(arena, bytes);
    if (block == NULL) return NULL;
    start = block->used_bytes;
  }
  arena->ctx->spare_bytes[arena->purpose] -= start + bytes - block->used_bytes;
  note_touched(arena->ctx, start + bytes - block->used_bytes);
  block->used_bytes = start + bytes;
  void *memory = (uint8_t *)block + start;
  memset(memory, 0, bytes);
  return memory;
}

void egi_arena_clear(egi_arena *arena) {
  while (arena->block != NULL) {
    struct egi_arena_block *block = arena->block;
    arena->block = block->older;
    release(arena->ctx, arena->purpose, block, block->size_bytes, block->size_bytes - block->used_bytes);
  }
}

char *egi_arena_copy_text(egi_arena *arena, const char *text, size_t length) {
  char *copy = egi_arena_get(arena, length + 1, 1);
  if (copy != NULL && length > 0) memcpy(copy, text, length);
  return copy;
}

char *egi_arena_format(egi_arena *arena, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  if (length < 0) return NULL;
  char *text = egi_arena_get(arena, (size_t)length + 1, 1);
  if (text == NULL) return NULL;
  va_start(arguments, format);
  vsnprintf(text, (size_t)length + 1, format, arguments);
  va_end(arguments);
  return text;
}

eg_status egi_arena_grow(egi_arena *arena, void **data, size_t element_bytes, uint32_t count, uint32_t *capacity) {
  if (count < *capacity) return EG_OK;
  if (*capacity > UINT32_MAX / 2)
    return egi_fail(arena->ctx, EG_ERROR_BUDGET, "more than %u rows in a table", *capacity);
  uint32_t larger = *capacity > 0 ? 2 * *capacity : 8;
  void *copy = egi_arena_get(arena, larger, element_bytes);
  if (copy == NULL) return EG_ERROR_MEMORY;
  if (count > 0) memcpy(copy, *data, count * element_bytes);
  *data = copy;
  *capacity = larger;
  return EG_OK;
}
