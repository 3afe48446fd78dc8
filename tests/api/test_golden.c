/* End to end against PyTorch, through the public interface: logits, logits with an adapter, ten LoRA steps (losses,
 * first gradients, final adapters) and full-training gradients, for every exporter's file of every model in tests/data.
 * The references are those of tests/data/make_fixtures.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/io.h"

/* float32 against float32: largest difference of logits over the largest logit; relative loss; norm-wise gradients. */
static const double logits_tolerance = 1e-4, loss_tolerance = 1e-5, gradient_tolerance = 1e-3, final_tolerance = 5e-5;

typedef struct golden {
  eg_context *ctx;
  egi_arena arena;
  egi_safetensors *reference;
  eg_model *model;
  eg_dataset *dataset;
  const char *adapter; /* PEFT folder with lora.init */
  const char *label;   /* "llama/model.dynamo-op20-eager.onnx" */
  int64_t batch, sequence;
} golden;

static void must(golden *g, eg_status status) {
  if (status != EG_OK) fail_msg("%s: %s", g->label, eg_context_error(g->ctx));
}

static void within(golden *g, const char *what, double error, double limit) {
  if (!(error <= limit)) fail_msg("%s: %s is off by %.3g, limit %.3g", g->label, what, error, limit);
}

static const egi_safetensor *find(golden *g, const char *name) {
  const egi_safetensor *tensor = egi_safetensors_find(g->reference, name);
  if (tensor == NULL) fail_msg("%s: the reference has no %s", g->label, name);
  return tensor;
}

static const float *floats(const egi_safetensor *tensor, egi_arena *arena) {
  float *copy = egi_arena_get(arena, (size_t)tensor->size_bytes, 1);
  assert_non_null(copy);
  memcpy(copy, tensor->data, tensor->size_bytes);
  return copy;
}

static const int64_t *integers(golden *g, const char *name) {
  const egi_safetensor *tensor = find(g, name);
  int64_t *copy = egi_arena_get(&g->arena, (size_t)tensor->size_bytes, 1);
  assert_non_null(copy);
  memcpy(copy, tensor->data, tensor->size_bytes);
  return copy;
}

static double norm_error(const float *got, const float *wanted, size_t count, double floor) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < count; i++) {
    difference += ((double)got[i] - (double)wanted[i]) * ((double)got[i] - (double)wanted[i]);
    size += (double)wanted[i] * (double)wanted[i];
  }
  return sqrt(difference) / fmax(sqrt(size), floor);
}

/* Documents without their padding, as the loader would see them. */
static void make_dataset(golden *g) {
  const int64_t *ids = integers(g, "input_ids"), *mask = integers(g, "attention_mask"), *labels = integers(g, "labels");
  eg_document *documents = EGI_NEW(&g->arena, eg_document, (size_t)g->batch);
  for (int64_t row = 0; row < g->batch; row++) {
    int32_t *tokens = EGI_NEW(&g->arena, int32_t, (size_t)g->sequence);
    int32_t *targets = EGI_NEW(&g->arena, int32_t, (size_t)g->sequence);
    for (int64_t i = 0; i < g->sequence; i++) {
      int64_t at = row * g->sequence + i;
      if (mask[at] == 0) continue;
      tokens[documents[row].n_tokens] = (int32_t)ids[at];
      targets[documents[row].n_tokens++] = (int32_t)labels[at];
    }
    documents[row].input_ids = tokens;
    documents[row].labels = targets;
  }
  must(g, eg_dataset_create(g->ctx, documents, (size_t)g->batch, &g->dataset));
}

