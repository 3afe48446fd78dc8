/* The engine of elementwise kernels: out = op(in 1, .. in N) over operands of any strides and types, in packets of
 * eight where the innermost run allows it, else an element a thread. Everything of an element is read before it is
 * written, so that the output may be the memory of an input of the same strides. Deterministic: one element at a time.
 */
#ifndef ENGRAFT_BACKEND_CUDA_ELEMENTWISE_CUH
#define ENGRAFT_BACKEND_CUDA_ELEMENTWISE_CUH

#include "backend/cuda/strided.cuh"

namespace egi::plain {

/* Op: C operator()(const C (&x)[N]). */
template <class C, int N, class Op> __global__ void __launch_bounds__(BLOCK_THREADS) run_elements(strided loop, Op op) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < loop.count; i += step) {
    int64_t offsets[N + 1];
    C x[N];
    offsets_at(loop, i, offsets);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = load_number<C>(loop.data[k + 1] + offsets[k + 1], loop.dtypes[k + 1]);
    store_number<C>(loop.data[0] + offsets[0], loop.dtypes[0], op(x));
  }
}

template <int N> struct packet_places {
  int64_t offsets[N + 1];
  raw_packet raw[N];
};

template <int N>
__device__ __forceinline__ void load_packets(const strided &loop, unsigned repeated, int64_t i, packet_places<N> *out) {
  offsets_at(loop, i, out->offsets);
#pragma unroll
  for (int k = 0; k < N; k++)
    out->raw[k] = load_packet(loop.data[k + 1] + out->offsets[k + 1], loop.dtypes[k + 1], (repeated >> k & 1u) != 0);
}

template <int N, class Op>
__device__ __forceinline__ void finish_packets(const strided &loop, const packet_places<N> &in, const Op &op) {
  float numbers[N][PACKET], out[PACKET];
#pragma unroll
  for (int k = 0; k < N; k++) packet_numbers(in.raw[k], loop.dtypes[k + 1], numbers[k]);
#pragma unroll
  for (int lane = 0; lane < PACKET; lane++) {
    float x[N];
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = numbers[k][lane];
    out[lane] = op(x);
  }
  store_packet(loop.data[0] + in.offsets[0], loop.dtypes[0], out);
}

/* The loop counts packets, of which a thread has two under way. Operands are f32, bf16 or f16; `repeated` bit k: input
 * k is one element for the packet. */
template <int N, class Op>
__global__ void __launch_bounds__(BLOCK_THREADS) run_packets(strided loop, unsigned repeated, Op op) {
  const int64_t step = 2 * static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  int64_t i = static_cast<int64_t>(blockIdx.x) * 2 * BLOCK_THREADS + threadIdx.x;
  for (; i + BLOCK_THREADS < loop.count; i += step) {
    packet_places<N> first, second;
    load_packets(loop, repeated, i, &first);
    load_packets(loop, repeated, i + BLOCK_THREADS, &second);
    finish_packets(loop, first, op);
    finish_packets(loop, second, op);
  }
  if (i >= loop.count) return;
  packet_places<N> last;
  load_packets(loop, repeated, i, &last);
  finish_packets(loop, last, op);
}

/* Makes a collapsed loop over elements one over packets. `out_repeated` as in run_packets; false: it cannot be. A run
 * whose length is no multiple of a packet is cut where it is the only one: what is left over is `out_rest`. */
bool make_packets(strided *loop, unsigned *out_repeated, strided *out_rest);
bool is_packet_type(int dtype);

template <class C, int N, class Op> void launch_elements(const strided &loop, const Op &op, cudaStream_t stream) {
  run_elements<C, N, Op><<<blocks_for(loop.count), BLOCK_THREADS, 0, stream>>>(loop, op);
}

/* Packets where they can be, for operators that are worth a kernel of their own. */
template <int N, class Op> void launch_fast(strided loop, const Op &op, cudaStream_t stream) {
  unsigned repeated = 0;
  strided rest = {};
  bool is_fit = true;
  for (int k = 0; k <= N; k++) is_fit = is_fit && is_packet_type(loop.dtypes[k]);
  if (!is_fit || !make_packets(&loop, &repeated, &rest)) {
    launch_elements<float, N>(loop, op, stream);
    return;
  }
  run_packets<N, Op><<<blocks_for((loop.count + 1) / 2), BLOCK_THREADS, 0, stream>>>(loop, repeated, op);
  if (rest.count > 0) launch_elements<float, N>(rest, op, stream);
}

/* The loop of a call whose operands are inputs [0, n). */
inline strided loop_of(const egi_tensor *output, const egi_tensor *const *inputs, int n) {
  strided loop;
  strided_init(&loop, output);
  for (int i = 0; i < n; i++) strided_add(&loop, inputs[i]);
  strided_collapse(&loop);
  return loop;
}

} // namespace egi::plain

#endif
