/* Conformance cases of gathering, scattering, and their gradients. A gradient case adds what the forward case reads. */
#include "support_ops.h"

static void fill(ops_tensor *tensor, uint64_t seed) {
  bool is_boolean = tensor->dtype == EG_DTYPE_BOOL;
  ops_fill_uniform(tensor, is_boolean ? 0.0 : -100.0, is_boolean ? 1.0 : 100.0, seed);
}

/* In [-size, size); many equal ones. */
static void fill_indices(ops_tensor *indices, int64_t size, uint64_t seed) {
  for (int64_t i = 0; i < ops_count(indices) && size > 0; i++) {
    double u = egi_random_uniform(seed, 1, (uint64_t)i);
    indices->values[i] = (double)((int64_t)(u * 2.0 * (double)size) - size);
  }
}

static int64_t wrap(double index, int64_t size) {
  return (int64_t)index < 0 ? (int64_t)index + size : (int64_t)index;
}

static int64_t product(const int64_t *dims, int first, int last) {
  int64_t n = 1;
  for (int i = first; i < last; i++) n *= dims[i];
  return n;
}

/* The two tensors of a case whose elements correspond: forward data and result, backward result and dY. */
typedef struct pair {
  ops_tensor *data, *indices, *part;
} pair;

/* data, indices -> part, or data, indices, part -> data. */
static pair add_pair(ops_case *c, eg_dtype dtype, const ops_tensor *data, const ops_tensor *indices,
                     const ops_tensor *part, bool is_gradient) {
  pair p;
  p.data = ops_add_input(c, dtype, data->rank, data->dims);
  p.indices = ops_add_input(c, indices->dtype, indices->rank, indices->dims);
  if (is_gradient) {
    p.part = ops_add_input(c, dtype, part->rank, part->dims);
    p.data = ops_add_output(c, dtype, data->rank, data->dims);
    fill(p.part, 3);
  } else {
    p.part = ops_add_output(c, dtype, part->rank, part->dims);
    fill(p.data, 3);
  }
  return p;
}

static void carry(const pair *p, bool is_gradient, int64_t in_data, int64_t in_part) {
  if (is_gradient) {
    p->data->values[in_data] += p->part->values[in_part];
  } else {
    p->part->values[in_part] = p->data->values[in_data];
  }
}

/* f32 sums of a few terms below 100, or one rounding of them. */
static void finish(ops_case *c, bool is_gradient, eg_dtype dtype) {
  if (!is_gradient) c->relative = 0.0;
  if (is_gradient) c->absolute = dtype == EG_DTYPE_F64 ? 1e-10 : 1e-3;
  for (unsigned i = 0; is_gradient && i < c->n_outputs; i++) {
    ops_tensor *out = &c->outputs[i];
    for (int64_t k = 0; k < ops_count(out); k++) out->values[k] = ops_round(out->dtype, out->values[k]);
  }
  ops_check(c);
}

static bool is_tested(bool is_gradient, eg_dtype dtype, bool takes_halves) {
  if (!is_gradient) return true;
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64 || (takes_halves && egi_dtype_is_float(dtype));
}

static const eg_dtype types[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_BF16, EG_DTYPE_I64, EG_DTYPE_BOOL};

/* The last index is set outside of its axis: the run must fail. */
static void check_out_of_range(ops_case *c, ops_tensor *indices, int64_t size) {
  if (ops_count(indices) == 0) return;
  c->expected_status = EG_ERROR_DATA;
  indices->values[ops_count(indices) - 1] = (double)size;
  ops_check(c);
  indices->values[ops_count(indices) - 1] = (double)(-size - 1);
  ops_check(c);
}

/* ---- Gather --------------------------------------------------------------------------------------------------- */

static void check_gather(void **state, egi_op op, eg_dtype dtype, eg_dtype index_type, int axis, int index_rank) {
  static const ops_tensor datas[] = {{.rank = 3, .dims = {11, 6, 130}}, {.rank = 2, .dims = {300, 65}}};
  static const int64_t index_dims[3] = {3, 17, 2};
  bool is_gradient = op == EGI_OP_GatherGrad;
  ops_case c;
  ops_begin(&c, state, op, dtype);
  const ops_tensor *data = &datas[index_rank % 2];
  if (axis >= data->rank) return;
  ops_tensor indices = {.dtype = index_type, .rank = index_rank};
  ops_tensor part = {.rank = data->rank - 1 + index_rank};
  memcpy(indices.dims, index_dims, sizeof index_dims);
  memcpy(part.dims, data->dims, (size_t)axis * sizeof(int64_t));
  memcpy(part.dims + axis, index_dims, (size_t)index_rank * sizeof(int64_t));
  memcpy(part.dims + axis + index_rank, data->dims + axis + 1, (size_t)(data->rank - axis - 1) * sizeof(int64_t));
  pair p = add_pair(&c, dtype, data, &indices, &part, is_gradient);
  int64_t size = data->dims[axis], inner = product(data->dims, axis + 1, data->rank), n = ops_count(p.indices);
  fill_indices(p.indices, size, 5);
  for (int64_t i = 0; i < ops_count(p.part); i++) {
    int64_t column = i % inner, k = i / inner % n, outer = i / inner / n;
    carry(&p, is_gradient, (outer * size + wrap(p.indices->values[k], size)) * inner + column, i);
  }
  ops_add_attribute(&c, egi_attribute_int("axis", axis == 1 ? axis - data->rank : axis));
  finish(&c, is_gradient, dtype);
  check_out_of_range(&c, p.indices, size);
  ops_end(&c);
}

