/* What the operators RaggedLinear, RaggedLinearGrad and RaggedReduce share: what a plan keeps of a node, and what goes
 * before each of their products. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_OPERATOR_CUH
#define ENGRAFT_BACKEND_CUDA_RAGGED_OPERATOR_CUH

#include "backend/cuda/ragged.h"
#include "backend/cuda/ragged_general.cuh"

extern "C" {
#include "graph/ragged.h"
}

namespace egi {

/* How the launcher of ragged.h gets an operator's matrices. */
enum weight_source {
  WEIGHT_ROWS,    /* a dense stack [E, N, K] of the rows' type */
  WEIGHT_COLUMNS, /* ... [E, K, N] */
  WEIGHT_NF4,     /* codes in blocks of 64, decoded by the launcher */
  WEIGHT_DECODED  /* anything else, decoded to the workspace as many experts at a time as find room */
};

struct ragged_node {
  egi_ragged ragged;
  element_kind element;
  int64_t n, k, n_rows;
  bool is_backward, is_fast;
  weight_source source;
  bool has_own_bias; /* a stack of the rows' type that the launcher reads as it is */
  int64_t at_once;   /* experts of a turn, of WEIGHT_DECODED */
  size_t tables_at, offsets_at, count_at, tiles_at;
  size_t factors_at, sums_at, bias_at, scratch_at, scratch_bytes, nested_at; /* of the fast way */
};

/* Room for tables of the experts' operands, tiles and offsets. */
void place_lists(ragged_node *node, int64_t n_tables, workspace_room *room);
/* Offsets without gaps. */
eg_status load_offsets(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call, unsigned input,
                       const int32_t **out_offsets);
/* Checks the offsets and lists the tiles of rows. */
eg_status load_tiles(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call, const int32_t *offsets,
                     ragged_general::tile_list *out_list);
/* Tables of the experts' operands, made where they are not there yet (`weight` is NULL). */
eg_status load_weights(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call,
                       ragged_general::expert_weights *weights);
ragged_general::matrix matrix_of(const egi_tensor *tensor);

/* Whether the launcher takes an operand's rows. */
bool has_fast_rows(const egi_tensor *tensor);
bool has_fast_address(const egi_tensor *tensor);
/* Decides about the fast way and takes its room. */
void choose_ragged_way(const egi_kernel_plan *plan, ragged_node *node, workspace_room *room);
/* out = factors * (input 0 times the matrices + bias). */
struct fast_product {
  ragged_general::expert_weights *weights; /* loaded when something has to be decoded */
  const int32_t *offsets;
  const float *factors; /* a row each, or NULL */
  egi_cuda_matrix out;
};

/* By the launcher. False where an address is not aligned and nothing was done. */
eg_status multiply_fast(eg_context *ctx, const ragged_node *node, const egi_kernel_call *call,
                        const fast_product &product, bool *out_is_done);

} // namespace egi

#endif
