/* MatMul, Gemm, AddMatMul and the Linear whose weight lies plainly: which products cuBLASLt is given, and what is
 * copied for it before. All of that follows from types and strides when the plan is made. */
#include "backend/cuda/matmul.h"

typedef struct matmul_params {
  egi_matmul shape;
  bool is_plain;  /* no cuBLASLt */
  bool is_turned; /* the result is column-major: its transpose is computed */
  bool has_bias;  /* the addend is a bias of the columns */
  bool is_copied; /* the addend is written to the result first */
  eg_dtype dtype; /* of the factors */
  bool is_staged[2];
  size_t staged_at[2];
  egi_matmul_operand staged[2]; /* how they lie there */
  egi_cuda_batches batches;
} matmul_params;

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

static bool is_lt_type(eg_dtype dtype) {
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_BF16 || dtype == EG_DTYPE_F16;
}

static bool is_integer(eg_dtype dtype) {
  return dtype == EG_DTYPE_I32 || dtype == EG_DTYPE_U32 || dtype == EG_DTYPE_I64 || dtype == EG_DTYPE_U64;
}

static bool takes_types(const egi_matmul *shape) {
  eg_dtype out = shape->operands[EGI_OPERAND_C].dtype;
  bool is_known = is_lt_type(out) || out == EG_DTYPE_F64 || is_integer(out);
  for (int i = 0; i < EGI_OPERAND_COUNT && is_known; i++) {
    eg_dtype dtype = shape->operands[i].dtype;
    if (shape->operands[i].tensor >= 0) is_known = is_lt_type(out) ? is_lt_type(dtype) : dtype == out;
  }
  bool is_whole = shape->alpha == 1 && (shape->beta == 0 || shape->beta == 1);
  return is_known && (!is_integer(out) || is_whole);
}

/* Narrow factors of a float32 result are multiplied as they are when both have one type. */
static eg_dtype factor_type(const egi_matmul *shape) {
  eg_dtype a = shape->operands[EGI_OPERAND_A].dtype, b = shape->operands[EGI_OPERAND_B].dtype;
  eg_dtype c = shape->operands[EGI_OPERAND_C].dtype;
  return c == EG_DTYPE_F32 && a == b ? a : c;
}

/* A product of sizes m, n is that of the transposes, the other way round. */
static void turn(egi_matmul *shape) {
  egi_matmul_operand a = shape->operands[EGI_OPERAND_A];
  int64_t m = shape->m;
  shape->operands[EGI_OPERAND_A] = shape->operands[EGI_OPERAND_B];
  shape->operands[EGI_OPERAND_B] = a;
  shape->m = shape->n;
  shape->n = m;
  for (int i = 0; i < EGI_OPERAND_COUNT; i++) {
    egi_matmul_operand *o = &shape->operands[i];
    int64_t row_stride = o->row_stride;
    o->row_stride = o->column_stride;
    o->column_stride = row_stride;
  }
}

static bool is_row_major(const egi_matmul_operand *o, int64_t rows, int64_t columns) {
  return (o->column_stride == 1 || columns == 1) && (o->row_stride >= columns || rows == 1);
}

