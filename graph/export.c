/* Module → ONNX file. What the file it came from said about the model, the graph and its values stays; the rest is the
 * graph's. */
#include "graph/export.h"

#define EMBED_LIMIT ((uint64_t)1 << 30)
/* IR versions: model-local functions; overloads and metadata, which operator sets from 21 on go with. */
#define OLDEST_IR 8
#define METADATA_IR 10
#define METADATA_OPSET 21
#define FIRST_VERSION 1

/* ---- what the file said --------------------------------------------------------------------------------------- */

static eg_status remember_infos(egi_exporter *exporter, uint32_t *count, Onnx__ValueInfoProto *const *infos,
                                size_t n_infos) {
  for (size_t i = 0; i < n_infos; i++) {
    if (!infos[i]->name) continue;
    exporter->info_rows[*count] = infos[i];
    EG_TRY(egi_map_put(&exporter->infos, infos[i]->name, (*count)++));
  }
  return EG_OK;
}

static eg_status remember_file(egi_exporter *exporter) {
  const Onnx__GraphProto *graph = exporter->file ? exporter->file->graph : NULL;
  uint32_t count = 0;
  if (!graph) return EG_OK;
  exporter->info_rows =
      EGI_NEW(&exporter->arena, Onnx__ValueInfoProto *, graph->n_input + graph->n_output + graph->n_value_info);
  if (!exporter->info_rows) return EG_ERROR_MEMORY;
  EG_TRY(remember_infos(exporter, &count, graph->value_info, graph->n_value_info));
  EG_TRY(remember_infos(exporter, &count, graph->output, graph->n_output));
  EG_TRY(remember_infos(exporter, &count, graph->input, graph->n_input));
  for (size_t i = 0; i < graph->n_initializer; i++)
    if (graph->initializer[i]->name) EG_TRY(egi_map_put(&exporter->tensors, graph->initializer[i]->name, (uint32_t)i));
  return EG_OK;
}

/* ---- operator sets -------------------------------------------------------------------------------------------- */

static int64_t file_version(const Onnx__ModelProto *file) {
  for (size_t i = 0; file && i < file->n_opset_import; i++) {
    const char *domain = file->opset_import[i]->domain;
    if (!domain || !*domain || !strcmp(domain, "ai.onnx")) return file->opset_import[i]->version;
  }
  return 0;
}

static eg_status add_opset(egi_exporter *exporter, Onnx__ModelProto *model, const char *domain, int64_t version) {
  Onnx__OperatorSetIdProto *row = EGI_NEW(&exporter->arena, Onnx__OperatorSetIdProto, 1);
  if (!row) return EG_ERROR_MEMORY;
  onnx__operator_set_id_proto__init(row);
  row->domain = egi_export_text(domain);
  row->has_version = true;
  row->version = version;
  model->opset_import[model->n_opset_import++] = row;
  return EG_OK;
}

/* The file's own imports stay; domains that it did not import, engraft's among them, have version 1. */
static eg_status export_opsets(egi_exporter *exporter, Onnx__ModelProto *model) {
  const Onnx__ModelProto *file = exporter->file;
  size_t n_old = file ? file->n_opset_import : 0;
  egi_map imported;
  egi_map_init(&imported, &exporter->arena);
  model->opset_import = EGI_NEW(&exporter->arena, Onnx__OperatorSetIdProto *, n_old + exporter->n_domains + 1);
  if (!model->opset_import) return EG_ERROR_MEMORY;
  model->n_opset_import = 0;
  if (exporter->version) EG_TRY(add_opset(exporter, model, "", exporter->version));
  for (size_t i = 0; i < n_old; i++) {
    const char *domain = file->opset_import[i]->domain;
    if (!domain || !*domain || !strcmp(domain, "ai.onnx")) continue;
    EG_TRY(egi_map_put(&imported, domain, 1));
    model->opset_import[model->n_opset_import++] = file->opset_import[i];
  }
  for (uint32_t i = 0; i < exporter->n_domains; i++)
    if (!egi_map_get(&imported, exporter->domain_rows[i], NULL))
      EG_TRY(add_opset(exporter, model, exporter->domain_rows[i], FIRST_VERSION));
  return EG_OK;
}

/* ---- functions ------------------------------------------------------------------------------------------------ */

