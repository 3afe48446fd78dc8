/* The structure of a language model: sizes, kinds and counts of what its recognised graph computes, the same for every
 * file of one model, whoever wrote it. Read off the flow of hidden values and the operators on its way; names of
 * modules serve to count layers alone. Linear in the graph. */
#include <string.h>

#include "passes/structure.h"

enum { ROLE_QUERY = 1, ROLE_KEY = 2, ROLE_VALUE = 4, ROLE_GATE = 8, ROLE_UP = 16, ROLE_ROUTER = 32 };

typedef struct reader {
  egi_flow flow;
  egi_structure *out;
  egi_node_id *left;   /* nodes that are not recognised */
  uint8_t *roles;      /* by node: what a linear layer's results are for */
  egi_value_id *bases; /* by value: what it is a function of, element by element */
  bool *is_curved;     /* by value: some function of it is no multiple and no sum with a number */
} reader;

static const egi_value *input_of(const reader *r, const egi_node *node, unsigned index) {
  return &r->flow.graph->values[index < node->n_inputs ? node->inputs[index] : 0];
}

static int64_t size_of(const reader *r, const egi_value *value, int axis) {
  egi_dims *dims = r->flow.graph->module->dims;
  int64_t size = 0;
  if (axis < 0) axis += value->rank;
  if (value->kind == EGI_VALUE_NONE || axis < 0 || axis >= value->rank) return 0;
  return egi_dim_value(dims, egi_dim_resolve(dims, value->dims[axis]), &size) ? size : 0;
}

/* ---- attention ------------------------------------------------------------------------------------------------ */

/* Heads of the keys before they are repeated: Reshape of Expand of Unsqueeze. */
static int64_t count_kv_heads(const reader *r, const egi_node *attention) {
  const egi_graph *graph = r->flow.graph;
  const egi_value *key = input_of(r, attention, 1), *value = key;
  for (int hop = 0; hop < 2 && value->kind == EGI_VALUE_NODE; hop++) {
    const egi_node *node = &graph->nodes[value->producer];
    value = input_of(r, node, 0);
    if (node->op == EGI_OP_Expand && value->rank == 5 && size_of(r, value, 2) == 1) return size_of(r, value, 1);
    if (node->op != EGI_OP_Reshape) break;
  }
  return size_of(r, key, 1);
}

static int64_t window_of(const egi_node *node) {
  if (node->op == EGI_OP_MaskedAttention) return egi_node_int(node, "window", 0);
  int64_t left = egi_node_int(node, "left_window_size", -1);
  return left >= 0 ? left + 1 : 0;
}

/* Sizes from the first attention; they are the same in all of them, but for models that say so by their windows. */
static void read_heads(reader *r, const egi_node *node) {
  egi_structure *s = r->out;
  const egi_value *query = input_of(r, node, 0);
  if (s->heads != 0) return;
  bool is_flat = query->rank == 3;
  s->heads = is_flat ? egi_node_int(node, "q_num_heads", 0) : size_of(r, query, 1);
  s->kv_heads = is_flat ? egi_node_int(node, "kv_num_heads", 0) : count_kv_heads(r, node);
  s->head_dim = size_of(r, query, -1);
  if (is_flat && s->heads > 0) s->head_dim /= s->heads;
}

static void read_rope(reader *r, egi_node_id id) {
  egi_structure *s = r->out;
  const egi_node *node = &r->flow.graph->nodes[id];
  s->counts.rope++;
  if (s->rope_dim != 0) return;
  s->rope_dim = egi_node_int(node, "rotary_embedding_dim", 0);
  int64_t heads = egi_node_int(node, "num_heads", 0), width = size_of(r, input_of(r, node, 0), -1);
  bool is_flat = input_of(r, node, 0)->rank == 3;
  if (s->rope_dim == 0) s->rope_dim = is_flat && heads > 0 ? width / heads : width;
  s->is_rope_interleaved = egi_node_int(node, "interleaved", 0) != 0;
}

