/* The fuzz targets. Each makes a context whose allocator counts and refuses beyond a limit, feeds the bytes to one
 * reader, and checks what a caller relies on: a failure leaves one line of text, and every byte comes back. */
#include "fuzz.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "graph/graph.h"
#include "io/io.h"

typedef struct counter {
  size_t in_use, peak;
} counter;

static void *allocate(void *userdata, size_t size_bytes, size_t alignment) {
  counter *count = userdata;
  if (size_bytes > FUZZ_MAX_BYTES - count->in_use) return NULL;
  void *memory = aligned_alloc(alignment, (size_bytes + alignment - 1) / alignment * alignment);
  if (memory == NULL) return NULL;
  count->in_use += size_bytes;
  if (count->in_use > count->peak) count->peak = count->in_use;
  return memory;
}

static void release(void *userdata, void *memory, size_t size_bytes) {
  counter *count = userdata;
  assert(size_bytes <= count->in_use);
  count->in_use -= size_bytes;
  free(memory);
}

typedef eg_status (*reader)(eg_context *ctx, const uint8_t *bytes, size_t size, const char *directory);

static void run_reader(reader read, const uint8_t *bytes, size_t size, const char *directory, fuzz_result *out_result) {
  counter count = {0};
  eg_allocator allocator = {allocate, release, &count};
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  eg_context *ctx = NULL;
  options.allocator = &allocator;
  options.n_threads = 1;
  eg_status status = eg_context_create(&options, &ctx);
  assert(status == EG_OK);
  status = read(ctx, bytes, size, directory);
  const char *error = eg_context_error(ctx);
  assert(status != EG_ERROR_INTERNAL);
  assert(status == EG_OK || (error[0] != '\0' && strchr(error, '\n') == NULL));
  out_result->is_accepted = status == EG_OK;
  snprintf(out_result->error, sizeof(out_result->error), "%s", status == EG_OK ? "" : error);
  eg_context_destroy(ctx);
  assert(count.in_use == 0);
  out_result->peak_bytes = count.peak;
}

static int swallow(void *userdata, const void *bytes, size_t size_bytes) {
  (void)userdata;
  (void)bytes;
  (void)size_bytes;
  return 0;
}

static eg_status read_onnx(eg_context *ctx, const uint8_t *bytes, size_t size, const char *directory) {
  eg_model *model = NULL;
  eg_model_options options = EG_MODEL_OPTIONS_INIT;
  options.max_nodes = 20000; /* a loop may be unrolled to so many: an input takes no second */
  EG_TRY(eg_model_load_memory(ctx, bytes, size, directory, &options, &model));
  eg_status status = eg_model_rewrite(model, NULL, 0);
  if (status == EG_OK) status = eg_model_inspect(model, swallow, NULL);
  if (status == EG_OK) status = eg_model_print(model, swallow, NULL);
  eg_model_destroy(model);
  return status;
}

/* What was printed reads back as the same text. */
static eg_status print_and_read(eg_context *ctx, const egi_module *module, egi_text *first, egi_text *second) {
  egi_module *again = NULL;
  EG_TRY(egi_module_print(module, module->graphs[0], 0, first));
  EG_TRY(egi_text_status(first));
  eg_status status = egi_module_parse(ctx, egi_text_string(first), first->length, &again);
  if (status == EG_OK) status = egi_module_print(again, again->graphs[0], 0, second);
  if (status == EG_OK) status = egi_text_status(second);
  if (status != EG_OK && status != EG_ERROR_MEMORY)
    fprintf(stderr, "what was printed does not read back: %s\n%s", eg_context_error(ctx), egi_text_string(first));
  assert(status == EG_OK || status == EG_ERROR_MEMORY);
  egi_module_destroy(again);
  return status;
}

