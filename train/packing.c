/* Rows that several documents share: in file order, or each document where it fits best, the longest first (best fit
 * decreasing: Johnson, Near-optimal bin packing algorithms, 1973). Within a row and from row to row documents keep the
 * order of the file, so that lengths do not decide when something is learned. */
#include <string.h>

#include "train/train.h"

static uint32_t piece_length(const egi_documents *documents, uint32_t index, uint32_t longest) {
  uint64_t length = documents->offsets[index + 1] - documents->offsets[index];
  return length < longest ? (uint32_t)length : longest;
}

/* ---- best fit --------------------------------------------------------------------------------------------------- */

/* Rows by the room that is left in them: lists, and a tree over the sizes that says which lists hold something. */
typedef struct rooms {
  uint32_t *first; /* [tokens + 1]: row + 1, 0: none */
  uint32_t *next;  /* by row */
  uint8_t *tree;   /* [2 · leaves]: a leaf for each size, 1: something below */
  uint32_t leaves;
} rooms;

static void set_leaf(rooms *r, uint32_t size) {
  uint32_t node = r->leaves + size;
  r->tree[node] = r->first[size] != 0;
  for (node /= 2; node > 0; node /= 2) r->tree[node] = r->tree[2 * node] | r->tree[2 * node + 1];
}

static void put_row(rooms *r, uint32_t row, uint32_t room) {
  r->next[row] = r->first[room];
  r->first[room] = row + 1;
  set_leaf(r, room);
}

/* The smallest room of at least `size`; UINT32_MAX: none. */
static uint32_t find_room(const rooms *r, uint32_t size) {
  uint32_t node = r->leaves + size;
  while (node > 0 && !r->tree[node]) {
    while (node > 1 && node % 2 == 1) node /= 2; /* up until there is something to the right */
    node = node > 1 ? node + 1 : 0;
  }
  while (node > 0 && node < r->leaves) node = r->tree[2 * node] ? 2 * node : 2 * node + 1;
  return node > 0 ? node - r->leaves : UINT32_MAX;
}

/* Documents by falling length, equal ones in file order: counted, not compared. */
static uint32_t *sort_documents(const egi_documents *documents, uint32_t n, uint32_t longest, egi_arena *arena) {
  uint32_t *start = EGI_NEW(arena, uint32_t, (size_t)longest + 2), *sorted = EGI_NEW(arena, uint32_t, (size_t)n + 1);
  if (start == NULL || sorted == NULL) return NULL;
  for (uint32_t i = 0; i < n; i++) start[longest - piece_length(documents, i, longest) + 1]++;
  for (uint32_t i = 1; i <= longest; i++) start[i] += start[i - 1];
  for (uint32_t i = 0; i < n; i++) sorted[start[longest - piece_length(documents, i, longest)]++] = i;
  return sorted;
}

/* row_of[document]; rows are numbered as they are opened. */
static eg_status fit_best(const egi_documents *documents, uint32_t n, uint32_t longest, egi_arena *arena,
                          uint32_t *row_of, uint32_t *out_rows) {
  rooms r = {.leaves = 1};
  while (r.leaves <= longest) r.leaves *= 2;
  r.first = EGI_NEW(arena, uint32_t, (size_t)longest + 1);
  r.next = EGI_NEW(arena, uint32_t, (size_t)n + 1);
  r.tree = EGI_NEW(arena, uint8_t, 2 * (size_t)r.leaves);
  const uint32_t *sorted = sort_documents(documents, n, longest, arena);
  if (r.first == NULL || r.next == NULL || r.tree == NULL || sorted == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t length = piece_length(documents, sorted[i], longest), room = find_room(&r, length), row = *out_rows;
    if (room == UINT32_MAX) {
      room = longest;
      *out_rows += 1;
    } else {
      row = r.first[room] - 1;
      r.first[room] = r.next[row];
      set_leaf(&r, room);
    }
    row_of[sorted[i]] = row;
    put_row(&r, row, room - length);
  }
  return EG_OK;
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

static void fit_in_order(const egi_documents *documents, uint32_t n, uint32_t longest, uint32_t *row_of,
                         uint32_t *out_rows) {
  uint32_t used = longest;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t length = piece_length(documents, i, longest);
    if (length > longest - used) {
      used = 0;
      *out_rows += 1;
    }
    used += length;
    row_of[i] = *out_rows - 1;
  }
}

/* Rows in the order of their first documents. */
static eg_status make_rows(const uint32_t *row_of, uint32_t n, uint32_t longest, egi_arena *arena,
                           egi_batch_range *rows) {
  uint32_t *place = EGI_NEW(arena, uint32_t, (size_t)n + 1), *order = EGI_NEW(arena, uint32_t, (size_t)n + 1);
  uint32_t n_seen = 0;
  size_t first = 0;
  if (place == NULL || order == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < n; i++) {
    if (place[row_of[i]] == 0) place[row_of[i]] = ++n_seen;
    rows[place[row_of[i]] - 1].n_documents++;
  }
  for (uint32_t i = 0; i < n_seen; i++) {
    rows[i].first_document = first;
    rows[i].longest = longest;
    rows[i].order = order;
    first += rows[i].n_documents;
    rows[i].n_documents = 0;
  }
  for (uint32_t i = 0; i < n; i++) {
    egi_batch_range *row = &rows[place[row_of[i]] - 1];
    order[row->first_document + row->n_documents++] = i;
  }
  return EG_OK;
}

eg_status egi_rows_pack(const egi_documents *documents, uint32_t tokens, bool is_in_order, egi_arena *arena,
                        egi_batch_range **out_rows, size_t *out_count) {
  egi_arena scratch;
  uint32_t n = (uint32_t)documents->n_documents, n_rows = 0;
  if (documents->n_documents >= UINT32_MAX)
    return egi_fail(arena->ctx, EG_ERROR_BUDGET, "%s: too many documents", documents->path);
  egi_arena_init(&scratch, arena->ctx, EGI_PURPOSE_DATA);
  uint32_t *row_of = EGI_NEW(&scratch, uint32_t, (size_t)n + 1);
  eg_status status = row_of != NULL ? EG_OK : EG_ERROR_MEMORY;
  if (status == EG_OK && is_in_order) fit_in_order(documents, n, tokens, row_of, &n_rows);
  if (status == EG_OK && !is_in_order) status = fit_best(documents, n, tokens, &scratch, row_of, &n_rows);
  if (status == EG_OK) {
    *out_rows = EGI_NEW(arena, egi_batch_range, (size_t)n_rows + 1);
    status = *out_rows != NULL ? make_rows(row_of, n, tokens, arena, *out_rows) : EG_ERROR_MEMORY;
  }
  *out_count = n_rows;
  egi_arena_clear(&scratch);
  return status;
}

egi_bucket egi_rows_bucket(const egi_documents *documents, const egi_batch_range *rows, size_t count) {
  uint32_t fullest = 1;
  for (size_t i = 0; i < count; i++) {
    uint32_t used = 0;
    for (size_t k = 0; k < rows[i].n_documents; k++)
      used += piece_length(documents, rows[i].order[rows[i].first_document + k], rows[i].longest);
    if (used > fullest) fullest = used;
  }
  return (egi_bucket){1, fullest};
}
