/* The C interface of packed attention: checks arguments, chooses a family of kernels, launches. */
#include "backend/cuda/attention_plan.cuh"

namespace egi {
namespace {

bool is_row_tensor(const egi_cuda_rows &rows) {
  return rows.data && reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.row_stride % 8 == 0 &&
         rows.head_stride % 8 == 0 && rows.row_stride >= 0 && rows.head_stride >= 0;
}

bool is_supported_size(int head_dim, int value_dim) {
  switch (head_dim) {
  case 64:
  case 80:
  case 96:
  case 128:
  case 256:
    return value_dim == head_dim;
  case 192:
    return value_dim == 128;
  default:
    return false;
  }
}

egi_cuda_status check_arguments(const egi_cuda_attention *a, bool is_backward) {
  if (!a) return EGI_CUDA_INVALID;
  const int64_t limit = 1 << 30, tile = 64;
  if (a->n_queries < 1 || a->n_keys < 1 || a->n_queries > limit - 256 || a->n_keys > limit - 256 || a->n_heads < 1 ||
      a->n_kv_heads < 1 || a->n_heads % a->n_kv_heads != 0)
    return EGI_CUDA_INVALID;
  if ((a->n_queries / tile + 4) * a->n_heads > INT_MAX || (2 * a->n_keys / tile + 4) * a->n_kv_heads > INT_MAX ||
      a->n_heads > 65535)
    return EGI_CUDA_UNSUPPORTED;
  if (!(a->scale > 0.0f) || !(a->softcap >= 0.0f) || a->query_offset < 0 || a->query_offset > limit)
    return EGI_CUDA_INVALID;
  if (!a->first_key || !a->lse || !is_row_tensor(a->q) || !is_row_tensor(a->k) || !is_row_tensor(a->v) ||
      !is_row_tensor(a->out))
    return EGI_CUDA_INVALID;
  if (is_backward && (!a->last_query || !is_row_tensor(a->d_out) || !is_row_tensor(a->d_q) || !is_row_tensor(a->d_k) ||
                      !is_row_tensor(a->d_v) || (a->d_sinks && !a->sinks)))
    return EGI_CUDA_INVALID;
  if (!a->workspace || reinterpret_cast<uintptr_t>(a->workspace) % 256 != 0) return EGI_CUDA_INVALID;
  if (a->dtype != EGI_CUDA_BF16 && a->dtype != EGI_CUDA_F16) return EGI_CUDA_UNSUPPORTED;
  return is_supported_size(a->head_dim, a->value_dim) ? EGI_CUDA_OK : EGI_CUDA_UNSUPPORTED;
}

/* What a call is to do, once its arguments are good. */
struct attention_call {
  egi_cuda_attention a;
  workspace_kind kind;
  bool is_sm90;
};

workspace_kind find_kind(bool is_sm90, bool is_backward) {
  if (!is_backward) return WORKSPACE_FORWARD;
  return is_sm90 ? WORKSPACE_BACKWARD_SM90 : WORKSPACE_BACKWARD_MMA;
}

/* Whether the Hopper kernels are to run; false with a status other than OK where neither family can. */
egi_cuda_status choose_family(const egi_cuda_attention &a, egi_attention_kernels kernels, bool &out_is_sm90) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess)
    return EGI_CUDA_FAILED;
  const bool can_sm90 = major == 9 && has_hopper_kernels(a);
  out_is_sm90 = kernels == EGI_ATTENTION_SM90 || (kernels == EGI_ATTENTION_AUTO && can_sm90);
  if (out_is_sm90) return can_sm90 ? EGI_CUDA_OK : EGI_CUDA_UNSUPPORTED;
  return major >= 8 ? EGI_CUDA_OK : EGI_CUDA_UNSUPPORTED;
}

