/* What losses of whole documents are fed: numbers for each row of a batch. Rows beyond the documents take no part. */
#include "train/train.h"

/* The document of a row; false beyond them. */
static bool find_document(const egi_batch_range *range, uint32_t row, size_t *out_document) {
  if (range == NULL || row >= range->n_documents) return false;
  *out_document = range->first_document + row;
  return true;
}

static bool begins_example(const egi_documents *documents, size_t document) {
  return documents->is_first == NULL || documents->is_first[document];
}

static size_t fill_numbers(const egi_documents *documents, const egi_batch_range *range, uint32_t n_rows, float *out) {
  uint32_t n = documents->n_numbers;
  for (uint32_t r = 0; r < n_rows; r++) {
    size_t document = 0;
    bool is_there = find_document(range, r, &document);
    for (uint32_t i = 0; i < n; i++) out[(size_t)r * n + i] = is_there ? documents->numbers[document * n + i] : 0.0F;
  }
  return (size_t)n_rows * n * sizeof *out;
}

/* Each token's part in its document's embedding. */
static void pool_row(eg_pooling pooling, uint64_t length, uint32_t sequence, float *out) {
  for (uint32_t t = 0; t < sequence; t++) out[t] = 0.0F;
  if (length > sequence) length = sequence;
  if (length == 0) return;
  if (pooling == EG_POOLING_CLS || pooling == EG_POOLING_LAST) {
    out[pooling == EG_POOLING_CLS ? 0 : length - 1] = 1.0F;
    return;
  }
  for (uint64_t t = 0; t < length; t++) out[t] = (float)(1.0 / (double)length);
}

static size_t fill_pooling(const egi_lanes *lanes, const egi_bucket *bucket, const egi_documents *documents,
                           const egi_batch_range *range, float *out) {
  for (uint32_t r = 0; r < bucket->batch; r++) {
    size_t document = 0;
    uint64_t length = 0;
    if (find_document(range, r, &document)) length = documents->offsets[document + 1] - documents->offsets[document];
    if (length > range->longest) length = range->longest;
    pool_row(lanes->pooling, length, bucket->sequence, out + (size_t)r * bucket->sequence);
  }
  return (size_t)bucket->batch * bucket->sequence * sizeof *out;
}

static int64_t index_of(egi_feed role, const egi_documents *documents, const egi_batch_range *range, uint32_t row) {
  size_t document = 0;
  bool is_there = find_document(range, row, &document);
  switch (role) {
  case EGI_FEED_CLASSES:
    return is_there ? (int64_t)documents->numbers[document * documents->n_numbers] : -100;
  case EGI_FEED_MATCHES: /* the positive follows its anchor */
    return is_there && begins_example(documents, document) ? (int64_t)row + 1 : -100;
  case EGI_FEED_PARTNERS:
    return is_there && begins_example(documents, document) ? (int64_t)row + 1 : row;
  default:
    return 0;
  }
}

static float weight_of(egi_feed role, const egi_documents *documents, const egi_batch_range *range, uint32_t row) {
  size_t document = 0;
  if (!find_document(range, row, &document)) return 0.0F;
  return begins_example(documents, document) == (role == EGI_FEED_ROW_WEIGHTS) ? 1.0F : 0.0F;
}

bool egi_feed_is_of_documents(egi_feed role) {
  return role >= EGI_FEED_CLASSES && role <= EGI_FEED_PARTNERS;
}

size_t egi_feed_fill(const egi_lanes *lanes, const egi_bucket *bucket, egi_feed role, const egi_documents *documents,
                     const egi_batch_range *range) {
  float *real = lanes->bytes;
  int64_t *whole = lanes->bytes;
  switch (role) {
  case EGI_FEED_NUMBERS:
    return fill_numbers(documents, range, bucket->batch, real);
  case EGI_FEED_POOLING:
    return fill_pooling(lanes, bucket, documents, range, real);
  case EGI_FEED_ROW_WEIGHTS:
  case EGI_FEED_CANDIDATES:
    for (uint32_t r = 0; r < bucket->batch; r++) real[r] = weight_of(role, documents, range, r);
    return bucket->batch * sizeof *real;
  default:
    for (uint32_t r = 0; r < bucket->batch; r++) whole[r] = index_of(role, documents, range, r);
    return bucket->batch * sizeof *whole;
  }
}

/* ---- counting --------------------------------------------------------------------------------------------------- */

static uint64_t count_labels(const egi_documents *documents, size_t document, uint64_t length, uint64_t first) {
  uint64_t count = 0;
  for (uint64_t i = first; i < length; i++) count += documents->labels[documents->offsets[document] + i] != -100;
  return count;
}

void egi_batch_count(egi_unit unit, const egi_documents *documents, const egi_batch_range *range, uint64_t *out_targets,
                     uint64_t *out_tokens) {
  uint64_t targets = 0, tokens = 0;
  for (size_t r = 0; r < range->n_documents; r++) {
    size_t document = range->first_document + r;
    if (range->order != NULL) document = range->order[document];
    uint64_t length = documents->offsets[document + 1] - documents->offsets[document];
    if (length > range->longest) length = range->longest;
    tokens += length;
    switch (unit) {
    case EGI_UNIT_NEXT_TOKEN:
      targets += count_labels(documents, document, length, 1);
      break;
    case EGI_UNIT_TOKEN:
      targets += count_labels(documents, document, length, 0);
      break;
    case EGI_UNIT_EXAMPLE:
      targets += begins_example(documents, document);
      break;
    }
  }
  *out_targets = targets;
  *out_tokens = tokens;
}
