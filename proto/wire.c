/* The wire guard. The table that drives it is the descriptors protobuf-c generated from the schema: one fact in one
 * place.
 *
 * Invariant: a byte is looked at once and only inside the innermost open message, whose end lies inside that of the one
 * around it; so every length is bounded by the bytes left, and the work and the memory by the size of the input. */
#include "proto/wire.h"

enum { WIRE_VARINT = 0, WIRE_FIXED64 = 1, WIRE_BYTES = 2, WIRE_FIXED32 = 5 };
enum { TAG_BYTES = 5, LENGTH_BYTES = 5, VARINT_BYTES = 10, RAW_DATA_FIELD = 9 };

/* protobuf-c keeps some 40 bytes for a field while it reads one, besides the value itself. */
#define FIELD_COST 48u
/* Honest files unpack to at most twenty times their size; more is an attempt to use up memory. */
#define UNPACKED_FREE ((uint64_t)64 << 20)
#define UNPACKED_RATIO 32u

/* An open message. */
typedef struct open_message {
  const ProtobufCMessageDescriptor *type;
  const ProtobufCFieldDescriptor *field; /* that it is the value of; NULL at the top */
  uint64_t begin, end;
  uint64_t prefix; /* where its length prefix begins */
  uint64_t seen;   /* bit i: singular message field i has occurred */
  int64_t delta;   /* bytes by which its contents grow */
  uint32_t patch;  /* 1 + index of the patch of its length prefix, 0: unchanged so far */
} open_message;

typedef struct wire_walk {
  egi_arena *arena;
  const egi_wire_message *message;
  const egi_onnx_limits *limits;
  egi_wire_plan *plan;
  open_message *frames;
  uint32_t depth, capacity;
  uint64_t position;
  uint64_t field_begin; /* of the field being read, for messages */
  uint64_t n_nodes;
  uint64_t unpacked; /* estimate of what protobuf-c will allocate */
} wire_walk;

static unsigned varint_size(uint64_t value) {
  unsigned size = 1;
  for (; value >= 0x80; value >>= 7) size++;
  return size;
}

/* False when the varint is longer than `max_bytes` or not ended before `end`. */
static bool take_varint(const uint8_t *bytes, uint64_t *position, uint64_t end, unsigned max_bytes,
                        uint64_t *out_value) {
  uint64_t value = 0;
  for (unsigned i = 0; i < max_bytes && *position < end; i++) {
    uint8_t byte = bytes[(*position)++];
    value |= (uint64_t)(byte & 0x7f) << (7 * i);
    if (byte < 0x80) {
      *out_value = value;
      return i < 9 || byte <= 1;
    }
  }
  return false;
}

/* Number of fields numbered `id` of the checked bytes [begin, end). */
static uint64_t count_fields(const uint8_t *bytes, uint64_t begin, uint64_t end, uint32_t id) {
  uint64_t count = 0, tag = 0;
  while (begin < end && take_varint(bytes, &begin, end, TAG_BYTES, &tag)) {
    uint64_t value = 0;
    if (tag >> 3 == id) count++;
    unsigned wire = tag & 7;
    if (wire == WIRE_VARINT || wire == WIRE_BYTES) take_varint(bytes, &begin, end, VARINT_BYTES, &value);
    if (wire == WIRE_BYTES) begin += value;
    if (wire == WIRE_FIXED64) begin += 8;
    if (wire == WIRE_FIXED32) begin += 4;
  }
  return count;
}

/* Appends "graph.node[3].attribute[0]": the open messages. */
static void print_path(const wire_walk *walk, egi_text *out) {
  for (uint32_t i = 1; i < walk->depth; i++) {
    const open_message *outer = &walk->frames[i - 1], *inner = &walk->frames[i];
    egi_text_format(out, i > 1 ? ".%s" : "%s", inner->field->name);
    if (inner->field->label != PROTOBUF_C_LABEL_REPEATED) continue;
    /* The range ends behind the tag of `inner`, which is counted too. */
    uint64_t count = count_fields(walk->message->bytes, outer->begin, inner->prefix, inner->field->id);
    egi_text_format(out, "[%llu]", (unsigned long long)(count - 1));
  }
}

