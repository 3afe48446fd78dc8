/* Gradient rules of matrix products. For y = a·b: da = dy·bᵀ, db = aᵀ·dy; transposes are views. A matrix b that meets a
 * batch of rows gets its gradient from one product over all rows. */
#include "graph/linear.h"
#include "passes/passes.h"

static egi_value_id product(egi_gradient *gradient, egi_value_id a, egi_value_id b) {
  return egi_emit_binary(gradient->emit, EGI_OP_MatMul, a, b);
}

/* All rows of [.., n] as [rows, n]. */
static egi_value_id flattened(egi_gradient *gradient, egi_value_id a) {
  int rank = gradient->graph->values[a].rank;
  if (gradient->emit->status != EG_OK || rank == 2) return a;
  const egi_attribute axis = egi_attribute_int("axis", rank - 1);
  return egi_emit(gradient->emit, EGI_OP_Flatten, &a, 1, &axis, 1);
}

static egi_value_id unsqueezed(egi_gradient *gradient, egi_value_id a, int64_t axis) {
  return egi_emit_binary(gradient->emit, EGI_OP_Unsqueeze, a, egi_emit_integers(gradient->emit, &axis, 1));
}

static bool is_transpose(const egi_graph *graph, egi_value_id a) {
  const egi_value *row = &graph->values[a];
  return row->kind == EGI_VALUE_NODE && graph->nodes[row->producer].op == EGI_OP_Transpose;
}

/* alpha · aᵀ·dy. For a b that is itself a transpose it is written as (dyᵀ·a)ᵀ, so that what lies below the transpose,
 * an adapter's A or B, gets its gradient without one. */
static egi_value_id second_factor(egi_gradient *gradient, egi_value_id a, egi_value_id b, egi_value_id dy,
                                  double alpha) {
  if (gradient->emit->status != EG_OK) return 0;
  if (!is_transpose(gradient->graph, b))
    return egi_gradient_scaled(gradient, product(gradient, egi_gradient_swapped(gradient, a), dy), alpha);
  egi_value_id mirrored = product(gradient, egi_gradient_swapped(gradient, dy), a);
  return egi_gradient_swapped(gradient, egi_gradient_scaled(gradient, mirrored, alpha));
}

/* A vector operand counts as a matrix with one row (a) or one column (b), and loses that dim afterwards. */
static void set_vector(egi_gradient *gradient, unsigned input, egi_value_id value, egi_value_id matrix) {
  if (gradient->emit->status != EG_OK) return;
  if (!egi_same_shape(gradient->graph, value, matrix))
    value = egi_emit_binary(gradient->emit, EGI_OP_SumTo, value, matrix);
  egi_gradient_set(gradient, input, egi_gradient_reshaped(gradient, value, egi_gradient_input(gradient, input)));
}

/* Gradients of the factors, at inputs `first` and `first` + 1, of alpha · a·b. */
static eg_status factor_gradients(egi_gradient *gradient, unsigned first, double alpha) {
  egi_graph *graph = gradient->graph;
  egi_value_id a = egi_gradient_input(gradient, first), b = egi_gradient_input(gradient, first + 1);
  egi_value_id dy = gradient->out_gradients[0];
  EG_TRY(egi_gradient_require(gradient, graph->values[a].rank > 0 && graph->values[b].rank > 0,
                              "a gradient needs operands of known rank"));
  bool is_row = graph->values[a].rank == 1, is_column = graph->values[b].rank == 1;
  if (is_column) {
    b = unsqueezed(gradient, b, 1);
    dy = unsqueezed(gradient, dy, -1);
  }
  if (is_row) {
    a = unsqueezed(gradient, a, 0);
    dy = unsqueezed(gradient, dy, -2);
  }
  EG_TRY(gradient->emit->status);
  if (egi_gradient_wants(gradient, first)) {
    egi_value_id da = egi_gradient_scaled(gradient, product(gradient, dy, egi_gradient_swapped(gradient, b)), alpha);
    if (is_row)
      set_vector(gradient, first, da, a);
    else
      egi_gradient_set(gradient, first, da);
  }
  if (egi_gradient_wants(gradient, first + 1)) {
    bool is_matrix = graph->values[b].rank == 2;
    egi_value_id left = is_matrix ? flattened(gradient, a) : a, right = is_matrix ? flattened(gradient, dy) : dy;
    egi_value_id db = second_factor(gradient, left, b, right, alpha);
    if (is_column)
      set_vector(gradient, first + 1, db, b);
    else
      egi_gradient_set(gradient, first + 1, db);
  }
  return EG_OK;
}

eg_status egi_gradient_matmul(egi_gradient *gradient) {
  return factor_gradients(gradient, 0, 1.0);
}

