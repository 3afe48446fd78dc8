/* Equal nodes with equal inputs become one, the first; so do constants with equal bytes, small ones only. Parameters
 * are never merged, nor are linear layers of them: two modules with equal weights train apart. Nodes with effects and
 * Barriers stay. Precondition: execution order. Ends after one sweep, which also is the fixed point. */
#include <string.h>

#include "passes/passes.h"

static const uint64_t max_constant_bytes = 4096;

typedef struct merger {
  egi_pass_run *run;
  egi_graph *graph;
  egi_redirect redirect;
  uint32_t *slots;  /* open addressing: node or value ids, 0 empty */
  uint32_t n_slots; /* a power of two */
} merger;

static uint64_t mix(uint64_t hash, uint64_t word) {
  return egi_hash(&word, sizeof(word), hash);
}

static eg_status make_slots(merger *state, uint32_t count) {
  uint32_t n_slots = 16;
  while (n_slots / 2 < count && n_slots < (1u << 31)) n_slots *= 2;
  state->slots = EGI_NEW(&state->redirect.arena, uint32_t, n_slots);
  state->n_slots = n_slots;
  return state->slots ? EG_OK : EG_ERROR_MEMORY;
}

/* ---- constants ------------------------------------------------------------------------------------------------- */

/* Integers and booleans of any shape, floats of one element: nobody trains them. */
static bool is_mergeable_weight(const egi_graph *graph, egi_value_id id, egi_tensor *out_tensor, uint64_t *out_bytes) {
  if (!egi_value_constant(graph, id, out_tensor)) return false;
  int64_t count = egi_tensor_count(out_tensor);
  if (egi_dtype_is_float(out_tensor->dtype)) {
    if (count != 1 || egi_is_parameter_name(graph->module->weights[graph->values[id].index].name)) return false;
  }
  return egi_dtype_bytes(out_tensor->dtype, (uint64_t)count, out_bytes) && *out_bytes <= max_constant_bytes;
}

static bool is_equal_tensor(const egi_tensor *a, const egi_tensor *b, uint64_t size_bytes) {
  if (a->dtype != b->dtype || a->rank != b->rank) return false;
  for (int i = 0; i < a->rank; i++) {
    if (a->dims[i] != b->dims[i]) return false;
  }
  return size_bytes == 0 || memcmp(a->data, b->data, (size_t)size_bytes) == 0;
}

static eg_status merge_weight(merger *state, egi_value_id id) {
  egi_graph *graph = state->graph;
  egi_tensor tensor, other;
  uint64_t size_bytes = 0, other_bytes = 0;
  if (graph->values[id].kind != EGI_VALUE_WEIGHT || egi_graph_is_output(graph, id)) return EG_OK;
  if (!is_mergeable_weight(graph, id, &tensor, &size_bytes)) return EG_OK;
  uint64_t hash = egi_hash(tensor.data, (size_t)size_bytes, mix((uint64_t)tensor.dtype, (uint64_t)tensor.rank));
  uint32_t slot = (uint32_t)hash & (state->n_slots - 1);
  for (; state->slots[slot] != 0; slot = (slot + 1) & (state->n_slots - 1)) {
    egi_value_id first = state->slots[slot];
    bool is_done = false;
    if (!is_mergeable_weight(graph, first, &other, &other_bytes) || other_bytes != size_bytes) continue;
    if (!is_equal_tensor(&tensor, &other, size_bytes)) continue;
    EG_TRY(egi_redirect_put(&state->redirect, id, first, &is_done));
    state->run->has_changed = state->run->has_changed || is_done;
    return EG_OK;
  }
  state->slots[slot] = id;
  return EG_OK;
}

/* ---- nodes ----------------------------------------------------------------------------------------------------- */

static bool is_mergeable(const egi_graph *graph, const egi_node *node) {
  if (node->op == EGI_OP_NONE || node->op == EGI_OP_UNKNOWN || node->op == EGI_OP_Barrier) return false;
  if (node->op == EGI_OP_Offload || node->op == EGI_OP_Reload || node->op == EGI_OP_Dropout) return false;
  if (egi_op_get(node->op)->flags & EGI_OP_EFFECT) return false;
  if (node->op == EGI_OP_Linear) return false; /* two modules of one weight stay two */
  if (node->op != EGI_OP_MatMul && node->op != EGI_OP_Gemm) return true;
  bool is_transposed = false;
  return egi_weight_below(graph, node->inputs[1], &is_transposed) == 0;
}

/* Inputs with the two of a commutative node in order of their ids. */
static egi_value_id input_at(const egi_node *node, unsigned i) {
  if (i < 2 && node->n_inputs >= 2 && (egi_op_get(node->op)->flags & EGI_OP_COMMUTATIVE)) {
    egi_value_id a = node->inputs[0], b = node->inputs[1];
    return (i == 0) == (a < b) ? a : b;
  }
  return node->inputs[i];
}

