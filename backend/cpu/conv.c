/* Conv (operator version 22) and its gradient, 1 to 3 spatial axes, groups, strides, dilations, pads: direct sums in
 * f64, taps in row-major order, channels before taps, batch outermost; each result is summed by one task, so nothing
 * depends on the number of threads. Of language models these are short depthwise kernels. */
#include "backend/cpu/narrow.h"
#include "backend/cpu/strided.h"

enum { AXES = 3 };

typedef struct conv_params {
  int64_t batch, channels, filters, groups;
  int64_t in[AXES], kernel[AXES], out[AXES], stride[AXES], dilation[AXES], before[AXES];
} conv_params;

static int64_t listed(const egi_node *node, const char *name, int index, int64_t otherwise) {
  uint32_t count = 0;
  const int64_t *list = egi_node_ints(node, name, &count);
  return list != NULL && index >= 0 && (uint32_t)index < count ? list[index] : otherwise;
}

/* What is put before the input at axis i; SAME_UPPER has the odd one at the end. */
static int64_t padding(const egi_node *node, const conv_params *p, int axis, int i) {
  const char *mode = egi_node_string(node, "auto_pad", "NOTSET");
  if (strncmp(mode, "SAME", 4) != 0) return strcmp(mode, "VALID") == 0 ? 0 : listed(node, "pads", i, 0);
  int64_t total = (p->out[axis] - 1) * p->stride[axis] + (p->kernel[axis] - 1) * p->dilation[axis] + 1 - p->in[axis];
  if (total < 0) total = 0;
  return strcmp(mode, "SAME_LOWER") == 0 ? total - total / 2 : total / 2;
}

