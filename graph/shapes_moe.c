/* Shape rule of engraft.MoE. */
#include "graph/moe.h"
#include "graph/shapes.h"

static bool number_of(const egi_inference *in, egi_dim dim, int64_t *out) {
  return egi_dim_value(in->dims, egi_dim_resolve(in->dims, dim), out);
}

/* An operand is [first, second] for one expert, or stacked over all of them. */
static eg_status check_operand(const egi_inference *in, const egi_moe *moe, egi_moe_role role, const int64_t *sizes,
                               int rank) {
  for (uint32_t i = 0; i < moe->counts[role]; i++) {
    unsigned input = moe->first[role] + i;
    const egi_value *value = egi_shape_input(in, input);
    int n_stacked = moe->counts[role] == 1 ? 1 : 0; /* sizes[0] is that of the stack */
    EG_TRY(egi_shape_check_input_rank(in, input, rank + n_stacked));
    for (int k = 1 - n_stacked; k <= rank; k++)
      EG_TRY(egi_shape_equal(in, "an expert's operand", value->dims[k - 1 + n_stacked],
                             egi_dim_constant(in->dims, sizes[k]), NULL));
  }
  return EG_OK;
}

/* Rows and columns of a role's matrix [N, K], read from its first input; quantised ones have K from outside. */
static bool matrix_rows(const egi_inference *in, const egi_moe *moe, egi_moe_role role, int64_t *out_rows) {
  const egi_value *value = egi_shape_input(in, moe->first[role]);
  if (value->rank < 2) return false;
  int row = value->rank - (moe->is_transposed[role / 2] ? 1 : 2);
  return number_of(in, value->dims[row], out_rows);
}

/* A [E·r, k], B [n, r·E] */
static eg_status check_adapter(const egi_inference *in, const egi_moe *moe, egi_moe_role role, const int64_t size[2]) {
  unsigned a = moe->first[egi_moe_adapter(role)];
  if (moe->counts[egi_moe_adapter(role)] == 0) return EG_OK;
  EG_TRY(egi_shape_check_input_rank(in, a, 2));
  EG_TRY(egi_shape_check_input_rank(in, a + 1, 2));
  const egi_value *down = egi_shape_input(in, a), *up = egi_shape_input(in, a + 1);
  EG_TRY(egi_shape_equal(in, "an adapter's inputs", down->dims[1], egi_dim_constant(in->dims, size[1]), NULL));
  EG_TRY(egi_shape_equal(in, "an adapter's outputs", up->dims[0], egi_dim_constant(in->dims, size[0]), NULL));
  EG_TRY(egi_shape_equal(in, "ranks of all experts", up->dims[1], down->dims[0], NULL));
  int64_t ranks = 0;
  if (!number_of(in, down->dims[0], &ranks) || ranks % moe->n_experts == 0) return EG_OK; /* or only the caller knows */
  return egi_shape_fail(in, "the ranks of an adapter do not fit %lld experts", (long long)moe->n_experts);
}

/* Codes of 4 bits in flat blocks: scales and what decodes them are lists over the operand. */
static eg_status check_levels(const egi_inference *in, const egi_moe *moe, egi_moe_role role, int64_t n_experts,
                              const int64_t size[2]) {
  egi_moe_role scales = (egi_moe_role)(EGI_MOE_GATE_SCALES + role), nested = (egi_moe_role)(EGI_MOE_GATE_ZEROS + role);
  if (moe->counts[scales] != moe->counts[role] || (moe->counts[nested] > 0 && moe->counts[nested] != moe->counts[role]))
    return egi_shape_fail(in, "an operand of scales for each one of codes is needed");
  return egi_shape_check_levels(in,
                                (egi_levels){.weight = moe->first[role],
                                             .scales = moe->first[scales],
                                             .nested = moe->first[nested],
                                             .count = moe->counts[role],
                                             .is_nested = moe->counts[nested] > 0,
                                             .block = moe->block_size,
                                             .elements = (moe->counts[role] == 1 ? n_experts : 1) * size[0] * size[1]});
}

