/* engraft plan: what training would take - bytes by purpose, work, time, what the passes did - before anything of it is
 * allocated, as JSON or as a short text. The JSON is also the file that `train --plan` follows. */
#include "tools/train.h"

#include <jansson.h>

static int append(void *userdata, const void *bytes, size_t size_bytes) {
  egi_text_append(userdata, bytes, size_bytes);
  return 0;
}

static double real(const json_t *object, const char *key) {
  return json_number_value(json_object_get(object, key));
}

static long long whole(const json_t *object, const char *key) {
  return (long long)json_integer_value(json_object_get(object, key));
}

static const char *text_of(const json_t *object, const char *key) {
  const char *text = json_string_value(json_object_get(object, key));
  return text != NULL ? text : "";
}

static void print_bytes(const json_t *plan) {
  const char *key;
  json_t *value, *terms = json_object_get(plan, "bytes");
  printf("%.1f MiB on the device, most of it %s\n", real(plan, "total_bytes") / 1048576.0,
         text_of(plan, "largest_term"));
  json_object_foreach(terms, key, value) printf("  %-18s %12.1f KiB\n", key, json_number_value(value) / 1024.0);
}

static void print_passes(const json_t *passes) {
  const json_t *adapters = json_object_get(passes, "graft_adapters");
  const json_t *metadata = json_object_get(passes, "cache_metadata");
  const json_t *experts = json_object_get(passes, "dispatch_moe");
  const json_t *checkpoints = json_object_get(passes, "buffer_checkpoints");
  printf("%lld adapters, %lld trained parameters\n", whole(adapters, "adapters"), whole(adapters, "parameters"));
  if (whole(metadata, "made") > 0)
    printf("bounds of documents made %lld time(s), read by %lld nodes\n", whole(metadata, "made"),
           whole(metadata, "shared_by"));
  if (whole(experts, "layers") > 0)
    printf("%lld layers of experts, dispatched %s\n", whole(experts, "layers"), text_of(experts, "form"));
  printf("%.1f MiB kept for the backward pass, %.1f MiB made again (%lld nodes), %.1f MiB offloaded (%lld tensors, "
         "%lld slots)\n",
         real(checkpoints, "kept_bytes") / 1048576.0, real(checkpoints, "recomputed_bytes") / 1048576.0,
         whole(checkpoints, "recomputed_nodes"), real(checkpoints, "offloaded_bytes") / 1048576.0,
         whole(checkpoints, "offloads"), whole(checkpoints, "slots"));
}

static void print_work(const json_t *plan) {
  const json_t *batch = json_object_get(plan, "micro_batch"), *row;
  size_t index;
  printf("%lld x %lld tokens: %.3f GFLOP, %.1f MiB read, %.1f MiB written; predicted %.2f ms, %.0f tokens/s on %s\n",
         whole(batch, "rows"), whole(batch, "tokens"), real(batch, "flops") / 1e9,
         real(batch, "read_bytes") / 1048576.0, real(batch, "written_bytes") / 1048576.0, 1e3 * real(batch, "seconds"),
         real(plan, "tokens_per_s"), text_of(json_object_get(plan, "device"), "name"));
  json_array_foreach(json_object_get(plan, "operators"), index, row) {
    printf("  %-26s %5lld  %10.3f GFLOP  %10.1f MiB  %9.3f ms", text_of(row, "operator"), whole(row, "count"),
           real(row, "flops") / 1e9, (real(row, "read_bytes") + real(row, "written_bytes")) / 1048576.0,
           1e3 * real(row, "seconds"));
    if (whole(row, "chunk_rows") > 0) printf("  %lld rows at a time", whole(row, "chunk_rows"));
    printf("\n");
  }
}

static eg_status print_text(tool *t, const egi_text *text) {
  json_t *plan;
  EG_TRY(egi_json_parse(t->ctx, "plan", egi_text_string(text), text->length, &plan));
  printf("plan %s for %zu shape(s)\n", text_of(plan, "hash"), json_array_size(json_object_get(plan, "shapes")));
  print_bytes(plan);
  print_passes(json_object_get(plan, "passes"));
  print_work(plan);
  json_decref(plan);
  return EG_OK;
}

static eg_status write_text(const void *object, eg_write_function write, void *userdata) {
  const egi_text *text = object;
  if (write(userdata, text->data, text->length) == 0) return EG_OK;
  return egi_fail(text->ctx, EG_ERROR_IO, "the plan could not be written");
}

static eg_status show(tool *t, const egi_text *text) {
  const char *path = tool_text(t, OPTION_OUTPUT);
  EG_TRY(egi_text_status(text));
  if (path != NULL) EG_TRY(tool_write_file(t, path, write_text, text));
  if (!tool_is_given(t, OPTION_JSON)) return path != NULL ? EG_OK : print_text(t, text);
  if (fputs(egi_text_string(text), stdout) >= 0 && fflush(stdout) == 0) return EG_OK;
  return egi_fail(t->ctx, EG_ERROR_IO, "the plan could not be written");
}

static eg_status make(tool *t, eg_model **model, eg_dataset **dataset, egi_text *text) {
  const char *data = tool_text(t, OPTION_DATA), *bytes = tool_text(t, OPTION_TEXT);
  eg_trainer_options options = EG_TRAINER_OPTIONS_INIT;
  EG_TRY(training_options(t, &options));
  EG_TRY(tool_load_model(t, model));
  if (data != NULL || bytes != NULL) EG_TRY(tool_load_dataset(t, data != NULL ? data : bytes, bytes != NULL, dataset));
  EG_TRY(eg_trainer_plan(*model, *dataset, &options, append, text));
  return show(t, text);
}

int tool_plan(tool *t) {
  eg_model *model = NULL;
  eg_dataset *dataset = NULL;
  egi_text text;
  if (tool_text(t, OPTION_DATA) != NULL && tool_text(t, OPTION_TEXT) != NULL)
    return tool_fail_usage(t, "--data and --text exclude each other");
  egi_text_init(&text, t->ctx);
  eg_status status = make(t, &model, &dataset, &text);
  egi_text_free(&text);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
