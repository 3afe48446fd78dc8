/* First part of planning: which nodes are needed, concrete types of their values, contents known at these bindings, and
 * what depends on no input and no state. Called by egi_plan_create. */
#include <inttypes.h>

#include "backend/plan.h"

enum { CACHE_SIZE = 1024 };

/* Dims repeat all over a graph: a small direct-mapped cache over evaluation. */
typedef struct evaluation {
  egi_planner *planner;
  egi_dim dims[CACHE_SIZE];
  int64_t values[CACHE_SIZE];
} evaluation;

static bool evaluate_dim(evaluation *run, egi_dim dim, int64_t *out_value) {
  if (dim == EGI_DIM_NONE) return false;
  egi_planner *planner = run->planner;
  uint32_t slot = dim % CACHE_SIZE;
  if (run->dims[slot] == dim) {
    *out_value = run->values[slot];
    return true;
  }
  egi_dims *dims = planner->graph->module->dims;
  const egi_plan_options *options = planner->options;
  if (!egi_dim_evaluate(dims, dim, options->bindings, options->n_bindings, out_value)) return false;
  run->dims[slot] = dim;
  run->values[slot] = *out_value;
  return true;
}

static bool is_bound(const egi_plan_options *options, egi_dim symbol) {
  for (size_t i = 0; i < options->n_bindings; i++) {
    if (options->bindings[i].symbol == symbol) return true;
  }
  return false;
}

/* The symbol for want of which `dim` has no number: all unbound ones are bound to 1, each is left out in turn. */
static eg_status find_missing_symbol(egi_planner *planner, egi_dim dim, const char **out_name) {
  egi_dims *dims = planner->graph->module->dims;
  const egi_plan_options *options = planner->options;
  size_t n_symbols = egi_dims_symbol_count(dims), n = options->n_bindings;
  egi_binding *all = EGI_NEW(&planner->arena, egi_binding, n + n_symbols + 1);
  const char **names = EGI_NEW(&planner->arena, const char *, n + n_symbols + 1);
  if (all == NULL || names == NULL) return EG_ERROR_MEMORY;
  if (n > 0) memcpy(all, options->bindings, n * sizeof(*all));
  for (size_t i = 0; i < n_symbols; i++) {
    const char *name = NULL;
    egi_dim symbol = egi_dims_symbol_at(dims, i, &name);
    if (is_bound(options, symbol)) continue;
    names[n] = name;
    all[n++] = (egi_binding){.symbol = symbol, .value = 1};
  }
  *out_name = NULL;
  for (size_t i = options->n_bindings; i < n; i++) {
    egi_binding left_out = all[i];
    int64_t value = 0;
    all[i] = all[n - 1];
    if (!egi_dim_evaluate(dims, dim, all, n - 1, &value)) *out_name = names[i];
    all[i] = left_out;
    if (*out_name != NULL) return EG_OK;
  }
  return EG_OK;
}

static void note_dynamic(const egi_planner *planner) {
  if (planner->options->out_is_dynamic != NULL) *planner->options->out_is_dynamic = true;
}

static eg_status fail_dim(egi_planner *planner, egi_value_id value, egi_dim dim) {
  const char *name = planner->graph->values[value].name, *symbol = NULL;
  if (dim == EGI_DIM_NONE) {
    note_dynamic(planner);
    return egi_fail(planner->ctx, EG_ERROR_SHAPE, "value \"%s\": its shape is not known before the graph runs", name);
  }
  EG_TRY(find_missing_symbol(planner, dim, &symbol));
  if (symbol == NULL) note_dynamic(planner);
  if (symbol != NULL) {
    return egi_fail(planner->ctx, EG_ERROR_ARGUMENT, "value \"%s\": no size is given for the dimension \"%s\"", name,
                    symbol);
  }
  egi_text text;
  egi_text_init(&text, planner->ctx);
  egi_dim_print(planner->graph->module->dims, dim, &text);
  eg_status status = egi_fail(planner->ctx, EG_ERROR_SHAPE, "value \"%s\": the dimension %s cannot be computed", name,
                              egi_text_string(&text));
  egi_text_free(&text);
  return status;
}

