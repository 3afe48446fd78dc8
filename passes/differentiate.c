/* Reverse-mode differentiation of the loss with respect to the trainable states: appends the backward graph and one
 * Accumulate a parameter, as soon as its gradient is whole. First the values that depend on a trainable state are
 * marked, forwards; then the nodes from the loss back to them are visited once each, backwards, and rules run only for
 * inputs that are marked (is_wanted), so that no gradient is computed that nobody needs. Ends after that one sweep;
 * linear in the graph. A gradient that is a plain matrix product is added to what a value has already by AddMatMul, in
 * place; the product with a quantised weight adds it itself. */
#include <string.h>

#include "graph/linear.h"
#include "passes/passes.h"

static const egi_gradient_rule rules[EGI_OP_COUNT] = {
#define EGI_OP(symbol, domain, name, version, in_min, in_max, out_min, out_max, flags, shape, gradient) \
  [EGI_OP_##symbol] = egi_gradient_##gradient,
#define egi_gradient_none_piecewise NULL
#define egi_gradient_none_boolean NULL
#define egi_gradient_none_integer NULL
#define egi_gradient_none_constant NULL
#define egi_gradient_none_gradient NULL
#define egi_gradient_none_training NULL
#define egi_gradient_none_generation NULL
#define egi_gradient_none_eager NULL /* sizes or course that depend on data: never in a training graph */
#include "graph/ops.def"
#undef EGI_OP
};

egi_gradient_rule egi_gradient_rule_of(egi_op op) {
  return op > EGI_OP_NONE && op < EGI_OP_COUNT ? rules[op] : NULL;
}

typedef struct differentiator {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_emitter emit;
  bool *depends;           /* by value: on a trainable state */
  egi_value_id *gradients; /* by value: the sum so far, 0 none */
  egi_node_id *first_use;  /* by value: of a trainable state */
  egi_value_id step;       /* the step state */
  egi_node_id n_forward;   /* nodes of the forward graph */
  egi_value_id n_values;   /* values of the forward graph */
  egi_map states;          /* name -> gradient state */
} differentiator;

/* ---- marking ---------------------------------------------------------------------------------------------------- */

static eg_status list_gradient_states(differentiator *state) {
  const egi_module *module = state->graph->module;
  egi_map_init(&state->states, &state->arena);
  for (uint32_t i = 1; i < module->n_states; i++) {
    if (module->states[i].pool == EGI_POOL_GRADIENTS) EG_TRY(egi_map_put(&state->states, module->states[i].name, i));
  }
  return EG_OK;
}

/* The gradient state of a trainable parameter, or 0. */
static uint32_t gradient_state(const differentiator *state, egi_value_id value) {
  const egi_graph *graph = state->graph;
  uint32_t index = 0;
  if (graph->values[value].kind != EGI_VALUE_STATE) return 0;
  const egi_state *row = &graph->module->states[graph->values[value].index];
  if (row->pool != EGI_POOL_PARAMETERS || !egi_map_get(&state->states, row->name, &index)) return 0;
  return index;
}

static void mark_dependent(differentiator *state) {
  const egi_graph *graph = state->graph;
  for (egi_value_id id = 1; id < state->n_values; id++) state->depends[id] = gradient_state(state, id) != 0;
  for (egi_node_id id = 1; id < state->n_forward; id++) {
    const egi_node *node = &graph->nodes[id];
    bool is_dependent = false;
    if (node->op == EGI_OP_NONE) continue;
    for (unsigned i = 0; i < node->n_inputs; i++)
      if (state->first_use[node->inputs[i]] == 0) state->first_use[node->inputs[i]] = id;
    /* CastLike takes the type of its second input, no number. */
    unsigned n_inputs = node->op == EGI_OP_CastLike ? 1 : node->n_inputs;
    for (unsigned i = 0; i < n_inputs; i++) is_dependent = is_dependent || state->depends[node->inputs[i]];
    for (unsigned i = 0; is_dependent && i < node->n_outputs; i++) {
      egi_value_id output = node->outputs[i];
      if (output != 0 && egi_dtype_is_float(graph->values[output].dtype)) state->depends[output] = true;
    }
  }
}

/* ---- sums ------------------------------------------------------------------------------------------------------- */

/* The product that gives `value`, when it was added after `first_new` and has no other user: values that a rule hands
 * over are used by nothing else yet. */
static egi_node *new_product(const differentiator *state, egi_value_id value, egi_node_id first_new) {
  const egi_value *row = &state->graph->values[value];
  if (row->kind != EGI_VALUE_NODE || row->producer < first_new) return NULL;
  egi_node *node = &state->graph->nodes[row->producer];
  bool has_room =
      node->op == EGI_OP_LinearGrad && node->n_inputs > EGI_LINEAR_BIAS && node->inputs[EGI_LINEAR_BIAS] == 0;
  return node->op == EGI_OP_MatMul || has_room ? node : NULL;
}

/* gradients[value] += contribution. `is_alone`: the rule gave the contribution for one input only. */
static void add_gradient(differentiator *state, egi_value_id value, egi_value_id contribution, bool is_alone,
                         egi_node_id first_new) {
  egi_value_id *sum = &state->gradients[value];
  if (*sum == 0) {
    *sum = contribution;
    return;
  }
  egi_node *product = is_alone ? new_product(state, contribution, first_new) : NULL;
  bool is_like = egi_same_shape(state->graph, *sum, contribution);
  if (product && is_like && product->op == EGI_OP_LinearGrad) {
    product->inputs[EGI_LINEAR_BIAS] = *sum;
    *sum = contribution;
    return;
  }
  if (product && is_like) {
    const egi_value_id inputs[3] = {*sum, product->inputs[0], product->inputs[1]};
    egi_graph_remove_node(state->graph, state->graph->values[contribution].producer);
    *sum = egi_emit(&state->emit, EGI_OP_AddMatMul, inputs, 3, NULL, 0);
    return;
  }
  *sum = egi_emit_binary(&state->emit, EGI_OP_Add, *sum, contribution);
}

/* ---- nodes ------------------------------------------------------------------------------------------------------ */

enum { MAX_OPERANDS = 256 };

static bool appears_once(const egi_value_id *values, unsigned count, unsigned index) {
  for (unsigned i = 0; i < count; i++) {
    if (i != index && values[i] == values[index]) return false;
  }
  return true;
}

static eg_status take_results(differentiator *state, egi_node_id id, egi_value_id *in_gradients,
                              egi_node_id first_new) {
  egi_graph *graph = state->graph;
  const egi_node node = graph->nodes[id];
  for (unsigned i = 0; i < node.n_inputs; i++) {
    egi_value_id value = node.inputs[i], gradient = in_gradients[i];
    if (gradient == 0) continue;
    if (graph->values[gradient].rank >= 0 && !egi_same_shape(graph, gradient, value))
      return egi_fail_node(graph, id, EG_ERROR_INTERNAL, "the gradient of input %u has another shape", i);
    bool is_alone = appears_once(in_gradients, node.n_inputs, i) && appears_once(node.outputs, node.n_outputs, i);
    add_gradient(state, value, gradient, is_alone, first_new);
  }
  return state->emit.status;
}

static eg_status visit(differentiator *state, egi_node_id id) {
  egi_graph *graph = state->graph;
  const egi_node node = graph->nodes[id]; /* rows move while nodes are added, lists do not */
  egi_value_id out_gradients[MAX_OPERANDS] = {0}, in_gradients[MAX_OPERANDS] = {0};
  bool is_wanted[MAX_OPERANDS] = {false}, has_gradient = false, is_any_wanted = false;
  if (node.n_inputs > MAX_OPERANDS || node.n_outputs > MAX_OPERANDS)
    return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "more than %d operands on the way to a gradient",
                         (int)MAX_OPERANDS);
  for (unsigned i = 0; i < node.n_outputs; i++) {
    out_gradients[i] = node.outputs[i] != 0 ? state->gradients[node.outputs[i]] : 0;
    has_gradient = has_gradient || out_gradients[i] != 0;
  }
  for (unsigned i = 0; i < node.n_inputs; i++) {
    is_wanted[i] = state->depends[node.inputs[i]];
    is_any_wanted = is_any_wanted || is_wanted[i];
  }
  if (!has_gradient || !is_any_wanted) return EG_OK;
  state->run->report->n_tried++;
  egi_gradient_rule rule = egi_gradient_rule_of(node.op);
  if (!rule) return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "this operator has no gradient");
  state->emit.scope = node.scope;
  egi_gradient gradient = {.emit = &state->emit,
                           .graph = graph,
                           .node = id,
                           .out_gradients = out_gradients,
                           .is_wanted = is_wanted,
                           .in_gradients = in_gradients};
  egi_node_id first_new = graph->n_nodes;
  EG_TRY(rule(&gradient));
  EG_TRY(state->emit.status);
  state->run->report->n_matched++;
  return take_results(state, id, in_gradients, first_new);
}

