/* Conformance cases of the operators that move elements, and of those that make tensors from sizes and scalars. */
#include "support_ops.h"

#include <math.h>

/* A type of each size. */
static const eg_dtype sized_types[] = {EG_DTYPE_F32, EG_DTYPE_BOOL, EG_DTYPE_F16, EG_DTYPE_I64};

/* Every element different as far as the type goes. */
static void fill_ramp(ops_tensor *tensor) {
  for (int64_t i = 0; i < ops_count(tensor); i++) {
    tensor->values[i] = tensor->dtype == EG_DTYPE_BOOL ? (double)((i * 7 / 3) % 2) : (double)(i % 2048);
  }
}

static void begin_exact(ops_case *c, void **state, egi_op op) {
  ops_begin(c, state, op, EG_DTYPE_BOOL);
}

static const struct {
  int rank;
  int64_t dims[4];
} shapes[] = {{0, {0}},      {1, {0}},       {1, {1}},         {1, {33}},
              {2, {31, 33}}, {3, {2, 0, 5}}, {3, {3, 65, 67}}, {4, {2, 3, 5, 64}}};

/* ---- Identity, Barrier, Reshape and its like ------------------------------------------------------------------- */

void ops_case_identity(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(sized_types); t++) {
    for (size_t s = 0; s < EGI_COUNT(shapes); s++) {
      ops_case c;
      begin_exact(&c, state, op);
      ops_tensor *in = ops_add_input(&c, sized_types[t], shapes[s].rank, shapes[s].dims);
      fill_ramp(in);
      if (op == EGI_OP_Barrier || op == EGI_OP_Reload) ops_add_input(&c, EG_DTYPE_F32, 0, NULL);
      ops_tensor *out = ops_add_output(&c, in->dtype, in->rank, in->dims);
      memcpy(out->values, in->values, (size_t)ops_count(in) * sizeof(double));
      ops_check(&c);
      ops_end(&c);
    }
  }
}

/* The kernel goes by the planned shapes; the list of dims or axes is there as in a graph. */
void ops_case_reshape(void **state, egi_op op) {
  static const struct {
    int rank, new_rank;
    int64_t dims[4], new_dims[4];
  } reshapes[] = {
      {3, 2, {4, 1, 15}, {4, 15}}, {2, 3, {0, 3}, {0, 1, 3}}, {1, 0, {1}, {0}}, {2, 3, {129, 131}, {129, 1, 131}}};
  for (size_t t = 0; t < EGI_COUNT(sized_types); t++) {
    for (size_t s = 0; s < EGI_COUNT(reshapes); s++) {
      ops_case c;
      begin_exact(&c, state, op);
      ops_tensor *in = ops_add_input(&c, sized_types[t], reshapes[s].rank, reshapes[s].dims);
      fill_ramp(in);
      if (op != EGI_OP_Flatten) ops_add_integers(&c, reshapes[s].new_dims, reshapes[s].new_rank);
      ops_tensor *out = ops_add_output(&c, in->dtype, reshapes[s].new_rank, reshapes[s].new_dims);
      memcpy(out->values, in->values, (size_t)ops_count(in) * sizeof(double));
      ops_check(&c);
      ops_end(&c);
    }
  }
}

/* ---- Expand, Transpose ---------------------------------------------------------------------------------------- */

void ops_case_expand(void **state, egi_op op) {
  static const struct {
    int rank, new_rank;
    int64_t dims[4], new_dims[4];
  } expansions[] = {{2, 2, {3, 1}, {3, 40}},
                    {1, 3, {5}, {2, 3, 5}},
                    {0, 1, {0}, {17000}},
                    {2, 2, {1, 3}, {0, 3}},
                    {4, 4, {2, 1, 3, 4}, {2, 70, 3, 4}}};
  for (size_t t = 0; t < EGI_COUNT(sized_types); t++) {
    for (size_t s = 0; s < EGI_COUNT(expansions); s++) {
      ops_case c;
      begin_exact(&c, state, op);
      ops_tensor *in = ops_add_input(&c, sized_types[t], expansions[s].rank, expansions[s].dims);
      fill_ramp(in);
      ops_add_integers(&c, expansions[s].new_dims, expansions[s].new_rank);
      ops_tensor *out = ops_add_output(&c, in->dtype, expansions[s].new_rank, expansions[s].new_dims);
      for (int64_t i = 0; i < ops_count(out); i++) {
        out->values[i] = in->values[ops_broadcast_index(in, out->rank, out->dims, i)];
      }
      ops_check(&c);
      ops_end(&c);
    }
  }
}

