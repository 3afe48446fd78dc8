/* Writes .onnx_adapter files: FlatBuffers as onnxruntime's adapter_schema.fbs declares them (format version 1), a table
 * of versions and a vector of parameters {name, dims, data_type, raw_data}. Everything is written in order, offsets
 * point forward; raw data lies at multiples of 8. */
#include "io/io.h"

#include <string.h>

enum { FORMAT_VERSION = 1, ADAPTER_VERSION = 1, MODEL_VERSION = 1 };
/* Where the fixed parts lie. Both tables have a 4-byte link to their field list and four 4-byte fields. */
enum {
  FIELDS_AT = 8, /* the field list that both tables share: 12 bytes */
  ROOT_AT = 20,
  TABLE_BYTES = 20,
  VECTOR_AT = ROOT_AT + TABLE_BYTES,
  PARAMETERS_AT = VECTOR_AT + 4
};
/* Offsets are 32 bits wide, and readers verify sizes as signed ones. */
static const uint64_t largest_file = INT32_MAX;

/* Where the parts of one parameter begin. */
typedef struct place {
  uint64_t table, name, dims, data, end;
} place;

static uint64_t align(uint64_t at, uint64_t alignment, uint64_t remainder) {
  return at + (alignment + remainder - at % alignment) % alignment;
}

/* Length words of 8-byte elements stand 4 bytes before a multiple of 8. */
static place place_parameter(uint64_t at, const egi_safetensor *tensor) {
  place p;
  p.table = align(at, 4, 0);
  p.name = p.table + TABLE_BYTES;
  p.dims = align(p.name + 4 + strlen(tensor->name) + 1, 8, 4);
  p.data = align(p.dims + 4 + (uint64_t)tensor->rank * 8, 8, 4);
  p.end = p.data + 4 + tensor->size_bytes;
  return p;
}

typedef struct writer {
  egi_file *file;
  uint64_t at;
  eg_status status;
} writer;

static void put(writer *w, const void *bytes, uint64_t size_bytes) {
  if (w->status == EG_OK) w->status = egi_file_write(w->file, bytes, (size_t)size_bytes);
  w->at += size_bytes;
}

static void put_number(writer *w, uint64_t number, unsigned size_bytes) {
  uint8_t bytes[8];
  for (unsigned i = 0; i < size_bytes; i++) bytes[i] = (uint8_t)(number >> (8 * i));
  put(w, bytes, size_bytes);
}

static void pad(writer *w, uint64_t to) {
  static const uint8_t zeros[8] = {0};
  if (to > w->at) put(w, zeros, to - w->at);
}

/* A table's link to its fields is the distance back to them. */
static void put_table(writer *w, const uint64_t fields[4]) {
  put_number(w, w->at - FIELDS_AT, 4);
  for (int i = 0; i < 4; i++) put_number(w, fields[i], 4);
}

static void put_header(writer *w, const place *places, size_t count) {
  put_number(w, ROOT_AT, 4);
  put(w, "TORT", 4);
  put_number(w, 12, 2); /* bytes of the list, of a table, then where each field is in it */
  put_number(w, TABLE_BYTES, 2);
  for (unsigned i = 0; i < 4; i++) put_number(w, 4 + 4 * i, 2);
  put_table(w, (const uint64_t[4]){FORMAT_VERSION, ADAPTER_VERSION, MODEL_VERSION, VECTOR_AT - (ROOT_AT + 16)});
  put_number(w, count, 4);
  for (size_t i = 0; i < count; i++) put_number(w, places[i].table - w->at, 4);
}

/* A field that is an offset counts from itself. */
static void put_parameter(writer *w, const egi_safetensor *tensor, const place *p) {
  pad(w, p->table);
  put_table(w, (const uint64_t[4]){p->name - (p->table + 4), p->dims - (p->table + 8), (uint64_t)tensor->dtype,
                                   p->data - (p->table + 16)});
  put_number(w, strlen(tensor->name), 4);
  put(w, tensor->name, strlen(tensor->name) + 1);
  pad(w, p->dims);
  put_number(w, (uint64_t)tensor->rank, 4);
  for (int i = 0; i < tensor->rank; i++) put_number(w, (uint64_t)tensor->dims[i], 8);
  pad(w, p->data);
  put_number(w, tensor->size_bytes, 4);
  put(w, tensor->data, tensor->size_bytes);
}

static eg_status place_all(eg_context *ctx, const char *path, const egi_safetensor *tensors, size_t count,
                           place *places) {
  uint64_t at = PARAMETERS_AT + 4 * (uint64_t)count;
  for (size_t i = 0; i < count && at <= largest_file; i++) {
    if (tensors[i].size_bytes > largest_file)
      at = tensors[i].size_bytes;
    else
      places[i] = place_parameter(at, &tensors[i]), at = places[i].end;
  }
  if (at <= largest_file) return EG_OK;
  return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "%s: an adapter of more than 2 GiB does not fit the .onnx_adapter format",
                  path);
}

eg_status egi_onnx_adapter_write(eg_context *ctx, const char *path, const egi_safetensor *tensors, size_t count) {
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  place *places = EGI_NEW(&arena, place, count + 1);
  writer w = {.at = 0};
  eg_status status = places != NULL ? place_all(ctx, path, tensors, count, places) : EG_ERROR_MEMORY;
  if (status == EG_OK) status = egi_file_create(ctx, path, &w.file);
  if (status == EG_OK) {
    put_header(&w, places, count);
    for (size_t i = 0; i < count; i++) put_parameter(&w, &tensors[i], &places[i]);
    pad(&w, align(w.at, 8, 0));
    status = w.status;
    if (status == EG_OK)
      status = egi_file_commit(w.file);
    else
      egi_file_abandon(w.file);
  }
  egi_arena_clear(&arena);
  return status;
}
