/* RotaryEmbedding (ONNX 23): the first `rotary` elements of each head's row are turned by the angles of its position,
 * the others copied. A thread turns a few pairs of one head, in f32 (f64 for f64), 16 bytes a load where operands lie
 * for it; elementwise, so deterministic. */
#include "backend/cuda/rows.cuh"

namespace egi {
namespace {

struct rotary_node {
  eg_dtype dtype;
  element_kind cosine_kind, sine_kind;
  bool is_interleaved, has_positions, is_position_inside;
  int64_t batch, heads, sequence, head_size, half; /* half of the rotated part */
  int64_t x_strides[4], out_strides[4];            /* batch, head, position, element */
  int64_t cosine_strides[3], sine_strides[3];      /* batch or cache row, position, element */
  int64_t position_strides[2], n_cached;
};

/* Units of a head: those that turn a few pairs each, then copies. */
struct rotary_job {
  rotary_node n;
  const void *x, *cosine, *sine;
  void *out;
  const int64_t *positions;
  egi_cuda_fault *fault;
  int64_t turning, units, inner, outer, total; /* inner and outer: of heads and positions, as they lie */
  bool is_small, has_vector_angles;            /* fewer than 2^31 units */
  divisor units_by, inner_by, outer_by;
};

__device__ __forceinline__ int64_t divide(const rotary_job &job, int64_t value, const divisor &by, int64_t n) {
  return job.is_small ? static_cast<int64_t>(by.quotient(static_cast<uint32_t>(n))) : n / value;
}

template <int N, class A>
__device__ __forceinline__ void load_angles(const rotary_job &job, const void *data, element_kind kind, int64_t at,
                                            int64_t stride, A (&out)[N]) {
  if (job.has_vector_angles) return read_numbers(data, kind, at, out);
#pragma unroll
  for (int i = 0; i < N; i++) out[i] = read_number<A>(data, at + i * stride, kind);
}

/* N elements `stride` apart, or a packet. */
template <bool IS_PACKET, int N, class T>
__device__ __forceinline__ void load_some(const T *in, int64_t stride, number_of<T> (&out)[N]) {
  if constexpr (IS_PACKET) {
    packet<T> p;
    p.bits = *reinterpret_cast<const uint4 *>(in);
    unpack(p, out);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = widen(in[i * stride]);
  }
}

template <bool IS_PACKET, int N, class T>
__device__ __forceinline__ void store_some(T *target, int64_t stride, const number_of<T> (&in)[N]) {
  if constexpr (IS_PACKET) {
    *reinterpret_cast<uint4 *>(target) = pack<T>(in).bits;
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) target[i * stride] = narrow<T>(in[i]);
  }
}

template <bool IS_PACKET, int N, class T>
__device__ __forceinline__ void turn_pairs(const rotary_job &job, const T *x, T *out, int64_t unit,
                                           const int64_t (&angles)[2]) {
  using A = number_of<T>;
  const rotary_node &n = job.n;
  const int64_t first = unit * (N / 2), xs = n.x_strides[3], os = n.out_strides[3];
  A a[N], c[N / 2], s[N / 2], y[N];
  load_some<IS_PACKET>(x + first * 2 * xs, xs, a);
  load_angles(job, job.cosine, n.cosine_kind, angles[0] + first * n.cosine_strides[2], n.cosine_strides[2], c);
  load_angles(job, job.sine, n.sine_kind, angles[1] + first * n.sine_strides[2], n.sine_strides[2], s);
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    y[2 * i] = c[i] * a[2 * i] - s[i] * a[2 * i + 1];
    y[2 * i + 1] = s[i] * a[2 * i] + c[i] * a[2 * i + 1];
  }
  store_some<IS_PACKET>(out + first * 2 * os, os, y);
}

