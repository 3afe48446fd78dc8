/* Nodes that give back their input go: Identity, layout operators and Casts that change nothing, x + 0, x - 0, x · 1,
 * x / 1, x ^ 1 with a constant scalar; chains of Transposes become one, chains of Reshapes and the like that come back
 * to a shape they had are cut, and a Cast after a lossless Cast starts from before it; a CastLike is a Cast, a
 * product with -1 is a Neg, a negated summand is subtracted, and a Concat leaves out parts without elements.
 * Precondition: inferred. Ends because each rewrite removes a node or shortens a chain.
 */
#include "passes/passes.h"

typedef struct eliminator {
  egi_pass_run *run;
  egi_graph *graph;
  egi_redirect redirect;
} eliminator;

/* Type and shape of the result are those of the input. */
static bool is_same_type(const egi_graph *graph, egi_value_id input, egi_value_id output) {
  return graph->values[input].dtype == graph->values[output].dtype &&
         graph->values[input].dtype != EG_DTYPE_UNDEFINED && egi_same_shape(graph, input, output);
}

static bool is_constant_number(const egi_graph *graph, egi_value_id value, double number) {
  double scalar = 0.0;
  return egi_value_scalar(graph, value, &scalar) && scalar == number;
}

/* All steps 1: with equal shapes nothing was cut off and nothing reversed. */
static bool is_forward_slice(const egi_graph *graph, const egi_node *node) {
  int64_t steps[EGI_MAX_RANK];
  uint32_t count = 0;
  if (node->n_inputs < 5 || node->inputs[4] == 0) return true;
  if (!egi_value_integers(graph, node->inputs[4], steps, EGI_MAX_RANK, &count)) return false;
  for (uint32_t i = 0; i < count; i++) {
    if (steps[i] != 1) return false;
  }
  return true;
}

static bool is_identity_permutation(const egi_node *node, int rank) {
  uint32_t count = 0;
  const int64_t *perm = egi_node_ints(node, "perm", &count);
  if (!perm) return rank <= 1;
  for (uint32_t i = 0; i < count; i++) {
    if (perm[i] != (int64_t)i) return false;
  }
  return true;
}

static bool is_reshaping(egi_op op) {
  return op == EGI_OP_Reshape || op == EGI_OP_Flatten || op == EGI_OP_Squeeze || op == EGI_OP_Unsqueeze;
}

/* Elements keep their order along a chain of such nodes: the nearest value on it with the result's own shape, or the
 * input. Ends because producers stand before their users. */
static egi_value_id equal_before(const egi_graph *graph, const egi_node *node) {
  enum { MOST_STEPS = 8 };
  egi_value_id value = node->inputs[0];
  for (int i = 0; i < MOST_STEPS && !is_same_type(graph, value, node->outputs[0]); i++) {
    if (graph->values[value].kind != EGI_VALUE_NODE) return node->inputs[0];
    const egi_node *before = &graph->nodes[graph->values[value].producer];
    if (!is_reshaping(before->op)) return node->inputs[0];
    value = before->inputs[0];
  }
  return value;
}

/* The value that the node's result equals, or 0. Type and shape are compared by the caller. */
static egi_value_id equal_input(const egi_graph *graph, const egi_node *node) {
  const egi_value_id *in = node->inputs;
  switch (node->op) {
  case EGI_OP_Identity:
  case EGI_OP_Cast:
  case EGI_OP_Expand:
  case EGI_OP_SumTo:
    return in[0];
  case EGI_OP_Reshape:
  case EGI_OP_Flatten:
  case EGI_OP_Squeeze:
  case EGI_OP_Unsqueeze:
    return node->outputs[0] != 0 ? equal_before(graph, node) : 0;
  case EGI_OP_Concat:
  case EGI_OP_Max:
  case EGI_OP_Min:
    return node->n_inputs == 1 ? in[0] : 0;
  case EGI_OP_Split:
    return node->n_outputs == 1 ? in[0] : 0;
  case EGI_OP_Slice:
    return is_forward_slice(graph, node) ? in[0] : 0;
  case EGI_OP_Transpose:
    return is_identity_permutation(node, graph->values[in[0]].rank) ? in[0] : 0;
  case EGI_OP_Add:
    return is_constant_number(graph, in[1], 0.0) ? in[0] : is_constant_number(graph, in[0], 0.0) ? in[1] : 0;
  case EGI_OP_Mul:
    return is_constant_number(graph, in[1], 1.0) ? in[0] : is_constant_number(graph, in[0], 1.0) ? in[1] : 0;
  case EGI_OP_Sub:
    return is_constant_number(graph, in[1], 0.0) ? in[0] : 0;
  case EGI_OP_Div:
  case EGI_OP_Pow:
    return is_constant_number(graph, in[1], 1.0) ? in[0] : 0;
  default:
    return 0;
  }
}

