/* engraft.Linear out of what exporters write for a linear layer: MatMul or Gemm with a parameter of the model (through
 * casts and transposes, or a DequantizeLinear of one), the Reshapes around it that only take rows together and apart,
 * and the Add of its bias. A weight that a file holds as [in, out] stands under a Transpose, a view. Precondition:
 * inferred. Linear in the graph; ends because each product goes and none is added. */
#include <string.h>

#include "graph/linear.h"
#include "passes/passes.h"

typedef struct fuser {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_uses uses; /* of the graph before the pass; nodes that are gone stay in it */
  uint32_t n_values;
} fuser;

/* A layer as far as it has been read. */
typedef struct layer {
  egi_node_id product;
  egi_value_id x, y, bias; /* y: the last value that belongs to it */
  egi_node_id gone[3];     /* nodes behind the product */
  unsigned n_gone;
} layer;

/* The only node that uses the value, or 0. */
static egi_node_id only_user(const fuser *state, egi_value_id value) {
  if (value >= state->n_values || egi_graph_is_output(state->graph, value)) return 0;
  uint32_t first = state->uses.start[value];
  return state->uses.start[value + 1] - first == 1 ? state->uses.list[first] : 0;
}

static bool is_dim_number(const egi_graph *graph, egi_dim dim, int64_t number) {
  int64_t size = 0;
  return egi_dim_value(graph->module->dims, egi_dim_resolve(graph->module->dims, dim), &size) && size == number;
}

/* Equal but for the last dim. */
static bool has_rows_of(const egi_graph *graph, const egi_value *a, const egi_value *b) {
  egi_dims *dims = graph->module->dims;
  if (a->rank != b->rank || a->rank < 1) return false;
  for (int i = 0; i < a->rank - 1; i++)
    if (a->dims[i] == EGI_DIM_NONE || egi_dim_resolve(dims, a->dims[i]) != egi_dim_resolve(dims, b->dims[i]))
      return false;
  return true;
}

static bool has_last_dim_of(const egi_graph *graph, const egi_value *a, const egi_value *b) {
  egi_dims *dims = graph->module->dims;
  egi_dim x = egi_dim_resolve(dims, a->dims[a->rank - 1]), y = egi_dim_resolve(dims, b->dims[b->rank - 1]);
  return x != EGI_DIM_NONE && x == y;
}

/* ---- what stands around a product ------------------------------------------------------------------------------- */

/* The Add of a parameter [N] (or [1, .., N]) behind y. */
static bool take_bias(fuser *state, layer *l, int64_t n) {
  const egi_graph *graph = state->graph;
  egi_node_id id = only_user(state, l->y);
  const egi_node *node = &graph->nodes[id];
  bool is_transposed = false;
  if (id == 0 || node->op != EGI_OP_Add || l->bias != 0 || node->inputs[0] == node->inputs[1]) return false;
  egi_value_id bias = node->inputs[node->inputs[0] == l->y ? 1 : 0];
  const egi_value *row = &graph->values[bias];
  if (row->rank != 1 || row->dtype != graph->values[l->y].dtype || !is_dim_number(graph, row->dims[0], n)) return false;
  if (egi_weight_below(graph, bias, &is_transposed) == 0) return false;
  l->bias = bias;
  l->y = node->outputs[0];
  l->gone[l->n_gone++] = id;
  return true;
}

