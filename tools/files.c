/* Loading models and data as the options say; files written from a writer. */
#include "tools/tool.h"

eg_status tool_load_model(tool *t, eg_model **out_model) {
  eg_model_options options = EG_MODEL_OPTIONS_INIT;
  options.external_root = tool_text(t, OPTION_EXTERNAL_ROOT);
  options.max_nodes = t->values[OPTION_MAX_NODES].count;
  options.max_bytes = t->values[OPTION_MAX_BYTES].count;
  return eg_model_load(t->ctx, t->model, &options, out_model);
}

eg_status tool_load_dataset(tool *t, const char *path, bool is_text, eg_dataset **out_dataset) {
  eg_dataset_options options = EG_DATASET_OPTIONS_INIT;
  options.is_text = is_text;
  if (t->values[OPTION_SEQUENCE].count > UINT32_MAX)
    return egi_fail(t->ctx, EG_ERROR_ARGUMENT, "--sequence is out of range");
  options.sequence = (uint32_t)t->values[OPTION_SEQUENCE].count;
  return eg_dataset_load(t->ctx, path, &options, out_dataset);
}

static int write_piece(void *userdata, const void *bytes, size_t size_bytes) {
  return egi_file_write(userdata, bytes, size_bytes) == EG_OK ? 0 : 1;
}

eg_status tool_write_file(tool *t, const char *path,
                          eg_status (*produce)(const void *object, eg_write_function write, void *userdata),
                          const void *object) {
  egi_file *file;
  EG_TRY(egi_file_create(t->ctx, path, &file));
  eg_status status = produce(object, write_piece, file);
  if (status == EG_OK) return egi_file_commit(file);
  egi_file_abandon(file);
  return status;
}

int tool_write_stream(void *userdata, const void *bytes, size_t size_bytes) {
  return fwrite(bytes, 1, size_bytes, userdata) == size_bytes ? 0 : 1;
}
