/* ReduceSum, ReduceMean, ReduceMax, ReduceMin, ReduceProd, ReduceLogSumExp and SumTo. Floats are accumulated in f64,
 * integers in 64 bits modulo 2^64. The reduced elements are cut into blocks by size alone and partial results joined in
 * the order of the blocks, so that results do not depend on the number of threads. */
#include <math.h>

#include "backend/cpu/elementwise.h"

/* Output elements of a task, and input elements of a block. */
#define CHUNK 512
#define BLOCK_ELEMENTS 32768
/* Partial results: more outputs than this are parallel enough without blocks. */
#define SPLIT_OUTPUTS 8192
#define MAX_PARTIALS 65536

typedef union number {
  double real;
  int64_t integer;
  uint64_t natural;
} number;

typedef enum reduce_method {
  METHOD_SUM,
  METHOD_MEAN,
  METHOD_MAX,
  METHOD_MIN,
  METHOD_PRODUCT,
  METHOD_LOG_SUM_EXP
} reduce_method;

typedef struct reduce_params {
  const egi_isa *isa;
  reduce_method method;
  eg_dtype inside; /* of the accumulator: f64, i64 or u64 */
  egi_inner load, store;
  bool is_sum_to;
  bool is_noop_without_axes;
} reduce_params;

typedef struct reduction {
  const reduce_params *params;
  const egi_tensor *output;
  egi_strided kept, reduced; /* one operand each: the input; dims that stay and dims that go */
  int64_t n_outputs, n_reduced;
  bool is_columns; /* kept elements lie side by side: rows are added to rows */
  bool is_f32;     /* the loops of isa/ apply */
  int64_t chunk, n_chunks, block, n_blocks;
  number start;
  number *partial; /* [n_blocks][n_outputs] */
} reduction;

/* ---- accumulation --------------------------------------------------------------------------------------------- */

/* NaN wins over numbers. */
static bool replaces(const reduce_params *p, const number *a, const number *b) {
  bool is_max = p->method == METHOD_MAX;
  if (p->inside == EG_DTYPE_F64) return (is_max ? b->real > a->real : b->real < a->real) || b->real != b->real;
  if (p->inside == EG_DTYPE_I64) return is_max ? b->integer > a->integer : b->integer < a->integer;
  return is_max ? b->natural > a->natural : b->natural < a->natural;
}

/* log(exp a + exp b) without overflow; a sum of nothing is -inf. */
static double log_add(double a, double b) {
  double high = a > b || a != a ? a : b, low = a > b || a != a ? b : a;
  return isinf(high) ? high : high + log1p(exp(low - high));
}

static void join(const reduce_params *p, number *a, const number *b) {
  bool is_real = p->inside == EG_DTYPE_F64;
  switch (p->method) {
  case METHOD_SUM:
  case METHOD_MEAN:
    if (is_real) {
      a->real += b->real;
    } else {
      a->natural += b->natural;
    }
    break;
  case METHOD_PRODUCT:
    if (is_real) {
      a->real *= b->real;
    } else {
      a->natural *= b->natural;
    }
    break;
  case METHOD_LOG_SUM_EXP:
    a->real = log_add(a->real, b->real);
    break;
  case METHOD_MAX:
  case METHOD_MIN:
    if (replaces(p, a, b)) *a = *b;
    break;
  }
}

static bool is_sum(const reduce_params *p) {
  return p->method == METHOD_SUM || p->method == METHOD_MEAN;
}

/* What one call of the loops below adds to. */
typedef struct accumulation {
  const reduction *reduction;
  number *results; /* [n] for columns, else one */
  int64_t n;
} accumulation;

static bool has_unit_stride(const reduction *r, int64_t stride) {
  return r->is_f32 && stride == (int64_t)sizeof(float);
}

