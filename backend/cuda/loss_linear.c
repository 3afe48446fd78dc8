/* LinearLogProbability and its gradient: head and loss in one, in chunks of rows and tiles of the vocabulary, never a
 * matrix of all of both. Logits are f32 whatever the activations are. The gradient computes a tile's logits anew, turns
 * them into their gradient, and multiplies on: d hidden is summed over the tiles in f32, a tile of d weight over the
 * chunks. All rows are gone through, with a label or not: launches follow from sizes alone, so that they can be
 * captured. A quantised weight is decoded tile by tile, and has no gradient. */
#include "backend/cuda/dequantise.h"
#include "backend/cuda/loss_linear.h"
#include "backend/cuda/matmul.h"

#define MOST_ROWS ((int64_t)8192)
#define TILE_ELEMENTS ((int64_t)1 << 26)

enum { OUT_HIDDEN, OUT_WEIGHT, OUT_BIAS };
enum {
  WORK_STATISTICS,
  WORK_LOGITS,
  WORK_GRADIENT, /* of the logits, where it is narrow */
  WORK_HIDDEN,   /* rows side by side, where they do not lie so */
  WORK_WEIGHT,   /* a tile of the weight */
  WORK_D_HIDDEN, /* f32 sums of a narrow one */
  WORK_D_BIAS,
  WORK_COPIES,
  WORK_COUNT
};

typedef struct head_params {
  bool is_gradient, is_quantised;
  bool is_copied;               /* hidden */
  bool is_staged;               /* the weight's tiles */
  bool is_by_class;             /* a staged tile lies [classes, size] */
  int bias;                     /* input; -1: none */
  eg_dtype dtype, logits_dtype; /* dtype: of hidden and of the factors of all products */
  egi_quantised_weight weight;
  int64_t n_rows, size, n_classes, hidden_stride;
  int64_t chunk_rows, tile_classes; /* at a time; the latter a multiple of EGI_CUDA_TILE_STEP */
  size_t at[WORK_COUNT];
} head_params;

typedef struct head_run {
  eg_context *ctx;
  const head_params *params;
  const egi_kernel_call *call;
  const egi_cuda_stream *stream;
  egi_quantised matrix;     /* a quantised weight */
  egi_cuda_matrices hidden; /* all rows */
  egi_cuda_logits tile;
} head_run;

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

/* Where the operands of a quantised weight stand. */
static const uint8_t weight_inputs[2][EGI_LINEAR_INPUTS] = {{0, 1, 3, 4, 5, 6, 7}, {0, 1, 5, 6, 7, 8, 9}};

static bool is_narrow(eg_dtype dtype) {
  return dtype == EG_DTYPE_BF16 || dtype == EG_DTYPE_F16;
}
static bool is_real(eg_dtype dtype) {
  return is_narrow(dtype) || dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64;
}
static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

static const egi_tensor *output_of(const egi_tensor *outputs, unsigned n_outputs, unsigned output) {
  return output < n_outputs && outputs[output].dtype != EG_DTYPE_UNDEFINED ? &outputs[output] : NULL;
}

static bool takes_types(const egi_kernel_plan *plan, const head_params *p) {
  eg_dtype weight = plan->inputs[1].dtype, first = p->is_gradient ? plan->inputs[3].dtype : plan->outputs[0].dtype;
  eg_dtype second = p->is_gradient ? plan->inputs[4].dtype : plan->outputs[1].dtype;
  const egi_tensor *d_weight = p->is_gradient ? output_of(plan->outputs, plan->n_outputs, OUT_WEIGHT) : NULL;
  if (!is_real(p->dtype) || plan->inputs[2].dtype != EG_DTYPE_I64 || !is_real(first) || !is_real(second)) return false;
  if (p->is_quantised && (p->dtype == EG_DTYPE_F64 || d_weight != NULL)) return false;
  if (!p->is_quantised && (!is_real(weight) || (weight == EG_DTYPE_F64) != (p->dtype == EG_DTYPE_F64))) return false;
  if (d_weight != NULL && d_weight->dtype != p->dtype && d_weight->dtype != EG_DTYPE_F32) return false;
  return p->bias < 0 || is_real(plan->inputs[p->bias].dtype);
}

