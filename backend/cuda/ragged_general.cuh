/* Products of rows sorted by expert, of any sizes, strides, types and storages: what the general kernels are told. Sums
 * are f32, in order of the contracted index; experts without rows have no work. A tile is 64 rows x 64 results. */
#ifndef ENGRAFT_BACKEND_CUDA_RAGGED_GENERAL_CUH
#define ENGRAFT_BACKEND_CUDA_RAGGED_GENERAL_CUH

#include "backend/cuda/operator.cuh"

namespace egi {
namespace ragged_general {

enum { THREADS = 256, TILE = 64, DEPTH = 32, PITCH = TILE + 4 };
enum storage_kind { STORAGE_DENSE, STORAGE_BITS, STORAGE_LEVELS };

/* One expert's part of an operand; of a vector `row_stride` counts. Strides in elements. */
struct expert_operand {
  const void *data;
  int64_t row_stride, column_stride;
};

/* Matrices [N, K] of all experts: tables of E operands in device memory, NULL for what is not there. */
struct expert_weights {
  const expert_operand *weight, *bias, *scales, *zeros;
  element_kind weight_element, bias_element, scale_element;
  storage_kind storage;
  int bits, is_fp4;
  int64_t block, n, k;
  int is_stack;  /* LEVELS: blocks are those of the whole stack */
  int is_nested; /* LEVELS: scales are codes, `zeros` decodes them */
};

/* Rows [x, ..] of a tile: expert, first row, row behind the last. */
struct row_tile {
  int expert, first, end;
};

/* Tiles of 64 rows of all experts, in device memory: their number, then themselves. */
struct tile_list {
  int *count;
  row_tile *tiles;
};

inline int64_t most_tiles(int64_t n_rows, int64_t n_experts) {
  return n_rows / TILE + n_experts;
}

struct matrix {
  void *data;
  int64_t row_stride, column_stride;
};

/* out [R, results] = addend + alpha * row_weight * (in [R, depth] times W or its transpose + bias) */
struct product {
  expert_weights w;
  tile_list list;
  int64_t n_rows, n_experts, results, depth;
  int is_backward; /* results are columns of W */
  float alpha;
  matrix in, out, addend;
  element_kind addend_element, row_weight_element;
  const void *row_weight;
  int64_t row_weight_stride;
};

/* out [E, N, K] = alpha * the sum over an expert's rows of left [R, N] * right [R, K] */
struct reduction {
  const int32_t *offsets;
  int64_t n_rows, n_experts, n, k;
  float alpha;
  matrix left, right;
  void *out;
  element_kind out_element;
  int64_t out_strides[3];
};

/* d w of each row from dX before it is weighted, then dX times the row's weight. */
struct weighing {
  const int32_t *offsets;
  expert_weights w;
  int64_t n_rows, n_experts;
  float alpha;
  matrix dy, x, dx;
  const void *row_weight;
  element_kind row_weight_element, d_weight_element;
  int64_t row_weight_stride;
  void *d_weight; /* NULL: not wanted */
};

/* out[r] = alpha * row_weight[r] (1 where there is none). */
struct row_factors {
  const void *row_weight;
  int64_t stride;
  element_kind element;
  float alpha;
  int64_t n_rows;
  float *out;
};

/* out = addend + sums; `sums` is contiguous, and all are of one type. */
struct row_addition {
  matrix addend, out;
  const void *sums;
  int64_t n_rows, n_columns;
};

/* Where the table of a role comes from: a stack, or operands of their own, up to LISTED at a time. */
enum { LISTED = 128 };
struct table_source {
  expert_operand first;
  int64_t expert_bytes; /* of a stack */
  int64_t n_experts;
  int64_t start; /* of a list */
  int is_stack;
  expert_operand list[LISTED];
};

cudaError_t fill_table(const table_source &source, expert_operand *table, cudaStream_t stream);
/* Checks that offsets rise from 0 to n_rows, raises a fault where not (and lists nothing). */
cudaError_t list_tiles(const int32_t *offsets, int64_t n_experts, int64_t n_rows, const tile_list &list,
                       egi_cuda_fault *fault, cudaStream_t stream);
cudaError_t multiply(const product &p, element_kind element, cudaStream_t stream);
cudaError_t reduce(const reduction &r, element_kind element, cudaStream_t stream);
cudaError_t weigh(const weighing &w, element_kind element, cudaStream_t stream);
/* Matrices of experts [first, first + n) as they are, [n, N, K] of `element`. */
cudaError_t decode(const expert_weights &w, int64_t first, int64_t n, void *dst, element_kind element,
                   cudaStream_t stream);
/* Biases of all experts, [E, N]. */
cudaError_t decode_bias(const expert_weights &w, int64_t n_experts, void *dst, element_kind element,
                        cudaStream_t stream);
cudaError_t scale_rows(const row_factors &factors, cudaStream_t stream);
cudaError_t add_rows(const row_addition &addition, element_kind element, cudaStream_t stream);
/* dst[i] = alpha * src[i] of a contiguous f32 src [E, N, K] and any dst. */
cudaError_t store_sums(const float *src, const reduction &r, cudaStream_t stream);
cudaError_t copy_indices(const int32_t *src, int64_t stride, int64_t count, int32_t *dst, cudaStream_t stream);

} // namespace ragged_general
} // namespace egi

#endif
