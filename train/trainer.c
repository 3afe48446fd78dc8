/* Making a trainer: options checked, graphs built, batches and buckets, plans against the budget, memory, first values.
 */
#include "train/train.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static bool is_within(double value, double minimum, double maximum) {
  return value >= minimum && value <= maximum;
}

static eg_status check_options(eg_context *ctx, const eg_trainer_options *o) {
  const char *wrong = NULL;
  if (!o->full && o->init_adapter == NULL && (o->rank < 1 || o->rank > 65536)) wrong = "rank";
  if (!o->full && o->init_adapter == NULL && !is_within(o->alpha, 1e-6, 1e6)) wrong = "alpha";
  if (!o->full && o->init_adapter == NULL && (o->targets == NULL || o->targets[0] == '\0')) wrong = "targets";
  if (!(o->dropout >= 0.0 && o->dropout < 1.0)) wrong = "dropout";
  if (!is_within(o->lora_plus, 1e-6, 1e6)) wrong = "lora_plus";
  if (o->init < EG_LORA_INIT_DEFAULT || o->init > EG_LORA_INIT_OLORA) wrong = "init";
  if (!is_within(o->learning_rate, 0.0, 1e6)) wrong = "learning_rate";
  if (o->schedule < EG_SCHEDULE_CONSTANT || o->schedule > EG_SCHEDULE_WSD) wrong = "schedule";
  if (!is_within(o->warmup, 0.0, 1e15)) wrong = "warmup";
  if (!is_within(o->weight_decay, 0.0, 1e6)) wrong = "weight_decay";
  if (!(o->beta1 >= 0.0 && o->beta1 < 1.0)) wrong = "beta1";
  if (!(o->beta2 >= 0.0 && o->beta2 < 1.0)) wrong = "beta2";
  if (!is_within(o->epsilon, 0.0, 1.0)) wrong = "epsilon";
  if (!is_within(o->clip, 0.0, 1e12)) wrong = "clip";
  if (o->dtype == EG_DTYPE_UNDEFINED) wrong = "dtype";
  if (o->packing < EG_PACKING_AUTO || o->packing > EG_PACKING_OFF) wrong = "packing";
  if (o->packing_cache < EG_PACKING_CACHE_ON || o->packing_cache > EG_PACKING_CACHE_READBACK) wrong = "packing_cache";
  if (o->checkpoint < EG_CHECKPOINT_AUTO || o->checkpoint > EG_CHECKPOINT_OFFLOAD) wrong = "checkpoint";
  if (o->loss < EG_LOSS_AUTO || o->loss > EG_LOSS_COSINE) wrong = "loss";
  if (o->pooling < EG_POOLING_AUTO || o->pooling > EG_POOLING_OUTPUT) wrong = "pooling";
  if (!is_within(o->similarity_scale, 1e-6, 1e6)) wrong = "similarity_scale";
  if (o->moe_dispatch < EG_MOE_FUSED || o->moe_dispatch > EG_MOE_LOOP) wrong = "moe_dispatch";
  if (o->optimizer < EG_OPTIMIZER_ADAMW || o->optimizer > EG_OPTIMIZER_ADAMW_8BIT) wrong = "optimizer";
  if (o->tokens < 2) wrong = "tokens";
  if (o->accumulate < 1) wrong = "accumulate";
  if (o->n_steps == 0 && !(o->n_epochs > 0.0 && o->n_epochs <= 1e9)) wrong = "n_epochs";
  if (wrong != NULL) return egi_fail(ctx, EG_ERROR_ARGUMENT, "trainer options: %s is out of range", wrong);
  if (o->full && o->quant != EG_QUANT_NONE)
    return egi_fail(ctx, EG_ERROR_ARGUMENT,
                    "trainer options: full training trains the matrices that quant would freeze");
  bool has_experts = o->target_parameters != NULL && strcmp(o->target_parameters, "none") != 0;
  if (o->full && (has_experts || o->modules_to_save != NULL))
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "trainer options: full training trains everything, it takes no %s",
                    has_experts ? "target_parameters" : "modules_to_save");
  if (o->full && o->init_adapter != NULL)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "trainer options: full training takes no init_adapter");
  return EG_OK;
}

