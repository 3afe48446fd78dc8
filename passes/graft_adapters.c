/* LoRA beside the linear layers and on the experts that the caller chose: y + scale · (x·Aᵀ)·Bᵀ (Hu et al. 2021,
 * arXiv:2106.09685), A [r, in] and B [out, r] as PEFT stores them; a state in the place of each parameter of modules
 * that are trained whole, or, for full training, of all. States that the module has already, from another graph, are
 * used again. Precondition: after name_modules, float32. */
#include <string.h>

#include "passes/passes.h"

typedef struct grafter {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_redirect redirect;
  egi_map states; /* pool digit and name -> index in the module */
  egi_linear *linears;
  egi_expert_parameter *experts;
  size_t n_linears, n_experts;
  egi_value_id step; /* the step state, once something is dropped */
  uint32_t n_sites;
} grafter;

/* ---- states ----------------------------------------------------------------------------------------------------- */

static const char *state_key(grafter *state, egi_state_pool pool, const char *name) {
  return egi_arena_format(&state->arena, "%d%s", (int)pool, name);
}

static eg_status list_states(grafter *state) {
  const egi_module *module = state->graph->module;
  egi_map_init(&state->states, &state->arena);
  for (uint32_t i = 1; i < module->n_states; i++) {
    const char *key = state_key(state, module->states[i].pool, module->states[i].name);
    if (!key) return EG_ERROR_MEMORY;
    EG_TRY(egi_map_put(&state->states, key, i));
  }
  return EG_OK;
}

/* The state of that name in that pool, made when there is none. */
static eg_status make_state(grafter *state, const egi_state *wanted, uint32_t *out_index) {
  egi_module *module = state->graph->module;
  const char *key = state_key(state, wanted->pool, wanted->name);
  if (!key) return EG_ERROR_MEMORY;
  if (egi_map_get(&state->states, key, out_index)) {
    const egi_state *found = &module->states[*out_index];
    bool is_equal = found->rank == wanted->rank;
    for (int i = 0; is_equal && i < wanted->rank; i++) is_equal = found->dims[i] == wanted->dims[i];
    if (!is_equal)
      return egi_fail(state->run->ctx, EG_ERROR_DATA, "parameter \"%s\" exists with another shape", wanted->name);
    return EG_OK;
  }
  EG_TRY(egi_module_add_state(module, wanted, out_index));
  return egi_map_put(&state->states, key, *out_index);
}

/* A parameter, and its gradient unless nothing is trained; *out_value is the parameter in the graph. */
static eg_status make_trainable(grafter *state, const egi_state *parameter, egi_value_id *out_value) {
  uint32_t index = 0, ignored = 0;
  EG_TRY(make_state(state, parameter, &index));
  if (!state->run->adapt->is_frozen) {
    egi_state gradient = *parameter;
    gradient.pool = EGI_POOL_GRADIENTS;
    gradient.weight = 0;
    EG_TRY(make_state(state, &gradient, &ignored));
  }
  return egi_graph_add_state(state->graph, index, out_value);
}

/* ---- LoRA ------------------------------------------------------------------------------------------------------- */

typedef struct adapter_shape {
  int64_t dims[2];
  uint32_t n_stacked, first; /* weight of first values, or 0 */
} adapter_shape;

static eg_status make_adapter_state(grafter *state, const char *path, char which, const adapter_shape *shape,
                                    egi_value_id *out_value) {
  egi_state parameter = {.pool = EGI_POOL_PARAMETERS, .dtype = EG_DTYPE_F32, .rank = 2, .has_decay = true};
  parameter.n_stacked = shape->n_stacked;
  parameter.weight = shape->first;
  parameter.name = egi_arena_format(&state->arena, "base_model.model.%s.lora_%c.weight", path, which);
  parameter.dims[0] = shape->dims[0];
  parameter.dims[1] = shape->dims[1];
  return parameter.name ? make_trainable(state, &parameter, out_value) : EG_ERROR_MEMORY;
}

/* As PEFT, only on the way through the adapter, each adapter its own. */
static eg_status drop_input(grafter *state, egi_emitter *emit, egi_value_id *x) {
  const egi_adapt_options *adapt = state->run->adapt;
  egi_attribute attributes[3];
  if (!(adapt->dropout > 0.0) || adapt->is_frozen) return EG_OK;
  if (state->step == 0) EG_TRY(egi_step_value(state->graph, &state->step));
  egi_dropout_attributes(adapt, adapt->dropout, state->n_sites++, attributes);
  *x = egi_emit(emit, EGI_OP_KeyedDropout, (const egi_value_id[2]){*x, state->step}, 2, attributes, 3);
  return emit->status;
}

