/* Log-sum-exp over tiles of logits, and their gradient. A block takes a row: each thread keeps the largest logit and
 * the sum of exponentials of its own columns, a fixed tree joins the threads', and the tiles of a row follow each other
 * in f64, so that two runs give equal bits. */
#include "backend/cuda/element.cuh"
#include "backend/cuda/loss_linear.h"

namespace {

constexpr int n_threads = 256;
constexpr int n_elements = 4; /* a thread takes side by side */
constexpr int n_ahead = 4;    /* so many of these it reads at a time for a row's sum */
constexpr int bias_columns = 32, bias_rows = 8;
constexpr int64_t label_none = -100;

__device__ int64_t offset_of(const egi_cuda_row_numbers &x, int64_t row) {
  int64_t at = 0;
  for (int d = x.rank - 1; d >= 0; d--) {
    at += row % x.dims[d] * x.strides[d];
    row /= x.dims[d];
  }
  return at;
}

__device__ double read_real(const void *data, int64_t at, eg_dtype dtype) {
  switch (dtype) {
  case EG_DTYPE_F64:
    return static_cast<const double *>(data)[at];
  case EG_DTYPE_BF16:
    return double(egi::to_float(static_cast<const __nv_bfloat16 *>(data)[at]));
  case EG_DTYPE_F16:
    return double(egi::to_float(static_cast<const __half *>(data)[at]));
  default:
    return double(static_cast<const float *>(data)[at]);
  }
}

__device__ void write_real(void *data, int64_t at, eg_dtype dtype, double value) {
  switch (dtype) {
  case EG_DTYPE_F64:
    static_cast<double *>(data)[at] = value;
    break;
  case EG_DTYPE_BF16:
    static_cast<__nv_bfloat16 *>(data)[at] = __float2bfloat16_rn(float(value));
    break;
  case EG_DTYPE_F16:
    static_cast<__half *>(data)[at] = __float2half_rn(float(value));
    break;
  default:
    static_cast<float *>(data)[at] = float(value);
  }
}

__device__ double number_of(const egi_cuda_row_numbers &x, int64_t row) {
  return read_real(x.data, offset_of(x, row), x.dtype);
}

/* The label of a row, label_none where it cannot be one. */
__device__ int64_t label_of(const egi_cuda_logits &t, int64_t row) {
  int64_t label = static_cast<const int64_t *>(t.labels.data)[offset_of(t.labels, t.first_row + row)];
  return label >= 0 && label < t.n_classes ? label : label_none;
}

__device__ void check_label(const egi_cuda_logits &t, int64_t row, egi_cuda_fault *fault) {
  int64_t label = static_cast<const int64_t *>(t.labels.data)[offset_of(t.labels, t.first_row + row)];
  if (label != label_none && (label < 0 || label >= t.n_classes))
    egi_cuda_raise(fault, EGI_CUDA_FAULT_INDEX, t.op, label);
}

__device__ void load_elements(const float *line, int64_t at, float (&x)[n_elements]) {
  float4 four = *reinterpret_cast<const float4 *>(line + at);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
__device__ void load_elements(const double *line, int64_t at, double (&x)[n_elements]) {
  for (int i = 0; i < n_elements; i++) x[i] = line[at + i];
}

/* Logits from column `at` on; what lies behind the last one is -infinity. */
template <class T> __device__ void load_logits(const egi_cuda_logits &t, int64_t row, int64_t at, T (&x)[n_elements]) {
  if (at < t.columns) load_elements(static_cast<const T *>(t.data) + row * t.stride, at, x);
  for (int i = 0; i < n_elements; i++) {
    if (at + i >= t.columns)
      x[i] = T(-INFINITY);
    else if (t.bias != nullptr)
      x[i] += T(read_real(t.bias, (t.first_column + at + i) * t.bias_stride, t.bias_dtype));
  }
}

/* e^x for differences to the largest of a row: what rounding x · log2(e) loses is below an f32's step of the sum. */
__device__ float exponential(float x) {
  return exp2f(x * 1.4426950408889634f);
}
__device__ double exponential(double x) {
  return exp(x);
}

/* Numbers whose sum is `sum` · e^largest. */
template <class T> struct exponentials { T largest, sum; };

template <class T> __device__ exponentials<T> join(exponentials<T> a, exponentials<T> b) {
  T largest = a.largest > b.largest ? a.largest : b.largest;
  T of_a = a.largest == largest ? a.sum : a.sum * exponential(a.largest - largest);
  T of_b = b.largest == largest ? b.sum : b.sum * exponential(b.largest - largest);
  return {largest, of_a + of_b};
}

template <class T> __device__ exponentials<T> join_block(exponentials<T> own) {
  __shared__ exponentials<T> warps[n_threads / 32];
  for (int step = 16; step > 0; step /= 2) {
    exponentials<T> other = {__shfl_down_sync(~0u, own.largest, step), __shfl_down_sync(~0u, own.sum, step)};
    own = join(own, other);
  }
  __syncthreads(); /* the row before has been read */
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 1; i < n_threads / 32; i++) own = join(own, warps[i]);
  return own;
}

template <class T> __device__ exponentials<T> sum_row(const egi_cuda_logits &t, int64_t row) {
  constexpr int64_t step = n_threads * n_elements;
  exponentials<T> own = {T(-INFINITY), T(0)};
  for (int64_t at = int64_t(threadIdx.x) * n_elements; at < t.columns; at += n_ahead * step) {
    T x[n_ahead][n_elements], largest = own.largest;
#pragma unroll
    for (int k = 0; k < n_ahead; k++) load_logits(t, row, at + k * step, x[k]);
#pragma unroll
    for (int k = 0; k < n_ahead * n_elements; k++) {
      T one = x[k / n_elements][k % n_elements];
      largest = one > largest ? one : largest;
    }
    if (largest > own.largest) own.sum *= exponential(own.largest - largest);
    own.largest = largest;
#pragma unroll
    for (int k = 0; k < n_ahead * n_elements; k++) {
      T one = x[k / n_elements][k % n_elements];
      own.sum += one == T(-INFINITY) ? T(0) : exponential(one - largest);
    }
  }
  return join_block(own);
}

/* By the first thread: the row's numbers with this tile's. */
__device__ void add_tile(const egi_cuda_logits &t, int64_t row, int64_t label, exponentials<double> of_tile) {
  double *statistics = t.statistics + row * 3;
  exponentials<double> all = of_tile;
  if (!t.is_first) all = join({statistics[0], statistics[1]}, of_tile);
  int64_t column = label - t.first_column;
  double label_logit = t.is_first ? 0.0 : statistics[2];
  if (column >= 0 && column < t.columns) {
    label_logit = read_real(t.data, row * t.stride + column, t.dtype);
    if (t.bias != nullptr) label_logit += read_real(t.bias, label * t.bias_stride, t.bias_dtype);
  }
  statistics[0] = all.largest;
  statistics[1] = all.sum;
  statistics[2] = label_logit;
  if (!t.is_last) return;
  double lse = all.largest + log(all.sum);
  write_real(t.first.data, offset_of(t.first, t.first_row + row), t.first.dtype, label_logit - lse);
  write_real(t.second.data, offset_of(t.second, t.first_row + row), t.second.dtype, lse);
}

template <class T>
__global__ void __launch_bounds__(n_threads) statistics_kernel(egi_cuda_logits t, egi_cuda_fault *fault) {
  for (int64_t row = blockIdx.x; row < t.rows; row += gridDim.x) {
    int64_t label = label_of(t, row);
    if (t.is_first && threadIdx.x == 0) check_label(t, row, fault);
    if (label != label_none) {
      exponentials<T> sum = sum_row<T>(t, row);
      if (threadIdx.x == 0) add_tile(t, row, label, {double(sum.largest), double(sum.sum)});
    } else if (t.is_last && threadIdx.x == 0) {
      write_real(t.first.data, offset_of(t.first, t.first_row + row), t.first.dtype, 0.0);
      write_real(t.second.data, offset_of(t.second, t.first_row + row), t.second.dtype, 0.0);
    }
  }
}

__device__ void store_elements(float *line, int64_t at, const float (&x)[n_elements]) {
  *reinterpret_cast<float4 *>(line + at) = make_float4(x[0], x[1], x[2], x[3]);
}
__device__ void store_elements(double *line, int64_t at, const double (&x)[n_elements]) {
  for (int i = 0; i < n_elements; i++) line[at + i] = x[i];
}
template <class Narrow> __device__ void store_elements(Narrow *line, int64_t at, const float (&x)[n_elements]) {
  struct alignas(8) {
    Narrow values[n_elements];
  } four;
  for (int i = 0; i < n_elements; i++) four.values[i] = egi::from_float<Narrow>(x[i]);
  *reinterpret_cast<uint2 *>(line + at) = *reinterpret_cast<const uint2 *>(&four);
}

template <class T, class Out>
__global__ void __launch_bounds__(n_threads) gradient_kernel(egi_cuda_logits t, egi_cuda_fault *fault) {
  for (int64_t row = blockIdx.x; row < t.rows; row += gridDim.x) {
    int64_t label = label_of(t, row);
    if (t.is_first && threadIdx.x == 0) check_label(t, row, fault);
    Out *line = static_cast<Out *>(t.gradient) + row * t.stride;
    T lse = T(0), gradient = T(0);
    if (label != label_none) {
      lse = T(number_of(t.first, t.first_row + row));
      gradient = T(number_of(t.second, t.first_row + row));
    }
    for (int64_t at = int64_t(threadIdx.x) * n_elements; at < t.columns; at += n_threads * n_elements) {
      T x[n_elements] = {T(0), T(0), T(0), T(0)};
      if (label != label_none) {
        load_logits(t, row, at, x);
        for (int i = 0; i < n_elements; i++) {
          T one_hot = t.first_column + at + i == label ? T(1) : T(0);
          x[i] = gradient * (one_hot - exponential(x[i] - lse));
        }
      }
      store_elements(line, at, x);
    }
  }
}

/* A block sums 32 columns, eight rows at a time, each eighth in order, and the eighths in order. */
__global__ void __launch_bounds__(bias_columns *bias_rows)
    bias_kernel(egi_cuda_logits t, double *sums, void *out, int64_t out_stride, eg_dtype out_dtype) {
  __shared__ double parts[bias_rows][bias_columns];
  int64_t column = blockIdx.x * int64_t(bias_columns) + threadIdx.x;
  double sum = 0;
  for (int64_t row = threadIdx.y; row < t.rows && column < t.columns; row += bias_rows)
    sum += read_real(t.gradient, row * t.stride + column, t.gradient_dtype);
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= t.columns) return;
  for (int i = 1; i < bias_rows; i++) sum += parts[i][threadIdx.x];
  int64_t at = t.first_column + column;
  if (!t.is_first) sum += sums[at];
  sums[at] = sum;
  if (t.is_last) write_real(out, at * out_stride, out_dtype, sum);
}

