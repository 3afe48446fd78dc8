/* The operators RaggedLinear and RaggedLinearGrad: by the launcher of ragged.h where it takes the operands, else by the
 * general kernels. With y = w (W x + b) the weight of a row has the gradient (W' dy) x + b dy: the gradient of x before
 * it is weighted gives it, no product is made again. */
#include "backend/cuda/ragged_operator.cuh"

namespace egi {
namespace {

using ragged_general::expert_operand;
using ragged_general::expert_weights;

struct linear_node {
  ragged_node node;
  element_kind addend_element, row_weight_element, d_weight_element;
  bool has_factors; /* alpha or weights of rows */
};

bool takes_operands(const egi_kernel_plan *plan, const egi_ragged *ragged) {
  for (unsigned role = 0; role < EGI_RAGGED_ROLES; role++) {
    const bool is_packed = role == EGI_RAGGED_WEIGHT && ragged->is_quantised;
    const bool is_nested = ragged->has_levels && ragged->counts[EGI_RAGGED_ZEROS] > 0;
    for (uint32_t i = 0; i < ragged->counts[role]; i++) {
      const eg_dtype own = plan->inputs[ragged->first[role] + i].dtype;
      eg_dtype wanted = EG_DTYPE_UNDEFINED; /* any float */
      if (is_packed || (role == EGI_RAGGED_ZEROS && !ragged->has_levels)) wanted = EG_DTYPE_U8;
      if (ragged->has_levels && role == EGI_RAGGED_SCALES) wanted = is_nested ? EG_DTYPE_U8 : EG_DTYPE_F32;
      if (ragged->has_levels && role == EGI_RAGGED_ZEROS) wanted = EG_DTYPE_F32;
      if (wanted == EG_DTYPE_UNDEFINED ? element_of(own) == ELEMENT_NONE : own != wanted) return false;
      if (i > 0 && own != plan->inputs[ragged->first[role]].dtype) return false;
    }
  }
  return true;
}

/* Types of the addend or x, of the rows' weights and of their gradient. */
eg_status read_types(egi_kernel_plan *plan, linear_node *l) {
  ragged_node *node = &l->node;
  const eg_dtype dtype = plan->inputs[0].dtype;
  node->element = element_of(dtype);
  bool fits = node->element != ELEMENT_NONE && takes_operands(plan, &node->ragged) && plan->outputs[0].dtype == dtype &&
              plan->inputs[EGI_RAGGED_OFFSETS].dtype == EG_DTYPE_I32;
  if (egi_plan_has_input(plan, 1)) {
    l->addend_element = element_of(plan->inputs[1].dtype);
    fits = fits && l->addend_element == node->element;
  }
  if (egi_plan_has_input(plan, EGI_RAGGED_ROW_WEIGHT)) {
    l->row_weight_element = element_of(plan->inputs[EGI_RAGGED_ROW_WEIGHT].dtype);
    fits = fits && l->row_weight_element != ELEMENT_NONE;
  }
  if (has_output(plan->outputs, plan->n_outputs, 1)) {
    l->d_weight_element = element_of(plan->outputs[1].dtype);
    fits = fits && l->d_weight_element != ELEMENT_NONE;
  }
  return fits ? EG_OK : egi_fail_types(plan);
}

eg_status prepare(egi_kernel_plan *plan, bool is_backward) {
  linear_node *l = EGI_NEW(plan->arena, linear_node, 1);
  workspace_room room = {0, true};
  if (!l) return EG_ERROR_MEMORY;
  ragged_node *node = &l->node;
  EG_TRY(egi_ragged_read(plan->graph, plan->node, &node->ragged));
  EG_TRY(read_types(plan, l));
  node->is_backward = is_backward;
  node->k = node->ragged.in_features;
  node->n = (is_backward ? plan->inputs[EGI_RAGGED_DY] : plan->outputs[0]).dims[1];
  node->n_rows = plan->inputs[0].dims[0];
  if (node->n_rows > INT32_MAX - 1024)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "more rows than kernels count");
  l->has_factors = node->ragged.alpha < 1.0 || node->ragged.alpha > 1.0 || l->row_weight_element != ELEMENT_NONE;
  l->has_factors = l->has_factors || egi_plan_has_input(plan, EGI_RAGGED_ROW_WEIGHT);
  place_lists(node, EGI_RAGGED_ROLES, &room);
  choose_ragged_way(plan, node, &room);
  plan->params = l;
  return ask_for_room(plan, room);
}

/* One role's operands of all experts, as [N, K] or along N. */
expert_operand operand_of(const egi_ragged *ragged, const egi_tensor *t, unsigned role, bool is_stack) {
  const int64_t *s = t->strides + (is_stack ? 1 : 0);
  const bool is_flat = ragged->has_levels && (role == EGI_RAGGED_SCALES || role == EGI_RAGGED_ZEROS);
  if (is_flat) return {t->data, t->strides[0], 0};
  if (role == EGI_RAGGED_BIAS) return {t->data, s[0], 0};
  const bool is_turned = ragged->is_transposed && role == EGI_RAGGED_WEIGHT;
  return {t->data, s[is_turned ? 1 : 0], s[is_turned ? 0 : 1]};
}

eg_status load_table(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call, unsigned role,
                     expert_operand *table) {
  const egi_ragged *ragged = &node->ragged;
  const egi_tensor *first = &call->inputs[ragged->first[role]];
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  const bool is_shared = ragged->has_levels && (role == EGI_RAGGED_SCALES || role == EGI_RAGGED_ZEROS);
  ragged_general::table_source source = {};
  source.n_experts = ragged->n_experts;
  if (ragged->counts[role] == 1) {
    const bool is_stack = !is_shared && first->rank == (role == EGI_RAGGED_BIAS ? 2 : 3);
    source.is_stack = 1;
    source.first = operand_of(ragged, first, role, is_stack);
    source.expert_bytes = is_stack ? first->strides[0] * static_cast<int64_t>(egi_element_bytes(first->dtype)) : 0;
    EGI_CUDA_TRY(ctx, ragged_general::fill_table(source, table, stream));
    return EG_OK;
  }
  for (; source.start < ragged->n_experts; source.start += ragged_general::LISTED) {
    for (int64_t i = 0; i < ragged_general::LISTED && source.start + i < ragged->n_experts; i++)
      source.list[i] = operand_of(ragged, first + source.start + i, role, false);
    EGI_CUDA_TRY(ctx, ragged_general::fill_table(source, table, stream));
  }
  return EG_OK;
}

/* By the launcher; factors of rows, and sums beside an addend, are in the workspace. */
eg_status run_fast_way(eg_context *ctx, const linear_node *l, const egi_kernel_call *call, fast_product product,
                       bool is_weighted, bool *out_is_done) {
  const ragged_node *node = &l->node;
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  const egi_tensor *out = &call->outputs[0], *row_weight = &call->inputs[EGI_RAGGED_ROW_WEIGHT];
  const bool has_addend = !node->is_backward && egi_call_has_input(call, EGI_RAGGED_ADDEND);
  char *workspace = workspace_start(call);
  product.out = {out->data, out->strides[0]};
  if (has_addend) product.out = {workspace + node->sums_at, node->n};
  if (l->has_factors && is_weighted) {
    ragged_general::row_factors factors = {};
    factors.row_weight = egi_call_has_input(call, EGI_RAGGED_ROW_WEIGHT) ? row_weight->data : nullptr;
    factors.stride = row_weight->strides[0];
    factors.element = l->row_weight_element;
    factors.alpha = static_cast<float>(node->ragged.alpha);
    factors.n_rows = node->n_rows;
    product.factors = factors.out = reinterpret_cast<float *>(workspace + node->factors_at);
    EGI_CUDA_TRY(ctx, ragged_general::scale_rows(factors, stream));
  }
  EG_TRY(multiply_fast(ctx, node, call, product, out_is_done));
  if (!*out_is_done || !has_addend) return EG_OK;
  const ragged_general::row_addition addition = {matrix_of(&call->inputs[EGI_RAGGED_ADDEND]), matrix_of(out),
                                                 product.out.data, node->n_rows, node->n};
  EGI_CUDA_TRY(ctx, ragged_general::add_rows(addition, node->element, stream));
  return EG_OK;
}

/* out = .. ; without `is_weighted` neither alpha nor weights of rows are in it. */
eg_status multiply_rows(eg_context *ctx, const linear_node *l, const egi_kernel_call *call, expert_weights *weights,
                        const int32_t *offsets, bool is_weighted) {
  const ragged_node *node = &l->node;
  ragged_general::tile_list list;
  bool is_done = false;
  EG_TRY(load_tiles(ctx, node, call, offsets, &list));
  if (node->is_fast)
    EG_TRY(run_fast_way(ctx, l, call, {weights, offsets, nullptr, {nullptr, 0}}, is_weighted, &is_done));
  if (is_done) return EG_OK;
  ragged_general::product p = {};
  EG_TRY(load_weights(ctx, node, call, weights));
  p.w = *weights;
  p.list = list;
  p.n_rows = node->n_rows;
  p.n_experts = node->ragged.n_experts;
  p.results = node->is_backward ? node->k : node->n;
  p.depth = node->is_backward ? node->n : node->k;
  p.is_backward = node->is_backward;
  p.alpha = is_weighted ? static_cast<float>(node->ragged.alpha) : 1.0f;
  p.in = matrix_of(&call->inputs[0]);
  p.out = matrix_of(&call->outputs[0]);
  if (!node->is_backward && egi_call_has_input(call, EGI_RAGGED_ADDEND)) {
    p.addend = matrix_of(&call->inputs[EGI_RAGGED_ADDEND]);
    p.addend_element = l->addend_element;
  }
  if (is_weighted && egi_call_has_input(call, EGI_RAGGED_ROW_WEIGHT)) {
    p.row_weight = call->inputs[EGI_RAGGED_ROW_WEIGHT].data;
    p.row_weight_stride = call->inputs[EGI_RAGGED_ROW_WEIGHT].strides[0];
    p.row_weight_element = l->row_weight_element;
  }
  EGI_CUDA_TRY(ctx, ragged_general::multiply(p, node->element, egi_cuda_stream_of(call)->stream));
  return EG_OK;
}

eg_status weigh_rows(eg_context *ctx, const linear_node *l, const egi_kernel_call *call, expert_weights *weights,
                     const int32_t *offsets) {
  const ragged_node *node = &l->node;
  ragged_general::weighing w = {};
  EG_TRY(load_weights(ctx, node, call, weights));
  w.offsets = offsets;
  w.w = *weights;
  w.n_rows = node->n_rows;
  w.n_experts = node->ragged.n_experts;
  w.alpha = static_cast<float>(node->ragged.alpha);
  w.dy = matrix_of(&call->inputs[EGI_RAGGED_DY]);
  w.x = matrix_of(&call->inputs[EGI_RAGGED_FORWARD_X]);
  w.dx = matrix_of(&call->outputs[0]);
  w.row_weight = call->inputs[EGI_RAGGED_ROW_WEIGHT].data;
  w.row_weight_stride = call->inputs[EGI_RAGGED_ROW_WEIGHT].strides[0];
  w.row_weight_element = l->row_weight_element;
  w.d_weight = call->outputs[1].data;
  w.d_weight_element = l->d_weight_element;
  EGI_CUDA_TRY(ctx, ragged_general::weigh(w, node->element, egi_cuda_stream_of(call)->stream));
  return EG_OK;
}

} // namespace