/* lora.init.* as a PEFT folder in the working directory. */
static void write_adapter(golden *g) {
  static const char prefix[] = "lora.init.";
  size_t count = 0, total = egi_safetensors_count(g->reference);
  egi_safetensor *tensors = EGI_NEW(&g->arena, egi_safetensor, total);
  egi_text targets;
  egi_text_init(&targets, g->ctx);
  for (size_t i = 0; i < total; i++) {
    const egi_safetensor *tensor = egi_safetensors_at(g->reference, i);
    if (!egi_has_prefix(tensor->name, prefix)) continue;
    tensors[count] = *tensor;
    tensors[count++].name = tensor->name + sizeof prefix - 1;
    if (!egi_has_suffix(tensor->name, ".lora_A.weight")) continue;
    const char *path = tensor->name + sizeof prefix - 1 + strlen("base_model.model.");
    egi_text_format(&targets, "%s%.*s", targets.length > 0 ? "," : "", (int)(strlen(path) - strlen(".lora_A.weight")),
                    path);
  }
  assert_true(count > 0);
  egi_peft_config config = {.rank = 4, .alpha = 8, .targets = egi_text_string(&targets), .base_model = ""};
  g->adapter = egi_arena_format(&g->arena, "golden-adapter-%ld", (long)getpid());
  must(g, egi_peft_write(g->ctx, g->adapter, &config, tensors, count));
  egi_text_free(&targets);
}

static void remove_adapter(golden *g) {
  static const char *const files[] = {"adapter_model.safetensors", "adapter_config.json"};
  for (size_t i = 0; i < EGI_COUNT(files); i++) unlink(egi_path_join(&g->arena, g->adapter, files[i]));
  rmdir(g->adapter);
}

static void check_logits(golden *g, const char *adapter, const char *reference) {
  eg_runner_options options = EG_RUNNER_OPTIONS_INIT;
  eg_runner *runner;
  const eg_tensor *outputs;
  size_t n_outputs;
  options.adapter = adapter;
  must(g, eg_runner_create(g->model, &options, &runner));
  const eg_tensor inputs[] = {
      {"input_ids", EG_DTYPE_I64, 2, {g->batch, g->sequence}, integers(g, "input_ids")},
      {"attention_mask", EG_DTYPE_I64, 2, {g->batch, g->sequence}, integers(g, "attention_mask")},
  };
  must(g, eg_runner_run(runner, inputs, EGI_COUNT(inputs), &outputs, &n_outputs));
  assert_int_equal(n_outputs, 1);
  assert_string_equal(outputs[0].name, "logits");
  assert_int_equal(outputs[0].rank, 3);
  int64_t vocabulary = outputs[0].dims[2];
  const float *got = outputs[0].data, *wanted = floats(find(g, reference), &g->arena);
  const int64_t *mask = integers(g, "attention_mask");
  double error = 0, largest = 0;
  for (int64_t row = 0; row < g->batch * g->sequence; row++)
    for (int64_t v = 0; v < vocabulary && mask[row] != 0; v++) {
      double difference = fabs((double)got[row * vocabulary + v] - (double)wanted[row * vocabulary + v]);
      if (isnan(difference) || difference > error) error = difference; /* a NaN stays */
      largest = fmax(largest, fabs((double)wanted[row * vocabulary + v]));
    }
  within(g, reference, error / largest, logits_tolerance);
  eg_runner_destroy(runner);
}

/* Every parameter's gradient (or value) against the reference tensors with this prefix; none may be missing. */
static void check_parameters(golden *g, const eg_trainer *trainer, const char *prefix, bool is_gradient, double limit) {
  size_t n_parameters = eg_trainer_parameter_count(trainer), n_references = 0;
  double largest = 0;
  for (size_t i = 0; i < egi_safetensors_count(g->reference); i++) {
    const egi_safetensor *tensor = egi_safetensors_at(g->reference, i);
    if (!egi_has_prefix(tensor->name, prefix)) continue;
    const float *values = floats(tensor, &g->arena);
    double square = 0;
    for (size_t k = 0; k < tensor->size_bytes / 4; k++) square += (double)values[k] * (double)values[k];
    largest = fmax(largest, sqrt(square));
    n_references++;
  }
  assert_true(n_references > 0);
  assert_int_equal(n_parameters, n_references);
  for (size_t i = 0; i < n_parameters; i++) {
    eg_parameter_info info;
    size_t count = 1;
    must(g, eg_trainer_parameter_info(trainer, i, &info));
    const egi_safetensor *tensor = find(g, egi_arena_format(&g->arena, "%s%s", prefix, info.name));
    assert_int_equal(info.rank, tensor->rank);
    for (uint32_t k = 0; k < info.rank; k++) {
      assert_int_equal(info.dims[k], tensor->dims[k]);
      count *= (size_t)info.dims[k];
    }
    float *got = EGI_NEW(&g->arena, float, count);
    must(g, is_gradient ? eg_trainer_read_gradient(trainer, i, got, count)
                        : eg_trainer_read_parameter(trainer, i, got, count));
    within(g, tensor->name, norm_error(got, floats(tensor, &g->arena), count, 1e-4 * largest), limit);
  }
}

