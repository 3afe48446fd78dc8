/* What several stores over clones of one module hold in common: weights that are made when they are loaded (codes,
 * composites, copies on a device) exist once and go with the last store that uses them. Two weights are one when all
 * that decides on their bytes is equal; pointers count only into memory of the module itself, which lives as long as
 * any clone of it does. Called by the store. */
#include <inttypes.h>
#include <stdlib.h>

#include "backend/shared_weights.h"

typedef struct entry {
  void *data; /* NULL: nobody has it */
  uint64_t size_bytes;
  uint32_t n_users;
} entry;

typedef struct range {
  const uint8_t *begin, *end;
} range;

struct egi_shared_weights {
  eg_context *ctx;
  egi_arena arena;
  egi_map places; /* what decides on the bytes -> place */
  entry *entries;
  uint32_t n_entries, entries_capacity;
  range *ranges; /* memory of the module, by address */
  size_t n_ranges;
};

/* ---- memory of the module --------------------------------------------------------------------------------------- */

static int compare_ranges(const void *a, const void *b) {
  const range *x = a, *y = b;
  return (x->begin > y->begin) - (x->begin < y->begin);
}

static eg_status list_ranges(egi_shared_weights *shared, const egi_module *module) {
  shared->ranges = EGI_NEW(&shared->arena, range, module->n_weights + 1);
  if (shared->ranges == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 1; i < module->n_weights; i++) {
    const egi_bytes *bytes = &module->weights[i].bytes;
    if (bytes->kind != EGI_BYTES_MEMORY || bytes->data == NULL || bytes->size_bytes == 0) continue;
    shared->ranges[shared->n_ranges++] = (range){bytes->data, bytes->data + bytes->size_bytes};
  }
  if (shared->n_ranges > 0) qsort(shared->ranges, shared->n_ranges, sizeof *shared->ranges, compare_ranges);
  return EG_OK;
}

/* Whether the address is inside a weight of the module; weights do not overlap but where they are equal. */
static bool is_of_module(const egi_shared_weights *shared, const uint8_t *data) {
  size_t low = 0, high = shared->n_ranges; /* the last range that begins at or before it */
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (shared->ranges[middle].begin <= data)
      low = middle + 1;
    else
      high = middle;
  }
  return low > 0 && data < shared->ranges[low - 1].end;
}

/* ---- what decides on the bytes ---------------------------------------------------------------------------------- */

static bool add_pointer(const egi_shared_weights *shared, const uint8_t *data, egi_text *key) {
  egi_text_format(key, "%" PRIxPTR " ", (uintptr_t)data);
  return is_of_module(shared, data);
}

/* false: the weight is the clone's own. */
static bool add_weight(const egi_shared_weights *shared, const egi_weight *weight, egi_text *key) {
  const egi_bytes *bytes = &weight->bytes;
  egi_text_format(key, "%d %d:", (int)weight->dtype, (int)bytes->kind);
  for (int i = 0; i < weight->rank; i++) egi_text_format(key, "%" PRId64 " ", weight->dims[i]);
  switch (bytes->kind) {
  case EGI_BYTES_MEMORY:
    return add_pointer(shared, bytes->data, key);
  case EGI_BYTES_NORMAL:
    egi_text_format(key, "%" PRIu64 " %a %s", bytes->seed, bytes->value, weight->name);
    return true;
  case EGI_BYTES_FILL:
    egi_text_format(key, "%a", bytes->value);
    return true;
  case EGI_BYTES_PARTS:
  case EGI_BYTES_MXFP4:
    for (uint32_t i = 0; i < bytes->n_parts; i++) {
      const egi_bytes_part *part = &bytes->parts[i];
      egi_text_format(key, "%" PRId64 " %" PRId64 " %d ", part->rows, part->columns, part->is_transposed);
      if (!add_pointer(shared, part->data, key)) return false;
    }
    return true;
  case EGI_BYTES_QUANTISED:
    break;
  }
  const egi_quantisation *q = bytes->quantisation;
  egi_text_format(key, "%" PRIu32 " %u %" PRId64 " %d %d %" PRId64 " %" PRId64 " %" PRId64 " of ",
                  bytes->quantised_tensor, q->type, q->block, q->is_nested, q->is_transposed, q->n_matrices, q->rows,
                  q->columns);
  return add_weight(shared, &q->matrix, key);
}

/* ---- entries ---------------------------------------------------------------------------------------------------- */

eg_status egi_shared_weights_create(eg_context *ctx, const egi_module *module, egi_shared_weights **out_shared) {
  egi_shared_weights *shared = egi_allocate(ctx, EGI_PURPOSE_GRAPH, sizeof *shared);
  if (shared == NULL) return EG_ERROR_MEMORY;
  *shared = (egi_shared_weights){.ctx = ctx};
  egi_arena_init(&shared->arena, ctx, EGI_PURPOSE_GRAPH);
  egi_map_init(&shared->places, &shared->arena);
  eg_status status = list_ranges(shared, module);
  if (status != EG_OK) {
    egi_shared_weights_destroy(shared);
    return status;
  }
  *out_shared = shared;
  return EG_OK;
}

void egi_shared_weights_destroy(egi_shared_weights *shared) {
  if (shared == NULL) return;
  egi_arena_clear(&shared->arena);
  egi_release(shared->ctx, EGI_PURPOSE_GRAPH, shared, sizeof *shared);
}

eg_status egi_shared_weights_find(egi_shared_weights *shared, const egi_backend *backend, const egi_weight *weight,
                                  uint32_t *out_place) {
  egi_text key;
  *out_place = 0;
  egi_text_init(&key, shared->ctx);
  egi_text_format(&key, "%s ", backend->name);
  bool is_shareable = add_weight(shared, weight, &key);
  eg_status status = egi_text_status(&key);
  uint32_t place = shared->n_entries;
  if (status == EG_OK && is_shareable && !egi_map_get(&shared->places, egi_text_string(&key), &place)) {
    const char *copy = egi_arena_copy_text(&shared->arena, egi_text_string(&key), key.length);
    status = copy != NULL ? egi_map_put(&shared->places, copy, place) : EG_ERROR_MEMORY;
    if (status == EG_OK)
      status = EGI_GROW(&shared->arena, &shared->entries, shared->n_entries, &shared->entries_capacity);
    if (status == EG_OK) shared->entries[shared->n_entries++] = (entry){NULL, 0, 0};
  }
  egi_text_free(&key);
  if (status == EG_OK && is_shareable) *out_place = place + 1;
  return status;
}

void *egi_shared_weights_take(egi_shared_weights *shared, uint32_t place) {
  entry *row = &shared->entries[place - 1];
  if (row->data != NULL) row->n_users++;
  return row->data;
}

void egi_shared_weights_put(egi_shared_weights *shared, uint32_t place, void *data, uint64_t size_bytes) {
  shared->entries[place - 1] = (entry){data, size_bytes, 1};
}

bool egi_shared_weights_drop(egi_shared_weights *shared, uint32_t place, uint64_t *out_size_bytes) {
  entry *row = &shared->entries[place - 1];
  if (--row->n_users > 0) return false;
  *out_size_bytes = row->size_bytes;
  row->data = NULL;
  return true;
}
