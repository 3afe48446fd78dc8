/* ReduceSum, ReduceMean, ReduceMax, ReduceMin, ReduceProd, ReduceLogSumExp, SumTo and TileGrad. Floats are accumulated
 * in f64, integers in 64 bits modulo 2^64. A group of 1, 32 or 256 threads reduces a part of what belongs to an output,
 * parts are joined in their order by a second kernel; groups and parts depend on shapes and strides alone. */
#include "backend/cuda/elementwise.cuh"

namespace egi::plain {

/* Threads that keep a large device busy, whatever the device: results must not depend on it. */
enum { WANTED_THREADS = 132 * 2048, MAX_PARTS = 1024, PART_ELEMENTS = 16 };

enum reduce_method { METHOD_SUM, METHOD_MEAN, METHOD_MAX, METHOD_MIN, METHOD_PRODUCT, METHOD_LOG_SUM_EXP };

/* Dims of the input that stay, or go: sizes, and strides in bytes. */
struct dim_list {
  int rank;
  int64_t count, dims[EGI_MAX_RANK], strides[EGI_MAX_RANK];
};

struct reduction {
  const char *in;
  char *out;
  dim_list kept, reduced;
  reduce_method method;
  int dtype, element_bytes, type_bits;
  bool is_packed;  /* reduced elements stand side by side: packets */
  bool is_columns; /* kept elements do: packets of outputs */
  int group;
  int64_t n_parts, part; /* reduced elements, or packets, of a part */
  void *partial;         /* [n_parts][n_outputs] numbers, where there are parts */
};

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

/* log(exp a + exp b) without overflow; a sum of nothing is -inf. */
__device__ inline double log_add(double a, double b) {
  const double high = a > b || a != a ? a : b, low = a > b || a != a ? b : a;
  return isinf(high) ? high : high + log1p(exp(low - high));
}
template <class C> __device__ __forceinline__ C log_add(C a, C b) {
  return a + b; /* refused for integers */
}

/* NaN wins over numbers. */
template <bool IS_SUM, class C> __device__ __forceinline__ C join(reduce_method method, C a, C b) {
  if (IS_SUM) return a + b;
  switch (method) {
  case METHOD_MAX:
    return b > a || b != b ? b : a;
  case METHOD_MIN:
    return b < a || b != b ? b : a;
  case METHOD_PRODUCT:
    return a * b;
  default:
    return log_add(a, b);
  }
}

/* What changes nothing: of a maximum the least value of the type, of a minimum the greatest. */
__device__ __forceinline__ void start_of(const reduction &r, double *out) {
  const double infinity = static_cast<double>(INFINITY);
  *out = r.method == METHOD_PRODUCT ? 1.0 : r.method == METHOD_MIN ? infinity : -infinity;
  if (r.method == METHOD_SUM || r.method == METHOD_MEAN) *out = 0.0;
}
__device__ __forceinline__ void start_of(const reduction &r, int64_t *out) {
  const int64_t greatest = static_cast<int64_t>(UINT64_MAX >> (65 - r.type_bits));
  *out = r.method == METHOD_PRODUCT ? 1 : r.method == METHOD_MIN ? greatest : -greatest - 1;
  if (r.method == METHOD_SUM || r.method == METHOD_MEAN) *out = 0;
}
__device__ __forceinline__ void start_of(const reduction &r, uint64_t *out) {
  *out = r.method == METHOD_PRODUCT ? 1 : r.method == METHOD_MIN ? UINT64_MAX >> (64 - r.type_bits) : 0;
}

template <class C> __device__ __forceinline__ void finish(const reduction &r, int64_t output, C value) {
  if (r.method == METHOD_MEAN) {
    const C n = static_cast<C>(r.reduced.count);
    if (static_cast<C>(0.5) != static_cast<C>(0) || n != static_cast<C>(0)) value = value / n;
  }
  store_number<C>(r.out + output * r.element_bytes, r.dtype, value);
}

/* ---- accumulation ------------------------------------------------------------------------------------------------ */

__device__ __forceinline__ int64_t place_of(const dim_list &list, int64_t linear) {
  return list.rank == 1 ? linear * list.strides[0] : offset_at(list.rank, list.dims, list.strides, linear);
}

/* Elements first, first + group, .. below end of what belongs to one output. */
template <class C, bool IS_SUM>
__device__ __forceinline__ C accumulate(const reduction &r, const char *in, int64_t first, int64_t end) {
  C sum;
  start_of(r, &sum);
#pragma unroll 4
  for (int64_t i = first; i < end; i += r.group)
    sum = join<IS_SUM>(r.method, sum, load_number<C>(in + place_of(r.reduced, i), r.dtype));
  return sum;
}

/* The same over packets. */
template <class C, bool IS_SUM>
__device__ __forceinline__ C accumulate_packets(const reduction &r, const char *in, int64_t first, int64_t end) {
  C sums[PACKET];
#pragma unroll
  for (int k = 0; k < PACKET; k++) start_of(r, &sums[k]);
  for (int64_t i = first; i < end; i += r.group) {
    float numbers[PACKET];
    packet_numbers(load_packet(in + i * PACKET * r.element_bytes, r.dtype, false), r.dtype, numbers);
    if (IS_SUM && r.dtype != EG_DTYPE_F32) { /* halves have bits enough to spare for a sum of eight in f32 */
#pragma unroll
      for (int width = PACKET / 2; width > 0; width /= 2) {
#pragma unroll
        for (int k = 0; k < width; k++) numbers[k] += numbers[k + width];
      }
      sums[0] = sums[0] + static_cast<C>(numbers[0]);
      continue;
    }
#pragma unroll
    for (int k = 0; k < PACKET; k++) sums[k] = join<IS_SUM>(r.method, sums[k], static_cast<C>(numbers[k]));
  }
#pragma unroll
  for (int width = PACKET / 2; width > 0; width /= 2) {
    for (int k = 0; k < width; k++) sums[k] = join<IS_SUM>(r.method, sums[k], sums[k + width]);
  }
  return sums[0];
}

/* Eight outputs side by side of one thread, from packets of reduced elements first .. end - 1. */
template <class C, bool IS_SUM>
__device__ __forceinline__ void accumulate_columns(const reduction &r, const char *in, int64_t first, int64_t end,
                                                   C (&sums)[PACKET]) {
#pragma unroll
  for (int k = 0; k < PACKET; k++) start_of(r, &sums[k]);
#pragma unroll 4
  for (int64_t i = first; i < end; i++) {
    float numbers[PACKET];
    packet_numbers(load_packet(in + place_of(r.reduced, i), r.dtype, false), r.dtype, numbers);
#pragma unroll
    for (int k = 0; k < PACKET; k++) sums[k] = join<IS_SUM>(r.method, sums[k], static_cast<C>(numbers[k]));
  }
}

template <class C, bool IS_SUM> __global__ void __launch_bounds__(BLOCK_THREADS) reduce_columns(reduction r) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS, count = r.kept.count / PACKET;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < count; i += step) {
    const int64_t start = blockIdx.y * r.part,
                  end = r.reduced.count - start < r.part ? r.reduced.count : start + r.part;
    C sums[PACKET];
    accumulate_columns<C, IS_SUM>(r, r.in + place_of(r.kept, i * PACKET), start, end, sums);
#pragma unroll
    for (int k = 0; k < PACKET; k++) {
      if (r.n_parts == 1)
        finish<C>(r, i * PACKET + k, sums[k]);
      else
        static_cast<C *>(r.partial)[blockIdx.y * r.kept.count + i * PACKET + k] = sums[k];
    }
  }
}