static bool takes_shapes(const egi_kernel_plan *plan, const head_params *p) {
  const egi_tensor *weight = &plan->inputs[1], *bias = p->bias < 0 ? NULL : &plan->inputs[p->bias];
  if (!p->is_quantised && (weight->rank != 2 || weight->dims[0] != p->size)) return false;
  if (p->n_classes < 0 || (bias && (bias->rank != 1 || bias->dims[0] != p->n_classes))) return false;
  for (unsigned i = 2; i < (p->is_gradient ? 5 : 3); i++)
    if (egi_tensor_count(&plan->inputs[i]) != p->n_rows) return false;
  return true;
}

static int64_t count_classes(const egi_kernel_plan *plan, const head_params *p) {
  const egi_tensor *weight = &plan->inputs[1];
  if (p->is_quantised) return egi_quantised_out_features(plan, weight_inputs[p->is_gradient]);
  return weight->rank == 2 ? weight->dims[1] : -1;
}

/* Elements from one row to the next where all rows have one step; else 0. */
static int64_t row_step(const egi_tensor *x) {
  int64_t step = 0, rows = 1;
  for (int d = x->rank - 2; d >= 0; d--) {
    if (x->dims[d] == 1) continue;
    if (rows == 1) step = x->strides[d];
    if (rows > 1 && x->strides[d] != step * rows) return 0;
    rows *= x->dims[d];
  }
  return rows == 1 ? x->dims[x->rank - 1] : step;
}

static void choose_layouts(const egi_kernel_plan *plan, head_params *p) {
  const egi_tensor *hidden = &plan->inputs[0], *weight = &plan->inputs[1];
  p->hidden_stride = row_step(hidden);
  p->is_copied = hidden->strides[hidden->rank - 1] != 1 || p->hidden_stride < p->size;
  if (p->is_copied) p->hidden_stride = p->size;
  if (p->is_quantised) {
    p->is_staged = true;
    p->is_by_class = !p->weight.is_turned;
    return;
  }
  p->is_by_class = weight->strides[0] < weight->strides[1];
  p->is_staged = weight->dtype != p->dtype ||
                 !egi_cuda_is_dense(p->size, EGI_CUDA_TILE_STEP, weight->strides[0], weight->strides[1]);
}

/* Rows and classes at a time. A narrow d weight is not summed over chunks of rows. */
static void choose_sizes(const egi_kernel_plan *plan, head_params *p) {
  int64_t most = egi_node_int(egi_plan_node(plan), "rows", 0), chunk = MOST_ROWS;
  const egi_tensor *d_weight = p->is_gradient ? output_of(plan->outputs, plan->n_outputs, OUT_WEIGHT) : NULL;
  if (d_weight != NULL && is_narrow(d_weight->dtype)) chunk = p->n_rows;
  if (most > 0) chunk = smaller(chunk, most < 16 ? 16 : most / 16 * 16);
  p->chunk_rows = smaller(chunk, p->n_rows);
  int64_t classes = p->chunk_rows > 0 ? TILE_ELEMENTS / p->chunk_rows : p->n_classes;
  classes = classes < EGI_CUDA_TILE_STEP ? EGI_CUDA_TILE_STEP : classes;
  int64_t n_tiles = p->n_classes > 0 ? ceil_divide(p->n_classes, classes) : 1;
  p->tile_classes = ceil_divide(ceil_divide(p->n_classes, n_tiles), EGI_CUDA_TILE_STEP) * EGI_CUDA_TILE_STEP;
}

