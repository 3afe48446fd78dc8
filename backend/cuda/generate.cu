/* Weights that are made on the device: constants, normal numbers by Philox and Box-Muller (Box & Muller, 1958), and
 * 4-bit codes. All are bit for bit those of the host. Logarithm and cosine may differ from the host's in the last places
 * of a double; where that could change the float that it is rounded to, the host makes the number itself. */
#include "backend/cuda/device.h"

#include "backend/cuda/element.cuh"
#include "base/anywhere.h"

namespace egi {
namespace {

constexpr int N_THREADS = 256, N_DOUBTFUL = 1 << 16;

/* Elements whose float is not certain. */
struct doubtful {
  unsigned long long count;
  unsigned long long elements[N_DOUBTFUL];
};

/* A double lies within `margin` units in its last place of the middle between two floats, or below the normal ones:
 * 29 bits of its fraction are rounded away. The functions differ by less than 8 units (CUDA programming guide,
 * mathematical functions). */
__device__ bool is_doubtful(double x) {
  const int64_t half = int64_t(1) << 28, margin = 16;
  const int64_t rest = __double_as_longlong(x) & ((int64_t(1) << 29) - 1);
  const double magnitude = fabs(x);
  return (rest > half - margin && rest < half + margin) || (magnitude < 0x1p-126 && magnitude > 0.0);
}

__device__ double normal_number(const egi_generated &numbers, uint64_t index) {
  uint32_t words[4];
  egi_random_words(numbers.seed, numbers.stream, index, words);
  const double u = 1.0 - egi_random_unit(words[0], words[1]), v = egi_random_unit(words[2], words[3]);
  return __dmul_rn(sqrt(-2.0 * log(u)), cos(__dmul_rn(6.283185307179586, v)));
}

template <class Element>
__global__ void __launch_bounds__(N_THREADS) make_numbers(egi_generated numbers, Element *out, doubtful *list) {
  const uint64_t step = uint64_t(gridDim.x) * N_THREADS;
  for (uint64_t i = uint64_t(blockIdx.x) * N_THREADS + threadIdx.x; i < numbers.count; i += step) {
    double x = numbers.value;
    if (numbers.is_normal) {
      x = __dmul_rn(x, normal_number(numbers, numbers.first + i));
      if (is_doubtful(x)) {
        const unsigned long long place = atomicAdd(&list->count, 1ull);
        if (place < N_DOUBTFUL) list->elements[place] = i;
      }
    }
    out[i] = from_float<Element>(static_cast<float>(x));
  }
}

template <class Element>
__device__ float value_at(const void *values, int64_t i) {
  return to_float(static_cast<const Element *>(values)[i]);
}

/* A warp a block of values: the largest magnitude by bits, then two codes a byte. Products as on the host: with the
 * rounded reciprocal of the scale. */
template <class Element>
__global__ void __launch_bounds__(N_THREADS) encode_blocks(egi_four_bit_run run, int64_t n_blocks) {
  const int lane = threadIdx.x % 32;
  const int64_t step = int64_t(gridDim.x) * (N_THREADS / 32);
  for (int64_t b = int64_t(blockIdx.x) * (N_THREADS / 32) + threadIdx.x / 32; b < n_blocks; b += step) {
    const int64_t first = b * run.block, rest = run.count - first, n = rest < run.block ? rest : run.block;
    unsigned most = 0;
    for (int64_t i = lane; i < n; i += 32) {
      const unsigned bits = __float_as_uint(value_at<Element>(run.values, first + i)) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    for (int other = 16; other > 0; other /= 2) {
      const unsigned bits = __shfl_xor_sync(0xffffffffu, most, other);
      most = bits > most ? bits : most;
    }
    const float scale = __uint_as_float(most), factor = __fdiv_rn(1.0f, scale);
    for (int64_t i = 2 * lane; i < n; i += 64) {
      const float even = __fmul_rn(value_at<Element>(run.values, first + i), factor);
      const float odd = __fmul_rn(i + 1 < n ? value_at<Element>(run.values, first + i + 1) : 0.0f, factor);
      const int high = run.type == 1u ? egi_nf4_code(even) : egi_fp4_code(even);
      const int low = run.type == 1u ? egi_nf4_code(odd) : egi_fp4_code(odd);
      run.codes[(first + i) / 2] = static_cast<uint8_t>(high << 4 | low);
    }
    if (lane == 0) run.scales[b] = scale;
  }
}

unsigned blocks_for(const egi_device *device, uint64_t n) {
  const uint64_t most = uint64_t(device->streams[0].n_multiprocessors) * 8, wanted = (n + N_THREADS - 1) / N_THREADS;
  return static_cast<unsigned>(wanted < most ? (wanted > 0 ? wanted : 1) : most);
}

eg_status start_numbers(egi_device *device, const egi_generated *numbers, void *dst, doubtful *list) {
  const unsigned n_blocks = blocks_for(device, numbers->count);
  cudaStream_t stream = device->streams[0].stream;
  if (numbers->dtype == EG_DTYPE_F32)
    make_numbers<<<n_blocks, N_THREADS, 0, stream>>>(*numbers, static_cast<float *>(dst), list);
  else if (numbers->dtype == EG_DTYPE_BF16)
    make_numbers<<<n_blocks, N_THREADS, 0, stream>>>(*numbers, static_cast<__nv_bfloat16 *>(dst), list);
  else
    make_numbers<<<n_blocks, N_THREADS, 0, stream>>>(*numbers, static_cast<__half *>(dst), list);
  return egi_cuda_launched(device->ctx, "make_numbers");
}

size_t element_bytes(eg_dtype dtype) {
  return dtype == EG_DTYPE_F32 ? 4 : 2;
}

/* One number of the host's, in its place. */
eg_status mend(egi_device *device, const egi_generated *numbers, uint64_t i, void *dst) {
  const float number =
      static_cast<float>(numbers->value * egi_random_normal(numbers->seed, numbers->stream, numbers->first + i));
  const uint16_t half = numbers->dtype == EG_DTYPE_BF16 ? egi_f32_to_bf16(number) : egi_f32_to_f16(number);
  const size_t size = element_bytes(numbers->dtype);
  const void *bytes = size == 4 ? static_cast<const void *>(&number) : static_cast<const void *>(&half);
  return egi_cuda_upload(device, static_cast<uint8_t *>(dst) + i * size, bytes, size);
}

eg_status mend_all(egi_device *device, const egi_generated *numbers, const doubtful *list, void *dst) {
  unsigned long long count = 0, elements[64];
  EG_TRY(egi_cuda_download(device, &count, &list->count, sizeof count));
  if (count > N_DOUBTFUL) return EG_ERROR_UNSUPPORTED;
  for (unsigned long long done = 0; done < count; done += EGI_COUNT(elements)) {
    const unsigned long long n = count - done < EGI_COUNT(elements) ? count - done : EGI_COUNT(elements);
    EG_TRY(egi_cuda_download(device, elements, list->elements + done, n * sizeof *elements));
    for (unsigned long long k = 0; k < n; k++) EG_TRY(mend(device, numbers, elements[k], dst));
  }
  return EG_OK;
}

bool is_encoded(eg_dtype dtype) {
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_BF16 || dtype == EG_DTYPE_F16;
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_generate(egi_device *device, const egi_generated *numbers, void *dst) {
  void *list = NULL;
  if (!egi::is_encoded(numbers->dtype)) return EG_ERROR_UNSUPPORTED;
  if (numbers->count == 0) return EG_OK;
  EGI_CUDA_TRY(device->ctx, cudaSetDevice(device->index));
  EGI_CUDA_TRY(device->ctx, cudaMalloc(&list, sizeof(egi::doubtful)));
  egi::doubtful *found = static_cast<egi::doubtful *>(list);
  eg_status status = egi_cuda_check(
      device->ctx, cudaMemsetAsync(list, 0, sizeof found->count, device->streams[0].stream), "cudaMemsetAsync");
  if (status == EG_OK) status = egi::start_numbers(device, numbers, dst, found);
  if (status == EG_OK) status = egi::mend_all(device, numbers, found, dst);
  (void)cudaFree(list);
  return status;
}

extern "C" eg_status egi_cuda_encode(egi_device *device, const egi_four_bit_run *run) {
  if (!egi::is_encoded(run->dtype) || run->block % 2 != 0) return EG_ERROR_UNSUPPORTED;
  if (run->count == 0) return EG_OK;
  EGI_CUDA_TRY(device->ctx, cudaSetDevice(device->index));
  const int64_t n_blocks = (run->count + run->block - 1) / run->block;
  const unsigned grid = egi::blocks_for(device, static_cast<uint64_t>(n_blocks) * 32);
  cudaStream_t stream = device->streams[0].stream;
  if (run->dtype == EG_DTYPE_F32)
    egi::encode_blocks<float><<<grid, egi::N_THREADS, 0, stream>>>(*run, n_blocks);
  else if (run->dtype == EG_DTYPE_BF16)
    egi::encode_blocks<__nv_bfloat16><<<grid, egi::N_THREADS, 0, stream>>>(*run, n_blocks);
  else
    egi::encode_blocks<__half><<<grid, egi::N_THREADS, 0, stream>>>(*run, n_blocks);
  return egi_cuda_launched(device->ctx, "encode_blocks");
}
