/* Where the tokens of a row stand in each value, and which operators leave them where they are. A dimension belongs to
 * the tokens when it grows in proportion to the row: sizes are computed for two lengths that no other size is likely to
 * be a multiple of, with one row a batch. */
#include <string.h>

#include "graph/linear.h"
#include "passes/packing.h"

static const int64_t lengths[2] = {1009, 2003};

/* ---- sizes ------------------------------------------------------------------------------------------------------ */

eg_status egi_packing_begin(egi_packing *p) {
  egi_dims *dims = p->graph->module->dims;
  size_t count = egi_dims_symbol_count(dims);
  for (int k = 0; k < 2; k++) {
    p->bindings[k] = EGI_NEW(p->arena, egi_binding, count + 1);
    if (!p->bindings[k]) return EG_ERROR_MEMORY;
  }
  for (size_t i = 0; i < count; i++) {
    const char *name;
    egi_dim symbol = egi_dims_symbol_at(dims, i, &name), resolved = egi_dim_resolve(dims, symbol);
    for (int k = 0; k < 2; k++) {
      int64_t value = strstr(name, "batch") ? 1 : strstr(name, "past") && !strstr(name, "total") ? 0 : lengths[k];
      if (resolved == p->batch) value = 1;
      if (resolved == p->sequence) value = lengths[k];
      (void)egi_dim_value(dims, resolved, &value);
      p->bindings[k][i] = (egi_binding){symbol, value};
    }
  }
  p->n_bindings = count;
  return EG_OK;
}

static bool size_at(const egi_packing *p, egi_dim dim, int k, int64_t *out_size) {
  return egi_dim_evaluate(p->graph->module->dims, dim, p->bindings[k], p->n_bindings, out_size) && *out_size >= 0;
}

egi_token_axis egi_packing_axis(const egi_packing *p, egi_value_id id) {
  const egi_value *value = &p->graph->values[id];
  egi_token_axis out = {.axis = -1, .outer = 1};
  int64_t before = 1;
  if (value->rank < 0) out.reason = "the sizes of its result are not known";
  for (int i = 0; i < value->rank && !out.reason; i++) {
    int64_t size[2];
    if (!size_at(p, value->dims[i], 0, &size[0]) || !size_at(p, value->dims[i], 1, &size[1])) {
      out.reason = "the sizes of its result are not known";
    } else if (size[0] != size[1]) {
      if (out.axis >= 0) out.reason = "its result has the sequence in two dimensions";
      if (size[0] * lengths[1] != size[1] * lengths[0])
        out.reason = "its result is longer or shorter than the sequence";
      out.axis = i;
      out.factor = size[0] / lengths[0];
      out.outer = before;
    } else if (size[0] > 0 && before > INT64_MAX / size[0]) {
      out.reason = "its result is too large";
    } else {
      before *= size[0];
    }
  }
  return out;
}

/* ---- operators -------------------------------------------------------------------------------------------------- */

bool egi_packing_is_shape(egi_op op, unsigned input) {
  switch (op) {
  case EGI_OP_Reshape:
  case EGI_OP_Expand:
  case EGI_OP_Tile:
  case EGI_OP_Squeeze:
  case EGI_OP_Unsqueeze:
  case EGI_OP_Split:
  case EGI_OP_TopK:
  case EGI_OP_ReduceLogSumExp:
  case EGI_OP_ReduceMax:
  case EGI_OP_ReduceMean:
  case EGI_OP_ReduceMin:
  case EGI_OP_ReduceProd:
  case EGI_OP_ReduceSum:
    return input == 1;
  case EGI_OP_Slice:
    return input >= 1;
  default:
    return false;
  }
}

static int normalise(int64_t axis, int rank) {
  return (int)(axis < 0 ? axis + rank : axis);
}

static const char *const mixes = "it mixes tokens of the sequence";

static bool decides(const egi_packing *p, const egi_node *node, unsigned input) {
  return input < node->n_inputs && node->inputs[input] != 0 && p->is_token[node->inputs[input]];
}
static bool varies(const egi_packing *p, const egi_node *node, unsigned input) {
  return input < node->n_inputs && node->inputs[input] != 0 && p->is_varied[node->inputs[input]];
}
static int rank_of(const egi_packing *p, const egi_node *node, unsigned input) {
  return p->graph->values[node->inputs[input]].rank;
}

