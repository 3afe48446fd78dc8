/* Made-up inputs of a graph: for --verify-rewrites and for passes that ask what a graph computes. Numbers are normal,
 * token ids stay inside the smallest table that they index, masks and positions are those of a padded batch. */
#include <math.h>
#include <string.h>

#include "passes/passes.h"

/* Names of the token input's dims, when they are symbols: exporters call them s0 and s77 too. */
typedef struct axes {
  egi_dim batch, sequence;
} axes;

static axes find_axes(const egi_graph *graph) {
  egi_value_id tokens = egi_graph_find_value(graph, "input_ids");
  if (tokens == 0 || graph->values[tokens].kind != EGI_VALUE_INPUT || graph->values[tokens].rank != 2)
    return (axes){EGI_DIM_NONE, EGI_DIM_NONE};
  return (axes){graph->values[tokens].dims[0], graph->values[tokens].dims[1]};
}

/* A mask may have symbols of its own for batch and sequence. */
static bool is_of_matrix(const egi_graph *graph, egi_dim symbol, int axis) {
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const egi_value *value = &graph->values[graph->inputs[i]];
    if (value->rank == 2 && value->dims[axis] == symbol) return true;
  }
  return false;
}

static int64_t size_of(const egi_graph *graph, const axes *known, const egi_sample_sizes *sample, egi_dim symbol,
                       const char *name) {
  if (symbol == known->batch) return sample->batch;
  if (symbol == known->sequence) return sample->sequence;
  if (is_of_matrix(graph, symbol, 0)) return sample->batch;
  if (strstr(name, "past") && !strstr(name, "total")) return 0;
  return strstr(name, "batch") ? sample->batch : sample->sequence;
}

/* NULL when sizes contradict what the graph assumes. */
static egi_binding *bind_symbols(const egi_graph *graph, const egi_sample_sizes *sample, egi_arena *arena,
                                 size_t *out_count) {
  egi_dims *dims = graph->module->dims;
  size_t count = egi_dims_symbol_count(dims);
  egi_binding *bindings = EGI_NEW(arena, egi_binding, count);
  axes known = find_axes(graph);
  if (!bindings) return NULL;
  for (size_t i = 0; i < count; i++) {
    const char *name = NULL;
    bindings[i].symbol = egi_dims_symbol_at(dims, i, &name);
    if (!egi_dim_value(dims, egi_dim_resolve(dims, bindings[i].symbol), &bindings[i].value))
      bindings[i].value = size_of(graph, &known, sample, bindings[i].symbol, name);
  }
  *out_count = count;
  return egi_dims_check(dims, bindings, count) ? NULL : bindings;
}

bool egi_sample_is_padding(const egi_sample_sizes *sample, int64_t row, int64_t position) {
  if (sample->n_padded == 0 || row != sample->batch - 1) return false;
  return sample->is_left_padded ? position < sample->n_padded : position >= sample->sequence - sample->n_padded;
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

/* 0, 1, 2, ... in each row; left-padded rows count from their first token. */
static int64_t position_at(const egi_sample_sizes *sample, int64_t row, int64_t position) {
  if (!sample->is_left_padded || sample->n_padded == 0 || row != sample->batch - 1) return position;
  return position < sample->n_padded ? 0 : position - sample->n_padded;
}

/* Where and how far a cache is filled: at the start of it, with the sequence. */
static bool is_place(const char *name) {
  return strstr(name, "write_ind") != NULL;
}
static bool is_length(const char *name) {
  return strstr(name, "seqlen") != NULL;
}

static int64_t integer_at(const egi_graph *graph, egi_value_id input, const egi_sample_sizes *sample,
                          const egi_tensor *tensor, int64_t i) {
  const char *name = graph->values[input].name;
  int64_t last = tensor->rank > 0 ? tensor->dims[tensor->rank - 1] : 1;
  int64_t row = tensor->rank > 1 && last > 0 ? i / last % tensor->dims[tensor->rank - 2] : 0;
  if (strstr(name, "mask") || tensor->dtype == EG_DTYPE_BOOL) return !egi_sample_is_padding(sample, row, i % last);
  if (is_place(name) || is_length(name)) return is_length(name) ? sample->sequence : 0;
  return position_at(sample, row, i % last);
}

static bool fill_input(const egi_graph *graph, egi_value_id input, const egi_sample_sizes *sample, egi_tensor *tensor) {
  const char *name = graph->values[input].name;
  int64_t count = egi_tensor_count(tensor), bound = index_bound(graph, input);
  bool is_placed = strstr(name, "position") || is_place(name) || is_length(name);
  bool is_ruled =
      strstr(name, "mask") || (is_placed && !egi_dtype_is_float(tensor->dtype)) || tensor->dtype == EG_DTYPE_BOOL;
  for (int64_t i = 0; i < count; i++) {
    double number = egi_random_normal(sample->seed, input, (uint64_t)i);
    if (is_ruled)
      number = (double)integer_at(graph, input, sample, tensor, i);
    else if (!egi_dtype_is_float(tensor->dtype))
      number = floor(egi_random_uniform(sample->seed, input, (uint64_t)i) * (double)bound);
    if (!egi_tensor_set(tensor, i, number)) return false;
  }
  return true;
}

static bool make_input(const egi_graph *graph, egi_value_id input, const egi_sample_sizes *sample,
                       const egi_binding *bindings, size_t n_bindings, egi_arena *arena, egi_tensor *tensor) {
  const egi_value *value = &graph->values[input];
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
  tensor->data = egi_arena_get(arena, (size_t)size_bytes, 1);
  return tensor->data && fill_input(graph, input, sample, tensor);
}

egi_tensor *egi_sample_inputs(const egi_graph *graph, const egi_sample_sizes *sample, egi_arena *arena) {
  size_t n_bindings = 0;
  egi_binding *bindings = bind_symbols(graph, sample, arena, &n_bindings);
  egi_tensor *inputs = EGI_NEW(arena, egi_tensor, graph->n_inputs);
  if (!bindings || !inputs) return NULL;
  for (uint32_t i = 0; i < graph->n_inputs; i++)
    if (!make_input(graph, graph->inputs[i], sample, bindings, n_bindings, arena, &inputs[i])) return NULL;
  return inputs;
}
