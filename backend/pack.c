/* Offsets for pieces of memory with lifetimes (dynamic storage allocation). The largest items are placed first, each in
 * the smallest gap that fits between those it meets in time (greedy by size: Pisarchyk and Lee, Efficient Memory
 * Management for Deep Neural Net Inference, 2020). That is quadratic: in long lists only items of several streams are
 * placed so, and above them all others in order of time, each in the smallest hole that is free then. Called by
 * placement.c. */
#include "backend/plan.h"

enum { MAX_EXACT = 8192 };

static int compare_sizes(const void *a, const void *b) {
  const egi_item *x = a, *y = b;
  if (x->size_bytes != y->size_bytes) return x->size_bytes > y->size_bytes ? -1 : 1;
  return x->storage < y->storage ? -1 : x->storage > y->storage;
}

static bool is_before(const egi_item *a, const egi_item *b) {
  for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
    if (a->last[p] > b->start[p]) return false;
  }
  return true;
}

/* `placed` is in order of offsets. */
static uint64_t best_gap(const egi_item *items, const uint32_t *placed, uint32_t n_placed, const egi_item *item) {
  uint64_t top = 0, best = 0, best_size = UINT64_MAX;
  for (uint32_t i = 0; i < n_placed; i++) {
    const egi_item *other = &items[placed[i]];
    if (is_before(other, item) || is_before(item, other)) continue;
    if (other->offset_bytes > top) {
      uint64_t gap = other->offset_bytes - top;
      if (gap >= item->size_bytes && gap < best_size) {
        best = top;
        best_size = gap;
      }
    }
    uint64_t end = other->offset_bytes + other->size_bytes;
    if (end > top) top = end;
  }
  return best_size != UINT64_MAX ? best : top;
}

static uint64_t place_exact(egi_item *items, const uint32_t *chosen, uint32_t n, uint32_t *placed) {
  uint64_t size = 0;
  for (uint32_t i = 0; i < n; i++) {
    egi_item *item = &items[chosen[i]];
    item->offset_bytes = best_gap(items, placed, i, item);
    if (item->offset_bytes + item->size_bytes > size) size = item->offset_bytes + item->size_bytes;
    uint32_t low = 0, high = i;
    while (low < high) {
      uint32_t middle = low + (high - low) / 2;
      if (items[placed[middle]].offset_bytes <= item->offset_bytes)
        low = middle + 1;
      else
        high = middle;
    }
    memmove(&placed[low + 1], &placed[low], (i - low) * sizeof(*placed));
    placed[low] = chosen[i];
  }
  return size;
}

/* ---- the rest, in order of time ------------------------------------------------------------------------------- */

static int compare_starts(const void *a, const void *b) {
  const egi_item *const *x = a, *const *y = b;
  if ((*x)->start[0] != (*y)->start[0]) return (*x)->start[0] < (*y)->start[0] ? -1 : 1;
  return (*x)->storage < (*y)->storage ? -1 : (*x)->storage > (*y)->storage;
}

typedef struct hole {
  uint64_t offset, size;
} hole;

/* Memory at one moment: holes in order of offsets, never side by side, below `top`. */
typedef struct heap {
  hole *holes;
  uint32_t n_holes;
  uint64_t top, highest;
  egi_item **ending; /* by sequence number: a chain of the items whose last use it is */
  egi_item **next;   /* by position of the item in `items` */
  egi_item *items;
} heap;

static void free_range(heap *memory, uint64_t offset, uint64_t size) {
  uint32_t low = 0, high = memory->n_holes;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    if (memory->holes[middle].offset < offset)
      low = middle + 1;
    else
      high = middle;
  }
  hole *at = &memory->holes[low];
  bool joins_before = low > 0 && at[-1].offset + at[-1].size == offset;
  bool joins_after = low < memory->n_holes && offset + size == at->offset;
  if (joins_before && joins_after) {
    at[-1].size += size + at->size;
    memmove(at, at + 1, (memory->n_holes - low - 1) * sizeof(*at));
    memory->n_holes--;
  } else if (joins_before) {
    at[-1].size += size;
  } else if (joins_after) {
    *at = (hole){offset, size + at->size};
  } else {
    memmove(at + 1, at, (memory->n_holes - low) * sizeof(*at));
    *at = (hole){offset, size};
    memory->n_holes++;
  }
  hole *last = &memory->holes[memory->n_holes - 1];
  if (last->offset + last->size != memory->top) return;
  memory->top = last->offset;
  memory->n_holes--;
}

