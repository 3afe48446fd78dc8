/* The operators Route and RouteGrad: a warp a token. Scores are f64, as on the CPU, so that both choose the same
 * experts where scores are close; of equal scores the lower expert wins. Rows are put in order by the launcher of
 * routing.h. */
#include <limits.h>
#include <math_constants.h>

#include "backend/cuda/operator.cuh"
#include "backend/cuda/routing.h"
#include "backend/cuda/token_rows.cuh"

extern "C" {
#include "graph/moe.h"
}

namespace egi {
namespace {

enum { LIMIT_EXPERTS = 1024, MANY_EXPERTS = 256, WARPS = 4, SCATTER_THREADS = 256 };
enum { OUTPUT_EXPERT, OUTPUT_SOURCE_ROW, OUTPUT_INVERSE, OUTPUT_OFFSETS, OUTPUT_WEIGHT };

/* What the router does; of egi_moe. */
struct router {
  int n_experts, top_k, groups, top_groups;
  int is_sigmoid, is_scored_before, is_normalised, is_group_best;
  double routed_scale;
};

struct route_node {
  router r;
  token_rows logits, out; /* out: of the gradient */
  element_kind logits_element, correction_element, weight_element;
  int64_t correction_stride, index_strides[3], n_tokens, n_rows;
  size_t chosen_at, pair_weight_at, sorted_weight_at, sort_at, missing_at[4];
  size_t sort_bytes;
};

struct route_job {
  router r;
  token_rows logits;
  const void *logits_data, *correction;
  element_kind logits_element, correction_element;
  int64_t correction_stride, n_tokens;
  int32_t *chosen;    /* [tokens, k] */
  float *pair_weight; /* [tokens, k] */
  /* gradient: */
  const int32_t *expert, *inverse;
  int64_t expert_stride, inverse_stride, d_weight_stride, n_rows;
  const void *d_weight;
  element_kind d_weight_element;
  token_rows out;
  void *out_data;
  egi_cuda_fault *fault;
};

/* A warp's room: scores, choice and one more number an expert, and a mark. */
struct warp_memory {
  double *scores, *choice, *more;
  unsigned char *is_taken;
};

int warps_of(int n_experts) {
  return n_experts > MANY_EXPERTS ? 1 : WARPS;
}

__host__ __device__ __forceinline__ int warp_bytes(int n_experts) {
  return 3 * n_experts * 8 + (n_experts + 7) / 8 * 8;
}

__device__ __forceinline__ warp_memory memory_of_warp(int n_experts) {
  extern __shared__ double shared[];
  char *base = reinterpret_cast<char *>(shared) + threadIdx.x / 32 * static_cast<unsigned>(warp_bytes(n_experts));
  double *numbers = reinterpret_cast<double *>(base);
  return {numbers, numbers + n_experts, numbers + 2 * n_experts,
          reinterpret_cast<unsigned char *>(numbers + 3 * n_experts)};
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ double warp_largest(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

/* The best of those that are not taken, the lower one of equals; -1 where all are. `skips_nan`: NaN are as taken. */
__device__ __forceinline__ int warp_best(const double *values, const unsigned char *is_taken, int n, bool skips_nan) {
  int best = -1;
  double value = 0.0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < n; i += 32) {
    const double own = values[i];
    if (is_taken[i] || (skips_nan && isnan(own)) || (best >= 0 && !(own > value))) continue;
    best = i;
    value = own;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, best, step);
    const double number = __shfl_xor_sync(0xffffffffu, value, step);
    const bool is_better = best < 0 || number > value || (!(value > number) && other < best);
    if (other >= 0 && is_better) {
      best = other;
      value = number;
    }
  }
  return __shfl_sync(0xffffffffu, best, 0);
}

__device__ __forceinline__ double sigmoid_of(double x) {
  return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

/* In place over n numbers. */
__device__ __forceinline__ void warp_softmax(double *values, int n) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double largest = -CUDART_INF, sum = 0.0;
  for (int i = lane; i < n; i += 32) largest = fmax(largest, values[i]);
  largest = warp_largest(largest);
  for (int i = lane; i < n; i += 32) sum += values[i] = exp(values[i] - largest);
  sum = warp_sum(sum);
  for (int i = lane; i < n; i += 32) values[i] /= sum;
  __syncwarp();
}

/* The logits of a token, and the scores they have before the choice. */
__device__ __forceinline__ void load_scores(const route_job &job, int64_t token, const warp_memory &m) {
  const router &r = job.r;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = job.logits.offset_of(token);
  __syncwarp();
  for (int e = lane; e < r.n_experts; e += 32) {
    const double logit =
        static_cast<double>(read_element(job.logits_data, row + e * job.logits.column_stride, job.logits_element));
    m.scores[e] = r.is_scored_before && r.is_sigmoid ? sigmoid_of(logit) : logit;
  }
  __syncwarp();
  if (r.is_scored_before && !r.is_sigmoid) warp_softmax(m.scores, r.n_experts);
}

/* Score of a group: its best expert, or the sum of its two best. */
__device__ __forceinline__ double group_score(const router &r, const double *choice, int size) {
  double best = -CUDART_INF, second = -CUDART_INF;
  for (int i = 0; i < size; i++) {
    if (choice[i] > best) {
      second = best;
      best = choice[i];
    } else if (choice[i] > second) {
      second = choice[i];
    }
  }
  return r.is_group_best || size < 2 ? best : best + second;
}

/* Experts of groups that are left out count as 0 in the choice. */
__device__ __forceinline__ void keep_groups(const router &r, const warp_memory &m) {
  const int lane = static_cast<int>(threadIdx.x) % 32, size = r.n_experts / r.groups;
  for (int g = lane; g < r.groups; g += 32) {
    m.more[g] = group_score(r, m.choice + g * size, size);
    m.is_taken[g] = 0;
  }
  __syncwarp();
  for (int n = 0; n < r.groups; n++) { /* the n-th best group */
    const int best = warp_best(m.more, m.is_taken, r.groups, true);
    if (best < 0) return;
    if (lane == 0) m.is_taken[best] = 1;
    for (int i = lane; n >= r.top_groups && i < size; i += 32) m.choice[best * size + i] = 0.0;
    __syncwarp();
  }
}

__device__ __forceinline__ void choose(const route_job &job, int64_t token, const warp_memory &m) {
  const router &r = job.r;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int e = lane; e < r.n_experts; e += 32) {
    m.choice[e] = m.scores[e];
    if (job.correction)
      m.choice[e] +=
          static_cast<double>(read_element(job.correction, e * job.correction_stride, job.correction_element));
  }
  __syncwarp();
  if (r.groups > 1) keep_groups(r, m);
  for (int e = lane; e < r.n_experts; e += 32) m.is_taken[e] = 0;
  __syncwarp();
  for (int j = 0; j < r.top_k; j++) {
    const int best = warp_best(m.choice, m.is_taken, r.n_experts, false);
    if (lane == 0) {
      m.is_taken[best] = 1;
      job.chosen[token * r.top_k + j] = best;
      m.more[j] = m.scores[best];
    }
    __syncwarp();
  }
}

/* `more` holds the chosen ones' scores before, and what they are weighed by after, but for the divisor, which is
 * returned. */
__device__ __forceinline__ double weigh(const router &r, const warp_memory &m) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double sum = 0.0;
  if (!r.is_scored_before && !r.is_sigmoid) warp_softmax(m.more, r.top_k);
  for (int j = lane; j < r.top_k; j += 32) {
    if (!r.is_scored_before && r.is_sigmoid) m.more[j] = sigmoid_of(m.more[j]);
    sum += m.more[j];
  }
  sum = warp_sum(sum);
  __syncwarp();
  return r.is_normalised && sum > 0.0 ? sum : 1.0;
}

