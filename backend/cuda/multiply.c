/* One product through cuBLASLt. Its matrices are column-major: a row-major C is the transpose of a column-major one, so
 * that C' = B'·A' is computed. The algorithm is the first that the library's heuristic gives for the sizes, with the
 * workspace of the stream and without reductions in place, whose order is not fixed. */
#include "backend/cuda/matmul.h"

bool egi_cuda_is_dense(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  bool is_row_major = (column_stride == 1 || columns == 1) && (row_stride >= columns || rows == 1);
  bool is_column_major = (row_stride == 1 || rows == 1) && (column_stride >= rows || columns == 1);
  return is_row_major || is_column_major;
}

static cudaDataType_t type_of(eg_dtype dtype) {
  return dtype == EG_DTYPE_BF16 ? CUDA_R_16BF : dtype == EG_DTYPE_F16 ? CUDA_R_16F : CUDA_R_32F;
}

/* What is made for a call and goes after it. */
typedef struct descriptors {
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t left, right, addend, result; /* in column-major order: left is B' */
  cublasLtMatmulPreference_t preference;
} descriptors;

static void destroy(const descriptors *d) {
  if (d->preference != NULL) (void)cublasLtMatmulPreferenceDestroy(d->preference);
  if (d->result != NULL) (void)cublasLtMatrixLayoutDestroy(d->result);
  if (d->addend != NULL) (void)cublasLtMatrixLayoutDestroy(d->addend);
  if (d->right != NULL) (void)cublasLtMatrixLayoutDestroy(d->right);
  if (d->left != NULL) (void)cublasLtMatrixLayoutDestroy(d->left);
  if (d->operation != NULL) (void)cublasLtMatmulDescDestroy(d->operation);
}

/* The matrix [rows, columns] seen column-major, as it lies or as its transpose. */
typedef struct view {
  uint64_t rows, columns;
  int64_t leading;
  bool is_transposed; /* of what is wanted: columns of the transpose lie side by side */
} view;

/* `rows` x `columns` of a matrix whose transpose the library is to have. */
static view transpose_of(const egi_cuda_matrices *x, int64_t rows, int64_t columns) {
  bool is_row_major = (x->column_stride == 1 || columns == 1) && (x->row_stride >= columns || rows == 1);
  view out = {(uint64_t)columns, (uint64_t)rows, x->row_stride, false};
  if (!is_row_major) out = (view){(uint64_t)rows, (uint64_t)columns, x->column_stride, true};
  if (out.leading < (int64_t)out.rows) out.leading = (int64_t)out.rows; /* one column: no step is taken */
  return out;
}

static eg_status make_layout(eg_context *ctx, const egi_cuda_matrices *x, const view *v, int64_t n_batches,
                             cublasLtMatrixLayout_t *out) {
  EGI_CUDA_TRY_LT(ctx, cublasLtMatrixLayoutCreate(out, type_of(x->dtype), v->rows, v->columns, v->leading));
  if (n_batches == 1) return EG_OK;
  int32_t count = (int32_t)n_batches;
  EGI_CUDA_TRY_LT(ctx,
                  cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
  EGI_CUDA_TRY_LT(ctx, cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                        &x->batch_stride, sizeof x->batch_stride));
  return EG_OK;
}