static eg_status copy_string(egi_arena *arena, const char **string) {
  if (*string == NULL) return EG_OK;
  *string = egi_arena_copy_text(arena, *string, strlen(*string));
  return *string != NULL ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status copy_options(eg_trainer *trainer, const eg_trainer_options *options) {
  trainer->options = *options;
  EG_TRY(copy_string(&trainer->arena, &trainer->options.device));
  EG_TRY(copy_string(&trainer->arena, &trainer->options.targets));
  EG_TRY(copy_string(&trainer->arena, &trainer->options.exclude));
  EG_TRY(copy_string(&trainer->arena, &trainer->options.rank_pattern));
  EG_TRY(copy_string(&trainer->arena, &trainer->options.alpha_pattern));
  EG_TRY(copy_string(&trainer->arena, &trainer->options.plan));
  EG_TRY(copy_string(&trainer->arena, &trainer->options.device_description));
  EG_TRY(copy_string(&trainer->arena, &trainer->options.target_parameters));
  EG_TRY(copy_string(&trainer->arena, &trainer->options.modules_to_save));
  return copy_string(&trainer->arena, &trainer->options.init_adapter);
}

/* ---- a plan without data ---- */

/* One row of `tokens` tokens, all of them 0 and labels. */
static eg_status add_stand_in(eg_trainer *trainer, uint32_t tokens) {
  const egi_documents_room room = {.n_documents = tokens, .n_tokens = tokens};
  egi_documents *documents;
  eg_dataset *dataset = egi_allocate(trainer->ctx, EGI_PURPOSE_DATA, sizeof *dataset);
  if (dataset == NULL) return EG_ERROR_MEMORY;
  eg_status status = egi_documents_begin(trainer->ctx, "--tokens", &room, &documents);
  if (status != EG_OK) {
    egi_release(trainer->ctx, EGI_PURPOSE_DATA, dataset, sizeof *dataset);
    return status;
  }
  egi_documents_end_document(documents, tokens);
  *dataset = (eg_dataset){.ctx = trainer->ctx, .references = 1, .documents = documents};
  egi_context_retain(trainer->ctx);
  trainer->dataset = dataset;
  trainer->has_stand_in = true;
  return EG_OK;
}

/* Into documents as long as the model's tables of positions allow. */
static eg_status cut_stand_in(eg_trainer *trainer) {
  egi_documents *documents = trainer->dataset->documents;
  uint64_t n_tokens = documents->n_tokens, longest = trainer->limits.longest;
  egi_inputs inputs;
  EG_TRY(egi_inputs_find(trainer->machine.graph, &trainer->arena, &inputs));
  int64_t n_positions = egi_positions_count(trainer->machine.graph, &inputs);
  if (n_positions > 0 && (uint64_t)n_positions < longest) longest = (uint64_t)n_positions;
  documents->n_documents = documents->n_targets = 0;
  for (uint64_t first = 0; first < n_tokens; first += longest)
    egi_documents_end_document(documents, n_tokens - first < longest ? n_tokens - first : longest);
  return EG_OK;
}

/* ---- batches and plans ---- */

static void warn_cut(const eg_trainer *trainer, size_t n_cut, uint32_t length) {
  const egi_documents *documents = trainer->dataset->documents;
  if (n_cut > 0)
    egi_log(trainer->ctx, EG_LOG_WARNING, "%s: %zu of %zu documents are longer than %u tokens and were cut",
            documents->path, n_cut, documents->n_documents, length);
}

/* Documents are cut when they are read, and to what a micro-batch holds. */
static void report_cut(const eg_trainer *trainer) {
  const egi_documents *documents = trainer->dataset->documents;
  size_t n_cut = 0;
  for (size_t i = 0; i < documents->n_documents; i++)
    n_cut += documents->offsets[i + 1] - documents->offsets[i] > trainer->limits.longest;
  warn_cut(trainer, documents->n_cut, documents->cut_length);
  warn_cut(trainer, n_cut, trainer->limits.longest);
}

/* The optimizer's plan, and what buffer_checkpoints makes of the training graph for these shapes. */
static eg_status settle_graphs(eg_trainer *trainer, egi_batches *batches) {
  EG_TRY(egi_trainer_hash_graphs(trainer));
  if (trainer->options.plan != NULL && trainer->dataset != NULL) EG_TRY(egi_trainer_take_plan(trainer, batches));
  egi_plan_options none = {.n_bindings = 0};
  EG_TRY(egi_plan_create(trainer->ctx, trainer->optimizer, trainer->machine.backend, &none, &trainer->optimizer_plan));
  return egi_trainer_checkpoint(trainer, batches);
}

/* Without data: a micro-batch as full as can be. */
static eg_status settle_without_data(eg_trainer *trainer) {
  const egi_batch_limits *limits = &trainer->limits;
  egi_bucket bucket = {1, limits->sequence > 0 ? limits->sequence : limits->longest};
  egi_batches batches = {.buckets = &bucket, .n_buckets = 1};
  if (bucket.sequence > 0 && limits->tokens / bucket.sequence > 1) bucket.batch = limits->tokens / bucket.sequence;
  if (bucket.batch > limits->rows) bucket.batch = limits->rows;
  return settle_graphs(trainer, &batches);
}

static eg_status plan_batches(eg_trainer *trainer) {
  egi_inputs inputs;
  egi_batches batches;
  bool is_in_order = trainer->options.packing == EG_PACKING_SEQUENTIAL;
  EG_TRY(egi_inputs_find(trainer->machine.graph, &trainer->arena, &inputs));
  EG_TRY(
      egi_batches_plan(&inputs, trainer->dataset->documents, &trainer->limits, is_in_order, &trainer->arena, &batches));
  trainer->lanes.inputs = inputs;
  trainer->batches = batches.ranges;
  trainer->n_batches = batches.count;
  EG_TRY(settle_graphs(trainer, &batches));
  EG_TRY(egi_lanes_plan(&trainer->lanes, trainer->machine.graph, trainer->machine.backend, batches.buckets,
                        batches.n_buckets, &trainer->arena));
  trainer->lanes.pooling = trainer->objective.pooling;
  report_cut(trainer);
  return EG_OK;
}

static eg_status check_budget(const eg_trainer *trainer) {
  egi_trainer_memory all;
  uint64_t budget = trainer->options.memory_budget;
  egi_trainer_bytes(trainer, &trainer->lanes, &all);
  egi_log(trainer->ctx, EG_LOG_INFO,
          "planned bytes: %" PRIu64 " weights, %" PRIu64 " states, %" PRIu64 " activations and workspace, %" PRIu64
          " constants",
          all.weights, all.states, all.transient, all.fixed);
  if (trainer->options.host_budget != 0 && all.pinned > trainer->options.host_budget)
    return egi_fail(trainer->ctx, EG_ERROR_BUDGET,
                    "the host budget of %" PRIu64 " bytes is too small: %" PRIu64 " are needed for what is offloaded",
                    trainer->options.host_budget, all.pinned);
  if (budget == 0 || all.total <= budget) return EG_OK;
  return egi_fail(trainer->ctx, EG_ERROR_BUDGET,
                  "the memory budget of %" PRIu64 " bytes is too small: at least %" PRIu64
                  " are needed (weights %" PRIu64 ", states %" PRIu64 ", activations and workspace %" PRIu64
                  ", constants %" PRIu64 ")",
                  budget, all.total, all.weights, all.states, all.transient, all.fixed);
}

/* ---- memory ---- */

static eg_status take_memory(eg_trainer *trainer, const egi_peft *peft) {
  egi_machine *machine = &trainer->machine;
  EG_TRY(egi_machine_allocate(machine));
  if (peft != NULL)
    EG_TRY(egi_adapters_load(machine, peft));
  else if (!trainer->options.full)
    EG_TRY(egi_adapters_initialise(machine, trainer->options.init, trainer->options.seed));
  EG_TRY(egi_lanes_open(&trainer->lanes, machine->store, machine->scratch));
  return egi_session_create(machine->store, trainer->optimizer_plan, machine->scratch, &trainer->optimizer_session);
}

/* A device that has less than was planned, since something else came to need it. */
static eg_status allocate(eg_trainer *trainer, const egi_peft *peft) {
  egi_trainer_memory all;
  char reason[512];
  uint64_t available = egi_device_available(trainer->ctx, trainer->machine.backend, &trainer->device);
  eg_status status = take_memory(trainer, peft);
  if (status != EG_ERROR_MEMORY || trainer->machine.backend->is_host) return status;
  egi_trainer_bytes(trainer, &trainer->lanes, &all);
  const char *name = all.weights >= all.states && all.weights >= all.transient ? "weights"
                     : all.states >= all.transient                             ? "states"
                                                                               : "activations and workspace";
  uint64_t largest = all.weights > all.states ? all.weights : all.states;
  if (all.transient > largest) largest = all.transient;
  (void)snprintf(reason, sizeof reason, "%s", eg_context_error(trainer->ctx));
  return egi_fail(trainer->ctx, status,
                  "%s; planned are %" PRIu64 " bytes, of them %" PRIu64 " for %s; a memory budget of %" PRIu64
                  " bytes would fit",
                  reason, all.total, largest, name, available);
}

/* Whole passes over the data, micro-batch by micro-batch. */
static uint64_t count_steps(const eg_trainer *trainer) {
  if (trainer->options.n_steps > 0) return trainer->options.n_steps;
  double n = ceil(trainer->options.n_epochs * (double)trainer->n_batches / trainer->options.accumulate);
  return n < 1.0 ? 1 : n < 1e18 ? (uint64_t)n : UINT64_C(1000000000000000000);
}

static void set_state(eg_trainer *trainer) {
  const eg_trainer_options *o = &trainer->options;
  trainer->state = (egi_step_state){.weight_decay = (float)o->weight_decay,
                                    .beta1 = (float)o->beta1,
                                    .beta2 = (float)o->beta2,
                                    .epsilon = (float)o->epsilon,
                                    .clip = (float)o->clip,
                                    .loss_scale = 1.0f,
                                    .rest1 = (float)(1.0 - o->beta1),
                                    .rest2 = (float)(1.0 - o->beta2)};
}

static eg_status check_targets(const eg_trainer *trainer) {
  const egi_documents *documents = trainer->dataset->documents;
  for (size_t i = 0; i < trainer->n_batches; i++) {
    uint64_t n_targets, n_tokens;
    egi_batch_count(trainer->lanes.inputs.unit, documents, &trainer->batches[i], &n_targets, &n_tokens);
    if (n_targets > 0) return EG_OK;
  }
  return egi_fail(trainer->ctx, EG_ERROR_DATA, "%s: no token is a target", documents->path);
}

static eg_status make_graphs(eg_trainer *trainer, const egi_peft *peft) {
  const eg_trainer_options *o = &trainer->options;
  EG_TRY(egi_machine_prepare(&trainer->machine, trainer->model, o->device, o->dtype));
  return egi_trainer_build(trainer, peft);
}

static eg_status make(eg_trainer *trainer, const egi_peft *peft) {
  EG_TRY(make_graphs(trainer, peft));
  if (trainer->dataset == NULL) return settle_without_data(trainer);
  if (trainer->has_stand_in) EG_TRY(cut_stand_in(trainer));
  EG_TRY(plan_batches(trainer));
  EG_TRY(check_targets(trainer));
  EG_TRY(check_budget(trainer));
  if (trainer->is_planned_only) return EG_OK;
  EG_TRY(allocate(trainer, peft));
  EG_TRY(egi_late_steps_make(trainer));
  trainer->n_steps = count_steps(trainer);
  set_state(trainer);
  return EG_OK;
}

static eg_status fill(eg_trainer *trainer, const eg_trainer_options *options) {
  egi_peft *peft = NULL;
  EG_TRY(check_options(trainer->ctx, options));
  EG_TRY(copy_options(trainer, options));
  EG_TRY(egi_device_description_find(trainer->ctx, options->device, options->device_description, &trainer->device));
  if (options->init_adapter != NULL) EG_TRY(egi_peft_open(trainer->ctx, options->init_adapter, &peft));
  eg_status status = make(trainer, peft);
  /* The settings outlive the folder they were read from. */
  if (status == EG_OK && peft != NULL) status = egi_peft_config_copy(&trainer->arena, &trainer->adapters.config);
  egi_peft_close(peft);
  return status;
}

/* Without a dataset: its graphs alone, or planned for one that stands in. */
static eg_status create(eg_model *model, eg_dataset *dataset, const eg_trainer_options *options, bool is_planned_only,
                        eg_trainer **out_trainer) {
  eg_trainer *trainer = egi_allocate(model->ctx, EGI_PURPOSE_DATA, sizeof *trainer);
  if (trainer == NULL) return EG_ERROR_MEMORY;
  memset(trainer, 0, sizeof *trainer);
  trainer->ctx = model->ctx;
  trainer->model = model;
  trainer->dataset = dataset;
  trainer->is_planned_only = is_planned_only;
  egi_context_retain(model->ctx);
  egi_model_retain(model);
  if (dataset != NULL) egi_dataset_retain(dataset);
  egi_arena_init(&trainer->arena, model->ctx, EGI_PURPOSE_DATA);
  atomic_init(&trainer->is_stop_requested, 0);
  eg_status status = dataset == NULL && is_planned_only ? add_stand_in(trainer, options->tokens) : EG_OK;
  if (status == EG_OK) status = fill(trainer, options);
  if (status != EG_OK) {
    egi_trainer_destroy(trainer);
    return status;
  }
  *out_trainer = trainer;
  return EG_OK;
}

eg_status egi_trainer_create(eg_model *model, eg_dataset *dataset, const eg_trainer_options *options,
                             eg_trainer **out_trainer) {
  return create(model, dataset, options, false, out_trainer);
}

eg_status egi_training_module(eg_model *model, const eg_trainer_options *options, egi_module **out_module) {
  eg_trainer *trainer;
  EG_TRY(create(model, NULL, options, false, &trainer));
  *out_module = trainer->machine.module;
  trainer->machine.module = NULL;
  egi_trainer_destroy(trainer);
  return EG_OK;
}

eg_status egi_trainer_plan(eg_model *model, eg_dataset *dataset, const eg_trainer_options *options, egi_text *out) {
  eg_trainer *trainer;
  EG_TRY(create(model, dataset, options, true, &trainer));
  eg_status status = egi_trainer_write_plan(trainer, out);
  egi_trainer_destroy(trainer);
  return status;
}

void egi_trainer_destroy(eg_trainer *trainer) {
  if (trainer == NULL) return;
  eg_context *ctx = trainer->ctx;
  egi_session_destroy(trainer->optimizer_session);
  egi_plan_destroy(trainer->optimizer_plan);
  egi_lanes_close(&trainer->lanes);
  egi_machine_close(&trainer->machine);
  egi_arena_clear(&trainer->arena);
  egi_dataset_release(trainer->dataset);
  egi_model_release(trainer->model);
  egi_release(ctx, EGI_PURPOSE_DATA, trainer, sizeof *trainer);
  egi_context_release(ctx);
}

eg_context *egi_trainer_context(const eg_trainer *trainer) {
  return trainer->ctx;
}

uint64_t egi_trainer_step_count(const eg_trainer *trainer) {
  return trainer->n_steps;
}

void egi_trainer_request_stop(eg_trainer *trainer) {
  atomic_store(&trainer->is_stop_requested, 1);
}
