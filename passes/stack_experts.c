/* For full training and saving: the experts of each MoE become the stacks that the Hugging Face model holds, under
 * their names (mlp.experts.gate_up_proj, down_proj and their biases), whatever pieces the file has them in. A stack
 * that the file does not hold is a weight made of parts of others, read only when memory for it is filled. gpt-oss's
 * stacks, told by interleaved gate and up, are [E, in, out], the others' [E, out, in]; a stack under a parameter's own
 * name stays as it is. */
#include <string.h>

#include "passes/experts.h"

typedef struct stacker {
  egi_graph *graph;
  egi_node_id node;
  egi_moe moe;
  const char *path; /* "model.layers.0.mlp.experts" */
  bool is_joined;   /* gate and up stand alone and become one */
  egi_value_id inputs[EGI_MOE_FIRST_ROLE + EGI_MOE_DOWN_BIAS + 1];
  int64_t roles[EGI_MOE_ROLES], transposed[3];
  uint16_t n_inputs;
} stacker;

/* ---- names ---------------------------------------------------------------------------------------------------- */

static bool ends_with_leaf(const char *name, const char *leaf) {
  size_t n_name = strlen(name), n_leaf = strlen(leaf);
  return n_name > n_leaf && name[n_name - n_leaf - 1] == '.' && strcmp(name + n_name - n_leaf, leaf) == 0;
}

/* ---- stacks --------------------------------------------------------------------------------------------------- */

static const egi_weight *weight_of(const stacker *state, egi_moe_role role, int64_t expert, egi_value_id *out_value) {
  const egi_graph *graph = state->graph;
  bool is_transposed = false;
  egi_value_id value = graph->nodes[state->node].inputs[egi_moe_input(&state->moe, role, expert)];
  *out_value = egi_weight_below(graph, value, &is_transposed);
  return *out_value != 0 ? &graph->module->weights[graph->values[*out_value].index] : NULL;
}

/* Rows and columns of one expert's piece as stored; biases have one row. */
static void piece_size(const stacker *state, const egi_weight *weight, egi_moe_role role, egi_bytes_part *out) {
  int64_t count = 1;
  for (int i = 0; i < weight->rank; i++) count *= weight->dims[i];
  if (state->moe.counts[role] == 1) count /= state->moe.n_experts;
  out->columns = role % 2 == 0 ? weight->dims[weight->rank - 1] : count;
  out->rows = out->columns > 0 ? count / out->columns : 0;
}

static eg_status add_part(stacker *state, egi_moe_role role, int64_t expert, bool is_turned, egi_bytes_part *out) {
  bool is_bias = role % 2 == 1;
  egi_value_id value = 0;
  const egi_weight *weight = weight_of(state, role, expert, &value);
  if (weight == NULL || weight->bytes.kind != EGI_BYTES_MEMORY)
    return egi_fail_node(state->graph, state->node, EG_ERROR_UNSUPPORTED,
                         "its experts are no weights of the file: they cannot be trained");
  *out = (egi_bytes_part){.is_transposed = is_turned && !is_bias};
  piece_size(state, weight, role, out);
  size_t first = state->moe.counts[role] == 1 ? (size_t)(expert * out->rows * out->columns) : 0;
  out->data = weight->bytes.data + first * (egi_dtype_bits(weight->dtype) / 8);
  return EG_OK;
}

/* A weight of all pieces, in the order of experts, gate before up. */
static eg_status make_stack(stacker *state, egi_moe_role role, bool is_turned, egi_weight *out) {
  egi_arena *arena = &state->graph->module->arena;
  int64_t e = state->moe.n_experts;
  bool is_bias = role % 2 == 1, joins = state->is_joined && role <= EGI_MOE_GATE_BIAS;
  uint32_t n = (uint32_t)(joins ? 2 * e : e);
  egi_bytes_part *parts = EGI_NEW(arena, egi_bytes_part, n);
  egi_value_id value = 0;
  if (parts == NULL) return EG_ERROR_MEMORY;
  for (int64_t i = 0; i < e; i++) {
    EG_TRY(add_part(state, role, i, is_turned, &parts[joins ? 2 * i : i]));
    if (joins) EG_TRY(add_part(state, (egi_moe_role)(role + EGI_MOE_UP), i, is_turned, &parts[2 * i + 1]));
  }
  int64_t rows = parts[0].is_transposed ? parts[0].columns : parts[0].rows;
  int64_t columns = parts[0].is_transposed ? parts[0].rows : parts[0].columns;
  const egi_weight *first = weight_of(state, role, 0, &value);
  *out = (egi_weight){.dtype = first->dtype, .rank = is_bias ? 2 : 3, .dims = {e}};
  if (is_bias) {
    out->dims[1] = columns * (joins ? 2 : 1);
  } else {
    out->dims[1] = rows * (joins ? 2 : 1);
    out->dims[2] = columns;
  }
  out->bytes = (egi_bytes){.kind = EGI_BYTES_PARTS, .parts = parts, .n_parts = n};
  return EG_OK;
}

