/* What the attributes of engraft.RaggedLinear and its gradient say, read once for shape rules, kernels and bodies.
 *
 * Rows are sorted by expert: those of expert e are offsets[e] .. offsets[e + 1] - 1, and each meets its expert's matrix
 * [N, K]. Inputs: the operands of EGI_RAGGED_X .. EGI_RAGGED_ROW_WEIGHT, then weights, biases, scales and zero points.
 * Attribute `experts` is E; `roles` counts the inputs of each of the four: 0, 1 (a stack over the experts) or E (one
 * input an expert). Of a stack expert e has [N, K], or [K, N] where `transposed` says so. */
#ifndef ENGRAFT_GRAPH_RAGGED_H
#define ENGRAFT_GRAPH_RAGGED_H

#include "graph/moe.h"

enum { EGI_RAGGED_X, EGI_RAGGED_ADDEND, EGI_RAGGED_OFFSETS, EGI_RAGGED_ROW_WEIGHT, EGI_RAGGED_FIRST_ROLE };
/* RaggedLinearGrad has dY and x in the place of the first two. */
enum { EGI_RAGGED_DY = 0, EGI_RAGGED_FORWARD_X = 1 };

typedef enum egi_ragged_role {
  EGI_RAGGED_WEIGHT,
  EGI_RAGGED_BIAS,
  EGI_RAGGED_SCALES,
  EGI_RAGGED_ZEROS,
  EGI_RAGGED_ROLES
} egi_ragged_role;

typedef struct egi_ragged {
  int64_t n_experts;
  int64_t in_features; /* K */
  double alpha;        /* of the product with its bias */
  bool is_transposed;
  bool is_loop;      /* one product an expert, one after the other, for comparison */
  bool is_quantised; /* storage "nbits" or "bnb4" (graph/moe.h) */
  bool has_levels;   /* "bnb4" */
  int64_t quant_type;
  int64_t bits, block_size; /* block_size 0: a row */
  uint32_t counts[EGI_RAGGED_ROLES], first[EGI_RAGGED_ROLES];
  uint32_t n_inputs;
} egi_ragged;

/* EG_ERROR_FORMAT naming the node where attributes or counts make no sense. */
eg_status egi_ragged_read(const egi_graph *graph, egi_node_id node, egi_ragged *out_ragged);
/* Gate, up or down of a mixture; `first` counts the mixture's own inputs. */
egi_ragged egi_moe_projection(const egi_moe *moe, egi_moe_role role, int64_t in_features);
/* Input that holds expert `expert`'s part of the role; the role must be there. */
static inline uint32_t egi_ragged_input(const egi_ragged *ragged, egi_ragged_role role, int64_t expert) {
  return ragged->first[role] + (ragged->counts[role] > 1 ? (uint32_t)expert : 0);
}

#endif
