/* Matrices of linear layers are multiplied with as codes of few bits would give them back, and where the options say so
 * what goes into the layers too: FakeQuantize in front of a Linear's weight, inside of which graft_adapters puts an
 * adapter, so that what is rounded is W + scale · B · A: the one matrix that a merged model stores (Bondarenko et al.
 * 2024, arXiv:2406.06385). Layers that get an adapter, or where none do, all but the head and routers; of a layer that
 * computes several modules, all rows. Precondition: after name_modules and append_loss, before graft_adapters, float32.
 * A second run finds nothing left. */
#include "graph/fake_quantize.h"
#include "graph/linear.h"
#include "passes/passes.h"

typedef struct faker {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_map targets; /* paths of adapters */
} faker;

static bool is_wanted(const faker *state, const egi_linear *linear) {
  const egi_adapt_options *adapt = state->run->adapt;
  if (egi_is_saved_module(adapt->modules, linear->path)) return false;
  if (adapt->n_adapters > 0) return egi_map_get(&state->targets, linear->path, NULL);
  return !linear->is_head && !linear->is_router;
}

egi_node_id egi_fake_quantize_below(const egi_graph *graph, egi_node_id linear) {
  const egi_node *node = &graph->nodes[linear];
  if (node->op != EGI_OP_Linear) return 0;
  const egi_value *weight = &graph->values[node->inputs[EGI_LINEAR_WEIGHT]];
  bool is_fake = weight->kind == EGI_VALUE_NODE && graph->nodes[weight->producer].op == EGI_OP_FakeQuantize;
  return is_fake ? weight->producer : 0;
}

static egi_value_id rounded(egi_emitter *emit, const egi_fake_quantize *form, egi_value_id value) {
  egi_attribute attributes[4];
  unsigned n = egi_fake_quantize_write(form, attributes);
  return egi_emit(emit, EGI_OP_FakeQuantize, &value, 1, attributes, n);
}

static eg_status fake_one(faker *state, const egi_linear *linear) {
  egi_graph *graph = state->graph;
  const egi_fake_options *options = &state->run->adapt->fake;
  const egi_node *node = &graph->nodes[linear->node];
  if (linear->is_quantised)
    return egi_fail_node(graph, linear->node, EG_ERROR_UNSUPPORTED,
                         "its weight is stored quantised: there is nothing to train for codes");
  egi_value_id x = node->inputs[EGI_LINEAR_X], weight = node->inputs[EGI_LINEAR_WEIGHT];
  if (node->op != EGI_OP_Linear || graph->values[weight].dtype != EG_DTYPE_F32)
    return egi_fail_node(graph, linear->node, EG_ERROR_UNSUPPORTED,
                         "training for codes needs a linear layer in float32, this is %s in %s",
                         egi_op_get(node->op)->name, egi_dtype_name(graph->values[weight].dtype));
  egi_emitter emit = {.graph = graph, .scope = node->scope};
  weight = rounded(&emit, &options->weights, weight);
  if (options->has_activations) x = rounded(&emit, &options->activations, x);
  EG_TRY(emit.status);
  graph->nodes[linear->node].inputs[EGI_LINEAR_X] = x;
  graph->nodes[linear->node].inputs[EGI_LINEAR_WEIGHT] = weight;
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return EG_OK;
}

static eg_status fake_all(faker *state) {
  const egi_adapt_options *adapt = state->run->adapt;
  egi_linear *linears = NULL;
  size_t n = 0;
  egi_map_init(&state->targets, &state->arena);
  for (size_t i = 0; i < adapt->n_adapters; i++)
    EG_TRY(egi_map_put(&state->targets, adapt->adapters[i].path, (uint32_t)i));
  EG_TRY(egi_find_linears(state->graph, &state->arena, &linears, &n));
  for (size_t i = 0; i < n; i++) {
    bool is_done = egi_fake_quantize_below(state->graph, linears[i].node) != 0;
    state->run->report->n_tried++;
    if (!is_done && is_wanted(state, &linears[i])) EG_TRY(fake_one(state, &linears[i]));
  }
  return EG_OK;
}

eg_status egi_pass_fake_quantize(egi_pass_run *run, egi_graph *graph) {
  if (!run->adapt || !run->adapt->fake.is_wanted) return EG_OK;
  faker state = {.run = run, .graph = graph};
  egi_arena_init(&state.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = fake_all(&state);
  egi_arena_clear(&state.arena);
  return status;
}
