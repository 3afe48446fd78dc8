/* FakeQuantize against its definition, number by number, and that against the distance to a code. Blocks that end a row
 * early, one block a row, blocks of zeros, and numbers on the ends of the codes. */
#include "support_ops.h"

#include <math.h>
#include <string.h>

#include "base/blockwise.h"
#include "graph/fake_quantize.h"

typedef struct shape {
  int rank;
  int64_t dims[3];
} shape;

static const shape shapes[] = {{1, {0}},          {1, {1}},       {2, {3, 31}},  {2, {2, 32}},
                               {2, {5, 33}},      {3, {2, 3, 7}}, {2, {0, 32}},  {2, {1, 4096}},
                               {3, {2, 1, 1000}}, {2, {300, 64}}, {2, {7, 130}}, {2, {64, 257}}};

static const egi_fake_quantize forms[] = {{false, true, 4, 32},  {false, true, 4, 0},  {false, false, 4, 32},
                                          {false, false, 4, 16}, {false, true, 8, 0},  {false, true, 8, 128},
                                          {false, false, 8, 32}, {true, false, 4, 64}, {true, false, 4, 32}};

typedef struct block {
  const egi_fake_quantize *form;
  float extreme, scale, zero; /* the number of largest magnitude */
} block;

static block find_block(const egi_fake_quantize *form, const double *values, int64_t n) {
  float low = 0.0F, high = 0.0F, largest = (float)((1u << form->bits) - 1u);
  for (int64_t i = 0; i < n; i++) {
    low = fminf(low, (float)values[i]);
    high = fmaxf(high, (float)values[i]);
  }
  block b = {form, high > -low ? high : low, 0.0F, (largest + 1.0F) / 2.0F};
  b.scale = form->is_symmetric ? b.extreme / -b.zero : (high - low) / largest;
  if (!form->is_symmetric) b.zero = b.scale > 0.0F ? fminf(rintf(-low / b.scale), largest) : 0.0F;
  return b;
}

/* The nearest code is no more than half a step away, but for numbers beyond the last one. */
static double rounded(const block *b, double value) {
  float largest = (float)((1u << b->form->bits) - 1u),
        steps = b->scale < 0.0F || b->scale > 0.0F ? (float)value / b->scale : 0.0F;
  float code = fminf(fmaxf(rintf(steps) + b->zero, 0.0F), largest);
  double result = (double)((code - b->zero) * b->scale), step = fabs((double)b->scale);
  bool is_last = !(code > 0.0F) || !(code < largest);
  assert_true(fabs(result - value) <= (is_last ? 1.0 : 0.5) * step * (1.0 + 1e-4));
  return result;
}

/* Of the 16 levels the nearest; the lower code of two. */
static double nearest(const block *b, double value) {
  const float *levels = egi_four_bit_levels(EGI_FOUR_BIT_NF4);
  double scale = fabs((double)b->extreme), best = (double)levels[0];
  for (unsigned i = 1; i < 16; i++)
    if (fabs((double)levels[i] * scale - value) < fabs(best * scale - value)) best = (double)levels[i];
  return (double)((float)best * (float)scale);
}

static void fill_expected(const ops_tensor *x, const egi_fake_quantize *form, ops_tensor *y) {
  int64_t count = ops_count(x), width = form->is_nf4 ? count : x->dims[x->rank - 1];
  int64_t size = form->block > 0 ? form->block : width;
  for (int64_t row = 0; row < count; row += width)
    for (int64_t first = 0; first < width; first += size) {
      int64_t n = width - first < size ? width - first : size;
      const block b = find_block(form, x->values + row + first, n);
      for (int64_t i = row + first; i < row + first + n; i++)
        y->values[i] = ops_round(y->dtype, form->is_nf4 ? nearest(&b, x->values[i]) : rounded(&b, x->values[i]));
    }
}

/* A block of zeros, one of negative numbers, one whose two ends are as large. */
static void put_special(ops_tensor *x) {
  int64_t n = ops_count(x);
  for (int64_t i = 0; i < n && i < 64; i++) x->values[i] = i % 2 == 0 ? 0.0 : -0.0;
  for (int64_t i = 64; i < n && i < 128; i++) x->values[i] = ops_round(x->dtype, -fabs(x->values[i]) - 0.5);
  for (int64_t i = 128; i < n && i < 130; i++) x->values[i] = i == 128 ? 8.0 : -8.0;
}

static void check(void **state, const egi_fake_quantize *form, eg_dtype dtype, const shape *size, bool is_special) {
  ops_case c;
  egi_attribute attributes[4];
  ops_begin(&c, state, EGI_OP_FakeQuantize, dtype);
  ops_tensor *x = ops_add_input(&c, dtype, size->rank, size->dims);
  ops_fill_uniform(x, -3.0, 2.0, 17);
  if (is_special) put_special(x);
  ops_tensor *y = ops_add_output(&c, dtype, size->rank, size->dims);
  unsigned n = egi_fake_quantize_write(form, attributes);
  for (unsigned i = 0; i < n; i++) ops_add_attribute(&c, attributes[i]);
  fill_expected(x, form, y);
  ops_check(&c);
  ops_end(&c);
}

static void check_refused(void **state) {
  static const egi_fake_quantize bad[] = {{false, true, 5, 32}, {true, false, 4, 48}, {false, true, 4, -1}};
  const int64_t dims[2] = {2, 32};
  for (size_t i = 0; i < EGI_COUNT(bad); i++) {
    ops_case c;
    egi_attribute attributes[4];
    ops_begin(&c, state, EGI_OP_FakeQuantize, EG_DTYPE_F32);
    (void)ops_add_input(&c, EG_DTYPE_F32, 2, dims);
    (void)ops_add_output(&c, EG_DTYPE_F32, 2, dims);
    unsigned n = egi_fake_quantize_write(&bad[i], attributes);
    for (unsigned k = 0; k < n; k++) ops_add_attribute(&c, attributes[k]);
    ops_check_refused(&c, EG_ERROR_UNSUPPORTED);
    ops_end(&c);
  }
}

void ops_case_fake_quantize(void **state, egi_op op) {
  static const eg_dtype dtypes[] = {EG_DTYPE_F32, EG_DTYPE_F16, EG_DTYPE_BF16};
  (void)op;
  for (size_t f = 0; f < EGI_COUNT(forms); f++)
    for (size_t t = 0; t < EGI_COUNT(dtypes); t++)
      for (size_t s = 0; s < EGI_COUNT(shapes); s++)
        if (!forms[f].is_nf4 || shapes[s].rank == 2)
          for (int is_special = 0; is_special < 2; is_special++)
            check(state, &forms[f], dtypes[t], &shapes[s], is_special != 0);
  check_refused(state);
}