__global__ void route_tokens(const route_job job) {
  const router &r = job.r;
  const warp_memory m = memory_of_warp(r.n_experts);
  const int lane = static_cast<int>(threadIdx.x) % 32, warps = static_cast<int>(blockDim.x) / 32;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; token < job.n_tokens;
       token += static_cast<int64_t>(gridDim.x) * warps) {
    load_scores(job, token, m);
    choose(job, token, m);
    const double divisor = weigh(r, m);
    for (int j = lane; j < r.top_k; j += 32)
      job.pair_weight[token * r.top_k + j] = static_cast<float>(m.more[j] / divisor * r.routed_scale);
  }
}

/* Gradient of the chosen scores from that of the weights: w_j = scale * s_j / divisor. `choice` holds it. */
__device__ __forceinline__ void through_normalisation(const router &r, const warp_memory &m, double divisor) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double inner = 0.0;
  for (int j = lane; j < r.top_k; j += 32) inner += m.choice[j] * m.more[j];
  inner = warp_sum(inner);
  for (int j = lane; j < r.top_k; j += 32)
    m.choice[j] = r.routed_scale * (r.is_normalised ? m.choice[j] - inner / divisor : m.choice[j]) / divisor;
  __syncwarp();
}

/* The pair's expert; -1 and a fault where the lists hold no such thing. */
__device__ __forceinline__ int expert_of_pair(const route_job &job, int64_t pair, int64_t *out_row) {
  const int64_t row = job.inverse[pair * job.inverse_stride];
  *out_row = row;
  if (row < 0 || row >= job.n_rows) {
    egi_cuda_raise(job.fault, EGI_CUDA_FAULT_INDEX, EGI_OP_RouteGrad, row);
    return -1;
  }
  const int expert = job.expert[row * job.expert_stride];
  if (expert >= 0 && expert < job.r.n_experts) return expert;
  egi_cuda_raise(job.fault, EGI_CUDA_FAULT_INDEX, EGI_OP_RouteGrad, expert);
  return -1;
}

