/* Shape arithmetic that symbolic dims answer becomes constants: integers whose values are known, Reshape targets
 * written with 0 (copy) and -1, Expand targets written with 1 (keep); an Expand to its own shape goes. What computed
 * them dies in eliminate_dead. Precondition: inferred. Ends because a target is only replaced by a constant. */
#include <string.h>

#include "passes/passes.h"

enum { MAX_ELEMENTS = 64 };

typedef struct folder {
  egi_pass_run *run;
  egi_graph *graph;
  egi_redirect redirect;
} folder;

static egi_dim dim_of(const egi_graph *graph, const egi_value *value, int index) {
  return egi_dim_resolve(graph->module->dims, value->dims[index]);
}

static eg_status integer_constant(folder *state, const int64_t *values, uint32_t count, egi_value_id *out_value) {
  egi_emitter emit = {.graph = state->graph};
  *out_value = egi_emit_integers(&emit, values, count);
  return emit.status;
}

/* A node's integer result that is known becomes a weight of the same type. */
static eg_status fold_known(folder *state, egi_value_id output) {
  egi_graph *graph = state->graph;
  int64_t numbers[MAX_ELEMENTS];
  uint32_t count = 0;
  const egi_value *value = &graph->values[output];
  bool is_index = value->dtype == EG_DTYPE_I64 || value->dtype == EG_DTYPE_I32;
  if (egi_graph_is_output(graph, output)) return EG_OK;
  if (!is_index || value->rank < 0 || value->rank > 1 || !value->elements) return EG_OK;
  if (!egi_value_integers(graph, output, numbers, MAX_ELEMENTS, &count)) return EG_OK;
  if (value->rank == 0 && count != 1) return EG_OK;
  egi_tensor tensor = {.dtype = value->dtype, .rank = value->rank, .dims = {(int64_t)count}, .strides = {1}};
  size_t element_bytes = egi_dtype_bits(value->dtype) / 8;
  uint8_t *bytes = egi_arena_get(&graph->module->arena, count, element_bytes);
  if (!bytes) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < count; i++) {
    int32_t narrow = (int32_t)numbers[i];
    memcpy(bytes + i * element_bytes, element_bytes == 8 ? (const void *)&numbers[i] : (const void *)&narrow,
           element_bytes);
  }
  tensor.data = bytes;
  egi_value_id constant = 0;
  bool is_done = false;
  const char *name = egi_arena_format(&state->redirect.arena, "%s.known", value->name);
  if (!name) return EG_ERROR_MEMORY;
  EG_TRY(egi_add_constant(graph, name, &tensor, &constant));
  EG_TRY(egi_redirect_put(&state->redirect, output, constant, &is_done));
  return EG_OK;
}

/* ---- Reshape --------------------------------------------------------------------------------------------------- */

/* The target with numbers, 0 where a dim is copied, one -1; false when more than one dim is left over. */
static bool express_reshape(const egi_graph *graph, const egi_value *from, const egi_value *to, int64_t *out) {
  int n_free = 0;
  for (int i = 0; i < to->rank; i++) {
    egi_dim dim = dim_of(graph, to, i);
    if (dim == EGI_DIM_NONE) return false;
    if (egi_dim_value(graph->module->dims, dim, &out[i])) {
      if (out[i] <= 0) return false; /* 0 would read as "copy" */
    } else if (i < from->rank && dim_of(graph, from, i) == dim) {
      out[i] = 0;
    } else {
      out[i] = -1;
      n_free++;
    }
  }
  return n_free <= 1;
}

/* A 0 in a constant target with allowzero = 0 copies; with allowzero and no 0 the attribute says nothing. */
static eg_status clear_allowzero(folder *state, egi_node_id id) {
  const egi_attribute cleared = egi_attribute_int("allowzero", 0);
  if (egi_node_int(&state->graph->nodes[id], "allowzero", 0) == 0) return EG_OK;
  state->run->has_changed = true;
  return egi_node_set_attribute(state->graph, id, &cleared);
}

static bool has_zero(const int64_t *values, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    if (values[i] == 0) return true;
  }
  return false;
}

