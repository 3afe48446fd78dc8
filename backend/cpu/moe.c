/* engraft.MoE: routing, rows by expert, two products with an activation between them, weighted sums by inverse gather.
 * The order of additions is that of the choice. */
#include "backend/cpu/moe.h"

typedef struct row_run {
  const egi_moe_run *run;
  const egi_tensor *tensor;
  egi_rows rows;
  bool is_weighted;
} row_run;

static char *row_buffer(const egi_moe_run *run, int64_t row) {
  return egi_moe_at(run->p, run->wide, row * run->p->width);
}

static void gather_task(void *argument, size_t task, size_t worker) {
  const row_run *r = argument;
  const egi_moe_params *p = r->run->p;
  int64_t first = (int64_t)task * EGI_MOE_TASK_ROWS;
  size_t bytes = (size_t)p->width * p->element_bytes;
  (void)worker;
  for (int64_t row = first; row < first + EGI_MOE_TASK_ROWS && row < p->n_rows; row++) {
    void *target = row_buffer(r->run, row);
    const void *source = egi_rows_load(&r->rows, r->tensor, r->run->order[row] / p->moe.top_k, target);
    if (source != target) memcpy(target, source, bytes);
  }
}

void egi_moe_gather(const egi_moe_run *run, const egi_tensor *tensor) {
  row_run r = {.run = run, .tensor = tensor};
  egi_rows_init(&r.rows, tensor, tensor->rank - 1);
  egi_pool_run(run->call->pool, (size_t)((run->p->n_rows + EGI_MOE_TASK_ROWS - 1) / EGI_MOE_TASK_ROWS), gather_task,
               &r);
}

/* The sum of a token's rows in `wide`, in place over its first one: the rows of a token belong to it alone. */
static void combine_token(const row_run *r, int64_t token) {
  const egi_moe_run *run = r->run;
  const egi_moe_params *p = run->p;
  const egi_row_functions *functions = egi_row_functions_of(p->dtype);
  int64_t k = p->moe.top_k;
  char *sum = row_buffer(run, run->place[token * k]);
  for (int64_t j = 0; j < k; j++) {
    char *row = row_buffer(run, run->place[token * k + j]);
    if (r->is_weighted)
      functions->scale(row, egi_real_get(egi_moe_at(p, run->weights, token * k + j), p->dtype), p->width);
    if (j > 0) functions->add(sum, row, p->width);
  }
  void *target = egi_rows_target(&r->rows, r->tensor, token, sum);
  if (target != sum) memcpy(target, sum, (size_t)p->width * p->element_bytes);
  egi_rows_store(&r->rows, r->tensor, token, sum);
}

static void combine_task(void *argument, size_t task, size_t worker) {
  const row_run *r = argument;
  int64_t first = (int64_t)task * EGI_MOE_TASK_ROWS;
  (void)worker;
  for (int64_t t = first; t < first + EGI_MOE_TASK_ROWS && t < r->run->p->tokens; t++) combine_token(r, t);
}

void egi_moe_combine(const egi_moe_run *run, const egi_tensor *out, bool is_weighted) {
  row_run r = {.run = run, .tensor = out, .is_weighted = is_weighted};
  egi_rows_init(&r.rows, out, out->rank - 1);
  egi_pool_run(run->call->pool, (size_t)((run->p->tokens + EGI_MOE_TASK_ROWS - 1) / EGI_MOE_TASK_ROWS), combine_task,
               &r);
}

static bool wants(const egi_kernel_call *call, unsigned output) {
  return output < call->n_outputs && call->outputs[output].dtype != EG_DTYPE_UNDEFINED;
}

eg_status egi_cpu_run_moe(eg_context *ctx, const egi_kernel_call *call) {
  egi_moe_run run = egi_moe_begin(call);
  const egi_moe_params *p = run.p;
  (void)ctx;
  if (wants(call, 1)) run.indices = call->outputs[1].data;
  if (wants(call, 2)) run.weights = call->outputs[2].data;
  if (wants(call, 3)) run.saved = call->outputs[3].data;
  egi_moe_route(&run);
  egi_moe_sort(&run);
  egi_moe_gather(&run, &call->inputs[EGI_MOE_X]);
  egi_moe_product product = {.kind = EGI_MOE_FORWARD,
                             .role = EGI_MOE_GATE,
                             .n = p->gate,
                             .k = p->width,
                             .in = run.wide,
                             .in_stride = p->width,
                             .out = run.saved,
                             .out_stride = p->hidden};
  egi_moe_multiply(&run, &product);
  if (p->moe.form == EGI_MOE_SEPARATE) {
    product.role = EGI_MOE_UP;
    product.out = egi_moe_at(p, run.saved, p->gate);
    egi_moe_multiply(&run, &product);
  }
  egi_moe_activate(&run);
  product = (egi_moe_product){.kind = EGI_MOE_FORWARD,
                              .role = EGI_MOE_DOWN,
                              .n = p->width,
                              .k = p->inner,
                              .in = run.middle,
                              .in_stride = p->inner,
                              .out = run.wide,
                              .out_stride = p->width};
  egi_moe_multiply(&run, &product);
  egi_moe_combine(&run, &call->outputs[0], true);
  return EG_OK;
}
