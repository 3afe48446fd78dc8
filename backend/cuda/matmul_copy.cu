/* Copies of matrices that cuBLASLt does not take as they lie, and a plain product for what it does not take at all:
 * integers, float64, no columns to sum over. A sum goes over k in order, in the accumulator of its type. */
#include "backend/cuda/matmul.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int n_threads = 256;

__device__ int64_t offset_of(const egi_cuda_operand &x, const egi_cuda_batches &batches, int64_t batch) {
  int64_t offset = 0;
  for (int i = batches.rank - 1; i >= 0; i--) {
    offset += batch % batches.dims[i] * x.batch_strides[i];
    batch /= batches.dims[i];
  }
  return offset;
}

__device__ float load_float(const egi_cuda_operand &x, int64_t at) {
  switch (x.dtype) {
  case EG_DTYPE_BF16:
    return __bfloat162float(static_cast<const __nv_bfloat16 *>(x.data)[at]);
  case EG_DTYPE_F16:
    return __half2float(static_cast<const __half *>(x.data)[at]);
  default:
    return static_cast<const float *>(x.data)[at];
  }
}

__device__ void store_float(const egi_cuda_operand &x, int64_t at, float value) {
  switch (x.dtype) {
  case EG_DTYPE_BF16:
    static_cast<__nv_bfloat16 *>(x.data)[at] = __float2bfloat16_rn(value);
    break;
  case EG_DTYPE_F16:
    static_cast<__half *>(x.data)[at] = __float2half_rn(value);
    break;
  default:
    static_cast<float *>(x.data)[at] = value;
  }
}

struct copying {
  egi_cuda_operand source, target;
  egi_cuda_batches batches;
  int64_t rows, columns;
  bool is_by_columns; /* neighbours in a warp are in one column of the target */
};

/* An element in the accumulator's type. */
template <class Sum> __device__ Sum load(const egi_cuda_operand &x, int64_t at) {
  switch (x.dtype) {
  case EG_DTYPE_F64:
    return Sum(static_cast<const double *>(x.data)[at]);
  case EG_DTYPE_I32:
    return Sum(static_cast<const int32_t *>(x.data)[at]);
  case EG_DTYPE_U32:
    return Sum(static_cast<const uint32_t *>(x.data)[at]);
  case EG_DTYPE_I64:
  case EG_DTYPE_U64:
    return Sum(static_cast<const int64_t *>(x.data)[at]);
  default:
    return Sum(load_float(x, at));
  }
}

template <class Sum> __device__ void store(const egi_cuda_operand &x, int64_t at, Sum value) {
  switch (x.dtype) {
  case EG_DTYPE_F64:
    static_cast<double *>(x.data)[at] = double(value);
    break;
  case EG_DTYPE_I32:
  case EG_DTYPE_U32:
    static_cast<int32_t *>(x.data)[at] = int32_t(value);
    break;
  case EG_DTYPE_I64:
  case EG_DTYPE_U64:
    static_cast<int64_t *>(x.data)[at] = int64_t(value);
    break;
  default:
    store_float(x, at, float(value));
  }
}

__global__ void copy_kernel(copying c) {
  int64_t count = c.batches.count * c.rows * c.columns;
  for (int64_t i = blockIdx.x * int64_t(n_threads) + threadIdx.x; i < count; i += int64_t(gridDim.x) * n_threads) {
    int64_t batch = i / (c.rows * c.columns), rest = i % (c.rows * c.columns);
    int64_t row = c.is_by_columns ? rest % c.rows : rest / c.columns;
    int64_t column = c.is_by_columns ? rest / c.rows : rest % c.columns;
    int64_t from = offset_of(c.source, c.batches, batch) + row * c.source.row_stride + column * c.source.column_stride;
    int64_t to = offset_of(c.target, c.batches, batch) + row * c.target.row_stride + column * c.target.column_stride;
    if (c.target.dtype == EG_DTYPE_F64)
      store(c.target, to, load<double>(c.source, from));
    else
      store_float(c.target, to, load_float(c.source, from));
  }
}

template <class Sum> __global__ void product_kernel(egi_cuda_plain_product p) {
  int64_t count = p.batches.count * p.m * p.n;
  for (int64_t i = blockIdx.x * int64_t(n_threads) + threadIdx.x; i < count; i += int64_t(gridDim.x) * n_threads) {
    int64_t batch = i / (p.m * p.n), row = i / p.n % p.m, column = i % p.n;
    int64_t a = offset_of(p.a, p.batches, batch) + row * p.a.row_stride;
    int64_t b = offset_of(p.b, p.batches, batch) + column * p.b.column_stride;
    int64_t c = offset_of(p.c, p.batches, batch) + row * p.c.row_stride + column * p.c.column_stride;
    Sum sum = 0;
    for (int64_t j = 0; j < p.k; j++)
      sum += load<Sum>(p.a, a + j * p.a.column_stride) * load<Sum>(p.b, b + j * p.b.row_stride);
    Sum value = Sum(p.alpha) * sum;
    if (p.addend.data != nullptr) {
      int64_t at = offset_of(p.addend, p.batches, batch) + row * p.addend.row_stride + column * p.addend.column_stride;
      value += Sum(p.beta) * load<Sum>(p.addend, at);
    }
    store<Sum>(p.c, c, value);
  }
}

unsigned block_count(int64_t count, const egi_cuda_stream *stream) {
  int64_t blocks = (count + n_threads - 1) / n_threads, most = int64_t(stream->n_multiprocessors) * 16;
  return static_cast<unsigned>(blocks < most ? blocks : most);
}

} // namespace

extern "C" eg_status egi_cuda_copy_matrices(eg_context *ctx, const egi_cuda_operand operands[2],
                                            const egi_cuda_batches *batches, const int64_t size[2],
                                            const egi_cuda_stream *stream) {
  copying c = {operands[0], operands[1], *batches,
               size[0],     size[1],     operands[1].column_stride > operands[1].row_stride};
  int64_t count = batches->count * size[0] * size[1];
  if (count == 0) return EG_OK;
  copy_kernel<<<block_count(count, stream), n_threads, 0, stream->stream>>>(c);
  return egi_cuda_launched(ctx, "copy_matrices");
}

extern "C" eg_status egi_cuda_multiply_plainly(eg_context *ctx, const egi_cuda_plain_product *product,
                                               const egi_cuda_stream *stream) {
  int64_t count = product->batches.count * product->m * product->n;
  if (count == 0) return EG_OK;
  unsigned blocks = block_count(count, stream);
  switch (product->c.dtype) {
  case EG_DTYPE_F64:
    product_kernel<double><<<blocks, n_threads, 0, stream->stream>>>(*product);
    break;
  case EG_DTYPE_I32:
  case EG_DTYPE_U32:
  case EG_DTYPE_I64:
  case EG_DTYPE_U64: /* modulo 2^64, as unsigned numbers */
    product_kernel<unsigned long long><<<blocks, n_threads, 0, stream->stream>>>(*product);
    break;
  default:
    product_kernel<float><<<blocks, n_threads, 0, stream->stream>>>(*product);
  }
  return egi_cuda_launched(ctx, "plain_product");
}
