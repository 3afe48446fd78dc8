/* Datasets in memory: documents back to back, from the caller's arrays, text files and safetensors token files.
 * Invariant: the first label of each document is -100, since nothing predicts it. */
#include "io/io.h"

#include <inttypes.h>
#include <string.h>

enum { DEFAULT_TEXT_SEQUENCE = 256, NO_LABEL = -100 };

eg_status egi_documents_begin(eg_context *ctx, const char *path, size_t n_documents, uint64_t n_tokens,
                              egi_documents **out_documents) {
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  egi_documents *documents = EGI_NEW(&arena, egi_documents, 1);
  if (documents == NULL) return EG_ERROR_MEMORY;
  size_t room = n_tokens > 0 ? (size_t)n_tokens : 1;
  documents->path = egi_arena_copy_text(&arena, path, strlen(path));
  documents->tokens = EGI_NEW(&arena, int32_t, room);
  documents->labels = EGI_NEW(&arena, int32_t, room);
  documents->offsets = n_documents < SIZE_MAX ? EGI_NEW(&arena, uint64_t, n_documents + 1) : NULL;
  documents->arena = arena;
  if (documents->path == NULL || documents->tokens == NULL || documents->labels == NULL || documents->offsets == NULL) {
    egi_documents_free(documents);
    return egi_fail(ctx, EG_ERROR_MEMORY, "%s: out of memory for %" PRIu64 " tokens", path, n_tokens);
  }
  *out_documents = documents;
  return EG_OK;
}

void egi_documents_free(egi_documents *documents) {
  if (documents == NULL) return;
  egi_arena arena = documents->arena; /* the struct lies in its own arena */
  egi_arena_clear(&arena);
}

void egi_documents_end_document(egi_documents *documents, uint64_t n_tokens) {
  uint64_t first = documents->offsets[documents->n_documents];
  if (n_tokens > 0) documents->labels[first] = NO_LABEL;
  for (uint64_t i = 0; i < n_tokens; i++) documents->n_targets += documents->labels[first + i] != NO_LABEL;
  documents->n_documents++;
  documents->n_tokens = first + n_tokens;
  documents->offsets[documents->n_documents] = documents->n_tokens;
}

/* ---- the caller's arrays ---- */

static eg_status copy_document(eg_context *ctx, egi_documents *documents, const eg_document *source, size_t index) {
  uint64_t first = documents->offsets[documents->n_documents];
  for (uint32_t i = 0; i < source->n_tokens; i++) {
    int32_t token = source->input_ids[i];
    int32_t label = source->labels != NULL ? source->labels[i] : token;
    if (token < 0)
      return egi_fail(ctx, EG_ERROR_DATA, "document %zu, position %u: token %d is negative", index + 1, i + 1, token);
    if (label < 0 && label != NO_LABEL)
      return egi_fail(ctx, EG_ERROR_DATA, "document %zu, position %u: label %d is neither a token nor -100", index + 1,
                      i + 1, label);
    documents->tokens[first + i] = token;
    documents->labels[first + i] = label;
  }
  egi_documents_end_document(documents, source->n_tokens);
  return EG_OK;
}

eg_status egi_documents_copy(eg_context *ctx, const eg_document *source, size_t count, egi_documents **out_documents) {
  uint64_t n_tokens = 0;
  egi_documents *documents;
  for (size_t i = 0; i < count; i++) {
    if (source[i].n_tokens == 0 || source[i].input_ids == NULL)
      return egi_fail(ctx, EG_ERROR_DATA, "document %zu is empty", i + 1);
    n_tokens += source[i].n_tokens;
  }
  if (count == 0) return egi_fail(ctx, EG_ERROR_DATA, "the dataset has no documents");
  EG_TRY(egi_documents_begin(ctx, "dataset", count, n_tokens, &documents));
  for (size_t i = 0; i < count; i++) {
    eg_status status = copy_document(ctx, documents, &source[i], i);
    if (status != EG_OK) {
      egi_documents_free(documents);
      return status;
    }
  }
  *out_documents = documents;
  return EG_OK;
}

/* ---- text ---- */

eg_status egi_documents_read_text(eg_context *ctx, const char *path, uint32_t sequence, egi_documents **out_documents) {
  egi_mapping mapping;
  egi_documents *documents = NULL;
  uint64_t length = sequence > 0 ? sequence : DEFAULT_TEXT_SEQUENCE;
  EG_TRY(egi_mapping_open(ctx, path, &mapping));
  uint64_t n_documents = (mapping.size_bytes + length - 1) / length;
  eg_status status = EG_OK;
  if (mapping.size_bytes == 0) status = egi_fail(ctx, EG_ERROR_DATA, "%s: the file is empty", path);
  if (status == EG_OK) status = egi_documents_begin(ctx, path, (size_t)n_documents, mapping.size_bytes, &documents);
  for (uint64_t first = 0; status == EG_OK && first < mapping.size_bytes; first += length) {
    uint64_t n = mapping.size_bytes - first < length ? mapping.size_bytes - first : length;
    for (uint64_t i = first; i < first + n; i++) documents->tokens[i] = documents->labels[i] = mapping.data[i];
    egi_documents_end_document(documents, n);
  }
  egi_mapping_close(&mapping);
  if (status == EG_OK) *out_documents = documents;
  return status;
}

