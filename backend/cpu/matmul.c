/* MatMul, Gemm and AddMatMul: C = beta·addend + alpha·A·B over broadcast batch dims, in tiles over the pool. Batch dims
 * that A and C carry and B does not are folded into the rows. Tiles depend on sizes alone, each is one product of
 * gemm.c (accumulation in C's type), so results do not depend on the number of threads. */
#include "backend/cpu/matmul.h"

/* One operand: index of its tensor in the call (-1: none), strides of the matrix and of the batch dims. */
typedef struct operand {
  int tensor;
  eg_dtype dtype;
  int64_t row_stride, column_stride;
  int64_t batch_strides[EGI_MAX_RANK];
} operand;

typedef struct matmul_params {
  const egi_isa *isa;
  int64_t m, n, k, n_batches;
  int batch_rank;
  int64_t batch_dims[EGI_MAX_RANK];
  operand operands[EGI_OPERAND_COUNT];
  double alpha, beta;
  int64_t tile_m, tile_n, tiles_m, tiles_n;
  size_t scratch_bytes; /* of one worker */
} matmul_params;

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

static bool is_narrow(eg_dtype dtype) {
  return dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

static bool takes_types(const matmul_params *p) {
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

/* Strides of an input, broadcast to the batch dims of the result, which are its dims but for the matrix's. */
static bool set_batch_strides(matmul_params *p, operand *factor, const egi_tensor *tensor, int n_batch_dims) {
  for (int i = 0; i < p->batch_rank; i++) {
    int own = i - (p->batch_rank - n_batch_dims);
    bool is_repeated = own < 0 || tensor->dims[own] == 1;
    if (!is_repeated && tensor->dims[own] != p->batch_dims[i]) return false;
    factor->batch_strides[i] = is_repeated ? 0 : tensor->strides[own];
  }
  return true;
}

/* Rows, columns and strides of a factor; a vector is a row on the left and a column on the right. */
static bool set_factor(matmul_params *p, int which, const egi_tensor *tensor, bool is_transposed, int64_t size[2]) {
  operand *factor = &p->operands[which];
  int rank = tensor->rank;
  if (rank == 0) return false;
  int64_t last = tensor->dims[rank - 1], last_stride = tensor->strides[rank - 1];
  if (rank == 1) {
    bool is_row = which == EGI_OPERAND_A;
    size[0] = is_row ? 1 : last;
    size[1] = is_row ? last : 1;
    factor->row_stride = is_row ? last : last_stride;
    factor->column_stride = is_row ? last_stride : 1;
    return true;
  }
  size[0] = is_transposed ? last : tensor->dims[rank - 2];
  size[1] = is_transposed ? tensor->dims[rank - 2] : last;
  factor->row_stride = is_transposed ? last_stride : tensor->strides[rank - 2];
  factor->column_stride = is_transposed ? tensor->strides[rank - 2] : last_stride;
  return set_batch_strides(p, factor, tensor, rank - 2);
}

/* The result: its batch dims come first, then m unless A is a vector, n unless B is one. */
static bool set_result(matmul_params *p, const egi_tensor *out, bool has_rows, bool has_columns) {
  operand *result = &p->operands[EGI_OPERAND_C];
  p->batch_rank = out->rank - has_rows - has_columns;
  if (p->batch_rank < 0) return false;
  p->n_batches = 1;
  for (int i = 0; i < p->batch_rank; i++) {
    p->batch_dims[i] = out->dims[i];
    result->batch_strides[i] = out->strides[i];
    p->n_batches *= out->dims[i];
  }
  int at = p->batch_rank;
  p->m = has_rows ? out->dims[at] : 1;
  result->row_stride = has_rows ? out->strides[at] : 0;
  at += has_rows;
  p->n = has_columns ? out->dims[at] : 1;
  result->column_stride = has_columns ? out->strides[at] : 1;
  return true;
}

/* The addend is broadcast to the whole result. */
static bool set_addend(matmul_params *p, const egi_tensor *addend, const egi_tensor *out, bool has_rows,
                       bool has_columns) {
  operand *term = &p->operands[EGI_OPERAND_ADDEND];
  int64_t strides[EGI_MAX_RANK];
  if (addend->rank > out->rank) return false;
  for (int i = 0; i < out->rank; i++) {
    int own = i - (out->rank - addend->rank);
    bool is_repeated = own < 0 || addend->dims[own] == 1;
    if (!is_repeated && addend->dims[own] != out->dims[i]) return false;
    strides[i] = is_repeated ? 0 : addend->strides[own];
  }
  for (int i = 0; i < p->batch_rank; i++) term->batch_strides[i] = strides[i];
  term->row_stride = has_rows ? strides[p->batch_rank] : 0;
  term->column_stride = has_columns ? strides[p->batch_rank + has_rows] : 0;
  return true;
}

/* Folds the last batch dim into the rows while B does not vary along it and the others step evenly. */
static void fold_batches(matmul_params *p) {
  while (p->batch_rank > 0) {
    int last = p->batch_rank - 1;
    int64_t size = p->batch_dims[last];
    bool is_even = p->operands[EGI_OPERAND_B].batch_strides[last] == 0 || size == 1;
    for (int i = 0; i < EGI_OPERAND_COUNT && is_even; i++) {
      const operand *o = &p->operands[i];
      if (i == EGI_OPERAND_B || o->tensor < 0 || size == 1 || p->m == 1) continue;
      is_even = o->batch_strides[last] == p->m * o->row_stride;
    }
    if (!is_even) return;
    for (int i = 0; i < EGI_OPERAND_COUNT; i++) {
      operand *o = &p->operands[i];
      if (i != EGI_OPERAND_B && p->m == 1 && size != 1) o->row_stride = o->batch_strides[last];
    }
    p->m *= size;
    p->n_batches = size > 0 ? p->n_batches / size : 0;
    p->batch_rank--;
  }
  if (p->batch_rank == 0) p->n_batches = 1;
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
    p->tile_m = even_tile(p->m, m, 8);
    p->tile_n = even_tile(p->n, n, 48);
    p->tiles_m = p->m ? ceil_divide(p->m, p->tile_m) : 0;
    p->tiles_n = p->n ? ceil_divide(p->n, p->tile_n) : 0;
    double tasks = (double)p->tiles_m * (double)p->tiles_n * (double)p->n_batches;
    double flops = 2.0 * (double)p->tile_m * (double)p->tile_n * (double)p->k;
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

static eg_status fail_shapes(const egi_kernel_plan *plan) {
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "shapes of the factors do not fit each other");
}

eg_status egi_matmul_prepare(egi_kernel_plan *plan, const egi_matmul_spec *spec) {
  matmul_params *p = EGI_NEW(plan->arena, matmul_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  const egi_tensor *a = &plan->inputs[spec->tensors[EGI_OPERAND_A]], *b = &plan->inputs[spec->tensors[EGI_OPERAND_B]];
  const egi_tensor *out = &plan->outputs[0];
  p->isa = egi_cpu_isa();
  p->alpha = spec->alpha;
  p->beta = spec->beta;
  for (int i = 0; i < EGI_OPERAND_COUNT; i++) {
    operand *o = &p->operands[i];
    o->tensor = spec->tensors[i];
    if (o->tensor >= 0) o->dtype = i == EGI_OPERAND_C ? out->dtype : plan->inputs[o->tensor].dtype;
  }
  if (!takes_types(p)) return egi_fail_types(plan);
  bool has_rows = a->rank > 1, has_columns = b->rank > 1;
  int64_t size_a[2], size_b[2];
  if (!set_result(p, out, has_rows, has_columns) || !set_factor(p, EGI_OPERAND_A, a, spec->transpose_a, size_a) ||
      !set_factor(p, EGI_OPERAND_B, b, spec->transpose_b, size_b) || size_a[0] != p->m || size_b[1] != p->n ||
      size_a[1] != size_b[0])
    return fail_shapes(plan);
  p->k = size_a[1];
  if (spec->tensors[EGI_OPERAND_ADDEND] >= 0 &&
      !set_addend(p, &plan->inputs[spec->tensors[EGI_OPERAND_ADDEND]], out, has_rows, has_columns))
    return fail_shapes(plan);
  fold_batches(p);
  choose_tiles(p);
  size_t workers = egi_pool_size(egi_context_pool(plan->ctx));
  p->scratch_bytes = (egi_product_scratch(p->tile_m, p->tile_n) + 63) / 64 * 64;
  if (!egi_size_multiply(p->scratch_bytes, workers, &plan->workspace_bytes))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_matmul(egi_kernel_plan *plan) {
  return egi_matmul_prepare(plan, &(const egi_matmul_spec){{0, 1, 0, -1}, false, false, 1.0, 0.0});
}

eg_status egi_cpu_prepare_gemm(egi_kernel_plan *plan) {
  const egi_node *node = egi_plan_node(plan);
  egi_matmul_spec spec = {{0, 1, 0, -1}, false, false, 1.0, 0.0};
  spec.transpose_a = egi_node_int(node, "transA", 0) != 0;
  spec.transpose_b = egi_node_int(node, "transB", 0) != 0;
  spec.alpha = (double)egi_node_float(node, "alpha", 1.0f);
  if (plan->inputs[0].rank != 2 || plan->inputs[1].rank != 2) return fail_shapes(plan);
  if (egi_plan_has_input(plan, 2)) {
    spec.tensors[EGI_OPERAND_ADDEND] = 2;
    spec.beta = (double)egi_node_float(node, "beta", 1.0f);
  }
  return egi_matmul_prepare(plan, &spec);
}

eg_status egi_cpu_prepare_add_matmul(egi_kernel_plan *plan) {
  egi_matmul_spec spec = {{1, 2, 0, 0}, false, false, 1.0, 1.0};
  spec.alpha = (double)egi_node_float(egi_plan_node(plan), "alpha", 1.0f);
  return egi_matmul_prepare(plan, &spec);
}

/* ---- run -------------------------------------------------------------------------------------------------------- */

typedef struct matmul_run {
  const matmul_params *params;
  const egi_kernel_call *call;
} matmul_run;

static egi_matrix operand_matrix(const matmul_run *run, int which, const int64_t *batch_index) {
  const operand *o = &run->params->operands[which];
  const egi_tensor *tensor = which == EGI_OPERAND_C ? &run->call->outputs[0] : &run->call->inputs[o->tensor];
  int64_t offset = 0;
  for (int i = 0; i < run->params->batch_rank; i++) offset += batch_index[i] * o->batch_strides[i];
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
  for (int i = p->batch_rank - 1; i >= 0; i--) {
    batch_index[i] = rest % p->batch_dims[i];
    rest /= p->batch_dims[i];
  }
  egi_matrix a = operand_matrix(run, EGI_OPERAND_A, batch_index), b = operand_matrix(run, EGI_OPERAND_B, batch_index);
  egi_matrix c = operand_matrix(run, EGI_OPERAND_C, batch_index);
  egi_product product = {
      smaller(p->tile_m, p->m - row), smaller(p->tile_n, p->n - column), p->k,     egi_matrix_part(&a, row, 0),
      egi_matrix_part(&b, 0, column), egi_matrix_part(&c, row, column),  p->alpha, p->beta};
  if (p->operands[EGI_OPERAND_ADDEND].tensor >= 0 && p->beta != 0) {
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
  egi_pool_run(call->pool, (size_t)(p->n_batches * p->tiles_m * p->tiles_n), run_tile, &run);
  return EG_OK;
}