static void check_transpose(void **state, eg_dtype dtype, size_t s, const int64_t *permutation) {
  ops_case c;
  begin_exact(&c, state, EGI_OP_Transpose);
  int rank = shapes[s].rank;
  int64_t dims[4] = {0}, strides[4] = {0}, reversed[4] = {3, 2, 1, 0};
  const int64_t *order = permutation != NULL ? permutation : reversed + 4 - rank;
  for (int i = 0; i < rank; i++) dims[i] = shapes[s].dims[order[i]];
  ops_tensor *in = ops_add_input(&c, dtype, rank, shapes[s].dims);
  ops_tensor *out = ops_add_output(&c, dtype, rank, dims);
  fill_ramp(in);
  if (permutation != NULL) ops_add_attribute(&c, egi_attribute_ints("perm", permutation, (uint32_t)rank));
  for (int i = rank - 1, step = 1; i >= 0; step *= (int)shapes[s].dims[i--]) strides[i] = step;
  for (int64_t i = 0; i < ops_count(out); i++) {
    int64_t from = 0, rest = i;
    for (int k = rank - 1; k >= 0; k--) {
      from += rest % dims[k] * strides[order[k]];
      rest /= dims[k];
    }
    out->values[i] = in->values[from];
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_transpose(void **state, egi_op op) {
  (void)op;
  static const int64_t two[2][2] = {{0, 1}, {1, 0}};
  static const int64_t three[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  static const int64_t four[4][4] = {{0, 2, 1, 3}, {0, 2, 3, 1}, {3, 1, 0, 2}, {0, 1, 3, 2}};
  for (size_t t = 0; t < EGI_COUNT(sized_types); t++) {
    for (size_t s = 0; s < EGI_COUNT(shapes); s++) {
      int rank = shapes[s].rank;
      check_transpose(state, sized_types[t], s, NULL);
      for (size_t k = 0; rank == 2 && k < 2; k++) check_transpose(state, sized_types[t], s, two[k]);
      for (size_t k = 0; rank == 3 && k < 6; k++) check_transpose(state, sized_types[t], s, three[k]);
      for (size_t k = 0; rank == 4 && k < 4; k++) check_transpose(state, sized_types[t], s, four[k]);
    }
  }
}

/* ---- Slice and its gradient ------------------------------------------------------------------------------------ */

#define FAR INT64_C(9007199254740992) /* beyond every axis, and a double */

typedef struct slice_case {
  int rank;
  int64_t dims[3];
  int n_axes; /* with no axes or steps given: lists of n_axes entries for the first axes */
  int64_t starts[3], ends[3], axes[3], steps[3];
  bool has_axes, has_steps;
} slice_case;

static const slice_case slices[] = {
    {1, {9}, 1, {2}, {7}, {0}, {1}, false, false},
    {1, {9}, 1, {-3}, {FAR}, {0}, {1}, true, false},
    {1, {9}, 1, {FAR}, {-FAR}, {0}, {-1}, true, true},
    {1, {9}, 1, {-2}, {0}, {-1}, {-3}, true, true},
    {1, {9}, 1, {5}, {5}, {0}, {1}, true, false},
    {1, {0}, 1, {0}, {4}, {0}, {1}, true, false},
    {3, {5, 40, 33}, 2, {1, 0}, {4, -1}, {0, 1}, {1, 1}, false, false},
    {3, {5, 40, 33}, 2, {3, 30}, {35, -FAR}, {-2, 2}, {2, -2}, true, true},
    {2, {130, 140}, 2, {1, 1}, {FAR, FAR}, {1, 0}, {1, 1}, true, false},
};

static int64_t bound(int64_t value, int64_t size, bool is_forward) {
  if (value < 0) value += size;
  int64_t low = is_forward ? 0 : -1, high = is_forward ? size : size - 1;
  return value < low ? low : value > high ? high : value;
}

/* First index, step and count of each axis, from the definition: walk until the end is passed. */
static void expect_slice(const slice_case *s, int64_t *first, int64_t *step, int64_t *count) {
  for (int i = 0; i < s->rank; i++) first[i] = 0, step[i] = 1, count[i] = s->dims[i];
  for (int k = 0; k < s->n_axes; k++) {
    int64_t axis = s->has_axes ? s->axes[k] : k;
    if (axis < 0) axis += s->rank;
    step[axis] = s->has_steps ? s->steps[k] : 1;
    int64_t size = s->dims[axis], end = bound(s->ends[k], size, step[axis] > 0);
    first[axis] = bound(s->starts[k], size, step[axis] > 0);
    count[axis] = 0;
    for (int64_t i = first[axis]; step[axis] > 0 ? i < end : i > end; i += step[axis]) count[axis]++;
  }
}

static void check_slice(void **state, egi_op op, eg_dtype dtype, const slice_case *s) {
  int64_t first[3], step[3], count[3];
  bool is_gradient = op == EGI_OP_SliceGrad;
  expect_slice(s, first, step, count);
  ops_case c;
  begin_exact(&c, state, op);
  ops_tensor *whole = ops_add_input(&c, dtype, s->rank, s->dims);
  ops_tensor *part = is_gradient ? ops_add_input(&c, dtype, s->rank, count) : NULL;
  ops_add_integers(&c, s->starts, s->n_axes);
  ops_add_integers(&c, s->ends, s->n_axes);
  if (s->has_axes) ops_add_integers(&c, s->axes, s->n_axes);
  if (s->has_steps) ops_add_integers(&c, s->steps, s->n_axes);
  ops_tensor *out =
      is_gradient ? ops_add_output(&c, dtype, s->rank, s->dims) : ops_add_output(&c, dtype, s->rank, count);
  fill_ramp(is_gradient ? part : whole);
  ops_tensor *selected = is_gradient ? part : out;
  for (int64_t i = 0; i < ops_count(selected); i++) {
    int64_t at = 0, rest = i, stride = 1;
    for (int k = s->rank - 1; k >= 0; k--) {
      at += (first[k] + rest % count[k] * step[k]) * stride;
      rest /= count[k];
      stride *= s->dims[k];
    }
    if (is_gradient) {
      out->values[at] = part->values[i];
    } else {
      out->values[i] = whole->values[at];
    }
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_slice(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(sized_types); t++) {
    for (size_t s = 0; s < EGI_COUNT(slices); s++) check_slice(state, op, sized_types[t], &slices[s]);
  }
}

/* ---- Split, Concat -------------------------------------------------------------------------------------------- */

/* Three parts along an axis: as one tensor, and apart. */
static void check_parts(void **state, egi_op op, eg_dtype dtype, int axis, bool has_sizes) {
  static const int64_t dims[3] = {6, 35, 65};
  bool is_split = op == EGI_OP_Split;
  int64_t sizes[3] = {1, 0, 0};
  if (has_sizes) {
    sizes[2] = dims[axis] - 1;
  } else { /* equal ones, the last smaller */
    sizes[0] = sizes[1] = (dims[axis] + 2) / 3;
    sizes[2] = dims[axis] - 2 * sizes[0];
  }
  ops_case c;
  begin_exact(&c, state, op);
  ops_tensor *whole = is_split ? ops_add_input(&c, dtype, 3, dims) : ops_add_output(&c, dtype, 3, dims);
  ops_tensor *parts[3];
  fill_ramp(whole);
  if (is_split && has_sizes) ops_add_integers(&c, sizes, 3);
  int64_t outer = 1, inner = 1, start = 0;
  for (int i = 0; i < axis; i++) outer *= dims[i];
  for (int i = axis + 1; i < 3; i++) inner *= dims[i];
  for (int k = 0; k < 3; k++) {
    int64_t part_dims[3] = {dims[0], dims[1], dims[2]};
    part_dims[axis] = sizes[k];
    parts[k] = is_split ? ops_add_output(&c, dtype, 3, part_dims) : ops_add_input(&c, dtype, 3, part_dims);
    for (int64_t i = 0; i < ops_count(parts[k]); i++) {
      int64_t o = i / (sizes[k] * inner), rest = i % (sizes[k] * inner);
      parts[k]->values[i] = whole->values[(o * dims[axis] + start) * inner + rest];
    }
    start += sizes[k];
  }
  assert_true(outer > 0);
  ops_add_attribute(&c, egi_attribute_int("axis", axis == 1 ? -2 : axis));
  if (is_split && !has_sizes) ops_add_attribute(&c, egi_attribute_int("num_outputs", 3));
  ops_check(&c);
  if (is_split) { /* a part that nobody wants */
    c.outputs[0].dtype = EG_DTYPE_UNDEFINED;
    ops_check(&c);
  }
  ops_end(&c);
}

static void check_axes(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(sized_types); t++) {
    for (int axis = 0; axis < 3; axis++) {
      check_parts(state, op, sized_types[t], axis, true);
      check_parts(state, op, sized_types[t], axis, false);
    }
  }
}

void ops_case_split(void **state, egi_op op) {
  check_axes(state, op);
}
void ops_case_concat(void **state, egi_op op) {
  check_axes(state, op);
}

/* ---- tensors from attributes and scalars ----------------------------------------------------------------------- */

void ops_case_constant(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(sized_types); t++) {
    for (size_t s = 0; s < EGI_COUNT(shapes); s++) {
      ops_case c;
      begin_exact(&c, state, op);
      ops_tensor *out = ops_add_output(&c, sized_types[t], shapes[s].rank, shapes[s].dims);
      fill_ramp(out);
      ops_add_tensor_attribute(&c, "value", out);
      ops_check(&c);
      ops_end(&c);
    }
  }
  static const int64_t numbers[3] = {4, -5, 6}, dims[1] = {3};
  ops_case c;
  begin_exact(&c, state, op);
  ops_tensor *out = ops_add_output(&c, EG_DTYPE_I64, 1, dims);
  for (int i = 0; i < 3; i++) out->values[i] = (double)numbers[i];
  ops_add_attribute(&c, egi_attribute_ints("value_ints", numbers, 3));
  ops_check(&c);
  c.outputs[0] = (ops_tensor){.dtype = EG_DTYPE_F32, .values = out->values};
  c.outputs[0].values[0] = 1.5;
  c.attributes[0] = egi_attribute_float("value_float", 1.5f);
  ops_check(&c);
  ops_end(&c);
}

void ops_case_constant_of_shape(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(sized_types); t++) {
    for (size_t s = 0; s < EGI_COUNT(shapes); s++) {
      ops_case c;
      begin_exact(&c, state, op);
      ops_add_integers(&c, shapes[s].dims, shapes[s].rank);
      ops_tensor *out = ops_add_output(&c, sized_types[t], shapes[s].rank, shapes[s].dims);
      double element = 1.0;
      ops_tensor value = {.dtype = sized_types[t], .rank = 1, .dims = {1}, .values = &element};
      bool has_value = sized_types[t] != EG_DTYPE_F32 || s % 2 == 0;
      if (has_value) ops_add_tensor_attribute(&c, "value", &value);
      for (int64_t i = 0; has_value && i < ops_count(out); i++) out->values[i] = element;
      ops_check(&c);
      ops_end(&c);
    }
  }
}

void ops_case_range(void **state, egi_op op) {
  static const eg_dtype types[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_I16, EG_DTYPE_I32, EG_DTYPE_I64};
  static const double ranges[][3] = {{0, 5, 1}, {10, 4, -2}, {3, 3, 1}, {-7, 5, 5}, {0, 1000, 1}};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (size_t r = 0; r < EGI_COUNT(ranges); r++) {
      ops_case c;
      begin_exact(&c, state, op);
      for (int i = 0; i < 3; i++) ops_add_input(&c, types[t], 0, NULL)->values[0] = ranges[r][i];
      int64_t count = (int64_t)ceil((ranges[r][1] - ranges[r][0]) / ranges[r][2]);
      ops_tensor *out = ops_add_output(&c, types[t], 1, &count);
      for (int64_t i = 0; i < count; i++) out->values[i] = ranges[r][0] + (double)i * ranges[r][2];
      ops_check(&c);
      ops_end(&c);
    }
  }
}

