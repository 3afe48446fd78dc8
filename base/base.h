/* What every folder builds on: status, context, memory, text, hash maps, threads, files, half floats. Knows no graph.
 */
#ifndef ENGRAFT_BASE_BASE_H
#define ENGRAFT_BASE_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engraft.h"

#include "base/banned.h"

#if defined(__GNUC__)
#define EGI_PRINTF(format_index, first_argument) __attribute__((format(printf, format_index, first_argument)))
#else
#define EGI_PRINTF(format_index, first_argument)
#endif

#define EG_TRY(expression)                              \
  do {                                                  \
    eg_status egi_try_status = (expression);            \
    if (egi_try_status != EG_OK) return egi_try_status; \
  } while (0)

#define EGI_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---- status and log ------------------------------------------------------------------------------------------ */

/* Records the failure in the context, one line, and returns `status`. Call it once, where the fault is seen; callers
 * forward with EG_TRY. */
eg_status egi_fail(eg_context *ctx, eg_status status, const char *format, ...) EGI_PRINTF(3, 4);
void egi_log(eg_context *ctx, eg_log_level level, const char *format, ...) EGI_PRINTF(3, 4);

/* ---- context ------------------------------------------------------------------------------------------------- */

typedef struct egi_pool egi_pool;

/* Each object made from a context holds one reference. */
void egi_context_retain(eg_context *ctx);
void egi_context_release(eg_context *ctx);
egi_pool *egi_context_pool(eg_context *ctx);

/* ---- memory -------------------------------------------------------------------------------------------------- */

/* What host bytes are for; the context counts each. */
typedef enum egi_purpose {
  EGI_PURPOSE_GRAPH,     /* imported messages, IR, plans */
  EGI_PURPOSE_WEIGHTS,   /* base weights that had to be copied */
  EGI_PURPOSE_TRAINABLE, /* adapters or trained weights, gradients, optimizer */
  EGI_PURPOSE_STEP,      /* activations and workspace of a plan */
  EGI_PURPOSE_DATA,      /* datasets, staging */
  EGI_PURPOSE_PINNED,    /* tensors that a plan moved off the device; a backend makes it fast to copy from and to */
  EGI_PURPOSE_COUNT
} egi_purpose;

/* 64-byte aligned, uninitialised. NULL (recorded as EG_ERROR_MEMORY) when there is none; size 0 gives a valid pointer.
 */
void *egi_allocate(eg_context *ctx, egi_purpose purpose, size_t size_bytes);
void egi_release(eg_context *ctx, egi_purpose purpose, void *memory, size_t size_bytes);
/* Bytes in use for a purpose, and number of calls of egi_allocate so far: tests count a step's with it. */
size_t egi_bytes_in_use(const eg_context *ctx, egi_purpose purpose);
uint64_t egi_allocation_count(const eg_context *ctx);
/* The same without what arenas have in store, which no page is behind. */
size_t egi_bytes_touched(const eg_context *ctx, egi_purpose purpose);
/* The most of it at a time, for all purposes, since the context was made or the peak was set back to what there is. */
size_t egi_bytes_peak(const eg_context *ctx);
void egi_bytes_reset_peak(eg_context *ctx);

/* false on overflow; *out untouched then. */
bool egi_size_add(size_t a, size_t b, size_t *out);
bool egi_size_multiply(size_t a, size_t b, size_t *out);

/* Memory with one lifetime. All-zero apart from ctx and purpose is a valid empty arena. */
typedef struct egi_arena {
  eg_context *ctx;
  egi_purpose purpose;
  struct egi_arena_block *block; /* newest first */
} egi_arena;
void egi_arena_init(egi_arena *arena, eg_context *ctx, egi_purpose purpose);
/* Zeroed, 16-byte aligned (64 when size >= 64). NULL when count * size overflows or memory is out: recorded. */
void *egi_arena_get(egi_arena *arena, size_t count, size_t size_bytes);
void egi_arena_clear(egi_arena *arena);
char *egi_arena_copy_text(egi_arena *arena, const char *text, size_t length);
char *egi_arena_format(egi_arena *arena, const char *format, ...) EGI_PRINTF(2, 3);
#define EGI_NEW(arena, type, count) ((type *)egi_arena_get((arena), (count), sizeof(type)))

/* A regular expression that must match a whole text. It lives as long as the arena, which must stay where it is.
 * EG_ERROR_ARGUMENT says what is wrong with it. */
typedef struct egi_pattern egi_pattern;
eg_status egi_pattern_compile(egi_arena *arena, const char *text, egi_pattern **out_pattern);
bool egi_pattern_matches(const egi_pattern *pattern, const char *text);

/* Growing array inside an arena: makes room for one more element (old room is left to the arena; sizes double).
 * `*data` and `*capacity` are updated; new elements are zero. */
eg_status egi_arena_grow(egi_arena *arena, void **data, size_t element_bytes, uint32_t count, uint32_t *capacity);
#define EGI_GROW(arena, data, count, capacity) \
  egi_arena_grow((arena), (void **)(data), sizeof(**(data)), (count), (capacity))

