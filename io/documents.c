/* Datasets in memory: documents back to back, from the caller's arrays, text files and safetensors token files. */
#include "io/io.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { DEFAULT_TEXT_SEQUENCE = 256, NO_LABEL = -100 };

static bool make_room(egi_documents *d, const egi_documents_room *room) {
  egi_arena *arena = &d->arena;
  size_t n = room->n_documents, n_tokens = room->n_tokens > 0 ? (size_t)room->n_tokens : 1, n_numbers = 0;
  bool has_examples = room->kind == EGI_DOCUMENTS_MATCHES || room->kind == EGI_DOCUMENTS_SCORES;
  if (n >= SIZE_MAX || !egi_size_multiply(n, room->n_numbers, &n_numbers)) return false;
  d->tokens = EGI_NEW(arena, int32_t, n_tokens);
  d->labels = EGI_NEW(arena, int32_t, n_tokens);
  d->offsets = EGI_NEW(arena, uint64_t, n + 1);
  d->numbers = EGI_NEW(arena, float, n_numbers + 1);
  if (room->has_types) d->token_types = EGI_NEW(arena, int32_t, n_tokens);
  if (has_examples) d->is_first = EGI_NEW(arena, bool, n);
  if (room->has_types && d->token_types == NULL) return false;
  if (has_examples && d->is_first == NULL) return false;
  return d->tokens != NULL && d->labels != NULL && d->offsets != NULL && d->numbers != NULL;
}

eg_status egi_documents_begin(eg_context *ctx, const char *path, const egi_documents_room *room,
                              egi_documents **out_documents) {
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  egi_documents *documents = EGI_NEW(&arena, egi_documents, 1);
  if (documents == NULL) return EG_ERROR_MEMORY;
  documents->arena = arena;
  documents->kind = room->kind;
  documents->n_numbers = room->n_numbers;
  documents->path = egi_arena_copy_text(&documents->arena, path, strlen(path));
  if (documents->path == NULL || !make_room(documents, room)) {
    egi_documents_free(documents);
    return egi_fail(ctx, EG_ERROR_MEMORY, "%s: out of memory for %" PRIu64 " tokens", path, room->n_tokens);
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
  for (uint64_t i = 1; i < n_tokens; i++) documents->n_targets += documents->labels[first + i] != NO_LABEL;
  documents->n_documents++;
  documents->n_tokens = first + n_tokens;
  documents->offsets[documents->n_documents] = documents->n_tokens;
}

void egi_documents_derive_labels(egi_documents *documents, uint64_t n_tokens, uint64_t first) {
  uint64_t begin = documents->offsets[documents->n_documents];
  for (uint64_t i = 0; i < n_tokens; i++)
    documents->labels[begin + i] = i == 0 || i < first ? NO_LABEL : documents->tokens[begin + i];
}

/* ---- the caller's arrays ---- */

static eg_status copy_tokens(eg_context *ctx, egi_documents *documents, const eg_document *source, size_t index) {
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
  }
  egi_documents_derive_labels(documents, source->n_tokens, 0);
  for (uint32_t i = 0; source->labels != NULL && i < source->n_tokens; i++)
    documents->labels[first + i] = source->labels[i];
  documents->n_labelled += source->labels != NULL;
  egi_documents_end_document(documents, source->n_tokens);
  return EG_OK;
}

static eg_status count_documents(eg_context *ctx, const eg_document *source, size_t count, egi_documents_room *room) {
  for (size_t i = 0; i < count; i++) {
    if (source[i].n_tokens == 0 || source[i].input_ids == NULL)
      return egi_fail(ctx, EG_ERROR_DATA, "document %zu is empty", room->n_documents + 1);
    room->n_tokens += source[i].n_tokens;
    room->n_documents++;
  }
  return EG_OK;
}

eg_status egi_documents_copy(eg_context *ctx, const eg_document *source, size_t count, egi_documents **out_documents) {
  egi_documents_room room = {0};
  egi_documents *documents;
  EG_TRY(count_documents(ctx, source, count, &room));
  if (count == 0) return egi_fail(ctx, EG_ERROR_DATA, "the dataset has no documents");
  EG_TRY(egi_documents_begin(ctx, "dataset", &room, &documents));
  for (size_t i = 0; i < count; i++) {
    eg_status status = copy_tokens(ctx, documents, &source[i], i);
    if (status != EG_OK) {
      egi_documents_free(documents);
      return status;
    }
  }
  *out_documents = documents;
  return EG_OK;
}