static eg_status fold_reshape(folder *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[id];
  const egi_value *from = &graph->values[node->inputs[0]], *to = &graph->values[node->outputs[0]];
  const egi_value *target = &graph->values[node->inputs[1]];
  int64_t numbers[MAX_ELEMENTS];
  uint32_t count = 0;
  if (target->kind == EGI_VALUE_WEIGHT) {
    bool is_known = egi_value_integers(graph, node->inputs[1], numbers, MAX_ELEMENTS, &count);
    return is_known && !has_zero(numbers, count) ? clear_allowzero(state, id) : EG_OK;
  }
  if (from->rank < 0 || to->rank < 0 || !express_reshape(graph, from, to, numbers)) return EG_OK;
  egi_value_id constant = 0;
  count = (uint32_t)to->rank;
  EG_TRY(integer_constant(state, numbers, count, &constant));
  graph->nodes[id].inputs[1] = constant;
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return clear_allowzero(state, id);
}

/* ---- Expand ---------------------------------------------------------------------------------------------------- */

/* The target with numbers, and 1 where the input's own dim stays. */
static bool express_expand(const egi_graph *graph, const egi_value *from, const egi_value *to, int64_t *out) {
  int shift = to->rank - from->rank;
  if (shift < 0) return false;
  for (int i = 0; i < to->rank; i++) {
    egi_dim dim = dim_of(graph, to, i);
    if (dim == EGI_DIM_NONE) return false;
    if (i >= shift && dim_of(graph, from, i - shift) == dim) {
      out[i] = 1;
    } else if (!egi_dim_value(graph->module->dims, dim, &out[i])) {
      return false;
    }
  }
  return true;
}

static eg_status fold_expand(folder *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[id];
  egi_value_id input = node->inputs[0], output = node->outputs[0];
  const egi_value *from = &graph->values[input], *to = &graph->values[output];
  if (from->rank < 0 || to->rank < 0) return EG_OK;
  if (egi_same_shape(graph, input, output)) {
    bool is_done = false;
    EG_TRY(egi_redirect_put(&state->redirect, output, input, &is_done));
    if (!is_done) return EG_OK;
    egi_graph_remove_node(graph, id);
    state->run->report->n_matched++;
    state->run->has_changed = true;
    return EG_OK;
  }
  int64_t numbers[EGI_MAX_RANK];
  if (graph->values[node->inputs[1]].kind == EGI_VALUE_WEIGHT) return EG_OK;
  if (!express_expand(graph, from, to, numbers)) return EG_OK;
  egi_value_id constant = 0;
  EG_TRY(integer_constant(state, numbers, (uint32_t)to->rank, &constant));
  graph->nodes[id].inputs[1] = constant;
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return EG_OK;
}

/* ---- pass ------------------------------------------------------------------------------------------------------ */

static eg_status fold_node(folder *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_redirect_node(&state->redirect, id);
  const egi_node *node = &graph->nodes[id];
  if (node->op == EGI_OP_NONE || node->op == EGI_OP_UNKNOWN) return EG_OK;
  if (egi_op_get(node->op)->flags & EGI_OP_EFFECT) return EG_OK;
  state->run->report->n_tried++;
  if (node->op == EGI_OP_Reshape) EG_TRY(fold_reshape(state, id));
  if (node->op == EGI_OP_Expand) return fold_expand(state, id);
  if (node->n_outputs != 1 || node->outputs[0] == 0) return EG_OK;
  egi_value_id output = node->outputs[0];
  uint32_t before = state->redirect.n_redirected;
  EG_TRY(fold_known(state, output));
  if (state->redirect.n_redirected == before) return EG_OK;
  egi_graph_remove_node(graph, id);
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return EG_OK;
}

static eg_status fold_all(folder *state) {
  EG_TRY(egi_redirect_init(&state->redirect, state->graph));
  uint32_t n_nodes = state->graph->n_nodes;
  for (egi_node_id id = 1; id < n_nodes; id++) EG_TRY(fold_node(state, id));
  egi_redirect_apply(&state->redirect);
  return EG_OK;
}

eg_status egi_pass_fold_shapes(egi_pass_run *run, egi_graph *graph) {
  folder state = {.run = run, .graph = graph};
  eg_status status = fold_all(&state);
  egi_redirect_free(&state.redirect);
  return status;
}
