/* Shape rules of Linear and LinearGrad: the sizes of every storage, for the head with its loss as well. Sizes that are
 * no numbers are taken on trust here; kernels check them when they are planned. */
#include "base/blockwise.h"
#include "graph/fake_quantize.h"
#include "graph/linear.h"
#include "graph/shapes.h"

egi_linear_storage egi_linear_storage_of(const egi_node *node) {
  static const char *const names[] = {"", "plain", "nbits", "bnb4", "blocked"};
  const char *name = egi_node_string(node, "storage", "plain");
  for (size_t i = 1; i < EGI_COUNT(names); i++)
    if (strcmp(name, names[i]) == 0) return (egi_linear_storage)i;
  return EGI_LINEAR_UNKNOWN;
}

bool egi_linear_is_quantised(const egi_node *node) {
  return node->op == EGI_OP_Linear && egi_linear_storage_of(node) != EGI_LINEAR_PLAIN;
}

/* The number of elements of an operand that is there. */
static eg_status check_count(const egi_inference *in, unsigned index, int64_t wanted) {
  const egi_value *value = egi_shape_input(in, index);
  int64_t count = 0;
  if (value == NULL) return EG_OK;
  egi_dim product = egi_dim_resolve(in->dims, egi_shape_product(in, value->dims, 0, value->rank));
  if (egi_dim_value(in->dims, product, &count) && count != wanted)
    return egi_shape_fail(in, "input %u has %lld elements, not %lld", index, (long long)count, (long long)wanted);
  return EG_OK;
}

static eg_status read_features(const egi_inference *in, int64_t *out_features, int64_t *in_features, int64_t *block) {
  static const int64_t most = INT64_C(1) << 31;
  *out_features = egi_node_int(in->node, "out_features", 0);
  *in_features = egi_node_int(in->node, "in_features", 0);
  *block = egi_node_int(in->node, "block_size", 0);
  if (*out_features < 1 || *in_features < 1 || *out_features > most || *in_features > most)
    return egi_shape_fail(in, "out_features or in_features is no possible size");
  if (*block < 1 || *block > most) return egi_shape_fail(in, "block_size = %lld", (long long)*block);
  return EG_OK;
}

static eg_status check_float(const egi_inference *in, unsigned index) {
  const egi_value *value = egi_shape_input(in, index);
  if (value != NULL && egi_dtype_is_float(value->dtype)) return EG_OK;
  return egi_shape_fail(in, "input %u must be given and of a floating type", index);
}

static eg_status nbits_sizes(const egi_inference *in, const unsigned *at, egi_dim sizes[2]) {
  int64_t n = 0, k = 0, block = 0, bits = egi_node_int(in->node, "bits", 4);
  const egi_value *zero = egi_shape_input(in, at[EGI_LINEAR_ZERO_POINTS]);
  EG_TRY(read_features(in, &n, &k, &block));
  if (bits != 2 && bits != 4 && bits != 8)
    return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED, "codes of %lld bits; 2, 4 and 8 are possible",
                         (long long)bits);
  if (block * bits % 8 != 0) return egi_shape_fail(in, "blocks of %lld codes are no whole bytes", (long long)block);
  int64_t blocks = (k + block - 1) / block;
  EG_TRY(egi_shape_check_type(in, at[EGI_LINEAR_WEIGHT], EG_DTYPE_U8));
  EG_TRY(check_count(in, at[EGI_LINEAR_WEIGHT], n * (blocks * block * bits / 8)));
  EG_TRY(check_float(in, at[EGI_LINEAR_SCALES]));
  EG_TRY(check_count(in, at[EGI_LINEAR_SCALES], n * blocks));
  if (zero != NULL && zero->dtype != EG_DTYPE_U8) EG_TRY(check_float(in, at[EGI_LINEAR_ZERO_POINTS]));
  bool is_packed = zero != NULL && zero->dtype == EG_DTYPE_U8;
  EG_TRY(check_count(in, at[EGI_LINEAR_ZERO_POINTS], is_packed ? n * ((blocks * bits + 7) / 8) : n * blocks));
  EG_TRY(egi_shape_check_type(in, at[EGI_LINEAR_GROUP_INDEX], EG_DTYPE_I32));
  EG_TRY(check_count(in, at[EGI_LINEAR_GROUP_INDEX], k));
  sizes[0] = egi_dim_constant(in->dims, n);
  sizes[1] = egi_dim_constant(in->dims, k);
  return EG_OK;
}

