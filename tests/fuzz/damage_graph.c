/* Damage to a graph's structure: names, order, cycles, functions, nesting, operators, declared types. */
#include "damage.h"

#include <stdio.h>
#include <string.h>

#include "graph/graph.h"

/* ---- names ---------------------------------------------------------------------------------------------------- */

static void close_cycle(damage *d) {
  size_t late = (size_t)damage_random(d, d->graph->n_node), early = (size_t)damage_random(d, late + 1);
  Onnx__NodeProto *to = d->graph->node[early];
  const Onnx__NodeProto *from = d->graph->node[late];
  if (to->n_input && from->n_output) to->input[damage_random(d, to->n_input)] = from->output[0];
}

static void shadow_name(damage *d) {
  Onnx__NodeProto *node = damage_any_node(d);
  if (node->n_output) node->output[damage_random(d, node->n_output)] = damage_any_name(d);
}

static void rewire_input(damage *d) {
  Onnx__NodeProto *node = damage_any_node(d);
  if (node->n_input) node->input[damage_random(d, node->n_input)] = damage_any_name(d);
}

static void lose_input(damage *d) {
  Onnx__NodeProto *node = damage_any_node(d);
  if (node->n_input == 0) return;
  if (damage_random(d, 2))
    node->n_input--;
  else
    node->input[damage_random(d, node->n_input)] = damage_text(d, damage_random(d, 2) ? "" : "nowhere");
}

static void add_input(damage *d) {
  Onnx__NodeProto *node = damage_any_node(d);
  node->input = damage_append(d, node->input, &node->n_input, damage_any_name(d));
}

static void change_outputs(damage *d) {
  Onnx__NodeProto *node = damage_any_node(d);
  if (damage_random(d, 2) && node->n_output)
    node->n_output--;
  else
    node->output = damage_append(d, node->output, &node->n_output, damage_text(d, "extra"));
}

static void repeat_weight(damage *d) {
  Onnx__TensorProto *weight = damage_any_weight(d);
  if (weight == NULL) return;
  d->graph->initializer = damage_append(d, d->graph->initializer, &d->graph->n_initializer, weight);
}

static void repeat_node(damage *d) {
  d->graph->node = damage_append(d, d->graph->node, &d->graph->n_node, damage_any_node(d));
}

/* Names that a message or a printed text must survive. */
static void spoil_name(damage *d) {
  static const char *const names[] = {"two\nlines", "\x1b[31mred", "\"quoted\"", "\xff\xfe not UTF-8", "%s%n%d",
                                      "",           "a\\b",        "}{"};
  char *name = damage_text(d, DAMAGE_CHOOSE(d, names));
  Onnx__NodeProto *node = damage_any_node(d);
  switch (damage_random(d, 5)) {
  case 0:
    node->name = name;
    break;
  case 1:
    node->op_type = name;
    break;
  case 2:
    node->domain = name;
    break;
  case 3:
    if (node->n_output) node->output[0] = name;
    break;
  default:
    if (node->n_input) node->input[0] = name;
  }
}

