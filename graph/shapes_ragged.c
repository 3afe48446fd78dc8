/* Shape rules: the operators that dispatch_moe makes of engraft.MoE. */
#include "graph/ragged.h"
#include "graph/shapes.h"

static egi_dim number(const egi_inference *in, int64_t value) {
  return egi_dim_constant(in->dims, value);
}

static eg_status check_indices(const egi_inference *in, unsigned input, egi_dim count) {
  const egi_value *value = egi_shape_input(in, input);
  EG_TRY(egi_shape_check_type(in, input, EG_DTYPE_I32));
  EG_TRY(egi_shape_check_input_rank(in, input, 1));
  return egi_shape_equal(in, "indices", value->dims[0], count, NULL);
}

/* Rows [R, columns]. */
static eg_status check_matrix(const egi_inference *in, unsigned input) {
  return egi_shape_check_input_rank(in, input, 2);
}

/* ---- routing -------------------------------------------------------------------------------------------------- */

eg_status egi_shape_route(egi_inference *in) {
  const egi_value *logits = egi_shape_input(in, 0), *correction = egi_shape_input(in, 1);
  int64_t n_experts = 0;
  egi_moe moe;
  if (logits->rank < 1 ||
      !egi_dim_value(in->dims, egi_dim_resolve(in->dims, logits->dims[logits->rank - 1]), &n_experts))
    return egi_shape_fail(in, "the number of experts is not known");
  EG_TRY(egi_moe_read_router(in->graph, in->id, &moe));
  if (moe.n_experts != n_experts)
    return egi_shape_fail(in, "router logits of %lld experts, not %lld", (long long)n_experts,
                          (long long)moe.n_experts);
  if (correction != NULL) {
    EG_TRY(egi_shape_check_input_rank(in, 1, 1));
    EG_TRY(egi_shape_equal(in, "the correction", correction->dims[0], number(in, n_experts), NULL));
  }
  egi_dim tokens = egi_shape_product(in, logits->dims, 0, logits->rank - 1);
  egi_dim rows = egi_dim_multiply(in->dims, tokens, number(in, moe.top_k)), ends = number(in, n_experts + 1);
  for (unsigned i = 0; i < 3; i++) EG_TRY(egi_shape_set(in, i, EG_DTYPE_I32, 1, &rows));
  EG_TRY(egi_shape_set(in, 3, EG_DTYPE_I32, 1, &ends));
  return egi_shape_set(in, 4, logits->dtype, 1, &rows);
}

/* logits, expert, inverse, d weight */
eg_status egi_shape_route_grad(egi_inference *in) {
  const egi_value *expert = egi_shape_input(in, 1);
  EG_TRY(egi_shape_check_input_rank(in, 3, 1));
  EG_TRY(check_indices(in, 1, egi_shape_input(in, 3)->dims[0]));
  EG_TRY(check_indices(in, 2, expert->dims[0]));
  return egi_shape_set_like(in, 0, egi_shape_input(in, 0));
}

/* x, source_row, inverse */
eg_status egi_shape_dispatch(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *source = egi_shape_input(in, 1);
  if (x->rank < 1) return egi_shape_fail(in, "hidden states are rows");
  EG_TRY(egi_shape_check_input_rank(in, 1, 1));
  EG_TRY(check_indices(in, 1, source->dims[0]));
  EG_TRY(check_indices(in, 2, source->dims[0]));
  const egi_dim dims[2] = {source->dims[0], x->dims[x->rank - 1]};
  return egi_shape_set(in, 0, x->dtype, 2, dims);
}

/* rows, source_row, inverse, like */
eg_status egi_shape_combine(egi_inference *in) {
  const egi_value *rows = egi_shape_input(in, 0), *like = egi_shape_input(in, 3);
  EG_TRY(check_matrix(in, 0));
  EG_TRY(check_indices(in, 1, rows->dims[0]));
  EG_TRY(check_indices(in, 2, rows->dims[0]));
  if (like->rank < 1) return egi_shape_fail(in, "hidden states are rows");
  EG_TRY(egi_shape_equal(in, "columns", rows->dims[1], like->dims[like->rank - 1], NULL));
  return egi_shape_set(in, 0, rows->dtype, like->rank, like->dims);
}

