/* Control flow that is decided before the graph runs becomes plain nodes: If with a constant condition its branch, Loop
 * and Scan with a known number of iterations a copy of the body for each. Other control flow stays, for eager runs.
 * Precondition: inferred. Ends because each rewrite removes a node of the graph and bodies are smaller than their
 * graphs; the nodes that all copies add are bounded. */
#include <string.h>

#include "passes/passes.h"

static const uint64_t max_added_nodes = 1u << 20;

typedef struct unroller {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  uint64_t n_added;
} unroller;

/* One copy of a body. */
typedef struct copy {
  const egi_graph *body;
  egi_value_id *values; /* body value -> graph value */
  const char *prefix;
  const char *scope;
} copy;

/* ---- copies of bodies ----------------------------------------------------------------------------------------- */

static eg_status map_value(unroller *u, const copy *c, egi_value_id value, egi_value_id *out_value) {
  const egi_value *row = &c->body->values[value];
  if (value != 0 && c->values[value] == 0 && row->kind == EGI_VALUE_WEIGHT)
    EG_TRY(egi_graph_add_weight(u->graph, row->index, &c->values[value]));
  *out_value = value != 0 ? c->values[value] : 0;
  return EG_OK;
}

static eg_status copy_node(unroller *u, const copy *c, const egi_node *source) {
  egi_node node = *source;
  egi_node_id id;
  node.inputs = EGI_NEW(&u->arena, egi_value_id, (size_t)source->n_inputs + 1);
  node.outputs = EGI_NEW(&u->arena, egi_value_id, (size_t)source->n_outputs + 1);
  if (!node.inputs || !node.outputs) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < node.n_inputs; i++) EG_TRY(map_value(u, c, source->inputs[i], &node.inputs[i]));
  for (uint16_t i = 0; i < node.n_outputs; i++) {
    node.outputs[i] = EGI_VALUE_UNWANTED;
    if (source->outputs[i] == 0) continue;
    char *name = egi_arena_format(&u->arena, "%s/%s", c->prefix, c->body->values[source->outputs[i]].name);
    if (!name) return EG_ERROR_MEMORY;
    EG_TRY(egi_graph_add_value(u->graph, name, &node.outputs[i]));
    c->values[source->outputs[i]] = node.outputs[i];
  }
  node.name = egi_arena_format(&u->arena, "%s/%s", c->prefix, source->name ? source->name : "");
  if (!node.name) return EG_ERROR_MEMORY;
  if (!node.scope || !node.scope[0]) node.scope = c->scope;
  return egi_graph_add_node(u->graph, &node, &id);
}

/* Appends the body with `inputs`; `results` are its outputs in terms of the graph. */
static eg_status copy_body(unroller *u, const egi_node *node, const egi_graph *body, int64_t number,
                           const egi_value_id *inputs, egi_value_id *results) {
  const char *name = node->name && node->name[0] ? node->name : egi_op_get(node->op)->name;
  copy c = {.body = body, .scope = node->scope};
  c.prefix = egi_arena_format(&u->arena, "%s.%lld", name, (long long)number);
  c.values = EGI_NEW(&u->arena, egi_value_id, body->n_values);
  if (!c.prefix || !c.values) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < body->n_inputs; i++) c.values[body->inputs[i]] = inputs[i];
  for (egi_node_id id = 1; id < body->n_nodes; id++)
    if (body->nodes[id].op != EGI_OP_NONE) EG_TRY(copy_node(u, &c, &body->nodes[id]));
  for (uint32_t i = 0; i < body->n_outputs; i++) EG_TRY(map_value(u, &c, body->outputs[i], &results[i]));
  return EG_OK;
}

/* The node's outputs are these values. */
static eg_status put_results(unroller *u, const egi_node *node, const egi_value_id *results) {
  for (uint16_t i = 0; i < node->n_outputs; i++) {
    egi_value_id output = node->outputs[i], source = results[i];
    egi_node_id id;
    if (output == 0) continue;
    egi_node identity = {.op = EGI_OP_Identity, .name = node->name ? node->name : "", .scope = node->scope};
    identity.inputs = &source;
    identity.outputs = &output;
    identity.n_inputs = identity.n_outputs = 1;
    EG_TRY(egi_graph_add_node(u->graph, &identity, &id));
  }
  return EG_OK;
}

/* ---- what is known -------------------------------------------------------------------------------------------- */

