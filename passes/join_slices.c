/* Tensors that are made empty and then filled slice by slice become one Concat: ScatterND upon ScatterND along one
 * axis, until the slices cover it, as exporters write `k = empty; k[.., :n] = a; k[.., n:] = b`. Indices are rows of
 * the first axis, or a grid of full ranges but for one axis. Precondition: inferred. Ends because each rewrite takes a
 * ScatterND away. */
#include <string.h>

#include "passes/passes.h"
#include "passes/rules.h"

enum { MAX_SLICES = 16 };

typedef struct slice {
  int64_t start, length;
  egi_value_id updates;
} slice;

static bool is_integer_constant(const egi_graph *graph, egi_value_id value, int64_t wanted) {
  double number = 0.0;
  return egi_constant_scalar(graph, value, &number) && number == (double)wanted;
}

/* Whole numbers in a row, from *out_start on. */
static bool weight_is_range(const egi_graph *graph, egi_value_id value, int64_t *out_start) {
  egi_tensor tensor;
  if (!egi_value_constant(graph, value, &tensor) || tensor.dtype != EG_DTYPE_I64) return false;
  for (int64_t i = 0; i < egi_tensor_count(&tensor); i++) {
    int64_t number = 0;
    memcpy(&number, (const char *)tensor.data + (size_t)i * sizeof number, sizeof number);
    if (i == 0) *out_start = number;
    if (number != *out_start + i) return false;
  }
  return egi_tensor_count(&tensor) > 0;
}

/* A Range from 0 in steps of 1, through what leaves its numbers in their order. */
static bool is_count(const egi_graph *graph, egi_value_id value) {
  for (unsigned depth = 0; depth < 8; depth++) {
    egi_node_id id = egi_maker(graph, value);
    if (id == 0) return false;
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_Range)
      return is_integer_constant(graph, node->inputs[0], 0) && is_integer_constant(graph, node->inputs[2], 1);
    if (node->op != EGI_OP_Reshape && node->op != EGI_OP_Unsqueeze && node->op != EGI_OP_Squeeze &&
        node->op != EGI_OP_Identity)
      return false;
    value = node->inputs[0];
  }
  return false;
}

/* What an Expand repeats. */
static egi_value_id before_expand(const egi_graph *graph, egi_value_id value) {
  egi_node_id id = egi_maker(graph, value);
  return id != 0 && graph->nodes[id].op == EGI_OP_Expand ? graph->nodes[id].inputs[0] : value;
}

/* Component `axis` of a grid of `rank` dims: numbers that vary along that axis alone. */
static bool read_component(const egi_graph *graph, egi_value_id value, int rank, int axis, int64_t *out_start,
                           egi_dim *out_length) {
  egi_dims *dims = graph->module->dims;
  egi_node_id id = egi_maker(graph, value);
  if (id == 0 || graph->nodes[id].op != EGI_OP_Unsqueeze) return false;
  if (!is_integer_constant(graph, graph->nodes[id].inputs[1], -1) &&
      !is_integer_constant(graph, graph->nodes[id].inputs[1], rank))
    return false;
  value = before_expand(graph, graph->nodes[id].inputs[0]);
  const egi_value *row = &graph->values[value];
  int64_t size = 0;
  if (row->rank < rank - axis || row->rank > rank) return false;
  for (int i = 0; i < row->rank; i++) {
    bool is_own = i == row->rank - (rank - axis);
    if (!is_own && (!egi_dim_value(dims, egi_dim_resolve(dims, row->dims[i]), &size) || size != 1)) return false;
  }
  *out_length = egi_dim_resolve(dims, row->dims[row->rank - (rank - axis)]);
  *out_start = 0;
  return weight_is_range(graph, value, out_start) || is_count(graph, value);
}

/* Full ranges along all axes but one; *out_axis is that one, or stays where all are full. */
static bool read_grid(const egi_graph *graph, const egi_node *node, int *out_axis, slice *out) {
  egi_dims *dims = graph->module->dims;
  const egi_value *data = &graph->values[node->inputs[0]];
  egi_node_id id = egi_maker(graph, node->inputs[1]);
  const egi_node *concat = id != 0 ? &graph->nodes[id] : NULL;
  int n_cut = 0, rank = data->rank;
  if (concat == NULL || concat->op != EGI_OP_Concat || concat->n_inputs != rank) return false;
  if (graph->values[node->inputs[1]].rank != rank + 1) return false;
  int64_t at = egi_node_int(concat, "axis", 0);
  if (at != -1 && at != rank) return false;
  for (int i = 0; i < rank; i++) {
    int64_t start = 0;
    egi_dim length = EGI_DIM_NONE;
    if (!read_component(graph, concat->inputs[i], rank, i, &start, &length)) return false;
    if (start == 0 && length != EGI_DIM_NONE && length == egi_dim_resolve(dims, data->dims[i])) continue;
    out->start = start;
    *out_axis = i;
    if (!egi_dim_value(dims, length, &out->length)) return false;
    n_cut++;
  }
  return n_cut == 1;
}

