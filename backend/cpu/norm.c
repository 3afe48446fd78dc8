/* LayerNormalization, RMSNormalization and their gradients over rows (the dims from `axis` on). A row belongs to one
 * task. Gradients of scale and bias are summed in the row's type over fixed chunks of rows, the chunks then in order
 * in f64: results do not depend on the number of threads. */
#include "backend/cpu/strided.h"

#define MAX_CHUNKS 64

enum { BUFFERS = 3 }; /* of a worker: x, dy, output */

typedef struct norm_params {
  const egi_row_functions *functions;
  eg_dtype dtype;
  bool is_rms, is_gradient;
  double epsilon;
  egi_rows x, dy, out, mean, deviation;
  int scale, bias; /* inputs; -1: none */
  int64_t rows_per_chunk, n_chunks;
  size_t row_bytes;
  /* parts of the workspace */
  size_t scale_at, bias_at, buffers_at, partials_at;
} norm_params;

typedef struct norm_run {
  const norm_params *params;
  const egi_kernel_call *call;
  const void *scale, *bias; /* [length], contiguous */
} norm_run;

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

/* Scale or bias as a tensor over the row's dims alone; false when it varies from row to row. */
static bool row_operand(const egi_tensor *tensor, int inner_rank, egi_tensor *out) {
  *out = *tensor;
  int extra = tensor->rank - inner_rank;
  for (int i = 0; i < extra; i++)
    if (tensor->dims[i] != 1) return false;
  if (extra <= 0) return true;
  out->rank = inner_rank;
  for (int i = 0; i < inner_rank; i++) {
    out->dims[i] = tensor->dims[i + extra];
    out->strides[i] = tensor->strides[i + extra];
  }
  return true;
}

static bool fits_row(const egi_tensor *tensor, const egi_rows *rows) {
  egi_tensor operand;
  if (!row_operand(tensor, rows->inner_rank, &operand)) return false;
  for (int i = 0; i < operand.rank; i++) {
    int64_t own = operand.dims[operand.rank - 1 - i];
    if (own != 1 && own != rows->inner_dims[rows->inner_rank - 1 - i]) return false;
  }
  return true;
}

