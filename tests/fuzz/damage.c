/* The damaged-file generator: byte-level kinds here, message-level ones in damage_graph.c and damage_values.c. */
#include "damage.h"

#include <string.h>

uint64_t damage_random(damage *d, uint64_t bound) {
  /* splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014). */
  uint64_t z = d->random += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return (z ^ (z >> 31)) % bound;
}

/* ---- fields of the encoded message ---------------------------------------------------------------------------- */

typedef struct field {
  size_t begin, payload, end; /* of the tag; behind tag and length prefix; behind the value */
  unsigned wire;
} field;

typedef struct field_list {
  egi_arena *arena;
  const uint8_t *bytes;
  field *rows;
  uint32_t count, capacity;
} field_list;

static bool take_varint(const uint8_t *bytes, size_t end, size_t *position, uint64_t *out_value) {
  *out_value = 0;
  for (unsigned shift = 0; shift < 64 && *position < end; shift += 7) {
    uint8_t byte = bytes[(*position)++];
    *out_value |= (uint64_t)(byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

/* Fields of a message in the order of their tags, those of the messages within included. The bytes are a good file's;
 * nesting is that of the schema. */
static void list_fields(field_list *list, const ProtobufCMessageDescriptor *type, size_t position, size_t end) {
  while (position < end) {
    field row = {.begin = position};
    uint64_t tag = 0, value = 0;
    if (!take_varint(list->bytes, end, &position, &tag)) return;
    row.wire = tag & 7;
    row.payload = position;
    if (row.wire == 0 || row.wire == 2) {
      if (!take_varint(list->bytes, end, &position, &value)) return;
      if (row.wire == 2) row.payload = position;
    }
    size_t size = row.wire == 2 ? (size_t)value : row.wire == 1 ? 8 : row.wire == 5 ? 4 : 0;
    if (size > end - position) return;
    row.end = position + size;
    if (EGI_GROW(list->arena, &list->rows, list->count, &list->capacity) != EG_OK) return;
    list->rows[list->count++] = row;
    const ProtobufCFieldDescriptor *known = protobuf_c_message_descriptor_get_field(type, (unsigned)(tag >> 3));
    if (row.wire == 2 && known != NULL && known->type == PROTOBUF_C_TYPE_MESSAGE)
      list_fields(list, known->descriptor, row.payload, row.end);
    position = row.end;
  }
}

/* ---- byte-level kinds ----------------------------------------------------------------------------------------- */

typedef struct byte_damage {
  damage *d;
  const uint8_t *bytes;
  size_t size;
  field at;
  uint8_t *out; /* room for twice the size and 64 bytes */
  size_t out_size;
} byte_damage;

static void put(byte_damage *b, const void *bytes, size_t size) {
  if (size) memcpy(b->out + b->out_size, bytes, size);
  b->out_size += size;
}

/* The file with [begin, end) replaced. */
static void splice(byte_damage *b, size_t begin, size_t end, const void *bytes, size_t size) {
  put(b, b->bytes, begin);
  put(b, bytes, size);
  put(b, b->bytes + end, b->size - end);
}

static void truncate_at_field(byte_damage *b) {
  put(b, b->bytes, b->at.begin);
}

static void truncate_in_field(byte_damage *b) {
  put(b, b->bytes, b->at.begin + (size_t)damage_random(b->d, b->at.end - b->at.begin));
}

static void swap_wire_type(byte_damage *b) {
  uint8_t tag = b->bytes[b->at.begin];
  uint8_t wire = (uint8_t)((b->at.wire + 1 + damage_random(b->d, 7)) & 7);
  tag = (uint8_t)((tag & 0xf8) | wire);
  splice(b, b->at.begin, b->at.begin + 1, &tag, 1);
}

static void change_field_number(byte_damage *b) {
  uint8_t tag = (uint8_t)((b->bytes[b->at.begin] & 0x87) | damage_random(b->d, 16) << 3);
  splice(b, b->at.begin, b->at.begin + 1, &tag, 1);
}

/* Where a length or a number stands: an enormous one, in up to ten bytes or more than a varint may have. */
static void put_huge_varint(byte_damage *b) {
  static const uint8_t ones[12] = {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};
  uint8_t varint[13];
  size_t length = 1 + (size_t)damage_random(b->d, 12), begin = b->at.begin, position;
  uint64_t tag;
  memcpy(varint, ones, length);
  varint[length] = (uint8_t)damage_random(b->d, 128);
  position = begin;
  if (!take_varint(b->bytes, b->size, &position, &tag)) return;
  splice(b, position, b->at.wire == 2 ? b->at.payload : b->at.end, varint, length + 1);
}

static void change_length(byte_damage *b) {
  uint8_t byte = b->bytes[b->at.payload - 1];
  byte = (uint8_t)((byte & 0x80) | ((byte + 1 + damage_random(b->d, 126)) & 0x7f));
  splice(b, b->at.payload - 1, b->at.payload, &byte, 1);
}

static void repeat_field(byte_damage *b) {
  splice(b, b->at.begin, b->at.begin, b->bytes + b->at.begin, b->at.end - b->at.begin);
}

static void drop_field(byte_damage *b) {
  splice(b, b->at.begin, b->at.end, NULL, 0);
}

static void flip_byte(byte_damage *b) {
  size_t where = b->at.begin + (size_t)damage_random(b->d, b->at.end - b->at.begin);
  uint8_t byte = b->bytes[where] ^ (uint8_t)(1 + damage_random(b->d, 255));
  splice(b, where, where + 1, &byte, 1);
}

static const struct {
  const char *name;
  void (*apply)(byte_damage *b);
} byte_kinds[] = {
    {"truncate at a field", truncate_at_field},
    {"truncate in a field", truncate_in_field},
    {"swap the wire type", swap_wire_type},
    {"change the field number", change_field_number},
    {"put a huge varint", put_huge_varint},
    {"change a length", change_length},
    {"repeat a field", repeat_field},
    {"drop a field", drop_field},
    {"flip a byte", flip_byte},
};
#define N_BYTE_KINDS ((unsigned)(sizeof(byte_kinds) / sizeof(byte_kinds[0])))

static uint8_t *damage_bytes(damage *d, const uint8_t *bytes, size_t size, unsigned kind, size_t *out_size) {
  field_list list = {.arena = d->arena, .bytes = bytes};
  list_fields(&list, &onnx__model_proto__descriptor, 0, size);
  byte_damage b = {.d = d, .bytes = bytes, .size = size};
  b.out = egi_arena_get(d->arena, 1, 2 * size + 64);
  if (list.count == 0 || b.out == NULL) return NULL;
  b.at = list.rows[damage_random(d, list.count)];
  byte_kinds[kind].apply(&b);
  *out_size = b.out_size;
  return b.out;
}

/* ---- message-level kinds -------------------------------------------------------------------------------------- */

static void *take(void *userdata, size_t size_bytes) {
  return egi_arena_get(userdata, 1, size_bytes ? size_bytes : 1);
}

static void give_back(void *userdata, void *memory) {
  (void)userdata;
  (void)memory;
}

static uint8_t *pack(damage *d, size_t *out_size) {
  *out_size = onnx__model_proto__get_packed_size(d->model);
  uint8_t *out = egi_arena_get(d->arena, 1, *out_size ? *out_size : 1);
  if (out != NULL) onnx__model_proto__pack(d->model, out);
  return out;
}

static uint8_t *damage_message(damage *d, const uint8_t *bytes, size_t size, const damage_kind *kind,
                               size_t *out_size) {
  ProtobufCAllocator allocator = {take, give_back, d->arena};
  size_t good_size = 0;
  d->model = onnx__model_proto__unpack(&allocator, size, bytes);
  if (d->model == NULL || d->model->graph == NULL || d->model->graph->n_node == 0) return NULL;
  d->graph = d->model->graph;
  const uint8_t *good = pack(d, &good_size);
  kind->apply(d);
  uint8_t *out = pack(d, out_size);
  if (good == NULL || out == NULL) return NULL;
  return *out_size == good_size && memcmp(good, out, good_size) == 0 ? NULL : out;
}

static const damage_kind *message_kind(unsigned kind) {
  if (kind < damage_n_graph_kinds) return &damage_graph_kinds[kind];
  return &damage_value_kinds[kind - damage_n_graph_kinds];
}

unsigned damage_kind_count(void) {
  return N_BYTE_KINDS + damage_n_graph_kinds + damage_n_value_kinds;
}

const char *damage_kind_name(unsigned kind) {
  return kind < N_BYTE_KINDS ? byte_kinds[kind].name : message_kind(kind - N_BYTE_KINDS)->name;
}

uint8_t *damage_file(egi_arena *arena, const uint8_t *bytes, size_t size, unsigned kind, uint64_t seed,
                     size_t *out_size) {
  damage d = {.arena = arena, .random = seed};
  if (kind < N_BYTE_KINDS) return damage_bytes(&d, bytes, size, kind, out_size);
  return damage_message(&d, bytes, size, message_kind(kind - N_BYTE_KINDS), out_size);
}

/* ---- for the kinds -------------------------------------------------------------------------------------------- */

char *damage_text(damage *d, const char *text) {
  if (text == NULL) text = ""; /* a field that is absent */
  return egi_arena_copy_text(d->arena, text, strlen(text));
}

void *damage_append(damage *d, void *list, size_t *count, void *row) {
  void **longer = egi_arena_get(d->arena, *count + 1, sizeof(void *));
  if (longer == NULL) return list;
  if (*count) memcpy(longer, list, *count * sizeof(void *));
  longer[(*count)++] = row;
  return longer;
}

Onnx__NodeProto *damage_add_node(damage *d, Onnx__GraphProto *graph, const char *op, const char *input,
                                 const char *output) {
  Onnx__NodeProto *node = EGI_NEW(d->arena, Onnx__NodeProto, 1);
  onnx__node_proto__init(node);
  node->op_type = damage_text(d, op);
  if (input != NULL) node->input = damage_append(d, NULL, &node->n_input, damage_text(d, input));
  node->output = damage_append(d, NULL, &node->n_output, damage_text(d, output));
  graph->node = damage_append(d, graph->node, &graph->n_node, node);
  return node;
}

Onnx__AttributeProto *damage_add_attribute(damage *d, Onnx__NodeProto *node, const char *name, int type) {
  Onnx__AttributeProto *attribute = EGI_NEW(d->arena, Onnx__AttributeProto, 1);
  onnx__attribute_proto__init(attribute);
  attribute->name = damage_text(d, name);
  attribute->has_type = true;
  attribute->type = (Onnx__AttributeProto__AttributeType)type;
  node->attribute = damage_append(d, node->attribute, &node->n_attribute, attribute);
  return attribute;
}

Onnx__TensorProto *damage_add_weight(damage *d, const char *name, int dtype, size_t rank, const int64_t *dims,
                                     size_t size) {
  Onnx__TensorProto *tensor = EGI_NEW(d->arena, Onnx__TensorProto, 1);
  onnx__tensor_proto__init(tensor);
  tensor->name = damage_text(d, name);
  tensor->has_data_type = true;
  tensor->data_type = dtype;
  tensor->n_dims = rank;
  tensor->dims = EGI_NEW(d->arena, int64_t, rank ? rank : 1);
  if (rank) memcpy(tensor->dims, dims, rank * sizeof(int64_t));
  tensor->has_raw_data = size > 0;
  tensor->raw_data.len = size;
  tensor->raw_data.data = egi_arena_get(d->arena, 1, size ? size : 1);
  d->graph->initializer = damage_append(d, d->graph->initializer, &d->graph->n_initializer, tensor);
  return tensor;
}

void damage_give_out(damage *d, const char *name) {
  if (d->graph->n_output == 0) return;
  d->graph->output[0]->name = damage_text(d, name);
  d->graph->output[0]->type = NULL;
}

Onnx__NodeProto *damage_any_node(damage *d) {
  return d->graph->node[damage_random(d, d->graph->n_node)];
}

Onnx__TensorProto *damage_any_weight(damage *d) {
  if (d->graph->n_initializer == 0) return NULL;
  return d->graph->initializer[damage_random(d, d->graph->n_initializer)];
}

char *damage_any_name(damage *d) {
  const Onnx__GraphProto *graph = d->graph;
  const Onnx__NodeProto *node = damage_any_node(d);
  const Onnx__TensorProto *weight = damage_any_weight(d);
  const char *name = node->n_output ? node->output[damage_random(d, node->n_output)] : "nowhere";
  if (damage_random(d, 3) == 0 && weight != NULL) name = weight->name;
  if (damage_random(d, 3) == 0 && graph->n_input) name = graph->input[damage_random(d, graph->n_input)]->name;
  return damage_text(d, name);
}