/* A run of reduced elements joins one result. */
static void accumulate_row(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const accumulation *a = params;
  const reduce_params *p = a->reduction->params;
  number value;
  if ((is_sum(p) || p->method == METHOD_MAX) && has_unit_stride(a->reduction, strides[0])) {
    const float *in = (const float *)(const void *)data[0];
    value.real = p->method == METHOD_MAX ? (double)p->isa->elementwise->max(in, n) : p->isa->elementwise->sum(in, n);
    join(p, a->results, &value);
    return;
  }
  number block[EGI_BLOCK];
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    char *const operands[2] = {(char *)block, data[0] + i * strides[0]};
    const int64_t block_strides[2] = {sizeof(number), strides[0]};
    p->load(p->isa, operands, block_strides, m);
    for (int64_t k = 1; k < m; k++) join(p, &block[0], &block[k]);
    join(p, a->results, &block[0]);
  }
}

/* A run of reduced rows joins the results of a chunk, row by row. */
static void accumulate_columns(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const accumulation *a = params;
  const reduction *r = a->reduction;
  const reduce_params *p = r->params;
  int64_t stride = r->kept.strides[0][r->kept.rank - 1];
  number block[EGI_BLOCK];
  for (int64_t row = 0; row < n; row++) {
    char *in = data[0] + row * strides[0];
    if (is_sum(p) && has_unit_stride(r, stride)) {
      p->isa->elementwise->add_to(&a->results[0].real, (const float *)(const void *)in, a->n);
      continue;
    }
    for (int64_t i = 0; i < a->n; i += EGI_BLOCK) {
      int64_t m = a->n - i < EGI_BLOCK ? a->n - i : EGI_BLOCK;
      char *const operands[2] = {(char *)block, in + i * stride};
      const int64_t block_strides[2] = {sizeof(number), stride};
      p->load(p->isa, operands, block_strides, m);
      for (int64_t k = 0; k < m; k++) join(p, &a->results[i + k], &block[k]);
    }
  }
}

/* Mean and conversion of results [first, first + n). */
static void finish(const reduction *r, number *results, int64_t first, int64_t n) {
  const reduce_params *p = r->params;
  for (int64_t k = 0; k < n && p->method == METHOD_MEAN; k++) {
    if (p->inside == EG_DTYPE_F64) {
      results[k].real /= (double)r->n_reduced;
    } else if (r->n_reduced > 0 && p->inside == EG_DTYPE_I64) {
      results[k].integer /= r->n_reduced;
    } else if (r->n_reduced > 0) {
      results[k].natural /= (uint64_t)r->n_reduced;
    }
  }
  int64_t element_bytes = (int64_t)egi_element_bytes(r->output->dtype);
  char *const operands[2] = {(char *)r->output->data + first * element_bytes, (char *)results};
  const int64_t strides[2] = {element_bytes, sizeof(number)};
  p->store(p->isa, operands, strides, n);
}

/* The first element of the input that belongs to output `index`. */
static char *input_of(const reduction *r, int64_t index) {
  char *data = r->kept.data[0];
  for (int i = r->kept.rank - 1; i >= 0; i--) {
    data += index % r->kept.dims[i] * r->kept.strides[0][i];
    index /= r->kept.dims[i];
  }
  return data;
}

/* ---- tasks ---------------------------------------------------------------------------------------------------- */

/* Outputs of a chunk; for columns chunks do not cross rows. */
static void chunk_range(const reduction *r, int64_t chunk, int64_t *out_first, int64_t *out_n) {
  if (!r->is_columns) {
    *out_first = chunk * r->chunk;
    *out_n = r->n_outputs - *out_first < r->chunk ? r->n_outputs - *out_first : r->chunk;
    return;
  }
  int64_t width = r->kept.dims[r->kept.rank - 1];
  int64_t per_row = (width + r->chunk - 1) / r->chunk;
  int64_t column = chunk % per_row * r->chunk;
  *out_first = chunk / per_row * width + column;
  *out_n = width - column < r->chunk ? width - column : r->chunk;
}