eg_status egi_gradient_add_matmul(egi_gradient *gradient) {
  float alpha = egi_node_float(&gradient->graph->nodes[gradient->node], "alpha", 1.0F);
  egi_gradient_set(gradient, 0, gradient->out_gradients[0]);
  return factor_gradients(gradient, 1, (double)alpha);
}

/* alpha · a'·b' + beta · c, where a' is a or its transpose, and b' likewise. */
eg_status egi_gradient_gemm(egi_gradient *gradient) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  bool is_a_transposed = egi_node_int(node, "transA", 0) != 0, is_b_transposed = egi_node_int(node, "transB", 0) != 0;
  double alpha = (double)egi_node_float(node, "alpha", 1.0F), beta = (double)egi_node_float(node, "beta", 1.0F);
  egi_value_id a = egi_gradient_input(gradient, 0), b = egi_gradient_input(gradient, 1),
               dy = gradient->out_gradients[0];
  if (egi_gradient_wants(gradient, 0)) {
    egi_value_id other = is_b_transposed ? b : egi_gradient_swapped(gradient, b); /* b'ᵀ */
    egi_value_id da = is_a_transposed
                          ? product(gradient, egi_gradient_swapped(gradient, other), egi_gradient_swapped(gradient, dy))
                          : product(gradient, dy, other);
    egi_gradient_set(gradient, 0, egi_gradient_scaled(gradient, da, alpha));
  }
  if (egi_gradient_wants(gradient, 1)) {
    egi_value_id other = is_a_transposed ? a : egi_gradient_swapped(gradient, a); /* a'ᵀ */
    egi_value_id db = is_b_transposed
                          ? product(gradient, egi_gradient_swapped(gradient, dy), egi_gradient_swapped(gradient, other))
                          : product(gradient, other, dy);
    egi_gradient_set(gradient, 1, egi_gradient_scaled(gradient, db, alpha));
  }
  if (!egi_gradient_wants(gradient, 2)) return EG_OK;
  egi_gradient_set(gradient, 2, dy);
  gradient->in_gradients[2] = egi_gradient_scaled(gradient, gradient->in_gradients[2], beta);
  return EG_OK;
}

/* ---- Linear ----------------------------------------------------------------------------------------------------- */

/* dX = dY·W; a stored matrix is read as it lies, its transpose needs none made. */
static egi_value_id linear_input_gradient(egi_gradient *gradient) {
  const egi_node *node = &gradient->graph->nodes[gradient->node];
  egi_value_id dy = gradient->out_gradients[0], results[1];
  if (egi_linear_storage_of(node) == EGI_LINEAR_PLAIN)
    return product(gradient, dy, egi_gradient_input(gradient, EGI_LINEAR_WEIGHT));
  egi_value_id inputs[EGI_LINEAR_INPUTS];
  for (unsigned i = 0; i < EGI_LINEAR_INPUTS; i++) inputs[i] = egi_gradient_input(gradient, i);
  inputs[EGI_LINEAR_X] = dy;
  inputs[EGI_LINEAR_BIAS] = 0;
  egi_gradient_emit(gradient, EGI_OP_LinearGrad, inputs, node->n_inputs, results, 1);
  return results[0];
}

/* y = x·Wᵀ + b: dX = dY·W, dW = dYᵀ·x, written as (xᵀ·dY)ᵀ for a W that is itself a transpose, db = the sum of dY. */
eg_status egi_gradient_linear(egi_gradient *gradient) {
  egi_value_id x = egi_gradient_input(gradient, EGI_LINEAR_X), dy = gradient->out_gradients[0];
  egi_value_id weight = egi_gradient_input(gradient, EGI_LINEAR_WEIGHT);
  if (egi_gradient_wants(gradient, EGI_LINEAR_X))
    egi_gradient_set(gradient, EGI_LINEAR_X, linear_input_gradient(gradient));
  if (egi_gradient_wants(gradient, EGI_LINEAR_BIAS)) egi_gradient_set(gradient, EGI_LINEAR_BIAS, dy);
  if (!egi_gradient_wants(gradient, EGI_LINEAR_WEIGHT)) return EG_OK;
  EG_TRY(egi_gradient_require(gradient, !egi_linear_is_quantised(&gradient->graph->nodes[gradient->node]),
                              "a quantised weight is frozen"));
  bool is_turned = gradient->emit->status == EG_OK && is_transpose(gradient->graph, weight);
  egi_value_id rows = flattened(gradient, x), up = flattened(gradient, dy);
  egi_value_id dw = is_turned ? product(gradient, egi_gradient_swapped(gradient, rows), up)
                              : product(gradient, egi_gradient_swapped(gradient, up), rows);
  egi_gradient_set(gradient, EGI_LINEAR_WEIGHT, is_turned ? egi_gradient_swapped(gradient, dw) : dw);
  return EG_OK;
}
