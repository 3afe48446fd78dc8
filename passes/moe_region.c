/* Where a mixture of experts may be: from a TopK up to the router's linear layer and its input, down to where
 * everything that depends on the logits has come together again. */
#include <stdlib.h>
#include <string.h>

#include "passes/moe_match.h"

enum { MAX_STEPS = 256 };

static const egi_node *producer(const egi_graph *graph, egi_value_id value) {
  const egi_value *row = &graph->values[value];
  return value != 0 && row->kind == EGI_VALUE_NODE ? &graph->nodes[row->producer] : NULL;
}

static bool last_size(const egi_graph *graph, egi_value_id value, int64_t *out_size) {
  const egi_value *row = &graph->values[value];
  egi_dims *dims = graph->module->dims;
  return row->rank > 0 && egi_dim_value(dims, egi_dim_resolve(dims, row->dims[row->rank - 1]), out_size);
}

static bool is_linear(const egi_graph *graph, const egi_node *node) {
  bool is_transposed = false;
  if (node->op != EGI_OP_MatMul && node->op != EGI_OP_Gemm && node->op != EGI_OP_Linear) return false;
  return egi_weight_below(graph, node->inputs[1], &is_transposed) != 0 || node->op == EGI_OP_Linear;
}

/* ---- the router ----------------------------------------------------------------------------------------------- */

/* A bias behind the layer belongs to it. */
static egi_value_id with_bias(const egi_moe_region *region, egi_value_id logits) {
  const egi_graph *graph = region->graph;
  const egi_uses *uses = region->uses;
  bool is_transposed = false;
  if (uses->start[logits + 1] - uses->start[logits] != 1) return logits;
  const egi_node *add = &graph->nodes[uses->list[uses->start[logits]]];
  if (add->op != EGI_OP_Add) return logits;
  egi_value_id other = add->inputs[add->inputs[0] == logits ? 1 : 0];
  return egi_weight_below(graph, other, &is_transposed) != 0 ? add->outputs[0] : logits;
}

static egi_value_id source_of_rows(const egi_graph *graph, egi_value_id value) {
  for (const egi_node *node = producer(graph, value); node != NULL; node = producer(graph, value)) {
    bool keeps_rows = node->op == EGI_OP_Reshape || node->op == EGI_OP_Cast || node->op == EGI_OP_Identity ||
                      node->op == EGI_OP_Squeeze || node->op == EGI_OP_Unsqueeze || node->op == EGI_OP_Flatten;
    int64_t before = 0, after = 0;
    if (!keeps_rows || !last_size(graph, value, &after) || !last_size(graph, node->inputs[0], &before)) break;
    if (before != after) break;
    value = node->inputs[0];
  }
  return value;
}

/* Upwards from the choice to the one linear layer that it depends on. */
static egi_node_id find_linear(egi_moe_region *region, egi_value_id from) {
  const egi_graph *graph = region->graph;
  egi_value_id pending[MAX_STEPS];
  unsigned n_pending = 0, n_seen = 0;
  egi_node_id found = 0;
  pending[n_pending++] = from;
  while (n_pending > 0) {
    egi_value_id value = pending[--n_pending];
    const egi_node *node = producer(graph, value);
    if (node == NULL || !(egi_dtype_is_float(graph->values[value].dtype))) continue;
    if (is_linear(graph, node)) {
      egi_node_id id = graph->values[value].producer;
      if (found != 0 && found != id) return 0;
      found = id;
      continue;
    }
    if (++n_seen > MAX_STEPS / 4) return 0;
    for (unsigned i = 0; i < node->n_inputs && n_pending < MAX_STEPS; i++)
      if (node->inputs[i] != 0) pending[n_pending++] = node->inputs[i];
  }
  return found;
}

bool egi_moe_find_router(egi_moe_region *region, egi_node_id top_k) {
  const egi_graph *graph = region->graph;
  const egi_node *node = &graph->nodes[top_k];
  if (!egi_dtype_is_float(graph->values[node->inputs[0]].dtype)) return false;
  region->router = find_linear(region, node->inputs[0]);
  if (region->router == 0) return egi_moe_reject(region, top_k, "no linear layer gives what it chooses from");
  region->logits = with_bias(region, graph->nodes[region->router].outputs[0]);
  region->x = source_of_rows(graph, graph->nodes[region->router].inputs[0]);
  if (!last_size(graph, region->logits, &region->n_experts) || region->n_experts < 2)
    return egi_moe_reject(region, top_k, "the number of experts is not known");
  return last_size(graph, region->x, &region->width) || egi_moe_reject(region, top_k, "the hidden size is not known");
}

/* ---- the exit ------------------------------------------------------------------------------------------------- */

static uint32_t count_uses(const egi_moe_region *region, egi_value_id value) {
  return value == 0 ? 0 : region->uses->start[value + 1] - region->uses->start[value];
}

static bool is_tainted(const egi_moe_region *region, const bool *tainted, egi_value_id value) {
  return value != 0 && value < region->graph->n_values && tainted[value];
}

/* Elements of a value; EGI_DIM_NONE where not known. */
static egi_dim size_of(const egi_graph *graph, egi_value_id value) {
  egi_dims *dims = graph->module->dims;
  egi_dim size = egi_dim_constant(dims, 1);
  for (int i = 0; i < graph->values[value].rank; i++)
    size = egi_dim_multiply(dims, size, egi_dim_resolve(dims, graph->values[value].dims[i]));
  return egi_dim_resolve(dims, size);
}

