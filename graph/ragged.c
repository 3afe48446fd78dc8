/* Reads the attributes of engraft.RaggedLinear and RaggedLinearGrad. */
#include "graph/ragged.h"

#include <string.h>

static eg_status read_roles(const egi_graph *graph, egi_node_id id, egi_ragged *ragged) {
  const egi_node *node = &graph->nodes[id];
  uint32_t n_roles = 0, next = EGI_RAGGED_FIRST_ROLE;
  const int64_t *roles = egi_node_ints(node, "roles", &n_roles);
  for (uint32_t i = 0; i < EGI_RAGGED_ROLES; i++) {
    int64_t count = i < n_roles ? roles[i] : 0;
    if (count != 0 && count != 1 && count != ragged->n_experts)
      return egi_fail_node(graph, id, EG_ERROR_FORMAT, "%lld inputs for a role of %lld experts", (long long)count,
                           (long long)ragged->n_experts);
    ragged->counts[i] = (uint32_t)count;
    ragged->first[i] = next;
    next += (uint32_t)count;
  }
  ragged->n_inputs = next;
  if (ragged->counts[EGI_RAGGED_WEIGHT] == 0)
    return egi_fail_node(graph, id, EG_ERROR_FORMAT, "the matrices of its experts are missing");
  if ((ragged->counts[EGI_RAGGED_SCALES] > 0) != ragged->is_quantised)
    return egi_fail_node(graph, id, EG_ERROR_FORMAT,
                         "scales are for matrices that are stored packed, and needed there");
  if (node->n_inputs != next)
    return egi_fail_node(graph, id, EG_ERROR_FORMAT, "%u inputs, its roles say %u", node->n_inputs, next);
  for (uint32_t i = EGI_RAGGED_FIRST_ROLE; i < next; i++)
    if (node->inputs[i] == 0) return egi_fail_node(graph, id, EG_ERROR_FORMAT, "input %u is missing", i);
  return EG_OK;
}

eg_status egi_ragged_read(const egi_graph *graph, egi_node_id id, egi_ragged *out_ragged) {
  const egi_node *node = &graph->nodes[id];
  const char *storage = egi_node_string(node, "storage", "plain");
  *out_ragged = (egi_ragged){.n_experts = egi_node_int(node, "experts", 0),
                             .in_features = egi_node_int(node, "in_features", 0),
                             .alpha = (double)egi_node_float(node, "alpha", 1.0f),
                             .is_transposed = egi_node_int(node, "transposed", 0) != 0,
                             .is_loop = egi_node_int(node, "loop", 0) != 0,
                             .is_quantised = strcmp(storage, "nbits") == 0 || strcmp(storage, "bnb4") == 0,
                             .has_levels = strcmp(storage, "bnb4") == 0,
                             .quant_type = egi_node_int(node, "quant_type", 1),
                             .bits = egi_node_int(node, "bits", 4),
                             .block_size = egi_node_int(node, "block_size", 0)};
  if (!out_ragged->is_quantised && strcmp(storage, "plain") != 0)
    return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "storage \"%s\" is not known", storage);
  bool is_small = out_ragged->n_experts <= EGI_MOE_MAX_EXPERTS && out_ragged->in_features <= EGI_MOE_MAX_SIZE &&
                  out_ragged->block_size <= EGI_MOE_MAX_SIZE;
  if (out_ragged->n_experts < 1 || out_ragged->in_features < 0 || !is_small)
    return egi_fail_node(graph, id, EG_ERROR_FORMAT, "%lld experts of %lld inputs", (long long)out_ragged->n_experts,
                         (long long)out_ragged->in_features);
  if (out_ragged->has_levels &&
      !egi_moe_has_sound_levels(out_ragged->bits, out_ragged->block_size, out_ragged->quant_type))
    return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "4-bit codes of quant_type %lld in blocks of %lld",
                         (long long)out_ragged->quant_type, (long long)out_ragged->block_size);
  bool is_width_known = out_ragged->bits == 2 || out_ragged->bits == 4 || out_ragged->bits == 8;
  if (out_ragged->is_quantised && (!is_width_known || out_ragged->block_size < 0))
    return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "weights of %lld bits in blocks of %lld",
                         (long long)out_ragged->bits, (long long)out_ragged->block_size);
  return read_roles(graph, id, out_ragged);
}

egi_ragged egi_moe_projection(const egi_moe *moe, egi_moe_role role, int64_t in_features) {
  const egi_moe_role roles[EGI_RAGGED_ROLES] = {role, (egi_moe_role)(role + 1),
                                                (egi_moe_role)(EGI_MOE_GATE_SCALES + role),
                                                (egi_moe_role)(EGI_MOE_GATE_ZEROS + role)};
  egi_ragged ragged = {.n_experts = moe->n_experts,
                       .in_features = in_features,
                       .alpha = 1.0,
                       .is_transposed = moe->is_transposed[role / 2],
                       .is_quantised = moe->is_quantised,
                       .has_levels = moe->has_levels,
                       .quant_type = moe->quant_type,
                       .bits = moe->bits,
                       .block_size = moe->block_size,
                       .n_inputs = moe->n_inputs};
  for (unsigned i = 0; i < EGI_RAGGED_ROLES; i++) {
    ragged.counts[i] = moe->counts[roles[i]];
    ragged.first[i] = moe->first[roles[i]];
  }
  return ragged;
}
