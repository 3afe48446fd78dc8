/* Mixtures of experts, whoever wrote them (whole matrices gathered for each token, rows grouped by expert, a piece of
 * graph for each expert, all experts for all tokens), become one engraft.MoE. A region is known by what it computes on
 * samples (moe_match.h), so that no spelling is special. Ends because each region found goes. */
#include <math.h>
#include <string.h>

#include "passes/moe_match.h"

enum { MAX_EXITS = 4, MAX_ROUNDS = 8 };

typedef struct fuser {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena; /* of the pass */
  egi_uses uses;
  egi_moe_value *values;
  bool *is_router_done; /* by node */
  uint32_t n_nodes;     /* before the pass */
  egi_findings findings;
} fuser;

/* ---- sizes of the sample -------------------------------------------------------------------------------------- */

static bool is_listed(const egi_binding *bindings, size_t n, egi_dim dim) {
  for (size_t i = 0; i < n; i++)
    if (bindings[i].symbol == dim) return true;
  return false;
}

/* Every symbol of the graph's inputs is `size`, the first dims of its first input are [2, size]. */
static eg_status bind_symbols(fuser *state, egi_moe_region *region, int64_t size) {
  const egi_graph *graph = state->graph;
  egi_dims *dims = graph->module->dims;
  egi_binding *bindings = NULL;
  uint32_t count = 0, capacity = 0;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const egi_value *input = &graph->values[graph->inputs[i]];
    for (int d = 0; d < input->rank; d++) {
      int64_t number = 0;
      if (egi_dim_value(dims, input->dims[d], &number) || is_listed(bindings, count, input->dims[d])) continue;
      EG_TRY(EGI_GROW(region->arena, &bindings, count, &capacity));
      bindings[count] = (egi_binding){input->dims[d], count == 0 && d == 0 && input->rank > 1 ? 2 : size};
      count++;
    }
  }
  region->bindings = bindings;
  region->n_bindings = count;
  return EG_OK;
}

/* ---- the operator --------------------------------------------------------------------------------------------- */

/* A float operand in the type of the hidden states. */
static egi_value_id operand(egi_emitter *emit, egi_value_id value, eg_dtype dtype) {
  return emit->graph->values[value].dtype == dtype ? value : egi_emit_cast(emit, value, dtype);
}

/* A bias without axes of one element: [E, N] of a stack, else [N]. */
static egi_value_id bias(egi_emitter *emit, egi_value_id value, bool is_stack, int64_t n_experts) {
  const int64_t dims[2] = {n_experts, -1};
  if (emit->graph->values[value].rank == (is_stack ? 2 : 1)) return value;
  return egi_emit_binary(emit, EGI_OP_Reshape, value, egi_emit_integers(emit, dims + !is_stack, is_stack ? 2 : 1));
}

/* Hidden states in the shape of the result. */
static egi_value_id rows_like(const egi_moe_region *region, egi_value_id exit) {
  const egi_graph *graph = region->graph;
  egi_value_id at = graph->nodes[region->router].inputs[0];
  eg_dtype dtype = graph->values[exit].dtype;
  for (unsigned i = 0; i < 16; i++) {
    if (egi_same_shape(graph, at, exit) && graph->values[at].dtype == dtype) return at;
    if (at == region->x || graph->values[at].kind != EGI_VALUE_NODE) break;
    at = graph->nodes[graph->values[at].producer].inputs[0];
  }
  return 0;
}

/* Codes, scales or zero points of an expert as [rows, ..]. */
static egi_value_id packed(egi_emitter *emit, egi_value_id value, int64_t rows) {
  const int64_t dims[2] = {rows, -1};
  if (emit->graph->values[value].rank == 2) return value;
  return egi_emit_binary(emit, EGI_OP_Reshape, value, egi_emit_integers(emit, dims, 2));
}