/* ---- text ---------------------------------------------------------------------------------------------------- */

/* Growing text. Errors are sticky: after a failed append `is_failed` is set and further appends do nothing; check once
 * at the end with egi_text_status(). egi_text_string() is always NUL-terminated. */
typedef struct egi_text {
  eg_context *ctx;
  char *data;
  size_t length, capacity;
  bool is_failed;
} egi_text;
void egi_text_init(egi_text *text, eg_context *ctx);
void egi_text_free(egi_text *text);
void egi_text_append(egi_text *text, const char *bytes, size_t length);
void egi_text_add(egi_text *text, const char *string);
void egi_text_format(egi_text *text, const char *format, ...) EGI_PRINTF(2, 3);
/* Appends a JSON string literal with quotes. */
void egi_text_json(egi_text *text, const char *string);
const char *egi_text_string(const egi_text *text);
eg_status egi_text_status(const egi_text *text);

bool egi_has_prefix(const char *string, const char *prefix);
bool egi_has_suffix(const char *string, const char *suffix);

/* ---- maps ---------------------------------------------------------------------------------------------------- */

/* Open-addressing map from strings (not copied; they must outlive the map) to 32-bit numbers. Lives in an arena. */
typedef struct egi_map {
  egi_arena *arena;
  struct egi_map_slot *slots;
  uint32_t count, capacity;
} egi_map;
void egi_map_init(egi_map *map, egi_arena *arena);
/* false when absent. `out_value` may be NULL. */
bool egi_map_get(const egi_map *map, const char *key, uint32_t *out_value);
eg_status egi_map_put(egi_map *map, const char *key, uint32_t value);
void egi_map_remove(egi_map *map, const char *key);

/* 64-bit FNV-1a, for content hashes and map keys. */
uint64_t egi_hash(const void *bytes, size_t length, uint64_t seed);

/* ---- threads ------------------------------------------------------------------------------------------------- */

/* Runs task(argument, i) for i in [0, n_tasks) on the pool and returns when all are done. The split into tasks must not
 * depend on the number of threads: then results do not either. Tasks allocate nothing and never call egi_pool_run. */
typedef void (*egi_task)(void *argument, size_t index, size_t worker);
eg_status egi_pool_create(eg_context *ctx, int n_threads, egi_pool **out_pool);
void egi_pool_destroy(eg_context *ctx, egi_pool *pool);
void egi_pool_run(egi_pool *pool, size_t n_tasks, egi_task task, void *argument);
/* Number of workers; `worker` above is below it. */
size_t egi_pool_size(const egi_pool *pool);

/* Bytes that the process could still take; UINT64_MAX where the system does not say. */
uint64_t egi_memory_available(void);

/* ---- files --------------------------------------------------------------------------------------------------- */

/* A whole file mapped read-only. */
typedef struct egi_mapping {
  const uint8_t *data;
  size_t size_bytes;
} egi_mapping;
eg_status egi_mapping_open(eg_context *ctx, const char *path, egi_mapping *out_mapping);
void egi_mapping_close(egi_mapping *mapping);

/* Output through PATH.tmp-PID, renamed by egi_file_commit(), removed by egi_file_abandon(): a failed save leaves the
 * old file as it was. A PATH that is a device or a pipe is written itself. */
typedef struct egi_file egi_file;
eg_status egi_file_create(eg_context *ctx, const char *path, egi_file **out_file);
eg_status egi_file_write(egi_file *file, const void *bytes, size_t size_bytes);
eg_status egi_file_commit(egi_file *file); /* frees `file` whether it succeeds or not */
void egi_file_abandon(egi_file *file);
eg_status egi_make_directory(eg_context *ctx, const char *path);
/* DIRECTORY/NAME in the arena. */
char *egi_path_join(egi_arena *arena, const char *directory, const char *name);
/* The directory part of a path, "." when there is none. */
char *egi_path_directory(egi_arena *arena, const char *path);

/* ---- numbers ------------------------------------------------------------------------------------------------- */

float egi_f16_to_f32(uint16_t bits);
uint16_t egi_f32_to_f16(float value); /* round to nearest even, overflow to infinity */
float egi_bf16_to_f32(uint16_t bits);
uint16_t egi_f32_to_bf16(float value); /* round to nearest even, NaN stays NaN */

/* Philox 4x32-10 (Salmon et al., SC 2011): 4 random words for a key and a counter; a pure function. */
void egi_philox(uint64_t key, const uint32_t counter[4], uint32_t out_words[4]);
/* Uniform in [0, 1), and a standard normal (Box-Muller), for element `index` of stream `stream` under `seed`. */
double egi_random_uniform(uint64_t seed, uint64_t stream, uint64_t index);
double egi_random_normal(uint64_t seed, uint64_t stream, uint64_t index);

/* Seconds of a monotonic clock. */
double egi_clock(void);

#endif
