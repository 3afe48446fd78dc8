/* Gather, GatherElements and GatherND. Gather converts f16 or bf16 data where the graph says f32. Indices are checked
 * before anything is written; tasks are rows of the output. */
#include "backend/cpu/index.h"

static int64_t minimum(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static void run_rows(egi_pool *pool, int64_t n_rows, int64_t rows_per_task, egi_task task, void *argument) {
  if (n_rows > 0) egi_pool_run(pool, (size_t)((n_rows + rows_per_task - 1) / rows_per_task), task, argument);
}

typedef struct gather_params {
  const egi_isa *isa;
  int axis;       /* GatherND: number of batch dims */
  egi_inner move; /* copy, or conversion to f32 */
} gather_params;

/* Types and axis of the three; `axis` is set by the caller for GatherND. */
static eg_status prepare(egi_kernel_plan *plan, bool is_narrow_allowed, gather_params **out_params) {
  gather_params *p = EGI_NEW(plan->arena, gather_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  *out_params = p;
  p->isa = egi_cpu_isa();
  eg_dtype dtype = plan->inputs[0].dtype, wanted = plan->outputs[0].dtype;
  bool is_narrow = is_narrow_allowed && wanted == EG_DTYPE_F32 && (dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16);
  p->move = is_narrow ? egi_cast_inner(wanted, dtype) : egi_copy_inner(egi_element_bytes(dtype));
  eg_dtype index = plan->inputs[1].dtype;
  bool is_fit = p->move != NULL && (dtype == wanted || is_narrow) && egi_is_index_type(index);
  return is_fit ? EG_OK : egi_fail_types(plan);
}

static eg_status read_axis(const egi_kernel_plan *plan, int *out_axis) {
  int64_t axis = egi_node_int(egi_plan_node(plan), "axis", 0);
  if (egi_normalise_axis(axis, plan->inputs[0].rank, out_axis)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis %lld of data of rank %d", (long long)axis,
                       plan->inputs[0].rank);
}

/* ---- Gather --------------------------------------------------------------------------------------------------- */

typedef struct gather_task {
  const gather_params *params;
  const egi_tensor *data, *indices;
  egi_strided slice; /* what one index names: operands output, data */
  int64_t out_bytes; /* of one slice in the output */
  int64_t n_indices, n_rows, rows_per_task;
} gather_task;

eg_status egi_cpu_prepare_gather(egi_kernel_plan *plan) {
  gather_params *p;
  EG_TRY(prepare(plan, true, &p));
  return read_axis(plan, &p->axis);
}

static void gather_rows(void *argument, size_t index, size_t worker) {
  (void)worker;
  const gather_task *t = argument;
  int axis = t->params->axis;
  int64_t in_bytes = (int64_t)egi_element_bytes(t->data->dtype);
  int64_t start = (int64_t)index * t->rows_per_task;
  int64_t end = minimum(start + t->rows_per_task, t->n_rows);
  egi_strided slice = t->slice;
  for (int64_t row = start; row < end; row++) {
    int64_t position = egi_index_at(t->indices, row % t->n_indices);
    if (position < 0) position += t->data->dims[axis];
    int64_t offset = egi_row_offset(t->data, axis, row / t->n_indices) + position * t->data->strides[axis];
    slice.data[0] = t->slice.data[0] + row * t->out_bytes;
    slice.data[1] = t->slice.data[1] + offset * in_bytes;
    egi_strided_range(&slice, 0, slice.count, t->params->move, t->params->isa);
  }
}

eg_status egi_cpu_run_gather(eg_context *ctx, const egi_kernel_call *call) {
  const gather_params *p = call->params;
  const egi_tensor *data = &call->inputs[0], *output = &call->outputs[0];
  EG_TRY(egi_check_indices(ctx, "Gather", &call->inputs[1], data->dims[p->axis]));
  /* The dims behind the axis, as they lie in data and, contiguous, in the output. */
  egi_tensor in_slice = *data, out_slice = *output;
  in_slice.rank = out_slice.rank = data->rank - p->axis - 1;
  for (int i = 0; i < in_slice.rank; i++) {
    in_slice.dims[i] = out_slice.dims[i] = data->dims[p->axis + 1 + i];
    in_slice.strides[i] = data->strides[p->axis + 1 + i];
  }
  egi_tensor_set_contiguous(&out_slice);
  gather_task task = {.params = p, .data = data, .indices = &call->inputs[1]};
  egi_strided_init(&task.slice, &out_slice);
  egi_strided_add(&task.slice, &in_slice);
  egi_strided_collapse(&task.slice);
  task.out_bytes = task.slice.count * (int64_t)egi_element_bytes(output->dtype);
  task.n_indices = egi_tensor_count(&call->inputs[1]);
  task.n_rows = task.slice.count > 0 ? egi_tensor_count(output) / task.slice.count : 0;
  task.rows_per_task = egi_rows_per_task(task.slice.count);
  run_rows(call->pool, task.n_rows, task.rows_per_task, gather_rows, &task);
  return EG_OK;
}

/* ---- GatherElements ------------------------------------------------------------------------------------------- */

typedef struct elements_task {
  const gather_params *params;
  const egi_tensor *data, *indices, *output;
  int64_t n_rows, rows_per_task; /* rows: all dims of indices but the last */
} elements_task;

eg_status egi_cpu_prepare_gather_elements(egi_kernel_plan *plan) {
  gather_params *p;
  EG_TRY(prepare(plan, false, &p));
  EG_TRY(read_axis(plan, &p->axis));
  const egi_tensor *data = &plan->inputs[0], *indices = &plan->inputs[1];
  bool fits = data->rank == indices->rank;
  for (int i = 0; fits && i < data->rank; i++) fits = i == p->axis || indices->dims[i] <= data->dims[i];
  if (fits) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "indices reach beyond data");
}

/* Offset in data of element 0 of a row of indices, the gathered axis left out. */
static int64_t row_base(const egi_tensor *data, const egi_tensor *indices, int axis, int64_t row) {
  int64_t offset = 0;
  for (int i = indices->rank - 2; i >= 0; i--) {
    if (i != axis) offset += row % indices->dims[i] * data->strides[i];
    row /= indices->dims[i];
  }
  return offset;
}

static void gather_element_rows(void *argument, size_t index, size_t worker) {
  (void)worker;
  const elements_task *t = argument;
  int axis = t->params->axis, last = t->data->rank - 1;
  int64_t bytes = (int64_t)egi_element_bytes(t->data->dtype), n = t->indices->dims[last];
  int64_t start = (int64_t)index * t->rows_per_task;
  int64_t end = minimum(start + t->rows_per_task, t->n_rows);
  int64_t step = axis == last ? 0 : t->data->strides[last];
  for (int64_t row = start; row < end; row++) {
    int64_t base = row_base(t->data, t->indices, axis, row);
    for (int64_t k = 0; k < n; k++) {
      int64_t position = egi_index_at(t->indices, row * n + k);
      if (position < 0) position += t->data->dims[axis];
      int64_t offset = base + k * step + position * t->data->strides[axis];
      memcpy((char *)t->output->data + (row * n + k) * bytes, (const char *)t->data->data + offset * bytes,
             (size_t)bytes);
    }
  }
}

eg_status egi_cpu_run_gather_elements(eg_context *ctx, const egi_kernel_call *call) {
  const gather_params *p = call->params;
  const egi_tensor *data = &call->inputs[0], *indices = &call->inputs[1];
  EG_TRY(egi_check_indices(ctx, "GatherElements", indices, data->dims[p->axis]));
  int64_t row_elements = indices->dims[indices->rank - 1];
  elements_task task = {.params = p, .data = data, .indices = indices, .output = &call->outputs[0]};
  task.n_rows = row_elements > 0 ? egi_dims_product(indices, 0, indices->rank - 1) : 0;
  task.rows_per_task = egi_rows_per_task(row_elements);
  run_rows(call->pool, task.n_rows, task.rows_per_task, gather_element_rows, &task);
  return EG_OK;
}

/* ---- GatherND ------------------------------------------------------------------------------------------------- */

typedef struct nd_task {
  const egi_tensor *data, *indices, *output;
  egi_tuples tuples;
  int64_t n_rows, rows_per_task;
} nd_task;

eg_status egi_cpu_prepare_gather_nd(egi_kernel_plan *plan) {
  gather_params *p;
  EG_TRY(prepare(plan, false, &p));
  p->axis = (int)egi_node_int(egi_plan_node(plan), "batch_dims", 0);
  egi_tuples tuples;
  if (egi_tuples_init(&tuples, &plan->inputs[0], &plan->inputs[1], p->axis)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "indices do not fit data with %d batch dims", p->axis);
}

static void gather_tuples(void *argument, size_t index, size_t worker) {
  (void)worker;
  const nd_task *t = argument;
  int64_t bytes = (int64_t)egi_element_bytes(t->data->dtype), slice_bytes = t->tuples.slice * bytes;
  int64_t start = (int64_t)index * t->rows_per_task;
  int64_t end = minimum(start + t->rows_per_task, t->n_rows);
  for (int64_t row = start; row < end; row++) {
    int64_t offset = egi_tuples_offset(&t->tuples, t->indices, row);
    memcpy((char *)t->output->data + row * slice_bytes, (const char *)t->data->data + offset * bytes,
           (size_t)slice_bytes);
  }
}

eg_status egi_cpu_run_gather_nd(eg_context *ctx, const egi_kernel_call *call) {
  const gather_params *p = call->params;
  nd_task task = {.data = &call->inputs[0], .indices = &call->inputs[1], .output = &call->outputs[0]};
  if (!egi_tuples_init(&task.tuples, task.data, task.indices, p->axis)) return EG_ERROR_INTERNAL;
  EG_TRY(egi_tuples_check(ctx, "GatherND", &task.tuples, task.indices));
  task.n_rows = task.tuples.slice > 0 ? task.tuples.n_batches * task.tuples.per_batch : 0;
  task.rows_per_task = egi_rows_per_task(task.tuples.slice);
  run_rows(call->pool, task.n_rows, task.rows_per_task, gather_tuples, &task);
  return EG_OK;
}