static eg_status prepare(egi_kernel_plan *plan, const egi_tensor *y) {
  const egi_tensor *x = &plan->inputs[0], *w = &plan->inputs[1];
  const egi_node *node = egi_plan_node(plan);
  conv_params *p = EGI_NEW(plan->arena, conv_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  if (!egi_dtype_is_float(x->dtype) || egi_dtype_bits(x->dtype) < 16) return egi_fail_types(plan);
  *p = (conv_params){x->dims[0], x->dims[1], w->dims[0], egi_node_int(node, "group", 1), {0}, {0}, {0}, {0}, {0}, {0}};
  if (p->groups < 1 || p->filters % p->groups != 0 || p->channels != p->groups * w->dims[1])
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "its channels and filters do not fit its groups");
  for (int axis = 0; axis < AXES; axis++) {
    int i = axis - (AXES - (x->rank - 2)); /* leading axes are 1 */
    p->in[axis] = i >= 0 ? x->dims[i + 2] : 1;
    p->kernel[axis] = i >= 0 ? w->dims[i + 2] : 1;
    p->out[axis] = i >= 0 ? y->dims[i + 2] : 1;
    p->stride[axis] = listed(node, "strides", i, 1);
    p->dilation[axis] = listed(node, "dilations", i, 1);
    p->before[axis] = i >= 0 ? padding(node, p, axis, i) : 0;
  }
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_conv(egi_kernel_plan *plan) {
  return prepare(plan, &plan->outputs[0]);
}

eg_status egi_cpu_prepare_conv_grad(egi_kernel_plan *plan) {
  return prepare(plan, &plan->inputs[2]);
}

typedef struct conv_run {
  const conv_params *p;
  const egi_tensor *x, *w, *bias, *y; /* y: the result, or its gradient */
  const egi_tensor *dx, *dw, *db;     /* NULL: not wanted */
  int64_t in_size, out_size, kernel_size;
} conv_run;

static void split_index(const int64_t dims[AXES], int64_t linear, int64_t out[AXES]) {
  for (int axis = AXES - 1; axis >= 0; axis--) {
    out[axis] = linear % dims[axis];
    linear /= dims[axis];
  }
}

/* Offset in the input of what tap `tap` of output position `out` sees; false in the padding. */
static bool input_offset(const conv_params *p, const int64_t out[AXES], const int64_t tap[AXES], int64_t *offset) {
  *offset = 0;
  for (int axis = 0; axis < AXES; axis++) {
    int64_t at = out[axis] * p->stride[axis] - p->before[axis] + tap[axis] * p->dilation[axis];
    if (at < 0 || at >= p->in[axis]) return false;
    *offset = *offset * p->in[axis] + at;
  }
  return true;
}

/* Offset in the output whose tap `tap` sees input position `in`; false when there is none. */
static bool output_offset(const conv_params *p, const int64_t in[AXES], const int64_t tap[AXES], int64_t *offset) {
  *offset = 0;
  for (int axis = 0; axis < AXES; axis++) {
    int64_t at = in[axis] + p->before[axis] - tap[axis] * p->dilation[axis];
    if (at < 0 || at % p->stride[axis] != 0 || at / p->stride[axis] >= p->out[axis]) return false;
    *offset = *offset * p->out[axis] + at / p->stride[axis];
  }
  return true;
}

/* One batch element and filter. */
static void forward_task(void *argument, size_t task, size_t worker) {
  const conv_run *r = argument;
  const conv_params *p = r->p;
  (void)worker;
  int64_t n = (int64_t)task / p->filters, f = (int64_t)task % p->filters;
  int64_t per_group = p->channels / p->groups, first = f / (p->filters / p->groups) * per_group;
  for (int64_t o = 0; o < r->out_size; o++) {
    int64_t out[AXES], tap[AXES], offset;
    double sum = r->bias != NULL ? egi_float_get(r->bias, f) : 0.0;
    split_index(p->out, o, out);
    for (int64_t k = 0; k < r->kernel_size; k++) {
      split_index(p->kernel, k, tap);
      if (!input_offset(p, out, tap, &offset)) continue;
      for (int64_t c = 0; c < per_group; c++)
        sum += egi_float_get(r->x, (n * p->channels + first + c) * r->in_size + offset) *
               egi_float_get(r->w, (f * per_group + c) * r->kernel_size + k);
    }
    egi_float_set(r->y, (n * p->filters + f) * r->out_size + o, sum);
  }
}

/* One batch element and channel of dX. */
static void input_task(void *argument, size_t task, size_t worker) {
  const conv_run *r = argument;
  const conv_params *p = r->p;
  (void)worker;
  int64_t n = (int64_t)task / p->channels, channel = (int64_t)task % p->channels;
  int64_t per_group = p->channels / p->groups, filters = p->filters / p->groups;
  int64_t first = channel / per_group * filters, c = channel % per_group;
  for (int64_t i = 0; i < r->in_size; i++) {
    int64_t in[AXES], tap[AXES], offset;
    double sum = 0.0;
    split_index(p->in, i, in);
    for (int64_t k = 0; k < r->kernel_size; k++) {
      split_index(p->kernel, k, tap);
      if (!output_offset(p, in, tap, &offset)) continue;
      for (int64_t f = first; f < first + filters; f++)
        sum += egi_float_get(r->y, (n * p->filters + f) * r->out_size + offset) *
               egi_float_get(r->w, (f * per_group + c) * r->kernel_size + k);
    }
    egi_float_set(r->dx, (n * p->channels + channel) * r->in_size + i, sum);
  }
}

/* One filter and channel of dW; the filter's bias with its first channel. */
static void kernel_task(void *argument, size_t task, size_t worker) {
  const conv_run *r = argument;
  const conv_params *p = r->p;
  (void)worker;
  int64_t per_group = p->channels / p->groups, f = (int64_t)task / per_group, c = (int64_t)task % per_group;
  int64_t channel = f / (p->filters / p->groups) * per_group + c;
  for (int64_t k = 0; k < r->kernel_size && r->dw != NULL; k++) {
    int64_t out[AXES], tap[AXES], offset;
    double sum = 0.0;
    split_index(p->kernel, k, tap);
    for (int64_t n = 0; n < p->batch; n++)
      for (int64_t o = 0; o < r->out_size; o++) {
        split_index(p->out, o, out);
        if (!input_offset(p, out, tap, &offset)) continue;
        sum += egi_float_get(r->y, (n * p->filters + f) * r->out_size + o) *
               egi_float_get(r->x, (n * p->channels + channel) * r->in_size + offset);
      }
    egi_float_set(r->dw, (f * per_group + c) * r->kernel_size + k, sum);
  }
  double sum = 0.0;
  for (int64_t n = 0; n < p->batch && r->db != NULL && c == 0; n++)
    for (int64_t o = 0; o < r->out_size; o++) sum += egi_float_get(r->y, (n * p->filters + f) * r->out_size + o);
  if (r->db != NULL && c == 0) egi_float_set(r->db, f, sum);
}

static int64_t product(const int64_t dims[AXES]) {
  return dims[0] * dims[1] * dims[2];
}

static conv_run begin(const egi_kernel_call *call) {
  const conv_params *p = call->params;
  conv_run r = {.p = p, .x = &call->inputs[0], .w = &call->inputs[1]};
  r.in_size = product(p->in);
  r.out_size = product(p->out);
  r.kernel_size = product(p->kernel);
  return r;
}

eg_status egi_cpu_run_conv(eg_context *ctx, const egi_kernel_call *call) {
  conv_run r = begin(call);
  (void)ctx;
  r.y = &call->outputs[0];
  if (egi_call_has_input(call, 2)) r.bias = &call->inputs[2];
  egi_pool_run(call->pool, (size_t)(r.p->batch * r.p->filters), forward_task, &r);
  return EG_OK;
}

static const egi_tensor *wanted(const egi_kernel_call *call, unsigned output) {
  if (output >= call->n_outputs || call->outputs[output].dtype == EG_DTYPE_UNDEFINED) return NULL;
  return &call->outputs[output];
}

eg_status egi_cpu_run_conv_grad(eg_context *ctx, const egi_kernel_call *call) {
  conv_run r = begin(call);
  (void)ctx;
  r.y = &call->inputs[2];
  r.dx = wanted(call, 0);
  r.dw = wanted(call, 1);
  r.db = wanted(call, 2);
  if (r.dx != NULL) egi_pool_run(call->pool, (size_t)(r.p->batch * r.p->channels), input_task, &r);
  size_t n_kernels = (size_t)(r.p->filters * (r.p->channels / r.p->groups));
  if (r.dw != NULL || r.db != NULL) egi_pool_run(call->pool, n_kernels, kernel_task, &r);
  return EG_OK;
}
