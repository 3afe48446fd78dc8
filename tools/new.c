/* engraft new: a model file from a Hugging Face config.json, with the weights of a folder or random ones. */
#include "tools/tool.h"

#include <string.h>

/* The files' own type unless one was asked for. */
static eg_dtype choose_dtype(const tool *t) {
  if (!tool_is_given(t, OPTION_NEW_DTYPE) && tool_is_given(t, OPTION_WEIGHTS)) return EG_DTYPE_UNDEFINED;
  return tool_dtype(t, OPTION_NEW_DTYPE);
}

static int check_usage(tool *t) {
  bool has_weights = tool_is_given(t, OPTION_WEIGHTS), is_random = tool_is_given(t, OPTION_RANDOM_WEIGHTS);
  if (tool_text(t, OPTION_CONFIG) == NULL && !has_weights) return tool_fail_usage(t, "--config is missing");
  if (!has_weights && !is_random) return tool_fail_usage(t, "--weights or --random-weights is missing");
  if (has_weights && is_random) return tool_fail_usage(t, "--weights and --random-weights exclude each other");
  if (tool_text(t, OPTION_OUTPUT) == NULL) return tool_fail_usage(t, "-o is missing");
  return 0;
}

static eg_status make_file(tool *t, egi_weight_files *weights) {
  egi_new_options options = {choose_dtype(t), t->values[OPTION_RANDOM_WEIGHTS].count, weights};
  const char *config = tool_text(t, OPTION_CONFIG);
  egi_module *module;
  if (config == NULL) config = egi_path_join(&t->arena, tool_text(t, OPTION_WEIGHTS), "config.json");
  if (config == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_huggingface_new(t->ctx, config, &options, &module));
  uint32_t count = 0;
  eg_status status = egi_graph_call_bodies(module->graphs[0], EGI_BODIES_OWN, &count);
  if (status == EG_OK) status = egi_module_export(module, module->graphs[0], tool_text(t, OPTION_OUTPUT));
  egi_module_destroy(module);
  return status;
}

int tool_new(tool *t) {
  egi_weight_files *weights = NULL;
  eg_status status = EG_OK;
  int code = check_usage(t);
  if (code != 0) return code;
  if (tool_is_given(t, OPTION_WEIGHTS)) status = egi_weight_files_open(t->ctx, tool_text(t, OPTION_WEIGHTS), &weights);
  if (status == EG_OK) status = make_file(t, weights);
  egi_weight_files_close(weights);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
