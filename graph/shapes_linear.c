/* Shape rules: matrix products, the head with its loss, and the training operators. */
#include "graph/linear.h"
#include "graph/shapes.h"

/* ---- products ------------------------------------------------------------------------------------------------- */

/* As numpy.matmul: a vector is a matrix of one row (first) or column (second) whose dim goes from the result. */
static eg_status product_shape(const egi_inference *in, const egi_value *a, const egi_value *b, int *out_rank,
                               egi_dim *dims) {
  if (a->rank < 1 || b->rank < 1) return egi_shape_fail(in, "a product with a scalar");
  egi_dim inner = b->rank == 1 ? b->dims[0] : b->dims[b->rank - 2];
  EG_TRY(egi_shape_equal(in, "the inner dims", a->dims[a->rank - 1], inner, NULL));
  int rank = a->rank > 2 ? a->rank - 2 : 0;
  memcpy(dims, a->dims, (size_t)rank * sizeof *dims);
  if (b->rank > 2) EG_TRY(egi_shape_broadcast_into(in, b->rank - 2, b->dims, &rank, dims));
  if (a->rank > 1) dims[rank++] = a->dims[a->rank - 2];
  if (b->rank > 1) dims[rank++] = b->dims[b->rank - 1];
  *out_rank = rank;
  return EG_OK;
}

eg_status egi_shape_matmul(egi_inference *in) {
  const egi_value *a = egi_shape_input(in, 0), *b = egi_shape_input(in, 1);
  egi_dim dims[EGI_MAX_RANK];
  int rank = 0;
  EG_TRY(product_shape(in, a, b, &rank, dims));
  return egi_shape_set(in, 0, a->dtype, rank, dims);
}

/* C + alpha · A·B, inputs C, A, B. */
eg_status egi_shape_add_matmul(egi_inference *in) {
  const egi_value *c = egi_shape_input(in, 0), *a = egi_shape_input(in, 1), *b = egi_shape_input(in, 2);
  egi_dim dims[EGI_MAX_RANK];
  int rank = 0;
  EG_TRY(product_shape(in, a, b, &rank, dims));
  EG_TRY(egi_shape_broadcasts_to(in, "the addend", c, rank, dims));
  return egi_shape_set(in, 0, a->dtype, rank, dims);
}

eg_status egi_shape_gemm(egi_inference *in) {
  const egi_value *a = egi_shape_input(in, 0), *b = egi_shape_input(in, 1), *c = egi_shape_input(in, 2);
  int a_row = egi_node_int(in->node, "transA", 0) != 0, b_row = egi_node_int(in->node, "transB", 0) != 0;
  EG_TRY(egi_shape_check_input_rank(in, 0, 2));
  EG_TRY(egi_shape_check_input_rank(in, 1, 2));
  EG_TRY(egi_shape_equal(in, "the inner dims", a->dims[1 - a_row], b->dims[b_row], NULL));
  const egi_dim dims[2] = {a->dims[a_row], b->dims[1 - b_row]};
  if (c != NULL) EG_TRY(egi_shape_broadcasts_to(in, "input 2", c, 2, dims));
  return egi_shape_set(in, 0, a->dtype, 2, dims);
}

eg_status egi_shape_sum_to(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0), *like = egi_shape_input(in, 1);
  EG_TRY(egi_shape_broadcasts_to(in, "the shape to sum to", like, x->rank, x->dims));
  return egi_shape_set(in, 0, x->dtype, like->rank, like->dims);
}

/* ---- head and loss -------------------------------------------------------------------------------------------- */

