/* Accumulate, GradientNorm and AdamW over flat f32 states, with the step state where it lies on the device: the host
 * neither reads nor waits. The norm is summed in f64, over chunks and then over their sums, in fixed trees; AdamW gives
 * the CPU's bits. */
#include "backend/cuda/optimizer.cuh"
#include "backend/cuda/rows.cuh"

namespace egi {

eg_status check_step(const egi_kernel_plan *plan, unsigned input) {
  const egi_tensor *step = &plan->inputs[input];
  if (step->dtype != EG_DTYPE_U8) return egi_fail_types(plan);
  if (egi_tensor_count(step) < static_cast<int64_t>(sizeof(egi_step_state)))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the step state has %lld bytes, not %zu",
                         static_cast<long long>(egi_tensor_count(step)), sizeof(egi_step_state));
  if (step->rank == 1 && step->strides[0] == 1) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "the step state is not contiguous");
}

namespace {

const egi_step_state *step_of(const egi_kernel_call *call, unsigned input) {
  return static_cast<const egi_step_state *>(call->inputs[input].data);
}

/* ---- Accumulate ------------------------------------------------------------------------------------------------- */

enum { ACCUMULATE_STATE, ACCUMULATE_GRADIENT };

struct accumulate_job {
  rows r;
  const egi_step_state *step;
};

__global__ void __launch_bounds__(ROW_THREADS) accumulate(const __grid_constant__ accumulate_job job) {
  const row_operand &state = job.r.operands[ACCUMULATE_STATE], &gradient = job.r.operands[ACCUMULATE_GRADIENT];
  const bool has_gradients = job.step->has_gradients != 0;
  const int64_t total = job.r.count * job.r.row_packets, step = static_cast<int64_t>(gridDim.x) * ROW_THREADS;
  for (int64_t p = blockIdx.x * static_cast<int64_t>(ROW_THREADS) + threadIdx.x; p < total; p += step) {
    int64_t place, at[2];
    row_offsets(job.r, row_of_packet(job.r, p, &place), at);
    float added[4], sum[4];
    load_numbers(job.r, gradient, at[ACCUMULATE_GRADIENT], place * 4, added);
    if (has_gradients) {
      unpack(load_packet<float>(job.r, state, at[ACCUMULATE_STATE], place * 4), sum);
#pragma unroll
      for (int i = 0; i < 4; i++) added[i] += sum[i];
    }
    store_packet(job.r, state, at[ACCUMULATE_STATE], place * 4, pack<float>(added));
  }
}

/* ---- GradientNorm ----------------------------------------------------------------------------------------------- */

enum { CHUNK = 16384 };

struct norm_sum_job {
  const float *gradients;
  const egi_step_state *step;
  double *sums; /* of the chunks */
  float *norm;
  int64_t n, n_chunks;
  bool is_vector;
};

__device__ __forceinline__ double square(float x) {
  return static_cast<double>(x) * static_cast<double>(x);
}

__global__ void __launch_bounds__(ROW_THREADS) sum_chunk(const __grid_constant__ norm_sum_job job) {
  __shared__ double shared[32];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * CHUNK;
  const int64_t end = start + CHUNK < job.n ? start + CHUNK : job.n;
  double sum[1] = {0.0};
  for (int64_t i = start + 4 * threadIdx.x; i < end; i += 4 * ROW_THREADS) {
    if (job.is_vector && i + 4 <= end) {
      const float4 x = *reinterpret_cast<const float4 *>(job.gradients + i);
      sum[0] += square(x.x) + square(x.y) + square(x.z) + square(x.w);
      continue;
    }
    double part[4] = {0.0, 0.0, 0.0, 0.0};
    for (int k = 0; k < 4 && i + k < end; k++) part[k] = square(job.gradients[i + k]);
    sum[0] += part[0] + part[1] + part[2] + part[3];
  }
  group_sum(sum, ROW_THREADS, shared);
  if (threadIdx.x == 0) job.sums[blockIdx.x] = sum[0];
}

__global__ void __launch_bounds__(MOST_THREADS) sum_chunks(const __grid_constant__ norm_sum_job job) {
  __shared__ double shared[32];
  double sum[1] = {0.0};
  for (int64_t i = threadIdx.x; i < job.n_chunks; i += MOST_THREADS) sum[0] += job.sums[i];
  group_sum(sum, MOST_THREADS, shared);
  if (threadIdx.x == 0) *job.norm = static_cast<float>(sqrt(sum[0]) * static_cast<double>(job.step->inverse_targets));
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------ */

enum { SEGMENTS = 96 }; /* of a launch: its table is an argument */

struct segment {
  int64_t start; /* up to the next one's */
  float decay, rate;
};

struct adamw_node {
  int64_t n;
  segment *segments; /* one more than there are: its start is n */
  uint32_t n_segments;
};

struct adamw_job {
  float *parameters, *moment1, *moment2;
  const float *gradients, *norm;
  const egi_step_state *step;
  bool is_vector;
  uint32_t n_segments;
  segment segments[SEGMENTS + 1];
};

__device__ __forceinline__ void load_four(const float *data, int64_t at, bool is_vector, int64_t first, int64_t end,
                                          float (&out)[4]) {
  if (is_vector) {
    unpack(packet<float>{*reinterpret_cast<const uint4 *>(data + at)}, out);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) out[i] = at + i >= first && at + i < end ? data[at + i] : 0.0f;
}

__device__ __forceinline__ void store_four(float *data, int64_t at, bool is_vector, int64_t first, int64_t end,
                                           const float (&in)[4]) {
  if (is_vector) {
    *reinterpret_cast<uint4 *>(data + at) = pack<float>(in).bits;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (at + i >= first && at + i < end) data[at + i] = in[i];
}

__device__ __forceinline__ uint32_t segment_of(const adamw_job &job, int64_t at) {
  uint32_t low = 0, high = job.n_segments;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (job.segments[middle].start <= at)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__global__ void __launch_bounds__(ROW_THREADS) adamw(const __grid_constant__ adamw_job job) {
  const float norm = *job.norm;
  if (!isfinite(norm)) return; /* the caller sees the norm and reports it; nothing has moved */
  const egi_step_state state = *job.step;
  const float factor = gradient_factor(state, norm);
  const int64_t first = job.segments[0].start, end = job.segments[job.n_segments].start;
  const int64_t step = static_cast<int64_t>(gridDim.x) * ROW_THREADS * 4;
  for (int64_t at = first / 4 * 4 + (blockIdx.x * static_cast<int64_t>(ROW_THREADS) + threadIdx.x) * 4; at < end;
       at += step) {
    const bool is_vector = job.is_vector && at >= first && at + 4 <= end;
    float p[4], g[4], m[4], v[4];
    load_four(job.parameters, at, is_vector, first, end, p);
    load_four(job.gradients, at, is_vector, first, end, g);
    load_four(job.moment1, at, is_vector, first, end, m);
    load_four(job.moment2, at, is_vector, first, end, v);
    uint32_t s = segment_of(job, at > first ? at : first);
    adamw_step own = adamw_step_of(state, factor, job.segments[s].decay, job.segments[s].rate);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (s + 1 < job.n_segments && job.segments[s + 1].start <= at + i) {
        s = segment_of(job, at + i);
        own = adamw_step_of(state, factor, job.segments[s].decay, job.segments[s].rate);
      }
      adamw_element(own, g[i], &p[i], &m[i], &v[i]);
    }
    store_four(job.parameters, at, is_vector, first, end, p);
    store_four(job.moment1, at, is_vector, first, end, m);
    store_four(job.moment2, at, is_vector, first, end, v);
  }
}

const float *segment_floats(const egi_node *node, const char *name, uint32_t count) {
  const egi_attribute *attribute = egi_node_attribute(node, name);
  const bool fits = attribute != NULL && attribute->kind == EGI_ATTRIBUTE_FLOATS && attribute->count == count;
  return fits ? attribute->u.floats : NULL;
}

/* The node's segments, those that follow each other and are alike as one. */
bool read_segments(const egi_node *node, adamw_node *n, egi_arena *arena, bool *out_fits) {
  uint32_t count = 0;
  const int64_t *starts = egi_node_ints(node, "starts", &count);
  const float *decays = segment_floats(node, "decays", count), *rates = segment_floats(node, "rates", count);
  if (starts == NULL) count = 0;
  *out_fits = (decays != NULL || egi_node_attribute(node, "decays") == NULL) &&
              (rates != NULL || egi_node_attribute(node, "rates") == NULL);
  n->segments = EGI_NEW(arena, segment, static_cast<size_t>(count) + 2);
  if (n->segments == NULL) return false;
  n->segments[n->n_segments++] = {0, 1.0f, 1.0f};
  for (uint32_t i = 0; i < count && *out_fits; i++) {
    const segment own = {starts[i], decays != NULL ? decays[i] : 1.0f, rates != NULL ? rates[i] : 1.0f};
    segment *last = &n->segments[n->n_segments - 1];
    *out_fits = own.start <= n->n && (i == 0 ? own.start == 0 : own.start >= starts[i - 1]);
    if (own.start == last->start)
      *last = own;
    else if (own.decay != last->decay || own.rate != last->rate)
      n->segments[n->n_segments++] = own;
  }
  n->segments[n->n_segments] = {n->n, 1.0f, 1.0f};
  return true;
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_accumulate(egi_kernel_plan *plan) {
  using namespace egi;
  rows *r = EGI_NEW(plan->arena, rows, 1);
  if (r == NULL) return EG_ERROR_MEMORY;
  const egi_tensor *state = &plan->inputs[0], *gradient = &plan->inputs[1];
  if (state->dtype != EG_DTYPE_F32 || element_kind_of(gradient->dtype) == ELEMENT_NONE) return egi_fail_types(plan);
  rows_builder b = rows_begin_elements(r, state);
  const bool fits =
      egi_tensor_count(state) == egi_tensor_count(gradient) && rows_add(&b, state) && rows_add(&b, gradient);
  if (!fits) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "gradient and state differ in size");
  rows_finish(&b, packet_size<float>);
  plan->params = r;
  return check_step(plan, 2);
}

extern "C" eg_status egi_cuda_run_accumulate(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  accumulate_job job = {*static_cast<const rows *>(call->params), step_of(call, 2)};
  rows_set_data(&job.r, ACCUMULATE_STATE, &call->inputs[0]);
  rows_set_data(&job.r, ACCUMULATE_GRADIENT, &call->inputs[1]);
  if (packet_blocks(&job.r) == 0) return EG_OK;
  accumulate<<<packet_blocks(&job.r), ROW_THREADS, 0, egi_cuda_stream_of(call)->stream>>>(job);
  return egi_cuda_launched(ctx, "accumulate");
}

extern "C" eg_status egi_cuda_prepare_gradient_norm(egi_kernel_plan *plan) {
  using namespace egi;
  if (plan->inputs[0].dtype != EG_DTYPE_F32 || plan->outputs[0].dtype != EG_DTYPE_F32) return egi_fail_types(plan);
  EG_TRY(check_step(plan, 1));
  const int64_t n_chunks = (egi_tensor_count(&plan->inputs[0]) + CHUNK - 1) / CHUNK;
  if (n_chunks > INT32_MAX)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "there are too many gradients");
  plan->workspace_bytes = static_cast<size_t>(n_chunks) * sizeof(double);
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_gradient_norm(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  const int64_t n = egi_tensor_count(&call->inputs[0]);
  const norm_sum_job job = {static_cast<const float *>(call->inputs[0].data),
                            step_of(call, 1),
                            static_cast<double *>(call->workspace),
                            static_cast<float *>(call->outputs[0].data),
                            n,
                            (n + CHUNK - 1) / CHUNK,
                            is_aligned_to(call->inputs[0].data, 16)};
  if (job.n_chunks > 0) sum_chunk<<<static_cast<unsigned>(job.n_chunks), ROW_THREADS, 0, stream>>>(job);
  sum_chunks<<<1, MOST_THREADS, 0, stream>>>(job);
  return egi_cuda_launched(ctx, "sum_chunks");
}

extern "C" eg_status egi_cuda_prepare_adamw(egi_kernel_plan *plan) {
  using namespace egi;
  adamw_node *n = EGI_NEW(plan->arena, adamw_node, 1);
  if (n == NULL) return EG_ERROR_MEMORY;
  bool fits = true;
  n->n = egi_tensor_count(&plan->inputs[0]);
  plan->params = n;
  if (!read_segments(egi_plan_node(plan), n, plan->arena, &fits)) return EG_ERROR_MEMORY;
  for (unsigned i = 0; i < 4; i++) {
    if (plan->inputs[i].dtype != EG_DTYPE_F32) return egi_fail_types(plan);
    fits = fits && egi_tensor_count(&plan->inputs[i]) == n->n;
  }
  if (plan->inputs[5].dtype != EG_DTYPE_F32) return egi_fail_types(plan);
  if (!fits) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "states and segments do not fit each other");
  return check_step(plan, 4);
}

extern "C" eg_status egi_cuda_run_adamw(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const adamw_node *n = static_cast<const adamw_node *>(call->params);
  adamw_job job = {};
  job.parameters = static_cast<float *>(call->inputs[0].data);
  job.gradients = static_cast<const float *>(call->inputs[1].data);
  job.moment1 = static_cast<float *>(call->inputs[2].data);
  job.moment2 = static_cast<float *>(call->inputs[3].data);
  job.step = step_of(call, 4);
  job.norm = static_cast<const float *>(call->inputs[5].data);
  job.is_vector = true;
  for (unsigned i = 0; i < 4; i++) job.is_vector = job.is_vector && is_aligned_to(call->inputs[i].data, 16);
  for (uint32_t first = 0; first < n->n_segments; first += SEGMENTS) {
    job.n_segments = n->n_segments - first < SEGMENTS ? n->n_segments - first : SEGMENTS;
    memcpy(job.segments, n->segments + first, (job.n_segments + 1) * sizeof(segment));
    const int64_t elements = job.segments[job.n_segments].start - job.segments[0].start / 4 * 4;
    const int64_t blocks = (elements + 4 * ROW_THREADS - 1) / (4 * ROW_THREADS);
    if (elements <= 0) continue;
    adamw<<<static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX), ROW_THREADS, 0,
            egi_cuda_stream_of(call)->stream>>>(job);
    EG_TRY(egi_cuda_launched(ctx, "adamw"));
  }
  return EG_OK;
}
