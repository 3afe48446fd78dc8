/* The logits and the loss on them become one: per-row log-probabilities of the labels and minus their sum, as the only
 * outputs; losses of whole documents stand in append_document_loss.c. Where the logits come straight from a linear
 * head, head and loss are one operator that never holds all logits. Precondition: inferred, after name_modules. Refused
 * when a graph has a loss already. */
#include <string.h>

#include "graph/linear.h"
#include "passes/passes.h"

typedef struct appender {
  egi_pass_run *run;
  egi_graph *graph;
  egi_emitter emit;
  egi_value_id logits, labels;
} appender;

/* What the head multiplies, when the loss can take its place. */
typedef struct head {
  egi_value_id hidden, weight, bias; /* weight: effectively [in, out]; bias 0: none */
  egi_value_id quantised[4];         /* of a quantised weight, from its scales on; 0: none */
  const egi_attribute *attributes;   /* of its Linear: how it is stored */
  unsigned n_attributes;
} head;

static bool is_vector(const egi_graph *graph, egi_value_id value) {
  return graph->values[value].rank == 1;
}

/* An adapter on the head needs the head's own output. */
static bool has_adapter(const appender *state, const egi_node *node) {
  const egi_adapt_options *adapt = state->run->adapt;
  for (size_t i = 0; adapt && node->scope && i < adapt->n_adapters; i++) {
    if (strcmp(adapt->adapters[i].path, node->scope) == 0) return true;
  }
  return false;
}

static bool read_matmul(const egi_graph *graph, const egi_node *node, head *out_head) {
  bool is_transposed = false;
  out_head->hidden = node->inputs[0];
  out_head->weight = node->inputs[1];
  return egi_weight_below(graph, node->inputs[1], &is_transposed) != 0 && graph->values[node->inputs[1]].rank == 2;
}

static bool read_gemm(appender *state, const egi_node *node, head *out_head) {
  bool is_plain = egi_node_int(node, "transA", 0) == 0 && egi_node_float(node, "alpha", 1.0F) == 1.0F;
  if (!is_plain || !read_matmul(state->graph, node, out_head)) return false;
  if (node->n_inputs > 2 && node->inputs[2] != 0) {
    if (out_head->bias != 0 || !is_vector(state->graph, node->inputs[2])) return false;
    if (egi_node_float(node, "beta", 1.0F) != 1.0F) return false;
    out_head->bias = node->inputs[2];
  }
  if (egi_node_int(node, "transB", 0) != 0)
    out_head->weight = egi_emit_unary(&state->emit, EGI_OP_Transpose, out_head->weight);
  return state->emit.status == EG_OK;
}

/* A weight [out, in] is turned, or what it is itself a transpose of is taken; a quantised one stays as it lies. */
static bool read_linear(appender *state, const egi_node *node, head *out_head) {
  egi_value_id bias = node->n_inputs > EGI_LINEAR_BIAS ? node->inputs[EGI_LINEAR_BIAS] : 0;
  if (bias != 0 && out_head->bias != 0) return false;
  if (bias != 0) out_head->bias = bias;
  if (egi_linear_is_quantised(node)) {
    out_head->hidden = node->inputs[EGI_LINEAR_X];
    out_head->weight = node->inputs[EGI_LINEAR_WEIGHT];
    for (unsigned i = 0; i < EGI_COUNT(out_head->quantised); i++)
      out_head->quantised[i] = EGI_LINEAR_SCALES + i < node->n_inputs ? node->inputs[EGI_LINEAR_SCALES + i] : 0;
    out_head->attributes = node->attributes;
    out_head->n_attributes = node->n_attributes;
    return state->graph->values[out_head->hidden].dtype == EG_DTYPE_F32;
  }
  if (!read_matmul(state->graph, node, out_head)) return false;
  const egi_value *weight = &state->graph->values[out_head->weight];
  const egi_node *turn = &state->graph->nodes[weight->producer];
  if (weight->kind == EGI_VALUE_NODE && turn->op == EGI_OP_Transpose)
    out_head->weight = turn->inputs[0];
  else
    out_head->weight = egi_emit_unary(&state->emit, EGI_OP_Transpose, out_head->weight);
  return state->emit.status == EG_OK;
}

