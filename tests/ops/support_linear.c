/* Conformance cases of Linear and LinearGrad: every storage against its formula in doubles. Types below 8 bits are
 * tested through whole graphs (tests/passes/test_lower_microsoft.c). */
#include "support_ops.h"

#include <math.h>

#include "base/blockwise.h"
#include "graph/linear.h"

/* NF4 (arXiv:2305.14314, appendix E) and FP4 as bitsandbytes defines them. */
static const double nf4[16] = {-1.0,
                               -0.6961928009986877,
                               -0.5250730514526367,
                               -0.39491748809814453,
                               -0.28444138169288635,
                               -0.18477343022823334,
                               -0.09105003625154495,
                               0.0,
                               0.07958029955625534,
                               0.16093020141124725,
                               0.24611230194568634,
                               0.33791524171829224,
                               0.44070982933044434,
                               0.5626170039176941,
                               0.7229568362236023,
                               1.0};
static const double fp4[8] = {0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25};

typedef enum zero_form { NO_ZEROS, PACKED_ZEROS, FLOAT_ZEROS } zero_form;

typedef struct sizes {
  int64_t n, k, block;
} sizes;

static const sizes all_sizes[] = {{1, 16, 16}, {5, 17, 16}, {97, 40, 32}, {3, 257, 32}, {200, 64, 64}, {2, 600, 128}};
static const int64_t row_shapes[][3] = {{1, 1, 0}, {2, 3, 0}, {1, 70, 0}, {0, 3, 0}};

static int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

static unsigned code_at(const ops_tensor *bytes, int64_t start, int64_t bits, int64_t index) {
  unsigned byte = (unsigned)bytes->values[start + index * bits / 8];
  return byte >> (unsigned)(index * bits % 8) & ((1u << bits) - 1u);
}

/* x and the result, filled: for the gradient x has n columns. */
static void add_ends(ops_case *c, int rank, const int64_t *rows, int64_t from, int64_t to) {
  int64_t dims[3];
  for (int i = 0; i < rank - 1; i++) dims[i] = rows[i];
  dims[rank - 1] = from;
  ops_fill_uniform(ops_add_input(c, EG_DTYPE_F32, rank, dims), -2, 2, 21);
  dims[rank - 1] = to;
  ops_add_output(c, EG_DTYPE_F32, rank, dims);
}

/* y = x·Wᵀ + bias, or dX = dY·W + term, for w [n, k]. */
static void expect_product(ops_case *c, const double *w, int64_t n, int64_t k, const ops_tensor *bias) {
  bool is_forward = c->op == EGI_OP_Linear, is_one_row = bias != NULL && ops_count(bias) < ops_count(&c->outputs[0]);
  int64_t from = is_forward ? k : n, to = is_forward ? n : k, rows = from > 0 ? ops_count(&c->inputs[0]) / from : 0;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < to; j++) {
      double sum = bias != NULL ? bias->values[is_one_row ? j : r * to + j] : 0.0;
      for (int64_t i = 0; i < from; i++)
        sum += c->inputs[0].values[r * from + i] * (is_forward ? w[j * k + i] : w[i * k + j]);
      c->outputs[0].values[r * to + j] = sum;
    }
  double largest = 0;
  for (int64_t i = 0; i < n * k; i++) largest = fmax(largest, fabs(w[i]));
  c->absolute = 2.0 * largest * 6e-8 * (double)(from + 4) + 1e-6;
}

static void add_storage(ops_case *c, const char *storage, int64_t n, int64_t k, int64_t block) {
  ops_add_attribute(c, egi_attribute_string("storage", storage));
  ops_add_attribute(c, egi_attribute_int("out_features", n));
  ops_add_attribute(c, egi_attribute_int("in_features", k));
  ops_add_attribute(c, egi_attribute_int("block_size", block));
}

typedef enum term_kind { NO_TERM, ONE_ROW, WHOLE_TERM } term_kind;

/* The bias; what is added to a gradient is never one row. */
static const ops_tensor *add_bias(ops_case *c, int64_t n, term_kind kind) {
  if (kind == NO_TERM) {
    ops_add_absent(c);
    return NULL;
  }
  bool is_row = c->op == EGI_OP_Linear && kind == ONE_ROW;
  ops_tensor *bias = ops_add_input(c, EG_DTYPE_F32, is_row ? 1 : c->outputs[0].rank, is_row ? &n : c->outputs[0].dims);
  ops_fill_uniform(bias, -1, 1, 22);
  return bias;
}

/* ---- nbits ------------------------------------------------------------------------------------------------------ */

typedef struct nbits_form {
  int64_t bits;
  zero_form zeros;
  bool has_groups, is_flat; /* is_flat: scales and zero points of one dim, as older files have them */
  eg_dtype scales;
} nbits_form;

