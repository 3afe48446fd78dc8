/* Dropout (operator version 22) as ONNX's reference draws it: numpy's Mersenne twister, element after element, from the
 * node's seed; one block refills the twister's words together. And engraft.Dropout, which training draws with:
 * Philox4x32-10, where an element's number follows from seed, step, site and place alone. Both bit for bit as on the
 * CPU. */
#include "backend/cuda/rows.cuh"

namespace egi {
namespace {

/* Operands of the rows. */
enum { DROP_X, DROP_OUT, DROP_MASK, DROP_OPERANDS };

/* ---- engraft's -------------------------------------------------------------------------------------------------- */

struct keyed_node {
  rows r;
  eg_dtype dtype;
  uint32_t key[2], site, threshold; /* numbers below the threshold drop */
  double scale;
};

struct keyed_job {
  rows r;
  uint32_t key[2], site, threshold;
  double scale;
  const uint8_t *step; /* an egi_step_state, its bytes this far apart: */
  int64_t step_stride;
};

/* Philox4x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011). */
__device__ __forceinline__ uint4 philox(uint4 c, uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint32_t a_high = __umulhi(c.x, 0xd2511f53u), b_high = __umulhi(c.z, 0xcd9e8d57u);
    c = make_uint4(b_high ^ c.y ^ key0, c.z * 0xcd9e8d57u, a_high ^ c.w ^ key1, c.x * 0xd2511f53u);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return c;
}

__device__ __forceinline__ uint32_t lane_of(const uint4 &numbers, int lane) {
  return lane == 0 ? numbers.x : lane == 1 ? numbers.y : lane == 2 ? numbers.z : numbers.w;
}

/* Four bytes of the step state, little-endian. */
__device__ __forceinline__ uint32_t step_word(const keyed_job &job, size_t at) {
  uint32_t word = 0;
  for (size_t i = 0; i < 4; i++)
    word |= static_cast<uint32_t>(job.step[static_cast<int64_t>(at + i) * job.step_stride]) << (8 * i);
  return word;
}

template <class T> __global__ void __launch_bounds__(ROW_THREADS) drop_keyed(const __grid_constant__ keyed_job job) {
  using A = number_of<T>;
  constexpr int n = packet_size<T>;
  const uint32_t step_number = step_word(job, offsetof(egi_step_state, step));
  const uint32_t micro_batch = step_word(job, offsetof(egi_step_state, micro_batch));
  const row_operand *o = job.r.operands;
  const A scale = static_cast<A>(job.scale);
  const int64_t total = job.r.count * job.r.row_packets, step = static_cast<int64_t>(gridDim.x) * ROW_THREADS;
  for (int64_t p = blockIdx.x * static_cast<int64_t>(ROW_THREADS) + threadIdx.x; p < total; p += step) {
    int64_t place, at[2];
    const int64_t row = row_of_packet(job.r, p, &place);
    row_offsets(job.r, row, at);
    place *= n;
    A x[n];
    unpack(load_packet<T>(job.r, o[DROP_X], at[DROP_X], place), x);
    const uint64_t first = static_cast<uint64_t>(row * job.r.length + place);
    uint4 numbers = {};
#pragma unroll
    for (int i = 0; i < n; i++) {
      const uint64_t element = first + static_cast<unsigned>(i);
      if (i == 0 || element % 4 == 0)
        numbers = philox(make_uint4(static_cast<uint32_t>(element / 4), job.site, step_number, micro_batch), job.key[0],
                         job.key[1]);
      x[i] = lane_of(numbers, static_cast<int>(element % 4)) >= job.threshold ? x[i] * scale : static_cast<A>(0);
    }
    store_packet(job.r, o[DROP_OUT], at[DROP_OUT], place, pack<T>(x));
  }
}

/* ---- ONNX's ----------------------------------------------------------------------------------------------------- */

/* MT19937 (Matsumoto and Nishimura, 1998). */
enum { TWISTER_WORDS = 624, TWISTER_SHIFT = 397, TWISTER_LAG = TWISTER_WORDS - TWISTER_SHIFT };

struct dropout_node {
  rows r;
  eg_dtype dtype, ratio_dtype;
  bool has_mask, has_ratio, has_training;
  uint32_t seed;
};

struct dropout_job {
  rows r;
  const void *ratio; /* NULL: 0.5 */
  element_kind ratio_kind;
  const uint8_t *is_training; /* NULL: no */
  bool has_mask;
  uint32_t seed;
  egi_cuda_fault *fault;
};

__device__ __forceinline__ double ratio_of(const dropout_job &job) {
  return job.ratio != NULL ? read_number<double>(job.ratio, 0, job.ratio_kind) : 0.5;
}

__device__ __forceinline__ bool drops(const dropout_job &job) {
  return job.is_training != NULL && *job.is_training != 0 && ratio_of(job) > 0.0;
}

/* Nothing is dropped. */
template <class T> __global__ void __launch_bounds__(ROW_THREADS) keep_all(const __grid_constant__ dropout_job job) {
  constexpr int n = packet_size<T>;
  const row_operand *o = job.r.operands;
  const int64_t total = job.r.count * job.r.row_packets, step = static_cast<int64_t>(gridDim.x) * ROW_THREADS;
  if (drops(job)) return;
  for (int64_t p = blockIdx.x * static_cast<int64_t>(ROW_THREADS) + threadIdx.x; p < total; p += step) {
    int64_t place, at[DROP_OPERANDS];
    row_offsets(job.r, row_of_packet(job.r, p, &place), at);
    place *= n;
    const packet<T> x = load_packet<T>(job.r, o[DROP_X], at[DROP_X], place);
    store_packet(job.r, o[DROP_OUT], at[DROP_OUT], place, x);
    for (int i = 0; i < n && job.has_mask && place + i < job.r.length; i++)
      o[DROP_MASK].data[at[DROP_MASK] + column_offset(job.r, o[DROP_MASK], place + i)] = 1;
  }
}

/* Words [first, first + TWISTER_LAG) anew, from those before them and the old ones; all threads. */
__device__ __forceinline__ void refill(uint32_t *words, int first) {
  const int i = first + static_cast<int>(threadIdx.x);
  uint32_t word = 0;
  const bool is_mine = threadIdx.x < TWISTER_LAG && i < TWISTER_WORDS;
  if (is_mine) {
    word = (words[i] & 0x80000000u) | (words[(i + 1) % TWISTER_WORDS] & 0x7fffffffu);
    word = words[(i + TWISTER_SHIFT) % TWISTER_WORDS] ^ (word >> 1) ^ ((word & 1) != 0 ? 0x9908b0dfu : 0);
  }
  __syncthreads();
  if (is_mine) words[i] = word;
  __syncthreads();
}

__device__ __forceinline__ uint32_t temper(uint32_t word) {
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

/* Element e takes words 2e and 2e + 1 of the sequence. One block. */
template <class T> __global__ void __launch_bounds__(ROW_THREADS) drop_some(const __grid_constant__ dropout_job job) {
  __shared__ uint32_t words[TWISTER_WORDS];
  const row_operand *o = job.r.operands;
  const double ratio = ratio_of(job), scale = 1.0 / (1.0 - ratio);
  if (job.is_training != NULL && *job.is_training != 0 && !(ratio >= 0.0 && ratio < 1.0)) {
    if (threadIdx.x == 0) egi_cuda_raise(job.fault, EGI_CUDA_FAULT_VALUE, EGI_OP_Dropout, static_cast<int64_t>(ratio));
    return;
  }
  if (!drops(job)) return;
  if (threadIdx.x == 0) {
    words[0] = job.seed;
    for (uint32_t i = 1; i < TWISTER_WORDS; i++) words[i] = 1812433253u * (words[i - 1] ^ (words[i - 1] >> 30)) + i;
  }
  __syncthreads();
  const int64_t total = job.r.count * job.r.length;
  for (int64_t base = 0; base < total; base += TWISTER_WORDS / 2) {
    for (int first = 0; first < TWISTER_WORDS; first += TWISTER_LAG) refill(words, first);
    for (int i = static_cast<int>(threadIdx.x); i < TWISTER_WORDS / 2 && base + i < total; i += ROW_THREADS) {
      const uint32_t high = temper(words[2 * i]) >> 5, low = temper(words[2 * i + 1]) >> 6;
      const double number = (static_cast<double>(high) * 67108864.0 + static_cast<double>(low)) / 9007199254740992.0;
      const int64_t row = (base + i) / job.r.length, column = (base + i) % job.r.length;
      int64_t at[DROP_OPERANDS];
      row_offsets(job.r, row, at);
      const int64_t from = at[DROP_X] + column_offset(job.r, o[DROP_X], column);
      const double value = read_number<double>(o[DROP_X].data, from, o[DROP_X].kind);
      const bool is_kept = number >= ratio;
      T *out = reinterpret_cast<T *>(o[DROP_OUT].data) + at[DROP_OUT] + column_offset(job.r, o[DROP_OUT], column);
      *out = narrow<T>(static_cast<number_of<T>>(is_kept ? value * scale : 0.0 * value));
      if (job.has_mask) o[DROP_MASK].data[at[DROP_MASK] + column_offset(job.r, o[DROP_MASK], column)] = is_kept;
    }
    __syncthreads();
  }
}

template <class T> void launch(const dropout_job &job, cudaStream_t stream) {
  if (job.is_training != NULL) drop_some<T><<<1, ROW_THREADS, 0, stream>>>(job);
  if (packet_blocks(&job.r) > 0) keep_all<T><<<packet_blocks(&job.r), ROW_THREADS, 0, stream>>>(job);
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_keyed_dropout(egi_kernel_plan *plan) {
  using namespace egi;
  const egi_node *node = egi_plan_node(plan);
  const egi_tensor *x = &plan->inputs[0], *step = &plan->inputs[1];
  const double ratio = static_cast<double>(egi_node_float(node, "ratio", 0.0f));
  const uint64_t seed = static_cast<uint64_t>(egi_node_int(node, "seed", 0));
  keyed_node *n = EGI_NEW(plan->arena, keyed_node, 1);
  if (n == NULL) return EG_ERROR_MEMORY;
  if (element_kind_of(x->dtype) == ELEMENT_NONE || plan->outputs[0].dtype != x->dtype || step->dtype != EG_DTYPE_U8 ||
      step->rank != 1)
    return egi_fail_types(plan);
  if (egi_tensor_count(step) < static_cast<int64_t>(sizeof(egi_step_state)))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the step state is too short");
  if (!(ratio >= 0.0 && ratio < 1.0))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "a ratio of %g is not in [0, 1)", ratio);
  rows_builder b = rows_begin_elements(&n->r, x);
  if (!rows_add(&b, x) || !rows_add(&b, &plan->outputs[0]))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "shapes of input and output differ");
  rows_finish(&b, packet_of(x->dtype));
  n->dtype = x->dtype;
  n->key[0] = static_cast<uint32_t>(seed);
  n->key[1] = static_cast<uint32_t>(seed >> 32);
  n->site = static_cast<uint32_t>(egi_node_int(node, "site", 0));
  n->threshold = static_cast<uint32_t>(ratio * 4294967296.0);
  n->scale = 1.0 / (1.0 - ratio);
  plan->params = n;
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_keyed_dropout(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const keyed_node *n = static_cast<const keyed_node *>(call->params);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  keyed_job job = {n->r,
                   {n->key[0], n->key[1]},
                   n->site,
                   n->threshold,
                   n->scale,
                   static_cast<const uint8_t *>(call->inputs[1].data),
                   call->inputs[1].strides[0]};
  rows_set_data(&job.r, DROP_X, &call->inputs[0]);
  rows_set_data(&job.r, DROP_OUT, &call->outputs[0]);
  const unsigned blocks = packet_blocks(&job.r);
  if (blocks == 0) return EG_OK;
  switch (n->dtype) {
  case EG_DTYPE_BF16:
    drop_keyed<__nv_bfloat16><<<blocks, ROW_THREADS, 0, stream>>>(job);
    break;
  case EG_DTYPE_F16:
    drop_keyed<__half><<<blocks, ROW_THREADS, 0, stream>>>(job);
    break;
  case EG_DTYPE_F64:
    drop_keyed<double><<<blocks, ROW_THREADS, 0, stream>>>(job);
    break;
  default:
    drop_keyed<float><<<blocks, ROW_THREADS, 0, stream>>>(job);
    break;
  }
  return egi_cuda_launched(ctx, "drop_keyed");
}

extern "C" eg_status egi_cuda_prepare_dropout(egi_kernel_plan *plan) {
  using namespace egi;
  const egi_tensor *x = &plan->inputs[0], *out = &plan->outputs[0];
  dropout_node *n = EGI_NEW(plan->arena, dropout_node, 1);
  if (n == NULL) return EG_ERROR_MEMORY;
  n->dtype = x->dtype;
  n->has_mask = has_output(plan->outputs, plan->n_outputs, 1);
  n->has_ratio = egi_plan_has_input(plan, 1);
  n->has_training = egi_plan_has_input(plan, 2);
  n->seed = static_cast<uint32_t>(egi_node_int(egi_plan_node(plan), "seed", plan->node));
  plan->params = n;
  for (unsigned i = 1; i < plan->n_inputs; i++)
    if (egi_plan_has_input(plan, i) && egi_tensor_count(&plan->inputs[i]) != 1) return egi_fail_types(plan);
  const bool has_types = element_kind_of(x->dtype) != ELEMENT_NONE && out->dtype == x->dtype &&
                         (!n->has_ratio || element_kind_of(plan->inputs[1].dtype) != ELEMENT_NONE) &&
                         (!n->has_training || plan->inputs[2].dtype == EG_DTYPE_BOOL) &&
                         (!n->has_mask || plan->outputs[1].dtype == EG_DTYPE_BOOL);
  if (!has_types) return egi_fail_types(plan);
  rows_builder b = rows_begin_elements(&n->r, x);
  if (!rows_add(&b, x) || !rows_add(&b, out) || (n->has_mask && !rows_add(&b, &plan->outputs[1])))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "shapes of input and output differ");
  rows_finish(&b, packet_of(x->dtype));
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_dropout(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const dropout_node *n = static_cast<const dropout_node *>(call->params);
  const egi_cuda_stream *s = egi_cuda_stream_of(call);
  dropout_job job = {};
  job.r = n->r;
  job.has_mask = n->has_mask;
  job.seed = n->seed;
  job.fault = s->fault;
  rows_set_data(&job.r, DROP_X, &call->inputs[0]);
  rows_set_data(&job.r, DROP_OUT, &call->outputs[0]);
  if (n->has_mask) rows_set_data(&job.r, DROP_MASK, &call->outputs[1]);
  if (n->has_ratio) {
    job.ratio = call->inputs[1].data;
    job.ratio_kind = element_kind_of(call->inputs[1].dtype);
  }
  if (n->has_training) job.is_training = static_cast<const uint8_t *>(call->inputs[2].data);
  switch (n->dtype) {
  case EG_DTYPE_BF16:
    launch<__nv_bfloat16>(job, s->stream);
    break;
  case EG_DTYPE_F16:
    launch<__half>(job, s->stream);
    break;
  case EG_DTYPE_F64:
    launch<double>(job, s->stream);
    break;
  default:
    launch<float>(job, s->stream);
    break;
  }
  return egi_cuda_launched(ctx, "drop_some");
}
