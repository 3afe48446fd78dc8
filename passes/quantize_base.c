/* Frozen matrices of linear layers and of experts become 4-bit codes with a scale for each block (storage bnb4 of
 * Linear and MoE), made when they are loaded: nothing is read here. Routers, tables, norms and modules that are trained
 * whole stay, the head unless it is asked for, and what is stored quantised already; a table that is the head too stays
 * beside the head's codes. A matrix that several layers share is quantised once. Precondition: after name_modules,
 * before append_loss (which takes a quantised head as it is) and graft_adapters. A second run finds nothing left. */
#include <string.h>

#include "base/blockwise.h"
#include "graph/linear.h"
#include "graph/moe.h"
#include "passes/passes.h"

typedef struct quantiser {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_quantisation **made; /* by 2 · weight + is_transposed */
  uint32_t n_weights;      /* of the module before the pass */
  egi_map classes;         /* last part of a module path -> place in the counts */
  const char **class_names;
  uint32_t *counts;
  uint32_t n_classes, names_capacity, counts_capacity;
} quantiser;

/* ---- weights ---------------------------------------------------------------------------------------------------- */

static eg_status add_part(quantiser *state, egi_quantisation *q, egi_quantised_tensor part, eg_dtype dtype,
                          uint64_t count) {
  static const char *const suffixes[EGI_QUANTISED_PARTS] = {"codes", "absmax", "nested"};
  egi_weight weight = {.dtype = dtype, .rank = 1, .dims = {(int64_t)count}};
  if (part == EGI_QUANTISED_CODES && q->columns % 2 == 0) { /* rows are whole bytes, as experts need them */
    const int64_t dims[3] = {q->n_matrices, q->rows, q->columns / 2};
    weight.rank = q->matrix.rank;
    memcpy(weight.dims, dims + 3 - weight.rank, (size_t)weight.rank * sizeof *dims);
  }
  weight.name = egi_arena_format(&state->arena, "%s.%s", q->matrix.name, suffixes[part]);
  weight.bytes = (egi_bytes){.kind = EGI_BYTES_QUANTISED, .quantisation = q, .quantised_tensor = part};
  if (!weight.name) return EG_ERROR_MEMORY;
  return egi_module_add_weight(state->graph->module, &weight, &q->weights[part]);
}

static eg_status add_weights(quantiser *state, egi_quantisation *q) {
  uint64_t n = (uint64_t)q->n_matrices * (uint64_t)q->rows * (uint64_t)q->columns;
  uint64_t n_blocks = (n + (uint64_t)q->block - 1) / (uint64_t)q->block;
  EG_TRY(add_part(state, q, EGI_QUANTISED_CODES, EG_DTYPE_U8, (n + 1) / 2));
  EG_TRY(add_part(state, q, EGI_QUANTISED_SCALES, q->is_nested ? EG_DTYPE_U8 : EG_DTYPE_F32, n_blocks));
  return q->is_nested ? add_part(state, q, EGI_QUANTISED_NESTED, EG_DTYPE_F32, egi_nested_count(n_blocks)) : EG_OK;
}

/* The matrix's tensors, made when it is met first. */
static eg_status quantise_weight(quantiser *state, uint32_t weight, bool is_transposed, egi_quantisation **out) {
  const egi_quantise_options *options = &state->run->adapt->quantise;
  egi_module *module = state->graph->module;
  egi_quantisation **place = &state->made[2 * weight + is_transposed];
  if (*place == NULL) {
    egi_quantisation *q = EGI_NEW(&module->arena, egi_quantisation, 1);
    if (!q) return EG_ERROR_MEMORY;
    const egi_weight *matrix = &module->weights[weight];
    *q = (egi_quantisation){.matrix = *matrix,
                            .is_transposed = is_transposed,
                            .n_matrices = matrix->rank == 3 ? matrix->dims[0] : 1,
                            .rows = matrix->dims[matrix->rank - 2 + is_transposed],
                            .columns = matrix->dims[matrix->rank - 1 - is_transposed],
                            .type = options->type,
                            .block = options->block,
                            .is_nested = options->is_nested};
    EG_TRY(add_weights(state, q));
    *place = q;
  }
  *out = *place;
  return EG_OK;
}

/* ---- layers ----------------------------------------------------------------------------------------------------- */