/* The gradient of a token's logits, once `choice` has that of the chosen scores. */
__device__ __forceinline__ void store_gradient(const route_job &job, int64_t token, const warp_memory &m) {
  const router &r = job.r;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t out = job.out.offset_of(token);
  double inner = 0.0;
  for (int j = lane; j < r.top_k; j += 32) inner += m.choice[j] * m.more[j];
  inner = warp_sum(inner);
  for (int e = lane; e < r.n_experts; e += 32) {
    double gradient = r.is_scored_before && !r.is_sigmoid ? -inner * m.scores[e] : 0.0;
    for (int j = 0; j < r.top_k; j++) {
      int64_t row;
      if (expert_of_pair(job, token * r.top_k + j, &row) != e) continue;
      if (r.is_sigmoid)
        gradient = m.choice[j] * m.more[j] * (1.0 - m.more[j]);
      else
        gradient += m.choice[j] * m.more[j] - (r.is_scored_before ? 0.0 : inner * m.more[j]);
    }
    write_element(job.out_data, out + e * job.out.column_stride, job.logits_element, static_cast<float>(gradient));
  }
}

__global__ void route_gradients(const route_job job) {
  const router &r = job.r;
  const warp_memory m = memory_of_warp(r.n_experts);
  const int lane = static_cast<int>(threadIdx.x) % 32, warps = static_cast<int>(blockDim.x) / 32;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; token < job.n_tokens;
       token += static_cast<int64_t>(gridDim.x) * warps) {
    load_scores(job, token, m);
    for (int j = lane; j < r.top_k; j += 32) {
      int64_t row = 0;
      const int expert = expert_of_pair(job, token * r.top_k + j, &row);
      m.more[j] = expert >= 0 ? m.scores[expert] : 0.0;
      m.choice[j] =
          expert >= 0 ? static_cast<double>(read_element(job.d_weight, row * job.d_weight_stride, job.d_weight_element))
                      : 0.0;
    }
    __syncwarp();
    const double divisor = weigh(r, m);
    through_normalisation(r, m, divisor);
    store_gradient(job, token, m);
  }
}

/* Weights in another type than f32, in the order of rows. */
__global__ void __launch_bounds__(SCATTER_THREADS)
    scatter_weights(const float *weight, void *out, element_kind element, int64_t n_rows) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(SCATTER_THREADS) + threadIdx.x;
  if (i < n_rows) write_element(out, i, element, weight[i]);
}

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

eg_status read_router(egi_kernel_plan *plan, route_node *node) {
  const egi_tensor *logits = &plan->inputs[0];
  egi_moe moe;
  EG_TRY(egi_moe_read_router(plan->graph, plan->node, &moe));
  node->logits_element = element_of(logits->dtype);
  if (node->logits_element == ELEMENT_NONE) return egi_fail_types(plan);
  node->logits = token_rows_of(logits);
  node->n_tokens = node->logits.n_tokens;
  if (moe.n_experts > LIMIT_EXPERTS)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "%lld experts, kernels take at most %d",
                         static_cast<long long>(moe.n_experts), static_cast<int>(LIMIT_EXPERTS));
  if (moe.top_k < 1 || moe.top_k > moe.n_experts || node->n_tokens > (INT_MAX - (1 << 20)) / moe.top_k)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "%lld tokens are too many to route",
                         static_cast<long long>(node->n_tokens));
  node->n_rows = node->n_tokens * moe.top_k;
  node->r = {static_cast<int>(moe.n_experts),
             static_cast<int>(moe.top_k),
             static_cast<int>(moe.groups),
             static_cast<int>(moe.top_groups),
             moe.is_sigmoid,
             moe.is_scored_before,
             moe.is_normalised,
             moe.is_group_best,
             moe.routed_scale};
  return EG_OK;
}

