/* The wire guard: one walk over an encoded message, without recursion, that checks every byte of its structure and
 * plans how raw_data changes between bytes and egi_range. Private to proto/. */
#ifndef ENGRAFT_PROTO_WIRE_H
#define ENGRAFT_PROTO_WIRE_H

#include "proto/proto.h"

/* Longest length prefix, and longest message that protobuf-c and other ONNX readers take. */
#define EGI_WIRE_MAX_MESSAGE ((uint64_t)INT32_MAX)

typedef enum egi_wire_mode {
  EGI_WIRE_SHRINK, /* raw_data bytes become an egi_range of them */
  EGI_WIRE_EXPAND  /* an egi_range becomes the bytes it names */
} egi_wire_mode;

/* Input bytes [position, position + skip) become a length prefix and, where `has_range`, the range or its bytes. */
typedef struct egi_wire_patch {
  uint64_t position, skip, length;
  egi_range range;
  bool has_range;
} egi_wire_patch;

typedef struct egi_wire_message {
  const char *name; /* of the file, for messages */
  const uint8_t *bytes;
  uint64_t size_bytes;
  const ProtobufCMessageDescriptor *type;
  egi_wire_mode mode;
} egi_wire_message;

typedef struct egi_wire_plan {
  egi_wire_patch *patches; /* in the order of their positions */
  uint32_t n_patches, capacity;
  uint64_t out_bytes; /* size of the result */
} egi_wire_plan;

/* EG_ERROR_FORMAT names the field and byte; EG_ERROR_BUDGET names the limit. */
eg_status egi_wire_walk(egi_arena *arena, const egi_wire_message *message, const egi_onnx_limits *limits,
                        egi_wire_plan *out_plan);
/* Hands the result over in order. */
typedef eg_status (*egi_wire_sink)(void *target, const void *bytes, size_t size_bytes);
eg_status egi_wire_apply(const egi_wire_message *message, const egi_wire_plan *plan, egi_wire_sink sink, void *target);

#endif
