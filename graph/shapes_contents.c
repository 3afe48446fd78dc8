/* Known contents: follows the shape arithmetic that exporters write (Shape, Gather, Concat, Where ...) through integer
 * and boolean tensors of rank 0 and 1, so that the sizes it computes are known as expressions over the input's dims. */
#include "graph/shapes.h"

/* The content of a node's result in the making; elements may be EGI_DIM_NONE. */
typedef struct contents {
  egi_inference *in;
  egi_dim elements[EGI_MAX_ELEMENTS];
  uint32_t n;
} contents;

static bool is_countable(eg_dtype dtype) {
  egi_dtype_class kind = egi_dtype_kind(dtype);
  return kind == EGI_CLASS_INTEGER || kind == EGI_CLASS_UNSIGNED || kind == EGI_CLASS_BOOLEAN;
}

/* Number of elements of a result of rank 0 or 1; false when unknown or too many. */
static bool result_count(const egi_inference *in, const egi_value *value, uint32_t *out_count) {
  int64_t count = 1;
  if (value->rank < 0 || value->rank > 1 || !is_countable(value->dtype)) return false;
  if (value->rank == 1 && !egi_dim_value(in->dims, value->dims[0], &count)) return false;
  if (count < 0 || count > EGI_MAX_ELEMENTS) return false;
  *out_count = (uint32_t)count;
  return true;
}

static const egi_dim *input_elements(const contents *c, unsigned index, uint32_t *out_count) {
  const egi_value *value = egi_shape_input(c->in, index);
  if (value == NULL || !is_countable(value->dtype)) return NULL;
  return egi_shape_elements(c->in, index, out_count);
}

static egi_dim resolved(const contents *c, egi_dim dim) {
  return egi_dim_resolve(c->in->dims, dim);
}

/* ---- single elements ------------------------------------------------------------------------------------------ */

static egi_dim truth(egi_dims *dims, bool is_true) {
  return egi_dim_constant(dims, is_true ? 1 : 0);
}

/* a < b where that is certain either way. */
static egi_dim less(egi_dims *dims, egi_dim a, egi_dim b) {
  if (egi_dim_is_positive(dims, egi_dim_subtract(dims, b, a))) return truth(dims, true);
  if (egi_dim_is_nonnegative(dims, egi_dim_subtract(dims, a, b))) return truth(dims, false);
  return EGI_DIM_NONE;
}

static egi_dim equal(egi_dims *dims, egi_dim a, egi_dim b) {
  if (a == b) return a == EGI_DIM_NONE ? a : truth(dims, true);
  if (egi_dim_is_positive(dims, egi_dim_subtract(dims, a, b)) ||
      egi_dim_is_positive(dims, egi_dim_subtract(dims, b, a)))
    return truth(dims, false);
  return EGI_DIM_NONE;
}

static egi_dim negate_truth(egi_dims *dims, egi_dim a) {
  return egi_dim_subtract(dims, egi_dim_constant(dims, 1), a);
}

/* Integer division of ONNX cuts towards zero: the floor where nothing is negative, or an exact quotient. */
static egi_dim divide(egi_dims *dims, egi_dim a, egi_dim b) {
  int64_t x, y;
  if (egi_dim_value(dims, a, &x) && egi_dim_value(dims, b, &y))
    return y == 0 || (x == INT64_MIN && y == -1) ? EGI_DIM_NONE : egi_dim_constant(dims, x / y);
  egi_dim quotient = egi_dim_divide(dims, a, b);
  if (egi_dim_is_nonnegative(dims, a) && egi_dim_is_positive(dims, b)) return quotient;
  return egi_dim_multiply(dims, quotient, b) == a ? quotient : EGI_DIM_NONE;
}

static egi_dim modulo(egi_dims *dims, egi_dim a, egi_dim b) {
  if (!egi_dim_is_nonnegative(dims, a) || !egi_dim_is_positive(dims, b)) return EGI_DIM_NONE;
  return egi_dim_subtract(dims, a, egi_dim_multiply(dims, egi_dim_divide(dims, a, b), b));
}