/* sum + alpha · (x · Aᵀ) · Bᵀ */
static egi_value_id add_product(egi_emitter *emit, egi_value_id sum, egi_value_id x, const egi_value_id factors[2],
                                double alpha) {
  egi_value_id down = egi_emit_binary(emit, EGI_OP_MatMul, x, egi_emit_unary(emit, EGI_OP_Transpose, factors[0]));
  const egi_value_id inputs[3] = {sum, down, egi_emit_unary(emit, EGI_OP_Transpose, factors[1])};
  const egi_attribute attribute = egi_attribute_float("alpha", (float)alpha);
  return egi_emit(emit, EGI_OP_AddMatMul, inputs, 3, &attribute, 1);
}

/* What the adapter begins with is no change: it is taken off, without dropout, as if the base had lost it. */
static eg_status subtract_first(grafter *state, egi_emitter *emit, const egi_adapter_target *target, egi_value_id x,
                                egi_value_id *sum) {
  egi_value_id factors[2] = {0, 0};
  if (target->first_a == 0) return EG_OK;
  EG_TRY(egi_graph_add_weight(state->graph, target->first_a, &factors[0]));
  EG_TRY(egi_graph_add_weight(state->graph, target->first_b, &factors[1]));
  *sum = add_product(emit, *sum, x, factors, -target->scale);
  return emit->status;
}

static eg_status graft_one(grafter *state, const egi_linear *linear, const egi_adapter_target *target) {
  egi_graph *graph = state->graph;
  const adapter_shape a = {{target->rank, linear->in_features}, 0, target->first_a};
  const adapter_shape b = {{linear->out_features, target->rank}, 0, target->first_b};
  egi_value_id factors[2] = {0, 0}, x = graph->nodes[linear->node].inputs[0], y = linear->result, dropped = x;
  if (graph->values[x].dtype != EG_DTYPE_F32)
    return egi_fail_node(graph, linear->node, EG_ERROR_UNSUPPORTED, "an adapter needs float32, this computes in %s",
                         egi_dtype_name(graph->values[x].dtype));
  EG_TRY(make_adapter_state(state, linear->path, 'A', &a, &factors[0]));
  EG_TRY(make_adapter_state(state, linear->path, 'B', &b, &factors[1]));
  egi_emitter emit = {.graph = graph, .scope = linear->path};
  EG_TRY(drop_input(state, &emit, &dropped));
  egi_value_id sum = add_product(&emit, y, dropped, factors, target->scale);
  EG_TRY(emit.status);
  EG_TRY(subtract_first(state, &emit, target, x, &sum));
  egi_node_id last = graph->n_nodes - 1;
  bool is_done = false;
  EG_TRY(egi_redirect_put(&state->redirect, y, sum, &is_done));
  if (!is_done) return egi_fail_node(graph, last, EG_ERROR_INTERNAL, "cannot take the place of an output");
  state->run->report->n_matched++;
  return EG_OK;
}

/* Rows [first, end) of a matrix. */
static egi_value_id rows_of(egi_emitter *emit, egi_value_id matrix, int64_t first, int64_t end) {
  static const int64_t axis = 0;
  const egi_value_id inputs[4] = {matrix, egi_emit_integers(emit, &first, 1), egi_emit_integers(emit, &end, 1),
                                  egi_emit_integers(emit, &axis, 1)};
  return egi_emit(emit, EGI_OP_Slice, inputs, 4, NULL, 0);
}

/* W + scale · B · A of the module's own rows. */
static eg_status add_inside(grafter *state, egi_emitter *emit, const egi_linear *linear,
                            const egi_adapter_target *target, egi_value_id *matrix) {
  const adapter_shape of_a = {.dims = {target->rank, linear->in_features}};
  const adapter_shape of_b = {.dims = {linear->out_features, target->rank}};
  egi_value_id a = 0, b = 0;
  EG_TRY(make_adapter_state(state, linear->path, 'A', &of_a, &a));
  EG_TRY(make_adapter_state(state, linear->path, 'B', &of_b, &b));
  const egi_value_id inputs[3] = {*matrix, b, a};
  const egi_attribute alpha = egi_attribute_float("alpha", (float)target->scale);
  *matrix = egi_emit(emit, EGI_OP_AddMatMul, inputs, 3, &alpha, 1);
  state->run->report->n_matched++;
  return emit->status;
}