static unsigned write_attributes(const egi_moe *moe, const int64_t *roles, const int64_t *transposed,
                                 egi_attribute *out) {
  unsigned n = 0;
  out[n++] = egi_attribute_int("experts", moe->n_experts);
  out[n++] = egi_attribute_int("top_k", moe->top_k);
  out[n++] = egi_attribute_string("scoring", moe->is_sigmoid ? "sigmoid" : "softmax");
  out[n++] = egi_attribute_string("order", moe->is_scored_before ? "before" : "after");
  out[n++] = egi_attribute_int("normalise", moe->is_normalised);
  out[n++] = egi_attribute_float("routed_scale", (float)moe->routed_scale);
  if (moe->groups > 1) {
    out[n++] = egi_attribute_int("groups", moe->groups);
    out[n++] = egi_attribute_int("top_groups", moe->top_groups);
    out[n++] = egi_attribute_string("group_score", moe->is_group_best ? "best" : "top2");
  }
  out[n++] = egi_attribute_string("activation", egi_moe_activation_name(moe->activation));
  out[n++] = egi_attribute_string("gate_up", egi_moe_form_name(moe->form));
  out[n++] = egi_attribute_float("alpha", (float)moe->alpha);
  out[n++] = egi_attribute_float("limit", (float)moe->limit);
  out[n++] = egi_attribute_float("offset", (float)moe->offset);
  if (moe->is_quantised) {
    out[n++] = egi_attribute_string("storage", "nbits");
    out[n++] = egi_attribute_int("bits", moe->bits);
    out[n++] = egi_attribute_int("block_size", moe->block_size);
  }
  out[n++] = egi_attribute_ints("roles", roles, EGI_MOE_ROLES);
  out[n++] = egi_attribute_ints("transposed", transposed, 3);
  return n;
}

static eg_status put_node(egi_graph *graph, egi_value_id exit, egi_node *node) {
  egi_node_id old = graph->values[exit].producer, id = 0;
  egi_value_id output = exit;
  node->name = graph->nodes[old].name;
  node->scope = graph->nodes[old].scope;
  node->outputs = &output;
  node->n_outputs = 1;
  egi_graph_remove_node(graph, old);
  EG_TRY(egi_graph_add_node(graph, node, &id));
  return egi_infer_node(graph, id);
}

static eg_status replace(egi_moe_region *region, const egi_moe *moe, const egi_moe_operands *operands,
                         bool *out_is_done) {
  egi_graph *graph = region->graph;
  egi_emitter emit = {.graph = graph, .scope = graph->nodes[graph->values[region->exit].producer].scope};
  egi_value_id x = rows_like(region, region->exit);
  eg_dtype dtype = graph->values[region->exit].dtype;
  int64_t roles[EGI_MOE_ROLES], transposed[3];
  size_t n_inputs = EGI_MOE_FIRST_ROLE, at = EGI_MOE_FIRST_ROLE;
  egi_attribute attributes[24];
  *out_is_done = false;
  for (unsigned i = 0; i < EGI_MOE_ROLES; i++) n_inputs += operands->counts[i];
  if (x == 0 || n_inputs > UINT16_MAX) {
    (void)egi_moe_reject(region, region->router, "the result has another shape than the hidden states");
    return EG_OK;
  }
  egi_value_id *inputs = EGI_NEW(region->arena, egi_value_id, n_inputs);
  if (inputs == NULL) return EG_ERROR_MEMORY;
  inputs[EGI_MOE_X] = x;
  inputs[EGI_MOE_LOGITS] = operand(&emit, region->logits, dtype);
  if (region->correction != 0) inputs[EGI_MOE_CORRECTION] = operand(&emit, region->correction, dtype);
  for (unsigned i = 0; i < EGI_MOE_ROLES; i++) {
    roles[i] = operands->counts[i];
    for (uint32_t k = 0; k < operands->counts[i]; k++) {
      egi_value_id value = operands->values[i][k];
      bool is_packed = moe->is_quantised && (i % 2 == 0 || i >= EGI_MOE_GATE_SCALES);
      if (is_packed) value = packed(&emit, value, operands->rows[i % EGI_MOE_GATE_SCALES / 2]);
      if (is_packed && graph->values[value].dtype == EG_DTYPE_U8) {
        inputs[at++] = value;
        continue;
      }
      if (i % 2 == 1) value = bias(&emit, value, operands->counts[i] == 1, region->n_experts);
      inputs[at++] = operand(&emit, value, dtype);
    }
  }
  for (unsigned i = 0; i < 3; i++) transposed[i] = moe->is_transposed[i];
  EG_TRY(emit.status);
  egi_node node = {.op = EGI_OP_MoE, .attributes = attributes};
  node.n_attributes = (uint16_t)write_attributes(moe, roles, transposed, attributes);
  node.inputs = inputs;
  node.n_inputs = (uint16_t)n_inputs;
  *out_is_done = true;
  return put_node(graph, region->exit, &node);
}

