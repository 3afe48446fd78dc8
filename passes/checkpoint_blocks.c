/* Blocks of a forward pass, by the flow of data. On the way from the embedded tokens to the loss a value is a boundary
 * when no edge leads past it: in any order of execution of a graph with one source and one sink those are exactly the
 * values that every path comes through. What the backward pass of a block waits for is told by depth: a value of the
 * backward pass is as deep as the earliest block whose values it is made of. A few sweeps, linear in the graph. */
#include "passes/checkpoint.h"

typedef struct finder {
  egi_blocks *found;
  const egi_graph *graph;
  egi_arena *arena;
  bool *is_reached;      /* by value: computed from the embedded tokens */
  egi_node_id *last_use; /* by value: by a node on the way */
  egi_value_id source;
} finder;

bool egi_is_size(egi_op op) {
  return op == EGI_OP_Shape || op == EGI_OP_Size;
}

bool egi_is_cheap(egi_op op) {
  switch (op) {
  case EGI_OP_NONE:
  case EGI_OP_UNKNOWN:
    return false;
  case EGI_OP_RMSNormalization:
  case EGI_OP_LayerNormalization:
  case EGI_OP_RotaryEmbedding:
  case EGI_OP_Softmax:
  case EGI_OP_LogSoftmax:
  case EGI_OP_Concat:
  case EGI_OP_Dispatch:
  case EGI_OP_KeyedDropout: /* the same numbers every time */
  case EGI_OP_FakeQuantize:
  case EGI_OP_SumTo:
  case EGI_OP_Barrier:
  case EGI_OP_ReduceLogSumExp:
  case EGI_OP_ReduceMax:
  case EGI_OP_ReduceMean:
  case EGI_OP_ReduceMin:
  case EGI_OP_ReduceProd:
  case EGI_OP_ReduceSum:
    return true;
  default:
    return (egi_op_get(op)->flags & (EGI_OP_ELEMENTWISE | EGI_OP_VIEW)) != 0;
  }
}

eg_status egi_repeat_node(egi_graph *graph, egi_arena *arena, egi_node_id id, const egi_value_id *inputs,
                          const char *suffix, egi_value_id *out_outputs) {
  egi_node copy = graph->nodes[id];
  egi_node_id added = 0;
  for (unsigned i = 0; i < copy.n_outputs; i++) {
    egi_value_id first = copy.outputs[i];
    out_outputs[i] = EGI_VALUE_UNWANTED;
    if (first == 0) continue;
    const char *name = egi_arena_format(arena, "%s/%s", graph->values[first].name, suffix);
    if (!name) return EG_ERROR_MEMORY;
    EG_TRY(egi_graph_add_value(graph, name, &out_outputs[i]));
  }
  copy.inputs = (egi_value_id *)(uintptr_t)inputs; /* only read: the node is copied */
  copy.outputs = out_outputs;
  copy.name = egi_arena_format(arena, "%s/%s", copy.name ? copy.name : "", suffix);
  if (!copy.name) return EG_ERROR_MEMORY;
  EG_TRY(egi_graph_add_node(graph, &copy, &added));
  for (unsigned i = 0; i < copy.n_outputs; i++)
    if (out_outputs[i] == EGI_VALUE_UNWANTED) out_outputs[i] = 0;
  return egi_infer_node(graph, added);
}

/* ---- the way from the tokens to the loss ------------------------------------------------------------------------ */

/* Marks what the node depends on, `without` left aside. */
static void mark_producers(const egi_graph *graph, const egi_node *node, const bool *without, bool *is_marked) {
  for (unsigned i = 0; i < node->n_inputs; i++) {
    const egi_value *input = &graph->values[node->inputs[i]];
    if (node->inputs[i] == 0 || input->kind != EGI_VALUE_NODE) continue;
    if (!without || !without[input->producer]) is_marked[input->producer] = true;
  }
}

static void mark_forward(const finder *f, egi_value_id loss) {
  const egi_graph *graph = f->graph;
  bool *is_forward = f->found->is_forward;
  if (graph->values[loss].kind != EGI_VALUE_NODE) return;
  is_forward[graph->values[loss].producer] = true;
  for (egi_node_id id = graph->n_nodes; id-- > 1;)
    if (is_forward[id]) mark_producers(graph, &graph->nodes[id], NULL, is_forward);
}

/* What is only reported, how experts are used say, is neither: it stands behind the forward pass and reads what that
 * made. */
