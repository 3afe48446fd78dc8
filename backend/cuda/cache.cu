/* CacheUpdate: new rows of keys or values written to their positions in a cache that lives between runs. */
#include "backend/cuda/operator.cuh"

namespace egi {
namespace {

enum { INPUT_CACHE, INPUT_ROWS, INPUT_POSITIONS };
enum { THREADS = 256, MOST_BLOCKS = 1 << 16 };

/* Strides in elements: batch, head, row, column. */
struct cache_job {
  const void *rows;
  void *cache;
  const int32_t *positions;
  int64_t dims[4], from[4], to[4], position_stride, n_positions;
  egi_cuda_fault *fault;
};

/* A block a row. Of rows with equal positions the last one stays, so that it does not matter which block is first. */
template <class Unit> __global__ void __launch_bounds__(THREADS) cache_update(const cache_job job) {
  for (int64_t row = blockIdx.x; row < job.dims[2]; row += gridDim.x) {
    const int64_t position = job.positions[row * job.position_stride];
    int is_written_again = 0;
    for (int64_t i = row + 1 + threadIdx.x; i < job.dims[2]; i += THREADS)
      is_written_again |= job.positions[i * job.position_stride] == position;
    if (__syncthreads_or(is_written_again)) continue;
    if (position < 0 || position >= job.n_positions) {
      if (threadIdx.x == 0) egi_cuda_raise(job.fault, EGI_CUDA_FAULT_INDEX, EGI_OP_CacheUpdate, position);
      continue;
    }
    for (int64_t i = threadIdx.x; i < job.dims[0] * job.dims[1] * job.dims[3]; i += THREADS) {
      const int64_t column = i % job.dims[3], head = i / job.dims[3] % job.dims[1];
      const int64_t batch = i / job.dims[3] / job.dims[1];
      const int64_t source = batch * job.from[0] + head * job.from[1] + row * job.from[2] + column * job.from[3];
      const int64_t target = batch * job.to[0] + head * job.to[1] + position * job.to[2] + column * job.to[3];
      static_cast<Unit *>(job.cache)[target] = static_cast<const Unit *>(job.rows)[source];
    }
  }
}

template <class Unit> void launch(const cache_job &job, unsigned n_blocks, cudaStream_t stream) {
  cache_update<Unit><<<n_blocks, THREADS, 0, stream>>>(job);
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_cache_update(egi_kernel_plan *plan) {
  const egi_tensor *cache = &plan->inputs[egi::INPUT_CACHE], *rows = &plan->inputs[egi::INPUT_ROWS];
  if (egi_element_bytes(cache->dtype) == 0 || egi_element_bytes(cache->dtype) > 8 || rows->dtype != cache->dtype ||
      plan->inputs[egi::INPUT_POSITIONS].dtype != EG_DTYPE_I32)
    return egi_fail_types(plan);
  for (int i = 0; i < 4; i++)
    if (i != 2 && cache->dims[i] != rows->dims[i])
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the rows do not fit the cache");
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_cache_update(eg_context *ctx, const egi_kernel_call *call) {
  const egi_tensor *cache = &call->inputs[egi::INPUT_CACHE], *rows = &call->inputs[egi::INPUT_ROWS];
  const egi_tensor *positions = &call->inputs[egi::INPUT_POSITIONS];
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  egi::cache_job job = {};
  int64_t count = 1;
  for (int i = 0; i < 4; i++) {
    count *= job.dims[i] = rows->dims[i];
    job.from[i] = rows->strides[i];
    job.to[i] = cache->strides[i];
  }
  if (count == 0) return EG_OK;
  job.rows = rows->data;
  job.cache = cache->data;
  job.positions = static_cast<const int32_t *>(positions->data);
  job.position_stride = positions->strides[0];
  job.n_positions = cache->dims[2];
  job.fault = egi_cuda_stream_of(call)->fault;
  const unsigned n_blocks = static_cast<unsigned>(rows->dims[2] < egi::MOST_BLOCKS ? rows->dims[2] : egi::MOST_BLOCKS);
  switch (egi_element_bytes(cache->dtype)) {
  case 1:
    egi::launch<uint8_t>(job, n_blocks, stream);
    break;
  case 2:
    egi::launch<uint16_t>(job, n_blocks, stream);
    break;
  case 4:
    egi::launch<uint32_t>(job, n_blocks, stream);
    break;
  default:
    egi::launch<uint64_t>(job, n_blocks, stream);
  }
  return egi_cuda_launched(ctx, "cache_update");
}
