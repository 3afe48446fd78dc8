/* Conv (operator version 22) and its gradient, 1 to 3 spatial axes, groups, strides, dilations, pads: direct sums in
 * f64. A thread makes an element of the result or of dX, a block one of dW or d bias, joined in a fixed order:
 * deterministic. Of language models these are short depthwise kernels. */
#include "backend/cuda/strided.cuh"

namespace egi::plain {

enum { AXES = 3 };

struct conv_params {
  int64_t batch, channels, filters, groups;
  int64_t in[AXES], kernel[AXES], out[AXES], stride[AXES], dilation[AXES], before[AXES];
};

struct conv_run {
  conv_params p;
  int dtype, element_bytes;
  const char *x, *w, *bias, *y; /* y: the result, or its gradient */
  char *result;
  int64_t in_size, out_size, kernel_size;
};

__device__ __forceinline__ double read(const conv_run &r, const char *data, int64_t i) {
  return load_number<double>(data + i * r.element_bytes, r.dtype);
}

__device__ __forceinline__ void split_index(const int64_t (&dims)[AXES], int64_t linear, int64_t (&out)[AXES]) {
  for (int axis = AXES - 1; axis >= 0; axis--) {
    out[axis] = linear % dims[axis];
    linear /= dims[axis];
  }
}

/* Offset in the input of what tap `tap` of output position `out` sees; false in the padding. */
__device__ bool input_offset(const conv_params &p, const int64_t (&out)[AXES], const int64_t (&tap)[AXES],
                             int64_t *offset) {
  *offset = 0;
  for (int axis = 0; axis < AXES; axis++) {
    const int64_t at = out[axis] * p.stride[axis] - p.before[axis] + tap[axis] * p.dilation[axis];
    if (at < 0 || at >= p.in[axis]) return false;
    *offset = *offset * p.in[axis] + at;
  }
  return true;
}

/* Offset in the output whose tap `tap` sees input position `in`; false when there is none. */
__device__ bool output_offset(const conv_params &p, const int64_t (&in)[AXES], const int64_t (&tap)[AXES],
                              int64_t *offset) {
  *offset = 0;
  for (int axis = 0; axis < AXES; axis++) {
    const int64_t at = in[axis] + p.before[axis] - tap[axis] * p.dilation[axis];
    if (at < 0 || at % p.stride[axis] != 0 || at / p.stride[axis] >= p.out[axis]) return false;
    *offset = *offset * p.out[axis] + at / p.stride[axis];
  }
  return true;
}

__global__ void __launch_bounds__(BLOCK_THREADS) convolve(conv_run r) {
  const conv_params &p = r.p;
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS, count = p.batch * p.filters * r.out_size;
  const int64_t per_group = p.channels / p.groups;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < count; i += step) {
    const int64_t f = i / r.out_size % p.filters, n = i / r.out_size / p.filters;
    const int64_t first = f / (p.filters / p.groups) * per_group;
    int64_t out[AXES], tap[AXES], offset;
    double sum = r.bias != NULL ? read(r, r.bias, f) : 0.0;
    split_index(p.out, i % r.out_size, out);
    for (int64_t k = 0; k < r.kernel_size; k++) {
      split_index(p.kernel, k, tap);
      if (!input_offset(p, out, tap, &offset)) continue;
      for (int64_t c = 0; c < per_group; c++)
        sum += read(r, r.x, (n * p.channels + first + c) * r.in_size + offset) *
               read(r, r.w, (f * per_group + c) * r.kernel_size + k);
    }
    store_number<double>(r.result + i * r.element_bytes, r.dtype, sum);
  }
}

