/* Conformance cases of reductions, SumTo, CumSum and CumProd. */
#include "support_ops.h"

#include <math.h>

static const eg_dtype types[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_F16, EG_DTYPE_BF16, EG_DTYPE_I32,
                                 EG_DTYPE_I64, EG_DTYPE_U8,  EG_DTYPE_U64, EG_DTYPE_I8,   EG_DTYPE_BOOL};

typedef struct reduce_shape {
  int rank;
  int64_t dims[4];
  unsigned reduced; /* a bit for each axis */
} reduce_shape;

/* Rows, columns, both, in the middle; sizes on both sides of chunks (512), blocks and lanes (16). */
static const reduce_shape reductions[] = {
    {0, {0}, 0},         {1, {0}, 1},        {1, {1}, 1},         {1, {17}, 1},           {2, {0, 3}, 1},
    {2, {3, 0}, 1},      {2, {13, 33}, 1},   {2, {13, 33}, 2},    {2, {13, 33}, 3},       {2, {13, 33}, 0},
    {3, {5, 7, 9}, 2},   {3, {5, 7, 9}, 5},  {3, {3, 1, 513}, 2}, {2, {70, 511}, 1},      {2, {130, 513}, 1},
    {1, {33000}, 1},     {2, {2, 20000}, 2}, {2, {5000, 3}, 1},   {4, {2, 33, 3, 65}, 6}, {4, {2, 33, 3, 65}, 9},
    {3, {129, 2, 65}, 5}};

/* The large shapes are about blocks, not about types: two types will do. */
static bool is_tested(const reduce_shape *s, eg_dtype dtype) {
  int64_t count = 1;
  for (int i = 0; i < s->rank; i++) count *= s->dims[i];
  return count < 20000 || dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_I32;
}

static double start_of(egi_op op, eg_dtype dtype) {
  double sign = op == EGI_OP_ReduceMin ? -1.0 : 1.0;
  unsigned bits = egi_dtype_bits(dtype);
  if (op == EGI_OP_ReduceProd) return 1.0;
  if (op != EGI_OP_ReduceMax && op != EGI_OP_ReduceMin && op != EGI_OP_ReduceLogSumExp) return 0.0;
  if (egi_dtype_is_float(dtype)) return -sign * HUGE_VAL;
  if (op == EGI_OP_ReduceMin && dtype == EG_DTYPE_BOOL) return 1.0;
  if (op == EGI_OP_ReduceMin) return ldexp(1.0, (int)bits - (egi_dtype_kind(dtype) == EGI_CLASS_INTEGER)) - 1.0;
  return egi_dtype_kind(dtype) == EGI_CLASS_INTEGER ? -ldexp(1.0, (int)egi_dtype_bits(dtype) - 1) : 0.0;
}

static double join(egi_op op, double a, double b) {
  switch (op) {
  case EGI_OP_ReduceMax:
    return isnan(a) || isnan(b) ? nan("") : a > b ? a : b;
  case EGI_OP_ReduceMin:
    return isnan(a) || isnan(b) ? nan("") : a < b ? a : b;
  case EGI_OP_ReduceProd:
    return a * b;
  case EGI_OP_ReduceLogSumExp:
    return log(exp(a) + exp(b));
  default:
    return a + b;
  }
}