/* Lays the parts out one after the other; sizes are products of dims, so they are checked. */
static eg_status place_workspace(egi_kernel_plan *plan, head_params *p) {
  size_t tile = (size_t)p->tile_classes, chunk = (size_t)p->chunk_rows, size = (size_t)p->size;
  size_t bytes = egi_element_bytes(p->dtype), total = 0, part;
  bool has_d_hidden = p->is_gradient && output_of(plan->outputs, plan->n_outputs, OUT_HIDDEN) != NULL;
  bool has_d_bias = p->is_gradient && output_of(plan->outputs, plan->n_outputs, OUT_BIAS) != NULL;
  size_t counts[WORK_COUNT][2] = {
      [WORK_STATISTICS] = {p->is_gradient ? 0 : chunk, 3 * sizeof(double)},
      [WORK_LOGITS] = {chunk, tile * egi_element_bytes(p->logits_dtype)},
      [WORK_GRADIENT] = {p->is_gradient && is_narrow(p->dtype) ? chunk : 0, tile * bytes},
      [WORK_HIDDEN] = {p->is_copied ? (size_t)p->n_rows : 0, size * bytes},
      [WORK_WEIGHT] = {p->is_staged ? tile : 0, size * bytes},
      [WORK_D_HIDDEN] = {has_d_hidden && is_narrow(p->dtype) ? chunk : 0, size * sizeof(float)},
      [WORK_D_BIAS] = {has_d_bias ? (size_t)p->n_classes : 0, sizeof(double)},
      [WORK_COPIES] = {p->is_quantised ? 1 : 0, p->weight.copies_bytes}};
  for (int i = 0; i < WORK_COUNT; i++) {
    p->at[i] = total;
    if (!egi_size_multiply(counts[i][0], counts[i][1], &part) || !egi_size_add(total, part, &total) ||
        !egi_size_add(total, 255, &total))
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
    total = total / 256 * 256;
  }
  plan->workspace_bytes = total;
  plan->chunk_rows = p->chunk_rows;
  return EG_OK;
}

static eg_status prepare(egi_kernel_plan *plan, bool is_gradient) {
  head_params *p = EGI_NEW(plan->arena, head_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  const egi_tensor *hidden = &plan->inputs[0];
  unsigned bias = is_gradient ? 5 : 3;
  plan->params = p;
  p->is_gradient = is_gradient;
  p->is_quantised = egi_linear_storage_of(egi_plan_node(plan)) != EGI_LINEAR_PLAIN;
  p->bias = egi_plan_has_input(plan, bias) ? (int)bias : -1;
  p->dtype = hidden->dtype;
  p->logits_dtype = hidden->dtype == EG_DTYPE_F64 ? EG_DTYPE_F64 : EG_DTYPE_F32;
  if (!takes_types(plan, p)) return egi_fail_types(plan);
  p->size = hidden->rank > 0 ? hidden->dims[hidden->rank - 1] : 0;
  p->n_rows = egi_tensor_count(&plan->inputs[2]);
  p->n_classes = count_classes(plan, p);
  if (hidden->rank < 1 || egi_tensor_count(hidden) != p->n_rows * p->size || !takes_shapes(plan, p))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "hidden, weight, labels and bias do not fit");
  if (p->is_quantised) EG_TRY(egi_quantised_read(plan, weight_inputs[is_gradient], p->n_classes, p->size, &p->weight));
  choose_layouts(plan, p);
  choose_sizes(plan, p);
  return place_workspace(plan, p);
}

eg_status egi_cuda_prepare_linear_log_probability(egi_kernel_plan *plan) {
  return prepare(plan, false);
}
eg_status egi_cuda_prepare_linear_log_probability_grad(egi_kernel_plan *plan) {
  return prepare(plan, true);
}

/* ---- operands --------------------------------------------------------------------------------------------------- */

static void *work(const head_run *run, int part) {
  return (char *)run->call->workspace + run->params->at[part];
}

