/* What structure.c, structure_flow.c and structure_probe.c share: a recognised graph as a flow of hidden values. */
#ifndef ENGRAFT_PASSES_STRUCTURE_H
#define ENGRAFT_PASSES_STRUCTURE_H

#include "passes/passes.h"

/* What a node is to the structure. */
typedef enum egi_part {
  EGI_PART_NONE, /* dead, not on the way of hidden values, or a constant */
  EGI_PART_VIEW, /* moves, casts */
  EGI_PART_NORM,
  EGI_PART_ATTENTION,
  EGI_PART_LINEAR,
  EGI_PART_ROPE,
  EGI_PART_GLU,
  EGI_PART_MOE,
  EGI_PART_OTHER /* everything else, residual adds and activations too */
} egi_part;

typedef struct egi_flow {
  const egi_graph *graph;
  egi_arena *arena;
  egi_value_id logits, tokens; /* 0: none */
  bool *is_hidden;             /* by value: computed from embedded tokens */
  egi_part *parts;             /* by node */
  egi_node_id *dominators; /* by node: the nearest node that all hidden values it reads come through; 0: the start */
  egi_node_id embedding;   /* the node that gives embedded tokens, 0: none */
  egi_node_id head;        /* the linear layer that gives the logits, 0: none */
  egi_node_id first, last; /* nodes (first, last] are the layers; both 0: there are none */
} egi_flow;
eg_status egi_flow_find(const egi_graph *graph, egi_arena *arena, egi_flow *out_flow);

/* The way back from an operand of attention to the linear layer that makes it. */
typedef struct egi_trace {
  egi_node_id linear; /* 0: none before something else was met */
  egi_node_id rope;   /* the rotary embedding on the way, or 0 */
  bool has_norm;
} egi_trace;
egi_trace egi_flow_trace(const egi_flow *flow, egi_value_id value);
/* The only hidden input of a node, 0 when there are none or several. */
egi_value_id egi_flow_only_input(const egi_flow *flow, const egi_node *node);

/* Whether the head's matrix is that of the token embedding, as far as a quantised copy can tell. */
bool egi_probe_is_tied(const egi_flow *flow);
/* How many different tables of angles the rotary embeddings of the graph use. */
uint32_t egi_probe_rope_tables(const egi_flow *flow);

#endif
