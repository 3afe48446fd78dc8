/* What a node states of a quantised weight: sizes, bits, blocks, and that they fit each other. */
#include "backend/quantised_weight.h"

static int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* The node's operand, NULL where it is left out. */
static const egi_tensor *operand(const egi_kernel_plan *plan, const uint8_t *inputs, unsigned index) {
  unsigned input = inputs[index];
  return input != EGI_NO_INPUT && egi_plan_has_input(plan, input) ? &plan->inputs[input] : NULL;
}

static bool has_count(const egi_tensor *tensor, int64_t count) {
  return tensor == NULL || egi_tensor_count(tensor) == count;
}

/* Operands by their place in graph/linear.h. */
typedef struct reader {
  const egi_node *node;
  const egi_tensor *at[EGI_LINEAR_INPUTS];
} reader;

static bool read_nbits(const reader *r, egi_quantised *q) {
  const egi_node *node = r->node;
  int64_t block = egi_node_int(node, "block_size", 0), bits = egi_node_int(node, "bits", 4);
  if (block < 1 || block > INT32_MAX || (bits != 2 && bits != 4 && bits != 8) || block * bits % 8 != 0) return false;
  int64_t blocks = ceil_divide(q->columns, block), packed = ceil_divide(blocks * bits, 8);
  q->bits = (unsigned)bits;
  q->code_row_stride = blocks * block;
  q->block_rows = q->scale_column_stride = q->zero_column_stride = 1;
  q->block_columns = block;
  q->scale_row_stride = blocks;
  q->zero_kind = EGI_ZERO_NUMBER;
  q->zero = (float)(1 << (bits - 1));
  bool has_zeros = (r->at[EGI_LINEAR_ZERO_POINTS] != NULL);
  bool is_packed = has_zeros && r->at[EGI_LINEAR_ZERO_POINTS]->dtype == EG_DTYPE_U8;
  if (has_zeros) q->zero_kind = is_packed ? EGI_ZERO_CODES : EGI_ZERO_FLOATS;
  q->zero_row_stride = is_packed ? packed * 8 / bits : blocks;
  return r->at[EGI_LINEAR_WEIGHT]->dtype == EG_DTYPE_U8 &&
         has_count(r->at[EGI_LINEAR_WEIGHT], q->rows * (blocks * block * bits / 8)) &&
         has_count(r->at[EGI_LINEAR_SCALES], q->rows * blocks) &&
         has_count(r->at[EGI_LINEAR_GROUP_INDEX], q->columns) &&
         has_count(r->at[EGI_LINEAR_ZERO_POINTS], q->rows * (is_packed ? packed : blocks));
}

static bool read_bnb4(const reader *r, egi_quantised *q) {
  const egi_node *node = r->node;
  int64_t count = q->rows * q->columns;
  q->flat_block = egi_node_int(node, "block_size", 0);
  q->bits = 4;
  q->code_row_stride = q->columns;
  q->has_levels = true;
  q->levels = egi_node_int(node, "quant_type", 1) == EGI_FOUR_BIT_FP4 ? EGI_FOUR_BIT_FP4 : EGI_FOUR_BIT_NF4;
  if (q->flat_block < 1) return false;
  int64_t n_blocks = ceil_divide(count, q->flat_block);
  return r->at[EGI_LINEAR_WEIGHT]->dtype == EG_DTYPE_U8 && has_count(r->at[EGI_LINEAR_WEIGHT], ceil_divide(count, 2)) &&
         has_count(r->at[EGI_LINEAR_SCALES], n_blocks) &&
         has_count(r->at[EGI_LINEAR_NESTED], (int64_t)egi_nested_count((uint64_t)n_blocks));
}

static bool read_blocked(const reader *r, egi_quantised *q) {
  const egi_node *node = r->node;
  const egi_tensor *weight = r->at[EGI_LINEAR_WEIGHT], *scales = r->at[EGI_LINEAR_SCALES];
  int64_t block = egi_node_int(node, "block_size", 0), n_scales = egi_tensor_count(scales);
  bool is_rows = egi_node_int(node, "axis", 1) == 0, is_single = block == 0 && n_scales == 1;
  q->bits = egi_dtype_bits(weight->dtype);
  q->is_signed = egi_dtype_kind(weight->dtype) == EGI_CLASS_INTEGER;
  q->code_row_stride = q->columns;
  q->block_rows = is_rows ? (block > 0 ? block : 1) : block > 0 ? 1 : q->rows;
  q->block_columns = is_rows ? (block > 0 ? 1 : q->columns) : block > 0 ? block : 1;
  if (is_single) q->block_rows = q->rows, q->block_columns = q->columns;
  if (q->block_rows < 1) q->block_rows = 1;
  if (q->block_columns < 1) q->block_columns = 1;
  int64_t down = ceil_divide(q->rows, q->block_rows), across = ceil_divide(q->columns, q->block_columns);
  q->scale_row_stride = q->zero_row_stride = across;
  q->scale_column_stride = q->zero_column_stride = 1;
  q->zero_kind = (r->at[EGI_LINEAR_ZERO_POINTS] != NULL) ? EGI_ZERO_CODES : EGI_ZERO_NUMBER;
  return weight->rank == 2 && (q->bits == 2 || q->bits == 4 || q->bits == 8) && n_scales == down * across &&
         has_count(r->at[EGI_LINEAR_ZERO_POINTS], n_scales);
}