/* What a FakeQuantize rounds gets the adapters of all modules, linears [first, end), that the layer computes. */
static eg_status graft_inside(grafter *state, size_t first, size_t end, egi_node_id fake, const egi_map *targets) {
  const egi_adapt_options *adapt = state->run->adapt;
  const egi_linear *linears = state->linears;
  egi_emitter emit = {.graph = state->graph};
  egi_value_id whole = state->graph->nodes[fake].inputs[0];
  egi_value_id *parts = EGI_NEW(&state->arena, egi_value_id, end - first);
  const egi_attribute rows = egi_attribute_int("axis", 0);
  int64_t row = 0;
  if (parts == NULL) return EG_ERROR_MEMORY;
  for (size_t i = first; i < end; i++) {
    uint32_t index = 0;
    egi_value_id *part = &parts[i - first];
    emit.scope = linears[i].path;
    *part = end - first > 1 ? rows_of(&emit, whole, row, row + linears[i].out_features) : whole;
    row += linears[i].out_features;
    if (egi_map_get(targets, linears[i].path, &index))
      EG_TRY(add_inside(state, &emit, &linears[i], &adapt->adapters[index], part));
  }
  whole = end - first > 1 ? egi_emit(&emit, EGI_OP_Concat, parts, (unsigned)(end - first), &rows, 1) : parts[0];
  EG_TRY(emit.status);
  state->graph->nodes[fake].inputs[0] = whole;
  return EG_OK;
}

static eg_status graft_experts(grafter *state, const egi_expert_parameter *parameter, const egi_adapter_target *target,
                               bool has_down_adapter) {
  int64_t ranks = parameter->n_experts * (int64_t)target->rank;
  const adapter_shape a_shape = {{ranks, parameter->in_features}, (uint32_t)parameter->n_experts, 0};
  const adapter_shape b_shape = {{parameter->out_features, ranks}, (uint32_t)parameter->n_experts, 0};
  const egi_value *x = &state->graph->values[state->graph->nodes[parameter->node].inputs[0]];
  const char *tensors = egi_expert_tensors(&state->arena, parameter, has_down_adapter);
  egi_value_id a = 0, b = 0;
  if (tensors == NULL) return EG_ERROR_MEMORY;
  if (x->dtype != EG_DTYPE_F32)
    return egi_fail_node(state->graph, parameter->node, EG_ERROR_UNSUPPORTED,
                         "an adapter needs float32, this computes in %s", egi_dtype_name(x->dtype));
  EG_TRY(make_adapter_state(state, tensors, 'A', &a_shape, &a));
  EG_TRY(make_adapter_state(state, tensors, 'B', &b_shape, &b));
  state->run->report->n_matched++;
  return egi_graft_experts(state->graph, parameter, a, b, target->scale);
}

/* Everything but the new sums takes the sums instead of the frozen layers' results. */
static eg_status apply_sums(grafter *state, egi_node_id n_old_nodes) {
  egi_graph *graph = state->graph;
  for (egi_node_id id = n_old_nodes; id < graph->n_nodes; id++) {
    egi_node *node = &graph->nodes[id];
    unsigned first = node->op == EGI_OP_AddMatMul ? 1 : 0; /* input 0 is the frozen result itself */
    for (unsigned i = first; i < node->n_inputs; i++)
      node->inputs[i] = egi_redirect_get(&state->redirect, node->inputs[i]);
  }
  for (egi_node_id id = 1; id < n_old_nodes; id++) {
    if (graph->nodes[id].op != EGI_OP_NONE) egi_redirect_node(&state->redirect, id);
  }
  for (uint32_t i = 0; i < graph->n_outputs; i++)
    graph->outputs[i] = egi_redirect_get(&state->redirect, graph->outputs[i]);
  return EG_OK;
}

/* All targets without a linear layer, in one error. */
static eg_status fail_unmatched(grafter *state, const egi_map *paths) {
  const egi_adapt_options *adapt = state->run->adapt;
  egi_text text;
  egi_text_init(&text, state->run->ctx);
  for (size_t i = 0; i < adapt->n_adapters; i++) {
    if (!egi_map_get(paths, adapt->adapters[i].path, NULL))
      egi_text_format(&text, "%s%s", text.length > 0 ? ", " : "", adapt->adapters[i].path);
  }
  eg_status status = egi_text_status(&text);
  if (status == EG_OK && text.length > 0)
    status = egi_fail(state->run->ctx, EG_ERROR_DATA, "the model has no linear layer or experts for the adapters of %s",
                      egi_text_string(&text));
  egi_text_free(&text);
  return status;
}

/* Behind the last module that the layer of linears[first] computes. */
static size_t parts_end(const grafter *state, size_t first) {
  size_t end = first + 1;
  while (end < state->n_linears && state->linears[end].node == state->linears[first].node) end++;
  return end;
}