static void reduce_chunk(void *argument, size_t index, size_t worker) {
  (void)worker;
  const reduction *r = argument;
  int64_t first, n;
  int64_t block = (int64_t)index % r->n_blocks;
  chunk_range(r, (int64_t)index / r->n_blocks, &first, &n);
  int64_t start = block * r->block;
  int64_t end = r->n_reduced - start < r->block ? r->n_reduced : start + r->block;
  number results[CHUNK];
  egi_strided rows = r->reduced;
  for (int64_t k = 0; k < n; k++) results[k] = r->start;
  if (r->is_columns) {
    accumulation a = {r, results, n};
    rows.data[0] = input_of(r, first);
    egi_strided_range(&rows, start, end, accumulate_columns, &a);
  }
  for (int64_t k = 0; k < n && !r->is_columns; k++) {
    accumulation a = {r, &results[k], 1};
    rows.data[0] = input_of(r, first + k);
    egi_strided_range(&rows, start, end, accumulate_row, &a);
  }
  if (r->n_blocks == 1) {
    finish(r, results, first, n);
  } else {
    memcpy(r->partial + block * r->n_outputs + first, results, (size_t)n * sizeof(number));
  }
}

static void join_chunk(void *argument, size_t index, size_t worker) {
  (void)worker;
  const reduction *r = argument;
  int64_t first = (int64_t)index * CHUNK;
  int64_t n = r->n_outputs - first < CHUNK ? r->n_outputs - first : CHUNK;
  number results[CHUNK];
  for (int64_t k = 0; k < n; k++) results[k] = r->start;
  for (int64_t block = 0; block < r->n_blocks; block++) {
    const number *partial = r->partial + block * r->n_outputs + first;
    for (int64_t k = 0; k < n; k++) join(r->params, &results[k], &partial[k]);
  }
  finish(r, results, first, n);
}

/* ---- setting up ----------------------------------------------------------------------------------------------- */

static void append_dim(egi_strided *loop, int64_t dim, int64_t stride) {
  int last = loop->rank - 1;
  loop->count *= dim;
  if (dim == 1) return;
  if (last >= 0 && loop->strides[0][last] == stride * dim) {
    loop->dims[last] *= dim;
    loop->strides[0][last] = stride;
  } else {
    loop->dims[loop->rank] = dim;
    loop->strides[0][loop->rank++] = stride;
  }
}

/* A loop without dims has one element. */
static void close_loop(egi_strided *loop) {
  if (loop->rank > 0) return;
  loop->dims[0] = 1;
  loop->strides[0][0] = 0;
  loop->rank = 1;
}

static int64_t block_of(int64_t n_outputs) {
  int64_t width = n_outputs < CHUNK ? n_outputs : CHUNK;
  return width <= 0 || BLOCK_ELEMENTS / width < 32 ? 32 : BLOCK_ELEMENTS / width;
}

/* Number of blocks, by sizes alone. */
static int64_t count_blocks(int64_t n_outputs, int64_t n_reduced) {
  int64_t block = block_of(n_outputs);
  if (n_outputs <= 0 || n_outputs > SPLIT_OUTPUTS || n_reduced <= block) return 1;
  int64_t n_blocks = (n_reduced + block - 1) / block;
  return n_blocks < MAX_PARTIALS / n_outputs ? n_blocks : MAX_PARTIALS / n_outputs;
}

/* What changes nothing: of a maximum the least value of the type, of a minimum the greatest. */
static number start_of(const reduce_params *p, eg_dtype dtype) {
  number start = {0};
  bool is_max = p->method == METHOD_MAX;
  uint64_t greatest = UINT64_MAX >> (64 - egi_dtype_bits(dtype));
  if (is_sum(p)) return start;
  if (p->inside == EG_DTYPE_F64) {
    start.real = p->method == METHOD_PRODUCT ? 1.0 : p->method == METHOD_MIN ? HUGE_VAL : -HUGE_VAL;
  } else if (p->method == METHOD_PRODUCT) {
    start.natural = 1;
  } else if (p->inside == EG_DTYPE_I64) {
    start.integer = is_max ? -(int64_t)(greatest >> 1) - 1 : (int64_t)(greatest >> 1);
  } else {
    start.natural = is_max ? 0 : greatest;
  }
  return start;
}

