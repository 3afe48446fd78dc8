/* Opening and closing ONNX files and tensor files. An egi_onnx lies in its own arena and is counted: modules and their
 * clones share it, since weights are ranges of its mappings. */
#include "proto/file.h"

#define DEFAULT_MAX_NODES 4000000u
#define DEFAULT_MAX_BYTES ((uint64_t)8 << 30)
#define DEFAULT_MAX_DEPTH 100u
/* protobuf-c unpacks and packs recursively, about 1 KiB of stack a level. */
#define LARGEST_MAX_DEPTH 1000u

void egi_onnx_limits_default(egi_onnx_limits *limits) {
  *limits = (egi_onnx_limits){NULL, DEFAULT_MAX_NODES, DEFAULT_MAX_BYTES, DEFAULT_MAX_DEPTH};
}

/* Fields that are 0 have their defaults. */
static eg_status copy_limits(egi_arena *arena, const egi_onnx_limits *wanted, egi_onnx_limits *out_limits) {
  egi_onnx_limits_default(out_limits);
  if (!wanted) return EG_OK;
  if (wanted->max_nodes) out_limits->max_nodes = wanted->max_nodes;
  if (wanted->max_bytes) out_limits->max_bytes = wanted->max_bytes;
  if (wanted->max_depth) out_limits->max_depth = wanted->max_depth;
  if (out_limits->max_depth > LARGEST_MAX_DEPTH) out_limits->max_depth = LARGEST_MAX_DEPTH;
  if (!wanted->external_root) return EG_OK;
  out_limits->external_root = egi_arena_copy_text(arena, wanted->external_root, strlen(wanted->external_root));
  return out_limits->external_root ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status create_file(eg_context *ctx, const egi_onnx_limits *limits, egi_onnx **out_file) {
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_GRAPH);
  egi_onnx *file = EGI_NEW(&arena, egi_onnx, 1);
  if (!file) return EG_ERROR_MEMORY;
  file->arena = arena;
  file->references = 1;
  egi_map_init(&file->external_by_location, &file->arena);
  egi_context_retain(ctx);
  eg_status status = copy_limits(&file->arena, limits, &file->limits);
  if (status == EG_OK) {
    *out_file = file;
    return EG_OK;
  }
  egi_onnx_release(file);
  return status;
}

static eg_status unpack_model(egi_onnx *file, const uint8_t *bytes, size_t size_bytes) {
  eg_context *ctx = file->arena.ctx;
  const char *name = egi_onnx_path(file);
  if (size_bytes == 0) return egi_fail(ctx, EG_ERROR_FORMAT, "%s: not an ONNX file: it is empty", name);
  if (size_bytes > file->limits.max_bytes)
    return egi_fail(ctx, EG_ERROR_BUDGET, "%s: %zu bytes, more than the limit of %llu", name, size_bytes,
                    (unsigned long long)file->limits.max_bytes);
  egi_wire_message message = {.name = name,
                              .bytes = bytes,
                              .size_bytes = size_bytes,
                              .type = &onnx__model_proto__descriptor,
                              .mode = EGI_WIRE_SHRINK};
  ProtobufCMessage *unpacked = NULL;
  EG_TRY(egi_onnx_unpack(&file->arena, &message, &file->limits, &unpacked));
  file->model = (Onnx__ModelProto *)unpacked;
  if (!file->model->graph) return egi_fail(ctx, EG_ERROR_FORMAT, "%s: not an ONNX model: it has no graph", name);
  return EG_OK;
}

static eg_status open_path(egi_onnx *file, const char *path) {
  file->path = egi_arena_copy_text(&file->arena, path, strlen(path));
  file->directory = egi_path_directory(&file->arena, path);
  if (!file->path || !file->directory) return EG_ERROR_MEMORY;
  EG_TRY(egi_mapping_open(file->arena.ctx, path, &file->mapping));
  return unpack_model(file, file->mapping.data, file->mapping.size_bytes);
}

