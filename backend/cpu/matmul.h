/* Matrix products with an addend, for the operators that are one. */
#ifndef ENGRAFT_BACKEND_CPU_MATMUL_H
#define ENGRAFT_BACKEND_CPU_MATMUL_H

#include "backend/cpu/cpu.h"

enum { EGI_OPERAND_A, EGI_OPERAND_B, EGI_OPERAND_C, EGI_OPERAND_ADDEND, EGI_OPERAND_COUNT };

/* C = beta·addend + alpha·A·B: which inputs the operands are (-1: none; C is output 0). */
typedef struct egi_matmul_spec {
  int tensors[EGI_OPERAND_COUNT];
  bool transpose_a, transpose_b;
  double alpha, beta;
} egi_matmul_spec;

/* Sets the plan's params and workspace; egi_cpu_run_matmul() runs it. */
eg_status egi_matmul_prepare(egi_kernel_plan *plan, const egi_matmul_spec *spec);

#endif
