/* What shape rules share: operands, results, broadcasting, equality of dims. */
#include "graph/shapes.h"

static void print_inputs(const egi_inference *in, egi_text *text) {
  for (unsigned i = 0; i < in->node->n_inputs && i < 8; i++) {
    egi_text_add(text, i == 0 ? "; inputs " : ", ");
    if (in->node->inputs[i] == 0)
      egi_text_add(text, "none");
    else
      egi_value_print_type(in->graph, in->node->inputs[i], text);
  }
}

eg_status egi_shape_fail(const egi_inference *in, const char *format, ...) {
  char reason[320];
  va_list arguments;
  egi_text types;
  va_start(arguments, format);
  vsnprintf(reason, sizeof reason, format, arguments);
  va_end(arguments);
  egi_text_init(&types, in->graph->module->ctx);
  print_inputs(in, &types);
  eg_status status = egi_text_status(&types);
  if (status == EG_OK)
    status = egi_fail_node(in->graph, in->id, EG_ERROR_SHAPE, "%s%s", reason, egi_text_string(&types));
  egi_text_free(&types);
  return status;
}

/* ---- operands ------------------------------------------------------------------------------------------------- */

const egi_value *egi_shape_input(const egi_inference *in, unsigned index) {
  if (index >= in->node->n_inputs || in->node->inputs[index] == 0) return NULL;
  return &in->graph->values[in->node->inputs[index]];
}

/* The content of a small integer constant is kept with its value from the first question on. */
static void remember_constant(const egi_inference *in, egi_value *value, egi_value_id id) {
  int64_t numbers[EGI_MAX_ELEMENTS];
  uint32_t count;
  if (value->rank > 1 || !egi_value_integers(in->graph, id, numbers, EGI_MAX_ELEMENTS, &count)) return;
  egi_dim *elements = EGI_NEW(in->dims->arena, egi_dim, (size_t)count + 1);
  if (elements == NULL) {
    in->dims->is_failed = true;
    return;
  }
  for (uint32_t i = 0; i < count; i++) elements[i] = egi_dim_constant(in->dims, numbers[i]);
  value->elements = elements;
  value->n_elements = count;
}

const egi_dim *egi_shape_elements(const egi_inference *in, unsigned index, uint32_t *out_count) {
  if (index >= in->node->n_inputs || in->node->inputs[index] == 0) return NULL;
  egi_value *value = &in->graph->values[in->node->inputs[index]];
  if (value->elements == NULL && value->kind == EGI_VALUE_WEIGHT) remember_constant(in, value, in->node->inputs[index]);
  if (value->elements != NULL) *out_count = value->n_elements;
  return value->elements;
}

bool egi_shape_integers(const egi_inference *in, unsigned index, int64_t *out, uint32_t capacity, uint32_t *out_count) {
  uint32_t count;
  const egi_dim *elements = egi_shape_elements(in, index, &count);
  if (elements == NULL || count > capacity) return false;
  for (uint32_t i = 0; i < count; i++)
    if (!egi_dim_value(in->dims, egi_dim_resolve(in->dims, elements[i]), &out[i])) return false;
  *out_count = count;
  return true;
}

bool egi_shape_length(const egi_inference *in, unsigned index, int64_t *out_length) {
  const egi_value *value = egi_shape_input(in, index);
  return value != NULL && value->rank == 1 && egi_dim_value(in->dims, value->dims[0], out_length);
}

/* ---- results -------------------------------------------------------------------------------------------------- */

eg_status egi_shape_check_rank(const egi_inference *in, int64_t rank) {
  if (rank <= EGI_MAX_RANK) return EG_OK;
  return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED, "a result of %lld dimensions; at most %d are supported",
                       (long long)rank, EGI_MAX_RANK);
}

static bool is_fresh(const egi_dims *dims, egi_dim dim) {
  const egi_polynomial *p = &dims->polynomials[dim];
  return p->n_terms == 1 && p->terms[0].degree == 1 && p->terms[0].coefficient == 1 &&
         dims->atoms[p->terms[0].atoms[0]].kind == EGI_ATOM_FRESH;
}