static const Onnx__FunctionProto *function_origin(const egi_exporter *exporter, const egi_function *function) {
  for (size_t i = 0; exporter->file && i < exporter->file->n_functions; i++) {
    const Onnx__FunctionProto *row = exporter->file->functions[i];
    const char *overload = row->overload ? row->overload : "", *domain = row->domain ? row->domain : "";
    if (!strcmp(row->name, function->name) && !strcmp(domain, function->domain) &&
        !strcmp(overload, function->overload ? function->overload : ""))
      return row;
  }
  return NULL;
}

/* Attributes without a default are those that the body refers to. */
static eg_status export_formal_attributes(egi_exporter *exporter, const egi_function *function,
                                          Onnx__FunctionProto *row) {
  const egi_graph *graph = function->graph;
  uint32_t capacity = 0, count = 0;
  char **names = NULL;
  egi_map seen;
  egi_map_init(&seen, &exporter->arena);
  for (uint32_t i = 0; i < function->n_defaults; i++) EG_TRY(egi_map_put(&seen, function->defaults[i].name, 1));
  for (egi_node_id n = 1; n < graph->n_nodes; n++)
    for (uint16_t i = 0; i < graph->nodes[n].n_attributes; i++) {
      const egi_attribute *attribute = &graph->nodes[n].attributes[i];
      if (attribute->kind != EGI_ATTRIBUTE_REFERENCE || egi_map_get(&seen, attribute->u.s, NULL)) continue;
      EG_TRY(egi_map_put(&seen, attribute->u.s, 1));
      EG_TRY(EGI_GROW(&exporter->arena, &names, count, &capacity));
      names[count++] = egi_export_text(attribute->u.s);
    }
  row->attribute = names;
  row->n_attribute = count;
  return EG_OK;
}

static eg_status export_defaults(egi_exporter *exporter, const egi_function *function, Onnx__FunctionProto *row) {
  row->attribute_proto = EGI_NEW(&exporter->arena, Onnx__AttributeProto *, function->n_defaults);
  if (!row->attribute_proto) return EG_ERROR_MEMORY;
  row->n_attribute_proto = function->n_defaults;
  for (uint32_t i = 0; i < function->n_defaults; i++)
    EG_TRY(egi_export_attribute(exporter, &function->defaults[i], NULL, &row->attribute_proto[i]));
  return EG_OK;
}

static eg_status export_formals(egi_exporter *exporter, const egi_graph *graph, Onnx__FunctionProto *row) {
  row->input = EGI_NEW(&exporter->arena, char *, graph->n_inputs);
  row->output = EGI_NEW(&exporter->arena, char *, graph->n_outputs);
  if (!row->input || !row->output) return EG_ERROR_MEMORY;
  row->n_input = graph->n_inputs;
  row->n_output = graph->n_outputs;
  for (uint32_t i = 0; i < graph->n_inputs; i++) row->input[i] = egi_export_text(graph->values[graph->inputs[i]].name);
  for (uint32_t i = 0; i < graph->n_outputs; i++)
    row->output[i] = egi_export_text(graph->values[graph->outputs[i]].name);
  return EG_OK;
}

static eg_status export_function(egi_exporter *exporter, const egi_function *function, const Onnx__ModelProto *model,
                                 Onnx__FunctionProto **out_function) {
  const Onnx__FunctionProto *origin = function_origin(exporter, function);
  Onnx__FunctionProto *row = EGI_NEW(&exporter->arena, Onnx__FunctionProto, 1);
  if (!row) return EG_ERROR_MEMORY;
  onnx__function_proto__init(row);
  if (origin) *row = *origin;
  row->name = egi_export_text(function->name);
  row->domain = egi_export_text(function->domain);
  row->overload = egi_export_text(function->overload);
  row->opset_import = model->opset_import;
  row->n_opset_import = model->n_opset_import;
  EG_TRY(export_formals(exporter, function->graph, row));
  if (!origin) EG_TRY(export_formal_attributes(exporter, function, row));
  EG_TRY(export_defaults(exporter, function, row));
  *out_function = row;
  return egi_export_nodes(exporter, function->graph, true, &row->node, &row->n_node);
}

static eg_status export_functions(egi_exporter *exporter, Onnx__ModelProto *model) {
  const egi_module *module = exporter->module;
  model->functions = EGI_NEW(&exporter->arena, Onnx__FunctionProto *, module->n_functions);
  if (!model->functions) return EG_ERROR_MEMORY;
  model->n_functions = 0;
  for (uint32_t i = 0; i < module->n_functions; i++)
    if (exporter->is_function_called[i])
      EG_TRY(export_function(exporter, &module->functions[i], model, &model->functions[model->n_functions++]));
  return EG_OK;
}

/* ---- the model ------------------------------------------------------------------------------------------------ */