static void mark_backward(const finder *f) {
  const egi_graph *graph = f->graph;
  bool *is_backward = f->found->is_backward;
  for (egi_node_id id = graph->n_nodes; id-- > 1;) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_NONE || f->found->is_forward[id]) continue;
    if (node->op != EGI_OP_UNKNOWN && (egi_op_get(node->op)->flags & EGI_OP_EFFECT)) is_backward[id] = true;
    if (is_backward[id]) mark_producers(graph, node, f->found->is_forward, is_backward);
  }
}

static bool any_input(const egi_node *node, const bool *is_marked) {
  for (unsigned i = 0; i < node->n_inputs; i++) {
    if (node->inputs[i] != 0 && is_marked[node->inputs[i]]) return true;
  }
  return false;
}

static bool is_lookup(const egi_node *node, const bool *is_token) {
  bool is_gather = node->op == EGI_OP_Gather || node->op == EGI_OP_GatherND || node->op == EGI_OP_GatherElements;
  return is_gather && node->inputs[1] != 0 && is_token[node->inputs[1]];
}

/* The first table that the tokens are looked up in, else embeddings that are given. Sizes and documents' bounds are
 * made of the tokens' number, not of the tokens. */
static eg_status find_source(finder *f) {
  const egi_graph *graph = f->graph;
  egi_value_id tokens = 0;
  bool *is_token = EGI_NEW(f->arena, bool, graph->n_values);
  if (!is_token) return EG_ERROR_MEMORY;
  bool has_tokens = egi_find_token_input(graph, &tokens) == EG_OK;
  is_token[has_tokens ? tokens : 0] = has_tokens;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (!f->found->is_forward[id] || egi_is_size(node->op) || node->op == EGI_OP_PackedMetadata) continue;
    if (is_lookup(node, is_token) && egi_dtype_is_float(graph->values[node->outputs[0]].dtype)) {
      f->source = node->outputs[0];
      return EG_OK;
    }
    if (!any_input(node, is_token)) continue;
    for (unsigned i = 0; i < node->n_outputs; i++)
      if (node->outputs[i] != 0) is_token[node->outputs[i]] = true;
  }
  for (uint32_t i = 0; i < graph->n_inputs && f->source == 0; i++) {
    const egi_value *value = &graph->values[graph->inputs[i]];
    if (egi_dtype_is_float(value->dtype) && value->rank == 3) f->source = graph->inputs[i];
  }
  return EG_OK;
}

/* A forward node that is reached leads to the loss along nodes that are reached: it is on the way. */
static bool is_on_way(const finder *f, egi_node_id id) {
  const egi_node *node = &f->graph->nodes[id];
  bool is_aside = egi_is_size(node->op) || node->op == EGI_OP_Offload;
  return f->found->is_forward[id] && !is_aside && any_input(node, f->is_reached);
}

static void walk_way(finder *f) {
  const egi_graph *graph = f->graph;
  f->is_reached[f->source] = true;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (!is_on_way(f, id)) continue;
    for (unsigned i = 0; i < node->n_inputs; i++) f->last_use[node->inputs[i]] = id;
    for (unsigned i = 0; i < node->n_outputs; i++)
      if (node->outputs[i] != 0) f->is_reached[node->outputs[i]] = true;
  }
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

typedef struct sweep {
  egi_node_id reach; /* last use of any value so far */
  bool has_dear;     /* the block has an operator that is dear to run again */
  uint32_t capacity;
} sweep;

/* The only result that goes on from here, when nothing leads past the node, or 0. */
static egi_value_id boundary_at(const finder *f, egi_node_id id, sweep *at) {
  const egi_node *node = &f->graph->nodes[id];
  bool is_passed = at->reach > id;
  egi_value_id only = 0;
  unsigned n_used = 0;
  for (unsigned i = 0; i < node->n_outputs; i++) {
    egi_value_id output = node->outputs[i];
    if (output == 0 || f->last_use[output] <= id) continue;
    n_used++;
    only = output;
    if (f->last_use[output] > at->reach) at->reach = f->last_use[output];
  }
  return !is_passed && n_used == 1 ? only : 0;
}

static eg_status add_block(finder *f, egi_value_id input, sweep *at) {
  egi_blocks *found = f->found;
  EG_TRY(EGI_GROW(f->arena, &found->blocks, found->count, &at->capacity));
  found->blocks[found->count++] = (egi_block){.input = input};
  found->of_value[input] = found->count;
  at->has_dear = false;
  return EG_OK;
}