/* A declared dim must not contradict the inferred one, and says what an unknown size is. */
static eg_status merge_dim(const egi_inference *in, const egi_value *value, int axis, egi_dim inferred,
                           egi_dim *out_dim) {
  egi_dim declared = value->dims[axis];
  int64_t a, b;
  if (inferred == EGI_DIM_NONE && value->rank >= 0) inferred = declared; /* no news */
  if (inferred == EGI_DIM_NONE) inferred = egi_dim_fresh(in->dims, "size");
  inferred = egi_dim_resolve(in->dims, inferred);
  EG_TRY(egi_dims_status(in->dims));
  *out_dim = inferred;
  if (value->rank < 0 || declared == EGI_DIM_NONE || declared == inferred) return EG_OK;
  if (egi_dim_value(in->dims, declared, &a) && egi_dim_value(in->dims, inferred, &b) && a != b)
    return egi_shape_fail(in, "result \"%s\" has %lld at axis %d, but %lld is declared", value->name, (long long)b,
                          axis, (long long)a);
  if (!is_fresh(in->dims, inferred)) return EG_OK;
  EG_TRY(egi_dim_assume(in->dims, inferred, declared));
  *out_dim = egi_dim_resolve(in->dims, inferred);
  return EG_OK;
}

eg_status egi_shape_set(egi_inference *in, unsigned output, eg_dtype dtype, int rank, const egi_dim *dims) {
  if (output >= in->node->n_outputs || in->node->outputs[output] == 0) return EG_OK;
  egi_value *value = &in->graph->values[in->node->outputs[output]];
  EG_TRY(egi_shape_check_rank(in, rank));
  if (value->dtype != EG_DTYPE_UNDEFINED && value->dtype != dtype)
    return egi_shape_fail(in, "result \"%s\" is %s, but %s is declared", value->name, egi_dtype_name(dtype),
                          egi_dtype_name(value->dtype));
  if (value->rank >= 0 && value->rank != rank)
    return egi_shape_fail(in, "result \"%s\" has %d dimensions, but %d are declared", value->name, rank, value->rank);
  for (int i = 0; i < rank; i++) EG_TRY(merge_dim(in, value, i, dims[i], &value->dims[i]));
  value->dtype = dtype;
  value->rank = rank;
  return EG_OK;
}

eg_status egi_shape_set_like(egi_inference *in, unsigned output, const egi_value *value) {
  return egi_shape_set(in, output, value->dtype, value->rank, value->dims);
}

eg_status egi_shape_set_unknown(egi_inference *in, unsigned output, eg_dtype dtype, int rank) {
  egi_dim dims[EGI_MAX_RANK] = {EGI_DIM_NONE};
  return egi_shape_set(in, output, dtype, rank, dims);
}

/* ---- checks --------------------------------------------------------------------------------------------------- */

eg_status egi_shape_check_type(const egi_inference *in, unsigned index, eg_dtype dtype) {
  const egi_value *value = egi_shape_input(in, index);
  if (value == NULL || value->dtype == dtype) return EG_OK;
  return egi_shape_fail(in, "input %u is %s, not %s", index, egi_dtype_name(value->dtype), egi_dtype_name(dtype));
}

eg_status egi_shape_check_index_type(const egi_inference *in, unsigned index) {
  const egi_value *value = egi_shape_input(in, index);
  if (value == NULL || value->dtype == EG_DTYPE_I64 || value->dtype == EG_DTYPE_I32) return EG_OK;
  return egi_shape_fail(in, "input %u is %s, not int64 or int32", index, egi_dtype_name(value->dtype));
}

eg_status egi_shape_check_input_rank(const egi_inference *in, unsigned index, int rank) {
  const egi_value *value = egi_shape_input(in, index);
  if (value == NULL || value->rank == rank) return EG_OK;
  return egi_shape_fail(in, "input %u has %d dimensions, not %d", index, value->rank, rank);
}

eg_status egi_shape_axis(const egi_inference *in, int64_t axis, int rank, int *out_axis) {
  if (axis < -rank || axis >= rank)
    return egi_shape_fail(in, "axis %lld is outside of %d dimensions", (long long)axis, rank);
  *out_axis = (int)(axis < 0 ? axis + rank : axis);
  return EG_OK;
}

