/* What a node costs at given sizes, and the device that is to pay for it. Declared here for passes, which never include
 * backend/; implemented by backend/costs.c, wired in api/. Costs depend on shapes, the description and nothing else:
 * two runs decide alike. */
#ifndef ENGRAFT_GRAPH_COSTS_H
#define ENGRAFT_GRAPH_COSTS_H

#include "graph/graph.h"

/* Work of a node, or of many. Bytes are those of the device's memory; a view costs nothing. */
typedef struct egi_cost {
  double flops; /* a multiplication and an addition are two; an upper bound where data decides (packed documents) */
  double read_bytes, written_bytes;
  double to_host_bytes, to_device_bytes; /* over the link */
  eg_dtype dtype;                        /* in which the products are computed; UNDEFINED: there are none */
} egi_cost;

/* Speeds are those of large operations. */
typedef struct egi_device_description {
  char name[64];
  double flops_f32, flops_bf16, flops_f16; /* a second */
  double memory_bytes_per_s;
  double to_host_bytes_per_s, to_device_bytes_per_s;
  uint64_t memory_bytes; /* 0: not known */
  double launch_s;       /* of one node */
} egi_device_description;

typedef struct egi_costs {
  /* EG_ERROR_SHAPE when the bindings leave a size open. */
  eg_status (*node)(const egi_graph *graph, egi_node_id node, const egi_binding *bindings, size_t n_bindings,
                    egi_cost *out_cost);
} egi_costs;

void egi_cost_add(egi_cost *sum, const egi_cost *cost);
/* The roofline: the slowest of products, memory and each way of the link, and the launch. 0 for what costs nothing. */
double egi_cost_seconds(const egi_device_description *device, const egi_cost *cost);
/* A processor of no particular kind, for plans that are made without a description: round numbers in a proportion of
 * products to memory that is common, not measured on any machine. memory_bytes is 0. */
void egi_device_describe_cpu(egi_device_description *out_device);
/* Bytes of a value, contiguous; EG_ERROR_SHAPE when the bindings leave a size open. */
eg_status egi_value_bytes(const egi_graph *graph, egi_value_id value, const egi_binding *bindings, size_t n_bindings,
                          uint64_t *out_bytes);
/* Its type and sizes; `data` is NULL. */
eg_status egi_value_tensor(const egi_graph *graph, egi_value_id value, const egi_binding *bindings, size_t n_bindings,
                           egi_tensor *out_tensor);

#endif
