/* Shape rules: elementwise operators and what keeps the shape of an input. */
#include "graph/shapes.h"

/* ---- one input ------------------------------------------------------------------------------------------------ */

static eg_status check_scalar(const egi_inference *in, unsigned index) {
  const egi_value *value = egi_shape_input(in, index);
  if (value == NULL || value->rank == 0) return EG_OK;
  if (value->rank != 1) return egi_shape_fail(in, "input %u is not a single number", index);
  return egi_shape_equal(in, "a single number", value->dims[0], egi_dim_constant(in->dims, 1), NULL);
}

/* indices [.., k], updates indices.shape[:-1] + data.shape[k:] */
static eg_status check_scatter_nd(const egi_inference *in) {
  const egi_value *data = egi_shape_input(in, 0), *index = egi_shape_input(in, 1), *updates = egi_shape_input(in, 2);
  int64_t k;
  if (index->rank < 1) return egi_shape_fail(in, "indices are a scalar");
  if (!egi_dim_value(in->dims, index->dims[index->rank - 1], &k)) return EG_OK;
  if (k < 1 || k > data->rank) return egi_shape_fail(in, "indices of %lld axes", (long long)k);
  if (updates->rank != index->rank - 1 + data->rank - k)
    return egi_shape_fail(in, "updates have %d dimensions", updates->rank);
  for (int i = 0; i < updates->rank; i++) {
    egi_dim wanted = i < index->rank - 1 ? index->dims[i] : data->dims[i - (index->rank - 1) + k];
    EG_TRY(egi_shape_equal(in, "updates", updates->dims[i], wanted, NULL));
  }
  return EG_OK;
}

/* A size of 1 serves all rows: the operator's definition in Python broadcasts, and exporters rely on it. */
static eg_status check_shared(const egi_inference *in, const char *what, egi_dim dim, egi_dim wanted) {
  if (egi_shape_is_number(in, egi_dim_resolve(in->dims, dim), 1)) return EG_OK;
  return egi_shape_equal(in, what, dim, wanted, NULL);
}

/* X [batch, heads, sequence, size] or [batch, sequence, heads*size]; caches [positions, width] with position_ids
 * [batch, sequence], else [batch, sequence, width]. */
static eg_status check_rotary(const egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *ids = egi_shape_input(in, 3);
  if (x->rank != 3 && x->rank != 4) return egi_shape_fail(in, "input 0 has %d dimensions, not 3 or 4", x->rank);
  if (x->rank == 3 && egi_node_int(in->node, "num_heads", 0) <= 0)
    return egi_shape_fail(in, "an input of 3 dimensions needs the attribute num_heads");
  egi_dim sequence = x->rank == 4 ? x->dims[2] : x->dims[1];
  for (unsigned i = 1; i <= 2; i++) {
    const egi_value *cache = egi_shape_input(in, i);
    EG_TRY(egi_shape_check_input_rank(in, i, ids != NULL ? 2 : 3));
    if (ids != NULL) continue;
    EG_TRY(check_shared(in, "batch of the cache", cache->dims[0], x->dims[0]));
    EG_TRY(check_shared(in, "sequence of the cache", cache->dims[1], sequence));
  }
  if (ids == NULL) return EG_OK;
  EG_TRY(egi_shape_check_input_rank(in, 3, 2));
  EG_TRY(check_shared(in, "batch of position_ids", ids->dims[0], x->dims[0]));
  return egi_shape_equal(in, "sequence of position_ids", ids->dims[1], sequence, NULL);
}

static eg_status check_same(const egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int axis;
  switch (in->node->op) {
  case EGI_OP_Clip:
    EG_TRY(check_scalar(in, 1));
    return check_scalar(in, 2);
  case EGI_OP_CumSum:
  case EGI_OP_CumProd:
    return check_scalar(in, 1);
  case EGI_OP_Trilu:
    if (x->rank < 2) return egi_shape_fail(in, "input 0 has %d dimensions; at least 2 are needed", x->rank);
    return check_scalar(in, 1);
  case EGI_OP_Softmax:
  case EGI_OP_LogSoftmax:
    return egi_shape_axis(in, egi_node_int(in->node, "axis", -1), x->rank, &axis);
  case EGI_OP_ScatterND:
    return check_scatter_nd(in);
  case EGI_OP_RotaryEmbedding:
    return check_rotary(in);
  default:
    return EG_OK;
  }
}

