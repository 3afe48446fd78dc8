/* Operands of attention: through scales, transposes and repeated key heads (repeat_kv) down to the projection that they
 * come from. Every step is checked on shapes alone: reshapes keep the order of elements. Called by attention_match.c.
 */
#include <string.h>

#include "passes/attention_match.h"

egi_node_id egi_producer(const egi_graph *graph, egi_value_id value) {
  return value != 0 && graph->values[value].kind == EGI_VALUE_NODE ? graph->values[value].producer : 0;
}

bool egi_dims_agree(const egi_graph *graph, egi_dim a, egi_dim b) {
  egi_dims *dims = graph->module->dims;
  return a != EGI_DIM_NONE && egi_dim_resolve(dims, a) == egi_dim_resolve(dims, b);
}

bool egi_match_factor(const egi_graph *graph, egi_node_id id, egi_value_id *out_value, double *out_factor) {
  const egi_node *node = &graph->nodes[id];
  double number;
  if (node->op != EGI_OP_Mul && node->op != EGI_OP_Div) return false;
  for (unsigned i = 0; i < (node->op == EGI_OP_Mul ? 2u : 1u); i++) {
    egi_value_id constant = node->inputs[1 - i];
    if (!egi_value_scalar(graph, constant, &number) || number == 0) continue;
    if (graph->values[constant].rank > graph->values[node->inputs[i]].rank) continue;
    *out_value = node->inputs[i];
    *out_factor = node->op == EGI_OP_Mul ? number : 1 / number;
    return true;
  }
  return false;
}

/* ---- repeated heads --------------------------------------------------------------------------------------------- */

/* The dims of `big` are those of `small` with one of `size` put in at `axis`; NONE: any size. */
static bool has_inserted(const egi_graph *graph, const egi_value *small, const egi_value *big, int axis, int64_t size) {
  int64_t own;
  if (big->rank != small->rank + 1) return false;
  for (int i = 0; i < big->rank; i++)
    if (i != axis && !egi_dims_agree(graph, big->dims[i], small->dims[i - (i > axis)])) return false;
  egi_dims *dims = graph->module->dims;
  return egi_dim_value(dims, egi_dim_resolve(dims, big->dims[axis]), &own) && (size == 0 || own == size);
}

/* A tensor whose axis of size 1 is repeated by Expand, Tile or Concat: what it was before. */
static egi_value_id find_repeated(const egi_graph *graph, egi_value_id value, int axis) {
  egi_node_id id = egi_producer(graph, value);
  const egi_node *node = &graph->nodes[id];
  egi_dims *dims = graph->module->dims;
  int64_t size;
  if (id == 0 || (node->op != EGI_OP_Expand && node->op != EGI_OP_Tile && node->op != EGI_OP_Concat)) return 0;
  const egi_value *before = &graph->values[node->inputs[0]], *after = &graph->values[value];
  if (node->op == EGI_OP_Concat) {
    int64_t joined = egi_node_int(node, "axis", 0);
    if (joined != axis && joined != axis - after->rank) return 0;
    for (uint16_t i = 1; i < node->n_inputs; i++)
      if (node->inputs[i] != node->inputs[0]) return 0;
  }
  if (before->rank != after->rank) return 0;
  for (int i = 0; i < after->rank; i++)
    if (i != axis && !egi_dims_agree(graph, before->dims[i], after->dims[i])) return 0;
  if (!egi_dim_value(dims, egi_dim_resolve(dims, before->dims[axis]), &size) || size != 1) return 0;
  return node->inputs[0];
}

/* [.., kv heads, repeats, ..] reshaped to [.., heads, ..]: head h is key head h / repeats. */
static egi_value_id find_merged(const egi_graph *graph, const egi_node *node, const egi_value *merged, int axis) {
  const egi_value *split = &graph->values[node->inputs[0]];
  egi_dims *dims = graph->module->dims;
  if (split->rank != 5) return 0;
  for (int i = 0; i < 4; i++) {
    egi_dim own = split->dims[i + (i > axis)];
    if (i == axis) own = egi_dim_multiply(dims, split->dims[axis], split->dims[axis + 1]);
    if (!egi_dims_agree(graph, own, merged->dims[i])) return 0;
  }
  egi_value_id single = find_repeated(graph, node->inputs[0], axis + 1);
  egi_node_id inserting = egi_producer(graph, single);
  const egi_node *insert = &graph->nodes[inserting];
  if (inserting == 0 || (insert->op != EGI_OP_Unsqueeze && insert->op != EGI_OP_Reshape)) return 0;
  const egi_value *source = &graph->values[insert->inputs[0]];
  return has_inserted(graph, source, &graph->values[single], axis + 1, 1) ? insert->inputs[0] : 0;
}

/* Gather of heads 0, 0, 1, 1, ..: each as often as the others. */
static egi_value_id find_gathered(const egi_graph *graph, const egi_node *node, int axis) {
  int64_t indices[512], kv_heads, own_axis = egi_node_int(node, "axis", 0);
  uint32_t count = 0;
  egi_dims *dims = graph->module->dims;
  const egi_value *data = &graph->values[node->inputs[0]];
  if (data->rank != 4 || (own_axis != axis && own_axis != axis - 4)) return 0;
  if (graph->values[node->inputs[1]].rank != 1 ||
      !egi_value_integers(graph, node->inputs[1], indices, EGI_COUNT(indices), &count))
    return 0;
  if (!egi_dim_value(dims, egi_dim_resolve(dims, data->dims[axis]), &kv_heads) || kv_heads <= 0) return 0;
  if (count == 0 || count % kv_heads != 0) return 0;
  for (uint32_t i = 0; i < count; i++)
    if (indices[i] != i / (count / kv_heads)) return 0;
  return node->inputs[0];
}

