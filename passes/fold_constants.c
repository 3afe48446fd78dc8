/* Nodes whose inputs are all constants are evaluated once and become constants. Parameters stay what they are: layout
 * operators and casts of float tensors are left to the planner, which needs no copy for them, and so is arithmetic on
 * named weights; quantised matrices stay quantised. Results are bounded in size. Ends because each folded node goes and
 * none is added. */
#include <string.h>

#include "passes/passes.h"

enum { MAX_OPERANDS = 64 };
static const uint64_t max_result_bytes = 1u << 20;
static const uint64_t max_total_bytes = 64u << 20;

typedef struct folder {
  egi_pass_run *run;
  egi_graph *graph;
  egi_redirect redirect;
  uint64_t total_bytes; /* made by this run */
  bool has_new_sizes;   /* results of nodes behind have known shapes now */
} folder;

/* Float tensors of more than one element may be trained, so they are only folded where nothing is lost. */
static bool may_fold_float(const egi_graph *graph, const egi_node *node, egi_value_id input, int64_t count) {
  const egi_value *value = &graph->values[input];
  if (!egi_dtype_is_float(value->dtype) || count <= 1) return true;
  if ((egi_op_get(node->op)->flags & EGI_OP_VIEW) || node->op == EGI_OP_Cast) return false;
  return !egi_is_parameter_name(graph->module->weights[value->index].name);
}

/* The inputs as tensors; false when one is not constant or not to be touched. */
static bool collect_inputs(const egi_graph *graph, const egi_node *node, egi_tensor *inputs, uint64_t *out_bytes) {
  *out_bytes = 0;
  for (unsigned i = 0; i < node->n_inputs; i++) {
    inputs[i] = (egi_tensor){.dtype = EG_DTYPE_UNDEFINED};
    if (node->inputs[i] == 0) continue;
    if (!egi_value_constant(graph, node->inputs[i], &inputs[i])) return false;
    int64_t count = egi_tensor_count(&inputs[i]);
    if (!may_fold_float(graph, node, node->inputs[i], count)) return false;
    uint64_t size_bytes = 0;
    if (!egi_dtype_bytes(inputs[i].dtype, (uint64_t)count, &size_bytes)) return false;
    *out_bytes += size_bytes;
  }
  return true;
}

/* Bytes of all results; false when a size is not known. */
static bool measure_results(const egi_graph *graph, const egi_node *node, uint64_t *out_bytes) {
  *out_bytes = 0;
  for (unsigned i = 0; i < node->n_outputs; i++) {
    const egi_value *value = &graph->values[node->outputs[i]];
    uint64_t count = 1, size_bytes = 0;
    if (node->outputs[i] == 0) continue;
    if (value->rank < 0 || value->dtype == EG_DTYPE_UNDEFINED) return false;
    for (int d = 0; d < value->rank; d++) {
      int64_t dim = 0;
      if (!egi_dim_value(graph->module->dims, value->dims[d], &dim) || dim < 0) return false;
      if (dim != 0 && count > (UINT64_C(1) << 40) / (uint64_t)dim) return false;
      count *= (uint64_t)dim;
    }
    if (egi_dtype_bits(value->dtype) < 8 || !egi_dtype_bytes(value->dtype, count, &size_bytes)) return false;
    *out_bytes += size_bytes;
  }
  return true;
}

/* Operators whose results have the size that data decides: bounded by that of what they read. */
static bool is_measured(egi_op op) {
  return op == EGI_OP_NonZero || op == EGI_OP_Compress || op == EGI_OP_Unique;
}

