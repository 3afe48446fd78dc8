/* Codes of 2, 4 or 8 bits to floats: (code - zero) · scale, or levels[code] · scale, each operation rounded to f32 as
 * on the CPU, then to the type of the result. A thread makes eight neighbours of a row. Where they lie side by side in
 * whole words, their codes are read and their values written at once, and where blocks are multiples of eight they
 * share a scale; the flat 4-bit form has a kernel of its own for that. */
#include "backend/cuda/dequantise.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int n_threads = 256;
constexpr int n_elements = 8;

struct decoding {
  egi_quantised matrix;
  egi_cuda_window window;
  float levels[16];
  void *out;
  eg_dtype dtype;
  bool is_even;   /* eights lie in whole words of codes, and results are whole rows of eights */
  bool is_shared; /* an eight has one scale and zero point */
  egi_cuda_fault *fault;
};

__device__ unsigned code_at(const void *codes, unsigned bits, int64_t index) {
  unsigned per_byte = 8 / bits, place = unsigned(index % per_byte);
  return unsigned(static_cast<const uint8_t *>(codes)[index / per_byte]) >> (place * bits) & ((1u << bits) - 1u);
}

__device__ float number_of(unsigned code, const egi_quantised &m) {
  int value = int(code);
  if (m.is_signed && code >> (m.bits - 1) != 0) value -= 1 << m.bits;
  return float(value);
}

__device__ float float_at(const void *data, eg_dtype dtype, int64_t index) {
  switch (dtype) {
  case EG_DTYPE_F16:
    return __half2float(static_cast<const __half *>(data)[index]);
  case EG_DTYPE_BF16:
    return __bfloat162float(static_cast<const __nv_bfloat16 *>(data)[index]);
  case EG_DTYPE_F64:
    return float(static_cast<const double *>(data)[index]);
  default:
    return static_cast<const float *>(data)[index];
  }
}

/* Scale of block `index` of the flat form; base/blockwise.h says how nested ones lie. */
__device__ float flat_scale(const egi_quantised &m, int64_t index) {
  if (m.nested == nullptr) return float_at(m.scales, m.scale_dtype, index);
  float step = m.nested[1 + static_cast<const uint8_t *>(m.scales)[index]];
  return __fadd_rn(__fmul_rn(step, m.nested[EGI_NESTED_HEADER + index / EGI_NESTED_BLOCK]), m.nested[0]);
}

/* Most divisors are 1, or more than what is divided: blocks of a row, or of a whole column. */
__device__ int64_t divide(int64_t a, int64_t b) {
  if (b == 1) return a;
  return a < b ? 0 : a / b;
}

/* What stands between a code and its value. */
struct affine {
  float scale, zero;
};

__device__ affine affine_at(const decoding &d, int64_t row, int64_t column) {
  const egi_quantised &m = d.matrix;
  if (m.flat_block > 0) return {flat_scale(m, (row * m.code_row_stride + column) / m.flat_block), 0.0f};
  int64_t r = divide(row, m.block_rows), c = divide(column, m.block_columns);
  if (m.group_index != nullptr) {
    c = m.group_index[column];
    if (c < 0 || c >= m.scale_row_stride) {
      egi_cuda_raise(d.fault, EGI_CUDA_FAULT_INDEX, EGI_OP_Linear, c);
      return {0.0f, 0.0f};
    }
  }
  affine out = {float_at(m.scales, m.scale_dtype, r * m.scale_row_stride + c * m.scale_column_stride), m.zero};
  int64_t at = r * m.zero_row_stride + c * m.zero_column_stride;
  if (m.zero_kind == EGI_ZERO_CODES) out.zero = number_of(code_at(m.zeros, m.bits, at), m);
  if (m.zero_kind == EGI_ZERO_FLOATS) out.zero = float_at(m.zeros, m.zero_dtype, at);
  return out;
}

__device__ float value_of(const decoding &d, unsigned code, affine by) {
  if (d.matrix.flat_block > 0) return __fmul_rn(d.levels[code], by.scale);
  return __fmul_rn(__fsub_rn(number_of(code, d.matrix), by.zero), by.scale);
}

__device__ unsigned stored_code(const egi_quantised &m, int64_t index) {
  if (m.flat_block == 0) return code_at(m.codes, m.bits, index);
  unsigned byte = m.codes[index / 2];
  return index % 2 == 0 ? byte >> 4 : byte & 15u;
}

__device__ void store(void *out, eg_dtype dtype, int64_t at, float value) {
  if (dtype == EG_DTYPE_BF16)
    static_cast<__nv_bfloat16 *>(out)[at] = __float2bfloat16_rn(value);
  else if (dtype == EG_DTYPE_F16)
    static_cast<__half *>(out)[at] = __float2half_rn(value);
  else
    static_cast<float *>(out)[at] = value;
}

