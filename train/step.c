/* One optimizer step: gradients of all micro-batches summed in the pool, then norm, clipping and AdamW. The loss is the
 * sum over trained tokens, documents or examples divided by their number in the whole step; nothing here allocates. */
#include "train/train.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

typedef struct totals {
  double loss;
  uint64_t n_targets, n_tokens;
} totals;

static const egi_batch_range *batch_at(const eg_trainer *trainer, size_t index) {
  return &trainer->batches[(trainer->next_batch + index) % trainer->n_batches];
}

static totals count_step(const eg_trainer *trainer) {
  totals sum = {0.0, 0, 0};
  for (uint32_t i = 0; i < trainer->options.accumulate; i++) {
    uint64_t n_targets, n_tokens;
    egi_batch_count(trainer->lanes.inputs.unit, trainer->dataset->documents, batch_at(trainer, i), &n_targets,
                    &n_tokens);
    sum.n_targets += n_targets;
    sum.n_tokens += n_tokens;
  }
  return sum;
}

static eg_status upload_state(const eg_trainer *trainer) {
  const egi_machine *machine = &trainer->machine;
  return machine->backend->upload(egi_store_device(machine->store), egi_store_pool(machine->store, EGI_POOL_STEP),
                                  &trainer->state, sizeof trainer->state);
}

/* ---- what is read late ---------------------------------------------------------------------------------------- */

eg_status egi_late_steps_make(eg_trainer *trainer) {
  uint32_t n = trainer->options.accumulate;
  for (size_t i = 0; i < EGI_COUNT(trainer->late); i++) {
    trainer->late[i].losses = EGI_NEW(&trainer->arena, float, n);
    trainer->late[i].tickets = EGI_NEW(&trainer->arena, uint64_t, n);
    if (trainer->late[i].losses == NULL || trainer->late[i].tickets == NULL) return EG_ERROR_MEMORY;
  }
  return EG_OK;
}

static eg_status collect(const eg_trainer *trainer, uint64_t ticket) {
  return egi_session_collect(trainer->optimizer_session, ticket); /* any session of the device */
}

static eg_status read_losses(const eg_trainer *trainer, const egi_late_step *late, double *out_loss) {
  double sum = 0.0;
  for (uint32_t i = 0; i < trainer->options.accumulate; i++) {
    EG_TRY(collect(trainer, late->tickets[i]));
    sum += (double)late->losses[i];
  }
  *out_loss = sum;
  if (isfinite(sum)) return EG_OK;
  return egi_fail(trainer->ctx, EG_ERROR_DATA, "step %" PRIu64 ": the loss is not finite", late->number);
}

static eg_status read_norm(const eg_trainer *trainer, const egi_late_step *late) {
  EG_TRY(collect(trainer, late->norm_ticket));
  if (isfinite(late->norm)) return EG_OK;
  return egi_fail(trainer->ctx, EG_ERROR_DATA, "step %" PRIu64 ": the gradient is not finite", late->number);
}

/* A step that was not waited for is looked at when the next one is on its way. */
static eg_status settle(const eg_trainer *trainer, egi_late_step *late) {
  double loss;
  if (late->number == 0) return EG_OK;
  eg_status status = read_losses(trainer, late, &loss);
  if (status == EG_OK) status = read_norm(trainer, late);
  late->number = 0;
  return status;
}

/* ---- a step --------------------------------------------------------------------------------------------------- */

/* Tickets are collected before they are lost. */
static eg_status run_batch(eg_trainer *trainer, egi_late_step *late, uint32_t index) {
  const egi_batch_range *range = batch_at(trainer, index);
  uint64_t n_targets, n_tokens;
  egi_lane *lane;
  late->losses[index] = 0.0f;
  late->tickets[index] = 0;
  egi_batch_count(trainer->lanes.inputs.unit, trainer->dataset->documents, range, &n_targets, &n_tokens);
  if (n_targets == 0) return EG_OK;
  if (index >= EGI_MAX_TICKETS / 4) EG_TRY(collect(trainer, late->tickets[index - EGI_MAX_TICKETS / 4]));
  trainer->state.micro_batch = (int32_t)index;
  if (trainer->has_dropout && index > 0) EG_TRY(upload_state(trainer));
  EG_TRY(egi_lanes_fill(&trainer->lanes, trainer->dataset->documents, range, &lane));
  EG_TRY(egi_lane_start(&trainer->lanes, lane, &late->losses[index], &late->tickets[index]));
  EG_TRY(egi_expert_load_add(trainer, lane, n_tokens));
  if (trainer->state.has_gradients) return EG_OK;
  trainer->state.has_gradients = 1;
  return upload_state(trainer);
}