/* Bytes that an attribute's value consists of. */
static const void *attribute_bytes(const egi_attribute *attribute, size_t *out_size) {
  switch (attribute->kind) {
  case EGI_ATTRIBUTE_FLOAT:
    *out_size = sizeof(float);
    return &attribute->u.f;
  case EGI_ATTRIBUTE_INT:
    *out_size = sizeof(int64_t);
    return &attribute->u.i;
  case EGI_ATTRIBUTE_STRING:
    *out_size = attribute->count;
    return attribute->u.s;
  case EGI_ATTRIBUTE_FLOATS:
    *out_size = attribute->count * sizeof(float);
    return attribute->u.floats;
  case EGI_ATTRIBUTE_INTS:
    *out_size = attribute->count * sizeof(int64_t);
    return attribute->u.ints;
  case EGI_ATTRIBUTE_TENSOR:
    *out_size = sizeof(uint32_t);
    return &attribute->u.weight;
  case EGI_ATTRIBUTE_STRINGS:
  case EGI_ATTRIBUTE_GRAPH:
  case EGI_ATTRIBUTE_REFERENCE:
    break;
  }
  *out_size = 0; /* compared by the node's identity alone: never equal */
  return NULL;
}

static bool is_equal_attribute(const egi_attribute *a, const egi_attribute *b) {
  size_t a_size = 0, b_size = 0;
  const void *a_bytes = attribute_bytes(a, &a_size), *b_bytes = attribute_bytes(b, &b_size);
  if (!b_bytes || a->kind != b->kind || a_size != b_size) return false;
  return a_bytes && (a_size == 0 || memcmp(a_bytes, b_bytes, a_size) == 0);
}

/* The sum over attributes does not depend on their order. */
static uint64_t hash_node(const egi_node *node) {
  uint64_t hash = mix((uint64_t)node->op, (uint64_t)node->n_outputs), sum = 0;
  for (unsigned i = 0; i < node->n_inputs; i++) hash = mix(hash, input_at(node, i));
  for (unsigned i = 0; i < node->n_attributes; i++) {
    size_t size = 0;
    const void *bytes = attribute_bytes(&node->attributes[i], &size);
    uint64_t one = egi_hash(node->attributes[i].name, strlen(node->attributes[i].name), 0);
    sum += bytes ? egi_hash(bytes, size, one) : one;
  }
  return mix(hash, sum);
}

static bool is_equal_node(const egi_node *a, const egi_node *b) {
  if (a->op != b->op || a->n_inputs != b->n_inputs || a->n_outputs != b->n_outputs) return false;
  if (a->n_attributes != b->n_attributes) return false;
  for (unsigned i = 0; i < a->n_inputs; i++) {
    if (input_at(a, i) != input_at(b, i)) return false;
  }
  for (unsigned i = 0; i < a->n_outputs; i++) {
    if ((a->outputs[i] == 0) != (b->outputs[i] == 0)) return false;
  }
  for (unsigned i = 0; i < a->n_attributes; i++) {
    const egi_attribute *other = egi_node_attribute(b, a->attributes[i].name);
    if (!other || !is_equal_attribute(&a->attributes[i], other)) return false;
  }
  return true;
}

/* All results or none: two nodes that both give a graph output stay two. */
static eg_status merge_into(merger *state, egi_node_id id, egi_node_id first, bool *out_done) {
  egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[id], *kept = &graph->nodes[first];
  *out_done = false;
  for (unsigned i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] != 0 && state->redirect.is_output[node->outputs[i]] &&
        state->redirect.is_output[kept->outputs[i]])
      return EG_OK;
  }
  for (unsigned i = 0; i < node->n_outputs; i++) {
    bool is_done = false;
    if (node->outputs[i] != 0) EG_TRY(egi_redirect_put(&state->redirect, node->outputs[i], kept->outputs[i], &is_done));
  }
  egi_graph_remove_node(graph, id);
  *out_done = true;
  return EG_OK;
}

static eg_status merge_node(merger *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  egi_redirect_node(&state->redirect, id);
  if (!is_mergeable(graph, &graph->nodes[id])) return EG_OK;
  state->run->report->n_tried++;
  uint32_t slot = (uint32_t)hash_node(&graph->nodes[id]) & (state->n_slots - 1);
  for (; state->slots[slot] != 0; slot = (slot + 1) & (state->n_slots - 1)) {
    bool is_done = false;
    if (!is_equal_node(&graph->nodes[id], &graph->nodes[state->slots[slot]])) continue;
    EG_TRY(merge_into(state, id, state->slots[slot], &is_done));
    if (!is_done) continue;
    state->run->report->n_matched++;
    state->run->has_changed = true;
    return EG_OK;
  }
  state->slots[slot] = id;
  return EG_OK;
}

static eg_status merge_all(merger *state) {
  egi_graph *graph = state->graph;
  EG_TRY(egi_redirect_init(&state->redirect, graph));
  EG_TRY(make_slots(state, graph->n_values));
  for (egi_value_id id = 1; id < graph->n_values; id++) EG_TRY(merge_weight(state, id));
  EG_TRY(make_slots(state, graph->n_nodes));
  for (egi_node_id id = 1; id < graph->n_nodes; id++) EG_TRY(merge_node(state, id));
  egi_redirect_apply(&state->redirect);
  return EG_OK;
}

eg_status egi_pass_eliminate_common(egi_pass_run *run, egi_graph *graph) {
  merger state = {.run = run, .graph = graph};
  eg_status status = merge_all(&state);
  egi_redirect_free(&state.redirect);
  return status;
}
