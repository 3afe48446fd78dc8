/* Dispatch and Combine: tokens' rows in the order of their experts, and sums of a token's rows back in the order of the
 * choice, by gathers alone. Tasks are TASK_ROWS rows; sums are in the rows' type. */
#include "backend/cpu/route.h"

#define TASK_ROWS 64

typedef struct move_params {
  eg_dtype dtype;
  size_t element_bytes, row_bytes, lists; /* of a row's buffer and of an index list, 64-byte aligned */
  int64_t tokens, top_k, n_rows, width;
} move_params;

typedef struct move_task {
  const move_params *p;
  const egi_tensor *in, *out;
  egi_rows in_rows, out_rows;
  const int32_t *indices; /* source rows, or the inverse */
  char *buffers;          /* two rows a worker */
} move_task;

static size_t padded(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

static eg_status prepare(egi_kernel_plan *plan, const egi_tensor *tokens, int64_t n_rows) {
  move_params *p = EGI_NEW(plan->arena, move_params, 1);
  size_t buffers = 0;
  if (p == NULL) return EG_ERROR_MEMORY;
  p->dtype = plan->inputs[0].dtype;
  if (p->dtype != EG_DTYPE_F32 && p->dtype != EG_DTYPE_F64) return egi_fail_types(plan);
  p->element_bytes = egi_element_bytes(p->dtype);
  p->width = tokens->dims[tokens->rank - 1];
  p->row_bytes = padded((size_t)p->width * p->element_bytes);
  p->n_rows = n_rows;
  p->lists = padded((size_t)n_rows * sizeof(int32_t));
  p->tokens = 1;
  for (int i = 0; i + 1 < tokens->rank; i++) p->tokens *= tokens->dims[i];
  p->top_k = p->tokens > 0 ? n_rows / p->tokens : 1;
  if (p->tokens * p->top_k != n_rows)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%lld rows are no multiple of %lld tokens",
                         (long long)n_rows, (long long)p->tokens);
  size_t workers = egi_pool_size(egi_context_pool(plan->ctx));
  if (!egi_size_multiply(2 * p->row_bytes, workers, &buffers) ||
      !egi_size_add(buffers, p->lists, &plan->workspace_bytes))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_dispatch(egi_kernel_plan *plan) {
  return prepare(plan, &plan->inputs[0], plan->outputs[0].dims[0]);
}

eg_status egi_cpu_prepare_combine(egi_kernel_plan *plan) {
  return prepare(plan, &plan->outputs[0], plan->inputs[0].dims[0]);
}

static void dispatch_rows(void *argument, size_t task, size_t worker) {
  const move_task *t = argument;
  char *buffer = t->buffers + 2 * worker * t->p->row_bytes;
  int64_t first = (int64_t)task * TASK_ROWS;
  for (int64_t row = first; row < first + TASK_ROWS && row < t->p->n_rows; row++) {
    void *target = egi_rows_target(&t->out_rows, t->out, row, buffer);
    const void *source = egi_rows_load(&t->in_rows, t->in, t->indices[row], target);
    if (source != target) memcpy(target, source, (size_t)t->p->width * t->p->element_bytes);
    egi_rows_store(&t->out_rows, t->out, row, buffer);
  }
}

static void combine_tokens(void *argument, size_t task, size_t worker) {
  const move_task *t = argument;
  const move_params *p = t->p;
  const egi_row_functions *functions = egi_row_functions_of(p->dtype);
  char *sum = t->buffers + 2 * worker * p->row_bytes, *buffer = sum + p->row_bytes;
  int64_t first = (int64_t)task * TASK_ROWS;
  for (int64_t token = first; token < first + TASK_ROWS && token < p->tokens; token++) {
    const int32_t *rows = t->indices + token * p->top_k;
    char *target = egi_rows_target(&t->out_rows, t->out, token, sum);
    const void *source = egi_rows_load(&t->in_rows, t->in, rows[0], target);
    if (source != target) memcpy(target, source, (size_t)p->width * p->element_bytes);
    for (int64_t j = 1; j < p->top_k; j++)
      functions->add(target, egi_rows_load(&t->in_rows, t->in, rows[j], buffer), p->width);
    egi_rows_store(&t->out_rows, t->out, token, sum);
  }
}

static eg_status run(eg_context *ctx, const egi_kernel_call *call, bool is_combine) {
  const move_params *p = call->params;
  move_task t = {.p = p,
                 .in = &call->inputs[0],
                 .out = &call->outputs[0],
                 .indices = egi_index_list(&call->inputs[is_combine ? 2 : 1], call->workspace),
                 .buffers = (char *)call->workspace + p->lists};
  int64_t n = is_combine ? p->tokens : p->n_rows;
  EG_TRY(egi_check_routing(ctx, t.indices, p->n_rows, is_combine ? p->n_rows : p->tokens));
  egi_rows_init(&t.in_rows, t.in, t.in->rank - 1);
  egi_rows_init(&t.out_rows, t.out, t.out->rank - 1);
  egi_pool_run(call->pool, (size_t)((n + TASK_ROWS - 1) / TASK_ROWS), is_combine ? combine_tokens : dispatch_rows, &t);
  return EG_OK;
}

eg_status egi_cpu_run_dispatch(eg_context *ctx, const egi_kernel_call *call) {
  return run(ctx, call, false);
}

eg_status egi_cpu_run_combine(eg_context *ctx, const egi_kernel_call *call) {
  return run(ctx, call, true);
}
