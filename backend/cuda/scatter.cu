/* ScatterElements, ScatterND, and the gradients of Gather, GatherElements and GatherND: updates that go to numbered
 * slots. Updates are sorted by slot, stably; a thread makes one number of a slot from its updates in their order. So of
 * equal indices the last wins, and sums have a fixed order; floats are joined in f64 and rounded once. */
#include "backend/cuda/index.cuh"

namespace egi::plain {

enum scatter_method { SCATTER_COPY, SCATTER_ADD, SCATTER_MULTIPLY, SCATTER_MAXIMUM, SCATTER_MINIMUM };

struct scatter_params {
  scatter_method method;
  int axis; /* ND: number of batch dims */
  int64_t n, n_slots;
};

/* ---- slots ------------------------------------------------------------------------------------------------------- */

/* Gather along an axis: the index is the slot. A bad one gets the slot behind the last. */
__global__ void index_slots(index_list indices, int64_t size, uint32_t *out, egi_cuda_fault *fault, int op) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < indices.count; i += step) {
    const int64_t index = checked_index(index_at(indices, i), size, fault, op);
    out[i] = static_cast<uint32_t>(index < 0 ? size : index);
  }
}

/* Elements of contiguous data: dims of indices, strides of data in elements. */
struct element_slots {
  index_list indices;
  int rank, axis, op;
  int64_t dims[EGI_MAX_RANK], strides[EGI_MAX_RANK], size, n_slots;
};

__global__ void find_element_slots(element_slots e, uint32_t *out, egi_cuda_fault *fault) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < e.indices.count; i += step) {
    const int64_t index = checked_index(index_at(e.indices, i), e.size, fault, e.op);
    int64_t offset = 0, rest = i;
    for (int k = e.rank - 1; k >= 0; k--) {
      const int64_t quotient = rest / e.dims[k];
      offset += (k == e.axis ? index : rest - quotient * e.dims[k]) * e.strides[k];
      rest = quotient;
    }
    out[i] = static_cast<uint32_t>(index < 0 ? e.n_slots : offset);
  }
}

__global__ void find_tuple_slots(tuple_space tuples, index_list indices, int64_t n_slots, uint32_t *out,
                                 egi_cuda_fault *fault, int op) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  const int64_t count = tuples.n_batches * tuples.per_batch;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < count; i += step) {
    const int64_t slot = tuple_slot(tuples, indices, i, fault, op);
    out[i] = static_cast<uint32_t>(slot < 0 ? n_slots : slot);
  }
}

/* ---- segments ---------------------------------------------------------------------------------------------------- */

/* out [outer, n_slots, columns] and updates [outer, n, columns]. */
struct segments {
  const uint32_t *slots, *positions; /* sorted */
  int64_t n, n_slots, columns, outer;
  char *out;
  const char *updates;
  int dtype, element_bytes;
  scatter_method method;
  bool adds_to_out; /* the slot's own number comes first */
};

template <class C> __device__ __forceinline__ C join(scatter_method method, C a, C b) {
  switch (method) {
  case SCATTER_ADD:
    return a + b;
  case SCATTER_MULTIPLY:
    return a * b;
  case SCATTER_MAXIMUM:
    return a > b || a != a ? a : b;
  default:
    return a < b || a != a ? a : b;
  }
}

/* The first place after `start` whose slot is another; slots are sorted. */
__device__ __forceinline__ int64_t segment_end(const segments &s, int64_t start, uint32_t slot) {
  int64_t low = start + 1, high = s.n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (s.slots[middle] == slot)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* As memory of that type would hold it. */
template <class C> __device__ __forceinline__ C rounded(C value, int dtype) {
  uint64_t word;
  store_number<C>(reinterpret_cast<char *>(&word), dtype, value);
  return load_number<C>(reinterpret_cast<const char *>(&word), dtype);
}

/* Updates of a tensor are applied one after the other, each in the tensor's type; gradients are summed and rounded
 * once. */
template <class C> __global__ void __launch_bounds__(BLOCK_THREADS) join_segments(segments s) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS, total = s.outer * s.n * s.columns;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; t < total; t += step) {
    const int64_t pair = t / s.columns, column = t - pair * s.columns, outer = pair / s.n, i = pair - outer * s.n;
    const uint32_t slot = s.slots[i];
    if (slot >= s.n_slots || (i > 0 && s.slots[i - 1] == slot)) continue;
    const int64_t end = segment_end(s, i, slot);
    char *out = s.out + ((outer * s.n_slots + slot) * s.columns + column) * s.element_bytes;
    const char *updates = s.updates + (outer * s.n * s.columns + column) * s.element_bytes;
    const int64_t row_bytes = s.columns * s.element_bytes;
    C value = load_number<C>(s.adds_to_out ? out : updates + s.positions[i] * row_bytes, s.dtype);
#pragma unroll 4
    for (int64_t k = s.adds_to_out ? i : i + 1; k < end; k++) {
      value = join(s.method, value, load_number<C>(updates + s.positions[k] * row_bytes, s.dtype));
      if (s.adds_to_out) value = rounded<C>(value, s.dtype);
    }
    store_number<C>(out, s.dtype, value);
  }
}