static bool is_scale_type(eg_dtype dtype) {
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16 || dtype == EG_DTYPE_F64;
}

/* Floats, or where a storage has them so codes that are decoded by floats. */
static bool has_scale_types(const reader *r, egi_linear_storage storage) {
  const egi_tensor *scales = r->at[EGI_LINEAR_SCALES], *nested = r->at[EGI_LINEAR_NESTED];
  if (!scales) return false;
  if (!nested) return is_scale_type(scales->dtype);
  return storage == EGI_LINEAR_BNB4 && scales->dtype == EG_DTYPE_U8 && nested->dtype == EG_DTYPE_F32;
}

int64_t egi_quantised_out_features(const egi_kernel_plan *plan, const uint8_t *inputs) {
  const egi_node *node = egi_plan_node(plan);
  const egi_tensor *codes = operand(plan, inputs, EGI_LINEAR_WEIGHT);
  if (egi_linear_storage_of(node) != EGI_LINEAR_BLOCKED) return egi_node_int(node, "out_features", 0);
  return codes->rank == 2 ? codes->dims[egi_node_int(node, "transposed", 0) != 0] : 0;
}

/* Packed operands are read as bytes in order; others are copied first. */
static void reserve_copies(const reader *r, egi_quantised_weight *weight) {
  size_t total = 64; /* offset 0 means none */
  for (unsigned i = EGI_LINEAR_WEIGHT; i < EGI_LINEAR_INPUTS; i++) {
    uint64_t bytes = 0;
    if (i == EGI_LINEAR_BIAS || r->at[i] == NULL || egi_tensor_is_contiguous(r->at[i])) continue;
    (void)egi_dtype_bytes(r->at[i]->dtype, (uint64_t)egi_tensor_count(r->at[i]), &bytes);
    weight->copy_offset[i] = total;
    total += ((size_t)bytes + 63) / 64 * 64;
  }
  weight->copies_bytes = total > 64 ? total : 0;
}

eg_status egi_quantised_read(egi_kernel_plan *plan, const uint8_t *inputs, int64_t out_features, int64_t in_features,
                             egi_quantised_weight *out_weight) {
  reader r = {.node = egi_plan_node(plan)};
  egi_quantised *q = &out_weight->matrix;
  egi_linear_storage storage = egi_linear_storage_of(r.node);
  *out_weight = (egi_quantised_weight){.is_turned = false};
  memcpy(out_weight->inputs, inputs, sizeof out_weight->inputs);
  for (unsigned i = 0; i < EGI_LINEAR_INPUTS; i++) r.at[i] = operand(plan, inputs, i);
  out_weight->is_turned = storage == EGI_LINEAR_BLOCKED && egi_node_int(r.node, "transposed", 0) != 0;
  q->rows = out_weight->is_turned ? in_features : out_features;
  q->columns = out_weight->is_turned ? out_features : in_features;
  const egi_tensor *scales = r.at[EGI_LINEAR_SCALES], *groups = r.at[EGI_LINEAR_GROUP_INDEX];
  if (!has_scale_types(&r, storage) || (groups && groups->dtype != EG_DTYPE_I32)) return egi_fail_types(plan);
  q->scale_dtype = scales->dtype;
  bool is_sound = storage == EGI_LINEAR_NBITS  ? read_nbits(&r, q)
                  : storage == EGI_LINEAR_BNB4 ? read_bnb4(&r, q)
                                               : storage == EGI_LINEAR_BLOCKED && read_blocked(&r, q);
  if (q->zero_kind == EGI_ZERO_FLOATS) {
    q->zero_dtype = r.at[EGI_LINEAR_ZERO_POINTS]->dtype;
    if (!is_scale_type(q->zero_dtype)) return egi_fail_types(plan);
  }
  reserve_copies(&r, out_weight);
  if (is_sound) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "weight, scales or zero points do not fit each other");
}