static egi_value_id find_shared_heads(const egi_graph *graph, egi_node_id id, int axis) {
  const egi_node *node = &graph->nodes[id];
  const egi_value *value = &graph->values[node->outputs[0]];
  if (value->rank != 4) return 0;
  if (node->op == EGI_OP_Reshape) return find_merged(graph, node, value, axis);
  if (node->op == EGI_OP_Gather) return find_gathered(graph, node, axis);
  return find_repeated(graph, node->outputs[0], axis);
}

/* ---- transposes ------------------------------------------------------------------------------------------------- */

static bool read_axes(const egi_graph *graph, egi_node_id id, int rank, int64_t *axes) {
  uint32_t count = 0;
  const egi_node *node = &graph->nodes[id];
  const int64_t *list = egi_node_ints(node, "perm", &count);
  if (id == 0 || node->op != EGI_OP_Transpose || graph->values[node->outputs[0]].rank != rank) return false;
  for (int i = 0; i < rank; i++) axes[i] = list ? list[i] : rank - 1 - i;
  return !list || count == (uint32_t)rank;
}

/* The last two axes swapped on three axes, between reshapes: [b, h, s, d] -> [b·h, s, d] -> [b·h, d, s] -> [b, h, d,
 * s]. */
static egi_value_id find_swapped(const egi_graph *graph, const egi_node *node) {
  int64_t axes[3];
  if (node->op != EGI_OP_Reshape || graph->values[node->outputs[0]].rank != 4) return 0;
  egi_node_id turn = egi_producer(graph, node->inputs[0]);
  if (!read_axes(graph, turn, 3, axes) || axes[0] != 0 || axes[1] != 2) return 0;
  egi_node_id join = egi_producer(graph, graph->nodes[turn].inputs[0]);
  if (join == 0 || graph->nodes[join].op != EGI_OP_Reshape) return 0;
  const egi_value *source = &graph->values[graph->nodes[join].inputs[0]], *out = &graph->values[node->outputs[0]];
  const egi_value *joined = &graph->values[graph->nodes[join].outputs[0]];
  if (source->rank != 4) return 0;
  bool fits =
      egi_dims_agree(graph, source->dims[0], out->dims[0]) && egi_dims_agree(graph, source->dims[1], out->dims[1]) &&
      egi_dims_agree(graph, source->dims[2], out->dims[3]) && egi_dims_agree(graph, source->dims[3], out->dims[2]) &&
      egi_dims_agree(graph, source->dims[2], joined->dims[1]) &&
      egi_dims_agree(graph, source->dims[3], joined->dims[2]);
  return fits ? graph->nodes[join].inputs[0] : 0;
}

/* ---- batch and heads in one axis ------------------------------------------------------------------------------- */

egi_value_id egi_before_joining(const egi_graph *graph, egi_node_id id) {
  const egi_node *node = &graph->nodes[id];
  if (id == 0 || node->op != EGI_OP_Reshape) return 0;
  const egi_value *before = &graph->values[node->inputs[0]], *after = &graph->values[node->outputs[0]];
  if (before->rank + after->rank != 7 || (before->rank != 3 && after->rank != 3)) return 0;
  for (int i = 1; i <= 2; i++)
    if (!egi_dims_agree(graph, before->dims[before->rank - i], after->dims[after->rank - i])) return 0;
  return node->inputs[0];
}

bool egi_match_joined(const egi_graph *graph, egi_attention_operand *operand, double *factor) {
  bool is_swapped = operand->axes[2] == 3;
  egi_value_id value = operand->value, below;
  int64_t axes[3];
  double number;
  for (unsigned i = 0; i < 8; i++) {
    egi_node_id id = egi_producer(graph, value);
    if (id == 0) return false;
    if (factor && egi_match_factor(graph, id, &below, &number)) {
      value = below;
      *factor *= number;
    } else if (read_axes(graph, id, 3, axes) && axes[0] == 0) {
      is_swapped = is_swapped != (axes[1] == 2);
      value = graph->nodes[id].inputs[0];
    } else {
      below = egi_before_joining(graph, id);
      if (below == 0 || graph->values[below].rank != 4) return false;
      *operand = (egi_attention_operand){below, {0, 1, is_swapped ? 3 : 2, is_swapped ? 2 : 3}};
      return true;
    }
  }
  return false;
}

/* One node further down; false at the end. */
static bool step(const egi_graph *graph, egi_attention_operand *operand, double *factor, bool is_shared) {
  static const int64_t swapped[4] = {0, 1, 3, 2};
  egi_node_id id = egi_producer(graph, operand->value);
  const egi_node *node = &graph->nodes[id];
  int64_t axes[4], before[4];
  egi_value_id below;
  double number;
  if (id == 0) return false;
  memcpy(before, operand->axes, sizeof before);
  if (factor && egi_match_factor(graph, id, &below, &number)) {
    if (graph->values[below].rank != 4) return false;
    operand->value = below;
    *factor *= number;
    return true;
  }
  if (read_axes(graph, id, 4, axes)) {
    for (int i = 0; i < 4; i++) operand->axes[i] = axes[before[i]];
    operand->value = node->inputs[0];
    return true;
  }
  below = find_swapped(graph, node);
  if (below != 0) {
    for (int i = 0; i < 4; i++) operand->axes[i] = swapped[before[i]];
    operand->value = below;
    return true;
  }
  below = is_shared ? find_shared_heads(graph, id, (int)before[1]) : 0;
  if (below != 0) operand->value = below;
  return below != 0;
}

/* Ends: each step goes to an earlier node. */
void egi_match_operand(const egi_graph *graph, egi_attention_operand *operand, double *factor, bool is_shared) {
  for (unsigned i = 0; i < 16 && step(graph, operand, factor, is_shared); i++) continue;
}
