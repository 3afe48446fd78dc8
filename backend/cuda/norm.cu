/* LayerNormalization-17 and RMSNormalization-23 over rows (the dims from `axis` on), and what their gradients check as
 * well. Sums are f32 (f64 for f64) in trees that the row's length fixes; a row is read once where its threads hold it.
 */
#include "backend/cuda/norm.cuh"

namespace egi {

eg_status norm_check(egi_kernel_plan *plan, norm_node *node, int dy) {
  const egi_node *n = egi_plan_node(plan);
  const egi_tensor *x = &plan->inputs[0], *scale = &plan->inputs[1], *out = &plan->outputs[0];
  const egi_tensor absent = {};
  int axis = 0;
  node->dtype = x->dtype;
  node->epsilon = static_cast<double>(egi_node_float(n, "epsilon", 1e-5f));
  node->has_out = out->dtype != EG_DTYPE_UNDEFINED;
  if (element_kind_of(x->dtype) == ELEMENT_NONE || (node->has_out && out->dtype != x->dtype))
    return egi_fail_types(plan);
  if (!egi_normalise_axis(egi_node_int(n, "axis", -1), x->rank, &axis))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis is outside the rank %d", x->rank);
  const egi_tensor *mean = &absent, *deviation = &absent, *last = &absent;
  if (dy >= 0) {
    mean = node->is_rms ? &absent : &plan->inputs[2];
    deviation = node->is_rms ? &absent : &plan->inputs[3];
    last = &plan->inputs[dy];
    if (last->dtype != x->dtype) return egi_fail_types(plan);
  } else if (!node->is_rms) {
    if (has_output(plan->outputs, plan->n_outputs, 1)) mean = &plan->outputs[1];
    if (has_output(plan->outputs, plan->n_outputs, 2)) deviation = &plan->outputs[2];
    if (egi_plan_has_input(plan, 2)) last = &plan->inputs[2];
  }
  rows_builder b = rows_begin(&node->r, x, axis);
  const egi_tensor *const operands[] = {x, out, scale, mean, deviation, last};
  bool fits = true;
  for (int k = 0; k < ROW_OPERANDS; k++) {
    fits = rows_add(&b, operands[k]) && fits;
    if (operands[k]->dtype != EG_DTYPE_UNDEFINED && node->r.operands[k].kind == ELEMENT_NONE)
      return egi_fail_types(plan);
  }
  const bool is_row = rows_is_shared(&node->r, NORM_SCALE) && (dy >= 0 || rows_is_shared(&node->r, NORM_BIAS));
  if (!fits || !is_row)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "an operand does not fit the normalised dims");
  const int packet = packet_of(x->dtype);
  rows_finish(&b, packet);
  node->threads = row_threads_for(node->r.length, packet);
  return EG_OK;
}

