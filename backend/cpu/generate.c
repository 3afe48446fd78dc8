/* Operators that make tensors from attributes, sizes and scalars: Constant, ConstantOfShape, Range, Shape, Size; and
 * Trilu, which keeps a triangle. */
#include "backend/cpu/strided.h"

/* ---- Constant ------------------------------------------------------------------------------------------------- */

typedef struct constant_params {
  const void *bytes;
  size_t size_bytes;
} constant_params;

/* The content as an attribute gives it; nothing else may stand in a Constant. */
static eg_status constant_bytes(egi_kernel_plan *plan, const egi_attribute *attribute, constant_params *p) {
  const egi_module *module = plan->graph->module;
  switch (attribute->kind) {
  case EGI_ATTRIBUTE_TENSOR: {
    const egi_bytes *bytes = &module->weights[attribute->u.weight].bytes;
    if (bytes->kind != EGI_BYTES_MEMORY) break;
    *p = (constant_params){bytes->data, (size_t)bytes->size_bytes};
    return EG_OK;
  }
  case EGI_ATTRIBUTE_FLOAT:
    *p = (constant_params){&attribute->u.f, sizeof(float)};
    return EG_OK;
  case EGI_ATTRIBUTE_INT:
    *p = (constant_params){&attribute->u.i, sizeof(int64_t)};
    return EG_OK;
  case EGI_ATTRIBUTE_FLOATS:
    *p = (constant_params){attribute->u.floats, attribute->count * sizeof(float)};
    return EG_OK;
  case EGI_ATTRIBUTE_INTS:
    *p = (constant_params){attribute->u.ints, attribute->count * sizeof(int64_t)};
    return EG_OK;
  default:
    break;
  }
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "attribute %s has no content in memory",
                       attribute->name);
}

eg_status egi_cpu_prepare_constant(egi_kernel_plan *plan) {
  constant_params *p = EGI_NEW(plan->arena, constant_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const egi_node *node = egi_plan_node(plan);
  if (node->n_attributes != 1) {
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "needs one attribute, has %u", node->n_attributes);
  }
  EG_TRY(constant_bytes(plan, &node->attributes[0], p));
  uint64_t wanted;
  const egi_tensor *output = &plan->outputs[0];
  if (!egi_dtype_bytes(output->dtype, (uint64_t)egi_tensor_count(output), &wanted) || wanted != p->size_bytes) {
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%zu bytes of content do not fill the output",
                         p->size_bytes);
  }
  return EG_OK;
}

eg_status egi_cpu_run_constant(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const constant_params *p = call->params;
  if (p->size_bytes > 0) memcpy(call->outputs[0].data, p->bytes, p->size_bytes);
  return EG_OK;
}

/* ---- ConstantOfShape ------------------------------------------------------------------------------------------ */

typedef struct fill_params {
  char value[16]; /* zero: the default, f32 0 */
} fill_params;

eg_status egi_cpu_prepare_constant_of_shape(egi_kernel_plan *plan) {
  fill_params *p = EGI_NEW(plan->arena, fill_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  eg_dtype dtype = plan->outputs[0].dtype;
  size_t element_bytes = egi_element_bytes(dtype);
  const egi_attribute *attribute = egi_node_attribute(egi_plan_node(plan), "value");
  if (element_bytes == 0) return egi_fail_types(plan);
  if (attribute == NULL) return dtype == EG_DTYPE_F32 ? EG_OK : egi_fail_types(plan);
  if (attribute->kind != EGI_ATTRIBUTE_TENSOR) return egi_fail_types(plan);
  const egi_weight *weight = &plan->graph->module->weights[attribute->u.weight];
  if (weight->dtype != dtype || weight->bytes.kind != EGI_BYTES_MEMORY || weight->bytes.size_bytes != element_bytes) {
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the value must be one element of type %s",
                         egi_dtype_name(dtype));
  }
  memcpy(p->value, weight->bytes.data, element_bytes);
  return EG_OK;
}

eg_status egi_cpu_run_constant_of_shape(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const fill_params *p = call->params;
  egi_fill(call->pool, &call->outputs[0], p->value);
  return EG_OK;
}

/* ---- Range ---------------------------------------------------------------------------------------------------- */

