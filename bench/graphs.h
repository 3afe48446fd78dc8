/* Model files of any number of nodes, for measuring how import and passes grow. */
#ifndef ENGRAFT_BENCH_GRAPHS_H
#define ENGRAFT_BENCH_GRAPHS_H

#include "base/base.h"

typedef enum bench_graph_kind {
  BENCH_GRAPH_PLAIN,       /* a chain of element-wise nodes and products with a residual */
  BENCH_GRAPH_TRANSFORMER, /* decoder layers as exporters write them: norms of primitives, rotary halves, explicit
                              masks, shapes computed by nodes, a name and a module path on every node */
  BENCH_GRAPH_EXPERTS      /* such layers with 128 experts each, and a loop over the tokens that chose it for each */
} bench_graph_kind;

/* Writes the file; about `n_nodes` nodes (whole layers), *out_nodes of them. */
eg_status bench_write_graph(eg_context *ctx, bench_graph_kind kind, uint32_t n_nodes, const char *path,
                            uint32_t *out_nodes);
/* Nodes of a layer. */
uint32_t bench_layer_nodes(bench_graph_kind kind);

#endif
