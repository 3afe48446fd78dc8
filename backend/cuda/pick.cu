/* OneHot, ReverseSequence, Pad and its gradient, Tile: each element of the result finds what it is made of. PadGrad
 * sums in f64, in the order of the padded positions along each axis: deterministic. */
#include "backend/cuda/index.cuh"

namespace egi::plain {

/* ---- OneHot ------------------------------------------------------------------------------------------------------ */

struct one_hot_params {
  int axis;
};

struct one_hot_run {
  const char *indices;
  int index_dtype, index_bytes;
  int64_t depth, inner, count;
  const char *values; /* [off, on] */
  char *out;
};

template <class Word> __global__ void make_one_hot(one_hot_run r) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  const Word off = reinterpret_cast<const Word *>(r.values)[0], on = reinterpret_cast<const Word *>(r.values)[1];
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < r.count; i += step) {
    const int64_t place = i / r.inner % r.depth, at = i / r.inner / r.depth * r.inner + i % r.inner;
    int64_t index = load_number<int64_t>(r.indices + at * r.index_bytes, r.index_dtype);
    if (index < 0) index += r.depth;
    reinterpret_cast<Word *>(r.out)[i] = index == place ? on : off;
  }
}

/* ---- ReverseSequence --------------------------------------------------------------------------------------------- */

struct reverse_params {
  int time;
};

/* Operands output and input; dims are not merged, so that time and batch are still there. */
template <class Word> __global__ void reverse_steps(strided loop, index_list lengths, int time, egi_cuda_fault *fault) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS, steps = loop.dims[time];
  int64_t inner[2] = {1, 1};
  for (int k = loop.rank - 1; k > 1; k--) inner[1] *= loop.dims[k];
  inner[0] = inner[1] * loop.dims[1];
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < loop.count; i += step) {
    const int64_t t = i / inner[time] % steps, length = index_at(lengths, i / inner[1 - time] % loop.dims[1 - time]);
    if (length < 0 || length > steps) {
      egi_cuda_raise(fault, EGI_CUDA_FAULT_COUNT, EGI_OP_ReverseSequence, length);
      continue;
    }
    int64_t offsets[2];
    offsets_at(loop, i, offsets);
    const int64_t from = t < length ? length - 1 - t : t;
    *reinterpret_cast<Word *>(loop.data[0] + offsets[0]) =
        *reinterpret_cast<const Word *>(loop.data[1] + offsets[1] + (from - t) * loop.strides[1][time]);
  }
}

/* ---- Pad --------------------------------------------------------------------------------------------------------- */

enum pad_mode { MODE_CONSTANT, MODE_EDGE, MODE_REFLECT, MODE_WRAP };

struct pad_params {
  pad_mode mode;
  int64_t before[EGI_MAX_RANK];
};

struct pad_run {
  pad_mode mode;
  int rank, dtype, element_bytes;
  int64_t count; /* elements of the result */
  int64_t before[EGI_MAX_RANK], small[EGI_MAX_RANK], padded[EGI_MAX_RANK];
  int64_t in_strides[EGI_MAX_RANK], out_strides[EGI_MAX_RANK]; /* bytes */
  const char *in, *constant;                                   /* constant NULL: zero */
  char *out;
};

/* Where position `at` of an axis of `size` elements, which may lie outside, is read; -1: nowhere. */
__device__ __forceinline__ int64_t source_of(pad_mode mode, int64_t at, int64_t size) {
  if (at >= 0 && at < size) return at;
  if (mode == MODE_CONSTANT || size == 0) return -1;
  if (mode == MODE_EDGE) return at < 0 ? 0 : size - 1;
  const int64_t period = mode == MODE_WRAP ? size : size > 1 ? 2 * (size - 1) : 1;
  const int64_t folded = (at % period + period) % period;
  return folded < size ? folded : period - folded;
}

template <class Word> __global__ void pad_elements(pad_run r) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < r.count; i += step) {
    int64_t from = 0, to = 0, rest = i;
    bool is_there = true;
    for (int k = r.rank - 1; k >= 0; k--) {
      const int64_t quotient = rest / r.padded[k], at = rest - quotient * r.padded[k];
      const int64_t source = source_of(r.mode, at - r.before[k], r.small[k]);
      is_there = is_there && source >= 0;
      from += source * r.in_strides[k];
      to += at * r.out_strides[k];
      rest = quotient;
    }
    Word word = {};
    if (is_there)
      word = *reinterpret_cast<const Word *>(r.in + from);
    else if (r.constant != NULL)
      word = *reinterpret_cast<const Word *>(r.constant);
    *reinterpret_cast<Word *>(r.out + to) = word;
  }
}

/* Positions of a padded axis that read `source`: up to two sequences with a common step. */
struct readers {
  int64_t first[2], count[2], step;
};

