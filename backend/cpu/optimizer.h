/* What the kernels of the optimizer's operators share. */
#ifndef ENGRAFT_BACKEND_CPU_OPTIMIZER_H
#define ENGRAFT_BACKEND_CPU_OPTIMIZER_H

#include "backend/cpu/cpu.h"

/* Whether that input is a step state. */
eg_status egi_check_step(const egi_kernel_plan *plan, unsigned input);
/* What gradients are multiplied by: 1 / trained tokens, and what clips them to the step's norm. */
float egi_gradient_factor(const egi_step_state *step, float norm);
/* AdamW over gradients and parameters [start, start + n) of AdamW's or AdamW8bit's operands, its moments at `moments`;
 * `rate` and `decay` multiply the step state's. */
typedef struct egi_adamw_piece {
  int64_t start, n;
  float *moments[2];
  float rate, decay, gradient_factor;
} egi_adamw_piece;
void egi_adamw_update(const egi_kernel_call *call, const egi_adamw_piece *piece);

#endif
