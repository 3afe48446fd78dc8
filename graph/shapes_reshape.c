/* Shape rule of Reshape: 0 copies, -1 is what is left, and the number of elements stays. */
#include "graph/shapes.h"

typedef struct reshape {
  const egi_value *x;
  egi_dim dims[EGI_MAX_RANK];
  int rank;
  int open;           /* axis of -1, or of the only size that is not known, or -1 */
  uint32_t copied;    /* a bit for each axis that copies the input's */
  unsigned n_unknown; /* sizes that are not known */
} reshape;

static eg_status read_axis(const egi_inference *in, reshape *r, int axis, egi_dim element) {
  int64_t number;
  bool allows_zero = egi_node_int(in->node, "allowzero", 0) != 0;
  r->dims[axis] = element;
  if (element == EGI_DIM_NONE) {
    r->n_unknown++;
    return EG_OK;
  }
  if (!egi_dim_value(in->dims, element, &number)) return EG_OK;
  if (number == -1) {
    if (r->open >= 0) return egi_shape_fail(in, "more than one size of -1");
    r->open = axis;
  } else if (number < 0) {
    return egi_shape_fail(in, "a negative size: %lld", (long long)number);
  } else if (number == 0 && !allows_zero) {
    if (axis >= r->x->rank) return egi_shape_fail(in, "a size of 0 at axis %d copies a dim that input 0 lacks", axis);
    r->dims[axis] = r->x->dims[axis];
    r->copied |= 1u << axis;
  }
  return EG_OK;
}

/* Copied dims stand on both sides: without them a size of zero tells nothing less. */
static egi_dim remaining(const egi_inference *in, const reshape *r, bool is_input) {
  egi_dim product = egi_dim_constant(in->dims, 1);
  int rank = is_input ? r->x->rank : r->rank;
  for (int i = 0; i < rank; i++) {
    if ((r->copied >> i & 1u) != 0 || (!is_input && i == r->open)) continue;
    egi_dim dim = is_input ? r->x->dims[i] : r->dims[i];
    product = egi_dim_multiply(in->dims, product, egi_dim_resolve(in->dims, dim));
  }
  return product;
}

static eg_status close_axis(egi_inference *in, reshape *r) {
  egi_dim total = remaining(in, r, true), others = remaining(in, r, false);
  int64_t number;
  if (egi_dim_value(in->dims, others, &number) && number == 0) {
    EG_TRY(egi_shape_equal(in, "the number of elements", total, others, NULL));
    r->dims[r->open] = egi_dim_constant(in->dims, 0);
    return EG_OK;
  }
  egi_dim size = egi_dim_divide(in->dims, total, others);
  r->dims[r->open] = size;
  return egi_shape_equal(in, "the number of elements", egi_dim_multiply(in->dims, size, others), total, NULL);
}

/* A shape whose content is not known: only its length is. */
static eg_status reshape_unknown(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  int64_t length;
  if (!egi_shape_length(in, 1, &length))
    return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED,
                         "input 1 decides the number of dimensions and is not known before the graph runs");
  EG_TRY(egi_shape_check_rank(in, length));
  if (length != 1) return egi_shape_set_unknown(in, 0, x->dtype, (int)length);
  egi_dim product = egi_shape_product(in, x->dims, 0, x->rank);
  return egi_shape_set(in, 0, x->dtype, 1, &product);
}

eg_status egi_shape_reshape(egi_inference *in) {
  uint32_t count;
  reshape r = {.x = egi_shape_input(in, 0), .open = -1};
  EG_TRY(egi_shape_check_input_rank(in, 1, 1));
  const egi_dim *elements = egi_shape_elements(in, 1, &count);
  if (elements == NULL) return reshape_unknown(in);
  EG_TRY(egi_shape_check_rank(in, count));
  r.rank = (int)count;
  for (int i = 0; i < r.rank; i++) EG_TRY(read_axis(in, &r, i, egi_dim_resolve(in->dims, elements[i])));
  for (int i = 0; i < r.rank && r.n_unknown == 1 && r.open < 0; i++)
    if (r.dims[i] == EGI_DIM_NONE) r.open = i;
  if (r.open >= 0 && (r.n_unknown == 0 || (r.n_unknown == 1 && r.dims[r.open] == EGI_DIM_NONE))) {
    EG_TRY(close_axis(in, &r));
  } else if (r.n_unknown == 0) {
    EG_TRY(egi_shape_equal(in, "the number of elements", remaining(in, &r, true), remaining(in, &r, false), NULL));
  } else if (r.open >= 0) {
    r.dims[r.open] = EGI_DIM_NONE;
  }
  return egi_shape_set(in, 0, r.x->dtype, r.rank, r.dims);
}
