/* QuantizeLinear and DequantizeLinear (operator version 25): with one scale, one for each index of an axis, or one for
 * each block along it. y = (x - zero) · scale in f64, rounded once; codes of at most 8 bits go through a table.
 * q = round(x / scale) in f32, to nearest even, + zero, limited to the type. Elementwise: deterministic. */
#include <math.h>

#include "backend/cpu/narrow.h"
#include "backend/cpu/strided.h"

typedef struct quantize_params {
  int64_t outer, axis, inner; /* x as [outer, axis, inner] */
  int64_t block, n_blocks;    /* block 0: none */
  bool is_single;             /* one scale */
  bool has_table;
  egi_narrowing narrowing;
  double table[256]; /* value of each code of a type of at most 8 bits */
} quantize_params;

static void read_axis(const egi_kernel_plan *plan, quantize_params *p) {
  const egi_tensor *x = &plan->inputs[0], *scale = &plan->inputs[1];
  int axis = 0;
  p->block = egi_node_int(egi_plan_node(plan), "block_size", 0);
  p->is_single = p->block == 0 && egi_tensor_count(scale) == 1;
  if (p->is_single) {
    p->outer = p->axis = 1;
    p->inner = egi_tensor_count(x);
    return;
  }
  (void)egi_normalise_axis(egi_node_int(egi_plan_node(plan), "axis", 1), x->rank, &axis); /* the shape rule saw it */
  p->outer = egi_dims_product(x, 0, axis);
  p->axis = x->dims[axis];
  p->inner = egi_dims_product(x, axis + 1, x->rank);
  p->n_blocks = p->block > 0 ? scale->dims[axis] : 0;
}

static eg_status prepare(egi_kernel_plan *plan) {
  quantize_params *p = EGI_NEW(plan->arena, quantize_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  for (unsigned i = 0; i < plan->n_inputs; i++)
    if (egi_plan_has_input(plan, i) && !egi_is_number(plan->inputs[i].dtype)) return egi_fail_types(plan);
  if (!egi_is_number(plan->outputs[0].dtype)) return egi_fail_types(plan);
  if (egi_plan_has_input(plan, 2) && egi_tensor_count(&plan->inputs[2]) != egi_tensor_count(&plan->inputs[1]))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "its scales and zero points differ in number");
  p->narrowing = egi_narrowing_of(egi_plan_node(plan));
  read_axis(plan, p);
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_quantize(egi_kernel_plan *plan) {
  return prepare(plan);
}

eg_status egi_cpu_prepare_dequantize(egi_kernel_plan *plan) {
  EG_TRY(prepare(plan));
  quantize_params *p = (quantize_params *)(uintptr_t)plan->params; /* our own, made above */
  eg_dtype dtype = plan->inputs[0].dtype;
  unsigned bits = egi_dtype_bits(dtype);
  p->has_table = bits <= 8;
  for (unsigned code = 0; p->has_table && code < 1u << bits; code++) {
    uint8_t byte = (uint8_t)code;
    p->table[code] = egi_number_get(&byte, dtype, 0);
  }
  return EG_OK;
}

typedef struct quantize_run {
  const quantize_params *p;
  const egi_tensor *x, *scale, *zero, *y; /* zero: NULL where there is none */
  int64_t task_elements;
} quantize_run;

/* Index of the scale of element (row of [outer, axis], i). */
static int64_t scale_index(const quantize_params *p, int64_t row, int64_t i) {
  if (p->is_single) return 0;
  if (p->block == 0) return row % p->axis;
  return ((row / p->axis) * p->n_blocks + row % p->axis / p->block) * p->inner + i;
}

static void dequantize_one(const quantize_run *r, int64_t at, int64_t from) {
  unsigned bits = egi_dtype_bits(r->x->dtype);
  double x;
  if (r->p->has_table) {
    int64_t per_byte = 8 / (int64_t)bits;
    unsigned byte = ((const uint8_t *)r->x->data)[at / per_byte];
    x = r->p->table[byte >> ((unsigned)(at % per_byte) * bits) & ((1u << bits) - 1u)];
  } else {
    x = egi_number_get(r->x->data, r->x->dtype, at);
  }
  double zero = r->zero != NULL ? egi_number_get(r->zero->data, r->zero->dtype, from) : 0.0;
  double y = (x - zero) * egi_number_get(r->scale->data, r->scale->dtype, from);
  if (r->y->dtype == EG_DTYPE_F32)
    ((float *)r->y->data)[at] = (float)y;
  else
    egi_number_set(r->y->data, r->y->dtype, at, y, &r->p->narrowing);
}

static void quantize_one(const quantize_run *r, int64_t at, int64_t from) {
  float x = (float)egi_number_get(r->x->data, r->x->dtype, at);
  double y = (double)(x / (float)egi_number_get(r->scale->data, r->scale->dtype, from));
  double zero = r->zero != NULL ? egi_number_get(r->zero->data, r->zero->dtype, from) : 0.0;
  if (!egi_dtype_is_float(r->y->dtype)) y = nearbyint(y) + zero;
  egi_number_set(r->y->data, r->y->dtype, at, y, &r->p->narrowing);
}

typedef void (*convert_one)(const quantize_run *r, int64_t at, int64_t from);

static void convert_range(const quantize_run *r, convert_one convert, size_t task) {
  int64_t start = (int64_t)task * r->task_elements, end = start + r->task_elements;
  int64_t count = egi_tensor_count(r->y), inner = r->p->inner;
  if (end > count) end = count;
  for (int64_t at = start; at < end; at++) convert(r, at, scale_index(r->p, at / inner, at % inner));
}

static void dequantize_task(void *argument, size_t task, size_t worker) {
  (void)worker;
  convert_range(argument, dequantize_one, task);
}

static void quantize_task(void *argument, size_t task, size_t worker) {
  (void)worker;
  convert_range(argument, quantize_one, task);
}

/* Tasks are whole bytes of every type: EGI_TASK_ELEMENTS is a multiple of 8. */
static eg_status run(const egi_kernel_call *call, egi_task task) {
  quantize_run r = {.p = call->params, .x = &call->inputs[0], .scale = &call->inputs[1], .y = &call->outputs[0]};
  if (egi_call_has_input(call, 2)) r.zero = &call->inputs[2];
  r.task_elements = EGI_TASK_ELEMENTS;
  int64_t count = egi_tensor_count(r.y), n_tasks = (count + r.task_elements - 1) / r.task_elements;
  egi_pool_run(call->pool, (size_t)n_tasks, task, &r);
  return EG_OK;
}

eg_status egi_cpu_run_quantize(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  return run(call, quantize_task);
}

eg_status egi_cpu_run_dequantize(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  return run(call, dequantize_task);
}