static eg_status put_linear(quantiser *state, egi_node_id id, const egi_quantisation *q) {
  egi_graph *graph = state->graph;
  const egi_node old = graph->nodes[id]; /* its lists stay when it is gone */
  egi_value_id inputs[EGI_LINEAR_INPUTS] = {0}, output = old.outputs[0];
  egi_attribute attributes[6] = {egi_attribute_string("storage", "bnb4"), egi_attribute_int("quant_type", q->type),
                                 egi_attribute_int("block_size", q->block), egi_attribute_int("out_features", q->rows),
                                 egi_attribute_int("in_features", q->columns)};
  const egi_attribute *parts = egi_node_attribute(&old, EGI_PARTS);
  egi_node linear = {.op = EGI_OP_Linear, .name = old.name, .scope = old.scope, .origin = old.origin};
  inputs[EGI_LINEAR_X] = old.inputs[EGI_LINEAR_X];
  if (old.n_inputs > EGI_LINEAR_BIAS) inputs[EGI_LINEAR_BIAS] = old.inputs[EGI_LINEAR_BIAS];
  EG_TRY(egi_graph_add_weight(graph, q->weights[EGI_QUANTISED_CODES], &inputs[EGI_LINEAR_WEIGHT]));
  EG_TRY(egi_graph_add_weight(graph, q->weights[EGI_QUANTISED_SCALES], &inputs[EGI_LINEAR_SCALES]));
  if (q->is_nested) EG_TRY(egi_graph_add_weight(graph, q->weights[EGI_QUANTISED_NESTED], &inputs[EGI_LINEAR_NESTED]));
  linear.n_attributes = 5;
  if (parts) attributes[linear.n_attributes++] = *parts;
  linear.inputs = inputs;
  linear.n_inputs = q->is_nested ? EGI_LINEAR_INPUTS : EGI_LINEAR_SCALES + 1;
  linear.attributes = attributes;
  linear.outputs = &output;
  linear.n_outputs = 1;
  egi_graph_remove_node(graph, id);
  EG_TRY(egi_graph_add_node(graph, &linear, &id));
  return egi_infer_node(graph, id);
}

static eg_status count_class(quantiser *state, const char *path) {
  const char *dot = strrchr(path, '.'), *name = dot ? dot + 1 : path;
  uint32_t place = state->n_classes;
  if (!egi_map_get(&state->classes, name, &place)) {
    EG_TRY(EGI_GROW(&state->arena, &state->class_names, place, &state->names_capacity));
    EG_TRY(EGI_GROW(&state->arena, &state->counts, place, &state->counts_capacity));
    EG_TRY(egi_map_put(&state->classes, name, place));
    state->class_names[state->n_classes++] = name;
  }
  state->counts[place]++;
  return EG_OK;
}

static bool can_quantise(const quantiser *state, const egi_linear *linear) {
  const egi_graph *graph = state->graph;
  const egi_value *value = &graph->values[linear->weight];
  if (egi_is_saved_module(state->run->adapt->modules, linear->path)) return false;
  bool is_left = linear->is_head && !state->run->adapt->quantise.has_head;
  if (is_left || linear->is_router || linear->is_quantised || value->kind != EGI_VALUE_WEIGHT) return false;
  const egi_weight *weight = &graph->module->weights[value->index];
  bool is_float = weight->dtype == EG_DTYPE_F32 || weight->dtype == EG_DTYPE_F16 || weight->dtype == EG_DTYPE_BF16;
  bool is_matrix = weight->rank == 2 && weight->dims[0] > 0 && weight->dims[1] > 0;
  return is_float && is_matrix && weight->bytes.kind != EGI_BYTES_QUANTISED &&
         graph->nodes[linear->node].op == EGI_OP_Linear;
}

/* Parts of one node stand one after the other: the first of them replaces it. */
static eg_status quantise_layers(quantiser *state, const egi_linear *linears, size_t n) {
  egi_graph *graph = state->graph;
  bool is_done = false;
  for (size_t i = 0; i < n; i++) {
    const egi_linear *linear = &linears[i];
    bool is_part = i > 0 && linears[i - 1].node == linear->node;
    if (!is_part) {
      egi_quantisation *q = NULL;
      state->run->report->n_tried++;
      is_done = can_quantise(state, linear);
      if (!is_done) continue;
      uint32_t weight = graph->values[linear->weight].index;
      EG_TRY(quantise_weight(state, weight, !linear->is_transposed, &q));
      EG_TRY(put_linear(state, linear->node, q));
      state->run->report->n_matched++;
      state->run->has_changed = true;
    }
    if (is_done) EG_TRY(count_class(state, linear->path));
  }
  return EG_OK;
}

