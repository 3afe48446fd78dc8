/* CumSum and CumProd: running sums and products along an axis, floats in f64, integers modulo 2^64; a task is a number
 * of whole lines. */
#include "backend/cpu/elementwise.h"

typedef struct cumsum_params {
  const egi_isa *isa;
  bool is_exclusive, is_reverse, is_real, is_product;
  egi_inner load, store;
} cumsum_params;

typedef struct cumsum_task {
  const cumsum_params *params;
  egi_tensor input, output; /* the axis moved to the end */
  int64_t n_lines, lines_per_task;
} cumsum_task;

typedef union number {
  double real;
  uint64_t natural;
} number;

eg_status egi_cpu_prepare_cumsum(egi_kernel_plan *plan) {
  cumsum_params *p = EGI_NEW(plan->arena, cumsum_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  const egi_node *node = egi_plan_node(plan);
  eg_dtype dtype = plan->inputs[0].dtype;
  p->isa = egi_cpu_isa();
  p->is_exclusive = egi_node_int(node, "exclusive", 0) != 0;
  p->is_reverse = egi_node_int(node, "reverse", 0) != 0;
  p->is_real = egi_dtype_is_float(dtype);
  p->is_product = node->op == EGI_OP_CumProd;
  p->load = egi_cast_inner(p->is_real ? EG_DTYPE_F64 : EG_DTYPE_U64, dtype);
  p->store = egi_cast_inner(dtype, p->is_real ? EG_DTYPE_F64 : EG_DTYPE_U64);
  plan->params = p;
  bool is_number = dtype != EG_DTYPE_BOOL && p->load != NULL && p->store != NULL;
  return is_number && plan->outputs[0].dtype == dtype ? EG_OK : egi_fail_types(plan);
}

static void add(const cumsum_params *p, number *sum, const number *value) {
  if (p->is_product && p->is_real) {
    sum->real *= value->real;
  } else if (p->is_product) {
    sum->natural *= value->natural;
  } else if (p->is_real) {
    sum->real += value->real;
  } else {
    sum->natural += value->natural;
  }
}

/* The sum or product of nothing. */
static number start_of(const cumsum_params *p) {
  number start = {0};
  if (p->is_product && p->is_real) {
    start.real = 1.0;
  } else if (p->is_product) {
    start.natural = 1;
  }
  return start;
}

static void run_line(const cumsum_task *t, int64_t line) {
  const cumsum_params *p = t->params;
  int last = t->input.rank - 1;
  int64_t n = t->input.dims[last];
  int64_t bytes = (int64_t)egi_element_bytes(t->input.dtype);
  int64_t strides[2] = {t->output.strides[last] * bytes, t->input.strides[last] * bytes};
  char *out = (char *)t->output.data + egi_row_offset(&t->output, last, line) * bytes;
  char *in = (char *)t->input.data + egi_row_offset(&t->input, last, line) * bytes;
  number block[EGI_BLOCK], sum = start_of(p);
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    char *const loaded[2] = {(char *)block, in + i * strides[1]};
    const int64_t load_strides[2] = {sizeof(number), strides[1]};
    p->load(p->isa, loaded, load_strides, m);
    for (int64_t k = 0; k < m; k++) {
      number before = sum;
      add(p, &sum, &block[k]);
      block[k] = p->is_exclusive ? before : sum;
    }
    char *const stored[2] = {out + i * strides[0], (char *)block};
    const int64_t store_strides[2] = {strides[0], sizeof(number)};
    p->store(p->isa, stored, store_strides, m);
  }
}

static void run_lines(void *argument, size_t index, size_t worker) {
  (void)worker;
  const cumsum_task *t = argument;
  int64_t start = (int64_t)index * t->lines_per_task;
  int64_t end = t->n_lines - start < t->lines_per_task ? t->n_lines : start + t->lines_per_task;
  for (int64_t line = start; line < end; line++) run_line(t, line);
}

/* Moves `axis` to the end; a reversed sum runs through it from its last element. */
static egi_tensor arrange(const egi_tensor *tensor, int axis, bool is_reverse) {
  egi_tensor moved = *tensor;
  int to = 0;
  for (int i = 0; i < tensor->rank; i++) {
    if (i == axis) continue;
    moved.dims[to] = tensor->dims[i];
    moved.strides[to++] = tensor->strides[i];
  }
  moved.dims[to] = tensor->dims[axis];
  moved.strides[to] = is_reverse ? -tensor->strides[axis] : tensor->strides[axis];
  int64_t step = is_reverse ? (tensor->dims[axis] - 1) * tensor->strides[axis] : 0;
  moved.data = (char *)tensor->data + step * (int64_t)egi_element_bytes(tensor->dtype);
  return moved;
}

eg_status egi_cpu_run_cumsum(eg_context *ctx, const egi_kernel_call *call) {
  const cumsum_params *p = call->params;
  const egi_tensor *input = &call->inputs[0];
  int64_t axis;
  uint32_t count = 0;
  int position;
  if (!egi_tensor_integers(&call->inputs[1], &axis, 1, &count) || count != 1 ||
      !egi_normalise_axis(axis, input->rank, &position)) {
    return egi_fail(ctx, EG_ERROR_DATA, "running sum: the axis must be one integer in range of rank %d", input->rank);
  }
  if (egi_tensor_count(input) == 0) return EG_OK;
  cumsum_task task = {.params = p,
                      .input = arrange(input, position, p->is_reverse),
                      .output = arrange(&call->outputs[0], position, p->is_reverse)};
  task.n_lines = egi_dims_product(&task.input, 0, input->rank - 1);
  task.lines_per_task = egi_rows_per_task(input->dims[position]);
  egi_pool_run(call->pool, (size_t)((task.n_lines + task.lines_per_task - 1) / task.lines_per_task), run_lines, &task);
  return EG_OK;
}