static eg_status fail_at(const wire_walk *walk, const ProtobufCFieldDescriptor *field, const char *reason) {
  eg_context *ctx = walk->arena->ctx;
  egi_text path;
  egi_text_init(&path, ctx);
  print_path(walk, &path);
  if (field) egi_text_format(&path, path.length ? ".%s" : "%s", field->name);
  eg_status status =
      egi_fail(ctx, EG_ERROR_FORMAT, "%s: not an ONNX file: %s%s%s at byte %llu", walk->message->name,
               egi_text_string(&path), path.length ? ": " : "", reason, (unsigned long long)walk->field_begin);
  egi_text_free(&path);
  return status;
}

static eg_status enter(wire_walk *walk, const ProtobufCFieldDescriptor *field, uint64_t prefix, uint64_t end) {
  eg_context *ctx = walk->arena->ctx;
  if (walk->depth > walk->limits->max_depth)
    return egi_fail(ctx, EG_ERROR_BUDGET, "%s: messages nested deeper than %u", walk->message->name,
                    walk->limits->max_depth);
  const ProtobufCMessageDescriptor *type = field ? field->descriptor : walk->message->type;
  if (type == &onnx__node_proto__descriptor && ++walk->n_nodes > walk->limits->max_nodes)
    return egi_fail(ctx, EG_ERROR_BUDGET, "%s: more than %llu nodes", walk->message->name,
                    (unsigned long long)walk->limits->max_nodes);
  EG_TRY(EGI_GROW(walk->arena, &walk->frames, walk->depth, &walk->capacity));
  walk->frames[walk->depth++] =
      (open_message){.type = type, .field = field, .begin = walk->position, .end = end, .prefix = prefix};
  walk->unpacked += type->sizeof_message;
  return EG_OK;
}

/* Closes the innermost message: its length is known now, and that of the one around it grows with it. */
static void leave(wire_walk *walk) {
  open_message *inner = &walk->frames[--walk->depth];
  if (!inner->patch || walk->depth == 0) return;
  egi_wire_patch *patch = &walk->plan->patches[inner->patch - 1];
  patch->length = (uint64_t)((int64_t)(inner->end - inner->begin) + inner->delta);
  walk->frames[walk->depth - 1].delta +=
      inner->delta + (int64_t)varint_size(patch->length) - (int64_t)(inner->begin - inner->prefix);
}

static eg_status add_patch(wire_walk *walk, const egi_wire_patch *patch) {
  egi_wire_plan *plan = walk->plan;
  EG_TRY(EGI_GROW(walk->arena, &plan->patches, plan->n_patches, &plan->capacity));
  plan->patches[plan->n_patches++] = *patch;
  return EG_OK;
}

/* Plans the change of a raw_data field and, outermost first, of the prefixes of the open messages around it. */
static eg_status patch_raw_data(wire_walk *walk, uint64_t prefix, uint64_t length) {
  const uint8_t *bytes = walk->message->bytes + walk->position;
  for (uint32_t i = 1; i < walk->depth; i++) {
    open_message *open = &walk->frames[i];
    if (open->patch) continue;
    EG_TRY(add_patch(walk, &(egi_wire_patch){.position = open->prefix, .skip = open->begin - open->prefix}));
    open->patch = walk->plan->n_patches;
  }
  egi_wire_patch patch = {.position = prefix, .skip = walk->position - prefix + length, .has_range = true};
  if (walk->message->mode == EGI_WIRE_SHRINK) {
    patch.range = (egi_range){bytes, length};
    patch.length = sizeof(egi_range);
  } else {
    if (length != sizeof(egi_range)) return fail_at(walk, NULL, "raw_data is not a range");
    memcpy(&patch.range, bytes, sizeof(egi_range));
    patch.length = patch.range.size_bytes;
  }
  open_message *tensor = &walk->frames[walk->depth - 1];
  tensor->delta += (int64_t)(varint_size(patch.length) + patch.length) - (int64_t)patch.skip;
  return add_patch(walk, &patch);
}