/* Types that the file stated of values which are still there. */
static eg_status export_value_infos(egi_exporter *exporter, const egi_graph *graph, Onnx__GraphProto *row) {
  const Onnx__GraphProto *old = exporter->file->graph;
  row->value_info = EGI_NEW(&exporter->arena, Onnx__ValueInfoProto *, old->n_value_info);
  if (!row->value_info) return EG_ERROR_MEMORY;
  row->n_value_info = 0;
  for (size_t i = 0; i < old->n_value_info; i++) {
    egi_value_id id = old->value_info[i]->name ? egi_graph_find_value(graph, old->value_info[i]->name) : 0;
    if (id && graph->values[id].kind == EGI_VALUE_NODE)
      EG_TRY(egi_export_info(exporter, graph, id, &row->value_info[row->n_value_info++]));
  }
  return EG_OK;
}

static eg_status export_main_graph(egi_exporter *exporter, const egi_graph *graph, Onnx__GraphProto **out_graph) {
  EG_TRY(egi_export_graph(exporter, graph, out_graph));
  if (!exporter->file) return EG_OK;
  const Onnx__GraphProto *old = exporter->file->graph;
  Onnx__GraphProto *row = *out_graph;
  row->base.n_unknown_fields = old->base.n_unknown_fields;
  row->base.unknown_fields = old->base.unknown_fields;
  row->doc_string = old->doc_string;
  row->n_metadata_props = old->n_metadata_props;
  row->metadata_props = old->metadata_props;
  row->n_quantization_annotation = old->n_quantization_annotation;
  row->quantization_annotation = old->quantization_annotation;
  return export_value_infos(exporter, graph, row);
}

static eg_status build_model(egi_exporter *exporter, const egi_graph *graph, Onnx__ModelProto *model) {
  onnx__model_proto__init(model);
  if (exporter->file) {
    *model = *exporter->file;
  } else {
    model->producer_name = egi_export_text("engraft");
    model->producer_version = egi_export_text(eg_version());
  }
  int64_t oldest = exporter->version >= METADATA_OPSET || !exporter->file ? METADATA_IR : OLDEST_IR;
  model->has_ir_version = true;
  if (model->ir_version < oldest) model->ir_version = oldest;
  EG_TRY(export_opsets(exporter, model));
  EG_TRY(export_main_graph(exporter, graph, &model->graph));
  EG_TRY(export_functions(exporter, model));
  for (size_t i = 0; i < model->n_functions; i++)
    if (model->functions[i]->overload && model->functions[i]->overload[0] && model->ir_version < METADATA_IR)
      model->ir_version = METADATA_IR;
  if (exporter->has_scopes && model->ir_version < METADATA_IR) model->ir_version = METADATA_IR;
  return EG_OK;
}

static eg_status export_model(egi_exporter *exporter, const egi_graph *graph) {
  Onnx__ModelProto model;
  exporter->is_function_called = EGI_NEW(&exporter->arena, bool, exporter->module->n_functions);
  if (!exporter->is_function_called) return EG_ERROR_MEMORY;
  exporter->version = file_version(exporter->file);
  EG_TRY(remember_file(exporter));
  EG_TRY(egi_export_survey(exporter, graph));
  EG_TRY(egi_export_plan_weights(exporter, graph));
  EG_TRY(build_model(exporter, graph, &model));
  EG_TRY(egi_export_write_data(exporter));
  return egi_onnx_write(exporter->ctx, &model, exporter->path);
}

eg_status egi_export_with_limit(const egi_module *module, const egi_graph *graph, const char *path,
                                uint64_t embed_limit) {
  egi_exporter exporter = {.ctx = module->ctx, .module = module, .path = path, .embed_limit = embed_limit};
  if (module->file) exporter.file = egi_onnx_model(module->file);
  egi_arena_init(&exporter.arena, module->ctx, EGI_PURPOSE_GRAPH);
  egi_map_init(&exporter.infos, &exporter.arena);
  egi_map_init(&exporter.tensors, &exporter.arena);
  egi_map_init(&exporter.node_names, &exporter.arena);
  egi_map_init(&exporter.domains, &exporter.arena);
  egi_map_init(&exporter.locations, &exporter.arena);
  eg_status status = export_model(&exporter, graph);
  egi_arena_clear(&exporter.arena);
  return status;
}

eg_status egi_module_export(const egi_module *module, const egi_graph *graph, const char *path) {
  return egi_export_with_limit(module, graph, path, EMBED_LIMIT);
}