static void read_attention(reader *r, egi_node_id id) {
  static const uint8_t roles[] = {ROLE_QUERY, ROLE_KEY, ROLE_VALUE};
  const egi_node *node = &r->flow.graph->nodes[id];
  egi_structure *s = r->out;
  if (node->op != EGI_OP_LinearAttention) {
    read_heads(r, node);
    s->windows[s->n_windows++] = window_of(node);
    if (!(s->softcap > 0.0)) s->softcap = (double)egi_node_float(node, "softcap", 0.0f);
    if (node->op == EGI_OP_MaskedAttention && node->n_inputs > 4 && node->inputs[4] != 0) s->has_sinks = true;
  }
  for (unsigned i = 0; i < 3 && i < node->n_inputs; i++) {
    egi_trace trace = egi_flow_trace(&r->flow, node->inputs[i]);
    r->roles[trace.linear] |= roles[i];
    if (trace.rope != 0) read_rope(r, trace.rope);
    if (i < 2 && trace.has_norm && trace.linear != 0) s->has_qk_norm = true;
  }
}

/* ---- the rest ------------------------------------------------------------------------------------------------- */

static void read_glu(reader *r, egi_node_id id) {
  const egi_node *node = &r->flow.graph->nodes[id];
  for (unsigned i = 0; i < 2 && i < node->n_inputs; i++)
    r->roles[egi_flow_trace(&r->flow, node->inputs[i]).linear] |= i == 0 ? ROLE_GATE : ROLE_UP;
}

static void read_moe(reader *r, egi_node_id id) {
  const egi_node *node = &r->flow.graph->nodes[id];
  if (node->n_inputs < 2) return;
  r->roles[egi_flow_trace(&r->flow, node->inputs[1]).linear] |= ROLE_ROUTER;
  if (r->out->experts != 0) return;
  r->out->experts = size_of(r, input_of(r, node, 1), -1);
  r->out->top_k = egi_node_int(node, "top_k", 0);
}

/* One layer of the model for each thing that its results are used as: a fused qkv is three. */
static uint32_t count_linear(uint8_t roles) {
  uint32_t count = 0;
  if (roles & ROLE_ROUTER) return 0;
  for (uint8_t bit = ROLE_QUERY; bit <= ROLE_UP; bit = (uint8_t)(bit << 1)) count += (roles & bit) != 0;
  return count > 0 ? count : 1;
}

static bool is_number(const reader *r, egi_value_id value) {
  const egi_value *row = &r->flow.graph->values[value];
  for (int i = 0; i < row->rank; i++)
    if (size_of(r, row, i) != 1) return false;
  return row->rank >= 0;
}

/* Whether the node makes of one value another, element by element, with numbers besides. */
static egi_value_id base_of(const reader *r, const egi_node *node) {
  egi_value_id base = 0;
  if (!(egi_op_get(node->op)->flags & EGI_OP_ELEMENTWISE)) return 0;
  for (unsigned i = 0; i < node->n_inputs; i++) {
    egi_value_id input = node->inputs[i];
    bool is_made = r->flow.is_hidden[input] || r->bases[input] != input; /* or a condition on such a value */
    if (input == 0 || (!is_made && is_number(r, input))) continue;
    if (!is_made || (base != 0 && base != r->bases[input])) return 0;
    base = r->bases[input];
  }
  return base;
}

static bool is_straight(const reader *r, const egi_node *node) {
  switch (node->op) {
  case EGI_OP_Add:
  case EGI_OP_Sub:
  case EGI_OP_Mul:
  case EGI_OP_Div:
    return egi_flow_only_input(&r->flow, node) != 0 && node->inputs[0] != node->inputs[1] &&
           r->flow.is_hidden[node->inputs[0]];
  case EGI_OP_Neg:
  case EGI_OP_Cast:
  case EGI_OP_Identity:
    return true;
  default:
    return false;
  }
}

static void find_functions(reader *r) {
  const egi_graph *graph = r->flow.graph;
  for (egi_value_id v = 0; v < graph->n_values; v++) r->bases[v] = v;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    egi_value_id base = node->op != EGI_OP_NONE ? base_of(r, node) : 0;
    if (base == 0) continue;
    if (!is_straight(r, node)) r->is_curved[base] = true;
    for (unsigned i = 0; i < node->n_outputs; i++)
      if (node->outputs[i] != 0) r->bases[node->outputs[i]] = base;
  }
}

/* Neither a residual add nor part of a plain activation. */
static bool is_left(const reader *r, const egi_node *node) {
  egi_value_id base = base_of(r, node);
  if (base != 0 && r->is_curved[base]) return false;
  bool is_sum = node->op == EGI_OP_Add && r->flow.is_hidden[node->inputs[0]] && r->flow.is_hidden[node->inputs[1]];
  return !is_sum || base != 0;
}

