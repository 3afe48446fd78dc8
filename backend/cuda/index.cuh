/* Indices of the gathering and scattering kernels, read and checked on the device. */
#ifndef ENGRAFT_BACKEND_CUDA_INDEX_CUH
#define ENGRAFT_BACKEND_CUDA_INDEX_CUH

#include "backend/cuda/strided.cuh"

namespace egi::plain {

/* An i32 or i64 tensor of any strides. */
struct index_list {
  const char *data;
  bool is_wide; /* i64 */
  int rank;
  int64_t count, dims[EGI_MAX_RANK], strides[EGI_MAX_RANK]; /* bytes */
};

inline index_list index_list_of(const egi_tensor *indices) {
  index_list list = {};
  list.data = static_cast<const char *>(indices->data);
  list.is_wide = indices->dtype == EG_DTYPE_I64;
  list.count = egi_tensor_count(indices);
  const int64_t bytes = list.is_wide ? 8 : 4;
  const bool is_contiguous = egi_tensor_is_contiguous(indices);
  list.rank = is_contiguous ? 1 : indices->rank;
  for (int i = 0; i < list.rank; i++) {
    list.dims[i] = is_contiguous ? list.count : indices->dims[i];
    list.strides[i] = is_contiguous ? bytes : indices->strides[i] * bytes;
  }
  return list;
}

/* Entry `position`, row-major. */
__device__ __forceinline__ int64_t index_at(const index_list &list, int64_t position) {
  const char *at = list.data + offset_at(list.rank, list.dims, list.strides, position);
  return list.is_wide ? *reinterpret_cast<const int64_t *>(at) : *reinterpret_cast<const int32_t *>(at);
}

/* The index from the front; -1, and a fault, when it is outside [-size, size). */
__device__ __forceinline__ int64_t checked_index(int64_t index, int64_t size, egi_cuda_fault *fault, int op) {
  if (index >= -size && index < size) return index < 0 ? index + size : index;
  egi_cuda_raise(fault, EGI_CUDA_FAULT_INDEX, op, index);
  return -1;
}

/* The address space that GatherND's tuples go into: dims [batch_dims, batch_dims + depth) of contiguous data. */
struct tuple_space {
  int depth;
  int64_t dims[EGI_MAX_RANK], strides[EGI_MAX_RANK]; /* [depth], in slices */
  int64_t slice;                                     /* elements that a tuple names */
  int64_t batch_stride;                              /* slices of data of one batch */
  int64_t n_batches, per_batch;
};

/* Lays out tuples over `data` with `indices` [.., depth]; false when the shapes do not fit. */
bool tuple_space_init(tuple_space *tuples, const egi_tensor *data, const egi_tensor *indices, int batch_dims);

/* The slice of data that tuple `row` names; -1, and a fault, when an index is out of range. */
__device__ __forceinline__ int64_t tuple_slot(const tuple_space &tuples, const index_list &indices, int64_t row,
                                              egi_cuda_fault *fault, int op) {
  int64_t slot = tuples.per_batch > 0 ? row / tuples.per_batch * tuples.batch_stride : 0;
  for (int i = 0; i < tuples.depth; i++) {
    const int64_t index = checked_index(index_at(indices, row * tuples.depth + i), tuples.dims[i], fault, op);
    if (index < 0) return -1;
    slot += index * tuples.strides[i];
  }
  return slot;
}

/* ---- sorting (sort.cu) ------------------------------------------------------------------------------------------- */

/* Workspace for `n` keys below `limit`; EG_ERROR_UNSUPPORTED when either does not fit 32 bits. */
eg_status sort_room(const egi_kernel_plan *plan, int64_t n, int64_t limit, size_t *out_bytes);
/* Keys and where they stood, in rising order of keys, equal ones in the order they had. */
struct sorted {
  uint32_t *keys, *positions;
};
/* The n keys at the start of the workspace, all below `limit`. */
eg_status sort_keys(eg_context *ctx, const egi_cuda_stream *stream, void *workspace, int64_t n, int64_t limit,
                    sorted *out);

} // namespace egi::plain

#endif
