/* PackedMetadata: first key, last query and position of each row of documents that lie one after the other, and the
 * bounds of each block of rows. A thread finds the document of its row by bisection; nothing meets the host. */
#include "backend/cuda/operator.cuh"

namespace egi {
namespace {

enum { OUTPUT_FIRST, OUTPUT_LAST, OUTPUT_POSITION, OUTPUT_BOUNDS, OUTPUT_COUNT };
enum { THREADS = 256 };

struct packed_node {
  int64_t n_documents, n_rows, block, n_blocks;
  int32_t *host; /* where results are read back to: memory of the plan; NULL: nowhere */
};

struct packed_job {
  int64_t n_documents, n_rows, block, n_blocks, offsets_stride, strides[OUTPUT_COUNT], bound_stride;
  const int32_t *offsets;
  int32_t *outputs[OUTPUT_COUNT]; /* NULL: not wanted */
  egi_cuda_fault *fault;
};

struct document {
  int64_t first, end;
};

__device__ __forceinline__ int64_t offset_at(const packed_job &job, int64_t i) {
  return job.offsets[i * job.offsets_stride];
}

/* The last document that begins at or before the row. What the offsets say is held to the rows there are. */
__device__ __forceinline__ document document_of(const packed_job &job, int64_t row) {
  int64_t low = 0, high = job.n_documents;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (offset_at(job, middle) <= row)
      low = middle;
    else
      high = middle;
  }
  const int64_t first = offset_at(job, low), end = offset_at(job, low + 1);
  return {first < 0 ? 0 : first > row ? row : first, end <= row ? row + 1 : end > job.n_rows ? job.n_rows : end};
}

/* Offsets begin with 0 and grow to the number of rows, which what is left of them repeats. */
__device__ __forceinline__ void check_offset(const packed_job &job, int64_t i) {
  const int64_t end = offset_at(job, i), before = i > 0 ? offset_at(job, i - 1) : 0;
  const bool is_right = i == 0 ? end == 0 : end <= job.n_rows && (end > before || end == job.n_rows);
  const bool is_complete = i < job.n_documents || end == job.n_rows;
  if (!is_right || !is_complete) egi_cuda_raise(job.fault, EGI_CUDA_FAULT_VALUE, EGI_OP_PackedMetadata, end);
}

__global__ void __launch_bounds__(THREADS) write_metadata(const __grid_constant__ packed_job job) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  const int64_t begin = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
  for (int64_t i = begin; i <= job.n_documents; i += step) check_offset(job, i);
  if (job.n_documents == 0) return;
  for (int64_t row = begin; row < job.n_rows; row += step) {
    const document d = document_of(job, row);
    const int64_t values[OUTPUT_BOUNDS] = {d.first, d.end - 1, row - d.first};
#pragma unroll
    for (int i = 0; i < OUTPUT_BOUNDS; i++)
      if (job.outputs[i] != NULL) job.outputs[i][row * job.strides[i]] = static_cast<int32_t>(values[i]);
  }
  int32_t *bounds = job.outputs[OUTPUT_BOUNDS];
  for (int64_t b = begin; b < job.n_blocks && bounds != NULL; b += step) {
    const int64_t first = b * job.block, last = first + job.block < job.n_rows ? first + job.block - 1 : job.n_rows - 1;
    bounds[b * job.strides[OUTPUT_BOUNDS]] = static_cast<int32_t>(document_of(job, first).first);
    bounds[b * job.strides[OUTPUT_BOUNDS] + job.bound_stride] = static_cast<int32_t>(document_of(job, last).end - 1);
  }
}

bool is_numbers(const egi_tensor *tensor) {
  return tensor->dtype == EG_DTYPE_I32 && tensor->rank == 1;
}

