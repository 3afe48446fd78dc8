/* ArgMax, ArgMin and TopK along an axis. Numbers become keys of 64 bits in the order that is wanted (NaN is larger than
 * everything, -0 equals 0); of equal ones the first element counts, so that results are unique whatever the order of
 * comparisons. */
#include "backend/cuda/lines.cuh"

namespace egi::plain {

enum { BUFFER = 2048, KEPT = BUFFER / 2, MAX_SORTS = 64 };

struct order_params {
  int axis, dtype;
  inside_type inside;
  bool is_smallest, takes_last;
  int64_t size, k;
  int64_t room; /* TopK in global memory: entries of one line, a power of two; 0: shared memory */
  int64_t n_rooms;
};

/* Larger keys stand first. */
__device__ __forceinline__ uint64_t key_of(const order_params &p, const char *at) {
  constexpr uint64_t top = 1ull << 63;
  uint64_t key;
  if (p.inside == INSIDE_F64) {
    const double x = load_number<double>(at, p.dtype);
    const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(x == 0.0 ? 0.0 : x));
    key = x != x ? UINT64_MAX : (bits & top) != 0 ? ~bits : bits | top;
  } else if (p.inside == INSIDE_I64) {
    key = static_cast<uint64_t>(load_number<int64_t>(at, p.dtype)) ^ top;
  } else {
    key = load_number<uint64_t>(at, p.dtype);
  }
  return p.is_smallest ? ~key : key;
}

/* ---- ArgMax, ArgMin ---------------------------------------------------------------------------------------------- */

struct best {
  uint64_t key;
  int64_t position; /* -1: nothing yet */
};

__device__ __forceinline__ best better(const best &a, const best &b, bool takes_last) {
  if (a.position < 0 || b.position < 0) return a.position < 0 ? b : a;
  if (a.key != b.key) return a.key > b.key ? a : b;
  return (a.position < b.position) != takes_last ? a : b;
}

/* `group` threads, a power of two up to a warp, or a block, have a line each. */
__global__ void __launch_bounds__(BLOCK_THREADS) find_extrema(order_params p, lines l, int64_t *out, int group) {
  __shared__ best warps[BLOCK_THREADS / 32];
  const int64_t per_block = BLOCK_THREADS / group;
  for (int64_t base = blockIdx.x * per_block; base < l.count; base += gridDim.x * per_block) {
    const int64_t line = base + threadIdx.x / group;
    const bool is_inside = line < l.count;
    const char *in = line_at(l, 0, is_inside ? line : 0);
    best found = {0, -1};
    for (int64_t i = threadIdx.x % group; i < p.size; i += group)
      found = better(found, best{key_of(p, in + i * l.steps[0]), i}, p.takes_last);
    for (int distance = (group < 32 ? group : 32) / 2; distance > 0; distance /= 2) {
      const best other = {static_cast<uint64_t>(__shfl_down_sync(0xffffffffu, found.key, distance)),
                          static_cast<int64_t>(__shfl_down_sync(0xffffffffu, found.position, distance))};
      found = better(found, other, p.takes_last);
    }
    if (group == BLOCK_THREADS) {
      __syncthreads();
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = found;
      __syncthreads();
      for (int k = 1; k < BLOCK_THREADS / 32; k++) found = better(found, warps[k], p.takes_last);
    }
    if (is_inside && threadIdx.x % group == 0) out[line] = found.position;
  }
}

/* ---- TopK -------------------------------------------------------------------------------------------------------- */

/* Entries of a line that are sorted: by falling key, then by position. Places beyond the line have key 0 and the last
 * position of all. */
struct entries {
  uint64_t *keys;
  uint32_t *positions;
};

__device__ __forceinline__ bool precedes(uint64_t key_a, uint32_t position_a, uint64_t key_b, uint32_t position_b) {
  return key_a > key_b || (key_a == key_b && position_a < position_b);
}

/* Bitonic sort of n entries, a power of two (K. E. Batcher, "Sorting networks and their applications", 1968), by all
 * threads of the block. */
__device__ void sort_entries(const entries &e, int64_t n) {
  for (int64_t size = 2; size <= n; size *= 2) {
    for (int64_t distance = size / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int64_t i = threadIdx.x; i < n / 2; i += BLOCK_THREADS) {
        const int64_t a = i / distance * 2 * distance + i % distance, b = a + distance;
        const bool is_falling = (a & size) == 0;
        if (precedes(e.keys[a], e.positions[a], e.keys[b], e.positions[b]) == is_falling) continue;
        const uint64_t key = e.keys[a];
        const uint32_t position = e.positions[a];
        e.keys[a] = e.keys[b];
        e.positions[a] = e.positions[b];
        e.keys[b] = key;
        e.positions[b] = position;
      }
    }
  }
  __syncthreads();
}

