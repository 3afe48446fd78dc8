/* Gradient rules of operators that move elements: layout, joining and cutting, indexing. */
#include "passes/passes.h"

static eg_status reshape_back(egi_gradient *gradient) {
  egi_value_id x = egi_gradient_input(gradient, 0);
  egi_gradient_set(gradient, 0, egi_gradient_reshaped(gradient, gradient->out_gradients[0], x));
  return EG_OK;
}

eg_status egi_gradient_reshape(egi_gradient *gradient) {
  return reshape_back(gradient);
}

eg_status egi_gradient_flatten(egi_gradient *gradient) {
  return reshape_back(gradient);
}

eg_status egi_gradient_squeeze(egi_gradient *gradient) {
  return reshape_back(gradient);
}

eg_status egi_gradient_unsqueeze(egi_gradient *gradient) {
  return reshape_back(gradient);
}

/* egi_gradient_set sums over what was broadcast. */
eg_status egi_gradient_expand(egi_gradient *gradient) {
  egi_gradient_set(gradient, 0, gradient->out_gradients[0]);
  return EG_OK;
}

eg_status egi_gradient_barrier(egi_gradient *gradient) {
  egi_gradient_set(gradient, 0, gradient->out_gradients[0]);
  return EG_OK;
}

eg_status egi_gradient_transpose(egi_gradient *gradient) {
  const egi_graph *graph = gradient->graph;
  int rank = graph->values[egi_gradient_input(gradient, 0)].rank;
  int64_t inverse[EGI_MAX_RANK] = {0};
  uint32_t count = 0;
  const int64_t *perm = egi_node_ints(&graph->nodes[gradient->node], "perm", &count);
  for (int i = 0; i < rank; i++) inverse[perm && count == (uint32_t)rank ? perm[i] : rank - 1 - i] = i;
  bool is_swap = rank >= 2 && inverse[rank - 1] == rank - 2 && inverse[rank - 2] == rank - 1;
  for (int i = 0; i < rank - 2; i++) is_swap = is_swap && inverse[i] == i;
  if (is_swap) {
    egi_gradient_set(gradient, 0, egi_gradient_swapped(gradient, gradient->out_gradients[0]));
    return EG_OK;
  }
  const egi_attribute attribute = egi_attribute_ints("perm", inverse, (uint32_t)rank);
  egi_gradient_set(gradient, 0, egi_emit(gradient->emit, EGI_OP_Transpose, gradient->out_gradients, 1, &attribute, 1));
  return EG_OK;
}

/* The same triangle of dy. */
eg_status egi_gradient_trilu(egi_gradient *gradient) {
  const egi_value_id inputs[2] = {gradient->out_gradients[0], egi_gradient_input(gradient, 1)};
  egi_value_id dx = 0;
  egi_gradient_emit(gradient, EGI_OP_Trilu, inputs, inputs[1] != 0 ? 2 : 1, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}

/* The sum the other way round. */
eg_status egi_gradient_cumsum(egi_gradient *gradient) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  const egi_attribute attributes[2] = {egi_attribute_int("exclusive", egi_node_int(node, "exclusive", 0)),
                                       egi_attribute_int("reverse", egi_node_int(node, "reverse", 0) == 0)};
  const egi_value_id inputs[2] = {gradient->out_gradients[0], egi_gradient_input(gradient, 1)};
  egi_gradient_set(gradient, 0, egi_emit(gradient->emit, EGI_OP_CumSum, inputs, 2, attributes, 2));
  return EG_OK;
}

/* ---- joining and cutting ---------------------------------------------------------------------------------------- */

enum { MAX_PIECES = 255 };

/* Sizes of the inputs along the axis, i64 [n]; known ones as constants. */
static egi_value_id piece_sizes(egi_gradient *gradient, unsigned n_pieces, int64_t axis) {
  const egi_attribute range[2] = {egi_attribute_int("start", axis), egi_attribute_int("end", axis + 1)};
  const egi_attribute along = egi_attribute_int("axis", 0);
  egi_graph *graph = gradient->graph;
  egi_value_id sizes[MAX_PIECES] = {0};
  int64_t numbers[MAX_PIECES] = {0};
  bool is_known = true;
  for (unsigned i = 0; i < n_pieces; i++) {
    const egi_value *piece = &graph->values[egi_gradient_input(gradient, i)];
    is_known = is_known && egi_dim_value(graph->module->dims, piece->dims[axis], &numbers[i]);
  }
  if (is_known) return egi_emit_integers(gradient->emit, numbers, n_pieces);
  for (unsigned i = 0; i < n_pieces; i++) {
    egi_value_id piece = egi_gradient_input(gradient, i);
    sizes[i] = egi_emit(gradient->emit, EGI_OP_Shape, &piece, 1, range, 2);
  }
  return egi_emit(gradient->emit, EGI_OP_Concat, sizes, n_pieces, &along, 1);
}