static void fill(ops_tensor *in, egi_op op) {
  double high = in->dtype == EG_DTYPE_BOOL ? 1.0 : 3.0;
  bool has_sign = egi_dtype_is_float(in->dtype) || egi_dtype_kind(in->dtype) == EGI_CLASS_INTEGER;
  /* Sums of small types must stay inside them. */
  if (in->dtype == EG_DTYPE_U8 || in->dtype == EG_DTYPE_I8) high = op == EGI_OP_ReduceMax ? 100.0 : 0.0;
  if (op == EGI_OP_ReduceMin) high = high == 0.0 ? 100.0 : high;
  ops_fill_uniform(in, has_sign ? -high : 0.0, high, 17);
  /* Products of many numbers stay in range when nearly all of them are 1 in size. */
  for (int64_t i = 0; op == EGI_OP_ReduceProd && i < ops_count(in); i++)
    in->values[i] = i % 97 == 5 ? 2.0 : has_sign && i % 5 == 1 ? -1.0 : 1.0;
  if (ops_count(in) > 30 && (op == EGI_OP_ReduceMax || op == EGI_OP_ReduceMin) && egi_dtype_is_float(in->dtype))
    in->values[29] = nan("");
}

/* Sums the input into the output by shapes alone: a reduced axis has size 1 in `kept`. */
static void expect(egi_op op, const ops_tensor *in, ops_tensor *out, const int64_t *kept) {
  ops_tensor seen = {.rank = in->rank};
  for (int i = 0; i < in->rank; i++) seen.dims[i] = kept[i];
  int64_t n_out = ops_count(out), n_in = ops_count(in);
  for (int64_t i = 0; i < n_out; i++) out->values[i] = start_of(op, in->dtype);
  for (int64_t i = 0; i < n_in; i++) {
    int64_t to = ops_broadcast_index(&seen, in->rank, in->dims, i);
    out->values[to] = join(op, out->values[to], in->values[i]);
  }
  for (int64_t i = 0; i < n_out && op == EGI_OP_ReduceMean; i++) {
    out->values[i] /= (double)(n_in / n_out);
    if (!egi_dtype_is_float(in->dtype)) out->values[i] = n_in == 0 ? 0.0 : trunc(out->values[i]);
  }
  for (int64_t i = 0; i < n_out && egi_dtype_is_float(in->dtype); i++) {
    out->values[i] = ops_round(in->dtype, out->values[i]);
  }
}

static void check_reduce(void **state, egi_op op, eg_dtype dtype, const reduce_shape *s, bool keeps_dims) {
  ops_case c;
  ops_begin(&c, state, op, dtype);
  int64_t axes[4] = {0}, n_axes = 0, kept[4] = {0}, dims[4] = {0};
  int rank = 0;
  for (int i = 0; i < s->rank; i++) {
    bool is_reduced = (s->reduced >> i & 1) != 0;
    kept[i] = is_reduced ? 1 : s->dims[i];
    if (is_reduced) axes[n_axes++] = i % 2 == 0 ? i : i - s->rank;
    if (!is_reduced || keeps_dims) dims[rank++] = kept[i];
  }
  ops_tensor *in = ops_add_input(&c, dtype, s->rank, s->dims);
  fill(in, op);
  /* All axes: no list at all means the same. */
  if (n_axes != s->rank || keeps_dims) ops_add_integers(&c, axes, n_axes);
  if (n_axes == 0) ops_add_attribute(&c, egi_attribute_int("noop_with_empty_axes", 1));
  ops_add_attribute(&c, egi_attribute_int("keepdims", keeps_dims));
  ops_tensor *out = ops_add_output(&c, dtype, rank, dims);
  expect(op, in, out, kept);
  /* Accumulated in f64: cancelling sums have the error of f64 and of one rounding. */
  c.absolute = egi_dtype_is_float(dtype) ? 1e-9 : 0.0;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_reduce(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    if (types[t] == EG_DTYPE_BOOL && op != EGI_OP_ReduceMax && op != EGI_OP_ReduceMin) continue;
    if (op == EGI_OP_ReduceLogSumExp && !egi_dtype_is_float(types[t])) continue;
    for (size_t s = 0; s < EGI_COUNT(reductions); s++) {
      int64_t count = 1;
      for (int i = 0; i < reductions[s].rank; i++) count *= reductions[s].dims[i];
      /* Products of thousands of twos are beyond any type. */
      if (!is_tested(&reductions[s], types[t]) || (op == EGI_OP_ReduceProd && count > 600)) continue;
      check_reduce(state, op, types[t], &reductions[s], true);
      check_reduce(state, op, types[t], &reductions[s], false);
    }
  }
}

