/* Shared by the CPU kernels: the kernel table, prepare and run functions by name. */
#ifndef ENGRAFT_BACKEND_CPU_CPU_H
#define ENGRAFT_BACKEND_CPU_CPU_H

#include "backend/cpu/isa/isa.h"
#include "backend/operands.h"

/* One kernel per row of ops.def, defined by kernels.def. */
#define EGI_OP(symbol, domain, name, version, in_min, in_max, out_min, out_max, flags, shape, gradient) \
  extern const egi_kernel egi_cpu_kernel_##symbol;
#include "graph/ops.def"
#undef EGI_OP

#define KERNEL(symbol, prepare, run, flags)                   \
  eg_status egi_cpu_prepare_##prepare(egi_kernel_plan *plan); \
  eg_status egi_cpu_run_##run(eg_context *ctx, const egi_kernel_call *call);
#define KERNEL_MEASURED(symbol, prepare, run, flags, measure) \
  KERNEL(symbol, prepare, run, flags)                         \
  eg_status egi_cpu_measure_##measure(const egi_kernel_plan *plan, egi_tensor *outputs);
#include "backend/cpu/kernels.def"
#undef KERNEL_MEASURED
#undef KERNEL

/* NULL for operators outside ops.def. */
const egi_kernel *egi_cpu_find_kernel(egi_op op);

/* ---- matrix products of one thread (gemm.c) -------------------------------------------------------------------- */

/* Strides in elements, any. */
typedef struct egi_matrix {
  void *data;
  eg_dtype dtype;
  int64_t row_stride, column_stride;
} egi_matrix;

/* C[m, n] = alpha · A[m, k] · B[k, n] + beta · C in C's type: f32, f64 or 32- and 64-bit integers. A and B are of that
 * type, or f16 or bf16 beside an f32 C. C is not read when beta is 0. */
typedef struct egi_product {
  int64_t m, n, k;
  egi_matrix a, b, c;
  double alpha, beta;
} egi_product;

/* Bytes of scratch, 64-byte aligned, for products of at most m rows and n columns. */
size_t egi_product_scratch(int64_t m, int64_t n);
void egi_product_run(const egi_isa *isa, const egi_product *product, void *scratch);
/* The element at (row, column). */
void *egi_matrix_at(const egi_matrix *matrix, int64_t row, int64_t column);
/* The matrix from element (row, column) on. */
egi_matrix egi_matrix_part(const egi_matrix *matrix, int64_t row, int64_t column);
/* Copies rows x columns to a row-major block of `dtype` (converting f16 and bf16 to f32), rows `out_stride` apart. */
void egi_matrix_copy(const egi_isa *isa, const egi_matrix *matrix, const int64_t size[2], void *out,
                     int64_t out_stride);

/* ---- rows of a tensor (rows.c) ---------------------------------------------------------------------------------- */

/* A tensor as `count` rows of `length` elements, the dims from `axis` on; rows[i] may lie anywhere. */
typedef struct egi_rows {
  int rank; /* of the outer dims */
  int64_t dims[EGI_MAX_RANK], strides[EGI_MAX_RANK];
  int inner_rank;
  int64_t inner_dims[EGI_MAX_RANK], inner_strides[EGI_MAX_RANK];
  int64_t count, length;
  size_t element_bytes;
  bool is_contiguous; /* elements of one row stand side by side */
} egi_rows;
void egi_rows_init(egi_rows *rows, const egi_tensor *tensor, int axis);
/* Rows along one dim alone. */
void egi_rows_init_along(egi_rows *rows, const egi_tensor *tensor, int axis);
/* Where row `row` of the tensor with these bytes starts. */
void *egi_rows_at(const egi_rows *rows, void *data, int64_t row);
/* The row as contiguous elements: in place, or gathered to `buffer`. */
const void *egi_rows_load(const egi_rows *rows, const egi_tensor *tensor, int64_t row, void *buffer);
/* Where to write the row: in place, or `buffer`, which egi_rows_store() scatters. */
void *egi_rows_target(const egi_rows *rows, const egi_tensor *tensor, int64_t row, void *buffer);
void egi_rows_store(const egi_rows *rows, const egi_tensor *tensor, int64_t row, void *buffer);
/* An f32 or f64 number in memory. */
static inline double egi_real_get(const void *at, eg_dtype dtype) {
  return dtype == EG_DTYPE_F64 ? *(const double *)at : (double)*(const float *)at;
}
static inline void egi_real_set(void *at, eg_dtype dtype, double value) {
  if (dtype == EG_DTYPE_F64)
    *(double *)at = value;
  else
    *(float *)at = (float)value;
}
/* The row functions of f32 or f64; NULL for other types. */
const egi_row_functions *egi_row_functions_of(eg_dtype dtype);

#endif