/* ---- products ------------------------------------------------------------------------------------------------- */

/* An operand is [first, second] for one expert, or stacked over all of them; `sizes` begins with E. */
static eg_status check_operand(const egi_inference *in, const egi_ragged *ragged, egi_ragged_role role,
                               const egi_dim *sizes, int rank) {
  int n_stacked = ragged->counts[role] == 1 ? 1 : 0;
  for (uint32_t i = 0; i < ragged->counts[role]; i++) {
    unsigned input = ragged->first[role] + i;
    EG_TRY(egi_shape_check_input_rank(in, input, rank + n_stacked));
    const egi_value *value = egi_shape_input(in, input);
    for (int k = 1 - n_stacked; k <= rank; k++)
      EG_TRY(egi_shape_equal(in, "an expert's operand", value->dims[k - 1 + n_stacked], sizes[k], NULL));
  }
  return EG_OK;
}

/* As for engraft.MoE; nothing is known where N is not. */
static eg_status check_levels(const egi_inference *in, const egi_ragged *ragged, egi_dim rows) {
  const uint32_t *counts = ragged->counts, *first = ragged->first;
  int64_t n = 0, n_stacked = counts[EGI_RAGGED_WEIGHT] == 1 ? ragged->n_experts : 1;
  uint32_t n_nested = counts[EGI_RAGGED_ZEROS];
  if (counts[EGI_RAGGED_SCALES] != counts[EGI_RAGGED_WEIGHT] || (n_nested > 0 && n_nested != counts[EGI_RAGGED_WEIGHT]))
    return egi_shape_fail(in, "an operand of scales for each one of codes is needed");
  if (!egi_dim_value(in->dims, egi_dim_resolve(in->dims, rows), &n)) return EG_OK;
  return egi_shape_check_levels(in, (egi_levels){.weight = first[EGI_RAGGED_WEIGHT],
                                                 .scales = first[EGI_RAGGED_SCALES],
                                                 .nested = first[EGI_RAGGED_ZEROS],
                                                 .count = counts[EGI_RAGGED_WEIGHT],
                                                 .is_nested = n_nested > 0,
                                                 .block = ragged->block_size,
                                                 .elements = n_stacked * n * ragged->in_features});
}

/* The operands of the experts; *out_rows: N. */
static eg_status check_experts(const egi_inference *in, const egi_ragged *ragged, egi_dim *out_rows) {
  const egi_value *weight = egi_shape_input(in, ragged->first[EGI_RAGGED_WEIGHT]);
  egi_dim e = number(in, ragged->n_experts), k = number(in, ragged->in_features);
  if (weight->rank != (ragged->counts[EGI_RAGGED_WEIGHT] == 1 ? 3 : 2))
    return egi_shape_fail(in, "the matrices of its experts are not [N, K] each");
  egi_dim n = weight->dims[weight->rank - (ragged->is_transposed ? 1 : 2)];
  *out_rows = n;
  EG_TRY(check_operand(in, ragged, EGI_RAGGED_BIAS, (const egi_dim[]){e, n}, 1));
  if (!ragged->is_quantised)
    return check_operand(in, ragged, EGI_RAGGED_WEIGHT,
                         (const egi_dim[]){e, ragged->is_transposed ? k : n, ragged->is_transposed ? n : k}, 2);
  int64_t columns = ragged->in_features, block = ragged->block_size > 0 ? ragged->block_size : columns;
  int64_t blocks = block > 0 ? (columns + block - 1) / block : 0;
  egi_dim bytes = number(in, (columns * ragged->bits + 7) / 8), zeros = number(in, (blocks * ragged->bits + 7) / 8);
  EG_TRY(check_operand(in, ragged, EGI_RAGGED_WEIGHT, (const egi_dim[]){e, n, bytes}, 2));
  if (ragged->has_levels) return check_levels(in, ragged, n);
  EG_TRY(check_operand(in, ragged, EGI_RAGGED_SCALES, (const egi_dim[]){e, n, number(in, blocks)}, 2));
  return check_operand(in, ragged, EGI_RAGGED_ZEROS, (const egi_dim[]){e, n, zeros}, 2);
}

