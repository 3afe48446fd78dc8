/* engraft train: adapters or whole models from a data file, with a log, evaluations and checkpoints. */
#include "tools/train.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

/* Lines that a run prints when its output is no terminal. */
enum { PRINTED_LINES = 50 };

static eg_status check_conflicts(tool *t, const eg_trainer_options *options) {
  egi_peft *peft;
  if (options->init_adapter == NULL) return EG_OK;
  EG_TRY(egi_peft_open(t->ctx, options->init_adapter, &peft));
  const egi_peft_config config = peft->config;
  const char *wrong = NULL;
  if (tool_is_given(t, OPTION_RANK) && options->rank != config.rank) wrong = "--rank";
  if (tool_is_given(t, OPTION_ALPHA) && (options->alpha < config.alpha || options->alpha > config.alpha))
    wrong = "--alpha";
  if (tool_is_given(t, OPTION_TARGETS) && (config.targets == NULL || strcmp(config.targets, options->targets) != 0))
    wrong = "--targets";
  if (tool_is_given(t, OPTION_TARGET_PARAMETERS) &&
      strcmp(config.parameters != NULL ? config.parameters : "none", options->target_parameters) != 0)
    wrong = "--target-parameters";
  if (tool_is_given(t, OPTION_MODULES_TO_SAVE) &&
      strcmp(config.modules != NULL ? config.modules : "", options->modules_to_save) != 0)
    wrong = "--modules-to-save";
  if (tool_is_given(t, OPTION_INIT)) wrong = "--init";
  if (tool_is_given(t, OPTION_RSLORA) && !config.use_rslora) wrong = "--rslora";
  if (tool_is_given(t, OPTION_LORA_DROPOUT) && (options->dropout < config.dropout || options->dropout > config.dropout))
    wrong = "--lora-dropout";
  if (tool_is_given(t, OPTION_EXCLUDE)) wrong = "--exclude";
  if (tool_is_given(t, OPTION_RANK_PATTERN)) wrong = "--rank-pattern";
  if (tool_is_given(t, OPTION_ALPHA_PATTERN)) wrong = "--alpha-pattern";
  egi_peft_close(peft);
  if (wrong == NULL) return EG_OK;
  return egi_fail(t->ctx, EG_ERROR_ARGUMENT, "%s conflicts with adapter_config.json of --init-adapter %s", wrong,
                  options->init_adapter);
}

static eg_status create(training *run) {
  tool *t = run->t;
  const char *data = tool_text(t, OPTION_DATA), *text = tool_text(t, OPTION_TEXT),
             *eval = tool_text(t, OPTION_EVAL_DATA);
  eg_trainer_options options = EG_TRAINER_OPTIONS_INIT;
  EG_TRY(training_options(t, &options));
  EG_TRY(check_conflicts(t, &options));
  EG_TRY(tool_load_model(t, &run->model));
  EG_TRY(tool_load_dataset(t, data != NULL ? data : text, text != NULL, &run->dataset));
  if (eval != NULL) EG_TRY(tool_load_dataset(t, eval, text != NULL, &run->evaluation));
  EG_TRY(eg_trainer_create(run->model, run->dataset, &options, &run->trainer));
  run->n_steps = eg_trainer_step_count(run->trainer);
  return tool_is_given(t, OPTION_RESUME) ? training_resume(run) : EG_OK;
}

/* ---- what a step leaves behind ---- */

static eg_status log_line(training *run, const char *line) {
  if (run->log == NULL) return EG_OK;
  if (fputs(line, run->log) >= 0 && fflush(run->log) == 0) return EG_OK;
  return egi_fail(run->t->ctx, EG_ERROR_IO, "%s: write failed", tool_text(run->t, OPTION_LOG));
}

/* Tokens of each expert, all mixtures together, and the load-balancing loss. */
static eg_status add_experts(training *run, const eg_step_report *report, egi_text *line) {
  size_t n_mixtures, n = eg_trainer_expert_count(run->trainer, &n_mixtures);
  if (n == 0) return EG_OK;
  if (run->expert_tokens == NULL) run->expert_tokens = EGI_NEW(&run->t->arena, uint64_t, 2 * n);
  uint64_t *sums = run->expert_tokens;
  if (sums == NULL) return EG_ERROR_MEMORY;
  memset(sums, 0, n * sizeof *sums);
  for (size_t i = 0; i < n_mixtures; i++) {
    EG_TRY(eg_trainer_read_expert_tokens(run->trainer, i, sums + n, n));
    for (size_t e = 0; e < n; e++) sums[e] += sums[n + e];
  }
  egi_text_format(line, ",\"aux_loss\":%.9g,\"expert_tokens\":[", report->auxiliary_loss);
  for (size_t e = 0; e < n; e++) egi_text_format(line, "%s%" PRIu64, e > 0 ? "," : "", sums[e]);
  egi_text_add(line, "]");
  return EG_OK;
}

static eg_status write_step(training *run, const eg_step_report *report, double speed) {
  egi_text line;
  egi_text_init(&line, run->t->ctx);
  egi_text_format(&line,
                  "{\"step\":%" PRIu64 ",\"loss\":%.9g,\"lr\":%.9g,\"grad_norm\":%.9g,\"tokens\":%" PRIu64
                  ",\"targets\":%" PRIu64 ",\"tokens_per_s\":%.1f",
                  report->step, report->loss, report->learning_rate, report->gradient_norm, report->n_tokens,
                  report->n_targets, speed);
  eg_status status = add_experts(run, report, &line);
  egi_text_add(&line, "}\n");
  if (status == EG_OK) status = egi_text_status(&line);
  if (status == EG_OK) status = log_line(run, egi_text_string(&line));
  egi_text_free(&line);
  return status;
}