/* The last update of each slot; columns are words. */
template <class Word> __global__ void __launch_bounds__(BLOCK_THREADS) copy_segments(segments s) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS, total = s.n * s.columns;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; t < total; t += step) {
    const int64_t i = t / s.columns, column = t - i * s.columns;
    const uint32_t slot = s.slots[i];
    if (slot >= s.n_slots || (i + 1 < s.n && s.slots[i + 1] == slot)) continue;
    reinterpret_cast<Word *>(s.out)[slot * s.columns + column] =
        reinterpret_cast<const Word *>(s.updates)[s.positions[i] * s.columns + column];
  }
}

static eg_status launch_segments(eg_context *ctx, const egi_cuda_stream *stream, const segments &s) {
  const unsigned blocks = blocks_for(s.outer * s.n * s.columns);
  if (s.method == SCATTER_COPY) {
    with_word(static_cast<size_t>(s.element_bytes),
              [&](auto zero) { copy_segments<decltype(zero)><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(s); });
    return egi_cuda_launched(ctx, "copy_segments");
  }
  inside_type inside = inside_of(static_cast<eg_dtype>(s.dtype));
  if (inside == INSIDE_F64 || inside == INSIDE_F32)
    join_segments<double><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(s);
  if (inside == INSIDE_I64) join_segments<int64_t><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(s);
  if (inside == INSIDE_U64) join_segments<uint64_t><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(s);
  return egi_cuda_launched(ctx, "join_segments");
}

/* Slots stand unsorted at the start of the workspace. */
static eg_status apply(eg_context *ctx, const egi_kernel_call *call, const scatter_params *p, segments s) {
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  const egi_tensor *out = &call->outputs[0];
  sorted order;
  if (p->n == 0 || s.columns == 0 || s.outer == 0) return EG_OK;
  EG_TRY(sort_keys(ctx, stream, call->workspace, p->n, p->n_slots + 1, &order));
  s.slots = order.keys;
  s.positions = order.positions;
  s.n = p->n;
  s.n_slots = p->n_slots;
  s.out = static_cast<char *>(out->data);
  s.updates = static_cast<const char *>(call->inputs[2].data);
  s.dtype = out->dtype;
  s.element_bytes = static_cast<int>(egi_element_bytes(out->dtype));
  s.method = p->method;
  return launch_segments(ctx, stream, s);
}

/* ---- prepare ----------------------------------------------------------------------------------------------------- */

static eg_status new_params(egi_kernel_plan *plan, scatter_params **out_params) {
  scatter_params *p = EGI_NEW(plan->arena, scatter_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = *out_params = p;
  return EG_OK;
}

static eg_status read_reduction(const egi_kernel_plan *plan, scatter_params *p) {
  static const char *const names[] = {"none", "add", "mul", "max", "min"};
  const char *reduction = egi_node_string(egi_plan_node(plan), "reduction", "none");
  const eg_dtype dtype = plan->inputs[0].dtype;
  for (int i = 0; i < 5; i++) {
    if (strcmp(reduction, names[i]) != 0) continue;
    p->method = static_cast<scatter_method>(i);
    const bool is_number = inside_of(dtype) != INSIDE_NONE && dtype != EG_DTYPE_BOOL;
    return p->method == SCATTER_COPY || is_number ? EG_OK : egi_fail_types(plan);
  }
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "unknown reduction \"%s\"", reduction);
}

