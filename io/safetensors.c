/* The safetensors format, read strictly: 8 bytes header length, JSON header, tensors back to back without gaps.
 * https://huggingface.co/docs/safetensors, "Format". Views point into the mapped file. */
#include "io/io.h"

#include <string.h>

#include <jansson.h>

/* The limit of the reference implementation. */
enum { MAX_HEADER_BYTES = 100000000 };

struct egi_safetensors {
  egi_arena arena;
  egi_mapping mapping;
  egi_safetensor *tensors; /* sorted by name */
  size_t count;
};

typedef struct dtype_name {
  const char *name;
  eg_dtype dtype;
} dtype_name;

static const dtype_name dtype_names[] = {
    {"F32", EG_DTYPE_F32},        {"F16", EG_DTYPE_F16},       {"BF16", EG_DTYPE_BF16}, {"F64", EG_DTYPE_F64},
    {"I64", EG_DTYPE_I64},        {"I32", EG_DTYPE_I32},       {"I16", EG_DTYPE_I16},   {"I8", EG_DTYPE_I8},
    {"U64", EG_DTYPE_U64},        {"U32", EG_DTYPE_U32},       {"U16", EG_DTYPE_U16},   {"U8", EG_DTYPE_U8},
    {"BOOL", EG_DTYPE_BOOL},      {"C64", EG_DTYPE_C64},       {"F4", EG_DTYPE_F4E2M1}, {"F8_E4M3", EG_DTYPE_F8E4M3FN},
    {"F8_E5M2", EG_DTYPE_F8E5M2}, {"F8_E8M0", EG_DTYPE_F8E8M0}};

typedef struct reader {
  eg_context *ctx;
  const char *path;
  egi_safetensors *file;
  uint64_t data_bytes; /* after the header */
  const uint8_t *data;
} reader;

static eg_status fail_tensor(const reader *r, const char *name, const char *reason) {
  return egi_fail(r->ctx, EG_ERROR_FORMAT, "%s: tensor \"%s\": %s", r->path, name, reason);
}

static eg_status read_dtype(const reader *r, json_t *entry, egi_safetensor *tensor) {
  const char *name = json_string_value(json_object_get(entry, "dtype"));
  if (name == NULL) return fail_tensor(r, tensor->name, "no \"dtype\"");
  for (size_t i = 0; i < EGI_COUNT(dtype_names); i++)
    if (strcmp(name, dtype_names[i].name) == 0) {
      tensor->dtype = dtype_names[i].dtype;
      return EG_OK;
    }
  return egi_fail(r->ctx, EG_ERROR_UNSUPPORTED, "%s: tensor \"%s\": unknown type \"%s\"", r->path, tensor->name, name);
}

/* Sets rank and dims; *out_bytes is what they need. */
static eg_status read_shape(const reader *r, json_t *entry, egi_safetensor *tensor, uint64_t *out_bytes) {
  json_t *shape = json_object_get(entry, "shape");
  if (!json_is_array(shape)) return fail_tensor(r, tensor->name, "no \"shape\"");
  if (json_array_size(shape) > EGI_MAX_RANK) return fail_tensor(r, tensor->name, "more than 8 dimensions");
  uint64_t count = 1;
  tensor->rank = (int)json_array_size(shape);
  for (int i = 0; i < tensor->rank; i++) {
    json_t *dim = json_array_get(shape, (size_t)i);
    if (!json_is_integer(dim) || json_integer_value(dim) < 0)
      return fail_tensor(r, tensor->name, "a dimension is not a size");
    tensor->dims[i] = json_integer_value(dim);
    uint64_t size = (uint64_t)tensor->dims[i];
    if (size != 0 && count > (uint64_t)INT64_MAX / size) return fail_tensor(r, tensor->name, "shape is too large");
    count *= size;
  }
  if (!egi_dtype_bytes(tensor->dtype, count, out_bytes)) return fail_tensor(r, tensor->name, "shape is too large");
  return EG_OK;
}

static eg_status read_offsets(const reader *r, json_t *entry, egi_safetensor *tensor, uint64_t needed) {
  json_t *offsets = json_object_get(entry, "data_offsets");
  json_t *first = json_array_get(offsets, 0), *second = json_array_get(offsets, 1);
  if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(second))
    return fail_tensor(r, tensor->name, "no \"data_offsets\" of two integers");
  json_int_t begin = json_integer_value(first), end = json_integer_value(second);
  if (begin < 0 || end < begin || (uint64_t)end > r->data_bytes)
    return fail_tensor(r, tensor->name, "\"data_offsets\" lie outside the file");
  if ((uint64_t)(end - begin) != needed)
    return fail_tensor(r, tensor->name, "size of \"data_offsets\" differs from type and shape");
  tensor->data = r->data + begin;
  tensor->size_bytes = needed;
  return EG_OK;
}