static egi_dim combine(egi_dims *dims, egi_op op, egi_dim a, egi_dim b) {
  if (a == EGI_DIM_NONE || b == EGI_DIM_NONE) return EGI_DIM_NONE;
  switch (op) {
  case EGI_OP_Add:
    return egi_dim_add(dims, a, b);
  case EGI_OP_Sub:
    return egi_dim_subtract(dims, a, b);
  case EGI_OP_Mul:
    return egi_dim_multiply(dims, a, b);
  case EGI_OP_Div:
    return divide(dims, a, b);
  case EGI_OP_Mod:
    return modulo(dims, a, b);
  case EGI_OP_And:
  case EGI_OP_Min:
    return egi_dim_minimum(dims, a, b);
  case EGI_OP_Or:
  case EGI_OP_Max:
    return egi_dim_maximum(dims, a, b);
  case EGI_OP_Equal:
    return equal(dims, a, b);
  case EGI_OP_Less:
    return less(dims, a, b);
  case EGI_OP_Greater:
    return less(dims, b, a);
  case EGI_OP_LessOrEqual:
    return negate_truth(dims, less(dims, b, a));
  case EGI_OP_GreaterOrEqual:
    return negate_truth(dims, less(dims, a, b));
  default:
    return EGI_DIM_NONE;
  }
}

static egi_dim to_truth(egi_dims *dims, egi_dim a) {
  int64_t number;
  if (egi_dim_value(dims, a, &number)) return truth(dims, number != 0);
  return egi_dim_is_positive(dims, a) ? truth(dims, true) : EGI_DIM_NONE;
}

/* ---- elementwise ---------------------------------------------------------------------------------------------- */

static egi_dim element_at(const contents *c, const egi_dim *elements, uint32_t count, uint32_t i) {
  if (elements == NULL || (count != 1 && i >= count)) return EGI_DIM_NONE;
  return resolved(c, elements[count == 1 ? 0 : i]);
}

static void fill_elementwise(contents *c) {
  const egi_node *node = c->in->node;
  for (uint32_t i = 0; i < c->n; i++) {
    for (unsigned k = 0; k < node->n_inputs; k++) {
      uint32_t count = 0;
      const egi_dim *elements = input_elements(c, k, &count);
      egi_dim element = element_at(c, elements, count, i);
      c->elements[i] = k == 0 ? element : combine(c->in->dims, node->op, c->elements[i], element);
    }
  }
}

static void fill_where(contents *c) {
  uint32_t counts[3] = {0, 0, 0};
  const egi_dim *lists[3];
  for (unsigned k = 0; k < 3; k++) lists[k] = input_elements(c, k, &counts[k]);
  for (uint32_t i = 0; i < c->n; i++) {
    int64_t number;
    egi_dim x = element_at(c, lists[1], counts[1], i), y = element_at(c, lists[2], counts[2], i);
    egi_dim condition = element_at(c, lists[0], counts[0], i);
    if (egi_dim_value(c->in->dims, condition, &number))
      c->elements[i] = number != 0 ? x : y;
    else
      c->elements[i] = x == y ? x : EGI_DIM_NONE;
  }
}

static void fill_unary(contents *c) {
  egi_dims *dims = c->in->dims;
  uint32_t count = 0;
  const egi_dim *elements = input_elements(c, 0, &count);
  bool is_boolean = c->in->graph->values[c->in->node->outputs[0]].dtype == EG_DTYPE_BOOL;
  for (uint32_t i = 0; i < c->n; i++) {
    egi_dim element = element_at(c, elements, count, i);
    switch (c->in->node->op) {
    case EGI_OP_Neg:
      element = egi_dim_subtract(dims, egi_dim_constant(dims, 0), element);
      break;
    case EGI_OP_Not:
      element = negate_truth(dims, element);
      break;
    case EGI_OP_Cast:
    case EGI_OP_CastLike:
      element = is_boolean ? to_truth(dims, element) : element;
      break;
    default:
      break; /* the same elements, perhaps repeated */
    }
    c->elements[i] = element;
  }
}

/* ---- shapes, joining, picking --------------------------------------------------------------------------------- */

static void fill_shape(contents *c) {
  const egi_value *x = egi_shape_input(c->in, 0);
  int64_t start = egi_node_int(c->in->node, "start", 0);
  start = start < 0 ? start + x->rank : start;
  start = start < 0 ? 0 : start;
  for (uint32_t i = 0; i < c->n; i++) c->elements[i] = resolved(c, x->dims[start + i]);
}

