/* The experts of a mixture by the names that the Hugging Face model has for them. */
#ifndef ENGRAFT_PASSES_EXPERTS_H
#define ENGRAFT_PASSES_EXPERTS_H

#include "graph/moe.h"
#include "passes/passes.h"

/* Module path of a MoE's experts, "model.layers.0.mlp.experts". */
eg_status egi_experts_path(const egi_graph *graph, egi_node_id node, egi_arena *arena, const char **out_path);
/* The parameter that holds the matrices or biases of gate (with up, where there is one) or down. */
const char *egi_experts_leaf(const egi_moe *moe, egi_moe_role role);

#endif
