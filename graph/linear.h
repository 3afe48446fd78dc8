/* The operands of engraft.Linear and engraft.LinearGrad: which input is what, and how the weight is stored. */
#ifndef ENGRAFT_GRAPH_LINEAR_H
#define ENGRAFT_GRAPH_LINEAR_H

#include "graph/graph.h"

/* Inputs of Linear; LinearGrad has dY in the place of x, and what is added to dX in that of the bias. */
enum {
  EGI_LINEAR_X,
  EGI_LINEAR_WEIGHT,
  EGI_LINEAR_BIAS,
  EGI_LINEAR_SCALES,
  EGI_LINEAR_ZERO_POINTS,
  EGI_LINEAR_GROUP_INDEX,
  EGI_LINEAR_NESTED,
  EGI_LINEAR_INPUTS
};

/* The attribute `storage`:
 *   plain    float [out, in]
 *   nbits    MatMulNBits of com.microsoft: codes of `bits` in blocks of `block_size` along a row, low bits first, rows
 *            padded to whole blocks; scales [out, blocks]; zero points u8, packed row by row, or floats [out, blocks],
 *            2^(bits-1) when absent; group_index [in]: the block whose scale an input has
 *   bnb4     MatMulBnb4: 4-bit codes of the flattened matrix, high half first, one scale for each `block_size` of them;
 *            quant_type 0 FP4, 1 NF4. Scales that are u8 are codes themselves, which `nested` f32 decodes: offset,
 *            levels [256], then a scale for each 256 of them (egi_nested_decode in base/blockwise.h)
 *   blocked  DequantizeLinear's: an integer matrix, [in, out] when `transposed` is 1, scales and zero points as that
 *            operator has them for `axis` (of the stored matrix) and `block_size` (0: none)
 * The sizes of nbits and bnb4 are the attributes out_features and in_features. */
typedef enum egi_linear_storage {
  EGI_LINEAR_UNKNOWN,
  EGI_LINEAR_PLAIN,
  EGI_LINEAR_NBITS,
  EGI_LINEAR_BNB4,
  EGI_LINEAR_BLOCKED
} egi_linear_storage;

egi_linear_storage egi_linear_storage_of(const egi_node *node);
/* Whether the node is a Linear whose weight is stored quantised. */
bool egi_linear_is_quantised(const egi_node *node);

#endif