/* A Reshape behind y that gives back the rows of the value that a Reshape before x took together. */
static bool take_reshapes(fuser *state, layer *l) {
  const egi_graph *graph = state->graph;
  const egi_value *x = &graph->values[l->x], *y = &graph->values[l->y];
  egi_node_id id = only_user(state, l->y);
  if (id == 0 || graph->nodes[id].op != EGI_OP_Reshape || graph->nodes[id].inputs[0] != l->y) return false;
  if (x->kind != EGI_VALUE_NODE) return false;
  const egi_node *before = &graph->nodes[x->producer];
  if (before->op != EGI_OP_Reshape && before->op != EGI_OP_Flatten) return false;
  const egi_value *whole = &graph->values[before->inputs[0]], *result = &graph->values[graph->nodes[id].outputs[0]];
  if (whole->rank < 1 || result->rank < 1 || !has_rows_of(graph, whole, result)) return false;
  if (!has_last_dim_of(graph, whole, x) || !has_last_dim_of(graph, result, y)) return false;
  l->x = before->inputs[0];
  l->y = graph->nodes[id].outputs[0];
  l->gone[l->n_gone++] = id;
  return true;
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* alpha, beta and transposes that a Linear has; the bias of a Gemm. */
static bool read_gemm(const egi_graph *graph, const egi_node *node, layer *l) {
  float alpha = egi_node_float(node, "alpha", 1.0F), beta = egi_node_float(node, "beta", 1.0F);
  if (egi_node_int(node, "transA", 0) != 0 || alpha < 1.0F || alpha > 1.0F) return false;
  if (node->n_inputs < 3 || node->inputs[2] == 0) return true;
  l->bias = node->inputs[2];
  const egi_value *bias = &graph->values[l->bias], *y = &graph->values[node->outputs[0]];
  return beta >= 1.0F && beta <= 1.0F && bias->rank == 1 && has_last_dim_of(graph, bias, y);
}

/* The matrix as [out, in]: what a Transpose was made of, or a Transpose of it. */
static egi_value_id turned(egi_emitter *emit, egi_value_id matrix) {
  static const int64_t perm[2] = {1, 0};
  const egi_graph *graph = emit->graph;
  const egi_value *row = &graph->values[matrix];
  const egi_attribute attribute = egi_attribute_ints("perm", perm, 2);
  if (row->kind == EGI_VALUE_NODE && graph->nodes[row->producer].op == EGI_OP_Transpose)
    return graph->nodes[row->producer].inputs[0];
  return egi_emit(emit, EGI_OP_Transpose, &matrix, 1, &attribute, 1);
}

/* The codes, scales and zero points of the DequantizeLinear below the product's weight. */
static unsigned read_quantised(const egi_graph *graph, egi_node_id below, bool is_transposed, egi_value_id *inputs,
                               egi_attribute *attributes) {
  const egi_node *node = &graph->nodes[below];
  int64_t axis = egi_node_int(node, "axis", 1);
  inputs[EGI_LINEAR_WEIGHT] = node->inputs[0];
  inputs[EGI_LINEAR_SCALES] = node->inputs[1];
  inputs[EGI_LINEAR_ZERO_POINTS] = node->n_inputs > 2 ? node->inputs[2] : 0;
  attributes[0] = egi_attribute_string("storage", "blocked");
  attributes[1] = egi_attribute_int("axis", axis < 0 ? axis + 2 : axis);
  attributes[2] = egi_attribute_int("block_size", egi_node_int(node, "block_size", 0));
  attributes[3] = egi_attribute_int("transposed", is_transposed ? 0 : 1);
  return 4;
}

static eg_status put_linear(fuser *state, const layer *l, const egi_value_id *inputs, const egi_attribute *attributes,
                            unsigned n_attributes) {
  egi_graph *graph = state->graph;
  egi_node product = graph->nodes[l->product]; /* its texts stay when it is gone */
  egi_value_id output = l->y;
  egi_node_id id;
  egi_graph_remove_node(graph, l->product);
  for (unsigned i = 0; i < l->n_gone; i++) egi_graph_remove_node(graph, l->gone[i]);
  egi_node linear = {.op = EGI_OP_Linear, .name = product.name, .scope = product.scope, .origin = product.origin};
  linear.inputs = (egi_value_id *)(uintptr_t)inputs; /* only read: the node is copied */
  linear.attributes = (egi_attribute *)(uintptr_t)attributes;
  linear.outputs = &output;
  linear.n_inputs = EGI_LINEAR_INPUTS;
  while (linear.inputs[linear.n_inputs - 1] == 0) linear.n_inputs--;
  linear.n_attributes = (uint16_t)n_attributes;
  linear.n_outputs = 1;
  EG_TRY(egi_graph_add_node(graph, &linear, &id));
  EG_TRY(egi_infer_node(graph, id));
  state->run->report->n_matched++;
  state->run->has_changed = true;
  return EG_OK;
}

/* The bias and the reshapes behind y, in either order. */
static bool take_surroundings(fuser *state, layer *l) {
  egi_dims *dims = state->graph->module->dims;
  const egi_value *y = &state->graph->values[l->y];
  int64_t n = 0;
  if (y->rank < 1 || !egi_dim_value(dims, egi_dim_resolve(dims, y->dims[y->rank - 1]), &n)) return false;
  if (take_bias(state, l, n))
    (void)take_reshapes(state, l);
  else if (take_reshapes(state, l))
    (void)take_bias(state, l, n);
  return true;
}

/* Everything that belongs to the layer of a product, or false. */
static bool read_layer(fuser *state, const egi_operand *operand, layer *l) {
  const egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[operand->node];
  const egi_value *weight = &graph->values[node->inputs[1]];
  *l = (layer){.product = operand->node, .x = node->inputs[0], .y = node->outputs[0]};
  if (weight->rank != 2 || graph->values[l->x].rank < 1 || graph->values[l->x].dtype != weight->dtype) return false;
  if (node->op == EGI_OP_Gemm && !read_gemm(graph, node, l)) return false;
  return take_surroundings(state, l);
}

/* A Linear that a file's own operator has become gets what stands behind it. */
static eg_status extend(fuser *state, egi_node_id id) {
  const egi_node node = state->graph->nodes[id]; /* its lists stay when it is gone */
  layer l = {.product = id, .x = node.inputs[EGI_LINEAR_X], .y = node.outputs[0]};
  egi_value_id inputs[EGI_LINEAR_INPUTS] = {0};
  for (uint16_t i = 0; i < node.n_inputs && i < EGI_LINEAR_INPUTS; i++) inputs[i] = node.inputs[i];
  l.bias = inputs[EGI_LINEAR_BIAS];
  state->run->report->n_tried++;
  if (!take_surroundings(state, &l) || l.n_gone == 0) return EG_OK;
  inputs[EGI_LINEAR_X] = l.x;
  inputs[EGI_LINEAR_BIAS] = l.bias;
  return put_linear(state, &l, inputs, node.attributes, node.n_attributes);
}

static eg_status fuse(fuser *state, const egi_operand *operand) {
  egi_graph *graph = state->graph;
  const egi_node *node = &graph->nodes[operand->node];
  egi_value_id inputs[EGI_LINEAR_INPUTS] = {0};
  egi_attribute attributes[4];
  unsigned n_attributes = 0;
  layer l;
  if (node->op == EGI_OP_Linear && operand->input == EGI_LINEAR_WEIGHT) return extend(state, operand->node);
  if (operand->input != 1 || (node->op != EGI_OP_MatMul && node->op != EGI_OP_Gemm)) return EG_OK;
  if (operand->role != EGI_ROLE_MATRIX && operand->role != EGI_ROLE_QUANTISED) return EG_OK;
  egi_value_id weight = node->inputs[1];
  state->run->report->n_tried++;
  if (!read_layer(state, operand, &l)) return EG_OK;
  egi_emitter emit = {.graph = graph, .scope = node->scope};
  bool is_transposed = node->op == EGI_OP_Gemm && egi_node_int(node, "transB", 0) != 0;
  if (operand->role == EGI_ROLE_QUANTISED) {
    egi_node_id below = egi_dequantised_below(graph, weight, &is_transposed);
    n_attributes = read_quantised(graph, below, is_transposed, inputs, attributes);
  } else {
    inputs[EGI_LINEAR_WEIGHT] = is_transposed ? weight : turned(&emit, weight);
    EG_TRY(emit.status);
  }
  inputs[EGI_LINEAR_X] = l.x;
  inputs[EGI_LINEAR_BIAS] = l.bias;
  return put_linear(state, &l, inputs, attributes, n_attributes);
}

static eg_status fuse_all(fuser *state) {
  egi_operand *operands = NULL;
  size_t n_operands = 0;
  EG_TRY(egi_find_operands(state->graph, &state->arena, &operands, &n_operands));
  EG_TRY(egi_graph_uses(state->graph, &state->arena, &state->uses));
  state->n_values = state->graph->n_values;
  for (size_t i = 0; i < n_operands; i++) EG_TRY(fuse(state, &operands[i]));
  if (!state->run->has_changed) return EG_OK;
  egi_pass_report dead = {0};
  egi_pass_run clean = {.ctx = state->run->ctx, .report = &dead};
  return egi_pass_eliminate_dead(&clean, state->graph);
}

eg_status egi_pass_fuse_linear(egi_pass_run *run, egi_graph *graph) {
  fuser state = {.run = run, .graph = graph};
  egi_arena_init(&state.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = fuse_all(&state);
  egi_arena_clear(&state.arena);
  return status;
}
