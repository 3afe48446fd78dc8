/* Attention by relative position multiplies queries with positions that went through the key layer, and keys with those
 * that went through the query layer (He et al. 2020, arXiv:2006.03654). Where the exporter computed those positions,
 * the file holds constants that an adapter on the layer does not reach: the model would be trained, run or merged
 * wrongly. They are told by the flow: scores picked by GatherElements out of a product of one layer's result with an
 * unnamed constant. Asked for before adapters are grafted; linear in the graph but for chains of moves. */
#include "passes/passes.h"

enum { MAX_MOVES = 32 };

typedef struct finder {
  const egi_graph *graph;
  egi_linear *linears;
  size_t n_linears;
  uint32_t *layer_of; /* by value: 1 + the linear that gives it */
  uint32_t *partner;  /* by linear: 1 + the one whose result it is multiplied with */
} finder;

static bool is_scaling(egi_op op) {
  return op == EGI_OP_Mul || op == EGI_OP_Div || op == EGI_OP_Add;
}

static bool is_move(egi_op op) {
  return op == EGI_OP_Cast || op == EGI_OP_Tile || op == EGI_OP_Expand || (egi_op_get(op)->flags & EGI_OP_VIEW) != 0;
}

static bool is_weight(const egi_graph *graph, egi_value_id value) {
  bool is_transposed = false;
  return egi_weight_below(graph, value, &is_transposed) != 0;
}

/* What a value was before moves and scaling: the result of a layer, a weight, or what ends the way. */
static egi_value_id source_of(const finder *state, egi_value_id value) {
  const egi_graph *graph = state->graph;
  for (unsigned hop = 0; hop < MAX_MOVES && graph->values[value].kind == EGI_VALUE_NODE; hop++) {
    const egi_node *node = &graph->nodes[graph->values[value].producer];
    if (state->layer_of[value] != 0) return value;
    if (is_move(node->op))
      value = node->inputs[0];
    else if (is_scaling(node->op))
      value =
          is_weight(graph, node->inputs[0]) && !is_weight(graph, node->inputs[1]) ? node->inputs[1] : node->inputs[0];
    else
      return value;
  }
  return value;
}

static uint32_t layer_below(const finder *state, egi_value_id value) {
  return state->layer_of[source_of(state, value)];
}

/* Numbers that an exporter computed: parameters have the names that the model gave them. */
static bool is_computed_constant(const finder *state, egi_value_id value) {
  const egi_graph *graph = state->graph;
  egi_value_id source = source_of(state, value);
  const egi_value *row = &graph->values[source];
  return row->kind == EGI_VALUE_WEIGHT && egi_dtype_is_float(row->dtype) && row->rank >= 2 &&
         !egi_is_parameter_name(graph->module->weights[row->index].name);
}

static void pair(const finder *state, egi_value_id a, egi_value_id b) {
  uint32_t x = layer_below(state, a), y = layer_below(state, b);
  if (x == 0 || y == 0) return;
  state->partner[x - 1] = y;
  state->partner[y - 1] = x;
}

static bool is_attention(egi_op op) {
  return op == EGI_OP_MaskedAttention || op == EGI_OP_Attention;
}

static void pair_all(const finder *state) {
  const egi_graph *graph = state->graph;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_MatMul || (is_attention(node->op) && node->n_inputs > 1))
      pair(state, node->inputs[0], node->inputs[1]);
  }
}

/* The layer that the constant factor of the scores below a GatherElements went through; 0: there is none. */
static uint32_t folded_layer(const finder *state, const egi_node *pick, egi_node_id *out_product) {
  const egi_graph *graph = state->graph;
  egi_value_id scores = source_of(state, pick->inputs[0]);
  if (graph->values[scores].kind != EGI_VALUE_NODE) return 0;
  *out_product = graph->values[scores].producer;
  const egi_node *product = &graph->nodes[*out_product];
  if (product->op != EGI_OP_MatMul) return 0;
  for (unsigned i = 0; i < 2; i++) {
    uint32_t layer = layer_below(state, product->inputs[i]);
    if (layer != 0 && is_computed_constant(state, product->inputs[1 - i])) return state->partner[layer - 1];
  }
  return 0;
}

static eg_status check_all(const finder *state, const egi_map *adapted) {
  const egi_graph *graph = state->graph;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    egi_node_id product = 0;
    uint32_t layer =
        graph->nodes[id].op == EGI_OP_GatherElements ? folded_layer(state, &graph->nodes[id], &product) : 0;
    const char *path = layer != 0 ? state->linears[layer - 1].path : NULL;
    if (path == NULL || (adapted != NULL && !egi_map_get(adapted, path, NULL))) continue;
    return egi_fail_node(graph, product, EG_ERROR_UNSUPPORTED,
                         "its relative positions are a constant that the exporter computed with \"%s\", so a change of "
                         "that layer would not reach them: exclude the layer, or export the positions uncomputed",
                         path);
  }
  return EG_OK;
}

eg_status egi_check_folded_positions(const egi_graph *graph, const egi_map *adapted, egi_arena *arena) {
  finder state = {.graph = graph};
  EG_TRY(egi_find_linears(graph, arena, &state.linears, &state.n_linears));
  state.layer_of = EGI_NEW(arena, uint32_t, graph->n_values);
  state.partner = EGI_NEW(arena, uint32_t, state.n_linears + 1);
  if (!state.layer_of || !state.partner) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < state.n_linears; i++) state.layer_of[state.linears[i].result] = (uint32_t)i + 1;
  pair_all(&state);
  return check_all(&state, adapted);
}
