/* Where the nodes of a graph take parameters of the model, and its ends: token ids, logits, head. Called by the passes
 * that name, adapt and train. One sweep in execution order. */
#include <string.h>

#include "graph/linear.h"
#include "graph/moe.h"
#include "passes/passes.h"

typedef struct finder {
  const egi_graph *graph;
  egi_arena *arena;
  bool *is_hidden; /* by value: computed from embedded tokens, or a float input */
  egi_operand *list;
  uint32_t count, capacity;
} finder;

static const egi_weight *weight_row(const egi_graph *graph, egi_value_id value) {
  return &graph->module->weights[graph->values[value].index];
}

/* Tables of sines and cosines are gathered by position like embeddings, but nobody trains them. */
static bool is_rotary_table(const char *name) {
  const char *leaf = strrchr(name, '.');
  const char *slash = strrchr(name, '/');
  leaf = leaf ? leaf + 1 : name;
  if (slash && slash + 1 > leaf) leaf = slash + 1;
  return egi_has_prefix(leaf, "cos") || egi_has_prefix(leaf, "sin") || strstr(leaf, "cos_") || strstr(leaf, "sin_");
}

static bool is_small_integer(eg_dtype dtype) {
  egi_dtype_class kind = egi_dtype_kind(dtype);
  return (kind == EGI_CLASS_INTEGER || kind == EGI_CLASS_UNSIGNED) && egi_dtype_bits(dtype) <= 8;
}

/* Elements along the last axis when all other dims are 1 and there is more than one element, else 0. */
static int64_t vector_length(const egi_graph *graph, egi_value_id value) {
  const egi_value *row = &graph->values[value];
  int64_t length = 0;
  for (int i = 0; i < row->rank; i++) {
    int64_t dim = 0;
    if (!egi_dim_value(graph->module->dims, row->dims[i], &dim)) return 0;
    if (i < row->rank - 1 ? dim != 1 : dim <= 1) return 0;
    length = dim;
  }
  return length;
}

static int64_t last_dim(const egi_graph *graph, egi_value_id value) {
  const egi_value *row = &graph->values[value];
  int64_t dim = 0;
  return row->rank > 0 && egi_dim_value(graph->module->dims, row->dims[row->rank - 1], &dim) ? dim : -1;
}

static eg_status add_operand(finder *state, egi_node_id id, unsigned input, egi_operand_role role, bool is_transposed) {
  const egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[id];
  if (input >= node->n_inputs) return EG_OK;
  egi_value_id weight = egi_weight_below(graph, node->inputs[input], &is_transposed);
  if (weight == 0 || !egi_dtype_is_float(graph->values[weight].dtype)) return EG_OK;
  if (egi_has_prefix(weight_row(graph, weight)->name, EGI_WEIGHT_ONES)) return EG_OK;
  int rank = graph->values[weight].rank;
  if (rank < 1 || ((role == EGI_ROLE_MATRIX || role == EGI_ROLE_TABLE) && rank < 2)) return EG_OK;
  EG_TRY(EGI_GROW(state->arena, &state->list, state->count, &state->capacity));
  state->list[state->count++] =
      (egi_operand){.node = id, .input = input, .weight = weight, .role = role, .is_transposed = is_transposed};
  return EG_OK;
}

/* The codes of a quantised matrix below a MatMul or Gemm. */
static eg_status add_codes(finder *state, egi_node_id id, unsigned input, bool is_transposed) {
  const egi_graph *graph = state->graph;
  egi_node_id below = egi_dequantised_below(graph, graph->nodes[id].inputs[input], &is_transposed);
  if (below == 0) return EG_OK;
  EG_TRY(EGI_GROW(state->arena, &state->list, state->count, &state->capacity));
  state->list[state->count++] = (egi_operand){.node = id,
                                              .input = input,
                                              .weight = graph->nodes[below].inputs[0],
                                              .role = EGI_ROLE_QUANTISED,
                                              .is_transposed = is_transposed};
  return EG_OK;
}

