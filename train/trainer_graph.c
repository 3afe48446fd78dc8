/* The graphs of a trainer: the imported graph with loss and adapters, differentiated; the same before differentiation
 * for evaluation; and the optimizer over whole pools. */
#include "train/train.h"

#include <string.h>

static eg_status choose_adapters(eg_trainer *trainer, const egi_peft *peft) {
  const eg_trainer_options *options = &trainer->options;
  if (options->full) return EG_OK;
  if (peft != NULL) return egi_adapters_from_peft(trainer->machine.graph, peft, &trainer->arena, &trainer->adapters);
  EG_TRY(egi_adapters_choose(trainer->machine.graph, options, &trainer->arena, &trainer->adapters));
  if (trainer->objective.loss == EG_LOSS_NEXT_TOKEN) trainer->adapters.config.task = "CAUSAL_LM";
  return EG_OK;
}

/* Before documents share rows and the loss is appended. */
static eg_status choose_objective(eg_trainer *trainer) {
  const eg_trainer_options *options = &trainer->options;
  static const egi_documents none = {.kind = EGI_DOCUMENTS_TOKENS};
  const egi_documents *documents = trainer->dataset != NULL ? trainer->dataset->documents : &none;
  egi_inputs inputs;
  EG_TRY(egi_inputs_find(trainer->machine.graph, &trainer->arena, &inputs));
  EG_TRY(egi_batch_limits_make(&inputs, options->tokens, &trainer->limits));
  trainer->objective = (egi_objective){options->loss, options->pooling, options->similarity_scale};
  EG_TRY(egi_objective_choose(trainer->machine.graph, &inputs, documents, &trainer->objective));
  EG_TRY(egi_vocabulary_find(trainer->machine.graph, &inputs, trainer->objective.loss, &trainer->vocabulary));
  return trainer->dataset != NULL ? egi_vocabulary_check(trainer->ctx, &trainer->vocabulary, documents) : EG_OK;
}

/* Parameters in order, the parts of fused ones one by one. */
static eg_status list_tensors(eg_trainer *trainer) {
  const egi_state *states = trainer->machine.module->states;
  size_t count = 0;
  for (size_t i = 0; i < trainer->n_parameters; i++) {
    uint32_t n_parts = states[trainer->parameters[i]].n_parts;
    count += n_parts > 0 ? n_parts : 1;
  }
  trainer->tensors = EGI_NEW(&trainer->arena, egi_file_tensor, count);
  if (trainer->tensors == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < trainer->n_parameters; i++) {
    const egi_state *state = &states[trainer->parameters[i]];
    egi_file_tensor tensor = {.state = trainer->parameters[i], .name = state->name};
    if (state->n_parts == 0) trainer->tensors[trainer->n_tensors++] = tensor;
    for (uint32_t part = 0; part < state->n_parts; part++) {
      tensor.name = state->parts[part].name;
      tensor.rows = state->parts[part].rows;
      trainer->tensors[trainer->n_tensors++] = tensor;
      tensor.first_row += tensor.rows;
    }
  }
  return EG_OK;
}

static eg_status list_parameters(eg_trainer *trainer) {
  const egi_module *module = trainer->machine.module;
  trainer->parameters = EGI_NEW(&trainer->arena, uint32_t, module->n_states);
  if (trainer->parameters == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 1; i < module->n_states; i++)
    if (module->states[i].pool == EGI_POOL_PARAMETERS) trainer->parameters[trainer->n_parameters++] = i;
  if (trainer->n_parameters == 0)
    return egi_fail(trainer->ctx, EG_ERROR_UNSUPPORTED, "the model has nothing that can be trained");
  return list_tensors(trainer);
}

/* ---- optimizer ---- */

static eg_status add_pool(egi_graph *graph, egi_state_pool pool, egi_value_id *out_value) {
  uint32_t state;
  EG_TRY(egi_module_add_pool_state(graph->module, pool, &state));
  return egi_graph_add_state(graph, state, out_value);
}

static eg_status build_optimizer(eg_trainer *trainer) {
  egi_module *module = trainer->machine.module;
  egi_value_id in[6]; /* parameters, gradients, moments, step state, norm */
  EG_TRY(egi_module_add_graph(module, "optimizer", &trainer->optimizer));
  EG_TRY(egi_moments_place(trainer));
  EG_TRY(add_pool(trainer->optimizer, EGI_POOL_PARAMETERS, &in[0]));
  EG_TRY(add_pool(trainer->optimizer, EGI_POOL_GRADIENTS, &in[1]));
  EG_TRY(add_pool(trainer->optimizer, EGI_POOL_MOMENT1, &in[2]));
  EG_TRY(add_pool(trainer->optimizer, EGI_POOL_MOMENT2, &in[3]));
  EG_TRY(add_pool(trainer->optimizer, EGI_POOL_STEP, &in[4]));
  egi_emitter emitter = {.graph = trainer->optimizer, .status = EG_OK};
  in[5] = egi_emit(&emitter, EGI_OP_GradientNorm, (egi_value_id[2]){in[1], in[4]}, 2, NULL, 0);
  if (trainer->options.offload_optimizer)
    EG_TRY(egi_moments_emit_parts(trainer, &emitter, in + 4));
  else
    EG_TRY(egi_moments_emit(trainer, &emitter, in));
  EG_TRY(egi_graph_add_output(trainer->optimizer, in[5]));
  return egi_graph_tidy(trainer->optimizer);
}