static size_t round_up(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

static void place_workspace(egi_kernel_plan *plan, norm_params *p) {
  size_t n_sums = 0, workers = egi_pool_size(egi_context_pool(plan->ctx));
  for (unsigned i = 1; i < plan->n_outputs && p->is_gradient; i++) n_sums = i;
  p->row_bytes = round_up((size_t)p->x.length * p->x.element_bytes);
  p->bias_at = p->scale_at + p->row_bytes;
  p->buffers_at = p->bias_at + p->row_bytes;
  p->partials_at = p->buffers_at + BUFFERS * workers * p->row_bytes;
  plan->workspace_bytes = p->partials_at + n_sums * (size_t)p->n_chunks * p->row_bytes;
}

static eg_status fail_shape(const egi_kernel_plan *plan, const char *what) {
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%s does not fit the normalised dims", what);
}

static eg_status check_operands(const egi_kernel_plan *plan, const norm_params *p) {
  const egi_tensor *x = &plan->inputs[0], *scale = &plan->inputs[p->scale];
  eg_dtype out = plan->outputs[0].dtype;
  bool is_left_out = p->is_gradient && out == EG_DTYPE_UNDEFINED;
  if (scale->dtype != x->dtype || (out != x->dtype && !is_left_out)) return egi_fail_types(plan);
  if (!fits_row(scale, &p->x)) return fail_shape(plan, "scale");
  if (p->bias < 0) return EG_OK;
  if (plan->inputs[p->bias].dtype != x->dtype) return egi_fail_types(plan);
  return fits_row(&plan->inputs[p->bias], &p->x) ? EG_OK : fail_shape(plan, "bias");
}

/* Where the tensor is there: its rows, as many as X has. */
static bool set_rows(egi_rows *rows, const egi_tensor *tensor, int axis, const egi_rows *x) {
  if (tensor->dtype == EG_DTYPE_UNDEFINED) return true;
  if (tensor->rank != x->rank + x->inner_rank) return false;
  egi_rows_init(rows, tensor, axis);
  return rows->count == x->count && (rows->length == x->length || rows->length == 1);
}

static bool is_real(const egi_tensor *tensor) {
  return tensor->dtype == EG_DTYPE_F32 || tensor->dtype == EG_DTYPE_F64 || tensor->dtype == EG_DTYPE_UNDEFINED;
}

static eg_status prepare(egi_kernel_plan *plan, norm_params setup) {
  norm_params *p = EGI_NEW(plan->arena, norm_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  *p = setup;
  const egi_node *node = egi_plan_node(plan);
  const egi_tensor *x = &plan->inputs[0];
  int axis;
  p->dtype = x->dtype;
  p->functions = egi_row_functions_of(x->dtype);
  p->epsilon = (double)egi_node_float(node, "epsilon", 1e-5f);
  if (!p->functions) return egi_fail_types(plan);
  if (!egi_normalise_axis(egi_node_int(node, "axis", -1), x->rank, &axis))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis is outside the rank %d", x->rank);
  egi_rows_init(&p->x, x, axis);
  EG_TRY(check_operands(plan, p));
  bool fits = set_rows(&p->out, &plan->outputs[0], axis, &p->x);
  if (p->is_gradient) {
    unsigned dy = p->is_rms ? 2 : 4;
    if (plan->inputs[dy].dtype != x->dtype) return egi_fail_types(plan);
    fits = fits && set_rows(&p->dy, &plan->inputs[dy], axis, &p->x);
  }
  if (!p->is_rms) {
    const egi_tensor *statistics = p->is_gradient ? &plan->inputs[2] : &plan->outputs[1];
    unsigned n = p->is_gradient ? 2 : plan->n_outputs - 1;
    if ((n > 0 && !is_real(&statistics[0])) || (n > 1 && !is_real(&statistics[1]))) return egi_fail_types(plan);
    fits = fits && (n < 1 || set_rows(&p->mean, &statistics[0], axis, &p->x));
    fits = fits && (n < 2 || set_rows(&p->deviation, &statistics[1], axis, &p->x));
  }
  if (!fits) return fail_shape(plan, "an operand");
  int64_t fewest = (p->x.count + MAX_CHUNKS - 1) / MAX_CHUNKS;
  p->rows_per_chunk = egi_rows_per_task(p->x.length);
  if (p->is_gradient && p->rows_per_chunk < fewest) p->rows_per_chunk = fewest;
  p->n_chunks = (p->x.count + p->rows_per_chunk - 1) / p->rows_per_chunk;
  place_workspace(plan, p);
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_layer_norm(egi_kernel_plan *plan) {
  return prepare(plan, (norm_params){.scale = 1, .bias = egi_plan_has_input(plan, 2) ? 2 : -1});
}

eg_status egi_cpu_prepare_rms_norm(egi_kernel_plan *plan) {
  return prepare(plan, (norm_params){.is_rms = true, .scale = 1, .bias = -1});
}

eg_status egi_cpu_prepare_layer_norm_grad(egi_kernel_plan *plan) {
  return prepare(plan, (norm_params){.is_gradient = true, .scale = 1, .bias = -1});
}

eg_status egi_cpu_prepare_rms_norm_grad(egi_kernel_plan *plan) {
  return prepare(plan, (norm_params){.is_rms = true, .is_gradient = true, .scale = 1, .bias = -1});
}

/* ---- run -------------------------------------------------------------------------------------------------------- */

static bool has_output(const egi_kernel_call *call, unsigned output) {
  return output < call->n_outputs && call->outputs[output].dtype != EG_DTYPE_UNDEFINED;
}

/* Scale or bias as one contiguous row, broadcast to `room` where it is not one. */
static const void *load_operand(const norm_run *run, int input, size_t room_at) {
  if (input < 0) return NULL;
  const norm_params *p = run->params;
  egi_tensor operand, row = {.data = (char *)run->call->workspace + room_at, .dtype = p->dtype};
  row_operand(&run->call->inputs[input], p->x.inner_rank, &operand);
  if (egi_tensor_is_contiguous(&operand) && egi_tensor_count(&operand) == p->x.length) return operand.data;
  row.rank = p->x.inner_rank;
  for (int i = 0; i < row.rank; i++) row.dims[i] = p->x.inner_dims[i];
  egi_tensor_set_contiguous(&row);
  egi_copy(NULL, &row, &operand);
  return row.data;
}

static void forward_row(const norm_run *run, int64_t row, char *buffers) {
  const norm_params *p = run->params;
  const egi_tensor *outputs = run->call->outputs;
  const void *x = egi_rows_load(&p->x, &run->call->inputs[0], row, buffers);
  void *out = egi_rows_target(&p->out, &outputs[0], row, buffers + 2 * p->row_bytes);
  if (p->is_rms) {
    p->functions->rms_norm(out, x, run->scale, p->x.length, p->epsilon);
  } else {
    double statistics[2] = {0, p->epsilon};
    p->functions->layer_norm(out, x, run->scale, run->bias, p->x.length, statistics);
    if (has_output(run->call, 1))
      egi_real_set(egi_rows_at(&p->mean, outputs[1].data, row), outputs[1].dtype, statistics[0]);
    if (has_output(run->call, 2))
      egi_real_set(egi_rows_at(&p->deviation, outputs[2].data, row), outputs[2].dtype, statistics[1]);
  }
  egi_rows_store(&p->out, &outputs[0], row, out);
}

static void backward_row(const norm_run *run, int64_t row, char *buffers, void *const sums[2]) {
  const norm_params *p = run->params;
  const egi_kernel_call *call = run->call;
  const egi_tensor *inputs = call->inputs, *dy = &inputs[p->is_rms ? 2 : 4];
  const void *in[3] = {egi_rows_load(&p->x, &inputs[0], row, buffers), run->scale,
                       egi_rows_load(&p->dy, dy, row, buffers + p->row_bytes)};
  void *dx = NULL;
  if (has_output(call, 0)) dx = egi_rows_target(&p->out, &call->outputs[0], row, buffers + 2 * p->row_bytes);
  if (p->is_rms) {
    p->functions->rms_norm_grad(dx, in, p->x.length, p->epsilon, sums[0]);
  } else {
    double statistics[2] = {egi_real_get(egi_rows_at(&p->mean, inputs[2].data, row), inputs[2].dtype),
                            egi_real_get(egi_rows_at(&p->deviation, inputs[3].data, row), inputs[3].dtype)};
    p->functions->layer_norm_grad(dx, in, p->x.length, statistics, sums);
  }
  if (dx) egi_rows_store(&p->out, &call->outputs[0], row, dx);
}

/* Sums of chunk `chunk` for output 1 or 2. */
static char *partial_at(const norm_run *run, unsigned output, int64_t chunk) {
  const norm_params *p = run->params;
  size_t index = (size_t)((int64_t)(output - 1) * p->n_chunks + chunk);
  return (char *)run->call->workspace + p->partials_at + index * p->row_bytes;
}

static void run_chunk(void *argument, size_t index, size_t worker) {
  const norm_run *run = argument;
  const norm_params *p = run->params;
  char *buffers = (char *)run->call->workspace + p->buffers_at + worker * BUFFERS * p->row_bytes;
  int64_t row = (int64_t)index * p->rows_per_chunk, end = row + p->rows_per_chunk;
  if (end > p->x.count) end = p->x.count;
  void *sums[2] = {NULL, NULL};
  for (unsigned i = 0; i < 2 && p->is_gradient; i++) {
    if (!has_output(run->call, i + 1)) continue;
    sums[i] = partial_at(run, i + 1, (int64_t)index);
    memset(sums[i], 0, p->row_bytes);
  }
  for (; row < end; row++) {
    if (p->is_gradient)
      backward_row(run, row, buffers, sums);
    else
      forward_row(run, row, buffers);
  }
}

/* Adds up the chunks for one output and puts each column where the scale's element is; several columns may share one.
 */
static void combine(const norm_run *run, unsigned output) {
  const norm_params *p = run->params;
  const egi_tensor *out = &run->call->outputs[output];
  egi_tensor operand;
  row_operand(out, p->x.inner_rank, &operand);
  double zero = 0;
  egi_fill(NULL, out, &zero);
  int64_t index[EGI_MAX_RANK] = {0};
  for (int64_t i = 0; i < p->x.length; i++) {
    double sum = 0;
    for (int64_t c = 0; c < p->n_chunks; c++)
      sum += egi_real_get(partial_at(run, output, c) + (size_t)i * p->x.element_bytes, p->dtype);
    int64_t offset = 0;
    for (int d = 0; d < operand.rank; d++)
      if (operand.dims[d] != 1) offset += index[d + p->x.inner_rank - operand.rank] * operand.strides[d];
    void *at = (char *)out->data + offset * (int64_t)p->x.element_bytes;
    egi_real_set(at, p->dtype, egi_real_get(at, p->dtype) + sum);
    for (int d = p->x.inner_rank - 1; d >= 0 && ++index[d] == p->x.inner_dims[d]; d--) index[d] = 0;
  }
}

eg_status egi_cpu_run_norm(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const norm_params *p = call->params;
  norm_run run = {p, call, NULL, NULL};
  run.scale = load_operand(&run, p->scale, p->scale_at);
  run.bias = load_operand(&run, p->bias, p->bias_at);
  egi_pool_run(call->pool, (size_t)p->n_chunks, run_chunk, &run);
  for (unsigned i = 1; i < call->n_outputs && p->is_gradient; i++)
    if (has_output(call, i)) combine(&run, i);
  return EG_OK;
}