route_job begin_job(const route_node *node, const egi_kernel_call *call) {
  route_job job = {};
  job.r = node->r;
  job.logits = node->logits;
  job.logits_data = call->inputs[0].data;
  job.logits_element = node->logits_element;
  job.n_tokens = node->n_tokens;
  job.n_rows = node->n_rows;
  job.fault = egi_cuda_stream_of(call)->fault;
  return job;
}

unsigned blocks_for(int64_t n_tokens, int warps) {
  const int64_t wanted = (n_tokens + warps - 1) / warps, most = 1 << 20;
  return static_cast<unsigned>(wanted < most ? wanted : most);
}

/* A result, or its place in the workspace where nobody wants it. */
int32_t *list_of(const egi_kernel_call *call, const route_node *node, unsigned output) {
  if (has_output(call->outputs, call->n_outputs, output)) return static_cast<int32_t *>(call->outputs[output].data);
  return reinterpret_cast<int32_t *>(workspace_start(call) + node->missing_at[output]);
}

eg_status sort_rows(eg_context *ctx, const egi_kernel_call *call, const route_node *node, const route_job &job,
                    float *sorted_weight) {
  egi_routing routing = {};
  routing.n_tokens = node->n_tokens;
  routing.k = node->r.top_k;
  routing.n_experts = node->r.n_experts;
  routing.chosen = job.chosen;
  routing.weight = sorted_weight ? job.pair_weight : nullptr;
  routing.offsets = list_of(call, node, OUTPUT_OFFSETS);
  routing.expert = list_of(call, node, OUTPUT_EXPERT);
  routing.source_row = list_of(call, node, OUTPUT_SOURCE_ROW);
  routing.inverse = list_of(call, node, OUTPUT_INVERSE);
  routing.sorted_weight = sorted_weight;
  routing.workspace = workspace_start(call) + node->sort_at;
  routing.workspace_bytes = node->sort_bytes;
  const egi_cuda_status status = egi_cuda_routing_sort(&routing, egi_cuda_stream_of(call)->stream);
  if (status == EGI_CUDA_OK) return EG_OK;
  if (status == EGI_CUDA_FAILED) return egi_cuda_launched(ctx, "routing sort");
  return egi_fail(ctx, EG_ERROR_DEVICE, "routing sort refuses its arguments (%d)", static_cast<int>(status));
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_route(egi_kernel_plan *plan) {
  egi::route_node *node = EGI_NEW(plan->arena, egi::route_node, 1);
  egi::workspace_room room = {0, true};
  if (!node) return EG_ERROR_MEMORY;
  EG_TRY(egi::read_router(plan, node));
  if (egi_plan_has_input(plan, 1)) {
    node->correction_element = egi::element_of(plan->inputs[1].dtype);
    node->correction_stride = plan->inputs[1].strides[0];
    if (node->correction_element == egi::ELEMENT_NONE) return egi_fail_types(plan);
  }
  if (egi::has_output(plan->outputs, plan->n_outputs, egi::OUTPUT_WEIGHT)) {
    node->weight_element = egi::element_of(plan->outputs[egi::OUTPUT_WEIGHT].dtype);
    if (node->weight_element == egi::ELEMENT_NONE) return egi_fail_types(plan);
  }
  node->chosen_at = room.take(node->n_rows, sizeof(int32_t));
  node->pair_weight_at = room.take(node->n_rows, sizeof(float));
  node->sorted_weight_at = room.take(node->n_rows, sizeof(float));
  node->sort_bytes = egi_cuda_routing_workspace(node->n_tokens, node->r.top_k, node->r.n_experts);
  node->sort_at = room.take(static_cast<int64_t>(node->sort_bytes), 1);
  for (unsigned i = 0; i < egi::OUTPUT_WEIGHT; i++)
    if (!egi::has_output(plan->outputs, plan->n_outputs, i))
      node->missing_at[i] = room.take(i == egi::OUTPUT_OFFSETS ? node->r.n_experts + 1 : node->n_rows, 4);
  plan->params = node;
  return egi::ask_for_room(plan, room);
}

extern "C" eg_status egi_cuda_run_route(eg_context *ctx, const egi_kernel_call *call) {
  const egi::route_node *node = static_cast<const egi::route_node *>(call->params);
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  char *workspace = egi::workspace_start(call);
  egi::route_job job = egi::begin_job(node, call);
  const int warps = egi::warps_of(node->r.n_experts);
  if (node->n_tokens == 0) {
    const size_t bytes = static_cast<size_t>(node->r.n_experts + 1) * sizeof(int32_t);
    EGI_CUDA_TRY(ctx, cudaMemsetAsync(egi::list_of(call, node, egi::OUTPUT_OFFSETS), 0, bytes, stream));
    return EG_OK;
  }
  job.correction = egi_call_has_input(call, 1) ? call->inputs[1].data : nullptr;
  job.correction_element = node->correction_element;
  job.correction_stride = node->correction_stride;
  job.chosen = reinterpret_cast<int32_t *>(workspace + node->chosen_at);
  job.pair_weight = reinterpret_cast<float *>(workspace + node->pair_weight_at);
  egi::route_tokens<<<egi::blocks_for(node->n_tokens, warps), static_cast<unsigned>(32 * warps),
                      static_cast<size_t>(warps * egi::warp_bytes(node->r.n_experts)), stream>>>(job);
  EG_TRY(egi_cuda_launched(ctx, "route_tokens"));
  if (!egi::has_output(call->outputs, call->n_outputs, egi::OUTPUT_WEIGHT))
    return egi::sort_rows(ctx, call, node, job, nullptr);
  void *weight = call->outputs[egi::OUTPUT_WEIGHT].data;
  float *sorted = node->weight_element == egi::ELEMENT_F32
                      ? static_cast<float *>(weight)
                      : reinterpret_cast<float *>(workspace + node->sorted_weight_at);
  EG_TRY(egi::sort_rows(ctx, call, node, job, sorted));
  if (node->weight_element == egi::ELEMENT_F32) return EG_OK;
  const int64_t n_blocks = (node->n_rows + egi::SCATTER_THREADS - 1) / egi::SCATTER_THREADS;
  egi::scatter_weights<<<static_cast<unsigned>(n_blocks), egi::SCATTER_THREADS, 0, stream>>>(
      sorted, weight, node->weight_element, node->n_rows);
  return egi_cuda_launched(ctx, "scatter_weights");
}

extern "C" eg_status egi_cuda_prepare_route_grad(egi_kernel_plan *plan) {
  egi::route_node *node = EGI_NEW(plan->arena, egi::route_node, 1);
  if (!node) return EG_ERROR_MEMORY;
  EG_TRY(egi::read_router(plan, node));
  node->weight_element = egi::element_of(plan->inputs[3].dtype);
  if (node->weight_element == egi::ELEMENT_NONE || plan->outputs[0].dtype != plan->inputs[0].dtype)
    return egi_fail_types(plan);
  for (unsigned i = 0; i < 3; i++) node->index_strides[i] = plan->inputs[1 + i].strides[0];
  if (plan->inputs[1].dims[0] != node->n_rows)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "a routing of %lld rows, not %lld",
                         static_cast<long long>(plan->inputs[1].dims[0]), static_cast<long long>(node->n_rows));
  node->out = egi::token_rows_of(&plan->outputs[0]);
  plan->params = node;
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_route_grad(eg_context *ctx, const egi_kernel_call *call) {
  const egi::route_node *node = static_cast<const egi::route_node *>(call->params);
  const int warps = egi::warps_of(node->r.n_experts);
  egi::route_job job = egi::begin_job(node, call);
  if (node->n_tokens == 0) return EG_OK;
  job.expert = static_cast<const int32_t *>(call->inputs[1].data);
  job.inverse = static_cast<const int32_t *>(call->inputs[2].data);
  job.d_weight = call->inputs[3].data;
  job.expert_stride = node->index_strides[0];
  job.inverse_stride = node->index_strides[1];
  job.d_weight_stride = node->index_strides[2];
  job.d_weight_element = node->weight_element;
  job.out = node->out;
  job.out_data = call->outputs[0].data;
  egi::route_gradients<<<egi::blocks_for(node->n_tokens, warps), static_cast<unsigned>(32 * warps),
                         static_cast<size_t>(warps * egi::warp_bytes(node->r.n_experts)),
                         egi_cuda_stream_of(call)->stream>>>(job);
  return egi_cuda_launched(ctx, "route_gradients");
}
