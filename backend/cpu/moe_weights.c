/* Products of expert-sorted rows with the experts' matrices. A task is one expert and EGI_MOE_TILE of its outputs;
 * experts without rows have none (their weight gradients are zeroed). Quantised matrices are decoded a tile at a time,
 * W = (q - zero) · scale, with values of 2, 4 or 8 bits packed along K, the first in the lowest bits, and 2^(bits-1)
 * where zero points are left out (onnxruntime's QMoE). */
#include "backend/cpu/moe.h"

typedef struct product_run {
  const egi_moe_run *run;
  const egi_moe_product *product;
  int64_t outputs, tiles;
  int64_t first_column; /* of a bias gradient */
  const char *rows;
} product_run;

static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static size_t aligned(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

/* A decoded tile, and what egi_product_run needs. */
static size_t tile_bytes(const egi_moe_params *p) {
  if (!p->moe.is_quantised) return 0;
  int64_t longest = p->width > p->gate ? p->width : p->gate;
  if (p->inner > longest) longest = p->inner;
  return aligned((size_t)(longest * (EGI_MOE_TILE + 8)) * p->element_bytes);
}

size_t egi_moe_scratch(const egi_moe_params *p) {
  int64_t rows = EGI_MOE_PRODUCT_ROWS > EGI_MOE_TILE ? EGI_MOE_PRODUCT_ROWS : EGI_MOE_TILE;
  return tile_bytes(p) + aligned(egi_product_scratch(rows, EGI_MOE_TILE));
}

/* Expert e's part of an operand: of a stack, or an input of its own. The first axis of a stack is left out. */
static egi_tensor operand_of(const egi_moe_run *run, egi_moe_role role, int64_t expert) {
  const egi_moe *moe = &run->p->moe;
  egi_tensor t = run->call->inputs[egi_moe_input(moe, role, expert)];
  if (moe->counts[role] > 1) return t;
  t.data = (char *)t.data + expert * t.strides[0] * (int64_t)egi_element_bytes(t.dtype);
  for (int i = 1; i < t.rank; i++) {
    t.dims[i - 1] = t.dims[i];
    t.strides[i - 1] = t.strides[i];
  }
  t.rank--;
  return t;
}

static egi_matrix matrix_of(const egi_tensor *t, bool is_transposed) {
  return (egi_matrix){t->data, t->dtype, t->strides[is_transposed ? 1 : 0], t->strides[is_transposed ? 0 : 1]};
}

/* ---- quantised ------------------------------------------------------------------------------------------------ */

/* Rows [n, n + count) and columns [k, k + length) of the matrix. */
typedef struct part {
  int64_t n, count, k, length;
} part;

/* Number `index` of a row of bytes `step` apart. */
static unsigned packed_at(const uint8_t *row, int64_t step, int64_t index, int64_t bits) {
  int64_t per_byte = 8 / bits;
  return (unsigned)row[index / per_byte * step] >> (unsigned)(index % per_byte * bits) & ((1u << (unsigned)bits) - 1u);
}

static void decode(const egi_moe_run *run, egi_moe_role role, int64_t expert, const part *at, int64_t columns,
                   char *out) {
  const egi_moe_params *p = run->p;
  egi_tensor codes = operand_of(run, role, expert);
  egi_tensor scales = operand_of(run, (egi_moe_role)(EGI_MOE_GATE_SCALES + role), expert), zeros = {0};
  egi_moe_role zero_role = (egi_moe_role)(EGI_MOE_GATE_ZEROS + role);
  int64_t bits = p->moe.bits, block = p->moe.block_size > 0 ? p->moe.block_size : columns;
  if (p->moe.counts[zero_role] > 0) zeros = operand_of(run, zero_role, expert);
  for (int64_t i = 0; i < at->count; i++) {
    int64_t n = at->n + i;
    const uint8_t *row = (const uint8_t *)codes.data + n * codes.strides[0];
    const uint8_t *zero_row = zeros.data ? (const uint8_t *)zeros.data + n * zeros.strides[0] : NULL;
    for (int64_t k = at->k; k < at->k + at->length;) {
      int64_t b = k / block, end = smaller((b + 1) * block, at->k + at->length);
      double scale = egi_moe_number(&scales, n * scales.strides[0] + b * scales.strides[1]);
      double zero = zero_row ? (double)packed_at(zero_row, zeros.strides[1], b, bits) : (double)(1 << (bits - 1));
      for (; k < end; k++)
        egi_real_set(egi_moe_at(p, out, i * at->length + k - at->k), p->dtype,
                     ((double)packed_at(row, codes.strides[1], k, bits) - zero) * scale);
    }
  }
}

/* The part of an expert's matrix, decoded to `buffer` where it is quantised. */
static egi_matrix load(const egi_moe_run *run, const egi_moe_product *product, int64_t expert, const part *at,
                       char *buffer) {
  const egi_moe_params *p = run->p;
  if (p->moe.is_quantised) {
    decode(run, product->role, expert, at, product->k, buffer);
    return (egi_matrix){buffer, p->dtype, at->length, 1};
  }
  egi_tensor t = operand_of(run, product->role, expert);
  egi_matrix matrix = matrix_of(&t, p->moe.is_transposed[product->role / 2]);
  return egi_matrix_part(&matrix, at->n, at->k);
}

/* ---- products ------------------------------------------------------------------------------------------------- */

static egi_matrix rows_at(const egi_moe_params *p, const char *rows, int64_t row, int64_t stride, int64_t column) {
  return (egi_matrix){(char *)(uintptr_t)rows + (size_t)(row * stride + column) * p->element_bytes, p->dtype, stride,
                      1};
}

/* Puts the bias where the product is added to it. */
static void set_bias(const product_run *r, int64_t expert, const egi_matrix *out, int64_t rows, int64_t first,
                     int64_t count) {
  egi_tensor bias = operand_of(r->run, (egi_moe_role)(r->product->role + 1), expert);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < count; j++)
      egi_real_set(egi_matrix_at(out, i, j), out->dtype, egi_moe_number(&bias, (first + j) * bias.strides[0]));
}

