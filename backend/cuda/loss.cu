/* LogProbability and its gradient: the log-probability of each row's label, from logits. Rows without a label give 0
 * and get no gradient. A row's largest logit and the sum of exponentials are found in one reading, each thread for its
 * packets, joined in a fixed tree. */
#include "backend/cuda/rows.cuh"

namespace egi {
namespace {

constexpr int64_t LABEL_NONE = -100;

/* Operands of the rows: the second and third are logp and lse, or, of the gradient, lse and d logp. */
enum { LOSS_LOGITS, LOSS_LABELS, LOSS_FIRST, LOSS_SECOND, LOSS_OUT, LOSS_OPERANDS };

struct loss_node {
  rows r;
  row_threads threads;
  eg_dtype dtype;
  bool is_gradient;
};

struct loss_job {
  rows r;
  int group, op;
  egi_cuda_fault *fault;
};

__device__ __forceinline__ int64_t label_of(const loss_job &job, int64_t at) {
  const int64_t label = reinterpret_cast<const int64_t *>(job.r.operands[LOSS_LABELS].data)[at];
  if (label == LABEL_NONE || (label >= 0 && label < job.r.length)) return label;
  egi_cuda_raise(job.fault, EGI_CUDA_FAULT_INDEX, job.op, label);
  return LABEL_NONE;
}

__device__ __forceinline__ float exponential(float x) {
  return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}

template <class T> __global__ void __launch_bounds__(MOST_THREADS) loss_forward(const __grid_constant__ loss_job job) {
  using A = number_of<T>;
  constexpr int n = packet_size<T>;
  constexpr A lowest = static_cast<A>(-INFINITY);
  __shared__ A shared[32];
  const int group = job.group, lane = static_cast<int>(threadIdx.x) % group;
  const int64_t rows_a_block = blockDim.x / static_cast<unsigned>(group);
  const row_operand *o = job.r.operands;
  for (int64_t base = blockIdx.x * rows_a_block; base < job.r.count; base += gridDim.x * rows_a_block) {
    const int64_t row = base + static_cast<int>(threadIdx.x) / group;
    int64_t at[LOSS_OUT];
    row_offsets(job.r, row < job.r.count ? row : 0, at);
    const int64_t label = row < job.r.count ? label_of(job, at[LOSS_LABELS]) : LABEL_NONE;
    const int64_t n_packets = label == LABEL_NONE ? 0 : (job.r.length + n - 1) / n;
    A largest = lowest, sum[1] = {0}, most[1];
    each_packet<0>(lane, group, n_packets, [&](int, int64_t p) {
      A x[n], above = largest;
      unpack(load_packet<T>(job.r, o[LOSS_LOGITS], at[LOSS_LOGITS], p * n), x);
#pragma unroll
      for (int i = 0; i < n; i++) {
        if (p * n + i >= job.r.length) x[i] = lowest;
        above = x[i] > above ? x[i] : above;
      }
      if (above > largest) sum[0] *= exponential(largest - above);
      largest = above;
#pragma unroll
      for (int i = 0; i < n; i++) sum[0] += x[i] == lowest ? static_cast<A>(0) : exponential(x[i] - largest);
    });
    most[0] = largest;
    group_largest(most, group, shared);
    if (largest != lowest) sum[0] *= exponential(largest - most[0]);
    group_sum(sum, group, shared);
    if (lane != 0 || row >= job.r.count) continue;
    A log_probability = 0, lse = 0;
    if (label != LABEL_NONE) {
      const int64_t place = at[LOSS_LOGITS] + column_offset(job.r, o[LOSS_LOGITS], label);
      lse = most[0] == lowest ? static_cast<A>(NAN) : most[0] + log(sum[0]);
      log_probability = read_number<A>(o[LOSS_LOGITS].data, place, o[LOSS_LOGITS].kind) - lse;
    }
    write_number(o[LOSS_FIRST].data, at[LOSS_FIRST], o[LOSS_FIRST].kind, log_probability);
    write_number(o[LOSS_SECOND].data, at[LOSS_SECOND], o[LOSS_SECOND].kind, lse);
  }
}

/* d logits = d logp · (one-hot - softmax). */
template <class T> __global__ void __launch_bounds__(ROW_THREADS) loss_backward(const __grid_constant__ loss_job job) {
  using A = number_of<T>;
  constexpr int n = packet_size<T>;
  const row_operand *o = job.r.operands;
  const int64_t total = job.r.count * job.r.row_packets, step = static_cast<int64_t>(gridDim.x) * ROW_THREADS;
  for (int64_t p = blockIdx.x * static_cast<int64_t>(ROW_THREADS) + threadIdx.x; p < total; p += step) {
    int64_t place, at[LOSS_OPERANDS];
    row_offsets(job.r, row_of_packet(job.r, p, &place), at);
    place *= n;
    A x[n] = {};
    const int64_t label = label_of(job, at[LOSS_LABELS]);
    if (label != LABEL_NONE) {
      const A lse = read_number<A>(o[LOSS_FIRST].data, at[LOSS_FIRST], o[LOSS_FIRST].kind);
      const A gradient = read_number<A>(o[LOSS_SECOND].data, at[LOSS_SECOND], o[LOSS_SECOND].kind);
      unpack(load_packet<T>(job.r, o[LOSS_LOGITS], at[LOSS_LOGITS], place), x);
#pragma unroll
      for (int i = 0; i < n; i++)
        x[i] = (place + i == label ? gradient : static_cast<A>(0)) - gradient * exponential(x[i] - lse);
    }
    store_packet(job.r, o[LOSS_OUT], at[LOSS_OUT], place, pack<T>(x));
  }
}

template <class T> void launch(const loss_job &job, const loss_node &node, cudaStream_t stream) {
  if (!node.is_gradient)
    loss_forward<T>
        <<<row_blocks(&job.r, node.threads), static_cast<unsigned>(node.threads.n_threads), 0, stream>>>(job);
  else if (packet_blocks(&job.r) > 0)
    loss_backward<T><<<packet_blocks(&job.r), ROW_THREADS, 0, stream>>>(job);
}

eg_status prepare(egi_kernel_plan *plan, bool is_gradient) {
  loss_node *node = EGI_NEW(plan->arena, loss_node, 1);
  if (node == NULL) return EG_ERROR_MEMORY;
  const egi_tensor *logits = &plan->inputs[0], *labels = &plan->inputs[1];
  const egi_tensor *first = is_gradient ? &plan->inputs[2] : &plan->outputs[0];
  const egi_tensor *second = is_gradient ? &plan->inputs[3] : &plan->outputs[1];
  node->dtype = logits->dtype;
  node->is_gradient = is_gradient;
  plan->params = node;
  const bool has_types = element_kind_of(logits->dtype) != ELEMENT_NONE && labels->dtype == EG_DTYPE_I64 &&
                         element_kind_of(first->dtype) != ELEMENT_NONE &&
                         element_kind_of(second->dtype) != ELEMENT_NONE;
  if (!has_types || (is_gradient && plan->outputs[0].dtype != logits->dtype)) return egi_fail_types(plan);
  if (logits->rank < 1)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "logits have no dim for the classes");
  rows_builder b = rows_begin(&node->r, logits, logits->rank - 1);
  const bool fits = rows_add(&b, logits) && rows_add_numbers(&b, labels) && rows_add_numbers(&b, first) &&
                    rows_add_numbers(&b, second) && (!is_gradient || rows_add(&b, &plan->outputs[0]));
  if (!fits) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "labels do not fit the rows of the logits");
  rows_finish(&b, packet_of(logits->dtype));
  node->threads = row_threads_for(node->r.length, packet_of(logits->dtype));
  return EG_OK;
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_log_probability(egi_kernel_plan *plan) {
  return egi::prepare(plan, false);
}
extern "C" eg_status egi_cuda_prepare_log_probability_grad(egi_kernel_plan *plan) {
  return egi::prepare(plan, true);
}

extern "C" eg_status egi_cuda_run_log_probability(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const loss_node *node = static_cast<const loss_node *>(call->params);
  const egi_cuda_stream *s = egi_cuda_stream_of(call);
  if (node->r.count == 0) return EG_OK;
  loss_job job = {node->r, node->threads.group, node->is_gradient ? EGI_OP_LogProbabilityGrad : EGI_OP_LogProbability,
                  s->fault};
  rows_set_data(&job.r, LOSS_LOGITS, &call->inputs[0]);
  rows_set_data(&job.r, LOSS_LABELS, &call->inputs[1]);
  rows_set_data(&job.r, LOSS_FIRST, node->is_gradient ? &call->inputs[2] : &call->outputs[0]);
  rows_set_data(&job.r, LOSS_SECOND, node->is_gradient ? &call->inputs[3] : &call->outputs[1]);
  if (node->is_gradient) rows_set_data(&job.r, LOSS_OUT, &call->outputs[0]);
  switch (node->dtype) {
  case EG_DTYPE_BF16:
    launch<__nv_bfloat16>(job, *node, s->stream);
    break;
  case EG_DTYPE_F16:
    launch<__half>(job, *node, s->stream);
    break;
  case EG_DTYPE_F64:
    launch<double>(job, *node, s->stream);
    break;
  default:
    launch<float>(job, *node, s->stream);
    break;
  }
  return egi_cuda_launched(ctx, "log_probability");
}
