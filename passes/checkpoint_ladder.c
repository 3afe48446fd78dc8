/* What is kept and what is made again, as a ladder: each rung takes one decision more than the one below it, the
 * cheapest for the memory it frees first. First, block after block from the first one (whose values lie longest),
 * everything that is cheap to make again; then whole blocks from their inputs; then every other block's input as well,
 * so that two blocks are made again together; then the inputs that are left move to host memory and back. Rung 0 keeps
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

/* With all pairs joined; the input of the last group never leaves. */
static uint32_t count_offloads(const egi_blocks *blocks) {
  uint32_t n_groups = count_blocks(blocks) - count_pairs(blocks);
  return n_groups > 0 ? n_groups - 1 : 0;
}

void egi_ladder_stages(const egi_blocks *blocks, egi_checkpoint_stages *out_stages) {
  uint32_t n = count_blocks(blocks);
  out_stages->end[EGI_CHECKPOINT_NOTHING] = 0;
  out_stages->end[EGI_CHECKPOINT_CHEAP] = n;
  out_stages->end[EGI_CHECKPOINT_WHOLE] = 2 * n;
  out_stages->end[EGI_CHECKPOINT_JOINED] = 2 * n + count_pairs(blocks);
  out_stages->end[EGI_CHECKPOINT_OFFLOAD] = 2 * n + count_pairs(blocks) + count_offloads(blocks);
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

eg_status egi_decide(const egi_blocks *blocks, uint32_t rung, egi_arena *arena, egi_decisions *out_decisions) {
  uint32_t n = count_blocks(blocks), n_pairs = count_pairs(blocks), count = blocks->count;
  egi_decisions d = {.modes = EGI_NEW(arena, egi_block_mode, (size_t)count + 1),
                     .is_joined = EGI_NEW(arena, bool, (size_t)count + 1),
                     .is_kept = EGI_NEW(arena, bool, blocks->graph->n_values),
                     .group_end = EGI_NEW(arena, uint32_t, (size_t)count + 1),
                     .groups = EGI_NEW(arena, uint32_t, (size_t)count + 1)};
  if (!d.modes || !d.is_joined || !d.is_kept || !d.group_end || !d.groups) return EG_ERROR_MEMORY;
  set_modes(blocks, rung < n ? rung : n, EGI_BLOCK_CHEAP, d.modes);
  if (rung > n) set_modes(blocks, rung - n, EGI_BLOCK_WHOLE, d.modes);
  if (rung > 2 * n) join_pairs(blocks, rung - 2 * n, &d);
  if (rung > 2 * n + n_pairs) d.n_offloaded = rung - 2 * n - n_pairs;
  for (uint32_t b = count; b-- > 0;) d.group_end[b] = b + 1 < count && d.is_joined[b + 1] ? d.group_end[b + 1] : b;
  for (uint32_t b = 0; b < count; b++)
    if (blocks->blocks[b].gradient != 0 && !d.is_joined[b]) d.groups[d.n_groups++] = b;
  if (d.n_offloaded >= d.n_groups) d.n_offloaded = d.n_groups > 0 ? d.n_groups - 1 : 0;
  EG_TRY(keep_values(blocks, arena, &d));
  *out_decisions = d;
  return EG_OK;
}