/* ---- ends ------------------------------------------------------------------------------------------------------- */

eg_status egi_find_loss(const egi_graph *graph, egi_value_id *out_loss) {
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    if (strcmp(graph->values[graph->outputs[i]].name, EGI_OUTPUT_LOSS) == 0) {
      *out_loss = graph->outputs[i];
      return EG_OK;
    }
  }
  return egi_fail(graph->module->ctx, EG_ERROR_ARGUMENT, "the graph has no loss; append_loss comes first");
}

/* The gradient in the shape and type of its state, added to it. */
static eg_status accumulate(differentiator *state, egi_value_id value) {
  egi_graph *graph = state->graph;
  egi_emitter *emit = &state->emit;
  egi_value_id gradient = state->gradients[value], target = 0;
  EG_TRY(egi_graph_add_state(graph, gradient_state(state, value), &target));
  emit->scope = NULL;
  gradient = egi_emit_cast(emit, gradient, graph->values[target].dtype);
  if (emit->status == EG_OK && !egi_same_shape(graph, gradient, target))
    gradient = egi_emit_binary(emit, EGI_OP_Reshape, gradient, egi_emit_unary(emit, EGI_OP_Shape, target));
  const egi_value_id inputs[3] = {target, gradient, state->step};
  egi_emit(emit, EGI_OP_Accumulate, inputs, 3, NULL, 0);
  return emit->status;
}

