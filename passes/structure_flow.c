/* A recognised graph as a flow: which values are computed from embedded tokens, what each node on their way is, where
 * the layers begin and end. The layers lie between the last value that all attention and the logits come through and
 * the first that everything in them has gone into: both are dominators of the logits (Cooper, Harvey, Kennedy, A
 * simple, fast dominance algorithm; one sweep, since graphs have no cycles). Linear in the graph. */
#include <string.h>

#include "passes/structure.h"

static bool is_engraft(const egi_node *node, const char *name) {
  const egi_op_info *info = egi_op_get(node->op);
  return node->op != EGI_OP_UNKNOWN && strcmp(info->domain, "engraft") == 0 && strcmp(info->name, name) == 0;
}

/* ---- hidden values -------------------------------------------------------------------------------------------- */

typedef struct marks {
  bool *is_token; /* by value: integers that come from the token ids */
  bool *is_live;  /* by node: the logits depend on it */
} marks;

static bool any_input(const egi_node *node, const bool *is_marked) {
  for (unsigned i = 0; i < node->n_inputs; i++)
    if (node->inputs[i] != 0 && is_marked[node->inputs[i]]) return true;
  return false;
}

static void mark_outputs(const egi_flow *flow, const egi_node *node, bool is_float, bool *is_marked) {
  for (unsigned i = 0; i < node->n_outputs; i++) {
    egi_value_id output = node->outputs[i];
    if (output != 0 && egi_dtype_is_float(flow->graph->values[output].dtype) == is_float) is_marked[output] = true;
  }
}

static void mark_hidden(egi_flow *flow, const marks *m) {
  const egi_graph *graph = flow->graph;
  if (flow->tokens != 0) m->is_token[flow->tokens] = true;
  for (uint32_t i = 0; i < graph->n_inputs; i++) { /* embeddings made outside */
    const egi_value *value = &graph->values[graph->inputs[i]];
    if (flow->tokens == 0 && egi_dtype_is_float(value->dtype) && value->rank == 3)
      flow->is_hidden[graph->inputs[i]] = true;
  }
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_NONE || node->op == EGI_OP_Shape || node->op == EGI_OP_Size) continue;
    bool is_lookup = node->n_inputs > 1 && node->inputs[1] != 0 && m->is_token[node->inputs[1]] &&
                     (node->op == EGI_OP_Gather || strstr(egi_op_get(node->op)->name, "Gather") != NULL);
    if (is_lookup && flow->embedding == 0) flow->embedding = id;
    if (is_lookup || any_input(node, flow->is_hidden)) mark_outputs(flow, node, true, flow->is_hidden);
    if (any_input(node, m->is_token)) mark_outputs(flow, node, false, m->is_token);
  }
}

static void mark_live(const egi_flow *flow, const marks *m) {
  const egi_graph *graph = flow->graph;
  if (flow->logits == 0 || graph->values[flow->logits].kind != EGI_VALUE_NODE) return;
  m->is_live[graph->values[flow->logits].producer] = true;
  for (egi_node_id id = graph->n_nodes; id-- > 1;) {
    const egi_node *node = &graph->nodes[id];
    for (unsigned i = 0; m->is_live[id] && i < node->n_inputs; i++) {
      const egi_value *input = &graph->values[node->inputs[i]];
      if (node->inputs[i] != 0 && input->kind == EGI_VALUE_NODE) m->is_live[input->producer] = true;
    }
  }
}

/* ---- parts ---------------------------------------------------------------------------------------------------- */

egi_value_id egi_flow_only_input(const egi_flow *flow, const egi_node *node) {
  egi_value_id only = 0;
  for (unsigned i = 0; i < node->n_inputs; i++) {
    egi_value_id input = node->inputs[i];
    if (input == 0 || !flow->is_hidden[input] || input == only) continue;
    if (only != 0) return 0;
    only = input;
  }
  return only;
}