static egi_cuda_row_numbers row_numbers(const egi_tensor *tensor) {
  egi_cuda_row_numbers out = {.data = tensor->data, .dtype = tensor->dtype, .rank = tensor->rank};
  memcpy(out.dims, tensor->dims, sizeof(int64_t) * (size_t)tensor->rank);
  memcpy(out.strides, tensor->strides, sizeof(int64_t) * (size_t)tensor->rank);
  return out;
}

/* Hidden rows as one matrix. */
static eg_status open_hidden(head_run *run) {
  const head_params *p = run->params;
  const egi_tensor *hidden = &run->call->inputs[0];
  run->hidden = (egi_cuda_matrices){hidden->data, p->dtype, p->hidden_stride, 1, 0};
  if (!p->is_copied) return EG_OK;
  int rank = hidden->rank - 1;
  egi_cuda_batches batches = {.rank = rank, .count = p->n_rows};
  egi_cuda_operand operands[2] = {{hidden->data, p->dtype, 0, hidden->strides[rank], {0}},
                                  {work(run, WORK_HIDDEN), p->dtype, p->size, 1, {0}}};
  int64_t step = p->size;
  for (int d = rank - 1; d >= 0; d--) {
    batches.dims[d] = hidden->dims[d];
    operands[0].batch_strides[d] = hidden->strides[d];
    operands[1].batch_strides[d] = step;
    step *= hidden->dims[d];
  }
  run->hidden.data = operands[1].data;
  return egi_cuda_copy_matrices(run->ctx, operands, &batches, (const int64_t[2]){1, p->size}, run->stream);
}

/* The weight [size, columns of the tile]. */
static eg_status open_weight(head_run *run, egi_cuda_matrices *out) {
  const head_params *p = run->params;
  int64_t column = run->tile.first_column, n = run->tile.columns;
  *out = (egi_cuda_matrices){work(run, WORK_WEIGHT), p->dtype, p->is_by_class ? 1 : n, p->is_by_class ? p->size : 1, 0};
  if (p->is_quantised) {
    const egi_cuda_window window = {p->is_by_class ? column : 0, p->is_by_class ? 0 : column,
                                    p->is_by_class ? n : p->size, p->is_by_class ? p->size : n};
    return egi_cuda_dequantise(run->ctx, &run->matrix, &window, out->data, p->dtype, run->stream);
  }
  const egi_tensor *weight = &run->call->inputs[1];
  int64_t offset = column * weight->strides[1] * (int64_t)egi_element_bytes(weight->dtype);
  const egi_cuda_operand copies[2] = {
      {(char *)weight->data + offset, weight->dtype, weight->strides[0], weight->strides[1], {0}},
      {out->data, p->dtype, out->row_stride, out->column_stride, {0}}};
  const egi_cuda_batches one = {.rank = 0, .count = 1};
  if (p->is_staged) return egi_cuda_copy_matrices(run->ctx, copies, &one, (const int64_t[2]){p->size, n}, run->stream);
  *out = (egi_cuda_matrices){copies[0].data, p->dtype, weight->strides[0], weight->strides[1], 0};
  return EG_OK;
}

/* Rows of hidden that the tile is of. */
static egi_cuda_matrices chunk_of_hidden(const head_run *run) {
  egi_cuda_matrices out = run->hidden;
  size_t offset = (size_t)(run->tile.first_row * out.row_stride) * egi_element_bytes(out.dtype);
  out.data = (char *)out.data + offset;
  return out;
}

static egi_cuda_matrices transpose_of(const egi_cuda_matrices *x) {
  return (egi_cuda_matrices){x->data, x->dtype, x->column_stride, x->row_stride, 0};
}

static egi_cuda_operand operand_of(const egi_cuda_matrices *x) {
  return (egi_cuda_operand){x->data, x->dtype, x->row_stride, x->column_stride, {0}};
}

