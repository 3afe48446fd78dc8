/* eg_model_export_adapter(): argument checks, then one internal call. */
#include "api/api.h"

eg_status eg_model_export_adapter(const eg_model *model, const char *adapter, const eg_export_options *options,
                                  const char *path) {
  eg_export_options known = EG_EXPORT_OPTIONS_INIT;
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (path == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_model_export_adapter: NULL argument");
  EG_TRY(egi_read_options(model->ctx, options, &known, sizeof known));
  return egi_export_adapter(model, adapter, &known, path);
}
