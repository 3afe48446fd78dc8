/* Small graphs for tests, written as text: one node at a time, operands and attributes as literals. */
#ifndef ENGRAFT_TESTS_GRAPH_SUPPORT_GRAPH_H
#define ENGRAFT_TESTS_GRAPH_SUPPORT_GRAPH_H

#include "graph/graph.h"

typedef struct graph_fixture {
  eg_context *ctx;
  egi_module *module;
  egi_graph *graph;
} graph_fixture;

/* For cmocka's setup and teardown: *state is a graph_fixture with an empty graph. */
int graph_setup(void **state);
int graph_teardown(void **state);

/* A dim from "12" or "batch" (a symbol). */
egi_dim graph_dim(graph_fixture *f, const char *text);
/* A value from "float[batch,4]" (an input), "=[1,-1]" (an int64 constant), "=5" (an int64 scalar), "=5f" (a float
 * scalar) or "-" (none). */
egi_value_id graph_value(graph_fixture *f, const char *text);
/* A node from an operator ("engraft.Attention" where the standard one has the name too), operands separated by ';' and
 * attributes as in "axis=1 perm=[0,2,1] mode=text alpha=0.5f". Outputs are named "y0", "y1" ...; the status of
 * inference. */
eg_status graph_node(graph_fixture *f, const char *op, const char *inputs, const char *attributes, unsigned n_outputs,
                     egi_node_id *out_node);
/* "float[batch,4]", followed by "{1,batch}" where the content is known. Valid until the next call. */
const char *graph_type(graph_fixture *f, egi_value_id value);

/* One row of a table of shape tests. `expected` holds the types of all outputs, separated by ';', or "!" and a part of
 * the error message. */
typedef struct shape_case {
  const char *op, *inputs, *attributes, *expected;
} shape_case;
void check_shape_cases(const shape_case *cases, size_t count);

#endif
