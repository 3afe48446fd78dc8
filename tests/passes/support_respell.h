/* Respelling: random rewrites of a graph that keep what it computes, as exporters and optimisers differ. */
#ifndef ENGRAFT_TESTS_PASSES_SUPPORT_RESPELL_H
#define ENGRAFT_TESTS_PASSES_SUPPORT_RESPELL_H

#include "passes/passes.h"

typedef struct respeller {
  egi_graph *graph;
  egi_emitter emit;
  uint64_t random;
} respeller;

void respeller_begin(respeller *r, egi_graph *graph, uint64_t seed);
size_t respell_count(void);
const char *respell_name(size_t kind);
/* One respelling at a random place; false when there is no place for it. The graph is tidy and typed afterwards. */
bool respell(respeller *r, size_t kind);
/* The opposite: one change at a random place after which the graph computes something else, or nothing that makes
 * sense. False: nothing was changed, or types contradict each other now. */
bool disturb(respeller *r, const char **out_name);
uint64_t respeller_random(respeller *r, uint64_t bound);

#endif
