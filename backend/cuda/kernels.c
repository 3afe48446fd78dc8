/* The kernel structs of kernels.def and the table by operator. */
#include "backend/cuda/cuda.h"

enum {
  SI = EGI_KERNEL_STRIDED_INPUTS,
  SO = EGI_KERNEL_STRIDED_OUTPUTS,
  P0 = EGI_KERNEL_IN_PLACE_0,
  P1 = EGI_KERNEL_IN_PLACE_1,
  U0 = EGI_KERNEL_UPDATES_0,
  NW = EGI_KERNEL_NARROW_WEIGHTS
};

#define TILE(queries) ((uint32_t)(queries) << EGI_KERNEL_TILE_SHIFT)
#define KERNEL(symbol, prepare, run, flags) \
  [EGI_OP_##symbol] = {#symbol, flags, egi_cuda_prepare_##prepare, egi_cuda_run_##run, NULL},
static const egi_kernel kernels[EGI_OP_COUNT] = {
#include "backend/cuda/kernels.def"
    [EGI_OP_NONE] = {.name = NULL},
};
#undef KERNEL
#undef TILE

const egi_kernel *egi_cuda_find_kernel(egi_op op) {
  return op > EGI_OP_UNKNOWN && op < EGI_OP_COUNT && kernels[op].run != NULL ? &kernels[op] : NULL;
}
