/* A complete host program: fine-tunes a model inside its own process and keeps the adapter as a PEFT folder.
 * usage: embed MODEL.onnx DATA.jsonl OUT */
#include <stdio.h>

#include <engraft.h>

/* Every call says what went wrong; the message is the context's. */
static int failed(const eg_context *context, const char *doing) {
  fprintf(stderr, "embed: %s: %s\n", doing, eg_context_error(context));
  return 1;
}

static int train(eg_context *context, eg_trainer *trainer, const char *directory) {
  for (uint64_t i = 0; i < eg_trainer_step_count(trainer); i++) {
    eg_step_report report;
    if (eg_trainer_step(trainer, &report) != EG_OK) return failed(context, "training");
    printf("step %d: loss %.4f\n", (int)report.step, report.loss);
  }
  return eg_trainer_save_adapter(trainer, directory) == EG_OK ? 0 : failed(context, "saving");
}

int main(int n_arguments, char **arguments) {
  eg_context *context = NULL;
  eg_model *model = NULL;
  eg_dataset *dataset = NULL;
  eg_trainer *trainer = NULL;
  eg_trainer_options options = EG_TRAINER_OPTIONS_INIT;
  int code = 0;
  if (n_arguments != 4 || eg_context_create(NULL, &context) != EG_OK) return 2;
  options.rank = 8;
  options.alpha = 16;
  options.learning_rate = 5e-3;
  options.n_steps = 8;
  if (eg_model_load(context, arguments[1], NULL, &model) != EG_OK) code = failed(context, "loading the model");
  if (code == 0 && eg_dataset_load(context, arguments[2], NULL, &dataset) != EG_OK)
    code = failed(context, "reading data");
  if (code == 0 && eg_trainer_create(model, dataset, &options, &trainer) != EG_OK) code = failed(context, "planning");
  if (code == 0) code = train(context, trainer, arguments[3]);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
  eg_context_destroy(context);
  return code;
}
