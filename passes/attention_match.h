/* An attention as exporters write it, taken apart: what fuse_attention makes one node of. */
#ifndef ENGRAFT_PASSES_ATTENTION_MATCH_H
#define ENGRAFT_PASSES_ATTENTION_MATCH_H

#include "passes/masks.h"

/* An operand: Transpose(value, axes) is [batch, heads, sequence, width]. */
typedef struct egi_attention_operand {
  egi_value_id value;
  int64_t axes[4];
} egi_attention_operand;

typedef struct egi_attention_match {
  egi_node_id root;    /* gives the result: the second MatMul, or an Attention */
  egi_value_id result; /* [batch, heads, sequence, value width]; of an Attention with 3 dims [batch, sequence, ..] */
  egi_attention_operand q, k, v;
  int64_t flat_heads[2]; /* query and key heads of operands with 3 dims; 0: they have 4 */
  egi_value_id sinks;    /* a logit for each head in some shape, or 0 */
  double scale, softcap;
  egi_mask mask;
  egi_node_id softmax; /* or the Attention */
  /* Why it is none: */
  const char *reason; /* NULL: it is one */
  egi_node_id at;
  unsigned depth; /* nodes that did fit */
} egi_attention_match;

/* Whether the node is where an attention ends: the match says how far that held. Texts live in `arena`. */
bool egi_match_attention(const egi_graph *graph, egi_node_id id, egi_arena *arena, egi_attention_match *out_match);

/* attention_operands.c: looks through scales (multiplied to *factor unless NULL), transposes and, with `is_shared`,
 * repeated key heads, down to the value that an operand is made of. */
void egi_match_operand(const egi_graph *graph, egi_attention_operand *operand, double *factor, bool is_shared);
/* An operand of 3 dims, [batch · heads, rows, columns], becomes one of 4 where it was made by a Reshape from that;
 * scales are multiplied to *factor unless NULL. */
bool egi_match_joined(const egi_graph *graph, egi_attention_operand *operand, double *factor);
/* A Reshape that joins batch and heads of 4 dims, or takes them apart: the value before it, or 0. */
egi_value_id egi_before_joining(const egi_graph *graph, egi_node_id node);
/* The node that makes a value, or 0. */
egi_node_id egi_producer(const egi_graph *graph, egi_value_id value);
/* Equal once assumptions are applied. */
bool egi_dims_agree(const egi_graph *graph, egi_dim a, egi_dim b);
/* A constant factor that the node multiplies `*out_value` by. */
bool egi_match_factor(const egi_graph *graph, egi_node_id node, egi_value_id *out_value, double *out_factor);

#endif
