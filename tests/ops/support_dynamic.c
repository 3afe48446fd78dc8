/* Conformance cases of operators whose results depend on data: run with the sizes that hold, and refused when these
 * have changed. How sizes are found is tested with the eager runs. */
#include "support_ops.h"

static void fill(ops_tensor *tensor, const double *values) {
  memcpy(tensor->values, values, (size_t)ops_count(tensor) * sizeof *values);
}

static void check_nonzero(void **state, eg_dtype dtype, eg_status expected) {
  static const double values[] = {1, 0, 0, 2, 0, 3}, indices[] = {0, 1, 1, 0, 0, 2};
  ops_case c;
  ops_begin(&c, state, EGI_OP_NonZero, EG_DTYPE_I64);
  fill(ops_add_input(&c, dtype, 2, (int64_t[]){2, 3}), values);
  fill(ops_add_output(&c, EG_DTYPE_I64, 2, (int64_t[]){2, expected == EG_OK ? 3 : 2}), indices);
  c.expected_status = expected;
  ops_check(&c);
  ops_end(&c);
}

static void check_compress(void **state, eg_dtype dtype, eg_status expected) {
  static const double values[] = {1, 2, 3, 4, 5, 6}, condition[] = {0, 1}, kept[] = {2, 4, 6};
  ops_case c;
  ops_begin(&c, state, EGI_OP_Compress, dtype);
  fill(ops_add_input(&c, dtype, 2, (int64_t[]){3, 2}), values);
  fill(ops_add_input(&c, EG_DTYPE_BOOL, 1, (int64_t[]){2}), condition);
  fill(ops_add_output(&c, dtype, 2, (int64_t[]){3, expected == EG_OK ? 1 : 2}), (double[]){2, 4, 6, 0, 0, 0});
  if (expected == EG_OK) fill(&c.outputs[0], kept);
  ops_add_attribute(&c, egi_attribute_int("axis", -1));
  c.expected_status = expected;
  ops_check(&c);
  ops_end(&c);
}

static void check_unique(void **state, eg_dtype dtype, bool is_sorted) {
  static const double values[] = {5, 2, 5, 1, 2, 5};
  static const double sorted[4][6] = {{1, 2, 5}, {3, 1, 0}, {2, 1, 2, 0, 1, 2}, {1, 2, 3}};
  static const double met[4][6] = {{5, 2, 1}, {0, 1, 3}, {0, 1, 0, 2, 1, 0}, {3, 2, 1}};
  ops_case c;
  ops_begin(&c, state, EGI_OP_Unique, dtype);
  fill(ops_add_input(&c, dtype, 1, (int64_t[]){6}), values);
  for (unsigned i = 0; i < 4; i++)
    fill(ops_add_output(&c, i == 0 ? dtype : EG_DTYPE_I64, 1, (int64_t[]){i == 2 ? 6 : 3}),
         is_sorted ? sorted[i] : met[i]);
  ops_add_attribute(&c, egi_attribute_int("sorted", is_sorted));
  ops_check(&c);
  ops_end(&c);
}

void ops_case_dynamic(void **state, egi_op op) {
  static const eg_dtype types[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_F16, EG_DTYPE_I64, EG_DTYPE_U8, EG_DTYPE_I32};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    if (op == EGI_OP_NonZero) check_nonzero(state, types[t], EG_OK);
    if (op == EGI_OP_NonZero) check_nonzero(state, types[t], EG_ERROR_DATA);
    if (op == EGI_OP_Compress) check_compress(state, types[t], EG_OK);
    if (op == EGI_OP_Compress) check_compress(state, types[t], EG_ERROR_DATA);
    if (op == EGI_OP_Unique) check_unique(state, types[t], true);
    if (op == EGI_OP_Unique) check_unique(state, types[t], false);
  }
}

/* Plans refuse control flow; tests/backend/test_eager.c runs it. */
void ops_case_control_flow(void **state, egi_op op) {
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_F32);
  ops_add_input(&c, EG_DTYPE_BOOL, 0, NULL);
  ops_add_output(&c, EG_DTYPE_F32, 0, NULL);
  ops_check_refused(&c, EG_ERROR_UNSUPPORTED);
  ops_end(&c);
}
