/* Shape rules: normalisation and attention, with their gradients. */
#include "graph/shapes.h"

/* ---- normalisation -------------------------------------------------------------------------------------------- */

/* First normalised axis; scale and bias broadcast to the dims from there on. */
static eg_status check_normalized(const egi_inference *in, unsigned n_parameters, int *out_axis) {
  const egi_value *x = egi_shape_input(in, 0);
  EG_TRY(egi_shape_axis(in, egi_node_int(in->node, "axis", -1), x->rank, out_axis));
  for (unsigned i = 1; i <= n_parameters; i++) {
    const egi_value *parameter = egi_shape_input(in, i);
    if (parameter != NULL)
      EG_TRY(
          egi_shape_broadcasts_to(in, i == 1 ? "scale" : "bias", parameter, x->rank - *out_axis, x->dims + *out_axis));
  }
  return EG_OK;
}

eg_status egi_shape_layer_normalization(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  eg_dtype stash = (eg_dtype)egi_node_int(in->node, "stash_type", EG_DTYPE_F32);
  egi_dim dims[EGI_MAX_RANK];
  int axis;
  if (!egi_dtype_is_float(stash))
    return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED, "stash_type is not a floating type");
  EG_TRY(check_normalized(in, 2, &axis));
  for (int i = 0; i < x->rank; i++) dims[i] = i < axis ? x->dims[i] : egi_dim_constant(in->dims, 1);
  EG_TRY(egi_shape_set_like(in, 0, x));
  EG_TRY(egi_shape_set(in, 1, stash, x->rank, dims));
  return egi_shape_set(in, 2, stash, x->rank, dims);
}

/* The result has the type of scale. */
eg_status egi_shape_rms_normalization(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *scale = egi_shape_input(in, 1);
  int axis;
  if (!egi_dtype_is_float(scale->dtype)) return egi_shape_fail(in, "scale is not of a floating type");
  EG_TRY(check_normalized(in, 1, &axis));
  return egi_shape_set(in, 0, scale->dtype, x->rank, x->dims);
}

/* X, Scale, .., dY (last) -> dX, dScale, dBias */
eg_status egi_shape_normalization_grad(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *scale = egi_shape_input(in, 1);
  unsigned last = in->node->n_inputs - 1u;
  const egi_value *gradient = egi_shape_input(in, last);
  int axis;
  EG_TRY(check_normalized(in, 1, &axis));
  EG_TRY(egi_shape_check_input_rank(in, last, x->rank));
  for (int i = 0; i < x->rank; i++)
    EG_TRY(egi_shape_equal(in, "the gradient's shape", x->dims[i], gradient->dims[i], NULL));
  EG_TRY(egi_shape_set_like(in, 0, x));
  EG_TRY(egi_shape_set_like(in, 1, scale));
  return egi_shape_set_like(in, 2, scale);
}

/* ---- attention ------------------------------------------------------------------------------------------------ */

/* Sizes of one operand, [batch, heads, length, width] whichever way it is laid out. */
typedef struct heads {
  egi_dim batch, heads, length, width;
} heads;

static eg_status read_heads(const egi_inference *in, unsigned index, const char *attribute, heads *out) {
  const egi_value *x = egi_shape_input(in, index);
  if (x->rank == 4) {
    *out = (heads){x->dims[0], x->dims[1], x->dims[2], x->dims[3]};
    return EG_OK;
  }
  if (x->rank != 3) return egi_shape_fail(in, "input %u has %d dimensions, not 3 or 4", index, x->rank);
  int64_t count = egi_node_int(in->node, attribute, 0);
  if (count <= 0) return egi_shape_fail(in, "inputs of 3 dimensions need the attribute %s", attribute);
  egi_dim number = egi_dim_constant(in->dims, count);
  egi_dim width = egi_dim_divide(in->dims, egi_dim_resolve(in->dims, x->dims[2]), number);
  EG_TRY(egi_shape_equal(in, "heads times their width", egi_dim_multiply(in->dims, width, number), x->dims[2], NULL));
  *out = (heads){x->dims[0], number, x->dims[1], width};
  return EG_OK;
}