static eg_status check_offsets(const egi_inference *in, unsigned input, int64_t n_experts) {
  return check_indices(in, input, number(in, n_experts + 1));
}

static eg_status check_row_weight(const egi_inference *in, egi_dim rows) {
  const egi_value *weight = egi_shape_input(in, EGI_RAGGED_ROW_WEIGHT);
  if (weight == NULL) return EG_OK;
  EG_TRY(egi_shape_check_input_rank(in, EGI_RAGGED_ROW_WEIGHT, 1));
  return egi_shape_equal(in, "rows", weight->dims[0], rows, NULL);
}

eg_status egi_shape_ragged_linear(egi_inference *in) {
  egi_ragged ragged;
  egi_dim n = EGI_DIM_NONE;
  EG_TRY(egi_ragged_read(in->graph, in->id, &ragged));
  EG_TRY(check_matrix(in, EGI_RAGGED_X));
  const egi_value *x = egi_shape_input(in, EGI_RAGGED_X), *addend = egi_shape_input(in, EGI_RAGGED_ADDEND);
  EG_TRY(egi_shape_equal(in, "columns", x->dims[1], number(in, ragged.in_features), NULL));
  EG_TRY(check_experts(in, &ragged, &n));
  EG_TRY(check_offsets(in, EGI_RAGGED_OFFSETS, ragged.n_experts));
  EG_TRY(check_row_weight(in, x->dims[0]));
  const egi_dim dims[2] = {x->dims[0], n};
  if (addend != NULL) {
    EG_TRY(check_matrix(in, EGI_RAGGED_ADDEND));
    for (int i = 0; i < 2; i++) EG_TRY(egi_shape_equal(in, "the addend", addend->dims[i], dims[i], NULL));
  }
  return egi_shape_set(in, 0, x->dtype, 2, dims);
}

eg_status egi_shape_ragged_linear_grad(egi_inference *in) {
  egi_ragged ragged;
  egi_dim n = EGI_DIM_NONE;
  EG_TRY(egi_ragged_read(in->graph, in->id, &ragged));
  EG_TRY(check_matrix(in, EGI_RAGGED_DY));
  const egi_value *dy = egi_shape_input(in, EGI_RAGGED_DY), *x = egi_shape_input(in, EGI_RAGGED_FORWARD_X);
  EG_TRY(check_experts(in, &ragged, &n));
  EG_TRY(egi_shape_equal(in, "columns", dy->dims[1], n, NULL));
  EG_TRY(check_offsets(in, EGI_RAGGED_OFFSETS, ragged.n_experts));
  EG_TRY(check_row_weight(in, dy->dims[0]));
  const egi_dim dims[2] = {dy->dims[0], number(in, ragged.in_features)};
  bool wants_weight = in->node->n_outputs > 1 && in->node->outputs[1] != 0;
  if (wants_weight && x == NULL) return egi_shape_fail(in, "the gradient of its row weights needs x");
  if (x != NULL) EG_TRY(check_matrix(in, EGI_RAGGED_FORWARD_X));
  for (int i = 0; i < 2 && x != NULL; i++) EG_TRY(egi_shape_equal(in, "x", x->dims[i], dims[i], NULL));
  EG_TRY(egi_shape_set(in, 0, dy->dtype, 2, dims));
  return egi_shape_set(in, 1, dy->dtype, 1, dims);
}

/* left [R, N], right [R, K], offsets -> [E, N, K] */
eg_status egi_shape_ragged_reduce(egi_inference *in) {
  EG_TRY(check_matrix(in, 0));
  EG_TRY(check_matrix(in, 1));
  EG_TRY(egi_shape_check_input_rank(in, 2, 1));
  EG_TRY(egi_shape_check_type(in, 2, EG_DTYPE_I32));
  const egi_value *left = egi_shape_input(in, 0), *right = egi_shape_input(in, 1), *offsets = egi_shape_input(in, 2);
  EG_TRY(egi_shape_equal(in, "rows", left->dims[0], right->dims[0], NULL));
  const egi_dim dims[3] = {egi_dim_subtract(in->dims, offsets->dims[0], number(in, 1)), left->dims[1], right->dims[1]};
  return egi_shape_set(in, 0, left->dtype, 3, dims);
}
