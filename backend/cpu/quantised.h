/* Products with a quantised weight, for the operators that take one: the operands of Linear in graph/linear.h, wherever
 * they stand among a node's inputs. */
#ifndef ENGRAFT_BACKEND_CPU_QUANTISED_H
#define ENGRAFT_BACKEND_CPU_QUANTISED_H

#include "backend/cpu/dequantise.h"
#include "graph/linear.h"

#define EGI_NO_INPUT 255

/* A weight as a node states it. */
typedef struct egi_quantised_weight {
  egi_quantised matrix;                  /* without its data */
  bool is_turned;                        /* stored as [in, out] */
  uint8_t inputs[EGI_LINEAR_INPUTS];     /* of the node; EGI_NO_INPUT: none */
  size_t copy_offset[EGI_LINEAR_INPUTS]; /* of operands that are not contiguous, among the copies; 0: none */
  size_t copies_bytes;                   /* workspace, 64-byte aligned */
} egi_quantised_weight;

/* Out features that a node's weight has: an attribute, or a dim of its codes. */
int64_t egi_quantised_out_features(const egi_kernel_plan *plan, const uint8_t *inputs);
eg_status egi_quantised_read(egi_kernel_plan *plan, const uint8_t *inputs, int64_t out_features, int64_t in_features,
                             egi_quantised_weight *out_weight);
/* The matrix with the data of a call; EG_ERROR_DATA for groups that are not there. */
eg_status egi_quantised_open(eg_context *ctx, const egi_quantised_weight *weight, const egi_kernel_call *call,
                             char *copies, egi_quantised *out_matrix);

/* C[m, n] = alpha · A[m, k] · B[k, n] + beta · C in f32, B columns [column, column + n) of the stored matrix or of its
 * transpose. `buffer` holds EGI_QUANTISED_BLOCK · n floats, `scratch` egi_product_scratch(m, n) bytes. The sum over k
 * is one over blocks of EGI_QUANTISED_BLOCK, in order. */
#define EGI_QUANTISED_BLOCK 256
typedef struct egi_quantised_product {
  const egi_quantised *matrix;
  bool is_transposed;
  egi_product product; /* without B */
  int64_t column;
  float *buffer;
  void *scratch;
} egi_quantised_product;
void egi_quantised_multiply(const egi_isa *isa, const egi_quantised_product *product);

#endif