static eg_status add_quantised(finder *state, egi_node_id id, unsigned input) {
  egi_value_id weight = state->graph->nodes[id].inputs[input];
  if (state->graph->values[weight].kind != EGI_VALUE_WEIGHT) return EG_OK;
  EG_TRY(EGI_GROW(state->arena, &state->list, state->count, &state->capacity));
  state->list[state->count++] = (egi_operand){id, input, weight, EGI_ROLE_QUANTISED, true};
  return EG_OK;
}

/* Of a Linear, whose own form is [out, in]. */
static eg_status add_linear(finder *state, egi_node_id id) {
  if (egi_linear_is_quantised(&state->graph->nodes[id]))
    EG_TRY(add_quantised(state, id, EGI_LINEAR_WEIGHT));
  else
    EG_TRY(add_operand(state, id, EGI_LINEAR_WEIGHT, EGI_ROLE_MATRIX, true));
  return add_operand(state, id, EGI_LINEAR_BIAS, EGI_ROLE_BIAS, false);
}

static bool is_scalar_constant(const egi_graph *graph, egi_value_id value) {
  double ignored = 0.0;
  return egi_value_scalar(graph, value, &ignored);
}

/* A parameter of its own, not a vector, that scales the last dims of a hidden value: a norm with a row for each head.
 * Tables that the exporter folded have no parameter's name. */
static bool is_scale_of_heads(const finder *state, egi_value_id scale, egi_value_id other) {
  const egi_graph *graph = state->graph;
  const egi_value *a = &graph->values[scale], *b = &graph->values[other];
  egi_dims *dims = graph->module->dims;
  int64_t size = 0;
  if (a->kind != EGI_VALUE_WEIGHT || a->rank < 2 || a->rank >= b->rank || !state->is_hidden[other]) return false;
  const char *name = weight_row(graph, scale)->name;
  if (!egi_is_parameter_name(name) || is_rotary_table(name)) return false;
  for (int i = 0; i < a->rank; i++) {
    egi_dim expected = egi_dim_resolve(dims, b->dims[b->rank - a->rank + i]);
    if (!egi_dim_value(dims, expected, &size) || egi_dim_resolve(dims, a->dims[i]) != expected) return false;
  }
  return true;
}

/* x · scale and x + bias with a vector along the last axis of a hidden value; 1 + scale as some norms write it. */
static eg_status add_vector_operand(finder *state, egi_node_id id) {
  const egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[id];
  for (unsigned i = 0; i < 2; i++) {
    egi_value_id vector = node->inputs[i], other = node->inputs[1 - i];
    bool is_transposed = false;
    int64_t length = vector_length(graph, vector);
    if (node->op == EGI_OP_Mul && is_scale_of_heads(state, vector, other))
      return add_operand(state, id, i, EGI_ROLE_SCALE, false);
    if (length == 0 || egi_weight_below(graph, vector, &is_transposed) == 0) continue;
    if (node->op == EGI_OP_Add && is_scalar_constant(graph, other)) return add_operand(state, id, i, EGI_ROLE_SCALE, 0);
    if (!state->is_hidden[other] || last_dim(graph, other) != length) continue;
    return add_operand(state, id, i, node->op == EGI_OP_Mul ? EGI_ROLE_SCALE : EGI_ROLE_BIAS, false);
  }
  return EG_OK;
}

/* Codes of 8 bits and less, as they are or dequantised: the rows gathered are embedded tokens all the same. */
static bool is_quantised_table(const egi_graph *graph, egi_value_id value) {
  bool is_transposed = false;
  if (egi_dequantised_below(graph, value, &is_transposed) != 0) return true;
  while (graph->values[value].kind == EGI_VALUE_NODE) {
    const egi_node *node = &graph->nodes[graph->values[value].producer];
    if (!(egi_op_get(node->op)->flags & EGI_OP_VIEW)) return false;
    value = node->inputs[0];
  }
  const egi_value *row = &graph->values[value];
  return row->kind == EGI_VALUE_WEIGHT && row->rank >= 2 && is_small_integer(row->dtype);
}

