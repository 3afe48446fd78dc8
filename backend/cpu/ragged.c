/* RaggedLinear, its gradient by the rows, and RaggedReduce, that by the matrices. With y = w · (W·x + b) the weight of
 * a row has the gradient (Wᵀ·dy)·x + b·dy: the gradient of x before it is weighted gives it, no product is made again.
 */
#include "backend/cpu/ragged.h"

#include "backend/cpu/narrow.h"
#include "backend/cpu/route.h"

#define TASK_ROWS 64

typedef struct ragged_params {
  egi_ragged ragged;
  const egi_isa *isa;
  int64_t n, k, n_rows;
  size_t n_workers;
  size_t offsets_bytes, row_bytes, scratch_bytes; /* of a worker: two rows, scratch of products */
} ragged_params;

static size_t padded(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

static bool is_real(eg_dtype dtype) {
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64;
}

static eg_status place(egi_kernel_plan *plan, ragged_params *p) {
  size_t element_bytes = egi_element_bytes(plan->inputs[0].dtype);
  int64_t longest = p->n > p->k ? p->n : p->k;
  size_t rows = 0, scratch = 0;
  p->isa = egi_cpu_isa();
  p->n_workers = egi_pool_size(egi_context_pool(plan->ctx));
  p->n_rows = plan->inputs[0].dims[0];
  p->offsets_bytes = padded((size_t)(p->ragged.n_experts + 1) * sizeof(int32_t));
  p->row_bytes = padded((size_t)longest * element_bytes);
  p->scratch_bytes = egi_ragged_scratch(&p->ragged, longest, element_bytes);
  plan->params = p;
  if (egi_size_multiply(p->row_bytes, 2 * p->n_workers, &rows) &&
      egi_size_multiply(p->scratch_bytes, p->n_workers, &scratch) && egi_size_add(rows, scratch, &scratch) &&
      egi_size_add(scratch, p->offsets_bytes, &plan->workspace_bytes))
    return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
}

static eg_status prepare(egi_kernel_plan *plan, bool is_gradient) {
  ragged_params *p = EGI_NEW(plan->arena, ragged_params, 1);
  eg_dtype dtype = plan->inputs[0].dtype;
  if (p == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_ragged_read(plan->graph, plan->node, &p->ragged));
  p->k = p->ragged.in_features;
  p->n = (is_gradient ? plan->inputs[EGI_RAGGED_DY] : plan->outputs[0]).dims[1];
  bool fits = is_real(dtype) && egi_ragged_takes(&p->ragged, plan->inputs, dtype);
  for (unsigned i = 1; i < EGI_RAGGED_FIRST_ROLE && i < plan->n_inputs; i++)
    fits = fits && (i == EGI_RAGGED_OFFSETS || !egi_plan_has_input(plan, i) || plan->inputs[i].dtype == dtype);
  return fits ? place(plan, p) : egi_fail_types(plan);
}

eg_status egi_cpu_prepare_ragged_linear(egi_kernel_plan *plan) {
  return prepare(plan, false);
}

eg_status egi_cpu_prepare_ragged_linear_grad(egi_kernel_plan *plan) {
  return prepare(plan, true);
}

static const egi_tensor *optional(const egi_kernel_call *call, unsigned input) {
  return egi_call_has_input(call, input) ? &call->inputs[input] : NULL;
}

static char *scratch_of(const egi_kernel_call *call, const ragged_params *p) {
  return (char *)call->workspace + p->offsets_bytes;
}

static egi_ragged_product begin(const egi_kernel_call *call, const ragged_params *p, const int32_t *offsets) {
  return (egi_ragged_product){.ragged = &p->ragged,
                              .call = call,
                              .isa = p->isa,
                              .offsets = offsets,
                              .n = p->n,
                              .alpha = p->ragged.alpha,
                              .in = egi_ragged_matrix(&call->inputs[0], false),
                              .out = egi_ragged_matrix(&call->outputs[0], false),
                              .scratch = scratch_of(call, p),
                              .scratch_bytes = p->scratch_bytes};
}

eg_status egi_cpu_run_ragged_linear(eg_context *ctx, const egi_kernel_call *call) {
  const ragged_params *p = call->params;
  const int32_t *offsets = egi_index_list(&call->inputs[EGI_RAGGED_OFFSETS], call->workspace);
  EG_TRY(egi_check_offsets(ctx, offsets, p->ragged.n_experts, p->n_rows));
  egi_ragged_product product = begin(call, p, offsets);
  product.addend = optional(call, EGI_RAGGED_ADDEND);
  product.row_weight = optional(call, EGI_RAGGED_ROW_WEIGHT);
  egi_ragged_multiply(&product);
  return EG_OK;
}

/* ---- the gradient by the rows --------------------------------------------------------------------------------- */

typedef struct row_task {
  const egi_kernel_call *call;
  const ragged_params *p;
  const int32_t *offsets;
  egi_rows dy_rows, x_rows, dx_rows;
  const egi_tensor *weight_gradient; /* NULL: not wanted */
} row_task;

static double dot_bias(const row_task *t, int64_t expert, const char *dy) {
  egi_tensor bias = egi_ragged_operand(&t->p->ragged, t->call->inputs, EGI_RAGGED_BIAS, expert);
  eg_dtype dtype = t->call->outputs[0].dtype;
  size_t bytes = egi_element_bytes(dtype);
  double sum = 0.0;
  for (int64_t i = 0; i < t->p->n; i++)
    sum += egi_real_get(dy + (size_t)i * bytes, dtype) * egi_float_get(&bias, i * bias.strides[0]);
  return sum;
}

/* d w of each row, then dx times the row's weight. */
static void weigh_rows(void *argument, size_t task, size_t worker) {
  const row_task *t = argument;
  const ragged_params *p = t->p;
  const egi_kernel_call *call = t->call;
  eg_dtype dtype = call->outputs[0].dtype;
  const egi_row_functions *functions = egi_row_functions_of(dtype);
  char *buffer = scratch_of(call, p) + p->scratch_bytes * p->n_workers + 2 * worker * p->row_bytes;
  int64_t first = (int64_t)task * TASK_ROWS, expert = 0;
  const egi_tensor *weight = &call->inputs[EGI_RAGGED_ROW_WEIGHT];
  for (int64_t row = first; row < first + TASK_ROWS && row < p->n_rows; row++) {
    void *dx = egi_rows_at(&t->dx_rows, call->outputs[0].data, row);
    while (t->offsets[expert + 1] <= row) expert++;
    if (t->weight_gradient != NULL) {
      double sum = functions->dot(dx, egi_rows_load(&t->x_rows, &call->inputs[1], row, buffer), p->k);
      if (p->ragged.counts[EGI_RAGGED_BIAS] > 0)
        sum += dot_bias(t, expert, egi_rows_load(&t->dy_rows, &call->inputs[0], row, buffer + p->row_bytes));
      egi_real_set((char *)t->weight_gradient->data + (size_t)row * egi_element_bytes(dtype), dtype,
                   p->ragged.alpha * sum);
    }
    functions->scale(dx, p->ragged.alpha * egi_float_get(weight, row * weight->strides[0]), p->k);
  }
}

eg_status egi_cpu_run_ragged_linear_grad(eg_context *ctx, const egi_kernel_call *call) {
  const ragged_params *p = call->params;
  const int32_t *offsets = egi_index_list(&call->inputs[EGI_RAGGED_OFFSETS], call->workspace);
  bool is_weighted = egi_call_has_input(call, EGI_RAGGED_ROW_WEIGHT);
  EG_TRY(egi_check_offsets(ctx, offsets, p->ragged.n_experts, p->n_rows));
  egi_ragged_product product = begin(call, p, offsets);
  product.is_backward = true;
  if (is_weighted) product.alpha = 1.0;
  egi_ragged_multiply(&product);
  if (!is_weighted) return EG_OK;
  row_task t = {.call = call, .p = p, .offsets = offsets};
  egi_rows_init(&t.dy_rows, &call->inputs[0], 1);
  egi_rows_init(&t.dx_rows, &call->outputs[0], 1);
  if (egi_call_has_input(call, 1)) egi_rows_init(&t.x_rows, &call->inputs[1], 1);
  if (call->n_outputs > 1 && call->outputs[1].dtype != EG_DTYPE_UNDEFINED) t.weight_gradient = &call->outputs[1];
  egi_pool_run(call->pool, (size_t)((p->n_rows + TASK_ROWS - 1) / TASK_ROWS), weigh_rows, &t);
  return EG_OK;
}

/* ---- the gradient by the matrices ------------------------------------------------------------------------------ */

typedef struct reduce_task {
  const egi_kernel_call *call;
  const ragged_params *p;
  const int32_t *offsets;
  int64_t tiles, first_expert;
} reduce_task;

eg_status egi_cpu_prepare_ragged_reduce(egi_kernel_plan *plan) {
  ragged_params *p = EGI_NEW(plan->arena, ragged_params, 1);
  const egi_node *node = egi_plan_node(plan);
  if (p == NULL) return EG_ERROR_MEMORY;
  p->ragged.n_experts = plan->outputs[0].dims[0];
  p->ragged.alpha = (double)egi_node_float(node, "alpha", 1.0f);
  p->ragged.is_loop = egi_node_int(node, "loop", 0) != 0;
  p->n = plan->outputs[0].dims[1];
  p->k = plan->outputs[0].dims[2];
  if (!is_real(plan->inputs[0].dtype) || plan->inputs[1].dtype != plan->inputs[0].dtype) return egi_fail_types(plan);
  return place(plan, p);
}

/* EGI_RAGGED_TILE rows of an expert's sum. */
static void reduce_rows(void *argument, size_t task, size_t worker) {
  const reduce_task *t = argument;
  const ragged_params *p = t->p;
  const egi_tensor *left = &t->call->inputs[0], *right = &t->call->inputs[1], *out = &t->call->outputs[0];
  int64_t expert = t->first_expert + (int64_t)task / t->tiles, first = (int64_t)task % t->tiles * EGI_RAGGED_TILE;
  int64_t start = t->offsets[expert], count = p->n - first < EGI_RAGGED_TILE ? p->n - first : EGI_RAGGED_TILE;
  egi_matrix sums = {(char *)out->data + (size_t)(expert * out->strides[0]) * egi_element_bytes(out->dtype), out->dtype,
                     out->strides[1], out->strides[2]};
  egi_matrix a = {left->data, left->dtype, left->strides[1], left->strides[0]}; /* turned */
  egi_matrix b = egi_ragged_matrix(right, false);
  for (int64_t column = 0; column < p->k; column += EGI_RAGGED_TILE) {
    egi_product tile = {.m = count,
                        .n = p->k - column < EGI_RAGGED_TILE ? p->k - column : EGI_RAGGED_TILE,
                        .k = t->offsets[expert + 1] - start,
                        .a = egi_matrix_part(&a, first, start),
                        .b = egi_matrix_part(&b, start, column),
                        .c = egi_matrix_part(&sums, first, column),
                        .alpha = p->ragged.alpha};
    if (tile.k > 0) egi_product_run(p->isa, &tile, scratch_of(t->call, p) + worker * p->scratch_bytes);
    for (int64_t i = 0; tile.k == 0 && i < tile.m; i++)
      for (int64_t j = 0; j < tile.n; j++) egi_real_set(egi_matrix_at(&tile.c, i, j), out->dtype, 0.0);
  }
}

eg_status egi_cpu_run_ragged_reduce(eg_context *ctx, const egi_kernel_call *call) {
  const ragged_params *p = call->params;
  reduce_task t = {.call = call, .p = p, .offsets = egi_index_list(&call->inputs[2], call->workspace)};
  EG_TRY(egi_check_offsets(ctx, t.offsets, p->ragged.n_experts, p->n_rows));
  t.tiles = (p->n + EGI_RAGGED_TILE - 1) / EGI_RAGGED_TILE;
  if (!p->ragged.is_loop) {
    egi_pool_run(call->pool, (size_t)(p->ragged.n_experts * t.tiles), reduce_rows, &t);
    return EG_OK;
  }
  for (; t.first_expert < p->ragged.n_experts; t.first_expert++)
    egi_pool_run(call->pool, (size_t)t.tiles, reduce_rows, &t);
  return EG_OK;
}