/* The results of a group's threads; right in its first one. */
template <class C, bool IS_SUM> __device__ __forceinline__ C join_group(const reduction &r, C value) {
  __shared__ C warps[BLOCK_THREADS / 32];
  if (r.group == 1) return value;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = join<IS_SUM>(r.method, value, static_cast<C>(__shfl_down_sync(0xffffffffu, value, distance)));
  if (r.group == 32) return value;
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (int k = 1; k < BLOCK_THREADS / 32; k++) value = join<IS_SUM>(r.method, value, warps[k]);
  return value;
}

/* A group for each output of each part: blockIdx.y is the part. All threads of a block go round equally often. */
template <class C, bool IS_SUM> __global__ void __launch_bounds__(BLOCK_THREADS) reduce_parts(reduction r) {
  const int64_t per_block = BLOCK_THREADS / r.group, total = r.is_packed ? r.reduced.count / PACKET : r.reduced.count;
  const int64_t lane = threadIdx.x % r.group;
  for (int64_t base = blockIdx.x * per_block; base < r.kept.count; base += gridDim.x * per_block) {
    const int64_t output = base + threadIdx.x / r.group;
    const bool is_inside = output < r.kept.count;
    for (int64_t part = blockIdx.y; part < r.n_parts; part += gridDim.y) {
      const int64_t start = part * r.part, end = total - start < r.part ? total : start + r.part;
      const char *in = r.in + place_of(r.kept, is_inside ? output : 0);
      C value = r.is_packed ? accumulate_packets<C, IS_SUM>(r, in, start + lane, end)
                            : accumulate<C, IS_SUM>(r, in, start + lane, end);
      value = join_group<C, IS_SUM>(r, value);
      if (lane != 0 || !is_inside) continue;
      if (r.n_parts == 1)
        finish<C>(r, output, value);
      else
        static_cast<C *>(r.partial)[part * r.kept.count + output] = value;
    }
  }
}