static eg_status resolve_value(evaluation *run, egi_value_id id) {
  egi_planner *planner = run->planner;
  const egi_value *value = &planner->graph->values[id];
  egi_tensor *tensor = &planner->values[id].tensor;
  if (tensor->dtype != EG_DTYPE_UNDEFINED) return EG_OK;
  if (value->rank < 0 || value->rank > EGI_MAX_RANK) return fail_dim(planner, id, EGI_DIM_NONE);
  if (!egi_dtype_is_known((int64_t)value->dtype)) {
    note_dynamic(planner);
    return egi_fail(planner->ctx, EG_ERROR_SHAPE, "value \"%s\": its type is not known", value->name);
  }
  uint64_t count = 1, size_bytes = 0;
  for (int i = 0; i < value->rank; i++) {
    int64_t dim = 0;
    if (!evaluate_dim(run, value->dims[i], &dim)) return fail_dim(planner, id, value->dims[i]);
    if (dim < 0) {
      return egi_fail(planner->ctx, EG_ERROR_SHAPE, "value \"%s\": dimension %d would be %" PRId64, value->name, i,
                      dim);
    }
    if (dim > 0 && count > (uint64_t)INT64_MAX / (uint64_t)dim) {
      return egi_fail(planner->ctx, EG_ERROR_SHAPE, "value \"%s\" is too large", value->name);
    }
    count *= (uint64_t)dim;
    tensor->dims[i] = dim;
  }
  if (!egi_dtype_bytes(value->dtype, count, &size_bytes) || size_bytes > (uint64_t)INT64_MAX / 2) {
    return egi_fail(planner->ctx, EG_ERROR_SHAPE, "value \"%s\" is too large", value->name);
  }
  tensor->rank = value->rank;
  tensor->dtype = value->dtype;
  egi_tensor_set_contiguous(tensor);
  return EG_OK;
}

static bool write_integer(eg_dtype dtype, int64_t value, void *memory, uint32_t index) {
  switch (dtype) {
  case EG_DTYPE_I64:
    ((int64_t *)memory)[index] = value;
    return true;
  case EG_DTYPE_I32:
    ((int32_t *)memory)[index] = (int32_t)value;
    return value == (int32_t)value;
  case EG_DTYPE_BOOL:
    ((uint8_t *)memory)[index] = (uint8_t)(value != 0);
    return true;
  default:
    return false;
  }
}

/* Contents of an integer value at these bindings, as bytes of a KNOWN storage; nothing when some stay open. */
static eg_status resolve_known(evaluation *run, egi_value_id id) {
  egi_planner *planner = run->planner;
  const egi_value *value = &planner->graph->values[id];
  uint32_t element_bytes = egi_whole_bytes(value->dtype), storage = 0;
  if (value->kind != EGI_VALUE_NODE || value->elements == NULL || element_bytes == 0 || value->rank > 1) return EG_OK;
  if (value->rank < 0 || (value->rank == 0 && value->n_elements != 1)) return EG_OK;
  void *bytes = egi_arena_get(&planner->plan->arena, (size_t)value->n_elements + 1, 8);
  if (bytes == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < value->n_elements; i++) {
    int64_t element = 0;
    if (!evaluate_dim(run, value->elements[i], &element)) return EG_OK;
    if (!write_integer(value->dtype, element, bytes, i)) return EG_OK;
  }
  EG_TRY(egi_plan_add_storage(planner, EGI_STORAGE_KNOWN, (uint64_t)value->n_elements * element_bytes, &storage));
  planner->plan->storages[storage].bytes = bytes;
  planner->is_known[id] = true;
  planner->values[id].storage = storage;
  return EG_OK;
}

/* Known values have their count from their contents, whatever the dims say. */
static eg_status check_known(egi_planner *planner, egi_value_id id) {
  const egi_value *value = &planner->graph->values[id];
  if (egi_tensor_count(&planner->values[id].tensor) == (int64_t)value->n_elements) return EG_OK;
  return egi_fail(planner->ctx, EG_ERROR_SHAPE, "value \"%s\": %" PRIu32 " elements do not fit its shape", value->name,
                  value->n_elements);
}

static bool has_effect(const egi_planner *planner, const egi_node *node) {
  if (egi_op_get(node->op)->flags & EGI_OP_EFFECT) return true;
  const egi_kernel *kernel = planner->backend->find_kernel(node->op);
  return kernel != NULL && (kernel->flags & EGI_KERNEL_UPDATES_0);
}