static void check_lora(golden *g) {
  eg_trainer_options options = EG_TRAINER_OPTIONS_INIT;
  eg_trainer *trainer;
  options.init_adapter = g->adapter;
  options.learning_rate = 5e-3;
  options.weight_decay = 0.1;
  options.clip = 0.3;
  options.tokens = (uint32_t)(g->batch * g->sequence);
  options.n_steps = 10;
  must(g, eg_trainer_create(g->model, g->dataset, &options, &trainer));
  const float *curve = floats(find(g, "lora.curve"), &g->arena);
  for (size_t step = 0; step < 10; step++) {
    eg_step_report report;
    must(g, eg_trainer_step(trainer, &report));
    within(g, "the loss", fabs(report.loss - (double)curve[step]) / (double)curve[step], loss_tolerance);
    if (step == 0) check_parameters(g, trainer, "lora.grad.", true, gradient_tolerance);
  }
  check_parameters(g, trainer, "lora.final.", false, final_tolerance);
  eg_trainer_destroy(trainer);
}

static void check_full(golden *g) {
  eg_trainer_options options = EG_TRAINER_OPTIONS_INIT;
  eg_trainer *trainer;
  eg_step_report report;
  options.full = 1;
  options.tokens = (uint32_t)(g->batch * g->sequence);
  options.n_steps = 1;
  must(g, eg_trainer_create(g->model, g->dataset, &options, &trainer));
  must(g, eg_trainer_step(trainer, &report));
  double wanted = (double)floats(find(g, "loss"), &g->arena)[0];
  within(g, "the loss in full training", fabs(report.loss - wanted) / wanted, loss_tolerance);
  check_parameters(g, trainer, "grad.", true, gradient_tolerance);
  eg_trainer_destroy(trainer);
}

/* `file` is in `place`; the reference is in `directory`. */
static void check_file(const char *directory, const char *place, const char *file) {
  golden g = {0};
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  char label[512], path[1024];
  options.n_threads = 2;
  snprintf(label, sizeof label, "%s/%s", strrchr(directory, '/') + 1, file);
  g.label = label;
  assert_int_equal(eg_context_create(&options, &g.ctx), EG_OK);
  egi_arena_init(&g.arena, g.ctx, EGI_PURPOSE_DATA);
  const char *rounded = strstr(file, "bfloat16") != NULL  ? ".bfloat16"
                        : strstr(file, "float16") != NULL ? ".float16"
                        : strstr(file, "int4") != NULL    ? ".int4"
                                                          : "";
  snprintf(path, sizeof path, "%s/ref%s.safetensors", directory, rounded);
  must(&g, egi_safetensors_open(g.ctx, path, &g.reference));
  snprintf(path, sizeof path, "%s/%s", place, file);
  must(&g, eg_model_load(g.ctx, path, NULL, &g.model));
  const egi_safetensor *ids = find(&g, "input_ids");
  g.batch = ids->dims[0];
  g.sequence = ids->dims[1];
  make_dataset(&g);
  write_adapter(&g);
  check_logits(&g, NULL, "logits");
  check_logits(&g, g.adapter, "lora.logits");
  check_lora(&g);
  if (strstr(file, "int4") == NULL) check_full(&g); /* quantised weights stay as they are */
  remove_adapter(&g);
  eg_dataset_destroy(g.dataset);
  eg_model_destroy(g.model);
  egi_safetensors_close(g.reference);
  egi_arena_clear(&g.arena);
  eg_context_destroy(g.ctx);
}