/* What a host would have for itself: the results once more, in its memory, for which it waits. */
eg_status read_back(eg_context *ctx, const packed_node *node, const packed_job *job, cudaStream_t stream) {
  for (int i = 0; i < OUTPUT_BOUNDS; i++) {
    if (job->outputs[i] == NULL || node->n_rows == 0) continue;
    const int64_t stride = job->strides[i];
    const int32_t *first = stride < 0 ? job->outputs[i] + (node->n_rows - 1) * stride : job->outputs[i];
    const size_t pitch = static_cast<size_t>(stride < 0 ? -stride : stride) * sizeof(int32_t);
    EGI_CUDA_TRY(ctx, cudaMemcpy2DAsync(node->host + i * node->n_rows, sizeof(int32_t), first, pitch, sizeof(int32_t),
                                        static_cast<size_t>(node->n_rows), cudaMemcpyDeviceToHost, stream));
  }
  return EG_OK;
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_packed_metadata(egi_kernel_plan *plan) {
  using namespace egi;
  packed_node *n = EGI_NEW(plan->arena, packed_node, 1);
  const egi_tensor *offsets = &plan->inputs[0], *rows = &plan->inputs[1];
  if (n == NULL) return EG_ERROR_MEMORY;
  if (!is_numbers(offsets) || plan->n_outputs > OUTPUT_COUNT) return egi_fail_types(plan);
  n->n_documents = offsets->dims[0] - 1;
  n->n_rows = rows->rank > 0 ? rows->dims[rows->rank - 1] : -1;
  n->block = egi_node_int(egi_plan_node(plan), "block", EGI_BLOCK_ROWS);
  bool fits = n->n_documents >= 0 && n->n_rows >= 0 && n->n_rows <= INT32_MAX && n->block > 0;
  if (fits) n->n_blocks = (n->n_rows + n->block - 1) / n->block;
  if (has_output(plan->outputs, plan->n_outputs, OUTPUT_BOUNDS)) {
    const egi_tensor *bounds = &plan->outputs[OUTPUT_BOUNDS];
    if (bounds->dtype != EG_DTYPE_I32) return egi_fail_types(plan);
    fits = fits && bounds->rank == 2 && bounds->dims[0] == n->n_blocks && bounds->dims[1] == 2;
  }
  for (unsigned i = 0; i < OUTPUT_BOUNDS && fits; i++) {
    if (!has_output(plan->outputs, plan->n_outputs, i)) continue;
    if (!is_numbers(&plan->outputs[i])) return egi_fail_types(plan);
    fits = plan->outputs[i].dims[0] == n->n_rows;
  }
  if (!fits)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "cu_seqlens or the results do not fit the rows");
  if (egi_node_int(egi_plan_node(plan), "readback", 0) != 0) {
    n->host = EGI_NEW(plan->arena, int32_t, static_cast<size_t>(n->n_rows) * OUTPUT_BOUNDS + 1);
    if (n->host == NULL) return EG_ERROR_MEMORY;
  }
  plan->params = n;
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_packed_metadata(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const packed_node *n = static_cast<const packed_node *>(call->params);
  const egi_cuda_stream *s = egi_cuda_stream_of(call);
  packed_job job = {};
  job.n_documents = n->n_documents;
  job.n_rows = n->n_rows;
  job.block = n->block;
  job.n_blocks = n->n_blocks;
  job.offsets = static_cast<const int32_t *>(call->inputs[0].data);
  job.offsets_stride = call->inputs[0].strides[0];
  job.fault = s->fault;
  for (unsigned i = 0; i < OUTPUT_COUNT; i++) {
    if (!has_output(call->outputs, call->n_outputs, i)) continue;
    job.outputs[i] = static_cast<int32_t *>(call->outputs[i].data);
    job.strides[i] = call->outputs[i].strides[0];
    if (i == OUTPUT_BOUNDS) job.bound_stride = call->outputs[i].strides[1];
  }
  const int64_t most = n->n_rows > n->n_documents + 1 ? n->n_rows : n->n_documents + 1;
  const int64_t blocks = (most + THREADS - 1) / THREADS;
  write_metadata<<<static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX), THREADS, 0, s->stream>>>(job);
  EG_TRY(egi_cuda_launched(ctx, "write_metadata"));
  return n->host != NULL ? read_back(ctx, n, &job, s->stream) : EG_OK;
}
