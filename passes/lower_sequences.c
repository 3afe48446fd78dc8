/* Pieces of a SplitToSequence that are taken at constant positions are slices: torch.onnx writes split() and chunk()
 * so while its optimizer is off. Other uses of sequences stay, and are refused as not supported. Called first by
 * lower_operators; ends because each SequenceAt is looked at once. */
#include <string.h>

#include "passes/lower.h"

enum { MAX_PIECES = 256 };

static bool is_standard(const egi_node *node, const char *name) {
  return node->op == EGI_OP_UNKNOWN && node->domain != NULL && node->domain[0] == '\0' &&
         strcmp(node->op_name, name) == 0;
}

/* The SplitToSequence that gives the sequence, or NULL. */
static const egi_node *find_split(const egi_graph *graph, egi_value_id sequence) {
  const egi_value *value = &graph->values[sequence];
  if (sequence == 0 || value->kind != EGI_VALUE_NODE) return NULL;
  const egi_node *node = &graph->nodes[value->producer];
  return is_standard(node, "SplitToSequence") && node->n_inputs >= 1 && node->inputs[0] != 0 ? node : NULL;
}

/* A single number is the size of all pieces, a list the size of each; without one pieces are one long. */
static bool find_piece(const egi_graph *graph, const egi_node *split, int64_t position, int64_t bounds[2]) {
  int64_t sizes[MAX_PIECES] = {1}, start = 0;
  uint32_t count = 1;
  bool has_sizes = split->n_inputs > 1 && split->inputs[1] != 0;
  if (has_sizes && !egi_value_integers(graph, split->inputs[1], sizes, MAX_PIECES, &count)) return false;
  if (!has_sizes && egi_node_int(split, "keepdims", 1) == 0) return false;
  if (!has_sizes || graph->values[split->inputs[1]].rank == 0) {
    if (count != 1 || position < 0 || sizes[0] < 1 || position >= INT64_MAX / sizes[0] - 1) return false;
    bounds[0] = position * sizes[0];
    bounds[1] = bounds[0] + sizes[0];
    return true;
  }
  if (position < 0) position += count;
  if (position < 0 || position >= (int64_t)count) return false;
  for (int64_t i = 0; i <= position; i++) {
    if (sizes[i] < 0 || sizes[i] > INT64_MAX / MAX_PIECES) return false;
    bounds[0] = start;
    bounds[1] = start += sizes[i];
  }
  return true;
}

static eg_status lower_piece(egi_graph *graph, egi_node_id id, bool *out_is_lowered) {
  const egi_node node = graph->nodes[id]; /* its lists stay when it is gone */
  int64_t position = 0, bounds[2];
  uint32_t count = 0;
  const egi_node *split = node.n_inputs == 2 && node.n_outputs == 1 ? find_split(graph, node.inputs[0]) : NULL;
  if (split == NULL || node.inputs[1] == 0) return EG_OK;
  if (!egi_value_integers(graph, node.inputs[1], &position, 1, &count) || count != 1) return EG_OK;
  if (!find_piece(graph, split, position, bounds)) return EG_OK;
  const int64_t axis = egi_node_int(split, "axis", 0);
  egi_emitter emit = {.graph = graph};
  egi_value_id inputs[4] = {split->inputs[0], egi_emit_integers(&emit, &bounds[0], 1),
                            egi_emit_integers(&emit, &bounds[1], 1), egi_emit_integers(&emit, &axis, 1)};
  EG_TRY(emit.status);
  egi_graph_remove_node(graph, id);
  egi_node slice = {.op = EGI_OP_Slice, .name = node.name, .scope = node.scope, .n_inputs = 4, .n_outputs = 1};
  slice.inputs = inputs;
  slice.outputs = node.outputs;
  *out_is_lowered = true;
  return egi_graph_add_node(graph, &slice, &id);
}

/* Sequences that nobody takes anything of any more go. */
static eg_status remove_splits(egi_graph *graph, egi_arena *arena) {
  egi_uses uses;
  EG_TRY(egi_graph_uses(graph, arena, &uses));
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (!is_standard(node, "SplitToSequence") || node->n_outputs != 1) continue;
    egi_value_id sequence = node->outputs[0];
    bool is_used = uses.start[sequence] < uses.start[sequence + 1] || egi_graph_is_output(graph, sequence);
    if (!is_used) egi_graph_remove_node(graph, id);
  }
  return EG_OK;
}

eg_status egi_lower_sequences(egi_pass_run *run, egi_graph *graph) {
  uint32_t n_nodes = graph->n_nodes, n_lowered = 0;
  for (egi_node_id id = 1; id < n_nodes; id++) {
    bool is_lowered = false;
    if (!is_standard(&graph->nodes[id], "SequenceAt")) continue;
    EG_TRY(lower_piece(graph, id, &is_lowered));
    n_lowered += is_lowered;
  }
  if (n_lowered == 0) return EG_OK;
  egi_arena arena;
  egi_arena_init(&arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = remove_splits(graph, &arena);
  egi_arena_clear(&arena);
  run->report->n_matched += n_lowered;
  run->has_changed = true;
  return status == EG_OK ? egi_graph_tidy(graph) : status; /* the slices stand at the end */
}