static eg_status read_tensor(const reader *r, const char *name, json_t *entry, egi_safetensor *tensor) {
  if (name[0] == '\0') return egi_fail(r->ctx, EG_ERROR_FORMAT, "%s: a tensor has an empty name", r->path);
  tensor->name = egi_arena_copy_text(&r->file->arena, name, strlen(name));
  if (tensor->name == NULL) return EG_ERROR_MEMORY;
  if (!json_is_object(entry)) return fail_tensor(r, name, "entry is not an object");
  uint64_t needed;
  EG_TRY(read_dtype(r, entry, tensor));
  EG_TRY(read_shape(r, entry, tensor, &needed));
  return read_offsets(r, entry, tensor, needed);
}

static int compare_places(const void *a, const void *b) {
  const egi_safetensor *x = a, *y = b;
  if (x->data != y->data) return x->data < y->data ? -1 : 1;
  if (x->size_bytes != y->size_bytes) return x->size_bytes < y->size_bytes ? -1 : 1;
  return strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b) {
  const egi_safetensor *x = a, *y = b;
  return strcmp(x->name, y->name);
}

/* The tensors must cover the data exactly; leaves them sorted by name. */
static eg_status check_cover(const reader *r) {
  const uint8_t *expected = r->data;
  egi_safetensor *tensors = r->file->tensors;
  qsort(tensors, r->file->count, sizeof *tensors, compare_places);
  for (size_t i = 0; i < r->file->count; i++) {
    if (tensors[i].data < expected) return fail_tensor(r, tensors[i].name, "overlaps another tensor");
    if (tensors[i].data > expected) return fail_tensor(r, tensors[i].name, "bytes before it belong to no tensor");
    expected += tensors[i].size_bytes;
  }
  if (expected != r->data + r->data_bytes)
    return egi_fail(r->ctx, EG_ERROR_FORMAT, "%s: %llu bytes after the last tensor", r->path,
                    (unsigned long long)(r->data + r->data_bytes - expected));
  qsort(tensors, r->file->count, sizeof *tensors, compare_names);
  return EG_OK;
}

static eg_status read_header(const reader *r, json_t *root) {
  size_t capacity = json_object_size(root);
  const char *name;
  json_t *entry;
  r->file->tensors = EGI_NEW(&r->file->arena, egi_safetensor, capacity > 0 ? capacity : 1);
  if (r->file->tensors == NULL) return EG_ERROR_MEMORY;
  json_object_foreach(root, name, entry) {
    if (strcmp(name, "__metadata__") == 0) {
      if (!json_is_object(entry)) return fail_tensor(r, name, "not an object");
      continue;
    }
    EG_TRY(read_tensor(r, name, entry, &r->file->tensors[r->file->count]));
    r->file->count++;
  }
  return check_cover(r);
}

static eg_status read_file(eg_context *ctx, const char *path, egi_safetensors *file) {
  const egi_mapping *mapping = &file->mapping;
  uint64_t header_bytes = 0;
  if (mapping->size_bytes < 8) return egi_fail(ctx, EG_ERROR_FORMAT, "%s: too short for a safetensors file", path);
  for (int i = 7; i >= 0; i--) header_bytes = header_bytes << 8 | mapping->data[i];
  if (header_bytes > mapping->size_bytes - 8 || header_bytes > MAX_HEADER_BYTES)
    return egi_fail(ctx, EG_ERROR_FORMAT, "%s: safetensors header of %llu bytes is larger than %s", path,
                    (unsigned long long)header_bytes,
                    header_bytes > mapping->size_bytes - 8 ? "the file" : "the format allows");
  if (header_bytes == 0 || mapping->data[8] != '{')
    return egi_fail(ctx, EG_ERROR_FORMAT, "%s: safetensors header does not begin with {", path);
  reader r = {ctx, path, file, mapping->size_bytes - 8 - header_bytes, mapping->data + 8 + header_bytes};
  json_t *root;
  EG_TRY(egi_json_parse(ctx, path, (const char *)mapping->data + 8, (size_t)header_bytes, &root));
  eg_status status = read_header(&r, root);
  json_decref(root);
  return status;
}

eg_status egi_safetensors_open(eg_context *ctx, const char *path, egi_safetensors **out_file) {
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  egi_safetensors *file = EGI_NEW(&arena, egi_safetensors, 1);
  if (file == NULL) return EG_ERROR_MEMORY;
  file->arena = arena;
  eg_status status = egi_mapping_open(ctx, path, &file->mapping);
  if (status == EG_OK) status = read_file(ctx, path, file);
  if (status != EG_OK) {
    egi_safetensors_close(file);
    return status;
  }
  *out_file = file;
  return EG_OK;
}