/* ---- experts ---------------------------------------------------------------------------------------------------- */

static bool is_float_weight(const egi_graph *graph, egi_value_id value, int rank) {
  if (value == 0 || graph->values[value].kind != EGI_VALUE_WEIGHT) return false;
  const egi_weight *weight = &graph->module->weights[graph->values[value].index];
  bool is_float = weight->dtype == EG_DTYPE_F32 || weight->dtype == EG_DTYPE_F16 || weight->dtype == EG_DTYPE_BF16;
  for (int i = 0; is_float && i < weight->rank; i++) is_float = weight->dims[i] > 0;
  return is_float && weight->rank == rank && weight->bytes.kind != EGI_BYTES_QUANTISED;
}

/* The weights of the experts' matrices by input, all of them or none. */
static bool find_experts(const egi_graph *graph, const egi_node *node, const egi_moe *moe, egi_value_id *out_weights) {
  for (unsigned role = EGI_MOE_GATE; role <= EGI_MOE_DOWN; role += 2)
    for (uint32_t i = 0; i < moe->counts[role]; i++) {
      uint32_t input = moe->first[role] + i;
      bool is_turned = false;
      out_weights[input] = egi_weight_below(graph, node->inputs[input], &is_turned);
      if (is_turned || !is_float_weight(graph, out_weights[input], moe->counts[role] == 1 ? 3 : 2)) return false;
      const egi_weight *weight = &graph->module->weights[graph->values[out_weights[input]].index];
      if (weight->dims[weight->rank - 1 - moe->is_transposed[role / 2]] % 2 != 0) return false;
    }
  return true;
}

typedef struct experts {
  egi_node node; /* its lists stay when it is gone */
  egi_moe moe;
  egi_value_id *weights, *inputs; /* by input of the node before and after */
  int64_t roles[EGI_MOE_ROLES];
  unsigned n_inputs;
} experts;

/* The tensors of one kind for each operand of the role. */
static eg_status put_parts(quantiser *state, experts *e, unsigned role, egi_quantised_tensor part) {
  for (uint32_t i = 0; i < e->moe.counts[role]; i++) {
    egi_quantisation *q = NULL;
    uint32_t weight = state->graph->values[e->weights[e->moe.first[role] + i]].index;
    EG_TRY(quantise_weight(state, weight, e->moe.is_transposed[role / 2], &q));
    if (q->weights[part] == 0) return EG_OK;
    EG_TRY(egi_graph_add_weight(state->graph, q->weights[part], &e->inputs[e->n_inputs++]));
  }
  return EG_OK;
}

static eg_status put_role(quantiser *state, experts *e, unsigned role) {
  unsigned before = e->n_inputs;
  bool is_bias = role <= EGI_MOE_DOWN_BIAS && role % 2 == 1;
  if (role <= EGI_MOE_DOWN && role % 2 == 0) {
    EG_TRY(put_parts(state, e, role, EGI_QUANTISED_CODES));
  } else if (!is_bias && role >= EGI_MOE_GATE_SCALES && role <= EGI_MOE_DOWN_ZEROS) {
    unsigned matrix = (role - EGI_MOE_GATE_SCALES) / 2 * 2;
    bool is_scales = (role - EGI_MOE_GATE_SCALES) % 2 == 0;
    EG_TRY(put_parts(state, e, matrix, is_scales ? EGI_QUANTISED_SCALES : EGI_QUANTISED_NESTED));
  } else {
    for (uint32_t i = 0; i < e->moe.counts[role]; i++)
      e->inputs[e->n_inputs++] = e->node.inputs[e->moe.first[role] + i];
  }
  e->roles[role] = (int64_t)e->n_inputs - before;
  return EG_OK;
}