__global__ void __launch_bounds__(BLOCK_THREADS) input_gradient(conv_run r) {
  const conv_params &p = r.p;
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS, count = p.batch * p.channels * r.in_size;
  const int64_t per_group = p.channels / p.groups, filters = p.filters / p.groups;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < count; i += step) {
    const int64_t channel = i / r.in_size % p.channels, n = i / r.in_size / p.channels;
    const int64_t first = channel / per_group * filters, c = channel % per_group;
    int64_t in[AXES], tap[AXES], offset;
    double sum = 0.0;
    split_index(p.in, i % r.in_size, in);
    for (int64_t k = 0; k < r.kernel_size; k++) {
      split_index(p.kernel, k, tap);
      if (!output_offset(p, in, tap, &offset)) continue;
      for (int64_t f = first; f < first + filters; f++)
        sum += read(r, r.y, (n * p.filters + f) * r.out_size + offset) *
               read(r, r.w, (f * per_group + c) * r.kernel_size + k);
    }
    store_number<double>(r.result + i * r.element_bytes, r.dtype, sum);
  }
}

/* Sums of a block's threads, in a fixed tree. */
__device__ double sum_block(double value) {
  __shared__ double warps[BLOCK_THREADS / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (int k = 0; k < BLOCK_THREADS / 32; k++) sum += warps[k];
  return sum;
}

/* A block for each tap of each filter and channel. */
__global__ void __launch_bounds__(BLOCK_THREADS) kernel_gradient(conv_run r) {
  const conv_params &p = r.p;
  const int64_t per_group = p.channels / p.groups, count = p.filters * per_group * r.kernel_size;
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t c = i / r.kernel_size % per_group, f = i / r.kernel_size / per_group;
    const int64_t channel = f / (p.filters / p.groups) * per_group + c;
    int64_t out[AXES], tap[AXES], offset;
    double sum = 0.0;
    split_index(p.kernel, i % r.kernel_size, tap);
    for (int64_t k = threadIdx.x; k < p.batch * r.out_size; k += BLOCK_THREADS) {
      const int64_t n = k / r.out_size, o = k % r.out_size;
      split_index(p.out, o, out);
      if (!input_offset(p, out, tap, &offset)) continue;
      sum += read(r, r.y, (n * p.filters + f) * r.out_size + o) *
             read(r, r.x, (n * p.channels + channel) * r.in_size + offset);
    }
    sum = sum_block(sum);
    if (threadIdx.x == 0) store_number<double>(r.result + i * r.element_bytes, r.dtype, sum);
  }
}

__global__ void __launch_bounds__(BLOCK_THREADS) bias_gradient(conv_run r) {
  const conv_params &p = r.p;
  for (int64_t f = blockIdx.x; f < p.filters; f += gridDim.x) {
    double sum = 0.0;
    for (int64_t k = threadIdx.x; k < p.batch * r.out_size; k += BLOCK_THREADS)
      sum += read(r, r.y, (k / r.out_size * p.filters + f) * r.out_size + k % r.out_size);
    sum = sum_block(sum);
    if (threadIdx.x == 0) store_number<double>(r.result + f * r.element_bytes, r.dtype, sum);
  }
}

/* ---- prepare ----------------------------------------------------------------------------------------------------- */

static int64_t listed(const egi_node *node, const char *name, int index, int64_t otherwise) {
  uint32_t count = 0;
  const int64_t *list = egi_node_ints(node, name, &count);
  return list != NULL && index >= 0 && static_cast<uint32_t>(index) < count ? list[index] : otherwise;
}

/* What is put before the input at axis i; SAME_UPPER has the odd one at the end. */
static int64_t padding(const egi_node *node, const conv_params *p, int axis, int i) {
  const char *mode = egi_node_string(node, "auto_pad", "NOTSET");
  if (strncmp(mode, "SAME", 4) != 0) return strcmp(mode, "VALID") == 0 ? 0 : listed(node, "pads", i, 0);
  int64_t total = (p->out[axis] - 1) * p->stride[axis] + (p->kernel[axis] - 1) * p->dilation[axis] + 1 - p->in[axis];
  if (total < 0) total = 0;
  return strcmp(mode, "SAME_LOWER") == 0 ? total - total / 2 : total / 2;
}

