/* Names for linear layers that a file says nothing of: tools that quantise a model drop the module paths of the nodes
 * they replace. The module around the layer is that of the attention or gate that it feeds, its own name the one that
 * Hugging Face's decoders have in that place. Linear in the graph. */
#include <string.h>

#include "passes/name_modules.h"

typedef struct finder {
  egi_graph *graph;
  egi_arena *arena;
  egi_uses uses;
  const char *inside; /* scope of something in a numbered layer: the model's outer path is read off it */
  const char *outer;  /* where no layer has a number: the path around the head, with its dot */
  unsigned n_attentions, n_gates;
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

/* End of the first segment that is a number, "layers.0" of "layers.0.mlp"; 0: none. */
static size_t layer_length(const char *scope) {
  for (const char *at = strchr(scope, '.'); at; at = strchr(at + 1, '.')) {
    size_t digits = strspn(at + 1, "0123456789");
    if (digits > 0 && (at[1 + digits] == '.' || at[1 + digits] == '\0')) return (size_t)(at - scope) + 1 + digits;
  }
  return 0;
}

/* Where the node has no path: the module of that name in the layer whose norm the linear layer takes, or in the layer
 * of its own number when no layer of the graph is known; NULL: unknown. */
static eg_status find_container(finder *state, const egi_node *node, egi_node_id linear, const char *name,
                                unsigned number, const char **out_container) {
  const egi_graph *graph = state->graph;
  *out_container = has_scope(node) ? node->scope : NULL;
  if (*out_container || linear == 0) return EG_OK;
  if (!state->inside) {
    *out_container = egi_arena_format(state->arena, "%smodel.layers.%u.%s", state->outer, number, name);
    return *out_container ? EG_OK : EG_ERROR_MEMORY;
  }
  egi_value_id x = graph->nodes[linear].inputs[0];
  while (graph->values[x].kind == EGI_VALUE_NODE) {
    const egi_node *above = &graph->nodes[graph->values[x].producer];
    bool is_norm = above->op == EGI_OP_RMSNormalization || above->op == EGI_OP_LayerNormalization;
    size_t length = is_norm && has_scope(above) ? layer_length(above->scope) : 0;
    if (length > 0) {
      *out_container = egi_arena_format(state->arena, "%.*s.%s", (int)length, above->scope, name);
      return *out_container ? EG_OK : EG_ERROR_MEMORY;
    }
    if (is_norm || (above->op != EGI_OP_Cast && !(egi_op_get(above->op)->flags & EGI_OP_VIEW))) return EG_OK;
    x = above->inputs[0];
  }
  return EG_OK;
}

static eg_status name_around_attention(finder *state, const egi_node *node) {
  static const char *const names[3] = {"q_proj", "k_proj", "v_proj"};
  const char *container = NULL;
  egi_node_id found[3];
  for (unsigned i = 0; i < 3; i++) found[i] = linear_above(state->graph, node->inputs[i]);
  EG_TRY(find_container(state, node, found[0], "self_attn", state->n_attentions++, &container));
  if (!container) return EG_OK;
  bool is_fused = found[0] != 0 && found[0] == found[1] && found[1] == found[2];
  if (is_fused) EG_TRY(name_linear(state, found[0], container, "qkv_proj"));
  for (unsigned i = 0; i < 3 && !is_fused; i++) EG_TRY(name_linear(state, found[i], container, names[i]));
  return name_linear(state, linear_below(state, node->outputs[0]), container, "o_proj");
}

/* The gate's own module is the activation; the one around it holds the layers. */
static eg_status name_around_gate(finder *state, const egi_node *node) {
  const char *container = NULL;
  egi_node_id gate = linear_above(state->graph, node->inputs[0]), up = linear_above(state->graph, node->inputs[1]);
  EG_TRY(find_container(state, node, gate, "mlp", state->n_gates++, &container));
  if (!container) return EG_OK;
  const char *last = strrchr(container, '.');
  if (last && strncmp(last + 1, "act", 3) == 0)
    container = egi_arena_copy_text(state->arena, container, (size_t)(last - container));
  if (!container) return EG_ERROR_MEMORY;
  EG_TRY(name_linear(state, gate, container, gate == up ? "gate_up_proj" : "gate_proj"));
  EG_TRY(name_linear(state, up, container, "up_proj"));
  return name_linear(state, linear_below(state, node->outputs[0]), container, "down_proj");
}

/* Beside the module that holds the layers: m.model.layers.0.self_attn -> m.lm_head. */
static eg_status name_head(finder *state) {
  egi_node_id head = egi_find_head(state->graph);
  const char *scope = "lm_head", *dots[3] = {NULL, NULL, NULL}; /* the last ones of m.model.layers.0 */
  if (head == 0 || has_scope(&state->graph->nodes[head]) || (!state->inside && state->n_attentions == 0)) return EG_OK;
  const char *inside = state->inside ? state->inside : "model.layers.0";
  const char *end = inside + layer_length(inside);
  for (const char *at = strchr(inside, '.'); at && at < end; at = strchr(at + 1, '.')) {
    dots[0] = dots[1];
    dots[1] = dots[2];
    dots[2] = at;
  }
  if (dots[0]) scope = egi_arena_format(&state->graph->module->arena, "%.*s.lm_head", (int)(dots[0] - inside), inside);
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

/* What is known of the model's outermost modules. */
static eg_status find_outside(finder *state) {
  const egi_graph *graph = state->graph;
  egi_node_id head = egi_find_head(graph);
  for (egi_node_id id = 1; id < graph->n_nodes && !state->inside; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op != EGI_OP_NONE && has_scope(node) && layer_length(node->scope) > 0) state->inside = node->scope;
  }
  const char *scope = head != 0 && has_scope(&graph->nodes[head]) ? graph->nodes[head].scope : "";
  const char *last = strrchr(scope, '.');
  state->outer = egi_arena_copy_text(state->arena, scope, last ? (size_t)(last - scope) + 1 : 0);
  return state->outer ? EG_OK : EG_ERROR_MEMORY;
}

eg_status egi_name_by_structure(egi_graph *graph, egi_arena *arena) {
  finder state = {.graph = graph, .arena = arena};
  if (!has_nameless(graph)) return EG_OK;
  EG_TRY(find_outside(&state));
  EG_TRY(egi_graph_uses(graph, arena, &state.uses));
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node node = graph->nodes[id];
    if (node.op == EGI_OP_NONE) continue;
    if (is_attention(&node)) EG_TRY(name_around_attention(&state, &node));
    if (node.op == EGI_OP_GLU) EG_TRY(name_around_gate(&state, &node));
  }
  return name_head(&state);
}
