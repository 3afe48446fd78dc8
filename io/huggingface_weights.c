/* The tensors of a Hugging Face folder, in one safetensors file or in the shards that an index names. Files stay
 * mapped; names are matched through the prefixes that a model has on its own or inside a larger one. */
#include "io/huggingface.h"

#include <string.h>

#include <jansson.h>

enum { MAX_SHARDS = 4096 };

typedef struct shard {
  const char *name, *path;
  egi_safetensors *file;
  bool *is_used; /* by tensor */
} shard;

struct egi_weight_files {
  eg_context *ctx;
  egi_arena arena;
  const char *directory;
  shard *shards;
  uint32_t n_shards, shards_capacity;
  egi_map tensors; /* name -> shard */
};

/* ---- opening ---- */

static eg_status open_shard(egi_weight_files *files, const char *name, uint32_t *out_index) {
  eg_context *ctx = files->ctx;
  for (uint32_t i = 0; i < files->n_shards; i++)
    if (strcmp(files->shards[i].name, name) == 0) {
      *out_index = i;
      return EG_OK;
    }
  if (files->n_shards == MAX_SHARDS)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "%s: more than %d shards", files->directory, (int)MAX_SHARDS);
  EG_TRY(EGI_GROW(&files->arena, &files->shards, files->n_shards, &files->shards_capacity));
  shard *row = &files->shards[files->n_shards];
  row->name = egi_arena_copy_text(&files->arena, name, strlen(name));
  row->path = egi_path_join(&files->arena, files->directory, name);
  if (row->name == NULL || row->path == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_safetensors_open(ctx, row->path, &row->file));
  *out_index = files->n_shards++;
  row->is_used = EGI_NEW(&files->arena, bool, egi_safetensors_count(row->file) + 1);
  return row->is_used != NULL ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status open_single(egi_weight_files *files) {
  uint32_t index;
  EG_TRY(open_shard(files, "model.safetensors", &index));
  const egi_safetensors *file = files->shards[index].file;
  for (size_t i = 0; i < egi_safetensors_count(file); i++)
    EG_TRY(egi_map_put(&files->tensors, egi_safetensors_at(file, i)->name, index));
  return EG_OK;
}

static eg_status add_indexed(egi_weight_files *files, const char *index_path, const char *name, const json_t *value) {
  const char *file_name = json_string_value(value);
  uint32_t index;
  if (file_name == NULL || file_name[0] == '\0' || strpbrk(file_name, "/\\") != NULL || strcmp(file_name, "..") == 0)
    return egi_fail(files->ctx, EG_ERROR_FORMAT, "%s: the file of tensor \"%s\" is not a file name", index_path, name);
  EG_TRY(open_shard(files, file_name, &index));
  const egi_safetensor *tensor = egi_safetensors_find(files->shards[index].file, name);
  if (tensor == NULL)
    return egi_fail(files->ctx, EG_ERROR_FORMAT, "%s: tensor \"%s\" is not in \"%s\"", index_path, name, file_name);
  return egi_map_put(&files->tensors, tensor->name, index);
}

static eg_status open_index(egi_weight_files *files, const char *index_path) {
  json_t *root, *value;
  const char *name;
  EG_TRY(egi_json_read(files->ctx, index_path, &root));
  json_t *map = json_object_get(root, "weight_map");
  eg_status status = EG_OK;
  if (!json_is_object(map))
    status = egi_fail(files->ctx, EG_ERROR_FORMAT, "%s: \"weight_map\" is missing", index_path);
  else
    json_object_foreach(map, name, value) if (status == EG_OK) status = add_indexed(files, index_path, name, value);
  json_decref(root);
  return status;
}

static bool is_there(const char *path) {
  FILE *stream = fopen(path, "rb");
  if (stream == NULL) return false;
  fclose(stream);
  return true;
}

static eg_status open_files(egi_weight_files *files, const char *directory) {
  files->directory = egi_arena_copy_text(&files->arena, directory, strlen(directory));
  if (files->directory == NULL) return EG_ERROR_MEMORY;
  const char *single = egi_path_join(&files->arena, directory, "model.safetensors");
  const char *index = egi_path_join(&files->arena, directory, "model.safetensors.index.json");
  if (single == NULL || index == NULL) return EG_ERROR_MEMORY;
  if (is_there(single)) return open_single(files);
  if (is_there(index)) return open_index(files, index);
  return egi_fail(files->ctx, EG_ERROR_IO, "%s: neither model.safetensors nor model.safetensors.index.json is there",
                  directory);
}

eg_status egi_weight_files_open(eg_context *ctx, const char *directory, egi_weight_files **out_files) {
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  egi_weight_files *files = EGI_NEW(&arena, egi_weight_files, 1);
  if (files == NULL) return EG_ERROR_MEMORY;
  files->ctx = ctx;
  files->arena = arena;
  egi_map_init(&files->tensors, &files->arena);
  eg_status status = open_files(files, directory);
  if (status != EG_OK) {
    egi_weight_files_close(files);
    return status;
  }
  *out_files = files;
  return EG_OK;
}

