/* Ragged products of any kind. 256 threads in 16 rows (y) of 16 (x): a thread has rows 4 y .. and results 4 x .. of a
 * tile; rows and matrices are staged as f32, quantised ones decoded on the way: levels of 4 bits in blocks (Dettmers et
 * al., arXiv 2305.14314), or (q - zero) * scale with values packed along K (onnxruntime's QMoE). */
#include "backend/cuda/ragged_general.cuh"

namespace egi {
namespace ragged_general {
namespace {

enum { NESTED_BLOCK = 256, NESTED_HEADER = 257 }; /* base/blockwise.h */

/* bitsandbytes' levels for a scale of 1: NF4, then FP4 (sign, then three bits). */
__constant__ float four_bit_levels[2][16] = {
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {0.0f, 0.0052083333333f, 0.6666666667f, 1.0f, 0.3333333333f, 0.5f, 0.1666666667f, 0.25f, -0.0f, -0.0052083333333f,
     -0.6666666667f, -1.0f, -0.3333333333f, -0.5f, -0.1666666667f, -0.25f}};

__device__ __forceinline__ int packed_at(const uint8_t *row, int64_t step, int64_t index, int bits) {
  const int64_t per_byte = 8 / bits;
  return row[index / per_byte * step] >> (index % per_byte * bits) & ((1 << bits) - 1);
}

/* The element (n, k) of an expert's matrix. */
__device__ __forceinline__ float weight_at(const expert_weights &w, int64_t expert, int64_t n, int64_t k) {
  const expert_operand weight = w.weight[expert];
  if (w.storage == STORAGE_DENSE)
    return read_element(weight.data, n * weight.row_stride + k * weight.column_stride, w.weight_element);
  const uint8_t *row = static_cast<const uint8_t *>(weight.data) + n * weight.row_stride;
  const expert_operand scales = w.scales[expert];
  if (w.storage == STORAGE_LEVELS) {
    const int code = row[k / 2 * weight.column_stride] >> (k % 2 == 0 ? 4 : 0) & 15;
    const int64_t block = ((w.is_stack ? expert * w.n * w.k : 0) + n * w.k + k) / w.block;
    float scale;
    if (w.is_nested) {
      const float *floats = static_cast<const float *>(w.zeros[expert].data);
      const int64_t step = w.zeros[expert].row_stride;
      const int64_t byte = static_cast<const uint8_t *>(scales.data)[block * scales.row_stride];
      scale = __fadd_rn(__fmul_rn(floats[(1 + byte) * step], floats[(NESTED_HEADER + block / NESTED_BLOCK) * step]),
                        floats[0]);
    } else {
      scale = static_cast<const float *>(scales.data)[block * scales.row_stride];
    }
    return four_bit_levels[w.is_fp4][code] * scale;
  }
  const int64_t block = k / w.block;
  const float scale = read_element(scales.data, n * scales.row_stride + block * scales.column_stride, w.scale_element);
  int zero = 1 << (w.bits - 1);
  if (w.zeros) {
    const expert_operand zeros = w.zeros[expert];
    zero =
        packed_at(static_cast<const uint8_t *>(zeros.data) + n * zeros.row_stride, zeros.column_stride, block, w.bits);
  }
  return static_cast<float>(packed_at(row, weight.column_stride, k, w.bits) - zero) * scale;
}

__device__ __forceinline__ float bias_at(const expert_weights &w, int64_t expert, int64_t n) {
  return read_element(w.bias[expert].data, n * w.bias[expert].row_stride, w.bias_element);
}

/* sums[i][j] += left[.][4 y + i] right[.][4 x + j] */
__device__ __forceinline__ void add_products(float (&sums)[4][4], const float (*left)[PITCH],
                                             const float (*right)[PITCH], int depth) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll 8
  for (int k = 0; k < depth; k++) {
    const float4 a4 = *reinterpret_cast<const float4 *>(&left[k][4 * y]);
    const float4 b4 = *reinterpret_cast<const float4 *>(&right[k][4 * x]);
    const float a[4] = {a4.x, a4.y, a4.z, a4.w}, b[4] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
  }
}

struct shared_tiles {
  float left[DEPTH][PITCH], right[DEPTH][PITCH];
};

/* Elements of W from contracted index c and result o on; lanes follow what lies side by side in memory. */
__device__ __forceinline__ void stage_weights(const product &p, int expert, int64_t c, int64_t o, shared_tiles &s) {
#pragma unroll 2
  for (int i = 0; i < TILE * DEPTH / THREADS; i++) {
    const int index = static_cast<int>(threadIdx.x) + i * THREADS;
    const int depth = p.is_backward ? index / TILE : index % DEPTH;
    const int result = p.is_backward ? index % TILE : index / DEPTH;
    const bool is_inside = c + depth < p.depth && o + result < p.results;
    float number = 0.0f;
    if (is_inside)
      number =
          p.is_backward ? weight_at(p.w, expert, c + depth, o + result) : weight_at(p.w, expert, o + result, c + depth);
    s.right[depth][result] = number;
  }
}

template <class Element>
__device__ __forceinline__ void stage_inputs(const product &p, const row_tile &tile, int64_t c, shared_tiles &s) {
  const Element *in = static_cast<const Element *>(p.in.data);
#pragma unroll 4
  for (int i = 0; i < TILE * DEPTH / THREADS; i++) {
    const int index = static_cast<int>(threadIdx.x) + i * THREADS, depth = index % DEPTH, row = index / DEPTH;
    const bool is_inside = tile.first + row < tile.end && c + depth < p.depth;
    s.left[depth][row] =
        is_inside ? to_float(in[(tile.first + row) * p.in.row_stride + (c + depth) * p.in.column_stride]) : 0.0f;
  }
}

template <class Element>
__device__ __forceinline__ void store_results(const product &p, const row_tile &tile, int64_t o,
                                              const float (&sums)[4][4]) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t row = tile.first + 4 * y + i;
    if (row >= tile.end) continue;
    float factor = p.alpha;
    if (p.row_weight) factor *= read_element(p.row_weight, row * p.row_weight_stride, p.row_weight_element);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int64_t result = o + 4 * x + j;
      if (result >= p.results) continue;
      float number = sums[i][j];
      if (p.w.bias && !p.is_backward) number += bias_at(p.w, tile.expert, result);
      number *= factor;
      if (p.addend.data)
        number +=
            read_element(p.addend.data, row * p.addend.row_stride + result * p.addend.column_stride, p.addend_element);
      static_cast<Element *>(p.out.data)[row * p.out.row_stride + result * p.out.column_stride] =
          from_float<Element>(number);
    }
  }
}