/* Entries [to, to + n) become those of the line from `from` on, or empty. */
__device__ void load_entries(const order_params &p, const entries &e, const char *in, int64_t step, int64_t to,
                             int64_t n, int64_t from) {
  for (int64_t i = threadIdx.x; i < n; i += BLOCK_THREADS) {
    const bool is_there = from + i < p.size;
    e.keys[to + i] = is_there ? key_of(p, in + (from + i) * step) : 0;
    e.positions[to + i] = is_there ? static_cast<uint32_t>(from + i) : UINT32_MAX;
  }
}

__device__ __forceinline__ void copy_element(char *out, const char *in, int bytes) {
  switch (bytes) {
  case 1:
    *out = *in;
    break;
  case 2:
    *reinterpret_cast<uint16_t *>(out) = *reinterpret_cast<const uint16_t *>(in);
    break;
  case 4:
    *reinterpret_cast<uint32_t *>(out) = *reinterpret_cast<const uint32_t *>(in);
    break;
  default:
    *reinterpret_cast<uint64_t *>(out) = *reinterpret_cast<const uint64_t *>(in);
    break;
  }
}

__device__ void store_entries(const order_params &p, const lines &l, int64_t line, const entries &e, int bytes) {
  const char *in = line_at(l, 0, line);
  for (int64_t i = threadIdx.x; i < p.k; i += BLOCK_THREADS) {
    const int64_t position = e.positions[i];
    if (l.data[1] != NULL) copy_element(line_at(l, 1, line) + i * l.steps[1], in + position * l.steps[0], bytes);
    if (l.data[2] != NULL) *reinterpret_cast<int64_t *>(line_at(l, 2, line) + i * l.steps[2]) = position;
  }
  __syncthreads();
}

/* k of at most KEPT: the best of the buffer's first half meet the rest of the line piece by piece. */
__global__ void __launch_bounds__(BLOCK_THREADS) select_lines(order_params p, lines l, int bytes) {
  __shared__ uint64_t keys[BUFFER];
  __shared__ uint32_t positions[BUFFER];
  const entries e = {keys, positions};
  for (int64_t line = blockIdx.x; line < l.count; line += gridDim.x) {
    const char *in = line_at(l, 0, line);
    int64_t n = 2;
    while (n < p.size && n < BUFFER) n *= 2;
    load_entries(p, e, in, l.steps[0], 0, n, 0);
    sort_entries(e, n);
    for (int64_t from = BUFFER; from < p.size; from += KEPT) {
      bool is_useful = false;
      load_entries(p, e, in, l.steps[0], KEPT, KEPT, from);
      for (int64_t i = KEPT + threadIdx.x; i < BUFFER; i += BLOCK_THREADS)
        is_useful = is_useful || precedes(keys[i], positions[i], keys[p.k - 1], positions[p.k - 1]);
      if (__syncthreads_or(is_useful)) sort_entries(e, BUFFER);
      __syncthreads();
    }
    store_entries(p, l, line, e, bytes);
  }
}

/* Whole lines, sorted in global memory. */
__global__ void __launch_bounds__(BLOCK_THREADS) sort_lines(order_params p, lines l, int bytes, char *workspace) {
  uint64_t *keys = reinterpret_cast<uint64_t *>(workspace) + blockIdx.x * p.room;
  uint32_t *positions =
      reinterpret_cast<uint32_t *>(reinterpret_cast<uint64_t *>(workspace) + p.n_rooms * p.room) + blockIdx.x * p.room;
  const entries e = {keys, positions};
  for (int64_t line = blockIdx.x; line < l.count; line += gridDim.x) {
    load_entries(p, e, line_at(l, 0, line), l.steps[0], 0, p.room, 0);
    sort_entries(e, p.room);
    store_entries(p, l, line, e, bytes);
  }
}

/* ---- prepare ----------------------------------------------------------------------------------------------------- */

static eg_status prepare(egi_kernel_plan *plan, int64_t default_axis, order_params **out_params) {
  order_params *p = EGI_NEW(plan->arena, order_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  const egi_tensor *input = &plan->inputs[0];
  const int64_t axis = egi_node_int(egi_plan_node(plan), "axis", default_axis);
  plan->params = *out_params = p;
  p->dtype = input->dtype;
  p->inside = inside_of(input->dtype);
  if (p->inside == INSIDE_F32) p->inside = INSIDE_F64;
  if (p->inside == INSIDE_NONE) return egi_fail_types(plan);
  if (!egi_normalise_axis(axis, input->rank, &p->axis))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis %lld of a tensor of rank %d",
                         static_cast<long long>(axis), input->rank);
  p->size = input->dims[p->axis];
  return EG_OK;
}

