/* Shared by the files of engraft.MoE: what is planned, and the activation. */
#ifndef ENGRAFT_BACKEND_CPU_MOE_H
#define ENGRAFT_BACKEND_CPU_MOE_H

#include "backend/cpu/ragged.h"
#include "backend/cpu/route.h"

typedef struct egi_moe_params {
  egi_router router;
  egi_ragged gate, up, down;
  const egi_isa *isa;
  eg_dtype dtype;
  size_t element_bytes;
  int64_t width, n_rows;       /* H, T·k */
  int64_t inner;               /* columns of down's operand */
  int64_t gate_rows, hidden;   /* of gate's matrices; columns of the products with gate and up */
  size_t lists, route, weight; /* workspace: expert, source_row, inverse and offsets; scores; weight of each row */
  size_t wide, saved, middle, low, scratch; /* low: rows times A of an adapter */
  int64_t longest_rank;
  size_t scratch_bytes; /* of a worker */
} egi_moe_params;

/* moe_glu.c: middle [T·k, inner] = act(gate) · (up + offset) of saved [T·k, hidden]. */
void egi_moe_activate(const egi_moe_params *p, const egi_kernel_call *call, const char *saved, char *middle);

#endif