static void all_exports_agree_with_pytorch(const char *model, size_t n_expected) {
  char directory[512];
  size_t n_files = 0;
  snprintf(directory, sizeof directory, "%s/%s", EGI_TEST_DATA, model);
  DIR *folder = opendir(directory);
  assert_non_null(folder);
  for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
    if (!egi_has_prefix(entry->d_name, "model.") || !egi_has_suffix(entry->d_name, ".onnx")) continue;
    check_file(directory, directory, entry->d_name);
    n_files++;
  }
  closedir(folder);
  assert_int_equal(n_files, n_expected);
}

/* ---- Hugging Face folders ---- */

static void copy_file(const char *from, const char *to) {
  char buffer[65536];
  FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
  size_t n;
  assert_non_null(in);
  assert_non_null(out);
  while ((n = fread(buffer, 1, sizeof buffer, in)) > 0) assert_int_equal(fwrite(buffer, 1, n, out), n);
  fclose(in);
  assert_int_equal(fclose(out), 0);
}

/* An ONNX file beside a copy of the folder's weights, made from its config.json. */
static void make_file(const char *config, const char *place, const char *onnx_path) {
  eg_context *ctx;
  egi_weight_files *weights;
  egi_module *module;
  assert_int_equal(eg_context_create(NULL, &ctx), EG_OK);
  if (egi_weight_files_open(ctx, place, &weights) != EG_OK) fail_msg("%s", eg_context_error(ctx));
  const egi_new_options options = {EG_DTYPE_UNDEFINED, 0, weights};
  if (egi_huggingface_new(ctx, config, &options, &module) != EG_OK) fail_msg("%s", eg_context_error(ctx));
  if (egi_module_export(module, module->graphs[0], onnx_path) != EG_OK) fail_msg("%s", eg_context_error(ctx));
  egi_module_destroy(module);
  egi_weight_files_close(weights);
  eg_context_destroy(ctx);
}

static void folder_agrees_with_pytorch(const char *model) {
  char directory[512], config[1024], from[1024], place[64], weights[128], onnx_path[128];
  snprintf(directory, sizeof directory, "%s/%s", EGI_TEST_DATA, model);
  snprintf(config, sizeof config, "%s/%s/hf/config.json", EGI_TEST_DATA, model);
  snprintf(from, sizeof from, "%s/%s/hf/model.safetensors", EGI_TEST_DATA, model);
  snprintf(place, sizeof place, "golden-new-%ld", (long)getpid());
  snprintf(weights, sizeof weights, "%s/model.safetensors", place);
  snprintf(onnx_path, sizeof onnx_path, "%s/model.onnx", place);
  assert_int_equal(mkdir(place, 0777), 0);
  copy_file(from, weights);
  make_file(config, place, onnx_path);
  check_file(directory, place, "model.onnx");
  unlink(weights);
  unlink(onnx_path);
  rmdir(place);
}

static void new_qwen3(void **state) {
  (void)state;
  folder_agrees_with_pytorch("qwen3");
}

static void new_gpt2(void **state) {
  (void)state;
  folder_agrees_with_pytorch("gpt2");
}

/* ---- */

static void llama(void **state) {
  (void)state;
  all_exports_agree_with_pytorch("llama", 6);
}

static void qwen2(void **state) {
  (void)state;
  all_exports_agree_with_pytorch("qwen2", 3);
}

static void qwen3(void **state) {
  (void)state;
  all_exports_agree_with_pytorch("qwen3", 4);
}

static void qwen3_moe(void **state) {
  (void)state;
  all_exports_agree_with_pytorch("qwen3_moe", 4);
}

static void gpt_oss(void **state) {
  (void)state;
  all_exports_agree_with_pytorch("gpt_oss", 5);
}

static void gpt2(void **state) {
  (void)state;
  all_exports_agree_with_pytorch("gpt2", 3);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(llama),     cmocka_unit_test(qwen2),    cmocka_unit_test(qwen3),     cmocka_unit_test(gpt2),
      cmocka_unit_test(new_qwen3), cmocka_unit_test(new_gpt2), cmocka_unit_test(qwen3_moe), cmocka_unit_test(gpt_oss)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