typedef struct attention {
  heads q, k, v;
  egi_dim total; /* keys, past ones included */
} attention;

static eg_status check_operands(const egi_inference *in, attention *a) {
  int64_t q_heads, kv_heads;
  EG_TRY(egi_shape_check_input_rank(in, 1, egi_shape_input(in, 0)->rank));
  EG_TRY(egi_shape_check_input_rank(in, 2, egi_shape_input(in, 0)->rank));
  EG_TRY(read_heads(in, 0, "q_num_heads", &a->q));
  EG_TRY(read_heads(in, 1, "kv_num_heads", &a->k));
  EG_TRY(read_heads(in, 2, "kv_num_heads", &a->v));
  EG_TRY(egi_shape_equal(in, "batch of query and key", a->q.batch, a->k.batch, &a->q.batch));
  EG_TRY(egi_shape_equal(in, "batch of key and value", a->k.batch, a->v.batch, NULL));
  EG_TRY(egi_shape_equal(in, "head size of query and key", a->q.width, a->k.width, NULL));
  EG_TRY(egi_shape_equal(in, "heads of key and value", a->k.heads, a->v.heads, NULL));
  EG_TRY(egi_shape_equal(in, "length of key and value", a->k.length, a->v.length, NULL));
  if (egi_dim_value(in->dims, a->q.heads, &q_heads) && egi_dim_value(in->dims, a->k.heads, &kv_heads) &&
      (kv_heads <= 0 || q_heads % kv_heads != 0))
    return egi_shape_fail(in, "%lld query heads do not share %lld key heads", (long long)q_heads, (long long)kv_heads);
  a->total = a->k.length;
  return EG_OK;
}

/* past_key and past_value, [batch, kv heads, past, width]: both or none. */
static eg_status add_past(const egi_inference *in, attention *a) {
  const egi_value *key = egi_shape_input(in, 4), *value = egi_shape_input(in, 5);
  if ((key == NULL) != (value == NULL)) return egi_shape_fail(in, "past_key and past_value come together");
  if (key == NULL) return EG_OK;
  for (unsigned i = 4; i <= 5; i++) {
    const egi_value *past = egi_shape_input(in, i);
    EG_TRY(egi_shape_check_input_rank(in, i, 4));
    EG_TRY(egi_shape_check_type(in, i, egi_shape_input(in, i - 3)->dtype));
    EG_TRY(egi_shape_equal(in, "batch of the past", past->dims[0], a->q.batch, NULL));
    EG_TRY(egi_shape_equal(in, "heads of the past", past->dims[1], a->k.heads, NULL));
    EG_TRY(egi_shape_equal(in, "head size of the past", past->dims[3], i == 4 ? a->k.width : a->v.width, NULL));
  }
  EG_TRY(egi_shape_equal(in, "length of past key and value", key->dims[2], value->dims[2], NULL));
  a->total = egi_dim_add(in->dims, key->dims[2], a->k.length);
  return EG_OK;
}

/* Broadcasts to [batch, q heads, queries, keys]; the last dim may be shorter: what is missing is masked (operator
 * version 24). */
static eg_status check_mask(const egi_inference *in, const attention *a) {
  const egi_value *mask = egi_shape_input(in, 3);
  const egi_dim scores[4] = {a->q.batch, a->q.heads, a->q.length, a->total};
  int64_t columns, total;
  if (mask == NULL) return EG_OK;
  if (mask->dtype != EG_DTYPE_BOOL && !egi_dtype_is_float(mask->dtype))
    return egi_shape_fail(in, "the mask is neither boolean nor of a floating type");
  if (mask->rank < 2 || mask->rank > 4)
    return egi_shape_fail(in, "the mask has %d dimensions; 2 to 4 are possible", mask->rank);
  for (int i = 0; i < mask->rank; i++) {
    egi_dim wanted = scores[4 - mask->rank + i], dim = egi_dim_resolve(in->dims, mask->dims[i]);
    bool is_shorter = i == mask->rank - 1 && egi_dim_value(in->dims, dim, &columns) &&
                      egi_dim_value(in->dims, egi_dim_resolve(in->dims, wanted), &total) && columns < total;
    if (!is_shorter && !egi_shape_is_number(in, dim, 1)) EG_TRY(egi_shape_equal(in, "the mask", dim, wanted, NULL));
  }
  return EG_OK;
}

