/* What buffer_checkpoints knows of a training graph: the blocks of its forward pass, and what becomes of the values
 * that the backward pass reads again. */
#ifndef ENGRAFT_PASSES_CHECKPOINT_H
#define ENGRAFT_PASSES_CHECKPOINT_H

#include "passes/passes.h"

/* A part of the forward pass between two values that everything from the embedded tokens to the loss comes through (the
 * residual stream). Each holds at least one operator that is dear to run again. */
typedef struct egi_block {
  egi_value_id input;    /* all that flows in */
  egi_value_id gradient; /* the block's backward pass begins behind it; 0: it has none, or is the last */
  const char *scope;     /* module path of its first node that has one, or NULL */
} egi_block;

typedef struct egi_blocks {
  const egi_graph *graph;
  bool *is_forward;   /* by node: the loss depends on it */
  bool *is_backward;  /* by node: the loss does not, but an update of a state does */
  uint32_t *of_node;  /* by node: its block + 1; 0: not on the way from the tokens to the loss */
  uint32_t *of_value; /* by value: the block + 1 that it is made in or flows into */
  bool *is_saved;     /* by value: made on that way, and read by the backward pass */
  egi_block *blocks;
  uint32_t count;
} egi_blocks;
/* checkpoint_blocks.c: for a graph with a loss, in execution order. No blocks where the tokens' embedding is not found.
 */
eg_status egi_blocks_find(const egi_graph *graph, egi_arena *arena, egi_blocks *out_blocks);
/* Moves, norms and other operators that cost the bytes they touch and little more. */
bool egi_is_cheap(egi_op op);
/* The node takes sizes alone of its inputs. */
bool egi_is_size(egi_op op);

/* Adds the node once more, over other inputs; its values are named after the first ones. */
eg_status egi_repeat_node(egi_graph *graph, egi_arena *arena, egi_node_id id, const egi_value_id *inputs,
                          const char *suffix, egi_value_id *out_outputs);

typedef enum egi_block_mode {
  EGI_BLOCK_KEEP,  /* the backward pass reads what the forward pass left */
  EGI_BLOCK_CHEAP, /* what is cheap to make again from the rest is made again */
  EGI_BLOCK_WHOLE  /* all is made again from the block's input */
} egi_block_mode;

/* One rung of the ladder, spelled out. */
typedef struct egi_decisions {
  egi_block_mode *modes; /* by block */
  bool *is_joined;       /* by block: its input is made again from the block before it */
  bool *is_kept;         /* by value of the flow: stays in memory from the forward to the backward pass */
  uint32_t *group_end;   /* by block: the last of the blocks that are made again together */
  uint32_t *groups;      /* first blocks of those groups that have a backward pass, in order */
  uint32_t n_groups;
  uint32_t n_moved;     /* all that is kept of that many groups leaves the device until it is needed again */
  uint32_t n_offloaded; /* of that many their inputs */
} egi_decisions;
/* checkpoint_ladder.c */
eg_status egi_decide(const egi_blocks *blocks, uint32_t rung, egi_arena *arena, egi_decisions *out_decisions);
void egi_ladder_stages(const egi_blocks *blocks, egi_checkpoint_stages *out_stages);

#endif
