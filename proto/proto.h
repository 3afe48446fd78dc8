/* ONNX files: bytes → checked wire → ModelProto, and back. Weights stay where they lie in the mapped file.
 *
 * In every message made or read here TensorProto.raw_data holds an egi_range (16 bytes) instead of the tensor's bytes:
 * the guard writes ranges of the mapping, export writes ranges of any memory, and egi_onnx_write() puts the bytes back.
 */
#ifndef ENGRAFT_PROTO_PROTO_H
#define ENGRAFT_PROTO_PROTO_H

#include "base/base.h"
#include "onnx.pb-c.h"

typedef struct egi_range {
  const uint8_t *data;
  uint64_t size_bytes;
} egi_range;

typedef struct egi_onnx_limits {
  const char *external_root; /* NULL: strict */
  uint64_t max_nodes, max_bytes;
  uint32_t max_depth;
} egi_onnx_limits;
void egi_onnx_limits_default(egi_onnx_limits *limits);

typedef struct egi_onnx egi_onnx;

/* Maps, guards and unpacks. EG_ERROR_IO, _FORMAT, _BUDGET, _MEMORY. */
eg_status egi_onnx_open(eg_context *ctx, const char *path, const egi_onnx_limits *limits, egi_onnx **out_file);
/* `bytes` must outlive the file; `directory` may be NULL: external data is refused. */
eg_status egi_onnx_open_memory(eg_context *ctx, const void *bytes, size_t size_bytes, const char *directory,
                               const egi_onnx_limits *limits, egi_onnx **out_file);
void egi_onnx_retain(egi_onnx *file);
void egi_onnx_release(egi_onnx *file);
const Onnx__ModelProto *egi_onnx_model(const egi_onnx *file);
const egi_onnx_limits *egi_onnx_get_limits(const egi_onnx *file);
const char *egi_onnx_path(const egi_onnx *file); /* "memory" when it has none */
const char *egi_onnx_directory(const egi_onnx *file);

/* The little-endian bytes of a tensor of `expected_bytes`: inline raw_data, or external data mapped on first use. The
 * size is checked. Tensors in typed fields (float_data …) have no range: EG_OK with data NULL. *out_file_name and
 * *out_offset say where external bytes lie (NULL, 0 when inline). */
eg_status egi_onnx_tensor_range(egi_onnx *file, const Onnx__TensorProto *tensor, uint64_t expected_bytes,
                                egi_range *out_range, const char **out_file_name, uint64_t *out_offset);

/* A tensor file of ONNX's node tests: TensorProto alone. Freed by egi_onnx_tensor_free(). */
eg_status egi_onnx_read_tensor(eg_context *ctx, const char *path, Onnx__TensorProto **out_tensor,
                               egi_mapping *out_mapping);
void egi_onnx_tensor_free(Onnx__TensorProto *tensor, egi_mapping *mapping);

/* Writes a model through a temporary file; raw_data of every tensor is an egi_range. */
eg_status egi_onnx_write(eg_context *ctx, const Onnx__ModelProto *model, const char *path);

#endif