template <bool IS_PACKET, int N, class T>
__device__ __forceinline__ void turn_halves(const rotary_job &job, const T *x, T *out, int64_t unit,
                                            const int64_t (&angles)[2]) {
  using A = number_of<T>;
  const rotary_node &n = job.n;
  const int64_t first = unit * N, xs = n.x_strides[3], os = n.out_strides[3];
  A a[N], b[N], c[N], s[N], y[N];
  load_some<IS_PACKET>(x + first * xs, xs, a);
  load_some<IS_PACKET>(x + (first + n.half) * xs, xs, b);
  load_angles(job, job.cosine, n.cosine_kind, angles[0] + first * n.cosine_strides[2], n.cosine_strides[2], c);
  load_angles(job, job.sine, n.sine_kind, angles[1] + first * n.sine_strides[2], n.sine_strides[2], s);
#pragma unroll
  for (int i = 0; i < N; i++) y[i] = c[i] * a[i] - s[i] * b[i];
  store_some<IS_PACKET>(out + first * os, os, y);
#pragma unroll
  for (int i = 0; i < N; i++) y[i] = s[i] * a[i] + c[i] * b[i];
  store_some<IS_PACKET>(out + (first + n.half) * os, os, y);
}

template <class T, bool IS_PACKET>
__global__ void __launch_bounds__(ROW_THREADS) rotate(const __grid_constant__ rotary_job job) {
  constexpr int some = IS_PACKET ? packet_size<T> : 1, pairs = IS_PACKET ? packet_size<T> : 2;
  const rotary_node &n = job.n;
  const int64_t step = static_cast<int64_t>(gridDim.x) * ROW_THREADS;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(ROW_THREADS) + threadIdx.x; i < job.total; i += step) {
    const int64_t line = divide(job, job.units, job.units_by, i), unit = i - line * job.units;
    const int64_t rest = divide(job, job.inner, job.inner_by, line), inner = line - rest * job.inner;
    const int64_t batch = divide(job, job.outer, job.outer_by, rest), outer = rest - batch * job.outer;
    const int64_t position = n.is_position_inside ? inner : outer, head = n.is_position_inside ? outer : inner;
    const T *x =
        static_cast<const T *>(job.x) + batch * n.x_strides[0] + head * n.x_strides[1] + position * n.x_strides[2];
    T *out =
        static_cast<T *>(job.out) + batch * n.out_strides[0] + head * n.out_strides[1] + position * n.out_strides[2];
    if (unit >= job.turning) {
      number_of<T> copied[some];
      const int64_t at = 2 * n.half + (unit - job.turning) * some;
      load_some<IS_PACKET>(x + at * n.x_strides[3], n.x_strides[3], copied);
      store_some<IS_PACKET>(out + at * n.out_strides[3], n.out_strides[3], copied);
      continue;
    }
    const int64_t row =
        n.has_positions ? job.positions[batch * n.position_strides[0] + position * n.position_strides[1]] : batch;
    if (n.has_positions && (row < 0 || row >= n.n_cached)) {
      egi_cuda_raise(job.fault, EGI_CUDA_FAULT_INDEX, EGI_OP_RotaryEmbedding, row);
      continue;
    }
    const int64_t second = n.has_positions ? 0 : position;
    const int64_t angles[2] = {row * n.cosine_strides[0] + second * n.cosine_strides[1],
                               row * n.sine_strides[0] + second * n.sine_strides[1]};
    if (n.is_interleaved)
      turn_pairs<IS_PACKET, pairs>(job, x, out, unit, angles);
    else
      turn_halves<IS_PACKET, some>(job, x, out, unit, angles);
  }
}

/* Whether both tensors can be read and written in packets of `packet` elements. */
bool is_in_packets(const rotary_node *n, const egi_tensor *x, const egi_tensor *out, int packet) {
  const int64_t step = n->is_interleaved ? packet / 2 : packet;
  bool is_aligned = n->half % step == 0 && (n->head_size - 2 * n->half) % packet == 0 && (2 * n->half) % packet == 0 &&
                    n->x_strides[3] == 1 && n->out_strides[3] == 1;
  for (int i = 0; i < 3; i++)
    is_aligned = is_aligned && n->x_strides[i] % packet == 0 && n->out_strides[i] % packet == 0;
  return is_aligned && is_aligned_to(x->data, 16) && is_aligned_to(out->data, 16);
}