static void lengthen_name(damage *d) {
  size_t length = 100000;
  char *name = egi_arena_get(d->arena, 1, length + 1);
  if (name == NULL) return;
  memset(name, 'x', length);
  Onnx__NodeProto *node = damage_any_node(d);
  node->name = name;
  if (node->n_input) node->input[0] = name;
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

/* Any order is fine: import sorts. */
static void shuffle_nodes(damage *d) {
  for (size_t i = d->graph->n_node; i > 1; i--) {
    size_t j = (size_t)damage_random(d, i);
    Onnx__NodeProto *node = d->graph->node[i - 1];
    d->graph->node[i - 1] = d->graph->node[j];
    d->graph->node[j] = node;
  }
}

static void drop_node(damage *d) {
  size_t i = (size_t)damage_random(d, d->graph->n_node);
  d->graph->node[i] = d->graph->node[--d->graph->n_node];
}

static void change_operator(damage *d) {
  egi_op op = (egi_op)(EGI_OP_UNKNOWN + 1 + damage_random(d, EGI_OP_COUNT - EGI_OP_UNKNOWN - 1));
  const egi_op_info *info = egi_op_get(op);
  Onnx__NodeProto *node = damage_any_node(d);
  node->op_type = damage_text(d, info->name);
  node->domain = damage_text(d, info->domain);
}

static void invent_operator(damage *d) {
  static const char *const domains[] = {"", "ai.onnx", "com.microsoft", "local", "engraft", "ai.onnx.ml"};
  Onnx__NodeProto *node = damage_any_node(d);
  if (damage_random(d, 2)) node->op_type = damage_text(d, "Frobnicate");
  node->domain = damage_text(d, DAMAGE_CHOOSE(d, domains));
}

static void change_version(damage *d) {
  static const int64_t versions[] = {0, 1, 5, 6, 7, 9, 10, 11, 12, 13, 14, 18, 24, 25, 99, -1, INT64_MAX, INT64_MIN};
  Onnx__ModelProto *model = d->model;
  if (model->n_opset_import == 0) return;
  Onnx__OperatorSetIdProto *row = model->opset_import[damage_random(d, model->n_opset_import)];
  switch (damage_random(d, 8)) {
  case 0:
    model->n_opset_import = 0;
    break;
  case 1:
    model->opset_import = damage_append(d, model->opset_import, &model->n_opset_import, row);
    break;
  case 2:
    model->ir_version = DAMAGE_CHOOSE(d, versions);
    break;
  default:
    row->version = DAMAGE_CHOOSE(d, versions);
  }
}

/* ---- functions and bodies ------------------------------------------------------------------------------------- */

static Onnx__FunctionProto *add_function(damage *d, const char *name) {
  Onnx__FunctionProto *function = EGI_NEW(d->arena, Onnx__FunctionProto, 1);
  onnx__function_proto__init(function);
  function->name = damage_text(d, name);
  function->domain = damage_text(d, "local");
  function->input = damage_append(d, NULL, &function->n_input, damage_text(d, "a"));
  function->output = damage_append(d, NULL, &function->n_output, damage_text(d, "b"));
  function->opset_import = d->model->opset_import;
  function->n_opset_import = d->model->n_opset_import;
  d->model->functions = damage_append(d, d->model->functions, &d->model->n_functions, function);
  return function;
}

/* Adds `output` = local.name(input) to a function. */
static void add_call(damage *d, Onnx__FunctionProto *function, const char *name, const char *input,
                     const char *output) {
  Onnx__GraphProto holder = ONNX__GRAPH_PROTO__INIT;
  Onnx__NodeProto *node = damage_add_node(d, &holder, name, input, output);
  node->domain = damage_text(d, "local");
  function->node = damage_append(d, function->node, &function->n_node, node);
}

static void call_first_function(damage *d) {
  damage_add_node(d, d->graph, "F0", damage_any_name(d), "called")->domain = damage_text(d, "local");
}

static void recurse_functions(damage *d) {
  unsigned length = 1 + (unsigned)damage_random(d, 3);
  for (unsigned i = 0; i < length; i++) {
    char name[24], next[24];
    snprintf(name, sizeof(name), "F%u", i);
    snprintf(next, sizeof(next), "F%u", (i + 1) % length);
    add_call(d, add_function(d, name), next, "a", "b");
  }
  call_first_function(d);
}

/* Each calls the next one twice: 2^40 nodes. */
static void multiply_functions(damage *d) {
  for (unsigned i = 0; i < 40; i++) {
    char name[24], next[24];
    snprintf(name, sizeof(name), "F%u", i);
    snprintf(next, sizeof(next), "F%u", i + 1);
    Onnx__FunctionProto *function = add_function(d, name);
    add_call(d, function, next, "a", "c");
    add_call(d, function, next, "c", "b");
  }
  Onnx__FunctionProto *last = add_function(d, "F40");
  add_call(d, last, "Abs", "a", "b");
  last->node[0]->domain = damage_text(d, "");
  call_first_function(d);
}

static void shadow_function(damage *d) {
  Onnx__FunctionProto *function = add_function(d, damage_any_node(d)->op_type);
  function->domain = damage_text(d, damage_random(d, 2) ? "" : "local");
  add_call(d, function, "Abs", "a", "b");
  function->node[0]->domain = damage_text(d, "");
}

static Onnx__GraphProto *new_body(damage *d) {
  Onnx__GraphProto *body = EGI_NEW(d->arena, Onnx__GraphProto, 1);
  onnx__graph_proto__init(body);
  body->name = damage_text(d, "body");
  Onnx__ValueInfoProto *info = EGI_NEW(d->arena, Onnx__ValueInfoProto, 1);
  onnx__value_info_proto__init(info);
  info->name = damage_text(d, "r");
  body->output = damage_append(d, NULL, &body->n_output, info);
  return body;
}

static void nest_bodies(damage *d) {
  Onnx__GraphProto *graph = d->graph;
  unsigned depth = 1 + (unsigned)damage_random(d, 150);
  for (unsigned i = 0; i < depth; i++) {
    char name[24];
    snprintf(name, sizeof(name), "nested%u", i);
    Onnx__NodeProto *node = damage_add_node(d, graph, "If", damage_any_name(d), i ? "r" : name);
    Onnx__AttributeProto *attribute = damage_add_attribute(d, node, "then_branch", EGI_ATTRIBUTE_GRAPH);
    attribute->g = new_body(d);
    if (damage_random(d, 2)) damage_add_attribute(d, node, "else_branch", EGI_ATTRIBUTE_GRAPH)->g = attribute->g;
    if (attribute->g && node->n_attribute > 1) node->n_attribute = 1; /* two deep branches a level would be 2^depth */
    graph = attribute->g;
  }
  damage_add_node(d, graph, "Abs", damage_any_name(d), "r");
}

/* A Loop that never ends by itself, with nothing or much to unroll. */
static void loop_forever(damage *d) {
  static const int64_t counts[] = {0, 1, 1000, 1000000, INT64_C(1) << 40, INT64_MAX, -1, INT64_MIN};
  int64_t count = DAMAGE_CHOOSE(d, counts);
  memcpy(damage_add_weight(d, "trips", EG_DTYPE_I64, 0, NULL, 8)->raw_data.data, &count, 8);
  damage_add_weight(d, "true", EG_DTYPE_BOOL, 0, NULL, 1)->raw_data.data[0] = 1;
  Onnx__NodeProto *node = damage_add_node(d, d->graph, "Loop", damage_random(d, 4) ? "trips" : "", "looped");
  node->input = damage_append(d, node->input, &node->n_input, damage_text(d, damage_random(d, 2) ? "true" : ""));
  node->input = damage_append(d, node->input, &node->n_input, damage_any_name(d));
  Onnx__GraphProto *body = new_body(d);
  damage_add_attribute(d, node, "body", EGI_ATTRIBUTE_GRAPH)->g = body;
  static const char *const names[] = {"i", "condition", "carried"};
  for (unsigned i = 0; i < 3; i++) {
    Onnx__ValueInfoProto *info = EGI_NEW(d->arena, Onnx__ValueInfoProto, 1);
    onnx__value_info_proto__init(info);
    info->name = damage_text(d, names[i]);
    body->input = damage_append(d, body->input, &body->n_input, info);
  }
  Onnx__ValueInfoProto *info = EGI_NEW(d->arena, Onnx__ValueInfoProto, 1);
  onnx__value_info_proto__init(info);
  info->name = damage_text(d, "c");
  body->output = damage_append(d, body->output, &body->n_output, body->output[0]);
  body->output[0] = info;
  damage_add_node(d, body, "Identity", "condition", "c");
  damage_add_node(d, body, damage_random(d, 2) ? "Identity" : "Neg", "carried", "r");
  damage_give_out(d, "looped");
}

/* ---- the graph's ends ----------------------------------------------------------------------------------------- */

static void change_ends(damage *d) {
  Onnx__GraphProto *graph = d->graph;
  switch (damage_random(d, 7)) {
  case 0:
    graph->n_input = graph->n_input ? graph->n_input - 1 : 0;
    break;
  case 1:
    graph->n_output = graph->n_output ? graph->n_output - 1 : 0;
    break;
  case 2:
    if (graph->n_output) graph->output[0]->name = damage_text(d, "nowhere");
    break;
  case 3:
    if (graph->n_output) graph->output = damage_append(d, graph->output, &graph->n_output, graph->output[0]);
    break;
  case 4:
    if (graph->n_input) graph->input = damage_append(d, graph->input, &graph->n_input, graph->input[0]);
    break;
  case 5:
    graph->n_node = 0;
    break;
  default:
    d->model->graph = NULL;
  }
}

const damage_kind damage_graph_kinds[] = {
    {"close a cycle", close_cycle},
    {"shadow a name", shadow_name},
    {"rewire an input", rewire_input},
    {"lose an input", lose_input},
    {"add an input", add_input},
    {"change the outputs", change_outputs},
    {"repeat a weight", repeat_weight},
    {"repeat a node", repeat_node},
    {"spoil a name", spoil_name},
    {"lengthen a name", lengthen_name},
    {"shuffle the nodes", shuffle_nodes},
    {"drop a node", drop_node},
    {"change an operator", change_operator},
    {"invent an operator", invent_operator},
    {"change a version", change_version},
    {"recurse in functions", recurse_functions},
    {"multiply functions", multiply_functions},
    {"shadow a function", shadow_function},
    {"nest bodies", nest_bodies},
    {"loop forever", loop_forever},
    {"change the graph's ends", change_ends},
};
const unsigned damage_n_graph_kinds = (unsigned)(sizeof(damage_graph_kinds) / sizeof(damage_graph_kinds[0]));
