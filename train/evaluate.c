/* Mean loss over documents: by a trainer's evaluation graph, or for a model and an adapter alone. */
#include "train/train.h"

#include <math.h>
#include <string.h>

enum { MAX_BUCKETS = 4 };

eg_status egi_batch_limits_make(const egi_inputs *inputs, uint32_t tokens, egi_batch_limits *out_limits) {
  egi_batch_limits limits = {tokens, tokens, UINT32_MAX, inputs->fixed_sequence};
  uint64_t least = (uint64_t)(inputs->fixed_batch > 0 ? inputs->fixed_batch : 1) *
                   (inputs->fixed_sequence > 0 ? inputs->fixed_sequence : 1);
  if (least > tokens)
    return egi_fail(inputs->graph->module->ctx, EG_ERROR_ARGUMENT,
                    "the model prescribes batches of %llu tokens, more than the %u of a micro-batch",
                    (unsigned long long)least, tokens);
  if (inputs->fixed_batch > 0) {
    limits.rows = inputs->fixed_batch;
    limits.longest = tokens / inputs->fixed_batch;
  }
  if (inputs->fixed_sequence > 0 && limits.longest > inputs->fixed_sequence) limits.longest = inputs->fixed_sequence;
  *out_limits = limits;
  return EG_OK;
}

eg_status egi_batches_plan(const egi_inputs *inputs, const egi_documents *documents, const egi_batch_limits *limits,
                           bool is_in_order, egi_arena *arena, egi_batches *out_batches) {
  egi_batches *b = out_batches;
  if (inputs->is_packed) {
    EG_TRY(egi_rows_check(inputs, documents, limits->longest));
    EG_TRY(egi_rows_pack(documents, limits->longest, is_in_order, arena, &b->ranges, &b->count));
    b->buckets = EGI_NEW(arena, egi_bucket, 1);
    if (b->buckets == NULL) return EG_ERROR_MEMORY;
    b->buckets[0] = egi_rows_bucket(documents, b->ranges, b->count);
    b->n_buckets = b->count > 0;
    return EG_OK;
  }
  EG_TRY(egi_batches_make(documents, limits, arena, &b->ranges, &b->count));
  EG_TRY(egi_buckets_choose(b->ranges, b->count, MAX_BUCKETS, arena, &b->buckets, &b->n_buckets));
  for (size_t i = 0; i < b->n_buckets && inputs->fixed_batch > 0; i++) b->buckets[i].batch = inputs->fixed_batch;
  return EG_OK;
}

eg_status egi_lane_start(const egi_lanes *lanes, egi_lane *lane, float *loss, uint64_t *out_ticket) {
  const egi_graph *graph = lanes->inputs.graph;
  EG_TRY(egi_session_run(lane->session));
  for (uint32_t i = 0; i < graph->n_outputs; i++)
    if (strcmp(graph->values[graph->outputs[i]].name, EGI_OUTPUT_LOSS) == 0)
      return egi_session_fetch_output(lane->session, i, loss, sizeof *loss, out_ticket);
  return egi_fail(graph->module->ctx, EG_ERROR_INTERNAL, "the graph has no loss");
}

eg_status egi_lane_run(const egi_lanes *lanes, egi_lane *lane, double *out_loss) {
  uint64_t ticket = 0;
  float loss = 0.0f;
  EG_TRY(egi_lane_start(lanes, lane, &loss, &ticket));
  EG_TRY(egi_session_collect(lane->session, ticket));
  *out_loss = (double)loss;
  return EG_OK;
}

typedef struct evaluation {
  const egi_documents *documents;
  egi_arena arena;
  egi_lanes lanes;
  egi_batches batches;
} evaluation;

static eg_status plan_lanes(evaluation *e, egi_machine *machine, const egi_graph *graph, uint32_t tokens) {
  egi_inputs inputs;
  egi_batch_limits limits;
  EG_TRY(egi_inputs_find(graph, &e->arena, &inputs));
  EG_TRY(egi_batch_limits_make(&inputs, tokens, &limits));
  EG_TRY(egi_batches_plan(&inputs, e->documents, &limits, false, &e->arena, &e->batches));
  EG_TRY(egi_lanes_plan(&e->lanes, graph, machine->backend, e->batches.buckets, e->batches.n_buckets, &e->arena));
  return egi_lanes_open(&e->lanes, machine->store, machine->scratch);
}