static bool has_open_output(const egi_planner *planner, const egi_node *node) {
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    egi_value_id value = node->outputs[i];
    if (value != 0 && planner->is_live[value] && !planner->is_known[value]) return true;
  }
  return false;
}

/* Backwards from outputs and effects; contents that are known need nobody to compute them. */
static void mark_needed(egi_planner *planner) {
  const egi_graph *graph = planner->graph;
  for (uint32_t i = 0; i < graph->n_outputs; i++) planner->is_live[graph->outputs[i]] = true;
  for (egi_node_id id = graph->n_nodes; id-- > 1;) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_NONE) continue;
    bool is_needed = has_open_output(planner, node) || (node->op != EGI_OP_UNKNOWN && has_effect(planner, node));
    planner->is_needed[id] = is_needed;
    for (uint32_t i = 0; is_needed && i < node->n_inputs; i++) planner->is_live[node->inputs[i]] = true;
  }
  planner->is_live[0] = false;
}

static eg_status resolve_node(evaluation *run, egi_node_id id) {
  egi_planner *planner = run->planner;
  const egi_node *node = &planner->graph->nodes[id];
  bool is_fixed = node->op == EGI_OP_UNKNOWN || !has_effect(planner, node);
  if (node->op == EGI_OP_If || node->op == EGI_OP_Loop || node->op == EGI_OP_Scan) {
    note_dynamic(planner);
    return egi_fail_node(planner->graph, id, EG_ERROR_UNSUPPORTED,
                         "what it runs is decided by data, which a plan cannot follow");
  }
  for (uint32_t i = 0; i < node->n_inputs; i++) {
    egi_value_id value = node->inputs[i];
    if (value == 0) continue;
    EG_TRY(resolve_value(run, value));
    if (planner->is_known[value]) EG_TRY(check_known(planner, value));
    if (!planner->is_known[value] && !planner->is_fixed[value]) is_fixed = false;
  }
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    egi_value_id value = node->outputs[i];
    if (value == 0) continue;
    EG_TRY(resolve_value(run, value));
    planner->is_fixed[value] = is_fixed;
  }
  return EG_OK;
}

bool egi_plan_integers(const egi_planner *planner, egi_value_id value, int64_t *out, uint32_t capacity,
                       uint32_t *out_count) {
  if (value == 0) return false;
  if (!planner->is_known[value]) return egi_value_integers(planner->graph, value, out, capacity, out_count);
  const void *bytes = planner->plan->storages[planner->values[value].storage].bytes;
  eg_dtype dtype = planner->graph->values[value].dtype;
  uint32_t count = planner->graph->values[value].n_elements;
  if (count > capacity || (dtype != EG_DTYPE_I64 && dtype != EG_DTYPE_I32)) return false;
  for (uint32_t i = 0; i < count; i++) {
    out[i] = dtype == EG_DTYPE_I64 ? ((const int64_t *)bytes)[i] : ((const int32_t *)bytes)[i];
  }
  *out_count = count;
  return true;
}

eg_status egi_plan_shapes(egi_planner *planner) {
  const egi_graph *graph = planner->graph;
  evaluation *run = EGI_NEW(&planner->arena, evaluation, 1);
  if (run == NULL) return EG_ERROR_MEMORY;
  run->planner = planner;
  for (egi_value_id id = 1; id < graph->n_values; id++) {
    EG_TRY(resolve_known(run, id));
    planner->is_fixed[id] = graph->values[id].kind == EGI_VALUE_WEIGHT;
  }
  mark_needed(planner);
  for (uint32_t i = 0; i < graph->n_inputs; i++) EG_TRY(resolve_value(run, graph->inputs[i]));
  const char *violated = egi_dims_check(graph->module->dims, planner->options->bindings, planner->options->n_bindings);
  if (violated != NULL) {
    return egi_fail(planner->ctx, EG_ERROR_SHAPE, "graph \"%s\" does not work with these sizes: %s does not hold",
                    graph->name != NULL ? graph->name : "", violated);
  }
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    if (planner->is_needed[id]) EG_TRY(resolve_node(run, id));
  }
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    EG_TRY(resolve_value(run, graph->outputs[i]));
    if (planner->is_known[graph->outputs[i]]) EG_TRY(check_known(planner, graph->outputs[i]));
  }
  return EG_OK;
}
