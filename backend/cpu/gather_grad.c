/* GatherGrad, GatherElementsGrad and GatherNDGrad: sums of the rows of dY that came from the same place. Deterministic:
 * each task owns a part of the result and adds to it in the order of the indices. Sums of more than one row are made in
 * f64. Inputs are contiguous: data (its shape alone), indices, dY. */
#include "backend/cpu/elementwise.h"
#include "backend/cpu/index.h"

/* Columns whose sums stand on the stack. */
#define COLUMNS 512

static int64_t minimum(int64_t a, int64_t b) {
  return a < b ? a : b;
}

typedef struct grad_params {
  const egi_isa *isa;
  int axis;              /* GatherNDGrad: number of batch dims */
  egi_inner load, store; /* to and from f64 */
} grad_params;

static eg_status prepare(egi_kernel_plan *plan, grad_params **out_params) {
  grad_params *p = EGI_NEW(plan->arena, grad_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  *out_params = p;
  eg_dtype dtype = plan->inputs[2].dtype;
  p->isa = egi_cpu_isa();
  p->load = egi_cast_inner(EG_DTYPE_F64, dtype);
  p->store = egi_cast_inner(dtype, EG_DTYPE_F64);
  bool is_fit = egi_dtype_is_float(dtype) && plan->outputs[0].dtype == dtype && p->load != NULL && p->store != NULL &&
                egi_is_index_type(plan->inputs[1].dtype);
  return is_fit ? EG_OK : egi_fail_types(plan);
}

static eg_status prepare_with_axis(egi_kernel_plan *plan, grad_params **out_params) {
  EG_TRY(prepare(plan, out_params));
  int64_t axis = egi_node_int(egi_plan_node(plan), "axis", 0);
  if (egi_normalise_axis(axis, plan->outputs[0].rank, &(*out_params)->axis)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis %lld of data of rank %d", (long long)axis,
                       plan->outputs[0].rank);
}

/* sums[n] += the n elements at `row`. */
static void add_row(const grad_params *p, eg_dtype dtype, double *sums, char *row, int64_t n) {
  if (dtype == EG_DTYPE_F32) {
    p->isa->elementwise->add_to(sums, (const float *)(const void *)row, n);
    return;
  }
  double block[COLUMNS];
  char *const data[2] = {(char *)block, row};
  const int64_t strides[2] = {sizeof(double), (int64_t)egi_element_bytes(dtype)};
  p->load(p->isa, data, strides, n);
  for (int64_t i = 0; i < n; i++) sums[i] += block[i];
}

static void store_row(const grad_params *p, eg_dtype dtype, char *row, double *sums, int64_t n) {
  char *const data[2] = {row, (char *)sums};
  const int64_t strides[2] = {(int64_t)egi_element_bytes(dtype), sizeof(double)};
  p->store(p->isa, data, strides, n);
}

/* ---- GatherGrad ----------------------------------------------------------------------------------------------- */

/* The indices by the row they name: positions order[first[v] .. first[v + 1]) name row v. */
typedef struct gather_task {
  const grad_params *params;
  eg_dtype dtype;
  char *result, *gradient;
  int64_t n_rows, inner, n_indices; /* result: [outer, n_rows, inner] */
  uint32_t *first, *order;
  int64_t n_all, rows_per_task;
} gather_task;

eg_status egi_cpu_prepare_gather_grad(egi_kernel_plan *plan) {
  grad_params *p;
  EG_TRY(prepare_with_axis(plan, &p));
  int64_t n_rows = plan->outputs[0].dims[p->axis], n_indices = egi_tensor_count(&plan->inputs[1]);
  size_t entries = 0;
  if (n_indices >= UINT32_MAX || !egi_size_add((size_t)n_rows + 2, (size_t)n_indices, &entries) ||
      !egi_size_multiply(entries, sizeof(uint32_t), &plan->workspace_bytes)) {
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "too many indices");
  }
  return EG_OK;
}

/* Counting sort, stable. `first` has n_rows + 2 entries: it is filled one place ahead and so ends where it belongs. */
static void sort_indices(gather_task *t, const egi_tensor *indices) {
  memset(t->first, 0, (size_t)(t->n_rows + 2) * sizeof(uint32_t));
  for (int64_t i = 0; i < t->n_indices; i++) {
    int64_t row = egi_index_at(indices, i);
    t->first[(row < 0 ? row + t->n_rows : row) + 2]++;
  }
  for (int64_t v = 0; v < t->n_rows; v++) t->first[v + 2] += t->first[v + 1];
  for (int64_t i = 0; i < t->n_indices; i++) {
    int64_t row = egi_index_at(indices, i);
    t->order[t->first[(row < 0 ? row + t->n_rows : row) + 1]++] = (uint32_t)i;
  }
}