static eg_status graft_all(grafter *state) {
  const egi_adapt_options *adapt = state->run->adapt;
  egi_map targets, paths;
  egi_map_init(&targets, &state->arena);
  egi_map_init(&paths, &state->arena);
  EG_TRY(egi_find_linears(state->graph, &state->arena, &state->linears, &state->n_linears));
  for (size_t i = 0; i < state->n_linears; i++) EG_TRY(egi_map_put(&paths, state->linears[i].path, (uint32_t)i));
  EG_TRY(egi_find_experts(state->graph, &state->arena, &state->experts, &state->n_experts));
  for (size_t i = 0; i < state->n_experts; i++) EG_TRY(egi_map_put(&paths, state->experts[i].name, (uint32_t)i));
  EG_TRY(fail_unmatched(state, &paths));
  for (size_t i = 0; i < adapt->n_adapters; i++) EG_TRY(egi_map_put(&targets, adapt->adapters[i].path, (uint32_t)i));
  EG_TRY(egi_redirect_init(&state->redirect, state->graph));
  egi_node_id n_old_nodes = state->graph->n_nodes;
  for (size_t i = 0; i < state->n_linears; i++) {
    uint32_t index = 0;
    egi_node_id fake = egi_fake_quantize_below(state->graph, state->linears[i].node);
    bool is_next = i > 0 && state->linears[i - 1].node == state->linears[i].node;
    state->run->report->n_tried++;
    if (fake != 0) {
      if (!is_next) EG_TRY(graft_inside(state, i, parts_end(state, i), fake, &targets));
      continue;
    }
    if (!egi_map_get(&targets, state->linears[i].path, &index)) continue;
    EG_TRY(graft_one(state, &state->linears[i], &adapt->adapters[index]));
  }
  EG_TRY(apply_sums(state, n_old_nodes));
  for (size_t i = 0; i < state->n_experts; i++) {
    uint32_t index = 0;
    state->run->report->n_tried++;
    const egi_expert_parameter *next = &state->experts[i + 1 < state->n_experts ? i + 1 : i];
    bool has_down = next->node == state->experts[i].node && egi_map_get(&targets, next->name, NULL);
    if (egi_map_get(&targets, state->experts[i].name, &index))
      EG_TRY(graft_experts(state, &state->experts[i], &adapt->adapters[index], has_down));
  }
  return EG_OK;
}

/* ---- full training ---------------------------------------------------------------------------------------------- */

static eg_status replace_one(grafter *state, const egi_parameter *parameter, const egi_state *wanted) {
  egi_value_id value = 0;
  EG_TRY(make_trainable(state, wanted, &value));
  state->run->report->n_matched++;
  return egi_replace_parameter(state->graph, parameter, value);
}

/* Quantised weights have no gradient: all of them must be known before anything is replaced. */
static eg_status refuse_quantised(const grafter *state, const egi_operand *operands, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (operands[i].role == EGI_ROLE_QUANTISED)
      return egi_fail_node(state->graph, operands[i].node, EG_ERROR_UNSUPPORTED,
                           "its weight is stored quantised and cannot be trained: train adapters instead");
  return EG_OK;
}

static eg_status replace_all(grafter *state) {
  egi_parameter *parameters = NULL;
  size_t n_parameters = 0, n_operands = 0;
  egi_operand *operands = NULL;
  EG_TRY(egi_find_operands(state->graph, &state->arena, &operands, &n_operands));
  EG_TRY(refuse_quantised(state, operands, n_operands));
  EG_TRY(egi_check_folded_positions(state->graph, NULL, &state->arena));
  EG_TRY(egi_stack_experts(state->graph));
  EG_TRY(egi_find_parameters(state->graph, &state->arena, &parameters, &n_parameters));
  if (n_parameters == 0)
    return egi_fail(state->run->ctx, EG_ERROR_DATA, "the model has no weights that can be trained");
  for (size_t i = 0; i < n_parameters; i++) {
    const egi_state wanted = egi_parameter_state(state->graph, &parameters[i]);
    EG_TRY(replace_one(state, &parameters[i], &wanted));
  }
  return EG_OK;
}

static eg_status graft_beside_modules(grafter *state) {
  egi_saved_parameter *saved = NULL;
  size_t n = 0;
  /* Looked for while nodes stand in order, replaced when layers need not be found by the weights above them any more.
   */
  EG_TRY(egi_find_saved_parameters(state->graph, state->run->adapt->modules, &state->arena, &saved, &n));
  EG_TRY(graft_all(state));
  for (size_t i = 0; i < n; i++) EG_TRY(replace_one(state, &saved[i].parameter, &saved[i].state));
  return EG_OK;
}

eg_status egi_pass_graft_adapters(egi_pass_run *run, egi_graph *graph) {
  const egi_adapt_options *adapt = run->adapt;
  if (!adapt || (!adapt->is_full && adapt->n_adapters == 0 && adapt->modules == NULL)) return EG_OK;
  grafter state = {.run = run, .graph = graph};
  egi_arena_init(&state.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = list_states(&state);
  if (status == EG_OK) status = adapt->is_full ? replace_all(&state) : graft_beside_modules(&state);
  egi_redirect_free(&state.redirect);
  egi_arena_clear(&state.arena);
  run->has_changed = true;
  return status;
}