static eg_status check_scatter_types(const egi_kernel_plan *plan) {
  const eg_dtype dtype = plan->inputs[0].dtype;
  const bool is_fit = egi_element_bytes(dtype) > 0 && plan->inputs[2].dtype == dtype &&
                      plan->outputs[0].dtype == dtype && is_index_type(plan->inputs[1].dtype);
  return is_fit ? EG_OK : egi_fail_types(plan);
}

static eg_status prepare_gradient(egi_kernel_plan *plan, scatter_params **out_params) {
  const eg_dtype dtype = plan->inputs[2].dtype;
  EG_TRY(new_params(plan, out_params));
  (*out_params)->method = SCATTER_ADD;
  const bool is_fit = egi_dtype_is_float(dtype) && inside_of(dtype) != INSIDE_NONE && plan->outputs[0].dtype == dtype &&
                      is_index_type(plan->inputs[1].dtype);
  return is_fit ? EG_OK : egi_fail_types(plan);
}

static eg_status read_axis(const egi_kernel_plan *plan, scatter_params *p) {
  const int64_t axis = egi_node_int(egi_plan_node(plan), "axis", 0);
  if (egi_normalise_axis(axis, plan->outputs[0].rank, &p->axis)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis %lld of data of rank %d",
                       static_cast<long long>(axis), plan->outputs[0].rank);
}

static eg_status plan_sort(egi_kernel_plan *plan, scatter_params *p, int64_t n, int64_t n_slots) {
  p->n = n;
  p->n_slots = n_slots;
  return sort_room(plan, n, n_slots + 1, &plan->workspace_bytes);
}

static eg_status plan_elements(egi_kernel_plan *plan, scatter_params *p) {
  const egi_tensor *data = &plan->outputs[0], *indices = &plan->inputs[1];
  bool fits = data->rank == indices->rank && plan->inputs[2].rank == indices->rank;
  for (int i = 0; fits && i < data->rank; i++)
    fits = plan->inputs[2].dims[i] == indices->dims[i] && (i == p->axis || indices->dims[i] <= data->dims[i]);
  if (fits) return plan_sort(plan, p, egi_tensor_count(indices), egi_tensor_count(data));
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "indices reach beyond data, or updates differ");
}

static eg_status plan_tuples(egi_kernel_plan *plan, scatter_params *p) {
  tuple_space tuples;
  const egi_tensor *data = &plan->outputs[0];
  if (!tuple_space_init(&tuples, data, &plan->inputs[1], p->axis) ||
      egi_tensor_count(&plan->inputs[2]) != tuples.n_batches * tuples.per_batch * tuples.slice)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "indices and updates do not fit data");
  const int64_t n_slots = dims_product(data, 0, p->axis + tuples.depth);
  return plan_sort(plan, p, tuples.n_batches * tuples.per_batch, n_slots);
}

/* ---- run --------------------------------------------------------------------------------------------------------- */

static eg_status run_elements(eg_context *ctx, const egi_kernel_call *call, bool adds_to_out, int op) {
  const scatter_params *p = static_cast<const scatter_params *>(call->params);
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  const egi_tensor *data = &call->outputs[0], *indices = &call->inputs[1];
  element_slots e = {};
  segments s = {};
  if (p->n == 0) return EG_OK;
  e.indices = index_list_of(indices);
  e.rank = data->rank;
  e.axis = p->axis;
  e.op = op;
  e.size = data->dims[p->axis];
  e.n_slots = p->n_slots;
  memcpy(e.dims, indices->dims, sizeof e.dims);
  memcpy(e.strides, data->strides, sizeof e.strides);
  find_element_slots<<<blocks_for(p->n), BLOCK_THREADS, 0, stream->stream>>>(
      e, static_cast<uint32_t *>(call->workspace), stream->fault);
  s.columns = s.outer = 1;
  s.adds_to_out = adds_to_out;
  return apply(ctx, call, p, s);
}