/* Once the first node that takes a parameter has been visited its gradient is whole, and need not be held any longer.
 */
static eg_status accumulate_whole(differentiator *state, egi_node_id id) {
  const egi_node node = state->graph->nodes[id];
  for (unsigned i = 0; i < node.n_inputs; i++) {
    egi_value_id value = node.inputs[i];
    if (state->first_use[value] != id || state->gradients[value] == 0 || gradient_state(state, value) == 0) continue;
    EG_TRY(accumulate(state, value));
    state->first_use[value] = 0; /* a node may take it twice */
  }
  return EG_OK;
}

static eg_status add_step(differentiator *state) {
  uint32_t index = 0;
  EG_TRY(egi_module_add_pool_state(state->graph->module, EGI_POOL_STEP, &index));
  return egi_graph_add_state(state->graph, index, &state->step);
}

static eg_status differentiate(differentiator *state) {
  egi_graph *graph = state->graph;
  egi_value_id loss = 0;
  EG_TRY(egi_find_loss(graph, &loss));
  EG_TRY(egi_graph_tidy(graph));
  state->n_forward = graph->n_nodes;
  state->n_values = graph->n_values;
  state->depends = EGI_NEW(&state->arena, bool, state->n_values);
  state->gradients = EGI_NEW(&state->arena, egi_value_id, state->n_values);
  state->first_use = EGI_NEW(&state->arena, egi_node_id, state->n_values);
  if (!state->depends || !state->gradients || !state->first_use) return EG_ERROR_MEMORY;
  EG_TRY(list_gradient_states(state));
  mark_dependent(state);
  if (!state->depends[loss])
    return egi_fail(state->run->ctx, EG_ERROR_DATA, "the loss does not depend on anything that can be trained");
  state->gradients[loss] = egi_emit_scalar(&state->emit, 1.0, graph->values[loss].dtype);
  EG_TRY(state->emit.status);
  EG_TRY(add_step(state));
  for (egi_node_id id = state->n_forward; id-- > 1;) {
    if (graph->nodes[id].op == EGI_OP_NONE) continue;
    EG_TRY(visit(state, id));
    EG_TRY(accumulate_whole(state, id));
  }
  return EG_OK;
}

eg_status egi_pass_differentiate(egi_pass_run *run, egi_graph *graph) {
  differentiator state = {.run = run, .graph = graph, .emit = {.graph = graph}};
  egi_arena_init(&state.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = differentiate(&state);
  egi_arena_clear(&state.arena);
  run->has_changed = true;
  return status;
}
