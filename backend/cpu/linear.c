/* Linear and LinearGrad. A plain weight is a matrix product with the weight read as its transpose. Of a quantised one
 * each task turns blocks of rows to float32 in its scratch and multiplies with those (f32 sums over blocks of BLOCK
 * products, in order): the whole weight never stands in float32. Tasks depend on sizes alone, so results do not depend
 * on the number of threads. */
#include "backend/cpu/dequantise.h"
#include "backend/cpu/matmul.h"
#include "graph/linear.h"

enum { BLOCK = 256, TILE_ROWS = 1024, TILE_COLUMNS = 96 };

typedef struct linear_params {
  const void *plain; /* params of the matrix product; NULL: quantised */
  const egi_isa *isa;
  egi_quantised matrix;                  /* without pointers to data */
  bool is_transposed;                    /* columns of the result are rows of the stored matrix */
  size_t copy_offset[EGI_LINEAR_INPUTS]; /* in the workspace, of operands that are not contiguous; 0: none */
  int64_t m, n, k, n_batches;
  int batch_rank; /* outer dims that do not fold into the rows */
  int64_t batch_dims[EGI_MAX_RANK], x_strides[EGI_MAX_RANK], y_strides[EGI_MAX_RANK];
  int64_t x_row, x_column, y_row, y_column;
  int64_t tile_m, tiles_m, tiles_n;
  size_t copies_bytes, scratch_bytes; /* scratch: of one worker */
} linear_params;

/* ---- prepare: the matrix ---------------------------------------------------------------------------------------- */

static int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

static bool has_count(const egi_kernel_plan *plan, unsigned input, int64_t count) {
  return !egi_plan_has_input(plan, input) || egi_tensor_count(&plan->inputs[input]) == count;
}

static bool read_nbits(const egi_kernel_plan *plan, egi_quantised *q) {
  const egi_node *node = egi_plan_node(plan);
  int64_t block = egi_node_int(node, "block_size", 0), bits = egi_node_int(node, "bits", 4);
  if (block < 1 || block > INT32_MAX || (bits != 2 && bits != 4 && bits != 8) || block * bits % 8 != 0) return false;
  int64_t blocks = ceil_divide(q->columns, block), packed = ceil_divide(blocks * bits, 8);
  q->bits = (unsigned)bits;
  q->code_row_stride = blocks * block;
  q->block_rows = q->scale_column_stride = q->zero_column_stride = 1;
  q->block_columns = block;
  q->scale_row_stride = blocks;
  q->zero_kind = EGI_ZERO_NUMBER;
  q->zero = (float)(1 << (bits - 1));
  bool has_zeros = egi_plan_has_input(plan, EGI_LINEAR_ZERO_POINTS);
  bool is_packed = has_zeros && plan->inputs[EGI_LINEAR_ZERO_POINTS].dtype == EG_DTYPE_U8;
  if (has_zeros) q->zero_kind = is_packed ? EGI_ZERO_CODES : EGI_ZERO_FLOATS;
  q->zero_row_stride = is_packed ? packed * 8 / bits : blocks;
  return plan->inputs[EGI_LINEAR_WEIGHT].dtype == EG_DTYPE_U8 &&
         has_count(plan, EGI_LINEAR_WEIGHT, q->rows * (blocks * block * bits / 8)) &&
         has_count(plan, EGI_LINEAR_SCALES, q->rows * blocks) && has_count(plan, EGI_LINEAR_GROUP_INDEX, q->columns) &&
         has_count(plan, EGI_LINEAR_ZERO_POINTS, q->rows * (is_packed ? packed : blocks));
}

static bool read_bnb4(const egi_kernel_plan *plan, egi_quantised *q) {
  const egi_node *node = egi_plan_node(plan);
  int64_t count = q->rows * q->columns;
  q->flat_block = egi_node_int(node, "block_size", 0);
  q->bits = 4;
  q->is_high_first = true;
  q->code_row_stride = q->columns;
  q->levels = egi_bnb4_levels(egi_node_int(node, "quant_type", 1));
  return q->flat_block > 0 && plan->inputs[EGI_LINEAR_WEIGHT].dtype == EG_DTYPE_U8 &&
         has_count(plan, EGI_LINEAR_WEIGHT, ceil_divide(count, 2)) &&
         has_count(plan, EGI_LINEAR_SCALES, ceil_divide(count, q->flat_block));
}

