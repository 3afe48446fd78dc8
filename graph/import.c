/* ModelProto → module. Weights first, then inputs, then every name that a node makes with its declared type, then the
 * nodes in the file's order, which the final sort corrects. */
#include "graph/import.h"

#define OLDEST_IR 3
#define NEWEST_IR 14
/* Larger weights that a caller could replace, being graph inputs too, are worth a warning. */
#define LARGE_WEIGHT_BYTES 4096u

const char *egi_import_text(const char *text) {
  return text ? text : "";
}

eg_status egi_import_fail_node(const egi_import_scope *scope, const Onnx__NodeProto *node, eg_status status,
                               const char *format, ...) {
  char reason[512];
  const char *name = egi_import_text(node->name);
  if (!*name && node->n_output) name = node->output[0];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(reason, sizeof(reason), format, arguments);
  va_end(arguments);
  return egi_fail(scope->importer->ctx, status, "%s: %s%s%snode \"%s\" (%s): %s", scope->importer->path,
                  scope->function ? "function " : "", scope->function ? scope->function : "",
                  scope->function ? ": " : "", name, egi_import_text(node->op_type), reason);
}

eg_status egi_import_fail_tensor(const egi_importer *importer, const char *name, eg_status status, const char *format,
                                 ...) {
  char reason[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(reason, sizeof(reason), format, arguments);
  va_end(arguments);
  return egi_fail(importer->ctx, status, "%s: tensor \"%s\": %s", importer->path, name, reason);
}

int64_t egi_opset_version(const egi_opsets *opsets, const char *domain) {
  for (size_t i = 0; i < opsets->count; i++) {
    const char *name = egi_import_text(opsets->rows[i]->domain);
    if (!strcmp(name, "ai.onnx")) name = "";
    if (!strcmp(name, domain)) return opsets->rows[i]->version;
  }
  return 0;
}

/* ---- graphs --------------------------------------------------------------------------------------------------- */

static eg_status import_initializers(egi_import_scope *scope, const Onnx__GraphProto *graph) {
  egi_importer *importer = scope->importer;
  for (size_t i = 0; i < graph->n_initializer; i++) {
    const char *name = egi_import_text(graph->initializer[i]->name), *reason = NULL;
    egi_weight weight;
    uint32_t index = 0;
    egi_value_id value;
    if (!*name) return egi_fail(importer->ctx, EG_ERROR_FORMAT, "%s: initializer %zu has no name", importer->path, i);
    EG_TRY(egi_import_claim(scope, NULL, name));
    EG_TRY(egi_import_tensor(importer, graph->initializer[i], name, &weight, &reason));
    if (reason) {
      EG_TRY(egi_import_refuse(scope, name, reason));
      continue;
    }
    EG_TRY(egi_module_add_weight(importer->module, &weight, &index));
    EG_TRY(egi_graph_add_weight(scope->graph, index, &value));
  }
  for (size_t i = 0; i < graph->n_sparse_initializer; i++) {
    const Onnx__TensorProto *values = graph->sparse_initializer[i]->values;
    const char *name = values ? egi_import_text(values->name) : "";
    EG_TRY(egi_import_claim(scope, NULL, name));
    EG_TRY(egi_import_refuse(scope, name, "a sparse tensor"));
  }
  return EG_OK;
}

/* A graph input that is also an initializer is a default that a caller could replace; here it is a constant. */
static bool is_constant_input(const egi_import_scope *scope, const char *name) {
  egi_value_id id = egi_graph_find_value(scope->graph, name);
  if (!id) return egi_map_get(&scope->refused, name, NULL);
  if (scope->graph->values[id].kind != EGI_VALUE_WEIGHT) return false;
  const egi_weight *weight = &scope->importer->module->weights[scope->graph->values[id].index];
  if (weight->bytes.size_bytes >= LARGE_WEIGHT_BYTES)
    egi_log(scope->importer->ctx, EG_LOG_WARNING, "%s: input \"%s\" has an initializer and is taken as a constant",
            scope->importer->path, name);
  return true;
}

static eg_status import_inputs(egi_import_scope *scope, const Onnx__GraphProto *graph, bool is_main) {
  for (size_t i = 0; i < graph->n_input; i++)
    if (!is_constant_input(scope, egi_import_text(graph->input[i]->name)))
      EG_TRY(egi_import_input(scope, graph->input[i], is_main));
  return EG_OK;
}

static eg_status import_outputs(egi_import_scope *scope, const Onnx__GraphProto *graph) {
  for (size_t i = 0; i < graph->n_output; i++) {
    egi_value_id value = 0;
    const char *name = egi_import_text(graph->output[i]->name);
    if (!*name)
      return egi_fail(scope->importer->ctx, EG_ERROR_FORMAT, "%s: graph output %zu has no name", scope->importer->path,
                      i);
    EG_TRY(egi_import_use(scope, NULL, name, &value));
    EG_TRY(egi_graph_add_output(scope->graph, value));
  }
  return EG_OK;
}

eg_status egi_import_graph(egi_import_scope *scope, const Onnx__GraphProto *graph, bool is_main) {
  EG_TRY(import_initializers(scope, graph));
  EG_TRY(import_inputs(scope, graph, is_main));
  EG_TRY(egi_import_declare(scope, graph->n_node, graph->node));
  for (size_t i = 0; i < graph->n_value_info; i++) EG_TRY(egi_import_hint(scope, graph->value_info[i]));
  for (size_t i = 0; i < graph->n_output; i++) EG_TRY(egi_import_hint(scope, graph->output[i]));
  EG_TRY(egi_import_nodes(scope, graph->n_node, graph->node));
  EG_TRY(import_outputs(scope, graph));
  return egi_graph_tidy(scope->graph);
}

/* ---- models --------------------------------------------------------------------------------------------------- */

eg_status egi_import_opsets(const egi_importer *importer, const egi_opsets *opsets) {
  for (size_t i = 0; i < opsets->count; i++) {
    const char *domain = egi_import_text(opsets->rows[i]->domain);
    if (!strcmp(domain, "ai.onnx")) domain = "";
    int64_t version = opsets->rows[i]->version;
    if (version < 1)
      return egi_fail(importer->ctx, EG_ERROR_FORMAT, "%s: operator set \"%s\" of version %lld", importer->path, domain,
                      (long long)version);
    if (version != egi_opset_version(opsets, domain))
      return egi_fail(importer->ctx, EG_ERROR_FORMAT, "%s: operator set \"%s\" is imported twice", importer->path,
                      domain);
  }
  return EG_OK;
}

static eg_status check_header(const egi_importer *importer, const Onnx__ModelProto *model) {
  if (model->ir_version < OLDEST_IR)
    return egi_fail(importer->ctx, EG_ERROR_UNSUPPORTED, "%s: IR version %lld; the oldest that can be read is %d",
                    importer->path, (long long)model->ir_version, OLDEST_IR);
  if (model->ir_version > NEWEST_IR)
    egi_log(importer->ctx, EG_LOG_WARNING, "%s: IR version %lld is newer than %d", importer->path,
            (long long)model->ir_version, NEWEST_IR);
  return EG_OK;
}

static eg_status import_model(egi_importer *importer) {
  const Onnx__ModelProto *model = egi_onnx_model(importer->file);
  egi_import_scope scope = {
      .importer = importer,
      .opsets = {(const Onnx__OperatorSetIdProto *const *)model->opset_import, model->n_opset_import}};
  egi_map_init(&scope.refused, &importer->scratch);
  EG_TRY(check_header(importer, model));
  EG_TRY(egi_import_opsets(importer, &scope.opsets));
  EG_TRY(egi_import_symbols(importer, model->graph));
  EG_TRY(egi_module_add_graph(importer->module, egi_import_text(model->graph->name), &scope.graph));
  EG_TRY(egi_import_functions(importer, model));
  EG_TRY(egi_import_graph(&scope, model->graph, true));
  return importer->has_scopes ? EG_OK : egi_graph_complete_scopes(scope.graph, &importer->scratch);
}

eg_status egi_module_import(eg_context *ctx, egi_onnx *file, egi_module **out_module) {
  egi_importer importer = {.ctx = ctx, .file = file, .path = egi_onnx_path(file)};
  eg_status status = egi_module_create(ctx, &importer.module);
  if (status != EG_OK) {
    egi_onnx_release(file);
    return status;
  }
  importer.module->file = file;
  egi_arena_init(&importer.scratch, ctx, EGI_PURPOSE_GRAPH);
  egi_map_init(&importer.symbols, &importer.scratch);
  status = import_model(&importer);
  egi_arena_clear(&importer.scratch);
  if (status == EG_OK)
    *out_module = importer.module;
  else
    egi_module_destroy(importer.module);
  return status;
}

const char *egi_module_path(const egi_module *module) {
  return module->file != NULL ? egi_onnx_path(module->file) : NULL;
}

eg_status egi_module_import_again(const egi_module *module, egi_module **out_module) {
  egi_onnx_retain(module->file);
  EG_TRY(egi_module_import(module->ctx, module->file, out_module));
  (*out_module)->evaluator = module->evaluator;
  (*out_module)->costs = module->costs;
  return EG_OK;
}
