/* Memory for time: values that the backward pass reads again are kept, or made again from others when it comes to
 * them. What is made again is a copy of the forward nodes, fed through Barriers that wait for the gradient which flows
 * into the block, so that nothing merges the copy with the first one or moves it forward. Numbers stay the same to the
 * bit. Precondition: a differentiated graph, execution order. Which values, checkpoint_ladder.c decides. Three sweeps;
 * a second run finds everything that it would make again made. */
#include "passes/checkpoint.h"

typedef struct copier {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_blocks blocks;
  egi_decisions decisions;
  egi_emitter emit;
  bool *is_needed;       /* by value: its copy is read */
  egi_value_id *copies;  /* by value: made again */
  egi_value_id *ordered; /* by value: behind its Barrier */
} copier;

/* A value of the flow that will not be there. */
static bool is_gone(const copier *c, egi_value_id value) {
  return value != 0 && c->blocks.of_value[value] != 0 && !c->decisions.is_kept[value];
}

static bool is_of_backward(const copier *c, egi_node_id id) {
  const egi_node *node = &c->graph->nodes[id];
  return node->op != EGI_OP_NONE && !c->blocks.is_forward[id] && !egi_is_size(node->op);
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
      if (is_gone(c, node->inputs[i])) c->is_needed[node->inputs[i]] = true;
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
    c->ordered[value] = egi_emit_binary(&c->emit, EGI_OP_Barrier, value, last->gradient);
  }
  return c->ordered[value];
}

static eg_status copy_outputs(copier *c, egi_node *copy) {
  egi_graph *graph = c->graph;
  for (unsigned i = 0; i < copy->n_outputs; i++) {
    egi_value_id first = copy->outputs[i];
    if (first == 0) {
      copy->outputs[i] = EGI_VALUE_UNWANTED;
      continue;
    }
    const char *name = egi_arena_format(&c->arena, "%s/again", graph->values[first].name);
    if (!name) return EG_ERROR_MEMORY;
    EG_TRY(egi_graph_add_value(graph, name, &copy->outputs[i]));
    c->copies[first] = copy->outputs[i];
  }
  return EG_OK;
}

static eg_status copy_node(copier *c, egi_node_id id) {
  egi_graph *graph = c->graph;
  egi_node copy = graph->nodes[id];
  egi_node_id added = 0;
  egi_value_id *operands = EGI_NEW(&c->arena, egi_value_id, (size_t)copy.n_inputs + copy.n_outputs + 1);
  if (!operands) return EG_ERROR_MEMORY;
  c->emit.scope = copy.scope;
  for (unsigned i = 0; i < copy.n_inputs; i++)
    operands[i] = operand(c, graph->nodes[id].inputs[i], c->blocks.of_node[id] - 1);
  EG_TRY(c->emit.status);
  memcpy(operands + copy.n_inputs, graph->nodes[id].outputs, copy.n_outputs * sizeof *operands);
  copy.inputs = operands;
  copy.outputs = operands + copy.n_inputs;
  copy.name = egi_arena_format(&c->arena, "%s/again", copy.name ? copy.name : "");
  if (!copy.name) return EG_ERROR_MEMORY;
  EG_TRY(copy_outputs(c, &copy));
  EG_TRY(egi_graph_add_node(graph, &copy, &added));
  c->run->report->n_matched++;
  return egi_infer_node(graph, added);
}

static eg_status copy_nodes(copier *c) {
  egi_node_id n_nodes = c->graph->n_nodes;
  mark_needed(c, n_nodes);
  for (egi_node_id id = 1; id < n_nodes; id++) {
    if (is_copied(c, id)) EG_TRY(copy_node(c, id));
  }
  for (egi_node_id id = 1; id < n_nodes; id++) {
    if (!is_of_backward(c, id)) continue;
    c->run->report->n_tried++;
    egi_node *node = &c->graph->nodes[id];
    for (unsigned i = 0; i < node->n_inputs; i++)
      if (is_gone(c, node->inputs[i])) node->inputs[i] = c->copies[node->inputs[i]];
  }
  return EG_OK;
}

static eg_status rewrite(copier *c) {
  egi_graph *graph = c->graph;
  egi_checkpoint_stages stages;
  EG_TRY(egi_blocks_find(graph, &c->arena, &c->blocks));
  egi_ladder_stages(&c->blocks, &stages);
  uint32_t rung = c->run->checkpoints ? c->run->checkpoints->rung : stages.end[EGI_CHECKPOINT_WHOLE];
  EG_TRY(egi_decide(&c->blocks, rung, &c->arena, &c->decisions));
  c->is_needed = EGI_NEW(&c->arena, bool, graph->n_values);
  c->copies = EGI_NEW(&c->arena, egi_value_id, graph->n_values);
  c->ordered = EGI_NEW(&c->arena, egi_value_id, graph->n_values);
  if (!c->is_needed || !c->copies || !c->ordered) return EG_ERROR_MEMORY;
  EG_TRY(copy_nodes(c));
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