/* Training plans everything before the first step. Known loops and branches are gone by now. */
static eg_status check_static(const egi_graph *graph) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_If || node->op == EGI_OP_Loop || node->op == EGI_OP_Scan)
      return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "what it runs is decided by data: it cannot be trained");
    for (uint16_t i = 0; i < node->n_outputs && node->op != EGI_OP_NONE; i++)
      if (node->outputs[i] != 0 && graph->values[node->outputs[i]].rank < 0)
        return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED,
                             "the shape of its result depends on data: it cannot be trained");
  }
  return EG_OK;
}

eg_status egi_differentiate(egi_graph *graph, uint32_t tiles) {
  static const char *const names[] = {"tile_rows",     "join_adapters",    "add_base_last",
                                      "differentiate", "eliminate_common", "eliminate_dead"};
  const egi_checkpoint_options checkpoints = {.tiles = tiles};
  const egi_pipeline_options options = {.checkpoints = &checkpoints};
  return egi_passes_run(graph, names, EGI_COUNT(names), &options, NULL);
}

static bool has_dropout(const egi_graph *graph) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    if (graph->nodes[id].op == EGI_OP_KeyedDropout) return true;
  return false;
}

eg_status egi_trainer_build(eg_trainer *trainer, const egi_peft *peft) {
  static const char *const prepare_passes[] = {"quantize_base", "append_loss", "key_dropout"};
  static const char *const graft_passes[] = {"fake_quantize", "graft_adapters", "eliminate_dead"};
  egi_machine *machine = &trainer->machine;
  if (egi_graph_find_value(machine->graph, EGI_INPUT_LABELS) != 0)
    return egi_fail(trainer->ctx, EG_ERROR_ARGUMENT,
                    "the graph has a loss already (\"%s\"): train the model it was made of", EGI_INPUT_LABELS);
  EG_TRY(check_static(machine->graph));
  EG_TRY(choose_objective(trainer));
  EG_TRY(egi_machine_pack(machine, trainer->options.packing, trainer->objective.loss, trainer->options.tokens));
  EG_TRY(choose_adapters(trainer, peft));
  EG_TRY(egi_qat_settle(trainer->ctx, &trainer->options, peft, &trainer->adapters));
  egi_adapt_options adapt = {.adapters = trainer->adapters.targets,
                             .n_adapters = trainer->adapters.count,
                             .modules = trainer->adapters.config.modules,
                             .is_full = trainer->options.full != 0,
                             .has_gradient = true,
                             .is_loop = trainer->options.moe_dispatch == EG_MOE_LOOP,
                             .loss = trainer->objective.loss,
                             .pooling = trainer->objective.pooling,
                             .similarity_scale = trainer->objective.similarity_scale,
                             .dropout = trainer->adapters.config.dropout,
                             .seed = trainer->options.seed};
  EG_TRY(egi_quantise_options_make(trainer->ctx, trainer->options.quant, trainer->options.quant_block,
                                   trainer->options.double_quant, &adapt.quantise));
  adapt.quantise.has_head = trainer->options.quant_head != 0;
  EG_TRY(egi_fake_options_make(trainer->ctx, &trainer->adapters.config.qat, &adapt.fake));
  EG_TRY(egi_run_passes(machine->graph, prepare_passes, EGI_COUNT(prepare_passes), &adapt));
  EG_TRY(egi_adapters_decompose(machine, &trainer->options, trainer->is_planned_only, &trainer->adapters));
  EG_TRY(egi_run_passes(machine->graph, graft_passes, EGI_COUNT(graft_passes), &adapt));
  EG_TRY(egi_machine_specialise(machine, &adapt, trainer->options.no_fuse != 0));
  EG_TRY(list_parameters(trainer));
  EG_TRY(egi_expert_load_prepare(trainer));
  EG_TRY(egi_module_copy_graph(machine->module, machine->graph, EGI_GRAPH_EVALUATE, &trainer->evaluation));
  EG_TRY(egi_disable_dropout(trainer->evaluation));
  trainer->has_dropout = has_dropout(machine->graph);
  EG_TRY(egi_differentiate(machine->graph, 1));
  return build_optimizer(trainer);
}
