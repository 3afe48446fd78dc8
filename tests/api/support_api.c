/* Fixture of the API tests. */
#include "support_api.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char config[] =
    "{\"model_type\":\"llama\",\"hidden_size\":16,\"intermediate_size\":24,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":48,\"rms_norm_eps\":1e-5,"
    "\"initializer_range\":0.2,\"hidden_act\":\"silu\",\"max_position_embeddings\":64}";

static void *test_allocate(void *userdata, size_t size_bytes, size_t alignment) {
  api_fixture *fixture = userdata;
  void *memory = NULL;
  if (++fixture->n_allocations == fixture->fail_at) return NULL;
  if (posix_memalign(&memory, alignment, size_bytes) != 0) return NULL;
  memset(memory, 0xa5, size_bytes); /* what is read before it is written shows */
  fixture->n_live++;
  return memory;
}

static void test_release(void *userdata, void *memory, size_t size_bytes) {
  api_fixture *fixture = userdata;
  memset(memory, 0x5a, size_bytes);
  free(memory);
  fixture->n_live--;
}

static void keep_warning(void *userdata, eg_log_level level, const char *message) {
  api_fixture *fixture = userdata;
  if (level == EG_LOG_DEBUG && strncmp(message, "checkpoints: rung", strlen("checkpoints: rung")) == 0)
    fixture->n_rungs++;
  if (level == EG_LOG_WARNING) snprintf(fixture->warning, sizeof fixture->warning, "%s", message);
}

eg_context *api_context(api_fixture *fixture, int n_threads) {
  eg_allocator allocator = {test_allocate, test_release, fixture};
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  eg_context *ctx = NULL;
  options.allocator = &allocator;
  options.log = keep_warning;
  options.log_userdata = fixture;
  options.n_threads = n_threads;
  return eg_context_create(&options, &ctx) == EG_OK ? ctx : NULL;
}

void api_must(const eg_context *ctx, eg_status status) {
  if (status != EG_OK) fail_msg("%s", eg_context_error(ctx));
}

void api_expect_error(const eg_context *ctx, const char *part) {
  const char *error = eg_context_error(ctx);
  if (strstr(error, part) == NULL) fail_msg("error \"%s\" does not name \"%s\"", error, part);
  assert_null(strchr(error, '\n'));
}

const char *api_path(api_fixture *fixture, char *buffer, size_t size, const char *name) {
  snprintf(buffer, size, "%s/%s", fixture->directory, name);
  return buffer;
}

void api_write(api_fixture *fixture, const char *name, const char *text) {
  char path[256];
  FILE *stream = fopen(api_path(fixture, path, sizeof path, name), "wb");
  assert_non_null(stream);
  assert_int_equal(fwrite(text, 1, strlen(text), stream), strlen(text));
  assert_int_equal(fclose(stream), 0);
}

static void write_model(api_fixture *fixture) {
  char path[256];
  egi_module *module;
  egi_new_options options = {.dtype = EG_DTYPE_F32, .seed = 3};
  api_write(fixture, "config.json", config);
  api_path(fixture, path, sizeof path, "config.json");
  api_must(fixture->ctx, egi_huggingface_new(fixture->ctx, path, &options, &module));
  api_path(fixture, fixture->model_path, sizeof fixture->model_path, "model.onnx");
  api_must(fixture->ctx, egi_module_export(module, module->graphs[0], fixture->model_path));
  egi_module_destroy(module);
}

int api_setup(void **state) {
  api_fixture *fixture = calloc(1, sizeof *fixture);
  const char *root = getenv("TMPDIR");
  if (fixture == NULL) return -1;
  snprintf(fixture->directory, sizeof fixture->directory, "%s/engraft-api-XXXXXX", root != NULL ? root : "/tmp");
  if (mkdtemp(fixture->directory) == NULL) return -1;
  fixture->ctx = api_context(fixture, 1);
  if (fixture->ctx == NULL) return -1;
  *state = fixture;
  write_model(fixture);
  return 0;
}

/* A folder of files and folders of files. */
static void remove_folder(const char *directory, int depth) {
  DIR *folder = opendir(directory);
  if (folder == NULL) return;
  for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
    char path[512];
    if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
    snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
    if (unlink(path) != 0 && depth > 0) remove_folder(path, depth - 1);
  }
  closedir(folder);
  rmdir(directory);
}

int api_teardown(void **state) {
  api_fixture *fixture = *state;
  eg_context_destroy(fixture->ctx);
  remove_folder(fixture->directory, 1);
  int has_leak = fixture->n_live != 0;
  free(fixture);
  return has_leak ? -1 : 0;
}

eg_model *api_model(api_fixture *fixture, eg_context *ctx) {
  eg_model *model;
  api_must(ctx, eg_model_load(ctx, fixture->model_path, NULL, &model));
  return model;
}

eg_dataset *api_dataset(eg_context *ctx, size_t count, uint32_t longest) {
  eg_document documents[16];
  static int32_t tokens[16][64];
  eg_dataset *dataset;
  assert_true(count <= 16 && longest <= 64);
  for (size_t d = 0; d < count; d++) {
    uint32_t length = longest - (uint32_t)(d % 3);
    for (uint32_t i = 0; i < length; i++) tokens[d][i] = (int32_t)((5 * d + 7 * i + i * i) % API_VOCABULARY);
    documents[d] = (eg_document){tokens[d], NULL, length};
  }
  api_must(ctx, eg_dataset_create(ctx, documents, count, &dataset));
  return dataset;
}

eg_trainer_options api_options(void) {
  eg_trainer_options options = EG_TRAINER_OPTIONS_INIT;
  options.rank = 4;
  options.alpha = 8;
  options.learning_rate = 1e-2;
  options.tokens = 64;
  options.n_steps = 10;
  return options;
}

float *api_read(eg_trainer *trainer, bool is_gradient, size_t *out_count) {
  size_t total = 0;
  float *all = NULL;
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    eg_parameter_info info;
    size_t count = 1;
    assert_int_equal(eg_trainer_parameter_info(trainer, i, &info), EG_OK);
    for (uint32_t axis = 0; axis < info.rank; axis++) count *= (size_t)info.dims[axis];
    all = realloc(all, (total + count) * sizeof *all);
    assert_non_null(all);
    eg_status status = is_gradient ? eg_trainer_read_gradient(trainer, i, all + total, count)
                                   : eg_trainer_read_parameter(trainer, i, all + total, count);
    assert_int_equal(status, EG_OK);
    total += count;
  }
  *out_count = total;
  return all;
}
