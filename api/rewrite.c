/* eg_model_rewrite*(): lists of passes over a clone of the model's graph, and the report of what they did. */
#include <string.h>

#include "api/api.h"

/* The name in lists of passes for all that a trainer does to the graph. */
#define TRAINING "training"

typedef struct rewrite {
  eg_model *model;
  egi_arena arena;
  egi_module *module; /* what the passes work on: a clone, so that the model is unchanged after an error */
  eg_trainer_options training;
  egi_pipeline_options options;
  egi_adapt_options adapt;
  bool has_adapters;
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
static eg_status recognise(rewrite *r) {
  EG_TRY(egi_passes_recognise(r->module->graphs[0], &r->options, r->reports));
  for (size_t i = 0; i < egi_pass_count(); i++)
    if (egi_pass_at(i)->stage <= EGI_STAGE_RECOGNISE) r->reports[r->count++] = r->reports[i];
  return EG_OK;
}

/* Adapters are chosen once modules have names, before the first pass that asks for them. */
static eg_status choose_adapters(rewrite *r, const char *pass) {
  const eg_trainer_options *o = &r->training;
  egi_adapters adapters;
  if (r->has_adapters || o->full || strcmp(pass, "graft_adapters") != 0) return EG_OK;
  EG_TRY(egi_adapters_choose(r->module->graphs[0], o, &r->arena, &adapters));
  r->adapt.adapters = adapters.targets;
  r->adapt.n_adapters = adapters.count;
  r->adapt.modules = adapters.config.modules;
  r->adapt.dropout = adapters.config.dropout;
  r->has_adapters = true;
  return EG_OK;
}

static eg_status run_training(rewrite *r, egi_pass_report *report) {
  eg_model model = {.ctx = r->model->ctx, .references = 1, .module = r->module};
  egi_module *training;
  double start = egi_clock();
  *report = (egi_pass_report){.pass = TRAINING, .n_tried = 1};
  EG_TRY(egi_training_module(&model, &r->training, &training));
  egi_module_destroy(r->module);
  r->module = training;
  report->n_matched = 1;
  report->seconds = egi_clock() - start;
  return EG_OK;
}

static eg_status check_names(const rewrite *r) {
  for (size_t i = 0; i < r->count; i++) {
    bool is_known = strcmp(r->names[i], TRAINING) == 0 || egi_pass_find(r->names[i]) != NULL;
    for (size_t k = 0; k < r->options.n_own_passes; k++)
      is_known = is_known || strcmp(r->options.own_passes[k].name, r->names[i]) == 0;
    if (!is_known) return egi_fail(r->model->ctx, EG_ERROR_ARGUMENT, "there is no pass named \"%s\"", r->names[i]);
  }
  return EG_OK;
}

static eg_status run_list(rewrite *r) {
  EG_TRY(check_names(r));
  for (size_t i = 0; i < r->count; i++) {
    if (strcmp(r->names[i], TRAINING) == 0) {
      EG_TRY(run_training(r, &r->reports[i]));
      continue;
    }
    EG_TRY(choose_adapters(r, r->names[i]));
    EG_TRY(egi_passes_run(r->module->graphs[0], &r->names[i], 1, &r->options, &r->reports[i]));
  }
  return EG_OK;
}

static eg_status run(rewrite *r, const char *passes) {
  eg_model *model = r->model;
  char *report;
  EG_TRY(split_passes(r, passes));
  EG_TRY(passes == NULL ? recognise(r) : run_list(r));
  EG_TRY(make_report(r, model->ctx, &report));
  if (model->report != NULL) egi_release(model->ctx, EGI_PURPOSE_GRAPH, model->report, strlen(model->report) + 1);
  model->report = report;
  return EG_OK;
}

eg_status eg_model_rewrite_training(eg_model *model, const char *passes, const eg_trainer_options *options,
                                    int verify) {
  rewrite r = {.model = model, .training = EG_TRAINER_OPTIONS_INIT};
  if (model == NULL) return EG_ERROR_ARGUMENT;
  EG_TRY(egi_read_options(model->ctx, options, &r.training, sizeof r.training));
  EG_TRY(egi_module_clone(model->module, &r.module));
  egi_arena_init(&r.arena, model->ctx, EGI_PURPOSE_GRAPH);
  const egi_machine machine = {.ctx = model->ctx, .backend = egi_backend_cpu()};
  r.adapt = (egi_adapt_options){.is_full = r.training.full != 0,
                                .has_gradient = true,
                                .is_loop = r.training.moe_dispatch == EG_MOE_LOOP,
                                .seed = r.training.seed,
                                .loss = r.training.loss != EG_LOSS_AUTO ? r.training.loss : EG_LOSS_NEXT_TOKEN,
                                .pooling = r.training.pooling,
                                .similarity_scale = r.training.similarity_scale};
  r.options = (egi_pipeline_options){.adapt = &r.adapt,
                                     .verify = verify != 0,
                                     .own_passes = model->own_passes,
                                     .n_own_passes = model->n_own_passes,
                                     .tokens = r.training.tokens,
                                     .block = egi_machine_block(&machine)};
  eg_status status = egi_quantise_options_make(model->ctx, r.training.quant, r.training.quant_block,
                                               r.training.double_quant, &r.adapt.quantise);
  r.adapt.quantise.has_head = r.training.quant_head != 0;
  if (status == EG_OK) status = run(&r, passes);
  egi_arena_clear(&r.arena);
  egi_module *unused = r.module;
  if (status == EG_OK) {
    unused = model->module;
    model->module = r.module;
  }
  egi_module_destroy(unused);
  return status;
}

eg_status eg_model_rewrite(eg_model *model, const char *passes, int verify) {
  return eg_model_rewrite_training(model, passes, NULL, verify);
}
