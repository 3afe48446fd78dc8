/* Host side of the tensor copy engine: descriptions of row tensors, through the driver's entry point (no link to it).
 */
#include "backend/cuda/attention_sm90.cuh"

namespace egi {

using encode_function = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                     const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static encode_function find_encode() {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const unsigned version = 12000;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, version, cudaEnableDefault, &result) !=
      cudaSuccess)
    return nullptr;
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<encode_function>(function) : nullptr;
}

bool make_row_map(CUtensorMap *map, const egi_cuda_rows &rows, row_extent extent, egi_cuda_float dtype, int box_rows) {
  const encode_function encode = find_encode();
  if (!encode) return false;
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(extent.size), static_cast<cuuint64_t>(extent.n_rows),
                              static_cast<cuuint64_t>(extent.n_heads)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(rows.row_stride) * 2,
                                 static_cast<cuuint64_t>(rows.head_stride) * 2};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1}, steps[3] = {1, 1, 1};
  const CUtensorMapDataType type =
      dtype == EGI_CUDA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, 3, rows.data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

int count_multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
  return count;
}

} // namespace egi
