/* engraft_qat.json beside an adapter that was trained for codes: {"weights": "int4", "block": 32, "symmetric": true}.
 * PEFT's own files say nothing of it, so that every reader of these takes them. */
#include "io/io.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#define FILE_NAME "engraft_qat.json"

static eg_status read_fields(const egi_json *json, egi_arena *arena, egi_qat_record *record) {
  const char *weights = NULL;
  int64_t block = 0;
  bool is_symmetric = true;
  EG_TRY(egi_json_string(json, "weights", &weights));
  EG_TRY(egi_json_integer(json, "block", 0, 1 << 20, &block));
  EG_TRY(egi_json_boolean(json, "symmetric", &is_symmetric));
  if (weights == NULL) return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"weights\" is missing", json->what);
  *record = (egi_qat_record){egi_arena_copy_text(arena, weights, strlen(weights)), block, is_symmetric};
  return record->weights != NULL ? EG_OK : EG_ERROR_MEMORY;
}

eg_status egi_qat_record_read(egi_arena *arena, const char *directory, egi_qat_record *out_record) {
  const char *path = egi_path_join(arena, directory, FILE_NAME);
  egi_json json = {arena->ctx, path, NULL};
  *out_record = (egi_qat_record){.weights = NULL};
  if (path == NULL) return EG_ERROR_MEMORY;
  if (access(path, F_OK) != 0) return EG_OK;
  EG_TRY(egi_json_read(arena->ctx, path, &json.object));
  eg_status status = read_fields(&json, arena, out_record);
  json_decref(json.object);
  return status;
}

eg_status egi_qat_record_write(egi_arena *arena, const char *directory, const egi_qat_record *record) {
  const char *path = egi_path_join(arena, directory, FILE_NAME);
  char line[160];
  egi_file *file;
  if (path == NULL) return EG_ERROR_MEMORY;
  if (record->weights == NULL) {
    (void)remove(path); /* of a run that was here before */
    return EG_OK;
  }
  int length = snprintf(line, sizeof line, "{\"weights\": \"%.32s\", \"block\": %lld, \"symmetric\": %s}\n",
                        record->weights, (long long)record->block, record->is_symmetric ? "true" : "false");
  EG_TRY(egi_file_create(arena->ctx, path, &file));
  eg_status status = egi_file_write(file, line, (size_t)length);
  if (status == EG_OK) return egi_file_commit(file);
  egi_file_abandon(file);
  return status;
}
