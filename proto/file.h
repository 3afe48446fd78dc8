/* An opened ONNX file; private to proto/. */
#ifndef ENGRAFT_PROTO_FILE_H
#define ENGRAFT_PROTO_FILE_H

#include "proto/wire.h"

/* A file of external data, mapped whole. */
typedef struct egi_external_file {
  const char *location; /* as the tensors write it */
  egi_mapping mapping;
} egi_external_file;

struct egi_onnx {
  egi_arena arena; /* holds this struct too */
  unsigned references;
  egi_mapping mapping; /* empty when opened from memory */
  const char *path, *directory;
  egi_onnx_limits limits;
  Onnx__ModelProto *model; /* in the arena */
  egi_external_file *external;
  uint32_t n_external, external_capacity;
  egi_map external_by_location;
};

/* Checks the bytes, replaces raw_data by ranges and unpacks into `arena`. */
eg_status egi_onnx_unpack(egi_arena *arena, const egi_wire_message *message, const egi_onnx_limits *limits,
                          ProtobufCMessage **out_message);

#endif
