/* ArgMax, ArgMin and TopK along an axis: floats compared in f64 (NaN is larger than everything), integers in 64 bits.
 * Of equal elements the first counts, so that results are unique; a line belongs to one task. */
#include "backend/cpu/elementwise.h"

typedef union number {
  double real;
  int64_t integer;
  uint64_t natural;
} number;

typedef struct entry {
  number value;
  int64_t position;
} entry;

typedef struct order_params {
  const egi_isa *isa;
  int axis;
  eg_dtype inside; /* f64, i64 or u64 */
  egi_inner load, store;
  bool is_smallest, takes_last;
  size_t worker_bytes; /* of the workspace: TopK's heap */
} order_params;

typedef struct order_run {
  const order_params *params;
  const egi_kernel_call *call;
  egi_rows rows; /* of the input along the axis */
  int64_t lines_per_task, k;
} order_run;

static bool is_nan(const number *a) {
  return a->real != a->real;
}

/* a stands strictly before b, whatever their places. */
static bool beats(const order_params *p, const number *a, const number *b) {
  if (p->inside == EG_DTYPE_F64) {
    if (is_nan(a) || is_nan(b)) return is_nan(a) != is_nan(b) && is_nan(a) != p->is_smallest;
    return p->is_smallest ? a->real < b->real : a->real > b->real;
  }
  if (p->inside == EG_DTYPE_I64) return p->is_smallest ? a->integer < b->integer : a->integer > b->integer;
  return p->is_smallest ? a->natural < b->natural : a->natural > b->natural;
}

static bool precedes(const order_params *p, const entry *a, const entry *b) {
  if (beats(p, &a->value, &b->value)) return true;
  return !beats(p, &b->value, &a->value) && a->position < b->position;
}