namespace {

/* x less the mean, in the packet of a row: what is after the row's end does not count. */
template <class T, class A>
__device__ __forceinline__ A squares(const packet<T> &p, int64_t first, int64_t length, A mean) {
  A x[packet_size<T>], sum = 0;
  unpack(p, x);
#pragma unroll
  for (int i = 0; i < packet_size<T>; i++) {
    const A centred = x[i] - mean;
    sum += first + i < length ? centred * centred : static_cast<A>(0);
  }
  return sum;
}

template <class T, int HELD>
__device__ __forceinline__ void write_row(const norm_job &job, const packet<T> *held, const int64_t (&at)[ROW_OPERANDS],
                                          int64_t n_packets, number_of<T> mean, number_of<T> factor) {
  using A = number_of<T>;
  constexpr int n = packet_size<T>;
  const row_operand *o = job.r.operands;
  each_packet<HELD>(static_cast<int>(threadIdx.x) % job.group, job.group, n_packets, [&](int v, int64_t p) {
    A x[n], scale[n];
    unpack(HELD > 0 ? held[v] : load_packet<T>(job.r, o[NORM_X], at[NORM_X], p * n), x);
    load_numbers<n>(job.r, o[NORM_SCALE], 0, p * n, scale);
#pragma unroll
    for (int i = 0; i < n; i++) x[i] = (x[i] - mean) * factor * scale[i];
    if (job.has_bias) {
      load_numbers<n>(job.r, o[NORM_BIAS], 0, p * n, scale);
#pragma unroll
      for (int i = 0; i < n; i++) x[i] += scale[i];
    }
    store_packet(job.r, o[NORM_OUT], at[NORM_OUT], p * n, pack<T>(x));
  });
}

template <class T, int HELD>
__global__ void __launch_bounds__(MOST_THREADS) norm_forward(const __grid_constant__ norm_job job) {
  using A = number_of<T>;
  constexpr int n = packet_size<T>;
  __shared__ A shared[32];
  const int group = job.group, lane = static_cast<int>(threadIdx.x) % group;
  const int64_t rows_a_block = blockDim.x / static_cast<unsigned>(group);
  const row_operand *o = job.r.operands;
  for (int64_t base = blockIdx.x * rows_a_block; base < job.r.count; base += gridDim.x * rows_a_block) {
    const int64_t row = base + static_cast<int>(threadIdx.x) / group;
    const int64_t n_packets = row < job.r.count ? (job.r.length + n - 1) / n : 0;
    int64_t at[ROW_OPERANDS];
    row_offsets(job.r, row < job.r.count ? row : 0, at);
    packet<T> held[HELD > 0 ? HELD : 1];
    A sum[1] = {0}, mean = 0;
    each_packet<HELD>(lane, group, n_packets,
                      [&](int v, int64_t p) { held[v] = load_packet<T>(job.r, o[NORM_X], at[NORM_X], p * n); });
    if (!job.is_rms) {
      each_packet<HELD>(lane, group, n_packets, [&](int v, int64_t p) {
        A x[n];
        unpack(HELD > 0 ? held[v] : load_packet<T>(job.r, o[NORM_X], at[NORM_X], p * n), x);
#pragma unroll
        for (int i = 0; i < n; i++) sum[0] += x[i]; /* 0 after the row's end */
      });
      group_sum(sum, group, shared);
      mean = sum[0] / static_cast<A>(job.r.length);
      sum[0] = 0;
    }
    each_packet<HELD>(lane, group, n_packets, [&](int v, int64_t p) {
      const packet<T> x = HELD > 0 ? held[v] : load_packet<T>(job.r, o[NORM_X], at[NORM_X], p * n);
      sum[0] += squares<T, A>(x, p * n, job.r.length, mean);
    });
    group_sum(sum, group, shared);
    const A factor = static_cast<A>(1) / sqrt(sum[0] / static_cast<A>(job.r.length) + static_cast<A>(job.epsilon));
    write_row<T, HELD>(job, held, at, n_packets, mean, factor);
    if (lane != 0 || row >= job.r.count) continue;
    if (job.has_mean) write_number(o[NORM_MEAN].data, at[NORM_MEAN], o[NORM_MEAN].kind, mean);
    if (job.has_deviation) write_number(o[NORM_DEVIATION].data, at[NORM_DEVIATION], o[NORM_DEVIATION].kind, factor);
  }
}

template <class T> void launch(const norm_job &job, const row_threads &threads, cudaStream_t stream) {
  const unsigned blocks = row_blocks(&job.r, threads), n = static_cast<unsigned>(threads.n_threads);
  if (threads.is_held)
    norm_forward<T, HELD_PACKETS><<<blocks, n, 0, stream>>>(job);
  else
    norm_forward<T, 0><<<blocks, n, 0, stream>>>(job);
}

eg_status prepare(egi_kernel_plan *plan, bool is_rms) {
  norm_node *node = EGI_NEW(plan->arena, norm_node, 1);
  if (node == NULL) return EG_ERROR_MEMORY;
  node->is_rms = is_rms;
  plan->params = node;
  return norm_check(plan, node, -1);
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_layer_norm(egi_kernel_plan *plan) {
  return egi::prepare(plan, false);
}

extern "C" eg_status egi_cuda_prepare_rms_norm(egi_kernel_plan *plan) {
  return egi::prepare(plan, true);
}

extern "C" eg_status egi_cuda_run_norm(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const norm_node *node = static_cast<const norm_node *>(call->params);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  if (node->r.count == 0) return EG_OK;
  norm_job job = {node->r, node->threads.group, node->is_rms, true, false, false, false, node->epsilon,
                  0,       {NULL, NULL}};
  rows_set_data(&job.r, NORM_X, &call->inputs[0]);
  rows_set_data(&job.r, NORM_OUT, &call->outputs[0]);
  rows_set_data(&job.r, NORM_SCALE, &call->inputs[1]);
  job.has_mean = !node->is_rms && has_output(call->outputs, call->n_outputs, 1);
  job.has_deviation = !node->is_rms && has_output(call->outputs, call->n_outputs, 2);
  job.has_bias = !node->is_rms && egi_call_has_input(call, 2);
  if (job.has_mean) rows_set_data(&job.r, NORM_MEAN, &call->outputs[1]);
  if (job.has_deviation) rows_set_data(&job.r, NORM_DEVIATION, &call->outputs[2]);
  if (job.has_bias) rows_set_data(&job.r, NORM_BIAS, &call->inputs[2]);
  switch (node->dtype) {
  case EG_DTYPE_BF16:
    launch<__nv_bfloat16>(job, node->threads, stream);
    break;
  case EG_DTYPE_F16:
    launch<__half>(job, node->threads, stream);
    break;
  case EG_DTYPE_F64:
    launch<double>(job, node->threads, stream);
    break;
  default:
    launch<float>(job, node->threads, stream);
    break;
  }
  return egi_cuda_launched(ctx, "norm_forward");
}