static egi_part part_of(const egi_flow *flow, const egi_node *node) {
  switch (node->op) {
  case EGI_OP_RMSNormalization:
  case EGI_OP_LayerNormalization:
    return EGI_PART_NORM;
  case EGI_OP_Attention:
  case EGI_OP_MaskedAttention:
  case EGI_OP_LinearAttention:
    return EGI_PART_ATTENTION;
  case EGI_OP_RotaryEmbedding:
    return EGI_PART_ROPE;
  case EGI_OP_MatMul:
  case EGI_OP_Gemm:
    return egi_flow_only_input(flow, node) != 0 ? EGI_PART_LINEAR : EGI_PART_OTHER;
  case EGI_OP_Cast:
  case EGI_OP_CastLike:
  case EGI_OP_Concat:
    return EGI_PART_VIEW;
  case EGI_OP_Gather:
  case EGI_OP_GatherND: /* of pieces that the model names */
    return flow->is_hidden[node->inputs[0]] && flow->graph->values[node->inputs[1]].kind == EGI_VALUE_WEIGHT
               ? EGI_PART_VIEW
               : EGI_PART_OTHER;
  default:
    break;
  }
  if (is_engraft(node, "Linear")) return EGI_PART_LINEAR;
  if (is_engraft(node, "GLU")) return EGI_PART_GLU;
  if (is_engraft(node, "MoE")) return EGI_PART_MOE;
  return egi_op_get(node->op)->flags & EGI_OP_VIEW ? EGI_PART_VIEW : EGI_PART_OTHER;
}

static void find_parts(egi_flow *flow, const marks *m) {
  const egi_graph *graph = flow->graph;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    bool is_on_way = false;
    for (unsigned i = 0; m->is_live[id] && i < node->n_outputs; i++)
      is_on_way = is_on_way || (node->outputs[i] != 0 && flow->is_hidden[node->outputs[i]]);
    if (is_on_way && node->op != EGI_OP_NONE) flow->parts[id] = part_of(flow, node);
  }
}

/* ---- where the layers are ------------------------------------------------------------------------------------- */

static egi_node_id intersect(const egi_flow *flow, egi_node_id a, egi_node_id b) {
  while (a != b) {
    if (a > b)
      a = flow->dominators[a];
    else
      b = flow->dominators[b];
  }
  return a;
}

static void find_dominators(egi_flow *flow) {
  const egi_graph *graph = flow->graph;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    bool is_first = true;
    for (unsigned i = 0; flow->parts[id] != EGI_PART_NONE && i < node->n_inputs; i++) {
      if (node->inputs[i] == 0 || !flow->is_hidden[node->inputs[i]]) continue;
      const egi_value *input = &graph->values[node->inputs[i]];
      egi_node_id from = input->kind == EGI_VALUE_NODE ? input->producer : 0;
      flow->dominators[id] = is_first ? from : intersect(flow, flow->dominators[id], from);
      is_first = false;
    }
  }
}

/* The last dim of a node's first result, EGI_DIM_NONE where there is none. */
static egi_dim width_of(const egi_flow *flow, egi_node_id id) {
  const egi_value *value = &flow->graph->values[flow->graph->nodes[id].outputs[0]];
  return value->rank > 1 ? egi_dim_resolve(flow->graph->module->dims, value->dims[value->rank - 1]) : EGI_DIM_NONE;
}

/* The first value as wide as the layers are: what a table gives, unpacked where its rows are quantised. */
static void find_embedding(egi_flow *flow) {
  if (flow->first == 0 || flow->embedding == 0) return;
  egi_dim width = width_of(flow, flow->first);
  for (egi_node_id id = flow->first; id != 0 && width != EGI_DIM_NONE; id = flow->dominators[id])
    if (width_of(flow, id) == width) flow->embedding = id;
}

static void find_layers(egi_flow *flow) {
  egi_node_id first_attention = 0, last_part = 0, end = flow->graph->values[flow->logits].producer;
  for (egi_node_id id = 1; id < flow->graph->n_nodes; id++) {
    egi_part part = flow->parts[id];
    if (part == EGI_PART_ATTENTION && first_attention == 0) first_attention = id;
    bool is_of_layer = part == EGI_PART_ATTENTION || part == EGI_PART_GLU || part == EGI_PART_MOE ||
                       (part == EGI_PART_LINEAR && id != flow->head);
    if (is_of_layer) last_part = id;
  }
  flow->first = first_attention != 0 ? intersect(flow, first_attention, end) : flow->embedding;
  find_embedding(flow);
  flow->last = end;
  for (egi_node_id id = end; id != 0 && id > last_part; id = flow->dominators[id]) flow->last = id;
}

