/* The bytes of a tensor: inline, or a range of a file of external data that is mapped once.
 *
 * A location comes from an untrusted file. It is relative, has no "..", and is opened component by component below a
 * directory that was opened first, following no link; so what was checked is what is mapped. With an external root
 * links are resolved beforehand and the result is opened below the root in the same way. */
#define _XOPEN_SOURCE 700 /* realpath */

#include "proto/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct external_entry {
  const char *location;
  uint64_t offset, length;
  bool has_length;
} external_entry;

/* A tensor being looked up, for messages. */
typedef struct external_lookup {
  egi_onnx *file;
  const char *tensor;
  const char *location;
} external_lookup;

static eg_status fail_lookup(const external_lookup *lookup, eg_status status, const char *reason, const char *detail) {
  return egi_fail(lookup->file->arena.ctx, status, "%s: tensor \"%s\": external data \"%s\": %s%s",
                  egi_onnx_path(lookup->file), lookup->tensor, lookup->location, reason, detail);
}

/* Digits only; false when there are none or the number is too big. */
static bool parse_decimal(const char *text, uint64_t *out_value) {
  uint64_t value = 0;
  if (!*text) return false;
  for (; *text; text++) {
    if (*text < '0' || *text > '9') return false;
    unsigned digit = (unsigned)(*text - '0');
    if (value > (UINT64_MAX - digit) / 10) return false;
    value = value * 10 + digit;
  }
  *out_value = value;
  return true;
}

static eg_status read_entry(external_lookup *lookup, const Onnx__TensorProto *tensor, external_entry *out_entry) {
  external_entry entry = {0};
  for (size_t i = 0; i < tensor->n_external_data; i++) {
    const char *key = tensor->external_data[i]->key, *value = tensor->external_data[i]->value;
    if (!key) key = "";
    if (!value) value = "";
    bool is_good = true;
    if (!strcmp(key, "location")) {
      entry.location = lookup->location = value;
    } else if (!strcmp(key, "offset")) {
      is_good = parse_decimal(value, &entry.offset);
    } else if (!strcmp(key, "length")) {
      is_good = entry.has_length = parse_decimal(value, &entry.length);
    } else if (strcmp(key, "checksum") != 0 && strcmp(key, "basepath") != 0) {
      return fail_lookup(lookup, EG_ERROR_FORMAT, "unknown key ", key);
    }
    if (!is_good) return fail_lookup(lookup, EG_ERROR_FORMAT, "not a decimal number: ", key);
  }
  if (!entry.location) return fail_lookup(lookup, EG_ERROR_FORMAT, "it has no location", "");
  *out_entry = entry;
  return EG_OK;
}

/* Relative, no "..", no backslash (a separator on other systems), at least one name. */
static eg_status check_location(const external_lookup *lookup) {
  const char *location = lookup->location;
  size_t n_names = 0;
  if (location[0] == '/' || strchr(location, '\\') || strchr(location, ':'))
    return fail_lookup(lookup, EG_ERROR_FORMAT, "the location is not a plain relative path", "");
  while (*location) {
    size_t length = strcspn(location, "/");
    if (length == 2 && location[0] == '.' && location[1] == '.')
      return fail_lookup(lookup, EG_ERROR_FORMAT, "the location leaves the model's directory", "");
    if (length && !(length == 1 && location[0] == '.')) n_names++;
    location += length;
    if (*location) location++;
  }
  return n_names ? EG_OK : fail_lookup(lookup, EG_ERROR_FORMAT, "the location is empty", "");
}

/* Opens `path` below `directory` (consumed) without following a link anywhere in it. */
static eg_status open_below(const external_lookup *lookup, int directory, char *path, int *out_file) {
  for (char *name = path; *name;) {
    size_t length = strcspn(name, "/");
    bool is_last = name[length + strspn(name + length, "/")] == '\0';
    char *next = name + length + (name[length] ? 1 : 0);
    name[length] = '\0';
    if (length) {
      int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | (is_last ? O_NONBLOCK : O_DIRECTORY);
      int opened = openat(directory, name, flags);
      int error = errno;
      close(directory);
      if (opened < 0 && error == ELOOP)
        return fail_lookup(lookup, EG_ERROR_IO, "a link, which only an external root allows", "");
      if (opened < 0 && error == ENOTDIR)
        return fail_lookup(lookup, EG_ERROR_IO,
                           "a link (which only an external root allows) or not a directory: ", name);
      if (opened < 0) return fail_lookup(lookup, EG_ERROR_IO, strerror(error), "");
      directory = opened;
    }
    name = next;
  }
  *out_file = directory;
  return EG_OK;
}