template <class Element> __global__ void __launch_bounds__(THREADS) ragged_multiply(const product p) {
  __shared__ shared_tiles shared;
  const int64_t across = (p.results + TILE - 1) / TILE, n_work = *p.list.count * across;
  for (int64_t work = blockIdx.x; work < n_work; work += gridDim.x) {
    const row_tile tile = p.list.tiles[work / across];
    const int64_t o = work % across * TILE;
    float sums[4][4] = {};
    for (int64_t c = 0; c < p.depth; c += DEPTH) {
      __syncthreads();
      stage_inputs<Element>(p, tile, c, shared);
      stage_weights(p, tile.expert, c, o, shared);
      __syncthreads();
      add_products(sums, shared.left, shared.right, static_cast<int>(p.depth - c < DEPTH ? p.depth - c : DEPTH));
    }
    store_results<Element>(p, tile, o, sums);
  }
}

/* dst[row][column] of 32 rows and 64 columns. */
template <class Element>
__device__ __forceinline__ void stage_rows(float (*dst)[PITCH], const matrix &m, int64_t row, int64_t end,
                                           int64_t column, int64_t n_columns) {
#pragma unroll 4
  for (int i = 0; i < TILE * DEPTH / THREADS; i++) {
    const int index = static_cast<int>(threadIdx.x) + i * THREADS, c = index % TILE, r = index / TILE;
    const bool is_inside = row + r < end && column + c < n_columns;
    dst[r][c] =
        is_inside
            ? to_float(static_cast<const Element *>(m.data)[(row + r) * m.row_stride + (column + c) * m.column_stride])
            : 0.0f;
  }
}

