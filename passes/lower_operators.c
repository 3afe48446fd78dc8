/* Operators that are shorter said by others become those: the losses, Einsum, a few of language models and those of
 * com.microsoft have no rows in ops.def, so their kernels and gradients are those of the operators that they become.
 * Runs when a model is loaded, before unknown operators are refused; infers types on the way. Ends because rules emit
 * operators of ops.def only. */
#include <string.h>

#include "passes/lower.h"

/* Domains in which a rule's operator is met. */
enum { STANDARD = 1, MICROSOFT = 2 };

static const struct {
  const char *name;
  unsigned domains;
  uint16_t in_min, in_max, out_max;
  egi_lowering_rule rule;
} rules[] = {
    {"SoftmaxCrossEntropyLoss", STANDARD, 2, 3, 2, egi_lower_cross_entropy},
    {"NegativeLogLikelihoodLoss", STANDARD, 2, 3, 1, egi_lower_log_likelihood},
    {"Einsum", STANDARD, 1, UINT16_MAX, 1, egi_lower_einsum},
    {"DynamicQuantizeLinear", STANDARD, 1, 1, 3, egi_lower_dynamic_quantize},
    {"TensorScatter", STANDARD, 2, 3, 1, egi_lower_tensor_scatter},
    {"CausalConvWithState", STANDARD, 2, 4, 2, egi_lower_causal_convolution},
    {"SimplifiedLayerNormalization", STANDARD | MICROSOFT, 2, 2, 2, egi_lower_rms_normalization},
    {"SkipSimplifiedLayerNormalization", MICROSOFT, 3, 4, 4, egi_lower_skip_rms_normalization},
    {"SkipLayerNormalization", MICROSOFT, 3, 5, 4, egi_lower_skip_layer_normalization},
    {"Gelu", MICROSOFT, 1, 1, 1, egi_lower_gelu},
    {"FastGelu", MICROSOFT, 1, 2, 1, egi_lower_fast_gelu},
    {"BiasGelu", MICROSOFT, 2, 2, 1, egi_lower_bias_gelu},
    {"QuickGelu", MICROSOFT, 1, 1, 1, egi_lower_quick_gelu},
    {"BiasSplitGelu", MICROSOFT, 2, 2, 1, egi_lower_bias_split_gelu},
    {"FusedMatMul", MICROSOFT, 2, 2, 1, egi_lower_fused_matmul},
    {"TransposeMatMul", MICROSOFT, 2, 2, 1, egi_lower_fused_matmul},
    {"MatMulInteger", STANDARD, 2, 4, 1, egi_lower_matmul_integer},
    {"QuantizeLinear", MICROSOFT, 2, 3, 1, egi_lower_quantize_linear},
    {"DequantizeLinear", MICROSOFT, 2, 3, 1, egi_lower_dequantize_linear},
    {"MatMulNBits", MICROSOFT, 3, 6, 1, egi_lower_matmul_nbits},
    {"MatMulBnb4", MICROSOFT, 3, 3, 1, egi_lower_matmul_bnb4},
    {"GatherBlockQuantized", MICROSOFT, 3, 4, 1, egi_lower_gather_block_quantized},
    {"RotaryEmbedding", MICROSOFT, 4, 4, 1, egi_lower_rotary_embedding},
    {"GroupQueryAttention", MICROSOFT, 1, 16, 4, egi_lower_group_query_attention},
    {"MultiHeadAttention", MICROSOFT, 1, 10, 4, egi_lower_multi_head_attention},
    {"Attention", MICROSOFT, 2, 7, 2, egi_lower_merged_attention},
    {"MoE", MICROSOFT, 3, 8, 1, egi_lower_moe},
    {"QMoE", MICROSOFT, 3, 21, 1, egi_lower_quantised_moe},
};

/* ---- help for rules ------------------------------------------------------------------------------------------- */

egi_value_id egi_lowering_input(const egi_lowering *lowering, unsigned index) {
  return index < lowering->node->n_inputs ? lowering->node->inputs[index] : 0;
}