static void sum_one_row(const gather_task *t, int64_t row) {
  int64_t bytes = (int64_t)egi_element_bytes(t->dtype);
  int64_t outer = row / t->n_rows, v = row % t->n_rows;
  uint32_t start = t->first[v], end = t->first[v + 1];
  char *target = t->result + row * t->inner * bytes;
  char *rows = t->gradient + outer * t->n_indices * t->inner * bytes;
  if (end == start) {
    memset(target, 0, (size_t)(t->inner * bytes));
  } else if (end == start + 1) {
    memcpy(target, rows + t->order[start] * t->inner * bytes, (size_t)(t->inner * bytes));
  } else {
    for (int64_t column = 0; column < t->inner; column += COLUMNS) {
      int64_t n = minimum(COLUMNS, t->inner - column);
      double sums[COLUMNS] = {0.0};
      for (uint32_t i = start; i < end; i++) {
        add_row(t->params, t->dtype, sums, rows + (t->order[i] * t->inner + column) * bytes, n);
      }
      store_row(t->params, t->dtype, target + column * bytes, sums, n);
    }
  }
}

static void sum_rows(void *argument, size_t index, size_t worker) {
  (void)worker;
  const gather_task *t = argument;
  int64_t start = (int64_t)index * t->rows_per_task;
  int64_t end = minimum(start + t->rows_per_task, t->n_all);
  for (int64_t row = start; row < end; row++) sum_one_row(t, row);
}

eg_status egi_cpu_run_gather_grad(eg_context *ctx, const egi_kernel_call *call) {
  const grad_params *p = call->params;
  const egi_tensor *output = &call->outputs[0], *indices = &call->inputs[1];
  gather_task task = {.params = p, .dtype = output->dtype, .result = output->data, .gradient = call->inputs[2].data};
  task.n_rows = output->dims[p->axis];
  task.inner = egi_dims_product(output, p->axis + 1, output->rank);
  task.n_all = task.n_rows * egi_dims_product(output, 0, p->axis);
  task.n_indices = egi_tensor_count(indices);
  EG_TRY(egi_check_indices(ctx, "GatherGrad", indices, task.n_rows));
  if (task.n_all * task.inner == 0) return EG_OK;
  task.first = call->workspace;
  task.order = task.first + task.n_rows + 2;
  sort_indices(&task, indices);
  task.rows_per_task = egi_rows_per_task(task.inner);
  egi_pool_run(call->pool, (size_t)((task.n_all + task.rows_per_task - 1) / task.rows_per_task), sum_rows, &task);
  return EG_OK;
}

/* ---- GatherElementsGrad --------------------------------------------------------------------------------------- */

/* A line of the result: all its elements along the axis. */
typedef struct elements_task {
  const egi_tensor *indices, *gradient, *output;
  int axis;
  int64_t n_lines, lines_per_task;
} elements_task;

/* Sums are made in the result itself, f32 or f64. */
eg_status egi_cpu_prepare_gather_elements_grad(egi_kernel_plan *plan) {
  grad_params *p;
  EG_TRY(prepare_with_axis(plan, &p));
  eg_dtype dtype = plan->outputs[0].dtype;
  const egi_tensor *output = &plan->outputs[0], *indices = &plan->inputs[1];
  bool fits = output->rank == indices->rank;
  for (int i = 0; fits && i < output->rank; i++) fits = i == p->axis || indices->dims[i] <= output->dims[i];
  if (!fits) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "indices reach beyond data");
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64 ? EG_OK : egi_fail_types(plan);
}

static void add_element(const egi_tensor *output, int64_t to, const egi_tensor *gradient, int64_t from) {
  if (output->dtype == EG_DTYPE_F32) {
    ((float *)output->data)[to] += ((const float *)gradient->data)[from];
  } else {
    ((double *)output->data)[to] += ((const double *)gradient->data)[from];
  }
}

/* Where line `line` starts in the result and in indices; false when indices do not reach it. */
static bool locate_line(const elements_task *t, int64_t line, int64_t *out_to, int64_t *out_from) {
  *out_to = *out_from = 0;
  bool is_reached = true;
  for (int i = t->output->rank - 1; i >= 0; i--) {
    if (i == t->axis) continue;
    int64_t index = line % t->output->dims[i];
    line /= t->output->dims[i];
    if (index >= t->indices->dims[i]) is_reached = false;
    *out_to += index * t->output->strides[i];
    *out_from += index * t->indices->strides[i];
  }
  return is_reached;
}