void egi_weight_files_close(egi_weight_files *files) {
  if (files == NULL) return;
  for (uint32_t i = 0; i < files->n_shards; i++) egi_safetensors_close(files->shards[i].file);
  egi_arena arena = files->arena; /* they lie in their own arena */
  egi_arena_clear(&arena);
}

const char *egi_weight_files_directory(const egi_weight_files *files) {
  return files->directory;
}

/* ---- finding ---- */

static egi_weight_location find_exactly(egi_weight_files *files, const char *name) {
  uint32_t index;
  if (!egi_map_get(&files->tensors, name, &index)) return (egi_weight_location){NULL, NULL, 0};
  const shard *row = &files->shards[index];
  const egi_safetensor *tensor = egi_safetensors_find(row->file, name);
  row->is_used[tensor - egi_safetensors_at(row->file, 0)] = true;
  return (egi_weight_location){tensor, row->path, egi_safetensors_offset(row->file, tensor)};
}

/* Replaces the first `from` of the text; false when there is none. */
static bool replace(egi_text *text, const char *from, const char *to) {
  const char *at = strstr(egi_text_string(text), from);
  if (at == NULL) return false;
  egi_text result;
  size_t before = (size_t)(at - egi_text_string(text));
  egi_text_init(&result, text->ctx);
  egi_text_append(&result, egi_text_string(text), before);
  egi_text_format(&result, "%s%s", to, at + strlen(from));
  egi_text_free(text);
  *text = result;
  return true;
}

/* Names that files keep although Transformers 5 calls the modules otherwise: Mixtral's experts, GPT-NeoX's head. */
static void spell_as_before(egi_text *name) {
  static const struct {
    const char *now, *before;
  } experts[] = {{".gate_proj.", ".w1."}, {".down_proj.", ".w2."}, {".up_proj.", ".w3."}};
  if (egi_has_prefix(egi_text_string(name), "lm_head.")) replace(name, "lm_head.", "embed_out.");
  replace(name, ".mlp.gate.", ".block_sparse_moe.gate.");
  if (!replace(name, ".mlp.experts.", ".block_sparse_moe.experts.")) return;
  for (size_t i = 0; i < EGI_COUNT(experts); i++) replace(name, experts[i].now, experts[i].before);
}

/* As it is; in a model that also sees (Transformers 4, 5); the base model alone; with old module names. */
enum { SPELLING_PLAIN, SPELLING_INSIDE, SPELLING_INSIDE_BASE, SPELLING_BASE, SPELLING_OLD, SPELLING_COUNT };

static void spell(egi_text *text, const char *name, int spelling) {
  const char *rest = strchr(name, '.');
  if (spelling == SPELLING_INSIDE) egi_text_add(text, "language_model.");
  if (spelling == SPELLING_INSIDE_BASE) egi_text_add(text, "model.language_model.");
  bool is_base = spelling == SPELLING_INSIDE_BASE || spelling == SPELLING_BASE;
  egi_text_add(text, is_base && rest != NULL ? rest + 1 : name);
  if (spelling == SPELLING_OLD && !text->is_failed) spell_as_before(text);
}

eg_status egi_weight_files_find(egi_weight_files *files, const char *name, egi_weight_location *out_location) {
  *out_location = (egi_weight_location){NULL, NULL, 0};
  for (int spelling = 0; spelling < SPELLING_COUNT && out_location->tensor == NULL; spelling++) {
    egi_text text;
    egi_text_init(&text, files->ctx);
    spell(&text, name, spelling);
    eg_status status = egi_text_status(&text);
    if (status == EG_OK) *out_location = find_exactly(files, egi_text_string(&text));
    egi_text_free(&text);
    EG_TRY(status);
  }
  return EG_OK;
}

/* Tables that older files store, copies of tied heads, and the other parts of a model that also sees. */
static bool is_expected(const char *name, bool is_tied) {
  static const char *const buffers[] = {".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
                                        ".inv_freq"};
  static const char *const parts[] = {"vision_tower", "multi_modal_projector", "model.vision_tower",
                                      "model.multi_modal_projector"};
  for (size_t i = 0; i < EGI_COUNT(buffers); i++)
    if (egi_has_suffix(name, buffers[i])) return true;
  for (size_t i = 0; i < EGI_COUNT(parts); i++)
    if (egi_has_prefix(name, parts[i])) return true;
  return is_tied && (egi_has_suffix(name, "lm_head.weight") || strcmp(name, "embed_out.weight") == 0);
}

void egi_weight_files_report_unused(const egi_weight_files *files, bool is_tied) {
  const char *first = NULL;
  size_t count = 0;
  for (uint32_t i = 0; i < files->n_shards; i++) {
    const shard *row = &files->shards[i];
    for (size_t t = 0; t < egi_safetensors_count(row->file); t++) {
      const char *name = egi_safetensors_at(row->file, t)->name;
      if (row->is_used[t] || is_expected(name, is_tied)) continue;
      if (count++ == 0) first = name;
    }
  }
  if (count > 0)
    egi_log(files->ctx, EG_LOG_WARNING, "%s: %zu tensors are not part of the model that config.json describes: %s%s",
            files->directory, count, first, count > 1 ? ", …" : "");
}