/* f16 and bf16 weights of a graph that says f32. */
static void check_narrow_gather(void **state, eg_dtype dtype) {
  static const int64_t dims[2] = {9, 129}, n = 33, out_dims[2] = {33, 129};
  ops_case c;
  ops_begin(&c, state, EGI_OP_Gather, EG_DTYPE_F32);
  ops_tensor *data = ops_add_input(&c, dtype, 2, dims);
  ops_tensor *indices = ops_add_input(&c, EG_DTYPE_I64, 1, &n);
  ops_tensor *out = ops_add_output(&c, EG_DTYPE_F32, 2, out_dims);
  fill(data, 1);
  fill_indices(indices, 9, 2);
  for (int64_t i = 0; i < ops_count(out); i++) {
    out->values[i] = data->values[wrap(indices->values[i / 129], 9) * 129 + i % 129];
  }
  c.relative = 0.0;
  ops_check(&c);
  ops_end(&c);
}

/* No indices, no rows, rows of nothing. */
static void check_empty_gather(void **state, egi_op op, int64_t rows, int64_t columns, int64_t n) {
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_F32);
  ops_tensor data = {.rank = 2, .dims = {rows, columns}}, part = {.rank = 2, .dims = {n, columns}};
  ops_tensor indices = {.dtype = EG_DTYPE_I64, .rank = 1, .dims = {n}};
  add_pair(&c, EG_DTYPE_F32, &data, &indices, &part, op == EGI_OP_GatherGrad);
  ops_check(&c);
  ops_end(&c);
}

void ops_case_gather(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (int axis = 0; is_tested(op == EGI_OP_GatherGrad, types[t], true) && axis < 3; axis++) {
      for (int rank = 0; rank <= 3; rank++) {
        check_gather(state, op, types[t], rank == 1 ? EG_DTYPE_I32 : EG_DTYPE_I64, axis, rank);
      }
    }
  }
  check_empty_gather(state, op, 5, 3, 0);
  check_empty_gather(state, op, 5, 0, 2);
  check_empty_gather(state, op, 0, 3, 0);
  if (op == EGI_OP_GatherGrad) return;
  check_narrow_gather(state, EG_DTYPE_F16);
  check_narrow_gather(state, EG_DTYPE_BF16);
}

/* ---- GatherElements ------------------------------------------------------------------------------------------- */

static void check_elements(void **state, egi_op op, eg_dtype dtype, int axis, bool is_empty) {
  static const ops_tensor data = {.rank = 3, .dims = {9, 6, 130}};
  bool is_gradient = op == EGI_OP_GatherElementsGrad;
  ops_case c;
  ops_begin(&c, state, op, dtype);
  ops_tensor indices = {.dtype = axis == 1 ? EG_DTYPE_I32 : EG_DTYPE_I64, .rank = 3, .dims = {8, 6, 129}};
  indices.dims[axis] = is_empty ? 0 : axis == 2 ? 150 : 13;
  pair p = add_pair(&c, dtype, &data, &indices, &indices, is_gradient);
  int64_t size = data.dims[axis];
  fill_indices(p.indices, size, 9);
  for (int64_t i = 0; i < ops_count(p.part); i++) {
    int64_t at[3] = {i / (indices.dims[1] * indices.dims[2]), i / indices.dims[2] % indices.dims[1],
                     i % indices.dims[2]};
    at[axis] = wrap(p.indices->values[i], size);
    carry(&p, is_gradient, (at[0] * data.dims[1] + at[1]) * data.dims[2] + at[2], i);
  }
  ops_add_attribute(&c, egi_attribute_int("axis", axis == 2 ? -1 : axis));
  finish(&c, is_gradient, dtype);
  check_out_of_range(&c, p.indices, size);
  ops_end(&c);
}

void ops_case_gather_elements(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (int axis = 0; is_tested(op == EGI_OP_GatherElementsGrad, types[t], false) && axis < 3; axis++) {
      check_elements(state, op, types[t], axis, false);
      check_elements(state, op, types[t], axis, true);
    }
  }
}

/* ---- GatherND ------------------------------------------------------------------------------------------------- */