static eg_status add_table(finder *state, egi_node_id id) {
  const egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[id];
  bool is_transposed = false;
  if (egi_node_int(node, "axis", 0) != 0) return EG_OK;
  if (is_quantised_table(graph, node->inputs[0])) state->is_hidden[node->outputs[0]] = true;
  if (graph->values[node->inputs[0]].rank != 2) return EG_OK;
  egi_value_id weight = egi_weight_below(graph, node->inputs[0], &is_transposed);
  if (weight == 0 || is_rotary_table(weight_row(graph, weight)->name)) return EG_OK;
  uint32_t before = state->count;
  EG_TRY(add_operand(state, id, 0, EGI_ROLE_TABLE, false));
  if (state->count > before) state->is_hidden[node->outputs[0]] = true;
  return EG_OK;
}

/* Matrices and biases of experts; packed ones are quantised. */
static eg_status add_experts(finder *state, egi_node_id id) {
  egi_moe moe;
  EG_TRY(egi_moe_read(state->graph, id, &moe));
  for (uint32_t i = EGI_MOE_FIRST_ROLE; i < moe.first[EGI_MOE_GATE_SCALES]; i++) {
    egi_value_id weight = state->graph->nodes[id].inputs[i];
    if (state->graph->values[weight].dtype != EG_DTYPE_U8) {
      EG_TRY(add_operand(state, id, i, EGI_ROLE_EXPERTS, false));
      continue;
    }
    EG_TRY(EGI_GROW(state->arena, &state->list, state->count, &state->capacity));
    state->list[state->count++] = (egi_operand){id, i, weight, EGI_ROLE_QUANTISED, false};
  }
  return EG_OK;
}

/* A table whose rows are all taken, not those of tokens: relative positions, which pass a norm or the query and key
 * layers of their own as a batch of rows. Through moves and slices; *out_taker takes the weight. */
static bool is_whole_table(const finder *state, egi_node_id id, egi_node_id *out_taker) {
  const egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[id];
  bool is_norm = node->op == EGI_OP_LayerNormalization || node->op == EGI_OP_RMSNormalization;
  egi_value_id at = node->inputs[0];
  if (graph->values[at].rank < (is_norm ? 2 : 3)) return false; /* a product of matrices is a weight */
  *out_taker = id;
  while (graph->values[at].kind == EGI_VALUE_NODE) {
    egi_node_id below = graph->values[at].producer;
    egi_op op = graph->nodes[below].op;
    if (op == EGI_OP_Slice) *out_taker = below;
    if (op != EGI_OP_Cast && !(egi_op_get(op)->flags & EGI_OP_VIEW)) return false;
    at = graph->nodes[below].inputs[0];
  }
  const egi_value *value = &graph->values[at];
  if (value->kind != EGI_VALUE_WEIGHT || value->rank < 2 || !egi_dtype_is_float(value->dtype)) return false;
  const char *name = weight_row(graph, at)->name;
  return egi_is_parameter_name(name) && egi_has_suffix(name, "weight") && !is_rotary_table(name);
}

static eg_status add_whole_table(finder *state, egi_node_id id) {
  egi_node_id taker = 0;
  if (!is_whole_table(state, id, &taker)) return EG_OK;
  egi_value_id sliced = taker != id ? state->graph->nodes[taker].outputs[0] : 0;
  bool is_known = sliced != 0 && state->is_hidden[sliced]; /* another layer takes the same rows */
  if (sliced != 0) state->is_hidden[sliced] = true;
  state->is_hidden[state->graph->nodes[id].inputs[0]] = true;
  return is_known ? EG_OK : add_operand(state, taker, 0, EGI_ROLE_TABLE, false);
}

