/* Sizes of a graph's symbols from tensors that are given for its values. Called by the evaluator and by those who plan
 * for given inputs. */
#include <inttypes.h>

#include "backend/plan.h"

static bool is_symbol(const egi_dims *dims, egi_dim dim) {
  const char *name = NULL;
  for (size_t i = 0, n = egi_dims_symbol_count(dims); i < n; i++) {
    if (egi_dims_symbol_at(dims, i, &name) == dim) return true;
  }
  return false;
}

eg_status egi_bind_value(const egi_graph *graph, egi_value_id id, const egi_tensor *tensor, egi_arena *arena,
                         egi_binding_list *list) {
  const egi_value *value = &graph->values[id];
  eg_context *ctx = graph->module->ctx;
  if (value->dtype != tensor->dtype || (value->rank >= 0 && value->rank != tensor->rank)) {
    return egi_fail(ctx, EG_ERROR_SHAPE, "\"%s\" is given as %s of rank %d, the graph has %s of rank %d", value->name,
                    egi_dtype_name(tensor->dtype), tensor->rank, egi_dtype_name(value->dtype), value->rank);
  }
  for (int i = 0; i < value->rank; i++) {
    int64_t number = tensor->dims[i];
    egi_dim dim = value->dims[i];
    bool is_number = egi_dim_value(graph->module->dims, dim, &number), is_bound = is_number;
    if (dim == EGI_DIM_NONE) continue;
    for (uint32_t k = 0; k < list->n && !is_number; k++) {
      if (list->bindings[k].symbol != dim) continue;
      number = list->bindings[k].value;
      is_bound = true;
    }
    if (number != tensor->dims[i]) {
      return egi_fail(ctx, EG_ERROR_SHAPE, "\"%s\": dimension %d is %" PRId64 " where %" PRId64 " is needed",
                      value->name, i, tensor->dims[i], number);
    }
    if (is_bound || !is_symbol(graph->module->dims, dim)) continue; /* expressions are checked by the plan */
    EG_TRY(EGI_GROW(arena, &list->bindings, list->n, &list->capacity));
    list->bindings[list->n++] = (egi_binding){dim, number};
  }
  return EG_OK;
}

eg_status egi_bindings_solve(const egi_graph *graph, const egi_tensor *inputs, egi_arena *arena,
                             egi_binding **out_bindings, size_t *out_count) {
  egi_binding_list list = {0};
  for (uint32_t i = 0; i < graph->n_inputs; i++)
    EG_TRY(egi_bind_value(graph, graph->inputs[i], &inputs[i], arena, &list));
  *out_bindings = list.bindings;
  *out_count = list.n;
  return EG_OK;
}
