/* What matrix products share, whatever the backend: sizes and strides of C = beta·addend + alpha·A·B. */
#include "backend/matmul.h"

/* ---- operands --------------------------------------------------------------------------------------------------- */

/* Strides of an input, broadcast to the batch dims of the result, which are its dims but for the matrix's. */
static bool set_batch_strides(egi_matmul *p, egi_matmul_operand *factor, const egi_tensor *tensor, int n_batch_dims) {
  for (int i = 0; i < p->batch_rank; i++) {
    int own = i - (p->batch_rank - n_batch_dims);
    bool is_repeated = own < 0 || tensor->dims[own] == 1;
    if (!is_repeated && tensor->dims[own] != p->batch_dims[i]) return false;
    factor->batch_strides[i] = is_repeated ? 0 : tensor->strides[own];
  }
  return true;
}

/* Rows, columns and strides of a factor; a vector is a row on the left and a column on the right. */
static bool set_factor(egi_matmul *p, int which, const egi_tensor *tensor, bool is_transposed, int64_t size[2]) {
  egi_matmul_operand *factor = &p->operands[which];
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
static bool set_result(egi_matmul *p, const egi_tensor *out, bool has_rows, bool has_columns) {
  egi_matmul_operand *result = &p->operands[EGI_OPERAND_C];
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
static bool set_addend(egi_matmul *p, const egi_tensor *addend, const egi_tensor *out, bool has_rows,
                       bool has_columns) {
  egi_matmul_operand *term = &p->operands[EGI_OPERAND_ADDEND];
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
static void fold_batches(egi_matmul *p) {
  while (p->batch_rank > 0) {
    int last = p->batch_rank - 1;
    int64_t size = p->batch_dims[last];
    bool is_even = p->operands[EGI_OPERAND_B].batch_strides[last] == 0 || size == 1;
    for (int i = 0; i < EGI_OPERAND_COUNT && is_even; i++) {
      const egi_matmul_operand *o = &p->operands[i];
      if (i == EGI_OPERAND_B || o->tensor < 0 || size == 1 || p->m == 1) continue;
      is_even = o->batch_strides[last] == p->m * o->row_stride;
    }
    if (!is_even) return;
    for (int i = 0; i < EGI_OPERAND_COUNT; i++) {
      egi_matmul_operand *o = &p->operands[i];
      if (i != EGI_OPERAND_B && p->m == 1 && size != 1) o->row_stride = o->batch_strides[last];
    }
    p->m *= size;
    p->n_batches = size > 0 ? p->n_batches / size : 0;
    p->batch_rank--;
  }
  if (p->batch_rank == 0) p->n_batches = 1;
}

static eg_status fail_shapes(const egi_kernel_plan *plan) {
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "shapes of the factors do not fit each other");
}

eg_status egi_matmul_read(const egi_kernel_plan *plan, const egi_matmul_spec *spec, egi_matmul *out) {
  egi_matmul *p = out;
  const egi_tensor *a = &plan->inputs[spec->tensors[EGI_OPERAND_A]], *b = &plan->inputs[spec->tensors[EGI_OPERAND_B]];
  const egi_tensor *result = &plan->outputs[0];
  *p = (egi_matmul){.alpha = spec->alpha, .beta = spec->beta};
  for (int i = 0; i < EGI_OPERAND_COUNT; i++) {
    egi_matmul_operand *o = &p->operands[i];
    o->tensor = spec->tensors[i];
    if (o->tensor >= 0) o->dtype = i == EGI_OPERAND_C ? result->dtype : plan->inputs[o->tensor].dtype;
  }
  bool has_rows = a->rank > 1, has_columns = b->rank > 1;
  int64_t size_a[2], size_b[2];
  if (!set_result(p, result, has_rows, has_columns) || !set_factor(p, EGI_OPERAND_A, a, spec->transpose_a, size_a) ||
      !set_factor(p, EGI_OPERAND_B, b, spec->transpose_b, size_b) || size_a[0] != p->m || size_b[1] != p->n ||
      size_a[1] != size_b[0])
    return fail_shapes(plan);
  p->k = size_a[1];
  if (spec->tensors[EGI_OPERAND_ADDEND] >= 0 &&
      !set_addend(p, &plan->inputs[spec->tensors[EGI_OPERAND_ADDEND]], result, has_rows, has_columns))
    return fail_shapes(plan);
  fold_batches(p);
  return EG_OK;
}

/* ---- operators -------------------------------------------------------------------------------------------------- */

egi_matmul_spec egi_matmul_spec_of_matmul(void) {
  return (egi_matmul_spec){{0, 1, 0, -1}, false, false, 1.0, 0.0};
}

eg_status egi_matmul_spec_of_gemm(const egi_kernel_plan *plan, egi_matmul_spec *out_spec) {
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
  *out_spec = spec;
  return EG_OK;
}

egi_matmul_spec egi_matmul_spec_of_add_matmul(const egi_kernel_plan *plan) {
  egi_matmul_spec spec = {{1, 2, 0, 0}, false, false, 1.0, 1.0};
  spec.alpha = (double)egi_node_float(egi_plan_node(plan), "alpha", 1.0f);
  return spec;
}

eg_status egi_matmul_spec_of_linear(const egi_kernel_plan *plan, egi_matmul_spec *out_spec) {
  bool has_bias = egi_plan_has_input(plan, EGI_LINEAR_BIAS);
  if (plan->inputs[EGI_LINEAR_WEIGHT].rank != 2)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the weight is no matrix");
  *out_spec = (egi_matmul_spec){
      {EGI_LINEAR_X, EGI_LINEAR_WEIGHT, 0, has_bias ? EGI_LINEAR_BIAS : -1}, false, true, 1.0, has_bias ? 1.0 : 0.0};
  return EG_OK;
}