/* The part of `node`'s data that it overwrites, along one axis. */
static bool read_slice(const egi_graph *graph, const egi_node *node, int *out_axis, slice *out) {
  const egi_value *indices = &graph->values[node->inputs[1]];
  int64_t width = 0;
  if (node->op != EGI_OP_ScatterND || strcmp(egi_node_string(node, "reduction", "none"), "none") != 0) return false;
  out->updates = node->inputs[2];
  if (indices->rank == 2 && egi_dim_value(graph->module->dims, indices->dims[1], &width) && width == 1) {
    *out_axis = 0;
    return egi_dim_value(graph->module->dims, indices->dims[0], &out->length) &&
           weight_is_range(graph, node->inputs[1], &out->start);
  }
  return read_grid(graph, node, out_axis, out);
}

/* In order of their starts; true when they cover [0, size) once. */
static bool cover(slice *slices, uint32_t count, int64_t size) {
  int64_t end = 0;
  for (uint32_t i = 0; i < count; i++) {
    for (uint32_t j = i + 1; j < count; j++) {
      if (slices[j].start >= slices[i].start) continue;
      slice moved = slices[i];
      slices[i] = slices[j];
      slices[j] = moved;
    }
    if (slices[i].start != end) return false;
    end += slices[i].length;
  }
  return end == size;
}

/* The slices of a chain of ScatterND that ends at `id`; 0 where they do not cover the axis. */
static uint32_t read_chain(const egi_graph *graph, egi_node_id id, slice *slices, int *out_axis) {
  uint32_t count = 0;
  int64_t size = 0;
  const egi_value *data = &graph->values[graph->nodes[id].inputs[0]];
  while (id != 0 && count < MAX_SLICES) {
    int axis = -1;
    if (!read_slice(graph, &graph->nodes[id], &axis, &slices[count]) || (count > 0 && axis != *out_axis)) break;
    *out_axis = axis;
    count++;
    id = egi_maker(graph, graph->nodes[id].inputs[0]);
  }
  if (count == 0 ||
      !egi_dim_value(graph->module->dims, egi_dim_resolve(graph->module->dims, data->dims[*out_axis]), &size))
    return 0;
  return cover(slices, count, size) ? count : 0;
}

static eg_status visit(egi_pass_run *run, egi_redirect *redirect, egi_node_id id) {
  egi_graph *graph = redirect->graph;
  slice slices[MAX_SLICES];
  egi_value_id inputs[MAX_SLICES], output = graph->nodes[id].outputs[0];
  int axis = 0;
  bool is_done = false;
  run->report->n_tried++;
  uint32_t count = read_chain(graph, id, slices, &axis);
  if (count == 0) return EG_OK;
  for (uint32_t i = 0; i < count; i++) inputs[i] = slices[i].updates;
  egi_emitter emit = {.graph = graph, .scope = graph->nodes[id].scope};
  const egi_attribute along = egi_attribute_int("axis", axis);
  egi_value_id joined = egi_emit(&emit, EGI_OP_Concat, inputs, count, &along, 1);
  EG_TRY(emit.status);
  EG_TRY(egi_redirect_put(redirect, output, joined, &is_done));
  if (!is_done) return EG_OK;
  egi_graph_remove_node(graph, id);
  run->report->n_matched++;
  run->has_changed = true;
  return EG_OK;
}

static eg_status visit_all(egi_pass_run *run, egi_redirect *redirect, egi_graph *graph) {
  EG_TRY(egi_redirect_init(redirect, graph));
  uint32_t n_nodes = graph->n_nodes;
  for (egi_node_id id = n_nodes; id-- > 1;) { /* the last of a chain first */
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_ScatterND && node->outputs[0] != 0 && graph->values[node->inputs[0]].rank > 0)
      EG_TRY(visit(run, redirect, id));
  }
  egi_redirect_apply(redirect);
  return EG_OK;
}

eg_status egi_pass_join_slices(egi_pass_run *run, egi_graph *graph) {
  egi_redirect redirect = {0};
  eg_status status = visit_all(run, &redirect, graph);
  egi_redirect_free(&redirect);
  return status;
}
