/* Finds and loads the CUDA backend, a library of its own: one binary runs with and without a driver. */
#define _GNU_SOURCE          /* dladdr: where this code was loaded from */
#define ENGRAFT_ALLOW_BANNED /* which brings macros of those names */
#include <dlfcn.h>

#include "backend/backend.h"

#define LIBRARY "libengraft_cuda.so"
#define CUBLAS "libcublasLt.so"

enum { PATH_BYTES = 4096 };

/* The directory of the library or program that holds this function; false when it is not known. */
static bool own_directory(char *out, size_t capacity) {
  Dl_info found;
  union {
    const egi_backend *(*function)(void);
    void *address;
  } self = {.function = egi_backend_cpu};
  if (dladdr(self.address, &found) == 0 || found.dli_fname == NULL) return false;
  char *path = realpath(found.dli_fname, NULL);
  char *slash = path != NULL ? strrchr(path, '/') : NULL;
  bool is_found = slash != NULL && (size_t)(slash - path) < capacity;
  if (is_found) {
    memcpy(out, path, (size_t)(slash - path));
    out[slash - path] = '\0';
  }
  free(path);
  return is_found;
}

/* cuBLASLt by the name that the linker missed, where toolkits install it; it stays for the next attempt to find. */
static bool load_cublas(const char *missed) {
  static const char *const variables[] = {"CUDA_HOME", "CUDA_PATH"};
  char path[PATH_BYTES], name[64];
  const char *start = strstr(missed, CUBLAS);
  if (start == NULL) return false;
  (void)snprintf(name, sizeof name, "%.*s", (int)strcspn(start, ":"), start);
  for (size_t i = 0; i <= EGI_COUNT(variables); i++) {
    const char *root = i < EGI_COUNT(variables) ? getenv(variables[i]) : "/usr/local/cuda";
    int length = root != NULL ? snprintf(path, sizeof path, "%s/lib64/%s", root, name) : -1;
    if (length > 0 && (size_t)length < sizeof path && dlopen(path, RTLD_NOW | RTLD_GLOBAL) != NULL) return true;
  }
  return false;
}

static void *try_load(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library != NULL) return library;
  const char *reason = dlerror();
  return reason != NULL && load_cublas(reason) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

static bool is_readable(const char *path) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) return false;
  (void)fclose(file);
  return true;
}

/* Beside this code, in the lib directory beside its own, and where the loader looks. */
static eg_status load_library(eg_context *ctx, void **out_library) {
  static const char *const beside[] = {"", "/../lib"};
  char directory[PATH_BYTES], path[2 * PATH_BYTES];
  bool has_directory = own_directory(directory, sizeof directory);
  for (size_t i = 0; has_directory && i < EGI_COUNT(beside); i++) {
    (void)snprintf(path, sizeof path, "%s%s/" LIBRARY, directory, beside[i]);
    if (!is_readable(path)) continue;
    *out_library = try_load(path);
    if (*out_library != NULL) return EG_OK;
    const char *reason = dlerror();
    return egi_fail(ctx, EG_ERROR_DEVICE, "the CUDA backend cannot be loaded: %s", reason != NULL ? reason : path);
  }
  *out_library = try_load(LIBRARY);
  if (*out_library != NULL) return EG_OK;
  const char *reason = dlerror();
  return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "there is no CUDA backend: %s, beside the program or in the loader's path",
                  reason != NULL ? reason : LIBRARY " is not found");
}

eg_status egi_backend_cuda(eg_context *ctx, const egi_backend **out_backend) {
  void *library = NULL;
  EG_TRY(load_library(ctx, &library));
  union {
    void *address;
    const egi_backend *(*function)(uint32_t abi);
  } entry = {.address = dlsym(library, "egi_cuda_backend")};
  const egi_backend *backend = entry.address != NULL ? entry.function(egi_backend_abi()) : NULL;
  if (backend == NULL)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, LIBRARY " is of another version of engraft than this program");
  *out_backend = backend;
  return EG_OK;
}

eg_status egi_backend_find(eg_context *ctx, const char *name, const egi_backend **out_backend) {
  if (name != NULL && strcmp(name, "cuda") == 0) return egi_backend_cuda(ctx, out_backend);
  if (name == NULL || strcmp(name, "cpu") != 0)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "there is no device \"%s\", only \"cpu\" and \"cuda\"",
                    name != NULL ? name : "");
  *out_backend = egi_backend_cpu();
  return EG_OK;
}