static eg_status accumulate(eg_trainer *trainer, egi_late_step *late) {
  trainer->state.has_gradients = 0;
  trainer->state.micro_batch = 0;
  trainer->state.step = (int64_t)trainer->n_updates + 1;
  late->number = trainer->step + 1;
  EG_TRY(upload_state(trainer));
  for (uint32_t i = 0; i < trainer->options.accumulate; i++) {
    if (atomic_exchange(&trainer->is_stop_requested, 0))
      return egi_fail(trainer->ctx, EG_ERROR_STOPPED, "stopped on request before step %" PRIu64, trainer->step + 1);
    EG_TRY(run_batch(trainer, late, i));
  }
  return EG_OK;
}

/* The update number counts from 1 and only when parameters move: bias corrections follow it (Kingma and Ba, Adam, 2015,
 * algorithm 1). */
static eg_status update(eg_trainer *trainer, egi_late_step *late, uint64_t n_targets, double rate) {
  const eg_trainer_options *o = &trainer->options;
  double t = (double)(trainer->n_updates + 1);
  trainer->state.step = (int64_t)trainer->n_updates + 1;
  trainer->state.learning_rate = (float)rate;
  trainer->state.correction1 = (float)(1.0 - pow(o->beta1, t));
  trainer->state.correction2 = (float)(1.0 - pow(o->beta2, t));
  trainer->state.inverse_targets = (float)(1.0 / (double)n_targets);
  EG_TRY(upload_state(trainer));
  EG_TRY(egi_session_run(trainer->optimizer_session));
  return egi_session_fetch_output(trainer->optimizer_session, 0, &late->norm, sizeof late->norm, &late->norm_ticket);
}

/* With `is_late` nothing of this step is waited for, only the end of the one before it. */
static eg_status make_step(eg_trainer *trainer, double rate, bool is_late, totals *sum) {
  egi_late_step *before = &trainer->late[trainer->newest], *late = &trainer->late[1 - trainer->newest];
  eg_status status = accumulate(trainer, late);
  if (status == EG_OK && !is_late) status = read_losses(trainer, late, &sum->loss);
  if (status == EG_OK) status = update(trainer, late, sum->n_targets, rate);
  if (status == EG_OK && !is_late) status = read_norm(trainer, late);
  if (status != EG_OK || !is_late) late->number = 0;
  if (status == EG_OK) status = settle(trainer, before);
  EG_TRY(status);
  trainer->newest = 1 - trainer->newest;
  trainer->n_updates++;
  trainer->has_gradients = true;
  return EG_OK;
}

eg_status egi_trainer_step(eg_trainer *trainer, eg_step_report *out_report) {
  const eg_trainer_options *o = &trainer->options;
  double start = egi_clock();
  double rate = egi_schedule_rate(o->schedule, o->learning_rate, trainer->step, trainer->n_steps, o->warmup);
  bool is_late = out_report == NULL && trainer->machine.backend->fetch != NULL;
  totals sum = count_step(trainer);
  egi_expert_load_begin(trainer);
  if (sum.n_targets > 0) {
    EG_TRY(make_step(trainer, rate, is_late, &sum));
  } else {
    egi_log(trainer->ctx, EG_LOG_WARNING, "step %" PRIu64 " has no trained token and is skipped", trainer->step + 1);
  }
  trainer->next_batch = (trainer->next_batch + o->accumulate) % trainer->n_batches;
  trainer->step++;
  if (out_report == NULL) return EG_OK;
  EG_TRY(egi_expert_load_settle(trainer));
  *out_report = (eg_step_report){.step = trainer->step,
                                 .loss = sum.n_targets > 0 ? sum.loss / (double)sum.n_targets : 0.0,
                                 .learning_rate = rate,
                                 .gradient_norm = sum.n_targets > 0 ? (double)trainer->late[trainer->newest].norm : 0.0,
                                 .n_tokens = sum.n_tokens,
                                 .n_targets = sum.n_targets,
                                 .seconds = egi_clock() - start,
                                 .auxiliary_loss = egi_expert_load_balance(trainer)};
  return EG_OK;
}

eg_status egi_trainer_evaluate(eg_trainer *trainer, const egi_documents *documents, double *out_loss) {
  EG_TRY(egi_vocabulary_check(trainer->ctx, &trainer->vocabulary, documents));
  return egi_evaluate_graph(&trainer->machine, trainer->evaluation, documents, trainer->options.tokens,
                            trainer->objective.pooling, out_loss);
}
