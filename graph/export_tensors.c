/* Weights → TensorProto. A weight that lies in an external file under the new file's directory is referred to; others
 * are embedded as ranges, or, when they are too many for one message, written to PATH.data. */
#define _XOPEN_SOURCE 700 /* realpath */

#include "graph/export.h"

#include <limits.h>

#define DATA_ALIGNMENT 4096u
/* Smaller weights stay in the message even when there is a data file. */
#define SMALLEST_PIECE 1024u

/* `name` as it was opened, with its directory's links followed but not its own: a cache of links stays one. */
static eg_status resolve_directory(egi_exporter *exporter, const char *name, char *resolved, const char **out_path) {
  const char *slash = strrchr(name, '/'), *directory = egi_path_directory(&exporter->arena, name);
  if (!directory) return EG_ERROR_MEMORY;
  *out_path = realpath(directory, resolved)
                  ? egi_path_join(&exporter->arena, strcmp(resolved, "/") ? resolved : "", slash ? slash + 1 : name)
                  : "";
  return *out_path ? EG_OK : EG_ERROR_MEMORY;
}

/* Where a file of external data lies seen from the new directory; NULL: not under it. Of a module that was made in
 * memory `name` is the path of the file. */
static eg_status resolve_location(egi_exporter *exporter, const char *name, const char **out_location) {
  const egi_onnx *file = exporter->module->file;
  const char *path = file ? egi_path_join(&exporter->arena, egi_onnx_directory(file), name) : name;
  char *resolved = egi_arena_get(&exporter->arena, 1, PATH_MAX);
  if (!path || !resolved) return EG_ERROR_MEMORY;
  const char *place = file ? realpath(path, resolved) : NULL;
  if (!file) EG_TRY(resolve_directory(exporter, name, resolved, &place));
  size_t length = strlen(exporter->directory);
  if (length && exporter->directory[length - 1] == '/') length--;
  bool is_below = place && !strncmp(place, exporter->directory, length) && place[length] == '/';
  *out_location = is_below ? place + length + 1 : NULL;
  if (is_below || file) return EG_OK;
  return egi_fail(exporter->ctx, EG_ERROR_ARGUMENT,
                  "%s: it cannot refer to \"%s\": external data must lie in the folder of the ONNX file or below it",
                  exporter->path, name);
}

/* Resolved once a file: some exporters put every scalar there. */
static eg_status find_location(egi_exporter *exporter, const egi_weight *weight, const char **out_location) {
  const egi_onnx *file = exporter->module->file;
  const char *name = weight->bytes.file;
  uint32_t index = 0;
  *out_location = NULL;
  if (weight->bytes.kind != EGI_BYTES_MEMORY || !name || (file && !egi_onnx_directory(file))) return EG_OK;
  if (!egi_map_get(&exporter->locations, name, &index)) {
    index = exporter->n_locations;
    EG_TRY(EGI_GROW(&exporter->arena, &exporter->location_rows, index, &exporter->locations_capacity));
    EG_TRY(resolve_location(exporter, name, &exporter->location_rows[index]));
    EG_TRY(egi_map_put(&exporter->locations, name, index));
    exporter->n_locations++;
  }
  const char *location = exporter->location_rows[index];
  /* The data file is about to be replaced: what it holds moves. */
  if (location && exporter->has_data_file && !strcmp(location, exporter->data_location)) location = NULL;
  *out_location = location;
  return EG_OK;
}

/* Bytes that would be embedded. */
static eg_status sum_embedded(egi_exporter *exporter, const egi_graph *graph, uint64_t *out_bytes) {
  uint64_t bytes = 0;
  for (egi_value_id v = 1; v < graph->n_values; v++) {
    if (graph->values[v].kind != EGI_VALUE_WEIGHT) continue;
    const egi_weight *weight = &exporter->module->weights[graph->values[v].index];
    const char *location = NULL;
    EG_TRY(find_location(exporter, weight, &location));
    if (!location && weight->bytes.kind == EGI_BYTES_MEMORY) bytes += weight->bytes.size_bytes;
  }
  *out_bytes = bytes;
  return EG_OK;
}

