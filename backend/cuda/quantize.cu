/* QuantizeLinear and DequantizeLinear (operator version 25): with one scale, one for each index of an axis, or one for
 * each block along it. y = (x - zero) · scale in f64, rounded once. q = round(x / scale) in f32, to nearest even, +
 * zero, limited to the type. Elementwise: deterministic. */
#include "backend/cuda/narrow.cuh"
#include "backend/cuda/strided.cuh"

namespace egi::plain {

struct quantize_params {
  int64_t count, axis, inner; /* x as [outer, axis, inner] */
  int64_t block, n_blocks;    /* block 0: none */
  bool is_single;             /* one scale */
  narrowing how;
};

struct numbers {
  char *data;
  int dtype, element_bytes;
};

struct quantize_run {
  quantize_params p;
  numbers x, scale, zero, y;    /* zero: no data where there is none */
  bool is_quantising, is_whole; /* whole: q is an integer */
};

__device__ __forceinline__ double read_number(const numbers &n, int64_t i) {
  return get_number(n.data, n.dtype, n.element_bytes, i);
}

/* Index of the scale of element `at`. */
__device__ __forceinline__ int64_t scale_index(const quantize_params &p, int64_t at) {
  if (p.is_single) return 0;
  const int64_t row = at / p.inner;
  if (p.block == 0) return row % p.axis;
  return ((row / p.axis) * p.n_blocks + row % p.axis / p.block) * p.inner + at % p.inner;
}

__device__ __forceinline__ double convert(const quantize_run &r, int64_t at) {
  const int64_t from = scale_index(r.p, at);
  const double x = read_number(r.x, at), scale = read_number(r.scale, from);
  const double zero = r.zero.data != NULL ? read_number(r.zero, from) : 0.0;
  if (!r.is_quantising) return (x - zero) * scale;
  const double y = static_cast<double>(static_cast<float>(x) / static_cast<float>(scale));
  return r.is_whole ? rint(y) + zero : y;
}

/* A thread makes an element, or a whole byte of those below 8 bits, whose unused bits are 0. */
__global__ void __launch_bounds__(BLOCK_THREADS) convert_elements(quantize_run r) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  const int bits = narrow_bits(r.y.dtype), per_byte = 8 / bits;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i * per_byte < r.p.count;
       i += step) {
    if (per_byte == 1) {
      set_number(r.y.data, r.y.dtype, r.y.element_bytes, i, convert(r, i), r.p.how);
      continue;
    }
    unsigned byte = 0;
    for (int k = 0; k < per_byte && i * per_byte + k < r.p.count; k++)
      byte |= encode_number(r.y.dtype, convert(r, i * per_byte + k), r.p.how) << (k * bits);
    r.y.data[i] = static_cast<char>(byte);
  }
}

static void read_axis(const egi_kernel_plan *plan, quantize_params *p) {
  const egi_tensor *x = &plan->inputs[0], *scale = &plan->inputs[1];
  int axis = 0;
  p->count = egi_tensor_count(x);
  p->block = egi_node_int(egi_plan_node(plan), "block_size", 0);
  p->is_single = p->block == 0 && egi_tensor_count(scale) == 1;
  if (p->is_single) return;
  (void)egi_normalise_axis(egi_node_int(egi_plan_node(plan), "axis", 1), x->rank, &axis); /* the shape rule saw it */
  p->axis = x->dims[axis];
  p->inner = dims_product(x, axis + 1, x->rank);
  p->n_blocks = p->block > 0 ? scale->dims[axis] : 0;
}

static eg_status prepare(egi_kernel_plan *plan) {
  quantize_params *p = EGI_NEW(plan->arena, quantize_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  for (unsigned i = 0; i < plan->n_inputs; i++) {
    if (egi_plan_has_input(plan, i) && !is_number_type(plan->inputs[i].dtype)) return egi_fail_types(plan);
  }
  if (!is_number_type(plan->outputs[0].dtype)) return egi_fail_types(plan);
  if (egi_plan_has_input(plan, 2) && egi_tensor_count(&plan->inputs[2]) != egi_tensor_count(&plan->inputs[1]))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "its scales and zero points differ in number");
  p->how = narrowing_of(egi_plan_node(plan));
  read_axis(plan, p);
  return EG_OK;
}

static numbers numbers_of(const egi_tensor *tensor) {
  return {static_cast<char *>(tensor->data), tensor->dtype, static_cast<int>(egi_element_bytes(tensor->dtype))};
}

static eg_status run(eg_context *ctx, const egi_kernel_call *call, bool is_quantising) {
  quantize_run r = {};
  r.p = *static_cast<const quantize_params *>(call->params);
  r.x = numbers_of(&call->inputs[0]);
  r.scale = numbers_of(&call->inputs[1]);
  if (egi_call_has_input(call, 2)) r.zero = numbers_of(&call->inputs[2]);
  r.y = numbers_of(&call->outputs[0]);
  r.is_quantising = is_quantising;
  r.is_whole = !egi_dtype_is_float(call->outputs[0].dtype);
  if (r.p.count == 0) return EG_OK;
  convert_elements<<<blocks_for(r.p.count), BLOCK_THREADS, 0, egi_cuda_stream_of(call)->stream>>>(r);
  return egi_cuda_launched(ctx, "convert_elements");
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_quantize(egi_kernel_plan *plan) {
  return prepare(plan);
}

extern "C" eg_status egi_cuda_run_quantize(eg_context *ctx, const egi_kernel_call *call) {
  return run(ctx, call, true);
}

extern "C" eg_status egi_cuda_prepare_dequantize(egi_kernel_plan *plan) {
  return prepare(plan);
}

extern "C" eg_status egi_cuda_run_dequantize(eg_context *ctx, const egi_kernel_call *call) {
  return run(ctx, call, false);
}
