/* Conformance cases of ArgMax, ArgMin and TopK. */
#include "support_ops.h"

#include <math.h>

static const eg_dtype types[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_F16, EG_DTYPE_BF16, EG_DTYPE_I32,
                                 EG_DTYPE_I64, EG_DTYPE_U8,  EG_DTYPE_U64, EG_DTYPE_I8};

static const struct {
  int rank;
  int64_t dims[3];
} shapes[] = {{1, {1}}, {1, {7}}, {2, {13, 259}}, {3, {5, 33, 3}}, {3, {2, 513, 65}}, {2, {0, 3}}};

/* Few different numbers: most are equal to others. */
static void fill(ops_tensor *in, bool has_nan) {
  bool has_sign = egi_dtype_kind(in->dtype) != EGI_CLASS_UNSIGNED;
  ops_fill_uniform(in, has_sign ? -20.0 : 0.0, 20.0, 9);
  for (int64_t i = 0; egi_dtype_is_float(in->dtype) && i < ops_count(in); i++) in->values[i] = trunc(in->values[i]);
  if (has_nan && egi_dtype_is_float(in->dtype) && ops_count(in) > 5) in->values[5] = nan("");
}

/* a comes strictly before b; NaN is the largest. */
static bool beats(double a, double b, bool is_smallest) {
  if (isnan(a) || isnan(b)) return isnan(a) != isnan(b) && isnan(a) != is_smallest;
  return is_smallest ? a < b : a > b;
}

static int64_t inner_of(const ops_tensor *in, int axis) {
  int64_t inner = 1;
  for (int i = axis + 1; i < in->rank; i++) inner *= in->dims[i];
  return inner;
}

/* ---- ArgMax, ArgMin --------------------------------------------------------------------------------------------- */

static void check_extremum(void **state, egi_op op, eg_dtype dtype, size_t s, const int *mode) {
  int axis = mode[0];
  bool keeps_dims = mode[1] != 0, takes_last = mode[2] != 0;
  int64_t dims[3];
  int rank = 0;
  ops_case c;
  if (axis >= shapes[s].rank || shapes[s].dims[axis] == 0) return;
  ops_begin(&c, state, op, dtype);
  ops_tensor *in = ops_add_input(&c, dtype, shapes[s].rank, shapes[s].dims);
  fill(in, true);
  for (int i = 0; i < in->rank; i++) {
    if (i != axis) dims[rank++] = in->dims[i];
    if (i == axis && keeps_dims) dims[rank++] = 1;
  }
  ops_tensor *out = ops_add_output(&c, EG_DTYPE_I64, rank, dims);
  ops_add_attribute(&c, egi_attribute_int("axis", axis == 1 ? axis - in->rank : axis));
  ops_add_attribute(&c, egi_attribute_int("keepdims", keeps_dims));
  ops_add_attribute(&c, egi_attribute_int("select_last_index", takes_last));
  int64_t inner = inner_of(in, axis), n = in->dims[axis];
  for (int64_t i = 0; i < ops_count(out); i++) {
    const double *line = in->values + i / inner * n * inner + i % inner;
    int64_t best = 0;
    for (int64_t k = 1; k < n; k++) {
      bool is_equal = !beats(line[best * inner], line[k * inner], op == EGI_OP_ArgMin);
      if (beats(line[k * inner], line[best * inner], op == EGI_OP_ArgMin) ||
          (takes_last && is_equal && !beats(line[best * inner], line[k * inner], op == EGI_OP_ArgMin)))
        best = k;
    }
    out->values[i] = (double)best;
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_arg_extremum(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (size_t s = 0; s < EGI_COUNT(shapes); s++) {
      if (s == 4 && types[t] != EG_DTYPE_F32) continue; /* large */
      for (int m = 0; m < 12; m++) {
        const int mode[3] = {m % 3, m / 3 % 2, m / 6};
        check_extremum(state, op, types[t], s, mode);
      }
    }
  }
}

/* ---- TopK ------------------------------------------------------------------------------------------------------- */

static void check_topk(void **state, eg_dtype dtype, size_t s, const int *mode) {
  int axis = mode[0];
  bool is_smallest = mode[1] != 0;
  int64_t k = mode[2], dims[3];
  ops_case c;
  if (axis >= shapes[s].rank) return;
  if (k > shapes[s].dims[axis]) k = shapes[s].dims[axis];
  memcpy(dims, shapes[s].dims, sizeof dims);
  dims[axis] = k;
  ops_begin(&c, state, EGI_OP_TopK, dtype);
  ops_tensor *in = ops_add_input(&c, dtype, shapes[s].rank, shapes[s].dims);
  fill(in, true);
  ops_add_integers(&c, &k, 1);
  ops_tensor *values = ops_add_output(&c, dtype, in->rank, dims);
  ops_tensor *positions = ops_add_output(&c, EG_DTYPE_I64, in->rank, dims);
  ops_add_attribute(&c, egi_attribute_int("axis", axis == in->rank - 1 ? -1 : axis));
  ops_add_attribute(&c, egi_attribute_int("largest", !is_smallest));
  int64_t inner = inner_of(in, axis), n = in->dims[axis];
  for (int64_t i = 0; i < ops_count(values); i++) {
    int64_t rank = i / inner % (k > 0 ? k : 1), base = i / (inner * (k > 0 ? k : 1)) * n * inner + i % inner;
    for (int64_t a = 0; a < n; a++) { /* the element that `rank` others come before */
      int64_t n_before = 0;
      double x = in->values[base + a * inner];
      for (int64_t b = 0; b < n; b++) {
        double y = in->values[base + b * inner];
        n_before += beats(y, x, is_smallest) || (!beats(x, y, is_smallest) && b < a);
      }
      if (n_before != rank) continue;
      values->values[i] = x;
      positions->values[i] = (double)a;
    }
  }
  c.relative = 0.0;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_topk(void **state, egi_op op) {
  (void)op;
  static const int counts[] = {0, 1, 2, 8, 33};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (size_t s = 0; s < EGI_COUNT(shapes); s++) {
      if (s == 4 && types[t] != EG_DTYPE_F32) continue; /* large */
      for (int m = 0; m < 30; m++) {
        const int mode[3] = {m % 3, m / 3 % 2, counts[m / 6]};
        if (s != 4 || mode[2] == 2) check_topk(state, types[t], s, mode);
      }
    }
  }
}
