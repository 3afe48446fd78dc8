/* Help that several passes share: replacing values in one sweep, looking through layout nodes to a weight, constants.
 * Everything here is linear in the graph, or constant for one call. */
#include <string.h>

#include "passes/passes.h"

/* ---- redirects ------------------------------------------------------------------------------------------------- */

static eg_status grow_redirect(egi_redirect *redirect, uint32_t n_values) {
  if (n_values <= redirect->capacity) return EG_OK;
  uint32_t capacity = n_values + n_values / 2 + 16;
  egi_value_id *to = EGI_NEW(&redirect->arena, egi_value_id, capacity);
  bool *is_output = EGI_NEW(&redirect->arena, bool, capacity);
  if (!to || !is_output) return EG_ERROR_MEMORY;
  if (redirect->capacity > 0) {
    memcpy(to, redirect->to, redirect->capacity * sizeof(*to));
    memcpy(is_output, redirect->is_output, redirect->capacity * sizeof(*is_output));
  }
  redirect->to = to;
  redirect->is_output = is_output;
  redirect->capacity = capacity;
  return EG_OK;
}

eg_status egi_redirect_init(egi_redirect *redirect, egi_graph *graph) {
  *redirect = (egi_redirect){.graph = graph};
  egi_arena_init(&redirect->arena, graph->module->ctx, EGI_PURPOSE_GRAPH);
  EG_TRY(grow_redirect(redirect, graph->n_values));
  for (uint32_t i = 0; i < graph->n_outputs; i++) redirect->is_output[graph->outputs[i]] = true;
  return EG_OK;
}

void egi_redirect_free(egi_redirect *redirect) {
  if (redirect->graph) egi_arena_clear(&redirect->arena);
}

egi_value_id egi_redirect_get(const egi_redirect *redirect, egi_value_id value) {
  egi_value_id root = value;
  while (root < redirect->capacity && redirect->to[root] != 0) root = redirect->to[root];
  while (value < redirect->capacity && redirect->to[value] != 0) { /* path compression keeps chains short */
    egi_value_id next = redirect->to[value];
    redirect->to[value] = root;
    value = next;
  }
  return root;
}

void egi_redirect_node(const egi_redirect *redirect, egi_node_id id) {
  egi_node *node = &redirect->graph->nodes[id];
  for (unsigned i = 0; i < node->n_inputs; i++) node->inputs[i] = egi_redirect_get(redirect, node->inputs[i]);
}

/* The output's name passes on to `target`. */
static eg_status move_output_name(egi_redirect *redirect, egi_value_id value, egi_value_id target) {
  egi_graph *graph = redirect->graph;
  const char *name = graph->values[value].name;
  const char *old_name = egi_arena_format(&redirect->arena, "%s.replaced", name);
  const char *new_name = egi_arena_copy_text(&redirect->arena, name, strlen(name));
  if (!old_name || !new_name) return EG_ERROR_MEMORY;
  EG_TRY(egi_graph_rename_value(graph, value, old_name));
  EG_TRY(egi_graph_rename_value(graph, target, new_name));
  redirect->is_output[target] = true;
  return EG_OK;
}

eg_status egi_redirect_put(egi_redirect *redirect, egi_value_id value, egi_value_id target, bool *out_done) {
  egi_graph *graph = redirect->graph;
  EG_TRY(grow_redirect(redirect, graph->n_values));
  target = egi_redirect_get(redirect, target);
  *out_done = false;
  if (value == target) return EG_OK;
  if (redirect->is_output[value]) {
    if (redirect->is_output[target] || graph->values[target].kind != EGI_VALUE_NODE) return EG_OK;
    EG_TRY(move_output_name(redirect, value, target));
  }
  redirect->to[value] = target;
  redirect->n_redirected++;
  *out_done = true;
  return EG_OK;
}

void egi_redirect_apply(egi_redirect *redirect) {
  egi_graph *graph = redirect->graph;
  if (redirect->n_redirected == 0) return;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    if (graph->nodes[id].op != EGI_OP_NONE) egi_redirect_node(redirect, id);
  }
  for (uint32_t i = 0; i < graph->n_outputs; i++) graph->outputs[i] = egi_redirect_get(redirect, graph->outputs[i]);
}

/* ---- values ---------------------------------------------------------------------------------------------------- */

bool egi_same_shape(const egi_graph *graph, egi_value_id a, egi_value_id b) {
  const egi_value *first = &graph->values[a], *second = &graph->values[b];
  if (first->rank != second->rank || first->rank < 0) return false;
  egi_dims *dims = graph->module->dims;
  for (int i = 0; i < first->rank; i++) {
    egi_dim x = egi_dim_resolve(dims, first->dims[i]), y = egi_dim_resolve(dims, second->dims[i]);
    if (x == EGI_DIM_NONE || x != y) return false;
  }
  return true;
}