template <class C, bool IS_SUM> __global__ void join_parts(reduction r) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  const C *partial = static_cast<const C *>(r.partial);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < r.kept.count; i += step) {
    C value = partial[i];
#pragma unroll 4
    for (int64_t part = 1; part < r.n_parts; part++)
      value = join<IS_SUM>(r.method, value, partial[part * r.kept.count + i]);
    finish<C>(r, i, value);
  }
}

/* ---- prepare ----------------------------------------------------------------------------------------------------- */

static void append_dim(dim_list *list, int64_t dim, int64_t stride) {
  const int last = list->rank - 1;
  list->count *= dim;
  if (dim == 1) return;
  if (last >= 0 && list->strides[last] == stride * dim) {
    list->dims[last] *= dim;
    list->strides[last] = stride;
  } else {
    list->dims[list->rank] = dim;
    list->strides[list->rank++] = stride;
  }
}

static void close_list(dim_list *list) {
  if (list->rank > 0) return;
  list->rank = list->dims[0] = 1;
  list->strides[0] = 0;
}

/* Rows of packets start at multiples of 16 bytes if the tensor does, which the run sees. */
static bool can_be_packed(const reduction *r, eg_dtype dtype) {
  bool fits = is_packet_type(dtype) && r->reduced.rank == 1 && r->reduced.strides[0] == r->element_bytes &&
              r->reduced.dims[0] % PACKET == 0;
  for (int i = 0; i < r->kept.rank; i++) fits = fits && r->kept.strides[i] % 16 == 0;
  return fits;
}

/* The same of columns: kept elements come in whole packets. */
static bool can_be_columns(const reduction *r, eg_dtype dtype) {
  const int last = r->kept.rank - 1;
  bool fits = is_packet_type(dtype) && r->kept.strides[last] == r->element_bytes && r->kept.dims[last] % PACKET == 0;
  for (int i = 0; i < last; i++) fits = fits && r->kept.strides[i] % 16 == 0;
  for (int i = 0; i < r->reduced.rank; i++) fits = fits && r->reduced.strides[i] % 16 == 0;
  return fits && r->reduced.count > 1;
}

/* Groups and parts. Kept elements that stand side by side are read by neighbouring threads. */
static void choose_groups(reduction *r) {
  const int64_t kept = r->kept.strides[r->kept.rank - 1], reduced = r->reduced.strides[r->reduced.rank - 1];
  const int64_t n = r->reduced.count, n_outputs = r->kept.count > 0 ? r->kept.count : 1;
  const bool is_by_columns = kept == r->element_bytes && reduced != r->element_bytes && n_outputs >= 32;
  r->is_columns = is_by_columns && !r->is_packed && can_be_columns(r, static_cast<eg_dtype>(r->dtype));
  r->group = is_by_columns || n <= 16 ? 1 : n >= 1024 || n_outputs < 1024 ? BLOCK_THREADS : 32;
  const int64_t rounds = ((r->is_packed ? n / PACKET : n) + r->group - 1) / r->group;
  int64_t parts = WANTED_THREADS / r->group / (r->is_columns ? (n_outputs + PACKET - 1) / PACKET : n_outputs);
  if (parts > rounds / PART_ELEMENTS) parts = rounds / PART_ELEMENTS;
  r->n_parts = parts < 1 ? 1 : parts > MAX_PARTS ? MAX_PARTS : parts;
  r->part = (rounds + r->n_parts - 1) / r->n_parts * r->group;
}

