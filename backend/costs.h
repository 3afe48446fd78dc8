/* Costs of nodes from the tensors that a plan gives them; the interface for passes is graph/costs.h. */
#ifndef ENGRAFT_BACKEND_COSTS_H
#define ENGRAFT_BACKEND_COSTS_H

#include "graph/costs.h"

/* Absent operands have dtype UNDEFINED; data is not looked at. A broadcast dimension (stride 0) is read once. */
eg_status egi_cost_of_node(const egi_graph *graph, egi_node_id node, const egi_tensor *inputs,
                           const egi_tensor *outputs, egi_cost *out_cost);
/* Of a copy from one layout to another. */
egi_cost egi_cost_of_copy(const egi_tensor *input, const egi_tensor *output);
const egi_costs *egi_costs_get(void);

#endif
