/* Parses the ONNX text syntax (onnx/docs/Syntax.md) into a module. Operators have the newest semantics whatever the
 * header's opset_import says: text is for rules, dumps and tests, not for old files. */
#include "graph/text_parse.h"

#include <string.h>

eg_status egi_parser_value(egi_parser *parser, egi_graph *graph, const char *name, egi_value_id *out_value) {
  (void)parser;
  *out_value = 0;
  if (name[0] == '\0') return EG_OK;
  *out_value = egi_graph_find_value(graph, name);
  if (*out_value != 0) return EG_OK;
  return egi_graph_add_value(graph, name, out_value);
}

static eg_status parse_name_list(egi_parser *parser, egi_graph *graph, char stop, egi_value_id **out_values,
                                 uint16_t *out_count) {
  egi_value_id *values = NULL;
  uint32_t count = 0, capacity = 0;
  bool has_more = !egi_lexer_is_sign(&parser->lexer, stop);
  while (has_more) {
    const char *name = "";
    EG_TRY(EGI_GROW(&parser->module->arena, &values, count, &capacity));
    if (!egi_lexer_is_sign(&parser->lexer, ',') && !egi_lexer_is_sign(&parser->lexer, stop))
      EG_TRY(egi_lexer_take_name(&parser->lexer, &name));
    if (count == UINT16_MAX) return egi_lexer_fail(&parser->lexer, "fewer names");
    EG_TRY(egi_parser_value(parser, graph, name, &values[count++]));
    EG_TRY(egi_lexer_accept(&parser->lexer, ',', &has_more));
  }
  *out_values = values;
  *out_count = (uint16_t)count;
  return EG_OK;
}

eg_status egi_parse_value_names(egi_parser *parser, egi_graph *graph, egi_value_id **out_values, uint16_t *out_count) {
  EG_TRY(egi_lexer_expect(&parser->lexer, '('));
  EG_TRY(parse_name_list(parser, graph, ')', out_values, out_count));
  return egi_lexer_expect(&parser->lexer, ')');
}

/* "Domain.Op": the domain is all before the last dot. */
static eg_status set_operator(egi_parser *parser, egi_node *node, const char *qualified) {
  const char *dot = strrchr(qualified, '.');
  node->op_name = dot != NULL ? dot + 1 : qualified;
  node->domain = "";
  if (dot != NULL) node->domain = egi_arena_copy_text(&parser->module->arena, qualified, (size_t)(dot - qualified));
  if (node->domain == NULL) return EG_ERROR_MEMORY;
  node->op = egi_op_find(node->domain, node->op_name);
  return EG_OK;
}

/* The value of an output name: made by nobody else. */
static eg_status check_outputs(egi_parser *parser, const egi_graph *graph, const egi_node *node) {
  for (unsigned i = 0; i < node->n_outputs; i++) {
    const egi_value *value = &graph->values[node->outputs[i]];
    if (node->outputs[i] != 0 && (value->kind != EGI_VALUE_NODE || value->producer != 0))
      return egi_fail(parser->module->ctx, EG_ERROR_FORMAT, "text: value \"%s\" is made twice", value->name);
  }
  return EG_OK;
}

static eg_status parse_node(egi_parser *parser, egi_graph *graph) {
  egi_node node = {0};
  egi_node_id id;
  const char *qualified;
  bool is_taken;
  node.name = "";
  EG_TRY(egi_lexer_accept(&parser->lexer, '[', &is_taken));
  if (is_taken) {
    EG_TRY(egi_lexer_take_name(&parser->lexer, &node.name));
    EG_TRY(egi_lexer_expect(&parser->lexer, ']'));
    node.scope = egi_scope_from_node_name(&parser->module->arena, node.name);
  }
  EG_TRY(parse_name_list(parser, graph, '=', &node.outputs, &node.n_outputs));
  EG_TRY(egi_lexer_expect(&parser->lexer, '='));
  EG_TRY(egi_lexer_take_name(&parser->lexer, &qualified));
  EG_TRY(set_operator(parser, &node, qualified));
  EG_TRY(egi_lexer_accept(&parser->lexer, ':', &is_taken));
  if (is_taken) EG_TRY(egi_lexer_take_name(&parser->lexer, &node.overload));
  if (egi_lexer_is_sign(&parser->lexer, '<'))
    EG_TRY(egi_parse_attributes(parser, &node.attributes, &node.n_attributes));
  EG_TRY(egi_parse_value_names(parser, graph, &node.inputs, &node.n_inputs));
  if (egi_lexer_is_sign(&parser->lexer, '<'))
    EG_TRY(egi_parse_attributes(parser, &node.attributes, &node.n_attributes));
  EG_TRY(check_outputs(parser, graph, &node));
  return egi_graph_add_node(graph, &node, &id);
}