static bool read_blocked(const egi_kernel_plan *plan, egi_quantised *q) {
  const egi_node *node = egi_plan_node(plan);
  const egi_tensor *weight = &plan->inputs[EGI_LINEAR_WEIGHT], *scales = &plan->inputs[EGI_LINEAR_SCALES];
  int64_t block = egi_node_int(node, "block_size", 0), n_scales = egi_tensor_count(scales);
  bool is_rows = egi_node_int(node, "axis", 1) == 0, is_single = block == 0 && n_scales == 1;
  q->bits = egi_dtype_bits(weight->dtype);
  q->is_signed = egi_dtype_kind(weight->dtype) == EGI_CLASS_INTEGER;
  q->code_row_stride = q->columns;
  q->block_rows = is_rows ? (block > 0 ? block : 1) : block > 0 ? 1 : q->rows;
  q->block_columns = is_rows ? (block > 0 ? 1 : q->columns) : block > 0 ? block : 1;
  if (is_single) q->block_rows = q->rows, q->block_columns = q->columns;
  if (q->block_rows < 1) q->block_rows = 1;
  if (q->block_columns < 1) q->block_columns = 1;
  int64_t down = ceil_divide(q->rows, q->block_rows), across = ceil_divide(q->columns, q->block_columns);
  q->scale_row_stride = q->zero_row_stride = across;
  q->scale_column_stride = q->zero_column_stride = 1;
  q->zero_kind = egi_plan_has_input(plan, EGI_LINEAR_ZERO_POINTS) ? EGI_ZERO_CODES : EGI_ZERO_NUMBER;
  return weight->rank == 2 && (q->bits == 2 || q->bits == 4 || q->bits == 8) && n_scales == down * across &&
         has_count(plan, EGI_LINEAR_ZERO_POINTS, n_scales);
}

static bool is_scale_type(eg_dtype dtype) {
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16 || dtype == EG_DTYPE_F64;
}

static eg_status read_matrix(egi_kernel_plan *plan, linear_params *p, int64_t out_features, int64_t in_features) {
  const egi_node *node = egi_plan_node(plan);
  egi_quantised *q = &p->matrix;
  egi_linear_storage storage = egi_linear_storage_of(node);
  bool is_turned = storage == EGI_LINEAR_BLOCKED && egi_node_int(node, "transposed", 0) != 0, is_sound;
  q->rows = is_turned ? in_features : out_features;
  q->columns = is_turned ? out_features : in_features;
  p->is_transposed = is_turned != (node->op == EGI_OP_Linear);
  if (!egi_plan_has_input(plan, EGI_LINEAR_SCALES)) return egi_fail_types(plan);
  q->scale_dtype = plan->inputs[EGI_LINEAR_SCALES].dtype;
  if (!is_scale_type(q->scale_dtype)) return egi_fail_types(plan);
  is_sound = storage == EGI_LINEAR_NBITS  ? read_nbits(plan, q)
             : storage == EGI_LINEAR_BNB4 ? read_bnb4(plan, q)
                                          : storage == EGI_LINEAR_BLOCKED && read_blocked(plan, q);
  if (q->zero_kind == EGI_ZERO_FLOATS) {
    q->zero_dtype = plan->inputs[EGI_LINEAR_ZERO_POINTS].dtype;
    if (!is_scale_type(q->zero_dtype)) return egi_fail_types(plan);
  }
  if (is_sound) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "weight, scales or zero points do not fit each other");
}

/* ---- prepare: the product --------------------------------------------------------------------------------------- */

/* Rows are the last but one dim; outer dims that step evenly with it fold into it. */
static void read_rows(linear_params *p, const egi_tensor *x, const egi_tensor *y) {
  int rank = x->rank;
  p->x_column = x->strides[rank - 1];
  p->y_column = y->strides[rank - 1];
  p->m = rank > 1 ? x->dims[rank - 2] : 1;
  p->x_row = rank > 1 ? x->strides[rank - 2] : 0;
  p->y_row = rank > 1 ? y->strides[rank - 2] : 0;
  int outer = rank > 2 ? rank - 2 : 0;
  while (outer > 0) {
    int i = outer - 1;
    bool is_even = x->strides[i] == p->m * p->x_row && y->strides[i] == p->m * p->y_row;
    if (p->m == 1) p->x_row = x->strides[i], p->y_row = y->strides[i], is_even = true;
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
    p->n_batches *= x->dims[i];
  }
}

