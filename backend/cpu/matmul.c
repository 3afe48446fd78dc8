/* MatMul, Gemm and AddMatMul (backend/matmul.h) in tiles over the pool. Tiles depend on sizes alone, each is one
 * product of gemm.c (accumulation in C's type), so results do not depend on the number of threads. */
#include "backend/cpu/matmul.h"

typedef struct matmul_params {
  egi_matmul shape;
  const egi_isa *isa;
  int64_t tile_m, tile_n, tiles_m, tiles_n;
  size_t scratch_bytes; /* of one worker */
} matmul_params;

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

static bool is_narrow(eg_dtype dtype) {
  return dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

static bool takes_types(const egi_matmul *p) {
  eg_dtype out = p->operands[EGI_OPERAND_C].dtype;
  switch (out) {
  case EG_DTYPE_F32:
  case EG_DTYPE_F64:
    break;
  case EG_DTYPE_I32:
  case EG_DTYPE_U32:
  case EG_DTYPE_I64:
  case EG_DTYPE_U64:
    if (p->alpha != 1 || (p->beta != 0 && p->beta != 1)) return false;
    break;
  default:
    return false;
  }
  for (int i = 0; i < EGI_OPERAND_COUNT; i++) {
    eg_dtype dtype = p->operands[i].dtype;
    if (p->operands[i].tensor < 0 || dtype == out) continue;
    if (!(out == EG_DTYPE_F32 && i != EGI_OPERAND_C && is_narrow(dtype))) return false;
  }
  return true;
}

static int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* Equal parts of at most `largest`, multiples of `unit` (of the kernel's register blocks). */
static int64_t even_tile(int64_t size, int64_t largest, int64_t unit) {
  if (size <= largest) return size;
  int64_t part = ceil_divide(size, ceil_divide(size, largest));
  return ceil_divide(part, unit) * unit;
}

/* A tile packs (and converts) its columns of B once and reads A as it lies, so tiles are tall; they get smaller where
 * many workers would go idle, the products of an adapter's rank in two. */
static void choose_tiles(matmul_params *p) {
  int64_t m = 1024, n = 384;
  for (;;) {
    p->tile_m = even_tile(p->shape.m, m, 8);
    p->tile_n = even_tile(p->shape.n, n, 48);
    p->tiles_m = p->shape.m ? ceil_divide(p->shape.m, p->tile_m) : 0;
    p->tiles_n = p->shape.n ? ceil_divide(p->shape.n, p->tile_n) : 0;
    double tasks = (double)p->tiles_m * (double)p->tiles_n * (double)p->shape.n_batches;
    double flops = 2.0 * (double)p->tile_m * (double)p->tile_n * (double)p->shape.k;
    bool is_splittable = (tasks < 16 && flops > 2e7) || (tasks < 8 && flops > 2e6) || (tasks < 2 && flops > 4e5);
    if (!is_splittable || (m <= 64 && n <= 48)) return;
    bool splits_n = p->tile_n > 48 || p->tile_m <= 64;
    if (splits_n && n > 48)
      n /= 2;
    else if (m > 64)
      m /= 2;
    else
      n /= 2;
  }
}

eg_status egi_matmul_prepare(egi_kernel_plan *plan, const egi_matmul_spec *spec) {
  matmul_params *p = EGI_NEW(plan->arena, matmul_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  EG_TRY(egi_matmul_read(plan, spec, &p->shape));
  if (!takes_types(&p->shape)) return egi_fail_types(plan);
  p->isa = egi_cpu_isa();
  choose_tiles(p);
  size_t workers = egi_pool_size(egi_context_pool(plan->ctx));
  p->scratch_bytes = (egi_product_scratch(p->tile_m, p->tile_n) + 63) / 64 * 64;
  if (!egi_size_multiply(p->scratch_bytes, workers, &plan->workspace_bytes))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_matmul(egi_kernel_plan *plan) {
  const egi_matmul_spec spec = egi_matmul_spec_of_matmul();
  return egi_matmul_prepare(plan, &spec);
}

eg_status egi_cpu_prepare_gemm(egi_kernel_plan *plan) {
  egi_matmul_spec spec;
  EG_TRY(egi_matmul_spec_of_gemm(plan, &spec));
  return egi_matmul_prepare(plan, &spec);
}

eg_status egi_cpu_prepare_add_matmul(egi_kernel_plan *plan) {
  const egi_matmul_spec spec = egi_matmul_spec_of_add_matmul(plan);
  return egi_matmul_prepare(plan, &spec);
}

/* ---- run -------------------------------------------------------------------------------------------------------- */

typedef struct matmul_run {
  const matmul_params *params;
  const egi_kernel_call *call;
} matmul_run;

static egi_matrix operand_matrix(const matmul_run *run, int which, const int64_t *batch_index) {
  const egi_matmul_operand *o = &run->params->shape.operands[which];
  const egi_tensor *tensor = which == EGI_OPERAND_C ? &run->call->outputs[0] : &run->call->inputs[o->tensor];
  int64_t offset = 0;
  for (int i = 0; i < run->params->shape.batch_rank; i++) offset += batch_index[i] * o->batch_strides[i];
  return (egi_matrix){(char *)tensor->data + offset * (int64_t)egi_element_bytes(o->dtype), o->dtype, o->row_stride,
                      o->column_stride};
}

/* Puts the addend where the product is added to it. */
static void copy_addend(const egi_isa *isa, const egi_matrix *addend, const egi_matrix *c, int64_t m, int64_t n) {
  size_t bytes = egi_element_bytes(c->dtype);
  for (int64_t i = 0; i < m; i++) {
    if (c->column_stride == 1 && addend->column_stride != 0) {
      egi_matrix row = egi_matrix_part(addend, i, 0);
      egi_matrix_copy(isa, &row, (const int64_t[2]){1, n}, egi_matrix_at(c, i, 0), n);
      continue;
    }
    for (int64_t j = 0; j < n; j++) {
      egi_matrix element = egi_matrix_part(addend, i, j);
      uint64_t value = 0;
      egi_matrix_copy(isa, &element, (const int64_t[2]){1, 1}, &value, 1);
      memcpy(egi_matrix_at(c, i, j), &value, bytes);
    }
  }
}

static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static void run_tile(void *argument, size_t index, size_t worker) {
  const matmul_run *run = argument;
  const matmul_params *p = run->params;
  int64_t rest = (int64_t)index, batch_index[EGI_MAX_RANK];
  int64_t row = rest % p->tiles_m * p->tile_m;
  rest /= p->tiles_m;
  int64_t column = rest % p->tiles_n * p->tile_n;
  rest /= p->tiles_n;
  for (int i = p->shape.batch_rank - 1; i >= 0; i--) {
    batch_index[i] = rest % p->shape.batch_dims[i];
    rest /= p->shape.batch_dims[i];
  }
  egi_matrix a = operand_matrix(run, EGI_OPERAND_A, batch_index), b = operand_matrix(run, EGI_OPERAND_B, batch_index);
  egi_matrix c = operand_matrix(run, EGI_OPERAND_C, batch_index);
  egi_product product = {smaller(p->tile_m, p->shape.m - row),
                         smaller(p->tile_n, p->shape.n - column),
                         p->shape.k,
                         egi_matrix_part(&a, row, 0),
                         egi_matrix_part(&b, 0, column),
                         egi_matrix_part(&c, row, column),
                         p->shape.alpha,
                         p->shape.beta};
  if (p->shape.operands[EGI_OPERAND_ADDEND].tensor >= 0 && p->shape.beta != 0) {
    egi_matrix addend = operand_matrix(run, EGI_OPERAND_ADDEND, batch_index);
    addend = egi_matrix_part(&addend, row, column);
    if (addend.data != product.c.data) copy_addend(p->isa, &addend, &product.c, product.m, product.n);
  }
  egi_product_run(p->isa, &product, (char *)run->call->workspace + worker * p->scratch_bytes);
}

eg_status egi_cpu_run_matmul(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const matmul_params *p = call->params;
  matmul_run run = {p, call};
  egi_pool_run(call->pool, (size_t)(p->shape.n_batches * p->tiles_m * p->tiles_n), run_tile, &run);
  return EG_OK;
}
