/* y + alpha · z·B, where y = x·Wᵀ is a layer's own result and used for nothing else, becomes x·Wᵀ + (z·(alpha · B)):
 * the adapter's narrow product is written once, and the wide one adds it on its way out, where before its result was
 * read and written again. Layers with a bias keep their form. After join_adapters, before differentiate. Terminates:
 * one sweep; a layer that adds something is no candidate, so that a second run changes nothing. */
#include "graph/linear.h"
#include "passes/passes.h"

enum { MOST_ATTRIBUTES = 16 };

typedef struct reorder {
  egi_graph *graph;
  egi_emitter emit;
  egi_arena arena;
  uint32_t *n_uses;  /* by value */
  egi_value_id *map; /* by value: what takes its place */
  uint32_t n_values;
} reorder;

static eg_status count_uses(reorder *r) {
  const egi_graph *graph = r->graph;
  r->n_uses = EGI_NEW(&r->arena, uint32_t, r->n_values);
  r->map = EGI_NEW(&r->arena, egi_value_id, r->n_values);
  if (r->n_uses == NULL || r->map == NULL) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    for (uint16_t i = 0; i < graph->nodes[id].n_inputs && graph->nodes[id].op != EGI_OP_NONE; i++)
      r->n_uses[graph->nodes[id].inputs[i]]++;
  for (uint32_t i = 0; i < graph->n_outputs; i++) r->n_uses[graph->outputs[i]]++;
  return EG_OK;
}

/* The layer whose result AddMatMul adds to, or NULL. */
static const egi_node *layer_of(const reorder *r, const egi_node *sum) {
  const egi_graph *graph = r->graph;
  egi_value_id y = sum->inputs[0];
  const egi_value *row = &graph->values[y];
  if (row->kind != EGI_VALUE_NODE || r->n_uses[y] != 1 || !egi_same_shape(graph, y, sum->outputs[0])) return NULL;
  const egi_node *layer = &graph->nodes[row->producer];
  bool has_bias = layer->n_inputs > EGI_LINEAR_BIAS && layer->inputs[EGI_LINEAR_BIAS] != 0;
  bool is_plain = layer->op == EGI_OP_Linear && !has_bias && layer->n_attributes <= MOST_ATTRIBUTES;
  return is_plain && row->rank > 1 && graph->values[sum->inputs[2]].rank == 2 ? layer : NULL;
}

static eg_status reorder_one(reorder *r, egi_node_id id) {
  egi_graph *graph = r->graph;
  const egi_node sum = graph->nodes[id], *found = layer_of(r, &sum);
  if (found == NULL) return EG_OK;
  const egi_node layer = *found; /* rows move while nodes are added */
  egi_value_id inputs[EGI_LINEAR_INPUTS] = {0}, factor = sum.inputs[2];
  float alpha = egi_node_float(&sum, "alpha", 1.0F);
  r->emit.scope = sum.scope;
  if (alpha < 1.0F || alpha > 1.0F)
    factor = egi_emit_binary(&r->emit, EGI_OP_Mul, factor,
                             egi_emit_scalar(&r->emit, (double)alpha, graph->values[factor].dtype));
  for (uint16_t i = 0; i < layer.n_inputs; i++) inputs[i] = layer.inputs[i];
  inputs[EGI_LINEAR_BIAS] = egi_emit_binary(&r->emit, EGI_OP_MatMul, sum.inputs[1], factor);
  unsigned n_inputs = layer.n_inputs > EGI_LINEAR_BIAS ? layer.n_inputs : EGI_LINEAR_BIAS + 1;
  r->emit.scope = layer.scope;
  r->map[sum.outputs[0]] = egi_emit(&r->emit, EGI_OP_Linear, inputs, n_inputs, layer.attributes, layer.n_attributes);
  return r->emit.status;
}

static eg_status reorder_all(reorder *r, egi_pass_run *run) {
  egi_graph *graph = r->graph;
  EG_TRY(count_uses(r));
  for (egi_node_id id = 1, n = graph->n_nodes; id < n; id++) {
    if (graph->nodes[id].op != EGI_OP_AddMatMul) continue;
    egi_value_id result = graph->nodes[id].outputs[0];
    run->report->n_tried++;
    EG_TRY(reorder_one(r, id));
    if (r->map[result] == 0) continue;
    run->report->n_matched++;
    run->has_changed = true;
  }
  if (run->report->n_matched == 0) return EG_OK;
  egi_value_id *map = EGI_NEW(&r->arena, egi_value_id, graph->n_values);
  if (map == NULL) return EG_ERROR_MEMORY;
  memcpy(map, r->map, r->n_values * sizeof *map);
  egi_graph_replace_many(graph, map);
  return EG_OK;
}

eg_status egi_pass_add_base_last(egi_pass_run *run, egi_graph *graph) {
  reorder r = {.graph = graph, .emit = {.graph = graph}, .n_values = graph->n_values};
  egi_arena_init(&r.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = reorder_all(&r, run);
  egi_arena_clear(&r.arena);
  return status;
}