static eg_status plan_rooms(egi_kernel_plan *plan, order_params *p) {
  const int64_t n_lines = p->size > 0 ? egi_tensor_count(&plan->inputs[0]) / p->size : 0;
  if (p->size >= UINT32_MAX)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "its axis is too long");
  if (p->k <= KEPT) return EG_OK;
  for (p->room = 2; p->room < p->size;) p->room *= 2;
  p->n_rooms = n_lines < MAX_SORTS ? n_lines : MAX_SORTS;
  plan->workspace_bytes = static_cast<size_t>(p->room * p->n_rooms) * (sizeof(uint64_t) + sizeof(uint32_t));
  return EG_OK;
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_arg_extremum(egi_kernel_plan *plan) {
  order_params *p;
  EG_TRY(prepare(plan, 0, &p));
  const egi_node *node = egi_plan_node(plan);
  p->is_smallest = node->op == EGI_OP_ArgMin;
  p->takes_last = egi_node_int(node, "select_last_index", 0) != 0;
  if (plan->outputs[0].dtype != EG_DTYPE_I64) return egi_fail_types(plan);
  if (p->size > 0 || egi_tensor_count(&plan->outputs[0]) == 0) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "its axis has no elements");
}

/* The output is contiguous, its elements in the order of the lines. */
extern "C" eg_status egi_cuda_run_arg_extremum(eg_context *ctx, const egi_kernel_call *call) {
  const order_params *p = static_cast<const order_params *>(call->params);
  lines l = {};
  lines_set(&l, 0, &call->inputs[0], p->axis);
  if (l.count == 0) return EG_OK;
  const int group = p->size <= 8 ? 1 : p->size < 1024 ? 32 : BLOCK_THREADS;
  find_extrema<<<blocks_for(l.count * group), BLOCK_THREADS, 0, egi_cuda_stream_of(call)->stream>>>(
      *p, l, static_cast<int64_t *>(call->outputs[0].data), group);
  return egi_cuda_launched(ctx, "find_extrema");
}

extern "C" eg_status egi_cuda_prepare_topk(egi_kernel_plan *plan) {
  order_params *p;
  int64_t k = 0;
  uint32_t count = 0;
  EG_TRY(prepare(plan, -1, &p));
  p->is_smallest = egi_node_int(egi_plan_node(plan), "largest", 1) == 0;
  const egi_tensor *values = &plan->outputs[0], *positions = &plan->outputs[plan->n_outputs - 1];
  const bool is_wanted = plan->n_outputs > 1 && positions->dtype != EG_DTYPE_UNDEFINED;
  if (values->dtype != EG_DTYPE_UNDEFINED && values->dtype != plan->inputs[0].dtype) return egi_fail_types(plan);
  if (is_wanted && positions->dtype != EG_DTYPE_I64) return egi_fail_types(plan);
  p->k = values->dtype != EG_DTYPE_UNDEFINED ? values->dims[p->axis] : is_wanted ? positions->dims[p->axis] : 0;
  if (plan->inputs[1].data != NULL) EG_TRY(known_integers(plan, 1, &k, 1, &count));
  const bool is_right = plan->inputs[1].data == NULL || (count == 1 && k == p->k);
  if (!is_right || p->k > p->size)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "k = %lld of %lld elements where %lld were planned",
                         static_cast<long long>(k), static_cast<long long>(p->size), static_cast<long long>(p->k));
  return plan_rooms(plan, p);
}

extern "C" eg_status egi_cuda_run_topk(eg_context *ctx, const egi_kernel_call *call) {
  const order_params *p = static_cast<const order_params *>(call->params);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  const int bytes = static_cast<int>(egi_element_bytes(call->inputs[0].dtype));
  lines l = {};
  lines_set(&l, 0, &call->inputs[0], p->axis);
  for (unsigned i = 0; i < call->n_outputs && i < 2; i++)
    lines_set(&l, static_cast<int>(i) + 1, &call->outputs[i], p->axis);
  if (l.count == 0 || p->k == 0) return EG_OK;
  if (p->room == 0) {
    const int64_t limit = 1 << 20;
    select_lines<<<static_cast<unsigned>(l.count < limit ? l.count : limit), BLOCK_THREADS, 0, stream>>>(*p, l, bytes);
  } else {
    sort_lines<<<static_cast<unsigned>(p->n_rooms), BLOCK_THREADS, 0, stream>>>(*p, l, bytes,
                                                                                static_cast<char *>(call->workspace));
  }
  return egi_cuda_launched(ctx, "select_lines");
}