static const nbits_form nbits_forms[] = {
    {4, NO_ZEROS, false, false, EG_DTYPE_F32},    {4, PACKED_ZEROS, false, false, EG_DTYPE_F32},
    {4, FLOAT_ZEROS, false, false, EG_DTYPE_F16}, {4, PACKED_ZEROS, true, true, EG_DTYPE_BF16},
    {8, NO_ZEROS, false, false, EG_DTYPE_F32},    {8, PACKED_ZEROS, true, false, EG_DTYPE_F32},
    {2, NO_ZEROS, false, true, EG_DTYPE_F16},     {2, PACKED_ZEROS, false, false, EG_DTYPE_F32},
    {2, FLOAT_ZEROS, true, false, EG_DTYPE_F32},
};

static void add_nbits_zeros(ops_case *c, const nbits_form *form, int64_t n, int64_t blocks) {
  int64_t packed = ceil_divide(blocks * form->bits, 8);
  const int64_t packed_dims[2] = {n, packed}, float_dims[2] = {n, blocks};
  const int64_t flat[2] = {n * packed, n * blocks};
  int rank = form->is_flat ? 1 : 2;
  if (form->zeros == NO_ZEROS) {
    ops_add_absent(c);
  } else if (form->zeros == PACKED_ZEROS) {
    ops_fill_uniform(ops_add_input(c, EG_DTYPE_U8, rank, form->is_flat ? &flat[0] : packed_dims), 0, 255, 25);
  } else {
    ops_fill_uniform(ops_add_input(c, form->scales, rank, form->is_flat ? &flat[1] : float_dims), 0, 9, 25);
  }
}

/* W[row, column] of the operands added so far. */
static double nbits_weight(const ops_case *c, const nbits_form *form, sizes s, int64_t row, int64_t column) {
  int64_t blocks = ceil_divide(s.k, s.block), bits = form->bits;
  int64_t group = form->has_groups ? (int64_t)c->inputs[EGI_LINEAR_GROUP_INDEX].values[column] : column / s.block;
  const ops_tensor *zeros = &c->inputs[EGI_LINEAR_ZERO_POINTS];
  double zero = ldexp(1.0, (int)bits - 1);
  if (form->zeros == PACKED_ZEROS) zero = code_at(zeros, row * ceil_divide(blocks * bits, 8), bits, group);
  if (form->zeros == FLOAT_ZEROS) zero = zeros->values[row * blocks + group];
  unsigned code = code_at(&c->inputs[EGI_LINEAR_WEIGHT], row * (blocks * s.block * bits / 8), bits, column);
  return ((double)code - zero) * c->inputs[EGI_LINEAR_SCALES].values[row * blocks + group];
}

static void check_nbits(void **state, egi_op op, sizes s, const nbits_form *form, size_t rows) {
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_F32);
  int64_t blocks = ceil_divide(s.k, s.block);
  add_ends(&c, 3, row_shapes[rows], op == EGI_OP_Linear ? s.k : s.n, op == EGI_OP_Linear ? s.n : s.k);
  const int64_t weight_dims[3] = {s.n, blocks, s.block * form->bits / 8}, scale_dims[2] = {s.n, blocks};
  const int64_t flat = s.n * blocks;
  ops_fill_uniform(ops_add_input(&c, EG_DTYPE_U8, 3, weight_dims), 0, 255, 23);
  const ops_tensor *bias = add_bias(&c, s.n, rows % 2 == 0 ? ONE_ROW : NO_TERM);
  ops_fill_uniform(ops_add_input(&c, form->scales, form->is_flat ? 1 : 2, form->is_flat ? &flat : scale_dims), -0.1,
                   0.1, 24);
  add_nbits_zeros(&c, form, s.n, blocks);
  if (form->has_groups) ops_fill_uniform(ops_add_input(&c, EG_DTYPE_I32, 1, &s.k), 0, (double)blocks - 1, 26);
  add_storage(&c, "nbits", s.n, s.k, s.block);
  ops_add_attribute(&c, egi_attribute_int("bits", form->bits));
  double *w = EGI_NEW(&c.arena, double, (size_t)(s.n * s.k));
  for (int64_t i = 0; i < s.n * s.k; i++) w[i] = nbits_weight(&c, form, s, i / s.k, i % s.k);
  expect_product(&c, w, s.n, s.k, bias);
  ops_check(&c);
  ops_end(&c);
}

