/* Quantised weights of kernels: their data in a call, and products with blocks of them in float32. */
#include "backend/cpu/quantised.h"

/* ---- data ------------------------------------------------------------------------------------------------------- */

/* The operand's bytes in order; a copy where they are not. */
static const void *packed_data(const egi_quantised_weight *weight, unsigned index, const egi_kernel_call *call,
                               char *copies) {
  unsigned input = weight->inputs[index];
  if (input == EGI_NO_INPUT || !egi_call_has_input(call, input)) return NULL;
  const egi_tensor *tensor = &call->inputs[input];
  size_t offset = weight->copy_offset[index], bytes = egi_element_bytes(tensor->dtype);
  if (offset == 0) return tensor->data;
  char *out = copies + offset;
  int64_t count = egi_tensor_count(tensor);
  for (int64_t i = 0; i < count; i++) {
    int64_t rest = i, at = 0;
    for (int d = tensor->rank - 1; d >= 0; d--) {
      at += rest % tensor->dims[d] * tensor->strides[d];
      rest /= tensor->dims[d];
    }
    memcpy(out + (size_t)i * bytes, (const char *)tensor->data + at * (int64_t)bytes, bytes);
  }
  return out;
}

eg_status egi_quantised_open(eg_context *ctx, const egi_quantised_weight *weight, const egi_kernel_call *call,
                             char *copies, egi_quantised *out_matrix) {
  egi_quantised q = weight->matrix;
  q.codes = packed_data(weight, EGI_LINEAR_WEIGHT, call, copies);
  q.scales = packed_data(weight, EGI_LINEAR_SCALES, call, copies);
  q.nested = packed_data(weight, EGI_LINEAR_NESTED, call, copies);
  q.zeros = packed_data(weight, EGI_LINEAR_ZERO_POINTS, call, copies);
  q.group_index = packed_data(weight, EGI_LINEAR_GROUP_INDEX, call, copies);
  for (int64_t i = 0; q.group_index != NULL && i < q.columns; i++)
    if (q.group_index[i] < 0 || q.group_index[i] >= q.scale_row_stride)
      return egi_fail(ctx, EG_ERROR_DATA, "group %d of a quantised weight that has %lld", (int)q.group_index[i],
                      (long long)q.scale_row_stride);
  *out_matrix = q;
  return EG_OK;
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* Block [k, k + depth) of the factor's columns, in the buffer. */
static egi_matrix load_block(const egi_quantised_product *p, int64_t k, int64_t depth) {
  int64_t n = p->product.n;
  egi_quantised_part part = {k, depth, p->column, n};
  egi_matrix block = {p->buffer, EG_DTYPE_F32, n, 1};
  if (p->is_transposed) {
    part = (egi_quantised_part){p->column, n, k, depth};
    block.row_stride = 1;
    block.column_stride = EGI_QUANTISED_BLOCK;
  }
  egi_dequantise(p->matrix, &part, p->buffer, p->is_transposed ? EGI_QUANTISED_BLOCK : n);
  return block;
}

void egi_quantised_multiply(const egi_isa *isa, const egi_quantised_product *product) {
  egi_product part = product->product;
  int64_t k = 0, depth = product->product.k;
  do { /* once for a depth of 0 too: C is set */
    part.k = depth - k < EGI_QUANTISED_BLOCK ? depth - k : EGI_QUANTISED_BLOCK;
    part.a = egi_matrix_part(&product->product.a, 0, k);
    part.b = load_block(product, k, part.k);
    egi_product_run(isa, &part, product->scratch);
    part.beta = 1.0;
    k += EGI_QUANTISED_BLOCK;
  } while (k < depth);
}