unsigned block_count(int64_t rows, const egi_cuda_stream *stream) {
  int64_t most = int64_t(stream->n_multiprocessors) * 64;
  return static_cast<unsigned>(rows < most ? rows : most);
}

} // namespace

extern "C" eg_status egi_cuda_add_statistics(eg_context *ctx, const egi_cuda_logits *logits,
                                             const egi_cuda_stream *stream) {
  if (logits->rows == 0) return EG_OK;
  unsigned blocks = block_count(logits->rows, stream);
  if (logits->dtype == EG_DTYPE_F64)
    statistics_kernel<double><<<blocks, n_threads, 0, stream->stream>>>(*logits, stream->fault);
  else
    statistics_kernel<float><<<blocks, n_threads, 0, stream->stream>>>(*logits, stream->fault);
  return egi_cuda_launched(ctx, "loss_statistics");
}

extern "C" eg_status egi_cuda_make_logit_gradient(eg_context *ctx, const egi_cuda_logits *logits,
                                                  const egi_cuda_stream *stream) {
  if (logits->rows == 0) return EG_OK;
  unsigned blocks = block_count(logits->rows, stream);
  switch (logits->gradient_dtype) {
  case EG_DTYPE_F64:
    gradient_kernel<double, double><<<blocks, n_threads, 0, stream->stream>>>(*logits, stream->fault);
    break;
  case EG_DTYPE_BF16:
    gradient_kernel<float, __nv_bfloat16><<<blocks, n_threads, 0, stream->stream>>>(*logits, stream->fault);
    break;
  case EG_DTYPE_F16:
    gradient_kernel<float, __half><<<blocks, n_threads, 0, stream->stream>>>(*logits, stream->fault);
    break;
  default:
    gradient_kernel<float, float><<<blocks, n_threads, 0, stream->stream>>>(*logits, stream->fault);
  }
  return egi_cuda_launched(ctx, "loss_gradient");
}

extern "C" eg_status egi_cuda_add_bias_gradient(eg_context *ctx, const egi_cuda_logits *logits, double *sums,
                                                const egi_tensor *out, const egi_cuda_stream *stream) {
  if (logits->columns == 0) return EG_OK;
  unsigned blocks = static_cast<unsigned>((logits->columns + bias_columns - 1) / bias_columns);
  bias_kernel<<<blocks, dim3(bias_columns, bias_rows), 0, stream->stream>>>(*logits, sums, out->data, out->strides[0],
                                                                            out->dtype);
  return egi_cuda_launched(ctx, "loss_bias_gradient");
}
