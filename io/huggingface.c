/* config.json of a Hugging Face folder → graph. */
#include "io/huggingface.h"

#include <string.h>

#include <jansson.h>

/* The part of a config.json that describes a decoder for text: of a model that also sees, its "text_config". */
static json_t *find_text_config(json_t *root) {
  json_t *text = json_object_get(root, "text_config");
  return json_is_object(text) && json_is_string(json_object_get(text, "model_type")) ? text : root;
}

eg_status egi_huggingface_new(eg_context *ctx, const char *config_path, const egi_new_options *options,
                              egi_module **out_module) {
  egi_json json = {ctx, config_path, NULL};
  egi_decoder_config config = {.hidden = 0};
  egi_module *module;
  json_t *root;
  EG_TRY(egi_json_read(ctx, config_path, &root));
  json.object = find_text_config(root);
  eg_status status = egi_module_create(ctx, &module);
  if (status == EG_OK) {
    status = egi_decoder_read_config(&json, &module->arena, &config);
    if (status == EG_OK) status = egi_decoder_build(module, &config, options);
    if (status != EG_OK) egi_module_destroy(module);
  }
  json_decref(root);
  if (status != EG_OK) return status;
  if (options->weights != NULL) egi_weight_files_report_unused(options->weights, config.is_tied);
  *out_module = module;
  return EG_OK;
}
