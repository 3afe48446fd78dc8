/* Model-local functions: each is a graph of its own with its own operator sets. Calls that come back to the function
 * they stand in are refused here, so that inlining ends. */
#include "graph/import.h"

#define MAX_FUNCTIONS 10000u

typedef struct call_checker {
  egi_importer *importer;
  egi_map by_key;
  uint32_t n_functions;
  const Onnx__FunctionProto *const *functions;
  uint8_t *colour; /* 0 new, 1 open, 2 done */
} call_checker;

/* The parts of an identity cannot hold a line feed unless somebody tries; then keys clash and the file is refused. */
static const char *key_of(egi_arena *arena, const char *domain, const char *name, const char *overload) {
  return egi_arena_format(arena, "%s\n%s\n%s", egi_import_text(domain), egi_import_text(name),
                          egi_import_text(overload));
}

static eg_status collect(call_checker *checker) {
  egi_importer *importer = checker->importer;
  for (uint32_t i = 0; i < checker->n_functions; i++) {
    const Onnx__FunctionProto *function = checker->functions[i];
    const char *key = key_of(&importer->scratch, function->domain, function->name, function->overload);
    if (!key) return EG_ERROR_MEMORY;
    if (!egi_import_text(function->name)[0])
      return egi_fail(importer->ctx, EG_ERROR_FORMAT, "%s: function %u has no name", importer->path, i);
    if (egi_map_get(&checker->by_key, key, NULL))
      return egi_fail(importer->ctx, EG_ERROR_FORMAT, "%s: function \"%s\" of domain \"%s\" stands there twice",
                      importer->path, function->name, egi_import_text(function->domain));
    EG_TRY(egi_map_put(&checker->by_key, key, i));
  }
  return EG_OK;
}

static eg_status check_calls(call_checker *checker, uint32_t function, uint32_t depth);

/* Recursion over bodies is bounded by the depth of the message, over calls by the same limit. */
static eg_status check_node(call_checker *checker, const Onnx__NodeProto *node, uint32_t depth) {
  uint32_t callee = 0;
  const char *key = key_of(&checker->importer->scratch, node->domain, node->op_type, node->overload);
  if (!key) return EG_ERROR_MEMORY;
  if (egi_map_get(&checker->by_key, key, &callee)) EG_TRY(check_calls(checker, callee, depth + 1));
  for (size_t i = 0; i < node->n_attribute; i++) {
    const Onnx__AttributeProto *attribute = node->attribute[i];
    for (size_t j = 0; attribute->g && j < attribute->g->n_node; j++)
      EG_TRY(check_node(checker, attribute->g->node[j], depth));
  }
  return EG_OK;
}

static eg_status check_calls(call_checker *checker, uint32_t index, uint32_t depth) {
  egi_importer *importer = checker->importer;
  const Onnx__FunctionProto *function = checker->functions[index];
  if (checker->colour[index] == 2) return EG_OK;
  if (checker->colour[index] == 1)
    return egi_fail(importer->ctx, EG_ERROR_FORMAT, "%s: function \"%s\" calls itself", importer->path, function->name);
  if (depth > egi_onnx_get_limits(importer->file)->max_depth)
    return egi_fail(importer->ctx, EG_ERROR_BUDGET, "%s: function \"%s\": calls nested deeper than %u", importer->path,
                    function->name, egi_onnx_get_limits(importer->file)->max_depth);
  checker->colour[index] = 1;
  for (size_t i = 0; i < function->n_node; i++) EG_TRY(check_node(checker, function->node[i], depth));
  checker->colour[index] = 2;
  return EG_OK;
}

static eg_status import_defaults(egi_import_scope *scope, const Onnx__FunctionProto *proto, egi_function *function) {
  egi_arena *arena = &scope->importer->module->arena;
  egi_attribute *defaults = EGI_NEW(arena, egi_attribute, proto->n_attribute_proto);
  if (!defaults) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < proto->n_attribute_proto; i++) {
    egi_attribute attribute;
    bool is_kept = true;
    EG_TRY(egi_import_attribute(scope, proto->attribute_proto[i], &attribute, &is_kept));
    if (is_kept) EG_TRY(egi_attribute_copy(arena, &attribute, &defaults[function->n_defaults++]));
  }
  function->defaults = defaults;
  return EG_OK;
}

static eg_status fill_body(egi_import_scope *scope, const Onnx__FunctionProto *proto) {
  egi_value_id value = 0;
  for (size_t i = 0; i < proto->n_input; i++) {
    EG_TRY(egi_import_claim(scope, NULL, proto->input[i]));
    EG_TRY(egi_graph_add_input(scope->graph, proto->input[i], EG_DTYPE_UNDEFINED, -1, NULL, &value));
  }
  EG_TRY(egi_import_declare(scope, proto->n_node, proto->node));
  EG_TRY(egi_import_nodes(scope, proto->n_node, proto->node));
  for (size_t i = 0; i < proto->n_output; i++) {
    EG_TRY(egi_import_use(scope, NULL, proto->output[i], &value));
    EG_TRY(egi_graph_add_output(scope->graph, value));
  }
  return egi_graph_tidy(scope->graph);
}

static eg_status import_function(egi_importer *importer, const Onnx__ModelProto *model,
                                 const Onnx__FunctionProto *proto) {
  egi_module *module = importer->module;
  egi_function function = {.domain = egi_import_text(proto->domain),
                           .name = proto->name,
                           .overload = proto->overload && proto->overload[0] ? proto->overload : NULL};
  egi_import_scope scope = {.importer = importer, .function = proto->name};
  bool has_opsets = proto->n_opset_import > 0;
  scope.opsets.rows = (const Onnx__OperatorSetIdProto *const *)(has_opsets ? proto->opset_import : model->opset_import);
  scope.opsets.count = has_opsets ? proto->n_opset_import : model->n_opset_import;
  if (!strcmp(function.domain, "ai.onnx")) function.domain = "";
  egi_map_init(&scope.refused, &importer->scratch);
  EG_TRY(egi_import_opsets(importer, &scope.opsets));
  EG_TRY(egi_graph_create(module, proto->name, &scope.graph));
  EG_TRY(fill_body(&scope, proto));
  EG_TRY(import_defaults(&scope, proto, &function));
  function.graph = scope.graph;
  EG_TRY(EGI_GROW(&module->arena, &module->functions, module->n_functions, &module->functions_capacity));
  module->functions[module->n_functions++] = function;
  return EG_OK;
}

eg_status egi_import_functions(egi_importer *importer, const Onnx__ModelProto *model) {
  call_checker checker = {.importer = importer,
                          .n_functions = (uint32_t)model->n_functions,
                          .functions = (const Onnx__FunctionProto *const *)model->functions};
  if (model->n_functions > MAX_FUNCTIONS)
    return egi_fail(importer->ctx, EG_ERROR_BUDGET, "%s: more than %u functions", importer->path, MAX_FUNCTIONS);
  checker.colour = EGI_NEW(&importer->scratch, uint8_t, model->n_functions);
  if (!checker.colour) return EG_ERROR_MEMORY;
  egi_map_init(&checker.by_key, &importer->scratch);
  EG_TRY(collect(&checker));
  for (uint32_t i = 0; i < checker.n_functions; i++) EG_TRY(check_calls(&checker, i, 0));
  for (size_t i = 0; i < model->n_functions; i++) EG_TRY(import_function(importer, model, model->functions[i]));
  return EG_OK;
}
