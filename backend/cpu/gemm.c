/* Matrix products of one thread on the kernels of isa/gemm.c. f16 and bf16 operands are converted in blocks of BLOCK_K
 * products to scratch. Sums are in C's type (in f64 for products of one or two rows), in an order that depends on
 * sizes, types and strides alone. A BLAS is not used: libraries built for one thread share buffers between the threads
 * that call them. */
#include "backend/cpu/cpu.h"

#define BLOCK_K 256
#define FEW_ROWS 2
#define THIN 32

size_t egi_product_scratch(int64_t m, int64_t n) {
  return EGI_GEMM_SCRATCH_BYTES + (size_t)(m + n + 16) * BLOCK_K * sizeof(double);
}

void *egi_matrix_at(const egi_matrix *matrix, int64_t row, int64_t column) {
  int64_t offset = row * matrix->row_stride + column * matrix->column_stride;
  return (char *)matrix->data + offset * (int64_t)egi_element_bytes(matrix->dtype);
}

egi_matrix egi_matrix_part(const egi_matrix *matrix, int64_t row, int64_t column) {
  egi_matrix part = *matrix;
  part.data = egi_matrix_at(matrix, row, column);
  return part;
}

static bool is_narrow(eg_dtype dtype) {
  return dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

/* n elements `stride` apart to contiguous ones, narrow types to f32. */
static void copy_line(const egi_isa *isa, void *out, const void *in, eg_dtype dtype, int64_t stride, int64_t n) {
  size_t bytes = egi_element_bytes(dtype);
  if (is_narrow(dtype)) {
    const uint16_t *bits = in;
    float *values = out;
    bool is_half = dtype == EG_DTYPE_F16;
    if (stride == 1) {
      (is_half ? isa->elementwise->f16_to_f32 : isa->elementwise->bf16_to_f32)(values, bits, n);
      return;
    }
    for (int64_t i = 0; i < n; i++)
      values[i] = is_half ? egi_f16_to_f32(bits[i * stride]) : egi_bf16_to_f32(bits[i * stride]);
  } else if (stride == 1) {
    memcpy(out, in, (size_t)n * bytes);
  } else if (bytes == 4) {
    for (int64_t i = 0; i < n; i++) ((uint32_t *)out)[i] = ((const uint32_t *)in)[i * stride];
  } else {
    for (int64_t i = 0; i < n; i++) ((uint64_t *)out)[i] = ((const uint64_t *)in)[i * stride];
  }
}

static eg_dtype wide_dtype(eg_dtype dtype) {
  return is_narrow(dtype) ? EG_DTYPE_F32 : dtype;
}

void egi_matrix_copy(const egi_isa *isa, const egi_matrix *matrix, const int64_t size[2], void *out,
                     int64_t out_stride) {
  size_t bytes = egi_element_bytes(wide_dtype(matrix->dtype));
  for (int64_t row = 0; row < size[0]; row++)
    copy_line(isa, (char *)out + (size_t)(row * out_stride) * bytes, egi_matrix_at(matrix, row, 0), matrix->dtype,
              matrix->column_stride, size[1]);
}

/* A copy with unit stride in the dim that has it in the source, rows first when neither has. */
static egi_matrix copy_block(const egi_isa *isa, const egi_matrix *matrix, int64_t rows, int64_t columns, void *out) {
  egi_matrix copy = {out, wide_dtype(matrix->dtype), columns, 1};
  if (matrix->row_stride == 1 && matrix->column_stride != 1) {
    egi_matrix transposed = {matrix->data, matrix->dtype, matrix->column_stride, matrix->row_stride};
    copy.row_stride = 1;
    copy.column_stride = rows;
    egi_matrix_copy(isa, &transposed, (const int64_t[2]){columns, rows}, out, rows);
  } else {
    egi_matrix_copy(isa, matrix, (const int64_t[2]){rows, columns}, out, columns);
  }
  return copy;
}

/* Few rows against a B whose columns are contiguous: dot products, without packing B. */
static bool run_dots(const egi_product *p) {
  const egi_row_functions *functions = egi_row_functions_of(p->c.dtype);
  if (!functions || p->m > FEW_ROWS || p->a.column_stride != 1 || p->b.row_stride != 1) return false;
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t j = 0; j < p->n; j++) {
      void *at = egi_matrix_at(&p->c, i, j);
      double sum = p->alpha * functions->dot(egi_matrix_at(&p->a, i, 0), egi_matrix_at(&p->b, 0, j), p->k);
      egi_real_set(at, p->c.dtype, p->beta == 0 ? sum : sum + p->beta * egi_real_get(at, p->c.dtype));
    }
  return true;
}

