/* What the codes of quantised weights stand for, in float32: the body of the operator is run as far as its matrix. */
#include "graph/linear.h"
#include "graph/ragged.h"
#include "train/train.h"

#include <string.h>

/* ---- alone ---- */

/* The matrix that the graph multiplies with, below the transpose that the body puts before its product. */
static egi_value_id find_matrix(const egi_graph *graph, bool *out_is_transposed) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    if (graph->nodes[id].op != EGI_OP_MatMul) continue;
    egi_value_id matrix = graph->nodes[id].inputs[1];
    const egi_node *above = &graph->nodes[graph->values[matrix].producer];
    *out_is_transposed = graph->values[matrix].kind == EGI_VALUE_NODE && above->op == EGI_OP_Transpose;
    return *out_is_transposed ? above->inputs[0] : matrix;
  }
  return 0;
}

/* The operand in another graph: a weight, or one that was widened. */
static eg_status copy_operand(const egi_graph *graph, egi_node_id node, unsigned input, egi_graph *alone,
                              egi_value_id *out_value) {
  egi_value_id id = graph->nodes[node].inputs[input];
  const egi_node *above = &graph->nodes[graph->values[id].producer];
  bool is_cast = graph->values[id].kind == EGI_VALUE_NODE && above->op == EGI_OP_Cast;
  const egi_value *value = &graph->values[is_cast ? above->inputs[0] : id];
  egi_emitter emit = {.graph = alone};
  if (value->kind != EGI_VALUE_WEIGHT)
    return egi_fail_node(graph, node, EG_ERROR_UNSUPPORTED, "its weight is computed: it cannot be merged");
  EG_TRY(egi_graph_add_weight(alone, value->index, out_value));
  if (is_cast) *out_value = egi_emit_cast(&emit, *out_value, graph->values[id].dtype);
  return emit.status;
}

/* The input x, one row of `columns`. */
static eg_status add_row(egi_graph *alone, int64_t columns, egi_value_id *out_value) {
  egi_dims *dims = alone->module->dims;
  const egi_dim x_dims[2] = {egi_dim_constant(dims, 1), egi_dim_constant(dims, columns)};
  return egi_graph_add_input(alone, "x", EG_DTYPE_F32, 2, x_dims, out_value);
}

/* Zeros for an input: the matrix does not depend on it. */
static eg_status make_input(const egi_graph *alone, uint32_t input, egi_arena *arena, egi_tensor *out_tensor) {
  const egi_value *value = &alone->values[alone->inputs[input]];
  egi_tensor tensor = {.dtype = value->dtype, .rank = value->rank};
  uint64_t count = 1, size_bytes;
  for (int i = 0; i < value->rank; i++) {
    if (!egi_dim_value(alone->module->dims, value->dims[i], &tensor.dims[i])) return EG_ERROR_INTERNAL;
    count *= (uint64_t)tensor.dims[i];
  }
  if (!egi_dtype_bytes(value->dtype, count, &size_bytes)) return EG_ERROR_MEMORY;
  tensor.data = egi_arena_get(arena, 1, (size_t)size_bytes);
  egi_tensor_set_contiguous(&tensor);
  *out_tensor = tensor;
  return tensor.data != NULL ? EG_OK : EG_ERROR_MEMORY;
}

/* The only node of `alone` becomes its body, and that is run as far as the matrix. */
static eg_status run_alone(egi_graph *alone, egi_arena *arena, egi_tensor *out_matrix, bool *out_is_transposed) {
  static const char *const expand[] = {"expand_fused"}, *const clean[] = {"eliminate_dead"};
  static const egi_pipeline_options options;
  EG_TRY(egi_infer_graph(alone));
  EG_TRY(egi_passes_run(alone, expand, 1, &options, NULL));
  egi_value_id matrix = find_matrix(alone, out_is_transposed);
  if (matrix == 0) return egi_fail(arena->ctx, EG_ERROR_UNSUPPORTED, "a weight's storage cannot be merged");
  alone->n_outputs = 0;
  EG_TRY(egi_graph_add_output(alone, matrix));
  EG_TRY(egi_passes_run(alone, clean, 1, &options, NULL));
  egi_tensor *inputs = EGI_NEW(arena, egi_tensor, alone->n_inputs);
  if (inputs == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < alone->n_inputs; i++) EG_TRY(make_input(alone, i, arena, &inputs[i]));
  *out_matrix = (egi_tensor){0};
  return alone->module->evaluator->graph(arena->ctx, alone, inputs, arena, out_matrix);
}

/* ---- linear layers ---- */