/* ---- safetensors ---- */

typedef struct token_file {
  const char *path;
  const egi_safetensor *tokens, *offsets, *mask;
} token_file;

static eg_status find_tensor(eg_context *ctx, const char *path, const egi_safetensors *file, const char *name,
                             eg_dtype dtype, const egi_safetensor **out_tensor) {
  const egi_safetensor *tensor = egi_safetensors_find(file, name);
  if (tensor != NULL && (tensor->dtype != dtype || tensor->rank != 1))
    return egi_fail(ctx, EG_ERROR_DATA, "%s: \"%s\" must be %s with one dimension", path, name, egi_dtype_name(dtype));
  *out_tensor = tensor;
  return EG_OK;
}

static eg_status check_token_file(eg_context *ctx, const egi_safetensors *file, token_file *t) {
  EG_TRY(find_tensor(ctx, t->path, file, "tokens", EG_DTYPE_I32, &t->tokens));
  EG_TRY(find_tensor(ctx, t->path, file, "document_offsets", EG_DTYPE_I64, &t->offsets));
  EG_TRY(find_tensor(ctx, t->path, file, "loss_mask", EG_DTYPE_U8, &t->mask));
  if (t->tokens == NULL || t->offsets == NULL)
    return egi_fail(ctx, EG_ERROR_DATA, "%s: tensor \"%s\" is missing", t->path,
                    t->tokens == NULL ? "tokens" : "document_offsets");
  if (t->offsets->dims[0] < 2)
    return egi_fail(ctx, EG_ERROR_DATA, "%s: \"document_offsets\" names no document", t->path);
  if (t->mask != NULL && t->mask->dims[0] != t->tokens->dims[0])
    return egi_fail(ctx, EG_ERROR_DATA, "%s: \"loss_mask\" and \"tokens\" differ in length", t->path);
  return EG_OK;
}

static int64_t read_i64(const uint8_t *data, size_t index) {
  int64_t value;
  memcpy(&value, data + index * sizeof value, sizeof value);
  return value;
}

static eg_status check_offsets(eg_context *ctx, const token_file *t) {
  size_t n = (size_t)t->offsets->dims[0];
  int64_t previous = 0;
  for (size_t i = 0; i < n; i++) {
    int64_t offset = read_i64(t->offsets->data, i);
    bool is_right = i == 0 ? offset == 0 : offset > previous;
    if (i == n - 1 && offset != t->tokens->dims[0]) is_right = false;
    if (!is_right)
      return egi_fail(ctx, EG_ERROR_DATA,
                      "%s: \"document_offsets\"[%zu] is %lld: offsets must rise from 0 to the number of tokens",
                      t->path, i, (long long)offset);
    previous = offset;
  }
  return EG_OK;
}

static eg_status copy_tokens(eg_context *ctx, const token_file *t, size_t index, uint32_t sequence,
                             egi_documents *documents) {
  uint64_t begin = (uint64_t)read_i64(t->offsets->data, index);
  uint64_t n = (uint64_t)read_i64(t->offsets->data, index + 1) - begin;
  uint64_t first = documents->offsets[documents->n_documents];
  if (sequence > 0 && n > sequence) {
    n = sequence;
    documents->n_cut++;
  }
  for (uint64_t i = 0; i < n; i++) {
    int32_t token;
    memcpy(&token, t->tokens->data + (begin + i) * sizeof token, sizeof token);
    if (token < 0)
      return egi_fail(ctx, EG_ERROR_DATA, "%s: document %zu, position %" PRIu64 ": token %d is negative", t->path,
                      index + 1, i + 1, token);
    documents->tokens[first + i] = token;
    documents->labels[first + i] = t->mask == NULL || t->mask->data[begin + i] != 0 ? token : NO_LABEL;
  }
  egi_documents_end_document(documents, n);
  return EG_OK;
}

static eg_status read_token_file(eg_context *ctx, const egi_safetensors *file, const char *path, uint32_t sequence,
                                 egi_documents **out_documents) {
  token_file t = {path, NULL, NULL, NULL};
  egi_documents *documents;
  EG_TRY(check_token_file(ctx, file, &t));
  EG_TRY(check_offsets(ctx, &t));
  size_t n_documents = (size_t)t.offsets->dims[0] - 1;
  EG_TRY(egi_documents_begin(ctx, path, n_documents, (uint64_t)t.tokens->dims[0], &documents));
  for (size_t i = 0; i < n_documents; i++) {
    eg_status status = copy_tokens(ctx, &t, i, sequence, documents);
    if (status != EG_OK) {
      egi_documents_free(documents);
      return status;
    }
  }
  *out_documents = documents;
  return EG_OK;
}

eg_status egi_documents_read_safetensors(eg_context *ctx, const char *path, uint32_t sequence,
                                         egi_documents **out_documents) {
  egi_safetensors *file;
  EG_TRY(egi_safetensors_open(ctx, path, &file));
  eg_status status = read_token_file(ctx, file, path, sequence, out_documents);
  egi_safetensors_close(file);
  return status;
}