eg_status egi_shape_same(egi_inference *in) {
  EG_TRY(check_same(in));
  return egi_shape_set_like(in, 0, egi_shape_input(in, 0));
}

eg_status egi_shape_boolean(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  return egi_shape_set(in, 0, EG_DTYPE_BOOL, x->rank, x->dims);
}

eg_status egi_shape_cast(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t to = egi_node_int(in->node, "to", 0);
  if (!egi_dtype_is_known(to))
    return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED, "to = %lld is not an element type", (long long)to);
  return egi_shape_set(in, 0, (eg_dtype)to, x->rank, x->dims);
}

eg_status egi_shape_cast_like(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  return egi_shape_set(in, 0, egi_shape_input(in, 1)->dtype, x->rank, x->dims);
}

/* ---- several inputs ------------------------------------------------------------------------------------------- */

static eg_status broadcast_all(egi_inference *in, eg_dtype dtype) {
  egi_dim dims[EGI_MAX_RANK];
  int rank = 0;
  for (unsigned i = 0; i < in->node->n_inputs; i++) {
    const egi_value *value = egi_shape_input(in, i);
    EG_TRY(egi_shape_broadcast_into(in, value->rank, value->dims, &rank, dims));
  }
  return egi_shape_set(in, 0, dtype, rank, dims);
}

eg_status egi_shape_broadcast(egi_inference *in) {
  return broadcast_all(in, egi_shape_input(in, 0)->dtype);
}

eg_status egi_shape_broadcast_first(egi_inference *in) {
  return broadcast_all(in, egi_shape_input(in, 0)->dtype);
}

eg_status egi_shape_broadcast_boolean(egi_inference *in) {
  return broadcast_all(in, EG_DTYPE_BOOL);
}

eg_status egi_shape_where(egi_inference *in) {
  eg_dtype dtype = egi_shape_input(in, 1)->dtype;
  EG_TRY(egi_shape_check_type(in, 2, dtype));
  return broadcast_all(in, dtype);
}

/* ---- gradients with the shape of input 0 ---------------------------------------------------------------------- */

static eg_status check_same_shape(const egi_inference *in, const char *what, unsigned a, unsigned b) {
  const egi_value *x = egi_shape_input(in, a), *y = egi_shape_input(in, b);
  EG_TRY(egi_shape_check_input_rank(in, b, x->rank));
  for (int i = 0; i < x->rank; i++) EG_TRY(egi_shape_equal(in, what, x->dims[i], y->dims[i], NULL));
  return EG_OK;
}

eg_status egi_shape_like_first(egi_inference *in) {
  switch (in->node->op) {
  case EGI_OP_GeluGrad:
  case EGI_OP_SwishGrad:
  case EGI_OP_SoftmaxGrad:
  case EGI_OP_LogSoftmaxGrad:
    EG_TRY(check_same_shape(in, "the gradient's shape", 0, 1));
    break;
  case EGI_OP_GatherElementsGrad:
    EG_TRY(check_same_shape(in, "the gradient's shape", 1, 2));
    break;
  case EGI_OP_Accumulate:
    EG_TRY(check_same_shape(in, "state and gradient", 0, 1));
    break;
  case EGI_OP_LogProbabilityGrad:
    EG_TRY(check_same_shape(in, "the gradient's shape", 1, 2));
    EG_TRY(check_same_shape(in, "the gradient's shape", 1, 3));
    break;
  case EGI_OP_AdamW:
    for (unsigned i = 1; i < 4; i++) EG_TRY(check_same_shape(in, "the states", 0, i));
    break;
  case EGI_OP_AdamW8bit:
    EG_TRY(check_same_shape(in, "the gradients", 0, 1));
    EG_TRY(check_same_shape(in, "the states", 2, 3));
    break;
  default:
    break;
  }
  return egi_shape_set_like(in, 0, egi_shape_input(in, 0));
}

/* gate, up (, the gradient) of one shape. */
eg_status egi_shape_glu(egi_inference *in) {
  for (unsigned i = 1; i < in->node->n_inputs; i++) EG_TRY(check_same_shape(in, "gate and up", 0, i));
  for (unsigned i = 0; i < in->node->n_outputs; i++) EG_TRY(egi_shape_set_like(in, i, egi_shape_input(in, 0)));
  return EG_OK;
}
