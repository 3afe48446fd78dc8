/* Fifth part of planning: which steps have happened before which, across streams, and the record/wait pairs that make
 * it so. Dependencies: a read follows the writes of its memory; an update of a state follows the reads and writes
 * before it; what is behind a Barrier follows it. Each list starts by forking from stream 0 and ends by joining it. */
#include "backend/plan.h"

typedef struct sweep {
  egi_planner *planner;
  egi_order *order;
  egi_vector_clock *writes, *reads;        /* by storage: last sequence number of each stream */
  egi_vector_clock current[EGI_N_STREAMS]; /* what each stream knows to be finished */
  uint32_t *positions;                     /* of planner steps in the order, for `after` */
} sweep;

static void raise(egi_vector_clock *clock, const egi_vector_clock *other) {
  for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
    if (other->at[p] > clock->at[p]) clock->at[p] = other->at[p];
  }
}

static bool is_update(const egi_step *step) {
  return step->kernel != NULL && (step->kernel->flags & EGI_KERNEL_UPDATES_0);
}

/* An updating kernel may write all states among its inputs (an optimizer's moments). */
static bool is_written_input(const sweep *run, const egi_step *step, const egi_layout *input) {
  return is_update(step) && run->planner->plan->storages[input->storage].kind == EGI_STORAGE_STATE;
}

static egi_vector_clock needs(const sweep *run, const egi_step *step) {
  const egi_layout *operands = run->planner->plan->operands + step->first_operand;
  egi_vector_clock need = {{0}};
  for (uint32_t i = 0; i < step->n_inputs; i++) {
    const egi_layout *input = &operands[i];
    raise(&need, &run->writes[input->storage]);
    if (is_written_input(run, step, input)) raise(&need, &run->reads[input->storage]);
    if (input->after == 0) continue;
    const egi_step *barrier = &run->planner->steps[input->after - 1];
    uint32_t sequence = run->order->sequences[run->positions[input->after - 1]];
    if (barrier->is_fixed == run->order->is_fixed && sequence > need.at[barrier->stream]) {
      need.at[barrier->stream] = sequence;
    }
  }
  return need;
}

static void note_accesses(sweep *run, const egi_step *step, uint32_t sequence) {
  const egi_layout *operands = run->planner->plan->operands + step->first_operand;
  if (step->kind != EGI_STEP_RUN) return;
  for (uint32_t i = 0; i < step->n_inputs; i++) {
    run->reads[operands[i].storage].at[step->stream] = sequence;
    if (is_written_input(run, step, &operands[i])) run->writes[operands[i].storage].at[step->stream] = sequence;
  }
  for (uint32_t i = 0; i < step->n_outputs; i++) {
    run->writes[operands[step->n_inputs + i].storage].at[step->stream] = sequence;
  }
  run->reads[0] = run->writes[0] = (egi_vector_clock){{0}}; /* operands that are absent */
}

/* Waiting for another stream's step may imply what is needed of stream p. */
static bool is_implied(const egi_order *order, const egi_vector_clock *need, unsigned p) {
  for (unsigned other = 0; other < EGI_N_STREAMS; other++) {
    if (other == p || need->at[other] == 0) continue;
    if (order->clocks[order->at[other][need->at[other]]].at[p] >= need->at[p]) return true;
  }
  return false;
}

static void order_step(sweep *run, uint32_t position) {
  egi_order *order = run->order;
  const egi_step *step = &run->planner->steps[order->steps[position]];
  unsigned q = step->stream;
  egi_vector_clock need = needs(run, step), *current = &run->current[q];
  for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
    if (p == q || need.at[p] <= current->at[p] || is_implied(order, &need, p)) continue;
    order->waits[position].at[p] = need.at[p];
    raise(current, &order->clocks[order->at[p][need.at[p]]]);
  }
  uint32_t sequence = ++order->n_on[q];
  current->at[q] = sequence;
  order->clocks[position] = *current;
  order->sequences[position] = sequence;
  order->at[q][sequence] = position;
  note_accesses(run, step, sequence);
}