static bool is_foldable(const egi_graph *graph, const egi_node *node) {
  if (node->op == EGI_OP_NONE || node->op == EGI_OP_UNKNOWN || node->op == EGI_OP_Barrier) return false;
  if (node->op == EGI_OP_Offload || node->op == EGI_OP_Reload || node->op == EGI_OP_Dropout) return false;
  if (node->n_inputs > MAX_OPERANDS || node->n_outputs > MAX_OPERANDS) return false;
  if (node->op == EGI_OP_DequantizeLinear && graph->values[node->inputs[0]].rank > 1) return false; /* stays small */
  if (egi_op_get(node->op)->flags & EGI_OP_EFFECT) return false;
  for (unsigned i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] != 0 && egi_graph_is_output(graph, node->outputs[i])) return false;
  }
  return true;
}

/* The result takes the place and the name of a node's output. */
static eg_status put_result(folder *state, egi_value_id output, const egi_tensor *tensor) {
  egi_graph *graph = state->graph;
  const char *name = egi_arena_format(&state->redirect.arena, "%s", graph->values[output].name);
  const char *old_name = egi_arena_format(&state->redirect.arena, "%s.folded", graph->values[output].name);
  if (!name || !old_name) return EG_ERROR_MEMORY;
  EG_TRY(egi_graph_rename_value(graph, output, old_name));
  egi_value_id constant = 0;
  bool is_done = false;
  EG_TRY(egi_add_constant(graph, name, tensor, &constant));
  return egi_redirect_put(&state->redirect, output, constant, &is_done);
}

static eg_status replace(folder *state, egi_node_id id, const egi_tensor *outputs) {
  egi_graph *graph = state->graph;
  const egi_node node = graph->nodes[id];
  for (unsigned i = 0; i < node.n_outputs; i++) {
    if (node.outputs[i] != 0) EG_TRY(put_result(state, node.outputs[i], &outputs[i]));
  }
  egi_graph_remove_node(graph, id);
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return EG_OK;
}

/* A tensor as attribute; numbers and lists are evaluated like any other node. */
static bool holds_tensor(const egi_node *node) {
  const egi_attribute *value = egi_node_attribute(node, "value");
  return node->op == EGI_OP_Constant && value && value->kind == EGI_ATTRIBUTE_TENSOR;
}

/* A Constant node that holds its result already. */
static eg_status fold_constant_node(folder *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  const egi_attribute *value = egi_node_attribute(&graph->nodes[id], "value");
  egi_value_id constant = 0;
  bool is_done = false;
  EG_TRY(egi_graph_add_weight(graph, value->u.weight, &constant));
  EG_TRY(egi_redirect_put(&state->redirect, graph->nodes[id].outputs[0], constant, &is_done));
  if (!is_done) return EG_OK;
  egi_graph_remove_node(graph, id);
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return EG_OK;
}

/* Stacks of matrices in MXFP4 become float weights that are decoded when they are loaded: nothing else can hold them.
 */
static eg_status fold_blocks(folder *state, egi_node_id id, bool *out_done) {
  enum { MX_BLOCK = 32 };
  egi_graph *graph = state->graph;
  egi_module *module = graph->module;
  const egi_node *node = &graph->nodes[id];
  *out_done = false;
  if (node->op != EGI_OP_DequantizeLinear || (node->n_inputs > 2 && node->inputs[2] != 0)) return EG_OK;
  const egi_value *codes = &graph->values[node->inputs[0]], *scales = &graph->values[node->inputs[1]];
  const egi_value *result = &graph->values[node->outputs[0]];
  int64_t axis = egi_node_int(node, "axis", 1);
  if (codes->kind != EGI_VALUE_WEIGHT || codes->dtype != EG_DTYPE_F4E2M1 || scales->kind != EGI_VALUE_WEIGHT ||
      scales->dtype != EG_DTYPE_F8E8M0 || egi_node_int(node, "block_size", 0) != MX_BLOCK)
    return EG_OK;
  const egi_weight *from = &module->weights[codes->index], *by = &module->weights[scales->index];
  if (from->rank != 3 || (axis != 2 && axis != -1) || from->dims[2] % MX_BLOCK != 0 ||
      from->bytes.kind != EGI_BYTES_MEMORY || by->bytes.kind != EGI_BYTES_MEMORY ||
      (result->dtype != EG_DTYPE_F32 && result->dtype != EG_DTYPE_BF16) || egi_graph_is_output(graph, node->outputs[0]))
    return EG_OK;
  egi_bytes_part *parts = EGI_NEW(&module->arena, egi_bytes_part, 2);
  egi_value_id constant = 0;
  uint32_t index = 0;
  egi_weight weight = *from;
  if (!parts) return EG_ERROR_MEMORY;
  parts[0].data = from->bytes.data;
  parts[1].data = by->bytes.data;
  weight.dtype = result->dtype;
  weight.bytes = (egi_bytes){.kind = EGI_BYTES_MXFP4, .parts = parts, .n_parts = 2};
  if (egi_has_suffix(weight.name, "_blocks"))
    weight.name = egi_arena_copy_text(&module->arena, weight.name, strlen(weight.name) - strlen("_blocks"));
  if (!weight.name) return EG_ERROR_MEMORY;
  EG_TRY(egi_module_add_weight(module, &weight, &index));
  EG_TRY(egi_graph_add_weight(graph, index, &constant));
  EG_TRY(egi_redirect_put(&state->redirect, graph->nodes[id].outputs[0], constant, out_done));
  if (!*out_done) return EG_OK;
  egi_graph_remove_node(graph, id);
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return EG_OK;
}

