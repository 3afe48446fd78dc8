/* Wide layers in tiles of rows: a block of the residual stream that treats each token alone (norm, products, gate, sum)
 * becomes that block on pieces of its rows, one after the other, and their concatenation. The wide values between,
 * whose rows are longer than the stream's, then exist for a piece at a time: in the forward pass, and where the block
 * is made again in the backward pass too. Precondition: a graph with a loss, before differentiate (sums over rows for
 * weights are then sums over pieces: numbers differ in rounding). A block in tiles holds a Split and is left alone. */
#include "passes/checkpoint.h"

enum { DEFAULT_TILES = 4, MAX_TILES = 64, CHUNK_ROWS = 1024 };

typedef struct tiler {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_blocks blocks;
  egi_emitter emit;
  egi_node_id n_nodes; /* of the graph as it was */
  egi_node_id *first;  /* by block: its first node, and one behind its last */
  egi_node_id *end;
  egi_value_id *pieces;   /* by value: in the tile being made */
  egi_value_id *replaced; /* by value: by a concatenation */
  uint32_t n_values;
} tiler;

/* ---- which blocks ----------------------------------------------------------------------------------------------- */

/* All dims but the last are those of the block's input. */
static bool has_rows_of(const egi_graph *graph, egi_value_id value, egi_value_id input) {
  const egi_value *a = &graph->values[value], *b = &graph->values[input];
  egi_dims *dims = graph->module->dims;
  if (a->rank != b->rank || a->rank < 2) return false;
  for (int i = 0; i + 1 < a->rank; i++)
    if (egi_dim_resolve(dims, a->dims[i]) != egi_dim_resolve(dims, b->dims[i])) return false;
  return true;
}

static int64_t row_length(const egi_graph *graph, egi_value_id value) {
  const egi_value *v = &graph->values[value];
  int64_t length = 0;
  return v->rank > 0 &&
                 egi_dim_value(graph->module->dims, egi_dim_resolve(graph->module->dims, v->dims[v->rank - 1]), &length)
             ? length
             : 0;
}

/* An operand beside the rows: the same for all of them. */
static bool is_shared(const egi_graph *graph, egi_value_id value, int most_rank) {
  const egi_value *v = &graph->values[value];
  int64_t size;
  if (v->rank < 0 || v->rank > most_rank) return false;
  for (int i = 0; i < v->rank; i++)
    if (!egi_dim_value(graph->module->dims, egi_dim_resolve(graph->module->dims, v->dims[i]), &size)) return false;
  return true;
}

static bool is_last_axis(const egi_node *node, int rank, int64_t usual) {
  int64_t axis = egi_node_int(node, "axis", usual);
  return axis == -1 || axis == rank - 1;
}

/* The largest rank of operands that are no rows, or -1: the node is none that treats rows alone. */
static int shared_rank(const egi_node *node, int rank) {
  switch (node->op) {
  case EGI_OP_RMSNormalization:
  case EGI_OP_LayerNormalization:
    return is_last_axis(node, rank, -1) ? 1 : -1;
  case EGI_OP_Softmax:
    return is_last_axis(node, rank, -1) ? 0 : -1;
  case EGI_OP_Linear:
    return EGI_MAX_RANK;
  case EGI_OP_MatMul:
  case EGI_OP_AddMatMul:
    return 2;
  default:
    return egi_op_get(node->op)->flags & EGI_OP_ELEMENTWISE ? 1 : -1;
  }
}

static bool treats_rows_alone(const tiler *t, egi_node_id id, egi_value_id input) {
  const egi_graph *graph = t->graph;
  const egi_node *node = &graph->nodes[id];
  int most_rank = shared_rank(node, graph->values[input].rank);
  if (most_rank < 0 || (egi_op_get(node->op)->flags & EGI_OP_EFFECT)) return false;
  bool is_product = node->op == EGI_OP_MatMul || node->op == EGI_OP_AddMatMul;
  for (unsigned i = 0; i < node->n_inputs; i++) {
    egi_value_id operand = node->inputs[i];
    if (operand == 0) continue;
    bool is_flow = t->blocks.of_value[operand] != 0, is_right = is_product && i + 1 == node->n_inputs;
    if (is_flow && (is_right || !has_rows_of(graph, operand, input))) return false;
    if (!is_flow && !is_shared(graph, operand, most_rank)) return false;
    if (!is_flow && is_product && graph->values[operand].rank > 1 && !is_right) return false;
  }
  for (unsigned i = 0; i < node->n_outputs; i++)
    if (node->outputs[i] != 0 && i == 0 && !has_rows_of(graph, node->outputs[i], input)) return false;
  return true;
}

static bool can_tile(const tiler *t, uint32_t block) {
  const egi_graph *graph = t->graph;
  egi_value_id input = t->blocks.blocks[block].input;
  bool is_wide = false;
  if (block + 1 >= t->blocks.count || row_length(graph, input) == 0) return false;
  if (!has_rows_of(graph, t->blocks.blocks[block + 1].input, input)) return false;
  for (egi_node_id id = t->first[block]; id < t->end[block]; id++) {
    const egi_node *node = &graph->nodes[id];
    if (t->blocks.of_node[id] != block + 1) continue;
    if (!treats_rows_alone(t, id, input)) return false;
    is_wide = is_wide || row_length(graph, node->outputs[0]) > row_length(graph, input);
  }
  return is_wide;
}

/* ---- tiles ------------------------------------------------------------------------------------------------------ */