static void set_up(reduction *r, const egi_kernel_call *call, const bool *is_reduced) {
  const egi_tensor *input = &call->inputs[0];
  int64_t element_bytes = (int64_t)egi_element_bytes(input->dtype);
  *r = (reduction){.params = call->params, .output = &call->outputs[0], .partial = call->workspace};
  r->kept = (egi_strided){.n_operands = 1, .count = 1, .data = {input->data}};
  r->reduced = r->kept;
  for (int i = 0; i < input->rank; i++) {
    append_dim(is_reduced[i] ? &r->reduced : &r->kept, input->dims[i], input->strides[i] * element_bytes);
  }
  close_loop(&r->kept);
  close_loop(&r->reduced);
  r->n_outputs = r->kept.count;
  r->n_reduced = r->reduced.count;
  r->start = start_of(r->params, input->dtype);
  r->is_f32 = input->dtype == EG_DTYPE_F32;
  int64_t kept_stride = r->kept.strides[0][r->kept.rank - 1];
  int64_t reduced_stride = r->reduced.strides[0][r->reduced.rank - 1];
  r->is_columns = kept_stride == element_bytes && reduced_stride != element_bytes;
  int64_t width = r->is_columns ? r->kept.dims[r->kept.rank - 1] : 0;
  r->chunk = CHUNK;
  if (!r->is_columns && egi_rows_per_task(r->n_reduced) < CHUNK) r->chunk = egi_rows_per_task(r->n_reduced);
  r->n_chunks = (r->n_outputs + r->chunk - 1) / r->chunk;
  if (width > 0) r->n_chunks = (width + CHUNK - 1) / CHUNK * (r->n_outputs / width);
  r->n_blocks = r->n_chunks >= 64 ? 1 : count_blocks(r->n_outputs, r->n_reduced);
  r->block = (r->n_reduced + r->n_blocks - 1) / r->n_blocks;
}

static void run_reduction(const egi_kernel_call *call, const bool *is_reduced) {
  reduction r;
  set_up(&r, call, is_reduced);
  if (r.n_outputs == 0) return;
  egi_pool_run(call->pool, (size_t)(r.n_chunks * r.n_blocks), reduce_chunk, &r);
  if (r.n_blocks == 1) return;
  egi_pool_run(call->pool, (size_t)((r.n_outputs + CHUNK - 1) / CHUNK), join_chunk, &r);
}

/* ---- kernels -------------------------------------------------------------------------------------------------- */