static const egi_graph *body_of(const egi_node *node, const char *name) {
  const egi_attribute *attribute = egi_node_attribute(node, name);
  return attribute && attribute->kind == EGI_ATTRIBUTE_GRAPH ? attribute->u.graph : NULL;
}

static bool known_number(const egi_graph *graph, egi_value_id value, int64_t *out) {
  uint32_t count = 0;
  egi_tensor tensor;
  if (value == 0) return false;
  if (egi_value_integers(graph, value, out, 1, &count) && count == 1) return true;
  if (!egi_value_constant(graph, value, &tensor) || tensor.dtype != EG_DTYPE_BOOL || egi_tensor_count(&tensor) != 1)
    return false;
  *out = *(const uint8_t *)tensor.data != 0;
  return true;
}

/* The body never ends a loop that runs: its condition is the one it got, or the constant true. */
static bool keeps_going(const egi_graph *body) {
  egi_value_id value = body->outputs[0];
  int64_t number = 0;
  for (uint32_t hop = 0; hop < body->n_nodes; hop++) {
    if (value == body->inputs[1]) return true;
    if (known_number(body, value, &number)) return number != 0;
    const egi_value *row = &body->values[value];
    if (row->kind != EGI_VALUE_NODE || row->producer == 0) return false;
    if (body->nodes[row->producer].op != EGI_OP_Identity) return false;
    value = body->nodes[row->producer].inputs[0];
  }
  return false;
}

static bool is_affordable(unroller *u, const egi_graph *body, int64_t count) {
  uint64_t n_nodes = body->n_nodes, limit = egi_module_max_nodes(u->graph->module);
  if (limit > max_added_nodes) limit = max_added_nodes;
  if (count < 0 || (uint64_t)count > limit / n_nodes) return false;
  if (u->n_added + (uint64_t)count * n_nodes > limit) return false;
  u->n_added += (uint64_t)count * n_nodes;
  return true;
}

/* ---- If ------------------------------------------------------------------------------------------------------- */

static eg_status inline_branch(unroller *u, egi_node_id id, bool *out_done) {
  const egi_node node = u->graph->nodes[id];
  int64_t condition = 0;
  if (!known_number(u->graph, node.inputs[0], &condition)) return EG_OK;
  const egi_graph *body = body_of(&node, condition != 0 ? "then_branch" : "else_branch");
  if (!body || body->n_inputs + 1u != node.n_inputs || body->n_outputs < node.n_outputs || !is_affordable(u, body, 1))
    return EG_OK;
  egi_value_id *results = EGI_NEW(&u->arena, egi_value_id, (size_t)body->n_outputs + 1);
  if (!results) return EG_ERROR_MEMORY;
  egi_graph_remove_node(u->graph, id);
  *out_done = true;
  EG_TRY(copy_body(u, &node, body, 0, node.inputs + 1, results));
  return put_results(u, &node, results);
}

/* ---- Loop and Scan -------------------------------------------------------------------------------------------- */

/* Body inputs: [first.., carried.., scanned.., captured..]; outputs: [condition?, carried.., collected..]. */
typedef struct unrolled {
  const egi_node *node;
  const egi_graph *body;
  uint32_t n_first, n_carried, n_scanned, n_captured, n_collected;
  int64_t count;
  egi_value_id *inputs, *results, *final;
  egi_value_id *pieces; /* [n_collected][count] */
  egi_emitter emit;
} unrolled;

static int64_t listed(const egi_node *node, const char *name, uint32_t index) {
  uint32_t count = 0;
  const int64_t *list = egi_node_ints(node, name, &count);
  return list && index < count ? list[index] : 0;
}

static eg_status make_lists(unroller *u, unrolled *l) {
  size_t n_pieces = (size_t)l->n_collected * (size_t)l->count;
  l->inputs = EGI_NEW(&u->arena, egi_value_id, (size_t)l->body->n_inputs + 1);
  l->results = EGI_NEW(&u->arena, egi_value_id, (size_t)l->body->n_outputs + 1);
  l->final = EGI_NEW(&u->arena, egi_value_id, (size_t)l->n_carried + l->n_collected + 1);
  l->pieces = EGI_NEW(&u->arena, egi_value_id, n_pieces + 1);
  if (!l->inputs || !l->results || !l->final || !l->pieces) return EG_ERROR_MEMORY;
  l->emit = (egi_emitter){.graph = u->graph, .scope = l->node->scope};
  uint32_t at = l->n_first + l->n_carried + l->n_scanned;
  for (uint32_t i = 0; i < l->n_captured; i++)
    l->inputs[at + i] = l->node->inputs[l->node->n_inputs - l->n_captured + i];
  return EG_OK;
}

