/* Reads attention nodes (ONNX Attention-25, engraft.Attention) for their kernels: the contract is that of the CPU's
 * kernels. */
#include <limits.h>
#include <math.h>

#include "backend/cuda/attention_operator.cuh"

namespace egi {
namespace {

using general::attention;
using general::head_strides;

eg_status fail_shape(const egi_kernel_plan *plan, const char *what) {
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%s", what);
}

bool is_small(int64_t n) {
  return n >= 0 && n <= (1 << 30);
}

/* Sizes of Q, K and V, [batch, heads, rows, columns] or flat. */
struct operand_sizes {
  int64_t batches, heads, rows, width;
};

operand_sizes sizes_of(const egi_tensor *t, int64_t n_heads) {
  if (t->rank == 4) return {t->dims[0], t->dims[1], t->dims[2], t->dims[3]};
  const int64_t width = n_heads > 0 ? t->dims[2] / n_heads : 0;
  return {t->dims[0], width * n_heads == t->dims[2] ? n_heads : -1, t->dims[1], width};
}

eg_status read_sizes(egi_kernel_plan *plan, attention_node *node) {
  const egi_node *row = &plan->graph->nodes[plan->node];
  const egi_tensor *q = &plan->inputs[0], *k = &plan->inputs[1], *v = &plan->inputs[2];
  if ((q->rank != 3 && q->rank != 4) || k->rank != q->rank || v->rank != q->rank)
    return fail_shape(plan, "Q, K and V must have 3 or 4 dims");
  const int64_t heads = q->rank == 3 ? egi_node_int(row, "q_num_heads", 0) : q->dims[1];
  const int64_t kv_heads = q->rank == 3 ? egi_node_int(row, "kv_num_heads", 0) : k->dims[1];
  if (heads <= 0 || kv_heads <= 0 || heads % kv_heads != 0)
    return fail_shape(plan, "the number of query heads is not a multiple of that of key heads");
  const operand_sizes qs = sizes_of(q, heads), ks = sizes_of(k, kv_heads), vs = sizes_of(v, kv_heads);
  if (qs.heads != heads || ks.heads != kv_heads || vs.heads != kv_heads || ks.batches != qs.batches ||
      vs.batches != qs.batches || vs.rows != ks.rows || ks.width != qs.width)
    return fail_shape(plan, "shapes of Q, K and V do not agree");
  if (!is_small(qs.batches) || !is_small(heads) || !is_small(qs.rows) || !is_small(ks.rows + node->n_past) ||
      !is_small(qs.width) || !is_small(vs.width))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "more rows or heads than kernels count");
  attention *a = &node->shared;
  a->n_batches = static_cast<int>(qs.batches);
  a->q_heads = static_cast<int>(heads);
  a->kv_heads = static_cast<int>(kv_heads);
  a->n_queries = static_cast<int>(qs.rows);
  a->n_keys = static_cast<int>(ks.rows + node->n_past);
  a->width = static_cast<int>(qs.width);
  a->value_width = static_cast<int>(vs.width);
  return EG_OK;
}

/* The grid of the general kernels has a block for each tile of each head. */
bool fits_grid(const attention *a) {
  const int64_t rows = a->n_queries > a->n_keys ? a->n_queries : a->n_keys;
  const int64_t width = a->width > a->value_width ? a->width : a->value_width;
  const int64_t parts = (width + general::COLUMNS) / general::COLUMNS, heads = int64_t{a->n_batches} * a->q_heads;
  return heads <= INT_MAX && heads * (general::count_tiles(rows) + 1) <= INT_MAX / parts;
}

eg_status read_operands(egi_kernel_plan *plan, attention_node *node) {
  const egi_node *row = &plan->graph->nodes[plan->node];
  attention *a = &node->shared;
  node->element = element_of(plan->inputs[0].dtype);
  if (node->element == ELEMENT_NONE || plan->inputs[1].dtype != plan->inputs[0].dtype ||
      plan->inputs[2].dtype != plan->inputs[0].dtype)
    return egi_fail_types(plan);
  EG_TRY(read_sizes(plan, node));
  if (!fits_grid(a))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "more tiles of attention than kernels count");
  a->offset = static_cast<int>(node->n_past);
  a->mask_columns = a->n_keys;
  a->q.strides = strides_of_heads(&plan->inputs[0], a->q_heads);
  a->k.strides = strides_of_heads(&plan->inputs[1], a->kv_heads);
  a->v.strides = strides_of_heads(&plan->inputs[2], a->kv_heads);
  const egi_attribute *scale = egi_node_attribute(row, "scale");
  a->scale = scale ? scale->u.f : static_cast<float>(1.0 / sqrt(a->width > 0 ? a->width : 1.0));
  a->softcap = egi_node_float(row, "softcap", 0.0f);
  if (!(a->softcap >= 0.0f) || isinf(a->softcap)) return fail_shape(plan, "softcap must be a number of at least 0");
  return EG_OK;
}

/* Right-aligned against [batch, q heads, queries, keys]. */
eg_status read_mask(egi_kernel_plan *plan, attention *a) {
  if (!egi_plan_has_input(plan, 3)) return EG_OK;
  const egi_tensor *mask = &plan->inputs[3];
  const int64_t wanted[4] = {a->n_batches, a->q_heads, a->n_queries, a->n_keys};
  int64_t strides[4] = {0, 0, 0, 0};
  a->mask_element = mask->dtype == EG_DTYPE_F64 ? ELEMENT_F64 : element_of(mask->dtype);
  if (mask->dtype != EG_DTYPE_BOOL && a->mask_element == ELEMENT_NONE) return egi_fail_types(plan);
  if (mask->rank < 1 || mask->rank > 4) return fail_shape(plan, "the mask must have 1 to 4 dims");
  for (int i = 4 - mask->rank; i < 4; i++) {
    const int64_t own = mask->dims[i - 4 + mask->rank];
    const bool is_shorter = i == 3 && own < wanted[3];
    if (own != wanted[i] && own != 1 && !is_shorter)
      return fail_shape(plan, "the mask does not broadcast to the scores");
    strides[i] = own == 1 && !is_shorter ? 0 : mask->strides[i - 4 + mask->rank];
    if (is_shorter) a->mask_columns = static_cast<int>(own);
  }
  a->mask_form = mask->dtype == EG_DTYPE_BOOL ? general::MASK_BOOL : general::MASK_FLOAT;
  a->mask.strides = {strides[0], strides[1], strides[2], strides[3]};
  return EG_OK;
}

