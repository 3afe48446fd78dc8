/* Conformance cases of OneHot, EyeLike, BitCast, ReverseSequence and ScatterElements. */
#include "support_ops.h"

#include <math.h>

static const eg_dtype types[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_BF16, EG_DTYPE_I64, EG_DTYPE_U8};

static void fill_ramp(ops_tensor *tensor) {
  for (int64_t i = 0; i < ops_count(tensor); i++) tensor->values[i] = (double)(i % 200);
}

/* ---- OneHot ----------------------------------------------------------------------------------------------------- */

static void check_one_hot(void **state, eg_dtype dtype, eg_dtype index_type, int axis) {
  static const int64_t index_dims[2] = {5, 33}, two = 2, depth = 7;
  int64_t dims[3] = {0};
  ops_case c;
  ops_begin(&c, state, EGI_OP_OneHot, dtype);
  ops_tensor *indices = ops_add_input(&c, index_type, 2, index_dims);
  for (int64_t i = 0; i < ops_count(indices); i++) indices->values[i] = (double)(i % 20 - 10); /* some are outside */
  if (index_type == EG_DTYPE_U8) ops_fill_uniform(indices, 0.0, 9.0, 2);
  ops_add_integers(&c, &depth, 1);
  ops_tensor *values = ops_add_input(&c, dtype, 1, &two);
  values->values[0] = 3.0;
  values->values[1] = 5.0;
  for (int i = 0; i < 3; i++) dims[i] = i == axis ? depth : index_dims[i < axis ? i : i - 1];
  ops_tensor *out = ops_add_output(&c, dtype, 3, dims);
  ops_add_attribute(&c, egi_attribute_int("axis", axis == 2 ? -1 : axis));
  int64_t inner = axis == 0 ? 5 * 33 : axis == 1 ? 33 : 1;
  for (int64_t i = 0; i < ops_count(out); i++) {
    double index = indices->values[i / inner / depth * inner + i % inner], place = (double)(i / inner % depth);
    out->values[i] = index == place || index + (double)depth == place ? 5.0 : 3.0;
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_one_hot(void **state, egi_op op) {
  (void)op;
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (int axis = 0; axis < 3; axis++) {
      check_one_hot(state, types[t], EG_DTYPE_I64, axis);
      check_one_hot(state, types[t], EG_DTYPE_F32, axis);
      check_one_hot(state, types[t], EG_DTYPE_U8, axis);
    }
  }
}

/* ---- EyeLike ---------------------------------------------------------------------------------------------------- */

void ops_case_eye_like(void **state, egi_op op) {
  static const int64_t dims[][2] = {{3, 3}, {2, 5}, {33, 7}, {0, 4}, {1, 1}};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (size_t d = 0; d < EGI_COUNT(dims); d++) {
      for (int k = -3; k <= 3; k++) {
        ops_case c;
        ops_begin(&c, state, op, types[t]);
        ops_add_input(&c, EG_DTYPE_I32, 2, dims[d]);
        ops_tensor *out = ops_add_output(&c, types[t], 2, dims[d]);
        ops_add_attribute(&c, egi_attribute_int("dtype", types[t]));
        ops_add_attribute(&c, egi_attribute_int("k", k));
        for (int64_t i = 0; i < ops_count(out); i++) out->values[i] = i % dims[d][1] - i / dims[d][1] == k;
        ops_check(&c);
        ops_end(&c);
      }
    }
  }
}

/* ---- BitCast ---------------------------------------------------------------------------------------------------- */

void ops_case_bit_cast(void **state, egi_op op) {
  static const struct {
    eg_dtype from, to;
    double in[3], out[3];
  } casts[] = {{EG_DTYPE_U8, EG_DTYPE_I8, {1, 128, 255}, {1, -128, -1}},
               {EG_DTYPE_F16, EG_DTYPE_U16, {1, -2, 0}, {0x3c00, 0xc000, 0}},
               {EG_DTYPE_I32, EG_DTYPE_F32, {0x3f800000, 0, -1082130432}, {1, 0, -1}},
               {EG_DTYPE_F32, EG_DTYPE_I32, {1, 0, -1}, {0x3f800000, 0, -1082130432}},
               {EG_DTYPE_I64, EG_DTYPE_F64, {0x1p52, 0, 1}, {0x1p-1022, 0, 0x1p-1074}}};
  static const int64_t dims[2] = {3, 43};
  for (size_t k = 0; k < EGI_COUNT(casts); k++) {
    ops_case c;
    ops_begin(&c, state, op, EG_DTYPE_BOOL);
    ops_tensor *in = ops_add_input(&c, casts[k].from, 2, dims), *out = ops_add_output(&c, casts[k].to, 2, dims);
    ops_add_attribute(&c, egi_attribute_int("to", casts[k].to));
    for (int64_t i = 0; i < ops_count(in); i++) {
      in->values[i] = casts[k].in[i % 3];
      out->values[i] = casts[k].out[i % 3];
    }
    ops_check(&c);
    ops_end(&c);
  }
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_BOOL);
  ops_add_input(&c, EG_DTYPE_F32, 0, NULL);
  ops_add_output(&c, EG_DTYPE_F64, 0, NULL);
  ops_check_refused(&c, EG_ERROR_UNSUPPORTED);
  ops_end(&c);
}