/* The smallest hole that fits, the lowest of equals, else the top. */
static uint64_t take_range(heap *memory, uint64_t size) {
  uint32_t best = UINT32_MAX;
  for (uint32_t i = 0; i < memory->n_holes; i++) {
    uint64_t room = memory->holes[i].size;
    if (room >= size && (best == UINT32_MAX || room < memory->holes[best].size)) best = i;
  }
  uint64_t offset = memory->top;
  if (best == UINT32_MAX) {
    memory->top += size;
    if (memory->top > memory->highest) memory->highest = memory->top;
    return offset;
  }
  hole *at = &memory->holes[best];
  offset = at->offset;
  at->offset += size;
  at->size -= size;
  if (at->size > 0) return offset;
  memmove(at, at + 1, (memory->n_holes - best - 1) * sizeof(*at));
  memory->n_holes--;
  return offset;
}

/* All items are used on stream 0 alone. */
static void place_in_time(heap *memory, egi_item **order, uint32_t n, uint32_t n_sequences) {
  uint32_t now = 0;
  qsort(order, n, sizeof(*order), compare_starts);
  for (uint32_t i = 0; i < n; i++) {
    egi_item *item = order[i];
    for (; now <= item->start[0]; now++) {
      for (egi_item *over = memory->ending[now]; over != NULL; over = memory->next[over - memory->items]) {
        free_range(memory, over->offset_bytes, over->size_bytes);
      }
    }
    item->offset_bytes = take_range(memory, item->size_bytes);
    if (item->last[0] >= n_sequences) continue; /* nobody comes after it */
    memory->next[item - memory->items] = memory->ending[item->last[0]];
    memory->ending[item->last[0]] = item;
  }
}

/* Above `base`, which grows. */
static eg_status pack_rest(egi_arena *arena, egi_item *items, egi_item **rest, const uint32_t counts[2],
                           uint64_t *base) {
  uint32_t n_sequences = 1, n_rest = counts[1];
  for (uint32_t i = 0; i < n_rest; i++) {
    if (rest[i]->start[0] >= n_sequences) n_sequences = rest[i]->start[0] + 1;
  }
  heap memory = {.holes = EGI_NEW(arena, hole, (size_t)n_rest + 1),
                 .top = *base,
                 .highest = *base,
                 .ending = EGI_NEW(arena, egi_item *, (size_t)n_sequences + 1),
                 .next = EGI_NEW(arena, egi_item *, counts[0]),
                 .items = items};
  if (memory.holes == NULL || memory.ending == NULL || memory.next == NULL) return EG_ERROR_MEMORY;
  place_in_time(&memory, rest, n_rest, n_sequences);
  *base = memory.highest;
  return EG_OK;
}

static bool is_on_stream_0(const egi_item *item) {
  for (unsigned p = 1; p < EGI_N_STREAMS; p++) {
    if (item->last[p] != 0) return false;
  }
  return true;
}

/* All items of a short list, those of several streams of a long one. */
static uint32_t choose(egi_item *items, uint32_t n_items, uint32_t *chosen, egi_item **rest, uint32_t *out_n_rest) {
  uint32_t n_chosen = 0, n_rest = 0;
  for (uint32_t i = 0; i < n_items; i++) {
    if (n_items <= MAX_EXACT || !is_on_stream_0(&items[i]))
      chosen[n_chosen++] = i;
    else
      rest[n_rest++] = &items[i];
  }
  *out_n_rest = n_rest;
  return n_chosen;
}

eg_status egi_pack(egi_arena *arena, egi_item *items, uint32_t n_items, uint64_t *out_size) {
  *out_size = 0;
  if (n_items == 0) return EG_OK;
  uint32_t *chosen = EGI_NEW(arena, uint32_t, n_items), *placed = EGI_NEW(arena, uint32_t, n_items);
  egi_item **rest = EGI_NEW(arena, egi_item *, n_items);
  if (chosen == NULL || placed == NULL || rest == NULL) return EG_ERROR_MEMORY;
  qsort(items, n_items, sizeof(*items), compare_sizes);
  uint32_t n_rest = 0, n_chosen = choose(items, n_items, chosen, rest, &n_rest);
  *out_size = place_exact(items, chosen, n_chosen, placed);
  if (n_rest == 0) return EG_OK;
  return pack_rest(arena, items, rest, (uint32_t[]){n_items, n_rest}, out_size);
}