void place_lists(ragged_node *node, int64_t n_tables, workspace_room *room) {
  const int64_t n_experts = node->ragged.n_experts;
  node->tables_at = room->take(n_tables * n_experts, sizeof(expert_operand));
  node->offsets_at = room->take(n_experts + 1, sizeof(int32_t));
  node->count_at = room->take(1, sizeof(int));
  node->tiles_at = room->take(ragged_general::most_tiles(node->n_rows, n_experts), sizeof(ragged_general::row_tile));
}

eg_status load_offsets(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call, unsigned input,
                       const int32_t **out_offsets) {
  const egi_tensor *offsets = &call->inputs[input];
  *out_offsets = static_cast<const int32_t *>(offsets->data);
  if (offsets->strides[0] == 1) return EG_OK;
  int32_t *list = reinterpret_cast<int32_t *>(workspace_start(call) + node->offsets_at);
  EGI_CUDA_TRY(ctx, ragged_general::copy_indices(*out_offsets, offsets->strides[0], node->ragged.n_experts + 1, list,
                                                 egi_cuda_stream_of(call)->stream));
  *out_offsets = list;
  return EG_OK;
}

eg_status load_tiles(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call, const int32_t *offsets,
                     ragged_general::tile_list *out_list) {
  const egi_cuda_stream *stream = egi_cuda_stream_of(call);
  char *workspace = workspace_start(call);
  *out_list = {reinterpret_cast<int *>(workspace + node->count_at),
               reinterpret_cast<ragged_general::row_tile *>(workspace + node->tiles_at)};
  EGI_CUDA_TRY(ctx, ragged_general::list_tiles(offsets, node->ragged.n_experts, node->n_rows, *out_list, stream->fault,
                                               stream->stream));
  return EG_OK;
}