eg_status egi_shape_axes(const egi_inference *in, const int64_t *axes, uint32_t count, int rank, uint32_t *out_mask) {
  uint32_t mask = 0;
  for (uint32_t i = 0; i < count; i++) {
    int axis = 0;
    EG_TRY(egi_shape_axis(in, axes[i], rank, &axis));
    if ((mask >> axis & 1u) != 0) return egi_shape_fail(in, "axis %lld is named twice", (long long)axes[i]);
    mask |= 1u << axis;
  }
  *out_mask = mask;
  return EG_OK;
}

/* ---- equality and broadcasting -------------------------------------------------------------------------------- */

bool egi_shape_is_number(const egi_inference *in, egi_dim dim, int64_t number) {
  int64_t value;
  return egi_dim_value(in->dims, dim, &value) && value == number;
}

static eg_status fail_differ(const egi_inference *in, const char *what, egi_dim a, egi_dim b) {
  egi_text text;
  egi_text_init(&text, in->graph->module->ctx);
  egi_dim_print(in->dims, a, &text);
  egi_text_add(&text, " and ");
  egi_dim_print(in->dims, b, &text);
  eg_status status = egi_text_status(&text);
  if (status == EG_OK) status = egi_shape_fail(in, "%s: %s differ", what, egi_text_string(&text));
  egi_text_free(&text);
  return status;
}

eg_status egi_shape_equal(const egi_inference *in, const char *what, egi_dim a, egi_dim b, egi_dim *out_dim) {
  a = egi_dim_resolve(in->dims, a);
  b = egi_dim_resolve(in->dims, b);
  if (a != b) {
    eg_status status = egi_dim_assume(in->dims, a, b);
    if (status == EG_ERROR_SHAPE) return fail_differ(in, what, a, b);
    EG_TRY(status);
  }
  if (out_dim == NULL) return EG_OK;
  int64_t number;
  *out_dim = egi_dim_value(in->dims, b, &number) ? b : egi_dim_resolve(in->dims, a);
  return EG_OK;
}

eg_status egi_shape_broadcast_dim(const egi_inference *in, egi_dim a, egi_dim b, egi_dim *out_dim) {
  a = egi_dim_resolve(in->dims, a);
  b = egi_dim_resolve(in->dims, b);
  if (egi_shape_is_number(in, a, 1) || egi_shape_is_number(in, b, 1)) {
    *out_dim = egi_shape_is_number(in, a, 1) ? b : a;
    return EG_OK;
  }
  return egi_shape_equal(in, "the shapes cannot be broadcast", a, b, out_dim);
}

eg_status egi_shape_broadcast_into(const egi_inference *in, int other_rank, const egi_dim *other, int *rank,
                                   egi_dim *dims) {
  if (other_rank > *rank) {
    int shift = other_rank - *rank;
    memmove(dims + shift, dims, (size_t)*rank * sizeof *dims);
    memcpy(dims, other, (size_t)shift * sizeof *dims);
    for (int i = shift; i < other_rank; i++) EG_TRY(egi_shape_broadcast_dim(in, dims[i], other[i], &dims[i]));
    *rank = other_rank;
    return EG_OK;
  }
  int shift = *rank - other_rank;
  for (int i = 0; i < other_rank; i++) EG_TRY(egi_shape_broadcast_dim(in, dims[shift + i], other[i], &dims[shift + i]));
  return EG_OK;
}

eg_status egi_shape_broadcasts_to(const egi_inference *in, const char *what, const egi_value *other, int rank,
                                  const egi_dim *dims) {
  if (other->rank > rank)
    return egi_shape_fail(in, "%s has %d dimensions; at most %d are possible", what, other->rank, rank);
  for (int i = 0; i < other->rank; i++)
    if (!egi_shape_is_number(in, egi_dim_resolve(in->dims, other->dims[i]), 1))
      EG_TRY(egi_shape_equal(in, what, dims[rank - other->rank + i], other->dims[i], NULL));
  return EG_OK;
}

egi_dim egi_shape_product(const egi_inference *in, const egi_dim *dims, int first, int end) {
  egi_dim product = egi_dim_constant(in->dims, 1);
  for (int i = first; i < end; i++) product = egi_dim_multiply(in->dims, product, egi_dim_resolve(in->dims, dims[i]));
  return product;
}