static eg_status fold_node(folder *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  const egi_evaluator *evaluator = graph->module->evaluator;
  egi_tensor inputs[MAX_OPERANDS], outputs[MAX_OPERANDS];
  uint64_t input_bytes = 0, result_bytes = 0;
  memset(outputs, 0, sizeof(outputs));
  egi_redirect_node(&state->redirect, id);
  bool is_done = false;
  EG_TRY(fold_blocks(state, id, &is_done));
  const egi_node *node = &graph->nodes[id];
  if (is_done || !is_foldable(graph, node)) return EG_OK;
  if (holds_tensor(node)) return fold_constant_node(state, id);
  state->run->report->n_tried++;
  if (state->has_new_sizes) EG_TRY(egi_infer_node(graph, id));
  node = &graph->nodes[id];
  if (!evaluator || !collect_inputs(graph, node, inputs, &input_bytes)) return EG_OK;
  bool is_sized_by_data = is_measured(node->op);
  if (is_sized_by_data)
    result_bytes = input_bytes * EGI_MAX_RANK * sizeof(int64_t); /* an index of each axis for an element of a byte */
  else if (!measure_results(graph, node, &result_bytes))
    return EG_OK;
  if (result_bytes > max_result_bytes && result_bytes > input_bytes) return EG_OK;
  if (state->total_bytes + result_bytes > max_total_bytes) return EG_OK;
  eg_status status = evaluator->node(state->run->ctx, graph, id, inputs, &graph->module->arena, outputs);
  if (status == EG_ERROR_MEMORY) return status;
  if (status != EG_OK) return EG_OK; /* the node stays, and whatever is wrong shows when it runs */
  state->total_bytes += result_bytes;
  state->has_new_sizes = state->has_new_sizes || is_sized_by_data;
  return replace(state, id, outputs);
}

static eg_status fold_all(folder *state) {
  egi_graph *graph = state->graph;
  EG_TRY(egi_redirect_init(&state->redirect, graph));
  uint32_t n_nodes = graph->n_nodes;
  for (egi_node_id id = 1; id < n_nodes; id++) EG_TRY(fold_node(state, id));
  egi_redirect_apply(&state->redirect);
  return EG_OK;
}

eg_status egi_pass_fold_constants(egi_pass_run *run, egi_graph *graph) {
  folder state = {.run = run, .graph = graph};
  eg_status status = fold_all(&state);
  egi_redirect_free(&state.redirect);
  if (status != EG_OK || !state.has_new_sizes) return status;
  EG_TRY(egi_graph_tidy(graph));
  return egi_infer_graph(graph);
}
