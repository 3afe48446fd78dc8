/* Bodies of Linear: the stored weight as a float matrix [out, in] by plain operators, then a product with its
 * transpose. Codes are taken out of their bytes by shifts and masks. */
#include "base/blockwise.h"
#include "graph/bodies.h"
#include "graph/linear.h"

/* NAME = codes of `bits` in u8 BYTES [rows, n], as numbers [rows, n * 8 / bits]. */
static void add_codes(egi_body *body, const char *name, const char *bytes, unsigned bits, bool is_high_first) {
  unsigned per_byte = 8 / bits;
  if (per_byte == 1) {
    egi_text_format(body->text, "%s = Cast <to = 1> (%s)\n", name, bytes);
    return;
  }
  egi_text_format(body->text, "%s_mask = Constant <value = uint8[1] {%u}> ()\n", name, (1u << bits) - 1u);
  for (unsigned i = 0; i < per_byte; i++) {
    unsigned shift = (is_high_first ? per_byte - 1 - i : i) * bits;
    egi_text_format(body->text,
                    "%s_by%u = Constant <value = uint8[1] {%u}> ()\n"
                    "%s_down%u = BitShift <direction = \"RIGHT\"> (%s, %s_by%u)\n"
                    "%s_code%u = BitwiseAnd (%s_down%u, %s_mask)\n%s_wide%u = Unsqueeze (%s_code%u, last)\n",
                    name, i, shift, name, i, bytes, name, i, name, i, name, i, name, name, i, name, i);
  }
  egi_text_format(body->text, "%s_all = Concat <axis = -1> (", name);
  for (unsigned i = 0; i < per_byte; i++) egi_text_format(body->text, "%s%s_wide%u", i > 0 ? ", " : "", name, i);
  egi_text_format(body->text, ")\n%s_flat = Reshape (%s_all, rows_first)\n%s = Cast <to = 1> (%s_flat)\n", name, name,
                  name, name);
}

static void add_sizes(egi_body *body, const int64_t *first, int64_t count) {
  const int64_t last = -1, zero = 0, rows[2] = {first[0], -1};
  egi_body_integers(body, "last", &last, 1);
  egi_body_integers(body, "start", &zero, 1);
  egi_body_integers(body, "columns", &count, 1);
  egi_body_integers(body, "rows_first", rows, 2);
}

/* NAME = 0, 1, .. as whole numbers divided by the block: the block of each of `count` elements. */
static void add_blocks(egi_body *body, const char *name, int64_t count, int64_t block) {
  egi_body_integer(body, "zero", 0);
  egi_body_integer(body, "one", 1);
  egi_body_integer(body, "count", count);
  egi_body_integer(body, "block", block);
  egi_text_format(body->text, "indices = Range (zero, count, one)\n%s = Div (indices, block)\n", name);
}

/* w = (codes - zeros) · scales; zero points and groups are the inputs behind the scales. */
static void add_nbits_weight(egi_body *body, unsigned scales) {
  int64_t n = egi_node_int(body->node, "out_features", 1), k = egi_node_int(body->node, "in_features", 1);
  int64_t block = egi_node_int(body->node, "block_size", 1);
  unsigned bits = (unsigned)egi_node_int(body->node, "bits", 4);
  bool has_zeros = egi_body_has(body, scales + 1);
  add_sizes(body, &n, k);
  egi_text_add(body->text, "bytes = Reshape (weight, rows_first)\n");
  add_codes(body, "padded", "bytes", bits, false);
  egi_text_add(body->text, "codes = Slice (padded, start, columns, last)\n");
  if (egi_body_has(body, scales + 2))
    egi_text_add(body->text, "groups = Identity (group_index)\n");
  else
    add_blocks(body, "groups", k, block);
  egi_text_add(body->text, "scale_rows = Reshape (scales, rows_first)\nscale_wide = Cast <to = 1> (scale_rows)\n"
                           "factor = Gather <axis = 1> (scale_wide, groups)\n");
  if (has_zeros) {
    egi_text_add(body->text, "zero_rows = Reshape (zero_points, rows_first)\n");
    if (egi_body_dtype(body, scales + 1) == EG_DTYPE_U8)
      add_codes(body, "zero_blocks", "zero_rows", bits, false);
    else
      egi_text_add(body->text, "zero_blocks = Cast <to = 1> (zero_rows)\n");
    egi_text_add(body->text, "middle = Gather <axis = 1> (zero_blocks, groups)\n");
  } else {
    egi_body_number(body, "middle", (double)(1u << (bits - 1)), "codes");
  }
  egi_text_add(body->text, "centred = Sub (codes, middle)\nw = Mul (centred, factor)\n");
}