static bool takes_rows(egi_op op) {
  return op == EGI_OP_MatMul || op == EGI_OP_Gemm || op == EGI_OP_Linear || op == EGI_OP_LayerNormalization ||
         op == EGI_OP_RMSNormalization;
}

static eg_status visit(finder *state, egi_node_id id) {
  const egi_node *node = &state->graph->nodes[id];
  if (takes_rows(node->op)) EG_TRY(add_whole_table(state, id));
  bool is_hidden = node->n_inputs > 0 && state->is_hidden[node->inputs[0]];
  switch (node->op) {
  case EGI_OP_Gather:
    return add_table(state, id);
  case EGI_OP_MatMul:
    if (!is_hidden) return EG_OK;
    EG_TRY(add_codes(state, id, 1, false));
    return add_operand(state, id, 1, EGI_ROLE_MATRIX, false);
  case EGI_OP_Linear:
    return is_hidden ? add_linear(state, id) : EG_OK;
  case EGI_OP_MoE:
    return is_hidden ? add_experts(state, id) : EG_OK;
  case EGI_OP_Gemm:
    if (!is_hidden || egi_node_int(node, "transA", 0) != 0) return EG_OK;
    EG_TRY(add_codes(state, id, 1, egi_node_int(node, "transB", 0) != 0));
    EG_TRY(add_operand(state, id, 1, EGI_ROLE_MATRIX, egi_node_int(node, "transB", 0) != 0));
    return add_operand(state, id, 2, EGI_ROLE_BIAS, false);
  case EGI_OP_MaskedAttention:
    return is_hidden ? add_operand(state, id, 4, EGI_ROLE_SINKS, false) : EG_OK;
  case EGI_OP_LinearLogProbability:
    if (egi_linear_storage_of(node) == EGI_LINEAR_PLAIN)
      EG_TRY(add_operand(state, id, 1, EGI_ROLE_MATRIX, false));
    else
      EG_TRY(add_quantised(state, id, 1));
    return add_operand(state, id, 3, EGI_ROLE_BIAS, false);
  case EGI_OP_LayerNormalization:
  case EGI_OP_RMSNormalization:
    if (!is_hidden) return EG_OK;
    EG_TRY(add_operand(state, id, 1, EGI_ROLE_SCALE, false));
    return node->op == EGI_OP_LayerNormalization ? add_operand(state, id, 2, EGI_ROLE_BIAS, false) : EG_OK;
  case EGI_OP_Mul:
  case EGI_OP_Add:
    return add_vector_operand(state, id);
  default:
    return EG_OK;
  }
}

/* Whatever a hidden value enters as data gives hidden values; indices and shapes do not count. */
static void spread(finder *state, egi_node_id id) {
  const egi_node *node = &state->graph->nodes[id];
  bool is_hidden = false;
  for (unsigned i = 0; i < node->n_inputs; i++) is_hidden = is_hidden || state->is_hidden[node->inputs[i]];
  for (unsigned i = 0; is_hidden && i < node->n_outputs; i++) {
    egi_value_id output = node->outputs[i];
    eg_dtype dtype = state->graph->values[output].dtype;
    if (output != 0 && (egi_dtype_is_float(dtype) || is_small_integer(dtype))) state->is_hidden[output] = true;
  }
}

eg_status egi_find_operands(const egi_graph *graph, egi_arena *arena, egi_operand **out_operands, size_t *out_count) {
  finder state = {.graph = graph, .arena = arena};
  state.is_hidden = EGI_NEW(arena, bool, graph->n_values);
  if (!state.is_hidden) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const egi_value *input = &graph->values[graph->inputs[i]];
    if (egi_dtype_is_float(input->dtype) && input->rank == 3) state.is_hidden[graph->inputs[i]] = true;
  }
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    if (graph->nodes[id].op == EGI_OP_NONE) continue;
    EG_TRY(visit(&state, id));
    spread(&state, id);
  }
  *out_operands = state.list;
  *out_count = state.count;
  return EG_OK;
}

