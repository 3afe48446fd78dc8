/* Indices of the gathering and scattering kernels. */
#ifndef ENGRAFT_BACKEND_CPU_INDEX_H
#define ENGRAFT_BACKEND_CPU_INDEX_H

#include "backend/cpu/strided.h"

/* One address space that GatherND's tuples go into: dims [batch_dims, batch_dims + depth) of data. */
typedef struct egi_tuples {
  int batch_dims, depth;
  int64_t dims[EGI_MAX_RANK];    /* [depth] */
  int64_t strides[EGI_MAX_RANK]; /* [depth], elements of contiguous data */
  int64_t slice;                 /* elements that a tuple names */
  int64_t batch_stride;          /* elements of data of one batch */
  int64_t n_batches, per_batch;  /* tuples: n_batches * per_batch */
} egi_tuples;

static inline bool egi_is_index_type(eg_dtype dtype) {
  return dtype == EG_DTYPE_I64 || dtype == EG_DTYPE_I32;
}
/* Entry `position`, row-major, of an i32 or i64 tensor of any strides. */
int64_t egi_index_at(const egi_tensor *indices, int64_t position);
/* EG_ERROR_DATA, naming operator, index and size, when one is outside [-size, size). */
eg_status egi_check_indices(eg_context *ctx, const char *op_name, const egi_tensor *indices, int64_t size);

/* Lays out tuples over `data` with `indices` [.., depth]; false when the shapes do not fit. */
bool egi_tuples_init(egi_tuples *tuples, const egi_tensor *data, const egi_tensor *indices, int batch_dims);
eg_status egi_tuples_check(eg_context *ctx, const char *op_name, const egi_tuples *tuples, const egi_tensor *indices);
/* Elements from the start of data to the slice that tuple `row` names. */
int64_t egi_tuples_offset(const egi_tuples *tuples, const egi_tensor *indices, int64_t row);

#endif