/* Bounds of blocks are not needed here, but must be sound. */
eg_status check_bounds(const egi_kernel_plan *plan, unsigned input, const attention *a) {
  if (!egi_plan_has_input(plan, input)) return EG_OK;
  const egi_tensor *bounds = &plan->inputs[input];
  const int64_t block = egi_node_int(egi_plan_node(plan), "block", EGI_BLOCK_ROWS);
  if (bounds->dtype != EG_DTYPE_I32) return egi_fail_types(plan);
  if (block >= 1 && bounds->rank == 2 && bounds->dims[0] == (a->n_queries + block - 1) / block && bounds->dims[1] == 2)
    return EG_OK;
  return fail_shape(plan, "block_bounds do not fit the queries");
}

/* first_key and last_query: i32 [sequence], both or none. */
eg_status read_documents(egi_kernel_plan *plan, unsigned first_key, attention_node *node) {
  const bool has_first = egi_plan_has_input(plan, first_key);
  if (has_first != egi_plan_has_input(plan, first_key + 1))
    return fail_shape(plan, "first_key and last_query come together");
  for (unsigned i = first_key; has_first && i < first_key + 2; i++) {
    if (plan->inputs[i].dtype != EG_DTYPE_I32) return egi_fail_types(plan);
    if (plan->inputs[i].rank != 1 || plan->inputs[i].dims[0] != node->shared.n_queries)
      return fail_shape(plan, "first_key and last_query must have an element for each query");
  }
  if (!has_first) return EG_OK;
  node->first_key_input = first_key;
  node->shared.first_key_stride = plan->inputs[first_key].strides[0];
  node->shared.last_query_stride = plan->inputs[first_key + 1].strides[0];
  return check_bounds(plan, first_key + 2, &node->shared);
}

/* A distance that no window has any more becomes none. */
int window_side(const attention *a, int64_t distance) {
  return distance < 0 || distance >= int64_t{a->n_keys} + a->n_queries ? -1 : static_cast<int>(distance);
}

} // namespace

general::head_strides strides_of_heads(const egi_tensor *tensor, int64_t n_heads) {
  const int64_t *s = tensor->strides;
  if (tensor->rank == 4) return {s[0], s[1], s[2], s[3]};
  const int64_t width = n_heads > 0 ? tensor->dims[2] / n_heads : 0;
  return {s[0], width * s[2], s[1], s[2]};
}

eg_status read_attention(egi_kernel_plan *plan, attention_node *out_node) {
  const egi_node *row = &plan->graph->nodes[plan->node];
  EG_TRY(read_operands(plan, out_node));
  attention *a = &out_node->shared;
  a->is_causal = egi_node_int(row, "is_causal", 0) != 0;
  a->left = window_side(a, egi_node_int(row, "left_window_size", -1));
  a->right = window_side(a, egi_node_int(row, "right_window_size", -1));
  return read_mask(plan, a);
}

eg_status read_masked_attention(egi_kernel_plan *plan, unsigned first_key, attention_node *out_node) {
  const egi_node *row = &plan->graph->nodes[plan->node];
  const egi_tensor *valid = &plan->inputs[3], *sinks = &plan->inputs[4];
  EG_TRY(read_operands(plan, out_node));
  EG_TRY(read_documents(plan, first_key, out_node));
  attention *a = &out_node->shared;
  out_node->is_masked = true;
  out_node->window = egi_node_int(row, "window", 0);
  a->is_causal = egi_node_int(row, "causal", 0) != 0;
  a->left = window_side(a, out_node->window - 1);
  a->right = a->is_causal ? -1 : window_side(a, out_node->window - 1);
  if (first_key == MASKED_FIRST_KEY && egi_plan_has_input(plan, MASKED_POSITIONS)) {
    if (plan->inputs[MASKED_POSITIONS].dtype != EG_DTYPE_I32) return egi_fail_types(plan);
    out_node->positions_input = MASKED_POSITIONS;
  }
  const bool has_sizes = out_node->positions_input != 0 || a->n_keys == a->n_queries;
  bool fits = plan->inputs[0].rank == 4 && has_sizes && out_node->window >= 0;
  if (egi_plan_has_input(plan, 3)) {
    if (valid->dtype != EG_DTYPE_BOOL) return egi_fail_types(plan);
    fits = fits && valid->rank == 2 && valid->dims[0] == a->n_batches && valid->dims[1] == a->n_keys;
    a->mask_form = general::MASK_BOOL;
    a->mask.strides = {valid->strides[0], 0, 0, valid->strides[1]};
  }
  if (egi_plan_has_input(plan, 4)) {
    a->sink_element = element_of(sinks->dtype);
    if (a->sink_element == ELEMENT_NONE) return egi_fail_types(plan);
    fits = fits && sinks->rank == 1 && sinks->dims[0] == a->q_heads;
    a->sink_stride = sinks->strides[0];
  }
  return fits ? EG_OK : fail_shape(plan, "key_valid, sinks or the window do not fit Q, K and V");
}

} // namespace egi
