/* Gather, GatherElements and GatherND. Gather converts f16 or bf16 data where the graph says f32. An index out of range
 * is a fault, and what it names is 0. Nothing is computed: deterministic. */
#include "backend/cuda/index.cuh"

namespace egi::plain {

/* ---- Gather ------------------------------------------------------------------------------------------------------ */

struct gather_params {
  int axis; /* GatherND: number of batch dims */
};

struct gather_run {
  strided slice; /* what one index names, in words: operands output, data */
  index_list indices;
  int rank;                                          /* dims of data before the axis */
  int64_t dims[EGI_MAX_RANK], strides[EGI_MAX_RANK]; /* bytes */
  int64_t size, stride;                              /* of the axis; bytes */
  int64_t out_bytes;                                 /* of a slice in the output */
  int64_t total;                                     /* words of the output */
  egi_cuda_fault *fault;
};

/* Where the word `i` of the output is read and written; false: its index is out of range. */
__device__ __forceinline__ bool locate(const gather_run &r, int64_t i, const char **out_from, char **out_to) {
  const int64_t row = i / r.slice.count, word = i - row * r.slice.count;
  int64_t offsets[2];
  offsets_at(r.slice, word, offsets);
  const int64_t outer = row / r.indices.count;
  const int64_t index =
      checked_index(index_at(r.indices, row - outer * r.indices.count), r.size, r.fault, EGI_OP_Gather);
  *out_from = r.slice.data[1] + offsets[1] + offset_at(r.rank, r.dims, r.strides, outer) + index * r.stride;
  *out_to = r.slice.data[0] + offsets[0] + row * r.out_bytes;
  return index >= 0;
}

template <class Word> __global__ void __launch_bounds__(BLOCK_THREADS) gather_words(gather_run r) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < r.total; i += step) {
    const char *from;
    char *to;
    Word word = {};
    if (locate(r, i, &from, &to)) word = *reinterpret_cast<const Word *>(from);
    *reinterpret_cast<Word *>(to) = word;
  }
}

/* Halves to f32, an element or a packet at a time. */
__global__ void __launch_bounds__(BLOCK_THREADS) gather_widened(gather_run r, bool is_packed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < r.total; i += step) {
    const char *from;
    char *to;
    const bool is_there = locate(r, i, &from, &to);
    if (is_packed) {
      float numbers[PACKET] = {};
      if (is_there) packet_numbers(load_packet(from, r.slice.dtypes[1], false), r.slice.dtypes[1], numbers);
      store_packet(to, EG_DTYPE_F32, numbers);
    } else {
      *reinterpret_cast<float *>(to) = is_there ? load_number<float>(from, r.slice.dtypes[1]) : 0.0f;
    }
  }
}