/* A group that is not there must be told, not read. */
static void check_bad_group(void **state, egi_op op) {
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_F32);
  add_ends(&c, 2, row_shapes[0], 16, 16);
  ops_add_input(&c, EG_DTYPE_U8, 3, (const int64_t[]){16, 1, 8});
  ops_add_absent(&c);
  ops_add_input(&c, EG_DTYPE_F32, 2, (const int64_t[]){16, 1});
  ops_add_absent(&c);
  ops_tensor *groups = ops_add_input(&c, EG_DTYPE_I32, 1, (const int64_t[]){16});
  groups->values[7] = 1;
  add_storage(&c, "nbits", 16, 16, 16);
  c.expected_status = EG_ERROR_DATA;
  ops_check(&c);
  ops_end(&c);
}

/* ---- bnb4 and blocked ------------------------------------------------------------------------------------------- */

/* Scales of n blocks: numbers, or codes that a further operand decodes. */
static void add_flat_scales(ops_case *c, int64_t n, bool is_nested) {
  ops_tensor *scales = ops_add_input(c, is_nested ? EG_DTYPE_U8 : EG_DTYPE_F32, 1, &n);
  if (!is_nested) {
    ops_fill_uniform(scales, 0.01, 0.3, 28);
    return;
  }
  float map[256];
  int64_t n_nested = (int64_t)egi_nested_count((uint64_t)n);
  ops_fill_uniform(scales, 0, 255, 28);
  ops_add_absent(c);
  ops_add_absent(c);
  ops_tensor *nested = ops_add_input(c, EG_DTYPE_F32, 1, &n_nested);
  ops_fill_uniform(nested, 0.05, 0.2, 35);
  egi_dynamic_map(true, map);
  for (int i = 0; i < 256; i++) nested->values[1 + i] = (double)map[i];
}

static double flat_scale(const ops_case *c, int64_t block, bool is_nested) {
  double scale = c->inputs[EGI_LINEAR_SCALES].values[block];
  if (!is_nested) return scale;
  const double *nested = c->inputs[EGI_LINEAR_NESTED].values;
  return nested[1 + (int)scale] * nested[EGI_NESTED_HEADER + block / EGI_NESTED_BLOCK] + nested[0];
}

static void check_bnb4(void **state, egi_op op, sizes s, int64_t type, bool is_nested) {
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_F32);
  int64_t count = s.n * s.k, n_bytes = ceil_divide(count, 2), n_scales = ceil_divide(count, s.block);
  add_ends(&c, 2, row_shapes[2] + 1, op == EGI_OP_Linear ? s.k : s.n, op == EGI_OP_Linear ? s.n : s.k);
  const ops_tensor *codes = ops_add_input(&c, EG_DTYPE_U8, 1, &n_bytes);
  ops_fill_uniform(&c.inputs[1], 0, 255, 27);
  const ops_tensor *bias = add_bias(&c, s.n, ONE_ROW);
  add_flat_scales(&c, n_scales, is_nested);
  add_storage(&c, "bnb4", s.n, s.k, s.block);
  ops_add_attribute(&c, egi_attribute_int("quant_type", type));
  double *w = EGI_NEW(&c.arena, double, (size_t)count);
  for (int64_t i = 0; i < count; i++) {
    unsigned byte = (unsigned)codes->values[i / 2], code = i % 2 == 0 ? byte >> 4 : byte & 15;
    double level = type == 1 ? nf4[code] : code < 8 ? fp4[code] : -fp4[code - 8];
    w[i] = level * flat_scale(&c, i / s.block, is_nested);
  }
  expect_product(&c, w, s.n, s.k, bias);
  ops_check(&c);
  ops_end(&c);
}

typedef struct blocked_form {
  eg_dtype dtype;
  int64_t axis, block; /* block 0: one scale for each index of the axis; -1: one scale */
  bool is_transposed, has_zeros;
} blocked_form;

static const blocked_form blocked_forms[] = {
    {EG_DTYPE_I8, 1, 16, false, false}, {EG_DTYPE_U8, 1, 16, false, true}, {EG_DTYPE_U8, 0, 16, true, true},
    {EG_DTYPE_I8, 0, 16, false, true},  {EG_DTYPE_I8, 1, 16, true, false}, {EG_DTYPE_I8, 0, 0, false, true},
    {EG_DTYPE_U8, 1, 0, true, true},    {EG_DTYPE_I8, 1, -1, false, true},
};

static int64_t blocked_scale(const blocked_form *form, const int64_t dims[2], int64_t row, int64_t column) {
  if (form->block < 0) return 0;
  if (form->block == 0) return form->axis == 0 ? row : column;
  if (form->axis == 0) return row / form->block * dims[1] + column;
  return row * ceil_divide(dims[1], form->block) + column / form->block;
}

