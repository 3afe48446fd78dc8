/* Names of what a session gives a device, for profilers: a layer and a pass, as long as steps stay in it. */
#include <ctype.h>

#include "backend/plan.h"

/* "model.layers.3" of "model.layers.3.self_attn.q_proj": up to the first number in a module path, or all of it. */
static size_t layer_length(const char *scope) {
  for (const char *at = strchr(scope, '.'); at != NULL; at = strchr(at + 1, '.')) {
    size_t digits = 0;
    while (isdigit((unsigned char)at[1 + digits])) digits++;
    if (digits > 0 && (at[1 + digits] == '.' || at[1 + digits] == '\0')) return (size_t)(at - scope) + 1 + digits;
  }
  return strlen(scope);
}

void egi_range_begin(egi_range *range, const egi_plan *plan) {
  *range = (egi_range){.plan = plan, .mark = plan->backend->range};
}

void egi_range_step(egi_range *range, const egi_step *step) {
  char name[sizeof range->name];
  if (range->mark == NULL || step->node == 0) return;
  const egi_node *node = &range->plan->graph->nodes[step->node];
  const char *scope = node->scope != NULL ? node->scope : "";
  range->is_backward = range->is_backward || egi_has_suffix(egi_op_get(node->op)->name, "Grad");
  (void)snprintf(name, sizeof name, "%.*s %s", (int)layer_length(scope), scope,
                 range->is_backward ? "backward" : "forward");
  if (range->is_open && strcmp(name, range->name) == 0) return;
  egi_range_end(range);
  memcpy(range->name, name, sizeof name);
  range->is_open = true;
  range->mark(range->name);
}

void egi_range_end(egi_range *range) {
  if (range->is_open) range->mark(NULL);
  range->is_open = false;
}
