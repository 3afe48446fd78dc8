/* Cast, CastLike and BitCast. Floats to f16 and bf16 are rounded once, to nearest even; float to integer truncates and
 * saturates (NaN: 0); integers keep their low bits; not zero is true. Elementwise: deterministic. */
#include "backend/cuda/elementwise.cuh"
#include "backend/cuda/narrow.cuh"

namespace egi::plain {

template <class C> struct same {
  __device__ __forceinline__ C operator()(const C (&x)[1]) const { return x[0]; }
};

struct cast_params {
  bool is_narrow; /* one of the types is */
  narrowing how;
};

/* Where elements lie: dims and strides in elements. */
struct place {
  const char *data;
  int dtype, element_bytes, rank;
  int64_t dims[EGI_MAX_RANK], strides[EGI_MAX_RANK];
};

static place place_of(const egi_tensor *tensor) {
  place p = {};
  p.data = static_cast<const char *>(tensor->data);
  p.dtype = tensor->dtype;
  p.element_bytes = static_cast<int>(egi_element_bytes(tensor->dtype));
  p.rank = tensor->rank;
  memcpy(p.dims, tensor->dims, sizeof p.dims);
  memcpy(p.strides, tensor->strides, sizeof p.strides);
  return p;
}

__device__ __forceinline__ double read_at(const place &from, int64_t i) {
  return get_number(from.data, from.dtype, from.element_bytes, offset_at(from.rank, from.dims, from.strides, i));
}

/* Integers below 8 bits keep the low bits of what they are made of. */
__device__ __forceinline__ unsigned packed_code(int dtype, double value, const narrowing &how) {
  if (dtype == EG_DTYPE_F4E2M1) return encode_number(dtype, value, how);
  const unsigned mask = (1u << narrow_bits(dtype)) - 1u;
  return isfinite(value) ? static_cast<unsigned>(static_cast<int>(fmod(trunc(value), 256.0))) & mask : 0u;
}

/* A thread writes an element, or a whole byte of those below 8 bits, whose unused bits are 0. */
__global__ void cast_narrow(place to, place from, int64_t count, narrowing how) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  const int bits = narrow_bits(to.dtype), per_byte = 8 / bits;
  char *out = const_cast<char *>(to.data);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i * per_byte < count; i += step) {
    if (per_byte == 1) {
      set_number(out, to.dtype, to.element_bytes, offset_at(to.rank, to.dims, to.strides, i), read_at(from, i), how);
      continue;
    }
    unsigned byte = 0;
    for (int k = 0; k < per_byte && i * per_byte + k < count; k++)
      byte |= packed_code(to.dtype, read_at(from, i * per_byte + k), how) << (k * bits);
    out[i] = static_cast<char>(byte);
  }
}

static bool is_addressable(const egi_tensor *tensor) {
  return is_number_type(tensor->dtype) && (egi_dtype_bits(tensor->dtype) >= 8 || egi_tensor_is_contiguous(tensor));
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_cast(egi_kernel_plan *plan) {
  cast_params *p = EGI_NEW(plan->arena, cast_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const eg_dtype to = plan->outputs[0].dtype, from = plan->inputs[0].dtype;
  if (!is_addressable(&plan->outputs[0]) || !is_addressable(&plan->inputs[0])) return egi_fail_types(plan);
  p->is_narrow = is_narrow_type(to) || is_narrow_type(from);
  p->how = narrowing_of(egi_plan_node(plan));
  return EG_OK;
}

extern "C" eg_status egi_cuda_run_cast(eg_context *ctx, const egi_kernel_call *call) {
  const cast_params *p = static_cast<const cast_params *>(call->params);
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  const egi_tensor *output = &call->outputs[0], *input = &call->inputs[0];
  const int64_t count = egi_tensor_count(output);
  if (count == 0) return EG_OK;
  if (output->dtype == input->dtype && !p->is_narrow && input->dtype != EG_DTYPE_BOOL)
    return copy_tensor(ctx, stream, output, input);
  if (p->is_narrow) {
    cast_narrow<<<blocks_for(count), BLOCK_THREADS, 0, stream->stream>>>(place_of(output), place_of(input), count,
                                                                         p->how);
    return egi_cuda_launched(ctx, "cast");
  }
  const egi_tensor *const inputs[1] = {input};
  const strided loop = loop_of(output, inputs, 1);
  const inside_type inside = inside_of(input->dtype);
  if (inside == INSIDE_F32)
    launch_fast<1>(loop, same<float>(), stream->stream);
  else
    with_inside(inside, [&](auto zero) {
      using C = decltype(zero);
      launch_elements<C, 1>(loop, same<C>(), stream->stream);
    });
  return egi_cuda_launched(ctx, "cast");
}

extern "C" eg_status egi_cuda_prepare_bit_cast(egi_kernel_plan *plan) {
  const unsigned bits = egi_dtype_bits(plan->inputs[0].dtype);
  return bits >= 8 && bits == egi_dtype_bits(plan->outputs[0].dtype) ? EG_OK : egi_fail_types(plan);
}

extern "C" eg_status egi_cuda_run_bit_cast(eg_context *ctx, const egi_kernel_call *call) {
  egi_tensor same_bits = call->inputs[0];
  same_bits.dtype = call->outputs[0].dtype;
  return copy_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0], &same_bits);
}