__device__ __forceinline__ int64_t members(int64_t first, int64_t end, int64_t step) {
  return first >= end ? 0 : (end - first + step - 1) / step;
}

__device__ readers readers_of(const pad_run &r, int axis, int64_t source) {
  const int64_t size = r.small[axis], end = r.padded[axis], own = source + r.before[axis];
  readers found = {{own, 0}, {own >= 0 && own < end ? 1 : 0, 0}, 1};
  if (r.mode == MODE_CONSTANT) return found;
  if (r.mode == MODE_EDGE) {
    const int64_t low = source == 0 ? 0 : own, high = source == size - 1 ? end : own + 1;
    found.first[0] = low < 0 ? 0 : low;
    found.count[0] = members(found.first[0], high < end ? high : end, 1);
    return found;
  }
  const int64_t period = r.mode == MODE_WRAP ? size : size > 1 ? 2 * (size - 1) : 1;
  found.step = period;
  found.first[0] = (own % period + period) % period;
  found.count[0] = members(found.first[0], end, period);
  if (r.mode == MODE_WRAP || source == 0 || source == size - 1) return found;
  const int64_t mirrored = r.before[axis] - source;
  found.first[1] = (mirrored % period + period) % period;
  found.count[1] = members(found.first[1], end, period);
  return found;
}

/* One element of the gradient: the sum over all combinations of readers, counted through like an odometer. */
__device__ double sum_readers(const pad_run &r, const int64_t *place) {
  readers axes[EGI_MAX_RANK];
  int64_t at[EGI_MAX_RANK];
  double sum = 0.0;
  for (int k = 0; k < r.rank; k++) {
    axes[k] = readers_of(r, k, place[k]);
    at[k] = 0;
    if (axes[k].count[0] + axes[k].count[1] == 0) return 0.0;
  }
  for (;;) {
    int64_t offset = 0;
    for (int k = 0; k < r.rank; k++) {
      const readers &a = axes[k];
      const bool is_first = at[k] < a.count[0];
      offset += (a.first[is_first ? 0 : 1] + (is_first ? at[k] : at[k] - a.count[0]) * a.step) * r.in_strides[k];
    }
    sum += load_number<double>(r.in + offset, r.dtype);
    int k = r.rank - 1;
    for (; k >= 0 && ++at[k] == axes[k].count[0] + axes[k].count[1]; k--) at[k] = 0;
    if (k < 0) return sum;
  }
}

__global__ void pad_gradient(pad_run r) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < r.count; i += step) {
    int64_t place[EGI_MAX_RANK], to = 0, rest = i;
    for (int k = r.rank - 1; k >= 0; k--) {
      const int64_t quotient = rest / r.small[k];
      place[k] = rest - quotient * r.small[k];
      to += place[k] * r.out_strides[k];
      rest = quotient;
    }
    store_number<double>(r.out + to, r.dtype, sum_readers(r, place));
  }
}

static eg_status read_mode(const egi_kernel_plan *plan, pad_params *p) {
  static const char *const names[] = {"constant", "edge", "reflect", "wrap"};
  const char *mode = egi_node_string(egi_plan_node(plan), "mode", "constant");
  for (int i = 0; i < 4; i++) {
    if (strcmp(mode, names[i]) != 0) continue;
    p->mode = static_cast<pad_mode>(i);
    return EG_OK;
  }
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "unknown mode \"%s\"", mode);
}

/* Pads, input `pads_at`, and axes, input `axes_at` where it is there, checked against the planned dims. */
static eg_status read_pads(egi_kernel_plan *plan, const unsigned at[2], const egi_tensor *small,
                           const egi_tensor *padded, pad_params *p) {
  int64_t pads[2 * EGI_MAX_RANK], axes[EGI_MAX_RANK], after[EGI_MAX_RANK] = {};
  uint32_t n_pads = 0, n_axes = static_cast<uint32_t>(padded->rank);
  for (int i = 0; i < EGI_MAX_RANK; i++) axes[i] = i;
  EG_TRY(known_integers(plan, at[0], pads, 2 * EGI_MAX_RANK, &n_pads));
  if (egi_plan_has_input(plan, at[1])) EG_TRY(known_integers(plan, at[1], axes, EGI_MAX_RANK, &n_axes));
  if (n_pads != 2 * n_axes)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "%u paddings for %u axes", n_pads, n_axes);
  for (uint32_t i = 0; i < n_axes; i++) {
    int axis;
    if (!egi_normalise_axis(axes[i], padded->rank, &axis))
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "axis %lld of a tensor of rank %d",
                           static_cast<long long>(axes[i]), padded->rank);
    p->before[axis] = pads[i];
    after[axis] = pads[n_axes + i];
  }
  for (int i = 0; i < padded->rank; i++) {
    const int64_t limit = INT64_MAX / 4, before = p->before[i];
    const bool is_small = before > -limit && before < limit && after[i] > -limit && after[i] < limit;
    if (!is_small || small->dims[i] + before + after[i] != padded->dims[i])
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "axis %d does not become %lld elements", i,
                           static_cast<long long>(padded->dims[i]));
  }
  return EG_OK;
}