/* Exporters name results that nobody uses, too. */
bool egi_lowering_wants(const egi_lowering *lowering, unsigned output) {
  egi_value_id value = output < lowering->node->n_outputs ? lowering->node->outputs[output] : 0;
  if (value == 0) return false;
  bool is_used = lowering->uses->start[value + 1] > lowering->uses->start[value];
  return is_used || egi_graph_is_output(lowering->emit.graph, value);
}

const egi_value *egi_lowering_value(const egi_lowering *lowering, egi_value_id value) {
  return &lowering->emit.graph->values[value];
}

bool egi_lowering_size(const egi_lowering *lowering, egi_value_id value, int axis, int64_t *out_size) {
  egi_dims *dims = lowering->emit.graph->module->dims;
  return egi_dim_value(dims, egi_dim_resolve(dims, egi_lowering_value(lowering, value)->dims[axis]), out_size);
}

eg_status egi_lowering_fail(const egi_lowering *lowering, eg_status status, const char *reason) {
  const egi_node *node = lowering->node;
  const char *name = node->name;
  if (name[0] == '\0' && node->n_outputs > 0 && node->outputs[0] != 0)
    name = lowering->emit.graph->values[node->outputs[0]].name;
  return egi_fail(lowering->emit.graph->module->ctx, status, "node \"%s\" (%s): %s", name != NULL ? name : "",
                  node->op_name, reason);
}

egi_value_id egi_emit_axes(egi_emitter *emit, egi_op op, egi_value_id a, const int64_t *axes, uint32_t count) {
  return egi_emit_binary(emit, op, a, egi_emit_integers(emit, axes, count));
}

egi_value_id egi_emit_with_int(egi_emitter *emit, egi_op op, const egi_value_id *inputs, unsigned n_inputs,
                               const char *name, int64_t value) {
  const egi_attribute attribute = egi_attribute_int(name, value);
  return egi_emit(emit, op, inputs, n_inputs, &attribute, 1);
}

egi_value_id egi_emit_sizes(egi_emitter *emit, egi_value_id a, int start, int end) {
  const egi_attribute attributes[2] = {egi_attribute_int("start", start), egi_attribute_int("end", end)};
  return egi_emit(emit, EGI_OP_Shape, &a, 1, attributes, 2);
}

/* ---- the pass ------------------------------------------------------------------------------------------------- */

/* Index + 1, or 0. */
static size_t find_rule(const egi_node *node) {
  if (node->op != EGI_OP_UNKNOWN || node->domain == NULL) return 0;
  unsigned domain = node->domain[0] == '\0' ? STANDARD : strcmp(node->domain, "com.microsoft") == 0 ? MICROSOFT : 0;
  for (size_t i = 0; i < EGI_COUNT(rules) && domain != 0; i++)
    if ((rules[i].domains & domain) != 0 && strcmp(rules[i].name, node->op_name) == 0) return i + 1;
  return 0;
}

static eg_status check_operands(const egi_lowering *lowering, size_t rule) {
  const egi_node *node = lowering->node;
  if (node->n_inputs < rules[rule].in_min || node->n_inputs > rules[rule].in_max ||
      node->n_outputs > rules[rule].out_max || node->n_outputs == 0)
    return egi_lowering_fail(lowering, EG_ERROR_FORMAT, "wrong number of inputs or outputs");
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    const egi_value *value = egi_lowering_value(lowering, node->inputs[i]);
    if (node->inputs[i] == 0 && i < rules[rule].in_min)
      return egi_lowering_fail(lowering, EG_ERROR_FORMAT, "an input is missing");
    if (node->inputs[i] != 0 && (value->rank < 0 || value->dtype == EG_DTYPE_UNDEFINED))
      return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED,
                               "the type of an input is not known before the graph runs");
  }
  return EG_OK;
}

/* The value that a rule gave, under the output's name. */
static eg_status put_results(egi_lowering *lowering) {
  egi_graph *graph = lowering->emit.graph;
  for (uint16_t i = 0; i < lowering->node->n_outputs; i++) {
    egi_value_id output = lowering->node->outputs[i];
    egi_node_id id;
    if (!egi_lowering_wants(lowering, i)) continue;
    if (lowering->results[i] == 0)
      return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "one of its further outputs is used");
    egi_node identity = {.op = EGI_OP_Identity, .name = lowering->node->name, .scope = lowering->node->scope};
    if (i > 0 && identity.name[0] != '\0') /* node names of a file differ */
      identity.name = egi_arena_format(&graph->module->arena, "%s_%u", lowering->node->name, (unsigned)i);
    if (identity.name == NULL) return EG_ERROR_MEMORY;
    identity.inputs = &lowering->results[i];
    identity.outputs = &output;
    identity.n_inputs = identity.n_outputs = 1;
    EG_TRY(egi_graph_add_node(graph, &identity, &id));
    EG_TRY(egi_infer_node(graph, id));
  }
  return EG_OK;
}

