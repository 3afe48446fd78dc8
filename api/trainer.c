/* eg_trainer_*: argument checks, then one internal call. */
#include "api/api.h"

static eg_status fail_null(const eg_trainer *trainer, const char *function) {
  return egi_fail(egi_trainer_context(trainer), EG_ERROR_ARGUMENT, "%s: NULL argument", function);
}

eg_status eg_trainer_create(eg_model *model, eg_dataset *dataset, const eg_trainer_options *options,
                            eg_trainer **out_trainer) {
  eg_trainer_options known = EG_TRAINER_OPTIONS_INIT;
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (dataset == NULL || out_trainer == NULL)
    return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_trainer_create: NULL argument");
  if (dataset->ctx != model->ctx)
    return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_trainer_create: model and dataset belong to different contexts");
  EG_TRY(egi_read_options(model->ctx, options, &known, sizeof known));
  return egi_trainer_create(model, dataset, &known, out_trainer);
}

eg_status eg_trainer_plan(eg_model *model, eg_dataset *dataset, const eg_trainer_options *options,
                          eg_write_function write, void *userdata) {
  eg_trainer_options known = EG_TRAINER_OPTIONS_INIT;
  egi_text text;
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (write == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_trainer_plan: NULL argument");
  if (dataset != NULL && dataset->ctx != model->ctx)
    return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_trainer_plan: model and dataset belong to different contexts");
  EG_TRY(egi_read_options(model->ctx, options, &known, sizeof known));
  egi_text_init(&text, model->ctx);
  eg_status status = egi_trainer_plan(model, dataset, &known, &text);
  if (status == EG_OK) return egi_write_text(&text, write, userdata);
  egi_text_free(&text);
  return status;
}

void eg_trainer_destroy(eg_trainer *trainer) {
  egi_trainer_destroy(trainer);
}

uint64_t eg_trainer_step_count(const eg_trainer *trainer) {
  return trainer != NULL ? egi_trainer_step_count(trainer) : 0;
}

eg_status eg_trainer_step(eg_trainer *trainer, eg_step_report *out_report) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  return egi_trainer_step(trainer, out_report);
}

eg_status eg_trainer_evaluate(eg_trainer *trainer, eg_dataset *dataset, double *out_loss) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  if (dataset == NULL || out_loss == NULL) return fail_null(trainer, "eg_trainer_evaluate");
  return egi_trainer_evaluate(trainer, dataset->documents, out_loss);
}

size_t eg_trainer_expert_count(const eg_trainer *trainer, size_t *out_mixtures) {
  size_t mixtures = 0, experts = trainer != NULL ? egi_trainer_expert_count(trainer, &mixtures) : 0;
  if (out_mixtures != NULL) *out_mixtures = mixtures;
  return experts;
}

eg_status eg_trainer_read_expert_tokens(const eg_trainer *trainer, size_t mixture, uint64_t *tokens, size_t n_experts) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  if (tokens == NULL) return fail_null(trainer, "eg_trainer_read_expert_tokens");
  return egi_trainer_expert_tokens(trainer, mixture, tokens, n_experts);
}

void eg_trainer_request_stop(eg_trainer *trainer) {
  if (trainer != NULL) egi_trainer_request_stop(trainer);
}

eg_status eg_trainer_save_adapter(const eg_trainer *trainer, const char *directory) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  if (directory == NULL) return fail_null(trainer, "eg_trainer_save_adapter");
  return egi_trainer_save_adapter(trainer, directory);
}

eg_status eg_trainer_save_state(const eg_trainer *trainer, const char *path) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  if (path == NULL) return fail_null(trainer, "eg_trainer_save_state");
  return egi_trainer_save_state(trainer, path);
}

eg_status eg_trainer_load_state(eg_trainer *trainer, const char *path) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  if (path == NULL) return fail_null(trainer, "eg_trainer_load_state");
  return egi_trainer_load_state(trainer, path);
}

uint64_t eg_trainer_steps_done(const eg_trainer *trainer) {
  return trainer != NULL ? egi_trainer_steps_done(trainer) : 0;
}

eg_status eg_trainer_save_model(const eg_trainer *trainer, const char *path) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  if (path == NULL) return fail_null(trainer, "eg_trainer_save_model");
  return egi_trainer_save_model(trainer, path);
}

size_t eg_trainer_parameter_count(const eg_trainer *trainer) {
  return trainer != NULL ? egi_trainer_parameter_count(trainer) : 0;
}

eg_status eg_trainer_parameter_info(const eg_trainer *trainer, size_t index, eg_parameter_info *out_info) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  if (out_info == NULL) return fail_null(trainer, "eg_trainer_parameter_info");
  return egi_trainer_parameter_info(trainer, index, out_info);
}

eg_status eg_trainer_read_parameter(const eg_trainer *trainer, size_t index, float *values, size_t n_values) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  if (values == NULL) return fail_null(trainer, "eg_trainer_read_parameter");
  return egi_trainer_read(trainer, index, EGI_POOL_PARAMETERS, values, n_values);
}

eg_status eg_trainer_write_parameter(eg_trainer *trainer, size_t index, const float *values, size_t n_values) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  if (values == NULL) return fail_null(trainer, "eg_trainer_write_parameter");
  return egi_trainer_write(trainer, index, values, n_values);
}

eg_status eg_trainer_read_gradient(const eg_trainer *trainer, size_t index, float *values, size_t n_values) {
  if (trainer == NULL) return EG_ERROR_ARGUMENT;
  if (values == NULL) return fail_null(trainer, "eg_trainer_read_gradient");
  return egi_trainer_read(trainer, index, EGI_POOL_GRADIENTS, values, n_values);
}