static eg_status check_matrix(const egi_inference *in, const egi_moe *moe, egi_moe_role role, int64_t n_experts,
                              const int64_t size[2]) {
  int64_t n = size[0], k = size[1];
  EG_TRY(check_adapter(in, moe, role, size));
  egi_moe_role scales = (egi_moe_role)(EGI_MOE_GATE_SCALES + role), zeros = (egi_moe_role)(EGI_MOE_GATE_ZEROS + role);
  EG_TRY(check_operand(in, moe, (egi_moe_role)(role + 1), (const int64_t[]){n_experts, n}, 1));
  if (!moe->is_quantised) {
    bool is_transposed = moe->is_transposed[role / 2];
    return check_operand(in, moe, role, (const int64_t[]){n_experts, is_transposed ? k : n, is_transposed ? n : k}, 2);
  }
  int64_t block = moe->block_size > 0 ? moe->block_size : k, blocks = (k + block - 1) / block;
  EG_TRY(check_operand(in, moe, role, (const int64_t[]){n_experts, n, (k * moe->bits + 7) / 8}, 2));
  if (moe->has_levels) return check_levels(in, moe, role, n_experts, size);
  EG_TRY(check_operand(in, moe, scales, (const int64_t[]){n_experts, n, blocks}, 2));
  if (moe->counts[scales] == 0) return egi_shape_fail(in, "quantised experts without scales");
  return check_operand(in, moe, zeros, (const int64_t[]){n_experts, n, (blocks * moe->bits + 7) / 8}, 2);
}

static eg_status check(const egi_inference *in, egi_moe *moe) {
  const egi_value *x = egi_shape_input(in, EGI_MOE_X), *logits = egi_shape_input(in, EGI_MOE_LOGITS);
  int64_t width = 0, n_experts = 0, gate = 0, up = 0;
  if (x == NULL || logits == NULL || x->rank < 1 || logits->rank < 1)
    return egi_shape_fail(in, "hidden states and router logits are rows");
  if (!number_of(in, x->dims[x->rank - 1], &width) || !number_of(in, logits->dims[logits->rank - 1], &n_experts))
    return egi_shape_fail(in, "the hidden size or the number of experts is not known");
  EG_TRY(egi_shape_equal(in, "rows of hidden states and router logits", egi_shape_product(in, x->dims, 0, x->rank - 1),
                         egi_shape_product(in, logits->dims, 0, logits->rank - 1), NULL));
  EG_TRY(egi_moe_read(in->graph, in->id, moe));
  if (moe->n_experts != n_experts)
    return egi_shape_fail(in, "router logits of %lld experts, not %lld", (long long)n_experts,
                          (long long)moe->n_experts);
  const egi_value *correction = egi_shape_input(in, EGI_MOE_CORRECTION);
  if (correction != NULL) {
    EG_TRY(egi_shape_check_input_rank(in, EGI_MOE_CORRECTION, 1));
    EG_TRY(egi_shape_equal(in, "the correction", correction->dims[0], egi_dim_constant(in->dims, n_experts), NULL));
  }
  if (!matrix_rows(in, moe, EGI_MOE_GATE, &gate)) return egi_shape_fail(in, "sizes of its experts are not known");
  EG_TRY(check_matrix(in, moe, EGI_MOE_GATE, n_experts, (const int64_t[]){gate, width}));
  bool is_joint = moe->form == EGI_MOE_CONCATENATED || moe->form == EGI_MOE_INTERLEAVED;
  if (is_joint && gate % 2 != 0) return egi_shape_fail(in, "gate and up do not share %lld rows", (long long)gate);
  up = is_joint ? gate / 2 : gate;
  if (moe->form == EGI_MOE_SEPARATE)
    EG_TRY(check_matrix(in, moe, EGI_MOE_UP, n_experts, (const int64_t[]){gate, width}));
  return check_matrix(in, moe, EGI_MOE_DOWN, n_experts, (const int64_t[]){width, up});
}

eg_status egi_shape_moe(egi_inference *in) {
  egi_moe moe;
  EG_TRY(check(in, &moe));
  return egi_shape_set_like(in, 0, egi_shape_input(in, EGI_MOE_X));
}