/* The linear layer that the logits come from, through scaling, soft-capping and moves. */
static egi_node_id find_head(const egi_flow *flow) {
  const egi_graph *graph = flow->graph;
  egi_value_id value = flow->logits;
  for (uint32_t hop = 0; hop < 64 && value != 0 && graph->values[value].kind == EGI_VALUE_NODE; hop++) {
    egi_node_id id = graph->values[value].producer;
    if (flow->parts[id] == EGI_PART_LINEAR) return id;
    if (flow->parts[id] != EGI_PART_VIEW && flow->parts[id] != EGI_PART_OTHER) return 0;
    value = egi_flow_only_input(flow, &graph->nodes[id]);
  }
  return 0;
}

enum { MAX_CONCATS = 4 };

static egi_trace trace_value(const egi_flow *flow, egi_value_id value, unsigned depth);

/* Pieces of a head that come together: what each of them comes through, and the layer where it is one. */
static void trace_concat(const egi_flow *flow, const egi_node *node, unsigned depth, egi_trace *trace) {
  for (unsigned i = 0; depth < MAX_CONCATS && i < node->n_inputs; i++) {
    if (!flow->is_hidden[node->inputs[i]]) continue;
    egi_trace piece = trace_value(flow, node->inputs[i], depth + 1);
    trace->linear = i == 0 || trace->linear == piece.linear ? piece.linear : 0;
    if (trace->rope == 0) trace->rope = piece.rope;
    trace->has_norm = trace->has_norm || piece.has_norm;
  }
}

egi_trace egi_flow_trace(const egi_flow *flow, egi_value_id value) {
  return trace_value(flow, value, 0);
}

static egi_trace trace_value(const egi_flow *flow, egi_value_id value, unsigned depth) {
  const egi_graph *graph = flow->graph;
  egi_trace trace = {0};
  while (value != 0 && graph->values[value].kind == EGI_VALUE_NODE) {
    egi_node_id id = graph->values[value].producer;
    const egi_node *node = &graph->nodes[id];
    egi_part part = flow->parts[id];
    bool is_elementwise = (egi_op_get(node->op)->flags & EGI_OP_ELEMENTWISE) != 0;
    if (part == EGI_PART_LINEAR) trace.linear = id;
    if (part == EGI_PART_ROPE) trace.rope = id;
    if (part == EGI_PART_NORM) trace.has_norm = true;
    if (node->op == EGI_OP_Concat) {
      trace_concat(flow, node, depth, &trace);
      break;
    }
    bool is_passed = part == EGI_PART_VIEW || part == EGI_PART_ROPE || part == EGI_PART_NORM ||
                     (part == EGI_PART_OTHER && is_elementwise);
    if (!is_passed) break;
    value = egi_flow_only_input(flow, node);
  }
  return trace;
}

/* The logits, or what a model without a head gives. */
static egi_value_id find_result(const egi_graph *graph) {
  egi_value_id logits = 0;
  if (egi_find_logits(graph, &logits) == EG_OK) return logits;
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    const egi_value *value = &graph->values[graph->outputs[i]];
    if (egi_dtype_is_float(value->dtype) && value->kind == EGI_VALUE_NODE) return graph->outputs[i];
  }
  return 0;
}

eg_status egi_flow_find(const egi_graph *graph, egi_arena *arena, egi_flow *out_flow) {
  egi_flow *flow = out_flow;
  marks m;
  *flow = (egi_flow){.graph = graph, .arena = arena};
  flow->is_hidden = EGI_NEW(arena, bool, graph->n_values);
  flow->parts = EGI_NEW(arena, egi_part, graph->n_nodes);
  flow->dominators = EGI_NEW(arena, egi_node_id, graph->n_nodes);
  m.is_token = EGI_NEW(arena, bool, graph->n_values);
  m.is_live = EGI_NEW(arena, bool, graph->n_nodes);
  if (!flow->is_hidden || !flow->parts || !flow->dominators || !m.is_token || !m.is_live) return EG_ERROR_MEMORY;
  flow->logits = find_result(graph);
  if (egi_find_token_input(graph, &flow->tokens) != EG_OK) flow->tokens = 0;
  mark_hidden(flow, &m);
  mark_live(flow, &m);
  find_parts(flow, &m);
  if (flow->logits == 0 || graph->values[flow->logits].kind != EGI_VALUE_NODE) return EG_OK;
  find_dominators(flow);
  flow->head = find_head(flow);
  find_layers(flow);
  return EG_OK;
}
