/* Counted references to models and datasets: an object keeps alive what it was made from. */
#include "train/train.h"

#include <string.h>

void egi_model_retain(eg_model *model) {
  model->references++;
}

void egi_model_release(eg_model *model) {
  if (model == NULL || --model->references > 0) return;
  eg_context *ctx = model->ctx;
  egi_shared_weights_destroy(model->shared);
  egi_module_destroy(model->module);
  if (model->report != NULL) egi_release(ctx, EGI_PURPOSE_GRAPH, model->report, strlen(model->report) + 1);
  egi_arena_clear(&model->arena);
  egi_release(ctx, EGI_PURPOSE_GRAPH, model, sizeof *model);
  egi_context_release(ctx);
}

void egi_dataset_retain(eg_dataset *dataset) {
  dataset->references++;
}

void egi_dataset_release(eg_dataset *dataset) {
  if (dataset == NULL || --dataset->references > 0) return;
  eg_context *ctx = dataset->ctx;
  egi_documents_free(dataset->documents);
  egi_release(ctx, EGI_PURPOSE_DATA, dataset, sizeof *dataset);
  egi_context_release(ctx);
}