static eg_status set_attention_results(egi_inference *in, const attention *a) {
  const egi_value *q = egi_shape_input(in, 0), *k = egi_shape_input(in, 1), *v = egi_shape_input(in, 2);
  const egi_dim four[4] = {a->q.batch, a->q.heads, a->q.length, a->v.width};
  const egi_dim three[3] = {a->q.batch, a->q.length, egi_dim_multiply(in->dims, a->q.heads, a->v.width)};
  const egi_dim key[4] = {a->q.batch, a->k.heads, a->total, a->k.width};
  const egi_dim value[4] = {a->q.batch, a->k.heads, a->total, a->v.width};
  const egi_dim scores[4] = {a->q.batch, a->q.heads, a->q.length, a->total};
  EG_TRY(egi_shape_set(in, 0, q->dtype, q->rank, q->rank == 4 ? four : three));
  EG_TRY(egi_shape_set(in, 1, k->dtype, 4, key));
  EG_TRY(egi_shape_set(in, 2, v->dtype, 4, value));
  EG_TRY(egi_shape_set(in, 3, q->dtype, 4, scores));
  return egi_shape_set(in, 4, EG_DTYPE_F32, 3, scores);
}

eg_status egi_shape_attention(egi_inference *in) {
  attention a;
  EG_TRY(check_operands(in, &a));
  EG_TRY(add_past(in, &a));
  EG_TRY(check_mask(in, &a));
  const egi_value *lengths = egi_shape_input(in, 6);
  if (lengths != NULL) {
    EG_TRY(egi_shape_check_type(in, 6, EG_DTYPE_I64));
    EG_TRY(egi_shape_check_input_rank(in, 6, 1));
    EG_TRY(egi_shape_equal(in, "nonpad_kv_seqlen", lengths->dims[0], a.q.batch, NULL));
  }
  return set_attention_results(in, &a);
}

/* Q, K, V, mask, Y, lse, dY -> dQ, dK, dV */
eg_status egi_shape_attention_grad(egi_inference *in) {
  const egi_value *y = egi_shape_input(in, 4), *lse = egi_shape_input(in, 5), *dy = egi_shape_input(in, 6);
  attention a;
  EG_TRY(check_operands(in, &a));
  EG_TRY(check_mask(in, &a));
  EG_TRY(egi_shape_check_input_rank(in, 6, y->rank));
  for (int i = 0; i < y->rank; i++) EG_TRY(egi_shape_equal(in, "the gradient's shape", y->dims[i], dy->dims[i], NULL));
  EG_TRY(egi_shape_check_type(in, 5, EG_DTYPE_F32));
  EG_TRY(egi_shape_check_input_rank(in, 5, 3));
  EG_TRY(egi_shape_equal(in, "the log-sum-exp", lse->dims[2], a.q.length, NULL));
  for (unsigned i = 0; i < 3; i++) EG_TRY(egi_shape_set_like(in, i, egi_shape_input(in, i)));
  return EG_OK;
}

static egi_dim block_count(const egi_inference *in, egi_dim rows) {
  int64_t block = egi_node_int(in->node, "block", EGI_BLOCK_ROWS);
  egi_dim most = egi_dim_add(in->dims, rows, egi_dim_constant(in->dims, block - 1));
  return egi_dim_divide(in->dims, most, egi_dim_constant(in->dims, block));
}

