/* The gradient of engraft.MoE. With o = W₂·m + b₂, m = act(W₁·x + b₁) and y = Σ w·o: d w = (W₂ᵀ·dy)·m + b₂·dy, so that
 * no product of the forward pass is made again; the products with gate and up were saved. */
#include "backend/cpu/moe.h"
#include "backend/cpu/strided.h"

typedef struct weigh_run {
  const egi_moe_run *run;
  double *weight_gradients; /* [T·k], in the order of pairs */
} weigh_run;

static double get(const egi_moe_params *p, const char *row, int64_t i) {
  return egi_real_get(row + (size_t)i * p->element_bytes, p->dtype);
}

static double dot_bias(const egi_moe_run *run, int64_t expert, const char *dy) {
  const egi_moe *moe = &run->p->moe;
  const egi_tensor *bias = &run->call->inputs[egi_moe_input(moe, EGI_MOE_DOWN_BIAS, expert)];
  bool is_stacked = moe->counts[EGI_MOE_DOWN_BIAS] == 1;
  int64_t first = is_stacked ? expert * bias->strides[0] : 0, step = bias->strides[bias->rank - 1];
  double sum = 0.0;
  for (int64_t i = 0; i < run->p->width; i++) sum += get(run->p, dy, i) * egi_moe_number(bias, first + i * step);
  return sum;
}

/* d w of each row; then dy and the gradient of m times the row's weight. */
static void weigh_task(void *argument, size_t task, size_t worker) {
  const weigh_run *r = argument;
  const egi_moe_run *run = r->run;
  const egi_moe_params *p = run->p;
  const egi_row_functions *functions = egi_row_functions_of(p->dtype);
  int64_t first = (int64_t)task * EGI_MOE_TASK_ROWS;
  (void)worker;
  for (int64_t row = first; row < first + EGI_MOE_TASK_ROWS && row < p->n_rows; row++) {
    char *dy = egi_moe_at(p, run->wide, row * p->width), *dm = egi_moe_at(p, run->extra, row * p->inner);
    int64_t pair = run->order[row];
    double weight = get(p, run->weights, pair);
    double gradient = functions->dot(dm, egi_moe_at(p, run->middle, row * p->inner), p->inner);
    if (p->moe.counts[EGI_MOE_DOWN_BIAS] > 0) gradient += dot_bias(run, run->indices[pair], dy);
    r->weight_gradients[pair] = gradient;
    functions->scale(dy, weight, p->width);
    functions->scale(dm, weight, p->inner);
  }
}

static bool wants(const egi_moe_run *run, egi_moe_role role) {
  const egi_moe *moe = &run->p->moe;
  for (uint32_t i = moe->first[role]; i < moe->first[role] + moe->counts[role]; i++)
    if (i < run->call->n_outputs && run->call->outputs[i].dtype != EG_DTYPE_UNDEFINED) return true;
  return false;
}

static bool wants_input(const egi_moe_run *run, unsigned input) {
  return input < run->call->n_outputs && run->call->outputs[input].dtype != EG_DTYPE_UNDEFINED;
}

/* dy·W₂ into `extra`, d w, and the gradients of down. */
static void through_down(const egi_moe_run *run, double *weight_gradients) {
  const egi_moe_params *p = run->p;
  egi_moe_product product = {.kind = EGI_MOE_BACKWARD,
                             .role = EGI_MOE_DOWN,
                             .n = p->width,
                             .k = p->inner,
                             .in = run->wide,
                             .in_stride = p->width,
                             .out = run->extra,
                             .out_stride = p->inner};
  egi_moe_multiply(run, &product);
  weigh_run r = {run, weight_gradients};
  egi_pool_run(run->call->pool, (size_t)((p->n_rows + EGI_MOE_TASK_ROWS - 1) / EGI_MOE_TASK_ROWS), weigh_task, &r);
  if (wants(run, EGI_MOE_DOWN_BIAS)) egi_moe_reduce_bias(run, EGI_MOE_DOWN_BIAS, run->wide, p->width, p->width, 0);
  if (!wants(run, EGI_MOE_DOWN)) return;
  product.kind = EGI_MOE_REDUCE;
  product.left = run->wide;
  product.left_stride = p->width;
  product.in = run->middle;
  product.in_stride = p->inner;
  egi_moe_multiply(run, &product);
}