static unsigned wire_type_of(ProtobufCType type) {
  switch (type) {
  case PROTOBUF_C_TYPE_STRING:
  case PROTOBUF_C_TYPE_BYTES:
  case PROTOBUF_C_TYPE_MESSAGE:
    return WIRE_BYTES;
  case PROTOBUF_C_TYPE_FLOAT:
  case PROTOBUF_C_TYPE_FIXED32:
  case PROTOBUF_C_TYPE_SFIXED32:
    return WIRE_FIXED32;
  case PROTOBUF_C_TYPE_DOUBLE:
  case PROTOBUF_C_TYPE_FIXED64:
  case PROTOBUF_C_TYPE_SFIXED64:
    return WIRE_FIXED64;
  default:
    return WIRE_VARINT;
  }
}

/* A packed list of numbers in [position, position + length). */
static eg_status check_packed(wire_walk *walk, const ProtobufCFieldDescriptor *field, uint64_t length) {
  unsigned wire = wire_type_of(field->type);
  uint64_t end = walk->position + length, value = 0;
  unsigned width = wire == WIRE_FIXED32 ? 4 : wire == WIRE_FIXED64 ? 8 : 1;
  walk->unpacked += length / width * 8;
  if (length % width) return fail_at(walk, field, "a packed list does not hold whole numbers");
  if (wire != WIRE_VARINT) return EG_OK;
  for (uint64_t at = walk->position; at < end;)
    if (!take_varint(walk->message->bytes, &at, end, VARINT_BYTES, &value))
      return fail_at(walk, field, "bad varint in a packed list");
  return EG_OK;
}

static bool is_raw_data(const open_message *open, const ProtobufCFieldDescriptor *field) {
  return open->type == &onnx__tensor_proto__descriptor && field->id == RAW_DATA_FIELD;
}

/* A field with a length prefix, of a type known to the schema. The position is behind the prefix. */
static eg_status walk_bytes(wire_walk *walk, const ProtobufCFieldDescriptor *field, uint64_t prefix, uint64_t length) {
  open_message *open = &walk->frames[walk->depth - 1];
  bool is_message = field->type == PROTOBUF_C_TYPE_MESSAGE, is_raw = is_raw_data(open, field);
  if ((is_message || is_raw) && field->label != PROTOBUF_C_LABEL_REPEATED) {
    uint64_t bit = (uint64_t)1 << ((uint64_t)(field - open->type->fields) & 63);
    if (open->seen & bit) return fail_at(walk, field, "the field occurs twice");
    open->seen |= bit;
  }
  if (is_message) return enter(walk, field, prefix, walk->position + length);
  if (is_raw) {
    EG_TRY(patch_raw_data(walk, prefix, length));
  } else if (field->type == PROTOBUF_C_TYPE_STRING || field->type == PROTOBUF_C_TYPE_BYTES) {
    walk->unpacked += length;
    if (field->type == PROTOBUF_C_TYPE_STRING && length && memchr(walk->message->bytes + walk->position, 0, length))
      return fail_at(walk, field, "a text with a zero byte in it");
  } else {
    if (field->label != PROTOBUF_C_LABEL_REPEATED) return fail_at(walk, field, "wrong wire type");
    EG_TRY(check_packed(walk, field, length));
  }
  walk->position += length;
  return EG_OK;
}

