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
uint64_t respeller_random(respeller *r, uint64_t bound);

#endif