/* Gradients of gate and up from `change`, whose rows start at column `first`. */
static void reduce_up(const egi_moe_run *run, egi_moe_role role, int64_t first) {
  const egi_moe_params *p = run->p;
  egi_moe_role bias = (egi_moe_role)(role + 1);
  if (wants(run, bias)) egi_moe_reduce_bias(run, bias, run->change, p->gate, p->hidden, first);
  if (!wants(run, role)) return;
  const egi_moe_product product = {.kind = EGI_MOE_REDUCE,
                                   .role = role,
                                   .n = p->gate,
                                   .k = p->width,
                                   .left = egi_moe_at(p, run->change, first),
                                   .left_stride = p->hidden,
                                   .in = run->wide,
                                   .in_stride = p->width};
  egi_moe_multiply(run, &product);
}

static void through_up(const egi_moe_run *run) {
  const egi_moe_params *p = run->p;
  egi_moe_product product = {.kind = EGI_MOE_BACKWARD,
                             .role = EGI_MOE_GATE,
                             .n = p->gate,
                             .k = p->width,
                             .in = run->change,
                             .in_stride = p->hidden,
                             .out = run->wide,
                             .out_stride = p->width};
  egi_moe_multiply(run, &product);
  if (p->moe.form == EGI_MOE_SEPARATE) {
    product.role = EGI_MOE_UP;
    product.in = egi_moe_at(p, run->change, p->gate);
    product.is_added = true;
    egi_moe_multiply(run, &product);
  }
  egi_moe_combine(run, &run->call->outputs[EGI_MOE_X], false);
}

/* A saved result of the forward node without gaps. */
static void *read_saved(const egi_moe_run *run, unsigned which, void *buffer) {
  const egi_tensor *in = &run->call->inputs[run->p->moe.n_inputs + which];
  if (egi_tensor_is_contiguous(in)) return in->data;
  egi_tensor copy = *in;
  copy.data = buffer;
  egi_tensor_set_contiguous(&copy);
  egi_copy(run->call->pool, &copy, in);
  return buffer;
}

eg_status egi_cpu_run_moe_grad(eg_context *ctx, const egi_kernel_call *call) {
  egi_moe_run run = egi_moe_begin(call);
  const egi_moe_params *p = run.p;
  const egi_tensor *saved = call->inputs + p->moe.n_inputs;
  double *weight_gradients = (double *)(void *)run.saved; /* the plan keeps one for each row there */
  bool is_separate = p->moe.form == EGI_MOE_SEPARATE;
  (void)ctx;
  run.indices = read_saved(&run, EGI_MOE_INDICES, run.indices);
  run.weights = read_saved(&run, EGI_MOE_WEIGHTS, run.weights);
  run.saved = read_saved(&run, EGI_MOE_HIDDEN, (char *)call->workspace + p->copy);
  egi_moe_sort(&run);
  egi_moe_gather(&run, &saved[EGI_MOE_DY]);
  egi_moe_activate(&run);
  through_down(&run, weight_gradients);
  if (wants_input(&run, EGI_MOE_LOGITS)) egi_moe_route_gradient(&run, weight_gradients, &call->outputs[EGI_MOE_LOGITS]);
  egi_moe_activate_gradient(&run);
  bool wants_weights = wants(&run, EGI_MOE_GATE) || (is_separate && wants(&run, EGI_MOE_UP));
  if (wants_weights) egi_moe_gather(&run, &call->inputs[EGI_MOE_X]);
  reduce_up(&run, EGI_MOE_GATE, 0);
  if (is_separate) reduce_up(&run, EGI_MOE_UP, p->gate);
  if (wants_input(&run, EGI_MOE_X)) through_up(&run);
  return EG_OK;
}
