/* Lowering of com.microsoft's MoE and QMoE onto engraft.MoE, held against onnxruntime's CPU kernels (gelu is the
 * approximation by tanh there). fc1 is gate (or gate and up together), fc3 is up, fc2 is
 * down; weights are [E, N, K], packed ones raw, as onnxruntime's CPU kernels read them. Weights that were laid out anew
 * for one device cannot be read, and are known by their shapes or by their attribute. */
#include <string.h>

#include "graph/moe.h"
#include "passes/lower.h"

typedef struct experts {
  egi_value_id values[EGI_MOE_ROLES];
  int64_t n_experts, width, rows; /* rows of fc1 */
  int64_t bits, block_size;       /* bits 0: plain */
  egi_moe_form form;
  egi_moe_activation activation;
} experts;

static eg_status fail(const egi_lowering *lowering, const char *reason) {
  return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, reason);
}

/* ---- attributes ----------------------------------------------------------------------------------------------- */

static eg_status read_activation(const egi_lowering *lowering, bool has_up, experts *e) {
  static const struct {
    const char *name;
    egi_moe_activation activation;
    bool is_gated;
  } known[] = {{"relu", EGI_MOE_RELU, false},  {"gelu", EGI_MOE_GELU_TANH, false},
               {"silu", EGI_MOE_SILU, false},  {"identity", EGI_MOE_IDENTITY, false},
               {"swiglu", EGI_MOE_SILU, true}, {"geglu", EGI_MOE_GELU_TANH, true}};
  const char *name = egi_node_string(lowering->node, "activation_type", "relu");
  int64_t fusion = egi_node_int(lowering->node, "swiglu_fusion", 0);
  size_t i = 0;
  while (i < EGI_COUNT(known) && strcmp(known[i].name, name) != 0) i++;
  if (i == EGI_COUNT(known)) return fail(lowering, "its activation_type is not known");
  e->activation = known[i].activation;
  e->form = has_up ? EGI_MOE_SEPARATE : EGI_MOE_UNGATED;
  if (!known[i].is_gated) return EG_OK;
  if (fusion == 0) return has_up ? EG_OK : fail(lowering, "swiglu that is not fused needs fc3");
  if (has_up || fusion < 0 || fusion > 2) return fail(lowering, "its swiglu_fusion does not fit its inputs");
  e->form = fusion == 1 ? EGI_MOE_INTERLEAVED : EGI_MOE_CONCATENATED;
  return EG_OK;
}

static eg_status check_attributes(const egi_lowering *lowering) {
  const egi_node *node = lowering->node;
  if (egi_node_int(node, "use_sparse_mixer", 0) != 0) return fail(lowering, "use_sparse_mixer is not supported");
  if (egi_node_int(node, "swiglu_limit_after_activation", 0) != 0)
    return fail(lowering, "swiglu_limit_after_activation is not supported");
  return EG_OK;
}

/* ---- packed weights ------------------------------------------------------------------------------------------- */

static eg_status read_packing(const egi_lowering *lowering, experts *e) {
  static const char *const overrides[] = {"fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits"};
  const egi_node *node = lowering->node;
  if (strcmp(egi_node_string(node, "quant_type", "int"), "int") != 0)
    return fail(lowering, "its quant_type is not supported, only \"int\" is");
  if (egi_node_int(node, "weights_prepacked", -1) > 0)
    return fail(lowering, "its weights are prepacked for one device (weights_prepacked); export them raw");
  e->bits = egi_node_int(node, "expert_weight_bits", 4);
  e->block_size = egi_node_int(node, "block_size", 0);
  for (size_t i = 0; i < EGI_COUNT(overrides); i++)
    if (egi_node_int(node, overrides[i], e->bits) != e->bits)
      return fail(lowering, "its matrices differ in their number of bits");
  if (e->bits != 2 && e->bits != 4 && e->bits != 8) return fail(lowering, "its expert_weight_bits are not 2, 4 or 8");
  for (unsigned i = 15; i < 21; i++)
    if (egi_lowering_input(lowering, i) != 0) return fail(lowering, "global and activation scales are not supported");
  return EG_OK;
}

/* [E, N, bytes of K numbers] */
static bool is_raw(const egi_lowering *lowering, egi_value_id value, int64_t n, int64_t k, int64_t bits) {
  int64_t rows = 0, bytes = 0;
  if (egi_lowering_value(lowering, value)->rank != 3) return false;
  return egi_lowering_size(lowering, value, 1, &rows) && egi_lowering_size(lowering, value, 2, &bytes) && rows == n &&
         bytes == (bits > 0 ? (k * bits + 7) / 8 : k);
}

