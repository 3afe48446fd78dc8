/* Linear and LinearGrad. A plain weight is a matrix product with the weight read as its transpose. Of a quantised one
 * each task turns blocks of rows to float32 in its scratch and multiplies with those (f32 sums over blocks, in order):
 * the whole weight never stands in float32. Tasks depend on sizes alone, so results do not depend on the number of
 * threads. */
#include "backend/cpu/matmul.h"
#include "backend/cpu/quantised.h"

enum { TILE_ROWS = 1024, TILE_COLUMNS = 96 };
#define BUFFER_BYTES (EGI_QUANTISED_BLOCK * TILE_COLUMNS * sizeof(float))

/* Linear states its operands in the order of graph/linear.h. */
static const uint8_t own_inputs[EGI_LINEAR_INPUTS] = {0, 1, 2, 3, 4, 5, 6};

typedef struct linear_params {
  const void *plain; /* params of the matrix product; NULL: quantised */
  const egi_isa *isa;
  egi_quantised_weight weight;
  bool is_transposed; /* columns of the result are rows of the stored matrix */
  int64_t m, n, k, n_batches;
  int batch_rank; /* outer dims that do not fold into the rows */
  int64_t batch_dims[EGI_MAX_RANK], x_strides[EGI_MAX_RANK], y_strides[EGI_MAX_RANK];
  int64_t x_row, x_column, y_row, y_column;
  bool has_term; /* the bias of Linear, or what is added to the result of LinearGrad */
  int64_t term_strides[EGI_MAX_RANK], term_row, term_column;
  int64_t tile_m, tiles_m, tiles_n;
  size_t scratch_bytes; /* of one worker */
} linear_params;

static int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* ---- prepare ------------------------------------------------------------------------------------------------------
 */

/* Rows are the last but one dim; outer dims that step evenly with it fold into it. */
static void read_rows(linear_params *p, const egi_tensor *x, const egi_tensor *y, const egi_tensor *term) {
  int rank = x->rank;
  p->x_column = x->strides[rank - 1];
  p->y_column = y->strides[rank - 1];
  p->m = rank > 1 ? x->dims[rank - 2] : 1;
  p->x_row = rank > 1 ? x->strides[rank - 2] : 0;
  p->y_row = rank > 1 ? y->strides[rank - 2] : 0;
  p->term_column = term->strides[rank - 1];
  p->term_row = rank > 1 ? term->strides[rank - 2] : 0;
  int outer = rank > 2 ? rank - 2 : 0;
  while (outer > 0) {
    int i = outer - 1;
    bool is_even =
        x->strides[i] == p->m * p->x_row && y->strides[i] == p->m * p->y_row && term->strides[i] == p->m * p->term_row;
    if (p->m == 1) {
      p->x_row = x->strides[i], p->y_row = y->strides[i], p->term_row = term->strides[i];
      is_even = true;
    }
    if (!is_even && x->dims[i] != 1) break;
    p->m *= x->dims[i];
    outer--;
  }
  p->batch_rank = outer;
  p->n_batches = 1;
  for (int i = 0; i < outer; i++) {
    p->batch_dims[i] = x->dims[i];
    p->x_strides[i] = x->strides[i];
    p->y_strides[i] = y->strides[i];
    p->term_strides[i] = term->strides[i];
    p->n_batches *= x->dims[i];
  }
}

static eg_status reserve_scratch(egi_kernel_plan *plan, linear_params *p) {
  size_t workers = 0;
  p->scratch_bytes = (egi_product_scratch(p->tile_m, TILE_COLUMNS) + 63) / 64 * 64 + BUFFER_BYTES;
  if (!egi_size_multiply(p->scratch_bytes, egi_pool_size(egi_context_pool(plan->ctx)), &workers) ||
      !egi_size_add(p->weight.copies_bytes, workers, &plan->workspace_bytes))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
  return EG_OK;
}

/* What is added, in the shape of the result: a bias is one row for all. */
static eg_status read_term(const egi_kernel_plan *plan, bool is_forward, egi_tensor *out) {
  const egi_tensor *term = &plan->inputs[EGI_LINEAR_BIAS], *y = &plan->outputs[0];
  int last = y->rank - 1;
  bool is_bias = is_forward && term->rank != y->rank;
  bool fits = is_bias ? term->rank == 1 && term->dims[0] == y->dims[last] : term->rank == y->rank;
  if (term->dtype != EG_DTYPE_F32 && term->dtype != EG_DTYPE_F16 && term->dtype != EG_DTYPE_BF16)
    return egi_fail_types(plan);
  for (int i = 0; i <= last && fits && !is_bias; i++) fits = term->dims[i] == y->dims[i];
  if (!fits) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "what is added does not fit the result");
  for (int i = 0; i < last; i++) out->strides[i] = is_bias ? 0 : term->strides[i];
  out->strides[last] = term->strides[is_bias ? 0 : last];
  return EG_OK;
}