/* Scales of flat blocks: floats, or codes and what decodes them. */
static eg_status check_flat_scales(const egi_inference *in, const unsigned *at, int64_t n_blocks) {
  const egi_value *scales = egi_shape_input(in, at[EGI_LINEAR_SCALES]);
  EG_TRY(check_count(in, at[EGI_LINEAR_SCALES], n_blocks));
  if (scales == NULL || scales->dtype != EG_DTYPE_U8) {
    if (egi_shape_input(in, at[EGI_LINEAR_NESTED]) != NULL)
      return egi_shape_fail(in, "input %u decodes scales that are codes (u8), these are none", at[EGI_LINEAR_NESTED]);
    return check_float(in, at[EGI_LINEAR_SCALES]);
  }
  EG_TRY(check_float(in, at[EGI_LINEAR_NESTED]));
  EG_TRY(egi_shape_check_type(in, at[EGI_LINEAR_NESTED], EG_DTYPE_F32));
  return check_count(in, at[EGI_LINEAR_NESTED], (int64_t)egi_nested_count((uint64_t)n_blocks));
}

eg_status egi_shape_check_levels(const egi_inference *in, egi_levels l) {
  int64_t n_blocks = l.block > 0 ? (l.elements + l.block - 1) / l.block : 0;
  for (uint32_t i = 0; i < l.count; i++) {
    unsigned at[EGI_LINEAR_INPUTS] = {[EGI_LINEAR_SCALES] = l.scales + i, [EGI_LINEAR_NESTED] = UINT32_MAX};
    if (l.is_nested) at[EGI_LINEAR_NESTED] = l.nested + i;
    EG_TRY(egi_shape_check_type(in, l.weight + i, EG_DTYPE_U8));
    EG_TRY(check_count(in, l.weight + i, (l.elements + 1) / 2)); /* rows are whole bytes: an odd K does not fit */
    EG_TRY(check_flat_scales(in, at, n_blocks));
  }
  return EG_OK;
}

static eg_status bnb4_sizes(const egi_inference *in, const unsigned *at, egi_dim sizes[2]) {
  int64_t n = 0, k = 0, block = 0, type = egi_node_int(in->node, "quant_type", 1);
  EG_TRY(read_features(in, &n, &k, &block));
  if (type != 0 && type != 1)
    return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED, "quant_type = %lld; 0 (FP4) and 1 (NF4) are possible",
                         (long long)type);
  EG_TRY(egi_shape_check_type(in, at[EGI_LINEAR_WEIGHT], EG_DTYPE_U8));
  EG_TRY(check_count(in, at[EGI_LINEAR_WEIGHT], (n * k + 1) / 2));
  EG_TRY(check_flat_scales(in, at, (n * k + block - 1) / block));
  sizes[0] = egi_dim_constant(in->dims, n);
  sizes[1] = egi_dim_constant(in->dims, k);
  return EG_OK;
}

/* As DequantizeLinear: one scale, one for each index of the axis, or one for each block along it. */
static eg_status check_blocked_scales(const egi_inference *in, const unsigned *at, unsigned index) {
  const egi_value *weight = egi_shape_input(in, at[EGI_LINEAR_WEIGHT]), *scale = egi_shape_input(in, index);
  int64_t block = egi_node_int(in->node, "block_size", 0), axis = egi_node_int(in->node, "axis", 1);
  if (scale == NULL) return EG_OK;
  if (axis != 0 && axis != 1) return egi_shape_fail(in, "axis = %lld", (long long)axis);
  if (block < 0) return egi_shape_fail(in, "block_size = %lld", (long long)block);
  if (block == 0 && scale->rank == 0) return EG_OK;
  if (block == 0 && scale->rank == 1 && egi_shape_is_number(in, scale->dims[0], 1)) return EG_OK;
  EG_TRY(egi_shape_check_input_rank(in, index, block == 0 ? 1 : 2));
  if (block == 0) return egi_shape_equal(in, "the scales", scale->dims[0], weight->dims[axis], NULL);
  egi_dim padded = egi_dim_add(in->dims, weight->dims[axis], egi_dim_constant(in->dims, block - 1));
  egi_dim blocks = egi_dim_divide(in->dims, padded, egi_dim_constant(in->dims, block));
  EG_TRY(egi_shape_equal(in, "the scales of blocks", scale->dims[axis], blocks, NULL));
  return egi_shape_equal(in, "the scales of blocks", scale->dims[1 - axis], weight->dims[1 - axis], NULL);
}

static eg_status blocked_sizes(const egi_inference *in, const unsigned *at, egi_dim sizes[2]) {
  const egi_value *weight = egi_shape_input(in, at[EGI_LINEAR_WEIGHT]);
  int is_transposed = egi_node_int(in->node, "transposed", 0) != 0;
  EG_TRY(egi_shape_check_input_rank(in, at[EGI_LINEAR_WEIGHT], 2));
  if (egi_dtype_is_float(weight->dtype) || egi_dtype_bits(weight->dtype) > 8)
    return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED, "codes of type %s", egi_dtype_name(weight->dtype));
  EG_TRY(check_float(in, at[EGI_LINEAR_SCALES]));
  EG_TRY(check_blocked_scales(in, at, at[EGI_LINEAR_SCALES]));
  EG_TRY(egi_shape_check_type(in, at[EGI_LINEAR_ZERO_POINTS], weight->dtype));
  EG_TRY(check_blocked_scales(in, at, at[EGI_LINEAR_ZERO_POINTS]));
  sizes[0] = weight->dims[is_transposed];
  sizes[1] = weight->dims[1 - is_transposed];
  return EG_OK;
}

