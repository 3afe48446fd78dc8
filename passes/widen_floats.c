/* float16 and bfloat16 arithmetic becomes float32, outputs too. Weights and inputs keep their bytes: one Cast stands
 * between each and its users, which kernels absorb. Casts to the narrow types go to float32 instead and are then
 * identities. Precondition: inferred; types are inferred anew. Idempotent: afterwards no node gives a narrow type. */
#include <string.h>

#include "passes/passes.h"

static bool is_narrow(eg_dtype dtype) {
  return dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

typedef struct widener {
  egi_pass_run *run;
  egi_graph *graph;
  egi_value_id *wide; /* narrow weight or input -> its Cast */
  uint32_t n_values;  /* before the pass */
} widener;

/* A single number is converted, so that passes still see it as a constant. */
static eg_status widen_number(widener *state, egi_value_id value, double number, egi_value_id *out_value) {
  egi_graph *graph = state->graph;
  float *wide = EGI_NEW(&graph->module->arena, float, 1);
  if (!wide) return EG_ERROR_MEMORY;
  *wide = (float)number;
  egi_tensor tensor = {.data = wide, .dtype = EG_DTYPE_F32, .rank = graph->values[value].rank};
  for (int i = 0; i < tensor.rank; i++) tensor.dims[i] = tensor.strides[i] = 1;
  return egi_add_constant(graph, graph->values[value].name, &tensor, out_value);
}

/* The float32 form of a weight or input; made once. */
static eg_status widen_source(widener *state, egi_value_id value, egi_value_id *out_value) {
  egi_emitter emit = {.graph = state->graph};
  double number = 0.0;
  if (state->wide[value] == 0) {
    if (egi_value_scalar(state->graph, value, &number))
      EG_TRY(widen_number(state, value, number, &state->wide[value]));
    else
      state->wide[value] = egi_emit_cast(&emit, value, EG_DTYPE_F32);
  }
  *out_value = state->wide[value];
  return emit.status;
}

static eg_status widen_inputs(widener *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  bool is_cast = graph->nodes[id].op == EGI_OP_Cast; /* takes any type as it is */
  for (unsigned i = 0; !is_cast && i < graph->nodes[id].n_inputs; i++) {
    egi_value_id value = graph->nodes[id].inputs[i], wide = 0;
    if (value == 0 || graph->values[value].kind == EGI_VALUE_NODE || !is_narrow(graph->values[value].dtype)) continue;
    EG_TRY(widen_source(state, value, &wide));
    graph->nodes[id].inputs[i] = wide;
    state->run->has_changed = true;
  }
  return EG_OK;
}

/* A tensor attribute (the value that ConstantOfShape repeats) as float32. */
static eg_status widen_tensor(widener *state, egi_node_id id, const egi_attribute *attribute) {
  egi_module *module = state->graph->module;
  egi_weight weight = module->weights[attribute->u.weight];
  uint64_t count = 1;
  for (int i = 0; i < weight.rank; i++) count *= (uint64_t)weight.dims[i];
  if (!is_narrow(weight.dtype) || weight.bytes.kind != EGI_BYTES_MEMORY || count > weight.bytes.size_bytes / 2)
    return EG_OK;
  float *wide = EGI_NEW(&module->arena, float, (size_t)count);
  if (!wide) return EG_ERROR_MEMORY;
  for (uint64_t i = 0; i < count; i++) {
    uint16_t bits;
    memcpy(&bits, weight.bytes.data + 2 * i, sizeof(bits));
    wide[i] = weight.dtype == EG_DTYPE_F16 ? egi_f16_to_f32(bits) : egi_bf16_to_f32(bits);
  }
  weight.dtype = EG_DTYPE_F32;
  weight.bytes =
      (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = (const uint8_t *)wide, .size_bytes = count * sizeof(float)};
  egi_attribute changed = *attribute;
  EG_TRY(egi_module_add_weight(module, &weight, &changed.u.weight));
  state->run->has_changed = true;
  return egi_node_set_attribute(state->graph, id, &changed);
}

static eg_status widen_attributes(widener *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_op op = graph->nodes[id].op;
  if (op == EGI_OP_Cast || op == EGI_OP_EyeLike) {
    const char *name = op == EGI_OP_Cast ? "to" : "dtype";
    int64_t to = egi_node_int(&graph->nodes[id], name, 0);
    const egi_attribute wide = egi_attribute_int(name, EG_DTYPE_F32);
    if (to != EG_DTYPE_F16 && to != EG_DTYPE_BF16) return EG_OK;
    state->run->has_changed = true;
    return egi_node_set_attribute(graph, id, &wide);
  }
  for (unsigned i = 0; i < graph->nodes[id].n_attributes; i++) {
    const egi_attribute attribute = graph->nodes[id].attributes[i];
    if (attribute.kind == EGI_ATTRIBUTE_TENSOR) EG_TRY(widen_tensor(state, id, &attribute));
  }
  return EG_OK;
}

static eg_status widen_all(widener *state, egi_arena *arena) {
  egi_graph *graph = state->graph;
  uint32_t n_nodes = graph->n_nodes;
  state->n_values = graph->n_values;
  state->wide = EGI_NEW(arena, egi_value_id, state->n_values);
  if (!state->wide) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1; id < n_nodes; id++) {
    if (graph->nodes[id].op == EGI_OP_NONE) continue;
    state->run->report->n_tried++;
    EG_TRY(widen_attributes(state, id));
    EG_TRY(widen_inputs(state, id));
  }
  if (!state->run->has_changed) return EG_OK;
  state->run->report->n_matched = 1;
  EG_TRY(egi_graph_tidy(graph));
  egi_graph_forget_types(graph);
  EG_TRY(egi_infer_graph(graph));
  egi_pass_report identities = {0};
  egi_pass_run clean = {.ctx = state->run->ctx, .report = &identities};
  return egi_pass_eliminate_identity(&clean, graph);
}

eg_status egi_pass_widen_floats(egi_pass_run *run, egi_graph *graph) {
  widener state = {.run = run, .graph = graph};
  egi_arena arena;
  egi_arena_init(&arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = widen_all(&state, &arena);
  egi_arena_clear(&arena);
  return status;
}