eg_status egi_parse_nodes(egi_parser *parser, egi_graph *graph) {
  EG_TRY(egi_lexer_expect(&parser->lexer, '{'));
  while (!egi_lexer_is_sign(&parser->lexer, '}')) EG_TRY(parse_node(parser, graph));
  EG_TRY(egi_lexer_advance(&parser->lexer));
  for (egi_value_id id = 1; id < graph->n_values; id++) {
    const egi_value *value = &graph->values[id];
    if (value->kind == EGI_VALUE_NODE && value->producer == 0)
      return egi_fail(parser->module->ctx, EG_ERROR_FORMAT, "text: value \"%s\" is used but made by no node",
                      value->name);
  }
  return EG_OK;
}

static eg_status parse_input(egi_parser *parser, egi_graph *graph) {
  egi_parsed_type type;
  const char *name;
  egi_value_id value;
  EG_TRY(egi_parse_type(parser, &type));
  EG_TRY(egi_lexer_take_name(&parser->lexer, &name));
  if (egi_graph_find_value(graph, name) != 0)
    return egi_fail(parser->module->ctx, EG_ERROR_FORMAT, "text: value \"%s\" is made twice", name);
  return egi_graph_add_input(graph, name, type.dtype, type.rank, type.dims, &value);
}

/* The value may be made by a node that is still to come; its type is checked when shapes are inferred. */
static eg_status parse_output(egi_parser *parser, egi_graph *graph) {
  egi_parsed_type type;
  const char *name;
  egi_value_id value;
  EG_TRY(egi_parse_type(parser, &type));
  EG_TRY(egi_lexer_take_name(&parser->lexer, &name));
  EG_TRY(egi_parser_value(parser, graph, name, &value));
  if (value == 0) return egi_lexer_fail(&parser->lexer, "an output with a name");
  if (graph->values[value].kind == EGI_VALUE_NODE) {
    graph->values[value].dtype = type.dtype;
    graph->values[value].rank = type.rank;
    memcpy(graph->values[value].dims, type.dims, sizeof type.dims);
  }
  return egi_graph_add_output(graph, value);
}

static eg_status parse_infos(egi_parser *parser, egi_graph *graph,
                             eg_status (*parse_info)(egi_parser *parser, egi_graph *graph)) {
  bool has_more = true;
  EG_TRY(egi_lexer_expect(&parser->lexer, '('));
  while (has_more && !egi_lexer_is_sign(&parser->lexer, ')')) {
    EG_TRY(parse_info(parser, graph));
    EG_TRY(egi_lexer_accept(&parser->lexer, ',', &has_more));
  }
  return egi_lexer_expect(&parser->lexer, ')');
}

/* "<float[2] w = {1, 2}, float[B] v>": initializers, and types of inner values, which inference finds anyway. */
static eg_status parse_initializers(egi_parser *parser, egi_graph *graph) {
  bool has_more = true;
  EG_TRY(egi_lexer_expect(&parser->lexer, '<'));
  while (has_more) {
    egi_parsed_type type;
    egi_weight weight = {0};
    uint32_t index;
    egi_value_id value;
    bool has_content;
    EG_TRY(egi_parse_type(parser, &type));
    EG_TRY(egi_lexer_take_name(&parser->lexer, &weight.name));
    EG_TRY(egi_lexer_accept(&parser->lexer, '=', &has_content));
    if (has_content) {
      if (egi_graph_find_value(graph, weight.name) != 0)
        return egi_fail(parser->module->ctx, EG_ERROR_FORMAT, "text: value \"%s\" is made twice", weight.name);
      EG_TRY(egi_parse_tensor_content(parser, &type, &weight));
      EG_TRY(egi_module_add_weight(parser->module, &weight, &index));
      EG_TRY(egi_graph_add_weight(graph, index, &value));
    }
    EG_TRY(egi_lexer_accept(&parser->lexer, ',', &has_more));
  }
  return egi_lexer_expect(&parser->lexer, '>');
}

eg_status egi_parse_graph(egi_parser *parser, egi_graph *graph) {
  const char *name;
  EG_TRY(egi_lexer_take_name(&parser->lexer, &name));
  EG_TRY(parse_infos(parser, graph, parse_input));
  EG_TRY(egi_lexer_expect_arrow(&parser->lexer));
  EG_TRY(parse_infos(parser, graph, parse_output));
  if (egi_lexer_is_sign(&parser->lexer, '<')) EG_TRY(parse_initializers(parser, graph));
  return egi_parse_nodes(parser, graph);
}

/* Header entries are read and, but for a function's domain and overload, not needed. */
static eg_status parse_header(egi_parser *parser, egi_function *function) {
  egi_lexer *lexer = &parser->lexer;
  bool has_more = true;
  EG_TRY(egi_lexer_expect(lexer, '<'));
  while (has_more && !egi_lexer_is_sign(lexer, '>')) {
    const char *key;
    EG_TRY(egi_lexer_take_name(lexer, &key));
    EG_TRY(egi_lexer_expect(lexer, ':'));
    if (egi_lexer_is_sign(lexer, '[')) {
      while (!egi_lexer_is_sign(lexer, ']')) {
        if (lexer->token.kind == EGI_TOKEN_END) return egi_lexer_fail(lexer, "']'");
        EG_TRY(egi_lexer_advance(lexer));
      }
    } else if (function != NULL && strcmp(key, "domain") == 0) {
      function->domain = lexer->token.text;
    } else if (function != NULL && strcmp(key, "overload") == 0) {
      function->overload = lexer->token.text;
    }
    EG_TRY(egi_lexer_advance(lexer));
    EG_TRY(egi_lexer_accept(lexer, ',', &has_more));
  }
  return egi_lexer_expect(lexer, '>');
}