/* Eight values as 16 bytes of 16-bit floats, or twice 16 of f32. */
__device__ void store_eight(void *out, eg_dtype dtype, int64_t at, const float (&values)[n_elements]) {
  if (dtype == EG_DTYPE_F32) {
    float4 *target = reinterpret_cast<float4 *>(static_cast<float *>(out) + at);
    target[0] = make_float4(values[0], values[1], values[2], values[3]);
    target[1] = make_float4(values[4], values[5], values[6], values[7]);
    return;
  }
  uint32_t words[4];
  for (int i = 0; i < 4; i++) {
    if (dtype == EG_DTYPE_BF16) {
      __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      words[i] = *reinterpret_cast<uint32_t *>(&pair);
    } else {
      __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      words[i] = *reinterpret_cast<uint32_t *>(&pair);
    }
  }
  *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(out) + at) = make_uint4(words[0], words[1], words[2], words[3]);
}

/* Eight codes of a row whose first is the first of a word, the lowest bits first. */
__device__ uint64_t eight_codes(const egi_quantised &m, int64_t index) {
  const uint8_t *at = m.codes + index / 8 * m.bits;
  if (m.bits == 8) return *reinterpret_cast<const uint64_t *>(at);
  if (m.bits == 4) return *reinterpret_cast<const uint32_t *>(at);
  return *reinterpret_cast<const uint16_t *>(at);
}

__global__ void decode_kernel(decoding d) {
  const egi_quantised &m = d.matrix;
  int64_t per_row = (d.window.n_columns + n_elements - 1) / n_elements, n_steps = d.window.n_rows * per_row;
  for (int64_t i = blockIdx.x * int64_t(n_threads) + threadIdx.x; i < n_steps; i += int64_t(gridDim.x) * n_threads) {
    int64_t row = i / per_row, first = i % per_row * n_elements, at = row * d.window.n_columns + first;
    int64_t from = row + d.window.row, column = first + d.window.column, index = from * m.code_row_stride + column;
    if (!d.is_even) {
      for (int k = 0; k < n_elements && first + k < d.window.n_columns; k++)
        store(d.out, d.dtype, at + k, value_of(d, stored_code(m, index + k), affine_at(d, from, column + k)));
      continue;
    }
    uint64_t codes = eight_codes(m, index);
    affine by = affine_at(d, from, column);
    float values[n_elements];
    for (int k = 0; k < n_elements; k++) {
      if (k > 0 && !d.is_shared) by = affine_at(d, from, column + k);
      values[k] = value_of(d, unsigned(codes >> (unsigned(k) * m.bits)) & ((1u << m.bits) - 1u), by);
    }
    store_eight(d.out, d.dtype, at, values);
  }
}

__global__ void decode_flat_kernel(decoding d) {
  __shared__ float levels[16];
  if (threadIdx.x < 16) levels[threadIdx.x] = d.levels[threadIdx.x];
  __syncthreads();
  int64_t n_steps = d.window.n_rows * d.window.n_columns / n_elements;
  int64_t skipped = d.window.row * d.matrix.columns / n_elements;
  const uint32_t *codes = reinterpret_cast<const uint32_t *>(d.matrix.codes) + skipped;
  for (int64_t i = blockIdx.x * int64_t(n_threads) + threadIdx.x; i < n_steps; i += int64_t(gridDim.x) * n_threads) {
    uint32_t word = codes[i];
    float scale = flat_scale(d.matrix, (i + skipped) * n_elements / d.matrix.flat_block), values[n_elements];
    for (int k = 0; k < 4; k++) {
      unsigned byte = word >> (8 * k) & 255u;
      values[2 * k] = __fmul_rn(levels[byte >> 4], scale);
      values[2 * k + 1] = __fmul_rn(levels[byte & 15u], scale);
    }
    store_eight(d.out, d.dtype, i * n_elements, values);
  }
}

struct packing {
  const void *source;
  void *target;
  int rank;
  int64_t count, dims[EGI_MAX_RANK], strides[EGI_MAX_RANK];
  size_t bytes;
};

__global__ void pack_kernel(packing p) {
  for (int64_t i = blockIdx.x * int64_t(n_threads) + threadIdx.x; i < p.count; i += int64_t(gridDim.x) * n_threads) {
    int64_t rest = i, at = 0;
    for (int d = p.rank - 1; d >= 0; d--) {
      at += rest % p.dims[d] * p.strides[d];
      rest /= p.dims[d];
    }
    for (size_t k = 0; k < p.bytes; k++)
      static_cast<uint8_t *>(p.target)[size_t(i) * p.bytes + k] =
          static_cast<const uint8_t *>(p.source)[at * int64_t(p.bytes) + int64_t(k)];
  }
}

