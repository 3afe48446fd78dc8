/* Token files: documents back to back in a safetensors file. */
#include "io/io.h"

#include <inttypes.h>
#include <string.h>

enum { NO_LABEL = -100 };

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

static eg_status copy_document(eg_context *ctx, const token_file *t, size_t index, uint32_t sequence,
                               egi_documents *documents) {
  uint64_t begin = (uint64_t)read_i64(t->offsets->data, index);
  uint64_t n = (uint64_t)read_i64(t->offsets->data, index + 1) - begin;
  uint64_t first = documents->offsets[documents->n_documents];
  if (sequence > 0 && n > sequence) {
    n = sequence;
    documents->n_cut++;
    documents->cut_length = sequence;
  }
  for (uint64_t i = 0; i < n; i++) {
    int32_t token;
    memcpy(&token, t->tokens->data + (begin + i) * sizeof token, sizeof token);
    if (token < 0)
      return egi_fail(ctx, EG_ERROR_DATA, "%s: document %zu, position %" PRIu64 ": token %d is negative", t->path,
                      index + 1, i + 1, token);
    documents->tokens[first + i] = token;
  }
  egi_documents_derive_labels(documents, n, 0);
  for (uint64_t i = 0; i < n && t->mask != NULL; i++)
    if (t->mask->data[begin + i] == 0) documents->labels[first + i] = NO_LABEL;
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
  const egi_documents_room room = {.n_documents = n_documents, .n_tokens = (uint64_t)t.tokens->dims[0]};
  EG_TRY(egi_documents_begin(ctx, path, &room, &documents));
  for (size_t i = 0; i < n_documents; i++) {
    eg_status status = copy_document(ctx, &t, i, sequence, documents);
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