static eg_status add_tile(tiler *t, uint32_t block, unsigned tile) {
  for (egi_node_id id = t->first[block]; id < t->end[block]; id++) {
    egi_value_id inputs[8], outputs[4] = {0};
    const egi_node node = t->graph->nodes[id]; /* rows move while nodes are added, lists do not */
    if (t->blocks.of_node[id] != block + 1) continue;
    if (node.n_inputs > EGI_COUNT(inputs) || node.n_outputs > EGI_COUNT(outputs))
      return egi_fail_node(t->graph, id, EG_ERROR_INTERNAL, "too many operands for a tile");
    for (unsigned i = 0; i < node.n_inputs; i++) {
      egi_value_id input = node.inputs[i];
      inputs[i] = t->blocks.of_value[input] != 0 ? t->pieces[input] : input;
    }
    const char *suffix = egi_arena_format(&t->arena, "tile_%u", tile);
    if (!suffix) return EG_ERROR_MEMORY;
    EG_TRY(egi_repeat_node(t->graph, &t->arena, id, inputs, suffix, outputs));
    for (unsigned i = 0; i < node.n_outputs; i++) t->pieces[node.outputs[i]] = outputs[i];
  }
  return EG_OK;
}

static eg_status tile_block(tiler *t, uint32_t block, unsigned n_tiles) {
  egi_value_id input = t->blocks.blocks[block].input, result = t->blocks.blocks[block + 1].input;
  egi_value_id pieces[MAX_TILES], results[MAX_TILES];
  int axis = t->graph->values[input].rank - 2;
  const egi_attribute split[2] = {egi_attribute_int("axis", axis), egi_attribute_int("num_outputs", n_tiles)};
  t->emit.scope = t->blocks.blocks[block].scope;
  egi_value_id whole = t->replaced[input] != 0 ? t->replaced[input] : input;
  egi_emit_many(&t->emit, EGI_OP_Split, &whole, 1, split, 2, pieces, n_tiles);
  EG_TRY(t->emit.status);
  for (unsigned tile = 0; tile < n_tiles; tile++) {
    t->pieces[input] = pieces[tile];
    EG_TRY(add_tile(t, block, tile));
    results[tile] = t->pieces[result];
  }
  t->replaced[result] = egi_emit(&t->emit, EGI_OP_Concat, results, n_tiles, split, 1); /* the axis alone */
  t->run->report->n_matched++;
  t->run->has_changed = true;
  return t->emit.status;
}

/* Head and loss are one operator that goes through its rows in chunks: they may have fewer rows. */
static eg_status shorten_chunks(tiler *t, unsigned n_tiles) {
  const egi_attribute rows = egi_attribute_int("rows", n_tiles < CHUNK_ROWS / 16 ? CHUNK_ROWS / n_tiles : 16);
  for (egi_node_id id = 1; id < t->n_nodes; id++) {
    const egi_node *node = &t->graph->nodes[id];
    if (node->op != EGI_OP_LinearLogProbability || egi_node_int(node, "rows", 0) == rows.u.i) continue;
    EG_TRY(egi_node_set_attribute(t->graph, id, &rows));
    t->run->has_changed = true;
  }
  return EG_OK;
}

static void find_ranges(tiler *t) {
  for (egi_node_id id = t->n_nodes; id-- > 1;) {
    uint32_t block = t->blocks.of_node[id];
    if (block == 0) continue;
    t->first[block - 1] = id;
    if (t->end[block - 1] == 0) t->end[block - 1] = id + 1;
  }
}

static eg_status tile(tiler *t) {
  egi_graph *graph = t->graph;
  uint32_t wanted = t->run->checkpoints ? t->run->checkpoints->tiles : DEFAULT_TILES;
  unsigned n_tiles = wanted > MAX_TILES ? MAX_TILES : wanted;
  EG_TRY(egi_blocks_find(graph, &t->arena, &t->blocks));
  t->n_nodes = graph->n_nodes;
  t->n_values = graph->n_values;
  t->first = EGI_NEW(&t->arena, egi_node_id, (size_t)t->blocks.count + 1);
  t->end = EGI_NEW(&t->arena, egi_node_id, (size_t)t->blocks.count + 1);
  t->pieces = EGI_NEW(&t->arena, egi_value_id, t->n_values);
  t->replaced = EGI_NEW(&t->arena, egi_value_id, t->n_values);
  if (!t->first || !t->end || !t->pieces || !t->replaced) return EG_ERROR_MEMORY;
  find_ranges(t);
  for (uint32_t block = 0; block < t->blocks.count && n_tiles > 1; block++) {
    t->run->report->n_tried++;
    if (can_tile(t, block)) EG_TRY(tile_block(t, block, n_tiles));
  }
  if (n_tiles > 1) EG_TRY(shorten_chunks(t, n_tiles));
  for (egi_node_id id = 1; id < t->n_nodes; id++) {
    egi_node *node = &graph->nodes[id];
    for (unsigned i = 0; i < node->n_inputs; i++)
      if (t->replaced[node->inputs[i]] != 0) node->inputs[i] = t->replaced[node->inputs[i]];
  }
  return EG_OK;
}

eg_status egi_pass_tile_rows(egi_pass_run *run, egi_graph *graph) {
  tiler t = {.run = run, .graph = graph, .emit = {.graph = graph}};
  egi_arena_init(&t.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = tile(&t);
  egi_arena_clear(&t.arena);
  return status;
}
