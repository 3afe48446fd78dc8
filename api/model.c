/* eg_model_*: loading a file into a checked graph, saving and printing it. */
#include "api/api.h"

#include <string.h>

#include "backend/costs.h"
#include "backend/quantise.h"
#include "proto/proto.h"

/* ---- loading ---- */

static void set_limits(const eg_model_options *options, egi_onnx_limits *limits) {
  egi_onnx_limits_default(limits);
  limits->external_root = options->external_root;
  if (options->max_nodes > 0) limits->max_nodes = options->max_nodes;
  if (options->max_bytes > 0) limits->max_bytes = options->max_bytes;
  if (options->max_depth > 0) limits->max_depth = options->max_depth;
}

/* From the imported module to one graph of known operators with known shapes. */
static eg_status settle(eg_context *ctx, egi_module *module) {
  static const char *const names[] = {"inline_functions", "lower_operators"};
  static const egi_pipeline_options options;
  if (module->n_graphs == 0) return egi_fail(ctx, EG_ERROR_FORMAT, "the file has no graph");
  module->evaluator = egi_evaluator_cpu();
  module->costs = egi_costs_get();
  EG_TRY(egi_passes_run(module->graphs[0], names, EGI_COUNT(names), &options, NULL));
  EG_TRY(egi_graph_check_operators(module->graphs[0]));
  return egi_infer_graph(module->graphs[0]);
}

static eg_status make_model(eg_context *ctx, egi_onnx *file, eg_model **out_model) {
  egi_module *module;
  EG_TRY(egi_module_import(ctx, file, &module));
  eg_status status = settle(ctx, module);
  eg_model *model = status == EG_OK ? egi_allocate(ctx, EGI_PURPOSE_GRAPH, sizeof *model) : NULL;
  if (model == NULL) {
    egi_module_destroy(module);
    return status != EG_OK ? status : EG_ERROR_MEMORY;
  }
  *model = (eg_model){.ctx = ctx, .references = 1, .module = module};
  egi_arena_init(&model->arena, ctx, EGI_PURPOSE_GRAPH);
  egi_context_retain(ctx);
  status = egi_shared_weights_create(ctx, module, &model->shared);
  if (status != EG_OK) {
    egi_model_release(model);
    return status;
  }
  *out_model = model;
  return EG_OK;
}

eg_status eg_model_load(eg_context *context, const char *path, const eg_model_options *options, eg_model **out_model) {
  eg_model_options known = EG_MODEL_OPTIONS_INIT;
  egi_onnx_limits limits;
  egi_onnx *file;
  if (context == NULL) return EG_ERROR_ARGUMENT;
  if (path == NULL || out_model == NULL) return egi_fail(context, EG_ERROR_ARGUMENT, "eg_model_load: NULL argument");
  EG_TRY(egi_read_options(context, options, &known, sizeof known));
  set_limits(&known, &limits);
  EG_TRY(egi_onnx_open(context, path, &limits, &file));
  return make_model(context, file, out_model);
}

eg_status eg_model_load_memory(eg_context *context, const void *bytes, size_t size_bytes, const char *directory,
                               const eg_model_options *options, eg_model **out_model) {
  eg_model_options known = EG_MODEL_OPTIONS_INIT;
  egi_onnx_limits limits;
  egi_onnx *file;
  if (context == NULL) return EG_ERROR_ARGUMENT;
  if (bytes == NULL || out_model == NULL)
    return egi_fail(context, EG_ERROR_ARGUMENT, "eg_model_load_memory: NULL argument");
  EG_TRY(egi_read_options(context, options, &known, sizeof known));
  set_limits(&known, &limits);
  EG_TRY(egi_onnx_open_memory(context, bytes, size_bytes, directory, &limits, &file));
  return make_model(context, file, out_model);
}

void eg_model_destroy(eg_model *model) {
  egi_model_release(model);
}

/* ---- writing ---- */

eg_status eg_model_report(const eg_model *model, eg_write_function write, void *userdata) {
  egi_text text;
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (write == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_model_report: NULL argument");
  if (model->report == NULL)
    return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "the model has not been rewritten: there is no report");
  egi_text_init(&text, model->ctx);
  egi_text_add(&text, model->report);
  return egi_write_text(&text, write, userdata);
}

eg_status eg_model_save(const eg_model *model, const char *path) {
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (path == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_model_save: NULL argument");
  egi_module *clone;
  uint32_t count;
  EG_TRY(egi_module_clone(model->module, &clone));
  eg_status status = egi_graph_expose_states(clone->graphs[0]);
  if (status == EG_OK) status = egi_graph_call_bodies(clone->graphs[0], EGI_BODIES_OWN, &count);
  if (status == EG_OK) status = egi_quantise_module(clone);
  if (status == EG_OK) status = egi_module_export(clone, clone->graphs[0], path);
  egi_module_destroy(clone);
  return status;
}

eg_status eg_model_print(const eg_model *model, eg_write_function write, void *userdata) {
  egi_text text;
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (write == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_model_print: NULL argument");
  egi_module *clone;
  EG_TRY(egi_module_clone(model->module, &clone));
  egi_text_init(&text, model->ctx);
  eg_status status = egi_graph_expose_states(clone->graphs[0]);
  if (status == EG_OK) status = egi_module_print(clone, clone->graphs[0], 64, &text);
  egi_module_destroy(clone);
  if (status != EG_OK) {
    egi_text_free(&text);
    return status;
  }
  return egi_write_text(&text, write, userdata);
}

eg_status eg_model_inspect(const eg_model *model, eg_write_function write, void *userdata) {
  egi_text text;
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (write == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_model_inspect: NULL argument");
  egi_text_init(&text, model->ctx);
  eg_status status = egi_model_describe(model, &text);
  if (status != EG_OK) {
    egi_text_free(&text);
    return status;
  }
  return egi_write_text(&text, write, userdata);
}