static eg_status walk_field(wire_walk *walk) {
  const open_message *open = &walk->frames[walk->depth - 1];
  const uint8_t *bytes = walk->message->bytes;
  uint64_t tag = 0, value = 0;
  walk->field_begin = walk->position;
  if (!take_varint(bytes, &walk->position, open->end, TAG_BYTES, &tag) || tag > UINT32_MAX || tag >> 3 == 0)
    return fail_at(walk, NULL, "bad field tag");
  const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field(open->type, (unsigned)(tag >> 3));
  unsigned wire = tag & 7;
  uint64_t end = open->end;
  walk->unpacked += FIELD_COST;
  if (field && wire != WIRE_BYTES && wire != wire_type_of(field->type)) return fail_at(walk, field, "wrong wire type");
  switch (wire) {
  case WIRE_VARINT:
    if (!take_varint(bytes, &walk->position, end, VARINT_BYTES, &value)) return fail_at(walk, field, "bad varint");
    return EG_OK;
  case WIRE_FIXED32:
  case WIRE_FIXED64: {
    unsigned width = wire == WIRE_FIXED32 ? 4 : 8;
    if (end - walk->position < width) return fail_at(walk, field, "cut off");
    walk->position += width;
    return EG_OK;
  }
  case WIRE_BYTES: {
    uint64_t prefix = walk->position;
    if (!take_varint(bytes, &walk->position, end, LENGTH_BYTES, &value)) return fail_at(walk, field, "bad length");
    if (value > end - walk->position) return fail_at(walk, field, "longer than what is left of the message around it");
    if (field) return walk_bytes(walk, field, prefix, value);
    walk->unpacked += value;
    walk->position += value;
    return EG_OK;
  }
  default:
    return fail_at(walk, field, "unknown wire type");
  }
}

eg_status egi_wire_walk(egi_arena *arena, const egi_wire_message *message, const egi_onnx_limits *limits,
                        egi_wire_plan *out_plan) {
  *out_plan = (egi_wire_plan){0};
  wire_walk walk = {.arena = arena, .message = message, .limits = limits, .plan = out_plan};
  EG_TRY(enter(&walk, NULL, 0, message->size_bytes));
  int64_t delta = 0;
  while (walk.depth) {
    open_message *open = &walk.frames[walk.depth - 1];
    if (walk.position < open->end) {
      EG_TRY(walk_field(&walk));
    } else {
      delta = open->delta;
      leave(&walk);
    }
  }
  out_plan->out_bytes = (uint64_t)((int64_t)message->size_bytes + delta);
  uint64_t skeleton = message->mode == EGI_WIRE_SHRINK ? out_plan->out_bytes : message->size_bytes;
  if (skeleton > EGI_WIRE_MAX_MESSAGE)
    return egi_fail(arena->ctx, EG_ERROR_BUDGET, "%s: more than 2 GiB besides the weights", message->name);
  if (message->mode == EGI_WIRE_SHRINK && walk.unpacked > UNPACKED_FREE + UNPACKED_RATIO * skeleton)
    return egi_fail(arena->ctx, EG_ERROR_BUDGET, "%s: a file of empty messages: %llu bytes would take %llu in memory",
                    message->name, (unsigned long long)message->size_bytes, (unsigned long long)walk.unpacked);
  return EG_OK;
}

static eg_status put_patch(const egi_wire_patch *patch, egi_wire_mode mode, egi_wire_sink sink, void *target) {
  uint8_t prefix[VARINT_BYTES];
  size_t size = 0;
  uint64_t length = patch->length;
  for (; length >= 0x80; length >>= 7) prefix[size++] = (uint8_t)(length | 0x80);
  prefix[size++] = (uint8_t)length;
  EG_TRY(sink(target, prefix, size));
  if (!patch->has_range) return EG_OK;
  if (mode == EGI_WIRE_SHRINK) return sink(target, &patch->range, sizeof(patch->range));
  return patch->range.size_bytes ? sink(target, patch->range.data, patch->range.size_bytes) : EG_OK;
}

eg_status egi_wire_apply(const egi_wire_message *message, const egi_wire_plan *plan, egi_wire_sink sink, void *target) {
  uint64_t position = 0;
  for (uint32_t i = 0; i < plan->n_patches; i++) {
    const egi_wire_patch *patch = &plan->patches[i];
    EG_TRY(sink(target, message->bytes + position, patch->position - position));
    EG_TRY(put_patch(patch, message->mode, sink, target));
    position = patch->position + patch->skip;
  }
  return sink(target, message->bytes + position, message->size_bytes - position);
}