/* A Reshape that only takes rows apart or together: the last dim stays. */
static bool keeps_columns(const egi_graph *graph, egi_value_id from, egi_value_id to) {
  const egi_value *a = &graph->values[from], *b = &graph->values[to];
  egi_dims *dims = graph->module->dims;
  if (a->rank < 1 || b->rank < 1) return false;
  return egi_dim_resolve(dims, a->dims[a->rank - 1]) == egi_dim_resolve(dims, b->dims[b->rank - 1]);
}

/* Walks from the logits to the head over nodes that leave each logit what it is; a bias may be added once. */
static bool find_fusible_head(appender *state, head *out_head, const char **out_scope) {
  const egi_graph *graph = state->graph;
  egi_value_id value = state->logits;
  *out_head = (head){0};
  while (graph->values[value].kind == EGI_VALUE_NODE) {
    const egi_node *node = &graph->nodes[graph->values[value].producer];
    bool is_transposed = false;
    *out_scope = node->scope;
    switch (node->op) {
    case EGI_OP_MatMul:
      return !has_adapter(state, node) && read_matmul(graph, node, out_head);
    case EGI_OP_Gemm:
      return !has_adapter(state, node) && read_gemm(state, node, out_head);
    case EGI_OP_Linear:
      return !has_adapter(state, node) && read_linear(state, node, out_head);
    case EGI_OP_Identity:
      break;
    case EGI_OP_Cast:
      if (graph->values[node->inputs[0]].dtype != graph->values[value].dtype) return false;
      break;
    case EGI_OP_Reshape:
    case EGI_OP_Squeeze:
    case EGI_OP_Unsqueeze:
      if (!keeps_columns(graph, node->inputs[0], value)) return false;
      break;
    case EGI_OP_Add: {
      unsigned vector = is_vector(graph, node->inputs[1]) ? 1 : 0;
      egi_value_id bias = node->inputs[vector];
      if (out_head->bias != 0 || !is_vector(graph, bias)) return false;
      if (egi_weight_below(graph, bias, &is_transposed) == 0) return false;
      out_head->bias = bias;
      value = node->inputs[1 - vector];
      continue;
    }
    default:
      return false;
    }
    value = node->inputs[0];
  }
  return false;
}

/* ---- loss ------------------------------------------------------------------------------------------------------- */

/* Labels like the token ids, whose rows the logits must have. */
static eg_status add_labels(appender *state) {
  egi_graph *graph = state->graph;
  egi_value_id tokens = 0;
  bool is_shifted = state->run->adapt == NULL || state->run->adapt->loss != EG_LOSS_TOKEN;
  const char *name = is_shifted ? EGI_INPUT_LABELS : EGI_INPUT_TOKEN_LABELS;
  if (egi_graph_find_value(graph, EGI_OUTPUT_LOSS) != 0 || egi_graph_find_value(graph, name) != 0)
    return egi_fail(state->run->ctx, EG_ERROR_ARGUMENT, "the graph has a loss already: \"%s\"", name);
  const char *message = NULL;
  if (egi_has_pruned_head(graph, &graph->module->arena, &message))
    return egi_fail(state->run->ctx, EG_ERROR_UNSUPPORTED, "%s", message);
  EG_TRY(egi_find_logits(graph, &state->logits));
  EG_TRY(egi_find_token_input(graph, &tokens));
  const egi_value *logits = &graph->values[state->logits], *ids = &graph->values[tokens];
  egi_dim dims[2] = {ids->dims[0], ids->dims[1]};
  for (int i = 0; i < 2; i++) {
    int64_t rows = 0, expected = 0;
    egi_dims *table = graph->module->dims;
    egi_dim a = egi_dim_resolve(table, logits->dims[i]), b = egi_dim_resolve(table, dims[i]);
    bool is_number = egi_dim_value(table, a, &rows), is_known = egi_dim_value(table, b, &expected);
    if (is_number != is_known || (is_number && rows != expected))
      return egi_fail(state->run->ctx, EG_ERROR_DATA, "output \"%s\" does not hold logits for each token of \"%s\"",
                      logits->name, ids->name);
    if (a != b) EG_TRY(egi_dim_assume(table, a, b));
  }
  return egi_graph_add_input(graph, name, EG_DTYPE_I64, 2, dims, &state->labels);
}