eg_status load_weights(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call, expert_weights *weights) {
  const egi_ragged *ragged = &node->ragged;
  expert_operand *tables = reinterpret_cast<expert_operand *>(workspace_start(call) + node->tables_at);
  const expert_operand **roles[EGI_RAGGED_ROLES] = {&weights->weight, &weights->bias, &weights->scales,
                                                    &weights->zeros};
  if (weights->weight != nullptr) return EG_OK;
  *weights = {};
  for (unsigned role = 0; role < EGI_RAGGED_ROLES; role++) {
    if (ragged->counts[role] == 0) continue;
    *roles[role] = tables + role * ragged->n_experts;
    EG_TRY(load_table(ctx, node, call, role, tables + role * ragged->n_experts));
  }
  if (ragged->counts[EGI_RAGGED_BIAS] > 0)
    weights->bias_element = element_of(call->inputs[ragged->first[EGI_RAGGED_BIAS]].dtype);
  if (ragged->counts[EGI_RAGGED_SCALES] > 0)
    weights->scale_element = element_of(call->inputs[ragged->first[EGI_RAGGED_SCALES]].dtype);
  weights->weight_element = element_of(call->inputs[ragged->first[EGI_RAGGED_WEIGHT]].dtype);
  weights->storage = !ragged->is_quantised ? ragged_general::STORAGE_DENSE
                     : ragged->has_levels  ? ragged_general::STORAGE_LEVELS
                                           : ragged_general::STORAGE_BITS;
  weights->bits = static_cast<int>(ragged->bits);
  weights->is_fp4 = ragged->quant_type == 0;
  weights->block = ragged->block_size > 0 ? ragged->block_size : ragged->in_features;
  weights->n = node->n;
  weights->k = node->k;
  weights->is_stack = ragged->counts[EGI_RAGGED_WEIGHT] == 1;
  weights->is_nested = ragged->has_levels && ragged->counts[EGI_RAGGED_ZEROS] > 0;
  return EG_OK;
}

