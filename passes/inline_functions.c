/* Calls of model-local functions, and of the standard operators that graph/functions.def defines, become their bodies:
 * nested calls too, attribute references resolved against the caller, names made unique with the call's name in front.
 * Ends because functions that reach themselves are refused and the number of nodes is bounded, both before anything is
 * built; types are inferred anew, since bodies carry none. */
#include <string.h>

#include "passes/passes.h"

enum { MAX_DEPTH = 100 };

typedef struct inliner {
  egi_graph *graph;
  egi_module *module;
  egi_arena arena;   /* of the pass */
  egi_map functions; /* key -> index + 1 */
  uint64_t max_nodes;
  uint64_t *sizes;    /* by function: nodes a call expands to, 0: not measured */
  unsigned *heights;  /* by function: levels of calls below it, itself included */
  bool *is_measuring; /* by function: on the way down */
} inliner;

/* One expansion: what the body's values and attribute references stand for. */
typedef struct expansion {
  const egi_node *call; /* inputs, outputs and attributes in terms of the graph */
  const egi_function *function;
  egi_value_id *values; /* body value -> graph value */
  const char *prefix;
} expansion;

static char *function_key(egi_arena *arena, const char *domain, const char *name, const char *overload) {
  if (!domain || strcmp(domain, "ai.onnx") == 0) domain = "";
  return egi_arena_format(arena, "%s\n%s\n%s", domain, name, overload ? overload : "");
}

static eg_status prepare(inliner *state) {
  egi_map_init(&state->functions, &state->arena);
  for (uint32_t i = 0; i < state->module->n_functions; i++) {
    const egi_function *function = &state->module->functions[i];
    char *key = function_key(&state->arena, function->domain, function->name, function->overload);
    if (!key) return EG_ERROR_MEMORY;
    EG_TRY(egi_map_put(&state->functions, key, i + 1));
  }
  state->max_nodes = egi_module_max_nodes(state->module);
  return EG_OK;
}

/* Index + 1 of the function that a node calls, or 0. A model's own functions hide operators of the same name. */
static eg_status find_function(inliner *state, const egi_node *node, uint32_t *out_index) {
  const egi_op_info *info = egi_op_get(node->op);
  const char *name = node->op_name ? node->op_name : info->name;
  const char *domain = node->op_name ? node->domain : info->domain;
  *out_index = 0;
  char text[256];
  const char *overload = node->overload ? node->overload : "";
  domain = domain && strcmp(domain, "ai.onnx") != 0 ? domain : "";
  size_t n_domain = strlen(domain), n_name = strlen(name), n_overload = strlen(overload);
  char *key = text;
  if (n_domain + n_name + n_overload + 3 > sizeof(text)) {
    key = function_key(&state->arena, domain, name, overload);
    if (!key) return EG_ERROR_MEMORY;
  } else {
    memcpy(text, domain, n_domain);
    text[n_domain] = '\n';
    memcpy(text + n_domain + 1, name, n_name);
    text[n_domain + 1 + n_name] = '\n';
    memcpy(text + n_domain + n_name + 2, overload, n_overload + 1);
  }
  egi_map_get(&state->functions, key, out_index);
  return EG_OK;
}

/* Nodes that a call of function `index` expands to, at most one more than allowed; refuses recursion and deep nesting
 * before anything is built. */
static eg_status measure(inliner *state, uint32_t index, unsigned depth) {
  eg_context *ctx = state->module->ctx;
  const egi_function *function = &state->module->functions[index];
  if (state->is_measuring[index]) return egi_fail(ctx, EG_ERROR_FORMAT, "function %s calls itself", function->name);
  if (state->sizes[index] != 0) return EG_OK;
  state->is_measuring[index] = true;
  uint64_t size = 1;
  unsigned height = 1;
  for (egi_node_id id = 1; id < function->graph->n_nodes && depth < MAX_DEPTH; id++) {
    uint32_t callee = 0;
    EG_TRY(find_function(state, &function->graph->nodes[id], &callee));
    if (callee != 0) {
      EG_TRY(measure(state, callee - 1, depth + 1));
      if (height <= state->heights[callee - 1]) height = state->heights[callee - 1] + 1;
    }
    size += callee != 0 ? state->sizes[callee - 1] : 1;
    if (size > state->max_nodes) size = state->max_nodes + 1;
  }
  if (depth + height > MAX_DEPTH)
    return egi_fail(ctx, EG_ERROR_FORMAT, "function %s: calls are nested more than %d deep", function->name,
                    (int)MAX_DEPTH);
  state->is_measuring[index] = false;
  state->sizes[index] = size;
  state->heights[index] = height;
  return EG_OK;
}