static size_t align_up(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

/* Room for a factor in the workspace: the batch dims it has, each matrix row-major or column-major as before. */
static void stage_factor(matmul_params *p, int which, int64_t rows, int64_t columns, size_t *workspace_bytes) {
  const egi_matmul_operand *o = &p->shape.operands[which];
  egi_matmul_operand *s = &p->staged[which];
  bool is_dense = egi_cuda_is_dense(rows, columns, o->row_stride, o->column_stride);
  int64_t step = rows * columns;
  p->is_staged[which] = o->dtype != p->dtype || !is_dense;
  if (!p->is_staged[which]) return;
  bool is_by_rows = o->column_stride <= o->row_stride;
  *s = (egi_matmul_operand){.tensor = o->tensor,
                            .dtype = p->dtype,
                            .row_stride = is_by_rows ? columns : 1,
                            .column_stride = is_by_rows ? 1 : rows};
  for (int i = p->shape.batch_rank - 1; i >= 0; i--) {
    if (o->batch_strides[i] == 0) continue;
    s->batch_strides[i] = step;
    step *= p->shape.batch_dims[i];
  }
  p->staged_at[which] = *workspace_bytes;
  *workspace_bytes += align_up((size_t)step * (p->dtype == EG_DTYPE_F32 ? 4 : 2));
}

static bool varies_by_batch(const egi_matmul_operand *o, int batch_rank) {
  for (int i = 0; i < batch_rank; i++)
    if (o->batch_strides[i] != 0) return true;
  return false;
}

static void choose_addend(matmul_params *p) {
  const egi_matmul *shape = &p->shape;
  const egi_matmul_operand *o = &shape->operands[EGI_OPERAND_ADDEND], *c = &shape->operands[EGI_OPERAND_C];
  if (o->tensor < 0) return;
  bool is_vector = o->row_stride == 0 && o->column_stride == 1 && shape->m > 1 && shape->n > 1;
  p->has_bias = is_vector && !varies_by_batch(o, shape->batch_rank) && o->dtype == c->dtype && shape->beta == 1 &&
                shape->n_batches == 1 && !p->is_turned;
  p->is_copied = !p->has_bias && (o->dtype != c->dtype || !is_row_major(o, shape->m, shape->n));
}

eg_status egi_cuda_matmul_prepare(egi_kernel_plan *plan, const egi_matmul_spec *spec) {
  matmul_params *p = EGI_NEW(plan->arena, matmul_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_matmul_read(plan, spec, &p->shape));
  if (!takes_types(&p->shape)) return egi_fail_types(plan);
  const egi_matmul_operand *c = &p->shape.operands[EGI_OPERAND_C];
  plan->params = p;
  p->is_turned = !is_row_major(c, p->shape.m, p->shape.n);
  if (p->is_turned) turn(&p->shape);
  p->is_plain = !is_lt_type(c->dtype) || p->shape.k == 0 || !is_row_major(c, p->shape.m, p->shape.n);
  p->batches = (egi_cuda_batches){.rank = p->shape.batch_rank, .count = p->shape.n_batches};
  memcpy(p->batches.dims, p->shape.batch_dims, sizeof p->batches.dims);
  if (p->is_plain) return EG_OK;
  p->dtype = factor_type(&p->shape);
  stage_factor(p, EGI_OPERAND_A, p->shape.m, p->shape.k, &plan->workspace_bytes);
  stage_factor(p, EGI_OPERAND_B, p->shape.k, p->shape.n, &plan->workspace_bytes);
  choose_addend(p);
  return EG_OK;
}

eg_status egi_cuda_prepare_matmul(egi_kernel_plan *plan) {
  const egi_matmul_spec spec = egi_matmul_spec_of_matmul();
  return egi_cuda_matmul_prepare(plan, &spec);
}

eg_status egi_cuda_prepare_gemm(egi_kernel_plan *plan) {
  egi_matmul_spec spec;
  EG_TRY(egi_matmul_spec_of_gemm(plan, &spec));
  return egi_cuda_matmul_prepare(plan, &spec);
}

eg_status egi_cuda_prepare_add_matmul(egi_kernel_plan *plan) {
  const egi_matmul_spec spec = egi_matmul_spec_of_add_matmul(plan);
  return egi_cuda_matmul_prepare(plan, &spec);
}

/* ---- run -------------------------------------------------------------------------------------------------------- */

static egi_cuda_operand operand_of(const matmul_params *p, const egi_kernel_call *call, int which) {
  const egi_matmul_operand *o = &p->shape.operands[which];
  egi_cuda_operand out = {NULL, o->dtype, o->row_stride, o->column_stride, {0}};
  if (o->tensor >= 0) out.data = which == EGI_OPERAND_C ? call->outputs[0].data : call->inputs[o->tensor].data;
  memcpy(out.batch_strides, o->batch_strides, sizeof out.batch_strides);
  return out;
}

static eg_status run_plain(eg_context *ctx, const matmul_params *p, const egi_kernel_call *call) {
  egi_cuda_plain_product product = {.m = p->shape.m,
                                    .n = p->shape.n,
                                    .k = p->shape.k,
                                    .batches = p->batches,
                                    .a = operand_of(p, call, EGI_OPERAND_A),
                                    .b = operand_of(p, call, EGI_OPERAND_B),
                                    .c = operand_of(p, call, EGI_OPERAND_C),
                                    .alpha = p->shape.alpha,
                                    .beta = p->shape.beta};
  if (p->shape.beta != 0) product.addend = operand_of(p, call, EGI_OPERAND_ADDEND);
  return egi_cuda_multiply_plainly(ctx, &product, egi_cuda_stream_of(call));
}

/* The factor as cuBLASLt takes it, copied where it has to be. */
static eg_status open_factor(eg_context *ctx, const matmul_params *p, const egi_kernel_call *call, int which,
                             egi_cuda_operand *out) {
  egi_cuda_operand operands[2] = {operand_of(p, call, which)};
  egi_cuda_batches own = p->batches;
  *out = operands[0];
  if (!p->is_staged[which]) return EG_OK;
  const egi_matmul_operand *s = &p->staged[which];
  const int64_t size[2] = {which == EGI_OPERAND_A ? p->shape.m : p->shape.k,
                           which == EGI_OPERAND_A ? p->shape.k : p->shape.n};
  operands[1] =
      (egi_cuda_operand){(char *)call->workspace + p->staged_at[which], s->dtype, s->row_stride, s->column_stride, {0}};
  memcpy(operands[1].batch_strides, s->batch_strides, sizeof s->batch_strides);
  for (int i = 0; i < own.rank; i++) {
    if (operands[0].batch_strides[i] != 0) continue;
    own.count = own.dims[i] > 0 ? own.count / own.dims[i] : 0;
    own.dims[i] = 1;
  }
  *out = operands[1];
  return egi_cuda_copy_matrices(ctx, operands, &own, size, egi_cuda_stream_of(call));
}

static egi_cuda_matrices matrices_at(const egi_cuda_operand *o, const egi_cuda_batches *batches, int64_t outer) {
  int last = batches->rank - 1;
  int64_t offset = 0;
  for (int i = last - 1; i >= 0; i--) {
    offset += outer % batches->dims[i] * o->batch_strides[i];
    outer /= batches->dims[i];
  }
  int64_t step = last >= 0 ? o->batch_strides[last] : 0;
  char *data = o->data == NULL ? NULL : (char *)o->data + offset * (int64_t)egi_element_bytes(o->dtype);
  return (egi_cuda_matrices){data, o->dtype, o->row_stride, o->column_stride, step};
}

/* The last batch dim is one call, the dims before it are gone through. */
static eg_status run_products(eg_context *ctx, const matmul_params *p, const egi_kernel_call *call,
                              const egi_cuda_operand operands[EGI_OPERAND_COUNT]) {
  int64_t inner = p->batches.rank > 0 ? p->batches.dims[p->batches.rank - 1] : 1;
  egi_cuda_product product = {.m = p->shape.m,
                              .n = p->shape.n,
                              .k = p->shape.k,
                              .n_batches = inner,
                              .alpha = (float)p->shape.alpha,
                              .beta = (float)p->shape.beta};
  if (p->has_bias) product.bias = operands[EGI_OPERAND_ADDEND].data;
  for (int64_t outer = 0; outer < p->batches.count / inner; outer++) {
    product.a = matrices_at(&operands[EGI_OPERAND_A], &p->batches, outer);
    product.b = matrices_at(&operands[EGI_OPERAND_B], &p->batches, outer);
    product.c = matrices_at(&operands[EGI_OPERAND_C], &p->batches, outer);
    product.addend = matrices_at(&operands[p->is_copied ? EGI_OPERAND_C : EGI_OPERAND_ADDEND], &p->batches, outer);
    if (p->has_bias || p->shape.beta == 0) product.addend.data = NULL;
    EG_TRY(egi_cuda_multiply(ctx, &product, egi_cuda_stream_of(call)));
  }
  return EG_OK;
}

eg_status egi_cuda_run_matmul(eg_context *ctx, const egi_kernel_call *call) {
  const matmul_params *p = call->params;
  egi_cuda_operand operands[EGI_OPERAND_COUNT];
  if (p->shape.m == 0 || p->shape.n == 0 || p->batches.count == 0) return EG_OK;
  if (p->is_plain) return run_plain(ctx, p, call);
  for (int which = 0; which < EGI_OPERAND_C; which++) EG_TRY(open_factor(ctx, p, call, which, &operands[which]));
  for (int which = EGI_OPERAND_C; which < EGI_OPERAND_COUNT; which++) operands[which] = operand_of(p, call, which);
  if (p->is_copied) { /* to where the result comes */
    const egi_cuda_operand copies[2] = {operands[EGI_OPERAND_ADDEND], operands[EGI_OPERAND_C]};
    EG_TRY(egi_cuda_copy_matrices(ctx, copies, &p->batches, (const int64_t[2]){p->shape.m, p->shape.n},
                                  egi_cuda_stream_of(call)));
  }
  return run_products(ctx, p, call, operands);
}