eg_status egi_onnx_open(eg_context *ctx, const char *path, const egi_onnx_limits *limits, egi_onnx **out_file) {
  egi_onnx *file = NULL;
  EG_TRY(create_file(ctx, limits, &file));
  eg_status status = open_path(file, path);
  if (status == EG_OK)
    *out_file = file;
  else
    egi_onnx_release(file);
  return status;
}

eg_status egi_onnx_open_memory(eg_context *ctx, const void *bytes, size_t size_bytes, const char *directory,
                               const egi_onnx_limits *limits, egi_onnx **out_file) {
  egi_onnx *file = NULL;
  EG_TRY(create_file(ctx, limits, &file));
  eg_status status = EG_OK;
  if (directory) {
    file->directory = egi_arena_copy_text(&file->arena, directory, strlen(directory));
    if (!file->directory) status = EG_ERROR_MEMORY;
  }
  if (status == EG_OK) status = unpack_model(file, bytes, size_bytes);
  if (status == EG_OK)
    *out_file = file;
  else
    egi_onnx_release(file);
  return status;
}

void egi_onnx_retain(egi_onnx *file) {
  file->references++;
}

void egi_onnx_release(egi_onnx *file) {
  if (!file || --file->references) return;
  for (uint32_t i = 0; i < file->n_external; i++) egi_mapping_close(&file->external[i].mapping);
  egi_mapping_close(&file->mapping);
  egi_arena arena = file->arena;
  egi_arena_clear(&arena);
  egi_context_release(arena.ctx);
}

const Onnx__ModelProto *egi_onnx_model(const egi_onnx *file) {
  return file->model;
}
const egi_onnx_limits *egi_onnx_get_limits(const egi_onnx *file) {
  return &file->limits;
}
const char *egi_onnx_path(const egi_onnx *file) {
  return file->path ? file->path : "memory";
}
const char *egi_onnx_directory(const egi_onnx *file) {
  return file->directory;
}

/* A tensor and the arena that everything it points to lies in. */
typedef struct tensor_file {
  Onnx__TensorProto tensor; /* first: what egi_onnx_tensor_free() is given */
  egi_arena arena;
} tensor_file;

static eg_status unpack_tensor(egi_arena *arena, const char *path, const egi_mapping *mapping,
                               Onnx__TensorProto **out_tensor) {
  static const uint8_t nothing[1] = {0};
  egi_onnx_limits limits;
  egi_onnx_limits_default(&limits);
  egi_wire_message message = {.name = path,
                              .bytes = mapping->size_bytes ? mapping->data : nothing,
                              .size_bytes = mapping->size_bytes,
                              .type = &onnx__tensor_proto__descriptor,
                              .mode = EGI_WIRE_SHRINK};
  ProtobufCMessage *unpacked = NULL;
  EG_TRY(egi_onnx_unpack(arena, &message, &limits, &unpacked));
  tensor_file *file = EGI_NEW(arena, tensor_file, 1);
  if (!file) return EG_ERROR_MEMORY;
  memcpy(&file->tensor, unpacked, sizeof(file->tensor));
  file->arena = *arena;
  *out_tensor = &file->tensor;
  return EG_OK;
}

eg_status egi_onnx_read_tensor(eg_context *ctx, const char *path, Onnx__TensorProto **out_tensor,
                               egi_mapping *out_mapping) {
  egi_mapping mapping = {0};
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_GRAPH);
  EG_TRY(egi_mapping_open(ctx, path, &mapping));
  eg_status status = unpack_tensor(&arena, path, &mapping, out_tensor);
  if (status == EG_OK) {
    *out_mapping = mapping;
    return EG_OK;
  }
  egi_arena_clear(&arena);
  egi_mapping_close(&mapping);
  return status;
}

void egi_onnx_tensor_free(Onnx__TensorProto *tensor, egi_mapping *mapping) {
  if (tensor) {
    egi_arena arena = ((tensor_file *)tensor)->arena;
    egi_arena_clear(&arena);
  }
  egi_mapping_close(mapping);
}
