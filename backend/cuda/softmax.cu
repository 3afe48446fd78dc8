/* Softmax, LogSoftmax and their gradients (from the results) along one axis. Sums are f32 (f64 for f64) in trees that
 * the row's length fixes: deterministic. */
#include "backend/cuda/rows.cuh"

namespace egi {
namespace {

/* Operands of the rows; the result is after the inputs. */
enum { SOFTMAX_FIRST, SOFTMAX_SECOND, SOFTMAX_OPERANDS = 3 };

struct softmax_node {
  rows r;
  row_threads threads;
  eg_dtype dtype;
  bool is_log, is_gradient;
};

struct softmax_job {
  rows r;
  int group;
  bool is_log;
};

__device__ __forceinline__ float exponential(float x) {
  return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}

/* Calls body(row, n_packets) for the rows of the thread's group; n_packets is 0 where there is no row left, so that all
 * threads of a block meet in its reductions. */
template <class F> __device__ __forceinline__ void each_row(const softmax_job &job, int packet, F body) {
  const int64_t rows_a_block = blockDim.x / static_cast<unsigned>(job.group);
  for (int64_t base = blockIdx.x * rows_a_block; base < job.r.count; base += gridDim.x * rows_a_block) {
    const int64_t row = base + static_cast<int>(threadIdx.x) / job.group;
    const bool is_row = row < job.r.count;
    body(is_row ? row : 0, is_row ? (job.r.length + packet - 1) / packet : 0);
  }
}

template <class T, int HELD>
__global__ void __launch_bounds__(MOST_THREADS) softmax_forward(const __grid_constant__ softmax_job job) {
  using A = number_of<T>;
  constexpr int n = packet_size<T>;
  __shared__ A shared[32];
  const int group = job.group, lane = static_cast<int>(threadIdx.x) % group;
  const row_operand &in = job.r.operands[SOFTMAX_FIRST], &out = job.r.operands[SOFTMAX_SECOND];
  each_row(job, n, [&](int64_t row, int64_t n_packets) {
    int64_t at[2];
    row_offsets(job.r, row, at);
    packet<T> held[HELD > 0 ? HELD : 1];
    A largest[1] = {static_cast<A>(-INFINITY)}, sum[1] = {0};
    each_packet<HELD>(lane, group, n_packets, [&](int v, int64_t p) {
      A x[n];
      held[v] = load_packet<T>(job.r, in, at[0], p * n);
      unpack(held[v], x);
#pragma unroll
      for (int i = 0; i < n; i++)
        if (p * n + i < job.r.length && x[i] > largest[0]) largest[0] = x[i];
    });
    group_largest(largest, group, shared);
    each_packet<HELD>(lane, group, n_packets, [&](int v, int64_t p) {
      A x[n];
      unpack(HELD > 0 ? held[v] : load_packet<T>(job.r, in, at[0], p * n), x);
#pragma unroll
      for (int i = 0; i < n; i++)
        if (p * n + i < job.r.length) sum[0] += exponential(x[i] - largest[0]);
    });
    group_sum(sum, group, shared);
    const A shift = job.is_log ? log(sum[0]) : static_cast<A>(0), factor = static_cast<A>(1) / sum[0];
    each_packet<HELD>(lane, group, n_packets, [&](int v, int64_t p) {
      A x[n];
      unpack(HELD > 0 ? held[v] : load_packet<T>(job.r, in, at[0], p * n), x);
#pragma unroll
      for (int i = 0; i < n; i++)
        x[i] = job.is_log ? x[i] - largest[0] - shift : exponential(x[i] - largest[0]) * factor;
      store_packet(job.r, out, at[1], p * n, pack<T>(x));
    });
  });
}

/* dx = y·(dy - Σ y·dy); of log softmax dx = dy - exp(y)·Σ dy. */
template <class T, int HELD>
__global__ void __launch_bounds__(MOST_THREADS) softmax_backward(const __grid_constant__ softmax_job job) {
  using A = number_of<T>;
  constexpr int n = packet_size<T>;
  __shared__ A shared[32];
  const int group = job.group, lane = static_cast<int>(threadIdx.x) % group;
  const row_operand *o = job.r.operands;
  each_row(job, n, [&](int64_t row, int64_t n_packets) {
    int64_t at[SOFTMAX_OPERANDS];
    row_offsets(job.r, row, at);
    packet<T> y_held[HELD > 0 ? HELD : 1], dy_held[HELD > 0 ? HELD : 1];
    A sum[1] = {0};
    each_packet<HELD>(lane, group, n_packets, [&](int v, int64_t p) {
      A y[n], dy[n];
      y_held[v] = load_packet<T>(job.r, o[SOFTMAX_FIRST], at[SOFTMAX_FIRST], p * n);
      dy_held[v] = load_packet<T>(job.r, o[SOFTMAX_SECOND], at[SOFTMAX_SECOND], p * n);
      unpack(y_held[v], y);
      unpack(dy_held[v], dy);
#pragma unroll
      for (int i = 0; i < n; i++) sum[0] += job.is_log ? dy[i] : y[i] * dy[i]; /* 0 after the row's end */
    });
    group_sum(sum, group, shared);
    each_packet<HELD>(lane, group, n_packets, [&](int v, int64_t p) {
      A y[n], dy[n];
      unpack(HELD > 0 ? y_held[v] : load_packet<T>(job.r, o[SOFTMAX_FIRST], at[SOFTMAX_FIRST], p * n), y);
      unpack(HELD > 0 ? dy_held[v] : load_packet<T>(job.r, o[SOFTMAX_SECOND], at[SOFTMAX_SECOND], p * n), dy);
#pragma unroll
      for (int i = 0; i < n; i++) y[i] = job.is_log ? dy[i] - exponential(y[i]) * sum[0] : y[i] * (dy[i] - sum[0]);
      store_packet(job.r, o[2], at[2], p * n, pack<T>(y));
    });
  });
}

template <class T> void launch(const softmax_job &job, const softmax_node &node, cudaStream_t stream) {
  const unsigned blocks = row_blocks(&job.r, node.threads), n = static_cast<unsigned>(node.threads.n_threads);
  const bool is_held = node.threads.is_held;
  if (node.is_gradient && is_held)
    softmax_backward<T, HELD_PACKETS><<<blocks, n, 0, stream>>>(job);
  else if (node.is_gradient)
    softmax_backward<T, 0><<<blocks, n, 0, stream>>>(job);
  else if (is_held)
    softmax_forward<T, HELD_PACKETS><<<blocks, n, 0, stream>>>(job);
  else
    softmax_forward<T, 0><<<blocks, n, 0, stream>>>(job);
}

eg_status prepare(egi_kernel_plan *plan, bool is_log, bool is_gradient) {
  softmax_node *node = EGI_NEW(plan->arena, softmax_node, 1);
  if (node == NULL) return EG_ERROR_MEMORY;
  const egi_tensor *out = &plan->outputs[0];
  int axis = 0;
  node->dtype = out->dtype;
  node->is_log = is_log;
  node->is_gradient = is_gradient;
  plan->params = node;
  if (element_kind_of(out->dtype) == ELEMENT_NONE) return egi_fail_types(plan);
  if (out->rank > 0 && !egi_normalise_axis(egi_node_int(egi_plan_node(plan), "axis", -1), out->rank, &axis))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis is outside the rank %d", out->rank);
  rows_builder b = rows_begin_along(&node->r, out, axis);
  bool fits = true;
  for (unsigned i = 0; i < (is_gradient ? 2u : 1u); i++) {
    const egi_tensor *in = &plan->inputs[i];
    if (in->dtype != out->dtype) return egi_fail_types(plan);
    fits = egi_tensor_count(in) == egi_tensor_count(out) && rows_add(&b, in) && fits;
  }
  if (!fits || !rows_add(&b, out))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "shapes of input and output differ");
  rows_finish(&b, packet_of(out->dtype));
  node->threads = row_threads_for(node->r.length, packet_of(out->dtype));
  return EG_OK;
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_softmax(egi_kernel_plan *plan) {
  return egi::prepare(plan, false, false);
}
extern "C" eg_status egi_cuda_prepare_log_softmax(egi_kernel_plan *plan) {
  return egi::prepare(plan, true, false);
}
extern "C" eg_status egi_cuda_prepare_softmax_grad(egi_kernel_plan *plan) {
  return egi::prepare(plan, false, true);
}
extern "C" eg_status egi_cuda_prepare_log_softmax_grad(egi_kernel_plan *plan) {
  return egi::prepare(plan, true, true);
}

extern "C" eg_status egi_cuda_run_softmax(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const softmax_node *node = static_cast<const softmax_node *>(call->params);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  if (node->r.count == 0 || node->r.length == 0) return EG_OK;
  softmax_job job = {node->r, node->threads.group, node->is_log};
  rows_set_data(&job.r, SOFTMAX_FIRST, &call->inputs[0]);
  if (node->is_gradient) rows_set_data(&job.r, SOFTMAX_SECOND, &call->inputs[1]);
  rows_set_data(&job.r, node->is_gradient ? 2 : 1, &call->outputs[0]);
  switch (node->dtype) {
  case EG_DTYPE_BF16:
    launch<__nv_bfloat16>(job, *node, stream);
    break;
  case EG_DTYPE_F16:
    launch<__half>(job, *node, stream);
    break;
  case EG_DTYPE_F64:
    launch<double>(job, *node, stream);
    break;
  default:
    launch<float>(job, *node, stream);
    break;
  }
  return egi_cuda_launched(ctx, "softmax");
}
