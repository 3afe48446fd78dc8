/* Writes ONNX messages byte by byte, right or wrong, and files in a directory of its own. */
#ifndef ENGRAFT_TESTS_PROTO_SUPPORT_WIRE_H
#define ENGRAFT_TESTS_PROTO_SUPPORT_WIRE_H

#include "proto/proto.h"

enum { TAG_VARINT = 0, TAG_FIXED64 = 1, TAG_BYTES = 2, TAG_GROUP = 3, TAG_FIXED32 = 5 };

/* Bytes of a message; large enough for every test's. */
typedef struct wire_bytes {
  uint8_t data[1 << 16];
  size_t size;
} wire_bytes;

void wire_varint(wire_bytes *out, uint64_t value);
void wire_tag(wire_bytes *out, uint32_t field, unsigned wire_type);
void wire_number(wire_bytes *out, uint32_t field, uint64_t value);
void wire_data(wire_bytes *out, uint32_t field, const void *bytes, size_t size);
void wire_text(wire_bytes *out, uint32_t field, const char *text);
/* `inner` as a field of `out`. */
void wire_message(wire_bytes *out, uint32_t field, const wire_bytes *inner);

/* A model with nodes, attributes, weights inline and in typed fields, metadata, a function, types and unknown fields.
 */
void wire_small_model(wire_bytes *out);

/* A fresh directory under the current one; removed with what the tests put there. */
void support_make_directory(char *out_path, size_t capacity);
void support_remove_directory(const char *path);
void support_write_file(const char *directory, const char *name, const void *bytes, size_t size);

#endif
