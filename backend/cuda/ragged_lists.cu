/* What goes before and after ragged products: tables of the experts' operands, tiles of rows, factors of rows, and sums
 * stored in other types. */
#include "backend/cuda/ragged_general.cuh"

namespace egi {
namespace ragged_general {
namespace {

enum { LIST_THREADS = 1024 };

__global__ void __launch_bounds__(THREADS) ragged_fill_table(const table_source source, expert_operand *table) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
  if (source.is_stack) {
    if (i >= source.n_experts) return;
    expert_operand own = source.first;
    own.data = static_cast<const char *>(own.data) + i * source.expert_bytes;
    table[i] = own;
  } else if (i < LISTED && source.start + i < source.n_experts) {
    table[source.start + i] = source.list[i];
  }
}

/* Inclusive sums over the block. */
__device__ __forceinline__ int scan_block(int number, int (&parts)[LIST_THREADS]) {
  const int thread = static_cast<int>(threadIdx.x);
  parts[thread] = number;
  __syncthreads();
  for (int step = 1; step < LIST_THREADS; step *= 2) {
    const int before = thread >= step ? parts[thread - step] : 0;
    __syncthreads();
    parts[thread] += before;
    __syncthreads();
  }
  return parts[thread];
}

/* One block: experts a thread each, LIST_THREADS at a time. */
__global__ void __launch_bounds__(LIST_THREADS)
    ragged_list_tiles(const int32_t *offsets, int64_t n_experts, int64_t n_rows, const tile_list list,
                      egi_cuda_fault *fault) {
  __shared__ int parts[LIST_THREADS];
  const int thread = static_cast<int>(threadIdx.x);
  int is_sound = 1, base = 0;
  for (int64_t e = thread; e < n_experts; e += LIST_THREADS)
    if (offsets[e] > offsets[e + 1] || offsets[e] < 0 || offsets[e + 1] > n_rows) is_sound = 0;
  if (thread == 0 && (offsets[0] != 0 || offsets[n_experts] != n_rows)) is_sound = 0;
  is_sound = __syncthreads_and(is_sound);
  if (!is_sound) {
    if (thread == 0) {
      egi_cuda_raise(fault, EGI_CUDA_FAULT_COUNT, EGI_OP_RaggedLinear, offsets[n_experts]);
      if (list.count) *list.count = 0;
    }
    return;
  }
  if (!list.count) return;
  for (int64_t first = 0; first < n_experts; first += LIST_THREADS) {
    const int64_t e = first + thread;
    const int begin = e < n_experts ? offsets[e] : 0, end = e < n_experts ? offsets[e + 1] : 0;
    const int own = (end - begin + TILE - 1) / TILE, last = scan_block(own, parts);
    for (int i = 0; i < own; i++)
      list.tiles[base + last - own + i] = {static_cast<int>(e), begin + i * TILE, min(begin + (i + 1) * TILE, end)};
    base += parts[LIST_THREADS - 1];
    __syncthreads();
  }
  if (thread == 0) *list.count = base;
}

__global__ void __launch_bounds__(THREADS) ragged_scale_rows(const row_factors f) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
  if (i < f.n_rows) f.out[i] = f.alpha * (f.row_weight ? read_element(f.row_weight, i * f.stride, f.element) : 1.0f);
}

template <class Element> __global__ void __launch_bounds__(THREADS) ragged_add_rows(const row_addition a) {
  const int64_t count = a.n_rows * a.n_columns;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * THREADS) {
    const int64_t row = i / a.n_columns, column = i % a.n_columns;
    const float old = to_float(
        static_cast<const Element *>(a.addend.data)[row * a.addend.row_stride + column * a.addend.column_stride]);
    static_cast<Element *>(a.out.data)[row * a.out.row_stride + column * a.out.column_stride] =
        from_float<Element>(old + to_float(static_cast<const Element *>(a.sums)[i]));
  }
}

__global__ void __launch_bounds__(THREADS) ragged_store_sums(const float *src, const reduction r, int64_t count) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * THREADS) {
    const int64_t expert = i / (r.n * r.k), n = i / r.k % r.n, k = i % r.k;
    write_element(r.out, expert * r.out_strides[0] + n * r.out_strides[1] + k * r.out_strides[2], r.out_element,
                  r.alpha * src[i]);
  }
}

__global__ void __launch_bounds__(THREADS)
    ragged_copy_indices(const int32_t *src, int64_t stride, int64_t count, int32_t *dst) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
  if (i < count) dst[i] = src[i * stride];
}

unsigned blocks_for(int64_t count) {
  const int64_t wanted = (count + THREADS - 1) / THREADS, most = 1 << 24;
  return static_cast<unsigned>(wanted < most ? wanted : most);
}

} // namespace

cudaError_t fill_table(const table_source &source, expert_operand *table, cudaStream_t stream) {
  const int64_t count = source.is_stack ? source.n_experts : static_cast<int64_t>(LISTED);
  ragged_fill_table<<<blocks_for(count), THREADS, 0, stream>>>(source, table);
  return cudaPeekAtLastError();
}

cudaError_t list_tiles(const int32_t *offsets, int64_t n_experts, int64_t n_rows, const tile_list &list,
                       egi_cuda_fault *fault, cudaStream_t stream) {
  ragged_list_tiles<<<1, LIST_THREADS, 0, stream>>>(offsets, n_experts, n_rows, list, fault);
  return cudaPeekAtLastError();
}

cudaError_t scale_rows(const row_factors &factors, cudaStream_t stream) {
  if (factors.n_rows > 0) ragged_scale_rows<<<blocks_for(factors.n_rows), THREADS, 0, stream>>>(factors);
  return cudaPeekAtLastError();
}

cudaError_t add_rows(const row_addition &addition, element_kind element, cudaStream_t stream) {
  const int64_t count = addition.n_rows * addition.n_columns;
  if (count == 0) return cudaSuccess;
  if (element == ELEMENT_BF16)
    ragged_add_rows<__nv_bfloat16><<<blocks_for(count), THREADS, 0, stream>>>(addition);
  else
    ragged_add_rows<__half><<<blocks_for(count), THREADS, 0, stream>>>(addition);
  return cudaPeekAtLastError();
}

cudaError_t store_sums(const float *src, const reduction &r, cudaStream_t stream) {
  const int64_t count = r.n_experts * r.n * r.k;
  if (count > 0) ragged_store_sums<<<blocks_for(count), THREADS, 0, stream>>>(src, r, count);
  return cudaPeekAtLastError();
}

cudaError_t copy_indices(const int32_t *src, int64_t stride, int64_t count, int32_t *dst, cudaStream_t stream) {
  if (count > 0) ragged_copy_indices<<<blocks_for(count), THREADS, 0, stream>>>(src, stride, count, dst);
  return cudaPeekAtLastError();
}

} // namespace ragged_general
} // namespace egi
