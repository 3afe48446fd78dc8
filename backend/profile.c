/* What each operator of a plan takes: its steps one after the other, with marks before, between and behind them. On a
 * device the host runs ahead, so that a step begins when the one before it ends. */
#include "backend/plan.h"

static eg_status mark(const egi_backend *backend, egi_device *device, double *times, unsigned index) {
  if (backend->mark != NULL) return backend->mark(device, index);
  times[index] = egi_clock();
  return EG_OK;
}

static eg_status elapsed(const egi_backend *backend, egi_device *device, const double *times, unsigned index,
                         double *out_seconds) {
  if (backend->elapsed != NULL) return backend->elapsed(device, index, index + 1, out_seconds);
  *out_seconds = times[index + 1] - times[index];
  return EG_OK;
}

/* Copies between device and host, on streams of their own, are waited for. */
static eg_status run_step(egi_session *session, const egi_step *step) {
  const egi_backend *backend = egi_session_plan(session)->backend;
  egi_device *device = egi_session_device(session);
  if (step->stream == 0) return egi_session_run_step(session, step);
  EG_TRY(backend->synchronize(device));
  EG_TRY(egi_session_run_step(session, step));
  return backend->synchronize(device);
}

static eg_status profile_steps(egi_session *session, double *times, egi_profile *profile) {
  const egi_plan *plan = egi_session_plan(session);
  egi_device *device = egi_session_device(session);
  for (uint32_t i = 0; i < plan->main.n_steps; i++) {
    EG_TRY(mark(plan->backend, device, times, i));
    if (plan->main.steps[i].kind == EGI_STEP_RUN) EG_TRY(run_step(session, &plan->main.steps[i]));
  }
  EG_TRY(mark(plan->backend, device, times, plan->main.n_steps));
  for (uint32_t i = 0; i < plan->main.n_steps; i++) {
    const egi_step *step = &plan->main.steps[i];
    double seconds = 0.0;
    if (step->kind != EGI_STEP_RUN) continue;
    uint32_t op = step->is_copy ? EGI_OP_COUNT : (uint32_t)plan->graph->nodes[step->node].op;
    EG_TRY(elapsed(plan->backend, device, times, i, &seconds));
    profile->seconds[op] += seconds;
    profile->counts[op]++;
  }
  return EG_OK;
}

eg_status egi_session_profile(egi_session *session, egi_profile *out_profile) {
  EG_TRY(egi_session_bind(session));
  const egi_plan *plan = egi_session_plan(session);
  egi_arena arena;
  egi_arena_init(&arena, plan->ctx, EGI_PURPOSE_DATA);
  double *times = EGI_NEW(&arena, double, (size_t)plan->main.n_steps + 1);
  *out_profile = (egi_profile){{0.0}, {0}};
  eg_status status = times != NULL ? profile_steps(session, times, out_profile) : EG_ERROR_MEMORY;
  egi_arena_clear(&arena);
  return status == EG_OK ? plan->backend->synchronize(egi_session_device(session)) : status;
}