static void check_shape(void **state, int64_t start, int64_t end, int64_t first, int64_t count) {
  static const int64_t dims[4] = {2, 0, 7, 5};
  ops_case c;
  begin_exact(&c, state, EGI_OP_Shape);
  ops_add_input(&c, EG_DTYPE_F32, 4, dims);
  ops_add_attribute(&c, egi_attribute_int("start", start));
  if (end != 99) ops_add_attribute(&c, egi_attribute_int("end", end));
  ops_tensor *out = ops_add_output(&c, EG_DTYPE_I64, 1, &count);
  for (int64_t i = 0; i < count; i++) out->values[i] = (double)dims[first + i];
  ops_check(&c);
  ops_end(&c);
}

void ops_case_shape(void **state, egi_op op) {
  if (op == EGI_OP_Shape) {
    check_shape(state, 0, 99, 0, 4);
    check_shape(state, 1, 3, 1, 2);
    check_shape(state, -2, 99, 2, 2);
    check_shape(state, -9, -1, 0, 3);
    check_shape(state, 5, 99, 4, 0);
    return;
  }
  for (size_t s = 0; s < EGI_COUNT(shapes); s++) {
    ops_case c;
    begin_exact(&c, state, op);
    ops_tensor *in = ops_add_input(&c, EG_DTYPE_F32, shapes[s].rank, shapes[s].dims);
    ops_add_output(&c, EG_DTYPE_I64, 0, NULL)->values[0] = (double)ops_count(in);
    ops_check(&c);
    ops_end(&c);
  }
}