static eg_status read_text(eg_context *ctx, const uint8_t *bytes, size_t size, const char *directory) {
  egi_module *module = NULL;
  egi_text first, second;
  (void)directory;
  EG_TRY(egi_module_parse(ctx, (const char *)bytes, size, &module));
  egi_text_init(&first, ctx);
  egi_text_init(&second, ctx);
  eg_status status = module->n_graphs ? print_and_read(ctx, module, &first, &second) : EG_OK;
  assert(status != EG_OK || (first.length == second.length &&
                             memcmp(egi_text_string(&first), egi_text_string(&second), first.length) == 0));
  egi_text_free(&first);
  egi_text_free(&second);
  egi_module_destroy(module);
  return status;
}

/* The bytes as a file, for readers that map one. */
static void write_file(const uint8_t *bytes, size_t size, char *path) {
  int file = mkstemp(path);
  assert(file >= 0);
  for (size_t done = 0; done < size;) {
    ssize_t n = write(file, bytes + done, size - done);
    assert(n > 0);
    done += (size_t)n;
  }
  close(file);
}

static eg_status read_safetensors(eg_context *ctx, const uint8_t *bytes, size_t size, const char *directory) {
  char path[] = "engraft-fuzz-XXXXXX";
  egi_safetensors *file = NULL;
  egi_documents *documents = NULL;
  (void)directory;
  write_file(bytes, size, path);
  eg_status status = egi_safetensors_open(ctx, path, &file);
  uint64_t sum = 0;
  for (size_t i = 0; status == EG_OK && i < egi_safetensors_count(file); i++) {
    const egi_safetensor *tensor = egi_safetensors_at(file, i);
    for (uint64_t j = 0; j < tensor->size_bytes; j++) sum += tensor->data[j];
    assert(egi_safetensors_find(file, tensor->name) == tensor);
    assert(egi_safetensors_offset(file, tensor) + tensor->size_bytes <= size);
  }
  assert(sum <= UINT64_C(255) * size);
  egi_safetensors_close(file);
  if (status == EG_OK && egi_documents_read_safetensors(ctx, path, 16, &documents) == EG_OK)
    egi_documents_free(documents);
  unlink(path);
  return status;
}

static eg_status read_jsonl(eg_context *ctx, const uint8_t *bytes, size_t size, const char *directory) {
  char path[] = "engraft-fuzz-XXXXXX";
  egi_documents *documents = NULL;
  (void)directory;
  write_file(bytes, size, path);
  eg_status status = egi_documents_read_jsonl(ctx, path, 16, &documents);
  if (status == EG_OK) {
    assert(documents->offsets[documents->n_documents] == documents->n_tokens);
    for (size_t i = 0; i < documents->n_documents; i++) assert(documents->offsets[i] <= documents->offsets[i + 1]);
    egi_documents_free(documents);
  }
  unlink(path);
  return status;
}

static eg_status read_json(eg_context *ctx, const uint8_t *bytes, size_t size, const char *directory) {
  char path[] = "engraft-fuzz-XXXXXX";
  egi_module *module = NULL;
  egi_new_options options = {.dtype = EG_DTYPE_F32, .seed = 1};
  (void)directory;
  write_file(bytes, size, path);
  eg_status status = egi_huggingface_new(ctx, path, &options, &module);
  if (status == EG_OK) egi_module_destroy(module);
  unlink(path);
  return status;
}

#define TARGET(name)                                                                                          \
  static void run_##name(const uint8_t *bytes, size_t size, const char *directory, fuzz_result *out_result) { \
    run_reader(read_##name, bytes, size, directory, out_result);                                              \
  }
TARGET(onnx)
TARGET(text)
TARGET(safetensors)
TARGET(jsonl)
TARGET(json)

const fuzz_target *fuzz_find_target(const char *name) {
  static const fuzz_target targets[] = {{"onnx", run_onnx},
                                        {"text", run_text},
                                        {"safetensors", run_safetensors},
                                        {"jsonl", run_jsonl},
                                        {"json", run_json}};
  for (size_t i = 0; i < sizeof(targets) / sizeof(targets[0]); i++)
    if (strcmp(targets[i].name, name) == 0) return &targets[i];
  return NULL;
}