/* ---- ReverseSequence -------------------------------------------------------------------------------------------- */

void ops_case_reverse_sequence(void **state, egi_op op) {
  static const int64_t dims[3] = {4, 3, 65}, counts[2][4] = {{0, 4, 3}, {3, 1, 2, 0}};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (int time = 0; time < 2; time++) {
      ops_case c;
      ops_begin(&c, state, op, types[t]);
      ops_tensor *in = ops_add_input(&c, types[t], 3, dims);
      ops_tensor *lengths = ops_add_integers(&c, counts[time], dims[1 - time]);
      ops_tensor *out = ops_add_output(&c, types[t], 3, dims);
      ops_add_attribute(&c, egi_attribute_int("time_axis", time));
      ops_add_attribute(&c, egi_attribute_int("batch_axis", 1 - time));
      fill_ramp(in);
      for (int64_t i = 0; i < ops_count(in); i++) {
        int64_t place[2] = {i / 65 / 3, i / 65 % 3}, length = counts[time][place[1 - time]];
        if (place[time] < length) place[time] = length - 1 - place[time];
        out->values[i] = in->values[(place[0] * 3 + place[1]) * 65 + i % 65];
      }
      ops_check(&c);
      lengths->values[1] = 5.0; /* longer than the time axis */
      c.expected_status = EG_ERROR_DATA;
      ops_check(&c);
      ops_end(&c);
    }
  }
}

/* ---- ScatterElements -------------------------------------------------------------------------------------------- */

static double join(const char *reduction, double a, double b) {
  if (reduction[0] == 'a') return a + b;
  if (strcmp(reduction, "mul") == 0) return a * b;
  if (strcmp(reduction, "max") == 0) return a > b ? a : b;
  if (strcmp(reduction, "min") == 0) return a < b ? a : b;
  return b;
}

static void check_scatter(void **state, eg_dtype dtype, int axis, const char *reduction) {
  static const int64_t dims[3] = {6, 5, 7}, part_dims[3] = {3, 4, 5};
  int64_t part[3];
  memcpy(part, part_dims, sizeof part);
  part[axis] = 9; /* more updates than places: some are equal */
  ops_case c;
  ops_begin(&c, state, EGI_OP_ScatterElements, dtype);
  ops_tensor *data = ops_add_input(&c, dtype, 3, dims);
  ops_tensor *indices = ops_add_input(&c, axis == 1 ? EG_DTYPE_I32 : EG_DTYPE_I64, 3, part);
  ops_tensor *updates = ops_add_input(&c, dtype, 3, part);
  ops_tensor *out = ops_add_output(&c, dtype, 3, dims);
  bool is_product = strcmp(reduction, "mul") == 0;
  ops_fill_uniform(data, 1.0, is_product ? 1.0 : 9.0, 1);
  ops_fill_uniform(updates, 1.0, is_product ? 2.0 : 9.0, 2);
  if (is_product && egi_dtype_is_float(dtype)) /* exact in every type */
    for (int64_t i = 0; i < ops_count(updates); i++) updates->values[i] = i % 9 == 0 ? 2.0 : 1.0;
  if (is_product && !egi_dtype_is_float(dtype)) ops_fill_uniform(updates, 1.0, 1.0, 2);
  for (int64_t i = 0; i < ops_count(indices); i++) indices->values[i] = (double)(i * 5 % (2 * dims[axis]) - dims[axis]);
  if (axis != 1) ops_add_attribute(&c, egi_attribute_int("axis", axis == 2 ? -1 : axis));
  if (axis == 1) ops_add_attribute(&c, egi_attribute_int("axis", 1));
  ops_add_attribute(&c, egi_attribute_string("reduction", reduction));
  memcpy(out->values, data->values, (size_t)ops_count(data) * sizeof(double));
  for (int64_t i = 0; i < ops_count(indices); i++) {
    int64_t place[3] = {i / part[2] / part[1], i / part[2] % part[1], i % part[2]};
    place[axis] = (int64_t)indices->values[i];
    if (place[axis] < 0) place[axis] += dims[axis];
    double *at = &out->values[(place[0] * dims[1] + place[1]) * dims[2] + place[2]];
    *at = ops_round(dtype, join(reduction, *at, updates->values[i]));
  }
  ops_check(&c);
  indices->values[0] = (double)dims[axis];
  c.expected_status = EG_ERROR_DATA;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_scatter_elements(void **state, egi_op op) {
  (void)op;
  static const char *const reductions[] = {"none", "add", "mul", "max", "min"};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (int axis = 0; axis < 3; axis++) {
      for (size_t r = 0; r < EGI_COUNT(reductions); r++) check_scatter(state, types[t], axis, reductions[r]);
    }
  }
}