static void multiply_task(void *argument, size_t task, size_t worker) {
  const product_run *r = argument;
  const egi_moe_run *run = r->run;
  const egi_moe_params *p = run->p;
  const egi_moe_product *product = r->product;
  int64_t expert = (int64_t)task / r->tiles, first = (int64_t)task % r->tiles * EGI_MOE_TILE;
  int64_t count = smaller(EGI_MOE_TILE, r->outputs - first), start = run->offsets[expert];
  int64_t end = run->offsets[expert + 1];
  bool is_forward = product->kind == EGI_MOE_FORWARD;
  char *scratch = (char *)run->call->workspace + p->scratch + worker * p->scratch_bytes;
  if (start == end) return;
  const part at = {is_forward ? first : 0, is_forward ? count : product->n, is_forward ? 0 : first,
                   is_forward ? product->k : count};
  egi_matrix b = load(run, product, expert, &at, scratch);
  if (is_forward) b = (egi_matrix){b.data, b.dtype, b.column_stride, b.row_stride};
  bool has_bias = is_forward && p->moe.counts[product->role + 1] > 0;
  for (int64_t row = start; row < end; row += EGI_MOE_PRODUCT_ROWS) {
    int64_t rows = smaller(EGI_MOE_PRODUCT_ROWS, end - row);
    egi_product part_product = {rows,
                                count,
                                is_forward ? product->k : product->n,
                                rows_at(p, product->in, row, product->in_stride, 0),
                                b,
                                rows_at(p, product->out, row, product->out_stride, first),
                                1.0,
                                has_bias || product->is_added ? 1.0 : 0.0};
    if (has_bias) set_bias(r, expert, &part_product.c, rows, first, count);
    egi_product_run(p->isa, &part_product, scratch + tile_bytes(p));
  }
}