void ops_case_trilu(void **state, egi_op op) {
  static const int64_t diagonals[] = {0, 1, -1, 3, -20, 20};
  for (size_t t = 0; t < EGI_COUNT(sized_types); t++) {
    for (size_t s = 0; s < EGI_COUNT(shapes); s++) {
      for (size_t k = 0; shapes[s].rank >= 2 && k < 2 * EGI_COUNT(diagonals); k++) {
        int rank = shapes[s].rank;
        int64_t diagonal = diagonals[k / 2];
        bool is_upper = k % 2 == 0;
        ops_case c;
        begin_exact(&c, state, op);
        ops_tensor *in = ops_add_input(&c, sized_types[t], rank, shapes[s].dims);
        fill_ramp(in);
        if (diagonal != 0) ops_add_input(&c, EG_DTYPE_I64, 0, NULL)->values[0] = (double)diagonal;
        if (!is_upper) ops_add_attribute(&c, egi_attribute_int("upper", 0));
        ops_tensor *out = ops_add_output(&c, in->dtype, rank, in->dims);
        for (int64_t i = 0; i < ops_count(in); i++) {
          int64_t column = i % in->dims[rank - 1], row = i / in->dims[rank - 1] % in->dims[rank - 2];
          bool is_kept = is_upper ? column - row >= diagonal : column - row <= diagonal;
          if (is_kept) out->values[i] = in->values[i];
        }
        ops_check(&c);
        ops_end(&c);
      }
    }
  }
}