eg_status egi_plan_order(egi_planner *planner, bool is_fixed, egi_order *out_order) {
  egi_arena *arena = &planner->arena;
  size_t n = (size_t)planner->n_steps + 1, n_storages = planner->plan->n_storages;
  egi_order order = {.is_fixed = is_fixed,
                     .steps = EGI_NEW(arena, uint32_t, n),
                     .clocks = EGI_NEW(arena, egi_vector_clock, n),
                     .sequences = EGI_NEW(arena, uint32_t, n),
                     .waits = EGI_NEW(arena, egi_vector_clock, n)};
  sweep run = {.planner = planner,
               .order = &order,
               .writes = EGI_NEW(arena, egi_vector_clock, n_storages),
               .reads = EGI_NEW(arena, egi_vector_clock, n_storages),
               .positions = EGI_NEW(arena, uint32_t, n)};
  bool is_short = order.steps == NULL || order.clocks == NULL || order.sequences == NULL || order.waits == NULL ||
                  run.writes == NULL || run.reads == NULL || run.positions == NULL;
  for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
    order.at[p] = EGI_NEW(arena, uint32_t, n);
    is_short = is_short || order.at[p] == NULL;
  }
  if (is_short) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < planner->n_steps; i++) {
    const egi_step *step = &planner->steps[i];
    if (step->is_dead || step->is_fixed != is_fixed) continue;
    run.positions[i] = order.n_steps;
    order.steps[order.n_steps] = i;
    order_step(&run, order.n_steps++);
  }
  *out_order = order;
  return EG_OK;
}

/* ---- the list ------------------------------------------------------------------------------------------------- */

static void emit_record(egi_step_list *list, unsigned stream, uint32_t event) {
  list->steps[list->n_steps++] = (egi_step){.kind = EGI_STEP_RECORD, .stream = stream, .event = event};
}

static void emit_wait(egi_step_list *list, unsigned stream, uint32_t event) {
  list->steps[list->n_steps++] = (egi_step){.kind = EGI_STEP_WAIT, .stream = stream, .event = event};
}

static void fork_streams(const egi_order *order, egi_step_list *list) {
  bool has_recorded = false;
  for (unsigned p = 1; p < EGI_N_STREAMS; p++) {
    if (order->n_on[p] == 0) continue;
    if (!has_recorded) emit_record(list, 0, list->n_events);
    has_recorded = true;
    emit_wait(list, p, list->n_events);
  }
  if (has_recorded) list->n_events++;
}

static void join_streams(const egi_order *order, egi_step_list *list) {
  for (unsigned p = 1; p < EGI_N_STREAMS; p++) {
    if (order->n_on[p] == 0) continue;
    emit_record(list, p, list->n_events);
    emit_wait(list, 0, list->n_events++);
  }
}

/* Number of the event recorded behind each position, plus 1; 0: none. */
static void choose_events(const egi_order *order, uint32_t *events, egi_step_list *list) {
  for (uint32_t i = 0; i < order->n_steps; i++) {
    for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
      uint32_t sequence = order->waits[i].at[p];
      if (sequence != 0) events[order->at[p][sequence]] = 1;
    }
  }
  for (uint32_t i = 0; i < order->n_steps; i++) {
    if (events[i] != 0) events[i] = ++list->n_events;
  }
}

eg_status egi_plan_emit(egi_planner *planner, const egi_order *order, egi_step_list *out_list) {
  size_t room = (size_t)order->n_steps * (EGI_N_STREAMS + 1) + 4 * EGI_N_STREAMS;
  egi_step_list list = {.steps = EGI_NEW(&planner->plan->arena, egi_step, room),
                        .segments = EGI_NEW(&planner->plan->arena, egi_segment, 1)};
  uint32_t *events = EGI_NEW(&planner->arena, uint32_t, (size_t)order->n_steps + 1);
  if (list.steps == NULL || list.segments == NULL || events == NULL) return EG_ERROR_MEMORY;
  fork_streams(order, &list);
  choose_events(order, events, &list);
  for (uint32_t i = 0; i < order->n_steps; i++) {
    const egi_step *step = &planner->steps[order->steps[i]];
    for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
      uint32_t sequence = order->waits[i].at[p];
      if (sequence != 0) emit_wait(&list, step->stream, events[order->at[p][sequence]] - 1);
    }
    if (step->kind == EGI_STEP_RUN) list.steps[list.n_steps++] = *step;
    if (events[i] != 0) emit_record(&list, step->stream, events[i] - 1);
  }
  join_streams(order, &list);
  list.segments[0] = (egi_segment){.kind = EGI_SEGMENT_EAGER, .first_step = 0, .n_steps = list.n_steps};
  list.n_segments = list.n_steps > 0 ? 1 : 0;
  *out_list = list;
  return EG_OK;
}