/* Whether the file's stack is the model's own. */
static bool is_whole(const stacker *state, egi_moe_role role, bool is_turned, const egi_weight *weight) {
  bool is_bias = role % 2 == 1;
  return state->moe.counts[role] == 1 && !is_turned && !(state->is_joined && role <= EGI_MOE_GATE_BIAS) &&
         weight != NULL && weight->rank == (is_bias ? 2 : 3);
}

static eg_status put_role(stacker *state, egi_moe_role role) {
  egi_graph *graph = state->graph;
  egi_module *module = graph->module;
  const char *leaf = egi_experts_leaf(&state->moe, role);
  egi_value_id value = 0, stack = 0;
  const egi_weight *weight = weight_of(state, role, 0, &value);
  bool is_stored_turned = state->moe.is_transposed[role / 2];
  bool is_own = weight != NULL && weight->rank == 3 && ends_with_leaf(weight->name, leaf);
  bool is_turned_there = is_own ? is_stored_turned : state->moe.form == EGI_MOE_INTERLEAVED;
  bool is_turned = role % 2 == 0 && is_stored_turned != is_turned_there;
  uint32_t index = 0;
  egi_weight whole;
  if (is_whole(state, role, is_turned, weight))
    whole = *weight;
  else
    EG_TRY(make_stack(state, role, is_turned, &whole));
  whole.name = egi_arena_format(&module->arena, "%s.%s", state->path, leaf);
  if (whole.name == NULL) return EG_ERROR_MEMORY;
  if (whole.bytes.kind != EGI_BYTES_PARTS && weight->name != NULL && strcmp(weight->name, whole.name) == 0) {
    stack = value;
  } else {
    EG_TRY(egi_module_add_weight(module, &whole, &index));
    EG_TRY(egi_graph_add_weight(graph, index, &stack));
  }
  egi_emitter emit = {.graph = graph, .scope = graph->nodes[state->node].scope};
  eg_dtype dtype = graph->values[graph->nodes[state->node].inputs[EGI_MOE_X]].dtype;
  state->inputs[state->n_inputs++] = whole.dtype == dtype ? stack : egi_emit_cast(&emit, stack, dtype);
  state->roles[role] = 1;
  if (role % 2 == 0) state->transposed[role / 2] = is_turned_there;
  return emit.status;
}

static eg_status stack_node(stacker *state) {
  egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[state->node];
  EG_TRY(egi_moe_read(graph, state->node, &state->moe));
  if (state->moe.is_quantised) return EG_OK;
  state->is_joined = state->moe.form == EGI_MOE_SEPARATE;
  EG_TRY(egi_experts_path(graph, state->node, &graph->module->arena, &state->path));
  for (unsigned i = 0; i < EGI_MOE_FIRST_ROLE; i++) state->inputs[i] = node->inputs[i];
  state->n_inputs = EGI_MOE_FIRST_ROLE;
  for (unsigned role = 0; role <= EGI_MOE_DOWN_BIAS; role++) {
    bool is_part = role == EGI_MOE_UP || role == EGI_MOE_UP_BIAS;
    if (state->moe.counts[role] > 0 && !is_part) EG_TRY(put_role(state, (egi_moe_role)role));
  }
  egi_value_id *inputs = EGI_NEW(&graph->module->arena, egi_value_id, state->n_inputs);
  if (inputs == NULL) return EG_ERROR_MEMORY;
  memcpy(inputs, state->inputs, state->n_inputs * sizeof *inputs);
  graph->nodes[state->node].inputs = inputs;
  graph->nodes[state->node].n_inputs = state->n_inputs;
  const egi_attribute attributes[] = {egi_attribute_ints("roles", state->roles, EGI_MOE_ROLES),
                                      egi_attribute_ints("transposed", state->transposed, 3)};
  for (size_t i = 0; i < EGI_COUNT(attributes); i++) EG_TRY(egi_node_set_attribute(graph, state->node, &attributes[i]));
  const egi_attribute form = egi_attribute_string("gate_up", egi_moe_form_name(EGI_MOE_CONCATENATED));
  return state->is_joined ? egi_node_set_attribute(graph, state->node, &form) : EG_OK;
}

eg_status egi_stack_experts(egi_graph *graph) {
  egi_node_id n_nodes = graph->n_nodes;
  for (egi_node_id id = 1; id < n_nodes; id++) {
    stacker state = {.graph = graph, .node = id};
    if (graph->nodes[id].op == EGI_OP_MoE) EG_TRY(stack_node(&state));
  }
  return EG_OK;
}