static void sum_lines(void *argument, size_t index, size_t worker) {
  (void)worker;
  const elements_task *t = argument;
  int64_t start = (int64_t)index * t->lines_per_task;
  int64_t end = minimum(start + t->lines_per_task, t->n_lines);
  int64_t size = t->output->dims[t->axis], stride = t->output->strides[t->axis];
  int64_t bytes = (int64_t)egi_element_bytes(t->output->dtype);
  for (int64_t line = start; line < end; line++) {
    int64_t to, from;
    bool is_reached = locate_line(t, line, &to, &from);
    for (int64_t k = 0; k < size; k++) memset((char *)t->output->data + (to + k * stride) * bytes, 0, (size_t)bytes);
    for (int64_t k = 0; is_reached && k < t->indices->dims[t->axis]; k++) {
      int64_t source = from + k * t->indices->strides[t->axis];
      int64_t position = egi_index_at(t->indices, source); /* contiguous: offset and position are the same */
      add_element(t->output, to + (position < 0 ? position + size : position) * stride, t->gradient, source);
    }
  }
}

eg_status egi_cpu_run_gather_elements_grad(eg_context *ctx, const egi_kernel_call *call) {
  const grad_params *p = call->params;
  const egi_tensor *output = &call->outputs[0];
  int64_t size = output->dims[p->axis];
  EG_TRY(egi_check_indices(ctx, "GatherElementsGrad", &call->inputs[1], size));
  int64_t count = egi_tensor_count(output);
  if (count == 0) return EG_OK;
  elements_task task = {.indices = &call->inputs[1], .gradient = &call->inputs[2], .output = output, .axis = p->axis};
  task.n_lines = count / size;
  task.lines_per_task = egi_rows_per_task(size);
  egi_pool_run(call->pool, (size_t)((task.n_lines + task.lines_per_task - 1) / task.lines_per_task), sum_lines, &task);
  return EG_OK;
}

/* ---- GatherNDGrad --------------------------------------------------------------------------------------------- */

/* A task owns some columns of all slices of one batch. */
typedef struct nd_task {
  const egi_tensor *indices, *gradient, *output;
  egi_tuples tuples;
  int64_t column_tasks, columns;
} nd_task;

eg_status egi_cpu_prepare_gather_nd_grad(egi_kernel_plan *plan) {
  grad_params *p;
  EG_TRY(prepare(plan, &p));
  p->axis = (int)egi_node_int(egi_plan_node(plan), "batch_dims", 0);
  egi_tuples tuples;
  eg_dtype dtype = plan->outputs[0].dtype;
  if (!egi_tuples_init(&tuples, &plan->outputs[0], &plan->inputs[1], p->axis)) {
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "indices do not fit data with %d batch dims",
                         p->axis);
  }
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64 ? EG_OK : egi_fail_types(plan);
}

static void sum_tuples(void *argument, size_t index, size_t worker) {
  (void)worker;
  const nd_task *t = argument;
  int64_t batch = (int64_t)index / t->column_tasks;
  int64_t start = (int64_t)index % t->column_tasks * t->columns;
  int64_t end = minimum(start + t->columns, t->tuples.slice);
  for (int64_t k = 0; k < t->tuples.per_batch; k++) {
    int64_t row = batch * t->tuples.per_batch + k;
    int64_t to = egi_tuples_offset(&t->tuples, t->indices, row), from = row * t->tuples.slice;
    for (int64_t column = start; column < end; column++) {
      add_element(t->output, to + column, t->gradient, from + column);
    }
  }
}

eg_status egi_cpu_run_gather_nd_grad(eg_context *ctx, const egi_kernel_call *call) {
  static const char zero[16];
  const grad_params *p = call->params;
  const egi_tensor *output = &call->outputs[0];
  nd_task task = {.indices = &call->inputs[1], .gradient = &call->inputs[2], .output = output, .columns = COLUMNS};
  if (!egi_tuples_init(&task.tuples, output, task.indices, p->axis)) return EG_ERROR_INTERNAL;
  EG_TRY(egi_tuples_check(ctx, "GatherNDGrad", &task.tuples, task.indices));
  egi_fill(call->pool, output, zero);
  task.column_tasks = (task.tuples.slice + COLUMNS - 1) / COLUMNS;
  int64_t n_tasks = task.tuples.n_batches * task.column_tasks;
  if (n_tasks > 0 && task.tuples.per_batch > 0) egi_pool_run(call->pool, (size_t)n_tasks, sum_tuples, &task);
  return EG_OK;
}