template <class Element> __global__ void __launch_bounds__(THREADS) ragged_reduce(const reduction r) {
  __shared__ shared_tiles shared;
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
  const int64_t across = (r.k + TILE - 1) / TILE, down = (r.n + TILE - 1) / TILE;
  for (int64_t work = blockIdx.x; work < r.n_experts * down * across; work += gridDim.x) {
    const int64_t expert = work / (down * across), n = work / across % down * TILE, k = work % across * TILE;
    const int64_t last = r.offsets[expert + 1], end = last < r.n_rows ? last : r.n_rows, start = r.offsets[expert];
    float sums[4][4] = {};
    for (int64_t row = start > 0 ? start : 0; row < end; row += DEPTH) {
      __syncthreads();
      stage_rows<Element>(shared.left, r.left, row, end, n, r.n);
      stage_rows<Element>(shared.right, r.right, row, end, k, r.k);
      __syncthreads();
      add_products(sums, shared.left, shared.right, static_cast<int>(end - row < DEPTH ? end - row : DEPTH));
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (n + 4 * y + i < r.n && k + 4 * x + j < r.k)
          write_element(r.out,
                        expert * r.out_strides[0] + (n + 4 * y + i) * r.out_strides[1] +
                            (k + 4 * x + j) * r.out_strides[2],
                        r.out_element, r.alpha * sums[i][j]);
  }
}

unsigned grid_for(int64_t n_blocks) {
  const int64_t most = 1 << 24;
  return static_cast<unsigned>(n_blocks < most ? n_blocks : most);
}

/* Elements of a stack, a thread each. */
template <class Element>
__global__ void __launch_bounds__(THREADS)
    ragged_decode(const expert_weights w, int64_t first, int64_t count, Element *dst) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * THREADS) {
    const int64_t expert = first + i / (w.n * w.k), rest = i % (w.n * w.k);
    dst[i] = from_float<Element>(weight_at(w, expert, rest / w.k, rest % w.k));
  }
}

__global__ void __launch_bounds__(THREADS)
    ragged_decode_bias(const expert_weights w, int64_t count, void *dst, element_kind element) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * THREADS)
    write_element(dst, i, element, bias_at(w, i / w.n, i % w.n));
}

/* A warp a row. */
template <class Element> __global__ void __launch_bounds__(THREADS) ragged_weigh(const weighing g) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t row = blockIdx.x * static_cast<int64_t>(THREADS / 32) + threadIdx.x / 32; row < g.n_rows;
       row += static_cast<int64_t>(gridDim.x) * (THREADS / 32)) {
    int64_t low = 0, high = g.n_experts; /* the expert: offsets[low] <= row < offsets[high] */
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (g.offsets[middle] <= row ? low : high) = middle;
    }
    Element *dx = static_cast<Element *>(g.dx.data) + row * g.dx.row_stride;
    if (g.d_weight) {
      const Element *x = static_cast<const Element *>(g.x.data) + row * g.x.row_stride;
      const Element *dy = static_cast<const Element *>(g.dy.data) + row * g.dy.row_stride;
      float sum = 0.0f;
      for (int64_t i = lane; i < g.w.k; i += 32)
        sum = fmaf(to_float(dx[i * g.dx.column_stride]), to_float(x[i * g.x.column_stride]), sum);
      for (int64_t i = lane; g.w.bias && i < g.w.n; i += 32)
        sum = fmaf(to_float(dy[i * g.dy.column_stride]), bias_at(g.w, low, i), sum);
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane == 0) write_element(g.d_weight, row, g.d_weight_element, g.alpha * sum);
    }
    const float factor = g.alpha * read_element(g.row_weight, row * g.row_weight_stride, g.row_weight_element);
    for (int64_t i = lane; i < g.w.k; i += 32)
      dx[i * g.dx.column_stride] = from_float<Element>(factor * to_float(dx[i * g.dx.column_stride]));
  }
}