/* Packed operands are read as bytes in order; others are copied first. */
static eg_status reserve_copies(egi_kernel_plan *plan, linear_params *p) {
  size_t total = 64; /* offset 0 means none */
  for (unsigned i = EGI_LINEAR_WEIGHT; i < plan->n_inputs; i++) {
    if (i == EGI_LINEAR_BIAS || !egi_plan_has_input(plan, i) || egi_tensor_is_contiguous(&plan->inputs[i])) continue;
    uint64_t bytes = 0;
    (void)egi_dtype_bytes(plan->inputs[i].dtype, (uint64_t)egi_tensor_count(&plan->inputs[i]), &bytes);
    p->copy_offset[i] = total;
    total += ((size_t)bytes + 63) / 64 * 64;
  }
  p->copies_bytes = total > 64 ? total : 0;
  size_t product = (egi_product_scratch(p->tile_m, TILE_COLUMNS) + 63) / 64 * 64, workers = 0;
  p->scratch_bytes = product + BLOCK * TILE_COLUMNS * sizeof(float);
  if (!egi_size_multiply(p->scratch_bytes, egi_pool_size(egi_context_pool(plan->ctx)), &workers))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
  plan->workspace_bytes = p->copies_bytes + workers;
  return EG_OK;
}

static eg_status prepare_quantised(egi_kernel_plan *plan, linear_params *p) {
  const egi_tensor *x = &plan->inputs[EGI_LINEAR_X], *y = &plan->outputs[0];
  bool has_bias = egi_plan_has_input(plan, EGI_LINEAR_BIAS);
  if (x->dtype != EG_DTYPE_F32 || y->dtype != EG_DTYPE_F32 || x->rank < 1) return egi_fail_types(plan);
  p->isa = egi_cpu_isa();
  p->k = x->dims[x->rank - 1];
  p->n = y->dims[y->rank - 1];
  bool is_forward = egi_plan_node(plan)->op == EGI_OP_Linear;
  EG_TRY(read_matrix(plan, p, is_forward ? p->n : p->k, is_forward ? p->k : p->n));
  if (has_bias) {
    const egi_tensor *bias = &plan->inputs[EGI_LINEAR_BIAS];
    if (!is_scale_type(bias->dtype) || bias->dtype == EG_DTYPE_F64) return egi_fail_types(plan);
    if (bias->rank != 1 || bias->dims[0] != p->n || !is_forward)
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the bias does not fit the result");
  }
  if (egi_plan_has_input(plan, EGI_LINEAR_GROUP_INDEX) && plan->inputs[EGI_LINEAR_GROUP_INDEX].dtype != EG_DTYPE_I32)
    return egi_fail_types(plan);
  read_rows(p, x, y);
  p->tiles_m = ceil_divide(p->m, TILE_ROWS);
  p->tile_m = p->tiles_m > 0 ? ceil_divide(p->m, p->tiles_m) : 0;
  p->tiles_n = ceil_divide(p->n, TILE_COLUMNS);
  return reserve_copies(plan, p);
}

