/* Fixture of the io tests. */
#include "support_io.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void keep_warning(void *userdata, eg_log_level level, const char *message) {
  io_fixture *fixture = userdata;
  if (level == EG_LOG_WARNING) snprintf(fixture->warning, sizeof fixture->warning, "%s", message);
}

int io_setup(void **state) {
  io_fixture *fixture = calloc(1, sizeof *fixture);
  const char *root = getenv("TMPDIR");
  if (fixture == NULL) return -1;
  snprintf(fixture->directory, sizeof fixture->directory, "%s/engraft-io-XXXXXX", root != NULL ? root : "/tmp");
  if (mkdtemp(fixture->directory) == NULL) return -1;
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  options.log = keep_warning;
  options.log_userdata = fixture;
  options.n_threads = 1;
  if (eg_context_create(&options, &fixture->ctx) != EG_OK) return -1;
  *state = fixture;
  return 0;
}

int io_teardown(void **state) {
  io_fixture *fixture = *state;
  static const char *const names[] = {"a.safetensors",     "adapter_config.json", "adapter_model.safetensors",
                                      "adapter_model.bin", "data.jsonl",          "text.txt",
                                      "adapter.out"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    snprintf(fixture->path, sizeof fixture->path, "%s/%s", fixture->directory, names[i]);
    unlink(fixture->path);
  }
  int is_empty = rmdir(fixture->directory);
  int has_leak = egi_bytes_in_use(fixture->ctx, EGI_PURPOSE_DATA) != 0;
  eg_context_destroy(fixture->ctx);
  free(fixture);
  return is_empty != 0 || has_leak ? -1 : 0;
}

const char *io_write(io_fixture *fixture, const char *name, const void *bytes, size_t size_bytes) {
  snprintf(fixture->path, sizeof fixture->path, "%s/%s", fixture->directory, name);
  FILE *stream = fopen(fixture->path, "wb");
  assert_non_null(stream);
  assert_int_equal(fwrite(bytes, 1, size_bytes, stream), size_bytes);
  assert_int_equal(fclose(stream), 0);
  return fixture->path;
}

void io_expect_error(io_fixture *fixture, const char *part) {
  const char *error = eg_context_error(fixture->ctx);
  if (strstr(error, part) == NULL) fail_msg("error \"%s\" does not name \"%s\"", error, part);
  assert_null(strchr(error, '\n'));
}