/* The sizes of all calls in the graph together stay within the limit. */
static eg_status measure_calls(inliner *state) {
  const egi_graph *graph = state->graph;
  uint64_t total = graph->n_nodes;
  state->sizes = EGI_NEW(&state->arena, uint64_t, state->module->n_functions);
  state->heights = EGI_NEW(&state->arena, unsigned, state->module->n_functions);
  state->is_measuring = EGI_NEW(&state->arena, bool, state->module->n_functions);
  if (!state->sizes || !state->heights || !state->is_measuring) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    uint32_t callee = 0;
    if (graph->nodes[id].op == EGI_OP_NONE) continue;
    EG_TRY(find_function(state, &graph->nodes[id], &callee));
    if (callee == 0) continue;
    EG_TRY(measure(state, callee - 1, 0));
    total += state->sizes[callee - 1];
    if (total > state->max_nodes)
      return egi_fail(state->module->ctx, EG_ERROR_BUDGET, "function %s: its calls expand to more than %llu nodes",
                      state->module->functions[callee - 1].name, (unsigned long long)state->max_nodes);
  }
  return EG_OK;
}

static const egi_attribute *find_attribute(const expansion *at, const char *name) {
  const egi_attribute *attribute = egi_node_attribute(at->call, name);
  for (uint32_t i = 0; !attribute && i < at->function->n_defaults; i++) {
    if (strcmp(at->function->defaults[i].name, name) == 0) attribute = &at->function->defaults[i];
  }
  return attribute;
}

/* The attributes of a body node with references replaced; an absent one disappears. */
static eg_status resolve_attributes(inliner *state, const expansion *at, egi_node *node) {
  egi_attribute *attributes = EGI_NEW(&state->arena, egi_attribute, node->n_attributes);
  if (!attributes) return EG_ERROR_MEMORY;
  uint16_t count = 0;
  for (unsigned i = 0; i < node->n_attributes; i++) {
    egi_attribute attribute = node->attributes[i];
    if (attribute.kind == EGI_ATTRIBUTE_GRAPH)
      return egi_fail(state->module->ctx, EG_ERROR_UNSUPPORTED, "function %s: node \"%s\": attribute \"%s\" is a graph",
                      at->function->name, node->name, attribute.name);
    if (attribute.kind == EGI_ATTRIBUTE_REFERENCE) {
      const egi_attribute *source = find_attribute(at, attribute.u.s);
      if (!source) continue;
      const char *name = attribute.name;
      attribute = *source;
      attribute.name = name;
    }
    attributes[count++] = attribute;
  }
  node->attributes = attributes;
  node->n_attributes = count;
  return EG_OK;
}

/* The graph's value for a value that the body reads: a formal input, a constant, or a result of an earlier node. */
static eg_status map_input(inliner *state, const expansion *at, egi_value_id value, egi_value_id *out_value) {
  *out_value = 0;
  if (value == 0) return EG_OK;
  const egi_value *row = &at->function->graph->values[value];
  if (row->kind == EGI_VALUE_WEIGHT && at->values[value] == 0)
    EG_TRY(egi_graph_add_weight(state->graph, row->index, &at->values[value]));
  *out_value = at->values[value];
  return EG_OK;
}

static eg_status map_output(inliner *state, const expansion *at, egi_value_id value, egi_value_id *out_value) {
  *out_value = EGI_VALUE_UNWANTED;
  if (value == 0) return EG_OK;
  if (at->values[value] == 0) {
    char *name = egi_arena_format(&state->arena, "%s/%s", at->prefix, at->function->graph->values[value].name);
    if (!name) return EG_ERROR_MEMORY;
    EG_TRY(egi_graph_add_value(state->graph, name, &at->values[value]));
  }
  *out_value = at->values[value];
  return EG_OK;
}

/* A copy of a body node in terms of the graph; its lists live in the pass's arena. */
static eg_status translate(inliner *state, const expansion *at, const egi_node *source, egi_node *out_node) {
  *out_node = *source;
  out_node->inputs = EGI_NEW(&state->arena, egi_value_id, source->n_inputs);
  out_node->outputs = EGI_NEW(&state->arena, egi_value_id, source->n_outputs);
  if (!out_node->inputs || !out_node->outputs) return EG_ERROR_MEMORY;
  for (unsigned i = 0; i < source->n_inputs; i++) EG_TRY(map_input(state, at, source->inputs[i], &out_node->inputs[i]));
  for (unsigned i = 0; i < source->n_outputs; i++)
    EG_TRY(map_output(state, at, source->outputs[i], &out_node->outputs[i]));
  EG_TRY(resolve_attributes(state, at, out_node));
  if (!out_node->scope || !out_node->scope[0]) out_node->scope = at->call->scope;
  out_node->name = egi_arena_format(&state->arena, "%s/%s", at->prefix, source->name ? source->name : "");
  return out_node->name ? EG_OK : EG_ERROR_MEMORY;
}

static bool is_wanted(egi_value_id value) {
  return value != 0 && value != EGI_VALUE_UNWANTED;
}

/* Formal inputs and outputs stand for those of the call. A formal output that is not a node's own result, or stands
 * twice, gets an Identity at the end. */
