/* Softmax, LogSoftmax and their gradients (from the results): rows along one axis, in place or gathered to the
 * worker's buffers. Row functions state accumulators; a row belongs to one task, so results do not depend on the
 * number of threads. */
#include "backend/cpu/strided.h"

typedef struct softmax_params {
  const egi_row_functions *functions;
  unsigned n_inputs;
  bool is_log;
  egi_rows rows[3]; /* of the inputs, then of the output */
  int64_t rows_per_task;
  size_t buffer_bytes; /* of one row */
} softmax_params;

static eg_status prepare(egi_kernel_plan *plan, unsigned n_inputs, bool is_log) {
  softmax_params *p = EGI_NEW(plan->arena, softmax_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  const egi_tensor *out = &plan->outputs[0];
  int axis = 0;
  p->functions = egi_row_functions_of(out->dtype);
  p->n_inputs = n_inputs;
  p->is_log = is_log;
  if (!p->functions) return egi_fail_types(plan);
  if (out->rank > 0 && !egi_normalise_axis(egi_node_int(egi_plan_node(plan), "axis", -1), out->rank, &axis))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis is outside the rank %d", out->rank);
  for (unsigned i = 0; i <= n_inputs; i++) {
    const egi_tensor *tensor = i < n_inputs ? &plan->inputs[i] : out;
    if (tensor->dtype != out->dtype) return egi_fail_types(plan);
    if (tensor->rank == 0)
      egi_rows_init(&p->rows[i], tensor, 0);
    else
      egi_rows_init_along(&p->rows[i], tensor, axis);
    if (p->rows[i].count != p->rows[0].count || p->rows[i].length != p->rows[0].length)
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "shapes of input and output differ");
  }
  p->rows_per_task = egi_rows_per_task(p->rows[0].length);
  p->buffer_bytes = ((size_t)p->rows[0].length * p->rows[0].element_bytes + 63) / 64 * 64;
  plan->workspace_bytes = p->buffer_bytes * 3 * egi_pool_size(egi_context_pool(plan->ctx));
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_softmax(egi_kernel_plan *plan) {
  return prepare(plan, 1, false);
}
eg_status egi_cpu_prepare_log_softmax(egi_kernel_plan *plan) {
  return prepare(plan, 1, true);
}
eg_status egi_cpu_prepare_softmax_grad(egi_kernel_plan *plan) {
  return prepare(plan, 2, false);
}
eg_status egi_cpu_prepare_log_softmax_grad(egi_kernel_plan *plan) {
  return prepare(plan, 2, true);
}

static void run_rows(void *argument, size_t index, size_t worker) {
  const egi_kernel_call *call = argument;
  const softmax_params *p = call->params;
  char *buffers = (char *)call->workspace + worker * 3 * p->buffer_bytes;
  int64_t n = p->rows[0].length, row = (int64_t)index * p->rows_per_task, end = row + p->rows_per_task;
  const egi_rows *out_rows = &p->rows[p->n_inputs];
  for (; row < end && row < p->rows[0].count; row++) {
    const void *in = egi_rows_load(&p->rows[0], &call->inputs[0], row, buffers);
    void *out = egi_rows_target(out_rows, &call->outputs[0], row, buffers + 2 * p->buffer_bytes);
    if (p->n_inputs == 1) {
      (p->is_log ? p->functions->log_softmax : p->functions->softmax)(out, in, n);
    } else {
      const void *dy = egi_rows_load(&p->rows[1], &call->inputs[1], row, buffers + p->buffer_bytes);
      (p->is_log ? p->functions->log_softmax_grad : p->functions->softmax_grad)(out, in, dy, n);
    }
    egi_rows_store(out_rows, &call->outputs[0], row, out);
  }
}

eg_status egi_cpu_run_softmax(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const softmax_params *p = call->params;
  if (p->rows[0].length == 0) return EG_OK;
  int64_t n_tasks = (p->rows[0].count + p->rows_per_task - 1) / p->rows_per_task;
  egi_kernel_call shared = *call;
  egi_pool_run(call->pool, (size_t)n_tasks, run_rows, &shared);
  return EG_OK;
}