/* Everything but the dims: `dtype` that of input and output. */
static eg_status new_reduction(egi_kernel_plan *plan, reduce_method method, eg_dtype dtype, reduction **out) {
  reduction *r = EGI_NEW(plan->arena, reduction, 1);
  if (r == NULL) return EG_ERROR_MEMORY;
  plan->params = *out = r;
  const bool is_boolean_sum = dtype == EG_DTYPE_BOOL && method != METHOD_MAX && method != METHOD_MIN;
  const bool is_whole_sum = method == METHOD_LOG_SUM_EXP && !egi_dtype_is_float(dtype);
  if (inside_of(dtype) == INSIDE_NONE || plan->outputs[0].dtype != dtype || is_boolean_sum || is_whole_sum)
    return egi_fail_types(plan);
  r->method = method;
  r->dtype = dtype;
  r->element_bytes = static_cast<int>(egi_element_bytes(dtype));
  r->type_bits = static_cast<int>(egi_dtype_bits(dtype));
  r->kept.count = r->reduced.count = 1;
  return EG_OK;
}

static eg_status finish_plan(egi_kernel_plan *plan, reduction *r) {
  close_list(&r->kept);
  close_list(&r->reduced);
  r->is_packed = can_be_packed(r, static_cast<eg_dtype>(r->dtype));
  choose_groups(r);
  if (r->n_parts > 1)
    plan->workspace_bytes = static_cast<size_t>(r->n_parts) * static_cast<size_t>(r->kept.count) * sizeof(double);
  return EG_OK;
}

static eg_status plan_axes(egi_kernel_plan *plan, reduction *r, const bool *is_reduced) {
  const egi_tensor *input = &plan->inputs[0];
  for (int i = 0; i < input->rank; i++)
    append_dim(is_reduced[i] ? &r->reduced : &r->kept, input->dims[i], input->strides[i] * r->element_bytes);
  if (r->kept.count == egi_tensor_count(&plan->outputs[0])) return finish_plan(plan, r);
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "the axes leave %lld elements where %lld were planned",
                       static_cast<long long>(r->kept.count),
                       static_cast<long long>(egi_tensor_count(&plan->outputs[0])));
}

static reduce_method method_of(egi_op op) {
  switch (op) {
  case EGI_OP_ReduceLogSumExp:
    return METHOD_LOG_SUM_EXP;
  case EGI_OP_ReduceMax:
    return METHOD_MAX;
  case EGI_OP_ReduceMean:
    return METHOD_MEAN;
  case EGI_OP_ReduceMin:
    return METHOD_MIN;
  case EGI_OP_ReduceProd:
    return METHOD_PRODUCT;
  default:
    return METHOD_SUM;
  }
}

/* ---- run --------------------------------------------------------------------------------------------------------- */

template <class C, bool IS_SUM> static void launch(const reduction &r, cudaStream_t stream) {
  const int64_t per_block = BLOCK_THREADS / r.group, limit = 1 << 20;
  const int64_t count = r.is_columns ? r.kept.count / PACKET : r.kept.count;
  const int64_t blocks = (count + per_block - 1) / per_block;
  const dim3 grid(static_cast<unsigned>(blocks < limit ? blocks : limit), static_cast<unsigned>(r.n_parts));
  if (r.is_columns)
    reduce_columns<C, IS_SUM><<<grid, BLOCK_THREADS, 0, stream>>>(r);
  else
    reduce_parts<C, IS_SUM><<<grid, BLOCK_THREADS, 0, stream>>>(r);
  if (r.n_parts > 1) join_parts<C, IS_SUM><<<blocks_for(r.kept.count), BLOCK_THREADS, 0, stream>>>(r);
}