static eg_status log_step(training *run, const eg_step_report *report) {
  double speed = report->seconds > 0.0 ? (double)report->n_tokens / report->seconds : 0.0;
  EG_TRY(write_step(run, report, speed));
  uint64_t stride = run->n_steps / PRINTED_LINES + 1;
  bool is_last = report->step == run->n_steps;
  if (!run->is_terminal && report->step % stride != 0 && report->step != 1 && !is_last) return EG_OK;
  printf("%sstep %" PRIu64 "/%" PRIu64 "  loss %.4f  lr %.3g  norm %.3g  %.0f tokens/s%s", run->is_terminal ? "\r" : "",
         report->step, run->n_steps, report->loss, report->learning_rate, report->gradient_norm, speed,
         run->is_terminal && !is_last ? "\033[K" : "\n");
  fflush(stdout);
  return EG_OK;
}

static eg_status evaluate(training *run, uint64_t step) {
  char line[96];
  uint64_t every = run->t->values[OPTION_EVAL_EVERY].count, patience = run->t->values[OPTION_PATIENCE].count;
  double loss;
  if (run->evaluation == NULL || (step != run->n_steps && (every == 0 || step % every != 0))) return EG_OK;
  EG_TRY(eg_trainer_evaluate(run->trainer, run->evaluation, &loss));
  snprintf(line, sizeof line, "{\"step\":%" PRIu64 ",\"eval_loss\":%.9g}\n", step, loss);
  EG_TRY(log_line(run, line));
  printf("%sstep %" PRIu64 "  evaluation loss %.4f\n", run->is_terminal ? "\r\033[K" : "", step, loss);
  bool is_better = !run->has_best || loss < run->best_loss;
  if (is_better) run->best_loss = loss;
  run->has_best = true;
  run->n_worse = is_better ? 0 : run->n_worse + 1;
  if (patience > 0 && run->n_worse >= patience) run->is_finished = true;
  return EG_OK;
}

static eg_status step(training *run) {
  const tool *t = run->t;
  eg_step_report report;
  EG_TRY(eg_trainer_step(run->trainer, &report));
  run->n_done = report.step;
  EG_TRY(log_step(run, &report));
  if (report.step == 1 && tool_text(t, OPTION_DUMP_GRADIENTS) != NULL) EG_TRY(training_dump_gradients(run));
  EG_TRY(evaluate(run, report.step));
  uint64_t every = t->values[OPTION_SAVE_EVERY].count;
  if (every > 0 && report.step % every == 0) EG_TRY(training_save_checkpoint(run, report.step));
  return EG_OK;
}

/* ---- the run ---- */

static eg_status open_outputs(training *run) {
  const char *log = tool_text(run->t, OPTION_LOG);
  run->is_terminal = isatty(STDOUT_FILENO) != 0;
  EG_TRY(egi_make_directory(run->t->ctx, tool_text(run->t, OPTION_OUT)));
  if (log == NULL) return EG_OK;
  if (tool_is_given(run->t, OPTION_RESUME)) EG_TRY(training_cut_log(run, log));
  run->log = fopen(log, tool_is_given(run->t, OPTION_RESUME) ? "a" : "w");
  return run->log != NULL ? EG_OK : egi_fail(run->t->ctx, EG_ERROR_IO, "%s: cannot be written", log);
}

static eg_status train(training *run) {
  EG_TRY(create(run));
  EG_TRY(open_outputs(run));
  EG_TRY(training_print_counts(run));
  atomic_store(&run->watched, run->trainer);
  eg_status status = EG_OK;
  while (status == EG_OK && run->n_done < run->n_steps && !run->is_finished) status = step(run);
  if (status != EG_OK && status != EG_ERROR_STOPPED) {
    if (run->is_terminal && run->n_done > 0) putchar('\n');
    return status;
  }
  EG_TRY(training_save(run, tool_text(run->t, OPTION_OUT)));
  bool has_checkpoint = status == EG_ERROR_STOPPED || run->t->values[OPTION_SAVE_EVERY].count > 0;
  if (has_checkpoint && run->n_done > 0 && run->saved_step != run->n_done)
    EG_TRY(training_save_checkpoint(run, run->n_done));
  if (status == EG_ERROR_STOPPED)
    return egi_fail(run->t->ctx, status,
                    "stopped by a signal after step %" PRIu64
                    "; what was learned is in %s, --resume goes on from there",
                    run->n_done, tool_text(run->t, OPTION_OUT));
  return EG_OK;
}

int tool_train(tool *t) {
  training run = {.t = t};
  if (tool_text(t, OPTION_OUT) == NULL) return tool_fail_usage(t, "--out is missing");
  if ((tool_text(t, OPTION_DATA) == NULL) == (tool_text(t, OPTION_TEXT) == NULL))
    return tool_fail_usage(t, "one of --data and --text is needed");
  if (tool_is_given(t, OPTION_STEPS) && tool_is_given(t, OPTION_EPOCHS))
    return tool_fail_usage(t, "--steps and --epochs exclude each other");
  eg_status status = training_watch_signals(&run);
  if (status == EG_OK) status = train(&run);
  training_unwatch_signals(&run);
  if (run.log != NULL && fclose(run.log) != 0 && status == EG_OK)
    status = egi_fail(t->ctx, EG_ERROR_IO, "%s: write failed", tool_text(t, OPTION_LOG));
  eg_trainer_destroy(run.trainer);
  eg_dataset_destroy(run.evaluation);
  eg_dataset_destroy(run.dataset);
  eg_model_destroy(run.model);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