/* Zeros and ones as they are at first: equal ones are no sign of anything. */
static bool is_uniform(const egi_tensor *tensor, uint64_t size_bytes) {
  size_t element = egi_dtype_bits(tensor->dtype) / 8;
  const uint8_t *bytes = tensor->data;
  return element == 0 || size_bytes <= element || memcmp(bytes, bytes + element, (size_t)size_bytes - element) == 0;
}

bool egi_same_weight(const egi_graph *graph, egi_value_id a, egi_value_id b) {
  egi_tensor x, y;
  uint64_t size_bytes = 0;
  if (graph->values[a].index == graph->values[b].index) return true;
  if (!egi_value_constant(graph, a, &x) || !egi_value_constant(graph, b, &y)) return false;
  if (x.dtype != y.dtype || x.rank != y.rank) return false;
  for (int i = 0; i < x.rank; i++)
    if (x.dims[i] != y.dims[i]) return false;
  if (!egi_dtype_bytes(x.dtype, (uint64_t)egi_tensor_count(&x), &size_bytes)) return false;
  return memcmp(x.data, y.data, (size_t)size_bytes) == 0 && !is_uniform(&x, size_bytes);
}

const char *egi_called_before(const char *path, egi_arena *arena) {
  size_t length = strlen(path), n = length;
  while (n > 0 && path[n - 1] >= '0' && path[n - 1] <= '9') n--;
  if (n == length || n < 2 || path[n - 1] != '_') return NULL;
  return egi_arena_copy_text(arena, path, n - 1);
}

/* ---- ends of the model ------------------------------------------------------------------------------------------ */

static bool is_rank_three_float(const egi_graph *graph, egi_value_id id) {
  return egi_dtype_is_float(graph->values[id].dtype) && graph->values[id].rank == 3;
}

/* The operand that carries the hidden values of an elementwise node with a constant beside it. */
static egi_value_id carried_input(const egi_graph *graph, const egi_node *node) {
  bool is_transposed = false;
  switch (node->op) {
  case EGI_OP_Cast:
  case EGI_OP_Identity:
  case EGI_OP_Reshape:
  case EGI_OP_Squeeze:
  case EGI_OP_Unsqueeze:
  case EGI_OP_Slice:
  case EGI_OP_Tanh:
  case EGI_OP_Clip:
  case EGI_OP_LogSoftmax:
  case EGI_OP_AddMatMul:
  case EGI_OP_Flatten:
  case EGI_OP_Gather: /* the rows of the last tokens */
  case EGI_OP_GatherND:
    return node->inputs[0];
  case EGI_OP_Add:
  case EGI_OP_Mul:
    if (egi_weight_below(graph, node->inputs[0], &is_transposed) != 0) return node->inputs[1];
    return egi_weight_below(graph, node->inputs[1], &is_transposed) != 0 ? node->inputs[0] : 0;
  case EGI_OP_Sub:
  case EGI_OP_Div:
    return egi_weight_below(graph, node->inputs[1], &is_transposed) != 0 ? node->inputs[0] : 0;
  default:
    return 0;
  }
}

/* The linear layer that gives `value`, through what leaves rows rows; 0: none. */
static egi_node_id head_above(const egi_graph *graph, egi_value_id value) {
  while (value != 0 && graph->values[value].kind == EGI_VALUE_NODE) {
    egi_node_id id = graph->values[value].producer;
    const egi_node *node = &graph->nodes[id];
    bool is_transposed = false;
    if (node->op == EGI_OP_Linear) return id;
    if (node->op == EGI_OP_MatMul || node->op == EGI_OP_Gemm)
      return egi_weight_below(graph, node->inputs[1], &is_transposed) != 0 ||
                     egi_dequantised_below(graph, node->inputs[1], &is_transposed) != 0
                 ? id
                 : 0;
    value = carried_input(graph, node);
  }
  return 0;
}

/* The float output of rank 3 that is named "logits", else the only one, else the only one that a linear layer gives;
 * 0 with how many there are. */
