/* Conformance cases of Conv, its gradient (against sums written out the other way round) and Dropout. */
#include "support_ops.h"

typedef struct conv_case {
  eg_dtype dtype;
  int64_t n, c, f, group, in[2], kernel[2], stride, dilation, before, after;
} conv_case;

static int64_t out_size(const conv_case *k, int axis) {
  return (k->in[axis] + k->before + k->after - k->dilation * (k->kernel[axis] - 1) - 1) / k->stride + 1;
}

/* Calls visit for every product that makes up Y: offsets in X, W and Y. */
static void each_product(const conv_case *k, double *x, double *w, double *y, int into) {
  int64_t per_group = k->c / k->group, oh = out_size(k, 0), ow = out_size(k, 1);
  for (int64_t n = 0; n < k->n; n++)
    for (int64_t f = 0; f < k->f; f++)
      for (int64_t i = 0; i < oh * ow; i++)
        for (int64_t c = 0; c < per_group; c++)
          for (int64_t t = 0; t < k->kernel[0] * k->kernel[1]; t++) {
            int64_t row = i / ow * k->stride - k->before + t / k->kernel[1] * k->dilation;
            int64_t column = i % ow * k->stride - k->before + t % k->kernel[1] * k->dilation;
            if (row < 0 || row >= k->in[0] || column < 0 || column >= k->in[1]) continue;
            int64_t channel = f / (k->f / k->group) * per_group + c;
            double *px = &x[((n * k->c + channel) * k->in[0] + row) * k->in[1] + column];
            double *pw = &w[(f * per_group + c) * k->kernel[0] * k->kernel[1] + t],
                   *py = &y[(n * k->f + f) * oh * ow + i];
            if (into == 0) *py += *px * *pw;
            if (into == 1) *px += *py * *pw;
            if (into == 2) *pw += *py * *px;
          }
}

static void add_attributes(ops_case *c, const conv_case *k, int64_t lists[3][4]) {
  for (int i = 0; i < 2; i++) {
    lists[0][i] = k->before;
    lists[0][i + 2] = k->after;
    lists[1][i] = k->stride;
    lists[2][i] = k->dilation;
  }
  ops_add_attribute(c, egi_attribute_ints("pads", lists[0], 4));
  ops_add_attribute(c, egi_attribute_ints("strides", lists[1], 2));
  ops_add_attribute(c, egi_attribute_ints("dilations", lists[2], 2));
  ops_add_attribute(c, egi_attribute_int("group", k->group));
}

