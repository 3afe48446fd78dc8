/* The inside of eager runs: eager.c runs graphs, eager_control.c the operators with bodies. */
#ifndef ENGRAFT_BACKEND_EAGER_H
#define ENGRAFT_BACKEND_EAGER_H

#include "backend/plan.h"

/* Longest integer tensor whose content shape rules see. */
#define EGI_EAGER_ELEMENTS 64
/* Iterations of all loops of a run together: a file cannot make it run for ever. */
#define EGI_EAGER_ITERATIONS 1000000u

typedef struct egi_eager {
  eg_context *ctx;
  egi_store *store;
  egi_module *module; /* a clone whose rows are overwritten as the run goes on */
  uint32_t n_iterations;
} egi_eager;

/* Runs a graph or body; outputs are copies in `arena`. */
eg_status egi_eager_graph(egi_eager *eager, egi_graph *graph, const egi_tensor *inputs, egi_arena *arena,
                          egi_tensor *outputs);
eg_status egi_eager_copy(egi_eager *eager, const egi_tensor *tensor, egi_arena *arena, egi_tensor *out);

/* If, Loop or Scan with its operands; results go to `arena`. */
typedef struct egi_control {
  egi_eager *eager;
  egi_graph *graph;
  egi_node_id node;
  const egi_tensor *inputs;
  egi_tensor *outputs;
  egi_arena *arena;
} egi_control;
eg_status egi_eager_control(const egi_control *control);

#endif