static eg_status run_tuples(eg_context *ctx, const egi_kernel_call *call, bool adds_to_out, int op) {
  const scatter_params *p = static_cast<const scatter_params *>(call->params);
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  tuple_space tuples;
  segments s = {};
  if (!tuple_space_init(&tuples, &call->outputs[0], &call->inputs[1], p->axis)) return EG_ERROR_INTERNAL;
  if (p->n == 0) return EG_OK;
  find_tuple_slots<<<blocks_for(p->n), BLOCK_THREADS, 0, stream->stream>>>(
      tuples, index_list_of(&call->inputs[1]), p->n_slots, static_cast<uint32_t *>(call->workspace), stream->fault, op);
  s.columns = tuples.slice;
  s.outer = 1;
  s.adds_to_out = adds_to_out;
  return apply(ctx, call, p, s);
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_scatter_elements(egi_kernel_plan *plan) {
  scatter_params *p;
  EG_TRY(check_scatter_types(plan));
  EG_TRY(new_params(plan, &p));
  EG_TRY(read_axis(plan, p));
  EG_TRY(read_reduction(plan, p));
  return plan_elements(plan, p);
}

/* Data, updates and output are contiguous; data may be the output. */
extern "C" eg_status egi_cuda_run_scatter_elements(eg_context *ctx, const egi_kernel_call *call) {
  EG_TRY(copy_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0], &call->inputs[0]));
  return run_elements(ctx, call, true, EGI_OP_ScatterElements);
}

extern "C" eg_status egi_cuda_prepare_scatter_nd(egi_kernel_plan *plan) {
  scatter_params *p;
  EG_TRY(check_scatter_types(plan));
  EG_TRY(new_params(plan, &p));
  EG_TRY(read_reduction(plan, p));
  return plan_tuples(plan, p);
}

extern "C" eg_status egi_cuda_run_scatter_nd(eg_context *ctx, const egi_kernel_call *call) {
  EG_TRY(copy_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0], &call->inputs[0]));
  return run_tuples(ctx, call, true, EGI_OP_ScatterND);
}

/* data (shape only), indices, dY -> d data [outer, slots, columns]. */
extern "C" eg_status egi_cuda_prepare_gather_grad(egi_kernel_plan *plan) {
  scatter_params *p;
  EG_TRY(prepare_gradient(plan, &p));
  EG_TRY(read_axis(plan, p));
  return plan_sort(plan, p, egi_tensor_count(&plan->inputs[1]), plan->outputs[0].dims[p->axis]);
}

extern "C" eg_status egi_cuda_run_gather_grad(eg_context *ctx, const egi_kernel_call *call) {
  const scatter_params *p = static_cast<const scatter_params *>(call->params);
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  const egi_tensor *out = &call->outputs[0];
  segments s = {};
  EG_TRY(clear_tensor(ctx, stream, out));
  if (p->n == 0) return EG_OK;
  index_slots<<<blocks_for(p->n), BLOCK_THREADS, 0, stream->stream>>>(index_list_of(&call->inputs[1]), p->n_slots,
                                                                      static_cast<uint32_t *>(call->workspace),
                                                                      stream->fault, EGI_OP_GatherGrad);
  s.columns = dims_product(out, p->axis + 1, out->rank);
  s.outer = dims_product(out, 0, p->axis);
  return apply(ctx, call, p, s);
}

extern "C" eg_status egi_cuda_prepare_gather_elements_grad(egi_kernel_plan *plan) {
  scatter_params *p;
  EG_TRY(prepare_gradient(plan, &p));
  EG_TRY(read_axis(plan, p));
  return plan_elements(plan, p);
}

extern "C" eg_status egi_cuda_run_gather_elements_grad(eg_context *ctx, const egi_kernel_call *call) {
  EG_TRY(clear_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0]));
  return run_elements(ctx, call, false, EGI_OP_GatherElementsGrad);
}

extern "C" eg_status egi_cuda_prepare_gather_nd_grad(egi_kernel_plan *plan) {
  scatter_params *p;
  EG_TRY(prepare_gradient(plan, &p));
  p->axis = static_cast<int>(egi_node_int(egi_plan_node(plan), "batch_dims", 0));
  return plan_tuples(plan, p);
}

extern "C" eg_status egi_cuda_run_gather_nd_grad(eg_context *ctx, const egi_kernel_call *call) {
  EG_TRY(clear_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0]));
  return run_tuples(ctx, call, false, EGI_OP_GatherNDGrad);
}
