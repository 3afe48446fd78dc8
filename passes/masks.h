/* What fuse_attention wants to know of masks: which keys a query sees, proved by evaluating the mask's own nodes on
 * small sizes. */
#ifndef ENGRAFT_PASSES_MASKS_H
#define ENGRAFT_PASSES_MASKS_H

#include "passes/passes.h"

#define EGI_MAX_MASKS 4

typedef enum egi_mask_sense {
  EGI_MASK_IS_ADDED, /* to the scores: 0 where a key is seen, a large negative number where it is not */
  EGI_MASK_IS_SEEN,  /* boolean: true where a key is seen */
  EGI_MASK_IS_HIDDEN /* boolean: true where it is not */
} egi_mask_sense;

typedef struct egi_mask_part {
  egi_value_id value; /* broadcasts to [batch, heads, sequence, sequence] */
  egi_mask_sense sense;
} egi_mask_part;

/* Everything that hides keys in one attention: a key is seen when no part hides it. */
typedef struct egi_mask {
  egi_mask_part parts[EGI_MAX_MASKS];
  unsigned n_parts;
  bool is_causal; /* by an attribute */
  int64_t left, right;
  egi_dim batch, sequence; /* of queries and keys alike */
} egi_mask;

/* Key j is seen by query i of entry b when j <= i (causal), i - window < j (window > 0; without causality
 * |i - j| < window) and padding[b, j] is not 0 (where there is padding). Queries that see no key by that are left
 * aside: they are padding themselves. */
typedef struct egi_mask_proof {
  bool is_proven;
  const char *reason; /* why not */
  bool is_causal;
  int64_t window;
  egi_value_id padding;   /* graph input [batch, sequence], or 0 */
  bool follows_positions; /* holds for positions 0, 1, 2, .. alone */
} egi_mask_proof;

/* `reason` lives in `arena`. */
eg_status egi_mask_prove(const egi_graph *graph, const egi_mask *mask, egi_arena *arena, egi_mask_proof *out_proof);

/* ---- the mask's nodes at given sizes (mask_extract.c) ---------------------------------------------------------- */

/* Numbers in a mask's nodes that may be the width of a window, and the longest sequence that a stored table decides. */
#define EGI_MAX_MASK_NUMBERS 16
typedef struct egi_mask_numbers {
  int64_t values[EGI_MAX_MASK_NUMBERS];
  unsigned count;
  bool is_full; /* there were more */
  int64_t longest_table;
} egi_mask_numbers;

typedef struct egi_mask_extract {
  const egi_graph *source;
  const egi_mask *mask;
  int64_t n_batches, n_positions;
  const int64_t *from, *to; /* numbers of these magnitudes stand for others */
  unsigned n_replaced;
  egi_mask_numbers numbers;
  egi_module *module; /* of its own: nothing is assumed in the model's */
  egi_graph *graph;
  egi_value_id padding, positions; /* of the source; 0: none is read */
  const char *reason;              /* why there is no graph, or NULL */
  egi_arena *arena;
} egi_mask_extract;
/* Makes module and graph, whose outputs are the parts; `reason` says what stands in the way. */
eg_status egi_mask_extract_make(egi_mask_extract *extract);
void egi_mask_extract_free(egi_mask_extract *extract);

#endif
