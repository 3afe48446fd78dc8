/* Operators that make tensors from attributes, sizes and scalars: Constant, ConstantOfShape, Range, Shape, Size,
 * EyeLike; and Trilu, which keeps a triangle. */
#include "backend/cuda/strided.cuh"

namespace egi::plain {

/* ---- Constant ---------------------------------------------------------------------------------------------------- */

struct constant_params {
  const void *bytes;
  size_t size_bytes;
};

/* The content as an attribute gives it; nothing else may stand in a Constant. */
static eg_status constant_bytes(const egi_kernel_plan *plan, const egi_attribute *attribute, constant_params *p) {
  switch (attribute->kind) {
  case EGI_ATTRIBUTE_TENSOR: {
    const egi_bytes *bytes = &plan->graph->module->weights[attribute->u.weight].bytes;
    if (bytes->kind != EGI_BYTES_MEMORY) break;
    *p = {bytes->data, static_cast<size_t>(bytes->size_bytes)};
    return EG_OK;
  }
  case EGI_ATTRIBUTE_FLOAT:
    *p = {&attribute->u.f, sizeof(float)};
    return EG_OK;
  case EGI_ATTRIBUTE_INT:
    *p = {&attribute->u.i, sizeof(int64_t)};
    return EG_OK;
  case EGI_ATTRIBUTE_FLOATS:
    *p = {attribute->u.floats, attribute->count * sizeof(float)};
    return EG_OK;
  case EGI_ATTRIBUTE_INTS:
    *p = {attribute->u.ints, attribute->count * sizeof(int64_t)};
    return EG_OK;
  default:
    break;
  }
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "attribute %s has no content in memory",
                       attribute->name);
}

struct fill_params {
  char value[16]; /* zero: the default, f32 0 */
};

/* ---- Range ------------------------------------------------------------------------------------------------------- */

struct range_run {
  const void *start, *limit, *delta;
  void *out;
  int dtype, element_bytes;
  int64_t count;
  egi_cuda_fault *fault;
};

/* Numbers from start on, limit left out; 0 for a step of 0. */
__device__ __forceinline__ uint64_t count_steps(int64_t start, int64_t limit, int64_t delta) {
  if (delta == 0 || (delta > 0 ? limit <= start : limit >= start)) return 0;
  const uint64_t a = static_cast<uint64_t>(start), b = static_cast<uint64_t>(limit), d = static_cast<uint64_t>(delta);
  const uint64_t span = delta > 0 ? b - a : a - b, step = delta > 0 ? d : 0 - d;
  return span / step + (span % step > 0);
}

/* start + i * delta, in f64 or i64 (modulo 2^64), rounded once. */
template <class C> __global__ void make_range(range_run r) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  const C start = load_number<C>(r.start, r.dtype), delta = load_number<C>(r.delta, r.dtype);
  if (sizeof(C) == 8 && static_cast<C>(0.5) == static_cast<C>(0) && first == 0) {
    const int64_t limit = load_number<int64_t>(r.limit, r.dtype);
    const uint64_t found = count_steps(static_cast<int64_t>(start), limit, static_cast<int64_t>(delta));
    if (found != static_cast<uint64_t>(r.count))
      egi_cuda_raise(r.fault, EGI_CUDA_FAULT_COUNT, EGI_OP_Range, static_cast<int64_t>(found));
  }
  for (int64_t i = first; i < r.count; i += step) {
    char *at = static_cast<char *>(r.out) + i * r.element_bytes;
    if (static_cast<C>(0.5) == static_cast<C>(0))
      store_number<int64_t>(
          at, r.dtype,
          static_cast<int64_t>(static_cast<uint64_t>(start) + static_cast<uint64_t>(i) * static_cast<uint64_t>(delta)));
    else
      store_number<C>(at, r.dtype, start + static_cast<C>(i) * delta);
  }
}

/* ---- triangles and diagonals ------------------------------------------------------------------------------------- */

/* Element [row, column] of a matrix is kept where column - row >= diagonal, or <= it; others are 0. */
struct triangle {
  strided loop; /* operands output, input; not collapsed: the last two dims are the matrix */
  bool is_upper;
  int64_t diagonal;
  const void *diagonal_at; /* on the device where the plan does not know it */
  int diagonal_dtype;
};

template <class Word> __global__ void keep_triangle(triangle t) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  const int last = t.loop.rank - 1;
  const int64_t columns = t.loop.dims[last], rows = t.loop.dims[last - 1];
  int64_t diagonal = t.diagonal;
  if (t.diagonal_at != NULL) diagonal = load_number<int64_t>(t.diagonal_at, t.diagonal_dtype);
  /* Beyond the matrix all diagonals are alike. */
  diagonal = diagonal < -rows - 1 ? -rows - 1 : diagonal > columns + 1 ? columns + 1 : diagonal;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < t.loop.count; i += step) {
    int64_t offsets[2];
    offsets_at(t.loop, i, offsets);
    const int64_t place = i % columns - i / columns % rows;
    const bool is_kept = t.is_upper ? place >= diagonal : place <= diagonal;
    Word *out = reinterpret_cast<Word *>(t.loop.data[0] + offsets[0]);
    if (is_kept)
      *out = *reinterpret_cast<const Word *>(t.loop.data[1] + offsets[1]);
    else
      memset(out, 0, sizeof(Word));
  }
}

