/* Names for linear layers that a file says nothing of: tools that quantise a model drop the module paths of the nodes
 * they replace. The module around the layer is that of the attention or gate that it feeds, its own name the one that
 * Hugging Face's decoders have in that place. Linear in the graph. */
#include <string.h>

#include "passes/name_modules.h"

typedef struct finder {
  egi_graph *graph;
  egi_arena *arena;
  egi_uses uses;
  const char *layers; /* scope of some attention: the model's outer path is read off it */
} finder;

static bool has_scope(const egi_node *node) {
  return node->scope && node->scope[0];
}

/* The input through which hidden values pass a node that leaves heads heads; -1: none. */
static int passing_input(const egi_graph *graph, const egi_node *node) {
  bool is_transposed = false;
  switch (node->op) {
  case EGI_OP_RotaryEmbedding:
  case EGI_OP_RMSNormalization:
  case EGI_OP_LayerNormalization:
  case EGI_OP_Cast:
    return 0;
  case EGI_OP_Concat: /* behind a cache */
    return node->n_inputs == 2 ? 1 : -1;
  case EGI_OP_Mul:
  case EGI_OP_Div:
    if (egi_weight_below(graph, node->inputs[1], &is_transposed) != 0) return 0;
    return egi_weight_below(graph, node->inputs[0], &is_transposed) != 0 ? 1 : -1;
  default:
    return egi_op_get(node->op)->flags & EGI_OP_VIEW ? 0 : -1;
  }
}

/* The Linear that a value comes from, or 0. */
static egi_node_id linear_above(const egi_graph *graph, egi_value_id value) {
  while (value != 0 && graph->values[value].kind == EGI_VALUE_NODE) {
    egi_node_id id = graph->values[value].producer;
    if (graph->nodes[id].op == EGI_OP_Linear) return id;
    int input = passing_input(graph, &graph->nodes[id]);
    if (input < 0) return 0;
    value = graph->nodes[id].inputs[input];
  }
  return 0;
}

/* The Linear that alone takes a value, through layouts; or 0. */
static egi_node_id linear_below(const finder *state, egi_value_id value) {
  const egi_graph *graph = state->graph;
  for (;;) {
    if (state->uses.start[value + 1] - state->uses.start[value] != 1) return 0;
    egi_node_id id = state->uses.list[state->uses.start[value]];
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_Linear) return node->inputs[0] == value ? id : 0;
    bool is_layout = node->op == EGI_OP_Cast || (egi_op_get(node->op)->flags & EGI_OP_VIEW);
    if (!is_layout || node->n_outputs != 1 || node->inputs[0] != value) return 0;
    value = node->outputs[0];
  }
}

static eg_status name_linear(finder *state, egi_node_id id, const char *container, const char *name) {
  if (id == 0 || has_scope(&state->graph->nodes[id])) return EG_OK;
  const char *scope = egi_arena_format(&state->graph->module->arena, "%s.%s", container, name);
  state->graph->nodes[id].scope = scope;
  return scope ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status name_around_attention(finder *state, const egi_node *node) {
  static const char *const names[3] = {"q_proj", "k_proj", "v_proj"};
  egi_node_id found[3];
  state->layers = node->scope;
  for (unsigned i = 0; i < 3; i++) found[i] = linear_above(state->graph, node->inputs[i]);
  bool is_fused = found[0] != 0 && found[0] == found[1] && found[1] == found[2];
  if (is_fused) EG_TRY(name_linear(state, found[0], node->scope, "qkv_proj"));
  for (unsigned i = 0; i < 3 && !is_fused; i++) EG_TRY(name_linear(state, found[i], node->scope, names[i]));
  return name_linear(state, linear_below(state, node->outputs[0]), node->scope, "o_proj");
}

/* The gate's own module is the activation; the one around it holds the layers. */
static eg_status name_around_gate(finder *state, const egi_node *node) {
  const char *last = strrchr(node->scope, '.'), *container = node->scope;
  if (last && strncmp(last + 1, "act", 3) == 0)
    container = egi_arena_copy_text(state->arena, node->scope, (size_t)(last - node->scope));
  if (!container) return EG_ERROR_MEMORY;
  egi_node_id gate = linear_above(state->graph, node->inputs[0]), up = linear_above(state->graph, node->inputs[1]);
  EG_TRY(name_linear(state, gate, container, gate == up ? "gate_up_proj" : "gate_proj"));
  EG_TRY(name_linear(state, up, container, "up_proj"));
  return name_linear(state, linear_below(state, node->outputs[0]), container, "down_proj");
}

/* Beside the module that holds the layers: m.model.layers.0.self_attn -> m.lm_head. */
static eg_status name_head(finder *state) {
  egi_node_id head = egi_find_head(state->graph);
  const char *dot[2] = {NULL, NULL}; /* of the last two segments before the first number */
  if (head == 0 || !state->layers || has_scope(&state->graph->nodes[head])) return EG_OK;
  for (const char *at = strchr(state->layers, '.'); at; at = strchr(at + 1, '.')) {
    if (at[1] >= '0' && at[1] <= '9') break;
    dot[0] = dot[1];
    dot[1] = at;
  }
  const char *scope = "lm_head";
  if (dot[0])
    scope =
        egi_arena_format(&state->graph->module->arena, "%.*s.lm_head", (int)(dot[0] - state->layers), state->layers);
  state->graph->nodes[head].scope = scope;
  return scope ? EG_OK : EG_ERROR_MEMORY;
}

static bool is_attention(const egi_node *node) {
  return node->op == EGI_OP_MaskedAttention || node->op == EGI_OP_Attention;
}

/* Something to name? Files that say it all are not looked at further. */
static bool has_nameless(const egi_graph *graph) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    if (graph->nodes[id].op == EGI_OP_Linear && !has_scope(&graph->nodes[id])) return true;
  return false;
}

eg_status egi_name_by_structure(egi_graph *graph, egi_arena *arena) {
  finder state = {.graph = graph, .arena = arena};
  if (!has_nameless(graph)) return EG_OK;
  EG_TRY(egi_graph_uses(graph, arena, &state.uses));
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node node = graph->nodes[id];
    if (!has_scope(&node)) continue;
    if (is_attention(&node)) EG_TRY(name_around_attention(&state, &node));
    if (node.op == EGI_OP_GLU) EG_TRY(name_around_gate(&state, &node));
  }
  return name_head(&state);
}