static eg_status prepare(egi_kernel_plan *plan, order_params **out_params) {
  order_params *p = EGI_NEW(plan->arena, order_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = *out_params = p;
  eg_dtype dtype = plan->inputs[0].dtype;
  p->isa = egi_cpu_isa();
  p->inside = egi_dtype_is_float(dtype) ? EG_DTYPE_F64 : EG_DTYPE_U64;
  if (egi_dtype_kind(dtype) == EGI_CLASS_INTEGER) p->inside = EG_DTYPE_I64;
  p->load = egi_cast_inner(p->inside, dtype);
  p->store = egi_cast_inner(dtype, p->inside);
  return p->load != NULL && p->store != NULL ? EG_OK : egi_fail_types(plan);
}

static eg_status read_axis(egi_kernel_plan *plan, order_params *p, int64_t default_axis) {
  int64_t axis = egi_node_int(egi_plan_node(plan), "axis", default_axis);
  if (egi_normalise_axis(axis, plan->inputs[0].rank, &p->axis)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis %lld of a tensor of rank %d", (long long)axis,
                       plan->inputs[0].rank);
}

/* Loads elements [first, first + n) of a line into numbers `stride` bytes apart. */
static void load_line(const order_run *run, char *line, const int64_t range[2], void *out, int64_t stride) {
  const egi_tensor *input = &run->call->inputs[0];
  int64_t step = input->strides[run->params->axis] * (int64_t)egi_element_bytes(input->dtype);
  char *const operands[2] = {out, line + range[0] * step};
  const int64_t strides[2] = {stride, step};
  run->params->load(run->params->isa, operands, strides, range[1]);
}

static void run_lines(const egi_kernel_call *call, order_run *run, egi_task task) {
  egi_rows_init_along(&run->rows, &call->inputs[0], run->params->axis);
  run->lines_per_task = egi_rows_per_task(run->rows.length);
  if (run->rows.count == 0) return;
  egi_pool_run(call->pool, (size_t)((run->rows.count + run->lines_per_task - 1) / run->lines_per_task), task, run);
}

static int64_t end_of(const order_run *run, int64_t start) {
  int64_t end = start + run->lines_per_task;
  return end < run->rows.count ? end : run->rows.count;
}

/* ---- ArgMax, ArgMin --------------------------------------------------------------------------------------------- */

eg_status egi_cpu_prepare_arg_extremum(egi_kernel_plan *plan) {
  order_params *p;
  EG_TRY(prepare(plan, &p));
  const egi_node *node = egi_plan_node(plan);
  p->is_smallest = node->op == EGI_OP_ArgMin;
  p->takes_last = egi_node_int(node, "select_last_index", 0) != 0;
  if (plan->outputs[0].dtype != EG_DTYPE_I64) return egi_fail_types(plan);
  return read_axis(plan, p, 0);
}

static int64_t extremum_of(const order_run *run, char *line) {
  const order_params *p = run->params;
  number block[EGI_BLOCK], best = {0};
  int64_t position = 0;
  for (int64_t i = 0; i < run->rows.length; i += EGI_BLOCK) {
    const int64_t range[2] = {i, run->rows.length - i < EGI_BLOCK ? run->rows.length - i : EGI_BLOCK};
    load_line(run, line, range, block, sizeof(number));
    for (int64_t k = 0; k < range[1]; k++) {
      bool is_first = i + k == 0, is_equal = !is_first && p->takes_last && !beats(p, &best, &block[k]);
      if (!is_first && !is_equal && !beats(p, &block[k], &best)) continue;
      best = block[k];
      position = i + k;
    }
  }
  return position;
}

/* The output is contiguous, its elements in the order of the lines. */
static void find_extrema(void *argument, size_t index, size_t worker) {
  (void)worker;
  const order_run *run = argument;
  int64_t *out = run->call->outputs[0].data, start = (int64_t)index * run->lines_per_task;
  for (int64_t line = start; line < end_of(run, start); line++)
    out[line] = extremum_of(run, egi_rows_at(&run->rows, run->call->inputs[0].data, line));
}

eg_status egi_cpu_run_arg_extremum(eg_context *ctx, const egi_kernel_call *call) {
  order_run run = {.params = call->params, .call = call};
  if (call->inputs[0].dims[run.params->axis] == 0 && egi_tensor_count(&call->outputs[0]) > 0)
    return egi_fail(ctx, EG_ERROR_DATA, "ArgMax, ArgMin: an axis without elements");
  run_lines(call, &run, find_extrema);
  return EG_OK;
}

/* ---- TopK ------------------------------------------------------------------------------------------------------- */

eg_status egi_cpu_prepare_topk(egi_kernel_plan *plan) {
  order_params *p;
  EG_TRY(prepare(plan, &p));
  EG_TRY(read_axis(plan, p, -1));
  p->is_smallest = egi_node_int(egi_plan_node(plan), "largest", 1) == 0;
  const egi_tensor *values = &plan->outputs[0], *positions = &plan->outputs[plan->n_outputs - 1];
  bool is_wanted = plan->n_outputs > 1 && positions->dtype != EG_DTYPE_UNDEFINED;
  if (values->dtype != EG_DTYPE_UNDEFINED && values->dtype != plan->inputs[0].dtype) return egi_fail_types(plan);
  if (is_wanted && positions->dtype != EG_DTYPE_I64) return egi_fail_types(plan);
  int64_t k = values->dtype != EG_DTYPE_UNDEFINED ? values->dims[p->axis] : is_wanted ? positions->dims[p->axis] : 0;
  p->worker_bytes = ((size_t)k * sizeof(entry) + 63) / 64 * 64;
  plan->workspace_bytes = p->worker_bytes * egi_pool_size(egi_context_pool(plan->ctx));
  return EG_OK;
}

/* Restores the heap below `root`: every entry is preceded by those under it, so that the last of all is on top. */
static void sift(const order_params *p, entry *heap, int64_t n, int64_t root) {
  entry moved = heap[root];
  for (int64_t child = 2 * root + 1; child < n; child = 2 * root + 1) {
    if (child + 1 < n && precedes(p, &heap[child], &heap[child + 1])) child++;
    if (!precedes(p, &moved, &heap[child])) break;
    heap[root] = heap[child];
    root = child;
  }
  heap[root] = moved;
}

/* The k first entries of a line, in order: a heap of k that better ones enter, then sorted in place. */
static void select_line(const order_run *run, char *line, entry *heap) {
  const order_params *p = run->params;
  number block[EGI_BLOCK];
  for (int64_t i = 0; i < run->rows.length; i += EGI_BLOCK) {
    const int64_t range[2] = {i, run->rows.length - i < EGI_BLOCK ? run->rows.length - i : EGI_BLOCK};
    load_line(run, line, range, block, sizeof(number));
    for (int64_t n = 0; n < range[1]; n++) {
      entry candidate = {block[n], i + n};
      if (i + n < run->k) {
        heap[i + n] = candidate;
        for (int64_t root = run->k / 2; i + n == run->k - 1 && root-- > 0;) sift(p, heap, run->k, root);
      } else if (precedes(p, &candidate, &heap[0])) {
        heap[0] = candidate;
        sift(p, heap, run->k, 0);
      }
    }
  }
  for (int64_t n = run->k - 1; n > 0; n--) {
    entry last = heap[0];
    heap[0] = heap[n];
    heap[n] = last;
    sift(p, heap, n, 0);
  }
}

/* Writes column `line` of an output from the entries, value or position. */
static void store_line(const order_run *run, unsigned output, int64_t line, entry *heap) {
  if (output >= run->call->n_outputs || run->call->outputs[output].dtype == EG_DTYPE_UNDEFINED) return;
  const egi_tensor *out = &run->call->outputs[output];
  egi_rows rows;
  egi_rows_init_along(&rows, out, run->params->axis);
  int64_t step = out->strides[run->params->axis] * (int64_t)rows.element_bytes;
  char *at = egi_rows_at(&rows, out->data, line);
  char *const operands[2] = {at, (char *)&heap[0].value};
  const int64_t strides[2] = {step, sizeof(entry)};
  if (output == 0) run->params->store(run->params->isa, operands, strides, run->k);
  for (int64_t n = 0; output == 1 && n < run->k; n++) *(int64_t *)(void *)(at + n * step) = heap[n].position;
}

static void select_lines(void *argument, size_t index, size_t worker) {
  const order_run *run = argument;
  entry *heap = (entry *)(void *)((char *)run->call->workspace + worker * run->params->worker_bytes);
  int64_t start = (int64_t)index * run->lines_per_task;
  for (int64_t line = start; line < end_of(run, start); line++) {
    select_line(run, egi_rows_at(&run->rows, run->call->inputs[0].data, line), heap);
    for (unsigned output = 0; output < 2; output++) store_line(run, output, line, heap);
  }
}

eg_status egi_cpu_run_topk(eg_context *ctx, const egi_kernel_call *call) {
  order_run run = {.params = call->params, .call = call};
  int64_t k = 0, size = call->inputs[0].dims[run.params->axis];
  uint32_t count = 0;
  run.k = call->outputs[call->outputs[0].dtype != EG_DTYPE_UNDEFINED ? 0 : 1].dims[run.params->axis];
  if (!egi_tensor_integers(&call->inputs[1], &k, 1, &count) || count != 1 || k != run.k || k > size)
    return egi_fail(ctx, EG_ERROR_DATA, "TopK: k = %lld of %lld elements where %lld were planned", (long long)k,
                    (long long)size, (long long)run.k);
  if (k > 0) run_lines(call, &run, select_lines);
  return EG_OK;
}
