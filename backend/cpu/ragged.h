/* Products of rows sorted by expert with the experts' matrices, for the kernels of RaggedLinear, its gradients and MoE.
 * Numbers of the rows' type, f32 or f64. Nothing depends on the number of threads: tasks are pieces of fixed size, sums
 * run in fixed order. */
#ifndef ENGRAFT_BACKEND_CPU_RAGGED_H
#define ENGRAFT_BACKEND_CPU_RAGGED_H

#include "backend/cpu/cpu.h"
#include "graph/ragged.h"

#define EGI_RAGGED_TILE 96       /* outputs of one task */
#define EGI_RAGGED_TILE_ROWS 512 /* rows of one product */

typedef struct egi_ragged_product {
  const egi_ragged *ragged;
  const egi_kernel_call *call; /* whose inputs hold the experts' operands */
  const egi_isa *isa;
  const int32_t *offsets;
  int64_t n;        /* of the matrices [N, K] */
  bool is_backward; /* false: out [R, N] = addend + alpha · row_weight · (in [R, K] · Wᵀ + bias); true: out [R, K] =
                       alpha · in [R, N] · W */
  double alpha;
  egi_matrix in, out;
  const egi_tensor *addend, *row_weight; /* forward; NULL: none */
  char *scratch;                         /* egi_ragged_scratch() bytes for each worker */
  size_t scratch_bytes;
} egi_ragged_product;

/* `longest`: of n and k */
size_t egi_ragged_scratch(const egi_ragged *ragged, int64_t longest, size_t element_bytes);
void egi_ragged_multiply(const egi_ragged_product *product);
/* Whether an operand of the experts has a type that rows of `dtype` are multiplied with. */
bool egi_ragged_takes(const egi_ragged *ragged, const egi_tensor *inputs, eg_dtype dtype);
/* Expert e's part of an operand; the first axis of a stack is left out. */
egi_tensor egi_ragged_operand(const egi_ragged *ragged, const egi_tensor *inputs, egi_ragged_role role, int64_t expert);
/* 2-D tensor as a matrix. */
static inline egi_matrix egi_ragged_matrix(const egi_tensor *t, bool is_transposed) {
  return (egi_matrix){t->data, t->dtype, t->strides[is_transposed ? 1 : 0], t->strides[is_transposed ? 0 : 1]};
}

#endif
