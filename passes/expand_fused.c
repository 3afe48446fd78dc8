/* --no-fuse: every fused operator becomes its body of plain operators, which then run and are differentiated in its
 * place. Runs after recognition, names and adapters, before differentiation. Ends because bodies hold no fused
 * operators. */
#include "passes/passes.h"

eg_status egi_pass_expand_fused(egi_pass_run *run, egi_graph *graph) {
  uint32_t count = 0;
  EG_TRY(egi_graph_call_bodies(graph, EGI_BODIES_FUSED, &count));
  run->report->n_matched = count;
  if (count == 0) return EG_OK;
  egi_pass_report inlining = {0};
  egi_pass_run inner = {.ctx = run->ctx, .report = &inlining};
  run->has_changed = true;
  EG_TRY(egi_pass_inline_functions(&inner, graph));
  return EG_OK;
}
