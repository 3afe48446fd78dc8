/* Gradient rules of reductions: the gradient of the result is spread over the elements it came from. */
#include "passes/passes.h"

/* No axes and noop_with_empty_axes: nothing is reduced. */
static bool is_noop(const egi_gradient *gradient) {
  const egi_graph *graph = gradient->graph;
  egi_value_id axes = egi_gradient_input(gradient, 1);
  int64_t size = 1;
  bool is_empty = axes == 0;
  if (axes != 0 && graph->values[axes].rank == 1)
    is_empty = egi_dim_value(graph->module->dims, graph->values[axes].dims[0], &size) && size == 0;
  return is_empty && egi_node_int(&graph->nodes[gradient->node], "noop_with_empty_axes", 0) != 0;
}

/* A value of the result's shape with the reduced axes as dims of 1, so that it broadcasts to the input. */
static egi_value_id with_axes(egi_gradient *gradient, egi_value_id value) {
  const egi_graph *graph = gradient->graph;
  egi_value_id axes = egi_gradient_input(gradient, 1);
  bool keeps_dims = egi_node_int(&graph->nodes[gradient->node], "keepdims", 1) != 0;
  if (keeps_dims || axes == 0 || graph->values[value].rank == 0) return value;
  return egi_emit_binary(gradient->emit, EGI_OP_Unsqueeze, value, axes);
}

/* Elements for each result as a number of dy's type: known, or from the sizes at run time. */
static egi_value_id divided_by_count(egi_gradient *gradient, egi_value_id dy) {
  egi_graph *graph = gradient->graph;
  egi_emitter *emit = gradient->emit;
  egi_value_id x = egi_gradient_input(gradient, 0);
  int64_t total = 1, results = 1;
  bool is_known = true;
  for (int i = 0; i < graph->values[x].rank; i++) {
    int64_t dim = 0;
    is_known = is_known && egi_dim_value(graph->module->dims, graph->values[x].dims[i], &dim);
    total *= dim;
  }
  for (int i = 0; i < graph->values[dy].rank; i++) {
    int64_t dim = 0;
    is_known = is_known && egi_dim_value(graph->module->dims, graph->values[dy].dims[i], &dim);
    results *= dim;
  }
  if (is_known && results > 0 && total > 0) return egi_gradient_scaled(gradient, dy, (double)results / (double)total);
  egi_value_id count =
      egi_emit_binary(emit, EGI_OP_Div, egi_emit_unary(emit, EGI_OP_Size, x), egi_emit_unary(emit, EGI_OP_Size, dy));
  return egi_emit_binary(emit, EGI_OP_Div, dy, egi_emit_cast(emit, count, graph->values[dy].dtype));
}

/* Only one dim differs in the usual case: then the number of its elements is the known ratio. */
static egi_value_id mean_gradient(egi_gradient *gradient, egi_value_id dy) {
  const egi_graph *graph = gradient->graph;
  const egi_value *x = &graph->values[egi_gradient_input(gradient, 0)];
  int64_t axes[EGI_MAX_RANK], count = 1;
  uint32_t n_axes = 0;
  egi_value_id list = egi_gradient_input(gradient, 1);
  if (list == 0 || !egi_value_integers(graph, list, axes, EGI_MAX_RANK, &n_axes)) return divided_by_count(gradient, dy);
  for (uint32_t i = 0; i < n_axes; i++) {
    int64_t dim = 0, axis = axes[i] < 0 ? axes[i] + x->rank : axes[i];
    if (axis < 0 || axis >= x->rank || !egi_dim_value(graph->module->dims, x->dims[axis], &dim) || dim <= 0)
      return divided_by_count(gradient, dy);
    count *= dim;
  }
  return n_axes > 0 ? egi_gradient_scaled(gradient, dy, 1.0 / (double)count) : divided_by_count(gradient, dy);
}