/* Scales and zero points of whole rows have no axis of blocks. */
static eg_status add_block_axis(egi_lowering *lowering, egi_value_id *value, const experts *e, bool is_packed) {
  static const int64_t last = 2;
  if (*value == 0 || egi_lowering_value(lowering, *value)->rank != 2) return EG_OK;
  if (is_packed && e->bits != 8) return fail(lowering, "zero points that are packed over rows are not supported");
  *value = egi_emit_axes(&lowering->emit, EGI_OP_Unsqueeze, *value, &last, 1);
  return lowering->emit.status;
}

/* ---- the node ------------------------------------------------------------------------------------------------- */

static eg_status check_shapes(const egi_lowering *lowering, experts *e) {
  egi_value_id x = egi_lowering_input(lowering, 0), logits = egi_lowering_input(lowering, 1);
  int x_rank = egi_lowering_value(lowering, x)->rank, rank = egi_lowering_value(lowering, logits)->rank;
  egi_value_id gate = e->values[EGI_MOE_GATE];
  if (e->values[EGI_MOE_DOWN] == 0) return fail(lowering, "it has no second matrices");
  bool is_known = x_rank > 0 && rank > 0 && egi_lowering_value(lowering, gate)->rank == 3 &&
                  egi_lowering_size(lowering, x, x_rank - 1, &e->width) &&
                  egi_lowering_size(lowering, logits, rank - 1, &e->n_experts);
  if (!is_known) return fail(lowering, "the sizes of its experts are not known");
  if (!egi_lowering_size(lowering, gate, 1, &e->rows)) return fail(lowering, "the sizes of its experts are not known");
  bool is_joint = e->form == EGI_MOE_INTERLEAVED || e->form == EGI_MOE_CONCATENATED;
  int64_t inner = is_joint ? e->rows / 2 : e->rows;
  bool fits = is_raw(lowering, gate, e->rows, e->width, e->bits) &&
              is_raw(lowering, e->values[EGI_MOE_DOWN], e->width, inner, e->bits);
  if (fits) return EG_OK;
  return fail(lowering, e->bits > 0 ? "its weights are prepacked for one device: their shapes are not [experts, N, K]"
                                    : "its weights are not [experts, N, K]");
}

static egi_value_id emit_moe(egi_lowering *lowering, const experts *e, egi_value_id logits, bool is_before,
                             bool is_normalised) {
  const egi_node *node = lowering->node;
  egi_value_id inputs[EGI_MOE_FIRST_ROLE + EGI_MOE_ROLES] = {egi_lowering_input(lowering, 0), logits, 0};
  int64_t roles[EGI_MOE_ROLES] = {0};
  unsigned n_inputs = EGI_MOE_FIRST_ROLE, n = 0;
  egi_attribute attributes[16];
  bool is_gated = e->form != EGI_MOE_UNGATED;
  for (unsigned i = 0; i < EGI_MOE_ROLES; i++) {
    roles[i] = e->values[i] != 0;
    if (e->values[i] != 0) inputs[n_inputs++] = e->values[i];
  }
  attributes[n++] = egi_attribute_int("experts", e->n_experts);
  attributes[n++] = egi_attribute_int("top_k", egi_node_int(node, "k", 1));
  attributes[n++] = egi_attribute_string("scoring", "softmax");
  attributes[n++] = egi_attribute_string("order", is_before ? "before" : "after");
  attributes[n++] = egi_attribute_int("normalise", is_normalised);
  attributes[n++] = egi_attribute_string("activation", egi_moe_activation_name(e->activation));
  attributes[n++] = egi_attribute_string("gate_up", egi_moe_form_name(e->form));
  attributes[n++] = egi_attribute_ints("roles", roles, EGI_MOE_ROLES);
  if (is_gated && strcmp(egi_node_string(node, "activation_type", ""), "swiglu") == 0) {
    attributes[n++] = egi_attribute_float("alpha", egi_node_float(node, "activation_alpha", 1.0f));
    attributes[n++] = egi_attribute_float("limit", egi_node_float(node, "swiglu_limit", 0.0f));
    attributes[n++] = egi_attribute_float("offset", egi_node_float(node, "activation_beta", 0.0f));
  }
  if (e->bits > 0) {
    attributes[n++] = egi_attribute_string("storage", "nbits");
    attributes[n++] = egi_attribute_int("bits", e->bits);
    attributes[n++] = egi_attribute_int("block_size", e->block_size > 0 ? e->block_size : 0);
  }
  return egi_emit(&lowering->emit, EGI_OP_MoE, inputs, n_inputs, attributes, n);
}

/* With `router_weights` the logits only choose: softmax over the logarithms of the chosen weights gives these divided
 * by their sum, which the result is multiplied by where they are not to be normalised. */