/* "<alpha, beta: float = 1.0>" in front of a function's inputs: those with a value are defaults. */
static eg_status parse_function_attributes(egi_parser *parser, egi_function *function) {
  egi_lexer *lexer = &parser->lexer;
  egi_attribute *defaults = NULL;
  uint32_t count = 0, capacity = 0;
  bool has_more = true;
  EG_TRY(egi_lexer_expect(lexer, '<'));
  while (has_more) {
    egi_attribute attribute = {0};
    EG_TRY(egi_lexer_take_name(lexer, &attribute.name));
    if (egi_lexer_is_sign(lexer, '=') || egi_lexer_is_sign(lexer, ':')) {
      EG_TRY(egi_parse_attribute_value(parser, &attribute));
      EG_TRY(EGI_GROW(&parser->module->arena, &defaults, count, &capacity));
      defaults[count++] = attribute;
    }
    EG_TRY(egi_lexer_accept(lexer, ',', &has_more));
  }
  function->defaults = defaults;
  function->n_defaults = count;
  return egi_lexer_expect(lexer, '>');
}

static eg_status parse_function(egi_parser *parser) {
  egi_module *module = parser->module;
  egi_function function = {0};
  egi_value_id *values;
  uint16_t count;
  EG_TRY(parse_header(parser, &function));
  EG_TRY(egi_lexer_take_name(&parser->lexer, &function.name));
  if (function.domain == NULL) function.domain = "";
  EG_TRY(egi_graph_create(module, function.name, &function.graph));
  if (egi_lexer_is_sign(&parser->lexer, '<')) EG_TRY(parse_function_attributes(parser, &function));
  EG_TRY(egi_lexer_expect(&parser->lexer, '('));
  bool has_more = !egi_lexer_is_sign(&parser->lexer, ')');
  while (has_more) {
    const char *name;
    egi_value_id value;
    EG_TRY(egi_lexer_take_name(&parser->lexer, &name));
    EG_TRY(egi_graph_add_input(function.graph, name, EG_DTYPE_UNDEFINED, -1, NULL, &value));
    EG_TRY(egi_lexer_accept(&parser->lexer, ',', &has_more));
  }
  EG_TRY(egi_lexer_expect(&parser->lexer, ')'));
  EG_TRY(egi_lexer_expect_arrow(&parser->lexer));
  EG_TRY(egi_parse_value_names(parser, function.graph, &values, &count));
  for (unsigned i = 0; i < count; i++) EG_TRY(egi_graph_add_output(function.graph, values[i]));
  EG_TRY(egi_parse_nodes(parser, function.graph));
  EG_TRY(EGI_GROW(&module->arena, &module->functions, module->n_functions, &module->functions_capacity));
  module->functions[module->n_functions++] = function;
  return EG_OK;
}

static eg_status parse_model(egi_parser *parser) {
  egi_graph *graph;
  if (egi_lexer_is_sign(&parser->lexer, '<')) EG_TRY(parse_header(parser, NULL));
  if (parser->lexer.token.kind != EGI_TOKEN_NAME && parser->lexer.token.kind != EGI_TOKEN_STRING)
    return egi_lexer_fail(&parser->lexer, "a graph");
  EG_TRY(egi_module_add_graph(parser->module, parser->lexer.token.text, &graph));
  EG_TRY(egi_parse_graph(parser, graph));
  while (egi_lexer_is_sign(&parser->lexer, '<')) EG_TRY(parse_function(parser));
  if (parser->lexer.token.kind != EGI_TOKEN_END) return egi_lexer_fail(&parser->lexer, "the end");
  return egi_graph_tidy(graph);
}

eg_status egi_module_parse_function(egi_module *module, const char *text, size_t length) {
  egi_parser parser = {.module = module};
  parser.lexer.ctx = module->ctx;
  parser.lexer.arena = &module->arena;
  EG_TRY(egi_lexer_open(&parser.lexer, text, length));
  return parse_function(&parser);
}

eg_status egi_module_parse(eg_context *ctx, const char *text, size_t length, egi_module **out_module) {
  egi_parser parser = {0};
  EG_TRY(egi_module_create(ctx, &parser.module));
  parser.lexer.ctx = ctx;
  parser.lexer.arena = &parser.module->arena;
  eg_status status = egi_lexer_open(&parser.lexer, text, length);
  if (status == EG_OK) status = parse_model(&parser);
  if (status != EG_OK) {
    egi_module_destroy(parser.module);
    return status;
  }
  *out_module = parser.module;
  return EG_OK;
}
