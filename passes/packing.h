/* What cache_metadata wants to know of a graph before documents may lie one after the other in a row: that no operator
 * carries anything from one token to another but attention, and which values beside the tokens follow positions. */
#ifndef ENGRAFT_PASSES_PACKING_H
#define ENGRAFT_PASSES_PACKING_H

#include "passes/passes.h"

/* Where the tokens of a row stand in a value, at two lengths of the row. */
typedef struct egi_token_axis {
  int axis;           /* -1: no dimension grows with the sequence */
  int64_t factor;     /* elements of that dimension a token has */
  int64_t outer;      /* elements before it, all dimensions in front of it taken together */
  const char *reason; /* why it cannot be said, or NULL */
} egi_token_axis;

/* A value that no token decides, beside values that tokens decide: made of positions, sizes and constants. */
typedef struct egi_position_table {
  egi_value_id value;
  int axis;       /* of the positions; -1: the same at every length */
  bool is_counts; /* whole numbers 0, 1, 2, .. */
  bool is_valid;  /* says which keys of attention are padding: none may be when no token is */
} egi_position_table;

typedef struct egi_packing {
  const egi_graph *graph;
  egi_arena *arena; /* of lists and reasons */
  egi_value_id tokens;
  egi_dim batch, sequence;  /* of the tokens, resolved */
  egi_binding *bindings[2]; /* of all symbols, at two lengths */
  size_t n_bindings;
  bool *is_token;  /* by value: tokens decide it, not their number alone */
  bool *is_varied; /* by value: made of something else than weights */
  bool *is_loss;   /* by node: from the log-probabilities to their sum */
  uint32_t *table; /* by value: its place in `tables` + 1 */
  egi_position_table *tables;
  uint32_t n_tables, tables_capacity;
  const char *reason; /* why documents cannot share a row, or NULL */
} egi_packing;

/* packing_axes.c: sizes of the row, and where tokens stand in a value. */
eg_status egi_packing_begin(egi_packing *packing);
egi_token_axis egi_packing_axis(const egi_packing *packing, egi_value_id value);
/* Why the node mixes tokens, or NULL; attention that knows documents does not. */
const char *egi_packing_check_node(const egi_packing *packing, egi_node_id node);
/* An operand that gives sizes or axes alone: what it holds shows in the shape of the result. */
bool egi_packing_is_shape(egi_op op, unsigned input);
/* packing_flow.c: walks the graph; `reason` is set where something mixes tokens. */
eg_status egi_packing_walk(egi_packing *packing);
/* packing_tables.c: each table is computed at several lengths up to `longest`: what it says of a position may not
 * depend on the length. */
eg_status egi_packing_prove(egi_packing *packing, int64_t longest);
/* A table for that many positions, contiguous, in `arena`; `reason` is set where it cannot be computed. */
eg_status egi_packing_evaluate(egi_packing *packing, egi_value_id table, int64_t length, egi_arena *arena,
                               egi_tensor *out_tensor);

#endif