typedef struct range_params {
  const egi_isa *isa;
  eg_dtype inside; /* f64 or i64 */
  egi_inner load, store;
} range_params;

eg_status egi_cpu_prepare_range(egi_kernel_plan *plan) {
  range_params *p = EGI_NEW(plan->arena, range_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  eg_dtype dtype = plan->outputs[0].dtype;
  for (unsigned i = 0; i < 3; i++) {
    if (plan->inputs[i].dtype != dtype || egi_tensor_count(&plan->inputs[i]) != 1) return egi_fail_types(plan);
  }
  p->isa = egi_cpu_isa();
  p->inside = egi_dtype_is_float(dtype) ? EG_DTYPE_F64 : EG_DTYPE_I64;
  p->load = egi_cast_inner(p->inside, dtype);
  p->store = egi_cast_inner(dtype, p->inside);
  return p->load == NULL || p->store == NULL || dtype == EG_DTYPE_BOOL ? egi_fail_types(plan) : EG_OK;
}

static void load_scalar(const range_params *p, const egi_tensor *tensor, void *out) {
  char *const data[2] = {out, tensor->data};
  const int64_t strides[2] = {8, 0};
  p->load(p->isa, data, strides, 1);
}

/* Numbers from start on, limit left out; 0 for a step of 0. */
static uint64_t count_steps(int64_t start, int64_t limit, int64_t delta) {
  if (delta == 0 || (delta > 0 ? limit <= start : limit >= start)) return 0;
  uint64_t span = delta > 0 ? (uint64_t)limit - (uint64_t)start : (uint64_t)start - (uint64_t)limit;
  uint64_t step = delta > 0 ? (uint64_t)delta : 0 - (uint64_t)delta;
  return span / step + (span % step > 0);
}

/* start + i * delta, in f64 or i64 (modulo 2^64), rounded once. */
eg_status egi_cpu_run_range(eg_context *ctx, const egi_kernel_call *call) {
  const range_params *p = call->params;
  union number {
    double real;
    int64_t integer;
    uint64_t wrapped;
  } start, limit, delta, value;
  load_scalar(p, &call->inputs[0], &start);
  load_scalar(p, &call->inputs[1], &limit);
  load_scalar(p, &call->inputs[2], &delta);
  int64_t count = egi_tensor_count(&call->outputs[0]);
  if (p->inside == EG_DTYPE_I64 && count_steps(start.integer, limit.integer, delta.integer) != (uint64_t)count)
    return egi_fail(ctx, EG_ERROR_DATA, "its length is not the %lld that the shapes around it need", (long long)count);
  int64_t element_bytes = (int64_t)egi_element_bytes(call->outputs[0].dtype);
  for (int64_t i = 0; i < count; i++) {
    if (p->inside == EG_DTYPE_F64) {
      value.real = start.real + (double)i * delta.real;
    } else {
      value.wrapped = start.wrapped + (uint64_t)i * delta.wrapped;
    }
    char *const data[2] = {(char *)call->outputs[0].data + i * element_bytes, (char *)&value};
    const int64_t strides[2] = {element_bytes, 8};
    p->store(p->isa, data, strides, 1);
  }
  return EG_OK;
}

/* ---- Shape, Size ---------------------------------------------------------------------------------------------- */

typedef struct shape_params {
  int start;
} shape_params;

eg_status egi_cpu_prepare_shape(egi_kernel_plan *plan) {
  shape_params *p = EGI_NEW(plan->arena, shape_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  int64_t rank = plan->inputs[0].rank;
  int64_t start = egi_node_int(egi_plan_node(plan), "start", 0);
  if (start < 0) start = start < -rank ? 0 : start + rank;
  p->start = (int)(start > rank ? rank : start);
  return plan->outputs[0].dtype == EG_DTYPE_I64 ? EG_OK : egi_fail_types(plan);
}

/* The planned size of the output says where the range of dims ends. */
eg_status egi_cpu_run_shape(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const shape_params *p = call->params;
  int64_t count = egi_tensor_count(&call->outputs[0]);
  const int64_t *dims = call->inputs[0].dims + p->start;
  if (count > 0) memcpy(call->outputs[0].data, dims, (size_t)count * sizeof(int64_t));
  return EG_OK;
}

eg_status egi_cpu_run_size(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  int64_t count = egi_tensor_count(&call->inputs[0]);
  memcpy(call->outputs[0].data, &count, sizeof count);
  return EG_OK;
}

/* ---- Trilu ---------------------------------------------------------------------------------------------------- */

typedef struct trilu_params {
  bool is_upper;
  egi_inner copy;
} trilu_params;

eg_status egi_cpu_prepare_trilu(egi_kernel_plan *plan) {
  trilu_params *p = EGI_NEW(plan->arena, trilu_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  eg_dtype dtype = plan->inputs[0].dtype;
  p->is_upper = egi_node_int(egi_plan_node(plan), "upper", 1) != 0;
  p->copy = egi_copy_inner(egi_element_bytes(dtype));
  if (p->copy == NULL || plan->outputs[0].dtype != dtype || plan->inputs[0].rank < 2) return egi_fail_types(plan);
  return EG_OK;
}

typedef struct trilu_task {
  const trilu_params *params;
  const egi_tensor *input, *output;
  int64_t diagonal, n_rows, rows_per_task;
} trilu_task;

/* Row i keeps columns [i + k, n) or [0, i + k]. */
static void trilu_row(const trilu_task *t, int64_t row) {
  char zero[16] = {0};
  const egi_tensor *in = t->input, *out = t->output;
  int last = in->rank - 1;
  int64_t n = in->dims[last], i = row % in->dims[last - 1];
  int64_t bytes = (int64_t)egi_element_bytes(in->dtype);
  int64_t edge = t->params->is_upper ? i + t->diagonal : i + t->diagonal + 1;
  edge = edge < 0 ? 0 : edge > n ? n : edge;
  int64_t kept = t->params->is_upper ? edge : 0, cut = t->params->is_upper ? 0 : edge;
  int64_t n_kept = t->params->is_upper ? n - edge : edge;
  int64_t out_stride = out->strides[last] * bytes, in_stride = in->strides[last] * bytes;
  char *out_row = (char *)out->data + egi_row_offset(out, last, row) * bytes;
  char *in_row = (char *)in->data + egi_row_offset(in, last, row) * bytes;
  char *const copied[2] = {out_row + kept * out_stride, in_row + kept * in_stride};
  const int64_t copied_strides[2] = {out_stride, in_stride};
  t->params->copy(NULL, copied, copied_strides, n_kept);
  char *const cleared[2] = {out_row + cut * out_stride, zero};
  const int64_t cleared_strides[2] = {out_stride, 0};
  t->params->copy(NULL, cleared, cleared_strides, n - n_kept);
}

static void run_trilu_rows(void *argument, size_t index, size_t worker) {
  (void)worker;
  const trilu_task *t = argument;
  int64_t start = (int64_t)index * t->rows_per_task;
  int64_t end = start + t->rows_per_task < t->n_rows ? start + t->rows_per_task : t->n_rows;
  for (int64_t row = start; row < end; row++) trilu_row(t, row);
}

eg_status egi_cpu_run_trilu(eg_context *ctx, const egi_kernel_call *call) {
  const egi_tensor *input = &call->inputs[0];
  trilu_task task = {.params = call->params, .input = input, .output = &call->outputs[0]};
  uint32_t count = 0;
  if (egi_call_has_input(call, 1) &&
      (!egi_tensor_integers(&call->inputs[1], &task.diagonal, 1, &count) || count != 1)) {
    return egi_fail(ctx, EG_ERROR_DATA, "Trilu: k must be one integer");
  }
  int last = input->rank - 1;
  if (egi_tensor_count(input) == 0) return EG_OK;
  /* Beyond the matrix all diagonals are alike; clamping keeps row + k from overflowing. */
  int64_t limit = input->dims[last] + input->dims[last - 1];
  task.diagonal = task.diagonal < -limit ? -limit : task.diagonal > limit ? limit : task.diagonal;
  task.n_rows = egi_dims_product(input, 0, last);
  task.rows_per_task = egi_rows_per_task(input->dims[last]);
  egi_pool_run(call->pool, (size_t)((task.n_rows + task.rows_per_task - 1) / task.rows_per_task), run_trilu_rows,
               &task);
  return EG_OK;
}