egi_cuda_status prepare_call(const egi_cuda_attention *a, egi_attention_kernels kernels, bool is_backward,
                             attention_call &out_call) {
  egi_cuda_status status = check_arguments(a, is_backward);
  if (status != EGI_CUDA_OK) return status;
  out_call.a = *a;
  status = choose_family(*a, kernels, out_call.is_sm90);
  out_call.kind = find_kind(out_call.is_sm90, is_backward);
  if (status == EGI_CUDA_OK && a->workspace_bytes < carve_workspace(*a, out_call.kind).size_bytes)
    status = EGI_CUDA_INVALID;
  return status;
}

/* The Hopper kernels read a plan: the caller's, or one made now in the workspace. */
egi_cuda_status provide_plan(attention_call &call, cudaStream_t stream) {
  egi_cuda_attention &a = call.a;
  if (a.plan || !call.is_sm90) return EGI_CUDA_OK;
  void *memory = carve_workspace(a, call.kind).plan;
  a.plan = memory;
  const int parts = call.kind == WORKSPACE_FORWARD ? 1 << LIST_FORWARD : 1 << LIST_DQ | 1 << LIST_DKV;
  return fill_plan(a, carve_plan(a, memory), parts, stream);
}

} // namespace
} // namespace egi

extern "C" size_t egi_cuda_attention_workspace(const egi_cuda_attention *attention, egi_attention_kernels kernels,
                                               int is_backward) {
  bool is_sm90 = false;
  const egi_cuda_status status = egi::choose_family(*attention, kernels, is_sm90);
  if (status == EGI_CUDA_FAILED) /* no device: plans are made for a Hopper then */
    is_sm90 = kernels != EGI_ATTENTION_MMA && egi::has_hopper_kernels(*attention);
  else if (status != EGI_CUDA_OK)
    is_sm90 = false;
  return egi::carve_workspace(*attention, egi::find_kind(is_sm90, is_backward != 0)).size_bytes;
}

extern "C" size_t egi_cuda_attention_plan_bytes(const egi_cuda_attention *attention) {
  const size_t size_bytes = egi::count_plan_bytes(*attention);
  return size_bytes > 0 ? size_bytes : sizeof(int);
}

extern "C" egi_cuda_status egi_cuda_attention_plan(const egi_cuda_attention *a, void *plan, void *stream) {
  if (!a || !plan || !a->first_key || a->n_queries < 1 || a->n_keys < 1) return EGI_CUDA_INVALID;
  const int parts = 1 << egi::LIST_FORWARD | 1 << egi::LIST_DQ | (a->last_query ? 1 << egi::LIST_DKV : 0);
  return egi::fill_plan(*a, egi::carve_plan(*a, plan), parts, static_cast<cudaStream_t>(stream));
}

extern "C" egi_cuda_status egi_cuda_attention_forward(const egi_cuda_attention *attention,
                                                      egi_attention_kernels kernels, void *stream) {
  egi::attention_call call = {};
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  egi_cuda_status status = egi::prepare_call(attention, kernels, false, call);
  if (status == EGI_CUDA_OK) status = egi::provide_plan(call, cuda_stream);
  if (status != EGI_CUDA_OK) return status;
  return call.is_sm90 ? egi::forward_sm90(call.a, cuda_stream) : egi::forward_mma(call.a, cuda_stream);
}

extern "C" egi_cuda_status egi_cuda_attention_backward(const egi_cuda_attention *attention,
                                                       egi_attention_kernels kernels, void *stream) {
  egi::attention_call call = {};
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  egi_cuda_status status = egi::prepare_call(attention, kernels, true, call);
  if (status == EGI_CUDA_OK) status = egi::provide_plan(call, cuda_stream);
  if (status == EGI_CUDA_OK) status = egi::prepare_backward(call.a, cuda_stream);
  if (status != EGI_CUDA_OK) return status;
  if (!call.is_sm90) return egi::backward_mma(call.a, cuda_stream);
  status = egi::backward_dkv_sm90(call.a, cuda_stream);
  return status == EGI_CUDA_OK ? egi::backward_dq_sm90(call.a, cuda_stream) : status;
}