eg_status egi_export_plan_weights(egi_exporter *exporter, const egi_graph *graph) {
  uint64_t bytes = 0;
  const char *slash = strrchr(exporter->path, '/');
  char *directory = egi_path_directory(&exporter->arena, exporter->path);
  char *resolved = egi_arena_get(&exporter->arena, 1, PATH_MAX);
  exporter->data_location = egi_arena_format(&exporter->arena, "%s.data", slash ? slash + 1 : exporter->path);
  if (!directory || !resolved || !exporter->data_location) return EG_ERROR_MEMORY;
  if (!realpath(directory, resolved))
    return egi_fail(exporter->ctx, EG_ERROR_IO, "%s: no such directory: %s", exporter->path, directory);
  exporter->directory = resolved;
  EG_TRY(sum_embedded(exporter, graph, &bytes));
  exporter->has_data_file = bytes > exporter->embed_limit;
  return EG_OK;
}

static eg_status add_entry(egi_exporter *exporter, Onnx__TensorProto *tensor, const char *key, const char *value) {
  Onnx__StringStringEntryProto *entry = EGI_NEW(&exporter->arena, Onnx__StringStringEntryProto, 1);
  if (!entry || !value) return EG_ERROR_MEMORY;
  onnx__string_string_entry_proto__init(entry);
  entry->key = egi_export_text(key);
  entry->value = egi_export_text(value);
  tensor->external_data[tensor->n_external_data++] = entry;
  return EG_OK;
}

static eg_status begin_external(egi_exporter *exporter, Onnx__TensorProto *tensor) {
  tensor->external_data = EGI_NEW(&exporter->arena, Onnx__StringStringEntryProto *, 4);
  if (!tensor->external_data) return EG_ERROR_MEMORY;
  tensor->has_data_location = true;
  tensor->data_location = ONNX__TENSOR_PROTO__DATA_LOCATION__EXTERNAL;
  return EG_OK;
}

static eg_status refer(egi_exporter *exporter, Onnx__TensorProto *tensor, const char *location, uint64_t offset,
                       uint64_t size_bytes) {
  egi_arena *arena = &exporter->arena;
  EG_TRY(begin_external(exporter, tensor));
  EG_TRY(add_entry(exporter, tensor, "location", location));
  EG_TRY(add_entry(exporter, tensor, "offset", egi_arena_format(arena, "%llu", (unsigned long long)offset)));
  return add_entry(exporter, tensor, "length", egi_arena_format(arena, "%llu", (unsigned long long)size_bytes));
}

/* Numbers made at load: docs/format.md. */
static eg_status export_init(egi_exporter *exporter, const egi_weight *weight, Onnx__TensorProto *tensor) {
  egi_arena *arena = &exporter->arena;
  bool is_normal = weight->bytes.kind == EGI_BYTES_NORMAL;
  EG_TRY(begin_external(exporter, tensor));
  EG_TRY(add_entry(exporter, tensor, "location", ""));
  EG_TRY(add_entry(exporter, tensor, "engraft.init", is_normal ? "normal" : "fill"));
  EG_TRY(
      add_entry(exporter, tensor, is_normal ? "std" : "value", egi_arena_format(arena, "%.17g", weight->bytes.value)));
  if (!is_normal) return EG_OK;
  return add_entry(exporter, tensor, "seed", egi_arena_format(arena, "%llu", (unsigned long long)weight->bytes.seed));
}

static eg_status embed(egi_exporter *exporter, const egi_weight *weight, Onnx__TensorProto *tensor) {
  egi_range *range = EGI_NEW(&exporter->arena, egi_range, 1);
  if (!range) return EG_ERROR_MEMORY;
  *range = (egi_range){weight->bytes.data, weight->bytes.size_bytes};
  tensor->has_raw_data = true;
  tensor->raw_data.data = (uint8_t *)range;
  tensor->raw_data.len = sizeof(*range);
  return EG_OK;
}

