/* eg_runner_*: argument checks, then one internal call. */
#include "api/api.h"

eg_status eg_runner_create(eg_model *model, const eg_runner_options *options, eg_runner **out_runner) {
  eg_runner_options known = EG_RUNNER_OPTIONS_INIT;
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (out_runner == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_runner_create: NULL argument");
  EG_TRY(egi_read_options(model->ctx, options, &known, sizeof known));
  return egi_runner_create(model, &known, out_runner);
}

void eg_runner_destroy(eg_runner *runner) {
  egi_runner_destroy(runner);
}

eg_status eg_runner_run(eg_runner *runner, const eg_tensor *inputs, size_t n_inputs, const eg_tensor **out_outputs,
                        size_t *out_count) {
  if (runner == NULL) return EG_ERROR_ARGUMENT;
  bool is_null = (inputs == NULL && n_inputs > 0) || out_outputs == NULL || out_count == NULL;
  for (size_t i = 0; i < n_inputs && !is_null; i++) is_null = inputs[i].name == NULL;
  if (is_null) return egi_fail(egi_runner_context(runner), EG_ERROR_ARGUMENT, "eg_runner_run: NULL argument");
  return egi_runner_run(runner, inputs, n_inputs, out_outputs, out_count);
}

static eg_status check_generate(eg_context *ctx, const eg_generate_options *options) {
  const char *wrong = NULL;
  if (!(options->temperature >= 0.0 && options->temperature <= 1e6)) wrong = "temperature";
  if (!(options->top_p > 0.0 && options->top_p <= 1.0)) wrong = "top_p";
  if (options->stop_ids == NULL && options->n_stop_ids > 0) wrong = "stop_ids";
  return wrong == NULL ? EG_OK : egi_fail(ctx, EG_ERROR_ARGUMENT, "generate options: %s is out of range", wrong);
}

eg_status eg_runner_generate(eg_runner *runner, const int32_t *prompt_ids, size_t n_prompt,
                             const eg_generate_options *options, eg_token_function on_token, void *userdata) {
  eg_generate_options known = EG_GENERATE_OPTIONS_INIT;
  if (runner == NULL) return EG_ERROR_ARGUMENT;
  eg_context *ctx = egi_runner_context(runner);
  if (prompt_ids == NULL || n_prompt == 0 || on_token == NULL)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "eg_runner_generate: no prompt or no function for the tokens");
  EG_TRY(egi_read_options(ctx, options, &known, sizeof known));
  EG_TRY(check_generate(ctx, &known));
  return egi_runner_generate(runner, prompt_ids, n_prompt, &known, on_token, userdata);
}
