/* Matrix products with an addend, for the operators that are one. */
#ifndef ENGRAFT_BACKEND_CPU_MATMUL_H
#define ENGRAFT_BACKEND_CPU_MATMUL_H

#include "backend/cpu/cpu.h"
#include "backend/matmul.h"

/* Sets the plan's params and workspace; egi_cpu_run_matmul() runs it. */
eg_status egi_matmul_prepare(egi_kernel_plan *plan, const egi_matmul_spec *spec);

#endif
