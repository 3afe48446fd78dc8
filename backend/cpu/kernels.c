/* The kernel structs of kernels.def and the table by operator, which refers to every row of ops.def: an operator
 * without a kernel does not link. */
#include "backend/cpu/cpu.h"

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
  const egi_kernel egi_cpu_kernel_##symbol = {#symbol, flags, egi_cpu_prepare_##prepare, egi_cpu_run_##run, NULL};
#define KERNEL_MEASURED(symbol, prepare, run, flags, measure)                                               \
  const egi_kernel egi_cpu_kernel_##symbol = {#symbol, flags, egi_cpu_prepare_##prepare, egi_cpu_run_##run, \
                                              egi_cpu_measure_##measure};
#include "backend/cpu/kernels.def"
#undef KERNEL_MEASURED
#undef KERNEL
#undef TILE

static const egi_kernel *const kernels[EGI_OP_COUNT] = {
#define EGI_OP(symbol, domain, name, version, in_min, in_max, out_min, out_max, flags, shape, gradient) \
  [EGI_OP_##symbol] = &egi_cpu_kernel_##symbol,
#include "graph/ops.def"
#undef EGI_OP
};

const egi_kernel *egi_cpu_find_kernel(egi_op op) {
  return op > EGI_OP_UNKNOWN && op < EGI_OP_COUNT ? kernels[op] : NULL;
}
