/* GLU, Swish and their gradients: elementwise over any strides, a packet of 16 bytes a thread.
 * Computed in f32 (f64 for f64), rounded once. No reductions: deterministic. */
#include "backend/cuda/rows.cuh"
#include "backend/cuda/gated_math.cuh"

#include <type_traits>

namespace egi {
namespace {

/* Operands of the rows. Swish has a gate alone. */
enum { GATED_GATE, GATED_UP, GATED_DY, GATED_OUT, GATED_SECOND, GATED_OPERANDS };

struct gated_node {
  rows r;
  eg_dtype dtype;
  gate_kind kind;
  bool is_single, is_gradient;
  float alpha, limit, offset;
  int inputs[3]; /* of the call, for gate, up, dY; -1: none */
  bool has_out[2];
};

struct gated_job {
  rows r;
  gate_kind kind;
  bool is_single, has_out[2];
  float alpha, limit, offset;
};

/* f with the kind as a constant. */
template <class F> __device__ __forceinline__ void with_kind(gate_kind kind, F f) {
  switch (kind) {
  case GATE_SILU:
    return f(std::integral_constant<gate_kind, GATE_SILU>());
  case GATE_GELU:
    return f(std::integral_constant<gate_kind, GATE_GELU>());
  case GATE_GELU_TANH:
    return f(std::integral_constant<gate_kind, GATE_GELU_TANH>());
  case GATE_RELU:
    return f(std::integral_constant<gate_kind, GATE_RELU>());
  case GATE_SIGMOID:
    return f(std::integral_constant<gate_kind, GATE_SIGMOID>());
  default:
    return f(std::integral_constant<gate_kind, GATE_IDENTITY>());
  }
}

/* Without a limit it is infinite and the comparisons fail. */
template <class T, bool IS_GRADIENT>
__global__ void __launch_bounds__(ROW_THREADS) gated(const __grid_constant__ gated_job job) {
  using A = number_of<T>;
  constexpr int n = packet_size<T>;
  const row_operand *o = job.r.operands;
  const A alpha = static_cast<A>(job.alpha), limit = static_cast<A>(job.limit), offset = static_cast<A>(job.offset);
  const int64_t total = job.r.count * job.r.row_packets, step = static_cast<int64_t>(gridDim.x) * ROW_THREADS;
  for (int64_t p = blockIdx.x * static_cast<int64_t>(ROW_THREADS) + threadIdx.x; p < total; p += step) {
    int64_t place, at[GATED_OPERANDS];
    row_offsets(job.r, row_of_packet(job.r, p, &place), at);
    place *= n;
    A gate[n], up[n], dy[n];
    const packet<T> gates = load_packet<T>(job.r, o[GATED_GATE], at[GATED_GATE], place);
    packet<T> ups, gradients;
    if (!job.is_single) ups = load_packet<T>(job.r, o[GATED_UP], at[GATED_UP], place);
    if (IS_GRADIENT) gradients = load_packet<T>(job.r, o[GATED_DY], at[GATED_DY], place);
    unpack(gates, gate);
    if (!job.is_single) unpack(ups, up);
    if (IS_GRADIENT) unpack(gradients, dy);
    with_kind(job.kind, [&](auto kind) {
#pragma unroll
      for (int i = 0; i < n; i++) {
        const A other = job.is_single ? static_cast<A>(1) : up[i];
        const A u = (other < -limit ? -limit : other > limit ? limit : other) + offset;
        const auto a = gate_at<sizeof(T) == 2>(decltype(kind)::value, gate[i] > limit ? limit : gate[i], alpha);
        if (!IS_GRADIENT) {
          gate[i] = a.value * u;
          continue;
        }
        gate[i] = gate[i] > limit ? static_cast<A>(0) : dy[i] * u * a.slope;
        up[i] = other < -limit || other > limit ? static_cast<A>(0) : dy[i] * a.value;
      }
    });
    if (job.has_out[0]) store_packet(job.r, o[GATED_OUT], at[GATED_OUT], place, pack<T>(gate));
    if (IS_GRADIENT && job.has_out[1]) store_packet(job.r, o[GATED_SECOND], at[GATED_SECOND], place, pack<T>(up));
  }
}

template <class T> void launch(const gated_job &job, bool is_gradient, cudaStream_t stream) {
  const unsigned blocks = packet_blocks(&job.r);
  if (blocks == 0) return;
  if (is_gradient)
    gated<T, true><<<blocks, ROW_THREADS, 0, stream>>>(job);
  else
    gated<T, false><<<blocks, ROW_THREADS, 0, stream>>>(job);
}

eg_status read_activation(const egi_kernel_plan *plan, gated_node *node) {
  static const char *const names[GATE_COUNT] = {"silu", "gelu", "gelu_tanh", "relu", "sigmoid", "identity"};
  const egi_node *n = egi_plan_node(plan);
  const char *name = egi_node_string(n, "activation", "silu");
  int index = 0;
  while (index < GATE_COUNT && strcmp(names[index], name) != 0) index++;
  if (index == GATE_COUNT)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "unknown activation \"%s\"", name);
  const float limit = egi_node_float(n, "limit", 0.0f);
  node->kind = static_cast<gate_kind>(index);
  node->alpha = egi_node_float(n, "alpha", 1.0f);
  node->limit = limit > 0.0f ? limit : INFINITY;
  node->offset = egi_node_float(n, "offset", 0.0f);
  return EG_OK;
}

/* All operands have one shape and one type. */
eg_status check_operands(egi_kernel_plan *plan, gated_node *node) {
  const egi_tensor absent = {};
  const egi_tensor *operands[GATED_OPERANDS];
  for (int k = 0; k < 3; k++) operands[k] = node->inputs[k] >= 0 ? &plan->inputs[node->inputs[k]] : &absent;
  for (unsigned k = 0; k < 2; k++) {
    node->has_out[k] = has_output(plan->outputs, plan->n_outputs, k);
    operands[GATED_OUT + k] = node->has_out[k] ? &plan->outputs[k] : &absent;
  }
  node->dtype = plan->inputs[0].dtype;
  rows_builder b = rows_begin_elements(&node->r, &plan->inputs[0]);
  bool fits = true;
  for (int k = 0; k < GATED_OPERANDS; k++) {
    if (operands[k] != &absent && operands[k]->dtype != node->dtype) return egi_fail_types(plan);
    fits = rows_add(&b, operands[k]) && fits;
  }
  if (element_kind_of(node->dtype) == ELEMENT_NONE) return egi_fail_types(plan);
  if (!fits) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the shapes of the operands differ");
  rows_finish(&b, packet_of(node->dtype));
  return EG_OK;
}

gated_node *new_node(egi_kernel_plan *plan, bool is_single, bool is_gradient) {
  gated_node *node = EGI_NEW(plan->arena, gated_node, 1);
  if (node == NULL) return NULL;
  node->is_single = is_single;
  node->is_gradient = is_gradient;
  node->inputs[0] = 0;
  node->inputs[1] = is_single ? -1 : 1;
  node->inputs[2] = is_gradient ? (is_single ? 1 : 2) : -1;
  plan->params = node;
  return node;
}

eg_status prepare(egi_kernel_plan *plan, bool is_single) {
  gated_node *node = new_node(plan, is_single, plan->n_inputs == (is_single ? 2u : 3u));
  if (node == NULL) return EG_ERROR_MEMORY;
  EG_TRY(read_activation(plan, node));
  return check_operands(plan, node);
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_glu(egi_kernel_plan *plan) {
  return egi::prepare(plan, false);
}

extern "C" eg_status egi_cuda_prepare_swish(egi_kernel_plan *plan) {
  return egi::prepare(plan, true);
}

extern "C" eg_status egi_cuda_run_gated(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const gated_node *node = static_cast<const gated_node *>(call->params);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  gated_job job = {node->r,     node->kind,  node->is_single, {node->has_out[0], node->has_out[1]},
                   node->alpha, node->limit, node->offset};
  for (int k = 0; k < 3; k++)
    if (node->inputs[k] >= 0) rows_set_data(&job.r, k, &call->inputs[node->inputs[k]]);
  for (int k = 0; k < 2; k++)
    if (node->has_out[k]) rows_set_data(&job.r, GATED_OUT + k, &call->outputs[k]);
  switch (node->dtype) {
  case EG_DTYPE_BF16:
    launch<__nv_bfloat16>(job, node->is_gradient, stream);
    break;
  case EG_DTYPE_F16:
    launch<__half>(job, node->is_gradient, stream);
    break;
  case EG_DTYPE_F64:
    launch<double>(job, node->is_gradient, stream);
    break;
  default:
    launch<float>(job, node->is_gradient, stream);
    break;
  }
  return egi_cuda_launched(ctx, "gated");
}