template <class Element> cudaError_t launch_multiply(const product &p, cudaStream_t stream) {
  const int64_t across = (p.results + TILE - 1) / TILE, n_blocks = most_tiles(p.n_rows, p.n_experts) * across;
  if (n_blocks > 0) ragged_multiply<Element><<<grid_for(n_blocks), THREADS, 0, stream>>>(p);
  return cudaPeekAtLastError();
}

template <class Element> cudaError_t launch_reduce(const reduction &r, cudaStream_t stream) {
  const int64_t n_blocks = r.n_experts * ((r.n + TILE - 1) / TILE) * ((r.k + TILE - 1) / TILE);
  if (n_blocks > 0) ragged_reduce<Element><<<grid_for(n_blocks), THREADS, 0, stream>>>(r);
  return cudaPeekAtLastError();
}

template <class Element> cudaError_t launch_weigh(const weighing &g, cudaStream_t stream) {
  const int64_t n_blocks = (g.n_rows + THREADS / 32 - 1) / (THREADS / 32);
  if (n_blocks > 0) ragged_weigh<Element><<<grid_for(n_blocks), THREADS, 0, stream>>>(g);
  return cudaPeekAtLastError();
}

} // namespace

cudaError_t multiply(const product &p, element_kind element, cudaStream_t stream) {
  if (element == ELEMENT_BF16) return launch_multiply<__nv_bfloat16>(p, stream);
  return element == ELEMENT_F16 ? launch_multiply<__half>(p, stream) : launch_multiply<float>(p, stream);
}

cudaError_t reduce(const reduction &r, element_kind element, cudaStream_t stream) {
  if (element == ELEMENT_BF16) return launch_reduce<__nv_bfloat16>(r, stream);
  return element == ELEMENT_F16 ? launch_reduce<__half>(r, stream) : launch_reduce<float>(r, stream);
}

cudaError_t weigh(const weighing &g, element_kind element, cudaStream_t stream) {
  if (element == ELEMENT_BF16) return launch_weigh<__nv_bfloat16>(g, stream);
  return element == ELEMENT_F16 ? launch_weigh<__half>(g, stream) : launch_weigh<float>(g, stream);
}

cudaError_t decode(const expert_weights &w, int64_t first, int64_t n, void *dst, element_kind element,
                   cudaStream_t stream) {
  const int64_t count = n * w.n * w.k;
  const unsigned n_blocks = grid_for((count + THREADS - 1) / THREADS);
  if (count == 0) return cudaSuccess;
  if (element == ELEMENT_BF16)
    ragged_decode<<<n_blocks, THREADS, 0, stream>>>(w, first, count, static_cast<__nv_bfloat16 *>(dst));
  else
    ragged_decode<<<n_blocks, THREADS, 0, stream>>>(w, first, count, static_cast<__half *>(dst));
  return cudaPeekAtLastError();
}

cudaError_t decode_bias(const expert_weights &w, int64_t n_experts, void *dst, element_kind element,
                        cudaStream_t stream) {
  const int64_t count = n_experts * w.n;
  if (count > 0)
    ragged_decode_bias<<<grid_for((count + THREADS - 1) / THREADS), THREADS, 0, stream>>>(w, count, dst, element);
  return cudaPeekAtLastError();
}

} // namespace ragged_general
} // namespace egi