static eg_status prepare_quantised(egi_kernel_plan *plan, linear_params *p) {
  const egi_tensor *x = &plan->inputs[EGI_LINEAR_X], *y = &plan->outputs[0];
  egi_tensor term = *y;
  if (x->dtype != EG_DTYPE_F32 || y->dtype != EG_DTYPE_F32 || x->rank < 1) return egi_fail_types(plan);
  p->isa = egi_cpu_isa();
  p->k = x->dims[x->rank - 1];
  p->n = y->dims[y->rank - 1];
  bool is_forward = egi_plan_node(plan)->op == EGI_OP_Linear;
  EG_TRY(egi_quantised_read(plan, own_inputs, is_forward ? p->n : p->k, is_forward ? p->k : p->n, &p->weight));
  p->is_transposed = p->weight.is_turned != is_forward;
  p->has_term = egi_plan_has_input(plan, EGI_LINEAR_BIAS);
  if (p->has_term) EG_TRY(read_term(plan, is_forward, &term));
  read_rows(p, x, y, &term);
  p->tiles_m = ceil_divide(p->m, TILE_ROWS);
  p->tile_m = p->tiles_m > 0 ? ceil_divide(p->m, p->tiles_m) : 0;
  p->tiles_n = ceil_divide(p->n, TILE_COLUMNS);
  return reserve_scratch(plan, p);
}

eg_status egi_cpu_prepare_linear(egi_kernel_plan *plan) {
  linear_params *p = EGI_NEW(plan->arena, linear_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  if (egi_linear_storage_of(egi_plan_node(plan)) == EGI_LINEAR_PLAIN) {
    egi_matmul_spec spec;
    EG_TRY(egi_matmul_spec_of_linear(plan, &spec));
    EG_TRY(egi_matmul_prepare(plan, &spec));
    p->plain = plan->params;
  } else {
    EG_TRY(prepare_quantised(plan, p));
  }
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_linear_grad(egi_kernel_plan *plan) {
  linear_params *p = EGI_NEW(plan->arena, linear_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  EG_TRY(prepare_quantised(plan, p));
  plan->params = p;
  return EG_OK;
}

/* ---- run -------------------------------------------------------------------------------------------------------- */

typedef struct linear_run {
  const linear_params *p;
  const egi_kernel_call *call;
  egi_quantised matrix; /* with its data */
} linear_run;

static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* What is added, in the rows of the tile. */
static void put_term(const linear_run *run, const egi_matrix *term, const egi_matrix *c, const int64_t size[2]) {
  int64_t n = size[1];
  for (int64_t i = 0; i < size[0]; i++) {
    const egi_matrix row = egi_matrix_part(term, i, 0);
    if (c->column_stride == 1) {
      egi_matrix_copy(run->p->isa, &row, (const int64_t[2]){1, n}, egi_matrix_at(c, i, 0), n);
      continue;
    }
    for (int64_t j = 0; j < n; j++) {
      const egi_matrix element = egi_matrix_part(&row, 0, j);
      egi_matrix_copy(run->p->isa, &element, (const int64_t[2]){1, 1}, egi_matrix_at(c, i, j), 1);
    }
  }
}

static void run_tile(void *argument, size_t index, size_t worker) {
  const linear_run *run = argument;
  const linear_params *p = run->p;
  char *scratch = (char *)run->call->workspace + p->weight.copies_bytes + worker * p->scratch_bytes;
  int64_t rest = (int64_t)index, x_offset = 0, y_offset = 0, term_offset = 0;
  int64_t row = rest % p->tiles_m * p->tile_m;
  rest /= p->tiles_m;
  int64_t column = rest % p->tiles_n * TILE_COLUMNS;
  rest /= p->tiles_n;
  for (int i = p->batch_rank - 1; i >= 0; i--) {
    x_offset += rest % p->batch_dims[i] * p->x_strides[i];
    y_offset += rest % p->batch_dims[i] * p->y_strides[i];
    term_offset += rest % p->batch_dims[i] * p->term_strides[i];
    rest /= p->batch_dims[i];
  }
  egi_matrix a = {(float *)run->call->inputs[0].data + x_offset, EG_DTYPE_F32, p->x_row, p->x_column};
  egi_matrix c = {(float *)run->call->outputs[0].data + y_offset, EG_DTYPE_F32, p->y_row, p->y_column};
  c = egi_matrix_part(&c, row, column);
  egi_product product = {.m = smaller(p->tile_m, p->m - row), .n = smaller(TILE_COLUMNS, p->n - column), .c = c};
  product.alpha = 1.0;
  if (p->has_term) {
    const egi_tensor *tensor = &run->call->inputs[EGI_LINEAR_BIAS];
    egi_matrix term = {tensor->data, tensor->dtype, p->term_row, p->term_column};
    term.data = (char *)tensor->data + term_offset * (int64_t)egi_element_bytes(tensor->dtype);
    term = egi_matrix_part(&term, row, column);
    put_term(run, &term, &c, (const int64_t[2]){product.m, product.n});
    product.beta = 1.0;
  }
  product.k = p->k;
  product.a = egi_matrix_part(&a, row, 0);
  const egi_quantised_product whole = {.matrix = &run->matrix,
                                       .is_transposed = p->is_transposed,
                                       .product = product,
                                       .column = column,
                                       .buffer = (float *)(void *)(scratch + p->scratch_bytes - BUFFER_BYTES),
                                       .scratch = scratch};
  egi_quantised_multiply(p->isa, &whole);
}

eg_status egi_cpu_run_linear(eg_context *ctx, const egi_kernel_call *call) {
  const linear_params *p = call->params;
  if (p->plain != NULL) {
    egi_kernel_call plain = *call;
    plain.params = p->plain;
    return egi_cpu_run_matmul(ctx, &plain);
  }
  linear_run run = {.p = p, .call = call};
  EG_TRY(egi_quantised_open(ctx, &p->weight, call, call->workspace, &run.matrix));
  egi_pool_run(call->pool, (size_t)(p->n_batches * p->tiles_m * p->tiles_n), run_tile, &run);
  return EG_OK;
}
