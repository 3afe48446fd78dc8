/* The parts of name_modules. */
#ifndef ENGRAFT_PASSES_NAME_MODULES_H
#define ENGRAFT_PASSES_NAME_MODULES_H

#include "passes/passes.h"

/* Scopes of linear layers that have none, from what they feed. */
eg_status egi_name_by_structure(egi_graph *graph, egi_arena *arena);

#endif
