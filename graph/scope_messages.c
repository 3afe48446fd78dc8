/* Module paths in a file's nodes: read from the list that torch's exporter leaves in the metadata, or from the node's
 * name; written as such a list where a pass has changed the path, so that a rewritten file is read as it was meant. */
#include "graph/import.h"

/* Reads one quoted entry of a Python list; false at its end. The entry is written to `out`, which holds the whole text.
 */
static bool next_entry(const char **text, char *out) {
  const char *at = *text;
  while (*at && *at != '\'' && *at != '"') at++;
  char quote = *at;
  if (!quote) return false;
  for (at++; *at && *at != quote; at++) {
    if (*at == '\\' && at[1]) at++;
    *out++ = *at;
  }
  *out = '\0';
  *text = *at ? at + 1 : at;
  return true;
}

/* "['', 'model', 'model.layers.0', 'mul_3']": the last entry but one, the last being the node itself. */
static eg_status scope_from_list(egi_arena *arena, const char *text, const char **out_scope) {
  char *last = egi_arena_copy_text(arena, text, strlen(text)), *before = egi_arena_copy_text(arena, text, strlen(text));
  if (!last || !before) return EG_ERROR_MEMORY;
  *before = *last = '\0';
  for (char *entry = before; next_entry(&text, entry); entry = before) {
    before = last;
    last = entry;
  }
  *out_scope = *before ? before : NULL;
  return EG_OK;
}

eg_status egi_scope_of_message(egi_arena *arena, const Onnx__NodeProto *message, const char **out_scope,
                               bool *out_is_listed) {
  *out_scope = NULL;
  *out_is_listed = false;
  for (size_t i = 0; i < message->n_metadata_props; i++) {
    const Onnx__StringStringEntryProto *entry = message->metadata_props[i];
    if (!entry->key || !entry->value || strcmp(entry->key, EGI_NAME_SCOPES) != 0) continue;
    *out_is_listed = true;
    return scope_from_list(arena, entry->value, out_scope);
  }
  if (!message->name) return EG_OK;
  *out_scope = egi_scope_from_node_name(arena, message->name);
  bool is_path = message->name[0] == '/' && strrchr(message->name, '/') != message->name;
  return *out_scope || !is_path ? EG_OK : EG_ERROR_MEMORY;
}

eg_status egi_scope_put(egi_arena *arena, const char *scope, Onnx__NodeProto *message, bool *out_is_put) {
  const char *known;
  bool is_listed;
  *out_is_put = false;
  if (!scope || !scope[0] || strpbrk(scope, "'\"\\") != NULL) return EG_OK;
  EG_TRY(egi_scope_of_message(arena, message, &known, &is_listed));
  if (known && strcmp(known, scope) == 0) return EG_OK;
  Onnx__StringStringEntryProto **rows = EGI_NEW(arena, Onnx__StringStringEntryProto *, message->n_metadata_props + 1);
  Onnx__StringStringEntryProto *row = EGI_NEW(arena, Onnx__StringStringEntryProto, 1);
  if (!rows || !row) return EG_ERROR_MEMORY;
  size_t count = 0;
  for (size_t i = 0; i < message->n_metadata_props; i++)
    if (strcmp(egi_import_text(message->metadata_props[i]->key), EGI_NAME_SCOPES) != 0)
      rows[count++] = message->metadata_props[i];
  onnx__string_string_entry_proto__init(row);
  row->key = (char *)(uintptr_t)EGI_NAME_SCOPES; /* texts of a message are not written to */
  row->value = egi_arena_format(arena, "['', '%s', '']", scope);
  if (!row->value) return EG_ERROR_MEMORY;
  rows[count++] = row;
  message->metadata_props = rows;
  message->n_metadata_props = count;
  *out_is_put = true;
  return EG_OK;
}