static egi_value_id emit_weighted(egi_lowering *lowering, const experts *e, egi_value_id weights, bool is_normalised) {
  static const int64_t last = -1;
  egi_emitter *emit = &lowering->emit;
  egi_value_id logits = egi_lowering_input(lowering, 1), chosen[2] = {0, 0};
  const int64_t k = egi_node_int(lowering->node, "k", 1);
  const egi_attribute axis = egi_attribute_int("axis", 1);
  const egi_value_id choice[2] = {logits, egi_emit_integers(emit, &k, 1)};
  egi_emit_many(emit, EGI_OP_TopK, choice, 2, NULL, 0, chosen, 2);
  const egi_value_id picked[2] = {weights, chosen[1]};
  egi_value_id shares = egi_emit(emit, EGI_OP_GatherElements, picked, 2, &axis, 1);
  eg_dtype dtype = egi_lowering_value(lowering, logits)->dtype;
  egi_value_id low = egi_emit_binary(emit, EGI_OP_Expand, egi_emit_scalar(emit, -1e30, dtype),
                                     egi_emit_unary(emit, EGI_OP_Shape, logits));
  const egi_value_id scattered[3] = {low, chosen[1], egi_emit_unary(emit, EGI_OP_Log, shares)};
  egi_value_id y = emit_moe(lowering, e, egi_emit(emit, EGI_OP_ScatterElements, scattered, 3, &axis, 1), false, true);
  if (is_normalised) return y;
  egi_value_id sum = egi_emit_axes(emit, EGI_OP_ReduceSum, shares, &last, 1);
  egi_value_id shape = egi_emit_sizes(emit, egi_lowering_input(lowering, 0), 0, -1);
  const int64_t one = 1;
  const egi_value_id parts[2] = {shape, egi_emit_integers(emit, &one, 1)};
  egi_value_id rows = egi_emit_with_int(emit, EGI_OP_Concat, parts, 2, "axis", 0);
  return egi_emit_binary(emit, EGI_OP_Mul, y, egi_emit_binary(emit, EGI_OP_Reshape, sum, rows));
}

static eg_status lower(egi_lowering *lowering, experts *e, egi_value_id weights) {
  bool is_normalised = egi_node_int(lowering->node, "normalize_routing_weights", 0) != 0;
  /* onnxruntime's QMoE (CPU, 1.32) scores the chosen experts alone whatever this attribute says. */
  if (e->bits > 0 && weights == 0) is_normalised = true;
  EG_TRY(check_attributes(lowering));
  EG_TRY(read_activation(lowering, e->values[EGI_MOE_UP] != 0, e));
  EG_TRY(check_shapes(lowering, e));
  lowering->results[0] = weights != 0 ? emit_weighted(lowering, e, weights, is_normalised)
                                      : emit_moe(lowering, e, egi_lowering_input(lowering, 1), true, is_normalised);
  return EG_OK;
}

eg_status egi_lower_moe(egi_lowering *lowering) {
  static const egi_moe_role roles[] = {EGI_MOE_GATE,      EGI_MOE_GATE_BIAS, EGI_MOE_DOWN,
                                       EGI_MOE_DOWN_BIAS, EGI_MOE_UP,        EGI_MOE_UP_BIAS};
  experts e = {.bits = 0};
  for (unsigned i = 0; i < EGI_COUNT(roles); i++) e.values[roles[i]] = egi_lowering_input(lowering, 2 + i);
  return lower(lowering, &e, 0);
}

eg_status egi_lower_quantised_moe(egi_lowering *lowering) {
  static const egi_moe_role roles[] = {EGI_MOE_GATE,        EGI_MOE_GATE_SCALES, EGI_MOE_GATE_BIAS,  EGI_MOE_DOWN,
                                       EGI_MOE_DOWN_SCALES, EGI_MOE_DOWN_BIAS,   EGI_MOE_UP,         EGI_MOE_UP_SCALES,
                                       EGI_MOE_UP_BIAS,     EGI_MOE_GATE_ZEROS,  EGI_MOE_DOWN_ZEROS, EGI_MOE_UP_ZEROS};
  experts e = {.bits = 4};
  EG_TRY(read_packing(lowering, &e));
  for (unsigned i = 0; i < EGI_COUNT(roles); i++) {
    egi_value_id value = egi_lowering_input(lowering, 2 + i);
    e.values[roles[i]] = value;
    if (roles[i] < EGI_MOE_GATE_SCALES) continue;
    EG_TRY(add_block_axis(lowering, &e.values[roles[i]], &e, roles[i] % 2 == 1));
  }
  return lower(lowering, &e, egi_lowering_input(lowering, 14));
}