/* Labels have the dims of the rows; so have both results. */
static eg_status set_row_results(egi_inference *in, unsigned labels_input, const egi_value *rows) {
  const egi_value *labels = egi_shape_input(in, labels_input);
  if (rows->rank < 1) return egi_shape_fail(in, "input 0 is a scalar");
  EG_TRY(egi_shape_check_input_rank(in, labels_input, rows->rank - 1));
  for (int i = 0; i < labels->rank; i++) EG_TRY(egi_shape_equal(in, "labels", rows->dims[i], labels->dims[i], NULL));
  EG_TRY(egi_shape_set(in, 0, EG_DTYPE_F32, labels->rank, rows->dims));
  return egi_shape_set(in, 1, EG_DTYPE_F32, labels->rank, rows->dims);
}

/* Features and classes of the weight: float [features, classes], or stored as a Linear stores it. */
static eg_status head_sizes(const egi_inference *in, unsigned bias_input, egi_dim sizes[2]) {
  const egi_value *hidden = egi_shape_input(in, 0), *weight = egi_shape_input(in, 1);
  const unsigned at[EGI_LINEAR_INPUTS] = {
      0, 1, bias_input, bias_input + 1, bias_input + 2, bias_input + 3, bias_input + 4};
  egi_dim stored[2];
  if (egi_linear_storage_of(in->node) == EGI_LINEAR_PLAIN) {
    EG_TRY(egi_shape_check_type(in, 1, hidden->dtype));
    EG_TRY(egi_shape_check_input_rank(in, 1, 2));
    sizes[0] = weight->dims[0];
    sizes[1] = weight->dims[1];
    return EG_OK;
  }
  EG_TRY(egi_shape_linear_sizes(in, at, stored));
  sizes[0] = stored[1];
  sizes[1] = stored[0];
  return EG_OK;
}

static eg_status check_head(const egi_inference *in, unsigned bias_input, egi_dim sizes[2]) {
  const egi_value *hidden = egi_shape_input(in, 0), *bias = egi_shape_input(in, bias_input);
  if (hidden->rank < 1) return egi_shape_fail(in, "input 0 is a scalar");
  EG_TRY(head_sizes(in, bias_input, sizes));
  EG_TRY(egi_shape_equal(in, "the inner dims", hidden->dims[hidden->rank - 1], sizes[0], NULL));
  EG_TRY(egi_shape_check_input_rank(in, bias_input, 1));
  if (bias != NULL) EG_TRY(egi_shape_equal(in, "bias", bias->dims[0], sizes[1], NULL));
  return EG_OK;
}

eg_status egi_shape_linear_log_probability(egi_inference *in) {
  egi_dim sizes[2];
  EG_TRY(check_head(in, 3, sizes));
  return set_row_results(in, 2, egi_shape_input(in, 0));
}

eg_status egi_shape_log_probability(egi_inference *in) {
  return set_row_results(in, 1, egi_shape_input(in, 0));
}

/* hidden, weight, labels, lse, d logp, bias?, scales?, .. -> d hidden, d weight, d bias */
eg_status egi_shape_linear_log_probability_grad(egi_inference *in) {
  const egi_value *hidden = egi_shape_input(in, 0), *weight = egi_shape_input(in, 1);
  egi_dim sizes[2];
  EG_TRY(check_head(in, 5, sizes));
  for (unsigned i = 2; i < 5; i++) {
    const egi_value *rows = egi_shape_input(in, i);
    EG_TRY(egi_shape_check_input_rank(in, i, hidden->rank - 1));
    if (i > 2) EG_TRY(egi_shape_check_type(in, i, EG_DTYPE_F32));
    for (int k = 0; k < rows->rank; k++) EG_TRY(egi_shape_equal(in, "rows", rows->dims[k], hidden->dims[k], NULL));
  }
  EG_TRY(egi_shape_set_like(in, 0, hidden));
  EG_TRY(egi_shape_set_like(in, 1, weight));
  return egi_shape_set(in, 2, hidden->dtype, 1, &sizes[1]);
}

eg_status egi_shape_gradient_norm(egi_inference *in) {
  return egi_shape_set(in, 0, EG_DTYPE_F32, 0, NULL);
}