struct trilu_params {
  bool is_upper, is_known;
  int64_t diagonal;
};

struct pair16 {
  uint64_t low, high;
};

static void launch_triangle(const triangle &t, size_t element_bytes, cudaStream_t stream) {
  const unsigned blocks = blocks_for(t.loop.count);
  switch (element_bytes) {
  case 1:
    keep_triangle<uint8_t><<<blocks, BLOCK_THREADS, 0, stream>>>(t);
    break;
  case 2:
    keep_triangle<uint16_t><<<blocks, BLOCK_THREADS, 0, stream>>>(t);
    break;
  case 4:
    keep_triangle<uint32_t><<<blocks, BLOCK_THREADS, 0, stream>>>(t);
    break;
  case 8:
    keep_triangle<uint64_t><<<blocks, BLOCK_THREADS, 0, stream>>>(t);
    break;
  default:
    keep_triangle<pair16><<<blocks, BLOCK_THREADS, 0, stream>>>(t);
    break;
  }
}

struct shape_params {
  int start;
};

struct eye_params {
  int64_t diagonal;
};

__global__ void set_diagonal(char *out, int dtype, int element_bytes, int64_t rows, int64_t columns, int64_t diagonal) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; row < rows; row += step) {
    if (diagonal < -row || diagonal >= columns - row) continue;
    store_number<int64_t>(out + (row * columns + row + diagonal) * element_bytes, dtype, 1);
  }
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_constant(egi_kernel_plan *plan) {
  constant_params *p = EGI_NEW(plan->arena, constant_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const egi_node *node = egi_plan_node(plan);
  if (node->n_attributes != 1)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "needs one attribute, has %u", node->n_attributes);
  EG_TRY(constant_bytes(plan, &node->attributes[0], p));
  uint64_t wanted;
  const egi_tensor *output = &plan->outputs[0];
  if (!egi_dtype_bytes(output->dtype, static_cast<uint64_t>(egi_tensor_count(output)), &wanted) ||
      wanted != p->size_bytes)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%zu bytes of content do not fill the output",
                         p->size_bytes);
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_constant(eg_context *ctx, const egi_kernel_call *call) {
  const constant_params *p = static_cast<const constant_params *>(call->params);
  return copy_from_host(ctx, egi_cuda_stream_of(call), call->outputs[0].data, p->bytes, p->size_bytes);
}

