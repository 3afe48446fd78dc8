/* What the attributes of engraft.MoE say, read once for shape rule, kernels, body and passes.
 *
 * Inputs: x [.., H], logits [.., E], correction_bias [E]?, then the operands of the experts by role, in the order of
 * egi_moe_role. Attribute `experts` is E; `roles` counts the inputs of each role: 0 (the experts have none), 1 (a stack
 * over the experts) or E (one input an expert). Of a stack [E, N, K] (or [E, K, N], where `transposed` says so for
 * gate, up and down) expert e has the matrix [N, K] of y = W·x + b. Rows of `gate` are those of gate and up together
 * unless both stand alone.
 *
 * The last six roles are adapters: to W of expert e is added scale · B_e·A_e, with the scale in `adapter_scales` (gate,
 * up, down), A [E·r, K] holding row k of expert e at e·r + k and B [N, r·E] its column k at k·E + e, as PEFT lays out
 * target_parameters.
 *
 * Storage bnb4: matrices are codes [N, K / 2] as graph/linear.h has them (quant_type, block_size), scales f32 [blocks]
 * of the flattened operand, matrix or stack; where scales are u8, the role of zero points is what decodes them. */
#ifndef ENGRAFT_GRAPH_MOE_H
#define ENGRAFT_GRAPH_MOE_H

#include "graph/graph.h"

/* Sizes above are taken for damage, so that sums and products of them stay numbers. */
#define EGI_MOE_MAX_EXPERTS 65536
#define EGI_MOE_MAX_SIZE ((int64_t)1 << 40)

typedef enum egi_moe_role {
  EGI_MOE_GATE,
  EGI_MOE_GATE_BIAS,
  EGI_MOE_UP,
  EGI_MOE_UP_BIAS,
  EGI_MOE_DOWN,
  EGI_MOE_DOWN_BIAS,
  EGI_MOE_GATE_SCALES,
  EGI_MOE_GATE_ZEROS,
  EGI_MOE_UP_SCALES,
  EGI_MOE_UP_ZEROS,
  EGI_MOE_DOWN_SCALES,
  EGI_MOE_DOWN_ZEROS,
  EGI_MOE_GATE_A,
  EGI_MOE_GATE_B,
  EGI_MOE_UP_A,
  EGI_MOE_UP_B,
  EGI_MOE_DOWN_A,
  EGI_MOE_DOWN_B,
  EGI_MOE_ROLES
} egi_moe_role;

typedef enum egi_moe_form {
  EGI_MOE_CONCATENATED, /* rows of gate, then those of up */
  EGI_MOE_INTERLEAVED,  /* a row of gate, a row of up, ... */
  EGI_MOE_SEPARATE,     /* up is an operand of its own */
  EGI_MOE_UNGATED       /* activation(gate), no up */
} egi_moe_form;

typedef enum egi_moe_activation {
  EGI_MOE_SILU, /* x · sigmoid(alpha · x) */
  EGI_MOE_GELU,
  EGI_MOE_GELU_TANH,
  EGI_MOE_RELU,
  EGI_MOE_SIGMOID,
  EGI_MOE_IDENTITY,
  EGI_MOE_ACTIVATIONS
} egi_moe_activation;

enum { EGI_MOE_X, EGI_MOE_LOGITS, EGI_MOE_CORRECTION, EGI_MOE_FIRST_ROLE };

typedef struct egi_moe {
  int64_t n_experts, top_k;
  bool is_sigmoid;       /* scoring; else softmax */
  bool is_scored_before; /* scores of all experts; else of the chosen ones alone */
  bool is_normalised;    /* the chosen weights are divided by their sum */
  double routed_scale;
  /* Groups of experts (DeepSeek-V3, arXiv 2412.19437): top_groups of them stay in the choice, by the sum of their two
   * best scores, or by the best one. 1 group: all. */
  int64_t groups, top_groups;
  bool is_group_best;
  egi_moe_activation activation;
  egi_moe_form form;
  double alpha, limit, offset; /* as in engraft.GLU; limit 0: none */
  bool is_quantised;           /* storage "nbits" or "bnb4" */
  bool has_levels;             /* "bnb4" */
  int64_t quant_type;          /* of bnb4: egi_four_bit */
  int64_t bits, block_size;    /* block_size 0: a row */
  bool is_transposed[3];       /* gate, up, down */
  double adapter_scales[3];
  uint32_t counts[EGI_MOE_ROLES], first[EGI_MOE_ROLES];
  uint32_t n_inputs; /* of the forward node */
} egi_moe;

/* What the router does, of a MoE, Route or RouteGrad: up to `is_group_best`, the rest is left zero. */
eg_status egi_moe_read_router(const egi_graph *graph, egi_node_id node, egi_moe *out_moe);
/* EG_ERROR_FORMAT naming the node where attributes or counts make no sense. */
eg_status egi_moe_read(const egi_graph *graph, egi_node_id node, egi_moe *out_moe);
/* Whether storage bnb4 can have these numbers. */
bool egi_moe_has_sound_levels(int64_t bits, int64_t block_size, int64_t quant_type);
/* Input that holds expert `expert`'s part of the role; the role must be there. */
static inline uint32_t egi_moe_input(const egi_moe *moe, egi_moe_role role, int64_t expert) {
  return moe->first[role] + (moe->counts[role] > 1 ? (uint32_t)expert : 0);
}
/* The adapter's A of gate, up or down; B follows. */
static inline egi_moe_role egi_moe_adapter(egi_moe_role role) {
  return (egi_moe_role)(EGI_MOE_GATE_A + role);
}
/* The attribute's text. */
const char *egi_moe_activation_name(egi_moe_activation activation);
const char *egi_moe_form_name(egi_moe_form form);

#endif