static eg_status lower(egi_graph *graph, const egi_uses *uses, egi_node_id id, size_t rule) {
  egi_node node = graph->nodes[id]; /* its lists stay when it is gone */
  egi_lowering lowering = {.emit = {.graph = graph, .scope = node.scope}, .node = &node, .uses = uses};
  if (node.name == NULL) node.name = "";
  EG_TRY(check_operands(&lowering, rule));
  EG_TRY(rules[rule].rule(&lowering));
  EG_TRY(lowering.emit.status);
  egi_graph_remove_node(graph, id);
  return put_results(&lowering);
}

static bool has_rule(const egi_graph *graph) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    if (find_rule(&graph->nodes[id]) != 0) return true;
  return false;
}

/* After a fault upstream an operand may be of no known type: then nothing is said about the node. */
static bool is_known(const egi_graph *graph, const egi_node *node) {
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    const egi_value *value = &graph->values[node->inputs[i]];
    if (node->inputs[i] != 0 && (value->rank < 0 || value->dtype == EG_DTYPE_UNDEFINED)) return false;
  }
  return true;
}

/* Experts that cannot be read still give rows like those they take. */
static void guess_result(egi_graph *graph, egi_node_id id) {
  const egi_node *node = &graph->nodes[id];
  bool is_moe = node->op_name != NULL && (strcmp(node->op_name, "MoE") == 0 || strcmp(node->op_name, "QMoE") == 0);
  if (!is_moe || node->n_outputs == 0 || node->outputs[0] == 0 || node->inputs[0] == 0) return;
  egi_value *result = &graph->values[node->outputs[0]];
  const egi_value *rows = &graph->values[node->inputs[0]];
  if (result->rank >= 0) return;
  result->dtype = rows->dtype;
  result->rank = rows->rank;
  memcpy(result->dims, rows->dims, sizeof result->dims);
}

static eg_status lower_all(egi_pass_run *run, egi_graph *graph, egi_arena *arena, egi_findings *findings) {
  uint32_t n_nodes = graph->n_nodes;
  egi_uses uses;
  EG_TRY(egi_graph_uses(graph, arena, &uses));
  for (egi_node_id id = 1; id < n_nodes; id++) {
    size_t rule = find_rule(&graph->nodes[id]);
    if (rule != 0 && findings->count > 0 && !is_known(graph, &graph->nodes[id])) continue;
    eg_status status = rule == 0 ? egi_infer_node(graph, id) : lower(graph, &uses, id, rule - 1);
    if (status != EG_OK && !egi_findings_note(findings, status)) return status;
    if (status != EG_OK && rule != 0) guess_result(graph, id);
    if (status != EG_OK || rule == 0) continue;
    run->report->n_matched++;
    run->has_changed = true;
  }
  return EG_OK;
}

eg_status egi_pass_lower_operators(egi_pass_run *run, egi_graph *graph) {
  EG_TRY(egi_lower_sequences(run, graph));
  run->report->n_tried = graph->n_nodes - 1;
  if (!has_rule(graph)) return EG_OK;
  egi_arena arena;
  egi_arena_init(&arena, run->ctx, EGI_PURPOSE_GRAPH);
  egi_findings findings;
  const char *message = NULL;
  egi_findings_begin(&findings, run->ctx);
  eg_status status = lower_all(run, graph, &arena, &findings);
  if (findings.count > 0 && egi_has_pruned_head(graph, &arena, &message))
    egi_findings_add(&findings, EG_ERROR_UNSUPPORTED, message);
  eg_status found = egi_findings_end(&findings);
  egi_arena_clear(&arena);
  return status != EG_OK ? status : found;
}