static void run_product(const egi_isa *isa, const egi_product *p, void *scratch) {
  if (run_dots(p)) return;
  egi_gemm gemm = {p->m,
                   p->n,
                   p->k,
                   p->a.data,
                   p->b.data,
                   p->c.data,
                   p->a.row_stride,
                   p->a.column_stride,
                   p->b.row_stride,
                   p->b.column_stride,
                   p->c.row_stride,
                   p->c.column_stride,
                   p->alpha,
                   p->beta};
  switch (p->c.dtype) {
  case EG_DTYPE_F32:
    isa->gemm->f32(&gemm, scratch);
    break;
  case EG_DTYPE_F64:
    isa->gemm->f64(&gemm, scratch);
    break;
  case EG_DTYPE_I32:
  case EG_DTYPE_U32:
    isa->gemm->u32(&gemm, scratch);
    break;
  default:
    isa->gemm->u64(&gemm, scratch);
    break;
  }
}

/* The same product with C's rows and columns exchanged: C' = B'·A'. */
static egi_product transpose_product(const egi_product *p) {
  egi_product t = {p->n, p->m, p->k, p->b, p->a, p->c, p->alpha, p->beta};
  egi_matrix *const matrices[3] = {&t.a, &t.b, &t.c};
  for (int i = 0; i < 3; i++) {
    int64_t row_stride = matrices[i]->row_stride;
    matrices[i]->row_stride = matrices[i]->column_stride;
    matrices[i]->column_stride = row_stride;
  }
  return t;
}

/* C along its contiguous dim; one or two columns as dot products; a thin B against an A that would have to be packed
 * (gradients of adapters) with A in B's place, where it is read as it lies. */
static bool is_better_transposed(const egi_product *p) {
  bool is_column_major = p->c.column_stride != 1 && p->n != 1 && (p->c.row_stride == 1 || p->m == 1);
  bool is_vector = p->n <= FEW_ROWS && p->m > FEW_ROWS;
  bool is_thin = p->n <= THIN && p->m > p->n && p->a.column_stride != 1 && p->a.row_stride == 1;
  return is_column_major || is_vector || (is_thin && p->c.row_stride != 1 && !is_narrow(p->a.dtype));
}

void egi_product_run(const egi_isa *isa, const egi_product *product, void *scratch) {
  egi_product p = *product;
  if (p.m == 0 || p.n == 0) return;
  if (is_better_transposed(&p)) p = transpose_product(&p);
  bool copies_a = is_narrow(p.a.dtype), copies_b = is_narrow(p.b.dtype);
  if (!copies_a && !copies_b) {
    run_product(isa, &p, scratch);
    return;
  }
  char *block_a = (char *)scratch + EGI_GEMM_SCRATCH_BYTES;
  char *block_b = block_a + (size_t)(p.m + 8) * BLOCK_K * sizeof(double);
  int64_t start = 0;
  do { /* once for k = 0 too: C is scaled */
    egi_product part = p;
    part.k = p.k - start < BLOCK_K ? p.k - start : BLOCK_K;
    part.a = egi_matrix_part(&p.a, 0, start);
    part.b = egi_matrix_part(&p.b, start, 0);
    if (copies_a) part.a = copy_block(isa, &part.a, p.m, part.k, block_a);
    if (copies_b) part.b = copy_block(isa, &part.b, part.k, p.n, block_b);
    if (start > 0) part.beta = 1.0;
    run_product(isa, &part, scratch);
    start += BLOCK_K;
  } while (start < p.k);
}
