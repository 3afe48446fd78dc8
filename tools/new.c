/* engraft new: a model file from a Hugging Face config.json, with random weights. */
#include "tools/tool.h"

#include <string.h>

static eg_dtype parse_dtype(const char *text) {
  if (strcmp(text, "f32") == 0) return EG_DTYPE_F32;
  return strcmp(text, "f16") == 0 ? EG_DTYPE_F16 : EG_DTYPE_BF16;
}

int tool_new(tool *t) {
  egi_new_options options = {parse_dtype(tool_text(t, OPTION_NEW_DTYPE)), t->values[OPTION_RANDOM_WEIGHTS].count};
  egi_module *module = NULL;
  if (tool_text(t, OPTION_CONFIG) == NULL) return tool_fail_usage(t, "--config is missing");
  if (!tool_is_given(t, OPTION_RANDOM_WEIGHTS)) return tool_fail_usage(t, "--random-weights is missing");
  if (tool_text(t, OPTION_OUTPUT) == NULL) return tool_fail_usage(t, "-o is missing");
  eg_status status = egi_huggingface_new(t->ctx, tool_text(t, OPTION_CONFIG), &options, &module);
  if (status == EG_OK) status = egi_module_export(module, module->graphs[0], tool_text(t, OPTION_OUTPUT));
  egi_module_destroy(module);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
