/* Generation piece by piece: keys and values of each attention that stands at positions go to a cache, a state of the
 * module that lives between runs, and the head multiplies only the row whose logits are wanted. Precondition:
 * cache_metadata made the graph for decoding, lower_precision settled the types; `tokens` positions fit in a cache.
 * Idempotent: an attention whose keys are a cache is left alone. */
#include "passes/passes.h"

enum { INPUT_KEY = 1, INPUT_POSITIONS = 8 };

typedef struct cacher {
  egi_pass_run *run;
  egi_graph *graph;
  uint32_t n_caches;
} cacher;

static bool is_cached(const egi_graph *graph, egi_value_id keys) {
  const egi_value *value = &graph->values[keys];
  return value->kind == EGI_VALUE_NODE && graph->nodes[value->producer].op == EGI_OP_CacheUpdate;
}

/* A cache for rows [batch, heads, n, width]; which sizes must be numbers. */
static eg_status add_cache(cacher *c, egi_node_id id, egi_value_id rows, egi_value_id *out_cache) {
  egi_graph *graph = c->graph;
  egi_dims *dims = graph->module->dims;
  const egi_value *value = &graph->values[rows];
  egi_state state = {.pool = EGI_POOL_CACHE, .dtype = value->dtype, .rank = 4};
  uint32_t index = 0;
  for (int i = 0; i < 4; i++) {
    if (i == 2)
      state.dims[i] = c->run->tokens;
    else if (!egi_dim_value(dims, egi_dim_resolve(dims, value->dims[i]), &state.dims[i]))
      return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "the size of its keys and values is not known");
  }
  state.name = egi_arena_format(&graph->module->arena, "engraft.cache.%u", c->n_caches++);
  if (state.name == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_module_add_state(graph->module, &state, &index));
  return egi_graph_add_state(graph, index, out_cache);
}

static eg_status cache_attention(cacher *c, egi_node_id id) {
  const egi_node node = c->graph->nodes[id];
  egi_emitter emit = {.graph = c->graph, .scope = node.scope};
  for (unsigned i = INPUT_KEY; i < INPUT_KEY + 2; i++) {
    egi_value_id in[3] = {0, node.inputs[i], node.inputs[INPUT_POSITIONS]};
    EG_TRY(add_cache(c, id, node.inputs[i], &in[0]));
    node.inputs[i] = egi_emit(&emit, EGI_OP_CacheUpdate, in, 3, NULL, 0);
    EG_TRY(emit.status);
  }
  c->run->has_changed = true;
  c->run->report->n_matched++;
  return EG_OK;
}

/* ---- the row that is wanted ---- */

static bool is_product(const egi_node *node) {
  return node->op == EGI_OP_Linear || node->op == EGI_OP_MatMul;
}

/* Arithmetic on each logit alone: the first operand is theirs, the others are parameters. */
static bool is_of_logits(const egi_graph *graph, const egi_node *node) {
  bool is_pointwise = (egi_op_get(node->op)->flags & EGI_OP_ELEMENTWISE) != 0;
  for (uint16_t i = 1; i < node->n_inputs && is_pointwise; i++)
    is_pointwise = node->inputs[i] == 0 || graph->values[node->inputs[i]].kind == EGI_VALUE_WEIGHT;
  return is_pointwise || node->op == EGI_OP_AddMatMul; /* an adapter beside the head */
}

/* What the head multiplies, when nothing but products take it; 0: not found. */
static egi_value_id find_hidden(const egi_graph *graph, egi_value_id logits) {
  egi_value_id value = logits;
  while (graph->values[value].kind == EGI_VALUE_NODE) {
    const egi_node *node = &graph->nodes[graph->values[value].producer];
    value = node->inputs[0];
    if (is_product(node)) break;
    if (!is_of_logits(graph, node)) return 0;
  }
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    for (uint16_t i = 0; i < graph->nodes[id].n_inputs; i++)
      if (graph->nodes[id].inputs[i] == value && !is_product(&graph->nodes[id])) return 0;
  return graph->values[value].rank == 3 ? value : 0;
}

/* Hidden states [1, sequence, width] of one row from here on. */
static eg_status choose_row(cacher *c, egi_value_id logits) {
  egi_graph *graph = c->graph;
  egi_value_id hidden = find_hidden(graph, logits), row;
  const egi_dim one = egi_dim_constant(graph->module->dims, 1);
  const egi_attribute axis = egi_attribute_int("axis", 1);
  egi_emitter emit = {.graph = graph};
  if (hidden == 0) hidden = logits;
  EG_TRY(egi_graph_add_input(graph, EGI_INPUT_ROW, EG_DTYPE_I64, 1, &one, &row));
  egi_node_id n_nodes = graph->n_nodes;
  const egi_value_id in[2] = {hidden, row};
  egi_value_id chosen = egi_emit(&emit, EGI_OP_Gather, in, 2, &axis, 1);
  EG_TRY(emit.status);
  for (egi_node_id id = 1; id < n_nodes; id++)
    for (uint16_t i = 0; i < graph->nodes[id].n_inputs; i++)
      if (graph->nodes[id].inputs[i] == hidden) graph->nodes[id].inputs[i] = chosen;
  for (uint32_t i = 0; i < graph->n_outputs; i++)
    if (graph->outputs[i] == hidden) graph->outputs[i] = chosen;
  EG_TRY(egi_graph_tidy(graph));
  egi_graph_forget_types(graph);
  return egi_infer_graph(graph);
}

eg_status egi_pass_cache_keys(egi_pass_run *run, egi_graph *graph) {
  cacher c = {.run = run, .graph = graph};
  egi_node_id n_nodes = graph->n_nodes;
  egi_value_id logits;
  if (egi_graph_find_value(graph, EGI_INPUT_ROW_POSITIONS) == 0 || egi_graph_find_value(graph, EGI_INPUT_ROW) != 0)
    return EG_OK;
  for (egi_node_id id = 1; id < n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op != EGI_OP_MaskedAttention || node->n_inputs <= INPUT_POSITIONS ||
        is_cached(graph, node->inputs[INPUT_KEY]))
      continue;
    run->report->n_tried++;
    EG_TRY(cache_attention(&c, id));
  }
  EG_TRY(egi_find_logits(graph, &logits));
  return choose_row(&c, logits);
}
