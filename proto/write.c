/* Message → file: protobuf-c packs the skeleton, and the wire walk puts the weights' bytes back while it is written. */
#include "proto/wire.h"

static eg_status put_in_file(void *target, const void *bytes, size_t size_bytes) {
  return egi_file_write(target, bytes, size_bytes);
}

static eg_status write_file(eg_context *ctx, const egi_wire_message *message, const egi_wire_plan *plan) {
  egi_file *file = NULL;
  EG_TRY(egi_file_create(ctx, message->name, &file));
  eg_status status = egi_wire_apply(message, plan, put_in_file, file);
  if (status == EG_OK) return egi_file_commit(file);
  egi_file_abandon(file);
  return status;
}

static eg_status write_skeleton(eg_context *ctx, egi_arena *arena, const egi_wire_message *message) {
  egi_onnx_limits limits;
  egi_wire_plan plan;
  egi_onnx_limits_default(&limits);
  limits.max_nodes = UINT64_MAX;
  limits.max_depth = UINT32_MAX;
  EG_TRY(egi_wire_walk(arena, message, &limits, &plan));
  if (plan.out_bytes > EGI_WIRE_MAX_MESSAGE)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED,
                    "%s: the model takes %llu bytes, a message holds 2 GiB: weights must be external data",
                    message->name, (unsigned long long)plan.out_bytes);
  return write_file(ctx, message, &plan);
}

eg_status egi_onnx_write(eg_context *ctx, const Onnx__ModelProto *model, const char *path) {
  size_t size_bytes = onnx__model_proto__get_packed_size(model);
  if (size_bytes > EGI_WIRE_MAX_MESSAGE)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "%s: the model takes more than 2 GiB besides the weights", path);
  uint8_t *bytes = egi_allocate(ctx, EGI_PURPOSE_GRAPH, size_bytes);
  if (!bytes) return EG_ERROR_MEMORY;
  onnx__model_proto__pack(model, bytes);
  egi_wire_message message = {.name = path,
                              .bytes = bytes,
                              .size_bytes = size_bytes,
                              .type = &onnx__model_proto__descriptor,
                              .mode = EGI_WIRE_EXPAND};
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_GRAPH);
  eg_status status = write_skeleton(ctx, &arena, &message);
  egi_arena_clear(&arena);
  egi_release(ctx, EGI_PURPOSE_GRAPH, bytes, size_bytes);
  return status;
}