/* Operands that are broadcast: their tokens stand where those of the result stand. */
static const char *check_aligned(const egi_packing *p, const egi_node *node, egi_token_axis result) {
  int rank = p->graph->values[node->outputs[0]].rank;
  for (unsigned i = 0; i < node->n_inputs; i++) {
    if (!varies(p, node, i) || egi_packing_is_shape(node->op, i)) continue;
    egi_token_axis own = egi_packing_axis(p, node->inputs[i]);
    if (own.reason) return own.reason;
    if (own.axis < 0 && decides(p, node, i)) return mixes;
    if (own.axis < 0) continue;
    if (own.axis + rank - rank_of(p, node, i) != result.axis || own.factor != result.factor) return mixes;
  }
  return NULL;
}

/* Tokens stay in their dimension; other ones are reduced, split, joined, ordered. */
static const char *check_in_place(const egi_packing *p, const egi_node *node, int64_t taken) {
  for (unsigned i = 0; i < node->n_inputs; i++) {
    if (!decides(p, node, i)) continue;
    egi_token_axis own = egi_packing_axis(p, node->inputs[i]);
    if (own.reason) return own.reason;
    if (own.axis < 0 || own.axis == normalise(taken, rank_of(p, node, i))) return mixes;
    for (uint16_t k = 0; k < node->n_outputs; k++) {
      egi_token_axis result = node->outputs[k] != 0 ? egi_packing_axis(p, node->outputs[k]) : own;
      if (result.reason) return result.reason;
      if (result.axis < 0 || result.factor != own.factor) return mixes;
    }
  }
  return NULL;
}

/* The rows of tokens are taken apart or put together: what stands before them stays. */
static const char *check_reshaped(const egi_packing *p, const egi_node *node, egi_token_axis result) {
  egi_token_axis own = egi_packing_axis(p, node->inputs[0]);
  if (own.reason) return own.reason;
  return own.axis >= 0 && own.outer == result.outer ? NULL : mixes;
}

/* A[.., M, K] · B[.., K, N]: K is not the sequence. */
static const char *check_product(const egi_packing *p, const egi_node *node, unsigned a, unsigned b) {
  int a_rank = rank_of(p, node, a), b_rank = rank_of(p, node, b);
  egi_token_axis left = egi_packing_axis(p, node->inputs[a]), right = egi_packing_axis(p, node->inputs[b]);
  if (varies(p, node, a) && (left.reason || left.axis == a_rank - 1)) return left.reason ? left.reason : mixes;
  bool is_inner = right.axis == (b_rank > 1 ? b_rank - 2 : 0);
  if (varies(p, node, b) && (right.reason || (right.axis >= 0 && is_inner))) return right.reason ? right.reason : mixes;
  return NULL;
}

static const char *check_gather(const egi_packing *p, const egi_node *node) {
  int axis = normalise(egi_node_int(node, "axis", 0), rank_of(p, node, 0));
  egi_token_axis data = egi_packing_axis(p, node->inputs[0]);
  if (!varies(p, node, 0)) return NULL;
  if (data.reason) return data.reason;
  return varies(p, node, 1) || data.axis == axis || data.axis < 0 ? mixes : NULL;
}

static const char *check_slice(const egi_packing *p, const egi_node *node) {
  int64_t steps[EGI_MAX_RANK];
  uint32_t count = 0;
  bool has_steps = node->n_inputs > 4 && node->inputs[4] != 0;
  if (has_steps && !egi_value_integers(p->graph, node->inputs[4], steps, EGI_MAX_RANK, &count)) return mixes;
  for (uint32_t i = 0; i < count; i++)
    if (steps[i] < 1) return mixes;
  return check_in_place(p, node, EGI_MAX_RANK);
}

/* Norms: over the dimensions from `axis` on. */
static const char *check_norm(const egi_packing *p, const egi_node *node) {
  egi_token_axis own = egi_packing_axis(p, node->inputs[0]);
  if (own.reason) return own.reason;
  bool is_inside = own.axis < normalise(egi_node_int(node, "axis", -1), rank_of(p, node, 0));
  return own.axis >= 0 && is_inside && !varies(p, node, 1) ? NULL : mixes;
}

static const char *check_rotary(const egi_packing *p, const egi_node *node) {
  bool has_positions = node->n_inputs > 3 && node->inputs[3] != 0;
  int rank = rank_of(p, node, 0);
  egi_token_axis own = egi_packing_axis(p, node->inputs[0]);
  if (own.reason) return own.reason;
  if (own.axis != rank - 2 || own.factor != 1) return mixes;
  if (has_positions && (varies(p, node, 1) || varies(p, node, 2))) return "its angles depend on the sequence";
  for (unsigned i = 1; i < node->n_inputs; i++) { /* [batch, sequence, angles], or positions [batch, sequence] */
    if (!varies(p, node, i)) continue;
    own = egi_packing_axis(p, node->inputs[i]);
    if (own.reason) return own.reason;
    if (own.axis != 1 || own.factor != 1) return mixes;
  }
  return NULL;
}

