/* Products of expert-sorted rows with the experts' matrices. A task is one expert and EGI_RAGGED_TILE of its outputs;
 * experts without rows have none. Quantised matrices are decoded a tile at a time, W = (q - zero) · scale, with values
 * of 2, 4 or 8 bits packed along K, the first in the lowest bits, and 2^(bits-1) where zero points are left out
 * (onnxruntime's QMoE). */
#include "backend/cpu/narrow.h"
#include "backend/cpu/ragged.h"
#include "base/blockwise.h"

typedef struct product_task {
  const egi_ragged_product *product;
  int64_t outputs, tiles;
  int64_t first_expert;
} product_task;

/* Rows [n, n + count) and columns [k, k + length) of a matrix. */
typedef struct part {
  int64_t n, count, k, length;
} part;

static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static size_t aligned(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

/* ---- scratch: a decoded tile, weighted results, what egi_product_run needs ------------------------------------- */

static size_t decoded_bytes(const egi_ragged *ragged, int64_t longest, size_t element_bytes) {
  return ragged->is_quantised ? aligned((size_t)longest * (EGI_RAGGED_TILE + 8) * element_bytes) : 0;
}

static size_t result_bytes(size_t element_bytes) {
  return (size_t)EGI_RAGGED_TILE_ROWS * EGI_RAGGED_TILE * element_bytes;
}

size_t egi_ragged_scratch(const egi_ragged *ragged, int64_t longest, size_t element_bytes) {
  return decoded_bytes(ragged, longest, element_bytes) + result_bytes(element_bytes) +
         aligned(egi_product_scratch(EGI_RAGGED_TILE_ROWS, EGI_RAGGED_TILE));
}

/* ---- operands ------------------------------------------------------------------------------------------------- */

egi_tensor egi_ragged_operand(const egi_ragged *ragged, const egi_tensor *inputs, egi_ragged_role role,
                              int64_t expert) {
  egi_tensor t = inputs[egi_ragged_input(ragged, role, expert)];
  if (ragged->counts[role] > 1 || t.rank < (role == EGI_RAGGED_BIAS ? 2 : 3)) return t;
  t.data = (char *)t.data + expert * t.strides[0] * (int64_t)egi_element_bytes(t.dtype);
  for (int i = 1; i < t.rank; i++) {
    t.dims[i - 1] = t.dims[i];
    t.strides[i - 1] = t.strides[i];
  }
  t.rank--;
  return t;
}

bool egi_ragged_takes(const egi_ragged *ragged, const egi_tensor *inputs, eg_dtype dtype) {
  for (unsigned role = 0; role < EGI_RAGGED_ROLES; role++) {
    bool is_packed = role == EGI_RAGGED_ZEROS || (role == EGI_RAGGED_WEIGHT && ragged->is_quantised);
    for (uint32_t i = 0; i < ragged->counts[role]; i++) {
      eg_dtype own = inputs[ragged->first[role] + i].dtype;
      if (ragged->has_levels && (role == EGI_RAGGED_SCALES || role == EGI_RAGGED_ZEROS)) {
        bool is_code = role == EGI_RAGGED_SCALES && ragged->counts[EGI_RAGGED_ZEROS] > 0;
        if (own != (is_code ? EG_DTYPE_U8 : EG_DTYPE_F32)) return false;
        continue;
      }
      bool is_narrow = (own == EG_DTYPE_F16 || own == EG_DTYPE_BF16) && dtype == EG_DTYPE_F32;
      if (is_packed ? own != EG_DTYPE_U8 : own != dtype && !is_narrow) return false;
    }
  }
  return true;
}

/* Number `index` of a row of bytes `step` apart. */
static unsigned packed_at(const uint8_t *row, int64_t step, int64_t index, int64_t bits) {
  int64_t per_byte = 8 / bits;
  return (unsigned)row[index / per_byte * step] >> (unsigned)(index % per_byte * bits) & ((1u << (unsigned)bits) - 1u);
}

/* Scale of block b: a number, or a code that the floats of `nested` decode as egi_nested_decode() does. */
static float flat_scale(const egi_tensor *scales, const egi_tensor *nested, int64_t b) {
  if (nested == NULL) return ((const float *)scales->data)[b * scales->strides[0]];
  const float *floats = nested->data;
  int64_t step = nested->strides[0], code = ((const uint8_t *)scales->data)[b * scales->strides[0]];
  float product = floats[(1 + code) * step] * floats[(EGI_NESTED_HEADER + b / EGI_NESTED_BLOCK) * step];
  return product + floats[0];
}

/* Levels of 4 bits in blocks of the flattened operand; rows are whole bytes. */
static void decode_levels(const egi_ragged_product *p, int64_t expert, const part *at, char *out) {
  const egi_ragged *ragged = p->ragged;
  const egi_tensor *inputs = p->call->inputs, *scales = &inputs[egi_ragged_input(ragged, EGI_RAGGED_SCALES, expert)];
  bool is_stack = ragged->counts[EGI_RAGGED_WEIGHT] == 1, is_nested = ragged->counts[EGI_RAGGED_ZEROS] > 0;
  const egi_tensor *nested = is_nested ? &inputs[egi_ragged_input(ragged, EGI_RAGGED_ZEROS, expert)] : NULL;
  const egi_tensor codes = egi_ragged_operand(ragged, inputs, EGI_RAGGED_WEIGHT, expert);
  int64_t k = ragged->in_features, block = ragged->block_size, base = is_stack ? expert * p->n * k : 0;
  size_t element_bytes = egi_element_bytes(p->out.dtype);
  uint8_t bytes[EGI_RAGGED_TILE / 2 + 1];
  float run[EGI_RAGGED_TILE];
  for (int64_t i = 0; i < at->count; i++)
    for (int64_t done = 0, n = 0; done < at->length; done += n) {
      int64_t column = at->k + done, first = base + (at->n + i) * k + column, b = first / block;
      n = smaller(smaller((b + 1) * block - first, at->length - done), EGI_RAGGED_TILE);
      const uint8_t *from = (const uint8_t *)codes.data + (at->n + i) * codes.strides[0];
      for (int64_t j = column / 2; j <= (column + n - 1) / 2; j++) bytes[j - column / 2] = from[j * codes.strides[1]];
      egi_four_bit_decode((egi_four_bit)ragged->quant_type, bytes, (uint64_t)(column % 2), (size_t)n,
                          flat_scale(scales, nested, b), run);
      char *to = out + (size_t)(i * at->length + done) * element_bytes;
      for (int64_t j = 0; j < n; j++) egi_real_set(to + (size_t)j * element_bytes, p->out.dtype, (double)run[j]);
    }
}

static void decode(const egi_ragged_product *p, int64_t expert, const part *at, char *out) {
  const egi_ragged *ragged = p->ragged;
  const egi_tensor *inputs = p->call->inputs;
  egi_tensor codes = egi_ragged_operand(ragged, inputs, EGI_RAGGED_WEIGHT, expert);
  egi_tensor scales = egi_ragged_operand(ragged, inputs, EGI_RAGGED_SCALES, expert), zeros = {0};
  int64_t bits = ragged->bits, block = ragged->block_size > 0 ? ragged->block_size : ragged->in_features;
  size_t element_bytes = egi_element_bytes(p->out.dtype);
  if (ragged->counts[EGI_RAGGED_ZEROS] > 0) zeros = egi_ragged_operand(ragged, inputs, EGI_RAGGED_ZEROS, expert);
  for (int64_t i = 0; i < at->count; i++) {
    int64_t n = at->n + i;
    const uint8_t *row = (const uint8_t *)codes.data + n * codes.strides[0];
    const uint8_t *zero_row = zeros.data ? (const uint8_t *)zeros.data + n * zeros.strides[0] : NULL;
    for (int64_t k = at->k; k < at->k + at->length;) {
      int64_t b = k / block, end = smaller((b + 1) * block, at->k + at->length);
      double scale = egi_float_get(&scales, n * scales.strides[0] + b * scales.strides[1]);
      double zero = zero_row ? (double)packed_at(zero_row, zeros.strides[1], b, bits) : (double)(1 << (bits - 1));
      for (; k < end; k++)
        egi_real_set(out + (size_t)(i * at->length + k - at->k) * element_bytes, p->out.dtype,
                     ((double)packed_at(row, codes.strides[1], k, bits) - zero) * scale);
    }
  }
}

/* The part of an expert's matrix, decoded to `buffer` where it is quantised. */
static egi_matrix load(const egi_ragged_product *p, int64_t expert, const part *at, char *buffer) {
  if (p->ragged->is_quantised) {
    if (p->ragged->has_levels)
      decode_levels(p, expert, at, buffer);
    else
      decode(p, expert, at, buffer);
    return (egi_matrix){buffer, p->out.dtype, at->length, 1};
  }
  egi_tensor t = egi_ragged_operand(p->ragged, p->call->inputs, EGI_RAGGED_WEIGHT, expert);
  egi_matrix matrix = egi_ragged_matrix(&t, p->ragged->is_transposed);
  return egi_matrix_part(&matrix, at->n, at->k);
}

/* ---- products ------------------------------------------------------------------------------------------------- */

/* Puts factor · bias, from output `first` on, where the product is added to it. */
static void set_bias(const egi_ragged_product *p, int64_t expert, const egi_product *tile, int64_t first,
                     double factor) {
  egi_tensor bias = egi_ragged_operand(p->ragged, p->call->inputs, EGI_RAGGED_BIAS, expert);
  for (int64_t i = 0; i < tile->m; i++)
    for (int64_t j = 0; j < tile->n; j++)
      egi_real_set(egi_matrix_at(&tile->c, i, j), tile->c.dtype,
                   factor * egi_float_get(&bias, (first + j) * bias.strides[0]));
}

static double addend_at(const egi_ragged_product *p, int64_t row, int64_t column) {
  const egi_tensor *t = p->addend;
  size_t offset = (size_t)(row * t->strides[0] + column * t->strides[1]) * egi_element_bytes(t->dtype);
  return egi_real_get((const char *)t->data + offset, t->dtype);
}

/* alpha · the product, upon what the addend and the bias say, straight into the output. */
static void add_up(const egi_ragged_product *p, int64_t expert, egi_product *tile, int64_t row, int64_t first,
                   void *scratch) {
  bool has_bias = !p->is_backward && p->ragged->counts[EGI_RAGGED_BIAS] > 0;
  egi_matrix out = egi_matrix_part(&p->out, row, first);
  tile->c = out;
  tile->alpha = p->alpha;
  tile->beta = has_bias || p->addend != NULL ? 1.0 : 0.0;
  bool is_in_place = p->addend != NULL && p->addend->data == p->out.data;
  if (has_bias) {
    if (p->addend == NULL) set_bias(p, expert, tile, first, p->alpha);
    egi_tensor bias = egi_ragged_operand(p->ragged, p->call->inputs, EGI_RAGGED_BIAS, expert);
    for (int64_t i = 0; p->addend != NULL && i < tile->m; i++)
      for (int64_t j = 0; j < tile->n; j++)
        egi_real_set(egi_matrix_at(&out, i, j), out.dtype,
                     addend_at(p, row + i, first + j) + p->alpha * egi_float_get(&bias, (first + j) * bias.strides[0]));
  } else if (p->addend != NULL && !is_in_place) {
    for (int64_t i = 0; i < tile->m; i++)
      for (int64_t j = 0; j < tile->n; j++)
        egi_real_set(egi_matrix_at(&out, i, j), out.dtype, addend_at(p, row + i, first + j));
  }
  egi_product_run(p->isa, tile, scratch);
}

/* The same with a weight for each row: through a buffer. */
static void add_up_weighted(const egi_ragged_product *p, int64_t expert, egi_product *tile, int64_t row, int64_t first,
                            char *scratch) {
  size_t element_bytes = egi_element_bytes(p->out.dtype);
  egi_matrix out = egi_matrix_part(&p->out, row, first);
  bool has_bias = p->ragged->counts[EGI_RAGGED_BIAS] > 0;
  tile->c = (egi_matrix){scratch, p->out.dtype, tile->n, 1};
  tile->alpha = 1.0;
  tile->beta = has_bias ? 1.0 : 0.0;
  if (has_bias) set_bias(p, expert, tile, first, 1.0);
  egi_product_run(p->isa, tile, scratch + result_bytes(element_bytes));
  for (int64_t i = 0; i < tile->m; i++) {
    double weight = p->alpha * egi_float_get(p->row_weight, (row + i) * p->row_weight->strides[0]);
    for (int64_t j = 0; j < tile->n; j++) {
      double value = weight * egi_real_get(egi_matrix_at(&tile->c, i, j), out.dtype);
      egi_real_set(egi_matrix_at(&out, i, j), out.dtype, p->addend ? addend_at(p, row + i, first + j) + value : value);
    }
  }
}

static void multiply_task(void *argument, size_t task, size_t worker) {
  const product_task *t = argument;
  const egi_ragged_product *p = t->product;
  int64_t expert = t->first_expert + (int64_t)task / t->tiles, first = (int64_t)task % t->tiles * EGI_RAGGED_TILE;
  int64_t count = smaller(EGI_RAGGED_TILE, t->outputs - first), end = p->offsets[expert + 1];
  int64_t k = p->ragged->in_features, longest = p->n > k ? p->n : k;
  char *decoded = p->scratch + worker * p->scratch_bytes;
  char *scratch = decoded + decoded_bytes(p->ragged, longest, egi_element_bytes(p->out.dtype));
  if (p->offsets[expert] == end) return;
  const part at = {p->is_backward ? 0 : first, p->is_backward ? p->n : count, p->is_backward ? first : 0,
                   p->is_backward ? count : k};
  egi_matrix b = load(p, expert, &at, decoded);
  if (!p->is_backward) b = (egi_matrix){b.data, b.dtype, b.column_stride, b.row_stride};
  for (int64_t row = p->offsets[expert]; row < end; row += EGI_RAGGED_TILE_ROWS) {
    egi_product tile = {.m = smaller(EGI_RAGGED_TILE_ROWS, end - row),
                        .n = count,
                        .k = p->is_backward ? p->n : k,
                        .a = egi_matrix_part(&p->in, row, 0),
                        .b = b};
    if (p->row_weight != NULL)
      add_up_weighted(p, expert, &tile, row, first, scratch);
    else
      add_up(p, expert, &tile, row, first, scratch + result_bytes(egi_element_bytes(p->out.dtype)));
  }
}

void egi_ragged_multiply(const egi_ragged_product *p) {
  product_task t = {.product = p, .outputs = p->is_backward ? p->ragged->in_features : p->n};
  t.tiles = (t.outputs + EGI_RAGGED_TILE - 1) / EGI_RAGGED_TILE;
  if (!p->ragged->is_loop) {
    egi_pool_run(p->call->pool, (size_t)(p->ragged->n_experts * t.tiles), multiply_task, &t);
    return;
  }
  for (; t.first_expert < p->ragged->n_experts; t.first_expert++)
    egi_pool_run(p->call->pool, (size_t)t.tiles, multiply_task, &t);
}