static void fill_size(contents *c) {
  const egi_value *x = egi_shape_input(c->in, 0);
  c->elements[0] = egi_shape_product(c->in, x->dims, 0, x->rank);
}

static void fill_concat(contents *c) {
  uint32_t at = 0;
  for (unsigned k = 0; k < c->in->node->n_inputs; k++) {
    uint32_t count = 0;
    int64_t length;
    const egi_dim *elements = input_elements(c, k, &count);
    if (!egi_shape_length(c->in, k, &length)) return;
    for (int64_t i = 0; i < length && at < c->n; i++)
      c->elements[at++] = elements != NULL ? resolved(c, elements[i]) : EGI_DIM_NONE;
  }
}

static eg_status fill_gather(contents *c) {
  uint32_t count = 0, n_indices = 0;
  int64_t index;
  const egi_dim *elements = input_elements(c, 0, &count), *indices = input_elements(c, 1, &n_indices);
  if (elements == NULL || indices == NULL) return EG_OK;
  for (uint32_t i = 0; i < c->n && i < n_indices; i++) {
    if (!egi_dim_value(c->in->dims, resolved(c, indices[i]), &index)) continue;
    if (index < -(int64_t)count || index >= (int64_t)count)
      return egi_shape_fail(c->in, "index %lld is outside of %u elements", (long long)index, count);
    c->elements[i] = resolved(c, elements[index < 0 ? index + count : index]);
  }
  return EG_OK;
}

static int64_t clamp_position(int64_t position, int64_t count, int64_t lowest) {
  if (position < 0) position = position < -count ? lowest : position + count;
  return position > count + lowest ? count + lowest : position;
}

static void fill_slice(contents *c) {
  int64_t start, end, step = 1;
  uint32_t count = 0, n = 0;
  const egi_dim *elements = input_elements(c, 0, &count);
  if (elements == NULL || !egi_shape_integers(c->in, 1, &start, 1, &n) || n != 1) return;
  if (!egi_shape_integers(c->in, 2, &end, 1, &n) || n != 1) return;
  if (egi_shape_input(c->in, 4) != NULL && !egi_shape_integers(c->in, 4, &step, 1, &n)) return;
  start = clamp_position(start, count, step < 0 ? -1 : 0);
  for (uint32_t i = 0; i < c->n; i++) {
    int64_t at = start + (int64_t)i * step;
    if (at >= 0 && at < (int64_t)count) c->elements[i] = resolved(c, elements[at]);
  }
}

static void fill_split(contents *c, unsigned output) {
  uint32_t count = 0;
  int64_t before = 0;
  const egi_dim *elements = input_elements(c, 0, &count);
  for (unsigned i = 0; i < output && elements != NULL; i++) {
    int64_t length;
    egi_value_id id = c->in->node->outputs[i];
    if (id == 0 || !egi_dim_value(c->in->dims, c->in->graph->values[id].dims[0], &length)) return;
    before += length;
  }
  for (uint32_t i = 0; elements != NULL && i < c->n && before + i < count; i++)
    c->elements[i] = resolved(c, elements[before + i]);
}

/* Only along the one axis that there is. */
static void fill_tile(contents *c) {
  uint32_t count = 0;
  const egi_dim *elements = input_elements(c, 0, &count);
  for (uint32_t i = 0; elements != NULL && count > 0 && i < c->n; i++)
    c->elements[i] = resolved(c, elements[i % count]);
}

/* ---- constants ------------------------------------------------------------------------------------------------ */

static void fill_constant_of_shape(contents *c) {
  const egi_attribute *value = egi_node_attribute(c->in->node, "value");
  int64_t number;
  uint32_t count;
  if (value == NULL || value->kind != EGI_ATTRIBUTE_TENSOR) return;
  const egi_weight *weight = &c->in->graph->module->weights[value->u.weight];
  if (!egi_weight_integers(weight, &number, 1, &count) || count != 1) return;
  for (uint32_t i = 0; i < c->n; i++) c->elements[i] = egi_dim_constant(c->in->dims, number);
}

