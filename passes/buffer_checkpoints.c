/* Memory for time: values that the backward pass reads again are kept, or made again from others when it comes to
 * them. What is made again is a copy of the forward nodes, fed through Barriers that wait for the gradient which flows
 * into the block, so that nothing merges the copy with the first one or moves it forward. Numbers stay the same to the
 * bit. Precondition: a differentiated graph, execution order. Which values, checkpoint_ladder.c decides. Three sweeps;
 * a second run finds everything that it would make again made. */
#include "graph/costs.h"
#include "passes/checkpoint.h"

enum { SMALL_PART = 16 };

/* A value in host memory; what flows on as `behind` goes on when the copy is over. */
typedef struct moved_value {
  egi_value_id host, behind;
} moved_value;

typedef struct copier {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_blocks blocks;
  egi_decisions decisions;
  egi_emitter emit;
  bool *is_needed;        /* by value: its copy is read */
  bool *is_read;          /* by value: kept, and read by the backward pass or a copy */
  egi_value_id *copies;   /* by value: made again */
  egi_value_id *ordered;  /* by value: behind its Barrier */
  egi_value_id *reloaded; /* by value: back from the host */
  moved_value *moved;
  uint32_t n_moved, moved_capacity;
} copier;

/* A value of the flow that will not be there. */
static bool is_gone(const copier *c, egi_value_id value) {
  return value != 0 && c->blocks.of_value[value] != 0 && !c->decisions.is_kept[value];
}

static bool is_of_backward(const copier *c, egi_node_id id) {
  return c->blocks.is_backward[id] && !egi_is_size(c->graph->nodes[id].op);
}

/* ---- which nodes ------------------------------------------------------------------------------------------------ */

static bool is_copied(const copier *c, egi_node_id id) {
  const egi_node *node = &c->graph->nodes[id];
  for (unsigned i = 0; i < node->n_outputs; i++) {
    if (c->blocks.of_node[id] != 0 && node->outputs[i] != 0 && c->is_needed[node->outputs[i]]) return true;
  }
  return false;
}

static void mark_needed(const copier *c, egi_node_id n_nodes) {
  for (egi_node_id id = n_nodes; id-- > 1;) {
    const egi_node *node = &c->graph->nodes[id];
    if (!is_of_backward(c, id) && !is_copied(c, id)) continue;
    for (unsigned i = 0; i < node->n_inputs; i++) {
      bool *is_marked = is_gone(c, node->inputs[i]) ? c->is_needed : c->is_read;
      is_marked[node->inputs[i]] = true;
    }
  }
}

/* ---- copies ----------------------------------------------------------------------------------------------------- */

/* What a copy in `block` reads in place of `value`. */
static egi_value_id operand(copier *c, egi_value_id value, uint32_t block) {
  if (value == 0 || c->blocks.of_value[value] == 0) return value;
  if (is_gone(c, value)) return c->copies[value];
  if (c->ordered[value] == 0) {
    const egi_block *last = &c->blocks.blocks[c->decisions.group_end[block]];
    egi_value_id there = c->reloaded[value] != 0 ? c->reloaded[value] : value;
    c->ordered[value] = egi_emit_binary(&c->emit, EGI_OP_Barrier, there, last->gradient);
  }
  return c->ordered[value];
}

static eg_status copy_node(copier *c, egi_node_id id) {
  const egi_node node = c->graph->nodes[id]; /* rows move while nodes are added, lists do not */
  egi_value_id *inputs = EGI_NEW(&c->arena, egi_value_id, (size_t)node.n_inputs + 1);
  egi_value_id *outputs = EGI_NEW(&c->arena, egi_value_id, (size_t)node.n_outputs + 1);
  if (!inputs || !outputs) return EG_ERROR_MEMORY;
  c->emit.scope = node.scope;
  for (unsigned i = 0; i < node.n_inputs; i++) inputs[i] = operand(c, node.inputs[i], c->blocks.of_node[id] - 1);
  EG_TRY(c->emit.status);
  EG_TRY(egi_repeat_node(c->graph, &c->arena, id, inputs, "again", outputs));
  for (unsigned i = 0; i < node.n_outputs; i++)
    if (node.outputs[i] != 0) c->copies[node.outputs[i]] = outputs[i];
  c->run->report->n_matched++;
  return EG_OK;
}

