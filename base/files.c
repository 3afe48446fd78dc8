/* Files: mapped whole for reading; written beside their name and renamed at the end. Devices and pipes are written as
 * they are: a rename would put a file in their place. */
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

eg_status egi_mapping_open(eg_context *ctx, const char *path, egi_mapping *out_mapping) {
  struct stat info;
  int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not block before it is refused */
  if (file < 0) return egi_fail(ctx, EG_ERROR_IO, "%s: %s", path, strerror(errno));
  if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(file);
    return egi_fail(ctx, EG_ERROR_IO, "%s: not a regular file", path);
  }
  egi_mapping mapping = {NULL, (size_t)info.st_size};
  if (mapping.size_bytes > 0) {
    void *data = mmap(NULL, mapping.size_bytes, PROT_READ, MAP_PRIVATE, file, 0);
    if (data == MAP_FAILED) {
      int error = errno;
      close(file);
      return egi_fail(ctx, EG_ERROR_IO, "%s: cannot be mapped: %s", path, strerror(error));
    }
    mapping.data = data;
  }
  close(file);
  *out_mapping = mapping;
  return EG_OK;
}

void egi_mapping_close(egi_mapping *mapping) {
  if (mapping->data != NULL) munmap((void *)(uintptr_t)mapping->data, mapping->size_bytes);
  mapping->data = NULL;
  mapping->size_bytes = 0;
}

struct egi_file {
  egi_arena arena;
  const char *path, *temporary;
  bool is_direct; /* no temporary file */
  FILE *stream;
};

static void free_file(egi_file *file) {
  egi_arena arena = file->arena; /* the file lies in its own arena */
  egi_arena_clear(&arena);
}

eg_status egi_file_create(eg_context *ctx, const char *path, egi_file **out_file) {
  egi_arena arena;
  struct stat info;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  egi_file *file = EGI_NEW(&arena, egi_file, 1);
  if (file == NULL) return EG_ERROR_MEMORY;
  file->path = egi_arena_copy_text(&arena, path, strlen(path));
  file->temporary = egi_arena_format(&arena, "%s.tmp-%ld", path, (long)getpid());
  file->is_direct = stat(path, &info) == 0 && !S_ISREG(info.st_mode);
  file->arena = arena;
  if (file->path == NULL || file->temporary == NULL) {
    free_file(file);
    return EG_ERROR_MEMORY;
  }
  file->stream = fopen(file->is_direct ? path : file->temporary, "wb");
  if (file->stream == NULL) {
    eg_status status = egi_fail(ctx, EG_ERROR_IO, "%s: cannot be written: %s", path, strerror(errno));
    free_file(file);
    return status;
  }
  *out_file = file;
  return EG_OK;
}

eg_status egi_file_write(egi_file *file, const void *bytes, size_t size_bytes) {
  if (size_bytes == 0 || fwrite(bytes, 1, size_bytes, file->stream) == size_bytes) return EG_OK;
  return egi_fail(file->arena.ctx, EG_ERROR_IO, "%s: write failed: %s", file->path, strerror(errno));
}

eg_status egi_file_commit(egi_file *file) {
  eg_status status = EG_OK;
  bool is_written = fflush(file->stream) == 0 && (file->is_direct || fsync(fileno(file->stream)) == 0);
  is_written = fclose(file->stream) == 0 && is_written;
  is_written = is_written && (file->is_direct || rename(file->temporary, file->path) == 0);
  if (!is_written) {
    status = egi_fail(file->arena.ctx, EG_ERROR_IO, "%s: write failed: %s", file->path, strerror(errno));
    if (!file->is_direct) remove(file->temporary);
  }
  free_file(file);
  return status;
}

void egi_file_abandon(egi_file *file) {
  if (file == NULL) return;
  fclose(file->stream);
  if (!file->is_direct) remove(file->temporary);
  free_file(file);
}

/* Makes one directory level; an existing one is fine. */
static bool make_level(const char *path) {
  return mkdir(path, 0777) == 0 || errno == EEXIST || errno == EISDIR;
}

eg_status egi_make_directory(eg_context *ctx, const char *path) {
  egi_arena arena;
  struct stat info;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  char *copy = egi_arena_copy_text(&arena, path, strlen(path));
  if (copy == NULL) return EG_ERROR_MEMORY;
  bool is_made = true;
  for (char *c = copy + 1; *copy != '\0' && *c != '\0' && is_made; c++) {
    if (*c != '/') continue;
    *c = '\0';
    is_made = make_level(copy);
    *c = '/';
  }
  is_made = is_made && make_level(copy);
  eg_status status = EG_OK;
  if (!is_made || stat(path, &info) != 0)
    status = egi_fail(ctx, EG_ERROR_IO, "%s: cannot be made: %s", path, strerror(errno));
  else if (!S_ISDIR(info.st_mode))
    status = egi_fail(ctx, EG_ERROR_IO, "%s: is not a directory", path);
  egi_arena_clear(&arena);
  return status;
}

char *egi_path_join(egi_arena *arena, const char *directory, const char *name) {
  const char *separator = egi_has_suffix(directory, "/") ? "" : "/";
  return egi_arena_format(arena, "%s%s%s", directory, separator, name);
}

char *egi_path_directory(egi_arena *arena, const char *path) {
  const char *slash = strrchr(path, '/');
  if (slash == NULL) return egi_arena_copy_text(arena, ".", 1);
  return egi_arena_copy_text(arena, path, slash == path ? 1 : (size_t)(slash - path));
}
