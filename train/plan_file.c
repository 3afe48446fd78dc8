/* Reading a plan: checked against the trainer that is to follow it, member by member, so that the reason of a refusal
 * can be named; then its shapes and decisions are taken over. */
#include "train/train.h"

#include <inttypes.h>
#include <string.h>

#include <jansson.h>

enum { MAX_SHAPES = 64, MAX_TILES = 4096 };

static eg_status refuse(const egi_json *json, const char *why) {
  return egi_fail(json->ctx, EG_ERROR_DATA, "%s: %s", json->what, why);
}

static eg_status check_format(const egi_json *json) {
  int64_t version = 0;
  EG_TRY(egi_json_integer(json, "engraft_plan", 0, INT64_MAX, &version));
  if (version == 0) return refuse(json, "not a plan: \"engraft_plan\" is missing");
  return version == 1 ? EG_OK : refuse(json, "a plan of another version of engraft");
}

static eg_status check_hash(const egi_json *json, const char *key, uint64_t wanted, const char *why) {
  char text[24];
  const char *found = "";
  EG_TRY(egi_json_string(json, key, &found));
  snprintf(text, sizeof text, "%016" PRIx64, wanted);
  return strcmp(found, text) == 0 ? EG_OK : refuse(json, why);
}

/* ---- options ---- */

static char *to_text(const json_t *value) {
  return value != NULL ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
}

static eg_status refuse_option(const egi_json *json, const char *key, const json_t *planned, const json_t *wanted) {
  char *a = to_text(planned), *b = to_text(wanted);
  eg_status status = egi_fail(json->ctx, EG_ERROR_DATA, "%s: the plan is for %s %s, not %s", json->what, key,
                              a != NULL ? a : "none", b != NULL ? b : "none");
  free(a);
  free(b);
  return status;
}

static eg_status compare_options(const egi_json *json, json_t *own) {
  json_t *planned = json_object_get(json->object, "options"), *value;
  const char *key;
  if (!json_is_object(planned)) return refuse(json, "\"options\" is missing");
  json_object_foreach(own, key, value) {
    const json_t *other = json_object_get(planned, key);
    if (!json_equal(value, other)) return refuse_option(json, key, other, value);
  }
  json_object_foreach(planned, key, value) {
    if (json_object_get(own, key) == NULL) return refuse_option(json, key, value, NULL);
  }
  return EG_OK;
}

static eg_status check_options(const egi_json *json, const eg_trainer *trainer) {
  egi_text text;
  json_t *own;
  egi_text_init(&text, json->ctx);
  egi_trainer_plan_options(trainer, &text);
  eg_status status = egi_text_status(&text);
  if (status == EG_OK) status = egi_json_parse(json->ctx, "options", egi_text_string(&text), text.length, &own);
  egi_text_free(&text);
  EG_TRY(status);
  status = compare_options(json, own);
  json_decref(own);
  return status;
}

/* ---- shapes and decisions ---- */

static eg_status read_shape(const egi_json *json, const json_t *shapes, size_t index, egi_bucket *out_bucket) {
  json_t *object = json_array_get(shapes, index);
  const egi_json inner = {json->ctx, json->what, object};
  int64_t rows = 0, tokens = 0;
  if (!json_is_object(object)) return refuse(json, "a shape is not an object");
  EG_TRY(egi_json_integer(&inner, "rows", 1, UINT32_MAX, &rows));
  EG_TRY(egi_json_integer(&inner, "tokens", 1, UINT32_MAX, &tokens));
  if (rows == 0 || tokens == 0) return refuse(json, "a shape without \"rows\" and \"tokens\"");
  *out_bucket = (egi_bucket){(uint32_t)rows, (uint32_t)tokens};
  return EG_OK;
}

static eg_status read_shapes(const egi_json *json, egi_arena *arena, egi_batches *batches) {
  json_t *shapes = json_object_get(json->object, "shapes");
  size_t count = json_array_size(shapes);
  if (count < 1 || count > MAX_SHAPES) return refuse(json, "\"shapes\" is no list of shapes");
  egi_bucket *buckets = EGI_NEW(arena, egi_bucket, count);
  if (buckets == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) EG_TRY(read_shape(json, shapes, i, &buckets[i]));
  batches->buckets = buckets;
  batches->n_buckets = count;
  return EG_OK;
}

/* Every batch must find a shape; documents that share rows have one for all, as long as the fullest. */
static eg_status check_batches(const egi_json *json, const egi_documents *documents, const egi_batches *batches) {
  for (size_t i = 0; i < batches->count; i++) {
    const egi_batch_range *range = &batches->ranges[i];
    bool is_shared = range->order != NULL, fits = false;
    uint32_t rows = is_shared ? 1 : (uint32_t)range->n_documents;
    uint32_t tokens = is_shared ? egi_rows_bucket(documents, range, 1).sequence : range->longest;
    for (size_t k = 0; k < batches->n_buckets && !fits; k++)
      fits = rows <= batches->buckets[k].batch && tokens <= batches->buckets[k].sequence;
    if (!fits)
      return egi_fail(json->ctx, EG_ERROR_DATA,
                      "%s: the plan has no shape for %" PRIu32 " rows of %" PRIu32 " tokens, which %s asks for",
                      json->what, rows, tokens, documents->path);
  }
  return EG_OK;
}

static eg_status read_decisions(const egi_json *json, eg_trainer *trainer) {
  const egi_json inner = {json->ctx, json->what, json_object_get(json->object, "decisions")};
  egi_checkpoint_stages stages;
  int64_t rung = -1, tiles = 0;
  if (!json_is_object(inner.object)) return refuse(json, "\"decisions\" is missing");
  EG_TRY(egi_checkpoint_stages_find(trainer->machine.graph, &stages));
  EG_TRY(egi_json_integer(&inner, "rung", 0, stages.end[EGI_CHECKPOINT_STAGES - 1], &rung));
  EG_TRY(egi_json_integer(&inner, "tiles", 1, MAX_TILES, &tiles));
  if (rung < 0 || tiles == 0) return refuse(json, "\"rung\" or \"tiles\" is missing");
  trainer->rung = (uint32_t)rung;
  trainer->tiles = (uint32_t)tiles;
  trainer->is_decided = true;
  return EG_OK;
}

static eg_status take(const egi_json *json, eg_trainer *trainer, egi_batches *batches) {
  EG_TRY(check_format(json));
  EG_TRY(check_options(json, trainer));
  EG_TRY(check_hash(json, "model", trainer->model_hash, "the plan is for another model"));
  EG_TRY(check_hash(json, "graph", trainer->graph_hash, "the plan was made by another version of engraft"));
  EG_TRY(read_shapes(json, &trainer->arena, batches));
  EG_TRY(check_batches(json, trainer->dataset->documents, batches));
  EG_TRY(read_decisions(json, trainer));
  uint64_t hash = 0;
  EG_TRY(egi_trainer_plan_hash(trainer, batches, &hash));
  return check_hash(json, "hash", hash, "shapes or decisions are not those that the hash was made of");
}

eg_status egi_trainer_take_plan(eg_trainer *trainer, egi_batches *batches) {
  json_t *root;
  EG_TRY(egi_json_read(trainer->ctx, trainer->options.plan, &root));
  const egi_json json = {trainer->ctx, trainer->options.plan, root};
  eg_status status = take(&json, trainer, batches);
  json_decref(root);
  return status;
}
