/* The operator RaggedReduce, the gradient of ragged products by their matrices: by the launcher of ragged.h where it
 * takes the operands, whose sums are f32 and leave empty experts as they are, else by the general kernel. */
#include "backend/cuda/ragged_operator.cuh"

namespace egi {
namespace {

struct reduce_node {
  ragged_node node;
  element_kind out_element;
  bool is_direct; /* the launcher's sums are the result */
};

bool is_countable(const ragged_node *node) {
  const int64_t limit = INT32_MAX;
  return node->ragged.n_experts <= (1 << 20) && node->n <= limit - 1024 && node->k <= limit - 1024 &&
         node->n_rows <= limit - 1024 && node->ragged.n_experts * (node->n / 64 + 1) <= limit / (node->k / 64 + 1);
}

eg_status reduce_fast(eg_context *ctx, const reduce_node *r, const egi_kernel_call *call,
                      const ragged_general::reduction &job) {
  const ragged_node *node = &r->node;
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  float *sums =
      r->is_direct ? static_cast<float *>(job.out) : reinterpret_cast<float *>(workspace_start(call) + node->sums_at);
  const size_t count = static_cast<size_t>(job.n_experts * job.n * job.k);
  egi_ragged_reduction reduction = {};
  reduction.n_groups = static_cast<int32_t>(job.n_experts);
  reduction.n_left = static_cast<int32_t>(job.n);
  reduction.n_right = static_cast<int32_t>(job.k);
  reduction.n_rows = node->n_rows;
  reduction.offsets = job.offsets;
  reduction.dtype = node->element == ELEMENT_BF16 ? EGI_CUDA_BF16 : EGI_CUDA_F16;
  reduction.left = {job.left.data, job.left.row_stride};
  reduction.right = {job.right.data, job.right.row_stride};
  reduction.out = sums;
  reduction.group_stride = job.n * job.k;
  reduction.left_stride = job.k;
  reduction.right_stride = 1;
  EGI_CUDA_TRY(ctx, cudaMemsetAsync(sums, 0, count * sizeof(float), stream));
  const egi_cuda_status status = egi_cuda_ragged_reduction(&reduction, EGI_RAGGED_AUTO, stream);
  if (status == EGI_CUDA_FAILED) return egi_cuda_launched(ctx, "ragged reduction");
  if (status != EGI_CUDA_OK)
    return egi_fail(ctx, EG_ERROR_DEVICE, "the ragged reduction refuses its arguments (%d)", static_cast<int>(status));
  if (!r->is_direct) EGI_CUDA_TRY(ctx, ragged_general::store_sums(sums, job, stream));
  return EG_OK;
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_ragged_reduce(egi_kernel_plan *plan) {
  egi::reduce_node *r = EGI_NEW(plan->arena, egi::reduce_node, 1);
  egi::workspace_room room = {0, true};
  if (!r) return EG_ERROR_MEMORY;
  egi::ragged_node *node = &r->node;
  const egi_tensor *left = &plan->inputs[0], *right = &plan->inputs[1], *out = &plan->outputs[0];
  node->element = egi::element_of(left->dtype);
  r->out_element = egi::element_of(out->dtype);
  if (node->element == egi::ELEMENT_NONE || r->out_element == egi::ELEMENT_NONE || right->dtype != left->dtype ||
      plan->inputs[2].dtype != EG_DTYPE_I32)
    return egi_fail_types(plan);
  node->ragged.n_experts = out->dims[0];
  node->ragged.alpha = static_cast<double>(egi_node_float(egi_plan_node(plan), "alpha", 1.0f));
  node->n = out->dims[1];
  node->k = out->dims[2];
  node->n_rows = left->dims[0];
  if (node->n_rows > INT32_MAX - 1024)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "more rows than kernels count");
  egi::place_lists(node, 0, &room);
  node->is_fast = egi::has_launchers() && node->element != egi::ELEMENT_F32 && node->n > 0 && node->n % 8 == 0 && node->k > 0 &&
                  node->k % 8 == 0 && node->n_rows > 0 && egi::has_fast_rows(left) && egi::has_fast_rows(right) &&
                  egi::is_countable(node);
  const bool is_plain = !(node->ragged.alpha < 1.0) && !(node->ragged.alpha > 1.0);
  r->is_direct = is_plain && r->out_element == egi::ELEMENT_F32 && egi_tensor_is_contiguous(out);
  if (node->is_fast && !r->is_direct)
    node->sums_at = room.take(node->ragged.n_experts * node->n, static_cast<size_t>(node->k) * sizeof(float));
  plan->params = r;
  return egi::ask_for_room(plan, room);
}

extern "C" eg_status egi_cuda_run_ragged_reduce(eg_context *ctx, const egi_kernel_call *call) {
  const egi::reduce_node *r = static_cast<const egi::reduce_node *>(call->params);
  const egi::ragged_node *node = &r->node;
  const egi_tensor *out = &call->outputs[0];
  egi::ragged_general::tile_list list;
  egi::ragged_general::reduction job = {};
  EG_TRY(egi::load_offsets(ctx, node, call, 2, &job.offsets));
  EG_TRY(egi::load_tiles(ctx, node, call, job.offsets, &list));
  job.n_rows = node->n_rows;
  job.n_experts = node->ragged.n_experts;
  job.n = node->n;
  job.k = node->k;
  job.alpha = static_cast<float>(node->ragged.alpha);
  job.left = egi::matrix_of(&call->inputs[0]);
  job.right = egi::matrix_of(&call->inputs[1]);
  job.out = out->data;
  job.out_element = r->out_element;
  for (int i = 0; i < 3; i++) job.out_strides[i] = out->strides[i];
  if (node->is_fast && egi::has_fast_address(&call->inputs[0]) && egi::has_fast_address(&call->inputs[1]))
    return egi::reduce_fast(ctx, r, call, job);
  EGI_CUDA_TRY(ctx, egi::ragged_general::reduce(job, node->element, egi_cuda_stream_of(call)->stream));
  return EG_OK;
}