/* ---- chains ---------------------------------------------------------------------------------------------------- */

/* The producer of `value` when it is a node of operator `op`. */
static const egi_node *producer_of(const egi_graph *graph, egi_value_id value, egi_op op) {
  if (value == 0 || graph->values[value].kind != EGI_VALUE_NODE) return NULL;
  const egi_node *node = &graph->nodes[graph->values[value].producer];
  return node->op == op ? node : NULL;
}

static void read_permutation(const egi_node *node, int rank, int64_t *out) {
  uint32_t count = 0;
  const int64_t *perm = egi_node_ints(node, "perm", &count);
  for (int i = 0; i < rank; i++) out[i] = perm && count == (uint32_t)rank ? perm[i] : rank - 1 - i;
}

/* Transpose(Transpose(x, p), q) = Transpose(x, p[q]). */
static eg_status merge_transposes(eliminator *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_node *node = &graph->nodes[id];
  const egi_node *inner = producer_of(graph, node->inputs[0], EGI_OP_Transpose);
  int rank = graph->values[node->inputs[0]].rank;
  if (!inner || rank <= 0) return EG_OK;
  int64_t first[EGI_MAX_RANK], second[EGI_MAX_RANK], merged[EGI_MAX_RANK];
  read_permutation(inner, rank, first);
  read_permutation(node, rank, second);
  for (int i = 0; i < rank; i++) merged[i] = first[second[i]];
  const egi_attribute perm = egi_attribute_ints("perm", merged, (uint32_t)rank);
  node->inputs[0] = inner->inputs[0];
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return egi_node_set_attribute(graph, id, &perm);
}

/* Every number of type `from` is a number of type `to`. */
static bool is_lossless(eg_dtype from, eg_dtype to) {
  egi_dtype_class a = egi_dtype_kind(from), b = egi_dtype_kind(to);
  unsigned from_bits = egi_dtype_bits(from), to_bits = egi_dtype_bits(to);
  if (from == to) return true;
  if (a == EGI_CLASS_BOOLEAN) return b == EGI_CLASS_FLOAT || b == EGI_CLASS_INTEGER || b == EGI_CLASS_UNSIGNED;
  if (a == EGI_CLASS_FLOAT) {
    bool is_plain = from == EG_DTYPE_F16 || from == EG_DTYPE_BF16 || from == EG_DTYPE_F32;
    return is_plain && (to == EG_DTYPE_F32 || to == EG_DTYPE_F64) && from_bits < to_bits;
  }
  if (a == EGI_CLASS_INTEGER || a == EGI_CLASS_UNSIGNED) {
    if (b == a) return from_bits < to_bits;
    if (b == EGI_CLASS_INTEGER) return from_bits < to_bits;
    return (to == EG_DTYPE_F32 && from_bits <= 16) || (to == EG_DTYPE_F64 && from_bits <= 32);
  }
  return false;
}

/* Cast(Cast(x, wider), t) = Cast(x, t). */
static void merge_casts(eliminator *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_node *node = &graph->nodes[id];
  const egi_node *inner = producer_of(graph, node->inputs[0], EGI_OP_Cast);
  if (!inner || !is_lossless(graph->values[inner->inputs[0]].dtype, graph->values[node->inputs[0]].dtype)) return;
  node->inputs[0] = inner->inputs[0];
  state->run->report->n_matched++;
  state->run->has_changed = true;
}

/* Parts without elements add nothing to a Concat. */
static void drop_empty_parts(eliminator *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_node *node = &graph->nodes[id];
  int rank = graph->values[node->inputs[0]].rank;
  int64_t axis = egi_node_int(node, "axis", 0), size = 0;
  uint16_t n_kept = 0;
  if (rank <= 0 || axis < -rank || axis >= rank) return;
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    const egi_value *part = &graph->values[node->inputs[i]];
    bool is_empty = part->rank == rank &&
                    egi_dim_value(graph->module->dims, part->dims[axis < 0 ? axis + rank : axis], &size) && size == 0;
    if (!is_empty || (n_kept == 0 && i + 1 == node->n_inputs)) node->inputs[n_kept++] = node->inputs[i];
  }
  if (n_kept == node->n_inputs) return;
  node->n_inputs = n_kept;
  state->run->report->n_matched++;
  state->run->has_changed = true;
}