static void check_blocked(void **state, egi_op op, int64_t n, int64_t k, const blocked_form *form) {
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_F32);
  const int64_t dims[2] = {form->is_transposed ? k : n, form->is_transposed ? n : k};
  int64_t scale_dims[2] = {dims[0], dims[1]};
  if (form->block > 0) scale_dims[form->axis] = ceil_divide(dims[form->axis], form->block);
  if (form->block == 0) scale_dims[0] = dims[form->axis];
  int rank = form->block > 0 ? 2 : form->block == 0 ? 1 : 0;
  add_ends(&c, 3, row_shapes[1], op == EGI_OP_Linear ? k : n, op == EGI_OP_Linear ? n : k);
  ops_fill_uniform(ops_add_input(&c, form->dtype, 2, dims), form->dtype == EG_DTYPE_U8 ? 0 : -128, 127, 29);
  const ops_tensor *bias = add_bias(&c, n, WHOLE_TERM);
  ops_fill_uniform(ops_add_input(&c, EG_DTYPE_F32, rank, scale_dims), 0.01, 0.1, 30);
  if (form->has_zeros) ops_fill_uniform(ops_add_input(&c, form->dtype, rank, scale_dims), 0, 20, 31);
  ops_add_attribute(&c, egi_attribute_string("storage", "blocked"));
  ops_add_attribute(&c, egi_attribute_int("axis", form->axis));
  ops_add_attribute(&c, egi_attribute_int("transposed", form->is_transposed));
  if (form->block > 0) ops_add_attribute(&c, egi_attribute_int("block_size", form->block));
  double *w = EGI_NEW(&c.arena, double, (size_t)(n * k));
  for (int64_t i = 0; i < n * k; i++) {
    int64_t row = form->is_transposed ? i % k : i / k, column = form->is_transposed ? i / k : i % k;
    int64_t scale = blocked_scale(form, dims, row, column);
    double zero = form->has_zeros ? c.inputs[EGI_LINEAR_ZERO_POINTS].values[scale] : 0.0;
    double code = c.inputs[EGI_LINEAR_WEIGHT].values[row * dims[1] + column];
    w[i] = (code - zero) * c.inputs[EGI_LINEAR_SCALES].values[scale];
  }
  expect_product(&c, w, n, k, bias);
  ops_check(&c);
  ops_end(&c);
}

/* ---- plain ------------------------------------------------------------------------------------------------------ */

static void check_plain(void **state, int rank, sizes s, eg_dtype dtype, eg_dtype weight_type) {
  ops_case c;
  ops_begin(&c, state, EGI_OP_Linear, dtype);
  int64_t dims[4] = {2, 3, 5, 0}, weight_dims[2] = {s.n, s.k};
  dims[rank - 1] = s.k;
  ops_fill_uniform(ops_add_input(&c, dtype, rank, dims), -2, 2, 32);
  ops_tensor *weight = ops_add_input(&c, weight_type, 2, weight_dims), *bias = NULL;
  ops_fill_uniform(weight, -2, 2, 33);
  const int64_t whole[4] = {2, 3, 5, s.n};
  if (rank != 2) {
    bias = ops_add_input(&c, weight_type, rank == 4 ? 4 : 1, rank == 4 ? whole : &s.n);
    ops_fill_uniform(bias, -2, 2, 34);
  }
  dims[rank - 1] = s.n;
  ops_add_output(&c, dtype, rank, dims);
  expect_product(&c, weight->values, s.n, s.k, bias);
  if (dtype == EG_DTYPE_F64) c.absolute = 1e-12;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_linear(void **state, egi_op op) {
  static const eg_dtype types[][2] = {{EG_DTYPE_F32, EG_DTYPE_F32},
                                      {EG_DTYPE_F32, EG_DTYPE_F16},
                                      {EG_DTYPE_F32, EG_DTYPE_BF16},
                                      {EG_DTYPE_F64, EG_DTYPE_F64}};
  for (size_t s = 0; s < EGI_COUNT(all_sizes); s++) {
    for (size_t form = 0; form < EGI_COUNT(nbits_forms); form++)
      check_nbits(state, op, all_sizes[s], &nbits_forms[form], (s + form) % EGI_COUNT(row_shapes));
    for (int64_t type = 0; type < 2; type++) {
      check_bnb4(state, op, all_sizes[s], type, false);
      check_bnb4(state, op, all_sizes[s], type, true);
    }
    for (size_t form = 0; form < EGI_COUNT(blocked_forms); form++)
      check_blocked(state, op, all_sizes[s].n, all_sizes[s].k, &blocked_forms[form]);
    for (int rank = 1; rank <= 4 && op == EGI_OP_Linear; rank++)
      check_plain(state, rank, all_sizes[s], types[s % EGI_COUNT(types)][0], types[s % EGI_COUNT(types)][1]);
  }
  check_bnb4(state, op, (sizes){3, 5, 4}, 1, false);  /* blocks across rows, an odd number of codes */
  check_bnb4(state, op, (sizes){61, 35, 4}, 1, true); /* and several blocks of scales */
  check_bad_group(state, op);
}
