/* engraft eval: mean loss per trained token, document or example over a data file. */
#include "tools/tool.h"

#include <math.h>

static eg_status evaluate(tool *t, const eg_model *model, const eg_dataset *dataset) {
  double loss;
  uint64_t tokens = t->values[OPTION_TOKENS].count;
  if (tokens < 2 || tokens > UINT32_MAX) return egi_fail(t->ctx, EG_ERROR_ARGUMENT, "--tokens is out of range");
  egi_evaluate_options options = {
      tool_text(t, OPTION_ADAPTER), (uint32_t)tokens, tool_is_given(t, OPTION_NO_FUSE), tool_objective(t),
      {.is_wanted = false},         tool_packing(t)};
  tool_quant quant = tool_quantisation(t);
  EG_TRY(egi_quantise_options_make(t->ctx, quant.type, quant.block, quant.is_nested, &options.quantise));
  options.quantise.has_head = quant.has_head;
  EG_TRY(egi_evaluate_model(model, &options, dataset->documents, &loss));
  const egi_documents *documents = dataset->documents;
  bool is_json = tool_is_given(t, OPTION_JSON);
  if (documents->kind != EGI_DOCUMENTS_TOKENS)
    printf(is_json ? "{\"loss\":%.9g,\"documents\":%zu}\n" : "loss %.6f over %zu documents\n", loss,
           documents->n_documents);
  else if (is_json)
    printf("{\"loss\":%.9g,\"perplexity\":%.9g,\"documents\":%zu,\"tokens\":%llu,\"targets\":%llu}\n", loss, exp(loss),
           documents->n_documents, (unsigned long long)documents->n_tokens, (unsigned long long)documents->n_targets);
  else
    printf("loss %.6f, perplexity %.4f\n", loss, exp(loss));
  return EG_OK;
}

int tool_eval(tool *t) {
  const char *data = tool_text(t, OPTION_DATA), *text = tool_text(t, OPTION_TEXT);
  eg_model *model = NULL;
  eg_dataset *dataset = NULL;
  if ((data == NULL) == (text == NULL)) return tool_fail_usage(t, "one of --data and --text is needed");
  eg_status status = tool_load_model(t, &model);
  if (status == EG_OK) status = tool_load_dataset(t, data != NULL ? data : text, text != NULL, &dataset);
  if (status == EG_OK) status = evaluate(t, model, dataset);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
