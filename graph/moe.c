/* Reads the attributes of engraft.MoE. */
#include <string.h>

#include "graph/moe.h"

static const char *const activations[EGI_MOE_ACTIVATIONS] = {"silu", "gelu",    "gelu_tanh",
                                                             "relu", "sigmoid", "identity"};
static const char *const forms[] = {"concatenated", "interleaved", "separate", "none"};

const char *egi_moe_activation_name(egi_moe_activation activation) {
  return activations[activation];
}

const char *egi_moe_form_name(egi_moe_form form) {
  return forms[form];
}

static eg_status read_choice(const egi_graph *graph, egi_node_id id, const char *attribute, const char *const *texts,
                             size_t count, unsigned *out_index) {
  const char *text = egi_node_string(&graph->nodes[id], attribute, texts[0]);
  for (size_t i = 0; i < count; i++) {
    if (strcmp(texts[i], text) != 0) continue;
    *out_index = (unsigned)i;
    return EG_OK;
  }
  return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "%s \"%s\" is not known", attribute, text);
}

eg_status egi_moe_read_router(const egi_graph *graph, egi_node_id id, egi_moe *moe) {
  static const char *const scorings[] = {"softmax", "sigmoid"}, *const orders[] = {"before", "after"},
                           *const group_scores[] = {"top2", "best"};
  const egi_node *node = &graph->nodes[id];
  unsigned scoring = 0, order = 0, group_score = 0;
  *moe = (egi_moe){0};
  int64_t n_experts = moe->n_experts = egi_node_int(node, "experts", 0);
  EG_TRY(read_choice(graph, id, "scoring", scorings, 2, &scoring));
  EG_TRY(read_choice(graph, id, "order", orders, 2, &order));
  EG_TRY(read_choice(graph, id, "group_score", group_scores, 2, &group_score));
  moe->is_sigmoid = scoring == 1;
  moe->is_scored_before = order == 0;
  moe->is_group_best = group_score == 1;
  moe->top_k = egi_node_int(node, "top_k", 1);
  moe->is_normalised = egi_node_int(node, "normalise", 0) != 0;
  moe->routed_scale = (double)egi_node_float(node, "routed_scale", 1.0f);
  moe->groups = egi_node_int(node, "groups", 1);
  moe->top_groups = egi_node_int(node, "top_groups", moe->groups);
  if (moe->groups < 1 || moe->top_groups < 1 || moe->top_groups > moe->groups || n_experts % moe->groups != 0)
    return egi_fail_node(graph, id, EG_ERROR_FORMAT, "%lld groups do not share %lld experts", (long long)moe->groups,
                         (long long)n_experts);
  if (moe->top_k < 1 || moe->top_k > n_experts || n_experts > EGI_MOE_MAX_EXPERTS)
    return egi_fail_node(graph, id, EG_ERROR_FORMAT, "top_k %lld of %lld experts", (long long)moe->top_k,
                         (long long)n_experts);
  return EG_OK;
}

static eg_status read_adapters(const egi_graph *graph, egi_node_id id, egi_moe *moe) {
  const egi_attribute *scales = egi_node_attribute(&graph->nodes[id], "adapter_scales");
  bool has_scales = scales != NULL && scales->kind == EGI_ATTRIBUTE_FLOATS && scales->count == 3;
  for (uint32_t i = 0; i < 3; i++) {
    uint32_t a = moe->counts[EGI_MOE_GATE_A + 2 * i], b = moe->counts[EGI_MOE_GATE_B + 2 * i];
    if (a != b || a > 1 || (a == 1 && (moe->counts[2 * i] == 0 || !has_scales)))
      return egi_fail_node(graph, id, EG_ERROR_FORMAT, "its adapters are not whole");
    moe->adapter_scales[i] = has_scales ? (double)scales->u.floats[i] : 0.0;
  }
  return EG_OK;
}