static eg_status run(eg_context *ctx, const egi_kernel_call *call, const egi_tensor *input) {
  reduction r = *static_cast<const reduction *>(call->params);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  r.in = static_cast<const char *>(input->data);
  r.out = static_cast<char *>(call->outputs[0].data);
  r.partial = call->workspace;
  if (r.kept.count == 0) return EG_OK;
  if (reinterpret_cast<uintptr_t>(r.in) % 16 != 0) { /* the same parts, in elements */
    if (r.is_packed) r.part *= PACKET;
    r.is_packed = r.is_columns = false;
  }
  const bool is_sum = r.method == METHOD_SUM || r.method == METHOD_MEAN;
  inside_type inside = inside_of(static_cast<eg_dtype>(r.dtype));
  if (inside == INSIDE_F32) inside = INSIDE_F64;
  if (inside == INSIDE_F64) (is_sum ? launch<double, true> : launch<double, false>)(r, stream);
  if (inside == INSIDE_I64) (is_sum ? launch<int64_t, true> : launch<int64_t, false>)(r, stream);
  if (inside == INSIDE_U64) (is_sum ? launch<uint64_t, true> : launch<uint64_t, false>)(r, stream);
  return egi_cuda_launched(ctx, "reduce");
}

} // namespace egi::plain

using namespace egi::plain;

/* Axes none given: all, or none where the attribute says so. */
extern "C" eg_status egi_cuda_prepare_reduce(egi_kernel_plan *plan) {
  reduction *r;
  int64_t axes[EGI_MAX_RANK];
  uint32_t count = 0;
  bool is_reduced[EGI_MAX_RANK];
  const egi_tensor *input = &plan->inputs[0];
  EG_TRY(new_reduction(plan, method_of(egi_plan_node(plan)->op), input->dtype, &r));
  const bool is_noop = egi_node_int(egi_plan_node(plan), "noop_with_empty_axes", 0) != 0;
  if (egi_plan_has_input(plan, 1)) EG_TRY(known_integers(plan, 1, axes, EGI_MAX_RANK, &count));
  for (int i = 0; i < input->rank; i++) is_reduced[i] = count == 0 && !is_noop;
  for (uint32_t k = 0; k < count; k++) {
    int axis;
    if (!egi_normalise_axis(axes[k], input->rank, &axis))
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "axis %lld of a tensor of rank %d",
                           static_cast<long long>(axes[k]), input->rank);
    is_reduced[axis] = true;
  }
  return plan_axes(plan, r, is_reduced);
}

extern "C" eg_status egi_cuda_run_reduce(eg_context *ctx, const egi_kernel_call *call) {
  return run(ctx, call, &call->inputs[0]);
}

/* x must have the dims of the output broadcast outwards. */
extern "C" eg_status egi_cuda_prepare_sum_to(egi_kernel_plan *plan) {
  reduction *r;
  const egi_tensor *input = &plan->inputs[0], *output = &plan->outputs[0];
  const int missing = input->rank - output->rank;
  bool is_reduced[EGI_MAX_RANK], fits = missing >= 0;
  EG_TRY(new_reduction(plan, METHOD_SUM, input->dtype, &r));
  for (int i = 0; fits && i < input->rank; i++) {
    const int64_t to = i < missing ? 1 : output->dims[i - missing];
    is_reduced[i] = i < missing || to != input->dims[i];
    fits = i < missing || to == input->dims[i] || to == 1;
  }
  if (!fits) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the result is no broadcast source of x");
  return plan_axes(plan, r, is_reduced);
}

extern "C" eg_status egi_cuda_run_sum_to(eg_context *ctx, const egi_kernel_call *call) {
  return run(ctx, call, &call->inputs[0]);
}

/* data (shape only), dY: of each axis the places in a tile stay, the tiles go. */
extern "C" eg_status egi_cuda_prepare_tile_grad(egi_kernel_plan *plan) {
  reduction *r;
  const egi_tensor *dy = &plan->inputs[1], *dx = &plan->outputs[0];
  bool fits = dx->rank == dy->rank;
  EG_TRY(new_reduction(plan, METHOD_SUM, dy->dtype, &r));
  if (!egi_dtype_is_float(dy->dtype)) return egi_fail_types(plan);
  for (int i = 0; fits && i < dx->rank; i++) {
    const int64_t size = dx->dims[i], stride = dy->strides[i] * r->element_bytes;
    fits = size == 0 ? dy->dims[i] == 0 : dy->dims[i] % size == 0;
    append_dim(&r->kept, size, stride);
    append_dim(&r->reduced, size == 0 || !fits ? 1 : dy->dims[i] / size, stride * size);
  }
  if (fits) return finish_plan(plan, r);
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "the repetitions do not give the planned shape");
}

extern "C" eg_status egi_cuda_run_tile_grad(eg_context *ctx, const egi_kernel_call *call) {
  return run(ctx, call, &call->inputs[1]);
}