static eg_status run_batches(const evaluation *e, double *out_loss) {
  const egi_documents *documents = e->documents;
  eg_context *ctx = e->arena.ctx;
  double sum = 0.0;
  uint64_t n_targets = 0;
  for (size_t i = 0; i < e->batches.count; i++) {
    const egi_batch_range *range = &e->batches.ranges[i];
    egi_lane *lane;
    uint64_t targets, tokens;
    double loss;
    egi_batch_count(e->lanes.inputs.unit, documents, range, &targets, &tokens);
    if (targets == 0) continue;
    EG_TRY(egi_lanes_fill(&e->lanes, documents, range, &lane));
    EG_TRY(egi_lane_run(&e->lanes, lane, &loss));
    sum += loss;
    n_targets += targets;
  }
  if (n_targets == 0) return egi_fail(ctx, EG_ERROR_DATA, "%s: no token is a target", documents->path);
  if (!isfinite(sum)) return egi_fail(ctx, EG_ERROR_DATA, "%s: the loss is not finite", documents->path);
  *out_loss = sum / (double)n_targets;
  return EG_OK;
}

eg_status egi_evaluate_graph(egi_machine *machine, const egi_graph *graph, const egi_documents *documents,
                             uint32_t tokens, eg_pooling pooling, double *out_loss) {
  evaluation e = {.documents = documents};
  egi_arena_init(&e.arena, machine->ctx, EGI_PURPOSE_DATA);
  eg_status status = plan_lanes(&e, machine, graph, tokens);
  e.lanes.pooling = pooling;
  if (status == EG_OK) status = run_batches(&e, out_loss);
  egi_lanes_close(&e.lanes);
  egi_arena_clear(&e.arena);
  return status;
}

/* ---- without a trainer ---- */

static eg_status adapt(egi_machine *machine, const egi_peft *peft, const egi_documents *documents,
                       egi_evaluate_options *own, egi_arena *arena) {
  egi_objective *objective = &own->objective;
  static const char *const names[] = {"quantize_base", "append_loss",    "key_dropout",
                                      "fake_quantize", "graft_adapters", "eliminate_dead"};
  egi_inputs inputs;
  egi_vocabulary vocabulary;
  egi_adapters adapters = {.count = 0};
  EG_TRY(egi_inputs_find(machine->graph, arena, &inputs));
  EG_TRY(egi_objective_choose(machine->graph, &inputs, documents, objective));
  EG_TRY(egi_vocabulary_find(machine->graph, &inputs, objective->loss, &vocabulary));
  EG_TRY(egi_vocabulary_check(machine->ctx, &vocabulary, documents));
  EG_TRY(egi_machine_pack(machine, own->packing, objective->loss, own->tokens));
  if (peft != NULL) EG_TRY(egi_adapters_from_peft(machine->graph, peft, arena, &adapters));
  egi_adapt_options options = {.adapters = adapters.targets,
                               .n_adapters = adapters.count,
                               .modules = adapters.config.modules,
                               .is_frozen = true,
                               .loss = objective->loss,
                               .pooling = objective->pooling,
                               .similarity_scale = objective->similarity_scale,
                               .quantise = own->quantise};
  EG_TRY(egi_fake_options_make(machine->ctx, &adapters.config.qat, &options.fake));
  return egi_run_passes(machine->graph, names, EGI_COUNT(names), &options);
}

static eg_status allocate(egi_machine *machine, const egi_peft *peft) {
  EG_TRY(egi_machine_allocate(machine));
  return peft != NULL ? egi_adapters_load(machine, peft) : EG_OK;
}

eg_status egi_evaluate_model(const eg_model *model, const egi_evaluate_options *options, const egi_documents *documents,
                             double *out_loss) {
  egi_machine machine;
  egi_arena arena;
  egi_peft *peft = NULL;
  egi_evaluate_options own = *options;
  egi_arena_init(&arena, model->ctx, EGI_PURPOSE_DATA);
  if (options->adapter != NULL) EG_TRY(egi_peft_open(model->ctx, options->adapter, &peft));
  eg_status status = egi_machine_prepare(&machine, model, "cpu", EG_DTYPE_F32);
  if (status == EG_OK) status = adapt(&machine, peft, documents, &own, &arena);
  if (status == EG_OK) status = egi_machine_specialise(&machine, NULL, options->is_expanded);
  if (status == EG_OK) status = allocate(&machine, peft);
  if (status == EG_OK)
    status = egi_evaluate_graph(&machine, machine.graph, documents, options->tokens, own.objective.pooling, out_loss);
  egi_machine_close(&machine);
  egi_peft_close(peft);
  egi_arena_clear(&arena);
  return status;
}