static eg_status read_roles(const egi_graph *graph, egi_node_id id, egi_moe *moe) {
  int64_t n_experts = moe->n_experts;
  const egi_node *node = &graph->nodes[id];
  uint32_t n_roles = 0, n_transposed = 0, next = EGI_MOE_FIRST_ROLE;
  const int64_t *roles = egi_node_ints(node, "roles", &n_roles);
  const int64_t *transposed = egi_node_ints(node, "transposed", &n_transposed);
  for (uint32_t i = 0; i < EGI_MOE_ROLES; i++) {
    int64_t count = i < n_roles ? roles[i] : 0;
    if (count != 0 && count != 1 && count != n_experts)
      return egi_fail_node(graph, id, EG_ERROR_FORMAT, "%lld inputs for a role of %lld experts", (long long)count,
                           (long long)n_experts);
    moe->counts[i] = (uint32_t)count;
    moe->first[i] = next;
    next += (uint32_t)count;
  }
  for (uint32_t i = 0; i < 3; i++) moe->is_transposed[i] = i < n_transposed && transposed[i] != 0;
  EG_TRY(read_adapters(graph, id, moe));
  moe->n_inputs = next;
  bool is_separate = moe->form == EGI_MOE_SEPARATE;
  if (moe->counts[EGI_MOE_GATE] == 0 || moe->counts[EGI_MOE_DOWN] == 0 || (moe->counts[EGI_MOE_UP] != 0) != is_separate)
    return egi_fail_node(graph, id, EG_ERROR_FORMAT, "matrices of its experts are missing");
  if (node->n_inputs != next)
    return egi_fail_node(graph, id, EG_ERROR_FORMAT, "%u inputs, its roles say %u", node->n_inputs, next);
  for (uint32_t i = EGI_MOE_FIRST_ROLE; i < next; i++)
    if (node->inputs[i] == 0) return egi_fail_node(graph, id, EG_ERROR_FORMAT, "input %u is missing", i);
  return EG_OK;
}

bool egi_moe_has_sound_levels(int64_t bits, int64_t block_size, int64_t quant_type) {
  return bits == 4 && block_size >= 1 && block_size <= INT32_MAX && (quant_type == 0 || quant_type == 1);
}

eg_status egi_moe_read(const egi_graph *graph, egi_node_id id, egi_moe *out_moe) {
  static const char *const storages[] = {"plain", "nbits", "bnb4"};
  const egi_node *node = &graph->nodes[id];
  unsigned activation = 0, form = 0, storage = 0;
  EG_TRY(egi_moe_read_router(graph, id, out_moe));
  EG_TRY(read_choice(graph, id, "activation", activations, EGI_COUNT(activations), &activation));
  EG_TRY(read_choice(graph, id, "gate_up", forms, EGI_COUNT(forms), &form));
  EG_TRY(read_choice(graph, id, "storage", storages, 3, &storage));
  out_moe->activation = (egi_moe_activation)activation;
  out_moe->form = (egi_moe_form)form;
  out_moe->alpha = (double)egi_node_float(node, "alpha", 1.0f);
  out_moe->limit = (double)egi_node_float(node, "limit", 0.0f);
  out_moe->offset = (double)egi_node_float(node, "offset", 0.0f);
  out_moe->is_quantised = storage > 0;
  out_moe->has_levels = storage == 2;
  out_moe->quant_type = egi_node_int(node, "quant_type", 1);
  out_moe->bits = egi_node_int(node, "bits", 4);
  out_moe->block_size = egi_node_int(node, "block_size", 0);
  if (out_moe->has_levels && !egi_moe_has_sound_levels(out_moe->bits, out_moe->block_size, out_moe->quant_type))
    return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "4-bit codes of quant_type %lld in blocks of %lld",
                         (long long)out_moe->quant_type, (long long)out_moe->block_size);
  bool is_width_known = out_moe->bits == 2 || out_moe->bits == 4 || out_moe->bits == 8;
  if (out_moe->is_quantised && (!is_width_known || out_moe->block_size < 0 || out_moe->block_size > EGI_MOE_MAX_SIZE))
    return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "weights of %lld bits in blocks of %lld",
                         (long long)out_moe->bits, (long long)out_moe->block_size);
  return read_roles(graph, id, out_moe);
}