/* x · -1 = x / -1 = -x */
static void name_sign(eliminator *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_node *node = &graph->nodes[id];
  unsigned index = is_constant_number(graph, node->inputs[1], -1.0) ? 0 : 1;
  bool is_negated = index == 0 || (node->op == EGI_OP_Mul && is_constant_number(graph, node->inputs[0], -1.0));
  if (!is_negated || node->outputs[0] == 0 || !is_same_type(graph, node->inputs[index], node->outputs[0])) return;
  node->inputs[0] = node->inputs[index];
  node->n_inputs = 1;
  node->op = EGI_OP_Neg;
  node->op_name = NULL;
  state->run->report->n_matched++;
  state->run->has_changed = true;
}

/* a + -b = a - b, in floating point too. */
static void join_sign(eliminator *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_node *node = &graph->nodes[id];
  for (unsigned i = 0; i < 2 && node->n_inputs == 2; i++) {
    const egi_node *negated = producer_of(graph, node->inputs[i], EGI_OP_Neg);
    if (negated == NULL) continue;
    node->inputs[0] = node->inputs[1 - i];
    node->inputs[1] = negated->inputs[0];
    node->op = EGI_OP_Sub;
    node->op_name = NULL;
    state->run->report->n_matched++;
    state->run->has_changed = true;
    return;
  }
}

/* The type is known: the second operand's producer may go. */
static eg_status name_type(eliminator *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_node *node = &graph->nodes[id];
  eg_dtype dtype = graph->values[node->inputs[1]].dtype;
  if (dtype == EG_DTYPE_UNDEFINED) return EG_OK;
  node->op = EGI_OP_Cast;
  node->op_name = NULL;
  node->n_inputs = 1;
  state->run->report->n_matched++;
  state->run->has_changed = true;
  const egi_attribute to = egi_attribute_int("to", dtype);
  return egi_node_set_attribute(graph, id, &to);
}

/* ---- pass ------------------------------------------------------------------------------------------------------ */

static eg_status visit(eliminator *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_redirect_node(&state->redirect, id);
  const egi_node *node = &graph->nodes[id];
  if (node->op == EGI_OP_NONE || node->op == EGI_OP_UNKNOWN || node->n_outputs == 0 || node->n_inputs == 0)
    return EG_OK;
  if (node->op == EGI_OP_Transpose) EG_TRY(merge_transposes(state, id));
  if (node->op == EGI_OP_CastLike) EG_TRY(name_type(state, id));
  if (node->op == EGI_OP_Cast) merge_casts(state, id);
  if (node->op == EGI_OP_Mul || node->op == EGI_OP_Div) name_sign(state, id);
  if (node->op == EGI_OP_Concat) drop_empty_parts(state, id);
  if (node->op == EGI_OP_Add) join_sign(state, id);
  node = &graph->nodes[id];
  egi_value_id input = equal_input(graph, node), output = node->outputs[0];
  if (input == 0 || output == 0) return EG_OK;
  state->run->report->n_tried++;
  /* Identity of an absent type is still an identity: it may stand before inference. */
  if (node->op != EGI_OP_Identity && !is_same_type(graph, input, output)) return EG_OK;
  bool is_done = false;
  EG_TRY(egi_redirect_put(&state->redirect, output, input, &is_done));
  if (!is_done) return EG_OK;
  egi_graph_remove_node(graph, id);
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return EG_OK;
}

static eg_status visit_all(eliminator *state) {
  EG_TRY(egi_redirect_init(&state->redirect, state->graph));
  uint32_t n_nodes = state->graph->n_nodes;
  for (egi_node_id id = 1; id < n_nodes; id++) EG_TRY(visit(state, id));
  egi_redirect_apply(&state->redirect);
  return EG_OK;
}

eg_status egi_pass_eliminate_identity(egi_pass_run *run, egi_graph *graph) {
  eliminator state = {.run = run, .graph = graph};
  eg_status status = visit_all(&state);
  egi_redirect_free(&state.redirect);
  return status;
}
