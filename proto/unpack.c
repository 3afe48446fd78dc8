/* Bytes → message: the wire guard first, then protobuf-c on the skeleton, with all its memory in an arena that is freed
 * whole. */
#include "proto/file.h"

typedef struct unpack_memory {
  egi_arena *arena;
  bool is_exhausted;
} unpack_memory;

static void *take(void *userdata, size_t size_bytes) {
  unpack_memory *memory = userdata;
  void *taken = egi_arena_get(memory->arena, 1, size_bytes ? size_bytes : 1);
  if (!taken) memory->is_exhausted = true;
  return taken;
}

/* Nothing: the arena goes whole. */
static void give_back(void *userdata, void *memory) {
  (void)userdata;
  (void)memory;
}

typedef struct buffer {
  uint8_t *data;
  size_t used;
} buffer;

static eg_status put_in_buffer(void *target, const void *bytes, size_t size_bytes) {
  buffer *out = target;
  if (size_bytes) memcpy(out->data + out->used, bytes, size_bytes);
  out->used += size_bytes;
  return EG_OK;
}

static eg_status unpack_skeleton(egi_arena *arena, const egi_wire_message *message, const buffer *skeleton,
                                 ProtobufCMessage **out_message) {
  unpack_memory memory = {.arena = arena};
  ProtobufCAllocator allocator = {take, give_back, &memory};
  *out_message = protobuf_c_message_unpack(message->type, &allocator, skeleton->used, skeleton->data);
  if (*out_message) return EG_OK;
  if (memory.is_exhausted) return EG_ERROR_MEMORY;
  return egi_fail(arena->ctx, EG_ERROR_FORMAT, "%s: not an ONNX file: it cannot be unpacked", message->name);
}

eg_status egi_onnx_unpack(egi_arena *arena, const egi_wire_message *message, const egi_onnx_limits *limits,
                          ProtobufCMessage **out_message) {
  eg_context *ctx = arena->ctx;
  egi_arena scratch;
  egi_wire_plan plan;
  egi_arena_init(&scratch, ctx, EGI_PURPOSE_GRAPH);
  eg_status status = egi_wire_walk(&scratch, message, limits, &plan);
  if (status == EG_OK) {
    size_t size_bytes = (size_t)plan.out_bytes;
    buffer skeleton = {.data = egi_allocate(ctx, EGI_PURPOSE_GRAPH, size_bytes)};
    status = skeleton.data ? egi_wire_apply(message, &plan, put_in_buffer, &skeleton) : EG_ERROR_MEMORY;
    if (status == EG_OK) status = unpack_skeleton(arena, message, &skeleton, out_message);
    if (skeleton.data) egi_release(ctx, EGI_PURPOSE_GRAPH, skeleton.data, size_bytes);
  }
  egi_arena_clear(&scratch);
  return status;
}