eg_status egi_gradient_reduce_sum(egi_gradient *gradient) {
  egi_value_id dy = gradient->out_gradients[0], x = egi_gradient_input(gradient, 0);
  if (!is_noop(gradient)) dy = egi_gradient_expanded(gradient, with_axes(gradient, dy), x);
  egi_gradient_set(gradient, 0, dy);
  return EG_OK;
}

eg_status egi_gradient_reduce_mean(egi_gradient *gradient) {
  egi_value_id dy = gradient->out_gradients[0], x = egi_gradient_input(gradient, 0);
  if (!is_noop(gradient)) dy = egi_gradient_expanded(gradient, with_axes(gradient, mean_gradient(gradient, dy)), x);
  egi_gradient_set(gradient, 0, dy);
  return EG_OK;
}

/* Equal extrema share the gradient, as in PyTorch's amax and amin. */
static eg_status extremum(egi_gradient *gradient) {
  egi_emitter *emit = gradient->emit;
  egi_value_id x = egi_gradient_input(gradient, 0), dy = gradient->out_gradients[0];
  egi_value_id axes = egi_gradient_input(gradient, 1);
  if (is_noop(gradient)) {
    egi_gradient_set(gradient, 0, dy);
    return EG_OK;
  }
  egi_value_id is_largest =
      egi_emit_binary(emit, EGI_OP_Equal, x, with_axes(gradient, egi_gradient_output(gradient, 0)));
  egi_value_id ones = egi_emit_cast(emit, is_largest, gradient->graph->values[dy].dtype);
  const egi_value_id inputs[2] = {ones, axes};
  const egi_attribute keep = egi_attribute_int("keepdims", 1);
  egi_value_id count = egi_emit(emit, EGI_OP_ReduceSum, inputs, axes != 0 ? 2 : 1, &keep, 1);
  egi_value_id share = egi_emit_binary(emit, EGI_OP_Div, with_axes(gradient, dy), count);
  const egi_value_id choice[3] = {is_largest, share, egi_gradient_number(gradient, 0.0, dy)};
  egi_gradient_set(gradient, 0, egi_emit(emit, EGI_OP_Where, choice, 3, NULL, 0));
  return EG_OK;
}

eg_status egi_gradient_reduce_max(egi_gradient *gradient) {
  return extremum(gradient);
}

eg_status egi_gradient_reduce_min(egi_gradient *gradient) {
  return extremum(gradient);
}

/* dy · exp(x - y) */
eg_status egi_gradient_reduce_log_sum_exp(egi_gradient *gradient) {
  egi_emitter *emit = gradient->emit;
  egi_value_id dy = gradient->out_gradients[0], x = egi_gradient_input(gradient, 0);
  if (!is_noop(gradient)) {
    egi_value_id y = with_axes(gradient, egi_gradient_output(gradient, 0));
    egi_value_id share = egi_emit_unary(emit, EGI_OP_Exp, egi_emit_binary(emit, EGI_OP_Sub, x, y));
    dy = egi_emit_binary(emit, EGI_OP_Mul, with_axes(gradient, dy), share);
  }
  egi_gradient_set(gradient, 0, dy);
  return EG_OK;
}

/* dy · y / x. An element of 0 has none (NaN). */
eg_status egi_gradient_reduce_prod(egi_gradient *gradient) {
  egi_value_id dy = gradient->out_gradients[0], x = egi_gradient_input(gradient, 0);
  if (!is_noop(gradient)) {
    egi_value_id product = egi_emit_binary(gradient->emit, EGI_OP_Mul, dy, egi_gradient_output(gradient, 0));
    dy = egi_emit_binary(gradient->emit, EGI_OP_Div, with_axes(gradient, product), x);
  }
  egi_gradient_set(gradient, 0, dy);
  return EG_OK;
}

eg_status egi_gradient_sum_to(egi_gradient *gradient) {
  egi_value_id x = egi_gradient_input(gradient, 0);
  egi_gradient_set(gradient, 0, egi_gradient_expanded(gradient, gradient->out_gradients[0], x));
  return EG_OK;
}