extern "C" eg_status egi_cuda_prepare_constant_of_shape(egi_kernel_plan *plan) {
  fill_params *p = EGI_NEW(plan->arena, fill_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const eg_dtype dtype = plan->outputs[0].dtype;
  const size_t element_bytes = egi_element_bytes(dtype);
  const egi_attribute *attribute = egi_node_attribute(egi_plan_node(plan), "value");
  if (element_bytes == 0) return egi_fail_types(plan);
  if (attribute == NULL) return dtype == EG_DTYPE_F32 ? EG_OK : egi_fail_types(plan);
  if (attribute->kind != EGI_ATTRIBUTE_TENSOR) return egi_fail_types(plan);
  const egi_weight *weight = &plan->graph->module->weights[attribute->u.weight];
  if (weight->dtype != dtype || weight->bytes.kind != EGI_BYTES_MEMORY || weight->bytes.size_bytes != element_bytes)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the value must be one element of type %s",
                         egi_dtype_name(dtype));
  memcpy(p->value, weight->bytes.data, element_bytes);
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_constant_of_shape(eg_context *ctx, const egi_kernel_call *call) {
  const fill_params *p = static_cast<const fill_params *>(call->params);
  return fill_from_host(ctx, egi_cuda_stream_of(call), &call->outputs[0], p->value);
}

extern "C" eg_status egi_cuda_prepare_range(egi_kernel_plan *plan) {
  const eg_dtype dtype = plan->outputs[0].dtype;
  for (unsigned i = 0; i < 3; i++) {
    if (plan->inputs[i].dtype != dtype || egi_tensor_count(&plan->inputs[i]) != 1) return egi_fail_types(plan);
  }
  return inside_of(dtype) == INSIDE_NONE || dtype == EG_DTYPE_BOOL ? egi_fail_types(plan) : EG_OK;
}

extern "C" eg_status egi_cuda_run_range(eg_context *ctx, const egi_kernel_call *call) {
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  const egi_tensor *out = &call->outputs[0];
  range_run r = {call->inputs[0].data, call->inputs[1].data, call->inputs[2].data, out->data, out->dtype, 0, 0, NULL};
  r.element_bytes = static_cast<int>(egi_element_bytes(out->dtype));
  r.count = egi_tensor_count(out);
  r.fault = stream->fault;
  const unsigned blocks = blocks_for(r.count > 0 ? r.count : 1);
  if (egi_dtype_is_float(out->dtype))
    make_range<double><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(r);
  else
    make_range<int64_t><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(r);
  return egi_cuda_launched(ctx, "make_range");
}

extern "C" eg_status egi_cuda_prepare_shape(egi_kernel_plan *plan) {
  shape_params *p = EGI_NEW(plan->arena, shape_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const int64_t rank = plan->inputs[0].rank;
  int64_t start = egi_node_int(egi_plan_node(plan), "start", 0);
  if (start < 0) start = start < -rank ? 0 : start + rank;
  p->start = static_cast<int>(start > rank ? rank : start);
  return plan->outputs[0].dtype == EG_DTYPE_I64 ? EG_OK : egi_fail_types(plan);
}

/* The planned size of the output says where the range of dims ends. */
extern "C" eg_status egi_cuda_run_shape(eg_context *ctx, const egi_kernel_call *call) {
  const shape_params *p = static_cast<const shape_params *>(call->params);
  const size_t bytes = static_cast<size_t>(egi_tensor_count(&call->outputs[0])) * sizeof(int64_t);
  return copy_from_host(ctx, egi_cuda_stream_of(call), call->outputs[0].data, call->inputs[0].dims + p->start, bytes);
}

extern "C" eg_status egi_cuda_run_size(eg_context *ctx, const egi_kernel_call *call) {
  const int64_t count = egi_tensor_count(&call->inputs[0]);
  return copy_from_host(ctx, egi_cuda_stream_of(call), call->outputs[0].data, &count, sizeof count);
}

extern "C" eg_status egi_cuda_prepare_eye_like(egi_kernel_plan *plan) {
  eye_params *p = EGI_NEW(plan->arena, eye_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  p->diagonal = egi_node_int(egi_plan_node(plan), "k", 0);
  return inside_of(plan->outputs[0].dtype) == INSIDE_NONE || plan->outputs[0].rank != 2 ? egi_fail_types(plan) : EG_OK;
}

extern "C" eg_status egi_cuda_run_eye_like(eg_context *ctx, const egi_kernel_call *call) {
  const eye_params *p = static_cast<const eye_params *>(call->params);
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  const egi_tensor *out = &call->outputs[0];
  if (egi_tensor_count(out) == 0) return EG_OK;
  EG_TRY(clear_tensor(ctx, stream, out));
  set_diagonal<<<blocks_for(out->dims[0]), BLOCK_THREADS, 0, stream->stream>>>(
      static_cast<char *>(out->data), out->dtype, static_cast<int>(egi_element_bytes(out->dtype)), out->dims[0],
      out->dims[1], p->diagonal);
  return egi_cuda_launched(ctx, "set_diagonal");
}

extern "C" eg_status egi_cuda_prepare_trilu(egi_kernel_plan *plan) {
  trilu_params *p = EGI_NEW(plan->arena, trilu_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const eg_dtype dtype = plan->inputs[0].dtype;
  p->is_upper = egi_node_int(egi_plan_node(plan), "upper", 1) != 0;
  p->is_known = !egi_plan_has_input(plan, 1) || plan->inputs[1].data != NULL;
  if (egi_element_bytes(dtype) == 0 || plan->outputs[0].dtype != dtype || plan->inputs[0].rank < 2)
    return egi_fail_types(plan);
  if (!egi_plan_has_input(plan, 1)) return EG_OK;
  uint32_t count = 0;
  if (p->is_known) EG_TRY(known_integers(plan, 1, &p->diagonal, 1, &count));
  const bool is_one = is_index_type(plan->inputs[1].dtype) && egi_tensor_count(&plan->inputs[1]) == 1;
  if (is_one) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "k must be one integer");
}

extern "C" eg_status egi_cuda_run_trilu(eg_context *ctx, const egi_kernel_call *call) {
  const trilu_params *p = static_cast<const trilu_params *>(call->params);
  triangle t = {};
  strided_init(&t.loop, &call->outputs[0]);
  strided_add(&t.loop, &call->inputs[0]);
  if (t.loop.count == 0) return EG_OK;
  t.is_upper = p->is_upper;
  t.diagonal = p->diagonal;
  if (!p->is_known) {
    t.diagonal_at = call->inputs[1].data;
    t.diagonal_dtype = call->inputs[1].dtype;
  }
  launch_triangle(t, egi_element_bytes(call->outputs[0].dtype), egi_cuda_stream_of(call)->stream);
  return egi_cuda_launched(ctx, "keep_triangle");
}