eg_status egi_add_constant(egi_graph *graph, const char *name, const egi_tensor *tensor, egi_value_id *out_value) {
  egi_weight weight = {.name = name, .dtype = tensor->dtype, .rank = tensor->rank};
  for (int i = 0; i < tensor->rank; i++) weight.dims[i] = tensor->dims[i];
  weight.bytes.kind = EGI_BYTES_MEMORY;
  weight.bytes.data = tensor->data;
  if (!egi_dtype_bytes(tensor->dtype, (uint64_t)egi_tensor_count(tensor), &weight.bytes.size_bytes))
    return egi_fail(graph->module->ctx, EG_ERROR_SHAPE, "constant %s is too large", name);
  uint32_t index = 0;
  EG_TRY(egi_module_add_weight(graph->module, &weight, &index));
  return egi_graph_add_weight(graph, index, out_value);
}

/* True for a transpose of the last two of two dims. */
static bool is_matrix_transpose(const egi_node *node) {
  uint32_t count = 0;
  const int64_t *perm = egi_node_ints(node, "perm", &count);
  return !perm || (count == 2 && perm[0] == 1 && perm[1] == 0);
}

/* True when the dims that are not 1 stand in the same order before and after: a matrix stays that matrix. */
static bool keeps_matrix(const egi_graph *graph, const egi_value *from, const egi_value *to) {
  const egi_dims *dims = graph->module->dims;
  int i = 0, j = 0;
  for (;;) {
    int64_t a = 1, b = 1;
    while (i < from->rank && (!egi_dim_value(dims, from->dims[i], &a) || a == 1)) i++;
    while (j < to->rank && (!egi_dim_value(dims, to->dims[j], &b) || b == 1)) j++;
    if (i >= from->rank || j >= to->rank) return i >= from->rank && j >= to->rank;
    if (a != b) return false;
    i++, j++;
  }
}

/* What stands below casts and layouts of a matrix; 0 when its elements are reordered. */
static egi_value_id matrix_below(const egi_graph *graph, egi_value_id value, bool *is_transposed) {
  while (value != 0 && graph->values[value].kind == EGI_VALUE_NODE) {
    const egi_value *row = &graph->values[value];
    const egi_node *node = &graph->nodes[row->producer];
    switch (node->op) {
    case EGI_OP_Cast:
    case EGI_OP_Identity:
    case EGI_OP_FakeQuantize:
      break;
    case EGI_OP_Reshape:
    case EGI_OP_Flatten:
    case EGI_OP_Squeeze:
    case EGI_OP_Unsqueeze:
      if (!keeps_matrix(graph, &graph->values[node->inputs[0]], row)) return 0;
      break;
    case EGI_OP_Transpose:
      if (row->rank != 2 || !is_matrix_transpose(node)) return 0;
      *is_transposed = !*is_transposed;
      break;
    default:
      return value;
    }
    value = node->inputs[0];
  }
  return value;
}

egi_value_id egi_weight_below(const egi_graph *graph, egi_value_id value, bool *is_transposed) {
  egi_value_id below = matrix_below(graph, value, is_transposed);
  return graph->values[below].kind == EGI_VALUE_WEIGHT ? below : 0;
}

egi_node_id egi_dequantised_below(const egi_graph *graph, egi_value_id value, bool *is_transposed) {
  egi_value_id below = matrix_below(graph, value, is_transposed);
  if (graph->values[below].kind != EGI_VALUE_NODE) return 0;
  const egi_node *node = &graph->nodes[graph->values[below].producer];
  if (node->op != EGI_OP_DequantizeLinear) return 0;
  const egi_value *codes = &graph->values[node->inputs[0]], *scales = &graph->values[node->inputs[1]];
  bool is_matrix = codes->rank == 2 && !egi_dtype_is_float(codes->dtype) && egi_dtype_bits(codes->dtype) <= 8;
  if (!is_matrix || codes->kind != EGI_VALUE_WEIGHT || scales->kind != EGI_VALUE_WEIGHT) return 0;
  bool has_zeros = node->n_inputs > 2 && node->inputs[2] != 0;
  if (has_zeros && graph->values[node->inputs[2]].kind != EGI_VALUE_WEIGHT) return 0;
  return graph->values[below].producer;
}

bool egi_is_parameter_name(const char *name) {
  bool has_dot = false, is_start = true;
  for (const char *c = name; *c; c++) {
    if (*c == '.') {
      if (is_start || !c[1]) return false;
      has_dot = is_start = true;
      continue;
    }
    bool is_word = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') || *c == '_';
    if (!is_word) return false;
    is_start = false;
  }
  return has_dot;
}
