/* Host side of the tensor copy engine for the ragged kernels, through the driver's entry point (no link to it). */
#include "backend/cuda/ragged_hopper.cuh"

namespace egi {
namespace ragged {

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

bool make_map(CUtensorMap *map, const void *data, egi_cuda_float dtype, const map_shape &shape) {
  const encode_function encode = find_encode();
  if (!encode) return false;
  cuuint64_t dims[4], strides[3];
  cuuint32_t box[4], steps[4];
  for (int i = 0; i < shape.rank; i++) {
    dims[i] = shape.dims[i];
    box[i] = shape.box[i];
    steps[i] = 1;
    if (i > 0) strides[i - 1] = shape.strides_bytes[i - 1];
  }
  const bool is_bytes = shape.element_bytes == 1;
  const CUtensorMapDataType type = is_bytes                 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : dtype == EGI_CUDA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, static_cast<cuuint32_t>(shape.rank), const_cast<void *>(data), dims, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, is_bytes ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

} // namespace ragged
} // namespace egi