/* A graph of the node without its bias. */
static eg_status isolate(const egi_graph *graph, const egi_linear *linear, egi_graph *alone) {
  const egi_node *node = &graph->nodes[linear->node];
  egi_node copy = *node;
  egi_value_id *inputs = EGI_NEW(&graph->module->arena, egi_value_id, node->n_inputs);
  egi_node_id added;
  if (inputs == NULL) return EG_ERROR_MEMORY;
  EG_TRY(add_row(alone, linear->in_features, &inputs[0]));
  for (unsigned i = 1; i < node->n_inputs; i++)
    if (node->inputs[i] != 0 && i != EGI_LINEAR_BIAS) EG_TRY(copy_operand(graph, linear->node, i, alone, &inputs[i]));
  copy.inputs = inputs;
  copy.outputs = NULL;
  copy.origin = NULL;
  EG_TRY(egi_graph_add_node(alone, &copy, &added));
  return egi_graph_add_output(alone, alone->nodes[added].outputs[0]);
}

eg_status egi_merge_decode(const egi_merge *merge, const egi_linear *linear, egi_arena *arena, float **out_values,
                           bool *out_is_out_first) {
  egi_graph *alone;
  egi_tensor matrix;
  EG_TRY(egi_graph_create(merge->module, "decode", &alone));
  EG_TRY(isolate(merge->graph, linear, alone));
  EG_TRY(run_alone(alone, arena, &matrix, out_is_out_first));
  *out_values = matrix.data;
  return EG_OK;
}

/* ---- experts ---- */

typedef struct decoder {
  egi_merge *merge;
  egi_node_id node; /* MoE */
  egi_moe moe;
  const egi_expert_parameter *experts; /* of the node: gate and up, down */
} decoder;

/* A graph of one RaggedLinear with the role's operands. */
static eg_status isolate_experts(const decoder *d, egi_moe_role role, int64_t columns, egi_graph *alone) {
  const egi_ragged ragged = egi_moe_projection(&d->moe, role, columns);
  const egi_dim ends = egi_dim_constant(alone->module->dims, d->moe.n_experts + 1);
  egi_value_id *inputs = EGI_NEW(&d->merge->arena, egi_value_id, (size_t)EGI_RAGGED_FIRST_ROLE + d->moe.n_inputs);
  unsigned n = EGI_RAGGED_FIRST_ROLE, n_attributes = 0;
  int64_t roles[EGI_RAGGED_ROLES] = {0};
  egi_attribute attributes[8];
  egi_node_id added;
  if (inputs == NULL) return EG_ERROR_MEMORY;
  EG_TRY(add_row(alone, columns, &inputs[EGI_RAGGED_X]));
  EG_TRY(egi_graph_add_input(alone, "offsets", EG_DTYPE_I32, 1, &ends, &inputs[EGI_RAGGED_OFFSETS]));
  for (unsigned i = 0; i < EGI_RAGGED_ROLES; i++) {
    if (i == EGI_RAGGED_BIAS) continue;
    roles[i] = ragged.counts[i];
    for (uint32_t k = 0; k < ragged.counts[i]; k++)
      EG_TRY(copy_operand(d->merge->graph, d->node, ragged.first[i] + k, alone, &inputs[n++]));
  }
  attributes[n_attributes++] = egi_attribute_int("experts", ragged.n_experts);
  attributes[n_attributes++] = egi_attribute_int("in_features", columns);
  attributes[n_attributes++] = egi_attribute_ints("roles", roles, EGI_RAGGED_ROLES);
  attributes[n_attributes++] = egi_attribute_string("storage", ragged.has_levels ? "bnb4" : "nbits");
  attributes[n_attributes++] = egi_attribute_int("bits", ragged.bits);
  attributes[n_attributes++] = egi_attribute_int("block_size", ragged.block_size);
  if (ragged.has_levels) attributes[n_attributes++] = egi_attribute_int("quant_type", ragged.quant_type);
  if (ragged.is_transposed) attributes[n_attributes++] = egi_attribute_int("transposed", 1);
  const egi_node node = {.op = EGI_OP_RaggedLinear,
                         .inputs = inputs,
                         .n_inputs = (uint16_t)n,
                         .attributes = attributes,
                         .n_attributes = (uint16_t)n_attributes,
                         .n_outputs = 1};
  EG_TRY(egi_graph_add_node(alone, &node, &added));
  return egi_graph_add_output(alone, alone->nodes[added].outputs[0]);
}

