/* What is kept and what is made again, as a ladder: each rung takes one decision more than the one below it, the
 * cheapest for the memory it frees first. First, block after block from the first one (whose values lie longest),
 * everything that is cheap to make again; then the rest of a block moves to host memory and back, or, instead of that,
 * whole blocks are made again from their inputs; then every other block's input as well, so that two blocks are made
 * again together; then the inputs that are left move to host memory and back. Rung 0 keeps
 * everything. */
#include "passes/checkpoint.h"

/* Blocks with a backward pass of their own, in order. */
static uint32_t count_blocks(const egi_blocks *blocks) {
  uint32_t n = 0;
  for (uint32_t b = 0; b < blocks->count; b++) n += blocks->blocks[b].gradient != 0;
  return n;
}

static bool can_join(const egi_blocks *blocks, uint32_t b) {
  return b > 0 && blocks->blocks[b].gradient != 0 && blocks->blocks[b - 1].gradient != 0;
}

/* Pairs are (second, third), (fourth, fifth), .. of the blocks that follow each other: the first input stays. */
static uint32_t count_pairs(const egi_blocks *blocks) {
  uint32_t n = 0;
  for (uint32_t b = 1; b < blocks->count; b++) {
    if (!can_join(blocks, b)) continue;
    n++;
    b++;
  }
  return n;
}

/* The last of n groups never leaves the device. */
static uint32_t count_leaving(uint32_t n) {
  return n > 0 ? n - 1 : 0;
}

void egi_ladder_stages(const egi_blocks *blocks, egi_checkpoint_stages *out_stages) {
  uint32_t n = count_blocks(blocks), n_pairs = count_pairs(blocks);
  uint32_t counts[EGI_CHECKPOINT_STAGES] = {[EGI_CHECKPOINT_CHEAP] = n,
                                            [EGI_CHECKPOINT_MOVED] = count_leaving(n),
                                            [EGI_CHECKPOINT_WHOLE] = n,
                                            [EGI_CHECKPOINT_JOINED] = n_pairs,
                                            [EGI_CHECKPOINT_OFFLOAD] = count_leaving(n - n_pairs)};
  uint32_t sum = 0;
  for (unsigned stage = 0; stage < EGI_CHECKPOINT_STAGES; stage++) {
    sum += counts[stage];
    out_stages->end[stage] = sum;
  }
}

static void set_modes(const egi_blocks *blocks, uint32_t n, egi_block_mode mode, egi_block_mode *modes) {
  for (uint32_t b = 0; b < blocks->count && n > 0; b++) {
    if (blocks->blocks[b].gradient == 0) continue;
    modes[b] = mode;
    n--;
  }
}