bool egi_moe_next_exit(egi_moe_region *region) {
  const egi_graph *graph = region->graph;
  bool *tainted = EGI_NEW(region->arena, bool, graph->n_values);
  if (tainted == NULL) return egi_moe_reject(region, 0, "out of memory");
  uint64_t open = count_uses(region, region->logits);
  bool has_choice = false, is_past = region->exit == 0;
  tainted[region->logits] = true;
  region->is_scored_first = false;
  for (egi_node_id id = graph->values[region->logits].producer + 1; id < graph->n_nodes && open > 0; id++) {
    const egi_node *node = &graph->nodes[id];
    uint32_t n_taken = 0;
    for (unsigned i = 0; i < node->n_inputs; i++) n_taken += is_tainted(region, tainted, node->inputs[i]);
    if (node->op == EGI_OP_NONE || n_taken == 0) continue;
    open -= n_taken;
    for (unsigned i = 0; i < node->n_outputs; i++) {
      if (node->outputs[i] == 0) continue;
      tainted[node->outputs[i]] = true;
      open += count_uses(region, node->outputs[i]);
    }
    if (node->op == EGI_OP_TopK) {
      has_choice = true;
      region->last_choice = id;
    }
    if (!has_choice && (node->op == EGI_OP_Softmax || node->op == EGI_OP_Sigmoid)) region->is_scored_first = true;
    egi_value_id value = node->outputs[0];
    int64_t size = 0;
    if (value == 0 || !has_choice || open != count_uses(region, value)) continue;
    if (!is_past) {
      is_past = value == region->exit;
      continue;
    }
    if (!egi_dtype_is_float(graph->values[value].dtype) || !last_size(graph, value, &size) || size != region->width)
      continue;
    if (size_of(graph, value) != size_of(graph, region->x)) continue; /* rows of pairs, not of tokens */
    region->exit = value;
    return true;
  }
  return egi_moe_reject(region, region->last_choice, "what comes from the choice does not meet in one hidden value");
}

/* ---- the nodes ------------------------------------------------------------------------------------------------ */

static int by_number(const void *a, const void *b) {
  egi_node_id x = *(const egi_node_id *)a, y = *(const egi_node_id *)b;
  return (x > y) - (x < y);
}

/* Content that shape inference knows, with the sample's sizes. */
static bool set_known(egi_moe_region *region, egi_value_id id) {
  const egi_value *value = &region->graph->values[id];
  bool is_wide = value->dtype == EG_DTYPE_I64;
  if (value->elements == NULL || (!is_wide && value->dtype != EG_DTYPE_I32) || value->rank > 1) return false;
  int64_t *data = EGI_NEW(region->arena, int64_t, (size_t)value->n_elements + 1);
  if (data == NULL) return false;
  for (uint32_t i = 0; i < value->n_elements; i++) {
    int64_t number = 0;
    if (!egi_dim_evaluate(region->graph->module->dims, value->elements[i], region->bindings, region->n_bindings,
                          &number))
      return false;
    if (is_wide)
      data[i] = number;
    else
      ((int32_t *)(void *)data)[i] = (int32_t)number;
  }
  egi_moe_value *sample = egi_moe_touch(region, id);
  if (sample == NULL) return false;
  sample->tensor = (egi_tensor){.data = data, .dtype = value->dtype, .rank = value->rank, .dims = {value->n_elements}};
  egi_tensor_set_contiguous(&sample->tensor);
  sample->is_computed = true;
  return true;
}

static bool is_given(const egi_moe_region *region, egi_value_id id) {
  return id == 0 || id == region->x || id == region->logits || region->graph->values[id].kind == EGI_VALUE_WEIGHT;
}

static bool add_node(egi_moe_region *region, egi_node_id id, bool *is_marked) {
  if (is_marked[id]) return true;
  is_marked[id] = true;
  if (EGI_GROW(region->arena, &region->nodes, region->n_nodes, &region->nodes_capacity) != EG_OK) return false;
  region->nodes[region->n_nodes++] = id;
  return true;
}

bool egi_moe_collect(egi_moe_region *region) {
  const egi_graph *graph = region->graph;
  bool *is_marked = EGI_NEW(region->arena, bool, graph->n_nodes);
  region->n_nodes = 0;
  if (is_marked == NULL || !add_node(region, graph->values[region->exit].producer, is_marked))
    return egi_moe_reject(region, 0, "out of memory");
  for (uint32_t at = 0; at < region->n_nodes; at++) {
    const egi_node *node = &graph->nodes[region->nodes[at]];
    for (unsigned i = 0; i < node->n_inputs; i++) {
      egi_value_id input = node->inputs[i];
      if (is_given(region, input)) continue;
      if (region->values[input].is_computed || set_known(region, input)) continue;
      if (graph->values[input].kind != EGI_VALUE_NODE)
        return egi_moe_reject(region, region->nodes[at], "it depends on more than hidden states and router logits");
      if (!add_node(region, graph->values[input].producer, is_marked))
        return egi_moe_reject(region, 0, "out of memory");
    }
  }
  qsort(region->nodes, region->n_nodes, sizeof(*region->nodes), by_number);
  return true;
}