static const char *check_attention(const egi_packing *p, const egi_node *node) {
  for (unsigned i = 0; i < 3; i++) {
    egi_token_axis own = egi_packing_axis(p, node->inputs[i]);
    if (own.reason) return own.reason;
    if (own.axis != 2 || own.factor != 1 || own.outer <= 0) return mixes;
  }
  if (decides(p, node, 3)) return "tokens decide which keys it sees";
  if (varies(p, node, 5) || varies(p, node, 6)) return "it has bounds of its own";
  return varies(p, node, 4) ? "its sinks depend on the sequence" : NULL;
}

/* The last dimension is a token's own, in every operand that tokens decide. */
static const char *check_rows(const egi_packing *p, const egi_node *node, unsigned n_rows) {
  for (unsigned i = 0; i < node->n_inputs; i++) {
    if (!varies(p, node, i)) continue;
    egi_token_axis own = egi_packing_axis(p, node->inputs[i]);
    if (own.reason) return own.reason;
    if (own.axis < 0 || own.axis == rank_of(p, node, i) - (i < n_rows)) return mixes;
  }
  return NULL;
}

static const char *check_operator(const egi_packing *p, const egi_node *node, egi_token_axis result) {
  uint32_t flags = egi_op_get(node->op)->flags;
  switch (node->op) {
  case EGI_OP_MaskedAttention:
    return check_attention(p, node);
  case EGI_OP_Attention:
    return "what its mask hides is not proven, so that documents could see each other";
  case EGI_OP_Reshape:
  case EGI_OP_Flatten:
  case EGI_OP_Squeeze:
  case EGI_OP_Unsqueeze:
    return check_reshaped(p, node, result);
  case EGI_OP_Gather:
    return check_gather(p, node);
  case EGI_OP_Slice:
    return check_slice(p, node);
  case EGI_OP_MatMul:
  case EGI_OP_Linear:
    return check_product(p, node, 0, 1);
  case EGI_OP_Gemm:
    if (egi_node_int(node, "transA", 0) != 0 || varies(p, node, 1)) return mixes;
    return check_product(p, node, 0, 1);
  case EGI_OP_AddMatMul:
    return check_product(p, node, 1, 2);
  case EGI_OP_LayerNormalization:
  case EGI_OP_RMSNormalization:
    return check_norm(p, node);
  case EGI_OP_RotaryEmbedding:
    return check_rotary(p, node);
  case EGI_OP_MoE:
    return check_rows(p, node, 2);
  case EGI_OP_LinearLogProbability:
  case EGI_OP_LogProbability:
    return check_rows(p, node, 1);
  case EGI_OP_Transpose:
    return NULL;
  case EGI_OP_Concat:
    return check_in_place(p, node, egi_node_int(node, "axis", 0));
  case EGI_OP_Split:
    return check_in_place(p, node, egi_node_int(node, "axis", 0));
  case EGI_OP_Softmax:
  case EGI_OP_LogSoftmax:
  case EGI_OP_TopK:
    return check_in_place(p, node, egi_node_int(node, "axis", -1));
  case EGI_OP_ReduceLogSumExp:
  case EGI_OP_ReduceMax:
  case EGI_OP_ReduceMean:
  case EGI_OP_ReduceMin:
  case EGI_OP_ReduceProd:
  case EGI_OP_ReduceSum:
  case EGI_OP_ArgMax:
  case EGI_OP_ArgMin:
  case EGI_OP_Tile:
    return check_in_place(p, node, EGI_MAX_RANK);
  default:
    break;
  }
  bool is_broadcast = (flags & EGI_OP_ELEMENTWISE) != 0 || node->op == EGI_OP_Expand || node->op == EGI_OP_Where;
  bool is_plain = node->op == EGI_OP_Identity || node->op == EGI_OP_CastLike || node->op == EGI_OP_Dropout;
  if (is_broadcast || is_plain) return check_aligned(p, node, result);
  return "the operator is not known to keep tokens of a sequence apart";
}

const char *egi_packing_check_node(const egi_packing *p, egi_node_id id) {
  const egi_node *node = &p->graph->nodes[id];
  egi_token_axis first = {.axis = -1};
  if (node->op <= EGI_OP_UNKNOWN) return "the operator is not known";
  for (uint16_t i = 0; i < node->n_outputs; i++) {
    egi_token_axis own = node->outputs[i] != 0 ? egi_packing_axis(p, node->outputs[i]) : first;
    if (own.reason) return own.reason;
    if (node->outputs[i] != 0 && own.axis < 0) return mixes;
    if (i == 0) first = own;
  }
  return check_operator(p, node, first);
}