bool has_vector_angles(const rotary_node *n, const egi_tensor *const tables[2], int step) {
  bool is_aligned = true;
  for (int k = 0; k < 2; k++) {
    const int64_t *strides = k == 0 ? n->cosine_strides : n->sine_strides;
    is_aligned = is_aligned && strides[2] == 1 && strides[0] % step == 0 && strides[1] % step == 0 &&
                 is_aligned_to(tables[k]->data, 16);
  }
  return is_aligned;
}

template <class T> void launch(const egi_kernel_call *call, rotary_job *job, cudaStream_t stream) {
  const rotary_node *n = &job->n;
  const egi_tensor *const tables[2] = {&call->inputs[1], &call->inputs[2]};
  const bool is_packet = is_in_packets(n, &call->inputs[0], &call->outputs[0], packet_size<T>);
  const int step = !is_packet ? 1 : n->is_interleaved ? packet_size<T> / 2 : packet_size<T>;
  const int64_t copies = (n->head_size - 2 * n->half) / (is_packet ? packet_size<T> : 1);
  job->turning = n->half / step;
  job->units = job->turning + copies;
  job->inner = n->is_position_inside ? n->sequence : n->heads;
  job->outer = n->is_position_inside ? n->heads : n->sequence;
  job->total = n->batch * n->heads * n->sequence * job->units;
  if (job->total == 0) return;
  job->is_small = job->total <= INT32_MAX;
  job->has_vector_angles = has_vector_angles(n, tables, step);
  if (job->is_small) {
    job->units_by = divisor_of(job->units);
    job->inner_by = divisor_of(job->inner);
    job->outer_by = divisor_of(job->outer);
  }
  const int64_t blocks = (job->total + ROW_THREADS - 1) / ROW_THREADS;
  const unsigned n_blocks = static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX);
  if (is_packet)
    rotate<T, true><<<n_blocks, ROW_THREADS, 0, stream>>>(*job);
  else
    rotate<T, false><<<n_blocks, ROW_THREADS, 0, stream>>>(*job);
}

void set_head_strides(const egi_tensor *tensor, int64_t head_size, int64_t strides[4]) {
  const bool has_heads = tensor->rank == 4;
  const int last = tensor->rank - 1;
  strides[0] = tensor->strides[0];
  strides[1] = has_heads ? tensor->strides[1] : head_size * tensor->strides[last];
  strides[2] = has_heads ? tensor->strides[2] : tensor->strides[1];
  strides[3] = tensor->strides[last];
}

/* cos and sin: [cached, half] with position ids, [batch, sequence, half] without. */
bool set_table_strides(rotary_node *n, const egi_tensor *table, int64_t strides[3]) {
  if (table->rank != (n->has_positions ? 2 : 3)) return false;
  const int last = table->rank - 1;
  if (table->dims[last] != n->half) return false;
  strides[2] = table->strides[last];
  strides[1] = 0;
  strides[0] = table->strides[0];
  if (n->has_positions) {
    if (n->n_cached > table->dims[0]) n->n_cached = table->dims[0];
    return true;
  }
  if (table->dims[0] != 1 && table->dims[0] != n->batch) return false;
  if (table->dims[1] != 1 && table->dims[1] != n->sequence) return false;
  if (table->dims[0] == 1) strides[0] = 0;
  if (table->dims[1] != 1) strides[1] = table->strides[1];
  return true;
}

bool set_position_strides(rotary_node *n, const egi_tensor *positions) {
  if (positions->rank != 2 || (positions->dims[0] != n->batch && positions->dims[0] != 1)) return false;
  n->position_strides[0] = positions->dims[0] == 1 ? 0 : positions->strides[0];
  n->position_strides[1] = positions->strides[1];
  return positions->dims[1] == n->sequence;
}

