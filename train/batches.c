/* Padded micro-batches in file order, and the few shapes that plans are made for. */
#include "train/train.h"

#include <float.h>
#include <string.h>

/* Distinct lengths the exact search looks at; more are rounded up first. */
enum { MAX_LENGTHS = 256 };

static uint32_t document_length(const egi_documents *documents, size_t index, const egi_batch_limits *limits) {
  uint64_t length = documents->offsets[index + 1] - documents->offsets[index];
  if (limits->sequence > 0) return limits->sequence;
  return length < limits->longest ? (uint32_t)length : limits->longest;
}

/* The documents of the example that begins with `first`, and the longest of them. */
static size_t example_size(const egi_documents *documents, size_t first, const egi_batch_limits *limits,
                           uint32_t *longest) {
  size_t n = 0;
  do {
    uint32_t length = document_length(documents, first + n, limits);
    if (length > *longest) *longest = length;
    n++;
  } while (documents->is_first != NULL && first + n < documents->n_documents && !documents->is_first[first + n]);
  return n;
}

/* The batch that begins at `first`: examples are taken while rows × longest stays within the limits. */
static egi_batch_range next_batch(const egi_documents *documents, size_t first, const egi_batch_limits *limits) {
  egi_batch_range range = {.first_document = first};
  while (first + range.n_documents < documents->n_documents && range.n_documents < limits->rows) {
    uint32_t longest = range.longest;
    size_t n = example_size(documents, first + range.n_documents, limits, &longest);
    if (range.n_documents > 0 && (range.n_documents + n) * (uint64_t)longest > limits->tokens) break;
    range.longest = longest;
    range.n_documents += n;
  }
  return range;
}

eg_status egi_batches_make(const egi_documents *documents, const egi_batch_limits *limits, egi_arena *arena,
                           egi_batch_range **out_batches, size_t *out_count) {
  size_t count = 0;
  for (size_t first = 0; first < documents->n_documents; count++)
    first += next_batch(documents, first, limits).n_documents;
  egi_batch_range *batches = EGI_NEW(arena, egi_batch_range, count > 0 ? count : 1);
  if (batches == NULL) return EG_ERROR_MEMORY;
  size_t first = 0;
  for (size_t i = 0; i < count; i++) {
    batches[i] = next_batch(documents, first, limits);
    first += batches[i].n_documents;
  }
  *out_batches = batches;
  *out_count = count;
  return EG_OK;
}

/* ---- buckets ---- */

/* Batches of one length: how many, and the most rows among them. */
typedef struct length_row {
  uint32_t sequence, batch;
  uint64_t n_batches;
} length_row;

static uint32_t round_up(uint32_t value, uint32_t step) {
  uint64_t rounded = ((uint64_t)value + step - 1) / step * step;
  return rounded <= UINT32_MAX ? (uint32_t)rounded : value;
}

static int compare_lengths(const void *a, const void *b) {
  const length_row *x = a, *y = b;
  return x->sequence < y->sequence ? -1 : x->sequence > y->sequence ? 1 : 0;
}

static size_t merge_lengths(length_row *rows, size_t n) {
  size_t merged = 0;
  for (size_t i = 0; i < n; i++) {
    if (merged > 0 && rows[merged - 1].sequence == rows[i].sequence) {
      if (rows[i].batch > rows[merged - 1].batch) rows[merged - 1].batch = rows[i].batch;
      rows[merged - 1].n_batches += rows[i].n_batches;
    } else {
      rows[merged++] = rows[i];
    }
  }
  return merged;
}

/* Distinct lengths in rising order, at most MAX_LENGTHS: the grid that lengths are rounded to doubles until they fit.
 */
static size_t collect_lengths(const egi_batch_range *batches, size_t n_batches, length_row *rows) {
  uint32_t longest = 0;
  for (size_t i = 0; i < n_batches; i++) {
    rows[i] = (length_row){batches[i].longest, (uint32_t)batches[i].n_documents, 1};
    if (rows[i].sequence > longest) longest = rows[i].sequence;
  }
  qsort(rows, n_batches, sizeof *rows, compare_lengths);
  size_t n = merge_lengths(rows, n_batches);
  for (uint32_t step = 2; n > MAX_LENGTHS; step *= 2) {
    for (size_t i = 0; i < n; i++) {
      uint32_t rounded = round_up(rows[i].sequence, step);
      rows[i].sequence = rounded < longest ? rounded : longest;
    }
    n = merge_lengths(rows, n);
  }
  return n;
}

/* Least padded tokens when rows [0, i) are covered by k buckets, and where the last of them begins. */
typedef struct cover {
  double cost;
  size_t begin;
} cover;

static cover best_last_bucket(const length_row *rows, const cover *shorter, size_t i) {
  cover best = {DBL_MAX, 0};
  uint32_t batch = 0;
  double n_batches = 0;
  for (size_t j = i; j-- > 0;) {
    if (rows[j].batch > batch) batch = rows[j].batch;
    n_batches += (double)rows[j].n_batches;
    if (shorter[j].cost >= DBL_MAX) continue;
    double cost = shorter[j].cost + n_batches * batch * rows[i - 1].sequence;
    if (cost < best.cost) best = (cover){cost, j};
  }
  return best;
}

/* Dynamic programming over the rows; table[k * (n + 1) + i]. */
static void fill_table(const length_row *rows, size_t n, size_t max_buckets, cover *table) {
  for (size_t i = 0; i <= n; i++) table[i] = (cover){i == 0 ? 0.0 : DBL_MAX, 0};
  for (size_t k = 1; k <= max_buckets; k++) {
    table[k * (n + 1)] = (cover){DBL_MAX, 0};
    for (size_t i = 1; i <= n; i++) table[k * (n + 1) + i] = best_last_bucket(rows, table + (k - 1) * (n + 1), i);
  }
}

eg_status egi_buckets_choose(const egi_batch_range *batches, size_t n_batches, size_t max_buckets, egi_arena *arena,
                             egi_bucket **out_buckets, size_t *out_count) {
  length_row *rows = EGI_NEW(arena, length_row, n_batches > 0 ? n_batches : 1);
  egi_bucket *buckets = EGI_NEW(arena, egi_bucket, max_buckets);
  if (rows == NULL || buckets == NULL) return EG_ERROR_MEMORY;
  size_t n = n_batches > 0 ? collect_lengths(batches, n_batches, rows) : 0;
  cover *table = EGI_NEW(arena, cover, (max_buckets + 1) * (n + 1));
  if (table == NULL) return EG_ERROR_MEMORY;
  fill_table(rows, n, max_buckets, table);
  size_t best = 1;
  for (size_t k = 2; k <= max_buckets; k++)
    if (table[k * (n + 1) + n].cost < table[best * (n + 1) + n].cost) best = k;
  size_t end = n, k = n > 0 ? best : 0;
  *out_count = k;
  *out_buckets = buckets;
  for (; k > 0; k--) {
    size_t begin = table[k * (n + 1) + end].begin;
    egi_bucket *bucket = &buckets[k - 1];
    bucket->sequence = rows[end - 1].sequence;
    for (size_t i = begin; i < end; i++)
      if (rows[i].batch > bucket->batch) bucket->batch = rows[i].batch;
    end = begin;
  }
  return EG_OK;
}
