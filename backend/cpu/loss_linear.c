/* LinearLogProbability and its gradient: head and loss in one, over the rows that have a label, in tiles of rows x
 * vocabulary, never a [rows, vocabulary] matrix of all rows. Forward: each tile gives a row's largest logit and sum of
 * exponentials, combined over tiles in order in f64. Gradient: blocks of rows one after the other; logits are computed
 * anew, turned into gradients in place, and multiplied on. All splits depend on sizes and labels alone. A quantised
 * weight is turned to float32 block by block, and has no gradient. One file: both directions share their tiles. */
#include "backend/cpu/loss.h"
#include "backend/cpu/quantised.h"
#include "backend/cpu/strided.h"

#include <math.h>

#define TILE_CLASSES ((int64_t)480)
#define TILE_COLUMNS ((int64_t)96) /* of d hidden */
#define FEW_CLASSES ((int64_t)4096)
#define SHORT_ROWS ((int64_t)128)         /* rows of a tile with few classes */
#define TALL_ROWS ((int64_t)512)          /* with many: a tile packs its columns of the weight once */
#define BLOCK_ELEMENTS ((int64_t)1 << 24) /* of the logits that the gradient holds at a time */

enum {
  WORK_ACTIVE,
  WORK_BIAS,
  WORK_STATISTICS,
  WORK_LABEL_LOGITS,
  WORK_LOGITS,
  WORK_HIDDEN,
  WORK_D_HIDDEN,
  WORK_D_BIAS,
  WORK_COPIES,
  WORK_SCRATCH,
  WORK_COUNT
};

typedef struct linear_params {
  const egi_isa *isa;
  const egi_row_functions *functions;
  eg_dtype dtype;
  size_t bytes; /* of an element */
  bool is_gradient, is_quantised;
  int bias; /* input; -1: none */
  egi_quantised_weight weight;
  egi_rows hidden, d_hidden;
  egi_row_numbers labels, first, second;    /* outputs logp, lse, or inputs lse, d logp */
  int64_t n_rows, size, n_classes, n_tiles; /* size: of a hidden row; n_tiles: over the vocabulary */
  int64_t tile_rows, block_rows;            /* block: of the gradient */
  size_t scratch_bytes;
  size_t at[WORK_COUNT]; /* parts of the workspace */
} linear_params;

typedef struct linear_run {
  const linear_params *params;
  const egi_kernel_call *call;
  int64_t *active; /* rows with a label */
  int64_t n_active;
  const void *bias;     /* [n_classes] contiguous, or NULL */
  egi_quantised matrix; /* the weight, when it is quantised */
  int64_t first, n;     /* the gradient's block: active rows [first, first + n) */
  int64_t n_row_tiles;
} linear_run;

static int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

static bool has_output(const egi_tensor *outputs, unsigned n_outputs, unsigned output) {
  return output < n_outputs && outputs[output].dtype != EG_DTYPE_UNDEFINED;
}

/* Lays the parts out one after the other; sizes are products of dims, so they are checked. */
static eg_status place_workspace(egi_kernel_plan *plan, linear_params *p) {
  size_t workers = egi_pool_size(egi_context_pool(plan->ctx));
  size_t tile_rows = (size_t)p->tile_rows, block = (size_t)p->block_rows;
  bool is_forward = !p->is_gradient, has_d_bias = has_output(plan->outputs, plan->n_outputs, 2) && p->is_gradient;
  size_t rows = (size_t)p->n_rows, classes = (size_t)p->n_classes, size = (size_t)p->size;
  size_t counts[WORK_COUNT][2] = {
      [WORK_ACTIVE] = {rows, sizeof(int64_t)},
      [WORK_BIAS] = {p->bias >= 0 ? classes : 0, p->bytes},
      [WORK_STATISTICS] = {is_forward ? rows * 2 : 0, (size_t)p->n_tiles * sizeof(double)},
      [WORK_LABEL_LOGITS] = {is_forward ? rows : 0, sizeof(double)},
      [WORK_LOGITS] = {is_forward ? workers * tile_rows : block, p->bytes * (is_forward ? TILE_CLASSES : classes)},
      [WORK_HIDDEN] = {is_forward ? workers * tile_rows : block, p->bytes * size},
      [WORK_D_HIDDEN] = {is_forward ? 0 : block, p->bytes * size},
      [WORK_D_BIAS] = {has_d_bias ? classes : 0, sizeof(double)},
      [WORK_COPIES] = {p->is_quantised ? 1 : 0, p->weight.copies_bytes},
      [WORK_SCRATCH] = {workers, p->scratch_bytes}};
  size_t total = 0, bytes;
  for (int i = 0; i < WORK_COUNT; i++) {
    p->at[i] = total;
    if (!egi_size_multiply(counts[i][0], counts[i][1], &bytes) || !egi_size_add(total, bytes, &total) ||
        !egi_size_add(total, 63, &total))
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
    total = total / 64 * 64;
  }
  plan->workspace_bytes = total;
  plan->chunk_rows = p->is_gradient ? p->block_rows : p->tile_rows;
  return EG_OK;
}

