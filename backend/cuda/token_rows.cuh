/* A tensor [.., columns] of any strides as rows, one a token. */
#ifndef ENGRAFT_BACKEND_CUDA_TOKEN_ROWS_CUH
#define ENGRAFT_BACKEND_CUDA_TOKEN_ROWS_CUH

#include "backend/cuda/operator.cuh"

namespace egi {

struct token_rows {
  int rank; /* of the outer dims, those that follow each other joined */
  int64_t dims[EGI_MAX_RANK], strides[EGI_MAX_RANK];
  int64_t n_tokens, n_columns, column_stride;

  __device__ __forceinline__ int64_t offset_of(int64_t token) const {
    if (rank == 1) return token * strides[0];
    int64_t offset = 0;
    for (int i = rank - 1; i >= 0; i--) {
      offset += token % dims[i] * strides[i];
      token /= dims[i];
    }
    return offset;
  }
};

inline token_rows token_rows_of(const egi_tensor *t) {
  token_rows rows = {};
  rows.n_tokens = 1;
  rows.n_columns = t->dims[t->rank - 1];
  rows.column_stride = t->strides[t->rank - 1];
  for (int i = 0; i + 1 < t->rank; i++) {
    rows.n_tokens *= t->dims[i];
    if (t->dims[i] == 1) continue;
    if (rows.rank > 0 && rows.strides[rows.rank - 1] == t->dims[i] * t->strides[i]) {
      rows.dims[rows.rank - 1] *= t->dims[i];
      rows.strides[rows.rank - 1] = t->strides[i];
      continue;
    }
    rows.dims[rows.rank] = t->dims[i];
    rows.strides[rows.rank++] = t->strides[i];
  }
  if (rows.rank == 0) {
    rows.dims[0] = 1;
    rows.rank = 1;
  }
  return rows;
}

} // namespace egi

#endif