static eg_status put_experts(quantiser *state, experts *e, egi_node_id id) {
  static const char *const replaced[] = {"storage", "bits", "block_size", "quant_type", "roles", "transposed"};
  const egi_quantise_options *options = &state->run->adapt->quantise;
  egi_attribute *attributes = EGI_NEW(&state->arena, egi_attribute, (size_t)e->node.n_attributes + 5);
  egi_node moe = e->node;
  if (!attributes) return EG_ERROR_MEMORY;
  moe.n_attributes = 0;
  for (unsigned i = 0; i < e->node.n_attributes; i++) {
    bool is_replaced = false;
    for (size_t k = 0; k < EGI_COUNT(replaced); k++)
      is_replaced = is_replaced || strcmp(e->node.attributes[i].name, replaced[k]) == 0;
    if (!is_replaced) attributes[moe.n_attributes++] = e->node.attributes[i];
  }
  attributes[moe.n_attributes++] = egi_attribute_string("storage", "bnb4");
  attributes[moe.n_attributes++] = egi_attribute_int("quant_type", options->type);
  attributes[moe.n_attributes++] = egi_attribute_int("bits", 4);
  attributes[moe.n_attributes++] = egi_attribute_int("block_size", options->block);
  attributes[moe.n_attributes++] = egi_attribute_ints("roles", e->roles, EGI_MOE_ROLES);
  moe.attributes = attributes;
  moe.inputs = e->inputs;
  moe.n_inputs = (uint16_t)e->n_inputs;
  egi_graph_remove_node(state->graph, id);
  EG_TRY(egi_graph_add_node(state->graph, &moe, &id));
  return egi_infer_node(state->graph, id);
}

/* A mixture whose matrices are all frozen floats with rows of whole bytes. */
static eg_status quantise_experts(quantiser *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  experts e = {.node = graph->nodes[id]};
  EG_TRY(egi_moe_read(graph, id, &e.moe));
  state->run->report->n_tried++;
  if (e.moe.is_quantised || e.moe.n_inputs > UINT16_MAX / 4) return EG_OK;
  e.weights = EGI_NEW(&state->arena, egi_value_id, e.moe.n_inputs);
  e.inputs = EGI_NEW(&state->arena, egi_value_id, 4 * (size_t)e.moe.n_inputs);
  if (!e.weights || !e.inputs) return EG_ERROR_MEMORY;
  if (!find_experts(graph, &e.node, &e.moe, e.weights)) return EG_OK;
  for (; e.n_inputs < EGI_MOE_FIRST_ROLE; e.n_inputs++)
    e.inputs[e.n_inputs] = e.n_inputs < e.node.n_inputs ? e.node.inputs[e.n_inputs] : 0;
  for (unsigned role = 0; role < EGI_MOE_ROLES; role++) EG_TRY(put_role(state, &e, role));
  EG_TRY(put_experts(state, &e, id));
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return count_class(state, "experts");
}

static eg_status log_counts(quantiser *state) {
  const egi_quantise_options *options = &state->run->adapt->quantise;
  egi_text text;
  egi_text_init(&text, state->run->ctx);
  for (uint32_t i = 0; i < state->n_classes; i++)
    egi_text_format(&text, "%s %u %s", i > 0 ? "," : "", state->counts[i], state->class_names[i]);
  eg_status status = egi_text_status(&text);
  if (status == EG_OK)
    egi_log(state->run->ctx, EG_LOG_INFO, "linear layers in %s, blocks of %lld%s:%s",
            options->type == EGI_FOUR_BIT_NF4 ? "nf4" : "fp4", (long long)options->block,
            options->is_nested ? ", nested scales" : "", state->n_classes > 0 ? egi_text_string(&text) : " none");
  egi_text_free(&text);
  return status;
}

static eg_status quantise(quantiser *state) {
  egi_linear *linears = NULL;
  size_t n = 0;
  state->n_weights = state->graph->module->n_weights;
  state->made = EGI_NEW(&state->arena, egi_quantisation *, 2 * (size_t)state->n_weights);
  if (!state->made) return EG_ERROR_MEMORY;
  egi_map_init(&state->classes, &state->arena);
  EG_TRY(egi_find_linears(state->graph, &state->arena, &linears, &n));
  EG_TRY(quantise_layers(state, linears, n));
  egi_node_id n_nodes = state->graph->n_nodes;
  for (egi_node_id id = 1; id < n_nodes; id++)
    if (state->graph->nodes[id].op == EGI_OP_MoE) EG_TRY(quantise_experts(state, id));
  return log_counts(state);
}

eg_status egi_pass_quantize_base(egi_pass_run *run, egi_graph *graph) {
  if (!run->adapt || !run->adapt->quantise.is_wanted) return EG_OK;
  quantiser state = {.run = run, .graph = graph};
  egi_arena_init(&state.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = quantise(&state);
  egi_arena_clear(&state.arena);
  return status;
}