static eg_status run_copies(unroller *u, unrolled *l) {
  uint32_t first_result = l->body->n_outputs - l->n_carried - l->n_collected;
  for (int64_t k = 0; k < l->count; k++) {
    if (l->n_first > 0) l->inputs[0] = egi_emit_scalar(&l->emit, (double)k, EG_DTYPE_I64);
    for (uint32_t i = 0; i < l->n_scanned; i++) {
      egi_value_id whole = l->node->inputs[l->n_carried + i];
      int64_t at = listed(l->node, "scan_input_directions", i) != 0 ? l->count - 1 - k : k;
      const egi_attribute axis = egi_attribute_int("axis", listed(l->node, "scan_input_axes", i));
      const egi_value_id pick[2] = {whole, egi_emit_scalar(&l->emit, (double)at, EG_DTYPE_I64)};
      l->inputs[l->n_carried + i] = egi_emit(&l->emit, EGI_OP_Gather, pick, 2, &axis, 1);
    }
    EG_TRY(l->emit.status);
    EG_TRY(copy_body(u, l->node, l->body, k, l->inputs, l->results));
    for (uint32_t i = 0; i < l->n_carried; i++) l->inputs[l->n_first + i] = l->results[first_result + i];
    for (uint32_t i = 0; i < l->n_collected; i++)
      l->pieces[i * (uint64_t)l->count + (uint64_t)k] = l->results[first_result + l->n_carried + i];
  }
  return EG_OK;
}

/* Pieces get the new axis and stand one after the other. Their types are not known yet: nodes are added bare. */
static eg_status stack(unroller *u, unrolled *l, uint32_t index, egi_value_id *out_value) {
  bool is_reversed = listed(l->node, "scan_output_directions", index) != 0;
  const int64_t number = listed(l->node, "scan_output_axes", index);
  const egi_attribute axis = egi_attribute_int("axis", number);
  egi_value_id axes = egi_emit_integers(&l->emit, &number, 1);
  egi_value_id *parts = EGI_NEW(&u->arena, egi_value_id, (size_t)l->count);
  EG_TRY(l->emit.status);
  if (!parts) return EG_ERROR_MEMORY;
  for (int64_t k = 0; k < l->count; k++) {
    int64_t from = is_reversed ? l->count - 1 - k : k;
    egi_value_id inputs[2] = {l->pieces[index * (uint64_t)l->count + (uint64_t)from], axes};
    egi_node node = {.op = EGI_OP_Unsqueeze, .name = "", .scope = l->node->scope, .inputs = inputs, .n_inputs = 2};
    egi_node_id id;
    node.outputs = &parts[k];
    node.n_outputs = 1;
    EG_TRY(egi_graph_add_node(u->graph, &node, &id));
    parts[k] = u->graph->nodes[id].outputs[0];
  }
  egi_attribute attribute = axis;
  egi_node concat = {.op = EGI_OP_Concat, .name = "", .scope = l->node->scope, .inputs = parts, .outputs = out_value};
  egi_node_id id;
  concat.n_inputs = (uint16_t)l->count;
  concat.n_outputs = concat.n_attributes = 1;
  concat.attributes = &attribute;
  *out_value = 0;
  EG_TRY(egi_graph_add_node(u->graph, &concat, &id));
  *out_value = u->graph->nodes[id].outputs[0];
  return EG_OK;
}

static eg_status unroll(unroller *u, egi_node_id id, unrolled *l, bool *out_done) {
  bool is_sound = l->body->n_inputs == l->n_first + l->n_carried + l->n_scanned + l->n_captured &&
                  (l->n_collected == 0 || l->count > 0) && l->count <= UINT16_MAX &&
                  l->node->n_outputs <= l->n_carried + l->n_collected;
  if (!is_sound || !is_affordable(u, l->body, l->count)) return EG_OK;
  EG_TRY(make_lists(u, l));
  for (uint32_t i = 0; i < l->n_carried; i++) l->inputs[l->n_first + i] = l->node->inputs[l->n_first + i];
  if (l->n_first > 1) l->inputs[1] = egi_emit_scalar(&l->emit, 1.0, EG_DTYPE_BOOL);
  EG_TRY(l->emit.status);
  egi_graph_remove_node(u->graph, id);
  *out_done = true;
  EG_TRY(run_copies(u, l));
  for (uint32_t i = 0; i < l->n_carried; i++) l->final[i] = l->inputs[l->n_first + i];
  for (uint32_t i = 0; i < l->n_collected && l->n_carried + i < l->node->n_outputs; i++)
    if (l->node->outputs[l->n_carried + i] != 0) EG_TRY(stack(u, l, i, &l->final[l->n_carried + i]));
  return put_results(u, l->node, l->final);
}