unsigned block_count(int64_t n_steps, const egi_cuda_stream *stream) {
  int64_t blocks = (n_steps + n_threads - 1) / n_threads, most = int64_t(stream->n_multiprocessors) * 32;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

/* The operand's bytes in order; a copy where they are not. */
eg_status packed_data(eg_context *ctx, const egi_quantised_weight *weight, unsigned index, const egi_kernel_call *call,
                      char *copies, const void **out_data) {
  unsigned input = weight->inputs[index];
  *out_data = nullptr;
  if (input == EGI_NO_INPUT || !egi_call_has_input(call, input)) return EG_OK;
  const egi_tensor *tensor = &call->inputs[input];
  *out_data = tensor->data;
  if (weight->copy_offset[index] == 0) return EG_OK;
  packing p = {tensor->data, copies + weight->copy_offset[index], tensor->rank, egi_tensor_count(tensor), {},
               {},           egi_element_bytes(tensor->dtype)};
  for (int d = 0; d < tensor->rank; d++) p.dims[d] = tensor->dims[d], p.strides[d] = tensor->strides[d];
  *out_data = p.target;
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  pack_kernel<<<block_count(p.count, stream), n_threads, 0, stream->stream>>>(p);
  return egi_cuda_launched(ctx, "pack");
}

} // namespace

extern "C" eg_status egi_cuda_quantised_open(eg_context *ctx, const egi_quantised_weight *weight,
                                             const egi_kernel_call *call, char *copies, egi_quantised *out_matrix) {
  const void *data[EGI_LINEAR_INPUTS] = {nullptr};
  egi_quantised q = weight->matrix;
  for (unsigned i = EGI_LINEAR_WEIGHT; i < EGI_LINEAR_INPUTS; i++)
    if (i != EGI_LINEAR_BIAS) EG_TRY(packed_data(ctx, weight, i, call, copies, &data[i]));
  q.codes = static_cast<const uint8_t *>(data[EGI_LINEAR_WEIGHT]);
  q.scales = data[EGI_LINEAR_SCALES];
  q.nested = static_cast<const float *>(data[EGI_LINEAR_NESTED]);
  q.zeros = data[EGI_LINEAR_ZERO_POINTS];
  q.group_index = static_cast<const int32_t *>(data[EGI_LINEAR_GROUP_INDEX]);
  *out_matrix = q;
  return EG_OK;
}

/* Whether the flat kernel takes it: whole rows, eights that neither blocks nor words cut. */
static bool is_flat(const decoding &d) {
  const egi_quantised &m = d.matrix;
  return m.flat_block > 0 && m.flat_block % n_elements == 0 && d.window.n_columns == m.columns &&
         d.window.row * m.columns % n_elements == 0 && d.window.n_rows * m.columns % n_elements == 0 &&
         reinterpret_cast<uintptr_t>(m.codes) % sizeof(uint32_t) == 0;
}

static void choose_loops(decoding *d) {
  const egi_quantised &m = d->matrix;
  d->is_even = m.flat_block == 0 && d->window.n_columns % n_elements == 0 && d->window.column % n_elements == 0 &&
               m.code_row_stride % n_elements == 0 && reinterpret_cast<uintptr_t>(m.codes) % m.bits == 0;
  d->is_shared = m.group_index == nullptr && m.block_columns % n_elements == 0;
}

extern "C" eg_status egi_cuda_dequantise(eg_context *ctx, const egi_quantised *matrix, const egi_cuda_window *window,
                                         void *out, eg_dtype dtype, const egi_cuda_stream *stream) {
  decoding d = {*matrix, *window, {}, out, dtype, false, false, stream->fault};
  int64_t count = window->n_rows * window->n_columns;
  if (count == 0) return EG_OK;
  if (matrix->has_levels) memcpy(d.levels, egi_four_bit_levels(matrix->levels), sizeof d.levels);
  choose_loops(&d);
  int64_t n_steps =
      is_flat(d) ? count / n_elements : window->n_rows * ((window->n_columns + n_elements - 1) / n_elements);
  unsigned blocks = block_count(n_steps, stream);
  if (is_flat(d))
    decode_flat_kernel<<<blocks, n_threads, 0, stream->stream>>>(d);
  else
    decode_kernel<<<blocks, n_threads, 0, stream->stream>>>(d);
  return egi_cuda_launched(ctx, "dequantise");
}
