/* Inside of fuse_moe: a region of nodes that may be a mixture of experts is run on made-up numbers, with made-up sparse
 * matrices in the place of the experts' own, and what it is follows from what it computes.
 *
 *   moe_region.c  finds the router, the region behind it and the nodes that it needs
 *   moe_sample.c  runs the nodes, all but products with parameters, on tensors of the sample
 *   moe_matrix.c  parameters seen through views, their made-up numbers, products with them
 *   moe_fit.c     reads activation, routing and operands off the sample and holds the operator against it */
#ifndef ENGRAFT_PASSES_MOE_MATCH_H
#define ENGRAFT_PASSES_MOE_MATCH_H

#include "graph/moe.h"
#include "passes/passes.h"

/* A parameter of the experts seen through Gather, Slice, Transpose and the like: slices [rows, columns] of its stored
 * form, `count` of them over the leading dims. */
typedef struct egi_moe_matrix {
  egi_value_id weight;
  int64_t rows, columns; /* as stored */
  bool is_transposed;    /* seen as [columns, rows] */
  bool is_stack;         /* the parameter has an axis of experts */
  int rank;              /* of the leading dims */
  int64_t dims[EGI_MAX_RANK];
  int64_t count;
  const int64_t *slices; /* [count] */
} egi_moe_matrix;

/* A value of the region on the sample. */
typedef struct egi_moe_value {
  egi_tensor tensor; /* float32, integers or booleans; data NULL: a matrix */
  const egi_moe_matrix *matrix;
  egi_value_id scratch;   /* in the scratch graph, 0: not yet */
  egi_value_id parameter; /* what it is a view or selection of, 0: more than that */
  uint32_t product;       /* that it is as a whole (with or without bias), index + 1 */
  uint32_t sources[2];    /* products that it comes from, index + 1 */
  uint8_t n_stages;       /* products with parameters behind it */
  bool is_computed;
} egi_moe_value;

/* A product of rows with a parameter. */
typedef struct egi_moe_event {
  egi_node_id node;
  egi_moe_matrix matrix;
  bool is_transposed;         /* stored [K, N] for y = W·x with W [N, K] */
  egi_tensor in, out;         /* out with the bias, where one is added */
  egi_value_id bias;          /* its parameter, or 0 */
  egi_value_id scales, zeros; /* of packed codes, or 0 */
  int64_t bits, block_size;   /* bits 0: plain */
  uint32_t sources[2];        /* index + 1 */
  uint8_t n_stages;           /* of its input */
  const uint32_t *members;    /* of rows of several products, one after the other: their indices */
  uint32_t n_members;         /* 0: a product of its own */
  egi_tensor shares; /* what its rows are multiplied by at last, when it comes from the router alone; or none */
} egi_moe_event;

typedef struct egi_moe_region {
  egi_pass_run *run;
  egi_graph *graph;
  const egi_uses *uses;
  egi_arena *arena; /* of the region */
  egi_node_id router, last_choice;
  egi_value_id logits, x, exit;
  int64_t n_experts, width, tokens;
  bool is_scored_first;    /* something stands between logits and choice */
  bool is_wide;            /* a sample of many tokens */
  egi_value_id correction; /* parameter added to scores, or 0 */
  egi_node_id *nodes;      /* to be run, in order */
  uint32_t n_nodes, nodes_capacity;
  const egi_binding *bindings;
  size_t n_bindings;
  egi_moe_value *values; /* by value id of the graph; only those of the region are ever touched */
  egi_value_id *touched;
  uint32_t n_touched, touched_capacity;
  egi_module *scratch;
  egi_moe_event *events;
  uint32_t n_events, events_capacity;
  double *numbers; /* scalars of the region */
  uint32_t n_numbers, numbers_capacity;
  uint64_t seed;
  const char *miss; /* why it is none */
  egi_node_id miss_node;
} egi_moe_region;

/* false: it is none, or nothing that can be run; the reason stands in `miss`. */
static inline bool egi_moe_reject(egi_moe_region *region, egi_node_id node, const char *reason) {
  region->miss = reason;
  region->miss_node = node;
  return false;
}

/* moe_region.c: the logits behind which the choice of the TopK node stands; x and width. */
bool egi_moe_find_router(egi_moe_region *region, egi_node_id top_k);
/* The next value after `exit` (0: the first) through which everything that comes from the logits passes and that has
 * rows of the hidden width. */
bool egi_moe_next_exit(egi_moe_region *region);
/* The nodes between x and logits on one side and the exit. */
bool egi_moe_collect(egi_moe_region *region);

/* moe_sample.c */
bool egi_moe_sample(egi_moe_region *region);
egi_moe_value *egi_moe_touch(egi_moe_region *region, egi_value_id value);
/* One node with these inputs in the scratch graph. */
eg_status egi_moe_evaluate(egi_moe_region *region, const egi_node *node, egi_moe_value *const *inputs,
                           egi_tensor *outputs);

/* moe_matrix.c */
double egi_moe_random(uint64_t seed, uint64_t a, uint64_t b); /* in [-1, 1) */
/* A parameter that stands at this node's input as a whole. */
bool egi_moe_begin_matrix(egi_moe_region *region, egi_value_id weight);
/* Whether the node only looks at a matrix in another way; its output is set. */
bool egi_moe_view(egi_moe_region *region, egi_node_id node);
bool egi_moe_product(egi_moe_region *region, egi_node_id node);
/* out [N] += made-up matrix of the slice · in [K] (is_transposed: stored [K, N]). */
void egi_moe_multiply_row(const egi_moe_region *region, const egi_moe_matrix *matrix, int64_t slice, bool is_transposed,
                          const float *in, float *out);
/* The made-up number of a parameter that is no matrix; small and positive at -1 - i: of vectors over the experts. */
float egi_moe_number_of(const egi_moe_region *region, egi_value_id weight, int64_t index);

/* moe_fit.c: the operator that gives the exit; attributes without operands. Operands: by role the parameter of each
 * expert, or one stack. */
typedef struct egi_moe_operands {
  egi_value_id *values[EGI_MOE_ROLES];
  uint32_t counts[EGI_MOE_ROLES];
  int64_t rows[3]; /* of gate, up and down */
} egi_moe_operands;
bool egi_moe_fit(egi_moe_region *region, egi_moe *out_moe, egi_moe_operands *out_operands, uint32_t *out_n_found);

#endif
