/* CumSum and CumProd: running sums and products along an axis, floats in f64, integers modulo 2^64. A thread has a
 * short line, a block a long one, in pieces of a fixed size: results depend on shapes alone. */
#include "backend/cuda/lines.cuh"

namespace egi::plain {

/* Lines up to so many elements, or so many lines, go a thread each. */
enum { SHORT_LINE = 32, MANY_LINES = 1 << 15 };

struct cumsum_params {
  int axis, dtype;
  bool is_exclusive, is_reverse, is_product;
  int64_t size;
};

template <class C> __device__ __forceinline__ C combine(const cumsum_params &p, C a, C b) {
  return p.is_product ? a * b : a + b;
}

template <class C> __global__ void scan_short(cumsum_params p, lines l) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t line = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; line < l.count; line += step) {
    const char *in = line_at(l, 0, line);
    char *out = line_at(l, 1, line);
    C sum = p.is_product ? static_cast<C>(1) : static_cast<C>(0);
    for (int64_t i = 0; i < p.size; i++) {
      const int64_t at = p.is_reverse ? p.size - 1 - i : i;
      const C before = sum;
      sum = combine(p, sum, load_number<C>(in + at * l.steps[0], p.dtype));
      store_number<C>(out + at * l.steps[1], p.dtype, p.is_exclusive ? before : sum);
    }
  }
}

/* What stands before this thread's value in its block, and the block's total. */
template <class C> __device__ C scan_block(const cumsum_params &p, C value, C *out_total) {
  __shared__ C warps[BLOCK_THREADS / 32];
  const C nothing = p.is_product ? static_cast<C>(1) : static_cast<C>(0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  C sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const C other = static_cast<C>(__shfl_up_sync(0xffffffffu, sum, distance));
    if (lane >= distance) sum = combine(p, other, sum);
  }
  C before = static_cast<C>(__shfl_up_sync(0xffffffffu, sum, 1));
  if (lane == 0) before = nothing;
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  C base = nothing, total = nothing;
  for (int k = 0; k < BLOCK_THREADS / 32; k++) {
    if (k == warp) base = total;
    total = combine(p, total, warps[k]);
  }
  *out_total = total;
  return combine(p, base, before);
}

template <class C> __global__ void __launch_bounds__(BLOCK_THREADS) scan_long(cumsum_params p, lines l) {
  const C nothing = p.is_product ? static_cast<C>(1) : static_cast<C>(0);
  for (int64_t line = blockIdx.x; line < l.count; line += gridDim.x) {
    const char *in = line_at(l, 0, line);
    char *out = line_at(l, 1, line);
    C sum = nothing;
    for (int64_t base = 0; base < p.size; base += BLOCK_THREADS) {
      const int64_t i = base + threadIdx.x, at = p.is_reverse ? p.size - 1 - i : i;
      const bool is_inside = i < p.size;
      const C value = is_inside ? load_number<C>(in + at * l.steps[0], p.dtype) : nothing;
      C total;
      const C before = combine(p, sum, scan_block(p, value, &total));
      if (is_inside)
        store_number<C>(out + at * l.steps[1], p.dtype, p.is_exclusive ? before : combine(p, before, value));
      sum = combine(p, sum, total);
    }
  }
}

template <class C> static void launch(const cumsum_params &p, const lines &l, cudaStream_t stream) {
  const int64_t limit = 1 << 20;
  if (p.size <= SHORT_LINE || l.count >= MANY_LINES)
    scan_short<C><<<blocks_for(l.count), BLOCK_THREADS, 0, stream>>>(p, l);
  else
    scan_long<C><<<static_cast<unsigned>(l.count < limit ? l.count : limit), BLOCK_THREADS, 0, stream>>>(p, l);
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_cumsum(egi_kernel_plan *plan) {
  cumsum_params *p = EGI_NEW(plan->arena, cumsum_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const egi_node *node = egi_plan_node(plan);
  const egi_tensor *input = &plan->inputs[0];
  int64_t axis = 0;
  uint32_t count = 0;
  p->dtype = input->dtype;
  p->is_exclusive = egi_node_int(node, "exclusive", 0) != 0;
  p->is_reverse = egi_node_int(node, "reverse", 0) != 0;
  p->is_product = node->op == EGI_OP_CumProd;
  if (inside_of(input->dtype) == INSIDE_NONE || input->dtype == EG_DTYPE_BOOL || plan->outputs[0].dtype != input->dtype)
    return egi_fail_types(plan);
  EG_TRY(known_integers(plan, 1, &axis, 1, &count));
  if (count != 1 || !egi_normalise_axis(axis, input->rank, &p->axis))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "the axis must be one integer in range of rank %d",
                         input->rank);
  p->size = input->dims[p->axis];
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_cumsum(eg_context *ctx, const egi_kernel_call *call) {
  const cumsum_params *p = static_cast<const cumsum_params *>(call->params);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  lines l = {};
  lines_set(&l, 0, &call->inputs[0], p->axis);
  lines_set(&l, 1, &call->outputs[0], p->axis);
  if (l.count == 0 || p->size == 0) return EG_OK;
  if (egi_dtype_is_float(call->inputs[0].dtype))
    launch<double>(*p, l, stream);
  else
    launch<uint64_t>(*p, l, stream);
  return egi_cuda_launched(ctx, "scan");
}
