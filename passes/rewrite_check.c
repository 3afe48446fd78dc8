/* Compares a graph's outputs on made-up input before and after a pass. Sizes: "batch" 2, caches empty, everything else
 * 5; token ids stay inside the smallest table that they index. Called by the pipeline only. */
#include <math.h>
#include <string.h>

#include "passes/passes.h"

struct egi_rewrite_check {
  egi_arena arena;
  const egi_graph *graph;
  egi_tensor *inputs;
  uint32_t n_inputs, n_outputs;
  const char **names; /* of the outputs before the pass */
  egi_tensor *outputs;
};

enum { SIZE_BATCH = 2, SIZE_OTHER = 5 };

/* NULL when sizes contradict what the graph assumes. */
static egi_binding *bind_symbols(egi_dims *dims, egi_arena *arena, size_t *out_count) {
  size_t count = egi_dims_symbol_count(dims);
  egi_binding *bindings = EGI_NEW(arena, egi_binding, count);
  if (!bindings) return NULL;
  for (size_t i = 0; i < count; i++) {
    const char *name = NULL;
    bindings[i].symbol = egi_dims_symbol_at(dims, i, &name);
    bool is_cache = strstr(name, "past") && !strstr(name, "total");
    bindings[i].value = is_cache ? 0 : strstr(name, "batch") ? SIZE_BATCH : SIZE_OTHER;
  }
  *out_count = count;
  return egi_dims_check(dims, bindings, count) ? NULL : bindings;
}

/* Numbers below this are valid indices wherever the graph gathers with the input itself. */
static int64_t index_bound(const egi_graph *graph, egi_value_id input) {
  int64_t bound = 0;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op != EGI_OP_Gather || node->inputs[1] != input) continue;
    int64_t size = 0;
    const egi_value *data = &graph->values[node->inputs[0]];
    if (data->rank > 0 && egi_dim_value(graph->module->dims, data->dims[0], &size) && size > 0)
      bound = bound == 0 || size < bound ? size : bound;
  }
  return bound > 0 ? bound : 2;
}

static bool store_integer(egi_tensor *tensor, int64_t i, int64_t value) {
  switch (tensor->dtype) {
  case EG_DTYPE_I64:
    ((int64_t *)tensor->data)[i] = value;
    return true;
  case EG_DTYPE_I32:
    ((int32_t *)tensor->data)[i] = (int32_t)value;
    return true;
  case EG_DTYPE_BOOL:
    ((uint8_t *)tensor->data)[i] = value != 0;
    return true;
  default:
    return false;
  }
}

static bool store_float(egi_tensor *tensor, int64_t i, double value) {
  switch (tensor->dtype) {
  case EG_DTYPE_F32:
    ((float *)tensor->data)[i] = (float)value;
    return true;
  case EG_DTYPE_F64:
    ((double *)tensor->data)[i] = value;
    return true;
  case EG_DTYPE_F16:
    ((uint16_t *)tensor->data)[i] = egi_f32_to_f16((float)value);
    return true;
  case EG_DTYPE_BF16:
    ((uint16_t *)tensor->data)[i] = egi_f32_to_bf16((float)value);
    return true;
  default:
    return false;
  }
}

static double load_number(const egi_tensor *tensor, int64_t i) {
  switch (tensor->dtype) {
  case EG_DTYPE_F32:
    return (double)((const float *)tensor->data)[i];
  case EG_DTYPE_F64:
    return ((const double *)tensor->data)[i];
  case EG_DTYPE_F16:
    return (double)egi_f16_to_f32(((const uint16_t *)tensor->data)[i]);
  case EG_DTYPE_BF16:
    return (double)egi_bf16_to_f32(((const uint16_t *)tensor->data)[i]);
  case EG_DTYPE_I64:
    return (double)((const int64_t *)tensor->data)[i];
  case EG_DTYPE_I32:
    return (double)((const int32_t *)tensor->data)[i];
  case EG_DTYPE_BOOL:
    return (double)((const uint8_t *)tensor->data)[i];
  default:
    return 0.0;
  }
}

static bool fill_input(const egi_graph *graph, egi_value_id input, egi_tensor *tensor) {
  const char *name = graph->values[input].name;
  int64_t count = egi_tensor_count(tensor), bound = index_bound(graph, input);
  int64_t last = tensor->rank > 0 ? tensor->dims[tensor->rank - 1] : 1;
  for (int64_t i = 0; i < count; i++) {
    bool is_stored;
    if (egi_dtype_is_float(tensor->dtype)) {
      is_stored = store_float(tensor, i, egi_random_normal(1, input, (uint64_t)i));
    } else if (strstr(name, "mask") || tensor->dtype == EG_DTYPE_BOOL) {
      is_stored = store_integer(tensor, i, 1);
    } else if (strstr(name, "position")) {
      is_stored = store_integer(tensor, i, i % last);
    } else {
      is_stored = store_integer(tensor, i, (int64_t)(egi_random_uniform(1, input, (uint64_t)i) * (double)bound));
    }
    if (!is_stored) return false;
  }
  return true;
}