void egi_safetensors_close(egi_safetensors *file) {
  if (file == NULL) return;
  egi_mapping_close(&file->mapping);
  egi_arena arena = file->arena; /* the file lies in its own arena */
  egi_arena_clear(&arena);
}

size_t egi_safetensors_count(const egi_safetensors *file) {
  return file->count;
}

const egi_safetensor *egi_safetensors_at(const egi_safetensors *file, size_t index) {
  return &file->tensors[index];
}

const egi_safetensor *egi_safetensors_find(const egi_safetensors *file, const char *name) {
  egi_safetensor key = {.name = name};
  return bsearch(&key, file->tensors, file->count, sizeof key, compare_names);
}

uint64_t egi_safetensors_offset(const egi_safetensors *file, const egi_safetensor *tensor) {
  return (uint64_t)(tensor->data - file->mapping.data);
}

/* ---- writing ---- */

static const char *name_of(eg_dtype dtype) {
  for (size_t i = 0; i < EGI_COUNT(dtype_names); i++)
    if (dtype_names[i].dtype == dtype) return dtype_names[i].name;
  return NULL;
}

static int compare_pointers(const void *a, const void *b) {
  const egi_safetensor *const *x = a, *const *y = b;
  return strcmp((*x)->name, (*y)->name);
}

static eg_status check_tensor(eg_context *ctx, const egi_safetensor *tensor) {
  uint64_t count = 1, bytes;
  for (int i = 0; i < tensor->rank; i++) count *= (uint64_t)tensor->dims[i];
  if (name_of(tensor->dtype) == NULL)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "tensor \"%s\": safetensors has no type %s", tensor->name,
                    egi_dtype_name(tensor->dtype));
  if (!egi_dtype_bytes(tensor->dtype, count, &bytes) || bytes != tensor->size_bytes)
    return egi_fail(ctx, EG_ERROR_INTERNAL, "tensor \"%s\": size differs from its shape", tensor->name);
  return EG_OK;
}

static void write_header(egi_text *text, const egi_safetensor *const *sorted, size_t count) {
  uint64_t offset = 0;
  egi_text_add(text, "{\"__metadata__\":{\"format\":\"pt\"}");
  for (size_t i = 0; i < count; i++) {
    const egi_safetensor *tensor = sorted[i];
    egi_text_add(text, ",");
    egi_text_json(text, tensor->name);
    egi_text_format(text, ":{\"dtype\":\"%s\",\"shape\":[", name_of(tensor->dtype));
    for (int d = 0; d < tensor->rank; d++)
      egi_text_format(text, "%s%lld", d > 0 ? "," : "", (long long)tensor->dims[d]);
    egi_text_format(text, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)offset,
                    (unsigned long long)(offset + tensor->size_bytes));
    offset += tensor->size_bytes;
  }
  egi_text_add(text, "}");
  while (text->length % 8 != 0 && !text->is_failed) egi_text_add(text, " ");
}

static eg_status write_file(eg_context *ctx, const char *path, const egi_text *header,
                            const egi_safetensor *const *sorted, size_t count) {
  egi_file *file;
  uint8_t length[8];
  for (int i = 0; i < 8; i++) length[i] = (uint8_t)((uint64_t)header->length >> (8 * i));
  EG_TRY(egi_file_create(ctx, path, &file));
  eg_status status = egi_file_write(file, length, sizeof length);
  if (status == EG_OK) status = egi_file_write(file, header->data, header->length);
  for (size_t i = 0; i < count && status == EG_OK; i++)
    status = egi_file_write(file, sorted[i]->data, (size_t)sorted[i]->size_bytes);
  if (status == EG_OK) return egi_file_commit(file);
  egi_file_abandon(file);
  return status;
}

eg_status egi_safetensors_write(eg_context *ctx, const char *path, const egi_safetensor *tensors, size_t count) {
  egi_arena arena;
  egi_text header;
  for (size_t i = 0; i < count; i++) EG_TRY(check_tensor(ctx, &tensors[i]));
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  const egi_safetensor **sorted = EGI_NEW(&arena, const egi_safetensor *, count > 0 ? count : 1);
  if (sorted == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) sorted[i] = &tensors[i];
  qsort(sorted, count, sizeof *sorted, compare_pointers);
  egi_text_init(&header, ctx);
  write_header(&header, sorted, count);
  eg_status status = egi_text_status(&header);
  if (status == EG_OK) status = write_file(ctx, path, &header, sorted, count);
  egi_text_free(&header);
  egi_arena_clear(&arena);
  return status;
}