/* factor_blocks = the scales of flat blocks: as they are, or levels[codes] · scales of scales + offset. */
static void add_flat_scales(egi_body *body, unsigned nested, int64_t n_blocks) {
  if (!egi_body_has(body, nested)) {
    egi_text_add(body->text, "scale_row = Reshape (scales, last)\nfactor_blocks = Cast <to = 1> (scale_row)\n");
    return;
  }
  const int64_t parts[3] = {1, EGI_NESTED_HEADER - 1, (n_blocks + EGI_NESTED_BLOCK - 1) / EGI_NESTED_BLOCK};
  egi_body_integers(body, "nested_parts", parts, 3);
  egi_body_integer(body, "n_blocks", n_blocks);
  egi_body_integer(body, "nested_block", EGI_NESTED_BLOCK);
  egi_text_add(body->text,
               "nested_row = Reshape (nested, last)\n"
               "nested_offset, nested_levels, nested_scales = Split <axis = 0> (nested_row, nested_parts)\n"
               "scale_row = Reshape (scales, last)\nscale_codes = Cast <to = 7> (scale_row)\n"
               "scale_level = Gather (nested_levels, scale_codes)\n"
               "scale_indices = Range (zero, n_blocks, one)\nscale_groups = Div (scale_indices, nested_block)\n"
               "scale_factor = Gather (nested_scales, scale_groups)\nscale_centred = Mul (scale_level, scale_factor)\n"
               "factor_blocks = Add (scale_centred, nested_offset)\n");
}

/* w = levels[codes] · scales over the flattened matrix. What decodes scales is the third input behind them. */
static void add_bnb4_weight(egi_body *body, unsigned scales) {
  static const char *const levels[2] = {
      "0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25, 0.0, -0.005208333333, -0.66666667, "
      "-1.0, -0.33333333, -0.5, -0.16666667, -0.25",
      "-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, "
      "-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, "
      "0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0"};
  int64_t n = egi_node_int(body->node, "out_features", 1), k = egi_node_int(body->node, "in_features", 1), one_row = 1;
  const int64_t shape[2] = {n, k};
  add_sizes(body, &one_row, n * k);
  egi_body_integers(body, "shape", shape, 2);
  egi_text_add(body->text, "bytes = Reshape (weight, rows_first)\n");
  add_codes(body, "padded", "bytes", 4, true);
  egi_text_format(body->text,
                  "codes = Slice (padded, start, columns, last)\nplaces = Cast <to = 7> (codes)\n"
                  "levels = Constant <value_floats = [%s]> ()\nlevel = Gather (levels, places)\n",
                  levels[egi_node_int(body->node, "quant_type", 1) == 1]);
  int64_t block = egi_node_int(body->node, "block_size", 1);
  add_blocks(body, "groups", n * k, block);
  add_flat_scales(body, scales + EGI_LINEAR_NESTED - EGI_LINEAR_SCALES, block > 0 ? (n * k + block - 1) / block : 0);
  egi_text_add(body->text, "factor = Gather (factor_blocks, groups)\nvalues = Mul (level, factor)\n"
                           "w = Reshape (values, shape)\n");
}

static void add_blocked_weight(egi_body *body, unsigned scales) {
  egi_text_format(body->text, "w = DequantizeLinear <axis = %lld, block_size = %lld> (weight, scales%s)\n",
                  (long long)egi_node_int(body->node, "axis", 1), (long long)egi_node_int(body->node, "block_size", 0),
                  egi_body_has(body, scales + 1) ? ", zero_points" : "");
}

bool egi_body_is_turned(const egi_body *body) {
  return egi_linear_storage_of(body->node) == EGI_LINEAR_BLOCKED && egi_node_int(body->node, "transposed", 0) != 0;
}

bool egi_body_stored_weight(egi_body *body, unsigned scales) {
  egi_linear_storage storage = egi_linear_storage_of(body->node);
  if (storage == EGI_LINEAR_UNKNOWN || storage == EGI_LINEAR_PLAIN) return false;
  if (storage == EGI_LINEAR_NBITS) add_nbits_weight(body, scales);
  if (storage == EGI_LINEAR_BNB4) add_bnb4_weight(body, scales);
  if (storage == EGI_LINEAR_BLOCKED) add_blocked_weight(body, scales);
  return true;
}

bool egi_body_linear(egi_body *body) {
  bool is_plain = egi_linear_storage_of(body->node) == EGI_LINEAR_PLAIN;
  bool has_bias = egi_body_has(body, EGI_LINEAR_BIAS), is_turned = egi_body_is_turned(body);
  if (!is_plain && !egi_body_stored_weight(body, EGI_LINEAR_SCALES)) return false;
  if (!is_plain) egi_text_add(body->text, "stored = CastLike (w, x)\n");
  if (!is_turned)
    egi_text_format(body->text, "turned = Transpose <perm = [1, 0]> (%s)\n", is_plain ? "weight" : "stored");
  egi_text_format(body->text, "%s = MatMul (x, %s)\n", has_bias ? "product" : "y", is_turned ? "stored" : "turned");
  if (has_bias) egi_text_add(body->text, "y = Add (product, bias)\n");
  return true;
}

/* dX = dY · W + term */
bool egi_body_linear_grad(egi_body *body) {
  bool is_plain = egi_linear_storage_of(body->node) == EGI_LINEAR_PLAIN;
  if (!is_plain && !egi_body_stored_weight(body, EGI_LINEAR_SCALES)) return false;
  egi_text_add(body->text, is_plain ? "stored = Identity (weight)\n" : "stored = CastLike (w, dy)\n");
  egi_text_add(body->text, egi_body_is_turned(body) ? "matrix = Transpose <perm = [1, 0]> (stored)\n"
                                                    : "matrix = Identity (stored)\n");
  bool has_term = egi_body_has(body, EGI_LINEAR_BIAS);
  egi_text_format(body->text, "%s = MatMul (dy, matrix)\n", has_term ? "product" : "dx");
  if (has_term) egi_text_add(body->text, "dx = Add (product, term)\n");
  return true;
}