static eg_status new_pad(egi_kernel_plan *plan, const egi_tensor *padded, pad_params **out_params) {
  pad_params *p = EGI_NEW(plan->arena, pad_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = *out_params = p;
  if (egi_element_bytes(padded->dtype) == 0 || padded->dtype != plan->inputs[0].dtype ||
      plan->outputs[0].dtype != padded->dtype)
    return egi_fail_types(plan);
  return read_mode(plan, p);
}

static pad_run begin_pad(const pad_params *p, const egi_tensor *small, const egi_tensor *padded, const egi_tensor *in,
                         const egi_tensor *out) {
  pad_run r = {};
  r.mode = p->mode;
  r.rank = padded->rank;
  r.dtype = in->dtype;
  r.element_bytes = static_cast<int>(egi_element_bytes(in->dtype));
  r.count = egi_tensor_count(out);
  r.in = static_cast<const char *>(in->data);
  r.out = static_cast<char *>(out->data);
  for (int i = 0; i < padded->rank; i++) {
    r.before[i] = p->before[i];
    r.small[i] = small->dims[i];
    r.padded[i] = padded->dims[i];
    r.in_strides[i] = in->strides[i] * r.element_bytes;
    r.out_strides[i] = out->strides[i] * r.element_bytes;
  }
  return r;
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_one_hot(egi_kernel_plan *plan) {
  one_hot_params *p = EGI_NEW(plan->arena, one_hot_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const egi_tensor *out = &plan->outputs[0], *values = &plan->inputs[2];
  const int64_t axis = egi_node_int(egi_plan_node(plan), "axis", -1);
  if (inside_of(plan->inputs[0].dtype) == INSIDE_NONE || values->dtype != out->dtype ||
      egi_element_bytes(out->dtype) == 0)
    return egi_fail_types(plan);
  if (egi_tensor_count(values) != 2)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "values are not two numbers");
  if (egi_normalise_axis(axis, out->rank, &p->axis)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis %lld of a tensor of rank %d",
                       static_cast<long long>(axis), out->rank);
}

extern "C" eg_status egi_cuda_run_one_hot(eg_context *ctx, const egi_kernel_call *call) {
  const one_hot_params *p = static_cast<const one_hot_params *>(call->params);
  const egi_tensor *out = &call->outputs[0], *indices = &call->inputs[0];
  one_hot_run r = {};
  r.indices = static_cast<const char *>(indices->data);
  r.index_dtype = indices->dtype;
  r.index_bytes = static_cast<int>(egi_element_bytes(indices->dtype));
  r.depth = out->dims[p->axis];
  r.inner = dims_product(out, p->axis + 1, out->rank);
  r.count = egi_tensor_count(out);
  r.values = static_cast<const char *>(call->inputs[2].data);
  r.out = static_cast<char *>(out->data);
  if (r.count == 0) return EG_OK;
  with_word(egi_element_bytes(out->dtype), [&](auto zero) {
    make_one_hot<decltype(zero)><<<blocks_for(r.count), BLOCK_THREADS, 0, egi_cuda_stream_of(call)->stream>>>(r);
  });
  return egi_cuda_launched(ctx, "make_one_hot");
}

extern "C" eg_status egi_cuda_prepare_reverse_sequence(egi_kernel_plan *plan) {
  reverse_params *p = EGI_NEW(plan->arena, reverse_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const eg_dtype dtype = plan->inputs[0].dtype;
  if (egi_element_bytes(dtype) == 0 || plan->outputs[0].dtype != dtype || plan->inputs[1].dtype != EG_DTYPE_I64 ||
      plan->inputs[0].rank < 2)
    return egi_fail_types(plan);
  const int64_t axis = egi_node_int(egi_plan_node(plan), "time_axis", 0);
  if (egi_normalise_axis(axis, plan->inputs[0].rank, &p->time) && p->time < 2) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "its time axis is %lld", static_cast<long long>(axis));
}

/* Time and batch are the first two dims, in either order. The first `length` steps of a batch entry turn round. */
extern "C" eg_status egi_cuda_run_reverse_sequence(eg_context *ctx, const egi_kernel_call *call) {
  const reverse_params *p = static_cast<const reverse_params *>(call->params);
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  strided loop;
  strided_init(&loop, &call->outputs[0]);
  strided_add(&loop, &call->inputs[0]);
  if (loop.count == 0) return EG_OK;
  const index_list lengths = index_list_of(&call->inputs[1]);
  with_word(egi_element_bytes(call->inputs[0].dtype), [&](auto zero) {
    reverse_steps<decltype(zero)>
        <<<blocks_for(loop.count), BLOCK_THREADS, 0, stream->stream>>>(loop, lengths, p->time, stream->fault);
  });
  return egi_cuda_launched(ctx, "reverse_steps");
}

extern "C" eg_status egi_cuda_prepare_pad(egi_kernel_plan *plan) {
  static const unsigned lists[2] = {1, 3};
  pad_params *p;
  if (egi_plan_has_input(plan, 2) && plan->inputs[2].dtype != plan->inputs[0].dtype) return egi_fail_types(plan);
  EG_TRY(new_pad(plan, &plan->outputs[0], &p));
  return read_pads(plan, lists, &plan->inputs[0], &plan->outputs[0], p);
}

extern "C" eg_status egi_cuda_run_pad(eg_context *ctx, const egi_kernel_call *call) {
  const egi_tensor *in = &call->inputs[0], *out = &call->outputs[0];
  pad_run r = begin_pad(static_cast<const pad_params *>(call->params), in, out, in, out);
  if (egi_call_has_input(call, 2)) r.constant = static_cast<const char *>(call->inputs[2].data);
  if (r.count == 0) return EG_OK;
  with_word(egi_element_bytes(in->dtype), [&](auto zero) {
    pad_elements<decltype(zero)><<<blocks_for(r.count), BLOCK_THREADS, 0, egi_cuda_stream_of(call)->stream>>>(r);
  });
  return egi_cuda_launched(ctx, "pad_elements");
}

/* data (shape only), dY, pads, axes? -> d data. */
extern "C" eg_status egi_cuda_prepare_pad_grad(egi_kernel_plan *plan) {
  static const unsigned lists[2] = {2, 3};
  pad_params *p;
  if (!egi_dtype_is_float(plan->outputs[0].dtype) || inside_of(plan->outputs[0].dtype) == INSIDE_NONE)
    return egi_fail_types(plan);
  EG_TRY(new_pad(plan, &plan->inputs[1], &p));
  return read_pads(plan, lists, &plan->outputs[0], &plan->inputs[1], p);
}

extern "C" eg_status egi_cuda_run_pad_grad(eg_context *ctx, const egi_kernel_call *call) {
  const egi_tensor *dy = &call->inputs[1], *dx = &call->outputs[0];
  const pad_run r = begin_pad(static_cast<const pad_params *>(call->params), dx, dy, dy, dx);
  if (r.count == 0) return EG_OK;
  pad_gradient<<<blocks_for(r.count), BLOCK_THREADS, 0, egi_cuda_stream_of(call)->stream>>>(r);
  return egi_cuda_launched(ctx, "pad_gradient");
}

extern "C" eg_status egi_cuda_prepare_tile(egi_kernel_plan *plan) {
  const egi_tensor *in = &plan->inputs[0], *out = &plan->outputs[0];
  int64_t wanted[EGI_MAX_RANK];
  uint32_t count = 0;
  if (egi_element_bytes(in->dtype) == 0 || out->dtype != in->dtype) return egi_fail_types(plan);
  bool fits = in->rank == out->rank;
  if (plan->inputs[1].data != NULL) {
    EG_TRY(known_integers(plan, 1, wanted, EGI_MAX_RANK, &count));
    fits = fits && count == static_cast<uint32_t>(in->rank);
  }
  for (int i = 0; fits && i < in->rank; i++) {
    const int64_t size = in->dims[i];
    fits = size == 0 ? out->dims[i] == 0 : out->dims[i] % size == 0;
    if (fits && count > 0) fits = wanted[i] >= 0 && (size == 0 || wanted[i] == out->dims[i] / size);
  }
  return fits ? EG_OK
              : egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "the repetitions do not give the planned shape");
}

/* A tile repeats what a padding that wraps around does. */
extern "C" eg_status egi_cuda_run_tile(eg_context *ctx, const egi_kernel_call *call) {
  pad_params wrapped = {};
  const egi_tensor *in = &call->inputs[0], *out = &call->outputs[0];
  wrapped.mode = MODE_WRAP;
  const pad_run r = begin_pad(&wrapped, in, out, in, out);
  if (r.count == 0) return EG_OK;
  with_word(egi_element_bytes(in->dtype), [&](auto zero) {
    pad_elements<decltype(zero)><<<blocks_for(r.count), BLOCK_THREADS, 0, egi_cuda_stream_of(call)->stream>>>(r);
  });
  return egi_cuda_launched(ctx, "pad_elements");
}