static eg_status prepare(egi_kernel_plan *plan, bool is_narrow_allowed, gather_params **out_params) {
  gather_params *p = EGI_NEW(plan->arena, gather_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = *out_params = p;
  const eg_dtype dtype = plan->inputs[0].dtype, wanted = plan->outputs[0].dtype;
  const bool is_narrow =
      is_narrow_allowed && wanted == EG_DTYPE_F32 && (dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16);
  const bool is_fit =
      egi_element_bytes(dtype) > 0 && (dtype == wanted || is_narrow) && is_index_type(plan->inputs[1].dtype);
  return is_fit ? EG_OK : egi_fail_types(plan);
}

static eg_status read_axis(const egi_kernel_plan *plan, gather_params *p) {
  const int64_t axis = egi_node_int(egi_plan_node(plan), "axis", 0);
  if (egi_normalise_axis(axis, plan->inputs[0].rank, &p->axis)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis %lld of data of rank %d",
                       static_cast<long long>(axis), plan->inputs[0].rank);
}

/* The dims behind the axis, as they lie in data and, contiguous, in the output. */
static strided slice_of(const egi_tensor *data, const egi_tensor *output, int axis) {
  egi_tensor in_slice = *data, out_slice = *output;
  strided slice;
  in_slice.rank = out_slice.rank = data->rank - axis - 1;
  for (int i = 0; i < in_slice.rank; i++) {
    in_slice.dims[i] = out_slice.dims[i] = data->dims[axis + 1 + i];
    in_slice.strides[i] = data->strides[axis + 1 + i];
  }
  egi_tensor_set_contiguous(&out_slice);
  strided_init(&slice, &out_slice);
  strided_add(&slice, &in_slice);
  strided_collapse(&slice);
  return slice;
}

/* A slice of packets: both sides contiguous and aligned. */
static bool pack_slice(gather_run *r, uint64_t places) {
  const int64_t n = r->slice.count;
  const uint64_t addresses =
      reinterpret_cast<uintptr_t>(r->slice.data[0]) | reinterpret_cast<uintptr_t>(r->slice.data[1]);
  const bool is_fit = r->slice.rank == 1 && r->slice.strides[0][0] == 4 && r->slice.strides[1][0] == 2 &&
                      n % PACKET == 0 && (addresses | places) % 16 == 0;
  if (!is_fit) return false;
  r->slice.count = r->slice.dims[0] = n / PACKET;
  r->slice.strides[0][0] *= PACKET;
  r->slice.strides[1][0] *= PACKET;
  return true;
}

static eg_status run_gather(eg_context *ctx, const egi_kernel_call *call, int axis) {
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  const egi_tensor *data = &call->inputs[0], *output = &call->outputs[0];
  const size_t in_bytes = egi_element_bytes(data->dtype), out_bytes = egi_element_bytes(output->dtype);
  gather_run r = {};
  r.slice = slice_of(data, output, axis);
  if (egi_tensor_count(output) == 0) return EG_OK;
  r.indices = index_list_of(&call->inputs[1]);
  r.fault = stream->fault;
  r.rank = axis;
  r.size = data->dims[axis];
  r.stride = data->strides[axis] * static_cast<int64_t>(in_bytes);
  r.out_bytes = r.slice.count * static_cast<int64_t>(out_bytes);
  uint64_t places = static_cast<uint64_t>(r.stride) | static_cast<uint64_t>(r.out_bytes);
  for (int i = 0; i < axis; i++) {
    r.dims[i] = data->dims[i];
    r.strides[i] = data->strides[i] * static_cast<int64_t>(in_bytes);
    places |= static_cast<uint64_t>(r.strides[i]);
  }
  const int64_t n_rows = egi_tensor_count(output) / r.slice.count;
  if (data->dtype != output->dtype) {
    const bool is_packed = pack_slice(&r, places);
    r.total = n_rows * r.slice.count;
    gather_widened<<<blocks_for(r.total), BLOCK_THREADS, 0, stream->stream>>>(r, is_packed);
    return egi_cuda_launched(ctx, "gather");
  }
  const size_t word = widen(&r.slice, in_bytes, places);
  r.total = n_rows * r.slice.count;
  with_word(word, [&](auto zero) {
    gather_words<decltype(zero)><<<blocks_for(r.total), BLOCK_THREADS, 0, stream->stream>>>(r);
  });
  return egi_cuda_launched(ctx, "gather");
}

/* ---- GatherElements ---------------------------------------------------------------------------------------------- */

struct elements_run {
  const char *data;
  char *out;
  int rank, axis;
  int64_t count, dims[EGI_MAX_RANK], strides[EGI_MAX_RANK]; /* dims of indices, strides of data in bytes */
  int64_t size;                                             /* of data's axis */
  index_list indices;
  egi_cuda_fault *fault;
};

template <class Word> __global__ void gather_elements(elements_run r) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < r.count; i += step) {
    const int64_t index = checked_index(index_at(r.indices, i), r.size, r.fault, EGI_OP_GatherElements);
    int64_t offset = 0, rest = i;
    for (int k = r.rank - 1; k >= 0; k--) {
      const int64_t quotient = rest / r.dims[k];
      offset += (k == r.axis ? index : rest - quotient * r.dims[k]) * r.strides[k];
      rest = quotient;
    }
    Word word = {};
    if (index >= 0) word = *reinterpret_cast<const Word *>(r.data + offset);
    reinterpret_cast<Word *>(r.out)[i] = word;
  }
}

/* ---- GatherND ---------------------------------------------------------------------------------------------------- */

struct nd_run {
  strided slice; /* in words: operands output, data */
  int64_t slice_bytes, total;
  tuple_space tuples;
  index_list indices;
  egi_cuda_fault *fault;
};

template <class Word> __global__ void gather_tuples(nd_run r) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < r.total; i += step) {
    const int64_t row = i / r.slice.count, at = (i - row * r.slice.count) * static_cast<int64_t>(sizeof(Word));
    const int64_t slot = tuple_slot(r.tuples, r.indices, row, r.fault, EGI_OP_GatherND);
    Word word = {};
    if (slot >= 0) word = *reinterpret_cast<const Word *>(r.slice.data[1] + slot * r.slice_bytes + at);
    *reinterpret_cast<Word *>(r.slice.data[0] + row * r.slice_bytes + at) = word;
  }
}