static void read_node(reader *r, egi_node_id id) {
  egi_structure_counts *counts = &r->out->counts;
  switch (r->flow.parts[id]) {
  case EGI_PART_NORM:
    counts->norm++;
    break;
  case EGI_PART_ATTENTION:
    counts->attention++;
    break;
  case EGI_PART_GLU:
    counts->glu++;
    break;
  case EGI_PART_MOE:
    counts->moe++;
    break;
  case EGI_PART_LINEAR:
    counts->linear += count_linear(r->roles[id]);
    break;
  case EGI_PART_OTHER:
    if (id > r->flow.first && id <= r->flow.last && is_left(r, &r->flow.graph->nodes[id]))
      r->left[counts->other++] = id;
    break;
  default:
    break;
  }
}

/* ---- layers --------------------------------------------------------------------------------------------------- */

/* Length of "model.layers." in "model.layers.12.self_attn", 0 when no segment is a number. */
static size_t list_length(const char *scope) {
  for (const char *at = scope; at != NULL && *at != '\0'; at++) {
    size_t digits = strspn(at, "0123456789");
    bool is_start = at == scope || at[-1] == '.';
    if (is_start && digits > 0 && (at[digits] == '.' || at[digits] == '\0')) return (size_t)(at - scope);
  }
  return 0;
}

/* Entries of the list of modules that attention stands in; without names, attentions. */
static eg_status count_layers(reader *r) {
  const egi_graph *graph = r->flow.graph;
  const char *list = NULL;
  egi_map seen;
  r->out->layers = r->out->counts.attention;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    if (r->flow.parts[id] != EGI_PART_ATTENTION) continue;
    if (list_length(graph->nodes[id].scope) == 0) return EG_OK;
    if (list == NULL) list = graph->nodes[id].scope;
  }
  if (list == NULL) return EG_OK;
  size_t length = list_length(list);
  egi_map_init(&seen, r->flow.arena);
  for (egi_node_id id = r->flow.first + 1; id <= r->flow.last && id < graph->n_nodes; id++) {
    const char *scope = graph->nodes[id].scope;
    if (r->flow.parts[id] == EGI_PART_NONE || scope == NULL || strncmp(scope, list, length) != 0) continue;
    const char *number = egi_arena_copy_text(r->flow.arena, scope + length, strspn(scope + length, "0123456789"));
    if (number == NULL) return EG_ERROR_MEMORY;
    if (number[0] != '\0') EG_TRY(egi_map_put(&seen, number, 1));
  }
  r->out->layers = seen.count;
  return EG_OK;
}

static void read_ends(reader *r) {
  const egi_graph *graph = r->flow.graph;
  egi_structure *s = r->out;
  if (r->flow.embedding != 0) s->hidden = size_of(r, &graph->values[graph->nodes[r->flow.embedding].outputs[0]], -1);
  if (r->flow.head == 0) return;
  egi_value_id input = egi_flow_only_input(&r->flow, &graph->nodes[r->flow.head]);
  if (input != 0 && size_of(r, &graph->values[input], -1) != 0) s->hidden = size_of(r, &graph->values[input], -1);
  s->vocab = size_of(r, &graph->values[r->flow.logits], -1);
  s->is_tied = egi_probe_is_tied(&r->flow);
}

eg_status egi_structure_find(const egi_graph *graph, egi_arena *arena, egi_structure *out_structure) {
  reader r = {.out = out_structure};
  *out_structure = (egi_structure){0};
  EG_TRY(egi_flow_find(graph, arena, &r.flow));
  r.roles = EGI_NEW(arena, uint8_t, graph->n_nodes);
  out_structure->left = r.left = EGI_NEW(arena, egi_node_id, graph->n_nodes);
  r.bases = EGI_NEW(arena, egi_value_id, graph->n_values);
  r.is_curved = EGI_NEW(arena, bool, graph->n_values);
  out_structure->windows = EGI_NEW(arena, int64_t, graph->n_nodes);
  if (!r.left || !r.roles || !r.bases || !r.is_curved || !out_structure->windows) return EG_ERROR_MEMORY;
  find_functions(&r);
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    if (r.flow.parts[id] == EGI_PART_ATTENTION) read_attention(&r, id);
    if (r.flow.parts[id] == EGI_PART_GLU) read_glu(&r, id);
    if (r.flow.parts[id] == EGI_PART_MOE) read_moe(&r, id);
  }
  for (egi_node_id id = 1; id < graph->n_nodes; id++) read_node(&r, id);
  if (out_structure->counts.rope > 0) out_structure->n_rope_tables = egi_probe_rope_tables(&r.flow);
  read_ends(&r);
  return count_layers(&r);
}