static eg_status prepare(egi_kernel_plan *plan, const egi_tensor *y) {
  const egi_tensor *x = &plan->inputs[0], *w = &plan->inputs[1];
  const egi_node *node = egi_plan_node(plan);
  conv_params *p = EGI_NEW(plan->arena, conv_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  bool is_fit = egi_dtype_is_float(x->dtype) && inside_of(x->dtype) != INSIDE_NONE;
  for (unsigned i = 1; i < plan->n_inputs; i++)
    is_fit = is_fit && (!egi_plan_has_input(plan, i) || plan->inputs[i].dtype == x->dtype);
  if (!is_fit) return egi_fail_types(plan);
  p->batch = x->dims[0];
  p->channels = x->dims[1];
  p->filters = w->dims[0];
  p->groups = egi_node_int(node, "group", 1);
  if (p->groups < 1 || p->filters % p->groups != 0 || p->channels != p->groups * w->dims[1])
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "its channels and filters do not fit its groups");
  for (int axis = 0; axis < AXES; axis++) {
    const int i = axis - (AXES - (x->rank - 2)); /* leading axes are 1 */
    p->in[axis] = i >= 0 ? x->dims[i + 2] : 1;
    p->kernel[axis] = i >= 0 ? w->dims[i + 2] : 1;
    p->out[axis] = i >= 0 ? y->dims[i + 2] : 1;
    p->stride[axis] = listed(node, "strides", i, 1);
    p->dilation[axis] = listed(node, "dilations", i, 1);
    p->before[axis] = i >= 0 ? padding(node, p, axis, i) : 0;
  }
  return EG_OK;
}

static conv_run begin(const egi_kernel_call *call) {
  conv_run r = {};
  r.p = *static_cast<const conv_params *>(call->params);
  r.dtype = call->inputs[0].dtype;
  r.element_bytes = static_cast<int>(egi_element_bytes(call->inputs[0].dtype));
  r.x = static_cast<const char *>(call->inputs[0].data);
  r.w = static_cast<const char *>(call->inputs[1].data);
  r.in_size = r.p.in[0] * r.p.in[1] * r.p.in[2];
  r.out_size = r.p.out[0] * r.p.out[1] * r.p.out[2];
  r.kernel_size = r.p.kernel[0] * r.p.kernel[1] * r.p.kernel[2];
  return r;
}

static unsigned blocks_of(int64_t n) {
  const int64_t limit = 1 << 20;
  return static_cast<unsigned>(n < limit ? n : limit);
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_conv(egi_kernel_plan *plan) {
  return prepare(plan, &plan->outputs[0]);
}

extern "C" eg_status egi_cuda_run_conv(eg_context *ctx, const egi_kernel_call *call) {
  conv_run r = begin(call);
  r.result = static_cast<char *>(call->outputs[0].data);
  if (egi_call_has_input(call, 2)) r.bias = static_cast<const char *>(call->inputs[2].data);
  const int64_t count = egi_tensor_count(&call->outputs[0]);
  if (count == 0) return EG_OK;
  convolve<<<blocks_for(count), BLOCK_THREADS, 0, egi_cuda_stream_of(call)->stream>>>(r);
  return egi_cuda_launched(ctx, "convolve");
}

extern "C" eg_status egi_cuda_prepare_conv_grad(egi_kernel_plan *plan) {
  return prepare(plan, &plan->inputs[2]);
}

extern "C" eg_status egi_cuda_run_conv_grad(eg_context *ctx, const egi_kernel_call *call) {
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  conv_run r = begin(call);
  r.y = static_cast<const char *>(call->inputs[2].data);
  for (unsigned i = 0; i < 3; i++) {
    if (!has_output(call, i)) continue;
    const int64_t count = egi_tensor_count(&call->outputs[i]);
    r.result = static_cast<char *>(call->outputs[i].data);
    if (count == 0) continue;
    if (i == 0) input_gradient<<<blocks_for(count), BLOCK_THREADS, 0, stream>>>(r);
    if (i == 1) kernel_gradient<<<blocks_of(count), BLOCK_THREADS, 0, stream>>>(r);
    if (i == 2) bias_gradient<<<blocks_of(count), BLOCK_THREADS, 0, stream>>>(r);
  }
  return egi_cuda_launched(ctx, "convolution gradient");
}