static void check_nd(void **state, egi_op op, eg_dtype dtype, int batch_dims, int depth) {
  static const ops_tensor data = {.rank = 4, .dims = {3, 5, 7, 11}};
  bool is_gradient = op == EGI_OP_GatherNDGrad;
  ops_case c;
  ops_begin(&c, state, op, dtype);
  /* indices: batch dims, 19 tuples, depth; result: batch dims, 19, the dims that no tuple names. */
  ops_tensor indices = {.dtype = EG_DTYPE_I64, .rank = batch_dims + 2}, part = {.rank = 0};
  for (int i = 0; i < batch_dims; i++) part.dims[part.rank++] = indices.dims[i] = data.dims[i];
  part.dims[part.rank++] = indices.dims[batch_dims] = 19;
  indices.dims[batch_dims + 1] = depth;
  for (int i = batch_dims + depth; i < data.rank; i++) part.dims[part.rank++] = data.dims[i];
  pair p = add_pair(&c, dtype, &data, &indices, &part, is_gradient);
  int64_t slice = product(data.dims, batch_dims + depth, data.rank);
  for (int64_t i = 0; i < ops_count(p.indices); i++) {
    int64_t size = data.dims[batch_dims + i % depth];
    double u = egi_random_uniform(77, 0, (uint64_t)i);
    p.indices->values[i] = (double)((int64_t)(u * 2.0 * (double)size) - size);
  }
  for (int64_t i = 0; i < ops_count(p.part); i++) {
    int64_t row = i / slice, at = row / 19;
    for (int k = 0; k < depth; k++) {
      int64_t size = data.dims[batch_dims + k];
      at = at * size + wrap(p.indices->values[row * depth + k], size);
    }
    carry(&p, is_gradient, at * slice + i % slice, i);
  }
  ops_add_attribute(&c, egi_attribute_int("batch_dims", batch_dims));
  finish(&c, is_gradient, dtype);
  check_out_of_range(&c, p.indices, data.dims[batch_dims + depth - 1]);
  ops_end(&c);
}

void ops_case_gather_nd(void **state, egi_op op) {
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (int batch = 0; is_tested(op == EGI_OP_GatherNDGrad, types[t], false) && batch <= 2; batch++) {
      for (int depth = 1; depth <= 4 - batch; depth++) check_nd(state, op, types[t], batch, depth);
    }
  }
}

/* ---- ScatterND ------------------------------------------------------------------------------------------------ */

static double combine(const char *reduction, double old, double update) {
  if (reduction == NULL) return update;
  if (reduction[0] == 'a') return old + update;
  if (reduction[1] == 'u') return old * update;
  if (reduction[1] == 'a') return old > update ? old : update;
  return old < update ? old : update;
}

static void check_scatter(void **state, eg_dtype dtype, const char *reduction, int depth) {
  static const int64_t dims[3] = {4, 5, 33}, sizes[2] = {4, 5};
  ops_case c;
  ops_begin(&c, state, EGI_OP_ScatterND, dtype);
  int64_t index_dims[2] = {9, depth}, update_dims[3] = {9, 0, 0};
  for (int i = depth; i < 3; i++) update_dims[1 + i - depth] = dims[i];
  ops_tensor *data = ops_add_input(&c, dtype, 3, dims);
  ops_tensor *indices = ops_add_input(&c, EG_DTYPE_I64, 2, index_dims);
  ops_tensor *updates = ops_add_input(&c, dtype, 4 - depth, update_dims);
  ops_tensor *out = ops_add_output(&c, dtype, 3, dims);
  ops_fill_uniform(data, 0.0, dtype == EG_DTYPE_BOOL ? 1.0 : 9.0, 1);
  ops_fill_uniform(updates, 0.0, dtype == EG_DTYPE_BOOL ? 1.0 : 3.0, 2);
  int64_t slice = product(dims, depth, 3);
  for (int64_t i = 0; i < ops_count(data); i++) out->values[i] = data->values[i];
  for (int64_t row = 0; row < 9; row++) {
    int64_t at = 0;
    for (int k = 0; k < depth; k++) {
      double u = egi_random_uniform(6, (uint64_t)k, (uint64_t)row);
      indices->values[row * depth + k] = (double)((int64_t)(u * 2.0 * (double)sizes[k]) - sizes[k]);
      at = at * sizes[k] + wrap(indices->values[row * depth + k], sizes[k]);
    }
    for (int64_t i = 0; i < slice; i++) {
      double *target = &out->values[at * slice + i];
      *target = ops_round(dtype, combine(reduction, *target, updates->values[row * slice + i]));
    }
  }
  if (reduction != NULL) ops_add_attribute(&c, egi_attribute_string("reduction", reduction));
  ops_check(&c);
  check_out_of_range(&c, indices, sizes[depth - 1]);
  ops_end(&c);
}

void ops_case_scatter_nd(void **state, egi_op op) {
  (void)op;
  static const char *const reductions[] = {NULL, "add", "mul", "max", "min"};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (size_t r = 0; r < EGI_COUNT(reductions); r++) {
      if (types[t] == EG_DTYPE_BOOL && r > 0) continue;
      for (int depth = 1; depth <= 2; depth++) check_scatter(state, types[t], reductions[r], depth);
    }
  }
}
