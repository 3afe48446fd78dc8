/* Ranges for profilers (NVTX): what the host is giving the streams. Without a profiler they cost a call each. */
#include "backend/cuda/device.h"

#ifdef EGI_HAS_NVTX
#include <nvtx3/nvToolsExt.h>

void egi_cuda_range(const char *name) {
  if (name != NULL)
    (void)nvtxRangePushA(name);
  else
    (void)nvtxRangePop();
}
#endif