static void fill_constant(contents *c) {
  int64_t numbers[EGI_MAX_ELEMENTS];
  uint32_t count = 0;
  const egi_attribute *value = egi_node_attribute(c->in->node, "value");
  const egi_attribute *number = egi_node_attribute(c->in->node, "value_int");
  const int64_t *list = egi_node_ints(c->in->node, "value_ints", &count);
  if (value != NULL && value->kind == EGI_ATTRIBUTE_TENSOR) {
    if (!egi_weight_integers(&c->in->graph->module->weights[value->u.weight], numbers, EGI_MAX_ELEMENTS, &count))
      return;
    list = numbers;
  } else if (number != NULL) {
    list = &number->u.i;
    count = 1;
  }
  for (uint32_t i = 0; list != NULL && i < c->n && i < count; i++)
    c->elements[i] = egi_dim_constant(c->in->dims, list[i]);
}

static void fill_range(contents *c) {
  uint32_t count;
  const egi_dim *start = input_elements(c, 0, &count), *delta = input_elements(c, 2, &count);
  if (start == NULL || delta == NULL) return;
  for (uint32_t i = 0; i < c->n; i++) {
    egi_dim step = egi_dim_multiply(c->in->dims, egi_dim_constant(c->in->dims, i), delta[0]);
    c->elements[i] = egi_dim_add(c->in->dims, resolved(c, start[0]), step);
  }
}

/* ---- all of it ------------------------------------------------------------------------------------------------ */

/* The families that go element by element; false for other operators. */
static bool fill_elements(contents *c) {
  switch (c->in->node->op) {
  case EGI_OP_Add:
  case EGI_OP_Sub:
  case EGI_OP_Mul:
  case EGI_OP_Div:
  case EGI_OP_Mod:
  case EGI_OP_Min:
  case EGI_OP_Max:
  case EGI_OP_And:
  case EGI_OP_Or:
  case EGI_OP_Equal:
  case EGI_OP_Less:
  case EGI_OP_Greater:
  case EGI_OP_LessOrEqual:
  case EGI_OP_GreaterOrEqual:
    fill_elementwise(c);
    return true;
  case EGI_OP_Identity:
  case EGI_OP_Cast:
  case EGI_OP_CastLike:
  case EGI_OP_Neg:
  case EGI_OP_Not:
  case EGI_OP_Squeeze:
  case EGI_OP_Unsqueeze:
  case EGI_OP_Reshape:
  case EGI_OP_Expand:
    fill_unary(c);
    return true;
  default:
    return false;
  }
}

static eg_status fill(contents *c, unsigned output) {
  if (fill_elements(c)) return EG_OK;
  switch (c->in->node->op) {
  case EGI_OP_Shape:
    fill_shape(c);
    break;
  case EGI_OP_Size:
    fill_size(c);
    break;
  case EGI_OP_Concat:
    fill_concat(c);
    break;
  case EGI_OP_Gather:
    return fill_gather(c);
  case EGI_OP_Slice:
    fill_slice(c);
    break;
  case EGI_OP_Split:
    fill_split(c, output);
    break;
  case EGI_OP_Tile:
    fill_tile(c);
    break;
  case EGI_OP_Where:
    fill_where(c);
    break;
  case EGI_OP_Range:
    fill_range(c);
    break;
  case EGI_OP_Constant:
    fill_constant(c);
    break;
  case EGI_OP_ConstantOfShape:
    fill_constant_of_shape(c);
    break;
  default:
    break;
  }
  return EG_OK;
}

static eg_status keep(contents *c, egi_value *value) {
  bool is_known = c->n == 0;
  for (uint32_t i = 0; i < c->n; i++) is_known = is_known || c->elements[i] != EGI_DIM_NONE;
  if (!is_known) return EG_OK;
  egi_dim *copy = EGI_NEW(c->in->dims->arena, egi_dim, (size_t)c->n + 1);
  if (copy == NULL) return EG_ERROR_MEMORY;
  memcpy(copy, c->elements, c->n * sizeof *copy);
  value->elements = copy;
  value->n_elements = c->n;
  return EG_OK;
}

eg_status egi_shape_contents(egi_inference *in) {
  for (unsigned i = 0; i < in->node->n_outputs; i++) {
    contents c = {.in = in};
    egi_value_id id = in->node->outputs[i];
    if (id == 0 || !result_count(in, &in->graph->values[id], &c.n)) continue;
    EG_TRY(fill(&c, i));
    EG_TRY(keep(&c, &in->graph->values[id]));
  }
  return EG_OK;
}
