/* engraft rewrite: passes over a model's graph, up to the whole training graph, written as ONNX or as text. */
#include "tools/train.h"

static eg_status produce_report(const void *object, eg_write_function write, void *userdata) {
  return eg_model_report(object, write, userdata);
}

static eg_status produce_text(const void *object, eg_write_function write, void *userdata) {
  return eg_model_print(object, write, userdata);
}

static eg_status rewrite(tool *t, eg_model *model) {
  const char *out = tool_text(t, OPTION_OUTPUT), *report = tool_text(t, OPTION_REPORT);
  eg_trainer_options options = EG_TRAINER_OPTIONS_INIT;
  EG_TRY(training_options(t, &options));
  EG_TRY(eg_model_rewrite_training(model, tool_text(t, OPTION_PASSES), &options, tool_is_given(t, OPTION_VERIFY)));
  if (tool_is_given(t, OPTION_AS_TEXT))
    EG_TRY(tool_write_file(t, out, produce_text, model));
  else
    EG_TRY(eg_model_save(model, out));
  return report != NULL ? tool_write_file(t, report, produce_report, model) : EG_OK;
}

int tool_rewrite(tool *t) {
  eg_model *model = NULL;
  if (tool_text(t, OPTION_OUTPUT) == NULL) return tool_fail_usage(t, "-o is missing");
  eg_status status = tool_load_model(t, &model);
  if (status == EG_OK) status = rewrite(t, model);
  eg_model_destroy(model);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
