/* engraft export: an adapter, checked against its model, in another form. */
#include "tools/tool.h"

#include <string.h>
#include <unistd.h>

#include <jansson.h>

/* Without --dtype: as in the adapter's own file, a merged model in float32. */
static eg_dtype parse_dtype(const tool *t) {
  return tool_is_given(t, OPTION_EXPORT_DTYPE) ? tool_dtype(t, OPTION_EXPORT_DTYPE) : EG_DTYPE_UNDEFINED;
}

/* How the base was held in training; NF4 with the defaults where no option says otherwise. */
static eg_status read_base(tool *t, eg_export_options *options) {
  const char *quant = tool_text(t, OPTION_QUANT);
  if (strcmp(tool_text(t, OPTION_EXPORT_DTYPE), "nf4") == 0) options->stored = EG_QUANT_NF4;
  bool is_dequantised = strcmp(tool_text(t, OPTION_BASE), "dequantised") == 0;
  options->base = !is_dequantised                              ? EG_QUANT_NONE
                  : quant != NULL && strcmp(quant, "fp4") == 0 ? EG_QUANT_FP4
                                                               : EG_QUANT_NF4;
  options->double_quant = strcmp(tool_text(t, OPTION_DOUBLE_QUANT), "on") == 0;
  options->quant_head = strcmp(tool_text(t, OPTION_QUANT_HEAD), "on") == 0;
  uint64_t block = t->values[OPTION_QUANT_BLOCK].count;
  if (block > UINT32_MAX) return egi_fail(t->ctx, EG_ERROR_ARGUMENT, "--quant-block is out of range");
  options->quant_block = (uint32_t)block;
  return EG_OK;
}

static eg_export_format parse_format(const char *text) {
  if (strcmp(text, "gguf") == 0) return EG_EXPORT_GGUF;
  if (strcmp(text, "bnb") == 0) return EG_EXPORT_BNB;
  if (strcmp(text, "onnx_adapter") == 0) return EG_EXPORT_ONNX_ADAPTER;
  return strcmp(text, "merged") == 0 ? EG_EXPORT_MERGED : EG_EXPORT_PEFT;
}

/* "model_type" of the config.json beside the model; NULL where there is none. */
static eg_status find_model_type(tool *t, const char **out_type) {
  char *directory = egi_path_directory(&t->arena, t->model);
  const char *path = directory != NULL ? egi_path_join(&t->arena, directory, "config.json") : NULL;
  egi_json json = {t->ctx, path, NULL};
  *out_type = NULL;
  if (path == NULL) return EG_ERROR_MEMORY;
  if (access(path, R_OK) != 0) return EG_OK;
  EG_TRY(egi_json_read(t->ctx, path, &json.object));
  eg_status status = egi_json_string(&json, "model_type", out_type);
  if (status == EG_OK && *out_type != NULL) *out_type = egi_arena_copy_text(&t->arena, *out_type, strlen(*out_type));
  json_decref(json.object);
  return status;
}

/* --config, or the config.json beside the model. Its codes are those of --quant; NF4 unless it says otherwise. */
static eg_status read_bnb(tool *t, eg_export_options *options) {
  const char *quant = tool_text(t, OPTION_QUANT);
  options->stored = quant != NULL && strcmp(quant, "fp4") == 0 ? EG_QUANT_FP4 : EG_QUANT_NF4;
  options->config = tool_text(t, OPTION_CONFIG);
  if (options->config != NULL) return EG_OK;
  char *directory = egi_path_directory(&t->arena, t->model);
  const char *path = directory != NULL ? egi_path_join(&t->arena, directory, "config.json") : NULL;
  if (path == NULL) return EG_ERROR_MEMORY;
  if (access(path, R_OK) == 0)
    options->config = path;
  else
    egi_log(t->ctx, EG_LOG_WARNING, "%s is not there: no config.json is written; --config names one", path);
  return EG_OK;
}

/* What the adapter is worth beside the file's own numbers and beside those that it was trained with, over --data. */
static eg_status report_losses(tool *t, const eg_model *model, const eg_export_options *options) {
  const char *data = tool_text(t, OPTION_DATA);
  eg_quant base = options->base != EG_QUANT_NONE ? options->base : EG_QUANT_NF4;
  eg_dataset *dataset;
  double losses[2];
  if (data == NULL) return EG_OK;
  EG_TRY(tool_load_dataset(t, data, false, &dataset));
  eg_status status = EG_OK;
  for (int i = 0; i < 2 && status == EG_OK; i++) {
    egi_evaluate_options evaluate = {.adapter = tool_text(t, OPTION_ADAPTER), .tokens = 2048};
    status = egi_quantise_options_make(t->ctx, i == 0 ? EG_QUANT_NONE : base, options->quant_block,
                                       options->double_quant, &evaluate.quantise);
    evaluate.quantise.has_head = options->quant_head != 0;
    if (status == EG_OK) status = egi_evaluate_model(model, &evaluate, dataset->documents, &losses[i]);
  }
  eg_dataset_destroy(dataset);
  if (status == EG_OK)
    printf("loss %.6f in the original base, %.6f in the dequantised one (%s, blocks of %u)\n", losses[0], losses[1],
           base == EG_QUANT_NF4 ? "nf4" : "fp4", options->quant_block);
  return status;
}

int tool_export(tool *t) {
  eg_model *model = NULL;
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  const char *format = tool_text(t, OPTION_FORMAT);
  if (format == NULL) return tool_fail_usage(t, "--format is missing");
  if (tool_text(t, OPTION_ADAPTER) == NULL && strcmp(format, "bnb") != 0)
    return tool_fail_usage(t, "--adapter is missing");
  if (tool_text(t, OPTION_OUTPUT) == NULL) return tool_fail_usage(t, "-o is missing");
  options.format = parse_format(format);
  options.is_portable = tool_is_given(t, OPTION_PORTABLE);
  options.dtype = parse_dtype(t);
  if (options.is_portable && options.format != EG_EXPORT_PEFT)
    return tool_fail_usage(t, "--portable is a form of --format peft");
  eg_status status = read_base(t, &options);
  if (status == EG_OK && options.format == EG_EXPORT_BNB) status = read_bnb(t, &options);
  bool is_of_a_family = options.format == EG_EXPORT_GGUF || options.is_portable; /* whose names the form takes */
  if (status == EG_OK && is_of_a_family) status = find_model_type(t, &options.architecture);
  if (status == EG_OK) status = tool_load_model(t, &model);
  if (status == EG_OK)
    status = eg_model_export_adapter(model, tool_text(t, OPTION_ADAPTER), &options, tool_text(t, OPTION_OUTPUT));
  if (status == EG_OK && tool_text(t, OPTION_ADAPTER) != NULL) status = report_losses(t, model, &options);
  eg_model_destroy(model);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