static void join_pairs(const egi_blocks *blocks, uint32_t n, egi_decisions *d) {
  for (uint32_t b = 1; b < blocks->count && n > 0; b++) {
    if (!can_join(blocks, b)) continue;
    d->is_joined[b++] = true;
    n--;
  }
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

/* A choice that numbers were made into, such as the experts of a token: few bytes, and what hangs on it must not be
 * decided twice. The values chosen stay with it. */
static bool is_choice(const egi_graph *graph, const egi_node *node) {
  for (unsigned i = 0; i < node->n_outputs; i++) {
    egi_dtype_class kind = egi_dtype_kind(graph->values[node->outputs[i]].dtype);
    if (node->outputs[i] != 0 && kind == EGI_CLASS_INTEGER) return true;
  }
  return (egi_op_get(node->op)->flags & EGI_OP_EFFECT) != 0;
}

/* What stays of a cheap block: `is_there` is what the backward pass has, kept or made again from what is kept. */
static void keep_dear(const egi_blocks *blocks, egi_node_id id, bool *is_there, bool *is_kept) {
  const egi_node *node = &blocks->graph->nodes[id];
  bool is_cheap = egi_is_cheap(node->op);
  for (unsigned i = 0; i < node->n_inputs && is_cheap; i++)
    is_cheap = node->inputs[i] == 0 || blocks->of_value[node->inputs[i]] == 0 || is_there[node->inputs[i]];
  for (unsigned i = 0; i < node->n_outputs; i++) {
    egi_value_id output = node->outputs[i];
    if (output == 0) continue;
    is_there[output] = is_cheap || blocks->is_saved[output];
    is_kept[output] = !is_cheap;
  }
}

static eg_status keep_values(const egi_blocks *blocks, egi_arena *arena, egi_decisions *d) {
  const egi_graph *graph = blocks->graph;
  bool *is_there = EGI_NEW(arena, bool, graph->n_values);
  if (!is_there) return EG_ERROR_MEMORY;
  for (uint32_t b = 0; b < blocks->count; b++)
    is_there[blocks->blocks[b].input] = blocks->is_saved[blocks->blocks[b].input];
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (blocks->of_node[id] == 0) continue;
    egi_block_mode mode = d->modes[blocks->of_node[id] - 1];
    bool is_whole = mode == EGI_BLOCK_WHOLE && !is_choice(graph, node);
    for (unsigned i = 0; i < node->n_outputs; i++) d->is_kept[node->outputs[i]] = !is_whole;
    if (mode == EGI_BLOCK_CHEAP) keep_dear(blocks, id, is_there, d->is_kept);
  }
  for (uint32_t b = 0; b < blocks->count; b++) d->is_kept[blocks->blocks[b].input] = !d->is_joined[b];
  return EG_OK;
}

/* How far up each stage the rung is. */
static void count_steps(const egi_blocks *blocks, uint32_t rung, uint32_t steps[EGI_CHECKPOINT_STAGES]) {
  egi_checkpoint_stages stages;
  egi_ladder_stages(blocks, &stages);
  steps[EGI_CHECKPOINT_NOTHING] = 0;
  for (unsigned stage = 1; stage < EGI_CHECKPOINT_STAGES; stage++) {
    uint32_t below = stages.end[stage - 1], end = stages.end[stage];
    steps[stage] = rung <= below ? 0 : (rung < end ? rung : end) - below;
  }
}

eg_status egi_decide(const egi_blocks *blocks, uint32_t rung, egi_arena *arena, egi_decisions *out_decisions) {
  uint32_t count = blocks->count, steps[EGI_CHECKPOINT_STAGES];
  egi_decisions d = {.modes = EGI_NEW(arena, egi_block_mode, (size_t)count + 1),
                     .is_joined = EGI_NEW(arena, bool, (size_t)count + 1),
                     .is_kept = EGI_NEW(arena, bool, blocks->graph->n_values),
                     .group_end = EGI_NEW(arena, uint32_t, (size_t)count + 1),
                     .groups = EGI_NEW(arena, uint32_t, (size_t)count + 1)};
  if (!d.modes || !d.is_joined || !d.is_kept || !d.group_end || !d.groups) return EG_ERROR_MEMORY;
  count_steps(blocks, rung, steps);
  set_modes(blocks, steps[EGI_CHECKPOINT_CHEAP], EGI_BLOCK_CHEAP, d.modes);
  set_modes(blocks, steps[EGI_CHECKPOINT_WHOLE], EGI_BLOCK_WHOLE, d.modes);
  join_pairs(blocks, steps[EGI_CHECKPOINT_JOINED], &d);
  d.n_moved = steps[EGI_CHECKPOINT_WHOLE] == 0 ? steps[EGI_CHECKPOINT_MOVED] : 0;
  d.n_offloaded = steps[EGI_CHECKPOINT_OFFLOAD];
  for (uint32_t b = count; b-- > 0;) d.group_end[b] = b + 1 < count && d.is_joined[b + 1] ? d.group_end[b + 1] : b;
  for (uint32_t b = 0; b < count; b++)
    if (blocks->blocks[b].gradient != 0 && !d.is_joined[b]) d.groups[d.n_groups++] = b;
  EG_TRY(keep_values(blocks, arena, &d));
  *out_decisions = d;
  return EG_OK;
}