static eg_status copy_nodes(copier *c, egi_node_id n_nodes) {
  for (egi_node_id id = 1; id < n_nodes; id++) {
    if (is_copied(c, id)) EG_TRY(copy_node(c, id));
  }
  for (egi_node_id id = 1; id < n_nodes; id++) {
    if (!is_of_backward(c, id)) continue;
    c->run->report->n_tried++;
    egi_node *node = &c->graph->nodes[id];
    for (unsigned i = 0; i < node->n_inputs; i++) {
      egi_value_id input = node->inputs[i];
      if (is_gone(c, input)) node->inputs[i] = c->copies[input];
      if (c->reloaded[input] != 0) node->inputs[i] = c->reloaded[input];
    }
  }
  return EG_OK;
}

/* ---- to the host and back --------------------------------------------------------------------------------------- */

/* What flows into a group; one behind the last: into what follows it, or 0. */
static egi_value_id group_input(const copier *c, uint32_t group) {
  const egi_decisions *d = &c->decisions;
  uint32_t block = group < d->n_groups ? d->groups[group] : d->group_end[d->groups[d->n_groups - 1]] + 1;
  return group <= d->n_groups && block < c->blocks.count ? c->blocks.blocks[block].input : 0;
}

/* The copy to the host may take as long as the group and the next one; the copy back begins with the backward pass of
 * the group behind it. Single-buffered, both have their own group's time alone. */
static eg_status move_value(copier *c, egi_value_id value, uint32_t group) {
  bool is_single = c->run->checkpoints && c->run->checkpoints->is_single_buffered;
  const egi_decisions *d = &c->decisions;
  egi_value_id behind = group_input(c, group + (is_single ? 1 : 2));
  uint32_t next = d->groups[group + (is_single ? 0 : 1)];
  if (!c->is_read[value] || behind == 0) return EG_OK;
  c->emit.scope = c->blocks.blocks[d->groups[group]].scope;
  egi_value_id host = egi_emit_unary(&c->emit, EGI_OP_Offload, value);
  c->reloaded[value] = egi_emit_binary(&c->emit, EGI_OP_Reload, host, c->blocks.blocks[d->group_end[next]].gradient);
  EG_TRY(c->emit.status);
  EG_TRY(EGI_GROW(&c->arena, &c->moved, c->n_moved, &c->moved_capacity));
  c->moved[c->n_moved++] = (moved_value){host, behind};
  c->run->report->n_matched++;
  return EG_OK;
}

/* Less than a small part of what flows into the block is not worth a copy of its own. */
static bool is_small(const copier *c, egi_value_id value, egi_value_id input) {
  const egi_checkpoint_options *o = c->run->checkpoints;
  uint64_t own = 0, all = 0;
  if (!o || o->n_bindings == 0) return false;
  if (egi_value_bytes(c->graph, value, o->bindings, o->n_bindings, &own) != EG_OK) return false;
  if (egi_value_bytes(c->graph, input, o->bindings, o->n_bindings, &all) != EG_OK) return false;
  return own < all / SMALL_PART;
}

/* What the node leaves to the backward pass. */
static eg_status move_results(copier *c, egi_node_id id, uint32_t group) {
  const egi_node node = c->graph->nodes[id]; /* rows move while nodes are added, lists do not */
  for (unsigned i = 0; i < node.n_outputs; i++) {
    egi_value_id value = node.outputs[i];
    bool is_own = value != 0 && c->blocks.of_value[value] == c->blocks.of_node[id] && !is_gone(c, value);
    if (is_own && !is_small(c, value, group_input(c, group))) EG_TRY(move_value(c, value, group));
  }
  return EG_OK;
}