/* Gradient of EGI_MOE_TILE rows of an expert's matrix. */
static void reduce_task(void *argument, size_t task, size_t worker) {
  const product_run *r = argument;
  const egi_moe_run *run = r->run;
  const egi_moe_params *p = run->p;
  const egi_moe_product *product = r->product;
  int64_t expert = (int64_t)task / r->tiles, first = (int64_t)task % r->tiles * EGI_MOE_TILE;
  int64_t count = smaller(EGI_MOE_TILE, r->outputs - first), start = run->offsets[expert];
  uint32_t output = egi_moe_input(&p->moe, product->role, expert);
  char *scratch = (char *)run->call->workspace + p->scratch + worker * p->scratch_bytes;
  egi_tensor t = run->call->outputs[output];
  if (t.dtype == EG_DTYPE_UNDEFINED) return;
  if (p->moe.counts[product->role] == 1) {
    t.data = (char *)t.data + (size_t)(expert * t.strides[0]) * p->element_bytes;
    for (int i = 1; i < 3; i++) t.strides[i - 1] = t.strides[i];
  }
  egi_matrix c = matrix_of(&t, p->moe.is_transposed[product->role / 2]);
  c = egi_matrix_part(&c, first, 0);
  egi_matrix a = rows_at(p, product->left, start, product->left_stride, first);
  for (int64_t column = 0; column < product->k; column += EGI_MOE_TILE) {
    egi_product part_product = {count,
                                smaller(EGI_MOE_TILE, product->k - column),
                                run->offsets[expert + 1] - start,
                                {a.data, a.dtype, 1, product->left_stride},
                                rows_at(p, product->in, start, product->in_stride, column),
                                egi_matrix_part(&c, 0, column),
                                1.0,
                                0.0};
    if (part_product.k > 0) {
      egi_product_run(p->isa, &part_product, scratch + tile_bytes(p));
      continue;
    }
    for (int64_t i = 0; i < part_product.m; i++)
      for (int64_t j = 0; j < part_product.n; j++) egi_real_set(egi_matrix_at(&part_product.c, i, j), p->dtype, 0.0);
  }
}

void egi_moe_multiply(const egi_moe_run *run, const egi_moe_product *product) {
  product_run r = {.run = run, .product = product};
  r.outputs = product->kind == EGI_MOE_BACKWARD ? product->k : product->n;
  r.tiles = (r.outputs + EGI_MOE_TILE - 1) / EGI_MOE_TILE;
  egi_pool_run(run->call->pool, (size_t)(run->p->n_experts * r.tiles),
               product->kind == EGI_MOE_REDUCE ? reduce_task : multiply_task, &r);
}

/* ---- biases --------------------------------------------------------------------------------------------------- */

static void bias_task(void *argument, size_t task, size_t worker) {
  const product_run *r = argument;
  const egi_moe_run *run = r->run;
  const egi_moe_params *p = run->p;
  int64_t expert = (int64_t)task, stride = r->tiles;
  uint32_t output = egi_moe_input(&p->moe, r->product->role, expert);
  (void)worker;
  egi_tensor t = run->call->outputs[output];
  if (t.dtype == EG_DTYPE_UNDEFINED) return;
  char *base = t.data;
  if (p->moe.counts[r->product->role] == 1) base += (size_t)(expert * t.strides[0]) * p->element_bytes;
  int64_t step = t.strides[t.rank - 1];
  for (int64_t j = 0; j < r->outputs; j++) {
    double sum = 0.0;
    for (int64_t row = run->offsets[expert]; row < run->offsets[expert + 1]; row++)
      sum += egi_real_get(r->rows + (size_t)(row * stride + r->first_column + j) * p->element_bytes, p->dtype);
    egi_real_set(base + j * step * (int64_t)p->element_bytes, p->dtype, sum);
  }
}

void egi_moe_reduce_bias(const egi_moe_run *run, egi_moe_role role, const char *rows, int64_t n, int64_t stride,
                         int64_t first) {
  const egi_moe_product product = {.role = role};
  product_run r = {.run = run, .product = &product, .outputs = n, .tiles = stride, .first_column = first, .rows = rows};
  if (run->p->moe.counts[role] > 0) egi_pool_run(run->call->pool, (size_t)run->p->n_experts, bias_task, &r);
}
