/* The router of a mixture of experts, for the kernels of Route, RouteGrad and MoE: choice and weights of each token's
 * experts, and the order of the pairs of a token and an expert by expert, then token. */
#ifndef ENGRAFT_BACKEND_CPU_ROUTE_H
#define ENGRAFT_BACKEND_CPU_ROUTE_H

#include "backend/cpu/cpu.h"
#include "graph/moe.h"

typedef struct egi_router {
  egi_moe moe;
  eg_dtype dtype; /* of logits and weights: f32 or f64 */
  int64_t tokens, n_rows;
} egi_router;

/* Contiguous, as Route's results. */
typedef struct egi_routing {
  int32_t *expert, *source_row, *inverse, *offsets;
  void *weight;
} egi_routing;

/* Reads the router of the plan's node, with the logits at `input`. */
eg_status egi_router_prepare(egi_kernel_plan *plan, unsigned input, egi_router *out_router);
/* Workspace of egi_route(); false on overflow. */
bool egi_route_workspace(const egi_router *router, size_t n_workers, size_t *out_bytes);
void egi_route(const egi_router *router, const egi_kernel_call *call, const egi_tensor *logits,
               const egi_tensor *correction, char *workspace, const egi_routing *out);

/* i32 [count] without gaps: the tensor's own memory, or `buffer`. */
const int32_t *egi_index_list(const egi_tensor *tensor, int32_t *buffer);
/* EG_ERROR_DATA unless offsets [n_experts + 1] rise from 0 to n_rows. */
eg_status egi_check_offsets(eg_context *ctx, const int32_t *offsets, int64_t n_experts, int64_t n_rows);
/* ... unless each of the indices is in [0, limit). */
eg_status egi_check_routing(eg_context *ctx, const int32_t *indices, int64_t count, int64_t limit);

#endif
