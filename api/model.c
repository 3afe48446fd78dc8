/* eg_model_*: loading a file into a checked graph, rewriting, saving and printing it. */
#include "api/api.h"

#include <string.h>

#include "backend/costs.h"
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

/* ---- rewriting ---- */

typedef struct rewrite {
  egi_arena arena;
  const char **names;
  egi_pass_report *reports;
  size_t count;
} rewrite;

/* The names of a list separated by commas; room for a report for each, or for each pass of the table. */
static eg_status split_passes(rewrite *r, const char *passes) {
  size_t capacity = egi_pass_count() + 1;
  for (const char *c = passes; c != NULL && *c != '\0'; c++) capacity += *c == ',';
  r->names = EGI_NEW(&r->arena, const char *, capacity);
  r->reports = EGI_NEW(&r->arena, egi_pass_report, capacity);
  if (r->names == NULL || r->reports == NULL) return EG_ERROR_MEMORY;
  while (passes != NULL && *passes != '\0') {
    size_t length = strcspn(passes, ",");
    char *name = egi_arena_copy_text(&r->arena, passes, length);
    if (name == NULL) return EG_ERROR_MEMORY;
    if (length > 0) r->names[r->count++] = name;
    passes += length + (passes[length] == ',' ? 1 : 0);
  }
  return EG_OK;
}

static void add_miss(egi_text *text, const char *miss) {
  egi_text_add(text, ",\"nearest_miss\":");
  if (miss != NULL)
    egi_text_json(text, miss);
  else
    egi_text_add(text, "null");
}

static void add_rules(egi_text *text, const egi_pass_report *report) {
  if (report->n_rules == 0) return;
  egi_text_add(text, ",\"rules\":[");
  for (uint32_t i = 0; i < report->n_rules; i++) {
    const egi_rule_report *rule = &report->rules[i];
    egi_text_add(text, i > 0 ? ",{\"rule\":" : "{\"rule\":");
    egi_text_json(text, rule->rule);
    egi_text_format(text, ",\"tried\":%u,\"matched\":%u", rule->n_tried, rule->n_matched);
    add_miss(text, rule->nearest_miss);
    egi_text_add(text, "}");
  }
  egi_text_add(text, "]");
}

static eg_status make_report(const rewrite *r, eg_context *ctx, char **out_report) {
  egi_text text;
  egi_text_init(&text, ctx);
  egi_text_add(&text, "{\"passes\":[");
  for (size_t i = 0; i < r->count; i++) {
    const egi_pass_report *report = &r->reports[i];
    egi_text_add(&text, i > 0 ? ",{\"pass\":" : "{\"pass\":");
    egi_text_json(&text, report->pass);
    egi_text_format(&text, ",\"tried\":%u,\"matched\":%u,\"seconds\":%.6f", report->n_tried, report->n_matched,
                    report->seconds);
    add_miss(&text, report->nearest_miss);
    add_rules(&text, report);
    egi_text_add(&text, "}");
  }
  egi_text_add(&text, "]}\n");
  eg_status status = egi_text_status(&text);
  char *report = status == EG_OK ? egi_allocate(ctx, EGI_PURPOSE_GRAPH, text.length + 1) : NULL;
  if (report != NULL) memcpy(report, egi_text_string(&text), text.length + 1);
  egi_text_free(&text);
  *out_report = report;
  return report != NULL ? EG_OK : EG_ERROR_MEMORY;
}

/* Both stages; reports of their passes alone. */
static eg_status recognise(rewrite *r, egi_graph *graph, const egi_pipeline_options *options) {
  EG_TRY(egi_passes_recognise(graph, options, r->reports));
  for (size_t i = 0; i < egi_pass_count(); i++)
    if (egi_pass_at(i)->stage <= EGI_STAGE_RECOGNISE) r->reports[r->count++] = r->reports[i];
  return EG_OK;
}

/* The passes work on a clone, so that the model is unchanged after an error. */
static eg_status rewrite_clone(eg_model *model, rewrite *r, const char *passes, bool verify, egi_module *clone) {
  egi_pipeline_options options = {.verify = verify, .own_passes = model->own_passes};
  options.n_own_passes = model->n_own_passes;
  char *report;
  EG_TRY(split_passes(r, passes));
  if (passes == NULL)
    EG_TRY(recognise(r, clone->graphs[0], &options));
  else
    EG_TRY(egi_passes_run(clone->graphs[0], r->names, r->count, &options, r->reports));
  EG_TRY(make_report(r, model->ctx, &report));
  if (model->report != NULL) egi_release(model->ctx, EGI_PURPOSE_GRAPH, model->report, strlen(model->report) + 1);
  model->report = report;
  return EG_OK;
}

eg_status eg_model_rewrite(eg_model *model, const char *passes, int verify) {
  egi_module *clone;
  rewrite r = {.count = 0};
  if (model == NULL) return EG_ERROR_ARGUMENT;
  EG_TRY(egi_module_clone(model->module, &clone));
  egi_arena_init(&r.arena, model->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = rewrite_clone(model, &r, passes, verify != 0, clone);
  egi_arena_clear(&r.arena);
  egi_module *unused = clone;
  if (status == EG_OK) {
    unused = model->module;
    model->module = clone;
  }
  egi_module_destroy(unused);
  return status;
}

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

/* ---- writing ---- */

eg_status eg_model_save(const eg_model *model, const char *path) {
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (path == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_model_save: NULL argument");
  egi_module *clone;
  uint32_t count;
  EG_TRY(egi_module_clone(model->module, &clone));
  eg_status status = egi_graph_call_bodies(clone->graphs[0], true, &count);
  if (status == EG_OK) status = egi_module_export(clone, clone->graphs[0], path);
  egi_module_destroy(clone);
  return status;
}

eg_status eg_model_print(const eg_model *model, eg_write_function write, void *userdata) {
  egi_text text;
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (write == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_model_print: NULL argument");
  egi_text_init(&text, model->ctx);
  eg_status status = egi_module_print(model->module, model->module->graphs[0], 64, &text);
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