static eg_status plain_sizes(const egi_inference *in, const unsigned *at, egi_dim sizes[2]) {
  const egi_value *weight = egi_shape_input(in, at[EGI_LINEAR_WEIGHT]);
  EG_TRY(egi_shape_check_input_rank(in, at[EGI_LINEAR_WEIGHT], 2));
  EG_TRY(egi_shape_check_type(in, at[EGI_LINEAR_WEIGHT], egi_shape_input(in, at[EGI_LINEAR_X])->dtype));
  sizes[0] = weight->dims[0];
  sizes[1] = weight->dims[1];
  return EG_OK;
}

eg_status egi_shape_linear_sizes(const egi_inference *in, const unsigned *at, egi_dim sizes[2]) {
  switch (egi_linear_storage_of(in->node)) {
  case EGI_LINEAR_PLAIN:
    return plain_sizes(in, at, sizes);
  case EGI_LINEAR_NBITS:
    return nbits_sizes(in, at, sizes);
  case EGI_LINEAR_BNB4:
    return bnb4_sizes(in, at, sizes);
  case EGI_LINEAR_BLOCKED:
    return blocked_sizes(in, at, sizes);
  case EGI_LINEAR_UNKNOWN:
    break;
  }
  return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED, "the storage \"%s\" is not known",
                       egi_node_string(in->node, "storage", "plain"));
}

/* The input's shape with its last dim, which must be sizes[from], replaced by sizes[1 - from]. */
static eg_status set_product(egi_inference *in, int from) {
  static const unsigned at[EGI_LINEAR_INPUTS] = {0, 1, 2, 3, 4, 5, 6};
  const egi_value *x = egi_shape_input(in, EGI_LINEAR_X);
  egi_dim sizes[2], dims[EGI_MAX_RANK];
  if (x->rank < 1) return egi_shape_fail(in, "input 0 is a scalar");
  EG_TRY(egi_shape_linear_sizes(in, at, sizes));
  EG_TRY(egi_shape_equal(in, "the features", x->dims[x->rank - 1], sizes[from], NULL));
  memcpy(dims, x->dims, sizeof dims);
  dims[x->rank - 1] = sizes[1 - from];
  return egi_shape_set(in, 0, x->dtype, x->rank, dims);
}

/* What is added has the shape of the result. */
static eg_status check_term(const egi_inference *in) {
  const egi_value *term = egi_shape_input(in, EGI_LINEAR_BIAS), *y = &in->graph->values[in->node->outputs[0]];
  EG_TRY(egi_shape_check_input_rank(in, EGI_LINEAR_BIAS, y->rank));
  for (int d = 0; d < y->rank; d++) EG_TRY(egi_shape_equal(in, "what is added", term->dims[d], y->dims[d], NULL));
  return EG_OK;
}

eg_status egi_shape_linear(egi_inference *in) {
  const egi_value *bias = egi_shape_input(in, EGI_LINEAR_BIAS);
  EG_TRY(set_product(in, 1));
  if (bias == NULL) return EG_OK;
  const egi_value *y = &in->graph->values[in->node->outputs[0]];
  if (bias->rank == y->rank) return check_term(in);
  EG_TRY(egi_shape_check_input_rank(in, EGI_LINEAR_BIAS, 1));
  return egi_shape_equal(in, "the bias", bias->dims[0], y->dims[y->rank - 1], NULL);
}

eg_status egi_shape_linear_grad(egi_inference *in) {
  EG_TRY(set_product(in, 0));
  return egi_shape_input(in, EGI_LINEAR_BIAS) != NULL ? check_term(in) : EG_OK;
}

/* ---- codes that are never stored -------------------------------------------------------------------------------- */

/* NF4's blocks cross the ends of rows, which only a matrix of known size may let them: rows of activations stay apart.
 */
eg_status egi_shape_fake_quantize(egi_inference *in) {
  const egi_value *x = egi_shape_input(in, 0);
  egi_fake_quantize form;
  int64_t size;
  if (!egi_fake_quantize_read(in->node, &form))
    return egi_fail_node(in->graph, in->id, EG_ERROR_UNSUPPORTED, "its attributes name no codes that are known");
  if (!egi_dtype_is_float(x->dtype)) return egi_shape_fail(in, "only floats have codes");
  bool is_matrix =
      x->rank == 2 && egi_dim_value(in->dims, x->dims[0], &size) && egi_dim_value(in->dims, x->dims[1], &size);
  if (form.is_nf4 && !is_matrix) return egi_shape_fail(in, "codes of the flattened tensor need a matrix of known size");
  if (x->rank < 1) return egi_shape_fail(in, "a single number has no axis");
  return egi_shape_set_like(in, 0, x);
}
