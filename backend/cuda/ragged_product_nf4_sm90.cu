/* The ragged product on Hopper with NF4 weights, decoded by a warpgroup of the kernel while the others multiply. Needs
 * rows of W to be whole blocks of 64 codes, so that a step of the contraction meets one scale a row. */
#include "backend/cuda/ragged_product_sm90.cuh"

namespace egi {
namespace ragged {

template <class Element, bool IS_BACKWARD, bool IS_GATED>
static egi_cuda_status run(const egi_ragged_product &p, cudaStream_t stream) {
  product_call call = {};
  if (!prepare_call(call, p, 128, true)) return EGI_CUDA_FAILED;
  return launch_product<config<Element, 128, IS_BACKWARD, IS_GATED, true>>(call, stream);
}

template <class Element> static egi_cuda_status choose(const egi_ragged_product &p, cudaStream_t stream) {
  if (p.direction == EGI_RAGGED_BACKWARD) return run<Element, true, false>(p, stream);
  return p.activation == EGI_RAGGED_PLAIN ? run<Element, false, false>(p, stream)
                                          : run<Element, false, true>(p, stream);
}

egi_cuda_status product_nf4_sm90(const egi_ragged_product &p, cudaStream_t stream) {
  return p.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(p, stream) : choose<__half>(p, stream);
}

} // namespace ragged
} // namespace egi