ragged_general::matrix matrix_of(const egi_tensor *tensor) {
  return {tensor->data, tensor->strides[0], tensor->rank > 1 ? tensor->strides[1] : 0};
}

} // namespace egi

extern "C" eg_status egi_cuda_prepare_ragged_linear(egi_kernel_plan *plan) {
  return egi::prepare(plan, false);
}

extern "C" eg_status egi_cuda_prepare_ragged_linear_grad(egi_kernel_plan *plan) {
  return egi::prepare(plan, true);
}

extern "C" eg_status egi_cuda_run_ragged_linear(eg_context *ctx, const egi_kernel_call *call) {
  const egi::linear_node *l = static_cast<const egi::linear_node *>(call->params);
  egi::ragged_general::expert_weights weights = {};
  const int32_t *offsets = nullptr;
  EG_TRY(egi::load_offsets(ctx, &l->node, call, EGI_RAGGED_OFFSETS, &offsets));
  return egi::multiply_rows(ctx, l, call, &weights, offsets, true);
}

extern "C" eg_status egi_cuda_run_ragged_linear_grad(eg_context *ctx, const egi_kernel_call *call) {
  const egi::linear_node *l = static_cast<const egi::linear_node *>(call->params);
  egi::ragged_general::expert_weights weights = {};
  const int32_t *offsets = nullptr;
  const bool wants_weight = egi::has_output(call->outputs, call->n_outputs, 1);
  EG_TRY(egi::load_offsets(ctx, &l->node, call, EGI_RAGGED_OFFSETS, &offsets));
  EG_TRY(egi::multiply_rows(ctx, l, call, &weights, offsets, !wants_weight));
  return wants_weight ? egi::weigh_rows(ctx, l, call, &weights, offsets) : EG_OK;
}