/* The role's matrices as a stack [E, N, K] in the graph. */
static eg_status decode_role(const decoder *d, egi_moe_role role, egi_value_id *out_value) {
  egi_module *module = d->merge->module;
  int64_t columns = d->experts[role == EGI_MOE_DOWN ? 1 : 0].in_features;
  egi_weight weight = {.dtype = EG_DTYPE_F32, .rank = 3, .bytes = {.kind = EGI_BYTES_MEMORY}};
  egi_emitter emit = {.graph = d->merge->graph, .scope = d->merge->graph->nodes[d->node].scope};
  eg_dtype dtype = emit.graph->values[emit.graph->nodes[d->node].inputs[EGI_MOE_X]].dtype;
  egi_graph *alone;
  egi_tensor stack;
  uint32_t index;
  bool is_turned; /* always: matrices are [N, K] */
  EG_TRY(egi_graph_create(module, "decode", &alone));
  EG_TRY(isolate_experts(d, role, columns, alone));
  EG_TRY(run_alone(alone, &module->arena, &stack, &is_turned));
  weight.name = egi_arena_format(&module->arena, "%s.decoded_%d", d->experts->module, (int)role);
  if (weight.name == NULL) return EG_ERROR_MEMORY;
  memcpy(weight.dims, stack.dims, 3 * sizeof *weight.dims);
  weight.bytes.data = stack.data;
  uint64_t count = (uint64_t)stack.dims[0] * (uint64_t)stack.dims[1] * (uint64_t)stack.dims[2];
  if (!egi_dtype_bytes(weight.dtype, count, &weight.bytes.size_bytes)) return EG_ERROR_MEMORY;
  EG_TRY(egi_module_add_weight(module, &weight, &index));
  EG_TRY(egi_graph_add_weight(d->merge->graph, index, out_value));
  if (dtype != EG_DTYPE_F32) *out_value = egi_emit_cast(&emit, *out_value, dtype);
  return emit.status;
}

/* The node takes stacks in the place of its matrices, and no scales. */
static eg_status put_stacks(const decoder *d, const egi_value_id stacks[3]) {
  static const char *const dropped[] = {"storage", "bits", "block_size", "quant_type", "roles", "transposed"};
  egi_graph *graph = d->merge->graph;
  egi_node *node = &graph->nodes[d->node];
  egi_value_id *inputs = EGI_NEW(&graph->module->arena, egi_value_id, (size_t)d->moe.n_inputs + 1);
  egi_attribute *kept = EGI_NEW(&graph->module->arena, egi_attribute, (size_t)node->n_attributes + 1);
  int64_t roles[EGI_MOE_ROLES] = {0};
  unsigned n = EGI_MOE_FIRST_ROLE;
  uint16_t n_kept = 0;
  if (inputs == NULL || kept == NULL) return EG_ERROR_MEMORY;
  for (unsigned i = 0; i < EGI_MOE_FIRST_ROLE && i < node->n_inputs; i++) inputs[i] = node->inputs[i];
  for (unsigned role = 0; role < EGI_MOE_ROLES; role++) {
    bool is_matrix = role <= EGI_MOE_DOWN && role % 2 == 0;
    if (role >= EGI_MOE_GATE_SCALES && role <= EGI_MOE_DOWN_ZEROS) continue;
    roles[role] = is_matrix && d->moe.counts[role] > 0 ? 1 : d->moe.counts[role];
    for (uint32_t k = 0; k < roles[role]; k++)
      inputs[n++] = is_matrix ? stacks[role / 2] : node->inputs[d->moe.first[role] + k];
  }
  for (unsigned i = 0; i < node->n_attributes; i++) {
    size_t k = 0;
    while (k < EGI_COUNT(dropped) && strcmp(node->attributes[i].name, dropped[k]) != 0) k++;
    if (k == EGI_COUNT(dropped)) kept[n_kept++] = node->attributes[i];
  }
  node->attributes = kept;
  node->n_attributes = n_kept;
  node->inputs = inputs;
  node->n_inputs = (uint16_t)n;
  const egi_attribute counts = egi_attribute_ints("roles", roles, EGI_MOE_ROLES);
  return egi_node_set_attribute(graph, d->node, &counts);
}

eg_status egi_merge_decode_experts(egi_merge *merge, const egi_expert_parameter *experts) {
  decoder d = {.merge = merge, .node = experts->node, .experts = experts};
  egi_value_id stacks[3] = {0};
  EG_TRY(egi_moe_read(merge->graph, d.node, &d.moe));
  if (!d.moe.is_quantised) return EG_OK;
  for (unsigned role = EGI_MOE_GATE; role <= EGI_MOE_DOWN; role += 2)
    if (d.moe.counts[role] > 0) EG_TRY(decode_role(&d, (egi_moe_role)role, &stacks[role / 2]));
  return put_stacks(&d, stacks);
}