static egi_value_id likely_logits(const egi_graph *graph, uint32_t *out_count) {
  egi_value_id found = 0, found_below_head = 0;
  uint32_t n_heads = 0;
  *out_count = 0;
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    egi_value_id output = graph->outputs[i];
    if (!is_rank_three_float(graph, output)) continue;
    found = output;
    if (strcmp(graph->values[output].name, "logits") == 0) return output;
    (*out_count)++;
    if (head_above(graph, output) == 0) continue;
    found_below_head = output;
    n_heads++;
  }
  if (*out_count == 1) return found;
  return n_heads == 1 ? found_below_head : 0;
}

eg_status egi_find_logits(const egi_graph *graph, egi_value_id *out_logits) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    egi_value_id output = graph->outputs[i];
    if (strcmp(graph->values[output].name, "logits") == 0 && !is_rank_three_float(graph, output))
      return egi_fail(graph->module->ctx, EG_ERROR_DATA,
                      "output \"logits\" is not float [batch, sequence, vocabulary]");
  }
  egi_value_id found = likely_logits(graph, &count);
  if (found == 0)
    return egi_fail(graph->module->ctx, EG_ERROR_DATA,
                    "the model has no output \"logits\" and %u float outputs of rank 3: which are the logits?", count);
  *out_logits = found;
  return EG_OK;
}

static bool is_index_matrix(const egi_value *value) {
  return value->rank == 2 && (value->dtype == EG_DTYPE_I64 || value->dtype == EG_DTYPE_I32);
}

/* The input whose numbers a Gather takes as they are, through layout and integer casts; 0: none. */
static egi_value_id index_source(const egi_graph *graph, egi_value_id value) {
  while (value != 0 && graph->values[value].kind == EGI_VALUE_NODE) {
    const egi_node *node = &graph->nodes[graph->values[value].producer];
    bool keeps_numbers = node->op == EGI_OP_Cast || (egi_op_get(node->op)->flags & EGI_OP_VIEW);
    if (!keeps_numbers) return 0;
    value = node->inputs[0];
  }
  return value != 0 && graph->values[value].kind == EGI_VALUE_INPUT ? value : 0;
}

eg_status egi_find_token_input(const egi_graph *graph, egi_value_id *out_input) {
  egi_value_id named = egi_graph_find_value(graph, "input_ids"), found = 0;
  if (named != 0 && graph->values[named].kind == EGI_VALUE_INPUT && is_index_matrix(&graph->values[named])) {
    *out_input = named;
    return EG_OK;
  }
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op != EGI_OP_Gather || !egi_dtype_is_float(graph->values[node->inputs[0]].dtype)) continue;
    egi_value_id source = index_source(graph, node->inputs[1]);
    if (source == 0 || source == found || !is_index_matrix(&graph->values[source])) continue;
    if (found != 0)
      return egi_fail(graph->module->ctx, EG_ERROR_DATA,
                      "inputs \"%s\" and \"%s\" both index tables: which are the tokens?", graph->values[found].name,
                      graph->values[source].name);
    found = source;
  }
  if (found == 0)
    return egi_fail(graph->module->ctx, EG_ERROR_DATA,
                    "the model has no integer input \"input_ids\" [batch, sequence]");
  *out_input = found;
  return EG_OK;
}

egi_node_id egi_find_head(const egi_graph *graph) {
  uint32_t count = 0;
  egi_value_id logits = likely_logits(graph, &count);
  if (logits == 0 && count == 0 && egi_graph_find_value(graph, EGI_OUTPUT_LOSS) == 0) {
    logits = egi_find_document_logits(graph);
    if (logits != 0 && egi_is_embedding_name(graph->values[logits].name)) logits = 0;
  }
  for (egi_node_id id = 1; logits == 0 && id < graph->n_nodes; id++) { /* after append_loss */
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_LinearLogProbability) return id;
    if (node->op == EGI_OP_LogProbability) logits = node->inputs[0];
  }
  return head_above(graph, logits);
}