static eg_status make_operation(eg_context *ctx, const egi_cuda_product *p, const view *left, const view *right,
                                cublasLtMatmulDesc_t *out) {
  cublasOperation_t of_left = left->is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  cublasOperation_t of_right = right->is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  EGI_CUDA_TRY_LT(ctx, cublasLtMatmulDescCreate(out, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  EGI_CUDA_TRY_LT(ctx, cublasLtMatmulDescSetAttribute(*out, CUBLASLT_MATMUL_DESC_TRANSA, &of_left, sizeof of_left));
  EGI_CUDA_TRY_LT(ctx, cublasLtMatmulDescSetAttribute(*out, CUBLASLT_MATMUL_DESC_TRANSB, &of_right, sizeof of_right));
  if (p->bias == NULL) return EG_OK;
  cudaDataType_t type = type_of(p->c.dtype);
  EGI_CUDA_TRY_LT(ctx, cublasLtMatmulDescSetAttribute(*out, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
  EGI_CUDA_TRY_LT(ctx,
                  cublasLtMatmulDescSetAttribute(*out, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias, sizeof p->bias));
  EGI_CUDA_TRY_LT(ctx, cublasLtMatmulDescSetAttribute(*out, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type));
  return EG_OK;
}

/* Bytes that the address and the steps of a matrix are multiples of, at most 16. */
static uint32_t alignment_of(const egi_cuda_matrices *x, const view *v, int64_t n_batches) {
  uint64_t bytes = x->dtype == EG_DTYPE_F32 ? 4 : 2, bits = (uint64_t)(uintptr_t)x->data | (uint64_t)v->leading * bytes;
  uint32_t alignment = 16;
  if (n_batches > 1) bits |= (uint64_t)x->batch_stride * bytes;
  while (alignment > 1 && bits % alignment != 0) alignment /= 2;
  return alignment;
}

static eg_status make_preference(eg_context *ctx, const egi_cuda_stream *stream, const uint32_t alignments[4],
                                 cublasLtMatmulPreference_t *out) {
  static const cublasLtMatmulPreferenceAttributes_t names[4] = {
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
  uint64_t workspace = stream->lt_workspace_bytes;
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  EGI_CUDA_TRY_LT(ctx, cublasLtMatmulPreferenceCreate(out));
  EGI_CUDA_TRY_LT(ctx, cublasLtMatmulPreferenceSetAttribute(*out, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                            sizeof workspace));
  EGI_CUDA_TRY_LT(ctx, cublasLtMatmulPreferenceSetAttribute(*out, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                            &reductions, sizeof reductions));
  for (int i = 0; i < 4; i++)
    EGI_CUDA_TRY_LT(ctx, cublasLtMatmulPreferenceSetAttribute(*out, names[i], &alignments[i], sizeof alignments[i]));
  return EG_OK;
}

static eg_status launch(eg_context *ctx, const egi_cuda_product *p, const egi_cuda_stream *stream,
                        const descriptors *d) {
  cublasLtMatmulHeuristicResult_t found;
  int n_found = 0;
  const egi_cuda_matrices *addend = p->addend.data != NULL ? &p->addend : &p->c;
  float beta = p->addend.data != NULL ? p->beta : 0.0f;
  EGI_CUDA_TRY_LT(ctx, cublasLtMatmulAlgoGetHeuristic(stream->lt, d->operation, d->left, d->right, d->addend, d->result,
                                                      d->preference, 1, &found, &n_found));
  if (n_found == 0)
    return egi_fail(ctx, EG_ERROR_DEVICE, "cuBLASLt has no algorithm for a product of %lld x %lld x %lld",
                    (long long)p->m, (long long)p->n, (long long)p->k);
  EGI_CUDA_TRY_LT(ctx, cublasLtMatmul(stream->lt, d->operation, &p->alpha, p->b.data, d->left, p->a.data, d->right,
                                      &beta, addend->data, d->addend, p->c.data, d->result, &found.algo,
                                      stream->lt_workspace, stream->lt_workspace_bytes, stream->stream));
  return EG_OK;
}

static eg_status describe(eg_context *ctx, const egi_cuda_product *p, const egi_cuda_stream *stream, descriptors *d) {
  view left = transpose_of(&p->b, p->k, p->n), right = transpose_of(&p->a, p->m, p->k);
  view result = transpose_of(&p->c, p->m, p->n), addend = result;
  const egi_cuda_matrices *term = p->addend.data != NULL ? &p->addend : &p->c;
  addend = transpose_of(term, p->m, p->n);
  const uint32_t alignments[4] = {alignment_of(&p->b, &left, p->n_batches), alignment_of(&p->a, &right, p->n_batches),
                                  alignment_of(term, &addend, p->n_batches),
                                  alignment_of(&p->c, &result, p->n_batches)};
  EG_TRY(make_operation(ctx, p, &left, &right, &d->operation));
  EG_TRY(make_layout(ctx, &p->b, &left, p->n_batches, &d->left));
  EG_TRY(make_layout(ctx, &p->a, &right, p->n_batches, &d->right));
  EG_TRY(make_layout(ctx, term, &addend, p->n_batches, &d->addend));
  EG_TRY(make_layout(ctx, &p->c, &result, p->n_batches, &d->result));
  return make_preference(ctx, stream, alignments, &d->preference);
}

eg_status egi_cuda_multiply(eg_context *ctx, const egi_cuda_product *product, const egi_cuda_stream *stream) {
  descriptors d = {.operation = NULL};
  eg_status status = describe(ctx, product, stream, &d);
  if (status == EG_OK) status = launch(ctx, product, stream, &d);
  destroy(&d);
  return status;
}