/* ---- examples ---- */

static eg_status check_example(eg_context *ctx, const eg_example *example, const eg_example *first, size_t index) {
  const char *wrong = NULL;
  if (example->documents == NULL || example->n_documents == 0) wrong = "it has no documents";
  if (example->numbers == NULL && example->n_numbers > 0) wrong = "its numbers are missing";
  if (example->n_documents > 1 && example->n_numbers > 1) wrong = "several documents have one number at most";
  if (example->n_documents > 2 && example->n_numbers > 0) wrong = "a number is of two documents";
  if (example->n_documents == 1 && example->n_numbers == 0) wrong = "one document needs a number";
  if (example->n_numbers != first->n_numbers) wrong = "it has another number of numbers than the first";
  if ((example->n_documents > 1) != (first->n_documents > 1)) wrong = "one document here and several there";
  for (uint32_t i = 0; wrong == NULL && i < example->n_numbers; i++)
    if (!isfinite(example->numbers[i])) wrong = "a number is not finite";
  for (uint32_t i = 0; wrong == NULL && example->is_class && i < example->n_numbers; i++)
    if (floorf(example->numbers[i]) < example->numbers[i]) wrong = "a class is a whole number";
  return wrong == NULL ? EG_OK : egi_fail(ctx, EG_ERROR_DATA, "example %zu: %s", index + 1, wrong);
}

static eg_status count_examples(eg_context *ctx, const eg_example *examples, size_t count, egi_documents_room *room) {
  bool is_whole = true;
  if (count == 0) return egi_fail(ctx, EG_ERROR_DATA, "the dataset has no documents");
  for (size_t i = 0; i < count; i++) {
    EG_TRY(check_example(ctx, &examples[i], &examples[0], i));
    EG_TRY(count_documents(ctx, examples[i].documents, examples[i].n_documents, room));
    room->has_types = room->has_types || examples[i].token_types != NULL;
    is_whole = is_whole && examples[i].is_class && examples[i].n_numbers == 1;
  }
  room->n_numbers = examples[0].n_numbers;
  if (examples[0].n_documents > 1)
    room->kind = room->n_numbers > 0 ? EGI_DOCUMENTS_SCORES : EGI_DOCUMENTS_MATCHES;
  else
    room->kind = is_whole ? EGI_DOCUMENTS_CLASS : EGI_DOCUMENTS_NUMBERS;
  return EG_OK;
}

static eg_status copy_example(eg_context *ctx, egi_documents *d, const eg_example *example) {
  if (example->n_numbers > 0)
    memcpy(d->numbers + d->n_documents * d->n_numbers, example->numbers, example->n_numbers * sizeof(float));
  for (uint32_t i = 0; i < example->n_documents; i++) {
    size_t index = d->n_documents;
    const int32_t *types = example->token_types != NULL ? example->token_types[i] : NULL;
    if (types != NULL)
      memcpy(d->token_types + d->offsets[index], types, example->documents[i].n_tokens * sizeof *types);
    if (d->is_first != NULL) d->is_first[index] = i == 0;
    EG_TRY(copy_tokens(ctx, d, &example->documents[i], index));
  }
  return EG_OK;
}

eg_status egi_documents_copy_examples(eg_context *ctx, const eg_example *examples, size_t count,
                                      egi_documents **out_documents) {
  egi_documents_room room = {0};
  egi_documents *documents;
  EG_TRY(count_examples(ctx, examples, count, &room));
  EG_TRY(egi_documents_begin(ctx, "dataset", &room, &documents));
  for (size_t i = 0; i < count; i++) {
    eg_status status = copy_example(ctx, documents, &examples[i]);
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
  const egi_documents_room room = {.n_documents = (size_t)n_documents, .n_tokens = mapping.size_bytes};
  if (status == EG_OK) status = egi_documents_begin(ctx, path, &room, &documents);
  for (uint64_t first = 0; status == EG_OK && first < mapping.size_bytes; first += length) {
    uint64_t n = mapping.size_bytes - first < length ? mapping.size_bytes - first : length;
    for (uint64_t i = first; i < first + n; i++) documents->tokens[i] = mapping.data[i];
    egi_documents_derive_labels(documents, n, 0);
    egi_documents_end_document(documents, n);
  }
  egi_mapping_close(&mapping);
  if (status == EG_OK) *out_documents = documents;
  return status;
}