static eg_status put_in_data_file(egi_exporter *exporter, const egi_weight *weight, Onnx__TensorProto *tensor) {
  uint64_t offset = (exporter->data_bytes + DATA_ALIGNMENT - 1) / DATA_ALIGNMENT * DATA_ALIGNMENT;
  EG_TRY(EGI_GROW(&exporter->arena, &exporter->pieces, exporter->n_pieces, &exporter->pieces_capacity));
  exporter->pieces[exporter->n_pieces++] = (egi_export_piece){{weight->bytes.data, weight->bytes.size_bytes}, offset};
  exporter->data_bytes = offset + weight->bytes.size_bytes;
  return refer(exporter, tensor, exporter->data_location, offset, weight->bytes.size_bytes);
}

/* What the file said about a tensor beside its content. */
static void keep_remarks(const egi_exporter *exporter, const char *name, Onnx__TensorProto *tensor) {
  uint32_t index = 0;
  if (!egi_map_get(&exporter->tensors, name, &index)) return;
  const Onnx__TensorProto *old = exporter->file->graph->initializer[index];
  tensor->base.n_unknown_fields = old->base.n_unknown_fields;
  tensor->base.unknown_fields = old->base.unknown_fields;
  tensor->doc_string = old->doc_string;
  tensor->n_metadata_props = old->n_metadata_props;
  tensor->metadata_props = old->metadata_props;
}

eg_status egi_export_tensor(egi_exporter *exporter, const egi_weight *weight, const char *name,
                            Onnx__TensorProto **out_tensor) {
  Onnx__TensorProto *tensor = EGI_NEW(&exporter->arena, Onnx__TensorProto, 1);
  const char *location = NULL;
  if (!tensor) return EG_ERROR_MEMORY;
  onnx__tensor_proto__init(tensor);
  keep_remarks(exporter, name, tensor);
  tensor->name = egi_export_text(name);
  tensor->has_data_type = true;
  tensor->data_type = (int32_t)weight->dtype;
  tensor->dims = EGI_NEW(&exporter->arena, int64_t, (size_t)weight->rank);
  if (!tensor->dims) return EG_ERROR_MEMORY;
  tensor->n_dims = (size_t)weight->rank;
  for (int i = 0; i < weight->rank; i++) tensor->dims[i] = weight->dims[i];
  *out_tensor = tensor;
  if (weight->bytes.kind == EGI_BYTES_NORMAL || weight->bytes.kind == EGI_BYTES_FILL)
    return export_init(exporter, weight, tensor);
  if (weight->bytes.kind != EGI_BYTES_MEMORY)
    return egi_fail(exporter->ctx, EG_ERROR_INTERNAL, "weight \"%s\" has no bytes yet", name);
  EG_TRY(find_location(exporter, weight, &location));
  if (location) return refer(exporter, tensor, location, weight->bytes.offset, weight->bytes.size_bytes);
  if (exporter->has_data_file && weight->bytes.size_bytes >= SMALLEST_PIECE)
    return put_in_data_file(exporter, weight, tensor);
  return embed(exporter, weight, tensor);
}

static eg_status write_pieces(egi_exporter *exporter, egi_file *file) {
  static const uint8_t zeros[DATA_ALIGNMENT] = {0};
  uint64_t position = 0;
  for (uint32_t i = 0; i < exporter->n_pieces; i++) {
    const egi_export_piece *piece = &exporter->pieces[i];
    EG_TRY(egi_file_write(file, zeros, (size_t)(piece->offset - position)));
    EG_TRY(egi_file_write(file, piece->range.data, (size_t)piece->range.size_bytes));
    position = piece->offset + piece->range.size_bytes;
  }
  return EG_OK;
}

eg_status egi_export_write_data(egi_exporter *exporter) {
  egi_file *file = NULL;
  if (!exporter->n_pieces) return EG_OK;
  char *path = egi_arena_format(&exporter->arena, "%s.data", exporter->path);
  if (!path) return EG_ERROR_MEMORY;
  EG_TRY(egi_file_create(exporter->ctx, path, &file));
  eg_status status = write_pieces(exporter, file);
  if (status == EG_OK) return egi_file_commit(file);
  egi_file_abandon(file);
  return status;
}