static eg_status prepare(egi_kernel_plan *plan, reduce_method method) {
  reduce_params *p = EGI_NEW(plan->arena, reduce_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  eg_dtype dtype = plan->inputs[0].dtype;
  p->isa = egi_cpu_isa();
  p->method = method;
  p->inside = egi_dtype_is_float(dtype) ? EG_DTYPE_F64 : EG_DTYPE_U64;
  if (egi_dtype_kind(dtype) == EGI_CLASS_INTEGER) p->inside = EG_DTYPE_I64;
  p->load = egi_cast_inner(p->inside, dtype);
  p->store = egi_cast_inner(dtype, p->inside);
  p->is_sum_to = egi_plan_node(plan)->op == EGI_OP_SumTo;
  p->is_noop_without_axes = egi_node_int(egi_plan_node(plan), "noop_with_empty_axes", 0) != 0;
  plan->params = p;
  bool is_whole_sum = method == METHOD_LOG_SUM_EXP && p->inside != EG_DTYPE_F64;
  bool is_boolean_sum = dtype == EG_DTYPE_BOOL && method != METHOD_MAX && method != METHOD_MIN;
  if (p->load == NULL || p->store == NULL || plan->outputs[0].dtype != dtype || is_boolean_sum || is_whole_sum) {
    return egi_fail_types(plan);
  }
  int64_t n_outputs = egi_tensor_count(&plan->outputs[0]);
  int64_t n_reduced = n_outputs > 0 ? egi_tensor_count(&plan->inputs[0]) / n_outputs : 0;
  int64_t n_blocks = count_blocks(n_outputs, n_reduced);
  plan->workspace_bytes = n_blocks > 1 ? (size_t)(n_blocks * n_outputs) * sizeof(number) : 0;
  return EG_OK;
}

static reduce_method method_of(egi_op op) {
  switch (op) {
  case EGI_OP_ReduceLogSumExp:
    return METHOD_LOG_SUM_EXP;
  case EGI_OP_ReduceMax:
    return METHOD_MAX;
  case EGI_OP_ReduceMean:
    return METHOD_MEAN;
  case EGI_OP_ReduceMin:
    return METHOD_MIN;
  case EGI_OP_ReduceProd:
    return METHOD_PRODUCT;
  default:
    return METHOD_SUM;
  }
}

eg_status egi_cpu_prepare_reduce(egi_kernel_plan *plan) {
  return prepare(plan, method_of(egi_plan_node(plan)->op));
}

/* The axes as flags; none given: all, or none where the attribute says so. */
static eg_status read_axes(eg_context *ctx, const egi_kernel_call *call, bool *is_reduced) {
  const reduce_params *p = call->params;
  const egi_tensor *input = &call->inputs[0];
  int64_t axes[EGI_MAX_RANK];
  uint32_t count = 0;
  if (egi_call_has_input(call, 1) && !egi_tensor_integers(&call->inputs[1], axes, EGI_MAX_RANK, &count)) {
    return egi_fail(ctx, EG_ERROR_DATA, "reduction: axes must be a short list of integers");
  }
  int64_t n_outputs = 1;
  for (int i = 0; i < input->rank; i++) is_reduced[i] = count == 0 && !p->is_noop_without_axes;
  for (uint32_t k = 0; k < count; k++) {
    int axis;
    if (!egi_normalise_axis(axes[k], input->rank, &axis)) {
      return egi_fail(ctx, EG_ERROR_DATA, "reduction: axis %lld of a tensor of rank %d", (long long)axes[k],
                      input->rank);
    }
    is_reduced[axis] = true;
  }
  for (int i = 0; i < input->rank; i++) n_outputs *= is_reduced[i] ? 1 : input->dims[i];
  if (n_outputs == egi_tensor_count(&call->outputs[0])) return EG_OK;
  return egi_fail(ctx, EG_ERROR_DATA, "reduction: the axes leave %lld elements where %lld were planned",
                  (long long)n_outputs, (long long)egi_tensor_count(&call->outputs[0]));
}

eg_status egi_cpu_run_reduce(eg_context *ctx, const egi_kernel_call *call) {
  bool is_reduced[EGI_MAX_RANK];
  EG_TRY(read_axes(ctx, call, is_reduced));
  run_reduction(call, is_reduced);
  return EG_OK;
}

/* x must have the dims of the output broadcast outwards. */
eg_status egi_cpu_prepare_sum_to(egi_kernel_plan *plan) {
  const egi_tensor *input = &plan->inputs[0], *output = &plan->outputs[0];
  bool fits = output->rank <= input->rank;
  for (int i = 0; fits && i < output->rank; i++) {
    int64_t from = input->dims[input->rank - output->rank + i];
    fits = output->dims[i] == from || output->dims[i] == 1;
  }
  if (!fits) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the result is no broadcast source of x");
  return prepare(plan, METHOD_SUM);
}

eg_status egi_cpu_run_sum_to(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const egi_tensor *input = &call->inputs[0], *output = &call->outputs[0];
  int missing = input->rank - output->rank;
  bool is_reduced[EGI_MAX_RANK];
  for (int i = 0; i < input->rank; i++) is_reduced[i] = i < missing || output->dims[i - missing] != input->dims[i];
  run_reduction(call, is_reduced);
  return EG_OK;
}
