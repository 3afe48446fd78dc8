/* engraft export: an adapter, checked against its model, in another form. */
#include "tools/tool.h"

int tool_export(tool *t) {
  eg_model *model = NULL;
  if (tool_text(t, OPTION_ADAPTER) == NULL) return tool_fail_usage(t, "--adapter is missing");
  if (tool_text(t, OPTION_FORMAT) == NULL) return tool_fail_usage(t, "--format is missing");
  if (tool_text(t, OPTION_OUTPUT) == NULL) return tool_fail_usage(t, "-o is missing");
  eg_status status = tool_load_model(t, &model);
  if (status == EG_OK) status = egi_export_peft(model, tool_text(t, OPTION_ADAPTER), tool_text(t, OPTION_OUTPUT));
  eg_model_destroy(model);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