/* f64, and sums over nothing, go a plain way. */
static eg_status multiply(const head_run *run, const egi_cuda_product *product) {
  if (product->m == 0 || product->n == 0) return EG_OK;
  if (product->k > 0 && product->c.dtype != EG_DTYPE_F64) return egi_cuda_multiply(run->ctx, product, run->stream);
  egi_cuda_plain_product plain = {.m = product->m,
                                  .n = product->n,
                                  .k = product->k,
                                  .batches = {.rank = 0, .count = 1},
                                  .a = operand_of(&product->a),
                                  .b = operand_of(&product->b),
                                  .c = operand_of(&product->c),
                                  .alpha = (double)product->alpha,
                                  .beta = (double)product->beta};
  if (product->addend.data != NULL) plain.addend = operand_of(&product->addend);
  return egi_cuda_multiply_plainly(run->ctx, &plain, run->stream);
}

/* ---- tiles ------------------------------------------------------------------------------------------------------ */

static eg_status compute_logits(const head_run *run, const egi_cuda_matrices *weight) {
  const egi_cuda_logits *t = &run->tile;
  const egi_cuda_product product = {.m = t->rows,
                                    .n = t->columns,
                                    .k = run->params->size,
                                    .n_batches = 1,
                                    .a = chunk_of_hidden(run),
                                    .b = *weight,
                                    .c = {t->data, t->dtype, t->stride, 1, 0},
                                    .alpha = 1.0f};
  return multiply(run, &product);
}

/* d hidden of the chunk += d logits · weight', in f32; after the last tile it goes where it belongs. */
static eg_status add_d_hidden(const head_run *run, const egi_cuda_matrices *weight, bool is_first, bool is_last) {
  const head_params *p = run->params;
  const egi_cuda_logits *t = &run->tile;
  const egi_tensor *d_hidden = &run->call->outputs[OUT_HIDDEN];
  egi_cuda_matrices out = {d_hidden->data, p->dtype, p->size, 1, 0};
  out.data = (char *)out.data + (size_t)(t->first_row * p->size) * egi_element_bytes(p->dtype);
  egi_cuda_matrices sums = out;
  if (is_narrow(p->dtype)) sums = (egi_cuda_matrices){work(run, WORK_D_HIDDEN), EG_DTYPE_F32, p->size, 1, 0};
  egi_cuda_product product = {.m = t->rows,
                              .n = p->size,
                              .k = t->columns,
                              .n_batches = 1,
                              .a = {t->gradient, t->gradient_dtype, t->stride, 1, 0},
                              .b = transpose_of(weight),
                              .c = sums,
                              .alpha = 1.0f};
  if (!is_first) product.addend = sums, product.beta = 1.0f;
  EG_TRY(multiply(run, &product));
  if (!is_last || sums.data == out.data) return EG_OK;
  const egi_cuda_operand copies[2] = {operand_of(&sums), operand_of(&out)};
  const egi_cuda_batches one = {.rank = 0, .count = 1};
  return egi_cuda_copy_matrices(run->ctx, copies, &one, (const int64_t[2]){t->rows, p->size}, run->stream);
}

/* The tile's columns of d weight += hidden' · d logits. */
static eg_status add_d_weight(const head_run *run) {
  const head_params *p = run->params;
  const egi_cuda_logits *t = &run->tile;
  const egi_tensor *d_weight = &run->call->outputs[OUT_WEIGHT];
  egi_cuda_matrices hidden = chunk_of_hidden(run);
  egi_cuda_matrices out = {d_weight->data, d_weight->dtype, p->n_classes, 1, 0};
  out.data = (char *)out.data + (size_t)t->first_column * egi_element_bytes(out.dtype);
  egi_cuda_product product = {.m = p->size,
                              .n = t->columns,
                              .k = t->rows,
                              .n_batches = 1,
                              .a = transpose_of(&hidden),
                              .b = {t->gradient, t->gradient_dtype, t->stride, 1, 0},
                              .c = out,
                              .alpha = 1.0f};
  if (t->first_row > 0) product.addend = out, product.beta = 1.0f;
  return multiply(run, &product);
}