/* The labels in the shape of the rows of `like`. */
static egi_value_id shape_labels(appender *state, egi_value_id like) {
  static const int64_t flat[1] = {-1};
  if (state->graph->values[like].rank == 3) return state->labels;
  return egi_emit_binary(&state->emit, EGI_OP_Reshape, state->labels, egi_emit_integers(&state->emit, flat, 1));
}

static egi_value_id emit_log_probability(appender *state) {
  egi_emitter *emit = &state->emit;
  head found;
  egi_value_id results[2];
  if (find_fusible_head(state, &found, &emit->scope) && state->graph->values[found.hidden].rank <= 3) {
    const egi_value_id inputs[8] = {found.hidden,       found.weight,       shape_labels(state, found.hidden),
                                    found.bias,         found.quantised[0], found.quantised[1],
                                    found.quantised[2], found.quantised[3]};
    unsigned n_inputs = 8;
    while (inputs[n_inputs - 1] == 0) n_inputs--;
    egi_emit_many(emit, EGI_OP_LinearLogProbability, inputs, n_inputs, found.attributes, found.n_attributes, results,
                  2);
  } else {
    egi_value_id inputs[2] = {state->logits, state->labels};
    egi_emit_many(emit, EGI_OP_LogProbability, inputs, 2, NULL, 0, results, 2);
  }
  if (emit->status != EG_OK || state->graph->values[results[0]].rank == 2) return results[0];
  egi_value_id shape = egi_emit_unary(emit, EGI_OP_Shape, state->labels);
  return egi_emit_binary(emit, EGI_OP_Reshape, results[0], shape);
}

static eg_status append_token_loss(appender *state, egi_value_id *out_loss) {
  EG_TRY(add_labels(state));
  egi_value_id logp = emit_log_probability(state);
  state->emit.scope = NULL;
  const egi_attribute keep_no_dims = egi_attribute_int("keepdims", 0);
  egi_value_id sum = egi_emit(&state->emit, EGI_OP_ReduceSum, &logp, 1, &keep_no_dims, 1);
  *out_loss = egi_emit_unary(&state->emit, EGI_OP_Neg, sum);
  EG_TRY(state->emit.status);
  return egi_graph_rename_value(state->graph, logp, EGI_OUTPUT_LOGP);
}

static eg_status append(appender *state) {
  egi_graph *graph = state->graph;
  const egi_adapt_options *adapt = state->run->adapt;
  egi_value_id loss = 0;
  if (adapt != NULL && egi_loss_is_of_documents(adapt->loss))
    EG_TRY(egi_append_document_loss(graph, adapt, &loss));
  else
    EG_TRY(append_token_loss(state, &loss));
  egi_value_id logp = egi_graph_find_value(graph, EGI_OUTPUT_LOGP);
  EG_TRY(egi_graph_rename_value(graph, loss, EGI_OUTPUT_LOSS));
  graph->n_outputs = 0;
  if (logp != 0) EG_TRY(egi_graph_add_output(graph, logp));
  EG_TRY(egi_graph_add_output(graph, loss));
  state->run->report->n_tried = state->run->report->n_matched = 1;
  return EG_OK;
}

eg_status egi_pass_append_loss(egi_pass_run *run, egi_graph *graph) {
  appender state = {.run = run, .graph = graph, .emit = {.graph = graph}};
  EG_TRY(append(&state));
  run->has_changed = true;
  egi_pass_report dead = {0};
  egi_pass_run clean = {.ctx = run->ctx, .adapt = run->adapt, .report = &dead};
  return egi_pass_eliminate_dead(&clean, graph);
}
