/* Counts what Offload and Reload move in a run, and the slots: how many reloaded tensors are on the device at a time.
 * Called by plan.c after lifetimes and in-place reuse are settled. */
#include "backend/plan.h"

/* A reloaded tensor comes (+1) or may be overwritten (-1), in the time of stream 0. */
typedef struct change {
  uint32_t at;
  int by;
} change;

static int compare_changes(const void *a, const void *b) {
  const change *x = a, *y = b;
  if (x->at != y->at) return x->at < y->at ? -1 : 1;
  return x->by - y->by; /* what goes makes room for what comes */
}

static uint32_t most_at_a_time(change *changes, uint32_t n) {
  int now = 0, most = 0;
  if (n > 0) qsort(changes, n, sizeof(*changes), compare_changes);
  for (uint32_t i = 0; i < n; i++) {
    now += changes[i].by;
    if (now > most) most = now;
  }
  return (uint32_t)most;
}

eg_status egi_plan_count_transfers(egi_planner *planner, const egi_order *order) {
  const egi_plan *plan = planner->plan;
  egi_plan_transfers *sum = &planner->plan->transfers;
  change *changes = EGI_NEW(&planner->arena, change, 2 * (size_t)order->n_steps + 1);
  uint32_t n = 0;
  if (changes == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < order->n_steps; i++) {
    const egi_step *step = &planner->steps[order->steps[i]];
    if (step->kind != EGI_STEP_RUN || step->is_copy) continue;
    egi_op op = planner->graph->nodes[step->node].op;
    if (op != EGI_OP_Offload && op != EGI_OP_Reload) continue;
    const egi_storage *storage = &plan->storages[plan->operands[step->first_operand + step->n_inputs].storage];
    sum->n_offloads += op == EGI_OP_Offload;
    sum->n_reloads += op == EGI_OP_Reload;
    if (op == EGI_OP_Offload) sum->offloaded_bytes += storage->size_bytes;
    if (op != EGI_OP_Reload) continue;
    sum->reloaded_bytes += storage->size_bytes;
    changes[n++] = (change){order->clocks[i].at[0], 1};
    changes[n++] = (change){storage->last[0] > order->clocks[i].at[0] ? storage->last[0] : order->clocks[i].at[0], -1};
  }
  sum->n_slots = most_at_a_time(changes, n);
  return EG_OK;
}

void egi_plan_get_transfers(const egi_plan *plan, egi_plan_transfers *out_transfers) {
  *out_transfers = plan->transfers;
}