eg_status egi_gradient_concat(egi_gradient *gradient) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  unsigned n_pieces = node->n_inputs;
  int64_t axis = egi_node_int(node, "axis", 0);
  EG_TRY(egi_gradient_require(gradient, n_pieces <= MAX_PIECES, "too many pieces for a gradient"));
  egi_value_id pieces[MAX_PIECES] = {0};
  if (n_pieces == 1) {
    egi_gradient_set(gradient, 0, gradient->out_gradients[0]);
    return EG_OK;
  }
  if (axis < 0) axis += gradient->graph->values[node->outputs[0]].rank;
  const egi_value_id inputs[2] = {gradient->out_gradients[0], piece_sizes(gradient, n_pieces, axis)};
  const egi_attribute attribute = egi_attribute_int("axis", axis);
  egi_emit_many(gradient->emit, EGI_OP_Split, inputs, 2, &attribute, 1, pieces, n_pieces);
  for (unsigned i = 0; i < n_pieces; i++) egi_gradient_set(gradient, i, pieces[i]);
  return EG_OK;
}

eg_status egi_gradient_slice(egi_gradient *gradient) {
  egi_value_id inputs[6] = {egi_gradient_input(gradient, 0), gradient->out_gradients[0]}, dx = 0;
  unsigned n_inputs = 2;
  for (unsigned i = 1; i < 5; i++) inputs[i + 1] = egi_gradient_input(gradient, i);
  for (unsigned i = 2; i < 6; i++) n_inputs = inputs[i] != 0 ? i + 1 : n_inputs;
  egi_gradient_emit(gradient, EGI_OP_SliceGrad, inputs, n_inputs, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}

/* Pieces that nobody takes have a gradient of zeros. */
eg_status egi_gradient_split(egi_gradient *gradient) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  unsigned n_pieces = node->n_outputs;
  const egi_attribute attribute = egi_attribute_int("axis", egi_node_int(node, "axis", 0));
  egi_value_id pieces[MAX_PIECES] = {0};
  EG_TRY(egi_gradient_require(gradient, n_pieces <= MAX_PIECES, "too many pieces for a gradient"));
  for (unsigned i = 0; i < n_pieces; i++) {
    pieces[i] = gradient->out_gradients[i];
    if (pieces[i] != 0) continue;
    egi_value_id piece = egi_gradient_output(gradient, i);
    EG_TRY(egi_gradient_require(gradient, piece != 0, "a piece without a name has no gradient"));
    pieces[i] = egi_gradient_expanded(gradient, egi_gradient_number(gradient, 0.0, piece), piece);
  }
  egi_gradient_set(gradient, 0, egi_emit(gradient->emit, EGI_OP_Concat, pieces, n_pieces, &attribute, 1));
  return EG_OK;
}

/* ---- indexing --------------------------------------------------------------------------------------------------- */

static eg_status scatter_back(egi_gradient *gradient, egi_op op) {
  const egi_value_id inputs[3] = {egi_gradient_input(gradient, 0), egi_gradient_input(gradient, 1),
                                  gradient->out_gradients[0]};
  egi_value_id dx = 0;
  egi_gradient_emit(gradient, op, inputs, 3, &dx, 1);
  egi_gradient_set(gradient, 0, dx);
  return EG_OK;
}

eg_status egi_gradient_gather(egi_gradient *gradient) {
  return scatter_back(gradient, EGI_OP_GatherGrad);
}

eg_status egi_gradient_gather_elements(egi_gradient *gradient) {
  return scatter_back(gradient, EGI_OP_GatherElementsGrad);
}

eg_status egi_gradient_gather_nd(egi_gradient *gradient) {
  return scatter_back(gradient, EGI_OP_GatherNDGrad);
}

/* Updates read dy where they were written; the data's gradient is zero there, unless they were added. */
eg_status egi_gradient_scatter_nd(egi_gradient *gradient) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  const char *reduction = egi_node_string(node, "reduction", "none");
  bool is_plain = reduction[0] == 'n', is_sum = reduction[0] == 'a';
  EG_TRY(egi_gradient_require(gradient, is_plain || is_sum, "only reductions \"none\" and \"add\" have a gradient"));
  egi_emitter *emit = gradient->emit;
  egi_value_id dy = gradient->out_gradients[0], indices = egi_gradient_input(gradient, 1);
  egi_value_id updates = egi_gradient_input(gradient, 2);
  if (egi_gradient_wants(gradient, 2))
    egi_gradient_set(gradient, 2, egi_emit_binary(emit, EGI_OP_GatherND, dy, indices));
  if (egi_gradient_wants(gradient, 0) && is_plain) {
    egi_value_id zeros = egi_gradient_expanded(gradient, egi_gradient_number(gradient, 0.0, dy), updates);
    const egi_value_id inputs[3] = {dy, indices, zeros};
    dy = egi_emit(emit, EGI_OP_ScatterND, inputs, 3, NULL, 0);
  }
  egi_gradient_set(gradient, 0, dy);
  return EG_OK;
}