/* ---- regions -------------------------------------------------------------------------------------------------- */

/* Several rounds where one has too few tokens for every expert to be chosen. */
static bool recognise(egi_moe_region *region, bool is_stacked, egi_moe *moe, egi_moe_operands *operands,
                      uint32_t *out_n_found) {
  int64_t n_seen = 0;
  *out_n_found = 0;
  for (unsigned round = 0; round < MAX_ROUNDS; round++) {
    egi_moe again;
    egi_moe_operands same;
    region->seed = 1 + round;
    if (!egi_moe_sample(region)) return false;
    if (!egi_moe_fit(region, round == 0 ? moe : &again, round == 0 ? operands : &same, out_n_found)) return false;
    n_seen += region->tokens * moe->top_k;
    if (is_stacked || n_seen >= region->n_experts) return true;
  }
  return true;
}

/* Sizes for which every expert is chosen; a few tokens where the experts are stacks, one as good as the other. */
static eg_status choose_sizes(fuser *state, egi_moe_region *region, int64_t top_k, bool *out_is_stacked) {
  int64_t tokens = region->n_experts * 5 / (4 * top_k) + 8;
  if (region->is_wide) tokens = 8 * tokens;
  uint32_t n_products = 0;
  EG_TRY(bind_symbols(state, region, tokens > 2048 ? 1024 : (tokens + 1) / 2));
  *out_is_stacked = false;
  if (!egi_moe_collect(region)) return EG_OK;
  for (uint32_t i = 0; i < region->n_nodes; i++) {
    egi_op op = region->graph->nodes[region->nodes[i]].op;
    n_products += op == EGI_OP_MatMul || op == EGI_OP_Gemm || op == EGI_OP_Linear;
  }
  *out_is_stacked = n_products <= 4;
  return *out_is_stacked ? bind_symbols(state, region, 4) : EG_OK;
}

static eg_status note_missing(fuser *state, const egi_moe_region *region, uint32_t n_found) {
  const egi_graph *graph = state->graph;
  egi_node_id id = region->last_choice;
  const char *name = graph->nodes[id].name;
  const char *message =
      egi_arena_format(&state->arena,
                       "node \"%s\" (TopK): it chooses among %lld experts, the graph holds %u of them: "
                       "the model was traced without the others",
                       name != NULL ? name : "", (long long)region->n_experts, n_found);
  if (message == NULL) return EG_ERROR_MEMORY;
  egi_findings_add(&state->findings, EG_ERROR_UNSUPPORTED, message);
  return EG_OK;
}

static void note_miss(fuser *state, const egi_moe_region *region) {
  const egi_graph *graph = state->graph;
  if (region->miss == NULL || state->run->report->nearest_miss != NULL) return;
  const egi_node *node = region->miss_node != 0 ? &graph->nodes[region->miss_node] : NULL;
  const char *name = node != NULL && node->name != NULL ? node->name : "";
  const char *op = node == NULL ? "" : node->op_name != NULL ? node->op_name : egi_op_get(node->op)->name;
  state->run->report->nearest_miss =
      egi_arena_format(&graph->module->arena, "node \"%s\" (%s): %s", name, op, region->miss);
}

/* A trace of a loop over the experts that were chosen holds as many as were chosen then: parts of a Split that fits no
 * other number; 0: it is no such trace. */
static int64_t n_traced(const egi_moe_region *region) {
  const egi_node *node = region->miss_node != 0 ? &region->graph->nodes[region->miss_node] : NULL;
  bool is_split = node != NULL && node->op == EGI_OP_Split && egi_node_int(node, "axis", 0) == 0;
  if (!is_split || region->graph->values[node->inputs[0]].dtype != EG_DTYPE_I64) return 0;
  return node->n_outputs;
}