static eg_status run_gradients(head_run *run, const egi_cuda_matrices *weight) {
  const egi_kernel_call *call = run->call;
  egi_cuda_logits *t = &run->tile;
  bool is_first = t->is_first, is_last = t->is_last;
  EG_TRY(egi_cuda_make_logit_gradient(run->ctx, t, run->stream));
  if (output_of(call->outputs, call->n_outputs, OUT_HIDDEN) != NULL)
    EG_TRY(add_d_hidden(run, weight, is_first, is_last));
  if (output_of(call->outputs, call->n_outputs, OUT_WEIGHT) != NULL) EG_TRY(add_d_weight(run));
  if (output_of(call->outputs, call->n_outputs, OUT_BIAS) == NULL) return EG_OK;
  t->is_first = t->first_row == 0;
  t->is_last = t->first_row + t->rows == run->params->n_rows;
  return egi_cuda_add_bias_gradient(run->ctx, t, work(run, WORK_D_BIAS), &call->outputs[OUT_BIAS], run->stream);
}

static eg_status run_tile(head_run *run, int64_t row, int64_t column) {
  const head_params *p = run->params;
  egi_cuda_logits *t = &run->tile;
  egi_cuda_matrices weight;
  t->first_row = row;
  t->rows = smaller(p->chunk_rows, p->n_rows - row);
  t->first_column = column;
  t->columns = smaller(p->tile_classes, p->n_classes - column);
  t->is_first = column == 0;
  t->is_last = column + t->columns == p->n_classes;
  EG_TRY(open_weight(run, &weight));
  EG_TRY(compute_logits(run, &weight));
  return p->is_gradient ? run_gradients(run, &weight) : egi_cuda_add_statistics(run->ctx, t, run->stream);
}

static void describe_tiles(head_run *run) {
  const head_params *p = run->params;
  const egi_kernel_call *call = run->call;
  egi_cuda_logits *t = &run->tile;
  *t = (egi_cuda_logits){.data = work(run, WORK_LOGITS),
                         .dtype = p->logits_dtype,
                         .stride = p->tile_classes,
                         .n_classes = p->n_classes,
                         .labels = row_numbers(&call->inputs[2]),
                         .first = row_numbers(p->is_gradient ? &call->inputs[3] : &call->outputs[0]),
                         .second = row_numbers(p->is_gradient ? &call->inputs[4] : &call->outputs[1]),
                         .statistics = work(run, WORK_STATISTICS),
                         .gradient = work(run, is_narrow(p->dtype) ? WORK_GRADIENT : WORK_LOGITS),
                         .gradient_dtype = p->dtype,
                         .op = p->is_gradient ? EGI_OP_LinearLogProbabilityGrad : EGI_OP_LinearLogProbability};
  if (p->bias < 0) return;
  const egi_tensor *bias = &call->inputs[p->bias];
  t->bias = bias->data;
  t->bias_dtype = bias->dtype;
  t->bias_stride = bias->strides[0];
}

eg_status egi_cuda_run_linear_log_probability(eg_context *ctx, const egi_kernel_call *call) {
  const head_params *p = call->params;
  head_run run = {.ctx = ctx, .params = p, .call = call, .stream = egi_cuda_stream_of(call)};
  int64_t row = 0;
  if (p->is_quantised) EG_TRY(egi_cuda_quantised_open(ctx, &p->weight, call, work(&run, WORK_COPIES), &run.matrix));
  EG_TRY(open_hidden(&run));
  describe_tiles(&run);
  do { /* without rows or classes there is one empty tile: sums over nothing are 0 */
    int64_t column = 0;
    do {
      EG_TRY(run_tile(&run, row, column));
      column += p->tile_classes;
    } while (column < p->n_classes);
    row += p->chunk_rows;
  } while (row < p->n_rows);
  return EG_OK;
}
