/* Shape rules: LinearAttention (operator version 27) and its gradient. */
#include "graph/shapes.h"

/* Heads and sizes of query, key and value. */
static eg_status check_operands(const egi_inference *in, egi_dim *out_state, egi_dim *out_width) {
  const egi_value *q = egi_shape_input(in, 0), *k = egi_shape_input(in, 1), *v = egi_shape_input(in, 2);
  int64_t q_heads = egi_node_int(in->node, "q_num_heads", 0), heads = egi_node_int(in->node, "kv_num_heads", 0);
  if (q_heads < 1 || heads < 1 || q_heads % heads != 0)
    return egi_shape_fail(in, "%lld query heads do not share %lld key heads", (long long)q_heads, (long long)heads);
  for (unsigned i = 0; i < in->node->n_inputs; i++) {
    const egi_value *value = egi_shape_input(in, i);
    if (value == NULL) continue;
    EG_TRY(egi_shape_check_type(in, i, q->dtype));
    EG_TRY(egi_shape_check_input_rank(in, i, i == 3 || i == 7 ? 4 : 3));
    EG_TRY(egi_shape_equal(in, "the batch", q->dims[0], value->dims[0], NULL));
    if (i != 3 && i != 7) EG_TRY(egi_shape_equal(in, "the steps", q->dims[1], value->dims[1], NULL));
  }
  egi_dim n = egi_dim_constant(in->dims, heads), m = egi_dim_constant(in->dims, q_heads);
  egi_dim dk = egi_dim_divide(in->dims, egi_dim_resolve(in->dims, k->dims[2]), n);
  egi_dim dv = egi_dim_divide(in->dims, egi_dim_resolve(in->dims, v->dims[2]), n);
  EG_TRY(egi_shape_equal(in, "heads times the size of keys", egi_dim_multiply(in->dims, dk, n), k->dims[2], NULL));
  EG_TRY(egi_shape_equal(in, "heads times the size of values", egi_dim_multiply(in->dims, dv, n), v->dims[2], NULL));
  EG_TRY(egi_shape_equal(in, "heads times the size of queries", egi_dim_multiply(in->dims, dk, m), q->dims[2], NULL));
  out_state[0] = q->dims[0];
  out_state[1] = n;
  out_state[2] = dk;
  out_state[3] = dv;
  const egi_value *past = egi_shape_input(in, 3);
  for (int i = 0; i < 4 && past != NULL; i++)
    EG_TRY(egi_shape_equal(in, "the past state", past->dims[i], out_state[i], NULL));
  *out_width = egi_dim_multiply(in->dims, dv, m);
  return EG_OK;
}

eg_status egi_shape_linear_attention(egi_inference *in) {
  const egi_value *q = egi_shape_input(in, 0);
  egi_dim state[4], width;
  EG_TRY(check_operands(in, state, &width));
  const egi_dim dims[3] = {q->dims[0], q->dims[1], width};
  EG_TRY(egi_shape_set(in, 0, q->dtype, 3, dims));
  return egi_shape_set(in, 1, q->dtype, 4, state);
}

/* The inputs of LinearAttention, dY, d present_state? -> a gradient for each of its inputs, 0 where it is left out */
eg_status egi_shape_linear_attention_grad(egi_inference *in) {
  egi_dim state[4], width;
  EG_TRY(check_operands(in, state, &width));
  EG_TRY(egi_shape_equal(in, "the gradient's shape", egi_shape_input(in, 6)->dims[2], width, NULL));
  const egi_value *q = egi_shape_input(in, 0);
  const egi_dim each_head[3] = {q->dims[0], q->dims[1], state[1]};
  for (unsigned i = 0; i < 6; i++)
    if (egi_shape_input(in, i) != NULL) EG_TRY(egi_shape_set_like(in, i, egi_shape_input(in, i)));
  if (egi_shape_input(in, 3) == NULL) EG_TRY(egi_shape_set(in, 3, q->dtype, 4, state));
  if (egi_shape_input(in, 4) == NULL) EG_TRY(egi_shape_set(in, 4, q->dtype, 3, each_head));
  return egi_shape_input(in, 5) != NULL ? EG_OK : egi_shape_set(in, 5, q->dtype, 3, each_head);
}