bool tuple_space_init(tuple_space *tuples, const egi_tensor *data, const egi_tensor *indices, int batch_dims) {
  *tuples = {};
  if (batch_dims < 0 || indices->rank < 1 || batch_dims >= indices->rank || batch_dims > data->rank) return false;
  const int64_t depth = indices->dims[indices->rank - 1];
  if (depth < 0 || depth > data->rank - batch_dims) return false;
  for (int i = 0; i < batch_dims; i++) {
    if (data->dims[i] != indices->dims[i]) return false;
  }
  tuples->depth = static_cast<int>(depth);
  const int end = batch_dims + tuples->depth;
  for (int i = 0; i < tuples->depth; i++) {
    tuples->dims[i] = data->dims[batch_dims + i];
    tuples->strides[i] = dims_product(data, batch_dims + i + 1, end);
  }
  tuples->slice = dims_product(data, end, data->rank);
  tuples->batch_stride = dims_product(data, batch_dims, end);
  tuples->n_batches = dims_product(indices, 0, batch_dims);
  tuples->per_batch = dims_product(indices, batch_dims, indices->rank - 1);
  return true;
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_gather(egi_kernel_plan *plan) {
  gather_params *p;
  EG_TRY(prepare(plan, true, &p));
  return read_axis(plan, p);
}

extern "C" eg_status egi_cuda_run_gather(eg_context *ctx, const egi_kernel_call *call) {
  return run_gather(ctx, call, static_cast<const gather_params *>(call->params)->axis);
}

extern "C" eg_status egi_cuda_prepare_gather_elements(egi_kernel_plan *plan) {
  gather_params *p;
  EG_TRY(prepare(plan, false, &p));
  EG_TRY(read_axis(plan, p));
  const egi_tensor *data = &plan->inputs[0], *indices = &plan->inputs[1];
  bool fits = data->rank == indices->rank;
  for (int i = 0; fits && i < data->rank; i++) fits = i == p->axis || indices->dims[i] <= data->dims[i];
  if (fits) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "indices reach beyond data");
}

extern "C" eg_status egi_cuda_run_gather_elements(eg_context *ctx, const egi_kernel_call *call) {
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  const egi_tensor *data = &call->inputs[0], *indices = &call->inputs[1];
  const size_t bytes = egi_element_bytes(data->dtype);
  elements_run r = {};
  r.data = static_cast<const char *>(data->data);
  r.out = static_cast<char *>(call->outputs[0].data);
  r.rank = data->rank;
  r.axis = static_cast<const gather_params *>(call->params)->axis;
  r.count = egi_tensor_count(indices);
  r.size = data->dims[r.axis];
  r.indices = index_list_of(indices);
  r.fault = stream->fault;
  for (int i = 0; i < data->rank; i++) {
    r.dims[i] = indices->dims[i];
    r.strides[i] = data->strides[i] * static_cast<int64_t>(bytes);
  }
  if (r.count == 0) return EG_OK;
  with_word(bytes, [&](auto zero) {
    gather_elements<decltype(zero)><<<blocks_for(r.count), BLOCK_THREADS, 0, stream->stream>>>(r);
  });
  return egi_cuda_launched(ctx, "gather_elements");
}

extern "C" eg_status egi_cuda_prepare_gather_nd(egi_kernel_plan *plan) {
  gather_params *p;
  tuple_space tuples;
  EG_TRY(prepare(plan, false, &p));
  p->axis = static_cast<int>(egi_node_int(egi_plan_node(plan), "batch_dims", 0));
  if (tuple_space_init(&tuples, &plan->inputs[0], &plan->inputs[1], p->axis)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "indices do not fit data with %d batch dims", p->axis);
}

extern "C" eg_status egi_cuda_run_gather_nd(eg_context *ctx, const egi_kernel_call *call) {
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  const gather_params *p = static_cast<const gather_params *>(call->params);
  const size_t bytes = egi_element_bytes(call->inputs[0].dtype);
  nd_run r = {};
  if (!tuple_space_init(&r.tuples, &call->inputs[0], &call->inputs[1], p->axis)) return EG_ERROR_INTERNAL;
  r.slice.rank = 1;
  r.slice.count = r.slice.dims[0] = r.tuples.slice;
  r.slice_bytes = r.tuples.slice * static_cast<int64_t>(bytes);
  for (int k = 0; k < 2; k++) r.slice.strides[k][0] = static_cast<int64_t>(bytes);
  r.slice.data[0] = static_cast<char *>(call->outputs[0].data);
  r.slice.data[1] = static_cast<char *>(call->inputs[0].data);
  r.indices = index_list_of(&call->inputs[1]);
  r.fault = stream->fault;
  if (egi_tensor_count(&call->outputs[0]) == 0) return EG_OK;
  const size_t word = widen(&r.slice, bytes, static_cast<uint64_t>(r.slice_bytes));
  r.total = r.tuples.n_batches * r.tuples.per_batch * r.slice.count;
  with_word(word, [&](auto zero) {
    gather_tuples<decltype(zero)><<<blocks_for(r.total), BLOCK_THREADS, 0, stream->stream>>>(r);
  });
  return egi_cuda_launched(ctx, "gather_tuples");
}