/* Strict: below the model's directory. */
static eg_status open_strict(const external_lookup *lookup, egi_arena *scratch, int *out_file) {
  int directory = open(lookup->file->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return fail_lookup(lookup, EG_ERROR_IO, lookup->file->directory, ": cannot be opened");
  char *path = egi_arena_copy_text(scratch, lookup->location, strlen(lookup->location));
  if (!path) {
    close(directory);
    return EG_ERROR_MEMORY;
  }
  return open_below(lookup, directory, path, out_file);
}

/* With a root: links are followed first, then the result must lie below the root. */
static eg_status open_in_root(const external_lookup *lookup, egi_arena *scratch, int *out_file) {
  const char *wanted_root = lookup->file->limits.external_root;
  char *root = egi_arena_get(scratch, 1, PATH_MAX), *target = egi_arena_get(scratch, 1, PATH_MAX);
  char *path = egi_path_join(scratch, lookup->file->directory, lookup->location);
  if (!root || !target || !path) return EG_ERROR_MEMORY;
  if (!realpath(wanted_root, root)) return fail_lookup(lookup, EG_ERROR_IO, "no such external root: ", wanted_root);
  if (!realpath(path, target)) return fail_lookup(lookup, EG_ERROR_IO, strerror(errno), "");
  size_t length = strlen(root);
  if (root[length - 1] == '/') length--;
  if (strncmp(root, target, length) != 0 || target[length] != '/')
    return fail_lookup(lookup, EG_ERROR_IO, "it lies outside the external root ", wanted_root);
  int directory = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return fail_lookup(lookup, EG_ERROR_IO, "the external root cannot be opened: ", wanted_root);
  return open_below(lookup, directory, target + length + 1, out_file);
}

static eg_status map_opened(const external_lookup *lookup, int opened, egi_mapping *out_mapping) {
  struct stat info;
  if (fstat(opened, &info) || !S_ISREG(info.st_mode)) return fail_lookup(lookup, EG_ERROR_IO, "not a regular file", "");
  if (!lookup->file->limits.external_root && info.st_nlink > 1)
    return fail_lookup(lookup, EG_ERROR_IO, "a file with several hard links, which only an external root allows", "");
  *out_mapping = (egi_mapping){0};
  if (info.st_size == 0) return EG_OK;
  void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, opened, 0);
  if (data == MAP_FAILED) return fail_lookup(lookup, EG_ERROR_IO, "cannot be mapped: ", strerror(errno));
  *out_mapping = (egi_mapping){data, (size_t)info.st_size};
  return EG_OK;
}

static eg_status add_external(const external_lookup *lookup, uint32_t *out_index) {
  egi_onnx *file = lookup->file;
  EG_TRY(EGI_GROW(&file->arena, &file->external, file->n_external, &file->external_capacity));
  EG_TRY(egi_map_put(&file->external_by_location, lookup->location, file->n_external));
  egi_arena scratch;
  int opened = -1;
  egi_arena_init(&scratch, file->arena.ctx, EGI_PURPOSE_GRAPH);
  eg_status status =
      file->limits.external_root ? open_in_root(lookup, &scratch, &opened) : open_strict(lookup, &scratch, &opened);
  egi_arena_clear(&scratch);
  egi_external_file *external = &file->external[file->n_external];
  external->location = lookup->location;
  if (status == EG_OK) {
    status = map_opened(lookup, opened, &external->mapping);
    close(opened);
  }
  if (status != EG_OK) {
    egi_map_remove(&file->external_by_location, lookup->location);
    return status;
  }
  *out_index = file->n_external++;
  return EG_OK;
}

static eg_status fail_size(const egi_onnx *file, const char *tensor, uint64_t found, uint64_t expected) {
  return egi_fail(file->arena.ctx, EG_ERROR_FORMAT, "%s: tensor \"%s\": %llu bytes of data, its shape needs %llu",
                  egi_onnx_path(file), tensor, (unsigned long long)found, (unsigned long long)expected);
}

static eg_status external_range(external_lookup *lookup, const Onnx__TensorProto *tensor, uint64_t expected_bytes,
                                egi_range *out_range, uint64_t *out_offset) {
  egi_onnx *file = lookup->file;
  external_entry entry = {0};
  uint32_t index = 0;
  EG_TRY(read_entry(lookup, tensor, &entry));
  EG_TRY(check_location(lookup));
  if (entry.has_length && entry.length != expected_bytes)
    return fail_size(file, lookup->tensor, entry.length, expected_bytes);
  if (!file->directory) return fail_lookup(lookup, EG_ERROR_IO, "a model in memory has no directory to find it in", "");
  if (!egi_map_get(&file->external_by_location, lookup->location, &index)) EG_TRY(add_external(lookup, &index));
  const egi_mapping *mapping = &file->external[index].mapping;
  if (entry.offset > mapping->size_bytes || expected_bytes > mapping->size_bytes - entry.offset)
    return egi_fail(
        file->arena.ctx, EG_ERROR_FORMAT,
        "%s: tensor \"%s\": external data \"%s\": %llu bytes at offset %llu do not lie in a file of %zu bytes",
        egi_onnx_path(file), lookup->tensor, lookup->location, (unsigned long long)expected_bytes,
        (unsigned long long)entry.offset, mapping->size_bytes);
  *out_range = (egi_range){mapping->data ? mapping->data + entry.offset : (const uint8_t *)"", expected_bytes};
  *out_offset = entry.offset;
  return EG_OK;
}

eg_status egi_onnx_tensor_range(egi_onnx *file, const Onnx__TensorProto *tensor, uint64_t expected_bytes,
                                egi_range *out_range, const char **out_file_name, uint64_t *out_offset) {
  const char *name = tensor->name ? tensor->name : "";
  *out_range = (egi_range){0};
  *out_file_name = NULL;
  *out_offset = 0;
  if (tensor->has_data_location && tensor->data_location == ONNX__TENSOR_PROTO__DATA_LOCATION__EXTERNAL) {
    external_lookup lookup = {.file = file, .tensor = name, .location = ""};
    EG_TRY(external_range(&lookup, tensor, expected_bytes, out_range, out_offset));
    *out_file_name = lookup.location;
    return EG_OK;
  }
  if (!tensor->has_raw_data) return EG_OK;
  egi_range range;
  memcpy(&range, tensor->raw_data.data, sizeof(range));
  if (range.size_bytes != expected_bytes) return fail_size(file, name, range.size_bytes, expected_bytes);
  *out_range = range;
  return EG_OK;
}