static bool is_narrow(eg_dtype dtype) {
  return dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

static bool takes_types(const egi_kernel_plan *plan, const linear_params *p) {
  eg_dtype weight = plan->inputs[1].dtype;
  if (!p->functions || plan->inputs[2].dtype != EG_DTYPE_I64) return false;
  bool is_wide = p->dtype == EG_DTYPE_F32;
  if (p->is_quantised ? !is_wide : weight != p->dtype && !(is_wide && is_narrow(weight))) return false;
  if (p->bias >= 0) {
    eg_dtype bias = plan->inputs[p->bias].dtype;
    if (bias != p->dtype && !(is_wide && is_narrow(bias))) return false;
  }
  for (unsigned i = 0; i < plan->n_outputs && p->is_gradient; i++)
    if (has_output(plan->outputs, plan->n_outputs, i) && plan->outputs[i].dtype != p->dtype) return false;
  return egi_row_functions_of(p->first.dtype) && egi_row_functions_of(p->second.dtype);
}

static bool takes_shapes(const egi_kernel_plan *plan, const linear_params *p) {
  const egi_tensor *weight = &plan->inputs[1], *bias = p->bias < 0 ? NULL : &plan->inputs[p->bias];
  if (!p->is_quantised && (weight->rank != 2 || weight->dims[0] != p->size)) return false;
  if (p->n_classes < 0 || (bias && (bias->rank != 1 || bias->dims[0] != p->n_classes))) return false;
  return p->labels.rows.count == p->n_rows && p->first.rows.count == p->n_rows && p->second.rows.count == p->n_rows;
}

static size_t product_bytes(void) {
  return (egi_product_scratch(TALL_ROWS, TILE_CLASSES) + 63) / 64 * 64;
}

/* Where the operands of a quantised weight stand. */
static const uint8_t weight_inputs[2][EGI_LINEAR_INPUTS] = {{0, 1, 3, 4, 5, 6, 7}, {0, 1, 5, 6, 7, 8, 9}};

static int64_t count_classes(const egi_kernel_plan *plan, const linear_params *p) {
  const egi_tensor *weight = &plan->inputs[1];
  if (p->is_quantised) return egi_quantised_out_features(plan, weight_inputs[p->is_gradient]);
  return weight->rank == 2 ? weight->dims[1] : -1;
}

/* Rows at a time; `most` is what the node allows, 0: any number. */
static void choose_rows(linear_params *p, int64_t most) {
  int64_t there = ceil_divide(p->n_rows, 16) * 16, rows = BLOCK_ELEMENTS / (p->n_classes + 1);
  if (most > 0 && most < there) there = most / 16 * 16;
  if (most > 0 && there < 16) there = 16;
  rows = rows < SHORT_ROWS ? SHORT_ROWS : rows / SHORT_ROWS * SHORT_ROWS;
  p->n_tiles = ceil_divide(p->n_classes, TILE_CLASSES);
  p->block_rows = smaller(smaller(rows, 2 * TALL_ROWS), there);
  p->tile_rows = smaller(p->n_classes < FEW_CLASSES ? SHORT_ROWS : TALL_ROWS, there);
  if (p->tile_rows < 16) p->tile_rows = 16;
}

static eg_status prepare(egi_kernel_plan *plan, bool is_gradient) {
  linear_params *p = EGI_NEW(plan->arena, linear_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  const egi_tensor *hidden = &plan->inputs[0];
  unsigned bias = is_gradient ? 5 : 3;
  p->isa = egi_cpu_isa();
  p->dtype = hidden->dtype;
  p->functions = egi_row_functions_of(hidden->dtype);
  p->is_gradient = is_gradient;
  p->is_quantised = egi_linear_storage_of(egi_plan_node(plan)) != EGI_LINEAR_PLAIN;
  p->bias = egi_plan_has_input(plan, bias) ? (int)bias : -1;
  egi_row_numbers_init(&p->labels, &plan->inputs[2]);
  egi_row_numbers_init(&p->first, is_gradient ? &plan->inputs[3] : &plan->outputs[0]);
  egi_row_numbers_init(&p->second, is_gradient ? &plan->inputs[4] : &plan->outputs[1]);
  if (!takes_types(plan, p)) return egi_fail_types(plan);
  p->bytes = egi_element_bytes(p->dtype);
  if (hidden->rank > 0) egi_rows_init(&p->hidden, hidden, hidden->rank - 1);
  p->n_rows = p->hidden.count;
  p->size = p->hidden.length;
  p->n_classes = count_classes(plan, p);
  if (hidden->rank < 1 || !takes_shapes(plan, p))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "hidden, weight, labels and bias do not fit");
  if (is_gradient && has_output(plan->outputs, plan->n_outputs, 0))
    egi_rows_init(&p->d_hidden, &plan->outputs[0], plan->outputs[0].rank - 1);
  if (p->is_quantised) EG_TRY(egi_quantised_read(plan, weight_inputs[is_gradient], p->n_classes, p->size, &p->weight));
  choose_rows(p, egi_node_int(egi_plan_node(plan), "rows", 0));
  p->scratch_bytes = product_bytes();
  if (p->is_quantised) p->scratch_bytes += EGI_QUANTISED_BLOCK * TILE_CLASSES * sizeof(float);
  plan->params = p;
  return place_workspace(plan, p);
}

eg_status egi_cpu_prepare_linear_log_probability(egi_kernel_plan *plan) {
  return prepare(plan, false);
}
eg_status egi_cpu_prepare_linear_log_probability_grad(egi_kernel_plan *plan) {
  return prepare(plan, true);
}

/* ---- shared by both directions ---------------------------------------------------------------------------------- */

static char *work(const linear_run *run, int part) {
  return (char *)run->call->workspace + run->params->at[part];
}

static egi_matrix dense(const linear_run *run, void *data, int64_t columns) {
  return (egi_matrix){data, run->params->dtype, columns, 1};
}

/* Finds the rows with labels and spreads the bias out. */
static eg_status start_run(eg_context *ctx, linear_run *run) {
  const linear_params *p = run->params;
  if (p->is_quantised) EG_TRY(egi_quantised_open(ctx, &p->weight, run->call, work(run, WORK_COPIES), &run->matrix));
  const egi_tensor *labels = &run->call->inputs[2];
  EG_TRY(egi_labels_check(ctx, &p->labels, labels, p->n_classes));
  run->active = (int64_t *)(void *)work(run, WORK_ACTIVE);
  for (int64_t row = 0; row < p->n_rows; row++)
    if (egi_label_get(&p->labels, labels, row) != EGI_LABEL_NONE) run->active[run->n_active++] = row;
  if (p->bias >= 0) {
    const egi_tensor *bias = &run->call->inputs[p->bias];
    egi_matrix row = {bias->data, bias->dtype, 0, bias->strides[0]};
    egi_matrix_copy(p->isa, &row, (const int64_t[2]){1, p->n_classes}, work(run, WORK_BIAS), p->n_classes);
    run->bias = work(run, WORK_BIAS);
  }
  return EG_OK;
}

/* Active rows [first, first + n) side by side. */
static void gather_hidden(const linear_run *run, int64_t first, int64_t n, char *out) {
  const linear_params *p = run->params;
  size_t row_bytes = (size_t)p->size * p->bytes;
  for (int64_t i = 0; i < n; i++) {
    char *target = out + (size_t)i * row_bytes;
    const void *row = egi_rows_load(&p->hidden, &run->call->inputs[0], run->active[first + i], target);
    if (row != target) memcpy(target, row, row_bytes);
  }
}

static const void *bias_at(const linear_run *run, int64_t column) {
  return run->bias ? (const char *)run->bias + (size_t)column * run->params->bytes : NULL;
}

static void *scratch_of(const linear_run *run, size_t worker) {
  return work(run, WORK_SCRATCH) + worker * run->params->scratch_bytes;
}

/* The product with columns of the weight [size, classes], from `column` on, or of its transpose. */
static void multiply(const linear_run *run, const egi_product *product, int64_t column, bool is_transposed,
                     size_t worker) {
  const linear_params *p = run->params;
  char *scratch = scratch_of(run, worker);
  if (p->is_quantised) { /* stored as [classes, size] unless it is turned */
    const egi_quantised_product whole = {.matrix = &run->matrix,
                                         .is_transposed = p->weight.is_turned == is_transposed,
                                         .product = *product,
                                         .column = column,
                                         .buffer = (float *)(void *)(scratch + product_bytes()),
                                         .scratch = scratch};
    egi_quantised_multiply(p->isa, &whole);
    return;
  }
  const egi_tensor *tensor = &run->call->inputs[1];
  egi_matrix weight = {tensor->data, tensor->dtype, tensor->strides[is_transposed], tensor->strides[!is_transposed]};
  egi_product plain = *product;
  plain.b = egi_matrix_part(&weight, 0, column);
  egi_product_run(p->isa, &plain, scratch);
}

/* ---- forward ---------------------------------------------------------------------------------------------------- */

static double *statistics_at(const linear_run *run, int64_t index, int64_t tile) {
  return (double *)(void *)work(run, WORK_STATISTICS) + (index * run->params->n_tiles + tile) * 2;
}

/* Logits of a tile: largest, sum of exponentials, and the label's where it lies here. */
static void forward_tile(void *argument, size_t index, size_t worker) {
  const linear_run *run = argument;
  const linear_params *p = run->params;
  int64_t first = (int64_t)index % run->n_row_tiles * p->tile_rows, tile = (int64_t)index / run->n_row_tiles;
  int64_t n = smaller(p->tile_rows, run->n_active - first), column = tile * TILE_CLASSES;
  int64_t columns = smaller(TILE_CLASSES, p->n_classes - column);
  char *hidden = work(run, WORK_HIDDEN) + worker * (size_t)(p->tile_rows * p->size) * p->bytes;
  char *logits = work(run, WORK_LOGITS) + worker * (size_t)(p->tile_rows * TILE_CLASSES) * p->bytes;
  gather_hidden(run, first, n, hidden);
  const egi_product product = {.m = n,
                               .n = columns,
                               .k = p->size,
                               .a = dense(run, hidden, p->size),
                               .c = dense(run, logits, columns),
                               .alpha = 1.0};
  multiply(run, &product, column, false, worker);
  double *label_logits = (double *)(void *)work(run, WORK_LABEL_LOGITS);
  for (int64_t i = 0; i < n; i++) {
    char *row = logits + (size_t)(i * columns) * p->bytes;
    p->functions->largest_and_sum(row, bias_at(run, column), columns, statistics_at(run, first + i, tile));
    int64_t label = egi_label_get(&p->labels, &run->call->inputs[2], run->active[first + i]) - column;
    if (label >= 0 && label < columns) label_logits[first + i] = egi_real_get(row + (size_t)label * p->bytes, p->dtype);
  }
}

/* Log-sum-exp over the tiles of a row, in order. */
static double combine_tiles(const linear_run *run, int64_t index) {
  double largest = -(double)INFINITY, sum = 0;
  for (int64_t tile = 0; tile < run->params->n_tiles; tile++) {
    const double *statistics = statistics_at(run, index, tile);
    if (statistics[0] > largest) {
      sum *= exp(largest - statistics[0]);
      largest = statistics[0];
    }
    sum += statistics[1] * exp(statistics[0] - largest);
  }
  return largest + log(sum);
}

eg_status egi_cpu_run_linear_log_probability(eg_context *ctx, const egi_kernel_call *call) {
  const linear_params *p = call->params;
  linear_run run = {.params = p, .call = call};
  EG_TRY(start_run(ctx, &run));
  run.n_row_tiles = ceil_divide(run.n_active, p->tile_rows);
  egi_pool_run(call->pool, (size_t)(run.n_row_tiles * p->n_tiles), forward_tile, &run);
  const double *label_logits = (const double *)(const void *)work(&run, WORK_LABEL_LOGITS);
  int64_t next = 0;
  for (int64_t row = 0; row < p->n_rows; row++) {
    double lse = 0, log_probability = 0;
    if (next < run.n_active && run.active[next] == row) {
      lse = combine_tiles(&run, next);
      log_probability = label_logits[next] - lse;
      next++;
    }
    egi_row_numbers_set(&p->first, &call->outputs[0], row, log_probability);
    egi_row_numbers_set(&p->second, &call->outputs[1], row, lse);
  }
  return EG_OK;
}

/* ---- gradient --------------------------------------------------------------------------------------------------- */

static void gather_block(void *argument, size_t index, size_t worker) {
  (void)worker;
  const linear_run *run = argument;
  int64_t row = (int64_t)index * 16;
  gather_hidden(run, run->first + row, smaller(16, run->n - row),
                work(run, WORK_HIDDEN) + (size_t)(row * run->params->size) * run->params->bytes);
}

/* A tile of d logits = d logp · (one-hot - softmax). */
static void logits_tile(void *argument, size_t index, size_t worker) {
  const linear_run *run = argument;
  const linear_params *p = run->params;
  const egi_tensor *inputs = run->call->inputs;
  int64_t row = (int64_t)index % run->n_row_tiles * p->tile_rows,
          column = (int64_t)index / run->n_row_tiles * TILE_CLASSES;
  int64_t n = smaller(p->tile_rows, run->n - row), columns = smaller(TILE_CLASSES, p->n_classes - column);
  egi_matrix hidden = dense(run, work(run, WORK_HIDDEN), p->size);
  egi_matrix logits = dense(run, work(run, WORK_LOGITS), p->n_classes);
  const egi_product product = {.m = n,
                               .n = columns,
                               .k = p->size,
                               .a = egi_matrix_part(&hidden, row, 0),
                               .c = egi_matrix_part(&logits, row, column),
                               .alpha = 1.0};
  multiply(run, &product, column, false, worker);
  for (int64_t i = 0; i < n; i++) {
    int64_t source = run->active[run->first + row + i];
    double lse = egi_row_numbers_get(&p->first, &inputs[3], source);
    double gradient = egi_row_numbers_get(&p->second, &inputs[4], source);
    char *line = egi_matrix_at(&logits, row + i, column);
    if (run->bias) p->functions->add(line, bias_at(run, column), columns);
    p->functions->scaled_exp(line, columns, lse, -gradient);
    int64_t label = egi_label_get(&p->labels, &inputs[2], source) - column;
    if (label < 0 || label >= columns) continue;
    char *at = line + (size_t)label * p->bytes;
    egi_real_set(at, p->dtype, egi_real_get(at, p->dtype) + gradient);
  }
}

/* A tile of d hidden = d logits · weight', and its rows put where they belong. */
static void hidden_tile(void *argument, size_t index, size_t worker) {
  const linear_run *run = argument;
  const linear_params *p = run->params;
  int64_t row = (int64_t)index % run->n_row_tiles * p->tile_rows,
          column = (int64_t)index / run->n_row_tiles * TILE_COLUMNS;
  int64_t n = smaller(p->tile_rows, run->n - row), columns = smaller(TILE_COLUMNS, p->size - column);
  egi_matrix logits = dense(run, work(run, WORK_LOGITS), p->n_classes);
  egi_matrix block = dense(run, work(run, WORK_D_HIDDEN), p->size);
  const egi_product product = {.m = n,
                               .n = columns,
                               .k = p->n_classes,
                               .a = egi_matrix_part(&logits, row, 0),
                               .c = egi_matrix_part(&block, row, column),
                               .alpha = 1.0};
  multiply(run, &product, column, true, worker);
  for (int64_t i = 0; i < n; i++) {
    char *target = egi_rows_at(&p->d_hidden, run->call->outputs[0].data, run->active[run->first + row + i]);
    int64_t stride = p->d_hidden.inner_strides[0];
    char *line = egi_matrix_at(&block, row + i, column);
    for (int64_t j = 0; j < columns && stride != 1; j++)
      memcpy(target + (column + j) * stride * (int64_t)p->bytes, line + (size_t)j * p->bytes, p->bytes);
    if (stride == 1) memcpy(target + column * (int64_t)p->bytes, line, (size_t)columns * p->bytes);
  }
}

/* A tile of d weight += hidden' · d logits. */
static void weight_tile(void *argument, size_t index, size_t worker) {
  const linear_run *run = argument;
  const linear_params *p = run->params;
  const egi_tensor *out = &run->call->outputs[1];
  int64_t n_row_tiles = ceil_divide(p->size, SHORT_ROWS);
  int64_t row = (int64_t)index % n_row_tiles * SHORT_ROWS, column = (int64_t)index / n_row_tiles * TILE_CLASSES;
  egi_matrix hidden = {work(run, WORK_HIDDEN), p->dtype, 1, p->size};
  egi_matrix logits = dense(run, work(run, WORK_LOGITS), p->n_classes);
  egi_matrix d_weight = {out->data, p->dtype, out->strides[0], out->strides[1]};
  egi_product product = {smaller(SHORT_ROWS, p->size - row),
                         smaller(TILE_CLASSES, p->n_classes - column),
                         run->n,
                         egi_matrix_part(&hidden, row, 0),
                         egi_matrix_part(&logits, 0, column),
                         egi_matrix_part(&d_weight, row, column),
                         1.0,
                         run->first == 0 ? 0.0 : 1.0};
  egi_product_run(p->isa, &product, scratch_of(run, worker));
}

/* Sums d logits over the block's rows in order, in f64, for one range of classes. */
static void bias_tile(void *argument, size_t index, size_t worker) {
  (void)worker;
  const linear_run *run = argument;
  const linear_params *p = run->params;
  int64_t column = (int64_t)index * TILE_CLASSES, columns = smaller(TILE_CLASSES, p->n_classes - column);
  double *sums = (double *)(void *)work(run, WORK_D_BIAS) + column;
  const egi_tensor *out = &run->call->outputs[2];
  for (int64_t j = 0; j < columns && run->first == 0; j++) sums[j] = 0;
  for (int64_t i = 0; i < run->n; i++) {
    const char *line = work(run, WORK_LOGITS) + (size_t)(i * p->n_classes + column) * p->bytes;
    for (int64_t j = 0; j < columns; j++) sums[j] += egi_real_get(line + (size_t)j * p->bytes, p->dtype);
  }
  for (int64_t j = 0; j < columns; j++)
    egi_real_set((char *)out->data + (column + j) * out->strides[0] * (int64_t)p->bytes, p->dtype, sums[j]);
}

static void run_block(linear_run *run) {
  const linear_params *p = run->params;
  const egi_kernel_call *call = run->call;
  run->n = smaller(p->block_rows, run->n_active - run->first);
  run->n_row_tiles = ceil_divide(run->n, p->tile_rows);
  egi_pool_run(call->pool, (size_t)ceil_divide(run->n, 16), gather_block, run);
  egi_pool_run(call->pool, (size_t)(run->n_row_tiles * p->n_tiles), logits_tile, run);
  if (has_output(call->outputs, call->n_outputs, 0))
    egi_pool_run(call->pool, (size_t)(run->n_row_tiles * ceil_divide(p->size, TILE_COLUMNS)), hidden_tile, run);
  if (has_output(call->outputs, call->n_outputs, 1))
    egi_pool_run(call->pool, (size_t)(ceil_divide(p->size, SHORT_ROWS) * p->n_tiles), weight_tile, run);
  if (has_output(call->outputs, call->n_outputs, 2)) egi_pool_run(call->pool, (size_t)p->n_tiles, bias_tile, run);
}

eg_status egi_cpu_run_linear_log_probability_grad(eg_context *ctx, const egi_kernel_call *call) {
  const linear_params *p = call->params;
  linear_run run = {.params = p, .call = call};
  EG_TRY(start_run(ctx, &run));
  double zero = 0;
  for (unsigned i = 0; i < call->n_outputs; i++) /* rows without a label, or no row at all */
    if (has_output(call->outputs, call->n_outputs, i) && (i == 0 || run.n_active == 0))
      egi_fill(call->pool, &call->outputs[i], &zero);
  for (; run.first < run.n_active; run.first += p->block_rows) run_block(&run);
  return EG_OK;
}
