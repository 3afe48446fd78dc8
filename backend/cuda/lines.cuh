/* Tensors as lines along one axis: where each line of each operand starts, and its step. */
#ifndef ENGRAFT_BACKEND_CUDA_LINES_CUH
#define ENGRAFT_BACKEND_CUDA_LINES_CUH

#include "backend/cuda/strided.cuh"

namespace egi::plain {

enum { LINE_OPERANDS = 3 };

struct lines {
  int rank; /* of the dims without the axis */
  int64_t count;
  int64_t dims[EGI_MAX_RANK], strides[LINE_OPERANDS][EGI_MAX_RANK]; /* bytes */
  int64_t steps[LINE_OPERANDS];
  char *data[LINE_OPERANDS];
};

/* Operand k of the lines; the first one gives the dims. An operand of UNDEFINED has no data. */
inline void lines_set(lines *l, int k, const egi_tensor *tensor, int axis) {
  const int64_t bytes = static_cast<int64_t>(egi_element_bytes(tensor->dtype));
  if (tensor->dtype == EG_DTYPE_UNDEFINED) return;
  l->data[k] = static_cast<char *>(tensor->data);
  l->steps[k] = tensor->strides[axis] * bytes;
  int to = 0;
  if (k == 0) l->count = 1;
  for (int i = 0; i < tensor->rank; i++) {
    if (i == axis) continue;
    l->strides[k][to] = tensor->strides[i] * bytes;
    if (k == 0) l->dims[to] = tensor->dims[i];
    if (k == 0) l->count *= tensor->dims[i];
    to++;
  }
  l->rank = to;
}

__device__ __forceinline__ char *line_at(const lines &l, int k, int64_t line) {
  return l.data[k] + offset_at(l.rank, l.dims, l.strides[k], line);
}

} // namespace egi::plain

#endif
