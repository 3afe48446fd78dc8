/* Writes GGUF files of version 3 (ggml's docs/gguf.md): header, key and value pairs, tensor rows, then the tensors at
 * multiples of 32. Little-endian; dims of a tensor stand from the fastest to the slowest. */
#include "io/io.h"

#include <string.h>

enum { VERSION = 3, ALIGNMENT = 32, QUANTISATION_VERSION = 2 };
/* Types of values, and of tensors as ggml numbers them; `file_type` is that of most tensors. */
enum { VALUE_U32 = 4, VALUE_F32 = 6, VALUE_STRING = 8 };

typedef struct type_row {
  eg_dtype dtype;
  uint32_t tensor_type, file_type;
} type_row;

static const type_row types[] = {{EG_DTYPE_F32, 0, 0}, {EG_DTYPE_F16, 1, 1}, {EG_DTYPE_BF16, 30, 32}};

static const type_row *type_of(eg_dtype dtype) {
  for (size_t i = 0; i < EGI_COUNT(types); i++)
    if (types[i].dtype == dtype) return &types[i];
  return NULL;
}

static uint64_t align(uint64_t at) {
  return (at + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void add_number(egi_text *out, uint64_t number, unsigned size_bytes) {
  char bytes[8];
  for (unsigned i = 0; i < size_bytes; i++) bytes[i] = (char)(uint8_t)(number >> (8 * i));
  egi_text_append(out, bytes, size_bytes);
}

static void add_string(egi_text *out, const char *string) {
  add_number(out, strlen(string), 8);
  egi_text_add(out, string);
}

static void add_key(egi_text *out, const char *key, uint32_t type) {
  add_string(out, key);
  add_number(out, type, 4);
}

static void add_text_pair(egi_text *out, const char *key, const char *value) {
  add_key(out, key, VALUE_STRING);
  add_string(out, value);
}

static void add_pairs(egi_text *out, const egi_gguf_adapter *adapter, uint32_t file_type) {
  uint32_t alpha;
  float wanted = (float)adapter->alpha;
  memcpy(&alpha, &wanted, sizeof alpha);
  add_text_pair(out, "general.architecture", adapter->architecture);
  add_text_pair(out, "general.type", "adapter");
  add_key(out, "general.file_type", VALUE_U32);
  add_number(out, file_type, 4);
  add_key(out, "general.quantization_version", VALUE_U32);
  add_number(out, QUANTISATION_VERSION, 4);
  add_text_pair(out, "adapter.type", "lora");
  add_key(out, "adapter.lora.alpha", VALUE_F32);
  add_number(out, alpha, 4);
}

static eg_status add_head(egi_text *out, const egi_gguf_adapter *adapter) {
  uint64_t offset = 0;
  egi_text_add(out, "GGUF");
  add_number(out, VERSION, 4);
  add_number(out, adapter->count, 8);
  add_number(out, 6, 8); /* pairs */
  const type_row *first = adapter->count > 0 ? type_of(adapter->tensors[0].dtype) : &types[0];
  for (size_t i = 0; i < adapter->count; i++)
    if (type_of(adapter->tensors[i].dtype) == NULL)
      return egi_fail(out->ctx, EG_ERROR_UNSUPPORTED, "tensor \"%s\" of type %s cannot be written as GGUF",
                      adapter->tensors[i].name, egi_dtype_name(adapter->tensors[i].dtype));
  add_pairs(out, adapter, first->file_type);
  for (size_t i = 0; i < adapter->count; i++) {
    const egi_safetensor *tensor = &adapter->tensors[i];
    add_string(out, tensor->name);
    add_number(out, (uint64_t)tensor->rank, 4);
    for (int d = tensor->rank - 1; d >= 0; d--) add_number(out, (uint64_t)tensor->dims[d], 8);
    add_number(out, type_of(tensor->dtype)->tensor_type, 4);
    add_number(out, offset, 8);
    offset = align(offset + tensor->size_bytes);
  }
  while (out->length % ALIGNMENT != 0 && !out->is_failed) add_number(out, 0, 1);
  return egi_text_status(out);
}

static eg_status write_file(eg_context *ctx, const char *path, const egi_text *head, const egi_gguf_adapter *adapter) {
  static const uint8_t zeros[ALIGNMENT] = {0};
  egi_file *file;
  EG_TRY(egi_file_create(ctx, path, &file));
  eg_status status = egi_file_write(file, head->data, head->length);
  for (size_t i = 0; i < adapter->count && status == EG_OK; i++) {
    uint64_t size_bytes = adapter->tensors[i].size_bytes;
    status = egi_file_write(file, adapter->tensors[i].data, (size_t)size_bytes);
    if (status == EG_OK) status = egi_file_write(file, zeros, (size_t)(align(size_bytes) - size_bytes));
  }
  if (status == EG_OK) return egi_file_commit(file);
  egi_file_abandon(file);
  return status;
}

eg_status egi_gguf_write_adapter(eg_context *ctx, const char *path, const egi_gguf_adapter *adapter) {
  egi_text head;
  egi_text_init(&head, ctx);
  eg_status status = add_head(&head, adapter);
  if (status == EG_OK) status = write_file(ctx, path, &head, adapter);
  egi_text_free(&head);
  return status;
}