void ops_case_sum_to(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (size_t k = 0; types[t] != EG_DTYPE_BOOL && k < 2 * EGI_COUNT(reductions); k++) {
      const reduce_shape *s = &reductions[k / 2];
      if (!is_tested(s, types[t])) continue;
      ops_case c;
      ops_begin(&c, state, op, types[t]);
      int64_t kept[4] = {0};
      for (int i = 0; i < s->rank; i++) kept[i] = s->reduced >> i & 1 ? 1 : s->dims[i];
      int leading = 0; /* leading dims of 1 may be left out of the result's shape */
      while (k % 2 == 1 && leading < s->rank && kept[leading] == 1) leading++;
      ops_tensor *in = ops_add_input(&c, types[t], s->rank, s->dims);
      ops_add_input(&c, types[t], s->rank - leading, kept + leading);
      ops_tensor *out = ops_add_output(&c, types[t], s->rank - leading, kept + leading);
      fill(in, op);
      expect(op, in, out, kept);
      c.absolute = egi_dtype_is_float(types[t]) ? 1e-9 : 0.0;
      ops_check(&c);
      ops_end(&c);
    }
  }
}

static void check_cumsum(void **state, egi_op op, eg_dtype dtype, int axis, unsigned mode) {
  static const int64_t dims[3] = {5, 259, 7};
  ops_case c;
  ops_begin(&c, state, op, dtype);
  bool is_product = op == EGI_OP_CumProd;
  bool is_exclusive = (mode & 1) != 0, is_reverse = (mode & 2) != 0;
  ops_tensor *in = ops_add_input(&c, dtype, 3, dims);
  fill(in, op == EGI_OP_CumProd ? EGI_OP_ReduceProd : EGI_OP_CumSum);
  ops_add_input(&c, EG_DTYPE_I32, 0, NULL)->values[0] = axis == 2 ? -1 : axis;
  ops_add_attribute(&c, egi_attribute_int("exclusive", is_exclusive));
  ops_add_attribute(&c, egi_attribute_int("reverse", is_reverse));
  ops_tensor *out = ops_add_output(&c, dtype, 3, dims);
  int64_t inner = axis == 0 ? 259 * 7 : axis == 1 ? 7 : 1;
  for (int64_t i = 0; i < ops_count(in); i++) {
    int64_t position = i / inner % dims[axis], base = i - position * inner;
    double sum = is_product ? 1.0 : 0.0;
    for (int64_t k = 0; k < dims[axis]; k++) {
      bool is_counted = is_reverse ? k > position : k < position;
      double value = in->values[base + k * inner];
      if (is_counted || (k == position && !is_exclusive)) sum = is_product ? sum * value : sum + value;
    }
    out->values[i] = egi_dtype_is_float(dtype) ? ops_round(dtype, sum) : sum;
  }
  c.absolute = egi_dtype_is_float(dtype) ? 1e-9 : 0.0;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_cumsum(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    if (types[t] == EG_DTYPE_BOOL) continue;
    for (int axis = 0; axis < 3; axis++) {
      for (unsigned mode = 0; mode < 4; mode++) check_cumsum(state, op, types[t], axis, mode);
    }
  }
  static const int64_t empty[2] = {0, 3};
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_F32);
  ops_add_input(&c, EG_DTYPE_F32, 2, empty);
  ops_add_input(&c, EG_DTYPE_I64, 0, NULL)->values[0] = 0;
  ops_add_output(&c, EG_DTYPE_F32, 2, empty);
  ops_check(&c);
  c.inputs[1].values[0] = 2; /* no such axis */
  c.expected_status = EG_ERROR_DATA;
  ops_check(&c);
  ops_end(&c);
}