static eg_status move_all(copier *c, egi_node_id n_nodes) {
  const egi_decisions *d = &c->decisions;
  uint32_t n_inputs = d->n_offloaded > d->n_moved ? d->n_offloaded : d->n_moved;
  uint32_t *group_of = EGI_NEW(&c->arena, uint32_t, (size_t)c->blocks.count + 1); /* by block, from 1 */
  if (!group_of) return EG_ERROR_MEMORY;
  for (uint32_t group = 0; group < d->n_moved; group++) group_of[d->groups[group] + 1] = group + 1;
  for (uint32_t group = 0; group < n_inputs; group++) EG_TRY(move_value(c, group_input(c, group), group));
  for (egi_node_id id = 1; id < n_nodes; id++) {
    uint32_t group = group_of[c->blocks.of_node[id]];
    if (group != 0) EG_TRY(move_results(c, id, group - 1));
  }
  return EG_OK;
}

/* What comes behind a group goes on when its copies are over: then their memory is free. */
static eg_status wait_for_copies(copier *c, egi_node_id n_nodes, uint32_t n_values) {
  egi_value_id *after = EGI_NEW(&c->arena, egi_value_id, n_values);
  if (!after) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < c->n_moved; i++) {
    egi_value_id *last = &after[c->moved[i].behind];
    *last = egi_emit_binary(&c->emit, EGI_OP_Barrier, *last != 0 ? *last : c->moved[i].behind, c->moved[i].host);
  }
  EG_TRY(c->emit.status);
  for (egi_node_id id = 1; id < n_nodes; id++) {
    egi_node *node = &c->graph->nodes[id];
    if (c->blocks.of_node[id] == 0) continue;
    for (unsigned i = 0; i < node->n_inputs; i++)
      if (after[node->inputs[i]] != 0) node->inputs[i] = after[node->inputs[i]];
  }
  return EG_OK;
}

static eg_status make_lists(copier *c) {
  size_t n = c->graph->n_values;
  c->is_needed = EGI_NEW(&c->arena, bool, n);
  c->is_read = EGI_NEW(&c->arena, bool, n);
  c->copies = EGI_NEW(&c->arena, egi_value_id, n);
  c->ordered = EGI_NEW(&c->arena, egi_value_id, n);
  c->reloaded = EGI_NEW(&c->arena, egi_value_id, n);
  bool is_short = !c->is_needed || !c->is_read || !c->copies || !c->ordered || !c->reloaded;
  return is_short ? EG_ERROR_MEMORY : EG_OK;
}

static eg_status rewrite(copier *c) {
  egi_graph *graph = c->graph;
  egi_checkpoint_stages stages;
  EG_TRY(egi_blocks_find(graph, &c->arena, &c->blocks));
  egi_ladder_stages(&c->blocks, &stages);
  uint32_t rung = c->run->checkpoints ? c->run->checkpoints->rung : stages.end[EGI_CHECKPOINT_WHOLE];
  EG_TRY(egi_decide(&c->blocks, rung, &c->arena, &c->decisions));
  EG_TRY(make_lists(c));
  egi_node_id n_nodes = graph->n_nodes;
  uint32_t n_values = graph->n_values;
  mark_needed(c, n_nodes);
  EG_TRY(move_all(c, n_nodes));
  EG_TRY(copy_nodes(c, n_nodes));
  EG_TRY(wait_for_copies(c, n_nodes, n_values));
  c->run->has_changed = c->run->report->n_matched > 0;
  return EG_OK;
}

eg_status egi_pass_buffer_checkpoints(egi_pass_run *run, egi_graph *graph) {
  copier c = {.run = run, .graph = graph, .emit = {.graph = graph}};
  egi_arena_init(&c.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = rewrite(&c);
  egi_arena_clear(&c.arena);
  return status;
}

eg_status egi_checkpoint_stages_find(const egi_graph *graph, egi_checkpoint_stages *out_stages) {
  egi_arena arena;
  egi_blocks blocks;
  egi_arena_init(&arena, graph->module->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = egi_blocks_find(graph, &arena, &blocks);
  if (status == EG_OK) egi_ladder_stages(&blocks, out_stages);
  egi_arena_clear(&arena);
  return status;
}
