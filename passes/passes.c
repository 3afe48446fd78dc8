/* The table of passes and the pipeline: runs passes in order, tidies and verifies after each, fills reports, and on
 * request runs the graph on random input before and after each pass and compares (passes/verify_rewrite.c). */
#include <string.h>

#include "passes/passes.h"

static const egi_pass_info passes[] = {
#define EGI_PASS(pass_name, stage, summary) {#pass_name, EGI_STAGE_##stage, summary, egi_pass_##pass_name, NULL},
#include "passes/passes.def"
#undef EGI_PASS
};

/* Rounds of the canonicalise stage; each pass alone reaches its fixed point, so real graphs need three or four. */
enum { MAX_ROUNDS = 16 };

size_t egi_pass_count(void) {
  return EGI_COUNT(passes);
}

const egi_pass_info *egi_pass_at(size_t index) {
  return index < EGI_COUNT(passes) ? &passes[index] : NULL;
}

const egi_pass_info *egi_pass_find(const char *name) {
  for (size_t i = 0; i < EGI_COUNT(passes); i++) {
    if (strcmp(passes[i].name, name) == 0) return &passes[i];
  }
  return NULL;
}

static eg_status check_after(const egi_graph *graph) {
#ifndef NDEBUG
  return egi_graph_verify(graph);
#else
  (void)graph;
  return EG_OK;
#endif
}

/* One pass with everything around it. `report` counts up over repeated runs. */
static eg_status run_pass(egi_graph *graph, const egi_pass_info *pass, const egi_pipeline_options *options,
                          egi_pass_report *report, bool *out_has_changed) {
  eg_context *ctx = graph->module->ctx;
  egi_pass_run run = {.ctx = ctx, .adapt = options ? options->adapt : NULL, .report = report};
  run.checkpoints = options ? options->checkpoints : NULL;
  run.is_general = options && options->is_general;
  run.tokens = options ? options->tokens : 0;
  run.block = options ? options->block : 0;
  run.is_decoding = options != NULL && options->is_decoding;
  run.userdata = pass->userdata;
  egi_rewrite_check *check = NULL;
  if (options && options->verify) EG_TRY(egi_rewrite_check_begin(graph, &check));
  double start = egi_clock();
  eg_status status = pass->run(&run, graph);
  if (status == EG_OK && run.has_changed) {
    status = egi_graph_tidy(graph);
    if (status == EG_OK) status = check_after(graph);
  }
  report->seconds += egi_clock() - start;
  if (status == EG_OK && run.has_changed) status = egi_rewrite_check_end(check, graph, pass->name);
  egi_rewrite_check_free(check);
  *out_has_changed = run.has_changed;
  return status;
}

static const egi_pass_info *find_pass(const char *name, const egi_pipeline_options *options) {
  for (size_t i = 0; options && i < options->n_own_passes; i++) {
    if (strcmp(options->own_passes[i].name, name) == 0) return &options->own_passes[i];
  }
  return egi_pass_find(name);
}

eg_status egi_passes_run(egi_graph *graph, const char *const *names, size_t n_names,
                         const egi_pipeline_options *options, egi_pass_report *reports) {
  for (size_t i = 0; i < n_names; i++) {
    if (!find_pass(names[i], options))
      return egi_fail(graph->module->ctx, EG_ERROR_ARGUMENT, "there is no pass named \"%s\"", names[i]);
  }
  for (size_t i = 0; i < n_names; i++) {
    const egi_pass_info *pass = find_pass(names[i], options);
    egi_pass_report local = {0};
    egi_pass_report *report = reports ? &reports[i] : &local;
    *report = (egi_pass_report){.pass = pass->name};
    bool has_changed = false;
    EG_TRY(run_pass(graph, pass, options, report, &has_changed));
  }
  return EG_OK;
}

/* `reports`: rows in the order of the table. */
static eg_status run_stage(egi_graph *graph, egi_stage stage, const egi_pipeline_options *options,
                           egi_pass_report *reports) {
  unsigned n_rounds = stage == EGI_STAGE_CANONICALISE ? MAX_ROUNDS : 1;
  for (unsigned round = 0; round < n_rounds; round++) {
    bool has_any_changed = false;
    for (size_t i = 0; i < EGI_COUNT(passes); i++) {
      if (passes[i].stage != stage) continue;
      bool has_changed = false;
      EG_TRY(run_pass(graph, &passes[i], options, &reports[i], &has_changed));
      has_any_changed = has_any_changed || has_changed;
    }
    if (!has_any_changed) break;
    /* what became constant in this round tells more about shapes in the next */
    if (round + 1 < n_rounds) EG_TRY(egi_infer_graph(graph));
  }
  return EG_OK;
}

eg_status egi_passes_run_stage(egi_graph *graph, egi_stage stage, const egi_pipeline_options *options) {
  egi_pass_report reports[EGI_COUNT(passes)] = {{0}};
  return run_stage(graph, stage, options, reports);
}

eg_status egi_passes_recognise(egi_graph *graph, const egi_pipeline_options *options, egi_pass_report *reports) {
  static const char *const rest[] = {"eliminate_common", "eliminate_dead"};
  for (size_t i = 0; i < EGI_COUNT(passes); i++) reports[i] = (egi_pass_report){.pass = passes[i].name};
  EG_TRY(run_stage(graph, EGI_STAGE_CANONICALISE, options, reports));
  EG_TRY(run_stage(graph, EGI_STAGE_RECOGNISE, options, reports));
  return egi_passes_run(graph, rest, EGI_COUNT(rest), options, NULL);
}