static eg_status bind_formals(inliner *state, expansion *at) {
  const egi_graph *body = at->function->graph;
  const egi_node *call = at->call;
  if (call->n_inputs > body->n_inputs || call->n_outputs > body->n_outputs)
    return egi_fail(state->module->ctx, EG_ERROR_FORMAT,
                    "node \"%s\": function %s takes %u inputs and gives %u outputs, the call has %u and %u", call->name,
                    at->function->name, body->n_inputs, body->n_outputs, (unsigned)call->n_inputs,
                    (unsigned)call->n_outputs);
  for (unsigned i = 0; i < call->n_inputs; i++) at->values[body->inputs[i]] = call->inputs[i];
  for (unsigned i = 0; i < call->n_outputs; i++) {
    egi_value_id formal = body->outputs[i];
    if (is_wanted(call->outputs[i]) && body->values[formal].kind == EGI_VALUE_NODE && at->values[formal] == 0)
      at->values[formal] = call->outputs[i];
  }
  return EG_OK;
}

static eg_status add_identities(inliner *state, const expansion *at) {
  const egi_graph *body = at->function->graph;
  for (unsigned i = 0; i < at->call->n_outputs; i++) {
    egi_value_id wanted = at->call->outputs[i], source = 0;
    if (!is_wanted(wanted) || at->values[body->outputs[i]] == wanted) continue;
    EG_TRY(map_input(state, at, body->outputs[i], &source));
    if (source == 0)
      return egi_fail(state->module->ctx, EG_ERROR_FORMAT, "node \"%s\": output %u of function %s is an absent input",
                      at->call->name, i, at->function->name);
    egi_node identity = {.op = EGI_OP_Identity, .name = at->prefix, .scope = at->call->scope};
    identity.inputs = &source;
    identity.outputs = &wanted;
    identity.n_inputs = identity.n_outputs = 1;
    egi_node_id ignored = 0;
    EG_TRY(egi_graph_add_node(state->graph, &identity, &ignored));
  }
  return EG_OK;
}

/* Appends the body of function `index` for `call`. Recursion is bounded: measure() went the same way before. */
static eg_status expand(inliner *state, uint32_t index, const egi_node *call, const char *prefix) {
  const egi_graph *body = state->module->functions[index].graph;
  expansion at = {.call = call, .function = &state->module->functions[index], .prefix = prefix};
  at.values = EGI_NEW(&state->arena, egi_value_id, body->n_values);
  if (!at.values) return EG_ERROR_MEMORY;
  EG_TRY(bind_formals(state, &at));
  for (egi_node_id id = 1; id < body->n_nodes; id++) {
    if (body->nodes[id].op == EGI_OP_NONE) continue;
    egi_node node;
    uint32_t callee = 0;
    EG_TRY(translate(state, &at, &body->nodes[id], &node));
    EG_TRY(find_function(state, &node, &callee));
    if (callee != 0) {
      EG_TRY(expand(state, callee - 1, &node, node.name));
    } else {
      egi_node_id ignored = 0;
      EG_TRY(egi_graph_add_node(state->graph, &node, &ignored));
    }
  }
  EG_TRY(add_identities(state, &at));
  return EG_OK;
}

static eg_status inline_all(egi_pass_run *run, inliner *state) {
  egi_graph *graph = state->graph;
  EG_TRY(prepare(state));
  EG_TRY(measure_calls(state));
  uint32_t n_nodes = graph->n_nodes;
  for (egi_node_id id = 1; id < n_nodes; id++) {
    if (graph->nodes[id].op == EGI_OP_NONE) continue;
    uint32_t index = 0;
    EG_TRY(find_function(state, &graph->nodes[id], &index));
    run->report->n_tried++;
    if (index == 0) continue;
    egi_node call = graph->nodes[id]; /* its results are free once it is gone; its lists stay */
    egi_graph_remove_node(graph, id);
    const char *prefix = call.name && call.name[0] ? call.name : graph->module->functions[index - 1].name;
    EG_TRY(expand(state, index - 1, &call, prefix));
    run->report->n_matched++;
    run->has_changed = true;
  }
  return EG_OK;
}

/* Bodies of If, Loop and Scan may hold calls, which unroll_loops brings to light. */
static bool has_bodies(const egi_graph *graph) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    for (uint16_t i = 0; i < graph->nodes[id].n_attributes; i++)
      if (graph->nodes[id].attributes[i].kind == EGI_ATTRIBUTE_GRAPH) return true;
  return false;
}

eg_status egi_pass_inline_functions(egi_pass_run *run, egi_graph *graph) {
  EG_TRY(egi_graph_recall_bodies(graph));
  EG_TRY(egi_module_add_standard_functions(graph->module, graph));
  if (graph->module->n_functions == 0) return EG_OK;
  inliner state = {.graph = graph, .module = graph->module};
  egi_arena_init(&state.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = inline_all(run, &state);
  egi_arena_clear(&state.arena);
  if (status == EG_OK && !has_bodies(graph)) graph->module->n_functions = 0; /* nobody calls them any more */
  if (status != EG_OK || !run->has_changed) return status;
  EG_TRY(egi_graph_tidy(graph));
  return egi_infer_graph(graph);
}