static eg_status check_block(const egi_inference *in) {
  int64_t block = egi_node_int(in->node, "block", EGI_BLOCK_ROWS);
  return block >= 1 && block <= INT32_MAX ? EG_OK : egi_shape_fail(in, "a block has no rows");
}

/* block_bounds: i32 [blocks, 2]. */
static eg_status check_blocks(const egi_inference *in, unsigned input, egi_dim rows) {
  const egi_value *bounds = egi_shape_input(in, input);
  if (bounds == NULL) return EG_OK;
  EG_TRY(check_block(in));
  EG_TRY(egi_shape_check_type(in, input, EG_DTYPE_I32));
  EG_TRY(egi_shape_check_input_rank(in, input, 2));
  EG_TRY(egi_shape_equal(in, "block_bounds", bounds->dims[0], block_count(in, rows), NULL));
  return egi_shape_equal(in, "block_bounds", bounds->dims[1], egi_dim_constant(in->dims, 2), NULL);
}

/* first_key and last_query: i32 [sequence], both or none; the bounds of blocks behind them. */
static eg_status check_documents(const egi_inference *in, unsigned first_key, const attention *a) {
  if ((egi_shape_input(in, first_key) == NULL) != (egi_shape_input(in, first_key + 1) == NULL))
    return egi_shape_fail(in, "first_key and last_query come together");
  for (unsigned i = first_key; i < first_key + 2 && egi_shape_input(in, i) != NULL; i++) {
    EG_TRY(egi_shape_check_type(in, i, EG_DTYPE_I32));
    EG_TRY(egi_shape_check_input_rank(in, i, 1));
    EG_TRY(
        egi_shape_equal(in, "first_key, last_query and queries", egi_shape_input(in, i)->dims[0], a->q.length, NULL));
  }
  return check_blocks(in, first_key + 2, a->q.length);
}

/* Queries are keys too, or stand at positions of a cache. */
static eg_status check_positions(const egi_inference *in, unsigned first_key, const attention *a) {
  const egi_value *positions = in->node->op == EGI_OP_MaskedAttention ? egi_shape_input(in, 8) : NULL;
  if (positions == NULL) return egi_shape_equal(in, "queries and keys", a->q.length, a->k.length, NULL);
  if (egi_shape_input(in, 3) != NULL || egi_shape_input(in, first_key) != NULL ||
      egi_node_int(in->node, "causal", 0) != 1)
    return egi_shape_fail(in, "positions in a cache go with causal 1, without documents and padding");
  EG_TRY(egi_shape_check_type(in, 8, EG_DTYPE_I32));
  EG_TRY(egi_shape_check_input_rank(in, 8, 1));
  return egi_shape_equal(in, "positions and queries", positions->dims[0], a->q.length, NULL);
}

/* key_valid, sinks and the documents' rows, with the sizes that they share with Q, K and V. */
static eg_status check_masked_operands(const egi_inference *in, unsigned first_key, attention *a) {
  const egi_value *valid = egi_shape_input(in, 3), *sinks = egi_shape_input(in, 4);
  for (unsigned i = 0; i < 3; i++) EG_TRY(egi_shape_check_input_rank(in, i, 4));
  EG_TRY(check_operands(in, a));
  EG_TRY(check_positions(in, first_key, a));
  EG_TRY(check_documents(in, first_key, a));
  if (egi_node_int(in->node, "window", 0) < 0) return egi_shape_fail(in, "the window is negative");
  if (valid != NULL) {
    EG_TRY(egi_shape_check_type(in, 3, EG_DTYPE_BOOL));
    EG_TRY(egi_shape_check_input_rank(in, 3, 2));
    EG_TRY(egi_shape_equal(in, "batch of key_valid", valid->dims[0], a->q.batch, NULL));
    EG_TRY(egi_shape_equal(in, "length of key_valid", valid->dims[1], a->k.length, NULL));
  }
  if (sinks == NULL) return EG_OK;
  EG_TRY(egi_shape_check_type(in, 4, EG_DTYPE_F32));
  EG_TRY(egi_shape_check_input_rank(in, 4, 1));
  return egi_shape_equal(in, "sinks and query heads", sinks->dims[0], a->q.heads, NULL);
}