static eg_status unroll_loop(unroller *u, egi_node_id id, bool *out_done) {
  const egi_node node = u->graph->nodes[id];
  unrolled l = {.node = &node, .body = body_of(&node, "body"), .n_first = 2};
  int64_t condition = 1;
  l.n_captured = (uint32_t)egi_node_int(&node, EGI_CAPTURES, 0);
  if (!l.body || node.n_inputs < 2 + l.n_captured || l.body->n_inputs < 2) return EG_OK;
  if (!known_number(u->graph, node.inputs[0], &l.count)) return EG_OK;
  if (node.inputs[1] != 0 && !known_number(u->graph, node.inputs[1], &condition)) return EG_OK;
  if (condition == 0 || l.count < 0) l.count = 0;
  l.n_carried = node.n_inputs - 2u - l.n_captured;
  if (l.body->n_outputs < 1 + l.n_carried || (l.count > 0 && !keeps_going(l.body))) return EG_OK;
  l.n_collected = l.body->n_outputs - 1 - l.n_carried;
  return unroll(u, id, &l, out_done);
}

static eg_status unroll_scan(unroller *u, egi_node_id id, bool *out_done) {
  const egi_node node = u->graph->nodes[id];
  unrolled l = {.node = &node, .body = body_of(&node, "body")};
  egi_dims *dims = u->graph->module->dims;
  l.n_captured = (uint32_t)egi_node_int(&node, EGI_CAPTURES, 0);
  l.n_scanned = (uint32_t)egi_node_int(&node, "num_scan_inputs", 0);
  if (!l.body || l.n_scanned == 0 || l.n_scanned > node.n_inputs || node.n_inputs < l.n_captured + l.n_scanned)
    return EG_OK;
  l.n_carried = node.n_inputs - l.n_captured - l.n_scanned;
  const egi_value *scanned = &u->graph->values[node.inputs[l.n_carried]];
  int64_t axis = listed(&node, "scan_input_axes", 0);
  if (axis < 0) axis += scanned->rank;
  if (scanned->rank < 1 || axis < 0 || axis >= scanned->rank || l.body->n_outputs < l.n_carried) return EG_OK;
  if (!egi_dim_value(dims, egi_dim_resolve(dims, scanned->dims[axis]), &l.count)) return EG_OK;
  l.n_collected = l.body->n_outputs - l.n_carried;
  return unroll(u, id, &l, out_done);
}

/* ---- the pass ------------------------------------------------------------------------------------------------- */

static eg_status rewrite_all(unroller *u) {
  uint32_t n_nodes = u->graph->n_nodes;
  for (egi_node_id id = 1; id < n_nodes; id++) {
    bool is_done = false;
    egi_op op = u->graph->nodes[id].op;
    if (op == EGI_OP_If) EG_TRY(inline_branch(u, id, &is_done));
    if (op == EGI_OP_Loop) EG_TRY(unroll_loop(u, id, &is_done));
    if (op == EGI_OP_Scan) EG_TRY(unroll_scan(u, id, &is_done));
    u->run->report->n_tried += op == EGI_OP_If || op == EGI_OP_Loop || op == EGI_OP_Scan ? 1 : 0;
    u->run->report->n_matched += is_done ? 1 : 0;
    u->run->has_changed = u->run->has_changed || is_done;
  }
  return EG_OK;
}

eg_status egi_pass_unroll_loops(egi_pass_run *run, egi_graph *graph) {
  unroller u = {.run = run, .graph = graph};
  egi_arena_init(&u.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = rewrite_all(&u);
  egi_arena_clear(&u.arena);
  if (status != EG_OK || !run->has_changed) return status;
  EG_TRY(egi_graph_tidy(graph));
  return egi_infer_graph(graph);
}
