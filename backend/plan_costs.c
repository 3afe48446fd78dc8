/* What a run of a plan costs, by operator, and how long it should take on a described device: computing, copies to the
 * host and copies to the device go on at the same time. */
#include "backend/costs.h"
#include "backend/plan.h"

/* The step's operands as its node lists them: a step may read fewer (Reload). */
static eg_status step_cost(const egi_plan *plan, const egi_step *step, egi_tensor *tensors, egi_cost *out_cost) {
  const egi_node *node = &plan->graph->nodes[step->node];
  const egi_layout *operands = plan->operands + step->first_operand;
  if (step->is_copy) {
    *out_cost = egi_cost_of_copy(&operands[0].tensor, &operands[1].tensor);
    return EG_OK;
  }
  uint32_t n = (uint32_t)node->n_inputs + node->n_outputs;
  for (uint32_t i = 0; i < n; i++) tensors[i] = (egi_tensor){0};
  for (uint32_t i = 0; i < step->n_inputs; i++) tensors[i] = operands[i].tensor;
  for (uint32_t i = 0; i < step->n_outputs; i++) tensors[node->n_inputs + i] = operands[step->n_inputs + i].tensor;
  return egi_cost_of_node(plan->graph, step->node, tensors, tensors + node->n_inputs, out_cost);
}

static uint32_t most_operands(const egi_plan *plan) {
  uint32_t most = 2;
  for (uint32_t i = 0; i < plan->main.n_steps; i++) {
    const egi_node *node = &plan->graph->nodes[plan->main.steps[i].node];
    uint32_t n = (uint32_t)node->n_inputs + node->n_outputs;
    if (n > most) most = n;
  }
  return most;
}

static void note_workspace(const egi_plan *plan, const egi_step *step, egi_plan_cost_row *row) {
  uint64_t size_bytes = step->workspace != 0 ? plan->storages[step->workspace].size_bytes : 0;
  if (size_bytes > row->workspace_bytes) row->workspace_bytes = size_bytes;
  if (step->chunk_rows > 0 && (row->chunk_rows == 0 || step->chunk_rows < row->chunk_rows))
    row->chunk_rows = step->chunk_rows;
}

static int compare_seconds(const void *a, const void *b) {
  const egi_plan_cost_row *x = a, *y = b;
  if (x->seconds < y->seconds || x->seconds > y->seconds) return x->seconds > y->seconds ? -1 : 1;
  return strcmp(x->op, y->op);
}

/* Rows by operator; the row behind the last operator is for copies. */
static void list_rows(egi_plan_cost_row *rows, egi_plan_costs *costs) {
  for (uint32_t op = 0; op <= EGI_OP_COUNT; op++) {
    if (rows[op].count == 0) continue;
    egi_plan_cost_row row = rows[op];
    row.op = op < EGI_OP_COUNT ? egi_op_get((egi_op)op)->name : "copy";
    costs->rows[costs->n_rows++] = row;
  }
  if (costs->n_rows > 0) qsort(costs->rows, costs->n_rows, sizeof(*costs->rows), compare_seconds);
}

eg_status egi_plan_get_costs(const egi_plan *plan, const egi_device_description *device, egi_arena *arena,
                             egi_plan_costs *out_costs) {
  egi_plan_costs costs = {0};
  double streams[EGI_N_STREAMS] = {0.0};
  egi_plan_cost_row *rows = EGI_NEW(arena, egi_plan_cost_row, (size_t)EGI_OP_COUNT + 1);
  egi_tensor *tensors = EGI_NEW(arena, egi_tensor, most_operands(plan));
  costs.rows = EGI_NEW(arena, egi_plan_cost_row, (size_t)EGI_OP_COUNT + 1);
  if (rows == NULL || tensors == NULL || costs.rows == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < plan->main.n_steps; i++) {
    const egi_step *step = &plan->main.steps[i];
    egi_cost cost;
    if (step->kind != EGI_STEP_RUN) continue;
    EG_TRY(step_cost(plan, step, tensors, &cost));
    egi_plan_cost_row *row = &rows[step->is_copy ? EGI_OP_COUNT : plan->graph->nodes[step->node].op];
    double seconds = egi_cost_seconds(device, &cost);
    row->count++;
    note_workspace(plan, step, row);
    row->seconds += seconds;
    streams[step->stream] += seconds;
    egi_cost_add(&row->cost, &cost);
    egi_cost_add(&costs.total, &cost);
  }
  for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
    if (streams[p] > costs.seconds) costs.seconds = streams[p];
  }
  costs.compute_seconds = streams[0];
  list_rows(rows, &costs);
  *out_costs = costs;
  return EG_OK;
}
