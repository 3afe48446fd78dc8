/* The operators Dispatch and Combine: tokens' rows in the order of their experts, and sums of a token's rows back in
 * the order of the choice, by gathers alone; sums are f32. A block works on one row at a time, 16 bytes a thread where
 * strides and addresses allow. */
#include "backend/cuda/token_rows.cuh"

namespace egi {
namespace {

enum { THREADS = 128, VECTOR_BYTES = 16 };

struct move_node {
  token_rows in, out;
  element_kind element;
  int64_t index_stride, n_rows, top_k, width;
  bool is_vectored; /* strides allow 16 bytes at a time */
};

struct move_job {
  token_rows in, out;
  const void *src;
  void *dst;
  const int32_t *indices;
  int64_t index_stride, n_rows, limit, top_k, width;
  egi_cuda_fault *fault;
};

/* A row that there is, or -1 and a fault. */
__device__ __forceinline__ int64_t index_at(const move_job &job, int64_t i, int op) {
  const int64_t index = job.indices[i * job.index_stride];
  if (index >= 0 && index < job.limit) return index;
  if (threadIdx.x == 0) egi_cuda_raise(job.fault, EGI_CUDA_FAULT_INDEX, op, index);
  return -1;
}

/* Unit: what is copied at a time. Strides and widths are in units. */
template <class Unit> __global__ void __launch_bounds__(THREADS) dispatch_rows(const move_job job) {
  for (int64_t row = blockIdx.x; row < job.n_rows; row += gridDim.x) {
    const int64_t token = index_at(job, row, EGI_OP_Dispatch);
    if (token < 0) continue;
    const Unit *src = static_cast<const Unit *>(job.src) + job.in.offset_of(token);
    Unit *dst = static_cast<Unit *>(job.dst) + job.out.offset_of(row);
    for (int64_t i = threadIdx.x; i < job.width; i += THREADS)
      dst[i * job.out.column_stride] = src[i * job.in.column_stride];
  }
}

/* As many elements as are read at a time. */
template <class Element, int COUNT> struct element_pack { Element at[COUNT]; };

template <class Element, int COUNT> __global__ void __launch_bounds__(THREADS) combine_rows(const move_job job) {
  using pack = element_pack<Element, COUNT>;
  for (int64_t token = blockIdx.x; token < job.n_rows; token += gridDim.x) {
    Element *dst = static_cast<Element *>(job.dst) + job.out.offset_of(token);
    for (int64_t i = static_cast<int64_t>(threadIdx.x) * COUNT; i < job.width; i += THREADS * COUNT) {
      float sums[COUNT] = {};
      for (int64_t j = 0; j < job.top_k; j++) {
        const int64_t row = index_at(job, token * job.top_k + j, EGI_OP_Combine);
        if (row < 0) continue;
        const Element *src = static_cast<const Element *>(job.src) + job.in.offset_of(row);
        alignas(sizeof(pack)) pack numbers;
        if (COUNT > 1)
          *reinterpret_cast<uint4 *>(&numbers) = *reinterpret_cast<const uint4 *>(src + i);
        else
          numbers.at[0] = src[i * job.in.column_stride];
#pragma unroll
        for (int n = 0; n < COUNT; n++) sums[n] = j == 0 ? to_float(numbers.at[n]) : sums[n] + to_float(numbers.at[n]);
      }
      alignas(sizeof(pack)) pack results;
#pragma unroll
      for (int n = 0; n < COUNT; n++) results.at[n] = from_float<Element>(sums[n]);
      if (COUNT > 1)
        *reinterpret_cast<uint4 *>(dst + i) = *reinterpret_cast<const uint4 *>(&results);
      else
        dst[i * job.out.column_stride] = results.at[0];
    }
  }
}

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

bool has_whole_units(const token_rows &rows, int64_t elements) {
  bool is_whole = rows.column_stride == 1 && rows.n_columns % elements == 0;
  for (int i = 0; i < rows.rank; i++) is_whole = is_whole && rows.strides[i] % elements == 0;
  return is_whole;
}

/* `tokens` are the rows of the side that has one a token. */
eg_status prepare(egi_kernel_plan *plan, unsigned index_input, bool is_combine) {
  move_node *node = EGI_NEW(plan->arena, move_node, 1);
  if (!node) return EG_ERROR_MEMORY;
  node->element = element_of(plan->inputs[0].dtype);
  if (node->element == ELEMENT_NONE || plan->outputs[0].dtype != plan->inputs[0].dtype ||
      plan->inputs[index_input].dtype != EG_DTYPE_I32)
    return egi_fail_types(plan);
  node->in = token_rows_of(&plan->inputs[0]);
  node->out = token_rows_of(&plan->outputs[0]);
  node->index_stride = plan->inputs[index_input].strides[0];
  const int64_t tokens = is_combine ? node->out.n_tokens : node->in.n_tokens;
  node->n_rows = is_combine ? node->in.n_tokens : node->out.n_tokens;
  node->top_k = tokens > 0 ? node->n_rows / tokens : 1;
  node->width = node->in.n_columns;
  const int64_t in_vector = VECTOR_BYTES / static_cast<int64_t>(bytes_of(node->element));
  node->is_vectored = has_whole_units(node->in, in_vector) && has_whole_units(node->out, in_vector);
  plan->params = node;
  if (tokens * node->top_k == node->n_rows) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%lld rows are no multiple of %lld tokens",
                       static_cast<long long>(node->n_rows), static_cast<long long>(tokens));
}

/* ---- run -------------------------------------------------------------------------------------------------------- */

move_job begin_job(const move_node *node, const egi_kernel_call *call, unsigned index_input) {
  move_job job = {};
  job.in = node->in;
  job.out = node->out;
  job.src = call->inputs[0].data;
  job.dst = call->outputs[0].data;
  job.indices = static_cast<const int32_t *>(call->inputs[index_input].data);
  job.index_stride = node->index_stride;
  job.top_k = node->top_k;
  job.width = node->width;
  job.limit = node->in.n_tokens;
  job.n_rows = node->out.n_tokens;
  job.fault = egi_cuda_stream_of(call)->fault;
  return job;
}

bool is_vectored(const move_node *node, const move_job &job) {
  return node->is_vectored && is_aligned_to(job.src, VECTOR_BYTES) && is_aligned_to(job.dst, VECTOR_BYTES);
}

void count_in_units(token_rows *rows, int64_t elements) {
  for (int i = 0; i < rows->rank; i++) rows->strides[i] /= elements;
}

unsigned blocks_for(int64_t n_rows) {
  return static_cast<unsigned>(n_rows < (1 << 20) ? n_rows : 1 << 20);
}

template <class Element> void launch_combine(const move_job &job, bool is_whole, cudaStream_t stream) {
  constexpr int count = VECTOR_BYTES / static_cast<int>(sizeof(Element));
  if (is_whole)
    combine_rows<Element, count><<<blocks_for(job.n_rows), THREADS, 0, stream>>>(job);
  else
    combine_rows<Element, 1><<<blocks_for(job.n_rows), THREADS, 0, stream>>>(job);
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_dispatch(egi_kernel_plan *plan) {
  return egi::prepare(plan, 1, false);
}

extern "C" eg_status egi_cuda_prepare_combine(egi_kernel_plan *plan) {
  return egi::prepare(plan, 2, true);
}

extern "C" eg_status egi_cuda_run_dispatch(eg_context *ctx, const egi_kernel_call *call) {
  const egi::move_node *node = static_cast<const egi::move_node *>(call->params);
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  egi::move_job job = egi::begin_job(node, call, 1);
  if (job.n_rows == 0 || job.width == 0) return EG_OK;
  if (egi::is_vectored(node, job)) {
    const int64_t elements = egi::VECTOR_BYTES / static_cast<int64_t>(egi::bytes_of(node->element));
    egi::count_in_units(&job.in, elements);
    egi::count_in_units(&job.out, elements);
    job.width /= elements;
    egi::dispatch_rows<uint4><<<egi::blocks_for(job.n_rows), egi::THREADS, 0, stream>>>(job);
  } else if (node->element == egi::ELEMENT_F32) {
    egi::dispatch_rows<uint32_t><<<egi::blocks_for(job.n_rows), egi::THREADS, 0, stream>>>(job);
  } else {
    egi::dispatch_rows<uint16_t><<<egi::blocks_for(job.n_rows), egi::THREADS, 0, stream>>>(job);
  }
  return egi_cuda_launched(ctx, "dispatch_rows");
}

extern "C" eg_status egi_cuda_run_combine(eg_context *ctx, const egi_kernel_call *call) {
  const egi::move_node *node = static_cast<const egi::move_node *>(call->params);
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  const egi::move_job job = egi::begin_job(node, call, 2);
  const bool is_whole = egi::is_vectored(node, job);
  if (job.n_rows == 0 || job.width == 0) return EG_OK;
  if (node->element == egi::ELEMENT_F32)
    egi::launch_combine<float>(job, is_whole, stream);
  else if (node->element == egi::ELEMENT_BF16)
    egi::launch_combine<__nv_bfloat16>(job, is_whole, stream);
  else
    egi::launch_combine<__half>(job, is_whole, stream);
  return egi_cuda_launched(ctx, "combine_rows");
}