static eg_status find_blocks(finder *f) {
  egi_blocks *found = f->found;
  sweep at = {.reach = f->last_use[f->source]};
  EG_TRY(add_block(f, f->source, &at));
  for (egi_node_id id = 1; id < f->graph->n_nodes; id++) {
    const egi_node *node = &f->graph->nodes[id];
    if (!is_on_way(f, id)) continue;
    egi_block *block = &found->blocks[found->count - 1];
    found->of_node[id] = found->count;
    if (!block->scope) block->scope = node->scope;
    at.has_dear = at.has_dear || !egi_is_cheap(node->op);
    for (unsigned i = 0; i < node->n_outputs; i++)
      if (node->outputs[i] != 0) found->of_value[node->outputs[i]] = found->count;
    egi_value_id boundary = boundary_at(f, id, &at);
    if (boundary != 0 && at.has_dear) EG_TRY(add_block(f, boundary, &at));
  }
  return EG_OK;
}

/* ---- the backward pass ------------------------------------------------------------------------------------------ */

/* Depth 1 is the first block; 0: made of no block's values. */
static uint32_t depth_of_node(const finder *f, const egi_node *node, const uint32_t *depth) {
  uint32_t least = 0;
  for (unsigned i = 0; i < node->n_inputs; i++) {
    egi_value_id input = node->inputs[i];
    uint32_t own = f->found->of_value[input] != 0 ? f->found->of_value[input] : depth[input];
    if (input != 0 && own != 0 && (least == 0 || own < least)) least = own;
  }
  return least;
}

/* Of the values of the backward pass that come from behind the block, the one that is made last. */
static void take_gradient(const finder *f, const egi_node *node, uint32_t at, const uint32_t *depth) {
  const egi_graph *graph = f->graph;
  egi_block *block = &f->found->blocks[at - 1];
  if (block->gradient != 0) return;
  for (unsigned i = 0; i < node->n_inputs; i++) {
    egi_value_id input = node->inputs[i], best = block->gradient;
    if (input == 0 || f->found->of_value[input] != 0 || depth[input] <= at) continue;
    if (best == 0 || graph->values[input].producer > graph->values[best].producer) block->gradient = input;
  }
}

static eg_status study_backward(finder *f) {
  const egi_graph *graph = f->graph;
  uint32_t *depth = EGI_NEW(f->arena, uint32_t, graph->n_values);
  if (!depth) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (!f->found->is_backward[id] || egi_is_size(node->op)) continue;
    uint32_t own = depth_of_node(f, node, depth);
    for (unsigned i = 0; i < node->n_inputs; i++)
      if (f->found->of_value[node->inputs[i]] != 0) f->found->is_saved[node->inputs[i]] = true;
    for (unsigned i = 0; i < node->n_outputs; i++) depth[node->outputs[i]] = own;
    depth[0] = 0;
    if (own != 0) take_gradient(f, node, own, depth);
  }
  return EG_OK;
}

eg_status egi_blocks_find(const egi_graph *graph, egi_arena *arena, egi_blocks *out_blocks) {
  finder f = {.found = out_blocks, .graph = graph, .arena = arena};
  egi_value_id loss = 0;
  EG_TRY(egi_find_loss(graph, &loss));
  *out_blocks = (egi_blocks){.graph = graph,
                             .is_forward = EGI_NEW(arena, bool, graph->n_nodes),
                             .is_backward = EGI_NEW(arena, bool, graph->n_nodes),
                             .of_node = EGI_NEW(arena, uint32_t, graph->n_nodes),
                             .of_value = EGI_NEW(arena, uint32_t, graph->n_values),
                             .is_saved = EGI_NEW(arena, bool, graph->n_values)};
  f.is_reached = EGI_NEW(arena, bool, graph->n_values);
  f.last_use = EGI_NEW(arena, egi_node_id, graph->n_values);
  if (!out_blocks->is_forward || !out_blocks->is_backward || !out_blocks->of_node || !out_blocks->of_value ||
      !out_blocks->is_saved || !f.is_reached || !f.last_use)
    return EG_ERROR_MEMORY;
  mark_forward(&f, loss);
  mark_backward(&f);
  EG_TRY(find_source(&f));
  if (f.source == 0) return EG_OK;
  walk_way(&f);
  EG_TRY(find_blocks(&f));
  return study_backward(&f);
}