static bool make_input(const egi_graph *graph, egi_value_id input, const egi_binding *bindings, size_t n_bindings,
                       egi_rewrite_check *check) {
  const egi_value *value = &graph->values[input];
  egi_tensor *tensor = &check->inputs[value->index];
  if (value->rank < 0) return false;
  *tensor = (egi_tensor){.dtype = value->dtype, .rank = value->rank};
  uint64_t count = 1, size_bytes = 0;
  for (int d = 0; d < value->rank; d++) {
    if (!egi_dim_evaluate(graph->module->dims, value->dims[d], bindings, n_bindings, &tensor->dims[d])) return false;
    if (tensor->dims[d] < 0 || tensor->dims[d] > 4096) return false;
    count *= (uint64_t)tensor->dims[d];
    if (count > 1u << 24) return false;
  }
  egi_tensor_set_contiguous(tensor);
  if (!egi_dtype_bytes(tensor->dtype, count, &size_bytes)) return false;
  tensor->data = egi_arena_get(&check->arena, (size_t)size_bytes, 1);
  return tensor->data && fill_input(graph, input, tensor);
}

static bool has_state(const egi_graph *graph) {
  for (egi_value_id id = 1; id < graph->n_values; id++) {
    if (graph->values[id].kind == EGI_VALUE_STATE) return true;
  }
  return false;
}

/* Inputs and outputs before the pass; false when the graph cannot be run. */
static bool run_before(egi_rewrite_check *check, const egi_graph *graph) {
  const egi_module *module = graph->module;
  size_t n_bindings = 0;
  if (!module->evaluator || has_state(graph)) return false;
  egi_binding *bindings = bind_symbols(module->dims, &check->arena, &n_bindings);
  check->inputs = EGI_NEW(&check->arena, egi_tensor, graph->n_inputs);
  check->outputs = EGI_NEW(&check->arena, egi_tensor, graph->n_outputs);
  check->names = EGI_NEW(&check->arena, const char *, graph->n_outputs);
  if (!bindings || !check->inputs || !check->outputs || !check->names) return false;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    if (!make_input(graph, graph->inputs[i], bindings, n_bindings, check)) return false;
  }
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    const char *name = graph->values[graph->outputs[i]].name;
    check->names[i] = egi_arena_copy_text(&check->arena, name, strlen(name));
    if (!check->names[i]) return false;
  }
  check->n_inputs = graph->n_inputs;
  check->n_outputs = graph->n_outputs;
  return module->evaluator->graph(module->ctx, graph, check->inputs, &check->arena, check->outputs) == EG_OK;
}

eg_status egi_rewrite_check_begin(const egi_graph *graph, egi_rewrite_check **out_check) {
  egi_arena arena;
  egi_arena_init(&arena, graph->module->ctx, EGI_PURPOSE_GRAPH);
  egi_rewrite_check *check = EGI_NEW(&arena, egi_rewrite_check, 1);
  *out_check = NULL;
  if (!check) return EG_ERROR_MEMORY;
  check->arena = arena;
  check->graph = graph;
  if (run_before(check, graph)) {
    *out_check = check;
  } else {
    egi_log(graph->module->ctx, EG_LOG_INFO, "a rewrite is not verified: the graph cannot be run on its own");
    egi_arena last = check->arena; /* the arena holds the check itself */
    egi_arena_clear(&last);
  }
  return EG_OK;
}

void egi_rewrite_check_free(egi_rewrite_check *check) {
  if (!check) return;
  egi_arena last = check->arena; /* the arena holds the check itself */
  egi_arena_clear(&last);
}

/* Largest difference allowed, relative to the largest magnitude: rounding in another order. */
static double tolerance(eg_dtype before, eg_dtype after) {
  bool is_half = before == EG_DTYPE_F16 || before == EG_DTYPE_BF16 || after == EG_DTYPE_F16 || after == EG_DTYPE_BF16;
  return is_half ? 3e-2 : before == EG_DTYPE_F64 ? 1e-9 : 1e-4;
}

static bool is_close(const egi_tensor *before, const egi_tensor *after) {
  int64_t count = egi_tensor_count(before);
  if (before->rank != after->rank || count != egi_tensor_count(after)) return false;
  double largest = 0.0;
  for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(load_number(before, i)));
  double limit = tolerance(before->dtype, after->dtype) * (isfinite(largest) ? largest : 1.0) + 1e-6;
  for (int64_t i = 0; i < count; i++) {
    double a = load_number(before, i), b = load_number(after, i);
    if (a == b || (isnan(a) && isnan(b))) continue;
    if (!(fabs(a - b) <= limit)) return false;
  }
  return true;
}

eg_status egi_rewrite_check_end(egi_rewrite_check *check, const egi_graph *graph, const char *pass) {
  if (!check || graph->n_inputs != check->n_inputs || has_state(graph)) return EG_OK;
  eg_context *ctx = graph->module->ctx;
  egi_tensor *outputs = EGI_NEW(&check->arena, egi_tensor, graph->n_outputs);
  if (!outputs) return EG_ERROR_MEMORY;
  EG_TRY(graph->module->evaluator->graph(ctx, graph, check->inputs, &check->arena, outputs));
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    const char *name = graph->values[graph->outputs[i]].name;
    for (uint32_t k = 0; k < check->n_outputs; k++) {
      if (strcmp(check->names[k], name) != 0) continue;
      if (!is_close(&check->outputs[k], &outputs[i]))
        return egi_fail(ctx, EG_ERROR_INTERNAL, "pass %s changed output \"%s\"", pass, name);
    }
  }
  return EG_OK;
}
