/* How a mixture's experts are used, as an output of the training graph: for each mixture, of the tokens that are real,
 * how many went to each expert, and the sums of the router's probabilities. Transformers' load-balancing loss (Fedus et
 * al. 2021, arXiv 2101.03961, equations 4 to 6) follows from both. After dispatch_moe; the input engraft.real says
 * which tokens are real. Terminates: one sweep, no Route is made; a graph that has the output stays as it is. */
#include "graph/moe.h"
#include "passes/passes.h"

typedef struct counter {
  egi_graph *graph;
  egi_emitter emit;
  egi_value_id real, tokens; /* [batch, sequence]; the token input */
  int64_t n_experts;
  egi_value_id *loads; /* [1, 2, E] each */
  uint32_t n_loads;
} counter;

static egi_value_id reshaped(counter *state, egi_value_id value, const int64_t *sizes, uint32_t rank) {
  return egi_emit_binary(&state->emit, EGI_OP_Reshape, value, egi_emit_integers(&state->emit, sizes, rank));
}

/* A row of logits for each token of the input. */
static bool is_of_tokens(const counter *state, egi_value_id logits) {
  egi_dims *dims = state->graph->module->dims;
  const egi_value *row = &state->graph->values[logits], *tokens = &state->graph->values[state->tokens];
  egi_dim n_rows = egi_dim_constant(dims, 1);
  egi_dim n_tokens = egi_dim_multiply(dims, tokens->dims[0], tokens->dims[1]);
  for (int i = 0; i + 1 < row->rank; i++) n_rows = egi_dim_multiply(dims, n_rows, row->dims[i]);
  return row->dtype == EG_DTYPE_F32 && egi_dim_resolve(dims, n_rows) == egi_dim_resolve(dims, n_tokens);
}

static eg_status add_real(counter *state) {
  const egi_value tokens = state->graph->values[state->tokens];
  if (state->real != 0) return EG_OK;
  return egi_graph_add_input(state->graph, EGI_INPUT_REAL, EG_DTYPE_F32, 2, tokens.dims, &state->real);
}

static eg_status count_one(counter *state, egi_node_id id) {
  const egi_node node = state->graph->nodes[id];
  egi_emitter *emit = &state->emit;
  const int64_t flat[1] = {-1}, column[2] = {-1, 1}, rows[2] = {-1, state->n_experts}, front = 0;
  const int64_t row[3] = {1, 1, state->n_experts};
  const egi_attribute axis = egi_attribute_int("axis", -1), drop = egi_attribute_int("keepdims", 0);
  const egi_attribute join = egi_attribute_int("axis", 1);
  EG_TRY(add_real(state));
  emit->scope = node.scope;
  egi_value_id logits = reshaped(state, node.inputs[0], rows, 2);
  egi_value_id shares = egi_emit(emit, EGI_OP_Softmax, &logits, 1, &axis, 1);
  shares = egi_emit_binary(emit, EGI_OP_Mul, shares, reshaped(state, state->real, column, 2));
  const egi_value_id summed[2] = {shares, egi_emit_integers(emit, &front, 1)};
  egi_value_id probabilities = egi_emit(emit, EGI_OP_ReduceSum, summed, 2, &drop, 1);
  egi_value_id chosen = egi_emit_binary(emit, EGI_OP_Gather, reshaped(state, state->real, flat, 1), node.outputs[1]);
  chosen = reshaped(state, chosen, column, 2);
  const egi_value_id counted[3] = {chosen, chosen, node.outputs[3]}; /* ones and zeros: their squares */
  egi_value_id counts = egi_emit(emit, EGI_OP_RaggedReduce, counted, 3, NULL, 0);
  const egi_value_id both[2] = {reshaped(state, counts, row, 3), reshaped(state, probabilities, row, 3)};
  state->loads[state->n_loads++] = egi_emit(emit, EGI_OP_Concat, both, 2, &join, 1);
  return emit->status;
}

static eg_status count_all(counter *state, egi_pass_run *run) {
  egi_graph *graph = state->graph;
  const egi_attribute axis = egi_attribute_int("axis", 0);
  for (egi_node_id id = 1, n = graph->n_nodes; id < n; id++) {
    const egi_node *node = &graph->nodes[id];
    bool is_whole = node->op == EGI_OP_Route && node->n_outputs > 3 && node->outputs[1] != 0 && node->outputs[3] != 0;
    if (!is_whole) continue;
    egi_moe moe;
    run->report->n_tried++;
    EG_TRY(egi_moe_read_router(graph, id, &moe));
    if (state->n_experts == 0) state->n_experts = moe.n_experts;
    if (moe.n_experts != state->n_experts || !is_of_tokens(state, node->inputs[0])) continue;
    EG_TRY(count_one(state, id));
    run->report->n_matched++;
  }
  if (state->n_loads == 0) return EG_OK;
  state->emit.scope = NULL;
  egi_value_id load = egi_emit(&state->emit, EGI_OP_Concat, state->loads, state->n_loads, &axis, 1);
  EG_TRY(state->emit.status);
  EG_TRY(egi_graph_rename_value(graph, load, EGI_OUTPUT_LOAD));
  run->has_changed = true;
  return egi_graph_add_output(graph, load);
}

eg_status egi_pass_count_experts(egi_pass_run *run, egi_graph *graph) {
  counter state = {.graph = graph, .emit = {.graph = graph}};
  egi_arena arena;
  if (egi_graph_find_value(graph, EGI_OUTPUT_LOAD) != 0) return EG_OK;
  if (egi_find_token_input(graph, &state.tokens) != EG_OK || graph->values[state.tokens].rank != 2) return EG_OK;
  egi_arena_init(&arena, run->ctx, EGI_PURPOSE_GRAPH);
  state.loads = EGI_NEW(&arena, egi_value_id, graph->n_nodes);
  eg_status status = state.loads != NULL ? count_all(&state, run) : EG_ERROR_MEMORY;
  egi_arena_clear(&arena);
  return status;
}
