/* engraft.MoE becomes what is executed: Route (top-k, histogram, scan, stable order: all of the routing as values,
 * saved once and used again by gradients and recomputation), rows by expert, products of ragged rows with the
 * activation between them, and each token's rows summed by an inverse gather. The rows' weights scale the last product,
 * so that their gradient needs no result of it. Adapters are low-rank products beside. Precondition: recognised, types
 * inferred; terminates: no MoE is made. */
#include <string.h>

#include "graph/ragged.h"
#include "passes/passes.h"

typedef struct dispatcher {
  egi_graph *graph;
  egi_emitter emit;
  egi_node node; /* the MoE; its lists stay when it is gone */
  egi_moe moe;
  bool is_loop;
  egi_value_id source_row, inverse, offsets, weight;
} dispatcher;

/* ---- the router ----------------------------------------------------------------------------------------------- */

static void emit_route(dispatcher *state) {
  static const char *const names[] = {"experts",      "top_k",  "scoring",    "order",      "normalise",
                                      "routed_scale", "groups", "top_groups", "group_score"};
  egi_attribute attributes[EGI_COUNT(names)];
  egi_value_id results[5] = {0}, inputs[2] = {state->node.inputs[EGI_MOE_LOGITS], 0};
  unsigned n = 0, n_inputs = 1;
  for (size_t i = 0; i < EGI_COUNT(names); i++) {
    const egi_attribute *attribute = egi_node_attribute(&state->node, names[i]);
    if (attribute != NULL) attributes[n++] = *attribute;
  }
  inputs[1] = state->node.inputs[EGI_MOE_CORRECTION];
  if (inputs[1] != 0) n_inputs = 2;
  egi_emit_many(&state->emit, EGI_OP_Route, inputs, n_inputs, attributes, n, results, 5);
  state->source_row = results[1];
  state->inverse = results[2];
  state->offsets = results[3];
  state->weight = results[4];
  if (state->emit.status != EG_OK) return;
  eg_dtype dtype = state->graph->values[state->node.inputs[EGI_MOE_X]].dtype;
  if (state->graph->values[state->weight].dtype != dtype)
    state->weight = egi_emit_cast(&state->emit, state->weight, dtype);
}

/* ---- products ------------------------------------------------------------------------------------------------- */

typedef struct product {
  egi_value_id x, addend, row_weight;
  double alpha;
} product;

static int64_t columns_of(const dispatcher *state, egi_value_id value) {
  const egi_value *row = &state->graph->values[value];
  int64_t size = 0;
  if (state->emit.status != EG_OK || row->rank != 2) return 0;
  return egi_dim_value(state->graph->module->dims, row->dims[1], &size) ? size : 0;
}

/* `operands`: the values of the roles of `ragged`, one after the other. */
static egi_value_id emit_product(dispatcher *state, const product *p, const egi_ragged *ragged,
                                 const egi_value_id *operands, unsigned n_operands) {
  egi_value_id *inputs = EGI_NEW(&state->graph->module->arena, egi_value_id, n_operands + EGI_RAGGED_FIRST_ROLE);
  int64_t roles[EGI_RAGGED_ROLES];
  egi_attribute attributes[10];
  unsigned n = 0;
  if (inputs == NULL) {
    state->emit.status = EG_ERROR_MEMORY;
    return 0;
  }
  inputs[EGI_RAGGED_X] = p->x;
  inputs[EGI_RAGGED_ADDEND] = p->addend;
  inputs[EGI_RAGGED_OFFSETS] = state->offsets;
  inputs[EGI_RAGGED_ROW_WEIGHT] = p->row_weight;
  memcpy(inputs + EGI_RAGGED_FIRST_ROLE, operands, n_operands * sizeof *operands);
  for (unsigned i = 0; i < EGI_RAGGED_ROLES; i++) roles[i] = ragged->counts[i];
  attributes[n++] = egi_attribute_int("experts", ragged->n_experts);
  attributes[n++] = egi_attribute_int("in_features", columns_of(state, p->x));
  attributes[n++] = egi_attribute_ints("roles", roles, EGI_RAGGED_ROLES);
  if (ragged->is_transposed) attributes[n++] = egi_attribute_int("transposed", 1);
  if (p->alpha < 1.0 || p->alpha > 1.0) attributes[n++] = egi_attribute_float("alpha", (float)p->alpha);
  if (state->is_loop) attributes[n++] = egi_attribute_int("loop", 1);
  if (ragged->is_quantised) {
    attributes[n++] = egi_attribute_string("storage", ragged->has_levels ? "bnb4" : "nbits");
    if (ragged->has_levels) attributes[n++] = egi_attribute_int("quant_type", ragged->quant_type);
    attributes[n++] = egi_attribute_int("bits", ragged->bits);
    attributes[n++] = egi_attribute_int("block_size", ragged->block_size);
  }
  return egi_emit(&state->emit, EGI_OP_RaggedLinear, inputs, n_operands + EGI_RAGGED_FIRST_ROLE, attributes, n);
}

