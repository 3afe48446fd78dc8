/* Shared by the tests of fusions: spellings as rows of a table, each rewritten, counted and compared by evaluation. */
#ifndef ENGRAFT_TESTS_PASSES_SUPPORT_REWRITES_H
#define ENGRAFT_TESTS_PASSES_SUPPORT_REWRITES_H

#include "support_passes.h"

typedef struct spelling {
  const char *title;
  const char *passes; /* names separated by commas */
  egi_op op;          /* counted afterwards; EGI_OP_NONE: nothing may change */
  unsigned count;     /* so many of it, none of the operators it replaces */
  const char *text;   /* a graph, "(float[B,S,8] x) => (float[B,S,8] y) <...> {...}" */
  const char *miss;   /* part of the report's nearest miss, or NULL */
} spelling;

/* Rewrites the graph, runs it before and after on random input and compares within the precision of the result's type,
 * runs the passes again to see that nothing changes, and counts. */
void check_spelling(pass_fixture *fixture, const spelling *row);

#endif