static eg_status try_region(fuser *state, egi_moe_region *region, int64_t top_k) {
  egi_moe moe;
  egi_moe_operands operands;
  bool is_done = false, is_stacked = false;
  egi_moe_region first = {.miss = NULL};
  uint32_t n_found = 0, n_missing = 0;
  for (unsigned i = 0; i < MAX_EXITS && !is_done && egi_moe_next_exit(region); i++) {
    EG_TRY(choose_sizes(state, region, top_k, &is_stacked));
    bool is_known = recognise(region, is_stacked, &moe, &operands, &n_found);
    if (!is_known && n_traced(region) == region->n_experts) { /* it runs where every expert is chosen */
      region->is_wide = true;
      EG_TRY(choose_sizes(state, region, top_k, &is_stacked));
      is_known = recognise(region, is_stacked, &moe, &operands, &n_found);
    }
    if (!is_known && n_found == 0) n_found = (uint32_t)n_traced(region);
    if (n_found > n_missing) n_missing = n_found;
    moe.n_experts = region->n_experts;
    if (is_known) EG_TRY(replace(region, &moe, &operands, &is_done));
    if (first.miss == NULL) first = *region;
  }
  if (first.miss != NULL) { /* what is said of the nearest exit says most */
    region->miss = first.miss;
    region->miss_node = first.miss_node;
  }
  if (!is_done) note_miss(state, region);
  if (!is_done && n_missing > 0 && n_missing < (uint64_t)region->n_experts)
    EG_TRY(note_missing(state, region, n_missing));
  state->run->report->n_matched += is_done;
  state->run->has_changed = state->run->has_changed || is_done;
  return EG_OK;
}

static eg_status try_choice(fuser *state, egi_node_id id) {
  egi_arena arena;
  eg_status status = EG_OK;
  egi_arena_init(&arena, state->run->ctx, EGI_PURPOSE_GRAPH);
  egi_moe_region region = {
      .run = state->run, .graph = state->graph, .uses = &state->uses, .arena = &arena, .values = state->values};
  int64_t top_k = 1;
  uint32_t count = 0;
  (void)egi_value_integers(state->graph, state->graph->nodes[id].inputs[1], &top_k, 1, &count);
  if (egi_moe_find_router(&region, id) && !state->is_router_done[region.router]) {
    state->is_router_done[region.router] = true;
    state->run->report->n_tried++;
    status = try_region(state, &region, top_k > 0 ? top_k : 1);
  }
  for (uint32_t i = 0; i < region.n_touched; i++) state->values[region.touched[i]] = (egi_moe_value){0};
  egi_module_destroy(region.scratch);
  egi_arena_clear(&arena);
  return status;
}

static eg_status fuse_all(fuser *state) {
  egi_graph *graph = state->graph;
  state->n_nodes = graph->n_nodes;
  EG_TRY(egi_graph_uses(graph, &state->arena, &state->uses));
  state->values = EGI_NEW(&state->arena, egi_moe_value, graph->n_values);
  state->is_router_done = EGI_NEW(&state->arena, bool, graph->n_nodes);
  if (state->values == NULL || state->is_router_done == NULL) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1; id < state->n_nodes; id++)
    if (graph->nodes[id].op == EGI_OP_TopK) EG_TRY(try_choice(state, id));
  const char *message = NULL;
  if (state->findings.count > 0 && egi_has_pruned_head(graph, &state->arena, &message))
    egi_findings_add(&state->findings, EG_ERROR_UNSUPPORTED, message);
  return EG_OK;
}

eg_status egi_pass_fuse_moe(egi_pass_run *run, egi_graph *graph) {
  fuser state = {.run = run, .graph = graph};
  bool has_choice = false;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) has_choice = has_choice || graph->nodes[id].op == EGI_OP_TopK;
  if (!has_choice || graph->module->evaluator == NULL) return EG_OK;
  egi_arena_init(&state.arena, run->ctx, EGI_PURPOSE_GRAPH);
  egi_findings_begin(&state.findings, run->ctx);
  eg_status status = fuse_all(&state), found = egi_findings_end(&state.findings);
  if (status == EG_OK) status = found;
  egi_arena_clear(&state.arena);
  EG_TRY(status);
  if (!run->has_changed) return EG_OK;
  egi_pass_report report = {0};
  egi_pass_run inner = {.ctx = run->ctx, .report = &report};
  EG_TRY(egi_graph_tidy(graph));
  return egi_pass_eliminate_dead(&inner, graph);
}