/* A [E·r, K] as [E, r, K], B [N, r·E] as [E, N, r]: views. */
static egi_value_id emit_adapter(dispatcher *state, egi_moe_role role, egi_value_id x, egi_value_id y,
                                 egi_value_id row_weight) {
  const egi_moe *moe = &state->moe;
  egi_emitter *emit = &state->emit;
  const egi_value_id *adapter = &state->node.inputs[moe->first[egi_moe_adapter(role)]];
  const int64_t by_expert[3] = {moe->n_experts, -1, columns_of(state, x)}, by_rank[3] = {0, -1, moe->n_experts};
  static const int64_t perm[3] = {2, 0, 1};
  const egi_attribute order = egi_attribute_ints("perm", perm, 3);
  egi_value_id a = egi_emit_binary(emit, EGI_OP_Reshape, adapter[0], egi_emit_integers(emit, by_expert, 3));
  egi_value_id b = egi_emit_binary(emit, EGI_OP_Reshape, adapter[1], egi_emit_integers(emit, by_rank, 3));
  b = egi_emit(emit, EGI_OP_Transpose, &b, 1, &order, 1);
  const egi_ragged plain = {.n_experts = moe->n_experts, .counts = {1}};
  const product down = {.x = x, .row_weight = row_weight, .alpha = 1.0};
  product up = {.addend = y, .alpha = moe->adapter_scales[role / 2]};
  up.x = emit_product(state, &down, &plain, &a, 1);
  return emit_product(state, &up, &plain, &b, 1);
}

/* x times the experts' matrices of the role. */
static egi_value_id emit_projection(dispatcher *state, egi_moe_role role, egi_value_id x, egi_value_id row_weight) {
  egi_ragged ragged = egi_moe_projection(&state->moe, role, 0);
  egi_value_id *operands = EGI_NEW(&state->graph->module->arena, egi_value_id, state->moe.n_inputs);
  unsigned n = 0;
  if (operands == NULL) {
    state->emit.status = EG_ERROR_MEMORY;
    return 0;
  }
  for (unsigned i = 0; i < EGI_RAGGED_ROLES; i++)
    for (uint32_t k = 0; k < ragged.counts[i]; k++) operands[n++] = state->node.inputs[ragged.first[i] + k];
  const product p = {.x = x, .row_weight = row_weight, .alpha = 1.0};
  egi_value_id y = emit_product(state, &p, &ragged, operands, n);
  return state->moe.counts[egi_moe_adapter(role)] > 0 ? emit_adapter(state, role, x, y, row_weight) : y;
}

/* ---- the activation ------------------------------------------------------------------------------------------- */

static void emit_halves(dispatcher *state, egi_value_id both, egi_value_id halves[2]) {
  egi_emitter *emit = &state->emit;
  bool is_interleaved = state->moe.form == EGI_MOE_INTERLEAVED;
  const int64_t pairs[3] = {0, -1, 2}, last = 2;
  const egi_attribute attributes[2] = {egi_attribute_int("axis", is_interleaved ? 2 : 1),
                                       egi_attribute_int("num_outputs", 2)};
  if (is_interleaved) both = egi_emit_binary(emit, EGI_OP_Reshape, both, egi_emit_integers(emit, pairs, 3));
  egi_emit_many(emit, EGI_OP_Split, &both, 1, attributes, 2, halves, 2);
  for (int i = 0; i < 2 && is_interleaved; i++)
    halves[i] = egi_emit_binary(emit, EGI_OP_Squeeze, halves[i], egi_emit_integers(emit, &last, 1));
}