eg_status set_sizes(egi_kernel_plan *plan, rotary_node *n) {
  const egi_tensor *x = &plan->inputs[0];
  const egi_node *node = egi_plan_node(plan);
  const int64_t heads = egi_node_int(node, "num_heads", 0);
  int64_t rotary = egi_node_int(node, "rotary_embedding_dim", 0);
  if (x->rank != 4 && !(x->rank == 3 && heads > 0 && x->dims[2] % heads == 0))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE,
                         "X must have 4 dims, or 3 and num_heads that divides the last");
  n->batch = x->dims[0];
  n->heads = x->rank == 4 ? x->dims[1] : heads;
  n->sequence = x->dims[x->rank - 2];
  n->head_size = x->rank == 4 ? x->dims[3] : x->dims[2] / heads;
  if (rotary == 0) rotary = n->head_size;
  if (rotary < 0 || rotary > n->head_size || rotary % 2 != 0)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%lld elements of a head of %lld cannot be rotated",
                         static_cast<long long>(rotary), static_cast<long long>(n->head_size));
  n->half = rotary / 2;
  n->is_interleaved = egi_node_int(node, "interleaved", 0) != 0;
  n->has_positions = egi_plan_has_input(plan, 3);
  return EG_OK;
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_rotary(egi_kernel_plan *plan) {
  using namespace egi;
  rotary_node *n = EGI_NEW(plan->arena, rotary_node, 1);
  if (n == NULL) return EG_ERROR_MEMORY;
  const egi_tensor *x = &plan->inputs[0], *cosine = &plan->inputs[1], *sine = &plan->inputs[2];
  n->dtype = x->dtype;
  n->cosine_kind = element_kind_of(cosine->dtype);
  n->sine_kind = element_kind_of(sine->dtype);
  n->n_cached = INT64_MAX;
  plan->params = n;
  if (element_kind_of(x->dtype) == ELEMENT_NONE || n->cosine_kind == ELEMENT_NONE || n->sine_kind == ELEMENT_NONE ||
      plan->outputs[0].dtype != x->dtype)
    return egi_fail_types(plan);
  EG_TRY(set_sizes(plan, n));
  set_head_strides(x, n->head_size, n->x_strides);
  set_head_strides(&plan->outputs[0], n->head_size, n->out_strides);
  n->is_position_inside = n->out_strides[2] < n->out_strides[1];
  bool fits = set_table_strides(n, cosine, n->cosine_strides) && set_table_strides(n, sine, n->sine_strides);
  if (n->has_positions) {
    if (plan->inputs[3].dtype != EG_DTYPE_I64) return egi_fail_types(plan);
    fits = fits && set_position_strides(n, &plan->inputs[3]);
  }
  if (fits) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "shapes of X, cos, sin and positions do not agree");
}

extern "C" eg_status egi_cuda_run_rotary(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const egi_cuda_stream *s = egi_cuda_stream_of(call);
  rotary_job job = {};
  job.n = *static_cast<const rotary_node *>(call->params);
  job.x = call->inputs[0].data;
  job.cosine = call->inputs[1].data;
  job.sine = call->inputs[2].data;
  job.out = call->outputs[0].data;
  job.positions = job.n.has_positions ? static_cast<const int64_t *>(call->inputs[3].data) : NULL;
  job.fault = s->fault;
  switch (job.n.dtype) {
  case EG_DTYPE_BF16:
    launch<__nv_bfloat16>(call, &job, s->stream);
    break;
  case EG_DTYPE_F16:
    launch<__half>(call, &job, s->stream);
    break;
  case EG_DTYPE_F64:
    launch<double>(call, &job, s->stream);
    break;
  default:
    launch<float>(call, &job, s->stream);
    break;
  }
  return egi_cuda_launched(ctx, "rotate");
}