eg_status egi_shape_masked_attention(egi_inference *in) {
  attention a;
  EG_TRY(check_masked_operands(in, 5, &a));
  const egi_dim dims[4] = {a.q.batch, a.q.heads, a.q.length, a.v.width};
  EG_TRY(egi_shape_set(in, 0, egi_shape_input(in, 0)->dtype, 4, dims));
  return egi_shape_set(in, 1, EG_DTYPE_F32, 3, dims);
}

/* cache, rows, positions -> cache */
eg_status egi_shape_cache_update(egi_inference *in) {
  const egi_value *cache = egi_shape_input(in, 0), *rows = egi_shape_input(in, 1), *positions = egi_shape_input(in, 2);
  EG_TRY(egi_shape_check_type(in, 1, cache->dtype));
  EG_TRY(egi_shape_check_type(in, 2, EG_DTYPE_I32));
  EG_TRY(egi_shape_check_input_rank(in, 0, 4));
  EG_TRY(egi_shape_check_input_rank(in, 1, 4));
  EG_TRY(egi_shape_check_input_rank(in, 2, 1));
  for (int i = 0; i < 4; i++)
    if (i != 2) EG_TRY(egi_shape_equal(in, "the cache and its rows", cache->dims[i], rows->dims[i], NULL));
  EG_TRY(egi_shape_equal(in, "rows and positions", rows->dims[2], positions->dims[0], NULL));
  return egi_shape_set_like(in, 0, cache);
}

/* cu_seqlens, rows -> first_key, last_query, positions, block_bounds */
eg_status egi_shape_packed_metadata(egi_inference *in) {
  const egi_value *rows = egi_shape_input(in, 1);
  EG_TRY(egi_shape_check_type(in, 0, EG_DTYPE_I32));
  EG_TRY(egi_shape_check_input_rank(in, 0, 1));
  if (rows->rank < 1) return egi_shape_fail(in, "the rows must have a dimension");
  EG_TRY(check_block(in));
  for (unsigned i = 0; i < 3; i++) EG_TRY(egi_shape_set(in, i, EG_DTYPE_I32, 1, &rows->dims[rows->rank - 1]));
  const egi_dim dims[2] = {block_count(in, rows->dims[rows->rank - 1]), egi_dim_constant(in->dims, 2)};
  return egi_shape_set(in, 3, EG_DTYPE_I32, 2, dims);
}

/* Q, K, V, key_valid, sinks, Y, lse, dY, first_key, last_query -> dQ, dK, dV, d sinks */
eg_status egi_shape_masked_attention_grad(egi_inference *in) {
  const egi_value *y = egi_shape_input(in, 5), *lse = egi_shape_input(in, 6), *dy = egi_shape_input(in, 7);
  attention a;
  EG_TRY(check_masked_operands(in, 8, &a));
  EG_TRY(egi_shape_check_input_rank(in, 7, y->rank));
  for (int i = 0; i < y->rank; i++) EG_TRY(egi_shape_equal(in, "the gradient's shape", y->dims[i], dy->dims[i], NULL));
  EG_TRY(egi_shape_check_type(in, 6, EG_DTYPE_F32));
  EG_TRY(egi_shape_check_input_rank(in, 6, 3));
  EG_TRY(egi_shape_equal(in, "the log-sum-exp", lse->dims[2], a.q.length, NULL));
  for (unsigned i = 0; i < 3; i++) EG_TRY(egi_shape_set_like(in, i, egi_shape_input(in, i)));
  if (in->node->n_outputs < 4 || in->node->outputs[3] == 0) return EG_OK;
  if (egi_shape_input(in, 4) == NULL) return egi_shape_fail(in, "a gradient of sinks without sinks");
  return egi_shape_set_like(in, 3, egi_shape_input(in, 4));
}