static void check_conv(void **state, const conv_case *k, bool is_gradient) {
  ops_case c;
  int64_t lists[3][4];
  int64_t x_dims[4] = {k->n, k->c, k->in[0], k->in[1]}, w_dims[4] = {k->f, k->c / k->group, k->kernel[0], k->kernel[1]};
  int64_t y_dims[4] = {k->n, k->f, out_size(k, 0), out_size(k, 1)};
  ops_begin(&c, state, is_gradient ? EGI_OP_ConvGrad : EGI_OP_Conv, k->dtype);
  c.absolute += k->dtype == EG_DTYPE_F64 ? 1e-12 : 1e-5;
  ops_tensor *x = ops_add_input(&c, k->dtype, 4, x_dims), *w = ops_add_input(&c, k->dtype, 4, w_dims);
  ops_tensor *third = ops_add_input(&c, k->dtype, is_gradient ? 4 : 1, is_gradient ? y_dims : &k->f);
  ops_fill_uniform(x, -1.0, 1.0, 1);
  ops_fill_uniform(w, -1.0, 1.0, 2);
  ops_fill_uniform(third, -1.0, 1.0, 3);
  add_attributes(&c, k, lists);
  int64_t size = y_dims[2] * y_dims[3];
  if (!is_gradient) {
    ops_tensor *y = ops_add_output(&c, k->dtype, 4, y_dims);
    for (int64_t i = 0; i < ops_count(y); i++) y->values[i] = third->values[i / size % k->f];
    each_product(k, x->values, w->values, y->values, 0);
  } else {
    ops_tensor *dx = ops_add_output(&c, k->dtype, 4, x_dims), *dw = ops_add_output(&c, k->dtype, 4, w_dims);
    ops_tensor *db = ops_add_output(&c, k->dtype, 1, &k->f);
    each_product(k, dx->values, w->values, third->values, 1);
    each_product(k, x->values, dw->values, third->values, 2);
    for (int64_t i = 0; i < ops_count(third); i++) db->values[i / size % k->f] += third->values[i];
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_conv(void **state, egi_op op) {
  static const conv_case cases[] = {
      {EG_DTYPE_F32, 1, 1, 1, 1, {1, 1}, {1, 1}, 1, 1, 0, 0}, {EG_DTYPE_F32, 2, 4, 6, 2, {5, 7}, {3, 2}, 1, 1, 1, 1},
      {EG_DTYPE_F64, 2, 3, 3, 3, {1, 9}, {1, 4}, 1, 1, 3, 0}, {EG_DTYPE_F64, 1, 2, 4, 1, {9, 8}, {3, 3}, 2, 2, 1, 2},
      {EG_DTYPE_F16, 1, 2, 2, 2, {4, 4}, {2, 2}, 1, 1, 0, 1}, {EG_DTYPE_F32, 0, 2, 2, 1, {4, 4}, {2, 2}, 1, 1, 0, 0}};
  for (size_t i = 0; i < EGI_COUNT(cases); i++) check_conv(state, &cases[i], op == EGI_OP_ConvGrad);
}

/* What numpy's RandomState(5) draws: uniform(0, 1, 15) >= 0.25. */
static const int kept_by_numpy[15] = {0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1};

void ops_case_dropout(void **state, egi_op op) {
  static const int64_t dims[2] = {3, 5};
  const egi_attribute seed = egi_attribute_int("seed", 5);
  for (int mode = 0; mode < 3; mode++) { /* left out, not training, training */
    ops_case c;
    ops_begin(&c, state, op, EG_DTYPE_F32);
    ops_add_attribute(&c, seed);
    ops_tensor *x = ops_add_input(&c, EG_DTYPE_F32, 2, dims);
    ops_fill_uniform(x, -1.0, 1.0, 1);
    if (mode > 0) ops_add_input(&c, EG_DTYPE_F32, 0, NULL)->values[0] = 0.25;
    if (mode > 0) ops_add_input(&c, EG_DTYPE_BOOL, 0, NULL)->values[0] = mode == 2;
    ops_tensor *y = ops_add_output(&c, EG_DTYPE_F32, 2, dims), *mask = ops_add_output(&c, EG_DTYPE_BOOL, 2, dims);
    for (int64_t i = 0; i < ops_count(mask); i++) {
      mask->values[i] = mode < 2 || kept_by_numpy[i];
      y->values[i] = mask->values[i] * x->values[i] / (mode == 2 ? 0.75 : 1.0);
    }
    c.relative = 1e-6;
    ops_check(&c);
    ops_end(&c);
  }
}

/* Philox4x32-10 by its definition, with the reference's known answers: kat_vectors of Random123. */
static void philox(uint32_t counter[4], const uint32_t key[2]) {
  uint32_t k[2] = {key[0], key[1]};
  for (int round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)0xd2511f53 * counter[0], b = (uint64_t)0xcd9e8d57 * counter[2];
    uint32_t next[4] = {(uint32_t)(b >> 32) ^ counter[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ counter[3] ^ k[1],
                        (uint32_t)a};
    memcpy(counter, next, sizeof next);
    k[0] += 0x9e3779b9;
    k[1] += 0xbb67ae85;
  }
}

static void check_known_answers(void) {
  uint32_t zeros[4] = {0}, digits[4] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
  static const uint32_t no_key[2] = {0, 0}, key[2] = {0xa4093822, 0x299f31d0};
  static const uint32_t first[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  static const uint32_t last[4] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
  philox(zeros, no_key);
  philox(digits, key);
  assert_memory_equal(zeros, first, sizeof first);
  assert_memory_equal(digits, last, sizeof last);
}

static void check_keyed(void **state, eg_dtype dtype, int64_t rows, int64_t columns, float ratio) {
  const int64_t dims[2] = {rows, columns};
  const egi_step_state step = {.step = 3, .micro_batch = 2};
  const int64_t seed = INT64_C(0x123456789abcdef0);
  const egi_attribute attributes[3] = {egi_attribute_float("ratio", ratio), egi_attribute_int("seed", seed),
                                       egi_attribute_int("site", 7)};
  const uint32_t key[2] = {0x9abcdef0, 0x12345678};
  uint8_t bytes[sizeof step];
  ops_case c;
  ops_begin(&c, state, EGI_OP_KeyedDropout, dtype);
  for (int i = 0; i < 3; i++) ops_add_attribute(&c, attributes[i]);
  ops_tensor *x = ops_add_input(&c, dtype, 2, dims);
  ops_tensor *state_input = ops_add_input(&c, EG_DTYPE_U8, 1, (const int64_t[]){(int64_t)sizeof bytes});
  ops_tensor *y = ops_add_output(&c, dtype, 2, dims);
  memcpy(bytes, &step, sizeof bytes);
  for (size_t i = 0; i < sizeof bytes; i++) state_input->values[i] = bytes[i];
  ops_fill_uniform(x, -1.0, 1.0, 1);
  for (int64_t i = 0; i < ops_count(x); i++) {
    uint32_t numbers[4] = {(uint32_t)(i / 4), 7, 3, 2};
    philox(numbers, key);
    bool is_kept = (double)numbers[i % 4] >= (double)ratio * 4294967296.0;
    y->values[i] = is_kept ? x->values[i] / (1.0 - (double)ratio) : 0.0;
  }
  c.relative = 1e-6;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_keyed_dropout(void **state, egi_op op) {
  static const int64_t sizes[][2] = {{0, 4}, {1, 1}, {3, 5}, {2, 8}, {7, 129}, {300, 33}};
  (void)op;
  check_known_answers();
  for (size_t i = 0; i < EGI_COUNT(sizes); i++) {
    check_keyed(state, EG_DTYPE_F32, sizes[i][0], sizes[i][1], 0.25F);
    check_keyed(state, EG_DTYPE_F64, sizes[i][0], sizes[i][1], 0.5F);
    check_keyed(state, EG_DTYPE_F32, sizes[i][0], sizes[i][1], 0.0F);
  }
}
