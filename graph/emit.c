/* Emitters: how passes append nodes. Names come from scope and operator; shapes are inferred at once. */
#include "graph/graph.h"

static const char *new_name(egi_emitter *emitter, const char *stem) {
  egi_graph *graph = emitter->graph;
  const char *scope = emitter->scope != NULL ? emitter->scope : "";
  const char *name;
  do
    name = egi_arena_format(&graph->module->arena, "%s%s%s_%u", scope, scope[0] != '\0' ? "/" : "", stem,
                            ++graph->next_name);
  while (name != NULL && egi_graph_find_value(graph, name) != 0);
  return name;
}

static eg_status emit_node(egi_emitter *emitter, egi_node *node, egi_value_id *out_values, unsigned n_outputs) {
  egi_graph *graph = emitter->graph;
  egi_node_id id;
  for (unsigned i = 0; i < n_outputs; i++) {
    const char *name = new_name(emitter, egi_op_get(node->op)->name);
    if (name == NULL) return EG_ERROR_MEMORY;
    if (i == 0) node->name = name;
    EG_TRY(egi_graph_add_value(graph, name, &out_values[i]));
  }
  node->outputs = out_values;
  node->n_outputs = (uint16_t)n_outputs;
  EG_TRY(egi_graph_add_node(graph, node, &id));
  return egi_infer_node(graph, id);
}

void egi_emit_many(egi_emitter *emitter, egi_op op, const egi_value_id *inputs, unsigned n_inputs,
                   const egi_attribute *attributes, unsigned n_attributes, egi_value_id *out_values,
                   unsigned n_outputs) {
  for (unsigned i = 0; i < n_outputs; i++) out_values[i] = 0;
  if (emitter->status != EG_OK) return;
  if (n_inputs > UINT16_MAX || n_attributes > UINT16_MAX || n_outputs > UINT16_MAX) {
    emitter->status =
        egi_fail(emitter->graph->module->ctx, EG_ERROR_UNSUPPORTED, "%s: too many operands", egi_op_get(op)->name);
    return;
  }
  egi_node node = {.op = op, .scope = emitter->scope};
  node.inputs = (egi_value_id *)(uintptr_t)inputs; /* only read: the node is copied */
  node.attributes = (egi_attribute *)(uintptr_t)attributes;
  node.n_inputs = (uint16_t)n_inputs;
  node.n_attributes = (uint16_t)n_attributes;
  emitter->status = emit_node(emitter, &node, out_values, n_outputs);
  if (emitter->status != EG_OK)
    for (unsigned i = 0; i < n_outputs; i++) out_values[i] = 0;
}

egi_value_id egi_emit(egi_emitter *emitter, egi_op op, const egi_value_id *inputs, unsigned n_inputs,
                      const egi_attribute *attributes, unsigned n_attributes) {
  egi_value_id value;
  egi_emit_many(emitter, op, inputs, n_inputs, attributes, n_attributes, &value, 1);
  return value;
}

egi_value_id egi_emit_unary(egi_emitter *emitter, egi_op op, egi_value_id a) {
  return egi_emit(emitter, op, &a, 1, NULL, 0);
}

egi_value_id egi_emit_binary(egi_emitter *emitter, egi_op op, egi_value_id a, egi_value_id b) {
  const egi_value_id inputs[2] = {a, b};
  return egi_emit(emitter, op, inputs, 2, NULL, 0);
}

egi_value_id egi_emit_cast(egi_emitter *emitter, egi_value_id a, eg_dtype dtype) {
  const egi_attribute to = egi_attribute_int("to", dtype);
  if (emitter->status == EG_OK && emitter->graph->values[a].dtype == dtype) return a;
  return egi_emit(emitter, EGI_OP_Cast, &a, 1, &to, 1);
}

/* ---- constants ------------------------------------------------------------------------------------------------ */

static eg_status add_constant(egi_emitter *emitter, egi_weight *weight, const void *bytes, size_t size_bytes,
                              egi_value_id *out_value) {
  egi_module *module = emitter->graph->module;
  uint32_t index;
  uint8_t *data = EGI_NEW(&module->arena, uint8_t, size_bytes);
  if (data == NULL) return EG_ERROR_MEMORY;
  if (size_bytes > 0) memcpy(data, bytes, size_bytes);
  weight->name = new_name(emitter, "constant");
  if (weight->name == NULL) return EG_ERROR_MEMORY;
  weight->bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = data, .size_bytes = size_bytes};
  EG_TRY(egi_module_add_weight(module, weight, &index));
  return egi_graph_add_weight(emitter->graph, index, out_value);
}

egi_value_id egi_emit_integers(egi_emitter *emitter, const int64_t *values, uint32_t count) {
  egi_value_id value = 0;
  if (emitter->status != EG_OK) return 0;
  egi_weight weight = {.dtype = EG_DTYPE_I64, .rank = 1, .dims = {count}};
  emitter->status = add_constant(emitter, &weight, values, count * sizeof *values, &value);
  return value;
}

/* Towards zero, and to the nearest number that the type has: C leaves the rest undefined. */
static int64_t whole(double value, int64_t least, int64_t most) {
  if (!(value > (double)least)) return least;
  return value < (double)most ? (int64_t)value : most;
}

/* The bytes of `value` as one element of dtype; 0 when the type has no such number. */
static size_t encode(double value, eg_dtype dtype, uint8_t out[8]) {
  union {
    float f32;
    double f64;
    uint16_t half;
    int8_t i8;
    uint8_t u8;
    int16_t i16;
    int32_t i32;
    int64_t i64;
  } raw = {0};
  switch (dtype) {
  case EG_DTYPE_F32:
    raw.f32 = (float)value;
    break;
  case EG_DTYPE_F64:
    raw.f64 = value;
    break;
  case EG_DTYPE_F16:
    raw.half = egi_f32_to_f16((float)value);
    break;
  case EG_DTYPE_BF16:
    raw.half = egi_f32_to_bf16((float)value);
    break;
  case EG_DTYPE_I8:
    raw.i8 = (int8_t)whole(value, INT8_MIN, INT8_MAX);
    break;
  case EG_DTYPE_U8:
    raw.u8 = (uint8_t)whole(value, 0, UINT8_MAX);
    break;
  case EG_DTYPE_BOOL:
    raw.u8 = value != 0;
    break;
  case EG_DTYPE_I16:
    raw.i16 = (int16_t)whole(value, INT16_MIN, INT16_MAX);
    break;
  case EG_DTYPE_I32:
    raw.i32 = (int32_t)whole(value, INT32_MIN, INT32_MAX);
    break;
  case EG_DTYPE_I64:
    raw.i64 = whole(value, INT64_MIN, INT64_MAX);
    break;
  default:
    return 0;
  }
  memcpy(out, &raw, sizeof raw);
  return egi_dtype_bits(dtype) / 8;
}

egi_value_id egi_emit_scalar(egi_emitter *emitter, double value, eg_dtype dtype) {
  egi_value_id id = 0;
  uint8_t bytes[8];
  if (emitter->status != EG_OK) return 0;
  size_t size_bytes = encode(value, dtype, bytes);
  if (size_bytes == 0) {
    emitter->status =
        egi_fail(emitter->graph->module->ctx, EG_ERROR_UNSUPPORTED, "no constant of type %s", egi_dtype_name(dtype));
    return 0;
  }
  egi_weight weight = {.dtype = dtype};
  emitter->status = add_constant(emitter, &weight, bytes, size_bytes, &id);
  return id;
}
