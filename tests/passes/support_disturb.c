/* Changes to what a graph computes, small ones that a matcher might overlook: a number, an axis, an operator beside the
 * right one, operands the other way round, another value of the same shape. */
#include "support_respell.h"

#include <string.h>

enum { TRIES = 50 };

/* The node's input becomes a new constant of the same shape with one element changed. */
static bool change_constant(respeller *r, egi_node_id id) {
  egi_graph *graph = r->graph;
  const egi_node *node = &graph->nodes[id];
  egi_tensor tensor;
  egi_value_id changed = 0;
  if (node->n_inputs == 0) return false;
  unsigned index = (unsigned)respeller_random(r, node->n_inputs);
  if (node->inputs[index] == 0 || !egi_value_constant(graph, node->inputs[index], &tensor)) return false;
  int64_t count = egi_tensor_count(&tensor);
  size_t width = egi_dtype_bits(tensor.dtype) / 8;
  if (count == 0 || count > 64 || (tensor.dtype != EG_DTYPE_F32 && tensor.dtype != EG_DTYPE_I64)) return false;
  char *data = egi_arena_get(&graph->module->arena, (size_t)count, width);
  if (data == NULL) return false;
  memcpy(data, tensor.data, (size_t)count * width);
  size_t at = (size_t)respeller_random(r, (uint64_t)count) * width;
  float number = 0.0F;
  int64_t integer = 0;
  memcpy(&number, data + at, sizeof(number));
  memcpy(&integer, data + at, tensor.dtype == EG_DTYPE_I64 ? sizeof(integer) : 0);
  number = respeller_random(r, 2) ? number * 1.25F : -number;
  integer += respeller_random(r, 2) ? 1 : -1;
  memcpy(data + at, tensor.dtype == EG_DTYPE_I64 ? (const void *)&integer : (const void *)&number, width);
  tensor.data = data;
  if (egi_add_constant(graph, "changed", &tensor, &changed) != EG_OK) return false;
  graph->nodes[id].inputs[index] = changed;
  return true;
}

static bool change_operator(respeller *r, egi_node_id id) {
  static const egi_op siblings[][2] = {{EGI_OP_Less, EGI_OP_LessOrEqual},
                                       {EGI_OP_LessOrEqual, EGI_OP_Less},
                                       {EGI_OP_Greater, EGI_OP_Less},
                                       {EGI_OP_And, EGI_OP_Or},
                                       {EGI_OP_Or, EGI_OP_And},
                                       {EGI_OP_Add, EGI_OP_Sub},
                                       {EGI_OP_Sub, EGI_OP_Add},
                                       {EGI_OP_Mul, EGI_OP_Add},
                                       {EGI_OP_Div, EGI_OP_Mul},
                                       {EGI_OP_Sigmoid, EGI_OP_Tanh},
                                       {EGI_OP_Tanh, EGI_OP_Sigmoid},
                                       {EGI_OP_Sqrt, EGI_OP_Abs},
                                       {EGI_OP_ReduceMean, EGI_OP_ReduceMax},
                                       {EGI_OP_ReduceMean, EGI_OP_ReduceSum},
                                       {EGI_OP_Cos, EGI_OP_Sin},
                                       {EGI_OP_Sin, EGI_OP_Cos},
                                       {EGI_OP_Neg, EGI_OP_Abs},
                                       {EGI_OP_Erf, EGI_OP_Tanh},
                                       {EGI_OP_Reciprocal, EGI_OP_Sqrt}};
  size_t first = (size_t)respeller_random(r, EGI_COUNT(siblings));
  for (size_t i = 0; i < EGI_COUNT(siblings); i++) {
    const egi_op *pair = siblings[(first + i) % EGI_COUNT(siblings)];
    if (r->graph->nodes[id].op != pair[0]) continue;
    r->graph->nodes[id].op = pair[1];
    r->graph->nodes[id].op_name = NULL;
    return true;
  }
  return false;
}

static bool change_axis(respeller *r, egi_node_id id) {
  static const char *const names[] = {"axis", "keepdims", "is_causal", "upper"};
  for (size_t i = 0; i < EGI_COUNT(names); i++) {
    if (egi_node_attribute(&r->graph->nodes[id], names[i]) == NULL) continue;
    int64_t value = egi_node_int(&r->graph->nodes[id], names[i], 0);
    egi_attribute changed = egi_attribute_int(names[i], i == 0 ? value - 1 : !value);
    return egi_node_set_attribute(r->graph, id, &changed) == EG_OK;
  }
  return false;
}

static bool change_order(respeller *r, egi_node_id id) {
  uint32_t count = 0;
  int64_t order[EGI_MAX_RANK];
  const int64_t *perm = egi_node_ints(&r->graph->nodes[id], "perm", &count);
  if (perm == NULL || count < 2 || count > EGI_MAX_RANK) return false;
  memcpy(order, perm, count * sizeof(order[0]));
  uint32_t i = (uint32_t)respeller_random(r, count - 1);
  order[i] = perm[i + 1];
  order[i + 1] = perm[i];
  egi_attribute changed = egi_attribute_ints("perm", order, count);
  return egi_node_set_attribute(r->graph, id, &changed) == EG_OK;
}

static bool turn_operands(respeller *r, egi_node_id id) {
  egi_node *node = &r->graph->nodes[id];
  if (node->n_inputs < 2 || node->inputs[0] == 0) return false;
  unsigned other = 1 + (unsigned)respeller_random(r, node->n_inputs - 1u);
  egi_value_id first = node->inputs[0];
  if (node->inputs[other] == 0 || node->inputs[other] == first) return false;
  node->inputs[0] = node->inputs[other];
  node->inputs[other] = first;
  return true;
}

/* Another value of the same type and shape, made before the node. */
static bool change_source(respeller *r, egi_node_id id) {
  egi_graph *graph = r->graph;
  egi_node *node = &graph->nodes[id];
  if (node->n_inputs == 0) return false;
  unsigned index = (unsigned)respeller_random(r, node->n_inputs);
  egi_value_id old = node->inputs[index];
  for (unsigned i = 0; i < TRIES && old != 0; i++) {
    egi_value_id value = 1 + (egi_value_id)respeller_random(r, graph->n_values - 1);
    const egi_value *other = &graph->values[value];
    bool is_before = other->kind == EGI_VALUE_INPUT || (other->kind == EGI_VALUE_NODE && other->producer < id);
    if (value == old || !is_before || other->dtype != graph->values[old].dtype) continue;
    if (other->rank < 0 || !egi_same_shape(graph, value, old)) continue;
    node->inputs[index] = value;
    return true;
  }
  return false;
}

bool disturb(respeller *r, const char **out_name) {
  static const struct {
    const char *name;
    bool (*apply)(respeller *r, egi_node_id id);
  } kinds[] = {{"another number", change_constant}, {"another operator", change_operator},
               {"another axis", change_axis},       {"another order", change_order},
               {"operands turned", turn_operands},  {"another source", change_source}};
  size_t kind = (size_t)respeller_random(r, EGI_COUNT(kinds));
  bool is_done = false;
  *out_name = kinds[kind].name;
  for (unsigned i = 0; i < TRIES && !is_done; i++) {
    egi_node_id id = 1 + (egi_node_id)respeller_random(r, r->graph->n_nodes - 1);
    if (r->graph->nodes[id].op != EGI_OP_NONE) is_done = kinds[kind].apply(r, id);
  }
  if (!is_done) return false;
  egi_graph_forget_types(r->graph);
  return egi_graph_tidy(r->graph) == EG_OK && egi_infer_graph(r->graph) == EG_OK;
}
