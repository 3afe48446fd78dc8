/* Where, which moves elements by their size, and Clip, whose bounds are read on the device. Elementwise: deterministic.
 */
#include "backend/cuda/elementwise.cuh"

namespace egi::plain {

/* ---- Where ------------------------------------------------------------------------------------------------------- */

/* Both values are read first: the output may be the memory of one of them. */
template <class Word> __global__ void __launch_bounds__(BLOCK_THREADS) where_elements(strided loop) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < loop.count; i += step) {
    int64_t offsets[4];
    offsets_at(loop, i, offsets);
    const bool is_first = *reinterpret_cast<const uint8_t *>(loop.data[1] + offsets[1]) != 0;
    const char *source = is_first ? loop.data[2] + offsets[2] : loop.data[3] + offsets[3];
    *reinterpret_cast<Word *>(loop.data[0] + offsets[0]) = *reinterpret_cast<const Word *>(source);
  }
}

template <class Word> struct words { Word lanes[PACKET]; };

/* A packet of words of 2 or 4 bytes. */
template <class Word> __device__ __forceinline__ words<Word> load_words(const char *at, bool is_repeated) {
  words<Word> out;
  if (is_repeated) {
    const Word word = *reinterpret_cast<const Word *>(at);
#pragma unroll
    for (int i = 0; i < PACKET; i++) out.lanes[i] = word;
    return out;
  }
  uint4 parts[sizeof out / 16];
#pragma unroll
  for (size_t i = 0; i < sizeof out / 16; i++) parts[i] = reinterpret_cast<const uint4 *>(at)[i];
  memcpy(&out, parts, sizeof out);
  return out;
}

template <class Word> __global__ void __launch_bounds__(BLOCK_THREADS) where_packets(strided loop, unsigned repeated) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < loop.count; i += step) {
    int64_t offsets[4];
    offsets_at(loop, i, offsets);
    const char *at = loop.data[1] + offsets[1];
    const uint64_t flags = (repeated & 1u) != 0 ? (*reinterpret_cast<const uint8_t *>(at) != 0 ? UINT64_MAX : 0)
                                                : *reinterpret_cast<const uint64_t *>(at);
    words<Word> a = load_words<Word>(loop.data[2] + offsets[2], (repeated & 2u) != 0);
    const words<Word> b = load_words<Word>(loop.data[3] + offsets[3], (repeated & 4u) != 0);
#pragma unroll
    for (int lane = 0; lane < PACKET; lane++)
      a.lanes[lane] = (flags >> (8 * lane) & 0xffu) != 0 ? a.lanes[lane] : b.lanes[lane];
    uint4 parts[sizeof a / 16];
    memcpy(parts, &a, sizeof a);
#pragma unroll
    for (size_t k = 0; k < sizeof a / 16; k++) reinterpret_cast<uint4 *>(loop.data[0] + offsets[0])[k] = parts[k];
  }
}

template <class Word> static void launch_where(strided loop, cudaStream_t stream) {
  unsigned repeated = 0;
  strided rest = {};
  if (!make_packets(&loop, &repeated, &rest)) {
    where_elements<Word><<<blocks_for(loop.count), BLOCK_THREADS, 0, stream>>>(loop);
    return;
  }
  where_packets<Word><<<blocks_for(loop.count), BLOCK_THREADS, 0, stream>>>(loop, repeated);
  if (rest.count > 0) where_elements<Word><<<blocks_for(rest.count), BLOCK_THREADS, 0, stream>>>(rest);
}

/* ---- Clip -------------------------------------------------------------------------------------------------------- */

template <class C> struct clip {
  bool has_low, has_high;
  __device__ __forceinline__ C operator()(const C (&x)[3]) const {
    const C raised = has_low && x[0] < x[1] ? x[1] : x[0];
    return has_high && raised > x[2] ? x[2] : raised;
  }
};

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_where(egi_kernel_plan *plan) {
  const eg_dtype dtype = plan->outputs[0].dtype;
  const size_t bytes = egi_element_bytes(dtype);
  const bool is_fit = plan->inputs[0].dtype == EG_DTYPE_BOOL && plan->inputs[1].dtype == dtype &&
                      plan->inputs[2].dtype == dtype && bytes >= 1 && bytes <= 8;
  return is_fit ? EG_OK : egi_fail_types(plan);
}

extern "C" eg_status egi_cuda_run_where(eg_context *ctx, const egi_kernel_call *call) {
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  const egi_tensor *const inputs[3] = {&call->inputs[0], &call->inputs[1], &call->inputs[2]};
  const strided loop = loop_of(&call->outputs[0], inputs, 3);
  if (loop.count == 0) return EG_OK;
  switch (egi_element_bytes(call->outputs[0].dtype)) {
  case 1:
    where_elements<uint8_t><<<blocks_for(loop.count), BLOCK_THREADS, 0, stream>>>(loop);
    break;
  case 2:
    launch_where<uint16_t>(loop, stream);
    break;
  case 4:
    launch_where<uint32_t>(loop, stream);
    break;
  default:
    where_elements<uint64_t><<<blocks_for(loop.count), BLOCK_THREADS, 0, stream>>>(loop);
    break;
  }
  return egi_cuda_launched(ctx, "where");
}

extern "C" eg_status egi_cuda_prepare_clip(egi_kernel_plan *plan) {
  const eg_dtype dtype = plan->inputs[0].dtype;
  for (unsigned i = 1; i < 3; i++) {
    if (!egi_plan_has_input(plan, i)) continue;
    if (plan->inputs[i].dtype != dtype) return egi_fail_types(plan);
    if (egi_tensor_count(&plan->inputs[i]) != 1)
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "bound %u is not a scalar", i);
  }
  const bool is_fit = inside_of(dtype) != INSIDE_NONE && dtype != EG_DTYPE_BOOL && plan->outputs[0].dtype == dtype;
  return is_fit ? EG_OK : egi_fail_types(plan);
}

/* A bound that is absent is read all the same, from the input, and not used. */
extern "C" eg_status egi_cuda_run_clip(eg_context *ctx, const egi_kernel_call *call) {
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  egi_tensor bounds[2];
  bool has_bound[2];
  for (unsigned i = 0; i < 2; i++) {
    has_bound[i] = egi_call_has_input(call, i + 1);
    bounds[i] = call->inputs[has_bound[i] ? i + 1 : 0];
    bounds[i].rank = 0;
  }
  const egi_tensor *const inputs[3] = {&call->inputs[0], &bounds[0], &bounds[1]};
  const strided loop = loop_of(&call->outputs[0], inputs, 3);
  if (loop.count == 0) return EG_OK;
  with_inside(inside_of(call->inputs[0].dtype), [&](auto zero) {
    using C = decltype(zero);
    launch_elements<C, 3>(loop, clip<C>{has_bound[0], has_bound[1]}, stream);
  });
  return egi_cuda_launched(ctx, "clip");
}