eg_status egi_cpu_prepare_linear(egi_kernel_plan *plan) {
  linear_params *p = EGI_NEW(plan->arena, linear_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  if (egi_linear_storage_of(egi_plan_node(plan)) == EGI_LINEAR_PLAIN) {
    bool has_bias = egi_plan_has_input(plan, EGI_LINEAR_BIAS);
    egi_matmul_spec spec = {
        {EGI_LINEAR_X, EGI_LINEAR_WEIGHT, 0, has_bias ? EGI_LINEAR_BIAS : -1}, false, true, 1.0, has_bias ? 1.0 : 0.0};
    if (plan->inputs[EGI_LINEAR_WEIGHT].rank != 2)
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the weight is no matrix");
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

/* The bias in every row of the tile. */
static void put_bias(const linear_run *run, const egi_matrix *c, int64_t m, int64_t n, int64_t column) {
  const egi_tensor *bias = &run->call->inputs[EGI_LINEAR_BIAS];
  const egi_matrix row = {bias->data, bias->dtype, 0, bias->strides[0]}, first = egi_matrix_part(&row, 0, column);
  for (int64_t i = 0; i < m; i++) {
    if (c->column_stride == 1) {
      egi_matrix_copy(run->p->isa, &first, (const int64_t[2]){1, n}, egi_matrix_at(c, i, 0), n);
      continue;
    }
    for (int64_t j = 0; j < n; j++) {
      const egi_matrix element = egi_matrix_part(&first, 0, j);
      egi_matrix_copy(run->p->isa, &element, (const int64_t[2]){1, 1}, egi_matrix_at(c, i, j), 1);
    }
  }
}

/* Block [k, k + depth) x [column, column + n) of the factor, in `buffer`. */
static egi_matrix load_block(const linear_run *run, const int64_t start[2], const int64_t size[2], float *buffer) {
  egi_quantised_part part = {start[0], size[0], start[1], size[1]};
  egi_matrix block = {buffer, EG_DTYPE_F32, TILE_COLUMNS, 1};
  if (run->p->is_transposed) {
    part = (egi_quantised_part){start[1], size[1], start[0], size[0]};
    block.row_stride = 1;
    block.column_stride = BLOCK;
  }
  egi_dequantise(&run->matrix, &part, buffer, run->p->is_transposed ? BLOCK : TILE_COLUMNS);
  return block;
}

static void run_tile(void *argument, size_t index, size_t worker) {
  const linear_run *run = argument;
  const linear_params *p = run->p;
  char *scratch = (char *)run->call->workspace + p->copies_bytes + worker * p->scratch_bytes;
  float *buffer = (float *)(void *)(scratch + p->scratch_bytes - BLOCK * TILE_COLUMNS * sizeof(float));
  int64_t rest = (int64_t)index, x_offset = 0, y_offset = 0;
  int64_t row = rest % p->tiles_m * p->tile_m;
  rest /= p->tiles_m;
  int64_t column = rest % p->tiles_n * TILE_COLUMNS;
  rest /= p->tiles_n;
  for (int i = p->batch_rank - 1; i >= 0; i--) {
    x_offset += rest % p->batch_dims[i] * p->x_strides[i];
    y_offset += rest % p->batch_dims[i] * p->y_strides[i];
    rest /= p->batch_dims[i];
  }
  egi_matrix a = {(float *)run->call->inputs[0].data + x_offset, EG_DTYPE_F32, p->x_row, p->x_column};
  egi_matrix c = {(float *)run->call->outputs[0].data + y_offset, EG_DTYPE_F32, p->y_row, p->y_column};
  c = egi_matrix_part(&c, row, column);
  egi_product product = {.m = smaller(p->tile_m, p->m - row), .n = smaller(TILE_COLUMNS, p->n - column), .c = c};
  product.alpha = 1.0;
  if (egi_call_has_input(run->call, EGI_LINEAR_BIAS)) {
    put_bias(run, &c, product.m, product.n, column);
    product.beta = 1.0;
  }
  int64_t k = 0;
  do { /* once for k = 0 too: C is set */
    product.k = smaller(BLOCK, p->k - k);
    product.a = egi_matrix_part(&a, row, k);
    product.b = load_block(run, (const int64_t[2]){k, column}, (const int64_t[2]){product.k, product.n}, buffer);
    egi_product_run(p->isa, &product, scratch);
    product.beta = 1.0;
    k += BLOCK;
  } while (k < p->k);
}

/* The operand's bytes in order; a copy where they are not. */
static const void *packed_data(const linear_run *run, unsigned input) {
  if (!egi_call_has_input(run->call, input)) return NULL;
  const egi_tensor *tensor = &run->call->inputs[input];
  size_t offset = run->p->copy_offset[input], bytes = egi_element_bytes(tensor->dtype);
  if (offset == 0) return tensor->data;
  char *out = (char *)run->call->workspace + offset;
  int64_t count = egi_tensor_count(tensor);
  for (int64_t i = 0; i < count; i++) {
    int64_t rest = i, at = 0;
    for (int d = tensor->rank - 1; d >= 0; d--) {
      at += rest % tensor->dims[d] * tensor->strides[d];
      rest /= tensor->dims[d];
    }
    memcpy(out + (size_t)i * bytes, (const char *)tensor->data + at * (int64_t)bytes, bytes);
  }
  return out;
}

static eg_status check_groups(eg_context *ctx, const egi_quantised *q) {
  for (int64_t i = 0; q->group_index != NULL && i < q->columns; i++)
    if (q->group_index[i] < 0 || q->group_index[i] >= q->scale_row_stride)
      return egi_fail(ctx, EG_ERROR_DATA, "group %d of a quantised weight that has %lld", (int)q->group_index[i],
                      (long long)q->scale_row_stride);
  return EG_OK;
}

eg_status egi_cpu_run_linear(eg_context *ctx, const egi_kernel_call *call) {
  const linear_params *p = call->params;
  if (p->plain != NULL) {
    egi_kernel_call plain = *call;
    plain.params = p->plain;
    return egi_cpu_run_matmul(ctx, &plain);
  }
  linear_run run = {p, call, p->matrix};
  run.matrix.codes = packed_data(&run, EGI_LINEAR_WEIGHT);
  run.matrix.scales = packed_data(&run, EGI_LINEAR_SCALES);
  run.matrix.zeros = packed_data(&run, EGI_LINEAR_ZERO_POINTS);
  run.matrix.group_index = packed_data(&run, EGI_LINEAR_GROUP_INDEX);
  EG_TRY(check_groups(ctx, &run.matrix));
  egi_pool_run(call->pool, (size_t)(p->n_batches * p->tiles_m * p->tiles_n), run_tile, &run);
  return EG_OK;
}
