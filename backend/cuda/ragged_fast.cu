/* The fast way of ragged products: the launcher of ragged.h on dense stacks and NF4 codes as they are, and on anything
 * else decoded to the workspace, a number of experts at a time. */
#include "backend/cuda/ragged_operator.cuh"

namespace egi {
namespace {

using ragged_general::expert_weights;

enum { FEW_INPUTS = 32, NF4_BLOCK = 64, NESTED_HEADER = 257, FILL_THREADS = 256 };
const int64_t scratch_limit = int64_t{256} << 20;

bool is_multiple_of_8(int64_t n) {
  return n > 0 && n % 8 == 0;
}

/* Element (n, k) of expert e of a stack lies at e * strides[0] + n * strides[1] + k * strides[2]. */
bool is_stack_of(const egi_tensor *t, int64_t n, int64_t k, bool is_transposed) {
  if (t->rank != 3) return false;
  const int64_t rows = is_transposed ? k : n, columns = is_transposed ? n : k;
  return t->strides[2] == 1 && t->strides[1] == columns && (t->strides[0] == rows * columns || t->dims[0] == 1);
}

bool is_plain_nf4(const egi_kernel_plan *plan, const ragged_node *node) {
  const egi_ragged *r = &node->ragged;
  if (!r->has_levels || r->quant_type != 1 || r->block_size != NF4_BLOCK || r->counts[EGI_RAGGED_WEIGHT] != 1)
    return false;
  const egi_tensor *codes = &plan->inputs[r->first[EGI_RAGGED_WEIGHT]];
  const egi_tensor *scales = &plan->inputs[r->first[EGI_RAGGED_SCALES]];
  const bool has_nested = r->counts[EGI_RAGGED_ZEROS] > 0;
  const bool is_nested_packed = !has_nested || plan->inputs[r->first[EGI_RAGGED_ZEROS]].strides[0] == 1;
  return egi_tensor_is_contiguous(codes) && scales->strides[0] == 1 && is_nested_packed &&
         node->n * node->k % NF4_BLOCK == 0;
}

weight_source source_of(const egi_kernel_plan *plan, const ragged_node *node) {
  const egi_ragged *r = &node->ragged;
  if (is_plain_nf4(plan, node)) return WEIGHT_NF4;
  const egi_tensor *weight = &plan->inputs[r->first[EGI_RAGGED_WEIGHT]];
  if (r->is_quantised || r->counts[EGI_RAGGED_WEIGHT] != 1 || element_of(weight->dtype) != node->element)
    return WEIGHT_DECODED;
  if (is_stack_of(weight, node->n, node->k, r->is_transposed)) return r->is_transposed ? WEIGHT_COLUMNS : WEIGHT_ROWS;
  return WEIGHT_DECODED;
}

bool has_own_bias(const egi_kernel_plan *plan, const ragged_node *node) {
  const egi_ragged *r = &node->ragged;
  if (r->counts[EGI_RAGGED_BIAS] != 1) return false;
  const egi_tensor *bias = &plan->inputs[r->first[EGI_RAGGED_BIAS]];
  return element_of(bias->dtype) == node->element && egi_tensor_is_contiguous(bias);
}

/* The launcher numbers tiles by an int. */
bool is_countable(const ragged_node *node) {
  const int64_t longest = node->n > node->k ? node->n : node->k, limit = INT32_MAX;
  return node->ragged.n_experts <= (1 << 20) && longest <= limit - 1024 && node->n_rows <= limit - 1024 &&
         (node->n_rows / 64 + node->ragged.n_experts) * (longest / 64 + 1) <= limit;
}

egi_ragged_product begin_product(const ragged_node *node) {
  egi_ragged_product p = {};
  p.n_groups = static_cast<int32_t>(node->ragged.n_experts);
  p.n_in = static_cast<int32_t>(node->is_backward ? node->n : node->k);
  p.n_out = static_cast<int32_t>(node->is_backward ? node->k : node->n);
  p.n_rows = node->n_rows;
  p.dtype = node->element == ELEMENT_BF16 ? EGI_CUDA_BF16 : EGI_CUDA_F16;
  /* FORWARD: W has a row for each result. */
  const bool has_result_rows = (node->source == WEIGHT_COLUMNS) == node->is_backward;
  p.direction = has_result_rows ? EGI_RAGGED_FORWARD : EGI_RAGGED_BACKWARD;
  return p;
}

__global__ void __launch_bounds__(FILL_THREADS) ragged_repeat(const float *number, int64_t count, float *dst) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(FILL_THREADS) + threadIdx.x;
  if (i < count) dst[i] = *number;
}

/* Codes and scales as the launcher wants them: the offset of nested scales once an expert. */
eg_status set_nf4(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call, egi_ragged_product *p) {
  const egi_ragged *r = &node->ragged;
  const egi_tensor *scales = &call->inputs[r->first[EGI_RAGGED_SCALES]];
  p->nf4.codes = static_cast<const uint8_t *>(call->inputs[r->first[EGI_RAGGED_WEIGHT]].data);
  if (node->scratch_bytes > 0) {
    p->scratch = workspace_start(call) + node->scratch_at;
    p->scratch_bytes = node->scratch_bytes;
  }
  if (r->counts[EGI_RAGGED_ZEROS] == 0) {
    p->nf4.absmax = static_cast<const float *>(scales->data);
    return EG_OK;
  }
  const float *nested = static_cast<const float *>(call->inputs[r->first[EGI_RAGGED_ZEROS]].data);
  float *offsets = reinterpret_cast<float *>(workspace_start(call) + node->nested_at);
  const unsigned n_blocks = static_cast<unsigned>((r->n_experts + FILL_THREADS - 1) / FILL_THREADS);
  ragged_repeat<<<n_blocks, FILL_THREADS, 0, egi_cuda_stream_of(call)->stream>>>(nested, r->n_experts, offsets);
  p->nf4.absmax_codes = static_cast<const uint8_t *>(scales->data);
  p->nf4.nested_map = nested + 1;
  p->nf4.nested_absmax = nested + NESTED_HEADER;
  p->nf4.nested_offset = offsets;
  return egi_cuda_launched(ctx, "ragged_repeat");
}

eg_status launch(eg_context *ctx, const egi_ragged_product &p, cudaStream_t stream) {
  const egi_cuda_status status = egi_cuda_ragged_product(&p, EGI_RAGGED_AUTO, stream);
  if (status == EGI_CUDA_OK) return EG_OK;
  if (status == EGI_CUDA_FAILED) return egi_cuda_launched(ctx, "ragged product");
  return egi_fail(ctx, EG_ERROR_DEVICE, "the ragged product refuses its arguments (%d)", static_cast<int>(status));
}

/* Decodes as many experts as find room and multiplies them, until all are done: experts before and behind a turn's are
 * hidden by moving the start of what is counted by expert. */
eg_status multiply_decoded(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call,
                           const expert_weights &weights, const egi_ragged_product &whole) {
  void *scratch = workspace_start(call) + node->scratch_at;
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  for (int64_t first = 0; first < node->ragged.n_experts; first += node->at_once) {
    const int64_t rest = node->ragged.n_experts - first, n = rest < node->at_once ? rest : node->at_once;
    egi_ragged_product part = whole;
    part.n_groups = static_cast<int32_t>(n);
    part.offsets = whole.offsets + first;
    part.weight = scratch;
    if (whole.bias) part.bias = static_cast<const char *>(whole.bias) + first * node->n * 2;
    EGI_CUDA_TRY(ctx, ragged_general::decode(weights, first, n, scratch, node->element, stream));
    EG_TRY(launch(ctx, part, stream));
  }
  return EG_OK;
}

eg_status set_bias(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call, expert_weights *weights,
                   egi_ragged_product *p) {
  if (node->is_backward || node->ragged.counts[EGI_RAGGED_BIAS] == 0) return EG_OK;
  const void *own = call->inputs[node->ragged.first[EGI_RAGGED_BIAS]].data;
  p->bias = own;
  if (node->has_own_bias && is_aligned_to(own, 16)) return EG_OK;
  void *bias = workspace_start(call) + node->bias_at;
  EG_TRY(load_weights(ctx, node, call, weights));
  EGI_CUDA_TRY(ctx, ragged_general::decode_bias(*weights, node->ragged.n_experts, bias, node->element,
                                                egi_cuda_stream_of(call)->stream));
  p->bias = bias;
  return EG_OK;
}

} // namespace