/* act(gate) alone */
static egi_value_id emit_plain(dispatcher *state, egi_value_id x) {
  egi_emitter *emit = &state->emit;
  const egi_moe *moe = &state->moe;
  const egi_attribute alpha = egi_attribute_float("alpha", (float)moe->alpha);
  const egi_attribute by_tanh = egi_attribute_string("approximate", "tanh");
  if (moe->limit > 0.0 && emit->status == EG_OK)
    x = egi_emit_binary(emit, EGI_OP_Min, x, egi_emit_scalar(emit, moe->limit, state->graph->values[x].dtype));
  switch (moe->activation) {
  case EGI_MOE_SILU:
    return egi_emit(emit, EGI_OP_Swish, &x, 1, &alpha, 1);
  case EGI_MOE_GELU:
    return egi_emit_unary(emit, EGI_OP_Gelu, x);
  case EGI_MOE_GELU_TANH:
    return egi_emit(emit, EGI_OP_Gelu, &x, 1, &by_tanh, 1);
  case EGI_MOE_RELU:
    return egi_emit_unary(emit, EGI_OP_Relu, x);
  case EGI_MOE_SIGMOID:
    return egi_emit_unary(emit, EGI_OP_Sigmoid, x);
  case EGI_MOE_IDENTITY:
  case EGI_MOE_ACTIVATIONS:
    break;
  }
  return x;
}

static egi_value_id emit_activation(dispatcher *state, egi_value_id rows) {
  const egi_moe *moe = &state->moe;
  egi_value_id halves[2] = {0, 0};
  egi_value_id first = emit_projection(state, EGI_MOE_GATE, rows, 0);
  if (moe->form == EGI_MOE_UNGATED) return emit_plain(state, first);
  if (moe->form == EGI_MOE_SEPARATE) {
    halves[0] = first;
    halves[1] = emit_projection(state, EGI_MOE_UP, rows, 0);
  } else {
    emit_halves(state, first, halves);
  }
  const egi_attribute attributes[4] = {egi_attribute_string("activation", egi_moe_activation_name(moe->activation)),
                                       egi_attribute_float("alpha", (float)moe->alpha),
                                       egi_attribute_float("limit", (float)moe->limit),
                                       egi_attribute_float("offset", (float)moe->offset)};
  return egi_emit(&state->emit, EGI_OP_GLU, halves, 2, attributes, 4);
}

/* ---- the node ------------------------------------------------------------------------------------------------- */

static eg_status replace(dispatcher *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_value_id result = state->node.outputs[0];
  emit_route(state);
  const egi_value_id in[3] = {state->node.inputs[EGI_MOE_X], state->source_row, state->inverse};
  egi_value_id rows = egi_emit(&state->emit, EGI_OP_Dispatch, in, 3, NULL, 0);
  egi_value_id inner = emit_activation(state, rows);
  egi_value_id wide = emit_projection(state, EGI_MOE_DOWN, inner, state->weight);
  EG_TRY(state->emit.status);
  egi_graph_remove_node(graph, id);
  egi_value_id inputs[4] = {wide, state->source_row, state->inverse, state->node.inputs[EGI_MOE_X]};
  egi_node combine = {.op = EGI_OP_Combine, .name = "", .scope = state->node.scope};
  combine.inputs = inputs;
  combine.outputs = &result;
  combine.n_inputs = 4;
  combine.n_outputs = 1;
  EG_TRY(egi_graph_add_node(graph, &combine, &id));
  return egi_infer_node(graph, id);
}

eg_status egi_pass_dispatch_moe(egi_pass_run *run, egi_graph *graph) {
  egi_node_id n_nodes = graph->n_nodes;
  for (egi_node_id id = 1; id < n_nodes; id++) {
    if (graph->nodes[id].op != EGI_OP_MoE) continue;
    dispatcher state = {.graph = graph, .node = graph->nodes[id], .is_loop = run->adapt && run->adapt->is_loop};
    state.emit = (egi_emitter){.graph = graph, .scope = state.node.scope};
    run->report->n_tried++;
    EG_TRY(egi_moe_read(graph, id, &state.moe));
    EG_TRY(replace(&state, id));
    run->report->n_matched++;
    run->has_changed = true;
  }
  return EG_OK;
}