bool has_fast_rows(const egi_tensor *tensor) {
  return tensor->rank == 2 && tensor->strides[1] == 1 && tensor->strides[0] % 8 == 0 &&
         tensor->strides[0] >= tensor->dims[1] && tensor->strides[0] < (int64_t{1} << 38);
}

bool has_fast_address(const egi_tensor *tensor) {
  return is_aligned_to(tensor->data, 16);
}

void choose_ragged_way(const egi_kernel_plan *plan, ragged_node *node, workspace_room *room) {
  const int64_t n_experts = node->ragged.n_experts;
  const bool has_addend = !node->is_backward && egi_plan_has_input(plan, EGI_RAGGED_ADDEND);
  node->is_fast = has_launchers() && node->element != ELEMENT_F32 && is_multiple_of_8(node->n) &&
                  is_multiple_of_8(node->k) && node->n_rows > 0 && has_fast_rows(&plan->inputs[0]) &&
                  has_fast_rows(&plan->outputs[0]) && is_countable(node) && !(has_addend && node->k <= FEW_INPUTS);
  if (!node->is_fast) return;
  node->source = source_of(plan, node);
  node->has_own_bias = has_own_bias(plan, node);
  node->factors_at = room->take(node->n_rows, sizeof(float));
  if (has_addend) node->sums_at = room->take(node->n_rows, static_cast<size_t>(node->n) * 2);
  if (!node->is_backward && node->ragged.counts[EGI_RAGGED_BIAS] > 0)
    node->bias_at = room->take(n_experts, static_cast<size_t>(node->n) * 2);
  if (node->source == WEIGHT_NF4) {
    egi_ragged_product p = begin_product(node);
    p.nf4.codes = reinterpret_cast<const uint8_t *>(uintptr_t{16}); /* only whether there are any counts */
    const int64_t wanted = static_cast<int64_t>(egi_cuda_ragged_scratch(&p, EGI_RAGGED_AUTO));
    const int64_t least = node->n * node->k * 2, most = least > scratch_limit ? least : scratch_limit;
    node->scratch_bytes = static_cast<size_t>(wanted < most ? wanted : most);
    node->scratch_at = room->take(static_cast<int64_t>(node->scratch_bytes), 1);
    node->nested_at = room->take(n_experts, sizeof(float));
  } else if (node->source == WEIGHT_DECODED) {
    const int64_t fitting = scratch_limit / (node->n * node->k * 2);
    node->at_once = fitting < 1 ? 1 : fitting < n_experts ? fitting : n_experts;
    node->scratch_at = room->take(node->at_once * node->n, static_cast<size_t>(node->k) * 2);
  }
}

eg_status multiply_fast(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call,
                        const fast_product &product, bool *out_is_done) {
  egi_ragged_product p = begin_product(node);
  const void *weight = call->inputs[node->ragged.first[EGI_RAGGED_WEIGHT]].data;
  *out_is_done = false;
  if (!has_fast_address(&call->inputs[0]) || !is_aligned_to(product.out.data, 16) ||
      (node->source != WEIGHT_DECODED && !is_aligned_to(weight, 16)))
    return EG_OK;
  *out_is_done = true;
  p.offsets = product.offsets;
  p.x = {call->inputs[0].data, call->inputs[0].strides[0]};
  p.y = product.out;
  p.row_weight = product.factors;
  EG_TRY(set_bias(ctx, node, call, product.weights, &p));
  if (node->source == WEIGHT_DECODED) {
    EG_TRY(load_weights(ctx, node, call, product.weights));
    return multiply_decoded(ctx, node, call, *product.weights, p);
  }
  if (node->source == WEIGHT_NF4) {
    EG_TRY(set_nf4(ctx, node, call, &p));
  } else {
    p.weight = weight;
  }
  return launch(ctx, p, egi_cuda_stream_of(call)->stream);
}

} // namespace egi
